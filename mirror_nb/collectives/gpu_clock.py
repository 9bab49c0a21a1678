"""When a GPU came to what was enqueued on it, by this process's clock: told later, without waiting for it.

Knows CUDA's events and streams. Knows no collectives and no steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import final

import torch

ANCHORED_SECONDS = 10.0
# How long times are told by one event: CUDA gives what passed since as a float of milliseconds, which is as coarse as
# a microsecond by then, and a quarter of a millisecond after 35 minutes.


@final
@dataclass(frozen=True, slots=True)
class Anchor:
    """An event on a GPU whose time of day is known."""

    event: torch.cuda.Event
    nanoseconds: int

    def reading(self, event: torch.cuda.Event) -> int:
        """Return when `event`, which is over, was; time.perf_counter_ns."""
        return self.nanoseconds + between(self.event, event)


@final
class GpuClock:
    """A GPU's clock in terms of this process's."""

    def __init__(self, device: torch.device) -> None:
        # With nothing else on it, so that an anchor waits for no step.
        self._stream = torch.cuda.Stream(device)
        self._latest = self._drop()

    def anchor(self) -> Anchor:
        """Return one that is near enough for what begins now."""
        if time.perf_counter_ns() - self._latest.nanoseconds > ANCHORED_SECONDS * 1e9:
            self._latest = self._drop()
        return self._latest

    def _drop(self) -> Anchor:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        event.synchronize()
        return Anchor(event, time.perf_counter_ns())


def moment(device: torch.device) -> torch.cuda.Event:
    """Return an event that is over when the current stream of `device` comes to it."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(begun: torch.cuda.Event, over: torch.cuda.Event) -> int:
    """Return the nanoseconds from one event to another; both are over."""
    return int(begun.elapsed_time(over) * 1e6)
