"""The place of code that runs on a replica: in a %%mirrored cell, inside `strategy.run`, in a script under torchrun.

Every replica runs the same code. A call that concerns all of them first agrees that all make it, with values that
fit (peers.py), so that a mistake is the same error on each and the next call works.
"""

from __future__ import annotations

import functools
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mirror_nb.collectives.base import name_of
from mirror_nb.collectives.headers import MERGE_CALL
from mirror_nb.collectives.options import Communication
from mirror_nb.data.dataset import Loaders
from mirror_nb.data.weighing import Weighing
from mirror_nb.errors import ContextError, TransferError, UsageError
from mirror_nb.gradients.synchronizer import GradientSynchronizer
from mirror_nb.messages import Meeting, Note, Reduces
from mirror_nb.replica.scope import Scope
from mirror_nb.steps.recorder import Recorder
from mirror_nb.steps.steering import Steering
from mirror_nb.strategies.context import ReplicaContext, entered, stand_nowhere
from mirror_nb.strategies.differentiable import all_gathered, all_reduced
from mirror_nb.strategies.input import ReplicaInput
from mirror_nb.strategies.peers import Form, Peers, form_of_nest, of_dtype
from mirror_nb.strategies.place import OwnPlace
from mirror_nb.strategies.reductions import (
    as_tensor,
    checked_axis,
    counted,
    gather_local,
    in_order,
    is_mean_of_none,
    is_number,
    local_parts,
    own_of,
    parts_of,
    reduce_local,
    regroup,
    structure,
    sum_dtype,
    sum_over,
)
from mirror_nb.strategies.replica_variables import ReplicaHome
from mirror_nb.strategies.seat import PeerSeat
from mirror_nb.strategies.standalone import Standalone
from mirror_nb.telemetry.comparison import Comparison, compared
from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.packing import members, pack, unsendable
from mirror_nb.transfer.payload import Payload
from mirror_nb.values import DistributedValues, PerReplica, ReduceOp, Shares, widened
from mirror_nb.variables import Variable, component, distributed, provide_arrivals

if TYPE_CHECKING:
    from mirror_nb.strategies.base import Strategy

_Value = TypeVar("_Value")

_MARKS = 62
# Of so many tensors of an all-reduce a replica says in one integer that it has none, and whether of others, too.
_MIRRORED = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
    torch.Generator,
)


class Who(Protocol):
    """Which replica."""

    @property
    def replica_id(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class OnReplica(Protocol):
    """What the place needs of the replica it stands on: replica/runtime.py's, or a Standalone."""

    @property
    def identity(self) -> Who: ...
    @property
    def gradients(self) -> GradientSynchronizer: ...
    @property
    def scope(self) -> Scope: ...
    @property
    def own_process(self) -> bool: ...
    @property
    def partial(self) -> bool: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def steering(self) -> Steering: ...
    @property
    def communication(self) -> Communication: ...
    def communicate(self, by: Communication) -> None: ...
    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...
    def unsynchronized(self) -> dict[str, int]: ...
    def label(self, kind: type) -> None: ...
    @property
    def emit(self) -> Callable[..., None]: ...


@final
class ReplicaPlace(OwnPlace):
    """One replica of several, in its own process."""

    def __init__(self, replica: OnReplica) -> None:
        who = replica.identity
        self.num_replicas = who.num_replicas
        self.replica_id: int = who.replica_id
        self.device: torch.device = who.device
        self.devices = _names_of_devices(who)
        self._replica = replica
        self._peers = Peers(
            who.replica_id, who.num_replicas, who.device, self._announce, lambda: replica.communication.ops
        )
        self._weighing = Weighing(who.num_replicas, lambda shares: replica.gradients.set_shares(*shares))
        self._latest: Shares | None = None
        # Of the batch that a loop here was given last.
        self._merges = 0
        # merge_calls that run now: in them every replica has all values.
        commanded = not isinstance(replica, Standalone)
        absent = functools.partial(self._absent, ReduceOp.SUM)
        self._home = ReplicaHome(self._peers, lambda: self._merges > 0, absent, commanded=commanded)
        self.input = ReplicaInput(
            replica_id=who.replica_id,
            num_replicas=who.num_replicas,
            device=who.device,
            randomness=replica.scope.shared_randomness,
            agree=self._peers.first_bytes,
            on_batch=self._on_batch,
            on_end=self._on_end,
            on_wanted=self._on_wanted,
            loaders=Loaders(),
        )
        self._listeners: list[Callable[[Any], None]] = []
        # Who called `command` here, in a cell for instance; else notes go to the controller.
        self.seat: PeerSeat = PeerSeat(
            who.replica_id,
            who.num_replicas,
            who.device,
            gradients=replica.gradients,
            scope=replica.scope,
            recorder=replica.recorder,
            steering=replica.steering,
            send=self._send_note,
            named=replica.named_parameters,
        )
        if replica.own_process:
            provide_arrivals(self._take_variable)

    def _announce(self) -> None:
        """Tell whoever follows the replicas that this one waits for all the others now."""
        if self._replica.partial:
            raise UsageError("this call needs all replicas, but --replicas leaves some out of this cell")
        self._replica.emit(Meeting())

    @property
    def communication(self) -> Communication:  # type: ignore[override]
        """What gradients are reduced by, and how."""
        return self._replica.communication

    @property
    def reduction(self) -> str:  # type: ignore[override]
        """How gradients become one: "mean" or "sum"."""
        return self._replica.gradients.reduction

    def label(self, kind: type) -> None:
        self._replica.label(kind)

    def communicate(self, by: Communication) -> None:
        self.check_open()
        self._replica.communicate(by)
        self._replica.emit(Reduces(name_of(by.ops), type(by.ops).__name__))

    # ------------------------------------------------------------------ scope and run

    def scope(self) -> AbstractContextManager[Any]:
        self.check_open()
        return self._replica.scope

    def run(self, strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check_open()
        context = ReplicaContext(strategy, self.replica_id)
        args = own_of(args, self.replica_id, self.num_replicas)
        kwargs = own_of(kwargs, self.replica_id, self.num_replicas)
        shares = self._weighing.called_with((args, kwargs))
        if shares is not None:
            self._replica.gradients.set_shares(*shares)
        with entered(strategy, context, cross=False), self._replica.scope as scope:
            scope.start_running()
            return fn(*args, **kwargs)

    @contextmanager
    def weighing(self, weighed: Sequence[tuple[Any, Shares]]) -> Iterator[None]:
        """Weigh gradients in the block by that of these parts of batches that is in use, where they weigh apart."""
        for part, shares in weighed:
            self._weighing.handed_out(part, shares)
        try:
            yield
        finally:
            self._weighing.exhausted()

    def command(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        changes: bool = True,
        on_note: Callable[[Any], None] = lambda value: None,
    ) -> list[Any]:
        self._listeners.append(on_note)
        try:
            with self._replica.scope:
                return [fn(*args)]
        finally:
            self._listeners.pop()

    def log(self, values: dict[str, Any]) -> None:
        # A loss knows how it came about, and torch warns where such a one is made a number.
        self._replica.recorder.log(
            {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
        )

    def told(self, examples: int | None) -> None:
        self._replica.recorder.told(examples)

    def timeline(self) -> Any:
        raise ContextError("a replica does not read the others' records; ask in the notebook or the main script")

    def dashboard(self) -> Any:
        raise ContextError("the dashboard is the notebook's: write %mirror dashboard, or %%mirrored --dashboard")

    def compare_parameters(self) -> Comparison:
        self.check_open()
        return compared(self.seat.collect((self.seat.check(), self._replica.unsynchronized())))

    def every(self, results: list[Any]) -> list[Any]:
        self.check_open()
        return self.seat.collect(results[0])

    def draw_seed(self) -> int:
        with self._replica.scope.shared_randomness():
            return int(torch.randint(1 << 62, (), device="cpu"))

    def _send_note(self, value: Any) -> None:
        if self._listeners:
            self._listeners[-1](value)
        else:
            self._replica.emit(Note(value))

    @property
    def takes_part(self) -> bool:
        return not self._replica.partial and self._replica.gradients.enabled

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward() accumulates local gradients; the first one after it reduces all."""
        return self._replica.gradients.no_sync()

    def mirror(self, obj: Any) -> Any:
        """Return `obj`, its networks tracked; on a replica what a cell makes is mirrored anyway."""
        if isinstance(obj, nn.Module):
            self._replica.scope.adopt(obj)
        return obj

    def mirrors(self, obj: Any) -> bool:
        return obj.home is self._home if isinstance(obj, Variable) else isinstance(obj, _MIRRORED)

    # ------------------------------------------------------------------ reductions

    def reduce(self, op: ReduceOp, value: Any, axis: tuple[int, ...] | None, where: str) -> Any:
        if self._is_here(value):
            return reduce_local(op, value, axis, self.num_replicas).to(self.device)
        leaf = component(value) if isinstance(value, Variable) else value

        def offered() -> tuple[Form, tuple[Tensor, int]]:
            tensor = as_tensor(leaf, "reduce", self.device)
            part = sum_over(tensor if op is ReduceOp.SUM else widened(tensor), axis)
            count = 1 if axis is None else counted(tensor, axis)
            if axis is None and self._absent(op) and is_mean_of_none(part):
                part, count = torch.zeros_like(part), 0
            form = form_of_nest(where, [part], [is_number(leaf)])
            return of_dtype(form, tensor.dtype), (part, count)

        form, offer = _offer(offered)
        part, count = offer or (torch.empty(0, device="cpu"), 0)
        call = f"reduce {op.value} axis={axis}"
        if op is ReduceOp.SUM:
            return self._peers.total(call, form, part, lambda dtype: sum_dtype(dtype, axis))
        return self._peers.mean(call, form, part, count)

    def _absent(self, op: ReduceOp = ReduceOp.MEAN) -> bool:
        """Whether this replica has no examples of the batch in use, or, for a mean, had none of the latest."""
        # The loss is mostly shown after the last batch. A sum is of totals then: what spoilt one has spoilt all of it.
        shares = self._replica.gradients.shares or (self._latest if op is ReduceOp.MEAN else None)
        return shares is not None and not shares[0]

    def gather(self, value: Any, axis: int, where: str) -> Any:
        if self._is_here(value):
            return gather_local(value, axis, self.num_replicas).to(self.device)
        leaf = component(value) if isinstance(value, Variable) else value
        return self._gathered("gather", leaf, axis, where).detach()

    def _is_here(self, value: Any) -> bool:
        """Whether all replicas' parts of a value are in this one: not of a Variable, in a merge_call either."""
        return isinstance(value, DistributedValues) or (self._merges > 0 and not isinstance(value, Variable))

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        leaves, places, made = in_order(own_of(value, self.replica_id, self.num_replicas))

        def offered() -> tuple[Form, list[Tensor]]:
            tensors = [self._differentiable(leaf, "all_reduce") for leaf in leaves]
            numbers = [is_number(leaf) for leaf in leaves]
            return form_of_nest(structure(value), tensors, numbers, places=places), tensors

        form, offer = _offer(offered)
        offer = offer or []
        lacking = {i for i, tensor in enumerate(offer) if self._absent(op) and is_mean_of_none(tensor)}
        own = sum(1 << i for i in lacking)
        words = [own >> i & ((1 << _MARKS) - 1) for i in range(0, len(offer), _MARKS)] or [0]
        more = int(any(words[1:])) << _MARKS
        marks, common = self._peers.agree(f"all_reduce {op.value}", form, words[0] | more)
        if any(mark >> _MARKS for mark in marks):
            marks = [sum(word << i * _MARKS for i, word in enumerate(row)) for row in self._peers.sizes(words)]
        tensors = [tensor.to(sum_dtype(leaf.dtype, None)) for tensor, leaf in zip(offer, common, strict=True)]
        for i in lacking:
            # Still a part of what it was made of: the backward pass goes there on every replica.
            tensors[i] = tensors[i].masked_fill(tensors[i].isnan(), 0.0)
        results = all_reduced(self._peers, op, tensors, self._replica.gradients.times_an_equal_part)
        if op is ReduceOp.MEAN and any(marks):
            results = [_mean_without(i, result, marks) for i, result in enumerate(results)]
        return made(results)

    def all_gather(self, value: Any, axis: int) -> Any:
        return self._gathered("all_gather", own_of(value, self.replica_id, self.num_replicas), axis)

    def _gathered(self, call: str, value: Any, axis: int, where: str = "") -> Any:
        leaves, places, made = in_order(value)

        def offered() -> tuple[Form, list[Tensor]]:
            tensors = [self._differentiable(leaf, call) for leaf in leaves]
            for tensor in tensors:
                checked_axis(axis, tensor, call)
            return form_of_nest(where or structure(value), tensors, [False] * len(tensors), axis, places), tensors

        form, offer = _offer(offered)
        tensors = offer or []
        dims = [checked_axis(axis, tensor, call) for tensor in tensors]
        mine = [tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True)]
        firsts, _ = self._peers.agree(f"{call} axis={axis}", form, mine[0] if mine else 0)
        # The sizes of a single tensor, the usual case, came with the agreement.
        sizes = [[size] for size in firsts] if len(mine) == 1 else self._peers.sizes(mine) if mine else []
        weight = self._replica.gradients.times_an_equal_part
        gathered = [
            all_gathered(self._peers, tensor, dim, [row[i] for row in sizes], weight)
            for i, (tensor, dim) in enumerate(zip(tensors, dims, strict=True))
        ]
        return made(gathered)

    def _differentiable(self, leaf: Any, call: str) -> Tensor:
        # A Variable's clone is a plain tensor that leads its gradient back.
        return as_tensor(leaf.clone() if isinstance(leaf, Variable) else leaf, call, self.device)

    # ------------------------------------------------------------------ merge_call

    def merge_call(
        self, strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        every_args, every_kwargs = self._merged(_in_words(fn), (args, kwargs))
        self._merges += 1
        try:
            with entered(strategy, None, cross=True):
                result = fn(strategy, *every_args, **every_kwargs)
        finally:
            self._merges -= 1
        return own_of(result, self.replica_id, self.num_replicas)

    def _merged(self, function: str, nest: Any) -> Any:
        """Return the nest of PerReplica that the replicas' nests make; what is mirrored stays this replica's own."""
        nest = own_of(nest, self.replica_id, self.num_replicas)
        leaves, spec = pytree.tree_flatten(nest, is_leaf=_is_size)

        def offered() -> tuple[Form, bytes]:
            sent = [_Own() if _stays(leaf) else _sendable(leaf) for leaf in leaves]
            try:
                nest = pytree.tree_unflatten(sent, spec)
                return Form(function), pack(nest, reference=self._labelled, in_band=True).payload.pickled
            except TransferError as reason:
                named = {**members("args", nest[0]), **nest[1]}
                error = unsendable(reason, named, "leave it out of them", reference=self._labelled)
                raise UsageError(f"the arguments of merge_call cannot travel: {error}") from reason

        form, offer = _offer(offered)
        data = offer or b""
        # Below zero of a replica without examples.
        told, _ = self._peers.agree(MERGE_CALL, form, ~len(data) if self._absent() else len(data))
        if self.num_replicas == 1:
            return nest
        mine, places, _ = in_order(nest)
        own = dict(zip(places, mine, strict=True))
        received = [
            nest if replica_id == self.replica_id else self._opened(pickled, own)
            for replica_id, pickled in enumerate(self._peers.exchanged(data, [max(n, ~n) for n in told]))
        ]
        every = regroup([args for args, _ in received]), regroup([kwargs for _, kwargs in received])
        for part in parts_of(every):
            if isinstance(part, PerReplica):
                part.absent = frozenset(i for i, n in enumerate(told) if n < 0)
        return every

    def _labelled(self, obj: object) -> None:
        """For `pack`: what is of a class that every replica has made, by the same lines, arrives as one of it."""
        self._replica.label(type(obj))

    def _opened(self, pickled: bytes, own: dict[str, Any]) -> Any:
        """Rebuild another replica's nest, with this replica's own objects where the other one has its own."""
        leaves, places, made = in_order(unpack(Payload(pickled), None)[0])
        # By where they are: the keys of the other one's dicts need not be in this one's order.
        return made(
            [
                own.get(place, leaf) if isinstance(leaf, _Own) else self._here(leaf)
                for leaf, place in zip(leaves, places, strict=True)
            ]
        )

    def _here(self, leaf: Any) -> Any:
        # A packed sequence is one leaf, and holds several.
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), leaf, is_leaf=_is_size)

    # ------------------------------------------------------------------ values and input

    def local_results(self, value: Any) -> tuple[Any, ...]:
        if self._merges:
            leaves, places, made = in_order(value, is_leaf=lambda leaf: isinstance(leaf, DistributedValues))
            value = made([self._every_component(leaf, where) for leaf, where in zip(leaves, places, strict=True)])
        return local_parts(value, self.num_replicas, of_one=self._merges == 0)

    def _every_component(self, leaf: Any, where: str) -> Any:
        """Return all replicas' components of a Variable, as a PerReplica; another leaf as it is."""
        if not isinstance(leaf, Variable) or self.num_replicas == 1:
            return leaf
        return PerReplica(tuple(self._gathered("local_results", component(leaf)[None], 0, where).detach()))

    def _on_wanted(self) -> None:
        self._replica.steering.boundary()
        self._replica.recorder.wanted()

    def _on_end(self) -> None:
        if sys.exc_info()[0] is GeneratorExit:
            self._replica.gradients.leave_shares()
        else:
            self._replica.gradients.clear_shares()
        self._weighing.exhausted()
        self._replica.recorder.exhausted()
        if self._replica.recorder.wants_checksums():
            self.seat.check()

    def _on_batch(self, local_examples: int, global_examples: int, batch: Any) -> None:
        self._replica.recorder.arrived(local_examples)
        self._replica.scope.start_running()
        # Of a batch that is empty for all each is a part as large as any.
        self._latest = (local_examples, global_examples) if global_examples else (1, self.num_replicas)
        self._weighing.handed_out(batch, self._latest)

    # ------------------------------------------------------------------ Variables

    def make_variable(self, value: Any, **options: Any) -> Any:
        return self._take_variable(self._home.equal(value.to(self.device)), **options)

    def _take_variable(self, value: Tensor, **options: Any) -> Variable:
        """Make a Variable whose value is the same everywhere already: no peer is asked."""
        variable = distributed(value.to(self.device), self._home, **options)
        if variable.requires_grad:
            self._replica.gradients.track(variable, f"Variable.{variable.name}")  # type: ignore[arg-type]
        return variable

    def close(self) -> None:
        # In a mirrored cell it is the notebook's.
        if isinstance(self._replica, Standalone):
            self.closed = True
            self.input.loaders.close()
            stand_nowhere(self)
            self._replica.leave()

    def reduce_by(self, reduction: str) -> None:
        """Have gradients become a "mean" or a "sum" from now on; every replica calls it."""
        self._replica.gradients.reduction = reduction
        self._replica.gradients.clear_shares()


def _offer(make: Callable[[], tuple[Form, _Value]]) -> tuple[Form, _Value | None]:
    """Make what this replica brings to a call; what is wrong with it the others have to hear of first."""
    try:
        return make()
    except Exception as error:
        # Torch's own errors, too: a replica that raised alone would leave the others waiting.
        return Form(problem=str(error) or type(error).__name__), None


def _in_words(function: Callable[..., Any]) -> str:
    """Return a function's name and where its source ends, by which two of one name differ."""
    name, code = getattr(function, "__qualname__", type(function).__qualname__), getattr(function, "__code__", None)
    if code is None:
        return str(name)
    ends = ((line or 0, column or 0) for _, line, _, column in code.co_positions())
    line, column = max(ends, default=(code.co_firstlineno, 0))
    # Python 3.12 does not know it of a function that returns a constant, and none does with -X no_debug_ranges.
    where = f"column {column}" if column else f"code {_digest(code):08x}"
    return f"{name} (to line {line}, {where})"


def _digest(code: types.CodeType) -> int:
    """Return a number by which the code of functions differs, those inside it left out; the same in every process."""
    plain = [one for one in code.co_consts if one is None or isinstance(one, (bool, int, float, complex, str, bytes))]
    return zlib.crc32(repr((code.co_code, code.co_names, plain)).encode())


class _Own:
    """Stands for an object that each replica has of its own."""


def _stays(leaf: Any) -> bool:
    """Whether an argument of merge_call is each replica's own copy of one thing, which does not travel."""
    kinds = (*_MIRRORED, nn.Parameter, Variable, types.ModuleType)
    return isinstance(leaf, kinds) or (callable(leaf) and not isinstance(leaf, Tensor))


def _is_size(node: Any) -> bool:
    """Whether it is a torch.Size, which torch's pytrees would make a plain tuple."""
    return isinstance(node, torch.Size)


def _sendable(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _names_of_devices(who: Who) -> tuple[str, ...]:
    """Name one device a replica, as they are numbered when each replica has the one after its peer's."""
    first = 0 if who.device.index is None else who.device.index - who.replica_id
    return tuple(f"{who.device.type}:{max(0, first + i)}" for i in range(who.num_replicas))


def _mean_without(i: int, result: Tensor, marks: Sequence[int]) -> Tensor:
    """Return a mean as that of the replicas that have not marked tensor i; its gradient is over examples already."""
    without = sum(mark >> i & 1 for mark in marks)
    there = len(marks) - without
    return result + result.detach() * (without / there) if without and there else result
