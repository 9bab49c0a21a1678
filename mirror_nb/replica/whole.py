"""Functions that an interrupt must not leave halfway: an optimizer's step with the counting that belongs to it.

    the replica's process      asks `runs` when an interrupt arrives, and insists until it does not
    code in the caller's own   `held_back` answers Ctrl-C itself; who calls such functions asks `heed` after each

Knows frames and signals; knows no replica and no job.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar, final

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

_whole: set[CodeType] = set()


def whole(function: _Function) -> _Function:
    """Mark a function (a decorator): once begun it ends before an interrupt is raised."""
    _whole.add(function.__code__)
    return function


def runs(frame: FrameType | None) -> bool:
    """Whether what runs at `frame` lies inside such a function, an optimizer's step or an import.

    An optimizer's step cut short would leave replicas that differ; an import, modules that stay broken for good.
    """
    while frame is not None:
        code = frame.f_code
        if code in _whole:
            return True
        if code.co_filename == "<frozen importlib._bootstrap>" and code.co_name == "_load_unlocked":
            return True
        if code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False


@final
class HeldBack:
    """Ctrl-C in this very process, put off while such a function runs."""

    def __init__(self) -> None:
        self._waiting = False
        self._depth = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Answer Ctrl-C inside; only in the main thread, where Python raises it, and where nobody else answers it."""
        mine = threading.current_thread() is threading.main_thread()
        if not mine or self._depth or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        self._depth, self._waiting = 1, False
        signal.signal(signal.SIGINT, self._came)
        try:
            yield
            self.heed()
        finally:
            self._depth = 0
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def heed(self) -> None:
        """Raise the interrupt that was put off, if one was."""
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt

    def _came(self, number: int, frame: FrameType | None) -> None:
        self._waiting = True
        if not runs(frame):
            self.heed()
