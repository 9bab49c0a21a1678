"""The strategy as a notebook cell or a script holds it: run, what travels by reference, what is read back."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import mirror_nb as mnb
from mirror_nb import surroundings
from mirror_nb.messages import Stream
from mirror_nb.pool.local import stop_forkserver
from mirror_nb.strategies.controller import _Listener
from mirror_nb.values import same


@pytest.fixture(scope="module")
def two() -> Iterator[mnb.MirroredStrategy]:
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def replica_id() -> int:
    return mnb.get_replica_context().replica_id_in_sync_group


CAPTURED = {
    "an operator": lambda p: p + 1,
    "an operator from the right": lambda p: 1 + p,
    "a function of torch": lambda p: torch.cat([p, p]),
    "a method": lambda p: p.sum(),
    "an attribute": lambda p: p.data.clone(),
    "a function of NumPy": lambda p: torch.from_numpy(np.asarray(p)) * 2,
    "another one": lambda p: p * p,
    "its length": lambda p: torch.tensor(len(p)),
    "an index": lambda p: p[0],
    "a slice": lambda p: p[1:, None],
    "its members": lambda p: torch.stack([one + 1 for one in p]),
    "a comparison": lambda p: p == 2.0,
    "its type": lambda p: torch.tensor(isinstance(p, torch.Tensor)),
}


@pytest.mark.parametrize("use", CAPTURED.values(), ids=CAPTURED)
def test_a_per_replica_that_a_function_captures_is_the_replicas_own_value_in_it(two, use):
    value = two.run(lambda: torch.tensor([1.0 + replica_id(), 2.0]))
    held = {"in": [value]}
    expected = [use(part) for part in value]
    for call in (lambda: use(value), functools.partial(use, value), lambda: use(held["in"][0])):
        assert same(two.local_results(two.run(call)), tuple(expected))


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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


X = torch.arange(88.0).reshape(22, 4).sin()
Y = X.sum(1, keepdim=True)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_loop_of_the_documents_ends_on_the_weights_of_one_process(n):
    with mnb.MirroredStrategy([f"cpu:{i}" for i in range(n)]) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        alone = copy.deepcopy(model)
        alone_optimizer = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)

        def train_step(batch):
            features, labels = batch
            loss = F.mse_loss(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        # The last of these batches holds 1 of 7: replicas without examples take part.
        dataset = strategy.experimental_distribute_dataset(DataLoader(TensorDataset(X, Y), batch_size=7))
        for _ in range(3):
            for batch in dataset:
                per_replica = strategy.run(train_step, args=(batch,))
                total = strategy.reduce(mnb.ReduceOp.SUM, per_replica, axis=None)
                assert total.ndim == 0
        for _ in range(3):
            for start in range(0, 22, 7):
                loss = F.mse_loss(alone(X[start : start + 7]), Y[start : start + 7])
                alone_optimizer.zero_grad()
                loss.backward()
                alone_optimizer.step()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def trained(strategy: mnb.MirroredStrategy) -> nn.Linear:
    """Return a model made in the scope whose weights are 1 in the replicas, and not yet here."""
    with strategy.scope():
        model = nn.Linear(2, 1)

    def fill() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)

    strategy.run(fill)
    return model


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model(torch.ones(1, 2)).item() == 3.0,
        lambda model: model.state_dict()["weight"].sum() == 2.0,
        lambda model: next(iter(model.parameters())).sum() == 2.0,
        lambda model: model.weight.sum() == 2.0,
        lambda model: copy.deepcopy(model).weight.sum() == 2.0,
        lambda model: torch.nn.utils.parameters_to_vector(model.parameters()).sum() == 3.0,
    ],
    ids=["call", "state_dict", "parameters", "attribute", "deepcopy", "vector"],
)
def test_reading_a_module_in_the_controller_gives_what_the_replicas_learned(two, read):
    assert read(trained(two))


def test_what_is_written_in_the_controller_reaches_the_replicas(two):
    model = trained(two)
    model.load_state_dict({"weight": torch.full((1, 2), 5.0), "bias": torch.zeros(1)})
    assert two.run(lambda: model.weight.sum().item()) == 10.0


def test_a_part_of_a_mirrored_module_is_the_part_that_the_replicas_have(two):
    with two.scope():
        model = Net()
    part = model.first

    def fill() -> None:
        with torch.no_grad():
            part.weight.fill_(2.0)

    two.run(lambda: model(torch.ones(1, 4)))
    two.run(fill)
    assert two.run(lambda: model.first.weight.sum().item()) == 64.0
    assert model.first.weight.sum() == 64.0


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copied", "loaded"]
)
def test_a_copy_made_in_the_scope_is_mirrored(two, again):
    model = trained(two)
    with two.scope():
        teacher = again(model)
        optimizer = torch.optim.SGD(teacher.parameters(), 1.0)

    def step() -> None:
        teacher(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    two.run(step)
    assert teacher.weight.sum() == 0.0
    assert model.weight.sum() == 2.0


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_a_module_that_was_mirrored_by_hand_is_mirrored_with_all_its_parts(two, optimizer_first):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    assert two.mirror(model) is model
    assert two.mirror(optimizer) is optimizer
    if optimizer_first:
        two.run(lambda: optimizer.param_groups[0]["lr"])
    before = model(torch.ones(1, 2)).item()
    two.run(step_of(model, optimizer))
    assert model(torch.ones(1, 2)).item() == pytest.approx(before - 3)


def test_a_part_that_came_later_is_trained_and_read_as_the_others(two):
    with two.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    two.run(lambda: model(torch.ones(1, 2)))
    model[1] = nn.Linear(2, 1)
    with two.scope():
        optimizer = torch.optim.SGD(model[1].parameters(), 1.0)
    # Read by its forward pass alone: nothing of the network that came first is asked.
    head = model[1]
    before = head(torch.ones(1, 2)).item()
    two.run(step_of(head, optimizer))
    assert head(torch.ones(1, 2)).item() == pytest.approx(before - 3)


@pytest.mark.parametrize("make", [nn.Parameter, torch.Tensor.requires_grad_], ids=["Parameter", "Tensor"])
def test_an_optimizer_of_what_no_module_has_is_refused(two, make):
    with two.scope():
        weight = make(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], 0.1)
    with pytest.raises(mnb.UsageError, match=r"the SGD trains a \w+ of shape \(1,\) that .*alone a mnb\.Variable"):
        two.run(lambda: optimizer.step(weight.sum().backward))
    with pytest.raises(mnb.UsageError, match=r"cannot be mirrored alone: .*Make it a mnb\.Variable"):
        two.mirror(weight)
    with two.scope():
        variable = mnb.Variable([0.0])
        optimizer = torch.optim.SGD([variable], 0.5)

    def step() -> None:
        (variable - 1).sum().backward()
        optimizer.step()

    two.run(step)
    assert variable.item() == -0.5


def test_what_a_replica_writes_to_a_copy_that_can_be_trained_is_refused(two):
    weight = torch.zeros(2, requires_grad=True)
    teacher = nn.Linear(2, 1)

    @torch.no_grad()
    def write(tensor: torch.Tensor) -> float:
        return tensor.add_(1).sum().item()

    for captured, says in ((weight, r"a Tensor of shape \(2,\)"), (teacher.bias, r"a Parameter of shape \(1,\)")):
        with pytest.raises(mnb.UsageError, match=rf"the function wrote to {says}.*mnb\.Variable.*copy\.deepcopy"):
            two.run(lambda: write(captured))  # noqa: B023
    with pytest.raises(mnb.UsageError, match=r"the function wrote to a Parameter of shape \(1, 2\)"):
        two.run(lambda: write(teacher.weight))
    # A copy of one's own, an argument, and gradients that are returned.
    expected = teacher.weight.sum().item() + 2
    assert two.run(lambda: write(copy.deepcopy(teacher.weight))) == pytest.approx(expected)
    assert two.run(write, args=(weight,)) == 2.0

    def gradient() -> torch.Tensor:
        (weight * 3).sum().backward()
        return weight.grad.sum()

    assert two.run(gradient)[1] == 6.0


@pytest.mark.parametrize("obj", [[1], {"a": 1}, 3, "text", None, (1,)], ids=repr)
def test_what_is_told_from_nothing_else_is_not_mirrored(two, obj):
    with pytest.raises(mnb.UsageError, match=f"a {type(obj).__name__} cannot be mirrored.*attribute of an object"):
        two.mirror(obj)


Trained = tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]


def with_adam() -> Trained:
    torch.manual_seed(0)
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return model, torch.optim.Adam(model.parameters(), 0.1), scaler


def adam_step(trained: Trained) -> None:
    model, optimizer, scaler = trained
    optimizer.zero_grad()
    scaler.scale(F.mse_loss(model(X), Y)).backward()
    scaler.step(optimizer)
    scaler.update()


def states(trained: Trained) -> list[Any]:
    return [copy.deepcopy(obj.state_dict()) for obj in trained]


def assert_equal_states(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_checkpoint_written_here_has_all_that_the_replicas_learned_and_training_goes_on_from_it(two):
    alone = with_adam()
    with two.scope():
        mirrored = with_adam()
    two.run(adam_step, args=(mirrored,))
    two.run(adam_step, args=(mirrored,))
    checkpoint = states(mirrored)
    for _ in range(3):
        adam_step(alone)
    two.run(adam_step, args=(mirrored,))
    assert_equal_states(states(mirrored), states(alone))

    # The very bits of the step before: what is here is not taken for what the replicas have.
    for obj, state in zip(mirrored, checkpoint, strict=True):
        obj.load_state_dict(state)
    assert_equal_states(states(mirrored), checkpoint)
    two.run(adam_step, args=(mirrored,))
    assert_equal_states(states(mirrored), states(alone))

    with mnb.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as three:
        with three.scope():
            again = with_adam()
        for obj, state in zip(again, checkpoint, strict=True):
            obj.load_state_dict(state)
        three.run(adam_step, args=(again,))
    # After the end too.
    assert_equal_states(states(again), states(alone))


def test_mode_frozen_parameters_and_dtype_of_a_module_are_alike_on_both_sides(two):
    with two.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))

    def seen() -> tuple[Any, ...]:
        return model.training, model[1].training, model[0].weight.requires_grad, str(model[0].weight.dtype)

    assert two.run(seen) == (True, True, True, "torch.float32")
    model[1].eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.double()
    assert two.run(seen) == (True, False, False, "torch.float64")
    two.run(lambda: model.eval().float() and None)
    # A mode that is no other than the one here, but than theirs.
    model.train()
    assert two.run(seen) == (True, True, False, "torch.float32")
    two.run(lambda: model.eval().requires_grad_(True) and None)
    list(model.parameters())
    assert seen() == (False, False, True, "torch.float32")


def test_a_module_that_is_unfrozen_here_is_trained_from_then_on(two):
    with two.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model.weight.requires_grad_(False)
    before = model.weight.sum().item()
    two.run(step_of(model, optimizer))
    assert model.weight.sum().item() == before
    model.weight.requires_grad_(True)
    two.run(step_of(model, optimizer))
    assert model.weight.sum().item() == pytest.approx(before - 2)


def test_a_parameter_group_that_was_added_here_alone_is_refused(two):
    with two.scope():
        first, second = nn.Linear(2, 1), nn.Linear(1, 1)
        optimizer = torch.optim.SGD(first.parameters(), 0.1, momentum=0.9)
    two.run(step_of(first, optimizer))
    step = step_of(first, optimizer)
    two.run(step)
    optimizer.add_param_group({"params": list(second.parameters())})
    for use in (lambda: two.run(step), lambda: two.run(step_of(first, optimizer)), optimizer.state_dict):
        for _ in range(2):
            with pytest.raises(mnb.UsageError, match=r"the SGD has 2 parameter groups here, but was sent .* with 1:"):
                use()
    # Whoever does not use it goes on.
    assert two.run(lambda: 1) == 1
    with two.scope():
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1, momentum=0.9)
    two.run(step_of(nn.Sequential(first, second), optimizer))


def test_a_parameter_group_that_was_added_in_the_replicas_is_trained_there(two):
    with two.scope():
        model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)
    step = step_of(model, optimizer)
    two.run(step)
    before = model[1].weight.item()
    two.run(lambda: optimizer.add_param_group({"params": list(model[1].parameters())}))
    two.run(step)
    assert model[1].weight.item() != before
    with pytest.raises(mnb.UsageError, match="the SGD got parameter groups in the replicas that it has not here"):
        optimizer.state_dict()


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_a_function_runs_in_the_modes_that_run_was_called_in(two, mode):
    with two.scope():
        layer = nn.Linear(2, 2)

    def seen() -> tuple[bool, bool, str]:
        made = layer(torch.ones(1, 2))
        return made.requires_grad, made.is_inference(), str(made.dtype)

    with mode():
        here, there = seen(), two.run(seen)
    assert there == here != seen()
    assert two.run(seen) == seen()
    with mode(), pytest.raises(LookupError):
        two.run(lambda: {}["nothing"])
    assert two.run(seen) == seen()


def test_a_call_brings_no_values_back_whatever_modules_were_made_since(two, monkeypatch):
    model = trained(two)
    refreshed: list[int] = []
    monkeypatch.setattr(two._place, "refresh", lambda: refreshed.append(1))

    def use() -> float:
        return model(torch.ones(1, 2)).item()

    for _ in range(3):
        assert two.run(use) == 3.0
        nn.CrossEntropyLoss(), nn.Linear(1, 1)
    assert not refreshed


@pytest.mark.parametrize("interrupted", ["call", "read"])
def test_an_interrupt_at_the_very_end_of_a_request_costs_no_values(two, monkeypatch, interrupted):
    with two.scope():
        model = nn.Linear(2, 1)

    def fill() -> None:
        with torch.no_grad():
            model.weight.fill_(7.0)

    pool = two._place._ready()
    run = pool.run

    def run_and_press(*args: Any, **kwargs: Any) -> Any:
        run(*args, **kwargs)
        raise KeyboardInterrupt

    two.run(lambda: model.weight.sum())
    assert model.weight.sum() != 14.0
    if interrupted == "read":
        two.run(fill)
    monkeypatch.setattr(pool, "run", run_and_press)
    with pytest.raises(KeyboardInterrupt):
        _ = two.run(fill) if interrupted == "call" else model.weight
    monkeypatch.undo()
    assert model.weight.sum() == 14.0


def test_settings_of_an_optimizer_travel_both_ways(two):
    with two.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.param_groups[0]["lr"] = 8.0

    def step() -> float:
        optimizer.step()
        scheduler.step()
        return optimizer.param_groups[0]["lr"]

    assert two.run(step) == 4.0
    assert optimizer.param_groups[0]["lr"] == 4.0


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "a function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    "in turns": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "together": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "a plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.filterwarnings("error:Detected call of:UserWarning")
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_may_be_stepped_on_either_side_and_stands_alike_on_both(two, make):
    def made() -> tuple[nn.Module, Any, Any]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return model, optimizer, make(optimizer)

    with two.scope():
        model, optimizer, scheduler = made()
    _, own, expected = made()
    args = (1.0,) if isinstance(expected, lr_scheduler.ReduceLROnPlateau) else ()

    def step(scheduled: bool) -> list[float]:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if scheduled:
            scheduler.step(*args)
        return scheduler.get_last_lr()

    for by_replicas in (False, False, True, True, False, True):
        own.step()
        before = expected.get_last_lr()
        expected.step(*args)
        assert two.run(step, args=(by_replicas,)) == (expected.get_last_lr() if by_replicas else before)
        if not by_replicas:
            scheduler.step(*args)
        assert scheduler.get_last_lr() == expected.get_last_lr()
        assert optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"]


def test_a_scheduler_whose_state_is_no_plain_value_is_left_to_the_replicas(two):
    class Odd(lr_scheduler.StepLR):
        def state_dict(self) -> Any:
            raise NotImplementedError

    with two.scope():
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
        scheduler = Odd(optimizer, 1)

    def step() -> float:
        optimizer.step()
        scheduler.step()
        return optimizer.param_groups[0]["lr"]

    assert two.run(step) == pytest.approx(0.01)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_scheduler_whose_state_is_no_plain_value_any_more_costs_no_call_its_result(two):
    with two.scope():
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
        scheduler = lr_scheduler.StepLR(optimizer, 1)

    def step() -> float:
        optimizer.step()
        scheduler.step()
        scheduler.seen = {1, 2}
        return optimizer.param_groups[0]["lr"]

    assert two.run(step) == pytest.approx(0.01)
    assert two.run(step) == pytest.approx(0.001)


def test_a_scheduler_here_sees_the_steps_that_the_replicas_made(two):
    with two.scope():
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step() -> float:
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return optimizer.param_groups[0]["lr"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two.run(step)
        scheduler.step()
    assert two.run(step) == 0.25


def test_plain_attributes_of_a_network_are_the_same_on_both_sides(two):
    with two.scope():
        net = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5))
        net.losses, net.temperature = [], 1.0

    def step() -> Any:
        net(torch.ones(2, 4)).sum().backward()
        net.losses.append(mnb.get_replica_context().replica_id_in_sync_group)
        net.temperature *= 0.5
        return net[1].p, net.temperature

    assert two.run(step) == (0.5, 0.5)
    net[1].p = 0.25
    assert two.run(step) == (0.25, 0.25)
    net(torch.ones(2, 4))
    assert (net.losses, net.temperature) == ([0, 0], 0.25)


def test_a_forward_pass_here_begins_with_the_attributes_of_the_replicas(two):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.inner = 1.0, nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = self.factor
            return self.inner(x) * 0 + factor

    with two.scope():
        net = Scaled()

    def change() -> None:
        net.factor = 7.0

    two.run(change)
    assert net(torch.ones(1, 1)).item() == 7.0


def test_generators_and_scalers_of_the_scope_are_kept_by_the_replicas(two):
    with two.scope():
        generator = torch.Generator()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    generator.manual_seed(3)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(3))
    first = two.run(lambda: torch.rand((), generator=generator))
    second = two.run(lambda: torch.rand((), generator=generator))
    assert [first[0], second[0]] == list(expected)
    # Each side knows where the other has left it.
    generator.manual_seed(3)
    assert two.run(lambda: torch.rand((), generator=generator))[0] == expected[0]
    assert torch.rand((), generator=generator) == expected[1]
    assert two.run(lambda: scaler.scale(torch.ones(())).item()) == 2.0


def test_what_is_not_mirrored_travels_by_value_each_time(two):
    scale = [1.0]
    assert two.run(lambda: scale[0]) == 1.0
    scale[0] = 3.0
    assert two.run(lambda: scale[0]) == 3.0
    with pytest.warns(UserWarning, match="changed `scale` in the replicas, on a copy that is gone"):
        two.run(lambda: scale.append(0.0))
    assert scale == [3.0]


Lost = tuple[Callable[..., object], tuple[Any, ...]]
# A function that changes a copy, and its arguments.


def counts() -> Lost:
    counts = torch.zeros(3)
    return lambda: counts.add_(1.0), ()


def totals() -> Lost:
    totals = np.zeros(3)

    def add() -> None:
        totals[0] += 1.0

    return add, ()


def plain() -> Lost:
    plain = mnb.Variable(1.0, trainable=False)
    return lambda: plain.assign_add(torch.tensor(1.0)), ()


def dice() -> Lost:
    dice = torch.Generator()
    return lambda: torch.rand(1, generator=dice), ()


def losses() -> Lost:
    return lambda losses: losses.append(1.0), ([],)


@pytest.mark.parametrize("make", [counts, totals, plain, dice, losses])
def test_changes_of_copies_are_told_of(two, make):
    function, args = make()
    with pytest.warns(UserWarning, match=f"changed `{make.__name__}` in the replicas, on a copy that is gone"):
        two.run(function, args=args)


def test_batches_may_be_changed(two):
    batch = {"x": torch.ones(2), "y": torch.ones(2)}

    def step(batch: dict[str, torch.Tensor], x: torch.Tensor) -> float:
        x.mul_(2.0)
        return float((batch.pop("x") + x).sum())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert two.run(step, args=(batch, torch.ones(2))) == 6.0


def test_a_scaler_made_outside_the_scope_is_refused_unless_it_does_nothing(two):
    off, on = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")
    assert two.run(lambda: off.scale(torch.ones(())).item()) == 1.0
    with pytest.raises(mnb.UsageError, match="a GradScaler that was made outside"):
        two.run(lambda: on.scale(torch.ones(())).item())


@pytest.mark.parametrize("change", ["in place", "an entry", "emptied", "replaced"])
def test_what_is_written_to_an_optimizers_state_here_the_replicas_have(two, change):
    model = trained(two)
    with two.scope():
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    two.run(step)
    match change:
        case "in place":
            optimizer.state[model.weight]["exp_avg"].fill_(5.0)
        case "an entry":
            optimizer.state[model.weight]["exp_avg"] = torch.full((1, 2), 5.0)
        case "emptied":
            optimizer.state.clear()
        case "replaced":
            optimizer.state = defaultdict(dict)
    there = two.run(lambda: {i: s["exp_avg"].tolist() for i, s in optimizer.state_dict()["state"].items()})
    assert there.get(0) == ([[5.0, 5.0]] if change in ("in place", "an entry") else None)
    two.run(step)
    assert float(optimizer.state[model.weight]["step"]) == (2.0 if there else 1.0)


def test_an_optimizer_made_outside_the_scope_is_refused_before_anything_runs(two):
    model = trained(two)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(mnb.UsageError, match=r"an SGD that was made outside.*strategy\.mirror"):
        two.run(lambda: optimizer.step())
    two.mirror(optimizer)
    two.run(lambda: optimizer.step())


def test_a_module_made_outside_the_scope_may_be_used_but_not_trained(two):
    teacher = nn.Linear(2, 1)
    assert two.run(lambda: teacher(torch.ones(1, 2)).shape) == (1, 1)
    with pytest.raises(mnb.UsageError, match=r"a Linear the function captured got gradients"):
        two.run(lambda: teacher(torch.ones(1, 2)).sum().backward())


def test_what_is_created_while_a_strategy_is_set_is_mirrored_as_in_its_scope(two):
    before = nn.Module.__init__, torch.Generator
    mnb.experimental_set_strategy(two)
    try:
        assert mnb.get_strategy() is two
        model, step = Net(), mnb.Variable(0.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with two.scope():
            later = nn.Linear(1, 1)
    finally:
        mnb.experimental_set_strategy(None)
    assert (nn.Module.__init__, torch.Generator) == before
    assert not mnb.has_strategy()
    initial = model.second.bias.item()

    def train() -> None:
        F.mse_loss(model(X), Y).backward()
        later(X[:, :1]).sum().backward()
        optimizer.step()
        step.assign_add(1.0)

    two.run(train)
    assert model.second.bias.item() != initial
    assert float(step) == 1
    outside = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(mnb.UsageError, match="made outside this strategy's scope"):
        two.run(lambda: outside.step())


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


NEVER_LEFT = """
import gc
import torch
import mirror_nb as mnb
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
"""


def test_a_scope_that_is_never_left_holds_until_the_process_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(NEVER_LEFT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True 0.1\n", "")


def test_another_strategy_that_is_set_takes_the_place_of_the_first(two):
    with mnb.MirroredStrategy(["cpu:0"]) as other:
        mnb.set_strategy(two)
        mnb.set_strategy(other)
        try:
            model = nn.Linear(2, 1)
            assert other.extended.variable_created_in_scope(model)
            assert not two.extended.variable_created_in_scope(model)
            with pytest.raises(RuntimeError, match="Mixing different"), two.scope():
                pass
        finally:
            mnb.set_strategy(None)
    with pytest.raises(mnb.PoolClosed):
        mnb.set_strategy(other)
    assert not mnb.has_strategy()
    with pytest.raises(mnb.UsageError, match=r"must be a strategy, .* not 'cpu:0'"):
        mnb.set_strategy("cpu:0")


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


def test_an_optimizer_is_not_stepped_in_the_controller(two):
    with two.scope():
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    with pytest.raises(RuntimeError, match="cross-replica context"):
        optimizer.step()


def networks_of_width(width: int) -> int:
    return sum(type(o) is nn.Linear and o.in_features == width for o in gc.get_objects())


@pytest.mark.parametrize("of_optimizer", [True, False])
def test_gradients_are_cleared_in_the_replicas_from_here_too(two, of_optimizer):
    with two.scope():
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def gradient() -> torch.Tensor:
        model(torch.ones(1, 2)).sum().backward()
        return model.weight.grad.clone()

    for _ in range(2):
        (optimizer if of_optimizer else model).zero_grad()
        assert torch.equal(two.run(gradient)[1], torch.ones(1, 2))
    (optimizer if of_optimizer else model).zero_grad(set_to_none=False)
    assert torch.equal(two.run(lambda: model.weight.grad)[0], torch.zeros(1, 2))
    # What is not mirrored is nobody's business.
    nn.Linear(1, 1).zero_grad()


class Meter:
    """As people write them."""

    def __init__(self) -> None:
        self.total = 0.0
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


def test_what_a_function_changes_in_its_copies_is_warned_of(two):
    meter, history = Meter(), []

    def step() -> None:
        meter.update(1.0)
        history.append(1.0)

    with pytest.warns(UserWarning, match=r"step changed `\w+(\.\w+)?`.*`meter\.total`.*Return from") as caught:
        two.run(step)
    assert caught[0].filename == __file__
    assert history == []
    with pytest.warns(UserWarning, match=r"Meter\.update changed `self\.total`, `self\.values` in the replicas"):
        two.run(meter.update, args=(1.0,))
    # The replicas keep this one.
    two.mirror(meter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two.run(meter.update, args=(1.0,))
        assert two.run(lambda: meter.total) == 1.0


def test_what_a_function_warns_of_is_said_once_however_often_it_travels_and_again_in_the_next_cell(two, capfd):
    factors = [2.0]

    def helper() -> None:
        warnings.warn("the factor is large", stacklevel=1)

    def step() -> float:
        helper()
        return factors[0]

    def said() -> int:
        return capfd.readouterr().err.count("UserWarning: the factor is large")

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for _ in range(3):
            two.run(step)
        two.run(lambda: helper())
        assert said() == 2, "once for each replica"
        surroundings.new_moment()
        two.run(step)
        two.run(step)
        assert said() == 2


def test_who_makes_errors_of_warnings_has_what_the_call_did_all_the_same(two):
    with two.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    history: list[float] = []

    def step() -> None:
        optimizer.step()
        scheduler.step()
        history.append(1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="history"):
            two.run(step)
    assert scheduler.get_last_lr() == [0.5]


def test_an_object_that_is_gone_here_is_let_go_of_there(two):
    def use() -> None:
        with two.scope():
            big = nn.Linear(1000, 3)
        two.run(lambda: big.weight.sum().item())
        assert two.run(networks_of_width, args=(1000,)) == 1

    use()
    gc.collect()
    two.run(lambda: gc.collect() and None)
    assert two.run(networks_of_width, args=(1000,)) == 0


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


def test_prints_of_a_replica_show_here(two, capfd):
    two.run(lambda: print("said", mnb.get_replica_context().replica_id_in_sync_group))
    assert sorted(capfd.readouterr().out.splitlines()) == ["[replica 1] said 1", "said 0"]


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


def test_sum_is_tensorflows_rule():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"], gradient_reduction=mnb.ReduceOp.SUM) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)

        def gradient(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            mnb.compute_average_loss(model(x).flatten(), global_batch_size=4).backward()
            return model.weight.grad.clone()

        batch = next(iter(strategy.distribute_dataset(torch.tensor([[1.0], [2.0], [3.0], [6.0]]), batch_size=4)))
        assert [float(g) for g in strategy.run(gradient, args=(batch,)).values] == [3.0, 3.0]


def test_a_script_needs_no_guard(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import mirror_nb as mnb\n"
        "print('ran')\n"
        "strategy = mnb.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "def f():\n    return mnb.get_replica_context().replica_id_in_sync_group * 10\n"
        "print(strategy.run(f).values)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["ran", "(0, 10)"]


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


def test_a_state_that_cannot_be_told_costs_nothing_else_its_value_at_the_end():
    class Silent(torch.optim.SGD):
        def state_dict(self) -> Any:
            raise NotImplementedError("no state")

    strategy = mnb.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = Silent(model.parameters(), 1.0)
        value = mnb.Variable(1.0)
    before = model(torch.ones(1, 2)).item()
    strategy.run(step_of(model, optimizer))
    strategy.run(lambda: value.assign_add(1.0))
    with pytest.warns(UserWarning, match="closed without the latest values of the Silent: no state"):
        strategy.close()
    assert model(torch.ones(1, 2)).item() == pytest.approx(before - 3)
    assert float(value) == 2.0


def test_an_optimizer_goes_on_from_its_last_known_state_when_all_replicas_have_died():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            mirrored = with_adam()
        strategy.run(adam_step, args=(mirrored,))
        read = states(mirrored)
        for replica in strategy._place._ready().status():
            os.kill(replica.pid, signal.SIGKILL)
        with pytest.raises(mnb.ReplicaDied):
            strategy.run(adam_step, args=(mirrored,))
        with pytest.warns(UserWarning, match="all replicas had died"):
            strategy.run(lambda: None)
        assert_equal_states(states(mirrored), read)
        strategy.run(adam_step, args=(mirrored,))
        alone = with_adam()
        adam_step(alone)
        adam_step(alone)
        assert_equal_states(states(mirrored), states(alone))


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

    def lose(variable: mnb.Variable) -> None:
        if variable is broken:
            raise RuntimeError("lost on the way")
        keep(variable)

    monkeypatch.setattr(type(home), "keep", lambda self, variable: lose(variable))
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


def test_a_function_may_use_the_strategy_that_runs_it(two):
    assert two.run(lambda: two.num_replicas_in_sync) == 2
    assert two.run(lambda: mnb.get_strategy() is two)


def test_a_copy_of_what_holds_a_strategy_has_the_same_one_and_a_pickle_says_why_not(two):
    assert copy.deepcopy({"strategy": two})["strategy"] is two
    with pytest.raises(mnb.TransferError, match="a strategy belongs to the process that made it"):
        pickle.dumps(two)


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


def test_a_kept_pickle_is_not_used_when_what_the_function_captures_has_changed(two):
    factor = 1.0
    settings = {"scale": 2.0}
    with two.scope():
        model = nn.Linear(1, 1, bias=False)

    def scaled() -> float:
        return factor * settings["scale"]

    def through() -> float:
        return scaled() + factor

    assert [two.run(scaled), two.run(scaled), two.run(through)] == [2.0, 2.0, 3.0]
    factor = 10.0
    settings["scale"] = 3.0
    assert [two.run(scaled), two.run(through)] == [30.0, 40.0]

    def weight() -> float:
        return model.weight.item()

    first = two.run(weight)
    assert two.run(weight) == first
    with two.scope():
        model = nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 7.0)
    assert two.run(weight) == 7.0


def test_a_part_that_was_replaced_in_the_controller_reaches_the_replicas(two):
    with two.scope():
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def widths() -> list[int]:
        return [layer.out_features for layer in model]

    assert two.run(widths) == [1, 1]
    with two.scope():
        model[1] = nn.Linear(1, 5)
    assert two.run(widths) == [1, 5]


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


def test_a_line_that_comes_in_parts_is_named_once_unless_another_replica_has_spoken(capsys):
    listener = _Listener(lambda value: None, range(3))
    for text in ("half ", "a line\nand ", "", "another\n", "end\n"):
        listener.take(1, Stream("stdout", text))
    assert capsys.readouterr().out == "[replica 1] half a line\n[replica 1] and another\n[replica 1] end\n"
    for replica_id, text in ((1, "one "), (2, "two "), (1, "more\n"), (0, "none "), (1, "last\n")):
        listener.take(replica_id, Stream("stdout", text))
    out = capsys.readouterr().out
    assert out == "[replica 1] one [replica 2] two [replica 1] more\nnone [replica 1] last\n"


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


def test_a_closed_strategy_looks_closed():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert repr(strategy) == "<MirroredStrategy: cpu:0, cpu:1>"
    assert repr(strategy) == "<MirroredStrategy: cpu:0, cpu:1, closed>"


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


def test_a_variable_made_in_inference_mode_is_written_as_any_other(two):
    with two.scope(), torch.inference_mode():
        value = mnb.Variable([1.0, 2.0])
    assert two.run(lambda: value.tolist()) == [1.0, 2.0]
    with torch.inference_mode():
        value[1:].fill_(7.0)
        value.add_(1.0)
    assert two.run(lambda: value.tolist()) == value.tolist() == [2.0, 8.0]


def test_a_write_to_a_view_of_a_closed_variable_is_seen_everywhere():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            value = mnb.Variable([1.0, 2.0], trainable=False)
        strategy.run(lambda: value.assign_add([1.0, 1.0]))
    value[1:].fill_(9.0)
    assert value.tolist() == [2.0, 9.0]
    assert [own.tolist() for own in value.values] == [[2.0, 9.0]] * 2


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


def test_an_update_that_is_not_grouped_has_an_entry_of_each_replica(two):
    with two.scope():
        variable = mnb.Variable(1.0)
    update = functools.partial(two.extended.update, variable, group=False)
    assert update(lambda own: None) == [None, None]
    assert update(lambda own: float(own.assign_add(1.0))) == [2.0, 2.0]
    assert [type(one) for one in update(lambda own: own.assign_add(1.0))] == [torch.Tensor] * 2
    assert two.extended.update(variable, lambda own: 3) == 3


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
    with pytest.raises(mnb.DeviceError, match="cuda:0, which is none of this strategy's devices: cpu:0, cpu:1"):
        two.extended.reduce_to("mean", each, destinations="cuda:0")
    with pytest.raises(mnb.DeviceError, match="names no device"):
        two.extended.reduce_to("mean", each, destinations="foo")
    for none in (None, [], ["cpu:0"]):
        with pytest.raises(ValueError, match="it must be one of a device"):
            two.extended.batch_reduce_to("mean", [(each, none)])


def test_datasets_iterators_and_what_libraries_call_can_be_named_in_annotations(two):
    for strategy in (two, mnb.OneDeviceStrategy("cpu")):
        by_function = strategy.distribute_datasets_from_function(lambda context: [torch.ones(2)])
        for dataset in (strategy.distribute_dataset(torch.ones(4), batch_size=2), by_function):
            assert isinstance(dataset, mnb.DistributedDataset)
            assert isinstance(iter(dataset), mnb.DistributedIterator)
        assert isinstance(strategy.extended, mnb.StrategyExtended)


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
