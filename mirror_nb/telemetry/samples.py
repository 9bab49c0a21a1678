"""What a sample is: its kinds, its fields and their 64 bytes. Knows neither rings nor what is made of samples.

One layout serves every kind. Times are nanoseconds of `clock`, which all processes of a machine share; 0 is "none".

| kind | code | number | step | amount | queued | began, ended | value |
|---|---|---|---|---|---|---|---|
| STEP_BEGUN | | | step | | | began | |
| STEP_ENDED | ON_GPU | | step | examples of this replica | | both | |
| GPU_STEP | | | step | | | both, on the GPU | |
| DATA, FORWARD, BACKWARD, OPTIMIZER | | | step | | | both | |
| COLLECTIVE | Operation, BLOCKING | bucket | step | bytes | queued | both; ended 0: still in it | `serial` |
| COLLECTIVE | Operation, OVER | bucket | step | bytes | | began: when it ended | `serial` |
| SCALAR | | name | step | | | began: when | the number |
| MEMORY | | | step | bytes allocated | bytes reserved | began: when | |
| MARK | Mark | | step | what the mark says | | began: when | |
| CHECKSUM | | name, −1: of all | step | the checksum | | began: when | |

A step begins when the replica asks for its batch and ends with the optimizer. BACKWARD ends when the last gradient is
ready, before the wait for reductions. Steps are counted from 1 over the life of a strategy, alike on all replicas; so
are collectives by their `serial`, which tells that two samples of two replicas are the same collective.

On a GPU the times of a step's parts and collectives, and of GPU_STEP, tell when it computed them, and are written when
it has: after STEP_ENDED, whose times tell when the replica asked for that.
"""

from __future__ import annotations

import enum
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

clock = time.monotonic_ns
# On Linux the same clock in all processes, and the one behind perf_counter_ns.

BLOCKING = 0x100
# Beside an Operation: the collective ran where the replica computes, so that nothing could go on beside it.
OVER = 0x200
# Beside an Operation: the collective is over; its times come with those of its step.
ON_GPU = 1
# Of a step's end: a GPU is behind, and GPU_STEP will tell how long the step was there.


class Kind(enum.IntEnum):
    """What a sample tells; 0 is none, as memory that was never written."""

    STEP_BEGUN = 1
    STEP_ENDED = 2
    DATA = 3
    # Waiting for the next batch.
    FORWARD = 4
    BACKWARD = 5
    OPTIMIZER = 6
    COLLECTIVE = 7
    SCALAR = 8
    # A loss or a metric.
    MEMORY = 9
    MARK = 10
    CHECKSUM = 11
    # Of the replica's parameters.
    GPU_STEP = 12
    # When a GPU began and ended a step.


class Operation(enum.IntEnum):
    """What a collective does."""

    OTHER = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALL_GATHER = 4
    BARRIER = 7


class Mark(enum.IntEnum):
    """Something that happened at a moment."""

    RESTARTED = 1
    # Another process goes on with this ring.
    RUNNING = 2
    # Goes on after a pause, or begins.
    PAUSED = 3
    STOPPED = 4
    EPOCH = 5
    # An epoch begins; its amount is the number, from 1.
    PLANNED = 6
    # Its amount is the number of the last step that this training will do, from 1, plus none if unknown.


RECORD = struct.Struct("@HHiqqqqqdQ")
# Native: each field is stored by one aligned move, in this order, the sequence number last.
COLLECTIVE = struct.Struct("@HHiqqqqqqQ")
# The same with an integer in the place of `value`.
DTYPE = np.dtype(
    {
        "names": [
            *("kind", "code", "number", "step", "amount", "queued"),
            *("began", "ended", "value", "serial", "sequence"),
        ],
        "formats": ["u2", "u2", "i4", "i8", "i8", "i8", "i8", "i8", "f8", "i8", "u8"],
        # `value` and `serial` are two readings of the same bytes.
        "offsets": [0, 2, 4, 8, 16, 24, 32, 40, 48, 48, 56],
        "itemsize": 64,
    }
)

_BYTES = np.dtype("V64")
Samples = NDArray[np.void]
# One-dimensional, of DTYPE.


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample by itself, to look at; work is done on arrays of them."""

    kind: Kind
    code: int
    # Operation or Mark, by kind.
    number: int
    # Collectives: the bucket. Scalars: the number of the name.
    step: int
    amount: int
    # Examples, bytes, an epoch, a checksum: by kind.
    queued: int
    # Nanoseconds of `clock`; of memory: bytes reserved.
    began: int
    # Nanoseconds of `clock`.
    ended: int
    # Nanoseconds of `clock`; 0 where a sample has no end, or not yet.
    value: float
    # Scalars only.
    serial: int
    # Collectives only.


def joined(parts: Sequence[Samples]) -> Samples:
    """Return samples behind one another; as plain bytes, since numpy would compare all fields' types each time."""
    return np.concatenate([part.view(_BYTES) for part in parts]).view(DTYPE)


def decode(rows: Samples) -> list[Sample]:
    """Return the samples one by one, those of unknown kinds left out."""
    known = rows[np.isin(rows["kind"], list(Kind))]
    fields = ("kind", "code", "number", "step", "amount", "queued", "began", "ended", "value", "serial")
    found = []
    for kind, *integers, value, serial in zip(*(known[name].tolist() for name in fields), strict=True):
        ends = (0.0, serial) if kind == Kind.COLLECTIVE else (value, 0)
        found.append(Sample(Kind(kind), *integers, *ends))
    return found


def last_collective(rows: Samples) -> str:
    """Say which collective was recorded last: what it is, in which step, how long ago; empty if there is none."""
    found = rows[rows["kind"] == Kind.COLLECTIVE]
    if not len(found):
        return ""
    code, step, nbytes, queued, ended = (
        int(found[-1][name]) for name in ("code", "step", "amount", "queued", "ended")
    )
    name = Operation(code & ~(BLOCKING | OVER)).name.lower()
    if code & OVER:
        ended = int(found[-1]["began"])
    ago = (clock() - (ended or queued)) / 1e9
    return f"{name} of {nbytes} bytes in step {step}, {'ended' if ended else 'begun and not ended'} {ago:.1f} s ago"
