"""Values of several replicas become one, results become PerReplica: no replica is needed for that."""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict, deque, namedtuple
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

from mirror_nb.errors import UsageError
from mirror_nb.strategies.reductions import (
    gather_local,
    gather_values,
    in_order,
    local_parts,
    reduce_local,
    reduce_values,
    regroup,
    select,
    structure,
)
from mirror_nb.values import Mirrored, PerReplica, ReduceOp, same

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
Pt = namedtuple("Pt", "x y")


def t(*values, **options):
    return torch.tensor(values[0] if len(values) == 1 else values, **options)


@pytest.mark.parametrize(
    ("op", "values", "axis", "expected"),
    [
        (SUM, [1.0, 4.0], None, t(5.0)),
        (MEAN, [1.0, 4.0], None, t(2.5)),
        (SUM, [1.0, 2.0, 4.0], None, t(7.0)),
        (MEAN, [t([3.0, 5.0]), t([])], (0,), t(4.0)),
        (SUM, [t([3.0, 5.0]), t([])], (0,), t(8.0)),
        (MEAN, [t([1.0]), t([2.0, 3.0, 6.0])], (0,), t(3.0)),
        (MEAN, [torch.ones(2, 3), torch.zeros(4, 3)], (0,), torch.full((3,), 1 / 3)),
        (MEAN, [torch.ones(2, 3), torch.zeros(4, 3)], (0, 1), t(1 / 3)),
        (SUM, [torch.ones(2, 3), torch.ones(4, 3)], (-2,), torch.full((3,), 6.0)),
        (SUM, [torch.ones(2, 3)] * 2, (1, 0), t(12.0)),
        (SUM, [t([1, 2]), t([3, 4])], None, t([4, 6])),
        (MEAN, [1, 4], None, t(2.5)),
        (SUM, [t(True), t(True)], None, t(2)),
        (SUM, [t([True, False]), t([True])], (0,), t(2)),
        (MEAN, [t([True, False]), t([True, True])], (0,), t(0.75)),
        (SUM, [1, 2.5], None, t(3.5)),
        (SUM, [2.5, 1], None, t(3.5)),
        (SUM, [t(1.5), 2], None, t(3.5)),
        (SUM, [1, t(2.0, dtype=torch.float64)], None, t(3.0, dtype=torch.float64)),
        (SUM, [np.float32(1), np.ones(())], None, t(2.0, dtype=torch.float64)),
        (SUM, [t(1, dtype=torch.uint8), t(255, dtype=torch.uint8)], (), t(0, dtype=torch.uint8)),
        (SUM, [t([200, 200], dtype=torch.uint8), t([200], dtype=torch.uint8)], (0,), t(600)),
        (MEAN, [t([200], dtype=torch.uint8), t([100], dtype=torch.uint8)], None, t([150.0])),
        (MEAN, [t([-100], dtype=torch.int8), t([-100], dtype=torch.int8)], None, t([-100.0])),
        (SUM, [t(1 + 2j), t(1j)], None, t(1 + 3j)),
        (SUM, [t(x, dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)], None, t(258.0, dtype=torch.bfloat16)),
        (SUM, [t(x, dtype=torch.float16) for x in (6e4, 6e4, -6e4)], None, t(6e4, dtype=torch.float16)),
        (SUM, [t([1, 2], dtype=torch.uint16), t([3, 4], dtype=torch.uint16)], None, t([4, 6], dtype=torch.uint16)),
        (MEAN, [t([1, 2], dtype=torch.uint16), t([2, 2], dtype=torch.uint16)], None, t([1.5, 2.0])),
        (MEAN, [t([60000.0], dtype=torch.float16)] * 2, None, t([60000.0], dtype=torch.float16)),
        (MEAN, [t([6e4, 4e4], dtype=torch.float16), t([], dtype=torch.float16)], (0,), t(5e4, dtype=torch.float16)),
        (MEAN, [t([1.0, 258.0], dtype=torch.bfloat16)] * 3, None, t([1.0, 258.0], dtype=torch.bfloat16)),
        (SUM, [t([1j, 2]).to(torch.complex32), t([1j]).to(torch.complex32)], (0,), t(2 + 2j).to(torch.complex32)),
    ],
)
def test_values_are_reduced(op, values, axis, expected):
    assert same(reduce_values(op, values, axis), expected)


@settings(deadline=None, database=None)
@given(st.lists(st.lists(st.integers(-1000, 1000), max_size=5), min_size=1, max_size=4))
def test_a_mean_over_the_examples_is_that_of_all_of_them_however_they_are_cut(shares):
    examples = [value for share in shares for value in share]
    mean = reduce_values(MEAN, [torch.tensor(share, dtype=torch.float64) for share in shares], (0,))
    expected = torch.tensor(examples, dtype=torch.float64).mean() if examples else torch.tensor(float("nan"))
    torch.testing.assert_close(mean, expected.to(torch.float64), equal_nan=True)


def test_of_replicas_without_examples_a_mean_leaves_out_what_is_nan_throughout():
    none = float("nan")
    assert reduce_values(MEAN, [t(2.0), t(none)], None, {1}).tolist() == 2
    assert reduce_values(MEAN, [t(none), t(none)], None, {0, 1}).isnan()
    # Nobody knows what it is: one that it has itself computed.
    assert reduce_values(MEAN, [t(1.0, 2.0), t(none, 4.0)], None, {1}).nan_to_num(-1.0).tolist() == [-1, 3]


def test_reducing_changes_no_replicas_value_and_keeps_no_graph():
    values = [torch.ones(2, requires_grad=True), torch.ones(2)]
    assert not reduce_values(SUM, values, None).requires_grad
    assert values[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("values", "axis", "message"),
    [
        ([torch.ones(4), torch.ones(2)], None, r"different shapes: \(4,\) on replica 0, \(2,\) on replica 1"),
        ([torch.ones(4, 2), torch.ones(2, 3)], (0,), r"different shapes: \(4, 2\) on replica 0, \(2, 3\) on rep"),
        ([t(1.0), t(2.0)], (0,), "shape .. over axis 0: a scalar has none"),
        ([torch.ones(2)] * 2, (1,), "over axis 1: it has 1 dimensions"),
        ([torch.ones(2)] * 2, (0, -1), "names a dimension twice"),
        ([torch.ones(2)] * 2, ("0",), "`axis` must be an integer, not '0'"),
        ([torch.ones(2)] * 2, (True,), "`axis` must be an integer, not True"),
        ([torch.ones(2)] * 2, (torch.ones(1000),), r"`axis` must be an integer, not tensor\(.{,30}$"),
        ([t(1.0), t(1)], None, r"different dtypes: float32\[\] on replica 0, int64\[\] on replica 1"),
        (["a", "b"], None, r"cannot reduce a str \('a'\)"),
        ([None, None], None, "cannot reduce a NoneType"),
        ([{"a": 1}] * 2, None, r"cannot reduce a dict \({'a': 1}\) of each replica: .*; give a dict of PerReplica"),
        ([np.array(["a"])] * 2, None, "cannot reduce an array of dtype <U1"),
        ([1, Fraction(1, 2)], None, r"cannot reduce the number Fraction\(1, 2\): .*; make it a tensor or a float"),
        ([1, 2**80], None, "cannot reduce the number 1208925819614629174706176: .*; make it a tensor or a float"),
        ([torch.eye(2).to_sparse()] * 2, None, "make it dense"),
    ],
)
def test_what_cannot_be_reduced_is_named(values, axis, message):
    with pytest.raises(UsageError, match=message):
        reduce_values(SUM, values, axis)


def test_gathering_joins_uneven_shares():
    values = [t([[1, 2]]), t([[3, 4], [5, 6]]), torch.empty(0, 2, dtype=torch.int64)]
    assert gather_values(values, 0).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert gather_values([torch.ones(1, 2), torch.zeros(1, 1)], -1).tolist() == [[1, 1, 0]]
    assert gather_local(t([1.0]), 0, 2).tolist() == [1.0]


@pytest.mark.parametrize(
    ("values", "axis", "message"),
    [
        ([torch.ones(1, 2), torch.ones(1, 3)], 0, r"float32\[1, 2\] on replica 0, float32\[1, 3\] on replica 1"),
        ([torch.ones(1), torch.ones(1, 1)], 0, "cannot gather"),
        ([torch.ones(1), torch.ones(1).long()], 0, "dtypes and all sizes but that of axis 0"),
        ([1.0, 2.0], 0, "a scalar has none"),
    ],
)
def test_what_cannot_be_gathered_is_named(values, axis, message):
    with pytest.raises(UsageError, match=message):
        gather_values(values, axis)


def test_a_single_value_is_reduced_as_tf_does_but_a_number_counts_once_a_replica():
    assert reduce_local(MEAN, t(5.0), None, 2) == 5
    assert reduce_local(SUM, 3, None, 2) == 6
    assert reduce_local(SUM, t(5.0), None, 1) == 5
    assert reduce_local(SUM, PerReplica([1, 2]), None, 2) == 3
    assert reduce_local(MEAN, Mirrored([1.0, 1.0]), None, 2) == 1
    with pytest.raises(ValueError, match=r"A non-DistributedValues value .* cannot be reduced .* ReduceOp\.SUM"):
        reduce_local(SUM, t(5.0), None, 2)
    with pytest.raises(UsageError, match=r"cannot reduce a NoneType \(None\): only tensors, arrays, numbers"):
        reduce_local(SUM, None, None, 2)


def test_results_are_grouped_leaf_by_leaf():
    results = [{"l": [t(i), 1], "t": (t(2 * i),), "n": Pt(t(i), 0), "none": None} for i in range(2)]
    grouped = regroup(results)
    assert same(grouped["l"][0].values, (t(0), t(1)))
    assert grouped["l"][1] == 1
    assert same(grouped["t"][0].values, (t(0), t(2)))
    assert type(grouped["n"]) is Pt
    assert same(grouped["n"].x.values, (t(0), t(1)))
    assert grouped["n"].y == 0
    assert grouped["none"] is None


@pytest.mark.parametrize(
    "value", [None, 1, 1.5, "a", b"a", True, float("nan"), 1j, torch.float32, SUM, int, t(1).shape]
)
def test_an_equal_python_value_stays_one_value(value):
    # From another process it comes as another object.
    assert not isinstance(regroup([value, pickle.loads(pickle.dumps(value))]), PerReplica)


@pytest.mark.parametrize(
    "values",
    [(1, 2), (1, 1.0), (1, True), ("a", None), (t(1), t(1)), (np.ones(1), np.ones(1)), (np.ones(2),) * 2, ({1}, {1})],
)
def test_other_values_become_a_per_replica(values):
    assert isinstance(regroup(values), PerReplica)


def test_one_object_on_all_replicas_stays_that_object_and_one_replica_needs_no_grouping():
    module = torch.nn.Linear(1, 1)
    assert regroup([module, module]) is module
    assert isinstance(regroup([t(1)] * 2), PerReplica)
    assert same(regroup([t(1)]), t(1))


def test_a_size_stays_one():
    # Torch's pytrees make a plain tuple of what they have taken apart.
    small, large = torch.Size([2, 3]), torch.Size([4, 3])
    one, each = regroup([{"one": small, "each": size} for size in (small, large)]).values()
    assert (type(one), one) == (torch.Size, small)
    assert each.values == (small, large)
    assert [type(size) for size in each] == [torch.Size] * 2
    assert type(select({"a": small, "b": PerReplica([1, 2])}, 1)["a"]) is torch.Size
    assert type(local_parts({"a": small, "b": PerReplica([1, 2])}, 2)[1]["a"]) is torch.Size
    ordered = [{"a": small, "b": 1}, {"b": 1, "a": small}]
    assert type(regroup(ordered)["a"]) is torch.Size
    assert in_order({"a": small})[0] == [small]
    assert reduce_values(SUM, [small, large], None).tolist() == [6, 6]


def test_the_order_of_keys_makes_no_difference():
    for kind in (dict, OrderedDict):
        first, second = kind(a=t(0), b=kind(c=1, d=2)), kind(b=kind(d=2, c=1), a=t(1))
        grouped = regroup([first, second])
        assert same(grouped["a"].values, (t(0), t(1)))
        assert grouped["b"] == kind(c=1, d=2)


def test_names_of_as_many_examples_as_each_replica_has_are_a_value_of_each():
    uneven = [{"ids": ["a", "b"], "x": 1, "of": ["q"]}, {"x": 1, "of": ["q"], "ids": ["c"]}]
    joined = regroup(uneven)
    assert joined["ids"].values == (["a", "b"], ["c"])
    assert (joined["x"], joined["of"]) == (1, ["q"])
    assert local_parts(joined, 2) == tuple(uneven)
    assert regroup([(b"a", b"b"), ()]).values == ((b"a", b"b"), ())
    # As many on each: item by item, as any list.
    assert regroup([["a", "b"], ["a", "c"]])[1].values == ("b", "c")


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ([0], [], r"\[\*\] on replica 0, \[\] on replica 1"),
        ({"a": 1}, {"b": 1}, r"{'a': \*} on replica 0, {'b': \*} on replica 1"),
        ((1,), [1], r"\(\*,\) on replica 0, \[\*\]"),
        (Pt(1, 2), (1, 2), r"Pt\(x=\*, y=\*\) on replica 0, \(\*, \*\)"),
        (t(1), [t(1)], r"\* on replica 0, \[\*\]"),
        (deque([1], 2), deque([1], 3), r"deque\(\[\*\], maxlen=2\) on replica 0, deque\(\[\*\], maxlen=3\) on"),
        ({"a": [1, 2]}, {"a": [1]}, r"{'a': \[\*, \*\]} on replica 0"),
        (1, {}, r"\* on replica 0, {} on replica 1"),
        ({}, 1, r"{} on replica 0, \* on replica 1"),
    ],
)
def test_structures_that_differ_are_both_shown(first, second, shown):
    with pytest.raises(UsageError, match=shown):
        regroup([first, second])


def test_selecting_gives_a_replica_its_parts_and_leaves_other_containers_alone():
    mine, counts = [1], defaultdict(int, a=1)
    chosen = select((mine, PerReplica([1, 2]), {"q": [PerReplica([3, 4])]}, counts), 1)
    assert chosen == ([1], 2, {"q": [4]}, counts)
    assert chosen[0] is mine
    assert chosen[3] is counts
    with pytest.raises(UsageError, match="of 2 values has none for replica 2"):
        select(PerReplica([1, 2]), 2)


def test_local_parts_of_a_nest():
    assert local_parts(PerReplica([1, 2]), 2) == (1, 2)
    assert local_parts(3, 2) == (3,)
    assert local_parts({"a": PerReplica([1, 2])}, 2) == ({"a": 1}, {"a": 2})
    assert local_parts([PerReplica([1, 2]), 3], 2) == ([1, 3], [2, 3])
    # As in TensorFlow's strategy_common_test.py, testLocalResultForNestedStructWithoutTensor.
    assert local_parts({"a": 1.0, "b": 2.0}, 2) == ({"a": 1.0, "b": 2.0},) * 2
    assert local_parts([], 3) == ([], [], [])
    assert local_parts(None, 2) == (None,)
    assert local_parts({"a": 1.0}, 2, of_one=True) == ({"a": 1.0},)


@pytest.mark.parametrize(
    "call",
    [
        local_parts,
        lambda value, n: reduce_local(ReduceOp.SUM, value, None, n),
        lambda value, n: gather_local(value, 0, n),
    ],
    ids=["local_parts", "reduce", "gather"],
)
@pytest.mark.parametrize("values", [[1], [1, 2, 3]])
def test_a_value_of_another_number_of_replicas_is_refused(call, values):
    with pytest.raises(UsageError, match=rf"has {len(values)} values, but the strategy has 2 replicas"):
        call(PerReplica(values), 2)


def test_a_structure_in_words():
    assert structure({"a": [t(1), 2], "b": ()}) == "{'a': [*, *], 'b': ()}"
    assert structure({1: t(1), "b": 2}) == structure({"b": 2, 1: t(1)})


class Output:
    """A class of the user's that torch's pytrees know, without names for its members."""

    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


pytree.register_pytree_node(Output, lambda out: ([out.loss, out.logits], None), lambda held, _: Output(*held))


def test_the_leaves_of_a_class_registered_without_names_for_its_members_are_numbered():
    leaves, places, made = in_order({"b": Output(1, {"z": 2, "a": [3]}), "a": None})
    assert leaves == [None, 1, 3, 2]
    assert places == ["['a']", "['b'][0]", "['b'][1]['a'][0]", "['b'][1]['z']"]
    back = made([10 * (leaf or 0) for leaf in leaves])
    assert (back["a"], back["b"].loss, back["b"].logits) == (0, 10, {"z": 20, "a": [30]})


def test_the_structure_of_a_class_that_shows_nothing_but_its_address_is_the_same_on_all_replicas():
    # Replicas compare these words: all_reduce of such an object was an error.
    assert structure(Output(1, {"z": 2, "a": [3]})) == "Output(*, {'a': [*], 'z': *})"
    assert structure({"b": Pt(Output(1, 2), (None,))}) == "{'b': Pt(x=Output(*, *), y=(*,))}"


class Positive(namedtuple("Positive", "value")):
    """A class of the user's that checks what it is made of."""

    def __new__(cls, value):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"a tensor is needed, not {value!r}")
        return super().__new__(cls, value)


def test_structures_of_classes_that_check_their_members_and_of_packed_sequences_are_named():
    packed = pack_sequence([torch.ones(2)])
    assert structure([packed, Positive(t(1))]) == "[*, Positive(*)]"
    assert in_order([packed, 3])[0] == [packed, 3]
    with pytest.raises(UsageError, match=r"structure: \[\*\] on replica 0, \[\] on replica 1"):
        regroup([[packed], []])


@pytest.mark.parametrize(
    "nest",
    [[1, (2, {"b": 3, "a": 4})], Pt(1, [2]), OrderedDict(b=1, a=()), {}, 5, PerReplica([1]), defaultdict(int, x=1)],
)
def test_other_leaves_are_where_torch_says_that_they_are(nest):
    found = pytree.tree_flatten_with_path(nest)[0]
    leaves, places, made = in_order(nest)
    assert sorted(zip(places, map(repr, leaves), strict=True)) == sorted(
        (pytree.keystr(path) or "*", repr(leaf)) for path, leaf in found
    )
    assert made(leaves) == nest


def test_every_structure_that_differs_is_named():
    with pytest.raises(
        UsageError, match=r"structure: \[\*\] on replica 0, \[\] on replica 1, \(\*,\) on replica 3; the"
    ):
        regroup([[1], [], [2], (3,)])


def test_of_long_structures_what_differs_is_shown():
    layers = {f"layer{i}.weight": 1 for i in range(100)}
    with pytest.raises(UsageError, match="structure") as error:
        regroup([layers, {**layers, "layer50.bias": 1}])
    assert "'layer50.bias': *, 'layer50.weight': *" in str(error.value)
    assert len(str(error.value)) < 400
    with pytest.raises(UsageError, match=r"differ in structure: \[(\*, ){99}\*\] on replica 0, \["):
        regroup([[1] * 100, [1] * 101])
    # That one begins as the other ends.
    with pytest.raises(UsageError, match=r"differ in structure: …(\*, )+\*\] on replica 0, …(\*, )+\*\] on replica 1"):
        regroup([[1] * 200, [1] * 201])
    with pytest.raises(UsageError, match="structure") as error:
        regroup([[1] * 1000, (2,) * 1000])
    assert len(str(error.value)) < 1000
