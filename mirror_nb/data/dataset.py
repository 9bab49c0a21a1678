"""Input: the global batches that one device would see, of which each replica loads only its share.

Knows PyTorch's DataLoader, arrays, and the rule by which a global batch is cut. Knows no process and no
collective: `agree` (every replica gets replica 0's bytes) and `randomness` (the random stream that is equal
on all replicas) are handed in.

    source ─▶ global batches ─▶ this replica's share ─▶ its device ─▶ the user's loop
              drawn inside randomness(), from a state agreed at the start of each epoch

The share is cut as early as the source allows: from the indices before anything is loaded (map-style datasets
and arrays), else from the batch after it was loaded (iterable-style datasets, and loaders that make whole
batches by themselves). A source whose batches are made for one replica each is not cut but dealt out, in turn.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from mirror_nb.data.arrays import as_tensor
from mirror_nb.data.batches import (
    checked_batch_size,
    count,
    cut,
    emptied,
    is_cuttable,
    is_single,
    leaves,
    map_leaves,
    share_of,
    to_device,
)
from mirror_nb.data.prefetch import ahead
from mirror_nb.data.sampling import (
    Agree,
    agree_on,
    check_unsharded,
    describe,
    draws_only_at_first,
    index_sampler,
    iterates_plainly,
    left_as_they_are,
    length_of,
    name_of,
    process_streams,
    random_streams,
)
from mirror_nb.errors import UsageError

Randomness = Callable[[], AbstractContextManager[None]]
_END: Any = object()


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica gets of one global batch."""

    local_examples: int
    """Number of examples in `batch`; 0 where there were not enough for every replica."""
    global_examples: int
    """Number of examples of the global batch, over all replicas."""
    batch: Any
    """The examples, collated; with 0 examples its structure, dtypes and trailing shapes are kept.

    `Parts`, where it is a whole batch that is to be cut and cannot be.
    """


class Parts(NamedTuple):
    """A global batch that cannot be cut once it is collated: each replica's examples, collated by themselves."""

    by_replica: list[Any]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a share is cut: which replica of how many, and the random stream that they have in common."""

    replica_id: int
    num_replicas: int
    randomness: Randomness
    dealt: bool = False
    # Each replica gets a batch of its own in turn, instead of its part of every batch.
    pin_memory: bool | None = None
    # None: as the DataLoader says.
    cut_later: int = 1
    # Into so many replicas' parts whole batches are cut by who gets them.

    def share(self, total: int) -> slice:
        return share_of(total, self.replica_id, self.num_replicas)

    def draw(self, batches: Iterator[Any]) -> list[Any]:
        """The source's batches that a step needs; none after the last one."""
        return list(itertools.islice(batches, self.num_replicas if self.dealt else 1))

    def steps(self, batches: int) -> int:
        """The number of steps that so many batches make."""
        return -(-batches // self.num_replicas) if self.dealt else batches


class _Shares(Protocol):
    """One replica's share of each global batch of a source, epoch after epoch."""

    swaps_streams: bool
    # Whether batches after the first still need the common random stream to be current.

    def begin(self) -> Generator[Share, None, None]: ...


@final
class Loaders:
    """The DataLoaders that were derived from a user's, kept as long as the user's own is alive.

    So `for epoch in ...: for batch in strategy.distribute_dataset(loader)` starts the workers of a loader
    with `persistent_workers=True` once. Whoever makes DistributedDatasets holds one of these, and gives them
    the same `randomness` (a bound method is): a derived loader keeps drawing from the one it was made with.
    """

    def __init__(self) -> None:
        self._derived: weakref.WeakKeyDictionary[DataLoader[Any], tuple[Any, _Shares]] = weakref.WeakKeyDictionary()

    def shares(self, loader: DataLoader[Any], place: _Place) -> _Shares:
        """This replica's shares of `loader`; the same object until a setting of `loader` is changed."""
        made_for = (place, *(getattr(loader, name, None) for name in _SETTINGS), loader.collate_fn)
        if not iterates_plainly(loader):
            # Nothing is derived from it, and its shares hold on to it: kept here, it would never go.
            return _BatchShares(loader, place)
        known = self._derived.get(loader)
        if known is None or known[0] != made_for:
            known = self._derived[loader] = (made_for, _shares_of(loader, place))
        return known[1]

    def close(self) -> None:
        """Let go of every derived loader, and so of its workers."""
        self._derived.clear()


@final
class DistributedDataset:
    """Iterates over one replica's share of every global batch; each `iter()` is a new epoch.

    `source` is a DataLoader, whose batch size is then the global one, or a tensor, an array or a (nested)
    tuple, list or dict of them, cut along dimension 0 into global batches of `batch_size` examples. The
    global batches are those that a single process would see with the same seed, shuffled or not. Batches
    arrive on `device`, arrays as tensors.

    `randomness()` makes the random stream that is equal on all replicas current (Python's, NumPy's and
    torch's on the CPU); `agree(mine)` returns replica 0's bytes on every replica and is called once an epoch;
    one replica alone uses neither. `on_wanted()` is called when a batch is asked for, `on_batch(local_examples,
    global_examples, batch)` just before it is handed out, `on_end()` after the last one, or when the loop is left
    early. `loaders` keeps derived DataLoaders between epochs.

    `dealt`: the batches of `source`, then a DataLoader, are for one replica each. Replica i gets the i-th, then
    the one `num_replicas` later; where they run out in the middle of a step, a batch of no examples.
    `prefetch`: this many batches are loaded ahead by a thread, where that leaves the global batches as they are:
    where only the first needs the random stream that the replicas have in common. `pin_memory` overrides the
    DataLoader's.

    Raises UsageError for a source that cannot be cut, that is empty, or that is already sharded.
    """

    def __init__(
        self,
        source: Any,
        *,
        replica_id: int,
        num_replicas: int,
        device: torch.device,
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        randomness: Randomness = contextlib.nullcontext,
        agree: Agree = lambda mine: mine,
        on_batch: Callable[[int, int, Any], None],
        on_end: Callable[[], None] = lambda: None,
        on_wanted: Callable[[], None] = lambda: None,
        loaders: Loaders | None = None,
        dealt: bool = False,
        prefetch: int = 0,
        pin_memory: bool | None = None,
    ) -> None:
        self._loader = _loader_of(source, num_replicas, batch_size, shuffle, drop_last)
        # One replica has no one to be equal with: it draws from the process's own stream, as plain PyTorch.
        self._randomness = randomness if num_replicas > 1 else contextlib.nullcontext
        self._place = _Place(replica_id, num_replicas, self._randomness, dealt, pin_memory)
        self._prefetch = prefetch
        self._device = device
        self._agree = agree
        self._on_batch = on_batch
        self._on_end = on_end
        self._on_wanted = on_wanted
        self._loaders = Loaders() if loaders is None else loaders

    def __len__(self) -> int:
        """The number of global batches in an epoch; TypeError where the source does not know."""
        return self._place.steps(len(self._loader))

    def __iter__(self) -> Iterator[Any]:
        if self._place.num_replicas > 1:
            self._agree_on_order()
        source = self._loaders.shares(self._loader, self._place)
        shares = source.begin()
        # Not from a thread: swapping the process's random streams there would disturb what the replica draws.
        swaps = source.swaps_streams and self._place.num_replicas > 1
        return self._deliver(ahead(shares, self._prefetch) if self._prefetch and not swaps else shares)

    def sample(self) -> tuple[Any, int]:
        """Load a batch as it comes from the source, uncut and on the CPU, and the number of its examples."""
        return _sample(self._loader, self._place.dealt)

    def _deliver(self, shares: Generator[Share, None, None]) -> Iterator[Any]:
        try:
            # Closed by name: an error's traceback may keep this frame, and so a thread, alive.
            with contextlib.closing(shares):
                self._on_wanted()
                for share in shares:
                    batch = to_device(share.batch, self._device)
                    self._on_batch(share.local_examples, share.global_examples, batch)
                    yield batch
                    self._on_wanted()
        finally:
            self._on_end()

    def _agree_on_order(self) -> None:
        """Give everything that the global batches are drawn from the state that it has on replica 0."""
        with self._randomness():
            streams = random_streams(self._loader)
            mine = {name: stream.get() for name, stream in streams.items()}
            agreed = agree_on(self._agree, self._place.replica_id, describe(self._loader), mine)
            for name, stream in streams.items():
                stream.set(agreed[name])


@final
class GlobalBatches:
    """The global batches of a source, whole, counted and on the CPU; each `iter()` is a new epoch.

    What a single process would see, with the same random numbers drawn in the same places. `source` and its
    options as for DistributedDataset; `num_replicas` tells whether a sharded DataLoader is a mistake. They are to be
    cut for so many replicas, and those that cannot be come as `Parts`; or they are `dealt`, for one replica each.
    """

    def __init__(
        self,
        source: Any,
        *,
        num_replicas: int,
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        dealt: bool = False,
    ) -> None:
        self._loader = _loader_of(source, num_replicas, batch_size, shuffle, drop_last)
        self._loaders = Loaders()
        # Pinning needs a GPU's driver, and these batches still have to travel to another process.
        later = 1 if dealt else num_replicas
        self._place = _Place(0, 1, contextlib.nullcontext, dealt, pin_memory=False, cut_later=later)

    def __len__(self) -> int:
        """The number of batches in an epoch; TypeError where the source does not know."""
        return len(self._loader)

    def __iter__(self) -> Generator[Share, None, None]:
        return self._loaders.shares(self._loader, self._place).begin()

    def sample(self) -> tuple[Any, int]:
        """Load a batch as it comes from the source, and return it with the number of its examples."""
        return _sample(self._loader, self._place.dealt)


def _sample(loader: DataLoader[Any], dealt: bool) -> tuple[Any, int]:
    """A batch that shows what the others look like: one example where that can be, random streams untouched."""
    with left_as_they_are(random_streams(loader)):
        return _first_of(loader, dealt)


def _first_of(loader: DataLoader[Any], dealt: bool) -> tuple[Any, int]:
    total: int | None = None
    if not iterates_plainly(loader):
        small = loader
    elif isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        counted = DataLoader(loader.dataset, loader.batch_size, collate_fn=_Counted(loader.collate_fn))
        total, batch = _first(counted, loader)
        return batch, total
    elif isinstance(loader.dataset, IterableDataset):
        small = DataLoader(loader.dataset, batch_size=None, collate_fn=loader.collate_fn)
    elif loader.batch_sampler is not None:
        index, total = _first(loader.batch_sampler, loader), 1
        small = DataLoader(loader.dataset, batch_sampler=[list(index)[:1]], collate_fn=loader.collate_fn)
    else:
        index = _first(loader.sampler, loader)
        small = DataLoader(loader.dataset, batch_size=None, sampler=[index], collate_fn=loader.collate_fn)
    batch = _first(small, loader)
    return batch, count(batch, or_single=dealt) if total is None else total


def _first(items: Iterable[Any], loader: DataLoader[Any]) -> Any:
    found = next(iter(items), _END)
    if found is _END:
        raise UsageError(f"the DataLoader gives no batch: {describe(loader)}")
    return found


# ---- the share is cut from the indices ----------------------------------------------------------------

# Not `in_order`, whose default is True: replicas that take batches as they come would mix global batches.
_SETTINGS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def _shares_of(loader: DataLoader[Any], place: _Place) -> _Shares:
    indexed = not isinstance(loader.dataset, IterableDataset) and iterates_plainly(loader)
    # `sampler=BatchSampler(...), batch_size=None` is PyTorch's way to hand whole index lists to a dataset.
    if indexed and (loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)):
        return _IndexShares(loader, place)
    return _BatchShares(loader, place)


@final
class _IndexShares:
    """Shares cut from the global batches' indices, so that a replica loads nothing but its own."""

    def __init__(self, loader: DataLoader[Any], place: _Place) -> None:
        settings = _settings(loader, place)
        self.swaps_streams = not draws_only_at_first(index_sampler(loader))
        self._order = _IndexOrder(index_sampler(loader), place, loader)
        if place.num_replicas > 1:
            settings["generator"] = self._order.worker_seeds
        if loader.batch_sampler is None:
            sampling: dict[str, Any] = {"batch_size": None, "sampler": self._order}
        else:
            sampling = {"batch_sampler": self._order}
        dataset, collate = _by_rows(loader)
        if loader.batch_sampler is not None:
            collate = _by_shares(collate, place.cut_later)
        self._loader: DataLoader[Any] | _RowsHere
        if isinstance(dataset, _Rows) and not (settings["num_workers"] or settings["pin_memory"]):
            self._loader = _RowsHere(dataset, self._order, settings["generator"])
        else:
            self._loader = DataLoader(dataset, collate_fn=collate, **sampling, **settings)
        self._workers_are_seeded = False

    def begin(self) -> Generator[Share, None, None]:
        self._order.seed_is_due = not (self._loader.persistent_workers and self._workers_are_seeded)
        batches = iter(self._loader)
        self._workers_are_seeded = True
        return self._shares(batches, self._order.latest)

    @staticmethod
    def _shares(batches: Iterator[Any], cuts: _IndexCuts) -> Generator[Share, None, None]:
        for batch in batches:
            local, total = cuts.counts.popleft()
            # For an empty share one example was loaded: only it can show how a batch looks here.
            yield Share(local, total, batch if local else emptied(batch, 1))


def _by_rows(loader: DataLoader[Any]) -> tuple[Any, Callable[[Any], Any]]:
    """Return the dataset and collate_fn to load with: of a plain TensorDataset whole batches at once.

    The same batches: default_collate makes a list of stacked columns. 64 small images take 0.03 instead of 0.5 ms.
    """
    dataset = loader.dataset
    indexes = loader.batch_sampler is not None and loader.collate_fn is default_collate
    if type(dataset) is not TensorDataset or not indexes:
        return dataset, cast(Any, loader.collate_fn)
    return _Rows(list(dataset.tensors), len(dataset)), _as_it_is


@final
class _IndexOrder:
    """An index sampler: this replica's part of each index batch that the user's sampler draws."""

    def __init__(self, source: Iterable[Any], place: _Place, loader: DataLoader[Any]) -> None:
        self._source = source
        self._place = place
        self._generator = loader.generator
        self._num_workers = loader.num_workers
        self.worker_seeds = torch.Generator()
        self.seed_is_due = False
        # With workers a DataLoader calls iter() twice and uses the second, so the latest is the one in use.
        self.latest = _IndexCuts(iter(()), place, place.randomness)

    def __iter__(self) -> _IndexCuts:
        with self._place.randomness():
            batches = iter(self._source)
            if self.seed_is_due and self._place.num_replicas > 1:
                self._draw_worker_seeds()
        # Swapping random streams costs some 100 µs, so where nothing more is drawn it is done once.
        later = contextlib.nullcontext if draws_only_at_first(self._source) else self._place.randomness
        self.latest = _IndexCuts(batches, self._place, later)
        return self.latest

    def __len__(self) -> int:
        return self._place.steps(len(cast(Any, self._source)))

    def _draw_worker_seeds(self) -> None:
        """Draw where a DataLoader draws its workers' seeds, and make of it other seeds on each replica."""
        self.seed_is_due = False
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
        self.worker_seeds.manual_seed(drawn + self._place.replica_id * max(1, self._num_workers))


@final
class _IndexCuts:
    """One epoch of an _IndexOrder; `counts` has (local, global) examples of the batches on their way."""

    def __init__(self, batches: Iterator[Any], place: _Place, later_randomness: Randomness) -> None:
        self._batches = batches
        self._place = place
        self._randomness = place.randomness
        self._later_randomness = later_randomness
        self.counts: deque[tuple[int, int]] = deque()

    def __iter__(self) -> _IndexCuts:
        return self

    def __next__(self) -> Any:
        with self._randomness():
            step = [_indexable(drawn) for drawn in self._place.draw(self._batches)]
        if not step:
            raise StopIteration
        self._randomness = self._later_randomness
        mine, total = self._mine(step), sum(map(len, step))
        self.counts.append((len(mine), total))
        return mine if len(mine) else step[0][:1]

    def _mine(self, step: list[Any]) -> Any:
        if self._place.dealt:
            return step[self._place.replica_id] if self._place.replica_id < len(step) else ()
        return step[0][self._place.share(len(step[0]))]


def _indexable(drawn: Any) -> Any:
    return drawn if hasattr(drawn, "__getitem__") and hasattr(drawn, "__len__") else list(drawn)


# ---- the share is cut from the loaded batch ----------------------------------------------------------


@final
class _BatchShares:
    """Shares cut from global batches that every replica loads; all of the loading is in the common stream."""

    swaps_streams = True

    def __init__(self, loader: DataLoader[Any], place: _Place) -> None:
        self._place = place
        self._counted = loader.batch_size is not None and iterates_plainly(loader)
        if not iterates_plainly(loader):
            self._loader = loader
            return
        sampling: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            sampling["sampler"] = loader.sampler
        num_replicas = place.cut_later if place.dealt else max(place.num_replicas, place.cut_later)
        by_shares = _by_shares(loader.collate_fn, num_replicas)
        collate = _Counted(by_shares) if self._counted else loader.collate_fn
        self._loader = DataLoader(loader.dataset, collate_fn=collate, **sampling, **_settings(loader, place))

    def begin(self) -> Generator[Share, None, None]:
        with self._place.randomness():
            batches = iter(self._loader)
        return self._shares(batches)

    def _shares(self, batches: Iterator[Any]) -> Generator[Share, None, None]:
        while True:
            with self._place.randomness():
                drawn = self._place.draw(batches)
            if not drawn or (not self._counted and self._lacks_a_single(drawn)):
                return
            dealt = self._place.dealt
            share = self._share(drawn if self._counted else [(count(b, or_single=dealt), b) for b in drawn])
            # The other replicas' batches must not stay in memory while the user works on this one.
            del drawn
            yield share

    def _lacks_a_single(self, drawn: list[Any]) -> bool:
        """Whether a replica is left without one element: there is no such thing without examples."""
        return self._place.dealt and len(drawn) < self._place.num_replicas and is_single(drawn[0])

    def _share(self, step: list[tuple[int, Any]]) -> Share:
        total, batch = step[0]
        share = self._place.share(total)
        if self._place.dealt:
            mine = self._place.replica_id < len(step)
            total, batch = step[self._place.replica_id] if mine else step[0]
            share = slice(0, total if mine else 0)
        local = share.stop - share.start
        if isinstance(batch, Parts) and self._place.num_replicas > 1:
            part = batch.by_replica[self._place.replica_id]
        elif local:
            part = batch if local == total else cut(batch, share, total)
        else:
            part = emptied(batch, total)
        return Share(local, sum(examples for examples, _ in step), part)


@final
@dataclass(frozen=True, slots=True)
class _Counted:
    """A collate_fn that hands on how many examples it was given: afterwards it may not be seen any more."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, examples: list[Any]) -> tuple[int, Any]:
        return len(examples), self.collate(examples)


@final
class _ByShares:
    """A collate_fn that collates each replica's examples by themselves where a batch of all could not be cut.

    On each of the replicas all: what collating draws is drawn from the random stream that they have in common.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], num_replicas: int) -> None:
        self._collate = collate
        self._num_replicas = num_replicas
        self._needed: bool | None = None

    def __call__(self, examples: Any) -> Any:
        if not isinstance(examples, list) or not examples:
            return self._collate(examples)
        if self._needed is None:
            self._needed = not self._cuts(examples[0])
        kept = list(map(_taken_apart, examples))
        if not self._needed:
            batch = self._collate(examples)
            if is_cuttable(batch, len(kept)):
                return batch
            self._needed = True
        shares = [share_of(len(kept), i, self._num_replicas) for i in range(self._num_replicas)]
        return Parts([self._part(kept[share], kept[:1]) for share in shares])

    def _cuts(self, example: Any) -> bool:
        # Of one: a batch may have as many time steps as it has examples.
        with left_as_they_are(process_streams()), contextlib.suppress(Exception):
            return is_cuttable(self._collate([_taken_apart(example)]), 1)
        return True

    def _part(self, mine: list[Any], first: list[Any]) -> Any:
        part = self._collate(list(map(_taken_apart, mine or first)))
        return part if mine else emptied(part, 1)


def _taken_apart(example: Any) -> Any:
    """Return an example as it is for another collation: the first may pop from it."""
    return copy.copy(example) if isinstance(example, (dict, list)) else example


def _by_shares(collate: Callable[[Any], Any], num_replicas: int) -> Callable[[Any], Any]:
    # What torch stacks can always be cut.
    stacks = any(collate is one for one in (default_collate, _as_it_is))
    return collate if stacks or num_replicas == 1 else _ByShares(collate, num_replicas)


def _settings(loader: DataLoader[Any], place: _Place) -> dict[str, Any]:
    settings = {name: getattr(loader, name) for name in _SETTINGS}
    return settings if place.pin_memory is None else {**settings, "pin_memory": place.pin_memory}


def _loader_of(
    source: Any, num_replicas: int, batch_size: int | None, shuffle: bool, drop_last: bool
) -> DataLoader[Any]:
    """The DataLoader that a user gave, or one that makes batches of their arrays."""
    if not isinstance(source, DataLoader):
        return _loader_of_arrays(source, batch_size, shuffle, drop_last)
    _check_loader(source, num_replicas, batch_size, shuffle, drop_last)
    return source


# ---- arrays -------------------------------------------------------------------------------------------


@final
class _Rows(Dataset[Any]):
    """Tensors in a structure as a map-style dataset that gives many rows at once."""

    def __init__(self, columns: Any, length: int) -> None:
        self._columns = columns
        usual = type(columns) in (list, tuple) and all(isinstance(column, torch.Tensor) for column in columns)
        self._kind: Any = type(columns) if usual else None
        self.length_of = length

    def __len__(self) -> int:
        return self.length_of

    def __getitems__(self, indices: list[int] | torch.Tensor) -> Any:
        # torch.tensor takes four times as long for a list.
        rows = indices if isinstance(indices, torch.Tensor) else torch.from_numpy(np.array(indices))
        if self._kind is not None:
            return self._kind([_rows(column, rows) for column in self._columns])
        return map_leaves(self._columns, lambda column: _rows(column, rows))


@final
class _RowsHere:
    """The batches that a DataLoader without workers makes of `_Rows`, without what it tells torch.profiler of each.

    That takes a DataLoader a third of the time of a small batch.
    """

    persistent_workers = False

    def __init__(self, rows: _Rows, order: Iterable[list[int]], generator: torch.Generator | None) -> None:
        self._rows = rows
        self._order = order
        self._generator = generator

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._order)
        # Where a DataLoader draws its workers' seeds, without workers too: what is drawn later stays the same.
        torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        return map(self._rows.__getitems__, batches)


def _rows(column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if column.device.type == "cpu":
        try:
            # A third of the time. Numbers below 0, or too large, are for indexing to judge.
            return column.index_select(0, rows)
        except (IndexError, NotImplementedError):
            # Of unsigned integers of two bytes and more it takes no rows (torch 2.13).
            return column[rows]
    return column[rows.to(column.device)]


def _as_it_is(batch: Any) -> Any:
    return batch


def _loader_of_arrays(source: Any, batch_size: int | None, shuffle: bool, drop_last: bool) -> DataLoader[Any]:
    others = {type(leaf).__qualname__ for leaf in leaves(source) if leaf is not source and not _is_column(leaf)}
    if others:
        raise UsageError(
            f"cannot distribute a {type(source).__qualname__} that has {', '.join(sorted(others))} in it: a list, a "
            "tuple or a dict is taken for columns, each a tensor or an array; of a list of numbers make one, "
            "torch.tensor(numbers), and of a list of examples a DataLoader, DataLoader(examples, batch_size=...)"
        )
    columns = map_leaves(source, _column)
    shapes = [tuple(column.shape) for column in leaves(columns)]
    if not shapes:
        raise UsageError(f"cannot distribute {source!r}: there is no tensor or array in it")
    if any(not shape for shape in shapes):
        raise UsageError(f"cannot cut arrays of shapes {shapes} into batches: one has no dimension to cut along")
    lengths = {shape[0] for shape in shapes}
    if len(lengths) > 1:
        raise UsageError(f"arrays of shapes {shapes} have different numbers of examples: {sorted(lengths)}")
    length = lengths.pop()
    if batch_size is None:
        raise UsageError("tensors and arrays need `batch_size`, the number of examples of a global batch")
    size = checked_batch_size(batch_size)
    if length == 0 or (drop_last and length < size):
        raise UsageError(f"no batch to distribute: {length} examples, batch_size={size}, drop_last={drop_last}")
    return DataLoader(
        _Rows(columns, length), batch_size=size, shuffle=shuffle, drop_last=drop_last, collate_fn=_as_it_is
    )


def _is_column(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray))


def _column(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested:
            raise UsageError(
                "cannot take rows of a nested tensor; make a DataLoader of them: DataLoader(list(tensor.unbind()), "
                "batch_size=..., collate_fn=torch.nested.nested_tensor)"
            )
        if leaf.layout not in (torch.strided, torch.sparse_coo):
            raise UsageError(
                f"cannot take rows of a tensor in layout {leaf.layout}; give it as .to_sparse() or .to_dense()"
            )
        return leaf
    if not isinstance(leaf, np.ndarray):
        raise UsageError(
            f"cannot distribute a {type(leaf).__qualname__}: pass a DataLoader (DataLoader(dataset, "
            "batch_size=...) for a dataset), or tensors or arrays with `batch_size`"
        )
    try:
        return as_tensor(leaf)
    except TypeError as error:
        raise UsageError(f"an array of dtype {leaf.dtype} has no torch counterpart: {error}") from error


# ---- the checks of a user's loader --------------------------------------------------------------------


def _check_loader(
    loader: DataLoader[Any], num_replicas: int, batch_size: int | None, shuffle: bool, drop_last: bool
) -> None:
    given = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    surplus = [f"{name}={value}" for name, value in given.items() if value not in (None, False)]
    if surplus:
        raise UsageError(
            f"{', '.join(surplus)} was given together with a DataLoader (batch_size={loader.batch_size}); "
            "set it on the DataLoader, whose batch size is the global one"
        )
    if not isinstance(loader.dataset, IterableDataset) and length_of(loader.dataset) == 0:
        raise UsageError(f"the dataset of the DataLoader is empty: len({name_of(loader.dataset)}) is 0")
    if num_replicas > 1:
        check_unsharded(loader)
