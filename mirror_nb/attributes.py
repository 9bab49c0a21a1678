"""Plain attributes of a network's parts: numbers, strings, and tuples, lists, dicts and sets of them.

    model.temperature = 0.5    model.dropout.p = 0.1    self.losses.append(loss)

Knows torch; knows no replicas and no channel.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn

ITEMS = 10_000
# Larger collections are left alone: to compare them takes a millisecond.
_INTERNAL = frozenset(vars(nn.Module()))
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype})
_COLLECTIONS = frozenset({tuple, list, dict, set, frozenset})
_OTHERS = ("keras.", "torchmetrics.", "mirror_nb.", "torch._dynamo.", "torch.jit.")
# Packages whose networks keep in attributes what only goes with other states of theirs.


@final
class Attributes:
    """What the parts of a network had at some moment."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._parts = [_Part(part) for part in parts]

    def changed(self) -> bool:
        """Whether a part has an attribute that it had not, or another value in one."""
        for part in self._parts:
            held = part.held
            if len(held) != part.count or not all(map(operator.is_, map(held.get, part.names), part.atoms)):
                return True
            if part.copies and any(not _same(held.get(name), copy) for name, copy in part.copies.items()):
                return True
        return False

    def since(self, everything: bool = False) -> torch.Tensor | None:
        """Return, as bytes, what has changed, or everything, for `set_attributes`; None if there is nothing."""
        found = {i: values for i, part in enumerate(self._parts) if (values := part.since(everything))}
        return torch.frombuffer(bytearray(pickle.dumps(found)), dtype=torch.uint8) if found else None


@final
class _Part:
    __slots__ = ("atoms", "copies", "count", "held", "names")

    def __init__(self, part: nn.Module) -> None:
        # Of others nothing is held, so that nothing changes.
        self.held = {} if _is_others(type(part)) else vars(part)
        self.count = len(self.held)
        self.names: list[str] = []
        self.atoms: list[Any] = []
        self.copies: dict[str, Any] = {}
        # Of plain attributes that are none.
        for name, value in self.held.items():
            if name not in _INTERNAL:
                if type(value) in _ATOMS:
                    self.names.append(name)
                    self.atoms.append(value)
                elif (copy := _copied(value)) is not _NOT_PLAIN:
                    self.copies[name] = copy

    def since(self, everything: bool) -> dict[str, Any]:
        before = {**dict(zip(self.names, self.atoms, strict=True)), **self.copies}
        changed = (
            (name, _copied(value))
            for name, value in self.held.items()
            if name not in _INTERNAL and (everything or name not in before or not _same(value, before[name]))
        )
        return {name: copy for name, copy in changed if copy is not _NOT_PLAIN}


def _is_others(kind: type) -> bool:
    return any(f"{base.__module__}.".startswith(_OTHERS) for base in kind.__mro__)


def set_attributes(module: nn.Module, changes: torch.Tensor) -> None:
    """Give the network's parts the attributes that another process had."""
    parts = list(module.modules())
    for i, values in pickle.loads(changes.numpy().tobytes()).items():
        if i < len(parts):
            vars(parts[i]).update(values)


_NOT_PLAIN = object()


def _copied(value: Any) -> Any:
    """Return a copy of a plain value, `_NOT_PLAIN` for any other."""
    if type(value) in _ATOMS:
        return value
    left = [ITEMS]

    def copied(one: Any) -> Any:
        kind = type(one)
        if kind in _ATOMS:
            return one
        if kind not in _COLLECTIONS:
            raise TypeError
        left[0] -= len(one)
        if left[0] < 0:
            raise TypeError
        if kind is dict:
            return {copied(key): copied(item) for key, item in one.items()}
        return kind(map(copied, one))

    try:
        return copied(value)
    except (TypeError, RecursionError):
        return _NOT_PLAIN


def _same(value: Any, before: Any) -> bool:
    """Whether a value is what it was; a plain value is compared with plain ones only."""
    return value is before or (type(value) is type(before) and type(value) in _COLLECTIONS and _equal(value, before))


def _equal(value: Any, before: Any) -> bool:
    # What was put into it meanwhile may have any idea of equality.
    try:
        return bool(value == before)
    except Exception:
        return False
