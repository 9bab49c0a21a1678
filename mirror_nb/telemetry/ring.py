"""A ring of samples in shared memory: one process writes, others read. Knows nothing of what samples are for.

```
0        64            64 + 512·64                       64 bytes each
│ header │ names, fixed │ record │ record │ … │ record │   sequence s lies at s mod capacity
```

The controller makes the ring and passes its descriptor to the replica when that starts; a ring outlives its writer,
so what a dead or stuck replica did last is still there. Nobody locks: the sequence number is stored last, and a record
counts if its number is the expected one and the writer was not near its place again after it was copied.
"""

from __future__ import annotations

import itertools
import mmap
import os
import platform
import struct
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self, final

import numpy as np

from mirror_nb.errors import UsageError
from mirror_nb.machine.nameless import nameless_file
from mirror_nb.telemetry.samples import (
    BLOCKING,
    COLLECTIVE,
    DTYPE,
    ON_GPU,
    OVER,
    RECORD,
    Kind,
    Mark,
    Operation,
    Samples,
    clock,
    joined,
)

CAPACITY = 16_384
# Records: 1 MB a replica; at 100 steps a second of 20 samples each, eight seconds.
NAMES = 512
# In one ring, of scalars and of parameters.
SCALARS = 128
# So many are left to scalars, however many parameters there are.
REST = "other parameters"
# Those beyond.
OVERALL = -1
# In the place of a name's number: the checksum of all parameters, which is written last.
NAME_BYTES = 62
_SIZE = RECORD.size
_BEGUN, _ENDED, _COLLECTIVE, _SCALAR = map(int, (Kind.STEP_BEGUN, Kind.STEP_ENDED, Kind.COLLECTIVE, Kind.SCALAR))
# Looking a member up in an enum takes as long as writing the record.
_HEADER = struct.Struct("@8sQQ")
_MAGIC = b"mnb ring"
_NAMES_AT = 64
_RECORDS_AT = _NAMES_AT + NAMES * _SIZE
_LOOK = 512
# Records looked at together to find the newest.
_LOW = (1 << 63) - 1
_ORDERED = platform.machine().lower() in {"x86_64", "amd64", "i686"}
# Whether stores are seen in the order in which they were made. Where not, the newest record may be seen before its
# fields: it is left for the next read.


@final
class Ring:
    """The memory of one replica's samples, owned by the controller: `descriptor` is what the replica is given.

    A process that is spawned, or asked of a forkserver, gets it by `multiprocessing.reduction.DupFd(descriptor)`, made
    while its arguments are pickled; there, `.detach()` gives the descriptor for `Writer`.
    """

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.descriptor = descriptor
        self.capacity = capacity

    @classmethod
    def create(cls, capacity: int = CAPACITY) -> Ring:
        """Make an empty ring of `capacity` records, a power of two from 8 on.

        Memory is taken as it is written, and does not count against /dev/shm.

        Raises UsageError for another capacity.
        """
        if capacity < 8 or capacity & (capacity - 1):
            raise UsageError(f"`capacity` is {capacity}; it must be a power of two, 8 or more")
        descriptor = nameless_file("mirror_nb telemetry")
        try:
            os.ftruncate(descriptor, _RECORDS_AT + capacity * _SIZE)
            os.pwrite(descriptor, _HEADER.pack(_MAGIC, capacity, _SIZE), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, capacity)

    def close(self) -> None:
        """Close the descriptor; writers and readers that have the ring open keep it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


@final
class Writer:
    """Writes the samples of this process, from any of its threads, while holding the GIL.

    `descriptor` stays the caller's and may be closed. On a ring that was written to before, the new samples follow the
    old ones, parted by the mark RESTARTED.

    Each method takes times of `clock`, writes one record and never waits.

    Raises UsageError if `descriptor` is no ring.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory, capacity = _mapped(descriptor, mmap.PROT_READ | mmap.PROT_WRITE)
        self._mask = capacity - 1
        records = np.frombuffer(self._memory, DTYPE, capacity, _RECORDS_AT)
        newest = int(records["sequence"].max())
        # A generator's next() is one step under the GIL: no two threads get the same number.
        self._sequence = itertools.count(newest + 1)
        self._names = {name: number for number, name in enumerate(_read_names(self._memory, 0))}
        # Reentrant: a signal's handler may log, too.
        self._naming = threading.RLock()
        self._pack = RECORD.pack_into
        self._pack_collective = COLLECTIVE.pack_into
        if newest:
            self.mark(Mark.RESTARTED, 0)

    def step_begun(self, step: int, began: int) -> None:
        """The replica asks for the batch of this step."""
        n = next(self._sequence)
        place = _RECORDS_AT + (n & self._mask) * 64
        self._pack(self._memory, place, _BEGUN, 0, 0, step, 0, 0, began, 0, 0.0, n)

    def step_ended(self, step: int, examples: int, began: int, ended: int, on_gpu: bool = False) -> None:
        """A step is done, with so many of its examples here; `on_gpu`: a GPU_STEP tells later how long it was."""
        n = next(self._sequence)
        place = _RECORDS_AT + (n & self._mask) * 64
        self._pack(self._memory, place, _ENDED, ON_GPU if on_gpu else 0, 0, step, examples, 0, began, ended, 0.0, n)

    def span(self, kind: Kind, step: int, began: int, ended: int) -> None:
        """A part of a step: DATA, FORWARD, BACKWARD or OPTIMIZER; or GPU_STEP, all of it."""
        n = next(self._sequence)
        self._pack(self._memory, _RECORDS_AT + (n & self._mask) * 64, kind, 0, 0, step, 0, 0, began, ended, 0.0, n)

    def collective(
        self,
        operation: Operation,
        step: int,
        bucket: int,
        size: int,
        serial: int,
        queued: int,
        began: int,
        ended: int,
        blocking: bool = False,
    ) -> None:
        """A collective of `size` bytes, queued (this replica is ready for it), started and ended.

        With `ended=0` before it ends, the controller sees who waits for whom while it lasts. `serial` is equal on all
        replicas and grows; `blocking`: it ran where the replica computes.
        """
        n = next(self._sequence)
        code = operation | BLOCKING if blocking else operation
        place = _RECORDS_AT + (n & self._mask) * 64
        self._pack_collective(
            self._memory, place, _COLLECTIVE, code, bucket, step, size, queued, began, ended, serial, n
        )

    def collective_over(self, operation: Operation, step: int, bucket: int, size: int, serial: int, at: int) -> None:
        """A collective has ended at that time; its times will follow, by `collective`, with those of its step."""
        n = next(self._sequence)
        place = _RECORDS_AT + (n & self._mask) * 64
        code = operation | OVER
        self._pack_collective(self._memory, place, _COLLECTIVE, code, bucket, step, size, 0, at, 0, serial, n)

    def scalar(self, name: str, value: float, step: int, at: int = 0) -> None:
        """A loss or a metric, of the replica's own examples; `at`: when, now if left out.

        Raises UsageError for a name that is too long, and for more names than a ring holds.
        """
        number = self._names.get(name)
        if number is None:
            number = self._intern(name)
        n = next(self._sequence)
        place = _RECORDS_AT + (n & self._mask) * 64
        self._pack(self._memory, place, _SCALAR, 0, number, step, 0, 0, at or clock(), 0, value, n)

    def memory(self, step: int, allocated: int, reserved: int, at: int = 0) -> None:
        """Bytes of device memory in use, and held."""
        n = next(self._sequence)
        place = _RECORDS_AT + (n & self._mask) * 64
        self._pack(self._memory, place, Kind.MEMORY, 0, 0, step, allocated, reserved, at or clock(), 0, 0.0, n)

    def mark(self, mark: Mark, step: int, amount: int = 0, at: int = 0) -> None:
        """Something happened; `at`: when, now if left out."""
        n = next(self._sequence)
        place = _RECORDS_AT + (n & self._mask) * 64
        self._pack(self._memory, place, Kind.MARK, mark, 0, step, amount, 0, at or clock(), 0, 0.0, n)

    def checksums(self, step: int, checksums: Mapping[str, int], at: int = 0) -> None:
        """The checksums of the parameters after this step, by name; of larger numbers, the low 63 bits.

        Of a long name its end is kept. Where a ring has no more names, the rest has one together.
        """
        at = at or clock()
        rest = overall = 0
        for name, checksum in checksums.items():
            overall = (overall * 1_000_003 + checksum) & _LOW
            number = self._number_of(name)
            if number is None:
                rest = (rest * 1_000_003 + checksum) & _LOW
            else:
                self._checksum(step, number, checksum & _LOW, at)
        number = self._number_of(REST, room=NAMES) if rest else None
        if number is not None:
            self._checksum(step, number, rest, at)
        self._checksum(step, OVERALL, overall, at)

    def _checksum(self, step: int, number: int, checksum: int, at: int) -> None:
        n = next(self._sequence)
        place = _RECORDS_AT + (n & self._mask) * 64
        self._pack(self._memory, place, Kind.CHECKSUM, 0, number, step, checksum, 0, at, 0, 0.0, n)

    def known_as(self, name: str) -> str | None:
        """Return the name under which a scalar is kept, of a long one the end; None where there is no room for it."""
        if name in self._names:
            return name
        short = _short(name)
        return None if self._number_of(short, NAMES) is None else short

    def _number_of(self, parameter: str, room: int = NAMES - SCALARS) -> int | None:
        """Return the number of a parameter's name; None where there is no more room for it."""
        parameter = _short(parameter)
        number = self._names.get(parameter)
        return self._intern(parameter) if number is None and len(self._names) < room else number

    def close(self) -> None:
        """Let go of the memory; what was written stays."""
        self._memory.close()

    def _intern(self, name: str) -> int:
        text = name.encode()
        if len(text) > NAME_BYTES:
            raise UsageError(f"the name {name[:30]!r}… has {len(text)} bytes; at most {NAME_BYTES} are kept")
        with self._naming:
            # Another thread may have just named it.
            number = self._names.get(name, len(self._names))
            if number >= NAMES:
                raise UsageError(
                    f"{name!r} would be name number {number + 1}; a ring keeps {NAMES}: log under the same name every "
                    "step"
                )
            at = _NAMES_AT + number * _SIZE
            self._memory[at + 2 : at + 2 + len(text)] = text
            # Its length last, plus one: a name of which only a part is there is none.
            struct.pack_into("@H", self._memory, at, len(text) + 1)
            self._names[name] = number
            return number


@final
class Reader:
    """Reads a ring from its oldest record on, each record once.

    `descriptor` stays the caller's and may be closed; the memory is mapped read-only. `overwritten` counts the records
    that were gone before they were read, `torn` those that were begun and never finished.

    Raises UsageError if `descriptor` is no ring.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory, self.capacity = _mapped(descriptor, mmap.PROT_READ)
        self._records = np.frombuffer(self._memory, DTYPE, self.capacity, _RECORDS_AT)
        self._sequences = self._records["sequence"]
        self._next = 1
        self._gap = 0
        # The record that was missing amid others at the last read.
        self._newest = 0
        self._names: list[str] = []
        self.overwritten = 0
        self.torn = 0

    def read(self) -> Samples:
        """Return a copy of the records since the last call, in their order, of `samples.DTYPE`."""
        newest = self._head()
        # The place after the newest record may be in the making: what lay there is not trusted.
        first = max(self._next, newest - self.capacity + 2)
        if newest < first:
            return np.empty(0, DTYPE)
        rows = self._copied(first, newest)
        trusted = max(first, self._written(newest + 1) - self.capacity + 2)
        rows, expected = rows[trusted - first :], np.arange(max(trusted, first), newest + 1)
        there = rows["sequence"] == expected
        self.overwritten += min(trusted, newest + 1) - self._next
        self._next = newest + 1
        if not there.all():
            rows = self._without_gaps(rows, expected, there)
        return rows

    def names(self) -> tuple[str, ...]:
        """Return the names of scalars, by their numbers."""
        self._names.extend(_read_names(self._memory, len(self._names)))
        return tuple(self._names)

    def close(self) -> None:
        """Unmap the ring."""
        # An mmap cannot be closed while arrays look into it.
        del self._records, self._sequences
        self._memory.close()

    def _head(self) -> int:
        newest = self._written(self._next)
        if not _ORDERED and newest != self._newest:
            self._newest = newest
            return newest - 1
        return newest

    def _written(self, first: int) -> int:
        """Return the greatest sequence number there is; what lies before `first` is not looked at.

        To look at every record would read the whole megabyte, of each replica and in each frame.
        """
        while True:
            place = first % self.capacity
            count = min(_LOOK, self.capacity - place)
            newest = int(self._sequences[place : place + count].max())
            if newest >= first + count:
                # The writer is a whole round ahead.
                return int(self._sequences.max())
            if newest < first + count - 1:
                # No more than a record a thread can be in the making, so nothing lies beyond.
                return max(newest, first - 1)
            first += count

    def _copied(self, first: int, last: int) -> Samples:
        begin, end = first % self.capacity, last % self.capacity + 1
        if begin < end:
            return self._records[begin:end].copy()
        return joined([self._records[begin:], self._records[:end]])

    def _without_gaps(self, rows: Samples, expected: np.ndarray, there: np.ndarray) -> Samples:
        # A gap is another thread's record that is about to be written, or one whose writer was interrupted in between.
        # It is waited for once.
        gap = int(expected[~there][0])
        if gap != self._gap:
            self._gap = self._next = gap
            return rows[: int(np.argmin(there))]
        self.torn += int((~there).sum())
        return rows[there]


def _short(name: str) -> str:
    """Return a name that a ring can keep: of a long one its end."""
    text = name.encode()
    return name if len(text) <= NAME_BYTES else "…" + text[3 - NAME_BYTES :].decode(errors="ignore")


def _mapped(descriptor: int, protection: int) -> tuple[mmap.mmap, int]:
    try:
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, _HEADER.size, 0)
    except OSError as error:
        raise UsageError(f"descriptor {descriptor} is no telemetry ring: {error}") from error
    magic, capacity, record = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0, 0)
    if (magic, record) != (_MAGIC, _SIZE) or size != _RECORDS_AT + capacity * _SIZE:
        raise UsageError(f"descriptor {descriptor} is no telemetry ring of this version; make one by Ring.create()")
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection), capacity


def _read_names(memory: mmap.mmap, first: int) -> list[str]:
    names = []
    for number in range(first, NAMES):
        at = _NAMES_AT + number * _SIZE
        (length,) = struct.unpack_from("@H", memory, at)
        if not length:
            break
        names.append(memory[at + 2 : at + 1 + length].decode())
    return names
