"""What to look at: plain sentences about a snapshot, with the numbers that they rest on. Silent when not sure.

Each rule below takes what it needs and returns a Finding or None; its docstring says when it speaks.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mirror_nb.readable import listed, milliseconds, size
from mirror_nb.telemetry.machine import HOT, Reading
from mirror_nb.telemetry.samples import Operation
from mirror_nb.telemetry.snapshot import BREAKDOWN, UNKNOWN, Floats, Snapshot

AT_MOST = 3
# Findings told at a time.
ENOUGH = 20
# Steps before anything is said of them.
LATEST = 30
# Steps by which it is judged who is slow.
SLOW = 1.10
# Times the others' time an example.
AWAITED = 0.05
# The share of a step that the others wait for a slow replica.
NOTICED = 1e-4
# Seconds that they wait: less is what the system's own turns take.
STARVED = 0.10
# The share of a step spent waiting for data.
TAKEN = 1e-3
# Seconds: it takes less to cut a batch out of memory, which more loader workers would not hasten.
SMALL = 256 * 1024
# Bytes: an all-reduce under this costs mostly its start.
MANY = 8
# All-reduces a step.
COMMUNICATING = 0.15
# The share of a step in which replicas only communicate.
EXPOSED = 0.30
# The same with waits for peers.
BETWEEN = 0.30
# The share of the time that passes between steps.
STUCK = 5.0
# Seconds in one collective, and at least ten steps' time.


class Weight(enum.IntEnum):
    """How much a finding matters; the higher comes first."""

    HINT = 1
    # Something to gain.
    SLOW = 2
    # Time is being lost.
    TROUBLE = 3
    # The training stands still, or is wrong.


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to look at."""

    weight: Weight
    title: str
    # A sentence for the screen.
    detail: str
    # The numbers, and what could be done.
    replica_id: int | None
    # Whose it is; None if it is everybody's.
    lost: float
    # The share of the steps' time that it takes, 0 to 1: of equal weight, the greater comes first.
    awaited: bool = True
    # Whether the others wait for that replica.


def findings(snapshot: Snapshot, readings: Sequence[Reading] = ()) -> tuple[Finding, ...]:
    """Return what is most worth saying, at most three.

    `readings`: those of the devices over the last half minute or so, oldest first.
    """
    slow = slow_replica(snapshot)
    found = [
        stuck(snapshot),
        out_of_sync(snapshot),
        throttled(readings),
        slow,
        starved(snapshot),
        small_buckets(snapshot),
        # How long a slow replica is waited for is told with it.
        (None if slow else exposed(snapshot)) or not_overlapped(snapshot),
        crowded(snapshot, readings),
        between_steps(snapshot),
    ]
    said = [finding for finding in found if finding is not None]
    return tuple(sorted(said, key=lambda f: (f.weight, f.lost), reverse=True)[:AT_MOST])


def stuck(snapshot: Snapshot) -> Finding | None:
    """Some replicas have waited in one collective for 5 seconds and 10 steps, and others never came to it."""
    states = snapshot.replicas
    waiting = [state for state in states if state.in_collective is not None]
    serials = {state.in_collective.serial for state in waiting if state.in_collective}
    if len(serials) != 1 or len(waiting) == len(states):
        return None
    seconds = min(state.in_collective.seconds for state in waiting if state.in_collective)
    if seconds < max(STUCK, 10 * (snapshot.step_seconds or 0.0)):
        return None
    missing = [state for state in states if state.in_collective is None]
    what = next(state.in_collective for state in waiting if state.in_collective)
    name = Operation(what.operation).name.lower().replace("_", "-") if what.operation else "collective"
    who = _named([state.replica_id for state in missing])
    silent = [state.silent for state in missing if state.silent is not None]
    since = f"{who} silent for {min(silent):.0f} s" if silent else f"{who} never wrote a sample"
    return Finding(
        Weight.TROUBLE,
        f"{who} did not come to the {name} that the others are in",
        f"{_named([s.replica_id for s in waiting])} waiting for {seconds:.0f} s; {since}",
        missing[0].replica_id if len(missing) == 1 else None,
        1.0,
    )


def out_of_sync(snapshot: Snapshot) -> Finding | None:
    """The last checksums of the parameters differ."""
    if not snapshot.differing:
        return None
    name, ids = next(iter(snapshot.differing.items()))
    others = len(snapshot.differing) - 1
    more = f" and {others} other parameter{'s' if others > 1 else ''}" if others else ""
    return Finding(
        Weight.TROUBLE,
        f"{name}{more} differ{'' if others or name == UNKNOWN else 's'} on {_named(ids)}",
        f"checksums at step {snapshot.checked_step:,}: something changes parameters on one replica only",
        ids[0] if len(ids) == 1 else None,
        1.0,
        awaited=False,
    )


def slow_replica(snapshot: Snapshot) -> Finding | None:
    """One replica takes 10 % more busy time an example, or a step where none are told, than the others' median.

    So in the median of the last 30 steps, 20 at least, and in three of four of them; and the others wait for it for
    5 % of a step, and 0.1 ms. Where replicas meet nowhere, nobody waits, and the slow one's own loss counts.
    """
    cost = _cost(snapshot)[:, -LATEST:]
    if snapshot.num_replicas < 2 or cost.shape[1] < ENOUGH:
        return None
    slowest = int(np.argmax(_medians(cost.T)))
    ratio = cost[slowest] / _medians(np.delete(cost, slowest, axis=0))
    typical = float(_medians(ratio))
    if typical < SLOW or np.mean(ratio > 1 + (SLOW - 1) / 2) < 0.75:
        return None
    busy, step = snapshot.replicas[slowest].busy_seconds, snapshot.replicas[slowest].step_seconds
    lost = (1 - 1 / typical) * busy / step if busy and step else 1 - 1 / typical
    waited = float(np.delete(snapshot.waits, slowest).mean())
    cause = waited if np.nan_to_num(snapshot.lateness).any() else lost * (step or 0.0)
    if cause < max(NOTICED, AWAITED * (step or 0.0)):
        return None
    return Finding(
        Weight.SLOW,
        f"r{slowest} is slow: +{(typical - 1) * 100:.0f} % time {'an example' if _told(snapshot) else 'a step'}",
        f"{_since(snapshot, slowest)}the others wait {milliseconds(waited)} a step for it",
        slowest,
        lost,
    )


def starved(snapshot: Snapshot) -> Finding | None:
    """Waiting for data takes 10 % of the steps, 20 at least, and 1 ms, in the mean and in the median."""
    step = snapshot.breakdown.sum(axis=1)
    waited = snapshot.breakdown[:, BREAKDOWN.index("data")]
    if not _enough(snapshot) or not step.any():
        return None
    share = np.divide(waited, step, out=np.zeros_like(step), where=step > 0)
    worst = int(np.argmax(share))
    data = snapshot.data_waits[worst]
    data = data[np.isfinite(data)]
    if share[worst] < STARVED or not len(data) or np.median(data) < max(TAKEN, STARVED * step[worst]):
        return None
    everybody = bool((share >= STARVED).all())
    return Finding(
        Weight.SLOW,
        f"Data comes too slowly: {share[worst] * 100:.0f} % of a step is spent waiting for it",
        f"{'all replicas' if everybody else f'r{worst}'}, {milliseconds(float(waited[worst]))} a step: "
        "more loader workers, or less work on each example",
        None if everybody else worst,
        float(share[worst]),
        awaited=False,
    )


def small_buckets(snapshot: Snapshot) -> Finding | None:
    """Eight or more all-reduces a step have under 256 KB each, and replicas stand still in communication for 5 %."""
    small = [size for size in snapshot.all_reduces if size.size < SMALL]
    per_step = sum(size.per_step for size in small)
    exposed = _own_communication(snapshot)
    if not _enough(snapshot) or per_step < MANY or exposed < 0.05:
        return None
    most = max(small, key=lambda size: size.per_step)
    return Finding(
        Weight.HINT,
        f"{per_step:.0f} small all-reduces a step",
        f"mostly of {size(most.size)}, at {most.bus_bandwidth / 1e9:.1f} GB/s: larger buckets would cost less",
        None,
        exposed,
    )


def not_overlapped(snapshot: Snapshot) -> Finding | None:
    """Replicas only communicate, waits for peers left out, for 15 % of a step; less than half of it is hidden.

    Where it is 30 % with the waits, whatever is hidden.
    """
    exposed, waiting = _own_communication(snapshot), _waiting(snapshot)
    if not _enough(snapshot) or exposed < COMMUNICATING or snapshot.hidden is None:
        return None
    if snapshot.hidden >= 0.5 and exposed + waiting < EXPOSED:
        return None
    return Finding(
        Weight.HINT,
        f"{exposed * 100:.0f} % of a step is exposed communication, waits left out",
        f"{snapshot.hidden * 100:.0f} % of all communication is hidden: larger batches, or smaller buckets, hide more",
        None,
        exposed,
    )


def exposed(snapshot: Snapshot) -> Finding | None:
    """Replicas only communicate or wait for peers for 30 % of a step, and for half of that they wait."""
    own, waiting = _own_communication(snapshot), _waiting(snapshot)
    if not _enough(snapshot) or own + waiting < EXPOSED or waiting < own:
        return None
    return Finding(
        Weight.HINT,
        # Its share of a step is a key number of every picture already.
        f"{waiting / (own + waiting) * 100:.0f} % of the exposed communication is waiting for peers",
        "now for one and now for another: steps that take as long on every replica wait less",
        None,
        own + waiting,
    )


def crowded(snapshot: Snapshot, readings: Sequence[Reading]) -> Finding | None:
    """Replicas on the CPU are more than the cores that the machine has for them."""
    on_cpu = len({reading.device for reading in readings if reading.device.startswith("cpu:")})
    cores = next((reading.cores for reading in reversed(readings) if reading.cores), None)
    if cores is None or not cores < on_cpu <= snapshot.num_replicas:
        return None
    return Finding(
        Weight.HINT,
        f"{on_cpu} replicas share {cores} core{'s' if cores > 1 else ''}",
        f"they compute in turns, and wait for each other meanwhile: {cores} would be as fast",
        None,
        1 - cores / on_cpu,
    )


def between_steps(snapshot: Snapshot) -> Finding | None:
    """From the end of a step to the beginning of the next one, on every replica, 30 % of the time passes."""
    step = float(snapshot.breakdown.sum(axis=1).max())
    if not _enough(snapshot) or not snapshot.step_seconds or snapshot.step_seconds * (1 - BETWEEN) < step:
        return None
    between = snapshot.step_seconds - step
    return Finding(
        Weight.HINT,
        f"{between / snapshot.step_seconds * 100:.0f} % of the time passes between steps",
        f"{milliseconds(between)} a step, which no panel shows: evaluating, saving, calls, or waiting for a replica",
        None,
        between / snapshot.step_seconds,
    )


def throttled(readings: Sequence[Reading]) -> Finding | None:
    """A device lowered its clock for heat or power supply in most of its readings, 5 at least."""
    found: list[Finding] = []
    by_device: dict[str, list[Reading]] = {}
    for reading in readings:
        by_device.setdefault(reading.device, []).append(reading)
    for device, its in by_device.items():
        hot = [reading for reading in its if HOT & set(reading.slowed)]
        if len(its) < 5 or 2 * len(hot) <= len(its):
            continue
        numbers = [", ".join(reason for reason in hot[-1].slowed if reason in HOT)]
        if hot[-1].temperature is not None:
            numbers.append(f"at {hot[-1].temperature:.0f} °C")
        rates = [1 - r.clock_rate / r.clock_limit for r in hot if r.clock_rate and r.clock_limit]
        down = statistics.median(rates) if rates else 0.0
        numbers += [f"clock {down * 100:.0f} % under its limit"] if rates else []
        found.append(Finding(Weight.SLOW, f"{device} throttles", ", ".join(numbers), None, down))
    return max(found, key=lambda finding: finding.lost, default=None)


def _cost(snapshot: Snapshot) -> Floats:
    """Busy seconds an example, (replicas, steps), of steps in which all had some; of a step if none are told."""
    with np.errstate(invalid="ignore", divide="ignore"):
        cost = snapshot.busy / snapshot.shares if _told(snapshot) else snapshot.busy
    return cost[:, (np.isfinite(cost) & (cost > 0)).all(axis=0)]


def _told(snapshot: Snapshot) -> bool:
    """Whether it is known of any step how many examples it had."""
    return bool(np.nan_to_num(snapshot.shares).any())


def _medians(values: Floats) -> Floats:
    """Return what np.median gives over the first axis, in a quarter of its time where values are few."""
    ordered = np.sort(values, axis=0)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _since(snapshot: Snapshot, slow: int) -> str:
    """Since which step, if the steps at hand show it beginning."""
    late = snapshot.busy / np.where(np.nan_to_num(snapshot.shares) > 0, snapshot.shares, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = late[slow] / np.median(np.delete(late, slow, axis=0), axis=0)
    fine = np.nonzero(~(ratio > 1 + (SLOW - 1) / 2))[0]
    # Two fine steps in a row, so that a single one in a slow stretch does not end it.
    pairs = fine[1:][np.diff(fine) == 1]
    return f"since step {snapshot.late_steps[pairs[-1]] + 1:,}; " if len(pairs) else ""


def _own_communication(snapshot: Snapshot) -> float:
    """The share of a step in which replicas only communicate, waits for peers left out."""
    step = snapshot.breakdown.sum(axis=1)
    exposed = snapshot.breakdown[:, BREAKDOWN.index("exposed")] - snapshot.waits
    return float(exposed.mean() / step.mean()) if step.any() else 0.0


def _waiting(snapshot: Snapshot) -> float:
    """The share of a step in which replicas wait for peers."""
    step = snapshot.breakdown.sum()
    return float(snapshot.waits.sum() / step) if step else 0.0


def _enough(snapshot: Snapshot) -> bool:
    return len(snapshot.late_steps) >= ENOUGH


def _named(replica_ids: Sequence[int]) -> str:
    return listed([f"r{replica_id}" for replica_id in replica_ids])
