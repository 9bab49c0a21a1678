"""`DistributedDataParallel` and who builds on it: in mirrored cells, and afterwards in the notebook."""

from __future__ import annotations

import copy
import io
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driving import eventually, running
from IPython.core.interactiveshell import InteractiveShell
from torch.nn.parallel import DistributedDataParallel

from mirror_nb import Remote

Run = Callable[[str], Any]

MADE = """%%mirrored
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x)
class Passing(DistributedDataParallel):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)
net = nn.Linear(4, 2)
model = DistributedDataParallel(net, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
around = Around(DistributedDataParallel(nn.Linear(4, 2)))
passing = Passing(nn.Linear(4, 2))
apart = nn.Linear(4, 2)
"""
STEP = """%%mirrored
optimizer.zero_grad()
model(torch.full((3, 4), float(replica_id + 1))).sum().backward()
optimizer.step()
weights = net.weight.detach().clone()
"""
SCRIPT = """%%mirrored
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(3, 4)).sum().backward()
optimizer.step()
weights = model.module.weight.detach().clone()
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def run(shell: InteractiveShell) -> Run:
    """Run a cell; the notebook has what `MADE` makes."""
    run_cell = running(shell)
    run_cell("%mirror start --devices cpu:0,cpu:1")
    run_cell(MADE)
    return run_cell


def test_the_notebook_has_what_ddp_wraps(run: Run) -> None:
    run(STEP)
    model, net, weights = run("model, net, weights")
    assert isinstance(model, DistributedDataParallel)
    assert repr(model).startswith("DistributedDataParallel(")
    assert model.module is net
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    assert torch.equal(net.weight, weights)
    assert torch.equal(model(torch.ones(1, 4)), net(torch.ones(1, 4)))
    assert run("optimizer.param_groups[0]['params'][0] is net.weight")
    assert run("optimizer.state_dict()['state'][0]['momentum_buffer']").tolist() == [[4.5] * 4] * 2


def test_the_notebook_has_networks_with_one_inside_and_of_classes_on_top(run: Run) -> None:
    around, passing = run("around, passing")
    assert around(torch.ones(1, 4)).shape == (1, 2)
    assert type(around.inner).__name__ == "DistributedDataParallel"
    assert passing.in_features == 4
    assert repr(passing).startswith("Passing(")


def test_the_replicas_go_on_with_their_own(run: Run) -> None:
    run("%%mirrored\nown = id(model), id(model.reducer)")
    run(STEP)
    run("with torch.no_grad(): model.module.weight.zero_()")
    run("%%mirrored\nsame = own == (id(model), id(model.reducer))\nweights = net.weight.detach().clone()")
    assert run("same")
    assert not run("weights").any()


def test_a_new_replica_and_new_replicas_get_a_real_one(run: Run, shell: InteractiveShell) -> None:
    run(STEP)
    expected = run("weights") - 0.1 * (4.5 + 0.5 * 4.5)
    pool = shell.magics_manager.registry["MirrorMagics"].session.pool
    os.kill(pool.status()[1].pid, signal.SIGKILL)
    eventually(pool.dead, "the death is noticed")
    run(STEP)
    assert torch.allclose(run("weights"), expected)
    run("%mirror restart")
    run(
        "%%mirrored\nreal = type(model) is DistributedDataParallel and model.find_unused_parameters\n"
        "real = real and type(passing) is Passing and passing.in_features == 4"
    )
    assert run("real") is True
    run(STEP)
    assert torch.allclose(run("weights"), expected - 0.1 * (4.5 + 0.5 * 6.75))


def test_the_notebook_has_it_where_the_cell_ends_as_a_script_does(run: Run) -> None:
    run(SCRIPT)
    assert torch.equal(run("model.module.weight"), run("weights"))
    run(STEP.replace("net.weight", "model.module.weight"))
    assert torch.equal(run("model.module.weight"), run("weights"))
    assert not run("optimizer").param_groups[0]["momentum"]


def test_one_of_another_process_group_stays_in_the_replicas_alone(run: Run) -> None:
    run(
        "%%mirrored\nimport torch.distributed as dist\n"
        "other = DistributedDataParallel(nn.Linear(4, 2), process_group=dist.new_group([0, 1]))\n"
        "apart = nn.Linear(4, 2)"
    )
    other, apart = run("other, apart")
    assert isinstance(other, Remote)
    assert "default process group" in repr(other)
    assert apart(torch.ones(1, 4)).shape == (1, 2)
    # It does not keep the replicas from a new group.
    with pytest.raises(ZeroDivisionError):
        run("%%mirrored\nif replica_id == 0:\n    1 / 0\ndist.barrier()")
    run(STEP)
    assert run("weights").shape == (2, 4)


def test_the_notebooks_own_can_be_copied_and_saved(run: Run) -> None:
    for name in ("model", "passing"):
        model = run(name)
        copied = copy.deepcopy(model)
        assert type(copied) is type(model)
        assert copied.module is not model.module
        assert torch.equal(copied(torch.ones(1, 4)), model(torch.ones(1, 4)))
    file = io.BytesIO()
    torch.save(run("model"), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(torch.ones(1, 4)), run("model")(torch.ones(1, 4)))


def test_replicas_tell_no_library_that_somebody_types(run: Run) -> None:
    # Lightning refuses `ddp` then, and forks where it may choose.
    run("%%mirrored\nimport sys\ntyped = hasattr(sys, 'ps1')")
    assert run("typed") is False
