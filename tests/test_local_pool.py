"""Replicas as processes: death, interrupts, what will not stop, and that nothing outlives the controller."""

from __future__ import annotations

import contextlib
import functools
import mmap
import multiprocessing
import multiprocessing.util
import os
import platform
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from driving import DEADLINE, doing, eventually, gone, opened, press_ctrl_c, run_cell, with_a_spare

from mirror_nb.devices import Device
from mirror_nb.errors import PoolClosed, ReplicaError
from mirror_nb.machine import memory
from mirror_nb.machine.cores import cores
from mirror_nb.messages import Display, Done, Interrupt, Steps, Stream
from mirror_nb.pool import following, interrupts, local, nanny
from mirror_nb.pool.local import LocalPool
from mirror_nb.pool.recovery import recover
from mirror_nb.pool.report import Death, Report
from mirror_nb.strategies.mirrored import SETUP
from mirror_nb.telemetry.samples import Kind, clock, decode

WAIT_IN_A_COLLECTIVE = "strategy.reduce('sum', 1.0)"
HOLD_THE_GIL = (
    "import ctypes; mutex = ctypes.create_string_buffer(256); lock = ctypes.PyDLL(None).pthread_mutex_lock; "
    "lock(mutex); lock(mutex)"
)
# Unlike a C sleep it is ended by no signal, after which another one could leave the loop below beside its `try`.
STUCK = """
import os, signal
while True:
    try:
        MARK
        {}
    except KeyboardInterrupt: pass
"""
# An interrupt that comes just before the replica is stuck changes nothing.


@pytest.fixture
def two(replicas: Callable[[int], LocalPool]) -> LocalPool:
    return replicas(2)


@pytest.fixture
def three(replicas: Callable[[int], LocalPool]) -> LocalPool:
    return replicas(3)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "GRACE", 1.0)
    monkeypatch.setattr(following, "INTERRUPT_AFTER", 0.2)


def pids(pool: LocalPool) -> list[int]:
    return [line.pid for line in pool.status()]


def without_a_spare(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool._end_spare()
    monkeypatch.setattr(pool, "prepare", lambda: None)


# ---------------------------------------------------------------------- start


@pytest.mark.parametrize("base", ["Exception", "RuntimeError"])
def test_an_exception_that_cannot_say_what_it_is_has_its_own_type(two, base):
    ran = run_cell(two, f"class Mute({base}):\n    def __str__(self): raise LookupError\nraise Mute")
    assert ran.errors == {0: "Mute", 1: "Mute"}
    assert ran.report.failures[0].message == "<exception str() failed>"


def test_what_a_cell_shows_of_classes_of_its_own_comes_plain(two):
    ran = run_cell(
        two,
        "from IPython.display import JSON\n"
        "class Own(dict): pass\n"
        "class Text(str): pass\n"
        "class Odd:\n    def _repr_mimebundle_(self, **_): return {'text/plain': Text('odd'), 'odd/odd': len}\n"
        "display(JSON(Own(a=[Own(b=1), (True, 2.5, None)])))\n"
        "Odd()",
    )
    assert ran.errors == {}
    (shown,) = [message.data for message in ran.messages[0] if isinstance(message, Display)]
    assert shown["application/json"] == {"a": [{"b": 1}, [True, 2.5, None]]}
    done = ran.report.answers[0].done
    assert done is not None
    assert done.result == {"text/plain": "odd", "odd/odd": "<built-in function len>"}
    assert run_cell(two, "after = 1").errors == {}


def test_replicas_look_like_torchruns_workers(two):
    ran = run_cell(
        two,
        "import os, torch.distributed as dist\n"
        "env = {k: os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')}\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "group = dist.is_torchelastic_launched(), dist.get_rank(), dist.get_world_size()",
    )
    for r in range(2):
        values = ran.values[r]
        assert values["env"] == {
            "RANK": str(r),
            "LOCAL_RANK": str(r),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert values["port"] > 0
        assert values["group"] == (True, r, 2)


def test_a_script_that_initialises_torch_distributed_itself_works(two):
    ran = run_cell(
        two,
        "import torch, torch.distributed as dist\n"
        "if dist.is_initialized(): dist.destroy_process_group()\n"
        "dist.init_process_group('gloo')\nt = torch.ones(1); dist.all_reduce(t); total = t.item()",
    )
    assert ran.report.clean, ran.report.failures
    assert ran.values[0]["total"] == 2
    two.unform()
    two.mend()


def test_only_loopback_is_listened_on(two):
    ours = [os.getpid(), *pids(two)]
    family = [child.pid for pid in ours for child in psutil.Process(pid).children(recursive=True)]
    listening = {
        connection.laddr.ip
        for pid in {*ours, *family}
        if not gone(pid)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_the_cores_are_shared_out(two):
    ran = run_cell(two, "import torch\nthreads = torch.get_num_threads()")
    assert ran.values[0]["threads"] == max(1, cores() // 2)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_a_replica_keeps_the_memory_that_a_step_frees(two):
    source = """
        import resource, torch

        def step():
            for size in [20, 3, 12] * 3:
                kept.append(torch.ones(size << 18))
            kept.clear()

        kept, faults = [], []
        for _ in range(40):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            step()
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    ran = run_cell(two, textwrap.dedent(source))
    for r in (0, 1):
        faults = ran.values[r]["faults"]
        # The heap takes up to five steps until its free pieces fit; all of the thirty after ten find what they need.
        assert sum(faults[10:]) < 1000, f"105 MB a step are 27,000 pages: {faults}"


def test_replicas_sleep_some_time_after_requests_that_came_in_a_row(two):
    def processor() -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids(two))

    for _ in range(5):
        assert two.run(dict.fromkeys(range(2), Steps())).clean
    before = processor()
    threading.Event().wait(0.5)
    assert processor() - before < 0.25


def test_data_loader_workers_find_classes_of_the_cell(two):
    ran = run_cell(
        two,
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Squares(Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i):\n        print('loading', i)\n        return i * i\n"
        "total = sum(int(b.sum()) for b in DataLoader(Squares(), batch_size=2, num_workers=2))",
    )
    assert ran.report.clean, ran.report.failures
    assert ran.values[1]["total"] == sum(i * i for i in range(8))
    assert sorted(line for line in ran.text[1].splitlines()) == [f"loading {i}" for i in range(8)]


def test_text_of_child_processes_and_of_c_code_comes_back(two):
    ran = run_cell(
        two,
        "import os, subprocess\nprint('python')\nsubprocess.run(['sh', '-c', 'echo child; echo bad >&2'])\n"
        "os.write(1, b'x' + '€'.encode() * 100_000)",
    )
    for r in range(2):
        assert "python" in ran.text[r]
        assert "child\n" in ran.text[r]
        assert "bad\n" in ran.text[r]
        assert ran.text[r].count("€") == 100_000


def test_text_of_python_and_of_others_appears_in_the_order_in_which_it_was_written(two):
    ran = run_cell(two, "import os\nprint('a')\nos.system('echo b')\nprint('c')\nos.write(1, b'd\\n')\nprint('e')")
    assert set(ran.text.values()) == {"a\nb\nc\nd\ne\n"}


def test_a_child_process_that_never_stops_writing_does_not_hold_the_cell_up(two, tmp_path):
    ran = run_cell(two, "import subprocess\nchatter = subprocess.Popen(['yes'])\nx = 1")
    assert ran.report.clean
    heard = set()

    def hear(replica_id: int, message: Any) -> None:
        heard.update([replica_id] if "y\n" in getattr(message, "text", "") else [])
        if len(heard) == 2:
            (tmp_path / "heard").touch()

    until = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'heard')!r}): time.sleep(0.01)\n"
    ran = run_cell(two, f"{until}chatter.kill()\ncode = chatter.wait()", on_message=hear)
    assert ran.values[0]["code"] == -9
    assert heard == {0, 1}


def test_what_the_controllers_code_raises_ends_the_cell_and_costs_the_replicas_nothing(two):
    def fail(replica_id: int, message: Any) -> None:
        if getattr(message, "text", "").startswith("here"):
            raise BrokenPipeError("nobody reads this")

    before = pids(two)
    uneven = f"print('here')\nif replica_id == 1: {WAIT_IN_A_COLLECTIVE}\nwhile True: pass"
    with pytest.raises(BrokenPipeError, match="nobody reads this"):
        run_cell(two, uneven, on_message=fail)
    two.mend()
    ran = run_cell(two, "n = int(strategy.reduce('sum', 1.0))")
    assert ran.report.clean
    assert ran.values[0]["n"] == 2
    assert pids(two) == before


def test_a_cell_runs_in_the_notebooks_folder(two, tmp_path):
    ran = run_cell(two, "import os\nhere = os.getcwd()", working_directory=str(tmp_path))
    assert ran.values[1]["here"] == str(tmp_path)
    run_cell(two, "pass")


def test_pools_beside_each_other_do_not_meet(two, three):
    assert run_cell(two, "n = int(strategy.reduce('sum', 1.0))").values[0]["n"] == 2
    assert run_cell(three, "n = int(strategy.reduce('sum', 1.0))").values[0]["n"] == 3


# ---------------------------------------------------------------------- death


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_replica_is_named_with_its_device_and_signal_and_the_others_are_freed(three, number):
    before = pids(three)
    began = time.monotonic()
    ran = run_cell(
        three,
        f"import os\nif replica_id == 1: os.kill(os.getpid(), {int(number)})\n{WAIT_IN_A_COLLECTIVE}",
    )
    assert time.monotonic() - began < DEADLINE / 2
    (death,) = ran.report.deaths
    assert (death.replica_id, str(death.device), death.pid, death.exit_code) == (1, "cpu:1", before[1], -number)
    assert f"replica 1 (cpu:1, pid {before[1]}) was killed by signal {int(number)} ({number.name})" in str(death)
    # The others waited in a collective.
    assert set(ran.report.failures) == {0, 2}
    assert all(failure.secondary for failure in ran.report.failures.values())


def test_an_error_that_only_speaks_of_a_peer_s_failure_is_the_users_own(two):
    wrapped = """
import torch
from mirror_nb.errors import PeerFailed
def gone(_): raise PeerFailed('a peer may have left')
future = torch.futures.Future()
chained = future.then(gone)
future.set_result(None)
"""
    ran = run_cell(two, f"{wrapped}raise ValueError('PeerFailed is not handled here') if replica_id else None")
    assert not ran.report.failures[1].secondary
    # As torch's C++ tells of it, when it is in the middle of a chain of futures too.
    for wait in ("chained.wait()", "chained.then(lambda done: done.value()).wait()"):
        ran = run_cell(two, wrapped + wait)
        assert [failure.type_name for failure in ran.report.failures.values()] == ["RuntimeError"] * 2
        assert all(failure.secondary for failure in ran.report.failures.values())


def test_only_the_dead_replica_is_replaced_and_the_others_keep_their_names(three):
    run_cell(three, "mine = replica_id * 10")
    before = pids(three)
    os.kill(before[2], signal.SIGKILL)
    eventually(three.dead, "the death is noticed")
    assert three.status()[2].state == "dead"
    assert "was killed by signal 9" in three.status()[2].how
    (replaced,) = three.mend()
    assert replaced.replica_id == 2
    assert pids(three)[:2] == before[:2]
    assert pids(three)[2] != before[2]
    ran = run_cell(three, "left = 'mine' in globals()\nn = int(strategy.reduce('sum', 1.0))")
    assert [ran.values[r]["left"] for r in range(3)] == [True, True, False]
    assert ran.values[2]["n"] == 3


def test_one_that_the_system_ended_for_want_of_memory_says_so_and_a_later_kill_does_not(two, monkeypatch):
    ended = memory.ended()
    monkeypatch.setattr(memory, "ended", lambda: ended + 1)
    for told in ("the system was out of memory (", "kill -9, or the system was out of memory"):
        os.kill(pids(two)[1], signal.SIGKILL)
        eventually(two.dead, "the death is noticed")
        assert f"was killed by signal 9 (SIGKILL): {told}" in two.status()[1].how
        two.mend()


def test_a_replica_that_ends_itself_says_its_exit_code(two):
    ran = run_cell(two, "import os\nif replica_id == 0: os._exit(7)")
    assert "replica 0" in str(ran.report.deaths[0])
    assert "ended with exit code 7" in str(ran.report.deaths[0])
    two.mend()


def test_a_loaders_worker_that_dies_while_its_replica_rests_does_not_end_that(two):
    made = "loader = DataLoader(range(4), num_workers=1, persistent_workers=True); seen = len(list(loader))"
    workers = "workers = [worker.pid for worker in loader._iterator._workers]"
    ran = run_cell(two, f"from torch.utils.data import DataLoader; {made}; {workers}")
    for values in ran.values.values():
        os.kill(values["workers"][0], signal.SIGKILL)
        eventually(lambda pid=values["workers"][0]: gone(pid), "the worker has ended")
    # On a busy machine the signal may come as late as in this cell, whose error it is then.
    run_cell(two, "seen")
    ran = run_cell(two, "del loader; print(seen)")
    assert (ran.text, ran.errors, two.dead()) == ({0: "4\n", 1: "4\n"}, {}, [])


def test_what_a_handler_of_a_signal_raises_between_cells_ends_nobody(two, tmp_path):
    handler = f"def late(*_): open('{tmp_path}/' + str(replica_id), 'x').close(); raise TimeoutError"
    run_cell(two, f"import os, signal\n{handler}\nbefore = signal.signal(signal.SIGALRM, late)")
    for i, pid in enumerate(pids(two)):
        os.kill(pid, signal.SIGALRM)
        eventually((tmp_path / str(i)).exists, "the handler was called")
        (tmp_path / str(i)).unlink()
    assert run_cell(two, "os.kill(os.getpid(), signal.SIGALRM)").errors == {0: "TimeoutError", 1: "TimeoutError"}
    assert run_cell(two, "after = signal.signal(signal.SIGALRM, before)").errors == {}
    assert two.dead() == []


def test_all_replicas_dead_are_all_replaced(two):
    ran = run_cell(two, "import os\nos.kill(os.getpid(), 9)")
    assert {death.replica_id for death in ran.report.deaths} == {0, 1}
    assert len(two.mend()) == 2
    assert run_cell(two, "x = 1").report.clean


def test_a_replica_that_dies_while_the_cell_runs_elsewhere_is_named(three, tmp_path):
    started = tmp_path / "started"
    victim = pids(three)[1]
    with doing(lambda: os.kill(victim, signal.SIGKILL), when=started.exists):
        ran = run_cell(
            three,
            f"open({str(started)!r}, 'w')\nimport time\nend = time.monotonic() + 10\n"
            "while time.monotonic() < end: time.sleep(0.01)",
            replicas=[0],
        )
    assert [death.replica_id for death in ran.report.deaths] == [1]


def test_what_a_dead_replica_said_last_is_not_lost(two):
    ran = run_cell(
        two, "import os\nprint('last words')\nimport time; time.sleep(0.3)\nif replica_id == 1: os._exit(1)"
    )
    assert "last words" in ran.text[1]


def test_what_the_cell_started_ends_with_its_replica(two, tmp_path):
    file = tmp_path / "pid"
    ran = run_cell(
        two,
        "import subprocess, os\nif replica_id == 0:\n"
        f"    child = subprocess.Popen(['sleep', '1000'])\n    open({str(file)!r}, 'w').write(str(child.pid))\n"
        "    os.kill(os.getpid(), 9)",
    )
    assert ran.report.deaths
    eventually(lambda: gone(int(file.read_text())), "the shell of the dead replica ends")
    two.mend()


def test_descriptors_do_not_pile_up_over_deaths_and_cells(two):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    run_cell(two, "x = 1")
    with_a_spare(two)
    before = descriptors()
    for _ in range(3):
        os.kill(pids(two)[1], signal.SIGKILL)
        eventually(two.dead, "the death is noticed")
        two.mend()
        run_cell(two, "y = x0", {"x0": 1})
    with_a_spare(two)
    assert descriptors() <= before + 1


# ---------------------------------------------------------------------- errors


def test_an_error_in_one_replica_frees_those_that_wait_in_a_collective(three):
    ran = run_cell(three, f"kept = 5\nif replica_id == 1: raise OSError('full')\n{WAIT_IN_A_COLLECTIVE}")
    assert ran.errors == {0: "PeerFailed", 1: "OSError", 2: "PeerFailed"}
    assert [r for r, failure in ran.report.failures.items() if failure.secondary] == [0, 2]
    three.mend()
    ran = run_cell(three, "n = kept + int(strategy.reduce('sum', 1.0))")
    assert {values["n"] for values in ran.values.values()} == {8}


def test_who_waits_for_one_that_fails_is_told_that_also_where_the_interrupt_comes_at_once(three, monkeypatch):
    monkeypatch.setattr(following, "ABORT_AFTER", 0.0)
    monkeypatch.setattr(following, "INTERRUPT_AFTER", 0.0)
    source = """
import time, torch, torch.distributed as dist
from mirror_nb.collectives import process_group
if replica_id != 1: dist.all_reduce(torch.ones(SIZE))
while sum(' of SIZE flo' in last for last in process_group.standing()[0].seen) < 2: time.sleep(0.005)
raise OSError('full')
"""
    for size in range(2, 14):
        ran = run_cell(three, source.replace("SIZE", str(size)))
        assert ran.errors == {0: "PeerFailed", 1: "OSError", 2: "PeerFailed"}
        assert not any(failure.interrupted for failure in ran.report.failures.values())
        three.mend()


def test_who_is_interrupted_as_it_deals_with_a_peers_failure_tells_of_that(two, short_grace):
    source = f"""
import threading
if replica_id == 1: raise OSError('full')
try:
    {WAIT_IN_A_COLLECTIVE}
except RuntimeError:
    while True: threading.Event().wait(0.05)
"""
    ran = run_cell(two, source)
    assert ran.errors == {0: "PeerFailed", 1: "OSError"}
    assert ran.report.failures[0].secondary
    assert ran.report.failures[0].traceback == ("PeerFailed: replica 1 raised OSError",)


def test_an_error_in_one_replica_stops_those_that_loop(two):
    ran = run_cell(two, "if replica_id == 0: raise OSError('full')\nwhile True: pass")
    assert ran.errors == {0: "OSError", 1: "KeyboardInterrupt"}
    two.mend()


def test_a_replica_that_swallows_every_error_does_not_hold_the_others_up(two, short_grace, tmp_path):
    before = pids(two)
    file = tmp_path / "in"
    ran = run_cell(
        two,
        "import os\nif replica_id == 0:\n"
        f"    while not os.path.exists({str(file)!r}): pass\n"
        "    raise OSError('full')\n"
        "while True:\n    try:\n        try:\n"
        f"            open({str(file)!r}, 'w').close()\n            while True: pass\n"
        "        except BaseException: pass\n    except BaseException: pass",
    )
    assert ran.errors == {0: "OSError"}
    (death,) = ran.report.deaths
    assert (death.replica_id, death.by_us) == (1, True)
    assert "did not stop when asked and was ended" in str(death)
    two.mend()
    assert pids(two)[0] == before[0]


# ---------------------------------------------------------------------- interrupts and timeouts


def interrupted(pool: LocalPool, source: str, tmp_path: Path, press: Callable[[], None] = press_ctrl_c) -> Report:
    """Run a cell and press Ctrl-C once every replica is in it."""
    files = [tmp_path / f"in{r}" for r in range(pool.size)]
    mark = f"open({str(tmp_path)!r} + f'/in{{replica_id}}', 'w').close()"
    whole = source.replace("MARK", mark) if "MARK" in source else f"{mark}\n{source}"
    with doing(press, when=lambda: all(file.exists() for file in files)):
        return run_cell(pool, whole).report


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time\nwhile True: time.sleep(100)",
        f"if replica_id == 0: {WAIT_IN_A_COLLECTIVE}\nwhile True: pass",
        "import torch, torch.distributed as dist\nif replica_id: dist.barrier()\nelse: dist.recv(torch.ones(1), 1)",
        "import subprocess; subprocess.run(['sleep', '1000'])",
    ],
    ids=["a Python loop", "a sleep", "a collective", "point to point", "a child process"],
)
def test_an_interrupt_stops_all_and_they_keep_their_names(two, tmp_path, source):
    before = pids(two)
    report = interrupted(two, f"kept = 6\nMARK\n{source}", tmp_path)
    assert report.interrupted
    assert {failure.type_name for failure in report.failures.values()} == {"KeyboardInterrupt"}
    assert all(failure.interrupted for failure in report.failures.values())
    two.mend()
    assert pids(two) == before
    assert run_cell(two, "n = kept * int(strategy.reduce('sum', 1.0))").values[0]["n"] == 12


def test_an_interrupt_in_a_training_loop_leaves_replicas_that_agree(two, tmp_path):
    interrupted(
        two,
        "import torch\nfrom torch import nn\nmodel = nn.Linear(20, 20)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\nsteps = 0\n"
        "while True:\n    optimizer.zero_grad(); model(torch.randn(4, 20)).sum().backward()\n"
        "    optimizer.step(); steps += 1\n"
        "    if steps == 3: MARK",
        tmp_path,
    )
    two.mend()
    ran = run_cell(
        two,
        "w = model.weight.detach().clone()\nspread = float(strategy.reduce('mean', w).sub(w).abs().max())",
    )
    assert ran.report.clean, ran.report.failures
    # They may have been stopped one step apart, never in the middle of one.
    assert ran.values[0]["spread"] < 1


@pytest.mark.parametrize("show", ["print(text)", "display({'text/plain': text}, raw=True)"])
def test_an_interrupt_while_much_is_shown_leaves_the_channel_whole(two, tmp_path, show):
    for i in range(3):
        folder = tmp_path / str(i)
        folder.mkdir()
        source = f"from IPython.display import display\ntext = 'é' * 3_000_000\nMARK\nwhile True: {show}"
        report = interrupted(two, source, folder)
        assert report.interrupted
        assert not report.deaths
        assert set(report.failures) == {0, 1}
        two.mend()
        assert run_cell(two, "x = 1").report.clean


def test_a_replica_whose_error_takes_long_to_show_is_not_ended(two, tmp_path, monkeypatch):
    monkeypatch.setattr(following, "GRACE", 1.5)
    began, go_on = tmp_path / "began", tmp_path / "go on"
    shown: list[float] = []

    def too_long() -> bool:
        if began.exists() and not shown:
            shown.append(time.monotonic())
        return bool(shown) and time.monotonic() > shown[0] + 2 * following.GRACE

    source = (
        "import os, time\nclass Long(Exception):\n    def __str__(self):\n"
        f"        open({str(began)!r}, 'w').close()\n"
        f"        while not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
        "        return 'shown at last'\n"
        "if replica_id == 0: raise ValueError\n"
        "try:\n    while True: time.sleep(0.01)\nexcept KeyboardInterrupt:\n    raise Long"
    )
    with doing(go_on.touch, when=too_long):
        report = run_cell(two, source).report
    assert not report.deaths
    assert report.failures[1].message == "shown at last"


@pytest.mark.parametrize(
    "stuck",
    [HOLD_THE_GIL, "os.kill(os.getpid(), signal.SIGSTOP)"],
    ids=["holding the GIL", "stopped"],
)
def test_a_replica_that_will_not_stop_is_replaced_alone(two, tmp_path, short_grace, stuck):
    before = pids(two)
    others = "MARK\nkept = 1\nif replica_id == 1:\n"
    report = interrupted(two, others + textwrap.indent(STUCK.format(stuck), "    "), tmp_path)
    (death,) = report.deaths
    assert (death.replica_id, death.by_us) == (1, True)
    two.mend()
    assert pids(two)[0] == before[0]
    assert pids(two)[1] != before[1]
    assert run_cell(two, "k = kept", replicas=[0]).values[0]["k"] == 1


def test_a_replica_in_the_middle_of_an_import_is_given_time_to_end_it(two, tmp_path, short_grace, monkeypatch):
    look = following.Following._kill_silent

    def after_the_grace(self: following.Following, interrupted: float) -> None:
        look(self, interrupted)
        (tmp_path / "go").touch()

    monkeypatch.setattr(following.Following, "_kill_silent", after_the_grace)
    (tmp_path / "takes_its_time.py").write_text(
        f"import os, time\nopen({str(tmp_path)!r} + f'/begun{{os.getpid()}}', 'w').close()\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\nwhole = True\n"
    )
    before = pids(two)
    with doing(press_ctrl_c, when=lambda: len(list(tmp_path.glob("begun*"))) == 2):
        ran = run_cell(two, f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport takes_its_time\nlate = 1")
    assert ran.report.interrupted
    assert pids(two) == before, "nobody was ended"
    two.mend()
    assert run_cell(two, "whole = takes_its_time.whole").values[1]["whole"] is True


def test_an_interrupt_while_an_error_is_rendered_leaves_it_the_error(two, tmp_path, short_grace, monkeypatch):
    look = following.Following._kill_silent

    def after_the_grace(self: following.Following, interrupted: float) -> None:
        look(self, interrupted)
        (tmp_path / "go").touch()

    monkeypatch.setattr(following.Following, "_kill_silent", after_the_grace)
    before = pids(two)
    slow = f"""
import os, time
class Slow(Exception):
    def __str__(self):
        open({str(tmp_path)!r} + f'/begun{{os.getpid()}}', 'w').close()
        while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.01)
        return "told in the end"
raise Slow
"""
    with doing(press_ctrl_c, when=lambda: len(list(tmp_path.glob("begun*"))) == 2):
        ran = run_cell(two, slow)
    assert ran.report.interrupted
    assert pids(two) == before, "nobody was ended"
    assert set(ran.errors.values()) == {"Slow"}
    failure = ran.report.failures[1]
    assert "told in the end" in "".join(failure.traceback)
    assert "KeyboardInterrupt" not in "".join(failure.traceback) + ran.text[1]
    assert run_cell(two, "fine = 1").values[1]["fine"] == 1


def test_replicas_that_send_for_long_what_an_interrupted_cell_made_are_not_ended(
    two, tmp_path, short_grace, monkeypatch
):
    look = following.Following._kill_silent
    looks = 0

    def after_two_graces(self: following.Following, interrupted: float) -> None:
        nonlocal looks
        look(self, interrupted)
        looks += 1
        if looks == 2:
            (tmp_path / "go").touch()

    monkeypatch.setattr(following.Following, "_kill_silent", after_two_graces)
    monkeypatch.setattr(following, "HELD_BACK_SECONDS", 1.0)
    before = pids(two)
    report = interrupted(
        two,
        f"""
import os, time
class Large:
    def __reduce__(self):
        while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.01)
        return int, (7,)
large = Large()
MARK
while True: time.sleep(0.01)
""",
        tmp_path,
    )
    assert report.interrupted
    assert not report.deaths
    assert pids(two) == before
    assert {opened(answer.done.payload, answer.slab)[0]["large"] for answer in report.answers.values()} == {7}


def test_an_import_that_never_ends_is_ended_at_last(two, tmp_path, short_grace, monkeypatch):
    monkeypatch.setattr(following, "HELD_BACK_SECONDS", 1.5)
    (tmp_path / "endless.py").write_text(
        f"import time\nopen({str(tmp_path / 'begun')!r}, 'w').close()\nwhile True: time.sleep(0.01)\n"
    )
    before = pids(two)
    with doing(press_ctrl_c, when=(tmp_path / "begun").exists):
        ran = run_cell(
            two, f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nif replica_id == 1:\n    import endless"
        )
    assert ran.report.interrupted
    assert [death.by_us for death in ran.report.deaths] == [True]
    two.mend()
    assert [now == then for now, then in zip(pids(two), before, strict=True)] == [True, False]


def test_sending_much_to_a_stopped_replica_does_not_block_the_controller(two, short_grace):
    os.kill(pids(two)[1], signal.SIGSTOP)
    ran = run_cell(two, "n = len(text)", {"text": "x" * 10_000_000}, timeout=0.5)
    assert ran.values[0]["n"] == 10_000_000
    assert [(death.replica_id, death.by_us) for death in ran.report.deaths] == [(1, True)]
    two.mend()


def test_an_interrupt_as_the_last_replica_joins_the_group_is_heard_and_poisons_nothing(two, monkeypatch):
    poll, held = two.poll, []

    def one_by_one(timeout):
        found = [*held, *poll(timeout)]
        held.clear()
        joined = [i for i, (_, message, _) in enumerate(found) if isinstance(message, Done)]
        if len(joined) == 2 or (joined and not pressed):
            pressed.append(press_ctrl_c())
            held.extend(found[joined[0] + 1 :])
            del found[joined[0] + 1 :]
        return found

    pressed: list[None] = []
    two.unform()
    with monkeypatch.context() as patch:
        patch.setattr(two, "poll", one_by_one)
        with pytest.raises(KeyboardInterrupt):
            two.mend()
    assert pressed
    two.mend()
    assert run_cell(two, "n = int(strategy.reduce('sum', 1.0))").values[1]["n"] == 2


def test_a_second_interrupt_does_not_wait_for_the_grace(two, tmp_path, monkeypatch):
    monkeypatch.setattr(following, "GRACE", 1000.0)
    sent = []
    send = two.send

    def noted(to: Any, message: object, *slab: int | None) -> None:
        send(to, message, *slab)
        sent.append((sorted(to), message))

    monkeypatch.setattr(two, "send", noted)

    def press_twice() -> None:
        press_ctrl_c()
        # Two that are pending together would be delivered as one.
        eventually(lambda: [to for to, m in sent if isinstance(m, Interrupt)] == [[0, 1]], "both replicas are told")
        press_ctrl_c()

    report = interrupted(two, STUCK.format(HOLD_THE_GIL), tmp_path, press_twice)
    assert {death.replica_id for death in report.deaths} == {0, 1}
    two.mend()


def test_after_one_interrupt_nobody_is_ended_within_the_grace(two, tmp_path, monkeypatch):
    monkeypatch.setattr(following, "SECOND_AFTER", 0.0)
    monkeypatch.setattr(following, "GRACE", 1000.0)
    saves = "import time\ntry:\n    MARK\n    time.sleep(60)\nexcept KeyboardInterrupt: time.sleep(0.5)"
    assert not interrupted(two, saves, tmp_path).deaths


def test_a_key_that_was_pressed_twice_ends_no_replica_that_is_about_to_stop(two, tmp_path, monkeypatch):
    monkeypatch.setattr(following, "SECOND_AFTER", 1000.0)
    begun, pressed = tmp_path / "begun", tmp_path / "pressed"
    (tmp_path / "slow_when_pressed_twice.py").write_text(
        f"import os, time\nopen({str(begun)!r}, 'w').close()\n"
        f"while not os.path.exists({str(pressed)!r}): time.sleep(0.01)\n"
    )
    before = pids(two)
    counts = []

    def press_twice() -> None:
        for n in (1, 2):
            press_ctrl_c()
            eventually(lambda n=n: two._interrupts.count == n, f"interrupt {n} is noted")
        counts.append(two._interrupts.count)
        pressed.touch()

    source = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport slow_when_pressed_twice"
    with doing(press_twice, when=begun.exists):
        ran = run_cell(two, source)
    assert counts == [2]
    assert ran.report.interrupted
    assert not ran.report.deaths
    assert pids(two) == before
    two.mend()


def test_a_cell_that_takes_longer_than_its_timeout_is_stopped(two):
    ran = run_cell(two, "kept = 2\nwhile True: pass", timeout=0.3)
    assert ran.report.timed_out
    assert not ran.report.interrupted
    assert set(ran.errors.values()) == {"KeyboardInterrupt"}
    two.mend()
    assert run_cell(two, "k = kept").values[0]["k"] == 2


def test_an_interrupt_between_requests_is_an_ordinary_one(two):
    run_cell(two, "x = 1")

    def interrupt() -> None:
        press_ctrl_c()
        eventually(lambda: False, "the interrupt")

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert run_cell(two, "x = 2").report.clean


def test_an_interrupt_after_the_last_look_at_a_request_is_told_with_it(two, monkeypatch):
    follow = following.Following.follow

    def pressed(self: Any) -> Report:
        report = follow(self)
        press_ctrl_c()
        return report

    with monkeypatch.context() as patched:
        patched.setattr(following.Following, "follow", pressed)
        assert run_cell(two, "x = 1").report.interrupted
    assert not run_cell(two, "x = 2").report.interrupted


def test_a_handler_of_native_code_stays(two, monkeypatch):
    monkeypatch.setattr(interrupts, "_handler_of", lambda number: None)
    before = signal.getsignal(signal.SIGINT)
    assert run_cell(two, "x = 1").report.clean
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def ctrl_c_calls() -> Iterator[Callable[..., None]]:
    """Sets a handler of the program's own, and presses Ctrl-C after each of the seconds."""
    before = signal.getsignal(signal.SIGINT)

    def calls(handler: Callable[..., Any], *seconds: float) -> None:
        signal.signal(signal.SIGINT, handler)
        for after in seconds:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()

    yield calls
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("given", [False, True], ids=["a function", "a partial call"])
def test_a_handler_of_the_programs_own_that_notes_an_interrupt_for_later_ends_nothing(two, ctrl_c_calls, given):
    noted: list[int] = []

    def note(to: list[int], number: int, frame: Any) -> None:
        to.append(number)

    ctrl_c_calls(functools.partial(note, noted) if given else lambda number, frame: noted.append(number), 0.1)
    ran = run_cell(two, "import time; time.sleep(0.4); done = True")
    assert ran.report.clean
    assert not ran.report.interrupted
    assert (noted, ran.values[0]["done"]) == ([signal.SIGINT], True)


def test_a_handler_of_the_programs_own_that_leaves_it_leaves_it_once_the_replicas_are_still(two, ctrl_c_calls):
    def leave(number: int, frame: Any) -> None:
        sys.exit("bye")

    ctrl_c_calls(leave, 0.1)
    with pytest.raises(SystemExit, match="bye"):
        run_cell(two, "import time; time.sleep(60)")
    assert signal.getsignal(signal.SIGINT) is leave
    two.mend()
    assert run_cell(two, "x = 1").report.clean


def test_a_handler_of_the_programs_own_may_raise_the_interrupt_after_all(two, ctrl_c_calls):
    def save_and_stop(number: int, frame: Any) -> None:
        signal.default_int_handler(number, frame)

    ctrl_c_calls(save_and_stop, 0.1)
    assert run_cell(two, "import time; time.sleep(60)").report.interrupted
    assert signal.getsignal(signal.SIGINT) is save_and_stop


def test_a_handler_of_the_programs_own_may_let_the_second_interrupt_end_it(two, ctrl_c_calls):
    def once(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    ctrl_c_calls(once, 0.1, 0.5)
    assert run_cell(two, "import time; time.sleep(60)").report.interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_answer_to_what_a_handler_of_an_alarm_has_left_is_not_taken_for_the_next(two, monkeypatch):
    def leave(timeout: float) -> Any:
        raise TimeoutError("by a handler")

    large = "x = torch.zeros(1 << 17)"
    assert run_cell(two, f"import torch; {large}").report.clean
    there = len(os.listdir("/dev/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(two, "poll", leave)
        with pytest.raises(TimeoutError, match="by a handler"):
            run_cell(two, f"{large}; y = 1")
    ran = run_cell(two, "y = 2")
    assert [values["y"] for values in ran.values.values()] == [2, 2]
    assert len(os.listdir("/dev/fd")) == there


def test_a_pool_that_a_handler_closes_while_it_waits_says_so(forkserver, monkeypatch):
    with LocalPool((Device("cpu", 0),), setup=SETUP) as pool:
        pool.start()
        ready = pool._ready

        def close_and_look(timeout: float) -> Any:
            pool.close()
            return ready(timeout)

        monkeypatch.setattr(pool, "_ready", close_and_look)
        with pytest.raises(PoolClosed, match="these replicas were stopped"):
            run_cell(pool, "x = 1")


def test_an_interrupt_that_the_process_ignores_ends_nothing(two):
    # As in the background of a shell's script.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        ran = run_cell(two, "import time; time.sleep(0.4); done = True")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran.report.clean
    assert not ran.report.interrupted
    assert ran.values[0]["done"]


def test_an_interrupt_while_a_dead_replica_is_replaced_leaves_it_to_be_replaced(two, monkeypatch):
    before, launch = pids(two), LocalPool._launch
    without_a_spare(two, monkeypatch)
    os.kill(before[0], signal.SIGKILL)
    eventually(two.dead, "the death is seen")

    def press_and_launch(self: LocalPool) -> object:
        press_ctrl_c()
        return launch(self)

    with monkeypatch.context() as patched:
        patched.setattr(LocalPool, "_launch", press_and_launch)
        with pytest.raises(KeyboardInterrupt):
            two.mend()
    two.mend()
    ran = run_cell(two, "n = int(strategy.reduce('sum', 1.0))")
    assert ran.report.clean, ran.report
    assert ran.values[0]["n"] == 2
    assert pids(two)[0] != before[0]
    assert pids(two)[1] == before[1]


def test_a_replica_that_cannot_be_replaced_now_is_replaced_later(two, monkeypatch):
    without_a_spare(two, monkeypatch)
    os.kill(pids(two)[1], signal.SIGKILL)
    eventually(two.dead, "the death is seen")

    def fail(self: LocalPool) -> None:
        raise OSError("no more processes")

    with monkeypatch.context() as patched:
        patched.setattr(LocalPool, "_launch", fail)
        with pytest.raises(OSError, match="no more processes"):
            two.mend()
    assert [death.replica_id for death in two.dead()] == [1]
    two.mend()
    assert run_cell(two, "n = int(strategy.reduce('sum', 1.0))").values[0]["n"] == 2


def test_two_requests_at_once_are_refused(two, tmp_path):
    import threading

    problems: list[BaseException] = []

    def second() -> None:
        try:
            run_cell(two, "pass")
        except BaseException as problem:
            problems.append(problem)

    def while_busy() -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        (tmp_path / "go").touch()

    with doing(while_busy, when=(tmp_path / "started").exists):
        run_cell(
            two,
            f"open({str(tmp_path / 'started')!r}, 'w')\nimport os, time\n"
            f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)",
        )
    assert isinstance(problems[0], ReplicaError)
    assert "at work for another thread" in str(problems[0])


def waits_in_select(thread: int) -> bool:
    frame = sys._current_frames()[thread]
    return frame.f_code.co_name == "select" and frame.f_code.co_filename == selectors.__file__


def test_a_cell_whose_replicas_a_signals_handler_stops_says_that():
    main, closed_by = threading.get_ident(), signal.getsignal(signal.SIGUSR1)
    with LocalPool((Device("cpu", 0),), setup=SETUP) as pool:
        pool.start()
        signal.signal(signal.SIGUSR1, lambda number, frame: pool.close())
        try:
            with (
                doing(lambda: signal.pthread_kill(main, signal.SIGUSR1), when=lambda: waits_in_select(main)),
                pytest.raises(PoolClosed, match="these replicas were stopped"),
            ):
                run_cell(pool, "import threading; threading.Event().wait()")
        finally:
            signal.signal(signal.SIGUSR1, closed_by)


@pytest.mark.parametrize("by", ["another thread", "what the cell shows"])
def test_a_cell_whose_replicas_are_stopped_meanwhile_says_that_and_nothing_of_a_kill(by):
    with LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP) as pool:
        pool.start()
        run_cell(pool, "import threading, torch")
        before = len(os.listdir("/proc/self/fd"))
        closing = threading.Thread(target=pool.close)

        def shown(replica_id: int, message: Any) -> None:
            if isinstance(message, Stream) and not pool.closed:
                closing.start() if by == "another thread" else pool.close()

        source = "big = torch.ones(1_000_000)\nif replica_id: print('at work'); threading.Event().wait()"
        with pytest.raises(PoolClosed, match="these replicas were stopped"):
            run_cell(pool, source, on_message=shown)
        if by == "another thread":
            closing.join(DEADLINE)
        assert pool.closed
    assert len(os.listdir("/proc/self/fd")) < before


# ---------------------------------------------------------------------- the end


def controller(source: str, tmp_path: Path, n: int) -> subprocess.Popen[str]:
    """A plain script with no guard that starts `n` replicas and goes on with `source`."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from driving import run_cell\n"
        "from mirror_nb.devices import Device\nfrom mirror_nb.pool.local import LocalPool\n"
        "from mirror_nb.strategies.mirrored import SETUP\n"
        "open('ran', 'a').write('x')\n"
        f"pool = LocalPool(tuple(Device('cpu', i) for i in range({n})), setup=SETUP)\npool.start()\n"
        + textwrap.dedent(source)
    )
    return subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(source: str, n: int = 2) -> subprocess.Popen[str]:
        started.append(controller(source, tmp_path, n))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


SAY = """
ran = run_cell(pool, 'import os; pid = os.getpid()')
print(*[values['pid'] for values in ran.values.values()], flush=True)
"""


def test_a_plain_script_needs_no_guard_nor_a_short_path_of_temporary_files_and_ends_its_replicas(
    script, tmp_path, monkeypatch
):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    process = script(SAY)
    replicas = [int(pid) for pid in process.stdout.readline().split()]
    assert process.wait(DEADLINE) == 0
    assert len(replicas) == 2
    eventually(lambda: all(map(gone, replicas)), "the replicas end with the script")
    assert (tmp_path / "ran").read_text() == "x"
    assert not list(folder.iterdir())


def test_where_no_path_is_short_enough_the_error_names_it(tmp_path, monkeypatch):
    folder = str(tmp_path / ("x" * 100))
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda: folder)
    with pytest.raises(ReplicaError, match=rf"has {len(folder)}, '{folder}', and /tmp was not used: set TMPDIR"):
        local._context()
    assert tempfile.gettempdir() == folder


def test_an_interrupt_while_replicas_are_stopped_leaves_none_that_does_not_end_by_itself(forkserver, monkeypatch):
    pool = LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP)
    pool.start()
    theirs = pids(pool)
    os.kill(theirs[1], signal.SIGSTOP)
    presses = iter([press_ctrl_c])
    join = multiprocessing.process.BaseProcess.join

    def interrupted(process: Any, timeout: float | None = None) -> None:
        next(presses, int)()
        join(process, timeout)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    eventually(lambda: all(map(gone, theirs)), "both end")


@pytest.fixture
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[set[int]], None]]:
    """Call it with the family of a controller that has ended: two seconds later no process, file or folder is left."""
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    def check(family: set[int]) -> None:
        eventually(lambda: all(map(gone, family)), "processes end", seconds=2)
        eventually(lambda: not list(folder.iterdir()), f"{list(folder.rglob('*'))} go", seconds=2)
        # What others make there meanwhile bears other names.
        made = set(os.listdir("/dev/shm")) - shared if os.path.isdir("/dev/shm") else set()
        assert not [name for name in made if "mirror" in name or name.startswith("torch_")]

    # Not `tmp_path`: below that name of a test a socket's path can be too long.
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        monkeypatch.setenv("TMPDIR", path)
        yield check


def test_kill_9_of_the_controller_leaves_nothing_of_replicas_that_are_stopped_hold_the_gil_or_wait(
    script, tmp_path, nothing_is_left_behind
):
    cell = f"""
import subprocess, sys
child = subprocess.Popen(['sleep', '1000'])
sys.__stdout__.flush()
open({str(tmp_path)!r} + f'/family{{replica_id}}', 'w').write(f'{{__import__("os").getpid()}} {{child.pid}}')
if replica_id == 1:
    import os, signal; os.kill(os.getpid(), signal.SIGSTOP)
if replica_id == 2:
    {HOLD_THE_GIL}
{WAIT_IN_A_COLLECTIVE}
"""
    process = script(f"run_cell(pool, {cell!r}, timeout=None)\nimport time; time.sleep(1000)\n", n=3)
    files = [tmp_path / f"family{r}" for r in range(3)]
    eventually(lambda: all(file.exists() and file.read_text().count(" ") for file in files), "the cell runs", 60)
    family = {int(pid) for file in files for pid in file.read_text().split()}
    family |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    assert len(family) >= 8, "replicas, their children, forkserver and nanny"
    process.kill()
    nothing_is_left_behind(family)


# For `os._exit`, which runs no line of ours either, `kill -9` above stands, too.
@pytest.mark.parametrize(
    "end", ["ctypes.string_at(0)", "os.kill(os.getpid(), 15)", "pool.close()"], ids=["a crash", "SIGTERM", "a close"]
)
def test_however_the_controller_ends_no_process_file_or_folder_is_left(script, end, nothing_is_left_behind):
    process = script(f"{SAY}\nimport ctypes, os, sys\nsys.stdin.readline()\n{end}")
    replicas = [int(pid) for pid in process.stdout.readline().split()]
    family = {*replicas, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))}
    assert os.listdir(os.environ["TMPDIR"]), "multiprocessing's folder, with its sockets"
    process.stdin.close()
    process.wait(DEADLINE)
    nothing_is_left_behind(family)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the forkserver")
def test_a_controller_that_is_killed_while_its_replicas_start_leaves_no_folder(monkeypatch):
    source = """
    import os, mirror_nb
    from mirror_nb.pool.local import LocalPool
    LocalPool._spec = lambda pool, replica_id: os.kill(os.getpid(), 9)
    mirror_nb.MirroredStrategy(["cpu:0", "cpu:1"]).run(int)
    """
    with tempfile.TemporaryDirectory() as path:
        monkeypatch.setenv("TMPDIR", path)
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL
        eventually(lambda: not os.listdir(path), "the folder of multiprocessing's sockets goes")


@pytest.mark.skipif(sys.platform != "linux", reason="needs the forkserver")
def test_a_kernel_that_is_asked_to_end_has_no_child_to_wait_for():
    source = """
    import psutil
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "mirror_nb")
    shell.run_line_magic("mirror", "start --devices cpu:0,cpu:1")
    children = psutil.Process().children(recursive=True)
    shell.exit_now = True
    print(len(children) >= 5, [child.is_running() for child in children].count(True), flush=True)
    """
    done = subprocess.check_output([sys.executable, "-c", textwrap.dedent(source)], timeout=60, text=True)
    assert done.splitlines()[-1] == "True 0"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_has_an_ended_replicas_number_by_now_is_left_alone():
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        began = nanny.start_time(other.pid)
        for start, code in ((f"{int(began) - 1}", None), (began, -signal.SIGKILL)):
            line = f"+ {other.pid} {start}\n".encode()
            subprocess.run([sys.executable, "-S", "-E", nanny.__file__], input=line, check=True)
            assert (nanny.exit_code(other.pid), nanny.start_time(other.pid)) == (code, began)


def test_a_fork_of_the_controller_does_not_keep_replicas_alive(script):
    process = script(
        f"import os, sys\nif os.fork() == 0:\n    import time; time.sleep(1000)\n{SAY}\nimport time; time.sleep(1000)"
    )
    replicas = [int(pid) for pid in process.stdout.readline().split()]
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    try:
        eventually(lambda: all(map(gone, replicas)), "the replicas end with their controller")
    finally:
        for child in children:
            if not gone(child.pid):
                child.kill()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
def test_semaphores_that_a_kill_left_half_made_go_with_the_session():
    """What a file is used for cannot be seen from its name alone: one that a process has mapped stays.

    A semaphore is mapped by another name than it has.
    """
    others = multiprocessing.get_context("spawn").Lock()
    living = Path("/dev/shm", f"sem.{others._semlock.name.removeprefix('/')}")
    name = uuid.uuid4().hex[:6]
    left, mapped, old = (Path("/dev/shm", prefix + name) for prefix in ("sem.", "sem.mp-", "torch_1_"))
    try:
        for path in (left, mapped, old):
            path.write_bytes(bytes(32))
        with mapped.open("r+b") as file:
            held = mmap.mmap(file.fileno(), 32)
        later = time.time() + 60
        os.utime(left, (later, later))
        os.utime(mapped, (later, later))
        os.utime(living, (later, later))
        os.utime(old, (0, 0))
        # A replica that is gone already, as after a kill -9 of the controller.
        subprocess.run([sys.executable, "-S", "-E", nanny.__file__], input=b"+ 999999999 1\n", check=True)
        assert [path.exists() for path in (left, mapped, old, living)] == [False, True, True, True]
        held.close()
    finally:
        for path in (left, mapped, old):
            path.unlink(missing_ok=True)


def test_a_death_reads_well():
    device = Device("cuda", 3)
    assert str(Death(3, device, 77, -9)).endswith("(SIGKILL): kill -9, or the system was out of memory")
    short = Death(3, device, 77, -9, short_of=2 * 2**30)
    assert str(short).endswith("the system was out of memory (2 GiB for all processes here)")
    assert str(Death(3, device, 77, -11, short_of=2**30)).endswith("(SIGSEGV): a crash in native code")
    assert str(Death(3, device, 77, 0)) == "replica 3 (cuda:3, pid 77) ended with exit code 0"
    assert str(Death(3, device, 77, None)) == "replica 3 (cuda:3, pid 77) ended"
    assert str(Death(3, device, 77, -64)) == "replica 3 (cuda:3, pid 77) was killed by signal 64 (SIGRTMAX)"


@pytest.fixture
def unstarted() -> Iterator[LocalPool]:
    pool = LocalPool((Device("cpu", 0),), setup="mirror_nb.nowhere:setup")
    yield pool
    pool.close()


def test_a_nanny_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(local, "NANNY_SECONDS", 0.05)
    pool = LocalPool((Device("cpu", 0),), setup=SETUP)
    pool.start()
    stuck = pool._nanny
    stuck.send_signal(signal.SIGSTOP)
    pool.close()
    assert stuck.returncode == -signal.SIGKILL


def test_replicas_that_cannot_start_say_why(unstarted):
    with pytest.raises(ReplicaError, match=r"could not form a process group.*No module named 'mirror_nb\.nowhere'"):
        unstarted.start()


BUSY = """
def setup(replica):
    raise RuntimeError("CUDA error: device(s) busy or unavailable\\nCompile with TORCH_USE_CUDA_DSA\\n")
"""


def test_of_an_error_of_several_lines_replicas_that_cannot_start_say_the_first(unstarted, tmp_path, monkeypatch):
    (tmp_path / "of_a_busy_gpu.py").write_text(BUSY)
    monkeypatch.syspath_prepend(tmp_path)
    unstarted._setup = "of_a_busy_gpu:setup"
    with pytest.raises(ReplicaError, match=r"exit code 1: RuntimeError: CUDA error: device\(s\) busy or unav"):
        unstarted.start()


def test_replicas_that_are_killed_as_they_start_leave_nothing_open(two, monkeypatch):
    launch, strikes = two._launch, iter([True] * 4)

    def struck():
        member = launch()
        if next(strikes, False):
            os.kill(member.process.pid, signal.SIGKILL)
        return member

    def opened():
        found = Counter()
        for descriptor in os.listdir("/proc/self/fd"):
            # The listing's own is closed by now.
            with contextlib.suppress(OSError):
                found[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{descriptor}"))] += 1
        # A survivor keeps its connection to the store until the forming that failed would have given up.
        del found["socket:[]"]
        return found

    without_a_spare(two, monkeypatch)
    before = opened()
    monkeypatch.setattr(two, "_launch", struck)
    os.kill(pids(two)[1], signal.SIGKILL)
    eventually(two.dead, "the death is noticed")
    for _ in range(4):
        # After some attempts it gives up, for now.
        with contextlib.suppress(ReplicaError):
            two.mend()
    recover(two)
    assert run_cell(two, "n = int(strategy.reduce('sum', 1.0))").values[1]["n"] == 2
    assert next(strikes, None) is None
    assert not opened() - before


@pytest.mark.parametrize(
    "source",
    [
        "if replica_id == 0: work = dist.all_reduce(torch.full((2,), 1000.0), async_op=True)",
        "if replica_id == 0:\n    with contextlib.suppress(Exception):\n"
        "        dist.all_reduce(torch.ones(2), async_op=True).wait(datetime.timedelta(seconds=0.1))",
        # As NCCL: on GPUs nobody waits.
        "class OnGpu(torch.Tensor):\n    is_cuda, is_cpu = True, False\ndist.group.WORLD._nccl = object()\n"
        "if replica_id == 0: work = dist.all_reduce(torch.ones(2).as_subclass(OnGpu), async_op=True)\n"
        "dist.group.WORLD._nccl = None",
    ],
    ids=["work", "late", "on a GPU"],
)
def test_what_a_cell_begins_and_leaves_is_not_taken_for_what_the_next_one_begins(two, source):
    imports = "import contextlib, datetime, torch\nimport torch.distributed as dist\n"
    ran = run_cell(two, imports + source)
    assert ran.report.clean
    assert "dropped: 1 on replica 0, 0 on replica 1" in ran.text[0]
    two.mend()
    ran = run_cell(two, "x = torch.ones(2); dist.all_reduce(x); total = x.tolist()")
    assert [values["total"] for values in ran.values.values()] == [[2.0, 2.0]] * 2
    assert not ran.text.get(0)


def specs(monkeypatch, *indices):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with LocalPool(tuple(Device("cuda", i) for i in indices), setup=SETUP) as pool:
        return [pool._spec(r) for r in range(len(indices))]


def test_replicas_see_each_gpu_once(monkeypatch):
    each = specs(monkeypatch, 3, 1)
    assert [spec.device for spec in each] == ["cuda:0", "cuda:1"]
    assert each[1].environment["CUDA_VISIBLE_DEVICES"] == "3,1"
    each = specs(monkeypatch, 2, 2, 1)
    assert [spec.device for spec in each] == ["cuda:0", "cuda:0", "cuda:1"]
    assert each[0].environment["CUDA_VISIBLE_DEVICES"] == "2,1"


def test_replicas_on_gpus_share_the_cores_as_those_on_cpus_do(monkeypatch):
    monkeypatch.setattr(local, "cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    assert [specs(monkeypatch, *range(n))[0].threads for n in (1, 2, 16)] == [6, 4, 1]


@pytest.mark.parametrize(
    ("name", "ours", "other"), [("NCCL_SOCKET_IFNAME", "lo", "eth0"), ("NCCL_RAS_ENABLE", "0", "1")]
)
def test_nccl_is_reached_from_this_machine_alone_unless_the_user_says_otherwise(monkeypatch, name, ours, other):
    monkeypatch.delenv(name, raising=False)
    assert specs(monkeypatch, 0)[0].environment[name] == ours
    monkeypatch.setenv(name, other)
    assert specs(monkeypatch, 0)[0].environment[name] == other


def test_what_cuda_keeps_of_a_replica_goes_with_it():
    with LocalPool((Device("cpu", 0),), setup=SETUP) as pool:
        pool.start()
        pid = run_cell(pool, "import os\npid = os.getpid()").values[0]["pid"]
        its, another = (Path(f"/dev/shm/cuda.shm.{os.getuid():x}.{owner}.1") for owner in (f"{pid:x}", "none"))
        for path in (its, another):
            path.touch()
    try:
        assert not its.exists()
        assert another.exists()
    finally:
        another.unlink()


def test_who_was_freed_from_an_all_reduce_of_gradients_is_not_shown_in_it_any_more(two):
    timeline = two.timeline()
    timeline.forget()
    source = """
import time, torch, torch.distributed as dist
from mirror_nb.collectives import process_group
network = torch.nn.Linear(4, 4)
for _ in range(4): network(torch.ones(1, 4)).sum().backward()
dist.barrier()
if replica_id == 0: network(torch.ones(1, 4)).sum().backward()
while 'barrier' in process_group.standing()[0].seen[0]: time.sleep(0.005)
raise OSError('full')
"""
    assert run_cell(two, source).errors == {0: "PeerFailed", 1: "OSError"}
    timeline.update()
    queued = [sample.serial for sample in decode(timeline.samples(0)) if sample.queued and not sample.ended]
    assert len(queued) == 5
    replicas = timeline.snapshot(now=clock() + 60_000_000_000).replicas
    assert [replica.in_collective for replica in replicas] == [None, None]


STEPS = """
import torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], 0.1)
for batch in {}:
    weight.grad = torch.ones(1)
    optimizer.step()
"""
DATA = "strategy.distribute_dataset(torch.zeros(4, 1), batch_size=2)"


def test_steps_that_some_replicas_alone_have_done_are_left_out_by_the_others(replicas):
    pool = replicas(2)
    timeline = pool.timeline()
    timeline.forget()
    for batches, ids in (
        ("range(1)", None),
        ("range(3)", [0]),
        (DATA, None),
        ("range(1)", None),
        ("range(2)", [1]),
        ("range(2 - replica_id)", None),
        (DATA, None),
        ("range(1)", None),
    ):
        ran = run_cell(pool, STEPS.format(batches), replicas=ids)
        assert ran.report.clean, ran.report.failures
    timeline.update()
    done = [[s.step for s in decode(timeline.samples(r)) if s.kind is Kind.STEP_ENDED] for r in range(2)]
    first = done[0][0] - 1
    assert [[step - first for step in steps] for steps in done] == [
        [1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14],
        [1, 5, 6, 7, 8, 9, 10, 12, 13, 14],
    ]
