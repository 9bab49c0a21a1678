"""A pool: the replicas of one strategy. Sends requests, follows them to their end, ends what will not end.

Knows messages; knows neither tensors nor notebooks. How replicas are started, reached and killed is the subclass's.
"""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

from mirror_nb.devices import Device
from mirror_nb.environment import surroundings
from mirror_nb.environment.surroundings import Surroundings
from mirror_nb.errors import ContextError, PoolClosed, ReplicaError
from mirror_nb.messages import Count, Follow, Form, Rendezvous, Steer, Stream, Word
from mirror_nb.pool.following import GRACE, TICK_SECONDS, Followed, Following, trains_together
from mirror_nb.pool.interrupts import Deferred, Interrupts
from mirror_nb.pool.report import Death, ReplicaStatus, Report
from mirror_nb.telemetry.notice import Notice
from mirror_nb.telemetry.timeline import Timeline

FORM_SECONDS = 60.0
# For joining the process group; a replica that is not there by then is replaced.
LEAVING_SECONDS = 1.0
# So long the end of the replicas waits for another thread to see it, which looks ten times a second.


class Pool(Followed):
    """Replicas that live until `close()`; use it as a context manager or close it yourself."""

    def __init__(self, devices: tuple[Device, ...], seed: int = 0) -> None:
        self.devices = devices
        self._seed = seed
        self.generation = 0
        self.blank: set[int] = set()
        # Replicas that were started anew and have nobody's names yet.
        self.apart = False
        # A cell or call failed, which may have left the replicas at different steps.
        self._formed = False
        self._closed = False
        self.forked = False
        # This process is a fork of the one that started the replicas: they answer there.
        self._busy = threading.Lock()
        self._busy_in = 0
        # The thread that holds it.
        self._interrupts = Interrupts()
        self._fresh: Surroundings | None = None
        # What this process had set when it started the first replicas.
        self._told: Surroundings | None = None
        # What the replicas know of that since.
        self._words = itertools.count(1)
        self._step = 0
        # The last one that some of the replicas have done.

    # ------------------------------------------------------------------ for the subclass

    @abstractmethod
    def _start(self, ids: list[int]) -> None:
        """Start these replicas; they need not be in the group yet."""

    @abstractmethod
    def _rendezvous(self, replica_id: int) -> Rendezvous:
        """Say where the replica joins the group of the present generation."""

    @abstractmethod
    def _close(self) -> None:
        """End every replica and give everything back."""

    @abstractmethod
    def dead(self) -> list[Death]:
        """Return the replicas that are dead now."""

    @abstractmethod
    def timeline(self) -> Timeline | None:
        """Return what the replicas record, from the start; None where they record nothing."""

    @abstractmethod
    def notice(self) -> Notice | None:
        """Return what tells other processes where the records are; None where there are none."""

    @abstractmethod
    def tell(self, title: str, operation: str) -> None:
        """Say in the notice what is trained, and by which cross-device ops."""

    @abstractmethod
    def status(self) -> list[ReplicaStatus]:
        """Return how each replica is, without asking it."""

    # ------------------------------------------------------------------ life

    @property
    def size(self) -> int:
        """Number of replicas."""
        return len(self.devices)

    @property
    def closed(self) -> bool:
        """Whether the replicas were stopped."""
        return self._closed

    def start(self) -> None:
        """Start every replica and form the group; returns when each has done an all-reduce."""
        self._start_whole(list(range(self.size)))
        self.form()
        self.blank.clear()

    def mend(self) -> list[Death]:
        """Replace dead replicas and form the group anew where that is needed; return who was replaced."""
        self._check_open()
        gone = self.dead()
        if gone:
            # First: an interrupt may end this between the two.
            self.unform()
            self._replace(gone)
        return gone if self._formed else gone + self.form()

    def _replace(self, gone: list[Death]) -> None:
        self.blank |= {death.replica_id for death in gone}
        self._start_whole([death.replica_id for death in gone])

    def _start_whole(self, ids: list[int]) -> None:
        """Start replicas, and raise an interrupt only then: it must find them all there."""
        # What has changed since is told again, to all: those that are started now have it in part.
        self._told = self._fresh = self._fresh or surroundings.at_start(self._seed)
        with self._interrupts as interrupts:
            self._start(ids)
        if interrupts.count:
            raise interrupts.raised or KeyboardInterrupt

    def unform(self) -> None:
        """The group is no longer usable; `mend` makes a new one."""
        self._formed = False

    def form(self) -> list[Death]:
        """Form the process group of a new generation over all replicas; replace and return those that cannot join."""
        replaced: list[Death] = []
        report = None
        said: dict[int, str] = {}
        failed: set[int] = set()
        # Replicas whose own error ended the latest attempt.

        def take(replica_id: int, message: Any) -> None:
            if isinstance(message, Stream):
                said[replica_id] = said.get(replica_id, "") + message.text

        for _attempt in range(3):
            self.generation += 1
            said.clear()
            requests = {r: Form(self._rendezvous(r)) for r in range(self.size)}
            report = self.run(requests, on_message=take, timeout=FORM_SECONDS)
            if report.interrupted:
                raise KeyboardInterrupt
            # One that joined as the time was up may have been told to give up all the same.
            if report.clean and not report.timed_out:
                self._formed = True
                return replaced
            before, failed = failed, {r for r, f in report.failures.items() if not (f.secondary or f.interrupted)}
            # Once may be for another's death. All at once is for no replica's state, and would lose the values of all.
            if len(failed) < self.size:
                self._end(failed & before)
            gone = self.dead()
            replaced += gone
            self._replace(gone)
        assert report is not None
        reasons = [": ".join([str(d), *_why(said.get(d.replica_id, ""))]) for d in report.deaths]
        reasons += [f"replica {r}: {f.type_name}: {f.message}" for r, f in report.failures.items()]
        raise ReplicaError(f"the replicas could not form a process group: {'; '.join(reasons)}")

    def _end(self, replica_ids: set[int]) -> None:
        """End replicas; when this returns, they are among the dead."""
        for replica_id in replica_ids:
            self.kill(replica_id)
        deadline = time.monotonic() + GRACE
        while not replica_ids <= {death.replica_id for death in self.dead()} and time.monotonic() < deadline:
            self.poll(TICK_SECONDS)

    def close(self) -> None:
        """Stop the replicas; a second call does nothing. A request that they are at raises PoolClosed."""
        if not self._closed:
            self._closed = True
            try:
                # What it reads from is about to be closed.
                in_another = not self.forked and self._busy_in != threading.get_ident()
                if in_another and self._busy.acquire(timeout=LEAVING_SECONDS):
                    self._busy.release()
            finally:
                # Left halfway, who does not end by itself would stay on its device for as long as this process lives.
                with Deferred(math.inf) as interrupt:
                    try:
                        self._close()
                    finally:
                        self._interrupts.close()
                if interrupt.came:
                    signal.raise_signal(signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.forked:
            raise ContextError("this process is a fork of the one that started the replicas; use the strategy there")
        if self._closed:
            raise PoolClosed("these replicas were stopped; start new ones (%mirror start, or a new strategy)")

    # ------------------------------------------------------------------ requests

    def run(
        self,
        requests: Mapping[int, Any],
        *,
        slabs: Mapping[int, int | None] | None = None,
        on_message: Callable[[int, Any], None] = lambda replica_id, message: None,
        on_tick: Callable[[set[int]], None] = lambda pending: None,
        timeout: float | None = None,
    ) -> Report:
        """Send each replica its request and follow all to their end.

        `on_message` takes what they show meanwhile, `on_tick` the ids still at work, a few times a second. When one
        fails or dies, the others' waits in collectives are ended, then the others; on an interrupt
        (KeyboardInterrupt in the main thread) or after `timeout` seconds all are interrupted; what does not stop
        within GRACE, or SECOND_AFTER if there is a second interrupt, is killed, alone. Returns a Report and raises
        nothing for what replicas did. What the two callbacks raise ends the request too, and is raised once the
        replicas are still.

        Raises PoolClosed when the pool is closed, also meanwhile, ContextError in a fork of this process, ReplicaError
        when it is at work already.
        """
        self._check_open()
        if not self._busy.acquire(blocking=False):
            raise ReplicaError(
                "the replicas are at work for another thread; wait for it to end (in a signal's handler: set a flag, "
                "and use the strategy once the call that the signal came in has returned)"
            )
        self._busy_in = threading.get_ident()
        try:
            with self._interrupts as interrupts:
                self.prepare()
                report = Following(self, requests, slabs or {}, on_message, on_tick, timeout, interrupts).follow()
                self.apart = self.apart or (not report.clean and any(map(trains_together, requests.values())))
                self._count_on(report)
            # One that came after the last look.
            report.interrupted = interrupts.count > 0
            return report
        finally:
            self._busy_in = 0
            self._busy.release()

    def _count_on(self, report: Report) -> None:
        """Have all go on from one step: some may have done steps that others have not, and new ones none."""
        steps = {answer.done.step for answer in report.answers.values() if answer.done is not None}
        latest = max(self._step, max(steps, default=0))
        if steps - {latest} or (latest > self._step and len(report.answers) < self.size):
            self.send(range(self.size), Count(latest))
        self._step = latest

    def follow_controller(self, signs: surroundings.Signs | None = None) -> Report | None:
        """Have the replicas set what this process has set for all of its code, if that has changed since."""
        now = surroundings.current(signs)
        changes = surroundings.changes(self._told, now) if self._told is not None else None
        if changes is None:
            return None
        report = self.run(dict.fromkeys(range(self.size), Follow(changes)))
        if report.clean:
            self._told = now
        return report

    def settle(self, changes: surroundings.Changes) -> None:
        """Set in this process what all replicas have set in a cell: of that they need not be told."""
        surroundings.settle(changes)
        self._told = surroundings.current()

    def steer(self, word: Word) -> None:
        """Have the training that runs hold, go on or end where its step ends; any thread may call it.

        What runs when no training does takes no notice. Raises PoolClosed.
        """
        self._check_open()
        self.send(range(self.size), Steer(next(self._words), word))

    def hand(self, replica_id: int, message: object) -> None:
        """Give a replica a message that nobody waits for; once the pool is closed it is dropped."""
        if not self._closed:
            self.send([replica_id], message)


def _why(said: str) -> list[str]:
    """Return the line that says why a replica could not begin, of what it said, if there is one.

    CUDA's errors go on for several lines, of which the last ones say how to find others.
    """
    lines = said.splitlines()
    behind_frames = next((i for i in range(len(lines), 0, -1) if lines[i - 1].startswith("  ")), len(lines))
    return lines[behind_frames : behind_frames + 1] or lines[-1:]
