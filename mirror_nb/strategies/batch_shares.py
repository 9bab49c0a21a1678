"""How the batches that a call is given weigh, and which results are batches again. Knows values, no replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mirror_nb.strategies.reductions import is_whole, parts_of
from mirror_nb.transfer.packing import Weighed
from mirror_nb.values import DistributedValues, PerReplica


def batches_in(parts: Sequence[DistributedValues]) -> list[PerReplica]:
    """Return those that are a global batch, or of one, with examples in it."""
    return [part for part in parts if isinstance(part, PerReplica) and any(part.shares or ())]


def weigh_alike(batches: list[PerReplica]) -> bool:
    """Whether each replica has the same part of all batches."""
    shares = [batch.shares or () for batch in batches]
    return len({tuple(n / sum(each) for n in each) for each in shares}) < 2


def weighed(nest: Any) -> Any:
    """Have each part of a batch tell its replica how it weighs, where several do not weigh alike."""

    def told(leaf: Any) -> Any:
        if not (isinstance(leaf, PerReplica) and any(leaf.shares or ())):
            return leaf
        examples = leaf.shares or ()
        return PerReplica([Weighed(own, (n, sum(examples))) for own, n in zip(leaf.values, examples, strict=True)])

    return pytree.tree_map(told, nest, is_leaf=lambda leaf: isinstance(leaf, DistributedValues) or is_whole(leaf))


def of_batch(results: Any, shares: tuple[int, ...] | None) -> Any:
    """Let results with a value for each example of a batch be a batch, which later calls weigh gradients by."""
    absent = frozenset(i for i, examples in enumerate(shares or ()) if not examples)
    for part in parts_of(results):
        if isinstance(part, PerReplica):
            part.absent = absent
            if tuple(map(_examples, part.values)) == shares:
                part.shares = shares
    return results


def _examples(value: Any) -> int | None:
    return value.size(0) if isinstance(value, torch.Tensor) and value.dim() else None
