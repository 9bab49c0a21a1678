"""The strategy as a notebook cell or a script holds it: scopes, run, values, errors, and what it is called with."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from trained import X, replica_id, trained

import mirror_nb as mnb
from mirror_nb.errors import ReplicaDied
from mirror_nb.messages import Stream
from mirror_nb.strategies.listener import Listener
from mirror_nb.values import PerReplica, same


def test_what_is_made_after_a_scope_is_left_is_not_mirrored_though_one_inside_it_was_never_left(two):
    with two.scope():
        two.scope().__enter__()
    model = nn.Linear(1, 1)
    with pytest.raises(mnb.UsageError, match="a Linear the function captured got gradients, but it is not mirrored"):
        two.run(lambda: model(torch.ones(1, 1)).sum().backward())


@pytest.mark.parametrize("n", [1, 2])
def test_variables_that_a_function_makes_and_returns_are_one_each(two, n):
    strategy = two if n == 2 else mnb.MirroredStrategy(["cpu:0"])

    def make() -> dict[str, Any]:
        i = mnb.get_replica_context().replica_id_in_sync_group
        on_write = mnb.Variable(1.0, name="written", aggregation="MEAN")
        on_read = mnb.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        own = mnb.Variable([0, 0])
        on_read.assign(2.0 + i)
        own.assign([i, 5])
        return {"vs": [on_write, own], "read": on_read, "plain": 7}

    made = strategy.run(make)
    on_write, own = made["vs"]
    assert [type(v).__name__ for v in (on_write, own, made["read"])] == [
        "MirroredVariable",
        "MirroredVariable",
        "SyncOnReadVariable",
    ]
    assert (on_write.name, on_write.aggregation.name, made["plain"]) == ("written", "MEAN", 7)
    assert [v.tolist() for v in own.values] == [[0, 5], [1, 5]][:n]
    assert [v.item() for v in made["read"].values] == [2, 3][:n]
    strategy.run(lambda: (on_write.assign_add(4.0), made["read"].assign_add(1.0)))
    assert float(on_write) == 5
    assert float(made["read"]) == sum([3, 4][:n])
    if n == 1:
        strategy.close()


@pytest.mark.parametrize("n", [1, 2])
def test_a_variable_that_a_function_returns_twice_is_one_and_keeps_what_each_replica_wrote(two, n):
    strategy = two if n == 2 else mnb.MirroredStrategy(["cpu:0"])

    def make() -> Any:
        made = mnb.Variable(1.0, aggregation="MEAN")
        with torch.no_grad():
            made.add_(mnb.get_replica_context().replica_id_in_sync_group)
        return made, {"again": made}

    made, again = strategy.run(make)
    assert again["again"] is made
    assert [v.item() for v in made.values] == [1, 2][:n]
    if n == 1:
        strategy.close()


def test_with_one_replica_results_without_a_variable_are_what_the_function_has_returned():
    def shared() -> Any:
        one = [1]
        return {"one": one, "same": one}

    with mnb.MirroredStrategy(["cpu:0"]) as strategy:
        made = strategy.run(shared)
    assert made["one"] is made["same"]


def test_results_with_a_value_for_each_example_weigh_gradients_as_the_batch_they_are_from(two):
    with two.scope():
        model = nn.Linear(1, 1, bias=False)

    def gradient(x: torch.Tensor) -> float:
        model.zero_grad()
        model(x).mean().backward()
        return model.weight.grad.item()

    for batch in two.distribute_dataset(torch.arange(1.0, 6.0)[:, None], batch_size=4):
        made = two.run(lambda x: {"twice": 2 * x, "mean": x.mean()}, (batch,))
        own = two.run(gradient, (batch,))
        assert two.run(gradient, (made["twice"],)) == 2 * own
        assert two.run(lambda batch=batch: gradient(batch)) == own
        assert made["mean"].shares is None


WRITES = {
    "data": lambda model, v: (model[0].weight.data.fill_(2.0), v.data.fill_(2.0)),
    "another data": lambda model, v: (
        setattr(model[0].weight, "data", torch.full((1, 1), 2.0)),
        setattr(v, "data", v * 0 + 2),
    ),
    "data of a buffer": lambda model, v: (model[1].running_mean.data.fill_(2.0), v.data.copy_(v + 1)),
    "an array": lambda model, v: (model[0].weight.detach().numpy().fill(2.0), v.data.add_(1.0)),
    "initialisation as in the DCGAN tutorial": lambda model, v: (
        model.apply(lambda part: [nn.init.constant_(p.data, 2.0) for p in part.parameters(recurse=False)]),
        v.data.mul_(2.0),
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_here_past_autograd_is_in_the_replicas(two, write):
    with two.scope():
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)).eval()
        v = mnb.Variable(1.0)
        nn.init.ones_(model[0].weight)

    def there() -> list[Any]:
        return [*(tensor.flatten().tolist() for tensor in model.state_dict().values()), float(v)]

    two.run(there)
    # It may be kept: read again it is what the module has.
    float(v)
    write(model, v)
    assert two.local_results(two.run(there))[0] == there()
    assert 2.0 in [there()[0][0], there()[3][0]]
    assert float(v) == 2


def test_a_sum_of_whole_numbers_takes_operations_in_place_from_outside(two):
    with two.scope():
        count = mnb.Variable(7, synchronization="on_read", aggregation="sum")
    two.run(lambda: count.assign(torch.tensor(3 + replica_id())))
    count += 2
    assert int(count) == 9


def test_many_variables_are_read_by_one_request(two, monkeypatch):
    with two.scope():
        many = [mnb.Variable(float(i), aggregation="only_first_replica") for i in range(9)]
        apart, large = (mnb.Variable(torch.zeros(n), trainable=False, aggregation="mean") for n in (1, 1 << 18))

    def change() -> None:
        for variable in (*many[1:], large):
            variable.assign_add(torch.ones(variable.shape))
        apart.add_(1.0 + replica_id())

    two.run(change)
    asked: list[int] = []
    ask = two._place.ask
    monkeypatch.setattr(two._place, "ask", lambda fn, args: asked.append(len(*args)) or ask(fn, args))
    square = many[0] * many[0]
    assert [float(v) for v in many] == [0.0, *map(float, range(2, 10))]
    assert float(large[0]) == 1.0
    assert len(asked) == 2, "what is large comes by itself, what differs for who reads it"
    with pytest.warns(UserWarning, match="differ"):
        assert float(apart) == 1.0
    two.run(change)
    assert float(many[1]) == 3.0
    square.backward()
    assert many[0].grad == 0.0, "it is not written to where it has not changed"


def test_on_a_batch_replicas_draw_different_random_numbers(two):
    torch.manual_seed(3)
    batch = next(iter(two.distribute_dataset(torch.zeros(4), batch_size=4)))
    first, second = two.local_results(two.run(lambda x: x + torch.randn_like(x), args=(batch,)))
    assert not same(first, second)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gradient_reduction": "max"}, "`gradient_reduction` is 'max'; it must be ReduceOp.SUM or ReduceOp.MEAN"),
        ({"seed": "a"}, "`seed` must be a whole number, not 'a'"),
        ({"seed": 1.5}, "`seed` must be a whole number, not 1.5"),
        ({"seed": None}, "`seed` must be a whole number, not None"),
    ],
)
def test_settings_that_are_none_are_refused_at_once_by_their_names(given, said):
    with pytest.raises(mnb.UsageError, match=re.escape(said)):
        mnb.MirroredStrategy(["cpu:0", "cpu:1"], **given)


def test_one_scope_is_entered_again_and_inside_itself_and_decorates(two):
    scope = two.scope()
    for _ in range(2):
        with scope as entered, scope:
            model = nn.Linear(2, 1)
        assert entered is two
        assert two.extended.variable_created_in_scope(model)
        assert not mnb.has_strategy()

    @scope
    def make() -> nn.Module:
        return nn.Linear(2, 1)

    assert two.extended.variable_created_in_scope(make())
    assert not two.extended.variable_created_in_scope(nn.Linear(2, 1))


PLAIN = """
import gc
import torch
import mirror_nb as mnb
print("ran")
strategy = mnb.MirroredStrategy(["cpu:0", "cpu:1"])
strategy.scope().__enter__()
gc.collect()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
before = model.bias.item()
strategy.run(step)
print(mnb.get_strategy() is strategy, round(before - model.bias.item(), 4))
def f():
    return mnb.get_replica_context().replica_id_in_sync_group * 10
print(strategy.run(f).values)
"""


@pytest.fixture(scope="module")
def said_by_a_plain_script(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(PLAIN)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_scope_that_is_never_left_holds_until_the_process_ends(said_by_a_plain_script):
    assert said_by_a_plain_script[1] == "True 0.1"


def test_another_strategy_that_is_set_takes_the_place_of_the_first(two):
    with mnb.MirroredStrategy(["cpu:0"]) as other:
        mnb.set_strategy(two)
        mnb.set_strategy(other)
        try:
            model = nn.Linear(2, 1)
            assert other.extended.variable_created_in_scope(model)
            assert not two.extended.variable_created_in_scope(model)
            with pytest.raises(RuntimeError, match=r"Mixing different .*take it back first: set_strategy\(None\)"):
                two.run(lambda: 1)
            with pytest.raises(RuntimeError, match="Mixing different"), two.scope():
                pass
        finally:
            mnb.set_strategy(None)
    with pytest.raises(mnb.PoolClosed):
        mnb.set_strategy(other)
    assert not mnb.has_strategy()
    with pytest.raises(mnb.UsageError, match=r"must be a strategy, .* not 'cpu:0'"):
        mnb.set_strategy("cpu:0")


@pytest.mark.parametrize(
    "call",
    [
        lambda strategy: strategy.run(lambda: 1),
        lambda strategy: strategy.reduce("sum", 1.0),
        lambda strategy: strategy.gather(torch.ones(1), 0),
        lambda strategy: strategy.extended.reduce_to("sum", 1.0, "cpu"),
        lambda strategy: strategy.extended.update(mnb.Variable(1.0), lambda component: None),
    ],
    ids=["run", "reduce", "gather", "reduce_to", "update"],
)
def test_in_a_scope_another_strategy_does_nothing(two, call):
    with mnb.MirroredStrategy(["cpu:0"]) as one:
        for other in (one, mnb.OneDeviceStrategy("cpu:0")):
            with two.scope(), pytest.raises(RuntimeError, match=r"Mixing different .* is not .*cpu:0>; leave its"):
                call(other)
        with one.scope():
            call(one)


def test_values_of_another_number_of_replicas_are_refused(two):
    three = mnb.PerReplica([torch.ones(1)] * 3)
    for call in (
        lambda: two.run(lambda x: x, args=(three,)),
        lambda: two.reduce("sum", three),
        lambda: two.gather(three, axis=0),
        lambda: two.local_results([three]),
    ):
        with pytest.raises(mnb.UsageError, match="has 3 values, but the strategy has 2 replicas"):
            call()
    with pytest.raises(mnb.UsageError, match="`value_fn` must be a function"):
        two.distribute_values_from_function(3)


def test_an_exception_has_its_own_type_and_tells_the_replica_and_the_line(two):
    def fail() -> None:
        if mnb.get_replica_context().replica_id_in_sync_group == 1:
            raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing") as caught:
        two.run(fail)
    notes = "\n".join(caught.value.__notes__)
    assert "raised by replica 1 (cpu:1)" in notes
    assert 'raise LookupError("no such thing")' in notes
    # None of mirror_nb's own frames above the function's.
    assert "runtime.py" not in notes
    assert two.run(lambda: 1) == 1


def test_an_error_for_want_of_examples_says_so(two):
    for batch in two.distribute_dataset((torch.ones(1),), batch_size=1):
        with pytest.raises(RuntimeError, match="non-empty") as caught:
            two.run(lambda batch: torch.stack(list(batch[0])), (batch,))
        assert "replica 1 (cpu:1) had none of the batch's 1 examples" in caught.value.__notes__[0]


def test_prints_of_a_replica_show_here(two, capfd):
    two.run(lambda: print("said", mnb.get_replica_context().replica_id_in_sync_group))
    assert sorted(capfd.readouterr().out.splitlines()) == ["[replica 1] said 1", "said 0"]


def test_sum_is_tensorflows_rule():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"], gradient_reduction=mnb.ReduceOp.SUM) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)

        def gradient(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                mnb.compute_average_loss(model(x).flatten(), global_batch_size=4).backward()
            return model.weight.grad.clone()

        batch = next(iter(strategy.distribute_dataset(torch.tensor([[1.0], [2.0], [3.0], [6.0]]), batch_size=4)))
        assert [float(g) for g in strategy.run(gradient, args=(batch,)).values] == [3.0, 3.0]


def test_a_loss_for_gradients_that_are_summed_warns_where_they_are_averaged(two):
    def said() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = torch.ones(2, requires_grad=True)
            for scaled in (mnb.compute_average_loss, mnb.scale_regularization_loss):
                scaled(losses).backward()
                scaled(losses.detach())
        return [str(warning.message) for warning in caught]

    average, regularization = two.run(said)
    assert average.startswith("compute_average_loss divides by the global batch size, which belongs to summed grad")
    assert regularization.startswith("scale_regularization_loss divides by the replicas, which belongs to summed grad")
    assert "this strategy averages them: they come out 2 times too small" in average


def test_a_script_needs_no_guard(said_by_a_plain_script):
    first, _, *last = said_by_a_plain_script
    assert [first, *last] == ["ran", "(0, 10)"]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["GPU:17"], "cuda:17 not found"),
        (["cpu:0", "cpu:0"], "named twice"),
        ([], "empty"),
        (["tpu:0"], "names no device"),
    ],
)
def test_devices_that_cannot_be_are_refused(devices, message):
    with pytest.raises(ValueError, match=message):
        mnb.MirroredStrategy(devices)


def test_a_read_that_was_interrupted_is_not_taken_for_done(two, monkeypatch):
    model = trained(two)
    place = two._place
    monkeypatch.setattr(place, "_push_changes", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model.state_dict()
    monkeypatch.undo()
    assert model.weight.sum() == 2.0


def test_a_function_may_use_the_strategy_that_runs_it(two):
    assert two.run(lambda: two.num_replicas_in_sync) == 2
    assert two.run(lambda: mnb.get_strategy() is two)


def test_a_copy_of_what_holds_a_strategy_has_the_same_one_and_a_pickle_says_why_not(two):
    assert copy.deepcopy({"strategy": two})["strategy"] is two
    with pytest.raises(mnb.TransferError, match="a strategy belongs to the process that made it"):
        pickle.dumps(two)


def test_a_strategy_that_a_replica_gives_back_is_the_replicas_again_where_it_is_sent(two):
    given = two.local_results(two.run(lambda: {"strategy": mnb.get_strategy()}["strategy"]))[0]
    with pytest.raises(AttributeError, match=r"`reduce` of a strategy that a replica gave back.* given to `run`"):
        given.reduce("sum", 1)
    assert two.run(lambda: given is mnb.get_strategy() and given.num_replicas_in_sync) == 2


def test_what_an_interrupted_write_to_a_variable_left_goes_to_the_replicas_with_the_next_call(two, monkeypatch):
    with two.scope():
        variable = mnb.Variable(1.0, trainable=False)
    two.run(lambda: variable.assign(2.0))
    assert variable == 2.0
    monkeypatch.setattr(two._place, "ask", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        variable.add_(1.0)
    monkeypatch.undo()
    assert two.local_results(two.run(lambda: variable.read_value())) == (3.0, 3.0)


@pytest.mark.parametrize("how", ["assign", "assign_add"])
@pytest.mark.parametrize("there", [True, False])
def test_what_is_assigned_is_here_what_the_replicas_have_though_it_was_cut_short(two, monkeypatch, how, there):
    with two.scope():
        variable = mnb.Variable(1.0)
    two.run(lambda: variable.read_value())
    assert float(variable) == 1.0
    command = two._place.command

    def die(*args: Any, **options: Any) -> None:
        if there:
            command(*args, **options)
        raise ReplicaDied("replica 1 died")

    monkeypatch.setattr(two._place, "command", die)
    with pytest.raises(ReplicaDied):
        getattr(variable, how)(1.0 + (how == "assign"))
    monkeypatch.undo()
    # Once: what is added is not added again, since some may have it.
    assert float(variable) == 1.0 + there
    assert two.local_results(two.run(lambda: variable.read_value())) == (1.0 + there,) * 2


def test_a_variable_may_be_added_to_itself_from_outside(two):
    with two.scope():
        variable = mnb.Variable([1.0, 2.0])
    two.run(lambda: variable.read_value())
    variable.assign_add(variable.detach())
    assert [own.tolist() for own in variable.values] == [[2.0, 4.0]] * 2


def test_what_has_no_common_value_is_written_in_place_from_outside_as_long_as_it_is_here_alone(two):
    with two.scope():
        own = mnb.Variable(1.0, synchronization="on_read", aggregation="none")
    own += 1
    assert two.local_results(two.run(lambda: own.read_value())) == (2.0, 2.0)


def test_a_variable_from_outside_the_scope_has_nobody_who_aggregates_it(two):
    outside = mnb.Variable(0.0, aggregation="sum")
    with pytest.raises(ValueError, match=r"cannot assign_add to Variable on one of .* outside this .* one by SUM"):
        two.run(lambda: outside.assign_add(torch.tensor(1.0)))
    assert outside.assign_add(1.0).item() == 1


def test_a_function_of_a_batch_may_give_back_a_nested_tensor(two):
    (batch,) = two.distribute_dataset(torch.arange(4.0), batch_size=4)
    given = two.run(lambda x: torch.nested.nested_tensor([x[:1], x]), args=(batch,))
    assert [[row.tolist() for row in own.unbind()] for own in given] == [[[0], [0, 1]], [[2], [2, 3]]]


def test_a_replica_context_that_a_function_gives_back_prints(two):
    assert "1: <ReplicaContext: replica 1>" in repr(two.run(mnb.get_replica_context))


class Measured:
    """Its pickle calls it with one argument less than it takes."""

    def __init__(self, value, limit):
        self.value, self.limit = value, limit

    def __reduce__(self):
        return Measured, (self.value,)


@pytest.mark.parametrize(
    ("call", "inside"),
    [
        (lambda two: two.run(lambda: Measured(2, 1)), "what the function returned"),
        (lambda two: two.run(str, args=(Measured(2, 1),)), "what the function captures or is given"),
    ],
)
def test_an_object_that_is_pickled_but_not_unpickled_says_so(two, call, inside):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'limit'") as error:
        call(two)
    assert f"raised while {inside} was made again from its pickle" in "".join(traceback.format_exception(error.value))
    assert two.run(lambda: 1) == 1


def test_run_inside_a_replica_function_is_an_error(two):
    with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
        two.run(lambda: two.run(lambda: 1))


def test_a_function_that_captures_another_strategy_is_refused(two):
    with (
        mnb.MirroredStrategy(["cpu:0"]) as other,
        pytest.raises(mnb.UsageError, match="another strategy than the one that runs it"),
    ):
        two.run(lambda: other.num_replicas_in_sync)


@pytest.mark.parametrize("synchronization", ["auto", "on_read"])
def test_a_variable_of_another_strategy_is_refused(two, synchronization):
    with mnb.MirroredStrategy(["cpu:0"]) as other:
        with other.scope():
            count = mnb.Variable(1.0, trainable=False, synchronization=synchronization)
        with pytest.raises(mnb.UsageError, match="of another strategy than the one that runs it"):
            two.run(lambda: count + 1.0)
        with pytest.raises(mnb.UsageError, match="of another strategy than the one that runs it"):
            two.run(lambda x: x, args=(count,))


class Coded(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def test_an_exception_keeps_its_class_whatever_its_constructor_takes(two):
    class Local(Exception):
        def __init__(self, key: str, value: float) -> None:
            super().__init__(f"{key} is {value}")
            self.key = key

    def refuse(error: Callable[[], BaseException]) -> None:
        raise error()

    with pytest.raises(Local) as local:
        two.run(refuse, args=(lambda: Local("lr", -1),))
    assert (local.value.key, str(local.value)) == ("lr", "lr is -1")
    with pytest.raises(ValueError, match="code 3") as coded:
        two.run(refuse, args=(lambda: Coded(code=3),))
    assert coded.value.code == 3
    with pytest.raises(ExceptionGroup) as group:
        two.run(refuse, args=(lambda: ExceptionGroup("two", [Coded(code=1), Local("a", 2)]),))
    assert [type(error).__name__ for error in group.value.exceptions] == ["Coded", "Local"]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.steps = mnb.Variable(0.0, trainable=False, aggregation="sum")
        self.totals = [mnb.Variable(0.0, trainable=False, aggregation="sum", synchronization="on_read")]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.assign_add(torch.tensor(1.0))
        self.totals[0].assign_add(float(len(x)))
        return self.layer(x)


def test_variables_that_a_network_has_are_the_scopes(two):
    with two.scope():
        network = Counting()
    for _ in range(2):
        two.run(lambda: network(X).shape)
    assert float(network.steps) == 4.0
    assert float(network.totals[0]) == 4 * len(X)
    network.steps.assign(50.0)
    assert two.run(lambda: float(network.steps)) == 50.0


def test_a_variable_that_is_frozen_here_is_frozen_there(two):
    with two.scope():
        early, late, free = (mnb.Variable(torch.zeros(2)) for _ in range(3))
        optimizer = torch.optim.SGD([early, late, free], 0.1)
    early.requires_grad_(False)

    def step() -> None:
        optimizer.zero_grad()
        sum((variable - 1).pow(2).sum() for variable in (early, late, free)).backward()
        optimizer.step()

    two.run(step)
    late.requires_grad = False
    before = late.read_value()
    two.run(step)
    assert early.read_value().tolist() == [0.0, 0.0]
    assert torch.equal(late.read_value(), before)
    assert float(before[0]) > 0
    assert float(free[0].detach()) > float(before[0])


@pytest.mark.parametrize(("aggregation", "synchronization"), [("none", "auto"), ("mean", "on_read")])
def test_a_value_of_each_replica_is_assigned_before_the_first_run_too(two, aggregation, synchronization):
    with two.scope():
        own = mnb.Variable(0.0, trainable=False, aggregation=aggregation, synchronization=synchronization)
    own.assign(mnb.PerReplica([torch.tensor(1.0), torch.tensor(3.0)]))
    assert [float(value) for value in own.values] == [1.0, 3.0]
    with pytest.raises(mnb.UsageError, match="3 values"):
        own.assign(mnb.PerReplica([torch.tensor(1.0)] * 3))


def test_a_line_that_comes_in_parts_is_named_once_unless_another_replica_has_spoken(capsys):
    listener = Listener(lambda value: None, range(3))
    for text in ("half ", "a line\nand ", "", "another\n", "end\n"):
        listener.take(1, Stream("stdout", text))
    assert capsys.readouterr().out == "[replica 1] half a line\n[replica 1] and another\n[replica 1] end\n"
    for replica, text in ((1, "one "), (2, "two "), (1, "more\n"), (0, "none "), (1, "last\n")):
        listener.take(replica, Stream("stdout", text))
    out = capsys.readouterr().out
    assert out == "[replica 1] one [replica 2] two [replica 1] more\nnone [replica 1] last\n"


def test_what_a_console_cannot_show_costs_no_run(monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", console)
    Listener(lambda value: None, range(2)).take(1, Stream("stdout", "voilà\n"))
    console.flush()
    assert console.buffer.getvalue() == b"[replica 1] voil\\xe0\n"  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stdout", None)
    Listener(lambda value: None, range(2)).take(1, Stream("stdout", "a program without a console\n"))


def test_what_a_function_displays_is_displayed_in_a_notebook_and_printed_elsewhere(two, capsys, monkeypatch):
    def show() -> None:
        from IPython.display import clear_output, display

        clear_output(wait=True)
        handle = display("first", display_id="of mine")
        handle.update("second")

    two.run(show)
    assert capsys.readouterr().out == "'first'\n'second'\n"
    shell = mock.Mock()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    two.run(show)
    assert capsys.readouterr().out == ""
    assert [name for name, _, _ in shell.display_pub.method_calls] == ["clear_output", "publish", "publish"]
    assert [call.kwargs["update"] for call in shell.display_pub.publish.call_args_list] == [False, True]
    assert shell.display_pub.publish.call_args.args[0]["text/plain"] == "'second'"


def test_a_result_that_cannot_be_opened_here_leaves_no_descriptor(two):
    class Closed:
        def __init__(self) -> None:
            self.rows = torch.zeros(1 << 20)

        def __setstate__(self, state: dict[str, Any]) -> None:
            raise OSError("not here")

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    two.run(lambda: None)
    before, rounds = descriptors(), 8
    for _ in range(rounds):
        with pytest.raises(OSError, match="not here"):
            two.run(Closed)
    # Pools that other tests have done with may begin and end replicas of their own meanwhile.
    assert descriptors() < before + rounds


def test_other_ops_leave_no_memory_of_the_ones_before(two):
    with two.scope():
        network = nn.Linear(1000, 100)

    def mapped() -> int:
        import torch.distributed as dist

        network(torch.ones(1, 1000)).sum().backward()
        return len(dist.group.WORLD.shared._regions.held())

    before = two.cross_device_ops
    counts = []
    try:
        for name in ("hierarchical_copy", "shared_memory") * 3:
            two.cross_device_ops = name
            counts.append(two.run(mapped))
    finally:
        two.cross_device_ops = before
    assert len(set(counts)) == 1


def test_what_is_written_to_a_sum_in_place_is_the_whole_of_it_before_and_after_the_replicas_have_it(two):
    with two.scope():
        total = mnb.Variable([0.0, 0.0], aggregation="sum", synchronization="on_read")
    for _ in range(2):
        total.fill_(4.0)
        assert total.tolist() == [4.0, 4.0]
        nn.init.constant_(total, 6.0)
        torch._foreach_add_([total], 2.0)
        torch.add(total, 2.0, out=total)
        assert total.tolist() == [10.0, 10.0]
        total[0] = 2.0
        assert total.tolist() == [2.0, 10.0]
        assert two.run(lambda: total.tolist()) == [1.0, 5.0]


def test_copies_that_are_to_be_one_and_differ_are_told_where_they_are_read(two):
    rules = "sum", "mean", "only_first_replica", "none"
    with two.scope():
        counts = {rule: mnb.Variable(0.0, aggregation=rule, trainable=False, name=rule) for rule in rules}
        on_read = mnb.Variable(0.0, aggregation="sum", synchronization="on_read", name="on_read")

    def step(more):
        for count in counts.values():
            count.add_(more)
        on_read.assign_add(more)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # What all write alike leaves one value.
        two.run(step, args=(torch.tensor(1.0),))
        assert [float(count) for count in (*counts.values(), on_read)] == [1, 1, 1, 1, 2]
    two.run(step, args=(mnb.PerReplica([torch.tensor(2.0), torch.tensor(5.0)]),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert [float(count) for count in (*counts.values(), on_read)] == [3, 3, 3, 3, 9]
    assert [str(warning.message).split("differ")[0] for warning in caught] == [
        f"the copies of {rule} " for rule in rules[:3]
    ]
    assert {warning.filename for warning in caught} == {__file__}
    assert "VariableAggregation.ONLY_FIRST_REPLICA: each replica has written" in str(caught[2].message)


class Codebook(nn.Module):
    """Of what it has seen, an average that is to be alike, one of each replica's own, and BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("latest", torch.zeros(2), persistent=False)
        self.same = self.average

    def forward(self, x, reduced):
        seen = x.mean(0)
        self.latest.copy_(seen)
        if reduced:
            seen = mnb.get_replica_context().all_reduce("mean", seen)
        self.average.lerp_(seen, 0.5)
        return self.norm(x)


def test_buffers_that_each_replica_wrote_by_itself_are_told_where_their_network_is_read(two):
    with two.scope():
        net = nn.Sequential(Codebook())

    def see(batch, reduced):
        net[0](batch, reduced)

    batches = [*two.distribute_dataset(DataLoader(X[:4, :2].clone(), batch_size=4))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two.run(see, args=(batches[0], True))
        assert torch.allclose(net[0].average, X[:4, :2].mean(0) / 2)
    two.run(see, args=(batches[0], False))
    with pytest.warns(UserWarning, match=r"^buffers differ between the replicas \(Sequential.*\); read here") as told:
        read = net.state_dict()
    assert [warning.filename for warning in told] == [__file__]
    net.load_state_dict(read)
    assert len({tuple(each.tolist()) for each in two.local_results(two.run(lambda: net[0].average))}) == 1


def test_parameters_that_each_replica_trained_by_itself_are_told_where_their_network_is_read(two):
    def by_hand():
        with two.scope():
            net = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(batch, reduced):
            gradients = torch.autograd.grad(net(batch).sum(), list(net.parameters()))
            if reduced:
                gradients = mnb.get_replica_context().all_reduce("mean", gradients)
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

        def train(reduced):
            for batch in two.distribute_dataset(DataLoader(X[:4, :2].clone(), batch_size=4)):
                two.run(step, args=(batch, reduced))

        return net, train

    net, train = by_hand()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(reduced=True)
        net.state_dict()
    train(reduced=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read = net.state_dict()
        train(reduced=False)
        net.state_dict()
    assert [warning.filename for warning in caught] == [__file__]
    assert str(caught[0].message).startswith(
        "parameters differ between the replicas (Linear, 3 parameters); read here"
    )
    apart = len(two.compare_parameters().differing)
    net.load_state_dict(read)
    # Before the next call, too. The bias had equal gradients; networks of other tests may differ as well.
    assert len(two.compare_parameters().differing) == apart - 1
    values = two.run(lambda: net.weight.detach().clone())
    assert all(torch.equal(value, net.weight) for value in two.local_results(values))
    train(reduced=False)
    with pytest.warns(UserWarning, match="parameters differ"):
        net.state_dict()


def test_networks_with_parameters_of_one_name_are_compared_by_themselves(two):
    with two.scope():
        networks = [nn.Linear(2, 1) for _ in range(2)]

    def spoil(which):
        with torch.no_grad():
            [network.weight for network in networks][which].add_(replica_id())

    two.run(spoil, args=(1,))
    before = two.compare_parameters()
    two.run(spoil, args=(0,))
    after = two.compare_parameters()
    assert (after.parameters, len(after.differing)) == (before.parameters, len(before.differing) + 1)


def test_a_variable_made_in_inference_mode_is_written_as_any_other(two):
    with two.scope(), torch.inference_mode():
        value = mnb.Variable([1.0, 2.0])
    assert two.run(lambda: value.tolist()) == [1.0, 2.0]
    with torch.inference_mode():
        value[1:].fill_(7.0)
        value.add_(1.0)
    assert two.run(lambda: value.tolist()) == value.tolist() == [2.0, 8.0]


@pytest.mark.parametrize("examples", [8, 7, 1])
def test_a_loss_with_class_weights_divided_by_those_of_all_replicas_has_one_devices_gradient(examples):
    weights = torch.tensor([1.0, 5.0, 0.2])
    x, y = torch.arange(4.0 * examples).reshape(examples, 4).sin(), torch.arange(examples) ** 2 % 3
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"], gradient_reduction="sum") as strategy:
        with strategy.scope():
            model = nn.Linear(4, 3)
        single = copy.deepcopy(model)

        def gradient(batch: Any) -> torch.Tensor:
            inputs, targets = batch
            total = mnb.get_replica_context().all_reduce("sum", weights[targets].sum())
            (F.cross_entropy(model(inputs), targets, weights, reduction="sum") / total).backward()
            return model.weight.grad

        (batch,) = strategy.distribute_dataset((x, y), batch_size=examples)
        found = strategy.local_results(strategy.run(gradient, (batch,)))
    F.cross_entropy(single(x), y, weights).backward()
    for one in found:
        torch.testing.assert_close(one, single.weight.grad)


def against_all_in_the_batch(h: torch.Tensor) -> torch.Tensor:
    everyone = mnb.get_replica_context().all_gather(h, axis=0)
    return (h @ everyone.T).tanh().logsumexp(1).mean()


def of_all_in_the_batch(h: torch.Tensor) -> torch.Tensor:
    everyone = mnb.get_replica_context().all_gather(h, axis=0)
    return (everyone @ everyone.T).tanh().logsumexp(1).mean()


def of_sums(h: torch.Tensor) -> torch.Tensor:
    total, count = mnb.get_replica_context().all_reduce("sum", (h.square().sum(0), torch.tensor(float(len(h)))))
    return (total / count).sqrt().sum()


def a_mean_of_means(h: torch.Tensor) -> torch.Tensor:
    return mnb.get_replica_context().all_reduce("mean", h.square().mean())


LOSSES = [against_all_in_the_batch, of_all_in_the_batch, of_sums, a_mean_of_means]


@pytest.mark.parametrize("examples", [8, 7, 1])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_loss_of_what_all_replicas_have_in_an_uneven_batch_has_one_devices_gradient(two, loss, examples):
    with two.scope():
        model = nn.Linear(4, 3)
    single = copy.deepcopy(model)

    def gradient(inputs: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss(model(inputs)).backward()
        return model.weight.grad

    x = torch.arange(4.0 * examples).reshape(examples, 4).sin()
    (batch,) = two.distribute_dataset(x, batch_size=examples)
    found = two.local_results(two.run(gradient, (batch,)))
    alone = mnb.OneDeviceStrategy("cpu")
    alone.run(lambda: loss(single(x)).backward())
    for one in found:
        torch.testing.assert_close(one, single.weight.grad)


def test_a_penalty_on_the_gradient_of_a_sum_over_uneven_shares_has_one_devices_gradient(two):
    with two.scope():
        model = nn.Linear(4, 3)
    single = copy.deepcopy(model)

    def slope(of_all: Callable[[torch.Tensor], torch.Tensor], h: torch.Tensor) -> torch.Tensor:
        total = of_all(h.tanh().square().sum())
        (gradient,) = torch.autograd.grad(total.exp() / 10, h, create_graph=True)
        return gradient

    def train(inputs: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        of_all = functools.partial(mnb.get_replica_context().all_reduce, "sum")
        # Both replicas' losses come to it, each by its examples, and it is divided by how this one's count.
        mine = slope(of_all, model(inputs)) * (len(inputs) / 3)
        of_all(mine.square().sum()).backward()
        return model.weight.grad

    x = X[:3].clone()
    (batch,) = two.distribute_dataset(x, batch_size=3)
    slope(torch.clone, single(x)).square().sum().backward()
    for found in two.local_results(two.run(train, (batch,))):
        torch.testing.assert_close(found, single.weight.grad)


def test_what_all_replicas_have_may_be_changed_in_place(two):
    with two.scope():
        model = nn.Linear(4, 1)

    def gradients(inputs: torch.Tensor) -> list[torch.Tensor]:
        context, found = mnb.get_replica_context(), []
        for of_all in (
            lambda loss: context.all_reduce("sum", loss),
            lambda loss: context.all_reduce("sum", [loss, loss])[0],
            lambda loss: context.all_reduce("mean", loss),
            lambda loss: context.all_gather(loss, axis=0),
        ):
            model.zero_grad()
            total = of_all(model(inputs).mean(0))
            total /= 2
            total.sum().backward()
            found.append(model.bias.grad)
        counted = context.all_reduce("sum", torch.ones(1))
        counted += model(inputs).mean(0)
        return [*found, counted.detach() - model(inputs).mean(0).detach()]

    (batch,) = two.distribute_dataset(X[:4].clone(), batch_size=4)
    for found in two.local_results(two.run(gradients, (batch,))):
        assert [one.item() for one in found] == pytest.approx([1.0, 1.0, 0.5, 1.0, 2.0])


def test_the_loss_of_a_share_without_examples_does_not_make_that_of_the_batch_nan(two):
    def of(batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": batch.mean(), "each": batch, "odd": batch.sum() / 0}

    found = [two.run(of, (batch,)) for batch in two.distribute_dataset(torch.ones(3), batch_size=2)]
    for op, losses in (("sum", [2.0, 1.0]), ("mean", [1.0, 1.0])):
        assert [two.reduce(op, copy.copy(one["loss"]), axis=None).item() for one in found] == losses
    assert two.reduce("mean", found[1]["each"], axis=0) == 1.0
    # As of a batch that is given are the results of one that the function captures.
    captured = two.run(functools.partial(lambda batch: {"loss": batch.mean(), "each": batch}, found[1]["each"]))
    assert (two.reduce("mean", captured["loss"]), captured["each"].shares) == (1.0, (1, 0))
    # What is no mean of none stays what it is.
    assert two.reduce("sum", found[1]["odd"], axis=None).isinf()
    with two.scope():
        model = nn.Linear(1, 1)

    def train(batch: torch.Tensor) -> Any:
        losses = {"a": model(batch).square().mean(), "b": batch.sum()}
        found = {op: mnb.get_replica_context().all_reduce(op, losses) for op in ("sum", "mean")}
        found["mean"]["a"].backward()
        return [found["sum"]["a"], found["sum"]["b"], found["mean"]["a"], found["mean"]["b"]], model.bias.grad

    (last,) = two.distribute_dataset(torch.ones(1, 1), batch_size=2)
    (sum_a, sum_b, mean_a, mean_b), gradient = (two.local_results(one)[0] for one in two.run(train, (last,)))
    output = model(torch.ones(1, 1)).detach()
    torch.testing.assert_close(torch.stack([sum_a, mean_a]), output.square().flatten().expand(2))
    torch.testing.assert_close(gradient, 2 * output.flatten())
    assert (sum_b, mean_b) == (1.0, 0.5)
    assert two.reduce("sum", PerReplica([1.0, float("nan")]), axis=None).isnan()


@pytest.mark.parametrize("way", ["script", "trace", "export"])
def test_batch_norm_is_scripted_traced_and_exported_in_the_replicas(two, way):
    def made() -> list[float]:
        torch.manual_seed(3)
        model = nn.BatchNorm1d(4)
        inputs = torch.arange(8.0).reshape(2, 4)
        with warnings.catch_warnings():
            # torch's own: of shapes that it asks for, and that all of this is of the past.
            warnings.simplefilter("ignore")
            match way:
                case "script":
                    other = torch.jit.script(model)
                case "trace":
                    other = torch.jit.trace(model, inputs)
                case _:
                    other = torch.export.export(model, (inputs,)).module()
        return (other(inputs) - model(inputs)).abs().flatten().tolist()

    assert two.run(made) == [0.0] * 8


def test_synchronised_batch_norm_trains_on_cpus_as_batch_norm_does_on_one_device(two):
    # Two examples that come out nearly alike are divided by what float32 has few digits of.
    x, y = X[:7].double(), torch.arange(7.0).double()[:, None]
    with two.scope():
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)).double()
        single = copy.deepcopy(model)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = torch.optim.SGD(single.parameters(), 0.1)

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        with torch.no_grad():
            return model(inputs)

    outputs = [two.run(train, batch) for batch in two.distribute_dataset((x, y), batch_size=5)]
    for part in (slice(5), slice(5, 7)):
        expected.zero_grad()
        F.mse_loss(single(x[part]), y[part]).backward()
        expected.step()
        with torch.no_grad():
            one = single(x[part])
    torch.testing.assert_close(torch.cat(two.local_results(outputs[-1])), one)
    for name, value in single.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    torch.testing.assert_close(model.eval()(x), single.eval()(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_share_of_one_example_goes_through_batch_norm_where_the_batch_has_more(two, dtype):
    with two.scope():
        model = nn.BatchNorm1d(4)

    def train(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        outputs = model(inputs.to(dtype))
        outputs.square().sum().backward()
        return outputs, model.running_mean.clone(), model.running_var.clone()

    (batch,) = two.distribute_dataset(X[:3].clone(), batch_size=4)
    outputs, means, variances = (two.local_results(one)[1] for one in two.run(train, (batch,)))
    assert (outputs.tolist(), outputs.dtype) == ([[0.0] * 4], dtype)
    torch.testing.assert_close(means, 0.1 * X[2].to(dtype).float())
    assert variances.tolist() == [1.0] * 4
    (alone,) = two.distribute_dataset(X[:1].clone(), batch_size=4)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        two.run(train, (alone,))


@pytest.mark.parametrize("way", ["given", "captured", "one of each", "looked ahead"])
def test_of_batches_that_one_call_has_each_weighs_as_its_shares(two, way):
    x, y = X[:7].clone(), torch.arange(7.0)[:, None]
    with two.scope():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
    single = copy.deepcopy(model)

    def train(*batches: Any) -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    first, last = two.distribute_dataset((x, y), batch_size=5)
    match way:
        case "given":
            two.run(train, (first, last))
        case "captured":
            two.run(lambda: train(first, last))
        case "one of each":
            two.run(lambda batch: train(first, batch), (last,))
        case "looked ahead":
            two.run(lambda batch, following: train(batch), (first, last))
            two.run(train, (last,))
    expected = torch.optim.SGD(single.parameters(), 0.5)
    for part in (slice(5), slice(5, 7)):
        expected.zero_grad()
        F.mse_loss(single(x[part]), y[part]).backward()
        expected.step()
    torch.testing.assert_close(model.weight, single.weight)


def test_an_update_that_is_not_grouped_has_an_entry_of_each_replica(two):
    with two.scope():
        variable = mnb.Variable(1.0)
    update = functools.partial(two.extended.update, variable, group=False)
    assert update(lambda own: None) == [None, None]
    assert update(lambda own: float(own.assign_add(1.0))) == [2.0, 2.0]
    assert [type(one) for one in update(lambda own: own.assign_add(1.0))] == [torch.Tensor] * 2
    assert two.extended.update(variable, lambda own: 3) == 3


def test_a_tensor_that_is_one_for_all_replicas_is_gathered_as_it_is(two):
    # Source: tf.distribute's `_gather_to_implementation`; as in a merge_call.
    one = torch.tensor([1.0, 2.0])
    merged = two.run(lambda: mnb.get_replica_context().merge_call(lambda merging: merging.gather(one, axis=0)))
    assert [two.gather(one, axis=0).tolist(), *(each.tolist() for each in merged)] == [[1, 2]] * 3
    with pytest.raises(ValueError, match="over axis 1"):
        two.gather(one, axis=1)


def test_what_libraries_ask_of_a_strategy_that_has_nothing_of_it(two):
    one = torch.ones(2)
    assert two.extended.value_container(one) is one
    assert not two.extended.experimental_require_static_shapes


def test_devices_for_libraries_are_those_of_all_replicas(two):
    with two.scope():
        variable = mnb.Variable(1.0)
        with two.extended.colocate_vars_with(variable):
            beside = mnb.Variable(2.0)
    assert two.extended.non_slot_devices([variable]) == ("cpu:0", "cpu:1")
    assert two.extended.variable_created_in_scope(v=beside)
    with pytest.raises(ValueError, match="must only be passed a Variable created in this strategy's scope"):
        two.extended.colocate_vars_with(mnb.Variable(1.0))


def test_a_destination_is_a_device_that_is_there_or_a_value(two):
    with two.scope():
        variable = mnb.Variable(1.0)
    each = mnb.PerReplica([1.0, 3.0])
    for destination in ("cpu:0", "/cpu:0", "CPU:1", torch.device("cpu"), variable, each, torch.ones(1)):
        assert two.extended.reduce_to("mean", each, destinations=destination) == 2
        assert two.extended.reduce_to("mean", {"a": each, "b": [3.0]}, destination) == {"a": 2, "b": [3]}
    with pytest.raises(mnb.DeviceError, match="cuda:0, which is none of this strategy's devices: cpu:0, cpu:1"):
        two.extended.reduce_to("mean", each, destinations="cuda:0")
    with pytest.raises(mnb.DeviceError, match="names no device"):
        two.extended.reduce_to("mean", each, destinations="foo")
    for none in (None, [], ["cpu:0"]):
        with pytest.raises(ValueError, match="it must be one of a device"):
            two.extended.batch_reduce_to("mean", [(each, none)])
    for pairs, named in ((None, "None"), (3, "3"), (each, "1.0"), ([each], "PerReplica"), ([(each,)], "PerReplica")):
        with pytest.raises(
            ValueError, match=f"(?s)must hold pairs of a value and its destination; .*{named}.* is none"
        ):
            two.extended.batch_reduce_to("mean", pairs)


def test_datasets_iterators_and_what_libraries_call_can_be_named_in_annotations(two):
    for strategy in (two, mnb.OneDeviceStrategy("cpu")):
        by_function = strategy.distribute_datasets_from_function(lambda context: [torch.ones(2)])
        for dataset in (strategy.distribute_dataset(torch.ones(4), batch_size=2), by_function):
            assert isinstance(dataset, mnb.DistributedDataset)
            assert isinstance(iter(dataset), mnb.DistributedIterator)
        assert isinstance(strategy.extended, mnb.StrategyExtended)
