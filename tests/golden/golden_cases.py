"""TensorFlow's golden cases against mirror_nb's public API, as functions of a strategy that run in every place.

Each returns what the code that called it sees: in the controller nests of PerReplica, in a replica its own values.
`outcome` turns that, or the error, into plain lists and numbers, which compare alike wherever they came from.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mirror_nb as mnb

Point = namedtuple("Point", "x y")
CASES: dict[str, Callable[[Any], Any]] = {}


def case(name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def register(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
        CASES[name] = body
        return body

    return register


def context() -> Any:
    return mnb.get_replica_context()


def own_id() -> int:
    return int(context().replica_id_in_sync_group)


def outcome(name: str, strategy: Any) -> dict[str, Any]:
    """What a case gives: {"value": ...}, or {"raises": its class and bases, "message": ...}."""
    try:
        return {"value": plain(CASES[name](strategy))}
    except Exception as error:
        return {"raises": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}


def plain(value: Any) -> Any:
    """Lists, dicts, numbers and strings; {"each": [...]} for one value a replica."""
    if isinstance(value, mnb.DistributedValues) or hasattr(value, "read_value"):
        return {"each": [plain(part) for part in value.values]}
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


# ---- reductions in a replica --------------------------------------------------------------------------


@case("all_gather/gradient")
def _(strategy: Any) -> Any:
    def fn() -> Any:
        x = (torch.tensor([1.0, 2.0]) + 2 * own_id()).requires_grad_()
        gathered = context().all_gather(x, axis=0)
        (gathered * gathered).sum().backward()
        return x.grad

    return strategy.run(fn)


def _gradient(op: str) -> Callable[[Any], Any]:
    def body(strategy: Any) -> Any:
        def fn() -> Any:
            x = torch.tensor(2.0 + own_id(), requires_grad=True)
            context().all_reduce(op, x * x).backward()
            return x.grad

        return strategy.run(fn)

    return body


case("all_reduce/SUM/gradient")(_gradient("SUM"))
case("all_reduce/MEAN/gradient")(_gradient("MEAN"))


@case("all_reduce/SUM/nest")
def _(strategy: Any) -> Any:
    def fn() -> Any:
        i = own_id()
        pair = torch.tensor([1.0, 2.0]) + 2 * i
        nest = {"a": torch.tensor(2.0 + i), "l": [pair, [torch.tensor(4.0 + 2 * i)]]}
        return context().all_reduce(mnb.ReduceOp.SUM, nest)

    return strategy.run(fn)


# ---- saving -------------------------------------------------------------------------------------------


def _through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@case("checkpoint/mirrored->plain")
def _(strategy: Any) -> Any:
    with strategy.scope():
        holder = nn.Module()
        holder.v = mnb.Variable(7.0)
    restored = _through_a_file({key: value.detach().clone() for key, value in holder.state_dict().items()})
    return {"saved": holder.v, "restored": restored["v"]}


@case("checkpoint/onread_sum->onread_sum")
def _(strategy: Any) -> Any:
    first, second = _on_read(strategy, 0.0, "SUM"), _on_read(strategy, 0.0, "SUM")

    def components() -> Any:
        return first.assign(torch.tensor(1.0 + own_id()))

    strategy.run(components)
    with strategy.scope():
        second.assign(_through_a_file(first.read_value()))
    return {"saved": strategy.run(lambda: first.read_value()), "restored": strategy.run(lambda: second.read_value())}


# ---- contexts -----------------------------------------------------------------------------------------


@case("construct/two")
def _(strategy: Any) -> Any:
    return {
        "n": strategy.num_replicas_in_sync,
        "worker_devices": len(strategy.extended.worker_devices),
        "parameter_devices": len(strategy.extended.parameter_devices),
        "cluster_resolver": strategy.cluster_resolver,
    }


@case("context/gather_in_replica")
def _(strategy: Any) -> Any:
    return strategy.run(lambda: mnb.get_strategy().gather(torch.ones(1), axis=0))


@case("context/run_in_replica")
def _(strategy: Any) -> Any:
    return strategy.run(lambda: mnb.get_strategy().run(lambda: 1))


@case("context/in_merge_call")
def _(strategy: Any) -> Any:
    def merged(given: Any) -> Any:
        return {
            "has_strategy": mnb.has_strategy(),
            "in_cross": mnb.in_cross_replica_context(),
            "replica_context": mnb.get_replica_context(),
            "n": given.num_replicas_in_sync,
            "strategy": type(given).__name__,
            "first_arg_is_strategy": given is mnb.get_strategy(),
        }

    return strategy.run(lambda: [context().merge_call(merged)])


@case("context/in_update")
def _(strategy: Any) -> Any:
    def where(own: Any) -> Any:
        return mnb.has_strategy(), mnb.in_cross_replica_context(), mnb.get_replica_context()

    return strategy.extended.update(_mirrored(strategy, "NONE"), where)


@case("context/set_strategy_in_scope")
def _(strategy: Any) -> Any:
    with strategy.scope():
        mnb.experimental_set_strategy(strategy)


# ---- training -----------------------------------------------------------------------------------------


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.b = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x + self.b


def train(
    strategy: Any, inputs: dict[str, Any], optimizer: str, accumulated: int = 1, summed: bool = True
) -> dict[str, Any]:
    """TensorFlow's custom training loop; `summed`: its scaled loss, else PyTorch's mean loss."""
    x, y, size = torch.tensor(inputs["X"]), torch.tensor(inputs["Y"]), inputs["global_batch"]
    with strategy.scope():
        line = Line()
        make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
        # Keras' epsilon.
        learner = make(line.parameters(), 0.1, **({"eps": 1e-7} if optimizer == "adam" else {}))

    def step(batch: Any, update: bool) -> Any:
        features, targets = batch
        errors = (line(features) - targets) ** 2
        loss = errors.sum() / size if summed else errors.mean()
        (loss / accumulated).backward()
        if update:
            learner.step()
            learner.zero_grad()
        return errors.detach().sum(), (line.w.detach().clone(), line.b.detach().clone())

    trajectory, losses, steps = [], [], 0
    dataset = strategy.experimental_distribute_dataset((x, y), batch_size=size)
    for _ in range(inputs["epochs"]):
        for batch in dataset:
            steps += 1
            loss, values = strategy.run(step, args=(batch, steps % accumulated == 0))
            losses.append(float(strategy.reduce("SUM", loss, axis=None)) / size)
            trajectory.append(strategy.experimental_local_results(values)[0])
    final = strategy.run(lambda: line.w.detach().clone())
    return {
        "w": line.w.item(),
        "b": line.b.item(),
        "losses": losses,
        "trajectory": [[float(w), float(b)] for w, b in trajectory],
        "replica_w": final,
    }


def train_summed(inputs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Train in a replica with TensorFlow's rule for gradients; other tests find PyTorch's again."""
    try:
        own = mnb.MirroredStrategy(gradient_reduction=mnb.ReduceOp.SUM)
        return dict(plain(train(own, inputs, **options)))
    finally:
        mnb.MirroredStrategy(gradient_reduction=mnb.ReduceOp.MEAN)


@case("ctl/variable_outside_scope")
def _(strategy: Any) -> Any:
    outside = mnb.Variable(1.0)
    return strategy.extended.update(outside, lambda v: v.assign(2.0))


# ---- input --------------------------------------------------------------------------------------------


def steps_of(strategy: Any, dataset: Any) -> Any:
    """What each replica gets in each step: a list of PerReplica here, of own lists in a replica."""
    return list(dataset)


@case("dataset/next_in_replica")
def _(strategy: Any) -> Any:
    iterator = iter(strategy.experimental_distribute_dataset(torch.arange(8), batch_size=4))
    return strategy.run(lambda: next(iterator))


@case("from_function/context_and_steps")
def _(strategy: Any) -> Any:
    contexts = []

    def dataset_fn(given: Any) -> Any:
        n = given.num_replicas_in_sync
        # TensorFlow's case has a global batch of 8 for two; 4 examples a replica for any other number.
        per = given.get_per_replica_batch_size(4 * n)
        contexts.append({"n": n, "pipes": given.num_input_pipelines, "id": given.input_pipeline_id, "per": per})
        return torch.utils.data.DataLoader(range(10), batch_size=per)

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    return {"contexts": contexts, "steps": steps_of(strategy, dataset)}


@case("input_context/indivisible")
def _(strategy: Any) -> Any:
    return mnb.InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(7)


@case("values_fn/ids")
def _(strategy: Any) -> Any:
    def value(given: Any) -> Any:
        return torch.tensor(given.num_replicas_in_sync + 10 * given.replica_id_in_sync_group)

    return strategy.experimental_distribute_values_from_function(value)


# ---- reduce and gather --------------------------------------------------------------------------------


def _run_values(strategy: Any, make: Callable[[int], Any]) -> Any:
    return strategy.run(lambda: make(own_id()))


def _reduced(op: str, make: Callable[[int], Any], axis: Any) -> Callable[[Any], Any]:
    return lambda strategy: strategy.reduce(op, _run_values(strategy, make), axis=axis)


case("reduce/SUM/axis_none_scalar")(_reduced("SUM", lambda i: torch.tensor(1.0 + 3 * i), None))
case("reduce/MEAN/axis_none_scalar")(_reduced("MEAN", lambda i: torch.tensor(1.0 + 3 * i), None))
case("reduce/MEAN/axis0_empty_replica")(_reduced("MEAN", lambda i: torch.tensor([3.0, 5.0][: 2 - 2 * i]), 0))
case("reduce/shape_mismatch_axis_none")(_reduced("SUM", lambda i: torch.ones(4 - 2 * min(i, 1)), None))


def rows(i: int) -> torch.Tensor:
    """Replica i's i + 1 rows: [[1, 2]], [[3, 4], [5, 6]], …"""
    first = i * (i + 1) + 1
    return torch.arange(first, first + 2 * (i + 1)).reshape(i + 1, 2)


@case("gather/axis0/(1, 2)x(2, 2)")
def _(strategy: Any) -> Any:
    return strategy.gather(_run_values(strategy, rows), axis=0)


@case("gather/nonaxis_mismatch")
def _(strategy: Any) -> Any:
    return strategy.gather(_run_values(strategy, lambda i: torch.ones(1, 2 + min(i, 1))), axis=0)


@case("local_results/all")
def _(strategy: Any) -> Any:
    value = _run_values(strategy, lambda i: torch.tensor(1.0 + i))
    given = [value, torch.tensor(3.0), {"a": value}, (value, 3)]
    return [list(strategy.experimental_local_results(each)) for each in given]


# ---- losses -------------------------------------------------------------------------------------------


@case("loss/average_cross")
def _(strategy: Any) -> Any:
    with strategy.scope():
        return mnb.compute_average_loss(torch.tensor([1.0, 2.0]))


@case("loss/average_default")
def _(strategy: Any) -> Any:
    return strategy.run(lambda: mnb.compute_average_loss(torch.tensor([1.0, 2.0]) + 3 * own_id()))


@case("loss/average_empty_replica")
def _(strategy: Any) -> Any:
    return strategy.run(lambda: mnb.compute_average_loss(torch.tensor([1.0, 2.0])[: 2 - 2 * own_id()]))


# ---- merge_call ---------------------------------------------------------------------------------------


@case("merge_call/sum")
def _(strategy: Any) -> Any:
    def merged(given: Any, value: Any) -> Any:
        return given.reduce("SUM", value, axis=None)

    return strategy.run(lambda: context().merge_call(merged, args=(torch.tensor(1 + own_id()),)))


@case("merge_call/count_mismatch")
def _(strategy: Any) -> Any:
    def fn() -> Any:
        if own_id() == 0:
            context().merge_call(lambda given: None)
        return torch.tensor(1.0)

    return strategy.run(fn)


# ---- Variables ----------------------------------------------------------------------------------------


def _on_read(strategy: Any, value: float, aggregation: str) -> Any:
    with strategy.scope():
        return mnb.Variable(
            value,
            synchronization=mnb.VariableSynchronization.ON_READ,
            aggregation=mnb.VariableAggregation[aggregation],
        )


def _mirrored(strategy: Any, aggregation: str, value: float = 10.0) -> Any:
    with strategy.scope():
        return mnb.Variable(value, aggregation=mnb.VariableAggregation[aggregation])


def _replica_assign_add(aggregation: str) -> Callable[[Any], Any]:
    def body(strategy: Any) -> Any:
        v = _mirrored(strategy, aggregation)
        returned = strategy.run(lambda: v.assign_add(torch.tensor(own_id() + 1.0)))
        read = strategy.run(lambda: v.read_value())
        return {"after": v, "returned": returned, "read": read}

    return body


for _aggregation in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"):
    case(f"mirrored/replica/assign_add/{_aggregation}")(_replica_assign_add(_aggregation))


@case("mirrored/replica/assign_add_literal/SUM")
def _(strategy: Any) -> Any:
    v = _mirrored(strategy, "SUM")
    return strategy.run(lambda: v.assign_add(5.0))


@case("mirrored/cross/assign_add/SUM")
def _(strategy: Any) -> Any:
    v = _mirrored(strategy, "SUM")
    with strategy.scope():
        v.assign_add(2.0)
    return v


@case("on_read/assign_add_then_read/MEAN")
def _(strategy: Any) -> Any:
    v = _on_read(strategy, 1.0, "MEAN")
    strategy.run(lambda: v.assign_add(torch.tensor(own_id() + 1.0)))
    inside = strategy.run(lambda: v.read_value())
    with strategy.scope():
        return {"components": v, "in_replica": inside, "cross": v.read_value()}


@case("on_read/cross_assign/SUM")
def _(strategy: Any) -> Any:
    v = _on_read(strategy, 1.0, "SUM")
    with strategy.scope():
        v.assign(6.0)
    return {"components": v}


@case("on_read/cross_assign_add/SUM")
def _(strategy: Any) -> Any:
    v = _on_read(strategy, 1.0, "SUM")
    with strategy.scope():
        v.assign_add(6.0)


@case("metric/mean_in_run")
def _(strategy: Any) -> Any:
    total, count = _on_read(strategy, 0.0, "SUM"), _on_read(strategy, 0.0, "SUM")

    def update() -> Any:
        values = torch.tensor([[1.0, 2.0], [6.0], [3.0, 3.0, 6.0]][own_id()])
        total.assign_add(values.sum())
        count.assign_add(torch.tensor(float(len(values))))
        return total.read_value() / count.read_value()

    inside = strategy.run(update)
    with strategy.scope():
        result = total.read_value() / count.read_value()
    parts = strategy.run(lambda: total.read_value()), strategy.run(lambda: count.read_value())
    with strategy.scope():
        total.assign(0.0)
        after = total.read_value()
    return {"result": result, "in_replica": inside, "total": parts[0], "count": parts[1], "after_reset": after}


@case("mirrored/outside_var_assign_in_run")
def _(strategy: Any) -> Any:
    v = mnb.Variable(1.0)

    def fn() -> Any:
        v.assign_add(1.0)
        return v.read_value()

    strategy.run(fn)
    return v.read_value()


@case("update/basic")
def _(strategy: Any) -> Any:
    v = _mirrored(strategy, "NONE", 1.0)
    strategy.extended.update(v, lambda each, by: each.assign_add(by), args=(2.0,))
    second = strategy.extended.update(v, lambda each, by: each.assign_add(by), args=(3.0,), group=False)
    return {"v": v, "r2": [float(value) for value in second]}


@case("update/with_components_of_others")
def _(strategy: Any) -> Any:
    v, total = _mirrored(strategy, "NONE", 0.0), _on_read(strategy, 0.0, "SUM")
    strategy.run(lambda: total.assign(torch.tensor(own_id() + 1.0)))
    strategy.extended.update(v, lambda own: own.assign(total.read_value()))
    strategy.extended.update(v, lambda own: total.assign_add(10.0) and None)
    return {"v": v, "total": total}


# ---- run ----------------------------------------------------------------------------------------------


@case("run/args_not_tuple")
def _(strategy: Any) -> Any:
    return strategy.run(lambda x: x, args=torch.tensor(1.0))


@case("run/per_replica_input")
def _(strategy: Any) -> Any:
    given = strategy.experimental_distribute_values_from_function(
        lambda each: torch.tensor(10.0 * (each.replica_id_in_sync_group + 1))
    )
    return strategy.run(lambda x: x + own_id() + 1, args=(given,))


@case("run/returns_structure")
def _(strategy: Any) -> Any:
    def fn() -> Any:
        i = torch.tensor(own_id())
        return {"l": [i, 1], "t": (2 * i,), "n": Point(i, 0)}

    return strategy.run(fn)


@case("run/structure_mismatch")
def _(strategy: Any) -> Any:
    return strategy.run(lambda: [0] if own_id() == 0 else [])


@case("per_replica/convert")
def _(strategy: Any) -> Any:
    return torch.as_tensor(_run_values(strategy, lambda i: torch.tensor(1.0 + i)))


def main(folder: str) -> None:
    """What a script under torchrun does: every case that makes sense there, in one process per replica."""
    strategy = mnb.MirroredStrategy()
    names, inputs = json.loads(Path(folder, "asked.json").read_text())
    found = {name: outcome(name, strategy) for name in names}
    for name, (data, options) in inputs.items():
        found[name] = {"value": train_summed(data, options)}
    found["context at the top"] = {"value": [own_id(), context().num_replicas_in_sync, mnb.has_strategy()]}
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
    # torch 2.13 now and then aborts while the interpreter ends, in plain scripts under torchrun too.
    os._exit(0)
