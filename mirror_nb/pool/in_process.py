"""The pool's twin without processes: one replica in this very process, for debugging and for tests.

Breakpoints, prints and profilers work as in any function call. What it cannot do: be killed alone, or be
interrupted while it does not return to Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import types
from collections import deque
from collections.abc import Iterable, Iterator

import psutil
import torch

from mirror_nb.devices import Device
from mirror_nb.environment.surroundings import Signs
from mirror_nb.errors import DeviceError
from mirror_nb.messages import Done, Form, Rendezvous, Request
from mirror_nb.pool.base import Pool
from mirror_nb.pool.hangs import Silent
from mirror_nb.pool.interrupts import answered
from mirror_nb.pool.report import Death, Incoming, ReplicaStatus
from mirror_nb.replica.runtime import Identity, Replica


class InProcessPool(Pool):
    """One replica in this process; no process group, since there is nobody to reduce with."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        *,
        setup: str,
        seed: int = 0,
        reduction: str = "mean",
        communication: bytes = b"",
    ) -> None:
        if len(devices) != 1:
            raise DeviceError(f"replicas in this process: one is possible, {len(devices)} devices were named")
        super().__init__(devices, seed)
        self._setup = setup
        self._reduction = reduction
        self._communication = communication
        self._incoming: deque[Incoming] = deque()
        self._replica: Replica | None = None

    def _start(self, ids: list[int]) -> None:
        device = self.devices[0]
        self._replica = Replica(
            Identity(
                0,
                1,
                torch.device("cpu") if device.kind == "cpu" else torch.device("cuda", device.index),
                self._seed,
                self._reduction,
            ),
            self._emit,
            self._setup,
            types.ModuleType("__mirrored__"),
            _interruptible,
            communication=self._communication,
        )
        # Others are told when they form a group.
        self._replica.communicate(self._replica.communication)

    def prepare(self) -> None:
        """It cannot die alone."""

    def follow_controller(self, signs: Signs | None = None) -> None:
        """What this process has set holds."""

    def _emit(self, message: object, slab: int | None = None) -> None:
        # The sender closes its descriptor once this returns, as it does after a real send.
        self._incoming.append((0, message, os.dup(slab) if slab is not None else None))

    def send(self, replica_ids: Iterable[int], message: object, slab: int | None = None) -> None:
        if not isinstance(message, Request) or self._replica is None:
            # Interrupts and aborts come too late: the request ended before its sender could send them.
            return
        if isinstance(message.what, Form):
            self._incoming.append((0, Done(message.number), None))
        else:
            self._replica.handle(message, os.dup(slab) if slab is not None else None)

    def poll(self, timeout: float) -> list[Incoming]:
        found = list(self._incoming)
        self._incoming.clear()
        return found

    def look(self, replica_id: int) -> Silent:
        return Silent("runs in this process", (), "")

    def kill(self, replica_id: int) -> None:
        """Nothing to end: a request here has returned by the time anybody can ask for its end."""

    def _rendezvous(self, replica_id: int) -> Rendezvous:
        return Rendezvous("", 0, self.generation, 0, 1, 0.0)

    def _close(self) -> None:
        self._replica = None

    def dead(self) -> list[Death]:
        return []

    def timeline(self) -> None:
        return None

    def notice(self) -> None:
        return None

    def tell(self, title: str, operation: str) -> None:
        """There is no notice."""

    def status(self) -> list[ReplicaStatus]:
        memory = psutil.Process().memory_info().rss
        return [ReplicaStatus(0, self.devices[0], os.getpid(), memory, "ready, in this process")]


@contextlib.contextmanager
def _interruptible(number: int) -> Iterator[None]:
    """Let Ctrl-C raise in user code, as in any function call; outside it, the pool only takes note of it."""
    if not answered():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
