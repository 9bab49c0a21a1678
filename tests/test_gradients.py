"""Gradients over two and three real processes, against plain PyTorch on the whole batch."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import random
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from crew import Crew, Replica, batches, check_as_plain, in_scope, network, small_buckets, values
from made_gpu import Slow
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mirror_nb.collectives.base import Member
from mirror_nb.errors import PeerFailed, ReplicaError, ReplicaTimeout, UsageError
from mirror_nb.gradients import agreement
from mirror_nb.gradients.buckets import PATIENCE, Agreed, History, Plan
from mirror_nb.gradients.matching import Portrait
from mirror_nb.gradients.rounds import Round
from mirror_nb.gradients.synchronizer import GradientSynchronizer
from mirror_nb.steps.steering import QUIET

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def two(crews: dict[int, Crew]) -> Crew:
    return crews[2]


def ordinary(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for x, y in batches():
        x, y = r.share(x, y)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return values(model)


def gradients_that_are_zeroed_not_dropped(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches():
        x, y = r.share(x, y)
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return values(model)


def gradients_that_are_never_cleared(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for x, y in batches():
        x, y = r.share(x, y)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return values(model)


def accumulation(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches()):
        x, y = r.share(x, y)
        if i in (0, 1, 3):
            with r.gradients.no_sync():
                F.mse_loss(model(x), y).backward()
        else:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def accumulation_of_what_the_last_pass_leaves_out(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model, extra = network(), nn.Linear(6, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *extra.parameters()], lr=0.1)
    for x, y in batches():
        x, y = r.share(x, y)
        with r.gradients.no_sync():
            F.mse_loss(model(x) + extra(x), y).backward()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model, extra)


def one_replicas_own_network_in_no_sync(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = nn.Linear(6, 3) if r.id == r.n - 1 else None
    for i, (x, y) in enumerate(batches()):
        x, y = r.share(x, y)
        if probe is not None:
            with r.gradients.no_sync():
                F.mse_loss(probe(x), y).backward()
            own = probe.weight.grad.clone()
        F.mse_loss(model(x), y).backward()
        if probe is not None:
            assert torch.equal(probe.weight.grad, own)
            if i % 2:
                probe.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def clipping(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in batches():
        x, y = r.share(x, y)
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def steps_within_the_backward_pass(r: Replica) -> list[Tensor]:
    """As in torch's tutorial on fusing the optimizer's step into the backward pass."""
    torch.manual_seed(0)
    model = Routed()
    optimizers = {parameter: torch.optim.Adam([parameter], lr=0.05) for parameter in model.parameters()}
    handles = []

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        handles.append(parameter.register_post_accumulate_grad_hook(step))
    for i, (x, y) in enumerate([*batches(), *batches()]):
        if i == 7:
            handles[0].remove()
        x, y = r.share(x, y)
        F.mse_loss(model(x), y).backward()
    return values(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)
        self.out = nn.Linear(6, 6)
        self.out.weight = self.into.weight
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.out(torch.tanh(self.into(self.into(x))))))


def shared_weights(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        x, y = r.share(x, y)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def frozen_and_unfrozen(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate([*batches(), *batches()]):
        model[0].requires_grad_(2 <= i < 4)
        x, y = r.share(x, y)
        F.mse_loss(model(x), y).backward()
        assert (model[0].weight.grad is not None) == (2 <= i < 4)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


class Routed(nn.Module):
    """Experts are called for the examples that want them, and not at all where there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        for i, expert in enumerate(self.experts):
            wanted = (x[:, 0] > i - 1) & (x[:, 0] < i)
            if wanted.any():
                out = out + torch.where(wanted[:, None], expert(x), 0.0)
        return out


def experts_that_some_replicas_do_not_use(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Routed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for x, y in [*batches(), *batches()]:
        x, y = r.share(x, y)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def two_models_that_alternate(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    maker, critic = nn.Linear(6, 3), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    maker_optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    for x, y in [*batches(), *batches()]:
        x, y = r.share(x, y)
        critic_optimizer.zero_grad()
        (critic(maker(x).detach()).mean() - critic(y).mean()).backward()
        critic_optimizer.step()
        maker_optimizer.zero_grad()
        (-critic(maker(x)).mean()).backward()
        maker_optimizer.step()
    return values(maker, critic)


def parts_called_by_themselves(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"encoder": nn.Linear(6, 6), "decoder": nn.Linear(6, 6), "head": nn.Linear(6, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches()):
        x, y = r.share(x, y)
        code = torch.tanh(model["encoder"](x))
        loss = F.mse_loss(model["head"](code), y) if i % 2 else F.mse_loss(model["decoder"](code), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def two_losses_of_one_graph(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        x, y = r.share(x, y)
        out = model(x)
        F.mse_loss(out, y).backward(retain_graph=True)
        (out**2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def a_gradient_penalty(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        x, y = r.share(x, y)
        x.requires_grad_(True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (F.mse_loss(out, y) + slope.pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def checkpointing(r: Replica, use_reentrant: bool) -> list[Tensor]:
    torch.manual_seed(0)
    first, second, last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), *last.parameters()], lr=0.1)
    for i, (x, y) in enumerate(batches()):
        x, y = r.share(x, y)
        x.requires_grad_(True)
        code = torch.tanh(checkpoint(first, x, use_reentrant=use_reentrant))
        code = torch.tanh(checkpoint(second, code, use_reentrant=use_reentrant))
        out = checkpoint(last, code, use_reentrant=use_reentrant) if i % 2 else last(code)
        F.mse_loss(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(first, second, last)


def checkpointing_reentrant(r: Replica) -> list[Tensor]:
    return checkpointing(r, True)


def checkpointing_not_reentrant(r: Replica) -> list[Tensor]:
    return checkpointing(r, False)


def pictures_in_channels_last(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten()).to(
        memory_format=torch.channels_last
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches(3 * 6 * 6):
        (x,) = r.share(x)
        x = x.view(len(x), 3, 6, 6).contiguous(memory_format=torch.channels_last)
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def a_copied_model(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    first = network()
    model = copy.deepcopy(first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        x, y = r.share(x, y)
        F.mse_loss(model(x) + first(x).detach(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(first, model)


def double_precision_and_complex_numbers(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.ParameterDict(
        {
            "c64": nn.Parameter(torch.randn(6, 3, dtype=torch.complex64)),
            "f64": nn.Parameter(torch.randn(6, 3, dtype=torch.float64)),
            "f32": nn.Parameter(torch.randn(6, 3)),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in batches():
        x, y = r.share(x, y)
        out = (x.to(torch.complex64) @ model["c64"]).abs() + x @ model["f32"] + x.double() @ model["f64"]
        F.mse_loss(out, y.double()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.view_as_real(v) if v.is_complex() else v for v in values(model)]


def branches_whose_gradients_lie_in_the_same_memory(r: Replica) -> list[Tensor]:
    """What adds up hands its gradient on as it is, in another shape at most."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(6, 3), "last": nn.Linear(3, 3)})
    places = nn.ParameterList([torch.randn(3), torch.randn(1, 3), torch.randn(3, 1)])
    optimizer = torch.optim.SGD([*model.parameters(), *places.parameters()], lr=0.1)
    for x, y in batches():
        x, y = r.share(x, y)
        code = model["first"](x) + places[0][None] + places[1] + places[2].view(3) + (places[0] * 2).view(1, 3)
        F.mse_loss(model["last"](code), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model, places)


class Weighted(nn.Module):
    """Its gradient is NaN where the share is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()
        self.scale = nn.Parameter(torch.ones(()))


def a_loss_that_is_nan_for_no_examples(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Weighted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        x, y = r.share(x, y)
        (F.mse_loss(model.model(x), y) * model.scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


RECIPES = [
    ordinary,
    a_loss_that_is_nan_for_no_examples,
    branches_whose_gradients_lie_in_the_same_memory,
    gradients_that_are_zeroed_not_dropped,
    gradients_that_are_never_cleared,
    accumulation,
    accumulation_of_what_the_last_pass_leaves_out,
    one_replicas_own_network_in_no_sync,
    clipping,
    steps_within_the_backward_pass,
    shared_weights,
    frozen_and_unfrozen,
    experts_that_some_replicas_do_not_use,
    two_models_that_alternate,
    parts_called_by_themselves,
    two_losses_of_one_graph,
    a_gradient_penalty,
    checkpointing_reentrant,
    checkpointing_not_reentrant,
    pictures_in_channels_last,
    a_copied_model,
    double_precision_and_complex_numbers,
]


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_training_gives_the_weights_of_plain_pytorch_on_the_whole_batch(
    crews: dict[int, Crew], recipe: Callable[[Replica], list[Tensor]]
) -> None:
    check_as_plain(crews, recipe)


def a_layer_in_two_checkpoints(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    first, shared, last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
    for x, y in batches():
        x, y = r.share(x, y)
        code = torch.tanh(first(x))
        for _ in range(2):
            code = torch.tanh(checkpoint(shared, code, use_reentrant=True))
        F.mse_loss(last(code), y).backward()
    return [parameter.grad for module in (first, shared, last) for parameter in module.parameters()]


def test_a_layer_in_two_reentrant_checkpoints_is_exact_or_an_error_that_says_what_helps(two: Crew) -> None:
    expected = a_layer_in_two_checkpoints(Replica(0, 1, plain=True))
    for result in two.run(in_scope, a_layer_in_two_checkpoints):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for outcome in two.outcomes(small_buckets, a_layer_in_two_checkpoints):
        kind, message, _ = outcome.args
        assert kind == "UsageError"
        assert "parameter Linear.bias got another gradient in the same backward pass" in message
        assert "with activation checkpointing of shared modules pass use_reentrant=False" in message


def test_a_hook_that_a_parameter_has_before_its_module_gets_it_sees_the_gradient_of_all_replicas(two: Crew) -> None:
    def look(r: Replica) -> list[float]:
        seen: list[float] = []
        with r.scope:
            weight = nn.Parameter(torch.ones(1))
            weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.item()))
            model = nn.Module()
            model.weight = weight
            for _ in range(2):
                model.zero_grad()
                (model.weight * (r.id + 1)).sum().backward()
        return seen

    assert two.run(look) == [[1.5, 1.5]] * 2


def test_a_hook_of_a_parameter_sees_what_no_sync_accumulates_and_then_the_gradient_of_all_replicas(two: Crew) -> None:
    def look(r: Replica) -> list[float]:
        seen: list[float] = []
        with r.scope:
            model = nn.Linear(1, 1, bias=False)
            model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.item()))
            with r.gradients.no_sync():
                (model.weight * (r.id + 1)).sum().backward()
            (model.weight * (r.id + 1)).sum().backward()
        return seen

    assert two.run(look) == [[1.0, 3.0], [2.0, 3.0]]


def half_precision(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        x, y = r.share(x, y)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def weights_in_half_precision(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network().bfloat16()
    for x, y in batches():
        x, y = r.share(x, y)
        F.mse_loss(model(x.bfloat16()), y.bfloat16()).backward()
    return [parameter.grad.float() for parameter in model.parameters()]


@pytest.mark.parametrize("recipe", [half_precision, weights_in_half_precision])
def test_half_precision_is_as_near_as_its_rounding_allows(
    crews: dict[int, Crew], recipe: Callable[[Replica], list[Tensor]]
) -> None:
    expected = recipe(Replica(0, 1, plain=True))
    for crew in crews.values():
        results = crew.run(in_scope, recipe)
        for result in results:
            torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)
            torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def summed(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    for x, y in list(batches())[:3]:
        parts = r.share(x, y)
        (F.mse_loss(model(parts[0]), parts[1], reduction="sum") / len(x)).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_sum_leaves_the_scaling_to_the_loss(crews: dict[int, Crew]) -> None:
    expected = summed(Replica(0, 1, plain=True))
    for crew in crews.values():
        for result in crew.run(sum_of_gradients, summed):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def sum_of_gradients(r: Replica, recipe: Callable[[Replica], Any]) -> Any:
    return in_scope(r, recipe, reduction="sum")


# ---------------------------------------------------------------- what users rely on


def made_late(weight: Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight], 1.0)


def put_late(weight: Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    optimizer.param_groups[0]["params"][0] = weight
    return optimizer


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (4, 0)])
@pytest.mark.parametrize("have", [made_late, put_late])
def test_a_tensor_that_an_optimizer_gets_after_the_backward_pass_is_trained_by_all_replicas_gradients(
    two: Crew, have: Callable[[Tensor], torch.optim.Optimizer], shares: tuple[int, int], sparse: bool
) -> None:
    def look(r: Replica) -> list[list[float]]:
        with r.scope:
            weight = torch.zeros(3, 1, requires_grad=True)
            optimizer, seen = None, []
            for _ in range(2):
                r.gradients.set_shares(shares[r.id], sum(shares))
                # The mean over no examples is NaN.
                scale = r.id + 1.0 if shares[r.id] else math.nan
                (F.embedding(torch.tensor([r.id]), weight, sparse=sparse) * scale).sum().backward()
                optimizer = optimizer or have(weight)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(weight.flatten().tolist())
            return seen

    first, second = two.run(look)
    parts = [share / sum(shares) for share in shares]
    assert first == second == [[-n * parts[0], -n * 2 * parts[1], 0] for n in (1, 2)]


def test_a_gradient_of_before_is_that_of_all_replicas_once_an_optimizer_has_its_tensor(two: Crew) -> None:
    def look(r: Replica) -> list[float]:
        with r.scope:
            weight, unused = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
            (weight * (r.id + 1.0)).sum().backward()
            if r.id:
                (unused * 4.0).sum().backward()
            optimizer = torch.optim.SGD([weight, unused], 1.0)
            return [float(parameter.grad) for parameter in optimizer.param_groups[0]["params"]]

    assert two.run(look) == [[1.5, 2.0]] * 2


def through_modules(weights: list[Tensor], scales: list[float]) -> Tensor:
    layer = nn.Linear(1, 1)
    return sum((w * s for w, s in zip(weights, scales, strict=True)), layer(torch.ones(1)).sum())


def through_a_list(weights: list[Tensor], scales: list[float]) -> Tensor:
    return torch.stack([w * s for w, s in zip(weights, scales, strict=True)])


@pytest.mark.parametrize("computed", [through_modules, through_a_list])
def test_tensors_that_optimizers_get_late_in_another_order_on_each_replica_are_trained_as_what_they_are(
    two: Crew, computed: Callable[[list[Tensor], list[float]], Tensor]
) -> None:
    def look(r: Replica) -> list[list[float]]:
        with r.scope:
            weights = [torch.zeros((), requires_grad=True) for _ in range(4)]
            # As those of a set, whose order is that of their addresses.
            order = [0, 1, 2, 3] if r.id == 0 else [3, 1, 0, 2]
            optimizers: dict[int, torch.optim.Optimizer] = {}
            seen = []
            for _ in range(2):
                loss = computed(weights, [10.0**k * (r.id + 1) for k in range(4)])
                torch.autograd.backward(loss, torch.ones_like(loss))
                for k in order:
                    if k not in optimizers:
                        optimizers[k] = torch.optim.SGD([weights[k]], 1.0)
                    optimizers[k].step()
                    optimizers[k].zero_grad()
                seen.append([float(weight) for weight in weights])
            return seen

    expected = [[-n * 1.5 * 10.0**k for k in range(4)] for n in (1, 2)]
    assert two.run(look) == [expected, expected]


def test_a_tensor_of_other_passes_on_each_replica_is_what_it_is_to_the_optimizer_that_gets_it_late(two: Crew) -> None:
    def look(r: Replica) -> list[float]:
        with r.scope:
            weight, *others = (torch.zeros((), requires_grad=True) for _ in range(3))
            if r.id:
                (others[0] * 100.0 + weight + others[1] * 100.0).backward()
            else:
                weight.backward(torch.tensor(3.0))
            torch.optim.SGD([weight], 1.0).step()
            return [float(each) for each in (weight, *others)]

    assert two.run(look) == [[-2.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize("apart", ["not synchronised", "accumulating"])
def test_an_optimizer_that_is_made_late_leaves_gradients_alone_where_each_replica_has_its_own(
    two: Crew, apart: str
) -> None:
    def look(r: Replica) -> float:
        with r.scope:
            weight = torch.zeros(1, requires_grad=True)
            (weight * (r.id + 1.0)).sum().backward()
            r.gradients.enabled = apart == "accumulating"
            with r.gradients.no_sync() if apart == "accumulating" else contextlib.nullcontext():
                torch.optim.SGD([weight], 1.0).step()
            return float(weight)

    assert two.run(look) == [-1.0, -2.0]


def test_an_error_as_an_optimizer_is_made_late_leaves_training_as_it_is(two: Crew) -> None:
    def look(r: Replica) -> list[float]:
        with r.scope:
            weight = torch.zeros(2, requires_grad=True)
            weight.sum().backward()
            agree, r.gradients._agreement.agree = r.gradients._agreement.agree, failing
            with pytest.raises(OSError, match="gone"):
                torch.optim.SGD([weight], 1.0)
            r.gradients._agreement.agree = agree
            optimizer = torch.optim.SGD([weight], 1.0)
            optimizer.zero_grad()
            (weight * (r.id + 1.0)).sum().backward()
            optimizer.step()
            return weight.tolist()

    def failing(*_: object) -> None:
        raise OSError("gone")

    assert two.run(look) == [[-1.5, -1.5]] * 2


def test_autograd_grad_stays_local_and_leaves_gradients_alone(two: Crew) -> None:
    def look(r: Replica) -> None:
        with r.scope:
            torch.manual_seed(0)
            model = nn.Linear(2, 1)
            x, y = torch.randn(3, 2), torch.randn(3, 1)
            part_x, part_y = r.share(x, y)
            F.mse_loss(model(part_x), part_y).backward()
            held = model.weight.grad
            before = held.clone()
            (local,) = torch.autograd.grad(F.mse_loss(model(part_x), part_y), [model.weight])
        other = copy.deepcopy(model)
        F.mse_loss(other(part_x), part_y).backward()
        torch.testing.assert_close(local, other.weight.grad)
        assert model.weight.grad is held
        assert torch.equal(held, before)

    two.run(look)


def test_a_parameter_that_nobody_used_keeps_no_gradient(two: Crew) -> None:
    def look(r: Replica) -> list[bool]:
        with r.scope:
            model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            seen = []
            for i in range(6):
                model.zero_grad()
                out = model[0](torch.ones(1, 2))
                (out if i % 2 else model[1](out)).sum().backward()
                seen.append(model[1].weight.grad is None)
            return seen

    assert two.run(look) == [[False, True] * 3] * 2


def test_what_was_synchronised_is_known_however_often_the_group_is_formed_anew(two: Crew) -> None:
    def look(r: Replica) -> list[list[str]]:
        with r.scope:
            model = nn.Linear(2, 1)
            model(torch.ones(1, 2)).sum().backward()
            seen = []
            for _ in range(2):
                r.gradients.regroup()
                seen.append(sorted(r.gradients.synchronized()))
            return seen

    assert two.run(look) == [[["Linear.bias", "Linear.weight"]] * 2] * 2


def test_a_gradient_reaches_the_replica_that_did_not_use_the_parameter(two: Crew) -> None:
    def look(r: Replica) -> Tensor:
        with r.scope:
            model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            out = model[0](torch.ones(1, 2))
            (model[1](out) if r.id else out).sum().backward()
            return model[1].bias.grad

    first, second = two.run(look)
    assert torch.equal(first, torch.full((2,), 0.5))
    assert torch.equal(second, first)


@pytest.mark.parametrize("somebody_else", [False, True])
def test_without_synchronisation_gradients_are_the_replicas_own(two: Crew, somebody_else: bool) -> None:
    def look(r: Replica) -> list[float]:
        with r.scope:
            model, owner = nn.Linear(1, 1, bias=False), nn.Identity()
            if somebody_else:
                r.gradients.leave_to(owner, model.parameters())
            else:
                r.gradients.enabled = False
            r.gradients.set_shares(1 + r.id, 3)
            seen = []
            for _ in range(2):
                model(torch.full((1, 1), r.id + 1.0)).sum().backward()
                seen.append(float(model.weight.grad))
            return seen

    assert two.run(look) == [[1.0, 2.0], [2.0, 4.0]]


def test_a_hook_that_raises_leaves_the_gradient_that_was_there(two: Crew) -> None:
    def look(r: Replica) -> list[float]:
        with r.scope:
            model = nn.Linear(1, 1, bias=False)
            fails = False

            def check(gradient: Tensor) -> None:
                if fails:
                    raise ValueError("no such gradient")

            model.weight.register_hook(check)
            r.gradients.set_shares(1 + r.id, 3)
            seen = []
            for _ in range(2):
                model.zero_grad()
                model(torch.full((1, 1), r.id + 1.0)).sum().backward()
                seen.append(float(model.weight.grad))
                fails = True
                with pytest.raises(ValueError, match="no such gradient"):
                    model(torch.ones(1, 1)).sum().backward()
                fails = False
                seen.append(float(model.weight.grad))
            return seen

    for seen in two.run(look):
        assert seen == pytest.approx([5 / 3] * 4)


def test_of_networks_that_are_copied_and_not_trained_nothing_stays(two: Crew) -> None:
    def look(r: Replica) -> int:
        with r.scope:
            model = network()
            for _ in range(agreement.SWEPT):
                copy.deepcopy(model)
            return len(r.gradients._agreement._tracked)

    for tracked in two.run(look):
        assert tracked <= agreement.SWEPT


def test_reduction_begins_while_the_backward_pass_goes_on(two: Crew) -> None:
    def look(r: Replica) -> list[list[str]]:
        r = r.remade(bytes_per_bucket=64 * 64 * 4, first_bucket_bytes=4)
        events: list[str] = []
        reduce = dist.all_reduce

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            events.append("bucket")
            return reduce(*args, **kwargs)

        dist.all_reduce = all_reduce
        try:
            with r.scope:
                model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
                passes = []
                for _ in range(3):
                    events.clear()
                    out = model[0](torch.ones(1, 64))
                    out.register_hook(lambda _: events.append("nearly through"))
                    model[1:](out).sum().backward()
                    passes.append(list(events))
                return passes
        finally:
            dist.all_reduce = reduce

    for passes in two.run(look):
        assert passes[0][0] == "nearly through"
        for events in passes[1:]:
            assert events.index("nearly through") >= 3
            assert events[-1] == "bucket"


def test_buckets_that_are_asked_for_smaller_than_the_first_one_are_so_from_the_first_on(two: Crew) -> None:
    def look(r: Replica) -> list[int]:
        r = r.remade(bytes_per_bucket=400)
        sizes: list[int] = []
        reduce = dist.all_reduce

        def all_reduce(tensor: Tensor, **kwargs: Any) -> Any:
            sizes.append(tensor.numel())
            return reduce(tensor, **kwargs)

        dist.all_reduce = all_reduce
        try:
            with r.scope:
                layers = [nn.Linear(100, 1, bias=False) for _ in range(3)]
                for _ in range(2):
                    sizes.clear()
                    sum(layer(torch.ones(1, 100)) for layer in layers).sum().backward()
                return sizes
        finally:
            dist.all_reduce = reduce

    for sizes in two.run(look):
        assert [size // 100 for size in sizes] == [1, 1, 1]


def test_alternating_losses_need_one_set_of_buckets_once_their_order_is_known(two: Crew) -> None:
    def look(r: Replica) -> list[list[int]]:
        sizes: list[int] = []
        reduce = dist.all_reduce

        def all_reduce(tensor: Tensor, **kwargs: Any) -> Any:
            sizes.append(tensor.numel())
            return reduce(tensor, **kwargs)

        dist.all_reduce = all_reduce
        try:
            with r.scope:
                first, second = nn.Linear(100, 1, bias=False), nn.Linear(1000, 1, bias=False)
                rounds = []
                for i in range(2 * PATIENCE + 6):
                    sizes.clear()
                    (second(torch.ones(1, 1000)) if i % 2 else first(torch.ones(1, 100))).sum().backward()
                    rounds.append(list(sizes))
                return rounds[-2:]
        finally:
            dist.all_reduce = reduce

    tail = 2 + 1 + 2 + len(QUIET)
    assert two.run(look) == [[[100 + tail], [1000 + tail]]] * 2


def test_a_network_on_another_replicas_gpu_is_an_error_that_names_the_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class There(nn.Parameter):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda:0")

    ops, gradients = Slow(), GradientSynchronizer(1, 2)
    ops.bind(Member(1, 2, torch.device("cuda:1"), SimpleNamespace(shared=None)))
    gradients.use(ops)
    monkeypatch.setattr(gradients, "_begin", lambda: Round(Plan.cut(frozenset(), [], 1, 1, True), lambda: None))
    weight = There(torch.ones(2))
    gradients.track(weight, "Linear.weight")
    with pytest.raises(UsageError, match=r"Linear.weight is on cuda:0, but replica 1 computes on cuda:1; .* 'cuda:0'"):
        (weight * 2).sum().backward()


def test_a_model_made_anew_takes_the_place_of_the_old_one(two: Crew) -> None:
    def look(r: Replica) -> list[int]:
        agreed = []
        with r.scope:
            for _ in range(4):
                model = network()
                for _ in range(2):
                    model(torch.ones(1, 6)).sum().backward()
                    torch.testing.assert_close(model[2].bias.grad, torch.full((3,), 1.0 + _))
                agreed.append(len(r.gradients._agreement.agreed))
                del model
                gc.collect()
        return agreed

    assert two.run(look) == [[4, 4, 4, 4]] * 2


@pytest.mark.skipif(not hasattr(torch.ones(1), "grad_dtype"), reason="this torch has gradients of no other dtype")
def test_gradients_of_another_dtype_than_their_parameter_keep_it_and_all_its_bits(two: Crew) -> None:
    def look(r: Replica) -> list[tuple[torch.dtype, list[float]]]:
        with r.scope:
            model = nn.Linear(2, 1, bias=False).bfloat16()
            seen = []
            for dtype in (torch.bfloat16, torch.float32, torch.float32):
                model.zero_grad()
                model.weight.grad_dtype = dtype
                (model.weight * torch.tensor([1.0, 1.0 + r.id * 2.0**-10])).sum().backward()
                seen.append((model.weight.grad.dtype, model.weight.grad.flatten().tolist()))
            return seen

    rounded, exact = (torch.bfloat16, [1.0, 1.0]), (torch.float32, [1.0, 1.0 + 2.0**-11])
    assert two.run(look) == [[rounded, exact, exact]] * 2


def test_a_lazy_module_is_tracked_and_equal(two: Crew) -> None:
    def look(r: Replica) -> tuple[Tensor, Tensor, int]:
        with r.scope, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = nn.Sequential(nn.Dropout(0.5), nn.LazyLinear(2))
            model(torch.full((4, 3), r.id + 1.0)).sum().backward()
        return (
            model[1].weight.detach(),
            model[1].weight.grad,
            sum("different values" in str(w.message) for w in seen),
        )

    (first, gradient, warned), (second, other, _) = two.run(look)
    assert not warned
    assert torch.equal(first, second)
    assert torch.equal(gradient, other)


def test_parameters_that_a_conversion_exchanges_are_synchronised(two: Crew) -> None:
    def train(r: Replica) -> None:
        with r.scope:
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
            model.to_empty(device="cpu")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1.0)
            (model(torch.ones(1, 2)) * (1 + r.id)).sum().backward()
            assert model[1].bias.grad.tolist() == [1.5]
            before = model[0].weight
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            try:
                model.double()
            finally:
                torch.__future__.set_overwrite_module_params_on_conversion(False)
            assert model[0].weight is not before
            model.zero_grad()
            (model(torch.ones(1, 2).double()) * (1 + r.id)).sum().backward()
            assert model[1].bias.grad.tolist() == [1.5]
            assert model[0].weight.grad.tolist() == [[1.5] * 2] * 3

    two.run(train)


def test_half_way_to_another_precision_goes_on(two: Crew) -> None:
    def look(r: Replica) -> list[torch.dtype]:
        with r.scope:
            model = nn.Linear(2, 2)
            model(torch.full((1, 2), 1.0 + r.id)).sum().backward()
            model.double()
            model.zero_grad()
            model(torch.full((1, 2), 1.0 + r.id, dtype=torch.float64)).sum().backward()
            torch.testing.assert_close(model.weight.grad, torch.full((2, 2), 1.5, dtype=torch.float64))
            return [agreed.dtype for agreed in r.gradients._agreement.agreed if agreed.tracked is not None]

    assert two.run(look) == [[torch.float64] * 2] * 2


def test_what_was_converted_and_is_used_by_one_replica_first_has_one_number_on_all(two: Crew) -> None:
    def look(r: Replica) -> tuple[list[float], int]:
        def train(model: nn.Sequential, both: bool) -> None:
            hidden = model[0](torch.ones(1, 2, dtype=model[0].weight.dtype))
            ((model[1](hidden) if both else hidden) * (1 + r.id)).sum().backward()

        with r.scope:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            train(model, True)
            model.zero_grad()
            model.double()
            train(model, r.id == 1)
            # On top of what is there.
            train(model, True)
            agreed = r.gradients._agreement.agreed
            numbers = [entry.tracked.number for entry in agreed if entry.parameter() is not None]
            assert numbers == [i for i, entry in enumerate(agreed) if entry.parameter() is not None]
            bias = model[1].bias.grad.tolist()
            del model, agreed
            other = nn.Linear(1, 1)
            other(torch.ones(1, 1)).sum().backward()
            return bias, len(r.gradients._agreement.agreed)

    assert two.run(look) == [([2.5, 2.5], 2)] * 2


def test_what_was_converted_is_known_by_its_values_where_one_replica_has_made_a_module_for_itself(two: Crew) -> None:
    def look(r: Replica) -> list[float]:
        with r.scope:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            probe = nn.Linear(2, 2) if r.id else None
            model(torch.ones(1, 2)).sum().backward()
            model.zero_grad()
            model.double()
            hidden = model[0](torch.ones(1, 2).double())
            # One of the replicas uses the second layer first, in the new precision.
            ((hidden if r.id else model[1](hidden)) * (1 + r.id)).sum().backward()
            assert probe is None or probe.weight.grad is None
            return model[1].bias.grad.tolist()

    assert two.run(look) == [[0.5, 0.5]] * 2


def test_a_network_is_the_same_one_where_replicas_made_others_for_themselves_at_other_times(two: Crew) -> None:
    def look(r: Replica) -> list[float]:
        with r.scope:
            if r.id == 0:
                nn.Linear(2, 2)
            torch.manual_seed(0)
            model = nn.Linear(2, 2)
            if r.id == 1:
                copy.deepcopy(model)
            model(torch.ones(1, 2) * (r.id + 1)).sum().backward()
            return model.weight.grad[0].tolist()

    assert two.run(look) == [[1.5, 1.5]] * 2


def test_a_network_is_trained_as_one_where_one_replica_has_another_of_the_same_values(two: Crew) -> None:
    def look(r: Replica) -> list[float]:
        with r.scope:
            if r.id == 0:
                torch.manual_seed(0)
                r.teacher = nn.Linear(2, 2)
            torch.manual_seed(0)
            model = nn.Linear(2, 2)
            if r.id == 1:
                nn.Linear(2, 2)
            model(torch.ones(1, 2) * (r.id + 1)).sum().backward()
            return model.weight.grad[0].tolist()

    assert two.run(look) == [[1.5, 1.5]] * 2


def test_a_layer_that_only_one_replica_uses_is_known_where_that_one_keeps_a_copy_of_the_network(two: Crew) -> None:
    def look(r: Replica) -> list[list[float]]:
        with r.scope:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
            nn.init.constant_(model[1].weight, 1.0)
            if r.id == 1:
                r.average = copy.deepcopy(model)
            hidden = model[0](torch.ones(1, 2))
            (model[1](hidden) if r.id == 1 else hidden).sum().backward()
            return model[0].bias.grad.tolist()

    assert two.run(look) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("own", ["on one replica", "on each, at other times"])
def test_experts_that_replicas_use_in_turn_keep_their_biases_where_a_replica_has_a_module_of_its_own(
    two: Crew, own: str
) -> None:
    def look(r: Replica) -> list[list[float]]:
        with r.scope:
            if r.id == 0:
                r.probe = nn.Linear(2, 2)
            torch.manual_seed(1)
            experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
            for expert in experts:
                nn.init.zeros_(expert.bias)
            if r.id == 1 and own != "on one replica":
                r.probe = nn.Linear(2, 2)
            (experts[r.id](torch.ones(1, 2)) * (r.id + 1)).sum().backward()
            return [expert.bias.grad.tolist() for expert in experts]

    # Each is used by one of two.
    assert two.run(look) == [[[0.5, 0.5], [1.0, 1.0]]] * 2


def test_ddp_synchronises_what_it_wraps_and_nobody_else_does(two: Crew) -> None:
    def look(r: Replica) -> tuple[float, int]:
        with r.scope:
            model = nn.Linear(1, 1, bias=False)
            wrapped = nn.parallel.DistributedDataParallel(model)
            r.gradients.set_shares(1 + r.id, 3)
            for _ in range(2):
                wrapped.zero_grad()
                wrapped(torch.full((1, 1), r.id + 1.0)).sum().backward()
            left = len(r.gradients._agreement.agreed)
            del wrapped
            gc.collect()
            r.gradients.clear_shares()
            model.weight.grad = None
            model(torch.full((1, 1), r.id + 1.0)).sum().backward()
            assert float(model.weight.grad) == 1.5
            assert len(r.gradients._agreement.agreed) == 1
            return float(wrapped_gradient(model)), left

    def wrapped_gradient(model: nn.Module) -> Tensor:
        return model.weight.grad

    assert two.run(look) == [(1.5, 0)] * 2


def test_a_compiled_model_is_synchronised(two: Crew) -> None:
    def look(r: Replica) -> list[float]:
        with r.scope:
            model = nn.Linear(1, 1, bias=False)
            compiled = torch.compile(model, backend="aot_eager")
            for _ in range(3):
                model.zero_grad()
                compiled(torch.full((1, 1), r.id + 1.0)).sum().backward()
            return model.weight.grad.flatten().tolist()

    assert two.run(look) == [[1.5], [1.5]]


# ---------------------------------------------------------------- replicas that differ


def test_different_initial_values_give_way_to_replica_0s_and_are_named(two: Crew) -> None:
    def look(r: Replica) -> tuple[Tensor, list[str]]:
        with r.scope, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = nn.Linear(2, 2)
            with torch.no_grad():
                model.weight.fill_(r.id + 1.0)
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
        return model.weight.detach(), [str(w.message) for w in seen if "different values" in str(w.message)]

    (first, (message,)), (second, unsaid) = two.run(look)
    assert torch.equal(first, torch.ones(2, 2))
    assert torch.equal(second, torch.ones(2, 2))
    assert "Linear.weight" in message
    assert "Linear.bias" not in message
    assert "; replica 0's were taken. " in message
    assert unsaid == []


def test_initial_values_that_are_the_same_numbers_in_another_order_are_different(two: Crew) -> None:
    def look(r: Replica) -> tuple[Tensor, int]:
        with r.scope, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = nn.Linear(4, 1, bias=False)
            with torch.no_grad():
                model.weight.copy_(torch.arange(4.0).roll(r.id))
            model(torch.ones(1, 4)).sum().backward()
        return model.weight.detach(), sum("different values" in str(w.message) for w in seen)

    (first, warned), (second, _) = two.run(look)
    assert warned
    assert torch.equal(first, second)


@pytest.mark.parametrize("widths", [(2, 2), (2, 3)], ids=["of one shape", "of two shapes"])
def test_modules_that_replicas_got_in_another_order_are_known_by_their_values(
    two: Crew, widths: tuple[int, int]
) -> None:
    def look(r: Replica) -> None:
        with r.scope, warnings.catch_warnings():
            warnings.simplefilter("error")
            modules = {}
            for width, seed in zip(widths[:: 1 - 2 * r.id], (0, 1)[:: 1 - 2 * r.id], strict=True):
                torch.manual_seed(seed)
                modules[seed] = nn.Bilinear(2, 2, width, bias=False)
            before = modules[0].weight.detach().clone()
            modules[0](torch.ones(1, 2), torch.full((1, 2), r.id + 1.0)).sum().backward()
            assert torch.equal(modules[0].weight, before)
            torch.testing.assert_close(modules[0].weight.grad, torch.full((2, 2, 2), 1.5))
            assert modules[1].weight.grad is None

    two.run(look)


def test_who_gave_the_values_is_told_where_replica_0_has_no_such_parameter(monkeypatch) -> None:
    ones, twos = (Portrait.of(nn.Parameter(torch.full((2,), value))) for value in (1.0, 2.0))
    monkeypatch.setattr(Agreed, "take_values", lambda agreed, source, replica_id: None)
    told = "in a, b, c, d, e and 2 more parameters; replica 1's were taken. "
    with pytest.warns(UserWarning, match=told):
        agreement.Agreement(0, 3)._compare([None] * 7, list("abcdefg"), [(None, ones, twos)] * 7)


def test_a_module_that_only_one_replica_trains_is_named_on_all(two: Crew) -> None:
    def look(r: Replica) -> None:
        with r.scope:
            model = nn.Linear(2, 2)
            if r.id == 0:
                extra = nn.LayerNorm(2)
                model(extra(torch.ones(1, 2))).sum().backward()
            else:
                model(torch.ones(1, 2)).sum().backward()

    for outcome in two.outcomes(look):
        kind, message, _ = outcome.args
        assert kind == "UsageError"
        assert "LayerNorm.weight of shape (2,)" in message
        assert "1 on replica 0, 0 on replica 1" in message


def test_a_module_that_one_replica_makes_and_does_not_train_does_no_harm(two: Crew) -> None:
    def look(r: Replica) -> Tensor:
        with r.scope, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if r.id == 0:
                r.extra = nn.Linear(2, 2)
            model = nn.Linear(2, 2)
            model(torch.full((1, 2), r.id + 1.0)).sum().backward()
        return model.weight.grad

    for gradient in two.run(look):
        assert torch.equal(gradient, torch.full((2, 2), 1.5))


def test_shapes_that_differ_are_named_on_all(two: Crew) -> None:
    def look(r: Replica) -> None:
        with r.scope:
            model = nn.Linear(2, 2 + r.id)
            model(torch.ones(1, 2)).sum().backward()

    for outcome in two.outcomes(look):
        kind, message, _ = outcome.args
        assert kind == "UsageError"
        assert "Linear.bias: torch.float32 (2,) on cpu on replica 0, torch.float32 (3,) on cpu on replica 1" in message


# ---------------------------------------------------------------- when it goes wrong


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("broken layer")


def test_a_backward_pass_that_every_replica_gave_up_is_forgotten(two: Crew) -> None:
    def look(r: Replica) -> Tensor:
        r = r.remade(bytes_per_bucket=4, first_bucket_bytes=4)
        with r.scope:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            for broken in (False, True, False, False):
                model.zero_grad()
                out = model[0](torch.full((1, 2), r.id + 1.0))
                loss = model[1](Breaks.apply(out) if broken else out).sum()
                if broken:
                    with pytest.raises(ValueError, match="broken layer"):
                        loss.backward()
                else:
                    loss.backward()
            expected = (model[1].weight.sum(0)[:, None] * torch.full((2,), 1.5)).detach()
            torch.testing.assert_close(model[0].weight.grad, expected)

    two.run(look)


def test_a_backward_pass_that_one_replica_gave_up_is_an_error_on_all(two: Crew) -> None:
    def look(r: Replica) -> str:
        with r.scope:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            out = model[0](torch.ones(1, 2))
            if r.id == 1:
                with pytest.raises(ValueError, match="broken layer"):
                    model[1](Breaks.apply(out)).sum().backward()
                out = model[0](torch.ones(1, 2))
            with pytest.raises(PeerFailed) as caught:
                model[1](out).sum().backward()
            return str(caught.value)

    for message in two.run(look):
        assert "replica 1 stopped halfway" in message


def test_an_error_of_a_collective_leaves_backward_as_it_is(two: Crew) -> None:
    class Gone(Exception):
        pass

    def look(r: Replica) -> None:
        reduce = dist.all_reduce

        class Work:
            def wait(self) -> None:
                raise Gone("peer")

        def fail(*_: Any, **__: Any) -> Work:
            return Work()

        with r.scope:
            model = nn.Linear(2, 2)
            model(torch.ones(1, 2)).sum().backward()
            dist.all_reduce = fail
            try:
                with pytest.raises(Gone, match="peer"):
                    model(torch.ones(1, 2)).sum().backward()
            finally:
                dist.all_reduce = reduce
            r.gradients.reset()
            model.zero_grad()
            model(torch.full((1, 2), r.id + 1.0)).sum().backward()
            assert torch.equal(model.weight.grad, torch.full((2, 2), 1.5))

    two.run(look)


def test_what_a_failed_collective_goes_on_to_write_is_in_no_later_gradient(two: Crew) -> None:
    def look(r: Replica) -> None:
        reduce, written = dist.all_reduce, []

        class Late:
            def wait(self) -> None:
                raise ReplicaTimeout("a peer is late")

        def fail(flat: Tensor, **_: Any) -> Late:
            written.append(flat)
            return Late()

        def go_on(flat: Tensor, **options: Any) -> Any:
            written[0].fill_(1e9)
            return reduce(flat, **options)

        with r.scope:
            model = nn.Linear(2, 2)
            model(torch.ones(1, 2)).sum().backward()
            for way in (fail, go_on):
                dist.all_reduce = way
                model.zero_grad()
                try:
                    model(torch.full((1, 2), r.id + 1.0)).sum().backward()
                except ReplicaTimeout:
                    assert way is fail
                finally:
                    dist.all_reduce = reduce
            assert torch.equal(model.weight.grad, torch.full((2, 2), 1.5))

    two.run(look)


def test_training_goes_on_in_a_new_process_group_with_a_new_replica_in_it(two: Crew) -> None:
    def first(r: Replica) -> None:
        with r.scope:
            model = nn.Linear(2, 2)
            model(torch.ones(1, 2)).sum().backward()
        sys.kept_by_the_test = (r, model, dist.group.WORLD)  # type: ignore[attr-defined]
        dist.destroy_process_group()

    def second(new: Replica) -> Tensor:
        r, model, _ = sys.kept_by_the_test  # type: ignore[attr-defined]
        del sys.kept_by_the_test  # type: ignore[attr-defined]
        if r.id == 1:
            r = new
            r.scope.adopt(model := copy.deepcopy(model))
        with r.scope:
            model.zero_grad()
            model(torch.full((1, 2), r.id + 1.0)).sum().backward()
        return model.weight.grad

    two.run(first)
    for gradient in two.run(second):
        assert torch.equal(gradient, torch.full((2, 2), 1.5))


def test_no_process_group_is_an_error_that_says_so() -> None:
    r = Replica(0, 2)
    with r.scope:
        model = nn.Linear(2, 2)
        with pytest.raises(ReplicaError, match="process group is gone"):
            model(torch.ones(1, 2)).sum().backward()


def test_a_gradient_that_was_set_aside_for_a_pass_that_fails_is_there_again() -> None:
    r = Replica(0, 2)
    with r.scope:
        model = nn.Linear(2, 2)
        model.weight.grad = torch.ones(2, 2)
        r.gradients.set_shares(1, 3)
        loss = Breaks.apply(model.bias * 1.0).sum()
        loss = loss + (model.weight * 1.0).sum()
        # The weight's gradient is set aside for one that never comes.
        with pytest.raises(ValueError, match="broken layer"):
            torch.autograd.grad(loss, [model.weight, model.bias])
        assert torch.equal(model.weight.grad, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replica_id": 3, "num_replicas": 2}, "`replica_id` is 3"),
        ({"replica_id": 0, "num_replicas": 2, "reduction": "max"}, "`reduction` is 'max'"),
        ({"replica_id": 0, "num_replicas": 2, "bytes_per_bucket": 0}, "`bytes_per_bucket` is 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        GradientSynchronizer(**arguments)


@pytest.mark.parametrize("shares", [(-1, 3), (4, 3), (0, 0)])
def test_shares_that_cannot_be_are_refused(shares: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=f"a share of {shares[0]} examples"):
        GradientSynchronizer(0, 2).set_shares(*shares)


def test_one_replica_hooks_nothing() -> None:
    model = nn.Linear(2, 2)
    gradients = GradientSynchronizer(0, 1)
    gradients.track(model.weight, "Linear.weight")
    assert not model.weight._backward_hooks
    assert not model.weight._post_accumulate_grad_hooks


def test_hooks_do_not_travel_with_a_copy_or_a_pickle() -> None:
    r = Replica(0, 2)
    with r.scope:
        model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        other(torch.ones(1, 2)).sum().backward()
        assert torch.equal(other.weight.grad, torch.ones(2, 2))


# ---------------------------------------------------------------- prediction and matching, by themselves


def after(*passes: set[int]) -> set[int]:
    history = History()
    for used in passes:
        history.learn(frozenset(used))
    return set(history.predict())


def test_the_same_again_is_expected_first() -> None:
    assert after({1, 2}) == {1, 2}


def test_losses_that_alternate_are_expected_in_turn() -> None:
    turns = [{1}, {1, 2}] * (PATIENCE + 2)
    assert after(*turns) == {1}
    assert after(*turns, {1}) == {1, 2}


def test_what_is_frozen_for_good_is_left_out() -> None:
    assert after({1, 2}, {1}) == {1, 2}
    assert after({1, 2}, *[{1}] * (PATIENCE + 1)) == {1}


def test_what_is_not_used_any_more_is_left_out_after_some_equal_passes() -> None:
    history, all_, some = History(), frozenset({1, 2}), frozenset({1})
    # What is used now and then is used still.
    for used in (all_, *[some] * PATIENCE, all_, *[some] * PATIENCE):
        history.learn(used)
        assert history.predict() == all_
    history.learn(some)
    assert history.predict() == some


def test_random_use_ends_in_everything_that_is_used() -> None:
    assert after({1, 2}, {1, 3}, {2, 4}, {1, 4}, {2, 3}, {3, 4}, {1}) >= {1, 2}


def test_what_is_remembered_has_a_bound() -> None:
    history = History()
    for i in range(1000):
        history.learn(frozenset({i, i * 7}))
    assert len(history._following) + len(history._surplus) <= 200


def test_of_layers_that_are_left_out_at_random_not_every_turn_is_remembered() -> None:
    history, dice = History(), random.Random(0)
    for _ in range(1000):
        history.learn(frozenset(dice.sample(range(20), 10)))
    assert len(history._following) + len(history._surplus) <= 200
    assert history.predict() == set(range(20))
