"""After a failure all replicas stand at one step, and who was started anew has what the others have."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from driving import eventually, run_cell

from mirror_nb.errors import ReplicaDied
from mirror_nb.messages import Restore, Snapshot
from mirror_nb.pool.local import LocalPool
from mirror_nb.pool.recovery import compare, recover
from mirror_nb.pool.report import Death

TRAIN = """
import torch
from torch import nn
model = nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
for _ in range(3): step()
kept = 3
"""
LOOK = """
steps = int(optimizer.state[model.weight]['step'])
weight = model.weight.detach().clone()
rate = optimizer.param_groups[0]['lr']
same = optimizer.param_groups[0]['params'][0] is model.weight
"""


@pytest.fixture
def three(replicas: Callable[[int], LocalPool]) -> LocalPool:
    pool = replicas(3)
    recover(pool)
    assert run_cell(pool, TRAIN).report.clean
    assert not pool.apart
    return pool


def look(pool: LocalPool) -> list[dict[str, object]]:
    return [values for _, values in sorted(run_cell(pool, LOOK).values.items())]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_replicas_go_on_from_the_one_that_came_furthest_and_the_objects_are_the_same(three, ahead):
    run_cell(
        three,
        "step()\noptimizer.zero_grad()\nmodel(torch.ones(2, 3)).square().mean().backward()\n"
        f"if replica_id == {ahead}:\n    optimizer.step(); scheduler.step()\n    raise OSError('after the step')\n"
        "strategy.reduce('sum', 1.0)",
    )
    three.mend()
    assert recover(three).source == ahead
    assert not three.apart
    seen = look(three)
    assert [each["steps"] for each in seen] == [5, 5, 5]
    assert all((each["weight"] == seen[0]["weight"]).all() for each in seen)
    assert {each["rate"] for each in seen} == {0.05}
    assert all(each["same"] for each in seen)


@pytest.mark.parametrize("kind", ["scheduler", "torch.optim.lr_scheduler.ChainedScheduler([scheduler])"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_replicas_of_which_one_alone_has_stepped_its_scheduler_go_on_from_that_one(three, ahead, kind):
    """The optimizer's steps are as many on all of them: the learning rates would differ for good."""
    run_cell(three, f"driving = {kind}\nstep(); driving.step()")
    run_cell(
        three,
        f"step()\nif replica_id != {ahead}:\n    raise OSError('between the two steps')\n"
        "driving.step()\nstrategy.reduce('sum', 1.0)",
    )
    three.mend()
    assert recover(three).source == ahead
    seen = run_cell(three, "found = int(optimizer.state[model.weight]['step']), scheduler.last_epoch").values.values()
    assert {values["found"] for values in seen} == {(5, 2)}
    assert {values["rate"] for values in look(three)} == {0.025}


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("change", ["pass", "nn.utils.parametrizations.weight_norm(model)"])
def test_networks_with_copies_are_trained_together_after_a_death_whatever_they_are_called(replicas, lost, change):
    """A new process gets them in another order, and by other names."""
    pool = replicas(2)
    recover(pool)
    run_cell(
        pool,
        "import copy, torch\nfrom torch import nn\naa = zz = None\nmodel = nn.Linear(3, 1)\n"
        f"aa, zz = copy.deepcopy(model), copy.deepcopy(model)\n{change}\n"
        "optimizer = torch.optim.SGD([*model.parameters(), *zz.parameters()], lr=0.1)",
    )
    os.kill(pool.status()[lost].pid, signal.SIGKILL)
    eventually(pool.dead, "it is seen")
    pool.mend()
    recover(pool)
    run_cell(pool, "for net in (model, zz): net(torch.full((2, 3), 1.0 + replica_id)).square().mean().backward()")
    run_cell(pool, "optimizer.step()\nweights = [p.tolist() for net in (model, aa, zz) for p in net.parameters()]")
    assert compare(pool)
    seen = run_cell(pool, "found = str(weights), aa.weight.grad is None").values
    assert seen[0]["found"] == seen[1]["found"]
    assert seen[0]["found"][1]


def test_schedulers_that_differ_on_purpose_are_left_alone(three):
    run_cell(three, "for _ in range(replica_id): optimizer.step(); scheduler.step()")
    run_cell(three, "step(); scheduler.step()\nraise OSError('on all')")
    three.mend()
    recover(three)
    assert [values["rate"] for values in look(three)] == [0.05, 0.025, 0.0125]


@pytest.mark.parametrize("more", [0, 9], ids=["", "and came further"])
def test_a_replica_that_was_left_in_the_middle_of_a_step_takes_anothers(three, more):
    run_cell(
        three,
        f"if replica_id == 0:\n    for _ in range({more}): optimizer.step()\n"
        "class Half(torch.optim.SGD):\n    def step(self):\n        super().step()\n"
        "        if replica_id == 0 and fails: raise OSError('half-way')\n"
        "fails = False\nhalf = Half(model.parameters(), lr=0.1)\nhalf.step()\nfails = True\nhalf.step()",
    )
    three.mend()
    assert recover(three).source != 0
    seen = look(three)
    assert all((each["weight"] == seen[1]["weight"]).all() for each in seen)


def test_replicas_that_differ_on_purpose_are_left_alone(three):
    run_cell(three, "with torch.no_grad(): model.bias.fill_(replica_id)")
    run_cell(three, "raise OSError('on all')")
    three.mend()
    recover(three)
    ran = run_cell(three, "bias = float(model.bias)")
    assert [ran.values[r]["bias"] for r in range(3)] == [0, 1, 2]


def test_variables_that_a_failure_left_apart_are_equal_again_but_those_that_each_replica_has_for_itself(three):
    run_cell(
        three,
        "import mirror_nb as mnb\nfrom mirror_nb.variables import bare\n"
        "total, each, own = (mnb.Variable(0.0, **given) for given in ("
        "{'aggregation': mnb.VariableAggregation.SUM}, {'aggregation': mnb.VariableAggregation.NONE},"
        "{'aggregation': mnb.VariableAggregation.SUM, 'synchronization': mnb.VariableSynchronization.ON_READ}))\n"
        "class Counts(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.steps = mnb.Variable(0.0, aggregation=mnb.VariableAggregation.MEAN)\n"
        "counts = Counts()\nheld = total",
    )
    run_cell(
        three,
        "for variable in (total, each, own, counts.steps):\n    bare(variable).fill_(3 - replica_id)\n"
        "raise OSError('in the middle of assigning')",
    )
    three.mend()
    assert recover(three).source == 0
    seen = run_cell(three, "found = [float(bare(v)) for v in (total, each, own, counts.steps)]\nsame = held is total")
    assert [seen.values[r]["found"] for r in range(3)] == [[3, 3 - r, 3 - r, 3] for r in range(3)]
    assert all(values["same"] for values in seen.values.values())


AVERAGED = """
import copy
ema, by_hand = torch.optim.swa_utils.AveragedModel(model), copy.deepcopy(model)
def average():
    ema.update_parameters(model)
    for mine, trained in zip(by_hand.parameters(), model.parameters()):
        mine.data.mul_(0.5).add_(trained.data, alpha=0.5)
def averages():
    return int(ema.n_averaged), float(ema.module.bias), float(by_hand.bias)
"""


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("at_once", [False, True])
def test_averages_of_a_network_go_on_from_the_replica_that_has_made_most_of_them(three, behind, at_once):
    """No optimizer trains them, so none's steps tell of them."""
    before = f"{AVERAGED}\nstep(); average()\n"
    if not at_once:
        run_cell(three, before)
    run_cell(
        three,
        f"{before if at_once else ''}step()\nif replica_id != {behind}: average()\n"
        "strategy.reduce('sum', 1.0)\nraise OSError('before the average, on one')",
    )
    three.mend()
    recover(three)
    seen = run_cell(three, f"found = averages()[:{2 if at_once else 3}]").values.values()
    assert {values["found"][0] for values in seen} == {2}
    assert len({values["found"] for values in seen}) == 1


@pytest.mark.parametrize("behind", [0, 1])
def test_a_scaler_that_was_left_before_its_update_goes_on_from_anothers(three, behind):
    """It refuses a second step before its update, and that on one replica alone."""
    run_cell(
        three,
        "scaler = torch.amp.GradScaler('cpu', init_scale=4.0, growth_interval=2)\n"
        "def scaled():\n    optimizer.zero_grad()\n"
        "    scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()\n    scaler.step(optimizer)\n"
        "scaled(); scaler.update()",
    )
    run_cell(
        three,
        f"scaled()\nif replica_id != {behind}: scaler.update()\n"
        "strategy.reduce('sum', 1.0)\nraise OSError('before the update, on one')",
    )
    three.mend()
    recover(three)
    ran = run_cell(three, "found = scaler.state_dict()\nscaled(); scaler.update()")
    assert ran.report.clean, ran.report.failures
    assert [(v["found"]["scale"], v["found"]["_growth_tracker"]) for v in ran.values.values()] == [(8.0, 0)] * 3


TRAINER = """
class Trainer:
    def __init__(self):
        self.net = nn.Linear(3, 1)
        self.optimizers = {"net": torch.optim.Adam(self.net.parameters(), 0.1)}
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers["net"], 1)
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
    def step(self, stops=False):
        self.optimizers["net"].zero_grad()
        self.net(torch.ones(2, 3)).square().mean().backward()
        if stops:
            raise OSError("before the step, on one")
        self.optimizers["net"].step()
        self.scheduler.step()
        self.average.update_parameters(self.net)
    def state(self):
        moments = self.optimizers["net"].state_dict()["state"][0]
        average = self.average.module.weight.tolist(), int(self.average.n_averaged)
        return self.net.weight.tolist(), moments["exp_avg"].tolist(), self.scheduler.state_dict(), average
trainer = Trainer()
trainer.step()
"""


@pytest.mark.parametrize("behind", [0, 2])
def test_what_a_trainer_holds_is_brought_to_one_step_too(three, behind):
    run_cell(three, TRAINER)
    run_cell(three, f"trainer.step(replica_id == {behind})\nstrategy.reduce('sum', 1.0)")
    three.mend()
    recover(three)
    for cell in ("state = trainer.state()", "trainer.step(); state = trainer.state()"):
        ran = run_cell(three, cell)
        first, *others = [values["state"] for values in ran.values.values()]
        assert others == [first] * 2


def test_a_scaler_that_is_not_enabled_is_in_nobodys_way(three):
    run_cell(three, "off = torch.amp.GradScaler('cpu', enabled=False)")
    run_cell(three, "raise OSError('on all')")
    three.mend()
    recover(three)
    ran = run_cell(three, "state = off.state_dict()")
    assert [values["state"] for values in ran.values.values()] == [{}] * 3


def test_networks_that_no_optimizer_trains_and_that_differ_on_purpose_are_left_alone(three):
    run_cell(three, "own = nn.Linear(3, 1)\nwith torch.no_grad(): own.bias.fill_(replica_id)")
    run_cell(
        three,
        "for _ in range(replica_id):\n    with torch.no_grad(): own.bias.add_(1)\nraise OSError('on all')",
    )
    three.mend()
    recover(three)
    ran = run_cell(three, "bias = float(own.bias)")
    assert [ran.values[r]["bias"] for r in range(3)] == [0, 2, 4]


@pytest.mark.parametrize("when", [Snapshot, Restore])
def test_a_replica_that_dies_during_the_recovery_is_filled_by_the_next(three, monkeypatch, when):
    """A replica that has been started and not been filled is none to fill others from."""
    first, second = three.status()[0].pid, three.status()[2].pid
    os.kill(first, signal.SIGKILL)
    eventually(three.dead, "the death is noticed")
    three.mend()
    assert three.blank == {0}
    run = three.run

    def struck(requests, **options):
        if any(isinstance(what, when) for what in requests.values()):
            os.kill(three.status()[0].pid, signal.SIGKILL)
        return run(requests, **options)

    monkeypatch.setattr(three, "run", struck)
    with pytest.raises(ReplicaDied):
        recover(three)
    monkeypatch.undo()
    three.mend()
    assert three.blank == {0}
    recovery = recover(three)
    assert (recovery.source, recovery.filled) == (1, (0,))
    assert three.status()[2].pid == second
    assert {values["k"] for values in run_cell(three, "k = kept").values.values()} == {3}


def test_who_asks_whether_all_are_equal_is_told_of_a_death(three):
    os.kill(three.status()[2].pid, signal.SIGKILL)
    with pytest.raises(ReplicaDied):
        compare(three)


DRAW = "import random, numpy as np\nbuilt = nn.Linear(4, 4).weight.detach().clone()\n" + (
    "drawn = random.random(), float(np.random.rand())\nmodel(torch.ones(2, 3))\nown = float(torch.rand(()))"
)


def test_a_survivor_that_dies_as_soon_as_it_has_told_what_it_holds_leaves_none_of_that_open(three, monkeypatch):
    run_cell(three, "big = torch.ones(1_000_000)")
    run = three.run

    def opened() -> int:
        return sum("mirror_nb (deleted)" in os.readlink(link) for link in _descriptors())

    def died_since(requests, **options):
        report = run(requests, **options)
        for replica_id, what in requests.items():
            if isinstance(what, Snapshot):
                death = Death(replica_id, three.devices[replica_id], 1, -signal.SIGKILL)
                report.answers[replica_id].death = death
        return report

    before = opened()
    three.blank.add(2)
    monkeypatch.setattr(three, "run", died_since)
    with pytest.raises(ReplicaDied):
        recover(three)
    assert opened() == before
    monkeypatch.undo()
    recover(three)
    assert opened() == before


def _descriptors() -> list[Path]:
    # The listing's own is closed by now.
    return [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def test_who_was_started_anew_draws_the_same_random_numbers_as_the_others(three):
    assert run_cell(three, "torch.manual_seed(11)\n" + DRAW).report.clean
    os.kill(three.status()[1].pid, signal.SIGKILL)
    eventually(three.dead, "the death is noticed")
    three.mend()
    recover(three)
    for _ in range(2):
        seen = run_cell(three, DRAW).values
        assert len({str(values["built"]) for values in seen.values()}) == 1
        assert len({values["drawn"] for values in seen.values()}) == 1
        # Once a network has run, each draws numbers of its own.
        assert len({values["own"] for values in seen.values()}) == 3


def test_when_nobody_is_left_there_is_no_source(three):
    for line in three.status():
        os.kill(line.pid, signal.SIGKILL)
    eventually(lambda: len(three.dead()) == 3, "the deaths are noticed")
    three.mend()
    assert recover(three).source is None
    assert three.blank == set()


OWN_OPTIMIZER = """
class Signs(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                p -= group["lr"] * p.grad.sign()

model = nn.Linear(3, 1)
optimizer = Signs(model.parameters())
for _ in range(3): step()
"""


def test_an_optimizer_whose_class_a_cell_made_comes_back_and_its_steps_count(three):
    assert run_cell(three, OWN_OPTIMIZER).report.clean
    os.kill(three.status()[1].pid, signal.SIGKILL)
    eventually(three.dead, "the death is noticed")
    three.mend()
    assert recover(three).left == ()
    assert [values["steps"] for values in look(three)] == [3] * 3
    # One of them, the one that was filled, is a step ahead.
    run_cell(
        three,
        "step()\noptimizer.zero_grad()\nmodel(torch.ones(2, 3)).square().mean().backward()\n"
        "if replica_id == 1:\n    optimizer.step()\n    raise OSError('after the step')\nstrategy.reduce('sum', 1.0)",
    )
    three.mend()
    assert recover(three).source == 1
    assert [values["steps"] for values in look(three)] == [5] * 3


UNEVEN = """
fresh = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
means = []
for parts in (fresh, blocks):
    for turn in range(7):
        parts.zero_grad()
        # Each replica another one, in turns; the last is never used.
        parts[(replica_id + turn) % 3](torch.ones(2, 3)).sum().backward()
    means.append([None if part.weight.grad is None else round(float(part.weight.grad.mean()), 4) for part in parts])
"""


@pytest.mark.parametrize(
    "made",
    ["", "if replica_id == 1: own = nn.Linear(3, 3)\ntorch.manual_seed(5)"],
    ids=["after-a-death", "after-a-module-on-one-replica"],
)
def test_layers_of_one_shape_that_each_replica_uses_in_its_own_order_are_not_mixed_up(three, made):
    blocks = "blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))\n"
    assert run_cell(three, made + "\n" + blocks).report.clean
    if not made:
        os.kill(three.status()[1].pid, signal.SIGKILL)
        eventually(three.dead, "the death is noticed")
        three.mend()
        recover(three)
    ran = run_cell(three, UNEVEN)
    assert ran.report.clean, ran.report.failures
    # Two rows of ones, on one of three replicas.
    assert [values["means"] for values in ran.values.values()] == [[[0.6667, 0.6667, 0.6667, None]] * 2] * 3


FROM_A_FOLDER = """
import sys
sys.path.insert(0, {folder!r})
import {module} as of_mine
network, tied, other = of_mine.Net(), None, "kept"
tied = network
"""


@pytest.mark.parametrize("there", [True, False], ids=["still-there", "gone"])
def test_a_module_that_a_cell_found_by_a_path_of_its_own_is_found_anew_or_its_names_are_left_out(
    three, tmp_path, there, monkeypatch
):
    module = f"of_mine_{tmp_path.name}"
    source = tmp_path / f"{module}.py"
    source.write_text("from torch import nn\nclass Net(nn.Linear):\n    def __init__(self): super().__init__(2, 2)\n")
    with monkeypatch.context() as found:
        # The controller has it, by another way than a replica that is started anew.
        found.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, module, importlib.import_module(module))
    assert run_cell(three, FROM_A_FOLDER.format(folder=str(tmp_path), module=module)).report.clean
    if not there:
        source.unlink()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    os.kill(three.status()[1].pid, signal.SIGKILL)
    eventually(three.dead, "the death is noticed")
    three.mend()
    recovery = recover(three)
    assert recovery.filled == (1,)
    assert set(recovery.left) == (set() if there else {"of_mine", "network", "tied"})
    names = run_cell(three, "names = {'network', 'tied', 'other', 'model'} & globals().keys()").values
    assert names[0]["names"] == {"network", "tied", "other", "model"}
    assert names[1]["names"] == ({"network", "tied", "other", "model"} if there else {"other", "model"})
    run_cell(three, "del of_mine, network, tied", replicas=[0, 1, 2] if there else [0, 2])


WRAPPED = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
class Twisted(nn.Module):
    def __init__(self):
        super().__init__()
        # Used the other way round: DDP cuts other buckets once it has seen a backward pass.
        self.last, self.middle, self.first = nn.Linear(8, 1), nn.Linear(8, 8), nn.Linear(3, 8)

    def forward(self, x):
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))

def counted(calls, bucket):
    calls.append(bucket.index())
    return fp16_compress_hook(None, bucket)

calls = []
torch.manual_seed(0)
model = Twisted()
wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001, gradient_as_bucket_view={view})
{hook}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def turn(k):
    optimizer.zero_grad()
    wrapped(torch.tensor([[1.0, replica_id, k]])).square().mean().backward()
    optimizer.step()
"""
DIES = "model.middle.weight.register_hook(lambda _: os.kill(os.getpid(), 9))"
REFERENCE = """
import copy
alone = copy.deepcopy(model)
others = torch.optim.SGD(alone.parameters(), lr=0.1)
for k in range(3):
    others.zero_grad()
    with strategy.no_sync():
        (sum(alone(torch.tensor([[1.0, r, k]])).square().mean() for r in range(3)) / 3).backward()
    others.step()
calls.clear()
for k in range(3):
    turn(k)
called = len(calls)
weights = [parameter.detach().clone() for parameter in model.parameters()]
expected = [parameter.detach().clone() for parameter in alone.parameters()]
"""


HOOK = "wrapped.register_comm_hook(calls, counted)"


@pytest.mark.parametrize(
    ("before", "idle", "view", "hook"),
    [(0, True, True, ""), (3, False, True, ""), (1, False, False, HOOK), (3, True, False, HOOK)],
    ids=["before-the-first-step", "in-backward", "with-a-hook-in-backward", "with-a-hook"],
)
def test_a_model_in_ddp_goes_on_after_a_death(three, before, idle, view, hook):
    wrap = WRAPPED.format(view=view, hook=hook)
    assert run_cell(three, f"{wrap}\nfor k in range({before}):\n    turn(k)").report.clean
    if idle:
        os.kill(three.status()[1].pid, signal.SIGKILL)
        eventually(three.dead, "the death is noticed")
    else:
        ran = run_cell(three, f"import os\nif replica_id == 1:\n    {DIES}\nturn(7)")
        assert [death.replica_id for death in ran.report.deaths] == [1]
    three.mend()
    recover(three)
    ran = run_cell(three, REFERENCE)
    assert ran.report.clean, ran.report.failures
    for values in ran.values.values():
        # The hook rounds to 16 bits.
        torch.testing.assert_close(values["weights"], values["expected"], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(values["weights"], ran.values[0]["weights"], atol=0, rtol=0)
    called = [values["called"] for values in ran.values.values()]
    assert called == [called[0]] * 3
    assert (called[0] > 3) is bool(hook)
