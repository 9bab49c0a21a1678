"""LBFGS and ReduceLROnPlateau over replicas: they decide by what one device would see, so that all decide alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from driving import run_cell
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mirror_nb.gradients.synchronizer import GradientSynchronizer
from mirror_nb.replica.decisions import GlobalMetrics

X = torch.linspace(-1, 1, 21, dtype=torch.float64).reshape(7, 3)
STEPS = 3


def fitted(search: str | None) -> torch.Tensor:
    """The weights of plain PyTorch."""
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=10, line_search_fn=search)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(network(X.tanh()), X.sin().sum(1, keepdim=True))
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return network.weight.detach()


CELL = """
import torch, torch.nn.functional as F
torch.manual_seed(0)
network = torch.nn.Linear(3, 1).double()
optimizer = torch.optim.LBFGS(network.parameters(), max_iter=10, line_search_fn={search!r})
for _ in range({steps}):
    for x, y in strategy.distribute_dataset((X.tanh(), X.sin().sum(1, keepdim=True)), batch_size={size}):
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(network(x), y)
            loss.backward()
            return loss
        first = optimizer.step({given})
weights = network.weight.detach()
"""


@pytest.mark.parametrize(
    ("n", "search", "given"),
    [
        (2, None, "closure"),
        (2, "strong_wolfe", "closure=closure"),
        (3, None, "closure=closure"),
        (3, "strong_wolfe", "closure"),
    ],
)
def test_it_finds_what_one_device_finds(replicas, n, search, given):
    pool = replicas(n)
    ran = run_cell(pool, CELL.format(search=search, steps=STEPS, size=7, given=given), {"X": X})
    assert ran.errors == {}, ran.report.failures
    expected = fitted(search)
    losses = []
    for values in ran.values.values():
        torch.testing.assert_close(values["weights"], expected)
        losses.append(float(values["first"]))
    assert len(set(losses)) == 1


def test_a_replica_without_examples_decides_as_the_others_do(replicas):
    # Batches of 4, 2 and 1: of the last, two replicas have none.
    ran = run_cell(replicas(3), CELL.format(search="strong_wolfe", steps=1, size=2, given="closure"), {"X": X})
    assert ran.errors == {}, ran.report.failures
    first, *others = (values["weights"] for values in ran.values.values())
    assert all(torch.equal(first, other) for other in others)
    assert first.isfinite().all()


ALONE = """
import torch
own = torch.nn.Linear(3, 1).double()
optimizer = torch.optim.LBFGS(own.parameters(), max_iter=30, line_search_fn="strong_wolfe")
calls = 0
def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = ((own(X) - X.sum(1, keepdim=True) * replica_id) ** 2).mean() * (1 + 5 * replica_id)
    loss.backward()
    return loss
with strategy.no_sync():
    optimizer.step(closure)
"""


def test_replicas_that_train_by_themselves_decide_by_themselves(replicas):
    ran = run_cell(replicas(2), ALONE, {"X": X})
    assert ran.errors == {}, ran.report.failures
    assert len({values["calls"] for values in ran.values.values()}) == 2


PLATEAU = """
import torch
network = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
for metric in {metrics}[replica_id]:
    scheduler.step({given})
rate, best = optimizer.param_groups[0]["lr"], scheduler.best
"""


@pytest.mark.parametrize(
    "given", ["metric", "metrics=metric", "torch.tensor(metric)", "torch.tensor(metric).double()"]
)
def test_a_scheduler_that_waits_for_a_plateau_looks_at_the_mean(replicas, given):
    # The means are 3, 4 and 2; by itself replica 0 would see no plateau, and replica 1 one more.
    source = PLATEAU.format(metrics=[[4, 3, 2], [2, 5, 2]], given=given)
    ran = run_cell(replicas(2), source)
    assert ran.errors == {}, ran.report.failures
    assert [(values["rate"], values["best"]) for values in ran.values.values()] == [(0.5, 2.0), (0.5, 2.0)]


def test_a_plateau_of_one_replica_alone_is_its_own(replicas):
    source = PLATEAU.format(metrics=[[1], [1, 2, 3]], given="OfAll(metric)")
    ran = run_cell(replicas(2), "from mirror_nb.replica.decisions import OfAll\n" + source)
    assert ran.errors == {}, ran.report.failures
    assert [values["rate"] for values in ran.values.values()] == [1.0, 0.25]
    source = PLATEAU.format(metrics=[[1, 2], [1]], given="metric").replace("for", "with strategy.no_sync():\n  for")
    ran = run_cell(replicas(2), source.replace("    scheduler.step", "      scheduler.step"))
    assert ran.errors == {}, ran.report.failures
    assert [values["rate"] for values in ran.values.values()] == [0.5, 1.0]


def test_torchs_own_step_is_back_when_no_replica_is_here_any_more():
    before = ReduceLROnPlateau.step
    changed = GlobalMetrics(GradientSynchronizer(0, 2))
    assert ReduceLROnPlateau.step is not before
    changed.remove()
    assert ReduceLROnPlateau.step is before
