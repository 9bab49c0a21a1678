"""Code on a replica: in a cell and under torchrun; what replicas say to each other, and what they agree on first."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from crew import CPU
from driving import DEADLINE, run_cell

import mirror_nb as mnb
from mirror_nb.collectives.base import Member
from mirror_nb.collectives.gloo import GlooAllReduce
from mirror_nb.messages import Call, RunCell
from mirror_nb.strategies.peers import Form, Peers
from mirror_nb.transfer.packing import pack

IMPORTS = """
import torch
from mirror_nb.strategies.context import get_replica_context, get_strategy, has_strategy, in_cross_replica_context
from mirror_nb.values import PerReplica, ReduceOp
from mirror_nb.variables import Variable

context = get_replica_context()
mine = torch.tensor(replica_id + 1.0)

def values(nest):
    return torch.utils._pytree.tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, nest)

def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)

class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ZeroDivisionError("a mistake")
"""


def cell(pool, source):
    """Run a cell and return the value of its last line on each replica."""
    ran = run_cell(pool, IMPORTS + source)
    assert not ran.errors, ran.report.failures
    return [ran.results[replica_id] for replica_id in range(pool.size)]


# --------------------------------------------------------------------------- where the code stands


def test_a_cell_is_in_both_contexts_and_run_in_a_replicas(replicas):
    source = """
def where():
    replica = get_replica_context()
    return get_strategy() is strategy, in_cross_replica_context(), replica and replica.replica_id_in_sync_group

with strategy.scope() as entered:
    scope = where()
devices = strategy.extended.worker_devices
[where(), strategy.run(where), scope, entered is strategy, strategy.num_replicas_in_sync, devices]
"""
    for i, found in enumerate(cell(replicas(2), source)):
        assert found == [(True, False, i), (True, False, i), (True, True, None), True, 2, ("cpu:0", "cpu:1")]


def test_what_belongs_to_all_replicas_is_refused_inside_run(replicas):
    source = """
[raised(lambda: strategy.run(call)) for call in (
    lambda: strategy.run(len, ("",)),
    lambda: strategy.reduce("sum", mine, axis=None),
    lambda: strategy.gather(mine, axis=0),
    lambda: strategy.scope().__enter__(),
)]
"""
    for nested, reduced, gathered, scope in cell(replicas(2), source):
        assert {nested[0], reduced[0], gathered[0], scope[0]} == {"ContextError"}
        assert "enter it around strategy.run" in scope[1]
        assert "merge_call()" in nested[1]
        assert "all_reduce()" in reduced[1]
        assert "Strategy.gather method requires being in cross-replica context" in gathered[1]


def test_a_scope_that_a_merge_call_enters_and_does_not_leave_ends_with_it(replicas):
    source = """
def where():
    return in_cross_replica_context(), get_replica_context() is None

def fn():
    get_replica_context().merge_call(lambda merging: merging.scope().__enter__() and None)
    return where()

[strategy.run(fn), where(), strategy.run(where), strategy.reduce("sum", mine, axis=None).item()]
"""
    assert cell(replicas(2), source) == [[(False, False), (False, False), (False, False), 3]] * 2


def test_a_call_after_a_cell_of_some_replicas_is_one_of_all(replicas):
    pool = replicas(2)
    some = RunCell("1", None, frozenset(), frozenset(), 1, os.getcwd(), True, True, partial=True)
    assert pool.run({0: some}, timeout=DEADLINE).clean

    def merged() -> int:
        return mnb.get_replica_context().merge_call(lambda strategy: strategy.num_replicas_in_sync)

    what = Call(pack(merged, in_band=True).payload, pack(((), {}), in_band=True).payload)
    report = pool.run(dict.fromkeys(range(2), what), timeout=DEADLINE)
    assert [result for result, _ in report.unpacked().values()] == [2, 2], report.failures


@pytest.mark.parametrize("length", [2, 1000])
def test_a_conjugate_is_reduced_gathered_and_assigned_as_any_complex_numbers_are(replicas, length):
    source = f"""
x = torch.full(({length},), 1 + 2j) * (replica_id + 1)
v = mnb.Variable(torch.zeros({length}, dtype=torch.complex64), aggregation="only_first_replica")
v.assign(torch.full(({length},), 1 + 2j).conj())
seen = [v[0].item()]
strategy.run(lambda: v.assign(x.conj()))
seen.append(v[0].item())
seen += [t[0].item() for t in (
    strategy.reduce("sum", x.conj(), axis=None),
    strategy.reduce("mean", x.conj(), axis=None),
    strategy.reduce("sum", x.conj().imag, axis=None),
    context.all_reduce("sum", x.conj()),
    context.all_reduce("sum", x.conj().imag),
    context.all_gather(x.conj(), axis=0)[{length}:],
    context.all_gather(x.conj().imag, axis=0)[{length}:],
)]
seen
"""
    for found in cell(replicas(2), "import mirror_nb as mnb" + source):
        assert found[:2] == [1 - 2j, 1 - 2j]
        assert found[2:] == [3 - 6j, 1.5 - 3j, -6.0, 3 - 6j, -6.0, 2 - 4j, -4.0]


def test_run_takes_this_replicas_part_of_its_arguments_and_calls_are_checked(replicas):
    source = """
seen = []
parts = {"x": [PerReplica([10, 20])]}
result = strategy.run(lambda a, b, log: log.append(a["x"][0]) or a["x"][0] + b, (parts,), {"b": 1, "log": seen})
async def waits(*_):
    pass
import mirror_nb as mnb
v, merge = mnb.Variable(1.0), lambda *call: strategy.run(lambda: get_replica_context().merge_call(*call))
update = lambda *call: strategy.extended.update(v, *call)
wrong = (5,), (waits,), (len, "ab"), (len, (), [1])
refused = [raised(lambda: call(*given)) for call in (merge, update) for given in wrong]
(result, seen, raised(lambda: strategy.run(len, "ab")), raised(lambda: strategy.run(len, (), [1])), refused)
"""
    for i, (result, seen, args, kwargs, refused) in enumerate(cell(replicas(2), source)):
        assert (result, seen) == (10 * (i + 1) + 1, [10 * (i + 1)])
        assert args == ("UsageError", "positional args must be a list or tuple, got <class 'str'>; write args=(x,)")
        assert kwargs[0] == "UsageError"
        words = ("must be a function, not int", "is an async function", args[1], kwargs[1])
        for error, word in zip(refused, words * 2, strict=True):
            assert error[0] == "UsageError"
            assert word in error[1]


# --------------------------------------------------------------------------- reduce and gather


@pytest.mark.parametrize("n", [1, 2, 3])
def test_values_are_reduced_over_the_peers(replicas, n):
    source = """
share = torch.arange(float(2 * replica_id))
values([
    strategy.reduce("SUM", mine, axis=None),
    strategy.reduce(ReduceOp.MEAN, {"a": [mine, replica_id + 1]}, axis=None),
    strategy.reduce("mean", share, axis=0),
    strategy.reduce("sum", torch.ones(replica_id + 1, 2, 100) * mine, axis=(0, 1)),
    strategy.reduce("sum", torch.tensor([True, False]), axis=0),
    strategy.reduce("sum", torch.tensor([replica_id], dtype=torch.int16), axis=None),
])
"""
    total = sum(i + 1 for i in range(n))
    shares = [x for i in range(n) for x in range(2 * i)]
    squares = 2.0 * sum((i + 1) ** 2 for i in range(n))
    for summed, means, by_share, over_two, flags, small in cell(replicas(n), source):
        assert summed == total
        assert means == {"a": [total / n, total / n]}
        assert by_share == pytest.approx(sum(shares) / len(shares) if shares else float("nan"), nan_ok=True)
        assert over_two == [squares] * 100
        assert flags == n
        assert small == [sum(range(n))]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_uneven_tensors_are_gathered(replicas, n):
    source = """
rows = torch.full((replica_id, 2), replica_id, dtype=torch.int16)
values([
    strategy.gather(rows, axis=0),
    strategy.gather({"flags": torch.ones(1, replica_id + 1, dtype=torch.bool)}, axis=-1),
    context.all_gather([torch.tensor([1j * replica_id]), torch.zeros(2, replica_id)], axis=-1),
    strategy.gather(torch.empty(0, 2), axis=0).shape == (0, 2),
])
"""
    rows = [[i, i] for i in range(n) for _ in range(i)]
    columns = sum(range(n))
    expected = [
        rows,
        {"flags": [[True] * (columns + n)]},
        [[1j * i for i in range(n)], [[0.0] * columns] * 2],
        True,
    ]
    assert cell(replicas(n), source) == [expected] * n


def test_a_column_of_a_share_of_one_example_is_reduced_gathered_and_assigned_as_any_tensor(replicas):
    # Of one element torch keeps the stride that it had among others.
    source = """
import mirror_nb as mnb

column = (torch.ones(1, 5) * mine)[:, 2]
small = column.to(torch.int16)
first, second = mnb.Variable(column[:0]), mnb.Variable(torch.ones(1, 5)[:, 2], aggregation="only_first_replica")
strategy.run(lambda: second.assign(column))
values([
    [strategy.reduce("sum", each, axis=axis) for each in (column, small) for axis in (None, 0)],
    [strategy.reduce("mean", column, axis=0), context.all_reduce("sum", small), second.read_value()],
    [strategy.gather(column, axis=0), context.all_gather(small, axis=0), first.read_value()],
])
"""
    expected = [[[3], 3, [3], 3], [1.5, [3], [1]], [[1, 2], [1, 2], []]]
    assert cell(replicas(2), source) == [expected] * 2


def test_what_is_gathered_in_inference_mode_any_thread_may_carry_on(replicas):
    source = """
shared, into = torch.distributed.group.WORLD.shared, []
gather = shared.all_gather

def watched(outputs, *about):
    into.extend(output.is_inference() for output in outputs)
    return gather(outputs, *about)

shared.all_gather = watched
with torch.inference_mode():
    found = strategy.gather(torch.ones(300_000), 0)
del shared.all_gather
values([found.sum(), any(into), len(into) > 0])
"""
    for total, inference, watched in cell(replicas(2), source):
        assert (total, inference, watched) == (600_000, False, True)


def test_a_number_takes_the_dtype_of_the_others_tensor(replicas):
    source = """
loss = torch.tensor(2.0, dtype=torch.float64) if replica_id else 1
total = strategy.reduce("sum", loss, axis=None)
[total.item(), str(total.dtype), context.all_reduce("sum", [loss])[0].item()]
"""
    assert cell(replicas(2), source) == [[3, "torch.float64", 3]] * 2


MISTAKES = [
    ("strategy.reduce('sum', torch.ones(4 - 2 * replica_id), axis=None)", "float32[4] on replica 0, float32[2] on"),
    ("context.all_reduce('sum', torch.ones(4 - 2 * replica_id))", "float32[4] on replica 0, float32[2] on replica 1"),
    ("context.all_reduce('sum', mine.long() if replica_id else mine)", "float32[] on replica 0, int64[] on replica 1"),
    ("context.all_reduce('sum', mine > 0 if replica_id else mine.long())", "int64[] on replica 0, bool[] on"),
    (
        "context.all_reduce('sum', mine.as_subclass(Odd) if replica_id else mine)",
        "float32[] on replica 0, the error “a mistake” on replica 1",
    ),
    ("context.all_reduce('sum', [mine] if replica_id else (mine,))", "float32[] in (*,) on replica 0"),
    (
        "strategy.gather(torch.ones(1, 2 + replica_id), axis=0)",
        "float32[*, 2] on replica 0, float32[*, 3] on replica 1",
    ),
    ("context.all_gather(mine if replica_id else mine[None], axis=0)", "“cannot all_gather a tensor of shape ()"),
    ("strategy.reduce('sum', 'a' if replica_id else mine, axis=None)", "“cannot reduce a str ('a')"),
    ("strategy.reduce('sum', 'a', axis=None)", "cannot reduce a str ('a')"),
    (
        "strategy.reduce('sum', torch.ones(2, dtype=torch.int16 if replica_id else torch.int64), axis=0)",
        "int64[] on replica 0, int16[] on replica 1",
    ),
    (
        "strategy.reduce('sum', [mine] * (1 + replica_id), axis=None)",
        "float32[] in [0] on replica 0, float32[] in [0] of [0], [1] on",
    ),
    (
        "strategy.gather({'a': mine[None], **{'b': mine[None] for _ in range(replica_id)}}, axis=0)",
        "float32[*] in ['a'] on replica 0, float32[*] in ['a'] of ['a'], ['b'] on",
    ),
    (
        "Variable(0.0).assign(torch.ones(1 + replica_id) if replica_id else mine)",
        "different values to assign to Variable",
    ),
    (
        "strategy.reduce('sum', mine, axis=None) if replica_id else strategy.gather(mine[None], axis=0)",
        "different calls: gather axis=0 on replica 0, reduce SUM axis=None on replica 1",
    ),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_what_does_not_fit_is_the_same_error_on_every_replica_and_the_next_call_works(replicas, call, message):
    source = f"[raised(lambda: {call}), strategy.reduce('sum', mine, axis=None).item()]"
    results = cell(replicas(2), source)
    (kind, text), total = results[0]
    assert results[0] == results[1]
    assert (kind, total) == ("UsageError", 3)
    assert message in text


def test_a_call_that_one_replica_leaves_out_ends_with_an_error_and_not_in_a_hang(replicas):
    pool = replicas(2)
    ran = run_cell(pool, "if replica_id == 0:\n    strategy.reduce('sum', 1.0, axis=None)")
    assert ran.errors == {0: "ReplicaError"}
    assert "waited in reduce SUM axis=None, but another one has returned" in ran.report.failures[0].message
    assert cell(replicas(2), "strategy.reduce('sum', mine, axis=None).item()") == [3, 3]


def test_an_epoch_that_one_replica_leaves_out_is_an_error_that_says_how_to_decide_together(replicas):
    pool = replicas(2)
    source = """
import torch
for epoch in range(3):
    for (a,) in strategy.distribute_dataset((torch.ones(4, 1),), batch_size=2):
        pass
    if replica_id + epoch == 2:
        break
"""
    ran = run_cell(pool, source)
    assert ran.errors == {0: "ReplicaError"}
    failure = ran.report.failures[0]
    assert "replica 0 waited in the agreement on an epoch, but another one has returned" in failure.message
    assert 'let it go by `strategy.reduce("mean", value)`' in failure.message
    assert "distribute_dataset" in "".join(failure.traceback)


# --------------------------------------------------------------------------- all_reduce and all_gather


@pytest.mark.parametrize(("op", "factor"), [("SUM", 2.0), ("MEAN", 1.0)])
def test_the_gradient_of_a_reduction_is_that_reduction_of_the_gradients(replicas, op, factor):
    # Golden: all_reduce/*/gradient.
    source = f"""
x = torch.tensor(replica_id + 2.0, requires_grad=True)
context.all_reduce("{op}", x * x).backward()
first = x.grad.clone()
(gradient,) = torch.autograd.grad(context.all_reduce("{op}", x**3), x, create_graph=True)
gradient.backward()
values([first, x.grad - first])
"""
    x = [2.0, 3.0]
    assert cell(replicas(2), source) == [[factor * 2 * x[i], factor * 6 * x[i]] for i in range(2)]


def test_the_gradient_of_gathering_is_summed_and_cut(replicas):
    # Golden: all_gather/gradient, and with shares of other sizes.
    source = """
x = torch.tensor([1.0, 2.0]) + 2 * replica_id
x.requires_grad_()
context.all_gather(x * x, axis=0).sum().backward()
y = torch.ones(2, replica_id, requires_grad=True)
(context.all_gather({"y": y}, axis=1)["y"] * mine).sum().backward()
values([x.grad, y.grad])
"""
    assert cell(replicas(2), source) == [[[4, 8], [[], []]], [[12, 16], [[3], [3]]]]


def test_a_hook_that_torch_runs_in_a_thread_of_its_own_stands_where_the_replica_does(replicas):
    # As all hooks of what is on a GPU do; on a CPU torch takes one when backward passes lie some sixty deep.
    source = """
import threading

def hooked(deeper):
    def hook(gradient):
        if deeper:
            return hooked(deeper - 1)
        threads.add(threading.current_thread() is threading.main_thread())
        return get_replica_context().all_reduce(ReduceOp.SUM, mine)

    with torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        leaf.register_hook(hook)
        (leaf * 1).backward()
    return leaf.grad

threads = set()
[hooked(99).item(), strategy.run(hooked, args=(99,)).item(), threads]
"""
    assert cell(replicas(2), source) == [[3, 3, {False}]] * 2


def test_a_nest_is_reduced_leaf_by_leaf(replicas):
    # Golden: all_reduce/SUM/nest.
    source = """
nest = {"a": mine + 1, "l": [torch.tensor([1.0, 2.0]) + 2 * replica_id, [torch.tensor(4.0 + 2 * replica_id), True, 2]]}
reduced = strategy.run(lambda: get_replica_context().all_reduce("sum", nest))
mean = context.all_reduce("mean", [PerReplica([1, 2]), 3])
values([reduced, mean, context.all_reduce("sum", {})])
"""
    expected = [{"a": 5, "l": [[4, 6], [10, 2, 4]]}, [1.5, 3], {}]
    assert cell(replicas(2), source) == [expected] * 2


def test_of_many_leaves_those_that_differ_are_named(replicas):
    source = """
gradients = {f"layer{i}": torch.ones(2) for i in range(20)}
if replica_id:
    gradients["layer7"] = torch.ones(3)
all_reduce = get_replica_context().all_reduce
shape = raised(lambda: all_reduce("sum", gradients))
if replica_id:
    gradients["extra"] = torch.ones(3)
(shape, raised(lambda: all_reduce("sum", gradients)))
"""
    for shape, extra in cell(replicas(2), source):
        assert "SUM: float32[2] at ['layer7'] on replica 0, float32[3] at ['layer7'] on replica 1;" in shape[1]
        assert "{'extra': *, 'layer0': *" in extra[1]
        assert "float32" not in extra[1]


# --------------------------------------------------------------------------- merge_call


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_merge_call_sees_all_values_and_gives_each_replica_its_part(replicas, n):
    source = """
model = torch.nn.Linear(1, 1)

def merge(merging, x, same, nest, model_, by):
    assert merging is strategy and in_cross_replica_context() and get_replica_context() is None
    total = merging.reduce("sum", x, axis=None)
    gathered = merging.gather(nest["rows"], axis=0)
    parts = [part.item() for part in merging.local_results(x)]
    return total, gathered, parts, same, model_ is model, x, by

def replica():
    nest = {"rows": torch.full((replica_id, 1), replica_id)}
    return get_replica_context().merge_call(merge, (mine, "same", nest, model), {"by": replica_id})

values(strategy.run(replica))
"""
    rows = [[i] for i in range(n) for _ in range(i)]
    for i, found in enumerate(cell(replicas(n), source)):
        assert found == (sum(range(1, n + 1)), rows, [j + 1.0 for j in range(n)], "same", True, i + 1.0, i)


def test_in_a_merge_call_values_stand_as_in_the_controller(replicas):
    source = """
from mirror_nb import Variable
v = Variable(0.0, aggregation="SUM", synchronization="ON_READ")
strategy.run(lambda: v.assign(mine))

def merge(merging, size):
    assert type(size) is torch.Size
    numbers = merging.reduce("sum", 2), merging.reduce("mean", 2.0), merging.gather(torch.tensor([5]), axis=0)
    of_variable = merging.reduce("sum", v), merging.reduce("mean", v), list(merging.local_results(v))
    return [*numbers, *of_variable, list(merging.local_results({"a": 1})), raised(lambda: merging.reduce("sum", mine))]

values(strategy.run(lambda: get_replica_context().merge_call(merge, (mine.shape,))))
"""
    for found in cell(replicas(2), source):
        assert found[:-1] == [4, 2, [5], 3, 1.5, [1, 2], [{"a": 1}] * 2]
        assert found[-1][0] == "UsageError"
        assert "A non-DistributedValues value" in found[-1][1]


def test_a_merge_call_finds_what_is_each_replicas_own_by_its_key_in_whatever_order_the_keys_are(replicas):
    source = """
weight = torch.nn.Parameter(torch.ones(2))
pairs = [("weight", weight), ("x", mine)]
nest = dict(pairs if replica_id else pairs[::-1])

def merge(merging, nest):
    return nest["weight"] is weight, merging.reduce("sum", nest["x"], axis=None)

values(strategy.run(lambda: get_replica_context().merge_call(merge, (nest,))))
"""
    assert cell(replicas(2), source) == [(True, 3), (True, 3)]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("[1] * replica_id", "differ in structure: ([],) on replica 0, ([*],) on replica 1"),
        (
            "(__import__('threading').Lock() if replica_id else 1)",
            "the arguments of merge_call cannot travel: `args[0]`: lock cannot be sent",
        ),
    ],
)
def test_arguments_that_cannot_be_merged_are_an_error_on_every_replica(replicas, argument, message):
    source = f"""
call = lambda: strategy.run(lambda: get_replica_context().merge_call(lambda merging, x: x, ({argument},)))
(raised(call), strategy.reduce("sum", mine, axis=None).item())
"""
    for (kind, text), total in cell(replicas(2), source):
        assert (kind, total) == ("UsageError", 3)
        assert message in text


@pytest.mark.parametrize(("other", "differ"), [("lambda m: 2", True), ("lambda m: 1", False)])
def test_functions_are_told_apart_where_python_does_not_know_their_columns(replicas, other, differ):
    # As in Python 3.12, of those that return a constant.
    source = f"""
merge = (lambda m: 1) if replica_id else ({other})
merge.__code__ = merge.__code__.replace(co_linetable=b"")
raised(lambda: strategy.run(lambda: get_replica_context().merge_call(merge)))
"""
    for found in cell(replicas(2), source):
        assert (found is not None and "have to give one function" in found[1]) is differ


DIFFERENT = "Some replicas made a different number of replica_context().merge_call() calls."


@pytest.mark.parametrize("after", ["", "strategy.reduce('sum', mine, axis=None)"])
def test_different_numbers_of_merge_calls_are_an_error_instead_of_a_hang(replicas, after):
    # Golden: merge_call/count_mismatch.
    source = f"""
def replica():
    for _ in range(2 - replica_id):
        get_replica_context().merge_call(lambda merging: None)

strategy.run(replica)
{after}
"""
    ran = run_cell(replicas(2), IMPORTS + source)
    assert ran.errors[0] == "ReplicaError"
    assert DIFFERENT in ran.report.failures[0].message
    assert after or "together: 2 by replica 0, 1 by replica 1" in ran.report.failures[0].message
    assert cell(replicas(2), "strategy.reduce('sum', mine, axis=None).item()") == [3, 3]


def test_who_fails_before_a_merge_call_has_not_left_it_out(replicas):
    source = """
def replica():
    if replica_id:
        raise ValueError("bad")
    get_replica_context().merge_call(lambda merging: None)

strategy.run(replica)
"""
    ran = run_cell(replicas(2), IMPORTS + source)
    assert ran.errors[1] == "ValueError"
    assert ran.report.failures[0].secondary
    assert DIFFERENT not in ran.report.failures[0].message


def test_what_a_merge_function_raises_leaves_the_context_as_it_was(replicas):
    source = """
failed = raised(lambda: strategy.run(lambda: get_replica_context().merge_call(lambda merging: 1 / 0)))
(failed[0], get_replica_context().replica_id_in_sync_group, strategy.reduce("sum", mine, axis=None).item())
"""
    assert cell(replicas(2), source) == [("ZeroDivisionError", i, 3) for i in range(2)]


def test_gradients_are_reduced_after_a_backward_pass_that_one_replica_alone_tried_and_caught(replicas):
    source = """
weight = torch.nn.Parameter(torch.ones(2))
torch.optim.SGD([weight], 0.1)
for _ in range(3):
    weight.mul(mine).sum().backward()
met = raised(lambda: weight.sum().backward() if replica_id == 0 else strategy.reduce("sum", mine, axis=None))
weight.grad = None
weight.mul(mine).sum().backward()
(met[0], weight.grad.tolist())
"""
    assert cell(replicas(2), source) == [("UsageError", [1.5, 1.5])] * 2


# --------------------------------------------------------------------------- input


@pytest.mark.parametrize(
    ("n", "examples", "batch", "expected"),
    [
        (2, 10, 4, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
        (3, 10, 4, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]]),
    ],
)
def test_global_batches_are_cut_and_next_belongs_outside_of_run(replicas, n, examples, batch, expected):
    source = f"""
dataset = strategy.experimental_distribute_dataset(torch.arange({examples}), batch_size={batch})
iterator = iter(dataset)
error = raised(lambda: strategy.run(lambda: next(iterator)))
(len(dataset), values(list(iterator)), values(list(dataset)), error)
"""
    for i, (length, once, again, error) in enumerate(cell(replicas(n), source)):
        assert length == len(expected)
        assert once == again == [step[i] for step in expected]
        assert error[0] == "UsageError"
        assert "next(iterator) should be called from outside of replica_fn" in error[1]


def test_values_and_datasets_from_functions(replicas):
    source = """
value = strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group * 10 + 2)
contexts = []

def make(context):
    contexts.append((context.num_replicas_in_sync, context.num_input_pipelines, context.get_per_replica_batch_size(8)))
    return torch.utils.data.DataLoader(list(range(10)), context.get_per_replica_batch_size(8))

dataset = strategy.distribute_datasets_from_function(make)
(value, values(list(dataset)), contexts)
"""
    steps = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9], []]]
    expected = [(i * 10 + 2, [step[i] for step in steps], [(2, 1, 4)]) for i in range(2)]
    assert cell(replicas(2), source) == expected


def test_the_loss_of_a_share_without_examples_does_not_make_that_of_the_batch_nan(replicas):
    source = """
found = []
for batch in strategy.distribute_dataset(torch.ones(3), batch_size=2):
    loss = batch.mean()
    found += [strategy.reduce("mean", loss), strategy.reduce("sum", loss.item()), strategy.reduce("mean", batch.sum())]
    merge = lambda merging, losses: merging.reduce("mean", losses)
    found.append(strategy.run(lambda: get_replica_context().merge_call(merge, (loss,))))
values(found)
"""
    assert cell(replicas(2), source) == [[1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0]] * 2
    # After the loop, too, and in a later cell; but for a sum, which is of what all of the loop has added up then, and
    # what is NaN on a replica that had examples.
    after = """
odd = 1 / replica_id if replica_id else float("nan")
everywhere = strategy.run(lambda: get_replica_context().all_reduce("mean", loss))
turned = strategy.reduce("mean", loss * 1j)
means = [strategy.reduce("mean", loss), everywhere, turned.imag]
values([*means, *(strategy.reduce("sum", each).isnan() for each in (loss, odd))])
"""
    assert cell(replicas(2), source + after) == [[1.0, 1.0, 1.0, True, True]] * 2
    assert cell(replicas(2), after) == [[1.0, 1.0, 1.0, True, True]] * 2


def test_of_many_losses_of_a_share_without_examples_none_becomes_nan(replicas):
    source = """
for batch in strategy.distribute_dataset(torch.ones(1), batch_size=2):
    losses = [k * batch.mean() for k in range(150)]
    found = strategy.run(lambda: get_replica_context().all_reduce("mean", [*losses, torch.tensor(replica_id)]))
values(found)
"""
    assert cell(replicas(2), source) == [[*map(float, range(150)), 0.5]] * 2


def test_replicas_with_examples_agree_once_however_many_tensors_they_reduce(replicas):
    source = """
from unittest import mock
from mirror_nb.strategies.peers import Peers
with mock.patch.object(Peers, "sizes", side_effect=AssertionError):
    found = strategy.run(lambda: get_replica_context().all_reduce("mean", [k * mine for k in range(150)]))
values(found)
"""
    assert cell(replicas(2), source) == [[1.5 * k for k in range(150)]] * 2


def test_an_uneven_batch_weighs_gradients_by_examples_and_no_sync_keeps_them_local(replicas):
    source = """
torch.manual_seed(0)
model = torch.nn.Linear(1, 1, bias=False)
for batch in strategy.distribute_dataset(torch.tensor([[1.0], [2.0], [6.0]]), batch_size=3):
    strategy.run(lambda x: model(x).mean().backward(), (batch,))
whole = model.weight.grad.item()
model.zero_grad()
with strategy.no_sync():
    model(mine[None]).sum().backward()
local = model.weight.grad.item()
model.zero_grad(set_to_none=True)
# One that is kept when its loop is over.
(kept,) = strategy.distribute_dataset(torch.tensor([[1.0], [2.0], [6.0]]), batch_size=3)
model(kept).mean().backward()
(whole, local, model.weight.grad.item())
"""
    assert cell(replicas(2), source) == [(3, 1, 3), (3, 2, 3)]


@pytest.mark.parametrize("make", ["x", "UserDict(x=x)"])
def test_of_batches_that_are_held_the_one_that_run_is_given_weighs_gradients(replicas, make):
    source = f"""
from collections import UserDict
model = torch.nn.Linear(1, 1, bias=False)
loader = torch.utils.data.DataLoader(
    torch.tensor([[1.0], [2.0], [6.0], [5.0], [4.0]]), 3, collate_fn=lambda rows: [{make} for x in [torch.stack(rows)]]
)
first, last = strategy.distribute_dataset(loader)

def train(batch):
    # The network sees none of the batch's own tensors.
    x, = batch
    model((x if isinstance(x, torch.Tensor) else x["x"]) * 1).mean().backward()

strategy.run(train, (first,))
model.weight.grad.item()
"""
    assert cell(replicas(2), source) == [3, 3]


def test_where_no_memory_is_shared_a_call_that_another_leaves_out_ends_in_the_time_that_was_asked_for(crews):
    def call(r):
        store = dist.distributed_c10d._get_default_store()
        ops = GlooAllReduce()
        ops.bind(Member(r.id, r.n, CPU, dist.group.WORLD, timeout_seconds=0.1))
        # As on several machines.
        ops._own_fabric = None
        try:
            if r.id == 0:
                Peers(r.id, r.n, CPU, ops=lambda: ops).agree("merge_call", Form())
            else:
                store.wait(["over"])
        finally:
            store.set("over", "")
            dist.destroy_process_group()

    late, none = crews[2].outcomes(call)
    assert none is None
    assert late.args[0] == "ReplicaTimeout"
    assert "did not end within 0.1 s" in late.args[1]
    assert "CommunicationOptions(timeout_seconds=0.1)" in late.args[1]


# --------------------------------------------------------------------------- under torchrun

SCRIPT = """
import json, os, sys, warnings
import torch
from torch import nn
from mirror_nb.strategies.context import get_replica_context
from mirror_nb.strategies.mirrored import MirroredStrategy
from mirror_nb.training.model import Model
from mirror_nb.variables import Variable

strategy = MirroredStrategy()
replica_id = int(os.environ["RANK"])
mine = torch.tensor(replica_id + 1.0)

def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)

found = {"n": strategy.num_replicas_in_sync}
with strategy.scope():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total = Variable(0.0, aggregation="SUM", synchronization="ON_READ")
    counter = Variable(10.0, aggregation="SUM")

def step(x, y):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total.assign_add(mine)
    counter.assign_add(mine)
    gathered = get_replica_context().all_gather(mine[None], axis=0)
    return loss.detach(), gathered, get_replica_context().merge_call(lambda s, x: s.reduce("sum", x, None), (mine,))

x = torch.linspace(-1, 1, 10)[:, None]
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=4, shuffle=True)
losses = []
for epoch in range(2):
    for batch in strategy.distribute_dataset(loader):
        loss, gathered, merged = strategy.run(step, batch)
        losses.append(strategy.reduce("mean", loss, axis=None).item())
found.update(losses=losses, weight=model.weight.item(), gathered=gathered.tolist(), merged=merged.item())
found.update(total=total.read_value().item(), counter=counter.read_value().item())
found["error"] = raised(lambda: strategy.reduce("sum", torch.ones(replica_id + 1), axis=None))

with strategy.scope():
    normed = nn.Sequential(nn.Linear(1, 2), nn.SyncBatchNorm(2), nn.Linear(2, 1))
for inputs, targets in strategy.distribute_dataset(loader):
    nn.functional.mse_loss(normed(inputs), targets).backward()
found["normed"] = [normed[1].running_mean.tolist(), normed[0].weight.grad.tolist()]

found["devices"] = []
for devices in (["foo"], ["cpu:0", "cpu:0"], [], ["cpu:1", "cpu:0"], ["cuda:5", "cuda:6"], "cpu:0"):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        error = raised(lambda: MirroredStrategy(devices))
    found["devices"].append(error or [[str(one.message).partition(", which are used")[0] for one in said]])

def one_too_many(call):
    def replica():
        for _ in range(1 + replica_id):
            call(get_replica_context())
        step(*batch)

    return raised(lambda: strategy.run(replica))

found["uneven"] = [
    one_too_many(lambda context: context.all_reduce("sum", mine)),
    one_too_many(lambda context: context.merge_call(lambda merging: 1)),
]
found["after"] = strategy.reduce("sum", mine, axis=None).item()
with strategy.scope():
    trained = Model(nn.Linear(1, 1))
    trained.compile("sgd", "mse")
strategy.close()
if len(sys.argv) > 1:
    found["closed"] = [raised(lambda: strategy.run(step, batch)), raised(lambda: strategy.scope().__enter__())]
    choose = lambda: setattr(strategy, "cross_device_ops", "gloo")
    found["closed"] += [raised(strategy.compare_parameters), raised(choose)]
    found["closed"] += [raised(lambda: trained.fit(x, x)), raised(lambda: trained.save("model.pt"))]
    with open(os.path.join(sys.argv[1], str(replica_id)), "w") as file:
        json.dump(found, file)
"""
# test_under_torchrun has what it finds there and in a cell.


def test_dicts_are_reduced_by_their_keys_whatever_their_order(replicas):
    source = """
own = {"a": mine, "b": 10 * mine} if replica_id == 0 else {"b": 10 * mine, "a": mine}
found = strategy.reduce("sum", own), strategy.gather({k: v.reshape(1) for k, v in own.items()}, 0)
inside = strategy.run(lambda: get_replica_context().all_reduce("sum", own))
other = raised(lambda: strategy.reduce("sum", {"a": mine} if replica_id == 0 else {"c": mine}))
(*map(values, found), values(inside), other)
"""
    for reduced, gathered, inside, other in cell(replicas(2), source):
        assert reduced == inside == {"a": 3.0, "b": 30.0}
        assert gathered == {"a": [1.0, 2.0], "b": [10.0, 20.0]}
        assert other[0] == "UsageError"
        assert "['a'] on replica 0" in other[1]
        assert "['c'] on replica 1" in other[1]


def test_means_of_small_integers_do_not_overflow(replicas):
    source = """
small = torch.tensor([200], dtype=torch.uint8)
inside = strategy.run(lambda: get_replica_context().all_reduce("mean", small))
values((strategy.reduce("mean", small), inside))
"""
    assert cell(replicas(2), source) == [([200.0], [200.0])] * 2


def test_a_batch_that_is_empty_for_all_is_handed_out_and_weighs_alike(replicas):
    source = """
class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (torch.ones(n, 2) for n in (4, 0, 3))

layer = torch.nn.Linear(2, 1, bias=False)
found = []
for batch in strategy.distribute_dataset(torch.utils.data.DataLoader(Batches(), batch_size=None)):
    layer.zero_grad()
    (layer(batch).sum() + layer.weight.sum() * (replica_id + 1)).backward()
    found.append((len(batch), layer.weight.grad.tolist()))
found
"""
    for replica_id, found in enumerate(cell(replicas(2), source)):
        assert [length for length, _ in found] == [[2, 0, 2], [2, 0, 1]][replica_id]
        assert found[1][1] == [[1.5, 1.5]]


def test_means_of_short_floats_are_finite_where_their_sums_are_not(replicas):
    # 100 elements are more than travel with the agreement.
    source = """
from mirror_nb.variables import Variable

v = Variable(0.0, dtype=torch.float16, aggregation="MEAN", synchronization="ON_READ")
strategy.run(lambda: v.assign(torch.tensor(60000.0, dtype=torch.float16)))
found = [v.read_value()]
for n in (1, 100):
    half = torch.full((n,), 60000.0, dtype=torch.float16)
    found += [strategy.reduce("mean", half, axis=None), strategy.reduce("mean", half, axis=0)]
    found += [strategy.run(lambda: get_replica_context().all_reduce("mean", half))]
sums = [strategy.reduce("sum", torch.ones(n, dtype=torch.uint16), axis=None).tolist() == [2] * n for n in (1, 100)]
mixed = raised(lambda: strategy.reduce("mean", mine.half() if replica_id else mine, axis=None))
numbers = strategy.reduce("mean", 1 if replica_id else mine.half(), axis=None)
[[each.unique().tolist() for each in found], [str(each.dtype) for each in found], sums, mixed, str(numbers.dtype)]
"""
    for values, dtypes, sums, (kind, message), numbers in cell(replicas(2), source):
        assert values == [[60000.0]] * 7
        assert set(dtypes) == {"torch.float16"}
        assert sums == [True, True]
        assert (kind, numbers) == ("UsageError", "torch.float16")
        assert "float32[] on replica 0, float16[] on replica 1" in message


def test_a_mean_of_short_floats_that_is_synchronised_on_read_is_finite_in_a_script():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            v = mnb.Variable(0.0, dtype=torch.float16, aggregation="MEAN", synchronization="ON_READ")
        strategy.run(lambda: v.assign(torch.tensor(60000.0, dtype=torch.float16)))
        found = v.read_value()
        assert (found.item(), found.dtype) == (60000.0, torch.float16)


@pytest.mark.parametrize(
    "call",
    ["strategy.run(lambda x: x, (three,))", "strategy.reduce('sum', three, None)", "strategy.gather(three, axis=0)"],
)
def test_a_per_replica_of_another_number_of_values_is_refused_in_a_cell(replicas, call):
    source = f"raised(lambda three=PerReplica([torch.ones(1)] * 3): {call})"
    for kind, message in cell(replicas(2), source):
        assert (kind, "has 3 values, but the strategy has 2 replicas" in message) == ("UsageError", True)


@pytest.mark.parametrize(
    "call",
    [
        "context.all_reduce('sum', {'a': [others]})",
        "context.all_gather(others, 0)",
        "context.merge_call(lambda merging, given: 1, (others,))",
        "context.merge_call(lambda merging: others)",
        "v.assign(others)",
    ],
)
@pytest.mark.parametrize("length", [1, 3])
def test_in_a_function_of_run_a_per_replica_of_another_number_of_values_is_refused_on_every_replica(
    replicas, call, length
):
    source = f"""
from mirror_nb.variables import Variable
context, v = get_replica_context(), Variable([0.0], aggregation="sum")
others = PerReplica([torch.ones(1)] * {length})
refused = raised(lambda: strategy.run(lambda: {call}))
(refused, strategy.run(lambda: context.all_reduce("sum", mine)).item())
"""
    for (kind, message), after in cell(replicas(2), source):
        assert (kind, after) == ("UsageError", 3.0)
        assert f"PerReplica has {length} values, but" in message or "of 1 values has none for replica 1" in message
