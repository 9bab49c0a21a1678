"""Jobs with a loss and metrics: what one replica adds up of them; and the one that does nothing else, an evaluation.

A global batch's loss is the sum of all shares' parts. Knows objectives, metrics and a model's own steps; knows no
gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from mirror_nb.data.batches import map_leaves
from mirror_nb.errors import UsageError
from mirror_nb.strategies.seat import Seat
from mirror_nb.training.loop import Job, Task, Totals, device_of, one_example, told
from mirror_nb.training.objectives import objective
from mirror_nb.training.shares import Share

if TYPE_CHECKING:
    from mirror_nb.training.model import Model


class Scoring(Job):
    """A job with a loss and metrics."""

    _step_name: str
    # The method of the model that gives its own loss.

    def __init__(self, seat: Seat, model: Model, task: Task) -> None:
        settings = task.settings
        self._objective: Any = None
        self._outputs_are_rows = isinstance(settings.loss, (Mapping, list, tuple))
        if settings.loss is not None:
            self._objective = objective(settings.loss, settings.loss_weights).to(device_of(model, seat.device))
            targets = getattr(task.feed, "targets", None)
            if targets is not None:
                self._objective = self._objective.knowing(targets)
        self._plain_metrics, self._weighted_metrics = settings.make_metrics()
        self._counting = True
        # False while a batch is gone over once more.
        super().__init__(seat, model, task)
        self._own_step = model.own_step(self._step_name)
        if self._own_step is None and self._objective is None:
            self._own_step = model.own_step("training_step")
            if self._own_step is None:
                raise UsageError(
                    f"the model has no loss: give compile(loss=...), or define {self._step_name}(self, batch)"
                )

    def _begin_sums(self) -> None:
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._weight = 0
        self._part_sums: dict[str, Tensor] = {}
        self._named_sums: dict[str, Tensor] = {}
        self._named_examples: Counter[str] = Counter()
        self._named: dict[str, Tensor] = {}
        # What the model's own step told beside its latest loss.
        for metric in (*self._plain_metrics, *self._weighted_metrics):
            metric.reset()

    def _totals(self, examples: int | None = None) -> Totals:
        """`examples`: of all replicas, if the batch that is gone over is to count already."""
        states = tuple(metric.state() for metric in (*self._plain_metrics, *self._weighted_metrics))
        return Totals(
            float(self._loss_sum),
            self.examples if examples is None else examples,
            {name: float(value) for name, value in self._part_sums.items()},
            {name: (float(value), self._named_examples[name]) for name, value in self._named_sums.items()},
            states,
        )

    def _running_loss(self) -> float | None:
        return float(self._loss_sum) / self._weight if self._weight else None

    def _loss(self, share: Share) -> tuple[Tensor, int, Any]:
        """Return this share's part of the global batch's loss as a dividend and a divisor, and the network's outputs.

        Adds the loss up.
        """
        by = 1
        if self._own_step is not None:
            value = self._loss_of_own_step(share)
            outputs = None
        else:
            outputs = self._outputs(share)
            loss = self._objective(
                outputs, share.targets, share.sample_weight, self.task.class_weight, examples=share.examples
            )
            divisor = None if loss.denominator is None else self._seat.add_up(loss.denominator)
            if loss.is_by_examples:
                value, by = loss.numerator, share.global_examples
            else:
                value = loss.value(share.global_examples, divisor)
            for name, part in loss.part_values(share.global_examples, divisor).items() if loss.parts else ():
                self._add(self._part_sums, name, part, share.global_examples)
        if self._counting:
            self._loss_sum.add_(value.detach(), alpha=share.global_examples / by)
            self._weight += share.examples
        return value, by, outputs

    def _loss_of_own_step(self, share: Share) -> Tensor:
        assert self._own_step is not None
        result = self._own_step(share.batch)
        named = dict(result) if isinstance(result, Mapping) else {"loss": result}
        loss = named.pop("loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError(
                f"{self._step_name} returned {told(result)}; return the loss, a scalar tensor that is the mean over "
                "the batch's examples, or a dict with it under 'loss' and metrics beside it"
            )
        self._named = {name: self._number(name, value) for name, value in named.items()}
        for name, value in self._named.items():
            self._add(self._named_sums, name, value, share.examples)
            self._named_examples[name] += share.examples if self._counting else 0
        return loss.reshape(()) * (share.examples / share.global_examples)

    def _number(self, name: str, value: Any) -> Tensor:
        try:
            number = torch.as_tensor(value, device=self._device)
        except (TypeError, ValueError, RuntimeError):
            number = None
        if number is None or number.numel() != 1 or number.is_complex():
            raise UsageError(
                f"{self._step_name} returned {told(value)} as {name!r}; beside the loss there are numbers to log, or "
                "tensors of one element, means over the batch's examples"
            )
        return number.reshape(())

    def _add(self, sums: dict[str, Tensor], name: str, value: Tensor, weight: int) -> None:
        # What no examples gave may be no number, and NaN * 0 is NaN.
        if not self._counting or not weight:
            return
        if name not in sums:
            sums[name] = torch.zeros((), dtype=torch.float64, device=self._device)
        sums[name].add_(value.detach(), alpha=weight)

    def _dry_run(self, share: Share) -> Any:
        return super()._dry_run(share) if self._own_step is None else self._own_step(one_example(share.batch))

    def _without_examples(self) -> None:
        """Take part where the others add up how much their shares counted."""
        if self._own_step is None:
            divisor = self._objective.no_denominator(self._device)
            if divisor is not None:
                self._seat.add_up(divisor)

    def _record(self, loss: Tensor) -> None:
        """Write down the loss and the metrics of this share's own examples."""
        recorder = self._seat.recorder
        if recorder.enabled:
            measured = {m.name: m.latest() for m in (*self._plain_metrics, *self._weighted_metrics)}
            known = {name: value for name, value in (measured | self._named).items() if value is not None}
            recorder.measured({"loss": loss} | {name: value.detach() for name, value in known.items()})

    def _measure(self, outputs: Any, share: Share) -> None:
        if self._own_step is not None or not (self._plain_metrics or self._weighted_metrics) or not self._counting:
            return
        with torch.no_grad():
            seen = map_leaves(outputs, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
            for metric in self._plain_metrics:
                metric.update(seen, share.targets)
            for metric in self._weighted_metrics:
                metric.update(seen, share.targets, share.sample_weight)


@final
class Evaluation(Scoring):
    """The loss and the metrics of data that are not learned from."""

    _step_name = "validation_step"

    def _conditions(self) -> AbstractContextManager[Any]:
        return self._evaluating()

    def _take(self, share: Share, last: bool) -> None:
        if share.examples:
            _, _, outputs = self._loss(share)
            self._measure(outputs, share)
        else:
            self._without_examples()
        self.step += 1
