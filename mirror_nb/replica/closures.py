"""The loss by which LBFGS decides: that of the whole global batch, since replicas that decide differently part ways.

    optimizer.step(closure)   the closure's gradients are reduced by its backward pass, what it returns is here

Knows optimizers and how gradients are weighed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mirror_nb.gradients import GradientSynchronizer


class GlobalLosses:
    """A hook for the steps of all optimizers of a replica."""

    def __init__(self, gradients: GradientSynchronizer) -> None:
        self._gradients = gradients

    def __call__(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give an LBFGS whose gradients are synchronised a closure that returns the loss of all replicas."""
        if not isinstance(optimizer, torch.optim.LBFGS) or not self._takes_part(optimizer):
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._global(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._global(kwargs["closure"])}
        return None

    def _takes_part(self, optimizer: torch.optim.Optimizer) -> bool:
        synchronizes = self._gradients.synchronizes
        return any(synchronizes(parameter) for group in optimizer.param_groups for parameter in group["params"])

    def _global(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def of_all() -> Any:
            loss = closure()
            weight = self._gradients.weight
            if weight is None or loss is None:
                return loss
            local = torch.as_tensor(loss).detach()
            # The loss of no examples is NaN, and so is NaN * 0.
            total = local.double() * weight if weight else torch.zeros_like(local, dtype=torch.float64)
            dist.all_reduce(total)
            return total.to(local.dtype)

        return of_all
