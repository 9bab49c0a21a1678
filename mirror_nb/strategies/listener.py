"""What replicas say while a call runs: their lines in this process's own streams. Knows messages, no replicas."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO, final

from mirror_nb.environment import log_lines
from mirror_nb.environment.log_lines import Logged
from mirror_nb.event_files import EventFiles, Written
from mirror_nb.messages import ClearOutput, Display, Note, Stream
from mirror_nb.readable import writable


@final
class Listener:
    """Shows what replicas print during a call, hands on what they note and log, and writes event files for them."""

    __slots__ = ("_files", "_on_note", "_replicas", "_unfinished")

    def __init__(self, on_note: Callable[[Any], None], replicas: Iterable[int]) -> None:
        self._on_note = on_note
        self._replicas = replicas
        self._files: EventFiles | None = None
        self._unfinished: dict[str, int] = {}
        # Whose line a stream is in the middle of.

    def take(self, replica_id: int, message: Any) -> None:
        """Do with a message what it is for; others are left to the pool."""
        if isinstance(message, Note):
            self._on_note(message.value)
        elif isinstance(message, Written):
            if self._files is None:
                self._files = EventFiles(self._replicas)
            self._files.take(replica_id, message)
        elif isinstance(message, Logged):
            log_lines.take(message)
        elif isinstance(message, Stream):
            self._show(replica_id, message)
        elif isinstance(message, Display | ClearOutput) and not replica_id:
            self._display(message)

    def _show(self, replica_id: int, message: Stream) -> None:
        """Show what a replica printed: replica 0's as it is, the others' with their number before each line."""
        # A program without a console has neither.
        stream: TextIO | None = sys.stdout if message.name == "stdout" else sys.stderr
        lines = message.text.splitlines(keepends=True)
        if not lines or stream is None:
            return
        goes_on = self._unfinished.pop(message.name, None) == replica_id
        if not lines[-1].endswith(("\n", "\r")):
            self._unfinished[message.name] = replica_id
        if replica_id:
            lines = [line if goes_on and not i else f"[replica {replica_id}] {line}" for i, line in enumerate(lines)]
        stream.write(writable("".join(lines), stream))

    def _display(self, message: Display | ClearOutput) -> None:
        """Show what replica 0 displayed: in a notebook as its own display, elsewhere as text."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is None:
            if isinstance(message, Display) and "text/plain" in message.data:
                self._show(0, Stream("stdout", f"{message.data['text/plain']}\n"))
        elif isinstance(message, Display):
            shown = message.data, message.metadata
            shell.display_pub.publish(*shown, transient=message.transient, update=message.update)
        else:
            shell.display_pub.clear_output(message.wait)

    def close(self) -> None:
        """Close the files of TensorBoard's that it has opened."""
        if self._files is not None:
            self._files.close()
