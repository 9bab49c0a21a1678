"""The parts that replicas lay out side by side in shared memory, and how they become one.

Knows tensors on the CPU. Knows no waiting, and not who may read what when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from mirror_nb.collectives.headers import HALF, Fold

REMEMBERED = 512
# Views of one memory, or plans, that are kept: to make them takes longer than a small sum.
_ALIGNMENT = 64
_COMBINE: tuple[Callable[..., Tensor], ...] = (torch.add, torch.add, torch.maximum, torch.minimum, torch.mul)
# By Fold.


@final
class Rows:
    """Memory of several places, in each of which every replica has a row of bytes."""

    def __init__(self, memory: Tensor) -> None:
        # uint8, places × replicas × bytes.
        self._memory = memory
        self._views: list[dict[tuple[torch.dtype, int], list[Tensor]]] = [{} for _ in range(len(memory))]

    def of(self, place: int, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """Return so many elements at the beginning of each replica's row in a place."""
        known = self._views[place]
        views = known.get((dtype, numel))
        if views is None:
            if len(known) >= REMEMBERED // len(self._views):
                known.clear()
            views = known[dtype, numel] = cut(self._memory[place], dtype, numel)
        return views

    def bytes_of(self, place: int, begin: int, end: int) -> Tensor:
        """Return these bytes of each replica's row in a place."""
        return self._memory[place, :, begin:end]


@final
class Folder:
    """Makes parts one, always in the order replica 0, 1, 2, …; bf16 and fp16 in fp32, rounded once."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def fold(self, parts: Sequence[Tensor], out: Tensor, fold: Fold) -> None:
        """Combine `parts` in the order of replica ids into `out`, which may be one of them."""
        combine = _COMBINE[fold]
        last = len(parts) - 1
        if out.dtype in HALF:
            total = self.scratch(out.numel(), torch.float32)
            total.copy_(parts[0])
            for part in parts[1:]:
                combine(total, part, out=total)
            out.copy_(total.div_(len(parts)) if fold is Fold.MEAN else total)
            return
        # In `out` itself, unless that is a part which is yet to be read.
        total = out if last <= 1 else self.scratch(out.numel(), out.dtype)
        combine(parts[0], parts[1], out=total) if last else out.copy_(parts[0])
        for i in range(2, last + 1):
            total = combine(total, parts[i], out=out if i == last else total)
        if fold is Fold.MEAN:
            out.div_(len(parts))

    def scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory of this process for so many elements, until the next one is asked for."""
        nbytes = numel * dtype.itemsize
        if self._scratch.numel() < nbytes:
            with torch.inference_mode(False):
                self._scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._scratch[:nbytes].view(dtype)


def cut(rows: Iterable[Tensor], dtype: torch.dtype, numel: int) -> list[Tensor]:
    """Return so many elements at the beginning of each row of bytes."""
    # They are kept: made in inference mode they could not be written to outside.
    with torch.inference_mode(False):
        return [row[: numel * dtype.itemsize].view(dtype) for row in rows]


def slice_of(numel: int, replica: int, num_replicas: int) -> tuple[int, int]:
    """Which elements a replica sums for all; whole cache lines, so that no two replicas write the same one."""
    each = aligned(-(-numel // num_replicas), _ALIGNMENT)
    return min(each * replica, numel), min(each * (replica + 1), numel)


def aligned(value: int, to: int) -> int:
    """Return the next multiple of `to`."""
    return -(-value // to) * to
