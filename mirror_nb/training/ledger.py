"""What each replica alone knows of a training, where it outlives the replica: in memory that the controller owns.

Sums of losses, metrics' states, and buffers that changed, such as running statistics.

    replica ─ Page.write, before its gradients go out ─▶ two entries a replica ─▶ Ledger.read, when it has died

The gradients of a step are there for the others only after the entry that counts it, so whoever has stepped finds the
entries of all for that step. Two are kept: the others may not have stepped yet. Knows memory and totals; knows no
replica's work. Where there is no such memory, or an entry is too large, there is none, and who reads gets None.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import struct
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from mirror_nb.collectives.segments import Address, Segment
from mirror_nb.errors import ReplicaError
from mirror_nb.tensors.layouts import as_row, is_block
from mirror_nb.training.loop import Totals

ENTRY_BYTES = 1 << 16
# For sums and metrics' states; memory is taken as it is written.
MOST_BYTES = 1 << 26
# Of an entry, buffers included.
_HEAD = struct.Struct("@QQ")
# The number of the entry, stored last, and the bytes of its pickle.
_SCALARS = (torch.float32, torch.float64, torch.int64, torch.bool)
# Sums mostly are of these, without a dimension: a number and a place here take a fifth of an array's time.
_CODES = {dtype: code for code, dtype in enumerate(_SCALARS)}


class Landmark(NamedTuple):
    """Where a training stands after a step of the optimizer, or when an epoch begins."""

    run: str
    # Token of the job.
    updates: int
    # Steps that the model has had.
    epoch: int
    step: int
    # Global batches done of the epoch.
    grown: int = 0
    # How often the network has got other parts since the job began: buffers have other numbers then.


@final
class Page:
    """One replica's part of the ledger, in the replica."""

    def __init__(self, address: Address, replica_id: int, num_replicas: int) -> None:
        # The array keeps the tensor that it looks at.
        self._memory = Segment.open(address).memory.numpy()
        self._size = address.nbytes // (2 * num_replicas)
        self._first = 2 * replica_id

    def write(self, landmark: Landmark, totals: Totals, buffers: dict[int, Tensor]) -> bool:
        """Keep what was added up by then, in the place of the entry before the last; False if it is too large."""
        content = _pickled((tuple(landmark), totals.plain(), buffers))
        place = self._size * (self._first + landmark.updates % 2)
        if len(content) > self._size - _HEAD.size:
            return False
        memory = self._memory.data
        _HEAD.pack_into(memory, place, 0, len(content))
        memory[place + _HEAD.size : place + _HEAD.size + len(content)] = content
        # Last: an entry that was broken off counts for nothing.
        _HEAD.pack_into(memory, place, landmark.updates + 1, len(content))
        return True


@final
class Ledger:
    """All replicas' entries, in the controller, until `close`; `buffer_bytes`: of a replica's buffers."""

    def __init__(self, num_replicas: int, buffer_bytes: int) -> None:
        self._segment: Segment | None = None
        # With some to spare for what says which is which; in whole pages.
        self._size = min(ENTRY_BYTES + 2 * buffer_bytes, MOST_BYTES) // 4096 * 4096
        # Without it, what a dead replica had added up is not known.
        with contextlib.suppress(ReplicaError):
            self._segment = Segment.create(2 * self._size * num_replicas)

    @property
    def address(self) -> Address | None:
        """Where replicas find it; None where there is no such memory."""
        return None if self._segment is None else self._segment.address

    def read(self, replica_id: int, landmark: Landmark) -> tuple[Totals, dict[int, Tensor]] | None:
        """Return what a replica had added up by then, and its buffers by number; None if it wrote nothing.

        Where it and the others were on two sides of an epoch's beginning, nothing is added up.
        """
        if self._segment is None:
            return None
        memory = self._segment.memory.numpy().data
        place = self._size * (2 * replica_id + landmark.updates % 2)
        number, length = _HEAD.unpack_from(memory, place)
        if number != landmark.updates + 1:
            return None
        found, plain, buffers = pickle.loads(memory[place + _HEAD.size : place + _HEAD.size + length])
        left = Landmark(*found)
        if left != landmark._replace(epoch=left.epoch, step=left.step):
            return None
        return Totals(**plain) if left == landmark else Totals(), buffers

    def close(self) -> None:
        """Give the memory back; replicas that have it open keep it as long."""
        if self._segment is not None:
            self._segment.withdraw()


def _pickled(content: Any) -> bytes:
    # A tensor by its array, or its number: by torch's own reducer it would take ten times as long.
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced}
    pickler.dump(content)
    return file.getvalue()


def _reduced(tensor: Tensor) -> tuple[Any, ...]:
    code = _CODES.get(tensor.dtype) if not tensor.ndim else None
    if code is not None:
        return _as_scalar, (tensor.item(), code)
    whole = tensor.detach()
    if not is_block(whole):
        # Sparse, say; what it is made of comes here again.
        return whole.__reduce_ex__(5)
    try:
        return torch.from_numpy, (whole.numpy(),)
    except TypeError:
        # Of a dtype that NumPy has not: bfloat16, float8.
        return _of_bytes, (as_row(whole).view(torch.uint8).numpy(), whole.dtype, tuple(whole.shape))


def _as_scalar(number: float, code: int) -> Tensor:
    return torch.tensor(number, dtype=_SCALARS[code], device="cpu")


def _of_bytes(array: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(array).view(dtype).reshape(shape)
