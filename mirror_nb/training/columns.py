"""What users give as arrays, as tensors whose dimension 0 counts the examples; errors name the argument and the place.

Knows torch, NumPy, and what tables of pandas and polars have in common. Knows no batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror_nb.data.arrays import as_tensor
from mirror_nb.data.batches import leaves
from mirror_nb.errors import UsageError


def checked_arrays(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Return the three as tensors, or nests of them, of one length. Raises UsageError for what cannot be that."""
    if x is None:
        raise UsageError("`x` is None: pass tensors or arrays, a Dataset or a DataLoader")
    columns = {"x": _columns(x, "x"), "y": None if y is None else _columns(y, "y")}
    columns["sample_weight"] = _weights(sample_weight)
    if sample_weight is not None and y is None:
        raise UsageError("`sample_weight` was given without `y`; what shall the weights be of?")
    shapes = {name: [tuple(leaf.shape) for leaf in leaves(nest) if leaf is not None] for name, nest in columns.items()}
    if not shapes["x"]:
        raise UsageError(f"`x` holds no tensor or array: {x!r}")
    lengths = {shape[0] for found in shapes.values() for shape in found}
    told = ", ".join(f"{name} of {' and '.join(map(str, found))}" for name, found in shapes.items() if found)
    if len(lengths) > 1:
        raise UsageError(f"the numbers of examples (dimension 0) differ: {told}")
    if lengths == {0}:
        raise UsageError(f"no examples: {told}")
    return columns["x"], columns["y"], columns["sample_weight"]


def _weights(sample_weight: Any) -> Any:
    """A tensor, or a dict or list of them by output."""
    if isinstance(sample_weight, Mapping):
        return {key: _weight(value, f"sample_weight[{key!r}]") for key, value in sample_weight.items()}
    if isinstance(sample_weight, (tuple, list)) and not _lists_numbers(sample_weight):
        return [_weight(value, f"sample_weight[{i}]") for i, value in enumerate(sample_weight)]
    return _weight(sample_weight, "sample_weight")


def _weight(given: Any, name: str) -> Tensor | None:
    if given is None:
        return None
    weight = _columns(given, name)
    if not isinstance(weight, Tensor):
        raise UsageError(f"`{name}` is one tensor or array, not a {type(given).__qualname__} of them")
    return weight if weight.dtype.is_floating_point else weight.to(torch.get_default_dtype())


def _columns(nest: Any, name: str) -> Any:
    """The nest with a tensor for each array, list of numbers or table in it."""
    if _lists_numbers(nest):
        try:
            return _column(np.asarray(nest), name)
        except ValueError as reason:
            raise UsageError(f"`{name}` is a list of lists of different lengths: {reason}") from reason
    if isinstance(nest, Mapping):
        return {key: _columns(value, f"{name}[{key!r}]") for key, value in nest.items()}
    if isinstance(nest, (tuple, list)):
        members = [_columns(value, f"{name}[{i}]") for i, value in enumerate(nest)]
        return type(nest)(*members) if hasattr(nest, "_fields") else type(nest)(members)
    return _column(nest, name)


def _lists_numbers(nest: Any) -> bool:
    """Whether a list, or the lists in it, hold numbers, and so are one array."""
    if not isinstance(nest, (tuple, list)) or hasattr(nest, "_fields"):
        return False
    if any(getattr(item, "shape", ()) for item in nest[:9]):
        # Arrays are among the members: of several inputs, one is given as a list.
        return False
    first: Any = nest
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    return isinstance(first, (bool, int, float, np.generic))


def _column(leaf: Any, name: str) -> Tensor:
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            raise UsageError(f"`{name}` is a tensor of layout {leaf.layout}; pass a dense one, .to_dense()")
        column = leaf.detach()
    else:
        column = _from_numpy(_as_numpy(leaf, name), name)
    if not column.ndim:
        raise UsageError(f"`{name}` is a single number, {leaf!r}: dimension 0 has to count the examples")
    return column


def _as_numpy(leaf: Any, name: str) -> np.ndarray[Any, Any]:
    if isinstance(leaf, np.ndarray):
        return leaf
    # pandas and polars; then whatever else knows how to become an array.
    for way in ("to_numpy", "__array__"):
        if callable(getattr(leaf, way, None)) and not isinstance(leaf, type):
            return np.asarray(getattr(leaf, way)())
    raise UsageError(
        f"`{name}` is a {type(leaf).__qualname__}: pass a tensor, a NumPy array, a pandas object, a list of numbers, "
        "a tuple, list or dict of these, a Dataset or a DataLoader"
    )


def _from_numpy(array: np.ndarray[Any, Any], name: str) -> Tensor:
    try:
        tensor = as_tensor(array)
    except TypeError as reason:
        raise UsageError(
            f"`{name}` has dtype {array.dtype}, which is not one of numbers; convert it first, with .astype(...)"
        ) from reason
    return tensor.to(torch.get_default_dtype()) if tensor.dtype is torch.float64 else tensor
