"""Plain values: numbers, strings, and tuples, lists, dicts and sets of them. Knows nothing else."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

ITEMS = 10_000
# Larger collections are left alone: to compare them takes a millisecond.
ATOMS: frozenset[type] = frozenset({int, float, complex, bool, str, bytes, type(None)})
_COLLECTIONS = frozenset({tuple, list, dict, set, frozenset})
NOT_PLAIN = object()


def copied(value: Any, atoms: Set[type] = ATOMS) -> Any:
    """Return a copy of a plain value, `NOT_PLAIN` for any other."""
    if type(value) in atoms:
        return value
    left = [ITEMS]

    def copy(one: Any) -> Any:
        kind = type(one)
        if kind in atoms:
            return one
        if kind not in _COLLECTIONS:
            raise TypeError
        left[0] -= len(one)
        if left[0] < 0:
            raise TypeError
        if kind is dict:
            return {copy(key): copy(item) for key, item in one.items()}
        return kind(map(copy, one))

    try:
        return copy(value)
    except (TypeError, RecursionError):
        return NOT_PLAIN


def same(value: Any, before: Any) -> bool:
    """Whether a value is what it was; a plain value is compared with plain ones only."""
    return value is before or (type(value) is type(before) and type(value) in _COLLECTIONS and _equal(value, before))


def _equal(value: Any, before: Any) -> bool:
    # What was put into it meanwhile may have any idea of equality.
    try:
        return bool(value == before)
    except Exception:
        return False
