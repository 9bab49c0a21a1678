"""Replicas brought to the same values after a failure, and the question whether they have them.

Those that were started anew get what a survivor has, and survivors stand at the same step.

Knows messages; knows neither what the payloads hold nor whose names they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mirror_nb.messages import Check, Restore, Snapshot, StandAt, Standing, Steps
from mirror_nb.pool.base import Pool
from mirror_nb.pool.failures import settle
from mirror_nb.telemetry.comparison import Comparison, compared


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was done."""

    source: int | None
    # The survivor whose values the others have now; None: there was none.
    filled: tuple[int, ...]
    # Replicas that got all its names.
    left: tuple[str, ...]
    # Names that could not travel to them.


def recover(pool: Pool) -> Recovery:
    """Fill the replicas that are blank, and bring the others to one step if a failure left them apart.

    What fails half-way (a replica dies meanwhile, the user interrupts) is done by the next call: a replica stays
    blank until it has everything. Raises what happened to the replicas.
    """
    living = [r for r in range(pool.size) if r not in pool.blank]
    if not living:
        pool.blank.clear()
        pool.apart = False
        return Recovery(None, (), ())
    source = living[0]
    if pool.apart:
        source, _ = _level(pool, living)
        pool.apart = False
    filled = tuple(sorted(pool.blank))
    left = _fill(pool, source, filled) if filled else ()
    pool.blank.clear()
    return Recovery(source, filled, left)


def level(pool: Pool) -> tuple[str, ...]:
    """Bring the replicas that survived a failure to one step, dead ones being replaced later.

    Returns the keys of the optimizers, networks, scalers and Variables that it has changed in one of them. Raises what
    happened to the replicas; `recover` does it then.
    """
    lacking = {*pool.blank, *(death.replica_id for death in pool.dead())}
    living = [r for r in range(pool.size) if r not in lacking]
    if not pool.apart or len(living) < 2:
        return ()
    _, changed = _level(pool, living)
    pool.apart = False
    return changed


def _level(pool: Pool, living: Sequence[int]) -> tuple[int, tuple[str, ...]]:
    """Give the furthest replica's values to those that stand elsewhere; return its id, and under which keys."""
    answers = _ask(pool, Steps(), living)
    steps, sums = ({r: answers[r][i] for r in living} for i in range(2))
    # One that was left halfway is none to go on from, however far it came.
    source = max(living, key=lambda r: (not any(n < 0 for n in steps[r].values()), sum(steps[r].values())))
    apart = {r: [*_others(steps[source], steps[r]), *_gone_apart(sums[source], sums[r])] for r in living}
    keys = tuple(sorted({key for mine in apart.values() for key in mine}))
    behind = [r for r in living if apart[r]]
    if behind:
        _send(pool, Standing(keys), source, StandAt, behind)
    return source, keys


def _others(source: dict[str, int], other: dict[str, int]) -> list[str]:
    """Return the keys of both under which they have different numbers."""
    return [key for key, number in source.items() if other.get(key, number) != number]


def _gone_apart(source: dict[str, tuple[int, int]], other: dict[str, tuple[int, int]]) -> list[str]:
    """Return the keys of both under which they were equal and are no more."""
    both = source.keys() & other.keys()
    return [key for key in both if source[key][0] == other[key][0] and source[key][1] != other[key][1]]


def compare(pool: Pool) -> Comparison:
    """Return whether all replicas have equal parameters. Raises what happened to the replicas."""
    return compared(list(_ask(pool, Check(), range(pool.size)).values()))


def _ask(pool: Pool, question: object, replicas: Sequence[int]) -> dict[int, Any]:
    report = pool.run(dict.fromkeys(replicas, question))
    settle(report, pool.devices)
    return {replica_id: answer for replica_id, (answer, _) in report.unpacked().items()}


def _fill(pool: Pool, source: int, blank: Sequence[int]) -> tuple[str, ...]:
    left: tuple[str, ...] = ()
    while True:
        left, refused = _send(pool, Snapshot(left), source, Restore, blank)
        if not refused:
            return left
        # A module that is not to be found any more, for instance. Who refuses has taken nothing over.
        left += refused


def _send(
    pool: Pool, question: object, source: int, kind: type[Restore] | type[StandAt], replicas: Sequence[int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Hand a replica's answer on to others; return what it had to leave out, and what they could not take."""
    report = pool.run({source: question})
    settle(report, pool.devices)
    answer = report.answers[source]
    try:
        assert answer.done is not None
        assert answer.done.payload is not None
        requests = {r: kind(answer.done.payload) for r in replicas}
        taken = pool.run(requests, slabs=dict.fromkeys(replicas, answer.slab))
        settle(taken, pool.devices)
        refused = {name for other in taken.answers.values() if other.done is not None for name in other.done.left}
        return answer.done.left, tuple(sorted(refused))
    finally:
        answer.close()
