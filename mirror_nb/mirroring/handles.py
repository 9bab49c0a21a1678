"""Short names of objects that are not held alive by them. Knows nothing of what the objects are."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

T = TypeVar("T")


@final
class Handles(Generic[T]):
    """Handles of objects, by identity: their classes may have their own idea of equality.

    `gone(handle)` is called when the object that a handle means is no more; any thread may be the one.
    """

    def __init__(self, gone: Callable[[str], None]) -> None:
        self._gone = gone
        self._by_handle: dict[str, Callable[[], Any]] = {}
        self._by_id: dict[int, tuple[Callable[[], Any], str]] = {}

    def learn(self, handle: str, obj: T) -> None:
        """From now on the handle means this object."""
        key = id(obj)

        def gone(reference: object, ending: Callable[[], bool] = sys.is_finalizing) -> None:
            if ending():
                # What is called has lost its modules.
                return
            # Before another object may have its id.
            self._by_id.pop(key, None)
            if self._by_handle.get(handle) is reference:
                del self._by_handle[handle]
                self._gone(handle)

        reference = referring(obj, gone)
        self._by_handle[handle] = reference
        self._by_id[key] = reference, handle

    def unlearn(self, handle: str) -> None:
        """The handle means nothing any more, and the object has none; `gone` is not called."""
        reference = self._by_handle.pop(handle, None)
        for key in [key for key, (other, _) in list(self._by_id.items()) if other is reference]:
            del self._by_id[key]

    def of(self, obj: object) -> str | None:
        """Return the object's handle, if it has one."""
        entry = self._by_id.get(id(obj))
        return entry[1] if entry is not None and entry[0]() is obj else None

    def find(self, handle: str) -> T | None:
        """Return the object that a handle means, None if it is gone."""
        reference = self._by_handle.get(handle)
        return reference() if reference is not None else None

    def all(self) -> dict[str, T]:
        """Return the objects that still live, by handle, in the order in which they were learnt."""
        # The keys in one piece: objects may go meanwhile.
        return {handle: obj for handle in list(self._by_handle) if (obj := self.find(handle)) is not None}


def referring(obj: object, gone: Callable[[Any], None] | None = None) -> Callable[[], Any]:
    """Return a weak reference; of what has none, a torch.Generator in torch 2.11, one that holds it."""
    try:
        return weakref.ref(obj, gone)
    except TypeError:
        return lambda: obj
