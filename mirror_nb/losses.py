"""Losses that add up over the replicas to the loss of the global batch: for gradients that are summed.

tf.nn's functions of the same names, for `MirroredStrategy(gradient_reduction=ReduceOp.SUM)`. With the default
reduction, the exact mean, a plain mean loss is right as it is.
"""

from __future__ import annotations

import math
import reprlib
import warnings
from typing import Any

import torch
from torch import Tensor

from mirror_nb.errors import ContextError, UsageError, users_level
from mirror_nb.strategies.context import get_strategy, has_strategy, in_cross_replica_context
from mirror_nb.values import mean, wide


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | Tensor | None = None
) -> Tensor:
    """Return this replica's part of the mean loss over the global batch: the sum of its losses / `global_batch_size`.

    `per_example_loss`: shape [local examples, …]. `sample_weight`: a number, or weights for each example, which lack
    the trailing dimensions that all share. `global_batch_size`: examples of all replicas; by default the local ones
    times the replicas. With no examples it is 0.

    Raises RuntimeError in cross-replica context where `global_batch_size` is left out, UsageError for a scalar loss,
    for weights that do not fit, and for a size that is no whole number from 0. Source: tf.nn.compute_average_loss.
    """
    losses = _given(per_example_loss, "per_example_loss")
    if losses.ndim == 0:
        raise UsageError(
            "`per_example_loss` is a scalar; it must have one loss for each example (reduction='none' in torch's "
            "losses), so that the mean can be taken over all replicas"
        )
    if sample_weight is not None:
        losses = _weighted(losses, _given(sample_weight, "sample_weight").to(losses.device))
    if global_batch_size is None:
        _require_replica("compute_average_loss")
        global_batch_size = losses.shape[0] * get_strategy().num_replicas_in_sync
    size = _size(global_batch_size)
    _check_reduction(losses, "compute_average_loss divides by the global batch size", "take a plain mean loss")
    # A sum of half floats need not fit where the mean does.
    total = losses.sum(dtype=wide(losses.dtype))
    # No examples: 0, with its gradient, where 0 / 0 would be NaN.
    return mean(total if size else total * 0, size or 1, losses.dtype)


def scale_regularization_loss(regularization_loss: Any) -> Tensor:
    """Return the sum of `regularization_loss` divided by the replicas, each of which adds the same.

    Raises RuntimeError in cross-replica context. Source: tf.nn.scale_regularization_loss.
    """
    _require_replica("scale_regularization_loss")
    losses = regularization_loss if isinstance(regularization_loss, (list, tuple)) else [regularization_loss]
    parts = [_given(loss, "regularization_loss").sum() for loss in losses]
    total = sum(parts[1:], start=parts[0]) if parts else torch.zeros(())
    _check_reduction(total, "scale_regularization_loss divides by the replicas", "add the loss as it is")
    return total / get_strategy().num_replicas_in_sync


def _check_reduction(loss: Tensor, what: str, instead: str) -> None:
    strategy = get_strategy()
    if loss.requires_grad and strategy.num_replicas_in_sync > 1 and strategy._place.reduction == "mean":
        warnings.warn(
            f"{what}, which belongs to summed gradients, but this strategy averages them: they come out "
            f"{strategy.num_replicas_in_sync} times too small. Make it with gradient_reduction=ReduceOp.SUM, or "
            f"{instead}",
            stacklevel=users_level(),
        )


def _weighted(losses: Tensor, weights: Tensor) -> Tensor:
    """Multiply each example's loss by its weight; weights without the trailing dimensions count for all of them."""
    aligned = weights
    if weights.ndim == losses.ndim + 1 and weights.shape[-1] == 1:
        aligned = weights.squeeze(-1)
    while 0 < aligned.ndim < losses.ndim:
        aligned = aligned.unsqueeze(-1)
    try:
        weighted = losses * aligned
    except RuntimeError:
        weighted = None
    if weighted is None or weighted.shape != losses.shape:
        raise UsageError(
            f"`sample_weight` of shape {tuple(weights.shape)} does not fit losses of shape {tuple(losses.shape)}; "
            "give a number, or one weight for each example"
        )
    return weighted.to(losses.dtype) if losses.is_floating_point() else weighted


def _given(value: Any, argument: str) -> Tensor:
    try:
        return _as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"`{argument}` must be a tensor or numbers, not {reprlib.repr(value)}: {error}") from error


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, (list, tuple)) and any(isinstance(one, Tensor) for one in value):
        # torch.as_tensor would take them out of their graph.
        return torch.stack([_as_tensor(one) for one in value])
    # A default device of the user's would move tensors, too.
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _size(size: Any) -> int:
    try:
        number = torch.as_tensor(size, device="cpu")
    except (TypeError, RuntimeError):
        number = torch.tensor(math.nan, device="cpu")
    whole = not number.is_floating_point() and not number.is_complex() and number.dtype is not torch.bool
    if number.ndim or not whole or int(number) < 0:
        raise UsageError(f"`global_batch_size` must be a whole number of examples, not {reprlib.repr(size)}")
    return int(number)


def _require_replica(function: str) -> None:
    if has_strategy() and in_cross_replica_context():
        raise ContextError(
            f"You are calling `{function}` in cross replica context, while it was expected to be called in replica "
            "context. Call it in the function given to strategy.run"
        )
