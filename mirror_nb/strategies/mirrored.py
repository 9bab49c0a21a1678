"""MirroredStrategy inside a replica: what a `%%mirrored` cell finds bound as `strategy`.

The strategy as the controller holds it comes with the Python API.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
import torch.distributed as dist

from mirror_nb.data import DistributedDataset, Loaders
from mirror_nb.errors import UsageError
from mirror_nb.replica.runtime import Replica
from mirror_nb.strategies.base import Strategy

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@final
class ReplicaStrategy(Strategy):
    """The strategy as one of its replicas sees it: calls run here, reductions talk to the peers."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._loaders = Loaders()

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over which gradients are aggregated."""
        return self._replica.identity.num_replicas

    @property
    def replica_id(self) -> int:
        """This replica's id, from 0."""
        return self._replica.identity.replica_id

    @property
    def device(self) -> torch.device:
        """This replica's device."""
        return self._replica.identity.device

    def scope(self) -> AbstractContextManager[Any]:
        """Return the scope; a cell is in it already, so code written with `with strategy.scope():` works too."""
        return contextlib.nullcontext(self)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call `fn(*args, **kwargs)` here: every replica runs the cell, so every replica calls it.

        Raises UsageError when `args` is no tuple or list, or `kwargs` no dict.
        """
        if not isinstance(args, (tuple, list)):
            raise UsageError(f"`args` must be a tuple or a list, not {type(args).__name__}; write args=(x,)")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise UsageError(f"`kwargs` must be a dict, not {type(kwargs).__name__}")
        return fn(*args, **(kwargs or {}))

    def reduce(self, op: str, value: Any) -> torch.Tensor:
        """Return `value` reduced over the replicas, the same on each.

        `op`: "sum", "mean", "max" or "min". `value`: a number, or a tensor of equal shape on all replicas.
        Raises UsageError for another op; what the collective raises where shapes differ.
        """
        self._require_all("reduce")
        name = str(op).lower().rpartition(".")[2]
        if name not in _OPS:
            raise UsageError(f"`op` is {op!r}; it must be one of {', '.join(_OPS)}")
        tensor = torch.as_tensor(value).detach()
        if name == "mean" and not tensor.is_floating_point() and not tensor.is_complex():
            tensor = tensor.to(torch.get_default_dtype())
        total = tensor.to(self.device, copy=True).contiguous()
        if self.num_replicas_in_sync > 1:
            dist.all_reduce(total, _OPS[name])
        return total / self.num_replicas_in_sync if name == "mean" else total

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward() accumulates local gradients.

        The first backward() after it reduces all of them.
        """
        return self._replica.gradients.no_sync()

    def distribute_dataset(
        self, source: Any, *, batch_size: int | None = None, shuffle: bool = False, drop_last: bool = False
    ) -> DistributedDataset:
        """Return this replica's shares of the global batches of `source`.

        `source`: a DataLoader, whose batch size is the global one, or tensors or arrays (one, or a tuple or dict of
        them, equally long) with `batch_size`, examples of a global batch. Replica i of n gets examples
        [i*c, (i+1)*c) of a batch of b, c = ceil(b / n), on its device; late replicas may get none and still take
        part. Source: tf.distribute's rule for the last batch. Raises UsageError for anything else.
        """
        replica = self._replica
        return DistributedDataset(
            source,
            replica_id=self.replica_id,
            num_replicas=self.num_replicas_in_sync,
            device=self.device,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            randomness=replica.scope.shared_randomness,
            agree=self._agree,
            on_batch=self._on_batch,
            on_end=replica.gradients.clear_shares,
            loaders=self._loaders,
        )

    experimental_distribute_dataset = distribute_dataset

    def _on_batch(self, local_examples: int, global_examples: int) -> None:
        self._replica.scope.start_running()
        self._replica.gradients.set_shares(local_examples, global_examples)

    def _agree(self, state: bytes) -> bytes:
        """Return replica 0's bytes on every replica."""
        if self.num_replicas_in_sync == 1:
            return state
        self._require_all("distribute_dataset")
        length = torch.tensor([len(state)], device=self.device)
        dist.broadcast(length, 0)
        data = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.replica_id == 0:
            data.copy_(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        dist.broadcast(data, 0)
        return data.cpu().numpy().tobytes()

    def _require_all(self, what: str) -> None:
        if self._replica.partial:
            raise UsageError(f"{what} needs all replicas, but --replicas leaves some out of this cell")

    def __repr__(self) -> str:
        return f"<MirroredStrategy: replica {self.replica_id} of {self.num_replicas_in_sync}, {self.device}>"


def setup(replica: Replica) -> dict[str, Any]:
    """Return the names that a replica's cells find bound, besides its id and device."""
    return {"strategy": ReplicaStrategy(replica)}


SETUP = f"{__name__}:{setup.__name__}"
# For a pool: what its replicas call to get these names.
