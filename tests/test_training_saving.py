"""save and load_model: one file, on any number of replicas, from which a training goes on as if it never stopped."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mirror_nb as mnb
from mirror_nb.training import files
from mirror_nb.training.saving import load_model, save_model

X = torch.arange(92.0).reshape(23, 4).sin()
Y = (X.sum(1) * 7).long() % 3


@pytest.fixture(scope="module")
def strategies() -> Iterator[Any]:
    made: dict[int, Any] = {}

    def of(n: int) -> Any:
        if n == 0:
            return None
        if n not in made:
            made[n] = mnb.MirroredStrategy([f"cpu:{i}" for i in range(n)])
        return made[n]

    yield of
    for strategy in made.values():
        strategy.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


def scope(strategy: Any) -> Any:
    return strategy.scope() if strategy is not None else nullcontext()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def compiled(strategy: Any = None, **settings: Any) -> mnb.Model:
    with scope(strategy):
        model = mnb.Model(network())
        model.compile(**{"optimizer": ("adam", {"lr": 0.01}), "loss": "cross_entropy", **settings})
    return model


def fitted(model: mnb.Model, epochs: int, initial_epoch: int = 0, **given: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model.fit(X, Y, batch_size=5, epochs=epochs, initial_epoch=initial_epoch, verbose=0, **given)
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], exactly: bool = True) -> None:
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        tolerance = {"rtol": 0, "atol": 0} if exactly else {}
        torch.testing.assert_close(value, theirs[name], **tolerance)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.scale = 2.0
        self.register_buffer("shift", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale + self.shift


class Own(mnb.Model):
    """A model of a user's own class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.margin = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x) * self.margin, y)


def my_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)


# ---- weights and structure ----------------------------------------------------------------------------


def test_the_state_dict_is_the_plain_networks(path):
    model = compiled()
    model.save(path)
    plain = network()
    plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    assert_equal(plain.state_dict(), model.state_dict())


def test_a_model_that_was_never_compiled_is_saved_too(path):
    model = mnb.Model(network())
    model.save(path)
    again = mnb.load_model(path)
    torch.testing.assert_close(again.predict(X, verbose=0), model.predict(X, verbose=0))
    with pytest.raises(mnb.UsageError, match="not compiled"):
        again.fit(X, Y)


def test_names_and_values_that_were_compiled_come_back(path):
    settings = {
        "optimizer": ("sgd", {"lr": 0.1, "momentum": 0.9}),
        "loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        "metrics": ["accuracy"],
        "scheduler": (torch.optim.lr_scheduler.StepLR, {"step_size": 2}),
        "scheduler_interval": "step",
        "clip_norm": 1.0,
        "accumulate_steps": 2,
    }
    compiled(**settings).save(path)
    again = mnb.load_model(path).compiled_settings
    assert (again.optimizer, again.metrics, again.scheduler) == tuple(
        settings[name] for name in ("optimizer", "metrics", "scheduler")
    )
    assert (again.scheduler_interval, again.clip_norm, again.accumulate_steps) == ("step", 1.0, 2)
    assert again.loss.weight.tolist() == [1, 2, 3]


def test_an_optimizer_that_was_given_whole_is_its_class_and_arguments(path):
    model = mnb.Model(network())
    model.compile(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.3), "cross_entropy")
    model.save(path)
    again = mnb.load_model(path)
    assert type(again.optimizer) is torch.optim.AdamW
    assert [again.optimizer.param_groups[0][name] for name in ("lr", "weight_decay")] == [0.02, 0.3]


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("some", [slice(2, None), slice(None, None, -1)], ids=["the last layer's", "backwards"])
def test_an_optimizer_of_some_parameters_is_of_the_same_ones(n, some, strategies, path):
    def model_of(strategy: Any) -> mnb.Model:
        with scope(strategy):
            model = mnb.Model(network())
            optimizer = torch.optim.SGD(list(model.parameters())[some], lr=0.1, momentum=0.9)
        model.compile(optimizer, "cross_entropy")
        return model

    expected = fitted(model_of(None), 4)
    model = model_of(strategies(n))
    fitted(model, 2)
    for _ in range(2):
        model.save(path)
        with scope(strategies(n)):
            model = mnb.load_model(path)
    assert_equal(fitted(model, 4, 2), expected, exactly=n == 0)


def test_without_compile_there_is_no_optimizer(path):
    compiled().save(path)
    assert mnb.load_model(path, compile=False).optimizer is None


# ---- a training goes on -------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "adam": {},
    "momentum and a scheduler": {
        "optimizer": ("sgd", {"lr": 0.1, "momentum": 0.9}),
        "scheduler": ("step", {"step_size": 2}),
    },
    "accumulated": {"accumulate_steps": 2, "scheduler": ("exponential", {"gamma": 0.9}), "scheduler_interval": "step"},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_training_that_was_saved_ends_on_the_weights_of_one_that_was_not(settings, path):
    expected = fitted(compiled(**SETTINGS[settings]), 4)
    model = compiled(**SETTINGS[settings])
    fitted(model, 2)
    model.save(path)
    again = mnb.load_model(path)
    torch.manual_seed(1234)
    again.fit(X, Y, batch_size=5, epochs=4, initial_epoch=2, verbose=0)
    assert_equal(again.state_dict(), expected)
    assert len(again.history.history["loss"]) == 4


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (2, 3), (1, 2), (0, 2), (2, 0), (2, 2)])
def test_saved_on_some_replicas_it_goes_on_on_others(saved, loaded, strategies, path):
    expected = fitted(compiled(), 4)
    model = compiled(strategies(saved))
    fitted(model, 2)
    model.save(path)
    with scope(strategies(loaded)):
        again = mnb.load_model(path)
    assert_equal(again.state_dict(), model.state_dict())
    torch.manual_seed(99)
    again.fit(X, Y, batch_size=5, epochs=4, initial_epoch=2, verbose=0)
    assert_equal(again.state_dict(), expected, exactly=saved == loaded == 0)


class SaveInTheMiddle(mnb.callbacks.Callback):
    """Saves after the seventh batch of all."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.seen = path, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        if self.seen == 7:
            self.model.save(self.path)


def test_a_model_is_saved_after_its_strategy_was_closed_too(path):
    scheduled = {"scheduler": ("StepLR", {"step_size": 1, "gamma": 0.5})}
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        fitted(model := compiled(strategy, **scheduled), 1)
    model.save(path)
    assert model.training_state()["epoch"] == 1
    again = fitted(load_model(path), 2, initial_epoch=1)
    assert_equal(again, fitted(compiled(**scheduled), 2), exactly=False)


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("loader", [False, True])
def test_a_training_saved_in_the_middle_of_an_epoch_goes_on_there(n, loader, strategies, path):
    def fit(model: mnb.Model, seed: int, **given: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        data: Any = (X, Y)
        if loader:
            generator = torch.Generator().manual_seed(3)
            data = (DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True, generator=generator),)
        else:
            given["batch_size"] = 5
        model.fit(*data, epochs=3, verbose=0, **given)
        return model.state_dict()

    model = compiled(strategies(n))
    expected = fit(model, 5, callbacks=[SaveInTheMiddle(path)])
    assert (files.read(path)["training"]["epoch"], files.read(path)["training"]["step"]) == (1, 2)
    with scope(strategies(n)):
        again = mnb.load_model(path)
    assert_equal(fit(again, 77, initial_epoch=1), expected)


def test_without_the_optimizer_the_training_begins_anew(path):
    model = compiled()
    fitted(model, 1)
    model.save(path, include_optimizer=False)
    assert "training" not in files.read(path)
    again = mnb.load_model(path)
    assert again.optimizer.state == {}
    assert_equal(again.state_dict(), model.state_dict())


# ---- users' classes and functions ---------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"custom_objects": {"Net": Net}}, {"network": "Net()"}])
def test_a_network_of_a_users_class_needs_the_class(given, path):
    model = mnb.Model(Net())
    model.compile("sgd", "cross_entropy")
    model.save(path)
    with pytest.raises(
        mnb.UsageError, match=r"Net \(the network itself\).*custom_objects=\{\"Net\": Net\}, or network="
    ):
        mnb.load_model(path)
    if "network" in given:
        torch.manual_seed(3)
        given = {"network": Net()}
    again = mnb.load_model(path, **given)
    torch.testing.assert_close(again.predict(X, verbose=0), model.predict(X, verbose=0), rtol=0, atol=0)
    assert type(again.optimizer) is torch.optim.SGD


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_a_model_of_a_users_class_goes_on(n, whole, strategies, path):
    def model_of(strategy: Any) -> Own:
        with scope(strategy):
            model = Own()
            model.compile(("adam", {"lr": 0.01}))
        return model

    expected = fitted(model_of(None), 3)
    model = model_of(strategies(n))
    fitted(model, 2)
    model.save(path)
    with scope(strategies(n)):
        again = mnb.load_model(path, network=Own()) if whole else mnb.load_model(path, custom_objects={"Own": Own})
    assert type(again) is Own
    assert again.margin == 0.5
    assert_equal(fitted(again, 3, 2), expected, exactly=n == 0)


def test_functions_cannot_be_stored_and_the_warning_says_which(path):
    model = compiled(loss=my_loss)
    fitted(model, 2)
    model.save(path)
    with pytest.warns(UserWarning, match=r"loss \(the function my_loss\).*Call compile.*load_training") as caught:
        again = mnb.load_model(path)
    assert caught[0].filename == __file__
    torch.testing.assert_close(again.predict(X, verbose=0), model.predict(X, verbose=0))
    with pytest.raises(mnb.UsageError, match="not compiled"):
        again.fit(X, Y, verbose=0)
    again.compile(("adam", {"lr": 0.01}), my_loss)
    again.load_training(path)
    assert_equal(fitted(again, 4, 2), fitted(compiled(loss=my_loss), 4))


def test_a_function_of_torch_is_stored(path):
    compiled(loss=F.cross_entropy).save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mnb.load_model(path).compiled_settings.loss is F.cross_entropy


# ---- mistakes -----------------------------------------------------------------------------------------


def test_a_network_of_another_shape_is_told(path):
    mnb.Model(network()).save(path)
    with pytest.raises(mnb.UsageError, match="not of this network"):
        mnb.load_model(path, network=nn.Linear(4, 3))


@pytest.mark.parametrize("name", ["state_dict", "architecture"])
def test_a_file_that_lacks_a_part_is_told(name, path):
    content = {"state_dict": {}, "architecture": {}}
    del content[name]
    files.write(path, content)
    with pytest.raises(mnb.CheckpointError, match=name):
        load_model(path)


def test_settings_of_a_newer_mirror_nb_are_told(path):
    save_model(path, network=network(), settings=None, optimizer_name=None, training=None)
    content = files.read(path)
    files.write(path, {**content, "compile": {"optimizer": "adam", "sparkles": 3}})
    with pytest.raises(mnb.CheckpointError, match=r"\['sparkles'\].*compile=False"):
        load_model(path)
    assert load_model(path, compile=False).predict(X, verbose=0).shape == (23, 3)


def test_a_state_that_is_not_plain_is_not_saved(path):
    with pytest.raises(mnb.UsageError, match=r"training\.callbacks: a set"):
        save_model(path, network=network(), settings=None, optimizer_name=None, training={"callbacks": {1}})
    assert not path.exists()
