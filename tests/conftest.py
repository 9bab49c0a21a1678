"""What every test needs: skipping for what is not here, replicas to share, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import driving
import psutil
import pytest
import torch
from crew import Crew
from driving import eventually
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
from two_sides import Notebook, with_torch

import mirror_nb as mnb
from mirror_nb.devices import Device
from mirror_nb.pool import local, nanny
from mirror_nb.pool.local import LocalPool, stop_forkserver
from mirror_nb.pool.recovery import recover
from mirror_nb.strategies.mirrored import SETUP

_MARK = "MIRROR_NB_TEST_SESSION"
# In the environment of every process that the tests start, however it was started.


if sys.platform == "linux":
    # Python's own way is another from 3.14 on: tests' data sets, classes inside functions, cannot be sent to workers.
    multiprocessing.set_start_method("fork", force=True)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell has what its scripts start with & ignore Ctrl-C: tests press it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Networks of tests are small: threads that wait for each other's part on cores that others need take half of the
    # processor's time. Replicas have their own, and so have programs that tests start.
    torch.set_num_threads(1)
    # Not as a hook of this file: what is measured waits for the notebooks' cells, too.
    config.pluginmanager.register(Turns())
    if importlib.util.find_spec("nbval"):
        kernel = importlib.import_module("nbval.kernel")
        kernel.start_new_kernel = once_more(kernel.start_new_kernel)


def once_more(start: Callable[..., Any]) -> Callable[..., Any]:
    """Start a notebook's kernel a second time where it dies at once, before it runs anything.

    Until it listens at the ports that were free as it was told of them, seconds on a busy machine, others may.
    """

    def started(*args: Any, **kwargs: Any) -> Any:
        try:
            return start(*args, **kwargs)
        except RuntimeError:
            return start(*args, **kwargs)

    return started


class Turns:
    """What is marked `alone` runs while no other process runs a test of this checkout."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with open(driving.__file__, "rb") as queue, open(__file__, "rb") as file:
            # Who waits to be alone holds it: other tests would begin before the last one has ended, for minutes.
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(file, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
            fcntl.flock(queue, fcntl.LOCK_UN)
            try:
                return (yield)
            finally:
                # Closing does not do it for a process that the test forked and that still runs.
                fcntl.flock(file, fcntl.LOCK_UN)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: give one process the files that share what takes long to start.

    Each JupyterLab, with a Chromium, a kernel and replicas, costs 25 seconds of a processor.
    """
    # Where it is not installed, nobody asks.
    from xdist.scheduler import LoadFileScheduling

    class BySharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "browser" if "/browser/" in nodeid else str(super()._split_scope(nodeid))

    return BySharing(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = {
        "gpu": torch.cuda.is_available(),
        "browser": bool(shutil.which("chromium") and importlib.util.find_spec("playwright")),
    }
    for item in items:
        for marker, there in here.items():
            if not there and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"needs a {marker}"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[object]:
    # What tests import stays: to look through it again and again takes a tenth of the time.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    # What is there by now stays: to look through it takes half a second, at each of hundreds of collections.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After the last test: no process, no shared memory, no listening port and no temporary file of ours."""
    folder = tmp_path_factory.mktemp("tmp")
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.exists() else set()
    mark = uuid.uuid4().hex
    saved, tempfile.tempdir = tempfile.tempdir, str(folder)
    environment = {name: os.environ.get(name) for name in (_MARK, "TMPDIR")}
    os.environ.update({_MARK: mark, "TMPDIR": str(folder)})
    # A process has one forkserver. Where a test needs it before there are replicas, it has to do for them, too; and
    # where one has no use for it any more, the next one's replicas need not wait until it has loaded torch again.
    multiprocessing.set_forkserver_preload(local._PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        for place in ("notebook.session", "bench.command", "demo.command"):
            patch.setattr(f"mirror_nb.{place}.stop_forkserver", lambda: None)
        yield
    stop_forkserver()
    try:
        eventually(lambda: not started(mark), f"processes left behind: {started(mark)}")
        left = [path for path in shared.iterdir() if path not in before] if shared.exists() else []
        assert unused(left) == []
        listening = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening == []
        # multiprocessing removes its folder when its process ends, not when that is killed; torch keeps its cache of
        # compiled code.
        left = [path.relative_to(folder) for path in folder.rglob("*")]
        assert [path for path in left if not path.parts[0].startswith(("pymp-", "torchinductor_"))] == []
    finally:
        tempfile.tempdir = saved
        for name, value in environment.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def started(mark: str) -> list[str]:
    """Return the processes that bear the mark, this one and Python's resource tracker left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                command = " ".join(process.cmdline())
                # A zombie has no command line; the tracker ends with this process.
                if command and "resource_tracker" not in command:
                    found.append(f"{process.pid}: {command}")
        except psutil.Error:
            pass
    return found


def unused(files: list[Path]) -> list[Path]:
    """Return those that no process has mapped: what is in use is somebody else's, since ours have all ended."""
    there = {}
    for path in files:
        # Others may remove theirs meanwhile.
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            there[path] = status.st_dev, status.st_ino
    used = nanny.in_use() if there else set()
    return [path for path, file in there.items() if file not in used and path.exists()]


@pytest.fixture(autouse=True)
def own_search_path() -> Iterator[None]:
    """Cells may change where modules are looked for, and that follows them here."""
    saved = list(sys.path)
    yield
    sys.path[:] = saved


@pytest.fixture(scope="session")
def forkserver() -> None:
    """Wait until replicas begin with what training needs: those that live long would each load it for two seconds."""
    if sys.platform == "linux" and not local._forkserver_rests():
        local.warm_up()
        # Once it has started a process, it knows the signal.
        process = multiprocessing.get_context("forkserver").Process(target=int)
        process.start()
        process.join()
        os.kill(local._forkserver_pid(), signal.SIGALRM)
        eventually(local._forkserver_rests, "the forkserver has loaded all", seconds=60)


@pytest.fixture(scope="module")
def shell(forkserver: None) -> Iterator[InteractiveShell]:
    """A shell without a kernel whose mirrored cells run on two replicas."""
    config = Config({"HistoryManager": {"enabled": False}, "HistoryAccessor": {"enabled": False}})
    made = InteractiveShell.instance(config=config)
    made.extension_manager.load_extension("mirror_nb")
    made.run_line_magic("mirror", "start --devices cpu:0,cpu:1")
    yield made
    made.extension_manager.unload_extension("mirror_nb")
    InteractiveShell.clear_instance()


@pytest.fixture(scope="session")
def replicas(nothing_is_left: None, forkserver: None) -> Iterator[Callable[[int], LocalPool]]:
    """Give a pool of so many CPU replicas, shared by all tests; each finds it whole, with names of earlier ones."""
    # To end before `nothing_is_left` looks, it asks for it: by itself pytest 8.0 goes by who used which last.
    pools: dict[int, LocalPool] = {}

    def pool_of(n: int) -> LocalPool:
        if n not in pools:
            pools[n] = LocalPool(tuple(Device("cpu", i) for i in range(n)), setup=SETUP)
            pools[n].start()
        pools[n].mend()
        # As sessions do: one that is not filled yet would get another's values after the test's own failure.
        recover(pools[n])
        return pools[n]

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture
def notebook() -> Notebook:
    """A notebook and two replicas without processes, that have imported torch."""
    return with_torch()


@pytest.fixture(scope="module")
def two() -> Iterator[mnb.MirroredStrategy]:
    """A strategy with two CPU replicas; each file has its own."""
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


@pytest.fixture(scope="module")
def crews(forkserver: None) -> Iterator[dict[int, Crew]]:
    """Two and three processes that are replicas without a pool."""
    crews = {size: Crew(size) for size in (2, 3)}
    yield crews
    for crew in crews.values():
        crew.close()
