"""What a value holds, kept to notice later that somebody changed it in place. Knows no names.

Watched are containers, NumPy arrays, tensors, objects of the user's own classes, dataclasses, mappings and pandas'
tables, and what the notebook's functions keep besides their code; what is inside them too, as far as it is small.
Other objects of libraries are told apart by identity alone.
"""

from __future__ import annotations

import argparse
import collections.abc
import copy
import copyreg
import dataclasses
import enum
import functools
import inspect
import io
import itertools
import logging
import operator
import pathlib
import pickle
import types
import weakref
import zlib
from collections.abc import Callable, Collection
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Subset

from mirror_nb.insides import closed_over
from mirror_nb.layouts import address, as_row, is_block
from mirror_nb.pickler import Limited
from mirror_nb.sources import is_users
from mirror_nb.told import is_told, told_of

WATCHED_BYTES = 1 << 16
# A value up to this size, pickled, is compared whole; of a larger container only which objects it holds.
ARRAY_BYTES = 64 << 20
# Of a larger array so many bytes are looked at, in evenly spaced pages: reading it all before and after every cell
# would take longer than many cells.
_PAGE = 4096

Token = Callable[[object], Any]
# Gives what stands for an object whose changes others notice: networks, their parameters, optimizers. None for others.


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """What one value held at one time."""

    pickled: bytes = b""
    parts: tuple[object, ...] = ()
    # Of a large container: the very objects in it.
    state: tuple[object, ...] = ()
    # Of a large tensor: autograd's count of writes and its address; of an array its digest.
    beside: tuple[tuple[weakref.ref[Any] | None, object], ...] = ()
    # What is told apart by identity, and its state if it is a tensor.
    own: bool = False
    # It is an object, and no container: of the user's own class, say.

    @property
    def complete(self) -> bool:
        """Whether `same` sees every change: there is nothing inside that is told apart by identity alone."""
        # By their types first: a large container's parts one by one would take long.
        return (_UNCHANGING.issuperset(map(type, self.parts)) or all(map(is_unchanging, self.parts))) and all(
            reference is not None and (state is not None or isinstance(reference(), _NAMED))
            for reference, state in self.beside
        )

    def same(self, other: Content | None) -> bool:
        """Whether nothing was written in between."""
        return (
            other is not None
            and (self.pickled, self.state, len(self.parts)) == (other.pickled, other.state, len(other.parts))
            and all(map(operator.is_, self.parts, other.parts))
            and len(self.beside) == len(other.beside)
            and all(map(_same, self.beside, other.beside))
        )


def content(
    value: object,
    token: Token,
    *,
    large: bool = False,
    sought: Collection[int] = frozenset(),
    seen: Callable[[object], object] = lambda obj: None,
) -> Content | None:
    """Return what `value` holds now; None when it is nothing that is watched. `large`: all of a large array is.

    `seen(obj)` is called with each object that is looked at and whose id is `sought`.
    """
    if isinstance(value, np.ndarray) and value.nbytes > WATCHED_BYTES:
        state = digest(value, whole=large)
        return None if state is None else Content(state=state)
    if isinstance(value, torch.Tensor) and not _is_small(value):
        return Content(state=_written(value))
    if isinstance(value, _AROUND_DATA_SETS):
        return Content(beside=((weakref.ref(value), _of_data_sets(value, token)),), own=True)
    own = _is_own(value) or keeps(value)
    if not own and not isinstance(value, (*_CONTAINERS, np.ndarray, torch.Tensor)):
        return None
    file = Limited(WATCHED_BYTES)
    reader = _Reader(file, token, value, sought, seen)
    try:
        reader.dump(value)
    except Exception:
        # Too large, or its class has a say of its own in how it is read.
        parts = _parts(value)
        found = parts.parts if parts is not None else ()
        # No loop of Python's over all of them: there may be millions.
        for part in itertools.compress(found, map(sought.__contains__, map(id, found))) if sought else ():
            seen(part)
        return parts
    return Content(file.getvalue(), beside=tuple(reader.beside), own=own)


def class_content(kind: type, token: Token) -> Content | None:
    """Return what a class of the user's has of its own now; None for others."""
    if not is_users(kind.__module__):
        return None
    own = {
        name: _member(value)
        for name, value in vars(kind).items()
        if isinstance(value, types.FunctionType) or not name.startswith(_PYTHONS)
    }
    return content(own, token)


def _member(value: object) -> object:
    # Not by identity: with an object that comes back its class gets its methods anew.
    match value:
        case types.FunctionType() if getattr(value, "hooked", False):
            # By torch, at the first optimizer of its class that is made or comes back.
            return _member(inspect.unwrap(value))
        case types.FunctionType():
            return _in_words(value.__code__), value.__defaults__, value.__kwdefaults__
        case property():
            return [_member(function) for function in (value.fget, value.fset, value.fdel)]
        case classmethod() | staticmethod():
            return type(value).__name__, _member(value.__func__)
        case functools.cached_property():
            return _member(value.func)
    return value


def _in_words(code: types.CodeType) -> str:
    consts = [_in_words(const) if isinstance(const, types.CodeType) else repr(const) for const in code.co_consts]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts))


_PYTHONS = ("__", "_abc_")
# How names begin that are Python's: what pickle remembers of a class, say.


def _parts(value: object) -> Content | None:
    match value:
        case dict():
            return Content(parts=(*value.keys(), *value.values()))
        case list() | set() | tuple():
            return Content(parts=tuple(value))
    return None


_CONTAINERS = (list, dict, set, tuple, bytearray, collections.deque)
REFILLED = frozenset(
    {list, dict, set, bytearray, collections.deque}
    | {collections.OrderedDict, collections.Counter, collections.defaultdict}
)


def _is_own(value: object) -> bool:
    kind = type(value)
    if isinstance(value, (type, types.FunctionType, nn.Module, torch.Tensor, *_CONTAINERS)):
        return False
    library = kind.__module__.partition(".")[0]
    if library == __package__:
        return False
    plain = (
        kind in (types.SimpleNamespace, argparse.Namespace) or dataclasses.is_dataclass(kind) or library == "pandas"
    )
    if not (plain or isinstance(value, collections.abc.MutableMapping) or is_users(kind.__module__)):
        return False
    # Of an optimizer of the user's class each side hears by itself what the other changes, as of torch's.
    return not is_told(value) or told_of(value) is None


def keeps(value: object) -> bool:
    """Whether it is a function that may keep something from call to call: of the notebook, a partial or a method."""
    match value:
        case types.FunctionType():
            # By where it was written: `functools.wraps` lets a library's pass for the notebook's.
            return value.__globals__.get("__name__") == "__main__"
        case functools.partial():
            return True
        case types.MethodType():
            return _is_own(value.__self__)
    return False


def _kept(function: types.FunctionType) -> Any:
    """Return what a function has besides its code: defaults, attributes, and the names of the functions around it."""
    kept = function.__defaults__, function.__kwdefaults__, vars(function), closed_over(function)
    return kept if any(kept) else None


def is_refillable(value: object) -> bool:
    """Whether another object with the same `filling` is the same."""
    if stays_itself(value) or _is_table(value):
        return True
    kind = type(value)
    plain = kind is types.SimpleNamespace or all(
        getattr(kind, name, None) is getattr(object, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
    )
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return plain and not slots and hasattr(value, "__dict__") and _is_own(value)


def _is_table(value: object) -> bool:
    """Whether it is a table of pandas or a column of one, and of no class derived from those."""
    kind = type(value)
    return kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series")


def stays_itself(value: object) -> bool:
    """Whether what a cell changes in place in it is changed in the notebook's own: containers and tensors."""
    return type(value) in REFILLED or is_trained(value) or _is_free(value)


def _is_free(value: object) -> bool:
    """Whether it is a tensor that anybody may write to, and that no gradients pass."""
    # Of this class alone: others may have ways of their own.
    return type(value) is torch.Tensor and not value.requires_grad and not value.is_inference() and is_block(value)


def is_trained(value: object) -> bool:
    """Whether it is a tensor whose gradients are of interest: a parameter, or one that was made to be one."""
    # Of these classes alone: a Variable has its own ways.
    return type(value) in (torch.Tensor, nn.Parameter) and value.requires_grad and value.is_leaf  # type: ignore[attr-defined]


def filling(value: object) -> Any:
    """Return what a refillable object holds, for `refill`: members of a container, a tensor's values, attributes."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if _is_table(value):
        return value.copy(deep=False)  # type: ignore[attr-defined]
    return copy.copy(value) if type(value) in REFILLED else dict(vars(value))


def refill(value: Any, held: Any) -> None:
    """Let an object hold this and nothing else."""
    kind = type(value)
    if kind is list or kind is bytearray:
        value[:] = held
    elif kind is collections.deque:
        value.clear()
        value.extend(held)
    elif _is_table(value):
        # Made again out of the other, whose values it shares until one of the two is written to.
        kind.__init__(value, held)
        value.attrs = dict(held.attrs)
    elif isinstance(value, torch.Tensor):
        # To an expanded one nobody can write.
        expanded = any(n > 1 and step == 0 for n, step in zip(value.shape, value.stride(), strict=True))
        with torch.no_grad():
            if value.shape == held.shape and value.dtype == held.dtype and not expanded:
                value.copy_(held)
            else:
                value.data = held.to(value.device, copy=True)
    else:
        inside = value if kind in REFILLED else vars(value)
        inside.clear()
        inside.update(held)
        if kind is collections.defaultdict:
            value.default_factory = held.default_factory


class _Reader(pickle.Pickler):
    """Writes what a value holds; nobody reads it but to compare."""

    def __init__(
        self, file: io.BytesIO, token: Token, root: object, sought: Collection[int], seen: Callable[[object], object]
    ) -> None:
        super().__init__(file, protocol=5)
        self.beside: list[tuple[weakref.ref[Any] | None, object]] = []
        self._token = token
        self._root = root
        self._sought = sought
        self._seen = seen

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) in self._sought:
            self._seen(obj)
        if type(obj) in _PLAIN or obj is self._root:
            return None
        token = self._token(obj)
        if token is not None:
            return token
        if isinstance(obj, torch.Tensor):
            return None if _is_small(obj) else self._beside(obj, _written(obj))
        if isinstance(obj, np.ndarray):
            if obj.nbytes <= WATCHED_BYTES:
                return None
            return self._beside(obj, digest(obj) if obj.nbytes <= ARRAY_BYTES else None)
        if isinstance(obj, _AROUND_DATA_SETS):
            return self._beside(obj, _of_data_sets(obj, self._token))
        if isinstance(obj, types.FunctionType) and keeps(obj):
            return None
        if isinstance(obj, _BY_IDENTITY) or type(obj).__module__.partition(".")[0] == __package__:
            return self._beside(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _nothing, (_values(obj).tobytes(), str(obj.dtype), tuple(obj.shape), obj.requires_grad)
        if isinstance(obj, types.FunctionType):
            # As a state: it may have itself among what it keeps.
            return _nothing, (self._beside(obj),), _kept(obj)
        try:
            reduce = copyreg.dispatch_table.get(type(obj))
            reduced = reduce(obj) if reduce is not None else obj.__reduce_ex__(5)
            return _uncached(reduced) if type(obj).__module__.partition(".")[0] == "pandas" else reduced
        except Exception:
            # A lock, a generator, an open file.
            return _nothing, (self._beside(obj),)

    def _beside(self, obj: object, state: object = None) -> int:
        try:
            self.beside.append((weakref.ref(obj), state))
        except TypeError:
            self.beside.append((None, id(obj)))
        return len(self.beside)


def _uncached(reduced: Any) -> Any:
    """Return what pickle takes of an object of pandas without what it has found out of itself when it was read."""
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced
    make, args, state, *rest = reduced
    parts = state if isinstance(state, tuple) else (state,)
    kept = ({k: v for k, v in part.items() if k != "_cache"} if isinstance(part, dict) else part for part in parts)
    # Before the first reading there may be no attributes at all.
    return make, args, tuple(part for part in kept if not isinstance(part, dict) or part), *rest


def data_sets(value: object) -> list[object]:
    """Return the data sets of the user's own classes that a loader, or one of torch's data sets, reads."""
    found: list[object] = []
    queue: list[Any] = [value] if isinstance(value, _AROUND_DATA_SETS) else []
    while queue:
        one = queue.pop()
        if isinstance(one, (DataLoader, Subset)):
            queue.append(one.dataset)
        elif isinstance(one, (ConcatDataset, ChainDataset)):
            queue += one.datasets
        elif is_users(type(one).__module__):
            found.append(one)
    return found


def _of_data_sets(value: object, token: Token) -> object:
    """Return what is another once somebody changed a data set in a loader; data sets of many examples apart."""
    held = [content(one, token) for one in data_sets(value)]
    return tuple(one.pickled for one in held if one is not None)


def is_unchanging(value: object) -> bool:
    """Whether nobody can change it in place."""
    return type(value) in _UNCHANGING or (
        type(value) in (tuple, frozenset) and all(map(is_unchanging, value))  # type: ignore[call-overload]
    )


def has_an_identity(value: object) -> bool:
    """Whether it matters that two names, or a name and a container, have this very object."""
    return not is_unchanging(value) and not issubclass(type(value), _ALIKE)


_AROUND_DATA_SETS = (DataLoader, Subset, ConcatDataset, ChainDataset)
_UNCHANGING = frozenset({str, bytes, int, float, complex, bool, type(None), range, torch.dtype, torch.device})
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_ALIKE = (type, types.FunctionType, types.ModuleType, logging.Logger, pathlib.PurePath, enum.Enum)
# A copy of one is as good, or is the very same.
WITHOUT_IDENTITY = frozenset({*_UNCHANGING, *_NAMED})
# Types of most of what `has_an_identity` denies.
_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None), tuple, list, dict, set, frozenset})
_BY_IDENTITY = (
    *(*_NAMED, nn.Module, torch.Generator),
    *(torch.utils.data.Dataset, torch.utils.data.Sampler),
)


def _nothing(*_: object) -> None:
    """Stands in a pickle that nobody opens."""


def _written(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what is another once somebody wrote to a tensor: without reading it, which on a GPU would wait."""
    return _version(tensor), address(tensor), tensor.numel(), tensor.requires_grad


def digest(array: Any, whole: bool = False) -> tuple[object, ...] | None:
    """Return what is another once somebody wrote to an array; None for a large one that is no block of plain memory.

    Of one above ARRAY_BYTES it is made of pages here and there, unless `whole`.
    """
    layout = array.dtype.str, array.shape, array.strides
    large = array.nbytes > ARRAY_BYTES and not whole
    plain = type(array) is np.ndarray and not array.dtype.hasobject
    if large and not (plain and (array.flags.c_contiguous or array.flags.f_contiguous)):
        # It would be read from a file, or copied: a view of few elements may be of any size.
        return None
    if not plain:
        return zlib.crc32(array.tobytes()), *layout
    data: Any = np.ascontiguousarray(array.T if array.flags.f_contiguous else array).reshape(-1).view(np.uint8)
    if large:
        pages = data[: data.size // _PAGE * _PAGE].reshape(-1, _PAGE)
        data = np.ascontiguousarray(pages[:: -(-data.size // ARRAY_BYTES)])
    return zlib.crc32(data), *layout


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_block(tensor)


def _is_small(tensor: torch.Tensor) -> bool:
    return _is_plain(tensor) and tensor.nbytes <= WATCHED_BYTES


def _values(tensor: torch.Tensor) -> Any:
    return as_row(tensor).view(torch.uint8).numpy()


def _version(tensor: torch.Tensor) -> object:
    if not tensor.is_inference():
        return tensor._version
    # Nobody counts the writes to it: it is read, or taken for another each time.
    return hash(_values(tensor).tobytes()) if _is_plain(tensor) else object()


def _same(one: tuple[Any, object], other: tuple[Any, object]) -> bool:
    if one[1] != other[1] or (one[0] is None) != (other[0] is None):
        return False
    # What is gone is another, whatever has its place in memory now.
    return one[0] is None or (one[0]() is not None and one[0]() is other[0]())
