"""What a value holds, kept to notice later that somebody wrote to it in place. Knows payloads, no names.

Watched are lists, dicts, sets, byte arrays, NumPy arrays and tensors. An object of another class that is changed
in place is not noticed; to bind its name again is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from mirror_nb.errors import TransferError
from mirror_nb.payload import TooLarge

WATCHED_BYTES = 1 << 16
# A value up to this size, pickled, is compared whole; of a larger container only which objects it holds.
ARRAY_BYTES = 1 << 20
# A larger array is not watched: reading it before and after every cell would take longer than most cells.


@final
@dataclass(frozen=True, slots=True)
class Content:
    """What one value held at one time."""

    pickled: bytes = b""
    parts: tuple[object, ...] = ()
    # Of a large container: the very objects in it.
    state: tuple[int, ...] = ()
    # Of a large tensor: autograd's count of writes and its address; of an array its hash.

    def same(self, other: Content | None) -> bool:
        """Whether nothing was written in between."""
        return (
            other is not None
            and (self.pickled, self.state, len(self.parts)) == (other.pickled, other.state, len(other.parts))
            and all(map(operator.is_, self.parts, other.parts))
        )


def content(value: object, pickled: Callable[[object, int], bytes]) -> Content | None:
    """Return what `value` holds now; None when it is nothing that is watched.

    `pickled(value, limit)` gives the bytes that would travel, or raises TooLarge or TransferError.
    """
    if isinstance(value, np.ndarray) and value.nbytes > WATCHED_BYTES:
        return Content(state=(hash(value.tobytes()),)) if value.nbytes <= ARRAY_BYTES else None
    if isinstance(value, torch.Tensor):
        if value.nbytes > WATCHED_BYTES or value.device.type != "cpu":
            # Without reading it: on a GPU that would wait for what runs there.
            return Content(state=(value._version, value.data_ptr(), value.numel()))
    elif not isinstance(value, (list, dict, set, bytearray, np.ndarray)):
        return None
    try:
        return Content(pickled(value, WATCHED_BYTES))
    except (TooLarge, TransferError, RecursionError):
        return _parts(value)


def _parts(value: object) -> Content | None:
    match value:
        case dict():
            return Content(parts=(*value.keys(), *value.values()))
        case list() | set():
            return Content(parts=tuple(value))
    return None
