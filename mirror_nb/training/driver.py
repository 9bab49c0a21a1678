"""Fit as whoever calls it sees it: epochs, callbacks, the progress line, the history.

    Fit ──▶ Running ──▶ Place.command ──▶ job.py on every replica
     │ ▲                                       │
     │ └── one message an epoch: logs ◀────────┘   (one every few steps where callbacks want to be called)
     └──▶ callbacks, progress, history

In a `%%mirrored` cell, and under torchrun, every replica runs all this and decides alike, since the logs are those of
all replicas. Knows a model, its strategy's place and what jobs return; knows no gradients and no shares.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from mirror_nb.errors import MirrorError
from mirror_nb.mirrors import settings_of
from mirror_nb.training import job
from mirror_nb.training.callbacks import CallbackList
from mirror_nb.training.evaluating import evaluated
from mirror_nb.training.feeds import Feed
from mirror_nb.training.history import History
from mirror_nb.training.loop import Note, Totals
from mirror_nb.training.progress import Progress
from mirror_nb.training.running import Logs, Running, known_steps, task_of

if TYPE_CHECKING:
    from mirror_nb.training.model import Model


ADVISE_STEPS, ADVISE_SECONDS = 1000, 20.0
# A training that has so much left is worth a trial, which takes 30 steps' time at most.


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """What `fit` was asked for, checked."""

    feed: Feed
    validation: Feed | None
    epochs: int
    # The number of the last one, from 1.
    initial_epoch: int
    # The number of the first one, from 0.
    steps: int | None
    # Global batches of an epoch, where the feed has more or does not know; None: all.
    validation_steps: int | None
    validation_freq: int | Collection[int]
    # After every so many epochs, or after these, from 1.
    seed: int
    # Of the order of examples, and of the replicas' random numbers.
    class_weight: dict[int, float] | None
    verbose: int | str
    callbacks: Any


@final
class Fit:
    """One call of `fit`, while it runs."""

    def __init__(self, model: Model, plan: Plan) -> None:
        self._model = model
        self._plan = plan
        self._strategy = model.strategy
        self._place = self._strategy._place
        self._settings = model.compiled_settings
        self._leads = self._place.replica_id in (None, 0)
        self.history = History(
            {"epochs": plan.epochs, "steps": known_steps(plan.feed, plan.steps), "verbose": plan.verbose}
        )
        self._progress = Progress(plan.verbose if self._leads else 0)
        self._callbacks = CallbackList(
            plan.callbacks,
            model=model,
            params=self.history.params,
            history=self.history,
            leads=self._leads,
            agree=lambda value: self._place.every([value])[0],
            tell=self._progress.say,
        )
        self._logs = Logs(self._settings)
        self._training: Running | None = None
        self._validation: Running | None = None
        self._epoch = plan.initial_epoch
        # Epochs that have ended; the one that runs is of this number.
        self._inside = False
        # An epoch has begun and not ended.
        self._step = 0
        # Global batches done of the epoch that runs.
        self._total_steps = 0
        self._before: list[list[Totals]] = []
        # Of the epoch that runs, from before a fit that was resumed.

    def run(self) -> History:
        """Train; return the history. Raises what callbacks and users' functions raise, KeyboardInterrupt too."""
        model, callbacks = self._model, self._callbacks
        model._begin_fit(self)
        try:
            asked = model._pending
            callbacks.on_train_begin()
            # A callback may have loaded a backup: then it tells where to go on, whatever `initial_epoch` says.
            self._begin(restored=model._pending is not asked)
            logs: dict[str, Any] = {}
            while self._epoch < self._plan.epochs and not model.stop_training:
                logs = self._run_epoch()
            callbacks.on_train_end(logs)
            self._end()
        except BaseException:
            self._settle()
            raise
        finally:
            model._end_fit()
            self._progress.close()
            callbacks.close()
        return self.history

    # ------------------------------------------------------------------ beginning and end

    def _begin(self, restored: bool) -> None:
        model, plan = self._model, self._plan
        resume = model._resume_from(plan.initial_epoch, wherever=restored)
        if resume is not None and resume.get("position") is not None:
            self._take_position(resume)
        # Replicas that the caller cannot seed; where it is one itself, its random numbers are its own.
        seed = plan.seed if self._place.seat is None else None
        task = task_of(
            model,
            plan.feed,
            plan.steps,
            class_weight=plan.class_weight,
            seed=seed,
            watched=self._watched,
            epochs=plan.epochs,
        )
        kept = None if resume is None else job.Kept(resume)
        arguments = (model, model.optimizer, model.scheduler, task, kept)
        self._training = Running(self._strategy, job.begin_training, *arguments)
        model._pending = None
        if plan.validation is not None:
            task = task_of(model, plan.validation, plan.validation_steps)
            self._validation = Running(self._strategy, job.begin_evaluation, model, task)

    @property
    def _watched(self) -> bool:
        return self._plan.verbose in (1, "auto") and self._leads

    def _take_position(self, resume: dict[str, Any]) -> None:
        position = resume["position"]
        self._epoch, self._step = position["epoch"], position["step"]
        self._total_steps = position["total_steps"]
        self._before = [[Totals(**plain) for plain in group] for group in position["accumulators"]]
        self.history.load_state_dict(position["history"])
        self._callbacks.load_state_dict(position["callbacks"])

    def _end(self) -> None:
        assert self._training is not None
        kept = self._training.ask(job.export_position)
        self._model._last = {**_position(kept), "epoch": self._epoch, "step": 0, "total_steps": self._total_steps}
        self._plan.feed.load_state(self._training.end()["feed"])
        if self._validation is not None:
            self._validation.end()

    def _settle(self) -> None:
        self._model._last = {"epoch": self._epoch, "step": 0, "total_steps": self._total_steps}
        if self._training is not None:
            self._training.settle(self._model)
        if self._validation is not None:
            with contextlib.suppress(MirrorError):
                self._validation.end()

    # ------------------------------------------------------------------ one epoch

    def _run_epoch(self) -> dict[str, Any]:
        epoch, plan, callbacks = self._epoch, self._plan, self._callbacks
        self._inside = True
        callbacks.on_epoch_begin(epoch)
        self._progress.begin_epoch(epoch, plan.epochs, known_steps(plan.feed, plan.steps))
        began = time.monotonic()
        logs = self._train(epoch)
        self._advise(time.monotonic() - began)
        if self._validates(epoch):
            validated = self._validate(epoch)
            logs |= {f"val_{name}": value for name, value in validated.items()}
        if self._model.scheduler is not None and self._settings.scheduler_interval == "epoch":
            logs["learning_rate"] = self._model.learning_rate
            assert self._training is not None
            self._training.ask(job.end_epoch, logs.get("val_loss", logs.get("loss")))
        self._epoch, self._step, self._inside, self._before = epoch + 1, 0, False, []
        with self._progress.held():
            # They may add to the logs, and speak of an epoch whose line comes first.
            callbacks.on_epoch_end(epoch, logs)
            self._progress.end_epoch(logs)
        return logs

    def _train(self, epoch: int) -> dict[str, Any]:
        assert self._training is not None
        every = self._callbacks.every
        logs: dict[str, Any] = {}
        while True:
            begun = self._step
            if every is not None:
                self._callbacks.on_train_batch_begin(begun)
            steps = None if every is None else every - begun % every
            advanced = self._training.advance(epoch, steps, changes=True, on_note=self._show)
            self._step = advanced[0].step
            self._total_steps += self._step - begun
            ended = advanced[0].ended or advanced[0].stopped
            if advanced[0].stopped:
                self._model.stop_training = True
            if ended or every is not None:
                logs = self._logs.of(*self._before, [each.totals for each in advanced])
            if every is not None and self._step > begun:
                self._callbacks.on_train_batch_end(self._step - 1, logs)
            self._progress.update(self._step, logs, advanced[0].examples)
            if ended or self._model.stop_training:
                return logs

    def _advise(self, seconds: float) -> None:
        """After the first epoch of a long training, once for a model: say what would make it faster, as measured."""
        plan, model = self._plan, self._model
        if self._epoch != plan.initial_epoch or model._advised or plan.verbose == 0 or model.stop_training:
            return
        left = (plan.epochs - self._epoch - 1) * self._step
        # What replica 0 found holds for all: they try it together or not at all.
        if not self._place.every([left >= ADVISE_STEPS and left * seconds / self._step >= ADVISE_SECONDS])[0]:
            return
        model._advised = True
        assert self._training is not None
        for sentence in self._training.ask(job.advise)[0]:
            if self._leads:
                self._progress.say(sentence)

    def _show(self, note: Note) -> None:
        self._progress.update(note.step, {} if note.loss is None else {"loss": note.loss}, note.examples)

    def _validates(self, epoch: int) -> bool:
        freq = self._plan.validation_freq
        if self._validation is None:
            return False
        return (epoch + 1) % freq == 0 if isinstance(freq, int) else epoch + 1 in freq

    def _validate(self, epoch: int) -> dict[str, Any]:
        assert self._validation is not None
        return evaluated(self._validation, epoch, self._callbacks, self._logs, lambda note: None)

    # ------------------------------------------------------------------ for callbacks that save

    def state(self) -> dict[str, Any]:
        """Return all that another fit needs to go on from here: tensors and plain values."""
        if self._training is None:
            return self._model._state_outside_fit()
        kept = self._training.ask(job.export)
        return {
            **_position(kept),
            **{name: kept[0][name] for name in ("optimizer", "scheduler")},
            "epoch": self._epoch,
            "step": self._step,
            "total_steps": self._total_steps,
            "accumulators": self._accumulators([Totals(**each["totals"]) for each in kept]),
            "history": self.history.state_dict(),
            "callbacks": self._callbacks.state_dict(),
        }

    def _accumulators(self, now: list[Totals]) -> list[Any]:
        if not self._inside:
            return []
        groups = [*self._before, now] if now[0].examples else self._before
        return [[each.plain() for each in group] for group in groups]


def _position(kept: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the replicas, in order, tell of where they stand."""
    first = kept[0]
    return {
        "scaler": first["scaler"],
        "feed": first["feed"],
        "grouped": first["grouped"],
        "gradients": first["gradients"],
        "random": {"shared": first["shared"], **{number: each["random"] for number, each in enumerate(kept)}},
    }


def with_current_settings(state: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the state of an optimizer with the settings (learning rate and the like) that it has here now."""
    if optimizer is None or state.get("optimizer") is None:
        return state
    saved = state["optimizer"]
    groups = [{**group, **now} for group, now in zip(saved["param_groups"], settings_of(optimizer), strict=True)]
    return {**state, "optimizer": {**saved, "param_groups": groups}}
