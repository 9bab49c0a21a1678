"""Tensors that are no one block of memory: sparse, nested, quantized, in a library's own form or on the meta device.

Knows torch alone.
"""

from __future__ import annotations

import torch


def is_block(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a block of memory, with strides, that can be read as it is."""
    return not (tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta)


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
    return [tensor.int_repr() if tensor.is_quantized else tensor.to_dense()]


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes."""
    return sum(block.nbytes for block in blocks(tensor))


def address(tensor: torch.Tensor) -> int:
    """Return where a tensor lies in memory; 0 where it is not in one place."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0
