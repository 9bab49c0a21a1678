"""Python objects that replicas send each other by torch.distributed, sealed: unpickled only if a replica wrote them.

`all_gather_object`, `broadcast_object_list` and their kin unpickle what arrives over gloo, whose sockets on loopback
any user of the machine can connect to. With a key that only the replicas and their controller have, what somebody
else put there is an error and no code. Knows torch's two functions through which all of them go; knows no pools.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d

from mirror_nb.errors import ReplicaError

SEAL_BYTES = 32
_wrapped: set[str] = set()


def seal_objects(key: bytes) -> bool:
    """Seal all objects from here on; return whether this torch has what it takes. A second call does nothing.

    Every process of a group has to do it, with the same key.
    """
    writes = getattr(distributed_c10d, "_object_to_tensor", None)
    reads = getattr(distributed_c10d, "_tensor_to_object", None)
    if writes is None or reads is None:
        return False
    if not _wrapped:
        _wrapped.update(("_object_to_tensor", "_tensor_to_object"))
        distributed_c10d._object_to_tensor = _sealing(writes, key)
        distributed_c10d._tensor_to_object = _opening(reads, key)
    return True


def _sealing(original: Callable[..., Any], key: bytes) -> Callable[..., Any]:
    @functools.wraps(original)
    def object_to_tensor(obj: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        tensor, size = original(obj, device, *args, **kwargs)
        seal = torch.frombuffer(bytearray(_seal(tensor, key)), dtype=torch.uint8).to(tensor.device)
        return torch.cat([tensor, seal]), size + SEAL_BYTES

    return object_to_tensor


def _opening(original: Callable[..., Any], key: bytes) -> Callable[..., Any]:
    @functools.wraps(original)
    def tensor_to_object(tensor: torch.Tensor, tensor_size: Any, *args: Any, **kwargs: Any) -> Any:
        end = int(tensor_size) - SEAL_BYTES
        body, seal = tensor[: max(end, 0)], tensor[max(end, 0) : max(end, 0) + SEAL_BYTES]
        if end < 0 or not hmac.compare_digest(_seal(body, key), seal.cpu().numpy().tobytes()):
            raise ReplicaError(
                "an object that arrived over the process group was written by no replica of this session; it was "
                "not opened. Somebody else may be connected to the replicas' ports on 127.0.0.1"
            )
        return original(body, end, *args, **kwargs)

    return tensor_to_object


def _seal(body: torch.Tensor, key: bytes) -> bytes:
    return hmac.new(key, body.cpu().numpy().tobytes(), hashlib.sha256).digest()
