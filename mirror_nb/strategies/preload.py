"""What the forkserver loads before it forks replicas, and what it loads once they run. To import it is its effect.

Not collecting garbage meanwhile saves an eighth of a second of the one that it takes, and objects that are frozen
then are not walked by the replicas' collectors, so that their pages stay shared.

The first replicas do not wait for what only training and widgets need, above all torch._dynamo, which the first
optimizer step of a process imports and which takes as long as torch itself. The forkserver loads that LATER_SECONDS
after it forked the first, or began, between two forks (in a thread, a fork would copy half an import). From then on
replicas begin with it: those of the first cell, where the user needed a while to write it, and one that takes a dead
one's place in `fit`. The first ones do, too, where the controller has it already, by an optimizer of its own
(`pool.local` asks for it): each would load it for its first step, at the same time. Who dies in these seconds is
noticed all the same, and replaced after them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

LATER_SECONDS = 3.0
LOOK_SECONDS = 0.05
# From the controller's end to that of a forkserver that is still loading.
_GPU_NODES = {"cuda": ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")}
# One of them is there where torch can have a GPU of this kind: of a card's, a Jetson's, Windows' Linux, AMD's driver.
_forkserver = os.getpid()


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """Load without collecting garbage, and not longer than the controller lives."""
    done = threading.Event()

    def watch(controller: int) -> None:
        while not done.wait(LOOK_SECONDS):
            if os.getppid() != controller:
                os.kill(_forkserver, signal.SIGKILL)

    watching = threading.Thread(target=watch, args=(os.getppid(),), daemon=True)
    watching.start()
    gc.disable()
    try:
        yield
        # What is loaded by now replicas need not look through for the user's own, which would copy its pages.
        importlib.import_module("mirror_nb.environment.sources").note()
    finally:
        gc.freeze()
        gc.enable()
        done.set()
        # No thread may be there when a replica is forked.
        watching.join()


def _load_the_rest(*_: object) -> None:
    # A replica that finds one broken tells so where it is used; the forkserver has to live.
    with contextlib.suppress(Exception), _loading():
        # By name: it lies above.
        importlib.import_module("mirror_nb.training.model")
        if not _gpus():
            _do_a_step()
        # What a cell needs that shows widgets.
        importlib.import_module("ipykernel.zmqshell")
        importlib.import_module("mirror_nb.replica.shell").be_no_kernel()
    rests = importlib.import_module("mirror_nb.pool.local").RESTS
    before = _name_this_process(rests)
    if before != rests:
        os.register_at_fork(after_in_child=functools.partial(_name_this_process, before))


def _name_this_process(name: str) -> str:
    """Name it, for the pool and for `top`; return the name it had. The pool asks only where there is /proc."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "r+", encoding="utf-8", errors="replace") as file:
        before = file.read().rstrip("\n")
        file.write(name)
        return before
    return name


def _do_a_step() -> None:
    """Do what imports torch._dynamo and more; nothing that starts a thread."""
    torch = importlib.import_module("torch")
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    optimizer.zero_grad()
    parameter.grad = torch.zeros(1)
    optimizer.step()


def _load_later() -> None:
    signal.setitimer(signal.ITIMER_REAL, LATER_SECONDS)


@functools.cache
def _load_after_the_first() -> None:
    """Put it off: the first replicas are busy now, with the same import perhaps."""
    if os.getpid() == _forkserver and "mirror_nb.training.model" not in sys.modules:
        _load_later()


def _gpus() -> bool:
    """Whether there may be one, which the compiler's import could touch: no replica could be forked after that."""
    kind = importlib.import_module("torch").accelerator.current_accelerator()
    # The kind that torch was built for, whether or not one is there.
    return kind is not None and any(map(os.path.exists, _GPU_NODES.get(kind.type, ("/",))))


with _loading():
    # A replica's shell imports them as it is made, which is half of the time that it takes. By name: of notebooks
    # only the floors above know.
    for _name in ("application", "completer", "completerlib", "oinspect"):
        importlib.import_module(f"IPython.core.{_name}")
    importlib.import_module("mirror_nb.replica.worker")
    importlib.import_module("mirror_nb.strategies.mirrored")

# Newer Pythons, 3.14.8 say, have the controller's own arguments follow what the forkserver is to run.
if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    # Who started it has held Ctrl-C back from it; the user's own processes come from here, too, and would not hear it.
    # One that has come meanwhile is dropped.
    _before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, _before)
    # Held back as well: a controller that has made an optimizer may have sent it by now.
    signal.signal(signal.SIGALRM, _load_the_rest)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    # Python's own way out walks what is loaded once more, and triton tells of all that it finds frozen as leaked.
    atexit.register(os._exit, 0)
    os.register_at_fork(after_in_parent=_load_after_the_first)
    _load_later()
