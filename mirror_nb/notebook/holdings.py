"""What the notebook has of the replicas' values besides the names that they have there.

    best = model;  runs.append(optimizer)    ─▶ the replicas keep these, whatever becomes of their names there
    mine = large        (a stand-in)         ─▶ the replicas keep its value, under a name of its own

Knows how to look into values; knows neither names nor replicas.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterable

import numpy as np
import torch

from mirror_nb.reads import closed_over
from mirror_nb.sources import is_users
from mirror_nb.values import PerReplica

MOST = 4000
# So many objects of a value are looked at, and so many members of one container: this is done for every cell.


def inside(value: object, is_wanted: Callable[[object], bool]) -> list[object]:
    """Return what is wanted of a value and of all that it holds, however deep; nothing that is in what is wanted."""
    found: list[object] = []
    seen: set[int] = set()
    queue = [value]
    while queue and len(seen) < MOST:
        obj = queue.pop()
        if type(obj) in _LEAVES or id(obj) in seen:
            continue
        seen.add(id(obj))
        # A proxy of something that is not there, say, raises whatever it is asked.
        with contextlib.suppress(Exception):
            if type(obj) not in _PLAIN and is_wanted(obj):
                found.append(obj)
            else:
                queue += _members(obj)
    return found


def _members(obj: object) -> Iterable[object]:
    match obj:
        case dict():
            return _unless_plain(obj.values())
        case list() | tuple() | set() | frozenset() | collections.deque():
            return _unless_plain(obj)
        case PerReplica():
            return obj.values
        case types.FunctionType():
            return [*closed_over(obj), *(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()]
        case types.MethodType():
            return (obj.__self__,)
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


def _unless_plain(members: Collection[object]) -> Iterable[object]:
    # Of numbers and strings alone: at once, not one by one.
    return () if len(members) > MOST or _LEAVES.issuperset(map(type, members)) else list(members)


_PLAIN = frozenset({list, tuple, dict, set})
_LEAVES = frozenset(
    {str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.Size, torch.dtype, *weakref.ProxyTypes}
)
_CLOSED = (types.ModuleType, torch.Tensor, np.ndarray)
_WITHOUT = frozenset({"matplotlib", "IPython", "ipykernel", "ipywidgets", "traitlets", "pandas", "numpy", "PIL"})
# Libraries whose objects are many and have no networks.
