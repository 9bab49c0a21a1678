"""Samples as a Chrome trace (the JSON that Perfetto and chrome://tracing open). Knows no timeline.

A replica is a process of the trace with the lanes steps, compute and collectives; scalars and memory are counters,
marks are instants. Format: "Trace Event Format" (Chromium): microseconds, complete events "X", metadata "M".
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mirror_nb.telemetry.samples import BLOCKING, Kind, Mark, Operation, Sample, Samples, decode
from mirror_nb.telemetry.tables import SPANS

STEPS, COMPUTE, COLLECTIVES = 1, 2, 3
# The lanes, as threads of the trace, from the top.
_LANES = {STEPS: "steps", COMPUTE: "compute", COLLECTIVES: "collectives"}
Tracks = Mapping[int, tuple[Samples, tuple[str, ...]]]
# By replica id: the samples, and the names of its scalars.


def save(path: Path, tracks: Tracks) -> Path:
    """Write the trace; compressed if the name ends in ".gz"."""
    text = json.dumps({"traceEvents": list(events(tracks)), "displayTimeUnit": "ms"}, allow_nan=False)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def events(tracks: Tracks) -> Iterator[dict[str, Any]]:
    """Yield the trace's events; times count from the first sample."""
    times = [int(rows["began"][rows["began"] > 0].min()) for rows, _ in tracks.values() if (rows["began"] > 0).any()]
    origin = min(times, default=0)
    for replica_id, (rows, names) in tracks.items():
        yield _about(replica_id, 0, "process_name", name=f"replica {replica_id}")
        yield _about(replica_id, 0, "process_sort_index", sort_index=replica_id)
        for lane, name in _LANES.items():
            yield _about(replica_id, lane, "thread_name", name=name)
            yield _about(replica_id, lane, "thread_sort_index", sort_index=lane)
        for sample in decode(rows):
            event = _event(sample, names)
            if event is not None:
                yield {"pid": replica_id, "ts": (sample.began - origin) / 1e3, **event}


def _about(replica_id: int, lane: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": replica_id, "tid": lane, "args": args}


def _event(sample: Sample, names: tuple[str, ...]) -> dict[str, Any] | None:
    match sample.kind:
        case Kind.STEP_ENDED:
            return _bar(sample, STEPS, f"step {sample.step}", examples=sample.amount)
        case Kind.COLLECTIVE if sample.ended:
            return _collective(sample)
        case Kind.SCALAR if sample.number < len(names) and math.isfinite(sample.value):
            return _counter(names[sample.number], value=sample.value)
        case Kind.MEMORY:
            return _counter("device memory, bytes", allocated=sample.amount, reserved=sample.queued)
        case Kind.MARK:
            args = {"amount": sample.amount, "step": sample.step}
            name = Mark(sample.code).name.lower()
            return {"ph": "i", "s": "p", "tid": STEPS, "name": name, "cat": "mark", "args": args}
        case kind if kind in SPANS:
            return _bar(sample, COMPUTE, SPANS[kind], step=sample.step)
    return None


def _bar(sample: Sample, lane: int, name: str, **args: Any) -> dict[str, Any]:
    duration = max(0, sample.ended - sample.began) / 1e3
    return {"ph": "X", "tid": lane, "name": name, "cat": sample.kind.name.lower(), "dur": duration, "args": args}


def _collective(sample: Sample) -> dict[str, Any]:
    name = Operation(sample.code & ~BLOCKING).name.lower().replace("_", "-")
    queued = (sample.began - sample.queued) / 1e3 if sample.queued else 0.0
    return _bar(
        sample,
        COLLECTIVES,
        name,
        bytes=sample.amount,
        bucket=sample.number,
        serial=sample.serial,
        step=sample.step,
        queued_us=queued,
        blocking=bool(sample.code & BLOCKING),
    )


def _counter(name: str, **values: float) -> dict[str, Any]:
    return {"ph": "C", "tid": 0, "name": name, "args": values}
