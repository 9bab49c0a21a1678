"""NumPy's arrays as tensors that torch can take rows of. Knows no batches, and not where an array comes from."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

_WIDER = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
# torch has these too, but not the operations to take rows of them.


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor that shares an array's memory, where torch can read it as it is; never to be written to.

    Raises TypeError for a dtype that torch has no counterpart of.
    """
    array = array.astype(_WIDER[array.dtype.name]) if array.dtype.name in _WIDER else array
    array = np.ascontiguousarray(array) if any(stride < 0 for stride in array.strides) else array
    array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # torch warns that the array cannot be written to.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
