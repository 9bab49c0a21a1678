"""What TensorFlow did for each call, asked of mirror_nb: in the controller, in a cell, and in scripts under torchrun.

`tf_distribute.json` holds TensorFlow's record, golden_cases.py the calls. Each expectation here is a function of the
number of replicas that has to give TensorFlow's own numbers for TensorFlow's number of replicas.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import golden_cases
import pytest
import torch
from driving import launch, run_cell
from golden_cases import outcome, plain, train

import mirror_nb as mnb

HERE = Path(__file__).parent
GOLDEN = {case["name"]: case for case in json.loads((HERE / "tf_distribute.json").read_text())["cases"]}
SECONDS = 120
# For a script under torchrun; it takes some five.

# The replicas of the controller have no tests on their path: the cases travel as a notebook's functions do.
cloudpickle.register_pickle_by_value(golden_cases)


def each(values: Any) -> dict[str, Any]:
    return {"each": list(values)}


def golden(record: Any) -> Any:
    """TensorFlow's record in the form of `golden_cases.plain`."""
    if isinstance(record, dict):
        if {"t", "v"} <= record.keys():
            return record["v"]
        if "kind" in record:
            return each(golden(value) for value in record["values"])
        if "namedtuple" in record:
            return [golden(value) for name, value in record.items() if name != "namedtuple"]
        return {name: golden(value) for name, value in record.items()}
    return [golden(value) for value in record] if isinstance(record, list) else record


def part(value: Any, replica_id: int) -> Any:
    """What one replica sees: of what is there once a replica its own."""
    if isinstance(value, dict):
        if set(value) == {"each"}:
            values = value["each"]
            return part(values[replica_id if len(values) > 1 else 0], replica_id)
        return {name: part(inner, replica_id) for name, inner in value.items()}
    return [part(inner, replica_id) for inner in value] if isinstance(value, list) else value


def close(value: Any, expected: Any) -> None:
    """Fail where numbers differ by more than float32's rounding, and other things at all."""
    if isinstance(expected, dict):
        assert isinstance(value, dict)
        assert value.keys() == expected.keys()
        for name in expected:
            close(value[name], expected[name])
    elif isinstance(expected, list):
        assert isinstance(value, list), (value, expected)
        assert len(value) == len(expected), (value, expected)
        for one, other in zip(value, expected, strict=True):
            close(one, other)
    elif isinstance(expected, float):
        assert value == pytest.approx(expected, rel=2e-5, abs=1e-6)
    else:
        assert value == expected


# ---- what is expected of n replicas -------------------------------------------------------------------


def numbers(n: int, value: Callable[[int], Any]) -> dict[str, Any]:
    return each(value(i) for i in range(n))


def steps(n: int, length: int, size: int) -> list[list[list[int]]]:
    """TensorFlow's split rule."""
    batches = [list(range(length))[start : start + size] for start in range(0, length, size)]
    return [[batch[i * -(-len(batch) // n) :][: -(-len(batch) // n)] for i in range(n)] for batch in batches]


def dealt(n: int) -> list[list[list[int]]]:
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    return [[batches[k + i] if k + i < len(batches) else [] for i in range(n)] for k in range(0, len(batches), n)]


def added(aggregation: str, n: int) -> dict[str, Any]:
    """10 with replica_id + 1 added on each replica."""
    given = [i + 1.0 for i in range(n)]
    by = {"NONE": given, "SUM": [sum(given)] * n, "MEAN": [sum(given) / n] * n, "ONLY_FIRST_REPLICA": [1.0] * n}
    values = each(10 + value for value in by[aggregation])
    return {"after": values, "returned": values, "read": values}


def metric(n: int) -> dict[str, Any]:
    totals, counts = [3.0, 6.0, 12.0][:n], [2.0, 1.0, 3.0][:n]
    return {
        "result": sum(totals) / sum(counts),
        "in_replica": each([1.5, 6.0, 4.0][:n]),
        "total": each(totals),
        "count": each(counts),
        "after_reset": 0.0,
    }


VALUES: dict[str, Callable[[int], Any]] = {
    "all_gather/gradient": lambda n: numbers(n, lambda i: [2.0 * n * (1 + 2 * i), 2.0 * n * (2 + 2 * i)]),
    "all_reduce/SUM/gradient": lambda n: numbers(n, lambda i: 2.0 * n * (2 + i)),
    "all_reduce/MEAN/gradient": lambda n: numbers(n, lambda i: 2.0 * (2 + i)),
    "all_reduce/SUM/nest": lambda n: {
        "a": each([sum(2.0 + i for i in range(n))] * n),
        "l": [
            each([[sum(1.0 + 2 * i for i in range(n)), sum(2.0 + 2 * i for i in range(n))]] * n),
            [each([sum(4.0 + 2 * i for i in range(n))] * n)],
        ],
    },
    "checkpoint/mirrored->plain": lambda n: {"saved": each([7.0] * n), "restored": 7.0},
    "checkpoint/onread_sum->onread_sum": lambda n: {
        "saved": numbers(n, lambda i: i + 1.0),
        "restored": each([(n + 1) / 2] * n),
    },
    # Two that TensorFlow's record has not: its `UpdateContext`, and `in_replica_update_context` of its Variables.
    "context/in_update": lambda n: [True, True, None],
    "update/with_components_of_others": lambda n: {
        "v": numbers(n, lambda i: i + 1.0),
        "total": numbers(n, lambda i: i + 11.0),
    },
    "from_function/context_and_steps": lambda n: {
        "contexts": [{"n": n, "pipes": 1, "id": 0, "per": 4}],
        "steps": [each(step) for step in dealt(n)],
    },
    "gather/axis0/(1, 2)x(2, 2)": lambda n: [row for i in range(n) for row in golden_cases.rows(i).tolist()],
    "loss/average_default": lambda n: numbers(n, lambda i: (3.0 + 6 * i) / (2 * n)),
    "merge_call/sum": lambda n: n * (n + 1) // 2,
    "metric/mean_in_run": metric,
    "mirrored/cross/assign_add/SUM": lambda n: each([12.0] * n),
    **{
        f"mirrored/replica/assign_add/{aggregation}": lambda n, aggregation=aggregation: added(aggregation, n)
        for aggregation in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
    },
    "on_read/assign_add_then_read/MEAN": lambda n: {
        "components": numbers(n, lambda i: i + 2.0),
        "in_replica": numbers(n, lambda i: i + 2.0),
        "cross": sum(i + 2.0 for i in range(n)) / n,
    },
    "on_read/cross_assign/SUM": lambda n: {"components": each([6.0 / n] * n)},
    "reduce/MEAN/axis_none_scalar": lambda n: sum(1.0 + 3 * i for i in range(n)) / n,
    "reduce/SUM/axis_none_scalar": lambda n: sum(1.0 + 3 * i for i in range(n)),
    "reduce/MEAN/axis0_empty_replica": lambda n: 4.0,
    "run/per_replica_input": lambda n: numbers(n, lambda i: 11.0 * (i + 1)),
    "run/returns_structure": lambda n: {
        "l": [each(range(n)), 1],
        "t": [each(2 * i for i in range(n))],
        "n": [each(range(n)), 0],
    },
    "update/basic": lambda n: {"v": each([6.0] * n), "r2": [6.0] * n},
    "values_fn/ids": lambda n: numbers(n, lambda i: n + 10 * i),
}
ONLY_TWO: dict[str, Callable[[int], Any]] = {"loss/average_empty_replica": lambda n: each([0.75, 0.0])}

# Exception types as in the record; the words that matter in each message.
ERRORS: dict[str, tuple[str, str]] = {
    "context/gather_in_replica": ("RuntimeError", r"cross-replica context.*all_gather"),
    "context/run_in_replica": ("RuntimeError", r"cross-replica context.*merge_call"),
    "context/set_strategy_in_scope": ("RuntimeError", "Must not be called inside"),
    "ctl/variable_outside_scope": ("ValueError", "created in this strategy's scope"),
    "dataset/next_in_replica": ("ValueError", r"next\(iterator\) should be called from outside of replica_fn"),
    "input_context/indivisible": ("ValueError", "`global_batch_size` 7 is not divisible by `num_replicas_in_sync` 2"),
    "mirrored/replica/assign_add_literal/SUM": ("ValueError", r"5\.0 cannot be reduced with the given reduce op"),
    "on_read/cross_assign_add/SUM": ("ValueError", "does not support `assign_add` in cross-replica context"),
    "run/args_not_tuple": ("ValueError", "positional args must be a list or tuple"),
}
# TensorFlow's InvalidArgumentError has no other counterpart than a ValueError that shows the shapes.
MISFITS = {
    "gather/nonaxis_mismatch": ("ValueError", r", 2\].*, 3\]"),
    "reduce/shape_mismatch_axis_none": ("ValueError", r"[\[(]4.*[\[(]2"),
}
# Only the controller sees all of these: elsewhere no one compares what the replicas' functions return or call.
OF_THE_CONTROLLER = {
    "loss/average_cross": ("RuntimeError", "in cross.replica context"),
    "merge_call/count_mismatch": ("RuntimeError", "different number of .*merge_call"),
    "per_replica/convert": ("ValueError", "using a PerReplica.*while not inside a replica context"),
    # TensorFlow's AssertionError says nothing; here it is a mistake in the call.
    "run/structure_mismatch": ("ValueError", r"differ in structure.*\[\*\] on replica 0.*\[\] on replica 1"),
}


def test_the_expectations_are_tensorflows_own():
    for name, expected in {**VALUES, **ONLY_TWO}.items():
        if name not in GOLDEN:
            continue
        record = golden(GOLDEN[name]["outputs"])
        if name == "from_function/context_and_steps":
            record["steps"] = [each(step) for step in record["steps"]]
        if isinstance(record, dict):
            # TensorFlow's case listed these itself.
            record.update({key: each(record[key]) for key in ("components", "total", "count") if key in record})
        wanted = expected(2)
        for replica_id in range(2):
            close(part(record, replica_id), part(wanted, replica_id))
    for name, (kind, _) in {**ERRORS, **OF_THE_CONTROLLER}.items():
        recorded = GOLDEN[name]["raises"]["type"]
        assert recorded == kind or (name, recorded) == ("run/structure_mismatch", "AssertionError")


def test_every_recorded_case_is_asked():
    asked = {*VALUES, *ONLY_TWO, *ERRORS, *MISFITS, *OF_THE_CONTROLLER, *ELSEWHERE}
    assert GOLDEN.keys() - asked == set()


ELSEWHERE = {
    *(
        name
        for name in GOLDEN
        if name.startswith(("ctl/sgd", "ctl/adam", "ctl/grad", "dataset/n", "repr/", "construct/"))
    ),
    *("context/default", "context/in_merge_call", "context/mix_strategies", "local_results/all"),
    *("cross_device_ops/accumulation_fn_max", "cross_device_ops/reduction_to_one_device"),
    "mirrored/outside_var_assign_in_run",
}


# ---- the places ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strategies() -> Iterator[Callable[..., Any]]:
    """Strategies of the controller on n CPU replicas, kept for the module."""
    made: dict[Any, Any] = {}

    def strategy(n: int, reduction: str = "MEAN") -> Any:
        if (n, reduction) not in made:
            made[n, reduction] = mnb.MirroredStrategy([f"cpu:{i}" for i in range(n)], gradient_reduction=reduction)
        return made[n, reduction]

    yield strategy
    for strategy_made in made.values():
        strategy_made.close()


def in_cell(pool: Any, expression: str) -> list[Any]:
    """The value of an expression over `golden_cases` and `strategy`, evaluated in a cell of every replica."""
    ran = run_cell(
        pool,
        f"import sys\nsys.path[:0] = [{str(HERE)!r}]\nimport golden_cases\nsys.path.remove({str(HERE)!r})\n"
        f"found = {expression}",
    )
    assert [failure.message for failure in ran.report.failures.values()] == []
    return [ran.values[replica_id]["found"] for replica_id in range(pool.size)]


TRAINING = {
    "ctl/sgd_divisible/n2": {"optimizer": "sgd"},
    "ctl/sgd_last_partial/n2": {"optimizer": "sgd"},
    "ctl/sgd_empty_replica/n2": {"optimizer": "sgd"},
    "ctl/adam/n2": {"optimizer": "adam"},
    "ctl/grad_accum2/n2_eager": {"optimizer": "sgd", "accumulated": 2},
}
# Under torchrun nobody ends a call that a peer does not make, or compares what functions return.
SCRIPT = [*VALUES, *ERRORS, *MISFITS]


@pytest.fixture(scope="module", params=[2, 3])
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every case gives each process of a script under torchrun."""
    folder = tmp_path_factory.mktemp("torchrun")
    inputs = {name: [GOLDEN[name]["inputs"], options] for name, options in TRAINING.items()}
    (folder / "asked.json").write_text(json.dumps([SCRIPT, inputs]))
    paths = os.pathsep.join([str(Path(mnb.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    launch([sys.executable, str(HERE / "golden_cases.py"), str(folder)], request.param, {"PYTHONPATH": paths}, SECONDS)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(request.param)]


def check_values(name: str, seen: list[Any], expected: Any) -> None:
    """`seen`: the case's outcome, by replica id."""
    for replica_id, found in enumerate(seen):
        assert "value" in found, f"replica {replica_id}: {found}"
        close(part(found["value"], replica_id), part(expected, replica_id))


def check_error(seen: list[Any], kind: str, message: str) -> None:
    for replica_id, found in enumerate(seen):
        assert "raises" in found, f"replica {replica_id}: {found}"
        assert kind in found["raises"], found
        assert re.search(message, found["message"], re.DOTALL), found["message"]


def on_a_replica(name: str, expected: Any) -> Any:
    """`expected` as a replica sees it where that is not only its own part of it."""
    if name == "update/basic":
        # A replica updates its own component, and has one result.
        return {**expected, "r2": expected["r2"][:1]}
    return expected


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", VALUES)
def test_values_in_the_controller(strategies, name, n):
    found = outcome(name, strategies(n))
    check_values(name, [found] * n, VALUES[name](n))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", VALUES)
def test_values_in_a_cell(replicas, name, n):
    seen = in_cell(replicas(n), f"golden_cases.outcome({name!r}, strategy)")
    check_values(name, seen, on_a_replica(name, VALUES[name](n)))


@pytest.mark.parametrize("name", VALUES)
def test_values_in_a_script_under_torchrun(script, name):
    check_values(name, [own[name] for own in script], on_a_replica(name, VALUES[name](len(script))))


def test_a_script_under_torchrun_is_a_replica_from_the_top(script):
    assert [own["context at the top"]["value"] for own in script] == [
        [i, len(script), True] for i in range(len(script))
    ]


@pytest.mark.parametrize("name", ONLY_TWO)
def test_values_of_two_replicas(strategies, replicas, name):
    expected = ONLY_TWO[name](2)
    check_values(name, [outcome(name, strategies(2))] * 2, expected)
    check_values(name, in_cell(replicas(2), f"golden_cases.outcome({name!r}, strategy)"), expected)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_in_the_controller(strategies, name, n):
    if n == 1 and name == "mirrored/replica/assign_add_literal/SUM":
        pytest.skip("one replica's sum of a number is the number")
    if n == 1 and name == "on_read/cross_assign_add/SUM":
        pytest.skip("with one replica there is one component to add to")
    check_error([outcome(name, strategies(n))], *ERRORS[name])


# A cell is a scope: what is made in it is mirrored.
IN_A_CELL = {name: error for name, error in {**ERRORS, **MISFITS}.items() if name != "ctl/variable_outside_scope"}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", IN_A_CELL)
def test_errors_in_a_cell(replicas, name, n):
    check_error(in_cell(replicas(n), f"golden_cases.outcome({name!r}, strategy)"), *IN_A_CELL[name])
    check_values("reduce/SUM/axis_none_scalar", in_cell(replicas(n), SUM_AGAIN), VALUES[SUM](n))


SUM = "reduce/SUM/axis_none_scalar"
SUM_AGAIN = f"golden_cases.outcome({SUM!r}, strategy)"


@pytest.mark.parametrize("name", {**ERRORS, **MISFITS})
def test_errors_in_a_script_under_torchrun(script, name):
    check_error([own[name] for own in script], *{**ERRORS, **MISFITS}[name])


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", {**MISFITS, **OF_THE_CONTROLLER})
def test_errors_that_the_controller_sees_and_the_session_survives(strategies, name, n):
    strategy = strategies(n)
    check_error([outcome(name, strategy)], *{**MISFITS, **OF_THE_CONTROLLER}[name])
    check_values(SUM, [outcome(SUM, strategy)], VALUES[SUM](n))


# ---- run: what is one value and what one a replica ----------------------------------------------------


def test_a_structure_of_results_comes_back_with_a_per_replica_a_leaf(strategies):
    value = golden_cases.CASES["run/returns_structure"](strategies(2))
    assert isinstance(value["n"], golden_cases.Point)
    assert isinstance(value["t"], tuple)
    assert (value["l"][1], value["n"].y) == (1, 0)
    assert isinstance(value["l"][0], mnb.PerReplica)


def test_local_results_are_one_tuple_entry_a_replica(strategies, replicas):
    found = outcome("local_results/all", strategies(2))["value"]
    assert found == golden(GOLDEN["local_results/all"]["outputs"])
    for replica_id, seen in enumerate(in_cell(replicas(2), "golden_cases.outcome('local_results/all', strategy)")):
        own = 1.0 + replica_id
        assert seen["value"] == [[own], [3.0], [{"a": own}], [[own, 3]]]


# ---- contexts -----------------------------------------------------------------------------------------


def test_without_a_strategy_there_is_a_default_one_with_one_replica():
    record = GOLDEN["context/default"]["outputs"]
    context = mnb.get_replica_context()
    assert (mnb.has_strategy(), mnb.in_cross_replica_context()) == (record["has_strategy"], record["in_cross"])
    assert context.replica_id_in_sync_group == record["replica_context"]["id"]
    assert context.num_replicas_in_sync == mnb.get_strategy().num_replicas_in_sync == record["n"]
    assert mnb.get_strategy() is context.strategy


@pytest.mark.parametrize("n", [1, 2, 3])
def test_merge_fn_is_in_cross_replica_context(strategies, replicas, n):
    (expected,) = GOLDEN["context/in_merge_call"]["outputs"]
    expected = {**expected, "n": n}
    (found,) = outcome("context/in_merge_call", strategies(n))["value"]
    assert part(found, 0) == expected
    for seen in in_cell(replicas(n), "golden_cases.outcome('context/in_merge_call', strategy)"):
        assert seen["value"] == [expected]


def test_strategies_cannot_be_mixed(strategies):
    with strategies(1).scope(), strategies(1).scope():
        pass
    with strategies(1).scope(), pytest.raises(RuntimeError, match=r"Mixing different .*Strategy objects"):
        strategies(2).scope().__enter__()


# ---- construction -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_strategy_knows_its_devices(strategies, replicas, n):
    record = {"n": n, "worker_devices": n, "parameter_devices": n, "cluster_resolver": None}
    assert outcome("construct/two", strategies(n))["value"] == record
    assert list(strategies(n).extended.worker_devices) == [f"cpu:{i}" for i in range(n)]
    assert [seen["value"] for seen in in_cell(replicas(n), "golden_cases.outcome('construct/two', strategy)")] == [
        record
    ] * n


def test_one_device_gives_plain_values():
    record = golden(GOLDEN["construct/one_device"]["outputs"])
    strategy = mnb.OneDeviceStrategy("cpu:1")
    value = strategy.run(lambda x: x + 1, args=(torch.tensor(2.0),))
    assert isinstance(value, torch.Tensor)
    assert (strategy.num_replicas_in_sync, float(value)) == (record["n"], record["run"])
    assert float(strategy.reduce("SUM", value, axis=None)) == record["red"]
    assert [str(device) for device in strategy.extended.worker_devices] == ["cpu:1"]


def test_several_strategies_in_one_process_do_not_disturb_each_other():
    # TensorFlow's fail here, and every collective of the process after them (the record).
    def summed() -> Any:
        context = mnb.get_replica_context()
        return context.all_reduce("SUM", torch.tensor(1.0 + context.replica_id_in_sync_group))

    def gathered() -> Any:
        context = mnb.get_replica_context()
        return context.all_gather(torch.tensor([context.replica_id_in_sync_group]), axis=0)

    devices = ["cpu:0", "cpu:1"]
    wanted = golden(GOLDEN["construct/two_strategies_one_process"]["outputs"]["1 all_reduce(a)"])
    with mnb.MirroredStrategy(devices) as a, mnb.MirroredStrategy(devices) as b:
        assert plain(a.run(summed)) == wanted
        assert plain(b.run(gathered)) == each([[0, 1], [0, 1]])
        assert plain(a.run(summed)) == wanted
        with mnb.MirroredStrategy(devices) as c:
            assert plain(c.run(summed)) == wanted
        assert plain(a.run(summed)) == wanted


@pytest.mark.skipif(not hasattr(mnb, "ReductionToOneDevice"), reason="cross-device ops cannot be chosen yet")
def test_reducing_on_one_device_gives_the_same_numbers():
    record = golden(GOLDEN["cross_device_ops/reduction_to_one_device"]["outputs"])

    def fn() -> Any:
        context = mnb.get_replica_context()
        i = context.replica_id_in_sync_group
        return context.all_reduce("SUM", [torch.tensor(2.0 + i), torch.tensor(4.0 + 2 * i)]), torch.tensor(2.0 + i)

    ops = mnb.ReductionToOneDevice()
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops) as strategy:
        reduced, value = strategy.run(fn)
        assert plain(reduced) == record["all_reduce"]
        assert plain(strategy.reduce("MEAN", value, axis=None)) == record["reduce"]
    with mnb.MirroredStrategy(
        ["cpu:0", "cpu:1"], cross_device_ops=mnb.ReductionToOneDevice(accumulation_fn=_largest)
    ) as strategy:
        largest = strategy.run(lambda: mnb.get_replica_context().all_reduce("SUM", torch.tensor(own_value())))
        assert plain(largest) == golden(GOLDEN["cross_device_ops/accumulation_fn_max"]["outputs"])


def _largest(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).amax(0)


def own_value() -> float:
    return 3.0 + float(mnb.get_replica_context().replica_id_in_sync_group)


# ---- input --------------------------------------------------------------------------------------------

DATASETS = [name for name in GOLDEN if name.startswith("dataset/n") and GOLDEN[name]["replicas"]]


def test_the_split_rule_is_tensorflows():
    for name in DATASETS:
        if name != "dataset/next_in_replica":
            case = GOLDEN[name]
            assert steps(case["replicas"], case["inputs"]["range"], case["inputs"]["batch"]) == case["outputs"]


@pytest.mark.parametrize(("length", "size"), [(10, 4), (9, 8), (7, 3)])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_global_batches_in_controller_and_cell(strategies, replicas, n, length, size):
    expected = steps(n, length, size)
    dataset = strategies(n).experimental_distribute_dataset(torch.arange(length), batch_size=size)
    assert [part(plain(list(dataset)), i) for i in range(n)] == [[step[i] for step in expected] for i in range(n)]
    assert len(dataset) == len(expected)
    loop = f"strategy.experimental_distribute_dataset(golden_cases.torch.arange({length}), batch_size={size})"
    seen = in_cell(replicas(n), f"golden_cases.plain(list({loop}))")
    assert seen == [[step[i] for step in expected] for i in range(n)]


def test_four_replicas_share_nine_examples_as_in_tensorflow(strategies):
    # What is distributed needs no replicas yet.
    record = GOLDEN["dataset/n4/range9.batch8"]["outputs"]
    dataset = strategies(4).experimental_distribute_dataset(torch.arange(9), batch_size=8)
    assert plain(list(dataset)) == [each(step) for step in record]


def test_the_element_spec_prints_as_in_tensorflow(strategies):
    dataset = strategies(2).experimental_distribute_dataset(torch.arange(10), batch_size=4)
    assert repr(dataset.element_spec) == GOLDEN["repr/element_spec"]["outputs"].replace("tf.int64", "torch.int64")


def test_a_per_replica_prints_as_in_tensorflow_with_torchs_tensors(strategies):
    # TensorFlow's layout, PyTorch's tensors.
    value = strategies(2).run(lambda: torch.tensor(mnb.get_replica_context().replica_id_in_sync_group))
    layout = re.sub(r"<tf.Tensor: .*numpy=(\d)>", r"tensor(\1)", GOLDEN["repr/per_replica"]["outputs"])
    assert repr(value) == layout


# ---- training -----------------------------------------------------------------------------------------


def loop(inputs: dict[str, Any]) -> dict[str, Any]:
    """The training loop with a mean loss on one device, in plain PyTorch."""
    x, y, size = torch.tensor(inputs["X"]), torch.tensor(inputs["Y"]), inputs["global_batch"]
    line = golden_cases.Line()
    learner = torch.optim.SGD(line.parameters(), 0.1)
    trajectory, losses = [], []
    for _ in range(inputs["epochs"]):
        for start in range(0, len(x), size):
            errors = (line(x[start : start + size]) - y[start : start + size]) ** 2
            errors.mean().backward()
            learner.step()
            learner.zero_grad()
            losses.append(errors.sum().item() / size)
            trajectory.append([line.w.item(), line.b.item()])
    return {"losses": losses, "trajectory": trajectory}


def check_training(found: dict[str, Any], expected: dict[str, Any], n: int) -> None:
    for key in ("losses", "trajectory"):
        close(found[key], [[float(v) for v in row] if isinstance(row, list) else row for row in expected[key]])
    for replica_id in range(n):
        close(part(found["replica_w"], replica_id), expected["trajectory"][-1][0])
    close([found["w"], found["b"]], expected["trajectory"][-1])


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", TRAINING)
def test_tensorflows_loop_with_scaled_losses_gives_its_numbers(strategies, name, n):
    record = GOLDEN[name]
    found = plain(train(strategies(n, "SUM"), record["inputs"], **TRAINING[name]))
    check_training(found, record["outputs"], n)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", TRAINING)
def test_tensorflows_loop_gives_its_numbers_in_a_cell(replicas, name, n):
    record = GOLDEN[name]
    seen = in_cell(replicas(n), f"golden_cases.train_summed({record['inputs']!r}, {TRAINING[name]!r})")
    for own in seen:
        check_training(own, record["outputs"], 1)


@pytest.mark.parametrize("name", TRAINING)
def test_tensorflows_loop_gives_its_numbers_under_torchrun(script, name):
    for own in script:
        check_training(own[name]["value"], GOLDEN[name]["outputs"], 1)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", ["ctl/sgd_divisible/n2", "ctl/sgd_last_partial/n2", "ctl/sgd_empty_replica/n2"])
def test_a_mean_loss_trains_as_on_one_device(strategies, replicas, name, n):
    # PyTorch's mean, exact on partial and empty batches, where TensorFlow's loop divides by the full batch size.
    inputs = GOLDEN[name]["inputs"]
    expected = loop(inputs)
    check_training(plain(train(strategies(n), inputs, "sgd", summed=False)), expected, n)
    seen = in_cell(replicas(n), f"golden_cases.plain(golden_cases.train(strategy, {inputs!r}, 'sgd', summed=False))")
    for own in seen:
        check_training(own, expected, 1)


def test_a_variable_made_outside_the_scope_is_not_shared(strategies):
    # TensorFlow's counts 1 + 1 + 1 in one process's variable. Here a replica has a process of its own: what a function
    # captures that is not mirrored travels by value and what a replica does to its copy is refused, or stays there.
    found = outcome("mirrored/outside_var_assign_in_run", strategies(2))
    assert found.get("value", 1.0) == 1.0
    assert "value" in found or "ValueError" in found["raises"]
