"""One job on all replicas, as the process that commands them sees it, and the logs that their totals make.

Knows the strategy's place and what jobs return; knows no epochs, no callbacks and no gradients.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from mirror_nb.errors import MirrorError
from mirror_nb.strategies.base import Strategy
from mirror_nb.training import job
from mirror_nb.training.feeds import Feed
from mirror_nb.training.loop import Advanced, Note, Task, Totals
from mirror_nb.training.metrics import metrics
from mirror_nb.training.settings import CompileSettings

if TYPE_CHECKING:
    from mirror_nb.training.model import Model

_tokens = itertools.count(1)


@final
class Running:
    """One job on all replicas, from its beginning to its end."""

    def __init__(self, strategy: Strategy, begin: Callable[..., None], *args: Any) -> None:
        self._strategy = strategy
        self._place = strategy._place
        self._token = f"job{next(_tokens)}"
        self._place.command(begin, (strategy, self._token, *args), changes=False)

    def advance(
        self, epoch: int, steps: int | None, *, changes: bool, on_note: Callable[[Note], None]
    ) -> list[Advanced]:
        """Go on to the end of the epoch, or for so many steps; return where every replica stands."""
        args = (self._strategy, self._token, epoch, steps)
        return self._place.every(self._place.command(job.advance, args, changes=changes, on_note=on_note))

    def ask(self, function: Callable[..., Any], *args: Any, changes: bool = False) -> list[Any]:
        """Call a function of job.py for this job; return every replica's result."""
        call = self._place.command(function, (self._strategy, self._token, *args), changes=changes)
        return self._place.every(call)

    def end(self) -> dict[str, Any]:
        """Let the replicas forget it; return what replica 0 kept for the next one."""
        kept: dict[str, Any] = self._place.command(job.end, (self._strategy, self._token), changes=False)[0]
        return kept

    def settle(self, model: Model) -> None:
        """After an error: let the replicas forget it, and stand alike."""
        place = self._place
        if place.seat is not None and place.num_replicas > 1:
            # The others may be elsewhere; the next fit finds out who lags behind.
            place.seat.jobs.pop(self._token, None)
            return
        model._unsettled = True
        with contextlib.suppress(MirrorError):
            args = (self._strategy, self._token, model, model.optimizer, model.scheduler)
            place.command(job.settle, args)
            model._unsettled = False


@final
class Logs:
    """Makes the replicas' totals the numbers that users see."""

    def __init__(self, settings: CompileSettings) -> None:
        asked = (settings.metrics, settings.weighted_metrics)
        self._metrics = [metric for each in asked for metric in metrics(each, loss=settings.loss)]

    def of(self, *groups: list[Totals]) -> dict[str, Any]:
        """Return the loss, the losses by output, what the model's own step gave, and the metrics.

        Each group holds the totals of all replicas, in order: one, and one more for each time that the epoch was
        begun before and left.
        """
        totals = [each for group in groups for each in group]
        # Every replica knows the examples of all.
        examples = sum(group[0].examples for group in groups)
        if not examples:
            return {}
        logs: dict[str, Any] = {"loss": sum(t.loss for t in totals) / examples}
        for name in _names(t.parts for t in totals):
            logs[f"{name}_loss"] = sum(t.parts.get(name, 0.0) for t in totals) / examples
        for name in _names(t.named for t in totals):
            logs[name] = sum(t.named.get(name, 0.0) for t in totals) / examples
        for number, metric in enumerate(self._metrics):
            value = metric.compute([t.metrics[number] for t in totals])
            logs[metric.name] = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        return logs


def _names(dicts: Iterable[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for each in dicts for name in each))


def task_of(
    model: Model,
    feed: Feed,
    steps: int | None,
    *,
    class_weight: dict[int, float] | None = None,
    seed: int | None = None,
    watched: bool = False,
    epochs: int | None = None,
) -> Task:
    """Return what a job of this model is asked for."""
    place = model.strategy._place
    settings = copy.copy(model._settings or CompileSettings())
    for name in ("optimizer", "scheduler"):
        # They go beside the task, by reference. Not dataclasses.replace: its checks make modules, after which the
        # strategy has to look for changes in all that the replicas have.
        object.__setattr__(settings, name, None)
    made_here = place.seat is not None and place.num_replicas > 1
    return Task(settings, feed, steps, made_here, made_here or model._unsettled, watched, seed, class_weight, epochs)


def known_steps(feed: Feed, steps: int | None) -> int | None:
    """Return the number of global batches of an epoch; None where nobody knows."""
    known = feed.num_batches
    return steps if known is None else known if steps is None else min(known, steps)
