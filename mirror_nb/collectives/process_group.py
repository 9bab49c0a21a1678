"""The default process group of a replica: torch's own gloo and NCCL behind waits that can always be ended.

Knows torch.distributed and its registries. Knows nothing of pools, cells, modules or gradients, and decides
neither when a group is formed nor why it is aborted: the replica's worker does.

    a cell, DDP, accelerate, FSDP          any thread
              │ dist.all_reduce(…)            │ abort(error)
              ▼                               ▼
      InterruptibleGroup ──▶ _Operation ◀── _State.live        what Python and C++ wait for is ours
              │      │            ▲
              │      │            │ done, in a thread of gloo
              │      └──▶ dist.ProcessGroup(gloo, NCCL) ─ what torch itself would have built
              ▼
      Fabric: tensors on the CPU through shared memory, where all members are on one machine; see through_memory

A process has one default group, as in torch.distributed, so the state here belongs to the process too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed import constants, device_mesh, distributed_c10d

from mirror_nb.collectives import segments, through_memory
from mirror_nb.collectives.fabric import Exchange, Fabric
from mirror_nb.collectives.fabric import fresh as _fresh
from mirror_nb.errors import PeerFailed, ReplicaError, ReplicaTimeout, UsageError
from mirror_nb.messages import Collectives, Rendezvous, Wait

__all__ = ["Rendezvous", "abort", "dissolve", "form", "install", "mark", "standing"]

BACKEND = "mirror_nb"

# Seconds beyond the group's timeout: gloo's own report of a timeout comes first, since it knows the peer.
_GRACE_SECONDS = 5.0

# C++ cannot be told to carry an exchange on, so whoever asks for a future waits here so long for peers that are about
# to come: DDP's buckets. After that a thread carries on.
_FUTURE_SECONDS = 0.05

# What ProcessGroup's methods are called in torch.distributed. Which of them exist differs by torch version.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}

# What two members do by themselves: the others need not know.
_BETWEEN_TWO = frozenset({"send", "recv"})

# Calls that neither wait nor communicate on the CPU: handed to the inner group as they are.
_PASSED_ON = (
    "_backend_id",
    "_enable_collectives_timing",
    "_end_coalescing",
    "_get_backend",
    "_get_sequence_number_for_group",
    "_has_hooks",
    "_register_on_completion_hook",
    "_set_sequence_number_for_group",
    "_start_coalescing",
    "_wait_for_pending_works",
)

# Whoever asks torch for one of these while our default group is there gets a group of ours.
_BACKENDS_SERVED = frozenset({"gloo", "nccl", "undefined", BACKEND})

# What torch gives a subgroup when no timeout was named: half an hour, ten minutes with NCCL.
_TORCH_TIMEOUTS = (constants.default_pg_timeout, constants.default_pg_nccl_timeout)

_WORLD_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class _Carriers:
    """What carries a group's tensors; travels through torch's `backend_options` to `_create`."""

    nccl: bool


def install() -> None:
    """Make torch.distributed in this process give our groups; call it once, before the first cell.

    Registers the backend "mirror_nb", wraps `torch.distributed.init_process_group`, and has every subgroup of
    our default group made by us too. A second call does nothing. Sets `GLOO_SOCKET_IFNAME` to the loopback
    interface, and NCCL's own error handling off (it would end the process), unless the variables are set.

    A process that may have collectives under way is to be ended by `os._exit`: gloo's threads do not survive
    the interpreter's own way out.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    if _state.torch_init is not None:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    _state.torch_init = distributed_c10d.init_process_group
    _replace("init_process_group", _wrap_init)
    _replace("batch_isend_irecv", _wrap_batch)
    # Without this private function (torch 2.11 and 2.13 have it) groups still form, as backend "mirror_nb".
    helper = getattr(distributed_c10d, "_new_process_group_helper", None)
    if helper is not None and "backend_options" in inspect.signature(helper).parameters:
        distributed_c10d._new_process_group_helper = _wrap_helper(helper)
        _state.makes_subgroups = True


def _replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(distributed_c10d, name)
    wrapped = wrap(original)
    # device_mesh imports functions by name, so it needs the wrapped one as well.
    for names in (vars(dist), vars(distributed_c10d), vars(device_mesh)):
        if names.get(name) is original:
            names[name] = wrapped


def form(rendezvous: Rendezvous, device: torch.device) -> None:
    """Make the default process group over all replicas, and allow collectives again after an `abort`.

    Every replica calls it with the same generation, which no other group had at this store; it returns when
    all have met. A group that is still there is dissolved first. The default group is the same object as
    before if its size is, so that a DistributedDataParallel made before an interrupt goes on to work.

    Args:
        device: this replica's device; NCCL is used when every replica has a GPU of its own, else gloo.

    Raises:
        ReplicaTimeout, PeerFailed: not all replicas came.
        Exception: the error given to `abort`, when that came meanwhile.
    """
    install()
    dissolve()
    _state.start(rendezvous, device)
    try:
        _init(_connect(rendezvous, user_group=0), rendezvous, timedelta(seconds=rendezvous.timeout_seconds))
    except BaseException:
        dissolve()
        raise


def dissolve() -> None:
    """Forget the default group and all subgroups at once, without waiting for anybody.

    Collectives that are still live fail. Groups that have work in flight are parked in a thread that ends
    with that work. After an `abort`, collectives go on to raise its error until the next `form`.
    """
    for group in _state.take_groups():
        group.retire(PeerFailed("the process group was dissolved while this collective ran"))
    _forget_world()


def abort(error: BaseException) -> None:
    """End every live collective of every group in this process with `error`, from any thread, at once.

    Later collectives, and the making of groups, raise copies of `error` until the next `form`.
    """
    operations, groups = _state.abort(error)
    for operation in operations:
        operation.fail(error)
    for group in groups:
        group.abort_shared(error)
    # After the CPU's waits are free: NCCL's abort may take its time.
    _abort_nccl([group.take_nccl() for group in groups])


def mark() -> None:
    """Count collectives from here on, for `standing`: a request begins."""
    for group in _state.groups:
        group.mark()


def standing() -> list[Collectives]:
    """Return what this process has begun in each group and what it waits for; from any thread, without a lock."""
    return [group.standing() for group in list(_state.groups)]


class _State:
    """What this process has of groups: the generation, who is live, and whether all is aborted."""

    def __init__(self) -> None:
        # Reentrant: a signal handler that calls abort() may run while the main thread holds it.
        self.lock = threading.RLock()
        self.live: set[_Operation | _SharedWork] = set()
        self.groups: set[InterruptibleGroup] = set()
        self.aborted: BaseException | None = None
        self.rendezvous: Rendezvous | None = None
        self.device = torch.device("cpu")
        self.user_groups = 0
        self.world: InterruptibleGroup | None = None
        self.client: _Client | None = None
        self.torch_init: Callable[..., None] | None = None
        self.makes_subgroups = False

    def start(self, rendezvous: Rendezvous, device: torch.device) -> None:
        with self.lock:
            self.rendezvous, self.device = rendezvous, device
            self.user_groups = 0
            self.aborted = None

    def check(self) -> None:
        if self.aborted is not None:
            raise _fresh(self.aborted)

    def begin(self, operation: _Operation | _SharedWork) -> None:
        with self.lock:
            self.check()
            operation.since = time.monotonic()
            self.live.add(operation)

    def end(self, operation: _Operation | _SharedWork) -> None:
        with self.lock:
            self.live.discard(operation)

    def abort(self, error: BaseException) -> tuple[list[_Operation | _SharedWork], list[InterruptibleGroup]]:
        with self.lock:
            # A copy: the one that was given may hold the frames it was raised in.
            self.aborted = _fresh(error)
            return list(self.live), list(self.groups)

    def take_groups(self) -> list[InterruptibleGroup]:
        with self.lock:
            groups = list(self.groups)
            self.groups.clear()
            return groups


@final
class _Client:
    """A connection to the controller's store, kept from one forming to the next.

    Kept, since torch asks the name service for a name of 127.0.0.1 at each connect: 5 s were seen where that
    loses a question. Not while a call waits on it, since it holds back every other request until then.
    """

    def __init__(self, address: tuple[str, int], store: dist.TCPStore) -> None:
        self.address = address
        self.store = store
        self.waiting = 0

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        with _state.lock:
            self.waiting += 1
        try:
            yield
        finally:
            with _state.lock:
                self.waiting -= 1


@final
class _Operation:
    """One collective under way, or one blocking call in a thread: what is waited for, and how it ended.

    It never refers to the inner group: gloo's callback holds it, and a group that is let go in a thread of
    its own ends the process.
    """

    __slots__ = (
        "arguments",
        "cuda",
        "done",
        "error",
        "futures",
        "label",
        "number",
        "owner",
        "seconds",
        "since",
        "value",
    )

    def __init__(self, label: str, arguments: tuple[Any, ...], seconds: float, owner: object = None) -> None:
        self.label = label
        self.arguments = arguments
        tensor = next(_tensors(arguments), None)
        self.cuda = tensor.device if tensor is not None and tensor.is_cuda else None
        self.seconds = seconds
        self.owner = id(owner)
        self.number = 0
        # Which one of its group this is; 0: not known.
        self.since = 0.0
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.futures: list[torch.futures.Future[Any]] = []

    def follow(self, work: dist.Work) -> None:
        """Finish when torch's own `work` does."""
        if self.cuda is not None:
            self.run(functools.partial(_wait_for_the_device, work, self.cuda))
            return
        try:
            future = work.get_future()
        except RuntimeError:
            # gloo's send and recv have no future.
            self.run(work.wait)
            return
        # The callback runs here if the work has ended already. An interrupt in that instant would be lost in
        # C++; the abort that follows an interrupt is not.
        future.add_done_callback(self._take)

    def run(self, call: Callable[[], Any]) -> None:
        """Run a blocking `call` in a thread of its own and finish with it."""
        threading.Thread(target=self._run, args=(call,), name=f"mirror_nb {self.label}", daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            value = call()
        except BaseException as error:
            self.fail(self._translate(error))
        else:
            self.finish(value)

    def _take(self, future: torch.futures.Future[Any]) -> None:
        self._run(future.value)

    def finish(self, value: Any) -> None:
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        self._end(None, error)

    def _end(self, value: Any, error: BaseException | None) -> None:
        with _state.lock:
            _state.live.discard(self)
            if self.done.is_set():
                return
            self.value, self.error = value, error
            self.arguments = ()
            futures, self.futures = self.futures, []
            self.done.set()
        for future in futures:
            future.set_result(None)

    def wait(self, seconds: float | None = None) -> Any:
        """The value; raises the error, or ReplicaTimeout after `seconds` (by default its own)."""
        # A lock's wait: it lets other threads run, and a signal's handler may raise out of it.
        if not self.done.wait(self.seconds + _GRACE_SECONDS if seconds is None else seconds):
            raise self._timeout(self.seconds if seconds is None else seconds)
        return self.outcome()

    def outcome(self) -> Any:
        if self.error is not None:
            raise _fresh(self.error)
        return self.value

    def make_future(self) -> torch.futures.Future[Any]:
        """A future that C++ may wait for; it carries a real error, unlike `Future.set_exception`."""
        devices: list[int | str | torch.device] | None = None if self.cuda is None else [self.cuda]
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        chained = future.then(lambda _: self.outcome())
        with _state.lock:
            ended = self.done.is_set()
            if not ended:
                self.futures.append(future)
        if ended:
            future.set_result(None)
        return chained

    def _timeout(self, seconds: float) -> ReplicaTimeout:
        return ReplicaTimeout(
            f"{self.name()} did not end within {seconds:g} s: a peer may have left, or it runs another "
            "collective; see that every replica runs the same collectives in the same order"
        )

    def _translate(self, error: BaseException) -> BaseException:
        if not isinstance(error, RuntimeError):
            return error
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            translated: Exception = self._timeout(self.seconds)
        else:
            translated = PeerFailed(
                f"{self.name()} failed: a peer may have left, or it runs another collective or "
                f"another shape ({str(error).strip()})"
            )
        translated.__cause__ = error
        return translated

    def name(self) -> str:
        """What it is, as a user would say it."""
        tensors = list(_tensors(self.arguments))
        if not tensors:
            return self.label
        first = f"{str(tensors[0].dtype).removeprefix('torch.')}{list(tensors[0].shape)}"
        return f"{self.label} of {first}" + (f" and {len(tensors) - 1} more" if len(tensors) > 1 else "")


@final
class _InterruptibleWork(dist._Work):
    """A handle on a collective, as torch.distributed's own, whose wait ends with a signal or an `abort`."""

    def __init__(self, operation: _Operation, work: dist.Work, meet: Callable[[float], None] | None) -> None:
        super().__init__()
        self._operation = operation
        self._work = work
        self._meet = meet
        # Waits until all replicas have come to this collective, or raises where they came to different ones.

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._meet is not None and not self._operation.done.is_set():
            self._meet(timeout.total_seconds() if timeout else self._operation.seconds)
        self._operation.wait(timeout.total_seconds() if timeout else None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._operation.done.is_set()

    def is_success(self) -> bool:
        return self._operation.done.is_set() and self._operation.error is None

    def exception(self) -> BaseException | None:
        return self._operation.error

    def result(self) -> Any:
        return self._operation.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._operation.make_future()

    def source_rank(self) -> int:
        return self._work._source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()


@final
class _SharedWork(dist._Work):
    """A handle on a collective through shared memory; whoever waits carries it on."""

    def __init__(
        self, fabric: Fabric, exchange: Exchange, result: list[torch.Tensor], seconds: float, owner: object
    ) -> None:
        super().__init__()
        self._fabric = fabric
        self._exchange = exchange
        self._result = result
        self._seconds = seconds
        self.owner = id(owner)
        self.since = 0.0

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    def wait(self, timeout: timedelta | None = None) -> bool:
        exchange = self._exchange
        if not exchange.ended:
            _state.begin(self)
            try:
                self._fabric.wait(exchange, timeout.total_seconds() if timeout else self._seconds)
            finally:
                _state.end(self)
        exchange.outcome()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._exchange.ended:
            self._fabric.progress()
        return self._exchange.ended

    def is_success(self) -> bool:
        return self._exchange.ended and self._exchange.error is None

    def exception(self) -> BaseException | None:
        return self._exchange.error

    def result(self) -> Any:
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        exchange, fabric = self._exchange, self._fabric
        future: torch.futures.Future[Any] = torch.futures.Future()
        with contextlib.suppress(ReplicaTimeout):
            if not exchange.ended:
                self.wait(timedelta(seconds=min(_FUTURE_SECONDS, self._seconds)))
        if exchange.ended and exchange.error is None:
            future.set_result(self._result)
            return future
        chained = future.then(lambda _: self._outcome())
        _state.begin(self)
        fabric.when_ended(exchange, lambda: self._tell(future))
        fabric.go_on_by_itself(at_once=True)
        return chained

    def _outcome(self) -> list[torch.Tensor]:
        self._exchange.outcome()
        return self._result

    def _tell(self, future: torch.futures.Future[Any]) -> None:
        _state.end(self)
        future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End it, and with it all of its fabric: the replicas are out of step."""
        self._fabric.abort(error)


@final
class InterruptibleGroup(dist.ProcessGroup):
    """torch's own group over gloo (and NCCL for CUDA tensors), with interruptible, abortable collectives.

    What shared memory does faster goes through that, where the members are on one machine.

    The methods of `_COLLECTIVES` are set below the class. C++ finds them too: DDP's reducer, functional
    collectives.
    """

    def __init__(self, opened: _Opened) -> None:
        # The stub knows only the constructor that takes a store, which cannot be derived from.
        super().__init__(opened.inner.rank(), opened.inner.size())  # type: ignore[call-arg]
        self._name = self._description = "undefined"
        self._inner: dist.ProcessGroup | None = None
        self._nccl: Any = None
        self._begun: Counter[str] = Counter()
        # Collectives that shared memory knows nothing of, by kind, since the group was formed.
        self._marked: Counter[str] = Counter()
        # The same at the last `mark`.
        self.shared: Fabric | None = None
        # What the members share, for collectives of others than torch's; None where they cannot, and why:
        self.unshared = ""
        self.adopt(opened)

    def may_adopt(self, opened: _Opened) -> bool:
        return (self.rank(), self.size()) == (opened.inner.rank(), opened.inner.size())

    def adopt(self, opened: _Opened) -> None:
        """Take a new inner group: from now on collectives run there."""
        self.retire(PeerFailed("the process group was formed anew while this collective ran"))
        self._inner = opened.inner
        self._nccl = opened.nccl
        self._begun, self._marked = Counter(), Counter()
        self.shared = opened.shared if isinstance(opened.shared, Fabric) else None
        self.unshared = "" if isinstance(opened.shared, Fabric) else opened.shared
        self._store = opened.store
        self._seconds = opened.timeout.total_seconds()
        self._devices: list[torch.device] = opened.inner._device_types
        self.backend_config = opened.backend_config
        with _state.lock:
            _state.groups.add(self)

    def issue(self, name: str, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        """Start a collective: through shared memory where that serves it, else by the inner group's method `name`."""
        self._living()
        if self.shared is not None:
            begun = through_memory.begin(self.shared, name, args, kwargs)
            if begun is not None:
                if not begun[0].ended and _may_be_left_alone(args, kwargs):
                    self.shared.go_on_by_itself(at_once=False)
                return _SharedWork(self.shared, *begun, self._seconds_of(args, kwargs), self)
        return self.carry(name, label, args, kwargs)

    def carry(self, name: str, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        """Start a collective by the inner group's method `name`, never through shared memory."""
        call = getattr(self._living(), name)
        if self._nccl is not None and _on_cuda((*args, *kwargs.values())):
            # NCCL's wait makes the stream wait, not this thread: its handle is given as it is.
            self._begun[label] += 1
            return call(*args, **kwargs)
        operation = _Operation(label, (*args, *kwargs.values()), self._seconds_of(args, kwargs), self)
        what = f"{operation.name()} through gloo"
        _state.begin(operation)
        try:
            work = call(*args, **kwargs)
            meet = self._announce(operation, what, args, kwargs) if label not in _BETWEEN_TWO else None
            operation.follow(work)
        except BaseException:
            _state.end(operation)
            raise
        return _InterruptibleWork(operation, work, meet)

    def _announce(
        self, operation: _Operation, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[float], None] | None:
        """Let the others know of a collective that gloo carries: one that waits for another would never see it."""
        shared = self.shared
        if shared is None:
            self._begun[operation.label] += 1
            operation.number = self._begun.total()
            return None
        exchange = shared.announce(operation.label, through_memory.alike(operation.label, args, kwargs), what)
        operation.number = exchange.number

        def ended() -> None:
            if exchange.error is not None:
                operation.fail(exchange.error)

        shared.when_ended(exchange, ended)
        if not exchange.ended and _may_be_left_alone(args, kwargs):
            shared.go_on_by_itself(at_once=False)
        return functools.partial(shared.wait, exchange)

    def mark(self) -> None:
        """Count from here on."""
        if self._begun:
            self._marked = self._begun.copy()
        if self.shared is not None:
            self.shared.mark()

    def standing(self) -> Collectives:
        """What was begun here and what is waited for."""
        shared, live = self.shared, [item for item in list(_state.live) if item.owner == id(self)]
        now = time.monotonic()
        begun, waits = self._begun - self._marked, []
        seen: tuple[str, ...] = ()
        if shared is not None:
            begun += shared.begun()
            seen = tuple(shared.seen())
            found = [(exchange, since) for exchange, since, _ in shared.waits()]
            if not found:
                # Futures that C++ waits for.
                found = [(work.exchange, work.since) for work in live if isinstance(work, _SharedWork)]
            waits = [
                Wait(exchange.number, exchange.label, now - since, self._ids(shared.lacking(exchange)))
                for exchange, since in found
                if not exchange.ended
            ]
        if not waits:
            waits = [
                Wait(item.number, item.name(), now - item.since, ())
                for item in live
                if isinstance(item, _Operation) and not item.done.is_set()
            ]
        issued = self._begun.total() if shared is None else shared.issued
        under_way = bool(live) or (shared is not None and shared.pending)
        members = self._ids(range(self.size()))
        return Collectives(self._name, members, issued, tuple(sorted(begun.items())), under_way, tuple(waits), seen)

    def _ids(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Replica ids of members of this group."""
        if self is _state.world:
            return tuple(ranks)
        try:
            ids = dist.get_process_group_ranks(self)
        except (KeyError, ValueError, RuntimeError):
            # It has been forgotten meanwhile.
            return ()
        return tuple(ids[rank] for rank in ranks)

    def inner_operation(self, operation: dist.P2POp) -> dist.P2POp:
        """The same send or receive in the inner group, which torch's registries do not know."""
        made = object.__new__(dist.P2POp)
        vars(made).update(vars(operation), group=self._living())
        return made

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        inner: Any = self._living()
        limit = timeout if timeout else timedelta(seconds=self._seconds)
        # Replica 0 waits for its peers one after the other.
        operation = _Operation("monitored_barrier", (), limit.total_seconds() * self.size(), self)
        _state.begin(operation)
        operation.run(lambda: inner.monitored_barrier(limit, wait_all_ranks=wait_all_ranks))
        operation.wait()

    def retire(self, error: BaseException) -> None:
        """End what is live and let the inner group go; this one is of no use until it adopts another."""
        with _state.lock:
            _state.groups.discard(self)
            # A list from the start: a second reference in this frame would outlive the burying thread's, and
            # the destructor would wait here.
            inner, self._inner = [self._inner], None
            nccl, self._nccl = self._nccl, None
            shared, self.shared = self.shared, None
            operations = [operation for operation in _state.live if operation.owner == id(self)]
        for operation in operations:
            operation.fail(error)
        if shared is not None:
            shared.close(error)
        _bury(inner, nccl)

    def abort_shared(self, error: BaseException) -> None:
        """End what goes through shared memory with `error`, and refuse more of it."""
        shared = self.shared
        if shared is not None:
            shared.abort(error)

    def take_nccl(self) -> Any:
        """This group's NCCL, if it has one, for an abort: it is of no use afterwards."""
        nccl, self._nccl = self._nccl, None
        return nccl

    def shutdown(self) -> None:
        """What torch.distributed.destroy_process_group calls; never waits."""
        self.retire(PeerFailed("the process group was destroyed while this collective ran"))

    def abort(self) -> None:
        """What torch.distributed's own abort calls: ends this group's collectives, and the group."""
        _abort_nccl([self.take_nccl()])
        self.retire(PeerFailed("the process group was aborted while this collective ran"))

    @property
    def carrier(self) -> str:
        """What carries this group's tensors from a replica's device: "gloo" or "nccl"."""
        return "gloo" if self._nccl is None else "nccl"

    def getBackendName(self) -> str:  # noqa: N802
        # Not the carrier: DDP's logger would look for a backend of that name in C++, where there is none.
        return BACKEND

    # torch keeps names with the backends that are registered in C++, of which this group has none.
    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def get_group_store(self) -> dist.Store:
        return self._store

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Let what begins meanwhile wait `seconds` at most, unless its caller names a time."""
        before, self._seconds = self._seconds, min(seconds, self._seconds)
        try:
            yield
        finally:
            self._seconds = before

    def set_timeout(self, timeout: timedelta) -> None:
        self._living().set_timeout(timeout)
        self._seconds = timeout.total_seconds()

    @property
    def _device_types(self) -> list[torch.device]:
        return self._devices

    def _living(self) -> dist.ProcessGroup:
        _state.check()
        inner = self._inner
        if inner is None:
            raise UsageError(
                f"process group {self._name!r} is no longer there: it was destroyed, or the replicas formed "
                "a new default group since; make it again, and whatever holds it"
            )
        return inner

    def _seconds_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        for option in (*args, *kwargs.values()):
            timeout = getattr(option, "timeout", None)
            if isinstance(timeout, timedelta) and timeout > timedelta(0):
                return timeout.total_seconds()
        return self._seconds


def _collective(name: str, label: str) -> Callable[..., dist.Work]:
    def collective(self: InterruptibleGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return self.issue(name, label, args, kwargs)

    return collective


def _passed_on(name: str) -> Callable[..., Any]:
    def passed_on(self: InterruptibleGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._living(), name)(*args, **kwargs)

    return passed_on


for _name, _label in _COLLECTIVES.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(InterruptibleGroup, _name, _collective(_name, _label))
for _name in _PASSED_ON:
    if hasattr(dist.ProcessGroup, _name):
        setattr(InterruptibleGroup, _name, _passed_on(_name))


@dataclass(frozen=True, slots=True)
class _Opened:
    """A connected inner group, ready for a group of ours to adopt."""

    inner: dist.ProcessGroup
    store: dist.Store
    timeout: timedelta
    nccl: Any
    # ProcessGroupNCCL, which not every build of torch has; None without it
    shared: Fabric | str
    # Or why there is none.

    @property
    def backend_config(self) -> str:
        return f"cpu:gloo,cuda:{'gloo' if self.nccl is None else 'nccl'}"


def _create(options: Any, carriers: object) -> InterruptibleGroup:
    """What torch calls for backend "mirror_nb"; `options` is its `_DistributedBackendOptions`."""
    wants_nccl = carriers.nccl if isinstance(carriers, _Carriers) else True
    device = _state.device if wants_nccl else torch.device("cpu")
    client = _state.client

    def open_group() -> _Opened:
        with client.waits() if client is not None else contextlib.nullcontext():
            return _open(options, device)

    opened = _aside(
        f"forming a process group of {options.group_size} replicas", open_group, options.timeout.total_seconds()
    )
    if dist.is_initialized():
        return InterruptibleGroup(opened)
    previous = _state.world
    if previous is not None and previous.may_adopt(opened):
        previous.adopt(opened)
        return previous
    _state.world = InterruptibleGroup(opened)
    return _state.world


def _open(options: Any, device: torch.device) -> _Opened:
    """Connect gloo, and NCCL where every member has a GPU of its own. Blocks until all members are there."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    inner = dist.ProcessGroup(options.store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", options.store), rank, size, timeout)
    nccl = None
    if _each_has_a_gpu(options.store, rank, size, device):
        nccl = _open_nccl(dist.PrefixStore("nccl/", options.store), rank, size, timeout, device)
    inner._set_default_backend(kinds.GLOO if nccl is None else kinds.NCCL)
    inner._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if nccl is None:
        inner._register_backend(torch.device("cuda"), kinds.GLOO, gloo)
    else:
        inner._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    inner._set_group_name(options.group_id)
    shared = _open_shared(dist.PrefixStore("memory/", options.store), rank, size, timeout.total_seconds())
    return _Opened(inner, options.store, timeout, nccl, shared)


def _open_shared(store: dist.Store, rank: int, size: int, seconds: float) -> Fabric | str:
    """What the members share, or why they do not: they are on several machines, or there is no such memory."""
    rounds = 0

    def gather(value: Any) -> list[Any]:
        nonlocal rounds
        rounds += 1
        store.set(f"{rounds}/{rank}", segments.written(value))
        # The store has no key, so nothing of it is unpickled.
        return [segments.read(store.get(f"{rounds}/{peer}").decode()) for peer in range(size)]

    if size == 1:
        return "there is one replica"
    try:
        return Fabric.form(gather, rank, size, seconds)
    except ReplicaError as error:
        return str(error)


def _open_nccl(store: dist.Store, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(store, rank, size, options)
    nccl._set_sequence_number_for_group()
    # The communicator is made here, in a thread, and not by the first collective: the making waits for peers.
    if hasattr(nccl, "eager_connect_single_device"):
        with torch.cuda.device(device):
            nccl.eager_connect_single_device(device)
    return nccl


def _abort_nccl(communicators: list[Any]) -> None:
    """End what NCCL has under way, also of communicators that are broken already; None is passed over."""
    found = [nccl for nccl in communicators if nccl is not None]
    if not found:
        return
    # The caller is the control thread: what NCCL says of a broken communicator must not end it.
    with contextlib.suppress(RuntimeError):
        # As one group, as torch does it: aborts one after the other may wait for each other.
        found[0]._group_start()
        try:
            for nccl in found:
                nccl.abort()
        finally:
            found[0]._group_end()


def _each_has_a_gpu(store: dist.Store, rank: int, size: int, device: torch.device) -> bool:
    """Whether every member has a GPU and no two the same; all members must ask, and all get one answer."""
    store.set(f"device/{rank}", _gpu_name(device))
    if device.type != "cuda":
        return False
    names = {store.get(f"device/{peer}") for peer in range(size)}
    return dist.is_nccl_available() and len(names) == size and b"" not in names


def _gpu_name(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def _wait_for_the_device(work: dist.Work, device: torch.device) -> Any:
    """The result of a collective on CUDA tensors that gloo carried, once it is back on the device."""
    work.wait()
    torch.cuda.synchronize(device)
    return work.result()


def _connect(rendezvous: Rendezvous, user_group: int) -> dist.Store:
    """The controller's store, below a prefix that no other group has."""
    host, port = rendezvous.host, rendezvous.port
    timeout = timedelta(seconds=rendezvous.timeout_seconds)
    client = _state.client
    if client is None or client.waiting or client.address != (host, port):
        store = _aside(
            f"connecting to the store at {host}:{port}",
            lambda: dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False),
            rendezvous.timeout_seconds,
        )
        client = _state.client = _Client((host, port), store)
    client.store.set_timeout(timeout)
    return dist.PrefixStore(f"mirror_nb/{rendezvous.generation}/{user_group}", client.store)


def _init(store: dist.Store, rendezvous: Rendezvous, timeout: timedelta) -> None:
    hook = sys.excepthook
    try:
        _original_init()(
            BACKEND,
            store=store,
            rank=rendezvous.replica_id,
            world_size=rendezvous.num_replicas,
            timeout=timeout,
        )
    finally:
        # torch chains a hook of its own at each init, and never takes it away.
        sys.excepthook = hook
    group = dist.group.WORLD
    if isinstance(group, InterruptibleGroup):
        _say_what_carries(group)


def _original_init() -> Callable[..., None]:
    if _state.torch_init is None:
        raise UsageError("the process group is not installed in this process: call install() first")
    return _state.torch_init


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        rendezvous = _state.rendezvous
        if rendezvous is None or dist.is_initialized() or not _means_all_replicas(given, rendezvous):
            original(*args, **kwargs)
            return
        _state.check()
        # Counted, so that replicas that run the same cell meet under the same prefix.
        _state.user_groups += 1
        store = _connect(rendezvous, _state.user_groups)
        _init(store, rendezvous, given.get("timeout") or timedelta(seconds=rendezvous.timeout_seconds))

    return init_process_group


def _means_all_replicas(given: dict[str, Any], rendezvous: Rendezvous) -> bool:
    """Whether a user's own init asks for what torchrun gives: every replica, found by the environment."""
    return (
        given.get("store") is None
        and not given.get("_ranks")
        and given.get("init_method") in (None, "env://")
        and given.get("world_size", -1) in (-1, rendezvous.num_replicas)
        and given.get("rank", -1) in (-1, rendezvous.replica_id)
        and _served(given.get("backend"))
    )


def _served(backend: object) -> bool:
    """Whether `backend` ("nccl", "cpu:gloo,cuda:nccl", None, …) names only what our groups are made of."""
    if not backend:
        return True
    return {part.split(":")[-1] for part in str(backend).lower().split(",")} <= _BACKENDS_SERVED


def _wrap_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch gives NCCL a batch as one only in a group of exactly its own class; one by one they may deadlock."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> Any:
        group = p2p_op_list[0].group if p2p_op_list else None
        if isinstance(group, InterruptibleGroup) and group.carrier == "nccl" and p2p_op_list[0].tensor.is_cuda:
            p2p_op_list = [group.inner_operation(operation) for operation in p2p_op_list]
        return original(p2p_op_list)

    return batch_isend_irecv


def _wrap_helper(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's one place where groups are made; DeviceMesh, new_group and new_subgroups all come here."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        subgroup = isinstance(dist.group.WORLD, InterruptibleGroup)
        if not (subgroup and _served(given["backend"])):
            return original(*args, **kwargs)
        wanted = str(given["backend"]).lower()
        # torch gives subgroups a time of its own when none was named, whatever the default group has.
        if given.get("timeout") in _TORCH_TIMEOUTS and _state.rendezvous is not None:
            given["timeout"] = timedelta(seconds=_state.rendezvous.timeout_seconds)
        given.update(backend=dist.Backend(BACKEND), backend_options=_Carriers(nccl=wanted != "gloo"), device_id=None)
        made = original(*bound.args, **bound.kwargs)
        if isinstance(made[0], InterruptibleGroup):
            _say_what_carries(made[0])
        return made

    return new_process_group


def _say_what_carries(group: InterruptibleGroup) -> None:
    """Have dist.get_backend() say "gloo" or "nccl": DDP, FSDP, DeviceMesh and users' code decide by it.

    Only where subgroups are made by us: torch makes them of the backend that bears the default group's name.
    """
    world: Any = getattr(distributed_c10d, "_world", None)
    if not _state.makes_subgroups or group not in getattr(world, "pg_map", {}):
        return
    _, store = world.pg_map[group]
    world.pg_map[group] = (dist.Backend(group.carrier), store)
    if group in getattr(world, "pg_backend_config", {}):
        world.pg_backend_config[group] = group.backend_config


def _forget_world() -> None:
    """What destroy_process_group does to torch's registries, also after an init that failed half-way."""
    world: Any = getattr(distributed_c10d, "_world", None)
    strangers: list[Any] = []
    if world is not None:
        strangers += [group for group in world.pg_map if not isinstance(group, InterruptibleGroup)]
        for name in _WORLD_TABLES:
            getattr(world, name, {}).clear()
        world.group_count = 0
    if hasattr(distributed_c10d, "_update_default_pg"):
        distributed_c10d._update_default_pg(None)
    if hasattr(distributed_c10d, "_unregister_all_process_groups"):
        distributed_c10d._unregister_all_process_groups()
    _bury(strangers, None)


def _bury(inner: list[Any], nccl: Any) -> None:
    """Let inner groups go in a thread of its own, where their destructors may wait for work in flight."""
    if not any(inner):
        return

    def let_go() -> None:
        if nccl is not None:
            with contextlib.suppress(RuntimeError):
                nccl.shutdown()
        inner.clear()

    threading.Thread(target=let_go, name="mirror_nb lets a process group go", daemon=True).start()


def _aside(label: str, call: Callable[[], _Value], seconds: float) -> _Value:
    """The result of a blocking call, waited for such that a signal or an `abort` ends the wait."""
    operation = _Operation(label, (), seconds)
    _state.begin(operation)
    operation.run(call)
    value: _Value = operation.wait()
    return value


def _may_be_left_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the caller of this collective may do something else before it waits, for another replica even."""
    return all(getattr(option, "asyncOp", True) for option in (*args, *kwargs.values()))


def _on_cuda(arguments: tuple[Any, ...]) -> bool:
    """Whether torch sends a collective with these arguments to the backend of CUDA."""
    tensor = next(_tensors(arguments), None)
    if tensor is not None:
        return tensor.is_cuda
    # A barrier has no tensor, but options that name a device.
    return any(getattr(getattr(option, "device", None), "type", None) == "cuda" for option in arguments)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


_state = _State()
