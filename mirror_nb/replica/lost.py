"""What a function captured or was given as copies, and which of them it changed: after the call that is gone.

Looks at lists, dicts, sets and the attributes of objects, classes and functions, a few levels deep, and at all parts
of a module; compares what they hold by identity, and of tensors how often they were written to. Knows no controller.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import pickle
import random
import sys
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from mirror_nb.noticing.digests import digest, table_digest
from mirror_nb.noticing.kinds import has_an_identity, is_data, is_found_out, is_table
from mirror_nb.noticing.slots import own_attributes, slots_of
from mirror_nb.noticing.streams import is_stream, place
from mirror_nb.transfer.compiled import compiled_from
from mirror_nb.transfer.pickler import travels_by_name
from mirror_nb.variables import Variable

_SKIPPED = (
    *(str, bytes, int, float, complex, bool, type(None), tuple, types.ModuleType),
    *(torch.device, torch.dtype),
    # They travel by name.
    logging.Logger,
)
_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None)})
_ARRAYS = (torch.Tensor, np.ndarray)
_DEPTH, _NUMBER, _LENGTH = 3, 200, 100_000
# How deep is looked, at how many objects, and up to which length what a container holds is compared: in a few
# milliseconds, as long as it took to send.
_CELLS = 10_000
# Of a table; of a larger one its shape alone is compared.
_LOOKED_INTO = 1000
# Of a container so many members are looked into, if they may hold something in turn.
_Given = tuple[Sequence[Any], Mapping[str, Any]]
# Arguments, and those by name.
_Stays = Callable[[object], bool]


@final
class Copies:
    """What a function captures, and its arguments; `stays(obj)` tells of what is no copy.

    None of what is captured is looked at with `unchanging`: it has been seen that it holds nothing which could change.
    """

    def __init__(self, function: Any, stays: _Stays, given: _Given = ((), {}), unchanging: bool = False) -> None:
        self._captured = dict if unchanging else functools.partial(_captured, function)
        self._names = dict(self._captured())
        self._stays = stays
        self._seen: set[int] = set()
        self._held: list[tuple[str, Any, Any]] = []
        # Path, object, and what it held.
        self._number = 0
        for name, obj in self._names.items():
            self._look(name, obj, 0)
        for name, obj in _arguments(function, given):
            self._look(name, obj, 0, given=True)

    def changed(self) -> tuple[str, ...]:
        """Return the paths of what holds something else now, as the function's code would name it."""
        bound = tuple(_others(self._names, dict(self._captured())))
        return bound + tuple(path for before in self._held for path in _differences(*before, self._stays))

    def _look(self, path: str, obj: Any, depth: int, given: bool = False) -> None:
        if type(obj) is types.BuiltinFunctionType:
            if not has_an_identity(obj):
                return
            # `append = losses.append`
            obj = obj.__self__
        if isinstance(obj, tuple) and not given and depth <= _DEPTH:
            # Not counted: what is remembered of the past are long lists of tuples.
            for name, inner in _parts(path, obj):
                if depth == 0 or not isinstance(inner, _ARRAYS):
                    self._look(name, inner, depth + 1)
        if isinstance(obj, _SKIPPED) or id(obj) in self._seen or depth > _DEPTH or self._number > _NUMBER:
            return
        self._seen.add(id(obj))
        # Tensors are not counted: a network has many.
        self._number += not isinstance(obj, torch.Tensor)
        if self._stays(obj):
            return
        if isinstance(obj, types.FunctionType) and travels_by_name(obj):
            # What it closes over is this process's own: what hears of seeds, say.
            return
        if isinstance(obj, (types.FunctionType, types.MethodType, functools.partial)):
            names = dict(_captured(obj))
            if _by_value(obj):
                self._held.append((path, obj, names))
            for name, inner in names.items():
                self._look(name, inner, depth + 1)
            return
        if isinstance(obj, type):
            if travels_by_name(obj):
                return
        elif not given:
            # Its methods may count in its class.
            self._look(type(obj).__name__, type(obj), depth + 1)
        held = _content(obj, self._stays)
        if held is None or (given and _is_batch(held)):
            return
        self._held.append((path, obj, held))
        for name, inner in _members(path, held):
            self._look(name, inner, depth + 1, given)
        if not given and isinstance(held, _Attributes) and not isinstance(obj, torch.nn.Module):
            # What is bound there may be a cache; what is written to in place, the averages of an EMA say, is none.
            for name, tensor in _private_tensors(path, obj):
                self._look(name, tensor, depth + 1)


def _captured(function: Any) -> Iterator[tuple[str, Any]]:
    function = compiled_from(function) or function
    if isinstance(function, functools.partial):
        yield from _captured(function.func)
        yield from ((f"args[{i}]", value) for i, value in enumerate(function.args))
        yield from function.keywords.items()
    elif isinstance(function, types.MethodType):
        names = function.__func__.__code__.co_varnames if isinstance(function.__func__, types.FunctionType) else ()
        yield names[0] if names else "self", function.__self__
        yield from _captured(function.__func__)
    elif isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            # One that is not bound yet has none.
            with contextlib.suppress(ValueError):
                yield name, cell.cell_contents
        # Of a function that came by value they are what it uses; of others all of their module's.
        if _by_value(function):
            yield from ((name, obj) for name, obj in function.__globals__.items() if not name.startswith("__"))
            yield from _of_itself(function)
    elif callable(function) and isinstance(type(function).__call__, types.FunctionType):
        # An object of a class with a `__call__`.
        yield from _captured(function.__call__)


def _by_value(function: Any) -> bool:
    # Of which module it is the function itself may not know: a decorator has given it the name of another.
    if not isinstance(function, types.FunctionType):
        return False
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    return module is None or vars(module) is not function.__globals__


def _of_itself(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a function, and the defaults of its arguments."""
    yield from ((f"{function.__name__}.{name}", obj) for name, obj in vars(function).items() if name[0] != "_")
    defaults = function.__defaults__ or ()
    count = function.__code__.co_argcount
    yield from zip(function.__code__.co_varnames[count - len(defaults) : count], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _arguments(function: Any, given: _Given) -> Iterator[tuple[str, Any]]:
    """Yield those arguments that could change, by the names that the function has for them."""
    args, kwargs = given
    watched = [(i, value) for i, value in enumerate(args) if not (_is_array(value) or isinstance(value, _SKIPPED))]
    if watched:
        code = getattr(function, "__code__", None)
        method = isinstance(function, types.MethodType)
        names = code.co_varnames[method : code.co_argcount] if code is not None else ()
        yield from ((names[i] if i < len(names) else f"args[{i}]", value) for i, value in watched)
    yield from ((name, value) for name, value in kwargs.items() if not _is_array(value))


def _is_batch(held: Any) -> bool:
    """Whether tensors are in what an argument holds: steps take apart a batch, and nobody looks at it again."""
    values = held.values() if isinstance(held, dict) else held if isinstance(held, (list, set, deque)) else ()
    return any(map(_is_array, values))


def _is_array(value: Any) -> bool:
    """Whether a value may be of a batch: a Variable is to be assigned to, and none."""
    return isinstance(value, _ARRAYS) and not isinstance(value, Variable)


def _content(obj: Any, stays: _Stays) -> Any:
    """Return a shallow copy of what an object holds, the length of what is long, None for what is not looked at.

    Of a tensor how often it was written to, of an array, the state of random numbers and a file in memory a digest.
    """
    if isinstance(obj, torch.Generator):
        return hash(obj.get_state().numpy().tobytes())
    if is_stream(obj):
        return hash(pickle.dumps(place(obj)))
    if isinstance(obj, random.Random) and type(obj) not in (random.Random, random.SystemRandom):
        return hash(obj.getstate())
    if isinstance(obj, torch.Tensor):
        return None if is_lazy(obj) or obj.is_inference() else obj._version
    if isinstance(obj, np.ndarray):
        return list(itertools.islice(obj.flat, _LENGTH)) if obj.dtype.hasobject else digest(obj)
    if is_table(obj):
        return table_digest(obj) if obj.size <= _CELLS else obj.shape
    if isinstance(obj, itertools.count):
        return repr(obj)
    if isinstance(obj, Iterator) and type(obj).__module__ == "builtins":
        return operator.length_hint(obj, -1)
    kind: Any
    for kind in (dict, list, set, deque, bytearray, array):
        if isinstance(obj, kind):
            # An array's class would have to be told of what.
            return len(obj) if len(obj) > _LENGTH else obj[:] if kind is array else kind(obj)
    try:
        attributes = own_attributes(obj) if slots_of(type(obj)) else vars(obj)
    except Exception:
        # It has none, or its class has a say of its own in that.
        return None
    if not isinstance(attributes, (dict, types.MappingProxyType)):
        return None
    if isinstance(obj, torch.nn.Module):
        return _Attributes(_of_network(obj, stays))
    kind = type(obj)
    # What pandas keeps in private it may have found out by being read.
    private = is_data(kind) and not kind.__module__.startswith("pandas.")
    named = (item for item in attributes.items() if private or not item[0].startswith("_"))
    return _Attributes(item for item in named if not is_found_out(kind, item[0]))


def _of_network(network: torch.nn.Module, stays: _Stays) -> Iterator[tuple[str, Any]]:
    """Yield what a network and those of its parts hold that are copies, but for their modes and what is not saved."""
    for path, part in network.named_modules():
        if stays(part):
            continue
        unsaved = part._non_persistent_buffers_set
        tensors = ((name, tensor) for name, tensor in part._buffers.items() if name not in unsaved)
        for name, value in itertools.chain(vars(part).items(), part._parameters.items(), tensors):
            if not name.startswith("_") and name != "training":
                yield f"{path}.{name}".lstrip("."), value


class _Attributes(dict[str, Any]):
    """Those of an object. Private ones of libraries' data alone: others keep there what they can do without."""

    @staticmethod
    def path(owner: str, name: str) -> str:
        """Return where an attribute is, for the user, who knows no private ones."""
        return owner if name.startswith("_") else f"{owner}.{name}"


def _members(path: str, held: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(held, _Attributes):
        yield from ((held.path(path, name), value) for name, value in held.items())
    elif isinstance(held, dict):
        if not _PLAIN.issuperset(map(type, held.values())):
            some = itertools.islice(held.items(), _LOOKED_INTO)
            yield from ((f"{path}[{key!r}]", value) for key, value in some)
    elif isinstance(held, (list, deque)) and not _PLAIN.issuperset(map(type, held)):
        yield from ((f"{path}[{i}]", value) for i, value in enumerate(itertools.islice(held, _LOOKED_INTO)))


def _private_tensors(path: str, obj: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that private attributes are, or hold in a container."""
    for name, value in own_attributes(obj).items():
        if name.startswith("_"):
            whole = [(f"{path}.{name}", value)]
            inner = _parts(*whole[0]) if isinstance(value, tuple) else _members(*whole[0])
            yield from (each for each in (*whole, *inner) if isinstance(each[1], torch.Tensor))


def _parts(path: str, held: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    fields = getattr(held, "_fields", None)
    paths = [f"{path}[{i}]" for i in range(len(held))] if fields is None else [f"{path}.{name}" for name in fields]
    return zip(paths, held, strict=False)


def _differences(path: str, obj: Any, before: Any, stays: _Stays) -> Iterator[str]:
    if isinstance(obj, types.FunctionType):
        yield from _others(before, dict(_captured(obj)))
        return
    now = _content(obj, stays)
    if isinstance(before, _Attributes) and isinstance(now, _Attributes):
        yield from (before.path(path, name) for name in _others(before, now))
    elif type(now) is not type(before) or not _same(now, before):
        yield path


def _others(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names that are bound to something else."""
    names = [*before, *(name for name in now if name not in before)]
    return [name for name in names if now.get(name, names) is not before.get(name, names)]


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(map(operator.is_, now.values(), map(before.__getitem__, now)))
    if isinstance(now, (list, deque)):
        return len(now) == len(before) and all(map(operator.is_, now, before))
    return bool(now == before)
