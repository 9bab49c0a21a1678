"""A hang is explained: who waits in which collective, who is at which line. Different ones are named at once."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest
from driving import Ran, doing, plain, press_ctrl_c, run_cell

from mirror_nb.devices import Device
from mirror_nb.errors import PeerFailed, ReplicaTimeout, UsageError
from mirror_nb.messages import Collectives, Wait, Whereabouts
from mirror_nb.pool import following, hangs, last_words, outside
from mirror_nb.pool.failures import raise_for
from mirror_nb.pool.local import LocalPool
from mirror_nb.replica import whereabouts
from mirror_nb.telemetry import samples

BEGIN = "import torch, torch.distributed as dist, time, os, signal\nmodel = torch.nn.Linear(2, 2)\n"
NO_SHARED_MEMORY = "dist.group.WORLD.shared = None\n"
# As between machines: gloo carries everything, and nobody sees what the others have come to.


@pytest.fixture
def looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is asked five times, not once, until the other comes after six tenths of a second."""
    monkeypatch.setattr(following, "UNEVEN_AFTER", 0.1)


@pytest.fixture
def two(replicas: Callable[[int], LocalPool]) -> LocalPool:
    return replicas(2)


@pytest.fixture
def three(replicas: Callable[[int], LocalPool]) -> LocalPool:
    return replicas(3)


def shown(pool: LocalPool, ran: Ran, kind: type[BaseException], timeout: float | None = None) -> str:
    """What the user sees; the same text stands in the error's notes, for plain Python."""
    with pytest.raises(kind) as caught:
        raise_for(ran.report, pool.devices, timeout)
    text = plain("\n".join(caught.value._render_traceback_()))
    assert caught.value.__notes__ == [text]
    return text


def goes_on(pool: LocalPool) -> None:
    pool.mend()
    ran = run_cell(pool, BEGIN + "model(torch.ones(1, 2)).sum().backward()\nn = int(strategy.reduce('sum', 1))")
    assert ran.report.clean, ran.report.failures
    assert {values["n"] for values in ran.values.values()} == {pool.size}


# ---------------------------------------------------------------------- different collectives

DIFFERENT = {
    "shape": ("dist.all_reduce(torch.ones(3 + replica_id))", "all_reduce (SUM) of float32[3]", "float32[4]"),
    "dtype": (
        "dist.all_reduce(torch.ones(2, 3).to(torch.float64 if replica_id else torch.float32))",
        "all_reduce (SUM) of float32[2, 3]",
        "all_reduce (SUM) of float64[2, 3]",
    ),
    "dtype that gloo carries": (
        "t = torch.ones(2).to(torch.bool if replica_id else torch.float32)\n"
        "dist.all_gather([t.clone(), t.clone()], t)",
        "all_gather of float32[2]",
        "all_gather of bool[2] and 2 more through gloo",
    ),
    "shape of one of several": (
        "dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2 + replica_id))",
        "all_gather of float32[2]",
        "all_gather of float32[2] and 2 more, float32[3] among them through gloo",
    ),
    "shape of what is gathered": (
        "dist.all_gather_into_tensor(torch.ones(4), torch.ones(2 + replica_id))",
        "all_gather of float32[2]",
        "all_gather_into_tensor of float32[4] and float32[3] through gloo",
    ),
    "op": (
        "dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if replica_id else dist.ReduceOp.SUM)",
        "all_reduce (SUM) of float32[2]",
        "all_reduce (MAX) of float32[2]",
    ),
    "root": (
        "dist.broadcast(torch.ones(2), replica_id)",
        "broadcast from replica 0 of float32[2]",
        "broadcast from replica 1 of float32[2]",
    ),
    "kind": (
        "dist.barrier() if replica_id else dist.all_reduce(torch.ones(300_000))",
        "all_reduce (SUM) of float32[300000]",
        "barrier",
    ),
    "order": (
        "calls = [lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), 0)]\n"
        "for call in reversed(calls) if replica_id else calls: call()",
        "all_reduce (SUM) of float32[2]",
        "broadcast from replica 0 of float32[2]",
    ),
    "shared memory and gloo": (
        "dist.gather(torch.ones(2), None, 0) if replica_id else dist.all_reduce(torch.ones(2))",
        "all_reduce (SUM) of float32[2]",
        "gather to replica 0 of float32[2] through gloo",
    ),
    "both through gloo": (
        "dist.gather(torch.ones(2), None, 0) if replica_id else dist.all_to_all_single(torch.ones(2), torch.ones(2))",
        "all_to_all_single of float32[2] and 1 more, sending [1, 1] and taking [1, 1] elements through gloo",
        "gather to replica 0 of float32[2] through gloo",
    ),
    "root through gloo": (
        "dist.gather(torch.ones(2), [torch.empty(2)] * 2 if dist.get_rank() == replica_id else None, dst=replica_id)",
        "gather to replica 0 of float32[2] and 2 more through gloo",
        "gather to replica 1 of float32[2] and 2 more through gloo",
    ),
    "op through gloo": (
        "dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.MAX if replica_id else dist.ReduceOp.MIN)",
        "all_reduce (MIN) of bool[2] through gloo",
        "all_reduce (MAX) of bool[2] through gloo",
    ),
    "a backward pass and a gather": (
        "dist.gather(torch.ones(2), None, 0) if replica_id else model(torch.ones(1, 2)).sum().backward()",
        "for gradients, in which a backward pass that uses no parameter of a mirrored module takes no part",
        "gather to replica 0 of float32[2] through gloo",
    ),
    "a backward pass and a reduction": (
        "strategy.reduce('sum', 1.0) if replica_id else model(torch.ones(1, 2)).sum().backward()",
        "for gradients, in which",
        "reduce SUM axis=None of float32[]",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_collectives_are_named_on_every_replica_at_once(two, what):
    source, first, second = DIFFERENT[what]
    ran = run_cell(two, BEGIN + source)
    assert ran.errors == {0: "UsageError", 1: "UsageError"}
    text = shown(two, ran, UsageError)
    (said,) = {failure.message for failure in ran.report.failures.values()}
    on_first, _, on_second = said.partition(", replica 1: ")
    assert on_first.startswith("the replicas ran different collectives: replica 0: ")
    assert first in on_first
    assert second in on_second
    assert "raised by all 2 replicas" in text
    goes_on(two)


def test_who_ran_another_line_is_told_with_it(two):
    ran = run_cell(two, BEGIN + "if replica_id:\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(3))")
    text = shown(two, ran, UsageError)
    assert "----> 6     dist.all_reduce(torch.ones(3))" in text
    assert "replica 1 (cpu:1) at Cell In[1], line 4: dist.barrier()" in text


@pytest.mark.parametrize("call", ["dist.gather(ones, [ones, ones], dst=replica_id)", "differ()"])
def test_after_different_collectives_that_a_cell_catches_the_next_ones_are_right(two, call):
    ran = run_cell(
        two,
        BEGIN
        + "ones, said, sums = torch.ones(2), [], []\n"
        + "def differ(): dist.gather(ones, None, 0) if replica_id else dist.all_reduce(ones.clone())\n"
        + f"for i in range(3):\n    try:\n        {call}\n"
        + "    except ValueError as error: said.append(str(error)[:40])\n"
        + "    sums.append(float(strategy.reduce('sum', 1.0)))\n"
        + "    parts = [torch.empty(1), torch.empty(1)] if replica_id == 0 else None\n"
        + "    dist.gather(torch.full((1,), float(replica_id)), parts, 0)\n",
    )
    assert ran.report.clean, ran.report.failures
    assert ran.values[0]["said"] == ran.values[1]["said"] == ["the replicas ran different collectives: "] * 3
    assert ran.values[0]["sums"] == ran.values[1]["sums"] == [2.0] * 3
    assert [float(part) for part in ran.values[0]["parts"]] == [0.0, 1.0]
    ran = run_cell(two, "n = float(strategy.reduce('sum', 1.0))")
    assert [values["n"] for values in ran.values.values()] == [2.0, 2.0]


def test_after_an_interrupted_sum_that_a_cell_catches_the_next_cell_has_a_group(two):
    """A sum that was cut short leaves the group of no use; nobody has to know."""
    ran = run_cell(
        two,
        BEGIN
        + "def broken(*args): raise ZeroDivisionError\n"
        + "dist.group.WORLD.shared._fold = broken\n"
        + "try: dist.all_reduce(torch.ones(2))\n"
        + "except Exception as error: said = type(error).__name__\n",
    )
    assert ran.report.clean, ran.report.failures
    assert {values["said"] for values in ran.values.values()} <= {"ZeroDivisionError", "PeerFailed"}
    goes_on(two)


def test_an_interrupt_as_gloo_begins_that_a_cell_catches_leaves_the_next_cell_a_new_group(two):
    ran = run_cell(
        two,
        BEGIN
        + "from mirror_nb.collectives import process_group\n"
        + "group = dist.group.WORLD\n"
        + "def interrupted(*args): raise KeyboardInterrupt\n"
        + "group._begin = interrupted\n"
        + "try: dist.gather(torch.ones(2), None if replica_id else [torch.empty(2)] * 2, 0)\n"
        + "except (KeyboardInterrupt, Exception) as error: said = type(error).__name__\n"
        + "del group._begin\nusable = process_group.usable()\n",
    )
    assert ran.report.clean, ran.report.failures
    assert {values["said"] for values in ran.values.values()} <= {"KeyboardInterrupt", "PeerFailed"}
    assert not any(values["usable"] for values in ran.values.values())
    goes_on(two)


SIZES_DIFFER = {
    "ops.gather": "strategy.cross_device_ops.gather(torch.ones(2 + replica_id), 0)",
    "gather": "dist.gather(torch.ones(2 + replica_id), [torch.empty(2)] * 2 if replica_id == 0 else None, 0)",
    "scatter": "dist.scatter(torch.ones(2 + replica_id), [torch.ones(2)] * 2 if replica_id == 0 else None, 0)",
    "reduce_scatter": "dist.reduce_scatter(torch.ones(2 + replica_id), [torch.ones(2 + replica_id)] * 2)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(torch.ones(2 + replica_id), torch.ones(4 + 2 * replica_id))",
    "all_to_all_single": "dist.all_to_all_single(torch.ones(2 + 2 * replica_id), torch.ones(2 + 2 * replica_id))",
    "all_to_all_single with splits": "dist.all_to_all_single(torch.ones(4), torch.ones(3), [1, 3], [2, 1])",
    "all_to_all": "dist.all_to_all([torch.ones(2 + replica_id)] * 2, [torch.ones(2 + replica_id)] * 2)",
    "all_to_all_single of other dtypes": (
        "t = torch.ones(4, dtype=(torch.float32, torch.float64)[replica_id]); dist.all_to_all_single(t.clone(), t)"
    ),
    "all_to_all of other dtypes": (
        "t = torch.ones(4, dtype=(torch.float32, torch.float64)[replica_id]); dist.all_to_all([t + 0, t + 0], [t, t])"
    ),
    "all_gather": "t = torch.ones(2 + replica_id) > 0; dist.all_gather([t.clone(), t.clone()], t)",
    "all_gather_into_tensor": (
        "dist.all_gather_into_tensor(torch.ones(4 + 2 * replica_id) > 0, torch.ones(2 + replica_id) > 0)"
    ),
    "all_reduce": "dist.all_reduce(torch.ones(2 + replica_id) > 0, dist.ReduceOp.MAX)",
    "large": "dist.all_reduce(torch.ones(200_000 + replica_id) > 0, dist.ReduceOp.MAX)",
    "asynchronous": "dist.gather(torch.ones(2 + replica_id), [torch.empty(2)] * 2 if not replica_id else None, 0, "
    "async_op=True).wait()",
    "in a subgroup": "dist.gather(torch.ones(2 + replica_id), [torch.empty(2)] * 2 if not replica_id else None, 0, "
    "group=dist.new_group())",
    "gloo's op": (
        "import mirror_nb as mnb\nstrategy.cross_device_ops = mnb.GlooAllReduce()\n"
        "try: strategy.cross_device_ops.all_reduce('sum', torch.ones(200_000 + replica_id)).wait()\n"
        "finally: strategy.cross_device_ops = 'shared_memory'"
    ),
}


@pytest.mark.parametrize("what", SIZES_DIFFER)
def test_shapes_that_differ_are_told_and_nobody_dies(two, what):
    ran = run_cell(two, BEGIN + SIZES_DIFFER[what])
    assert not ran.report.deaths
    assert ran.errors == {0: "UsageError", 1: "UsageError"}, ran.report.failures
    (said,) = {failure.message for failure in ran.report.failures.values()}
    on_first, _, on_second = said.partition(", replica 1: ")
    if "splits" in what:
        assert "sending [2, 1] and taking [1, 3]" in on_first
    else:
        assert "[200000]" in on_first or "[2]" in on_first or "[4]" in on_first
        assert "[200001]" in on_second or "[3]" in on_second or "[4]" in on_second or "[6]" in on_second
    goes_on(two)


def test_gloo_carries_what_is_the_same_on_all_and_differs_in_size(two):
    """Sizes that may differ by replica, and roots that alone give what they scatter."""
    ran = run_cell(
        two,
        BEGIN
        + "mine = torch.ones(3 - replica_id)\nsplits = [[2, 1], [1, 1]]\n"
        + "got = torch.empty(splits[0][replica_id] + splits[1][replica_id])\n"
        + "dist.all_to_all_single(got, mine, [splits[0][replica_id], splits[1][replica_id]], splits[replica_id])\n"
        + "one = torch.empty(1)\ndist.scatter(one, [torch.ones(1), torch.ones(1)] if replica_id == 0 else None, 0)\n"
        + "works = [dist.all_gather([torch.empty(1, dtype=torch.bool) for _ in range(2)],\n"
        + "         torch.ones(1, dtype=torch.bool), async_op=True) for _ in range(40)]\n"
        + "for work in works: work.wait()\nn = float(got.sum() + one)",
    )
    assert ran.report.clean, ran.report.failures
    assert {r: values["n"] for r, values in ran.values.items()} == {0: 4.0, 1: 3.0}


# ---------------------------------------------------------------------- different numbers of them

UNEVEN = {
    "all_reduce": "for _ in range(4 - replica_id): dist.all_reduce(torch.ones(3))",
    "gather": "if replica_id == 0: dist.gather(torch.ones(2), [torch.ones(2), torch.ones(2)])",
    "gloo alone": NO_SHARED_MEMORY + "for _ in range(4 - replica_id): dist.all_reduce(torch.ones(3))",
}


@pytest.mark.parametrize("what", UNEVEN)
def test_a_replica_that_has_ended_is_not_waited_for(two, what):
    ran = run_cell(two, BEGIN + UNEVEN[what])
    assert ran.errors == {0: "PeerFailed"}
    text = shown(two, ran, PeerFailed)
    assert "replica 0 waits in" in text
    assert "but replica 1 has come to the end without it" in text
    assert "see that every replica runs the same number of steps" in text
    if what != "gather":
        assert text.count("replica 1 has begun all_reduce 3 times, replica 0 4 times") == 1
        assert "line 3: for _ in range(4 - replica_id)" in text or "line 4: for _ in" in text
    goes_on(two)


ODD = {
    "a receive": (
        "dist.send(x, 0) if replica_id else [dist.recv(x, 1) for _ in range(2)]",
        "recv of float32[3] at Cell In[1], line 4: dist.send(x, 0) if replica_id else [dist.recv(x, 1) for _ in "
        "range(2)], but replica 1, from which it receives, has come to the end and sent 1 of 2",
    ),
    "a send": (
        "if replica_id == 0: dist.send(torch.ones(10**7), 1)",
        "send of float32[10000000] at Cell In[1], line 4: if replica_id == 0: dist.send(torch.ones(10**7), 1), but "
        "replica 1, to which it sends, has come to the end and received none of 1",
    ),
    "a batch of them": (
        "ops = [dist.P2POp(dist.irecv, x, 1 - replica_id)] + [dist.P2POp(dist.isend, x, 0)] * replica_id\n"
        "works = dist.batch_isend_irecv(ops)\nif replica_id == 0: [w.wait() for w in works]; dist.recv(x, 1)",
        "replica 1, from which it receives, has come to the end and sent 1 of 2",
    ),
    "two for one that receives from any": (
        "dist.recv(x) if replica_id else [dist.send(x, 1) for _ in range(2)]",
        "replica 1, to which it sends, has come to the end and received 1 of 2",
    ),
    "one from any": (
        "dist.send(x, 0) if replica_id else [dist.recv(x) for _ in range(2)]",
        "recv of float32[3] at Cell In[1], line 4: dist.send(x, 0) if replica_id else [dist.recv(x) for _ in "
        "range(2)], but replica 1 has come to the end and sent 1 of 2",
    ),
    "one in a group of its own": (
        "group = dist.new_group([0, 1])\nif replica_id == 0: dist.recv(x, 1, group=group)",
        "replica 1, from which it receives, has come to the end and sent none of 1",
    ),
}


@pytest.mark.parametrize("what", ODD)
def test_who_waits_for_the_other_half_of_a_send_or_receive_is_told_that_it_will_not_come(two, what):
    source, told = ODD[what]
    ran = run_cell(two, BEGIN + "x = torch.ones(3)\n" + source)
    assert ran.errors == {0: "PeerFailed"}
    text = " ".join(shown(two, ran, PeerFailed).split())
    assert told in text
    assert "for every `send`" in text
    goes_on(two)


@pytest.mark.parametrize(
    "source",
    [
        "def late(): time.sleep(0.6); dist.send(x, 0)\n"
        "if replica_id: threading.Thread(target=late).start()\nelse: dist.recv(x, 1)",
        "if replica_id: dist.send(x, 0)\nelse: time.sleep(0.6); dist.recv(x)",
        "work = dist.irecv(x, 1) if replica_id == 0 else None\nif replica_id == 0: time.sleep(0.6)",
    ],
    ids=["sent by a thread", "received from any", "not waited for"],
)
def test_a_send_or_receive_whose_other_half_may_come_is_left_alone(two, looked_at_often, source):
    ran = run_cell(two, BEGIN + "import threading\nx = torch.full((3,), float(replica_id))\n" + source)
    assert ran.report.clean, ran.report.failures
    goes_on(two)


def test_a_receive_from_any_waits_for_whoever_still_runs(three, looked_at_often):
    source = "if replica_id == 0: dist.recv(x)\nif replica_id == 2: time.sleep(0.6); dist.send(x, 0)"
    ran = run_cell(three, BEGIN + "x = torch.ones(3)\n" + source)
    assert ran.report.clean, ran.report.failures


def test_a_third_replica_that_has_ended_is_nothing_to_a_send_and_its_receive(three, looked_at_often):
    # More of them than there were collectives.
    source = "for i in range(500 * (replica_id < 2)):\n if replica_id: time.sleep(0.6 * (i == 499)); dist.send(x, 0)\n"
    source += " else: dist.recv(x, 1)"
    ran = run_cell(three, BEGIN + "x = torch.ones(3)\n" + source)
    assert ran.report.clean, ran.report.failures
    goes_on(three)


def test_a_backward_pass_that_uses_no_mirrored_parameter_is_told_of(two):
    ran = run_cell(
        two,
        BEGIN
        + "x = torch.ones(1, 2, requires_grad=True)\nmodel(x).sum().backward()\n"
        + "(x if replica_id else model(x)).sum().backward()",
    )
    text = shown(two, ran, PeerFailed)
    assert "for gradients at Cell In[1], line 5" in text
    assert text.count("a backward pass that uses no parameter of a mirrored module takes no part") == 1
    goes_on(two)


def test_a_replica_that_does_not_run_the_cell_is_not_waited_for(three):
    ran = run_cell(three, BEGIN + "dist.all_reduce(torch.ones(3))", replicas=[0, 2])
    assert set(ran.errors.values()) == {"PeerFailed"}
    text = shown(three, ran, PeerFailed)
    assert "which needs replica 1, but --replicas leaves it out of this cell" in text
    assert re.search(r"^1 +cpu:1 +not in this cell$", text, re.MULTILINE)
    goes_on(three)


@pytest.mark.parametrize("how", ["late", "in a thread"])
def test_a_replica_that_comes_later_is_waited_for(two, how, looked_at_often):
    come = "time.sleep(0.6); total = torch.ones(1); dist.all_reduce(total)"
    ran = run_cell(
        two,
        BEGIN
        + f"import threading\ndef come():\n    global total\n    {come}\n"
        + f"if replica_id and {how == 'late'}: come()\n"
        + "elif replica_id: threading.Thread(target=come).start()\n"
        + "else:\n    total = torch.ones(1); dist.all_reduce(total)",
    )
    assert ran.report.clean, ran.report.failures
    assert ran.values[0]["total"].item() == 2


# ---------------------------------------------------------------------- timeouts and interrupts

HANG = BEGIN + "def work():\n    {}\ndist.all_reduce(torch.ones(3))\nif replica_id == 1:\n    work()\n{}"


@pytest.mark.parametrize("carrier", ["shared memory", "gloo"])
def test_a_timeout_shows_where_each_replica_is_and_what_differs(two, carrier):
    source = HANG.format("time.sleep(1000)", "dist.all_reduce(torch.ones(2, 3))")
    ran = run_cell(two, source.replace("def work", NO_SHARED_MEMORY * (carrier == "gloo") + "def work"), timeout=0.8)
    text = shown(two, ran, ReplicaTimeout, 0.8)
    first, second = text[text.index("where the replicas were:") :].splitlines()[2:4]
    assert first.startswith("0        cpu:0   waits 0.")
    assert " s in all_reduce of float32[2, 3]" in first
    assert first.endswith(": dist.all_reduce(torch.ones(2, 3))")
    assert second.startswith("1        cpu:1   runs")
    assert second.endswith(": time.sleep(1000)")
    assert "in this cell or call, replica 1 has begun all_reduce once, replica 0 twice" in text
    if carrier == "shared memory":
        assert "replica 1 has not come to all_reduce of float32[2, 3]; its last was all_reduce (SUM) of 3 flo" in text
    goes_on(two)


def test_a_replica_that_is_stopped_or_holds_the_lock_is_told_of_from_outside(three, monkeypatch):
    monkeypatch.setattr(following, "GRACE", 1.5)
    source = (
        BEGIN
        + "def held():\n    sum(range(10**12))\n"
        + "model(torch.ones(1, 2)).sum().backward()\n"
        + "if replica_id == 1: held()\nif replica_id == 2: os.kill(os.getpid(), signal.SIGSTOP)\n"
        + "dist.all_reduce(torch.ones(3))"
    )
    ran = run_cell(three, source, timeout=1.5)
    assert {death.replica_id for death in ran.report.deaths} == {1, 2}
    assert all(death.by_us for death in ran.report.deaths)
    text = shown(three, ran, ReplicaTimeout, 1.5)
    assert "s in all_reduce of float32[3] for replicas 1, 2" in text
    assert "replica 1 does not return to Python: native code holds its lock" in text
    assert "line 4 in held" in text
    assert "replica 2 is stopped by a signal (kill -CONT " in text
    assert "replica 2's last record: all_reduce of " in text
    assert "replica 1 has not come to all_reduce of float32[3]; its last was all_reduce (MEAN)" in text
    goes_on(three)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing says which signals a process has blocked")
def test_a_stack_that_is_still_being_written_is_not_taken_for_the_whole():
    words = last_words.LastWords()
    try:
        assert not words._told(os.getpid())
        os.write(words._stack, b"Stack (most recent call first):\n")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {last_words.TELL})
        try:
            # As while faulthandler's handler runs.
            assert not words._told(os.getpid())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert words._told(os.getpid())
    finally:
        words.close()


def test_an_interrupt_of_a_cell_that_hangs_shows_where_each_replica_is(two, tmp_path):
    ran = interrupted(two, HANG.format("time.sleep(1000)", "dist.all_reduce(torch.ones(2, 3))"), tmp_path, hung=True)
    text = shown(two, ran, KeyboardInterrupt)
    assert "interrupted on all 2 replicas" in text
    assert "waits " in text
    assert "in all_reduce of float32[2, 3] for replica 1" in text
    assert "1        cpu:1   runs " in text
    assert ": time.sleep(1000)" in text
    goes_on(two)


def test_an_interrupt_of_a_cell_that_runs_shows_no_table(two, tmp_path):
    ran = interrupted(two, BEGIN + "while True: dist.all_reduce(torch.ones(3))", tmp_path, hung=False)
    assert "where the replicas were" not in shown(two, ran, KeyboardInterrupt)
    goes_on(two)


def interrupted(pool: LocalPool, source: str, tmp_path, hung: bool) -> Ran:
    """Press Ctrl-C once both run the cell; `hung`: once replica 0 has waited for long."""
    cell = source.replace("def work", f"open({str(tmp_path)!r} + f'/{{replica_id}}', 'w').close()\ndef work")
    cell = cell if cell != source else f"open({str(tmp_path)!r} + f'/{{replica_id}}', 'w').close()\n{source}"
    began: list[float] = []

    def ready() -> bool:
        if all((tmp_path / str(r)).exists() for r in range(2)):
            began.append(samples.clock())
        return bool(began) and (not hung or samples.clock() - began[0] > (hangs.HANG_SECONDS + 0.4) * 1e9)

    with doing(press_ctrl_c, when=ready):
        return run_cell(pool, cell)


def test_a_collective_that_passes_its_own_time_shows_where_the_others_are(two):
    ran = run_cell(
        two,
        BEGIN
        + "from datetime import timedelta\nif replica_id: time.sleep(1000)\n"
        + "dist.all_reduce(torch.ones(3), async_op=True).wait(timedelta(seconds=0.7))",
    )
    assert ran.errors[0] == "ReplicaTimeout"
    text = shown(two, ran, ReplicaTimeout)
    assert "replica 1 has not come" in text
    assert "where the replicas were:" not in text or "time.sleep(1000)" in text
    assert [one.line for one in ran.report.standings.values()] == [
        "Cell In[1], line 4: if replica_id: time.sleep(1000)"
    ]
    goes_on(two)


# ---------------------------------------------------------------------- the table, from what is made by hand

DEVICES = [Device("cuda", i) for i in range(4)]


def at(line: str, *waits: Wait, request: int | None = 7, threads: bool = False, begun: int = 3) -> Whereabouts:
    group = Collectives("0", (0, 1, 2, 3), begun, (("all_reduce", begun),), bool(waits), waits)
    return Whereabouts(1, request, line, "", False, threads, (group,))


def test_a_replica_that_works_on_or_has_threads_of_the_users_may_still_come():
    waits = at("loss.backward()", Wait(4, "all_reduce of float32[9]", 3.0, (1,)), begun=4)
    assert hangs.uneven({0: waits, 1: at("")}, idle={1}, running={0}, asked={0, 1}) is None
    assert hangs.uneven({0: waits, 1: at("", request=None, threads=True)}, idle={1}, running={0}, asked={0, 1}) is None
    assert hangs.uneven({0: waits, 1: at("", request=None, begun=4)}, idle={1}, running={0}, asked={0, 1}) is None
    assert hangs.uneven({0: waits}, idle={1}, running={0}, asked={0, 1}) is None
    said = hangs.uneven({0: waits, 1: at("", request=None)}, idle={1}, running={0}, asked={0, 1})
    assert said is not None
    assert "replica 1 has come to the end without it; see that" in said


def test_a_replica_that_is_yet_to_begin_or_has_some_under_way_may_still_come():
    rests = at("", request=None)
    under_way = dataclasses.replace(rests, groups=(dataclasses.replace(rests.groups[0], under_way=True),))
    waits = at("loss.backward()", Wait(4, "all_reduce of float32[9]", 3.0, (1,)), begun=4)
    assert hangs.uneven({0: waits, 1: under_way}, idle={1}, running={0}, asked={0, 1}) is None
    of_one, of_any = (Wait(1, f"recv of float32[9]{of}", 3.0, (), *who) for of, who in ((" from 1", (1,)), ("", ())))
    to_another = dataclasses.replace(rests, groups=(dataclasses.replace(rests.groups[0], between=(("send", 2, 1),)),))
    for wait, others in ((of_one, {1: rests}), (of_any, {1: to_another, 2: rests, 3: rests})):
        begun = (("recv", wait.partner, 1),)
        one = at("receive()", wait)
        found = {0: dataclasses.replace(one, groups=(dataclasses.replace(one.groups[0], between=begun),)), **others}
        asked = {*found}
        assert hangs.uneven(found, idle=set(), running=asked, asked=asked) is None
        assert hangs.uneven(found, idle={*others}, running={0}, asked=asked) is not None
    elsewhere = dataclasses.replace(rests, groups=())
    assert hangs.uneven({0: at("receive()", of_one), 1: elsewhere}, idle={1}, running={0}, asked={0, 1}) is None


def test_a_replica_that_does_not_answer_is_a_hang_by_itself():
    assert hangs.hangs({0: at("step()"), 1: hangs.Silent("is stopped by a signal", (), "")})
    assert not hangs.hangs({0: at("step()"), 1: at("step()")})


def test_who_waits_for_a_replica_that_the_cell_leaves_out_is_told_so_and_of_no_counts():
    waits = at("m.compute()", Wait(4, "barrier", 0.6, (1,)), begun=4)
    found = {0: waits, 1: at("", request=None)}
    assert hangs.uneven(found, idle={1}, running={0}, asked={0}) == (
        "replica 0 waits in barrier at m.compute(), which needs replica 1, but --replicas leaves it out of this cell"
    )
    sends = at("dist.send(x, 1)", Wait(1, "send of float32[2]", 0.6, (), partner=1))
    assert hangs.uneven({0: sends, 1: found[1]}, idle={1}, running={0}, asked={0}) == (
        "replica 0 waits in send of float32[2] at dist.send(x, 1), which needs replica 1, but --replicas leaves it "
        "out of this cell"
    )
    assert hangs.explain(found, {0}, DEVICES) == [
        "where the replicas were:",
        "replica  device  where                                 at",
        "0        cuda:0  waits 0.6 s in barrier for replica 1  m.compute()",
        "1        cuda:1  not in this cell",
    ]


def test_the_table_of_four():
    waits = Wait(4, "all_reduce of float32[9]", 12.34, (2, 3))
    found = {
        0: at("Cell In[5], line 9: backward()", waits, begun=4),
        2: Whereabouts(
            1, 7, "train.py, line 3: for x in loader:", "torch.utils.data.dataloader._next_data", False, False, ()
        ),
        3: hangs.Silent("is stopped by a signal", (), "all_reduce of 36 bytes in step 2, ended 9.0 s ago"),
    }
    assert "\n".join(hangs.explain(found, {0, 1, 2, 3}, DEVICES)) == textwrap.dedent("""\
        where the replicas were:
        replica  device  where                                                       at
        0        cuda:0  waits 12.3 s in all_reduce of float32[9] for replicas 2, 3  Cell In[5], line 9: backward()
        1        cuda:1  has ended
        2        cuda:2  in torch.utils.data.dataloader._next_data                   train.py, line 3: for x in loader:
        3        cuda:3  is stopped by a signal
        replica 3 is stopped by a signal
        replica 3's last record: all_reduce of 36 bytes in step 2, ended 9.0 s ago
        in this cell or call, replica 2 has never begun all_reduce, replica 0 4 times
        replica 2 has not come to all_reduce of float32[9]
        replica 3 has not come to all_reduce of float32[9]""")


def test_py_spys_frames_are_the_main_threads_above_ours():
    said = textwrap.dedent("""\
        Process 12: python
        Thread 13 (idle): "mirror_nb control"
            _read_for_a_while (mirror_nb/replica/worker.py:216)
        Thread 12 (active): "MainThread"
            step (cell.py:3)
            <module> (cell.py:9)
            run_code (IPython/core/interactiveshell.py:3577)
        """)
    assert outside.frames(said) == ("step (cell.py:3)", "<module> (cell.py:9)")


def test_without_py_spy_there_is_no_stack_and_no_error(monkeypatch):
    monkeypatch.setattr(outside.shutil, "which", lambda *_, **__: None)
    assert outside.stack(os.getpid()) == ()


@pytest.mark.skipif(shutil.which("py-spy", path=os.path.dirname(sys.executable)) is None, reason="needs py-spy")
def test_py_spy_tells_where_a_stopped_replica_is(two, monkeypatch):
    monkeypatch.setattr(following, "GRACE", 1.5)
    source = (
        BEGIN
        + "def stopped():\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        + "if replica_id == 1: stopped()\ndist.all_reduce(torch.ones(3))"
    )
    pid = two.status()[1].pid
    text = shown(two, run_cell(two, source, timeout=1.0), ReplicaTimeout, 1.0)
    lines = [line.strip() for line in text.splitlines()]
    told = lines.index(f"replica 1 is stopped by a signal (kill -CONT {pid} lets it go on):")
    assert lines[told + 1].startswith("stopped (")
    assert lines[told + 2].startswith("<module> (")
    goes_on(two)


def test_a_replica_whose_own_thread_fails_says_so_before_it_ends(two):
    broken = "from mirror_nb.replica import whereabouts\ndef look(*_): raise OSError('out of order')\n"
    source = BEGIN + broken + "if replica_id: whereabouts.look = look\nwhile True: pass"
    ran = run_cell(two, source, timeout=0.5)
    assert ran.report.answers[1].death is not None
    assert "OSError: out of order" in ran.text[1]
    assert "mirror_nb's own thread in this replica failed, which ends it" in ran.text[1]
    goes_on(two)


def test_a_replica_whose_gpu_goes_backward_waits_for_gradients_in_a_thread_of_autograds():
    inside, over = threading.Event(), threading.Event()
    names = {"__name__": "mirror_nb.gradients.synchronizer", "inside": inside, "over": over}
    exec("def end_of_backward(): inside.set(); over.wait()", names)
    thread = threading.Thread(target=names["end_of_backward"])
    thread.start()
    try:
        assert inside.wait(20)
        mine = threading.get_ident()
        assert whereabouts.look(1, 7, mine, {}).gradients
        assert not whereabouts.look(1, None, mine, {}).gradients
    finally:
        over.set()
        thread.join()
    assert not whereabouts.look(1, 7, mine, {}).gradients
