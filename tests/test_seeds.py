"""Seeds: the replicas are seeded as the controller was."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mirror_nb as mnb
from mirror_nb.environment import seeds, surroundings
from mirror_nb.transfer.pickler import dumps


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the process as it was seeded."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seeds.watch()
    monkeypatch.setattr(seeds, "followed", {})
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def test_each_seeding_is_told_with_its_seed_and_a_number_of_its_own():
    torch.manual_seed(seed=3)
    random.seed(4)
    np.random.seed(5)
    first = seeds.seeded()
    assert {name: seed for name, (_, seed) in first.items()} == {"torch": 3, "random": 4, "numpy": 5}
    torch.random.manual_seed(3)
    again = seeds.seeded()
    assert again["torch"][0] > first["torch"][0]
    # Nobody could repeat these.
    random.seed("text")
    np.random.seed(None)
    np.random.seed([1, 2])
    assert seeds.seeded() == again


def test_what_torch_makes_a_whole_number_of_is_told_as_that():
    for seed in (7.0, "7", np.float32(7)):
        torch.manual_seed(seed)
        assert seeds.seeded()["torch"][1] == 7


@pytest.mark.parametrize("module", [random, np.random, torch], ids=lambda module: module.__name__)
def test_a_function_that_seeds_is_on_arrival_the_one_that_hears_of_it(module):
    name = "manual_seed" if module is torch else "seed"
    hears = getattr(module, name)
    # As a notebook has it that imported it before mirror_nb: `from random import seed`.
    before = hears.__wrapped__
    for function in (hears, before):
        assert pickle.loads(dumps(function)) in (hears, torch.random.manual_seed)


def test_what_fit_seeds_in_this_process_is_not_told():
    torch.manual_seed(3)
    before = seeds.seeded()
    with mnb.OneDeviceStrategy("cpu:0").scope():
        model = mnb.Model(nn.Linear(2, 1))
        model.compile(optimizer="sgd", loss="mse")
    model.fit(torch.ones(4, 2), torch.ones(4, 1), verbose=0)
    assert seeds.seeded() == before


def test_what_was_told_is_done_once():
    wanted = {"torch": (1, 7), "random": (2, 7), "numpy": (3, 7)}
    seeds.seed_alike(wanted)
    drawn = float(torch.rand(1)), random.random(), np.random.rand()
    seeds.seed_alike(wanted)
    assert drawn != (float(torch.rand(1)), random.random(), np.random.rand())
    seeds.seed_alike({name: (number + 9, 7) for name, (number, _) in wanted.items()})
    assert drawn == (float(torch.rand(1)), random.random(), np.random.rand())


def draw() -> tuple[Any, ...]:
    made = nn.Linear(2, 2).weight.tolist()
    nn.Linear(1, 1)(torch.ones(1, 1))
    return made, float(torch.rand(1)), random.random(), float(np.random.rand())


def drawn(strategy: mnb.MirroredStrategy) -> list[tuple[Any, ...]]:
    surroundings.new_moment()
    results = strategy.run(lambda: list(draw()))
    return [strategy.experimental_local_results(one) for one in results]


def test_a_function_that_was_called_before_finds_the_replicas_seeded_too(two):
    two.run(draw)
    two.run(draw)
    torch.manual_seed(12)
    first = two.run(draw)
    assert two.run(draw)[1].values != first[1].values
    torch.manual_seed(12)
    again = two.run(draw)
    assert (first[0], first[1].values) == (again[0], again[1].values)


def test_the_replicas_are_seeded_as_this_process_was(two):
    torch.manual_seed(11), random.seed(11), np.random.seed(11)
    expected = nn.Linear(2, 2).weight.tolist()
    first = drawn(two)
    assert first[0][0] == expected
    # Each of its own stream, from the seed and its id.
    assert all(one != other for one, other in first[1:])
    assert drawn(two) != first
    torch.manual_seed(11), random.seed(11), np.random.seed(11)
    assert drawn(two) == first


def test_a_replica_that_is_started_anew_goes_on_with_the_others(two):
    torch.manual_seed(12)
    drawn(two)
    with pytest.raises(mnb.ReplicaDied):
        two.run(lambda: os._exit(3) if mnb.get_replica_context().replica_id_in_sync_group else None)
    for _ in range(2):
        made = drawn(two)[0]
        assert len({str(one) for one in made}) == 1


def test_who_gives_the_replicas_a_seed_keeps_it():
    torch.manual_seed(13)
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"], seed=5) as strategy:
        first = drawn(strategy)
    torch.manual_seed(14)
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"], seed=5) as strategy:
        assert drawn(strategy) == first
        torch.manual_seed(14)
        assert drawn(strategy)[0] != first[0]


@pytest.mark.parametrize("imports", ["import torch, mirror_nb as mnb", "import mirror_nb as mnb, torch"])
def test_a_script_seeds_before_it_uses_a_name(imports):
    told = "from mirror_nb.environment import seeds\nprint(seeds.seeded()['torch'][1])"
    source = f"{imports}\ntorch.manual_seed(9)\n{told}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.stdout == "9\n", done.stderr
