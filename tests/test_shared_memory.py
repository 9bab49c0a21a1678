"""Shared memory between processes: its segments, its waits, and collectives among processes with no controller."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

from mirror_nb.collectives import barrier, segments
from mirror_nb.collectives.barrier import Counter, Flags
from mirror_nb.collectives.exchange import Exchange
from mirror_nb.collectives.fabric import PIECE_BYTES, SLOT_BYTES, SLOTS, Fabric, _Layout
from mirror_nb.collectives.headers import Fold
from mirror_nb.collectives.parts import slice_of
from mirror_nb.collectives.segments import Address, Segment
from mirror_nb.collectives.waiting import state
from mirror_nb.collectives.works import SharedWork
from mirror_nb.errors import PeerFailed, ReplicaError, ReplicaTimeout, UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory between replicas needs Linux")

DEADLINE = 30.0

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# Processes that meet over pipes


class Failed(Exception):
    """What a function raised in a process: (type's name, message, traceback)."""


def live(channel: Connection) -> None:
    """Run functions that come through the channel; `gather` goes through it too."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def gather(value: Any) -> list[Any]:
        channel.send_bytes(pickle.dumps(("gather", value)))
        return pickle.loads(channel.recv_bytes())

    while True:
        try:
            function, args = pickle.loads(channel.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = ("value", function(gather, *args))
        except BaseException as error:
            answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        channel.send_bytes(pickle.dumps(answer))


class Few:
    """Processes whose `gather` this one answers."""

    def __init__(self, n: int) -> None:
        self.n = n
        context = multiprocessing.get_context("forkserver")
        self.channels, self.processes = [], []
        for _ in range(n):
            mine, theirs = context.Pipe()
            process = context.Process(target=live, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.channels.append(mine)
            self.processes.append(process)

    def start(self, function: Callable[..., Any]) -> None:
        """Begin `function(gather, replica_id, n)` on all."""
        for i, channel in enumerate(self.channels):
            channel.send_bytes(cloudpickle.dumps((function, (i, self.n))))

    def results(self, of: range | None = None) -> list[Any]:
        """What each gave, an exception as a Failed; None of those that are not in `of`."""
        members = set(range(self.n))
        wanted = set(range(self.n) if of is None else of)
        found: list[Any] = [None] * self.n
        offers: dict[int, Any] = {}
        deadline = monotonic() + DEADLINE
        while wanted & members:
            ready = wait([self.channels[i] for i in members], deadline - monotonic())
            assert ready, f"processes {members} gave no answer in {DEADLINE} s; of all there are {found}"
            for i in [i for i in members if self.channels[i] in ready]:
                try:
                    kind, value = pickle.loads(self.channels[i].recv_bytes())
                except EOFError:
                    members.discard(i)
                    continue
                if kind == "gather":
                    offers[i] = value
                else:
                    found[i] = Failed(*value) if kind == "error" else value
                    members.discard(i)
            if len(offers) == self.n:
                for channel in self.channels:
                    channel.send_bytes(pickle.dumps([offers[i] for i in range(self.n)]))
                offers.clear()
        return found

    def run(self, function: Callable[..., Any]) -> list[Any]:
        self.start(function)
        found = self.results()
        failed = next((value for value in found if isinstance(value, Failed)), None)
        if failed is not None:
            raise failed
        return found

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[int], Few]]:
    """So many processes, shared by the tests that leave them as they were."""
    made: dict[int, Few] = {}

    def of(n: int) -> Few:
        if n not in made:
            made[n] = Few(n)
        return made[n]

    yield of
    for few in made.values():
        few.close()


@pytest.fixture(params=[2, 3], ids=lambda n: f"{n} processes")
def few(request: pytest.FixtureRequest, processes: Callable[[int], Few]) -> Few:
    return processes(request.param)


@pytest.fixture
def pair(processes: Callable[[int], Few]) -> Few:
    return processes(2)


@pytest.fixture
def doomed() -> Iterator[Few]:
    """Two processes for one test alone."""
    made = Few(2)
    yield made
    made.close()


def formed(gather: Callable[[Any], list[Any]], replica_id: int, n: int, seconds: float = DEADLINE) -> Fabric:
    return Fabric.form(gather, replica_id, n, seconds)


# Segments


@pytest.mark.parametrize("kind", segments.KINDS)
def test_a_segment_is_seen_by_who_opens_it_and_leaves_no_name(kind: str) -> None:
    before = set(Path("/dev/shm").iterdir())
    made = Segment.create(10_000, kind)
    opened = Segment.open(pickle.loads(pickle.dumps(made.address)))
    made.withdraw()
    made.withdraw()
    assert set(Path("/dev/shm").iterdir()) == before
    opened.memory[7] = 5
    assert made.memory[7] == 5
    assert made.memory.sum() == 5
    with pytest.raises(ReplicaError, match=r"cannot map .*: \[Errno 2\]"):
        Segment.open(made.address)


def test_a_file_of_a_segment_is_readable_by_its_user_alone() -> None:
    made = Segment.create(100, "file")
    try:
        assert Path(made.address.path).stat().st_mode & 0o777 == 0o600
    finally:
        made.withdraw()


def test_a_segment_of_another_machine_is_refused() -> None:
    with pytest.raises(ReplicaError, match="different machines"):
        Segment.open(Address("another", "/proc/1/fd/1", 10))


def test_too_little_dev_shm_says_how_much_is_free_and_names_the_option_of_docker(monkeypatch) -> None:
    room = os.statvfs("/dev/shm")

    class Little:
        f_bavail = 16
        f_frsize = room.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Little)
    with pytest.raises(ReplicaError, match=r"no 1 MiB in /dev/shm: \d+ KiB are free; .*--shm-size"):
        Segment.create(2**20, "file")


def test_where_memfds_are_forbidden_the_reason_is_told(monkeypatch) -> None:
    def forbidden(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with pytest.raises(ReplicaError, match=r"memfd_create.*not permitted"):
        Segment.create(2**20)


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_where_a_process_may_map_no_more_that_is_told_and_nothing_is_left(kind: str, monkeypatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("unable to mmap 1048576 bytes: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "from_file", full)
    before = os.listdir("/proc/self/fd"), list(Path("/dev/shm").glob(f"mirror_nb-{os.getpid()}-*"))
    with pytest.raises(ReplicaError, match=r"1 MiB.*Cannot allocate memory"):
        Segment.create(2**20, kind)
    assert (os.listdir("/proc/self/fd"), list(Path("/dev/shm").glob(f"mirror_nb-{os.getpid()}-*"))) == before


def test_without_memfds_the_replicas_share_a_file_in_dev_shm(doomed: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> tuple[list[float], str]:
        create = Segment.create

        def only_files(nbytes: int, kind: str) -> Segment:
            if kind == "memfd":
                raise ReplicaError("no memfd")
            return create(nbytes, kind)

        Segment.create = staticmethod(only_files)
        fabric = formed(gather, replica_id, n)
        tensor = fabric.allocate(100_000, torch.float32).fill_(replica_id + 1)
        fabric.wait(fabric.all_reduce(tensor, Fold.SUM))
        return tensor[[0, -1]].tolist(), "".join(path for path in Path("/proc/self/maps").read_text().split("\n"))

    for sums, maps in doomed.run(use):
        assert sums == [3.0, 3.0]
        assert "/dev/shm/mirror_nb-" in maps
        assert "(deleted)" in maps


def test_replicas_that_cannot_share_memory_all_hear_why(doomed: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> None:
        if replica_id:
            segments.machine = lambda: "another machine"
        formed(gather, replica_id, n)

    doomed.start(use)
    for failed in doomed.results():
        assert failed.args[:2] == (
            "ReplicaError",
            "the replicas cannot share memory: the replicas are on different machines or in different containers",
        )


# Flags


def flags(n: int = 2) -> list[Flags]:
    memory = torch.zeros(Flags.size_in_bytes(n), dtype=torch.uint8)
    return [Flags(memory, i, n) for i in range(n)]


def test_a_counter_is_reached_when_all_others_have_come() -> None:
    first, second, third = flags(3)
    second.show(Counter.POSTED, 4)
    assert not first.reached(Counter.POSTED, 4)
    assert first.lagging(Counter.POSTED, 4) == [2]
    third.show(Counter.POSTED, 5)
    assert first.reached(Counter.POSTED, 4)
    assert first.reached(Counter.DONE, 0)


def test_a_sleeper_is_woken_by_who_counts_on() -> None:
    first, second = flags()
    began = monotonic()
    over = threading.Event()

    def count() -> None:
        while not first.values[Counter.SLEEPING]:
            over.wait(0.0005)
        second.show(Counter.POSTED, 1)

    other = threading.Thread(target=count)
    other.start()
    while not first.reached(Counter.POSTED, 1):
        first.nap(Counter.POSTED, 1, lambda: False)
        assert monotonic() - began < DEADLINE
    other.join()
    assert not first.values[Counter.SLEEPING]


def test_a_spin_ends_when_it_is_over_and_after_its_time() -> None:
    first, _ = flags()
    assert not first.spin(Counter.POSTED, 1, lambda: False)
    assert first.spin(Counter.POSTED, 1, lambda: True)


def test_without_a_futex_a_sleeper_naps(monkeypatch) -> None:
    monkeypatch.setattr(barrier, "_call", None)
    first, second = flags()
    first.nap(Counter.POSTED, 1, lambda: False)
    second.show(Counter.POSTED, 1)
    first.wake_myself()
    assert first.reached(Counter.POSTED, 1)


def test_on_processors_that_reorder_a_fence_is_taken(monkeypatch) -> None:
    monkeypatch.setattr(barrier, "_STRONGLY_ORDERED", False)
    first, second = flags()
    taken = []
    fence = first._fence
    first._fence = lambda: taken.append(fence())
    first.show(Counter.POSTED, 1)
    second.show(Counter.POSTED, 1)
    assert first.reached(Counter.POSTED, 1)
    assert len(taken) == 2


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 1000, 12_345])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_slices_cover_everything_once(numel: int, n: int) -> None:
    cuts = [slice_of(numel, replica, n) for replica in range(n)]
    assert [i for low, high in cuts for i in range(low, high)] == list(range(numel))
    assert all(low % 64 == 0 or low == numel for low, _ in cuts)


# Collectives


def test_what_was_allocated_is_reduced_where_it_lies(few: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> None:
        fabric = formed(gather, replica_id, n)
        slab = fabric.allocate(300_000, torch.float32)
        assert not slab.any()
        views = slab[:100_001], slab[100_001:]
        for round_ in range(3):
            for view in views:
                view.fill_(replica_id + round_)
            exchanges = [fabric.all_reduce(view, Fold.SUM) for view in views]
            for exchange in exchanges:
                fabric.wait(exchange)
            assert (slab == n * (n - 1) / 2 + n * round_).all()
        assert fabric._staged == 0, "it went through pieces"
        fabric.release(slab)
        slab.fill_(replica_id)
        fabric.wait(fabric.all_reduce(slab, Fold.SUM))
        assert (slab == n * (n - 1) / 2).all()
        assert fabric._staged

    few.run(use)


def test_a_tensor_that_only_some_hold_in_shared_memory_is_reduced_through_a_copy(few: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> None:
        fabric = formed(gather, replica_id, n)
        slab = fabric.allocate(200_000, torch.float32)
        tensor = slab if replica_id == 0 else torch.empty(200_000)
        tensor.fill_(replica_id + 1)
        fabric.wait(fabric.all_reduce(tensor, Fold.MEAN))
        torch.testing.assert_close(tensor, torch.full_like(tensor, (n + 1) / 2))

    few.run(use)


def test_progress_goes_on_without_waiting(pair: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> bool:
        fabric = formed(gather, replica_id, n)
        tensor = torch.ones(100)
        exchange = fabric.all_reduce(tensor, Fold.SUM)
        gather("both have begun")
        fabric.progress()
        return exchange.ended and bool((tensor == 2).all())

    assert pair.run(use) == [True, True]


def test_a_thread_may_begin_while_another_one_waits(pair: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> list[float]:
        fabric = formed(gather, replica_id, n)
        first, second = torch.ones(10), torch.full((100_000,), 2.0)
        began = threading.Event()

        def begin() -> None:
            began.wait(DEADLINE)
            fabric.wait(fabric.all_reduce(second, Fold.SUM))

        other = threading.Thread(target=begin)
        other.start()
        exchange = fabric.all_reduce(first, Fold.SUM)
        began.set()
        fabric.wait(exchange)
        other.join()
        return [first.mean().item(), second.mean().item()]

    assert pair.run(use) == [[2.0, 4.0]] * 2


# Ends


@pytest.mark.parametrize("n", [2, 3])
def test_a_process_that_is_killed_is_named_to_who_waits_for_it(n: int) -> None:
    def use(gather: Any, replica_id: int, n: int) -> None:
        fabric = formed(gather, replica_id, n)
        gather("all have formed")
        if replica_id == n - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.wait(fabric.all_reduce(torch.ones(3, 4).view(-1), Fold.SUM))

    few = Few(n)
    try:
        few.start(use)
        for failed in few.results(range(n - 1))[:-1]:
            assert failed.args[0] == "PeerFailed"
            assert f"process {few.processes[-1].pid} of replica {n - 1} has ended" in failed.args[1]
    finally:
        few.close()


def test_a_replica_that_leaves_frees_the_others_and_is_named(few: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> None:
        fabric = formed(gather, replica_id, n)
        if replica_id == n - 1:
            fabric.close(PeerFailed("enough"))
        fabric.wait(fabric.all_reduce(torch.ones(100_000), Fold.SUM))

    few.start(use)
    *others, last = few.results()
    assert last.args[:2] == ("PeerFailed", "enough")
    for failed in others:
        assert failed.args[0] == "PeerFailed"
        assert f"a peer may have left (replica {few.n - 1} has left" in failed.args[1]


def test_who_waits_for_what_has_no_place_in_the_memory_yet_hears_that_a_replica_has_left() -> None:
    ours, theirs = side_by_side()
    *_, last = [ours.all_reduce(torch.ones(4), Fold.SUM) for _ in range(SLOTS + 2)]
    theirs.close(PeerFailed("enough"))
    with pytest.raises(PeerFailed, match="replica 1 has left"):
        ours.wait(last, 1.0)


def test_who_came_and_left_between_two_looks_has_come(monkeypatch) -> None:
    ours, theirs = side_by_side()
    exchange, looked = ours.barrier(), ours._flags.missing

    def missing() -> str | None:
        if not theirs.broken:
            theirs.barrier()
            theirs.close(PeerFailed("it needs no more of it"))
        return looked()

    monkeypatch.setattr(ours._flags, "missing", missing)
    ours.wait(exchange, 1.0)
    assert theirs.broken


def test_each_collective_that_is_refused_has_an_error_of_its_own() -> None:
    ours, _ = side_by_side()
    ours.abort(PeerFailed("replica 1 died"))
    errors = []
    for _ in range(2):
        with pytest.raises(PeerFailed, match="replica 1 died") as failed:
            ours.barrier()
        errors.append(failed.value)
    assert errors[0] is not errors[1]


def test_a_timeout_names_who_has_not_come_and_leaves_the_wait_open(few: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> str:
        fabric = formed(gather, replica_id, n)
        said = ""
        tensor = torch.full((5,), float(replica_id))
        if replica_id != n - 1:
            exchange = fabric.all_reduce(tensor, Fold.SUM)
            try:
                fabric.wait(exchange, 0.01)
            except ReplicaTimeout as error:
                said = str(error)
            gather("timed out")
        else:
            gather("timed out")
            exchange = fabric.all_reduce(tensor, Fold.SUM)
        fabric.wait(exchange)
        assert (tensor == n * (n - 1) / 2).all()
        return said

    *others, _ = few.run(use)
    for said in others:
        assert f"all_reduce of float32[5] did not end within 0.01 s: replica {few.n - 1} has not come" in said


def test_an_abort_from_another_thread_ends_a_wait(pair: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> list[str]:
        fabric = formed(gather, replica_id, n)
        said = []
        if replica_id == 0:
            exchange = fabric.all_reduce(torch.ones(5), Fold.SUM)
            threading.Timer(0.02, fabric.abort, (PeerFailed("replica 1 raised"),)).start()
            for attempt in (lambda: fabric.wait(exchange), lambda: fabric.all_reduce(torch.ones(5), Fold.SUM)):
                try:
                    attempt()
                except PeerFailed as error:
                    said.append(str(error))
        gather("aborted")
        return said

    assert pair.run(use) == [["replica 1 raised"] * 2, []]


def test_ctrl_c_ends_a_wait_which_may_be_taken_up_again(pair: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> float:
        fabric = formed(gather, replica_id, n)
        tensor = torch.ones(5)
        if replica_id == 0:
            exchange = fabric.all_reduce(tensor, Fold.SUM)
            try:
                # In here: on a busy machine it may come before the wait.
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
                fabric.wait(exchange)
                raise AssertionError("no interrupt came")
            except KeyboardInterrupt:
                gather("interrupted")
        else:
            gather("interrupted")
            exchange = fabric.all_reduce(tensor, Fold.SUM)
        fabric.wait(exchange)
        return tensor.sum().item()

    assert pair.run(use) == [10.0, 10.0]


def test_an_error_in_the_middle_frees_the_peers(pair: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> None:
        fabric = formed(gather, replica_id, n)
        if replica_id == 0:

            def fails(*_: Any) -> None:
                raise MemoryError("no room")

            fabric._fold = fails
        fabric.wait(fabric.all_reduce(fabric.allocate(100_000, torch.float32), Fold.SUM))

    pair.start(use)
    first, second = pair.results()
    assert first.args[:2] == ("MemoryError", "no room")
    assert second.args[0] == "PeerFailed"
    assert "replica 0 has left" in second.args[1]


class Told:
    """What is called when an exchange has ended, and whether another thread could use the fabric meanwhile."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.free: list[bool] = []

    def __call__(self) -> None:
        other = threading.Thread(target=self._fabric.progress, daemon=True)
        other.start()
        other.join(2)
        self.free.append(not other.is_alive())


def side_by_side(n: int = 2) -> list[Fabric]:
    """All replicas of a group, in this process."""
    segment = Segment.create(_Layout.of(n).end)
    segment.withdraw()
    return [Fabric(segment, i, n, DEADLINE) for i in range(n)]


def test_what_another_carries_is_counted_in_the_first_request_too() -> None:
    ours, _ = side_by_side()
    ours.mark()
    ours.announce("gather", "", "a gather")
    assert ours.begun() == {"gather": 1}
    ours.mark()
    assert not ours.begun()


def test_collectives_are_counted_from_the_mark_on() -> None:
    ours, theirs = side_by_side()
    tensor = torch.ones(4)
    for fabric in (theirs, ours):
        fabric.all_reduce(tensor, Fold.SUM)
    assert (ours.begun(), ours.issued_since) == ({"all_reduce": 1}, 1)
    ours.mark()
    assert (ours.begun(), ours.issued_since) == ({}, 0)
    ours.broadcast(tensor, 0)
    ours.all_reduce(tensor, Fold.SUM)
    ours.all_reduce(tensor, Fold.SUM)
    assert (ours.begun(), ours.issued_since, ours.issued) == ({"broadcast": 1, "all_reduce": 2}, 3, 4)


def test_who_waits_for_an_announcement_is_called_with_no_lock_held() -> None:
    ours, theirs = side_by_side()
    exchange, told = ours.announce("gather", "", "a gather"), Told(ours)
    ours.when_ended(exchange, told)
    theirs.announce("gather", "", "a gather")
    ours.announce("scatter", "", "a scatter")
    assert told.free == [True]


def test_who_waits_behind_a_small_sum_is_called_with_no_lock_held() -> None:
    ours, theirs = side_by_side()
    exchange, told = ours.announce("gather", "", "a gather"), Told(ours)
    ours.when_ended(exchange, told)
    theirs.announce("gather", "", "a gather")
    ours.all_reduce(torch.ones(4), Fold.SUM)
    assert told.free == [True]


def test_who_waits_behind_a_sum_that_is_cut_short_is_called_with_no_lock_held(monkeypatch) -> None:
    ours, theirs = side_by_side()
    total = ours.all_reduce(torch.ones(100_000), Fold.SUM)
    exchange, told = ours.announce("gather", "", "a gather"), Told(ours)
    ours.when_ended(exchange, told)
    theirs.all_reduce(torch.ones(100_000), Fold.SUM)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ours, "_fold_with_own", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.wait(total)
    assert told.free == [True]
    with pytest.raises(PeerFailed, match="cut short: KeyboardInterrupt"):
        exchange.outcome()


def test_an_abort_in_a_signal_s_handler_calls_who_waits_once_the_lock_is_free() -> None:
    ours, _ = side_by_side()
    exchange, told = ours.announce("gather", "", "a gather"), Told(ours)
    ours.when_ended(exchange, told)
    with ours._lock:
        # Where a signal comes while the main thread is in here.
        ours.abort(PeerFailed("ended by a handler"))
        assert told.free == []
    with pytest.raises(PeerFailed, match="ended by a handler"):
        ours.wait(exchange)
    assert told.free == [True]


def some_collective(dice: random.Random, n: int) -> tuple[list[Callable[[Fabric], Exchange]], list[Any], list[Any]]:
    """What each replica begins, the tensors that it writes to, and what they have to be then."""
    dtype = dice.choice([torch.float32, torch.float64, torch.int64, torch.uint8])
    slot, piece = SLOT_BYTES // dtype.itemsize, PIECE_BYTES // dtype.itemsize
    numel = dice.choice([0, 1, 63, slot, slot + 1, piece, piece + 1, 2 * piece + 77] if dice.random() < 0.15 else [5])
    parts = [torch.randint(0, 9, (numel,)).to(dtype) for _ in range(n)]
    before, root, total = [part.clone() for part in parts], dice.randrange(n), sum(parts).to(dtype)
    match dice.randrange(5):
        case 0:
            return [lambda f, p=p: f.all_reduce(p, Fold.SUM) for p in parts], parts, [total] * n
        case 1:
            expected = [total if i == root else own for i, own in enumerate(before)]
            return [lambda f, p=p: f.reduce(p, root, Fold.SUM) for p in parts], parts, expected
        case 2:
            return [lambda f, p=p: f.broadcast(p, root) for p in parts], parts, [before[root]] * n
        case 3:
            groups = [range(root + 1), range(root + 1, n)][: 1 + (root + 1 < n)]
            return [lambda f, p=p: f.all_reduce_by_groups(p, Fold.SUM, groups) for p in parts], parts, [total] * n
        case _:
            rows = [torch.empty(n, numel, dtype=dtype) for _ in range(n)]
            calls = [lambda f, r=r, p=p: f.all_gather(list(r), p) for r, p in zip(rows, parts, strict=True)]
            return calls, rows, [torch.stack(before)] * n


@pytest.mark.parametrize("seed", range(6))
def test_collectives_are_right_in_whatever_order_the_replicas_go_on(seed: int) -> None:
    dice, n = random.Random(seed), 2 + seed % 2
    fabrics = side_by_side(n)
    todo = [some_collective(dice, n) for _ in range(40)]
    begun: list[list[Exchange]] = [[] for _ in fabrics]
    ended: list[tuple[int, int]] = []

    def look(i: int, k: int) -> None:
        # At once: what the others do later may not change it.
        assert torch.equal(todo[k][1][i], todo[k][2][i]), f"collective {k} on replica {i}"
        ended.append((i, k))

    for _ in range(20_000):
        i = dice.randrange(n)
        for _ in range(dice.choice([0, 1, 1, 30])):
            if (k := len(begun[i])) < len(todo):
                begun[i].append(todo[k][0][i](fabrics[i]))
                fabrics[i].when_ended(begun[i][k], functools.partial(look, i, k))
        fabrics[i].progress()
        if len(ended) == n * len(todo):
            break
    assert sorted(ended) == [(i, k) for i in range(n) for k in range(len(todo))]


def test_a_future_of_what_was_ended_raises_its_error() -> None:
    ours, _ = side_by_side()
    tensor = torch.ones(4)
    future = SharedWork(ours, ours.all_reduce(tensor, Fold.SUM), [tensor], DEADLINE, None).get_future()
    ours.abort(PeerFailed("replica 1 died"))
    with pytest.raises(Exception, match="replica 1 died"):
        future.wait()
    assert not state.live


def test_a_future_comes_though_nobody_waits_who_could_carry_it_on() -> None:
    ours, theirs = side_by_side()
    tensor, there = torch.ones(4), threading.Event()
    future = SharedWork(ours, ours.all_reduce(tensor, Fold.SUM), [tensor], DEADLINE, None).get_future()
    future.add_done_callback(lambda _: there.set())
    theirs.all_reduce(torch.ones(4), Fold.SUM)
    try:
        assert there.wait(5)
    finally:
        ours.abort(PeerFailed("the test is over"))
    assert torch.equal(tensor, torch.full((4,), 2.0))


def test_a_future_that_is_asked_for_when_all_is_over_raises_the_error_too() -> None:
    ours, theirs = side_by_side()
    tensor = torch.ones(4)
    theirs.barrier()
    work = SharedWork(ours, ours.all_reduce(tensor, Fold.SUM), [tensor], DEADLINE, None)
    theirs.progress()
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(Exception, match="ran different collectives"):
        work.get_future().wait()
    ours.abort(PeerFailed("the test is over"))


def test_what_was_begun_first_is_laid_out_first_though_the_other_goes_on_between_two_looks(monkeypatch) -> None:
    ours, theirs = side_by_side()
    for i in range(40):
        # What lies in the memory from then on was of sums of this very form.
        before = [fabric.all_reduce(torch.full((4,), float(-i)), Fold.SUM) for fabric in (ours, theirs)]
        ours.progress()
        assert all(exchange.ended for exchange in before)
    looked = ours._flags.reached

    def reached(counter: int, value: int) -> bool:
        found = looked(counter, value)
        if len(ours._queue) > 1:
            theirs.progress()
        return found

    monkeypatch.setattr(ours._flags, "reached", reached)
    totals = {fabric: [torch.full((4,), float(i)) for i in range(40)] for fabric in (theirs, ours)}
    # More than have a place in the memory at once.
    exchanges = [fabric.all_reduce(total, Fold.SUM) for fabric, own in totals.items() for total in own]
    for _ in range(10):
        ours.progress()
        theirs.progress()
    assert [exchange.number for exchange in exchanges if not exchange.ended] == []
    for own in totals.values():
        assert [int(total[0]) for total in own] == [2 * i for i in range(40)]


def test_a_place_is_kept_until_this_replica_has_read_it_too(monkeypatch) -> None:
    ours, theirs = side_by_side()
    totals = {fabric: [torch.full((4,), float(i)) for i in range(SLOTS + 1)] for fabric in (ours, theirs)}
    for total in totals[ours]:
        ours.all_reduce(total, Fold.SUM)
    looked, waiting = ours._flags.reached, iter(totals[theirs])

    def reached(counter: int, value: int) -> bool:
        found = looked(counter, value)
        for total in waiting:
            # The other one ends its first: as it sees it, the last may have that one's place.
            theirs.all_reduce(total, Fold.SUM)
            break
        return found

    monkeypatch.setattr(ours._flags, "reached", reached)
    while ours.pending or theirs.pending:
        ours.progress()
        theirs.progress()
    for own in totals.values():
        assert [int(total[0]) for total in own] == [2 * i for i in range(SLOTS + 1)]


def test_a_mismatch_leaves_everybody_in_step(few: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> str:
        fabric = formed(gather, replica_id, n)
        tensors = [torch.ones(5), torch.ones(6 if replica_id else 5), torch.ones(100_000 + replica_id), torch.ones(7)]
        exchanges = [fabric.all_reduce(tensor, Fold.SUM) for tensor in tensors]
        said = ""
        for i, exchange in enumerate(exchanges):
            try:
                fabric.wait(exchange)
                assert (tensors[i] == n).all()
            except UsageError as error:
                said += f"{i}: {error}\n"
                assert (tensors[i] == 1).all(), "a part was written"
        return said

    for said in few.run(use):
        first, second, end = said.split("\n")
        assert first.startswith(
            "1: the replicas ran different collectives: replica 0: all_reduce (SUM) of float32[5], "
        )
        assert "replica 1: all_reduce (SUM) of float32[6]" in first
        assert (
            "replica 0: all_reduce (SUM) of float32[100000], replica 1: all_reduce (SUM) of float32[100001]" in second
        )
        assert not end


def test_a_child_that_a_replica_forks_does_not_take_part(pair: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> float:
        fabric = formed(gather, replica_id, n)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        tensor = torch.ones(100_000)
        fabric.wait(fabric.all_reduce(tensor, Fold.SUM))
        return tensor.mean().item()

    assert pair.run(use) == [2.0, 2.0]


def test_nothing_is_left_when_all_are_killed(doomed: Few) -> None:
    def use(gather: Any, replica_id: int, n: int) -> None:
        fabric = formed(gather, replica_id, n)
        kept = fabric.allocate(100_000, torch.float32)
        sys.modules["__main__"].__dict__["kept_by_a_test"] = fabric, kept

    before = set(Path("/dev/shm").iterdir())
    doomed.run(use)
    mapped = [m.path for p in doomed.processes for m in psutil.Process(p.pid).memory_maps(grouped=False)]
    assert sum("mirror_nb" in path for path in mapped) >= 4
    for process in doomed.processes:
        process.kill()
        process.join()
    assert set(Path("/dev/shm").iterdir()) == before
