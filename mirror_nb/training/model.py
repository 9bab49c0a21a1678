"""A network with compile, fit, evaluate, predict and save: the high-level way, with Keras's names.

Checks what callers give and hands over to the driver. Knows a strategy by its scope; knows no replicas.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror_nb.distributed import Distributed
from mirror_nb.errors import MirrorError, UsageError, users_level
from mirror_nb.strategies.base import Strategy
from mirror_nb.strategies.context import get_strategy
from mirror_nb.training import driver, evaluating, files, job
from mirror_nb.training.feeds import feed, split_validation
from mirror_nb.training.history import History
from mirror_nb.training.learning import states_of
from mirror_nb.training.loop import average_statistics
from mirror_nb.training.settings import CompileSettings, make_optimizer
from mirror_nb.training.shares import Feed
from mirror_nb.transfer.told import change_settings

if TYPE_CHECKING:
    from mirror_nb.training.driver import Fit

_OURS: dict[str, Any] = {
    "_strategy": None,
    "_settings": None,
    "_optimizer": None,
    "_scheduler": None,
    "_history": None,
    "_fit": None,
    "_pending": None,
    "_last": None,
    "_compiled": None,
    "_unsettled": False,
    "_advised": False,
    "stop_training": False,
}
# What belongs to who calls fit, and does not travel with the network; with its first values.
_IN_TORCH = {
    "save_weights": "torch.save(model.state_dict(), path)",
    "load_weights": "model.load_training(path), or for a file of torch.save model.load_state_dict(torch.load(path))",
    "get_weights": "model.state_dict()",
    "set_weights": "model.load_state_dict(state_dict)",
    "trainable_variables": "model.parameters()",
    "trainable_weights": "model.parameters()",
    "variables": "model.state_dict()",
    "weights": "model.state_dict()",
    "non_trainable_variables": "model.buffers()",
    "non_trainable_weights": "model.buffers()",
    "layers": "list(model.children())",
    "count_params": "sum(p.numel() for p in model.parameters())",
    "summary": "print(model)",
    "train_on_batch": "model.fit(x, y, batch_size=len(x))",
    "test_on_batch": "model.evaluate(x, y)",
    "predict_on_batch": "model.predict(x)",
}
# Names of keras.Model that mean what a network of torch has under another one.
_STEPS_OF_KERAS = {"train_step": "training_step", "test_step": "validation_step"}
# What users define in keras.Model, and its name here.

_STAYS = "what compile was told goes neither with a copy nor from a %%mirrored cell to an ordinary one or back"


class Model(nn.Module):
    """Trains `network` on the devices of the strategy in whose scope it is made; without one, in this process.

    `Model(network)` has the network's own `state_dict`. Or derive from it, register modules in `__init__` after
    `super().__init__()`, and define `forward`, for what loss(model(x), y) fits; or `training_step(batch)` and
    `validation_step(batch)` for anything else.

    Raises UsageError for a `network` that is no nn.Module.
    """

    _strategy: Strategy | None
    _settings: CompileSettings | None
    _optimizer: Optimizer | None
    _scheduler: Any
    _history: History | None
    _fit: Fit | None
    # The one that runs.
    _pending: dict[str, Any] | None
    # A training state that was loaded, for the next fit.
    _last: dict[str, Any] | None
    # Where the latest fit ended, as far as that is small.
    _unsettled: bool
    # The replicas may stand a step apart.
    _advised: bool
    # Once: what would make its steps faster was looked for.
    stop_training: bool
    _OF_ONE_PROCESS = frozenset({*_OURS, "_updates", "_scheduled"})
    # Attributes that no other process gets when they change.
    _OF_REPLICAS = ("_settings", "_optimizer", "_scheduler", "_history", "_pending", "_last")
    # Those that one which takes a dead replica's place gets from another.
    _was_compiled = False
    # Anywhere: other processes and copies get this, and not the settings.

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        self.__dict__.update(_OURS)
        self._updates = 0
        # Steps of the optimizer that this copy has had.
        self._scheduled = ""
        # The epoch for whose end its scheduler has gone on.
        self._strategy = get_strategy()
        if network is not None:
            if not isinstance(network, nn.Module):
                raise UsageError(f"`network` is a {type(network).__qualname__}; give an nn.Module")
            self.network = network
        place = self._strategy._place
        for part in self.modules():
            # Also those that were made before the scope: what is trained on the replicas is read from there.
            place.mirror(part)

    # ------------------------------------------------------------------ what users define

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network. Raises UsageError where a subclass has neither a network nor a `forward`."""
        if "network" not in self._modules:
            named = ", the name for Keras's `call`" if callable(getattr(type(self), "call", None)) else ""
            raise UsageError(
                f"{type(self).__qualname__} has no `forward`{named}: define it, or give Model's __init__ a network"
            )
        return self.network(*args, **kwargs)

    def training_step(self, batch: Any) -> Any:
        """Define it to train by something else than compile's `loss`.

        `batch`: this replica's share of the global batch, as the loader or (x, y) gives it. Return the loss, a scalar
        tensor that is the mean over the share's examples, or a dict with it under "loss" and further scalars to
        log, means too: compile's `metrics` are of its `loss` alone. It is weighed by the share's examples, and not
        called where a share has none; with `sync_batch_norm` it is then called with one example of zeros, which
        counts nothing.

        With compile(optimizer=None) it calls backward() and its own optimizers itself, which were made in the
        strategy's scope; it is then called for empty shares too, whose gradients count nothing.
        """
        raise UsageError(f"{type(self).__qualname__} defines no training_step")

    def validation_step(self, batch: Any) -> Any:
        """Define it to evaluate by something else than compile's `loss`; as `training_step`, without gradients.

        Where it is not defined and there is no `loss`, `training_step` is called.
        """
        raise UsageError(f"{type(self).__qualname__} defines no validation_step")

    def own_step(self, name: str) -> Callable[[Any], Any] | None:
        """Return the model's own "training_step" or "validation_step", None where compile's `loss` serves."""
        if getattr(type(self), name) is not getattr(Model, name):
            step: Callable[[Any], Any] = getattr(self, name)
            return step
        return None

    # ------------------------------------------------------------------ compile

    def compile(
        self,
        optimizer: Any = "adam",
        loss: Any = None,
        metrics: Any = None,
        *,
        loss_weights: Any = None,
        weighted_metrics: Any = None,
        scheduler: Any = None,
        scheduler_interval: str = "epoch",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate_steps: int = 1,
        precision: str | None = None,
        compile: bool | dict[str, Any] = False,
        channels_last: bool = False,
        sync_batch_norm: bool = False,
    ) -> None:
        """Say how the model is trained; makes its optimizer, in the strategy's scope.

        `optimizer`: a name ("adam"), a class, (name or class, {"lr": 0.1}), a function of the parameters, or an
        optimizer over them; None if `training_step` steps by itself. `loss`: a name ("cross_entropy"), nn.Module or
        function; a dict or list by output, with `loss_weights`. `metrics`: names ("accuracy"), torchmetrics objects,
        functions; `weighted_metrics` take sample weights into account. `scheduler`: as `optimizer`, of
        torch.optim.lr_scheduler; goes on after every "epoch" or "step" (`scheduler_interval`).

        `clip_norm`, `clip_value`: limits of the gradient's norm and elements, reduced as one device has them.
        `accumulate_steps`: global batches whose mean gradients are averaged for one step. `precision`: "bf16" or
        "fp16" for autocast, with loss scaling for fp16. `compile`: True, or arguments of torch.compile.
        `channels_last`: memory format of images. `sync_batch_norm`: statistics of the global batch.

        Raises UsageError for what cannot be.
        """
        settings = CompileSettings(
            optimizer="sgd" if optimizer is None else optimizer,
            loss=loss,
            metrics=metrics,
            loss_weights=loss_weights,
            weighted_metrics=weighted_metrics,
            scheduler=scheduler,
            scheduler_interval=scheduler_interval,
            clip_norm=clip_norm,
            clip_value=clip_value,
            accumulate_steps=accumulate_steps,
            precision=precision,
            compile=compile,
            channels_last=channels_last,
            sync_batch_norm=sync_batch_norm,
        )
        self._look_for_steps_of_keras()
        if optimizer is None:
            self._check_own_steps(settings)
            made, moved = None, None
        else:
            with self.strategy.scope():
                made, moved = make_optimizer(settings, self)
        place = self.strategy._place
        for obj in (made, moved):
            if obj is not None and not place.mirrors(obj):
                place.mirror(obj)
        self._settings, self._optimizer, self._scheduler = settings, made, moved
        self._was_compiled = True
        self._pending = self._last = None

    def _look_for_steps_of_keras(self) -> None:
        for theirs, ours in _STEPS_OF_KERAS.items():
            if callable(getattr(type(self), theirs, None)) and self.own_step(ours) is None:
                warnings.warn(
                    f"{type(self).__qualname__} defines `{theirs}`, which nothing here calls: name it "
                    f"`{ours}(batch)`, and let it return the loss, without backward or a step of the optimizer",
                    stacklevel=users_level(),
                )

    def _check_own_steps(self, settings: CompileSettings) -> None:
        if self.own_step("training_step") is None:
            raise UsageError("optimizer=None is for a model whose own training_step steps; give an optimizer")
        for name in ("scheduler", "clip_norm", "clip_value"):
            if getattr(settings, name) is not None:
                raise UsageError(f"`{name}` is for compile's optimizer, but that is None; do it in training_step")
        if settings.accumulate_steps != 1 or settings.precision == "fp16":
            raise UsageError("accumulate_steps and 'fp16' are for compile's optimizer, but that is None")

    # ------------------------------------------------------------------ fit, evaluate, predict

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
        on_failure: str = "recover",
    ) -> History:
        """Train for `epochs` and return the history of loss and metrics.

        `x`, `y`: tensors, arrays, or nests of them; or `x` alone a Dataset or a DataLoader, of (x, y) or
        (x, y, sample weights). A tuple or list of inputs are the network's arguments, a dict those by name.
        `batch_size`: of the global batch, over all replicas; 32 if None. The weights are those that one device
        ends with, whatever the number of replicas. The order of shuffled examples is drawn from torch's generator,
        and so are the replicas' random numbers (dropout's): torch.manual_seed(0) before makes both the same again.

        `sample_weight`: a weight for each example; with several outputs also a dict or list of them by output, where
        an output that is left out, or None, has weight 1.

        `validation_data`: (x, y), (x, y, sample weights), or a loader; `validation_split`: the last part of x and y.
        `epochs` is the number of the last epoch, `initial_epoch` that of the first, from 0; where a file was loaded
        whose training stopped in this epoch, it goes on from there. Other arguments as in Keras.

        `on_failure`: when a replica dies, "recover" replaces it, does the step again that it died in, and ends on the
        weights of a training that nothing disturbed. If none survives, it goes on from the latest file with the
        training's state that a callback saved (BackupAndRestore, ModelCheckpoint). "raise" raises ReplicaDied, as a
        `%%mirrored` cell always does.

        An interrupt leaves the weights after the last whole step. Raises UsageError for arguments that do not fit, and
        whatever the model's and the callbacks' functions raise. Raises ReplicaDied where one dies three times at the
        same step; where none survives and nothing was saved; and where the step cannot be done again, since LBFGS or
        an optimizer in `training_step` had changed the weights before its end.
        """
        settings = self.compiled_settings
        if self._fit is not None:
            raise UsageError("this model is being fitted; a callback cannot fit it again")
        if on_failure not in ("recover", "raise"):
            raise UsageError(f"`on_failure` is {on_failure!r}; it is 'recover' or 'raise'")
        epochs, initial_epoch = _count("epochs", epochs), _count("initial_epoch", initial_epoch, least=0)
        steps = _steps("steps_per_epoch", steps_per_epoch)
        validation_steps = _steps("validation_steps", validation_steps)
        if isinstance(validation_freq, str) or not isinstance(validation_freq, Collection):
            validation_freq = _count("validation_freq", validation_freq)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_validation(x, y, sample_weight, validation_split)
        seed = self.strategy._place.draw_seed()
        plan = driver.Plan(
            feed=feed(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle, seed=seed),
            validation=_validation_feed(validation_data, validation_batch_size or batch_size),
            epochs=epochs,
            initial_epoch=initial_epoch,
            steps=steps,
            validation_steps=validation_steps,
            validation_freq=validation_freq,
            seed=seed,
            class_weight=_checked_class_weight(class_weight, settings),
            verbose=verbose,
            callbacks=callbacks,
            recovers=on_failure == "recover",
        )
        return driver.Fit(self, plan).run()

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Return the loss over all data; with metrics a list of it and them, in `compile`'s order.

        `return_dict`: a dict by name instead. Arguments as for `fit`. Raises UsageError for those that do not fit.
        """
        _ = self.compiled_settings
        steps = _steps("steps", steps)
        data = feed(x, y, sample_weight, batch_size=batch_size)
        logs = evaluating.evaluate(self, data, steps=steps, verbose=verbose, callbacks=callbacks)
        if return_dict:
            return logs
        return logs["loss"] if len(logs) == 1 else list(logs.values())

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Return the network's outputs for all of `x`, in order, on the CPU: a tensor, or a nest of them.

        `batch_size`: of the global batch; 32 if None. Batches of a loader that are (inputs, targets) give their
        inputs. Raises UsageError for a network whose outputs have no row for each example.
        """
        steps = _steps("steps", steps)
        data = feed(x, batch_size=batch_size)
        return evaluating.predict(self, data, steps=steps, verbose=verbose, callbacks=callbacks)

    # ------------------------------------------------------------------ what callbacks and users read

    @property
    def strategy(self) -> Strategy:
        """The strategy that the model was made with; where it came from another process, the current one."""
        return self._strategy if self._strategy is not None else get_strategy()

    @property
    def compiled_settings(self) -> CompileSettings:
        """What `compile` was told. Raises UsageError where it was not called."""
        if self._settings is None:
            if self._was_compiled:
                raise UsageError(
                    f"this model is not compiled here: {_STAYS}; call fit and evaluate where it was compiled, or "
                    "compile(optimizer=..., loss=...) here first"
                )
            raise UsageError("this model is not compiled; call compile(optimizer=..., loss=...) first")
        return self._settings

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; its settings (`param_groups`) may be changed here, its state is on the replicas."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        raise UsageError("give the optimizer to compile(optimizer=...); those of a training_step have other names")

    @property
    def scheduler(self) -> Any:
        """The scheduler of the learning rate; None if `compile` was given none."""
        return self._scheduler

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group of parameters; to set it sets that of all.

        Raises UsageError where there is no optimizer.
        """
        return float(self._some_optimizer().param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for group in self._some_optimizer().param_groups:
            group["lr"] = group["lr"].new_tensor(value) if isinstance(group["lr"], Tensor) else float(value)

    def _some_optimizer(self) -> Optimizer:
        if self._was_compiled:
            _ = self.compiled_settings
        if self._optimizer is None:
            raise UsageError("this model has no optimizer; call compile(optimizer=..., loss=...) first")
        return self._optimizer

    @property
    def history(self) -> History | None:
        """The history of the latest `fit`, or of the one that runs; None before the first."""
        return self._fit.history if self._fit is not None else self._history

    # ------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str], include_optimizer: bool = True) -> None:
        """Write the model into one file, as a whole or not at all.

        torch.load(path, weights_only=True)["state_dict"] is the network's; `load_model` makes a model of the file, on
        any number of devices. With `include_optimizer` a training goes on from it as if it had never stopped. In a
        `%%mirrored` cell all replicas call it, and replica 0 writes.

        Warns where compile was called, but in another process: the file has weights and structure alone then. Raises
        CheckpointError where the file cannot be written.
        """
        # Below here: what loads a file makes a Model of it.
        from mirror_nb.training import saving

        # All replicas of a cell take part in this; one writes.
        training = self.training_state() if include_optimizer and self._settings is not None else None
        place, problem = self.strategy._place, None
        if place.seat is not None and place.seat.num_replicas > 1:
            place.check_open()
            average_statistics(place.seat, self)
        if place.replica_id in (None, 0):
            if self._settings is None and self._was_compiled:
                warnings.warn(
                    f"{os.fspath(path)!r} gets weights and structure alone: {_STAYS}; save where it was compiled to "
                    "go on with its training",
                    stacklevel=users_level(),
                )
            try:
                saving.save_model(
                    path,
                    network=self.network if self._is_plain() else self,
                    settings=self._settings,
                    optimizer_name=None if self._optimizer is None else type(self._optimizer).__name__,
                    training=training,
                )
            except MirrorError as error:
                problem = error
        # Nobody goes on, and reads it, before it is there.
        problem = place.every([problem])[0]
        if problem is not None:
            raise problem
        if training is not None and self._fit is not None:
            self._fit.saved(path)

    def load_training(self, path: str | os.PathLike[str]) -> None:
        """Take weights and training state from a file that `save` wrote; in `fit`, go on from where that was.

        Raises CheckpointError for a file that is none, RuntimeError for one of another network.
        """
        content = files.read(path)
        with files.taking_apart(path):
            self.load_state_dict(content["state_dict"])
            if content.get("training") is not None:
                self.load_training_state(content["training"])
                if self._fit is not None:
                    self._fit.saved(path)

    def training_state(self) -> dict[str, Any]:
        """Return all that a training needs to go on, besides the weights: tensors and plain values.

        "optimizer", "scheduler", "scaler", "epoch" (that have ended), "step" (done of the next one), "total_steps",
        "feed" (the order of examples), "random" (by replica, and "shared"), "accumulators", "history", "callbacks".
        """
        return self._fit.state() if self._fit is not None else self._state_outside_fit()

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Let the next `fit` go on with a `training_state`.

        With its optimizer and scheduler; and where `initial_epoch` is the epoch that it was taken in, or the fit runs
        already, from its very step, with its order of the data, random numbers, history and callbacks.

        Raises UsageError for what is no training state, and where the model is not compiled as the one that it was
        taken of.
        """
        _ = self.compiled_settings
        if not isinstance(state, Mapping) or not {"epoch", "step"} <= state.keys():
            raise UsageError(
                f"this {type(state).__name__} is nothing that model.training_state() returned; of a file that "
                "Model.save or ModelCheckpoint wrote take all by model.load_training(path)"
            )
        saved = state.get("optimizer")
        if saved is not None and self._optimizer is not None:
            groups = [{n: v for n, v in group.items() if n != "params"} for group in saved["param_groups"]]
            if len(groups) != len(self._optimizer.param_groups):
                raise UsageError(
                    f"the training state is of an optimizer with {len(groups)} groups of parameters, this one's has "
                    f"{len(self._optimizer.param_groups)}; compile as the saved model was"
                )
            for own, group in zip(self._optimizer.param_groups, groups, strict=True):
                lacking, others = self._optimizer.defaults.keys() - group.keys(), group.keys() - own.keys()
                # One of the two alone another version of torch may have.
                if lacking and others:
                    raise UsageError(
                        f"the training state is of another optimizer: it has {', '.join(sorted(others))}, and "
                        f"{type(self._optimizer).__name__} has {', '.join(sorted(lacking))}; compile as the saved "
                        "model was"
                    )
            change_settings(self._optimizer, groups)
        self._pending = dict(state)

    # ------------------------------------------------------------------ for the driver

    def _resume_from(self, initial_epoch: int, *, wherever: bool) -> dict[str, Any] | None:
        """Return what the coming fit goes on from: states, and a position where it begins in the epoch of one."""
        pending = self._pending
        if pending is None:
            scaler = None if self._last is None else self._last.get("scaler")
            return None if scaler is None else {"scaler": scaler}
        fits = wherever or (pending["epoch"] == initial_epoch and (pending["epoch"] or pending["step"]))
        states = {name: pending.get(name) for name in ("optimizer", "scheduler", "scaler")}
        position = pending if fits and pending.get("feed") is not None else None
        return {**driver.with_current_settings(states, self._optimizer), "position": position}

    def _state_outside_fit(self) -> dict[str, Any]:
        """Return the training state while nothing is trained."""
        if self._pending is not None:
            return driver.with_current_settings(dict(self._pending), self._optimizer)
        place = self.strategy._place
        if place.closed:
            # What the replicas had of both is here since then.
            states = states_of(self._optimizer, self._scheduler)
        else:
            arguments = (self.strategy, self._optimizer, self._scheduler)
            states = place.every(place.ask(job.optimizer_state, arguments))[0]
        history = self._history.state_dict() if self._history is not None else History().state_dict()
        last: dict[str, Any] = {"epoch": 0, "step": 0, "total_steps": 0, "feed": None, "random": {}, "scaler": None}
        last |= {"grouped": 0, "gradients": [], "accumulators": [], "callbacks": {}}
        return {**last, "history": history, **(self._last or {}), **states}

    # ------------------------------------------------------------------ nn.Module's own

    def _is_plain(self) -> bool:
        return type(self) is Model and "network" in self._modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's own state dict; that of a subclass has the names that it registered."""
        alone = not args and kwargs.get("destination") is None and not kwargs.get("prefix")
        if self._is_plain() and alone:
            return self.network.state_dict(*args, **kwargs)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what `state_dict` gives. Raises RuntimeError for names or shapes of another network.

        Raises UsageError for all that `save` or ModelCheckpoint wrote, of which that is a part.
        """
        if files.is_all_of_one(state_dict):
            raise UsageError(
                'this is a whole file of Model.save or ModelCheckpoint, and the state dict is its "state_dict"; '
                "write model.load_training(path)"
            )
        if self._is_plain():
            return self.network.load_state_dict(state_dict, *args, **kwargs)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in _IN_TORCH:
                raise
            raise AttributeError(f"'{type(self).__name__}' has no `{name}`: write {_IN_TORCH[name]}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OURS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**_OURS, **state})


# --------------------------------------------------------------------------- what is checked


def _validation_feed(data: Any, batch_size: int | None) -> Feed | None:
    if data is None:
        return None
    if not isinstance(data, (tuple, list)):
        loader = isinstance(data, (torch.utils.data.DataLoader, Distributed))
        return feed(data, batch_size=None if loader else batch_size)
    if not 1 <= len(data) <= 3:
        raise UsageError(
            f"`validation_data` has {len(data)} members; give (x, y) or (x, y, sample weights), or a DataLoader"
        )
    x, y, weight = (*data, None, None)[:3]
    return feed(x, y, weight, batch_size=batch_size)


def _count(name: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int | Integral) or isinstance(value, bool) or value < least:
        raise UsageError(f"`{name}` is {value!r}; it is a whole number from {least}")
    return int(value)


def _steps(name: str, value: Any) -> int | None:
    return None if value is None else _count(name, value)


def _checked_class_weight(weights: Mapping[int, float] | None, settings: CompileSettings) -> dict[int, float] | None:
    if weights is None:
        return None
    if settings.loss is None:
        raise UsageError("`class_weight` is for compile's `loss`, but there is none; weigh in your training_step")
    try:
        found = {int(number): float(weight) for number, weight in weights.items()}
    except (AttributeError, TypeError, ValueError):
        found = {}
    if not found:
        raise UsageError(f"`class_weight` is {weights!r}; give a dict from class numbers to weights")
    return found
