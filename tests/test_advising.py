"""What is said below a cell that could train faster: once, with the numbers that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from made_rings import KB, MB, MadeRings

from mirror_nb.collectives.options import CommunicationOptions
from mirror_nb.devices import Device
from mirror_nb.notebook import advising, session
from mirror_nb.notebook.advising import CellAdvice

USUAL = CommunicationOptions()
SMALL = CommunicationOptions(bytes_per_pack=64 * KB)
TRAINING = """%%mirrored
import torch
from mirror_nb.replica import progress
real, progress.step_times = progress.step_times, lambda optimizer: (real(optimizer), (1000.0, 1.0))[1]
net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(2)])
optimizer = torch.optim.AdamW(net.parameters())
x = torch.rand(600, 4)
for (each,) in strategy.distribute_dataset((x,), batch_size=2):
    optimizer.zero_grad(); net(each).square().mean().backward(); optimizer.step()
"""


class MadePool:
    """Replicas that have recorded what was made; none can be asked."""

    def __init__(self, made: MadeRings, kind: str = "cpu") -> None:
        self.devices = tuple(Device(kind, i) for i in range(made.num_replicas))
        self.size = made.num_replicas
        self._made = made

    def timeline(self) -> Any:
        self._made.timeline.update(now=self._made.now)
        return self._made.timeline


def said(made: MadeRings, options: CommunicationOptions = USUAL, kind: str = "cpu") -> list[str]:
    pool: Any = MadePool(made, kind)
    return CellAdvice().after_cell(pool, options)


def much_communication() -> MadeRings:
    return MadeRings(2, jitter=0, optimizer=0, overlap=False, buckets=[4 * KB] * 60, latency=1.0)


def test_replicas_that_mostly_communicate_are_told_with_the_numbers():
    with much_communication() as made:
        made.step(40)
        (text,) = said(made)
        shot = made.timeline.snapshot()
        assert shot.exposed > 0.4
        assert text.startswith("communication takes ")
        assert " of each step of " in text
        assert text.endswith("in one process; %mirror bench --model NAME --shape ... measures both")


def test_buckets_are_too_small_only_where_they_were_made_so():
    with much_communication() as made:
        made.step(40)
        assert said(made, SMALL)[1] == (
            "60 small all-reduces a step, mostly of 4 KiB, at 0.0 GB/s: larger buckets would cost less "
            "(%mirror restart --bucket-mb 25)"
        )


def test_each_is_said_once_and_only_of_steps_that_are_new():
    with much_communication() as made:
        advice, pool = CellAdvice(), MadePool(made)
        made.step(10)
        assert advice.after_cell(pool, USUAL) == []
        made.step(15)
        assert advice.after_cell(pool, USUAL) == []
        made.step(30)
        assert len(advice.after_cell(pool, USUAL)) == 1
        made.step(30)
        assert advice.after_cell(pool, USUAL) == []


def test_nothing_is_said_of_a_slow_replica_of_gpus_of_one_replica_and_where_nothing_is_to_gain():
    with MadeRings(2, overlap=False, buckets=[4 * KB], optimizer=0) as made:
        made.slowness[0] = 8.0
        made.step(60)
        assert made.timeline.update(now=made.now)
        assert made.timeline.snapshot().exposed > 0.4
        assert said(made) == []
    with much_communication() as made:
        made.step(40)
        assert said(made, kind="cuda") == []
    with MadeRings(1) as made:
        made.step(40)
        assert said(made) == []
    with MadeRings(2, buckets=[25 * MB] * 4, optimizer=0) as made:
        made.step(40)
        assert said(made) == []


@pytest.fixture
def closing(shell: InteractiveShell) -> Iterator[Callable[[str], str]]:
    """Run a cell; return the line below it."""

    def ran(source: str) -> str:
        with capture_output() as shown:
            shell.run_cell(source).raise_error()
        return str(shown.outputs[-1].data["text/plain"])

    yield ran
    ran("%%mirrored\nprogress.step_times = real")


def least(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Take cells for worth a trial from so long on: here the first training of a process may take any time."""
    for module in (session, advising):
        monkeypatch.setattr(module, "LEAST_SECONDS", seconds)


def test_a_short_cell_is_not_tried(closing, monkeypatch):
    least(monkeypatch, 1000.0)
    assert "optimizer.step()" not in closing(TRAINING)


def test_an_optimizer_that_is_faster_when_fused_is_named_below_the_cell(closing, shell, monkeypatch):
    least(monkeypatch, 0.0)
    # Whatever part of a step it takes: on a busy machine the replicas wait for each other for most of it.
    monkeypatch.setattr(advising, "_WORTH_A_TRIAL", 0.0)
    timeline = shell.magics_manager.registry["MirrorMagics"].session.pool.timeline()
    timeline.update()
    before = timeline.snapshot().step
    first = closing(TRAINING)
    timeline.update()
    assert timeline.snapshot().step - before == 300, "steps of the trial are none of the training's"
    assert "\noptimizer.step() takes 1.0 s of a step's " in first
    assert "and 1.0 ms when it is fused: torch.optim.AdamW(..., fused=True)" in first
    assert "optimizer.step()" not in closing(TRAINING)


def test_a_trial_that_would_take_long_beside_the_training_is_not_made():
    # No replica could be asked here.
    with MadeRings(2, optimizer=40) as made:
        made.step(40)
        assert said(made) == []
