"""BatchNorm for shares: of any size, and with the global batch's statistics where that is asked for.

Knows torch's batch norm modules and a function that adds a tensor up over the replicas. Knows no process group.

    forward   n, Σx, Σx² of every replica ─▶ added up ─▶ mean and variance of the global batch, the same everywhere
    backward  Σdy, Σdy·x̂ of every replica ─▶ added up ─▶ the gradient of x; those of weight and bias stay local, for
              the gradient synchroniser
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

AllReduce = Callable[[Tensor], Tensor]
# Returns the sum over the replicas of a flat float64 tensor; every replica calls it, as often as the others.


BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


@final
class BatchNorms:
    """The batch norms of a network while `exact_batch_norm` holds them."""

    def __init__(self, network: nn.Module, synchronize: bool, all_reduce: AllReduce | None) -> None:
        self._all_reduce = all_reduce
        self._absent = False
        # A forward of its own, the class's or the module's, is the user's affair.
        modules = [m for m in network.modules() if isinstance(m, BatchNorm) and "forward" not in vars(m)]
        self._modules = [m for m in modules if type(m).forward in _FORWARDS]
        self._synchronized = {
            module for module in self._modules if synchronize or isinstance(module, nn.SyncBatchNorm)
        }

    @property
    def synchronizes(self) -> bool:
        """Whether a forward pass in training needs all replicas: one without examples has to be `absent` then."""
        return self._all_reduce is not None and bool(self._synchronized)

    @contextmanager
    def absent(self) -> Iterator[None]:
        """While inside, what is normalised counts as no examples; statistics and gradients are the others'.

        For a replica whose share is empty: it runs its forward pass on any one example, takes part in every
        collective of it, and goes backward from 0 times the outputs.
        """
        self._absent = True
        try:
            yield
        finally:
            self._absent = False

    def _forward(self, module: BatchNorm, x: Tensor) -> Tensor:
        if not module.training:
            forward: Any = type(module).forward
            return forward(module, x)
        module._check_input_dim(x)
        factor = _count_batch(module)
        running = (module.running_mean, module.running_var) if module.track_running_stats else (None, None)
        if self._all_reduce is not None and module in self._synchronized:
            return self._synchronize(module, x, running, factor, self._all_reduce)
        if x.numel() == x.shape[1] or x.numel() == 0:
            return _without_variance(module, x, running[0], factor)
        return F.batch_norm(x, *running, module.weight, module.bias, True, factor, module.eps)

    def _synchronize(
        self,
        module: BatchNorm,
        x: Tensor,
        running: tuple[Tensor | None, Tensor | None],
        factor: float,
        all_reduce: AllReduce,
    ) -> Tensor:
        weight, bias = module.weight, module.bias
        y, mean, variance, count = _Synchronized.apply(x, weight, bias, module.eps, self._absent, all_reduce)
        if running[0] is not None and running[1] is not None:
            _move(running[0], mean, factor, count > 0)
            # The unbiased variance, as torch keeps it; of one value there is none.
            _move(running[1], variance * count / (count - 1).clamp(min=1), factor, count > 1)
        return y


@contextmanager
def exact_batch_norm(
    network: nn.Module, *, synchronize: bool, all_reduce: AllReduce | None = None
) -> Iterator[BatchNorms]:
    """While inside, every BatchNorm of `network` takes shares of any size, in training.

    A single value for a channel, which torch refuses, is normalised to 0 and leaves the running variance as it is.
    With `synchronize`, and for `nn.SyncBatchNorm` always, the statistics, their gradients and the running ones are
    the global batch's, on any device: those of one device's BatchNorm. `all_reduce` adds a flat float64 tensor up
    over the replicas; without it there is one replica. A synchronised forward and backward pass takes one call
    each for every BatchNorm: all replicas have to make them, an empty share too (`BatchNorms.absent`).

    Evaluation, state dict and classes stay as they are. Gradients cannot be differentiated again.
    """
    held = BatchNorms(network, synchronize, all_reduce)
    for module in held._modules:
        # In the module's own __dict__, before its class: nothing that is saved or copied by class changes.
        module.__dict__["forward"] = _bound(held, module)
    try:
        yield held
    finally:
        for module in held._modules:
            module.__dict__.pop("forward", None)


def _bound(held: BatchNorms, module: BatchNorm) -> Callable[[Tensor], Tensor]:
    return lambda x: held._forward(module, x)


_FORWARDS = (nn.BatchNorm1d.forward, nn.BatchNorm2d.forward, nn.BatchNorm3d.forward, nn.SyncBatchNorm.forward)


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
    ) -> tuple[Tensor, ...]:
        values = x.to(_dtype_of(x))
        mean, variance, count = _statistics(values, absent, all_reduce)
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps, ctx.absent, ctx.all_reduce = eps, absent, all_reduce
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
        mine = torch.cat([of_bias, of_weight]).double()
        # What is absent may have come to no numbers on its way here, and NaN * 0 is NaN.
        together = ctx.all_reduce(torch.zeros_like(mine) if ctx.absent else mine) / count.clamp(min=1)
        if not ctx.absent:
            # What was absent has no part in the statistics, so they hand it no gradient.
            by_mean, by_variance = together.to(mean.dtype).chunk(2)
            scale = -scale * (variance + eps).rsqrt()
            dx = dx + _normalised(values, mean, variance, scale * by_variance, scale * by_mean, eps)
        typed = [None if weight is None else gradient.to(weight.dtype) for gradient in (of_weight, of_bias)]
        return dx.to(x.dtype), *typed, None, None, None


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


def _without_variance(module: BatchNorm, x: Tensor, running_mean: Tensor | None, factor: float) -> Tensor:
    """One value a channel, or none: it is its own mean."""
    if x.numel() and running_mean is not None:
        _move(running_mean, x.detach().reshape(-1), factor, True)
    normal = x * 0
    y = normal if module.weight is None else normal * _over(module.weight, x)
    return y if module.bias is None else y + _over(module.bias, x)


def _count_batch(module: BatchNorm) -> float:
    """Count the batch, and return how far the running statistics go towards its own."""
    batches = module.num_batches_tracked
    if module.track_running_stats and batches is not None:
        batches.add_(1)
        return 1.0 / float(batches) if module.momentum is None else float(module.momentum)
    return 0.0 if module.momentum is None else float(module.momentum)


@torch.no_grad()
def _move(running: Tensor, towards: Tensor, factor: float, there: Tensor | bool) -> None:
    moved = running + factor * (towards.to(running.dtype) - running)
    # On the device: asking whether there is anything would wait for it.
    running.copy_(torch.where(torch.as_tensor(there, device=running.device), moved, running))


def _dtype_of(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _over(by_channel: Tensor, x: Tensor) -> Tensor:
    """A tensor [channels] in the shape that multiplies x [examples, channels, …]."""
    return by_channel.reshape(1, -1, *(1 for _ in x.shape[2:]))
