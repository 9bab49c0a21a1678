"""Samples sorted into tables of steps and of collectives, a row a replica. Knows no rings, and draws no conclusions.

Both tables are as long as is remembered: what belongs to step or serial `k` lies in column `k mod length`, so that one
column is one step, or one collective, on all replicas. Times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from mirror_nb.telemetry.samples import BLOCKING, Kind, Samples

Integers = NDArray[np.int64]
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
    """What each replica spent each step on: columns as attributes, of shape (replicas, length).

    A place is a step's, and a replica's: the column in the replica's row, counted on over all rows.
    """

    COLUMNS = ("began", "ended", "examples", *PARTS, "collectives", "bytes", "wait", "late", "whole")
    # `wait`: for peers, a part of "exposed". `late`: behind the first at the worst collective of the step.
    # `whole`: how long it was, by the clock of its parts; -1: a GPU is yet to tell.

    def __init__(self, num_replicas: int, length: int) -> None:
        self.length = length
        self.step: Integers = np.zeros((num_replicas, length), np.int64)
        # 0: nothing there.
        self._known = self.step.reshape(-1)
        # One memory for all columns, so that one move clears a step in each.
        self._cells = np.zeros((len(self.COLUMNS), num_replicas * length), np.int64)
        self._columns = {
            name: cells.reshape(num_replicas, length) for name, cells in zip(self.COLUMNS, self._cells, strict=True)
        }

    def __getitem__(self, name: str) -> Integers:
        return self._columns[name]

    def at(self, places: Integers, names: Sequence[str] = COLUMNS) -> dict[str, Integers]:
        """Return columns at these steps' places in a row: arrays of shape (replicas, places)."""
        # Without a gap the memory is copied as it lies.
        whole = len(places) > 0 and int(places[-1]) - int(places[0]) == len(places) - 1
        where = slice(int(places[0]), int(places[-1]) + 1) if whole else places
        return {name: self._columns[name][:, where] for name in names}

    def place(
        self, who: Integers, steps: Integers, begin: NDArray[np.bool_] | bool = False
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the places of these replicas' steps, made ready, and which are remembered; steps below 1 are none.

        What is known of those that `begin` is forgotten.
        """
        places = who * self.length + steps % self.length
        newest = np.zeros(len(self.step), np.int64)
        np.maximum.at(newest, who, steps)
        # Samples of a step that is forgotten, or will be with this very call, would spoil the one in its place.
        keep = (steps > np.maximum(0, newest - self.length)[who]) & (steps >= self._known[places])
        fresh = keep & ((self._known[places] != steps) | begin)
        if fresh.any():
            self._cells[:, places[fresh]] = 0
            self._known[places[fresh]] = steps[fresh]
        return places, keep

    def add(self, name: str, places: Integers, amounts: Integers) -> None:
        """Add the amounts to a column, each at its place."""
        np.add.at(self._flat(name), places, amounts)

    def raise_to(self, name: str, places: Integers, amounts: Integers) -> None:
        """Set a column at these places to the amounts where they are greater than what is there."""
        np.maximum.at(self._flat(name), places, amounts)

    def put(self, name: str, places: Integers, values: Integers) -> None:
        """Set a column at these places."""
        self._flat(name)[places] = values

    def _flat(self, name: str) -> Integers:
        return self._cells[self.COLUMNS.index(name)]

    def window(self, last: int, count: int) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Return the `count` steps up to `last`, their places, and (replicas, steps) which of them have ended."""
        steps = np.arange(max(1, last - min(count, self.length) + 1), last + 1)
        places = steps % self.length
        return steps, places, (self.step[:, places] == steps) & (self._columns["ended"][:, places] > 0)


@final
class CollectiveTable:
    """When each replica was in each collective: columns of shape (replicas, length)."""

    COLUMNS = ("step", "operation", "bytes", "queued", "began", "ended", "exposed")

    def __init__(self, num_replicas: int, length: int) -> None:
        self.length = length
        self.serial: Integers = np.full((num_replicas, length), -1, np.int64)
        self._compared = np.full(length, -1, np.int64)
        # The serial of each column that `news` has told of.
        self._cells = np.zeros((len(self.COLUMNS), num_replicas * length), np.int64)
        self._columns = {
            name: cells.reshape(num_replicas, length) for name, cells in zip(self.COLUMNS, self._cells, strict=True)
        }

    def __getitem__(self, name: str) -> Integers:
        return self._columns[name]

    def add(self, who: Integers, rows: Samples, exposed: Integers) -> None:
        """Enter these replicas' finished collectives, with the part of each that nothing was computed beside."""
        serials = rows["serial"]
        places = who * self.length + serials % self.length
        self.serial.reshape(-1)[places] = serials
        operations = (rows["code"] & ~np.uint16(BLOCKING)).astype(np.int64)
        times = (rows[name] for name in ("amount", "queued", "began", "ended"))
        self._cells[:, places] = np.stack([rows["step"], operations, *times, exposed])

    def news(self) -> NDArray[np.intp]:
        """Return the places of the collectives that every replica has done since the last call."""
        first = self.serial[0]
        fresh = np.flatnonzero(first != self._compared)
        places = fresh[(self.serial[:, fresh] == first[fresh]).all(axis=0)]
        self._compared[places] = first[places]
        return places

    def shortest(self, places: NDArray[np.intp]) -> Integers:
        """Return how long the replica was in each of these collectives that was in it the shortest."""
        first = int(places.min())
        # All between, mostly the same: to pick them in each row takes five times as long.
        where = slice(first, int(places.max()) + 1)
        return (self["ended"][:, where] - self["began"][:, where]).min(axis=0)[places - first]

    def common(self) -> NDArray[np.intp]:
        """Return the places of the collectives that every replica has done, in the order of their serials."""
        first = self.serial[0]
        places = np.nonzero((self.serial == first).all(axis=0) & (first >= 0))[0]
        return places[np.argsort(first[places])]


def exposed_parts(began: Integers, ended: Integers, blocking: NDArray[np.bool_], compute: Cover) -> Integers:
    """Return how long each finished collective held up computing, in nanoseconds.

    A blocking one does for its whole length; of the others, what no span of computing covers. What two of them share
    counts once. The times of several replicas must lie apart from each other.
    """
    exposed = ended - began
    beside = np.flatnonzero(~blocking)
    beside = beside[np.argsort(began[beside], kind="stable")]
    began, ended = disjoint(began[beside], ended[beside])
    exposed[beside] = ended - began - compute.within(began, ended)
    return exposed
