"""What replicas log for handlers that the controller alone has, of the user's own class say: it is handed on to them.

    a replica's logger ─▶ HandsOn ─▶ Logged ─▶ `take` in the controller ─▶ the handlers of that logger there

Knows no replica and no channel.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from mirror_nb import plain


@dataclass(frozen=True, slots=True)
class Logged:
    """A line that a replica has for handlers of a logger."""

    logger: str
    record: dict[str, Any]
    # Attributes of the `logging.LogRecord`, as plain values.

    def __reduce__(self) -> Any:
        return Logged, (self.logger, self.record)


_hand_on: Callable[[Logged], None] | None = None
_pid = 0
# In a replica: tells the controller, in this process.


def hand_on(emit: Callable[[Logged], None]) -> None:
    """Have this process hand on what it logs for handlers that it has not."""
    global _hand_on, _pid
    _hand_on, _pid = emit, os.getpid()


@final
class HandsOn(logging.Handler):
    """Stands in a replica for handlers of a logger that the controller alone has."""

    def __init__(self, logger: str) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        if _hand_on is not None and os.getpid() == _pid:
            _hand_on(Logged(self._logger, _told(record)))
        elif sys.stderr is not None:
            # What a replica has started, a loader's worker say, can tell nobody.
            sys.stderr.write(f"{self.format(record)}\n")


def _told(record: logging.LogRecord) -> dict[str, Any]:
    """Return a record's attributes as plain values: what is formatted, where it cannot travel, is formatted here."""
    own = vars(record).copy()
    if record.exc_info and not record.exc_text:
        own["exc_text"] = logging.Formatter().formatException(record.exc_info)
    own["exc_info"] = None
    if not (plain.is_plain(record.msg) and plain.is_plain(record.args)):
        own["msg"], own["args"] = record.getMessage(), None
    return {name: value if plain.is_plain(value) else str(value) for name, value in own.items()}


def handed_on(logger: logging.Logger) -> list[logging.Handler]:
    """Return a logger's handlers that this process alone has: they do more than write to the screen or into a file."""
    return [handler for handler in logger.handlers if not writes(handler)]


def writes(handler: logging.Handler) -> bool:
    """Whether a handler only writes to the screen or a file, as it may in another process, too."""
    if isinstance(handler, logging.FileHandler):
        return type(handler).emit is logging.FileHandler.emit
    only = type(handler).emit is logging.StreamHandler.emit or hasattr(handler, "console")
    return only and screen(handler) != ""


def screen(handler: logging.Handler) -> str:
    """Return which standard stream a handler writes to; empty: to neither."""
    # Those of rich write to the file of a console: replicas to the same one, without its colours.
    file = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)
    return _STREAMS.get(getattr(file, "name", ""), "")


_STREAMS = {"stdout": "stdout", "stderr": "stderr", "<stdout>": "stdout", "<stderr>": "stderr"}


def take(logged: Logged) -> None:
    """Give the handlers here what a replica has logged for them."""
    record = logging.makeLogRecord(logged.record)
    for handler in handed_on(logging.getLogger(None if logged.logger == "root" else logged.logger)):
        if record.levelno >= handler.level:
            handler.handle(record)
