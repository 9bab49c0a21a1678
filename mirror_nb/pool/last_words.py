"""What a replica's process said as it died: where it was, and what C code wrote to stderr.

A crash leaves its stack, and so does a process that will not stop when the pool asks it. Both outlive the process:
the stack in a file without a name, the text in a pipe whose reading end the pool holds too. Knows no messages and
no replicas.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from multiprocessing import reduction
from pathlib import Path
from typing import Any, final

from mirror_nb.machine.nameless import nameless_file

TELL = signal.SIGUSR2
TELL_SECONDS = 0.5
# It takes 1 to 9 ms, and longer on cores that others need.
MOST_BYTES = 1 << 16
MOST_LINES = 12
_OURS = re.compile(r'^  File ".*/(IPython/core|mirror_nb/(replica|strategies|pool)|multiprocessing)/')


@final
class Ends:
    """The replica's side: travels with what its process is started with."""

    def __init__(self, *shared: Any) -> None:
        # Stack, readable, writable: descriptors here, what stands for them in the replica.
        self._shared = shared

    def __reduce__(self) -> Any:
        # Not before the process starts: multiprocessing would have a thread wait for it to fetch them, and keep them
        # open for one that dies before it does.
        return Ends, tuple(reduction.DupFd(descriptor) for descriptor in self._shared)

    def use(self) -> tuple[int, int]:
        """In the replica: have crashes leave their stack; return the pipe's ends for stderr, which it has to read."""
        stack, readable, writable = (shared.detach() for shared in self._shared)
        for descriptor in (stack, readable, writable):
            # Programs that a cell starts have no business with them.
            os.set_inheritable(descriptor, False)
        faulthandler.enable(file=stack, all_threads=False)
        # Answers while the GIL is held, too.
        faulthandler.register(TELL, file=stack, all_threads=False)
        return readable, writable


@final
class LastWords:
    """The pool's side, for one replica."""

    def __init__(self) -> None:
        self._stack = nameless_file("mirror_nb stack")
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)

    def ends(self) -> Ends:
        """Return what the process is started with; to be pickled while it starts."""
        return Ends(self._stack, self._readable, self._writable)

    def started(self) -> None:
        """The process has its ends: only it writes."""
        os.close(self._writable)
        self._writable = -1

    def ask(self, pid: int) -> None:
        """Have a process that is about to be ended leave the stack of where it was."""
        with contextlib.suppress(OSError):
            os.kill(pid, TELL)
            deadline = time.monotonic() + TELL_SECONDS
            while not self._told(pid) and time.monotonic() < deadline:
                time.sleep(0.002)

    def _told(self, pid: int) -> bool:
        """Whether the stack is whole, or none is to come: it is written line by line, with the signal blocked."""
        try:
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        except (OSError, ValueError):
            # No such file on this system, or no such process any more.
            return os.fstat(self._stack).st_size > 0
        if status["State"][0] in "TtZX":
            return True
        return os.fstat(self._stack).st_size > 0 and not int(status["SigBlk"], 16) >> (TELL - 1) & 1

    def look(self, pid: int) -> tuple[str, ...]:
        """Return the user's frames of where a living process is, the latest call first; nothing of it is kept."""
        self.ask(pid)
        stack = os.pread(self._stack, MOST_BYTES, 0).decode("utf-8", "backslashreplace").splitlines()
        # The process shares the place at which it writes next.
        os.ftruncate(self._stack, 0)
        os.lseek(self._stack, 0, os.SEEK_SET)
        return tuple(line.strip() for line in _of_the_user(stack) if line.startswith("  File"))

    def take(self) -> tuple[str, ...]:
        """Return the lines that a dead replica left, the user's frames of a crash among them."""
        if self._stack < 0:
            return ()
        stack = os.pread(self._stack, MOST_BYTES, 0).decode("utf-8", "backslashreplace")
        text = b""
        with contextlib.suppress(BlockingIOError):
            text = os.read(self._readable, MOST_BYTES)
        said = text.decode("utf-8", "backslashreplace").splitlines()
        return (*said[-MOST_LINES:], *_of_the_user(stack.splitlines()))

    def close(self) -> None:
        """Close what is open."""
        for descriptor in (self._stack, self._readable, self._writable):
            if descriptor >= 0:
                os.close(descriptor)
        self._stack = self._readable = self._writable = -1


def _of_the_user(stack: list[str]) -> list[str]:
    """Return a stack's head and the frames above the first one of ours, the latest call first as it was written."""
    kept: list[str] = []
    for line in stack:
        if line.startswith("Extension modules:") or _OURS.match(line):
            break
        if line.strip():
            kept.append(line)
    return kept[:MOST_LINES] if any(line.startswith("  File") for line in kept) else [x for x in stack if x][:4]
