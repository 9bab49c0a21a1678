"""Networks whose parts, tensors or names are changed after the replicas have them: all else is kept, either side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import mirror_nb as mnb
from mirror_nb.mirroring.grafting import graft

X = torch.arange(32.0).reshape(8, 4).sin()


def used(strategy: mnb.MirroredStrategy, make: Callable[[], nn.Module]) -> Any:
    """Return a network that the replicas have."""
    with strategy.scope():
        network = make()
    strategy.run(lambda: network(X).shape)
    return network


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def there(strategy: mnb.MirroredStrategy, network: nn.Module) -> dict[str, Any]:
    """Return what both replicas have of a network: names, values, flags and modes."""

    def look() -> dict[str, Any]:
        tensors = [*network.named_parameters(), *network.named_buffers()]
        return {
            "values": {name: tensor.detach().tolist() for name, tensor in tensors},
            "trained": [name for name, parameter in network.named_parameters() if parameter.requires_grad],
            "modes": [part.training for part in network.modules()],
            "parts": [type(part).__name__ for part in network.modules()],
        }

    found = strategy.run(look)
    return torch.utils._pytree.tree_map(lambda leaf: strategy.local_results(leaf)[0], found)


def freeze(network: Any) -> None:
    network[0].requires_grad_(False)


def zero(network: Any) -> None:
    with torch.no_grad():
        network[0].weight.zero_()


def checkpoint(network: Any) -> None:
    network.load_state_dict({name: torch.ones_like(value) for name, value in network.state_dict().items()})


def assigned(network: Any) -> None:
    state = {name: torch.ones_like(value) for name, value in network.state_dict().items()}
    network.load_state_dict(state, assign=True)


def head(network: Any) -> None:
    network[2] = nn.Linear(5, 3)


def activation(network: Any) -> None:
    network[1] = nn.ReLU()


def between(network: Any) -> None:
    # Without tensors: torch tells nobody that it is there.
    network.insert(1, nn.ReLU())


def cut(network: Any) -> None:
    del network[2]


def no_bias(network: Any) -> None:
    network[0].bias = None


def parameter(network: Any) -> None:
    network[0].weight = nn.Parameter(torch.ones(5, 4))


def pruned(network: Any) -> None:
    prune.l1_unstructured(network[0], "weight", amount=0.5)


def evaluates(network: Any) -> None:
    network[0].eval()


@pytest.mark.parametrize("last", [head, activation, between, cut, no_bias, parameter, pruned])
@pytest.mark.parametrize("first", [freeze, zero, checkpoint, assigned, evaluates])
@pytest.mark.parametrize("order", [1, -1])
def test_what_was_changed_here_beside_the_parts_is_there(two, first, last, order):
    network = used(two, sequential)
    for change in (first, last)[::order]:
        change(network)
    found = there(two, network)
    assert found["values"] == {
        name: value.detach().tolist() for name, value in [*network.named_parameters(), *network.named_buffers()]
    }
    assert found["trained"] == [name for name, own in network.named_parameters() if own.requires_grad]
    assert found["modes"] == [part.training for part in network.modules()]
    assert found["parts"] == [type(part).__name__ for part in network.modules()]


@pytest.mark.parametrize("change", [head, cut, no_bias, pruned])
def test_a_step_that_ran_before_the_change_and_runs_on_has_the_parts_of_now(two, change):
    network = used(two, sequential)

    def step() -> str:
        return " ".join(network.state_dict())

    for _ in range(3):
        two.run(step)
    change(network)
    for _ in range(3):
        assert two.run(step) == step()


def test_gradients_that_are_accumulated_in_the_replicas_are_converted_with_their_network(two):
    network = used(two, sequential)

    def accumulates() -> list[tuple[torch.dtype, list[Any]]]:
        dtype = network[0].weight.dtype
        network(X.to(dtype)).sum().backward()
        return [(parameter.grad.dtype, parameter.grad.double().tolist()) for parameter in network.parameters()]

    before = two.local_results(two.run(accumulates)[0])[0]
    network.double()
    after = two.local_results(two.run(accumulates)[0])[0]
    assert after[0] == torch.float64
    torch.testing.assert_close(torch.tensor(after[1]), 2 * torch.tensor(before[1]), rtol=1e-5, atol=1e-5)


def test_a_frozen_body_with_a_new_head_is_trained_as_in_one_process(two):
    torch.manual_seed(0)
    network = used(two, sequential)
    with two.scope():
        freeze(network)
        head(network)
        optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 0.1)
    body, top = network[0].weight.detach().clone(), network[2].weight.detach().clone()

    def step() -> None:
        optimizer.zero_grad()
        network(X).pow(2).mean().backward()
        optimizer.step()

    two.run(step)
    assert torch.equal(network[0].weight, body)
    assert not torch.equal(network[2].weight, top)


class Cached(nn.Module):
    """Makes its mask, and a layer, when it sees how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None, persistent=False)
        self.layer = nn.Linear(4, 2)
        self.late: nn.Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) < len(x):
            self.mask = torch.ones(len(x))
        if self.late is None:
            self.late = nn.Linear(2, 2)
        return self.late(self.layer(x)) * self.mask[: len(x), None]


def test_what_a_forward_pass_makes_in_the_replicas_is_here(two):
    network = used(two, Cached)
    layer = network.layer
    assert list(network.state_dict()) == ["layer.weight", "layer.bias", "late.weight", "late.bias"]
    assert network.mask.shape == (8,)
    assert network.layer is layer
    two.run(lambda: network(torch.cat([X, X])).shape)
    assert network.mask.shape == (16,)
    # The parts that came from there are mirrored as any.
    with torch.no_grad():
        network.late.weight.fill_(3.0)
    assert two.run(lambda: float(network.late.weight.detach().mean())) == 3.0
    optimizer = two.mirror(torch.optim.SGD(network.parameters(), 0.1))

    def step() -> None:
        network(X).sum().backward()
        optimizer.step()

    two.run(step)
    assert float(network.late.weight.detach().mean()) != 3.0


@pytest.mark.parametrize("change", [pruned, head, between, cut, no_bias, parameter])
def test_what_a_call_makes_of_a_network_is_here(two, change):
    network = used(two, sequential)
    first = network[0]
    two.run(lambda: change(network))
    found = there(two, network)
    assert found["values"] == {
        name: value.detach().tolist() for name, value in [*network.named_parameters(), *network.named_buffers()]
    }
    assert found["parts"] == [type(part).__name__ for part in network.modules()]
    assert network[0] is first
    assert torch.equal(network(X), two.local_results(two.run(lambda: network(X).detach()))[0])


@pytest.mark.parametrize("known", [False, True], ids=["the layer alone is sent", "its network is there"])
def test_a_layer_that_a_call_gives_a_parametrization_has_it_here(two, known):
    # That gives the layer another class, and leaves it the same layer.
    with two.scope():
        network = sequential()
    layer = network[0]
    if known:
        two.run(lambda: network(X).shape)
    two.run(lambda: parametrizations.weight_norm(layer) and None)
    assert "0.parametrizations.weight.original1" in network.state_dict()
    assert network[0] is layer
    assert torch.equal(network(X), two.local_results(two.run(lambda: network(X).detach()))[0])


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def masked(network: Any) -> None:
    prune.l1_unstructured(network[0], "weight", 0.5)


def doubled(network: Any) -> None:
    parametrize.register_parametrization(network[0], "weight", Doubled())


def bare(network: Any) -> None:
    parametrize.remove_parametrizations(network[3], "weight")


@pytest.mark.parametrize("trained", [False, True], ids=["its optimizer comes later", "its optimizer is there"])
@pytest.mark.parametrize("change", [masked, doubled, bare])
def test_a_parameter_that_a_call_gives_another_place_stays_the_one_that_its_optimizer_has(two, change, trained):
    def changed(on_replicas: bool) -> tuple[list[Any], list[int]]:
        torch.manual_seed(0)
        with two.scope() if on_replicas else contextlib.nullcontext():
            network = nn.Sequential(*sequential(), nn.Linear(2, 5))
            parametrize.register_parametrization(network[3], "weight", Doubled())
            optimizer = torch.optim.Adam(network.parameters(), 0.1)
        run = two.run if on_replicas else lambda function: function()

        def step() -> None:
            optimizer.zero_grad()
            network(X).square().mean().backward()
            optimizer.step()

        run(step if trained else lambda: network(X).shape)
        run(lambda: change(network))
        run(step)
        places = [id(parameter) for parameter in network.parameters()]
        state = optimizer.state_dict()["state"]
        return [network.state_dict(), state], [
            places.index(id(parameter)) for parameter in optimizer.param_groups[0]["params"]
        ]

    torch.testing.assert_close(changed(True), changed(False))


@pytest.mark.parametrize("known", [False, True], ids=["it alone is sent", "then its network, too"])
def test_a_part_that_changed_in_the_replicas_before_they_had_its_network_is_read_with_it(two, known):
    with two.scope():
        network = sequential()
    part = network[0]

    def writes() -> None:
        masked([part])
        with torch.no_grad():
            part.bias.fill_(3.0)

    two.run(writes)
    if known:
        two.run(lambda: network(X).shape)
    found = {name: parameter.tolist() for name, parameter in network.named_parameters()}
    assert found["0.bias"] == [3.0] * 5
    assert "0.weight_orig" in found


def exchange(a: nn.ModuleDict, b: nn.ModuleDict) -> None:
    a["head"], b["head"] = b["head"], a["head"]


def share(a: nn.ModuleDict, b: nn.ModuleDict) -> None:
    a["head"] = b["head"]


def give_a_new_one(a: nn.ModuleDict, b: nn.ModuleDict) -> None:
    a["head"] = b["head"] = nn.Linear(2, 2)


@pytest.mark.parametrize("change", [exchange, share, give_a_new_one])
def test_networks_that_a_call_gives_each_others_parts_have_the_same_here(two, change):
    def made() -> nn.ModuleDict:
        return nn.ModuleDict({"head": nn.Linear(2, 2), "body": nn.Linear(2, 2)})

    with two.scope():
        a, b = made(), made()
    heads = [a["head"], b["head"]]

    def changed() -> tuple[torch.Tensor, ...]:
        change(a, b)
        return tuple(parameter.detach() for net in (a, b) for parameter in net.parameters())

    there = [two.local_results(value)[0] for value in two.run(changed)]
    assert all(map(torch.equal, there, [parameter for net in (a, b) for parameter in net.parameters()]))
    assert (a["head"] is b["head"]) == (change is not exchange)
    if change is not give_a_new_one:
        assert b["head"] is (heads[0] if change is exchange else heads[1])
    if change is exchange:
        assert a["head"] is heads[1]


def test_a_network_that_was_cut_up_costs_the_others_nothing(two):
    network, other = used(two, sequential), used(two, sequential)
    two.run(lambda: network.register_buffer("steps", torch.zeros(1)))
    cut(network)
    assert two.run(lambda: other(X).shape) == (8, 2)
    assert list(network.state_dict()) == ["steps", "0.weight", "0.bias"]


def in_two_places() -> nn.Sequential:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    return nn.Sequential(first, last, last)


def tied() -> nn.Sequential:
    made = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    made[2].weight = made[1].weight  # type: ignore[assignment]
    return made


def once_more(network: Any) -> None:
    network.append(network[0])


def another_place(network: Any) -> None:
    network[2] = network[0]


def another_tie(network: Any) -> None:
    network[2].weight = network[0].weight


def another_name(network: Any) -> None:
    network.last = network[2]
    del network[2]


@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize(
    ("make", "change"),
    [(in_two_places, once_more), (in_two_places, another_place), (tied, another_tie), (tied, another_name)],
    ids=["once more", "another place", "another tie", "another name"],
)
def test_a_part_that_is_in_other_places_is_so_on_both_sides(two, make, change, where):
    network = used(two, make)

    def look() -> tuple[list[Any], list[int]]:
        parts = [(name, type(part).__name__) for name, part in network.named_modules(remove_duplicate=False)]
        known: dict[int, int] = {}
        places = network.named_parameters(remove_duplicate=False)
        return parts, [known.setdefault(id(tensor), len(known)) for _, tensor in places]

    if where == "here":
        change(network)
    else:
        two.run(lambda: change(network))
        network.state_dict()
    assert two.local_results(two.run(look))[0] == look()
    assert torch.equal(network(X), two.local_results(two.run(lambda: network(X).detach()))[0])


def test_a_network_of_buffers_alone_is_converted_on_both_sides(two):
    network = used(two, lambda: nn.BatchNorm1d(4, affine=False))
    network.double()
    assert two.run(lambda: str(network.running_mean.dtype)) == "torch.float64"
    two.run(lambda: network.half() and None)
    assert network.running_mean.dtype is torch.float16


def test_graft_keeps_parts_tensors_and_what_is_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2)
            self.two = nn.Linear(2, 2)
            self.two.weight = self.one.weight

    old, new = Tied(), Tied()
    new.three = nn.Tanh()
    del new.two.bias
    one, weight = old.one, old.one.weight
    known = {id(new): old, id(new.one): old.one, id(new.two): old.two}
    became = graft([new], lambda part: known.get(id(part)))
    assert became[id(new)] is old
    assert old.one is one
    assert old.one.weight is weight
    assert old.two.weight is weight
    assert torch.equal(weight, new.one.weight)
    assert old.three is new.three
    assert [name for name, _ in old.named_parameters()] == ["one.weight", "one.bias"]
    assert F.linear(torch.ones(1, 2), old.two.weight).shape == (1, 2)
