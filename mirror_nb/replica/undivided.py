"""Data that this replica trains on as a whole: who wrote the loop may have forgotten `distribute_dataset`.

    for x, y in loader:          iterated ─▶ backward passes with no share of a batch ─▶ noted
        loss.backward()
    strategy.run(step, (x, y))   called   ─▶ the same ─▶ noted, by what it returned

The controller compares what the replicas note: a loader over each replica's own part of the data has another print,
and so has the loss of one that takes its part of what all are given.
Knows torch's loaders; knows no replicas and no channel.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, final

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import sampler as samplers

from mirror_nb.environment.replaced import Replaced, called_by_us
from mirror_nb.tensors.layouts import as_row, blocks, is_block, sizes

_DEPTH = 4
_GONE: Any = (None, None, None, math.inf)


class Passes(Protocol):
    """What counts the backward passes on batches of which this replica was given no share."""

    undivided_passes: int


@final
class Undivided:
    """Notes loaders of one replica, for as long as its process lives."""

    def __init__(self, gradients: Passes) -> None:
        self._gradients = gradients
        self._live: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], Any, int]] = {}
        # By the id of its iterator: that, the loader, what is in it, and the passes before it.
        self._found: list[tuple[Callable[[], Any], Any]] = []
        # Loaders, and what is in them; of a call what it returned.
        self._noted_call = False
        Replaced(DataLoader, "__iter__", result=self._iterated)

    def called(self, passes: int, given: Any, value: Any) -> None:
        """A function that was called with what it was `given`, after so many passes, has returned `value`.

        The first that trains on examples that nobody has divided is noted: to look at a loss waits for a GPU.
        """
        if self._noted_call or self._gradients.undivided_passes == passes:
            return
        if any(map(_has_rows, pytree.tree_leaves(given))) and any(map(_is_a_loss, pytree.tree_leaves(value))):
            self._noted_call = True
            self._found.append((_no_loader, value))

    def taken(self, names: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
        """Return what was trained on since this was asked last: the name of a loader, and a print of its data.

        Of a call an empty name, and a print of what it returned.
        """
        if not self._live and not self._found:
            return ()
        for key in list(self._live):
            self._ended(key)
        found, self._found = self._found, []
        named = {_name_of(loader(), names): dataset for loader, dataset in found}
        return tuple((name, zlib.crc32(repr(_print_of(data, _DEPTH)).encode())) for name, data in named.items())

    def _iterated(self, iterator: Any, loader: DataLoader[Any]) -> None:
        if called_by_us(1) or not _is_undivided(loader):
            return
        key = id(iterator)
        passes = self._gradients.undivided_passes
        ends = weakref.ref(iterator, lambda _: self._ended(key))
        self._live[key] = ends, weakref.ref(loader), loader.dataset, passes

    def _ended(self, key: int) -> None:
        """The iterator is gone, or its cell has ended, which is long enough to know."""
        _, loader, dataset, passes = self._live.pop(key, _GONE)
        if self._gradients.undivided_passes > passes:
            self._found.append((loader, dataset))


def _is_undivided(loader: DataLoader[Any]) -> bool:
    """Whether it gives all of its data, on each replica: not one of a library's, nor with samplers that divide."""
    plain = all(
        one is None or type(one).__module__ == samplers.__name__ for one in (loader.sampler, loader.batch_sampler)
    )
    # Workers that stay keep their iterator.
    kept = loader.persistent_workers
    return type(loader) is DataLoader and plain and not kept and not isinstance(loader.dataset, IterableDataset)


def _no_loader() -> None:
    """What a call has in the place of a loader."""


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0 and len(leaf) > 1


def _is_a_loss(leaf: Any) -> bool:
    return isinstance(leaf, float) or (isinstance(leaf, torch.Tensor) and leaf.is_floating_point())


def _name_of(value: Any, names: Mapping[str, Any]) -> str:
    return next((name for name, other in list(names.items()) if other is value and value is not None), "")


def _print_of(value: Any, depth: int) -> Any:
    """Return something short and printable that tells apart what parts of data differ in; it need not tell all."""
    try:
        return _looked_at(value, depth)
    except Exception:
        # The user's own, or a proxy of what is gone: it may raise whatever it is asked.
        return type(value).__name__


def _looked_at(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor) and not is_block(value):
        return type(value).__name__, sizes(value), [_print_of(block, depth) for block in blocks(value)]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        rows = [value[i] for i in _some(len(value))] if value.ndim else [value]
        return tuple(value.shape), [zlib.crc32(_in_numpy(row).tobytes()) for row in rows]
    if isinstance(value, (str, int, float, bool, bytes)):
        return value
    if depth and isinstance(value, (list, tuple, range)):
        return len(value), [_print_of(value[i], depth - 1) for i in _some(len(value))]
    if depth and isinstance(value, dict):
        return [(str(key), _print_of(one, depth - 1)) for key, one in list(value.items())[:100]]
    if depth and hasattr(value, "__dict__") and not isinstance(value, type):
        return type(value).__name__, _print_of(vars(value), depth - 1)
    return type(value).__name__


def _some(length: int) -> list[int]:
    return sorted({0, length // 2, length - 1}) if length else []


def _in_numpy(row: Any) -> Any:
    if not isinstance(row, torch.Tensor):
        return np.asarray(row)
    # By its bytes: NumPy has not every dtype.
    return as_row(row).cpu().view(torch.uint8).numpy()
