"""The same lines train alike wherever they stand: in a cell, in a script under torchrun, in the controller, alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import run_cell

import mirror_nb as mnb
from mirror_nb.errors import ContextError
from mirror_nb.strategies.seat import AloneSeat
from mirror_nb.training import files

BODY = """
import torch
from torch import nn
import mirror_nb as mnb

X = torch.arange(43 * 4, dtype=torch.float32).reshape(43, 4).sin()
Y = (X.sum(1) > 0).long()

def made(strategy):
    torch.manual_seed(3)
    with strategy.scope():
        model = mnb.Model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
        model.compile(optimizer=("adam", {"lr": 0.02}), loss="cross_entropy", metrics=["accuracy"])
    return model

def trained(strategy):
    model = made(strategy)
    torch.manual_seed(9)
    history = model.fit(X, Y, epochs=3, batch_size=7, validation_data=(X, Y), verbose=0)
    weights = torch.cat([value.reshape(-1) for value in model.state_dict().values()]).clone()
    loss, accuracy = model.evaluate(X, Y, batch_size=5, verbose=0)
    outputs = model.predict(X, batch_size=7, verbose=0)
    return model, dict(history.history), weights, [loss, accuracy], outputs
"""


def here() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "body"}
    exec(BODY, names)
    return names


@pytest.fixture(scope="module")
def alone() -> tuple[Any, ...]:
    """What one device makes of it."""
    return here()["trained"](mnb.OneDeviceStrategy("cpu:0"))


def same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    _, history, weights, scores, outputs = found
    _, its_history, its_weights, its_scores, its_outputs = expected
    torch.testing.assert_close(weights, its_weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs, its_outputs, rtol=1e-3, atol=1e-4)
    assert list(history) == list(its_history)
    for name, values in its_history.items():
        assert history[name] == pytest.approx(values, rel=1e-3)
    assert scores == pytest.approx(its_scores, rel=1e-3)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_controller_trains_as_one_device(n, alone):
    with mnb.MirroredStrategy([f"cpu:{i}" for i in range(n)]) as strategy:
        same(here()["trained"](strategy), alone)


def test_without_any_strategy(alone):
    names = here()
    same(names["trained"](mnb.get_strategy()), alone)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_in_a_cell_every_replica_trains_and_gets_the_same(n, replicas, alone):
    ran = run_cell(replicas(n), BODY + "\nmodel, history, weights, scores, outputs = trained(strategy)")
    assert ran.errors == {}
    for values in ran.values.values():
        same((None, *(values[name] for name in ("history", "weights", "scores", "outputs"))), alone)
    assert len({tuple(v["weights"].tolist()) for v in ran.values.values()}) == 1


def test_a_cell_shows_progress_and_calls_back_once(replicas):
    source = BODY + "\nmade(strategy).fit(X, Y, verbose=2, callbacks=[mnb.callbacks.EarlyStopping('loss')])"
    ran = run_cell(replicas(2), source)
    assert ran.errors == {}
    assert ran.text[0].startswith("epoch 1/1  loss ")
    assert ran.text[1] == ""


def test_in_a_cell_one_replica_may_say_more_than_the_others(replicas):
    source = BODY + "\nhistory = made(strategy).fit(X, Y, epochs=3, verbose=2 if replica_id == 0 else 0).history"
    ran = run_cell(replicas(2), source)
    assert ran.errors == {}
    assert ran.values[0]["history"] == ran.values[1]["history"]


BY_ITS_CLOCK = """
class ByItsClock(mnb.callbacks.Callback):
    calls = 0

    def {hook}(self, number, logs=None):
        self.calls += 1
        self.model.stop_training = self.calls >= 2 + replica_id

history = made(strategy).fit(X, Y, epochs=5, batch_size=7, verbose=0, callbacks=[ByItsClock()])
epochs, loss = history.epoch, history.history["loss"]
"""


@pytest.mark.parametrize(
    ("hook", "epochs"),
    [("on_epoch_begin", 2), ("on_train_batch_end", 1), ("on_train_batch_begin", 1), ("on_epoch_end", 2)],
)
def test_in_a_cell_the_first_replica_whose_time_is_up_stops_all(replicas, hook, epochs):
    ran = run_cell(replicas(2), BODY + BY_ITS_CLOCK.format(hook=hook))
    assert ran.errors == {}
    assert ran.values[0]["epochs"] == ran.values[1]["epochs"] == list(range(epochs))
    assert ran.values[0]["loss"] == ran.values[1]["loss"]


def test_in_a_cell_a_callback_that_only_looks_may_be_one_replicas_alone(replicas):
    source = """
steps = []
looks = mnb.callbacks.LambdaCallback(on_batch_end=lambda batch, logs=None: steps.append(batch))
model = made(strategy)
history = model.fit(X, Y, batch_size=7, verbose=0, callbacks=[looks] if replica_id == 1 else []).history
tests = []
looks = mnb.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs=None: tests.append(batch))
loss = model.evaluate(X, Y, batch_size=20, verbose=0, callbacks=[looks] if replica_id == 1 else [])
"""
    ran = run_cell(replicas(2), BODY + source)
    assert ran.errors == {}
    assert [values["steps"] for values in ran.values.values()] == [[], list(range(7))]
    assert [values["tests"] for values in ran.values.values()] == [[], [0, 1, 2]]
    assert ran.values[0]["loss"] == ran.values[1]["loss"]


def test_in_a_cell_a_callback_that_changes_the_model_is_everybodys(replicas):
    source = """
rates = mnb.callbacks.LearningRateScheduler(lambda epoch: 0.1)
made(strategy).fit(X, Y, verbose=0, callbacks=[rates] if replica_id == 0 else [])
"""
    ran = run_cell(replicas(2), BODY + source)
    assert ran.errors == {0: "UsageError", 1: "UsageError"}
    told = "replica 1 has the callbacks [], but replica 0 ['LearningRateScheduler']: give all replicas the same"
    assert told in ran.report.failures[0].message


SAVED = """
model = made(strategy)
torch.manual_seed(9)
backup = mnb.callbacks.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False)
model.fit(X, Y, epochs=2, batch_size=7, verbose=0, callbacks=[backup])
model.save(folder + "/model.pt")
again = mnb.load_model(folder + "/model.pt")
again.fit(X, Y, epochs=3, initial_epoch=2, batch_size=7, verbose=0)
weights = torch.cat([value.reshape(-1) for value in again.state_dict().values()]).clone()
"""


def test_a_cell_saves_loads_and_goes_on(replicas, alone, tmp_path):
    ran = run_cell(replicas(2), BODY + SAVED, {"folder": str(tmp_path)})
    assert ran.errors == {}
    for values in ran.values.values():
        torch.testing.assert_close(values["weights"], alone[2], rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.pt", "model.pt"]


NORMALISED = """
torch.manual_seed(0)
model = mnb.Model(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
model.compile("sgd", "cross_entropy")
model.fit(X, Y, batch_size=7, verbose=0)
own = model.network[1].running_mean.clone()
model.save(folder + "/model.pt")
saved = torch.load(folder + "/model.pt", weights_only=True)["state_dict"]["1.running_mean"]
"""


def test_what_a_cell_saves_has_the_mean_of_all_running_statistics(replicas, tmp_path):
    ran = run_cell(replicas(2), BODY + NORMALISED, {"folder": str(tmp_path)})
    assert ran.errors == {}
    own = [ran.values[r]["own"] for r in range(2)]
    assert not torch.equal(*own)
    # Every replica found the file when `save` had returned.
    for r in range(2):
        torch.testing.assert_close(ran.values[r]["saved"], sum(own) / 2)


def test_an_error_on_one_replica_of_a_cell_leaves_a_model_that_trains_on(replicas):
    pool = replicas(2)
    fails = """
class Fails(mnb.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and replica_id == 1:
            raise ValueError("only here")

model = made(strategy)
model.fit(X, Y, epochs=5, batch_size=7, verbose=0, callbacks=[Fails()])
"""
    ran = run_cell(pool, BODY + fails)
    assert ran.errors[1] == "ValueError"
    pool.mend()
    after = """
epochs = model.fit(X, Y, epochs=2, batch_size=7, verbose=0).epoch
weights = torch.cat([value.reshape(-1) for value in model.state_dict().values()]).clone()
moments = torch.cat([state["exp_avg"].reshape(-1) for state in model.optimizer.state.values()])
"""
    ran = run_cell(pool, after)
    assert ran.errors == {}
    first, second = ran.values[0], ran.values[1]
    assert first["epochs"] == [0, 1]
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["moments"], second["moments"])


def test_replicas_of_a_cell_that_were_given_different_data_are_told(replicas):
    ran = run_cell(replicas(2), BODY + "\nmade(strategy).fit(X[: 40 + replica_id], Y[: 40 + replica_id], verbose=0)")
    # Replica 0's are the ones that the others compare theirs with.
    assert ran.errors == {0: "PeerFailed", 1: "UsageError"}


KILLED = (
    BODY
    + """
import os, signal, sys

class Network(nn.Module):
    def __init__(self, kills):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.kills = kills
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.kills and self.calls == 11 and mnb.get_replica_context().replica_id_in_sync_group == 1:
            os.kill(self.kills, signal.SIGKILL)
        return self.layers(x)

class Mine(mnb.Model):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def training_step(self, batch):
        x, y = batch
        return rule(self.linear(x), y)

def rule(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

def train(backup, kills, result):
    callbacks = [mnb.callbacks.BackupAndRestore(backup, save_freq=2)] if backup else []
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        torch.manual_seed(3)
        with strategy.scope():
            model = mnb.Model(Network(os.getpid() if kills else 0))
            schedule = ("StepLR", {"step_size": 1})
            model.compile(("adam", {"lr": 0.02}), "cross_entropy", ["accuracy"], scheduler=schedule)
        history = model.fit(X, Y, epochs=3, batch_size=6, verbose=0, callbacks=callbacks)
        torch.save((model.state_dict(), history.history), result)

def train_mine():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            own = Mine()
            own.compile("sgd", metrics=None)
        losses = own.fit(X, Y, epochs=9, verbose=0).history["loss"]
    print(losses[-1] < losses[0])

if __name__ == "__main__":
    backup, kills, result, *undisturbed = sys.argv[1:]
    train(backup, kills, result)
    for result in undisturbed:
        train("", "", result)
        train_mine()
"""
)


@pytest.fixture(scope="module")
def run_twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    """The folder of a script, and how its two runs ended: the first in a step, by a kill."""
    folder = tmp_path_factory.mktemp("killed")
    script, backup, first, second, kept = (folder / n for n in ("script.py", "backup", "first", "second", "kept.pt"))
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(Path(mnb.__file__).parent.parent)}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, (script, backup, *arguments))]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    killed = run("kill", first)
    assert not first.exists()
    shutil.copy(backup / "latest.pt", kept)
    return folder, [killed, run("", first, second)]


def test_killed_in_a_step_and_run_again_it_ends_on_the_weights_of_an_undisturbed_run(run_twice):
    folder, ends = run_twice
    assert [(end.returncode, end.stderr) for end in ends] == [(-signal.SIGKILL, ""), (0, "")]
    # In the fourth step of the second epoch: replica 1 has no share of the last batch of the first.
    left = files.read(folder / "kept.pt")["training"]
    assert (left["epoch"], left["step"]) == (1, 2)
    assert not (folder / "backup").exists()
    resumed, history = torch.load(folder / "first", weights_only=True)
    undisturbed, expected = torch.load(folder / "second", weights_only=True)
    assert resumed.keys() == undisturbed.keys()
    assert all(torch.equal(value, undisturbed[name]) for name, value in resumed.items())
    assert history == expected


def test_a_script_with_classes_and_functions_of_its_own(run_twice):
    assert run_twice[1][1].stdout == "True\n", "what `Mine` learns by `rule`"


# --------------------------------------------------------------------------- command


def tell(strategy: mnb.Strategy, count: int) -> int:
    seat = strategy._place.seat
    assert seat is not None
    for number in range(count):
        seat.note((seat.replica_id, number))
    return seat.replica_id


def test_notes_come_while_the_command_runs_and_results_in_order(two):
    heard: list[Any] = []
    assert two._place.command(tell, (two, 3), on_note=heard.append) == [0, 1]
    assert sorted(heard) == [(replica, number) for replica in range(2) for number in range(3)]
    assert two._place.seat is None


def test_alone_notes_come_at_once():
    strategy = mnb.OneDeviceStrategy("cpu:0")
    heard: list[Any] = []
    assert strategy._place.command(tell, (strategy, 2), on_note=heard.append) == [0]
    assert heard == [(0, 0), (0, 1)]
    assert isinstance(strategy._place.seat, AloneSeat)


def add_up(strategy: mnb.Strategy) -> Any:
    seat = strategy._place.seat
    assert seat is not None
    mine = torch.full((2,), float(seat.replica_id + 1))
    handed = torch.full((2, 2), float(seat.replica_id)).t()
    seat.hand_out([handed], 1)
    return seat.add_up(mine), seat.collect(seat.replica_id), handed


@pytest.mark.parametrize("strategy", ["alone", "two"])
def test_a_seat_adds_up_collects_and_hands_out(strategy, two):
    place = (two if strategy == "two" else mnb.OneDeviceStrategy("cpu:0"))._place
    n = place.num_replicas
    owner = two if n == 2 else mnb.OneDeviceStrategy("cpu:0")
    for total, everyone, handed in owner._place.command(add_up, (owner,)):
        assert total.tolist() == [sum(range(1, n + 1))] * 2
        assert everyone == list(range(n))
        assert handed.tolist() == [[n - 1.0] * 2] * 2


def raises(strategy: mnb.Strategy) -> None:
    raise ValueError("on purpose")


def test_an_error_in_a_command_has_its_own_type(two):
    with pytest.raises(ValueError, match="on purpose"):
        two._place.command(raises, (two,))
    assert two._place.command(tell, (two, 0)) == [0, 1]


def random_numbers(strategy: mnb.Strategy) -> tuple[list[float], list[float], list[float]]:
    import random

    import numpy as np

    seat = strategy._place.seat
    assert seat is not None

    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]

    with seat.averaging():
        state = seat.random_state()
        first = draw()
        with seat.shared_randomness():
            shared = draw()
        seat.set_random_state(state)
        if seat.num_replicas > 1:
            # The swap of streams must not take that for a seed.
            with seat.shared_randomness():
                draw()
        return first, draw(), shared


@pytest.mark.parametrize("n", [1, 2])
def test_random_states_are_taken_and_given_back(n, two):
    strategy = two if n == 2 else mnb.OneDeviceStrategy("cpu:0")
    results = strategy._place.command(random_numbers, (strategy,))
    for first, again, _ in results:
        assert first == again
    if n == 2:
        (first, _, shared), (second, _, its_shared) = results
        assert first != second
        assert shared == its_shared


def test_in_cross_replica_context_of_another_strategy_a_model_is_refused(two):
    model = mnb.Model(torch.nn.Linear(4, 2))
    with two.scope(), pytest.raises(ContextError, match="Mixing different") as error:
        model.predict(torch.zeros(3, 4), verbose=0)
    assert str(error.value).endswith("make inside it what was made outside of every scope: a Model, say")


def test_a_model_made_outside_of_the_scope_that_it_is_compiled_in_is_told_where_to_be_made(two):
    model = mnb.Model(torch.nn.Linear(4, 2))
    with two.scope(), pytest.raises(ContextError, match="make inside it what was made outside of every scope"):
        model.compile("sgd", "mse")


def test_after_fit_gradients_are_summed_where_the_strategy_sums_them():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"], gradient_reduction="sum") as strategy:
        with strategy.scope():
            net = torch.nn.Linear(1, 1, bias=False)
            model = mnb.Model(torch.nn.Linear(1, 1))
            model.compile(optimizer="sgd", loss="mse")
        model.fit(torch.ones(4, 1), torch.ones(4, 1), batch_size=4, verbose=0)

        def gradient():
            net(torch.ones(1, 1)).sum().backward()
            return net.weight.grad.item()

        assert strategy.run(gradient) == 2
