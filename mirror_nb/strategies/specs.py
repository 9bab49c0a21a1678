"""What a batch looks like without its examples: tf.distribute's element specs, with torch's dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from mirror_nb.data.batches import is_batched, lists_examples, map_examples, spread
from mirror_nb.tensors.layouts import sizes


@final
@dataclass(frozen=True, slots=True, repr=False)
class TensorSpec:
    """Shape and dtype of a tensor whose sizes may not all be known."""

    shape: tuple[int | None, ...]
    """Sizes; None where they differ from batch to batch."""
    dtype: Any
    """A torch dtype (of an array, the dtype that it has); of a list with one item an example, the items' class."""
    name: str | None = None

    def __repr__(self) -> str:
        dtype = self.dtype.__qualname__ if isinstance(self.dtype, type) else self.dtype
        return f"TensorSpec(shape={self.shape}, dtype={dtype}, name={self.name!r})"


@final
class PerReplicaSpec:
    """The spec of a PerReplica: that of each replica's value, in the order of their ids."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, replica_id: int) -> Any:
        return self.values[replica_id]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerReplicaSpec) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        # TensorFlow's layout (tensorflow/python/distribute/values.py).
        return f"PerReplicaSpec({', '.join(map(repr, self.values))})"


def spec_of(batch: Any, total: int, num_replicas: int = 1) -> Any:
    """Return the spec of batches like `batch`, which has `total` examples: the same structure of specs.

    The number of examples is None, other sizes are this batch's. One PerReplicaSpec a leaf from two replicas on.
    """
    whole = slice(0, total)

    def together(pieces: Sequence[Any]) -> Any:
        # A dataclass, say, is one leaf to `spread`, and has leaves.
        specs = [map_examples(piece, total, lambda leaf: _leaf_spec(leaf, total)) for piece in pieces]
        return specs[0] if num_replicas == 1 else PerReplicaSpec(*specs)

    return spread(batch, [whole] * num_replicas, total, together)


def _leaf_spec(leaf: Any, total: int) -> Any:
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        known = sizes(leaf) if isinstance(leaf, torch.Tensor) else leaf.shape
        return TensorSpec((None, *known[1:]) if is_batched(leaf, total) else known, leaf.dtype)
    if lists_examples(leaf, total):
        return TensorSpec((None,), type(leaf[0]) if total else object)
    # What is no batch stays, as in `spread`.
    return type(leaf) if isinstance(leaf, PackedSequence) else leaf
