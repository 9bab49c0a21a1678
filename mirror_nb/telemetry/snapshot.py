"""What a timeline shows at one moment, as data for whoever draws it. Knows no rings and no tables."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirror_nb.telemetry.tables import PARTS

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
BREAKDOWN = (*PARTS, "other")
# The columns of Snapshot.breakdown.
UNKNOWN = "some parameters"
# In Snapshot.differing, where it is not known which of them.


class Half(enum.Enum):
    """What one picture shows anew, where the next one shows the other half anew: who stands where is in both."""

    COURSE = ("steps", "throughputs", "curves", "breakdown", "waits", "exposed")
    # How fast it goes and what it comes to. The values are fields of Snapshot.
    MEETINGS = (
        "late_steps", "lateness", "busy", "data_waits", "shares", "all_reduces", "lane_step", "lanes", "hidden",
    )  # fmt: skip
    # Who comes late, and what collectives take.


class State(enum.Enum):
    """What a replica is doing, by its samples."""

    WAITING = "waiting"
    # It has written nothing.
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A replica that is in a collective, the others not all there, or not done."""

    serial: int
    operation: int
    # samples.Operation.
    seconds: float
    # Since it was ready for it.


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica at the moment."""

    replica_id: int
    state: State
    step: int
    # The last that it ended; 0 before the first.
    silent: float | None
    # Seconds since its last sample; None if it has written none.
    throughput: float | None
    # Examples a second, waits left out: over the last steps.
    step_seconds: float | None
    # Mean of the last steps, waits included.
    busy_seconds: float | None
    # The same without the waits for data and for peers.
    allocated: int | None
    # Bytes of device memory in use.
    reserved: int | None
    # Bytes of device memory held.
    peak: int | None
    # Bytes: the most that was seen in use.
    in_collective: Waiting | None
    restarts: int
    # How often another process went on with its ring.


@dataclass(frozen=True, slots=True)
class Curve:
    """One scalar over the replicas, by step; NaN where nobody logged it."""

    mean: Floats
    # (points,): weighed by the examples of each replica.
    low: Floats
    # (points,): the least of any replica.
    high: Floats
    # (points,): the greatest.
    last: float
    # Mean over the replicas at the last step that has one.


@dataclass(frozen=True, slots=True)
class SizeClass:
    """All-reduces of about one size."""

    size: int
    # Bytes: the mean.
    count: int
    # How many are remembered.
    per_step: float
    # How many in a step, on average.
    p50: float
    # Seconds: the median. A collective's time is that of the replica that came last to it: no wait for peers in it.
    p95: float
    # Seconds.
    bus_bandwidth: float
    # Bytes a second: size by median time × 2(n−1)/n (nccl-tests, doc/PERFORMANCE.md: "busbw"), comparable with what
    # the hardware gives.
    seconds: Floats
    # The latest times, oldest first, for drawing how they are distributed.


class LaneSpan(NamedTuple):
    """A bar in a lane. No dataclass: hundreds are made for each frame."""

    part: str
    # One of tables.PARTS, or "collective": the part of one that something was computed beside.
    began: float
    # Seconds since the first replica began the step.
    ended: float
    # Likewise.


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a dashboard draws, at one moment. Arrays have a row a replica; NaN: not known."""

    num_replicas: int
    replicas: tuple[ReplicaState, ...]
    # By replica id.
    step: int
    # The last step that all replicas have ended; 0 before the first.
    steps_planned: int | None
    # The number of the last step to come.
    seconds_left: float | None
    epoch: int | None
    # From 1.
    examples: int
    # Of all steps and replicas so far.
    throughput: float | None
    # Examples a second of all replicas by the wall clock, pauses left out: over the last steps.
    step_seconds: float | None
    # From one step's end to the next one's, likewise.
    exposed: float | None
    # The share of the steps' time in which replicas only communicated or waited for peers, 0 to 1.
    hidden: float | None
    # The share of the collectives' time beside which something was computed, 0 to 1: of the step in `lanes`.
    steps: Integers
    # (points,): the step at which each point of the curves ends.
    throughputs: Floats
    # (replicas, points): examples a second, waits for data and for peers left out.
    curves: Mapping[str, Curve]
    # By the names that were logged.
    breakdown: Floats
    # (replicas, len(BREAKDOWN)): seconds of a step, mean of the last steps.
    waits: Floats
    # (replicas,): seconds of a step spent waiting for peers in collectives; a part of "exposed".
    late_steps: Integers
    # (points,): the steps of `lateness`.
    lateness: Floats
    # (replicas, points): seconds behind the first to arrive at the same collective, the worst of each step.
    busy: Floats
    # (replicas, points): seconds of those steps, waits for data and for peers left out.
    data_waits: Floats
    # (replicas, points): seconds of those steps spent waiting for data.
    shares: Floats
    # (replicas, points): the examples of those steps.
    all_reduces: tuple[SizeClass, ...]
    # By size.
    lane_step: int | None
    # The step that `lanes` shows.
    lanes: tuple[tuple[LaneSpan, ...], ...]
    # For each replica, by time.
    in_sync: bool | None
    # Whether the checksums of all replicas' parameters agreed the last time; None before.
    differing: Mapping[str, tuple[int, ...]]
    # The parameters that did not, and the replicas whose values are not those that most have.
    checked_step: int | None
    # When that was.
    overwritten: int
    # Samples that were lost since the rings were full.
    torn: int
    # Samples that were begun and never finished.
