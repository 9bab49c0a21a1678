"""Traces: a file that Perfetto and chrome://tracing open, by their format's rules."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from made_rings import MB, MadeRings

from mirror_nb.telemetry.samples import Mark

NEEDED = {
    # "Trace Event Format": the fields of each phase.
    "X": {"name": str, "cat": str, "ts": (int, float), "dur": (int, float), "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "C": {"name": str, "ts": (int, float), "pid": int, "args": dict},
    "i": {"name": str, "s": str, "ts": (int, float), "pid": int, "tid": int},
}


@pytest.fixture
def events(tmp_path):
    with MadeRings(2) as made:
        made.mark(Mark.EPOCH, 1)
        made.step(3)
        made.log("loss", [0.5, float("nan")])
        made.log_memory(100)
        made.stall(1, seconds=1)
        made.timeline.update(now=made.now)
        path = made.timeline.save(tmp_path / "trace.json")
        return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))[
            "traceEvents"
        ]


def bars(events: list[dict[str, Any]], replica_id: int, lane: int) -> list[dict[str, Any]]:
    return [e for e in events if (e["ph"], e["pid"], e.get("tid")) == ("X", replica_id, lane)]


def test_every_event_has_the_fields_of_its_phase(events):
    assert {event["ph"] for event in events} == set(NEEDED)
    for event in events:
        for name, kind in NEEDED[event["ph"]].items():
            assert isinstance(event[name], kind), (name, event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())


def test_each_replica_is_a_process_with_named_lanes(events):
    names = {(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names == {
        (replica_id, lane, name)
        for replica_id in (0, 1)
        for lane, name in enumerate([f"replica {replica_id}", "steps", "compute", "collectives"])
    }


def test_lanes_hold_steps_computing_and_collectives(events):
    for replica_id in (0, 1):
        steps, compute, collectives = (bars(events, replica_id, lane) for lane in (1, 2, 3))
        assert [bar["name"] for bar in steps] == ["step 1", "step 2", "step 3"]
        assert [bar["name"] for bar in compute[:4]] == ["data", "forward", "backward", "optimizer"]
        assert [bar["name"] for bar in collectives] == ["all-reduce"] * 12
        assert collectives[0]["args"]["bytes"] == 25 * MB
        first = steps[0]
        assert all(first["ts"] <= bar["ts"] <= first["ts"] + first["dur"] for bar in compute[:4])


def test_losses_are_counters_where_they_are_numbers(events):
    assert [(e["pid"], e["args"]) for e in events if e["name"] == "loss"] == [(0, {"value": 0.5})]


def test_a_trace_may_be_compressed(tmp_path):
    with MadeRings(1) as made:
        made.step()
        made.timeline.update()
        path = made.timeline.save(str(tmp_path / "trace.json.gz"))
    assert isinstance(path, Path)
    assert json.loads(gzip.decompress(path.read_bytes()))["displayTimeUnit"] == "ms"


def test_an_empty_timeline_is_a_trace_too(tmp_path):
    with MadeRings(1) as made:
        events = json.loads(made.timeline.save(tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}
