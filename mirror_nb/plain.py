"""Plain values: numbers, strings, and tuples, lists, dicts and sets of them. Knows nothing else."""

from __future__ import annotations

import copy as copies
import itertools
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any

FEW = 10_000
# Items of a collection that is copied one by one, in 10 ms.
ITEMS = 100_000
FLAT_ITEMS = 10 * ITEMS
# Larger collections are left alone: to copy them takes 30 ms, and as long of numbers and strings alone.
ATOMS: frozenset[type] = frozenset({int, float, complex, bool, str, bytes, type(None)})
_COLLECTIONS = frozenset({tuple, list, dict, set, frozenset})
KINDS: frozenset[type] = ATOMS | _COLLECTIONS
LIKE_THEM: frozenset[type] = frozenset({OrderedDict, Counter, defaultdict, deque})
# Of Python's own, with more than their items or other ways.
_DEPTH = 100
# Of a collection with many items: one that has itself has no end.
_FACTORIES = (None, int, float, bool, str, list, dict, set, tuple)
NOT_PLAIN = object()


def none(value: Any) -> Any:
    """Stand for no value: raise TypeError."""
    raise TypeError(value)


def copied(
    value: Any,
    atoms: frozenset[type] = ATOMS,
    also: frozenset[type] = frozenset(),
    items: int = FEW,
    flat_items: int = FEW,
    stand_in: Callable[[Any], Any] = none,
) -> Any:
    """Return a copy of a plain value, `NOT_PLAIN` for any other; `also`: of LIKE_THEM those that are plain, too.

    `items`, `flat_items`: so many, and so many numbers and strings, are still not too many. `stand_in` returns what
    stands in the copy for a value inside that is not plain, or raises TypeError; it is asked in their order.
    """
    if type(value) in atoms:
        return value
    collections = _COLLECTIONS | also if also else _COLLECTIONS
    if type(value) not in collections:
        return NOT_PLAIN
    if len(value) > max(FEW, items, flat_items):
        # To look at them all would take long: a tokenizer has some of 50,000.
        return NOT_PLAIN
    left = [FEW]

    def copy(one: Any) -> Any:
        kind = type(one)
        if kind in atoms:
            return one
        if kind not in collections:
            return stand_in(one)
        flat = _has_alone(one, atoms) and kind is not defaultdict
        left[0] -= len(one) * FEW // flat_items if flat else len(one)
        if left[0] < 0:
            raise _ManyError
        if flat:
            return copies.copy(one)
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
    except _ManyError:
        return pickle.loads(pickle.dumps(value)) if _is_plain(value, atoms, collections, items) else NOT_PLAIN
    except (TypeError, RecursionError):
        return NOT_PLAIN


def is_plain(value: Any, atoms: frozenset[type] = ATOMS) -> bool:
    """Whether a value is of these and of collections of them, not too many; by default: if `copied` copies it."""
    return _is_plain(value, atoms, _COLLECTIONS, FEW)


def is_large(value: Any, atoms: frozenset[type]) -> bool:
    """Whether a value would be plain if it had fewer items."""
    return type(value) not in atoms and _is_plain(value, atoms, _COLLECTIONS | LIKE_THEM, sys.maxsize)


class _ManyError(Exception):
    pass


def _is_plain(value: Any, atoms: frozenset[type], collections: frozenset[type], items: int) -> bool:
    """Whether a value is plain, and of no more items: level by level, since of many each would take too long."""
    known = atoms | collections
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        if not level or items < 0 or not known.issuperset(map(type, level)):
            break
        held = [one for one in level if type(one) in collections]
        if any(type(one) is defaultdict and one.default_factory not in _FACTORIES for one in held):
            return False
        items -= sum(map(len, held))
        level = [*itertools.chain(*held), *itertools.chain(*(one.values() for one in held if isinstance(one, dict)))]
    return not level


def _has_alone(one: Collection[Any], atoms: frozenset[type]) -> bool:
    return atoms.issuperset(map(type, one)) and (
        not isinstance(one, dict) or atoms.issuperset(map(type, one.values()))
    )


def same(value: Any, before: Any) -> bool:
    """Whether a value is what it was; a plain value is compared with plain ones only."""
    kind = type(value)
    return value is before or (
        kind is type(before) and (kind in _COLLECTIONS or kind in LIKE_THEM) and _equal(value, before)
    )


def _equal(value: Any, before: Any) -> bool:
    # What was put into it meanwhile may have any idea of equality. What stands in a copy is asked first: a tensor
    # takes 14 µs to say that it is not equal to such.
    try:
        return bool(before == value)
    except Exception:
        return False
