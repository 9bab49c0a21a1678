"""What a cross-device op is: the algorithm that makes tensors of all replicas one.

Knows torch.distributed's process groups and shared memory by their methods. Knows no strategy, no gradients and no
ring: timings go to a `record` that is handed in.

An op is made in the controller, where it costs nothing and knows only its arguments; it is pickled, and bound in each
replica. To write one, derive from `CrossDeviceOps` and write `start` and `unfit_for`; one that uses others returns
them by `parts`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import reprlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from mirror_nb.collectives.fabric import Fabric
from mirror_nb.collectives.gpu_clock import Anchor, GpuClock, moment
from mirror_nb.collectives.handles import (
    BetweenEvents,
    Expanding,
    Finished,
    Handle,
    Reduction,
    Timing,
    WorkHandle,
    named,
    wait_for_work,
)
from mirror_nb.devices import Device
from mirror_nb.errors import ReplicaError, ReplicaTimeout, UsageError
from mirror_nb.values import ReduceOp, widened

BYTES_PER_PACK = 25 * 2**20
# Of a bucket of gradients, where nothing else is said.


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One replica among those that reduce together."""

    replica_id: int
    num_replicas: int
    device: torch.device
    group: dist.ProcessGroup
    # Over these replicas, in the order of their ids; the default group as a rule.
    record: Callable[[Timing], None] | None = None
    timeout_seconds: float | None = None
    # How long a wait on the CPU may last; None: as long as the group allows.

    @property
    def limit(self) -> float | None:
        """How long this thread may wait for a collective, seconds; None where it does not wait: on a GPU."""
        return None if self.timeout_seconds is None or self.device.type != "cpu" else self.timeout_seconds

    @property
    def has_nccl(self) -> bool:
        """Whether NCCL carries what is on these replicas' GPUs: it does not where two of them share one."""
        return getattr(self.group, "carrier", "nccl") == "nccl"


_OF_THIS_PROCESS = ("_clock", "_member", "_own_fabric", "_timed_by_gpu", "_unrecorded")
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
# Whole numbers that NCCL and gloo do not add, and what holds their sum, or overflows alike. Shared memory adds int16.
_GROUPS_SECONDS = 1800.0
# Of groups of torch's own that do not tell theirs: what torch gives to gloo.


class CrossDeviceOps(abc.ABC):
    """The algorithm that reduces and broadcasts across replicas.

    A subclass writes `start`, the all-reduce itself, and `unfit_for`; one that has other ops begin a part of it
    returns them by `parts`. What it keeps from its constructor must be picklable; `member` says, in a replica, which
    one this is.
    """

    _member: Member | None = None
    _own_fabric: Fabric | None = None
    _clock: GpuClock | None = None
    _timed_by_gpu = False
    _called = ""
    # What `cross_device_ops` and `--ops` take in its place.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "start" in vars(cls) and "exact" not in vars(cls):
            # Whoever writes another algorithm does not inherit what was promised of the one before.
            setattr(cls, "exact", False)  # noqa: B010

    @abc.abstractmethod
    def start(self, op: ReduceOp, flat: Tensor) -> Handle | dist.Work | None:
        """Begin to make `flat` on every replica the sum, or the mean, of all of them, in place.

        `op` is ReduceOp.SUM, or ReduceOp.MEAN, as of gradients: the sum divided by `self.member.num_replicas`.
        `flat` is contiguous, of one dimension and of a real dtype, of the same length and dtype on every replica.
        Returns what is to be waited for: a `mirror_nb.collectives.handles.Handle`, or the work that torch gives
        (`dist.all_reduce(flat, async_op=True)`); None where `flat` is reduced by then.
        """

    @abc.abstractmethod
    def unfit_for(self, devices: Sequence[Device]) -> str | None:
        """Return why it cannot work on these devices, None if it can."""

    def on(self, devices: Sequence[Device]) -> CrossDeviceOps:
        """Return the op for replicas on these devices, as the strategy names them: itself, as a rule."""
        return self

    @property
    def exact(self) -> bool:
        """Whether what it makes is the sum or the mean, to rounding, with the same bits on every replica.

        Of another op that is not taken for granted: what replicas tell each other beside their gradients does not go
        through it, and what it made of the gradients is compared. To promise it, write `exact = True` in the class
        that writes `start`.
        """
        return False

    def parts(self) -> Sequence[CrossDeviceOps]:
        """Return the ops that this one is made of: they are bound with it, share its memory, and record nothing."""
        return ()

    # ------------------------------------------------------------------ in a replica

    @final
    def bind(self, member: Member) -> None:
        """Be the op of this replica from now on; every replica calls it."""
        self.unbind()
        fabric = None
        if member.num_replicas > 1 and not hasattr(member.group, "shared"):
            fabric = _fabric_over(member)
        self._belong(member, fabric)

    @final
    def unbind(self) -> None:
        """Belong to no replica any more; what is under way fails."""
        fabric = self._own_fabric
        self._belong(None, None)
        if fabric is not None:
            fabric.close(ReplicaError(f"{type(self).__name__} was unbound while a collective ran"))

    def _belong(self, member: Member | None, fabric: Fabric | None) -> None:
        self._member, self._own_fabric = member, fabric
        self._unrecorded: deque[Reduction] = deque()
        self._timed_by_gpu = member is not None and member.record is not None and member.device.type == "cuda"
        self._clock = None
        # What the whole records covers its parts.
        silent = None if member is None else dataclasses.replace(member, record=None)
        for part in self.parts():
            part._belong(silent, fabric)

    @property
    def member(self) -> Member:
        """The replica that this op is bound to. Raises ReplicaError in the controller, and for ops of no strategy."""
        if self._member is None:
            raise ReplicaError(
                f"{type(self).__name__} works in replicas: call it in a function given to strategy.run, or in a "
                "%%mirrored cell. This one is bound to none here; where this is a replica, it is not, or no longer, "
                "what a strategy has as its `cross_device_ops`; one that another op uses has to be among those that "
                "the other's `parts()` returns"
            )
        return self._member

    @property
    def fabric(self) -> Fabric | None:
        """The memory that all replicas share; None where they share none."""
        # Asked for each time: the group has another one after it was formed anew.
        return self._own_fabric or getattr(self.member.group, "shared", None)

    @property
    def own_fabric(self) -> Fabric | None:
        """Such memory over a group that torch made; None where the group brings its own along, or there is none."""
        return self._own_fabric

    @final
    def all_reduce(self, op: ReduceOp | str, flat: Tensor, *, bucket: int = -1, serial: int = 0) -> Reduction:
        """Begin to make `flat` on every replica the sum or the mean of all of them, in place; returns its handle.

        `flat`: one dimension, contiguous, any floating, complex or integer dtype; of the same length and dtype on
        every replica. `bucket`, `serial`: numbers for the timing. Every replica begins the same ones in the same
        order.

        Raises UsageError for another tensor, also, from `wait`, where the replicas' differ; PeerFailed there when a
        replica leaves; ReplicaTimeout.
        """
        op = ReduceOp.of(op)
        _check_tensor(op, flat)
        member = self.member
        if self._unrecorded:
            self.record_ended()
        queued = time.perf_counter_ns()
        real = torch.view_as_real(flat).view(-1) if flat.dtype.is_complex else flat
        if real.requires_grad:
            real = real.detach()
        if real.is_inference():
            real = _ordinary(real)
        handle: Handle
        wider = None if member.device.type == "cpu" and real.dtype is torch.int16 else _WIDER.get(real.dtype)
        if member.num_replicas == 1:
            handle = Finished()
        elif wider is not None:
            copy = real.to(wider)
            handle = Expanding(self.begin(op, copy), copy, real)
        elif self._timed_by_gpu and real.is_cuda:
            handle = self._between_events(real.device, lambda: self.begin(op, real))
        else:
            handle = self.begin(op, real)
        return Reduction(handle, member.record, flat.nbytes, bucket, queued, self._unrecorded, member.limit, serial)

    @final
    def begin(self, op: ReduceOp, flat: Tensor) -> Handle:
        """Call `start`, and return a handle whatever that returned. Raises UsageError for what is none."""
        # A copy in another dtype that was made in inference mode.
        look = _ordinary(flat) if flat.is_inference() else flat
        # Not the tensor itself: with other memory (`flat.data = …`) it would tell of what the replicas do not have.
        begun = self.start(op, look if self.exact else look.view(-1))
        if isinstance(begun, Handle):
            return begun
        if begun is None:
            return Finished()
        if isinstance(begun, dist.Work):
            return WorkHandle([begun])
        raise UsageError(
            f"{type(self).__name__}.start returned a {type(begun).__name__}; it has to return the work that is to be "
            "waited for, as dist.all_reduce(flat, async_op=True) gives it, a mirror_nb.collectives.handles.Handle, or "
            "None where `flat` is reduced"
        )

    @final
    def record_ended(self) -> None:
        """Record the timings of what a GPU has finished since; called by every `all_reduce`, it never waits."""
        if self._unrecorded and self._timed_by_gpu and torch.cuda.is_current_stream_capturing():
            # To ask an event would end the recording of a graph.
            return
        while self._unrecorded and self._unrecorded[0].done():
            self._unrecorded.popleft().record()

    @final
    def batch_reduce(self, op: ReduceOp | str, tensors: Sequence[Tensor]) -> None:
        """Make each of `tensors`, as `all_reduce` takes them, the sum or the mean, in place; they travel together."""
        for handle in [self.all_reduce(op, tensor) for tensor in tensors]:
            handle.wait()

    @final
    def reduce(self, op: ReduceOp | str, tensor: Tensor, destination: int) -> Tensor | None:
        """Return the sum or the mean of all replicas' `tensor` on replica `destination`, None on the others."""
        op = ReduceOp.of(op)
        _check_given("tensor", tensor)
        tensor = _as_it_is(tensor)
        _check_dtype(op, tensor.dtype)
        self._check_replica("destination", destination)
        options = dist.ReduceOptions()
        options.rootRank = destination
        wider = widened(tensor) if op is ReduceOp.MEAN else tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))
        total = wider.clone(memory_format=torch.contiguous_format)
        real = self.carried(torch.view_as_real(total) if total.dtype.is_complex else total)
        self._run("reduce", tensor.nbytes, real.device, lambda group: group.reduce([real], options))
        if self.member.replica_id != destination:
            return None
        if op is ReduceOp.MEAN:
            real.div_(self.member.num_replicas)
        return (torch.view_as_complex(real) if total.dtype.is_complex else real).to(tensor.device, tensor.dtype)

    @final
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Make `tensor` (contiguous) on every replica what it is on replica `source`, in place."""
        self._check_replica("source", source)
        _check_given("tensor", tensor)
        _check_view("tensor", tensor)
        if not tensor.is_contiguous():
            raise UsageError(
                f"`tensor` has the shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be contiguous, "
                "since it is written to in place"
            )
        options = dist.BroadcastOptions()
        options.rootRank = source
        whole = as_sent(tensor.detach())
        sent = self.carried(whole)
        self._run("broadcast", tensor.nbytes, sent.device, lambda group: group.broadcast([sent], options))
        if sent is not whole:
            whole.copy_(sent)

    @final
    def gather(self, tensor: Tensor, destination: int) -> list[Tensor] | None:
        """Return all replicas' `tensor`, of equal shapes, on replica `destination`, None on the others."""
        self._check_replica("destination", destination)
        _check_given("tensor", tensor)
        options = dist.GatherOptions()
        options.rootRank = destination
        mine = self.member.replica_id == destination
        given = self.carried(_as_it_is(tensor).contiguous())
        parts = [given.new_empty(tensor.shape) for _ in range(self.member.num_replicas)] if mine else []
        if self.member.num_replicas == 1:
            parts[0].copy_(given)
        into = [[as_sent(part) for part in parts]] if mine else []
        self._run("gather", tensor.nbytes, given.device, lambda group: group.gather(into, [as_sent(given)], options))
        return [part.to(tensor.device) for part in parts] if mine else None

    @final
    # Who writes to it, the others' words on the way to it too, may be in another mode.
    @torch.inference_mode(False)
    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros on this replica's device, where the replicas can reduce it without a copy.

        Every replica calls it, for the same, in the same order. Raises UsageError for a length that cannot be,
        ReplicaError where there is not enough memory, ReplicaTimeout where a replica does not come.
        """
        # Before anybody is told of it: replicas are out of step where one fails half-way.
        check_whole("numel", numel, 0)
        fabric = self.fabric if self.member.device.type == "cpu" else None
        if fabric is None or numel == 0:
            return torch.zeros(numel, dtype=dtype, device=self.member.device)
        limit = self.member.limit
        try:
            return fabric.allocate(int(numel), dtype, limit)
        except ReplicaTimeout as late:
            raise named(late, limit) from None

    @final
    def release(self, tensor: Tensor) -> None:
        """Let go of what `allocate` gave; the tensor itself lives on as an ordinary one."""
        if self._member is not None and self.fabric is not None and tensor.device.type == "cpu":
            self.fabric.release(tensor)

    @final
    def progress(self) -> None:
        """Go on with what has been begun, as far as it goes without waiting: between other work."""
        fabric = self.fabric
        if fabric is not None and fabric.pending:
            fabric.progress()

    @final
    def limited(self) -> AbstractContextManager[None]:
        """Within it what torch.distributed begins over the same group waits no longer than the options allow."""
        within: Callable[[float], AbstractContextManager[None]] | None = getattr(self.member.group, "within", None)
        limit = self.member.limit
        # A group that torch made waits as long as it was made to.
        return contextlib.nullcontext() if limit is None or within is None else _naming(within(limit), limit)

    def carried(self, tensor: Tensor) -> Tensor:
        """Return the tensor where what carries it takes it: on the CPU where replicas share a GPU."""
        # NCCL refuses them, and gloo takes hardly anything from a GPU.
        return tensor if self.member.has_nccl else tensor.cpu()

    def _run(
        self, op: str, nbytes: int, device: torch.device, begin: Callable[[dist.ProcessGroup], dist.Work]
    ) -> None:
        """Begin and end a collective of a tensor of `nbytes` bytes, of which what is sent lies on `device`."""
        member, queued = self.member, time.perf_counter_ns()

        def complete() -> Handle:
            # A replica that is alone has what the result is, and in the kernel's process no group.
            if member.num_replicas > 1:
                self._complete(begin(member.group))
            return Finished()

        if self._timed_by_gpu and device.type == "cuda":
            self.record_ended()
            handle = self._between_events(device, complete)
        else:
            handle = complete()
        Reduction(handle, member.record, nbytes, -1, queued, self._unrecorded, op=op).wait()

    def _between_events(self, device: torch.device, begin: Callable[[], Handle]) -> Handle:
        """Begin a collective on a GPU; returns a handle that knows when it ran there."""
        if torch.cuda.is_current_stream_capturing():
            # An event of a graph that is being recorded tells no time, and to ask for it would end the recording.
            return begin()
        # When this thread enqueues it says nothing: it is ahead of the GPU.
        anchor, started = self._anchor(device), moment(device)
        handle = begin()
        return handle if handle.ends_after_wait else BetweenEvents(handle, started, anchor, device)

    def _anchor(self, device: torch.device) -> Anchor:
        if self._clock is None:
            self._clock = GpuClock(device)
        return self._clock.anchor()

    def _complete(self, work: dist.Work) -> None:
        """Wait for a collective of torch's, as long as the options allow."""
        limit = self.member.limit
        try:
            wait_for_work(work, limit)
        except ReplicaTimeout as late:
            raise named(late, limit) from late.__cause__

    def _check_replica(self, name: str, replica_id: int) -> None:
        if not isinstance(replica_id, int | Integral) or not 0 <= replica_id < self.member.num_replicas:
            raise UsageError(
                f"`{name}` is {replica_id!r}; it is a replica id from 0 to {self.member.num_replicas - 1}"
            )

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to this process stays here.
        return {name: value for name, value in vars(self).items() if name not in _OF_THIS_PROCESS}

    def __repr__(self) -> str:
        # Of a function its name: where it lies in memory is another place in each process.
        values = {name: getattr(value, "__qualname__", repr(value)) for name, value in vars(self).items()}
        given = ", ".join(f"{name}={value}" for name, value in values.items() if not name.startswith("_"))
        return f"{type(self).__name__}({given})"


def name_of(ops: CrossDeviceOps) -> str:
    """Return the name of an op; of a class of the user's own, that of the class."""
    return ops._called or type(ops).__name__


_SENT = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
# What gloo sends as it is.


def as_sent(tensor: Tensor) -> Tensor:
    """A contiguous tensor, or another look at its memory, by real numbers or bytes, where gloo would not send it."""
    if tensor.dtype in _SENT:
        return tensor
    return (
        torch.view_as_real(tensor)
        if tensor.dtype.is_complex
        else tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    )


@contextlib.contextmanager
def _naming(within: AbstractContextManager[None], limit: float) -> Iterator[None]:
    try:
        with within:
            yield
    except ReplicaTimeout as late:
        raise named(late, limit) from late.__cause__


def _as_it_is(tensor: Tensor) -> Tensor:
    """Return a tensor in whose memory stands what it shows: of a conjugate view another one."""
    return tensor.detach().resolve_conj().resolve_neg()


def _ordinary(flat: Tensor) -> Tensor:
    """Return a look at an inference tensor's memory that any thread may write to, in inference mode or not.

    A reduction goes on wherever somebody waits, and torch's refusal there would end it for all replicas.
    """
    with torch.inference_mode(False):
        look = torch.empty(0, dtype=flat.dtype, device=flat.device)
        return look.set_(flat.untyped_storage(), flat.storage_offset(), flat.shape, flat.stride())


def averages_first(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether a mean divides before it adds: a sum that is rounded to fp16 on the way ends at 65504."""
    return op is ReduceOp.MEAN and dtype is torch.float16


def check_whole(name: str, value: object, least: int) -> None:
    """Raise UsageError for an argument that is no whole number, or below `least`."""
    if not isinstance(value, int | Integral) or value < least:
        raise UsageError(f"`{name}` is {value!r}; it must be a whole number, from {least} on")


def _check_given(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"`{name}` is {reprlib.repr(tensor)}; it must be a tensor")
    if tensor.layout is not torch.strided:
        raise UsageError(f"`{name}` has the layout {tensor.layout}; convert it first: tensor.to_dense()")


def _check_view(name: str, tensor: Tensor) -> None:
    if tensor.is_conj() or tensor.is_neg():
        kind, resolve = ("conjugate", "resolve_conj") if tensor.is_conj() else ("negative", "resolve_neg")
        raise UsageError(
            f"`{name}` shows the {kind} of what stands in its memory, where nothing can be written to in place; pass "
            f"tensor.{resolve}()"
        )


def _check_dtype(op: ReduceOp, dtype: torch.dtype) -> None:
    if dtype is torch.bool:
        raise UsageError(f"booleans have no {op.name.lower()}; convert them first: tensor.int()")
    if op is ReduceOp.MEAN and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"the mean of {dtype} is no {dtype}; convert it first: tensor.float()")


def _check_tensor(op: ReduceOp, flat: Tensor) -> None:
    _check_given("flat", flat)
    _check_view("flat", flat)
    _check_dtype(op, flat.dtype)
    if flat.dim() != 1 or not flat.is_contiguous():
        raise UsageError(
            f"`flat` has the shape {tuple(flat.shape)} and strides {flat.stride()}; it must be contiguous and of one "
            "dimension: tensor.reshape(-1)"
        )


def word_device(own: torch.device) -> torch.device:
    """Return where a replica on device `own` has small tensors that go to the others over the default group.

    The CPU, where reading them stops no GPU, unless the group is one for GPUs alone, as a script may have made it.
    """
    group: Any = dist.group.WORLD
    try:
        group._get_backend(torch.device("cpu"))
    except (RuntimeError, AttributeError):
        return own
    return torch.device("cpu")


def gathered(value: Any, num_replicas: int, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every replica's value, in order; values are pickled. `group`: None is the default one."""
    found: list[Any] = [None] * num_replicas
    dist.all_gather_object(found, value, group=group)
    return found


def _fabric_over(member: Member) -> Fabric | None:
    gather = functools.partial(gathered, num_replicas=member.num_replicas, group=member.group)
    try:
        seconds = member.timeout_seconds or _seconds_of(member.group)
        return Fabric.form(gather, member.replica_id, member.num_replicas, seconds)
    except ReplicaError:
        return None


def _seconds_of(group: dist.ProcessGroup) -> float:
    """Return how long torch's own group waits for its collectives on the CPU, seconds."""
    try:
        gloo: Any = group._get_backend(torch.device("cpu"))
        return float(gloo.options._timeout.total_seconds())
    except (RuntimeError, AttributeError):
        return _GROUPS_SECONDS
