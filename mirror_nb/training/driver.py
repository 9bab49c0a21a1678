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
import dataclasses
import os
import secrets
import time
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from mirror_nb.errors import JobLost, MirrorError, ReplicaDied, UsageError, users_level
from mirror_nb.tensors import layouts
from mirror_nb.training import job
from mirror_nb.training.array_feed import ArrayFeed
from mirror_nb.training.callbacks import CallbackList
from mirror_nb.training.evaluating import evaluated
from mirror_nb.training.history import History
from mirror_nb.training.learning import Whereabouts
from mirror_nb.training.ledger import Ledger
from mirror_nb.training.loop import Note, Task, Totals
from mirror_nb.training.progress import Progress
from mirror_nb.training.running import Guard, Logs, Running, known_steps, task_of
from mirror_nb.training.shares import Feed
from mirror_nb.transfer.told import settings_of
from mirror_nb.values import PerReplica

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
    recovers: bool
    # Whether it goes on when a replica has died.


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
        self._progress = Progress(plan.verbose, leads=self._leads)
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
        self._guard = Guard(self._strategy, self._progress.say, plan.recovers)
        self._ledger: Ledger | None = None
        self._position: dict[str, Any] | None = None
        # Where the job that runs began; None: at the very beginning.
        self._saved: str | os.PathLike[str] | None = None
        # The latest file with the whole state of this training.
        self._examples_before = 0
        # Of the epoch that runs, before a replica was replaced.
        self._training: Running | None = None
        self._validation: Running | None = None
        self._epoch = plan.initial_epoch
        # Epochs that have ended; the one that runs is of this number.
        self._name = secrets.token_hex(8)
        # No other fit's: the seed is, where torch's generator is seeded before each.
        self._inside = False
        # An epoch has begun and not ended.
        self._step = 0
        # Global batches done of the epoch that runs.
        self._total_steps = 0
        self._before: list[list[Totals]] = []
        # Of the epoch that runs, from before a fit that was resumed.
        self._rates = _rates_of(self._model.optimizer)
        # What the optimizer has of its own, or that was told of.

    def run(self) -> History:
        """Train; return the history. Raises what callbacks and users' functions raise, KeyboardInterrupt too."""
        model, callbacks = self._model, self._callbacks
        self._check_callbacks()
        model._fit, model.stop_training = self, False
        try:
            asked = model._pending
            callbacks.on_train_begin()
            # A callback may have loaded a backup: then it tells where to go on, whatever `initial_epoch` says.
            self._begin(restored=model._pending is not asked)
            logs = self._run_epochs()
            callbacks.on_train_end(logs)
            self._end()
        except BaseException:
            self._settle()
            raise
        finally:
            model._history, model._fit = self.history, None
            self._progress.close()
            self._withdraw()
            callbacks.close()
            # They know this fit, too: its data would stay, with their loader's workers, until Python looks for cycles.
            self._training = self._validation = None
        return self.history

    # ------------------------------------------------------------------ beginning and end

    def _check_callbacks(self) -> None:
        """Raise UsageError where replicas of a cell would change or save the model each in its own way."""
        given = self._place.every([[type(one).__name__ for one in self._callbacks.callbacks if one._together]])
        for replica_id, theirs in enumerate(given):
            if theirs != given[0]:
                raise UsageError(
                    f"replica {replica_id} has the callbacks {theirs}, but replica 0 {given[0]}: give all replicas "
                    "the same; what writes files or shows things does so on replica 0 alone"
                )

    def _begin(self, restored: bool) -> None:
        model, plan = self._model, self._plan
        resume = model._resume_from(plan.initial_epoch, wherever=restored)
        if resume is not None and resume.get("position") is not None:
            self._take_position(resume)
        self._position = None if resume is None else resume.get("position")
        if self._recovers and all(device.startswith("cpu") for device in self._place.devices):
            # A GPU would have to be waited for in every step.
            self._ledger = self._ledger or Ledger(self._place.num_replicas, _buffer_bytes(self._model))
        if self._recovers:
            self._share()
        if plan.validation is not None:
            # What both draw from is one object on the replicas, too, where they arrive in two messages.
            for generator in plan.feed.generators():
                if any(generator is other for other in plan.validation.generators()):
                    self._place.mirror(generator)
        kept = None if resume is None else job.Kept(resume)
        arguments = (model, model.optimizer, model.scheduler, self._task(), kept)
        self._training = Running(self._guard, job.begin_training, *arguments, again=self._rejoin)
        model._pending = None
        if plan.validation is not None:
            task = task_of(model, plan.validation, plan.validation_steps)
            self._validation = Running(self._guard, job.begin_evaluation, model, task, again=self._rejoin)

    def _task(self) -> Task:
        plan = self._plan
        task = task_of(
            self._model,
            plan.feed,
            plan.steps,
            class_weight=plan.class_weight,
            # Replicas that the caller cannot seed; where it is one itself, its random numbers are its own.
            seed=plan.seed if self._place.seat is None else None,
            watched=plan.verbose in (1, "auto") and self._leads,
            epochs=plan.epochs,
        )
        ledger = None if self._ledger is None else self._ledger.address
        return dataclasses.replace(task, recovers=self._recovers, ledger=ledger)

    @property
    def _recovers(self) -> bool:
        return self._guard.active and self._place.num_replicas > 1

    def _share(self) -> None:
        """Keep what replicas look for in this process where they find it, also one that takes a dead one's place.

        To copy the arrays to that one would take longer than all the rest.
        """
        paths = [] if self._ledger is None or self._ledger.address is None else [self._ledger.address.path]
        paths += [path for path in (feed.offer() for feed in self._arrays) if path is not None]
        if paths and not all(self._guard.through(lambda: self._reach(paths), lambda: "fit begins again")):
            self._withdraw()

    def _reach(self, paths: list[str]) -> list[bool]:
        return self._place.every(self._place.command(job.reaches, (self._strategy, paths), changes=False))

    def _withdraw(self) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()
        for feed in self._arrays:
            feed.withdraw()

    @property
    def _arrays(self) -> list[ArrayFeed]:
        return [feed for feed in (self._plan.feed, self._plan.validation) if isinstance(feed, ArrayFeed)]

    def _take_position(self, resume: dict[str, Any]) -> None:
        position = resume["position"]
        self._epoch, self._step = position["epoch"], position["step"]
        self._total_steps = position["total_steps"]
        self._before = [[Totals(**plain) for plain in group] for group in position["accumulators"]]
        self.history.load_state_dict(position["history"])
        self._callbacks.load_state_dict(position["callbacks"])

    def _end(self) -> None:
        assert self._training is not None
        kept = self._training.ask(job.export, False)
        self._model._last = {**_position(kept), "epoch": self._epoch, "step": 0, "total_steps": self._total_steps}
        feed = kept[0]["feed"]
        try:
            feed = self._training.end()["feed"]
            if self._validation is not None and self._plan.validation is not None:
                self._plan.validation.load_state(self._validation.end()["feed"])
        except (ReplicaDied, JobLost):
            # All is done: who died is replaced by the next call.
            if not self._guard.active:
                raise
        self._plan.feed.load_state(feed)

    def _settle(self) -> None:
        self._model._last = {"epoch": self._epoch, "step": 0, "total_steps": self._total_steps}
        if self._training is not None:
            self._training.settle()
        if self._validation is not None:
            with contextlib.suppress(MirrorError):
                self._validation.end()

    # ------------------------------------------------------------------ after a replica's death

    def _run_epochs(self) -> dict[str, Any]:
        logs: dict[str, Any] = {}
        while self._epoch < self._plan.epochs and not self._is_to_stop():
            try:
                logs = self._run_epoch()
            except ReplicaDied as died:
                if died.survived or not self._guard.active:
                    raise
                self._go_back(died)
        return logs

    def _rejoin(self) -> str:
        """Bring all replicas to where the furthest survivor stands; return where that is.

        Each survivor has done its part of the step that the furthest has ended, and may have begun another, which is
        undone. What the dead had added up is in the ledger.
        """
        if self._training is None:
            return "fit begins again"
        there: list[Whereabouts | None] = self._training.ask_once(job.whereabouts)
        survivors = {r: found for r, found in enumerate(there) if found is not None}
        source = self._furthest(survivors)
        found = survivors[source]
        position, group = self._position, None
        known: list[tuple[Totals, dict[int, Tensor]] | None] = [None] * len(there)
        if found.landmark is not None:
            position = self._resumption(found)
            if self._ledger is not None:
                known = [self._ledger.read(r, found.landmark) for r in range(len(there))]
            if found.landmark.epoch == self._epoch and self._inside:
                # Of one that left nothing, what the source had: without the batches that are done again.
                group = [
                    (known[r] or (r not in survivors and known[source]) or (survivors.get(r, found).totals,))[0]
                    for r in range(len(there))
                ]
                # Of an epoch that has just begun there is nothing.
                group = group if group[0].examples else None
        kept = None if position is None else job.Kept({"scaler": found.scaler, "position": position})
        model = self._model
        buffers = PerReplica([{} if each is None else each[1] for each in known])
        arguments = (model, model.optimizer, model.scheduler, self._tasks(survivors), kept)
        where = (source, found.updates, found.scheduled, buffers)
        self._training.take_over(job.rejoin, self._training.token, *arguments, *where)
        self._position = position
        if group is not None:
            self._before.append(group)
            self._examples_before += group[0].examples
        step = 0 if position is None else position["step"]
        self._guard.reached((found.updates, self._epoch))
        if self._inside and step < self._step:
            # Batches whose gradients wait for the optimizer: callbacks have heard of them.
            self._training.catch_up(self._epoch, self._step)
        if self._validation is not None:
            self._validation.start()
        return f"fit goes on after step {step} of epoch {self._epoch + 1}"

    def _furthest(self, survivors: dict[int, Whereabouts]) -> int:
        """Return which survivor has done the most. Raises ReplicaDied where none is left, or it cannot go on."""
        if not survivors:
            self._guard.give_up("All replicas were started anew, one after the other", survived=False)
        updates = max(found.updates for found in survivors.values())
        furthest = [r for r, found in survivors.items() if found.updates == updates]
        if any(survivors[r].broken for r in furthest):
            self._guard.give_up("The step that it died in had changed the weights already", survived=False)
        # One of them may have begun the next epoch.
        return max(furthest, key=lambda r: _where(survivors[r]))

    def _resumption(self, found: Whereabouts) -> dict[str, Any]:
        landmark = found.landmark
        assert landmark is not None
        return {
            "epoch": self._epoch,
            "feed": found.feed,
            "feed_is_behind": found.feed_is_behind,
            "stream": found.stream,
            # Of an epoch that has not begun nothing is done.
            "step": landmark.step if landmark.epoch == self._epoch else 0,
            "noise": None if self._position is None else self._position.get("noise"),
            "random": {"shared": found.shared},
            "grouped": 0,
            "gradients": [],
        }

    def _tasks(self, survivors: Collection[int]) -> Task | PerReplica:
        task = self._task()
        if not isinstance(task.feed, ArrayFeed):
            return task
        # Arrays stay where they are; a loader's workers may have been struck too.
        there = dataclasses.replace(task, feed=None)
        return PerReplica([there if r in survivors else task for r in range(self._place.num_replicas)])

    def _go_back(self, died: ReplicaDied) -> None:
        """Begin again from the latest file of this training. Raises ReplicaDied where there is none."""
        if self._saved is None or not os.path.isfile(self._saved):
            lost = ReplicaDied(
                f"{died}. The training cannot go on by itself: give fit callbacks=[BackupAndRestore(folder)], and it "
                "goes on from the latest backup"
            )
            lost.replica_ids, lost.survived = died.replica_ids, False
            raise lost from died
        self._progress.say(f"{died}. fit goes on from {os.fspath(self._saved)!r}")
        self._model.load_training(self._saved)
        self._training = self._validation = None
        self._step, self._inside, self._before, self._examples_before = 0, False, [], 0
        self._begin(restored=True)

    def saved(self, path: str | os.PathLike[str]) -> None:
        """A file holds the whole state of this training."""
        self._saved = path

    # ------------------------------------------------------------------ one epoch

    def _run_epoch(self) -> dict[str, Any]:
        epoch, plan, callbacks = self._epoch, self._plan, self._callbacks
        self._inside = True
        callbacks.on_epoch_begin(epoch)
        self._progress.begin_epoch(epoch, plan.epochs, known_steps(plan.feed, plan.steps))
        began = time.monotonic()
        logs = dict(self._train(epoch))
        # Of its own: a callback may have kept the last batch's, which have nothing of the validation.
        if not self._step and self._leads and not self._model.stop_training:
            warnings.warn(
                f"epoch {epoch + 1} had no batches, so nothing was learned in it: the data gave none; what can be "
                "gone through only once is used up after the first epoch",
                stacklevel=users_level(),
            )
        self._advise(time.monotonic() - began)
        if self._validation is not None and self._is_due(epoch):
            validated = evaluated(self._validation, epoch, callbacks, self._logs)
            logs |= {f"val_{name}": value for name, value in validated.items()}
        if self._model.scheduler is not None and self._settings.scheduler_interval == "epoch":
            logs["learning_rate"] = self._model.learning_rate
            assert self._training is not None
            monitored = logs.get("loss" if self._validation is None else "val_loss")
            # A name of this epoch's end and no other's, in this fit and all others of the model.
            self._training.ask(job.end_epoch, f"{self._name} {epoch}", monitored)
        self._epoch, self._step, self._inside, self._before, self._examples_before = epoch + 1, 0, False, [], 0
        with self._progress.held():
            # They may add to the logs, and speak of an epoch whose line comes first.
            callbacks.on_epoch_end(epoch, logs)
            self._warn_of_lost_rates()
            self._progress.end(logs)
        return logs

    def _warn_of_lost_rates(self) -> None:
        """Warn of a learning rate that a callback has set as one of Keras would, which PyTorch's optimizers ignore."""
        lost = _rates_of(self._model.optimizer) - self._rates
        if lost and self._leads:
            self._rates |= lost
            name = min(lost)
            warnings.warn(
                f"setting `optimizer.{name}` has changed nothing: PyTorch's optimizers have no such attribute. Set "
                "`model.learning_rate` (in a callback `self.model.learning_rate`)",
                stacklevel=users_level(),
            )

    def _train(self, epoch: int) -> dict[str, Any]:
        assert self._training is not None
        every = self._training.every(self._callbacks._every)
        logs: dict[str, Any] = {}
        while True:
            begun = self._step
            if every is not None:
                self._callbacks.on_train_batch_begin(begun)
            until = None if every is None else begun + every - begun % every
            advanced = self._training.advance(epoch, until, changes=True, on_note=self._show)
            self._step = advanced[0].step
            self._total_steps += self._step - begun
            ended = advanced[0].ended or advanced[0].stopped
            if advanced[0].stopped:
                self._model.stop_training = True
            if ended or every is not None:
                logs = self._logs.of(*self._before, [each.totals for each in advanced])
            if every is not None and self._step > begun:
                self._callbacks.on_train_batch_end(self._step - 1, logs)
            self._progress.update(self._step, logs, self._examples_before + advanced[0].examples)
            stops = every is not None and self._is_to_stop()
            if ended or stops:
                return logs

    def _is_to_stop(self) -> bool:
        """Whether a callback has stopped the training: on one replica for all, since it may go by a clock."""
        self._model.stop_training = any(self._place.every([bool(self._model.stop_training)]))
        return self._model.stop_training

    def _advise(self, seconds: float) -> None:
        """After the first epoch of a long training, once for a model: say what would make it faster, as measured."""
        plan, model = self._plan, self._model
        if self._epoch != plan.initial_epoch or model._advised:
            return
        left = (plan.epochs - self._epoch - 1) * self._step
        heard = plan.verbose != 0 and not model.stop_training
        worth = heard and left >= ADVISE_STEPS and left * seconds / self._step >= ADVISE_SECONDS
        # What replica 0 found holds for all, which may be told to say less: they try it together or not at all.
        if not self._place.every([worth])[0]:
            return
        model._advised = True
        assert self._training is not None
        for sentence in self._training.ask(job.advise)[0]:
            if self._leads:
                self._progress.say(sentence)

    def _show(self, note: Note) -> None:
        loss = {} if note.loss is None else {"loss": note.loss}
        self._progress.update(note.step, loss, self._examples_before + note.examples)

    def _is_due(self, epoch: int) -> bool:
        freq = self._plan.validation_freq
        return (epoch + 1) % freq == 0 if isinstance(freq, int) else epoch + 1 in freq

    # ------------------------------------------------------------------ for callbacks that save

    def state(self) -> dict[str, Any]:
        """Return all that another fit needs to go on from here: tensors and plain values."""
        if self._training is None:
            return self._model._state_outside_fit()
        kept = self._training.ask(job.export, True)
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
        "stream": first["stream"],
        "noise": first["noise"],
        "grouped": first["grouped"],
        "gradients": first["gradients"],
        "random": {"shared": first["shared"], **{number: each["random"] for number, each in enumerate(kept)}},
    }


def _where(found: Whereabouts) -> tuple[int, int]:
    return (-1, 0) if found.landmark is None else (found.landmark.epoch, found.landmark.step)


def _buffer_bytes(model: Model) -> int:
    # Not by buffers(): that would bring the replicas' values here first.
    parts = [part._buffers.values() for part in model.modules()]
    return sum(layouts.nbytes(buffer) for buffers in parts for buffer in buffers if buffer is not None)


def with_current_settings(state: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the state of an optimizer with the settings (learning rate and the like) that it has here now."""
    if optimizer is None or state.get("optimizer") is None:
        return state
    saved = state["optimizer"]
    groups = [{**group, **now} for group, now in zip(saved["param_groups"], settings_of(optimizer), strict=True)]
    return {**state, "optimizer": {**saved, "param_groups": groups}}


def _rates_of(optimizer: object) -> set[str]:
    """Return under which of Keras's names an optimizer has a learning rate."""
    return {"learning_rate", "lr"} & getattr(optimizer, "__dict__", {}).keys()
