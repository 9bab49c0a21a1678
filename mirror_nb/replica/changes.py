"""Which names of a replica a cell has changed, by what they held when it began.

Knows names and what values are made of; knows no payloads, and of networks only whether one is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast, final

from torch import nn

from mirror_nb.distributed import Distributed
from mirror_nb.messages import travels
from mirror_nb.mirroring.attributes import names_by_id, names_in
from mirror_nb.noticing.contents import Content, class_content, content
from mirror_nb.noticing.insides import inside
from mirror_nb.noticing.kinds import WITHOUT_IDENTITY, has_an_identity, is_unchanging
from mirror_nb.noticing.reads import reached
from mirror_nb.noticing.refilling import is_refillable, stays_itself
from mirror_nb.noticing.settings import Was, attributes, set_since


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
    # Of these, and of the altered ones: objects whose attributes travel, for the controller's own.
    standing: tuple[str, ...] = ()
    # Names that the cell mentions, and whose values it has left as they were, or altered: the notebook keeps its own.


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
        self._remember(list(reached(mentioned, names)), set(bound))

    def _remember(self, queue: list[str], bound: Collection[str]) -> None:
        # What a cell changes in values that the notebook has let go of is not for the names that it had there.
        apart = {*queue, *self._outdated}
        named = names_by_id((n, value) for n, value in self._objects.items() if travels(n) and n not in apart)

        def inside(obj: object) -> None:
            # By what holds it, a cell may change what another name has.
            queue.extend(named.pop(id(obj)) if has_an_identity(obj) else ())

        while queue:
            name = queue.pop()
            held = self._content(self._names[name], large=name in bound, sought=named, seen=inside)
            if held is not None:
                self._contents[name] = held
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
            return class_content(value, self._reference)
        return content(meant(value), self._reference, large=large, sought=sought, seen=seen)

    def changes(self, bound: Iterable[str], mentioned: Iterable[str]) -> Changes:
        """Return what became of the names since; uses this up."""
        altered: set[str] = set()
        standing: list[str] = []
        holding: set[str] = set()
        filled: set[str] = set()
        # Containers that are as they were, with what has another name now: here as there it is to be one value.
        names = {n for n, value in self._names.items() if self._objects.get(n, _MISSING) is not value}
        named = {id(value): value for n in names if type(value := self._names[n]) not in WITHOUT_IDENTITY}
        names |= self._holders() | {n for n in bound if n in self._names}
        for name, held in self._contents.items():
            if name not in self._names or name in names:
                continue
            value = self._names[name]
            inside: list[object] = []
            same = held.same(self._content(value, sought=named, seen=inside.append))
            more = any(obj is not value and has_an_identity(obj) for obj in inside)
            if held.own and is_refillable(value) and (more or not same):
                filled.add(name)
            if not same and not held.own:
                names.add(name)
            elif same and more and (name in filled or stays_itself(value)):
                holding.add(name)
            else:
                if not same:
                    altered.add(name)
                if name not in self._outdated and travels(name) and has_an_identity(value):
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
            # Of use to values that travel alone; to say so of large ones takes a while.
            tuple(sorted(n for n in standing if (names or altered) and (n in altered or self._contents[n].complete))),
        )
        # What the cell let go of must be gone by the time the controller is told what is here.
        self._objects.clear()
        self._contents.clear()
        self._attributes.clear()
        return found

    def _holders(self) -> set[str]:
        """Return names that the cell does not mention, and that hold what it has changed and then let go of.

        run["loss"].append(loss); run = {}    ─▶ runs
        """
        let_go = (n for n in self._contents if meant(self._objects[n]) is not meant(self._names.get(n, _MISSING)))
        # Of large values it takes long to tell, and most have been let go of by all.
        left = (n for n in let_go if sys.getrefcount(self._objects[n]) > _ALONE)
        objects = ((n, was) for n in left if has_an_identity(was := meant(self._objects[n])))
        changed = {id(was) for n, was in objects if not self._contents[n].same(self._content(was))}
        found: set[str] = set()
        for name in self._names.keys() - self._contents.keys() - set(self._outdated) if changed else ():
            inside: list[object] = []
            self._content(self._names[name], sought=changed, seen=inside.append)
            found |= {name} if inside and travels(name) else set()
        return found

    def _as_before(self, name: str) -> str | None:
        """Return the name that had this name's very value before the cell, and still has; None if it was changed.

        It is the name itself, or another one that the cell mentions; for what was distributed any of its source.
        """
        value = meant(self._names[name])
        others: Iterable[str] = self._objects if isinstance(self._names[name], Distributed) else self._contents
        for known in (name, *(others if has_an_identity(value) else ())):
            if meant(self._objects.get(known, _MISSING)) is value is meant(self._names.get(known, _MISSING)):
                held = self._contents.get(known)
                now = None if held is None else self._content(value, large=True)
                if is_unchanging(value) if held is None else held.complete and held.same(now):
                    return known
        return None


def networks_in(value: object) -> list[nn.Module]:
    """Return the networks that a value is or holds."""
    return cast(list[nn.Module], inside(value, lambda obj: isinstance(obj, nn.Module)))


def meant(value: object) -> object:
    """Return what the notebook has in the place of a value: of what was distributed its source."""
    return value.source if isinstance(value, Distributed) else value


_MISSING = object()
_one = {"": object()}
_ALONE = sys.getrefcount(_one[""])
# Of what a dict has and nothing else.
