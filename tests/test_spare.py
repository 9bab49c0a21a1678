"""The process that waits to take a dead replica's place: when there is one, and that nothing depends on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import psutil
import pytest
from driving import eventually, gone, run_cell, with_a_spare

from mirror_nb.devices import Device
from mirror_nb.pool import local
from mirror_nb.pool.local import LocalPool
from mirror_nb.pool.recovery import recover
from mirror_nb.strategies.mirrored import SETUP

SUM = "n = int(strategy.reduce('sum', 1.0))"


@pytest.fixture
def two(replicas: Callable[[int], LocalPool]) -> LocalPool:
    return replicas(2)


def kill(pool: LocalPool, replica_id: int) -> None:
    os.kill(pool.status()[replica_id].pid, signal.SIGKILL)
    eventually(pool.dead, "the death is seen")


def mended(pool: LocalPool) -> list[int]:
    """Return the pids of replicas that work together, with all names."""
    pool.mend()
    recover(pool)
    assert run_cell(pool, SUM).values[0]["n"] == pool.size
    return [line.pid for line in pool.status()]


def test_a_spare_takes_the_place_of_a_replica_that_dies_and_another_one_follows_it(two):
    run_cell(two, "import torch\nmodel = torch.nn.Linear(2, 2)\nkept = 5")
    spare, before = with_a_spare(two), [line.pid for line in two.status()]
    assert spare not in before
    kill(two, 1)
    assert mended(two) == [before[0], spare]
    seen = run_cell(two, "seen = replica_id, strategy.num_replicas_in_sync, kept, float(model.weight.sum())").values
    assert [values["seen"][:3] for values in seen.values()] == [(0, 2, 5), (1, 2, 5)]
    assert seen[0]["seen"][3] == seen[1]["seen"][3]
    assert with_a_spare(two) != spare


def test_it_looks_like_a_replica_that_was_just_started(two, monkeypatch):
    with_a_spare(two)
    monkeypatch.setattr(two, "prepare", lambda: None)
    # After the spare was started, before it is a replica.
    monkeypatch.setenv("SET_MEANWHILE", "yes")
    kill(two, 0)
    mended(two)
    look = (
        "import os, sys, threading, torch\n"
        "look = os.environ['RANK'], os.environ['SET_MEANWHILE'], torch.get_num_threads(), sys.argv, "
        "len(threading.enumerate()), torch.initial_seed()"
    )
    of_a_spare = run_cell(two, look).values[0]["look"]
    kill(two, 0)
    assert two.spare() is None
    mended(two)
    assert run_cell(two, look).values[0]["look"] == of_a_spare


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_a_spare_that_was_struck_is_not_used(two, strike):
    spare = psutil.Process(with_a_spare(two))
    os.kill(spare.pid, strike)
    eventually(lambda: not spare.is_running() or spare.status() in ("stopped", "zombie"), "the spare is struck")
    kill(two, 1)
    assert spare.pid not in mended(two)
    assert gone(spare.pid)


def test_a_spare_that_was_struck_is_renewed(two):
    spare = with_a_spare(two)
    os.kill(spare, signal.SIGKILL)
    eventually(lambda: two.spare() is None, "nobody takes it for one that waits")
    assert with_a_spare(two) != spare


def test_all_that_die_at_once_are_replaced_the_first_by_the_spare(two):
    spare = with_a_spare(two)
    for line in two.status():
        os.kill(line.pid, signal.SIGKILL)
    eventually(lambda: len(two.dead()) == 2, "the deaths are seen")
    assert mended(two)[0] == spare


def test_a_spare_that_cannot_be_started_hinders_no_request(two, monkeypatch):
    two._end_spare()
    two._spare_at, tried, began = 0.0, [], time.monotonic()

    def fail() -> None:
        tried.append(1)
        raise OSError("no more processes")

    monkeypatch.setattr(two, "_launch", fail)
    eventually(local._forkserver_rests, "the forkserver has loaded all")
    assert run_cell(two, SUM).values[0]["n"] == 2
    assert tried
    assert two.spare() is None
    # Not in every request: after a while.
    assert two._spare_at >= began + local.SPARE_SECONDS


def test_none_is_started_while_the_forkserver_loads(two, monkeypatch):
    eventually(local._forkserver_rests, "the forkserver has loaded all")
    two._end_spare()
    comm = f"/proc/{local._forkserver_pid()}/comm"
    with open(comm, encoding="ascii") as file:
        assert file.read() == f"{local.RESTS}\n"
    monkeypatch.setattr(local, "RESTS", "it says another")
    two._spare_at = 0.0
    two.prepare()
    assert two.spare() is None


def test_a_replica_is_not_named_as_the_forkserver_is(two):
    assert run_cell(two, "name = open('/proc/self/comm').read()").values[1]["name"] != f"{local.RESTS}\n"
    with_a_spare(two)
    kill(two, 1)
    mended(two)
    assert run_cell(two, "name = open('/proc/self/comm').read()").values[1]["name"] != f"{local.RESTS}\n"


def test_one_replica_alone_has_no_spare(replicas):
    one = replicas(1)
    one.prepare()
    assert one.spare() is None
    assert one._spare_at == float("inf")


def test_a_spare_comes_by_itself_and_ends_with_a_controller_that_is_killed():
    source = """
        import time
        import mirror_nb as mnb
        strategy = mnb.MirroredStrategy(["cpu:0", "cpu:1"])
        pool = None
        while pool is None or pool.spare() is None:
            strategy.run(lambda: None)
            pool = strategy._place._pool
            time.sleep(0.05)
        print(pool.spare(), flush=True)
        time.sleep(100)
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        spare = int(controller.stdout.readline())
        family = [spare, *(child.pid for child in psutil.Process(controller.pid).children(recursive=True))]
        controller.kill()
    eventually(lambda: all(map(gone, family)), "all of them are gone", seconds=2)


def test_a_stopped_session_leaves_no_spare():
    with LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP) as pool:
        pool.start()
        spare = with_a_spare(pool)
        assert not gone(spare)
    assert gone(spare)
