"""Distributed datasets, n replicas in one process: `agree` and `randomness` are played by this file."""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import types
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from mirror_nb.data import batches as batches_module
from mirror_nb.data.batches import count, cut, share_of, spread, to_device
from mirror_nb.data.dataset import DistributedDataset, GlobalBatches, Loaders
from mirror_nb.errors import UsageError
from mirror_nb.values import same

CPU = torch.device("cpu")


def _get_streams() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_streams(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class Session:
    """The replicas of one process: for each a shared and an own random stream, and what it was told."""

    def __init__(self, num_replicas: int, seed: int = 0) -> None:
        self.num_replicas = num_replicas
        self.loaders = [Loaders() for _ in range(num_replicas)]
        self.shares: list[list[tuple[int, int]]] = [[] for _ in range(num_replicas)]
        self.ended = [0] * num_replicas
        self._randomness = [functools.partial(self.randomness, i) for i in range(num_replicas)]
        self._said_by_0: list[bytes] = []
        self._heard = [0] * num_replicas
        self.swapped: list[int] = []
        seed_everything(seed)
        self._shared = [_get_streams() for _ in range(num_replicas)]
        self._own = []
        for replica_id in range(num_replicas):
            seed_everything(1000 + replica_id)
            self._own.append(_get_streams())

    @contextmanager
    def randomness(self, replica_id: int) -> Iterator[None]:
        self.swapped.append(replica_id)
        own = _get_streams()
        _set_streams(self._shared[replica_id])
        try:
            yield
        finally:
            self._shared[replica_id] = _get_streams()
            _set_streams(own)

    @contextmanager
    def running(self, replica_id: int) -> Iterator[None]:
        _set_streams(self._own[replica_id])
        yield
        self._own[replica_id] = _get_streams()

    def disturb_the_shared_stream_of(self, replica_id: int) -> None:
        with self.randomness(replica_id):
            torch.rand(3), random.random(), np.random.rand()

    def agree(self, replica_id: int, mine: bytes) -> bytes:
        if replica_id == 0:
            self._said_by_0.append(mine)
        self._heard[replica_id] += 1
        return self._said_by_0[self._heard[replica_id] - 1]

    def dataset(self, source: Any, replica_id: int, **options: Any) -> DistributedDataset:
        return DistributedDataset(
            source,
            replica_id=replica_id,
            num_replicas=self.num_replicas,
            device=CPU,
            randomness=self._randomness[replica_id],
            agree=lambda mine: self.agree(replica_id, mine),
            on_batch=lambda local, total, batch: self.shares[replica_id].append((local, total)),
            on_end=lambda: self._end(replica_id),
            loaders=self.loaders[replica_id],
            **options,
        )

    def _end(self, replica_id: int) -> None:
        self.ended[replica_id] += 1


def run(session: Session, sources: Any, epochs: int = 1, **options: Any) -> list[list[list[Any]]]:
    """The batches of each replica, epoch by epoch; each draws random numbers of its own meanwhile."""
    results = []
    for replica_id in range(session.num_replicas):
        with session.running(replica_id):
            source = sources(replica_id) if callable(sources) else sources
            dataset = session.dataset(source, replica_id, **options)
            seen = []
            for _ in range(epochs):
                batches = []
                for batch in dataset:
                    torch.rand(replica_id + 1), random.random(), np.random.rand(replica_id + 2)
                    batches.append(batch)
                seen.append(batches)
            results.append(seen)
    return results


def glued(replicas: list[list[list[Any]]], epoch: int = 0) -> list[list[Any]]:
    """The global batches as lists, put together again from the replicas' shares."""
    steps = [replica[epoch] for replica in replicas]
    assert len({len(step) for step in steps}) == 1
    return [[number for share in shares for number in share.tolist()] for shares in zip(*steps, strict=True)]


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.loaded: list[Any] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return torch.tensor(index)


# ---- the split rule -----------------------------------------------------------------------------------

# The numbers are TensorFlow's own: Dataset.range(r).batch(b), distributed.
TENSORFLOW = [
    (2, 10, 4, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
    (3, 10, 4, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]]),
    (4, 9, 8, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8], [], [], []]]),
]


@pytest.mark.parametrize(("num_replicas", "length", "batch_size", "steps"), TENSORFLOW)
@pytest.mark.parametrize("kind", ["map-style", "array", "iterable", "whole batches"])
def test_global_batches_are_cut_as_tensorflow_cuts_them(kind, num_replicas, length, batch_size, steps):
    options: dict[str, Any] = {}
    source: Any
    if kind == "map-style":
        source = DataLoader(Numbers(length), batch_size=batch_size)
    elif kind == "array":
        source, options = np.arange(length), {"batch_size": batch_size}
    elif kind == "iterable":
        source = DataLoader(Counting(length), batch_size=batch_size)
    else:
        source = DataLoader(list(torch.arange(length).split(batch_size)), batch_size=None)
    session = Session(num_replicas)
    replicas = run(session, source, **options)
    shares = zip(*(replica[0] for replica in replicas), strict=True)
    assert [[share.tolist() for share in step] for step in shares] == steps
    for replica_id in range(num_replicas):
        sizes = [(len(step[replica_id]), sum(map(len, step))) for step in steps]
        assert session.shares[replica_id] == sizes
    assert session.ended == [1] * num_replicas
    assert len(session.dataset(source, 0, **options)) == len(steps)


def test_every_example_belongs_to_exactly_one_replica():
    for total in range(12):
        for num_replicas in range(1, 6):
            shares = [range(total)[share_of(total, i, num_replicas)] for i in range(num_replicas)]
            assert [i for share in shares for i in share] == list(range(total))


def test_a_replica_loads_only_its_share():
    datasets = [Numbers(12), Numbers(12), Numbers(12)]
    run(Session(3), lambda i: DataLoader(datasets[i], batch_size=6))
    assert [dataset.loaded for dataset in datasets] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_of_a_dataset_that_takes_lists_of_indices_a_replica_loads_only_its_share():
    datasets = [Numbers(6), Numbers(6)]
    batches = BatchSampler(SequentialSampler(range(6)), 3, drop_last=False)
    run(Session(2), lambda i: DataLoader(datasets[i], sampler=batches, batch_size=None))
    assert [dataset.loaded for dataset in datasets] == [[[0, 1], [3, 4]], [[2], [5]]]


def test_without_an_example_a_batch_keeps_its_structure():
    class Mixed(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            return {"x": torch.ones(3, 2, dtype=torch.float64), "name": "a", "pair": (1, np.float32(2.0))}

    batch = run(Session(2), DataLoader(Mixed(), batch_size=4))[1][0][0]
    assert (batch["x"].shape, batch["x"].dtype) == ((0, 3, 2), torch.float64)
    assert batch["name"] == []
    assert [(value.shape, value.dtype) for value in batch["pair"]] == [
        ((0,), torch.int64),
        ((0,), torch.float32),
    ]


def test_a_list_of_examples_of_different_sizes_is_cut_as_a_list():
    images = [torch.zeros(3, 5, 4), torch.zeros(3, 2, 7)]
    batch = (images, [{"boxes": torch.zeros(4, 4)}, {"boxes": torch.zeros(1, 4)}], torch.tensor([7, 8]))
    left = cut(batch, slice(0, 1), 2)
    assert (len(left[0]), left[0][0].shape, len(left[1]), left[2].tolist()) == (1, (3, 5, 4), 1, [7])


Pair = namedtuple("Pair", ["first", "second"])
IMAGES, PAIR = [torch.zeros(3, 5, 4), torch.zeros(3, 2, 7)], torch.arange(2.0)


@pytest.mark.parametrize(
    ("batch", "left"),
    [
        ((PAIR, None), (PAIR[:1], None)),
        ([PAIR, 5], [PAIR[:1], 5]),
        (([IMAGES[0], 3], [IMAGES[1], 4]), ([IMAGES[0], 3],)),
        ([("a", 1), ("b", 2)], [("a", 1)]),
        ([("a", "b"), (1, 2)], [("a",), (1,)]),
        ([[PAIR, ("a", "b")], [PAIR, ("c", "d")]], [[PAIR[:1], ("a",)], [PAIR[:1], ("c",)]]),
        ([[IMAGES[0]] * 2, [IMAGES[1]] * 2], [[IMAGES[0]], [IMAGES[1]]]),
        (["a", 1], ["a"]),
        (Pair("a", "b"), ("a",)),
    ],
    ids=[
        *("nothing", "a length", "examples", "texts' examples", "columns of texts", "pairs of columns"),
        *("columns of images", "mixed", "texts with names"),
    ],
)
def test_as_many_columns_as_examples_are_no_examples(batch, left):
    assert same(cut(batch, slice(0, 1), 2), left)


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_of_a_packed_sequence_whole_sequences_are_cut(enforce_sorted):
    sequences = [torch.arange(length * 10, length * 11) for length in (5, 4, 4, 1)]
    if not enforce_sorted:
        sequences.reverse()
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    for share in (slice(0, 2), slice(2, 4), slice(3, 4)):
        part, same = cut((packed, packed), share, 4)
        assert [s.tolist() for s in unpack_sequence(part)] == [s.tolist() for s in sequences[share]]
        assert torch.equal(part.data, same.data)
        assert (part.sorted_indices is None) is enforce_sorted
    nothing = cut(packed, slice(4, 4), 4)
    assert (len(nothing.data), count(nothing), cut(nothing, slice(0, 1), 1)) == (0, 0, nothing)
    states, _ = nn.GRU(1, 2)(nothing._replace(data=nothing.data[:, None].float()))
    assert states.data.shape == (0, 2)
    assert cut(packed, slice(0, 1), 7) is packed
    assert count({"x": packed}) == 4
    assert to_device(packed, torch.device("cpu")).batch_sizes.tolist() == packed.batch_sizes.tolist()


def _ragged(rows: list[int], layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((row + 1,), row) for row in rows], layout=layout)


LAYOUTS: dict[str, Callable[[list[int]], torch.Tensor]] = {
    "COO": lambda rows: torch.eye(6)[rows].to_sparse(),
    "CSR": lambda rows: torch.eye(6)[rows].to_sparse_csr(),
    "nested": lambda rows: _ragged(rows, torch.strided),
    "jagged": lambda rows: _ragged(rows, torch.jagged),
}


def _listed(tensor: torch.Tensor) -> list[Any]:
    if not tensor.is_nested:
        return list(tensor.to_dense().tolist())
    return [row.tolist() for row in tensor.unbind()] if tensor.size(0) else []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_sparse_and_ragged_batches_are_cut_in_their_layout(make):
    loader = DataLoader(range(6), batch_size=4, collate_fn=lambda rows: {"x": make(rows), "y": torch.tensor(rows)})
    whole, last = (batch["x"] for batch in loader)
    (first, rest), (one, nothing) = (
        [cut(x, share_of(n, i, 2), n) for i in range(2)] for x, n in ((whole, 4), (last, 2))
    )
    assert {part.layout for part in (first, rest, one, nothing)} == {whole.layout}
    assert _listed(first) + _listed(rest) == _listed(whole)
    assert (_listed(one) + _listed(nothing), count({"x": last})) == (_listed(last), 2)
    assert [[_listed(batch["x"]) for batch in epoch] for (epoch,) in run(Session(3), loader)] == [
        [_listed(make([0, 1])), _listed(make([4]))],
        [_listed(make([2, 3])), _listed(make([5]))],
        [[], []],
    ]
    assert _listed(to_device(first, CPU)) == _listed(first)


def test_layouts_of_which_no_rows_are_taken_are_refused():
    with pytest.raises(UsageError, match=r"layout torch\.sparse_csc of shape \(3, 3\).*\.to_sparse\(\)"):
        cut(torch.eye(3).to_sparse_csc(), slice(0, 1), 3)
    _refused(torch.eye(3).to_sparse_csr(), r"layout torch\.sparse_csr; give it as \.to_sparse\(\)", batch_size=2)
    _refused(_ragged([1, 2], torch.strided), "rows of a nested tensor; make a DataLoader", batch_size=2)
    rows = [batch.to_dense().tolist() for batch in run(Session(1), torch.eye(3).to_sparse(), batch_size=2)[0][0]]
    assert rows == [[[1, 0, 0], [0, 1, 0]], [[0, 0, 1]]]


@pytest.mark.parametrize("dtype", [">f4", ">i8", "uint16", "uint32", "int32"])
def test_arrays_of_any_numbers_are_cut(dtype):
    rows = [batch.tolist() for batch in run(Session(1), np.arange(6).astype(dtype)[::-1], batch_size=4)[0][0]]
    assert rows == [[5, 4, 3, 2], [1, 0]]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_tensors_of_unsigned_integers_are_cut(dtype):
    numbers = torch.arange(6).to(dtype)
    for source, options in ((numbers, {"batch_size": 4}), (DataLoader(TensorDataset(numbers), batch_size=4), {})):
        (batches,) = run(Session(1), source, **options)[0]
        found = [batch if isinstance(batch, torch.Tensor) else batch[0] for batch in batches]
        assert [(batch.dtype, batch.tolist()) for batch in found] == [(dtype, [0, 1, 2, 3]), (dtype, [4, 5])]


# ---- the same batches as plain PyTorch ----------------------------------------------------------------


def _loader(kind: str, length: int = 22, **options: Any) -> DataLoader[Any]:
    numbers = Numbers(length)
    if kind == "shuffle":
        return DataLoader(numbers, batch_size=5, shuffle=True, **options)
    if kind == "shuffle, drop_last":
        return DataLoader(numbers, batch_size=5, shuffle=True, drop_last=True, **options)
    if kind == "generator":
        generator = torch.Generator().manual_seed(5)
        return DataLoader(numbers, batch_size=5, shuffle=True, generator=generator, **options)
    if kind == "twice over":
        twice = RandomSampler(numbers, num_samples=2 * length)
        return DataLoader(numbers, batch_size=5, sampler=twice, **options)
    if kind == "weighted":
        weighted = WeightedRandomSampler([1.0, 2.0] * (length // 2), num_samples=length)
        return DataLoader(numbers, batch_size=5, sampler=weighted, **options)
    if kind == "subset":
        return DataLoader(numbers, batch_size=5, sampler=SubsetRandomSampler(range(3, length)), **options)
    if kind == "with replacement":
        sampler = RandomSampler(numbers, replacement=True, num_samples=70)
        return DataLoader(numbers, batch_size=5, sampler=sampler, **options)
    if kind == "batch sampler":
        batches = BatchSampler(RandomSampler(numbers), 5, drop_last=False)
        return DataLoader(numbers, batch_sampler=batches, **options)
    if kind == "index lists":
        batches = BatchSampler(RandomSampler(numbers), 5, drop_last=False)
        return DataLoader(Rows(length), sampler=batches, batch_size=None, **options)
    if kind == "eager sampler":
        return DataLoader(numbers, batch_sampler=Eager(length), **options)
    if kind == "iterable":
        return DataLoader(Shuffled(length), batch_size=5, **options)
    if kind == "lazy sampler":
        return DataLoader(numbers, sampler=Lazy(length), batch_size=5, **options)
    raise AssertionError(kind)


class Rows(Numbers):
    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(index)


class Counting(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(worker, self.length, workers))


class Shuffled(Counting):
    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield number + 100 * int(torch.randint(9, ())) + 1000 * random.randrange(9)


class Eager(Sampler[list[int]]):
    """Draws when iteration begins, not at the first batch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.length).tolist()
        return iter([order[start : start + 4] for start in range(0, self.length, 4)])


class Lazy(Sampler[int]):
    """Draws from Python, NumPy and torch at every step."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            drawn = random.randrange(100) + np.random.randint(100) + int(torch.randint(100, ()))
            yield drawn % self.length

    def __len__(self) -> int:
        return self.length


KINDS = [
    "shuffle",
    "shuffle, drop_last",
    "generator",
    "with replacement",
    "twice over",
    "weighted",
    "subset",
    "batch sampler",
    "index lists",
    "eager sampler",
    "lazy sampler",
    "iterable",
]


WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}
LOADED = "shuffle", "generator", "batch sampler", "eager sampler", "lazy sampler", "iterable"
# Of those whose order comes from the same place, one: workers know nothing of it.


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param(kind, workers, id=f"{kind}-{how}")
        for kind in KINDS
        for how, workers in WORKERS.items()
        if how == "no workers" or kind in LOADED
    ],
)
def test_global_batches_are_those_of_a_plain_loop(kind, workers):
    seed_everything(3)
    loader = _loader(kind, **workers)
    plain = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert plain[0] != plain[1]

    replicas = run(Session(2, seed=3), lambda i: _loader(kind, **workers), epochs=2)
    assert [glued(replicas, epoch) for epoch in range(2)] == plain


def test_a_single_replica_sees_what_plain_pytorch_sees_random_augmentation_included():
    class Augmented(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return index + torch.rand(())

    for num_workers in (0, 1):
        seed_everything(4)
        loader = DataLoader(Augmented(10), batch_size=4, shuffle=True, num_workers=num_workers)
        plain = [batch.tolist() for _ in range(2) for batch in loader]
        seed_everything(4)
        dataset = DistributedDataset(
            loader,
            replica_id=0,
            num_replicas=1,
            device=CPU,
            randomness=_forbidden,
            agree=_forbidden,
            on_batch=lambda local, total, batch: None,
            on_end=lambda: None,
        )
        assert [batch.tolist() for _ in range(2) for batch in dataset] == plain


def _forbidden(*args: Any) -> Any:
    raise AssertionError("one replica has no one to ask")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_replicas_augment_their_shares_differently(num_workers):
    class Noise(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(())

    first, second = run(Session(2), DataLoader(Noise(8), batch_size=4, num_workers=num_workers))
    assert not set(torch.cat(first[0]).tolist()) & set(torch.cat(second[0]).tolist())


def test_shuffled_arrays_come_as_a_plain_loader_gives_them():
    x, y = np.arange(44, dtype=np.float32).reshape(22, 2), torch.arange(22)
    seed_everything(3)
    loader = DataLoader(TensorDataset(torch.from_numpy(x), y), batch_size=5, shuffle=True)
    plain = [[batch[1].tolist() for batch in loader] for _ in range(2)]
    replicas = run(Session(3, seed=3), {"x": x, "y": y}, epochs=2, batch_size=5, shuffle=True)
    for epoch in range(2):
        labels = [[[batch["y"] for batch in one] for one in replica] for replica in replicas]
        assert glued(labels, epoch) == plain[epoch]
    batch = replicas[0][0][0]
    assert batch["x"].dtype == torch.float32
    assert batch["x"][:, 0].tolist() == [2.0 * label for label in batch["y"]]


def test_changing_a_batch_in_place_leaves_the_array_alone():
    x = np.zeros((4, 2), dtype=np.float32)
    for batch in Session(1).dataset(x, 0, batch_size=2):
        batch += 1
    assert not x.any()


# ---- replicas agree -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shuffle", "batch sampler", "lazy sampler", "eager sampler", "iterable"])
def test_replicas_whose_random_streams_drifted_apart_still_draw_the_same_global_batches(kind):
    session = Session(3)
    session.disturb_the_shared_stream_of(1)
    session.disturb_the_shared_stream_of(2)
    undisturbed = run(Session(3), lambda i: _loader(kind))
    assert glued(run(session, lambda i: _loader(kind))) == glued(undisturbed)


def test_replicas_with_differently_seeded_generators_follow_replica_0():
    def loader(replica_id: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(replica_id)
        return DataLoader(Numbers(22), batch_size=5, shuffle=True, generator=generator)

    replicas = run(Session(2), loader, epochs=2)
    plain = loader(0)
    assert glued(replicas, 0) == [batch.tolist() for batch in plain]
    assert glued(replicas, 1) == [batch.tolist() for batch in plain]


def test_a_sampler_with_random_generators_of_its_own_follows_replica_0():
    class Own(Sampler[int]):
        def __init__(self) -> None:
            self.numpy, self.old, self.python = (
                np.random.default_rng(),
                np.random.RandomState(),
                random.Random(),
            )

        def __iter__(self) -> Iterator[int]:
            for _ in range(12):
                yield int(self.numpy.integers(100)) + self.old.randint(100) + self.python.randrange(100)

    samplers = [Own(), Own()]
    session = Session(2)
    run(session, lambda i: DataLoader(Numbers(300), sampler=samplers[i], batch_size=4))
    assert list(samplers[0]) == list(samplers[1])


def test_replicas_with_different_datasets_are_told_before_the_first_batch():
    session = Session(2)
    list(session.dataset(DataLoader(Numbers(10), batch_size=4), 0))
    with pytest.raises(UsageError, match=r"replica 1 was given 9 examples of Numbers.*replica 0 10 examples"):
        iter(session.dataset(DataLoader(Numbers(9), batch_size=4), 1))


SPLITS = {
    "a subset": lambda indices: DataLoader(Subset(Numbers(20), indices), batch_size=4),
    "a subset of a subset": lambda indices: DataLoader(Subset(Subset(Numbers(20), indices), range(8)), batch_size=4),
    "an array": lambda indices: DataLoader(Subset(Numbers(20), np.array(indices)), batch_size=4),
    "a sampler": lambda indices: DataLoader(Numbers(20), sampler=SubsetRandomSampler(indices), batch_size=4),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_that_each_replica_has_drawn_by_itself_is_told_before_the_first_batch(split):
    session = Session(2)
    first, other = ([int(i) for i in np.random.default_rng(seed).permutation(20)[:10]] for seed in (0, 1))
    list(session.dataset(SPLITS[split](first), 0))
    iter(session.dataset(SPLITS[split](first), 1))
    list(session.dataset(SPLITS[split](first), 0))
    with pytest.raises(UsageError, match=rf"replica 1 .*{other[0]}, {other[1]}, .*has drawn by itself"):
        iter(session.dataset(SPLITS[split](other), 1))


def test_indices_that_cannot_be_told_apart_are_taken_as_they_are():
    class Odd(list):
        def __getitem__(self, i: Any) -> Any:
            raise ValueError("no")

    session = Session(2)
    for indices in (Odd([1, 2]), ["a", "b"]):
        iter(session.dataset(DataLoader(Subset(Numbers(4), indices), batch_size=2), 0))


# ---- workers ------------------------------------------------------------------------------------------


class WorkerPid(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid()])


def test_persistent_workers_stay_for_the_next_epoch_though_the_dataset_is_made_anew():
    session = Session(2)
    loader = DataLoader(WorkerPid(6), batch_size=3, num_workers=1, persistent_workers=True)
    pids = set()
    for _ in range(2):
        for batch in session.dataset(loader, 0):
            pids |= set(batch[:, 1].tolist())
    assert len(pids) == 1
    session.loaders[0].close()


def test_a_loop_left_early_does_not_disturb_the_next_epoch():
    session = Session(2)
    loader = DataLoader(Numbers(22), batch_size=5, num_workers=1, persistent_workers=True)
    dataset = session.dataset(loader, 1)
    for replica_id in (0, 1):
        dataset = session.dataset(loader, replica_id)
        for _batch in dataset:
            break
        assert session.ended[replica_id] == 1
        session.shares[replica_id].clear()
        batches = [batch.tolist() for batch in dataset]
        assert [len(batch) for batch in batches] == [local for local, _ in session.shares[replica_id]]
        assert [total for _, total in session.shares[replica_id]] == [5, 5, 5, 5, 2]
    for loaders in session.loaders:
        loaders.close()


def test_two_loops_over_one_dataset_at_once_each_get_their_own_counts():
    session = Session(2)
    dataset = session.dataset(DataLoader(Numbers(7), batch_size=4), 0)
    pairs = [(len(left), len(right)) for left, right in zip(dataset, dataset, strict=True)]
    assert pairs == [(2, 2), (2, 2)]
    assert session.shares[0] == [(2, 4), (2, 4), (2, 3), (2, 3)]


def test_random_streams_are_swapped_at_every_batch_only_for_samplers_that_draw_then():
    def swaps(kind: str, length: int) -> int:
        session = Session(2)
        count = len(session.swapped)
        list(session.dataset(_loader(kind, length), 0))
        return len(session.swapped) - count

    assert swaps("shuffle", 15) == swaps("shuffle", 45)
    assert swaps("lazy sampler", 45) == swaps("lazy sampler", 15) + 6


def test_a_changed_setting_of_the_loader_is_followed():
    loader = DataLoader(Numbers(4), batch_size=4)
    session = Session(1)
    assert [type(batch) for batch in session.dataset(loader, 0)] == [torch.Tensor]
    loader.collate_fn = lambda examples: [int(example) for example in examples]
    assert list(session.dataset(loader, 0)) == [[0, 1, 2, 3]]


def test_what_was_derived_goes_with_the_loader():
    session = Session(2)
    loader = DataLoader(Numbers(4), batch_size=4)
    list(session.dataset(loader, 0))
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None


def test_a_loader_class_with_its_own_iteration_is_iterated_itself():
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (batch * 2 for batch in super().__iter__())

    class Tripling(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return (batch * 3 for batch in super()._get_iterator())

    for loader, factor in ((Doubling, 2), (Tripling, 3)):
        replicas = run(Session(2), loader(Numbers(7), batch_size=4))
        assert glued(replicas) == [[0, factor, 2 * factor, 3 * factor], [4 * factor, 5 * factor, 6 * factor]]


# ---- devices ------------------------------------------------------------------------------------------

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    name: str


class Opaque:
    """A batch that nobody can look into."""

    def __init__(self, items: list[torch.Tensor]) -> None:
        self.items = items


class Dictionary(dict[str, torch.Tensor]):
    """As a TensorDict: its entries have the first dimension that it says."""

    @property
    def batch_size(self) -> torch.Size:
        return next(iter(self.values())).shape[:1]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        raise RuntimeError("batch dimension mismatch")

    def to(self, device: torch.device) -> Dictionary:
        return self

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        return Dictionary({name: value[key] for name, value in self.items()})


def test_a_tensordict_cuts_itself(monkeypatch):
    package: Any = types.ModuleType("tensordict")
    package.is_tensor_collection = lambda value: isinstance(value, Dictionary)
    monkeypatch.setitem(sys.modules, "tensordict", package)
    whole = Dictionary(x=torch.arange(5.0), y=torch.arange(10).view(5, 2))
    assert count((whole, torch.ones(5))) == 5
    assert cut(whole, slice(1, 3), 5)["x"].tolist() == [1, 2]
    assert cut(whole, slice(1, 3), 4) is whole
    by_index = run(Session(2), DataLoader([whole[:2], whole[2:3]], batch_size=None, collate_fn=lambda x: x))
    assert [[batch["x"].tolist() for batch in seen] for (seen,) in by_index] == [[[0], [2]], [[1], []]]
    # The users' own module of that name.
    del package.is_tensor_collection
    assert count(torch.ones(5)) == 5


class Untied(dict[str, Any]):
    """As a TensorDict of no batch size: what is set in it becomes a tensor."""

    batch_size = torch.Size([])

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, torch.as_tensor(value))


pytree.register_pytree_node(Untied, lambda untied: ([*untied.values()], [*untied]), lambda values, keys: Untied())


def test_a_tensordict_that_does_not_know_its_examples_is_cut_as_a_dict_and_comes_whole_to_each_replica(monkeypatch):
    package: Any = types.ModuleType("tensordict")
    package.is_tensor_collection = lambda value: isinstance(value, Untied)
    monkeypatch.setitem(sys.modules, "tensordict", package)
    pieces = spread(Untied(x=torch.arange(3)), [slice(0, 2), slice(2, 3)], 3, list)
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1], [2]]


@pytest.mark.parametrize("collate", [Opaque, lambda items: (Opaque(items), "name")], ids=["itself", "in a tuple"])
def test_what_cannot_be_cut_has_one_example_where_it_is_to_have_none_and_that_is_told(collate):
    loader = DataLoader(list(torch.arange(3.0)), batch_size=2, collate_fn=collate)
    with pytest.warns(UserWarning, match=r"a (Opaque|tuple) cannot be cut: .* use drop_last=True") as said:
        run(Session(2), loader)
    assert {one.filename for one in said} == {__file__}


def test_so_it_is_where_whole_batches_are_dealt_out():
    loader = DataLoader(Counting(3), batch_size=1, collate_fn=Opaque)
    with pytest.warns(UserWarning, match="a Opaque cannot be cut"):
        run(Session(2), loader, dealt=True)


@pytest.mark.parametrize(
    "example", [torch.ones(2), ("a", {"x": 1}), {"lists": [torch.ones(1)]}, Example(torch.ones(2), "a")]
)
def test_what_can_be_cut_may_have_none_without_a_word(example):
    collate = None if isinstance(example, torch.Tensor | dict) else list
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Session(2), DataLoader([example] * 3, batch_size=2, collate_fn=collate))


class Movable:
    def to(self, device: torch.device) -> str:
        return f"moved to {device}"


def test_every_tensor_in_a_batch_arrives_on_the_device():
    meta = torch.device("meta")
    batch = {
        "list": [torch.ones(2), "text"],
        "point": Point(torch.ones(1), 3),
        "example": Example(torch.ones(2), "a"),
        "own": Movable(),
    }
    moved = to_device(batch, meta)
    assert moved["list"][0].device == moved["point"].x.device == moved["example"].x.device == meta
    assert (moved["list"][1], moved["point"].y, moved["example"].name) == ("text", 3, "a")
    assert isinstance(moved["point"], Point)
    assert moved["own"] == "moved to meta"
    assert batch["list"][0].device == CPU


class Named(dict[str, Any]):
    __getattr__ = dict.__getitem__


def test_a_batch_that_has_an_error_of_its_own_for_an_attribute_that_it_lacks_arrives_on_the_device():
    moved = to_device(Named(x=torch.ones(2), inner=[Named(to=torch.ones(1))]), torch.device("meta"))
    assert type(moved) is type(moved.inner[0]) is Named
    assert (moved.x.is_meta, moved.inner[0].to.is_meta) == (True, True)


def test_only_plain_tensors_of_a_batchs_size_are_pinned_on_their_way(monkeypatch):
    monkeypatch.setattr(batches_module, "PINNED_BYTES", 64)
    assert batches_module._can_be_pinned(torch.ones(4, 4)[:2])
    for other in (
        torch.ones(17),
        torch.ones(0),
        torch.ones(1).expand(8),
        torch.ones(2, 3).t(),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
    ):
        assert not batches_module._can_be_pinned(other)


@pytest.mark.gpu
def test_what_lies_in_ordinary_memory_arrives_whole_on_the_gpu():
    device = torch.device("cuda", 0)
    made = [torch.randn(1000, 1000), torch.ones(1).expand(8), torch.randn(2, 3).t(), torch.empty(0), torch.arange(5)]
    # The GPU is busy meanwhile, and the pinned memory of one comes to be another's.
    busy = torch.randn(4000, 4000, device=device)
    for _ in range(20):
        busy = busy @ busy / 4000
        moved = [to_device(tensor.clone(), device) for tensor in [*made] * 3]
        assert all(torch.equal(there.cpu(), here) for there, here in zip(moved, made * 3, strict=True))


@pytest.mark.gpu
def test_pinned_batches_arrive_on_the_gpu():
    device = torch.device("cuda", 0)
    dataset = DistributedDataset(
        DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, pin_memory=True),
        replica_id=0,
        num_replicas=1,
        device=device,
        randomness=_forbidden,
        agree=_forbidden,
        on_batch=lambda local, total, batch: None,
        on_end=lambda: None,
    )
    batches = list(dataset)
    assert [batch[0].device for batch in batches] == [device] * 2
    assert torch.cat([batch[0] for batch in batches]).tolist() == list(range(8))


# ---- errors -------------------------------------------------------------------------------------------


def _refused(source: Any, message: str, **options: Any) -> None:
    with pytest.raises(UsageError, match=message):
        run(Session(2), source, **options)


def test_a_loader_that_is_already_sharded_is_refused():
    numbers = Numbers(8)
    sampler = DistributedSampler(numbers, num_replicas=2, rank=1)
    _refused(DataLoader(numbers, sampler=sampler), r"DistributedSampler .*rank=1 of num_replicas=2.*shuffle=True")
    inside = BatchSampler(sampler, 2, drop_last=False)
    _refused(DataLoader(numbers, batch_sampler=inside), "DistributedSampler")
    lone = DistributedSampler(numbers, num_replicas=1, rank=0, shuffle=False)
    assert glued(run(Session(2), DataLoader(numbers, sampler=lone, batch_size=8))) == [list(range(8))]


def test_a_loader_that_accelerate_prepared_is_refused():
    data_loader = pytest.importorskip("accelerate.data_loader")
    batches = BatchSampler(SequentialSampler(range(8)), 2, drop_last=False)
    shard = data_loader.BatchSamplerShard(batches, num_processes=2, process_index=0)
    _refused(DataLoader(Numbers(8), batch_sampler=shard), "BatchSamplerShard .*process_index=0 of num_processes=2")
    prepared = data_loader.DataLoaderShard(Numbers(8), batch_size=2)
    _refused(prepared, "accelerate prepared this")


def test_a_datapipe_is_refused_since_torch_shards_it():
    wrapper = pytest.importorskip("torch.utils.data.datapipes.iter").IterableWrapper
    _refused(DataLoader(wrapper(range(8)), batch_size=4), "shards a datapipe")


class LateFirst(Numbers):
    """Its first example comes only when the other of two workers is at its second batch."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.other_is_ahead = torch.multiprocessing.Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 6:
            self.other_is_ahead.set()
        elif index == 0:
            assert self.other_is_ahead.wait(timeout=60)
        return super().__getitem__(index)


def test_batches_in_no_order_are_put_in_order_or_refused():
    loader = DataLoader(LateFirst(8), batch_size=2, num_workers=2, in_order=False)
    batches = [batch.tolist() for batch in Session(1).dataset(loader, 0)]
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]]

    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    _refused(Own(Numbers(8), batch_size=4, in_order=False), "in_order=False")


def test_options_of_a_loader_are_not_given_twice():
    loader = DataLoader(Numbers(8), batch_size=4)
    _refused(loader, r"batch_size=2 .*\(batch_size=4\)", batch_size=2)
    _refused(loader, "shuffle=True", shuffle=True)
    _refused(loader, "drop_last=True", drop_last=True)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True, "4"])
def test_a_batch_size_that_is_none_is_named(batch_size):
    _refused(torch.ones(4), f"not {batch_size!r}", batch_size=batch_size)


def test_input_that_cannot_be_cut_is_refused_with_its_values():
    _refused(torch.ones(4), "need `batch_size`")
    _refused((torch.ones(4), np.ones(5)), r"\[\(4,\), \(5,\)\].*\[4, 5\]", batch_size=2)
    _refused((torch.ones(4), torch.tensor(1)), r"no dimension to cut along", batch_size=2)
    _refused(Numbers(4), "cannot distribute a Numbers: pass a DataLoader", batch_size=2)
    _refused([1, 2, 3], r"a list that has int in it: .* torch\.tensor\(numbers\), .* DataLoader\(", batch_size=2)
    _refused({"x": np.ones(4), "y": ["a"]}, "a dict that has str in it: .* each a tensor or an array", batch_size=2)
    _refused([], "no tensor or array in it", batch_size=2)
    _refused(np.array(["a", "b"]), "dtype <U1 has no torch counterpart", batch_size=2)
    _refused(torch.ones(0, 3), "0 examples, batch_size=2", batch_size=2)
    _refused(torch.ones(3), "3 examples, batch_size=4, drop_last=True", batch_size=4, drop_last=True)
    _refused(DataLoader(Numbers(0), batch_size=4), r"len\(Numbers\) is 0")


def test_a_dataset_that_is_not_batched_is_refused():
    _refused(DataLoader(TensorDataset(torch.ones(4, 3), torch.ones(4)), batch_size=None), r"\[\(3,\), \(\)\]")
    _refused(DataLoader(Counting(3), batch_size=None), "cannot count the examples of a int")
    uneven = [(torch.ones(3), torch.ones(2))]
    _refused(DataLoader(uneven, batch_size=None), r"\[\(3,\), \(2,\)\]")


def test_an_error_while_loading_leaves_as_it_is_and_ends_the_batch():
    class Broken(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise KeyError(index)

    session = Session(1)
    with pytest.raises(KeyError, match="0"):
        list(session.dataset(DataLoader(Broken(4), batch_size=2), 0))
    assert session.ended == [1]


def test_a_dataset_of_unknown_length_says_so():
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pytest.raises(TypeError):
        len(Session(2).dataset(DataLoader(Endless(), batch_size=2), 0))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tensor_dataset_gives_the_batches_that_its_loader_gives(workers):
    columns = (torch.randn(7, 2, 3), torch.arange(7), torch.rand(7, dtype=torch.float64) > 0.5)
    generator = torch.Generator()
    loader = DataLoader(TensorDataset(*columns), batch_size=3, shuffle=True, generator=generator, num_workers=workers)
    generator.manual_seed(5)
    plain = list(loader)
    generator.manual_seed(5)
    (ours,) = run(Session(1), loader)[0]
    assert [type(batch) for batch in ours] == [type(batch) for batch in plain]
    for batch, expected in zip(ours, plain, strict=True):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(batch, expected, strict=True))


@pytest.mark.parametrize("batch_size", [3, 7])
def test_a_tensor_dataset_draws_as_many_random_numbers_as_its_loader_does(batch_size):
    loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=batch_size, shuffle=True)
    torch.manual_seed(5)
    plain = [[batch[0].tolist() for batch in loader] for _ in range(2)]
    drawn_after = torch.rand(2)
    torch.manual_seed(5)
    ours = [[share.batch[0].tolist() for share in GlobalBatches(loader, num_replicas=2)] for _ in range(2)]
    assert (ours, torch.rand(2).tolist()) == (plain, drawn_after.tolist())


def test_a_sampler_may_count_rows_of_a_tensor_dataset_from_the_end():
    loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2, sampler=[-1, 0, 2, -2])
    (ours,) = run(Session(1), loader)[0]
    assert [batch[0].tolist() for batch in ours] == [[4, 0], [2, 3]]


def test_a_row_that_a_tensor_dataset_lacks_is_an_error_that_says_so():
    loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2, sampler=[0, 5])
    with pytest.raises(IndexError, match="index 5 is out of bounds for dimension 0 with size 5"):
        run(Session(1), loader)
