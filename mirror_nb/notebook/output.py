"""What a `%%mirrored` cell shows: one replica natively, the others folded, and a closing line.

Everything is published by the main thread while it waits for the cell: output of another thread would land in
another cell. The parts stand on the screen in an order that no timing changes.
"""

from __future__ import annotations

import hashlib
import html
import re
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import comm
from IPython.core.interactiveshell import InteractiveShell

from mirror_nb.devices import Device
from mirror_nb.messages import ClearOutput, CommMessage, CommSent, Display, Stream
from mirror_nb.notebook.view import let_go, view_of
from mirror_nb.pool.failures import spans
from mirror_nb.readable import duration, writable

TAIL_LINES = 100
TAIL_CHARACTERS = 20_000
# What is kept of a folded replica's text, however much it prints.
LINE_CHARACTERS = 1 << 20
# A line that is longer is compared by its end.
UPDATE_SECONDS = 0.3
SHOW_AFTER_SECONDS = 0.4
# Cells that end sooner show no status lines: they would only flicker.
# The colours of JupyterLab, then of VS Code, then some that can be read on light and on dark paper.
_PALE = "var(--jp-ui-font-color2,var(--vscode-descriptionForeground,#767676))"
_BUSY = "var(--jp-brand-color1,var(--vscode-charts-blue,#2f7fd6))"
_DONE = "var(--jp-success-color1,var(--vscode-charts-green,#388e3c))"
# Where text begins in JupyterLab, from where HTML and widgets begin; elsewhere they begin together.
_INDENT_HTML = "calc(var(--jp-code-padding,-3px) + 3px)"
_INDENT_WIDGET = "calc(var(--jp-code-padding,-1px) + 1px)"


class Folded:
    """What one replica showed: its end, its size, and a digest to compare it by."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._complete = 0
        # Lines, however many are kept.
        self._digest = hashlib.blake2b(digest_size=16)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial = ""

    def take(self, message: Any) -> None:
        """Add a message."""
        match message:
            case Stream(_, text):
                self._add(text)
            case Display(data, _, _, False):
                self._add(f"[{data.get('text/plain', next(iter(data), 'display'))}]\n")
            case ClearOutput():
                self._clear()

    def _add(self, text: str) -> None:
        *lines, partial = (self._partial + text).split("\n")
        self._partial = partial[-LINE_CHARACTERS:]
        self._complete += len(lines)
        self._digest.update(_compared(lines))
        self._tail.extend(_overwritten(line)[-TAIL_CHARACTERS:] for line in lines[-TAIL_LINES:])

    @property
    def lines(self) -> int:
        """How many lines it showed."""
        return self._complete + bool(self._partial)

    @property
    def empty(self) -> bool:
        """Whether it showed nothing."""
        return not self.lines

    @property
    def digest(self) -> bytes:
        """Equal for equal output."""
        digest = self._digest.copy()
        digest.update(_compared([self._partial]))
        # What has shown bars alone is not compared, but not equal to what has shown nothing.
        digest.update(bytes([self.empty]))
        return digest.digest()

    def tail(self) -> str:
        """Return the last lines, at most TAIL_LINES and TAIL_CHARACTERS."""
        lines = [*self._tail, *([_overwritten(self._partial)] if self._partial else [])]
        return "\n".join(lines[-TAIL_LINES:])[-TAIL_CHARACTERS:]

    def last_line(self) -> str:
        """Return the last line that is not empty."""
        lines = (_overwritten(self._partial), *reversed(self._tail))
        return next((line for line in lines if line.strip()), "")


def _overwritten(line: str) -> str:
    """Return what is left of a line on the screen: a carriage return goes back to its start."""
    return line.rstrip("\r").rpartition("\r")[2]


def _compared(lines: Iterable[str]) -> bytes:
    """Return what counts when outputs are compared: not progress bars, whose numbers are never the same twice."""
    counted = (line.rstrip("\r") for line in lines)
    return "".join(f"{line}\n" for line in counted if "\r" not in line).encode("utf-8", "replace")


class CellView:
    """Shows one cell as it runs. The first of `replicas` is the one whose output appears as if it were local."""

    def __init__(
        self, shell: InteractiveShell, replicas: Sequence[int], devices: Sequence[Device], quiet: bool
    ) -> None:
        self._shell = shell
        self._replicas = list(replicas)
        self._devices = devices
        self._lead = self._replicas[0]
        self._quiet = quiet
        self._folded = {r: Folded() for r in self._replicas}
        self._began = time.monotonic()
        self._updated = 0.0
        self._status: Any = None
        self._in_line = False
        # What was written last has not ended its line.
        self._place = ""
        # Id of the display where the status lines go; empty: there is none.
        if len(self._replicas) > 1 and not quiet and getattr(shell, "kernel", None) is not None:
            self._place = uuid.uuid4().hex
            # Before anything else of the cell, and the same in every run; the widget follows when it takes long.
            self._show_status({"text/plain": ""}, update=False)

    # ------------------------------------------------------------------ while it runs

    def take(self, replica_id: int, message: Any) -> None:
        """Show a message of a replica."""
        self._folded[replica_id].take(message)
        if replica_id != self._lead:
            return
        publisher = self._shell.display_pub
        match message:
            case Stream(name, text):
                stream = sys.stdout if name == "stdout" else sys.stderr
                stream.write(writable(text, stream))
                stream.flush()
                self._in_line = not text.endswith("\n")
            case Display(data, metadata, transient, update):
                publisher.publish(data, metadata, transient=transient, update=update)
            case ClearOutput(wait):
                publisher.clear_output(wait)
            case CommSent():
                forward(self._shell, message)

    def tick(self, pending: set[int]) -> None:
        """Refresh the status lines, a few times a second."""
        now = time.monotonic()
        if not self._place or now - self._began < SHOW_AFTER_SECONDS or now - self._updated < UPDATE_SECONDS:
            return
        self._updated = now
        if self._status is None:
            self._make_status()
        self._status.value = self._status_html(pending, now - self._began)

    def _make_status(self) -> None:
        from ipywidgets import HTML

        self._status = HTML()
        self._show_status({"text/plain": "", **view_of(self._status)}, update=True)

    def _show_status(self, bundle: dict[str, Any], update: bool) -> None:
        transient = {"display_id": self._place}
        self._shell.display_pub.publish(bundle, transient=transient, update=update)

    def _status_html(self, pending: set[int], seconds: float) -> str:
        rows = []
        for r in self._replicas:
            colour, state = (_BUSY, duration(seconds)) if r in pending else (_DONE, "done")
            # Of the first replica all is on the screen.
            last = html.escape(_plain(self._folded[r].last_line())[-200:]) if r != self._lead else ""
            rows.append(
                f"<tr><td style='color:{colour}'>●</td><td style='padding:0 .6em'>{r}</td><td>{self._devices[r]}</td>"
                f"<td style='padding:0 1.2em;min-width:4em;text-align:right'>{state}</td>"
                # All the width that is left, and cut where that ends.
                f"<td style='max-width:0;width:100%;overflow:hidden;text-overflow:ellipsis;color:{_PALE}'>"
                f"{last}</td></tr>"
            )
        return (
            "<table style='width:100%;border-collapse:collapse;white-space:pre;line-height:1.5;"
            f"font-family:var(--jp-code-font-family,monospace);font-size:12px;margin-left:{_INDENT_WIDGET};"
            f"color:var(--jp-ui-font-color1,inherit)'>{''.join(rows)}</table>"
        )

    # ------------------------------------------------------------------ when it has ended

    def close(self, parts: Iterable[str], advice: Iterable[str] = ()) -> None:
        """Take the status lines away; say in one line what happened, then any advice; fold what the others showed."""
        if self._status is not None:
            # A saved notebook would show an error in the place of a widget that is no more.
            self._show_status({"text/plain": ""}, update=True)
            let_go(self._status)
        if self._quiet:
            return
        lines = [" · ".join(parts), *advice]
        folds = [self._fold(*group) for group in self._groups()]
        style = f"font-size:12px;line-height:1.6;color:{_PALE};padding-left:{_INDENT_HTML}"
        said = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
        body = f"<div style='{style}'>{said}{''.join(rich for _, rich in folds)}</div>"
        plain = "\n".join([*lines, *(fold for fold, _ in folds)])
        if self._in_line and getattr(self._shell, "kernel", None) is None:
            # In a terminal all comes one after the other.
            sys.stdout.write("\n")
        self._shell.display_pub.publish({"text/plain": plain, "text/html": body})

    def _fold(self, who: str, folded: Folded, equal: bool) -> tuple[str, str]:
        """Return, as plain text and as HTML, what some other replicas showed."""
        if equal:
            return f"{who}: the same output", f"<div>{who}: the same output</div>"
        if folded.empty:
            return f"{who}: no output", f"<div>{who}: no output</div>"
        head = f"{who}: {folded.lines} line{'s' if folded.lines != 1 else ''}, differing from replica {self._lead}"
        if folded.lines > TAIL_LINES:
            head += f"; the last {TAIL_LINES}"
        tail = _plain(folded.tail())
        pre = f"<pre style='margin:.2em 1.2em;font-size:inherit;color:inherit'>{html.escape(tail)}</pre>"
        summary = f"<summary style='cursor:pointer'>{head}</summary>"
        return f"{head}\n{_indented(tail)}", f"<details>{summary}{pre}</details>"

    def _groups(self) -> list[tuple[str, Folded, bool]]:
        """Group the other replicas by what they showed: (who, output, the same as the first replica's)."""
        groups: dict[bytes, list[int]] = {}
        for r in self._replicas[1:]:
            groups.setdefault(self._folded[r].digest, []).append(r)
        lead = self._folded[self._lead]
        found = []
        for digest, ids in groups.items():
            if self._folded[ids[0]].empty and lead.empty:
                continue
            who = f"replica{'s' if len(ids) > 1 else ''} {spans(ids)}"
            found.append((who, self._folded[ids[0]], digest == lead.digest))
        return found


def forward(shell: InteractiveShell, message: CommSent) -> None:
    """Pass a replica's widget message on to the front end."""
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        kernel.session.send(
            kernel.iopub_socket,
            message.kind,
            message.content,
            metadata=message.metadata,
            parent=kernel.get_parent(),
            ident=f"comm-{message.content['comm_id']}".encode(),
            buffers=list(message.buffers),
        )


def comms_of(shell: InteractiveShell) -> dict[str, Any]:
    """Return the front end's connections to widgets, by the id of each."""
    # Before ipykernel 6.18 a kernel's are not those of `comm`.
    manager: Any = getattr(getattr(shell, "kernel", None), "comm_manager", None) or comm.get_comm_manager()
    return manager.comms


class CommProxy:
    """Stands in the kernel for a widget that lives in a replica: hands it the front end's messages."""

    def __init__(self, comm_id: str, send: Any) -> None:
        self.comm_id = comm_id
        self._send = send

    def handle_msg(self, msg: dict[str, Any]) -> None:
        self._send(CommMessage(msg["content"], tuple(bytes(b) for b in msg.get("buffers", ()))))

    def handle_close(self, msg: dict[str, Any]) -> None:
        """The front end closed its side; the replica's widget stays until its cell lets go of it."""


def _plain(text: str) -> str:
    """Return text without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
