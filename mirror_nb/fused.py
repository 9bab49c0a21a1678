"""Whether an optimizer is faster with `fused=True`: its step, timed on copies of its parameters.

Knows optimizers. Nothing of the one in question changes, and no replica waits for another.
"""

from __future__ import annotations

import functools
import inspect
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

_WARM_UP, _ROUNDS = 2, 5
STEPS = 2 * (_WARM_UP + _ROUNDS)
# Of optimizers that a trial makes.
LARGEST = 2**25
# Elements that an optimizer is tried on unasked; it takes up to eight times their memory.


def step_times(optimizer: Optimizer | None, largest: float = LARGEST) -> tuple[float, float] | None:
    """Return the median times of a step of such an optimizer, as it is and fused; ms.

    None: it cannot be fused, it has more than `largest` elements, or there is no memory for copies of them.
    """
    if optimizer is None:
        return None
    kind: Any = type(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if (
        "fused" not in inspect.signature(kind.__init__).parameters
        or any(group.get("fused") for group in optimizer.param_groups)
        or sum(p.numel() for p in parameters) > largest
    ):
        return None
    gpus = {p.device for p in parameters if p.is_cuda}
    times = []
    for fused in (False, True):
        try:
            groups = [{**group, **_copied(group, fused)} for group in optimizer.param_groups]
            tried = kind(groups, **({"fused": True} if fused else {}))
            # Not before: gradients that an optimizer finds are reduced over the replicas.
            _give_gradients(tried)
            times.append(median_ms(functools.partial(_step, tried, gpus)))
        except (RuntimeError, TypeError):
            # Not for these settings or dtypes; no memory; or a class of the user's that takes other arguments.
            return None
    return times[0], times[1]


def _step(optimizer: Optimizer, gpus: Iterable[torch.device]) -> None:
    optimizer.step()
    for gpu in gpus:
        # Which is behind: that a step is asked for tells nothing.
        torch.cuda.synchronize(gpu)


def _copied(group: dict[str, Any], fused: bool) -> dict[str, Any]:
    copies = [p.detach().clone() for p in group["params"] if p.requires_grad]
    return {"params": copies, "fused": fused or group.get("fused")}


def _give_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = each.new_full(each.shape, 1e-3)


def median_ms(call: Callable[[], Any]) -> float:
    """Return the median time of a few calls, after some that do not count; ms."""
    times = []
    for _ in range(_WARM_UP + _ROUNDS):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times[_WARM_UP:])
