"""Ctrl-C at random moments: in a DDP loop, in its optimizer's steps, while replicas start, in a first import.

A few in every `make test`; MIRROR_NB_CHAOS=long presses a hundred times in the loop and twenty during the start.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from driving import doing, press_ctrl_c, run_cell
from torch import nn

from mirror_nb.devices import Device
from mirror_nb.pool.local import LocalPool
from mirror_nb.pool.recovery import recover
from mirror_nb.strategies.mirrored import SETUP

LONG = os.environ.get("MIRROR_NB_CHAOS") == "long"
PRESSES, STARTS = (100, 20) if LONG else (6, 2)
MAKE = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Halves(torch.optim.Adam):
    '''Steps its two groups one after the other, so that there is a middle to be struck in.'''
    def step(self, closure=None):
        whole = self.param_groups
        try:
            for group in whole:
                self.param_groups = [group]
                super().step()
        finally:
            self.param_groups = whole

torch.manual_seed(0)
net = nn.Linear(6, 3)
ddp = DistributedDataParallel(net)
optimizer = Halves([{"params": [net.weight]}, {"params": [net.bias]}], lr=0.01)
x = torch.randn(8, 6, generator=torch.Generator().manual_seed(replica_id))
"""
LOOP = """
open(FOLDER + f'/in{replica_id}', 'w').close()
while True:
    optimizer.zero_grad()
    (ddp(x) - 1).square().mean().backward()
    optimizer.step()
"""
LOOK = """
steps = [int(optimizer.state[p]['step']) if p in optimizer.state else 0 for p in net.parameters()]
weights = [p.detach().clone() for p in net.parameters()]
"""


class Undisturbed:
    """The same training in this process alone, over both replicas' examples."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._net = nn.Linear(6, 3)
        self._optimizer = torch.optim.Adam(self._net.parameters(), lr=0.01)
        self._x = torch.cat([torch.randn(8, 6, generator=torch.Generator().manual_seed(r)) for r in range(2)])
        self._steps = 0

    def at(self, steps: int) -> list[torch.Tensor]:
        """Return the weights after so many steps; not fewer than the last time."""
        assert steps >= self._steps
        for _ in range(steps - self._steps):
            self._optimizer.zero_grad()
            (self._net(self._x) - 1).square().mean().backward()
            self._optimizer.step()
        self._steps = steps
        return [p.detach().clone() for p in self._net.parameters()]


def test_interrupts_in_a_ddp_loop_leave_whole_steps_that_are_the_same_everywhere(
    replicas: Callable[[int], LocalPool], tmp_path: Path
):
    two, dice, undisturbed = replicas(2), random.Random(7), Undisturbed()
    before = [line.pid for line in two.status()]
    assert run_cell(two, MAKE).report.clean
    for _ in range(PRESSES):
        marks = [tmp_path / f"in{r}" for r in range(2)]

        def press() -> None:
            time.sleep(dice.uniform(0, 0.03))
            press_ctrl_c()

        with doing(press, when=lambda marks=marks: all(mark.exists() for mark in marks)):
            assert run_cell(two, LOOP.replace("FOLDER", repr(str(tmp_path)))).report.interrupted
        for mark in marks:
            mark.unlink()
        two.mend()
        recover(two)
        ran = run_cell(two, LOOK)
        assert ran.report.clean, ran.report.failures
        counts = {step for values in ran.values.values() for step in values["steps"]}
        assert len(counts) == 1, f"steps of the two halves, by replica: {[v['steps'] for v in ran.values.values()]}"
        expected = undisturbed.at(counts.pop())
        for mine, others, wanted in zip(ran.values[0]["weights"], ran.values[1]["weights"], expected, strict=True):
            assert torch.equal(mine, others)
            assert torch.allclose(mine, wanted, atol=1e-4)
    assert [line.pid for line in two.status()] == before


def test_interrupts_while_replicas_start_and_import_poison_nothing():
    dice, devices = random.Random(8), (Device("cpu", 0), Device("cpu", 1))
    for _ in range(STARTS):
        with LocalPool(devices, setup=SETUP) as given_up, pressed_after(dice.uniform(0, 0.3)):
            given_up.start()
        with LocalPool(devices, setup=SETUP) as pool:
            pool.start()
            with pressed_after(dice.uniform(0, 0.4)):
                run_cell(pool, "import matplotlib.pyplot as plt")
            pool.mend()
            ran = run_cell(
                pool,
                "import matplotlib.pyplot as plt\nplt.figure().add_subplot().plot([1, 2])\nplt.close('all')\n"
                "n = int(strategy.reduce('sum', 1.0))",
            )
            assert ran.report.clean, ran.report.failures
            assert ran.values[1]["n"] == 2


@contextlib.contextmanager
def pressed_after(seconds: float) -> Iterator[None]:
    """Press Ctrl-C so long after the block began, or at its end; the block may end by it or not notice."""
    over = threading.Event()

    def press() -> None:
        over.wait(seconds)
        press_ctrl_c()

    thread = threading.Thread(target=press)
    thread.start()
    with contextlib.suppress(KeyboardInterrupt):
        yield
    with contextlib.suppress(KeyboardInterrupt):
        over.set()
        thread.join()
    thread.join()
