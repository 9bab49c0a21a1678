"""A feed of a DataLoader or a Dataset: the batches that it would give one process, each replica loading its share."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, cast, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from mirror_nb.data.dataset import DistributedDataset, Loaders
from mirror_nb.data.sampling import (
    Agree,
    OtherStreams,
    agree_on,
    describe,
    draws_only_at_first,
    held_streams,
    held_values,
    index_sampler,
    iterates_plainly,
    length_of,
)
from mirror_nb.errors import UsageError
from mirror_nb.training.shares import Feed, Share, check_begun, check_state, epoch_seeds, permutation

_END: Any = object()


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
        self.num_batches = _num_batches_of(loader)
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
        check_begun(self._begun, self.sizes(), start)
        if agree is not None:
            self._hold(agree_on(agree, replica_id, describe(self._loader), self._held()))
        if self._order is not None:
            self._order.begin(self._seed, epoch)
        streams = _epoch_streams(self._seed, epoch)
        loader, drawn = self._cut = self._cut or _cuttable(self._loader)
        if drawn is not None:
            drawn.begin(streams, start)
            loader.generator.manual_seed(epoch_seeds(self._seed, epoch)[-1])
        counts: deque[tuple[int, int]] = deque()
        batches = DistributedDataset(
            loader,
            replica_id=replica_id,
            num_replicas=num_replicas,
            device=device,
            on_batch=lambda local, total, batch: counts.append((local, total)),
            loaders=self._loaders,
        )
        return self._shares(batches, streams, counts, drawn is not None, start)

    def _shares(
        self, batches: Iterable[Any], streams: OtherStreams, counts: deque[tuple[int, int]], by_index: bool, start: int
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
            "sizes": self.sizes(),
            "streams": streams,
            "workers_are_seeded": self._workers_are_seeded,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        check_state(self, state, {"seed", "sizes", "streams", "workers_are_seeded"})
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
        return {name: stream.get() for name, stream in held_streams(self._loader).items()}

    def _hold(self, states: dict[str, Any]) -> None:
        streams = held_streams(self._loader)
        for name, state in states.items():
            streams[name].set(state)

    def generators(self) -> list[torch.Generator]:
        return [value for value in held_values(self._loader).values() if isinstance(value, torch.Generator)]

    def __getstate__(self) -> dict[str, Any]:
        loader = self._loader
        if getattr(loader, "_iterator", None) is not None:
            # Of persistent workers, which are this process's.
            loader = copy.copy(loader)
            loader._iterator = None
        return {**self.__dict__, "_loader": loader, "_loaders": None, "_cut": None, "_at_start": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _loaders=Loaders())


def feed_of_dataset(dataset: Any, batch_size: int, shuffle: bool, seed: int) -> LoaderFeed:
    if isinstance(dataset, IterableDataset):
        return LoaderFeed(DataLoader(dataset, batch_size=batch_size), seed)
    length = length_of(dataset)
    if length is None:
        raise UsageError(f"the {type(dataset).__qualname__} has no len(): give it a `__len__`, or pass a DataLoader")
    order = _EpochOrder(length, shuffle)
    return LoaderFeed(DataLoader(dataset, batch_size=batch_size, sampler=order), seed, order)


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
        self._streams: OtherStreams | None = None
        self._start = 0

    def begin(self, streams: OtherStreams, start: int) -> None:
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


def _epoch_streams(seed: int, epoch: int) -> OtherStreams:
    # Never by torch.manual_seed and the like: in a scope these say which stream is meant to be current.
    for_torch, for_python, for_numpy, _ = epoch_seeds(seed, epoch)
    return OtherStreams(
        (
            torch.Generator().manual_seed(for_torch).get_state(),
            random.Random(for_python).getstate(),
            np.random.RandomState(for_numpy % 2**32).get_state(),
        )
    )


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
            permutation(self._length, self._seed, self._epoch)
            if self._shuffle
            else torch.arange(self._length, device="cpu")
        )
        return iter(order.tolist())

    def __len__(self) -> int:
        return self._length


def _batch_size_of(loader: DataLoader[Any]) -> int | None:
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _num_batches_of(loader: DataLoader[Any]) -> int | None:
    # Each worker has a last batch of its own, which torch does not count.
    guessed = isinstance(loader.dataset, IterableDataset) and loader.num_workers and loader.batch_size is not None
    return None if guessed else length_of(loader)


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
