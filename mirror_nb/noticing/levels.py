"""What a value of many objects holds, what that holds, and so on: level by level.

All of one level at once, and the objects of one class together, so that no loop of Python's runs over plain values:
there may be a million. Knows no names and no libraries.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

INSIDE = object()
OPENED = 10
# What it takes to open an object, in plain members.

Opener = Callable[[Any], Mapping[Any, object] | Sequence[object]]
# Gives what an object holds.


@final
@dataclass(frozen=True, slots=True)
class Kinds:
    """What there is to be found in the objects of a class."""

    is_plain: Callable[[type], bool]
    # Nothing that can change.
    opener: Callable[[object], Opener | None]
    # Of one of them that is no container: how to open them all; None for those that are but looked at.
    look_at: Callable[[object], object]
    # Called with each of these.
    weight: int
    # What that takes; a plain member takes 1.


@final
@dataclass
class Levels:
    """The objects inside a value, of each level in its order, as far as there is room."""

    room: int
    parts: list[object] = field(default_factory=list)
    # INSIDE in the places of those that were opened or looked at: they are not kept.
    order: list[int] = field(default_factory=list)
    # The ids of what is in these places: which of them is where, not what is in them.
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    # Of what was opened: how much it held.
    whole: bool = True
    # There was room for all.

    def fill(self, value: object, kinds: Kinds) -> None:
        """Put in what a value holds; the outermost level whether there is room or not."""
        known: dict[int, object] = {}
        # Each would go through all that is there, several times, and find nothing.
        with _without_collections():
            level = self._open((value,), kinds, known)
            while level and self.whole:
                inner = self._open(level, kinds, known)
                if self.whole:
                    self._put(level, kinds, known)
                    level = inner
        # As they are: what is in these is not known.
        self.parts += level

    def _open(self, level: Collection[object], kinds: Kinds, known: dict[int, object]) -> Collection[object]:
        """Return the next level, if there is room, and the outermost one in any case."""
        first = not known
        held: list[Collection[Any]] = []
        closed: list[object] = []
        for objs in _by_class(level, kinds, known):
            opened = _opened(objs, kinds)
            held += opened
            closed += () if opened else objs
        self.room -= sum(map(len, held)) + OPENED * len(held) + kinds.weight * len(closed)
        self.whole = self.room >= 0
        if not (self.whole or first):
            return ()
        for obj in closed:
            kinds.look_at(obj)
        self.sizes.append(tuple(map(len, held)))
        return tuple(itertools.chain.from_iterable(held))

    def _put(self, level: Collection[object], kinds: Kinds, known: dict[int, object]) -> None:
        if all(map(kinds.is_plain, set(map(type, level)))):
            self.parts += level
        else:
            self.parts += (INSIDE if id(obj) in known else obj for obj in level)
            self.order += filter(known.__contains__, map(id, level))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _by_class(level: Collection[object], kinds: Kinds, known: dict[int, object]) -> list[list[object]]:
    """Return the objects that can change, each once, and add them to the known ones."""
    wanted = {kind for kind in set(map(type, level)) if not kinds.is_plain(kind)}
    new = {id(obj): obj for obj in level if type(obj) in wanted} if wanted else {}
    if not known.keys().isdisjoint(new):
        new = {key: obj for key, obj in new.items() if key not in known}
    known.update(new)
    if len(wanted) == 1:
        return [list(new.values())] if new else []
    groups: dict[type, list[object]] = collections.defaultdict(list)
    for obj in new.values():
        groups[type(obj)].append(obj)
    return list(groups.values())


def _opened(objs: list[Any], kinds: Kinds) -> list[Collection[Any]]:
    """Return what objects of one class hold, keys apart from values; nothing, if there is no looking into them."""
    kind = type(objs[0])
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    opener = kinds.opener(objs[0]) if base is None else vars if hasattr(objs[0], "__dict__") else None
    opened = [[] if base is None else _members(objs, kind, base), [] if opener is None else list(map(opener, objs))]
    values = (map(dict.values, some) for some in opened if some and isinstance(some[0], dict))
    return list(itertools.chain(*opened, *values))


def _members(objs: list[Any], kind: type, base: type) -> list[Any]:
    if all(isinstance(getattr(kind, name), types.WrapperDescriptorType) for name in ("__iter__", "__len__")):
        return list(objs)
    # Its class has a say of its own in what it tells of itself.
    return [dict(dict.items(obj)) if base is dict else tuple(base.__iter__(obj)) for obj in objs]  # type: ignore[attr-defined]


_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
