"""Collectives of replicas on one machine, through memory that all map. No thread, no copy that need not be.

Knows tensors on the CPU, segments and flags. Knows nothing of torch.distributed, pools, or who calls it.

    replica i:  post (what, where) ──▶ all posted? ──▶ read the others' parts, sum, show ──▶ all have shown? ──▶ done
                     │                     │
                     ▼                     ▼
                a header in its line   the same headers everywhere, else an error everywhere that tells them all

An *exchange* is one collective under way: a generator that says which counter of the others it needs next. It goes on
when somebody waits, asks (`progress`) or begins another one, so `all_reduce` returns at once and a backward pass may
go on. Up to `SLOT_BYTES` every replica lays its part out and sums all parts itself, after one arrival. Larger tensors
go through in pieces; those that lie in memory of `allocate` are summed where they are: each replica a slice, for all.
What another carrier shall do is announced, and compared before it begins: it could not take back what it began.

Sums are always made in the order replica 0 + 1 + 2 + …, element by element. So the bits depend neither on how tensors
are cut into buckets nor on which way they take. bf16 and fp16 are summed in fp32 and rounded once.
"""

from __future__ import annotations

import functools
import threading
import time
import zlib
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from mirror_nb.collectives.barrier import Counter, Flags, integers
from mirror_nb.collectives.exchange import Differs, Exchange, Need, Steps, different, fresh
from mirror_nb.collectives.headers import HALF, SUM_HEADS, Fold, Kind, for_purpose, head, words
from mirror_nb.collectives.parts import Folder, Rows, aligned, slice_of
from mirror_nb.collectives.regions import Regions
from mirror_nb.collectives.segments import Gather, Segment, common_segment, read, written
from mirror_nb.errors import PeerFailed, ReplicaTimeout

SLOT_BYTES = 64 * 1024
SLOTS = 16
# So many collectives may be laid out before the first has ended here; more wait for their turn.
PIECE_BYTES = 512 * 1024
PIECES = 4
_HEADERS = 2 * SLOTS
# A replica posts SLOTS ahead of what has ended here, and that may be SLOTS ahead of what has ended there.
CALL_AFTER_SECONDS = 0.002
_TOLD_BYTES = 1024
# Of what a replica says of a collective that the others did not run.
_NONE: Tally[str] = Tally()
# Nobody adds to it.


@final
class Fabric:
    """What the replicas of one group on one machine share, and their collectives through it.

    Every replica begins the same exchanges in the same order. All its methods may be called from any thread.
    """

    def __init__(self, segment: Segment, replica_id: int, num_replicas: int, timeout_seconds: float) -> None:
        self.replica_id = replica_id
        self.num_replicas = num_replicas
        self.timeout_seconds = timeout_seconds
        layout = _Layout.of(num_replicas)
        memory = segment.memory
        self._flags = Flags(memory[: layout.headers], replica_id, num_replicas)
        self._headers = integers(memory[layout.headers : layout.slots])
        self._slots = Rows(memory[layout.slots : layout.pieces].view(SLOTS, num_replicas, SLOT_BYTES))
        self._pieces = Rows(memory[layout.pieces :].view(PIECES, num_replicas, PIECE_BYTES))
        self._regions = Regions(replica_id, num_replicas)
        folder = Folder()
        self._fold, self._scratch = folder.fold, folder.scratch
        # Reentrant: a signal's handler that calls abort() may run while the main thread holds it.
        self._lock = threading.RLock()
        self._queue: deque[Exchange] = deque()
        self._issued = 0
        self._finished = 0
        self._staged = 0
        self._reduced = 0
        self._error: BaseException | None = None
        self._ended: list[Exchange] = []
        self.purpose = ""
        # What the collectives are for that are begun now; for messages.
        self._waiting: list[tuple[Exchange, float]] = []
        # What threads of this process wait for, and since when; time.monotonic.
        self._begun = [0] * (max(Kind) + 1)
        # Collectives by kind, since the group was formed.
        self._carried: Tally[str] = Tally()
        # Those of kind CARRIED by name.
        self._marked = self._begun.copy(), self._carried.copy()
        # These at the last `mark`.
        self._helper: threading.Thread | None = None

    @staticmethod
    def form(gather: Gather, replica_id: int, num_replicas: int, timeout_seconds: float) -> Fabric:
        """Make the shared memory of a group; every replica calls it.

        Raises ReplicaError, on every replica alike, where they cannot share memory, and why.
        """
        segment = common_segment(gather, replica_id, _Layout.of(num_replicas).end)
        return Fabric(segment, replica_id, num_replicas, timeout_seconds)

    # ------------------------------------------------------------------ collectives

    def all_reduce(self, flat: Tensor, fold: Fold, what: Tensor | None = None) -> Exchange:
        """Begin to make `flat` (contiguous, of one of `headers.DTYPES`) on every replica the fold of all of them.

        `what`, here as below: the tensor whose values `flat` shows, for messages.
        """
        numel, nbytes = flat.numel(), flat.nbytes
        header = SUM_HEADS[flat.dtype][fold] | numel
        if nbytes <= SLOT_BYTES:
            # Also what lies in `allocate`d memory. Of two replicas the late one finds all that it needs in the slot,
            # and has not to wait until the other, which sleeps by then, has woken up and summed its slice.
            begun = self._sum_small(header, numel, flat, fold, what)
            if begun is None:
                return self._begin(Kind.ALL_REDUCE, fold, 0, flat, what, lambda views: self._fold(views, flat, fold))
            return begun
        location = self._regions.location(flat, nbytes)
        return self._queue_up(
            Kind.ALL_REDUCE,
            flat if what is None else what,
            lambda number: self._large(number, header, location, flat, fold),
        )

    def reduce(self, flat: Tensor, root: int, fold: Fold, what: Tensor | None = None) -> Exchange:
        """Begin to make `flat` on replica `root` the fold of all of them; the others' stay as they are."""
        mine = self.replica_id == root

        def take(views: list[Tensor], low: int, high: int) -> None:
            if mine:
                self._fold(views, flat[low:high], fold)

        return self._begin_pieces(Kind.REDUCE, fold, root, flat, what, take)

    def broadcast(self, flat: Tensor, root: int, what: Tensor | None = None) -> Exchange:
        """Begin to make `flat` on every replica what it is on replica `root`."""
        mine = self.replica_id == root

        def take(views: list[Tensor], low: int, high: int) -> None:
            if not mine:
                flat[low:high].copy_(views[root])

        return self._begin_pieces(Kind.BROADCAST, Fold.SUM, root, flat, what, take, lays_out=mine)

    def all_gather(self, outputs: Sequence[Tensor], flat: Tensor, what: Tensor | str | None = None) -> Exchange:
        """Begin to make `outputs[i]` on every replica what `flat` is on replica i.

        `what`: or what it is for, in words that stand for all of it.
        """

        def take(views: list[Tensor], low: int, high: int) -> None:
            for output, view in zip(outputs, views, strict=True):
                output[low:high].copy_(view)

        return self._begin_pieces(Kind.ALL_GATHER, Fold.SUM, 0, flat, what, take)

    def barrier(self) -> Exchange:
        """Begin to wait until all replicas have come here."""
        return self._begin(
            Kind.BARRIER, Fold.SUM, 0, torch.empty(0, dtype=torch.uint8, device="cpu"), None, lambda views: None
        )

    def all_reduce_by_groups(self, flat: Tensor, fold: Fold, groups: Sequence[Sequence[int]]) -> Exchange:
        """As `all_reduce`, but summed within each group of replica ids first, then over the groups."""
        header = self._header(Kind.ALL_REDUCE_BY_GROUPS, fold, len(groups), flat)
        return self._queue_up(
            Kind.ALL_REDUCE_BY_GROUPS, flat, lambda number: self._by_groups(number, header, flat, fold, groups)
        )

    def announce(self, name: str, alike: str, what: str, parts: Sequence[int] = ()) -> Exchange:
        """Begin to find out whether all replicas run this collective, which somebody else carries from its end on.

        `name`: of the collective. `alike`: what has to be the same on all of them. `what`: the same in words, with
        whatever else there is to say. `parts`: where each replica sends each something else, how many elements it
        sends to each of them, then how many it takes from each. It ends with UsageError where the replicas differ;
        the next exchange is in step.
        """
        header = Kind.CARRIED << 55 | zlib.crc32(f"{name} {alike}".encode())
        with self._lock:
            self._carried[name] += 1
        return self._queue_up(Kind.CARRIED, what, lambda number: self._announced(number, header, parts))

    def announce_all_reduce(self, how: str, op: str, flat: Tensor) -> Exchange:
        """`announce` an all-reduce of the op's name that is carried `how`."""
        said = f"all_reduce ({op}) of {str(flat.dtype).removeprefix('torch.')}[{flat.numel()}] by {how}"
        return self.announce("all_reduce", said, said)

    # ------------------------------------------------------------------ going on

    def progress(self) -> None:
        """Go on with what has been begun, as far as it goes without waiting."""
        try:
            with self._lock:
                self._advance()
        finally:
            if self._ended:
                self._tell()

    def wait(self, exchange: Exchange, seconds: float | None = None) -> None:
        """Return when `exchange` has ended.

        Raises PeerFailed when a replica left or died, the error given to `abort`, UsageError where the replicas ran
        different collectives, and ReplicaTimeout after `seconds` (by default the group's time); after that one it may
        be waited for again.
        """
        if not exchange.ended:
            limit = self.timeout_seconds if seconds is None else seconds
            waiting = exchange, time.monotonic()
            self._waiting.append(waiting)
            try:
                self._wait(*waiting, limit)
            finally:
                self._waiting.remove(waiting)
        if self._ended:
            self._tell()
        exchange.outcome()

    def _wait(self, exchange: Exchange, began: float, limit: float) -> None:
        while not exchange.ended:
            needs = self._needs()
            if needs is None or self._flags.spin(*needs, self._is_over):
                self.progress()
                continue
            self._flags.nap(*needs, self._is_over)
            self.progress()
            if exchange.ended or self._flags.reached(*needs):
                continue
            self._check_peers(exchange, needs)
            passed = time.monotonic() - began
            if passed > limit:
                raise self._timeout(exchange, needs, limit)
            if passed > CALL_AFTER_SECONDS:
                self._flags.call(self._flags.lagging(*needs))

    def _check_peers(self, exchange: Exchange, needs: Need) -> None:
        missing = self._flags.missing()
        # Once more: it may have come just before it went.
        if missing is not None and not self._flags.reached(*needs):
            self.abort(PeerFailed(f"{exchange.label} failed: a peer may have left ({missing})"))

    def _needs(self) -> Need | None:
        with self._lock:
            return self._queue[0].needs if self._queue else None

    def _is_over(self) -> bool:
        return self._error is not None

    def go_on_by_itself(self, at_once: bool) -> None:
        """Have what was begun here and is not waited for go on, now or as soon as another replica waits for it.

        It takes a thread, which otherwise sleeps.
        """
        with self._lock:
            if self._helper is None and self._error is None:
                self._helper = threading.Thread(target=self._help, name="mirror_nb exchanges", daemon=True)
                self._helper.start()
        if at_once:
            self._flags.answer_myself()

    def _help(self) -> None:
        seen = 0
        while not self._is_over():
            seen = self._flags.called(seen, 1.0)
            while not self._waiting and not self._is_over() and (needs := self._needs()) is not None:
                self.progress()
                if not self._flags.reached(*needs):
                    self._flags.nap(*needs, self._is_over)

    # ------------------------------------------------------------------ ends

    def abort(self, error: BaseException) -> None:
        """End what has been begun with `error`, and refuse what comes, from any thread, at once."""
        self._stop(error)
        self._tell()
        self._flags.answer_myself()

    def _stop(self, error: BaseException) -> None:
        if self._error is None:
            # A copy: the one that was given may hold the frames it was raised in.
            self._error = fresh(error)
        self._flags.wake_myself()
        with self._lock:
            for exchange in self._queue:
                if not exchange.ended:
                    self._end(exchange, self._error)
            self._queue.clear()

    def close(self, error: BaseException) -> None:
        """Take part no more: `abort`, and tell the others, who then fail. Tensors of `allocate` stay as they are."""
        self._flags.leave()
        self.abort(error)
        self._regions.clear()

    @property
    def broken(self) -> bool:
        """Whether it was ended, by an error or an abort: it refuses what comes."""
        return self._error is not None

    @property
    def pending(self) -> bool:
        """Whether anything that was begun has not ended."""
        return bool(self._queue)

    # ------------------------------------------------------------------ questions, which take no lock

    def waits(self) -> list[tuple[Exchange, float]]:
        """Return what threads wait for here, and since when (time.monotonic)."""
        return list(self._waiting)

    def lacking(self, exchange: Exchange) -> list[int]:
        """Return the replicas that have not come to an exchange."""
        return self._flags.lagging(Counter.POSTED, exchange.number)

    def mark(self) -> None:
        """Count from here on."""
        self._marked = self._begun.copy(), self._carried.copy() if self._carried else _NONE

    @property
    def issued_since(self) -> int:
        """How many collectives were begun here since the last `mark`."""
        return self._issued - sum(self._marked[0])

    def begun(self) -> Tally[str]:
        """Return how many collectives were begun here since the last `mark`, by kind."""
        kinds = {kind.name.lower(): self._begun[kind] - self._marked[0][kind] for kind in Kind}
        del kinds["carried"]
        return Tally(kinds) + (self._carried - self._marked[1])

    @property
    def issued(self) -> int:
        """How many collectives were begun here since the group was formed."""
        return self._issued

    def seen(self) -> list[str]:
        """Return each replica's last collective in words, whatever it is doing; empty if it has begun none."""
        last = [self._flags.shown(r, Counter.POSTED) for r in range(self.num_replicas)]
        return [words(self._headers[self._place(r, number)]) if number else "" for r, number in enumerate(last)]

    # ------------------------------------------------------------------ memory that all map

    def allocate(self, numel: int, dtype: torch.dtype, seconds: float | None = None) -> Tensor:
        """Return a flat tensor of zeros that is reduced where it lies, without a copy; every replica calls it.

        `seconds`: how long the others are waited for, by default the group's time. Raises ReplicaError, on every
        replica, where there is no such memory; ReplicaTimeout.
        """
        part = aligned(max(numel, 1) * dtype.itemsize, 4096)
        gather = functools.partial(self._gather, seconds=seconds)
        segment = common_segment(gather, self.replica_id, part * self.num_replicas)
        parts = segment.memory.split(part)
        with self._lock:
            self._regions.add(parts)
        return parts[self.replica_id][: numel * dtype.itemsize].view(dtype)

    def release(self, tensor: Tensor) -> None:
        """Let go of what `allocate` gave; the tensor lives on as an ordinary one."""
        with self._lock:
            self._regions.release(tensor)

    def _gather(self, value: Any, seconds: float | None) -> list[Any]:
        text = written(value).encode()[:2048].ljust(2048)
        room = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = room.new_empty(self.num_replicas, room.numel())
        self.wait(self.all_gather(list(rows), room), seconds)
        return [read(row.numpy().tobytes().decode()) for row in rows]

    # ------------------------------------------------------------------ exchanges, begun and carried on

    def _begin(
        self,
        kind: Kind,
        fold: Fold,
        root: int,
        flat: Tensor,
        what: Tensor | str | None,
        take: Callable[[list[Tensor]], None],
        lays_out: bool = True,
    ) -> Exchange:
        header = self._header(kind, fold, root, flat)
        return self._queue_up(
            kind, flat if what is None else what, lambda number: self._small(number, header, flat, take, lays_out)
        )

    def _sum_small(self, header: int, numel: int, flat: Tensor, fold: Fold, what: Tensor | None) -> Exchange | None:
        """What `_begin` does with `_small`, in a straight line: of all collectives this one has to take least time.

        None where it has to stand in the queue.
        """
        flags = self._flags
        with self._lock:
            number = self._issued + 1
            if self._queue or self._error is not None or not flags.reached(Counter.DONE, number - SLOTS):
                return None
            exchange = Exchange(number, Kind.ALL_REDUCE, flat if what is None else what, None, self.purpose)
            try:
                self._issued = number
                self._begun[Kind.ALL_REDUCE] += 1
                views = self._slots.of(number % SLOTS, flat.dtype, numel)
                views[self.replica_id].copy_(flat)
                self._post(number, header, 0)
                if flags.reached(Counter.POSTED, number) and self._all_alike(number, header):
                    exchange.started_ns = time.perf_counter_ns()
                    self._fold(views, flat, fold)
                    self._end(exchange, None)
                    return exchange
            except BaseException as error:
                self._give_up(exchange, error)
                raise
            exchange.posted = True
            exchange.needs = Counter.POSTED, number
            exchange.steps = self._rest_of_small(number, header, views, flat, fold)
            self._queue.append(exchange)
        return exchange

    def _rest_of_small(self, number: int, header: int, views: list[Tensor], flat: Tensor, fold: Fold) -> Steps:
        if not self._all_alike(number, header):
            yield from self._differ(number)
        self._fold(views, flat, fold)

    def _begin_pieces(
        self,
        kind: Kind,
        fold: Fold,
        root: int,
        flat: Tensor,
        what: Tensor | str | None,
        take: Callable[[list[Tensor], int, int], None],
        lays_out: bool = True,
    ) -> Exchange:
        if flat.nbytes <= SLOT_BYTES:
            return self._begin(kind, fold, root, flat, what, lambda views: take(views, 0, len(flat)), lays_out)
        header = self._header(kind, fold, root, flat)
        return self._queue_up(
            kind, flat if what is None else what, lambda number: self._in_pieces(number, header, flat, take, lays_out)
        )

    def _queue_up(self, kind: Kind, what: Tensor | str, steps: Callable[[int], Steps]) -> Exchange:
        try:
            with self._lock:
                if self._error is not None:
                    raise fresh(self._error)
                self._issued += 1
                self._begun[kind] += 1
                exchange = Exchange(self._issued, kind, what, steps(self._issued), self.purpose)
                self._queue.append(exchange)
                self._advance()
        finally:
            if self._ended:
                self._tell()
        return exchange

    def _advance(self) -> None:
        """Carry on, in order, all that can go on; the lock is held."""
        queue = self._queue
        while queue and self._carry_on(queue[0], to_the_end=True):
            if queue:
                queue.popleft()
        # In their order, the first one too: others take it that who has come to a number has come to all before it.
        if len(queue) > 1 and queue[0].posted:
            for exchange in list(queue)[1 : SLOTS + 1]:
                if not exchange.posted and not self._post_ahead(exchange):
                    return

    def _post_ahead(self, exchange: Exchange) -> bool:
        # This replica's own part of a slot is read here too.
        if exchange.number - self._finished > SLOTS:
            return False
        self._carry_on(exchange, to_the_end=False)
        return exchange.posted

    def _carry_on(self, exchange: Exchange, to_the_end: bool) -> bool:
        """Take the exchange as far as it goes without waiting; whether it has ended."""
        steps = exchange.steps
        if steps is None:
            return exchange.ended
        reached = self._flags.reached
        try:
            while reached(*exchange.needs):
                if exchange.posted:
                    if not to_the_end:
                        return False
                    exchange.started_ns = exchange.started_ns or time.perf_counter_ns()
                needs = exchange.needs = next(steps)
                if needs[0] == Counter.POSTED:
                    exchange.posted = True
            return False
        except StopIteration:
            self._end(exchange, None)
        except Differs as found:
            # The next exchange is in step.
            self._end(exchange, found.error)
        except BaseException as error:
            self._give_up(exchange, error)
            raise
        return True

    def _give_up(self, exchange: Exchange, error: BaseException) -> None:
        """An exception in the middle of a sum, an interrupt say: the replicas are out of step for good."""
        if self._error is None:
            self.close(PeerFailed(f"{exchange.label} was cut short: {type(error).__name__}"))

    def _end(self, exchange: Exchange, error: BaseException | None) -> None:
        exchange.ended_ns = time.perf_counter_ns()
        exchange.error = error
        exchange.steps = exchange.what = None
        exchange.ended = True
        if self._error is None:
            self._finished = exchange.number
            self._flags.show(Counter.DONE, exchange.number)
        if exchange.called:
            self._ended.append(exchange)

    def _tell(self) -> None:
        """Run what waits for ended exchanges; without the lock, since it may be anything and want locks of its own.

        Where this thread has the lock, further up, that is left to whoever lets go of it or waits next.
        """
        while self._ended and not self._lock._is_owned():  # type: ignore[attr-defined]
            try:
                exchange = self._ended.pop()
            except IndexError:
                # Another thread has taken it.
                return
            for call in exchange.called:
                call()

    def when_ended(self, exchange: Exchange, call: Callable[[], None]) -> None:
        """Run `call` once `exchange` has ended, now if it has."""
        with self._lock:
            if not exchange.ended:
                exchange.called = (*exchange.called, call)
                return
        call()

    # ------------------------------------------------------------------ what they do

    def _meet(self, number: int, header: int, location: int = 0) -> Steps:
        """Come to the exchange, and wait for all; raise where they came to different ones."""
        self._post(number, header, location)
        yield Counter.POSTED, number
        if not self._all_alike(number, header):
            yield from self._differ(number)

    def _small(
        self, number: int, header: int, flat: Tensor, take: Callable[[list[Tensor]], None], lays_out: bool
    ) -> Steps:
        yield Counter.DONE, number - SLOTS
        views = self._slots.of(number % SLOTS, flat.dtype, flat.numel())
        if lays_out and flat.numel():
            views[self.replica_id].copy_(flat)
        yield from self._meet(number, header)
        if flat.numel():
            take(views)

    def _announced(self, number: int, header: int, parts: Sequence[int]) -> Steps:
        rows = None
        if parts:
            yield Counter.DONE, number - SLOTS
            # Behind what is told where replicas differ: others may read one while this replica writes the other.
            rows = self._slots.bytes_of(number % SLOTS, _TOLD_BYTES, _TOLD_BYTES + 8 * len(parts)).view(torch.int64)
            rows[self.replica_id].copy_(torch.tensor(parts, device="cpu"))
        self._post(number, header, 0)
        yield Counter.POSTED, number
        sent_is_taken = rows is None or torch.equal(rows[:, : self.num_replicas].T, rows[:, self.num_replicas :])
        if not self._all_alike(number, header) or not sent_is_taken:
            yield from self._differ(number)

    def _large(self, number: int, header: int, location: int, flat: Tensor, fold: Fold) -> Steps:
        yield from self._meet(number, header, location)
        if location and self._all_at(number, location):
            yield from self._in_place(location, flat, fold)
        elif self.num_replicas == 2:
            # Twice one's own piece of work, but half the arrivals, and no more bytes than in slices.
            yield from self._through_pieces(flat, functools.partial(self._fold_with_own, flat, fold), True)
        else:
            yield from self._in_slices(flat, fold)

    def _in_pieces(
        self, number: int, header: int, flat: Tensor, take: Callable[[list[Tensor], int, int], None], lays_out: bool
    ) -> Steps:
        yield from self._meet(number, header)
        yield from self._through_pieces(flat, take, lays_out)

    def _through_pieces(self, flat: Tensor, take: Callable[[list[Tensor], int, int], None], lays_out: bool) -> Steps:
        """Every replica lays its part out piece by piece, the next while the others read this one."""
        numel, step = flat.numel(), PIECE_BYTES // flat.element_size()
        laid: tuple[list[Tensor], int, int] | None = None
        for low in [*range(0, numel, step), numel]:
            ready = laid
            if low < numel:
                high = min(low + step, numel)
                self._staged += 1
                yield Counter.TAKEN, self._staged - PIECES
                views = self._pieces.of(self._staged % PIECES, flat.dtype, high - low)
                if lays_out:
                    views[self.replica_id].copy_(flat[low:high])
                self._flags.show(Counter.STAGED, self._staged)
                laid = views, low, high
            if ready is not None:
                count = self._staged - (low < numel)
                yield Counter.STAGED, count
                take(*ready)
                self._flags.show(Counter.TAKEN, count)

    def _in_slices(self, flat: Tensor, fold: Fold) -> Steps:
        """Piece by piece, of which each replica sums a slice for all."""
        numel, step = flat.numel(), PIECE_BYTES // flat.element_size()
        for low in range(0, numel, step):
            high = min(low + step, numel)
            self._staged += 1
            yield Counter.TAKEN, self._staged - PIECES
            views = self._pieces.of(self._staged % PIECES, flat.dtype, high - low)
            views[self.replica_id].copy_(flat[low:high])
            self._flags.show(Counter.STAGED, self._staged)
            yield Counter.STAGED, self._staged
            begin, end = slice_of(high - low, self.replica_id, self.num_replicas)
            if begin < end:
                self._fold([view[begin:end] for view in views], views[self.replica_id][begin:end], fold)
            self._reduced += 1
            self._flags.show(Counter.REDUCED, self._reduced)
            yield Counter.REDUCED, self._reduced
            for replica, view in enumerate(views):
                begin, end = slice_of(high - low, replica, self.num_replicas)
                if begin < end:
                    flat[low + begin : low + end].copy_(view[begin:end])
            self._flags.show(Counter.TAKEN, self._staged)

    def _in_place(self, location: int, flat: Tensor, fold: Fold) -> Steps:
        for parts, mine in self._regions.blocks(location, flat):
            self._fold(parts, mine, fold)
            for part in parts:
                if part is not mine:
                    part.copy_(mine)
            if self._error is not None:
                raise fresh(self._error)
        self._reduced += 1
        self._flags.show(Counter.REDUCED, self._reduced)
        yield Counter.REDUCED, self._reduced

    def _by_groups(self, number: int, header: int, flat: Tensor, fold: Fold, groups: Sequence[Sequence[int]]) -> Steps:
        """Piece by piece: the first of each group sums the group's parts, then each replica sums these sums."""
        yield from self._meet(number, header)
        dtype = torch.float32 if flat.dtype in HALF else flat.dtype
        mine = next((group for group in groups if group[0] == self.replica_id), None)
        within = Fold.SUM if fold is Fold.MEAN else fold
        numel, step = flat.numel(), PIECE_BYTES // dtype.itemsize
        for low in range(0, numel, step):
            high = min(low + step, numel)
            self._staged += 1
            yield Counter.TAKEN, self._staged - PIECES
            views = self._pieces.of(self._staged % PIECES, dtype, high - low)
            views[self.replica_id].copy_(flat[low:high])
            self._flags.show(Counter.STAGED, self._staged)
            yield Counter.STAGED, self._staged
            if mine is not None:
                self._fold([views[replica] for replica in mine], views[self.replica_id], within)
            self._reduced += 1
            self._flags.show(Counter.REDUCED, self._reduced)
            yield Counter.REDUCED, self._reduced
            total = self._scratch(2 * (high - low), dtype)[high - low :]
            self._fold([views[group[0]] for group in groups], total, within)
            flat[low:high].copy_(total.div_(self.num_replicas) if fold is Fold.MEAN else total)
            self._flags.show(Counter.TAKEN, self._staged)

    def _fold_with_own(self, flat: Tensor, fold: Fold, views: list[Tensor], low: int, high: int) -> None:
        """Fold pieces that were laid out, this replica's own from where it came: that is in its cache."""
        own = flat[low:high]
        self._fold([own if r == self.replica_id else view for r, view in enumerate(views)], own, fold)

    # ------------------------------------------------------------------ headers

    def _header(self, kind: Kind, fold: Fold, root: int, flat: Tensor) -> int:
        return head(kind, fold, flat.dtype) | root << 40 | flat.numel()

    def _place(self, replica: int, number: int) -> int:
        return 2 * (replica * _HEADERS + number % _HEADERS)

    def _post(self, number: int, header: int, location: int) -> None:
        index = self._place(self.replica_id, number)
        self._headers[index] = header
        self._headers[index + 1] = location
        self._flags.show(Counter.POSTED, number)

    def _all_alike(self, number: int, header: int) -> bool:
        headers, index = self._headers, 2 * (number % _HEADERS)
        for _ in range(self.num_replicas):
            if headers[index] != header:
                return False
            index += 2 * _HEADERS
        return True

    def _all_at(self, number: int, location: int) -> bool:
        return all(self._headers[self._place(r, number) + 1] == location for r in range(self.num_replicas))

    def _differ(self, number: int) -> Steps:
        """Tell the others what this replica runs, and raise what all of them run.

        Every replica comes here, since all compare the same headers. Nobody reads the slot any more: whoever has
        posted this number has finished the one that had the slot before.
        """
        exchange = self._queue[0]
        rows = self._slots.bytes_of(number % SLOTS, 0, _TOLD_BYTES)
        mine = words(self._headers[self._place(self.replica_id, number)], exchange.what) + for_purpose(
            exchange.purpose
        )
        told = mine.encode()[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0")
        rows[self.replica_id].copy_(torch.frombuffer(bytearray(told), dtype=torch.uint8))
        self._flags.show(Counter.TOLD, number)
        yield Counter.TOLD, number
        said = [row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
        raise Differs(different(said))

    def _timeout(self, exchange: Exchange, needs: Need, seconds: float) -> ReplicaTimeout:
        late = ", ".join(map(str, self._flags.lagging(*needs)))
        return ReplicaTimeout(
            f"{exchange.label} did not end within {seconds:g} s: replica {late} has not come; a peer may have left, "
            "or it runs another collective; see that every replica runs the same collectives in the same order"
        )


@final
@dataclass(frozen=True, slots=True)
class _Layout:
    """Where what lies in a fabric's segment: offsets in bytes; the flags come first."""

    headers: int
    slots: int
    pieces: int
    end: int

    @staticmethod
    def of(num_replicas: int) -> _Layout:
        headers = Flags.size_in_bytes(num_replicas)
        slots = aligned(headers + num_replicas * _HEADERS * 16, 4096)
        pieces = slots + SLOTS * num_replicas * SLOT_BYTES
        return _Layout(headers, slots, pieces, pieces + PIECES * num_replicas * PIECE_BYTES)
