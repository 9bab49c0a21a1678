"""Networks of which each replica has a part alone: they stay in the replicas, and cost nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driving import eventually, running
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

from mirror_nb import Remote, TransferError

Run = Callable[[str], Any]

MADE = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
other = nn.Linear(2, 2)
"""
SHARD = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2,))
fully_shard(net, mesh=mesh)
optimizer = torch.optim.Adam(net.parameters(), 0.01)
"""
STEP = """
x = torch.full((2, 4), 1.0 + replica_id)
optimizer.zero_grad(); net(x).sum().backward(); optimizer.step()
done = True
"""

PIPELINE = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
torch.manual_seed(0)
whole = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2))
part = whole[replica_id]
stage = PipelineStage(part, replica_id, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.mse_loss)
schedule.step(*[torch.ones(4, 4)][replica_id:], **{"target": torch.zeros(4, 2)} if replica_id else {})
grads = [parameter.grad.clone() for parameter in part.parameters()]
"""


@pytest.fixture
def run(shell: InteractiveShell) -> Run:
    """Run a cell on two replicas that have nothing yet."""
    run_cell = running(shell)
    run_cell("%mirror stop")
    run_cell("%mirror start --devices cpu:0,cpu:1")
    return run_cell


def kill(shell: InteractiveShell, replica_id: int) -> None:
    pool = shell.magics_manager.registry["MirrorMagics"].session.pool
    os.kill(pool.status()[replica_id].pid, signal.SIGKILL)
    eventually(pool.dead, "the death is noticed")


@pytest.mark.parametrize(
    "before", ["%%mirrored\n" + MADE, MADE], ids=["made in a mirrored cell", "in an ordinary one"]
)
def test_what_is_sharded_stays_and_all_else_comes_back(run: Run, before: str) -> None:
    run(before)
    run("%%mirrored\nnet(torch.ones(1, 4))")
    run("%%mirrored\n" + SHARD + STEP + "shard = next(net.parameters())")
    for name in ("net", "optimizer", "shard", "mesh"):
        stand_in = run(name)
        assert isinstance(stand_in, Remote), name
        assert repr(stand_in).endswith("use it in %%mirrored cells>"), name
    assert "full_state_dict=True" in repr(run("net"))
    assert (run("done"), type(run("other"))) == (True, nn.Linear)
    with pytest.raises(TransferError, match="`net` cannot be brought to the notebook: its tensors are sharded"):
        run("net.fetch()")
    run("del done")
    run("%%mirrored\n" + STEP)
    assert run("done") is True


def test_whole_tensors_of_it_come_back(run: Run) -> None:
    run("%%mirrored\n" + MADE + SHARD + STEP)
    run(
        "%%mirrored\nfrom torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"
        "whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))\n"
        "whole = {name: value.clone() for name, value in whole.items()} if replica_id == 0 else None"
    )
    assert {name: tuple(value.shape) for name, value in run("whole")[0].items()} == {
        "0.weight": (8, 4),
        "0.bias": (8,),
        "2.weight": (2, 8),
        "2.bias": (2,),
    }


@pytest.mark.parametrize(
    "change", [SHARD, "import threading\nnet.lock = threading.Lock()"], ids=["sharded", "with a lock"]
)
def test_a_network_that_cannot_travel_any_more_costs_no_session(
    run: Run, shell: InteractiveShell, change: str
) -> None:
    run("%%mirrored\n" + MADE)
    run("%%mirrored\nnet(torch.ones(1, 4))\n" + change)
    kill(shell, 1)
    run("%%mirrored\nthere = [name in globals() for name in ('net', 'other')]")
    assert run("there")[0] == [True, True]
    assert run("there")[1] == [False, True]


def test_a_pipelines_stages_have_gradients_of_their_own(run: Run) -> None:
    run("import torch, torch.nn.functional as F\nfrom torch import nn")
    # Each would wait in another collective than its neighbour.
    run("%%mirrored --timeout 60\n" + PIPELINE)
    run("torch.manual_seed(0)\nwhole = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2))")
    run("F.mse_loss(whole(torch.ones(4, 4)), torch.zeros(4, 2)).backward()")
    found, whole = run("grads, whole")
    for replica_id, part in enumerate(whole):
        for grad, parameter in zip(found[replica_id], part.parameters(), strict=True):
            assert torch.allclose(grad, parameter.grad)
