"""Reductions over the replicas that autograd can pass: the gradient of a sum over replicas is the sum of gradients.

Every replica has to run the same backward passes. Source: tf.distribute's gradients of all_reduce and all_gather.

Where shares of a batch differ in size, the loss of replica r counts f_r times, n times its part of the examples, and
what comes to a parameter is multiplied by the f of the replica that it comes to. What came there from another's loss
by way of a sum has to count by that one's f instead: gradients are multiplied by f_r before they are summed, and the
sum is divided by the f of whoever takes it. A mean over the replicas stands for the one over the examples: it is not
divided. So each parameter gets the gradient of the mean loss over the batch; a tensor that `torch.autograd.grad` is
asked for gets that divided by f.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from mirror_nb.strategies.peers import Peers
from mirror_nb.values import ReduceOp

Weight = Callable[[], float]
# f of this replica, as the backward pass comes by; 1 where all weigh in alike.


def all_reduced(peers: Peers, op: ReduceOp, tensors: Sequence[Tensor], weight: Weight) -> list[Tensor]:
    """Return the sums (or means) over the replicas of tensors of agreed shapes and dtypes."""
    learning = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point() or tensor.is_complex()]
    results: list[Any] = list(tensors)
    if learning:
        # One node for all: its backward pass is one step, in the same order on all replicas.
        mine = (tensors[i] for i in learning)
        for i, result in zip(learning, _AllReduce.apply(peers, op, weight, op is ReduceOp.SUM, *mine), strict=True):
            results[i] = result
    others = [i for i in range(len(tensors)) if i not in learning]
    for i, result in zip(others, peers.reduced(op, [tensors[i] for i in others]), strict=True):
        results[i] = result
    return results


def all_gathered(peers: Peers, tensor: Tensor, axis: int, sizes: Sequence[int], weight: Weight) -> Tensor:
    """Return the replicas' tensors joined along `axis`, of these sizes along it."""
    gathered: Tensor = _AllGather.apply(peers, tensor, axis, tuple(sizes), weight)
    return gathered


@final
class _AllReduce(torch.autograd.Function):
    """`divided`: what comes back is divided by this replica's weight."""

    @staticmethod
    def forward(ctx: Any, peers: Peers, op: ReduceOp, weight: Weight, divided: bool, *tensors: Tensor) -> Any:
        ctx.peers, ctx.op, ctx.weight, ctx.divided = peers, op, weight, divided
        return tuple(peers.reduced(op, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, None, *_back(ctx.peers, ctx.op, ctx.weight, ctx.divided, gradients)


@final
class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, tensor: Tensor, axis: int, sizes: tuple[int, ...], weight: Weight) -> Tensor:
        ctx.peers, ctx.axis, ctx.sizes, ctx.weight = peers, axis, sizes, weight
        return peers.gathered(tensor, axis, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (total,) = _back(ctx.peers, ReduceOp.SUM, ctx.weight, True, gradients)
        before = sum(ctx.sizes[: ctx.peers.replica_id])
        return None, total.narrow(ctx.axis, before, ctx.sizes[ctx.peers.replica_id]), None, None, None


def _back(peers: Peers, op: ReduceOp, weight: Weight, divided: bool, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    f = weight()
    # What is summed here is exactly that, so that a gradient of this gradient is divided again.
    reduced: Sequence[Tensor] = _AllReduce.apply(peers, op, weight, True, *(_times(g, f) for g in gradients))
    return [_times(g, 1 / f if f else 0.0) for g in reduced] if divided else reduced


def _times(gradient: Tensor, factor: float) -> Tensor:
    if factor == 1.0:
        return gradient
    # The loss of no examples is NaN, and so is NaN * 0.
    return gradient * factor if factor else torch.zeros_like(gradient)
