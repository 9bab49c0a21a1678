"""A share without examples: its views, what it adds to totals, and where torch function modes stand meanwhile."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driving import run_cell
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import mirror_nb as mnb
from mirror_nb.tensors import no_examples
from mirror_nb.tensors.no_examples import NoExamples


@pytest.fixture
def share() -> Iterator[NoExamples]:
    share = NoExamples()
    share.follow(True)
    yield share
    share.follow(False)
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
def test_a_dimension_is_what_it_is_where_there_are_examples(share, view, shape):
    assert view(torch.zeros(0, 4, 6, 6)).shape == shape
    assert view(torch.zeros(3, 4, 6, 6)).shape[1:] == shape[1:]


def test_what_stands_for_nothing_whole_is_torchs_to_refuse_and_so_is_all_after_the_share(share):
    with pytest.raises(RuntimeError, match="ambiguous"):
        torch.zeros(0, 5).view(0, 2, -1)
    share.follow(False)
    with pytest.raises(RuntimeError, match="ambiguous"):
        torch.zeros(0, 4).view(0, -1)


def test_where_torch_has_no_stack_of_modes_such_views_are_its_own_to_refuse(monkeypatch):
    monkeypatch.setattr(no_examples, "_push", None)
    share = NoExamples()
    share.follow(True)
    assert depth() == 0
    with pytest.raises(RuntimeError, match="ambiguous"):
        torch.zeros(0, 4).view(0, -1)


def test_a_mode_of_the_users_ends_as_it_would(share):
    users = Users()
    with users:
        share.follow(False)
        share.follow(True)
        assert torch.zeros(0, 2, 2).view(0, -1).shape == (0, 4)
    assert depth() == 1
    assert torch.zeros(0, 2, 2).view(0, -1).shape == (0, 4)
    with torch.device("meta"):
        share.follow(False)
        share.follow(True)
        assert torch.zeros(1).is_meta
    assert not torch.zeros(1).is_meta
    assert depth() == 1


def test_a_default_device_may_be_set_and_unset_meanwhile(share):
    try:
        torch.set_default_device("meta")
        share.follow(False)
        share.follow(True)
        assert torch.zeros(1).is_meta
    finally:
        torch.set_default_device(None)
    assert not torch.zeros(1).is_meta
    assert depth() == 1


def test_a_compiled_function_takes_such_a_share(share):
    def flat(x: Tensor) -> Tensor:
        return (x * 0.5).view(x.size(0), -1).sum(1) + 0 * x.mean() + 0 * x.max()

    compiled = torch.compile(flat, backend="eager", fullgraph=True)
    assert compiled(torch.ones(0, 2, 3)).shape == (0,)
    share.follow(False)
    assert compiled(torch.ones(2, 2, 3)).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("reduce", "shapes"),
    [
        (Tensor.max, [()]),
        (lambda x: torch.amin(x, (0, 1)), [()]),
        (lambda x: x.amax(0, keepdim=True), [(1, 4)]),
        (lambda x: x.min(dim=0), [(4,), (4,)]),
        (lambda x: x.max(1), [(0,), (0,)]),
        (lambda x: (x @ x.T).min(1), [(0,), (0,)]),
        (lambda x: x.aminmax(), [(), ()]),
        (lambda x: x.median(0), [(4,), (4,)]),
        (lambda x: torch.quantile(x, 0.5), [()]),
        (lambda x: torch.quantile(x, 0.5, dim=1), [(0,)]),
    ],
)
def test_what_is_largest_of_no_numbers_is_no_number_and_leads_back_to_what_has_made_them(share, reduce, shapes):
    linear = nn.Linear(3, 4)
    found = reduce(linear(torch.zeros(0, 3)))
    parts = [found] if isinstance(found, Tensor) else list(found)
    assert [tuple(part.shape) for part in parts] == shapes
    assert parts[0].isnan().all()
    parts[0].sum().backward()
    assert linear.weight.grad.abs().sum() == 0
    full = reduce(torch.randn(2, 4))
    assert type(full) is type(found)
    assert not (full if isinstance(full, Tensor) else full[0]).isnan().any()


@pytest.mark.parametrize("reduce", [lambda y: y.max(), lambda y: y.float().argmax(), lambda y: y.min(0)])
def test_no_integer_says_that_there_is_none_and_an_elementwise_maximum_is_no_reduction(share, reduce):
    with pytest.raises((RuntimeError, IndexError), match="Expected reduction dim"):
        reduce(torch.zeros(0, dtype=torch.int64))
    assert torch.max(torch.zeros(0, 4), torch.zeros(4)).shape == (0, 4)
    assert torch.zeros(0, 0).argmax(1).shape == (0,)


def test_what_is_largest_in_no_rows_is_written_where_it_is_to_be_and_takes_no_memory_for_them(share):
    out = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    torch.max(torch.zeros(0, 4), 1, out=out)
    assert [part.shape for part in out] == [(0,), (0,)]
    # Of one example these would be 4 TB.
    assert torch.zeros(0, 10**6, 10**6).argmax(-1).shape == (0, 10**6)


@pytest.mark.parametrize(
    "layer",
    [
        nn.InstanceNorm2d(4, affine=True),
        nn.PixelShuffle(2),
        nn.PixelUnshuffle(2),
        torch.fft.rfft2,
        lambda x: torch.fft.irfft(torch.fft.fft(x)),
        lambda x: torch.fft.fftn(input=x, dim=(-2, -1)),
        lambda x: torch.stft(x.flatten(1), 16, window=torch.ones(16), return_complex=True),
        lambda x: nn.functional.pdist(x.flatten(1)),
    ],
)
def test_layers_that_torch_gives_no_backward_pass_or_refuses_take_it(share, layer):
    x = torch.ones(0, 4, 4, 6, requires_grad=True)
    y = layer(x * 2)
    whole = layer(torch.ones(3, 4, 4, 6))
    assert (y.dtype, y.shape) == (whole.dtype, (0, *whole.shape[1:]))
    (y.abs() if y.is_complex() else y).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.MultiheadAttention])
def test_attention_takes_sentences_of_which_there_are_none_and_their_padding(share, layer, batch_first):
    attention = layer(6, 2, dropout=0.0, batch_first=batch_first)
    x = torch.ones((0, 4, 6) if batch_first else (4, 0, 6), requires_grad=True)
    padding = torch.zeros(0, 4, dtype=torch.bool)
    if layer is nn.MultiheadAttention:
        y, weights = attention(x, x, x, key_padding_mask=padding, need_weights=False)
        assert weights is None
    else:
        y = attention(x, src_key_padding_mask=padding)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_what_such_a_layer_would_not_give_for_each_example_is_torchs_to_refuse(share):
    with pytest.raises(IndexError):
        torch.ones(0, 2)[0]
    with pytest.raises(RuntimeError):
        torch.cat([torch.ones(0, 2), torch.ones(2, 3)])
    with pytest.raises(RuntimeError, match="on device meta"):
        # By their shapes alone they would be one, with the two rows that there are.
        torch.cat([torch.ones(0, 2), torch.ones(2, 2, device="meta")])
    with pytest.raises(RuntimeError, match="to be nested"):
        torch.cat([torch.ones(0, 2), torch.nested.nested_tensor([torch.ones(2)])])
    assert torch.fft.fft(torch.ones(2)).tolist() == [2, 0]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_recurrent_networks_take_packed_sequences_of_which_there_are_none(share, batch_first, enforce_sorted):
    network = nn.LSTM(4, 3, num_layers=2, batch_first=batch_first)
    padded = torch.zeros((0, 5, 4) if batch_first else (5, 0, 4))
    lengths = torch.zeros(0, dtype=torch.int64)
    packed = rnn.pack_padded_sequence(padded, lengths, batch_first, enforce_sorted)
    made, (hidden, _) = network(packed)
    unpacked, found = rnn.pad_packed_sequence(made, batch_first, total_length=5)
    assert unpacked.shape == (*padded.shape[:2], 3)
    assert (tuple(hidden.shape), found.tolist()) == ((2, 0, 3), [])
    (hidden[-1].sum() + unpacked.sum()).backward()
    assert all(parameter.grad.abs().sum() == 0 for parameter in network.parameters())


@pytest.mark.parametrize(("reduction", "loss"), [("none", []), ("sum", 0.0), ("mean", math.nan)])
def test_the_ctc_loss_of_none_is_as_any_loss(share, reduction, loss):
    scores = torch.zeros(5, 0, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    found = nn.CTCLoss(reduction=reduction)(scores.log_softmax(-1), torch.zeros(0, 2), none, none)
    assert found.tolist() == pytest.approx(loss, nan_ok=True)
    assert found.requires_grad


@pytest.mark.parametrize("counted", [lambda loss, n: loss.item() * n, lambda loss, n: n * loss, torch.mul])
def test_a_mean_of_no_examples_adds_nothing_to_a_total_that_is_weighed_by_them(share, counted):
    none = torch.zeros(0)
    loss = none.mean()
    assert 2.5 + float(counted(loss, len(none))) == 2.5
    assert math.isnan(counted(loss, 1))
    share.follow(False)
    assert math.isnan(counted(none.mean(), 0))


def test_what_item_gives_of_it_is_a_number_like_any_other(share):
    number = torch.zeros(0).mean().item()
    assert math.isnan(number)
    assert f"{number:.2f} {number}" == "nan nan"
    assert type(pickle.loads(pickle.dumps([number]))[0]) is float
    assert 0.0 * number == 0
    assert math.isnan(number * 2)
    assert (torch.ones(2) * number).isnan().all()
    assert torch.ones(2).mean().item() == 1
    assert type(torch.zeros(0).sum().item()) is float


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward])
def test_layers_that_are_computed_once_more_in_the_backward_pass_take_it_then_too(share, reentrant, backward):
    linear, inner = nn.Linear(4, 6), []

    def layer(x: Tensor) -> Tensor:
        inner.append(depth())
        return linear(x).view(x.size(0), -1, 2).sum(1)

    x = torch.zeros(0, 4, requires_grad=True)
    backward(checkpoint(layer, x, use_reentrant=reentrant).sum())
    assert linear.weight.grad.abs().sum() == 0
    assert (inner, depth()) == ([1, 1], 1)


@pytest.mark.parametrize("on", [True, False])
def test_what_a_backward_pass_takes_back_is_so_again_from_the_next_batch_on(share, on):
    # Computed once more, the layer is called with another batch that is held, of which there are examples or none.
    share.follow(not on)
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: share.follow(on))
    x.sum().backward()
    share.follow(on)
    assert depth() == on


def test_where_torch_has_no_such_engine_a_backward_pass_is_torchs_alone(share, monkeypatch):
    monkeypatch.setattr(no_examples, "_ENGINE", "_gone")
    linear = nn.Linear(4, 6)
    (found,) = torch.autograd.grad(linear(torch.zeros(0, 4)).sum(), [linear.weight])
    assert found.abs().sum() == 0


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

deep, total, seen = [], 0.0, 0
for x in strategy.distribute_dataset(data, batch_size=4):
    loss = net(x).pow(2).mean()
    loss.backward()
    total += loss.item() * x.size(0)
    seen += len(x)
    strategy.run(step, args=(x,))
    deep.append(torch._C._len_torch_function_stack())
(
    net.state_dict(), [p.grad for p in net.parameters()], [p.grad for p in twin.parameters()],
    deep, torch._C._len_torch_function_stack(), strategy.reduce("sum", total) / strategy.reduce("sum", seen),
)
"""


def test_a_loop_takes_a_last_batch_of_fewer_examples_than_replicas(replicas):
    data = torch.randn(5, 1, 4, 4)
    ran = run_cell(replicas(3), CELL, {"data": data})
    assert not ran.errors, ran.report.failures
    state, gradients, of_twin, deep, after, mean = ran.results[2]
    # Four examples are two for two replicas; one is replica 0's.
    assert (deep, after) == ([1, 1], 0)
    net = nn.ModuleDict({"convolution": nn.Conv2d(1, 2, 3), "linear": nn.Linear(8, 1)})
    net.load_state_dict(state)
    total = 0.0
    for x in (data[:4], data[4:]):
        loss = net["linear"](net["convolution"](x).flatten(1)).pow(2).mean()
        loss.backward()
        total += loss.item() * len(x)
    assert mean.item() == pytest.approx(total / 5)
    expected = [parameter.grad for parameter in net.parameters()]
    for found in (gradients, of_twin):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("line", ["x.argmax()", "strategy.run(lambda: x.argmax())"])
def test_what_torch_refuses_is_told_by_the_users_lines(replicas, line):
    source = f"for x in strategy.distribute_dataset(data, batch_size=2):\n    {line}"
    ran = run_cell(replicas(2), source, {"data": torch.ones(3)})
    shown = re.sub("\x1b\\[[0-9;]*m", "", "\n".join(ran.report.failures[1].traceback))
    assert "x.argmax()" in shown
    assert "no_examples" not in shown


def test_from_plain_python_a_function_takes_it_too():
    def flat(x: Tensor) -> tuple[int, ...]:
        return tuple(x.view(len(x), -1).shape)

    with mnb.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        batches = strategy.distribute_dataset(torch.zeros(5, 2, 3), batch_size=4)
        shapes = [strategy.local_results(strategy.run(flat, (x,))) for x in batches]
    assert shapes == [((2, 6), (2, 6), (0, 6)), ((1, 6), (0, 6), (0, 6))]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_words_that_are_in_no_bag_have_no_gradients(share, sparse, weighted):
    bags = nn.EmbeddingBag(5, 2, mode="sum" if weighted else "mean", sparse=sparse)
    words, offsets = torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.long)
    found = bags(words, offsets, per_sample_weights=torch.ones(3) if weighted else None)
    assert found.shape == (0, 2)
    found.sum().backward()
    assert not bags.weight.grad.to_dense().any()
