"""A pool: the replicas of one strategy. Sends requests, follows them to their end, ends what will not end.

Knows messages; knows neither tensors nor notebooks. How replicas are started, reached and killed is the subclass's.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mirror_nb import surroundings
from mirror_nb.collectives.headers import UNEVEN_MERGE_CALLS
from mirror_nb.devices import Device
from mirror_nb.errors import ContextError, PoolClosed, ReplicaError, ReplicaTimeout
from mirror_nb.messages import (
    Abort,
    Call,
    Done,
    Follow,
    Form,
    HeldBack,
    Interrupt,
    Meeting,
    Rendezvous,
    Request,
    RunCell,
    Steer,
    Stream,
    Where,
    Whereabouts,
    Word,
)
from mirror_nb.pool import hangs
from mirror_nb.pool.interrupts import Interrupts
from mirror_nb.pool.report import Answer, Death, Incoming, ReplicaStatus, Report
from mirror_nb.surroundings import Surroundings
from mirror_nb.telemetry.notice import Notice
from mirror_nb.telemetry.timeline import Timeline

TICK_SECONDS = 0.1
# Between two looks at how replicas are doing that are at work.
ABORT_AFTER = 0.05
# Seconds from a replica's failure to the end of its peers' waits: time for them to raise the same by themselves.
ABORT_AGAIN = (0.0, 0.1, 0.3, 0.7, 1.5)
# Seconds after that, as long as they do not answer.
INTERRUPT_AFTER = 0.8
# Seconds from a replica's failure to the interrupt of peers that do not wait in a collective.
INTERRUPT_AFTER_DEATH = 0.1
# Less after a death: the user is to know of it within half a second, and nothing that goes on will be whole.
GRACE = 3.0
# Seconds from an interrupt to the kill, and from the last word of a replica that it is held back.
HELD_BACK_SECONDS = 20.0
# From an interrupt to the kill, whatever the replica says: an import of torch's takes 5 s on a machine that is busy.
SECOND_AFTER = 1.0
# From the first interrupt to the kill that a second one asks for: a key that was pressed twice is no wish to lose all.
SILENT_AFTER = 0.25
# Seconds from a question to a look at a replica that does not answer it, from outside.
UNEVEN_AFTER = 0.5
# Seconds from the first replica's end to the question whether the others wait for it; then as often.
FORM_SECONDS = 60.0
# For joining the process group; a replica that is not there by then is replaced.


class Pool(ABC):
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
        self._interrupts = Interrupts()
        self._fresh: Surroundings | None = None
        # What this process had set when it started the first replicas.
        self._told: Surroundings | None = None
        # What the replicas know of that since.
        self._words = itertools.count(1)

    # ------------------------------------------------------------------ for the subclass

    @abstractmethod
    def _start(self, ids: list[int]) -> None:
        """Start these replicas; they need not be in the group yet."""

    @abstractmethod
    def _prepare(self) -> None:
        """Get ready for a death if there is time: called before a request, and a few times a second while one runs."""

    @abstractmethod
    def _send(self, replica_ids: Iterable[int], message: object, slab: int | None = None) -> None:
        """Send the same to these replicas; one that is gone shows in `_poll`."""

    @abstractmethod
    def _poll(self, timeout: float) -> list[Incoming]:
        """Return what came within `timeout` seconds; earlier when there was an interrupt."""

    @abstractmethod
    def _look(self, replica_id: int) -> hangs.Silent:
        """Look at a replica that does not answer, from outside."""

    @abstractmethod
    def _kill(self, replica_id: int) -> None:
        """End a replica that will not stop; `_poll` tells its death."""

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
            raise KeyboardInterrupt

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
        # Of a replica that could not begin, the last line of what it said tells why.
        reasons = [": ".join([str(d), *said.get(d.replica_id, "").splitlines()[-1:]]) for d in report.deaths]
        reasons += [f"replica {r}: {f.type_name}: {f.message}" for r, f in report.failures.items()]
        raise ReplicaError(f"the replicas could not form a process group: {'; '.join(reasons)}")

    def _end(self, replica_ids: set[int]) -> None:
        """End replicas; when this returns, they are among the dead."""
        for replica_id in replica_ids:
            self._kill(replica_id)
        deadline = time.monotonic() + GRACE
        while not replica_ids <= {death.replica_id for death in self.dead()} and time.monotonic() < deadline:
            self._poll(TICK_SECONDS)

    def close(self) -> None:
        """Stop the replicas; a second call does nothing."""
        if not self._closed:
            self._closed = True
            try:
                self._close()
            finally:
                self._interrupts.close()

    def __enter__(self) -> Pool:
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

        Raises PoolClosed when the pool is closed, ContextError in a fork of this process, ReplicaError when it is at
        work already.
        """
        self._check_open()
        if not self._busy.acquire(blocking=False):
            raise ReplicaError("the replicas are at work for another thread; wait for it to end")
        try:
            with self._interrupts as interrupts:
                self._prepare()
                report = _Following(self, requests, slabs or {}, on_message, on_tick, timeout, interrupts).follow()
                self.apart = self.apart or (not report.clean and any(map(_trains_together, requests.values())))
            # One that came after the last look.
            report.interrupted = interrupts.count > 0
            return report
        finally:
            self._busy.release()

    def follow_controller(self) -> Report | None:
        """Have the replicas set what this process has set for all of its code, if that has changed since."""
        now = surroundings.current()
        changes = surroundings.changes(self._told, now) if self._told is not None else None
        if changes is None:
            return None
        report = self.run(dict.fromkeys(range(self.size), Follow(changes)))
        if report.clean:
            self._told = now
        return report

    def steer(self, word: Word) -> None:
        """Have the training that runs hold, go on or end where its step ends; any thread may call it.

        What runs when no training does takes no notice. Raises PoolClosed.
        """
        self._check_open()
        self._send(range(self.size), Steer(next(self._words), word))

    def hand(self, replica_id: int, message: object) -> None:
        """Give a replica a message that nobody waits for; once the pool is closed it is dropped."""
        if not self._closed:
            self._send([replica_id], message)

    def next_number(self) -> int:
        """Return the number of a new request."""
        return next(_numbers)


def _trains_together(what: object) -> bool:
    """Whether replicas that are stopped in this request may differ by a step that was meant for all."""
    return isinstance(what, Call) or (isinstance(what, RunCell) and what.synchronize and not what.partial)


def _alike(requests: Mapping[int, Any]) -> list[list[int]]:
    """Return the ids of replicas, those that get the same object together: it is pickled once for them."""
    groups: dict[int, list[int]] = {}
    for replica_id, what in requests.items():
        groups.setdefault(id(what), []).append(replica_id)
    return list(groups.values())


_numbers = itertools.count(1)
# Over all pools of this process: a class that a replica made is known by the number of its request.


class _Following:
    """One request on its way: who is still at work, and which steps towards the end were taken."""

    def __init__(
        self,
        pool: Pool,
        requests: Mapping[int, Any],
        slabs: Mapping[int, int | None],
        on_message: Callable[[int, Any], None],
        on_tick: Callable[[set[int]], None],
        timeout: float | None,
        interrupts: Interrupts,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._slabs = slabs
        self._on_message = on_message
        self._on_tick = on_tick
        self._deadline = time.monotonic() + timeout if timeout is not None else math.inf
        self._interrupts = interrupts
        self._number = pool.next_number()
        self._pending = set(requests)
        self._answers: dict[int, Answer] = {}
        self._timed_out = False
        self._meetings: dict[int, int] = {}
        # How many merge_calls each replica has entered.
        self._reason: str | None = None
        # Why the others must end, in a few words.
        self._asked_for = False
        # By the user, or by the time that they set.
        self._interrupted_at = math.inf
        # By the user, first.
        self._question = 0
        self._asked: set[int] = set()
        self._standings: dict[int, hangs.Found] = {}
        # What was answered to the last question.
        self._uneven = False
        self._ask_at = time.monotonic() + UNEVEN_AFTER if len(requests) < pool.size else math.inf
        self._steps: list[tuple[float, Callable[[], None]]] = []
        # What is still to be done to end them, by time.
        self._holding: dict[int, float] = {}
        # When replicas said last that they hold an interrupt back.
        self._raised: BaseException | None = None
        # By the controller's own callbacks.

    def follow(self) -> Report:
        for replica_ids in _alike(self._requests):
            first = replica_ids[0]
            self._pool._send(replica_ids, Request(self._number, self._requests[first]), self._slabs.get(first))
        tick = 0.0
        while self._pending:
            # Before the first wait: what was said between two requests is said again at the beginning of a short one.
            if time.monotonic() - tick > TICK_SECONDS:
                tick = time.monotonic()
                self._pool._prepare()
                self._call(self._on_tick, set(self._pending))
            for replica_id, message, slab in self._pool._poll(self._patience()):
                self._take(replica_id, message, slab)
            self._escalate()
        if self._reason is not None:
            self._pool.unform()
        else:
            self._drop_unfinished()
        if self._raised is not None:
            for answer in self._answers.values():
                answer.close()
            raise self._raised
        return Report(
            dict(sorted(self._answers.items())),
            self._interrupts.count > 0,
            self._timed_out,
            self._standings,
            self._uneven,
        )

    def _drop_unfinished(self) -> None:
        """End what some replicas began and others did not: what those begin next would be taken for it."""
        begun = {r: answer.done.collectives for r, answer in self._answers.items() if answer.done is not None}
        together = len(begun) == self._pool.size and any(map(_trains_together, self._requests.values()))
        if together and len(set(begun.values())) > 1:
            self._pool.unform()
            each = ", ".join(f"{count} on replica {r}" for r, count in sorted(begun.items()))
            text = f"collectives were begun here that not all replicas came to, and are dropped: {each}\n"
            self._call(self._on_message, min(begun), Stream("stderr", text))

    def _call(self, callback: Callable[..., None], *args: Any) -> None:
        """Call the controller's own code; what it raises ends the request, and is raised when all have ended."""
        if self._raised is not None:
            return
        try:
            callback(*args)
        except BaseException as error:
            self._raised = error
            if self._pending:
                self._end_now("the controller failed in the middle of it", time.monotonic())

    def _patience(self) -> float:
        soonest = min(self._ask_at, self._deadline, self._steps[0][0] if self._steps else math.inf)
        return max(0.0, min(TICK_SECONDS, soonest - time.monotonic()))

    def _take(self, replica_id: int, message: Any, slab: int | None) -> None:
        if isinstance(message, Death):
            answered = self._answers.get(replica_id, Answer(None))
            if answered.death is None:
                # Also of a replica that was not asked or is done: it is why the others are stopped.
                self._end_of(replica_id, Answer(answered.done, answered.slab, message))
            self._fail(str(message), abort_after=0.0, interrupt_after=INTERRUPT_AFTER_DEATH)
        elif isinstance(message, Done):
            answer = Answer(message, slab)
            if message.request != self._number or replica_id not in self._pending:
                # The late answer to a request that was given up.
                answer.close()
                return
            self._end_of(replica_id, answer)
            if not message.grouped:
                self._pool.unform()
            self._check_meetings()
            if message.failure is not None:
                if message.failure.type_name == ReplicaTimeout.__name__ and self._reason is None:
                    self._ask(self._pending)
                text = f"replica {replica_id} raised {message.failure.type_name}"
                self._fail(text, abort_after=ABORT_AFTER)
            elif self._ask_at == math.inf:
                self._ask_at = time.monotonic() + UNEVEN_AFTER
        elif isinstance(message, Whereabouts):
            if message.question == self._question:
                self._standings[replica_id] = message
                self._check_evenness()
        elif isinstance(message, Meeting):
            self._meetings[replica_id] = self._meetings.get(replica_id, 0) + 1
            self._check_meetings()
        elif isinstance(message, HeldBack):
            self._holding[replica_id] = time.monotonic()
        else:
            self._call(self._on_message, replica_id, message)

    def _check_meetings(self) -> None:
        """End the wait in a merge_call that some replica has left out: it has returned and will never come."""
        if not self._meetings:
            return
        begun = Counter({r: self._meetings.get(r, 0) for r in {*self._pending, *self._answers}})
        waiting = max((begun[r] for r in self._pending), default=0)
        if any(begun[r] < waiting for r, answer in self._answers.items() if answer.failure is None):
            each = ", ".join(f"{count} by replica {r}" for r, count in sorted(begun.items()))
            self._fail(
                f"{UNEVEN_MERGE_CALLS} Of these and other calls that all make together: {each}", abort_after=0.0
            )

    def _ask(self, replicas: Iterable[int]) -> None:
        """Have replicas say where they are; they do so before they heed what is sent after this."""
        self._question = next(_numbers)
        self._asked = set(replicas)
        self._standings = {}
        self._pool._send(self._asked, Where(self._question))

    def _look_at_silent(self) -> None:
        for replica_id in self._asked & self._pending - set(self._standings):
            self._standings[replica_id] = self._pool._look(replica_id)

    def _check_evenness(self) -> None:
        """End the wait in a collective that some replica has left out: it has nothing more to do and will not come."""
        if self._reason is not None:
            return
        failed = {r for r, answer in self._answers.items() if answer.done is None or answer.failure is not None}
        reason = hangs.uneven(self._standings, self._asked - self._pending - failed, self._pending)
        if reason is not None:
            self._uneven = True
            self._fail(reason, abort_after=0.0)

    def _end_of(self, replica_id: int, answer: Answer) -> None:
        self._pending.discard(replica_id)
        self._answers[replica_id] = answer

    def _fail(self, reason: str, abort_after: float, interrupt_after: float | None = None) -> None:
        if self._reason is not None:
            return
        self._reason = reason
        now = time.monotonic()
        patience = INTERRUPT_AFTER if interrupt_after is None else interrupt_after
        self._plan(
            *self._aborts(now + abort_after),
            (now + patience, self._interrupt),
            *self._kills(now + patience),
        )

    def _escalate(self) -> None:
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + UNEVEN_AFTER
            if self._reason is None and self._pending:
                self._ask(range(self._pool.size))
        count = self._interrupts.taken()
        if count and self._interrupted_at == math.inf:
            self._interrupted_at = now
            self._end_now("this was interrupted; replicas reduce and gather again in the next one", now)
        elif count >= 2 and now >= self._interrupted_at + SECOND_AFTER:
            self._kill()
        elif now > self._deadline:
            self._timed_out, self._deadline = True, math.inf
            self._end_now("the request took longer than its timeout", now)
        while self._steps and self._steps[0][0] <= now:
            self._steps.pop(0)[1]()

    def _end_now(self, reason: str, now: float) -> None:
        self._reason, self._asked_for = reason, True
        self._ask(self._pending)
        self._plan(
            (now, self._interrupt),
            *self._aborts(now),
            (now + SILENT_AFTER, self._look_at_silent),
            *self._kills(now),
        )

    def _plan(self, *steps: tuple[float, Callable[[], None]]) -> None:
        self._steps = sorted(steps, key=lambda step: step[0])

    def _aborts(self, when: float) -> list[tuple[float, Callable[[], None]]]:
        # More than once: one that reaches a replica just before it begins to join a group is over by then, and the
        # replica would wait for who is gone until it is killed.
        return [(when + later, self._abort) for later in ABORT_AGAIN]

    def _abort(self) -> None:
        self._pool._send(self._pending, Abort(self._reason or ""))

    def _interrupt(self) -> None:
        self._pool._send(self._pending, Interrupt(self._number, self._asked_for))

    def _kills(self, interrupted: float) -> list[tuple[float, Callable[[], None]]]:
        last = interrupted + max(GRACE, HELD_BACK_SECONDS)
        return [(interrupted + GRACE, lambda: self._kill_silent(last)), (last, self._kill)]

    def _kill_silent(self, last: float) -> None:
        """End those that do not answer, and look again at those that are in the middle of something."""
        now = time.monotonic()
        answered = [self._holding[r] for r in self._pending if self._holding.get(r, 0.0) > now - GRACE]
        for replica_id in set(self._pending):
            if self._holding.get(replica_id, 0.0) <= now - GRACE:
                self._pool._kill(replica_id)
        if answered and now < last:
            self._plan(*self._steps, (min(answered) + GRACE, lambda: self._kill_silent(last)))

    def _kill(self) -> None:
        for replica_id in set(self._pending):
            self._pool._kill(replica_id)
