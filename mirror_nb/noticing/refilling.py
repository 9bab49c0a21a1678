"""Objects that stay themselves though what they hold was changed in another process: they are filled with that.

Who else has such an object, under another name or in a container, sees the change, too.
"""

from __future__ import annotations

import array
import collections
import copy
import functools
import types
from typing import Any, TypeGuard

import torch
from torch import nn

from mirror_nb.noticing.kinds import PICKLING, is_estimator, is_own, is_table, keeps
from mirror_nb.noticing.slots import own_attributes, set_attributes, slots_of
from mirror_nb.noticing.streams import is_stream, move, place
from mirror_nb.tensors.layouts import is_block, is_expanded

_OF_ATTRIBUTES = ("attr._make", "pydantic.main", "omegaconf.basecontainer", "ml_collections.config_dict.config_dict")
# Modules whose classes have such ways of their own.
LOOSE = (torch.Tensor, nn.Parameter)
# Classes of what optimizers train besides networks.
REFILLED = frozenset(
    {list, dict, set, bytearray, array.array, collections.deque}
    | {collections.OrderedDict, collections.Counter, collections.defaultdict}
)


def is_refillable(value: object) -> bool:
    """Whether another object with the same `filling` is the same."""
    if stays_itself(value) or is_table(value) or is_call(value) or is_stream(value):
        return True
    kind = type(value)
    # An estimator adds the version to what is pickled.
    plain = (
        kind is types.SimpleNamespace or is_estimator(kind) or all(_takes_attributes(kind, name) for name in PICKLING)
    )
    return plain and (hasattr(value, "__dict__") or bool(slots_of(kind))) and is_own(value)


def _takes_attributes(kind: type, name: str) -> bool:
    """Whether how a class is pickled, by the method of this name, takes all of an object's attributes and no more."""
    method = getattr(kind, name, None)
    return method is getattr(object, name, None) or getattr(method, "__module__", None) in _OF_ATTRIBUTES


def is_call(value: object) -> bool:
    """Whether it is a function of the notebook, or a partial one, that may keep something from call to call."""
    return type(value) in (types.FunctionType, functools.partial) and keeps(value)


def stays_itself(value: object) -> bool:
    """Whether what a cell changes in place in it is changed in the notebook's own: containers and tensors."""
    return type(value) in REFILLED or _is_plain_dict(type(value)) or is_trained(value) or is_free(value)


def _is_plain_dict(kind: type) -> bool:
    """Whether it is a class of dicts that pickle takes by their items and attributes: for `config.lr`, say."""
    return (
        issubclass(kind, dict)
        and kind.__dictoffset__ != 0
        and all(getattr(kind, name, None) is getattr(dict, name, None) for name in PICKLING)
        and not slots_of(kind)
    )


def is_free(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor that anybody may write to, and that no gradients pass."""
    # Of this class alone: others may have ways of their own.
    return type(value) is torch.Tensor and not value.requires_grad and not value.is_inference() and is_block(value)


def is_trained(value: object) -> bool:
    """Whether it is a tensor whose gradients are of interest: a parameter, or one that was made to be one."""
    # Of these classes alone: a Variable has its own ways.
    return type(value) in LOOSE and value.requires_grad and value.is_leaf  # type: ignore[attr-defined]


def values_of(tensor: Any) -> torch.Tensor:
    """Return what `refill` takes of a tensor that may be trained, as another one of its class."""
    values: torch.Tensor = filling(tensor)
    return nn.Parameter(values.detach(), tensor.requires_grad) if type(tensor) is nn.Parameter else values


def filling(value: object) -> Any:
    """Return what a refillable object holds, for `refill`: members of a container, attributes, a tensor's values.

    Whether gradients of the tensor are of interest is among it.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(is_trained(value))
    if is_table(value):
        return value.copy(deep=False)  # type: ignore[attr-defined]
    if is_stream(value):
        return place(value)
    if isinstance(value, types.FunctionType):
        return value.__defaults__, value.__kwdefaults__, dict(vars(value)), [_held(cell) for cell in _cells(value)]
    if isinstance(value, functools.partial):
        return value.func, value.args, dict(value.keywords), dict(vars(value))
    if type(value) not in REFILLED and isinstance(value, dict):
        # Past what its class makes of being copied, read and written to.
        return dict(dict.items(value)), dict(vars(value))
    return copy.copy(value) if type(value) in REFILLED else own_attributes(value)


def refill(value: Any, held: Any) -> None:
    """Let an object hold this and nothing else."""
    kind = type(value)
    if kind in (list, bytearray, array.array):
        value[:] = held
    elif kind is collections.deque:
        value.clear()
        value.extend(held)
    elif is_table(value):
        # Made again out of the other, whose values it shares until one of the two is written to.
        kind.__init__(value, held)
        value.attrs = dict(held.attrs)
    elif is_stream(value):
        move(value, held)
    elif kind is types.FunctionType:
        value.__defaults__, value.__kwdefaults__, own, cells = held
        vars(value).clear()
        vars(value).update(own)
        for cell, bound in zip(_cells(value), cells, strict=True):
            _fill(cell, bound)
    elif kind is functools.partial:
        value.__setstate__(held)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            if value.shape == held.shape and value.dtype == held.dtype and not is_expanded(value):
                value.copy_(held)
            else:
                value.data = held.to(value.device, copy=True)
        if value.is_leaf and value.requires_grad != held.requires_grad:
            value.requires_grad_(held.requires_grad)
    elif kind not in REFILLED and issubclass(kind, dict):
        for own, given in zip((value, vars(value)), held, strict=True):
            dict.clear(own)
            dict.update(own, given)
    elif kind not in REFILLED:
        set_attributes(value, held)
    else:
        value.clear()
        value.update(held)
        if kind is collections.defaultdict:
            value.default_factory = held.default_factory


def _cells(function: types.FunctionType) -> tuple[types.CellType, ...]:
    return function.__closure__ or ()


def _held(cell: types.CellType) -> list[object]:
    """Return what a name of the function around has, in a list; nothing in it where that is not bound."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _fill(cell: types.CellType, held: list[object]) -> None:
    if held:
        cell.cell_contents = held[0]
    elif _held(cell):
        del cell.cell_contents
