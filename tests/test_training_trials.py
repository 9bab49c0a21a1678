"""What fit says of its own speed: measured, once, and without a trace in what is trained."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from driving import run_cell
from torch import nn

import mirror_nb as mnb
from mirror_nb.fused import step_times
from mirror_nb.pool.local import LocalPool
from mirror_nb.training import driver, trials

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
FIT = """
import torch
from torch import nn
import mirror_nb as mnb
from mirror_nb.training import driver, trials

before = driver.ADVISE_STEPS, driver.ADVISE_SECONDS, trials._alone
driver.ADVISE_STEPS, driver.ADVISE_SECONDS = least, 0.0
tried = []

def alone(training):
    # As it is, with numbers that do not depend on the machine.
    tried.append(before[2](training))
    return 0.0001

trials._alone = alone
try:
    torch.manual_seed(3)
    strategy = mnb.MirroredStrategy(communication_options=mnb.CommunicationOptions(bytes_per_pack=bytes_per_pack))
    # Statistics and random numbers, which a trial must leave alone.
    network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))
    model = mnb.Model(network)
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    logs = [dict(model.fit(X, Y, epochs=2, batch_size=16, verbose=2).history) for _ in range(2)]
    weights = {name: value.clone() for name, value in network.state_dict().items()}
finally:
    driver.ADVISE_STEPS, driver.ADVISE_SECONDS, trials._alone = before
    mnb.MirroredStrategy(communication_options=mnb.CommunicationOptions())
"""


@pytest.mark.parametrize("bytes_per_pack", [2**20, 64], ids=["usual buckets", "small buckets"])
def test_fit_says_once_what_was_measured_and_trains_as_without(replicas: Callable[[int], LocalPool], bytes_per_pack):
    pool = replicas(2)
    given = {"X": X, "Y": Y, "bytes_per_pack": bytes_per_pack}
    tried, plain = (run_cell(pool, FIT, {**given, "least": least}, timeout=60) for least in (0, 10**9))
    for ran in (tried, plain):
        assert ran.report.clean, {r: (f.type_name, f.message) for r, f in ran.report.failures.items()}
    assert [len(values["tried"]) for values in tried.values.values()] == [1, 0]
    assert tried.text[0].count("2 replicas are slower than one process with") == 1
    assert "replicas are slower" not in plain.text[0] + tried.text[1]
    for mine, other in zip(tried.values.values(), plain.values.values(), strict=True):
        assert mine["logs"] == other["logs"]
        for name, value in other["weights"].items():
            assert torch.equal(mine["weights"][name], value), name


def test_an_optimizer_that_is_faster_when_fused_is_named(monkeypatch, capsys):
    monkeypatch.setattr(driver, "ADVISE_STEPS", 0)
    monkeypatch.setattr(driver, "ADVISE_SECONDS", 0.0)
    measured = []

    def faster(optimizer):
        measured.append(times := real(optimizer))
        return (1000.0, times[1] / times[1])

    real = trials.step_times
    monkeypatch.setattr(trials, "step_times", faster)
    with mnb.OneDeviceStrategy("cpu:0").scope():
        model = mnb.Model(nn.Linear(6, 1))
        model.compile(optimizer=torch.optim.AdamW(model.parameters(), weight_decay=0.1), loss="mse")
    for _ in range(2):
        model.fit(X, Y, epochs=2, batch_size=16, verbose=2)
    said = capsys.readouterr().out
    assert said.count("optimizer.step() takes 1.0 s of a step's") == 1
    assert "and 1.0 ms when it is fused: torch.optim.AdamW(..., fused=True)" in said
    assert len(measured) == 1
    assert min(measured[0]) > 0


def test_what_cannot_be_fused_is_not_tried():
    parameters = list(nn.Linear(6, 1).parameters())
    assert step_times(torch.optim.Adam(parameters, fused=True)) is None
    assert step_times(torch.optim.RMSprop(parameters)) is None
    assert step_times(None) is None
    adam = torch.optim.Adam(parameters)
    assert step_times(adam, largest=6) is None
    assert step_times(adam, largest=7) is not None


class OnGpu(torch.nn.Parameter):
    """A parameter that says it is on a GPU, though its memory is the CPU's."""

    is_cuda = True  # type: ignore[assignment]


def test_a_step_on_a_gpu_has_taken_as_long_as_that_takes_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: time.sleep(0.005))
    times = step_times(torch.optim.SGD([OnGpu(torch.ones(2))], 0.1))
    assert times is not None
    assert min(times) > 5


def test_nothing_is_tried_in_a_short_training_or_where_nobody_looks(monkeypatch):
    monkeypatch.setattr(trials, "advise", lambda place, training: pytest.fail("tried"))
    with mnb.OneDeviceStrategy("cpu:0").scope():
        model = mnb.Model(nn.Linear(6, 1))
        model.compile(optimizer="sgd", loss="mse")
    model.fit(X, Y, epochs=2, batch_size=16, verbose=2)
    monkeypatch.setattr(driver, "ADVISE_STEPS", 0)
    monkeypatch.setattr(driver, "ADVISE_SECONDS", 0.0)
    model.fit(X, Y, epochs=2, batch_size=16, verbose=0)
