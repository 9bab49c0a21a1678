"""What fit, evaluate and predict are fed: arrays, Datasets and DataLoaders as global batches, cut into shares.

Knows how examples are ordered, and which part of a global batch is whose. Knows no network and no process: a feed
is made where `fit` is called, travels to the replicas, and gives each its shares there.

    x, y, weights ─▶ feed() ─▶ Feed ─▶ pickled ─▶ shares(epoch, start) on each replica ─▶ Share, step by step

The order of an epoch is drawn from (seed, epoch) and from the generators that a DataLoader holds: the same for any
number of replicas, and the same again for whoever begins in the middle of it.
"""

from __future__ import annotations

import copy
import operator
import pickle
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from mirror_nb.batches import leaves, map_leaves, share_of
from mirror_nb.data import Distributed, DistributedDataset, Loaders
from mirror_nb.errors import UsageError
from mirror_nb.sampling import (
    describe,
    draws_only_at_first,
    index_sampler,
    iterates_plainly,
    length_of,
    random_streams,
)
from mirror_nb.training.columns import checked_arrays
from mirror_nb.training.offer import Offer

DEFAULT_BATCH_SIZE = 32
# Keras's.
RESIDENT_PART = 8
# Arrays that take less than one part in so many of a GPU's free memory are kept on it: their batches are cut there.

Agree = Callable[[bytes], bytes]
_GLOBAL = ("torch", "random", "numpy")
# The names that `random_streams` gives to the process's own streams.
_END: Any = object()


@final
@dataclass(frozen=True, slots=True)
class Share:
    """One replica's part of one global batch, on its device."""

    inputs: Any
    """What the network is called with: a tensor or a nest of them."""
    targets: Any
    """What its outputs are compared with; None where the batches hold inputs alone."""
    sample_weight: Any
    """A weight for each example, or a dict or list of such weights by output; None: all count the same."""
    examples: int
    """Number of examples here; with 0 the tensors are there, with their dtypes and trailing shapes."""
    global_examples: int
    """Number of examples of the global batch, over all replicas."""
    batch: Any
    """The same as it was given: the nest of the DataLoader, or (x, y) or (x, y, weight) or x."""


class Feed(ABC):
    """Global batches of one fit, evaluate or predict; pickled to the replicas."""

    batch_size: int | None
    """Examples of a full global batch; None where a DataLoader does not say."""
    num_batches: int | None
    """Global batches of an epoch; None where the source does not know."""
    num_examples: int | None
    """Examples of an epoch; None where the source does not know."""

    @abstractmethod
    def shares(
        self,
        replica_id: int,
        num_replicas: int,
        device: torch.device,
        *,
        epoch: int,
        start: int = 0,
        agree: Agree | None = None,
    ) -> Iterator[Share]:
        """Yield this replica's share of each global batch of an epoch, from the one numbered `start`.

        `agree(mine)` returns replica 0's bytes on every replica, and is called once, before the first share; give
        it where each replica made its feed by itself. Raises UsageError where these differ.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What the order is drawn from besides the epoch: tensors and plain values.

        While `shares` is in the middle of an epoch, as it was at its start: `load_state`, then `shares` with the
        same epoch and `start` the number of batches seen, give the remaining ones. After its end (or after
        `shares` was closed), as it is now: for the next epoch.
        """

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `state()` gave. Raises UsageError for what another kind of feed gave.

        In the middle of an epoch only a feed of the same batches goes on; at its beginning they may be others.
        """

    def _sizes(self) -> dict[str, int | None]:
        return {"batch_size": self.batch_size, "num_batches": self.num_batches, "num_examples": self.num_examples}


def feed(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
) -> Feed:
    """Make a feed of what users give.

    `x` is a tensor, a NumPy array, a pandas object, a list of numbers, or a nest (tuple, list, dict) of these with
    the examples along dimension 0, and `y` likewise; or a Dataset, or a DataLoader, alone. `sample_weight` is one of
    these, or a dict or list of them by output, with None for one without. NumPy's float64 becomes torch's default
    dtype. `batch_size` is the global one (32 if None). The order of a shuffled epoch depends on
    (`seed`, epoch) alone; a DataLoader has its own batch size and sampler, and `shuffle` is nothing to it.

    Batches of a Dataset or a DataLoader that are tuples or lists of two or three are (inputs, targets) and
    (inputs, targets, sample weights); all others are inputs. Of a DataLoader that was distributed it is the
    DataLoader.

    Raises UsageError for what cannot be cut into batches, lengths that differ, and no examples at all.
    """
    if isinstance(x, Distributed):
        x = _undistributed(x)
    if isinstance(x, DataLoader):
        _check_loader(x, y, sample_weight, batch_size)
        return LoaderFeed(x, seed)
    size = _checked_batch_size(batch_size)
    if _is_dataset(x):
        _check_alone(x, y, sample_weight)
        if type(x) is TensorDataset:
            return ArrayFeed(_columns_of(x), batch_size=size, shuffle=shuffle, seed=seed, listed=len(x.tensors) <= 3)
        return _feed_of_dataset(x, size, shuffle, seed)
    return ArrayFeed(checked_arrays(x, y, sample_weight), batch_size=size, shuffle=shuffle, seed=seed)


def _undistributed(dataset: Distributed) -> DataLoader[Any]:
    source = getattr(dataset, "source", None)
    if not isinstance(source, DataLoader):
        raise UsageError(
            "the data was distributed already, from something other than a DataLoader; fit, evaluate and predict "
            "divide batches themselves: pass them what you distributed"
        )
    return source


def split_validation(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return (x, y, sample_weight) to train on and to validate with: the last `fraction` of the examples.

    As in Keras they are taken before anything is shuffled. Raises UsageError for a Dataset or a DataLoader, and
    where one of the two parts would be empty.
    """
    if isinstance(x, DataLoader) or _is_dataset(x):
        raise UsageError(
            f"validation_split={fraction!r} cannot split a {type(x).__qualname__}: pass tensors or arrays, or give "
            "validation_data"
        )
    columns = checked_arrays(x, y, sample_weight)
    total = len(leaves(columns[0])[0])
    at = int(total * (1 - fraction)) if isinstance(fraction, (int, float)) and 0 < fraction < 1 else 0
    if not 0 < at < total:
        raise UsageError(
            f"validation_split={fraction!r} of {total} examples leaves nothing to train on or nothing to validate "
            "with; it is a fraction between 0 and 1"
        )
    first, last = (_rows(columns, part) for part in (slice(0, at), slice(at, total)))
    return first, last


def _rows(columns: Any, part: slice) -> Any:
    return map_leaves(columns, lambda column: None if column is None else column[part])


# ---- the order of an epoch ----------------------------------------------------------------------------


def _seeds(seed: int, epoch: int) -> list[int]:
    """Four independent numbers of 64 bits, the same on every machine."""
    mixed = np.random.SeedSequence([seed % 2**64, epoch]).generate_state(4, np.uint64)
    return [int(number) for number in mixed]


def _permutation(length: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(_seeds(seed, epoch)[0]), device="cpu")


# ---- arrays -------------------------------------------------------------------------------------------


@final
class ArrayFeed(Feed):
    """Tensors, cut along dimension 0; on a replica they stay where they arrived, and are copied by the share."""

    def __init__(
        self, columns: tuple[Any, Any, Any], *, batch_size: int, shuffle: bool, seed: int, listed: bool = False
    ) -> None:
        """`columns`: x, y and the sample weights; `listed`: their batch is a list, as a DataLoader would make it."""
        self._columns = columns
        self._listed = listed
        self._shuffle = shuffle
        self._seed = seed
        self.batch_size: int = batch_size
        self.num_examples: int = len(leaves(columns[0])[0])
        self.num_batches: int = -(-self.num_examples // batch_size)
        self._resident: tuple[torch.device, Any] | None = None
        self._begun: dict[str, Any] | None = None
        self._offer: Offer | None = None

    def offer(self) -> str | None:
        """Have replicas fetch the arrays from here, until `withdraw`; return the path that they have to reach.

        None where they are sent: few, and what lies on a GPU.
        """
        if not all(column is None or column.device.type == "cpu" for column in leaves(self._columns)):
            return None
        self._offer = self._offer or Offer(self._columns)
        if self._offer.path is None:
            self.withdraw()
        return None if self._offer is None else self._offer.path

    def withdraw(self) -> None:
        """Send the arrays from now on; who has fetched them keeps them."""
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.withdraw()

    def shares(
        self,
        replica_id: int,
        num_replicas: int,
        device: torch.device,
        *,
        epoch: int,
        start: int = 0,
        agree: Agree | None = None,
    ) -> Iterator[Share]:
        _check_begun(self._begun, self._sizes(), start)
        if agree is not None:
            _agree_on(agree, replica_id, str(self), {})
        return self._shares(replica_id, num_replicas, device, epoch, start)

    def _shares(
        self, replica_id: int, num_replicas: int, device: torch.device, epoch: int, start: int
    ) -> Iterator[Share]:
        columns = self._near(device)
        order = _permutation(self.num_examples, self._seed, epoch) if self._shuffle else None
        if order is not None and columns is not self._columns:
            order = order.to(device)
        for first in range(start * self.batch_size, self.num_examples, self.batch_size):
            total = min(self.batch_size, self.num_examples - first)
            part = share_of(total, replica_id, num_replicas)
            rows = slice(first + part.start, first + part.stop)
            x, y, weight = _taken(columns, rows if order is None else order[rows], device)
            y = _as_targets(y) if isinstance(y, Tensor) else map_leaves(y, _as_targets)
            yield Share(x, y, weight, part.stop - part.start, total, self._batch(x, y, weight))

    @property
    def targets(self) -> Any:
        """All that the outputs are compared with, in the order in which it was given; None without."""
        return self._columns[1]

    def _batch(self, x: Any, y: Any, weight: Any) -> Any:
        members = [member for member in (x, y, weight) if member is not None]
        if self._listed:
            return members
        return x if len(members) == 1 else tuple(members)

    def state(self) -> dict[str, Any]:
        return {"seed": self._seed, "sizes": self._sizes()}

    def load_state(self, state: dict[str, Any]) -> None:
        _check_state(self, state, {"seed", "sizes"})
        self._seed, self._begun = state["seed"], state["sizes"]

    def _near(self, device: torch.device) -> Any:
        """The arrays on the GPU where they take little of it; where they are otherwise."""
        if device.type != "cuda":
            return self._columns
        if self._resident is None or self._resident[0] != device:
            nbytes = sum(column.nbytes for column in leaves(self._columns) if column is not None)
            free, _ = torch.cuda.mem_get_info(device)
            if nbytes * RESIDENT_PART > free:
                return self._columns
            self._resident = (device, map_leaves(self._columns, lambda c: None if c is None else c.to(device)))
        return self._resident[1]

    def __str__(self) -> str:
        shapes = [tuple(column.shape) for column in leaves(self._columns) if column is not None]
        order = f"shuffled from seed {self._seed}" if self._shuffle else "in order"
        return f"arrays of shapes {shapes}, batch_size={self.batch_size}, {order}"

    def __getstate__(self) -> dict[str, Any]:
        columns = self._columns if self._offer is None else self._offer
        return {**self.__dict__, "_resident": None, "_offer": None, "_columns": columns}


def _taken(columns: Any, rows: slice | Tensor, device: torch.device) -> Any:
    def take(column: Any) -> Any:
        return None if column is None else _take(column, rows, device)

    # Mostly tensors: a structure is looked into where there is one.
    return tuple(take(c) if c is None or isinstance(c, Tensor) else map_leaves(c, take) for c in columns)


def _take(column: Tensor, rows: slice | Tensor, device: torch.device) -> Tensor:
    """Rows as a tensor of their own: a network may write to its inputs, and the user's stay as they are."""
    if isinstance(rows, slice):
        part, fresh = column[rows], False
    else:
        part, fresh = column.index_select(0, rows.to(column.device)), True
    if part.device != device:
        # Pageable memory would make the copy wait for the device.
        pinned = device.type == "cuda" and part.device.type == "cpu"
        return part.pin_memory().to(device, non_blocking=True) if pinned else part.to(device)
    return part if fresh else part.clone()


def _as_targets(column: Any) -> Any:
    """Classes as the losses want them; by the share, since all as int64 would take eight times a mask's bytes."""
    whole = isinstance(column, Tensor) and not column.dtype.is_floating_point and not column.dtype.is_complex
    return column.long() if whole and column.dtype is not torch.bool else column


# ---- DataLoaders and Datasets -------------------------------------------------------------------------


@final
class LoaderFeed(Feed):
    """A DataLoader's global batches, the very ones that it would give one process, of which a replica loads its share.

    Samplers draw from random streams of the feed's own, set anew for each epoch, and from the generators that they
    and the loader hold. What a map-style dataset draws while it loads an example is the replica's own; workers
    begin with new seeds where an epoch is begun in its middle. What cannot be skipped by its index (iterable
    datasets, loaders with an `__iter__` of their own) is loaded and dropped.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, order: _EpochOrder | None = None) -> None:
        """`order`: the loader's sampler where it is ours."""
        self._loader = loader
        self._seed = seed
        self._order = order
        self._loaders = Loaders()
        self._cut: tuple[DataLoader[Any], _Drawn | None] | None = None
        self._at_start: dict[str, Any] | None = None
        self._begun: dict[str, Any] | None = None
        self._workers_are_seeded = getattr(loader, "_iterator", None) is not None
        self.batch_size = _batch_size_of(loader)
        self.num_batches = length_of(loader)
        self.num_examples = _num_examples_of(loader)

    def shares(
        self,
        replica_id: int,
        num_replicas: int,
        device: torch.device,
        *,
        epoch: int,
        start: int = 0,
        agree: Agree | None = None,
    ) -> Iterator[Share]:
        _check_begun(self._begun, self._sizes(), start)
        if agree is not None:
            self._hold(_agree_on(agree, replica_id, describe(self._loader), self._held()))
        if self._order is not None:
            self._order.begin(self._seed, epoch)
        streams = _EpochStreams(self._seed, epoch)
        loader, drawn = self._cut = self._cut or _cuttable(self._loader)
        if drawn is not None:
            drawn.begin(streams, start)
            loader.generator.manual_seed(streams.for_workers)
        counts: deque[tuple[int, int]] = deque()
        batches = DistributedDataset(
            loader,
            replica_id=replica_id,
            num_replicas=num_replicas,
            device=device,
            randomness=nullcontext,
            agree=_as_it_is,
            on_batch=lambda local, total, batch: counts.append((local, total)),
            on_end=_nothing,
            loaders=self._loaders,
        )
        return self._shares(batches, streams, counts, drawn is not None, start)

    def _shares(
        self,
        batches: Iterable[Any],
        streams: _EpochStreams,
        counts: deque[tuple[int, int]],
        by_index: bool,
        start: int,
    ) -> Iterator[Share]:
        self._at_start = self._position()
        # Whatever is drawn here is drawn again by who begins in the middle: it must come from nobody else's numbers.
        with streams.current():
            if by_index:
                self._draw_worker_seeds()
            iterator = iter(batches)
        loading = nullcontext if by_index else streams.current
        for _ in range(0 if by_index else start):
            with loading():
                next(iterator, None)
        counts.clear()
        try:
            while True:
                with loading():
                    batch = next(iterator, _END)
                if batch is _END:
                    break
                yield _share(batch, *counts.popleft())
        except GeneratorExit:
            self._at_start = None
            raise
        self._at_start = None

    def _draw_worker_seeds(self) -> None:
        """Draw what a plain loop over the loader takes from its generator; our workers' seeds are the epoch's."""
        if self._loader.generator is not None and not (self._loader.persistent_workers and self._workers_are_seeded):
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        self._workers_are_seeded = True

    def state(self) -> dict[str, Any]:
        return self._position() if self._at_start is None else self._at_start

    def _position(self) -> dict[str, Any]:
        streams = {name: _to_plain(state) for name, state in self._held().items()}
        return {
            "seed": self._seed,
            "sizes": self._sizes(),
            "streams": streams,
            "workers_are_seeded": self._workers_are_seeded,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        _check_state(self, state, {"seed", "sizes", "streams", "workers_are_seeded"})
        known = self._held()
        if state["streams"].keys() != known.keys():
            raise UsageError(
                f"the position belongs to another DataLoader: it has the random streams {sorted(state['streams'])}, "
                f"but this one ({describe(self._loader)}) has {sorted(known)}"
            )
        self._seed, self._begun, self._at_start = state["seed"], state["sizes"], None
        self._workers_are_seeded = state["workers_are_seeded"]
        self._hold({name: _from_plain(plain) for name, plain in state["streams"].items()})

    def _held(self) -> dict[str, Any]:
        """The states of the generators that the loader and its samplers hold."""
        return {name: stream.get() for name, stream in random_streams(self._loader).items() if name not in _GLOBAL}

    def _hold(self, states: dict[str, Any]) -> None:
        streams = random_streams(self._loader)
        for name, state in states.items():
            streams[name].set(state)

    def __getstate__(self) -> dict[str, Any]:
        loader = self._loader
        if getattr(loader, "_iterator", None) is not None:
            # Of persistent workers, which are this process's.
            loader = copy.copy(loader)
            loader._iterator = None
        return {**self.__dict__, "_loader": loader, "_loaders": None, "_cut": None, "_at_start": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _loaders=Loaders())


def _as_it_is(mine: bytes) -> bytes:
    return mine


def _nothing() -> None:
    """Nobody here asks when the loop is left."""


def _share(batch: Any, examples: int, total: int) -> Share:
    parts = batch if isinstance(batch, (tuple, list)) and len(batch) <= 3 else (batch,)
    inputs, targets, weight = (*parts, None, None, None)[:3]
    return Share(inputs, targets, weight, examples, total, batch)


def _cuttable(loader: DataLoader[Any]) -> tuple[DataLoader[Any], _Drawn | None]:
    """The loader with its index batches drawn by us; itself, and None, where it has none."""
    indexed = not isinstance(loader.dataset, IterableDataset) and iterates_plainly(loader)
    if not indexed or (loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler)):
        return loader, None
    drawn = _Drawn(index_sampler(loader))
    twin = copy.copy(loader)
    # Past __setattr__, which refuses to change samplers.
    twin.__dict__["_iterator"] = None
    # A generator for the workers' seeds alone: which workers draw one depends on how often they were started.
    twin.__dict__["generator"] = torch.Generator()
    twin.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = drawn
    return twin, drawn


@final
class _Drawn(BatchSampler):
    """A user's index batches, drawn in an epoch's random streams, the first ones left out."""

    def __init__(self, source: Any) -> None:
        self.sampler = source
        # Under the name by which `samplers` finds what is inside.
        self._streams: _EpochStreams | None = None
        self._start = 0

    def begin(self, streams: _EpochStreams, start: int) -> None:
        self._streams, self._start = streams, start

    def __iter__(self) -> Iterator[Any]:
        assert self._streams is not None
        current = self._streams.current
        with current():
            drawn = iter(self.sampler)
        return self._batches(drawn, current, self._start)

    def _batches(self, drawn: Iterator[Any], current: Callable[[], Any], start: int) -> Iterator[Any]:
        later = nullcontext if draws_only_at_first(self.sampler) else current
        for number in range(2**63):
            with current() if number == 0 else later():
                batch = next(drawn, _END)
            if batch is _END:
                return
            if number >= start:
                yield batch

    def __len__(self) -> int:
        return len(cast(Any, self.sampler))


@final
class _EpochStreams:
    """Random streams of an epoch, to take the place of the process's for a while."""

    def __init__(self, seed: int, epoch: int) -> None:
        # Never by torch.manual_seed and the like: in a scope these say which stream is meant to be current.
        for_torch, for_python, for_numpy, self.for_workers = _seeds(seed, epoch)
        self._states: tuple[Any, ...] = (
            torch.Generator().manual_seed(for_torch).get_state(),
            random.Random(for_python).getstate(),
            np.random.RandomState(for_numpy % 2**32).get_state(),
        )
        self._entered = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let everything inside draw from these; may be entered inside itself."""
        if self._entered:
            yield
            return
        before = _process_states()
        _set_process_states(self._states)
        self._entered = True
        try:
            yield
        finally:
            self._entered = False
            self._states = _process_states()
            _set_process_states(before)


def _process_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_process_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def _columns_of(dataset: TensorDataset) -> tuple[Any, Any, Any]:
    """Inputs, targets and weights; more than three tensors are all inputs."""
    tensors = dataset.tensors if len(dataset.tensors) <= 3 else (list(dataset.tensors),)
    return (*tensors, None, None)[:3]


def _feed_of_dataset(dataset: Any, batch_size: int, shuffle: bool, seed: int) -> LoaderFeed:
    if isinstance(dataset, IterableDataset):
        return LoaderFeed(DataLoader(dataset, batch_size=batch_size), seed)
    length = length_of(dataset)
    if length is None:
        raise UsageError(f"the {type(dataset).__qualname__} has no len(): give it a `__len__`, or pass a DataLoader")
    order = _EpochOrder(length, shuffle)
    return LoaderFeed(DataLoader(dataset, batch_size=batch_size, sampler=order), seed, order)


@final
class _EpochOrder(Sampler[int]):
    """The order in which arrays of the same length would be gone through."""

    def __init__(self, length: int, shuffle: bool) -> None:
        self._length = length
        self._shuffle = shuffle
        self._seed, self._epoch = 0, 0

    def begin(self, seed: int, epoch: int) -> None:
        self._seed, self._epoch = seed, epoch

    def __iter__(self) -> Iterator[int]:
        order = (
            _permutation(self._length, self._seed, self._epoch)
            if self._shuffle
            else torch.arange(self._length, device="cpu")
        )
        return iter(order.tolist())

    def __len__(self) -> int:
        return self._length


def _batch_size_of(loader: DataLoader[Any]) -> int | None:
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _num_examples_of(loader: DataLoader[Any]) -> int | None:
    """Known where the loader makes its own batches of a sampler's examples."""
    if type(loader.batch_sampler) is not BatchSampler or not iterates_plainly(loader):
        return None
    examples, batches, size = length_of(loader.sampler), length_of(loader), _batch_size_of(loader)
    if examples is None or batches is None or size is None:
        return None
    return batches * size if loader.batch_sampler.drop_last else examples


# ---- random states as plain values --------------------------------------------------------------------


def _to_plain(state: Any) -> Any:
    """A generator's state without NumPy's arrays, which a file read with weights_only may not hold."""
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": str(state.dtype)}
    if isinstance(state, Mapping):
        return {key: _to_plain(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(_to_plain(value) for value in state)
    return state.item() if isinstance(state, np.generic) else state


def _from_plain(plain: Any) -> Any:
    if isinstance(plain, Mapping):
        if plain.keys() == {"array", "dtype"}:
            return np.array(plain["array"], dtype=plain["dtype"])
        return {key: _from_plain(value) for key, value in plain.items()}
    return tuple(_from_plain(value) for value in plain) if isinstance(plain, tuple) else plain


# ---- agreement and checks -----------------------------------------------------------------------------


def _agree_on(agree: Agree, replica_id: int, mine: str, states: dict[str, Any]) -> dict[str, Any]:
    """Replica 0's random states; UsageError where it was given other data than this replica."""
    agreed, agreed_states = pickle.loads(agree(pickle.dumps((mine, states))))
    if (agreed, agreed_states.keys()) != (mine, states.keys()):
        raise UsageError(
            f"replica {replica_id} was given {mine} (random streams: {', '.join(states) or 'none'}), but replica 0 "
            f"{agreed} ({', '.join(agreed_states) or 'none'}); all replicas have to be given the same data"
        )
    return cast(dict[str, Any], agreed_states)


def _check_state(own: Feed, state: dict[str, Any], names: set[str]) -> None:
    if state.keys() != names:
        raise UsageError(
            f"the position belongs to another kind of data: it has {sorted(state)}, but {type(own).__name__} needs "
            f"{sorted(names)}; go on with the data that the training was begun with, or compile() to begin anew"
        )


def _check_begun(begun: dict[str, Any] | None, now: dict[str, Any], start: int) -> None:
    if start and begun is not None and begun != now:
        raise UsageError(
            f"an epoch of {begun} cannot go on, after {start} of its batches, with {now}; give the data and the batch "
            "size that the training was begun with, or compile() to begin anew"
        )


def _checked_batch_size(batch_size: Any) -> int:
    if batch_size is None:
        return DEFAULT_BATCH_SIZE
    try:
        size = operator.index(batch_size)
    except TypeError:
        size = 0
    if size < 1 or isinstance(batch_size, bool):
        raise UsageError(f"`batch_size` is the number of examples of a global batch, 1 or more, not {batch_size!r}")
    return size


def _check_loader(loader: DataLoader[Any], y: Any, sample_weight: Any, batch_size: int | None) -> None:
    if batch_size is not None:
        raise UsageError(
            f"batch_size={batch_size!r} was given together with a DataLoader (batch_size={loader.batch_size}); set it "
            "on the DataLoader, whose batch size is the global one"
        )
    _check_alone(loader, y, sample_weight)
    if not isinstance(loader.dataset, IterableDataset):
        _check_length(loader.dataset)


def _check_alone(source: Any, y: Any, sample_weight: Any) -> None:
    surplus = [name for name, value in (("y", y), ("sample_weight", sample_weight)) if value is not None]
    if surplus:
        raise UsageError(
            f"{' and '.join(surplus)} given together with a {type(source).__qualname__}: its batches have to be "
            "(inputs, targets) or (inputs, targets, sample weights)"
        )
    if not isinstance(source, (DataLoader, IterableDataset)):
        _check_length(source)


def _check_length(dataset: Any) -> None:
    if length_of(dataset) == 0:
        raise UsageError(f"no examples: len() of the {type(dataset).__qualname__} is 0")


def _is_dataset(x: Any) -> bool:
    """Whether x gives examples by itself: a Dataset, or what has its methods and is no array."""
    if isinstance(x, Dataset):
        return True
    if isinstance(x, (Tensor, np.ndarray, Mapping, list, tuple, str, bytes, type)):
        return False
    return all(hasattr(x, name) for name in ("__getitem__", "__len__")) and not (
        hasattr(x, "to_numpy") or hasattr(x, "__array__")
    )
