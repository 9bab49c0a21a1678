"""One job on all replicas, as the process that commands them sees it, and the logs that their totals make.

Knows the strategy's place and what jobs return; knows no epochs, no callbacks and no gradients.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin

from mirror_nb.errors import JobLost, MirrorError, ReplicaDied
from mirror_nb.readable import duration
from mirror_nb.strategies.base import Strategy
from mirror_nb.training import job
from mirror_nb.training.loop import Advanced, Note, Task, Totals
from mirror_nb.training.settings import CompileSettings
from mirror_nb.training.shares import Feed

if TYPE_CHECKING:
    from mirror_nb.training.model import Model

_tokens = itertools.count(1)
_T = TypeVar("_T")
STRIKES = 3
# Deaths of one replica at one place, after which it is not started once more.


@final
class Guard:
    """Goes on when replicas die: has them replaced and filled, and what they were asked asked again.

    `active`: whether it does; else what happened is raised. `say` is told of each replacement, in a line.
    """

    def __init__(self, strategy: Strategy, say: Callable[[str], None], active: bool = True) -> None:
        self.strategy = strategy
        # In a cell every replica is its own caller, and the cell ends with the one that died.
        self.active = active and strategy._place.seat is None
        self._say = say
        self._at: Any = None
        # Where the latest replacements found the work.
        self._strikes: Counter[int] = Counter()
        # Deaths there, by replica id.
        self._new: Counter[int] = Counter()
        # Deaths since then.
        self._told: list[str] = []
        # How they came about.
        self._final: ReplicaDied | None = None
        if self.active:
            # A loss of all of them before this says nothing of a death that comes.
            strategy._place.forget_deaths()

    def through(self, do: Callable[[], _T], again: Callable[[], str]) -> _T:
        """Return what `do` returns; where a replica dies, `again` prepares another call, and tells where that begins.

        Raises what `do` raises, and ReplicaDied where replacing does not help.
        """
        failed = False
        while True:
            try:
                if failed:
                    self._mend(again)
                    failed = False
                return do()
            except (ReplicaDied, JobLost) as error:
                if not self.active or error is self._final:
                    raise
                failed = True

    def reached(self, at: Any) -> None:
        """The replacements have found the work here. Raises ReplicaDied where one dies at this place each time."""
        if at != self._at:
            self._at = at
            self._strikes.clear()
        self._strikes += self._new
        self._new.clear()
        self._check(self._strikes)

    def give_up(self, why: str, survived: bool = True) -> NoReturn:
        """Raise ReplicaDied: replacing does not help. `survived`: whether some replica still has the networks."""
        died = self._final = ReplicaDied(f"{'; '.join(self._told) or 'a replica had died'}. {why}")
        died.replica_ids, died.survived = tuple(sorted(self._strikes | self._new)), survived
        raise died

    def _mend(self, again: Callable[[], str]) -> None:
        began = time.perf_counter()
        mended = self.strategy._place.mend()
        self._new.update(list(mended.replaced))
        self._told += mended.replaced.values()
        self._check(self._new)
        if not mended.survived:
            self.give_up(
                "No replica is left that had the networks: they and their optimizers go on from what was last read "
                "here",
                survived=False,
            )
        where = again()
        told = "; ".join(self._told) or "a replica had died"
        self._say(f"{told}. Replaced in {duration(time.perf_counter() - began)}; {where}")
        self._told.clear()

    def _check(self, deaths: Counter[int]) -> None:
        for replica_id, times in deaths.items():
            if times >= STRIKES:
                self.give_up(
                    f"Replica {replica_id} died {times} times at the same step, and is not started once more. If the "
                    "system ran out of memory (`dmesg` tells), take fewer replicas or a smaller batch size; if native "
                    "code crashed, its last words are in the error of fit(..., on_failure='raise')"
                )


@final
class Running:
    """One job on all replicas, from its beginning to its end.

    `again` brings replacements there where the others are, and returns where that is; without it the job begins anew.
    """

    def __init__(
        self,
        guard: Guard,
        begin: Callable[..., None],
        model: Model,
        *args: Any,
        again: Callable[[], str] | None = None,
    ) -> None:
        self._guard = guard
        self._strategy = guard.strategy
        self._place = self._strategy._place
        self._model = model
        self._begin, self._args = begin, (model, *args)
        self._rejoin = again
        self.token = ""
        guard.through(self.start, again or (lambda: "it begins again"))

    def start(self) -> None:
        """Begin it on all replicas."""
        self.take_over(self._begin, *self._args)

    def _again(self) -> str:
        if self._rejoin is not None:
            return self._rejoin()
        self.start()
        self._guard.reached(self._begin)
        return "it begins again"

    def take_over(self, begin: Callable[..., None], *args: Any) -> None:
        """Make the job another one that this function begins."""
        token = f"job{next(_tokens)}"
        self._place.command(begin, (self._strategy, token, *args), changes=False)
        self.token = token

    def advance(
        self, epoch: int, until: int | None, *, changes: bool, on_note: Callable[[Note], None]
    ) -> list[Advanced]:
        """Go on to the end of the epoch, or until so many of its steps are done; return where every replica stands."""
        return self._guard.through(lambda: self.catch_up(epoch, until, changes, on_note), self._again)

    def catch_up(
        self, epoch: int, until: int | None, changes: bool = True, on_note: Callable[[Note], None] = lambda note: None
    ) -> list[Advanced]:
        """Do the same without going on when a replica dies."""
        # Lazy layers take shape in an evaluation, too.
        changes = changes or any(isinstance(part, LazyModuleMixin) for part in self._model.modules())
        # Named in each message: callbacks may have given the model layers, and its optimizer parameters.
        trained = (self._model, self._model.optimizer) if changes else (self._model,)
        args = (self._strategy, self.token, epoch, until, *trained)
        return self._place.every(self._place.command(job.advance, args, changes=changes, on_note=on_note))

    def ask(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of job.py for this job; return every replica's result."""
        return self._guard.through(lambda: self.ask_once(function, *args), self._again)

    def ask_once(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Do the same without going on when a replica dies."""
        return self._place.every(self._place.command(function, (self._strategy, self.token, *args), changes=False))

    def every(self, steps: int | None) -> int | None:
        """Return after how many steps to stop for callbacks, which may be others on each replica; None: never."""
        return math.gcd(*(each for each in self._place.every([steps]) if each is not None)) or None

    def end(self) -> dict[str, Any]:
        """Let the replicas forget it; return what replica 0 kept for the next one."""
        kept: dict[str, Any] = self._place.command(job.end, (self._strategy, self.token), changes=False)[0]
        return kept

    def settle(self) -> None:
        """After an error: let the replicas forget it, and stand alike."""
        place, model = self._place, self._model
        if place.seat is not None and place.num_replicas > 1:
            # The others may be elsewhere; the next fit finds out who lags behind.
            place.seat.jobs.pop(self.token, None)
            return
        model._unsettled = True
        with contextlib.suppress(MirrorError):
            args = (self._strategy, self.token, model, model.optimizer, model.scheduler)
            place.command(job.settle, args)
            model._unsettled = False


@final
class Logs:
    """Makes the replicas' totals the numbers that users see."""

    def __init__(self, settings: CompileSettings) -> None:
        plain, weighted = settings.make_metrics()
        self._metrics = [*plain, *weighted]

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
            sums = [t.named[name] for t in totals if name in t.named]
            logs[name] = sum(total for total, _ in sums) / sum(counted for _, counted in sums)
        for number, metric in enumerate(self._metrics):
            states = [t.metrics[number] for t in totals]
            if not any(states):
                # A step of the model's own has no outputs to measure.
                continue
            value = metric.compute(states)
            logs[metric.name] = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        return logs


def _names(dicts: Iterable[Mapping[str, Any]]) -> list[str]:
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
