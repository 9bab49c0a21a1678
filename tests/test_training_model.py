"""compile, fit, evaluate, predict and save in the hands of a user: what comes back, what is refused, what survives."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from driving import doing, press_ctrl_c
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import mirror_nb as mnb
from mirror_nb.replica.runtime import _in_users_code
from mirror_nb.training import job
from mirror_nb.training.feeds import feed
from mirror_nb.training.loop import Note
from mirror_nb.training.running import Guard, Running, task_of

X = torch.arange(50 * 4, dtype=torch.float32).reshape(50, 4).sin()
Y = (X.sum(1) > 0).long()


@pytest.fixture(scope="module", params=["one device", "two replicas"])
def place(request: pytest.FixtureRequest, two: mnb.MirroredStrategy) -> Any:
    return two if request.param == "two replicas" else mnb.OneDeviceStrategy("cpu:0")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 2))


def made(strategy: Any, make: Any = network, **compiled: Any) -> mnb.Model:
    torch.manual_seed(3)
    with strategy.scope():
        model = mnb.Model(make())
        model.compile(**{"optimizer": ("adam", {"lr": 0.02}), "loss": "cross_entropy", **compiled})
    return model


def weights(model: mnb.Model) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(these: dict[str, Tensor], those: dict[str, Tensor]) -> bool:
    return all(torch.equal(these[name], those[name]) for name in those)


# --------------------------------------------------------------------------- what comes back


def test_the_example_of_the_readme_learns(place, tmp_path):
    model = made(place, metrics=["accuracy"])
    history = model.fit(X, Y, epochs=8, batch_size=10, validation_data=(X, Y), verbose=0)
    assert history.epoch == list(range(8))
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert history.history["val_accuracy"][-1] > 0.85
    loss, accuracy = model.evaluate(X, Y, verbose=0)
    assert accuracy == history.history["val_accuracy"][-1]
    assert loss == pytest.approx(history.history["val_loss"][-1])
    assert model.evaluate(X, Y, verbose=0, return_dict=True) == {"loss": loss, "accuracy": accuracy}
    model.save(tmp_path / "model.pt")
    plain = network()
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True)["state_dict"])
    torch.testing.assert_close(plain.eval()(X[:7]), model.predict(X[:7], verbose=0), rtol=1e-5, atol=1e-6)
    with place.scope():
        again = mnb.load_model(tmp_path / "model.pt")
    torch.testing.assert_close(again.predict(X, verbose=0), model.predict(X, verbose=0))
    assert again.evaluate(X, Y, verbose=0) == pytest.approx([loss, accuracy])


def test_no_metric_takes_the_name_of_another_or_of_the_loss(place):
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none") + 1

    weight = (Y == 1).float()
    model = made(place, loss="cross_entropy", metrics=[loss, "accuracy"], weighted_metrics=["accuracy"])
    found = model.evaluate(X, Y, sample_weight=weight, verbose=0, return_dict=True)
    model.eval()
    with torch.no_grad():
        each, right = F.cross_entropy(model(X), Y, reduction="none"), (model(X).argmax(1) == Y).float()
    assert found == pytest.approx(
        {
            "loss": float((each * weight).mean()),
            "loss_1": float(each.mean()) + 1,
            "accuracy": float(right.mean()),
            "weighted_accuracy": float((right * weight).sum() / weight.sum()),
        }
    )
    assert list(found) == ["loss", "loss_1", "accuracy", "weighted_accuracy"]


def test_without_metrics_evaluate_gives_the_loss_alone(place):
    model = made(place)
    assert isinstance(model.evaluate(X, Y, verbose=0), float)


def test_a_model_outside_every_scope_trains_in_this_process():
    model = mnb.Model(nn.Linear(4, 2))
    model.compile(optimizer="sgd", loss="cross_entropy")
    before = weights(model)
    model.fit(X, Y, verbose=0)
    assert not equal(weights(model), before)
    assert "DefaultStrategy" in repr(model.strategy)


def test_the_names_of_a_models_state_are_its_networks():
    model = mnb.Model(nn.Linear(4, 2))
    assert list(model.state_dict()) == ["weight", "bias"]
    outer = nn.Sequential(model)
    outer.load_state_dict(outer.state_dict())
    assert list(outer.state_dict()) == ["0.network.weight", "0.network.bias"]


def test_fit_reads_as_a_line_an_epoch(two, capsys):
    made(two).fit(X, Y, epochs=2, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]


def test_inputs_that_are_tuples_and_dicts_are_the_networks_arguments(place):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.linear(a) - self.linear(b)

    model = made(place, Two)
    model.fit((X, -X), Y, verbose=0)
    by_place = model.predict((X, -X), verbose=0)
    torch.testing.assert_close(model.predict({"b": -X, "a": X}, verbose=0), by_place)


def test_an_endless_stream_trains_for_the_steps_that_are_asked_for(place):
    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield X[0], Y[0]

    seen = []
    watch = mnb.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    loader = DataLoader(Endless(), batch_size=4)
    model = made(place)
    model.fit(loader, epochs=2, steps_per_epoch=3, verbose=0, callbacks=[watch])
    assert seen == [0, 1, 2, 0, 1, 2]
    assert model.training_state()["total_steps"] == 6


def test_validation_every_second_epoch(place):
    history = made(place).fit(X, Y, epochs=4, validation_split=0.2, validation_freq=2, verbose=0).history
    assert (len(history["loss"]), len(history["val_loss"])) == (4, 2)


def test_the_learning_rate_is_set_here_and_holds_there(place):
    model = made(place, optimizer=("sgd", {"lr": 0.1}))
    model.fit(X, Y, verbose=0)
    model.learning_rate = 0.0
    before = weights(model)
    model.fit(X, Y, verbose=0)
    assert equal(weights(model), before)
    assert model.learning_rate == 0.0


def test_a_schedule_of_callbacks_reaches_the_replicas(place):
    model = made(place, optimizer=("sgd", {"lr": 0.1}))
    schedule = mnb.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0 if epoch else rate)
    states = []
    keep = mnb.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: states.append(weights(model)))
    history = model.fit(X, Y, epochs=2, callbacks=[schedule, keep], verbose=0)
    assert history.history["learning_rate"] == [0.1, 0.0]
    assert equal(*states)


def test_what_a_callback_adds_to_the_model_and_its_optimizer_is_trained_from_then_on(two):
    ends = []
    for strategy in (mnb.OneDeviceStrategy("cpu:0"), two):
        model = made(strategy, lambda: nn.Sequential(nn.Linear(4, 2)), optimizer=("sgd", {"lr": 0.1}))

        def grow(epoch: int, logs: Any, model: mnb.Model = model) -> None:
            if epoch == 1:
                torch.manual_seed(4)
                layer = nn.Linear(2, 2)
                model.network.append(layer)
                model.optimizer.add_param_group({"params": layer.parameters()})

        grows = mnb.callbacks.LambdaCallback(on_epoch_begin=grow)
        losses = model.fit(X, Y, epochs=3, shuffle=False, callbacks=grows, verbose=0).history["loss"]
        ends.append({"losses": torch.tensor(losses), **weights(model)})
    torch.testing.assert_close(*ends)


def test_callbacks_run_in_this_process_with_keras_hooks_in_order(place):
    seen: list[str] = []
    hooks = ("train_begin", "epoch_begin", "train_batch_begin", "train_batch_end", "test_begin", "test_end")
    hooks += ("epoch_end", "train_end")
    calls = {f"on_{name}": lambda *a, name=name, **k: seen.append(name) for name in hooks}
    tell = mnb.callbacks.Callback()
    for name, call in calls.items():
        setattr(tell, name, call)
    made(place).fit(X, Y, batch_size=25, validation_data=(X, Y), callbacks=[tell], verbose=0)
    batch = ["train_batch_begin", "train_batch_end"]
    assert seen == [
        "train_begin", "epoch_begin", *batch, *batch, "test_begin", "test_end", "epoch_end", "train_end",
    ]  # fmt: skip


def test_a_callback_stops_training(place):
    stop = mnb.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
    model = made(place)
    assert made(place).fit(X, Y, epochs=9, callbacks=[stop], verbose=0).epoch == [0, 1]
    # The next one begins anew.
    assert model.fit(X, Y, epochs=3, verbose=0).epoch == [0, 1, 2]


def test_the_best_weights_come_back(place):
    states = []
    model = made(place, optimizer=("sgd", {"lr": 30.0}))
    keep = mnb.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: states.append(weights(model)))
    best = mnb.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
    history = model.fit(X, Y, epochs=6, callbacks=[keep, best], verbose=0)
    assert equal(weights(model), states[history.best_epoch("loss") or 0])
    # The replicas have them too.
    torch.testing.assert_close(model.predict(X, verbose=0), model.network.eval()(X).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["fit", "evaluate", "predict"])
def test_the_data_go_once_nobody_has_them(place, what):
    # A loader's persistent workers would run on, and others that are forked meanwhile complain of them.
    model = made(place)
    data = DataLoader(TensorDataset(X, Y), batch_size=10)
    there = weakref.ref(data.dataset)
    gc.collect()
    gc.disable()
    try:
        getattr(model, what)(data, verbose=0)
        del data
        assert there() is None
    finally:
        gc.enable()


# --------------------------------------------------------------------------- what is refused


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 0}, "`epochs` is 0"),
    ({"initial_epoch": -1}, "`initial_epoch` is -1"),
    ({"batch_size": 0}, "0"),
    ({"validation_data": (X, Y, Y, Y)}, "4 members"),
    ({"class_weight": [1, 2]}, "from class numbers to weights"),
    ({"class_weight": {"cat": 1.0}}, "{'cat': 1.0}; give a dict from class numbers to weights"),
    ({"x": None}, "`x` is None"),
    ({"y": Y[:-1]}, "49"),
    ({"steps_per_epoch": 0}, "`steps_per_epoch` is 0"),
    ({"steps_per_epoch": 2.0}, "`steps_per_epoch` is 2.0"),
    ({"validation_freq": 0}, "`validation_freq` is 0"),
    ({"validation_freq": "epoch"}, "`validation_freq` is 'epoch'"),
    ({"callbacks": ["EarlyStopping"]}, "EarlyStopping"),
    ({"verbose": 7}, "7"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_arguments_say_what_was_given(arguments, words):
    model = made(mnb.OneDeviceStrategy("cpu:0"))
    with pytest.raises(mnb.UsageError, match=words.replace("(", r"\(")):
        model.fit(**{"x": X, "y": Y, "verbose": 0, **arguments})


def test_numbers_of_numpy_are_numbers():
    model = made(mnb.OneDeviceStrategy("cpu:0"), clip_norm=np.float32(1.0), accumulate_steps=np.int64(2))
    history = model.fit(
        X,
        Y,
        batch_size=np.int64(10),
        epochs=np.int64(3),
        initial_epoch=np.int64(1),
        steps_per_epoch=np.int64(2),
        validation_split=np.float32(0.5),
        validation_steps=np.int64(1),
        validation_freq=np.int64(2),
        verbose=0,
    )
    assert history.epoch == [1, 2]
    assert len(history.history["val_loss"]) == 1


def test_a_distributed_loader_is_divided_by_fit_itself(place):
    loader = DataLoader(TensorDataset(X, Y), batch_size=10)
    losses = []
    for data in (loader, place.experimental_distribute_dataset(loader)):
        torch.manual_seed(0)
        losses.append(made(place).fit(data, epochs=2, verbose=0).history["loss"])
    assert losses[0] == losses[1]
    dataset = place.experimental_distribute_dataset(loader)
    validated = made(place).fit(X, Y, batch_size=7, validation_data=dataset, verbose=0)
    assert validated.history["val_loss"]
    with pytest.raises(mnb.UsageError, match="divide batches themselves"):
        made(place).fit(place.experimental_distribute_dataset((X, Y), batch_size=10))


def test_two_loaders_of_one_generator_give_the_batches_of_one_device(two):
    found = []
    for strategy in (mnb.OneDeviceStrategy("cpu:0"), two):
        model = made(strategy, lambda: nn.Linear(4, 2))
        generator = torch.Generator().manual_seed(5)
        # To draw the seed of its workers counts, too.
        first = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, generator=generator)
        second = DataLoader(TensorDataset(X, Y), batch_size=8, generator=generator)
        model.fit(first, epochs=3, validation_data=second, verbose=0)
        found.append((weights(model), generator.get_state()))
    (alone, there), (mirrored, here) = found
    assert torch.equal(here, there)
    for name, value in alone.items():
        torch.testing.assert_close(mirrored[name], value)


def test_evaluate_predict_and_validations_leave_a_loaders_generator_where_one_device_does(place):
    uses: list[Any] = [
        lambda model, loader: model.evaluate(loader, verbose=0),
        lambda model, loader: model.predict(loader, verbose=0),
        lambda model, loader: model.fit(X, Y, validation_data=loader, verbose=0),
    ]
    for use in uses:
        generator, other = (torch.Generator().manual_seed(5) for _ in range(2))
        use(made(place), DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, generator=generator))
        list(DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, generator=other))
        assert torch.equal(generator.get_state(), other.get_state())


def test_the_logs_of_a_batch_that_a_callback_keeps_stay_those_of_the_batch(place):
    kept: list[Any] = []
    keep = mnb.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: kept.append(logs))
    fitted = made(place).fit(X, Y, batch_size=25, validation_data=(X, Y), callbacks=keep, verbose=0)
    assert [list(logs) for logs in kept] == [["loss"], ["loss"]]
    assert list(fitted.history) == ["loss", "val_loss"]


def test_keras_names_that_torch_has_under_another_say_which():
    model = mnb.Model(nn.Linear(4, 2))
    with pytest.raises(AttributeError, match=r"'Model' has no `get_weights`: write model\.state_dict\(\)"):
        model.get_weights()
    with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
        _ = model.nothing
    with pytest.raises(AttributeError, match=r"no `weights`: write model\.state_dict\(\)"):
        _ = model.weights
    assert not hasattr(model, "summary")


def test_weights_of_a_checkpoint_are_loaded_as_the_errors_say(place, tmp_path):
    path = tmp_path / "weights"
    model, other = made(place), made(place, optimizer="sgd")
    model.fit(X, Y, verbose=0, callbacks=mnb.callbacks.ModelCheckpoint(path, save_weights_only=True))
    with pytest.raises(AttributeError, match=r"no `load_weights`: write model\.load_training\(path\)"):
        other.load_weights(path)
    with pytest.raises(mnb.UsageError, match=r'its "state_dict"; write model\.load_training\(path\)'):
        other.load_state_dict(torch.load(path, weights_only=True))
    other.load_training(path)
    assert torch.equal(model.predict(X, verbose=0), other.predict(X, verbose=0))


def test_what_keras_would_call_of_a_subclass_is_told_its_name_here():
    class Ported(mnb.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def call(self, x: Any) -> Any:
            return self.layer(x)

        def train_step(self, data: Any) -> Any:
            return {"loss": 0.0}

        def test_step(self, data: Any) -> Any:
            return {"loss": 0.0}

    class Renamed(Ported):
        def training_step(self, batch: Any) -> Any:
            return self.layer(batch[0]).mean()

        validation_step = training_step

    with (
        pytest.warns(UserWarning, match=r"`train_step`.* `training_step\(batch\)`"),
        pytest.warns(UserWarning, match=r"`test_step`.* `validation_step\(batch\)`"),
    ):
        Ported().compile("sgd", "mse")
    with pytest.raises(mnb.UsageError, match="Ported has no `forward`, the name for Keras's `call`"):
        Ported().predict(X, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Renamed().compile("sgd", "mse")


def test_what_is_not_compiled_cannot_be_fitted():
    model = mnb.Model(nn.Linear(4, 2))
    for call in (model.fit, model.evaluate):
        with pytest.raises(mnb.UsageError, match=r"call compile\(optimizer"):
            call(X, Y)
    assert model.predict(X, verbose=0).shape == (50, 2)
    with pytest.raises(mnb.UsageError, match="no optimizer"):
        _ = model.learning_rate


def test_a_model_of_no_network_says_what_it_lacks():
    class Empty(mnb.Model):
        pass

    with pytest.raises(mnb.UsageError, match="Empty has no `forward`"):
        Empty().predict(X, verbose=0)
    with pytest.raises(mnb.UsageError, match=r"give an nn\.Module"):
        mnb.Model("resnet")  # type: ignore[arg-type]
    with pytest.raises(mnb.UsageError, match="training_step"):
        mnb.Model(nn.Linear(4, 2)).compile(optimizer=None)
    with pytest.raises(mnb.UsageError, match="other names"):
        mnb.Model(nn.Linear(4, 2)).optimizer = "adam"


def test_data_without_targets_are_told_what_they_lack(place):
    model = made(place)
    for use in (lambda: model.fit(X, verbose=0), lambda: model.evaluate(DataLoader(X, batch_size=7), verbose=0)):
        with pytest.raises(mnb.UsageError, match=r"the loss has no targets: give `y`, or data whose batches are \("):
            use()


def test_a_model_without_a_loss_says_how_to_give_one(place):
    model = made(place, loss=None)
    with pytest.raises(mnb.UsageError, match=r"compile\(loss=...\), or define training_step"):
        model.fit(X, Y, verbose=0)
    with pytest.raises(mnb.UsageError, match="define validation_step"):
        model.evaluate(X, Y, verbose=0)


class SaysNothing(mnb.Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def training_step(self, batch: Any) -> Any:
        return {"accuracy": 1.0}


def test_a_training_step_without_a_loss_is_told_so(place):
    with place.scope():
        model = SaysNothing()
        model.compile()
    with pytest.raises(mnb.UsageError, match=r"training_step returned a dict with \['accuracy'\]"):
        model.fit(X, Y, verbose=0)


class SaysMore(mnb.Model):
    def __init__(self, more: dict[str, Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.more = more

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": F.cross_entropy(self.linear(x), y), **self.more}


def says(strategy: Any, **more: Any) -> mnb.Model:
    with strategy.scope():
        model = SaysMore(more)
        model.compile("sgd")
    return model


def test_a_training_step_may_tell_numbers_of_any_kind_under_any_names(place):
    more = {"whole": 3, "flag": True, "half": torch.full((1,), 0.5), "…" * 40: 1.0}
    more |= {f"of part {i}": float(i) for i in range(600)}
    history = says(place, **more).fit(X, Y, batch_size=10, epochs=2, verbose=0).history
    assert {name: history[name] for name in more} == {name: [float(value)] * 2 for name, value in more.items()}


def test_metrics_that_a_training_step_of_ones_own_leaves_unmeasured_are_not_logged(place):
    model = says(place, accuracy=0.5)
    model.compile("sgd", metrics=["accuracy", "categorical_accuracy"])
    history = model.fit(X, Y, batch_size=6, verbose=0).history
    assert history.keys() == {"loss", "accuracy"}
    assert history["accuracy"] == [0.5]


@pytest.mark.parametrize("told", ["a word", torch.ones(3), None], ids=["word", "vector", "nothing"])
def test_a_training_step_that_tells_no_number_is_told_so(place, told):
    with pytest.raises(mnb.UsageError, match=r"training_step returned a .* as 'told'; beside the loss there are"):
        says(place, told=told).fit(X, Y, verbose=0)


def test_outputs_that_have_no_row_for_each_example_cannot_be_predicted(place):
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    with place.scope():
        model = mnb.Model(Sum())
    with pytest.raises(mnb.UsageError, match="one row an example"):
        model.predict(X, verbose=0)


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_an_evaluation_of_nothing_says_so(place):
    with pytest.raises(mnb.UsageError, match="evaluate was given no examples"):
        made(place).evaluate(DataLoader(Nothing(), batch_size=4), verbose=0)


class Once(IterableDataset[Any]):
    def __init__(self) -> None:
        self.left = 4

    def __iter__(self) -> Iterator[Any]:
        while self.left:
            self.left -= 1
            yield X[self.left], Y[self.left]


def test_a_learning_rate_that_is_set_as_keras_has_it_is_told_of_once(place):
    class Rate(mnb.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            setattr(self.model.optimizer, self.name, 0.5)

    rate = Rate()
    model = made(place)
    for name, other in ("learning_rate", "lr"), ("lr", "learning_rate"):
        rate.name = name  # type: ignore[attr-defined]
        with pytest.warns(
            UserWarning, match=rf"`optimizer.{name}` has changed nothing.*`model.learning_rate`"
        ) as told:
            model.fit(X, Y, epochs=3, batch_size=10, verbose=0, callbacks=[rate])
        assert len(told) == 1
        assert other not in str(told[0].message).split("`")[1]
    assert model.learning_rate == 0.02
    # One that had it before has it for a reason.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, Y, epochs=2, batch_size=10, verbose=0, callbacks=[rate])


def test_an_epoch_without_batches_is_told(place):
    with pytest.warns(UserWarning, match="epoch 2 had no batches") as told:
        history = made(place).fit(DataLoader(Once(), batch_size=2), epochs=2, verbose=0)
    assert len([one for one in told if "had no batches" in str(one.message)]) == 1
    assert len(history.history["loss"]) == 1


def test_a_scheduler_goes_on_in_each_of_several_fits_that_are_seeded_alike(place):
    model = made(place, optimizer=("sgd", {"lr": 1.0}), scheduler=("StepLR", {"step_size": 1, "gamma": 0.5}))
    rates = []
    for _ in range(3):
        torch.manual_seed(0)
        model.fit(X, Y, verbose=0)
        rates.append(model.learning_rate)
    assert rates == [0.5, 0.25, 0.125]


def test_a_scheduler_that_waits_for_a_plateau_goes_by_validations_where_there_are_some(place):
    model = made(place, optimizer=("sgd", {"lr": 0.1}), scheduler=("ReduceLROnPlateau", {"patience": 0}))
    # In the epochs between, the loss of the training is another number: less, and the next validation no better.
    history = model.fit(X, Y, epochs=6, batch_size=10, validation_data=(9 * X, 1 - Y), validation_freq=3, verbose=0)
    assert history.history["val_loss"][1] > history.history["val_loss"][0] > history.history["loss"][-1]
    assert history.history["learning_rate"] == pytest.approx([0.1] * 6)
    assert model.learning_rate == pytest.approx(0.01)


def test_a_scheduler_that_waits_for_a_plateau_cannot_go_by_steps(place):
    with pytest.raises(mnb.UsageError, match="goes by the loss of an epoch; leave scheduler_interval"):
        made(place, scheduler="ReduceLROnPlateau", scheduler_interval="step")


def test_lbfgs_refuses_what_it_cannot_do():
    model = made(mnb.OneDeviceStrategy("cpu:0"), optimizer="lbfgs", accumulate_steps=2)
    with pytest.raises(mnb.UsageError, match="LBFGS goes over each batch several times"):
        model.fit(X, Y, verbose=0)


# --------------------------------------------------------------------------- what survives


class Fails(Exception):
    pass


def test_an_error_in_the_network_leaves_a_model_that_can_be_fitted(place):
    class Brittle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            if (x > 50).any():
                raise ValueError("too large")
            return self.linear(x)

    model = made(place, Brittle, optimizer=("sgd", {"lr": 0.1}))
    bad = X.clone()
    bad[30] = 100.0
    with pytest.raises(ValueError, match="too large"):
        model.fit(bad, Y, batch_size=10, shuffle=False, verbose=0)
    after = weights(model)
    # Three whole steps were done.
    fresh = made(place, Brittle, optimizer=("sgd", {"lr": 0.1}))
    fresh.fit(X[:30], Y[:30], batch_size=10, shuffle=False, verbose=0)
    assert equal(after, weights(fresh))
    assert len(model.fit(X, Y, epochs=2, verbose=0).epoch) == 2


def test_an_error_in_a_callback_ends_fit_and_nothing_else(place):
    def fail(epoch: int, logs: Any) -> None:
        raise Fails

    model = made(place)
    with pytest.raises(Fails):
        model.fit(X, Y, epochs=3, callbacks=mnb.callbacks.LambdaCallback(on_epoch_end=fail), verbose=0)
    assert model.fit(X, Y, verbose=0).epoch == [0]


class Interrupted(mnb.callbacks.Callback):
    """Tells whether `fit` was well under way, and whether it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.ended = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.steps += 1

    def on_train_end(self, logs: Any = None) -> None:
        self.ended = True


def replicas_weights(strategy: Any, model: mnb.Model) -> list[dict[str, Tensor]]:
    def states() -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in model.network.state_dict().items()}

    found = strategy.run(states)
    return [{name: strategy.local_results(value)[i] for name, value in found.items()} for i in range(2)]


def test_ctrl_c_leaves_whole_steps_that_are_the_same_on_all_replicas(two):
    model = made(two, optimizer=("adam", {"lr": 0.01}))
    model.fit(X, Y, batch_size=5, verbose=0)
    for _ in range(5):
        watch = Interrupted()
        with doing(press_ctrl_c, lambda w=watch: w.steps > 2), pytest.raises(KeyboardInterrupt):
            model.fit(X, Y, batch_size=5, epochs=10**6, callbacks=[watch], verbose=0)
        assert not watch.ended
        first, second = replicas_weights(two, model)
        assert equal(first, second)
        assert equal(first, weights(model))
    assert model.fit(X, Y, epochs=2, verbose=0).epoch == [0, 1]


class PressesStop(nn.Linear):
    """A layer that never ends its third batch, and interrupts another process there."""

    def __init__(self, pid: int) -> None:
        super().__init__(4, 2)
        self.pid, self.calls = pid, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and mnb.get_replica_context().replica_id_in_sync_group == 1:
            os.kill(self.pid, signal.SIGINT)
        while self.calls >= 3:
            pass
        return super().forward(x)


def test_an_interrupt_in_a_users_code_shows_where(two):
    model = made(two, lambda: PressesStop(os.getpid()))
    with pytest.raises(KeyboardInterrupt) as caught:
        model.fit(X, Y, epochs=10_000, batch_size=6, verbose=0)
    (note,) = caught.value.__notes__
    assert "in forward" in note
    assert note.endswith("interrupted on all 2 replicas")
    assert "runtime.py" not in note


@pytest.mark.parametrize(("module", "there"), [("mirror_nb.training.loop", False), ("torch.nn", False), ("net", True)])
def test_lines_of_mirror_nb_and_torch_are_not_the_users(module, there):
    names = {"__name__": module}
    exec("def stop():\n    raise KeyboardInterrupt", names)
    with pytest.raises(KeyboardInterrupt) as caught:
        names["stop"]()
    # Without this test's own frame.
    assert _in_users_code(caught.value.with_traceback(caught.value.__traceback__.tb_next)) is there


def test_ctrl_c_on_one_device_leaves_a_whole_step():
    model = made(mnb.OneDeviceStrategy("cpu:0"), optimizer=("adam", {"lr": 0.01}))
    watch = Interrupted()
    with doing(press_ctrl_c, lambda: watch.steps > 2), pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=5, epochs=10**6, callbacks=[watch], verbose=0)
    assert model.optimizer is not None
    # Every parameter had the same number of steps.
    assert len({float(state["step"]) for state in model.optimizer.state.values()}) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert model.fit(X, Y, verbose=0).epoch == [0]


def test_replicas_that_stopped_a_step_apart_stand_where_the_further_one_does(two):
    model = made(two, optimizer=("adam", {"lr": 0.01}))
    model.fit(X, Y, verbose=0)

    def one_more_on_replica_1() -> None:
        if mnb.get_replica_context().replica_id_in_sync_group == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 1
            for state in optimizer.state.values():
                state["exp_avg"] += 1
            model._updates += 1

    optimizer = model.optimizer
    two.run(one_more_on_replica_1)
    place = two._place
    place.command(job.settle, (two, "none", model, model.optimizer, None))
    first, second = replicas_weights(two, model)
    assert equal(first, second)

    def moments() -> Tensor:
        return torch.cat([state["exp_avg"].reshape(-1) for state in optimizer.state.values()])

    assert torch.equal(*two.local_results(two.run(moments)))


def test_a_replica_that_dies_in_fit_is_named_and_the_next_fit_goes_on(two):
    model = made(two)
    model.fit(X, Y, verbose=0)
    pool = two._place._pool
    watch = Interrupted()

    def kill() -> None:
        pool.kill(1)

    with doing(kill, lambda: watch.steps > 2), pytest.raises(mnb.ReplicaDied, match="replica 1"):
        model.fit(X, Y, batch_size=5, epochs=10**6, callbacks=[watch], verbose=0, on_failure="raise")
    first, second = replicas_weights(two, model)
    assert equal(first, second)
    assert model.fit(X, Y, epochs=2, verbose=0).epoch == [0, 1]


def test_a_job_that_a_replica_does_not_know_is_an_error_that_says_so(two):
    made(two).predict(X, verbose=0)
    with pytest.raises(mnb.ReplicaError, match="does not know the job 'gone'"):
        two._place.command(job.advance, (two, "gone", 0, None))


def test_nothing_of_a_fit_stays_in_the_replicas(two):
    model = made(two)
    model.fit(X, Y, verbose=0, validation_data=(X, Y))
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    left = two.run(lambda: len(mnb.get_strategy()._place.seat.jobs))
    assert set(two.local_results(left)) == {0}


def test_fit_works_in_a_thread(two):
    model, problems = made(two), []

    def work() -> None:
        try:
            model.fit(X, Y, epochs=2, verbose=0)
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert problems == []


# --------------------------------------------------------------------------- going on


COMPILED: dict[str, dict[str, Any]] = {
    "adam": {},
    "momentum and a schedule": {
        "optimizer": ("sgd", {"lr": 0.1, "momentum": 0.9}),
        "scheduler": ("CosineAnnealingLR", {"T_max": 4}),
    },
    "schedule by step": {"scheduler": ("ExponentialLR", {"gamma": 0.9}), "scheduler_interval": "step"},
    "accumulated": {"accumulate_steps": 4},
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_saved_training_goes_on_as_if_it_had_never_stopped(place, name, tmp_path):
    settings = {**COMPILED[name], "metrics": ["accuracy"]}
    whole = made(place, **settings)
    torch.manual_seed(9)
    expected = whole.fit(X, Y, batch_size=6, epochs=4, verbose=0)
    first = made(place, **settings)
    torch.manual_seed(9)
    first.fit(X, Y, batch_size=6, epochs=2, verbose=0)
    first.save(tmp_path / "half.pt")
    with place.scope():
        again = mnb.load_model(tmp_path / "half.pt")
    # Dropout's random numbers and the order of the examples are those of the first.
    torch.manual_seed(1)
    history = again.fit(X, Y, batch_size=6, epochs=4, initial_epoch=2, verbose=0)
    assert equal(weights(again), weights(whole))
    assert history.history == expected.history
    assert again.learning_rate == pytest.approx(whole.learning_rate)


class Stops(mnb.callbacks.Callback):
    """Raises after some steps of an epoch."""

    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self.when = (epoch, batch)
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == self.when:
            raise Fails


@pytest.mark.parametrize(("data", "name"), [*(("arrays", name) for name in COMPILED), ("loader", "accumulated")])
def test_a_backup_in_the_middle_of_an_epoch_ends_on_the_same_weights(place, name, data, tmp_path):
    settings = {**COMPILED[name], "metrics": ["accuracy"]}

    def fit(model: mnb.Model, callbacks: Any) -> mnb.History:
        torch.manual_seed(9)
        if data == "arrays":
            return model.fit(X, Y, batch_size=6, epochs=3, verbose=0, callbacks=callbacks)
        order = torch.Generator().manual_seed(4)
        loader = DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True, generator=order)
        return model.fit(loader, epochs=3, verbose=0, callbacks=callbacks)

    whole = made(place, **settings)
    expected = fit(whole, None)
    first = made(place, **settings)
    backup = mnb.callbacks.BackupAndRestore(tmp_path, save_freq=3)
    with pytest.raises(Fails):
        fit(first, [Stops(1, 6), backup])
    again = made(place, **settings)
    history = fit(again, [mnb.callbacks.BackupAndRestore(tmp_path, save_freq=3)])
    if name == "accumulated":
        # Gradients of half a group were averaged for the file, which rounds them once more.
        for key, value in weights(whole).items():
            torch.testing.assert_close(weights(again)[key], value)
    else:
        assert equal(weights(again), weights(whole))
    for key, values in expected.history.items():
        assert history.history[key] == pytest.approx(values)


@pytest.mark.parametrize("batch_size", [1, 6])
def test_a_backup_keeps_sparse_gradients_that_wait_for_the_optimizer(place, batch_size, tmp_path):
    def table() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(20, 3, sparse=True), nn.Linear(3, 2))

    def fit(model: mnb.Model, *callbacks: Any) -> mnb.History:
        torch.manual_seed(9)
        rows = torch.arange(22).reshape(11, 2) % 20
        return model.fit(rows, Y[:11], batch_size=batch_size, epochs=2, verbose=0, callbacks=list(callbacks))

    settings = {"optimizer": ("sgd", {"lr": 0.5}), "accumulate_steps": 3}
    whole, again = made(place, table, **settings), made(place, table, **settings)
    fit(whole)
    with pytest.raises(Fails):
        fit(made(place, table, **settings), Stops(0, 1), mnb.callbacks.BackupAndRestore(tmp_path, save_freq=1))
    fit(again, mnb.callbacks.BackupAndRestore(tmp_path, save_freq=1))
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(again)[name], value)


class Numbers(IterableDataset[Any]):
    """A stream that has more batches than an epoch takes."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(X.roll(1, 0), Y.roll(1, 0), strict=True)


@pytest.mark.parametrize(("save_freq", "stop"), [("epoch", (2, 0)), (1, (1, 2)), (2, (2, 0))])
def test_a_stream_that_goes_on_from_epoch_to_epoch_is_taken_up_where_it_stood(place, save_freq, stop, tmp_path):
    def fit(model: mnb.Model, *callbacks: Any) -> mnb.History:
        loader = DataLoader(Numbers(), batch_size=3)
        torch.manual_seed(9)
        return model.fit(loader, epochs=4, steps_per_epoch=3, verbose=0, callbacks=list(callbacks))

    whole = made(place)
    expected = fit(whole)
    with pytest.raises(Fails):
        fit(made(place), Stops(*stop), mnb.callbacks.BackupAndRestore(tmp_path, save_freq=save_freq))
    again = made(place)
    history = fit(again, mnb.callbacks.BackupAndRestore(tmp_path, save_freq=save_freq))
    assert equal(weights(again), weights(whole))
    assert history.history["loss"] == pytest.approx(expected.history["loss"])


class Dealt(IterableDataset[Any]):
    """A stream that knows its length, of which each worker gives a part."""

    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        yield from zip(X[worker.id :: worker.num_workers], Y[worker.id :: worker.num_workers], strict=True)


def test_nothing_is_left_out_of_a_stream_whose_workers_have_a_last_batch_each(place):
    loader = DataLoader(Dealt(), batch_size=len(X) // 2 - 1, num_workers=2)
    assert len(loader) < 4
    assert len(made(place).predict(loader, verbose=0)) == len(X)


def test_a_training_on_a_stream_goes_on_with_other_data(place, tmp_path):
    first = made(place)
    first.fit(DataLoader(Numbers(), batch_size=3), epochs=2, steps_per_epoch=3, verbose=0)
    first.save(tmp_path / "model.pt")
    for other in (DataLoader(Numbers(), batch_size=5), DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True)):
        with place.scope():
            again = mnb.load_model(tmp_path / "model.pt")
        assert again.fit(other, epochs=3, initial_epoch=2, steps_per_epoch=2, verbose=0).epoch == [0, 1, 2]


@pytest.mark.parametrize("hooks", [(), ("on_test_batch_end",)])
def test_every_validation_sees_the_first_batches_of_a_stream(place, hooks):
    watch = mnb.callbacks.LambdaCallback(**{name: lambda batch, logs: None for name in hooks})
    model = made(place, optimizer=("sgd", {"lr": 0.0}))
    stream = DataLoader(Numbers(), batch_size=3)
    history = model.fit(X, Y, epochs=3, validation_data=stream, validation_steps=2, verbose=0, callbacks=[watch])
    first = model.evaluate(stream, steps=2, verbose=0)
    assert history.history["val_loss"] == pytest.approx([first] * 3)


class Overrated(Numbers):
    def __len__(self) -> int:
        return len(X) + 1


def test_no_hook_hears_of_a_batch_twice_where_a_stream_has_fewer_than_it_says(place):
    seen: dict[str, list[int]] = {"test": [], "predict": []}
    watch = mnb.callbacks.LambdaCallback(
        on_test_batch_end=lambda batch, logs: seen["test"].append(batch),
        on_predict_batch_end=lambda batch, logs: seen["predict"].append(batch),
    )
    model, loader = made(place), DataLoader(Overrated(), batch_size=len(X) // 2)
    model.evaluate(loader, verbose=0, callbacks=[watch])
    model.predict(loader, verbose=0, callbacks=[watch])
    assert seen == {"test": [0, 1], "predict": [0, 1]}


def test_a_training_saved_on_two_replicas_goes_on_alone(two, tmp_path):
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    alone = mnb.OneDeviceStrategy("cpu:0")
    whole = made(alone, plain)
    torch.manual_seed(9)
    whole.fit(X, Y, epochs=4, verbose=0)
    half = made(two, plain)
    torch.manual_seed(9)
    half.fit(X, Y, epochs=2, verbose=0)
    half.save(tmp_path / "half.pt")
    with alone.scope():
        again = mnb.load_model(tmp_path / "half.pt")
    again.fit(X, Y, epochs=4, initial_epoch=2, verbose=0)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(again)[name], value, rtol=1e-4, atol=1e-5)


def test_a_loaded_model_is_trained_anew_where_another_epoch_is_asked_for(place, tmp_path):
    first = made(place)
    first.fit(X, Y, epochs=2, verbose=0)
    first.save(tmp_path / "model.pt")
    with place.scope():
        again = mnb.load_model(tmp_path / "model.pt")
    assert again.fit(X, Y, epochs=1, verbose=0).epoch == [0]


def test_the_optimizers_state_is_of_a_network_with_as_many_groups(place):
    model = made(place)
    state = model.training_state()
    state["optimizer"]["param_groups"] *= 2
    with pytest.raises(mnb.UsageError, match="2 groups of parameters"):
        model.load_training_state(state)


def test_what_is_no_training_state_is_refused_and_the_next_fit_goes_on(place, tmp_path):
    model = made(place)
    model.save(tmp_path / "model.pt")
    for state in (torch.load(tmp_path / "model.pt"), model.state_dict(), {}, None):
        with pytest.raises(mnb.UsageError, match=r"is nothing that model.training_state\(\) returned"):
            model.load_training_state(state)
    assert model.fit(X, Y, verbose=0).epoch == [0]


# --------------------------------------------------------------------------- precision and formats


@pytest.mark.parametrize(("saved", "compiled"), [("rmsprop", "adam"), ("adam", "sgd"), ("sgd", "adagrad")])
def test_the_state_of_another_optimizer_is_told_and_not_taken(place, saved, compiled, tmp_path):
    first, second = made(place, optimizer=saved), made(place, optimizer=compiled)
    first.save(tmp_path / "model.pt")
    with pytest.raises(mnb.UsageError, match=r"is of another optimizer: it has .*; compile as the saved model was"):
        second.load_training(tmp_path / "model.pt")
    second.fit(X, Y, verbose=0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns(place, precision):
    model = made(place, precision=precision, metrics=["accuracy"])
    history = model.fit(X, Y, epochs=8, batch_size=10, verbose=0)
    assert history.history["accuracy"][-1] > 0.8
    assert model.predict(X, verbose=0).dtype is torch.float32


def test_channels_last_gives_the_same_weights(two):
    def images() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))

    pictures = torch.arange(20 * 32, dtype=torch.float32).reshape(20, 2, 4, 4).sin()
    labels = (pictures.sum((1, 2, 3)) > 0).long()
    plain = made(two, images)
    last = made(two, images, channels_last=True)
    for model in (plain, last):
        torch.manual_seed(0)
        model.fit(pictures, labels, batch_size=6, verbose=0)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(last)[name], value, rtol=1e-4, atol=1e-4)


def test_a_compiled_forward_pass_gives_the_same_weights(place):
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    found = []
    for compile in (False, {"backend": "eager"}):
        model = made(place, plain, compile=compile)
        torch.manual_seed(0)
        model.fit(X, Y, batch_size=6, verbose=0)
        model.fit(X, Y, batch_size=6, verbose=0)
        found.append((weights(model), model.predict(X, verbose=0)))
    (usual, outputs), (compiled, its_outputs) = found
    for name, value in usual.items():
        torch.testing.assert_close(compiled[name], value)
    torch.testing.assert_close(its_outputs, outputs)


# --------------------------------------------------------------------------- models of ones own


class Adversarial(mnb.Model):
    """A GAN in small: two networks, two optimizers, several backward passes a step."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(2, 4)
        self.judge = nn.Linear(4, 1)
        self.maker_optimizer = torch.optim.SGD(self.maker.parameters(), 0.1)
        self.judge_optimizer = torch.optim.SGD(self.judge.parameters(), 0.1)

    def training_step(self, batch: Tensor) -> dict[str, Tensor]:
        made_up = self.maker(batch[:, :2])
        self.judge_optimizer.zero_grad()
        judged = F.softplus(-self.judge(batch)).mean() + F.softplus(self.judge(made_up.detach())).mean()
        judged.backward()
        self.judge_optimizer.step()
        self.maker_optimizer.zero_grad()
        made = F.softplus(-self.judge(made_up)).mean()
        made.backward()
        self.maker_optimizer.step()
        return {"loss": judged, "made": made}


@pytest.mark.parametrize("size", [7, 1])
def test_a_gan_steps_by_itself(two, size):
    states = []
    for strategy in (mnb.OneDeviceStrategy("cpu:0"), two):
        torch.manual_seed(5)
        with strategy.scope():
            model = Adversarial()
            model.compile(optimizer=None)
        history = model.fit(X[:22], batch_size=size, epochs=2, shuffle=False, verbose=0)
        assert set(history.history) == {"loss", "made"}
        states.append((weights(model), [history.history[name][-1] for name in ("loss", "made")]))
    (alone, one), (mirrored, many) = states
    for name, value in alone.items():
        torch.testing.assert_close(mirrored[name], value, rtol=1e-4, atol=1e-5)
    assert many == pytest.approx(one, rel=1e-4)


class Scaled(mnb.Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.scale, self.settings, self.steps = 1.0, {"smoothing": 0.0}, 0

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        self.steps += 1
        smoothing = self.settings["smoothing"]
        return self.scale * F.cross_entropy(self.linear(inputs), targets, label_smoothing=smoothing)


def test_numbers_that_a_training_step_goes_by_may_be_set_between_fits_and_by_callbacks(two):
    def doubled(epoch: int, logs: Any) -> None:
        model.scale *= 2
        model.settings["smoothing"] += 0.1

    found = []
    for strategy in (mnb.OneDeviceStrategy("cpu:0"), two):
        torch.manual_seed(5)
        with strategy.scope():
            model = Scaled()
            model.compile("sgd")
        losses = model.fit(X, Y, verbose=0, epochs=3, callbacks=[mnb.callbacks.LambdaCallback(on_epoch_end=doubled)])
        model.scale = 0.5
        found.append([*losses.history["loss"], *model.fit(X, Y, verbose=0).history["loss"]])
        assert model.linear(X).shape == (50, 2)
        assert (model.steps, model.scale) == (8, 0.5)
    assert found[1] == pytest.approx(found[0])


def test_a_copy_of_a_model_is_a_network_without_a_training(place):
    model = made(place)
    model.fit(X, Y, verbose=0)
    twin = copy.deepcopy(model)
    assert equal(weights(twin), weights(model))
    assert twin.optimizer is None
    with pytest.raises(mnb.UsageError, match="not compiled here: what compile was told goes neither with a copy"):
        twin.fit(X, Y)


def test_replica_0_tells_how_far_it_is(place):
    heard: list[Note] = []
    model = made(place)
    data = feed(X, Y, batch_size=10)
    running = Running(Guard(place, print), job.begin_evaluation, model, task_of(model, data, None, watched=True))
    (advanced, *_) = running.advance(0, None, changes=False, on_note=heard.append)
    running.end()
    # The first step tells at once; how many follow depends on the time they take.
    assert (heard[0].step, heard[0].examples) == (1, 10)
    assert heard[0].loss == pytest.approx(advanced.totals.loss / 50, abs=1.0)
    assert (advanced.step, advanced.examples, advanced.ended) == (5, 50, True)


def test_what_fit_writes_goes_to_standard_output():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        made(mnb.OneDeviceStrategy("cpu:0")).fit(X, Y, verbose=2)
    assert out.getvalue().startswith("epoch 1/1  loss ")


def test_a_file_is_written_whole(place, tmp_path: Path):
    model = made(place)
    model.save(tmp_path / "model.pt", include_optimizer=False)
    assert "training" not in torch.load(tmp_path / "model.pt", weights_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
