"""What replicas fetch instead of being sent it: packed once, and there again for one that comes later.

    controller: Offer(arrays) ─▶ a slab ◀─ fetched by its path in /proc ─ replicas, as part of what names the offer

Knows payloads. Knows not what is offered, and who asks for it.
"""

from __future__ import annotations

import os
import sys
from typing import Any, final

from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.packing import pack
from mirror_nb.transfer.payload import Payload


@final
class Offer:
    """A value that unpickles, in other processes of this user, to a copy of what it was; until `withdraw`.

    `path`: of what they have to be able to open; None where there is nothing that is worth it, and nothing is offered.
    """

    def __init__(self, value: Any) -> None:
        self._packed = pack(value)
        slab = self._packed.slab
        self.path = f"/proc/{os.getpid()}/fd/{slab}" if slab is not None and sys.platform == "linux" else None

    def withdraw(self) -> None:
        """Let go of the memory; whoever has fetched the value keeps it."""
        self._packed.close()

    def __reduce__(self) -> Any:
        return _fetched, (self._packed.payload, self.path)


def reaches(path: str) -> bool:
    """Whether this process can open what another one has there: some containers forbid to look into others."""
    try:
        os.close(_opened(path))
    except OSError:
        return False
    return True


def _fetched(payload: Payload, path: str) -> Any:
    return unpack(payload, _opened(path))[0]


def _opened(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
