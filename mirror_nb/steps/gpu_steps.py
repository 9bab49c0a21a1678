"""When a GPU computed each part of a step: told by events, and written once it has come to the end of the step.

    Recorder ─ begin, end, hold, close ─▶ events on the current stream ─ write_ended ─▶ ring

The host is ahead of a GPU: when it asks for a part says nothing of when that is computed. A step's parts and its
collectives are written together, since only both tell what was computed beside a collective. Knows no collectives and
never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import torch

from mirror_nb.collectives.gpu_clock import Anchor, GpuClock, moment
from mirror_nb.telemetry.ring import Writer
from mirror_nb.telemetry.samples import Kind

AT_ONCE = 256
# Samples of one step that are kept back: more are written as they come, so that a step without an end fills no memory.


@final
class GpuSteps:
    """The samples of one replica's steps that wait for its GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock: GpuClock | None = None
        self._since: _Boundary | None = None
        # Where the part under way begins.
        self._step = 0
        self._began: _Boundary | None = None
        # Which step is under way, and where it begins.
        self._steps: dict[int, _Step] = {}

    def begin(self) -> None:
        """A part of a step begins with what is enqueued next."""
        self._since = self._boundary()

    def end(self, kind: Kind, writer: Writer, step: int) -> None:
        """It ends with what was enqueued last, and the next one begins there."""
        since, self._since = self._since, self._boundary()
        if since is None or self._since is None:
            return
        if self._step != step:
            self._step, self._began = step, since
        self._steps.setdefault(step, _Step()).ended = self._since
        self._add(step, partial(_write, writer, kind, step, since, self._since))

    def close(self, writer: Writer, step: int) -> None:
        """The step ends where the last part did."""
        if self._step == step and self._began is not None and self._since is not None:
            self._add(step, partial(_write, writer, Kind.GPU_STEP, step, self._began, self._since))

    def hold(self, step: int, write: Callable[[], None]) -> None:
        """Call `write`, which writes a collective of the step, with its other samples."""
        self._add(step, write)

    def write_ended(self, before: int) -> None:
        """Write what the GPU has ended of the steps below `before`."""
        if not self._steps or torch.cuda.is_current_stream_capturing():
            return
        for step, its in list(self._steps.items()):
            if step >= before or not its.over():
                break
            del self._steps[step]
            for write in its.writes:
                write()

    def forget(self) -> None:
        """Write none of what waits: replicas begin anew."""
        self._steps.clear()
        self._since = self._began = None
        self._step = 0

    def _add(self, step: int, write: Callable[[], None]) -> None:
        its = self._steps.setdefault(step, _Step())
        its.writes.append(write)
        if len(its.writes) >= AT_ONCE:
            self.write_ended(step + 1)

    def _boundary(self) -> _Boundary | None:
        # No event is worth a GPU's memory to a replica that has not used it yet, and one of a graph that is being
        # recorded tells no time.
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        if self._clock is None:
            self._clock = GpuClock(self._device)
        return _Boundary(moment(self._device), self._clock.anchor())


@final
class _Boundary:
    """Where one part of a step ends on the current stream, and the next one begins."""

    __slots__ = ("_anchor", "_event")

    def __init__(self, event: torch.cuda.Event, anchor: Anchor) -> None:
        self._event = event
        self._anchor = anchor

    def over(self) -> bool:
        """Whether the GPU has come to it."""
        return self._event.query()

    def reading(self) -> int:
        """Return when that was, nanoseconds of `samples.clock`."""
        return self._anchor.reading(self._event)


@final
class _Step:
    """What is to be written of one step."""

    __slots__ = ("ended", "writes")

    def __init__(self) -> None:
        self.ended: _Boundary | None = None
        # Of its latest part.
        self.writes: list[Callable[[], None]] = []

    def over(self) -> bool:
        """Whether the GPU has come to the end of all of it."""
        return self.ended is None or self.ended.over()


def _write(writer: Writer, kind: Kind, step: int, began: _Boundary, ended: _Boundary) -> None:
    writer.span(kind, step, began.reading(), ended.reading())
