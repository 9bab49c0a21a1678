"""Which of several batches that are held a network is called with."""

from __future__ import annotations

import dataclasses
import gc
import inspect
from collections import UserDict
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from mirror_nb.data.weighing import Weighing
from mirror_nb.replica.runtime import _on_device
from mirror_nb.values import Shares

FULL, LAST = (2, 4), (1, 3)
# Of two replicas: a batch that is cut evenly, and one that is not.


@pytest.fixture
def used() -> list[Shares]:
    return []


@pytest.fixture
def weighing(used: list[Shares]) -> Weighing:
    return Weighing(2, used.append)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("look", [lambda x: x, lambda x: x.view(-1, 1), lambda x: x[1:], lambda x: x.detach()])
def test_a_network_is_called_with_a_batch_or_part_of_one(weighing, used, look, width):
    data = torch.randn(4, width)[:, :1]
    first, last = data[:2], data[2:]
    weighing.handed_out({"x": first}, FULL)
    weighing.handed_out({"x": last}, LAST)
    nn.Linear(1, 1)(look(first))
    # In the same memory.
    nn.Linear(1, 1)(look(last))
    nn.Linear(1, 1)(torch.ones(1))
    assert used == [FULL, LAST, FULL, LAST]
    assert weighing.called_with([3, "name", last]) == LAST
    assert weighing.called_with([torch.ones(1)]) is None


def test_sparse_batches_are_known_by_themselves(weighing, used):
    first, last = torch.eye(2).to_sparse(), torch.eye(3).to_sparse()
    weighing.handed_out([first, "names"], FULL)
    weighing.handed_out([last, "names"], LAST)
    nn.Identity()(first)
    nn.Identity()(torch.eye(2).to_sparse())
    assert used == [FULL, LAST, FULL]


def test_a_part_of_a_ragged_batch_is_known(weighing, used):
    first, last = (torch.nested.nested_tensor([torch.ones(2, 1)] * n, layout=torch.strided) for n in (2, 1))
    weighing.handed_out(first, FULL)
    weighing.handed_out(last, LAST)
    nn.Identity()(first.unbind()[1])
    assert used == [FULL, LAST, FULL]


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor = dataclasses.field(init=False)
    # Not there yet.


@pytest.mark.parametrize(
    ("make", "look"),
    [
        (lambda x: UserDict(x=[x]), lambda batch: batch["x"][0]),
        (Batch, lambda batch: batch.x),
        (lambda x: {"x": pack_sequence(list(x))}, lambda batch: batch["x"]),
    ],
    ids=["mapping", "dataclass", "packed sequence"],
)
def test_batches_that_torchs_pytrees_do_not_open_are_known(weighing, used, make, look):
    first, last = make(torch.ones(2, 1)), make(torch.ones(1, 1))
    weighing.handed_out(first, FULL)
    weighing.handed_out(last, LAST)
    nn.Identity()(look(first))
    assert used == [FULL, LAST, FULL]
    assert weighing.called_with(([first, last], {})) == FULL


def test_a_batch_of_no_examples_is_known_too(weighing, used):
    # In one memory.
    full, empty = torch.ones(2, 1).split([2, 0])
    weighing.handed_out(empty, (0, 1))
    weighing.handed_out(full, FULL)
    nn.Identity()(full[1:])
    nn.Identity()(empty * 2)
    nn.Identity()(full[1:1] * 2)
    assert used[2:] == [FULL, (0, 1), (0, 1)]


class Routing(nn.Module):
    """A network that calls one expert with some of the examples, and one with none."""

    def __init__(self, none: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.experts, self.none = nn.ModuleList([nn.Identity(), nn.Identity()]), none

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.experts[0](x * 2), self.experts[1](self.none(x))])


@pytest.mark.parametrize("none", [lambda x: x[x < 0][:, None], lambda x: torch.empty(0, 1)], ids=["routed", "made"])
@pytest.mark.parametrize("held", [torch.ones(2, 1)[:0], torch.ones(0, 1)], ids=["cut", "made"])
def test_what_a_network_makes_without_elements_is_no_batch_without_examples(weighing, used, held, none):
    weighing.handed_out(held, (0, 1))
    weighing.handed_out(full := torch.ones(2, 1), FULL)
    Routing(none)(full)
    assert used[2:] == [FULL]


def test_nor_is_it_where_the_networks_forward_is_called_past_its_call(weighing, used):
    weighing.handed_out(held := torch.ones(2, 1)[:0], (0, 1))
    weighing.handed_out(full := torch.ones(2, 1), FULL)
    Routing(lambda x: torch.empty(0, 1)).forward(full)
    assert used[2:] == []
    del held


def test_a_function_of_the_users_own_that_is_named_forward_is_no_networks(weighing, used):
    weighing.handed_out(held := torch.ones(2, 1)[:0], (0, 1))
    weighing.handed_out(full := torch.ones(2, 1), FULL)

    def forward(net: nn.Module) -> None:
        net(held.double())

    forward(nn.Identity())

    def forward() -> None:
        nn.Identity()(held.double())

    forward()
    assert used[2:] == [(0, 1)] * 2
    del full


@pytest.mark.parametrize("reentrant", [False, True])
def test_nor_is_what_a_backward_pass_computes_once_more(weighing, used, reentrant):
    def expert(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(nn.Linear(1, 1), x, use_reentrant=reentrant)

    weighing.handed_out(held := torch.ones(2, 1)[:0], (0, 1))
    weighing.handed_out(full := torch.ones(2, 1), FULL)
    net = Routing(lambda x: x[:0] * torch.ones((), requires_grad=True))
    net.experts[1].forward = expert
    net(full).sum().backward()
    assert used[2:] == [FULL]
    del held


@pytest.mark.parametrize("held", [torch.ones(2, 1)[:0], torch.ones(0, 1)], ids=["cut", "made"])
def test_a_batch_of_no_examples_that_a_network_hands_on_is_known(weighing, used, held):
    weighing.handed_out(held, (0, 1))
    weighing.handed_out(full := torch.ones(2, 1), FULL)
    # Given by name, which nobody looks at.
    net = Routing(lambda x: held.view(0, 1, 1)[:, 0])
    net(x=full)
    assert used[2:] == [(0, 1)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.ones(2, 1, device="meta"),
    ],
    ids=["jagged", "meta"],
)
def test_examples_that_lie_in_no_memory_of_their_own_are_not_taken_for_none(weighing, make):
    held = torch.ones(0, 1), torch.ones(2, 1)
    weighing.handed_out(held[0], (0, 1))
    weighing.handed_out(held[1], FULL)
    assert weighing.called_with(make()) is None
    own = make()
    weighing.handed_out(own, FULL)
    assert weighing.called_with([own]) == FULL


@pytest.mark.parametrize(
    "call",
    [
        lambda net, x: torch.func.vmap(net)(x[None]),
        lambda net, x: torch.export.export(net, (x,)),
        lambda net, x: torch.jit.trace(net, (x,)),
        lambda net, x: net(x.to_sparse()),
    ],
    ids=["vmap", "export", "trace", "sparse"],
)
def test_what_is_mapped_traced_or_sparse_harms_nobody_who_looks(weighing, call):
    held = torch.ones(2, 1), torch.ones(1, 1)
    weighing.handed_out(held[0], FULL)
    weighing.handed_out(held[1], LAST)
    call(nn.Linear(1, 1), held[0])


@pytest.fixture
def watched_by_nobody(monkeypatch):
    """A strategy that another test has left watches networks' calls, and no graph goes through that."""
    gc.collect()
    nn.Identity()(torch.ones(1))
    for name in ("__call__", "__getattr__"):
        monkeypatch.setattr(nn.Module, name, inspect.unwrap(getattr(nn.Module, name)))


def test_who_looks_is_no_part_of_what_is_compiled_and_costs_no_graph_an_epoch(weighing, watched_by_nobody):
    counters = pytest.importorskip("torch._dynamo.utils").counters["stats"]
    net = nn.Linear(1, 1)
    compiled = torch.compile(lambda x: net(x) + 1, backend="eager", fullgraph=True)
    graphs = []
    x = None
    for _ in range(4):
        for size, shares in ((2, FULL), (2, FULL), (1, LAST)):
            following = torch.ones(size, 1)
            # As in a loop, which lets go of a batch once it has got the next one.
            weighing.handed_out(following, shares)
            x = following
            compiled(x)
        graphs.append(counters["unique_graphs"])
    assert graphs[1] == graphs[3]


def test_one_that_is_collected_while_something_is_compiled_is_missed_by_nobody(watched_by_nobody):
    held = [Weighing(2, lambda shares: None), torch.ones(2, 1)]
    held[0].handed_out(held[1], FULL)
    held[0].exhausted()
    held[0].handed_out(torch.ones(1, 1), LAST)
    assert hooks._global_forward_pre_hooks
    net = nn.Linear(1, 1)

    def backend(graph, example_inputs):
        # As the collector does, which may come by at any time.
        held.clear()
        return graph.forward

    torch.compile(net, backend=backend)(torch.ones(2, 1))
    assert not held
    net(torch.ones(2, 1))
    assert not hooks._global_forward_pre_hooks


def test_nobody_looks_where_all_that_is_held_weighs_alike(weighing, watched_by_nobody):
    held = [torch.ones(2, 1) for _ in range(3)]
    for batch in held:
        weighing.handed_out(batch, FULL)
    assert not hooks._global_forward_pre_hooks
    last = torch.ones(1, 1)
    # Again in the next epoch, as it is.
    for _ in range(2):
        weighing.handed_out(last, LAST)
        assert hooks._global_forward_pre_hooks
    del last
    weighing.exhausted()
    assert not hooks._global_forward_pre_hooks
    weighing.handed_out(torch.ones(1, 1), LAST)
    assert hooks._global_forward_pre_hooks
    held.clear()
    del batch
    weighing.exhausted()
    assert not hooks._global_forward_pre_hooks


def test_a_batch_that_is_handed_out_while_garbage_is_collected_is_known(used):
    rubbish, full, last = [torch.ones(2, 1)], torch.ones(2, 1), torch.ones(1, 1)

    class Two(int):
        def __mul__(self, other: int) -> int:
            if other == LAST[0]:
                # As the collector does, which may come by wherever Python calls a function.
                rubbish.clear()
            return int(self) * other

    weighing = Weighing(Two(2), used.append)
    weighing.handed_out(rubbish[0], FULL)
    weighing.handed_out(last, LAST)
    weighing.handed_out(full, FULL)
    nn.Identity()(last)
    assert used[-1] == LAST


def test_a_batch_that_is_brought_to_a_device_is_known_there():
    x, y, other = torch.ones(2, 1), torch.ones(2), torch.ones(3)
    (there, _), kwargs, weighed = _on_device(torch.device("meta"), ([x, y], 1), {"z": other}, [([x, y], FULL)])
    assert [(leaf is moved, shares) for (leaf, shares), moved in zip(weighed, there, strict=True)] == [
        (True, FULL)
    ] * 2
    assert kwargs["z"].is_meta
