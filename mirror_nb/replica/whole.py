"""Functions that an interrupt must not leave halfway: an optimizer's step with the counting that belongs to it.

    the replica's process      asks `runs` when an interrupt arrives, and insists until it does not
    code in the caller's own   `held_back()` answers Ctrl-C itself; who calls such functions asks `heed` after each

Knows frames and signals; knows no replica and no job.
"""

from __future__ import annotations

import multiprocessing.process
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar, final

import torch
from torch.utils.data import dataloader

SAY_SECONDS = 0.5
# Between two words of a replica that its end is held back: to be silent for long is to be ended.

_Function = TypeVar("_Function", bound=Callable[..., Any])

_whole: set[CodeType] = set()
_WHOLE = frozenset({(dataloader.__file__, "__init__"), (multiprocessing.process.__file__, "start")})
# By file and name: constructors of DataLoaders and their iterators, and the start of a process.


def whole(function: _Function) -> _Function:
    """Mark a function (a decorator): once begun it ends before an interrupt is raised."""
    _whole.add(function.__code__)
    return function


def runs(frame: FrameType | None) -> bool:
    """Whether what runs at `frame` lies inside such a function, an optimizer's step, an import or a loader's start.

    An optimizer's step cut short would leave replicas that differ; an import, modules that stay broken for good; the
    start of a DataLoader, workers that nobody ends.
    """
    while frame is not None:
        code = frame.f_code
        if code in _whole or (code.co_filename, code.co_name) in _WHOLE:
            return True
        if code.co_filename == "<frozen importlib._bootstrap>" and code.co_name == "_load_unlocked":
            return True
        if code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False


_waiting = False
# An interrupt has come inside `held_back`, and was not raised out of it. SIGINT is the process's, and so is this.


def held_back() -> AbstractContextManager[None]:
    """Return a context that answers Ctrl-C: at once, or after what `runs`, when `heed` is asked or at its end.

    Only in the main thread, where Python raises it, and where nobody else answers it; inside another one of these it
    changes nothing.
    """
    return _HeldBack()


def heed() -> None:
    """Raise the interrupt that has come inside `held_back`, if one has.

    Also one that was raised already: Python drops what is raised while it deletes an object.
    """
    if _waiting and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def _came(number: int, frame: FrameType | None) -> None:
    global _waiting
    _waiting = True
    if not runs(frame):
        raise KeyboardInterrupt


_signal: Callable[..., Any] = getattr(sys.modules.get("_signal"), "signal", signal.signal)
# What that wraps: an interrupt in the wrapper would come after the handler was changed.


@final
class _HeldBack(AbstractContextManager[None]):
    __slots__ = ("_mine",)

    def __init__(self) -> None:
        self._mine = False

    # Both whole: an interrupt in them is raised once the handler is the one it is to be.

    @whole
    def __enter__(self) -> None:
        global _waiting
        mine = threading.current_thread() is threading.main_thread()
        if mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            _waiting = False
            _signal(signal.SIGINT, _came)
            self._mine = True

    @whole
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _waiting
        if self._mine:
            _signal(signal.SIGINT, signal.default_int_handler)
            came, _waiting = _waiting, False
            if came and kind is None:
                raise KeyboardInterrupt
