"""TensorBoard's event files: the controller writes what replicas have to write, once.

    SummaryWriter in a replica ─▶ HandedOn ─▶ Written ─▶ EventFiles in the controller ─▶ one file
    SummaryWriter of the notebook ─── sent ──▶ HandedOn, in the same way

So a writer is the same one wherever it was made, what it was given outlives the replicas, and what all of them write
is there once. Knows TensorBoard's writer of event files where that is imported; knows no replica and no channel.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

from mirror_nb.environment.imported import when_imported

_MODULE = "tensorboard.summary.writer.event_file_writer"
_TIMES = re.compile(r"\b\d{9,}\.\d+\b|\b[A-Z][a-z]{2}\d{2}_\d{2}-\d{2}-\d{2}(?=_)")
# In names that torch gives folders: each replica has its own.


@dataclass(frozen=True, slots=True)
class Written:
    """What a replica has for an event file."""

    folder: str
    # Of the file.
    key: str
    # Of the controller's own writer that is meant; empty: the replica has opened one.
    what: str
    # "open", "event", "flush" or "close".
    event: bytes = b""
    # TensorBoard's message.
    meaning: tuple[Any, ...] = ()
    # Its step, kind and tags: equal ones of several replicas are one.
    settings: tuple[Any, ...] = ()
    # With which it was opened: the length of the queue, seconds between flushes, the suffix of the name.

    def __reduce__(self) -> Any:
        return Written, (self.folder, self.key, self.what, self.event, self.meaning, self.settings)


_hand_on: Callable[[Written], None] | None = None
_pid = 0
# In a replica: tells the controller, in this process.
_keys = itertools.count(1)
_sent: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
# In the controller: its own writers that travelled, by key.
_opened: dict[str, Any] = {}
# Those that replicas have opened, by folder.
_settings: dict[str, tuple[Any, ...]] = {}
# With which replicas have opened theirs last, by folder: who writes alone has said so before it writes.


def reduce_writer(obj: Any) -> tuple[Any, ...] | None:
    """Return how pickle shall take a writer of an event file, as `__reduce__` does; None: it is none."""
    if type(obj).__name__ != "EventFileWriter" or type(obj).__module__ != _MODULE:
        return None
    key = next((key for key, known in _sent.items() if known is obj), None)
    if key is None:
        key = str(next(_keys))
        _sent[key] = obj
    return _found, (os.path.abspath(obj.get_logdir()), key)


def _found(folder: str, key: str) -> Any:
    """Return the writer that is meant, or what stands for it."""
    own = _sent.get(key) if key and _hand_on is None else None
    return own if own is not None else HandedOn._of(folder, key if _hand_on is not None else "")


# --------------------------------------------------------------------------- what stands for a writer


def hand_on(emit: Callable[[Written], None]) -> None:
    """Have the writers of this process hand on what they are given."""
    global _hand_on, _pid
    _hand_on, _pid = emit, os.getpid()
    when_imported("torch.utils.tensorboard.writer", f"{__name__}:hand_on_from_torch")


def hand_on_from_torch() -> None:
    """Have torch's SummaryWriter hand on, once it is imported."""
    writer: Any = sys.modules["torch.utils.tensorboard.writer"]
    # Without it torch's writer is of another making, and writes as before.
    if hasattr(writer, "EventFileWriter"):
        writer.EventFileWriter = HandedOn


@final
class HandedOn:
    """Stands for the writer of an event file: in a replica, and in the notebook for one that a replica has opened."""

    def __init__(
        self, logdir: str, max_queue_size: int = 10, flush_secs: int = 120, filename_suffix: str = ""
    ) -> None:
        self._set(os.path.abspath(logdir), "")
        # Here, where the user's line is: what is wrong with the place is for it to raise.
        os.makedirs(os.path.dirname(self._folder), exist_ok=True)
        self._tell("open", settings=(max_queue_size, flush_secs, filename_suffix))

    @classmethod
    def _of(cls, folder: str, key: str) -> HandedOn:
        made = cls.__new__(cls)
        made._set(folder, key)
        return made

    def _set(self, folder: str, key: str) -> None:
        self._folder = folder
        self._key = key
        self._closed = False

    def __reduce__(self) -> Any:
        return _found, (self._folder, self._key)

    def get_logdir(self) -> str:
        """Return the folder of the event file."""
        return self._folder

    def add_event(self, event: Any) -> None:
        """Add an event, which TensorBoard's `Event` message holds."""
        if self._closed:
            raise OSError("Writer is closed")
        tags = tuple(value.tag for value in event.summary.value)
        self._tell("event", event.SerializeToString(), (event.step, event.WhichOneof("what"), tags))

    def flush(self) -> None:
        """Write to the disk what was added."""
        self._tell("flush")

    def close(self) -> None:
        """Write what was added, and end the file."""
        if not self._closed:
            self._closed = True
            self._tell("close")

    def _tell(self, what: str, event: bytes = b"", meaning: tuple[Any, ...] = (), settings: Any = ()) -> None:
        if _hand_on is not None and os.getpid() != _pid:
            raise OSError(f"what a replica has started cannot write to {self._folder}: log in the cell itself")
        (_hand_on or _carry_out)(Written(self._folder, self._key, what, event, meaning, settings))


# --------------------------------------------------------------------------- in the controller


@final
class EventFiles:
    """Writes what these replicas hand on during one request; what the first writes too the others do not."""

    def __init__(self, replicas: Iterable[int]) -> None:
        self._lead, *self._others = replicas
        self._ahead: dict[int, Counter[Any]] = {}
        # By replica: what the first one has written and this one not yet.
        self._kept: dict[int, dict[Any, list[Written]]] = {}
        # By replica: what this one has written and the first one not yet.
        self._used: list[Any] = []
        self._problem: Exception | None = None

    def take(self, replica_id: int, written: Written) -> None:
        """Write it, or keep it until it is known whether the first replica writes it too."""
        if written.what == "open":
            _settings[written.folder] = written.settings
        if replica_id == self._lead:
            self._write(written)
        if written.what != "event":
            return
        meaning = _TIMES.sub("", written.folder), written.key, written.meaning
        if replica_id != self._lead:
            ahead = self._ahead.setdefault(replica_id, Counter())
            if ahead[meaning] > 1:
                ahead[meaning] -= 1
            elif not ahead.pop(meaning, 0):
                self._kept.setdefault(replica_id, {}).setdefault(meaning, []).append(written)
            return
        for other in self._others:
            kept = self._kept.get(other, {}).get(meaning)
            if kept:
                kept.pop(0)
            else:
                self._ahead.setdefault(other, Counter())[meaning] += 1

    def close(self) -> None:
        """Write what the first replica has not written, and bring all to the disk."""
        written: set[Any] = set()
        for other in self._others:
            left = {meaning: events for meaning, events in self._kept.get(other, {}).items() if events}
            for meaning, events in left.items():
                if meaning not in written:
                    for event in events:
                        self._write(event)
            written |= left.keys()
        for writer in self._used:
            # One that is closed has nothing left to write.
            with contextlib.suppress(OSError):
                writer.flush()
        if self._problem is not None:
            warnings.warn(f"not all could be written to TensorBoard's event files: {self._problem}", stacklevel=2)

    def _write(self, written: Written) -> None:
        try:
            writer = _carry_out(written)
        except Exception as reason:
            # The replica's line is past; and the others' messages wait.
            self._problem = reason
            return
        if writer is not None and writer not in self._used:
            self._used.append(writer)


def _carry_out(written: Written) -> Any:
    """Do with the writer what is to be done; return it, None if it is closed."""
    writer = _writer(written)
    if writer is None:
        return None
    if written.what == "event":
        events: Any = sys.modules[_MODULE]
        writer.add_event(events.event_pb2.Event.FromString(written.event))
    elif written.what == "close" and written.folder in _opened and writer is _opened[written.folder]:
        # The notebook's own is its to close.
        writer.close()
        _opened.pop(written.folder)
        return None
    elif written.what != "open":
        writer.flush()
    return writer


def _writer(written: Written) -> Any:
    own = _sent.get(written.key) if written.key else None
    if own is not None:
        return own
    if written.folder not in _opened and written.what in ("open", "event"):
        events: Any = importlib.import_module(_MODULE)
        _opened[written.folder] = events.EventFileWriter(written.folder, *_settings.get(written.folder, ()))
    return _opened.get(written.folder)
