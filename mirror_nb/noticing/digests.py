"""Small things that are others once somebody wrote to a tensor, an array or a table. Keeps none of these alive."""

from __future__ import annotations

import contextlib
import sys
import zlib
from typing import Any

import numpy as np
import torch

from mirror_nb.tensors.layouts import address, as_row, is_block, memory_of

ARRAY_BYTES = 64 << 20
# Of a larger array so many bytes are looked at, in evenly spaced pages: reading it all before and after every cell
# would take longer than many cells.
_PAGE = 4096


def table_digest(table: Any) -> object:
    """Return what is another once somebody wrote to a table of pandas; None where it holds what has no hash."""
    with contextlib.suppress(TypeError):
        rows = sys.modules["pandas"].util.hash_pandas_object(table).to_numpy()
        named = list(table.columns) if table.ndim > 1 else table.name
        return zlib.crc32(rows), len(rows), repr((named, table.dtypes, table.attrs))
    return None


def written(tensor: torch.Tensor) -> tuple[object, ...]:
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


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_block(tensor)


def values_of(tensor: torch.Tensor) -> Any:
    return memory_of(as_row(tensor))


def _version(tensor: torch.Tensor) -> object:
    if not tensor.is_inference():
        return tensor._version
    # Nobody counts the writes to it: it is read, or taken for another each time.
    return hash(values_of(tensor).tobytes()) if is_plain(tensor) else object()
