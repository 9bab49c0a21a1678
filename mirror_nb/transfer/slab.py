"""Buffers side by side in one anonymous file, whose descriptor travels. Knows not what they hold.

Whoever receives the descriptor maps it privately: all processes read the same pages, nothing is copied, and a process
that writes gets pages of its own.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable
from typing import Any, cast

import torch

from mirror_nb import readable
from mirror_nb.errors import TransferError
from mirror_nb.machine.nameless import nameless_file

ALIGNMENT = 64


def write(buffers: list[memoryview]) -> tuple[tuple[tuple[int, int], ...], int | None]:
    """Return where each buffer lies, offset and length in bytes, and the descriptor of the slab; None: no buffers.

    Raises TransferError when there is no room.
    """
    if not buffers:
        return (), None
    extents, offset = [], 0
    for buffer in buffers:
        extents.append((offset, buffer.nbytes))
        offset += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
    size = extents[-1][0] + extents[-1][1]
    slab = anonymous_file(size)
    try:
        # Half the time of a copy into a mapping, which faults for every page.
        for (start, _), buffer in zip(extents, buffers, strict=True):
            rest = buffer.cast("B")
            while rest.nbytes:
                written = os.pwrite(slab, rest, start)
                start, rest = start + written, rest[written:]
    except BaseException:
        os.close(slab)
        raise
    return tuple(extents), slab


def anonymous_file(size: int) -> int:
    """Return the descriptor of a nameless file of `size` bytes. Raises TransferError when there is no room."""
    descriptor = nameless_file("mirror_nb")
    try:
        os.truncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):
            # Without the reservation a full machine shows as SIGBUS in the middle of a copy.
            os.posix_fallocate(descriptor, 0, size)
    except OSError as reason:
        os.close(descriptor)
        raise TransferError(f"no shared memory for {readable.size(size)}: {reason}") from reason
    return descriptor


def opened(slab: int | None, nbytes: int, extents: Iterable[tuple[int, int]]) -> list[memoryview]:
    """Return the buffers of a slab, whose pages they look at; closes the descriptor."""
    if slab is None:
        return []
    try:
        view = _private(slab, nbytes)
    finally:
        os.close(slab)
    return [view[start : start + length] for start, length in extents]


def _private(slab: int, nbytes: int) -> memoryview:
    if sys.platform != "linux":
        return memoryview(mmap.mmap(slab, nbytes, access=mmap.ACCESS_COPY))
    # `mmap` keeps a descriptor as long as a tensor of it is kept, and a process may have some thousand; torch none.
    mapped = torch.from_file(f"/proc/self/fd/{slab}", shared=False, size=nbytes, dtype=torch.uint8, device="cpu")
    return memoryview(cast(Any, mapped.numpy()))
