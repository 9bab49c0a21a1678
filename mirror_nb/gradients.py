"""Equal gradients on every replica, with no wrapper: they are complete when ``backward()`` returns.

Knows parameters, autograd's hooks and the default process group. Knows nothing of modules, optimizers, cells
or the notebook.

A *round* is the synchronisation of one backward pass:

    first gradient accumulated   history predicts the plan, the same one on all replicas
    a gradient is there          copied into its bucket (CPU: at once, while it is in the cache; GPU: with the others)
    a bucket has its gradients   reduced while the pass goes on, in order
    end of the backward pass     the buckets that still lack some follow, zeros in the gaps; then the tail
    tail received                who used what: gradients that the plan lacks go in a second set of buckets
    all received                 ``parameter.grad`` shows the bucket's memory; history learns what was used; hooks
                                 that others have for accumulated gradients are called

Replicas need not use the same parameters: the plan comes from what all of them know, the tail tells the rest.
A parameter that is met for the first time is *agreed* on: matched over the replicas by name, values compared.
Examples weigh in before gradients accumulate. So a plain mean over the replicas is exact whatever accumulated
locally, and leaves what was reduced before as it is, being the mean of equal values.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parameter import is_lazy
from torch.utils.weak import TensorWeakRef

from mirror_nb.buckets import REMEMBERED, Agreed, Bucket, Buffers, History, Plan, for_gradients
from mirror_nb.collectives.base import CrossDeviceOps, Reduction, word_device
from mirror_nb.errors import PeerFailed, ReplicaError, UsageError
from mirror_nb.matching import Offer, Portrait, Values, checksum, is_sparse, made_alike, match
from mirror_nb.recorder import Recorder
from mirror_nb.sparse_gradients import averaged
from mirror_nb.steering import QUIET, Steering
from mirror_nb.values import ReduceOp


@final
class GradientSynchronizer:
    """Makes the gradients of tracked parameters equal over the replicas during ``backward()``.

    ``reduction="mean"`` gives the gradient of the mean over the global batch: replicas weigh in by their
    examples (`set_shares`), equally without. ``"sum"`` adds the replicas' gradients up as they are. Buckets
    of `bytes_per_bucket` bytes are reduced while the backward pass goes on; the first one, of
    `first_bucket_bytes`, is smaller to start early. All replicas have to use the same arguments. With one
    replica nothing is hooked.

    Raises from ``backward()``: UsageError for what cannot be reduced, PeerFailed when a replica gave up its
    pass, and whatever the collectives raise.
    """

    def __init__(
        self,
        replica_id: int,
        num_replicas: int,
        *,
        reduction: str = "mean",
        bytes_per_bucket: int = 25 * 2**20,
        first_bucket_bytes: int = 2**20,
    ) -> None:
        if not 0 <= replica_id < num_replicas:
            raise UsageError(f"`replica_id` is {replica_id}, which is not below {num_replicas} replicas")
        if reduction not in ("mean", "sum"):
            raise UsageError(f"`reduction` is {reduction!r}; it is 'mean' or 'sum'")
        if bytes_per_bucket < 1 or first_bucket_bytes < 1:
            raise UsageError(
                f"buckets hold at least 1 byte; `bytes_per_bucket` is {bytes_per_bucket}, "
                f"`first_bucket_bytes` {first_bucket_bytes}"
            )
        self.replica_id = replica_id
        self.num_replicas = num_replicas
        self.reduction = reduction
        self.enabled = True
        # Called at the first gradient of every round, for whoever has to know that training began.
        self.before_backward: Callable[[], None] = lambda: None
        self._ops: CrossDeviceOps | None = None
        self._exact = True
        self.recorder: Recorder | None = None
        # Is told how each pass goes.
        self.steering: Steering | None = None
        # What this replica was told rides with its gradients.
        self._bytes_per_bucket = bytes_per_bucket
        self._first_bucket_bytes = first_bucket_bytes
        self._accumulating = False
        self._tracked: dict[tuple[str, int], _Tracked] = {}
        self._by_id: dict[int, _Tracked] = {}
        self._registered: dict[str, int] = {}
        self._unreduced: dict[_Tracked, None] = {}
        self._has_deferred = False
        # Hooks of others, which are called once the pass has ended.
        self._round: _Round | None = None
        self.undivided_passes = 0
        # Backward passes on batches of which this replica was given no share.
        self._agreed: list[Agreed] = []
        self._agreed_before: list[Agreed] = []
        self._group: Callable[[], object | None] = lambda: None
        self._forget_agreements()
        self.clear_shares()

    # What takes part

    def track(self, parameter: nn.Parameter, name: str) -> None:
        """Synchronise `parameter` from now on; twice is once. Frozen parameters count when they are unfrozen.

        `name` says what it is ("Linear.weight"), alike on every replica; the same name may come many times.
        """
        if self.num_replicas == 1 or self._known(parameter) is not None:
            return
        ordinal = self._registered.get(name, 0)
        self._registered[name] = ordinal + 1
        tracked = _Tracked(self, parameter, name, ordinal)
        # Lazy parameters refuse hooks through torch's function protocol; they keep them when they get values.
        with torch._C.DisableTorchFunctionSubclass():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                return
            wanted = parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_hook(tracked.before_accumulation)
            parameter.register_post_accumulate_grad_hook(tracked.after_accumulation)
            parameter.requires_grad_(wanted)
        self._tracked[tracked.key] = tracked
        self._by_id[id(parameter)] = tracked
        self.hooked(parameter)

    def hooked(self, parameter: Tensor) -> None:
        """Have hooks that others registered for an accumulated gradient wait until it is that of all replicas."""
        tracked = self._by_id.get(id(parameter))
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if tracked is None or tracked.parameter() is not parameter or not hooks:
            return
        for key, hook in hooks.items():
            if not isinstance(hook, _Deferred) and not isinstance(getattr(hook, "__self__", None), _Tracked):
                hooks[key] = _Deferred(tracked, hook)
                self._has_deferred = True

    def synchronized(self) -> dict[str, nn.Parameter]:
        """Return the parameters that all replicas have synchronised by now, in an order that is the same on all.

        By the names under which they were tracked, "Linear.weight", the further ones of a name "Linear.weight (2)".
        """
        found: dict[str, nn.Parameter] = {}
        for agreed in self._agreed or self._agreed_before:
            parameter, tracked = agreed.parameter(), agreed.tracked
            if parameter is not None and tracked is not None:
                found[f"{tracked.name} ({tracked.ordinal + 1})" if tracked.ordinal else tracked.name] = parameter
        return found

    def leave_to(self, owner: object, parameters: Iterable[nn.Parameter]) -> None:
        """Leave `parameters` alone while `owner`, which synchronises them itself, is alive."""
        for parameter in parameters:
            tracked = self._known(parameter)
            if tracked is not None:
                tracked.owner = weakref.ref(owner)

    def synchronizes(self, parameter: nn.Parameter) -> bool:
        """Whether the replicas have the parameter in common, which DDP may synchronise in our place."""
        return self._known(parameter) is not None

    @property
    def weight(self) -> float | None:
        """This replica's part of what all replicas make together; None where each is by itself now."""
        alone = self.num_replicas == 1 or not self.enabled or self._accumulating or not dist.is_initialized()
        return None if alone else self._weight / self.num_replicas

    def _known(self, parameter: nn.Parameter) -> _Tracked | None:
        tracked = self._by_id.get(id(parameter))
        return tracked if tracked is not None and tracked.parameter() is parameter else None

    def use(self, ops: CrossDeviceOps, *, bytes_per_bucket: int | None = None) -> None:
        """Reduce by these cross-device ops, bound to this replica, from the next backward pass on.

        Every replica has to make the same call between the same passes. Without it torch's own all-reduce serves.
        """
        self._ops = ops
        self._exact = ops.exact
        self._bytes_per_bucket = bytes_per_bucket or self._bytes_per_bucket
        self._buffers.clear()
        self._plans.clear()

    # How it takes part

    def set_shares(self, local_examples: int, global_examples: int) -> None:
        """Weigh the coming gradients by this replica's part of the global batch; a sum has no weights."""
        if not 0 <= local_examples <= global_examples or global_examples < 1:
            raise UsageError(f"a share of {local_examples} examples in a global batch of {global_examples} cannot be")
        self._divided = True
        if self.reduction == "mean":
            self._weight = self.num_replicas * local_examples / global_examples

    def clear_shares(self) -> None:
        """Let every replica weigh in alike."""
        self._divided = False
        # A sum is the mean of n times the gradients, which leaves what was summed before as it is.
        self._weight = 1.0 if self.reduction == "mean" else float(self.num_replicas)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the next backward pass outside reduces them with its own."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def take_part(self) -> None:
        """Join the others' backward pass without one of this replica's own: it has no examples.

        What was accumulated here in `no_sync` is reduced with it. Raises as backward() does.
        """
        if self.num_replicas == 1 or not self.enabled or self._accumulating:
            return
        self._meet_group()
        if self._round is not None:
            self._give_up(self._round)
        self.before_backward()
        self._round = self._new_round(lambda: self)
        self._end(self._round)

    def reset(self) -> None:
        """Forget everything in flight, after an abort or an error; gradients set aside are put back."""
        self._round = None
        self._buffers.clear()
        self._unreduced.clear()
        self._accumulating = False
        self.clear_shares()
        for tracked in self._tracked.values():
            tracked.put_back()

    def regroup(self) -> None:
        """The process group was formed anew, maybe with a new process in it: what was agreed on is void."""
        self.reset()
        self._forget_agreements()

    def _forget_agreements(self) -> None:
        # What is void for the next round still tells which parameters are to be equal.
        self._agreed_before = self._agreed or self._agreed_before
        self._agreed = []
        self._plans: dict[frozenset[int], Plan] = {}
        self._history = History()
        self._buffers = Buffers()
        for tracked in self._tracked.values():
            tracked.number = None

    # A round, from its first gradient to its end

    def _accumulated(self, tracked: _Tracked, parameter: nn.Parameter) -> None:
        """The gradient of `parameter` is in its ``.grad``, weighted."""
        if self._accumulating:
            self._unreduced[tracked] = None
            return
        round_ = self._round
        if round_ is None or round_.owner() is None:
            round_ = self._begin()
        self._mark(round_, tracked, parameter)

    def _begin(self) -> _Round:
        self._meet_group()
        if self._round is not None:
            self._give_up(self._round)
        self.before_backward()
        self.undivided_passes += not self._divided
        if self.recorder is not None:
            self.recorder.backward_begun()

        def end() -> None:
            self._end(round_)

        # Autograd lets go of the callback when its pass ends, by an exception too: then the round is broken.
        round_ = self._new_round(weakref.ref(end))
        _call_at_end_of_backward(end)
        self._round = round_
        return round_

    def _new_round(self, owner: Callable[[], object | None]) -> _Round:
        round_ = _Round(self._plan(self._history.predict()), owner)
        for i, bucket in enumerate(round_.plan.buckets):
            extra = self._tail_length() if i >= round_.plan.early else 0
            bucket.open(self._buffers, self._agreed, self._ops_for(bucket), extra)
        return round_

    def _ops_for(self, bucket: Bucket) -> CrossDeviceOps | None:
        ops = self._ops
        return ops if ops is not None and bucket.device_type == ops.member.device.type else None

    def _meet_group(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ReplicaError(
                f"replica {self.replica_id} cannot synchronise gradients: the default process group is gone; "
                "call torch.distributed.init_process_group() again, or train without it (--no-sync)"
            )
        group = dist.group.WORLD
        if group is self._group():
            return
        if dist.get_world_size() != self.num_replicas:
            raise ReplicaError(
                f"gradients are for {self.num_replicas} replicas, but the default process group has "
                f"{dist.get_world_size()}; initialise it for all replicas"
            )
        # Weakly: the group has to be able to end while nothing trains.
        self._group = weakref.ref(group)
        self._round = None
        self._forget_agreements()

    def _give_up(self, round_: _Round) -> None:
        """A backward pass ended by an exception that was caught: answer the peers, who wait for the rest."""
        round_.given_up = True
        self._end(round_)

    def _mark(self, round_: _Round, tracked: _Tracked, parameter: nn.Parameter) -> None:
        number = tracked.number
        if number is not None and not self._agreed[number].fits(parameter):
            self._agreed[number] = self._agreed[number].without_parameter()
            number = tracked.number = None
        if tracked.round is round_:
            if number is not None and round_.has_launched(number):
                raise UsageError(
                    f"parameter {tracked.name} got another gradient in the same backward pass after its bucket "
                    "was sent; with activation checkpointing of shared modules pass use_reentrant=False"
                )
            return
        tracked.round = round_
        if number is None:
            round_.unknown.append(tracked)
            return
        if is_sparse(parameter.grad) and not self._agreed[number].sparse:
            # It was dense before, so what others have is dense too.
            parameter.grad = cast(Tensor, parameter.grad).to_dense()
        round_.touched.append(number)
        bucket = round_.plan.bucket_of.get(number)
        if bucket is not None:
            round_.plan.buckets[bucket].place(number, tracked, parameter)
            round_.lacking[bucket] -= 1
            if bucket == round_.launched and not round_.lacking[bucket]:
                self._launch_ready(round_)

    def _launch_ready(self, round_: _Round) -> None:
        while round_.launched < round_.plan.early and not round_.lacking[round_.launched]:
            with torch.no_grad():
                self._launch(round_, round_.plan.buckets[round_.launched])
            round_.launched += 1

    def _launch(self, round_: _Round, bucket: Bucket, tail: Sequence[float] = ()) -> Tensor:
        ops = self._ops_for(bucket)
        flat = bucket.fill(self._agreed, tail)
        if ops is not None:
            if not self._exact:
                round_.unproven.append(flat)
            number = len(round_.works)
            if self.recorder is not None:
                self.recorder.queued(number, flat.numel() * flat.element_size())
            with for_gradients():
                round_.works.append(ops.all_reduce(ReduceOp.MEAN, flat, bucket=number))
        else:
            flat[: bucket.numel].mul_(1 / self.num_replicas)
            with for_gradients():
                round_.works.append(dist.all_reduce(flat, async_op=True))
        return flat

    def _end(self, round_: _Round) -> None:
        if self.recorder is not None:
            self.recorder.backward_computed()
        # The replicas' agreements go by torch.distributed, and wait no longer than the reductions may.
        limited = nullcontext() if self._ops is None else self._ops.limited()
        try:
            with limited, torch.no_grad():
                self._finish(round_)
        except BaseException:
            # A collective that failed may go on writing into the buffers.
            self._buffers.clear()
            raise
        finally:
            self._round = None

    def _finish(self, round_: _Round) -> None:
        if not round_.given_up:
            self._mark_unreduced(round_)
        received = self._launch_rest(round_)
        round_.wait()
        tail = _Tail.read(received.tolist(), len(self._agreed))
        if any(tail.given_up):
            self._check_given_up(tail)
            return
        if round_.unproven:
            self._check_alike(round_.unproven)
        if self.steering is not None:
            self.steering.agree(tail.steering)
        self._unreduced.clear()
        for bucket in round_.plan.buckets:
            bucket.hand_out(self._agreed, tail.used)
        new: frozenset[int] = frozenset()
        dead: frozenset[int] = frozenset()
        if tail.unknown:
            new, dead = self._agree(round_.unknown)
        used = tail.used | new
        sparse = [number for number in sorted(used) if self._agreed[number].sparse]
        late = used - round_.plan.numbers - set(sparse)
        if late:
            self._reduce_late(late)
        if sparse:
            self._reduce_sparse(sparse)
        self._history.learn(used)
        reduced = [self._agreed[number] for number in sorted(used)] if self._has_deferred else []
        if dead:
            self._renumber(dead, used)
        for agreed in reduced:
            self._call_deferred(agreed.parameter())

    def _call_deferred(self, parameter: nn.Parameter | None) -> None:
        """Call what waits for a gradient: where another replica alone had one, too."""
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in list(hooks.values()):
            if isinstance(hook, _Deferred):
                hook.hook(parameter)

    def _mark_unreduced(self, round_: _Round) -> None:
        for tracked in list(self._unreduced):
            parameter = tracked.parameter()
            if parameter is not None and parameter.grad is not None and tracked.round is not round_:
                self._mark(round_, tracked, parameter)

    def _tail_length(self) -> int:
        return _Tail.length(len(self._agreed), self.num_replicas)

    def _launch_rest(self, round_: _Round) -> Tensor:
        """Send the buckets that are left, with gaps, and the tail; returns where the tail will be."""
        tail = _Tail(
            frozenset(round_.touched),
            len(round_.unknown),
            [float(round_.given_up and i == self.replica_id) for i in range(self.num_replicas)],
            self.steering.flags() if self.steering is not None else QUIET,
        ).numbers(len(self._agreed))
        plan = round_.plan
        while round_.launched < plan.early:
            self._launch(round_, plan.buckets[round_.launched])
            round_.launched += 1
        if plan.early < len(plan.buckets):
            return self._launch(round_, plan.buckets[-1], tail)[-len(tail) :]
        alone = torch.tensor(tail, device=word_device(self._ops.member.device if self._ops else torch.device("cpu")))
        with for_gradients():
            round_.works.append(dist.all_reduce(alone, async_op=True))
        return alone

    def _check_given_up(self, tail: _Tail) -> None:
        stopped = [i for i, flag in enumerate(tail.given_up) if flag]
        if len(stopped) < self.num_replicas:
            raise PeerFailed(
                f"the backward pass of replica {_listed(stopped)} stopped halfway with an exception that was "
                "caught, so the gradients of this pass are lost and the replicas are out of step; let such an "
                "exception end the cell, on every replica"
            )

    def _reduce_late(self, numbers: frozenset[int]) -> None:
        round_ = _Round(self._cut(numbers), lambda: None)
        for bucket in round_.plan.buckets:
            bucket.open(self._buffers, self._agreed, self._ops_for(bucket), 0)
            self._launch(round_, bucket)
        round_.wait()
        if round_.unproven:
            self._check_alike(round_.unproven)
        for bucket in round_.plan.buckets:
            bucket.hand_out(self._agreed, numbers)

    def _reduce_sparse(self, numbers: list[int]) -> None:
        agreed = [self._agreed[number] for number in numbers]
        parameters = [each.parameter() for each in agreed]
        own = [None if parameter is None else parameter.grad for parameter in parameters]
        with for_gradients():
            means = averaged(own, [each.like() for each in agreed], self.num_replicas)
        for parameter, mean in zip(parameters, means, strict=True):
            if parameter is not None:
                parameter.grad = mean

    def _check_alike(self, reduced: Sequence[Tensor]) -> None:
        """Raise, on every replica alike, where an op of the user's has given them different gradients."""
        own = torch.stack([checksum(flat).cpu() for flat in reduced])
        device = word_device(reduced[0].device)
        # The largest of a number and of its opposite are opposite where all have the same.
        both = torch.cat([own, -own]).to(device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        largest, smallest = both.chunk(2)
        if not torch.equal(largest, -smallest):
            raise UsageError(
                f"{self._ops!r} gave the replicas different gradients; its `start` has to leave the same "
                "numbers on every replica: draw random numbers on one and broadcast them, or from equal seeds"
            )

    # What the replicas agree on

    def _plan(self, numbers: frozenset[int]) -> Plan:
        plan = self._plans.get(numbers)
        if plan is None:
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            plan = self._plans[numbers] = self._cut(numbers)
        return plan

    def _cut(self, numbers: frozenset[int]) -> Plan:
        return Plan.cut(numbers, self._agreed, self._first_bucket_bytes, self._bytes_per_bucket, self._exact)

    def _agree(self, unknown: list[_Tracked]) -> tuple[frozenset[int], frozenset[int]]:
        """Number the parameters that someone used for the first time; returns the new numbers, the dead."""
        self._drop_dead()
        dead = [number for number, agreed in enumerate(self._agreed) if agreed.parameter() is None]
        offer = Offer(
            tuple((*tracked.key, tuple(tracked.alive().shape), str(tracked.alive().dtype)) for tracked in unknown),
            dict(self._registered),
            frozenset(dead),
        )
        offers = _gather(offer, self.num_replicas)
        contested = {entry[0] for other in offers for entry in other.unknown if not made_alike(offers, entry[0])}
        there = _gather(self._values_of(contested), self.num_replicas) if contested else []
        mine = [keys[self.replica_id] for keys in match(offers, there)]
        new = self._compare([self._tracked.get(key) for key in mine], [f"{name}" for name, _ in mine])
        numbers = range(len(self._agreed), len(self._agreed) + len(new))
        for number, agreed in zip(numbers, new, strict=True):
            self._agreed.append(agreed)
            if agreed.tracked is not None:
                agreed.tracked.number = number
        return frozenset(numbers), frozenset.intersection(*(other.dead for other in offers))

    def _compare(self, candidates: list[_Tracked | None], names: list[str]) -> list[Agreed]:
        """Raise where shapes differ; where values differ, take those of the first replica that has them."""
        parameters = [None if tracked is None else tracked.parameter() for tracked in candidates]
        portraits = [None if parameter is None else Portrait.of(parameter) for parameter in parameters]
        differing: list[str] = []
        agreed: list[Agreed] = []
        for tracked, name, column in zip(
            candidates, names, zip(*_gather(portraits, self.num_replicas), strict=True), strict=True
        ):
            there = [(i, portrait) for i, portrait in enumerate(column) if portrait is not None]
            source, first = there[0]
            if any(portrait.form != first.form for _, portrait in there):
                raise UsageError(
                    f"replicas disagree about parameter {name}: "
                    + ", ".join(f"{portrait.form} on replica {i}" for i, portrait in there)
                    + "; create and convert modules alike on every replica"
                )
            sparse = any(portrait.sparse for _, portrait in there)
            entry = Agreed(tracked, torch.Size(first.shape), first.dtype, first.device_type, sparse)
            if any(portrait.checksum != first.checksum for _, portrait in there):
                differing.append(name)
                entry.take_values(source, self.replica_id)
            agreed.append(entry)
        if differing:
            warnings.warn(
                f"the replicas had different values in {_listed(differing[:5])}"
                + (f" and {len(differing) - 5} more parameters" if len(differing) > 5 else "")
                + "; replica 0's were taken. Build modules in the same order on every replica, from random "
                "numbers of torch, NumPy or Python",
                stacklevel=2,
            )
        return agreed

    def _values_of(self, names: set[str]) -> Values:
        """Return the checksums of the parameters of these names that are not agreed on, used or not."""
        values: Values = {}
        for tracked in self._tracked.values():
            parameter = tracked.parameter()
            if parameter is None or is_lazy(parameter) or tracked.name not in names or tracked.number is not None:
                continue
            portrait = Portrait.of(parameter)
            alike = values.setdefault((tracked.name, portrait.shape, str(portrait.dtype)), {})
            alike.setdefault(portrait.checksum, []).append(tracked.ordinal)
        return values

    def _drop_dead(self) -> None:
        dead = [tracked for tracked in self._tracked.values() if tracked.parameter() is None]
        for tracked in dead:
            del self._tracked[tracked.key]
        self._by_id = {id(tracked.parameter()): tracked for tracked in self._tracked.values()}

    def _renumber(self, dead: frozenset[int], used: frozenset[int]) -> None:
        """Let go of numbers whose parameters are gone on every replica: a model was made anew."""
        kept = [number for number in range(len(self._agreed)) if number not in dead]
        self._agreed = [self._agreed[number] for number in kept]
        renamed = {old: new for new, old in enumerate(kept)}
        for agreed in self._agreed:
            if agreed.tracked is not None and agreed.tracked.number is not None:
                agreed.tracked.number = renamed[agreed.tracked.number]
        self._plans.clear()
        self._history = History()
        self._history.learn(frozenset(renamed[number] for number in used if number in renamed))


@final
class _Tracked:
    """One parameter's two hooks, and what is known of it on this replica."""

    __slots__ = ("aside", "name", "number", "ordinal", "owner", "parameter", "round", "synchronizer")

    def __init__(self, synchronizer: GradientSynchronizer, parameter: nn.Parameter, name: str, ordinal: int) -> None:
        self.synchronizer = synchronizer
        self.parameter: Callable[[], nn.Parameter | None] = TensorWeakRef(parameter)
        self.name = name
        self.ordinal = ordinal
        self.number: int | None = None  # its place among what is agreed, the same on all replicas
        self.owner: Callable[[], object | None] | None = None
        self.aside: Tensor | None = None
        self.round: _Round | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.ordinal

    def alive(self) -> nn.Parameter:
        parameter = self.parameter()
        if parameter is None:
            raise ReplicaError(f"parameter {self.name} was deleted during its own backward pass")
        return parameter

    def before_accumulation(self, gradient: Tensor) -> None:
        # torch.autograd.grad comes here too, and goes away with `gradient`, which therefore stays as it is.
        synchronizer = self.synchronizer
        if synchronizer._weight == 1.0 or not synchronizer.enabled or self._is_left():
            return
        parameter = self.alive()
        if parameter.grad is not None:
            self.aside, parameter.grad = parameter.grad, None
            _call_at_end_of_backward(self.put_back)

    def after_accumulation(self, parameter: nn.Parameter) -> None:
        synchronizer = self.synchronizer
        if not synchronizer.enabled or self._is_left():
            return
        gradient = parameter.grad
        if gradient is None:
            return
        if synchronizer._weight != 1.0:
            self._weigh(parameter, gradient, synchronizer._weight)
        synchronizer._accumulated(self, parameter)

    def _is_left(self) -> bool:
        return self.owner is not None and self.owner() is not None

    def _weigh(self, parameter: nn.Parameter, fresh: Tensor, weight: float) -> None:
        # Without its graph, since a second backward pass through it (create_graph) is weighted by itself.
        if is_sparse(fresh):
            # Several rows of it may lie in the same memory.
            parameter.grad = fresh = fresh.detach() * weight if weight else torch.zeros_like(fresh)
        elif weight:
            fresh.detach().mul_(weight)
        else:
            fresh.detach().zero_()  # the loss of no examples is NaN, and so is NaN * 0
        if self.aside is None:
            return
        if fresh.requires_grad or is_sparse(self.aside):
            # This way round: torch adds no dense gradient to a sparse one.
            parameter.grad = fresh + self.aside
        else:
            parameter.grad = self.aside.add_(fresh)
        self.aside = None

    def put_back(self) -> None:
        parameter = self.parameter()
        if self.aside is not None and parameter is not None and parameter.grad is None:
            parameter.grad = self.aside
        self.aside = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Deferred:
    """Somebody's hook for an accumulated gradient, an optimizer's step of a single parameter for instance."""

    tracked: _Tracked
    hook: Callable[[Any], object]

    def __call__(self, parameter: nn.Parameter) -> None:
        synchronizer = self.tracked.synchronizer
        if not synchronizer.enabled or synchronizer._accumulating or self.tracked._is_left():
            self.hook(parameter)


@dataclass(slots=True, eq=False)
class _Round:
    """One backward pass on its way."""

    plan: Plan
    owner: Callable[[], object | None]  # gone when autograd has let go of this pass
    touched: list[int] = field(default_factory=list)
    unknown: list[_Tracked] = field(default_factory=list)
    works: list[Reduction | Any] = field(default_factory=list)
    unproven: list[Tensor] = field(default_factory=list)  # what ops reduced that may be no exact sum
    launched: int = 0
    given_up: bool = False
    lacking: list[int] = field(init=False)  # gradients that each bucket waits for

    def __post_init__(self) -> None:
        self.lacking = [len(bucket.numbers) for bucket in self.plan.buckets]

    def has_launched(self, number: int) -> bool:
        bucket = self.plan.bucket_of.get(number)
        return bucket is not None and bucket < self.launched

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


@final
@dataclass(frozen=True, slots=True)
class _Tail:
    """What each replica tells the others at the end of a round: a float a fact, not zero if it is so somewhere."""

    used: frozenset[int]
    unknown: float
    given_up: list[float]
    steering: list[float]

    @staticmethod
    def length(agreed: int, num_replicas: int) -> int:
        return agreed + 1 + num_replicas + len(QUIET)

    def numbers(self, agreed: int) -> list[float]:
        flags = [0.0] * agreed
        for number in self.used:
            flags[number] = 1.0
        return [*flags, float(self.unknown), *self.given_up, *self.steering]

    @staticmethod
    def read(sums: list[float], agreed: int) -> _Tail:
        used = frozenset(number for number in range(agreed) if sums[number])
        return _Tail(used, sums[agreed], sums[agreed + 1 : -len(QUIET)], sums[-len(QUIET) :])


class _Engine(Protocol):
    def queue_callback(self, callback: Callable[[], None]) -> None: ...


def _call_at_end_of_backward(callback: Callable[[], None]) -> None:
    engine: _Engine | None = getattr(Variable, "_execution_engine", None)
    if engine is None or not hasattr(engine, "queue_callback"):
        raise ReplicaError(
            f"torch {torch.__version__} does not tell when a backward pass ends, which synchronised gradients "
            "need; use torch 2.11 to 2.13, or train without synchronisation (--no-sync)"
        )
    engine.queue_callback(callback)


def _gather(value: Any, num_replicas: int) -> list[Any]:
    gathered: list[Any] = [None] * num_replicas
    dist.all_gather_object(gathered, value)
    return gathered


def _listed(things: Sequence[object]) -> str:
    words = [str(thing) for thing in things]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"
