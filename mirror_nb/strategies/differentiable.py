"""Reductions over the replicas that autograd can pass: the gradient of a sum over replicas is the sum of gradients.

Every replica has to run the same backward passes. Source: tf.distribute's gradients of all_reduce and all_gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from mirror_nb.strategies.peers import Peers
from mirror_nb.values import ReduceOp


def all_reduced(peers: Peers, op: ReduceOp, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums (or means) over the replicas of tensors of agreed shapes and dtypes."""
    learning = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point() or tensor.is_complex()]
    results: list[Any] = list(tensors)
    if learning:
        # One node for all: its backward pass is one step, in the same order on all replicas.
        for i, result in zip(learning, _AllReduce.apply(peers, op, *(tensors[i] for i in learning)), strict=True):
            results[i] = result
    others = [i for i in range(len(tensors)) if i not in learning]
    for i, result in zip(others, peers.reduced(op, [tensors[i] for i in others]), strict=True):
        results[i] = result
    return results


def all_gathered(peers: Peers, tensor: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    """Return the replicas' tensors joined along `axis`, of these sizes along it."""
    gathered: Tensor = _AllGather.apply(peers, tensor, axis, tuple(sizes))
    return gathered


@final
class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, op: ReduceOp, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.peers, ctx.op = peers, op
        return tuple(peers.reduced(op, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *_AllReduce.apply(ctx.peers, ctx.op, *gradients)


@final
class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, tensor: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.peers, ctx.axis, ctx.sizes = peers, axis, sizes
        return peers.gathered(tensor, axis, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (total,) = _AllReduce.apply(ctx.peers, ReduceOp.SUM, gradients[0])
        before = sum(ctx.sizes[: ctx.peers.replica_id])
        return None, total.narrow(ctx.axis, before, ctx.sizes[ctx.peers.replica_id]), None, None
