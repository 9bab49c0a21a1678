"""Memory that all replicas of a group map, a part each, and where in it a tensor lies. Knows no collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from mirror_nb.collectives.parts import REMEMBERED, cut, slice_of
from mirror_nb.errors import ReplicaError

BLOCK_BYTES = 512 * 1024
_OFFSET_BITS = 40


@final
@dataclass(frozen=True, slots=True)
class Region:
    """What one `allocate` gave."""

    begins: int
    # Address of this replica's part.
    nbytes: int
    parts: tuple[Tensor, ...]
    # uint8, by replica id.

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are of this replica's part."""
        return self.begins <= address and address + nbytes <= self.begins + self.nbytes


@final
class Regions:
    """The regions of a group, by the number of the `allocate` that made them: the same on all replicas."""

    def __init__(self, replica_id: int, num_replicas: int) -> None:
        self._replica_id = replica_id
        self._num_replicas = num_replicas
        self._regions: list[Region | None] = []
        self._plans: dict[Any, list[tuple[list[Tensor], Tensor]]] = {}

    def add(self, parts: Sequence[Tensor]) -> None:
        """Take in what was allocated: bytes by replica id."""
        mine = parts[self._replica_id]
        self._regions.append(Region(mine.data_ptr(), mine.numel(), tuple(parts)))

    def release(self, tensor: Tensor) -> None:
        """Let go of the region that holds a tensor."""
        for i, region in enumerate(self._regions):
            if region is not None and region.holds(tensor.data_ptr(), 1):
                self._regions[i] = None
        self._plans.clear()

    def clear(self) -> None:
        """Let go of all."""
        self._regions.clear()
        self._plans.clear()

    def held(self) -> list[Region]:
        """Return those that were not released."""
        return [region for region in self._regions if region is not None]

    def location(self, flat: Tensor, nbytes: int) -> int:
        """Say where all find it: number and offset in one integer; 0 for ordinary memory."""
        if self._regions and nbytes:
            address = flat.data_ptr()
            for i, region in enumerate(self._regions):
                if region is not None and region.holds(address, nbytes):
                    return ((i + 1) << _OFFSET_BITS) + address - region.begins
        return 0

    def blocks(self, location: int, flat: Tensor) -> list[tuple[list[Tensor], Tensor]]:
        """Return the blocks of this replica's slice, each on all replicas and on this one."""
        key = location, flat.dtype, flat.numel()
        blocks = self._plans.get(key)
        if blocks is None:
            region = self._regions[(location >> _OFFSET_BITS) - 1]
            if region is None:
                raise ReplicaError("memory of `allocate` was released while it was reduced; wait first, then release")
            offset = location & ((1 << _OFFSET_BITS) - 1)
            whole = cut([part[offset:] for part in region.parts], flat.dtype, flat.numel())
            begin, end = slice_of(flat.numel(), self._replica_id, self._num_replicas)
            step = BLOCK_BYTES // flat.element_size()
            with torch.inference_mode(False):
                cuts = [[part[low : min(low + step, end)] for part in whole] for low in range(begin, end, step)]
            blocks = [(parts, parts[self._replica_id]) for parts in cuts]
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            self._plans[key] = blocks
        return blocks
