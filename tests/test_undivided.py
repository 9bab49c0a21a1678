"""Loaders on which every replica trains as a whole, since nobody gave each its share: told once, and no others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from driving import run_cell
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from torch.utils.data import Subset, TensorDataset

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
    odd = [torch.tensor(1), torch.zeros(0, 3), torch.ones(2, 2).to_sparse(), np.array(None), {1: {2}}, range(0), None]
    assert all(repr(_print_of(one, _DEPTH)) for one in odd)
