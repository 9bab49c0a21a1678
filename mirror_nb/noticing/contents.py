"""What a value holds, kept to notice later that somebody changed it in place. Knows no names.

Watched are containers, NumPy arrays, tensors, objects of the user's own classes, dataclasses, mappings and pandas'
tables, and what the notebook's functions keep besides their code; what is inside them too, where it is very
much that of the outer levels. Other objects of libraries are told apart by identity alone.
"""

from __future__ import annotations

import argparse
import collections.abc
import contextlib
import copy
import copyreg
import dataclasses
import datetime
import decimal
import enum
import functools
import inspect
import io
import logging
import operator
import pathlib
import pickle
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from mirror_nb.distributed import Distributed
from mirror_nb.environment.sources import is_users
from mirror_nb.noticing.insides import closed_over
from mirror_nb.noticing.levels import Kinds, Levels, Opener
from mirror_nb.tensors.layouts import address, as_row, is_block
from mirror_nb.transfer.pickler import Limited, TooLarge
from mirror_nb.transfer.told import is_told, told_of

WATCHED_BYTES = 1 << 16
# A value up to this size, pickled, is compared whole; of a larger one which objects are in it, in those, and so on.
_WRITTEN_OBJECTS = 2000
# The same, for objects that are neither containers nor plain: each takes as long to write as a hundred bytes.
WATCHED_OBJECTS = 2_500_000
# Of so many: to go through them takes a tenth of a second. Where there are more, those of the outer levels.
_CLASS_BYTES = 1 << 20
# What is looked at of a class is made anew each time: nothing in it is told by identity.
_ODD = 100
# What it takes to look at an array or a tensor in them.
ARRAY_BYTES = 64 << 20
# Of a larger array so many bytes are looked at, in evenly spaced pages: reading it all before and after every cell
# would take longer than many cells.
_PAGE = 4096
_ARRAYS_BYTES = 256 << 20
# Of many arrays in a large value so much is read, for the same reason.

Token = Callable[[object], Any]
# Gives what stands for an object whose changes others notice: networks, their parameters, optimizers. None for others.


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """What one value held at one time."""

    pickled: bytes = b""
    parts: tuple[object, ...] = ()
    # Of a large container or object: the plain objects in it, and in those.
    whole: bool = False
    # All that can change in the parts is among the parts, or beside.
    state: tuple[object, ...] = ()
    # Of a large tensor: autograd's count of writes and its address; of an array its digest; of parts their numbers.
    beside: tuple[tuple[weakref.ref[Any] | None, object], ...] = ()
    # What is told apart by identity, and its state if it is a tensor.
    own: bool = False
    # It is an object, and no container: of the user's own class, say.

    @property
    def complete(self) -> bool:
        """Whether `same` sees every change: there is nothing inside that is told apart by identity alone."""
        # By their types first: a large container's parts one by one would take long.
        return (
            self.whole or _UNCHANGING.issuperset(map(type, self.parts)) or all(map(is_unchanging, self.parts))
        ) and all(
            reference is not None and (state is not None or isinstance(reference(), _NAMED))
            for reference, state in self.beside
        )

    def same(self, other: Content | None) -> bool:
        """Whether nothing was written in between."""
        return (
            other is not None
            and (self.pickled, self.state, len(self.parts)) == (other.pickled, other.state, len(other.parts))
            and (all(map(operator.is_, self.parts, other.parts)) or all(map(_alike, self.parts, other.parts)))
            and len(self.beside) == len(other.beside)
            and all(map(_same, self.beside, other.beside))
        )


def content(
    value: object,
    token: Token,
    *,
    large: bool = False,
    most: int | None = None,
    objects: int | None = None,
    sought: Collection[int] = frozenset(),
    seen: Callable[[object], object] = lambda obj: None,
) -> Content | None:
    """Return what `value` holds now; None when it is nothing that is watched. `large`: all of a large array is.

    Up to `most` bytes it is compared whole, and of a larger value so many `objects`: WATCHED_BYTES and
    WATCHED_OBJECTS, if that is not told.
    `seen(obj)` is called with each object that is looked at and whose id is `sought`.
    """
    if isinstance(value, np.ndarray) and value.nbytes > WATCHED_BYTES:
        state = digest(value, whole=large)
        return None if state is None else Content(state=state)
    if isinstance(value, torch.Tensor) and not _is_small(value):
        return Content(state=_written(value))
    if _is_around_data(value):
        return Content(beside=((weakref.ref(value), _of_data_sets(value, token)),), own=True)
    own = _is_own(value) or keeps(value)
    if not own and not isinstance(value, (*_CONTAINERS, np.ndarray, torch.Tensor)):
        return None
    file = Limited(WATCHED_BYTES if most is None else most)
    reader = _Reader(file, token, value, sought, seen)
    reader.room = _WRITTEN_OBJECTS
    try:
        reader.dump(value)
    except Exception:
        # Too large, or its class has a say of its own in how it is read.
        with contextlib.suppress(Exception):
            # There are objects that cannot be looked into.
            reader = _Reader(io.BytesIO(), token, value, sought, seen)
            return _large(value, reader, own, WATCHED_OBJECTS if objects is None else objects)
        return None
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
    return content(own, token, most=_CLASS_BYTES)


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
    if library == "mirror_nb":
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


def attributes(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object, to read and to write, if there is nothing else to it; None for others."""
    return vars(value) if is_refillable(value) and not (stays_itself(value) or _is_table(value)) else None


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Was:
    """What an attribute was: kept if it is plain, or can only be kept."""

    value: object
    weakly: weakref.ref[Any] | None = None

    @classmethod
    def of(cls, value: object) -> Was:
        try:
            return cls(value) if type(value) in _UNCHANGING else cls(None, weakref.ref(value))
        except TypeError:
            return cls(value)

    def is_still(self, now: object) -> bool:
        """Whether it is the same object, or an equal plain one."""
        if self.weakly is None:
            return _alike(self.value, now)
        return now is not None and self.weakly() is now


def set_since(before: Mapping[str, Was], now: Mapping[str, object]) -> set[str]:
    """Return the names of attributes that are new or gone by now, or other ones."""
    known = before.keys() & now.keys()
    return (before.keys() ^ now.keys()) | {name for name in known if not before[name].is_still(now[name])}


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
        self.room = sys.maxsize
        # For so many objects besides plain ones.
        self.token = token
        self._root = root
        self._sought = sought
        self._seen = seen

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) in self._sought:
            self._seen(obj)
        if type(obj) in _PLAIN or obj is self._root:
            return None
        self.room -= 1
        if self.room < 0:
            raise TooLarge
        token = self.token(obj)
        if token is not None:
            return token
        if isinstance(obj, torch.Tensor):
            return None if _is_small(obj) else self.note(obj, _written(obj))
        if isinstance(obj, np.ndarray):
            if obj.nbytes <= WATCHED_BYTES:
                return None
            return self.note(obj, digest(obj) if obj.nbytes <= ARRAY_BYTES else None)
        if _is_around_data(obj):
            return self.note(obj, _of_data_sets(obj, self.token))
        if isinstance(obj, types.FunctionType) and keeps(obj):
            return None
        if isinstance(obj, _BY_IDENTITY) or type(obj).__module__.partition(".")[0] == "mirror_nb":
            return self.note(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _nothing, (_values(obj).tobytes(), str(obj.dtype), tuple(obj.shape), obj.requires_grad)
        if isinstance(obj, types.FunctionType):
            # As a state: it may have itself among what it keeps.
            return _nothing, (self.note(obj),), _kept(obj)
        try:
            reduce = copyreg.dispatch_table.get(type(obj))
            reduced = reduce(obj) if reduce is not None else obj.__reduce_ex__(5)
            return _uncached(reduced) if type(obj).__module__.partition(".")[0] == "pandas" else reduced
        except Exception:
            # A lock, a generator, an open file.
            return _nothing, (self.note(obj),)

    def note(self, obj: object, state: object = None) -> int:
        """Put what is told apart by identity, and its state, beside what is written."""
        try:
            self.beside.append((weakref.ref(obj), state))
        except TypeError:
            self.beside.append((None, id(obj)))
        return len(self.beside)


def _large(value: object, reader: _Reader, own: bool, objects: int) -> Content:
    """Return the content of a value that is too large to be written, or whose class has a say in how it is."""
    levels = Levels(objects)
    told: list[object] = []
    unread = _ARRAYS_BYTES

    def look_at(obj: object) -> None:
        nonlocal unread
        if isinstance(obj, np.ndarray):
            unread -= obj.nbytes
            reader.note(obj, digest(obj) if unread >= 0 and obj.nbytes <= ARRAY_BYTES else None)
            return
        token = reader.persistent_id(obj)
        if isinstance(token, int):
            # It was noted.
            return
        if token is not None:
            told.append(token)
        elif isinstance(obj, torch.Tensor):
            # Of many small ones their values would take ten times as long to read.
            reader.note(obj, _written(obj))
        elif isinstance(obj, bytearray):
            told.append((zlib.crc32(obj), len(obj)))
        else:
            reader.note(obj, _hash(obj) if _is_table(obj) else None)

    kinds = Kinds(_is_plain_kind, _opener, look_at, _ODD)
    levels.fill(value, kinds)
    state = (*levels.sizes, tuple(levels.order), *told)
    parts, beside = tuple(levels.parts), tuple(reader.beside)
    return Content(parts=parts, whole=levels.whole, state=state, beside=beside, own=own)


def _opener(obj: object) -> Opener | None:
    """Return how to look into objects of a class like this one's, which is no container."""
    match obj:
        case types.FunctionType():
            return _kept_apart
        case functools.partial():
            return lambda partial: (partial.args, partial.keywords)
        case types.MethodType():
            return lambda method: (method.__self__,)
    slots = [name for base in type(obj).__mro__ for name in _slots_of(base)]
    if not _is_own(obj) or _is_table(obj):
        return None
    if not slots:
        return vars if hasattr(obj, "__dict__") else None
    return lambda one: {**getattr(one, "__dict__", {}), **{n: getattr(one, n) for n in slots if hasattr(one, n)}}


def _kept_apart(function: types.FunctionType) -> Sequence[object]:
    own = (function.__defaults__, function.__kwdefaults__, vars(function), *closed_over(function))
    return own if keeps(function) else ()


def _hash(table: Any) -> object:
    """Return what is another once somebody wrote to a table of pandas; None where it holds what has no hash."""
    with contextlib.suppress(TypeError):
        rows = sys.modules["pandas"].util.hash_pandas_object(table).to_numpy()
        named = list(table.columns) if table.ndim > 1 else table.name
        return zlib.crc32(rows), len(rows), repr((named, table.dtypes, table.attrs))
    return None


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _is_plain_kind(kind: type) -> bool:
    """Whether objects of a class cannot change: they are told apart by identity, or by what they are equal to."""
    return kind in _UNCHANGING or (issubclass(kind, _PLAIN_KINDS) and not issubclass(kind, np.void))


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
    """Return what a loader, or one of torch's data sets, goes by: data sets, samplers and functions of the user's.

    And containers, tensors and arrays.
    """
    found: list[object] = []
    queue: list[Any] = [value] if _is_around_data(value) else []
    while queue:
        one = queue.pop()
        if isinstance(one, Distributed):
            queue.append(one.source)
        elif isinstance(one, DataLoader):
            queue += (one.dataset, one.sampler, one.batch_sampler, one.collate_fn)
        elif isinstance(one, Subset):
            queue.append(one.dataset)
        elif isinstance(one, (ConcatDataset, ChainDataset)):
            queue += one.datasets
        elif type(one) is TensorDataset:
            found += one.tensors
        elif type(one) is BatchSampler:
            queue.append(one.sampler)
        elif type(one) is WeightedRandomSampler:
            found.append(one.weights)
        elif is_users(type(one).__module__) or keeps(one) or isinstance(one, (*_CONTAINERS, np.ndarray, torch.Tensor)):
            found.append(one)
    return found


def _is_around_data(value: object) -> bool:
    # Of a class derived from it the user has a say: it is looked into as any object of the user's.
    around = (DataLoader, Subset, ConcatDataset, ChainDataset, Distributed)
    return isinstance(value, around) or type(value) in (TensorDataset, BatchSampler, WeightedRandomSampler)


def _of_data_sets(value: object, token: Token) -> object:
    """Return what is another once somebody changed a data set in a loader."""
    # They are read more often than written to, and have many examples.
    return _Contents(tuple(content(one, token, objects=WATCHED_OBJECTS // 10) for one in data_sets(value)))


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Contents:
    """Several, equal to others if nothing was written to any of them."""

    each: tuple[Content | None, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Contents)
            and len(self.each) == len(other.each)
            and all(
                one is two or (one is not None and one.same(two))
                for one, two in zip(self.each, other.each, strict=True)
            )
        )


def is_unchanging(value: object) -> bool:
    """Whether nobody can change it in place."""
    return type(value) in _UNCHANGING or (
        type(value) in (tuple, frozenset) and all(map(is_unchanging, value))  # type: ignore[call-overload]
    )


def has_an_identity(value: object) -> bool:
    """Whether it matters that two names, or a name and a container, have this very object."""
    return not is_unchanging(value) and not issubclass(type(value), _ALIKE)


_UNCHANGING = frozenset({str, bytes, int, float, complex, bool, type(None), range, torch.dtype, torch.device})
_PLAIN_KINDS = (
    np.generic,
    decimal.Decimal,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    enum.Enum,
    pathlib.PurePath,
)
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


def _alike(one: object, other: object) -> bool:
    """Whether two objects inside a large value are the same, or plain values that are equal."""
    return one is other or (type(one) is type(other) and type(one) in _UNCHANGING and one == other)


def _same(one: tuple[Any, object], other: tuple[Any, object]) -> bool:
    if one[1] != other[1] or (one[0] is None) != (other[0] is None):
        return False
    # What is gone is another, whatever has its place in memory now.
    return one[0] is None or (one[0]() is not None and one[0]() is other[0]())
