"""Equal gradients on every replica, with no wrapper: they are complete when ``backward()`` returns.

Knows parameters, autograd's hooks and the default process group, and of modules which parameters one has. Knows
nothing of optimizers, cells or the notebook.

A *round* is the synchronisation of one backward pass:

    first gradient accumulated   history predicts the plan, the same one on all replicas
    a gradient is there          copied into its bucket (CPU: at once, while it is in the cache; GPU: with the others)
    a bucket has its gradients   reduced while the pass goes on, in order
    end of the backward pass     the buckets that still lack some follow, zeros in the gaps; then the tail
    tail received                who used what: gradients that the plan lacks go in a second set of
                                 buckets; rows of sparse gradients are gathered
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
from typing import cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mirror_nb.collectives.base import BYTES_PER_PACK, CrossDeviceOps, gathered, word_device
from mirror_nb.collectives.headers import Fold
from mirror_nb.collectives.shared_memory import ExchangeHandle
from mirror_nb.errors import PeerFailed, ReplicaError, UsageError, users_level
from mirror_nb.gradients.agreement import Agreement, Keys
from mirror_nb.gradients.buckets import REMEMBERED, Bucket, Buffers, History, Plan, for_gradients
from mirror_nb.gradients.leaves import LeftOver, Place
from mirror_nb.gradients.matching import is_sparse
from mirror_nb.gradients.proofs import check_alike, is_sum
from mirror_nb.gradients.rounds import Round, Tail
from mirror_nb.gradients.sparse_gradients import averaged
from mirror_nb.gradients.tracked import Deferred, Tracked, at_end_of_backward
from mirror_nb.readable import listed
from mirror_nb.steps.recorder import Recorder
from mirror_nb.steps.steering import QUIET, Steering
from mirror_nb.tensors.no_examples import NoExamples
from mirror_nb.values import ReduceOp

_LEAF = "optimizer's tensor"
# What is called so is known by its place in a backward pass.


@final
class GradientSynchronizer:
    """Makes the gradients of tracked parameters equal over the replicas during ``backward()``.

    ``reduction="mean"`` gives the gradient of the mean over the global batch: replicas weigh in by their
    examples (`set_shares`), equally without. ``"sum"`` adds the replicas' gradients up as they are. Buckets
    of `bytes_per_bucket` bytes are reduced while the backward pass goes on; the first one, of at most
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
        bytes_per_bucket: int = BYTES_PER_PACK,
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
        self.before_backward: Callable[[], None] = lambda: None
        # Called at the first gradient of every round, for whoever has to know that training began.
        self._ops: CrossDeviceOps | None = None
        self._exact = True
        self._mean_is_proven = False
        # Or that it is none; a user's op may have forgotten to divide.
        self.recorder: Recorder | None = None
        # Is told how each pass goes.
        self.steering: Steering | None = None
        # What this replica was told rides with its gradients.
        self._bytes_per_bucket = bytes_per_bucket
        self._first_bucket_bytes = first_bucket_bytes
        self.accumulating = False
        self._agreement = Agreement(replica_id, num_replicas)
        self._unreduced: dict[Tracked, None] = {}
        self._has_deferred = False
        # Hooks of others, which are called once the pass has ended.
        self._met_new = True
        # Nothing tracked was in the latest pass, or something for the first time.
        self._left_over = LeftOver()
        # From the latest such pass.
        self._round: Round | None = None
        self.shares: tuple[int, int] | None = None
        # Of the batch in use, or whose loop was left: this replica's examples, and all replicas'.
        self._no_examples = NoExamples()
        # Is told where this replica's share has none: torch is to bear with it.
        self.undivided_passes = 0
        # Backward passes on batches of which this replica was given no share.
        self._group: Callable[[], object | None] = lambda: None
        self._forget_agreements()
        self.clear_shares()

    # What takes part

    def track(self, parameter: nn.Parameter, name: str, module: nn.Module | None = None) -> bool:
        """Synchronise `parameter` from now on; twice is once. Frozen parameters count when they are unfrozen.

        `name` says what it is ("Linear.weight"), alike on every replica; the same name may come many times. `module`
        is what has it. Returns whether it has a gradient of before.
        """
        if self.num_replicas == 1 or self._agreement.find(parameter) is not None:
            return False
        tracked = Tracked(self, parameter, name, self._agreement.new_ordinal(name), module)
        # Lazy parameters refuse hooks through torch's function protocol; they keep them when they get values.
        with torch._C.DisableTorchFunctionSubclass():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                return False
            wanted = parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_hook(tracked.before_accumulation)
            parameter.register_post_accumulate_grad_hook(tracked.after_accumulation)
            parameter.requires_grad_(wanted)
        self._agreement.add(tracked, parameter)
        self.hooked(parameter)
        return parameter.grad is not None

    def hooked(self, parameter: Tensor) -> None:
        """Have hooks that others registered for an accumulated gradient wait until it is that of all replicas."""
        tracked = self._agreement.find(parameter)
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if tracked is None or not hooks:
            return
        for key, hook in hooks.items():
            if not isinstance(hook, Deferred) and not isinstance(getattr(hook, "__self__", None), Tracked):
                hooks[key] = Deferred(tracked, hook)
                self._has_deferred = True

    def tracks(self, parameter: Tensor) -> bool:
        """Whether the replicas have a parameter in common, which DDP may synchronise in our place."""
        return self._agreement.find(parameter) is not None

    def keys(self, parameters: Iterable[Tensor]) -> Keys:
        """Return by what the other replicas know these parameters, for `take_keys` of one that gets copies of them."""
        return self._agreement.keys(parameters)

    def take_keys(self, keys: Keys) -> None:
        """Know the copies that have arrived by what all others know their originals."""
        self._agreement.take_keys(keys)

    def synchronized(self) -> dict[str, nn.Parameter]:
        """Return the parameters that all replicas have synchronised by now, in an order that is the same on all.

        By the names under which they were tracked, "Linear.weight", the further ones of a name "Linear.weight (2)".
        """
        return self._agreement.synchronized()

    def leave_to(self, owner: object, parameters: Iterable[nn.Parameter]) -> None:
        """Leave `parameters` alone while `owner`, which synchronises them itself, is alive."""
        for parameter in parameters:
            tracked = self._agreement.find(parameter)
            if tracked is not None:
                tracked.owner = weakref.ref(owner)

    @property
    def weight(self) -> float | None:
        """This replica's part of what all replicas make together; None where each is by itself now."""
        alone = self.num_replicas == 1 or not self.enabled or self.accumulating or not dist.is_initialized()
        return None if alone else self.factor / self.num_replicas

    def times_an_equal_part(self) -> float:
        """Return how many times an equal part this replica's loss counts; 1 where gradients are added up."""
        return self.factor if self.enabled and self.reduction == "mean" else 1.0

    def use(self, ops: CrossDeviceOps, *, bytes_per_bucket: int | None = None) -> None:
        """Reduce by these cross-device ops, bound to this replica, from the next backward pass on.

        Every replica has to make the same call between the same passes. Without it torch's own all-reduce serves.
        """
        self._ops = ops
        self._exact, self._mean_is_proven = ops.exact, False
        self._bytes_per_bucket = bytes_per_bucket or self._bytes_per_bucket
        self._buffers.clear()
        self._plans.clear()

    # How it takes part

    def set_shares(self, local_examples: int, global_examples: int) -> None:
        """Weigh the coming gradients by this replica's part of the global batch; a sum has no weights."""
        if not 0 <= local_examples <= global_examples or global_examples < 1:
            raise UsageError(f"a share of {local_examples} examples in a global batch of {global_examples} cannot be")
        self._divided = True
        self.shares = local_examples, global_examples
        self._no_examples.follow(not local_examples)
        if self.reduction == "mean":
            self.factor = self.num_replicas * local_examples / global_examples

    def clear_shares(self) -> None:
        """Let every replica weigh in alike."""
        self._divided = False
        self.shares = None
        self._no_examples.follow(False)
        # A sum is the mean of n times the gradients, which leaves what was summed before as it is.
        self.factor = 1.0 if self.reduction == "mean" else float(self.num_replicas)

    def leave_shares(self) -> None:
        """Let every replica weigh in alike, and know the batch still: an error may have ended its loop."""
        shares = self.shares
        self.clear_shares()
        self.shares = shares

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the next backward pass outside reduces them with its own."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    def take_part(self) -> None:
        """Join the others' backward pass without one of this replica's own: it has no examples.

        What was accumulated here in `no_sync` is reduced with it. Raises as backward() does.
        """
        if self.num_replicas == 1 or not self.enabled or self.accumulating:
            return
        self._meet_group()
        if self._round is not None:
            self._give_up(self._round)
        self.before_backward()
        self._round = self._new_round(lambda: self)
        self._end(self._round)

    def passed(self, outputs: Iterable[object]) -> None:
        """A backward pass of these has ended: look for what nobody tracks, if it may hold that."""
        look, self._met_new = self._met_new, True
        if look and self.weight is not None:
            self._left_over.look(outputs, self.tracks)

    def track_all(self, tensors: Iterable[Tensor], name: str) -> None:
        """Track what an optimizer has got, gradients of passes before included; every replica calls it.

        Raises as backward() does.
        """
        new = [cast(nn.Parameter, tensor) for tensor in tensors if not self.tracks(tensor)]
        # Of one for each tensor, those of a set say, the optimizers may be made in another order on each replica.
        place = self._left_over.place(new[0]) if len(new) == 1 and self.weight is not None else None
        late = new if place else [parameter for parameter in new if self.track(parameter, name)]
        if late and self.weight is not None:
            self._catch_up(late, name, place)

    def _catch_up(self, parameters: list[nn.Parameter], name: str, place: Place | None) -> None:
        """Reduce this replica's own gradients of a backward pass in which nobody tracked these.

        `place`: of the one that is yet to be tracked. With it those are that optimizers elsewhere have got first.
        """
        self._meet_group()
        limited = nullcontext() if self._ops is None else self._ops.limited()
        try:
            with limited, torch.no_grad():
                found = self._left_over.at(gathered(place, self.num_replicas))
                for parameter in found or parameters:
                    self.track(parameter, _LEAF if found else name)
                late = [one for one in map(self._agreement.find, found or parameters) if one is not None]
                for tracked in late:
                    tracked.weigh_late()
                new, _ = self._agreement.agree(late, ())
                sparse = [number for number in sorted(new) if self._agreement.agreed[number].sparse]
                self._reduce_late(new - set(sparse))
                if sparse:
                    self._reduce_sparse(sparse)
        except BaseException:
            self._buffers.renew()
            raise

    def reset(self) -> None:
        """Forget everything in flight, after an abort or an error."""
        self._round = None
        self._buffers.clear()
        self._unreduced.clear()
        self._left_over.clear()
        self.accumulating = False
        self.clear_shares()

    def regroup(self) -> None:
        """The process group was formed anew, maybe with a new process in it: what was agreed on is void."""
        self.reset()
        self._forget_agreements()

    def _forget_agreements(self) -> None:
        self._agreement.forget()
        self._plans: dict[frozenset[int], Plan] = {}
        self._history = History()
        self._buffers = Buffers()

    # A round, from its first gradient to its end

    def accumulated(self, tracked: Tracked, parameter: nn.Parameter) -> None:
        """The gradient of `parameter` is in its ``.grad``, weighted."""
        if self.accumulating:
            if tracked.number is not None or not tracked.alone:
                self._unreduced[tracked] = None
            return
        round_ = self._round
        if round_ is None or round_.owner() is None:
            round_ = self._begin()
        self._mark(round_, tracked, parameter)

    def _begin(self) -> Round:
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
        at_end_of_backward(end)
        self._round = round_
        return round_

    def _new_round(self, owner: Callable[[], object | None]) -> Round:
        round_ = Round(self._plan(self._history.predict()), owner)
        for i, bucket in enumerate(round_.plan.buckets):
            extra = self._tail_length() if i >= round_.plan.early else 0
            bucket.open(self._buffers, self._agreement.agreed, self._ops_for(bucket), extra)
        return round_

    def _ops_for(self, bucket: Bucket) -> CrossDeviceOps | None:
        ops = self._ops
        return ops if ops is not None and bucket.device_type == ops.member.device.type else None

    def _meet_group(self) -> None:
        if not dist.is_initialized():
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

    def _give_up(self, round_: Round) -> None:
        """A backward pass ended by an exception that was caught: answer the peers, who wait for the rest."""
        round_.given_up = True
        self._end(round_)

    def _mark(self, round_: Round, tracked: Tracked, parameter: nn.Parameter) -> None:
        number = tracked.number
        if number is not None and not self._agreement.agreed[number].fits(parameter):
            self._agreement.agreed[number] = self._agreement.agreed[number].without_parameter()
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
            self._check_place(tracked, parameter)
            round_.unknown.append(tracked)
            return
        if is_sparse(parameter.grad) and not self._agreement.agreed[number].sparse:
            # It was dense before, so what others have is dense too.
            parameter.grad = cast(Tensor, parameter.grad).to_dense()
        round_.touched.append(number)
        bucket = round_.plan.bucket_of.get(number)
        if bucket is not None:
            round_.plan.buckets[bucket].place(number, tracked, parameter)
            round_.lacking[bucket] -= 1
            if bucket == round_.launched and not round_.lacking[bucket]:
                self._launch_ready(round_)

    def _check_place(self, tracked: Tracked, parameter: nn.Parameter) -> None:
        own = None if self._ops is None else self._ops.member.device
        if own is not None and own.type == parameter.device.type == "cuda" and own != parameter.device:
            # On another replica's GPU, NCCL would wait for ever.
            raise UsageError(
                f"parameter {tracked.name} is on {parameter.device}, but replica {self.replica_id} computes on {own}; "
                f"where the code says {str(parameter.device)!r}, take 'cuda' or the strategy's `device`: each replica "
                "has its own"
            )

    def _launch_ready(self, round_: Round) -> None:
        while round_.launched < round_.plan.early and not round_.lacking[round_.launched]:
            with torch.no_grad():
                self._launch(round_, round_.plan.buckets[round_.launched])
            round_.launched += 1

    def _launch(self, round_: Round, bucket: Bucket, tail: Sequence[float] = ()) -> Tensor:
        ops = self._ops_for(bucket)
        flat = bucket.fill(self._agreement.agreed, tail)
        if ops is not None:
            if not self._exact:
                if not (self._mean_is_proven or round_.unproven):
                    round_.given = flat.clone()
                round_.unproven.append(flat)
            number = len(round_.works)
            nbytes = flat.numel() * flat.element_size()
            serial = self.recorder.queued(number, nbytes) if self.recorder is not None else 0
            with for_gradients(self._ops):
                round_.works.append(ops.all_reduce(ReduceOp.MEAN, flat, bucket=number, serial=serial))
        else:
            flat[: bucket.numel].mul_(1 / self.num_replicas)
            with for_gradients(self._ops):
                round_.works.append(dist.all_reduce(flat, async_op=True))
        return flat

    def _end(self, round_: Round) -> None:
        if self.recorder is not None:
            self.recorder.backward_computed()
        # The replicas' agreements go by torch.distributed, and wait no longer than the reductions may.
        limited = nullcontext() if self._ops is None else self._ops.limited()
        try:
            with limited, torch.no_grad():
                self._finish(round_)
        except BaseException:
            # A collective that failed may go on writing into the buffers. To allocate others all would have to come.
            self._buffers.renew()
            raise
        finally:
            self._round = None

    def _finish(self, round_: Round) -> None:
        left = [] if round_.given_up else self._mark_unreduced(round_)
        received = self._launch_rest(round_)
        round_.wait()
        tail = Tail.read(received.tolist(), len(self._agreement.agreed))
        if any(tail.given_up):
            self._check_given_up(tail)
            return
        if round_.unproven:
            self._check_unproven(round_)
        if self.steering is not None:
            self.steering.agree(tail.steering)
        self._unreduced.clear()
        for bucket in round_.plan.buckets:
            bucket.hand_out(self._agreement.agreed, tail.used)
        new: frozenset[int] = frozenset()
        dead: frozenset[int] = frozenset()
        if tail.unknown:
            new, dead = self._agreement.agree(round_.unknown, left)
            for tracked in left:
                tracked.alone = tracked.number is None
        used = tail.used | new
        sparse = [number for number in sorted(used) if self._agreement.agreed[number].sparse]
        late = used - round_.plan.numbers - set(sparse)
        if late:
            self._reduce_late(late)
        if sparse:
            self._reduce_sparse(sparse)
        self._history.learn(used)
        self._met_new = bool(tail.unknown)
        reduced = [self._agreement.agreed[number] for number in sorted(used)] if self._has_deferred else []
        if dead:
            renamed = self._agreement.let_go(dead)
            self._plans.clear()
            self._history = History()
            self._history.learn(frozenset(renamed[number] for number in used if number in renamed))
        for agreed in reduced:
            self._call_deferred(agreed.parameter())

    def _call_deferred(self, parameter: nn.Parameter | None) -> None:
        """Call what waits for a gradient: where another replica alone had one, too."""
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in list(hooks.values()):
            if isinstance(hook, Deferred):
                hook.hook(parameter)

    def _mark_unreduced(self, round_: Round) -> list[Tracked]:
        """Have what was accumulated in `no_sync` take part; return what of that is not agreed on."""
        unknown = len(round_.unknown)
        for tracked in list(self._unreduced):
            parameter = tracked.parameter()
            if parameter is not None and parameter.grad is not None and tracked.round is not round_:
                self._mark(round_, tracked, parameter)
        return round_.unknown[unknown:]

    def _tail_length(self) -> int:
        return Tail.length(len(self._agreement.agreed), self.num_replicas)

    def _launch_rest(self, round_: Round) -> Tensor:
        """Send the buckets that are left, with gaps, and the tail; returns where the tail will be."""
        tail = Tail(
            frozenset(round_.touched),
            len(round_.unknown),
            [float(round_.given_up and i == self.replica_id) for i in range(self.num_replicas)],
            self.steering.flags() if self.steering is not None else QUIET,
        ).numbers(len(self._agreement.agreed))
        plan = round_.plan
        while round_.launched < plan.early:
            self._launch(round_, plan.buckets[round_.launched])
            round_.launched += 1
        if plan.early < len(plan.buckets):
            return self._launch(round_, plan.buckets[-1], tail)[-len(tail) :]
        return self._send_alone(round_, tail)

    def _send_alone(self, round_: Round, tail: list[float]) -> Tensor:
        ops = self._ops
        own = None if ops is None else ops.own_fabric
        with for_gradients(ops):
            if own is not None:
                # Not by torch's group, which takes another replica's call for this one, or waits without a word.
                alone = torch.tensor(tail, device="cpu")
                round_.works.append(ExchangeHandle(own, own.all_reduce(alone, Fold.SUM)))
            else:
                alone = torch.tensor(tail, device=word_device(ops.member.device if ops else torch.device("cpu")))
                round_.works.append(dist.all_reduce(alone, async_op=True))
        return alone

    def _check_given_up(self, tail: Tail) -> None:
        stopped = [i for i, flag in enumerate(tail.given_up) if flag]
        if len(stopped) < self.num_replicas:
            raise PeerFailed(
                f"the backward pass of replica {listed(stopped)} stopped halfway with an exception that was "
                "caught, so the gradients of this pass are lost and the replicas are out of step; let such an "
                "exception end the cell, on every replica"
            )

    def _reduce_late(self, numbers: frozenset[int]) -> None:
        round_ = Round(self._cut(numbers), lambda: None)
        for bucket in round_.plan.buckets:
            bucket.open(self._buffers, self._agreement.agreed, self._ops_for(bucket), 0)
            self._launch(round_, bucket)
        round_.wait()
        if round_.unproven:
            self._check_unproven(round_)
        for bucket in round_.plan.buckets:
            bucket.hand_out(self._agreement.agreed, numbers)

    def _reduce_sparse(self, numbers: list[int]) -> None:
        agreed = [self._agreement.agreed[number] for number in numbers]
        parameters = [each.parameter() for each in agreed]
        own = [None if parameter is None else parameter.grad for parameter in parameters]
        with for_gradients(self._ops):
            means = averaged(own, [each.like() for each in agreed], self.num_replicas)
        for parameter, mean in zip(parameters, means, strict=True):
            if parameter is not None:
                parameter.grad = mean

    def _check_unproven(self, round_: Round) -> None:
        """Look at what an op of the user's has made; every replica alike."""
        assert self._ops is not None
        check_alike(self._ops, round_.unproven)
        if round_.given is None:
            return
        summed = is_sum(round_.given, round_.unproven[0])
        self._mean_is_proven = summed is not None
        if summed and self.replica_id == 0:
            warnings.warn(
                f"{self._ops!r} left the sum of the gradients where its `start` was asked for their mean: they are "
                f"{self.num_replicas} times as large as on one device; divide by `self.member.num_replicas` where "
                "`op` is ReduceOp.MEAN",
                stacklevel=users_level(),
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
        # Whoever asks for smaller buckets than the first one usually is means that one, too.
        first = min(self._first_bucket_bytes, self._bytes_per_bucket)
        return Plan.cut(numbers, self._agreement.agreed, first, self._bytes_per_bucket, self._exact)
