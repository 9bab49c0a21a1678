"""Ctrl-C while replicas are at work, and while what they bring is taken over: not raised in the middle of that."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, final

from mirror_nb.environment import sources

_signal: Callable[..., Any] = getattr(sys.modules.get("_signal"), "signal", signal.signal)
_handler_of: Callable[..., Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
# What these wrap takes a tenth of the time: no enumeration is made of each handler.


class Interrupts:
    """Collects SIGINT instead of raising it, so that no message is torn in the middle of its reading.

    `readable` is a descriptor that tells of one. Kept: to make a pipe for every call takes as long as sending it.
    """

    def __init__(self) -> None:
        self.count = 0
        # Since the request began.
        self.raised: BaseException | None = None
        # By the program's own handler, instead of KeyboardInterrupt.
        self.readable, self._writable = os.pipe()
        os.set_blocking(self._writable, False)
        os.set_blocking(self.readable, False)
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        # One that came after the last look must not wake this request.
        self.taken()
        self.count, self.raised = 0, None
        self._take_over()
        return self

    def _take_over(self) -> None:
        self._before = _signal(signal.SIGINT, self._note) if answered() else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if _is_the_programs(self._before):
            # It decides: one that only notes that the program is to stop, once its epoch has ended, ends nothing here.
            try:
                self._before(number, frame)
                return
            except KeyboardInterrupt:
                pass
            except BaseException as error:
                self.raised = error
            finally:
                # It may have set another one, for the next time.
                if _handler_of(signal.SIGINT) != self._note:
                    self._take_over()
        self.count += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._writable, b"!")

    def taken(self) -> int:
        """Return how many interrupts there were, and clear the descriptor."""
        if self.count:
            with contextlib.suppress(BlockingIOError):
                os.read(self.readable, 64)
        return self.count

    def __exit__(self, *exception: object) -> None:
        before, self._before = self._before, None
        if before is not None:
            _signal(signal.SIGINT, before)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.readable)
        os.close(self._writable)


@final
class Deferred:
    """Holds Ctrl-C back in a block that must not be left halfway; `came` tells of it, and who has the block raises.

    One more, `patience` seconds after the first, is raised at once: what is taken over runs code of the user's too.
    """

    def __init__(self, patience: float) -> None:
        self.came = False
        self._patience = patience
        self._first = 0.0
        # When it came first.
        self._before: Any = None

    def __enter__(self) -> Deferred:
        if answered():
            self._before = _signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.came and now >= self._first + self._patience:
            raise KeyboardInterrupt
        if not self.came:
            self.came, self._first = True, now

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            _signal(signal.SIGINT, self._before)


def _is_the_programs(handler: Any) -> bool:
    """Whether the user's own code has set this handler; those of asyncio and of kernels make way for ours."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    module = getattr(handler, "__module__", "")
    return module == "__main__" or module in sources.users()


def answered() -> bool:
    """Whether Ctrl-C is answered in this thread: not where the process ignores it, as in the background of a script.

    Nor where the handler is not Python's (None), which could not be put back.
    """
    mine = threading.current_thread() is threading.main_thread()
    return mine and _handler_of(signal.SIGINT) not in (None, signal.SIG_IGN)
