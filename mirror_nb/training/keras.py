"""Keras 3 models on the torch backend: unchanged `fit`, `evaluate` and `predict` on all replicas of a strategy.

A model belongs to the strategy in whose scope it was made. Its methods then do what Keras's do, but for who computes:

    in the controller           the model travels to the replicas, an epoch is one message, its values come back
    in a cell, under torchrun   every replica works on its own copy, in step with the others

    fit ─▶ Team (of the controller, or of one replica) ─▶ keras_job.Trainee ─▶ Keras's own train_step, on a share

Callbacks run in the controller; on replicas those that write files or show things run on the first alone. One that
hears of single batches costs a message a step, and one that may read the model brings its values each time. A model
of one replica, or of none, is left to Keras. `install` is called when Keras's trainer was imported, never imports it.

Each replica draws the global batches by itself and keeps its share: a PyDataset or a DataLoader is loaded whole on all
of them. Generators, which cannot travel, run in the controller.

Single-device equality: global batches are Keras's own, cut by the strategy's rule, and shares weigh in by their
examples; BatchNormalization's statistics are averaged at the end of an epoch; dropout differs by replica.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import torch
from torch.utils import _pytree as pytree

from mirror_nb.data.sampling import held_streams, process_states, process_streams
from mirror_nb.errors import UsageError, users_level
from mirror_nb.strategies.base import Strategy
from mirror_nb.strategies.context import get_strategy, has_strategy, require_cross_replica
from mirror_nb.training import keras_job
from mirror_nb.training.keras_job import Chunk, Progress, Source, Trainee, Work, of_keras, variables_of
from mirror_nb.training.keras_travel import Copies

CHUNK = 16
# Global batches in one message, where what gives them cannot travel.


def install() -> None:
    """Let the trainer of Keras's torch backend ask whether a model belongs to a strategy."""
    trainer = of_keras("backend.torch.trainer").TorchTrainer
    made = trainer.__init__

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        made(self, *args, **kwargs)
        _note(self)

    trainer.__init__ = __init__
    for name, work in _WORKS.items():
        setattr(trainer, name, _mirrored(getattr(trainer, name), work))
    keras_job.weigh_losses()
    keras_job.hold_interrupts_back()


_strategies: weakref.WeakKeyDictionary[Any, Strategy] = weakref.WeakKeyDictionary()
# In whose scope each model was made.


def _note(model: Any) -> None:
    strategy = get_strategy() if has_strategy() else None
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        _strategies[model] = strategy


def _mirrored(original: Callable[..., Any], work: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that leaves its work to the replicas, where the model has some."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = _strategy_of(self)
        if strategy is None:
            return original(self, *args, **kwargs)
        require_cross_replica(f"Model.{original.__name__}", "call it outside the function given to strategy.run")
        if not strategy._place.takes_part:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        asked = dict(bound.arguments)
        asked.pop("self", None)
        unknown = asked.pop("kwargs", {})
        if unknown:
            raise UsageError(f"{original.__name__} has no arguments {sorted(unknown)}")
        return work(_team(strategy, self), self, **asked)

    return method


def _strategy_of(model: Any) -> Strategy | None:
    """Return the strategy whose replicas work for a model; None: there are none, and Keras does it."""
    strategy = _strategies.get(model)
    current = get_strategy() if has_strategy() else None
    if strategy is not None or current is None or current.num_replicas_in_sync == 1:
        return strategy
    if current._place.seat is None:
        raise UsageError(
            f"the Keras model {model.name!r} was made outside the scope that it is used in, so the replicas would not "
            "take part; make or load it inside `with strategy.scope():`"
        )
    # It came to this replica from the notebook.
    return current


def _team(strategy: Strategy, model: Any) -> Team:
    return _Commanded(strategy, model) if strategy._place.seat is None else _Peers(strategy, model)


# ---------------------------------------------------------------------- who works


class Team(ABC):
    """The replicas, for one fit, evaluate or predict of one model."""

    first: bool
    # Whether callbacks that write or show run here.

    @abstractmethod
    def start(self, work: Work) -> None:
        """Begin; the model is built."""

    @abstractmethod
    def go(
        self, what: str, steps: int | None, tell: Callable[[Progress], None] | None, feeder: Feeder | None
    ) -> Progress:
        """Train, evaluate or predict for so many steps, None: to the end of the epoch."""

    @abstractmethod
    def outputs(self, progress: Progress) -> list[list[Any]]:
        """Return what each replica predicted in the latest `go`."""

    @abstractmethod
    def every(self, value: Any) -> list[Any]:
        """Return the value here, or on a replica that of each."""

    @abstractmethod
    def pull(self) -> None:
        """Bring the values of the one logical model into the model here."""

    @abstractmethod
    def push(self) -> None:
        """Give all replicas the values that callbacks wrote here."""

    @abstractmethod
    def restored(self) -> None:
        """Callbacks of the first replica may have loaded a backup: let all go on from there."""

    @abstractmethod
    def stop(self, what: str) -> None:
        """A callback has ended the epoch before its last batch."""

    @abstractmethod
    def finish(self) -> None:
        """The last epoch of a fit is over."""

    @abstractmethod
    def end(self, failed: bool) -> None:
        """Give back what was taken; after a failure the model keeps what was learned, as far as can be."""

    @abstractmethod
    def shared(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which random numbers are alike wherever this is asked."""


@final
class _Known:
    """What is known of a model in the controller."""

    def __init__(self) -> None:
        self.token = f"keras {next(_tokens)}"
        # The name that it goes by on the replicas.
        self.copies = Copies()
        # What these have of it.
        self.under_way = 0
        # A fit, and what its callbacks have called: an evaluate, say.


_tokens = itertools.count()
_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
# Of models in the controller.
_released: weakref.WeakKeyDictionary[Strategy, list[str]] = weakref.WeakKeyDictionary()


@final
class _Commanded(Team):
    """The replicas of a controller."""

    first = True

    def __init__(self, strategy: Strategy, model: Any) -> None:
        self._strategy = strategy
        self._place = strategy._place
        self._model = model
        if model not in _known:
            _known[model] = _Known()
            weakref.finalize(model, _released.setdefault(strategy, []).append, _known[model].token)
        self._about = _known[model]
        self._copies = self._about.copies
        self._which = self._about.token, self._about.under_way
        # Of the model, and of what is under way with it.
        self._versions: dict[int, int] = {}
        self._outputs: list[list[Any]] = []
        self._data: list[Any] = []
        # What it trains on, and what it evaluates.
        self._plain: keras_job.Attributes = {}
        # The model's plain attributes, as the replicas have them.

    def start(self, work: Work) -> None:
        gone = _released.get(self._strategy, [])
        told = tuple(gone)
        has = self._place.command(keras_job.has, (self._strategy, self._about.token, told), changes=False)
        # Not all: meanwhile others may have gone.
        del gone[: len(told)]
        if not all(has):
            self._copies.forget()
        # Of a model that strategy.run has used the replicas have newer values: reading it brings them.
        next(self._model.parameters(), None)
        parcel = self._copies.pack(self._model)
        try:
            self._place.command(keras_job.start, (self._strategy, self._which, parcel, work), changes=False)
        except BaseException:
            self._copies.forget()
            raise
        self._plain = keras_job.plain_of(self._model)
        self._about.under_way += 1
        self._data = [source and source.arguments.get("x") for source in (work.source, work.validation)]

    def go(
        self, what: str, steps: int | None, tell: Callable[[Progress], None] | None, feeder: Feeder | None
    ) -> Progress:
        self._outputs = [[] for _ in range(self._place.num_replicas)]
        progress = self._command(what, steps, tell, None if feeder is None else feeder.chunk(steps))
        while feeder is not None and steps is None and not progress.over:
            progress = self._command(what, None, tell, feeder.chunk(None))
        return progress

    def _command(
        self, what: str, steps: int | None, tell: Callable[[Progress], None] | None, chunk: Chunk | None
    ) -> Progress:
        # As bytes: a tensor would go to the replica's device.
        order, *others = process_states()
        states = (order.numpy().tobytes(), *others)
        arguments = (self._strategy, self._which, what, steps, tell is not None, chunk, states)
        results = self._place.command(keras_job.go, arguments, changes=False, on_note=tell or (lambda progress: None))
        for outputs, (progress, _) in zip(self._outputs, results, strict=True):
            outputs += progress.outputs
        for stream, state in zip(process_streams().values(), results[0][1], strict=True):
            stream.set(state)
        first: Progress = results[0][0]
        return first

    def outputs(self, progress: Progress) -> list[list[Any]]:
        return self._outputs

    def every(self, value: Any) -> list[Any]:
        return [value]

    def pull(self) -> None:
        pulled = self._place.command(keras_job.pull, (self._strategy, self._which, self._versions), changes=False)
        values, attributes = pulled[0]
        keras_job.take(self._model, attributes)
        self._plain = keras_job.plain_of(self._model)
        variables = variables_of(self._model)
        with torch.no_grad():
            for i, (version, value) in values.items():
                variables[i].value.copy_(value)
                self._versions[i] = version
                self._copies.same(variables[i].value)

    def push(self) -> None:
        variables = variables_of(self._model)
        written = {i: v.value.detach() for i, v in enumerate(variables) if self._copies.changed(v.value)}
        before, self._plain = self._plain, keras_job.plain_of(self._model)
        attributes = keras_job.changes(before, self._plain)
        if written or attributes:
            arguments = (self._strategy, self._which, written, attributes)
            self._place.command(keras_job.push, arguments, changes=False)
            for i in written:
                self._copies.same(variables[i].value)

    def restored(self) -> None:
        self.push()

    def stop(self, what: str) -> None:
        self._place.command(keras_job.stop, (self._strategy, self._which, what), changes=False)

    def finish(self) -> None:
        self._place.command(keras_job.finish, (self._strategy, self._which), changes=False)

    def end(self, failed: bool) -> None:
        self._about.under_way -= 1
        if not failed:
            found = self._place.command(keras_job.end, (self._strategy, self._which), changes=False)[0]
            for x, states in zip(self._data, found, strict=False):
                for name, state in states.items():
                    held_streams(x)[name].set(state)
            return
        # After an interrupt the replicas may differ by a step: the first one's are the values, here and from now on.
        try:
            self.pull()
            self._place.command(keras_job.end, (self._strategy, self._which), changes=False)
        except Exception as reason:
            warnings.warn(
                f"the Keras model keeps the values that were last read here: {reason}", stacklevel=users_level()
            )
        finally:
            self._copies.forget()

    def shared(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@final
class _Peers(Team):
    """This replica, in step with the others, which make the same calls."""

    def __init__(self, strategy: Strategy, model: Any) -> None:
        self._place = strategy._place
        seat = self._place.seat
        assert seat is not None
        self._seat = seat
        self._model = model
        self.first = seat.replica_id == 0

    def start(self, work: Work) -> None:
        with keras_job.on_device(self._seat.device):
            self._place.mirror(self._model)
            self._trainee = Trainee(self._seat, self._model, work, self._seat.shared_randomness)
            self._trainee.prepare()

    def go(
        self, what: str, steps: int | None, tell: Callable[[Progress], None] | None, feeder: Feeder | None
    ) -> Progress:
        with keras_job.on_device(self._seat.device):
            progress: Progress = getattr(self._trainee, what)(steps, tell if self.first else None, None)
            return progress

    def outputs(self, progress: Progress) -> list[list[Any]]:
        return self._seat.collect(progress.outputs)

    def every(self, value: Any) -> list[Any]:
        return self._seat.collect(value)

    def pull(self) -> None:
        # The values are here, each replica's own statistics too.
        self._trainee.settle()

    def push(self) -> None:
        """Callbacks did the same on every replica."""

    def restored(self) -> None:
        epoch = self._seat.collect(getattr(self._model, "_initial_epoch", None))[0]
        self._model._initial_epoch = epoch
        with torch.no_grad():
            self._seat.hand_out([variable.value.detach() for variable in variables_of(self._model)], 0)

    def stop(self, what: str) -> None:
        with keras_job.on_device(self._seat.device):
            self._trainee.stop(what)

    def finish(self) -> None:
        with keras_job.on_device(self._seat.device):
            self._trainee.finish()

    def end(self, failed: bool) -> None:
        self._trainee.leave()

    def shared(self) -> contextlib.AbstractContextManager[None]:
        return self._seat.shared_randomness()


@contextlib.contextmanager
def _at_work(team: Team, work: Work) -> Iterator[None]:
    began = False
    try:
        team.start(work)
        began = True
        yield
    except BaseException:
        if began:
            team.end(failed=True)
        raise
    team.end(failed=False)


# ---------------------------------------------------------------------- what they work on


@final
class Feeder:
    """Draws global batches in the controller, from what cannot travel: generators, tf.data, grain."""

    def __init__(self, iterator: Any, anew: bool = False) -> None:
        """`anew`: each epoch begins with the first batches that there are, as Keras evaluates."""
        self._iterator = iterator
        self._anew = anew
        self._steps: Iterator[Any] | None = None
        self._next: Any = None

    def chunk(self, steps: int | None) -> Chunk:
        """Return the next batches of the epoch, at most so many; a new epoch begins after the last."""
        if self._steps is None:
            if self._anew:
                self._iterator.reset()
            self._steps = iter(self._iterator.enumerate_epoch())
            self._next = next(self._steps, None)
        items: list[Any] = []
        while self._next is not None and len(items) < (steps or CHUNK):
            items.append(self._next)
            self._next = next(self._steps, None)
        if self._next is None:
            self._steps = None
        return Chunk(items, self._next is None)

    def stop(self) -> None:
        """The epoch was left: the next batches are a new one's."""
        self._steps = None


def _source(team: Team, model: Any, *, anew: bool = False, **arguments: Any) -> tuple[Source, Feeder | None, Any]:
    """Return what the replicas make their batches from, or what feeds them, and Keras's iterator over it."""
    kind = keras_job.epoch_iterator_class()
    accepted = inspect.signature(kind).parameters
    arguments = {name: value for name, value in arguments.items() if name in accepted}
    arguments["steps_per_execution"] = getattr(model, "steps_per_execution", 1)
    iterator = kind(**arguments)
    if isinstance(team, _Commanded) and not _travels(arguments["x"]):
        return Source({}, pushed=True), Feeder(iterator, anew), iterator
    # Keras may have a limit of its own, which is set in this process alone.
    arguments["steps_per_epoch"] = iterator.steps_per_epoch
    return Source(arguments), None, iterator


def _travels(x: Any) -> bool:
    return not isinstance(x, types.GeneratorType) and not type(x).__module__.startswith(("tensorflow", "grain"))


# ---------------------------------------------------------------------- fit, evaluate, predict


def _fit(
    team: Team,
    model: Any,
    *,
    x: Any,
    y: Any,
    batch_size: Any,
    epochs: int,
    verbose: Any,
    callbacks: Any,
    validation_split: float,
    validation_data: Any,
    shuffle: Any,
    class_weight: Any,
    sample_weight: Any,
    initial_epoch: int,
    steps_per_epoch: Any,
    validation_steps: Any,
    validation_batch_size: Any,
    validation_freq: Any,
) -> Any:
    model._assert_compile_called("fit")
    most = getattr(of_keras("backend.config"), "max_epochs", lambda: None)()
    if most and most < epochs:
        warnings.warn(f"Limiting epochs to {most}", stacklevel=users_level())
        epochs = most
    unpack = of_keras("trainers.data_adapters.data_adapter_utils").unpack_x_y_sample_weight
    if validation_split and validation_data is None:
        split = of_keras("trainers.data_adapters.array_slicing").train_validation_split
        (x, y, sample_weight), validation_data = split((x, y, sample_weight), validation_split=validation_split)
    source, feeder, iterator = _source(
        team,
        model,
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        shuffle=shuffle,
        class_weight=class_weight,
    )
    validation, validation_feeder = None, None
    if validation_data is not None:
        data = dict(zip(("x", "y", "sample_weight"), unpack(validation_data), strict=True))
        data |= {"batch_size": validation_batch_size or batch_size, "steps_per_epoch": validation_steps}
        validation, validation_feeder, _ = _source(team, model, anew=True, **data)
    with team.shared():
        model._symbolic_build(iterator=iterator)
        iterator.reset()
    hooks = _Hooks(team, model, callbacks, verbose, epochs, iterator.num_batches)
    model.stop_training = False
    logs: dict[str, Any] = {}
    with _at_work(team, Work("fit", source, validation)):
        hooks.call("on_train_begin")
        if hooks.restores:
            team.restored()
        for epoch in range(getattr(model, "_initial_epoch", None) or initial_epoch, epochs):
            hooks.call("on_epoch_begin", epoch)
            logs = hooks.steps("train", feeder)
            if validation is not None and model._should_eval(epoch, validation_freq):
                hooks.read()
                model.stop_evaluating = False
                hooks.call("on_test_begin")
                found = hooks.steps("evaluate", validation_feeder, silent=True)
                hooks.call("on_test_end", found)
                logs = {**logs, **{f"val_{name}": value for name, value in found.items()}}
            hooks.read()
            hooks.call("on_epoch_end", epoch, logs)
            if hooks.stopped("train"):
                break
        if epochs > 0:
            team.finish()
        team.pull()
        hooks.call("on_train_end", logs)
    return model.history


def _evaluate(
    team: Team,
    model: Any,
    *,
    x: Any,
    y: Any,
    batch_size: Any,
    verbose: Any,
    sample_weight: Any,
    steps: Any,
    callbacks: Any,
    return_dict: bool,
) -> Any:
    model._assert_compile_called("evaluate")
    source, feeder, iterator = _source(
        team, model, x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, steps_per_epoch=steps
    )
    with team.shared():
        model._symbolic_build(iterator=iterator)
        iterator.reset()
    hooks = _Hooks(team, model, callbacks, verbose, 1, iterator.num_batches, history=False)
    model.stop_evaluating = False
    with _at_work(team, Work("evaluate", source)):
        hooks.call("on_test_begin")
        # By name, as Keras hands them on.
        logs = dict(sorted(hooks.steps("evaluate", feeder).items()))
        team.pull()
        hooks.call("on_test_end", logs)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _predict(team: Team, model: Any, *, x: Any, batch_size: Any, verbose: Any, steps: Any, callbacks: Any) -> Any:
    source, feeder, iterator = _source(team, model, x=x, batch_size=batch_size, steps_per_epoch=steps)
    with team.shared():
        _build(model, iterator)
        iterator.reset()
    hooks = _Hooks(team, model, callbacks, verbose, 1, iterator.num_batches, history=False)
    model.stop_predicting = False
    with _at_work(team, Work("predict", source)):
        hooks.call("on_predict_begin")
        hooks.steps("predict", feeder)
        hooks.call("on_predict_end")
    return _joined(hooks.outputs)


def _build(model: Any, iterator: Any) -> None:
    """Make the variables of a model that has seen no data: they have to be the same on all replicas."""
    if all(layer.built for layer in model._flatten_layers()):
        return
    for item in iterator.enumerate_epoch():
        _, batch = keras_job.numbered(item)
        with torch.no_grad():
            model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        break


def _joined(batches: list[list[Any]]) -> Any:
    """Join the replicas' outputs, batch by batch, in the order of the examples."""
    parts = [part for batch in batches for part in batch if part is not None]
    if not parts:
        raise UsageError("predict was given no batches; look at `x` and `steps`")
    leaves = [pytree.tree_leaves(part) for part in parts]
    whole = [np.concatenate(pieces) for pieces in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(whole, pytree.tree_structure(parts[0]))


_WORKS: dict[str, Callable[..., Any]] = {"fit": _fit, "evaluate": _evaluate, "predict": _predict}


# ---------------------------------------------------------------------- callbacks

_ALONE = ("ModelCheckpoint", "BackupAndRestore", "CSVLogger", "TensorBoard", "ProgbarLogger", "RemoteMonitor")
_HARMLESS = ("History", "ProgbarLogger", "LearningRateScheduler", "ReduceLROnPlateau", "CSVLogger", "TerminateOnNaN")
_BATCH_HOOKS = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "evaluate": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


@final
class _Hooks:
    """The callbacks of one fit, evaluate or predict, and the steps between them."""

    def __init__(
        self, team: Team, model: Any, callbacks: Any, verbose: Any, epochs: int, steps: Any, history: bool = True
    ) -> None:
        self._team = team
        self._model = model
        library = of_keras("callbacks")
        listed = isinstance(callbacks, library.CallbackList)
        # Nothing is added to a list that somebody has made by himself.
        asked = list(callbacks.callbacks) if listed else _flat(callbacks)
        # Told apart before some are left out, so that all replicas take the same steps.
        self._stepwise = {what: any(_hears(c, names) for c in asked) for what, names in _BATCH_HOOKS.items()}
        self._reads = any(_reads(callback) for callback in asked)
        self.restores = any(_is(callback, ("BackupAndRestore",)) for callback in asked)
        here = [callback for callback in asked if team.first or not _is(callback, _ALONE)]
        self._list = library.CallbackList(
            here,
            add_history=history and not listed,
            add_progbar=verbose != 0 and team.first and not listed,
            verbose=verbose,
            epochs=epochs,
            steps=steps,
            model=model,
        )
        self._bar = next((c for c in self._list.callbacks if _is(c, ("ProgbarLogger",))), None)
        self.outputs: list[list[Any]] = []

    def call(self, name: str, *args: Any) -> None:
        """Call a hook of all callbacks, and let the replicas have what it wrote."""
        getattr(self._list, name)(*args)
        self._team.push()

    def stopped(self, what: str) -> bool:
        """Whether a callback has ended this: on one replica for all, since it may go by a clock."""
        asked = bool(getattr(self._model, _STOPS[what], False))
        stopped = any(self._team.every(asked))
        setattr(self._model, _STOPS[what], stopped)
        return stopped

    def read(self) -> None:
        """Bring the values here, if a callback may look at them."""
        if self._reads:
            self._team.pull()

    def steps(self, what: str, feeder: Feeder | None, silent: bool = False) -> dict[str, Any]:
        """Go through one epoch; return its logs."""
        # One that has been ended before its first step does that one, as in Keras.
        if self._stepwise[what] or self.stopped(what):
            return self._step_by_step(what, feeder)
        bar = None if silent or self._bar is None else getattr(self._bar, _BATCH_HOOKS[what][-1])
        tell = None if bar is None else lambda progress: bar(progress.step, progress.logs)
        progress = self._team.go(what, None, tell, feeder)
        if bar is not None and progress.step >= 0:
            bar(progress.step, progress.logs)
        self._keep(what, progress)
        return progress.logs

    def _step_by_step(self, what: str, feeder: Feeder | None) -> dict[str, Any]:
        begin, end = _BATCH_HOOKS[what][-2:]
        step, over = 0, False
        logs: dict[str, Any] = {}
        while not over:
            self.call(begin, step)
            progress = self._team.go(what, 1, None, feeder)
            self._keep(what, progress)
            self.read()
            outputs = {"outputs": _joined(self.outputs[-1:])} if what == "predict" else progress.logs
            self.call(end, progress.step, outputs)
            step, over, logs = progress.step + 1, progress.over, progress.logs
            if self.stopped(what) and not over:
                over = True
                self._team.stop(what)
                if feeder is not None:
                    feeder.stop()
        return logs

    def _keep(self, what: str, progress: Progress) -> None:
        if what == "predict":
            self.outputs += [list(batch) for batch in zip(*self._team.outputs(progress), strict=True)]


_STOPS = {"train": "stop_training", "evaluate": "stop_evaluating", "predict": "stop_predicting"}


def _flat(callbacks: Any) -> list[Any]:
    return of_keras("tree").flatten(callbacks) if callbacks else []


def _is(callback: Any, names: tuple[str, ...]) -> bool:
    library = of_keras("callbacks")
    return isinstance(callback, tuple(getattr(library, name) for name in names if hasattr(library, name)))


def _hears(callback: Any, hooks: tuple[str, ...]) -> bool:
    """Whether a callback has something to do after single batches."""
    if _is(callback, ("ModelCheckpoint", "BackupAndRestore")):
        return getattr(callback, "save_freq", "epoch") != "epoch" and "on_train_batch_end" in hooks
    if _is(callback, ("TensorBoard",)):
        return getattr(callback, "update_freq", "epoch") != "epoch"
    if _is(callback, ("ProgbarLogger", "History")):
        return False
    return any(not getattr(getattr(callback, name), "_is_default", False) for name in hooks)


def _reads(callback: Any) -> bool:
    """Whether a callback may look at the model's values."""
    library = of_keras("callbacks")
    if type(callback) is library.EarlyStopping:
        return bool(callback.restore_best_weights)
    return type(callback) not in tuple(getattr(library, name) for name in _HARMLESS if hasattr(library, name))
