"""Training on one replica: backward with its part of the global batch's loss, the optimizer's steps, what to keep.

Each replica goes backward with its part of the loss times the number of replicas: the plain mean of the gradients is
then exactly one device's, whatever the sizes of the shares. Knows optimizers, schedulers, gradient scaling and the
replica's seat; knows no epochs to come, no callbacks and no files.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from mirror_nb.data.batches import map_leaves, tensors_of
from mirror_nb.errors import UsageError
from mirror_nb.gradients.matching import is_sparse
from mirror_nb.mirroring import networks
from mirror_nb.replica.decisions import OfAll
from mirror_nb.replica.whole import whole
from mirror_nb.strategies.seat import Seat
from mirror_nb.training.batch_norm import BatchNorms, exact_batch_norm
from mirror_nb.training.ledger import Landmark, Page
from mirror_nb.training.loop import Task, Totals
from mirror_nb.training.scoring import Scoring
from mirror_nb.training.shares import Share

if TYPE_CHECKING:
    from mirror_nb.training.model import Model


@final
@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where one replica's Training was left by a failure of another."""

    updates: int
    # Steps of the optimizer that its weights have had by its own account.
    scheduled: str
    # The epoch for whose end its scheduler has gone on.
    landmark: Landmark | None
    # Where it stood after the last of them; None: it has done none, and begun no epoch.
    broken: bool
    # A step that was broken off has changed the weights: it cannot be done again.
    totals: Totals
    # With what that step has added.
    scaler: dict[str, Any] | None
    feed: dict[str, Any]
    feed_is_behind: bool
    # The epoch that it is in has not been closed.
    stream: tuple[int, int] | None
    # See `Job._reached`: at the landmark.
    shared: dict[str, Any]
    # Random numbers that all replicas have in common.


@final
class Buffers:
    """A network's buffers, running statistics say, as they were before a step."""

    def __init__(self, model: nn.Module, *, written: bool = False) -> None:
        """`written`: all of them count as written to."""
        self._buffers = buffers = list(model.buffers())
        statistics = {id(each) for each in networks.averaged_statistics(model).values()}
        self._silent = {i for i, buffer in enumerate(buffers) if id(buffer) in statistics}
        # torch's normalisation writes to them and does not count it.
        self.shapeless = {i for i, buffer in enumerate(buffers) if is_lazy(buffer)}
        # Lazy layers': left out until the first forward pass.
        self._kept = [buffer if is_lazy(buffer) else buffer.detach().clone() for buffer in buffers]
        self._versions = [buffer._version for buffer in buffers]
        self._first = [-1] * len(buffers) if written else list(self._versions)

    def are_of(self, model: nn.Module) -> bool:
        """Whether the network has these, and no others."""
        return list(map(id, self._buffers)) == list(map(id, model.buffers()))

    def keep(self) -> None:
        """Remember what they are now."""
        self._copy(self._kept, self._buffers)

    def put_back(self) -> None:
        """Make them what they were at the last `keep`."""
        self._copy(self._buffers, self._kept)

    def changed(self) -> dict[int, Tensor]:
        """Return those that were ever written to, by their number."""
        return {i: self._buffers[i] for i in self._written_since(self._first)}

    def _written_since(self, versions: list[int]) -> list[int]:
        pairs = enumerate(zip(self._buffers, versions, strict=True))
        written = [i for i, (buffer, then) in pairs if buffer._version != then or i in self._silent]
        return [i for i in written if i not in self.shapeless]

    def _copy(self, to: list[Tensor], source: list[Tensor]) -> None:
        # Those alone that were written to: masks may be large, and stay.
        written = self._written_since(self._versions)
        if written:
            with torch.no_grad():
                # Of mixed dtypes it copies each by itself.
                for dtype in {source[i].dtype for i in written}:
                    alike = [i for i in written if source[i].dtype is dtype]
                    torch._foreach_copy_([to[i] for i in alike], [source[i] for i in alike])
            for i in written:
                self._versions[i] = self._buffers[i]._version


@final
class Training(Scoring):
    """Epochs of a fit."""

    _step_name = "training_step"
    trains = True

    def __init__(
        self, seat: Seat, token: str, model: Model, task: Task, optimizer: Optimizer | None, scheduler: Any
    ) -> None:
        super().__init__(seat, model, task)
        settings = task.settings
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._by_step = scheduler is not None and settings.scheduler_interval == "step"
        self._group = settings.accumulate_steps
        self._grouped = 0
        # Global batches whose gradients wait for the optimizer.
        self._norms: BatchNorms | None = None
        self._scaler = torch.amp.GradScaler(self._device.type) if settings.precision == "fp16" else None
        self._root: tuple[float, Tensor] = (0.0, torch.zeros((), device="cpu"))
        # What the latest backward pass began with: as a number, and as a tensor.
        self._noise = task.seed
        # What every step's random numbers are drawn from, so that a step can be done again; None: from nothing new.
        self._page = None if task.ledger is None else Page(task.ledger, seat.replica_id, seat.num_replicas)
        self._run = token
        self._landmarks: dict[int, Landmark] = {}
        # By steps of the optimizer modulo 2: of the latest step and of the one that is about to be done.
        self._buffers = Buffers(model if task.recovers else nn.Module())
        self._buffers_of = model._updates
        # They were kept after so many steps of the optimizer.
        self._grown = 0
        # How often the network has got other parts meanwhile.
        self._versions = 0
        # Of the parameters, likewise.
        self._steps_by_itself = optimizer is None
        # The model's training_step has optimizers of its own.
        self._closure = isinstance(optimizer, torch.optim.LBFGS)
        if self._closure and not hasattr(optimizer, "_params"):
            # Its pickle leaves out what its constructor looked up (torch 2.13).
            optimizer.__dict__.update(_params=optimizer.param_groups[0]["params"], _numel_cache=None)  # type: ignore[union-attr]
        if optimizer is not None:
            # What the user's own lines left in them belongs to no step of this training.
            optimizer.zero_grad()
        self._sample: Share | None = None
        # A full one, and how long the latest steps took, ms: for `trials`.
        self._durations: deque[float] = deque(maxlen=64)
        self._check()

    def _check(self) -> None:
        settings = self.task.settings
        if self._steps_by_itself and self._own_step is None:
            raise UsageError("the model has no optimizer: give compile(optimizer=...)")
        if self._closure and (settings.accumulate_steps > 1 or self._scaler is not None):
            raise UsageError("LBFGS goes over each batch several times; it takes no accumulate_steps and no fp16")

    @contextlib.contextmanager
    def _conditions(self) -> Iterator[None]:
        self._look_again()
        self._model.train()
        # Without all_reduce for one replica: its statistics are the global batch's.
        all_reduce = self._seat.add_up if self._seat.num_replicas > 1 else None
        normalized = exact_batch_norm(
            self._model, synchronize=self.task.settings.sync_batch_norm, all_reduce=all_reduce
        )
        with self._seat.averaging(), normalized as self._norms, torch.enable_grad():
            yield

    # ------------------------------------------------------------------ so that a step can be done again

    def _next(self) -> tuple[Share | None, bool]:
        self._begin_step()
        return super()._next()

    def _begin_step(self) -> None:
        if self._noise is not None and self._seat.num_replicas > 1:
            self._seat.plant(_mixed(self._noise, self._epoch, self.step))
        if self._grouped or not self.task.recovers:
            return
        if self.step == 0:
            # Since the last step of the epoch before, replicas may have averaged their statistics.
            self._landmark(self.step, self.examples, self._model._updates)
        self._keep_buffers()
        if self._steps_by_itself or self._closure:
            self._versions = self._parameters_version()

    def _keep_buffers(self) -> None:
        self._buffers_of = self._model._updates
        self._buffers.keep()

    def _parameters_version(self) -> int:
        return sum(parameter._version for parameter in self._model.parameters())

    def _landmark(self, step: int, examples: int, updates: int | None = None) -> None:
        """Write down where the next step of the optimizer will lead, before the others have this replica's part."""
        if not self.task.recovers:
            return
        updates = self._model._updates + 1 if updates is None else updates
        landmark = self._landmarks[updates % 2] = Landmark(self._run, updates, self._epoch, step, self._grown)
        self._write(landmark, examples)

    def _write(self, landmark: Landmark, examples: int) -> None:
        if self._page is not None and not self._page.write(landmark, self._totals(examples), self._buffers.changed()):
            # Nor will it be smaller in a later step. The others' stand for it, should this replica die.
            self._page = None

    @property
    def _here(self) -> Landmark | None:
        """What was written down of the latest step of the optimizer; None: it has done none, and begun no epoch."""
        landmark = self._landmarks.get(self._model._updates % 2)
        return landmark if landmark is not None and landmark.updates == self._model._updates else None

    def _look_again(self) -> None:
        """A callback may have given the network other parts, with buffers of other numbers."""
        if not self.task.recovers or self._buffers.are_of(self._model):
            return
        self._buffers = Buffers(self._model, written=True)
        self._grown += 1
        here = self._here
        if here is not None:
            self._landmarks[here.updates % 2] = here._replace(grown=self._grown)
            self.averaged()

    def averaged(self) -> None:
        here = self._here
        # Batches that wait for the optimizer are done again, with the statistics of before.
        if here is not None and not self._grouped:
            self._write(here, self.examples)

    def whereabouts(self) -> Whereabouts:
        """Return where this replica was left."""
        updates, here = self._model._updates, self._here
        steps_inside = self._steps_by_itself or self._closure
        with self._seat.averaging(), self._seat.shared_randomness():
            shared = self._seat.random_state()
        return Whereabouts(
            updates=updates,
            scheduled=self._model._scheduled,
            landmark=here,
            broken=steps_inside and self._buffers_of == updates and self._versions != self._parameters_version(),
            totals=self._totals(),
            scaler=None if self._scaler is None else self._scaler.state_dict(),
            feed=self._feed.state(),
            feed_is_behind=self._shares is not None and self._feed.num_batches is not None,
            stream=self._reached(here.step if here is not None and here.epoch == self._epoch else 0),
            shared=shared,
        )

    def step_back(self, updates: int) -> None:
        """Undo what a step that was broken off, after so many of the optimizer, did to the buffers."""
        if self._buffers_of == updates:
            self._buffers.put_back()

    def keep(self) -> None:
        """All is now as a step that begins here will find it. Called again after each attempt to go on from here."""
        self._keep_buffers()
        self._versions = self._parameters_version()

    # ------------------------------------------------------------------ one step

    def _take(self, share: Share, last: bool) -> None:
        began = time.perf_counter()
        self._do_step(share, last)
        self._durations.append((time.perf_counter() - began) * 1000)
        if self._sample is None and share.examples * self._seat.num_replicas >= share.global_examples:
            self._sample = share

    def _do_step(self, share: Share, last: bool) -> None:
        if self._steps_by_itself:
            self._let_it_step(share)
        elif self._closure:
            self._step_with_closure(share)
        else:
            complete = last or self._grouped + 1 == self._group
            if complete:
                self._go_backward(share, complete)
            else:
                with self._seat.no_sync():
                    self._go_backward(share)
            self._grouped += 1
            if complete:
                self._prepare_gradients()
                self._apply()
            else:
                self.step += 1

    def _go_backward(self, share: Share, complete: bool = False) -> tuple[Tensor, int]:
        """Return this share's part of the loss, a dividend and a divisor; its gradients are in the parameters.

        `complete`: a step of the optimizer follows.
        """
        if not share.examples:
            return self._stand_by(share, complete)
        with self._autocast():
            value, by, outputs = self._loss(share)
        self._measure(outputs, share)
        self._leave_landmark(share, complete)
        factor = self._seat.num_replicas / by
        if self._scaler is None:
            # 20 µs less than dividing and multiplying the loss, which autograd has to go back through.
            value.backward(self._root_gradient(value, factor))
        else:
            self._scaler.scale(value * factor).backward()
        # Of this share's own examples: a part of the mean over all, made whole.
        own = share.global_examples / (share.examples * by)
        self._record(value.detach() * own)
        return value.detach(), by

    def _root_gradient(self, value: Tensor, factor: float) -> Tensor:
        kept, root = self._root
        if kept != factor or root.dtype != value.dtype or root.device != value.device:
            root = torch.full_like(value, factor, requires_grad=False)
            self._root = (factor, root)
        return root

    def _leave_landmark(self, share: Share, complete: bool) -> None:
        """Before this replica's part goes out, and after its statistics are those of the step."""
        if complete:
            if self._buffers.shapeless:
                self._buffers = Buffers(self._model, written=True)
            self._landmark(self.step + 1, self.examples + share.global_examples)

    def _take_shape(self, share: Share) -> None:
        assert self._norms is not None
        # Where statistics are added up on the way, it is gone through with the others.
        if not self._norms.synchronizes:
            with self._norms.absent(), self._autocast():
                super()._take_shape(share)

    def _stand_by(self, share: Share, complete: bool) -> tuple[Tensor, int]:
        """Take part in what the others do together, with no examples."""
        zero = torch.zeros((), device=self._device)
        if self._scaler is not None:
            # It makes its scale with the first loss.
            self._scaler.scale(zero)
        assert self._norms is not None
        if not self._norms.synchronizes:
            self._without_examples()
            self._leave_landmark(share, complete)
            self._seat.take_part()
            return zero, 1
        # Statistics of the global batch are added up on the way through the network, there and back. What comes of it
        # weighs nothing, also where the network makes no numbers of one example of zeros (a logarithm).
        with self._norms.absent(), self._seat.weighed(0, share.global_examples), self._autocast():
            outputs = self._dry_run(share)
            self._without_examples()
            learning = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
            self._leave_landmark(share, complete)
            sum((tensor.sum() * 0 for tensor in learning), zero).backward()
        return zero, 1

    def _prepare_gradients(self) -> None:
        """Gradients of several batches become their mean; then they are clipped, reduced as they are."""
        settings, optimizer = self.task.settings, self._optimizer
        assert optimizer is not None
        if self._grouped == 1 and settings.clip_value is None and settings.clip_norm is None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._grouped > 1:
            torch._foreach_div_([p.grad for p in parameters], float(self._grouped))
        if settings.clip_value is None and settings.clip_norm is None:
            return
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        if settings.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, settings.clip_value)
        if settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, settings.clip_norm)

    @whole
    def _apply(self) -> None:
        assert self._optimizer is not None
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad()
        self._count()

    def _count(self) -> None:
        if self._by_step:
            self._scheduler.step()
        self._grouped = 0
        self.step += 1
        self._model._updates += 1

    def _end_early(self) -> None:
        super()._end_early()
        if self._grouped:
            # No batch follows that would reduce what was accumulated.
            self._landmark(self.step, self.examples)
            self._seat.take_part()
            self._prepare_gradients()
            self._apply()
            self.step -= 1

    def _let_it_step(self, share: Share) -> None:
        """The model goes backward and steps by itself: with no examples too, for it may do so several times."""
        with self._seat.weighed(share.examples, share.global_examples), self._autocast():
            value = self._loss_of_own_step(share)
        if share.examples:
            self._record(value.detach() * (share.global_examples / share.examples))
            self._loss_sum.add_(value.detach(), alpha=share.global_examples)
            self._weight += share.examples
        self._leave_landmark(share, complete=True)
        self._count()

    def _step_with_closure(self, share: Share) -> None:
        """Let an optimizer that asks for the loss again and again have it, the same one on all replicas."""
        optimizer = self._optimizer
        assert optimizer is not None

        def closure() -> Tensor:
            optimizer.zero_grad()
            self._grouped = 1
            # A share without examples has a loss of no dtype of its own.
            value, by = self._go_backward(share, complete=True)
            total = self._seat.add_up(value.double() / by)
            self._prepare_gradients()
            self._counting = False
            return total

        try:
            self._step_by(closure)
        finally:
            self._counting = True

    @whole
    def _step_by(self, closure: Callable[[], Tensor]) -> None:
        assert self._optimizer is not None
        self._optimizer.step(closure)  # type: ignore[arg-type]
        self._optimizer.zero_grad()
        self._count()

    # ------------------------------------------------------------------ trials

    @property
    def seat(self) -> Seat:
        """The replica that trains."""
        return self._seat

    @property
    def model(self) -> Model:
        """What is trained."""
        return self._model

    @property
    def optimizer(self) -> Optimizer | None:
        """What trains it; None: the model's own step does."""
        return self._optimizer

    def typical_step_ms(self) -> float | None:
        """Return the median time of the latest steps without loading; None where a step cannot be tried by itself."""
        settings = self.task.settings
        if (
            self._device.type != "cpu"
            or self._sample is None
            or self._own_step is not None
            or self._steps_by_itself
            or self._closure
            or self._scaler is not None
            or self._group > 1
            or settings.compile
            or settings.sync_batch_norm
        ):
            return None
        return statistics.median(self._durations)

    def try_pass(self, shares: int) -> None:
        """Go forward and backward with so many times this replica's share, and forget it.

        Statistics and random numbers go on: whoever tries puts them back.
        """
        share = self._sample
        assert share is not None
        self._model.train()
        inputs, targets, weights = map_leaves(
            (share.inputs, share.targets, share.sample_weight),
            lambda leaf: torch.cat([leaf] * shares) if isinstance(leaf, Tensor) and shares > 1 else leaf,
        )
        with torch.enable_grad():
            with self._autocast():
                outputs = self._call(inputs)
                examples = share.examples * shares
                loss = self._objective(outputs, targets, weights, self.task.class_weight, examples=examples)
            loss.numerator.sum().backward()
        for parameter in self._model.parameters():
            parameter.grad = None

    # ------------------------------------------------------------------ between epochs, and elsewhere

    def end_epoch(self, mark: str, monitored: float | None) -> None:
        """Let the scheduler go on, if it goes by epochs; once for each `mark`."""
        if self._scheduler is None or self._by_step or self._model._scheduled == mark:
            return
        # On the model: a replica that is filled with another's gets the scheduler and this together.
        self._model._scheduled = mark
        if not isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._scheduler.step()
        elif monitored is not None:
            self._scheduler.step(OfAll(monitored))

    def state(self, with_optimizer: bool) -> dict[str, Any]:
        """Return where this replica stands; what is equal on all comes from replica 0 alone.

        `with_optimizer`: its state and the scheduler's, too, which may be large.
        """
        with self._seat.averaging():
            random = self._seat.random_state()
            with self._seat.shared_randomness():
                shared = self._seat.random_state()
        own = {"random": random, "totals": self._totals().plain()}
        gradients = self._waiting_gradients()
        if self._seat.replica_id:
            return own
        return {
            **own,
            **(states_of(self._optimizer, self._scheduler) if with_optimizer else {}),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "feed": self._feed.state(),
            "stream": self._reached(self.step),
            "noise": self._noise,
            "shared": shared,
            "grouped": self._grouped,
            "gradients": gradients,
        }

    def _waiting_gradients(self) -> list[Tensor | None]:
        """Return the mean over the replicas of what was accumulated since the optimizer's last step."""
        if not self._grouped or self._optimizer is None:
            return []
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        forms = [[p.grad is not None for p in parameters], [is_sparse(p.grad) for p in parameters]]
        there = self._seat.add_up(torch.tensor(forms, dtype=torch.int64, device="cpu")).tolist()
        found: list[Tensor | None] = []
        for parameter, somewhere, sparse in zip(parameters, *there, strict=True):
            if sparse:
                found.append(self._mean_of_rows(parameter.grad))
                continue
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            found.append(self._seat.add_up(mine).div_(self._seat.num_replicas).cpu() if somewhere else None)
        return found

    def _mean_of_rows(self, gradient: Tensor | None) -> Tensor:
        """Return the mean of gradients that are sparse on some replica; others may have other rows, or a dense one."""
        own = None if gradient is None else gradient.cpu()
        # A dense one takes a sparse one, and not the other way round.
        shares = sorted((share for share in self._seat.collect(own) if share is not None), key=is_sparse)
        total: Tensor = sum(shares[1:], shares[0])
        return total / self._seat.num_replicas

    def _set_random_states(self, states: dict[Any, Any]) -> None:
        seat = self._seat
        with seat.averaging():
            if states.get("shared") is not None:
                with seat.shared_randomness():
                    seat.set_random_state(states["shared"])
            # One that was not there when they were taken goes on from its seed.
            if states.get(seat.replica_id) is not None:
                seat.set_random_state(states[seat.replica_id])

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state`: that of replica 0 of the other fit, with "random" of all its replicas by id."""
        load_states(self._optimizer, self._scheduler, state)
        if self._scaler is not None and state.get("scaler"):
            self._scaler.load_state_dict(state["scaler"])
        if state.get("position") is None:
            return
        position = state["position"]
        self._feed.load_state(position["feed"])
        self._feed_is_behind = position.get("feed_is_behind", False)
        self.step, self._resumed = position["step"], position.get("epoch")
        # Other data begin anew.
        if position.get("stream") is not None and position["feed"]["sizes"] == self._feed.sizes():
            begun, batches = position["stream"]
            self._stream = begun, batches - self.step
        if position.get("noise") is not None:
            self._noise = position["noise"]
        self._set_random_states(position["random"])
        self._grouped = position["grouped"]
        if self._grouped and self._optimizer is not None:
            parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
            for parameter, gradient in zip(parameters, position["gradients"], strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)


def _mixed(seed: int, epoch: int, step: int) -> int:
    """Return 64 bits, the same for the same step of the same training, unlike those of all others (splitmix64)."""
    mixed = (seed + 0x9E3779B97F4A7C15 * (epoch + 1) + 0xD1B54A32D192ED03 * (step + 1)) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def states_of(optimizer: Optimizer | None, scheduler: Any) -> dict[str, Any]:
    """Return the states of both, on the CPU; None for one that is not there."""
    return {
        "optimizer": None if optimizer is None else _on_cpu(optimizer.state_dict()),
        "scheduler": None if scheduler is None else _on_cpu(scheduler.state_dict()),
    }


def load_states(optimizer: Optimizer | None, scheduler: Any, states: Mapping[str, Any]) -> None:
    """Give both what `states_of` returned."""
    # Before the optimizer: a scheduler keeps no learning rate but the optimizer's.
    if scheduler is not None and states.get("scheduler") is not None:
        scheduler.load_state_dict(states["scheduler"])
    if optimizer is not None and states.get("optimizer") is not None:
        optimizer.load_state_dict(states["optimizer"])


def _on_cpu(nest: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), nest)
