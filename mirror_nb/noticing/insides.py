"""What values hold: at once, or however deep. Knows neither names nor replicas."""

from __future__ import annotations

import collections
import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch

from mirror_nb.environment.sources import is_users
from mirror_nb.values import PerReplica

MOST = 4000
# So many objects of a value are looked at, and so many members of one container: this is done for every cell.


def closed_over(function: types.FunctionType) -> list[object]:
    """Return what a function has of the functions around it."""
    found: list[object] = []
    for cell in function.__closure__ or ():
        # One that is not bound yet has none.
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def inside(value: object, is_wanted: Callable[[object], bool]) -> list[object]:
    """Return what is wanted of a value and of all that it holds, however deep; nothing that is in what is wanted."""
    found: list[object] = []

    def into(obj: object) -> Iterable[object]:
        if not is_wanted(obj):
            return members(obj)
        found.append(obj)
        return ()

    walk(value, into)
    return found


def walk(value: object, into: Callable[[object], Iterable[object]]) -> None:
    """Go through a value: `into` gets each object that is no mere container, and returns what to go through next."""
    seen: set[int] = set()
    queue = [value]
    while queue and len(seen) < MOST:
        obj = queue.pop()
        if type(obj) in LEAVES or id(obj) in seen:
            continue
        seen.add(id(obj))
        if type(obj) in _PLAIN:
            queue += _plain_members(obj)
            continue
        # A proxy of something that is not there, say, raises whatever it is asked.
        with contextlib.suppress(Exception):
            queue += into(obj)


def members(obj: object) -> Iterable[object]:
    """Return what an object holds at once. May raise what an object raises that is asked."""
    match obj:
        case dict() | list() | tuple() | set() | frozenset() | collections.deque():
            return _plain_members(obj)
        case PerReplica():
            return obj.values
        case types.FunctionType():
            return [*closed_over(obj), *(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()]
        case types.MethodType():
            return obj.__func__, obj.__self__
        case functools.partial():
            return (obj.func, *obj.args, *obj.keywords.values())
        case type():
            return list(vars(obj).values()) if is_users(obj.__module__) else ()
    if isinstance(obj, _CLOSED) or type(obj).__module__.partition(".")[0] in _WITHOUT:
        return ()
    try:
        return list(vars(obj).values())
    except TypeError:
        # It has slots alone.
        return ()


def _plain_members(container: Any) -> Collection[object]:
    """Return what a container holds, as far as it may hold something in turn."""
    held = container.values() if isinstance(container, dict) else container
    # Of numbers and strings alone: at once, not one by one.
    return () if len(held) > MOST or LEAVES.issuperset(map(type, held)) else list(held)


_PLAIN = frozenset({list, tuple, dict, set})
LEAVES = frozenset(
    {str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.Size, torch.dtype, *weakref.ProxyTypes}
)
_CLOSED = (types.ModuleType, torch.Tensor, np.ndarray)
_WITHOUT = frozenset({"matplotlib", "IPython", "ipykernel", "ipywidgets", "traitlets", "pandas", "numpy", "PIL"})
# Libraries whose objects are many and have no networks.
