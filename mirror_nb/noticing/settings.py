"""Attributes of an object, one by one, and which of them somebody has set since. What these hold is not looked at."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from mirror_nb.noticing.kinds import UNCHANGING, alike, is_table
from mirror_nb.noticing.refilling import is_call, is_refillable, stays_itself
from mirror_nb.noticing.slots import slots_of
from mirror_nb.noticing.streams import is_stream


def attributes(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object, to read and to write, if there is nothing else to it; None for others."""
    more = stays_itself(value) or is_table(value) or is_call(value) or is_stream(value)
    return vars(value) if is_refillable(value) and not (more or slots_of(type(value))) else None


@final
@dataclass(frozen=True, slots=True)
class Was:
    """What an attribute was: kept if it is plain, or can only be kept."""

    value: object
    weakly: weakref.ref[Any] | None = None

    @classmethod
    def of(cls, value: object) -> Was:
        try:
            return cls(value) if type(value) in UNCHANGING else cls(None, weakref.ref(value))
        except TypeError:
            return cls(value)

    def is_still(self, now: object) -> bool:
        """Whether it is the same object, or an equal plain one."""
        if self.weakly is None:
            return alike(self.value, now)
        return now is not None and self.weakly() is now


def set_since(before: Mapping[str, Was], now: Mapping[str, object]) -> set[str]:
    """Return the names of attributes that are new or gone by now, or other ones."""
    known = before.keys() & now.keys()
    return (before.keys() ^ now.keys()) | {name for name in known if not before[name].is_still(now[name])}
