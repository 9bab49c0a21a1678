"""fit goes on when replicas die, and ends on what it would have ended on: weights, history, files."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import mirror_nb as mnb
from mirror_nb.errors import ReplicaDied
from mirror_nb.training import array_feed, driver, job
from mirror_nb.training.running import Running

X = torch.arange(43 * 4, dtype=torch.float32).reshape(43, 4).sin()
Y = (X.sum(1) > 0).long()
STEPS = 7
# Of an epoch, with batches of 7: in the last one all replicas but the first have no example.

Strike = tuple[int, int, str]
# Which replica dies, after how many calls of the network, in its forward or its backward pass.


class Struck(nn.Module):
    """Kills the replica that it is on, as planned: once for each strike, which a file in the folder tells."""

    def __init__(self, folder: Path, strikes: tuple[Strike, ...], times: int = 1) -> None:
        super().__init__()
        self._folder, self._strikes, self._times = str(folder), strikes, times
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._strike(x, "evaluation")
        found = self._strike(x, "forward")
        self._calls += 1
        return found

    def _strike(self, x: Tensor, at: str) -> Tensor:
        for number, (replica_id, calls, place) in enumerate(self._strikes):
            if replica_id != int(os.environ.get("RANK", -1)) or calls > self._calls:
                continue
            if place == at:
                self._die(number)
            elif place == "backward" and at == "forward" and x.requires_grad:
                x.register_hook(lambda gradient, number=number: self._die(number))
        return x

    def _die(self, number: int) -> None:
        for time in range(self._times):
            try:
                Path(self._folder, f"{number}.{time}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()


class Seen(mnb.callbacks.Callback):
    """Hears of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[str, int]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.batches.append(("epoch", epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.batches.append(("begin", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(("end", batch))


@pytest.fixture(scope="module")
def strategies() -> Iterator[Any]:
    kept: dict[int, mnb.MirroredStrategy] = {}

    def of(n: int) -> mnb.MirroredStrategy:
        if n not in kept:
            kept[n] = mnb.MirroredStrategy([f"cpu:{i}" for i in range(n)])
        return kept[n]

    yield of
    for strategy in kept.values():
        strategy.close()


def made(strategy: Any, folder: Path, strikes: tuple[Strike, ...] = (), times: int = 1, **settings: Any) -> mnb.Model:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(3)
    settings = {
        "optimizer": ("adam", {"lr": 0.02}),
        "scheduler": ("StepLR", {"step_size": 1, "gamma": 0.8}),
        **settings,
    }
    with strategy.scope():
        model = mnb.Model(
            nn.Sequential(
                nn.Linear(4, 8),
                nn.BatchNorm1d(8),
                Struck(folder, strikes, times),
                nn.Dropout(0.3),
                nn.Tanh(),
                nn.Linear(8, 2),
            )
        )
        model.compile(loss="cross_entropy", metrics=["accuracy"], **settings)
    return model


def trained(model: mnb.Model, data: Any = None, **arguments: Any) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """Fit, and return all that must be as if nothing had happened."""
    torch.manual_seed(9)
    options = {"epochs": 3, "verbose": 0, "validation_data": (X, Y), **arguments}
    history = model.fit(data, **options) if data is not None else model.fit(X, Y, batch_size=7, **options)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, dict(history.history), model.training_state()["optimizer"]["state"]


def same(found: Any, expected: Any, statistics: bool = True) -> None:
    (weights, history, state), (its_weights, its_history, its_state) = found, expected
    if not statistics:
        its_weights = {name: value for name, value in its_weights.items() if "running" not in name}
        history, its_history = ({k: h[k] for k in ("loss", "accuracy")} for h in (history, its_history))
    for name, value in its_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=0, msg=f"{name} is another one")
    assert history == its_history
    for number, moments in its_state.items():
        for name, value in moments.items():
            assert torch.equal(torch.as_tensor(state[number][name]), torch.as_tensor(value)), (number, name)


@pytest.fixture(scope="module")
def undisturbed(strategies: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kept: dict[Any, Any] = {}

    def of(n: int, **settings: Any) -> Any:
        key = (n, str(settings))
        if key not in kept:
            model = made(strategies(n), tmp_path_factory.mktemp("undisturbed"), **settings)
            kept[key] = trained(model, on_failure="raise")
        return kept[key]

    return of


@pytest.mark.parametrize(
    ("n", "strikes"),
    [
        (2, ((1, 4, "forward"),)),
        (2, ((0, 0, "forward"),)),
        (2, ((0, 9, "backward"),)),
        (2, ((1, 6, "evaluation"),)),
        (3, ((1, 5, "backward"), (2, 8, "forward"))),
        (3, ((0, 7, "forward"), (1, 7, "forward"))),
        (4, ((2, 4, "forward"),)),
    ],
)
def test_fit_ends_on_the_weights_of_an_undisturbed_one(n, strikes, strategies, undisturbed, tmp_path, capsys):
    model = made(strategies(n), tmp_path, strikes)
    same(trained(model), undisturbed(n))
    said = [line for line in capsys.readouterr().out.splitlines() if "goes on" in line or "begins" in line]
    assert len(said) in range(1, len(strikes) + 1)
    assert all("SIGKILL" in line and "replica" in line for line in said)
    # And so does the next one.
    assert trained(model, epochs=1)[1]["loss"]


def test_callbacks_see_every_batch_once_and_batches_that_wait_are_done_again(strategies, undisturbed, tmp_path):
    seen = Seen()
    settings = {"accumulate_steps": 3}
    model = made(strategies(2), tmp_path, ((1, 4, "forward"), (0, 10, "backward")), **settings)
    same(trained(model, callbacks=[seen]), undisturbed(2, **settings))
    expected = [[("epoch", epoch), *[(w, b) for b in range(STEPS) for w in ("begin", "end")]] for epoch in range(3)]
    assert seen.batches == [each for epoch in expected for each in epoch]


class KillsBetween(mnb.callbacks.Callback):
    """Kills a replica, or all, while none is asked anything."""

    def __init__(self, strategy: Any, batch: int, victims: tuple[int, ...]) -> None:
        super().__init__()
        self._strategy, self._batch, self._victims = strategy, batch, victims
        self.calls = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls += 1
        if self.calls == self._batch:
            kill(self._strategy, *self._victims)


def shared_files() -> list[str]:
    """Return what this process has open of memory that it shares."""
    folder = Path("/proc/self/fd")
    targets = [os.readlink(folder / name) for name in os.listdir(folder) if (folder / name).is_symlink()]
    return [target for target in targets if target.startswith("/memfd:mirror_nb")]


def kill(strategy: Any, *victims: int) -> None:
    """Kill replicas, and return when the system says that they are gone."""
    pool = strategy._place._pool
    for line in pool.status():
        if line.replica_id in victims:
            os.kill(line.pid, signal.SIGKILL)
            pool._members[line.replica_id].process.join(10)


def test_a_replica_that_dies_between_two_steps_is_missed_at_the_next(strategies, undisturbed, tmp_path):
    strategy = strategies(2)
    killer = KillsBetween(strategy, 10, (0,))
    same(trained(made(strategy, tmp_path), callbacks=[killer]), undisturbed(2))


class Stream(IterableDataset[Any]):
    """As long as three epochs of it, and no more."""

    def __iter__(self) -> Iterator[Any]:
        for start in range(4):
            yield from zip(X.roll(start, 0), Y.roll(start, 0), strict=True)


def on_a_stream(model: mnb.Model, **arguments: Any) -> Any:
    return trained(model, DataLoader(Stream(), batch_size=7), steps_per_epoch=STEPS, **arguments)


@pytest.fixture(scope="module")
def whole_stream(strategies: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return on_a_stream(made(strategies(2), tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("at", ["on_epoch_begin", "on_train_batch_end", "on_test_end"])
def test_a_stream_that_goes_on_from_epoch_to_epoch_is_taken_up_where_it_stood(at, strategies, whole_stream, tmp_path):
    strategy, calls = strategies(2), []

    def strike(*_: Any) -> None:
        calls.append(at)
        # In the second epoch, which the stream is in the middle of.
        if len(calls) == (STEPS + 3 if at == "on_train_batch_end" else 2):
            kill(strategy, 1)

    killer = mnb.callbacks.LambdaCallback(**{at: lambda *args, logs=None: strike()})
    same(on_a_stream(made(strategy, tmp_path), callbacks=[killer]), whole_stream)
    assert len(calls) > 2


@pytest.mark.parametrize("victim", [0, 1])
def test_the_scheduler_goes_on_once_where_a_replica_was_lost_before_the_end_of_an_epoch(
    victim, strategies, undisturbed, tmp_path
):
    strategy, victims = strategies(2), [victim]
    killer = mnb.callbacks.LambdaCallback(on_test_end=lambda logs: victims and kill(strategy, victims.pop()))
    same(trained(made(strategy, tmp_path), callbacks=[killer]), undisturbed(2))


@pytest.mark.parametrize(("first", "victim"), [(0, 1), (1, 0)])
def test_batches_that_wait_when_an_epoch_has_just_begun_count_once(first, victim, strategies, undisturbed, tmp_path):
    strategy, settings = strategies(2), {"accumulate_steps": 3}
    killer = mnb.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch == first and kill(strategy, victim))
    same(trained(made(strategy, tmp_path, **settings), callbacks=[killer]), undisturbed(2, **settings))


def test_synchronised_statistics_of_a_replica_without_examples_are_of_the_step_too(strategies, undisturbed, tmp_path):
    strategy, settings = strategies(2), {"sync_batch_norm": True}
    killer = KillsBetween(strategy, STEPS, (0,))
    same(trained(made(strategy, tmp_path, **settings), callbacks=[killer]), undisturbed(2, **settings))


def test_a_replica_that_dies_after_a_callback_has_added_a_layer_leaves_its_statistics(strategies, tmp_path):
    strategy, ends = strategies(2), []
    for killers in ([], [KillsBetween(strategy, STEPS + 3, (0,))]):
        model = made(strategy, tmp_path)

        def grow(epoch: int, logs: Any, model: mnb.Model = model) -> None:
            if epoch == 1:
                model.network.insert(0, nn.BatchNorm1d(4))

        grows = mnb.callbacks.LambdaCallback(on_epoch_begin=grow)
        ends.append(trained(model, callbacks=[grows, *killers]))
    same(*ends)


class Fragile(torch.optim.SGD):
    """Kills the replica that reads its state, once it is armed, by the controller's number in a file, and once."""

    def __init__(self, parameters: Any, folder: Path) -> None:
        super().__init__(parameters, 0.1, momentum=0.9)
        self.armed = folder / "armed"

    def state_dict(self) -> dict[str, Any]:
        if self.armed.exists() and self.armed.read_text() != str(os.getpid()):
            self.armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().state_dict()


def test_a_model_is_saved_whole_though_a_replica_dies_meanwhile(strategies, tmp_path):
    strategy = strategies(2)
    with strategy.scope():
        model = mnb.Model(nn.Linear(4, 1))
        model.compile(Fragile(model.parameters(), tmp_path), loss="mse")
    model.fit(X, X[:, :1], batch_size=8, verbose=0)
    state = model.training_state()["optimizer"]["state"]
    (tmp_path / "armed").write_text(str(os.getpid()))
    model.save(tmp_path / "model.pt")
    assert not (tmp_path / "armed").exists()
    assert (tmp_path / "model.pt").exists()
    assert torch.equal(state[0]["momentum_buffer"], model.training_state()["optimizer"]["state"][0]["momentum_buffer"])


class Deadly(mnb.CrossDeviceOps):
    """Kills replica 1 as it becomes its op, once."""

    exact = True

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def parts(self) -> tuple[()]:
        if os.environ.get("RANK") == "1" and not Path(self.folder, "died").exists():
            Path(self.folder, "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return ()

    def start(self, op: mnb.ReduceOp, flat: Tensor) -> None:
        dist.all_reduce(flat)
        if op is mnb.ReduceOp.MEAN:
            flat /= self.member.num_replicas

    def unfit_for(self, devices: Any) -> None:
        return None


class ChangesOps(mnb.callbacks.Callback):
    """Has the replicas reduce by another op from the second epoch on."""

    def __init__(self, strategy: Any, ops: Any) -> None:
        super().__init__()
        self._strategy, self._ops = strategy, ops

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self._strategy.cross_device_ops = self._ops


def test_one_that_dies_while_the_replicas_get_another_op_is_replaced(strategies, undisturbed, tmp_path, capsys):
    strategy = strategies(2)
    before = strategy.cross_device_ops
    try:
        found = trained(made(strategy, tmp_path), callbacks=[ChangesOps(strategy, Deadly(tmp_path))])
        assert strategy.run(lambda: type(mnb.get_strategy().cross_device_ops).__name__) == "Deadly"
    finally:
        strategy.cross_device_ops = before
    same(found, undisturbed(2))
    assert Path(tmp_path, "died").exists()
    assert "goes on" in capsys.readouterr().out


@pytest.mark.parametrize("reached", [True, False])
def test_a_replacement_finds_large_arrays_as_the_others_have_them(reached, strategies, tmp_path, monkeypatch):
    two, made_offers = strategies(2), []
    make = array_feed.Offer
    monkeypatch.setattr(array_feed, "Offer", lambda columns: made_offers.append(make(columns)) or made_offers[-1])
    if not reached:
        # As in a container where no process may look into another one's descriptors: then they are sent.
        monkeypatch.setattr(driver.Fit, "_reach", lambda fit, paths: [True, False])
    x, y = X.repeat(500, 1), Y.repeat(500)
    options = {"epochs": 3, "batch_size": 5000, "verbose": 0, "validation_data": (x.clone(), y)}

    def history_of(folder: str, callbacks: list[Any]) -> Any:
        model = made(two, tmp_path / folder)
        torch.manual_seed(9)
        history = model.fit(x, y, callbacks=callbacks, **options).history
        return {name: value.clone() for name, value in model.state_dict().items()}, dict(history)

    class Strikes(mnb.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                kill(two, 1)
                if reached:
                    x.zero_()

    weights, history = history_of("undisturbed", [])
    before = len(shared_files())
    struck, its_history = history_of("struck", [Strikes()])
    assert its_history == history
    for name, value in weights.items():
        torch.testing.assert_close(struck[name], value, rtol=0, atol=0)
    assert len(made_offers) == 4
    assert len(shared_files()) == before


def test_one_that_dies_while_others_are_brought_back_is_brought_back_too(
    strategies, undisturbed, tmp_path, monkeypatch
):
    strategy = strategies(3)
    asked = Running.ask_once
    struck = []

    def strike(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        found = asked(self, function, *args, **kwargs)
        if function is job.whereabouts and not struck:
            struck.append(True)
            kill(strategy, 2)
        return found

    monkeypatch.setattr(Running, "ask_once", strike)
    model = made(strategy, tmp_path, ((1, 5, "forward"),))
    same(trained(model), undisturbed(3))
    assert struck


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_replica_that_has_stepped_and_one_that_has_not_go_on_alike(ahead, strategies, tmp_path):
    """The one that dies holds its step back, and so does another: the third has stepped alone."""
    strategy = strategies(3)
    model = made(strategy, tmp_path, optimizer=uneven(tmp_path, ahead))
    calm = tmp_path / "calm"
    calm.mkdir()
    (calm / "struck").touch()
    same(trained(model), trained(made(strategy, calm, optimizer=uneven(calm, ahead))))


def uneven(folder: Path, ahead: int) -> Any:
    class Uneven(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            me, count = int(os.environ["RANK"]), self.__dict__.setdefault("_count", [0])
            count[0] += 1
            mark = folder / "struck"
            if count[0] == 5 and not mark.exists():
                if me == 2:
                    while not (folder / "ahead").exists():
                        os.sched_yield()
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if me != ahead:
                    # It waits here until it is told of the death.
                    import torch.distributed as dist

                    dist.barrier()
            found = super().step(closure)
            if count[0] == 5 and me == ahead:
                (folder / "ahead").touch()
            return found

    return Uneven, {"lr": 0.02}


def test_a_loader_with_its_own_order_and_noise_goes_on_where_it_was(strategies, tmp_path):
    def loader() -> Any:
        generator = torch.Generator().manual_seed(5)
        return torch.utils.data.DataLoader(Noisy(), batch_size=7, shuffle=True, generator=generator)

    strategy = strategies(2)
    expected = trained(made(strategy, tmp_path), loader())
    model = made(strategy, tmp_path / "struck", ((0, 4, "forward"), (1, 11, "backward")))
    same(trained(model, loader()), expected)


class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Examples with noise of three kinds, drawn where they are loaded."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return X[i] + 0.1 * torch.randn(4) + 0.1 * float(np.random.rand()), Y[i]


def test_raise_raises_and_the_model_can_be_fitted_again(strategies, tmp_path):
    model = made(strategies(2), tmp_path, ((1, 4, "forward"),))
    with pytest.raises(ReplicaDied, match=r"replica 1 .*SIGKILL") as error:
        trained(model, on_failure="raise")
    assert error.value.replica_ids == (1,)
    assert trained(model, epochs=1)[1]["loss"]
    with pytest.raises(mnb.UsageError, match="`on_failure` is 'again'"):
        model.fit(X, Y, on_failure="again")


def test_the_same_exception_would_come_again_and_is_raised_at_once(strategies, tmp_path):
    calls = tmp_path / "calls"

    class Raises(mnb.Model):
        def training_step(self, batch: Any) -> Any:
            with open(calls, "a") as file:
                file.write(".")
            raise OSError("a bad batch")

    with strategies(2).scope():
        model = Raises(nn.Linear(4, 2))
        model.compile()
    with pytest.raises(OSError, match="a bad batch"):
        model.fit(X, Y, batch_size=43, verbose=0)
    assert len(calls.read_text()) <= 2


def test_a_replica_that_dies_at_the_same_step_each_time_ends_fit(strategies, tmp_path):
    model = made(strategies(2), tmp_path, ((1, 0, "forward"),), times=9)
    with pytest.raises(ReplicaDied, match=r"Replica 1 died 3 times at the same step.*dmesg.*batch size"):
        trained(model)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_step_that_cannot_be_undone_ends_fit(strategies, tmp_path):
    class Steps(mnb.Model):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            for number in range(2):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self(x), y)
                if number and int(os.environ["RANK"]) and not (tmp_path / "struck").exists():
                    (tmp_path / "struck").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
            return loss

    with strategies(2).scope():
        model = Steps(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.compile(optimizer=None)
    with pytest.raises(ReplicaDied, match=r"had changed the weights already.*BackupAndRestore"):
        model.fit(X, Y, batch_size=7, verbose=0)


@pytest.mark.parametrize("kind", ["BackupAndRestore", "ModelCheckpoint"])
def test_when_all_die_fit_goes_on_from_its_latest_file(kind, strategies, undisturbed, tmp_path):
    strategy = strategies(2)
    place = tmp_path / ("folder" if kind == "BackupAndRestore" else "file.pt")
    saves = getattr(mnb.callbacks, kind)(place, save_freq=2)
    killer = KillsBetween(strategy, STEPS + 5, (0, 1))
    # Running statistics are averaged in a file.
    same(trained(made(strategy, tmp_path / "marks"), callbacks=[saves, killer]), undisturbed(2), statistics=False)
    # Saved after ten steps, of twelve.
    assert killer.calls == 3 * STEPS + 2


def test_when_all_die_and_nothing_was_saved_the_error_says_what_to_do(strategies, tmp_path):
    strategy = strategies(2)
    model = made(strategy, tmp_path)
    with pytest.raises(ReplicaDied, match=r"No replica is left.*BackupAndRestore") as error:
        trained(model, callbacks=[KillsBetween(strategy, 4, (0, 1))])
    assert error.value.replica_ids == (0, 1)
    assert trained(model, epochs=1)[1]["loss"]


def test_a_loss_of_all_before_fit_does_not_end_it_at_the_next_death(strategies, tmp_path):
    strategy = strategies(2)
    model = made(strategy, tmp_path, ((1, 2, "forward"),))
    trained(made(strategy, tmp_path / "other"), epochs=1)
    kill(strategy, 0, 1)
    with pytest.warns(UserWarning, match="all replicas had died"):
        strategy.run(os.getpid)
    same(trained(model), trained(made(strategy, tmp_path / "quiet")))
    assert list(tmp_path.glob("0.*"))


def test_evaluate_and_predict_are_done_again(strategies, tmp_path, capsys):
    strategy = strategies(2)
    model = made(strategy, tmp_path, ((1, 6, "evaluation"),))
    quiet = made(strategy, tmp_path / "quiet")
    for each in (model, quiet):
        trained(each, epochs=1, validation_data=None)
    expected = quiet.evaluate(X, Y, batch_size=7, verbose=0), quiet.predict(X, batch_size=7, verbose=0)
    assert model.evaluate(X, Y, batch_size=7, verbose=0) == expected[0]
    # The one that is left stands for both, until the next epoch begins.
    model.network[2]._strikes = ()
    found = model.predict(X, batch_size=7, verbose=0)
    assert found.shape == expected[1].shape
    assert capsys.readouterr().out.count("begins again") == 1


def test_nothing_warns_of_a_recovery(strategies, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(made(strategies(2), tmp_path, ((1, 2, "forward"),)), epochs=1)


class Graph(nn.Module):
    """A layer whose links fade."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("links", torch.eye(4).roll(1, 0).to_sparse())
        self.register_buffer("steps", torch.ones(2, dtype=torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.links.mul_(0.9)
            self.steps.copy_(self.steps.float() * 1.25)
        return self.linear(torch.sparse.mm(self.links, x.T).T)


def test_buffers_that_are_sparse_or_of_eight_bits_are_those_of_an_undisturbed_training(strategies, tmp_path):
    found = []
    for strikes in ((), ((1, 4, "forward"),)):
        folder = tmp_path / str(len(strikes))
        folder.mkdir()
        torch.manual_seed(3)
        with strategies(2).scope():
            model = mnb.Model(nn.Sequential(Graph(), Struck(folder, strikes), nn.Linear(2, 2)))
            model.compile(("sgd", {"lr": 0.1}), "cross_entropy")
        torch.manual_seed(9)
        history = model.fit(X, Y, batch_size=7, epochs=2, verbose=0)
        state = {name: value.float().to_dense().clone() for name, value in model.state_dict().items()}
        assert len(list(folder.iterdir())) == len(strikes)
        found.append((history.history, state))
    (history, state), (other, its_state) = found
    assert history == other
    for name, value in state.items():
        assert torch.equal(its_state[name], value), name
