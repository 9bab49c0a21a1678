"""A group of torch.distributed whose collectives can always be ended, around the one that torch would have made.

Knows what carries a collective: shared memory, gloo or NCCL. Knows not how a group comes about.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from mirror_nb.collectives import through_memory
from mirror_nb.collectives.exchange import Exchange
from mirror_nb.collectives.fabric import Fabric
from mirror_nb.collectives.waiting import Operation, as_here, state, tensors_in
from mirror_nb.collectives.works import InterruptibleWork, SharedWork
from mirror_nb.errors import PeerFailed, UsageError
from mirror_nb.messages import Collectives, Wait

BACKEND = "mirror_nb"

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
    "gather_into_tensor": "gather_into_tensor",
    "gather_single": "gather_into_tensor",
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

PATIENCE = 0.5
# Seconds: a GPU may be some steps behind, and a sum of theirs that is cut short goes into the parameters.
_LOOK_SECONDS = 0.002
# Between two looks whether it has done them.

_TENSORS = (list, tuple, torch.Tensor)
# Arguments that are no options: to ask them for one's attributes takes half a microsecond.
_NO_TIME = timedelta(0)

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


@dataclass(frozen=True, slots=True)
class Opened:
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


@final
class InterruptibleGroup(dist.ProcessGroup):
    """torch's own group over gloo (and NCCL for CUDA tensors), with interruptible, abortable collectives.

    What shared memory does faster goes through that, where the members are on one machine.

    The methods of `_COLLECTIVES` are set below the class. C++ finds them too: DDP's reducer, functional
    collectives.
    """

    def __init__(self, opened: Opened) -> None:
        # The stub knows only the constructor that takes a store, which cannot be derived from.
        super().__init__(opened.inner.rank(), opened.inner.size())  # type: ignore[call-arg]
        self._name = self._description = "undefined"
        self._inner: dist.ProcessGroup | None = None
        self._nccl: Any = None
        self._begun: Counter[str] = Counter()
        # Collectives that shared memory knows nothing of, by kind, since the group was formed.
        self._marked: Counter[str] = Counter()
        # The same at the last `mark`.
        self._between: Counter[tuple[str, int | None]] = Counter()
        # Sends and receives since it was formed, by the rank of the other one; None: any.
        self._order = threading.RLock()
        self._announced: deque[tuple[Exchange, Operation, Callable[[], None]]] = deque()
        # What gloo is to begin, in the order of the exchanges by which the replicas meet for it.
        self.shared: Fabric | None = None
        # What the members share, for collectives of others than torch's; None where they cannot.
        self.unshared = ""
        # Why they cannot; empty: they can.
        self.adopt(opened)

    def may_adopt(self, opened: Opened) -> bool:
        return (self.rank(), self.size()) == (opened.inner.rank(), opened.inner.size())

    def adopt(self, opened: Opened) -> None:
        """Take a new inner group, having let go of an earlier one: from now on collectives run there."""
        self._inner = opened.inner
        self._nccl = opened.nccl
        self._begun, self._marked, self._between = Counter(), Counter(), Counter()
        self.shared = opened.shared if isinstance(opened.shared, Fabric) else None
        self.unshared = "" if isinstance(opened.shared, Fabric) else opened.shared
        self._store = opened.store
        self._seconds = opened.timeout.total_seconds()
        self._devices: list[torch.device] = opened.inner._device_types
        self.backend_config = opened.backend_config
        self.carrier = "gloo" if opened.nccl is None else "nccl"
        # What carries tensors from a replica's device. After an abort, too: who took another way would lay out memory
        # for it, and then hear of the abort.
        with state.lock:
            state.groups.add(self)

    def issue(self, name: str, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        """Start a collective: through shared memory where that serves it, else by the inner group's method `name`."""
        self._living()
        if self.shared is not None:
            begun = through_memory.begin(self.shared, name, args, kwargs)
            if begun is not None:
                if not begun[0].ended and _may_be_left_alone(args, kwargs):
                    self.shared.go_on_by_itself(at_once=False)
                return SharedWork(self.shared, *begun, self._seconds_of(args, kwargs), self)
        return self.carry(name, label, args, kwargs)

    def carry(self, name: str, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        """Start a collective by the inner group's method `name`, never through shared memory."""
        if self._nccl is not None and _on_cuda((*args, *kwargs.values())):
            # NCCL's wait makes the stream wait, not this thread: its handle is given as it is.
            if label in _BETWEEN_TWO:
                self._between[label, _partner(name, args, kwargs)] += 1
            else:
                self._begun[label] += 1
            return self._begin(name, args, kwargs)
        operation = Operation(label, (*args, *kwargs.values()), self._seconds_of(args, kwargs), self)
        if gap := through_memory.gap(label, args, kwargs, self.size()):
            raise UsageError(f"{operation.name()}: {gap}")
        begin = functools.partial(self._begin, name, through_memory.as_the_output(label, args), kwargs)
        state.begin(operation)
        try:
            if label not in _BETWEEN_TWO and self.shared is not None:
                return InterruptibleWork(operation, None, self._announce(self.shared, operation, begin, args, kwargs))
            if label in _BETWEEN_TWO:
                partner = _partner(name, args, kwargs)
                self._between[label, partner] += 1
                if partner is not None:
                    operation.partner, operation.number = partner, self._between[label, partner]
            else:
                self._begun[label] += 1
                operation.number = self._begun.total()
            work = begin()
            operation.follow(work)
        except BaseException:
            state.end(operation)
            raise
        return InterruptibleWork(operation, work, None)

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        # Asked for when it begins: what waits must not hold the inner group.
        begun: dist.Work = getattr(self._living(), name)(*args, **kwargs)
        return begun

    def _announce(
        self,
        shared: Fabric,
        operation: Operation,
        begin: Callable[[], dist.Work],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[[float], None]:
        """Have gloo begin a collective once all replicas have come to it; returns what waits for that.

        Not before: of sizes that differ gloo ends the process, and who waits in another collective would never see it.
        """
        label = operation.label
        parts = through_memory.parts(label, args, kwargs, self.size())
        what = through_memory.in_words(label, args, kwargs, operation.name(), parts)
        begin_as_here = _behind_here(lambda: operation.follow(begin()), operation.cuda)
        # gloo tells collectives apart by their order.
        with self._order:
            exchange = shared.announce(label, through_memory.alike(label, args, kwargs), what, parts)
            operation.number = exchange.number
            self._announced.append((exchange, operation, begin_as_here))
        shared.when_ended(exchange, self._begin_announced)
        if not exchange.ended and _may_be_left_alone(args, kwargs):
            shared.go_on_by_itself(at_once=True)
        return functools.partial(shared.wait, exchange)

    def _begin_announced(self) -> None:
        """Have gloo begin, in order, what all replicas have come to; any thread."""
        with self._order:
            while self._announced and self._announced[0][0].ended:
                exchange, operation, begin = self._announced[0]
                try:
                    self._announced.popleft()
                    if exchange.error is not None:
                        operation.fail(exchange.error)
                    else:
                        begin()
                except BaseException as error:
                    # For whoever waits for it.
                    operation.fail(error)
                    if not isinstance(error, Exception) and self.shared is not None:
                        # An interrupt: the others begin it, so that from here on gloo would take one for another.
                        self.shared.close(PeerFailed(f"{operation.label} was cut short: {type(error).__name__}"))

    def mark(self) -> None:
        """Count from here on."""
        if self._begun:
            self._marked = self._begun.copy()
        if self.shared is not None:
            self.shared.mark()

    @property
    def begun_since(self) -> int:
        """How many collectives were begun here since the last `mark`, by NCCL too; -1: nobody has counted."""
        shared = self.shared
        return -1 if shared is None else shared.issued_since + self._begun.total() - self._marked.total()

    def standing(self) -> Collectives:
        """What was begun here and what is waited for."""
        shared, live = self.shared, [item for item in list(state.live) if item.owner == id(self)]
        now = time.monotonic()
        begun, waits = self._begun - self._marked, []
        seen: tuple[str, ...] = ()
        if shared is not None:
            begun += shared.begun()
            seen = tuple(shared.seen())
            found = shared.waits()
            if not found:
                # Futures that C++ waits for.
                found = [(work.exchange, work.since) for work in live if isinstance(work, SharedWork)]
            waits = [
                Wait(exchange.number, exchange.label, now - since, self._replicas(shared.lacking(exchange)))
                for exchange, since in found
                if not exchange.ended
            ]
        if not waits:
            waits = [
                Wait(item.number, item.name(), now - item.since, (), self._replica(item.partner))
                for item in live
                if isinstance(item, Operation)
                # What was only begun may be for the next request.
                and (item.awaited or item.label not in _BETWEEN_TWO)
            ]
        issued = self._begun.total() if shared is None else shared.issued
        under_way = bool(live) or (shared is not None and shared.pending)
        between = tuple((label, self._replica(rank), count) for (label, rank), count in list(self._between.items()))
        return Collectives(
            self._name,
            self._replicas(range(self.size())),
            issued,
            tuple(sorted(begun.items())),
            under_way,
            tuple(waits),
            seen,
            between,
        )

    def _replica(self, rank: int | None) -> int | None:
        return None if rank is None else next(iter(self._replicas([rank])), None)

    def _replicas(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Replica ids of members of this group."""
        if self is state.world:
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

    def beside(self, name: str) -> tuple[dist.ProcessGroup, dist.Store]:
        """Return a group of torch's own class over the same members, that reduces nothing, and its store.

        C++ asks a group for its store, and one that Python derives from has none. `name`: the same on all members, of
        this one alone.
        """
        store = dist.PrefixStore(f"{name}/", self._store)
        return dist.ProcessGroup(store, self.rank(), self.size()), store

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        inner: Any = self._living()
        limit = timeout if timeout else timedelta(seconds=self._seconds)
        if self.shared is not None:
            # It counts among gloo's collectives: what was begun before, which another thread may begin just now, has
            # to come before it on every replica.
            for exchange, *_ in list(self._announced)[-1:]:
                self.shared.wait(exchange, limit.total_seconds())
        # Replica 0 waits for its peers one after the other.
        operation = Operation("monitored_barrier", (), limit.total_seconds() * self.size(), self)
        state.begin(operation)
        operation.run(lambda: inner.monitored_barrier(limit, wait_all_ranks=wait_all_ranks))
        operation.wait()

    def retire(self, error: BaseException) -> None:
        """End what is live and let the inner group go; this one is of no use until it adopts another."""
        with state.lock:
            state.groups.discard(self)
            # A list from the start: a second reference in this frame would outlive the burying thread's, and
            # the destructor would wait here.
            inner, self._inner = [self._inner], None
            nccl, self._nccl = self._nccl, None
            shared, self.shared = self.shared, None
            operations = [operation for operation in state.live if operation.owner == id(self)]
        for operation in operations:
            operation.fail(error)
        if shared is not None:
            shared.close(error)
        bury(inner, nccl)

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
        abort_nccl([self.take_nccl()])
        self.retire(PeerFailed("the process group was aborted while this collective ran"))

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
        state.check()
        inner = self._inner
        if inner is None:
            raise UsageError(
                f"process group {self._name!r} is no longer there: it was destroyed, or the replicas formed "
                "a new default group since; make it again, and whatever holds it"
            )
        return inner

    def _seconds_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        for option in (*args, *kwargs.values()):
            timeout = None if isinstance(option, _TENSORS) else getattr(option, "timeout", None)
            if isinstance(timeout, timedelta) and timeout > _NO_TIME:
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


def abort_nccl(communicators: list[Any], device: torch.device | None = None) -> None:
    """End what NCCL has under way, also of communicators that are broken already; None is passed over.

    `device`: the GPU that has PATIENCE seconds to come to the end by itself; None: at once.
    """
    found = [nccl for nccl in communicators if nccl is not None]
    if not found:
        return
    if device is not None:
        _let_finish(device)
    # What NCCL says of a broken communicator must end nobody's thread.
    with contextlib.suppress(RuntimeError, AttributeError):
        # As one group, as torch does it: aborts one after the other may wait for each other.
        found[0]._group_start()
        try:
            for nccl in found:
                nccl.abort()
        finally:
            found[0]._group_end()


def _let_finish(device: torch.device) -> None:
    """Wait until a GPU, which is behind, has done what it was given; not for what its peers do not come to."""
    deadline = time.monotonic() + PATIENCE
    # One that is lost, or records a graph, answers no questions.
    with contextlib.suppress(RuntimeError):
        while not torch.cuda.current_stream(device).query() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)


def bury(inner: list[Any], nccl: Any) -> None:
    """Let inner groups go in a thread of its own, where their destructors may wait for work in flight."""
    if not any(inner):
        return

    def let_go() -> None:
        if nccl is not None:
            with contextlib.suppress(RuntimeError):
                nccl.shutdown()
        inner.clear()

    threading.Thread(target=let_go, name="mirror_nb lets a process group go", daemon=True).start()


def _behind_here(begin: Callable[[], None], cuda: torch.device | None) -> Callable[[], None]:
    """Have `begin` run as it would in this thread, behind what its stream has by now."""
    stream = None if cuda is None else torch.cuda.current_stream(cuda)

    def run() -> None:
        # Behind which gloo reads the tensor.
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            begin()

    return as_here(run)


def _partner(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the rank that a send or a receive names; None: any."""
    if name == "recv_anysource":
        return None
    named = args[1] if len(args) > 1 else kwargs.get("dstRank", kwargs.get("srcRank"))
    return None if named is None else int(named)


def _may_be_left_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the caller of this collective may do something else before it waits, for another replica even."""
    for option in (*args, *kwargs.values()):
        if not isinstance(option, _TENSORS) and not getattr(option, "asyncOp", True):
            return False
    return True


def _on_cuda(arguments: tuple[Any, ...]) -> bool:
    """Whether torch sends a collective with these arguments to the backend of CUDA."""
    tensor = next(tensors_in(arguments), None)
    if tensor is not None:
        return tensor.is_cuda
    # A barrier has no tensor, but options that name a device.
    return any(getattr(getattr(option, "device", None), "type", None) == "cuda" for option in arguments)
