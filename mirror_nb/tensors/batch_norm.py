"""BatchNorm of shares: by the statistics of all replicas' values, or of a single value a channel.

    forward   n, Σx, Σx² of every replica ─▶ added up ─▶ mean and variance of the global batch, the same everywhere
    backward  Σdy, Σdy·x̂ of every replica ─▶ added up ─▶ the gradient of x; those of weight and bias stay local, for
              the gradient synchroniser

Knows torch's batch norm modules and a function that adds a tensor up over the replicas. Knows no process group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

AllReduce = Callable[[Tensor], Tensor]
# Returns the sum over the replicas of a flat float64 tensor; every replica calls it, as often as the others.

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
OF_ONE_PROCESS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)
# No subclasses of those that they become; torch looks their `forward` up before they become it.


def _alike() -> float:
    return 1.0


def normalized(
    module: BatchNorm, x: Tensor, all_reduce: AllReduce, *, absent: bool = False, weight: Callable[[], float] = _alike
) -> Tensor:
    """Normalise x [examples, channels, …] in training, and move the running statistics.

    `absent`: x counts as no examples. `weight`: how many times an equal part the loss of this replica counts, as the
    backward pass comes by.
    """
    factor = count_batch(module)
    of_module = module.weight, module.bias, module.eps
    y, mean, variance, count = _Synchronized.apply(x, *of_module, absent, all_reduce, weight)
    if module.track_running_stats and module.running_mean is not None and module.running_var is not None:
        move(module.running_mean, mean, factor, count > 0)
        # The unbiased variance, as torch keeps it; of one value there is none.
        move(module.running_var, variance * count / (count - 1).clamp(min=1), factor, count > 1)
    return y


def without_variance(module: BatchNorm, x: Tensor, *, absent: bool = False) -> Tensor:
    """Normalise one value a channel, or none, in training: it is its own mean, and the running variance stays.

    `absent`: x counts as no examples, and is no batch.
    """
    factor = 0.0 if absent else count_batch(module)
    if x.numel() and not absent and module.track_running_stats and module.running_mean is not None:
        move(module.running_mean, x.detach().reshape(-1), factor, True)
    normal = x * 0
    y = normal if module.weight is None else normal * _over(module.weight, x)
    return (y if module.bias is None else y + _over(module.bias, x)).to(x.dtype)


class _Synchronized(torch.autograd.Function):
    """Normalisation by the statistics of all replicas' values: [examples, channels, …] in x's dtype.

    Returns also the mean, the biased variance, both [channels] float32 or more, and the count, a float64 scalar.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        absent: bool,
        all_reduce: AllReduce,
        weight_of_loss: Callable[[], float],
    ) -> tuple[Tensor, ...]:
        values = x.to(_dtype_of(x))
        mean, variance, count = _statistics(values, absent, all_reduce)
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps, ctx.absent, ctx.all_reduce, ctx.weight_of_loss = eps, absent, all_reduce, weight_of_loss
        ctx.mark_non_differentiable(mean, variance, count)
        y = _normalised(values, mean, variance, weight, bias, eps)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, count = ctx.saved_tensors
        values, eps = x.to(mean.dtype), ctx.eps
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        dx, of_weight, of_bias = _constant_backward(dy.to(mean.dtype), values, mean, variance, scale, eps)
        # What comes to a parameter here is multiplied by this replica's weight, what came from another's loss, too.
        f = ctx.weight_of_loss()
        mine = torch.cat([of_bias, of_weight]).double() * f
        absent = ctx.absent or not f
        # What is absent may have come to no numbers on its way here, and NaN * 0 is NaN.
        together = ctx.all_reduce(torch.zeros_like(mine) if absent else mine) / count.clamp(min=1)
        if not absent:
            # What was absent has no part in the statistics, so they hand it no gradient.
            by_mean, by_variance = (together / f).to(mean.dtype).chunk(2)
            scale = -scale * (variance + eps).rsqrt()
            dx = dx + _normalised(values, mean, variance, scale * by_variance, scale * by_mean, eps)
        typed = [None if weight is None else gradient.to(weight.dtype) for gradient in (of_weight, of_bias)]
        return dx.to(x.dtype), *typed, None, None, None, None


def _normalised(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """As in evaluation, with these statistics in the place of the running ones: one pass over x on any device."""
    if x.numel() == 0:
        # torch divides by the number of examples, which ends the process.
        return torch.empty_like(x)
    weight, bias = (None if one is None else one.to(x.dtype) for one in (weight, bias))
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)


def _constant_backward(
    dy: Tensor, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, as if the statistics were constant, of the weight and of the bias: evaluation's backward."""
    if x.numel() == 0:
        return torch.empty_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    return torch.ops.aten.native_batch_norm_backward(
        dy, x, weight, mean, variance, None, None, False, eps, [True, True, True]
    )


def _statistics(values: Tensor, absent: bool, all_reduce: AllReduce) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance, [channels], of all replicas' values, and how many each channel has."""
    channels = values.shape[1]
    count = 0 if absent else values.numel() // channels
    # n, n·mean and n·(variance + mean²) add up. In float64, so that the squares' difference loses nothing.
    flat = torch.zeros(2 * channels + 1, dtype=torch.float64, device=values.device)
    if count:
        mean, variance = _mean_and_variance(values)
        mean64, variance64 = mean.double(), variance.double()
        torch.cat([mean64, variance64 + mean64.square()], out=flat[1:])
        flat *= count
        flat[0] = count
    flat = all_reduce(flat)
    total = flat[0]
    mean64, square = (flat[1:] / total.clamp(min=1)).chunk(2)
    variance64 = (square - mean64.square()).clamp(min=0)
    return mean64.to(values.dtype), variance64.to(values.dtype), total.clone()


def _mean_and_variance(values: Tensor) -> tuple[Tensor, Tensor]:
    if values.device.type == "cpu" and hasattr(torch, "batch_norm_update_stats"):
        # What batch norm itself calls there: a quarter of var_mean's time for [50, 32, 28, 28].
        return torch.batch_norm_update_stats(values, None, None, 0.0)
    variance, mean = torch.var_mean(values, [dim for dim in range(values.ndim) if dim != 1], correction=0)
    return mean, variance


def count_batch(module: BatchNorm) -> float:
    """Count the batch, and return how far the running statistics go towards its own."""
    batches = module.num_batches_tracked
    if module.track_running_stats and batches is not None:
        batches.add_(1)
        return 1.0 / float(batches) if module.momentum is None else float(module.momentum)
    return 0.0 if module.momentum is None else float(module.momentum)


@torch.no_grad()
def move(running: Tensor, towards: Tensor, factor: float, there: Tensor | bool) -> None:
    moved = running + factor * (towards.to(running.dtype) - running)
    # On the device: asking whether there is anything would wait for it.
    running.copy_(torch.where(torch.as_tensor(there, device=running.device), moved, running))


def _dtype_of(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _over(by_channel: Tensor, x: Tensor) -> Tensor:
    """A tensor [channels] in the shape that multiplies x [examples, channels, …]."""
    return by_channel.reshape(1, -1, *(1 for _ in x.shape[2:]))
