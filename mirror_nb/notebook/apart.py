"""Objects that replicas have changed in ways of their own: what the notebook sets in one since is sent all the same.

    learn.loss = …       in every replica, another one     ─▶ stays there, and makes the object another one
    learn.rate = 0.01    in the notebook                   ─▶ this attribute alone is sent

Knows attributes. Knows no names and no payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from mirror_nb.messages import Setting
from mirror_nb.noticing.contents import Content
from mirror_nb.noticing.settings import Was, attributes, set_since

Look = Callable[[object], Content | None]
# Tells what a value holds now.


@final
@dataclass(frozen=True, slots=True)
class Apart:
    """What the attributes of such an object were here as both sides had the same, or as they were sent since."""

    ours: dict[str, Was]
    inside: dict[str, Content | None]
    # What these held.
    theirs: frozenset[str]
    # Those that replicas have set since.

    @classmethod
    def of(cls, obj: object, theirs: frozenset[str], look: Look) -> Apart | None:
        """Return what the attributes are now; None where there is more to the object than these."""
        own = attributes(obj)
        if own is None:
            return None
        ours = {name: Was.of(value) for name, value in own.items()}
        return cls(ours, {name: look(value) for name, value in own.items()}, theirs)

    def set_there(self, names: frozenset[str]) -> Apart:
        """Replicas have set these, too."""
        return replace(self, theirs=self.theirs | names)

    def setting(self, obj: object, look: Look) -> Setting | None:
        """Return what was set here alone since; None if that is nothing, or not all that was changed here."""
        now: Mapping[str, Any] = attributes(obj) or {}
        names = set_since(self.ours, now)
        kept = {name: self.inside[name] for name in now.keys() - names}
        if not names or names & self.theirs or any(held and not held.same(look(now[n])) for n, held in kept.items()):
            return None
        return Setting({name: now[name] for name in names & now.keys()}, frozenset(names - now.keys()))
