"""Variables in modules, copies, merge_call and nests: the same in a script, in a mirrored cell and under torchrun."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driving import run_cell

from mirror_nb.pool.local import LocalPool

CASES = '''
import copy, json, os, pickle, sys, warnings
import cloudpickle, torch
from torch import nn
import mirror_nb.variables
import mirror_nb as mnb

def mine():
    return torch.tensor(mnb.get_replica_context().replica_id_in_sync_group + 1.0)

def kind(variable):
    return type(variable).__name__

class Counter(nn.Module):
    """Variables as buffers and as plain attributes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", mnb.Variable(0.0, aggregation="sum", synchronization="on_read"))
        self.register_buffer("average", mnb.Variable(0.0, trainable=False, aggregation="mean"))
        self.steps = mnb.Variable(0, aggregation="sum")

    def forward(self):
        self.total.assign_add(mine())
        self.average.assign(mine())
        self.steps.assign_add(torch.tensor(1))

    def told(self):
        state = {name: value.item() for name, value in self.state_dict().items()}
        return [float(self.total), float(self.average), int(self.steps), state]

def buffers(strategy):
    with strategy.scope():
        counter = Counter().to("cpu")
    kinds = strategy.run(lambda: [kind(counter.total), kind(counter.average), kind(counter.steps)])
    for _ in range(2):
        strategy.run(counter)
    counted = counter.told()
    counter.load_state_dict({"total": torch.tensor(8.0), "average": torch.tensor(7.0)})
    counter.steps.assign(10)
    parts = [float(part) for part in strategy.local_results(strategy.run(lambda: counter.total.read_value()))]
    strategy.run(counter)
    return [kinds, counted, parts[0], counter.told()]

def copies(strategy):
    found = []
    with strategy.scope():
        counter = Counter()
    strategy.run(counter)
    with strategy.scope():
        twins = [copy.deepcopy(counter), pickle.loads(cloudpickle.dumps(counter)), copy.copy(counter.total)]
    for twin in twins[:2]:
        strategy.run(lambda: [twin(), twin()][:0])
        found.append([kind(twin.total), kind(twin.average), kind(twin.steps), twin.told()])
    twins[0].steps.assign(0)
    counter.total.assign(100.0)
    return [*found, counter.told(), float(twins[2]), twins[0].told()[:3]]

def assigned_as_in_tensorflow(strategy):
    found = []
    for synchronization in ("on_write", "on_read", None):
        with strategy.scope():
            v = mnb.Variable(0.0, aggregation="mean", synchronization=synchronization)

        def assign():
            one = torch.tensor(1.0)
            told = [v.assign(one, True, "assign", False), v.assign(one, use_locking=True, name="assign")]
            told += [v.assign_add(one, False, None, False), v.assign_sub(delta=one, read_value=False)]
            return [given if given is None else float(given) for given in told]

        with strategy.scope():
            found.append([kind(v), assign(), float(v)])
        found.append([strategy.local_results(strategy.run(assign))[0], float(v)])
    return found

def sizes(strategy):
    def step():
        def merged(merging, given):
            return [kind(part) for part in merging.local_results(given)]

        size = torch.ones(int(mine()), 2).shape
        return {"size": size, "merged": mnb.get_replica_context().merge_call(merged, args=(size,))}

    found = strategy.local_results(strategy.run(step))[0]
    return [kind(found["size"]), found["merged"]]

def copies_of_what_differs(strategy):
    with strategy.scope():
        own = mnb.Variable(0.0, synchronization="on_read")
        frozen = mnb.Variable(1.0).requires_grad_(False)
    strategy.run(lambda: own.assign(mine()))
    with strategy.scope():
        twin, still = copy.deepcopy([own, frozen])
    strategy.run(lambda: twin.assign_add(mine()))
    parts = strategy.run(lambda: [own.read_value(), twin.read_value()])
    return [strategy.reduce("sum", parts[0]).item(), strategy.reduce("sum", parts[1]).item(), still.requires_grad]

def a_copy_of_a_plain_one(strategy):
    plain = mirror_nb.variables.plain(
        torch.tensor(1.0), trainable=False, aggregation=mnb.VariableAggregation.SUM,
        synchronization=mnb.VariableSynchronization.AUTO, name=None,
    )
    with strategy.scope():
        made = copy.deepcopy(plain)
    strategy.run(lambda: made.assign_add(mine()))
    return [kind(plain), kind(made), float(made)]

def in_a_merge_call(strategy):
    with strategy.scope():
        total = mnb.Variable(0.0, aggregation="sum", synchronization="on_read")
        rows = mnb.Variable([1.0], aggregation="mean")
    strategy.run(lambda: total.assign(mine()))

    def merged(merging):
        nest = {"rows": rows, "totals": [total, 5]}
        return [
            merging.reduce("sum", total).item(),
            merging.reduce("mean", {"total": total})["total"].item(),
            merging.gather(rows, 0).tolist(),
            [float(part) for part in merging.local_results(total)],
            [[part["rows"].item(), part["totals"][0].item()] for part in merging.local_results(nest)],
            float(total),
        ]

    found = strategy.run(lambda: json.dumps(mnb.get_replica_context().merge_call(merged)))
    outside = [strategy.reduce("sum", total).item(), strategy.gather(rows, 0).tolist()]
    return [json.loads(found), outside]

def in_place(strategy):
    with strategy.scope():
        v = mnb.Variable([1.0, 2.0], trainable=False)
        w = mnb.Variable([1.0], trainable=False)
    there = lambda: strategy.run(lambda: [v.tolist(), w.tolist()])
    found = [there()]

    def note():
        found.append([v.tolist(), there()[0]])

    v[1:].fill_(7.0)
    note()
    nn.init.constant_(v, 8.0)
    note()
    torch.add(v.detach(), 1.0, out=v)
    note()
    torch._foreach_add_([v, w], 1.0)
    note()
    v[0] = 3.0
    v[1:].mul_(2.0)
    v.assign_add([1.0, 1.0])
    note()
    view = v[1:]
    v.zero_()
    view += 5.0
    found.append([float(part[1]) for part in [v.read_value(), v.values[0]]])
    note()
    with torch.inference_mode():
        v[:1].sub_(1.0)
    note()
    return [*found, w.tolist()]

def a_value_of_each_replica(strategy):
    def refused(aggregation, synchronization="auto", value=mnb.PerReplica([torch.tensor(1.0), torch.tensor(3.0)])):
        with strategy.scope():
            v = mnb.Variable(0.0, trainable=False, aggregation=aggregation, synchronization=synchronization)
        try:
            v.assign(value)
        except mnb.UsageError as error:
            return "to Variable outside of strategy.run" in str(error), aggregation in str(error).lower()
        return float(v)

    def returned(aggregation, synchronization="auto"):
        with strategy.scope():
            v = mnb.Variable(0.0, trainable=False, aggregation=aggregation, synchronization=synchronization)
        try:
            v.assign(strategy.run(mine))
        except mnb.UsageError as error:
            return "outside of strategy.run" in str(error), float(v)
        return float(v)

    equal = mnb.PerReplica([torch.tensor(2.0), torch.tensor(2.0)])
    rules = ["sum", "mean", "only_first_replica"]
    return [
        [refused(rule) for rule in rules],
        [returned(rule) for rule in rules],
        [refused(rule, value=equal) for rule in rules],
        refused("sum", "on_read"),
        [refused(rule, "on_read") for rule in rules[1:]],
        [returned(rule, "on_read") for rule in rules],
    ]

def counts(strategy):
    """A sum of whole numbers, in a module too, beside a network that has nothing to do with it."""
    class Counted(nn.Module):
        def __init__(self, registered):
            super().__init__()
            count = mnb.Variable(0, synchronization="on_read", aggregation="sum")
            self.register_buffer("count", count) if registered else setattr(self, "count", count)

    with strategy.scope():
        count = mnb.Variable(0, synchronization="on_read", aggregation="sum")
        metrics = [Counted(registered) for registered in (True, False)]
        flag = mnb.Variable(False, synchronization="on_read", aggregation="sum")
        network = nn.Linear(1, 1, bias=False)
        nn.init.ones_(network.weight)

    def step():
        network.weight.data.add_(1.0)
        for held in (count, *(metric.count for metric in metrics)):
            held.assign_add(torch.tensor(2))

    strategy.run(step)
    found = [float(network.weight), int(count), *(int(metric.count) for metric in metrics)]
    with strategy.scope():
        found += [int(count.assign(7)), int(pickle.loads(pickle.dumps(count)))]
        found += [int(count.assign(-3)), bool(flag.assign(True))]
        metrics[0].load_state_dict({"count": torch.tensor(5)})
    return [*found, int(metrics[0].count), metrics[0].state_dict()["count"].item()]

def numbers_of_pythons(strategy):
    with strategy.scope():
        exact = mnb.Variable(0.0, dtype=torch.float64)
        turned = mnb.Variable(0j, dtype=torch.complex128)
    exact.assign(0.1)
    turned.assign([0.1j, 0.1][0])
    return [float(exact), float(exact.assign_add(0.2)), turned.read_value().imag.item()]


def the_line_of_a_warning(strategy):
    with strategy.scope():
        v = mnb.Variable(0.0)
    def step():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            v.assign(mine()); line = sys._getframe().f_lineno
        name = sys._getframe().f_code.co_filename
        return [(one.filename == name, one.lineno == line) for one in said]
    return strategy.run(step)

class Output:
    def __init__(self, loss):
        self.loss = loss

if Output not in torch.utils._pytree.SUPPORTED_NODES:
    torch.utils._pytree.register_pytree_node(Output, lambda o: ([o.loss], None), lambda held, _: Output(*held))

def a_class_without_names_for_its_members(strategy):
    with strategy.scope():
        v = mnb.Variable([1.0], trainable=False)
    output = Output({"own": strategy.run(lambda: mine()[None]), "kept": v})
    found = strategy.reduce("sum", output), strategy.gather(output, 0)
    return [{name: value.tolist() for name, value in each.loss.items()} for each in found]

def of_each(strategy, fn):
    return strategy.gather(strategy.run(lambda: fn()[None]), 0).tolist()

def in_place_where_it_is_read_together(strategy):
    def after(rule, write):
        with strategy.scope():
            v = mnb.Variable(0.0, synchronization="on_read", aggregation=rule)
        strategy.run(lambda: v.assign(mine()))
        write(v)
        return of_each(strategy, v.read_value)

    def inside(v):
        def write():
            v.data.add_(1.0)
            v.view(1).mul_(2.0)
            v.data = v.data - 1.0

        strategy.run(write)

    def set_data(v):
        v.data = torch.tensor(8.0)

    writes = [lambda v: v.fill_(10.0), lambda v: v.mul_(10.0), lambda v: v.__iadd__(1.0), set_data, inside]
    return [[after(rule, write) for write in writes] for rule in ("sum", "mean", "only_first_replica")]

def by_torch_distributed(strategy):
    with strategy.scope():
        v = mnb.Variable(0.0, synchronization="on_read", aggregation="sum")

    def broadcast():
        v.assign(mine())
        torch.distributed.broadcast(v, 1)
        return v.read_value()

    return of_each(strategy, broadcast)

def merged_with_what_differs(strategy):
    with strategy.scope():
        v = mnb.Variable(0.0, aggregation="mean")

    def captured():
        own = mine()
        mnb.get_replica_context().merge_call(lambda merging: v.assign(own) and None)

    def two_functions():
        first = mnb.get_replica_context().replica_id_in_sync_group == 0
        merge = (lambda merging: 1) if first else (lambda merging: 2)
        mnb.get_replica_context().merge_call(merge)

    strategy.run(captured)
    try:
        strategy.run(two_functions)
    except mnb.UsageError as error:
        said = "merge_call: merged_with_what_differs.<locals>.two_functions.<locals>.<lambda> (to line" in str(error)
        return [of_each(strategy, v.read_value), said, "have to give one function" in str(error)]

def random_numbers(strategy):
    def drawn():
        draws = strategy.gather(strategy.run(lambda: torch.rand(1)), 0).tolist()
        return draws, len(set(draws))

    torch.manual_seed(3)
    with strategy.scope():
        weights = nn.Linear(1, 1)
    initial = of_each(strategy, lambda: weights.weight.detach().view(()).clone())
    (first, different), (then, _) = drawn(), drawn()
    torch.manual_seed(3)
    again, _ = drawn()
    torch.manual_seed(3)
    return [len(set(initial)), different, again == first, again == then, again[0] == torch.rand(1).item()]

def of_dtypes_that_torch_does_not_add(strategy):
    found = []
    for dtype in (torch.float8_e4m3fn, torch.uint16):
        made = lambda: torch.full((2,), mine().item()).to(dtype)
        rows = strategy.run(made)
        found += [strategy.reduce(op, rows, axis=axis) for op in ("sum", "mean") for axis in (None, 0)]
        found += strategy.local_results(strategy.run(lambda: mnb.get_replica_context().all_reduce("sum", made())))[:1]
        for options in ({"aggregation": "sum"}, {"aggregation": "sum", "synchronization": "on_read"}):
            with strategy.scope():
                v = mnb.Variable(torch.zeros(2, dtype=dtype), trainable=False, **options)
            strategy.run(lambda: v.assign_add(made()))
            found.append(v.read_value())
            v.assign(torch.full((2,), 6).to(dtype))
            found.append(v.read_value())
    return [[str(value.dtype)[6:], value.float().tolist()] for value in found]

def tensors_that_are_not_reduced(strategy):
    def refused(call, *args):
        try:
            call(*args)
        except mnb.UsageError as error:
            return str(error)

    made = [lambda: torch.ones(2, device="meta"), lambda: torch.nested.nested_tensor([torch.ones(1)])]
    return [refused(strategy.run, lambda: mnb.get_replica_context().all_reduce("sum", make())) for make in made]

def of_another_dtype(strategy):
    """`module.double()` sets `data`, as a program may by itself."""
    with strategy.scope():
        module = nn.Linear(1, 1)
        module.scale = mnb.Variable([3.0, 4.0])
        own = mnb.Variable([1.0], trainable=False)
        total = mnb.Variable([1.0], synchronization="on_read", aggregation="mean")
    there = lambda of: strategy.local_results(strategy.run(lambda: [str(of.dtype), of.tolist()]))[0]
    found = [there(module.scale)]
    module.double()
    found.append(there(module.scale))
    own.data = torch.zeros(2).half()
    found += [there(own), own.tolist()]

    def longer():
        own.data = torch.ones(3)

    strategy.run(longer)
    found.append((own + 1).tolist())

    def refused():
        try:
            total.data = torch.tensor([1])
        except mnb.UsageError as error:
            return "cannot set `data` of Variable to a tensor of torch.int64 and shape (1,)" in str(error)

    return [*found, refused(), strategy.local_results(strategy.run(refused))[0], total.tolist()]

def buffers_of_a_module_that_is_cast(strategy):
    with strategy.scope():
        counter = Counter().double()
        counter.register_buffer("own", mnb.Variable(0.0, synchronization="on_read"))
        counter.register_buffer("learnt", mnb.Variable(0.0))
    strategy.run(counter)
    counter.to(torch.bfloat16)
    strategy.run(lambda: counter.half() and None)
    strategy.run(counter)
    found = [float(counter.total), float(counter.average), int(counter.steps)]
    return [*found, *([kind(each), str(each.dtype)] for each in counter.buffers())]

def local_results_of_what_is_equal(strategy):
    def step():
        merged = mnb.get_replica_context().merge_call(lambda merging: len(merging.local_results({"loss": 0.5})))
        return {"loss": 0.5, "merged": merged}

    return strategy.local_results(strategy.run(step))[-1]

def copies_of_a_mean_of_integers(strategy):
    with strategy.scope():
        mean = mnb.Variable(3, synchronization="on_read", aggregation="mean")
    strategy.run(lambda: mean.assign_add(mine().long()))
    outside = pickle.loads(pickle.dumps(mean)), copy.deepcopy(mean)
    with strategy.scope():
        inside = pickle.loads(pickle.dumps(mean)), copy.deepcopy(mean)
    return [str(each.dtype) for each in (mean, *outside, *inside)]

class Plain:
    def __init__(self, value):
        self.value = value

def nests_of_classes_of_ones_own(strategy):
    def merged(merging, output, plain):
        classes = {isinstance(one, Plain) for one in merging.experimental_local_results(plain)}
        return float(merging.reduce("sum", output.loss, axis=None)), isinstance(output, Output), list(classes)

    def call():
        context = mnb.get_replica_context()
        plain = Plain(context.replica_id_in_sync_group)
        reduced = context.all_reduce("sum", Output(mine()))
        return context.merge_call(merged, (Output(mine()), plain)), float(reduced.loss)

    return [json.dumps(each) for each in strategy.experimental_local_results(strategy.run(call))][:1]

def losses_of_a_last_batch_that_leaves_a_replica_without_examples(strategy):
    with strategy.scope():
        total, numbers = (mnb.Variable(0.0, synchronization="on_read", aggregation="sum") for _ in range(2))
        summed, last = mnb.Variable(0.0, aggregation="sum"), mnb.Variable(0.0, aggregation="mean")
        outside = mnb.Variable(0.0, synchronization="on_read", aggregation="mean")

    def step(examples):
        loss = examples.view(len(examples), -1).mean()
        total.assign_add(loss)
        numbers.assign_sub(loss.item())
        summed.assign_add(loss)
        last.assign(loss)
        return loss

    for batch in strategy.distribute_dataset(torch.tensor([1.0, 3.0, 5.0]), batch_size=2):
        outside.assign_add(strategy.run(step, args=(batch,)))
    return [float(total), float(numbers), float(summed), float(last), float(outside)]

class Scale(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.scale = mnb.Variable(1.0, True, synchronization="on_read", aggregation=rule)

    def forward(self, x):
        return self.scale * x

def trained_and_read_together(strategy):
    def trained(rule):
        with strategy.scope():
            net = Scale(rule)
            optimizer = torch.optim.SGD(net.parameters(), 0.5)

        def step():
            optimizer.zero_grad()
            net(mine()).backward()
            optimizer.step()

        strategy.run(lambda: net.scale.assign_add(mine()))
        strategy.run(step)
        parts = of_each(strategy, net.scale.read_value)
        value = net.state_dict()["scale"].item(), net(torch.tensor(1.0)).item()
        equal = bool(strategy.compare_parameters())
        net.load_state_dict(net.state_dict())
        net.zero_grad()
        net(torch.tensor(3.0)).backward()
        return [parts, value, equal, of_each(strategy, net.scale.read_value), net.scale.grad.item()]

    with warnings.catch_warnings():
        # Not all: in replicas of many tests networks of others may have gradients that wait to be reduced.
        warnings.filterwarnings("error", ".*Scale")
        return [trained(rule) for rule in ("sum", "mean", "only_first_replica")]

def trained_and_moved_with_their_module(strategy):
    with strategy.scope():
        net = Scale("mean")
        net.weight = nn.Parameter(torch.ones(()))
    strategy.run(lambda: net.scale.assign_add(mine()))

    def moved():
        net.to("cpu")
        net.float()

    moved()
    strategy.run(moved)
    net.share_memory()
    kept = of_each(strategy, net.scale.read_value)
    net.double()
    sizes = of_each(strategy, lambda: torch.tensor([net.scale.itemsize, net.weight.itemsize]))
    return [kept, sizes, of_each(strategy, net.scale.read_value)]
'''

KINDS = ["SyncOnReadVariable", "MirroredVariable", "MirroredVariable"]
EXPECTED: dict[str, Any] = {
    "buffers": [
        KINDS,
        [6.0, 1.5, 4, {"total": 6.0, "average": 1.5}],
        4.0,
        [11.0, 1.5, 12, {"total": 11.0, "average": 1.5}],
    ],
    "copies": [
        *[[*KINDS, [9.0, 1.5, 6, {"total": 9.0, "average": 1.5}]]] * 2,
        [100.0, 1.5, 2, {"total": 100.0, "average": 1.5}],
        3.0,
        [9.0, 1.5, 0],
    ],
    "copies_of_what_differs": [3.0, 6.0, False],
    "in_a_merge_call": [
        [3.0, 1.5, [1.0, 1.0], [1.0, 2.0], [[1.0, 1.0], [1.0, 2.0]], 3.0],
        [3.0, [1.0, 1.0]],
    ],
    "in_place": [
        [[1.0, 2.0], [1.0]],
        *[[value, value] for value in ([1.0, 7.0], [8.0, 8.0], [9.0, 9.0], [10.0, 10.0], [4.0, 21.0])],
        [5.0, 5.0],
        *[[value, value] for value in ([0.0, 5.0], [-1.0, 5.0])],
        [2.0],
    ],
    "a_value_of_each_replica": [
        [[True, True]] * 3,
        [[True, 0.0]] * 3,
        [2.0] * 3,
        [True, True],
        [2.0, 1.0],
        [[True, 0.0], 1.5, 1.0],
    ],
    "the_line_of_a_warning": [[True, True]],
    "a_class_without_names_for_its_members": [{"own": [3.0], "kept": [2.0]}, {"own": [1.0, 2.0], "kept": [1.0, 1.0]}],
    "in_place_where_it_is_read_together": [
        [[5.0, 5.0], [15.0, 15.0], [2.0, 2.0], [4.0, 4.0], [3.0, 5.0]],
        [[10.0, 10.0], [15.0, 15.0], [2.5, 2.5], [8.0, 8.0], [3.0, 5.0]],
        [[10.0, 10.0], [10.0, 10.0], [2.0, 2.0], [8.0, 8.0], [3.0, 5.0]],
    ],
    "sizes": ["Size", ["Size", "Size"]],
    "assigned_as_in_tensorflow": [
        line
        for kind in ("MirroredVariable", "SyncOnReadVariable", "MirroredVariable")
        for line in ([kind, [None, 1.0, None, None], 1.0], [[None, 1.0, None, None], 1.0])
    ],
    "by_torch_distributed": [2.0, 2.0],
    "merged_with_what_differs": [[1.0, 1.0], True, True],
    "random_numbers": [1, 2, True, False, True],
    "of_dtypes_that_torch_does_not_add": [
        *[["float8_e4m3fn", value] for value in ([3.0, 3.0], 6.0, [1.5, 1.5], 1.5, [3.0, 3.0])],
        *[["float8_e4m3fn", [value] * 2] for value in (3.0, 6.0, 3.0, 6.0)],
        *[["uint16", [3.0, 3.0]], ["int64", 6.0], ["float32", [1.5, 1.5]], ["float32", 1.5], ["uint16", [3.0, 3.0]]],
        *[["uint16", [value] * 2] for value in (3.0, 6.0, 3.0, 6.0)],
    ],
    "of_another_dtype": [
        ["torch.float32", [3.0, 4.0]],
        ["torch.float64", [3.0, 4.0]],
        ["torch.float16", [0.0, 0.0]],
        [0.0, 0.0],
        [2.0, 2.0, 2.0],
        *[True, True, [1.0]],
    ],
    "buffers_of_a_module_that_is_cast": [
        *[6.0, 1.5, 4],
        ["SyncOnReadVariable", "torch.float32"],
        ["MirroredVariable", "torch.float16"],
        ["SyncOnReadVariable", "torch.float32"],
        ["MirroredVariable", "torch.float16"],
    ],
    "local_results_of_what_is_equal": {"loss": 0.5, "merged": 2},
    "copies_of_a_mean_of_integers": ["torch.int64"] * 5,
    "nests_of_classes_of_ones_own": ["[[3.0, true, [true]], 3.0]"],
    "tensors_that_are_not_reduced": [
        "cannot all_reduce a meta tensor: it has no values; make it on a device",
        "cannot all_reduce a nested tensor: make it dense with .to_padded_tensor(...)",
    ],
    "counts": [2.0, 4, 4, 4, 7, 7, -3, True, 5, 5],
    "numbers_of_pythons": [0.1, 0.1 + 0.2, 0.1],
    "losses_of_a_last_batch_that_leaves_a_replica_without_examples": [9.0, -9.0, 9.0, 5.0, 4.5],
    "a_copy_of_a_plain_one": ["PlainVariable", "MirroredVariable", 4.0],
    "trained_and_read_together": [
        [[1.25, 2.25], [3.5, 3.5], True, [1.75, 1.75], 3.0],
        [[1.25, 2.25], [1.75, 1.75], True, [1.75, 1.75], 3.0],
        [[1.25, 2.25], [1.25, 1.25], True, [1.25, 1.25], 3.0],
    ],
    "trained_and_moved_with_their_module": [[2.0, 3.0], [[4, 8], [4, 8]], [2.0, 3.0]],
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The cases as a script has them."""
    names: dict[str, Any] = {"__name__": "cases"}
    path = Path(tmp_path_factory.mktemp("script")) / "cases.py"
    path.write_text(CASES)
    exec(compile(CASES, str(path), "exec"), names)
    return names


@pytest.mark.parametrize("case", EXPECTED)
def test_the_same_in_a_script(case, cases, two):
    assert json.loads(json.dumps(cases[case](two))) == EXPECTED[case]


@pytest.fixture(scope="module")
def told_of_the_cases(replicas: Callable[[int], LocalPool]) -> LocalPool:
    """Replicas to which a cell has told the cases."""
    assert run_cell(replicas(2), CASES).errors == {}
    return replicas(2)


@pytest.mark.parametrize("case", EXPECTED)
def test_the_same_in_a_mirrored_cell(case, told_of_the_cases):
    ran = run_cell(told_of_the_cases, f"json.dumps({case}(strategy))")
    assert not ran.errors, ran.report.failures
    assert [json.loads(found) for found in ran.results.values()] == [EXPECTED[case]] * 2
