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
