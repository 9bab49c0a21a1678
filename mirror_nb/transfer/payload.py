"""What travels between processes in the place of an object: its pickle, and where its large buffers lie."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Payload:
    """A pickled object and where its large buffers lie in the slab that travels beside it.

    It, and what else is made for every call, is not frozen: that takes 10 µs more for each where nothing is cached.
    """

    pickled: bytes = b""
    # Empty: the last extent holds it, if there is one.
    extents: tuple[tuple[int, int], ...] = ()
    # Offset and length of each buffer in the slab, bytes.
    slab_bytes: int = 0
    # 0: there is no slab.
    simple: bool = False
    # Made by pickle's own pickler, of what refers to nothing.
    nest: tuple[Any, ...] = ()
    # Of `Nest`, which its message pickles: the object is simple and small, and needs no pickle of its own.
    arrived: bool = False
    # The nest was in a message, so that nobody else has its tensors.

    def flat(self) -> tuple[Any, ...]:
        """Return it as a tuple to send: `Payload(*flat)` at the other end."""
        return self.pickled, self.extents, self.slab_bytes, self.simple, self.nest, True

    def __reduce__(self) -> Any:
        # Three times as fast as dataclasses' own way, in every message.
        return Payload, self.flat()

    @property
    def nbytes(self) -> int:
        """Size of all that travels, in bytes."""
        return len(self.pickled) + self.slab_bytes + (len(pickle.dumps(self.nest, 5)) if self.nest else 0)


@dataclass(slots=True)
class Packed:
    """A payload with the descriptor of its slab; `close()` it once it was sent."""

    payload: Payload
    slab: int | None
    global_names: frozenset[str]
    # Names that functions of the namespace look up; they are not part of the payload.
    files: frozenset[str] = frozenset()
    # Where these functions were written, as their code says it.

    def close(self) -> None:
        """Close this process's descriptor of the slab, once; those who received it keep theirs."""
        slab, self.slab = self.slab, None
        if slab is not None:
            os.close(slab)
