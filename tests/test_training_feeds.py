"""Feeds: what users give to fit, as shares of global batches; n replicas are n loops in this process."""

from __future__ import annotations

import pickle
import random
from collections import namedtuple
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from mirror_nb.errors import UsageError
from mirror_nb.training.feeds import feed, split_validation
from mirror_nb.training.shares import Feed

CPU = torch.device("cpu")


def flat(batches: list[list[Any]]) -> list[Any]:
    return [item for batch in batches for item in batch]


def shares_of(made: Feed, n: int, epoch: int = 0, start: int = 0) -> list[list[Any]]:
    """The shares of each replica, each from a feed that travelled."""
    return [list(pickle.loads(cloudpickle.dumps(made)).shares(i, n, CPU, epoch=epoch, start=start)) for i in range(n)]


def global_batches(made: Feed, n: int, epoch: int = 0, start: int = 0) -> list[Any]:
    """What the replicas together get, batch by batch."""
    steps = zip(*shares_of(made, n, epoch, start), strict=True)
    return [torch.cat([share.inputs for share in step]).tolist() for step in steps]


def numbers(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32)


class Squares(Dataset[Any]):
    """Counts what is loaded."""

    def __init__(self, length: int = 10) -> None:
        self.length, self.loaded = length, []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        self.loaded.append(i)
        return torch.tensor(float(i)), torch.tensor(i * i)


class Noisy(Dataset[Any]):
    """Draws from the process's random numbers while it loads."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i), random.random(), np.random.random(), float(torch.rand(()))])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.tensor(float(i)) + random.random() for i in range(7)])


class Sized(Stream):
    def __len__(self) -> int:
        return 9


class Drawing(Sampler[int]):
    """Draws at every step, from all that there is."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.older = np.random.RandomState(3)

    def __iter__(self) -> Any:
        for _ in range(9):
            own = int(self.rng.integers(100)) * 10 + int(self.older.randint(10))
            yield own * 1000 + random.randrange(10) * 100 + int(torch.randint(100, ()))

    def __len__(self) -> int:
        return 9


class Itself(Dataset[Any]):
    def __getitem__(self, i: int) -> Any:
        return torch.tensor(float(i))


# ---- what is given ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        np.array([[5.0, 6.0], [3.0, 4.0], [1.0, 2.0]])[::-1],
        np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=">f8"),
        [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
        ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)),
        pd.DataFrame({"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}),
    ],
    ids=["tensor", "numpy", "backwards", "bigendian", "list", "tuple", "pandas"],
)
def test_arrays_of_every_kind_become_float_tensors(x):
    made = feed(x, pd.Series([0, 1, 2]), batch_size=2)
    assert (made.batch_size, made.num_batches, made.num_examples) == (2, 2, 3)
    first, last = shares_of(made, 1)[0]
    assert first.inputs.dtype is torch.float32
    assert torch.cat([first.inputs, last.inputs]).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert first.targets.dtype is torch.int64
    assert (last.examples, last.global_examples, last.sample_weight) == (1, 1, None)


def test_a_users_tensor_keeps_its_dtype_and_small_classes_become_int64():
    (share,) = shares_of(feed(numbers(3).double(), torch.tensor([0, 1, 2], dtype=torch.uint8)), 1)[0]
    assert share.inputs.dtype is torch.float64
    assert share.targets.dtype is torch.int64


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.int8, np.bool_, np.float16])
def test_rows_can_be_taken_of_every_dtype(dtype):
    (share,) = shares_of(feed(np.ones((4, 2), dtype), batch_size=4, shuffle=True), 1)[0]
    assert share.inputs.sum() == 8


def test_several_inputs_keep_their_structure():
    Pair = namedtuple("Pair", "left right")
    x = {"a": numbers(4), "b": (np.arange(4), [1, 2, 3, 4])}
    share = shares_of(feed(x, Pair([1.0, 2, 3, 4], numbers(4)), [1, 2, 3, 4], batch_size=3), 2)[1][0]
    assert share.inputs["a"].tolist() == [2]
    assert [part.tolist() for part in share.inputs["b"]] == [[2], [3]]
    assert share.targets.left.tolist() == [3]
    assert share.sample_weight.tolist() == [3]
    assert share.sample_weight.dtype is torch.float32
    assert [type(part) for part in share.batch] == [dict, Pair, torch.Tensor]


def test_what_a_custom_step_gets_is_as_it_was_given():
    x, y = numbers(2), numbers(2)
    assert torch.equal(shares_of(feed(x), 1)[0][0].batch, x)
    assert type(shares_of(feed(x, y), 1)[0][0].batch) is tuple
    assert len(shares_of(feed(x, y, y), 1)[0][0].batch) == 3
    listed = shares_of(feed(TensorDataset(x)), 1)[0][0]
    assert type(listed.batch) is list
    assert torch.equal(listed.inputs, x)
    four = shares_of(feed(TensorDataset(x, y, x, y)), 1)[0][0]
    assert len(four.inputs) == len(four.batch) == 4
    assert four.targets is None
    loaded = shares_of(feed(DataLoader(TensorDataset(x, y, x), batch_size=2)), 1)[0][0]
    assert [type(loaded.batch), len(loaded.batch)] == [list, 3]
    assert torch.equal(loaded.sample_weight, x)
    (named,) = shares_of(feed(DataLoader([{"a": x[0], "b": y[0]}])), 1)[0]
    assert named.inputs.keys() == named.batch.keys() == {"a", "b"}


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_network_that_writes_to_its_inputs_leaves_the_users_array_alone(shuffle):
    x = numbers(4)
    made = feed(x, batch_size=4, shuffle=shuffle)
    for share in made.shares(0, 1, CPU, epoch=0):
        share.inputs.fill_(-1)
    assert x.tolist() == [0, 1, 2, 3]


# ---- the order and the cut ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_any_number_of_replicas_gets_the_same_global_batches(n, shuffle):
    made = feed(numbers(11), numbers(11), batch_size=4, shuffle=shuffle, seed=5)
    for epoch in range(2):
        assert global_batches(made, n, epoch) == global_batches(made, 1, epoch)
        assert sorted(flat(global_batches(made, n, epoch))) == list(range(11))
    assert (global_batches(made, n, 0) == global_batches(made, n, 1)) is not shuffle
    assert [len(batch) for batch in global_batches(made, n)] == [4, 4, 3]


def test_the_cut_is_tensorflows():
    sizes = [[share.examples for share in shares] for shares in shares_of(feed(numbers(9), batch_size=4), 3)]
    assert sizes == [[2, 2, 1], [2, 2, 0], [0, 0, 0]]
    empty = shares_of(feed(torch.zeros(1, 3), batch_size=4, shuffle=True), 2)[1][0]
    assert (tuple(empty.inputs.shape), empty.global_examples) == ((0, 3), 1)


def test_the_order_is_that_of_the_seed():
    feeds = [feed(numbers(20), batch_size=20, shuffle=True, seed=seed) for seed in (1, 1, 2, -1)]
    orders = [global_batches(made, 1)[0] for made in feeds]
    assert orders[0] == orders[1]
    assert len({str(order) for order in orders}) == 3


def test_a_dataset_comes_in_the_order_of_an_array():
    for shuffle in (False, True):
        array = feed(numbers(10), batch_size=4, shuffle=shuffle, seed=2)
        dataset = feed(Squares(), batch_size=4, shuffle=shuffle, seed=2)
        tensors = feed(TensorDataset(numbers(10)), batch_size=4, shuffle=shuffle, seed=2)
        assert (dataset.batch_size, dataset.num_batches, dataset.num_examples) == (4, 3, 10)
        for epoch in (0, 1):
            assert global_batches(array, 2, epoch) == global_batches(dataset, 2, epoch)
            assert global_batches(array, 2, epoch) == global_batches(tensors, 3, epoch)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_dataloaders_batches_are_those_of_a_plain_loop(n):
    def loader() -> DataLoader[Any]:
        return DataLoader(
            TensorDataset(numbers(11)), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
        )

    plain = loader()
    expected = [[batch[0].tolist() for batch in plain] for _ in range(2)]
    made = feed(loader())
    feeds = [pickle.loads(cloudpickle.dumps(made)) for _ in range(n)]
    for epoch in (0, 1):
        steps = zip(*(f.shares(i, n, CPU, epoch=epoch) for i, f in enumerate(feeds)), strict=True)
        assert [torch.cat([share.inputs for share in step]).tolist() for step in steps] == expected[epoch]


SOURCES = {
    "array": lambda: feed(numbers(9), batch_size=2, shuffle=True, seed=4),
    "dataset": lambda: feed(Squares(9), batch_size=2, shuffle=True, seed=4),
    "loader": lambda: feed(DataLoader(TensorDataset(numbers(9)), batch_size=2, shuffle=True), seed=4),
    "generator": lambda: feed(
        DataLoader(TensorDataset(numbers(9)), batch_size=2, shuffle=True, generator=torch.Generator()), seed=4
    ),
    "drawing": lambda: feed(DataLoader(Itself(), batch_size=2, sampler=Drawing()), seed=4),
    "index lists": lambda: feed(
        DataLoader(
            TensorDataset(numbers(9)), batch_size=None, sampler=BatchSampler(RandomSampler(range(9)), 2, False)
        ),
        seed=4,
    ),
    "stream": lambda: feed(DataLoader(Stream(), batch_size=2), seed=4),
    "stream alone": lambda: feed(Stream(), batch_size=2, seed=4),
}


@pytest.mark.parametrize("source", SOURCES)
def test_batches_are_the_same_for_any_number_of_replicas_and_whatever_was_drawn_before(source):
    expected = global_batches(SOURCES[source](), 1, epoch=3)
    assert sum(map(len, expected)) in (7, 9)
    torch.rand(5), random.random(), np.random.random()
    assert global_batches(SOURCES[source](), 2, epoch=3) == expected
    assert global_batches(SOURCES[source](), 5, epoch=3) == expected


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("n", [1, 2])
def test_resuming_in_the_middle_of_an_epoch_gives_the_remaining_batches(source, n):
    feeds = [SOURCES[source]() for _ in range(n)]
    for i, made in enumerate(feeds):
        list(made.shares(i, n, CPU, epoch=0))
    running = [made.shares(i, n, CPU, epoch=1) for i, made in enumerate(feeds)]
    for shares in running:
        next(shares), next(shares)
    states = [made.state() for made in feeds]
    rest = [[share.inputs.tolist() for share in shares] for shares in running]
    following = [[share.inputs.tolist() for share in made.shares(i, n, CPU, epoch=2)] for i, made in enumerate(feeds)]
    assert rest[0]
    for i, state in enumerate(states):
        again = SOURCES[source]()
        again.load_state(_through_a_file(state))
        assert [share.inputs.tolist() for share in again.shares(i, n, CPU, epoch=1, start=2)] == rest[i]
        assert [share.inputs.tolist() for share in again.shares(i, n, CPU, epoch=2)] == following[i]


def _through_a_file(state: dict[str, Any]) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_an_epoch_that_was_left_early_is_over():
    made, plain = SOURCES["generator"](), SOURCES["generator"]()
    for one in (made, plain):
        shares = one.shares(0, 1, CPU, epoch=0)
        next(shares)
        shares.close()
    again = SOURCES["generator"]()
    again.load_state(made.state())
    expected = [share.inputs.tolist() for share in plain.shares(0, 1, CPU, epoch=1)]
    assert [share.inputs.tolist() for share in again.shares(0, 1, CPU, epoch=1)] == expected


def test_examples_that_are_skipped_are_not_loaded():
    dataset = Squares()
    made = feed(DataLoader(dataset, batch_size=2, shuffle=True))
    list(made.shares(0, 2, CPU, epoch=0, start=3))
    assert len(dataset.loaded) == 2
    dataset.loaded.clear()
    assert list(made.shares(0, 2, CPU, epoch=0, start=5)) == []
    assert dataset.loaded == []


def _streams() -> list[str]:
    return [str(torch.get_rng_state().tolist()), str(random.getstate()), str(np.random.get_state())]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("start", [0, 2])
def test_feeding_leaves_the_processs_random_numbers_alone(source, start):
    before = _streams()
    for _ in SOURCES[source]().shares(0, 2, CPU, epoch=0, start=start):
        pass
    assert _streams() == before


def test_what_a_dataset_draws_is_the_replicas_own_and_goes_on_where_it_stopped():
    def noise(start: int) -> list[Any]:
        made = feed(DataLoader(Noisy(), batch_size=2), seed=1)
        return [share.inputs.tolist() for share in made.shares(0, 1, CPU, epoch=0, start=start)]

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    whole = feed(DataLoader(Noisy(), batch_size=2), seed=1).shares(0, 1, CPU, epoch=0)
    next(whole), next(whole)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    rest = [share.inputs.tolist() for share in whole]
    torch.set_rng_state(states[0]), random.setstate(states[1]), np.random.set_state(states[2])
    assert noise(start=2) == rest


def forked(**settings: Any) -> DataLoader[Any]:
    return DataLoader(
        Squares(9), batch_size=2, shuffle=True, num_workers=1, multiprocessing_context="fork", **settings
    )


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("seeded", [False, True])
def test_a_loader_with_persistent_workers_can_be_fed_and_resumed(n, seeded):
    def made(persistent: bool = True) -> Feed:
        generator = torch.Generator().manual_seed(2) if seeded else None
        return feed(forked(persistent_workers=persistent, generator=generator), seed=6)

    def epoch_of(one: Feed, epoch: int, start: int = 0) -> Any:
        return [share.inputs.tolist() for share in one.shares(0, n, CPU, epoch=epoch, start=start)]

    whole = made()
    states = []
    epochs = []
    for epoch in range(3):
        states.append(whole.state())
        epochs.append(epoch_of(whole, epoch))
    for epoch in range(3):
        again = made()
        again.load_state(states[epoch])
        assert epoch_of(again, epoch, 2) == epochs[epoch][2:]
    if seeded and n == 1:
        generator = torch.Generator().manual_seed(2)
        plain = forked(persistent_workers=True, generator=generator)
        assert [[batch[0].tolist() for batch in plain] for _ in range(3)] == epochs


def test_a_loader_whose_workers_run_can_still_travel():
    loader = DataLoader(Squares(3), num_workers=1, persistent_workers=True)
    loader._iterator = (lambda: None for _ in ())  # type: ignore[assignment]
    made = pickle.loads(cloudpickle.dumps(feed(loader)))
    assert made.num_batches == 3
    assert loader._iterator is not None
    loader._iterator = None


def test_sizes_that_a_loader_knows():
    def sizes(*args: Any, **kwargs: Any) -> Any:
        made = feed(DataLoader(*args, **kwargs))
        return made.batch_size, made.num_batches, made.num_examples

    assert sizes(Squares(9), batch_size=2) == (2, 5, 9)
    assert sizes(Squares(9), batch_size=2, drop_last=True) == (2, 4, 8)
    assert sizes(Stream(), batch_size=2) == (2, None, None)
    assert sizes(Sized(), batch_size=2) == (2, 5, None)
    assert sizes(Sized(), batch_size=2, num_workers=1) == (2, None, None)
    assert sizes(Sized(), batch_size=None, num_workers=1) == (None, 9, None)
    assert sizes(Squares(9), batch_sampler=[[1], [2, 3]]) == (None, 2, None)
    assert sizes(Squares(9), batch_sampler=BatchSampler(SequentialSampler(range(9)), 4, False)) == (4, 3, 9)


# ---- replicas that made their feeds themselves --------------------------------------------------------


def test_replicas_agree_on_the_random_states_of_a_loader():
    said: list[bytes] = []

    def agree(mine: bytes) -> bytes:
        said.append(mine)
        return said[0]

    def loader(seed: int) -> Feed:
        return feed(
            DataLoader(Squares(6), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed)), seed=1
        )

    first, second = (list(loader(i).shares(i, 2, CPU, epoch=0, agree=agree)) for i in range(2))
    assert sorted(float(share.inputs) for share in first + second) == [0, 1, 2, 3, 4, 5]


def test_replicas_that_were_given_different_arrays_are_told():
    said = [pickle.dumps((str(feed(numbers(7), batch_size=2)), {}))]
    with pytest.raises(UsageError, match=r"replica 1 was given arrays of shapes \[\(6,\)\].*replica 0.*\[\(7,\)\]"):
        feed(numbers(6), batch_size=2).shares(1, 2, CPU, epoch=0, agree=lambda mine: said[0])


# ---- mistakes -----------------------------------------------------------------------------------------

LOADER = DataLoader(Squares(), batch_size=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: feed(numbers(3), numbers(4)), r"differ: x of \(3,\), y of \(4,\)"),
        (lambda: feed([numbers(3), numbers(2)]), r"differ: x of \(3,\) and \(2,\)"),
        (lambda: feed(numbers(3), numbers(3), numbers(2)), r"sample_weight of \(2,\)"),
        (lambda: feed(numbers(3), None, numbers(3)), "without `y`"),
        (lambda: feed(numbers(3), numbers(3), {"a": numbers(2)}), r"sample_weight of \(2,\)"),
        (lambda: feed(numbers(3), numbers(3), {"a": [numbers(3)]}), r"`sample_weight\['a'\]` is one tensor .* a list"),
        (lambda: feed(numbers(0), numbers(0)), r"no examples: x of \(0,\)"),
        (lambda: feed([]), "holds no tensor"),
        (lambda: feed({}), "holds no tensor"),
        (lambda: feed(None), "`x` is None"),
        (lambda: feed(torch.tensor(1.0)), "single number"),
        (lambda: feed(3), r"`x` is a int: pass a tensor"),
        (lambda: feed(["a", "b"]), r"`x\[0\]` is a str"),
        (lambda: feed({"words": np.array(["a"])}), r"`x\['words'\]` has dtype <U1"),
        (lambda: feed([[1, 2], [3]]), "lists of different lengths"),
        (lambda: feed(torch.eye(2).to_sparse()), "dense"),
        (lambda: feed(numbers(3), batch_size=0), "`batch_size` is the number.*not 0"),
        (lambda: feed(numbers(3), batch_size=2.5), "not 2.5"),
        (lambda: feed(numbers(3), batch_size=True), "not True"),
        (lambda: feed(LOADER, batch_size=4), r"batch_size=4.*DataLoader \(batch_size=2\)"),
        (lambda: feed(LOADER, numbers(10)), "y given together with a DataLoader"),
        (lambda: feed(LOADER, None, numbers(10)), "sample_weight given together"),
        (lambda: feed(Squares(), numbers(10)), "y given together with a Squares"),
        (lambda: feed(Squares(0)), r"len\(\) of the Squares is 0"),
        (lambda: feed(DataLoader(Squares(0))), r"len\(\) of the Squares is 0"),
        (
            lambda: feed(DataLoader(Squares(3), batch_size=4, drop_last=True)),
            r"DataLoader is 0 \(3 examples.*drop_last",
        ),
        (lambda: feed(Itself()), r"Itself has no len\(\)"),
    ],
)
def test_a_mistake_is_told_with_its_values(given, message):
    with pytest.raises(UsageError, match=message):
        given()


def test_a_loader_that_is_sharded_already_is_refused():
    sampler = torch.utils.data.DistributedSampler(Squares(), num_replicas=2, rank=1)
    made = feed(DataLoader(Squares(), batch_size=2, sampler=sampler))
    with pytest.raises(UsageError, match="already sharded"):
        list(made.shares(0, 2, CPU, epoch=0))


def test_a_position_of_other_data_is_refused():
    array, loader = SOURCES["array"](), SOURCES["loader"]()
    with pytest.raises(UsageError, match="another kind of data"):
        array.load_state(loader.state())
    with pytest.raises(UsageError, match="another DataLoader"):
        loader.load_state(SOURCES["generator"]().state())


def test_the_rest_of_an_epoch_is_not_cut_into_other_batches():
    state = SOURCES["array"]().state()
    other = feed(numbers(9), batch_size=3, shuffle=True)
    other.load_state(state)
    with pytest.raises(UsageError, match=r"'batch_size': 2.*after 1 of its batches.*'batch_size': 3"):
        other.shares(0, 1, CPU, epoch=1, start=1)
    # An epoch that begins may have any.
    assert len(list(other.shares(0, 1, CPU, epoch=1))) == 3


# ---- validation_split ---------------------------------------------------------------------------------


def test_the_last_examples_are_for_validation():
    (x, y, weight), (val_x, val_y, _) = split_validation([numbers(10), np.arange(10)], numbers(10), None, 0.25)
    assert [len(part) for part in (*x, y, *val_x, val_y)] == [7, 7, 7, 3, 3, 3]
    assert val_x[1].tolist() == [7, 8, 9]
    assert weight is None
    assert feed(x, y, weight).num_examples == 7


@pytest.mark.parametrize("fraction", [0, 1, 1.5, -0.1, 0.99, None])
def test_a_split_that_leaves_nothing_is_refused(fraction):
    with pytest.raises(UsageError, match="validation_split"):
        split_validation(numbers(10 if fraction != 0.99 else 1), None, None, fraction)


@pytest.mark.parametrize("source", [LOADER, Squares()])
def test_a_loader_cannot_be_split(source):
    with pytest.raises(UsageError, match="cannot split a"):
        split_validation(source, None, None, 0.2)


# ---- on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_arrive_on_the_gpu_with_the_values_of_the_cpu(resident, shuffle, monkeypatch):
    if not resident:
        # As with arrays that would take all of its memory.
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    device = torch.device("cuda", 0)
    made = feed({"a": torch.rand(11, 3)}, numbers(11), numbers(11), batch_size=4, shuffle=shuffle, seed=1)
    on_gpu = list(made.shares(1, 2, device, epoch=1))
    on_cpu = list(made.shares(1, 2, CPU, epoch=1))
    assert [share.examples for share in on_gpu] == [share.examples for share in on_cpu]
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        for name in ("inputs", "targets", "sample_weight"):
            here, there = (share.inputs["a"] if name == "inputs" else getattr(share, name) for share in (ours, theirs))
            assert here.device == device
            assert torch.equal(here.cpu(), there)
    # What is kept on the GPU does not travel.
    assert b"cuda" not in cloudpickle.dumps(made)
