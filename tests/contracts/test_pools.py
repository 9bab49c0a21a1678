"""What every pool promises, run over each of them: cells, calls, names, errors, and the end."""

from __future__ import annotations

import codeop
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from driving import eventually, plain, run_cell
from torch import nn

from mirror_nb.devices import Device
from mirror_nb.errors import DeviceError, PoolClosed
from mirror_nb.messages import (
    Bind,
    Call,
    ClearOutput,
    CommMessage,
    Display,
    Fetch,
    LoadModules,
    Restore,
    Snapshot,
    Stayed,
    Word,
)
from mirror_nb.pool.base import Pool
from mirror_nb.pool.in_process import InProcessPool
from mirror_nb.pool.local import LocalPool
from mirror_nb.pool.report import Report
from mirror_nb.strategies.mirrored import SETUP
from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.packing import pack

KINDS = [(InProcessPool, 1), (LocalPool, 1), (LocalPool, 2)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0].__name__}-{kind[1]}")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    kind, n = request.param
    made = kind(tuple(Device("cpu", i) for i in range(n)), setup=SETUP)
    made.start()
    yield made
    made.close()


def test_a_cell_runs_on_every_replica_and_its_output_comes_back(pool, capfd):
    ran = run_cell(pool, "print('hello from', replica_id)\nx = replica_id")
    assert ran.report.clean
    assert [ran.values[r]["x"] for r in range(pool.size)] == list(range(pool.size))
    text = "".join(ran.text.values()) + capfd.readouterr().out
    assert all(f"hello from {r}" in text for r in range(pool.size))


def test_a_cell_finds_strategy_replica_id_num_replicas_and_device(pool):
    ran = run_cell(pool, "found = (replica_id, num_replicas, str(device), strategy.num_replicas_in_sync)")
    for r in range(pool.size):
        assert ran.values[r]["found"] == (r, pool.size, "cpu", pool.size)


def test_the_cross_device_ops_of_the_pool_work_in_a_cell(pool):
    source = """
import torch
ops = strategy.cross_device_ops
found, mine = type(ops).__name__, torch.full((2,), 3)
ops.all_reduce("sum", mine).wait()
total, parts = ops.reduce("mean", torch.full((2,), 1.5), 0), ops.gather(torch.full((2,), replica_id), 0)
ops.broadcast(mine, 0)
"""
    ran = run_cell(pool, source)
    assert ran.report.clean, ran.report.failures
    values = ran.values[0]
    assert values["found"] == "SharedMemoryAllReduce"
    assert values["mine"].tolist() == [3 * pool.size] * 2
    assert (values["total"].tolist(), [part.tolist() for part in values["parts"]]) == (
        [1.5, 1.5],
        [[r, r] for r in range(pool.size)],
    )


def test_names_go_in_and_names_come_out(pool):
    ran = run_cell(
        pool, "total = sum(numbers) + tensor.sum().item()", {"numbers": [1, 2], "tensor": torch.ones(10_000)}
    )
    assert {values["total"] for values in ran.values.values()} == {10_003}


def test_names_are_kept_from_cell_to_cell(pool):
    run_cell(pool, "kept = 41")
    assert run_cell(pool, "answer = kept + 1").values[0]["answer"] == 42


def test_names_can_be_bound_and_fetched_without_a_cell(pool):
    with contextlib.closing(pack({"bound": torch.full((10_000,), 2.0)})) as packed:
        report = pool.run(
            {r: Bind(packed.payload) for r in range(pool.size)}, slabs=dict.fromkeys(range(pool.size), packed.slab)
        )
    assert report.clean
    ran = run_cell(pool, "total = float(bound.sum())")
    assert ran.values[0]["total"] == 20_000
    report = pool.run({0: Fetch(("bound",), True)}, timeout=20)
    assert report.clean
    for answer in report.answers.values():
        answer.close()


def test_fetching_what_is_not_there_is_an_error_that_names_it(pool):
    report = pool.run({0: Fetch(("nowhere", "total_nonsense"), True)}, timeout=20)
    assert report.failures[0].message == "replica 0 has no name `nowhere`, `total_nonsense`"


def call(pool: Pool, function: Callable[..., Any], *args: Any) -> Report:
    what = Call(pack(function, in_band=True).payload, pack((args, {}), in_band=True).payload)
    return pool.run(dict.fromkeys(range(pool.size), what), timeout=20)


def test_a_function_is_called_and_its_value_comes_back(pool):
    for answer in call(pool, lambda a, b: a * b, torch.ones(3), 2).answers.values():
        assert torch.equal(unpack(answer.done.payload, answer.slab)[0], torch.full((3,), 2.0))


def test_a_called_functions_exception_comes_back(pool):
    def fail() -> None:
        raise KeyError("gone")

    assert {failure.type_name for failure in call(pool, fail).failures.values()} == {"KeyError"}


def test_an_exception_comes_back_with_its_type_and_the_users_line(pool):
    ran = run_cell(pool, "before = 1\nraise LookupError('not here')")
    assert not ran.report.clean
    for r in range(pool.size):
        failure = ran.report.failures[r]
        assert (failure.type_name, failure.message, failure.interrupted) == ("LookupError", "not here", False)
        assert "raise LookupError('not here')" in plain("\n".join(failure.traceback))
        # What the cell did before it failed is not lost.
        assert ran.values[r]["before"] == 1


def test_the_next_cell_works_after_an_exception(pool):
    run_cell(pool, "1 / 0")
    pool.mend()
    ran = run_cell(pool, "t = strategy.reduce('sum', 1.0).item()")
    assert ran.report.clean
    assert ran.values[0]["t"] == pool.size


@pytest.mark.parametrize("source", ["x = )", "x = ("])
def test_a_cell_that_is_no_python_is_a_syntax_error(pool, source):
    # Python 3.13 has an error of its own for what ends too early.
    with pytest.raises(SyntaxError) as plain:
        codeop.Compile()(source, "cell", "exec")
    ran = run_cell(pool, source)
    assert set(ran.errors.values()) == {plain.type.__name__}
    pool.mend()


def test_leaving_with_exit_ends_the_cell_and_not_the_replica(pool):
    ran = run_cell(pool, "import sys\nsys.exit(3)")
    assert set(ran.errors.values()) == {"SystemExit"}
    pool.mend()
    assert run_cell(pool, "x = 1").report.clean


def test_the_value_of_the_last_expression_comes_back_with_its_bundle(pool):
    ran = run_cell(pool, "6 * 7")
    assert set(ran.results.values()) == {42}
    assert ran.report.answers[0].done.result["text/plain"] == "42"
    ran = run_cell(pool, "6 * 7;")
    assert ran.report.answers[0].done.result is None


def test_magics_shell_commands_and_await_work(pool):
    ran = run_cell(
        pool,
        "import asyncio\nawait asyncio.sleep(0)\nhere = %pwd\nfiles = !echo one two\n%time x = 5\nline = files[0]",
    )
    assert ran.report.clean, ran.report.failures
    assert ran.values[0]["line"] == "one two"
    assert ran.values[0]["x"] == 5


def test_rich_displays_come_back_in_their_order(pool):
    if isinstance(pool, InProcessPool):
        pytest.skip("in this process, display() goes to the shell that is there")
    ran = run_cell(
        pool,
        "from IPython.display import HTML, display, clear_output\n"
        "display(HTML('<b>1</b>'))\nclear_output(wait=True)\n"
        "h = display({'text/plain': '2'}, raw=True, display_id='d')\n"
        "h.update({'text/plain': '3'}, raw=True)",
    )
    assert ran.report.clean, ran.report.failures
    shown = [m for m in ran.messages[0] if isinstance(m, Display | ClearOutput)]
    assert [type(m).__name__ for m in shown] == ["Display", "ClearOutput", "Display", "Display"]
    assert shown[0].data["text/html"] == "<b>1</b>"
    assert [m.update for m in shown if isinstance(m, Display)] == [False, False, True]


def test_what_stays_says_so(pool):
    ran = run_cell(pool, "import threading\nlock = threading.Lock()")
    assert isinstance(ran.values[0]["lock"], Stayed)


def test_a_network_is_trained_alike_on_every_replica(pool):
    source = (
        "import torch\nfrom torch import nn\nmodel = nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.full((4, 2), float(replica_id))).sum().backward()\noptimizer.step()\n"
        "weight = model.weight.tolist()"
    )
    ran = run_cell(pool, source)
    assert ran.report.clean, ran.report.failures
    assert len({str(values["weight"]) for values in ran.values.values()}) == 1
    assert isinstance(ran.values[0]["model"], nn.Linear)
    assert torch.equal(ran.values[0]["model"].weight, torch.tensor(ran.values[0]["weight"]))


def test_values_are_loaded_into_a_network_by_its_handle(pool):
    model = nn.Linear(1, 1)
    with contextlib.closing(pack({"model": model}, handle=lambda module: "k0")) as packed:
        pool.run(
            {r: Bind(packed.payload) for r in range(pool.size)}, slabs=dict.fromkeys(range(pool.size), packed.slab)
        )
    with contextlib.closing(pack({"k0": {"weight": torch.full((1, 1), 9.0)}})) as packed:
        assert pool.run({r: LoadModules(packed.payload) for r in range(pool.size)}, timeout=20).clean
    ran = run_cell(pool, "w = model.weight.item()")
    assert ran.report.clean, ran.report.failures
    assert ran.values[0]["w"] == 9


def test_a_snapshot_restores_names_and_ties(pool):
    run_cell(
        pool,
        "import torch, threading\nfrom torch import nn\nnet = nn.Linear(2, 2)\n"
        "opt = torch.optim.Adam(net.parameters())\ndeep = [net, {'n': 5}]\nstuck = threading.Lock()",
    )
    report = pool.run({0: Snapshot()}, timeout=20)
    answer = report.answers[0]
    assert "stuck" in answer.done.left
    run_cell(pool, "net = opt = deep = None")
    assert pool.run({0: Restore(answer.done.payload)}, slabs={0: answer.slab}, timeout=20).clean
    answer.close()
    ran = run_cell(
        pool, "ok = deep[0] is net and opt.param_groups[0]['params'][0] is net.weight, deep[1]['n']", replicas=[0]
    )
    assert ran.values[0]["ok"] == (True, 5)
    pool.unform()
    pool.mend()


def test_input_is_refused_with_a_way_out(pool):
    if isinstance(pool, InProcessPool):
        pytest.skip("in this process, input() asks as ever")
    ran = run_cell(pool, "input('name? ')")
    assert set(ran.errors.values()) == {"StdinNotImplementedError"}
    assert "ask in an ordinary cell" in ran.report.failures[0].message
    pool.mend()


@pytest.mark.parametrize("source", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_a_debugger_is_refused_with_a_way_out(pool, source):
    if isinstance(pool, InProcessPool):
        pytest.skip("in this process, a debugger asks as ever")
    ran = run_cell(pool, source)
    assert set(ran.errors.values()) == {"StdinNotImplementedError"}
    assert "--in-process" in ran.report.failures[0].message
    pool.mend()


def test_a_cell_on_some_replicas_leaves_the_others_alone(pool):
    run_cell(pool, "alone = 0")
    run_cell(pool, "alone = 1", replicas=[pool.size - 1])
    ran = run_cell(pool, "seen = alone")
    assert [ran.values[r]["seen"] for r in range(pool.size)] == [0] * (pool.size - 1) + [1]


def test_status_tells_every_replica(pool):
    lines = pool.status()
    assert [line.replica_id for line in lines] == list(range(pool.size))
    assert all(line.pid > 0 and line.memory_bytes > 10**7 and line.state.startswith("ready") for line in lines)
    assert pool.dead() == []


def test_messages_are_told_as_they_come(pool):
    if isinstance(pool, InProcessPool):
        pytest.skip("in this process, display() goes to the shell that is there")
    seen: list[int] = []
    run_cell(
        pool,
        "from IPython.display import display\nfor i in range(3): display({'text/plain': str(i)}, raw=True)",
        on_message=lambda replica_id, message: seen.append(replica_id),
    )
    assert set(seen) == set(range(pool.size))


@pytest.mark.parametrize(("kind", "n"), KINDS)
def test_a_closed_pool_says_so_and_closing_again_does_nothing(kind, n):
    made = kind(tuple(Device("cpu", i) for i in range(n)), setup=SETUP)
    with made:
        made.start()
        assert not made.closed
    made.close()
    assert made.closed
    with pytest.raises(PoolClosed, match="these replicas were stopped; start new ones"):
        run_cell(made, "1")
    with pytest.raises(PoolClosed):
        made.mend()
    with pytest.raises(PoolClosed):
        made.steer(Word.STOP)
    made.hand(0, CommMessage({"comm_id": "late"}, ()))
    eventually(lambda: not made.dead(), "a closed pool tells of no deaths")


def test_what_has_ended_before_anybody_looked_at_the_clock_was_not_stopped():
    with InProcessPool((Device("cpu", 0),), setup=SETUP) as made:
        made.start()
        ran = run_cell(made, "done = True", timeout=1e-9)
    assert ran.report.clean
    assert not ran.report.timed_out
    assert ran.values[0]["done"] is True


@pytest.mark.parametrize(("kind", "n"), KINDS)
def test_a_pool_that_was_never_started_can_be_closed(kind, n):
    kind(tuple(Device("cpu", i) for i in range(n)), setup=SETUP).close()


def test_an_interrupt_while_a_pool_is_closed_leaves_no_descriptor(monkeypatch):
    made = InProcessPool((Device("cpu", 0),), setup=SETUP)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "_close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made._interrupts.readable)


def test_in_this_process_there_is_one_replica():
    with pytest.raises(DeviceError, match="one is possible, 2 devices were named"):
        InProcessPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP)
