"""Values from several replicas, and stand-ins for values that stayed there."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from mirror_nb import DistributedValues, PerReplica, ReduceOp, Remote, ReplicaError, UsageError, VariableAggregation
from mirror_nb.values import merged, same


def test_rows_of_tensors_stand_below_each_other():
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert repr(PerReplica([matrix, 5])).splitlines() == [
        "PerReplica:{",
        "  0: tensor([[1., 2.],",
        "             [3., 4.]]),",
        "  1: 5",
        "}",
    ]


def test_a_per_replica_value_prints_as_tensorflow_prints_it():
    assert repr(PerReplica([1, "a"])) == "PerReplica:{\n  0: 1,\n  1: 'a'\n}"


def test_the_single_values_are_there_by_id_by_iteration_and_as_a_tuple():
    value = PerReplica([10, 20, 30])
    assert (value[1], list(value), value.values, len(value)) == (20, [10, 20, 30], (10, 20, 30), 3)
    assert isinstance(value, DistributedValues)
    with pytest.raises(IndexError):
        value[3]


def test_a_per_replica_value_can_be_pickled_and_copied():
    value = PerReplica([torch.ones(2), 3])
    again = pickle.loads(pickle.dumps(value))
    assert type(again) is PerReplica
    assert same(again[0], torch.ones(2))
    assert copy.deepcopy(value)[1] == 3


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_batch_weighs_as_the_batch_does(copied):
    batch = PerReplica([torch.ones(2), torch.ones(1)], shares=(2, 1))
    again = copied(batch)
    assert again.shares == copied({"x": batch})["x"].shares == (2, 1)
    assert (again[0] is batch[0]) is (copied is copy.copy)


def test_a_checkpoint_with_a_per_replica_value_is_read_as_it_stands():
    file = io.BytesIO()
    torch.save({"losses": PerReplica([torch.ones(2), 3])}, file)
    file.seek(0)
    losses = torch.load(file)["losses"]
    assert [losses.values[0].tolist(), losses.values[1]] == [[1, 1], 3]


NAN = float("nan")
EQUAL = [
    (1, 1),
    (NAN, NAN),
    (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])),
    (np.array([1.0, np.nan]), np.array([1.0, np.nan])),
    (np.array(["a"]), np.array(["a"])),
    ({"a": [1, (2, torch.ones(2))]}, {"a": [1, (2, torch.ones(2))]}),
    ([], []),
    (None, None),
    ({1, 2}, {2, 1}),
    (torch.empty(0), torch.empty(0)),
    (torch.tensor([complex(NAN, 1), 2]), torch.tensor([complex(NAN, 1), 2])),
    (torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn), torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn)),
    (torch.tensor([complex(NAN, 1), 2]).to(torch.complex32), torch.tensor([complex(NAN, 1), 2]).to(torch.complex32)),
    (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
    (torch.empty(2, device="meta"), torch.empty(2, device="meta")),
    (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[0, 1])),
    (torch.tensor([True]), torch.tensor([True])),
]
DIFFERENT = [
    (1, 2),
    (1, 1.0),
    (True, 1),
    (torch.ones(2), torch.ones(3)),
    (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    (torch.ones(2), np.ones(2, dtype=np.float32)),
    (np.ones(2), np.ones(2, dtype=np.float32)),
    ([1], (1,)),
    ([1], [1, 1]),
    ({"a": 1}, {"b": 1}),
    (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0])),
    (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
    (torch.eye(2).to_sparse(), torch.eye(2)),
    (torch.empty(2, device="meta"), torch.empty(3, device="meta")),
    (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[0, 0])),
    (np.array([np.ones(2), np.ones(3)], dtype=object), np.array([np.ones(2), np.zeros(3)], dtype=object)),
]


@pytest.mark.parametrize(("first", "second"), EQUAL, ids=lambda value: type(value).__name__)
def test_equal_values_are_one_value(first, second):
    assert same(first, second)
    assert same(first, first)
    assert merged([first, second]) is first


@pytest.mark.parametrize(("first", "second"), DIFFERENT, ids=lambda value: type(value).__name__)
def test_values_that_differ_are_kept_for_each_replica(first, second):
    assert not same(first, second)
    assert merged([first, second]).values == (first, second)


class Plain:
    def __init__(self, **held: object) -> None:
        self.__dict__.update(held)


@dataclasses.dataclass
class Record:
    held: object


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


@pytest.mark.parametrize(
    "make", [lambda held: Plain(held=held), Record, Slots, lambda held: SimpleNamespace(held=held)]
)
def test_objects_that_hold_the_same_are_one_value(make):
    def nested(number: float) -> object:
        return [make({"a": torch.tensor([number]), "b": make("x")})]

    assert same(nested(1), nested(1))
    assert not same(nested(1), nested(2))
    assert not same(make(1), Plain(other=1))


def test_functions_of_one_code_that_keep_the_same_are_one_value():
    def made(kept: object, default: object = 1) -> Callable[..., object]:
        def function(x: object = default) -> object:
            return x, kept

        return function

    assert same({"f": made([1])}, {"f": made([1])})
    assert not same(made([1]), made([2]))
    assert not same(made([1]), made([1], 2))
    assert not same(made([1]), lambda x=1: x)
    assert not same(lambda x: x + 1, lambda x: x - 1)


def test_objects_are_not_taken_for_equal_that_hold_themselves_or_more_than_can_be_seen():
    one, other = Plain(), Plain()
    one.me, other.me = one, other
    assert not same(one, other)
    for make in (threading.Lock, lambda: iter([1]), lambda: random.Random(0)):
        assert not same(Plain(held=make()), Plain(held=make()))


def test_values_whose_equality_gives_no_truth_value_are_not_taken_for_equal():
    frame = pd.DataFrame({"a": [1, 2]})
    assert isinstance(merged([frame, frame.copy()]), PerReplica)


def test_one_replica_alone_gives_its_value():
    assert merged([5]) == 5


MISTAKES: dict[str, tuple[list[Any], Callable[[Any], object], type[Exception], str]] = {
    "a dict": ([{"a": 1}, {"a": 2}], lambda value: value["a"], UsageError, r"\(here dict\).*value\[0\]\['a'\]"),
    "an item that is set": (
        [[1], {}],
        lambda value: value.__setitem__("a", 1),
        UsageError,
        r"value\[0\], or in the r",
    ),
    "a dict that is set": ([{0: 1}, {}], lambda value: value.__setitem__(0, {}), UsageError, "in the replicas"),
    "an item that goes": ([[1], [2]], lambda value: value.__delitem__(0), UsageError, "delete items in one of them"),
    "a key": ([{"a": 1}, {"a": 2}], lambda value: "a" in value, UsageError, r"here dict.*: .*'a' in value\[0\]"),
    "tensors": ([torch.ones(1), 2.0], lambda value: value.item(), AttributeError, r"here Tensor or float.*\[0\].item"),
    "a text": ([1.0, 2.0], lambda value: f"{value:.2f}", UsageError, r'each of 2 replicas.*reduce\("mean", value\)'),
}


@pytest.mark.parametrize(("values", "use", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_value_of_each_replica_that_is_taken_for_one_value_says_what_it_is(values, use, kind, message):
    with pytest.raises(kind, match=message):
        use(PerReplica(values))


def test_an_item_of_dicts_that_differ_is_set_and_deleted_in_each_of_them():
    value = PerReplica([{"a": 1}, {"b": 2}])
    value["c"] = 3
    assert value.values == ({"a": 1, "c": 3}, {"b": 2, "c": 3})
    del value["c"]
    assert value.values == ({"a": 1}, {"b": 2})
    del value["b"]
    with pytest.raises(KeyError, match="b"):
        del value["b"]


def test_what_asks_a_value_of_each_replica_for_protocols_finds_none():
    value = PerReplica([1, 2])
    assert not hasattr(value, "shape")
    assert not hasattr(value, "_repr_html_")
    assert f"{value}" == str(value)
    assert (value[np.int64(1)], value[-1], value[:1]) == (2, 2, (1,))
    assert copy.copy(value).values == pickle.loads(pickle.dumps(value)).values == (1, 2)


def remote(fetched: list[str], why: str = "it is larger than 1 MiB", **settings: bool) -> Remote:
    return Remote(
        "big",
        "Tensor",
        "Tensor (9,)",
        why,
        lambda name, replica_id: fetched.append(name) or "value",
        **settings,
    )


def test_a_stand_in_says_what_and_where_it_is_and_how_to_get_it():
    text = repr(remote([]))
    assert text == "<big: Tensor (9,), in the replicas (it is larger than 1 MiB); .fetch() brings replica 0's>"
    assert "&lt;big" in remote([])._repr_html_()


def test_a_stand_in_brings_its_value_on_request():
    fetched: list[str] = []
    assert remote(fetched).fetch() == "value"
    assert fetched == ["big"]


def test_using_a_stand_in_as_the_value_says_what_to_do():
    with pytest.raises(AttributeError, match=r"`big` \(Tensor\) is in the replicas.*bring it: big = big\.fetch\(\)"):
        _ = remote([]).shape
    assert not hasattr(remote([]), "_repr_png_")
    assert not hasattr(remote([]), "__fspath__")


def test_a_stand_in_for_what_cannot_be_brought_does_not_tell_to_bring_it():
    there = remote([], "its batches are loaded there", for_good=True)
    with pytest.raises(UsageError, match=r"use it in a %%mirrored cell: its batches are loaded there$"):
        len(there)
    assert repr(there).endswith("(its batches are loaded there); use it in %%mirrored cells>")


USES: list[Callable[[Any], Any]] = [
    *(lambda x: x[0], len, lambda x: x + 1, lambda x: 1 - x, list, float, bool, lambda x: x(1), lambda x: 1 in x),
    *(np.asarray, torch.as_tensor, torch.relu, nn.Linear(1, 1), lambda x: torch.ones(1) * x, lambda x: x < 1),
    *(lambda x: x == 1, lambda x: x != 1.0, lambda x: x == np.ones(1), "{:.2f}".format),
]


@pytest.mark.parametrize("use", USES)
def test_whatever_is_done_with_a_stand_in_says_what_to_do(use):
    with pytest.raises(UsageError, match=r"`big` \(Tensor\) is in the replicas.*big\.fetch\(\)"):
        use(remote([]))


def test_what_is_no_number_a_stand_in_is_not_and_no_attribute_of_its_value_is_set_on_it():
    one, other = remote([]), remote([])
    assert (one == one, one == other, one == None, one in [None, "big", one]) == (True, False, False, True)  # noqa: E711
    assert f"{one}" == repr(one)
    with pytest.raises(AttributeError, match=r"`big` \(Tensor\) is in the replicas"):
        one.requires_grad = False


def test_a_stand_in_cannot_be_saved_by_mistake():
    with pytest.raises(ReplicaError, match=r"`big` stays in the replicas.*\.fetch\(\)"):
        pickle.dumps(remote([]))


def test_an_attribute_of_a_per_replica_value_cannot_be_set_where_it_would_change_nothing():
    value = PerReplica([1, 2])
    with pytest.raises(AttributeError, match="set it in the replicas"):
        value.rate = 3
    value.shares = (1, 2)
    assert value.shares == (1, 2)


@pytest.mark.parametrize("use", [round, range, lambda value: round(value, 4), lambda value: [1, 2][value]])
def test_a_per_replica_is_no_number(use):
    with pytest.raises(TypeError, match="It looks like you are using a PerReplica object"):
        use(PerReplica([1, 2]))


@pytest.mark.parametrize(
    "use",
    [
        lambda value: value == 0.0,
        lambda value: value != np.float32(1),
        lambda value: value == PerReplica([1, 2]),
        lambda value: value == torch.ones(2),
        lambda value: ~value,
        lambda value: value & 1,
        lambda value: 1 << value,
        lambda value: divmod(value, 2),
    ],
)
def test_a_per_replica_is_compared_and_reckoned_with_in_replicas_only(use):
    with pytest.raises(UsageError, match="It looks like you are using a PerReplica object"):
        use(PerReplica([1, 2]))


def test_a_per_replica_is_a_key_and_is_found_where_it_is():
    value = PerReplica([1, 2])
    assert {value: 1}[value] == 1
    assert value in [None, value]
    assert (2 in value, 3 in value) == (True, False)
    assert (value == None, value == "two", value != value) == (False, False, False)  # noqa: E711


def test_a_replica_that_is_not_there_has_no_value():
    with pytest.raises(IndexError, match=r"a value \(here int\) from each of 2 replicas: none at 9"):
        PerReplica([1, 2])[9]


def test_a_reduction_is_known_by_the_names_that_others_give_it():
    assert ReduceOp.of(torch.distributed.ReduceOp.SUM) is ReduceOp.SUM
    assert ReduceOp.of(SimpleNamespace(name="MEAN")) is ReduceOp.MEAN
    for other in (torch.distributed.ReduceOp.AVG, "max", None):
        with pytest.raises(UsageError, match=r"`op` is .*; it must be ReduceOp\.SUM or ReduceOp\.MEAN"):
            ReduceOp.of(other)


def test_a_variables_aggregation_is_a_reduction_where_it_sums_or_averages():
    convert = ReduceOp.from_variable_aggregation
    assert convert(VariableAggregation.SUM) is ReduceOp.SUM
    assert convert(VariableAggregation.MEAN) is ReduceOp.MEAN
    for other in (VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA):
        with pytest.raises(ValueError, match=f"could not convert .*{other.name}.* to a ReduceOp"):
            convert(other)
