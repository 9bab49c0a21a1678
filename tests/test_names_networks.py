"""Networks and optimizers that a notebook and its replicas have names for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from two_sides import NET, TRAIN, Notebook

from mirror_nb import Remote, UsageError
from mirror_nb.notebook import names
from mirror_nb.strategies.reading import Reading


def weights(notebook: Notebook, replica: int | None = None, name: str = "net") -> list[float]:
    module = notebook.user_ns[name] if replica is None else notebook.there(name, replica)
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).tolist()


def test_a_network_made_in_a_cell_is_here_with_its_values(notebook):
    notebook.cell(f"import torch\nfrom torch import nn\ntorch.manual_seed(0)\n{NET}")
    assert isinstance(notebook.user_ns["net"], nn.Sequential)
    assert weights(notebook) == weights(notebook, 0)


def test_training_it_in_a_later_cell_changes_the_same_object_here(notebook):
    notebook.cell(f"import torch\nfrom torch import nn\n{NET}")
    net, parameter = notebook.user_ns["net"], notebook.user_ns["net"][0].weight
    notebook.cell(TRAIN)
    assert notebook.user_ns["net"] is net
    assert net[0].weight is parameter
    assert weights(notebook) == weights(notebook, 0)
    assert notebook.sent_bytes < 1000


def test_a_network_made_here_is_trained_there_and_keeps_its_identity(notebook):
    notebook.here(NET)
    net, before = notebook.user_ns["net"], weights(notebook)
    returned = notebook.cell(TRAIN)
    assert notebook.user_ns["net"] is net
    assert weights(notebook) == pytest.approx([w + 1 for w in before])
    assert returned.bound == ["net", "p"]
    assert len(notebook.scopes[0].adopted) > 0


def test_calls_of_networks_are_watched_here_only_until_one_of_a_cell_is_read(notebook, monkeypatch):
    """What is compiled breaks off at a call that is watched."""
    # Of its own: other tests may have left what is watched.
    monkeypatch.setattr(names, "reading", Reading())
    call = nn.Module.__call__
    other = nn.Linear(1, 1)
    notebook.cell("1 + 1")
    assert nn.Module.__call__ is call
    notebook.here(NET)
    for _ in range(2):
        notebook.cell("net")
        other.eval()
        assert nn.Module.__call__ is not call
        notebook.user_ns["net"].eval()
        assert nn.Module.__call__ is call
    notebook.cell(TRAIN)
    notebook.names.ended()
    assert nn.Module.__call__ is call


@pytest.mark.parametrize("replica_id", [0, 1])
def test_what_one_replica_alone_has_made_the_others_get_once_a_cell_names_it(notebook, replica_id):
    notebook.cell(
        f"import torch\nfrom torch import nn\nif replica_id == {replica_id}:\n"
        "    net, held = nn.Linear(2, 1), [nn.Linear(1, 1)]\n    optimizer = torch.optim.SGD(net.parameters(), 0.1)"
    )
    if replica_id:
        # As of all that the first has not.
        assert all(isinstance(notebook.user_ns[name], Remote) for name in ("net", "held", "optimizer"))
        for name in ("net", "held", "optimizer"):
            notebook.user_ns[name] = notebook.user_ns[name].fetch()
    net = notebook.user_ns["net"]
    notebook.cell("net, held, optimizer")
    assert weights(notebook) == weights(notebook, 0) == weights(notebook, 1)
    notebook.cell("with torch.no_grad(): [p.add_(1) for p in net.parameters()], held[0].weight.zero_()")
    assert notebook.user_ns["net"] is net
    assert weights(notebook) == weights(notebook, 0) == weights(notebook, 1)
    for replica in (0, 1):
        assert (
            notebook.there("optimizer", replica).param_groups[0]["params"][0] is notebook.there("net", replica).weight
        )
        assert notebook.there("held", replica)[0].weight.item() == 0


def test_values_that_a_cell_only_permutes_come_back(notebook):
    notebook.here("net = nn.Linear(4, 1, bias=False)")
    notebook.cell("net")
    notebook.cell("with torch.no_grad(): net.weight.copy_(net.weight.flip(1))")
    assert weights(notebook) == weights(notebook, 0)


def test_values_written_through_data_in_a_cell_come_back(notebook):
    notebook.here(NET)
    notebook.cell("net[0].weight.data.fill_(7)")
    assert weights(notebook)[:4] == [7, 7, 7, 7]


def test_values_loaded_in_the_notebook_are_seen_in_the_replicas(notebook):
    notebook.here(NET)
    notebook.cell("net")
    notebook.here("net.load_state_dict({k: torch.zeros_like(v) for k, v in net.state_dict().items()})")
    notebook.cell("total = sum(float(p.abs().sum()) for p in net.parameters())")
    assert notebook.user_ns["total"] == 0


def test_values_written_through_data_in_the_notebook_are_seen_in_the_replicas(notebook):
    notebook.here(NET)
    notebook.cell("net")
    notebook.here("net[0].weight.data.fill_(7)")
    notebook.cell("w = float(net[0].weight[0, 0])")
    assert notebook.user_ns["w"] == 7


def test_a_network_that_the_notebook_has_changed_comes_back_once_a_cell_changes_it(notebook):
    notebook.here(NET)
    notebook.cell("net")
    notebook.here("net[0].weight.data.fill_(7)")
    assert notebook.cell("w = float(net[0].weight[0, 0])").bound == ["w"]
    notebook.here("net[0].weight.data.fill_(8)")
    assert "net" in notebook.cell("net[0].bias.data.fill_(1)").bound
    assert weights(notebook) == weights(notebook, 0)
    assert weights(notebook)[:5] == [8, 8, 8, 8, 1]
    # Back to what both have had before.
    notebook.here("net[0].weight.data.fill_(9)")
    assert "net" in notebook.cell("net[0].weight.data.fill_(8)").bound
    assert weights(notebook) == weights(notebook, 0)


def test_a_network_that_a_cell_has_made_does_not_come_back_with_the_next_one_that_only_reads_it(notebook):
    notebook.cell(f"{NET}\nnorm = nn.BatchNorm1d(4)")
    seen = notebook.cell("seen = float(net[0].weight.detach().sum() + norm.running_mean.sum())")
    assert seen.bound == ["seen"]
    assert "net" in notebook.cell("net[0].weight.data.fill_(7)").bound
    assert weights(notebook) == weights(notebook, 0)
    assert "norm" in notebook.cell("norm.running_mean.data.fill_(replica_id)").bound
    notebook.here("assert norm.running_mean.tolist() == [0.5] * 4")


def test_mode_frozen_parameters_and_dtype_of_a_network_are_alike_on_both_sides(notebook):
    seen = "seen = net.training, net[1].training, net[0].weight.requires_grad, net[0].weight.dtype"
    notebook.here(NET)
    notebook.cell(f"import torch\n{seen}")
    assert notebook.user_ns["seen"] == (True, True, True, torch.float32)
    notebook.here("net[1].eval()\nnet[0].requires_grad_(False)\nnet.double()")
    notebook.cell(seen)
    assert notebook.user_ns["seen"] == (True, False, False, torch.float64)
    notebook.cell("net.eval()\nnet.requires_grad_(True)\nnet.float()")
    notebook.here(seen)
    assert notebook.user_ns["seen"] == (False, False, True, torch.float32)


def test_a_network_whose_part_was_replaced_here_is_sent_again(notebook):
    notebook.here(NET)
    notebook.cell("net")
    notebook.here("net[1] = nn.Linear(2, 5)")
    notebook.cell("n = net[1].out_features")
    assert notebook.user_ns["n"] == 5


def test_a_network_whose_part_was_replaced_there_comes_back_whole(notebook):
    notebook.here(NET)
    notebook.cell("from torch import nn\nnet[1] = nn.Linear(2, 5)")
    assert notebook.user_ns["net"][1].out_features == 5


@pytest.mark.parametrize("part", ["net", "net[0]"])
def test_another_class_that_a_network_is_given_on_one_side_is_its_class_on_the_other(notebook, part):
    notebook.here(f"class Doubled(nn.Linear):\n    def forward(self, x): return 2 * super().forward(x)\n{NET}")
    if part == "net":
        notebook.here("net = net[0]")
    notebook.cell("import torch; from torch import nn; one = net(torch.ones(2)).detach()")
    net = notebook.user_ns["net"]
    notebook.here(f"{part}.__class__ = Doubled")
    notebook.cell(f"kind, two = type({part}).__name__, net(torch.ones(2)).detach()")
    assert notebook.user_ns["kind"] == "Doubled"
    assert torch.equal(notebook.user_ns["two"], net(torch.ones(2)))
    notebook.cell(f"{part}.__class__ = nn.Linear")
    assert notebook.user_ns["net"] is net
    assert torch.equal(net(torch.ones(2)), notebook.user_ns["one"])


TRAIN_HEAD = "head(torch.ones(1, 2)).sum().backward(); sgd.step()"
MADE = f"from torch import nn; torch.manual_seed(0); {NET}; sgd = torch.optim.SGD(net[1].parameters(), 1.0)"


def same_head(notebook) -> bool:
    """Whether `head` is the same on both sides, apart from `net`, and what `sgd` trains."""
    names, there = notebook.user_ns, notebook.replicas[0].names
    ours = all(own["sgd"].param_groups[0]["params"][0] is own["head"].weight for own in (names, there))
    apart = names["head"] is not names["net"][1] and there["head"] is not there["net"][1]
    return ours and apart and torch.equal(names["head"].weight, there["head"].weight)


@pytest.mark.parametrize("new", ["nn.Identity()", "nn.Linear(2, 1)"])
@pytest.mark.parametrize("named", ["here", "cell"])
@pytest.mark.parametrize("made", ["here", "cell"])
def test_a_part_that_a_cell_has_replaced_is_trained_on_under_its_own_name(notebook, made, named, new):
    getattr(notebook, made)(MADE)
    notebook.cell("net, sgd")
    getattr(notebook, named)("head = net[1]")
    notebook.cell(f"net[1] = {new}")
    notebook.cell("head")
    assert same_head(notebook)
    notebook.cell(TRAIN_HEAD)
    assert same_head(notebook)
    notebook.here("with torch.no_grad(): head.weight += 1")
    notebook.cell(f"net[1] = {new}; head")
    assert same_head(notebook)
    notebook.cell("net[1] = head")
    assert notebook.user_ns["net"][1] is notebook.user_ns["head"]


@pytest.mark.parametrize("made", ["here", "cell"])
@pytest.mark.parametrize("replaced", ["here", "cell"])
def test_a_part_that_is_named_and_trained_as_it_is_replaced_keeps_its_values(notebook, made, replaced):
    getattr(notebook, made)(MADE)
    notebook.cell("net, sgd")
    getattr(notebook, replaced)(f"head = net[1]; net[1] = nn.Identity()\n{TRAIN_HEAD}")
    notebook.cell("head, sgd, net")
    assert same_head(notebook)
    assert type(notebook.user_ns["net"][1]) is type(notebook.there("net")[1]) is nn.Identity


def test_an_optimizer_made_here_trains_the_network_that_was_sent_with_it(notebook):
    notebook.here(f"{NET}\noptimizer = torch.optim.SGD(net.parameters(), lr=1.0)")
    before = weights(notebook)
    notebook.cell("net(torch.ones(1, 2)).sum().backward()\noptimizer.step()")
    assert weights(notebook) != before
    assert weights(notebook) == weights(notebook, 1)


@pytest.mark.parametrize("first", ["here", "cell"])
def test_hooks_of_an_optimizers_steps_go_to_and_fro(notebook, first):
    getattr(notebook, first)(
        "net = nn.Linear(1, 1)\noptimizer = torch.optim.SGD(net.parameters(), lr=1.0)\n"
        "def note(stepping, *_): stepping.noted += 1\n"
        "optimizer.register_step_pre_hook(note)"
    )
    step = "optimizer.noted = 0\nnet(torch.ones(1, 1)).sum().backward()\noptimizer.step()\nnoted = optimizer.noted"
    notebook.cell(step)
    assert notebook.user_ns.pop("noted") == 1
    notebook.here(step)
    assert notebook.user_ns["noted"] == 1


@pytest.mark.parametrize(
    ("hold", "held_there"),
    [
        ("class Trainer: pass\nheld = Trainer(); held.nets = {'all': [net]}", "held.nets['all'][0]"),
        ("class Slots: __slots__ = 'net',\nheld = Slots(); held.net = net", "held.net"),
        ("held = {'deep': ([net],)}", "held['deep'][0][0]"),
    ],
)
def test_an_optimizer_trains_the_network_that_has_no_name_but_is_in_something_that_has(notebook, hold, held_there):
    notebook.here(f"{NET}\noptimizer = torch.optim.SGD(net.parameters(), 1.0)\n{hold}\ndel net")
    notebook.cell("optimizer.param_groups[0]['lr'] = 2.0")
    notebook.here(f"weight = {held_there}[0].weight.detach().clone()")
    notebook.cell("for p in optimizer.param_groups[0]['params']: p.grad = torch.ones_like(p)\noptimizer.step()\nheld")
    notebook.here(f"change = ({held_there}[0].weight - weight).mean().item()")
    assert notebook.user_ns["change"] == pytest.approx(-2.0)


def test_an_optimizer_made_here_later_trains_the_network_there(notebook):
    notebook.here(NET)
    notebook.cell("net")
    notebook.here("optimizer = torch.optim.SGD(net.parameters(), lr=1.0)")
    before = weights(notebook)
    notebook.cell("net(torch.ones(1, 2)).sum().backward()\noptimizer.step()")
    assert weights(notebook) != before


def test_an_optimizer_made_here_for_a_network_made_there_trains_that(notebook):
    notebook.cell(f"import torch\nfrom torch import nn\ntorch.manual_seed(0)\n{NET}")
    notebook.here("optimizer = torch.optim.SGD(net.parameters(), lr=1.0)")
    before = weights(notebook)
    notebook.cell("net(torch.ones(1, 2)).sum().backward()\noptimizer.step()")
    assert weights(notebook) != before


def test_a_scheduler_made_here_later_drives_the_optimizer_there(notebook):
    notebook.here(f"{NET}\noptimizer = torch.optim.SGD(net.parameters(), lr=1.0)")
    notebook.cell("net, optimizer")
    notebook.here("scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)")
    notebook.cell("optimizer.step(); scheduler.step(); lr = optimizer.param_groups[0]['lr']")
    assert notebook.user_ns["lr"] == 0.5


OWN_CLASSES = """
class Signs(torch.optim.SGD):
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
class Halves(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        return [rate / 2**self.last_epoch for rate in self.base_lrs]
"""


def test_what_optimizers_and_schedulers_of_ones_own_classes_keep_is_no_change_that_only_the_replicas_have(notebook):
    notebook.here(
        f"{NET}{OWN_CLASSES}optimizer = Signs(net.parameters(), lr=1.0)\nscheduler = Halves(optimizer)\n"
        "class Other: at = 0\nother = Other()"
    )
    returned = notebook.cell("net; optimizer.step(); scheduler.step(); other.at = replica_id")
    assert returned.altered == ["other"]


def test_a_part_of_a_network_under_a_name_of_its_own_stays_a_part(notebook):
    notebook.here(f"{NET}\nhead = net[1]")
    notebook.cell("net")
    notebook.cell("part = head is net[1]")
    assert notebook.user_ns["part"] is True


def test_two_names_for_a_network_of_a_cell_are_one_network_here(notebook):
    notebook.cell(f"from torch import nn\n{NET}\nagain = net\nhead = net[1]")
    assert notebook.user_ns["again"] is notebook.user_ns["net"]
    assert notebook.user_ns["head"] is notebook.user_ns["net"][1]


def test_a_network_inside_an_object_is_trained_here_too(notebook):
    notebook.here(f"class Trainer:\n    pass\n{NET}\ntrainer = Trainer()\ntrainer.net = net")
    before = weights(notebook)
    notebook.cell("with torch.no_grad(): trainer.net[0].bias += 1")
    assert weights(notebook) != before


def test_a_network_sent_inside_an_object_is_the_same_network_under_its_own_name(notebook):
    notebook.here(f"class Trainer:\n    pass\n{NET}\ntrainer = Trainer()\ntrainer.net = net")
    notebook.cell("trainer")
    notebook.cell("one = trainer.net is net")
    assert notebook.user_ns["one"] is True


def test_a_list_of_networks_trained_in_a_cell_comes_back_trained(notebook):
    notebook.here("nets = [nn.Linear(2, 2), nn.Linear(2, 2)]")
    notebook.cell("with torch.no_grad(): nets[1].bias.fill_(3)")
    assert notebook.user_ns["nets"][1].bias.tolist() == [3, 3]


HOLDERS = {
    "an object": ("class Holder: pass\nx = Holder(); x.net = nn.Linear(2, 2)", "x.net"),
    "a list": ("x = [nn.Linear(2, 2)]", "x[0]"),
    "a dict beside its name": ("net = nn.Linear(2, 2)\nx = {'net': net}", "x['net']"),
    "a part of another": ("net = nn.Sequential(nn.Linear(2, 2))\nx = [net[0]]", "x[0]"),
    "a name after it": ("x = [nn.Linear(2, 2)]\na = x[0]", "x[0]"),
    "larger than values may be": ("x = [nn.Linear(2, 200_000)]", "x[0]"),
}


@pytest.mark.parametrize(("make", "net"), HOLDERS.values(), ids=HOLDERS)
def test_a_network_that_a_cell_made_inside_a_value_is_one_network_from_then_on(notebook, make, net):
    notebook.cell(f"from torch import nn\n{make}")
    held = eval(net, notebook.user_ns)
    assert isinstance(held, nn.Linear)
    for other in ("net", "a"):
        if other in notebook.user_ns:
            assert held in (notebook.user_ns[other], *notebook.user_ns[other].children())
    notebook.cell(f"with torch.no_grad(): {net}.bias.fill_(3)")
    assert eval(net, notebook.user_ns) is held
    assert set(held.bias.tolist()) == {3}
    notebook.here(f"with torch.no_grad(): {net}.bias.fill_(4)")
    notebook.cell(f"y = {net}.bias.max().item()")
    assert notebook.user_ns["y"] == 4


def test_an_optimizer_that_comes_back_has_the_parameters_of_the_network_that_came_with_it(notebook):
    notebook.cell(
        "class Holder: pass\nh = Holder(); h.net = nn.Linear(1, 1); h.o = torch.optim.SGD(h.net.parameters())"
    )
    held = notebook.user_ns["h"]
    assert held.o.param_groups[0]["params"][0] is held.net.weight


@pytest.mark.parametrize("make", ["net = nn.Linear(2, 2)", "net = [nn.Linear(2, 2)]"])
def test_a_network_of_another_replica_than_the_first_can_be_fetched(notebook, make):
    notebook.cell(f"from torch import nn\nif replica_id == 1:\n    {make}\nelse: own = nn.Linear(1, 1)")
    assert "did not travel" in repr(notebook.user_ns["net"])
    fetched = notebook.user_ns["net"].fetch()
    network = fetched[0] if isinstance(fetched, list) else fetched
    there = notebook.there("net", 1)
    torch.testing.assert_close(network.weight, (there[0] if isinstance(there, list) else there).weight)
    assert notebook.names.undelivered == set()


FRAIL = """
class Frail(torch.nn.Module):
    def __reduce__(self): return int, ("what pickle calls",)
    def forward(self, x): return x + 1
class Holder:
    def __init__(self, inside): self.inside = inside
    def __reduce__(self): return Holder.of, (self.inside,)
    @staticmethod
    def of(inside): raise ValueError("no holder of it")
"""


def test_what_cannot_be_made_again_costs_the_rest_nothing(notebook):
    notebook.cell(f"import torch; net = torch.nn.Sequential(torch.nn.Linear(2, 1)){FRAIL}inside = Frail()\ny = 2")
    assert notebook.user_ns["y"] == 2
    assert isinstance(notebook.user_ns["net"], torch.nn.Sequential)
    assert "cannot be made again" in repr(notebook.user_ns["inside"])
    notebook.cell("made = Holder(inside)")
    assert "cannot be rebuilt here" in repr(notebook.user_ns["made"])
    notebook.cell("z = made.inside(torch.ones(4, 2)).shape[0]")
    assert notebook.user_ns["z"] == 4


def test_what_torch_exports_can_be_used_in_the_next_cell(notebook):
    """Of its graph the pickle of torch before 2.15 can make nothing again."""
    notebook.cell(
        "import torch; net = torch.nn.Linear(2, 1); made = torch.export.export(net, (torch.ones(4, 2),)); y = 2"
    )
    assert notebook.user_ns["y"] == 2
    assert isinstance(notebook.user_ns["net"], torch.nn.Linear)
    notebook.cell("z = made.module()(torch.ones(4, 2)).shape[0]")
    assert notebook.user_ns["z"] == 4


def test_networks_with_a_say_of_their_own_travel_where_they_can(notebook):
    notebook.cell("import torch, torch.fx; from torch import nn; graph = torch.fx.symbolic_trace(nn.Linear(2, 1))")
    assert isinstance(notebook.user_ns["graph"], torch.fx.GraphModule)
    assert notebook.user_ns["graph"](torch.ones(3, 2)).shape == (3, 1)


def test_the_class_of_a_network_with_a_say_of_its_own_is_one_class_here(notebook):
    notebook.cell(
        """
from torch import nn
class Own(nn.Module):
    def __reduce__(self):
        return Own, ()
made = Own()
kind = Own
"""
    )
    assert isinstance(notebook.user_ns["kind"], type)
    assert type(notebook.user_ns["made"]) is notebook.user_ns["kind"] is notebook.user_ns["Own"]


def test_a_network_that_cannot_be_rebuilt_here_is_told_of_and_the_next_cell_goes_on(notebook):
    notebook.cell(
        """
from torch import nn
class Picky(nn.Linear):
    def __setstate__(self, state):
        raise ValueError("not here")
picky = Picky(2, 1)
"""
    )
    returned = notebook.cell("picky.bias.requires_grad_(False); other = picky")
    assert returned.problem is None
    returned = notebook.cell("fresh = Picky(1, 1)")
    assert returned.problem == "ValueError: not here"
    assert notebook.cell("y = 2").bound == ["y"]


def test_tensors_that_each_replica_trains_by_itself_are_told_of_once(notebook):
    made = "w = torch.full((2,), float(replica_id), requires_grad=True); "
    returned = notebook.cell(f"import torch; {made} held = {{'a': [w]}}; same = torch.ones(2, requires_grad=True)")
    assert returned.loose == ["held", "w"]
    assert notebook.cell(made + "plain = torch.full((2,), float(replica_id))").loose == []


def test_batch_norm_statistics_are_averaged_here_and_stay_their_own_there(notebook):
    notebook.here("norm = nn.BatchNorm1d(1)")
    notebook.cell("norm(torch.tensor([[0.0], [10.0 * (replica_id + 1)]]))")
    there = [float(notebook.there("norm", r).running_mean) for r in range(2)]
    assert there == pytest.approx([0.5, 1.0])
    assert float(notebook.user_ns["norm"].running_mean) == pytest.approx(0.75)
    notebook.cell("norm")
    assert [float(notebook.there("norm", r).running_mean) for r in range(2)] == there


def test_batch_norm_statistics_stay_the_average_when_other_values_change(notebook):
    notebook.cell(
        "from torch import nn\nnet = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))\n"
        "net(torch.tensor([[0.], [replica_id + 1.]]))"
    )
    average = float(notebook.user_ns["net"][0].running_mean)
    assert average == pytest.approx(0.075)
    notebook.cell("net.eval()\nwith torch.no_grad(): net[1].weight.fill_(2.)")
    assert float(notebook.user_ns["net"][0].running_mean) == pytest.approx(average)
    notebook.cell("net.train()\nif replica_id: net[0].running_mean.fill_(1.)")
    assert float(notebook.user_ns["net"][0].running_mean) == pytest.approx((0.05 + 1) / 2)
    notebook.here("net[0].running_mean.fill_(4.)")
    notebook.cell("with torch.no_grad(): net[1].weight.fill_(3.)")
    assert float(notebook.user_ns["net"][0].running_mean) == 4


def test_a_network_that_cannot_be_pickled_stays_with_a_stand_in(notebook):
    notebook.cell(f"import threading\nfrom torch import nn\n{NET}\nnet.lock = threading.Lock()\nok = nn.Linear(1, 1)")
    assert isinstance(notebook.user_ns["net"], Remote)
    assert isinstance(notebook.user_ns["ok"], nn.Linear)


def test_a_network_bound_anew_in_a_cell_is_a_new_network_here(notebook):
    source = f"from torch import nn\n{NET}"
    notebook.cell(source)
    first = notebook.user_ns["net"]
    notebook.cell(source)
    assert notebook.user_ns["net"] is not first
    assert weights(notebook) == weights(notebook, 0)


def test_nothing_is_kept_of_networks_that_are_gone_on_both_sides(notebook):
    for _ in range(3):
        notebook.cell(NET)
    handles = {notebook.names.mirrors.find_handle(part) for part in notebook.user_ns["net"].modules()}
    assert set(notebook.names._holders._of) == handles
    notebook.here("del net")
    notebook.cell("y = 1")
    assert not notebook.names._holders._of


def test_a_network_that_only_one_replica_has_is_sent_to_the_others(notebook):
    notebook.cell(f"from torch import nn\n{NET}", [1])
    notebook.cell(TRAIN)
    assert weights(notebook) == weights(notebook, 0) == weights(notebook, 1)
    assert notebook.there("net", 0) is not notebook.there("net", 1)


def test_a_helper_of_the_notebook_reads_the_replicas_network(notebook):
    notebook.here("def bias(): return float(net[0].bias.sum())")
    notebook.cell(f"from torch import nn\n{NET}\nnn.init.constant_(net[0].bias, 4)\nb = bias()")
    assert notebook.user_ns["b"] == 8
    assert notebook.user_ns["bias"]() == 8


def test_a_network_with_its_own_way_of_being_pickled_keeps_its_training(notebook):
    notebook.here("net = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))")
    notebook.cell(TRAIN)
    trained = weights(notebook)
    notebook.cell("net")
    assert weights(notebook) == weights(notebook, 0) == trained


@pytest.mark.parametrize(
    "last", ["net[1] = nn.Linear(2, 3)", "del net[1]", "net[0].bias = None", "net.append(nn.Tanh())"]
)
@pytest.mark.parametrize("order", [1, -1])
def test_a_network_with_other_parts_keeps_what_was_written_to_it_here(notebook, last, order):
    notebook.here("net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))")
    notebook.cell("y = net(torch.ones(1, 2)).shape")
    first = "net[0].weight.requires_grad_(False).fill_(7.0); net[0].eval()"
    for source in (first, last)[::order]:
        notebook.here(source)
    look = (
        "[(n, p.tolist(), p.requires_grad) for n, p in net.named_parameters()] + [m.training for m in net.modules()]"
    )
    notebook.cell(f"y = {look}")
    assert notebook.user_ns["y"] == eval(look, notebook.user_ns)
    assert notebook.user_ns["net"][0].weight.tolist() == [[7.0, 7.0], [7.0, 7.0]]


def test_parts_that_a_cell_takes_away_or_adds_are_so_here_and_the_network_stays_who_it_is(notebook):
    notebook.here("net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)); held = [net]; first = net[0]")
    notebook.cell("del net[2]; net.append(nn.Linear(2, 3))")
    assert eval("held[0] is net and net[0] is first", notebook.user_ns)
    assert eval("net(torch.ones(1, 2)).shape", notebook.user_ns) == (1, 3)
    notebook.cell("y = len(net)")
    assert notebook.user_ns["y"] == 3


@pytest.mark.parametrize(
    ("made", "change"),
    [
        ("nn.ModuleDict({'a': nn.Tanh()})", "net.clear()"),
        ("nn.ModuleDict({'a': nn.Tanh()})", "del net['a']"),
        ("nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])", "net.insert(0, net[1])"),
        ("nn.Sequential(nn.Linear(2, 2), nn.Tanh())", "net.insert(0, net[1])"),
    ],
)
def test_parts_that_are_taken_away_here_or_put_between_are_so_in_the_replicas(notebook, made, change):
    notebook.here(f"net = {made}")
    notebook.cell("before = repr(net)")
    notebook.here(change)
    notebook.cell("after = repr(net)")
    before, after, net = (notebook.user_ns[name] for name in ("before", "after", "net"))
    assert before != after == repr(net)


def test_a_value_that_a_cell_sets_again_is_here_though_the_notebook_had_set_another_meanwhile(notebook):
    notebook.here("net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))")
    notebook.cell("net[0].weight.requires_grad_(False).fill_(1.)")
    notebook.here("net[0].weight.fill_(5.)")
    notebook.cell("net[0].weight.fill_(1.)")
    assert notebook.user_ns["net"][0].weight.item() == 1.0


def test_statistics_that_one_replica_alone_changes_are_averaged_with_the_others_own(notebook):
    notebook.here("net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))")
    notebook.cell("net[1].running_mean.fill_(replica_id * 4.)")
    notebook.here("net[0].weight.requires_grad_(False).fill_(5.)")
    notebook.cell("if replica_id: net[1].running_mean.fill_(8.)")
    assert notebook.user_ns["net"][1].running_mean.item() == 4.0


def test_who_is_silent_has_the_statistics_in_the_average_that_it_told_last(notebook):
    notebook.here("net = nn.Sequential(nn.BatchNorm1d(1))")
    notebook.cell("net")
    for mean in (8.0, 10.0):
        notebook.cell(f"if replica_id: net[0].running_mean.fill_({mean})")
        assert notebook.user_ns["net"][0].running_mean.item() == mean / 2


def test_a_network_on_the_meta_device_travels_as_it_is(notebook):
    notebook.cell("with torch.device('meta'): net = torch.nn.Linear(2, 1)")
    assert notebook.user_ns["net"].weight.is_meta
    notebook.cell("net.to_empty(device='cpu')\nwith torch.no_grad(): net.weight.fill_(2.)")
    assert notebook.user_ns["net"].weight.tolist() == [[2, 2]]
    notebook.here("with torch.device('meta'): other = nn.Linear(2, 1)")
    notebook.cell("meta = other.weight.is_meta")
    assert notebook.user_ns["meta"]


@pytest.mark.parametrize("seen", ["1", "net, optimizer, around"])
def test_a_network_that_a_cell_makes_a_part_of_a_new_one_stays_who_it_is_in_the_notebook(notebook, seen):
    notebook.here(
        "net = first = nn.Linear(2, 1)\naround = nn.ModuleDict({'net': net})\nweight = net.weight\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=1.0)"
    )
    notebook.cell(seen)
    notebook.cell("new = nn.Sequential(net, nn.Linear(1, 1))\nwith torch.no_grad(): net.weight.fill_(3)")
    notebook.here("ours = [net is one for one in (first, around['net'], new[0])]\nkept = net.weight is weight")
    assert notebook.user_ns["ours"] == [True] * 3
    assert notebook.user_ns["kept"]
    assert notebook.user_ns["weight"].tolist() == [[3, 3]]
    notebook.here("net(torch.ones(1, 2)).sum().backward()\noptimizer.step()")
    notebook.cell("seen = new[0].weight.tolist(), net is new[0]")
    assert notebook.user_ns["seen"] == ([[2, 2]], True)


def test_a_weight_that_a_new_network_shares_with_one_of_the_notebooks_stays_what_it_is(notebook):
    notebook.here("net = nn.Linear(2, 2)\nweight = net.weight")
    notebook.cell("new = nn.Sequential(nn.Linear(2, 2), net)\nnew[0].weight = net.weight")
    notebook.here("same = weight is net.weight is new[0].weight")
    assert notebook.user_ns["same"]


def test_a_model_that_a_cell_has_compiled_says_that_it_is_not_compiled_here(notebook, tmp_path):
    notebook.cell("import mirror_nb as mnb\nmodel = mnb.Model(nn.Linear(4, 2))")
    model = notebook.user_ns["model"]
    model.save(tmp_path / "never.pt")
    notebook.cell("model.compile('sgd', 'mse')")
    with pytest.warns(UserWarning, match="weights and structure alone: .* save where it was compiled"):
        model.save(tmp_path / "compiled.pt")
    for use in (lambda: model.fit(torch.ones(1, 4), torch.ones(1, 2)), lambda: model.learning_rate):
        with pytest.raises(UsageError, match=r"not compiled here: .* call fit and evaluate where it was compiled"):
            use()
    model.compile("sgd", "mse")
    model.save(tmp_path / "compiled.pt")
    notebook.cell("sure = model.compiled_settings.loss")
    assert notebook.user_ns["sure"] == "mse"


def test_the_optimizer_of_a_compiled_model_is_the_notebooks_too_once_it_has_a_name(notebook):
    notebook.cell(
        "import mirror_nb as mnb\nmodel = mnb.Model(nn.Linear(4, 2))\n"
        "model.compile('adam', 'mse', scheduler=('StepLR', {'step_size': 1}))"
    )
    notebook.cell("optimizer, scheduler = model.optimizer, model.scheduler")
    optimizer, scheduler = notebook.user_ns["optimizer"], notebook.user_ns["scheduler"]
    assert scheduler.optimizer is optimizer
    assert optimizer.param_groups[0]["params"][0] is notebook.user_ns["model"].network.weight
    notebook.cell("same = model.optimizer is optimizer, model.scheduler is scheduler")
    assert notebook.user_ns["same"] == (True, True)
    assert notebook.user_ns["optimizer"] is optimizer


def test_what_a_callback_of_the_notebooks_notes_in_a_cell_is_in_it_afterwards(notebook):
    notebook.here(
        "import mirror_nb as mnb\nclass Notes(mnb.callbacks.Callback):\n"
        "    def __init__(self):\n        super().__init__()\n        self.epochs = []\n"
        "    def on_epoch_end(self, epoch, logs=None): self.epochs.append(epoch)\nnotes = Notes()"
    )
    notebook.cell("called = mnb.callbacks.CallbackList([notes], leads=replica_id == 0, tell=lambda text: None)")
    notebook.cell("called.on_epoch_end(0)\ncalled.close()\nnotes")
    assert notebook.user_ns["notes"].epochs == [0]


@pytest.mark.parametrize("given", ["net.scale = scale", "net.all = nn.ParameterList([scale])"])
@pytest.mark.parametrize("where", ["here", "there"])
def test_a_parameter_with_a_name_that_a_cell_gives_a_network_is_one_on_both_sides(notebook, given, where):
    made = f"{NET}\nscale = nn.Parameter(torch.ones(1)); of_it = torch.optim.SGD([scale], 1.0)"
    if where == "here":
        notebook.here(made)
    notebook.cell(f"{made if where == 'there' else 'of_it'}\n{given}\nopt = torch.optim.SGD(net.parameters(), 1.0)")
    notebook.here("def has(params): return any(one is scale for one in params)")
    notebook.here("assert has(net.parameters()) and has(opt.param_groups[0]['params'])")
    notebook.here("assert has(of_it.param_groups[0]['params'])")
    notebook.here("with torch.no_grad(): scale.fill_(3)")
    notebook.cell("there = any(p.tolist() == [3] for p in net.parameters())")
    notebook.here("assert there")
    notebook.cell("with torch.no_grad():\n    for p in net.parameters(): p.fill_(5)")
    notebook.here("assert scale.item() == 5; assert has(net.parameters())")
    notebook.cell("with torch.no_grad(): scale.fill_(6)")
    notebook.here("assert scale.item() == 6; assert has(net.parameters())")


def test_an_attribute_of_the_notebook_alone_outlives_a_part_that_a_cell_adds(notebook):
    notebook.here(f"{NET}\nnet.gone = 1")
    notebook.cell("net")
    notebook.here("own = object(); net.hidden, net.owner = torch.ones(2), own")
    notebook.cell("net.append(nn.Linear(1, 1)); del net.gone")
    notebook.here(
        "assert len(net) == 3 and net.hidden.sum() == 2 and net.owner is own\nassert not hasattr(net, 'gone')"
    )


def test_a_network_that_was_given_a_part_here_gets_its_earlier_values_back_in_a_cell(notebook):
    notebook.cell(f"{NET}\nnet.register_buffer('seen', torch.zeros(1))\nbest = {{'seen': torch.zeros(1)}}\nn = 1")
    notebook.cell("n += 1")
    notebook.here("net.seen = torch.ones(1)")
    notebook.cell("net.load_state_dict(best, strict=False)")
    notebook.here("assert net.seen.item() == 0")


def test_a_tensor_with_a_name_that_a_cell_gives_a_network_is_that_tensor_here(notebook):
    notebook.here(f"{NET}\nseen = torch.ones(2)")
    notebook.cell("net")
    notebook.cell("net.seen = seen")
    assert notebook.user_ns["net"].seen is notebook.user_ns["seen"]
    assert notebook.names.changed_modules() == {}
    notebook.here("seen += 1")
    notebook.cell("total = net.seen.sum().item()")
    assert notebook.user_ns["total"] == 4


@pytest.mark.parametrize(("make", "change"), [("torch.zeros(1)", "own += 1"), ("[0]", "own[0] += 1")])
def test_what_has_a_name_and_is_given_to_a_network_here_is_one_value_in_the_replicas(notebook, make, change):
    notebook.here(f"{NET}\nown = {make}")
    notebook.cell("net, own")
    notebook.here("net[0].own = own")
    notebook.cell(f"same = net[0].own is own\n{change}")
    assert notebook.user_ns["same"] is True
    assert notebook.sent == []
    notebook.here("assert net[0].own is own and own[0] == 1")
    notebook.cell("value = int(net[0].own[0])")
    assert notebook.user_ns["value"] == 1


@pytest.mark.parametrize(("make", "change"), [("torch.zeros(1)", "own += 1"), ("[0]", "own[0] += 1")])
def test_what_a_network_has_here_and_a_later_cell_names_is_one_value_in_the_replicas(notebook, make, change):
    notebook.here(NET)
    notebook.cell("net")
    notebook.here(f"own = {make}; net[0].own = own")
    notebook.cell("net")
    notebook.cell(f"same = net[0].own is own\n{change}")
    assert notebook.user_ns["same"] is True
    notebook.here("assert net[0].own is own and own[0] == 1")
    notebook.cell("value = int(net[0].own[0])")
    assert notebook.user_ns["value"] == 1


def test_a_name_that_a_cell_gives_a_tensor_of_a_network_is_that_tensors_here(notebook):
    notebook.here(NET)
    notebook.cell("net[0].seen = torch.ones(2)")
    notebook.cell("seen = net[0].seen")
    assert notebook.user_ns["net"][0].seen is notebook.user_ns["seen"]
    notebook.cell("net[0].seen += 1")
    assert notebook.user_ns["seen"].tolist() == [2, 2]


def test_a_new_network_is_not_gone_through_for_each_parameter_of_its_optimizer(notebook, monkeypatch):
    looks = 0
    named_modules = nn.Module.named_modules

    def counted(*args, **kwargs):
        nonlocal looks
        looks += 1
        return named_modules(*args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    counts = []
    for layers in (10, 40):
        looks = 0
        notebook.cell(
            f"net = nn.Sequential(*[nn.Linear(1, 1) for _ in range({layers})])\n"
            "opt = torch.optim.SGD(net.parameters(), 0.1)"
        )
        counts.append(looks)
    assert counts[1] < 5 * counts[0]
    assert notebook.user_ns["opt"].param_groups[0]["params"][-1] is notebook.user_ns["net"][-1].bias


def test_a_new_network_that_a_cell_gives_another_ones_weight_has_that_here_too(notebook):
    notebook.cell(f"{NET}")
    net = notebook.user_ns["net"]
    notebook.cell("head = nn.Linear(*net[0].weight.T.shape)\nhead.weight = net[0].weight")
    assert notebook.user_ns["head"].weight is net[0].weight
    notebook.cell("with torch.no_grad():\n    head.weight += 1")
    assert torch.equal(net[0].weight, notebook.there("net")[0].weight)
    notebook.here("with torch.no_grad():\n    net[0].weight += 1")
    notebook.cell("head")
    assert torch.equal(net[0].weight, notebook.there("head").weight)
