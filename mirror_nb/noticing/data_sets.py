"""What a loader goes by: its data sets, samplers and functions, however deep torch has wrapped them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from mirror_nb.distributed import Distributed
from mirror_nb.environment.sources import is_users
from mirror_nb.noticing.kinds import CONTAINERS, has_settings, keeps

_HELD = (*CONTAINERS, np.ndarray, torch.Tensor)


def data_sets(value: object) -> list[object]:
    """Return what a loader, or one of torch's data sets, goes by: data sets, samplers and functions of the user's.

    And containers, tensors and arrays.
    """
    return _behind(value)[0]


def behind(value: object) -> list[object]:
    """Return these, and what torch has wrapped them in."""
    found, wraps = _behind(value)
    return [*found, *wraps]


def _behind(value: object) -> tuple[list[object], list[object]]:
    found: list[object] = []
    wraps: list[object] = []
    queue: list[Any] = [value] if is_around_data(value) else []
    while queue:
        one = queue.pop()
        wraps.append(one)
        if isinstance(one, Distributed):
            queue.append(one.source)
        elif isinstance(one, DataLoader):
            queue += (one.dataset, one.sampler, one.batch_sampler, one.collate_fn)
        elif isinstance(one, Subset):
            queue.append(one.dataset)
            found += [one.indices] if isinstance(one.indices, _HELD) else []
        elif isinstance(one, (ConcatDataset, ChainDataset)):
            queue += one.datasets
        elif type(one) is TensorDataset:
            found += one.tensors
        elif type(one) is BatchSampler:
            queue.append(one.sampler)
        elif type(one) is WeightedRandomSampler:
            found.append(one.weights)
        elif type(one) is SubsetRandomSampler:
            found += [one.indices] if isinstance(one.indices, _HELD) else []
        elif isinstance(one, _HELD) or is_users(type(one).__module__) or keeps(one) or has_settings(one):
            found.append(one)
    return found, wraps


def is_around_data(value: object) -> bool:
    # Of a class derived from it the user has a say: it is looked into as any object of the user's.
    around = (DataLoader, Subset, ConcatDataset, ChainDataset, Distributed)
    return isinstance(value, around) or type(value) in (TensorDataset, BatchSampler, WeightedRandomSampler)
