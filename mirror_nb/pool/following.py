"""A request on its way: replicas are followed to its end, and who will not end is ended.

One that fails or dies frees its peers: their waits in collectives first, then they are interrupted, then killed, each
step at its time. Knows messages and deadlines; how replicas are reached is the pool's.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from mirror_nb.collectives.headers import UNEVEN_MERGE_CALLS
from mirror_nb.errors import ReplicaTimeout
from mirror_nb.messages import (
    Abort,
    Call,
    Done,
    HeldBack,
    Interrupt,
    Meeting,
    Request,
    RunCell,
    Stream,
    Where,
    Whereabouts,
)
from mirror_nb.pool import hangs
from mirror_nb.pool.interrupts import Interrupts
from mirror_nb.pool.report import Answer, Death, Incoming, Report

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
OWN_WORK_SECONDS = 180.0
# The same where it takes in or sends what the names hold: 2 GB take 5 s on such a machine.
SECOND_AFTER = 1.0
# From the first interrupt to the kill that a second one asks for: a key that was pressed twice is no wish to lose all.
SILENT_AFTER = 0.25
# Seconds from a question to a look at a replica that does not answer it, from outside.
UNEVEN_AFTER = 0.5
# Seconds from the first replica's end to the question whether the others wait for it; then as often.


class Followed(ABC):
    """Replicas, as who follows a request reaches them."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of replicas."""

    @abstractmethod
    def prepare(self) -> None:
        """Get ready for a death if there is time: called before a request, and a few times a second while one runs."""

    @abstractmethod
    def send(self, replica_ids: Iterable[int], message: object, slab: int | None = None) -> None:
        """Send the same to these replicas; one that is gone shows in `poll`."""

    @abstractmethod
    def poll(self, timeout: float) -> list[Incoming]:
        """Return what came within `timeout` seconds; earlier when there was an interrupt."""

    @abstractmethod
    def look(self, replica_id: int) -> hangs.Silent:
        """Look at a replica that does not answer, from outside."""

    @abstractmethod
    def kill(self, replica_id: int) -> None:
        """End a replica that will not stop; `poll` tells its death."""

    @abstractmethod
    def unform(self) -> None:
        """The group is no longer usable."""


def trains_together(what: object) -> bool:
    """Whether replicas that are stopped in this request may differ by a step that was meant for all."""
    return isinstance(what, Call) or (isinstance(what, RunCell) and what.synchronize and not what.partial)


def _alike(requests: Mapping[int, Any]) -> list[list[int]]:
    """Return the ids of replicas, those that get the same object together: it is pickled once for them."""
    groups: dict[int, list[int]] = {}
    for replica_id, what in requests.items():
        groups.setdefault(id(what), []).append(replica_id)
    return list(groups.values())


numbers = itertools.count(1)
# Over all pools of this process: a class that a replica made is known by the number of its request.


@final
class Following:
    """One request on its way: who is still at work, and which steps towards the end were taken."""

    def __init__(
        self,
        pool: Followed,
        requests: Mapping[int, Any],
        slabs: Mapping[int, int | None],
        on_message: Callable[[int, Any], None],
        on_tick: Callable[[set[int]], None],
        timeout: float | None,
        interrupts: Interrupts,
    ) -> None:
        """For the arguments see `Pool.run`."""
        self._pool = pool
        self._requests = requests
        self._slabs = slabs
        self._on_message = on_message
        self._on_tick = on_tick
        self._deadline = time.monotonic() + timeout if timeout is not None else math.inf
        self._interrupts = interrupts
        self._number = next(numbers)
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
        self._holding: dict[int, tuple[float, HeldBack]] = {}
        # When and what replicas said last of an interrupt that they hold back.
        self._raised: BaseException | None = None
        # By the controller's own callbacks.

    def follow(self) -> Report:
        try:
            self._to_its_end()
        except BaseException:
            for answer in self._answers.values():
                answer.close()
            raise
        return Report(
            dict(sorted(self._answers.items())),
            self._interrupts.count > 0,
            self._timed_out,
            self._standings,
            self._uneven,
        )

    def _to_its_end(self) -> None:
        for replica_ids in _alike(self._requests):
            first = replica_ids[0]
            self._pool.send(replica_ids, Request(self._number, self._requests[first]), self._slabs.get(first))
        tick = 0.0
        while self._pending:
            # Before the first wait: what was said between two requests is said again at the beginning of a short one.
            if time.monotonic() - tick > TICK_SECONDS:
                tick = time.monotonic()
                self._pool.prepare()
                self._call(self._on_tick, set(self._pending))
            for replica_id, message, slab in self._pool.poll(self._patience()):
                self._take(replica_id, message, slab)
            if self._pending:
                self._escalate()
        if self._reason is not None:
            self._pool.unform()
        else:
            self._drop_unfinished()
        self._raised = self._raised or self._interrupts.raised
        if self._raised is not None:
            raise self._raised

    def _drop_unfinished(self) -> None:
        """End what some replicas began and others did not: what those begin next would be taken for it."""
        begun = {r: answer.done.collectives for r, answer in self._answers.items() if answer.done is not None}
        together = len(begun) == self._pool.size and any(map(trains_together, self._requests.values()))
        if together and len(set(begun.values())) > 1:
            self._pool.unform()
            if min(begun.values()) < 0:
                # Nobody has counted there: its cell has destroyed the group.
                return
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
            self._holding[replica_id] = time.monotonic(), message
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
        self._question = next(numbers)
        self._asked = set(replicas)
        self._standings = {}
        self._pool.send(self._asked, Where(self._question))

    def _look_at_silent(self) -> None:
        for replica_id in self._asked & self._pending - set(self._standings):
            self._standings[replica_id] = self._pool.look(replica_id)

    def _check_evenness(self) -> None:
        """End the wait in a collective that some replica has left out: it has nothing more to do and will not come."""
        if self._reason is not None:
            return
        failed = {r for r, answer in self._answers.items() if answer.done is None or answer.failure is not None}
        reason = hangs.uneven(
            self._standings, self._asked - self._pending - failed, self._pending, set(self._requests)
        )
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
        interrupted = now + (INTERRUPT_AFTER if interrupt_after is None else interrupt_after)
        self._plan(*self._aborts(now + abort_after), (interrupted, self._interrupt), self._first_kill(interrupted))

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
            self._first_kill(now),
        )

    def _plan(self, *steps: tuple[float, Callable[[], None]]) -> None:
        self._steps = sorted(steps, key=lambda step: step[0])

    def _aborts(self, when: float) -> list[tuple[float, Callable[[], None]]]:
        # More than once: one that reaches a replica just before it begins to join a group is over by then, and the
        # replica would wait for who is gone until it is killed.
        return [(when + later, self._abort) for later in ABORT_AGAIN]

    def _abort(self) -> None:
        self._pool.send(self._pending, Abort(self._reason or ""))

    def _interrupt(self) -> None:
        self._pool.send(self._pending, Interrupt(self._number, self._asked_for))

    def _first_kill(self, interrupted: float) -> tuple[float, Callable[[], None]]:
        return interrupted + GRACE, lambda: self._kill_silent(interrupted)

    def _kill_silent(self, interrupted: float) -> None:
        """End those that do not answer, and look again at those that are in the middle of something."""
        now = time.monotonic()
        ends = {replica_id: self._end_of_patience(replica_id, interrupted) for replica_id in self._pending}
        for replica_id, end in ends.items():
            if end <= now:
                self._pool.kill(replica_id)
        left = [end for end in ends.values() if end > now]
        if left:
            self._plan(*self._steps, (min(left), lambda: self._kill_silent(interrupted)))

    def _end_of_patience(self, replica_id: int, interrupted: float) -> float:
        said, held_back = self._holding.get(replica_id, (interrupted, HeldBack()))
        longest = OWN_WORK_SECONDS if held_back.own else HELD_BACK_SECONDS
        return min(said + GRACE, interrupted + max(GRACE, longest))

    def _kill(self) -> None:
        for replica_id in set(self._pending):
            self._pool.kill(replica_id)
