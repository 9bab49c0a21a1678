"""What a metric is, and metrics of outputs and targets alone. Knows no names, no torchmetrics and no replica.

    replica 0: update … update ─▶ state ┐
    replica 1: update … update ─▶ state ┴▶ compute([state, state]) ─▶ one number

States go out as tensors on the CPU, and who brings them together is the caller's.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from mirror_nb.data.batches import leaves, map_leaves
from mirror_nb.errors import UsageError
from mirror_nb.training.objectives import member, output_name, weighed, weight_of

State = dict[str, Any]
# Tensors on the CPU, to be added up over the replicas, and lists, to be strung together in order. Empty before
# the first update.

IGNORED = -100
# A class target that counts nowhere, as in torch's losses.

Sums = tuple[Tensor, Tensor]
# The sum of the weighted values, and the sum of their weights.


class Metric(ABC):
    """One number about outputs and targets, over all data since `reset`."""

    name: str

    @abstractmethod
    def reset(self) -> None:
        """Forget all data."""

    @abstractmethod
    def update(self, outputs: Any, targets: Any, sample_weight: Any = None) -> None:
        """Take in a share, [examples, …] on any device; without gradients.

        `sample_weight`: [examples]; the metric is then a weighted mean. Raises UsageError where it cannot be.
        """

    @abstractmethod
    def state(self) -> State:
        """Return what this replica knows; tensors on the CPU."""

    @abstractmethod
    def compute(self, states: Sequence[State]) -> float | Tensor:
        """Return the metric of all data, from all replicas' states, in their order; NaN without data."""

    def latest(self) -> Tensor | None:
        """Return the metric of the latest share alone, a tensor on its device; None where that costs more than a sum.

        For a curve by step; nothing is waited for.
        """
        return None


@final
class Mean(Metric):
    """A mean over all examples, or all their elements: of what a function says of each."""

    def __init__(
        self,
        name: str,
        values: Callable[[Any, Any, Any], tuple[Tensor, Tensor]],
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.name = name
        self._values = values
        self._finish = finish
        self.reset()

    def reset(self) -> None:
        self._sums: Sums | None = None
        self._latest: Sums | None = None

    @torch.no_grad()
    def update(self, outputs: Any, targets: Any, sample_weight: Any = None) -> None:
        # They stay on the device, where they are waited for only when the state is asked for.
        total, count = self._latest = self._values(outputs, targets, sample_weight)
        if self._sums is None:
            # A float64 of its own: what the function gave may be an integer, or its own tensor.
            self._sums = total.to(torch.float64, copy=True), count.to(torch.float64, copy=True)
            return
        self._sums[0].add_(total)
        self._sums[1].add_(count)

    def state(self) -> State:
        if self._sums is None:
            return {}
        if self._sums[0].device.type == "cpu":
            total, count = self._sums
        else:
            # Waited for once.
            total, count = torch.stack(self._sums).cpu()
        return {"total": total.clone(), "count": count.clone()}

    def latest(self) -> Tensor | None:
        if self._latest is None:
            return None
        mean = self._latest[0] / self._latest[1]
        return mean if self._finish is None else self._finish(mean)

    def compute(self, states: Sequence[State]) -> float | Tensor:
        known = [state for state in states if state]
        if not known:
            return float("nan")
        mean = sum(state["total"] for state in known) / sum(state["count"] for state in known)
        return float(mean if self._finish is None else self._finish(mean))


@final
class Called(Metric):
    """A function of (outputs, targets): a mean of its values, or its value for all data."""

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        self.name = name
        self._function = function
        self.reset()

    def reset(self) -> None:
        self._mean = Mean(self.name, _sums_of_values)
        self._outputs: list[Any] = []
        self._targets: list[Any] = []

    @torch.no_grad()
    def update(self, outputs: Any, targets: Any, sample_weight: Any = None) -> None:
        # Which kind it is, the first share tells; a kept one need not be computed again.
        values = None if self._outputs else self._call(outputs, targets)
        if values is not None and not values.ndim and (sample_weight is not None or self._mean.state()):
            # Of a single example `squeeze` leaves a scalar, too.
            values = values.reshape(1) if _examples(outputs, targets) == 1 else values
        if values is not None and values.ndim:
            self._mean.update(values, None, sample_weight)
            return
        if sample_weight is not None:
            raise UsageError(
                f"the metric {self.name} returns a scalar, which cannot be weighed by `sample_weight`; let it return "
                "one value for each example, or give it in `metrics` instead of `weighted_metrics`"
            )
        self._outputs.append(map_leaves(outputs, on_cpu))
        self._targets.append(map_leaves(targets, on_cpu))

    def latest(self) -> Tensor | None:
        return self._mean.latest()

    def _call(self, outputs: Any, targets: Any) -> Tensor:
        value = self._function(outputs, targets)
        if not isinstance(value, (Tensor, int, float)):
            raise UsageError(
                f"the metric {self.name} returned a {type(value).__qualname__}; a function of (outputs, targets) "
                "returns one value for each example, or a scalar for all"
            )
        return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")

    def state(self) -> State:
        if self._outputs:
            return {"outputs": list(self._outputs), "targets": list(self._targets)}
        return self._mean.state()

    @torch.no_grad()
    def compute(self, states: Sequence[State]) -> float | Tensor:
        kept = [state for state in states if "outputs" in state]
        if not kept:
            return self._mean.compute(states)
        outputs, targets = (_in_order([state[what] for state in kept]) for what in ("outputs", "targets"))
        # For all of them one, or one for each example, which a share of a single one did not show.
        total, count = sums_of(self._call(_joined(outputs), _joined(targets)), None)
        means = [state for state in states if "total" in state]
        return self._mean.compute([{"total": total, "count": count}, *means])


@final
class OfOutput(Metric):
    """A metric of one of several outputs."""

    def __init__(self, metric: Metric, key: Any) -> None:
        self.name = f"{output_name(key)}_{metric.name}"
        self._metric = metric
        self._key = key

    def update(self, outputs: Any, targets: Any, sample_weight: Any = None) -> None:
        output, target = member(outputs, self._key, "outputs"), member(targets, self._key, "targets")
        self._metric.update(output, target, weight_of(sample_weight, self._key, outputs))

    def reset(self) -> None:
        self._metric.reset()

    def state(self) -> State:
        return self._metric.state()

    def latest(self) -> Tensor | None:
        return self._metric.latest()

    def compute(self, states: Sequence[State]) -> float | Tensor:
        return self._metric.compute(states)


def sums_of(values: Tensor, weight: Any, kept: Tensor | None = None) -> Sums:
    """Return the weighted sum of `values` [examples, …], and the sum of their weights.

    `kept`: which of them count; the others are 0.
    """
    if weight is None:
        count = torch.full((), values.numel(), device=values.device) if kept is None else kept.sum()
        return values.sum(dtype=torch.float64), count
    weights = weighed(torch.ones_like(values, dtype=torch.float64) if kept is None else kept.double(), weight)
    return (values.double() * weights).sum(), weights.sum()


def _sums_of_values(values: Tensor, _: Any, weight: Any) -> Sums:
    return sums_of(values, weight)


def only_tensor(value: Any, name: str) -> Tensor:
    """Return `value`, a tensor. Raises UsageError for a structure, which the metric `name` has no use for."""
    if isinstance(value, Tensor):
        return value
    raise UsageError(
        f"the metric {name!r} takes a tensor, not a {type(value).__qualname__}; with several outputs give `metrics` "
        "and `loss` as a dict by output, or a function of (outputs, targets)"
    )


def on_cpu(value: Any) -> Any:
    """Return a tensor without its graph, on the CPU; anything else as it is."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def number(value: Any) -> float | Tensor:
    """Return a scalar as a float; a tensor of more as it is. Raises UsageError for what is neither."""
    if isinstance(value, Tensor) and value.ndim:
        return value
    if not isinstance(value, (Tensor, int, float)):
        raise UsageError(f"a metric gave {value!r}, a {type(value).__qualname__}; logs hold numbers: let it give one")
    return float(value)


def _examples(outputs: Any, targets: Any) -> int:
    return next((len(leaf) for leaf in leaves((targets, outputs)) if isinstance(leaf, Tensor) and leaf.ndim), 0)


def _in_order(by_replica: list[list[Any]]) -> list[Any]:
    """The shares of each global batch after one another, as one device sees them."""
    missing = object()
    rows = itertools.zip_longest(*by_replica, fillvalue=missing)
    return [share for row in rows for share in row if share is not missing]


def _joined(shares: list[Any]) -> Any:
    columns = iter(zip(*(leaves(share) for share in shares), strict=True))

    def together(leaf: Any) -> Any:
        column = next(columns)
        return torch.cat(column) if isinstance(leaf, Tensor) else leaf

    return map_leaves(shares[0], together)
