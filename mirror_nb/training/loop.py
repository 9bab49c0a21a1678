"""The loop over one replica's shares, which every job has: it stops after any step, and goes on with the next message.

    feed ─▶ share ─▶ _take, the subclass's step ─▶ totals, when it stops; notes now and then

Knows feeds, the replica's seat and the network's forward pass; knows no loss, no gradient and no optimizer.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mirror_nb.collectives.segments import Address
from mirror_nb.data.batches import leaves, map_leaves
from mirror_nb.errors import TrainingStopped
from mirror_nb.mirroring import networks
from mirror_nb.strategies.seat import Seat
from mirror_nb.telemetry.samples import Mark
from mirror_nb.training.settings import CompileSettings
from mirror_nb.training.shares import Feed, Share

if TYPE_CHECKING:
    from mirror_nb.training.model import Model

NOTE_SECONDS = 0.1
# At least so long between two notes.
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True, slots=True)
class Task:
    """What a job is asked to do."""

    settings: CompileSettings
    # Without the optimizer and the scheduler, which travel by reference.
    feed: Feed | None
    # None: that of the job whose place it takes.
    steps: int | None = None
    # Global batches of an epoch, where these are fewer than the feed's; None: all.
    made_here: bool = False
    # Every replica made the feed by itself: they have to agree that it is the same.
    uneven: bool = False
    # The replicas may differ by a step, after an interrupt or an error.
    watched: bool = False
    # Somebody looks at notes.
    seed: int | None = None
    # Of the replicas' random numbers; None: these go on as they are.
    class_weight: dict[int, float] | None = None
    # By class; 1 for others.
    epochs: int | None = None
    # The number of the last one of the training, from 1; None: nobody knows.
    recovers: bool = False
    # Who commands it goes on after a replica's death: what that takes is kept.
    ledger: Address | None = None
    # Where it is kept.


@final
@dataclass(frozen=True, slots=True)
class Totals:
    """What one replica added up since the epoch began; those of all replicas make the logs."""

    loss: float = 0.0
    # Sum over the global batches of its part of the loss, times the examples of the global batch.
    examples: int = 0
    # Of all replicas.
    parts: dict[str, float] = field(default_factory=dict)
    # The same as `loss`, by output.
    named: dict[str, tuple[float, int]] = field(default_factory=dict)
    # What a model's own `training_step` returned besides the loss, times the examples, and how many these were: it
    # need not return it each time.
    metrics: tuple[dict[str, Any], ...] = ()
    # State of each metric.

    def plain(self) -> dict[str, Any]:
        """Return it for a file; `Totals(**plain)` is it again."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@final
@dataclass(frozen=True, slots=True)
class Advanced:
    """Where a job stands after `advance`."""

    step: int
    # Global batches done of the epoch.
    ended: bool
    # It was the epoch's last.
    examples: int
    # Of the epoch, over all replicas.
    totals: Totals
    stopped: bool = False
    # By the user, where a step ended.
    outputs: Any = None
    # Of a prediction that has ended: this replica's, joined along dimension 0; None if it had no examples.
    counts: tuple[int, ...] = ()
    # Likewise how many of them belong to each global batch.


@final
@dataclass(frozen=True, slots=True)
class Note:
    """What replica 0 tells while it works."""

    step: int
    examples: int
    loss: float | None
    # Mean over replica 0's own shares of the epoch so far.


class Job(ABC):
    """A loop over this replica's shares, which can stop after any step and go on with the next message."""

    trains = False
    follows: str | None = None
    # The token of the job that it takes the place of.
    _outputs_are_rows = True
    # Each of several outputs has a row an example: who takes all of them together may get others.

    def __init__(self, seat: Seat, model: Model, task: Task) -> None:
        self._seat = seat
        self._model = model
        assert task.feed is not None
        self.task = task
        self._feed = task.feed
        self._device = device_of(model, seat.device)
        settings = task.settings
        if settings.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._forward = _compiled(model, settings.compile)
        self._watched = task.watched and seat.replica_id == 0
        self._told = 0.0
        self._shares: Iterator[Share] | None = None
        self._ahead: Share | None = None
        # Where the feed does not know its length, one share is read before the one that is due.
        self._epoch = -1
        self._resumed: int | None = None
        # The epoch that `step` is of, where it was begun elsewhere.
        self._stream: tuple[int, int] | None = None
        # Of one that goes on over several epochs: the one that it was begun in, and its batches before this one.
        self.step = 0
        self.examples = 0
        self.stopped = False
        known = self._feed.num_batches
        self._goes_on = self.trains and known is None
        # An epoch that `steps` ends in the middle of a stream is followed by the stream's next part, as in Keras.
        self._length = known if task.steps is None else task.steps if known is None else min(known, task.steps)
        self._ended = False
        self._feed_is_behind = False
        # The epoch's last batch was taken from it, and it has not been told of the end.
        self._begin_sums()

    # ------------------------------------------------------------------ for the subclass

    @abstractmethod
    def _conditions(self) -> AbstractContextManager[Any]:
        """Return what holds while steps are done."""

    @abstractmethod
    def _take(self, share: Share, last: bool) -> None:
        """Do one step and count it; `last` of the epoch."""

    @abstractmethod
    def _begin_sums(self) -> None:
        """An epoch begins: nothing is added up yet."""

    @abstractmethod
    def _totals(self) -> Totals:
        """Return what was added up."""

    def averaged(self) -> None:  # noqa: B027, what does not train keeps none
        """The replicas have averaged their running statistics, between two steps of this job."""

    # ------------------------------------------------------------------ the loop

    def advance(self, epoch: int, until: int | None) -> Advanced:
        """Do steps until the epoch ends, or so many of it are done."""
        if self._ended or epoch != self._epoch:
            # A new one; or, in evaluations, the same once more.
            self._begin(epoch)
        with self._conditions():
            while not self._ended and (until is None or self.step < until):
                if self.trains:
                    self._seat.recorder.wanted()
                share, last = self._next()
                if share is None:
                    self._end_early()
                    break
                if self.trains:
                    self._seat.recorder.arrived(share.examples)
                self._ended = last
                if not share.examples:
                    self._take_shape(share)
                self._take(share, last)
                self.examples += share.global_examples
                self._seat.heed()
                self._tell()
                if self._is_to_end():
                    break
        if self._ended:
            if self._ahead is None or not self._goes_on:
                self._close_shares()
            if self.trains:
                self._end_record()
        return self._advanced()

    def _is_to_end(self) -> bool:
        """Hold, or end, where the user wants it: after the same step on all replicas, which their gradients tell."""
        try:
            self._seat.steering.boundary(alone=self._seat.num_replicas == 1 and self.trains)
        except TrainingStopped:
            self.stopped = True
        return self.stopped

    def _begin(self, epoch: int) -> None:
        if self._epoch != -1 or self._resumed not in (None, epoch):
            self._stream, self.step = self._reached(self.step), 0
        self.examples, self._epoch = 0, epoch
        # One that was resumed may have been left at its very end.
        self._ended = self._length is not None and self.step >= self._length
        self._begin_sums()
        if self._ended and not self._feed_is_behind:
            return
        self._feed_is_behind = False
        if self.trains and not self._ended:
            self._begin_record(epoch)
        if self._shares is None or not self._goes_on:
            self._close_shares()
            begun, before = self._stream or (epoch, 0)
            self._shares = self._feed.shares(
                self._seat.replica_id,
                self._seat.num_replicas,
                self._device,
                epoch=begun,
                start=before + self.step,
                agree=self._agree if self.task.made_here else None,
            )
            self._stream = (begun, before) if self._goes_on else None

    def _reached(self, step: int) -> tuple[int, int] | None:
        """Return where a stream of unknown length stands after so many steps of this epoch; None: it begins anew."""
        return None if self._stream is None else (self._stream[0], self._stream[1] + step)

    def _begin_record(self, epoch: int) -> None:
        """Write down which epoch this is, and which step will be the last."""
        recorder = self._seat.recorder
        recorder.mark(Mark.EPOCH, epoch + 1)
        if self._length is not None and self.task.epochs is not None:
            batches = self.task.settings.accumulate_steps
            left = math.ceil((self._length - self.step) / batches)
            later = (self.task.epochs - epoch - 1) * math.ceil(self._length / batches)
            recorder.mark(Mark.PLANNED, recorder.step + left + later)

    def _end_record(self) -> None:
        """Write down the checksums of the parameters, by which it is seen whether the replicas' are equal."""
        self._seat.recorder.exhausted()
        if self._seat.recorder.wants_checksums():
            self._seat.check()

    def _agree(self, mine: bytes) -> bytes:
        first: bytes = self._seat.collect(mine)[0]
        return first

    def _next(self) -> tuple[Share | None, bool]:
        assert self._shares is not None
        if self._feed.num_batches is not None:
            return next(self._shares, None), self.step + 1 == self._length
        share = self._ahead if self._ahead is not None else next(self._shares, None)
        self._ahead = None if share is None else next(self._shares, None)
        return share, self._ahead is None or self.step + 1 == self._length

    def _end_early(self) -> None:
        """The feed had fewer batches than it said."""
        self._ended = True

    def _close_shares(self) -> None:
        if self._shares is None:
            return
        if self.step == self._feed.num_batches:
            # To its very end: a loader's generators stand where one device's would.
            next(self._shares, None)
        close = getattr(self._shares, "close", None)
        if close is not None:
            close()
        self._shares = self._stream = self._ahead = None

    def _advanced(self) -> Advanced:
        return Advanced(self.step, self._ended, self.examples, self._totals(), self.stopped)

    def _tell(self) -> None:
        if self._watched and (now := time.perf_counter()) - self._told > NOTE_SECONDS:
            self._told = now
            self._seat.note(Note(self.step, self.examples, self._running_loss()))

    def _running_loss(self) -> float | None:
        return None

    def close(self) -> dict[str, Any]:
        """End it; return what the next job over the same feed goes on from."""
        self._close_shares()
        return {"feed": self._feed.state()}

    # ------------------------------------------------------------------ what jobs have in common

    def _autocast(self) -> AbstractContextManager[Any]:
        precision = self.task.settings.precision
        if precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=_DTYPES[precision])

    def _call(self, inputs: Any) -> Any:
        """Call the network: a tuple or list of inputs as its arguments, a dict as those by name."""
        if self.task.settings.channels_last:
            inputs = map_leaves(inputs, _channels_last)
        if isinstance(inputs, Tensor):
            return self._forward(inputs)
        if isinstance(inputs, Mapping):
            return self._forward(**inputs)
        return self._forward(*inputs) if isinstance(inputs, (tuple, list)) else self._forward(inputs)

    def _outputs(self, share: Share) -> Any:
        """Call the network with a share's inputs; of a single example `squeeze` may leave outputs no dimension."""
        outputs = self._call(share.inputs)
        squeezed = share.examples == 1 and (isinstance(outputs, Tensor) or self._outputs_are_rows)
        if squeezed and any(isinstance(leaf, Tensor) and not leaf.ndim for leaf in leaves(outputs)):
            return map_leaves(outputs, _as_row)
        return outputs

    def _take_shape(self, share: Share) -> None:
        """Let lazy layers take the shape that they get on the replicas that have examples of this batch."""
        if any(map(is_lazy, (*self._model.parameters(), *self._model.buffers()))):
            with torch.no_grad():
                self._dry_run(share)

    def _dry_run(self, share: Share) -> Any:
        """Go through the network with an example in the form of this share, which has none."""
        return self._call(one_example(share.inputs))

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Modules in evaluation mode, with statistics that are the same on all replicas; then as they were."""
        modes = [(module, module.training) for module in self._model.modules()]
        average_statistics(self._seat, self._model)
        for other in self._seat.jobs.values():
            if isinstance(other, Job):
                other.averaged()
        self._model.eval()
        try:
            with torch.no_grad(), self._autocast():
                yield
        finally:
            for module, mode in modes:
                module.training = mode


def average_statistics(seat: Seat, model: nn.Module) -> None:
    """Give every replica the mean of all running statistics: what is read from outside."""
    if seat.num_replicas == 1:
        return
    statistics = [s for s in networks.averaged_statistics(model).values() if s.is_floating_point()]
    if statistics:
        with torch.no_grad():
            flat = torch.cat([each.reshape(-1) for each in statistics])
            mean = seat.add_up(flat).div_(seat.num_replicas)
            for each, part in zip(statistics, mean.split([s.numel() for s in statistics]), strict=True):
                each.copy_(part.view_as(each))


def device_of(model: nn.Module, otherwise: torch.device) -> torch.device:
    """Return where the network is: a model made outside every scope may have been moved by its owner."""
    first = next(model.parameters(), None)
    return otherwise if first is None or first.device.type == "meta" else first.device


def _compiled(model: Model, options: bool | dict[str, Any]) -> Callable[..., Any]:
    """Return the model's forward pass, compiled if asked; once for each network and options."""
    if not options:
        return model
    arguments = options if isinstance(options, dict) else {}
    kept = model.__dict__.get("_compiled")
    if kept is None or kept[0] != arguments:
        # Past nn.Module's own __setattr__, which would make it a part of the model.
        kept = model.__dict__["_compiled"] = (arguments, torch.compile(model.forward, **arguments))
    return kept[1]


def _channels_last(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.ndim == 4:
        return leaf.contiguous(memory_format=torch.channels_last)
    return leaf


def one_example(nest: Any) -> Any:
    """Return a batch of one in the form of this one without any; what it holds does not matter."""
    return map_leaves(nest, lambda leaf: leaf.new_zeros((1, *leaf.shape[1:])) if isinstance(leaf, Tensor) else leaf)


def _as_row(leaf: Any) -> Any:
    return leaf.reshape(1) if isinstance(leaf, Tensor) and not leaf.ndim else leaf


def told(value: Any) -> str:
    """Return a few words on a value, for errors."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with {sorted(map(str, value))}"
    return f"a {type(value).__qualname__}"
