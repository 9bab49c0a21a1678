"""About the least that an all-reduce through shared memory takes: torch's sums, a copy of them, and two meetings.

Each process sums a slice where all read it, and lays it down for all, block by block. Nobody is checked, timed, or
noticed when gone. Every replica has its own result, since users change gradients in place (to clip them).
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch

LINE_BYTES = 128
BLOCK_BYTES = 512 * 1024


def folder() -> str:
    """Return a new folder whose files are memory."""
    return tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


class Meeting:
    """Where `n` processes wait for each other, spinning: a file in `place`, a cache line for each."""

    def __init__(self, place: str, name: str, me: int, n: int) -> None:
        path = Path(place, name)
        # Whoever comes first makes it; to others it has its length already.
        with open(os.open(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.truncate(n * LINE_BYTES)
            self._values = memoryview(mmap.mmap(file.fileno(), n * LINE_BYTES)).cast("q")
        step = LINE_BYTES // 8
        self._mine, self._all = me * step, range(0, n * step, step)
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        self._values[self._mine] = self._count
        for other in self._all:
            while self._values[other] < self._count:
                os.sched_yield()


class Bare:
    """An all-reduce of `numel` fp32 among `n` processes; `tensor` is this one's."""

    def __init__(self, place: str, me: int, n: int, numel: int, *, mean: bool = False) -> None:
        name = f"{numel}-{mean}"
        parts = [torch.from_file(f"{place}/{name}-{i}", shared=True, size=numel) for i in range(n)]
        self.tensor = parts[me]
        self._meet = Meeting(place, f"{name}-meeting", me, n)
        self._scale = 1 / n if mean else None
        each, step = -(-numel // n), BLOCK_BYTES // 4
        begin, end = min(each * me, numel), min(each * (me + 1), numel)
        blocks = [slice(low, min(low + step, end)) for low in range(begin, end, step)]
        self._blocks = [([part[block] for part in parts], parts[me][block]) for block in blocks]

    def __call__(self) -> None:
        self._meet()
        for parts, mine in self._blocks:
            total = torch.add(parts[0], parts[1], out=mine)
            for part in parts[2:]:
                total.add_(part)
            if self._scale is not None:
                total.mul_(self._scale)
            for part in parts:
                if part is not mine:
                    part.copy_(total)
        self._meet()
