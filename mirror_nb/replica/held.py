"""Values with names of their own inside the values of other names: each side is to have such a value once.

    history, log = [], {"loss": history}   ─▶   history: []   log: {"loss": the value of `history`}

Knows no payloads and no networks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, final


@final
class Held:
    """Gives what stands for a value that has a name, where the value of another name holds it."""

    def __init__(self, named: Iterable[tuple[str, object]]) -> None:
        self._named: dict[int, tuple[str, object]] = {}
        for name, value in named:
            # With the value, so that its id stays its own.
            self._named.setdefault(id(value), (name, value))
        self._uses: dict[str, set[str]] = {}
        # By name: the names whose values its own refers to, as it was packed last.
        self._barred: dict[str, set[str]] = {}
        # By name: those that it is to hold copies of.

    def inside(self, name: str, value: object) -> Callable[[object], Any]:
        """For one packing of `value`, which `name` has: return what gives tokens of the values inside it."""
        used = self._uses[name] = set()
        barred = self._barred.setdefault(name, set())

        def token(obj: object) -> Any:
            its, _ = self._named.get(id(obj), (None, None))
            if its is None or its in barred or obj is value:
                return None
            used.add(its)
            return ("held", its)

        return token

    def uses(self, name: str) -> tuple[str, ...]:
        """Return the names whose values the name's own refers to."""
        return tuple(sorted(self._uses.get(name, ())))

    def unsettled(self, there: Collection[str]) -> list[str]:
        """Return the names to pack once more: what they refer to is not `there`, or refers back to them."""
        again = []
        for name, used in self._uses.items():
            wrong = {other for other in used if other not in there or name in self._reached(other)}
            if wrong:
                self._barred[name] |= wrong
                again.append(name)
        return again

    def _reached(self, name: str) -> set[str]:
        reached: set[str] = set()
        queue = [name]
        while queue:
            for other in self._uses.get(queue.pop(), ()):
                if other not in reached:
                    reached.add(other)
                    queue.append(other)
        return reached
