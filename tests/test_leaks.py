"""Starts, stops and many cells keep memory, descriptors and threads flat.

Short in `make test`; `make leaks` (MIRROR_NB_LEAKS=long) does 200 starts, 10,000 cells and 50 deaths, and notes what
it saw in benchmarks/results/leaks.txt.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from driving import run_cell, with_a_spare

from mirror_nb.devices import Device
from mirror_nb.pool.local import LocalPool
from mirror_nb.strategies.mirrored import SETUP

LONG = os.environ.get("MIRROR_NB_LEAKS") == "long"
STARTS, CELLS, DEATHS = (200, 10_000, 50) if LONG else (6, 300, 4)
MEGABYTE = 1 << 20
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    resident: int
    # Bytes.


def held(pid: int | None = None) -> Held:
    gc.collect()
    process = psutil.Process(pid)
    return Held(process.num_fds(), process.num_threads(), process.memory_info().rss)


def note(what: str, before: Held, after: Held) -> None:
    """Write down what a long run saw; an earlier line of the same thing goes."""
    if not LONG:
        return
    sys.path.insert(0, str(BENCHMARKS))
    from machine import report

    path = BENCHMARKS / "results" / "leaks.txt"
    lines = path.read_text().split("\n\n")[0].splitlines() if path.exists() else []
    kept = [line for line in lines if not line.startswith(f"{what}:")]
    megabytes = [f"{held.resident / MEGABYTE:.1f}" for held in (before, after)]
    line = (
        f"{what}: descriptors {before.descriptors} to {after.descriptors}, threads {before.threads} to {after.threads}"
        f", resident {megabytes[0]} to {megabytes[1]} MB"
    )
    report("leaks", [*kept, line])


def assert_flat(before: Held, after: Held, megabytes: float) -> None:
    assert after.descriptors <= before.descriptors + 2, (before, after)
    assert after.threads <= before.threads + 1, (before, after)
    assert after.resident <= before.resident + megabytes * MEGABYTE, (before, after)


def start_and_stop() -> None:
    with LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP) as pool:
        pool.start()
        assert run_cell(pool, "n = int(strategy.reduce('sum', 1))").values[0]["n"] == 2


def test_starting_and_stopping_leaves_the_controller_as_it_was():
    for _ in range(2):
        start_and_stop()
    before, children = held(), len(psutil.Process().children(recursive=True))
    for _ in range(STARTS):
        start_and_stop()
    after = held()
    note(f"{STARTS} starts and stops, the controller", before, after)
    # 20 kB a start would be 4 MB after two hundred.
    assert_flat(before, after, megabytes=8)
    assert len(psutil.Process().children(recursive=True)) <= children


def test_many_cells_leave_controller_and_replicas_as_they_were(replicas: Callable[[int], LocalPool]):
    two = replicas(2)
    cell = (
        "import torch\nx = torch.ones(100_000) * replica_id\ny = sum(text.count('a') for _ in range(2))\n"
        "print('said', y)\nn = int(strategy.reduce('sum', 1))"
    )
    for i in range(50):
        run_cell(two, cell, {"text": f"a{i}"})
    with_a_spare(two)
    pids = [None, *(line.pid for line in two.status())]
    before = [held(pid) for pid in pids]
    for i in range(CELLS):
        ran = run_cell(two, cell, {"text": f"a{i}"})
        assert ran.values[1]["n"] == 2
    after = [held(pid) for pid in pids]
    for who, then, now in zip(("controller", "replica 0", "replica 1"), before, after, strict=True):
        note(f"{CELLS:,} cells, the {who}".replace("the replica", "replica"), then, now)
    for then, now in zip(before, after, strict=True):
        assert_flat(then, now, megabytes=16)


def test_deaths_and_failures_leave_controller_and_survivor_as_they_were(replicas: Callable[[int], LocalPool]):
    two = replicas(2)

    def fail_and_die() -> None:
        run_cell(two, "big = [0] * 1000\nif replica_id == 1: raise OSError('full')\nstrategy.reduce('sum', 1)")
        two.mend()
        run_cell(two, "import os\nif replica_id == 1: os.kill(os.getpid(), 9)\nstrategy.reduce('sum', 1)")
        two.mend()
        assert run_cell(two, "n = int(strategy.reduce('sum', 1))").values[0]["n"] == 2

    for _ in range(3):
        fail_and_die()
    survivor = two.status()[0].pid
    with_a_spare(two)
    before, then, threads = held(), held(survivor), threading.active_count()
    for _ in range(DEATHS):
        fail_and_die()
    assert two.status()[0].pid == survivor
    with_a_spare(two)
    now = held()
    note(f"{DEATHS} errors and deaths, the controller", before, now)
    assert_flat(before, now, megabytes=8)
    # A group that was left with work in flight goes with its threads a moment later.
    after = held(survivor)
    note(f"{DEATHS} errors and deaths, the survivor", then, after)
    assert after.descriptors <= then.descriptors + 30, (then, after)
    assert after.threads <= then.threads + 10, (then, after)
    assert threading.active_count() <= threads
