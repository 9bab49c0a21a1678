"""A GPU of the tests' making: time stands still until a test moves it, and it is as far behind as a test says."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mirror_nb.collectives.base import CrossDeviceOps
from mirror_nb.collectives.handles import Handle


class MadeGpu:
    """A GPU that does all that it is given at once, at a time of the test's making; its events as exact as CUDA's.

    Its current stream is `lag` nanoseconds behind.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000_000_000
        # Nanoseconds, of this process's clock too.
        self.lag = 0
        self.capturing = False
        self.shared = None
        # As a group's, of the memory that replicas share.
        monkeypatch.setattr("time.perf_counter_ns", lambda: self.now)
        for name, made in (("Event", self._event), ("Stream", self._stream), ("current_stream", self._current)):
            monkeypatch.setattr(torch.cuda, name, made)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def enqueue(self, nanoseconds: int) -> None:
        """Give the current stream so much to do."""
        self.lag += nanoseconds

    def passes(self, nanoseconds: int) -> None:
        """Let so much time pass."""
        self.now += nanoseconds
        self.lag = max(0, self.lag - nanoseconds)

    def _stream(self, device: torch.device) -> Any:
        return SimpleNamespace(lag=0, wait_stream=lambda other: None, wait_event=lambda event: None)

    def _current(self, device: torch.device) -> Any:
        def wait_event(event: Any) -> None:
            self.lag = max(self.lag, event.at - self.now)

        return SimpleNamespace(lag=self.lag, wait_event=wait_event)

    def _event(self, enable_timing: bool = False) -> Any:
        event = SimpleNamespace(at=0, query=lambda: self._told(self.now >= event.at), synchronize=self._told)
        event.record = lambda stream=None: setattr(event, "at", self.now + (stream.lag if stream else 0))
        # A C float of milliseconds.
        event.elapsed_time = lambda later: float(np.float32((later.at - event.at) / 1e6))
        return event

    def _told(self, answer: Any = None) -> Any:
        if self.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return answer

    def allreduce(self, tensors: list[Any], options: Any) -> Any:
        def wait() -> None:
            self.now += 123_000

        return SimpleNamespace(wait=wait)


class OnMadeGpu(torch.Tensor):
    """A tensor that says it is on a GPU, though its memory is the CPU's."""

    is_cuda = True  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0")


class Later(Handle):
    """A collective that a GPU has yet to finish."""

    def __init__(self) -> None:
        self.over = False

    def wait(self, seconds: float | None = None) -> None:
        """Return before it is over, as on a GPU."""

    def done(self) -> bool:
        return self.over

    def times(self) -> tuple[int, int]:
        return 5, 8

    @property
    def ends_after_wait(self) -> bool:
        return True


class Slow(CrossDeviceOps):
    """An op whose collectives end later."""

    def __init__(self) -> None:
        self.handles: list[Later] = []

    def start(self, op, flat):
        self.handles.append(Later())
        return self.handles[-1]

    def unfit_for(self, devices):
        return None

    def finish(self) -> None:
        for handle in self.handles:
            handle.over = True
