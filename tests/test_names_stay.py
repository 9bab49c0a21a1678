"""Networks and optimizers that change in shape stay who they are to whatever else has them, on both sides."""

from __future__ import annotations

import pytest
import torch
from two_sides import Notebook, with_torch

from mirror_nb.errors import TransferError

MAKE = """
net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
bag = {"net": net, "optimizer": optimizer}
"""
STEP = "optimizer.zero_grad(); net(torch.ones(1, 2)).sum().backward(); optimizer.step()"
NEW = "net[2] = nn.Linear(2, 2); optimizer.add_param_group({'params': list(net[2].parameters()), 'lr': 0.5})"


@pytest.fixture
def notebook() -> Notebook:
    made = with_torch()
    for scope in made.scopes:
        # What nobody has any more goes.
        scope.adopt = lambda module: None  # type: ignore[method-assign]
    made.here(MAKE)
    return made


def trained(notebook: Notebook) -> list[str]:
    """Where in the notebook's network what its optimizer trains is; "" for what is elsewhere."""
    names = {id(parameter): name for name, parameter in notebook.user_ns["net"].named_parameters()}
    groups = notebook.user_ns["optimizer"].param_groups
    return [names.get(id(parameter), "") for group in groups for parameter in group["params"]]


@pytest.mark.parametrize(
    "change",
    [
        "net.append(nn.Tanh())",
        NEW,
        "net[0].weight = nn.Parameter(torch.ones(2, 2))",
        "nn.utils.parametrizations.weight_norm(net[0])",
    ],
)
def test_a_network_of_other_parts_stays_in_what_the_replicas_have_of_it(notebook, change):
    notebook.cell("first = net[0]; bag['net'](torch.ones(1, 2))")
    notebook.here(change)
    # Sent by its own name; by that of the container, which has not changed, later.
    notebook.cell("net")
    notebook.cell("same = bag['net'] is net, net[0] is first, len(net)")
    assert notebook.user_ns["same"] == (True, True, len(notebook.user_ns["net"]))


@pytest.mark.parametrize("use", ["bag['optimizer']", "scheduler.optimizer"])
def test_parameter_groups_from_the_notebook_reach_an_optimizer_in_a_container_and_under_a_scheduler(notebook, use):
    notebook.here("scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)")
    notebook.cell("scheduler, bag")
    notebook.here(NEW)
    notebook.cell(f"rates = [group['lr'] for group in {use}.param_groups]")
    assert len(notebook.user_ns["rates"]) == 2
    notebook.cell("same = bag['optimizer'] is optimizer is scheduler.optimizer")
    assert notebook.user_ns["same"]


@pytest.mark.parametrize(
    ("change", "there"),
    [
        (NEW, ["0.weight", "0.bias", "", "", "2.weight", "2.bias"]),
        (f"a, b = net[2].parameters()\n{NEW}", ["0.weight", "0.bias", "", "", "2.weight", "2.bias"]),
        (
            "nn.utils.parametrizations.weight_norm(net[0]); "
            "optimizer.add_param_group({'params': [net[0].parametrizations.weight.original1]})",
            ["", "0.bias", "2.weight", "2.bias", "0.parametrizations.weight.original1"],
        ),
    ],
)
def test_a_group_that_a_cell_adds_comes_back_though_a_layer_was_replaced(notebook, change, there):
    notebook.cell(f"{STEP}\n{change}")
    assert trained(notebook) == there
    assert len(notebook.user_ns["optimizer"].param_groups) == len(notebook.there("optimizer", 0).param_groups) == 2


def test_a_weight_that_a_cell_replaces_is_another_one_here_too(notebook):
    notebook.here("net[2].weight = net[0].weight")
    notebook.cell("net, bag")
    notebook.cell("net[0].weight = nn.Parameter(torch.ones(2, 2))")
    net = notebook.user_ns["net"]
    assert net[0].weight is not net[2].weight
    assert net[0].weight.tolist() == [[1, 1], [1, 1]]
    # As in one process: it goes on with what it was given.
    assert trained(notebook) == ["2.weight", "0.bias", "", "2.bias"]
    notebook.cell(STEP)
    assert net[0].weight.tolist() == [[1, 1], [1, 1]]
    assert net[2].weight.tolist() == notebook.there("net", 1)[2].weight.tolist()


def test_a_parametrization_that_is_removed_here_leaves_the_optimizer_its_weight(notebook):
    notebook.here("import gc; from torch.nn.utils import parametrize")
    notebook.cell("parametrize.register_parametrization(net[0], 'weight', nn.Identity())")
    notebook.here("parametrize.remove_parametrizations(net[0], 'weight'); gc.collect()")
    notebook.cell(STEP)
    assert trained(notebook) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert notebook.there("optimizer", 0).param_groups[0]["params"][0] is notebook.there("net", 0)[0].weight


def test_what_is_written_to_a_network_that_gets_another_part_goes_out_with_it(notebook):
    notebook.cell("net")
    notebook.here("net[0].weight.sum()\nnet[0].weight.data.fill_(7.0); net[0].tag = [1]; net.append(nn.Tanh())")
    notebook.cell("seen = net[0].weight[0, 0].item(), net[0].tag, len(net)")
    assert notebook.user_ns["seen"] == (7, [1], 4)


def test_an_optimizer_is_sent_with_its_network_if_that_is_gone_in_the_replicas(notebook):
    notebook.cell("bag['net'] = bag['optimizer'] = None")
    notebook.here("import gc; gc.collect()")
    before = notebook.user_ns["net"][0].bias.tolist()
    notebook.cell(STEP)
    assert notebook.user_ns["net"][0].bias.tolist() != before
    assert notebook.there("optimizer", 0).param_groups[0]["params"][0] is notebook.there("net", 0)[0].weight


class Unmade:
    def __setstate__(self, state: object) -> None:
        raise ValueError("not here")


def test_a_parcel_that_cannot_be_opened_leaves_a_network_as_it_was(notebook):
    notebook.cell("net")
    there = notebook.there("net", 0)
    notebook.here("net.append(nn.Tanh())")
    notebook.user_ns["zz"] = made = Unmade()
    made.x = 1  # type: ignore[attr-defined]
    with pytest.raises((TransferError, ValueError)):
        notebook.cell("net, zz")
    assert len(there) == 3
    assert there(torch.ones(1, 2)).shape == (1, 2)
    del notebook.user_ns["zz"]
    notebook.cell("length = len(net)")
    assert notebook.user_ns["length"] == len(there) == 4


@pytest.mark.parametrize("make", ["[1]", "Thing()", "types.SimpleNamespace()"])
@pytest.mark.parametrize(
    ("cells", "look"),
    [
        (["g"], "d is g"),
        (["held = [g]; g"], "d is g is held[0]"),
        (["g", "change(d, 2)"], "d is g, g == d"),
    ],
    ids=["read", "held", "changed by the other name"],
)
@pytest.mark.parametrize("between", ["", "change(d, 1)"])
def test_a_second_name_of_the_notebook_is_one_for_what_the_replicas_have(notebook, make, cells, look, between):
    notebook.here(
        "import types\nclass Thing: pass\ndef change(x, n): x.append(n) if type(x) is list else setattr(x, 'n', n)"
    )
    notebook.here(f"g = {make}")
    notebook.cell(cells[0])
    notebook.here(f"d = g; {between or 'pass'}")
    for cell in cells[1:]:
        notebook.cell(cell)
    notebook.cell(f"found = {look}")
    notebook.here(f"expected = {look.replace(' is held[0]', '')}; same = d is g")
    assert (notebook.user_ns["found"], notebook.user_ns["same"]) == (notebook.user_ns["expected"], True)


@pytest.mark.parametrize("make", ["[1]", "Thing()"])
def test_what_the_notebook_changes_by_one_name_is_the_same_by_the_other(notebook, make):
    notebook.here("class Thing: pass\ndef change(x): x.append(1) if type(x) is list else setattr(x, 'n', 1)")
    notebook.here(f"g = {make}")
    notebook.cell("d = g")
    notebook.here("change(d)")
    notebook.cell("d = g")
    notebook.here("same = d is g")
    assert notebook.user_ns["same"] is True


@pytest.mark.parametrize("make", ["[1]", "Thing()"])
def test_what_one_replica_alone_was_sent_by_another_name_the_others_still_lack(notebook, make):
    notebook.here("class Thing: pass\ndef change(x): x.append(1) if type(x) is list else setattr(x, 'n', 1)")
    notebook.here(f"def length(x): return len(x) if type(x) is list else len(vars(x))\ng = {make}")
    notebook.cell("d = g")
    notebook.here("before = length(g); change(g)")
    notebook.cell("g", replicas=[0])
    notebook.cell("found = length(d)")
    assert notebook.user_ns["found"] == notebook.user_ns["before"] + 1


@pytest.mark.parametrize("make", ["[1]", "{'a': 1}", "Thing()"])
def test_what_an_object_holds_and_a_cell_names_is_one_in_the_notebook(notebook, make):
    notebook.here(f"class Thing: pass\nthing = Thing(); thing.inner = {make}; thing.rate = 2")
    notebook.cell("inner = thing.inner")
    notebook.here("same = thing.inner is inner, thing.rate")
    assert notebook.user_ns["same"] == (True, 2)
    notebook.cell("inner.n = 3") if make == "Thing()" else notebook.cell("inner.clear()")
    notebook.here("same = thing.inner is inner, getattr(inner, 'n', 0) or len(inner)")
    assert notebook.user_ns["same"] == (True, 3 if make == "Thing()" else 0)


@pytest.mark.parametrize("make", ["[1]", "{'a': 1}", "Thing()"])
@pytest.mark.parametrize("around", ["thing.inner = {}", "thing.inner = [{}]"])
def test_what_the_notebook_has_named_of_an_object_since_stays_in_it(notebook, make, around):
    notebook.here(f"class Thing: pass\nthing = Thing(); {around.format(make)}; thing.rate = 1")
    notebook.cell("thing.rate += 1")
    notebook.here("inner = thing.inner[0] if '[{}]' == " + repr(around[-4:]) + " else thing.inner")
    path = "thing.inner[0]" if around.endswith("[{}]") else "thing.inner"
    notebook.cell(f"thing.rate += 1; {path}.n = 5" if make == "Thing()" else f"thing.rate += 1; {path}.clear()")
    notebook.here(f"same = {path} is inner, thing.rate, getattr(inner, 'n', 5), inner if type(inner) is list else 0")
    assert notebook.user_ns["same"][:3] == (True, 3, 5)
    notebook.cell("thing.rate")
    assert notebook.sent == []
    notebook.cell(f"found = {path} is inner")
    assert notebook.user_ns["found"] is True
