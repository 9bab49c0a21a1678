"""What users do to their replicas: each is an error with a name, or works, and the next cell is right."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from driving import doing, eventually, gone, plain, run_cell
from IPython.core.interactiveshell import InteractiveShell
from torch.utils.data import _utils as torch_loaders
from torch.utils.data import dataloader

from mirror_nb.collectives.barrier import LOOK_AFTER_SECONDS
from mirror_nb.devices import Device, resolve
from mirror_nb.errors import DeviceError, ReplicaError, TransferError
from mirror_nb.notebook.options import CellOptions
from mirror_nb.notebook.session import Session
from mirror_nb.pool.failures import raise_for
from mirror_nb.pool.following import UNEVEN_AFTER
from mirror_nb.pool.local import LocalPool, _visible, stop_forkserver
from mirror_nb.replica import runtime
from mirror_nb.strategies.mirrored import SETUP
from mirror_nb.transfer import packing, slab


@pytest.fixture
def two(replicas: Callable[[int], LocalPool]) -> LocalPool:
    return replicas(2)


def pids(pool: LocalPool) -> list[int]:
    return [line.pid for line in pool.status()]


def goes_on(pool: LocalPool, name: str = "kept") -> None:
    """The next cell is right on every replica, which have kept their names."""
    pool.mend()
    ran = run_cell(pool, f"n = int(strategy.reduce('sum', {name}))")
    assert ran.report.clean, ran.report.failures
    assert {values["n"] for values in ran.values.values()} == {3 * pool.size}


# ---------------------------------------------------------------------- leaving


@pytest.mark.parametrize("leave", ["import sys; sys.exit(1)", "exit()", "quit()", "raise SystemExit"])
def test_leaving_a_cell_ends_no_replica(two, leave):
    before = pids(two)
    run_cell(two, f"kept = 3\nif replica_id == 1:\n    {leave}\n")
    assert pids(two) == before
    goes_on(two)


def test_a_replica_that_ends_itself_is_named_with_its_code_and_the_others_keep_theirs(two):
    before = pids(two)
    ran = run_cell(two, "kept = 3\nimport os\nif replica_id == 1: os._exit(9)\nstrategy.reduce('sum', 1)")
    with pytest.raises(Exception, match=r"replica 1 .* ended with exit code 9"):
        raise_for(ran.report, two.devices)
    two.mend()
    assert pids(two)[0] == before[0]
    run_cell(two, "kept = 3")
    goes_on(two)


def test_an_error_for_want_of_examples_says_so_and_no_other_does(two):
    batches = "import torch\nfor (x,) in strategy.distribute_dataset((torch.ones(3),), batch_size=2):"
    for source, told in ((f"{batches} torch.stack(list(x))", True), (f"{batches} pass\nif replica_id: 1 / 0", False)):
        report = run_cell(two, source).report
        with pytest.raises((RuntimeError, ZeroDivisionError)) as caught:
            raise_for(report, two.devices)
        assert ("replica 1 (cpu:1) had none of the batch's 1 examples" in caught.value.__notes__[0]) is told
        two.mend()


def test_a_destroyed_process_group_is_there_again_in_the_next_cell(two):
    run_cell(two, "kept = 3\nimport torch.distributed as dist\ndist.destroy_process_group()")
    goes_on(two)


def test_only_one_replica_destroys_the_group(two):
    ran = run_cell(two, "kept = 3\nimport torch.distributed as dist\nif replica_id == 1: dist.destroy_process_group()")
    # Nothing was begun, and nothing is dropped.
    assert set(ran.text.values()) == {""}
    goes_on(two)


def test_a_monitored_barrier_that_was_caught_costs_this_cell_alone_its_connections(two):
    ran = run_cell(
        two,
        """
kept = 3
import datetime, time, torch, torch.distributed as dist
part = [torch.ones(1), torch.ones(1)] if replica_id == 0 else None
if replica_id == 1:
    time.sleep(1)
said = []
barrier = lambda: dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.1))
for call in (barrier, lambda: dist.scatter(torch.zeros(1), part)):
    try:
        call()
    except RuntimeError as error:
        said.append(str(error))
""",
    )
    assert ran.report.clean
    assert "Rank 1 failed to pass monitoredBarrier" in ran.values[0]["said"][0]
    assert (
        "scatter of float32[1] and 2 more failed: an earlier collective did not end in time"
        in ran.values[0]["said"][1]
    )
    two.mend()
    ran = run_cell(two, "got = torch.zeros(1)\ndist.scatter(got, part)")
    assert ran.report.clean, ran.report.failures
    assert [values["got"].item() for values in ran.values.values()] == [1, 1]
    goes_on(two)


def test_a_subgroup_of_before_an_error_is_told_to_be_gone(two):
    run_cell(two, "kept = 3\nimport torch, torch.distributed as dist\npair = dist.new_group([0, 1])")
    run_cell(two, "if replica_id: raise OSError('once')\nstrategy.reduce('sum', 1.0)")
    two.mend()
    ran = run_cell(two, "dist.all_reduce(torch.ones(1), group=pair)")
    assert ran.errors == {0: "UsageError", 1: "UsageError"}
    assert all("is no longer there" in failure.message for failure in ran.report.failures.values())
    two.mend()
    goes_on(two)


def test_a_group_may_be_destroyed_and_made_again_in_a_cell(two):
    ran = run_cell(
        two,
        "kept = 3\nimport torch, torch.distributed as dist\ndist.destroy_process_group()\n"
        "dist.init_process_group()\nt = torch.ones(1)\ndist.all_reduce(t)\nn = t.item()",
    )
    assert ran.values[1]["n"] == 2
    goes_on(two)


def test_a_cell_that_initialises_as_under_torchrun_may_run_again(two):
    for _ in range(2):
        ran = run_cell(
            two,
            "kept = 3\nimport torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo', rank=replica_id, world_size=2)\n"
            "t = torch.ones(1)\ndist.all_reduce(t)\nn = t.item()",
        )
        assert ran.values[1]["n"] == 2
    goes_on(two)


# ---------------------------------------------------------------------- exceptions


def test_an_exception_that_cannot_be_pickled_keeps_its_name_message_and_lines(two):
    ran = run_cell(
        two,
        "kept = 3\nclass Stubborn(Exception):\n"
        "    def __reduce__(self): raise TypeError('never')\n"
        "def work():\n    raise Stubborn('no way')\nif replica_id == 0: work()\nstrategy.reduce('sum', 1)",
    )
    with pytest.raises(Exception, match="no way") as caught:
        raise_for(ran.report, two.devices)
    assert type(caught.value).__name__ == "Stubborn"
    shown = plain("\n".join(caught.value._render_traceback_()))
    assert "raise Stubborn('no way')" in shown
    assert "raised by replica 0" in shown
    goes_on(two)


@pytest.mark.parametrize("broken", ["__str__", "__repr__"])
def test_an_exception_that_cannot_even_be_shown_frees_the_others(two, broken):
    ran = run_cell(
        two,
        f"kept = 3\nclass Mute(Exception):\n    def {broken}(self): raise OSError('mute')\n"
        "if replica_id == 0: raise Mute\nstrategy.reduce('sum', 1)",
    )
    assert 0 in ran.report.failures
    goes_on(two)


def test_a_recursion_without_end_is_an_error_of_its_replica(two):
    ran = run_cell(two, "kept = 3\ndef f(): return f()\nif replica_id == 1: f()")
    assert ran.errors == {1: "RecursionError"}
    goes_on(two)


def test_to_show_a_recursion_asks_no_module_for_each_of_its_frames(two):
    run_cell(
        two,
        "import inspect\nasked, real = [], inspect.ismodule\n"
        "def counting(thing):\n    asked.append(1)\n    return real(thing)\n"
        "inspect.ismodule = counting\ndef f(): return f()\nf()",
    )
    counting = "inspect.ismodule = real\nimport sys\ncounted = len(asked), len(sys.modules)"
    for values in run_cell(two, counting).values.values():
        asked, modules = values["counted"]
        assert 0 < asked < 20 * modules


def test_what_a_failed_cell_held_is_let_go(two):
    """The memory of a failed cell is there for the next one."""
    ran = run_cell(
        two,
        "kept = 3\nimport weakref\nclass Large: pass\n"
        "def fails():\n    held = Large()\n    global mark\n    mark = weakref.ref(held)\n    held.itself = held\n"
        "    raise MemoryError('no more')\nfails()",
    )
    assert set(ran.errors.values()) == {"MemoryError"}
    ran = run_cell(two, "alive = mark() is not None")
    assert [values["alive"] for values in ran.values.values()] == [False, False]
    goes_on(two)


@pytest.mark.parametrize("seconds", [0.05, 1000.0])
def test_workers_of_a_loader_end_with_the_cell_that_was_stopped(two, tmp_path, seconds):
    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with doing(press, when=lambda: all((tmp_path / f"in{r}").exists() for r in range(2))):
        ran = run_cell(
            two,
            f"""
kept = 3
import time
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 100
    def __getitem__(self, i):
        open({str(tmp_path)!r} + f'/in{{replica_id}}', 'w').close()
        time.sleep({seconds})
        return i
for batch in DataLoader(Slow(), num_workers=2): pass
""",
        )
    assert ran.report.interrupted
    assert not ran.report.deaths
    goes_on(two)
    children = [child for pid in pids(two) for child in psutil.Process(pid).children(recursive=True)]
    eventually(lambda: all(gone(child.pid) for child in children), "the loader's workers end")


def test_loaders_that_are_let_go_of_do_not_wait_as_long_as_torch_would_have_them():
    """The name is torch's own; where it is gone, this and the code that sets it have to go."""
    usual = torch_loaders.MP_STATUS_CHECK_INTERVAL
    assert "_utils.MP_STATUS_CHECK_INTERVAL" in inspect.getsource(dataloader._MultiProcessingDataLoaderIter)
    with runtime._impatient_loaders():
        assert usual > torch_loaders.MP_STATUS_CHECK_INTERVAL > 0
    assert usual == torch_loaders.MP_STATUS_CHECK_INTERVAL


def test_an_interrupt_that_python_drops_is_raised_again(two, tmp_path):
    """Python prints and forgets exceptions that come while an object is deleted."""

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with doing(press, when=lambda: all((tmp_path / f"in{r}").exists() for r in range(2))):
        ran = run_cell(
            two,
            f"""
kept = 3
import time
class Slow:
    def __del__(self):
        open({str(tmp_path)!r} + f'/in{{replica_id}}', 'w').close()
        end = time.monotonic() + 0.3
        while time.monotonic() < end: pass
while True:
    Slow()
    time.sleep(0.1)
""",
        )
    assert ran.report.interrupted
    assert not ran.report.deaths
    goes_on(two)


# ---------------------------------------------------------------------- output and input


def test_a_hundred_megabytes_of_output_arrive(two):
    counts = {0: 0, 1: 0}

    def count(replica_id: int, message: object) -> None:
        counts[replica_id] += len(getattr(message, "text", ""))

    line = "x" * 999
    ran = run_cell(two, f"kept = 3\nfor _ in range(50_000): print({line!r})", on_message=count, timeout=120)
    assert ran.report.clean, ran.report.failures
    assert counts == {0: 50_000_000, 1: 50_000_000}
    goes_on(two)


def test_binary_junk_on_stderr_from_c_code_and_children_is_shown_escaped(two):
    ran = run_cell(
        two,
        "kept = 3\nimport os, subprocess\nos.write(2, bytes(range(256)) * 300)\n"
        "subprocess.run(['sh', '-c', 'printf \"\\\\377\\\\376end\" >&2'])",
    )
    assert ran.report.clean
    for text in ran.text.values():
        assert text.count("\\xff\\xfe") + text.count("\\xfe\\xff") >= 1
        assert "end" in text
    goes_on(two)


def test_a_question_to_the_user_is_refused_and_hangs_nothing(two):
    ran = run_cell(two, "kept = 3\nname = input('name? ')")
    assert set(ran.errors.values()) == {"StdinNotImplementedError"}
    ran = run_cell(two, "import sys\nline = sys.stdin.readline()")
    assert not ran.report.deaths
    ran = run_cell(two, "import getpass\nsecret = getpass.getpass()")
    assert ran.report.failures
    goes_on(two)


@pytest.mark.parametrize("source", ["%mirror status", "%%mirrored\n1", "import mirror_nb; mirror_nb.picker()"])
def test_our_own_magics_in_a_mirrored_cell_say_that_they_belong_to_ordinary_ones(two, source):
    assert run_cell(two, "kept = 3\n%load_ext mirror_nb").report.clean
    ran = run_cell(two, source)
    assert set(ran.errors.values()) == {"UsageError"}
    assert "to ordinary cells" in str(ran.report.failures[0]) or "to an ordinary cell" in str(ran.report.failures[0])
    goes_on(two)


def test_what_a_magic_says_of_its_call_is_told_once(two):
    ran = run_cell(two, "%there_is_no_such_magic")
    assert (ran.text, set(ran.errors.values())) == ({0: "", 1: ""}, {"UsageError"})
    assert ran.report.failures[0].message == "Line magic function `%there_is_no_such_magic` not found."


@pytest.mark.parametrize("source", ["exit()", "quit", "del optimizer.param_groups"])
def test_what_a_cell_ends_or_breaks_of_its_own_costs_no_other_cell(two, source):
    made = "kept = 3\nimport torch\noptimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)"
    assert run_cell(two, made).report.clean
    ran = run_cell(two, source)
    assert set(ran.errors.values()) == (set() if source.startswith("del") else {"UsageError"})
    assert run_cell(two, "del optimizer").report.clean
    goes_on(two)


# ---------------------------------------------------------------------- left running


def test_threads_left_running_do_not_hold_the_cell_up_and_their_text_comes_with_the_next(two):
    ran = run_cell(
        two,
        "kept = 3\nimport threading\ngo, over = threading.Event(), threading.Event()\n"
        "def late():\n    go.wait(20); print('late'); over.set()\nthreading.Thread(target=late, daemon=True).start()",
    )
    assert ran.report.clean
    ran = run_cell(two, "go.set(); done = over.wait(20)")
    assert all("late" in text for text in ran.text.values())
    goes_on(two)


def test_a_thread_that_fails_is_told_and_harms_nothing(two):
    ran = run_cell(
        two, "kept = 3\nimport threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join(20)"
    )
    assert ran.report.clean
    assert all("ZeroDivisionError" in text for text in ran.text.values())
    goes_on(two)


def test_processes_left_running_end_with_the_replicas(tmp_path):
    with LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP) as pool:
        pool.start()
        ran = run_cell(
            pool, "import subprocess\npid = subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL).pid"
        )
        left = [values["pid"] for values in ran.values.values()]
        assert not any(map(gone, left))
    eventually(lambda: all(map(gone, left)), "what cells started ends with the replicas")


def test_a_fork_in_a_cell_is_no_second_replica(two):
    ran = run_cell(
        two,
        "kept = 3\nimport os\nchild = os.fork()\nif child == 0:\n    print('from the child')\n    os._exit(0)\n"
        "code = os.waitpid(child, 0)[1]",
    )
    assert ran.report.clean, ran.report.failures
    assert {values["code"] for values in ran.values.values()} == {0}
    goes_on(two)


def test_a_loader_whose_worker_dies_is_an_error_of_its_replica(two):
    ran = run_cell(
        two,
        "kept = 3\nimport os, signal\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class Deadly(Dataset):\n    def __len__(self): return 4\n"
        "    def __getitem__(self, i): os.kill(os.getpid(), signal.SIGKILL)\n"
        "if replica_id == 0: list(DataLoader(Deadly(), num_workers=1))\nstrategy.reduce('sum', 1)",
    )
    assert ran.errors[0] == "RuntimeError"
    assert "worker" in ran.report.failures[0].message
    goes_on(two)


# ---------------------------------------------------------------------- names, files, devices


@pytest.mark.parametrize("name", ["devices", "messages", "worker", "random", "queue"])
def test_a_file_of_the_users_may_be_named_as_one_of_ours(two, tmp_path, name):
    (tmp_path / f"{name}.py").write_text("mine = 41\n")
    ran = run_cell(
        two,
        f"kept = 3\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})\nbefore = sys.modules.pop({name!r}, None)\n"
        f"import {name} as users\nmine = users.mine + 1\nsys.path.remove({str(tmp_path)!r})\n"
        f"sys.modules.pop({name!r})\nif before: sys.modules[{name!r}] = before\ndel users, before",
        working_directory=str(tmp_path),
    )
    assert ran.report.clean, ran.report.failures
    assert ran.values[1]["mine"] == 42
    goes_on(two)


def test_replicas_start_in_a_folder_with_files_named_as_ours_and_pythons(tmp_path, monkeypatch):
    """A notebook's folder stands first in its path, and the forkserver is started there."""
    for name in ("devices", "messages", "worker", "pool", "mirror_nb", "torch", "queue", "random", "resource"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    stop_forkserver()
    with LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP) as pool:
        pool.start()
        assert run_cell(pool, "n = int(strategy.reduce('sum', 1.0))").values[0]["n"] == 2


def test_a_working_directory_that_is_gone_stops_no_cell(two, tmp_path):
    folder = tmp_path / "moved"
    folder.mkdir()
    run_cell(two, "kept = 3", working_directory=str(folder))
    folder.rmdir()
    assert run_cell(two, "x = 1", working_directory=str(folder)).report.clean
    run_cell(two, "x = 1", working_directory=os.getcwd())
    goes_on(two)


def test_an_empty_cuda_visible_devices_means_no_gpu_and_says_what_there_is():
    with pytest.raises(DeviceError, match="cuda:0"):
        resolve("cuda:0", 0)
    assert [str(device) for device in resolve(None, 0)] == ["cpu:0"]


def test_a_cell_may_set_cuda_visible_devices(two):
    ran = run_cell(two, "kept = 3\nimport os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nx = 1")
    assert ran.report.clean
    goes_on(two)


# ---------------------------------------------------------------------- memory and sleep


def test_memory_that_cannot_be_had_is_an_error_with_a_way_out(two, monkeypatch):
    """What large values travel in: /dev/shm full, or the limit on memory reached."""
    import torch

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(slab.os, "memfd_create", full, raising=False)
    with pytest.raises((TransferError, OSError), match=r"No space left|memory"):
        packing.pack(torch.ones(3_000_000)).close()
    monkeypatch.undo()
    run_cell(two, "kept = 3")
    goes_on(two)


def test_a_full_dev_shm_is_no_matter_to_values_that_travel(two):
    """They travel in memory without a name, which /dev/shm's size does not bound."""
    import torch

    free = os.statvfs("/dev/shm").f_bavail
    ran = run_cell(two, "kept = 3\ntotal = float(large.sum())", {"large": torch.ones(8_000_000)})
    assert ran.values[1]["total"] == 8_000_000
    assert os.statvfs("/dev/shm").f_bavail >= free - 16


def test_a_suspended_replica_is_not_a_dead_one(two, tmp_path):
    """As when a laptop's lid was closed."""
    before = pids(two)
    started = tmp_path / "in"

    def suspend() -> None:
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: all(psutil.Process(p).status() == psutil.STATUS_STOPPED for p in before), "they stop")
        assert two.dead() == []
        wake = threading.Timer(0.5, lambda: [os.kill(pid, signal.SIGCONT) for pid in before])
        wake.start()
        wake.join()

    with doing(suspend, when=started.exists):
        ran = run_cell(
            two,
            f"kept = 3\nimport time, torch\nopen({str(started)!r}, 'w').close()\nend = time.monotonic() + 1\n"
            "while time.monotonic() < end: time.sleep(0.01)\nn = int(strategy.reduce('sum', 1.0))",
        )
    assert ran.report.clean, ran.report.failures
    assert ran.values[0]["n"] == 2
    assert pids(two) == before
    goes_on(two)


def test_a_crash_in_native_code_shows_where_it_was(two):
    ran = run_cell(
        two,
        "import ctypes, os\ndef into_the_void():\n    ctypes.string_at(0)\n"
        "if replica_id == 1:\n    os.write(2, b'last line of C\\n')\n    into_the_void()\nstrategy.reduce('sum', 1)",
    )
    with pytest.raises(Exception, match="SIGSEGV") as caught:
        raise_for(ran.report, two.devices)
    shown = plain("\n".join(caught.value._render_traceback_())) + ran.text[1]
    assert "replica 1's last words" in shown
    assert "line 3 in into_the_void" in shown
    assert "last line of C" in shown
    assert "mirror_nb/replica" not in shown
    two.mend()


# ---------------------------------------------------------------------- programs of their own

SCRIPT = """
import os, sys, numpy, torch
import mirror_nb as mnb
from torch.utils.data import DataLoader, TensorDataset
strategy = mnb.MirroredStrategy(["cpu:0", "cpu:1"])
big = torch.ones(2_000_000)
loader = DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=8)
with strategy.scope():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(batch):
    optimizer.zero_grad(); model(batch[0]).sum().backward(); optimizer.step()
    return big.sum()
MARK
totals = [strategy.run(step, args=(batch,)) for batch in strategy.distribute_dataset(loader)]
print("total", float(strategy.reduce("sum", totals[0], axis=None)), torch.isfinite(model.weight).all().item())
strategy.close()
"""


def script(tmp_path: Path, mark: str = "") -> list[str]:
    file = tmp_path / "program.py"
    file.write_text(SCRIPT.replace("MARK", mark))
    return [sys.executable, str(file)]


def test_a_full_dev_shm_and_a_closed_lid_cost_a_session_nothing(tmp_path):
    """No room in /dev/shm, as in Docker; and all of it stopped at once, for longer than any of its waits."""
    command, proof = [], ""
    mount = 'mount -t tmpfs -o size=64k none /dev/shm && (head -c 1M /dev/zero >/dev/shm/all 2>/dev/null; exec "$@")'
    own = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]
    # Where that is forbidden, only the lid is closed.
    if shutil.which("unshare") and subprocess.run([*own, "true"], capture_output=True, check=False).returncode == 0:
        command, proof = own, "free = os.statvfs('/dev/shm').f_bavail; assert free == 0, free; "
    mark = f"{proof}strategy.run(lambda: 1); open({str(tmp_path / 'in')!r}, 'w').close(); sys.stdin.readline()"
    program = subprocess.Popen(
        [*command, *script(tmp_path, mark)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        eventually(lambda: (tmp_path / "in").exists() or program.poll() is not None, "its replicas run", 100)
        parent = psutil.Process(program.pid)
        everyone = [parent, *parent.children(recursive=True)]
        assert len(everyone) >= 4, "the forkserver and two replicas"
        assert program.stdin is not None
        program.stdin.write("go on\n")
        program.stdin.flush()
        for process in everyone:
            process.suspend()
        eventually(lambda: all(p.status() == psutil.STATUS_STOPPED for p in everyone), "they stop")
        threading.Event().wait(UNEVEN_AFTER + LOOK_AFTER_SECONDS + 0.5)
        for process in everyone:
            process.resume()
        said, _ = program.communicate(timeout=60)
    finally:
        program.kill()
        program.wait()
    assert "total 4000000.0 True" in said, said


def test_a_users_own_mirror_nb_is_named_by_pythons_error(tmp_path):
    (tmp_path / "mirror_nb.py").write_text("mine = 1\n")
    ended = subprocess.run(
        [sys.executable, "-c", "import mirror_nb as mnb; mnb.MirroredStrategy()"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "has no attribute 'MirroredStrategy'" in ended.stderr


def test_replicas_start_and_cells_run_where_the_folder_is_gone(tmp_path, monkeypatch):
    """The notebook was moved while its kernel ran."""
    session = Session(InteractiveShell())
    folder = tmp_path / "moved"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    stop_forkserver()
    try:
        session.start("cpu:0,cpu:1")
        assert session.run_cell("int(strategy.reduce('sum', 1))", CellOptions(quiet=True)) == 2
    finally:
        session.stop()


@pytest.mark.parametrize(
    ("visible", "indices", "given"),
    [("", [0, 1], "0,1"), ("5,3,7", [0, 2], "5,7"), ("GPU-ab, GPU-cd", [1], "GPU-cd")],
)
def test_replicas_see_gpus_by_the_names_that_the_notebook_has_for_them(visible, indices, given, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _visible(indices) == given


def test_a_gpu_beyond_cuda_visible_devices_is_named_with_what_there_is(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    with pytest.raises(ReplicaError, match="GPU 2 is not among CUDA_VISIBLE_DEVICES=5,3"):
        _visible([0, 2])
