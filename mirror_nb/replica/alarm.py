"""An alarm that wakes a waiting thread after a time and that costs next to nothing when it is stopped before.

Knows no threads and no requests: one side sets it, another waits on its descriptor.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any, final


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


_CLOCK_MONOTONIC = 1
_CLOSE_ON_EXEC = 0o2000000


@final
class Alarm:
    """Set by one thread, waited for by another.

    On Linux a timer of the kernel's, which sleeping threads need not be woken for to set or stop it (1 µs); elsewhere
    `start` wakes the waiting thread at once.
    """

    def __init__(self, seconds: float) -> None:
        self._rang = threading.Semaphore(0)
        self._library: Any = None
        if sys.platform == "linux":
            # In `os` from Python 3.13 on.
            self._library = ctypes.CDLL(None, use_errno=True)
            self._descriptor = self._library.timerfd_create(_CLOCK_MONOTONIC, _CLOSE_ON_EXEC)
            if self._descriptor < 0:
                raise OSError(ctypes.get_errno(), "no timer for the replica")
            self._off = ctypes.byref(_Setting())
            self._on = ctypes.byref(_Setting(value=_Time(int(seconds), int(seconds % 1 * 1e9))))

    def start(self) -> None:
        """Wake the waiting thread once, `seconds` from now."""
        if self._library is None:
            self._rang.release()
        else:
            self._set(self._on)

    def stop(self) -> None:
        """Do not ring, if that has not happened yet."""
        if self._library is not None:
            self._set(self._off)

    def wait(self) -> None:
        """Wait until it rings."""
        if self._library is None:
            self._rang.acquire()
        else:
            os.read(self._descriptor, 8)

    def _set(self, setting: Any) -> None:
        self._library.timerfd_settime(self._descriptor, 0, setting, None)
