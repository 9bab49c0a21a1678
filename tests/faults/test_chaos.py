"""A short chaos run for every `make test`; the long one is `make chaos`."""

from __future__ import annotations

import pytest
from chaos import Chaos, drawn

from mirror_nb.pool import recovery

# Fourteen rounds over both fronts: deaths at every kind of place, stops, interrupts, strikes in the recovery.
SEED, ROUNDS = 3, [0, 1, 2, 10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32]


def test_a_round_is_drawn_from_its_seed_alone():
    assert drawn(1, 5) == drawn(1, 5)
    assert len({str(drawn(1, number)) for number in range(50)}) > 45


def test_nothing_is_lost_whatever_strikes_and_wherever():
    chaos = Chaos(SEED)
    chaos.run(ROUNDS)
    assert not chaos.failures, "\n".join(chaos.failures)
    assert sum(chaos.record.outcomes.values()) == len(ROUNDS)


def test_the_harness_finds_replicas_that_were_left_a_step_apart(monkeypatch: pytest.MonkeyPatch):
    """It would be of no use if it could not fail."""
    monkeypatch.setattr(recovery, "_level", lambda pool, living: living[0])
    apart = next(
        number
        for number in range(1000)
        if (draw := drawn(SEED, number)).strikes[0].act == "raise"
        and draw.strikes[0].point == "after step"
        and draw.recovery is None
        and len(draw.victims) == 1
    )
    chaos = Chaos(SEED)
    chaos.run([apart])
    assert "the replicas stand at steps" in chaos.failures[0]
    assert f"--seed {SEED} --only {apart}" in chaos.failures[0]
