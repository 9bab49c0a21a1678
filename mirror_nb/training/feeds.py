"""What fit, evaluate and predict are fed: arrays, Datasets and DataLoaders as global batches, cut into shares.

Knows what users may give, and which feed is made of it. Knows no network and no process: a feed is made where
`fit` is called, travels to the replicas, and gives each its shares there.

    x, y, weights ─▶ feed() ─▶ Feed ─▶ pickled ─▶ shares(epoch, start) on each replica ─▶ Share, step by step

The order of an epoch is drawn from (seed, epoch) and from the generators that a DataLoader holds: the same for any
number of replicas, and the same again for whoever begins in the middle of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from mirror_nb.data.batches import checked_batch_size, leaves, map_leaves
from mirror_nb.data.sampling import describe, length_of
from mirror_nb.distributed import Distributed
from mirror_nb.errors import UsageError
from mirror_nb.training.array_feed import ArrayFeed
from mirror_nb.training.columns import checked_arrays
from mirror_nb.training.loader_feed import LoaderFeed, feed_of_dataset
from mirror_nb.training.shares import Feed

DEFAULT_BATCH_SIZE = 32
# Keras's.


def feed(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
) -> Feed:
    """Make a feed of what users give.

    `x` is a tensor, a NumPy array, a pandas object, a list of numbers, or a nest (tuple, list, dict) of these with
    the examples along dimension 0, and `y` likewise; or a Dataset, or a DataLoader, alone. `sample_weight` is one of
    these, or a dict or list of them by output, with None for one without. NumPy's float64 becomes torch's default
    dtype. `batch_size` is the global one (32 if None). The order of a shuffled epoch depends on
    (`seed`, epoch) alone; a DataLoader has its own batch size and sampler, and `shuffle` is nothing to it.

    Batches of a Dataset or a DataLoader that are tuples or lists of two or three are (inputs, targets) and
    (inputs, targets, sample weights); all others are inputs. Of a DataLoader that was distributed it is the
    DataLoader.

    Raises UsageError for what cannot be cut into batches, lengths that differ, and no examples at all.
    """
    if isinstance(x, Distributed):
        x = _undistributed(x)
    if isinstance(x, DataLoader):
        _check_loader(x, y, sample_weight, batch_size)
        return LoaderFeed(x, seed)
    size = DEFAULT_BATCH_SIZE if batch_size is None else checked_batch_size(batch_size)
    if _is_dataset(x):
        _check_alone(x, y, sample_weight)
        if type(x) is TensorDataset:
            return ArrayFeed(_columns_of(x), batch_size=size, shuffle=shuffle, seed=seed, listed=len(x.tensors) <= 3)
        return feed_of_dataset(x, size, shuffle, seed)
    return ArrayFeed(checked_arrays(x, y, sample_weight), batch_size=size, shuffle=shuffle, seed=seed)


def _undistributed(dataset: Distributed) -> DataLoader[Any]:
    source = getattr(dataset, "source", None)
    if not isinstance(source, DataLoader):
        raise UsageError(
            "the data was distributed already, from something other than a DataLoader; fit, evaluate and predict "
            "divide batches themselves: pass them what you distributed"
        )
    return source


def split_validation(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return (x, y, sample_weight) to train on and to validate with: the last `fraction` of the examples.

    As in Keras they are taken before anything is shuffled. Raises UsageError for a Dataset or a DataLoader, and
    where one of the two parts would be empty.
    """
    if isinstance(x, DataLoader) or _is_dataset(x):
        raise UsageError(
            f"validation_split={fraction!r} cannot split a {type(x).__qualname__}: pass tensors or arrays, or give "
            "validation_data"
        )
    columns = checked_arrays(x, y, sample_weight)
    total = len(leaves(columns[0])[0])
    at = int(total * (1 - fraction)) if isinstance(fraction, int | float | Real) and 0 < fraction < 1 else 0
    if not 0 < at < total:
        raise UsageError(
            f"validation_split={fraction!r} of {total} examples leaves nothing to train on or nothing to validate "
            "with; it is a fraction between 0 and 1"
        )
    first, last = (_rows(columns, part) for part in (slice(0, at), slice(at, total)))
    return first, last


def _rows(columns: Any, part: slice) -> Any:
    return map_leaves(columns, lambda column: None if column is None else column[part])


def _columns_of(dataset: TensorDataset) -> tuple[Any, Any, Any]:
    """Inputs, targets and weights; more than three tensors are all inputs."""
    tensors = dataset.tensors if len(dataset.tensors) <= 3 else (list(dataset.tensors),)
    return (*tensors, None, None)[:3]


def _check_loader(loader: DataLoader[Any], y: Any, sample_weight: Any, batch_size: int | None) -> None:
    if batch_size is not None:
        raise UsageError(
            f"batch_size={batch_size!r} was given together with a DataLoader (batch_size={loader.batch_size}); set it "
            "on the DataLoader, whose batch size is the global one"
        )
    _check_alone(loader, y, sample_weight)
    if not isinstance(loader.dataset, IterableDataset):
        _check_length(loader.dataset)
    if length_of(loader) == 0:
        raise UsageError(
            f"no batches: len() of the DataLoader is 0 ({describe(loader)}); drop_last=True leaves out a batch that "
            "is not full"
        )


def _check_alone(source: Any, y: Any, sample_weight: Any) -> None:
    surplus = [name for name, value in (("y", y), ("sample_weight", sample_weight)) if value is not None]
    if surplus:
        raise UsageError(
            f"{' and '.join(surplus)} given together with a {type(source).__qualname__}: its batches have to be "
            "(inputs, targets) or (inputs, targets, sample weights)"
        )
    if not isinstance(source, (DataLoader, IterableDataset)):
        _check_length(source)


def _check_length(dataset: Any) -> None:
    if length_of(dataset) == 0:
        raise UsageError(f"no examples: len() of the {type(dataset).__qualname__} is 0")


def _is_dataset(x: Any) -> bool:
    """Whether x gives examples by itself: a Dataset, or what has its methods and is no array."""
    if isinstance(x, Dataset):
        return True
    if isinstance(x, (Tensor, np.ndarray, Mapping, list, tuple, str, bytes, type)):
        return False
    return all(hasattr(x, name) for name in ("__getitem__", "__len__")) and not (
        hasattr(x, "to_numpy") or hasattr(x, "__array__")
    )
