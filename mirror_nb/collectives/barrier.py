"""Counters that replicas of one machine show each other, and waits for them. Knows nothing of tensors' contents.

Every replica has a cache line of its own that only it writes; all read all. Who waits first spins, giving its core
away at each turn, then sleeps in the kernel on the very counter that it waits for (a futex), in naps short enough
that a lost wake-up, a signal or an abort costs a few milliseconds at most.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from torch import Tensor

from mirror_nb.machine.cores import cores

LINE = 16
# Counters (int64) between the lines of two replicas: two cache lines, since processors fetch them in pairs.
NAP_SECONDS = 0.005
LOOK_AFTER_SECONDS = 0.05
# How often a replica that sleeps looks whether the others' processes are still there: it costs 30 µs.
_SPINS = 300
# About 150 µs where every replica has a core of its own.
_SPINS_CROWDED = 20
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(platform.machine())
_STRONGLY_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


@final
class Counter:
    """What a replica shows in its line, by its place there. Plain integers: an enum's would take twice the time."""

    POSTED = 0
    # Number of the last collective that it has come to.
    DONE = 1
    # Number of the last collective that it has finished.
    STAGED = 2
    # Pieces that it has laid out for the others.
    TAKEN = 3
    # Pieces that it has read of all others.
    REDUCED = 4
    # Sums that it has made for all.
    SLEEPING = 5
    # 1 while it sleeps, and whoever counts on has to wake it.
    LEFT = 6
    # 1 once it has left for good.
    PROCESS = 7
    # Its process id.
    CALLED = 8
    # Counted up by others, who wait for what this replica has begun and does not go on with.
    TOLD = 9
    # Number of the last collective of which it has said what it took it for.
    HOW_MANY = 10


@final
class Flags:
    """The lines of all replicas, seen from one of them.

    `memory`: `size_in_bytes(num_replicas)` bytes, zeros at first, that all replicas map.
    """

    def __init__(self, memory: Tensor, replica_id: int, num_replicas: int) -> None:
        self._memory = memory
        self._address = memory.data_ptr()
        self.values = integers(memory)
        self.replica_id = replica_id
        self.num_replicas = num_replicas
        self._me = replica_id * LINE
        others = [r for r in range(num_replicas) if r != replica_id]
        self._others = [[r * LINE + counter for r in others] for counter in range(Counter.HOW_MANY)]
        self._sleepers = self._others[Counter.SLEEPING]
        self._spins = _SPINS if num_replicas <= cores() else _SPINS_CROWDED
        self._fence = None if _STRONGLY_ORDERED else _fence_of(threading.Lock())
        self._asleep_at: int | None = None
        self._looked = 0.0
        self.values[self._me + Counter.PROCESS] = os.getpid()

    @staticmethod
    def size_in_bytes(num_replicas: int) -> int:
        """Return what the lines of so many replicas need."""
        return num_replicas * LINE * 8

    def show(self, counter: int, value: int) -> None:
        """Let all see that this replica has come to `value`; what it wrote before is seen before."""
        if self._fence is not None:
            self._fence()
        values = self.values
        values[self._me + counter] = value
        for sleeper in self._sleepers:
            if values[sleeper]:
                _wake(self._address + 8 * (self._me + counter))
                return

    def reached(self, counter: int, value: int) -> bool:
        """Whether every other replica has come to `value`."""
        values = self.values
        for index in self._others[counter]:
            if values[index] < value:
                return False
        if self._fence is not None:
            self._fence()
        return True

    def lagging(self, counter: int, value: int) -> list[int]:
        """Return the replicas that have not come to `value`."""
        return [index // LINE for index in self._others[counter] if self.values[index] < value]

    def shown(self, replica: int, counter: int) -> int:
        """Return what a replica shows."""
        return self.values[replica * LINE + counter]

    def spin(self, counter: int, value: int, ended: Callable[[], bool]) -> bool:
        """Wait for a short time; returns whether every other replica has come to `value`, or `ended()`."""
        values = self.values
        yield_ = _yield
        left = self._spins
        for index in self._others[counter]:
            while values[index] < value:
                if left <= 0 or ended():
                    return ended()
                left -= 1
                yield_()
        if self._fence is not None:
            self._fence()
        return True

    def nap(self, counter: int, value: int, ended: Callable[[], bool]) -> None:
        """Sleep until a replica that lags behind `value` may have come, or for `NAP_SECONDS`."""
        values = self.values
        values[self._me + Counter.SLEEPING] = 1
        try:
            for index in self._others[counter]:
                seen = values[index]
                if seen < value:
                    self._asleep_at = self._address + 8 * index
                    if not ended():
                        _sleep(self._asleep_at, seen)
                    return
        finally:
            self._asleep_at = None
            values[self._me + Counter.SLEEPING] = 0

    def wake_myself(self) -> None:
        """End a nap of another thread of this process; from any thread."""
        address = self._asleep_at
        if address is not None:
            _wake(address)

    def call(self, replicas: list[int]) -> None:
        """Have `replicas` go on with what they have begun and let lie."""
        for replica in replicas:
            index = replica * LINE + Counter.CALLED
            self.values[index] += 1
            _wake(self._address + 8 * index)

    def called(self, seen: int, seconds: float) -> int:
        """Sleep until another replica has called since `seen`, or for `seconds`; returns how many calls came."""
        index = self._me + Counter.CALLED
        if self.values[index] == seen:
            _sleep(self._address + 8 * index, seen, seconds)
        return self.values[index]

    def answer_myself(self) -> None:
        """End `called` of another thread of this process."""
        self.call([self.replica_id])

    def leave(self) -> None:
        """Tell all, once and for good, that this replica takes part no more."""
        values = self.values
        values[self._me + Counter.LEFT] = 1
        for counter in (Counter.POSTED, Counter.DONE, Counter.STAGED, Counter.TAKEN, Counter.REDUCED, Counter.TOLD):
            _wake(self._address + 8 * (self._me + counter))

    def missing(self) -> str | None:
        """Say which replica is gone, if one is: it left, or its process ended."""
        gone = [index // LINE for index in self._others[Counter.LEFT] if self.values[index]]
        if gone:
            return f"replica {gone[0]} has left the process group"
        now = time.monotonic()
        if now - self._looked < LOOK_AFTER_SECONDS:
            return None
        self._looked = now
        for index in self._others[Counter.PROCESS]:
            if self.values[index] and _has_ended(self.values[index]):
                return f"process {self.values[index]} of replica {index // LINE} has ended"
        return None


def integers(memory: Tensor) -> memoryview:
    """Look at bytes as 64-bit integers, one of which is read in 0.04 µs; an element of a tensor takes 3."""
    array: Any = memory.numpy()
    return memoryview(array).cast("q")


def _fence_of(lock: threading.Lock) -> Callable[[], None]:
    """Return a memory fence for processors that reorder what others see (ARM): to take a lock twice is one."""

    def fence() -> None:
        with lock:
            pass
        with lock:
            pass

    return fence


def _has_ended(process: int) -> bool:
    try:
        # The name in parentheses may hold anything; the state follows the last one.
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state in "ZX"


_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _system_call() -> Callable[..., int] | None:
    if sys.platform != "linux" or _FUTEX is None:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    call.restype = ctypes.c_long
    return call


_call = _system_call()
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF


def _sleep(address: int, seen: int, seconds: float = NAP_SECONDS) -> None:
    """Sleep while the counter at `address` holds `seen`. Comes back for a signal, whose handler then runs."""
    if _call is None:
        time.sleep(min(seconds, 0.0002))
        return
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    # The kernel compares the low half: the first on machines of this byte order.
    _call(_FUTEX, address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)


def _wake(address: int) -> None:
    if _call is not None:
        _call(_FUTEX, address, _WAKE, _ALL, None, None, 0)
