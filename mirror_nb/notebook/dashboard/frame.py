"""What one picture shows: a snapshot, and what is known beside it. Knows neither rings nor how anything is drawn."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import final

import numpy as np

from mirror_nb.telemetry.findings import Finding, Weight
from mirror_nb.telemetry.machine import Reading
from mirror_nb.telemetry.snapshot import Curve, Floats, Snapshot, State

OTHERS = 3
# Scalars that are drawn beside the loss.
LATEST = 10
# Points of a line of which its label gives the mean.


class Phase(enum.Enum):
    """Where a training stands. The values are what the screen says."""

    WAITING = "waiting"
    # Nothing was written yet.
    RUNNING = "running"
    PAUSING = "pausing"
    # Asked to pause; a step is still going on.
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    # An exception or a dead replica ended it.
    INTERRUPTED = "interrupted"
    # By the user, in the middle of a step.

    @property
    def over(self) -> bool:
        """Whether no step will follow."""
        return self in (Phase.STOPPED, Phase.FINISHED, Phase.FAILED, Phase.INTERRUPTED)

    @classmethod
    def of(cls, shot: Snapshot) -> Phase:
        """Return what the replicas' samples alone tell."""
        states = {replica.state for replica in shot.replicas}
        if State.PAUSED in states:
            # One that is not, with DDP, has begun a step in which it waits for those that are.
            return cls.PAUSED
        alike = {State.WAITING: cls.WAITING, State.STOPPED: cls.STOPPED}
        return alike.get(states.pop(), cls.RUNNING) if len(states) == 1 else cls.RUNNING


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """One picture's contents; every text may come from users and is escaped where it is drawn."""

    snapshot: Snapshot
    findings: tuple[Finding, ...] = ()
    readings: tuple[Reading, ...] = ()
    # Of the devices over the last half minute, oldest first.
    devices: tuple[str, ...] = ()
    # Of each replica, as its readings call it; may be shorter.
    title: str = ""
    # What is trained.
    operation: str = ""
    # The cross-device ops.
    speed_up: float | None = None
    # Throughput against one replica's; None where that was not measured.
    phase: Phase = Phase.RUNNING
    note: str = ""
    # A sentence that matters more than all numbers, as that a replica has died.
    since: int = 0
    # The last step before those that it shows, of an earlier cell.

    def curve(self) -> tuple[str, Curve] | None:
        """Return the name and the curve that is drawn: the loss, else the first; None before any was logged."""
        curves = self.snapshot.curves
        name = "loss" if "loss" in curves else next(iter(curves), None)
        return None if name is None else (name, curves[name])

    def others(self) -> list[tuple[str, Curve]]:
        """Return the names and curves of the scalars that are drawn small, below the first one."""
        chosen = self.curve()
        found = [(name, c) for name, c in self.snapshot.curves.items() if chosen is None or name != chosen[0]]
        return [(name, curve) for name, curve in found if np.isfinite(curve.mean).any()][:OTHERS]

    def device(self, replica_id: int) -> str:
        """Return the name of a replica's device, or the replica's own."""
        return self.devices[replica_id] if replica_id < len(self.devices) else f"r{replica_id}"

    def histories(self) -> list[list[Reading]]:
        """Return the readings of each replica's device, oldest first."""
        found: dict[str, list[Reading]] = {}
        for reading in self.readings:
            found.setdefault(reading.device, []).append(reading)
        return [found.get(self.device(r), []) for r in range(self.snapshot.num_replicas)]

    def troubled(self) -> bool:
        """Whether the training stands still, is wrong, or has failed."""
        return self.phase is Phase.FAILED or any(f.weight is Weight.TROUBLE for f in self.findings)

    def slow(self) -> frozenset[int]:
        """Return the replicas for which the others wait, as a finding says."""
        return frozenset(f.replica_id for f in self.findings if f.replica_id is not None and f.awaited)


def latest(values: Floats) -> list[float]:
    """Return where each line, a row, is by now: the mean of its last points; NaN if it has none."""
    if np.isfinite(values[:, -LATEST:]).all() and values.shape[1]:
        # As mostly: one call for all rows.
        return values[:, -LATEST:].mean(axis=1).tolist()
    known = [row[np.isfinite(row)][-LATEST:] for row in values]
    return [float(row.mean()) if len(row) else math.nan for row in known]
