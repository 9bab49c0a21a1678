"""A GPU that does nothing more for a replica's process: the error is told, and another process takes its place."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from driving import eventually, plain, run_cell

from mirror_nb.devices import Device
from mirror_nb.errors import ReplicaError
from mirror_nb.pool.failures import raise_for
from mirror_nb.pool.local import LocalPool
from mirror_nb.pool.recovery import recover
from mirror_nb.replica import broken
from mirror_nb.strategies.mirrored import SETUP

BREAKS = """
from mirror_nb.replica import broken
kept = 3
if replica_id == {who}:
    broken.is_lost = lambda device: True
    raise RuntimeError('CUDA error: device-side assert triggered')
strategy.reduce('sum', 1.0)
"""


def test_the_error_is_told_and_the_replica_takes_what_another_has(replicas: Callable[[int], LocalPool]):
    two = replicas(2)
    before = two.status()[1].pid
    ran = run_cell(two, BREAKS.format(who=1))
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        raise_for(ran.report, two.devices)
    told = plain("\n".join(caught.value._render_traceback_()))
    assert "raised by replica 1 (cpu:1)" in told
    assert "replica 1 (cpu:1) can use its GPU no more" in told
    assert "exit code" not in told
    eventually(two.dead, "the process has ended")
    assert [death.replica_id for death in two.mend()] == [1]
    recover(two)
    assert two.status()[1].pid != before
    assert run_cell(two, "n = int(strategy.reduce('sum', kept))").values[1]["n"] == 6


def test_a_replica_alone_is_usable_again():
    with LocalPool((Device("cpu", 0),), setup=SETUP) as pool:
        pool.start()
        assert run_cell(pool, BREAKS.format(who=0)).errors == {0: "RuntimeError"}
        eventually(pool.dead, "the process has ended")
        assert len(pool.mend()) == 1
        assert run_cell(pool, "n = 5").values[0]["n"] == 5


FAILS = """
from mirror_nb.collectives import process_group
def fail(*_): raise RuntimeError('CUDA error: an illegal memory access was encountered')
if {who}:
    process_group.form = fail
"""


def test_a_replica_that_cannot_form_a_group_is_replaced(replicas: Callable[[int], LocalPool]):
    two = replicas(2)
    first, second = (status.pid for status in two.status())
    assert run_cell(two, FAILS.format(who="replica_id == 1")).report.clean
    two.unform()
    assert [death.replica_id for death in two.mend()] == [1]
    recover(two)
    assert two.status()[0].pid == first
    assert two.status()[1].pid != second
    assert run_cell(two, "n = int(strategy.reduce('sum', 1))").values[1]["n"] == 2


def test_where_none_can_form_a_group_all_keep_what_they_have():
    with LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP) as two:
        two.start()
        before = [status.pid for status in two.status()]
        assert run_cell(two, FAILS.format(who="True")).report.clean
        two.unform()
        with pytest.raises(ReplicaError, match="an illegal memory access"):
            two.mend()
        assert [status.pid for status in two.status()] == before


def test_a_gpu_is_lost_where_it_answers_a_question_by_an_error(monkeypatch):
    def fail() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    device = torch.device("cuda", 0)
    assert not broken.is_lost(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not broken.is_lost(device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for capturing, query, lost in ((False, lambda: False, False), (False, fail, True), (True, fail, False)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, query=query: SimpleNamespace(query=query))
        assert broken.is_lost(device) is lost


@pytest.mark.gpu
def test_after_an_assert_on_the_gpu_the_next_cell_works():
    with LocalPool((Device("cuda", 0),), setup=SETUP) as pool:
        pool.start()
        source = "import torch\ntorch.zeros(1, device=device)[torch.tensor([5], device=device)].cpu()"
        ran = run_cell(pool, source, timeout=60)
        assert ran.report.failures[0].gpu_lost
        eventually(pool.dead, "the process has ended")
        pool.mend()
        assert run_cell(pool, "import torch\nn = float(torch.ones(1, device=device))", timeout=60).values[0]["n"] == 1
