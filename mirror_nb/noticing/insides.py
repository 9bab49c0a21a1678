"""What values hold: at once, or however deep. Knows neither names nor replicas."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from mirror_nb.environment.sources import is_users
from mirror_nb.environment.surroundings import Signs
from mirror_nb.noticing.slots import own_attributes, slots_of
from mirror_nb.values import PerReplica

MOST = 4000
# So many objects of one class are looked at in a value, and three times as many in all: this is done for every cell.
_TOLD_APART = 25 * MOST
# Of containers that have more members MOST are told apart by their classes, half a millisecond; so many of a value.
_OF_EACH = 200
# So many of each class are looked at then.


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
    left: collections.defaultdict[type, int] = collections.defaultdict(lambda: MOST)
    room = _TOLD_APART
    queue: list[Any] = [value]
    while queue and len(seen) < 3 * MOST:
        obj = queue.pop()
        if type(obj) in LEAVES or id(obj) in seen or not left[type(obj)]:
            continue
        seen.add(id(obj))
        left[type(obj)] -= 1
        if type(obj) in _PLAIN:
            queue += _plain_members(obj, room)
            room -= min(room, MOST) if len(obj) > MOST else 0
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
    if slots_of(type(obj)):
        return list(own_attributes(obj).values())
    return list(vars(obj).values()) if hasattr(obj, "__dict__") else ()


def _plain_members(container: Any, room: int = MOST) -> Collection[object]:
    """Return what a container holds, as far as it may hold something in turn; of very many some of each class."""
    held = container.values() if isinstance(container, dict) else container
    if len(held) > MOST:
        # From both ends: what is put into a long list is at its end.
        sides = (held,) if isinstance(held, (set, frozenset)) else (held, reversed(held))
        some = list(itertools.chain(*(itertools.islice(side, min(room, MOST) // len(sides)) for side in sides)))
        kinds = [kind for kind in dict.fromkeys(map(type, some)) if kind not in LEAVES]
        return [one for kind in kinds for one in itertools.islice(_of(kind, some), _OF_EACH)]
    # Of numbers and strings alone: at once, not one by one.
    return () if LEAVES.issuperset(map(type, held)) else list(held)


def _of(kind: type, some: list[Any]) -> Iterator[object]:
    return (one for one in some if type(one) is kind)


_PLAIN = frozenset({list, tuple, dict, set})
LEAVES = frozenset(
    {str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.Size, torch.dtype, *weakref.ProxyTypes}
)
_CLOSED = (types.ModuleType, torch.Tensor, np.ndarray, Signs)
# A strategy's signs have all that is in the user's modules.
_WITHOUT = frozenset({"matplotlib", "IPython", "ipykernel", "ipywidgets", "traitlets", "pandas", "numpy", "PIL"})
# Libraries whose objects are many and have no networks.
