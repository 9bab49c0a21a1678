"""Optimizers, schedulers and scalers in mirrored cells, whoever made them: the same ones in the notebook."""

from __future__ import annotations

import gc
import os
import signal
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driving import eventually, gone, running
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from mirror_nb.errors import TransferError, UsageError
from mirror_nb.notebook.lent import Lent

Run = Callable[[str], Any]

MADE = """
import copy, io, torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
x = torch.randn(40, 4); y = x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), 0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
"""
STEPS = """
for a, b in batches:
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
"""
HERE = "batches = list(zip(x.split(10), y.split(10)))" + STEPS
THERE = "%%mirrored\nbatches = strategy.distribute_dataset((x, y), batch_size=10)" + STEPS


@pytest.fixture(params=["", "%%mirrored\n"], ids=["made in an ordinary cell", "made in a mirrored cell"])
def run(shell: InteractiveShell, request: pytest.FixtureRequest) -> Run:
    """Run a cell; the notebook has what `MADE` makes."""
    run_cell = running(shell)
    run_cell("%mirror start --devices cpu:0,cpu:1")
    run_cell(request.param + MADE)
    return run_cell


def state(run: Run) -> dict[str, Any]:
    return run("{'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'at': scheduler.state_dict()}")


def on_one_device(shell: InteractiveShell, *cells: str) -> dict[str, Any]:
    """What ordinary Python makes of the cells, with `THERE` as `HERE`."""
    names: dict[str, Any] = {}
    for cell in (MADE, *cells):
        exec(HERE if cell == THERE else cell, names)
    return {
        "model": names["model"].state_dict(),
        "optimizer": names["optimizer"].state_dict(),
        "at": names["scheduler"].state_dict(),
    }


CHANGES = {
    "nothing": "",
    "the learning rate": "optimizer.param_groups[0]['lr'] = 0.5",
    "steps": HERE,
    "where the scheduler stands": "for _ in range(4): scheduler.step()",
    "a state that is loaded": """
saved = copy.deepcopy(optimizer.state_dict())
for part in saved['state'].values(): part['exp_avg'] *= -3
optimizer.load_state_dict(saved)
""",
    "its state in place": "optimizer.state[model.weight]['exp_avg'].mul_(-3)",
    "its state by entries": "optimizer.state[model.weight]['exp_avg'] = torch.full((1, 4), 2.0)",
    "parameters by its state, past autograd's count": """
for parameter in optimizer.param_groups[0]['params']:
    parameter.data.lerp_(optimizer.state[parameter]['exp_avg'], 0.5)
""",
    "its state emptied": "optimizer.state.clear()",
    "its state replaced": "import collections; optimizer.state = collections.defaultdict(dict)",
    "another group": """
more = nn.Parameter(torch.ones(1))
optimizer.add_param_group({'params': [more], 'lr': 0.1})
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
""",
    "another parameter in the place of one, with its moments": """
old = model.bias
model.bias = optimizer.param_groups[0]['params'][1] = nn.Parameter(torch.ones(1))
optimizer.state[model.bias] = optimizer.state.pop(old)
""",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_mirrored_and_ordinary_cells_go_on_from_each_other(shell, run, change):
    for cell in (THERE, change, THERE):
        run(cell)
    torch.testing.assert_close(state(run), on_one_device(shell, THERE, change, THERE))


@pytest.mark.parametrize("where", ["", "%%mirrored\n"])
def test_an_optimizer_trains_the_parameters_that_it_was_given_in_the_place_of_others(run, where):
    given = "model.bias = nn.Parameter(torch.ones(1)); optimizer.param_groups[0]['params'] = list(model.parameters())"
    names: dict[str, Any] = {}
    for cell in (MADE, HERE, given, HERE):
        exec(cell, names)
    for cell in (THERE, where + given, THERE):
        run(cell)
    torch.testing.assert_close(run("model.state_dict()"), names["model"].state_dict())
    assert run("optimizer.param_groups[0]['params'][1] is model.bias")


def test_moments_that_were_moved_wait_for_the_cell_that_reads_their_optimizer(shell, run):
    change = CHANGES["another parameter in the place of one, with its moments"]
    for cell in (THERE, change, "%%mirrored\n1", "optimizer.state_dict()", THERE):
        run(cell)
    torch.testing.assert_close(state(run), on_one_device(shell, THERE, change, THERE))


def test_what_a_cell_sets_is_here_at_once(run):
    run(THERE)
    assert run("scheduler.last_epoch, scheduler.get_last_lr()") == (4, [0.025])
    run("%%mirrored\noptimizer.param_groups[0]['weight_decay'] = 0.25")
    assert run("optimizer.param_groups[0]['weight_decay']") == 0.25
    assert run("scheduler.optimizer is optimizer and optimizer.param_groups[0]['params'][0] is model.weight")


def test_a_scaler_has_one_scale_on_both_sides(run):
    run("scaler = torch.amp.GradScaler('cpu', init_scale=4.0)")
    run("%%mirrored\nscaler.scale(torch.ones(())); scaler.update(8.0)")
    assert run("scaler.get_scale()") == 8.0
    run("scaler.scale(torch.ones(())); scaler.update(2.0)")
    assert run("%%mirrored\nscaler.get_scale()") == 2.0


def test_a_scaler_of_the_users_own_class_may_keep_what_is_no_number(run):
    run(
        """%%mirrored
class Remembers(torch.amp.GradScaler):
    def state_dict(self): return {**super().state_dict(), "seen": ["a"]}
scaler = Remembers("cpu", init_scale=4.0)"""
    )
    assert run("%%mirrored\nscaler.get_scale()") == 4.0


@pytest.mark.parametrize("where", ["", "%%mirrored\n"])
def test_a_scaler_that_the_replicas_have_used_is_updated_in_the_notebook(run, where):
    run(f"{where}scaler = torch.amp.GradScaler('cpu', init_scale=4.0)")
    run("%%mirrored\nscaler.scale(torch.ones(())); scaler.update(8.0)")
    run("scaler.update(64.0)")
    assert run("scaler.get_scale()") == run("%%mirrored\nscaler.get_scale()") == 64.0
    run("%%mirrored\nother = torch.amp.GradScaler('cpu', init_scale=4.0); other.scale(torch.ones(()))")
    run("other.update(16.0)")
    assert run("%%mirrored\nother.get_scale()") == 16.0


@pytest.mark.parametrize("where", ["", "%%mirrored\n"])
def test_a_generator_draws_on_from_where_the_other_side_left_it(run, where):
    run(where + "dice = torch.Generator().manual_seed(8); drawn = [torch.rand(1, generator=dice).item()]")
    run("drawn.append(torch.rand(1, generator=dice).item())")
    run("%%mirrored\ndrawn.append(torch.rand(1, generator=dice).item())")
    run("drawn.append(torch.rand(1, generator=dice).item())")
    assert run("drawn == torch.rand(4, generator=torch.Generator().manual_seed(8)).tolist()")
    run("dice.manual_seed(3); shuffled = torch.utils.data.DataLoader(x, 10, shuffle=True, generator=dice)")
    run("expected = [list(shuffled) for _ in range(2)]; dice.manual_seed(3)")
    run("%%mirrored\nseen = [x for x in strategy.distribute_dataset(shuffled)]")
    assert run("torch.equal(torch.cat([torch.cat(parts) for parts in zip(*seen.values)]), torch.cat(expected[0]))")
    assert run("torch.equal(torch.cat(list(shuffled)), torch.cat(expected[1]))")


LOOKS = {
    "its state": "optimizer.state[model.weight]['exp_avg']",
    "a copy": "copy.deepcopy(optimizer).state[next(iter(copy.deepcopy(optimizer).state))]['exp_avg']",
    "a copy of both": "copy.deepcopy((optimizer, model))[0].state_dict()['state'][0]['exp_avg']",
    "a file": "file = io.BytesIO(); torch.save(optimizer, file); file.seek(0)\n"
    "torch.load(file, weights_only=False).state_dict()['state'][0]['exp_avg']",
    "its values": "list(optimizer.state.values())[0]['exp_avg']",
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_however_a_state_is_looked_at_it_is_that_of_the_replicas(shell, run, look):
    run(THERE)
    if "deepcopy(optimizer)." in look:
        # By the copies of the parameters, which are others.
        look = "list(copy.deepcopy(optimizer).state.values())[0]['exp_avg']"
    expected = on_one_device(shell, THERE)["optimizer"]["state"][0]["exp_avg"]
    torch.testing.assert_close(run(look), expected)


LATER = {
    "by name": ("", "model"),
    "in a list": ("nets = [model]; del model", "nets[0]"),
    "in an object": ("class Keeper: pass\nkeeper = Keeper(); keeper.net = model; del model", "keeper.net"),
}


@pytest.mark.parametrize(("change", "network"), LATER.values(), ids=LATER)
@pytest.mark.parametrize("first", ["optimizer", "scheduler", "parameters", "several"])
@pytest.mark.parametrize("run", [""], indirect=True)
def test_what_goes_to_the_replicas_before_its_network_is_over_that_networks_parameters(run, change, network, first):
    run("parameters, several = list(model.parameters()), [scheduler]\n" + change)
    run(f"%%mirrored\n{first}")
    run(f"%%mirrored\n{network}(x).sum().backward(); scheduler.optimizer.step()")
    assert run(f"%%mirrored\n{network}.weight is scheduler.optimizer.param_groups[0]['params'][0]")
    assert run(f"%%mirrored\n{network}.weight is parameters[0]")
    assert run(f"{network}.weight is parameters[0] is optimizer.param_groups[0]['params'][0]")


def test_in_objects_and_lists_they_are_the_same_ones(run):
    run("""
class Trainer:
    def __init__(self): self.optimizers, self.scheduler = [optimizer], scheduler
    def step(self, a, b):
        F.mse_loss(model(a), b).backward()
        self.optimizers[0].step(); self.scheduler.step()
trainer, both = Trainer(), [optimizer, scheduler]
""")
    run("%%mirrored\nfor _ in range(3): trainer.step(x, y)\nassert both[0] is trainer.optimizers[0] is optimizer")
    assert run("optimizer.param_groups[0]['lr'], scheduler.last_epoch") == (0.025, 3)
    assert run("trainer.optimizers[0] is both[0] is optimizer and both[1] is scheduler")


def test_another_name_that_a_cell_gives_it_means_it_here_too(run):
    run("%%mirrored\nmine, inside = optimizer, {'there': scheduler}")
    assert run("mine is optimizer and inside['there'] is scheduler")


@pytest.mark.parametrize("run", [""], indirect=True)
def test_an_optimizer_of_some_replicas_comes_to_the_others_as_it_is(run):
    run("%%mirrored --replicas 1\n" + HERE)
    run("assert optimizer.state_dict()['state'][0]['step'] == 4")
    steps = run("%%mirrored\noptimizer.state[model.weight]['step'].item(), optimizer.param_groups[0]['lr']")
    assert steps == (4.0, 0.025)


def test_stopped_replicas_leave_their_states_here(shell, run):
    run(THERE)
    run("%mirror stop")
    kept = state(run)
    torch.testing.assert_close(kept, on_one_device(shell, THERE))
    run("%mirror start --devices cpu:0,cpu:1")
    run(THERE)
    torch.testing.assert_close(state(run), on_one_device(shell, THERE, THERE))


def test_an_interrupt_before_replicas_are_stopped_leaves_all_as_it_was(shell, run, monkeypatch):
    run(THERE)

    def interrupted(lent: Lent, optimizer: torch.optim.Optimizer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Lent, "state_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("%mirror stop")
    monkeypatch.undo()
    run(THERE)
    torch.testing.assert_close(state(run), on_one_device(shell, THERE, THERE))


AROUND = """
class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)
    defaults = property(lambda self: self.inner.defaults)
    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)
    def step(self, closure=None):
        self.inner.step(closure)
bare, optimizer = optimizer, Around(optimizer)
"""


def test_an_optimizer_around_another_one_is_an_object_that_has_it(shell, run, request):
    # As accelerate's `prepare` and Lightning make them.
    run(("%%mirrored\n" if "mirrored" in request.node.name else "") + AROUND)
    run(THERE)
    assert run("optimizer.inner is bare and type(optimizer) is Around")
    bare = "{'model': model.state_dict(), 'optimizer': bare.state_dict(), 'at': scheduler.state_dict()}"
    torch.testing.assert_close(run(bare), on_one_device(shell, THERE))
    run("bare.param_groups[0]['lr'] = 0.5")
    run(THERE)
    torch.testing.assert_close(run(bare), on_one_device(shell, THERE, "optimizer.param_groups[0]['lr'] = 0.5", THERE))


LOOKAHEAD = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        # Without torch's own, as timm has it.
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state, self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}, {}
    def step(self, closure=None):
        self.inner.step(closure)
    def state_dict(self):
        return self.inner.state_dict()
optimizer = Lookahead(optimizer)
"""


def test_an_optimizer_around_another_one_need_not_be_made_by_torchs_constructor(shell, run, request):
    run(("%%mirrored\n" if "mirrored" in request.node.name else "") + LOOKAHEAD)
    run(THERE)
    torch.testing.assert_close(state(run), on_one_device(shell, THERE))
    run("optimizer.param_groups[0]['lr'] = 0.5")
    run(THERE)
    torch.testing.assert_close(state(run), on_one_device(shell, THERE, "optimizer.param_groups[0]['lr'] = 0.5", THERE))


@pytest.mark.parametrize("where", ["", "%%mirrored\n"])
def test_an_optimizer_around_another_one_has_that_ones_groups_on_both_sides(run, where):
    # As Lookahead and SAM have them: a scheduler of the outer one is to change the rate of the inner one's steps.
    run(where + LOOKAHEAD)
    same = "optimizer.param_groups is optimizer.inner.param_groups"
    assert run(same)
    assert run("%%mirrored\n" + same)
    run("optimizer.param_groups[0]['lr'] = 0.5")
    assert run("%%mirrored\noptimizer.inner.param_groups[0]['lr']") == 0.5
    run(
        "%%mirrored\noptimizer.add_param_group({'params': [nn.Parameter(torch.ones(1))], 'lr': 0.25})\nmodel.more = "
        "optimizer.param_groups[1]['params'][0]"
    )
    assert run(same)
    assert run("optimizer.inner.param_groups[1]['lr']") == 0.25


SLOW = """
import collections
class Slow(torch.optim.Optimizer):
    def __init__(self, fast, own):
        self.fast, self.param_groups, self.defaults, self.own = fast, fast.param_groups, fast.defaults, own
        self.state = collections.defaultdict(dict)
        torch.optim.Optimizer.__setstate__(self, {})
    def step(self, closure=None):
        self.fast.step(closure)
        for parameter in self.param_groups[0]['params']:
            slow = self.state[parameter].setdefault('slow', torch.zeros_like(parameter))
            parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))
    def state_dict(self):
        fast, slow = self.fast.state_dict(), dict(enumerate(self.state.values()))
        return {**fast, 'slow': slow} if self.own else {'fast': fast, 'slow': slow}
    def load_state_dict(self, told):
        fast = told if self.own else told['fast']
        self.fast.load_state_dict(fast)
        for parameter, slow in zip(self.param_groups[0]['params'], told['slow'].values()):
            self.state[parameter] = slow
        self.param_groups = self.fast.param_groups
"""
LOADS = """
saved = copy.deepcopy(optimizer.state_dict())
for part in saved['slow'].values(): part['slow'] *= 3
optimizer.load_state_dict(saved)
"""


@pytest.mark.parametrize("change", ["", "optimizer.param_groups[0]['lr'] = 0.5", LOADS])
@pytest.mark.parametrize("own", [False, True], ids=["in a form of its own", "with more than torch's"])
def test_an_optimizer_may_tell_its_state_as_it_likes(shell, run, request, own, change):
    around = f"{SLOW}\noptimizer = Slow(optimizer, {own})\n"
    run(("%%mirrored\n" if "mirrored" in request.node.name else "") + around)
    for cell in (THERE, change, THERE):
        run(cell)
    torch.testing.assert_close(state(run), on_one_device(shell, around, THERE, change, THERE))


COUNTING = """
class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            # As timm's Lamb.
            group.setdefault("step", torch.zeros(())).add_(1)
        super().step(closure)
optimizer = Counting(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
"""


def test_a_number_that_a_step_keeps_in_a_group_as_a_tensor_is_one_here_too(shell, run):
    run(COUNTING)
    run(THERE)
    run("%mirror stop")
    run(HERE)
    torch.testing.assert_close(run("optimizer.param_groups[0]['step']"), torch.tensor(8.0))
    run("%mirror start --devices cpu:0,cpu:1")
    run(THERE)
    torch.testing.assert_close(run("optimizer.param_groups[0]['step']"), torch.tensor(12.0))


SCALED = """
class Scaled(torch.optim.SGD):
    def __init__(self, *args):
        super().__init__(*args)
        self.scale, self.mode, self.steps, self.rank = 1.0, 'slow', 0, globals().get('replica_id', 0)
    def step(self, closure=None):
        self.steps += 1
        for parameter in self.param_groups[0]['params']:
            parameter.grad *= self.scale * (2 if self.mode == 'fast' else 1)
        super().step(closure)
optimizer = Scaled(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
"""


@pytest.mark.parametrize("where", ["", "%%mirrored\n"], ids=["set in an ordinary cell", "set in a mirrored cell"])
def test_numbers_that_an_optimizer_of_ones_own_class_keeps_are_the_same_on_both_sides(shell, run, where, request):
    change = "optimizer.scale, optimizer.mode, optimizer.param_groups[0]['lr'] = 0.25, 'fast', 0.05"
    run(("%%mirrored\n" if "made in a mirrored" in request.node.name else "") + SCALED)
    for cell in (THERE, where + change, THERE):
        run(cell)
    torch.testing.assert_close(state(run), on_one_device(shell, SCALED, THERE, change, THERE))
    assert run("optimizer.scale, optimizer.mode, optimizer.steps") == (0.25, "fast", 8)


def test_what_an_optimizer_keeps_of_its_replica_stays_each_ones_own(run):
    run("%%mirrored\n" + SCALED)
    run("optimizer.scale = 0.5; optimizer.param_groups[0]['lr'] = 0.05")
    ranks = run("%%mirrored\noptimizer.rank, optimizer.scale, optimizer.param_groups[0]['lr']")
    assert list(ranks) == [(0, 0.5, 0.05), (1, 0.5, 0.05)]


def pids(shell: InteractiveShell) -> list[int]:
    session = shell.magics_manager.registry["MirrorMagics"].session
    return [status.pid for status in session.pool.status()]


def kill(shell: InteractiveShell, *replicas: int) -> None:
    for pid in [pids(shell)[replica] for replica in replicas]:
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: gone(pid), "the replica is dead")


def test_a_dead_replica_costs_no_state(shell, run):
    run(THERE)
    kill(shell, 0)
    torch.testing.assert_close(state(run), on_one_device(shell, THERE))
    run(THERE)
    torch.testing.assert_close(state(run), on_one_device(shell, THERE, THERE))


def test_replicas_that_stop_without_one_that_died_leave_the_states_of_the_others(shell, run):
    run(THERE)
    kill(shell, 0)
    run("%mirror stop")
    torch.testing.assert_close(state(run), on_one_device(shell, THERE))


def test_where_all_died_the_state_is_that_which_was_read_last(shell, run):
    run(THERE)
    read = state(run)
    run(THERE)
    kill(shell, 0, 1)
    assert state(run)["optimizer"]["state"][0]["step"] == read["optimizer"]["state"][0]["step"] == 4
    # The moments of then, the values and the settings that the second cell brought back.
    run(THERE)
    assert state(run)["optimizer"]["state"][0]["step"] == 8
    assert run("scheduler.last_epoch") == 12


def test_replicas_that_all_died_are_asked_nothing_at_the_end(shell, run):
    run(THERE)
    kill(shell, 0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run("%mirror stop")
    assert run("len(optimizer.state)") == 0


def test_a_state_that_cannot_be_asked_for_at_the_end_is_told_of(shell, run):
    run("%%mirrored\nmore = [nn.Parameter(torch.ones(1))]\noptimizer.add_param_group({'params': more})")
    run("second = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)")
    run("%%mirrored\n(model(x).sum() + more[0].sum()).backward(); optimizer.step(); second.step()")
    without = "ended without the latest values of the AdamW: the AdamW got parameter"
    with pytest.warns(UserWarning, match=without) as told:
        run("%mirror stop")
    assert len(told) == 1
    # The others' are here.
    assert len(run("second.state")) == 2


def test_a_scheduler_that_arrives_does_not_warn_of_steps_it_did_not_see(shell, run):
    said: list[str] = run(f"""%%mirrored
import uuid
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    {THERE.partition(chr(10))[2].replace(chr(10), chr(10) + "    ")}
[str(one.message) for one in caught]
""")
    assert said == []


@pytest.mark.parametrize("run", [""], indirect=True)
@pytest.mark.parametrize("where", ["", "%%mirrored\n"])
def test_a_scheduler_of_an_ordinary_cell_does_not_warn_of_steps_that_mirrored_ones_made(run, where):
    run(where + "net = nn.Linear(4, 1); mine = torch.optim.SGD(net.parameters(), 0.5)")
    run("%%mirrored\nnet(x).sum().backward(); mine.step()")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run("later = torch.optim.lr_scheduler.StepLR(mine, 1, 0.5); mine.zero_grad()")
        run("%%mirrored\nnet(x).sum().backward(); mine.step()")
        run("later.step()")
    assert run("%%mirrored\nmine.param_groups[0]['lr']") == 0.25


def test_a_group_that_a_cell_adds_is_told_where_the_state_is_asked_for(run):
    run("%%mirrored\nmore = [nn.Parameter(torch.ones(1))]\noptimizer.add_param_group({'params': more})")
    run("%%mirrored\n(model(x).sum() + more[0].sum()).backward(); optimizer.step()")
    with pytest.raises(UsageError, match="AdamW got parameter groups in the replicas that it has not here"):
        run("optimizer.state_dict()")


def test_a_group_that_a_cell_adds_of_a_tensor_with_a_name_is_here_too(run):
    run("%%mirrored\nmore = nn.Parameter(torch.ones(1))\noptimizer.add_param_group({'params': [more], 'lr': 7.0})")
    run("%%mirrored\n(model(x).sum() + more.sum()).backward(); optimizer.step()")
    assert run("optimizer.param_groups[1]['params'][0] is more and scheduler.optimizer is optimizer")
    assert run("len(optimizer.state_dict()['state'])") == 3
    run("optimizer.param_groups[1]['lr'] = 3.0")
    assert run("%%mirrored\noptimizer.param_groups[1]['lr'], len(optimizer.state)") == (3.0, 3)


def test_a_group_that_a_cell_adds_of_a_networks_parameters_is_here_too(run):
    run("%%mirrored\nmore = nn.Linear(4, 1)\noptimizer.add_param_group({'params': more.parameters(), 'lr': 7.0})")
    run("%%mirrored\n(model(x) + more(x)).sum().backward(); optimizer.step()")
    assert run("scheduler.optimizer is optimizer and optimizer.param_groups[1]['lr']") == 7.0
    assert run("optimizer.param_groups[1]['params'][0] is more.weight and len(optimizer.state_dict()['state'])") == 4
    run("optimizer.param_groups[1]['lr'] = 3.0")
    assert run("%%mirrored\noptimizer.param_groups[1]['lr'], len(optimizer.state)") == (3.0, 4)


MADE_INSIDE = {
    "a list": ("both = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)]", "both[0]", "model"),
    "a dict, before its network": (
        "net = nn.Linear(4, 1); it = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)\n"
        "both = {'optimizer': it, 'net': net}; del net, it",
        "both['optimizer']",
        "both['net']",
    ),
    "an object, with its network": (
        "class Trainer: pass\nboth = Trainer(); both.net = nn.Linear(4, 1)\n"
        "both.optimizer = torch.optim.SGD(both.net.parameters(), 0.1, momentum=0.9)",
        "both.optimizer",
        "both.net",
    ),
    "another optimizer": (
        "class Two(torch.optim.Optimizer):\n"
        "    def __init__(self, parameters):\n"
        "        super().__init__(parameters, {'lr': 1.0})\n"
        "        self.inner = torch.optim.SGD(self.param_groups, 0.1, 0.9)\n"
        "    def step(self): self.inner.step()\n"
        "both = Two(model.parameters())",
        "both.inner",
        "model",
    ),
}


LIT = """
class Lit(nn.Module):
    def __init__(self):
        super().__init__(); self.net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        self.kept, self.more = [optimizer], {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100)}
"""
MADE_INSIDE |= {
    "a network": (LIT + "both = Lit()", "both.kept[0]", "both.net"),
    "a network, and by name": (LIT + "both = Lit(); also = both.kept[0]", "also", "both.net"),
    "a network in a list": (LIT + "both = [Lit()]", "both[0].kept[0]", "both[0].net"),
}


@pytest.mark.parametrize(("make", "optimizer", "network"), MADE_INSIDE.values(), ids=MADE_INSIDE)
@pytest.mark.parametrize("run", [""], indirect=True)
def test_made_in_a_cell_inside_something_else_it_is_the_same_one(run, make, optimizer, network):
    run(f"%%mirrored\n{make}\n{network}(x).sum().backward(); {optimizer}.step()")
    assert run(f"{optimizer}.param_groups[0]['params'][0] is {network}.weight")
    run(f"{optimizer}.param_groups[0]['momentum'] = 0.5")
    assert run(f"%%mirrored\n{optimizer}.step(); {optimizer}.param_groups[0]['momentum']") == 0.5
    there = run(f"%%mirrored\n{optimizer}.state[{network}.weight]['momentum_buffer']")
    torch.testing.assert_close(run(f"{optimizer}.state[{network}.weight]['momentum_buffer']"), there)
    if "Lit" in make:
        assert run(f"(both[0] if isinstance(both, list) else both).more['scheduler'].optimizer is {optimizer}")
        assert run("'also' not in vars() or also is both.kept[0]") if "also" in make else True


NOT_THE_SAME = {
    "over parameters without a name": "w = [nn.Parameter(torch.ones(2))]; mine = torch.optim.SGD(w)",
    "over what another one has": "mine = torch.optim.SGD(nn.Linear(1, 1).parameters())",
    "a scheduler of such a one": "mine = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], 0.1), 1)",
    "one whose attributes are large": "mine = torch.optim.SGD(model.parameters()); mine.more = torch.ones(2**20)",
    "one that cannot be pickled": "mine = torch.optim.SGD(model.parameters()); mine.more = (i for i in ())",
}


@pytest.mark.parametrize("make", NOT_THE_SAME.values(), ids=NOT_THE_SAME)
@pytest.mark.parametrize("run", [""], indirect=True)
def test_what_cannot_be_the_same_one_leaves_a_stand_in(run, make):
    run(f"%%mirrored\n{make}")
    assert run("type(mine).__name__") == "Remote"
    assert run("%%mirrored\ntype(mine).__module__").startswith("torch.optim")


@pytest.mark.parametrize("run", ["%%mirrored\n"], indirect=True)
def test_one_that_only_another_replica_made_can_be_fetched(run):
    run("%%mirrored\nif replica_id == 1: its = torch.optim.SGD(model.parameters(), 0.5)")
    run("its = its.fetch()")
    assert run("its.param_groups[0]['lr'], its.param_groups[0]['params'][0] is model.weight") == (0.5, True)
    run("its.param_groups[0]['lr'] = 0.25")
    assert run("%%mirrored\nits.param_groups[0]['lr']") == 0.25


@pytest.mark.parametrize("run", ["%%mirrored\n"], indirect=True)
def test_the_state_of_an_optimizer_that_the_notebook_has_by_another_name_lives_on(run):
    run(THERE + "\ndel scheduler")
    run("before = optimizer; steps = optimizer.state_dict()['state'][0]['step']")
    run("%%mirrored\noptimizer = torch.optim.SGD(model.parameters(), 0.5)\nimport gc; gc.collect()")
    assert run("type(optimizer).__name__, type(before).__name__") == ("SGD", "AdamW")
    run("%%mirrored\nmodel(x).sum().backward(); before.step()")
    assert run("before.state_dict()['state'][0]['step'] - steps") == 1


@pytest.mark.parametrize("run", ["%%mirrored\n"], indirect=True)
def test_a_state_that_went_with_a_name_in_the_replicas_costs_calls_of_a_strategy_nothing(run):
    run("import mirror_nb as mnb\nown = mnb.MirroredStrategy(['cpu:0', 'cpu:1'])")
    run("many = [*range(5000), optimizer, *range(5000)]")
    run("before = own.mirror(optimizer); own.mirror(model)")
    run("def step():\n    model(x).sum().backward(); before.step()\nown.run(step); before.state_dict(); del before")
    run(THERE + "\ndel scheduler")
    for _ in range(2):
        run("%%mirrored\noptimizer = torch.optim.SGD(model.parameters(), 0.5)\nimport gc; gc.collect()")
    with pytest.warns(UserWarning, match="state of this AdamW was in the replicas.*replicas go on with theirs"):
        assert run("own.run(lambda: 1)") == 1
    with pytest.raises(UsageError, match="the state of this AdamW was in the replicas"):
        run("many[5000].state_dict()")
    run("own.close()")


@pytest.mark.parametrize("run", ["%%mirrored\n"], indirect=True)
def test_a_state_that_went_with_a_name_in_the_replicas_is_an_error_where_it_is_looked_at(run):
    run(THERE + "\ndel scheduler")
    # What is in the middle of so many is not looked at before each cell.
    run("many = [*range(5000), optimizer, *range(5000)]")
    run("%%mirrored\noptimizer = torch.optim.SGD(model.parameters(), 0.5)\nimport gc; gc.collect()")
    run("before = many[5000]")
    run("%%mirrored\noptimizer = torch.optim.SGD(model.parameters(), 0.5)\nimport gc; gc.collect()")
    assert run("type(optimizer).__name__, type(before).__name__") == ("SGD", "AdamW")
    with pytest.raises(
        UsageError, match=r"the state of this AdamW was in the replicas.*call its state_dict\(\) before"
    ):
        run("before.state_dict()")
    with pytest.raises(UsageError, match="state of this AdamW"):
        run("%%mirrored\nbefore.step()")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run("%mirror restart")
    assert not [one for one in caught if "the state of this" in str(one.message)]
    run("before.load_state_dict({**torch.optim.AdamW(model.parameters()).state_dict(), 'state': {}})")
    run("%%mirrored\nmodel(x).sum().backward(); before.step()")
    assert run("before.state_dict()['state'][0]['step']") == 1


@pytest.mark.parametrize("run", ["%%mirrored\n"], indirect=True)
def test_a_state_that_was_read_before_its_name_went_is_kept(run):
    run(THERE + "\ndel scheduler")
    run("before = optimizer; kept = copy.deepcopy(optimizer.state_dict())")
    run("%%mirrored\noptimizer = None\nimport gc; gc.collect()")
    torch.testing.assert_close(run("before.state_dict()"), run("kept"))


def test_what_the_notebook_lets_go_of_the_replicas_let_go_of(run):
    run("import weakref")
    run("%%mirrored\nscheduler; there = weakref.ref(optimizer)")
    run("del scheduler, optimizer\nimport gc; gc.collect()")
    assert run("%%mirrored\nimport gc; gc.collect()\nthere() is None") is True


@pytest.mark.parametrize("run", [""], indirect=True)
def test_plain_attributes_of_networks_are_the_same_ones_too(shell, run):
    run("net = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5)); net.losses, net.temperature = [], 1.0")
    run("%%mirrored\nnet(x).sum().backward()\nnet.losses.append(2.0); net.temperature *= 0.5; net.whose = replica_id")
    assert run("net.losses, net.temperature, net.whose") == ([2.0], 0.5, 0)
    run("net[1].p = 0.25; net.losses.clear()")
    assert run("%%mirrored\nnet[1].p, net.losses, net.temperature") == (0.25, [], 0.5)
    # What the notebook has not changed the replicas keep.
    assert run("%%mirrored\nnet.whose").values == (0, 1)
    run("net.act = torch.relu")
    assert run("%%mirrored\nnet.act is torch.relu")
    run("%%mirrored\nmade = nn.Dropout(0.5)")
    run("made.p = 0.75")
    assert run("%%mirrored\nmade.p") == 0.75


def closing(shell: InteractiveShell, source: str) -> str:
    """The line below a mirrored cell."""
    with capture_output() as shown:
        result = shell.run_cell(source)
    result.raise_error()
    return shown.outputs[-1].data["text/plain"]


APART = "%%mirrored\nwith torch.no_grad(): {}.bias += replica_id"


def test_replicas_that_part_ways_are_told_of_once_and_brought_together(shell, run):
    assert "differs" not in closing(shell, THERE)
    told = closing(shell, APART.format("model"))
    assert told.endswith("differs between the replicas: model (%mirror push model makes it equal)")
    assert "differs" not in closing(shell, APART.format("model"))
    run("%%mirrored\noptimizer.param_groups[0]['lr'] = 0.1 * (replica_id + 1)\nscheduler.last_epoch += replica_id")
    run("%mirror push model optimizer scheduler")
    look = "%%mirrored\noptimizer.param_groups[0]['lr'], scheduler.last_epoch, model.bias.tolist()"
    assert run(look) == run("(optimizer.param_groups[0]['lr'], scheduler.last_epoch, model.bias.tolist())")
    assert "differs" not in closing(shell, THERE)
    assert "differs between the replicas: model" in closing(shell, APART.format("model"))


def test_a_buffer_that_each_replica_wrote_by_itself_is_told_too(shell, run):
    made = "kept = nn.BatchNorm1d(2)\nkept.register_buffer('seen', torch.zeros(1))\nkept(torch.rand(4, 2))"
    assert "differs" not in closing(shell, f"%%mirrored\n{made}\nkept.seen += 1")
    assert "differs" not in closing(shell, "%%mirrored\nkept(torch.rand(4, 2)); kept.seen += 1")
    told = closing(shell, "%%mirrored\nkept.seen += replica_id")
    assert told.endswith("differs between the replicas: buffers of kept (%mirror push kept makes it equal)")


def test_a_warning_of_what_a_cell_has_left_names_no_line_of_pythons(shell, run):
    # Of the same words a replica warns once.
    seen = f"seen_{uuid.uuid4().hex}"
    run(f"%%mirrored\nkept = nn.Linear(2, 2)\nkept.{seen} = {{}}")
    with capture_output() as shown:
        shell.run_cell(f"%%mirrored\nkept.{seen}[0] = torch.zeros(1 << 19)").raise_error()
    assert f"UserWarning: `{seen}` of a network has more than 1 MiB of tensors" in shown.stderr
    assert "multiprocessing" not in shown.stderr


def test_a_network_that_stayed_in_the_replicas_is_told_to_differ_once_it_is_here(shell, run):
    stays = "import threading\nkept = nn.Linear(2, 2)\nkept.lock = threading.Lock()"
    assert "differs" not in closing(shell, APART.format("kept").replace("with", f"{stays}\nwith", 1))
    run("%%mirrored\ndel kept.lock")
    run("%mirror pull kept")
    assert "differs between the replicas: kept" in closing(shell, "%%mirrored\nkept.bias.sum()")


def test_what_a_cell_changed_in_an_object_is_told_of_and_can_be_brought(shell, run):
    run("import types; meter = types.SimpleNamespace(seen=0)")
    told = closing(shell, "%%mirrored\nmeter.seen += 5 + replica_id")
    assert told.endswith("changed in the replicas alone: meter (%mirror pull meter brings it)")
    run("%mirror pull meter --replica 0")
    assert run("meter.seen") == 5
    run("%%mirrored\nmeter.seen += 5 + replica_id")
    run("meter.seen = 1")
    both = "not sent, since the replicas have changed it too: meter (%mirror push meter)"
    assert closing(shell, "%%mirrored\nmeter.seen").endswith(both)
    run("%mirror push meter")
    assert run("%%mirrored\nmeter.seen") == 1


def test_a_network_without_a_name_that_differs_is_told_by_its_class(shell, run):
    run("class Holder: pass\nholder = Holder(); holder.net = nn.Linear(2, 2)")
    assert closing(shell, APART.format("holder.net")).endswith("differs between the replicas: a Linear")


@pytest.mark.parametrize("options", ["--no-sync", "--replicas 0,1"])
def test_who_trains_apart_on_purpose_is_told_nothing(shell, run, options):
    told = closing(shell, APART.format("model").replace("%%mirrored", f"%%mirrored {options}"))
    assert ("differs" in told) == (options != "--no-sync")


def test_statistics_that_differ_are_no_difference(shell, run):
    run("norm = nn.BatchNorm1d(4)")
    assert "differs" not in closing(shell, "%%mirrored\nnorm(x + replica_id)")


def test_attributes_that_a_class_adds_to_its_optimizers_travel(shell, run):
    run("""
class Averaging(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.inner, self.seen = torch.optim.Adam(self.param_groups, lr), []
    def step(self):
        self.seen.append(len(self.seen)); self.inner.step()
slow, quick = Averaging(model.parameters(), 0.1), torch.optim.LBFGS(model.parameters())
""")
    seen = """%%mirrored
(model(x) ** 2).mean().backward()
slow.step()
def closure():
    quick.zero_grad(); loss = F.mse_loss(model(x), y); loss.backward(); return loss
quick.step(closure)
slow.seen, slow.inner.param_groups[0]['params'][0] is slow.param_groups[0]['params'][0] is model.weight
"""
    assert run(seen) == ([0], True)
    assert run("F.mse_loss(model(x), y)").item() < 1e-6


def test_in_this_process_too(shell, run):
    run("%mirror stop\n%mirror start --in-process --devices cpu:0")
    try:
        run(THERE)
        run("optimizer.param_groups[0]['lr'] = 0.3")
        run(THERE)
        change = "optimizer.param_groups[0]['lr'] = 0.3"
        torch.testing.assert_close(state(run), on_one_device(shell, THERE, change, THERE))
    finally:
        run("%mirror stop")


def test_without_replicas_nobody_is_asked():
    lent, optimizer = Lent(lambda: None), torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    lent.add(optimizer)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()
    lent.send_changes()
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_answers_that_cannot_be_opened_here_leave_no_descriptor(replicas):
    class Closed:
        def __init__(self) -> None:
            self.rows = torch.zeros(1 << 20)

        def __setstate__(self, state: dict[str, Any]) -> None:
            raise OSError("not here")

    pool, rounds = replicas(2), 8
    lent = Lent(lambda: pool)
    lent.ask_all(lambda: None, (), lambda obj: None)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(rounds):
        with pytest.raises(OSError, match="not here"):
            lent.ask_all(Closed, (), lambda obj: None)
    # Pools that other tests have done with may begin and end replicas of their own meanwhile.
    assert len(os.listdir("/proc/self/fd")) < before + rounds


def test_what_is_gone_here_cannot_be_referred_to():
    lent, optimizer = Lent(lambda: None), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    token = lent.token(optimizer)
    assert lent.resolve(token) is optimizer
    del optimizer
    gc.collect()
    with pytest.raises(TransferError, match=r"refers to \('object', 'o0'\), which no longer exists here"):
        lent.resolve(token)


def test_a_cell_goes_on_from_what_a_strategy_of_the_notebook_has_trained(run):
    run("import torch, mirror_nb as mnb\nalone = mnb.MirroredStrategy('cpu:0')")
    run("with alone.scope():\n    net = torch.nn.Linear(2, 1)\n    torch.nn.init.zeros_(net.bias)")
    # Nobody reads the network here: the cell that comes next has the function already.
    run("def add():\n    with torch.no_grad():\n        net.bias.add_(1)")
    for _ in range(3):
        run("alone.run(add)")
        run("%%mirrored\nadd()")
    assert run("net.bias.item()") == 6.0
    run("alone.close()")
