"""Samples sorted into tables of steps and of collectives, a row a replica. Knows no rings, and draws no conclusions.

Both tables are as long as is remembered: what belongs to step or serial `k` lies in column `k mod length`, so that one
column is one step, or one collective, on all replicas. Times are nanoseconds.
"""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from mirror_nb.telemetry.samples import BLOCKING, Kind, Samples

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
PARTS = ("data", "forward", "backward", "exposed", "optimizer")
# Of a step: `exposed` is the time of collectives beside which nothing was computed.
SPANS = {Kind.DATA: "data", Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.OPTIMIZER: "optimizer"}

_FIRST, _LAST = int(Kind.FORWARD), int(Kind.OPTIMIZER)


def in_computing(kinds: NDArray[np.uint16]) -> NDArray[np.bool_]:
    """Return which of the kinds are spans of computing: FORWARD, BACKWARD and OPTIMIZER, which are neighbours."""
    return (kinds >= _FIRST) & (kinds <= _LAST)


@final
class Cover:
    """A set of moments, made of intervals, that says how much of other intervals lies in it."""

    def __init__(self, began: Integers, ended: Integers) -> None:
        self._edges = np.empty(0, np.int64)
        if not began.size:
            # As it mostly is with blocking collectives: nothing to set up.
            return
        starts, ends = disjoint(began, ended)
        self._edges = np.stack([starts, ends], axis=1).ravel()
        self._before = np.stack([np.zeros_like(starts), ends - starts], axis=1).ravel().cumsum()

    def within(self, began: Integers, ended: Integers) -> Integers:
        """Return how many nanoseconds of each interval lie in this set."""
        if not self._edges.size:
            return np.zeros(len(began), np.int64)
        # Relative to the first edge, so that doubles hold them exactly.
        origin = self._edges[0]
        edges, before = (self._edges - origin).astype(float), self._before.astype(float)
        reached = [np.interp((at - origin).astype(float), edges, before) for at in (began, ended)]
        return np.rint(reached[1] - reached[0]).astype(np.int64)


def disjoint(began: Integers, ended: Integers) -> tuple[Integers, Integers]:
    """Return the intervals by their beginnings, each cut to what the earlier ones leave of it; none are negative."""
    if not began.size:
        return began, ended
    order = np.argsort(began, kind="stable")
    began, ended = began[order], ended[order]
    until = np.maximum.accumulate(ended)
    began = np.maximum(began, np.concatenate([began[:1], until[:-1]]))
    return began, np.maximum(began, ended)


@final
class StepTable:
    """What each replica spent each step on: columns as attributes, of shape (replicas, length)."""

    COLUMNS = ("began", "ended", "examples", *PARTS, "collectives", "bytes", "wait", "late")
    # `wait`: for peers, a part of "exposed". `late`: behind the first at the worst collective of the step.

    def __init__(self, num_replicas: int, length: int) -> None:
        self.length = length
        self.step: Integers = np.zeros((num_replicas, length), np.int64)
        # 0: nothing there.
        self._columns = {name: np.zeros((num_replicas, length), np.int64) for name in self.COLUMNS}

    def __getitem__(self, name: str) -> Integers:
        return self._columns[name]

    def place(
        self, replica_id: int, steps: Integers, begin: NDArray[np.bool_] | bool = False
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the places of these steps, made ready, and which of them are remembered; steps below 1 are none.

        What is known of those that `begin` is forgotten.
        """
        known = self.step[replica_id]
        places = steps % self.length
        # Samples of a step that is forgotten, or will be with this very call, would spoil the one in its place.
        keep = (steps > max(0, int(steps.max(initial=0)) - self.length)) & (steps >= known[places])
        fresh = keep & ((known[places] != steps) | begin)
        if fresh.any():
            self._clear(replica_id, places[fresh])
            known[places[fresh]] = steps[fresh]
        return places, keep

    def add(self, replica_id: int, name: str, places: Integers, amounts: Integers) -> None:
        """Add the amounts to a column, each at its place."""
        np.add.at(self._columns[name][replica_id], places, amounts)

    def raise_to(self, replica_id: int, name: str, places: Integers, amounts: Integers) -> None:
        """Set a column at these places to the amounts where they are greater than what is there."""
        np.maximum.at(self._columns[name][replica_id], places, amounts)

    def put(self, replica_id: int, name: str, places: Integers, values: Integers) -> None:
        """Set a column at these places."""
        self._columns[name][replica_id, places] = values

    def window(self, last: int, count: int) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Return the `count` steps up to `last`, their places, and (replicas, steps) which of them have ended."""
        steps = np.arange(max(1, last - min(count, self.length) + 1), last + 1)
        places = steps % self.length
        return steps, places, (self.step[:, places] == steps) & (self._columns["ended"][:, places] > 0)

    def _clear(self, replica_id: int, places: Integers) -> None:
        for column in self._columns.values():
            column[replica_id, places] = 0


@final
class CollectiveTable:
    """When each replica was in each collective: columns of shape (replicas, length)."""

    COLUMNS = ("step", "operation", "bytes", "queued", "began", "ended", "exposed")

    def __init__(self, num_replicas: int, length: int) -> None:
        self.length = length
        self.serial: Integers = np.full((num_replicas, length), -1, np.int64)
        self._compared = np.full(length, -1, np.int64)
        # The serial of each column that `news` has told of.
        self._columns = {name: np.zeros((num_replicas, length), np.int64) for name in self.COLUMNS}

    def __getitem__(self, name: str) -> Integers:
        return self._columns[name]

    def add(self, replica_id: int, rows: Samples, exposed: Integers) -> None:
        """Enter finished collectives, with the part of each that nothing was computed beside."""
        places = rows["serial"] % self.length
        self.serial[replica_id, places] = rows["serial"]
        values = {
            "step": rows["step"],
            "operation": rows["code"] & ~np.uint16(BLOCKING),
            "bytes": rows["amount"],
            "queued": rows["queued"],
            "began": rows["began"],
            "ended": rows["ended"],
            "exposed": exposed,
        }
        for name, value in values.items():
            self._columns[name][replica_id, places] = value

    def news(self) -> NDArray[np.intp]:
        """Return the places of the collectives that every replica has done since the last call."""
        first = self.serial[0]
        fresh = np.flatnonzero(first != self._compared)
        places = fresh[(self.serial[:, fresh] == first[fresh]).all(axis=0)]
        self._compared[places] = first[places]
        return places

    def common(self) -> NDArray[np.intp]:
        """Return the places of the collectives that every replica has done, in the order of their serials."""
        first = self.serial[0]
        places = np.nonzero((self.serial == first).all(axis=0) & (first >= 0))[0]
        return places[np.argsort(first[places])]


def exposed_parts(rows: Samples, compute: Cover) -> Integers:
    """Return how long each finished collective of one replica held up its computing, in nanoseconds.

    A blocking one does for its whole length; of the others, what no span of computing covers. What two of them share
    counts once.
    """
    exposed = rows["ended"] - rows["began"]
    beside = np.nonzero((rows["code"] & BLOCKING) == 0)[0]
    beside = beside[np.argsort(rows["began"][beside], kind="stable")]
    began, ended = disjoint(rows["began"][beside], rows["ended"][beside])
    exposed[beside] = ended - began - compute.within(began, ended)
    return exposed
