"""What a strategy's input looks like where it stands: PerReplica batches in the controller, shares in a replica.

    controller:  source ─▶ global batches ─▶ one PerReplica a leaf ─▶ run ─▶ each replica its part, on its device
    replica:     source ─▶ this replica's shares (data/), on its device

Knows where the code stands only to refuse `next(iterator)` inside a replica function. Names and rules are
tf.distribute's.
"""

from __future__ import annotations

import enum
import itertools
import operator
import reprlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, Never, Self, cast, final

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, default_convert

from mirror_nb.data import dataset as data
from mirror_nb.data.batches import count, emptied, is_single, joined, share_of, spread
from mirror_nb.data.dataset import GlobalBatches, Loaders, Parts, Share
from mirror_nb.data.prefetch import ahead
from mirror_nb.distributed import Distributed, Underway
from mirror_nb.errors import TransferError, UsageError, users_level
from mirror_nb.strategies.context import on_one_replica
from mirror_nb.strategies.reductions import in_order, structure
from mirror_nb.strategies.specs import spec_of
from mirror_nb.values import PerReplica

# ---- what callers give and get ------------------------------------------------------------------------


class InputReplicationMode(enum.Enum):
    """How often `dataset_fn` is called: once for all replicas of this process (PER_WORKER), or once for each."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@final
@dataclass(frozen=True, slots=True)
class InputOptions:
    """Options of distributed datasets: tf.distribute's, and PyTorch's own.

    Raises UsageError for values that are not known, and for those that mean nothing here.
    """

    experimental_fetch_to_device: bool | None = None
    """Batches always arrive on the replica's device (True, None); False is refused."""
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    """PER_REPLICA is refused: batches are dealt out from one dataset, in the same order in every place."""
    experimental_place_dataset_on_device: bool = False
    """True is refused: a dataset's code runs on the CPU. Arrays that are on a GPU stay there without it."""
    experimental_per_replica_buffer_size: int = 1
    """Accepted, and without effect: copies from pinned memory do not wait for the device, so no buffer is kept."""
    prefetch: int = 0
    """Number of global batches that a thread of this process keeps ready; 0: each is loaded when it is asked for.

    What a dataset draws from the process's random numbers while it loads then mixes with what the program draws.
    In a replica it serves sources whose sampler draws only at the start of an epoch, as PyTorch's do; for others,
    and to load in processes of their own, give the DataLoader `num_workers`."""
    pin_memory: bool | None = None
    """Whether a replica on a GPU loads into pinned memory; None: as the DataLoader says. In the controller it has
    no effect: there batches travel to the replicas' processes through shared memory."""

    def __post_init__(self) -> None:
        if self.experimental_fetch_to_device not in (None, True):
            raise UsageError(
                f"experimental_fetch_to_device={self.experimental_fetch_to_device!r}: batches arrive on the replica's "
                "device; leave it out, and call .cpu() on what is needed in host memory"
            )
        if self.experimental_replication_mode is not InputReplicationMode.PER_WORKER:
            raise UsageError(
                f"experimental_replication_mode={self.experimental_replication_mode!r} is not supported: the batches "
                "of one dataset are dealt out to the replicas in turn; leave it out"
            )
        if self.experimental_place_dataset_on_device is not False:
            raise UsageError(
                f"experimental_place_dataset_on_device={self.experimental_place_dataset_on_device!r} is not "
                "supported: a dataset's code runs on the CPU; leave it out, or pass tensors that are on the device"
            )
        for name in ("experimental_per_replica_buffer_size", "prefetch"):
            check_count(name, getattr(self, name))
        if self.pin_memory not in (None, True, False):
            raise UsageError(f"`pin_memory` must be True, False or None, not {self.pin_memory!r}")


def check_count(name: str, value: Any, of_what: str = "batches") -> None:
    """Raise UsageError for what is no number of them."""
    try:
        good = operator.index(value) >= 0 and not isinstance(value, bool)
    except TypeError:
        good = False
    if not good:
        raise UsageError(f"`{name}` is a number of {of_what}, 0 or more, not {value!r}")


def _options(options: Any) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise UsageError(
            f"`options` must be InputOptions(...), not {reprlib.repr(options)}; several arrays are one tuple, and "
            "their batch size has its name: distribute_dataset((x, y), batch_size=64)"
        )
    return options


@final
@dataclass(frozen=True, slots=True)
class InputContext:
    """What a `dataset_fn` is told of the replicas that it makes batches for."""

    num_input_pipelines: int = 1
    """Number of times that `dataset_fn` is called, over all processes that read input."""
    input_pipeline_id: int = 0
    """Which of these calls this is."""
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the examples of one replica's batch. Raises UsageError where they do not come out whole."""
        check_count("global_batch_size", global_batch_size, "examples")
        n = self.num_replicas_in_sync
        if global_batch_size % n:
            raise UsageError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by `num_replicas_in_sync` {n!r}; "
                f"{global_batch_size // n * n or n} would be, or use distribute_dataset, which cuts any batch"
            )
        return global_batch_size // n


@final
@dataclass(frozen=True, slots=True)
class ValueContext:
    """What a `value_fn` is told of the replica that it makes a value for."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


def values_from_function(value_fn: Callable[[ValueContext], Any], num_replicas: int) -> Any:
    """Return a PerReplica of `value_fn(ValueContext)` for each replica, one a leaf of what it returns.

    Raises UsageError where the values differ in structure.
    """
    values = [value_fn(ValueContext(i, num_replicas)) for i in range(num_replicas)]
    shapes = [structure(value) for value in values]
    for replica_id, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise UsageError(
                f"`value_fn` returned {values[0]!r} for replica 0 but {values[replica_id]!r} for replica "
                f"{replica_id}; their structures must be equal"
            )
    leaves, _, made = zip(*map(in_order, values), strict=True)
    return made[0]([PerReplica(column) for column in zip(*leaves, strict=True)])


@final
@dataclass(frozen=True, slots=True)
class _Asked:
    """With what options a source was distributed."""

    options: InputOptions = InputOptions()
    batch_size: int | None = None
    shuffle: bool = False
    drop_last: bool = False
    dealt: bool = False
    # What a `dataset_fn` has made: its batches are for one replica each.

    @property
    def cutting(self) -> dict[str, Any]:
        """How arrays are cut into batches."""
        return {"batch_size": self.batch_size, "shuffle": self.shuffle, "drop_last": self.drop_last}

    def anew(self, cutting: dict[str, Any]) -> dict[str, Any]:
        """Return how to cut what was distributed so, and is once more: likewise, where nothing else is asked for."""
        return self.cutting if _Asked(**cutting) == _NO_OPTIONS else cutting

    def serves(self, options: InputOptions | None, **cutting: Any) -> bool:
        """Whether what was distributed so serves who asks for this: for nothing else, or for the same once more."""
        return _Asked(_options(options), **cutting) in (_NO_OPTIONS, self)


_NO_OPTIONS = _Asked()


# ---- iterators ----------------------------------------------------------------------------------------


@final
class DistributedIterator(Underway):
    """The batches of one epoch, in order. Not to be used inside a function that `strategy.run` calls."""

    def __init__(self, batches: Iterator[Any], spec: Callable[[], Any]) -> None:
        self._batches = batches
        self._spec = spec

    @property
    def element_spec(self) -> Any:
        """The structure of a batch, as the dataset's `element_spec`."""
        return self._spec()

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        if on_one_replica():
            raise UsageError(_OUTSIDE)
        # OpenMP's threads spin for a while after each operation, on cores that CPU replicas are about to need.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return next(self._batches)
        finally:
            torch.set_num_threads(threads)

    def get_next(self) -> Any:
        """Return the next batch, as `next(iterator)` does; StopIteration after the last one."""
        return next(self)

    def get_next_as_optional(self) -> OptionalBatch:
        """Return the next batch in an OptionalBatch, which is empty after the last one."""
        return OptionalBatch(tuple(itertools.islice(self, 1)), self._spec)

    def __reduce__(self) -> Any:
        return (_InController, ())


@final
@dataclass(frozen=True, slots=True)
class OptionalBatch:
    """A batch, or nothing where there are no more. Source: tf.experimental.Optional."""

    _batch: tuple[Any, ...]
    _spec: Callable[[], Any] = field(repr=False)

    @property
    def element_spec(self) -> Any:
        """The structure of a batch, as the dataset's `element_spec`."""
        return self._spec()

    def has_value(self) -> bool:
        """Whether there was a batch."""
        return bool(self._batch)

    def get_value(self) -> Any:
        """Return the batch. Raises UsageError where there was none."""
        if not self._batch:
            raise UsageError("there was no next batch: ask has_value() first")
        return self._batch[0]


@final
class _InController:
    """What another process has of an iterator or a dataset: a function that a replica runs of the controller's."""

    def __init__(self, length: int | None = None) -> None:
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the source of these batches does not know how many there are")
        return self._length

    def __getattr__(self, name: str) -> Never:
        raise AttributeError(
            f"a distributed dataset stays where it was made: ask for its `{name}` there, and pass that to the function"
        )

    def __iter__(self) -> Never:
        raise _of_the_controller()

    __next__ = get_next = get_next_as_optional = __iter__

    def __repr__(self) -> str:
        return "<a distributed dataset of another process, or an iterator of one>"


_OUTSIDE = (
    "next(iterator) should be called from outside of replica_fn. e.g. strategy.run(replica_fn, args=(next(iterator),))"
)


def _of_the_controller() -> UsageError:
    return UsageError(
        f"{_OUTSIDE}. In a mirrored cell distribute what it was made of, strategy.distribute_dataset(source): this "
        "one gives its batches in the process alone that made it"
    )


class DistributedDataset(Distributed, ABC):
    """The batches of a source, cut into shares or dealt out; each `iter()` is a new epoch. Made by a strategy."""

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """The structure of a batch, a spec a leaf; loads an example to see it."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of steps in an epoch; TypeError where the source does not know."""

    @abstractmethod
    def __iter__(self) -> DistributedIterator: ...

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # What is copied goes through the same source, for the same replicas.
        return self


# ---- the controller -----------------------------------------------------------------------------------


class _OfController(DistributedDataset, ABC):
    """What `run` takes in each step, made here of whole batches."""

    source: Any
    _asked: _Asked
    _num_replicas: int
    _batches: GlobalBatches

    @abstractmethod
    def _steps(self, batches: Generator[Share, None, None]) -> Iterator[Any]: ...

    def __iter__(self) -> DistributedIterator:
        steps, prefetch = self._steps(iter(self._batches)), self._asked.options.prefetch
        return DistributedIterator(ahead(steps, prefetch) if prefetch else steps, lambda: self.element_spec)

    def __reduce__(self) -> Any:
        try:
            return _InController, (len(self),)
        except TypeError:
            return _InController, ()


@final
class ControllerDataset(_OfController):
    """The global batches of a source as a plain loop over it gives them, each a nest of PerReplica.

    Every leaf of a batch is a PerReplica of the replicas' parts, on the CPU, of no examples where there are not
    enough; `run` brings each part to its replica's device and weighs gradients by `PerReplica.shares`. With one
    replica batches are plain. Each `iter()` is a new epoch. `dataset`, `batch_size` (the global one), `sampler` and
    the like are those of the DataLoader that it was made of.

    Raises UsageError for a source that cannot be cut, that is empty, or that is already sharded.
    """

    def __init__(self, source: Any, *, num_replicas: int, options: InputOptions | None = None, **cutting: Any) -> None:
        self.source = source
        self._asked = _Asked(_options(options), **cutting)
        self._num_replicas = num_replicas
        self._warned = False
        # Of batches that cannot be cut.
        self._batches = GlobalBatches(source, num_replicas=num_replicas, **self._asked.cutting)

    @classmethod
    def of(
        cls, source: Any, num_replicas: int, options: InputOptions | None = None, **cutting: Any
    ) -> DistributedDataset:
        """Return the batches of a source; of one that was distributed already itself, unless it is to be otherwise.

        Raises UsageError for options of one that a function has made.
        """
        if isinstance(source, _OfController):
            if source._num_replicas == num_replicas and source._asked.serves(options, **cutting):
                return source
            if source._asked.dealt:
                raise _made_by_a_function()
            source, cutting = source.source, source._asked.anew(cutting)
        if isinstance(source, _InReplicas):
            raise source.elsewhere()
        return cls(source, num_replicas=num_replicas, options=options, **cutting)

    @property
    def element_spec(self) -> Any:
        """The structure of a batch with a PerReplicaSpec a leaf; loads an example to see it."""
        return spec_of(*self._batches.sample(), self._num_replicas)

    def __len__(self) -> int:
        """The number of global batches in an epoch; TypeError where the source does not know."""
        return len(self._batches)

    def _steps(self, batches: Generator[Share, None, None]) -> Iterator[Any]:
        with closing(batches):
            for share in batches:
                yield self._cut(share.batch, share.global_examples)

    def _cut(self, batch: Any, total: int) -> Any:
        if self._num_replicas == 1:
            return batch
        parts = [share_of(total, i, self._num_replicas) for i in range(self._num_replicas)]
        sizes = tuple(part.stop - part.start for part in parts)
        if isinstance(batch, Parts):
            # Not with their sizes: a tuple of as many tensors as there are examples is no list of examples here.
            return joined(batch.by_replica, [0] * len(sizes), lambda pieces: _one_or_each(pieces, sizes))
        found = spread(batch, parts, total, lambda pieces: PerReplica(pieces, shares=sizes))
        if found is batch and not self._warned:
            self._warned = True
            warnings.warn(
                f"a {type(batch).__name__} cannot be cut: every replica gets the whole of each batch. Have collate_fn "
                "return tensors or arrays, or a tuple, list, dict or dataclass of them",
                stacklevel=users_level(),
            )
        return found


def _one_or_each(pieces: list[Any], sizes: tuple[int, ...]) -> Any:
    """What every replica's part has: None or a name stay as they are, where a number may be one of each's own."""
    one = pieces[0]
    own = isinstance(one, (torch.Tensor, Number)) or any(piece is not one for piece in pieces)
    return PerReplica(pieces, shares=sizes) if own else one


@final
class ControllerFunctionDataset(_OfController):
    """The batches that a function's dataset gives, dealt out to the replicas in turn: a nest of PerReplica a step.

    `dataset_fn(InputContext)` is called once, here, and returns a DataLoader or another iterable of batches, each
    for one replica. In a step with too few of them the last replicas get batches of no examples; where the batches
    are single elements (numbers, tensors of no dimension), there is no such step, as in TensorFlow. Each `iter()`
    goes through the same dataset again. Its `batch_size` is that of the DataLoader: one replica's.

    Raises UsageError for what is no iterable of batches.
    """

    def __init__(
        self, dataset_fn: Callable[[InputContext], Any], *, num_replicas: int, options: InputOptions | None = None
    ) -> None:
        self._asked = _Asked(_options(options), dealt=True)
        self._num_replicas = num_replicas
        self._made = _made_by(dataset_fn, num_replicas)
        self.source = _given(self._made)
        self._batches = GlobalBatches(self._made, num_replicas=num_replicas, dealt=True)

    @property
    def element_spec(self) -> Any:
        """The structure of a batch with a PerReplicaSpec a leaf; loads an example to see it."""
        return spec_of(*_first_of(self._made, self._batches), self._num_replicas)

    def __len__(self) -> int:
        """The number of steps in an epoch; TypeError where the source does not know."""
        return _steps_of(self._made, self._batches, self._num_replicas)

    def _steps(self, batches: Generator[Share, None, None]) -> Iterator[Any]:
        with closing(batches):
            while step := list(itertools.islice(batches, self._num_replicas)):
                if len(step) < self._num_replicas and _is_single(self._made, step[0].batch):
                    return
                yield self._dealt(step)

    def _dealt(self, step: list[Share]) -> Any:
        if self._num_replicas == 1:
            return step[0].batch
        first = step[0]
        lacking = self._num_replicas - len(step)
        nothing = emptied(first.batch, first.global_examples) if lacking else None
        batches = [*(share.batch for share in step), *[nothing] * lacking]
        sizes = tuple(share.global_examples for share in step) + (0,) * lacking
        # One element that is a list of one is no list of examples.
        totals = [0] * len(sizes) if is_single(first.batch) else sizes
        return joined(batches, totals, lambda pieces: PerReplica(pieces, shares=sizes))


# ---- a replica ----------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class ReplicaInput:
    """Which replica its input is for, and what data/ has to be handed for it; see DistributedDataset."""

    replica_id: int
    num_replicas: int
    device: torch.device
    randomness: Callable[[], AbstractContextManager[None]]
    agree: Callable[[bytes], bytes]
    on_batch: Callable[[int, int, Any], None]
    on_end: Callable[[], None]
    loaders: Loaders
    on_wanted: Callable[[], None] = lambda: None

    def dataset(self, source: Any, options: InputOptions, **cutting: Any) -> data.DistributedDataset:
        """Return this replica's shares of the global batches of a source."""
        return data.DistributedDataset(
            source,
            replica_id=self.replica_id,
            num_replicas=self.num_replicas,
            device=self.device,
            randomness=self.randomness,
            agree=self.agree,
            on_batch=self.on_batch,
            on_end=self.on_end,
            on_wanted=self.on_wanted,
            loaders=self.loaders,
            prefetch=options.prefetch,
            # Without a GPU torch warns, and pins nothing.
            pin_memory=options.pin_memory if self.device.type == "cuda" else None,
            **cutting,
        )


@final
class ReplicaDataset(DistributedDataset):
    """One replica's shares of global batches, on its device: a dataset that was distributed where it is used.

    `dataset`, `batch_size` (the global one), `sampler` and the like are those of the DataLoader that it was made of.
    To the notebook its name means that source.
    """

    def __init__(
        self,
        made: Any,
        replica: ReplicaInput,
        options: InputOptions | None = None,
        *,
        dealt: bool = False,
        **cutting: Any,
    ) -> None:
        self._made, self.source = made, _given(made) if dealt else made
        self._replica = replica
        self._asked = _Asked(_options(options), dealt=dealt, **cutting)
        self._dataset = replica.dataset(made, self._asked.options, dealt=dealt, **cutting)

    @classmethod
    def of(cls, source: Any, replica: ReplicaInput, options: InputOptions | None = None, **cutting: Any) -> Self:
        """Return the shares of a source; of one that was distributed already itself, unless it is to be otherwise.

        Raises UsageError for options of one that a function has made.
        """
        if isinstance(source, ReplicaDataset):
            if source._replica is replica and source._asked.serves(options, **cutting):
                return source
            if source._asked.dealt:
                raise _made_by_a_function()
            source, cutting = source.source, source._asked.anew(cutting)
        if isinstance(source, _InController):
            raise _of_the_controller()
        if isinstance(source, _InReplicas):
            raise source.elsewhere()
        return cls(source, replica, options, **cutting)

    @classmethod
    def from_function(
        cls, dataset_fn: Callable[[InputContext], Any], replica: ReplicaInput, options: InputOptions | None = None
    ) -> ReplicaDataset:
        """Return this replica's batches, every n-th, of the dataset that `dataset_fn` makes on each replica.

        The function runs with the random numbers that the replicas have in common, so that they all make the same.
        """
        with replica.randomness():
            loader = _made_by(dataset_fn, replica.num_replicas)
        return cls(loader, replica, options, dealt=True)

    def follow(self, source: Any) -> None:
        """Deal out this from now on. Raises UsageError for what cannot be cut."""
        made = _distributed(_loaded(source) if self._asked.dealt else source, self._asked)
        vars(self).update(vars(made))

    @property
    def element_spec(self) -> Any:
        """The structure of a batch with a TensorSpec a leaf; loads an example to see it."""
        return spec_of(*_first_of(self._made, self._dataset))

    def __len__(self) -> int:
        """The number of steps in an epoch; TypeError where the source does not know."""
        if self._asked.dealt:
            return _steps_of(self._made, self._dataset, self._replica.num_replicas)
        return len(self._dataset)

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(iter(self._dataset), lambda: self.element_spec)

    def __reduce__(self) -> Any:
        if not here or self._replica is not here[0]:
            raise TransferError(
                f"a dataset that was distributed, made of a {type(self.source).__name__}, gives its batches in this "
                "process alone: keep its `source`, and distribute that where it is used"
            )
        return _distributed, (self._made, self._asked)


here: list[ReplicaInput] = []
# Of the replica that this process is, whose datasets travel.


class _InReplicas(Distributed):
    """What the notebook has of a dataset that the replicas distribute, in an object that keeps it."""

    def __init__(self, made: Any, asked: _Asked) -> None:
        self.source = made
        self._asked = asked

    def __repr__(self) -> str:
        return f"<{type(self.source).__name__} that is distributed in the replicas>"

    def elsewhere(self) -> UsageError:
        return UsageError(
            f"this dataset, made of a {type(self.source).__name__}, is distributed in the replicas: go through it in "
            "a %%mirrored cell, or here through its `source`"
        )

    def __len__(self) -> Never:
        raise self.elsewhere()

    def __iter__(self) -> Never:
        raise self.elsewhere()

    def __reduce__(self) -> Any:
        return _distributed, (self.source, self._asked)


def _distributed(made: Any, asked: _Asked) -> ReplicaDataset | _InReplicas:
    """Return what a replica's dataset is in this process: that replica, another one, or the notebook."""
    if not here:
        return _InReplicas(made, asked)
    return ReplicaDataset(made, here[0], asked.options, dealt=asked.dealt, **asked.cutting)


# ---- what a dataset_fn returns ------------------------------------------------------------------------


def _made_by_a_function() -> UsageError:
    return UsageError(
        "this dataset was made by a function: give it its options where it is made, and have each strategy make its "
        "own"
    )


def _made_by(dataset_fn: Callable[[InputContext], Any], num_replicas: int) -> DataLoader[Any]:
    """Call a `dataset_fn` and return a DataLoader of its batches."""
    if not callable(dataset_fn):
        raise UsageError(f"`dataset_fn` must be a function of an InputContext, not {type(dataset_fn).__name__}")
    made = dataset_fn(InputContext(1, 0, num_replicas))
    if isinstance(made, (Distributed, Underway)):
        raise UsageError(
            f"`dataset_fn` returned a {type(made).__name__}, which is dealt out already: return the DataLoader that "
            "it is made of, with the batch size of one replica"
        )
    if isinstance(made, DataLoader):
        return made
    if isinstance(made, (torch.Tensor, np.ndarray, dict, str, bytes)) or not isinstance(made, Iterable):
        raise UsageError(
            f"`dataset_fn` returned a {type(made).__name__}; it must return a DataLoader or another iterable of "
            "batches, each for one replica"
        )
    return _loaded(made)


def _loaded(made: Any) -> DataLoader[Any]:
    """Return a DataLoader of these batches; of a DataLoader itself."""
    if isinstance(made, DataLoader):
        return made
    return DataLoader(_Batches(made), batch_size=None, collate_fn=_of_tensors)


def _of_tensors(batch: Any) -> Any:
    """Return a batch with its arrays as tensors; torch's own function for that makes a list of a tuple."""
    return pytree.tree_map(default_convert, batch)


def _given(made: DataLoader[Any]) -> Any:
    """Return what a `dataset_fn` returned."""
    return made.dataset._batches if isinstance(made.dataset, _Batches) else made


@final
class _Batches(IterableDataset[Any]):
    """Whole batches, from any iterable."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._kind = type(batches).__name__
        self._once = isinstance(batches, Iterator)
        self._begun = False

    def __len__(self) -> int:
        """The number of batches; TypeError where the iterable does not know."""
        return len(cast(Any, self._batches))

    def __iter__(self) -> Iterator[Any]:
        if self._once and self._begun:
            raise UsageError(
                f"`dataset_fn` returned a {self._kind}, which can be gone through only once; return "
                "a DataLoader, a list, or an object whose __iter__ starts over"
            )
        self._begun = True
        return iter(self._batches)

    def peek(self) -> Any:
        """Return the first batch, which a later iteration still gives."""
        if self._once and self._begun:
            raise UsageError("`dataset_fn` returned an iterator that was begun already; ask for the spec before")
        batches = iter(self._batches)
        first = next(batches, None)
        if first is None:
            raise UsageError("`dataset_fn` returned no batch")
        if self._once:
            self._batches = itertools.chain([first], batches)
        return first


def _first_of(made: Any, dataset: GlobalBatches | data.DistributedDataset) -> tuple[Any, int]:
    """Return a batch of a dataset and its number of examples; `made`: what it was made of."""
    if not isinstance(made, DataLoader) or not isinstance(made.dataset, _Batches):
        batch, total = dataset.sample()
    else:
        batch = made.collate_fn(made.dataset.peek())
        total = count(batch, or_single=True)
    return batch, 0 if is_single(batch) else total


def _is_single(made: DataLoader[Any], batch: Any) -> bool:
    """Whether these are single elements: there is none without examples, for a replica that is left without one."""
    return made.batch_size is None and is_single(batch)


def _steps_of(made: DataLoader[Any], dataset: GlobalBatches | data.DistributedDataset, num_replicas: int) -> int:
    """Return the number of steps in which the batches of a `dataset_fn` are dealt out."""
    steps, rest = divmod(len(made), num_replicas)
    # An example is loaded only where it may make a difference.
    single = rest and made.batch_size is None and is_single(_first_of(made, dataset)[0])
    return steps + (1 if rest and not single else 0)
