"""Which names of a namespace its functions, classes and objects look up there. Knows no replicas."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from mirror_nb.pickler import global_names


def names_read(value: object, namespace: Mapping[str, Any]) -> set[str]:
    """Return the names that a function, a class or an object of a class of the namespace looks up in it."""
    functions = _functions(value)
    if functions:
        own = (function for function in functions if function.__globals__ is namespace)
        return {name for function in own for name in global_names(function.__code__)}
    if isinstance(value, nn.Module):
        kinds = {type(part) for part in value.modules()}
    else:
        kinds = {value if isinstance(value, type) else type(value)}
    return {name for kind in kinds for name in _class_reads(kind, namespace)}


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


def _functions(value: object) -> list[types.FunctionType]:
    """Return a function, and those that it is around, as decorators make them."""
    found: list[types.FunctionType] = []
    queue = [value]
    while queue:
        value = queue.pop()
        if isinstance(value, functools.partial):
            queue.append(value.func)
        elif isinstance(value, types.FunctionType) and value not in found:
            found.append(value)
            queue += closed_over(value)
    return found


def closed_over(function: types.FunctionType) -> list[object]:
    """Return what a function has of the functions around it."""
    found: list[object] = []
    for cell in function.__closure__ or ():
        # One that is not bound yet has none.
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


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
