"""What faults cost: from a kill -9 to the error that tells of it, and to the end of the next cell.

    python benchmarks/faults.py [trials]

Two, three and four CPU replicas; one of them is killed while no cell runs, in Python, and in a collective. A fresh
start of one replica (its process and its first all-reduce with the others) is what the next cell is compared with,
without the time that the same cell takes when nothing has happened; both are taken in turns with the deaths.
In `fit` the time is that from the moment when it has noticed the death to the end of the step that is done again, with
the callbacks that hear of it; a fresh start is then one with the first step of its optimizer.
A death finds a spare waiting; in `fit` also whatever there is EARLY seconds after the start; a fresh start has none.
Interrupts are timed from Ctrl-C to the end of the cell; the kill of the controller, to the last process gone.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from IPython.core.interactiveshell import InteractiveShell
from machine import report
from torch import nn

import mirror_nb as mnb
from mirror_nb.notebook.session import CellOptions, Session
from mirror_nb.pool.local import LocalPool
from mirror_nb.strategies.controller import ControllerPlace

TRIALS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
HOLD = {
    "in Python": "while True: pass",
    "in a collective": "if replica_id != VICTIM: strategy.reduce('sum', 1.0)\nelse:\n    while True: pass",
    "as it waits itself": "if replica_id == VICTIM: strategy.reduce('sum', 1)\nimport time; time.sleep(100)",
}
SETUP = (
    "import torch\nfrom torch import nn\nmodel = nn.Linear(100, 100)\n"
    "optimizer = torch.optim.Adam(model.parameters())\nkept = 5\n"
    "model(torch.ones(2, 100)).sum().backward(); optimizer.step()"
)
NEXT = "total = int(strategy.reduce('sum', kept))"


class Notebook:
    """A session that shows nothing."""

    def __init__(self, n: int) -> None:
        self.session = Session(InteractiveShell.instance())
        self.n = n
        self.session.start(",".join(f"cpu:{i}" for i in range(n)))
        self.cell(SETUP)

    def cell(self, source: str) -> Any:
        silent = io.StringIO()
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            return self.session.run_cell(source, CellOptions(quiet=True))

    @property
    def pool(self) -> LocalPool:
        pool = self.session.pool
        assert isinstance(pool, LocalPool)
        return pool

    def pid(self, replica_id: int) -> int:
        return self.pool.status()[replica_id].pid


def pool_of(strategy: mnb.MirroredStrategy) -> LocalPool:
    """Return the pool of a strategy whose replicas run."""
    place = strategy._place
    assert isinstance(place, ControllerPlace)
    assert place._pool is not None
    return place._pool


def with_a_spare(pool: LocalPool) -> None:
    """Have the spare now that the pool starts some seconds after it started replicas, and let it come to rest."""
    while pool.spare() is None:
        pool._spare_at = 0.0
        pool.prepare()
        time.sleep(0.5)


def struck(notebook: Notebook, source: str, strike: Any) -> tuple[float, str]:
    """Run a cell, strike once every replica is in it; return the seconds from the strike to its error, and which."""
    with tempfile.TemporaryDirectory() as folder:
        began: list[float] = []

        def wait() -> None:
            while len(list(Path(folder).iterdir())) < notebook.n:
                time.sleep(0.001)
            time.sleep(0.05)
            began.append(time.perf_counter())
            strike()

        thread = threading.Thread(target=wait)
        thread.start()
        name = "nothing"
        try:
            notebook.cell(f"open({folder!r} + f'/{{replica_id}}', 'w').close()\n{source}")
        except BaseException as error:
            name = type(error).__name__
        seconds = time.perf_counter() - began[0]
        thread.join()
    return seconds, name


def next_cell(notebook: Notebook) -> float:
    """Return the seconds of the next cell, which mends; it has to be right."""
    began = time.perf_counter()
    notebook.cell(NEXT)
    assert notebook.session._shell.user_ns["total"] == 5 * notebook.n
    return time.perf_counter() - began


def deaths(n: int) -> list[str]:
    notebook = Notebook(n)
    lines = []

    def trials(where: str, die: Callable[[int], float]) -> None:
        told, mended, usual, fresh = [], [], [], []
        for trial in range(TRIALS):
            fresh.append(_fresh(notebook))
            usual.append(next_cell(notebook))
            with_a_spare(notebook.pool)
            told.append(die(trial % n))
            mended.append(next_cell(notebook))
        lines.append(_line(f"{n} replicas, one killed {where}", told, mended, usual, fresh))

    def die_in(source: str, victim: int) -> float:
        strike = lambda: os.kill(notebook.pid(victim), signal.SIGKILL)  # noqa: E731
        seconds, name = struck(notebook, source.replace("VICTIM", str(victim)), strike)
        assert name == "ReplicaDied", name
        return seconds

    def die_idle(victim: int) -> float:
        pid = notebook.pid(victim)
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        while not notebook.pool.dead():
            time.sleep(0.001)
        return time.perf_counter() - began

    try:
        for where, source in HOLD.items():
            trials(where, functools.partial(die_in, source))
        trials("idle", die_idle)
    finally:
        notebook.session.stop()
    return lines


def _fresh(notebook: Notebook) -> float:
    """Return the seconds that one replica takes to start and join, with no names to get."""
    seconds = _start_one(notebook.pool)
    notebook.session._mend()
    return seconds


def _start_one(pool: LocalPool) -> float:
    pool._end_spare()
    os.kill(pool.status()[0].pid, signal.SIGKILL)
    while not pool.dead():
        time.sleep(0.001)
    began = time.perf_counter()
    pool.mend()
    return time.perf_counter() - began


STRUCK = 3
# The step of `fit` after which a replica is killed.
EARLY = 0.5
# Seconds from the start of replicas until one of them is killed, whether or not there is a spare.


class Kills(mnb.callbacks.Callback):
    """Kills a replica after a step, and times when that is noticed, and the next step from then."""

    told = seconds = 0.0

    def __init__(self, strategy: mnb.MirroredStrategy, victim: int, at: float | None) -> None:
        super().__init__()
        self._place = strategy._place
        self._pool, self._mend = pool_of(strategy), self._place.mend
        self._victim, self._at = victim, at
        self._began = 0.0

    def _note_and_mend(self) -> Any:
        self.told = self.told or time.perf_counter() - self._began
        return self._mend()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._began:
            self.seconds = self.seconds or time.perf_counter() - self._began - self.told
        elif batch == STRUCK if self._at is None else time.perf_counter() > self._at:
            if self._at is None:
                with_a_spare(self._pool)
            self._place.mend = self._note_and_mend  # type: ignore[method-assign]
            self._began = time.perf_counter()
            os.kill(self._pool.status()[self._victim].pid, signal.SIGKILL)

    def on_train_end(self, logs: Any = None) -> None:
        self._place.mend = self._mend  # type: ignore[method-assign]


@contextlib.contextmanager
def _fitting(n: int) -> Iterator[tuple[mnb.MirroredStrategy, mnb.Model]]:
    with mnb.MirroredStrategy([f"cpu:{i}" for i in range(n)]) as strategy:
        with strategy.scope():
            model = mnb.Model(nn.Linear(100, 100))
            model.compile(loss="mse")
        # Its replicas run from here on.
        strategy.run(_step)
        yield strategy, model


def fits(n: int) -> list[str]:
    x, y = torch.randn(2, 64 * 400, 100).unbind()

    def fit(model: mnb.Model, kills: Kills) -> Kills:
        with contextlib.redirect_stdout(io.StringIO()) as told:
            model.fit(x, y, batch_size=64, verbose=0, callbacks=[kills])
        assert kills.seconds, "no step after the death"
        assert "fit goes on after step " in told.getvalue(), told.getvalue()
        return kills

    fresh, rested, early = [], [], []
    with _fitting(n) as (strategy, model):
        model.fit(x[:640], y[:640], batch_size=64, verbose=0)
        for trial in range(TRIALS):
            fresh.append(_fresh_step(strategy))
            rested.append(fit(model, Kills(strategy, trial % n, None)))
            with _fitting(n) as (young, another):
                early.append(fit(another, Kills(young, trial % n, time.perf_counter() + EARLY)))
    joined, first = map(statistics.median, zip(*fresh, strict=True))
    lines = []
    for where, kills in (("in fit", rested), (f"in fit, {EARLY} s old", early)):
        told, took = [one.told for one in kills], [one.seconds for one in kills]
        middle = statistics.median(took)
        lines.append(
            f"{f'{n} replicas, one killed {where}':<44} told {statistics.median(told):.3f} s (worst {max(told):.3f}), "
            f"the step again in {middle:.3f} s (worst {max(took):.3f}): "
            f"{middle / first:.2f} × a fresh start of one with its first step ({first:.3f}; without: {joined:.3f})"
        )
    return lines


def _fresh_step(strategy: mnb.MirroredStrategy) -> tuple[float, float]:
    """Return the seconds that one replica takes to start and join, and with the first step of an optimizer."""
    joined = _start_one(pool_of(strategy))
    began = time.perf_counter()
    strategy.run(_step)
    return joined, joined + time.perf_counter() - began


def _step() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.optim.Adam([parameter]).step()


def _line(what: str, told: list[float], mended: list[float], usual: list[float], fresh: list[float]) -> str:
    later, cell, start = map(statistics.median, (mended, usual, fresh))
    return (
        f"{what:<44} told {statistics.median(told):.3f} s (worst {max(told):.3f}), next cell {later:.3f} s, "
        f"usually {cell:.3f}: {(later - cell) / start:.2f} × a fresh start of one ({start:.3f})"
    )


def interrupts() -> list[str]:
    notebook = Notebook(2)
    lines = []
    cells = {
        "a loop": "while True: pass",
        "a collective": "if replica_id: strategy.reduce('sum', 1.0)\nwhile True: pass",
        "a DataLoader's wait": (
            "import time\nfrom torch.utils.data import DataLoader, Dataset\nclass Slow(Dataset):\n"
            "    def __len__(self): return 1000\n    def __getitem__(self, i): time.sleep(0.2); return i\n"
            "for batch in DataLoader(Slow(), num_workers=1): pass"
        ),
        "a C call that never ends": (
            "import ctypes; mutex = ctypes.create_string_buffer(256)\nlock = ctypes.PyDLL(None).pthread_mutex_lock\n"
            "lock(mutex)\nif replica_id == 0: lock(mutex)\nwhile True: pass"
        ),
    }
    try:
        for where, source in cells.items():
            times = []
            for _ in range(TRIALS):
                before = [notebook.pid(replica_id) for replica_id in range(2)]
                seconds, name = struck(notebook, source, lambda: os.kill(os.getpid(), signal.SIGINT))
                assert name == "KeyboardInterrupt", name
                times.append(seconds)
                next_cell(notebook)
                stayed = [pid == notebook.pid(replica_id) for replica_id, pid in enumerate(before)]
                assert stayed == ["never ends" not in where, True], stayed
            lines.append(f"interrupt in {where:<28} {statistics.median(times):.3f} s (worst {max(times):.3f})")
        times = []
        for _ in range(TRIALS):
            source = "if replica_id: strategy.reduce('sum', 1.0)\nelse: raise OSError"
            began = time.perf_counter()
            with contextlib.suppress(OSError):
                notebook.cell(source)
            times.append(time.perf_counter() - began)
            next_cell(notebook)
        lines.append(
            f"one raises, the other in a collective     {statistics.median(times):.3f} s (worst {max(times):.3f})"
        )
    finally:
        notebook.session.stop()
    return lines


def controller_killed() -> str:
    source = (
        "import mirror_nb as mnb, time\ns = mnb.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "s.run(lambda: None)\nprint('ready', flush=True)\ntime.sleep(100)"
    )
    times = []
    for _ in range(TRIALS):
        process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        began = time.perf_counter()
        process.kill()
        while any(_lives(child) for child in family):
            time.sleep(0.001)
        times.append(time.perf_counter() - began)
        process.wait()
        process.stdout.close()
    return f"kill -9 of the controller, all gone       {statistics.median(times):.3f} s (worst {max(times):.3f})"


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    found = [f"faults over CPU replicas, medians of {TRIALS}"]
    for count in (2, 3, 4):
        found += [*deaths(count), *fits(count)]
    report("faults", [*found, *interrupts(), controller_killed()])
