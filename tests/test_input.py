"""Input as the controller and as a replica see it; the replicas of these tests live in one process."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from driving import eventually
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from mirror_nb.data.dataset import Loaders
from mirror_nb.data.prefetch import ahead
from mirror_nb.errors import MirrorError, TransferError, UsageError
from mirror_nb.strategies.context import ReplicaContext, entered
from mirror_nb.strategies.input import (
    ControllerDataset,
    ControllerFunctionDataset,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ReplicaDataset,
    ReplicaInput,
    ValueContext,
    values_from_function,
)
from mirror_nb.strategies.specs import PerReplicaSpec, TensorSpec
from mirror_nb.values import PerReplica

PREFETCH = [None, InputOptions(prefetch=2)]


def parts(batch: Any) -> list[Any]:
    """The replicas' values of a batch as lists; of a plain batch its own alone."""
    return [value.tolist() for value in (batch if isinstance(batch, PerReplica) else [batch])]


def controller(source: Any, n: int, **options: Any) -> ControllerDataset:
    return ControllerDataset(source, num_replicas=n, **options)


class Opaque:
    """A batch that nobody can look into."""

    def __init__(self, items: list[int]) -> None:
        self.items = items


def test_of_batches_that_cannot_be_cut_each_replica_has_its_own_examples():
    dataset = controller(DataLoader(Range(5), batch_size=4, collate_fn=Opaque), 2)
    with pytest.warns(UserWarning, match="an? Opaque cannot be cut: where it is to have no examples") as said:
        batches = list(dataset)
    assert [[part.items for part in batch.values] for batch in batches] == [[[0, 1], [2, 3]], [[4], [4]]]
    assert [batch.shares for batch in batches] == [(2, 2), (1, 0)]
    assert [one.filename for one in said] == [__file__]


def test_beside_what_cannot_be_cut_a_name_stays_a_name_and_what_is_counted_is_each_replicas_own():
    def collate(items: list[int]) -> dict[str, Any]:
        return {"graphs": Opaque(items), "x": torch.tensor(items), "count": len(items), "name": "a", "mask": None}

    (batch,) = controller(DataLoader(Range(4), batch_size=4, collate_fn=collate), 2)
    assert (batch["name"], batch["mask"], batch["count"].values) == ("a", None, (2, 2))
    assert [graphs.items for graphs in batch["graphs"].values] == parts(batch["x"]) == [[0, 1], [2, 3]]


class Together(Dataset[int]):
    """Loads many at once, and gives no list of them."""

    def __getitems__(self, indices: list[int]) -> tuple[int, ...]:
        return tuple(indices)

    def __len__(self) -> int:
        return 6


def test_batches_of_what_no_list_came_for_that_cannot_be_cut_are_told_of_once():
    dataset = controller(DataLoader(Together(), batch_size=2, collate_fn=Opaque), 2)
    with pytest.warns(UserWarning, match="an? Opaque cannot be cut: every replica gets the whole") as said:
        assert [batch.items for batch in dataset] == [(0, 1), (2, 3), (4, 5)]
    assert [one.filename for one in said] == [__file__]


class Range(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Counting(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


# ---- the split rule, in the controller ----------------------------------------------------------------

# TensorFlow's numbers for Dataset.range(length).batch(size), and more of the same kind.
STEPS = [
    (2, 10, 4, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
    (3, 10, 4, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]]),
    (4, 9, 8, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8], [], [], []]]),
    (1, 5, 4, [[[0, 1, 2, 3]], [[4]]]),
    (2, 5, 3, [[[0, 1], [2]], [[3], [4]]]),
    (3, 7, 7, [[[0, 1, 2], [3, 4, 5], [6]]]),
    (5, 4, 4, [[[0], [1], [2], [3], []]]),
    (2, 3, 1, [[[0], []], [[1], []], [[2], []]]),
]


def source_of(kind: str, length: int, size: int) -> tuple[Any, dict[str, Any]]:
    if kind == "loader":
        return DataLoader(Range(length), batch_size=size), {}
    if kind == "tensor":
        return torch.arange(length), {"batch_size": size}
    if kind == "array":
        return np.arange(length), {"batch_size": size}
    if kind == "stream":
        return DataLoader(Counting(length), batch_size=size), {}
    return DataLoader(list(torch.arange(length).split(size)), batch_size=None), {}


@pytest.mark.parametrize("kind", ["loader", "tensor", "array", "stream", "whole batches"])
@pytest.mark.parametrize(("n", "length", "size", "steps"), STEPS)
@pytest.mark.parametrize("options", PREFETCH, ids=["", "prefetch"])
def test_a_global_batch_is_cut_as_tensorflow_cuts_it(kind, n, length, size, steps, options):
    source, given = source_of(kind, length, size)
    dataset = controller(source, n, options=options, **given)
    for _ in range(2):
        batches = list(dataset)
        assert [parts(batch) for batch in batches] == steps
        if n > 1:
            assert [batch.shares for batch in batches] == [tuple(map(len, step)) for step in steps]
            assert {value.dtype for batch in batches for value in batch} == {torch.int64}
    if kind != "stream":
        assert len(dataset) == len(steps)


def test_drop_last_leaves_the_partial_batch_out():
    dataset = controller(torch.arange(10), 2, batch_size=4, drop_last=True)
    assert [parts(batch) for batch in dataset] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert len(dataset) == 2
    loader = DataLoader(Range(10), batch_size=4, drop_last=True)
    assert [parts(batch) for batch in controller(loader, 2)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_one_replica_gets_plain_batches():
    (x, y), *_ = controller((torch.arange(4), torch.ones(4, 2)), 1, batch_size=3)
    assert (type(x), type(y), x.tolist()) == (torch.Tensor, torch.Tensor, [0, 1, 2])


# ---- the same batches as a plain loop -----------------------------------------------------------------


def augmented(index: int) -> torch.Tensor:
    return index + 1000 * torch.randint(9, ()) + 10**6 * random.randrange(9)


class Augmented(Range):
    def __getitem__(self, index: int) -> Any:
        return augmented(index)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


def whole(batch: Any) -> list[Any]:
    return [item for part in parts(batch) for item in part]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_batches_are_those_of_a_plain_loop_over_the_loader(n, workers):
    def loader() -> DataLoader[Any]:
        return DataLoader(Augmented(11), batch_size=4, shuffle=True, num_workers=workers)

    seed(3)
    plain = loader()
    expected = [[batch.tolist() for batch in plain] for _ in range(2)]
    drawn = torch.rand(())
    seed(3)
    dataset = controller(loader(), n)
    assert [[whole(batch) for batch in dataset] for _ in range(2)] == expected
    assert torch.rand(()) == drawn
    assert expected[0] != expected[1]


@pytest.mark.parametrize("options", PREFETCH, ids=["", "prefetch"])
def test_shuffled_batches_do_not_depend_on_prefetching(options):
    def order(dataset: Any) -> list[Any]:
        torch.manual_seed(5)
        found = []
        for batch in dataset:
            found.append(whole(batch))
            torch.rand(3)
        return [found, torch.rand(()).item()]

    def loader() -> DataLoader[Any]:
        return DataLoader(Range(30), batch_size=4, shuffle=True)

    assert order(controller(loader(), 2, options=options)) == order(loader())


def test_two_loops_over_one_dataset_do_not_disturb_each_other():
    dataset = controller(DataLoader(Range(6), batch_size=2), 2)
    first, second = iter(dataset), iter(dataset)
    assert parts(next(first)) == parts(next(second)) == [[0], [1]]
    assert parts(next(first)) == [[2], [3]]
    assert [parts(batch) for batch in second] == [[[2], [3]], [[4], [5]]]
    assert parts(first.get_next()) == [[4], [5]]
    with pytest.raises(StopIteration):
        next(first)


def test_persistent_workers_stay_for_the_next_epoch():
    class Pids(Range):
        def __getitem__(self, index: int) -> Any:
            import os

            return os.getpid()

    loader = DataLoader(Pids(4), batch_size=2, num_workers=1, persistent_workers=True)
    dataset = controller(loader, 2)
    assert len({pid for _ in range(2) for batch in dataset for pid in whole(batch)}) == 1


# ---- structures ---------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Sentence:
    tokens: Any
    name: Any


def structured(batch: Any) -> ControllerDataset:
    """A distributed dataset of one batch of three examples."""
    return controller(DataLoader([batch], batch_size=None, collate_fn=lambda item: item), 2)


def test_tuples_lists_and_dicts_keep_their_structure_with_a_per_replica_a_leaf():
    x = torch.arange(6).reshape(3, 2)
    batch = {"a": [x, (x + 10, Pair(x, {"deep": x[:, 0]}))], "b": collections.OrderedDict(c=x)}
    (got,) = structured(batch)
    assert got["a"][1][1].y["deep"].values[1].tolist() == [4]
    assert type(got["b"]) is collections.OrderedDict
    assert type(got["a"][1][1]) is Pair
    assert [part.shape for part in got["a"][1][0]] == [(2, 2), (1, 2)]
    assert got["a"][0].shares == (2, 1)


def collated(items: list[Any]) -> dict[str, Any]:
    x = torch.arange(len(items), dtype=torch.float32)
    return {"x": x, "text": list("abc"[: len(items)]), "source": "wiki", "scale": torch.tensor(2.0), "none": None}


def test_strings_are_cut_as_a_list_and_what_is_no_batch_stays():
    (got,) = controller(DataLoader(Range(3), batch_size=3, collate_fn=collated), 2)
    assert got["text"].values == (["a", "b"], ["c"])
    assert got["text"].shares == (2, 1)
    assert (got["source"], got["none"]) == ("wiki", None)
    assert [float(value) for value in got["scale"]] == [2.0, 2.0]


def test_strings_from_a_loader_have_an_empty_list_where_there_is_no_example():
    class Texts(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            return "a", torch.tensor([1.0, 2.0])

    ((text, vector),) = controller(DataLoader(Texts(), batch_size=4), 3)
    assert [list(part) for part in text] == [["a"], [], []]
    assert [part.shape for part in vector] == [(1, 2), (0, 2), (0, 2)]
    assert text.shares == vector.shares == (1, 0, 0)


def test_a_structure_that_torch_does_not_open_is_one_leaf():
    (got,) = structured((Sentence(torch.arange(3), ["a", "b", "c"]), torch.arange(3)))
    assert isinstance(got[0], PerReplica)
    assert got[0][1] == Sentence(torch.tensor([2]), ["c"])
    # What opens nests elsewhere finds every PerReplica.
    assert all(isinstance(leaf, PerReplica) for leaf in torch.utils._pytree.tree_leaves(got))


class Texts(Dataset[Any]):
    """Texts of so many tokens."""

    LENGTHS = (2, 3, 1, 4, 2)

    def __len__(self) -> int:
        return len(self.LENGTHS)

    def __getitem__(self, index: int) -> Any:
        return {"tokens": torch.full((self.LENGTHS[index],), index)}


class Told(IterableDataset[Any]):
    """The same, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return map(Texts().__getitem__, range(len(Texts.LENGTHS)))


def one_after_the_other(texts: list[Any]) -> dict[str, Any]:
    """Join texts to one tensor, and say where each begins, as EmbeddingBag takes them."""
    tokens = [text.pop("tokens") for text in texts]
    lengths = torch.tensor([0, *map(len, tokens[:-1])])
    return {"tokens": torch.cat(tokens), "begins": lengths.cumsum(0)}


def over_time(texts: list[Any]) -> dict[str, Any]:
    """Pad texts, time first."""
    tokens = [text.pop("tokens") for text in texts]
    return {"tokens": torch.nn.utils.rnn.pad_sequence(tokens), "lengths": torch.tensor(list(map(len, tokens)))}


JOINED = {
    one_after_the_other: [
        ({"tokens": [0, 0], "begins": [0]}, {"tokens": [1, 1, 1], "begins": [0]}),
        ({"tokens": [2], "begins": [0]}, {"tokens": [3, 3, 3, 3], "begins": [0]}),
    ],
    over_time: [
        ({"tokens": [[0], [0]], "lengths": [2]}, {"tokens": [[1], [1], [1]], "lengths": [3]}),
        ({"tokens": [[2]], "lengths": [1]}, {"tokens": [[3], [3], [3], [3]], "lengths": [4]}),
    ],
}


def of_each(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value[i].tolist() for name, value in batch.items()} for i in range(2)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("source", [Texts, Told])
@pytest.mark.parametrize(("collate", "wanted"), JOINED.items())
def test_of_a_batch_that_cannot_be_cut_each_replicas_examples_are_collated(collate, wanted, source, workers):
    dataset = controller(DataLoader(source(), batch_size=2, collate_fn=collate, num_workers=workers), 2)
    for _ in range(2):
        *full, last = dataset
        assert [of_each(batch) for batch in full] == list(map(list, wanted))
        assert all(value.shares == (1, 1) for batch in full for value in batch.values())
        # The last one has a single example.
        assert of_each(last)[0]["tokens"] in ([4, 4], [[4], [4]])
        assert [len(part) for name, value in last.items() if name != "tokens" for part in value] == [1, 0]


def test_a_first_batch_of_as_many_time_steps_as_examples_is_not_cut_over_time():
    class Square(Texts):
        LENGTHS = (2, 1)

    (batch,) = controller(DataLoader(Square(), batch_size=2, collate_fn=over_time), 2)
    assert of_each(batch) == [{"tokens": [[0], [0]], "lengths": [2]}, {"tokens": [[1]], "lengths": [1]}]


def test_collating_draws_as_often_as_in_a_plain_loop_where_batches_can_be_cut():
    def mixed(items: list[int]) -> Any:
        return torch.tensor(items) + torch.rand(())

    loader = DataLoader(Range(6), batch_size=3, collate_fn=mixed)
    torch.manual_seed(0)
    plain = [batch.tolist() for batch in loader]
    torch.manual_seed(0)
    assert [whole(batch) for batch in controller(loader, 2)] == plain


def test_shares_do_not_travel_and_do_not_show():
    value = PerReplica([1, 2], shares=(3, 4))
    assert repr(value) == repr(PerReplica([1, 2]))
    assert pickle.loads(pickle.dumps(value)).shares is None


@pytest.mark.parametrize("in_a_replica", [False, True])
def test_a_copy_of_what_keeps_a_dataset_keeps_the_same(in_a_replica):
    dataset = (
        ReplicaDataset(torch.arange(4), Replicas(2).input(0), batch_size=2)
        if in_a_replica
        else controller(torch.arange(4), 2, batch_size=2)
    )
    assert copy.deepcopy({"data": dataset})["data"] is dataset


def test_a_dataset_of_a_process_that_no_notebook_commands_says_why_it_does_not_travel():
    with pytest.raises(TransferError, match="keep its `source`, and distribute that where it is used"):
        pickle.dumps(ReplicaDataset(torch.arange(4), Replicas(2).input(0), batch_size=2))


# ---- the spec of an element ---------------------------------------------------------------------------


def test_the_element_spec_prints_as_tensorflow_prints_it():
    dataset = controller(DataLoader(Range(10), batch_size=4), 2)
    assert repr(dataset.element_spec) == (
        "PerReplicaSpec(TensorSpec(shape=(None,), dtype=torch.int64, name=None), "
        "TensorSpec(shape=(None,), dtype=torch.int64, name=None))"
    )
    assert len(dataset.element_spec) == 2
    assert dataset.element_spec[1].shape == (None,)


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_spec_has_the_structure_of_a_batch(drop_last):
    source = {"x": torch.zeros(5, 3, 2, dtype=torch.float64), "y": (np.zeros(5, np.int32),)}
    spec = controller(source, 3, batch_size=2, drop_last=drop_last).element_spec
    x, y = TensorSpec((None, 3, 2), torch.float64), TensorSpec((None,), torch.int32)
    assert spec == {"x": PerReplicaSpec(x, x, x), "y": (PerReplicaSpec(y, y, y),)}


@pytest.mark.parametrize("in_a_replica", [False, True])
def test_an_iterator_gives_the_next_batch_or_none_and_knows_the_spec(in_a_replica):
    source = DataLoader(Range(5), batch_size=3)
    dataset = ReplicaDataset(source, Replicas(2).input(0)) if in_a_replica else controller(source, 2)
    iterator = iter(dataset)
    assert iterator.element_spec == dataset.element_spec
    given = []
    while (batch := iterator.get_next_as_optional()).has_value():
        given.append(parts(batch.get_value()))
    assert given == ([[[0, 1]], [[3]]] if in_a_replica else [[[0, 1], [2]], [[3], [4]]])
    assert batch.element_spec == dataset.element_spec
    with pytest.raises(UsageError, match="no next batch"):
        batch.get_value()
    with pytest.raises(StopIteration):
        iterator.get_next()


def test_the_spec_of_one_replica_has_no_per_replica():
    assert controller(torch.zeros(4, 3), 1, batch_size=2).element_spec == TensorSpec((None, 3), torch.float32)


def test_the_spec_of_strings_and_of_what_is_no_batch():
    spec = controller(DataLoader(Range(3), batch_size=3, collate_fn=collated), 2).element_spec
    assert repr(spec["text"][0]) == "TensorSpec(shape=(None,), dtype=str, name=None)"
    assert spec["scale"][0] == TensorSpec((), torch.float32)
    assert (spec["source"], spec["none"]) == ("wiki", None)


class Lines(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b", "c"])


def test_the_spec_of_a_stream_of_strings_goes_by_what_the_loader_counts():
    dataset = controller(DataLoader(Lines(), batch_size=2), 2)
    assert dataset.element_spec == PerReplicaSpec(*[TensorSpec((None,), str)] * 2)
    assert [batch.values for batch in dataset] == [(["a"], ["b"]), (["c"], [])]


@dataclass
class Own:
    x: torch.Tensor
    more: Any


class Items(dict[str, Any]):
    """A dict of one's own."""


@pytest.mark.parametrize("n", [1, 2])
def test_the_spec_of_structures_of_ones_own_has_theirs(n):
    x, word = TensorSpec((None, 3), torch.float32), TensorSpec((None,), str)
    for made, spec in (
        (lambda x: Own(x, {"words": ["a"] * len(x)}), Own(x, {"words": word})),
        (lambda x: collections.UserDict(x=x), collections.UserDict(x=x)),
        (lambda x: Items(x=x, name="n"), {"x": x, "name": "n"}),
    ):
        loader = DataLoader(
            list(torch.zeros(4, 3)), batch_size=2, collate_fn=lambda rows, made=made: made(torch.stack(rows))
        )
        found = controller(loader, n).element_spec
        assert found == (spec if n == 1 else PerReplicaSpec(spec, spec))


@pytest.mark.parametrize("kind", ["loader", "tensor", "stream", "whole batches"])
def test_asking_for_the_spec_changes_nothing(kind):
    source, given = source_of(kind, 6, 4)
    dataset = controller(source, 2, **given)
    seed(1)
    before = torch.get_rng_state(), random.getstate()
    spec = dataset.element_spec
    assert spec == PerReplicaSpec(*[TensorSpec((None,), torch.int64)] * 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert [parts(batch) for batch in dataset] == [[[0, 1], [2, 3]], [[4], [5]]]


def test_the_spec_of_a_shuffled_loader_leaves_its_order_as_it_was():
    def order(ask: bool) -> list[Any]:
        loader = DataLoader(Augmented(9), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(4))
        dataset = controller(loader, 2)
        seed(2)
        if ask:
            _ = dataset.element_spec
        return [whole(batch) for batch in dataset]

    assert order(ask=True) == order(ask=False)


def test_the_spec_of_a_source_without_a_batch_is_an_error():
    with pytest.raises(UsageError, match="gives no batch"):
        _ = controller(DataLoader(Counting(0), batch_size=2), 2).element_spec


# ---- inside a replica function ------------------------------------------------------------------------


class Held:
    num_replicas_in_sync = 2


@contextlib.contextmanager
def in_replica() -> Iterator[None]:
    strategy: Any = Held()
    with entered(strategy, ReplicaContext(strategy, 0), cross=False):
        yield


GOLDEN_NEXT = r"next\(iterator\) should be called from outside of replica_fn"


def test_next_inside_a_replica_function_is_a_value_error():
    dataset = controller(torch.arange(8), 2, batch_size=4)
    iterator = iter(dataset)
    with in_replica(), pytest.raises(ValueError, match=GOLDEN_NEXT):
        next(iterator)
    assert parts(next(iterator)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("captured", ["dataset", "iterator"])
def test_input_of_the_controller_that_a_replica_function_captured_is_a_value_error(captured):
    dataset = controller(torch.arange(8), 2, batch_size=4)
    arrived = pickle.loads(pickle.dumps(dataset if captured == "dataset" else iter(dataset)))
    with pytest.raises(ValueError, match=GOLDEN_NEXT):
        next(arrived)
    for call in (iter, lambda it: it.get_next(), lambda it: it.get_next_as_optional()):
        with pytest.raises(ValueError, match=GOLDEN_NEXT):
            call(arrived)
    assert "of another process" in repr(arrived)
    with pytest.raises(UsageError, match=r"In a mirrored cell distribute what it was made of"):
        Replicas(2).run(lambda own: ReplicaDataset.of(arrived, own))


def test_a_dataset_that_a_replica_function_captured_knows_its_length():
    for dataset in (
        controller(torch.arange(9), 2, batch_size=4),
        ControllerFunctionDataset(lambda _: DataLoader(Range(9), batch_size=2), num_replicas=2),
    ):
        assert len(pickle.loads(pickle.dumps(dataset))) == len(dataset) == 3
    stream = controller(DataLoader(Counting(4), batch_size=2), 2)
    with pytest.raises(TypeError, match="does not know how many there are"):
        len(pickle.loads(pickle.dumps(stream)))


def test_a_cell_which_is_in_both_contexts_may_iterate():
    strategy: Any = Held()
    with entered(strategy, ReplicaContext(strategy, 0), cross=True):
        assert len(list(controller(torch.arange(8), 2, batch_size=4))) == 2


# ---- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"experimental_fetch_to_device": False}, r"\.cpu\(\)"),
        ({"experimental_replication_mode": InputReplicationMode.PER_REPLICA}, "dealt out to the replicas in turn"),
        ({"experimental_place_dataset_on_device": True}, "runs on the CPU"),
        ({"experimental_per_replica_buffer_size": -1}, "experimental_per_replica_buffer_size.*not -1"),
        ({"prefetch": "two"}, "prefetch.*not 'two'"),
        ({"prefetch": True}, "prefetch.*not True"),
        ({"pin_memory": "yes"}, "pin_memory.*not 'yes'"),
    ],
)
def test_options_that_mean_nothing_here_are_refused(given, message):
    with pytest.raises(UsageError, match=message):
        InputOptions(**given)


def test_tensorflows_defaults_are_accepted():
    InputOptions(
        experimental_fetch_to_device=True,
        experimental_replication_mode=InputReplicationMode.PER_WORKER,
        experimental_per_replica_buffer_size=1,
    )
    with pytest.raises(UsageError, match=r"InputOptions\(\.\.\.\), not 3"):
        controller(torch.arange(3), 2, batch_size=2, options=3)


@pytest.mark.parametrize("options", [torch.rand(1000, 4), 64])
def test_targets_or_a_batch_size_in_the_place_of_options_are_shown_how_they_are_given(options):
    with pytest.raises(UsageError, match=r"distribute_dataset\(\(x, y\), batch_size=64\)") as caught:
        controller(torch.rand(1000, 4), 2, options=options)
    assert len(str(caught.value)) < 200


def test_pinned_memory_is_not_asked_of_the_controller(recwarn):
    loader = DataLoader(Range(4), batch_size=2)
    loader.pin_memory = True
    assert [whole(batch) for batch in controller(loader, 2, options=InputOptions(pin_memory=True))] == [[0, 1], [2, 3]]
    assert not [warning for warning in recwarn if "pin_memory" in str(warning.message)]


# ---- prefetching --------------------------------------------------------------------------------------


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mirror_nb prefetch"]


def test_as_many_batches_as_asked_for_are_kept_ready():
    source = Range(40)
    batches = iter(ControllerDataset.of(DataLoader(source, batch_size=2), 2, InputOptions(prefetch=3)))
    next(batches)
    # The first, and three in store.
    eventually(lambda: len(source.loaded) >= 8, "three batches loaded ahead")
    assert parts(next(batches)) == [[2], [3]]
    eventually(lambda: len(source.loaded) >= 10, "one more")
    assert len(source.loaded) == 10
    batches = None
    assert threads() == []
    source = Range(40)
    batches = iter(
        ReplicaDataset(DataLoader(source, batch_size=2), Replicas(2).input(0), options=InputOptions(prefetch=3))
    )
    next(batches)
    eventually(lambda: len(source.loaded) >= 4, "this replica's share of three batches")


def test_an_error_comes_in_its_place_with_the_line_that_raised_it():
    class Broken(Range):
        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise KeyError("five")
            return index

    batches = iter(controller(DataLoader(Broken(8), batch_size=2), 2, options=InputOptions(prefetch=4)))
    assert [parts(next(batches)) for _ in range(2)] == [[[0], [1]], [[2], [3]]]
    with pytest.raises(KeyError, match="five") as caught:
        next(batches)
    assert any(entry.name == "__getitem__" for entry in caught.traceback)
    assert threads() == []
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("left", ["exhausted", "break", "dropped", "never begun", "error in the loop"])
def test_the_thread_ends_with_the_iterator(left):
    dataset = controller(torch.arange(20), 2, batch_size=2, options=InputOptions(prefetch=2))
    if left == "exhausted":
        assert len(list(dataset)) == 10
    elif left == "break":
        for _ in dataset:
            break
    elif left == "error in the loop":
        with pytest.raises(ZeroDivisionError):
            [1 // 0 for _ in dataset]
        gc.collect()
    elif left == "dropped":
        iterator = iter(dataset)
        next(iterator)
        del iterator
    else:
        iter(dataset)
    assert threads() == []


def test_a_thread_closes_the_iterator_that_it_goes_through():
    ended = []

    def items() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            ended.append(threading.current_thread().name)

    for item in ahead(items(), 2):
        if item == 3:
            break
    assert ended == ["mirror_nb prefetch"]
    assert list(ahead(iter(()), 2)) == []
    assert list(ahead(items(), 1)) == list(range(10))


def test_a_thread_that_loads_ahead_is_at_the_gpu_of_its_caller(monkeypatch):
    at = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(at, "gpu", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(at, "gpu", gpu))
    torch.cuda.set_device(1)
    assert list(ahead((torch.cuda.current_device() for _ in range(4)), 2)) == [1] * 4


# ---- batches from a function --------------------------------------------------------------------------


def function(contexts: list[InputContext], made: Callable[[InputContext], Any]) -> Callable[[InputContext], Any]:
    def dataset_fn(context: InputContext) -> Any:
        contexts.append(context)
        return made(context)

    return dataset_fn


def loader_of_10(context: InputContext) -> DataLoader[Any]:
    return DataLoader(Range(10), batch_size=context.get_per_replica_batch_size(8))


FROM_FUNCTION = {
    1: [[[0, 1, 2, 3, 4, 5, 6, 7]], [[8, 9]]],
    # TensorFlow's.
    2: [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9], []]],
    4: [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [], [], []]],
}
MADE: dict[str, Callable[[InputContext], Any]] = {
    "loader": loader_of_10,
    "shuffled": lambda context: DataLoader(Range(10), batch_size=4, shuffle=True),
    "stream": lambda context: DataLoader(Counting(10), batch_size=context.get_per_replica_batch_size(8)),
    "list": lambda context: list(torch.arange(10).split(context.get_per_replica_batch_size(8))),
    "arrays": lambda context: [batch.numpy() for batch in MADE["list"](context)],
}


@pytest.mark.parametrize("n", FROM_FUNCTION)
@pytest.mark.parametrize("kind", ["loader", "stream", "list", "arrays"])
@pytest.mark.parametrize("options", PREFETCH, ids=["", "prefetch"])
def test_the_batches_of_a_function_are_dealt_out_in_turn(n, kind, options):
    contexts: list[InputContext] = []
    dataset = ControllerFunctionDataset(function(contexts, MADE[kind]), num_replicas=n, options=options)
    assert contexts == [InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=n)]
    for _ in range(2):
        batches = list(dataset)
        assert [parts(batch) for batch in batches] == FROM_FUNCTION[n]
        if n > 1:
            assert [batch.shares for batch in batches] == [tuple(map(len, step)) for step in FROM_FUNCTION[n]]
    assert len(contexts) == 1
    if kind != "stream":
        assert len(dataset) == 2
    spec = TensorSpec((None,), torch.int64)
    assert dataset.element_spec == (spec if n == 1 else PerReplicaSpec(*[spec] * n))


def test_an_empty_share_keeps_the_structure_of_a_batch():
    pairs = TensorDataset(torch.arange(3), torch.zeros(3, 5, dtype=torch.float64))
    dataset = ControllerFunctionDataset(lambda _: DataLoader(pairs, batch_size=3), num_replicas=3)
    ((x, y),) = dataset
    assert x.shares == y.shares == (3, 0, 0)
    assert [part.tolist() for part in x] == [[0, 1, 2], [], []]
    assert [(part.shape, part.dtype) for part in y[1:]] == [((0, 5), torch.float64)] * 2


def test_dicts_and_strings_of_a_function_are_one_per_replica_a_leaf():
    examples = [{"text": word, "x": torch.tensor([float(i)])} for i, word in enumerate("abcde")]
    dataset = ControllerFunctionDataset(lambda _: DataLoader(examples, batch_size=2), num_replicas=2)
    first, second = dataset
    assert first["text"].values == (["a", "b"], ["c", "d"])
    assert second["text"].values == (["e"], [])
    assert [part.shape for part in second["x"]] == [(1, 1), (0, 1)]


@pytest.mark.parametrize("n", [1, 2])
def test_the_batches_of_a_functions_iterable_keep_their_structure(n):
    batches = [(np.ones(2, np.float32), {"m": [np.arange(2)], "name": "a"})] * 2
    dataset = ControllerFunctionDataset(lambda _: batches, num_replicas=n)
    own = ReplicaDataset.from_function(lambda _: batches, Replicas(n).input(0))
    assert dataset.source is own.source is batches
    assert type(dataset.element_spec) is tuple
    for inputs, others in dataset:
        assert [own.tolist() for own in ([inputs] if n == 1 else inputs)] == [[1.0, 1.0]] * n
        assert (list(others), type(others["m"])) == (["m", "name"], list)
    assert [type(batch) for batch in dataset] == [tuple] * (2 // n)


def test_an_iterator_of_a_function_serves_once():
    dataset = ControllerFunctionDataset(lambda _: (torch.full((2,), i) for i in range(3)), num_replicas=2)
    assert dataset.element_spec == PerReplicaSpec(*[TensorSpec((None,), torch.int64)] * 2)
    assert [parts(batch) for batch in dataset] == [[[0, 0], [1, 1]], [[2, 2], []]]
    with pytest.raises(UsageError, match="returned a generator, which can be gone through only once"):
        list(dataset)
    with pytest.raises(UsageError, match="begun already"):
        _ = dataset.element_spec
    with pytest.raises(TypeError):
        len(dataset)
    with pytest.raises(UsageError, match="returned no batch"):
        _ = ControllerFunctionDataset(lambda _: [], num_replicas=2).element_spec


@pytest.mark.parametrize(
    "made", [torch.arange(3), np.arange(3), {"x": 1}, 5, None, "ab", b"ab"], ids=lambda made: type(made).__name__
)
def test_a_function_that_gives_no_batches_is_refused(made):
    with pytest.raises(UsageError, match=f"returned a {type(made).__name__}; it must return a DataLoader"):
        ControllerFunctionDataset(lambda _: made, num_replicas=2)


def test_a_function_that_gives_what_is_dealt_out_already_is_refused():
    cut = controller(torch.arange(8), 2, batch_size=4)
    for made in (cut, iter(cut)):
        with pytest.raises(UsageError, match="is dealt out already: return the DataLoader that it is made of"):
            ControllerFunctionDataset(lambda _, made=made: made, num_replicas=2)


def test_a_function_whose_dataset_is_not_batched_is_refused():
    rows = TensorDataset(torch.ones(4, 3), torch.arange(4))
    dataset = ControllerFunctionDataset(lambda _: DataLoader(rows, batch_size=None), num_replicas=2)
    with pytest.raises(UsageError, match="count the examples"):
        next(iter(dataset))
    with pytest.raises(UsageError, match="must be a function"):
        ControllerFunctionDataset([1], num_replicas=2)  # type: ignore[arg-type]


def test_per_replica_batch_size_divides_or_says_what_would():
    assert InputContext(1, 0, 2).get_per_replica_batch_size(8) == 4
    assert InputContext().get_per_replica_batch_size(7) == 7
    message = "The `global_batch_size` 7 is not divisible by `num_replicas_in_sync` 2 *; 6 would be"
    with pytest.raises(ValueError, match=message):
        InputContext(1, 0, 2).get_per_replica_batch_size(7)
    for size in ("8", 8.0, -4, None, True):
        with pytest.raises(ValueError, match="`global_batch_size` is a number of examples, 0 or more, not "):
            InputContext(1, 0, 2).get_per_replica_batch_size(size)  # type: ignore[arg-type]


# ---- in a replica -------------------------------------------------------------------------------------


class Replicas:
    """n replicas that read input one after the other, with a random stream in common."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.shares: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        self._said: list[bytes] = []

    def input(self, replica_id: int) -> ReplicaInput:
        shared = torch.Generator().manual_seed(9).get_state()
        heard = iter(range(100))

        @contextlib.contextmanager
        def randomness() -> Iterator[None]:
            nonlocal shared
            own = torch.get_rng_state()
            torch.set_rng_state(shared)
            yield
            shared = torch.get_rng_state()
            torch.set_rng_state(own)

        def agree(mine: bytes) -> bytes:
            if replica_id == 0:
                self._said.append(mine)
            return self._said[next(heard)]

        return ReplicaInput(
            replica_id=replica_id,
            num_replicas=self.n,
            device=torch.device("cpu"),
            randomness=randomness,
            agree=agree,
            on_batch=lambda local, total, batch: self.shares[replica_id].append((local, total)),
            on_end=lambda: None,
            loaders=Loaders(),
        )

    def run(self, make: Callable[[ReplicaInput], ReplicaDataset]) -> list[list[Any]]:
        """The steps of one epoch, each with the replicas' batches; the replicas draw random numbers meanwhile."""
        columns = []
        for replica_id in range(self.n):
            torch.manual_seed(100 + replica_id)
            batches = []
            for batch in make(self.input(replica_id)):
                torch.rand(replica_id + 1)
                batches.append(batch)
            columns.append(batches)
        return [list(step) for step in zip(*columns, strict=True)]


def as_lists(steps: list[list[Any]]) -> list[Any]:
    return [[batch.tolist() for batch in step] for step in steps]


@pytest.mark.parametrize("kind", ["loader", "tensor", "stream"])
@pytest.mark.parametrize(("n", "length", "size", "steps"), STEPS)
@pytest.mark.parametrize("options", PREFETCH, ids=["", "prefetch"])
def test_a_replica_gets_its_part_of_what_the_controller_would_cut(kind, n, length, size, steps, options):
    replicas = Replicas(n)
    source, given = source_of(kind, length, size)
    assert as_lists(replicas.run(lambda own: ReplicaDataset(source, own, options, **given))) == steps
    assert replicas.shares[0] == [(len(step[0]), sum(map(len, step))) for step in steps]
    assert threads() == []


@pytest.mark.parametrize("options", PREFETCH, ids=["", "prefetch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_in_a_replica_leaves_the_shuffled_batches_as_they_were(options, workers):
    def loader() -> DataLoader[Any]:
        return DataLoader(Range(22), batch_size=5, shuffle=True, num_workers=workers)

    steps = as_lists(Replicas(2).run(lambda own: ReplicaDataset(loader(), own, options)))
    torch.manual_seed(9)
    assert [[i for part in step for i in part] for step in steps] == [batch.tolist() for batch in loader()]


@pytest.mark.parametrize(("collate", "wanted"), JOINED.items())
def test_of_a_streams_batch_that_cannot_be_cut_a_replica_gets_its_examples_collated(collate, wanted):
    loader = DataLoader(Told(), batch_size=2, collate_fn=collate)
    steps = Replicas(2).run(lambda own: ReplicaDataset(loader, own))
    got = [[{name: value.tolist() for name, value in part.items()} for part in step] for step in steps]
    assert got[:2] == list(map(list, wanted))


@pytest.mark.parametrize("kind", ["loader", "stream", "list", "arrays"])
@pytest.mark.parametrize("n", FROM_FUNCTION)
@pytest.mark.parametrize("options", PREFETCH, ids=["", "prefetch"])
def test_every_replica_takes_its_batches_of_a_function_in_turn(kind, n, options):
    replicas = Replicas(n)
    contexts: list[InputContext] = []
    dataset_fn = function(contexts, MADE[kind])
    steps = replicas.run(lambda own: ReplicaDataset.from_function(dataset_fn, own, options))
    assert as_lists(steps) == FROM_FUNCTION[n]
    assert contexts == [InputContext(1, 0, n)] * n
    for replica_id in range(n):
        examples = [(len(step[replica_id]), sum(map(len, step))) for step in FROM_FUNCTION[n]]
        assert replicas.shares[replica_id] == examples


SINGLES: dict[str, Any] = {
    "numbers": lambda _: list(range(5)),
    "tensors": lambda _: [torch.tensor(i) for i in range(5)],
    "arrays": lambda _: list(np.arange(5)),
    "a generator": lambda _: iter(range(5)),
    "a loader": lambda _: DataLoader(Range(5), batch_size=None),
    "pairs": lambda _: [(torch.tensor(i), -i) for i in range(5)],
    "a table": lambda _: DataLoader(TensorDataset(torch.arange(5)), batch_size=None),
}


@pytest.mark.parametrize("kind", SINGLES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_single_elements_of_a_function_go_one_to_each_replica_and_those_that_are_left_over_to_none(kind, n):
    def first(element: Any) -> Any:
        return element[0] if kind in ("pairs", "a table") else element

    expected = [list(range(i, i + n)) for i in range(0, 6 - n, n)]
    in_replicas = [ReplicaDataset.from_function(SINGLES[kind], Replicas(n).input(i)) for i in range(n)]
    here = ControllerFunctionDataset(SINGLES[kind], num_replicas=n)
    if kind != "a generator":
        assert [len(dataset) for dataset in (here, *in_replicas)] == [len(expected)] * (n + 1)
    steps = Replicas(n).run(lambda own: ReplicaDataset.from_function(SINGLES[kind], own))
    assert [[int(first(element)) for element in step] for step in steps] == expected
    each = [first(step) if n > 1 else [first(step)] for step in here]
    assert [list(map(int, elements)) for elements in each] == expected


def test_batches_with_a_number_beside_keep_their_step_that_is_not_full():
    made = ControllerFunctionDataset(
        lambda _: DataLoader(Range(6), 2, collate_fn=lambda rows: {"x": torch.tensor(rows), "n": torch.tensor(2)}),
        num_replicas=2,
    )
    assert [step["x"][1].tolist() for step in made] == [[2, 3], []]
    assert len(made) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_the_replicas_deal_out_one_shuffled_order(workers):
    def dataset_fn(context: InputContext) -> DataLoader[Any]:
        return DataLoader(Range(10), batch_size=2, shuffle=True, num_workers=workers)

    steps = as_lists(Replicas(2).run(lambda own: ReplicaDataset.from_function(dataset_fn, own)))
    torch.manual_seed(9)
    plain = [batch.tolist() for batch in dataset_fn(InputContext())]
    assert [batch for step in steps for batch in step] == [*plain, []]


def test_random_data_that_a_function_makes_is_equal_on_all_replicas():
    def dataset_fn(context: InputContext) -> DataLoader[Any]:
        return DataLoader(torch.rand(4), batch_size=2)

    steps = Replicas(2).run(lambda own: ReplicaDataset.from_function(dataset_fn, own))
    torch.manual_seed(9)
    assert torch.cat(steps[0]).tolist() == torch.rand(4).tolist()


def test_a_replica_loads_only_the_batches_that_it_takes():
    sources = [Range(9), Range(9)]
    Replicas(2).run(
        lambda own: ReplicaDataset.from_function(lambda _: DataLoader(sources[own.replica_id], batch_size=3), own)
    )
    # For its empty share replica 1 looks at one example, to know what a batch looks like.
    assert [source.loaded for source in sources] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 6]]


def test_length_and_spec_in_a_replica_are_those_of_its_own_batches():
    own = Replicas(2).input(1)
    dataset = ReplicaDataset(DataLoader(Range(10), batch_size=4), own)
    assert (len(dataset), dataset.element_spec) == (3, TensorSpec((None,), torch.int64))
    dataset = ReplicaDataset(torch.arange(10), own, batch_size=4)
    assert (len(dataset), dataset.element_spec) == (3, TensorSpec((None,), torch.int64))
    dealt = ReplicaDataset.from_function(loader_of_10, own)
    assert (len(dealt), dealt.element_spec) == (2, TensorSpec((None,), torch.int64))


def test_next_in_a_function_that_runs_in_the_replica_is_a_value_error():
    iterator = iter(ReplicaDataset(torch.arange(4), Replicas(1).input(0), batch_size=2))
    with in_replica(), pytest.raises(ValueError, match=GOLDEN_NEXT):
        next(iterator)
    assert next(iterator).tolist() == [0, 1]


def test_a_sampler_that_draws_at_every_step_is_not_run_from_a_thread_in_a_replica():
    class Lazy(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for _ in range(12):
                drawing.append(threading.current_thread() is threading.main_thread())
                yield int(torch.randint(100, ()))

        def __len__(self) -> int:
            return 12

    drawing: list[bool] = []

    def loader() -> DataLoader[Any]:
        return DataLoader(Range(100), sampler=Lazy(), batch_size=3)

    steps = as_lists(Replicas(2).run(lambda own: ReplicaDataset(loader(), own, InputOptions(prefetch=2))))
    torch.manual_seed(9)
    assert [[i for part in step for i in part] for step in steps] == [batch.tolist() for batch in loader()]
    assert all(drawing)


# ---- values from a function ---------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "expected"), [(1, [1]), (2, [2, 12]), (3, [3, 13, 23])])
def test_a_value_function_is_told_its_replica(n, expected):
    value = values_from_function(
        lambda context: torch.tensor(context.num_replicas_in_sync + 10 * context.replica_id_in_sync_group), n
    )
    assert isinstance(value, PerReplica)
    assert [int(part) for part in value] == expected


def test_nests_of_values_are_nests_of_per_replica():
    value = values_from_function(lambda context: {"a": (context.replica_id_in_sync_group, 5)}, 2)
    assert value["a"][0].values == (0, 1)
    assert value["a"][1].values == (5, 5)
    assert ValueContext() == ValueContext(0, 1)
    with pytest.raises(UsageError, match=r"returned \[\] for replica 0 but \[1\] for replica 1"):
        values_from_function(lambda context: [1] * context.replica_id_in_sync_group, 2)


def test_values_from_a_function_are_those_of_their_keys_and_sequences_stay_packed():
    packed = pack_sequence([torch.ones(2)])
    value = values_from_function(
        lambda context: [{"a": 1, "b": packed}, {"b": packed, "a": 3}][context.replica_id_in_sync_group], 2
    )
    assert value["a"].values == (1, 3)
    assert value["b"].values == (packed, packed)


# ---- mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "given", "message"),
    [
        (range(10), {}, "cannot distribute a range: pass a DataLoader"),
        (Range(4), {"batch_size": 2}, "cannot distribute a Range: pass a DataLoader"),
        ([1, 2, 3], {"batch_size": 2}, "cannot distribute a list that has int in it"),
        ((i for i in range(3)), {}, "cannot distribute a generator"),
        (torch.arange(4), {}, "need `batch_size`"),
        (torch.arange(4), {"batch_size": 0}, "not 0"),
        (torch.tensor(3.0), {"batch_size": 2}, "no dimension to cut along"),
        ((torch.ones(3), torch.ones(4)), {"batch_size": 2}, r"different numbers of examples: \[3, 4\]"),
        (DataLoader(Range(4), batch_size=2), {"batch_size": 2}, "given together with a DataLoader"),
        (DataLoader(Range(4), batch_size=2), {"drop_last": True}, "given together with a DataLoader"),
        (torch.ones(0, 3), {"batch_size": 2}, "no batch to distribute: 0 examples"),
    ],
)
def test_input_that_cannot_be_distributed_is_refused_with_its_values(source, given, message):
    with pytest.raises(ValueError, match=message) as caught:
        controller(source, 2, **given)
    assert isinstance(caught.value, MirrorError)


def test_a_loader_of_single_examples_is_refused_at_its_first_batch():
    with pytest.raises(UsageError, match="set batch_size on the DataLoader"):
        next(iter(controller(DataLoader(Range(4), batch_size=None), 2)))


def test_a_loader_that_is_already_sharded_is_refused():
    sampler = torch.utils.data.DistributedSampler(Range(8), num_replicas=2, rank=1)
    with pytest.raises(UsageError, match="already sharded"):
        controller(DataLoader(Range(8), batch_size=2, sampler=sampler), 2)


def test_loading_leaves_the_number_of_threads_as_it_was():
    seen = []

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            seen.append(torch.get_num_threads())
            return torch.tensor(float(i))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        batches = list(ControllerDataset(torch.utils.data.DataLoader(Rows(), batch_size=2), num_replicas=2))
        assert (len(batches), set(seen), torch.get_num_threads()) == (2, {1}, 2)
    finally:
        torch.set_num_threads(before)


# ---- what a distributed dataset was made of ------------------------------------------------------------


def distributed(in_a_replica: bool, source: Any, **options: Any) -> Any:
    return (
        ReplicaDataset(source, Replicas(2).input(0), **options) if in_a_replica else controller(source, 2, **options)
    )


@pytest.mark.parametrize("in_a_replica", [False, True])
def test_a_distributed_loader_has_the_attributes_of_the_loader(in_a_replica):
    loader = DataLoader(Range(10), batch_size=4, generator=torch.Generator(), drop_last=True)
    dataset = distributed(in_a_replica, loader)
    assert len(dataset.dataset) == 10
    assert (dataset.batch_size, dataset.num_workers, dataset.drop_last) == (4, 0, True)
    for name in ("dataset", "sampler", "batch_sampler", "collate_fn", "generator"):
        assert getattr(dataset, name) is getattr(loader, name)
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'batchsize'"):
        _ = dataset.batchsize


@pytest.mark.parametrize("in_a_replica", [False, True])
def test_distributed_arrays_have_no_attributes_of_a_loader_and_say_what_to_do(in_a_replica):
    dataset = distributed(in_a_replica, (torch.arange(4), torch.arange(4)), batch_size=2)
    with pytest.raises(AttributeError, match=r"no `dataset`: this dataset was made of a tuple, .* its `source`"):
        _ = dataset.dataset


def test_a_replicas_function_is_told_where_a_datasets_attributes_are():
    dataset = pickle.loads(pickle.dumps(controller(torch.arange(4), 2, batch_size=2)))
    with pytest.raises(AttributeError, match="stays where it was made: ask for its `dataset` there"):
        _ = dataset.dataset


def test_what_was_distributed_is_distributed_once():
    own, source = Replicas(2).input(0), torch.arange(8)
    one = ReplicaDataset.of(source, own, batch_size=4)
    assert ReplicaDataset.of(one, own) is ReplicaDataset.of(one, own, batch_size=4) is one
    assert len(ReplicaDataset.of(one, own, batch_size=2)) == 4
    theirs = ControllerDataset.of(source, 2, batch_size=4)
    assert ControllerDataset.of(theirs, 2) is theirs
    assert len(ControllerDataset.of(theirs, 2, batch_size=2)) == 4
    assert parts(next(iter(ControllerDataset.of(theirs, 4, batch_size=4)))) == [[0], [1], [2], [3]]
    dealt = ReplicaDataset.from_function(loader_of_10, own)
    assert ReplicaDataset.of(dealt, own) is dealt
    with pytest.raises(UsageError, match="made by a function: give it its options where it is made"):
        ReplicaDataset.of(dealt, own, shuffle=True)
    for_all = ControllerFunctionDataset(loader_of_10, num_replicas=2)
    assert ControllerDataset.of(for_all, 2) is for_all
    for asked in ({"num_replicas": 3}, {"num_replicas": 2, "options": InputOptions(prefetch=1)}):
        with pytest.raises(UsageError, match=r"made by a function: .* have each strategy make its own"):
            ControllerDataset.of(for_all, **asked)


def test_arrays_that_were_distributed_are_cut_as_before_with_other_options_or_by_another_strategy():
    own, source, ahead = Replicas(2).input(0), torch.arange(9), InputOptions(prefetch=1)
    one = ReplicaDataset.of(source, own, batch_size=4, drop_last=True)
    assert len(ReplicaDataset.of(one, own, ahead)) == len(ReplicaDataset.of(one, Replicas(2).input(1))) == 2
    theirs = ControllerDataset.of(source, 2, batch_size=4, drop_last=True)
    assert len(ControllerDataset.of(theirs, 2, ahead)) == 2
    assert parts(next(iter(ControllerDataset.of(theirs, 4)))) == [[0], [1], [2], [3]]
    # Who asks for another cut says all of it.
    with pytest.raises(UsageError, match="need `batch_size`"):
        ControllerDataset.of(theirs, 2, shuffle=True)
