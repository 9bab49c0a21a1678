"""Exceptions as text, and as pickle takes them: of their own class there, whatever their constructors take.

Knows no channel.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any


def text(error: BaseException) -> str:
    """Return what an exception says, as Python's tracebacks have it where its class cannot say it."""
    try:
        return str.__str__(str(error))
    except Exception:
        return "<exception str() failed>"


def chain(error: BaseException, *, suppressed: bool = True) -> Iterator[BaseException]:
    """Yield an exception and those that it came from, each once; with `suppressed` also one that `from None` hides.

    Who raises the cause of one that was caught (`raise error.__cause__`) makes a ring of them.
    """
    seen: set[int] = set()
    came_from: BaseException | None = error
    while came_from is not None and id(came_from) not in seen:
        seen.add(id(came_from))
        yield came_from
        hidden = came_from.__suppress_context__ and not suppressed
        came_from = came_from.__cause__ or (None if hidden else came_from.__context__)


def reduce_raised(error: BaseException) -> tuple[Any, ...] | None:
    """Return how pickle shall take an exception whose class has a constructor of its own; None: as it does."""
    return (_made, (type(error), error.args), vars(error)) if _has_its_own_constructor(type(error)) else None


def _has_its_own_constructor(kind: type[BaseException]) -> bool:
    """Whether pickle's way, to call the class with `args`, is likely to fail."""
    return isinstance(kind.__init__, types.FunctionType) and kind.__reduce__ is BaseException.__reduce__


def _made(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    return kind.__new__(kind, *args)
