"""One step of one replica as bars: what it computed, and which part of its collectives ran beside. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mirror_nb.telemetry.samples import BLOCKING, DTYPE, Kind, Samples, joined
from mirror_nb.telemetry.snapshot import LaneSpan
from mirror_nb.telemetry.tables import SPANS

_NS = 1e9
_DATA, _COLLECTIVE = int(Kind.DATA), int(Kind.COLLECTIVE)
_FIELDS = ("kind", "code", "began", "ended")
_PARTS = {int(kind): name for kind, name in SPANS.items()}
# Looking members up in an enum would take longer than all the rest.


def of_step(kept: Sequence[Samples], step: int) -> Samples:
    """Return the samples of one step that have a length, from chunks of samples, oldest first."""
    found: list[Samples] = []
    for rows in reversed(kept):
        its = rows[rows["step"] == step]
        its = its[(its["kind"] >= _DATA) & (its["kind"] <= _COLLECTIVE) & (its["ended"] > 0)]
        if len(its):
            found.insert(0, its)
        elif found or (len(rows) and int(rows["step"].max()) < step):
            break
    return joined(found) if found else np.empty(0, DTYPE)


def lane(rows: Samples, origin: int) -> tuple[LaneSpan, ...]:
    """Return the bars of one replica's samples, by time, which counts from `origin` (nanoseconds)."""
    bars: list[LaneSpan] = []
    collectives: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    # By whether they block. Not with numpy, which takes longer to begin than these few take.
    for kind, code, since, until in zip(*(rows[name].tolist() for name in _FIELDS), strict=True):
        began, ended = (since - origin) / _NS, (until - origin) / _NS
        if kind == _COLLECTIVE:
            collectives[code & BLOCKING > 0].append((began, ended))
        elif kind in _PARTS:
            bars.append(LaneSpan(_PARTS[kind], began, ended))
    computing = sorted((bar.began, bar.ended) for bar in bars if bar.part != "data")
    whole = (int(max(rows["began"].max(), rows["ended"].max())) - origin) / _NS
    for blocking, its in collectives.items():
        for began, ended in _joined(its, whole / 500):
            bars.extend([LaneSpan("exposed", began, ended)] if blocking else _split(began, ended, computing))
    return tuple(sorted(bars, key=lambda bar: bar.began))


def _joined(intervals: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Return the intervals, those joined that no eye would part: hundreds of small buckets are one bar."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start - joined[-1][1] < gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _split(began: float, ended: float, computing: list[tuple[float, float]]) -> list[LaneSpan]:
    """Part a collective into what was computed beside and what was not."""
    parts, at = [], began
    for start, end in computing:
        start, end = max(start, at), min(end, ended)
        if start < end:
            parts += [LaneSpan("exposed", at, start)] if at < start else []
            parts.append(LaneSpan("collective", start, end))
            at = end
    return [*parts, LaneSpan("exposed", at, ended)] if at < ended else parts
