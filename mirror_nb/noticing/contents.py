"""What a value holds, kept to notice later that somebody changed it in place. Knows no names.

Watched are containers, NumPy arrays, tensors, objects of the user's own classes, dataclasses, what a library has for a
container, its tables, graphs and sparse matrices, what has a `state_dict`, iterators, and what the notebook's
functions keep besides their code; what is inside them too, where it is very much that of the outer levels. Other
objects of libraries are told apart by identity alone.
"""

from __future__ import annotations

import array
import contextlib
import copyreg
import dataclasses
import functools
import inspect
import io
import operator
import pickle
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence, Sized
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mirror_nb import plain
from mirror_nb.environment.sources import is_users
from mirror_nb.noticing.data_sets import behind, data_sets, is_around_data
from mirror_nb.noticing.digests import ARRAY_BYTES, digest, is_plain, table_digest, values_of, written
from mirror_nb.noticing.insides import closed_over
from mirror_nb.noticing.kinds import (
    CONTAINERS,
    NAMED,
    TRANSFORMS,
    UNCHANGING,
    alike,
    has_settings,
    is_data,
    is_found_out,
    is_iterator,
    is_own,
    is_plain_kind,
    is_table,
    is_unchanging,
    keeps,
)
from mirror_nb.noticing.levels import Kinds, Levels, Opener
from mirror_nb.noticing.slots import own_attributes, slots_of
from mirror_nb.noticing.streams import is_stream, place
from mirror_nb.transfer.pickler import PYTHONS, Limited, TooLarge, is_nameless
from mirror_nb.values import PerReplica

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
            self.whole or UNCHANGING.issuperset(map(type, self.parts)) or all(map(is_unchanging, self.parts))
        ) and all(
            reference is not None and (state is not None or isinstance(reference(), NAMED))
            for reference, state in self.beside
        )

    def same(self, other: Content | None) -> bool:
        """Whether nothing was written in between."""
        return (
            other is not None
            and (self.pickled, self.state, len(self.parts)) == (other.pickled, other.state, len(other.parts))
            and (all(map(operator.is_, self.parts, other.parts)) or all(map(alike, self.parts, other.parts)))
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
    if is_nameless(value):
        value = {name: held for name, held in vars(value).items() if not name.startswith(PYTHONS)}
    if isinstance(value, np.ndarray) and value.nbytes > WATCHED_BYTES:
        state = digest(value, whole=large)
        return None if state is None else Content(state=state)
    if isinstance(value, torch.Tensor) and not _is_small(value):
        return Content(state=written(value))
    if is_around_data(value):
        return Content(beside=((weakref.ref(value), _of_data_sets(value, token)),), own=True)
    own = is_own(value) or keeps(value)
    if not own and has_settings(value):
        return Content(beside=_settings(value), own=True)
    watched = isinstance(value, (*CONTAINERS, PerReplica, np.ndarray, torch.Tensor)) or is_iterator(value)
    if not own and not watched:
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


def changed_among(before: Content, now: Content) -> list[bool]:
    """Tell of each of the `data_sets` of a loader, of which these are two contents, whether it was changed."""
    (_, was), (_, held) = before.beside[0], now.beside[0]
    assert isinstance(was, _Contents)
    assert isinstance(held, _Contents)
    return [not _alike(*pair) for pair in zip(was.each, held.each, strict=True)]


def class_content(
    kind: type,
    token: Token,
    sought: Collection[int] = frozenset(),
    seen: Callable[[object], object] = lambda obj: None,
) -> Content | None:
    """Return what a class of the user's has of its own now; None for others. For the rest see `content`."""
    if not is_users(kind.__module__):
        return None
    own = {
        name: _member(value)
        for name, value in vars(kind).items()
        if isinstance(value, types.FunctionType) or not (name.startswith(PYTHONS) or name == _COMBINED)
    }
    return content(own, token, most=_CLASS_BYTES, sought=sought, seen=seen)


_COMBINED = "_value2member_map_"
# An `enum.Flag` has there each combination of its flags that anybody has made.


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


def _kept(function: types.FunctionType) -> Any:
    """Return what a function has besides its code: defaults, attributes, and the names of the functions around it."""
    kept = function.__defaults__, function.__kwdefaults__, vars(function), closed_over(function)
    return kept if any(kept) else None


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
            return None if _is_small(obj) else self.note(obj, written(obj))
        if isinstance(obj, np.ndarray):
            if obj.nbytes <= WATCHED_BYTES:
                return None
            return self.note(obj, digest(obj) if obj.nbytes <= ARRAY_BYTES else None)
        if is_around_data(obj):
            for one in behind(obj) if self._sought else ():
                if id(one) in self._sought:
                    self._seen(one)
            return self.note(obj, _of_data_sets(obj, self.token))
        if isinstance(obj, types.FunctionType) and keeps(obj):
            return None
        if isinstance(obj, _BY_IDENTITY) or type(obj).__module__.partition(".")[0] == "mirror_nb":
            return self.note_settings(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _nothing, (values_of(obj).tobytes(), str(obj.dtype), tuple(obj.shape), obj.requires_grad)
        if isinstance(obj, types.FunctionType):
            # As a state: it may have itself among what it keeps.
            return _nothing, (self.note(obj),), _kept(obj)
        if isinstance(obj, RemovableHandle):
            # Of what it would bring along, hooks, their networks tell.
            return _nothing, (obj.id,)
        try:
            reduce = copyreg.dispatch_table.get(type(obj))
            reduced = reduce(obj) if reduce is not None else obj.__reduce_ex__(5)
            return _uncached(type(obj), reduced) if is_data(type(obj)) else reduced
        except Exception:
            # A lock, a generator, an open file.
            return _nothing, (self.note(obj),)

    def note(self, obj: object, state: object = None) -> int:
        """Put what is told apart by identity, and its state, beside what is written."""
        self.beside.append(_beside(obj, state))
        return len(self.beside)

    def note_settings(self, obj: object) -> int:
        """Put what is told apart by identity, and by its settings if it has any, beside what is written."""
        self.beside += _settings(obj) if has_settings(obj) else (_beside(obj),)
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
            reader.note(obj, written(obj))
        elif isinstance(obj, (bytearray, array.array)):
            told.append((zlib.crc32(obj), len(obj)))
        elif is_stream(obj):
            told.append((id(obj), pickle.dumps(place(obj))))
        elif is_table(obj):
            reader.note(obj, table_digest(obj))
        else:
            reader.note_settings(obj)

    kinds = Kinds(is_plain_kind, _opener, look_at, _ODD)
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
    if not is_own(obj) or is_table(obj):
        return None
    if slots_of(type(obj)):
        return own_attributes
    return vars if hasattr(obj, "__dict__") else None


def _kept_apart(function: types.FunctionType) -> Sequence[object]:
    own = (function.__defaults__, function.__kwdefaults__, vars(function), *closed_over(function))
    return own if keeps(function) else ()


def _uncached(kind: type, reduced: Any) -> Any:
    """Return what pickle takes of a library's data without what it has found out of itself when it was read."""
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced
    make, args, state, *rest = reduced
    parts = state if isinstance(state, tuple) else (state,)
    kept = (
        {k: v for k, v in part.items() if not is_found_out(kind, k)} if isinstance(part, dict) else part
        for part in parts
    )
    # Before the first reading there may be no attributes at all.
    return make, args, tuple(part for part in kept if not isinstance(part, dict) or part), *rest


def _beside(obj: object, state: object = None) -> tuple[weakref.ref[Any] | None, object]:
    try:
        return weakref.ref(obj), state
    except TypeError:
        return None, id(obj)


def _settings(value: Any) -> tuple[tuple[weakref.ref[Any] | None, object], ...]:
    """Return an object and its plain attributes, and of a tokenizer how many tokens it knows, for `Content.beside`.

    Not what it has by being used. Of a data set with transforms which these are.
    """
    # What is told apart by identity is kept so: one that is gone may have left its id to the next.
    inside: list[object] = []
    if isinstance(value, torch.utils.data.Dataset):
        inside += (vars(value).get(name) for name in sorted(TRANSFORMS))
        state: object = None
    else:
        own = {
            name: plain.copied(each, also=plain.LIKE_THEM, stand_in=functools.partial(_put, inside))
            # At once: another thread may add some.
            for name, each in tuple(vars(value).items())
            if name not in _BY_USE
        }
        tokens = None
        if isinstance(value, Sized) and hasattr(value, "add_tokens"):
            # Some leave that to classes derived from theirs.
            with contextlib.suppress(NotImplementedError):
                tokens = len(value)
        state = own, tokens
    # Its settings are not all that it has: once with no state.
    return _beside(value), _beside(value, state), *map(_beside, inside)


def _put(inside: list[object], obj: object) -> int:
    inside.append(obj)
    return len(inside)


_BY_USE = ("cache", "deprecation_warnings", "_attn_implementation_internal", "_attn_implementation_autoset")
# A tokenizer's words that it has taken apart before, what it has told once, and what a network that was made by a
# configuration has chosen in that.


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
            and all(map(_alike, self.each, other.each))
        )


def _alike(one: Content | None, other: Content | None) -> bool:
    return one is other or (one is not None and one.same(other))


_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None), tuple, list, dict, set, frozenset})
_BY_IDENTITY = (*NAMED, nn.Module, torch.Generator, torch.utils.data.Dataset, torch.utils.data.Sampler)


def _nothing(*_: object) -> None:
    """Stands in a pickle that nobody opens."""


def _is_small(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.nbytes <= WATCHED_BYTES


def _same(one: tuple[Any, object], other: tuple[Any, object]) -> bool:
    if one[1] != other[1] or (one[0] is None) != (other[0] is None):
        return False
    # What is gone is another, whatever has its place in memory now.
    return one[0] is None or (one[0]() is not None and one[0]() is other[0]())
