"""The bench in the user's hands: tables from strategies, cells, magics and the command line; and advice."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driving import run_cell
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from traitlets.config import Config

import mirror_nb as mnb
from mirror_nb import advice
from mirror_nb.bench import AllReduceTable, StepTable, collectives, command, steps
from mirror_nb.bench.collectives import AllReduceRow, all_reduce, sizes_to
from mirror_nb.bench.replicas import OfPool
from mirror_nb.bench.steps import StepRow, _advice, _Found
from mirror_nb.collectives.handles import Finished
from mirror_nb.collectives.measuring import Trial
from mirror_nb.devices import resolve
from mirror_nb.errors import DeviceError, UsageError
from mirror_nb.machine.memory import Memory
from mirror_nb.pool.local import LocalPool

OPS = ("shared_memory", "hierarchical_copy", "one_device", "gloo")


class Wrong(mnb.CrossDeviceOps):
    """Sums nothing."""

    def start(self, op, flat):
        return Finished()

    def unfit_for(self, devices):
        return None


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 3))


# All-reduces


def test_results_that_cannot_be_opened_here_or_that_one_replica_lacks_leave_no_descriptor(replicas):
    class Closed:
        def __init__(self) -> None:
            self.rows = torch.zeros(1 << 20)

        def __setstate__(self, state: dict[str, Any]) -> None:
            raise OSError("not here")

    def fails_on_one(strategy: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            raise OSError("only here")
        return torch.zeros(1 << 20)

    pool, rounds = replicas(2), 8
    for called in (lambda strategy: Closed(), fails_on_one):
        OfPool(pool).call(lambda strategy: None)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(rounds):
            with pytest.raises(OSError, match=r"(not|only) here"):
                OfPool(pool).call(called)
        # Pools that other tests have done with may begin and end replicas of their own meanwhile.
        assert len(os.listdir("/proc/self/fd")) < before + rounds


@pytest.mark.parametrize("n", [2, 3])
def test_every_op_that_fits_is_timed_and_its_sums_are_checked(replicas: Callable[[int], LocalPool], n):
    table = all_reduce(replicas(n), sizes=[4, 1024, 2**18 + 7], seconds=0.01)
    assert [(row.nbytes, row.op) for row in table.rows] == [(s, op) for s in (4, 1024, 2**18 + 4) for op in OPS]
    assert all(row.correct and 0 < row.p50_us <= row.p95_us for row in table.rows)
    assert table.devices == tuple(f"cpu:{i}" for i in range(n))
    assert table.fastest(1024) in OPS
    with pytest.raises(UsageError, match="nothing of 5 bytes was measured; there are: 4, 1024, 262148"):
        table.fastest(5)


def test_without_a_word_it_goes_to_256_mib_or_as_far_as_memory_allows(monkeypatch):
    def largest(devices: str, gib: float) -> int:
        monkeypatch.setattr(collectives, "usable", lambda: Memory(int(gib * 2**30), 0))
        return collectives._sizes(None, resolve(devices, 8))[-1] >> 20

    assert [largest("cpu:0,cpu:1", gib) for gib in (24, 4, 3.9, 2, 0.9)] == [256, 256, 64, 64, 16]
    assert [largest(",".join(f"cpu:{i}" for i in range(8)), gib) for gib in (24, 4)] == [256, 64]
    assert largest("cuda:0,cuda:1", 1) == 256


def test_an_op_that_sums_wrongly_is_shown_up(replicas):
    table = all_reduce(replicas(2), sizes=[1024, 2**20], ops=["one_device", Wrong()], seconds=0.01)
    assert [(row.op, row.correct) for row in table.rows] == [("one_device", True), ("Wrong", False)] * 2
    assert [table.fastest(s) for s in (1024, 2**20)] == ["one_device"] * 2
    assert "NO" in repr(table)


def test_bandwidths_are_those_of_nccl_tests():
    row = AllReduceRow.of("gloo", 4_000_000, Trial((1000.0,) * 3, True), 4)
    assert (row.algorithm_gbps, row.bus_gbps) == (4.0, 6.0)


def test_a_strategy_is_measured_and_goes_on_as_it_was():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"], "gloo") as strategy:
        table = mnb.bench.all_reduce(strategy, sizes=[1024], seconds=0.01)
        assert [row.op for row in table.rows] == list(OPS)
        found = mnb.bench.steps(strategy, make, shape=(6,), batch=9, seconds=0.05)
        assert found.batch == 9
        assert type(strategy.cross_device_ops).__name__ == "GlooAllReduce"
        assert strategy.run(lambda: type(mnb.get_strategy().cross_device_ops).__name__) == "GlooAllReduce"


def test_a_cell_measures_on_every_replica_with_one_result(replicas):
    source = """
import mirror_nb as mnb
table = mnb.bench.all_reduce(strategy, sizes=[4096], ops=["gloo", "one_device"], seconds=0.01)
text = repr(table)
"""
    ran = run_cell(replicas(2), source, timeout=60)
    assert ran.report.clean, ran.report.failures
    assert ran.values[0]["text"] == ran.values[1]["text"]


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"sizes": []}, UsageError, "`sizes` is empty"),
        ({"sizes": [3]}, UsageError, "an fp32 takes 4 bytes"),
        ({"sizes": ["1K"]}, UsageError, "`sizes` holds '1K'; it takes whole numbers of bytes"),
        ({"sizes": [1024.0]}, UsageError, "`sizes` holds 1024.0; it takes whole numbers"),
        ({"sizes": 1.5}, UsageError, "`sizes` holds 1.5; it takes whole numbers"),
        ({"sizes": [4, 2**50]}, UsageError, "`sizes` holds 1048576 GiB; each of 2 replicas has at most .* of memory"),
        ({"seconds": "1"}, UsageError, "`seconds` is '1'; it must be a number"),
        ({"seconds": 0}, UsageError, "`seconds` is 0"),
        ({"seconds": float("inf")}, UsageError, "`seconds` is inf; it must be above 0, and have an end"),
        ({"ops": "glue"}, UsageError, "no cross-device op 'glue'"),
        ({"ops": []}, UsageError, "`ops` is empty"),
        ({"ops": ["gloo", "gloo"]}, UsageError, "`ops` has gloo twice"),
        ({"ops": ["gloo", "auto"]}, UsageError, "takes one of shared_memory, .*: name those"),
        ({"ops": [3]}, UsageError, "`ops` holds 3"),
        ({"ops": 3}, UsageError, "`ops` holds 3"),
        ({"ops": mnb.GlooAllReduce}, UsageError, "`ops` holds .*GlooAllReduce'>; it takes cross-device ops"),
        ({"ops": ["nccl"]}, DeviceError, "it is for GPUs; these can"),
    ],
)
def test_what_cannot_be_measured_is_refused(replicas, wrong, error, said):
    with pytest.raises(error, match=said):
        all_reduce(replicas(2), **wrong)


def test_a_single_op_and_a_single_size_need_no_list(replicas):
    for ops in ("gloo", mnb.GlooAllReduce()):
        (row,) = all_reduce(replicas(2), ops=ops, sizes=1024, seconds=0.01).rows
        assert row.op in ("gloo", "GlooAllReduce")


def test_sizes_may_be_numbers_of_numpys(replicas):
    table = all_reduce(replicas(2), ops="gloo", sizes=np.array([8, 16]), seconds=0.01)
    assert [row.nbytes for row in table.rows] == [8, 16]


def test_one_replica_has_nobody_to_reduce_with(replicas):
    for what in (replicas(1), mnb.OneDeviceStrategy("cpu:0")):
        with pytest.raises(UsageError, match=r"one replica .* reduces with nobody"):
            all_reduce(what)
    with pytest.raises(UsageError, match="pass a strategy"):
        all_reduce(3)


# Steps


def test_a_models_steps_are_timed_with_each_op_without_and_alone(replicas):
    pool = replicas(2)
    table = steps(pool, make, shape=(6,), batch=8, seconds=0.05)
    ways = [row.way for row in table.rows]
    assert ways[:5] == [*OPS, "no synchronisation"]
    assert ways[5].startswith("one process with ")
    assert all(0 < row.p50_ms <= row.p95_ms for row in table.rows)
    assert all(row.examples_per_second * row.p50_ms == pytest.approx(8000) for row in table.rows)
    assert table.fastest().way in OPS
    # The replicas train as before.
    source = """
import torch
torch.manual_seed(0)
layer = torch.nn.Linear(1, 1, bias=False)
(layer(torch.ones(1, 1)) * (1 + replica_id)).sum().backward()
gradient = layer.weight.grad.item(), type(strategy.cross_device_ops).__name__
"""
    ran = run_cell(pool, source)
    assert [values["gradient"] for values in ran.values.values()] == [(1.5, "SharedMemoryAllReduce")] * 2


class Learning(nn.Linear):
    def forward(self, x):
        assert self.training or not torch.is_grad_enabled()
        return super().forward(x)


def test_a_module_is_measured_by_a_copy_that_is_trained(replicas):
    module = nn.Sequential(make(), Learning(3, 2)).eval()
    before = [parameter.clone() for parameter in module.parameters()]
    steps(replicas(2), module, shape=(6,), ops=["gloo"], seconds=0.02, optimizer="Adam")
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not module.training


def test_a_function_that_returns_a_network_of_somebodys_has_a_copy_of_it_trained():
    inputs = torch.ones(4, 6)
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as two:
        with two.scope():
            mirrored = make()
        for network in (mirrored, make()):
            before = copy.deepcopy(network.state_dict())
            steps(two, lambda network=network: (network, inputs), ops="gloo", seconds=0.02)
            for name, value in network.state_dict().items():
                assert torch.equal(value, before[name])


def test_the_trial_of_an_optimizer_reduces_nothing_and_finds_no_replicas_that_differ(capfd):
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as two:
        steps(two, make(), shape=(6,), ops="gloo", seconds=0.02)
    assert "different values" not in capfd.readouterr().err


class Asked(Wrong):
    def start(self, op, flat):
        raise RuntimeError("it was asked")


@pytest.mark.parametrize("model", [make, make()])
def test_steps_that_are_timed_with_an_op_go_through_it(replicas, model):
    with pytest.raises(RuntimeError, match="it was asked"):
        steps(replicas(2), model, shape=(6,), ops=Asked(), seconds=0.02)


class Changing(nn.Linear):
    first: torch.Tensor | None = None

    def forward(self, x):
        self.first = self.weight.detach().clone() if self.first is None else self.first
        if not torch.equal(self.first, self.weight):
            raise RuntimeError("it has learned")
        return super().forward(x)


def test_steps_that_are_timed_change_the_copy(replicas):
    with pytest.raises(RuntimeError, match="it has learned"):
        steps(replicas(2), Changing(6, 2), shape=(6,), ops=["gloo"], seconds=0.02)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, scale):
        return {"loss": (self.layer(x) * scale).square().mean()}


@pytest.mark.parametrize(
    "made",
    [
        lambda: (make(), torch.randn(7, 6)),
        lambda: (make(), torch.randn(7, 6), lambda out: out.sum()),
        lambda: (Named(), {"x": torch.randn(7, 2), "scale": torch.tensor(2.0)}),
        lambda: (Named(), (torch.randn(7, 2), torch.ones(7, 1))),
    ],
)
def test_a_function_may_bring_its_inputs_and_its_loss(replicas, made):
    assert steps(replicas(2), made, ops=["shared_memory"], seconds=0.02).batch == 7


def test_a_model_may_learn_its_shapes_from_the_inputs(replicas):
    assert steps(replicas(2), lambda: nn.LazyLinear(3), shape=(6,), ops=["gloo"], seconds=0.02).batch == 64


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_random_inputs_are_of_the_weights_dtype(replicas, dtype):
    assert steps(replicas(2), nn.Linear(6, 2).to(dtype), shape=(6,), ops=["gloo"], seconds=0.02).batch == 64


def test_a_model_that_takes_other_inputs_is_told_how_to_bring_them(replicas):
    pool = replicas(2)
    with pytest.raises(RuntimeError, match="indices") as raised:
        steps(pool, nn.Embedding(10, 4), shape=(6,), ops=["gloo"], seconds=0.02)
    pool.mend()
    told = "\n".join(raised.value.__notes__)
    assert "the model was given random float32 numbers of shape (2, 6); for others pass a function" in told


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (3, {}, "`model` is 3; pass an nn.Module"),
        (make, {}, "Give the shape of one example"),
        (lambda: 3, {}, "the model's function returned 3"),
        (lambda: (make(), torch.ones(1, 6)), {}, "1 examples, too few for 2 replicas"),
        (lambda: (make(), (torch.ones(2, 6), torch.ones(3, 6))), {}, "all tensors need the same first size"),
        (lambda: (make(), torch.ones(4, 6), 3), {}, "returned the loss 3; it must be a function"),
        (lambda: make().requires_grad_(False), {"shape": (6,)}, "the model's parameters are all frozen"),
        (lambda: DistributedDataParallel(make()), {"shape": (6,)}, "return the network without it"),
        (lambda: nn.Sequential(fully_shard(make())), {"shape": (6,)}, "by DistributedDataParallel or FSDP"),
        (make, {"shape": "6"}, "`shape` is '6'; it is that of one example"),
        (make, {"shape": (6.0,)}, r"`shape` is \(6.0,\); it is that of one example"),
        (make, {"batch": 2.5}, "`batch` is 2.5; it must be a whole number"),
        (make, {"batch": 1}, "`batch` is 1, fewer examples than the 2 replicas"),
        (make, {"optimizer": "LBFGS"}, "torch.optim has no 'LBFGS' to try; it has: .*SGD"),
        (make, {"seconds": -1}, "`seconds` is -1"),
        (
            lambda: (nn.Identity(), torch.ones(4, 2), lambda out: out.sum()),
            {},
            "optimizer got an empty parameter list",
        ),
    ],
)
def test_a_model_that_cannot_be_measured_is_refused(replicas, model, options, said):
    pool = replicas(2)
    with pytest.raises(ValueError, match=said):
        steps(pool, model, seconds=options.pop("seconds", 0.02), **options)
    pool.mend()


# Tables


ROWS = (
    AllReduceRow("gloo", 1024, 200.4, 300.0, 0.005, 0.005, True),
    AllReduceRow("<own>", 1024, 20.44, 30.0, 0.05, 0.05, True),
    AllReduceRow("gloo", 2**20, 2000.0, 3000.0, 0.5, 0.5, False),
)
TABLE = AllReduceTable(ROWS, ("cpu:0", "cpu:1"))
STEPS = StepTable(
    (StepRow("gloo", 4.0, 5.0, 16_000), StepRow("one process with 2 threads", 3.0, 3.5, 21_333)),
    ("cpu:0", "cpu:1"),
    64,
    ("gloo",),
    ("be wise",),
)


def test_a_table_reads_well_in_a_terminal():
    assert repr(TABLE).splitlines() == [
        "all-reduce of fp32 over 2 replicas (cpu:0, cpu:1); *: the fastest of its size",
        "size   op     p50 µs  p95 µs  algorithm GB/s  bus GB/s  correct",
        "1 KiB  gloo      200     300           0.005     0.005      yes",
        "1 KiB  <own>  * 20.4      30            0.05      0.05      yes",
        "1 MiB  gloo     2000    3000             0.5       0.5       NO",
        "<own> is the fastest op for small tensors (1 KiB): cross_device_ops=<own>(...)",
    ]
    assert repr(STEPS).splitlines()[-2:] == [
        "one process with 2 threads       3     3.5       21333",
        "be wise",
    ]


@pytest.mark.parametrize(
    ("microseconds", "said"),
    [
        (
            {"gloo": (200, 300, 4000), "shared_memory": (20, 30, 400)},
            "shared_memory is the fastest op for all sizes measured: "
            "cross_device_ops='shared_memory', the default here",
        ),
        (
            {"gloo": (20, 30, 400), "shared_memory": (200, 29, 4000)},
            "gloo is the fastest op for small tensors (1 KiB to 256 KiB) and for large tensors (1 MiB): "
            "cross_device_ops='gloo'",
        ),
        # One size lost by little, one won by far.
        (
            {"gloo": (10, 90, 400), "shared_memory": (20, 30, 4000)},
            "shared_memory is the fastest op for small tensors (1 KiB to 256 KiB), gloo for large tensors (1 MiB): "
            "cross_device_ops='shared_memory' or cross_device_ops='gloo'; 'auto' takes the fastest for each size",
        ),
    ],
)
def test_the_bench_ends_with_the_fastest_ops_and_the_argument_that_chooses_them(microseconds, said):
    rows = [
        AllReduceRow.of(op, nbytes, Trial((float(each),) * 3, True), 2)
        for op, times in microseconds.items()
        for nbytes, each in zip((2**10, 2**18, 2**20), times, strict=True)
    ]
    table = AllReduceTable(tuple(rows), ("cpu:0", "cpu:1"), "shared_memory")
    assert table.advice == (said,)
    assert repr(table).splitlines()[-1] == said
    (shown,) = replace(table, in_notebook=True).advice
    assert "%mirror restart --ops " in shown
    assert "cross_device_ops" not in shown
    assert ("'auto'" in said) == ("--ops auto takes" in shown)


def test_a_table_reads_well_in_a_notebook():
    found = TABLE._repr_html_()
    assert "&lt;own&gt;" in found
    # One best of each size, of what was right.
    assert found.count("font-weight:bold") == 1
    assert "(cpu:0, cpu:1); shaded: the fastest of its size</div>" in found
    assert "cross_device_ops=&lt;own&gt;(...)</div>" in found
    assert "<div>be wise</div>" in STEPS._repr_html_()


def test_a_table_is_data_and_a_picture():
    assert list(TABLE.to_pandas()["p50_us"]) == [200.4, 20.44, 2000.0]
    assert list(STEPS.to_pandas()["way"]) == ["gloo", "one process with 2 threads"]
    assert [axes.get_title("left") for axes in TABLE.plot().axes] == ["time, µs: median to p95", "bus bandwidth, GB/s"]
    assert [axes.get_title("left") for axes in STEPS.plot().axes] == ["a training step, ms"]
    picture, told = TABLE.plot()._repr_png_()
    assert picture.startswith(b"\x89PNG")
    assert told["alt"].startswith("Time and bus bandwidth of all-reduces over their size")
    assert STEPS.plot()._repr_png_()[1]["alt"].endswith("gloo 4, one process with 2 threads 3")
    ticks = TABLE.plot().axes[0].yaxis.get_major_formatter()
    assert [ticks(us) for us in (0.5, 20, 6000)] == ["0.5", "20", "6,000"]
    assert AllReduceTable(ROWS[2:], ()).advice == ()
    for empty in (AllReduceTable((), ()), StepTable((), (), 1, ())):
        with pytest.raises(UsageError, match="nothing to plot"):
            empty.plot()


# Advice


def found(**ways: float) -> _Found:
    times = {name.replace("_process", " process"): [ms] * 3 for name, ms in ways.items()}
    return _Found(times, 64, "one process", "gloo", 2**20, None)


def test_nothing_is_said_where_nothing_is_wrong():
    assert _advice(found(gloo=10.0, shared_memory=9.5, one_process=12.0), ("gloo", "shared_memory"), 2, "SGD") == ()


def test_what_was_measured_to_be_faster_is_said_with_the_numbers():
    measured = found(gloo=44.0, shared_memory=30.0, one_process=20.0)
    measured.ways["gloo, buckets of 25 MiB"] = [35.0]
    said = _advice(
        _Found(measured.ways, 64, "one process", "gloo", 2**20, (15.9, 4.7)), ("gloo", "shared_memory"), 2, "Adam"
    )
    assert said == (
        "2 replicas are slower than one process: 30.0 ms a step against 20.0 ms. The model or the batch is too small "
        "to share: train with OneDeviceStrategy, or on larger batches",
        "a step takes 44.0 ms by gloo, and 30.0 ms with cross_device_ops='shared_memory'",
        "gradient buckets of 1 MiB are too small: a step takes 44.0 ms, and 35.0 ms with 25 MiB: "
        "CommunicationOptions(bytes_per_pack=26214400)",
        "optimizer.step() takes 15.9 ms of a step's 44.0 ms, and 4.7 ms when it is fused: "
        "torch.optim.Adam(..., fused=True)",
    )


def test_a_gain_that_nobody_would_notice_is_not_worth_a_word():
    assert advice.could_be_fused("Adam", 1.0, 0.5, 100.0) is None
    assert advice.could_be_fused("Adam", 10.0, 9.5, 20.0) is None
    assert advice.other_ops("gloo", 10.0, "gloo", 1.0) is None
    assert advice.buckets_too_small(1, 10.0, 2, 9.5) is None


def test_one_process_is_told_by_its_threads():
    assert [advice.one_process(n) for n in (1, 2)] == ["one process with 1 thread", "one process with 2 threads"]


def test_small_buckets_are_compared_with_larger_ones(replicas):
    source = """
import mirror_nb as mnb
small = mnb.MirroredStrategy(communication_options=mnb.CommunicationOptions(bytes_per_pack=100))
table = mnb.bench.steps(small, make, shape=(6,), ops=["shared_memory"], seconds=0.02)
ways = [row.way for row in table.rows]
mnb.MirroredStrategy(communication_options=mnb.CommunicationOptions())
"""
    ran = run_cell(replicas(2), source, {"make": make}, timeout=60)
    assert ran.report.clean, ran.report.failures
    assert "shared_memory, buckets of 25 MiB" in ran.values[0]["ways"]


def test_in_a_cell_the_op_in_use_may_be_among_those_that_are_measured(replicas):
    source = """
import torch
import mirror_nb as mnb
net = torch.nn.Linear(2, 1)
mnb.bench.all_reduce(strategy, sizes=[4096], ops=[strategy.cross_device_ops, "gloo"], seconds=0.01)
net(torch.full((1, 2), float(replica_id))).sum().backward()
gradient = net.weight.grad.tolist()
"""
    ran = run_cell(replicas(2), source, timeout=60)
    assert ran.report.clean, ran.report.failures
    assert [values["gradient"] for values in ran.values.values()] == [[[0.5, 0.5]]] * 2


def test_steps_that_one_replica_makes_by_itself_are_none_of_the_trainings(replicas):
    source = """
import mirror_nb as mnb
mnb.bench.steps(strategy, make, shape=(6,), ops=["gloo"], seconds=0.02)
"""
    pool = replicas(2)
    timeline = pool.timeline()
    timeline.forget()
    assert run_cell(pool, source, {"make": make}, timeout=60).report.clean
    timeline.update()
    assert timeline.last_step == 0


# The magic


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    made.extension_manager.load_extension("mirror_nb")
    yield made
    made.extension_manager.unload_extension("mirror_nb")
    InteractiveShell.clear_instance()


def test_the_magic_returns_the_table(shell):
    shell.run_line_magic("mirror", "start --devices cpu:0,cpu:1")
    table = shell.run_line_magic("mirror", "bench --largest 4K --seconds 0.01 --ops gloo,shared_memory")
    assert [(row.nbytes, row.op) for row in table.rows] == [(s, o) for s in (1024, 4096) for o in ("gloo", OPS[0])]
    shell.run_cell("import torch\nnet = torch.nn.Linear(3, 2)\ndef build(): return torch.nn.Linear(3, 2)")
    for name in ("net", "build"):
        steps = shell.run_line_magic("mirror", f"bench --model {name} --shape 3 --ops gloo --seconds 0.02 --batch 4")
        assert steps.batch == 4
    with pytest.raises(UsageError, match="--model nothing: the notebook has no such name"):
        shell.run_line_magic("mirror", "bench --model nothing")
    with pytest.raises(UsageError, match="what does the model take") as caught:
        shell.run_line_magic("mirror", "bench --model build")
    assert "Traceback" not in "".join(caught.value._render_traceback_())
    with pytest.raises(UsageError, match="--shape: for the steps of a --model; name one"):
        shell.run_line_magic("mirror", "bench --shape 3")
    with pytest.raises(UsageError, match="--largest: a model has tensors of its own sizes; leave it out"):
        shell.run_line_magic("mirror", "bench --model net --shape 3 --largest 4K")


def test_without_replicas_the_magic_measures_on_two_of_its_own(shell, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    shell.run_line_magic("mirror", "stop")
    for devices, n in (("", 2), (" --devices cpu:0,cpu:1,cpu:2", 3)):
        table = shell.run_line_magic("mirror", f"bench --largest 1K --seconds 0.01 --ops gloo{devices}")
        assert table.devices == tuple(f"cpu:{i}" for i in range(n))
        assert shell.run_line_magic("mirror", "status") is None
        assert shell.magics_manager.registry["MirrorMagics"].session.pool is None
    for wrong, said in (
        ("--devices cpu:0", "one replica \\(cpu:0\\) reduces with nobody; measure on several, such as --devices"),
        ("--ops glue", "no cross-device op 'glue'"),
        ("--seconds 0", "--seconds is 0; it must be above 0"),
        ("--model json:dumps --batch 0", "--batch is 0, fewer examples than the 2 replicas"),
        ("--model json:dumps --optimizer Sdg", "torch.optim has no 'Sdg'"),
    ):
        monkeypatch.setattr(LocalPool, "start", lambda pool: pytest.fail("replicas were started for a wrong call"))
        with pytest.raises(UsageError, match=said):
            shell.run_line_magic("mirror", f"bench {wrong}")


def test_replicas_that_run_are_measured_and_no_others(shell):
    shell.run_line_magic("mirror", "start --devices cpu:0")
    with pytest.raises(UsageError, match="restart --devices cpu:0,cpu:1"):
        shell.run_line_magic("mirror", "bench --devices cpu:0,cpu:1")
    with pytest.raises(UsageError, match=r"one replica \(cpu:0\) reduces with nobody; %mirror restart --devices"):
        shell.run_line_magic("mirror", "bench")
    shell.run_line_magic("mirror", "stop")


# The command line


def test_the_command_prints_the_table_and_draws_it(tmp_path: Path):
    out, err = io.StringIO(), io.StringIO()
    picture = tmp_path / "ops.png"
    options = command.Options(devices="cpu:0,cpu:1", largest="1K", picture=str(picture), seconds=0.02)
    assert (command.run(options, out, err), err.getvalue()) == (0, "")
    assert out.getvalue().startswith("all-reduce of fp32 over 2 replicas (cpu:0, cpu:1)")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_times_the_steps_of_a_model_that_lies_where_it_is_called(tmp_path: Path):
    (tmp_path / "models.py").write_text("import torch\ndef tiny():\n    return torch.nn.Linear(5, 1)\n")
    line = [sys.executable, "-m", "mirror_nb", "bench", "--devices", "cpu:0,cpu:1", "--seconds", "0.02"]
    line += ["--model", "models:tiny", "--shape", "5", "--ops", "gloo"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("a training step on 64 examples, 2 replicas")


@pytest.mark.parametrize(("model", "loaded"), [(None, "torch"), ("json:dumps", "all")])
def test_what_training_needs_is_loaded_once_for_all_replicas_where_a_model_is_to_train(monkeypatch, model, loaded):
    asked = []

    def none(*_: object, **__: object) -> None:
        raise UsageError("none here")

    monkeypatch.setattr(command, "warm_up", lambda: asked.append("torch"))
    monkeypatch.setattr(command, "warm_up_to_train", lambda: asked.append("all"))
    monkeypatch.setattr(command, "LocalPool", none)
    shape = None if model is None else "5"
    assert (
        command.run(command.Options(devices="cpu:0,cpu:1", model=model, shape=shape), io.StringIO(), io.StringIO())
        == 2
    )
    assert asked == [loaded]


def test_the_command_shows_a_models_error_in_the_users_lines(tmp_path: Path, monkeypatch):
    (tmp_path / "narrow_models.py").write_text("import torch\ndef tiny():\n    return torch.nn.Linear(5, 1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = command.Options(devices="cpu:0,cpu:1", model="narrow_models:tiny", shape="6", ops="gloo", seconds=0.02)
    err = io.StringIO()
    assert command.run(options, io.StringIO(), err) == command.FAILED
    assert err.getvalue().startswith("mirror_nb bench: the replicas failed on examples of shape 6\n")
    assert "mat1 and mat2 shapes cannot be multiplied" in err.getvalue()
    assert "raised by all 2 replicas" in err.getvalue()
    assert "bench/command.py" not in err.getvalue()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": "cpu:0"}, "reduces with nobody"),
        ({"largest": "big"}, "'big' is no size; write 64M"),
        ({"largest": "1"}, "the largest size is 1 bytes"),
        ({"model": "json"}, "write module:function"),
        ({"model": "no_such_module:make"}, "No module named 'no_such_module'"),
        ({"model": "json:make"}, "has no attribute 'make'"),
        ({"model": "json:dumps", "shape": "1,x"}, "write the shape of one example"),
        ({"shape": "4"}, "--shape: for the steps of a --model; name one"),
        ({"batch": 4, "optimizer": "Adam"}, "--batch and --optimizer: for the steps of a --model"),
        ({"model": "json:dumps", "largest": "4K"}, "--largest: a model has tensors of its own sizes"),
        ({"seconds": float("inf")}, "--seconds is inf"),
        ({"model": "json:dumps", "shape": "4", "seconds": float("inf")}, "--seconds is inf"),
        ({"model": "json:dumps", "shape": "4", "batch": 0}, "--batch is 0, fewer examples than the 2 replicas"),
        ({"model": "json:dumps", "shape": "4"}, "`model` is dumps, which cannot be called without arguments"),
        ({"model": "torch.nn:Flatten"}, "what does the model take? Give the shape"),
        ({"picture": "ops.txt"}, "ending in .png"),
        ({"ops": "glue"}, "no cross-device op 'glue'"),
    ],
)
def test_a_wrong_call_of_the_command_says_what_is_right(options, said):
    err = io.StringIO()
    code = command.run(command.Options(**{"devices": "cpu:0,cpu:1", **options}), io.StringIO(), err)
    assert code == command.WRONG_CALL
    assert said in err.getvalue()
    assert err.getvalue().count("\n") == 1


def test_a_folder_is_no_place_for_a_picture_and_that_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LocalPool", None)
    (tmp_path / "ops.png").mkdir()
    err = io.StringIO()
    options = command.Options(devices="cpu:0,cpu:1", picture=str(tmp_path / "ops.png"))
    assert command.run(options, io.StringIO(), err) == command.WRONG_CALL
    assert "name a file in a folder that is there" in err.getvalue()


def test_sizes_are_read_as_people_write_them():
    assert [command.nbytes_of(words) for words in ("64M", "64 MiB", "1.5k", "2G", "12", "8KB")] == [
        2**26,
        2**26,
        1536,
        2**31,
        12,
        8192,
    ]
    assert sizes_to(20_000) == (1024, 4096, 16384)
    assert command.shape_of("(1, 28, 28)") == (1, 28, 28)
