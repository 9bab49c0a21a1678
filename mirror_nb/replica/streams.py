"""A replica's standard streams, sent to the controller in small batches, in the order they were written.

Knows no process and no notebook: it is handed a function that takes the messages.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from mirror_nb.messages import Stream
from mirror_nb.replica.whole import whole

BATCH_SECONDS = 0.05
# Twenty messages a second: the front end's server drops messages above a thousand.
FLOOD_BYTES, FLOODED_SECONDS = 1 << 14, 1.0
# Descriptors are read with a delay that lets C code write 64 KB, unless so much came within this time.
IDLE_CHARACTERS = 1 << 20
# While no request runs, nobody reads: text from threads left running is kept up to this and then dropped.


_DECODER = codecs.getincrementaldecoder("utf-8")


class Streams:
    """Collects the text of both streams; `flush` sends it. Safe from any thread."""

    def __init__(self, emit: Callable[[Stream], None]) -> None:
        self._emit = emit
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._chunks: list[tuple[str, str]] = []
        self._characters = 0
        self._dropped = 0
        self._open = False
        self._forked = False
        # This is a child of the replica, a DataLoader's worker say: its text goes by the captured descriptors.
        self._lines: dict[str, str] = {}
        # What such a child has written since its last whole line.
        self._pending = threading.Event()
        self._captured: list[tuple[int, str, codecs.IncrementalDecoder]] = []
        # Readable ends of pipes, the stream that each stands for, and the half of a character that came last.
        self._written = select.poll()
        # Asked before they are read: a read that finds nothing raises, which takes longer.
        self._draining = threading.Lock()
        self._ticker: threading.Thread | None = None
        self.stdout = _Text("stdout", self)
        self.stderr = _Text("stderr", self)

    def write(self, name: str, text: str) -> None:
        """Take text for a stream; it is sent within BATCH_SECONDS while a request runs."""
        if self._forked:
            # Whole lines, since others write to the same pipe.
            lines, newline, rest = (self._lines.pop(name, "") + text).rpartition("\n")
            self._lines[name] = rest
            _write(name, lines + newline)
            return
        # What C code and programs wrote before.
        self._take_captured()
        self._add(name, text)

    def _add(self, name: str, text: str) -> None:
        with self._lock:
            if not self._open and self._characters > IDLE_CHARACTERS:
                self._dropped += len(text)
                return
            self._chunks.append((name, text))
            self._characters += len(text)
            full = self._characters > IDLE_CHARACTERS and self._open
        if full:
            self.flush()
        elif self._open and not self._pending.is_set():
            self._pending.set()

    def end_line(self, name: str) -> None:
        """In a child of the replica: write what was begun of a line."""
        if self._forked:
            _write(name, self._lines.pop(name, ""))

    def flush(self) -> None:
        """Send what was collected, if a request runs."""
        with self._sending:
            with self._lock:
                if not self._open or not self._chunks:
                    return
                chunks, self._chunks, self._characters = self._chunks, [], 0
                dropped, self._dropped = self._dropped, 0
            unsent = deque(_merged(chunks))
            try:
                while unsent:
                    self._emit(Stream(*unsent.popleft()))
            finally:
                if unsent:
                    # An interrupt that was held back while a message was sent.
                    with self._lock:
                        self._chunks[:0] = unsent
            if dropped:
                note = f"[{dropped} characters that were written while no cell ran were dropped]\n"
                self._emit(Stream("stderr", note))

    def open(self) -> None:
        """A request begins: the controller reads."""
        with self._lock:
            self._open = True
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, name="mirror_nb streams", daemon=True)
            self._ticker.start()

    def close(self) -> None:
        """A request ends: send what is left and keep the rest for the next one."""
        self._take_captured()
        self.flush()
        with self._lock:
            self._open = False

    def _tick(self) -> None:
        pause = threading.Event()
        while True:
            self._pending.wait()
            pause.wait(BATCH_SECONDS)
            self._pending.clear()
            self.flush()

    def capture_descriptors(self, stderr: tuple[int, int] | None = None) -> None:
        """Send what C code and child processes write to descriptors 1 and 2 the same way; never blocks them.

        `stderr` is a pipe to use for descriptor 2: its readable and its writable end.
        """
        for descriptor, name, pipe in ((1, "stdout", None), (2, "stderr", stderr)):
            readable, writable = pipe or os.pipe()
            os.set_blocking(readable, False)
            os.dup2(writable, descriptor)
            os.close(writable)
            self._written.register(readable, select.POLLIN)
            self._captured.append((readable, name, _DECODER(errors="backslashreplace")))
        threading.Thread(target=self._drain, name="mirror_nb descriptors", daemon=True).start()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # The locks may be held by threads that are not here, and the channel is the replica's.
        self._forked = True

    def _drain(self) -> None:
        pause, flooded = threading.Event(), 0.0
        while True:
            select.select([readable for readable, *_ in self._captured], [], [])
            if time.monotonic() > flooded + FLOODED_SECONDS:
                # In the pipe it outlives a crash of this process.
                pause.wait(BATCH_SECONDS)
            if self._take_captured() >= FLOOD_BYTES:
                flooded = time.monotonic()

    @whole
    def _take_captured(self) -> int:
        """Take what is in the pipes; return how many bytes that was."""
        taken = 0
        with self._draining:
            for readable, name, decoder in self._captured if self._written.poll(0) else ():
                with contextlib.suppress(BlockingIOError):
                    # One pipe's capacity: a child process that never stops writing must not hold a request's end up.
                    found = os.read(readable, 1 << 16)
                    taken += len(found)
                    self._add(name, decoder.decode(found))
        return taken


def _write(name: str, text: str) -> None:
    if text:
        os.write(1 if name == "stdout" else 2, text.encode("utf-8", "backslashreplace"))


def _merged(chunks: list[tuple[str, str]]) -> list[tuple[str, str]]:
    merged: list[tuple[str, list[str]]] = []
    for name, text in chunks:
        if not merged or merged[-1][0] != name:
            merged.append((name, []))
        merged[-1][1].append(text)
    return [(name, "".join(parts)) for name, parts in merged]


class _Text(io.TextIOBase):
    """What `sys.stdout` and `sys.stderr` are in a replica."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, name: str, streams: Streams) -> None:
        self._name = name
        self._streams = streams

    @property
    def name(self) -> str:
        return f"<{self._name}>"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._streams.write(self._name, text)
        return len(text)

    def flush(self) -> None:
        # The ticker sends soon; a print(flush=True) in a loop must not make a message a line.
        self._streams.end_line(self._name)

    def fileno(self) -> int:
        # Programs that a user starts get the captured descriptor, whose text comes back the same way.
        return 1 if self._name == "stdout" else 2

    def isatty(self) -> bool:
        return False
