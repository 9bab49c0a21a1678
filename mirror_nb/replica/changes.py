"""Which names of a replica a cell has changed, by what they held when it began.

Knows names and what values are made of; knows no payloads, and of networks only whether one is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast, final

from torch import nn

from mirror_nb.distributed import Distributed
from mirror_nb.messages import former, travels
from mirror_nb.mirroring.attributes import names_in
from mirror_nb.noticing.contents import Content, changed_among, class_content, content
from mirror_nb.noticing.data_sets import data_sets
from mirror_nb.noticing.insides import inside
from mirror_nb.noticing.kinds import WITHOUT_IDENTITY, goes_by_name, has_an_identity, is_unchanging
from mirror_nb.noticing.reads import reached
from mirror_nb.noticing.refilling import is_refillable, stays_itself
from mirror_nb.noticing.settings import Was, attributes, set_since
from mirror_nb.transfer.told import is_told


@dataclass(frozen=True, slots=True)
class Changes:
    """What a cell did to the names; nothing at all, where none has run."""

    names: tuple[str, ...] = ()
    # Bound since, or changed in place, or holding what has another name by now.
    altered: tuple[str, ...] = ()
    # Names whose objects were changed in place: they are never bound anew.
    settings: dict[str, frozenset[str]] = field(default_factory=dict)
    # Of these: the attributes that were set, or deleted.
    deleted: tuple[str, ...] = ()
    refilled: tuple[str, ...] = ()
    # Names whose containers or trained tensors were changed in place.
    unchanged: dict[str, str] = field(default_factory=dict)
    # Names that hold what the notebook has, as it was when the cell began, and its name there.
    holding: frozenset[str] = frozenset()
    # Names of containers and objects that were left as they were, and that hold what the cell has named.
    filled: frozenset[str] = frozenset()
    # Of these, and of the altered ones: objects whose attributes travel, for the controller's own, and containers that
    # hold themselves, whose members do.
    loaders: frozenset[str] = frozenset()
    # Loaders of which nothing was changed but what has names.
    standing: tuple[str, ...] = ()
    # Names that the cell mentions, and whose values it has left as they were, or altered: the notebook keeps its own.
    former: tuple[str, ...] = ()
    # Names that it has taken from objects, which have their `former` names.


@final
class Before:
    """What the names held when a cell began.

    `outdated` are those that have another value in the notebook by now; `reference` gives what stands for an object
    that the controller has too.
    """

    def __init__(
        self,
        names: MutableMapping[str, Any],
        mentioned: Iterable[str],
        bound: Iterable[str],
        outdated: Collection[str],
        reference: Callable[[object], Any],
    ) -> None:
        self._names = names
        self._outdated = outdated
        self._reference = reference
        self._objects = dict(names)
        self._contents: dict[str, Content] = {}
        self._attributes: dict[str, dict[str, Was]] = {}
        self._named = {id(value): n for n, value in names.items() if n not in outdated and _has_own_name(n, value)}
        self._inside: dict[str, list[int]] = {}
        # By name: the ids of what has a name, too, and is inside its value, in its order.
        self._data_sets: dict[str, list[int]] = {}
        # By the names of loaders: the ids of what they go by.
        self._remember(list(reached(mentioned, names)), set(bound))

    def _remember(self, queue: list[str], bound: Collection[str]) -> None:
        # What a cell changes in values that the notebook has let go of is not for the names that it had there.
        apart = {*queue, *self._outdated}
        objects = ((n, value) for n, value in self._objects.items() if n not in apart)
        named: dict[int, list[str]] = {}
        for name, value in objects:
            if _has_own_name(name, value):
                named.setdefault(id(value), []).append(name)

        while queue:
            name = queue.pop()
            inside: list[object] = []
            held = self._content(self._names[name], large=name in bound, sought=self._named, seen=inside.append)
            # By what holds it, a cell may change what another name has.
            queue += [other for obj in inside for other in named.pop(id(obj), ())]
            if held is not None:
                self._contents[name] = held
                self._inside[name] = list(map(id, inside))
                self._data_sets[name] = list(map(id, data_sets(meant(self._names[name]))))
                if held.own and (own := attributes(meant(self._names[name]))) is not None:
                    self._attributes[name] = {attribute: Was.of(value) for attribute, value in own.items()}
            # By a network that has it as an attribute, too.
            for network in networks_in(meant(self._names[name])):
                for other in names_in(network, named):
                    queue.extend(named.pop(id(self._names[other]), ()))

    def _content(
        self,
        value: object,
        *,
        large: bool = False,
        sought: Collection[int] = frozenset(),
        seen: Callable[[object], object] = lambda obj: None,
    ) -> Content | None:
        if isinstance(value, type):
            return class_content(value, self._reference, sought, seen)
        return content(meant(value), self._reference, large=large, sought=sought, seen=seen)

    def changes(self, bound: Iterable[str], mentioned: Iterable[str]) -> Changes:
        """Return what became of the names since; uses this up.

        What they were taken from is given the `former` names: in the notebook somebody else may have it.

        history.append(loss); history = []    ─▶ "history before"
        """
        taken = self._name_what_was_let_go()
        altered: set[str] = set()
        standing: list[str] = []
        holding: set[str] = set()
        filled: set[str] = set()
        loaders: set[str] = set()
        # Containers that are as they were, with what has another name now: here as there it is to be one value.
        names = {n for n, value in self._names.items() if self._objects.get(n, _MISSING) is not value}
        named = {id(value): value for n in names if type(value := self._names[n]) not in WITHOUT_IDENTITY}
        names |= {n for n in bound if n in self._names}
        for name, held in self._contents.items():
            value = self._names.get(name, _MISSING)
            if value is _MISSING or (name in names and self._objects.get(name) is not value):
                continue
            inside: list[object] = []
            now = self._content(value, sought=self._named.keys() | named.keys(), seen=inside.append)
            same = held.same(now) and self._has_the_same_inside(name, inside)
            more = any(id(obj) in named and obj is not value and has_an_identity(obj) for obj in inside)
            if name in names and not (same and more):
                # A line that may bind it has left it as it is.
                continue
            # As an object, since what it holds is to hold the notebook's own. A class is one whatever holds it.
            own = held.own or (not isinstance(value, type) and sum(obj is value for obj in inside) > 1)
            if own and is_refillable(value) and (more or not same):
                filled.add(name)
            if not same and not own:
                names.add(name)
            elif same and more and (name in filled or stays_itself(value)):
                holding.add(name)
            elif not same and (others := self._changed_in_a_loader(name, held, now)):
                loaders.add(name)
                objects = {n for n in others if not stays_itself(self._names[n])}
                altered |= objects
                filled |= {n for n in objects if is_refillable(self._names[n])}
            else:
                if not same:
                    altered.add(name)
                if name not in self._outdated and travels(name) and goes_by_name(value):
                    standing.append(name)
        names |= holding
        names |= {n for n in mentioned if isinstance(self._names.get(n), nn.Module)}
        still = (n for n in names if self._objects.get(n, _MISSING) is self._names[n])
        unchanged = {n: self._as_before(n) for n in names - holding}
        found = Changes(
            tuple(sorted(names)),
            tuple(sorted(altered)),
            {
                n: frozenset(set_since(self._attributes[n], attributes(meant(self._names[n])) or {}))
                for n in altered & self._attributes.keys()
            },
            tuple(sorted(n for n in self._objects if n not in self._names and travels(n))),
            tuple(n for n in still if is_refillable(self._names[n])),
            {n: there for n, there in unchanged.items() if there is not None},
            frozenset(holding),
            frozenset(filled),
            frozenset(loaders),
            # Of use to values that travel alone; to say so of large ones takes a while.
            tuple(sorted(n for n in standing if (names or altered) and (n in altered or self._contents[n].complete))),
            taken,
        )
        # What the cell let go of must be gone by the time the controller is told what is here.
        self._objects.clear()
        self._contents.clear()
        self._attributes.clear()
        return found

    def _name_what_was_let_go(self) -> tuple[str, ...]:
        objects = ((name, self._objects[name]) for name in self._contents if name not in self._outdated)
        taken = tuple(n for n, was in objects if self._names.get(n, _MISSING) is not was and _has_own_name(n, was))
        for name in taken:
            self._names[former(name)] = self._objects[former(name)] = self._objects[name]
            self._contents[former(name)] = self._contents[name]
            if name in self._attributes:
                self._attributes[former(name)] = self._attributes[name]
            self._inside[former(name)] = self._inside[name]
        return taken

    def _as_before(self, name: str) -> str | None:
        """Return the name that had this name's very value before the cell, and still has; None if it was changed.

        It is the name itself, or another one that the cell mentions; for what was distributed any of its source.
        """
        value = meant(self._names[name])
        others: Iterable[str] = self._objects if isinstance(self._names[name], Distributed) else self._contents
        for known in (name, *(others if has_an_identity(value) else ())):
            if meant(self._objects.get(known, _MISSING)) is value is meant(self._names.get(known, _MISSING)):
                held = self._contents.get(known)
                inside: list[object] = []
                now = (
                    None if held is None else self._content(value, large=True, sought=self._named, seen=inside.append)
                )
                same = held is not None and held.same(now) and self._has_the_same_inside(known, inside)
                if is_unchanging(value) if held is None else held.complete and same:
                    return known
        return None

    def _changed_in_a_loader(self, name: str, before: Content, now: Content | None) -> set[str]:
        """Return the names of what a loader goes by and was changed; none where that is not told by names alone.

        Of a container or a tensor that is so only if the cell has named it: it would be bound anew if replicas differ.
        """
        parts = data_sets(meant(self._names[name]))
        if now is None or not parts or list(map(id, parts)) != self._data_sets[name]:
            return set()
        changed = [part for part, is_changed in zip(parts, changed_among(before, now), strict=True) if is_changed]
        names = {self._named.get(id(part), ""): part for part in changed}
        told = (
            self._names.get(n) is part and (n in self._contents or not stays_itself(part)) for n, part in names.items()
        )
        return set(names) if all(told) else set()

    def _has_the_same_inside(self, name: str, inside: list[object]) -> bool:
        """Whether a value with equal content holds the very objects with names that it held: `log["all"] = losses`."""
        return [id(obj) for obj in inside if id(obj) in self._named] == self._inside[name]


def networks_in(value: object) -> list[nn.Module]:
    """Return the networks that a value is or holds."""
    return cast(list[nn.Module], inside(value, lambda obj: isinstance(obj, nn.Module)))


def meant(value: object) -> object:
    """Return what the notebook has in the place of a value: of what was distributed its source."""
    return value.source if isinstance(value, Distributed) else value


def _has_own_name(name: str, value: object) -> bool:
    """Whether others that hold the name's value go by the name: it has no handle."""
    # By its class: a proxy may raise whatever it is asked.
    own = issubclass(type(value), nn.Module | Distributed) or is_told(value)
    return travels(name) and goes_by_name(value) and not own


_MISSING = object()
