"""A collective under way: what is waited for, and what tells when it ran.

Knows torch's works and a GPU's events. Knows no algorithm and no replica; a recorded one hands its timing to a
`record` that it is given.
"""

from __future__ import annotations

import abc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from mirror_nb.collectives.gpu_clock import Anchor, between, moment
from mirror_nb.errors import ReplicaTimeout


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """When one collective ran on one replica. Clock readings are time.perf_counter_ns, one clock for all processes."""

    op: str
    # "all_reduce", "reduce", "broadcast" or "gather".
    nbytes: int
    # Of this replica's tensor.
    bucket: int
    # The caller's number for it; -1 for none.
    queued: int
    # It was asked for.
    started: int
    # All replicas had come to it, where that is known, else as queued; on a GPU when its stream came to it.
    ended: int
    # This replica's tensor held the result.
    serial: int = 0
    # The caller's for this one collective; 0 for none.
    blocking: bool = False
    # It ran on the stream that the replica computes on: nothing was computed beside it.


class Handle(abc.ABC):
    """A collective under way."""

    __slots__ = ()

    blocking = False
    # Whether it is known to have run on the stream that the replica computes on.

    @abc.abstractmethod
    def wait(self, seconds: float | None = None) -> None:
        """Return when the tensor holds the result (on a GPU: when whatever uses it next will find it there)."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def times(self) -> tuple[int, int] | None:
        """When it started and ended, time.perf_counter_ns; None if only the caller's clock tells."""
        return None

    @property
    def ends_after_wait(self) -> bool:
        """Whether `times` is known when `done`, not already after `wait`: on a GPU."""
        return False


@final
class Finished(Handle):
    """Nothing is under way."""

    def wait(self, seconds: float | None = None) -> None:
        """Return."""

    def done(self) -> bool:
        """Return True."""
        return True


@final
class WorkHandle(Handle):
    """Collectives that torch carries, and what is left to do when they have ended."""

    def __init__(self, works: Sequence[dist.Work], then: Callable[[], object] | None = None) -> None:
        self._works = list(works)
        self._then = then

    def wait(self, seconds: float | None = None) -> None:
        """Wait for all of them, `seconds` for each; None: the group's own timeout."""
        while self._works:
            wait_for_work(self._works[0], seconds)
            self._works.pop(0)
        then, self._then = self._then, None
        if then is not None:
            then()

    def done(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)


@final
class Expanding(Handle):
    """An all-reduce of a copy in another dtype that ends in `flat`."""

    def __init__(self, handle: Handle, copy: Tensor, flat: Tensor) -> None:
        self._handle = handle
        self._copy: Tensor | None = copy
        self._flat = flat

    def wait(self, seconds: float | None = None) -> None:
        """Wait, and put the result back; once."""
        self._handle.wait(seconds)
        copy, self._copy = self._copy, None
        if copy is not None:
            # On a GPU behind the reduction, which the current stream waits for now.
            self._flat.copy_(copy)

    def done(self) -> bool:
        """Whether the reduction has ended."""
        return self._handle.done()

    def times(self) -> tuple[int, int] | None:
        """The reduction's own."""
        return self._handle.times()

    @property
    def ends_after_wait(self) -> bool:
        """As the reduction's."""
        return self._handle.ends_after_wait


@final
class BetweenEvents(Handle):
    """A collective on a GPU whose own handle tells no times: two events do, on the current stream as a rule.

    One that goes on beside that stream counts until the stream comes to wait for it, unless it is known when it has
    `ended`. Without an `anchor` it tells no times, and asks the events for none.
    """

    def __init__(
        self,
        handle: Handle,
        started: torch.cuda.Event,
        anchor: Anchor | None,
        device: torch.device,
        ended: torch.cuda.Event | None = None,
    ) -> None:
        self._handle = handle
        self._started = started
        self._anchor = anchor
        self._device = device
        self.blocking = ended is None and isinstance(handle, Finished)
        # It was enqueued on this very stream, on which other work follows before `wait` is called.
        self._ended = moment(device) if self.blocking else ended

    def wait(self, seconds: float | None = None) -> None:
        """Wait as the handle does; on a GPU that is the current stream, not this thread."""
        self._handle.wait(seconds)
        if self._ended is None:
            self._ended = moment(self._device)
        else:
            # Another stream may be the current one by now.
            torch.cuda.current_stream(self._device).wait_event(self._ended)

    def done(self) -> bool:
        """Whether the GPU has come to its end."""
        return self._handle.done() if self._ended is None or self._anchor is None else self._ended.query()

    @property
    def ends_after_wait(self) -> bool:
        """Return True where there are times: the GPU is behind."""
        return self._anchor is not None

    def times(self) -> tuple[int, int] | None:
        """What the GPU's clock said, once it is done."""
        if self._ended is None or self._anchor is None:
            return None
        started = self._anchor.reading(self._started)
        return self._handle.times() or (started, started + between(self._started, self._ended))


@final
class Reduction(Handle):
    """What `all_reduce` gives: a handle that records, once, how long it took; on a GPU the other ops' as well."""

    __slots__ = ("_bucket", "_handle", "_limit", "_nbytes", "_op", "_queued", "_record", "_serial", "_unrecorded")

    def __init__(
        self,
        handle: Handle,
        record: Callable[[Timing], None] | None,
        nbytes: int,
        bucket: int,
        queued: int,
        unrecorded: deque[Reduction],
        limit: float | None = None,
        serial: int = 0,
        op: str = "all_reduce",
    ) -> None:
        self._handle = handle
        self._limit = limit
        self._record = record
        self._unrecorded = unrecorded
        self._nbytes = nbytes
        self._bucket = bucket
        self._queued = queued
        self._serial = serial
        self._op = op

    def wait(self, seconds: float | None = None) -> None:
        """Return when the tensor holds the result; raise what the algorithm raises.

        `seconds`: how long it may take; None: the options' `timeout_seconds`, else the group's own.
        """
        try:
            self._handle.wait(self._limit if seconds is None else seconds)
        except ReplicaTimeout as late:
            raise named(late, self._limit) from late.__cause__
        if self._record is None:
            return
        if self._handle.ends_after_wait:
            self._unrecorded.append(self)
        else:
            self.record()

    def record(self) -> None:
        """Record how long it took, once."""
        record, self._record = self._record, None
        if record is not None:
            handle, queued, serial = self._handle, self._queued, self._serial
            started, ended = handle.times() or (queued, time.perf_counter_ns())
            record(Timing(self._op, self._nbytes, self._bucket, queued, started, ended, serial, handle.blocking))

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._handle.done()


def named(late: ReplicaTimeout, limit: float | None) -> ReplicaTimeout:
    """Return a timeout that says whose the limit is, if it is the one that the options gave."""
    said = str(late)
    if limit is None or f"within {limit:g} s" not in said or "timeout_seconds" in said:
        return late
    return ReplicaTimeout(
        f"{said}. The {limit:g} s are the strategy's CommunicationOptions(timeout_seconds={limit:g}); a replica that "
        "is only slow needs more"
    )


def wait_for_work(work: dist.Work, seconds: float | None) -> None:
    """Wait so many seconds; None: as long as its group allows. Raises ReplicaTimeout."""
    if seconds is None:
        work.wait()
        return
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        # gloo's words, of a group that torch made.
        if "timed out" not in str(error).lower():
            raise
        raise ReplicaTimeout(
            f"a collective did not end within {seconds:g} s: a peer may have left, or it runs another one; see that "
            "every replica runs the same collectives in the same order"
        ) from error
