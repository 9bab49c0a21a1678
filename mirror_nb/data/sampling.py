"""A DataLoader, looked at: its samplers, its random streams, whether it is the same everywhere, or sharded already.

Knows PyTorch's DataLoader and the marks that other libraries' sharding leaves on it. Changes no loader.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from mirror_nb.errors import UsageError

Agree = Callable[[bytes], bytes]
# Every replica gets replica 0's bytes.
_DRAW_AT_FIRST = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_SHARDING = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))


@dataclass(frozen=True, slots=True)
class Stream:
    """A source of random numbers whose state can be read and set."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


_ITERATE = ("__iter__", "_get_iterator")
# The second is torch's own; where it is not there, nobody overrides it.


def iterates_plainly(loader: DataLoader[Any]) -> bool:
    """Whether no subclass has its own idea of what iterating over the loader gives."""
    kind = type(loader)
    return all(getattr(kind, name, None) is getattr(DataLoader, name, None) for name in _ITERATE)


def check_unsharded(loader: DataLoader[Any]) -> None:
    """UsageError if the loader would give each replica a part by itself, or an order of its own."""
    remedy = (
        "the strategy cuts each global batch over the replicas by itself: pass a DataLoader with an "
        "ordinary sampler (or shuffle=True), whose batch_size is the global one"
    )
    for part in (*samplers(loader), loader.dataset):
        for parts, rank in _SHARDING:
            of = getattr(part, parts, 1)
            if hasattr(part, rank) and isinstance(of, int) and of > 1:
                raise UsageError(
                    f"the DataLoader is already sharded: its {name_of(part)} gives only the part of "
                    f"{rank}={getattr(part, rank)} of {parts}={of}; {remedy}"
                )
    if any(base.__module__.split(".")[0] == "accelerate" for base in type(loader).__mro__):
        raise UsageError(
            f"the DataLoader is already sharded: accelerate prepared this {name_of(loader)}; iterate over it "
            f"directly, or pass the loader that was given to prepare(): {remedy}"
        )
    if isinstance(loader.dataset, getattr(torch.utils.data, "IterDataPipe", ())):
        raise UsageError(
            f"torch shards a datapipe ({name_of(loader.dataset)}) by rank on its own; {remedy}, and wrap the "
            "datapipe in an IterableDataset"
        )
    if not iterates_plainly(loader) and not getattr(loader, "in_order", True):
        raise UsageError(
            f"{name_of(loader)} has in_order=False, so replicas would get their global batches in different "
            "orders; pass in_order=True"
        )


def index_sampler(loader: DataLoader[Any]) -> Any:
    """What a map-style loader takes its indices from: batches of them, or one at a time."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def samplers(loader: DataLoader[Any]) -> list[Any]:
    """The loader's batch sampler and sampler, and those that they wrap."""
    found: list[Any] = []
    waiting = [loader.batch_sampler, loader.sampler]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is not None and not any(sampler is known for known in found):
            found.append(sampler)
            waiting += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return found


def draws_only_at_first(sampler: Any) -> bool:
    """Whether an epoch draws from the global random streams only when its first batch is asked for.

    So do PyTorch's own samplers, which draw everything then, or a seed for a generator of the epoch; a user's
    may draw at every step.
    """
    order = sampler.sampler if type(sampler) is BatchSampler else sampler
    return type(order) in _DRAW_AT_FIRST


def length_of(thing: Any) -> int | None:
    """`len(thing)`, None where it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def name_of(thing: Any) -> str:
    """The name of the thing's class, for errors."""
    return type(thing).__qualname__


def describe(loader: DataLoader[Any]) -> str:
    """The loader in words: equal on all replicas if they were given the same one."""
    examples = None if isinstance(loader.dataset, IterableDataset) else length_of(loader.dataset)
    sizes = f"{'?' if examples is None else examples} examples of {name_of(loader.dataset)}"
    order = f"{name_of(index_sampler(loader))}, batch_size={loader.batch_size}"
    return f"{sizes} ({order}, {loader.num_workers} workers{''.join(map(_in_words, _chosen(loader)))})"


def _chosen(loader: DataLoader[Any]) -> list[Sequence[int]]:
    """Return the indices that somebody has chosen: of a split of the data, say."""
    dataset, order = loader.dataset, index_sampler(loader)
    chosen = []
    while isinstance(dataset, Subset):
        chosen.append(dataset.indices)
        dataset = dataset.dataset
    order = order.sampler if type(order) is BatchSampler else order
    return [*chosen, order.indices] if isinstance(order, SubsetRandomSampler) else chosen


def _in_words(indices: Sequence[int]) -> str:
    """Name some indices, by which other draws are told apart."""
    n = length_of(indices) or 0
    try:
        some = [str(int(indices[i])) for i in sorted({0, 1, n // 2, n - 2, n - 1}) if 0 <= i < n]
    except Exception:
        # Indices of the user's own kind may raise whatever.
        return ""
    return f", examples {', '.join(some)} among others" if some else ""


def agree_on(agree: Agree, replica_id: int, mine: str, states: dict[str, Any]) -> dict[str, Any]:
    """Replica 0's random states; UsageError where it was given other data than this replica."""
    agreed, agreed_states = pickle.loads(agree(pickle.dumps((mine, states))))
    if (agreed, agreed_states.keys()) != (mine, states.keys()):
        raise UsageError(
            f"replica {replica_id} was given {mine} (random streams: {', '.join(states) or 'none'}), but replica 0 "
            f"{agreed} ({', '.join(agreed_states) or 'none'}); all replicas have to be given the same data (a "
            "split that each has drawn by itself, by random_split or torch.randperm, is another one: seed before it, "
            "with torch.manual_seed(0), or draw it in an ordinary cell)"
        )
    return cast(dict[str, Any], agreed_states)


def process_streams() -> dict[str, Stream]:
    """The global streams of this process."""
    return {
        "torch": Stream(torch.get_rng_state, torch.set_rng_state),
        "random": Stream(random.getstate, random.setstate),
        "numpy": Stream(np.random.get_state, np.random.set_state),
    }


@final
class OtherStreams:
    """Random streams that take the place of the process's own for a while; `states`: where they stand, in order."""

    def __init__(self, states: Sequence[Any]) -> None:
        self.states = tuple(states)
        self._entered = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let everything inside draw from these; may be entered inside itself."""
        if self._entered:
            yield
            return
        streams = process_streams()
        self._entered = True
        try:
            with left_as_they_are(streams):
                for stream, state in zip(streams.values(), self.states, strict=True):
                    stream.set(state)
                yield
                self.states = process_states()
        finally:
            self._entered = False


def process_states() -> tuple[Any, ...]:
    """Return where the global streams stand."""
    return tuple(stream.get() for stream in process_streams().values())


@contextmanager
def left_as_they_are(streams: Mapping[str, Stream]) -> Iterator[None]:
    """In this context these streams may be drawn from: afterwards they stand where they stood."""
    states = {name: stream.get() for name, stream in streams.items()}
    try:
        yield
    finally:
        for name, state in states.items():
            streams[name].set(state)


def random_streams(loader: DataLoader[Any]) -> dict[str, Stream]:
    """The global streams, the loader's generator, and those that its samplers hold as attributes.

    A dataset's own are among them only where every replica loads the whole global batch; where it loads
    its share, what a dataset draws is meant to differ.
    """
    return process_streams() | held_streams(loader)


def held_streams(loader: DataLoader[Any]) -> dict[str, Stream]:
    """Those of `random_streams` that the loader and its samplers hold."""
    streams = {name: _stream(value) for name, value in held_values(loader).items()}
    return {name: stream for name, stream in streams.items() if stream is not None}


def held_values(loader: DataLoader[Any]) -> dict[str, Any]:
    """What the loader and its samplers hold, generators among it, by name."""
    holders = {f"sampler {i}": sampler for i, sampler in enumerate(samplers(loader))}
    if isinstance(loader.dataset, IterableDataset):
        holders["dataset"] = loader.dataset
    held = {f"{holder}.{name}": value for holder in holders for name, value in _attributes(holders[holder])}
    return {"generator": loader.generator, **held}


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    return sorted(getattr(thing, "__dict__", {}).items())


def _stream(value: Any) -> Stream | None:
    if isinstance(value, torch.Generator):
        return Stream(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return Stream(value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return Stream(value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        return Stream(lambda: value.bit_generator.state, lambda state: setattr(value.bit_generator, "state", state))
    return None
