"""What the notebook has of its names when a cell failed, and when replicas end that held them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from driving import press_ctrl_c, running
from IPython.utils.capture import capture_output

from mirror_nb.environment import modes
from mirror_nb.errors import ReplicaDied, ReplicaError, TransferError, UsageError
from mirror_nb.notebook.session import Session
from mirror_nb.pool.local import LocalPool
from mirror_nb.strategies.objects import Objects

MADE = """
import torch
from torch import nn
torch.manual_seed(0)
X = torch.randn(8, 3)
net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
def train(net, opt):
    for _ in range(3): opt.zero_grad(); net(X).square().mean().backward(); opt.step()
"""
DIES = "import os, signal\nif replica_id == 0: os.kill(os.getpid(), signal.SIGKILL)\nstrategy.reduce('sum', 1)"


@pytest.fixture
def run(shell):
    return running(shell)


def lost(run, source: str) -> None:
    """Run a mirrored cell at whose end replica 0 dies."""
    with pytest.raises(ReplicaDied):
        run(f"%%mirrored --quiet\n{source}\n{DIES}")


def same_as_in_replica_1(run, net: str = "net", opt: str = "opt") -> bool:
    run(f"values = {{k: v.clone() for k, v in {net}.state_dict().items()}}\nstate = {opt}.state_dict()['state']")
    run(f"%%mirrored --quiet --replicas 1\nvalues\nequal = {net}.state_dict(), {opt}.state_dict()['state']")
    values, state = run("equal")
    return all(torch.equal(values[name], run("values")[name]) for name in values) and all(
        torch.equal(state[i]["momentum_buffer"], run("state")[i]["momentum_buffer"]) for i in state
    )


def test_a_network_without_a_name_there_is_in_a_replica_that_was_started_anew(run):
    run(f"%%mirrored --quiet\n{MADE}")
    run("kept, of_it = [net], [opt]")
    run("%%mirrored --quiet\nnet = opt = None")
    lost(run, "pass")
    run("%%mirrored --quiet\ntrain(kept[0], of_it[0])\nequal = kept[0](X).sum().item()")
    assert isinstance(run("equal"), float)


def test_an_object_that_a_cell_changes_after_a_death_is_one_on_both_sides(run):
    run("%%mirrored --quiet\nclass Trainer: pass\nconfig = {'lr': 1}\ntrainer = Trainer(); trainer.config = config")
    lost(run, "pass")
    run("%%mirrored --quiet\ntrainer.epoch = 3")
    assert run("trainer.epoch") == 3
    run("%%mirrored --quiet\ntrainer.epoch = replica_id")
    assert run("trainer.epoch") == 3


def test_objects_and_functions_are_one_value_after_a_death_too(run):
    run("%%mirrored --quiet\ncalls = {}\ndef register(f): calls[f.__name__] = f")
    run("%%mirrored --quiet\n@register\ndef one(x): return 'held', x")
    run("%%mirrored --quiet\nclass Log:\n    def __init__(self, **held): self.held = dict(held)\nlogs = [Log(held=1)]")
    lost(run, "logs[0].held['more'] = 2")
    # In the replica that was filled anew equal strings are other objects, and its pickles other bytes.
    run("%%mirrored --quiet\nlogs.append(Log(held=1, more=2))")
    assert [log.held for log in run("logs")] == [{"held": 1, "more": 2}] * 2
    run("%%mirrored --quiet\n@register\ndef two(x): return 'held', x")
    assert run("calls['one'](1), calls['two'](2)") == (("held", 1), ("held", 2))


AHEAD = """
import mirror_nb as mnb
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
steps = mnb.Variable(0, aggregation="only_first_replica")
def step(fails=()):
    opt.zero_grad()
    net(X).square().mean().backward()
    if replica_id in fails: raise OSError("before the step")
    opt.step(); sched.step(); steps.assign_add(1)
step()
"""


@pytest.mark.parametrize("fails", [0, 1])
def test_what_is_saved_after_a_failure_is_of_the_one_step_that_all_replicas_go_on_from(run, fails):
    run(MADE)
    run(f"%%mirrored --quiet\n{AHEAD}")
    with pytest.raises(OSError, match="before the step"):
        run(f"%%mirrored --quiet\nstep(fails=({fails},))\nstrategy.reduce('sum', 1)")
    run("saved = {k: v.clone() for k, v in net.state_dict().items()}\nmoments = opt.state_dict()['state'][0]")
    run("rate, epoch, count = opt.param_groups[0]['lr'], sched.last_epoch, int(steps)")
    assert run("rate, epoch") == (0.025, 2)
    run(
        "%%mirrored --quiet\nsame = torch.equal(saved['0.weight'], net[0].weight), "
        "torch.equal(moments['momentum_buffer'], opt.state[net[0].weight]['momentum_buffer']), sched.last_epoch, "
        "opt.param_groups[0]['lr'], int(steps) == count"
    )
    assert run("same") == (True, True, 2, 0.025, True)


def test_a_variable_that_a_failure_left_apart_is_one_value_here_at_once(run):
    run(MADE)
    run(f"%%mirrored --quiet\n{AHEAD}\nfrom mirror_nb.variables import bare")
    with pytest.raises(OSError, match="in the middle"):
        run("%%mirrored --quiet\nbare(steps).fill_(8 - replica_id)\nraise OSError('in the middle')")
    assert run("int(steps)") == 8
    run("%%mirrored --quiet\nfound = int(steps)")
    assert run("found") == 8


def test_an_interrupt_while_what_a_cell_left_comes_here_is_raised_once_it_is_here(run, monkeypatch):
    run(MADE)
    run(f"%%mirrored --quiet\n{AHEAD}")
    absorb = Session._absorb

    def pressed(*args, **kwargs):
        press_ctrl_c()
        press_ctrl_c()
        return absorb(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_absorb", pressed)
        with pytest.raises(KeyboardInterrupt):
            run("%%mirrored --quiet\nstep()\nmade = [1]")
    assert run("sched.last_epoch, int(steps), made") == (2, 2, [1])
    assert same_as_in_replica_1(run)


def test_what_the_notebook_has_changed_goes_out_though_an_interrupt_comes_on_the_way(run, monkeypatch):
    run(MADE)
    run(f"%%mirrored --quiet\n{AHEAD}")
    run("opt.param_groups[0]['lr'] = 0.3\nwith torch.no_grad(): net[0].weight.fill_(7)")
    changed = Objects.changed_settings

    def pressed(objects):
        settings = changed(objects)
        press_ctrl_c()
        return settings

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "changed_settings", pressed)
        with pytest.raises(KeyboardInterrupt):
            run("%%mirrored --quiet\nran = True")
    assert run("'ran' in globals()") is False
    run("%%mirrored --quiet\nthere = opt.param_groups[0]['lr'], net[0].weight.unique().tolist()")
    assert run("there, opt.param_groups[0]['lr']") == ((0.3, [7.0]), 0.3)


def test_what_the_notebook_has_deleted_is_deleted_though_an_interrupt_comes_before_the_cell_is_sent(run, monkeypatch):
    run("%%mirrored --quiet\nmade = [1]")
    run("del made")

    def pressed():
        press_ctrl_c()
        return modes.current()

    with monkeypatch.context() as patch:
        patch.setattr("mirror_nb.notebook.session.modes", SimpleNamespace(current=pressed))
        with pytest.raises(KeyboardInterrupt):
            run("%%mirrored --quiet\nran = True")
    run("%%mirrored --quiet\nfound = 'made' in globals(), 'ran' in globals()")
    assert run("found") == (False, False)


def test_a_second_interrupt_ends_code_of_the_users_that_holds_up_what_comes_here(run, monkeypatch):
    monkeypatch.setattr("mirror_nb.notebook.session.SECOND_AFTER", 0.0)
    run("import threading, os, signal\nhere = os.getpid()")
    run(
        "%%mirrored --quiet\nclass Slow:\n    def __setstate__(self, state):\n        self.__dict__ = state\n"
        "        while os.getpid() == here: os.kill(here, signal.SIGINT)"
    )
    with pytest.raises(KeyboardInterrupt):
        run("%%mirrored --quiet\nslow = Slow()\nslow.a = 1")
    run("%%mirrored --quiet\nn = int(strategy.reduce('sum', 1))")
    assert run("n") == 2


def test_what_the_notebook_sets_after_a_failure_holds(run):
    run(MADE)
    run(f"%%mirrored --quiet\n{AHEAD}")
    with pytest.raises(OSError, match="before the step"):
        run("%%mirrored --quiet\nstep(fails=(0,))\nstrategy.reduce('sum', 1)")
    run("with torch.no_grad(): net[0].weight.fill_(7)\nopt.param_groups[0]['lr'] = 0.3")
    run("opt.state_dict()")
    run("%%mirrored --quiet\nsame = net[0].weight.unique().tolist(), opt.param_groups[0]['lr']")
    assert run("same, net[0].weight.unique().tolist(), opt.param_groups[0]['lr']") == (([7.0], 0.3), [7.0], 0.3)


def test_a_network_whose_replica_0_died_is_a_survivors_with_its_statistics(run):
    run(MADE)
    run("%%mirrored --quiet\ntrain(net, opt)")
    before = run("weight, tracked = net[0].weight.detach().clone(), net[1].num_batches_tracked.item()\nweight")
    lost(run, "train(net, opt)")
    assert not torch.equal(run("net[0].weight.detach()"), before)
    assert run("net[1].num_batches_tracked.item() - tracked") == 3
    assert same_as_in_replica_1(run)


def test_a_network_that_a_cell_made_whose_replica_0_died_is_in_the_notebook(run):
    run(f"{MADE}\nclass Net(nn.Linear): pass")
    lost(run, "made = Net(3, 1)\nmade_opt = torch.optim.SGD(made.parameters(), 0.1, momentum=0.9)\nheld = [made]")
    assert (
        run("type(made) is Net, held[0] is made, made_opt.param_groups[0]['params'][0] is made.weight") == (True,) * 3
    )
    run("%%mirrored --quiet\ntrain(made, made_opt)\nsame = held[0] is made")
    assert run("same") is True
    assert same_as_in_replica_1(run, "made", "made_opt")


def test_what_gets_other_parts_as_replica_0_dies_stays_who_it_is(run):
    run(MADE)
    run("%%mirrored --quiet\ntrain(net, opt)")
    run("kept, kept_opt = net, opt")
    grows = "more = nn.Linear(1, 1)\nnet.append(more)\nopt.add_param_group({'params': more.parameters()})"
    lost(run, f"{grows}\ntrain(net, opt)")
    assert run("net is kept, opt is kept_opt, len(net), len(opt.param_groups)") == (True, True, 4, 2)
    assert same_as_in_replica_1(run)


@pytest.mark.parametrize(
    ("made", "net"),
    [
        ("", "net"),
        ("held = [net]\ndel net", "held[0]"),
        ("class Trainer: pass\nheld = Trainer()\nheld.net = net\ndel net", "held.net"),
    ],
    ids=["by its name", "in a list", "in an object"],
)
def test_a_network_that_cannot_travel_from_a_survivor_is_sent_by_the_notebook_when_a_cell_needs_it(run, made, net):
    run(f"%%mirrored --quiet\n{MADE}part = net[0]\n{made}")
    run(f"%%mirrored --quiet\nimport threading\n{net}.lock = threading.Lock()\ntrain({net}, opt)")
    lost(run, "pass")
    run(f"%%mirrored --quiet\ntrain({net}, opt)\nsame = part is {net}[0]")
    assert run("same") is True
    assert same_as_in_replica_1(run, net)


def test_names_that_a_cell_deleted_whose_replica_0_died_are_deleted(run):
    run("%%mirrored --quiet\nfirst = second = [1]")
    run("held = first")
    lost(run, "del second\nfirst.append(2)")
    assert run("'second' in globals(), first is held, held") == (False, True, [1, 2])


def test_statistics_of_a_replica_that_died_do_not_count(run):
    run(MADE)
    run("%%mirrored --quiet\ntrain(net, opt)")
    with pytest.raises(ReplicaDied):
        run(f"%%mirrored --quiet\ntrain(net, opt)\n{DIES.replace('== 0', '== 1')}")
    run("mean = net[1].running_mean.clone()")
    run("%%mirrored --quiet --replicas 0\nequal = torch.equal(mean, net[1].running_mean)")
    assert run("equal") is True


COMPILED = """
import mirror_nb as mnb
Y = X.sum(1, keepdim=True)
model = mnb.Model(net)
model.compile(("adam", {"lr": 0.02}), LOSS, scheduler=("StepLR", {"step_size": 1}))
history = model.fit(X, Y, verbose=0)
"""
GOES_ON = "lacks = model.optimizer is None\nif not lacks: model.fit(X, Y, batch_size=3, verbose=0)"


def test_a_model_that_cells_have_compiled_is_fitted_on_after_a_death(run):
    run(MADE)
    run(f"%%mirrored --quiet\n{COMPILED.replace('LOSS', repr('mse'))}")
    lost(run, "model.history.params['told'] = 1")
    run(
        f"%%mirrored --quiet\n{GOES_ON}\nrate, told = model.learning_rate, model.history.epoch\n"
        "steps = {int(state['step']) for state in model.optimizer.state.values()}"
    )
    assert run("lacks, rate, told, steps") == (False, pytest.approx(0.0002), [0], {4})
    run("values = [value.detach().clone() for value in model.parameters()]")
    run("%%mirrored --quiet --replicas 1\nequal = all(map(torch.equal, values, net.parameters()))")
    assert run("equal") is True


def test_what_a_model_was_compiled_with_that_cannot_travel_is_lost_in_a_death_and_told(run, shell):
    run(MADE)
    loss = "type('Held', (nn.MSELoss,), {'__reduce_ex__': lambda self, protocol: threading.Lock().__reduce__()})()"
    run(f"%%mirrored --quiet\nimport threading\n{COMPILED.replace('LOSS', loss)}")
    lost(run, "")
    with capture_output() as seen:
        shell.run_cell(f"%%mirrored\n{GOES_ON.splitlines()[0]}")
    assert "except what a model was compiled with, which cannot travel" in seen.outputs[-1].data["text/plain"]
    assert run("lacks").values == (True, False)


@pytest.mark.parametrize("changed_here", [False, True])
def test_what_a_cell_whose_replica_died_has_changed_in_an_object_is_the_notebooks(run, changed_here):
    run("class Log:\n    def __init__(self): self.lines = []\nlog, trainer = Log(), Log()\ntrainer.log = log")
    run("%%mirrored --quiet\nlog.lines.append(0), trainer.lines")
    if changed_here:
        run("log.lines.append(0)")
    lost(run, "log.lines.append(1); trainer.lines.append(2)")
    lines = [0] * (1 + changed_here) + [1]
    assert run("log.lines, trainer.lines, trainer.log is log") == (lines, [2], True)
    run("log.lines.append(3)")
    run("%%mirrored --quiet\nseen = log.lines, trainer.lines, trainer.log is log")
    assert run("seen") == ([*lines, 3], [2], True)


def test_what_only_the_replicas_had_is_told_though_an_interrupt_comes_while_they_are_stopped(run, monkeypatch):
    run("%%mirrored --quiet\nmade = iter('some')\nmade = (part for part in made)")
    close = LocalPool.close

    def interrupted(pool: LocalPool) -> None:
        close(pool)
        press_ctrl_c()

    monkeypatch.setattr(LocalPool, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("%mirror stop")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="was in the replicas alone, which have ended"):
        run("made + 1")
    run("%mirror start --devices cpu:0,cpu:1")


@pytest.mark.parametrize("end", ["%mirror stop", "%mirror restart", "all die"])
def test_what_only_the_replicas_had_is_told_when_they_end(run, shell, end):
    run("import torch\nbig = kept = torch.ones(300, 1000)")
    run("%%mirrored --quiet\nbig /= 2\nmade = torch.ones(300, 1000)\nprivate = [made]")
    run("other, held = made, [private]")
    assert run("type(big).__name__, type(made).__name__") == ("Remote", "Remote")
    if end == "all die":
        with pytest.raises(ReplicaDied):
            run("%%mirrored --quiet\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
        with pytest.raises(ReplicaError, match=r"^`made` .*: its value is lost; run the cell that makes it again$"):
            run("made.fetch()")
    else:
        with capture_output() as shown:
            shell.run_line_magic("mirror", end.split()[1])
        assert "; lost with the replicas: made, other, private; again as before cells" in shown.stdout
    assert run("big is kept") is True
    assert run("repr(held[0])") == (
        "<private: list of 1, was in the replicas alone, which have ended: its value is lost>"
    )
    with pytest.raises(UsageError, match=r"^`made` \(Tensor\) was in the replicas alone, which have ended: "):
        run("made + 1")
    with pytest.raises(NameError) as error:
        run("%%mirrored --quiet\nmade + 1")
    assert "`made` (Tensor) was in the replicas alone" in error.value.__notes__[0]
    with pytest.raises(TransferError, match=r"`held` .* was in the replicas alone, which have ended"):
        run("%%mirrored --quiet\nheld")
    run("%%mirrored --quiet\nmade = 3")
    assert run("made") == 3


def test_a_class_that_a_cell_makes_anew_after_a_death_is_the_notebooks(run):
    run("%%mirrored --quiet\nclass Base: n = 0\nclass It(Base): n = 1")
    lost(run, "pass")
    run("%%mirrored --quiet\nclass It(Base):\n    n = 2\n    def twice(self): return 2 * self.n\nit = It()")
    assert run("it.twice(), It.n, isinstance(it, It)") == (4, 2, True)
