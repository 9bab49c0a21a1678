"""What optimizers and schedulers decide by: the same number on all replicas, since else they would part ways.

    LBFGS.step(closure)               the loss that the closure returns, of the whole global batch
    ReduceLROnPlateau.step(metrics)   the mean of what the replicas give

Knows optimizers, schedulers and how gradients are weighed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mirror_nb.gradients.synchronizer import GradientSynchronizer
from mirror_nb.transfer.told import parameters_of


class GlobalLosses:
    """A hook for the steps of all optimizers of a replica."""

    def __init__(self, gradients: GradientSynchronizer) -> None:
        self._gradients = gradients

    def __call__(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give an LBFGS whose gradients are synchronised a closure that returns the loss of all replicas."""
        if not isinstance(optimizer, torch.optim.LBFGS) or not _takes_part(self._gradients, optimizer):
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._global(args[1], optimizer), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._global(kwargs["closure"], optimizer)}
        return None

    def _global(self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        def of_all() -> Any:
            loss = closure()
            weight = self._gradients.weight
            if weight is None or loss is None:
                return loss
            return _summed(loss, weight, optimizer)

        return of_all


class OfAll(float):
    """A metric that is the same on all replicas already, and that some of them may not ask for."""


class GlobalMetrics:
    """Has every ReduceLROnPlateau of a replica look at the mean of what the replicas give it; until `remove`."""

    def __init__(self, gradients: GradientSynchronizer) -> None:
        original = self._original = ReduceLROnPlateau.step

        @functools.wraps(original)
        def step(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
            alone = gradients.weight is None or isinstance(metrics, OfAll)
            if not alone and _takes_part(gradients, scheduler.optimizer):
                metrics = _summed(metrics, 1 / gradients.num_replicas, scheduler.optimizer)
            original(scheduler, metrics, *args, **kwargs)

        self._replacement = step
        _plateau.step = step

    def remove(self) -> None:
        """Put torch's own in its place, unless somebody else has put theirs there."""
        if _plateau.step is self._replacement:
            _plateau.step = self._original


_plateau: Any = ReduceLROnPlateau


def _takes_part(gradients: GradientSynchronizer, optimizer: torch.optim.Optimizer) -> bool:
    return any(map(gradients.tracks, parameters_of(optimizer)))


def _summed(value: Any, weight: float, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return the sum over the replicas of each one's value times its weight, where the optimizer's parameters are."""
    given = (
        value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
    )
    local = given.to(parameters_of(optimizer)[0].device, torch.float64)
    # The loss of no examples is NaN, and so is NaN * 0.
    total = local * weight if weight else torch.zeros_like(local)
    dist.all_reduce(total)
    return total.to(given.dtype) if given.is_floating_point() else total
