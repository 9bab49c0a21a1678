"""Data on which every replica trains as a whole, since nobody gave each its share: told once, and no other."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from driving import run_cell
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import mirror_nb as mnb
from mirror_nb.pool.local import LocalPool
from mirror_nb.replica.undivided import _DEPTH, _print_of

MADE = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset
torch.manual_seed(0)
x, y = torch.randn(32, 4), torch.randn(32, 1)
data = TensorDataset(x, y)
loader = DataLoader(data, batch_size=8, shuffle=True)
others = DataLoader(data, batch_size=8)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train(batches):
    for a, b in batches:
        optimizer.zero_grad()
        F.mse_loss(model(a), b).backward()
        optimizer.step()
class Files(torch.utils.data.Dataset):
    def __init__(self, files):
        self.files = files
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        return x[i], y[i]
class Stream(IterableDataset):
    def __iter__(self):
        return iter(data)
"""
WHOLE = {
    "a loop": ("train(loader)", ["loader"]),
    "two epochs and a test": ("for _ in range(2):\n    train(loader)\n    for a, _ in others: model(a)", ["loader"]),
    "one without a name": ("train(DataLoader(data, batch_size=8))", [""]),
    "enumerate, and a break": ("for i, batch in enumerate(loader):\n    train([batch])\n    if i: break", ["loader"]),
    "an iterator by hand": ("batches = iter(loader)\ntrain([next(batches)])", ["loader"]),
    "with workers": ("train(DataLoader(data, batch_size=8, num_workers=1))", [""]),
    "two": ("train(loader)\ntrain(others)", ["loader", "others"]),
}
DIVIDED = {
    "what the strategy divides": "train(strategy.distribute_dataset(loader))",
    "what is not trained on": "for a, _ in loader: model(a)",
    "what was gone through before": "for a, _ in loader: model(a)\ntrain([(x, y)])",
    "a first batch of it": "a, b = next(iter(loader))\ntrain([(a, b)])",
    "with the strategy's batches inside": "for _ in others:\n    train(strategy.distribute_dataset(loader))",
    "a sampler that divides": "train(DataLoader(data, batch_size=8, sampler=DistributedSampler(data)))",
    "tensors of each replica": "train(DataLoader(TensorDataset(x[replica_id::2], y[replica_id::2]), batch_size=8))",
    "a part for each replica": "train(DataLoader(Subset(data, range(replica_id, 32, 2)), batch_size=8))",
    "files of each replica": "train(DataLoader(Files([str(i) for i in range(32)][replica_id::2]), batch_size=8))",
    "a stream": "train(DataLoader(Stream(), batch_size=8))",
    "one replica's": "if replica_id == 0:\n    with strategy.no_sync(): train(loader)",
}


@pytest.fixture
def two(replicas: Callable[[int], LocalPool]) -> LocalPool:
    pool = replicas(2)
    assert run_cell(pool, MADE).errors == {}
    return pool


@pytest.mark.parametrize(("source", "names"), WHOLE.values(), ids=WHOLE)
def test_what_every_replica_trains_on_as_a_whole_is_told(two, source, names):
    ran = run_cell(two, source)
    assert ran.errors == {}
    assert ran.report.undivided_loaders() == names
    assert run_cell(two, "0").report.undivided_loaders() == []


@pytest.mark.parametrize("source", DIVIDED.values(), ids=DIVIDED)
def test_nothing_else_is_told(two, source):
    ran = run_cell(two, source)
    assert ran.errors == {}
    assert ran.report.undivided_loaders() == []


def test_it_stands_below_the_cell_once(shell: InteractiveShell) -> None:
    shell.run_cell("%mirror start --devices cpu:0,cpu:1")
    advice = "every replica trained on all of loader (strategy.distribute_dataset(loader) gives each its share)"
    shown = []
    for source in (MADE + "train(loader)", "train(loader)"):
        with capture_output() as output:
            assert shell.run_cell(f"%%mirrored\n{source}").success
        shown.append(any(advice in str(one.data.get("text/plain", "")) for one in output.outputs))
    assert shown == [True, False]


def test_the_print_of_data_tells_its_parts_apart():
    class Files:
        def __init__(self, files: list[str]) -> None:
            self.files = files

    whole = torch.arange(12.0).reshape(6, 2)
    files = [f"{i}.png" for i in range(9)]
    made = [TensorDataset(whole[i::2]) for i in range(2)] + [
        Subset(TensorDataset(whole), range(i, 6, 2)) for i in range(2)
    ]
    made += [Files(files[i::3]) for i in range(3)]
    made += [Files({"of": np.arange(6)[i::2], "deep": [[[[[i]]]]]}) for i in range(2)]
    prints = [repr(_print_of(one, _DEPTH)) for one in made]
    assert len(set(prints)) == len(prints)
    again = [repr(_print_of(TensorDataset(whole.clone()[::2]), _DEPTH)), repr(_print_of(Files(files[::3]), _DEPTH))]
    assert again == [prints[0], prints[4]]
    odd = [torch.tensor(1), torch.zeros(0, 3), np.array(None), {1: {2}}, range(0), None, torch.ones(3, device="meta")]
    assert all(repr(_print_of(one, _DEPTH)) for one in odd)


class Refusing(list[int]):
    def __getitem__(self, i: Any) -> Any:
        raise LookupError


def test_what_raises_when_it_is_looked_at_has_a_print_all_the_same():
    held = {"gone": weakref.proxy(Refusing()), "refuses": Refusing([1])}
    assert _print_of(held, _DEPTH) == [("gone", weakref.ProxyType.__name__), ("refuses", "Refusing")]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.nested.nested_tensor([x, x[:2]]),
        lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
        lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8),
        lambda x: torch.complex(x, -x).conj(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.to(torch.float8_e4m3fn),
    ],
    ids=["sparse", "rows", "nested", "ragged", "quantized", "complex", "short", "shorter"],
)
def test_the_print_of_data_in_any_layout_tells_its_parts_apart(make):
    whole = torch.arange(12.0).reshape(6, 2)
    with warnings.catch_warnings(action="ignore"):
        parts = [make(whole[i::2]) for i in (0, 1, 0)]
    with warnings.catch_warnings(action="error"):
        prints = [repr(_print_of(part, _DEPTH)) for part in parts]
    assert prints[0] == prints[2] != prints[1]


# ---------------------------------------------------------------------- in strategy.run

INPUTS, TARGETS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 1)


@pytest.fixture
def step(forkserver: None) -> Iterator[Callable[..., Any]]:
    """Train a network on two replicas, with what is given, by a function that is known as `step`."""
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(
            batches: Any,
            part: Callable[[Any], Any] = lambda tensor: tensor,
            told: Callable[[torch.Tensor], Any] = torch.Tensor.detach,
        ) -> Any:
            for a, b in batches:
                loss = nn.functional.mse_loss(model(part(a)), part(b))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return told(loss)

        step.__qualname__ = "step"
        yield lambda *args: strategy.run(step, args=args)


def test_a_whole_batch_that_all_replicas_train_on_is_told_once(step):
    with pytest.warns(UserWarning, match="the same examples") as caught:
        step([(INPUTS, TARGETS)])
    with warnings.catch_warnings(action="error"):
        step([(INPUTS, TARGETS)])
    (warning,) = caught
    assert str(warning.message) == (
        "step trained both replicas on the same examples: as much work for each as on one device. To divide them, go "
        "through strategy.distribute_dataset(loader) and give its batches to `run`"
    )
    assert warning.filename == __file__


def test_a_loader_that_a_function_goes_through_as_a_whole_is_told(step):
    with pytest.warns(UserWarning, match="step trained both replicas on the same examples"):
        step(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4))


def test_a_whole_batch_is_told_of_where_the_loss_comes_as_a_number(step):
    with pytest.warns(UserWarning, match="step trained both replicas on the same examples"):
        step([(INPUTS, TARGETS)], lambda tensor: tensor, float)


def of_this_replica(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[mnb.get_replica_context().replica_id_in_sync_group :: 2]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "given",
    [
        ([(mnb.PerReplica([INPUTS[:4], INPUTS[4:]]), mnb.PerReplica([TARGETS[:4], TARGETS[4:]]))],),
        # Each takes its part of what all are given, as its loss shows.
        ([(INPUTS, TARGETS)], of_this_replica),
        ([(INPUTS[:1], TARGETS[:1])],),
        # Nobody can tell.
        ([(INPUTS, TARGETS)], of_this_replica, lambda loss: None),
    ],
    ids=["shares", "parts by hand", "one example", "no loss"],
)
def test_what_may_be_divided_is_not_told(step, given):
    step(*given)


@pytest.mark.filterwarnings("error")
def test_what_is_not_trained_on_is_not_told(forkserver):
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.Linear(4, 1)
        assert len(strategy.run(lambda x: model(x).mean().detach(), args=(INPUTS,)).values) == 2
