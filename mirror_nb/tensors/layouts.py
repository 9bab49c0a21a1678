"""Tensors that are no one block of memory: sparse, nested, quantized, in a library's own form or on the meta device.

Knows torch and NumPy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mirror_nb.errors import UsageError


def is_block(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a block of memory, with strides, that can be read as it is."""
    own = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta
    return not (own or hasattr(tensor, _PARTS))


_PARTS = "__tensor_flatten__"
# By which a library's own tensor tells which tensors it is made of: torchao's of integers and their scales.


def blocks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the blocks that make up a tensor, or hold what it holds; on the meta device there are none."""
    if is_block(tensor):
        return [tensor]
    if tensor.is_meta:
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_nested:
        return list(tensor.unbind())
    if hasattr(tensor, _PARTS):
        names, _ = getattr(tensor, _PARTS)()
        # Of a DTensor also its mesh.
        parts = (getattr(tensor, name) for name in names)
        return [block for part in parts if isinstance(part, torch.Tensor) for block in blocks(part)]
    return [tensor.int_repr() if tensor.is_quantized else tensor.to_dense()]


def as_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a block one after another, so that torch looks at their bytes: in its memory if it can be.

    What is conjugated or negated only when it is read comes as it reads.
    """
    values = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # A single value, or none, keeps any stride through all that makes others contiguous.
    return values if values.stride(0) == 1 else values.clone(memory_format=torch.contiguous_format)


def memory_of(row: torch.Tensor) -> Any:
    """Return the bytes of values one after another in the memory of the CPU, where they are, as a NumPy array.

    Raises RuntimeError for a tensor that has none: one of forward differentiation that stands for zeros, say. Not by
    `row.numpy()`: from then on torch would refuse to enlarge a tensor of that memory.
    """
    if row.nbytes and not row.data_ptr():
        raise RuntimeError(f"a {type(row).__name__} of {row.nbytes} bytes has no memory that can be read")
    return np.asarray(_Memory(row))


class _Memory:
    """Lends NumPy the memory of a tensor, which lives as long as the array."""

    __slots__ = ("__array_interface__", "_row")

    def __init__(self, row: torch.Tensor) -> None:
        self._row = row
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (row.nbytes,),
            "data": (row.data_ptr(), False),
        }


def check_summable(tensor: torch.Tensor, what: str) -> None:
    """Raise UsageError, which says that one cannot do `what`, for a tensor whose values torch adds to no others."""
    for kind, instead in _WITHOUT_SUMS.items():
        if getattr(tensor, f"is_{kind}"):
            raise UsageError(f"cannot {what} a {kind} tensor: {instead}")


_WITHOUT_SUMS = {
    "quantized": "take .dequantize() of it",
    "nested": "make it dense with .to_padded_tensor(...)",
    "meta": "it has no values; make it on a device",
}


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes."""
    return sum(block.nbytes for block in blocks(tensor))


def address(tensor: torch.Tensor) -> int:
    """Return where a tensor lies in memory; 0 where it is not in one place."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor memory for all its elements where it lacks some, and return it; the new ones are zeros.

    What lies in memory that others map cannot grow: `torch.add(a, b, out=tensor)` raises then, and leaves it with the
    sizes that it was to get. Whoever reads it reads what is not there, or fails.
    """
    if is_block(tensor) and tensor.untyped_storage().nbytes() < needed(tensor):
        held, begin = tensor.untyped_storage(), tensor.storage_offset()
        there = held.nbytes() // tensor.itemsize
        row = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(held, 0, (there,), (1,))
        try:
            memory = torch.zeros(needed(tensor) // tensor.itemsize, dtype=tensor.dtype, device=tensor.device)
        except RuntimeError:
            # It was to be larger than the machine: it is what it has, in a row.
            tensor.data = row[begin:].clone()
        else:
            memory[:there] = row
            tensor.data = memory.as_strided(tensor.shape, tensor.stride(), begin)
    return tensor


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements of a tensor are one number in memory, as `expand` makes them: nobody writes to it."""
    return is_block(tensor) and any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def needed(tensor: torch.Tensor) -> int:
    """Return the bytes from the beginning of a tensor's storage to its last element."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + 1 + last) * tensor.itemsize if tensor.numel() else 0


def sizes(tensor: torch.Tensor) -> tuple[int | None, ...]:
    """Return a tensor's sizes; None for those in which the tensors in a nested one may differ."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return (tensor.size(0), *(None,) * (tensor.ndim - 1))
    # A size that stands for many is no int, but to type checkers.
    return tuple(size if type(size) is int else None for size in tensor.shape)


def rows_of(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return rows of a tensor, in its layout: of a nested one, tensors in it. `rows` begin and end inside, by ones.

    Raises UsageError for a layout by columns or blocks.
    """
    if tensor.is_nested:
        return _nested_rows(tensor, rows)
    if tensor.layout is torch.strided:
        return tensor[rows]
    if tensor.layout is torch.sparse_coo:
        return tensor.narrow_copy(0, rows.start, rows.stop - rows.start)
    if tensor.layout is torch.sparse_csr and tensor.ndim == _MATRIX:
        ends = tensor.crow_indices()[rows.start : rows.stop + 1]
        begin, end = int(ends[0]), int(ends[-1])
        parts = (ends - begin, tensor.col_indices()[begin:end], tensor.values()[begin:end])
        return torch.sparse_csr_tensor(*parts, (rows.stop - rows.start, tensor.shape[1]))
    raise UsageError(
        f"cannot cut a tensor in layout {tensor.layout} of shape {tuple(tensor.shape)} by its examples; give it as "
        ".to_sparse() or .to_dense()"
    )


def joined_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of tensors of one layout in one tensor: of nested ones, the tensors in them."""
    first: Any = tensors[0]
    if not first.is_nested:
        return torch.cat(list(tensors))
    parts = [part for tensor in tensors for part in tensor.unbind()]
    return torch.nested.as_nested_tensor(parts, dtype=first.dtype, device=first.device, layout=first.layout)


def _nested_rows(tensor: Any, rows: slice) -> torch.Tensor:
    parts = list(tensor.unbind())[rows]
    if parts or tensor.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(parts, dtype=tensor.dtype, device=tensor.device, layout=tensor.layout)
    # Torch makes no jagged tensor of no tensors.
    return torch.nested.nested_tensor_from_jagged(tensor.values()[:0], tensor.offsets().new_zeros(1))


_MATRIX = 2
