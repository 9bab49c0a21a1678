"""What can be changed in place, and whose it is: by its class. Looks into nothing."""

from __future__ import annotations

import argparse
import array
import collections
import collections.abc
import dataclasses
import datetime
import decimal
import enum
import functools
import logging
import pathlib
import re
import types

import numpy as np
import torch
from torch import nn

from mirror_nb import plain
from mirror_nb.environment.sources import is_users
from mirror_nb.noticing.streams import is_stream
from mirror_nb.transfer.pickler import OF_PROCESS
from mirror_nb.transfer.told import is_told, told_of

PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
CONTAINERS = (list, dict, set, tuple, bytearray, array.array, collections.deque)


def is_own(value: object) -> bool:
    kind = type(value)
    if isinstance(value, (type, types.FunctionType, types.ModuleType, nn.Module, torch.Tensor, *CONTAINERS)):
        return False
    library = kind.__module__.partition(".")[0]
    if library == "mirror_nb" or any(value is its for its in OF_PROCESS.values()):
        return False
    known = kind in (types.SimpleNamespace, argparse.Namespace) or dataclasses.is_dataclass(kind)
    known = known or is_data(kind) or is_estimator(kind)
    container = isinstance(value, _ABSTRACT)
    known = known or container or is_users(kind.__module__) or is_stream(value) or _is_known(kind)
    if not (known or _counts(value)):
        return False
    # Of an optimizer of the user's class each side hears by itself what the other changes, as of torch's.
    return not is_told(value) or told_of(value) is None


_ABSTRACT = (collections.abc.MutableMapping, collections.abc.MutableSequence, collections.abc.MutableSet)


def _is_known(kind: type) -> bool:
    """Whether a library's class is one of mappings, if not by its bases, or says where a training stands with it.

    Averages of weights do, callbacks; of data that is gone through each side is somewhere else in it.
    """
    has_state = not hasattr(kind, "__iter__") and all(
        callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict")
    )
    return has_state or all(hasattr(kind, name) for name in ("keys", "__getitem__", "__setitem__"))


def _counts(value: object) -> bool:
    """Whether a library's object has plain values, arrays and tensors for attributes, and pickle takes these alone.

    A meter, say, settings, how to split, a running mean. Not what data comes from: loaders tell of that.
    """
    kind = type(value)
    if isinstance(value, (torch.utils.data.Dataset, torch.utils.data.Sampler)) or not kind.__dictoffset__:
        return False
    if not all(getattr(kind, name, None) is getattr(object, name, None) for name in PICKLING):
        return False
    return plain.is_plain(vars(value), _COUNTED)


def has_settings(value: object) -> bool:
    """Whether it is an object of a library that is set up by its attributes.

    Of Hugging Face's: a tokenizer, settings, a data set with a format; or one of torchvision's kind, with transforms.
    Not its pipelines: they count their calls in attributes.
    """
    if isinstance(value, (nn.Module, *CONTAINERS)) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, torch.utils.data.Dataset):
        return not TRANSFORMS.isdisjoint(vars(value))
    has = functools.partial(hasattr, type(value))
    return has("set_format") or (has("save_pretrained") and (has("add_tokens") or has("to_dict")))


TRANSFORMS = frozenset({"transform", "target_transform"})


def is_data(kind: type) -> bool:
    """Whether it is a class of a library whose objects are data: tables, graphs and sparse matrices."""
    return f"{kind.__module__}.".startswith(("pandas.", "networkx.", "scipy.sparse."))


def is_iterator(value: object) -> bool:
    """Whether it goes through what Python has, or counts: pickle tells where it stands."""
    return isinstance(value, collections.abc.Iterator) and type(value).__module__ in ("builtins", "itertools")


def is_found_out(kind: type, attribute: str) -> bool:
    """Whether objects of a class have an attribute by being read: it says nothing that they did not hold before."""
    found = next((vars(base)[attribute] for base in kind.__mro__ if attribute in vars(base)), None)
    return isinstance(found, functools.cached_property) or (is_data(kind) and attribute in _FOUND_OUT)


_FOUND_OUT = frozenset({"_cache", "__networkx_cache__"})


def is_estimator(kind: type) -> bool:
    """Whether it is a class of scikit-learn's whose objects are fitted: its attributes are all that one has."""
    return kind.__module__.partition(".")[0] == "sklearn" and hasattr(kind, "get_params")


def keeps(value: object) -> bool:
    """Whether it is a function that may keep something from call to call: of the notebook, a partial or a method."""
    match value:
        case types.FunctionType():
            # By where it was written: `functools.wraps` lets a library's pass for the notebook's.
            return value.__globals__.get("__name__") == "__main__"
        case functools.partial():
            return True
        case types.MethodType():
            return is_own(value.__self__)
    return False


def is_table(value: object) -> bool:
    """Whether it is a table of pandas or a column of one, and of no class derived from those."""
    kind = type(value)
    return kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series")


def is_plain_kind(kind: type) -> bool:
    """Whether objects of a class cannot change: they are told apart by identity, or by what they are equal to."""
    return kind in UNCHANGING or (issubclass(kind, _PLAIN_KINDS) and not issubclass(kind, np.void))


def is_unchanging(value: object) -> bool:
    """Whether nobody can change it in place."""
    return type(value) in UNCHANGING or (
        type(value) in (tuple, frozenset) and all(map(is_unchanging, value))  # type: ignore[call-overload]
    )


def has_an_identity(value: object) -> bool:
    """Whether it matters that two names, or a name and a container, have this very object."""
    kind = type(value)
    if kind is types.BuiltinFunctionType:
        # A method of a list is that list's; a function is its module's, or its class's.
        return not isinstance(value.__self__, types.ModuleType | type | None)  # type: ignore[attr-defined]
    return not (is_unchanging(value) or issubclass(kind, _ALIKE) or kind.__module__ == "typing")


def goes_by_name(value: object) -> bool:
    """Whether what holds a value that has a name refers to it by that: also functions and classes of the notebook."""
    if issubclass(type(value), type | types.FunctionType):
        return value.__module__ == "__main__"
    return has_an_identity(value)


def alike(one: object, other: object) -> bool:
    """Whether two objects are the same, or plain values that are equal."""
    return one is other or (type(one) is type(other) and type(one) in UNCHANGING and one == other)


UNCHANGING = frozenset({str, bytes, int, float, complex, bool, type(None), range, torch.dtype, torch.device})
_COUNTED: frozenset[type] = plain.ATOMS | {
    *(np.ndarray, torch.Tensor, torch.Size, torch.dtype, torch.device),
    *(np.float64, np.float32, np.int64, np.bool_),
}
_PLAIN_KINDS = (
    np.generic,
    decimal.Decimal,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    enum.Enum,
    pathlib.PurePath,
)
NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_ALIKE = (
    *(type, types.FunctionType, types.ModuleType, logging.Logger, pathlib.PurePath, enum.Enum),
    *(types.GenericAlias, types.UnionType, types.EllipsisType, slice, re.Pattern),
    *(np.ufunc, np.dtype, torch.layout, torch.memory_format),
)
# A copy of one is as good, or is the very same. So are those of what annotations are made of.
WITHOUT_IDENTITY = frozenset({*UNCHANGING, *NAMED})
# Types of most of what `has_an_identity` denies.
