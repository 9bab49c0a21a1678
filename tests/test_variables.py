"""Variables: plain ones, what a home is asked, and TensorFlow's rules on replicas."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from driving import run_cell
from torch import nn

import mirror_nb as mnb
from mirror_nb import aggregation, variables
from mirror_nb.errors import UsageError
from mirror_nb.values import VariableAggregation, VariableSynchronization
from mirror_nb.variables import MirroredVariable, PlainVariable, SyncOnReadVariable, Variable, distributed

# --------------------------------------------------------------------------- a Variable as such


def test_outside_every_scope_it_is_a_plain_one():
    variable = Variable(1.0)
    assert type(variable) is PlainVariable
    assert isinstance(variable, Variable)
    assert repr(variable) == "Variable(tensor(1.))"
    assert (variable.trainable, variable.aggregation.name, variable.synchronization.name) == (True, "NONE", "AUTO")
    assert variable.name == "Variable"
    assert variable.values == (torch.tensor(1.0),)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1, None, torch.tensor(1)),
        ([1.0, 2.0], torch.float64, torch.tensor([1.0, 2.0], dtype=torch.float64)),
        (np.ones(2, np.float32), None, torch.ones(2)),
        (lambda: torch.ones(2), None, torch.ones(2)),
        (True, None, torch.tensor(True)),
    ],
)
def test_it_is_made_of_anything_that_holds_numbers(value, dtype, expected):
    made = Variable(value, dtype=dtype).read_value()
    assert type(made) is torch.Tensor
    assert torch.equal(made, expected)
    assert made.dtype is expected.dtype


def test_it_shares_no_memory_with_its_initial_value():
    array, tensor = np.ones(2), torch.ones(2)
    for value in (array, tensor):
        Variable(value).assign_add([1.0, 1.0])
    assert array.tolist() == tensor.tolist() == [1, 1]


def test_assigning_returns_the_variable_and_reading_a_copy():
    variable = Variable([1.0, 2.0])
    assert variable.assign([3.0, 4.0]).assign_add([1.0, 1.0]).assign_sub(torch.tensor([0.0, 2.0])) is variable
    read = variable.read_value()
    variable.assign([0.0, 0.0])
    assert read.tolist() == [4, 3]
    assert variable.numpy().tolist() == [0, 0]


def test_an_option_that_is_none_is_left_out_as_in_tensorflow():
    variable = Variable(1.0, trainable=None, aggregation=None, synchronization=None, dtype=None, name=None)
    assert (variable.trainable, variable.aggregation.name, variable.synchronization.name) == (True, "NONE", "AUTO")


def test_whether_it_is_trained_may_be_said_without_the_name_as_in_tensorflow():
    assert [Variable(1.0, trainable).trainable for trainable in (None, True, False)] == [True, True, False]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("float32", "`dtype` is 'float32'; write torch.float32, or leave it out"),
        (np.int64, "write torch.int64"),
        (np.dtype("int16"), "write torch.int16"),
        ("numbers", "`dtype` is 'numbers'; give one of torch's"),
    ],
)
def test_a_dtype_that_is_not_of_torch_is_told_its_name_there(dtype, message):
    with pytest.raises(UsageError, match=message):
        Variable(1, dtype=dtype)
    assert Variable(1, dtype=float).dtype is torch.float64


@pytest.mark.parametrize(
    ("assign", "message"),
    [
        (lambda v: v.assign([1.0, 2.0]), r"shape \(2,\) to step of shape \(\)"),
        (lambda v: v.assign_add(2.5), "value of torch.float32 to step of torch.int64"),
        (lambda v: v.assign("a"), "cannot assign 'a' to step"),
        (lambda v: v.assign(2**64), "cannot assign 18446744073709551616 to step"),
    ],
)
def test_what_cannot_be_assigned_is_refused_and_changes_nothing(assign, message):
    variable = Variable(7, name="step")
    with pytest.raises(UsageError, match=message):
        assign(variable)
    assert variable == 7


@pytest.mark.parametrize("flag", [True, np.True_])
@pytest.mark.parametrize("how", ["assign", "assign_add"])
def test_a_flag_counts_one_whosever_it_is(flag, how):
    variable, pair = Variable(0), Variable([0, 0])
    assert getattr(variable, how)(flag) == 1
    assert getattr(pair, how)([flag, flag]).tolist() == [1, 1]


def test_a_whole_number_that_is_too_large_is_refused_and_one_below_zero_counts_down():
    variable = Variable(7, dtype=torch.uint8, name="level")
    with pytest.raises(UsageError, match=r"cannot assign 300 to level of torch.uint8: .*overflow"):
        variable.assign(300)
    assert variable.assign_add(-2) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "MAX"}, "`aggregation` is 'MAX'; it must be one of NONE, SUM, MEAN"),
        ({"synchronization": 3}, "`synchronization` is 3"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        Variable(1.0, **options)
    with pytest.raises(UsageError, match="a Variable holds numbers, not 'a'"):
        Variable("a")
    with pytest.raises(UsageError, match="call Variable"):
        MirroredVariable(1.0)


@pytest.mark.parametrize("call", [Variable, lambda value: Variable(0.0).assign(value)])
def test_of_a_long_value_that_holds_no_numbers_the_beginning_is_told(call):
    with pytest.raises(UsageError) as told:
        call(["word"] * 10_000)
    assert len(str(told.value)) < 400


def test_operations_give_plain_tensors_and_lead_gradients_back():
    variable = Variable(3.0)
    loss = torch.nn.functional.mse_loss(variable * 2, torch.tensor(0.0))
    assert type(loss) is torch.Tensor
    loss.backward()
    assert variable.grad == 24
    assert variable.is_leaf
    assert float(variable) == 3
    assert f"{variable:.2f}" == "3.00"
    assert np.asarray(variable) == 3
    assert torch.stack([variable, variable]).tolist() == [3, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert int(variable) == 3


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_optimizers_train_it_as_a_parameter(optimizer):
    variable, parameter = Variable([1.0, 2.0]), nn.Parameter(torch.tensor([1.0, 2.0]))
    for value in (variable, parameter):
        (value**2).sum().backward()
        optimizer([value], lr=0.1).step()
    assert torch.equal(variable.read_value(), parameter.detach())
    assert type(variable) is PlainVariable


def test_integers_and_what_is_not_trainable_require_no_gradient():
    assert not Variable(1).requires_grad
    assert not Variable(1.0, trainable=False).requires_grad
    assert not Variable(1.0, synchronization="ON_READ").trainable


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = Variable(2.0)
        self.register_buffer("seen", Variable(0.0, trainable=False))

    def forward(self, x):
        self.seen.assign_add(float(len(x)))
        return x * self.scale


def test_a_module_has_a_trainable_one_among_its_parameters():
    module = Scaled()
    module(torch.ones(3)).sum().backward()
    assert dict(module.named_parameters())["scale"].grad == 3
    assert {name: type(value) for name, value in module.state_dict().items()} == dict.fromkeys(
        ("scale", "seen"), torch.Tensor
    )
    other = Scaled()
    other.load_state_dict(module.state_dict())
    assert other.seen == 3
    assert type(other.double().scale) is PlainVariable


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_variables_of_their_own(copied):
    module = Scaled()
    twin = copied(module)
    twin.scale.assign(9.0)
    assert (module.scale, twin.scale) == (2, 9)
    assert [type(parameter) for parameter in twin.parameters()] == [PlainVariable]
    assert twin.scale.requires_grad
    assert not twin.seen.trainable


# --------------------------------------------------------------------------- what a home is asked


class Home:
    """Two components; the other one is 1 larger."""

    def __init__(self):
        self.asked = []

    def components(self, variable):
        own = variables.component(variable)
        return {0: own, 1: own + 1}

    def assign(self, variable, how, value):
        self.asked.append((how, value))
        return "assigned"

    def read(self, variable):
        self.asked.append("read")
        return aggregation.aggregate(variable, list(self.components(variable).values()))

    def refresh(self, variable):
        self.asked.append("refresh")

    def draft(self, variable):
        return None

    def wrote(self, variable):
        self.asked.append("wrote")

    def saved(self, variable):
        return torch.tensor(42.0), True


def made(home, aggregation="SUM", synchronization="AUTO", value=1.0):
    return distributed(
        torch.tensor(value),
        home,
        trainable=False,
        aggregation=VariableAggregation[aggregation],
        synchronization=VariableSynchronization[synchronization],
        name=None,
    )


def test_the_repr_has_tensorflows_layout():
    assert repr(made(Home())) == "MirroredVariable:{\n  0: tensor(1.),\n  1: tensor(2.)\n}"
    assert (
        repr(made(Home(), synchronization="ON_READ")) == "SyncOnReadVariable:{\n  0: tensor(1.),\n  1: tensor(2.)\n}"
    )


def test_a_mirrored_one_is_refreshed_before_its_value_is_used_but_not_for_its_shape():
    home = Home()
    variable = made(home)
    assert (variable.shape, variable.dtype, variable.dim(), variable.requires_grad) == ((), torch.float32, 0, False)
    assert home.asked == []
    assert variable + 1 == 2
    assert home.asked == ["refresh"]


def test_operations_in_place_and_pickling_tell_the_home():
    home = Home()
    variable = made(home)
    variable.mul_(3)
    variable += 1
    assert home.asked.count("wrote") == 2
    assert variable.assign(5.0) == "assigned"
    assert home.asked[-1] == ("assign", 5.0)
    assert pickle.loads(pickle.dumps(variable)) == 42


def test_one_that_is_synchronised_on_read_is_read_by_its_home():
    home = Home()
    variable = made(home, synchronization="ON_READ")
    assert type(variable) is SyncOnReadVariable
    assert variable * 1 == 3
    assert torch.stack([variable, variable]).tolist() == [3, 3]
    assert variable.read_value() == 3
    assert [value.item() for value in variable.values] == [1, 2]
    # What load_state_dict does.
    variable.copy_(torch.tensor(6.0))
    assert home.asked[-1] == ("assign", torch.tensor(6.0))


@pytest.mark.parametrize(("rule", "expected"), [("SUM", 3), ("MEAN", 1.5), ("ONLY_FIRST_REPLICA", 1)])
def test_components_are_aggregated(rule, expected):
    variable = made(Home(), rule, "ON_READ")
    assert aggregation.aggregate(variable, [torch.tensor(1.0), torch.tensor(2.0)]) == expected


def test_assigning_to_a_sum_from_outside():
    variable = made(Home(), "SUM", "ON_READ")
    assert aggregation.from_outside(variable, "assign", 6.0, 2, 1) == 3
    whole = variables.distributed(torch.tensor(0), Home(), **variable._options())
    assert [int(aggregation.from_outside(whole, "assign", -7, 3, i)) for i in range(3)] == [-1, -3, -3]
    with pytest.raises(ValueError, match=r"does not support `assign_add` in cross-replica context .* set to `.*SUM`"):
        aggregation.from_outside(variable, "assign_add", 6.0, 2, 0)
    assert aggregation.from_outside(made(Home(), "MEAN", "ON_READ"), "assign_add", 6.0, 2, 0) == 6


def test_what_the_controller_calls_on_replicas_pickles_by_reference():
    for function in (variables.apply_assign, variables.read_components, variables.rebuild):
        assert pickle.loads(pickle.dumps(function)) is function


def test_saving_goes_through_torch():
    file = io.BytesIO()
    torch.save({"v": Variable([1.0, 2.0], aggregation="MEAN", trainable=False)}, file)
    for weights_only in (True, False):
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)["v"]
        assert (loaded.tolist(), loaded.aggregation, loaded.trainable) == ([1, 2], VariableAggregation.MEAN, False)


# --------------------------------------------------------------------------- on replicas

IMPORTS = """
import copy, pickle, torch, warnings
from mirror_nb.strategies.context import get_replica_context
from mirror_nb.values import VariableAggregation, VariableSynchronization
from mirror_nb.variables import Variable

mine = torch.tensor(replica_id + 1.0)

def values(nest):
    return torch.utils._pytree.tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, nest)

def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
"""


def cell(pool, source):
    """Run a cell and return the value of its last line on each replica."""
    ran = run_cell(pool, IMPORTS + source)
    assert not ran.errors, ran.report.failures
    return [ran.results[replica_id] for replica_id in range(pool.size)]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("how", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_assigning_in_run_aggregates(replicas, n, how, aggregation):
    # Golden: mirrored/replica/assign_add/*.
    values = [i + 1.0 for i in range(n)]
    arriving = {
        "NONE": values,
        "SUM": [sum(values)] * n,
        "MEAN": [sum(values) / n] * n,
        "ONLY_FIRST_REPLICA": [1.0] * n,
    }[aggregation]
    expected = [{"assign": x, "assign_add": 10 + x, "assign_sub": 10 - x}[how] for x in arriving]
    source = f"""
v = Variable(10.0, aggregation=VariableAggregation.{aggregation})
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    returned = strategy.run(lambda: v.{how}(mine))
(type(returned).__name__, returned.item(), v.read_value().item(), strategy.run(v.read_value).item())
"""
    assert cell(replicas(n), source) == [("Tensor", x, x, x) for x in expected]


def test_a_literal_cannot_be_summed_in_run_but_numbers_that_differ_can(replicas):
    source = """
v = Variable(10.0, aggregation="SUM")
error = raised(lambda: strategy.run(lambda: v.assign_add(5.0)))
zero = strategy.run(lambda: v.assign_add(0.0)).item()
mean = Variable(10.0, aggregation="MEAN")
turned = Variable(1 + 2j, aggregation="SUM")
same = raised(lambda: strategy.run(lambda: turned.assign_add(1j)))
differing = strategy.run(lambda: turned.assign_add(1j * mine)).item()
(error, zero, strategy.run(lambda: v.assign_add(replica_id + 1)).item(), strategy.run(lambda: mean.assign(4)).item(),
 *(strategy.run(lambda: v.assign_add(x)).item() for x in (2 * replica_id, 1 - 2 * replica_id)), same, differing)
"""
    for error, *numbers, same, differing in cell(replicas(2), source):
        assert error[0] == "UsageError"
        assert error[1].startswith("A non-DistributedValues value 5.0 cannot be reduced with the given reduce op Red")
        assert "torch.tensor(5.0)" in error[1]
        assert numbers == [10, 13, 4, 15, 15]
        assert same[1].startswith("A non-DistributedValues value 1j cannot be reduced")
        assert differing == 1 + 5j


def test_a_mean_of_whole_numbers_is_assigned_where_it_is_whole(replicas):
    source = """
count, flag = Variable(0, aggregation="MEAN"), Variable(False, aggregation="MEAN")
same = strategy.run(lambda: count.assign_add(1)).item()
flags = strategy.run(lambda: flag.assign(torch.tensor(True))).item()
large = strategy.run(lambda: count.assign(torch.tensor(2**53 + 1))).item()
apart = raised(lambda: strategy.run(lambda: count.assign(torch.tensor(replica_id))))
mixed = raised(lambda: strategy.run(lambda: flag.assign(torch.tensor(replica_id == 0))))
(same, flags, large, apart, mixed, count.read_value().item())
"""
    for same, flags, large, apart, mixed, count in cell(replicas(2), source):
        assert (same, flags, large, count) == (1, True, 2**53 + 1, 2**53 + 1)
        assert apart[0] == mixed[0] == "UsageError"
        assert apart[1].startswith(
            "cannot assign 0.5, the mean of the replicas' values, to Variable of torch.int64: it is not whole"
        )


def test_what_is_synchronised_on_read_takes_a_copy_and_its_own_state_as_any_tensor_does(replicas):
    source = """
module = torch.nn.Module()
module.register_buffer("counts", Variable([0, 0], synchronization="ON_READ", aggregation="MEAN"))
strategy.run(lambda: module.counts.assign([2 * replica_id] * 2))
state = module.state_dict()
module.load_state_dict(state)
restored = module.counts.read_value()
module.counts.copy_(torch.tensor(3.7))
values((state["counts"], restored, module.counts.values[0]))
"""
    for state, restored, copied in cell(replicas(2), source):
        assert (state, restored, copied) == ([1.0, 1.0], [1.0, 1.0], [3, 3])


def test_a_variable_that_is_trained_after_its_copies_diverged_is_named_once_at_the_users_line(replicas):
    source = """
v = Variable(1.0, name="scale")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    strategy.run(lambda: v.assign(mine))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    strategy.run(lambda: (v * 2).backward())
# Networks of other tests, which these replicas still have, may differ too.
said = [warning for warning in caught if "the Variable" in str(warning.message)]
(v.read_value().item(), [(str(warning.message), "mirror_nb" in warning.filename) for warning in said])
"""
    (first, ((message, ours),)), (second, unsaid) = cell(replicas(2), source)
    assert (first, second, unsaid, ours) == (1.0, 1.0, [], False)
    assert "different values to the Variable 'scale', made with VariableAggregation.NONE" in message
    assert "order" not in message


def test_copies_that_may_diverge_are_warned_of_once_but_not_for_a_number(replicas):
    source = """
v = Variable(10.0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    strategy.run(lambda: v.assign_add(1.0))
    before = len(caught)
    for _ in range(3):
        strategy.run(lambda: v.assign_add(mine))
(before, [str(warning.message) for warning in caught])
"""
    for before, messages in cell(replicas(2), source):
        assert before == 0
        assert len(messages) == 1
        assert "the copies may differ" in messages[0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_from_outside_a_value_is_applied_once_to_each_copy(replicas, n):
    # Golden: mirrored/cross/assign_add/SUM.
    source = """
v = Variable(10.0, aggregation="SUM")
returned = v.assign_add(2.0)
with strategy.scope():
    v.assign_add(torch.tensor(1.0))
(returned is v, v.read_value().item(), repr(v))
"""
    for replica_id, (same, value, text) in enumerate(cell(replicas(n), source)):
        assert (same, value) == (True, 13)
        assert text == f"MirroredVariable:{{\n  {replica_id}: tensor(13.)\n}}"


def test_different_values_from_outside_are_an_error_on_every_replica_and_change_nothing(replicas):
    source = """
v = Variable(10.0, aggregation="SUM")
(raised(lambda: v.assign(mine)), raised(lambda: v.assign([1.0] * (replica_id + 1))), v.read_value().item())
"""
    for different, shapes, value in cell(replicas(2), source):
        assert different[0] == shapes[0] == "UsageError"
        assert "different values to Variable outside of strategy.run" in different[1]
        assert "shape (2,)" in shapes[1]
        assert value == 10


def test_a_tensor_that_torch_adds_to_no_others_is_refused_on_every_replica_and_a_sparse_one_assigned(replicas):
    source = """
v = Variable([0.0, 0.0], aggregation="sum", trainable=False)
bad = [torch.empty(2, device="meta"), torch.nested.nested_tensor([torch.ones(1), torch.ones(1)])]
found = [raised(lambda: strategy.run(lambda: v.assign_add(each if replica_id else torch.ones(2)))) for each in bad]
strategy.run(lambda: v.assign(torch.tensor([1.0, 0.0]).to_sparse() * (replica_id + 1)))
found, v.tolist()
"""
    for found, value in cell(replicas(2), source):
        assert [kind for kind, _ in found] == ["UsageError"] * 2
        assert "cannot assign_add a meta tensor" in found[0][1]
        assert "cannot assign_add a nested tensor" in found[1][1]
        assert value == [3, 0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_is_synchronised_on_read_is_local_in_run_and_aggregated_outside(replicas, n):
    # Golden: on_read/assign_add_then_read/MEAN.
    source = """
v = Variable(1.0, aggregation="MEAN", synchronization=VariableSynchronization.ON_READ)
inside = strategy.run(lambda: (v.assign_add(mine), v.read_value(), v + 0))
values([inside, v.read_value(), v * 1, v.values])
"""
    mean = sum(i + 2 for i in range(n)) / n
    expected = [[(i + 2, i + 2, i + 2), mean, mean, (i + 2,)] for i in range(n)]
    assert cell(replicas(n), source) == expected


def test_a_sum_is_assigned_in_parts_and_nothing_can_be_added_to_it(replicas):
    # Golden: on_read/cross_assign/SUM, on_read/cross_assign_add/SUM.
    source = """
v = Variable(1.0, aggregation="SUM", synchronization="ON_READ")
v.assign(6.0)
values([v.values, v.read_value(), raised(lambda: v.assign_add(6.0)), raised(lambda: v.assign_sub(6.0))])
"""
    for parts, total, added, subtracted in cell(replicas(2), source):
        assert (parts, total) == ((3,), 6)
        assert added[0] == "UsageError"
        assert "does not support `assign_add` in cross-replica context when aggregation is set to" in added[1]
        assert "`assign_sub`" in subtracted[1]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("synchronization", ["AUTO", "ON_READ"])
def test_a_reduction_of_a_variable_is_one_of_its_components_in_every_place(replicas, n, synchronization):
    source = f"""
v = Variable(0.0, aggregation="MEAN", synchronization={synchronization!r})
strategy.run(lambda: v.assign(mine))
values([strategy.local_results(v), strategy.local_results({{"v": v}})[0]["v"], strategy.reduce("sum", v),
        strategy.reduce("mean", v)])
"""
    parts = [float(i + 1) for i in range(n)] if synchronization == "ON_READ" else [(n + 1) / 2] * n
    for replica_id, (own, in_a_nest, total, mean) in enumerate(cell(replicas(n), source)):
        assert (own, in_a_nest) == ((parts[replica_id],), parts[replica_id])
        assert (total, mean) == (sum(parts), sum(parts) / n)
    with mnb.MirroredStrategy([f"cpu:{i}" for i in range(n)]) as strategy:
        with strategy.scope():
            v = Variable(0.0, aggregation="MEAN", synchronization=synchronization)
            rows = Variable([0.0], aggregation="MEAN", synchronization=synchronization)

        def assign() -> None:
            mine = torch.tensor(mnb.get_replica_context().replica_id_in_sync_group + 1.0)
            v.assign(mine)
            rows.assign(mine.reshape(1))

        strategy.run(assign)
        assert [part.item() for part in strategy.local_results(v)] == parts
        assert [nest["v"].item() for nest in strategy.local_results({"v": v})] == parts
        assert (strategy.reduce("sum", v), strategy.reduce("mean", v)) == (sum(parts), sum(parts) / n)
        assert strategy.gather(rows, axis=0).tolist() == parts
        assert type(strategy.local_results(v)[0]) is torch.Tensor


def test_only_the_first_component_is_read_and_none_has_no_common_value(replicas):
    source = """
first = Variable(0.0, aggregation="ONLY_FIRST_REPLICA", synchronization="ON_READ")
none = Variable(0.0, synchronization="ON_READ")
strategy.run(lambda: (first.assign(mine), none.assign(mine)))
(first.read_value().item(), raised(lambda: none + 1), strategy.run(lambda: none + 1).item())
"""
    for replica_id, (first, error, own) in enumerate(cell(replicas(2), source)):
        assert first == 1
        assert "have no common value" in error[1]
        assert own == replica_id + 2


def test_a_metric_is_local_in_run_and_global_outside(replicas):
    # Golden: metric/mean_in_run.
    source = """
total, count = (Variable(0.0, aggregation="SUM", synchronization="ON_READ") for _ in range(2))

def update(x):
    total.assign_add(x.sum())
    count.assign_add(float(len(x)))
    return total / count

x = torch.tensor([1.0, 2.0]) if replica_id == 0 else torch.tensor([6.0])
inside = strategy.run(update, (x,))
result = total / count
parts = total.values, count.values
total.assign(0.0)
values([inside, result, parts, total.read_value()])
"""
    assert cell(replicas(2), source) == [[1.5, 3, ((3,), (2,)), 0], [6, 3, ((6,), (1,)), 0]]


def test_a_sum_reads_the_same_after_it_was_saved_and_restored(replicas):
    # Golden: checkpoint/onread_sum->onread_sum, checkpoint/mirrored->plain.
    source = """
class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Variable(7.0)
        self.register_buffer("seen", Variable(0.0, aggregation="SUM", synchronization="ON_READ"))

saved, restored = M(), M()
strategy.run(lambda: saved.seen.assign(mine))
state = pickle.loads(pickle.dumps(saved.state_dict()))
restored.load_state_dict(state)
values([dict(state), restored.seen.values, restored.seen.read_value(), type(state["weight"]).__name__])
"""
    assert cell(replicas(2), source) == [[{"weight": 7, "seen": 3}, (1.5,), 3, "Tensor"]] * 2


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_values_that_differ_in_their_signs_alone_differ(replicas, dtype):
    source = f"""
sign = 1 - 2 * replica_id
v = Variable(torch.tensor([1.0, 2.0 * sign]).to(torch.{dtype}), aggregation="MEAN")
first = v.read_value()
error = raised(lambda: v.assign(torch.tensor([1.0, 3.0 * sign]).to(torch.{dtype})))
values([first, error[0]])
"""
    assert cell(replicas(2), source) == [[[1, 2], "UsageError"]] * 2


def test_initial_values_are_replica_0s_and_gradients_are_reduced(replicas):
    source = """
torch.manual_seed(replica_id)
v = Variable(torch.randn(2))
(v * (replica_id + 1)).sum().backward()
torch.optim.SGD([v], 0.5).step()
twin = copy.deepcopy(v)
(twin * (replica_id + 1)).sum().backward()
values([v.read_value(), v.grad, twin.grad, type(twin).__name__])
"""
    torch.manual_seed(0)
    expected = (torch.randn(2) - 0.75).tolist()
    assert cell(replicas(2), source) == [[expected, [1.5, 1.5], [1.5, 1.5], "MirroredVariable"]] * 2


def test_update_works_on_the_component_and_only_on_a_variable_of_the_scope(replicas):
    # Golden: update/basic, ctl/variable_outside_scope.
    source = """
from mirror_nb.values import PerReplica

v = Variable(1.0)
result = strategy.extended.update(v, lambda own, x: own.assign_add(x), (5.0,), group=False)
outside = raised(lambda: strategy.extended.update(torch.ones(1), lambda own: own))
others = raised(lambda: strategy.extended.update(v, lambda own, x: x, (PerReplica([1, 2, 3]),)))
network = strategy.extended.update(torch.nn.Linear(1, 1), lambda own: own.bias.numel())
values([result, v.read_value(), strategy.extended.variable_created_in_scope(v), outside, others, network])
"""
    for result, value, made_here, (kind, message), others, network in cell(replicas(2), source):
        # As in the controller.
        assert network == 1
        assert others[0] == "UsageError"
        assert "has 3 values, but the strategy has 2 replicas" in others[1]
        assert (result, value, made_here, kind) == ([6], 6, True, "UsageError")
        assert "must only be passed a Variable created in this strategy's scope" in message


def test_in_a_merge_call_a_variable_is_itself_and_written_from_outside(replicas):
    source = """
v = Variable(1.0, aggregation="SUM")

def merge(merging, variable, x):
    total = merging.reduce("sum", x, axis=None)
    merging.extended.update(variable, lambda own, by: own.assign_add(by), (x,))
    diverged = variable.read_value().item()
    variable.assign(total)
    return variable is v, diverged

inside = strategy.run(lambda: get_replica_context().merge_call(merge, (v, mine)))
(inside, v.read_value().item())
"""
    assert cell(replicas(2), source) == [((True, 2), 3), ((True, 3), 3)]


def test_collectives_of_torch_distributed_work_on_a_cells_own_component(replicas):
    source = """
import torch.distributed as dist

v = Variable([0.0], synchronization="on_read", aggregation="sum")
strategy.run(lambda: v.assign(mine[None]))
parts = [torch.zeros(1) for _ in range(num_replicas)]
dist.all_gather(parts, v)
dist.all_reduce(v)
(torch.cat(parts).tolist(), v.tolist())
"""
    assert cell(replicas(2), source) == [([1.0, 2.0], [6.0])] * 2


def test_without_a_rule_each_replica_writes_in_place_to_its_own(replicas):
    source = """
v = Variable(0.0, synchronization="on_read")
v += mine
strategy.run(lambda: v.read_value()).item()
"""
    assert cell(replicas(2), source) == [1.0, 2.0]


def test_a_variable_that_nothing_synchronises_is_refused():
    with pytest.raises(UsageError, match="`NONE` variable synchronization mode is not supported"):
        Variable(1.0, synchronization=VariableSynchronization.NONE)


ON_READ_OF_ONE = """
def read(rule):
    with strategy.scope():
        v = Variable(4, aggregation=rule, synchronization="ON_READ")
    strategy.run(lambda: v.assign_add(1))
    try:
        return str(v.read_value().dtype), v.read_value().item()
    except ValueError as error:
        return "no common value" in str(error)

[read(rule) for rule in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")]
"""


def test_with_one_replica_what_is_synchronised_on_read_reads_as_with_several(replicas):
    expected = [True, ("torch.int64", 5), ("torch.float32", 5.0), ("torch.int64", 5)]
    assert cell(replicas(1), ON_READ_OF_ONE) == [expected]
    with mnb.MirroredStrategy(["cpu:0"]) as strategy:
        body, _, last = ON_READ_OF_ONE.strip().rpartition("\n")
        names = {"strategy": strategy, "Variable": Variable}
        exec(body, names)
        assert eval(last, names) == expected


@pytest.mark.parametrize("write", ["v |= 4", "v ^= 4", "v <<= 2", "v += 4", "v &= 4"])
@pytest.mark.parametrize("synchronization", ["ON_READ", "AUTO"])
def test_operators_in_place_write_to_a_variable_from_outside(replicas, write, synchronization):
    source = f"""
v = same = Variable(5, aggregation="MEAN", synchronization={synchronization!r}, trainable=False)
{write}
values([v is same, v.read_value(), strategy.run(v.read_value)])
"""
    names = {"v": 5}
    exec(write, names)
    assert cell(replicas(2), source) == [[True, names["v"], names["v"]]] * 2


def test_nothing_is_subtracted_from_flags():
    flags = Variable([True, False])
    with pytest.raises(UsageError, match="cannot assign_sub to Variable, which holds flags"):
        flags.assign_sub([True, True])
    assert flags.tolist() == [True, False]


def test_a_copy_outside_the_scope_of_what_differs_says_how_to_copy_it():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            module = nn.Module()
            module.register_buffer("own", Variable(0.0, synchronization="ON_READ", name="own"))
        with pytest.raises(UsageError, match="copy it inside `with strategy"):
            copy.deepcopy(module)
        with strategy.scope():
            assert type(copy.deepcopy(module).own) is SyncOnReadVariable
