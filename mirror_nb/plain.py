"""Plain values: numbers, strings, and tuples, lists, dicts and sets of them. Knows nothing else."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Set
from typing import Any

ITEMS = 10_000
# Larger collections are left alone: to compare them takes a millisecond.
ATOMS: frozenset[type] = frozenset({int, float, complex, bool, str, bytes, type(None)})
_COLLECTIONS = frozenset({tuple, list, dict, set, frozenset})
LIKE_THEM: frozenset[type] = frozenset({OrderedDict, Counter, defaultdict, deque})
# Of Python's own, with more than their items or other ways.
_FACTORIES = (None, int, float, bool, str, list, dict, set, tuple)
NOT_PLAIN = object()


def copied(value: Any, atoms: Set[type] = ATOMS, also: Set[type] = frozenset()) -> Any:
    """Return a copy of a plain value, `NOT_PLAIN` for any other; `also`: of LIKE_THEM those that are plain, too."""
    if type(value) in atoms:
        return value
    left = [ITEMS]
    collections = _COLLECTIONS | also if also else _COLLECTIONS

    def copy(one: Any) -> Any:
        kind = type(one)
        if kind in atoms:
            return one
        if kind not in collections:
            raise TypeError
        left[0] -= len(one)
        if left[0] < 0:
            raise TypeError
        if kind is deque:
            return deque(map(copy, one), one.maxlen)
        if not issubclass(kind, dict):
            return kind(map(copy, one))
        items = {copy(key): copy(item) for key, item in one.items()}
        if kind is defaultdict:
            if one.default_factory not in _FACTORIES:
                raise TypeError
            return defaultdict(one.default_factory, items)
        return items if kind is dict else kind(items)

    try:
        return copy(value)
    except (TypeError, RecursionError):
        return NOT_PLAIN


def same(value: Any, before: Any) -> bool:
    """Whether a value is what it was; a plain value is compared with plain ones only."""
    kind = type(value)
    return value is before or (
        kind is type(before) and (kind in _COLLECTIONS or kind in LIKE_THEM) and _equal(value, before)
    )


def _equal(value: Any, before: Any) -> bool:
    # What was put into it meanwhile may have any idea of equality.
    try:
        return bool(value == before)
    except Exception:
        return False
