"""Which names of a namespace its functions, classes and objects look up there. Knows no replicas."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mirror_nb.noticing.insides import LEAVES, members, walk
from mirror_nb.transfer.pickler import global_names
from mirror_nb.values import PerReplica


def names_read(value: object, namespace: Mapping[str, Any]) -> set[str]:
    """Return the names that the functions in a value, and the classes of objects in it, look up in the namespace."""
    functions, kinds = _code(value)
    names = {name for kind in kinds for name in _class_reads(kind, namespace)}
    for function in functions:
        if function.__globals__ is namespace:
            names |= global_names(function.__code__)
    return names


def names_bound(value: object, namespace: Mapping[str, Any]) -> set[str]:
    """Return the names of the namespace that the functions in a value bind: those that they declare `global`."""
    functions, _ = _code(value)
    return {n for f in functions if f.__globals__ is namespace for n in global_names(f.__code__, _BINDS)}


def reached(names: Iterable[str], namespace: Mapping[str, Any]) -> set[str]:
    """Return the names, and those that what they stand for looks up in turn, as far as the namespace has them."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop()
        if name in namespace and name not in found:
            found.add(name)
            queue += names_read(namespace[name], namespace)
    return found


def _code(value: object) -> tuple[list[types.FunctionType], set[type]]:
    """Return the functions that a value is or holds, however deep, and the classes of what it holds.

    So those in a list of callbacks, a dict of metrics, a trainer's loss or a network's hooks.
    """
    functions: list[types.FunctionType] = []
    kinds: set[type] = set()

    def into(obj: object) -> Iterable[object]:
        kinds.add(type(obj))
        if isinstance(obj, types.FunctionType):
            functions.append(obj)
        elif isinstance(obj, type):
            kinds.add(obj)
        elif isinstance(obj, nn.Module):
            parts = list(obj.modules())
            kinds.update(map(type, parts))
            return _attributes(parts)
        return () if _is_closed(type(obj)) else members(obj)

    walk(value, into)
    return functions, kinds


def _attributes(parts: list[nn.Module]) -> list[object]:
    """Return what parts of a network have besides tensors and parts, hooks too: of twenty few that are not empty."""
    return [
        held
        for part in parts
        for name, held in vars(part).items()
        if type(held) not in LEAVES and (type(held) not in _HOLDERS or held) and name not in _REGISTERED
    ]


def _is_closed(kind: type) -> bool:
    """Whether what objects of a class hold is tensors, or this library's own."""
    return issubclass(kind, torch.optim.Optimizer) or (
        kind.__module__.partition(".")[0] == "mirror_nb" and kind is not PerReplica
    )


def _class_reads(kind: type, namespace: Mapping[str, Any]) -> set[str]:
    names: set[str] = set()
    for base in kind.__mro__:
        if base.__module__ != namespace.get("__name__"):
            continue
        names.add(base.__name__)
        for member in vars(base).values():
            parts = [getattr(member, part, None) for part in ("__func__", "fget", "fset", "func")]
            for inner in (member, *parts):
                if isinstance(inner, types.FunctionType) and inner.__globals__ is namespace:
                    names |= global_names(inner.__code__)
    return names


_BINDS = frozenset({"STORE_GLOBAL"})
_HOLDERS = frozenset({dict, OrderedDict, set})
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
