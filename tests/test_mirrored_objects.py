"""Modules, optimizers and schedulers of a scope: the same on both sides, whichever of them changes one."""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import gc
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, TensorDataset
from trained import Net, X, Y, adam_step, assert_equal_states, states, step_of, trained, with_adam

import mirror_nb as mnb
from mirror_nb.strategies.states import States


def test_what_is_mirrored_and_a_function_returns_is_what_it_is_here(two):
    with two.scope():
        model, optimizer, scaler = with_adam()
        scheduler = lr_scheduler.StepLR(optimizer, 1)
    for one in (model, optimizer, scheduler, scaler):
        assert two.run(lambda one=one: {"it": one})["it"] is one


def test_a_tensor_that_no_optimizer_of_the_scope_trains_may_be_used_beside_one(two):
    with two.scope():
        _, optimizer, _ = with_adam()
    scale = torch.full((2,), 2.0, requires_grad=True)
    assert two.run(lambda: scale.sum().item() + len(optimizer.param_groups)) == 5.0


def test_an_optimizer_that_outlives_its_strategy_has_its_state_and_goes_on(forkserver):
    strategy = mnb.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        mirrored = with_adam()
    strategy.run(adam_step, args=(mirrored,))
    strategy.close()
    gone = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert gone() is None
    optimizer = mirrored[1]
    optimizer.load_state_dict(optimizer.state_dict())
    adam_step(mirrored)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_what_is_packed_once_more_for_what_is_inside_of_it_leaves_nothing_open(two):
    def opened() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum("mirror_nb (deleted)" in os.readlink(link) for link in links)

    with two.scope():
        model = nn.Linear(1000, 1000)
        scheduler = lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 1)
    before = opened()
    assert two.run(lambda: scheduler.optimizer.param_groups[0]["params"][0] is model.weight)
    assert opened() == before


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


@pytest.mark.parametrize("held", [list, lambda parameters: torch.optim.SGD(parameters, 1.0).param_groups[0]["params"]])
def test_a_write_to_what_was_taken_before_the_replicas_trained_it_is_told(two, held):
    model = trained(two)
    taken = held(model.parameters())

    def learn() -> None:
        with torch.no_grad():
            model.weight.add_(1.0)

    def clip(parameters: Any) -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.clamp_(max=1.5)
        two.run(lambda: model.bias.item())

    two.run(learn)
    with pytest.warns(UserWarning, match="older values") as told:
        clip(taken)
    assert "weight, bias of a Linear" in str(told[0].message)
    assert told[0].filename == __file__
    two.run(learn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # These come with what the replicas have.
        clip(model.parameters())
        two.run(learn)
        model.load_state_dict(model.state_dict())
        two.run(learn)
        model.load_state_dict({"bias": torch.zeros(1)}, strict=False)
        two.run(lambda: model.bias.item())
    assert model.weight.tolist() == [[3.5, 3.5]]


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


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda all_: pickle.loads(pickle.dumps(all_))], ids=["copied", "loaded"]
)
@pytest.mark.parametrize("plateau", [False, True])
def test_an_optimizer_and_a_scheduler_that_are_copied_in_the_scope_go_on_from_there(two, again, plateau):
    def copied(on_replicas: bool) -> list[Any]:
        torch.manual_seed(0)
        run = two.run if on_replicas else lambda step: step()
        with two.scope() if on_replicas else contextlib.nullcontext():
            model = nn.Linear(2, 1)
            optimizer = torch.optim.Adam(model.parameters(), 0.1)
            scheduler = (
                lr_scheduler.ReduceLROnPlateau(optimizer) if plateau else lr_scheduler.StepLR(optimizer, 1, 0.5)
            )
            run(step_of(model, optimizer))
            other, its_optimizer, its_scheduler = again((model, optimizer, scheduler))
        for _ in range(2):
            run(step_of(other, its_optimizer))
            run(lambda: its_scheduler.step(*[1.0][:plateau]))
        pairs = [(model, optimizer, scheduler), (other, its_optimizer, its_scheduler)]
        return [
            [model.state_dict(), optimizer.state_dict(), scheduler.last_epoch] for model, optimizer, scheduler in pairs
        ]

    torch.testing.assert_close(copied(True), copied(False))


def test_an_optimizer_that_loads_a_state_in_the_scope_stays_outside_of_it(two):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with two.scope():
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(mnb.UsageError, match="an SGD that was made outside this strategy's scope"):
        two.run(lambda: optimizer.step())


def test_a_scope_in_another_leaves_schedulers_as_they_were(two):
    with two.scope():
        with two.scope():
            pass
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
        scheduler = copy.deepcopy(lr_scheduler.StepLR(optimizer, 1))
    assert two._place.mirrors(scheduler)
    assert not hasattr(lr_scheduler.LRScheduler, "__setstate__")


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_a_module_that_was_mirrored_by_hand_is_mirrored_with_all_its_parts(two, optimizer_first):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    assert two.mirror(model) is model
    assert two.mirror(optimizer) is optimizer
    if optimizer_first:
        two.run(lambda: optimizer.param_groups[0]["lr"])
        assert two._place._references.mirrors.known(model) is not None
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


def test_a_variable_of_another_place_is_not_mirrored_afterwards(two):
    with two.scope():
        own = mnb.Variable(1.0)
    assert two.mirror(own) is own
    with mnb.MirroredStrategy(["cpu:0"]) as other, other.scope():
        others = mnb.Variable(1.0, name="count")
    for variable in (mnb.Variable(1.0, name="count"), others):
        with pytest.raises(mnb.UsageError, match=r"count was made outside .* scope, .*Make one of its value"):
            two.mirror(variable)
    with two.scope():
        made = mnb.Variable(others.detach().clone())
    two.run(lambda: made.assign_add(1.0))
    assert made == 2


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


@pytest.mark.parametrize("asked", [False, True], ids=["then used", "then asked for its state"])
def test_a_parameter_group_that_was_added_here_is_trained_in_the_replicas(two, asked):
    def unfrozen(on_replicas: bool) -> list[Any]:
        torch.manual_seed(0)
        with two.scope() if on_replicas else contextlib.nullcontext():
            model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)
            scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
        step = step_of(model, optimizer)
        run = two.run if on_replicas else lambda step: step()
        model[1].requires_grad_(False)
        run(step)
        model[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.01})
        assert not asked or len(optimizer.state_dict()["state"]) == 2
        run(scheduler.step)
        run(step)
        optimizer.param_groups[1]["lr"] = 0.02
        run(step)
        return [model.state_dict(), optimizer.state_dict()]

    torch.testing.assert_close(unfrozen(True), unfrozen(False))


def test_a_moment_that_is_replaced_by_one_that_lies_where_the_old_one_lay_is_the_replicas_too(two):
    with two.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    two.run(step_of(model, optimizer))
    entries = optimizer.state[model.bias]
    lay = id(entries["momentum_buffer"])
    entries["momentum_buffer"] = torch.zeros(1)
    made: list[torch.Tensor] = []
    # Where it is kept, none comes to lie there.
    while len(made) < 1000 and not (made and id(made[-1]) == lay):
        made.append(torch.full((1,), 7.0))
    entries["momentum_buffer"] = made[-1]
    assert two.run(lambda: optimizer.state[model.bias]["momentum_buffer"].item()) == 7.0


class Averaging(torch.optim.SGD):
    """Has other parameters while it is evaluated, as schedule-free optimizers have."""

    @torch.no_grad()
    def eval(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            # Past autograd's count of writes, too.
            parameter.data.lerp_(self.state[parameter]["momentum_buffer"], 0.5)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_method_of_an_optimizer_that_changes_parameters_by_its_state_changes_those_of_now(two, loaded):
    def trained(on_replicas: bool) -> list[Any]:
        torch.manual_seed(0)
        with two.scope() if on_replicas else contextlib.nullcontext():
            model = nn.Linear(2, 1)
            optimizer = Averaging(model.parameters(), 0.1, momentum=0.9)
        step = step_of(model, optimizer)
        run = two.run if on_replicas else lambda step: step()
        run(step)
        before = copy.deepcopy(optimizer.state_dict())
        run(step)
        if loaded:
            # What is here of its state is not older then.
            optimizer.load_state_dict(before)
        optimizer.eval()
        evaluated = [parameter.tolist() for parameter in model.parameters()]
        run(step)
        return [evaluated, model.state_dict(), optimizer.state_dict()]

    torch.testing.assert_close(trained(True), trained(False))


def test_moments_keep_their_dtype_where_the_network_gets_another_one(two):
    def trained(on_replicas: bool) -> list[Any]:
        torch.manual_seed(0)
        with two.scope() if on_replicas else contextlib.nullcontext():
            model = nn.Linear(2, 1)
            optimizer = torch.optim.Adam(model.parameters(), 0.1)
        step = step_of(model, optimizer)
        run = two.run if on_replicas else lambda step: step()
        run(step)
        model.double()
        optimizer.state[model.weight]["exp_avg"].mul_(2)
        run(lambda: None)
        model.float()
        run(step)
        return [model.state_dict(), optimizer.state_dict()]

    torch.testing.assert_close(trained(True), trained(False))


@pytest.mark.parametrize("on", [0, 1, None], ids=["replica 0", "replica 1", "all"])
def test_what_a_call_did_to_learning_rates_before_it_failed_is_here(two, on):
    with two.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)

    def steps() -> None:
        for _ in range(2):
            step_of(model, optimizer)()
            scheduler.step()
        if on in (None, mnb.get_replica_context().replica_id_in_sync_group):
            raise KeyError("later")

    with pytest.raises(KeyError, match="later"):
        two.run(steps)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert scheduler.last_epoch == 2
    # Nor is what was here before taken for news.
    assert two.run(lambda: (optimizer.param_groups[0]["lr"], scheduler.last_epoch)) == (0.25, 2)


def test_a_parameter_group_that_either_side_has_alone_is_refused(two):
    with two.scope():
        first, second, third = nn.Linear(2, 1), nn.Linear(1, 1), nn.Linear(1, 1)
        groups = [{"params": list(first.parameters())}, {"params": list(second.parameters())}]
        optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9)
        other = torch.optim.SGD(first.parameters(), 0.1)
    two.run(lambda: optimizer.zero_grad())

    def add_and_fail() -> None:
        other.add_param_group({"params": list(second.parameters())})
        raise KeyError("later")

    with pytest.raises(KeyError, match="later"):
        two.run(add_and_fail)
    other.add_param_group({"params": list(third.parameters())})
    for _ in range(2):
        with pytest.raises(mnb.UsageError, match="the SGD got other parameter groups in the replicas than here"):
            two.run(lambda: other.step())
    del optimizer.param_groups[1]
    for use in (lambda: two.run(lambda: optimizer.step()), optimizer.state_dict):
        with pytest.raises(mnb.UsageError, match=r"the SGD has 1 parameter groups here, but was sent .* with 2:"):
            use()
    optimizer.add_param_group({"params": list(third.parameters())})
    with pytest.raises(mnb.UsageError, match=r"the SGD has other parameters here, but was sent .* that it had then:"):
        two.run(lambda: optimizer.step())
    # Whoever does not use them goes on.
    assert two.run(lambda: 1) == 1
    with two.scope():
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1, momentum=0.9)
    two.run(step_of(nn.Sequential(first, second), optimizer))


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize("made", ["before", "in the call"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_parameter_group_that_a_call_adds_is_here_too(two, made, momentum, fails):
    def unfrozen(on_replicas: bool) -> list[Any]:
        torch.manual_seed(0)
        with two.scope() if on_replicas else contextlib.nullcontext():
            model = nn.Sequential(nn.Linear(2, 1), nn.Identity() if made == "in the call" else nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model[0].parameters(), 0.1, momentum=momentum)
        step = step_of(model, optimizer)
        run = two.run if on_replicas else lambda step: step()

        def add() -> None:
            if made == "in the call":
                model[1] = nn.Linear(1, 1)
                nn.init.ones_(model[1].weight)
                nn.init.zeros_(model[1].bias)
            optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.5})
            if fails:
                raise KeyError("later")

        run(step)
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            run(add)
        if fails:
            # The call that failed brought nothing here but settings.
            run(lambda: None)
        for group in optimizer.param_groups:
            group["lr"] *= 0.1
        with warnings.catch_warnings():
            # The replicas keep its state: it is no copy that is gone after the call.
            warnings.simplefilter("error")
            run(step)
        assert optimizer.param_groups[1]["params"][0] is model[1].weight
        return [model.state_dict(), optimizer.state_dict()]

    torch.testing.assert_close(unfrozen(True), unfrozen(False))


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


def grown(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def converted(model: nn.Sequential) -> None:
    model.double()


@pytest.mark.parametrize("change", [grown, converted, None], ids=["a part", "another dtype", "a shape"])
def test_what_is_read_in_inference_mode_is_trained_all_the_same(two, change):
    with two.scope():
        model = nn.Sequential(nn.Linear(2, 2) if change else nn.LazyLinear(2))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2, dtype=model[0].weight.dtype)).sum().backward()
        optimizer.step()

    two.run(lambda: change(model) if change else model(torch.ones(1, 2)).sum().item())
    two.run(step)
    with torch.inference_mode():
        model.state_dict(), optimizer.state_dict()
    two.run(step)
    assert not any(tensor.is_inference() for tensor in model.parameters())
    assert float(optimizer.state_dict()["state"][0]["step"]) == 2
    assert optimizer.state != {}
    model(torch.ones(1, 2, dtype=model[0].weight.dtype)).sum().backward()


def test_a_network_that_got_a_tensor_in_inference_mode_goes_on(two):
    with two.scope():
        model = nn.Linear(2, 1)
        model.register_buffer("cache", torch.zeros(2))

    def remember(value: float) -> None:
        with torch.inference_mode():
            model.cache = torch.full((2,), value)

    for value in (1.0, 2.0):
        two.run(remember, args=(value,))
        assert model.cache.tolist() == [value, value]
    model.cache = torch.full((2,), 3.0)
    assert two.run(lambda: model.cache.tolist()) == [3.0, 3.0]
    with torch.inference_mode():
        model.cache += 1
    assert two.run(lambda: model.cache.tolist()) == [4.0, 4.0]


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


class Held:
    """An object that has others."""


def alone(scheduler: Any) -> Any:
    return scheduler


def in_a_list(scheduler: Any) -> Any:
    return [scheduler]


@pytest.mark.parametrize("captured", [alone, in_a_list])
@pytest.mark.parametrize("make", [SCHEDULERS["steps"], SCHEDULERS["in turns"], SCHEDULERS["a plateau"]])
def test_a_scheduler_that_the_replicas_get_first_is_that_of_the_optimizer_they_get_later(two, make, captured):
    with two.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        scheduler = make(optimizer)
    given = captured(scheduler)
    two.run(lambda: bool(given))

    def halve() -> None:
        optimizer.param_groups[0]["lr"] = 0.5

    two.run(halve)
    assert two.run(lambda: scheduler.optimizer is optimizer and scheduler.optimizer.param_groups[0]["lr"] == 0.5)
    assert scheduler.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_what_is_mirrored_inside_a_mirrored_object_is_the_same_there_as_by_itself(two):
    with two.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        seen = mnb.Variable(0.0, trainable=False)
    trainer = Held()
    trainer.model, trainer.optimizer, trainer.seen = model, optimizer, seen
    two.mirror(trainer)

    def write() -> None:
        trainer.model.weight.data.fill_(3.0)
        trainer.optimizer.param_groups[0]["lr"] = 0.5
        trainer.seen.assign(1.0)

    two.run(write)
    assert model.weight.tolist() == [[3.0, 3.0]]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert seen == 1.0
    assert two.run(lambda: trainer.model is model and trainer.optimizer is optimizer and trainer.seen is seen)


def test_methods_that_a_class_is_given_later_are_those_of_its_networks_in_the_replicas(two):
    class Scaled(nn.Linear):
        __module__ = "__main__"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    with two.scope():
        net = nn.Sequential(Scaled(2, 1, bias=False))
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    step = step_of(net, optimizer)
    two.run(step)
    Scaled.forward = lambda self, x: x @ self.weight.T * self.twice()
    Scaled.twice = lambda self: 2.0
    inputs = torch.ones(1, 2)
    assert two.run(lambda: net(inputs).item()) == pytest.approx(net(inputs).item())
    two.run(step)
    assert net[0].weight is optimizer.param_groups[0]["params"][0]
    assert two.run(lambda: net(inputs).item()) == pytest.approx(net(inputs).item())
    assert two.run(lambda: len(optimizer.state)) == 1
    # It is sent again once.
    assert two._place._references.mirrors.known(net) is not None


class Unreachable:
    """Replicas that were gone when a state was given to them."""

    calls, asked = 1, 0

    def has_sent(self, obj: object) -> bool:
        return True

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        self.asked += 1
        return {}

    def trained(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return list(optimizer.param_groups[0]["params"])

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
        raise LookupError("gone")


def test_a_state_that_did_not_reach_the_replicas_is_not_taken_for_theirs():
    keeper, optimizer = Unreachable(), torch.optim.SGD([torch.zeros(1)])
    States(keeper).watch(optimizer)
    state = optimizer.state_dict()
    assert keeper.asked == 1
    with pytest.raises(LookupError, match="gone"):
        optimizer.load_state_dict(state)
    optimizer.state_dict()
    assert keeper.asked == 2


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


def test_an_attribute_that_replicas_were_the_first_to_set_is_here_where_it_is_read(two):
    with two.scope():
        nets = [nn.Linear(2, 1) for _ in range(3)]

    def look() -> None:
        for net in nets:
            net.attention = torch.ones(2)

    two.run(look)
    assert nets[0].attention.tolist() == [1, 1]
    two.run(look)
    assert hasattr(nets[1], "attention")
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'attentions'"):
        _ = nets[2].attentions


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


def test_hooks_of_an_optimizers_steps_act_in_the_replicas(two):
    with two.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        after = mnb.Variable(0.0)

    def halve(stepping: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in stepping.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda *_: after.assign(model.weight.detach().sum()) and None)

    def step() -> None:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    two.run(step)
    assert [model.weight.item(), float(after)] == [0.5, 0.5]
    with pytest.raises(mnb.ContextError):
        optimizer.step()


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


@pytest.mark.parametrize("read_before", [False, True])
def test_a_network_whose_wrapper_is_gone_here_is_read_with_what_it_learned_in_it(two, read_before):
    with two.scope():
        network = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(network.parameters(), 0.1)

    def learned() -> torch.Tensor:
        with two.scope():
            wrapped = nn.Sequential(network)

        def step() -> torch.Tensor:
            wrapped(torch.ones(2, 2)).mean().backward()
            optimizer.step()
            return network.weight.detach()

        if read_before:
            two.run(step)
            network.state_dict()
        return two.run(step)[0]

    assert torch.equal(learned(), network.weight)


def test_a_network_whose_wrapper_is_gone_here_has_counted_on_in_it(two):
    with two.scope():
        network = nn.Linear(2, 1)
    network.steps, network.settings = 0, argparse.Namespace(rate=1.0)

    def count() -> None:
        with two.scope():
            wrapped = nn.Sequential(network)

        def step() -> None:
            wrapped[0].steps += 1
            wrapped[0].settings.rate /= 2

        two.run(step)
        assert (network.state_dict() and network.steps, network.settings.rate) == (1, 0.5)
        two.run(step)

    count()
    assert (network.state_dict() and network.steps, network.settings.rate) == (2, 0.25)
    assert two.run(lambda: (network.steps, network.settings.rate)) == (2, 0.25)


def test_a_part_that_was_replaced_in_the_controller_reaches_the_replicas(two):
    with two.scope():
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def widths() -> list[int]:
        return [layer.out_features for layer in model]

    assert two.run(widths) == [1, 1]
    with two.scope():
        model[1] = nn.Linear(1, 5)
    assert two.run(widths) == [1, 5]


def test_the_average_of_a_network_is_of_as_many_on_all_replicas_after_one_has_failed(two):
    with two.scope():
        model = nn.Linear(2, 1)
        average, by_hand = torch.optim.swa_utils.AveragedModel(model), copy.deepcopy(model)

    def advance(behind):
        if mnb.get_replica_context().replica_id_in_sync_group != behind:
            average.update_parameters(model)
            by_hand.weight.data.add_(1)
        mnb.get_replica_context().all_reduce("sum", torch.ones(()))
        if behind is not None:
            raise KeyError("before the average, on one")

    def found():
        return int(average.n_averaged), by_hand.weight.sum().item()

    two.run(advance, args=(None,))
    for behind in (0, 1):
        with pytest.raises(KeyError):
            two.run(advance, args=(behind,))
        assert len(set(two.experimental_local_results(two.run(found)))) == 1
    assert int(average.n_averaged) == 3


@pytest.mark.parametrize("caught", [True, False])
def test_a_parameter_that_torch_could_not_enlarge_costs_neither_the_session_nor_its_values(two, caught):
    with two.scope():
        # Less than that is copied on arrival, and can grow.
        net = nn.Linear(80, 80)
    before = net.weight.detach().clone()

    def enlarge() -> None:
        with contextlib.suppress(RuntimeError if caught else ()), torch.no_grad():
            torch.add(torch.ones(2, 4000), 1, out=net.weight)

    with contextlib.suppress(RuntimeError) if caught else pytest.raises(RuntimeError, match="not resizable") as error:
        two.run(enlarge)
    if not caught:
        assert "make another in its place" in "".join(error.value.__notes__)
    assert net.weight.shape == (2, 4000)
    assert net.weight.flatten().tolist() == [*before.flatten().tolist(), *[0.0] * 1600]
    # What either side gives it, the replicas take.
    with torch.no_grad():
        net.weight.fill_(1.0)
    assert two.local_results(two.run(lambda: net.weight.sum().item())) == (8000.0,)


def test_a_network_with_parameters_of_a_librarys_own_class_goes_to_the_replicas_and_is_called_there(two):
    with two.scope():
        net = nn.Linear(2, 2)
        net.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)), requires_grad=False)

    def weigh(x):
        return net(x).a - net.bias.detach()

    for value in two.local_results(two.run(weigh, args=(torch.ones(1, 2),))):
        torch.testing.assert_close(value, torch.full((1, 2), 2.0))


@pytest.mark.filterwarnings("ignore")
# Torch calls it deprecated.
def test_a_network_that_is_made_ready_to_be_quantised_observes_each_of_its_layers_outputs(two):
    with two.scope():
        net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        for layer in net:
            layer.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        net = torch.ao.quantization.prepare_qat(net.train())

    def observe() -> None:
        net(torch.ones(1, 2))

    alone = copy.deepcopy(net)
    alone(torch.ones(1, 2))
    two.run(observe)
    torch.testing.assert_close(net.state_dict(), alone.state_dict(), rtol=0, atol=0)
    assert net[0].weight_fake_quant.scale.shape == (3,)
    two.run(observe)


def test_what_a_forward_pass_leaves_in_the_module_is_here_once_it_is_read_and_goes_back_changed(two):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.hidden = torch.zeros(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.layer(x)
            self.hidden = self.hidden + 1
            return self.seen

    with two.scope():
        net = Recurrent()
    for _ in range(2):
        two.run(lambda: net(torch.ones(1, 1)).item())
    weight = net.layer.weight
    assert net.hidden.item() == 2
    assert net.seen.item() == pytest.approx((weight + net.layer.bias).item())
    net.hidden = torch.full((1,), 10.0)
    assert two.local_results(two.run(lambda: net.hidden.item())) == (10.0,)
    copy.deepcopy(net)


class Around(torch.optim.Optimizer):
    """As accelerate makes them: an optimizer by its class, but all that it has is another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Lookahead(torch.optim.Optimizer):
    """As libraries have it: around another one, with state of its own, and not made by torch's constructor."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        self.fast, self.param_groups, self.defaults = fast, fast.param_groups, fast.defaults
        self.state = collections.defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.fast.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.fast.step(closure)
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", torch.zeros_like(parameter))
            parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.fast.state_dict(), "slow": [kept["slow"] for kept in self.state.values()]}


@pytest.mark.parametrize("mirrored", [False, True])
def test_an_optimizer_around_one_of_the_scope_need_not_be_made_by_torchs_constructor(two, mirrored):
    def step(optimizer: Any, network: nn.Module) -> None:
        optimizer.zero_grad()
        F.mse_loss(network(X), Y).backward()
        optimizer.step()

    with two.scope():
        model = Net()
    alone = copy.deepcopy(model)
    alone_optimizer = Lookahead(torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9))
    # Or it could not step here once others of its class have these hooks.
    torch.optim.Optimizer.__setstate__(alone_optimizer, {})
    for rate in (0.1, 0.05):
        alone_optimizer.param_groups[0]["lr"] = rate
        step(alone_optimizer, alone)
    with two.scope():
        optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        if mirrored:
            two.mirror(optimizer)
    for rate in (0.1, 0.05):
        optimizer.param_groups[0]["lr"] = rate
        two.run(lambda: step(optimizer, model))
    torch.testing.assert_close(dict(model.named_parameters()), dict(alone.named_parameters()))
    torch.testing.assert_close(optimizer.state_dict(), alone_optimizer.state_dict())


def test_an_optimizer_around_one_of_the_scope_steps_that_one(two):
    with two.scope():
        model = Net()
        around = Around(torch.optim.Adam(model.parameters(), 0.1))
    alone = copy.deepcopy(model)
    alone_optimizer = torch.optim.Adam(alone.parameters(), 0.1)

    def step(stepping: Any, network: nn.Module) -> None:
        stepping.zero_grad()
        F.mse_loss(network(X), Y).backward()
        stepping.step()

    for _ in range(2):
        two.run(lambda: step(around, model))
        step(alone_optimizer, alone)
    torch.testing.assert_close(dict(model.named_parameters()), dict(alone.named_parameters()))
    with pytest.raises(mnb.UsageError, match="Around is an optimizer around another one, with nothing of its own"):
        two.mirror(around)
    outside = Around(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))
    with pytest.raises(mnb.UsageError, match=r"an SGD that was made outside.*strategy\.mirror"):
        two.run(lambda: outside.step())
