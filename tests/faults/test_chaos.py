"""A short chaos run for every `make test`; the long one is `make chaos`."""

from __future__ import annotations

from pathlib import Path

import chaos as faults
import pytest
from chaos import SCENES, Chaos, Log, Record, drawn, report_lines

from mirror_nb.pool import recovery

# Thirteen rounds over all fronts: deaths at every kind of place, stops, interrupts, strikes in the recovery.
SEED, ROUNDS = 3, [0, 1, 2, 10, 11, 12, 13, 20, 21, 22, 30, 31, 32]


def test_a_round_is_drawn_from_its_seed_alone():
    assert drawn(1, 5) == drawn(1, 5)
    assert len({str(drawn(1, number)) for number in range(50)}) > 45


def test_nothing_is_lost_whatever_strikes_and_wherever():
    chaos = Chaos(SEED)
    chaos.run(ROUNDS)
    assert not chaos.failures, "\n".join(chaos.failures)
    assert sorted(chaos.records) == ROUNDS


def test_rounds_that_were_noted_are_told_and_not_those_of_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "made" / "chaos.jsonl"
    log = Log(path)
    for record in (Record("ReplicaDied", replaced=2), Record(broken="the weights differ"), Record("no error")):
        log.note(SEED, 7 if record.replaced else 8, record)
    log.note(SEED + 1, 7, Record())
    found = log.rounds(SEED)
    assert found[7].replaced == 2
    assert found[8].broken == "the weights differ", "a second attempt does not take it back"
    lines = report_lines(found, SEED)
    assert lines[0] == f"2 rounds of chaos, seed {SEED}: 1 promises broken"
    assert "the weights differ" in lines[1]
    monkeypatch.setattr(faults, "_digest_of_code", lambda: "another")
    assert Log(path).rounds(SEED) == {}


def test_every_scene_comes_up_in_a_long_run():
    draws = [drawn(1, number) for number in range(500)]
    assert [scene for scene, holds in SCENES.items() if not any(map(holds, draws))] == []


def test_the_harness_finds_a_replica_that_was_started_anew_and_not_filled(monkeypatch: pytest.MonkeyPatch):
    """It would be of no use if it could not fail."""
    monkeypatch.setattr(recovery, "_fill", lambda pool, source, blank: ())
    killed = next(
        number
        for number in range(1000)
        if (draw := drawn(SEED, number)).strikes[0].act == "kill"
        and draw.outside is None
        and draw.recovery is None
        and len(draw.victims) == 1
    )
    chaos = Chaos(SEED)
    chaos.run([killed])
    assert f"--seed {SEED} --only {killed}" in chaos.failures[0]
