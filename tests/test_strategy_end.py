"""How a strategy ends: closed, dropped, in a fork, with replicas that died; and what outlives it."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from driving import eventually, gone
from torch import nn
from trained import Net, X, adam_step, assert_equal_states, states, step_of, trained, with_adam

import mirror_nb as mnb
from mirror_nb.pool.local import stop_forkserver


def test_a_part_outlives_its_module_and_becomes_one_of_another(two):
    def used(module: nn.Module) -> torch.Tensor:
        return two.run(lambda: module(X[:1]).detach()).values[1]

    def trained(whole: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def step() -> None:
            whole(X).sum().backward()
            optimizer.step()

        two.run(step)

    def made() -> nn.Module:
        with two.scope():
            model = Net()
        used(model)
        return model.first

    body = made()
    gc.collect()
    before = used(body)
    with two.scope():
        whole = nn.Sequential(body, nn.Linear(body.out_features, 1))
        trained(whole, torch.optim.SGD(whole.parameters(), 0.1))
    del whole
    gc.collect()
    after = used(body)
    assert not torch.equal(after, before)
    assert torch.equal(after, body(X[:1]))


def test_two_strategies_live_side_by_side_and_a_closed_one_says_so(two):
    with mnb.MirroredStrategy(["cpu:0"]) as other:
        assert other.run(lambda: mnb.get_strategy().num_replicas_in_sync) == 1
        assert two.run(lambda: mnb.get_strategy().num_replicas_in_sync) == 2
    with pytest.raises(mnb.PoolClosed, match="was closed"):
        other.run(lambda: 1)
    assert two.run(lambda: 2) == 2


def test_a_model_keeps_what_it_learned_when_its_strategy_is_closed():
    strategy = mnb.MirroredStrategy(["cpu:0"])
    model = trained(strategy)
    strategy.close()
    assert model.weight.sum() == 2.0


def test_a_training_goes_on_in_this_process_once_its_strategy_is_closed():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            mirrored = with_adam()
        strategy.run(adam_step, args=(mirrored,))
        with pytest.raises(RuntimeError, match=r"call it inside the function given to strategy\.run"):
            mirrored[1].step()
    alone = with_adam()
    adam_step(alone)
    for one in (mirrored, alone):
        adam_step(one)
    assert_equal_states(states(mirrored), states(alone))


def held() -> tuple[int, int]:
    """Return how many descriptors and how many children this process has, zombies among them."""
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), len(process.children())


def test_a_strategy_that_is_dropped_gives_everything_back():
    def start() -> None:
        strategy = mnb.MirroredStrategy(["cpu:0", "cpu:1"])
        strategy.run(lambda: 1)

    start()
    before = held()
    for _ in range(2):
        start()
        assert held() == before


def test_what_was_trained_outlives_its_strategy_and_the_replicas_go_with_it():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as first:
        # What one leaves for the next, the forkserver say, stays.
        first.run(int)
    before = held()
    strategy = mnb.MirroredStrategy(["cpu:0", "cpu:1"])
    model = trained(strategy)
    with strategy.scope():
        counter = mnb.Variable(3.0)
        # As what imports torch's compiler does.
        taken = nn.Module.__init__, torch.Generator

    def bump(variable: mnb.Variable) -> None:
        variable.assign_add(1.0)

    strategy.run(bump, (counter,))
    del strategy
    gc.collect()
    assert model.weight.sum() == 2.0
    assert counter == 4.0
    del model
    gc.collect()
    assert held() > before, "the Variable is there"
    del counter
    assert held() <= before
    assert len(taken) == 2


def test_a_dashboard_that_is_shown_does_not_keep_a_strategy():
    before = held()[1]
    strategy = mnb.MirroredStrategy(["cpu:0", "cpu:1"])
    strategy.run(lambda: 1)
    dashboard = strategy.dashboard()
    del strategy
    assert held()[1] <= before
    assert dashboard.text()


def in_a_fork(function: Callable[[], str]) -> str:
    """Return what the function returns in a forked child, or what it raises; fail if it takes too long."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            said = function()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writable, said.encode())
        os._exit(0)
    os.close(writable)
    with open(readable) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


def test_a_fork_reads_what_its_parent_knew_and_is_told_where_to_run(two):
    model = trained(two)
    assert model.weight.sum() == 2.0
    with two.scope():
        counter = mnb.Variable(3.0)

    def bump() -> None:
        counter.assign_add(1.0)

    two.run(bump)
    refused = "ContextError: this process is a fork of the one that started the replicas; use the strategy there"
    assert in_a_fork(lambda: str(two.run(lambda: 1))) == refused
    assert in_a_fork(lambda: str(two.timeline())) == refused
    assert in_a_fork(lambda: str(float(model.weight.sum()))) == "2.0"
    # What was not read before the fork is as this process had it.
    assert in_a_fork(lambda: str(float(counter))) == "3.0"
    assert in_a_fork(lambda: str(two.close())) == "None"
    assert counter == 4.0
    assert two.run(lambda: 1) == 1


def test_a_fork_may_end_as_any_process_does(two):
    two.run(lambda: 1)

    def end() -> str:
        # Once the pool goes, and what multiprocessing waits for.
        two._place._pool._store = None
        return str(multiprocessing.active_children())

    assert in_a_fork(end) == "[]"
    assert two.run(lambda: 2) == 2


def test_a_strategy_that_a_fork_makes_has_replicas_of_its_own(two):
    two.run(lambda: 1)

    def fork() -> str:
        with mnb.MirroredStrategy(["cpu:0"]) as strategy:
            return str(strategy.run(lambda: 5))

    said = in_a_fork(lambda: f"{fork()}, forkserver ended: {stop_forkserver()}")
    assert said == "5, forkserver ended: None"
    assert two.run(lambda: 2) == 2


def test_a_worker_of_a_pool_of_the_users_own_trains_and_ends_with_a_strategy_that_is_never_closed():
    # Nor may it have children, as a process may that is no daemon.
    open_ones = []

    def train() -> None:
        open_ones.append(mnb.MirroredStrategy(["cpu:0", "cpu:1"]))
        assert open_ones[0].run(lambda: 3) == 3
        assert multiprocessing.current_process().daemon

    process = multiprocessing.get_context("fork").Process(target=train, daemon=True)
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode == 0


def test_a_program_may_fork_before_it_first_uses_its_strategy_and_use_it_at_its_end():
    source = """
    import atexit, os, mirror_nb
    strategy = mirror_nb.MirroredStrategy(["cpu:0", "cpu:1"])
    atexit.register(lambda: print("at the end", strategy.run(lambda: 2), flush=True))
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    print(strategy.run(lambda: 5), flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("5\nat the end 2\n" * 2, "")


def test_a_replica_that_died_is_replaced_with_all_that_is_mirrored(two):
    model = trained(two)
    with two.scope():
        counter = mnb.Variable(3.0)
    assert two.run(lambda: float(counter)) == 3.0

    def die() -> None:
        import os

        if mnb.get_replica_context().replica_id_in_sync_group == 1:
            os._exit(7)

    with pytest.raises(mnb.ReplicaDied, match=r"replica 1 \(cpu:1, pid \d+\) ended with exit code 7"):
        two.run(die)
    assert two.run(lambda: (model.weight.sum().item(), float(counter))) == (2.0, 3.0)


def test_a_state_that_cannot_be_told_costs_nothing_else_its_value_at_the_end():
    class Silent(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]]["lock"] = threading.Lock()

    strategy = mnb.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = Silent(model.parameters(), 1.0)
        value = mnb.Variable(1.0)
    before = model(torch.ones(1, 2)).item()
    strategy.run(step_of(model, optimizer))
    strategy.run(lambda: value.assign_add(1.0))
    with pytest.warns(UserWarning, match="closed without the latest values of the Silent: .*lock"):
        strategy.close()
    assert model(torch.ones(1, 2)).item() == pytest.approx(before - 3)
    assert float(value) == 2.0


class Settled(nn.Linear):
    """Cannot be made again elsewhere than where it was made."""

    def __reduce__(self) -> Any:
        return settled, (os.getpid(), *self.weight.shape)


def settled(pid: int, *shape: int) -> Settled:
    if os.getpid() != pid:
        raise ValueError("not here")
    return Settled(*shape)


def test_a_network_that_cannot_be_read_costs_no_optimizer_its_state(two):
    def made(strategy: mnb.MirroredStrategy) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(2, 1))
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        strategy.run(step_of(model, optimizer))
        return model, optimizer

    strategy = mnb.MirroredStrategy(["cpu:0"])
    (model, optimizer), (others, others_optimizer) = made(strategy), made(two)

    def settle() -> None:
        model.append(Settled(1, 1))

    strategy.run(settle)
    # Nor another strategy's.
    assert others_optimizer.state[others[0].bias]["momentum_buffer"].item() == 1.0
    assert len(optimizer.state_dict()["state"]) == 2
    with pytest.raises(ValueError, match="not here"):
        model.state_dict()
    strategy.run(settle)
    with pytest.warns(UserWarning, match="closed without the latest values of networks: not here"):
        strategy.close()
    assert len(optimizer.state) == 2


def test_an_optimizer_goes_on_from_its_last_known_state_when_all_replicas_have_died():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            mirrored = with_adam()
        strategy.run(adam_step, args=(mirrored,))
        read = states(mirrored)
        with pytest.raises(mnb.ReplicaDied):
            strategy.run(lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.warns(UserWarning, match="all replicas had died"):
            strategy.run(lambda: None)
        assert_equal_states(states(mirrored), read)
        strategy.run(adam_step, args=(mirrored,))
        alone = with_adam()
        adam_step(alone)
        adam_step(alone)
        assert_equal_states(states(mirrored), states(alone))


def constant(value: float) -> nn.Linear:
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def test_functions_find_their_networks_after_all_replicas_have_died(two):
    with two.scope():
        first, second = constant(1.0), constant(5.0)
    functions = [lambda: first.weight.item(), lambda: second.weight.item()]
    assert list(map(two.run, functions)) == [1.0, 5.0]
    with pytest.raises(mnb.ReplicaDied):
        two.run(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.warns(UserWarning, match="all replicas had died"):
        # In another order, and the first one for another function.
        assert two.run(functions[1]) == 5.0
    assert two.run(lambda: first.weight.item() + 1) == 2.0
    assert list(map(two.run, functions)) == [1.0, 5.0]


class EndsReplicas:
    """Kills processes, once, when it is packed."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids

    def __reduce__(self) -> Any:
        while self.pids:
            pid = self.pids.pop()
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: gone(pid), "the replica has ended")
        return int, ()


def test_a_call_is_made_anew_where_all_replicas_die_while_it_is_prepared(two):
    with two.scope():
        known = constant(1.0)
    two.run(lambda: known(torch.ones(1, 1)).item())
    with two.scope():
        new = constant(3.0)
    ends = EndsReplicas(list(two.run(os.getpid)))

    def function(_: Any) -> float:
        return new.weight.item()

    with pytest.warns(UserWarning, match="all replicas had died"):
        assert two.run(function, args=(ends,)) == 3.0
    assert two.run(function, args=(0,)) == 3.0


def test_variables_stay_readable_when_their_strategy_is_closed():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            value = mnb.Variable(1.0)
            total = mnb.Variable(0.0, aggregation="SUM", synchronization="ON_READ")
        strategy.run(lambda: [value.assign_add(1.0), total.assign_add(torch.tensor(3.0))])
    assert float(value) == 2.0
    assert float(total) == 6.0
    assert repr(value) == "MirroredVariable:{\n  0: tensor(2.),\n  1: tensor(2.)\n}"


@pytest.mark.parametrize(
    ("aggregation", "start", "expected"), [("none", 0.0, [1.0, 2.0]), ("mean", 0, [1, 2]), ("sum", 0, [1, 2])]
)
def test_whatever_a_variable_holds_closing_keeps_it_and_what_comes_after_it(aggregation, start, expected):
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            own = mnb.Variable(start, aggregation=aggregation, synchronization="on_read")
            step = mnb.Variable(0.0)

        def count() -> None:
            own.assign_add(torch.tensor(mnb.get_replica_context().replica_id_in_sync_group + 1).to(own.dtype))
            step.assign_add(1.0)

        strategy.run(count)
    assert [value.item() for value in own.values] == expected
    assert float(step) == 1.0
    if aggregation != "none":
        assert float(own) == {"mean": 1.5, "sum": 3.0}[aggregation]


def test_what_was_counted_is_saved_after_the_strategy_is_closed(tmp_path):
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            total, mean = (mnb.Variable(0.0, aggregation=rule, synchronization="on_read") for rule in ("sum", "mean"))
        strategy.run(lambda: [total.assign_add(3.0), mean.assign_add(3.0)])
    torch.save([total, mean], tmp_path / "counted.pt")
    assert [float(one) for one in torch.load(tmp_path / "counted.pt")] == [6.0, 3.0]
    assert float(copy.copy(total)) == 6.0


def test_what_fails_when_a_strategy_is_closed_is_told_and_costs_nothing_else_its_value(monkeypatch):
    strategy = mnb.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        broken, value = mnb.Variable(1.0, name="broken"), mnb.Variable(1.0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    strategy.run(lambda: [broken.assign_add(1.0), value.assign_add(1.0)])
    strategy.run(step_of(model, optimizer))
    home = strategy._place._home
    keep = home.keep

    def lose(variable: mnb.Variable, fetched: Any) -> None:
        if variable is broken:
            raise RuntimeError("lost on the way")
        keep(variable, fetched)

    monkeypatch.setattr(type(home), "keep", lambda self, variable, fetched: lose(variable, fetched))
    with pytest.warns(UserWarning, match="without the latest values of the Variable 'broken': lost on the way"):
        strategy.close()
    assert float(value) == 2.0
    assert optimizer.state[model.weight]["momentum_buffer"].shape == (1, 2)


def test_a_variable_has_one_value_everywhere_when_it_is_written_after_its_strategy_is_closed():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            value, unsent = mnb.Variable(1.0), mnb.Variable(1.0)
            total = mnb.Variable(0.0, aggregation="sum", synchronization="on_read")
            mean = mnb.Variable(0.0, aggregation="mean", synchronization="on_read")
        strategy.run(lambda: [value.assign_add(1.0), total.assign_add(3.0), mean.assign_add(3.0)])

    def seen(variable: mnb.Variable) -> list[float]:
        return [float(variable), float(variable.read_value()), *map(float, variable.values)]

    for variable in (value, unsent, mean):
        variable.assign(9.0)
        assert seen(variable) == [9.0, 9.0, 9.0, 9.0]
        variable.assign_sub(1.0)
        with torch.no_grad():
            variable.add_(4.0)
        assert seen(variable) == [12.0, 12.0, 12.0, 12.0]
    assert repr(value) == "MirroredVariable:{\n  0: tensor(12.),\n  1: tensor(12.)\n}"
    total.assign(9.0)
    assert seen(total) == [9.0, 9.0, 4.5, 4.5]
    total.mul_(2.0)
    assert seen(total) == [18.0, 18.0, 9.0, 9.0]
    value.assign(mnb.PerReplica([torch.tensor(1.0), torch.tensor(2.0)]))
    assert [float(own) for own in value.values] == [1.0, 2.0]


def test_what_a_survivor_has_counted_is_counted_once(two):
    with two.scope():
        total = mnb.Variable(0.0, trainable=False, aggregation="sum", synchronization="on_read")

    def count() -> None:
        total.assign_add(100.0 if mnb.get_replica_context().replica_id_in_sync_group == 0 else 1.0)

    two.run(count)
    os.kill(two._place._ready().status()[1].pid, signal.SIGKILL)
    with contextlib.suppress(mnb.ReplicaDied):
        two.run(int)
    assert [float(value) for value in total.values] == [100.0, 0.0]


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda two, value, optimizer: float(value), 3.0),
        (lambda two, value, optimizer: [float(own) for own in value.values], [3.0, 3.0]),
        (lambda two, value, optimizer: float(optimizer.state_dict()["state"][0]["step"]), 2.0),
        (lambda two, value, optimizer: optimizer.zero_grad(), None),
        (lambda two, value, optimizer: bool(two.compare_parameters()), True),
        (lambda two, value, optimizer: float(value.assign(3.0)), 3.0),
        (lambda two, value, optimizer: float(value.fill_(3.0)), 3.0),
        (lambda two, value, optimizer: setattr(value, "data", torch.tensor(3.0, dtype=torch.float64)), None),
    ],
    ids=["variable", "components", "state", "gradients", "comparison", "assigned", "written", "of another dtype"],
)
def test_what_is_read_or_set_while_a_replica_dies_is_asked_again(two, read, expected, monkeypatch):
    with two.scope():
        value, model = mnb.Variable(1.0, trainable=False), nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        value.assign_add(1.0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    two.run(step)
    two.run(step)
    pool = two._place._ready()
    run, died = pool.run, []

    def run_as_one_dies(*args: Any, **options: Any) -> Any:
        if not died:
            died.append(pool.status()[1].pid)
            os.kill(died[0], signal.SIGKILL)
        return run(*args, **options)

    monkeypatch.setattr(pool, "run", run_as_one_dies)
    assert read(two, value, optimizer) == expected
    assert died
    assert [float(own) for own in value.values] == [3.0, 3.0]


def append(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def append_inside(model: nn.Sequential) -> None:
    inner: Any = model[1]
    inner.append(nn.Linear(2, 2))


def register(model: nn.Sequential) -> None:
    model.register_buffer("scale", torch.tensor(2.0))


def tie(model: nn.Sequential) -> None:
    inner: Any = model[1]
    inner[0].weight = model[0].weight


def set_attribute(model: nn.Sequential) -> None:
    model[0].temperature = 0.5


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("change", [append, append_inside, register, tie, set_attribute])
def test_what_a_network_became_in_the_replicas_is_read_here_when_one_has_died_since(two, change, dies):
    torch.manual_seed(0)
    with two.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    two.run(lambda: change(model))
    os.kill(two._place._ready().status()[dies].pid, signal.SIGKILL)
    with contextlib.suppress(mnb.ReplicaDied):
        two.run(int)

    def told() -> Any:
        held = {name: value.tolist() for name, value in model.state_dict().items()}
        return held, [name for name, _ in model.named_parameters()], getattr(model[0], "temperature", None)

    assert told() == two.run(told)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    assert told() == two.run(told)


def test_a_closed_strategy_looks_closed():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert repr(strategy) == "<MirroredStrategy: cpu:0, cpu:1>"
    assert repr(strategy) == "<MirroredStrategy: cpu:0, cpu:1, closed>"


def test_a_write_to_a_view_of_a_closed_variable_is_seen_everywhere():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            value = mnb.Variable([1.0, 2.0], trainable=False)
        strategy.run(lambda: value.assign_add([1.0, 1.0]))
    value[1:].fill_(9.0)
    assert value.tolist() == [2.0, 9.0]
    assert [own.tolist() for own in value.values] == [[2.0, 9.0]] * 2


def test_a_strategy_that_was_closed_says_so_in_each_of_its_methods():
    for strategy in (mnb.MirroredStrategy(["cpu:0", "cpu:1"]), mnb.OneDeviceStrategy("cpu")):
        each = strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        with strategy.scope():
            variable = mnb.Variable(3.0)
        strategy.close()
        for call in (
            lambda strategy: strategy.run(abs, (1,)),
            lambda strategy: strategy.reduce("sum", 1, axis=None),
            lambda strategy: strategy.gather(torch.ones(1), axis=0),
            lambda strategy: strategy.distribute_dataset(torch.ones(4), batch_size=2),
            lambda strategy: strategy.distribute_datasets_from_function(lambda context: [torch.ones(2)]),
            lambda strategy: strategy.distribute_values_from_function(lambda context: 1),
            lambda strategy: strategy.mirror(nn.Linear(1, 1)),
            lambda strategy: strategy.extended.reduce_to("mean", 1, None),
            lambda strategy, variable=variable: strategy.extended.update(variable, lambda own: own),
            lambda strategy: strategy.scope().__enter__(),
            lambda strategy: strategy.__enter__(),
        ):
            with pytest.raises(mnb.PoolClosed, match="this strategy was closed; make a new one"):
                call(strategy)
        assert strategy.local_results(each) == tuple(range(strategy.num_replicas_in_sync))
        assert variable.numpy() == 3
        assert not mnb.has_strategy()
