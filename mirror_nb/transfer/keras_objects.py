"""Keras's objects as pickle takes them: as they are, attribute by attribute.

Keras itself pickles a model as an archive of configurations. That lacks what users hang on their models, and needs
every class to be registered. Knows Keras's classes where Keras is imported, and never imports it; knows no payload
and no tensor.

What goes by the ids of objects, which are others in a copy, is set right once all of it is there:

    reduce_keras(obj) ─▶ pickle ─▶ with repairing(): load()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LEFT_BEHIND = ("train_function", "test_function", "predict_function", "history", "_eval_epoch_iterator")
# Of a trainer: made anew where they are needed.
_COLLECTIONS = ("TrackedList", "TrackedDict", "TrackedSet", "TrackedOrderedDict")
_SAVEABLE = "keras.src.saving.keras_saveable"
_HISTORY = "keras.src.callbacks.history"
_TRACKING = "keras.src.utils.tracking"


def reduce_keras(obj: Any) -> tuple[Any, ...] | None:
    """Return how pickle shall take one of Keras's objects, as `__reduce__` does; None: it is none of these."""
    kinds = _kinds()
    if kinds is None:
        return None
    if type(obj) is getattr(sys.modules.get(_HISTORY), "History", None):
        # Numbers that are equal on all replicas, and a model that is not: it has a name of its own.
        return _bare, (type(obj),), {**vars(obj), "_model": None}, None, None, _put
    saveable, tracker, collections = kinds
    if isinstance(obj, collections):
        return _empty, (type(obj),), (_items(obj), vars(obj)), None, None, _fill
    if isinstance(obj, tracker):
        return _empty, (type(obj),), {**vars(obj), "stored_ids": {}}, None, None, _put_tracker
    if isinstance(obj, saveable):
        return _bare, (type(obj),), _state(obj), None, None, _put
    return None


def _kinds() -> tuple[type, type, tuple[type, ...]] | None:
    saving, tracking = sys.modules.get(_SAVEABLE), sys.modules.get(_TRACKING)
    if saving is None or tracking is None or not hasattr(saving, "KerasSaveable") or not hasattr(tracking, "Tracker"):
        return None
    collections = tuple(getattr(tracking, name) for name in _COLLECTIONS if hasattr(tracking, name))
    return saving.KerasSaveable, tracking.Tracker, collections


def _state(obj: Any) -> dict[str, Any]:
    state = dict(vars(obj))
    if "train_function" in state:
        for name in _LEFT_BEHIND:
            if name in state:
                state[name] = None
    variables = state.get("_trainable_variables")
    if isinstance(variables, list) and "_trainable_variables_indices" in state:
        _name_keys(state, variables)
    return state


def _name_keys(state: dict[str, Any], variables: list[Any]) -> None:
    """An optimizer knows its variables by their ids: send the variables themselves."""
    by_id = {id(variable): variable for variable in variables}
    for name, value in list(state.items()):
        if isinstance(value, (dict, set)) and any(type(key) is int and key in by_id for key in value):
            entries = value.items() if isinstance(value, dict) else ((key, None) for key in value)
            known = [(by_id[key], entry) for key, entry in entries if key in by_id]
            state[name] = _Keys(known, isinstance(value, dict))


class _Keys:
    """Entries of a dict or a set that goes by the ids of variables."""

    def __init__(self, entries: list[tuple[Any, Any]], mapping: bool) -> None:
        self.entries, self.mapping = entries, mapping

    def rebuilt(self) -> Any:
        if self.mapping:
            return {id(variable): entry for variable, entry in self.entries}
        return {id(variable) for variable, _ in self.entries}


# ---------------------------------------------------------------------- on the other side

_pending: list[list[Callable[[], None]]] = []


@contextmanager
def repairing() -> Iterator[None]:
    """Set right, at the end of the block, what was unpickled inside."""
    _pending.append([])
    try:
        yield
        for repair in _pending[-1]:
            repair()
    finally:
        _pending.pop()


def _bare(kind: type) -> Any:
    # Keras's own __new__ wraps methods of the object; the wrapped ones come with the state.
    return object.__new__(kind)


def _empty(kind: Any) -> Any:
    return kind.__new__(kind)


def _put(obj: Any, state: dict[str, Any]) -> None:
    # Not attribute by attribute: that would track each of them again.
    vars(obj).update(state)
    keyed = {name: value for name, value in state.items() if isinstance(value, _Keys)}
    if keyed and _pending:
        _pending[-1].append(lambda: vars(obj).update({name: keys.rebuilt() for name, keys in keyed.items()}))


def _put_tracker(tracker: Any, state: dict[str, Any]) -> None:
    vars(tracker).update(state)

    def repair() -> None:
        tracker.stored_ids = {name: {id(item) for item in store} for name, (_, store) in tracker.config.items()}

    if _pending:
        _pending[-1].append(repair)


def _items(collection: Any) -> Any:
    return dict(collection) if isinstance(collection, dict) else list(collection)


def _fill(collection: Any, state: tuple[Any, dict[str, Any]]) -> None:
    items, attributes = state
    vars(collection).update(attributes)
    if isinstance(collection, list):
        list.extend(collection, items)
    elif isinstance(collection, dict):
        for key, item in items.items():
            dict.__setitem__(collection, key, item)
    else:
        set.update(collection, items)
