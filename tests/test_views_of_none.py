"""`x.view(len(x), -1)` of a share without examples, and whose torch function modes stand where meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driving import run_cell
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import mirror_nb as mnb
from mirror_nb.tensors.views_of_none import ViewsOfNone


@pytest.fixture
def views() -> Iterator[ViewsOfNone]:
    views = ViewsOfNone()
    views.follow(True)
    yield views
    views.follow(False)
    assert depth() == 0


def depth() -> int:
    return torch._C._len_torch_function_stack()


class Users(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (lambda x: x.view(x.size(0), -1), (0, 144)),
        (lambda x: x.view([len(x), -1]), (0, 144)),
        (lambda x: x.reshape((*x.shape[:1], -1)), (0, 144)),
        (lambda x: torch.reshape(x, (len(x), 2, -1)), (0, 2, 72)),
        (lambda x: x.transpose(1, 3).reshape(len(x), 6, 6, 2, -1), (0, 6, 6, 2, 2)),
        (lambda x: x.view(-1, 6), (0, 6)),
        (lambda x: x.view(torch.int32), (0, 4, 6, 6)),
        (lambda x: torch.distributions.Categorical(logits=x).entropy(), (0, 4, 6)),
    ],
)
def test_a_dimension_is_what_it_is_where_there_are_examples(views, view, shape):
    assert view(torch.zeros(0, 4, 6, 6)).shape == shape
    assert view(torch.zeros(3, 4, 6, 6)).shape[1:] == shape[1:]


def test_what_stands_for_nothing_whole_is_torchs_to_refuse_and_so_is_all_after_the_share(views):
    with pytest.raises(RuntimeError, match="ambiguous"):
        torch.zeros(0, 5).view(0, 2, -1)
    views.follow(False)
    with pytest.raises(RuntimeError, match="ambiguous"):
        torch.zeros(0, 4).view(0, -1)


def test_a_mode_of_the_users_ends_as_it_would(views):
    users = Users()
    with users:
        views.follow(False)
        views.follow(True)
        assert torch.zeros(0, 2, 2).view(0, -1).shape == (0, 4)
    assert depth() == 1
    assert torch.zeros(0, 2, 2).view(0, -1).shape == (0, 4)
    with torch.device("meta"):
        views.follow(False)
        views.follow(True)
        assert torch.zeros(1).is_meta
    assert not torch.zeros(1).is_meta
    assert depth() == 1


def test_a_default_device_may_be_set_and_unset_meanwhile(views):
    try:
        torch.set_default_device("meta")
        views.follow(False)
        views.follow(True)
        assert torch.zeros(1).is_meta
    finally:
        torch.set_default_device(None)
    assert not torch.zeros(1).is_meta
    assert depth() == 1


def test_a_compiled_function_takes_such_a_share(views):
    compiled = torch.compile(lambda x: x.relu().view(x.size(0), -1).sum(1), backend="eager")
    assert compiled(torch.ones(0, 2, 3)).shape == (0,)
    views.follow(False)
    assert compiled(torch.ones(2, 2, 3)).tolist() == [6, 6]


CELL = """
import torch, mirror_nb as mnb
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(1, 2, 3), nn.Linear(8, 1)

    def forward(self, x):
        x = self.convolution(x)
        return self.linear(x.view(x.size(0), -1))

torch.manual_seed(0)
with strategy.scope():
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())

def step(x):
    twin(x).pow(2).mean().backward()

deep = []
for x in strategy.distribute_dataset(data, batch_size=4):
    net(x).pow(2).mean().backward()
    strategy.run(step, args=(x,))
    deep.append(torch._C._len_torch_function_stack())
(
    net.state_dict(), [p.grad for p in net.parameters()], [p.grad for p in twin.parameters()],
    deep, torch._C._len_torch_function_stack(),
)
"""


def test_a_loop_takes_a_last_batch_of_fewer_examples_than_replicas(replicas):
    data = torch.randn(5, 1, 4, 4)
    ran = run_cell(replicas(3), CELL, {"data": data})
    assert not ran.errors, ran.report.failures
    state, gradients, of_twin, deep, after = ran.results[2]
    # Four examples are two for two replicas; one is replica 0's.
    assert (deep, after) == ([1, 1], 0)
    net = nn.ModuleDict({"convolution": nn.Conv2d(1, 2, 3), "linear": nn.Linear(8, 1)})
    net.load_state_dict(state)
    for x in (data[:4], data[4:]):
        net["linear"](net["convolution"](x).flatten(1)).pow(2).mean().backward()
    expected = [parameter.grad for parameter in net.parameters()]
    for found in (gradients, of_twin):
        torch.testing.assert_close(found, expected)


def test_from_plain_python_a_function_takes_it_too():
    def flat(x: Tensor) -> tuple[int, ...]:
        return tuple(x.view(len(x), -1).shape)

    with mnb.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        batches = strategy.distribute_dataset(torch.zeros(5, 2, 3), batch_size=4)
        shapes = [strategy.local_results(strategy.run(flat, (x,))) for x in batches]
    assert shapes == [((2, 6), (2, 6), (0, 6)), ((1, 6), (0, 6), (0, 6))]
