"""The forkserver: what replicas begin with, and that nobody waits for what it loads meanwhile."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable

import psutil
import pytest
from driving import DEADLINE, eventually, gone, run_cell

from mirror_nb.pool import local, nanny
from mirror_nb.pool.local import LocalPool, _wait_for

SCRIPT_SECONDS = 100.0
# Deadline of a script that loads torch several times.
LOADED = "import sys; loaded = 'torch._dynamo' in sys.modules, 'mirror_nb.training.model' in sys.modules"


@pytest.fixture
def two(replicas: Callable[[int], LocalPool]) -> LocalPool:
    return replicas(2)


def kill(pool: LocalPool, replica_id: int) -> None:
    os.kill(pool.status()[replica_id].pid, signal.SIGKILL)


THE_REST = """
import os, signal, sys, time
import mirror_nb.strategies.preload as preload
def left(): return signal.getitimer(signal.ITIMER_REAL)[0]
print('torch._dynamo' in sys.modules, 0 < left() <= preload.LATER_SECONDS)
for _ in range(2):
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    sys.stdout.flush()
    if os.fork() == 0:
        print('child', left())
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    print(left() > 1)
signal.setitimer(signal.ITIMER_REAL, 0.01)
while 'mirror_nb.training.model' not in sys.modules or signal.getitimer(signal.ITIMER_REAL)[0]:
    time.sleep(0.01)
import gc, threading
print('torch._dynamo' in sys.modules, gc.isenabled(), threading.active_count())
"""
WITH_A_GPU = """
import signal, sys, torch
torch.accelerator.current_accelerator = lambda check_available=False: torch.device('cuda')
import mirror_nb.strategies.preload as preload
signal.setitimer(signal.ITIMER_REAL, 0)
preload._GPU_NODES = {'cuda': ('/dev/null',)}
preload._load_the_rest()
print('mirror_nb.training.model' in sys.modules, 'torch._dynamo' in sys.modules)
preload._GPU_NODES = {}
preload._load_the_rest()
print('torch._dynamo' in sys.modules)
preload._GPU_NODES = {'cuda': ('/dev/none',)}
preload._load_the_rest()
print('torch._dynamo' in sys.modules)
"""
ELSEWHERE = """
import signal, sys
del sys.orig_argv[1:]
import mirror_nb.strategies.preload
print(signal.getitimer(signal.ITIMER_REAL))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each of these says in a process that begins with torch alone."""
    sources = (THE_REST, WITH_A_GPU, ELSEWHERE)
    # As multiprocessing starts a forkserver: an argument names the module; the controller's own may follow.
    source = f"""# from multiprocessing.forkserver import main
import os, sys, torch
for source in {sources!r}:
    if os.fork() == 0:
        exec(source, {{}})
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    print(end="\\0", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", source, "train.py"], capture_output=True, text=True, timeout=SCRIPT_SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return dict(zip(sources, done.stdout.split("\0")[:-1], strict=True))


def test_a_replica_that_is_started_later_begins_with_what_training_needs(two):
    os.kill(local._forkserver_pid(), signal.SIGALRM)
    kill(two, 1)
    eventually(two.dead, "the death is seen")
    two.mend()
    assert run_cell(two, LOADED).values[1]["loaded"] == (True, True)


def test_all_is_loaded_first_where_the_controller_has_made_an_optimizer(two, monkeypatch):
    asked = []
    monkeypatch.setattr(local, "warm_up_to_train", lambda: asked.append(list(modules)))
    for modules in ({}, {"torch._dynamo": None}):
        kill(two, 1)
        eventually(two.dead, "the death is seen")
        with monkeypatch.context() as patch:
            there = {name: module for name, module in sys.modules.items() if name != "torch._dynamo"}
            patch.setattr(sys, "modules", {**there, **modules})
            two.mend()
    assert asked == [["torch._dynamo"]]


@pytest.mark.skipif(sys.platform != "linux", reason="needs the forkserver")
def test_a_forkserver_that_others_have_started_is_not_asked_to_load(monkeypatch):
    theirs = subprocess.Popen(["sleep", "1000"])
    try:
        monkeypatch.setattr(local, "_forkserver_pid", lambda: theirs.pid)
        local.warm_up_to_train()
        # A signal that it does not expect would have ended it first.
        theirs.terminate()
        assert theirs.wait(DEADLINE) == -signal.SIGTERM
    finally:
        theirs.kill()
        theirs.wait()


def test_the_rest_is_loaded_by_itself_after_a_while_but_not_before_the_first_replicas_run(said):
    # Put off by the first fork alone; a replica inherits no timer.
    lines = said[THE_REST].split("\n")[:-1]
    assert lines == ["False True", "child 0.0", "True", "child 0.0", "False", "True True 1"]


def test_where_a_gpu_may_be_the_compiler_is_left_out(said):
    assert said[WITH_A_GPU].split() == ["True", "False", "False", "True"]


def test_imported_elsewhere_it_sets_no_timer(said):
    assert said[ELSEWHERE] == "(0.0, 0.0)\n"


def test_a_cell_may_use_the_alarm_signal(two):
    ran = run_cell(
        two,
        "import signal\nbefore = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL\n"
        "rang = []\nsignal.signal(signal.SIGALRM, lambda *_: rang.append(1))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
        "while not rang: pass\nsignal.signal(signal.SIGALRM, signal.SIG_DFL)",
    )
    assert ran.report.clean, ran.report.failures
    assert [values["before"] for values in ran.values.values()] == [True, True]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells of an end that nobody has reaped")
def test_a_death_is_noticed_while_the_forkserver_loads(two):
    """Their parent is busy for two seconds then; here it is stopped, and tells nothing before the end of this."""
    end = os.pidfd_open(two.status()[0].pid)
    os.kill(local._forkserver_pid(), signal.SIGSTOP)
    try:
        kill(two, 0)
        select.select([end], [], [], DEADLINE)
        # At once: as soon as the kernel tells of it.
        assert [(death.replica_id, death.exit_code) for death in two.dead()] == [(0, -signal.SIGKILL)]
    finally:
        os.close(end)
        os.kill(local._forkserver_pid(), signal.SIGCONT)
    two.mend()
    assert run_cell(two, "total = strategy.reduce('sum', 1.0)").report.clean


def test_an_end_that_the_forkserver_has_reaped_and_not_told_yet_is_waited_for(monkeypatch):
    class Process:
        pid = 1
        codes = iter([None, None, -11])
        exitcode = property(lambda self: next(self.codes))

        def join(self, timeout: float) -> None:
            pass

    monkeypatch.setattr(nanny, "exit_code", lambda pid: None)
    assert _wait_for(Process()) == -11


@pytest.mark.parametrize("stage", ["before", "later"])
def test_a_forkserver_that_loads_ends_with_its_controller(stage):
    source = textwrap.dedent(
        f"""
        import multiprocessing.forkserver, os, signal, time
        from mirror_nb.pool import local
        local.warm_up()
        server = multiprocessing.forkserver._forkserver
        if {stage!r} == "later":
            import multiprocessing
            multiprocessing.get_context("forkserver").Process(target=int).start()
            os.kill(server._forkserver_pid, signal.SIGALRM)
        print(server._forkserver_pid, flush=True)
        time.sleep(1000)
        """
    )
    controller = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        server = psutil.Process(pid)
        eventually(lambda: server.num_threads() > 1, "it loads")
    finally:
        controller.kill()
        controller.wait()
        controller.stdout.close()
    eventually(lambda: gone(pid), "it ends", seconds=2)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the forkserver")
def test_a_forkserver_that_loads_outlives_a_press_of_stop_and_processes_of_the_users_own_hear_theirs():
    # Jupyter sends it to all processes of a kernel. The second forkserver is not started together with
    # multiprocessing's tracker, and is asked for all before it listens.
    source = """
    import multiprocessing, os, signal
    from mirror_nb.pool import local
    server = multiprocessing.forkserver._forkserver
    for begin in (local.warm_up, local.warm_up_to_train):
        begin()
        pid = server._forkserver_pid
        os.kill(pid, signal.SIGINT)
        process = multiprocessing.get_context("forkserver").Process(target=signal.pause)
        process.start()
        with open(f"/proc/{process.pid}/status") as file:
            print([line.split()[1] for line in file if line.startswith("SigBlk")])
        print(server._forkserver_pid == pid, local._forkserver_rests())
        process.kill()
        process.join()
        local.stop_forkserver()
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_SECONDS, check=True)
    assert done.stdout == "['0000000000000000']\nTrue False\n['0000000000000000']\nTrue True\n"
