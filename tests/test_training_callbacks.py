"""Keras's callbacks, driven by a loop of the tests' own over a model of the tests' own."""

from __future__ import annotations

import csv
import importlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from mirror_nb import callbacks as public
from mirror_nb.errors import MirrorError, UsageError
from mirror_nb.training.callbacks import (
    BackupAndRestore,
    Callback,
    CallbackList,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TensorBoard,
    TerminateOnNaN,
    records,
)
from mirror_nb.training.history import History


class Model:
    """What callbacks use of a model. A step adds the learning rate to its one weight."""

    def __init__(self) -> None:
        self.network = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.network.weight)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1.0)
        self.stop_training = False
        self.position = (0, 0)
        # Epochs that have ended, steps in the one that has not.
        self.callbacks: CallbackList | None = None
        self.states: dict[str, Any] = {}
        # Of the callbacks, as a backup had them.

    @property
    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @property
    def weight(self) -> float:
        return self.network.weight.item()

    def step(self) -> None:
        with torch.no_grad():
            self.network.weight += self.learning_rate

    def state_dict(self) -> dict[str, Any]:
        return self.network.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.network.load_state_dict(state)

    def save(self, path: Path, include_optimizer: bool = True) -> None:
        assert self.callbacks is not None
        content: dict[str, Any] = {"state_dict": self.state_dict()}
        if include_optimizer:
            content |= {"optimizer": self.optimizer.state_dict(), "position": self.position}
            content |= {"callbacks": self.callbacks.state_dict()}
        torch.save(content, path)

    def load_training(self, path: Path) -> None:
        try:
            content = torch.load(path, weights_only=True)
        except Exception as error:
            raise MirrorError(f"{path} cannot be read") from error
        self.load_state_dict(content["state_dict"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.position, self.states = content["position"], content["callbacks"]


def fit(
    callbacks: Any,
    logs: Sequence[Mapping[str, Any]],
    steps: int = 1,
    model: Model | None = None,
    step_logs: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> Model:
    """Train for an epoch a value of `logs`, calling the batch hooks as often as the callbacks ask for."""
    model = model or Model()
    params = {"epochs": len(logs), "steps": steps, "verbose": 0}
    several = model.callbacks = CallbackList(callbacks, model=model, params=params, **options)
    model.stop_training, model.position, model.states = False, (0, 0), {}
    ended: dict[str, Any] = {}
    try:
        several.on_train_begin()
        several.load_state_dict(model.states)
        while model.position[0] < len(logs) and not model.stop_training:
            epoch = model.position[0]
            several.on_epoch_begin(epoch)
            while model.position[1] < steps and not model.stop_training:
                done = model.position[1]
                many = min(several._every or steps, steps - done)
                for _ in range(many):
                    model.step()
                model.position = (epoch, done + many)
                if several._every:
                    several.on_train_batch_end(done + many - 1, dict(step_logs[epoch] if step_logs else {}))
            model.position = (epoch + 1, 0)
            ended = dict(logs[epoch])
            several.on_epoch_end(epoch, ended)
        several.on_train_end(ended)
    finally:
        several.close()
    return model


def val_losses(*values: float) -> list[dict[str, float]]:
    return [{"loss": value, "val_loss": value} for value in values]


# --------------------------------------------------------------------------- the list


def test_hooks_are_called_in_the_order_of_the_list_with_the_model_and_the_parameters():
    calls: list[Any] = []

    class Mine(Callback):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            calls.append((self.name, epoch, logs["loss"], self.params["epochs"], isinstance(self.model, Model)))

    fit([Mine("a"), [Mine("b")]], [{"loss": 3.0}, {"loss": 2.0}])
    assert calls == [("a", 0, 3.0, 2, True), ("b", 0, 3.0, 2, True), ("a", 1, 2.0, 2, True), ("b", 1, 2.0, 2, True)]


def test_every_hook_of_a_callback_is_called_through_the_list():
    calls: list[str] = []
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    one = LambdaCallback(**{hook: lambda *a, _hook=hook, **k: calls.append(_hook) for hook in hooks})
    several = CallbackList([one])
    for hook in hooks:
        getattr(several, hook)(*([0, {}] if "batch" in hook or "epoch" in hook else [{}]))
    # The two other names are called by the hooks whose names they are; here both are overridden.
    assert sorted(calls) == sorted(set(hooks) - {"on_batch_begin", "on_batch_end"})


def test_hooks_of_batches_get_their_logs_by_name_as_in_keras():
    class Named(Callback):
        def on_train_batch_end(self, batch, **named):
            heard.append((batch, named))

    heard: list[Any] = []
    CallbackList([Named()]).on_train_batch_end(3, {"loss": 1.0})
    assert heard == [(3, {"logs": {"loss": 1.0}})]


def test_a_hook_always_has_logs_to_look_into():
    # Keras's guide to callbacks of one's own begins with one that lists logs.keys() in every hook.
    seen: dict[str, list[str]] = {}
    hooks = [name for name in dir(Callback) if name.startswith("on_")]

    def named(hook: str) -> Any:
        return lambda *a, logs=None, **k: seen.setdefault(hook, list((a[-1] if logs is None else logs).keys()))

    several = CallbackList([LambdaCallback(**{hook: named(hook) for hook in hooks})])
    for hook in hooks:
        getattr(several, hook)(*([0] if "batch" in hook or "epoch" in hook else []))
    assert seen == {hook: [] for hook in hooks if hook not in ("on_batch_begin", "on_batch_end")}


def test_on_batch_end_is_another_name_of_on_train_batch_end():
    seen: list[int] = []
    callback = LambdaCallback(on_batch_end=lambda batch, logs: seen.append(batch))
    fit(callback, [{"loss": 1.0}], steps=3)
    assert seen == [0, 1, 2]


def test_a_callback_may_have_attributes_of_any_name():
    class Printing(Callback):
        def __init__(self) -> None:
            self.every, self.order, self.leads, self.together, self.tell, self.agree = 2, "down", 1.5, "a", "b", "c"
            self.seen: list[int] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch % self.every == 0:
                self.seen.append(batch)

    callback = Printing()
    fit([callback, TerminateOnNaN()], [{"loss": 1.0}], steps=5)
    assert callback.seen == [0, 2, 4]
    assert (callback.every, callback.order, callback.leads) == (2, "down", 1.5)
    assert (callback.together, callback.tell, callback.agree) == ("a", "b", "c")


def test_steps_stay_one_message_an_epoch_unless_a_batch_hook_is_overridden(tmp_path):
    class PerStep(Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None: ...

    assert CallbackList()._every is None
    assert (
        CallbackList([EarlyStopping(), ModelCheckpoint(tmp_path / "m.pt"), CSVLogger(tmp_path / "l.csv")])._every
        is None
    )
    assert CallbackList([PerStep()])._every == 1
    assert CallbackList([LambdaCallback(on_train_batch_end=lambda batch, logs: None)])._every == 1
    assert CallbackList([TerminateOnNaN()])._every == 1
    assert CallbackList([BackupAndRestore(tmp_path, save_freq=6), TensorBoard(tmp_path, update_freq=4)])._every == 2
    assert CallbackList([LambdaCallback(on_epoch_end=lambda epoch, logs: None)]).every_test is None
    assert CallbackList([LambdaCallback(on_test_batch_end=lambda batch, logs: None)]).every_test == 1
    assert CallbackList([LambdaCallback(on_predict_batch_begin=lambda batch, logs: None)]).every_predict == 1


def test_the_history_has_what_callbacks_added_and_is_complete_when_a_backup_is_made(tmp_path):
    history = History()
    seen: list[int] = []
    backup = BackupAndRestore(tmp_path)
    model = Model()
    model.save = lambda path: seen.append(len(history.epoch))  # type: ignore[method-assign]
    fit([backup, LearningRateScheduler(lambda epoch: 0.5)], val_losses(2, 1), model=model, history=history)
    assert history.history == {"loss": [2, 1], "val_loss": [2, 1], "learning_rate": [0.5, 0.5]}
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (EarlyStopping, r"the class EarlyStopping: make one, EarlyStopping\("),
        (print, "derive from mirror_nb.callbacks.Callback, or use LambdaCallback"),
        ("early", "'early': derive from"),
    ],
)
def test_what_is_no_callback_is_refused(wrong, says):
    with pytest.raises(UsageError, match=says):
        CallbackList([wrong])


def test_a_callback_whose_init_forgot_its_base_works():
    class Forgetful(Callback):
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epochs.append(epoch)

    callback = Forgetful()
    fit([callback], val_losses(1, 1))
    assert callback.epochs == [0, 1]


def test_all_are_closed_after_an_error_whichever_raises():
    closed: list[str] = []

    class Opened(Callback):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise RuntimeError("stop")

        def close(self) -> None:
            closed.append(self.name)
            raise OSError(self.name)

    with pytest.raises(OSError, match=r"a|b"):
        fit([Opened("a"), Opened("b")], val_losses(1))
    assert sorted(closed) == ["a", "b"]


def test_states_go_back_to_the_callbacks_of_the_same_class_in_their_order():
    patient, quick = EarlyStopping(patience=5), EarlyStopping(patience=7)
    fit([patient, quick], val_losses(1, 2, 3))
    states = CallbackList([patient, quick]).state_dict()
    again = [ReduceLROnPlateau(), EarlyStopping(patience=5), EarlyStopping(patience=7)]
    CallbackList(again).load_state_dict(states)
    assert [(c.wait, c.best) for c in again[1:]] == [(2, 1), (2, 1)]
    assert again[0].best is None


def test_the_public_names_are_these_callbacks():
    assert public.EarlyStopping is EarlyStopping
    assert set(public.__all__) == set(importlib.import_module("mirror_nb.training.callbacks").__all__)


# --------------------------------------------------------------------------- EarlyStopping


def test_training_stops_when_patience_is_over_and_the_best_weights_come_back(capsys):
    stopping = EarlyStopping(patience=2, restore_best_weights=True, verbose=1)
    model = fit(stopping, val_losses(3, 2, 4, 5, 1))
    assert model.position == (4, 0)
    assert (stopping.stopped_epoch, stopping.best, stopping.best_epoch) == (3, 2, 1)
    assert model.weight == 2
    assert "epoch 4: stopped early" in capsys.readouterr().out


def test_an_accuracy_is_better_when_it_is_higher():
    stopping = EarlyStopping("val_accuracy")
    fit(stopping, [{"val_accuracy": value} for value in (0.5, 0.6, 0.55)])
    assert (stopping.best, stopping.stopped_epoch) == (0.6, 2)


def test_nan_is_no_improvement_not_even_as_the_first_value():
    stopping = EarlyStopping(patience=3)
    fit(stopping, val_losses(math.nan, 2, math.nan, 1))
    assert (stopping.best, stopping.stopped_epoch) == (1, 0)


def test_an_early_stopping_can_be_used_for_a_second_fit():
    stopping = EarlyStopping()
    fit(stopping, val_losses(1, 2))
    model = fit(stopping, val_losses(9, 8, 7))
    assert model.position == (3, 0)


def test_a_metric_whose_direction_is_not_known_asks_for_the_mode_before_anything_is_trained():
    with pytest.raises(UsageError, match=r"more or less of 'val_score' is better .* mode='max' or mode='min'"):
        EarlyStopping("val_score")
    stopping = EarlyStopping("val_score", mode="max")
    fit(stopping, [{"val_score": 1.0}, {"val_score": 2.0}])
    assert stopping.best == 2.0


def test_a_mode_that_there_is_not_is_refused():
    with pytest.raises(UsageError, match="'auto', 'min' or 'max', not 'maximum'"):
        EarlyStopping(mode="maximum")


def test_what_was_not_logged_is_said_and_does_not_stop_the_training():
    with pytest.warns(UserWarning, match="EarlyStopping looks at 'val_loss', .* there is: loss; give fit") as told:
        model = fit(EarlyStopping(), [{"loss": 1.0}] * 3)
    # In the user's lines.
    assert {Path(each.filename).name for each in told} == {Path(__file__).name}
    assert model.position == (3, 0)


def test_a_metric_of_several_values_cannot_be_looked_at():
    with pytest.raises(UsageError, match="'val_loss', which is no single number"):
        fit(EarlyStopping(), [{"val_loss": torch.ones(2)}])


@pytest.fixture(scope="module")
def keras() -> Iterator[Any]:
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "torch"
    yield pytest.importorskip("keras")
    os.environ.pop("KERAS_BACKEND") if before is None else os.environ.update(KERAS_BACKEND=before)


class KerasModel:
    """What Keras's callbacks use of a model."""

    def __init__(self) -> None:
        self.stop_training = False
        self.learning_rate = 1.0
        self.optimizer = self
        self.weights = 0

    def get_weights(self) -> int:
        return self.weights

    def set_weights(self, weights: int) -> None:
        self.weights = weights


def keras_fit(callback: Any, logs: Sequence[Mapping[str, Any]]) -> KerasModel:
    model = KerasModel()
    callback.set_model(model)
    callback.on_train_begin()
    for epoch, values in enumerate(logs):
        model.weights = epoch + 1
        callback.on_epoch_end(epoch, dict(values))
        if model.stop_training:
            break
    callback.on_train_end()
    return model


# Exact in the float32 in which Keras compares.
eighths = st.integers(0, 24).map(lambda n: n / 8)
together = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@together
@given(
    values=st.lists(eighths, min_size=1, max_size=12),
    patience=st.integers(0, 3),
    min_delta=st.sampled_from([0, 1 / 8, -1 / 4]),
    mode=st.sampled_from(["auto", "min", "max"]),
    baseline=st.none() | eighths,
    restore=st.booleans(),
    start=st.integers(0, 4),
)
def test_early_stopping_decides_as_keras_does(keras, values, patience, min_delta, mode, baseline, restore, start):
    options: dict[str, Any] = {"patience": patience, "min_delta": min_delta, "mode": mode, "baseline": baseline}
    options |= {"restore_best_weights": restore, "start_from_epoch": start}
    theirs, ours = keras.callbacks.EarlyStopping(**options), EarlyStopping(**options)
    there, here = keras_fit(theirs, val_losses(*values)), fit(ours, val_losses(*values))
    assert (ours.stopped_epoch, ours.wait, ours.best) == (theirs.stopped_epoch, theirs.wait, theirs.best)
    assert here.stop_training == there.stop_training
    assert here.weight == there.weights


# --------------------------------------------------------------------------- the learning rate


@together
@given(
    values=st.lists(eighths, min_size=1, max_size=14),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 2),
    min_delta=st.sampled_from([0, 1 / 8]),
    mode=st.sampled_from(["auto", "min", "max"]),
    min_lr=st.sampled_from([0.0, 1 / 8]),
)
def test_the_learning_rate_is_reduced_when_keras_reduces_it(
    keras, values, patience, cooldown, min_delta, mode, min_lr
):
    options: dict[str, Any] = {"patience": patience, "cooldown": cooldown, "min_delta": min_delta, "mode": mode}
    options |= {"min_lr": min_lr, "factor": 0.5}
    there = keras_fit(keras.callbacks.ReduceLROnPlateau(**options), val_losses(*values))
    here = fit(ReduceLROnPlateau(**options), val_losses(*values))
    assert here.learning_rate == there.learning_rate


def test_each_parameter_group_keeps_its_share_of_the_learning_rate(capsys):
    model = Model()
    model.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": torch.tensor(0.5)})
    fit(ReduceLROnPlateau(patience=1, factor=0.1, min_lr=0.1, verbose=1), val_losses(1, 1), model=model)
    rates = [group["lr"] for group in model.optimizer.param_groups]
    assert rates == [pytest.approx(0.1), pytest.approx(0.1)]
    assert isinstance(rates[1], torch.Tensor)
    assert "epoch 2: the learning rate is reduced to 0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (EarlyStopping, "patience", "3"),
        (EarlyStopping, "baseline", "1"),
        (EarlyStopping, "start_from_epoch", None),
        (ReduceLROnPlateau, "patience", None),
        (ReduceLROnPlateau, "factor", "0.1"),
        (ReduceLROnPlateau, "cooldown", True),
    ],
)
def test_what_is_no_number_is_refused_before_anything_is_trained(kind, name, value):
    with pytest.raises(UsageError, match=f"{kind.__name__}'s `{name}` is a number, not {value!r}"):
        kind(**{name: value})


@pytest.mark.parametrize("factor", [1.5, -0.5])
def test_a_factor_that_would_not_reduce_is_refused(factor):
    with pytest.raises(UsageError, match=rf"less than 1 .* not {factor}"):
        ReduceLROnPlateau(factor=factor)


def test_the_learning_rate_follows_the_schedule_and_is_logged(capsys):
    history = History()
    model = fit(LearningRateScheduler(lambda epoch, lr: lr / 2, verbose=1), val_losses(1, 1), history=history)
    assert history.history["learning_rate"] == [0.5, 0.25]
    assert model.weight == 0.75
    assert "epoch 2: the learning rate is 0.25" in capsys.readouterr().out


def test_a_schedule_of_the_epoch_alone_works():
    class Steps:
        def __call__(self, epoch: int) -> float:
            return [4.0, 2.0][epoch]

    assert fit(LearningRateScheduler(Steps()), val_losses(1, 1)).weight == 6


@pytest.mark.parametrize("wrong", ["0.1", None, -1.0, math.nan, True])
def test_a_schedule_that_returns_no_learning_rate_is_told_so(wrong):
    with pytest.raises(UsageError, match="`schedule` has to return a learning rate"):
        fit(LearningRateScheduler(lambda epoch, lr: wrong), val_losses(1))


def test_a_schedule_has_to_be_a_function():
    with pytest.raises(UsageError, match=r"not 0\.1"):
        LearningRateScheduler(0.1)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- ModelCheckpoint


def saved_weight(path: Path) -> float:
    return float(torch.load(path, weights_only=True)["state_dict"]["weight"])


def test_each_epoch_is_saved_under_its_name(tmp_path, capsys):
    checkpoint = ModelCheckpoint(tmp_path / "new" / "{epoch:02d}-{val_loss:.1f}.pt", verbose=1)
    fit(checkpoint, val_losses(0.51, 0.25))
    names = {path.name: saved_weight(path) for path in (tmp_path / "new").iterdir()}
    assert names == {"01-0.5.pt": 1, "02-0.2.pt": 2}
    assert "epoch 2: saved in " in capsys.readouterr().out


def test_only_a_better_model_replaces_the_one_that_is_saved(tmp_path, capsys):
    path = tmp_path / "best.pt"
    fit(ModelCheckpoint(path, save_best_only=True, verbose=1), val_losses(3, 2, 4, 2))
    assert saved_weight(path) == 2
    out = capsys.readouterr().out
    assert "epoch 1: val_loss has improved from none to 3.00000, saved in" in out
    assert "epoch 3: val_loss has not improved from 2.00000" in out


def test_nothing_is_saved_that_is_not_better_than_the_threshold(tmp_path):
    path = tmp_path / "best.pt"
    fit(ModelCheckpoint(path, save_best_only=True, initial_value_threshold=1.0), val_losses(3, 2))
    assert not path.exists()


def test_without_validation_the_model_is_saved_all_the_same_and_a_warning_says_why(tmp_path):
    path = tmp_path / "best.pt"
    with pytest.warns(UserWarning, match="ModelCheckpoint looks at 'val_loss'"):
        fit(ModelCheckpoint(path, save_best_only=True), [{"loss": 1.0}])
    assert path.exists()


def test_weights_alone_are_saved_without_the_optimizer(tmp_path):
    fit(
        [ModelCheckpoint(tmp_path / "w.pt", save_weights_only=True), ModelCheckpoint(tmp_path / "all.pt")],
        val_losses(1),
    )
    assert set(torch.load(tmp_path / "w.pt")) == {"state_dict"}
    assert "optimizer" in torch.load(tmp_path / "all.pt")


def test_every_so_many_steps_are_saved_counted_over_epochs(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}-{batch}-{loss}.pt", save_freq=4)
    fit(checkpoint, val_losses(1, 1), steps=6, step_logs=[{"loss": 0.5}, {"loss": 0.25}])
    # At step 4, at 6 + 4, and not at the end of the first epoch, which was only two steps later.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-4-0.5.pt", "2-4-0.25.pt"]


def test_a_number_of_steps_longer_than_an_epoch_counts_on(tmp_path):
    fit(ModelCheckpoint(tmp_path / "{epoch}-{batch}.pt", save_freq=5), val_losses(1, 1, 1, 1), steps=2)
    assert [path.name for path in tmp_path.iterdir()] == ["3-2.pt"]


def test_numbers_of_numpy_are_numbers_of_steps(tmp_path):
    fit(ModelCheckpoint(tmp_path / "{epoch}-{batch}.pt", save_freq=np.int64(5)), val_losses(1, 1, 1, 1), steps=2)
    assert [path.name for path in tmp_path.iterdir()] == ["3-2.pt"]
    assert BackupAndRestore(tmp_path, save_freq=np.int32(3)).save_freq == 3
    assert TensorBoard(tmp_path, update_freq=np.int32(3)).update_freq == 3


@pytest.mark.parametrize("wrong", ["batch", 0, -1, True, 1.5])
def test_a_save_freq_that_there_is_not_is_refused(tmp_path, wrong):
    with pytest.raises(UsageError, match="'epoch' or a number of steps"):
        ModelCheckpoint(tmp_path / "m.pt", save_freq=wrong)
    with pytest.raises(UsageError, match="'epoch' or a number of steps"):
        BackupAndRestore(tmp_path, save_freq=wrong)


def test_a_field_that_is_not_logged_names_those_that_are(tmp_path):
    with pytest.raises(UsageError, match=r"KeyError\('acc'\).* fields are: epoch, loss, val_loss"):
        fit(ModelCheckpoint(tmp_path / "{acc}.pt"), val_losses(1))


def test_a_folder_as_filepath_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is a folder; add the name of a file"):
        fit(ModelCheckpoint(tmp_path), val_losses(1))


# --------------------------------------------------------------------------- BackupAndRestore


class Killed(BaseException):
    pass


def kill(epoch: int) -> Callback:
    def at(now: int, logs: Any) -> None:
        if now == epoch:
            raise Killed

    return LambdaCallback(on_epoch_begin=at)


def test_a_fit_that_was_killed_goes_on_and_ends_where_an_undisturbed_one_does(tmp_path):
    # As in TensorFlow: two epochs of two steps are done, the third is interrupted.
    losses = val_losses(4, 3, 3, 3)

    def callbacks() -> list[Callback]:
        return [BackupAndRestore(tmp_path / "b"), ReduceLROnPlateau(patience=1, factor=0.5)]

    undisturbed = fit(callbacks(), losses, steps=2)
    with pytest.raises(Killed):
        fit([*callbacks(), kill(2)], losses, steps=2)
    epochs: list[int] = []
    counted = LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    resumed = fit([*callbacks(), counted], losses, steps=2)
    assert epochs == [2, 3]
    assert resumed.weight == undisturbed.weight
    assert resumed.learning_rate == undisturbed.learning_rate
    assert not (tmp_path / "b").exists()


def test_a_backup_every_so_many_steps_goes_on_at_the_very_step(tmp_path):
    def die(batch: int, logs: Any) -> None:
        if batch == 4:
            raise Killed

    with pytest.raises(Killed):
        fit([BackupAndRestore(tmp_path, save_freq=2), LambdaCallback(on_train_batch_end=die)], val_losses(1), steps=6)
    batches: list[int] = []
    seen = LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    model = fit([BackupAndRestore(tmp_path, save_freq=2), seen], val_losses(1), steps=6)
    assert batches == [4, 5]
    assert model.weight == 6


def test_a_fit_that_goes_on_makes_the_next_backup_as_many_steps_after_the_one_that_it_found(tmp_path):
    def die(batch: int, logs: Any) -> None:
        if batch == 4:
            raise Killed

    with pytest.raises(Killed):
        fit([BackupAndRestore(tmp_path, save_freq=4), LambdaCallback(on_train_batch_end=die)], val_losses(1), steps=9)
    model, seen = Model(), LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    saved: list[Any] = []
    model.save = lambda path: saved.append(model.weight)  # type: ignore[method-assign]
    fit([BackupAndRestore(tmp_path, save_freq=4), seen], val_losses(1), steps=9, model=model)
    assert saved == [8]


def test_a_schedule_that_goes_by_the_present_rate_is_asked_once_an_epoch_that_a_backup_cut(tmp_path):
    def halves() -> list[Callback]:
        return [LearningRateScheduler(lambda epoch, rate: rate / 2), BackupAndRestore(tmp_path, save_freq=1)]

    def die(batch: int, logs: Any) -> None:
        if batch == 1:
            raise Killed

    whole = fit(halves(), val_losses(1, 1), steps=4)
    with pytest.raises(Killed):
        fit([*halves(), LambdaCallback(on_train_batch_end=die)], val_losses(1, 1), steps=4)
    assert fit(halves(), val_losses(1, 1), steps=4).weight == whole.weight == 4 * 0.5 + 4 * 0.25


def test_the_state_of_callbacks_listed_after_the_backup_is_in_it(tmp_path):
    with pytest.raises(Killed):
        fit([BackupAndRestore(tmp_path), EarlyStopping(patience=3), kill(3)], val_losses(1, 2, 3, 4))
    stopping = EarlyStopping(patience=3)
    model = fit([BackupAndRestore(tmp_path), stopping], val_losses(1, 2, 3, 4, 5, 6))
    assert (stopping.stopped_epoch, model.position[0]) == (3, 4)


def test_the_best_weights_outlive_the_process(tmp_path):
    with pytest.raises(Killed):
        fit(
            [BackupAndRestore(tmp_path), EarlyStopping(patience=9, restore_best_weights=True), kill(3)],
            val_losses(2, 1, 3, 4),
        )
    stopping = EarlyStopping(patience=9, restore_best_weights=True)
    assert fit([BackupAndRestore(tmp_path), stopping], val_losses(2, 1, 3, 4)).weight == 2


def test_a_training_that_had_stopped_when_it_was_backed_up_stays_stopped(tmp_path):
    backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
    fit([backup, EarlyStopping()], val_losses(1, 2, 3, 4))
    model = fit([backup, EarlyStopping()], val_losses(1, 2, 3, 4))
    assert (model.position, model.weight) == ((2, 0), 2)


def test_a_backup_that_is_kept_lets_a_longer_fit_go_on(tmp_path):
    backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
    fit(backup, val_losses(1, 1))
    assert fit(backup, val_losses(1, 1, 1)).weight == 3


def test_other_files_in_the_folder_of_the_backup_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    fit(BackupAndRestore(tmp_path, double_checkpoint=True), val_losses(1, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_backup_that_cannot_be_read_gives_way_to_the_one_before(tmp_path):
    backup = BackupAndRestore(tmp_path, double_checkpoint=True, delete_checkpoint=False)
    fit(backup, val_losses(1, 1, 1))
    (tmp_path / "latest.pt").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="latest.pt cannot be read, the backup before it is taken"):
        assert fit(backup, val_losses(1, 1, 1)).weight == 3


def test_a_backup_killed_between_two_files_leaves_the_one_before(tmp_path):
    backup = BackupAndRestore(tmp_path, double_checkpoint=True, delete_checkpoint=False)
    fit(backup, val_losses(1, 1))
    (tmp_path / "latest.pt").unlink()
    epochs: list[int] = []
    fit([backup, LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))], val_losses(1, 1))
    assert epochs == [1]


def test_a_single_backup_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "latest.pt").write_bytes(b"torn")
    with pytest.raises(MirrorError, match="cannot be read"):
        fit(BackupAndRestore(tmp_path), val_losses(1))


def test_all_replicas_take_the_first_ones_word_for_what_is_there(tmp_path):
    backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
    fit(backup, val_losses(1, 1))
    # Replica 0 has deleted it, another replica still sees it.
    assert fit(backup, val_losses(1), leads=False, agree=lambda there: False).weight == 1


def test_an_empty_backup_dir_is_refused():
    with pytest.raises(UsageError, match="`backup_dir` is empty"):
        BackupAndRestore("")


# --------------------------------------------------------------------------- CSVLogger


def test_the_table_is_that_of_keras(keras, tmp_path):
    logs = [{"loss": 0.5, "accuracy": 0.25, "top": [1, 2]}, {"loss": 0.25, "accuracy": 0.5, "top": [3, 4]}]
    theirs, ours = tmp_path / "keras.csv", tmp_path / "ours.csv"
    keras_fit(keras.callbacks.CSVLogger(str(theirs), separator=";"), logs)
    fit(CSVLogger(ours, separator=";"), logs)
    rows = [list(csv.reader(path.open(newline=""), delimiter=";")) for path in (theirs, ours)]
    assert rows[0][0] == rows[1][0] == ["epoch", "accuracy", "loss", "top", "val_accuracy", "val_loss", "val_top"]
    # Keras puts a list into quotes of its own on top of those of the format.
    assert [[cell.strip('"') for cell in row] for row in rows[0]] == rows[1]


def test_a_second_fit_begins_the_file_anew_or_adds_to_it(tmp_path):
    path = tmp_path / "logs" / "log.csv"
    for append, many in ((False, 2), (False, 2), (True, 4)):
        fit(CSVLogger(path, append=append), val_losses(1, 2))
        rows = list(csv.DictReader(path.open(newline="")))
        assert [row["epoch"] for row in rows] == ["0", "1"] * (many // 2)


def test_a_file_to_append_to_that_is_not_there_or_empty_gets_its_header(tmp_path):
    (tmp_path / "empty.csv").touch()
    for name in ("empty.csv", "new.csv"):
        fit(CSVLogger(tmp_path / name, append=True), val_losses(1))
        assert (tmp_path / name).read_text().splitlines() == ["epoch,loss,val_loss", "0,1,1"]


def test_values_are_appended_in_the_columns_of_the_file(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("epoch,val_loss,loss,accuracy\n")
    fit(CSVLogger(path, append=True), [{"loss": 1.0, "val_loss": 2.0}])
    assert path.read_text().splitlines()[1] == "0,2.0,1.0,NA"


def test_a_file_without_a_column_for_what_is_logged_is_not_appended_to(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss\n")
    with pytest.raises(UsageError, match="no column for val_loss, but: epoch, loss"):
        fit(CSVLogger(path, append=True), val_losses(1))


def test_validation_every_second_epoch_has_its_column(tmp_path):
    fit(CSVLogger(tmp_path / "log.csv"), [{"loss": 1}, {"loss": 2, "val_loss": 3}])
    assert (tmp_path / "log.csv").read_text().splitlines() == ["epoch,loss,val_loss", "0,1,NA", "1,2,3"]


# --------------------------------------------------------------------------- TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def tensorboard() -> None:
    pytest.importorskip("tensorboard")


def test_tensorboard_gets_the_tags_of_keras(tensorboard, tmp_path):
    board = TensorBoard(tmp_path, update_freq=2, histogram_freq=1, write_steps_per_second=True)
    fit(board, val_losses(1, 2), steps=4, step_logs=[{"loss": 8}, {"loss": 4}])
    train, validation = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    assert train["epoch_loss"] == [(0, 1), (1, 2)]
    assert train["batch_loss"] == [(2, 8), (4, 8), (6, 4), (8, 4)]
    assert train["epoch_learning_rate"] == [(0, 1), (1, 1)]
    assert train["epoch_steps_per_second"][0][1] > 0
    assert validation == {"epoch_loss": [(0, 1), (1, 2)]}
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    assert events.Tags()["histograms"] == ["weight/histogram"]


def test_weights_that_are_no_numbers_do_not_end_a_training_that_draws_them(tensorboard, tmp_path):
    board, model = TensorBoard(tmp_path, histogram_freq=1), Model()
    board.set_model(model)
    diverged = {"bias": torch.tensor([math.nan]), "weight": torch.tensor([1.0, math.inf, 2.0]), "none": torch.ones(0)}
    model.state_dict = lambda: diverged  # type: ignore[method-assign,assignment,return-value]
    board.on_epoch_end(0, {"loss": math.nan})
    board.close()
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    assert [h.histogram_value.num for h in events.Histograms("weight/histogram")] == [2]
    assert events.Tags()["histograms"] == ["weight/histogram"]


def test_an_evaluation_is_written_against_the_steps_done(tensorboard, tmp_path):
    board = TensorBoard(tmp_path)
    several = CallbackList([board], model=Model(), params={"steps": 5})
    several.on_train_begin()
    several.on_epoch_begin(1)
    several.on_test_end({"loss": 3.0, "several": torch.ones(2), "note": "as before", "nothing": None})
    several.close()
    assert scalars(tmp_path / "validation") == {"evaluation_loss_vs_iterations": [(10, 3)]}


def test_a_model_without_an_optimizer_of_its_own_has_no_learning_rate_to_write(tensorboard, tmp_path):
    board = TensorBoard(tmp_path)
    model = Model()
    board.set_model(model)
    model.optimizer = None  # type: ignore[assignment]
    board.on_epoch_end(0, {"loss": 1.0})
    board.close()
    assert scalars(tmp_path / "train") == {"epoch_loss": [(0, 1)]}


def test_nothing_is_left_open_after_an_error(tensorboard, tmp_path):
    board = TensorBoard(tmp_path)
    with pytest.raises(Killed):
        fit([board, kill(1)], val_losses(1, 2))
    assert board._writers == {}
    assert scalars(tmp_path / "train")["epoch_loss"] == [(0, 1)]


def test_without_tensorboard_the_error_says_what_to_install(monkeypatch, tmp_path):
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(records.importlib, "import_module", missing)
    with pytest.raises(MirrorError, match=r"pip install 'mirror_nb\[tensorboard\]'"):
        TensorBoard(tmp_path)


@pytest.mark.parametrize("wrong", ["step", 0, True])
def test_an_update_freq_that_there_is_not_is_refused(tmp_path, wrong):
    with pytest.raises(UsageError, match="`update_freq` is 'epoch', 'batch' or a number of steps"):
        TensorBoard(tmp_path, update_freq=wrong)


# --------------------------------------------------------------------------- the others


def test_training_ends_at_the_first_loss_that_is_no_number(capsys):
    model = fit(TerminateOnNaN(), val_losses(1, 1), steps=3, step_logs=[{"loss": 1.0}, {"loss": math.inf}])
    assert model.weight == 4
    assert "batch 0: the loss is inf, training stops" in capsys.readouterr().out


def test_a_loss_that_is_no_number_can_be_an_error():
    with pytest.raises(RuntimeError, match="the loss is nan after batch 0"):
        fit(TerminateOnNaN(raise_error=True), val_losses(1), step_logs=[{"loss": math.nan}])


def test_functions_are_called_as_hooks():
    calls: list[Any] = []
    callback = LambdaCallback(
        on_epoch_begin=None,
        on_epoch_end=lambda epoch, logs: calls.append((epoch, logs["loss"])),
        on_train_end=lambda logs: calls.append("end"),
    )
    fit(callback, val_losses(3))
    assert calls == [(0, 3), "end"]


def test_a_hook_that_there_is_not_is_refused():
    with pytest.raises(UsageError, match="'on_epoch_ends' is no hook; there are: on_train_begin"):
        LambdaCallback(on_epoch_ends=print)
    with pytest.raises(UsageError, match="`on_epoch_end` is a function, not 3"):
        LambdaCallback(on_epoch_end=3)  # type: ignore[arg-type]


def test_a_replica_that_does_not_lead_writes_and_says_nothing(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    saved: list[Path] = []
    model = Model()
    # The model itself knows which replica writes; it has to be asked on all of them.
    model.save = lambda path, include_optimizer=True: saved.append(path)  # type: ignore[method-assign]
    several = [
        CSVLogger(tmp_path / "log.csv"),
        TensorBoard(tmp_path / "board"),
        EarlyStopping(verbose=1),
        LearningRateScheduler(lambda epoch: 1.0, verbose=1),
        ModelCheckpoint(tmp_path / "new" / "m.pt", verbose=1),
        BackupAndRestore(tmp_path / "backup"),
    ]
    fit(several, val_losses(1, 2), model=model, leads=False)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
    assert [path.name for path in saved] == ["m.pt", "latest.pt"] * 2


def test_no_warning_is_given_by_a_training_in_which_all_is_there(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit([EarlyStopping(), ReduceLROnPlateau(), ModelCheckpoint(tmp_path / "m.pt")], val_losses(2, 1))


def test_a_callback_keeps_nothing_of_those_who_called_it_and_a_list_inside_a_fit_gives_back_the_fits():
    said: list[str] = []
    callback = LambdaCallback()
    before = dict(vars(callback))
    fitting = CallbackList([callback, callback], leads=False, agree=lambda value: 7, tell=said.append)
    inside = CallbackList(callback)
    assert (callback._leads, callback._agree(1)) == (True, 1)
    inside.close()
    assert (callback._leads, callback._agree(1), callback._tell) == (False, 7, said.append)
    fitting.close()
    assert vars(callback) == {**before, "params": {}}
    assert (callback._leads, callback._agree(1)) == (True, 1)
