"""A function of somebody else that calls us too, until it is removed. Knows nothing of whose it is."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, final


def called_by_us(depth: int) -> bool:
    """Whether code of mirror_nb has called the function whose `before` or `after` asks, so many frames below it."""
    # Above that: the function in its place.
    return str(sys._getframe(depth + 2).f_globals.get("__name__", "")).startswith("mirror_nb.")


def name_of(function: object) -> tuple[str, str] | None:
    """Return the module and the name there of a function in whose place another one is now; None for others."""
    return _names.get(id(function))


_names: dict[int, tuple[str, str]] = {}
# By their ids: they live as long as what is in their place.


@final
class Replaced:
    """A function of somebody else that calls us too, until it is removed."""

    def __init__(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
        result: Callable[..., object] | None = None,
        instead: Callable[..., object] | None = None,
    ) -> None:
        # `result` is called with what it returned before its arguments, `instead` with the original before them.
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            # IPython and pytest leave this frame out of what they show of an error in the original.
            __tracebackhide__ = True
            if before is not None and not self._removed:
                before(*args, **kwargs)
            if instead is not None and not self._removed:
                returned = instead(original, *args, **kwargs)
            else:
                returned = original(*args, **kwargs)
            if after is not None and not self._removed:
                after(*args, **kwargs)
            if result is not None and not self._removed:
                result(returned, *args, **kwargs)
            return returned

        if isinstance(owner, types.ModuleType):
            # Whoever has either by a name of his own is to find there in another process what has the place.
            replacement.__module__, replacement.__qualname__ = owner.__name__, name
            _names[id(original)] = owner.__name__, name
        self._owner, self._name, self._removed = owner, name, False
        self._original, self._replacement = original, replacement
        setattr(owner, name, replacement)

    def remove(self) -> None:
        self._removed = True
        _names.pop(id(self._original), None)
        # Who replaced ours meanwhile keeps theirs, and calls ours, which only calls the original by then. (The
        # first torch.compile replaces Module.__init__ and __setstate__ for good.)
        if getattr(self._owner, self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)
