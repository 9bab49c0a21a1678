"""Pickles of functions, kept while nothing that they capture can have changed. Knows no replicas.

To pickle a training step takes 0.1 ms, and to make it again in the replicas as long; a loop calls the same function
for every batch.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast, final

import torch
from torch import nn

from mirror_nb.mirroring.handles import referring
from mirror_nb.noticing.kinds import has_an_identity
from mirror_nb.transfer.compiled import compiled_from
from mirror_nb.transfer.payload import Payload
from mirror_nb.transfer.pickler import global_names, is_nameless, is_of_process, travels_by_name

_UNCHANGING = (
    *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis)),
    *(types.ModuleType, types.CodeType, torch.dtype, torch.device),
)


@final
class Functions:
    """The latest pickle of each function, for the caller whose `refers(obj)` tells what travels by reference."""

    def __init__(self, refers: Callable[[object], bool]) -> None:
        self._refers = refers
        self._kept: weakref.WeakKeyDictionary[Any, tuple[list[object], list[object], set[int], Payload]]
        self._kept = weakref.WeakKeyDictionary()
        # What the pickle depends on, what of that travels by reference, the ids of plain modules, and the pickle. The
        # second weakly, in the first, too: a function may outlive the networks that it was called with.

    def get(self, function: Any) -> Payload | None:
        """Return the pickle of the function, if it is as good as a new one."""
        kept = self._kept.get(function) if type(function) is types.FunctionType else None
        if kept is None:
            return None
        captured, referred, plain, payload = kept
        now = _captured(function, plain)
        if len(now) != len(captured) or not all(map(operator.is_, now, map(_found, captured))):
            return None
        return payload if all(map(self._refers, map(_found, referred))) else None

    def keep(self, function: Any, payload: Payload) -> None:
        """Keep a pickle, if what the function captures cannot change unseen."""
        if type(function) is types.FunctionType:
            plain = {id(obj) for obj in _captured(function) if _is_plain(obj) and not self._refers(obj)}
            captured = _captured(function, plain)
            referred = [obj for obj in captured if not _unchanging(obj) and id(obj) not in plain]
            # What it counts with begins anew with each call, as all that it captures.
            if all(map(self._refers, referred)) and not any(map(_counts, [function, *captured])):
                weakly = {id(obj): referring(obj) for obj in referred}
                known = [weakly.get(id(obj), obj) for obj in captured]
                self._kept[function] = (known, list(weakly.values()), plain, payload)

    def drop(self, function: Any) -> None:
        """Pickle a function anew that has failed: it may lack a submodule, which its caller imports next."""
        if type(function) is types.FunctionType:
            self._kept.pop(function, None)

    def forget(self) -> None:
        """Forget all: what travelled by reference is known by other names."""
        self._kept.clear()


def _found(known: object) -> object:
    """Return what is kept, or what a weak reference means."""
    return known() if type(known) is weakref.ref else known


def _unchanging(obj: object) -> bool:
    if is_of_process(obj):
        return True
    if is_nameless(obj):
        # It travels with what it holds, as no other module does.
        return False
    if isinstance(obj, types.BuiltinFunctionType):
        # A method of a list changes with that.
        return not has_an_identity(obj)
    return isinstance(obj, (*_UNCHANGING, types.FunctionType)) or (isinstance(obj, type) and travels_by_name(obj))


def _counts(obj: object) -> bool:
    """Whether it is a function that may bind what it captures to something else, or that has attributes."""
    obj = compiled_from(obj) or obj
    if not isinstance(obj, types.FunctionType) or travels_by_name(obj):
        return False
    if any(not name.startswith("_") for name in obj.__dict__):
        return True
    rebinds = _rebinds.get(obj.__code__)
    if rebinds is None:
        rebinds = _rebinds[obj.__code__] = _binds(obj.__code__, frozenset(obj.__code__.co_freevars))
    return rebinds


def _binds(code: types.CodeType, names: frozenset[str]) -> bool:
    """Whether code, or that of functions in it, binds a global name or one of these, which it closes over."""
    for instruction in dis.get_instructions(code):
        kind, _, scope = instruction.opname.partition("_")
        if kind in ("STORE", "DELETE") and (scope == "GLOBAL" or (scope == "DEREF" and instruction.argval in names)):
            return True
    return any(_binds(inner, names) for inner in code.co_consts if isinstance(inner, types.CodeType))


_rebinds: weakref.WeakKeyDictionary[types.CodeType, bool] = weakref.WeakKeyDictionary()


def _is_plain(obj: object) -> bool:
    """Whether it is a module with no tensors and no parts, such as a loss."""
    return isinstance(obj, nn.Module) and not any(value is not None for value in _contents(obj))


def _contents(module: nn.Module) -> Iterator[object]:
    """Yield what is in the module's containers: tensors, parts, hooks."""
    for held in vars(module).values():
        if isinstance(held, (dict, set)):
            yield from held.values() if isinstance(held, dict) else held


def _attributes(module: nn.Module) -> list[object]:
    """Return what else a plain module depends on; something new for one that is plain no more."""
    if not _is_plain(module):
        return [object()]
    return [type(module), *(len(held) if isinstance(held, (dict, set)) else held for held in vars(module).values())]


def _captured(function: types.FunctionType, plain: Collection[int] = ()) -> list[object]:
    """Return all that the pickle of a function depends on.

    Of functions in it their code and what these capture, of modules whose ids are in `plain` their attributes.
    """
    found: list[object] = []
    queue = [function]
    for current in queue:
        compiled = compiled_from(current)
        if compiled is not None:
            found.append(compiled)
            queue += [compiled] if type(compiled) is types.FunctionType else []
            continue
        found.append(current.__code__)
        for obj in _parts(current):
            found.append(obj)
            if type(obj) is types.FunctionType and obj not in queue:
                queue.append(obj)
            elif id(obj) in plain:
                found += _attributes(cast(nn.Module, obj))
    return found


def names_in(function: Any) -> dict[str, object]:
    """Return what a function captures, by the names that its code has for it."""
    if isinstance(function, functools.partial):
        given = {f"args[{i}]": value for i, value in enumerate(function.args)}
        return {**names_in(function.func), **given, **function.keywords}
    if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
        return {function.__func__.__code__.co_varnames[0]: function.__self__, **names_in(function.__func__)}
    if not isinstance(function, types.FunctionType):
        return {}
    known = function.__globals__
    found = {name: known[name] for name in _names(function.__code__) if name in known}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # One that is not bound yet has none.
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _parts(function: types.FunctionType) -> list[object]:
    known = function.__globals__
    parts = [known.get(name) for name in _names(function.__code__)]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:
            # Not bound yet.
            parts.append(None)
    if function.__defaults__:
        parts += function.__defaults__
    if function.__kwdefaults__:
        parts += function.__kwdefaults__.values()
    if function.__dict__:
        parts += function.__dict__.values()
    return parts


def _names(code: types.CodeType) -> tuple[str, ...]:
    names = _names_of.get(code)
    if names is None:
        names = _names_of[code] = tuple(sorted(global_names(code)))
    return names


_names_of: weakref.WeakKeyDictionary[types.CodeType, tuple[str, ...]] = weakref.WeakKeyDictionary()
