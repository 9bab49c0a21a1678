"""How tests drive a pool without a notebook, and how they wait: with a deadline, for a condition, never for a time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from mirror_nb.messages import KnownModule, NewModule, Plain, RunCell, Stream
from mirror_nb.mirroring.mirrors import Mirrors
from mirror_nb.notebook.source import cell_names
from mirror_nb.pool.base import Pool
from mirror_nb.pool.local import LocalPool, _listen
from mirror_nb.pool.report import Report
from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.packing import pack

DEADLINE = 20.0
# Seconds. Far more than anything takes; a test that reaches it has failed.


@dataclass(frozen=True, slots=True)
class Ran:
    """How a cell ended, by replica id."""

    report: Report
    text: dict[int, str]
    messages: dict[int, list[Any]]
    values: dict[int, dict[str, Any]]
    # What the names that the cell bound hold; `Stayed` for what did not travel.
    results: dict[int, Any]

    @property
    def errors(self) -> dict[int, str]:
        return {r: failure.type_name for r, failure in self.report.failures.items()}


def run_cell(
    pool: Pool,
    source: str,
    names: Mapping[str, Any] | None = None,
    *,
    replicas: Iterable[int] | None = None,
    timeout: float | None = DEADLINE,
    on_message: Callable[[int, Any], None] = lambda replica_id, message: None,
    working_directory: str | None = None,
) -> Ran:
    """Run a cell on a pool, the way the notebook does it, and open what came back."""
    ids = list(range(pool.size)) if replicas is None else list(replicas)
    found = cell_names(source)
    messages: dict[int, list[Any]] = {r: [] for r in ids}

    def take(replica_id: int, message: Any) -> None:
        messages[replica_id].append(message)
        on_message(replica_id, message)

    packed = pack(dict(names)) if names else None
    requests = {
        r: RunCell(
            source=source,
            names=packed.payload if packed else None,
            bound=found.bound,
            mentioned=found.mentioned,
            count=1,
            working_directory=working_directory or os.getcwd(),
            synchronize=True,
            owner=r == ids[0],
        )
        for r in ids
    }
    slabs = dict.fromkeys(ids, packed.slab if packed else None)
    try:
        report = pool.run(requests, slabs=slabs, on_message=take, timeout=timeout)
    finally:
        if packed:
            packed.close()
    text = {r: "".join(m.text for m in messages[r] if isinstance(m, Stream)) for r in ids}
    values, results = {}, {}
    for replica_id, answer in report.answers.items():
        if answer.done is not None and answer.done.payload is not None:
            values[replica_id], results[replica_id] = opened(answer.done.payload, answer.slab)
    return Ran(report, text, messages, values, results)


def opened(payload: Any, slab: int | None) -> tuple[dict[str, Any], Any]:
    """Return the names and the result of an `Exports` payload, each value rebuilt where it travelled."""
    mirrors = Mirrors("t")
    exports, _ = unpack(payload, slab, namespace={}, resolve=mirrors.resolve)

    def resolve(token: Any) -> Any:
        if token[0] != "held":
            return token
        # What an earlier cell has told of is not here: a class, in the place of any.
        return value(exports.names[token[1]]) if token[1] in exports.names else type(token[1], (), {})

    def value(export: Any) -> Any:
        if isinstance(export, Plain):
            return unpack(export.payload, None, namespace={}, resolve=resolve)[0]
        if isinstance(export, NewModule):
            return exports.modules.get(export.handle, export)
        return exports.states.get(export.handle, export) if isinstance(export, KnownModule) else export

    return {name: value(export) for name, export in exports.names.items()}, value(exports.result)


def plain(text: str) -> str:
    """Return text without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def eventually(condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
    """Return what `condition` gives once it is true; fail when it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.01)
    return found


def with_a_spare(pool: LocalPool) -> int:
    """Have the process now that waits to take a dead replica's place; return its pid."""

    def prepared() -> int | None:
        pool._spare_at = 0.0
        pool.prepare()
        return pool.spare()

    return int(eventually(prepared, "a spare is there"))


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def doing(action: Callable[[], None], when: Callable[[], Any]) -> Iterator[None]:
    """Do something from another thread, once, as soon as `when()` is true, while the block runs."""
    over = threading.Event()
    problems: list[BaseException] = []

    def wait() -> None:
        try:
            while not over.is_set():
                if when():
                    action()
                    return
                over.wait(0.01)
            problems.append(AssertionError("the block ended before its condition came true"))
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if problems:
        raise problems[0]


def press_ctrl_c() -> None:
    """Send this process what a terminal or Jupyter sends for an interrupt."""
    os.kill(os.getpid(), signal.SIGINT)


def launch(command: list[str], n: int, environment: Mapping[str, str], seconds: float = 120.0) -> None:
    """Start a program once per replica as torchrun does, and wait for all; fail with their words if one fails.

    torchrun itself would listen on every interface of the machine; here the store listens on loopback.
    """
    store, port = _listen()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes = []
    for i in range(n):
        mine = {"RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
        full = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **shared, **mine, **environment}
        processes.append(
            subprocess.Popen(command, env=full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    deadline = time.monotonic() + seconds
    try:
        said = [process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * n, "\n".join(said)[-4000:]
    del store


def running(shell: InteractiveShell) -> Callable[[str], Any]:
    """Return what runs a cell in a shell, shows nothing, and returns its value; its exception is raised."""

    def run_cell(source: str) -> Any:
        with capture_output():
            result = shell.run_cell(source)
        if result.error_before_exec or result.error_in_exec:
            raise result.error_before_exec or result.error_in_exec
        return result.result

    return run_cell
