"""The replicas' side of a Keras model's fit, evaluate and predict: its own steps, on this replica's shares.

    global batch, alike on all replicas ─▶ share ─▶ model.train_function ─▶ gradients weighed by examples
    metrics                             ─▶ their variables added up over the replicas, when somebody reads them
    statistics (BatchNormalization's)   ─▶ averaged over the replicas, when somebody reads them

A replica without examples computes the first replica's share once more with weight zero, and forgets what that did:
so it makes the same collective calls as the others, whatever they are. Knows Keras and the replica's seat; knows no
controller.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from mirror_nb.data.batches import share_of
from mirror_nb.data.sampling import OtherStreams, held_streams
from mirror_nb.errors import UsageError
from mirror_nb.replica.whole import whole
from mirror_nb.strategies.seat import Seat
from mirror_nb.training.keras_travel import Arrived, Parcel

NOTE_SECONDS = 0.1
# At most so often a replica tells how far it is.
_SEED_STEP = 1_000_003
# Between the seeds of neighbouring replicas: Keras adds a count of draws to a seed, so that seeds that lie close
# would give the same numbers some draws later.


@final
@dataclass(frozen=True, slots=True)
class Source:
    """What Keras's own epoch iterator is made from, on each replica."""

    arguments: dict[str, Any]
    # x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight, …
    pushed: bool = False
    # The batches come with the calls instead, since what gives them cannot travel.


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """Global batches that come with a call."""

    items: list[Any]
    # As Keras's epoch iterator gives them.
    last: bool
    # The epoch ends with them.


@final
@dataclass(frozen=True, slots=True)
class Work:
    """One fit, evaluate or predict."""

    kind: str
    # "fit", "evaluate" or "predict".
    source: Source
    validation: Source | None = None


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """How far an epoch is."""

    step: int
    # Number of the latest global batch, from 0; -1 before the first.
    over: bool
    # The source has no more batches for this epoch.
    logs: dict[str, Any] = field(default_factory=dict)
    # Over all replicas, floats.
    outputs: list[Any] = field(default_factory=list)
    # Of predict: this replica's part of each global batch, arrays; None where it has no examples.


@final
@dataclass(frozen=True, slots=True)
class _Share:
    """The share that is computed now."""

    seat: Seat
    examples: int
    global_examples: int


@final
class Trainee:
    """One Keras model on this replica, while it is trained, evaluated or asked."""

    def __init__(
        self, seat: Seat, model: Any, work: Work, randomness: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.model = model
        self._seat = seat
        self._kind = work.kind
        self._main = _Batches(work.source, randomness)
        self._validation = _Batches(work.validation, randomness) if work.validation is not None else None
        self._evaluated = self._validation or self._main
        self._logs: dict[str, Any] = {}
        self._weight = 0.0
        self._versions = [variable.value._version for variable in _statistics(model)]
        self._shifted = False
        self._plain = plain_of(model)
        # As the controller knows it.

    def prepare(self) -> None:
        """Make Keras's step functions; from here on random numbers are this replica's own."""
        # Of a model that came from elsewhere the optimizer's and the metrics' are not: no network registers them.
        for variable in variables_of(self.model):
            if variable.value.device.type != self._seat.device.type:
                variable.value.data = variable.value.data.to(self._seat.device)
        if self._kind == "fit":
            self.model.make_train_function()
            self._shift_seeds(1)
        if self._kind == "predict":
            self.model.make_predict_function()
        else:
            self.model.make_test_function()

    # ------------------------------------------------------------------ an epoch

    def train(self, steps: int | None, tell: Callable[[Progress], None] | None, chunk: Chunk | None) -> Progress:
        """Train on so many global batches, None: to the end of the epoch; `tell` hears of the progress meanwhile."""
        if self._main.begin(chunk):
            self.model.reset_metrics()
        self.model.train()
        # Keras's losses are means, whatever the strategy does with the gradients of users' own loops.
        with self._seat.averaging():
            progress = self._go(self._main, self.model.train_function, steps, tell, training=True)
        if progress.over:
            self.model.eval()
            self.settle()
        return progress

    def evaluate(self, steps: int | None, tell: Callable[[Progress], None] | None, chunk: Chunk | None) -> Progress:
        """Likewise without training, on the validation data where there are such."""
        source = self._evaluated
        if source.begin(chunk, anew=source is self._validation):
            self.model.reset_metrics()
        self.model.eval()
        return self._go(source, self.model.test_function, steps, tell, training=False)

    def stop(self, what: str) -> None:
        """The epoch was left before its end: the next one begins at the beginning."""
        (self._evaluated if what == "evaluate" else self._main).over = True
        if what == "train":
            self.model.eval()
            self.settle()
        if what != "predict":
            self._global_logs(keep=True)

    def predict(self, steps: int | None, tell: Callable[[Progress], None] | None, chunk: Chunk | None) -> Progress:
        """Return the outputs of this replica's shares."""
        self._main.begin(chunk)
        self.model.eval()
        outputs: list[Any] = []
        teller = _Teller(tell)
        step = -1
        for step, batch in self._main.take(steps):
            share, examples, _ = self._cut(batch)
            made = self.model.predict_function([share]) if examples else None
            outputs.append(None if made is None else pytree.tree_map(_array, made))
            teller.tell(step, dict)
        return Progress(step, self._main.over, {}, outputs)

    def _go(
        self,
        source: _Batches,
        function: Callable[..., Any],
        steps: int | None,
        tell: Callable[[Progress], None] | None,
        training: bool,
    ) -> Progress:
        teller = _Teller(tell)
        step = -1
        for step, batch in source.take(steps):
            self._logs, self._weight = self._step(function, batch, training)
            teller.tell(step, lambda: _floats(self._logs))
        return Progress(step, source.over, self._global_logs(keep=source.over))

    def _step(self, function: Callable[..., Any], batch: Any, training: bool) -> tuple[dict[str, Any], float]:
        share, examples, total = self._cut(batch)
        weighed = self._seat.weighed(examples, total) if training else contextlib.nullcontext()
        with weighed, _computing(_Share(self._seat, examples, total)), self._forgotten(examples == 0):
            logs = function([share])
        return logs if isinstance(logs, dict) else {"loss": logs}, examples / total

    def _cut(self, batch: Any) -> tuple[Any, int, int]:
        """Return this replica's share, how many examples it holds, and how many the global batch has."""
        total = next((len(leaf) for leaf in pytree.tree_leaves(batch) if _has_examples(leaf)), 0)
        if not total:
            raise UsageError("a batch holds no examples; Keras's batches are (x,), (x, y) or (x, y, sample_weight)")
        mine = share_of(total, self._seat.replica_id, self._seat.num_replicas)
        part = mine if mine.stop > mine.start else share_of(total, 0, self._seat.num_replicas)
        share = pytree.tree_map(lambda leaf: leaf[part] if _has_examples(leaf) else leaf, batch)
        return share, mine.stop - mine.start, total

    @contextlib.contextmanager
    def _forgotten(self, wanted: bool) -> Iterator[None]:
        """Put metrics and statistics back as they were; weights take part in the step all the same."""
        if not wanted:
            yield
            return
        variables = [*_unique(_metric_variables(self.model)), *_statistics(self.model)]
        before = [variable.value.detach().clone() for variable in variables]
        yield
        with torch.no_grad():
            for variable, value in zip(variables, before, strict=True):
                variable.value.copy_(value)

    # ------------------------------------------------------------------ over all replicas

    def _global_logs(self, keep: bool) -> dict[str, Any]:
        """Return the logs over all replicas; `keep` leaves the added-up metrics in the model, as an epoch's end."""
        variables = _unique(_metric_variables(self.model))
        own = [variable.value.detach().clone() for variable in variables]
        mine = _floats(self.model.get_metrics_result())
        self._add_up(variables)
        results = _floats(self.model.get_metrics_result())
        if not set(self._logs) <= set(results) or len(self._logs) != len(results):
            results = self._own_logs(mine, results)
        if not keep:
            with torch.no_grad():
                for variable, value in zip(variables, own, strict=True):
                    variable.value.copy_(value)
        return results

    def _own_logs(self, mine: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
        """Return the logs that a train_step of the user's makes: of these Keras shows the last step's.

        What is a metric's result on the first replica, which always has examples, is the metric's over all; other
        numbers are averaged, weighed by examples.
        """
        logs = _floats(self._logs)
        names = sorted(name for name, value in logs.items() if isinstance(value, float))
        if not names:
            return logs
        # What a share without examples gave is nothing, even where it is not a number.
        values = [logs[name] * self._weight if self._weight else 0.0 for name in names]
        metric = [float(self._seat.replica_id == 0 and mine.get(name) == logs[name]) for name in names]
        sums = self._seat.add_up(
            torch.tensor([values, metric], dtype=torch.float64, device=self._seat.device)
        ).tolist()
        for name, mean, is_metric in zip(names, *sums, strict=True):
            logs[name] = results[name] if is_metric else mean
        return logs

    def _add_up(self, variables: list[Any]) -> None:
        """Metrics are sums of something, and Keras says of each how replicas' come together."""
        for variable in variables:
            how = getattr(variable, "aggregation", "sum")
            if how in (None, "none"):
                continue
            value = variable.value.detach().clone()
            if how == "only_first_replica" and self._seat.replica_id:
                value.zero_()
            total = self._seat.add_up(value)
            with torch.no_grad():
                variable.value.copy_(total / self._seat.num_replicas if how == "mean" else total)

    def settle(self) -> None:
        """Average what the replicas' models counted for themselves: BatchNormalization's moving statistics."""
        variables = _statistics(self.model)
        if not variables:
            return
        written = [
            variable.value._version != (self._versions[i] if i < len(self._versions) else None)
            for i, variable in enumerate(variables)
        ]
        flags = self._seat.add_up(torch.tensor(written, dtype=torch.float32, device=self._seat.device)).tolist()
        for variable, flag in zip(variables, flags, strict=True):
            if flag:
                total = self._seat.add_up(variable.value.detach().clone())
                with torch.no_grad():
                    variable.value.copy_(total / self._seat.num_replicas)
        self._versions = [variable.value._version for variable in variables]

    def finish(self) -> None:
        """The fit is over: what an optimizer keeps for its end goes into the weights."""
        optimizer = self.model.optimizer
        if self._kind == "fit" and hasattr(optimizer, "finalize_variable_values"):
            optimizer.finalize_variable_values(self.model.trainable_weights)

    def changed_attributes(self) -> Attributes:
        """Return what the model's own lines have set here since this was asked last."""
        before, self._plain = self._plain, plain_of(self.model)
        return changes(before, self._plain)

    def set_attributes(self, attributes: Attributes) -> None:
        """Set what was set in the controller."""
        take(self.model, attributes)
        self._plain = plain_of(self.model)

    def generators(self) -> list[dict[str, Any]]:
        """Return, of what it trains on and what it evaluates, where the generators stand that these hold."""
        return [{} if source is None else generators_of(source.x) for source in (self._main, self._validation)]

    def leave(self) -> None:
        """Make the model as it is without us."""
        self._shift_seeds(-1)

    def _shift_seeds(self, sign: int) -> None:
        """Let dropout and the like draw other numbers on each replica."""
        if self._shifted == (sign > 0):
            return
        self._shifted = sign > 0
        with torch.no_grad():
            for variable in _seeds(self.model):
                variable.value[0] += sign * self._seat.replica_id * _SEED_STEP

    # ------------------------------------------------------------------ values

    @contextlib.contextmanager
    def as_one(self) -> Iterator[list[Any]]:
        """Give all variables with the values of the one logical model."""
        self.settle()
        shifted = self._shifted
        self._shift_seeds(-1)
        try:
            yield variables_of(self.model)
        finally:
            if shifted:
                self._shift_seeds(1)


@final
class _Batches:
    """The global batches of one source, epoch after epoch; one is drawn ahead, to know whether it is the last."""

    def __init__(self, source: Source, randomness: Callable[[], AbstractContextManager[None]]) -> None:
        self.x = source.arguments.get("x")
        self._randomness = randomness
        self._iterator: Any = None if source.pushed else epoch_iterator_class()(**source.arguments)
        self._steps: Iterator[Any] = iter(())
        self._next: tuple[int, Any] | None = None
        self._last = True
        # No other chunk follows the one at hand in this epoch.
        self.over = True

    def begin(self, chunk: Chunk | None, anew: bool = False) -> bool:
        """Begin an epoch, unless one is under way; tell whether one began.

        `anew`: with the source's first batch, also where the epoch before was left at another, as Keras validates.
        """
        began = self.over
        if chunk is not None:
            self._steps, self._last = iter(chunk.items), chunk.last
        elif began:
            if anew:
                with self._randomness():
                    self._iterator.reset()
            self._steps = self._iterator.enumerate_epoch()
        if chunk is not None or began:
            self._next = self._drawn()
        self.over = False
        return began

    def take(self, steps: int | None) -> Iterator[tuple[int, Any]]:
        """Yield so many batches, at most, with their numbers."""
        taken = 0
        while self._next is not None and (steps is None or taken < steps):
            item, self._next = self._next, self._drawn()
            taken += 1
            yield item
        self.over = self._next is None and self._last

    def _drawn(self) -> tuple[int, Any] | None:
        with self._randomness():
            item = next(self._steps, None)
        return None if item is None else numbered(item)


def generators_of(x: Any) -> dict[str, Any]:
    """Return the states of the random generators that a DataLoader and its samplers hold, by name."""
    return {name: stream.get() for name, stream in held_streams(x).items()} if isinstance(x, DataLoader) else {}


def numbered(item: Any) -> tuple[int, Any]:
    """Return a batch with the number of its step: Keras gives (first step, last step, [batch]), once without last."""
    *numbers, buffer = item
    return int(numbers[-1]), buffer[0]


def epoch_iterator_class() -> Any:
    """Return the class of Keras's iterators over global batches."""
    return of_keras("backend.torch.trainer").TorchEpochIterator


@final
class _Teller:
    def __init__(self, tell: Callable[[Progress], None] | None) -> None:
        self._tell = tell
        self._latest = time.monotonic()

    def tell(self, step: int, logs: Callable[[], dict[str, Any]]) -> None:
        if self._tell is not None and time.monotonic() - self._latest > NOTE_SECONDS:
            self._latest = time.monotonic()
            self._tell(Progress(step, False, logs()))


# ---------------------------------------------------------------------- losses that know of the other shares

_shares: list[_Share] = []


@contextlib.contextmanager
def _computing(share: _Share) -> Iterator[None]:
    _shares.append(share)
    try:
        yield
    finally:
        _shares.pop()


def weigh_losses() -> None:
    """Make Keras's losses right for a share: weighed by its examples they add up to the global batch's loss."""
    module = of_keras("losses.loss")
    original = module.reduce_weighted_values

    @functools.wraps(original)
    def reduce_weighted_values(
        values: Any, sample_weight: Any = None, mask: Any = None, reduction: Any = "sum_over_batch_size", **rest: Any
    ) -> Any:
        loss = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, **rest)
        if not _shares or tuple(loss.shape) != () or loss.is_meta:
            return loss
        return loss * _correction(_shares[-1], loss, sample_weight, mask, reduction)

    module.reduce_weighted_values = reduce_weighted_values


def _correction(share: _Share, loss: torch.Tensor, sample_weight: Any, mask: Any, reduction: Any) -> Any:
    """Return the factor from a share's loss to one that the number of examples weighs rightly.

    A mean over examples needs none. A sum is not divided by them, and a mean over weights or over what a mask leaves
    has another denominator, of which each replica knows a part.
    """
    if reduction == "sum":
        return share.global_examples / share.examples if share.examples else 0.0
    if mask is not None and reduction in ("mean", "sum_over_batch_size"):
        own = torch.as_tensor(mask, device=loss.device).sum()
    elif reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        kept = of_keras("losses.loss").apply_mask(sample_weight, mask, dtype="float32", reduction=reduction)
        own = torch.as_tensor(kept, device=loss.device).sum()
    else:
        return 1.0
    own = (
        own.detach().to(torch.float64) if share.examples else torch.zeros((), dtype=torch.float64, device=loss.device)
    )
    total = share.seat.add_up(own.clone())
    if not share.examples or not float(total):
        return 0.0
    return (own * share.global_examples / (total * share.examples)).to(loss.dtype)


def hold_interrupts_back() -> None:
    """An interrupt waits for the end of an optimizer's step: half of one would leave replicas that differ."""
    whole(of_keras("optimizers.base_optimizer").BaseOptimizer.apply)


# ---------------------------------------------------------------------- what a model consists of


def variables_of(model: Any) -> list[Any]:
    """Return the variables of a model, its optimizer and its metrics, each once, in an order that copies share."""
    optimizer = getattr(model, "optimizer", None)
    return _unique(
        [*model.variables, *(optimizer.variables if optimizer is not None else ()), *_metric_variables(model)]
    )


Attributes = dict[int, dict[str, Any]]
# Of the model's layers and of its optimizer, by their number: attributes that are numbers, strings and the like.
_OWN = frozenset({"training", "built", "stop_training", "stop_evaluating", "stop_predicting"})
# What Keras sets on each side by itself.


def plain_of(model: Any) -> Attributes:
    """Return the plain attributes of a model's parts, but for private ones."""
    return {
        i: {
            name: value
            for name, value in vars(part).items()
            if type(value) in (int, float, bool, str, type(None)) and name[0] != "_" and name not in _OWN
        }
        for i, part in enumerate(_parts(model))
    }


def changes(before: Attributes, now: Attributes) -> Attributes:
    """Return what differs from before."""
    found = {
        i: {name: value for name, value in own.items() if name not in before.get(i, {}) or before[i][name] != value}
        for i, own in now.items()
    }
    return {i: own for i, own in found.items() if own}


def take(model: Any, attributes: Attributes) -> None:
    """Set attributes of a model's parts."""
    parts = _parts(model) if attributes else []
    for i, own in attributes.items():
        for name, value in own.items():
            setattr(parts[i], name, value)


def _parts(model: Any) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)
    # One that scales losses has another one inside.
    inner = getattr(optimizer, "inner_optimizer", None)
    return [*model._flatten_layers(), *(one for one in (optimizer, inner) if one is not None)]


def _metric_variables(model: Any) -> list[Any]:
    return [variable for metric in model.metrics for variable in metric.variables]


def _statistics(model: Any) -> list[Any]:
    found = [variable for variable in model.non_trainable_variables if variable.value.is_floating_point()]
    metrics = {id(variable) for variable in _metric_variables(model)}
    return [variable for variable in _unique(found) if id(variable) not in metrics]


def _seeds(model: Any) -> list[Any]:
    return [v for v in _unique(model.non_trainable_variables) if v.name == "seed_generator_state"]


def _unique(variables: list[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _has_examples(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0


def _array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _floats(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: _float(value) for name, value in logs.items()}


def _float(value: Any) -> Any:
    if isinstance(value, dict):
        return _floats(value)
    array = _array(value)
    return float(array) if array.ndim == 0 and array.dtype.kind in "fiub" else array


def of_keras(name: str) -> Any:
    """Return a module of Keras's own, by its name within it."""
    return importlib.import_module(f"keras.src.{name}")


# ---------------------------------------------------------------------- what the controller calls


@final
class _Kept:
    """One model of the controller's, on this replica."""

    def __init__(self) -> None:
        self.arrived = Arrived()
        self.trainees: list[Trainee] = []
        # Of what is under way: a fit, and what its callbacks have called.
        self.order = OtherStreams(())
        # The controller's random numbers, from which orders of examples are drawn.


def has(strategy: Any, token: str, released: tuple[str, ...]) -> bool:
    """Whether this replica has the model; forget those that the controller no longer has."""
    jobs = strategy._place.seat.jobs
    for gone in released:
        jobs.pop(gone, None)
    return token in jobs


Which = tuple[str, int]
# A model's name, and how many other things are under way with it, whose callbacks have asked for this one.


def start(strategy: Any, which: Which, parcel: Parcel, work: Work) -> None:
    """Take the model and what it is to do."""
    place = strategy._place
    seat: Seat = place.seat
    token, before = which
    kept: _Kept = seat.jobs.setdefault(token, _Kept())
    del kept.trainees[before:]
    with on_device(seat.device):
        model = kept.arrived.open(parcel, seat.device)
        # Registers Keras's variables as parameters, where that is not done.
        next(model.parameters(), None)
        place.mirror(model)

        @contextlib.contextmanager
        def randomness() -> Iterator[None]:
            with seat.shared_randomness(), kept.order.current():
                yield

        trainee = Trainee(seat, model, work, randomness)
        kept.trainees.append(trainee)
        trainee.prepare()


def go(
    strategy: Any, which: Which, what: str, steps: int | None, tell: bool, chunk: Chunk | None, order: tuple[Any, ...]
) -> tuple[Progress, tuple[Any, ...]]:
    """Train, evaluate or predict for so many steps; replica 0 tells how far it is, if asked to.

    Orders of examples are drawn from the controller's random states, `order`, torch's as bytes; replica 0 returns them
    as they are then.
    """
    seat: Seat = strategy._place.seat
    trainee = _trainee(seat, which)
    kept: _Kept = seat.jobs[which[0]]
    kept.order = OtherStreams((torch.frombuffer(bytearray(order[0]), dtype=torch.uint8), *order[1:]))
    with on_device(seat.device):
        step: Callable[..., Progress] = getattr(trainee, what)
        progress = step(steps, seat.note if tell and seat.replica_id == 0 else None, chunk)
    return progress, () if seat.replica_id else kept.order.states


def stop(strategy: Any, which: Which, what: str) -> None:
    """A callback has ended the epoch before its last batch."""
    seat: Seat = strategy._place.seat
    with on_device(seat.device):
        _trainee(seat, which).stop(what)


def finish(strategy: Any, which: Which) -> None:
    """The last epoch is over."""
    seat: Seat = strategy._place.seat
    with on_device(seat.device):
        _trainee(seat, which).finish()


def pull(strategy: Any, which: Which, known: dict[int, int]) -> tuple[dict[int, tuple[int, torch.Tensor]], Attributes]:
    """Return, from replica 0, the variables that were written to since their versions were `known`, and attributes."""
    seat: Seat = strategy._place.seat
    trainee = _trainee(seat, which)
    attributes = trainee.changed_attributes()
    with trainee.as_one() as variables:
        if seat.replica_id:
            return {}, {}
        values = [variable.value.detach() for variable in variables]
        written = {i: (v._version, v.clone()) for i, v in enumerate(values) if known.get(i) != v._version}
        return written, attributes


def push(strategy: Any, which: Which, values: dict[int, torch.Tensor], attributes: Attributes) -> None:
    """Take values that were written in the controller, and attributes that were set there."""
    seat: Seat = strategy._place.seat
    trainee = _trainee(seat, which)
    trainee.set_attributes(attributes)
    with trainee.as_one() as variables, torch.no_grad():
        for i, value in values.items():
            variables[i].value.copy_(value)


def end(strategy: Any, which: Which) -> list[dict[str, Any]]:
    """Let go of the data; the model stays. Returns where the generators of loaders stand now, on replica 0."""
    seat: Seat = strategy._place.seat
    token, before = which
    kept: _Kept | None = seat.jobs.get(token)
    if kept is None or len(kept.trainees) <= before:
        return []
    trainee = kept.trainees[before]
    trainee.leave()
    del kept.trainees[before:]
    return [] if seat.replica_id else trainee.generators()


def _trainee(seat: Seat, which: Which) -> Trainee:
    token, before = which
    kept = seat.jobs.get(token)
    if kept is None or len(kept.trainees) <= before:
        raise UsageError(f"replica {seat.replica_id} has lost the Keras model it worked on; call fit again")
    found: Trainee = kept.trainees[before]
    return found


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Let Keras make its tensors on the replica's device, and leave synchronisation to us.

    From 3.16 on Keras wraps a model in DistributedDataParallel while a distribution of its own is set: its plain
    mean over replicas would be wrong for uneven shares.
    """
    keras = importlib.import_module("keras")
    distribution: Any = getattr(keras, "distribution", None)
    theirs = distribution.distribution() if hasattr(distribution, "distribution") else None
    if theirs is not None:
        distribution.set_distribution(None)
    try:
        with keras.device(str(device)):
            yield
    finally:
        if theirs is not None:
            distribution.set_distribution(theirs)
