"""Values with names of their own inside the values of other names: each side is to have such a value once.

    history, log = [], {"loss": history}   ─▶   history: []   log: {"loss": the value of `history`}

Knows no payloads and no networks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, final

from mirror_nb.noticing.drawn import axes, place_of


@final
class Held:
    """Gives what stands for a value that has a name, where the value of another name holds it.

    Those of `refilled` names are on the other side, whatever travels. Of `others`, which have names too, it only notes
    where copies of them travel.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, object]],
        refilled: Collection[str] = (),
        others: Iterable[tuple[str, object]] = (),
    ) -> None:
        self._named: dict[int, tuple[str, object]] = {}
        for name, value in named:
            # With the value, so that its id stays its own.
            self._named.setdefault(id(value), (name, value))
        self._uses: dict[str, set[str]] = {}
        # By name: the names whose values its own refers to, as it was packed last.
        self._barred: dict[str, set[str]] = {}
        # By name: those that it is to hold copies of.
        self._refilled = frozenset(refilled)
        self._others = {id(value): (name, value) for name, value in others}
        self._copied: set[str] = set()
        # Names whose values, as they were packed last, hold copies of what has a name.

    def inside(self, name: str, value: object) -> Callable[[object], Any]:
        """For one packing of `value`, which `name` has: return what gives tokens of the values inside it."""
        used = self._uses[name] = set()
        barred = self._barred.setdefault(name, set())
        self._copied.discard(name)
        drawn = axes()

        def token(obj: object) -> Any:
            if isinstance(obj, drawn) and (place := place_of(obj)) is not None:
                return self._drawn(*place, value, used, barred)
            its, _ = self._named.get(id(obj), (None, None))
            if obj is value:
                return ("held", name) if name in self._refilled else None
            if its is None or its in barred:
                if its is not None or id(obj) in self._others:
                    self._copied.add(name)
                return None
            used.add(its)
            # Pickles of replicas are compared: in all of them it is one string with an attribute of that name.
            return ("held", sys.intern(its))

        return token

    def _drawn(self, figure: object, number: int, value: object, used: set[str], barred: Collection[str]) -> Any:
        """Return what stands for axes by the name of their figure; None inside that, and where it has none."""
        name, _ = self._named.get(id(figure), (None, None))
        if name is None or figure is value or name in barred:
            return None
        used.add(name)
        return ("drawn", sys.intern(name), number)

    def uses(self, name: str) -> tuple[str, ...]:
        """Return the names whose values the name's own refers to."""
        return tuple(sorted(self._uses.get(name, ())))

    def copies(self, name: str) -> bool:
        """Whether the name's value travels with copies of what has names of its own."""
        return name in self._copied

    def unsettled(self, there: Collection[str]) -> list[str]:
        """Return the names to pack once more: what they refer to is not `there`, or refers back to them."""
        again = []
        for name, used in self._uses.items():
            wrong = {other for other in used if other not in there or self._refers_back(other, name)}
            if wrong:
                self._barred[name] |= wrong
                again.append(name)
        return again

    def _refers_back(self, other: str, name: str) -> bool:
        # What is refilled is there before all that refers to it, and what it refers to.
        reached: set[str] = set()
        queue = [] if name in self._refilled else [other]
        while queue:
            found = queue.pop()
            if found not in reached and found not in self._refilled:
                reached.add(found)
                queue += self._uses.get(found, ())
        return name in reached
