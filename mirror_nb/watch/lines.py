"""A frame as lines of text, of at most 80 columns. Pure; knows no terminal: colours are names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from mirror_nb import readable
from mirror_nb.notebook.dashboard import words
from mirror_nb.notebook.dashboard.frame import Frame, Phase
from mirror_nb.telemetry.findings import Weight
from mirror_nb.telemetry.machine import HOT, Reading
from mirror_nb.telemetry.snapshot import BREAKDOWN, ReplicaState, State

Colour = Literal["", "strong", "faint", "trouble"] | int
# A number is a replica's.
Span = tuple[str, Colour]
Line = tuple[Span, ...]
BAR = 40
# Characters.
QUIET = 5.0
# Seconds, and ten steps' time: after them a replica that writes nothing is said to be quiet.
_COMPUTING = tuple(BREAKDOWN.index(part) for part in ("forward", "backward", "optimizer"))
_DATA, _EXPOSED = BREAKDOWN.index("data"), BREAKDOWN.index("exposed")
_COLUMNS = ("", "device", "examples/s", "step", "data", "compute", "comm", "late", "busy", "memory", "")


def lines(frame: Frame, pid: int) -> list[Line]:
    """Return what there is to show of the strategy of process `pid`."""
    found = [_title(frame, pid)]
    if frame.note:
        found.append(((printable(frame.note), "trouble"),))
    if frame.phase is Phase.WAITING:
        return [*found, (("no step has ended yet", "faint"),)]
    found += _facts(frame)
    found += [(), *_replicas(frame)]
    found += [(), *_all_reduces(frame)] if frame.snapshot.all_reduces else []
    return [*found, (), *_look_at(frame)]


def printable(text: str) -> str:
    """Return text that came from another process, its control characters replaced: a terminal would obey them."""
    return "".join(c if c.isprintable() else "�" for c in text)


def quiet(frame: Frame) -> float | None:
    """Return for how many seconds no replica has written; None while one does, or none did."""
    silent = [replica.silent for replica in frame.snapshot.replicas if replica.silent is not None]
    least = max(QUIET, 10 * (frame.snapshot.step_seconds or 0))
    return min(silent) if silent and min(silent) > least else None


def _title(frame: Frame, pid: int) -> Line:
    count = frame.snapshot.num_replicas
    since = quiet(frame) if frame.phase is Phase.RUNNING else None
    said = frame.phase.value if since is None else f"quiet for {since:.0f} s"
    about = [f"{count} replica{'s' if count > 1 else ''}", frame.operation, f"process {pid}"]
    return (
        (printable(frame.title or "mirror_nb"), "strong"),
        (f"  {said}", "trouble" if frame.troubled() else "strong"),
        (f"  {' · '.join(printable(part) for part in about if part)}", "faint"),
    )


def _facts(frame: Frame) -> Iterator[Line]:
    """Two or three lines: the key numbers, as many as fit on each, and a bar where the number of steps is known."""
    line: list[Span] = []
    for value, what, _ in words.facts(frame):
        spans: list[Span] = [(value, "strong"), (f" {printable(what)}   ", "faint")]
        if _width(line) + _width(spans) > 80:
            yield tuple(line)
            line = []
        line += spans
    yield tuple(line)
    planned = frame.snapshot.steps_planned
    if planned:
        done = min(BAR, round(BAR * frame.snapshot.step / planned))
        yield (("━" * done, "strong"), ("━" * (BAR - done), "faint"))


def _width(spans: Sequence[Span]) -> int:
    return sum(len(text) for text, _ in spans)


def _replicas(frame: Frame) -> list[Line]:
    rows = [_COLUMNS, *(_row(frame, replica) for replica in frame.snapshot.replicas)]
    # What nobody tells has no column.
    kept = [i for i in range(len(_COLUMNS)) if i == 0 or any(row[i] not in ("", "–") for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in kept}
    slow = frame.slow()
    found: list[Line] = []
    for number, row in enumerate(rows):
        # Names to the left, numbers to the right.
        cells = [row[i].ljust(widths[i]) if i in (0, 1, len(row) - 1) else row[i].rjust(widths[i]) for i in kept]
        colour: Colour = "faint" if number == 0 else "trouble" if number - 1 in slow else ""
        rest = "  " + "  ".join(cells[1:]).rstrip()
        found.append(((cells[0], number - 1 if number else "faint"), (rest, colour)))
    return found


def _row(frame: Frame, replica: ReplicaState) -> tuple[str, ...]:
    r, shot = replica.replica_id, frame.snapshot
    parts = shot.breakdown[r]
    late = shot.lateness[r][np.isfinite(shot.lateness[r])]
    reading = next((its for its in reversed(frame.readings) if its.device == frame.device(r)), None)
    return (
        f"r{r}",
        printable(frame.device(r)),
        words.number(replica.throughput),
        _time(replica.step_seconds),
        _time(float(parts[_DATA])),
        _time(float(sum(parts[i] for i in _COMPUTING))),
        _time(float(parts[_EXPOSED])) if shot.num_replicas > 1 else "–",
        _time(float(np.median(late))) if len(late) and shot.num_replicas > 1 else "–",
        words.percent(reading.utilisation) if reading is not None and reading.utilisation is not None else "–",
        _memory(replica, reading),
        _state(replica, reading),
    )


def _time(seconds: float | None) -> str:
    return "–" if seconds is None or not math.isfinite(seconds) else readable.milliseconds(seconds)


def _memory(replica: ReplicaState, reading: Reading | None) -> str:
    used = replica.reserved or (reading.memory_used if reading is not None else None)
    return "–" if used is None else readable.size(used)


def _state(replica: ReplicaState, reading: Reading | None) -> str:
    said = [] if replica.state is State.RUNNING else [replica.state.value]
    if replica.restarts:
        said.append(f"restarted {replica.restarts}×")
    if reading is not None and reading.temperature is not None:
        said.append(f"{reading.temperature:.0f} °C")
    if reading is not None and HOT & set(reading.slowed):
        said.append(reading.slowed[0])
    return ", ".join(said)


def _all_reduces(frame: Frame) -> list[Line]:
    rows = [("all-reduce", "a step", "p50 / p95", "bus")]
    for its in frame.snapshot.all_reduces:
        times, rate = words.pair(its.p50, its.p95), words.bandwidth(its.bus_bandwidth)
        rows.append((readable.size(its.size), f"{its.per_step:.3g}", times, rate))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        (("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)), "" if number else "faint"),)
        for number, row in enumerate(rows)
    ]


def _look_at(frame: Frame) -> Iterator[Line]:
    for finding in frame.findings:
        yield ((printable(finding.title), "trouble" if finding.weight > Weight.HINT else "strong"),)
        yield ((f"  {printable(finding.detail)}", "faint"),)
    if not frame.findings:
        for title, detail in words.fine(frame):
            yield ((f"{title}, {detail}", "faint"),)
