"""What an object has by way of attributes, those for which its class has slots among them. Knows Python alone."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any


def slots_of(kind: type) -> tuple[str, ...]:
    """Return the attributes for which a class, or one that it derives from, has slots: the names of the slots."""
    known = _known.get(kind)
    if known is None:
        bases = [base for base in kind.__mro__ if "__slots__" in vars(base)]
        names = [_mangled(base, name) for base in bases for name in _declared(base) if name not in _PYTHONS]
        # In an order that is the same in all processes: what replicas tell is compared.
        known = _known[kind] = tuple(dict.fromkeys(names))
    return known


_known: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
# This is asked of thousands of objects before each cell.


def _declared(kind: type) -> tuple[str, ...]:
    slots = vars(kind)["__slots__"]
    # As a dict they come with what they are for.
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _mangled(kind: type, name: str) -> str:
    private = name.startswith("__") and not name.endswith("__") and kind.__name__.strip("_")
    return f"_{kind.__name__.lstrip('_')}{name}" if private else name


_PYTHONS = ("__dict__", "__weakref__")


def own_attributes(obj: object) -> dict[str, Any]:
    """Return a copy of what an object has; of what its class computes nothing."""
    inside = {name: getattr(obj, name) for name in slots_of(type(obj)) if hasattr(obj, name)}
    return {**getattr(obj, "__dict__", {}), **inside}


def set_attributes(obj: object, held: Mapping[str, Any]) -> None:
    """Let an object have these attributes and no others, also one that refuses to be changed."""
    slots = slots_of(type(obj))
    for name in slots:
        if hasattr(obj, name):
            object.__delattr__(obj, name)
        if name in held:
            object.__setattr__(obj, name, held[name])
    own: dict[str, Any] = getattr(obj, "__dict__", {})
    own.clear()
    own.update((name, value) for name, value in held.items() if name not in slots)
