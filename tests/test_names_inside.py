"""A value that has a name and is in the value of another name: one value on each side, whoever changes it where."""

from __future__ import annotations

import pytest
import torch
from two_sides import Notebook, with_torch

from mirror_nb.values import PerReplica, Remote

VALUES = {
    "list": "[1]",
    "dict": "{'a': [1]}",
    "set": "{1}",
    "tuple": "([1], 2)",
    "tensor": "torch.ones(2)",
    "trained": "torch.ones(2, requires_grad=True)",
    "array": "np.ones(2)",
    "object": "Config()",
}
HOLDERS = {
    "list": "[0, inner]",
    "dict": "{'inner': inner}",
    "deep": "[({'inner': [inner]},)]",
    "object": "holder_of(inner)",
}
IMPORTS = """
import torch, numpy as np
class Config: rate = 1
def holder_of(value):
    holder = Config()
    holder.value = value
    return holder
def found(value, inner):
    if value is inner:
        return True
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, Config):
        value = list(vars(value).values())
    return isinstance(value, (list, tuple)) and any(found(one, inner) for one in value)
"""


@pytest.fixture
def notebook() -> Notebook:
    made = with_torch()
    made.here(IMPORTS)
    return made


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_made_in_one_cell(notebook, value, holder):
    notebook.cell(f"inner = {value}\nouter = {holder}")
    notebook.here("here = found(outer, inner)")
    assert notebook.user_ns["here"]


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_held_by_what_a_later_cell_makes_on_either_side(notebook, value, holder):
    notebook.cell(f"inner = {value}")
    notebook.cell(f"outer = {holder}")
    notebook.here("here = found(outer, inner)")
    notebook.here(f"ours = {holder}")
    notebook.cell("there = found(ours, inner), found(outer, inner)")
    assert notebook.user_ns["here"]
    assert notebook.user_ns["there"] == (True, True)


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_made_in_the_notebook_and_read_by_cells_in_any_order(notebook, value, holder):
    notebook.here(f"inner = {value}\nouter = {holder}")
    notebook.cell("outer")
    notebook.cell("there = found(outer, inner)")
    assert notebook.user_ns["there"] is True


def test_a_change_by_what_holds_it_is_one_under_its_name(notebook):
    notebook.cell("history = []; log = {'history': history}")
    notebook.cell("log['history'].append(1)")
    assert notebook.user_ns["history"] == [1]
    assert notebook.user_ns["log"]["history"] is notebook.user_ns["history"]
    notebook.here("log['history'].append(2)")
    notebook.cell("log")
    notebook.cell("history.append(3)")
    assert notebook.user_ns["log"] == {"history": [1, 2, 3]}
    assert notebook.user_ns["log"]["history"] is notebook.user_ns["history"]
    assert notebook.there("log", 1)["history"] is notebook.there("history", 1)


def test_a_value_with_two_names_is_what_the_other_one_has_in_the_container_that_a_cell_makes_of_it(notebook):
    notebook.cell("layers = [1]; base = layers")
    notebook.cell("layers = [layers, 2]")
    assert notebook.user_ns["layers"][0] is notebook.user_ns["base"]
    notebook.cell("aaa = [3]; zzz = aaa")
    notebook.cell("zzz = [zzz, 2]")
    assert notebook.user_ns["zzz"][0] is notebook.user_ns["aaa"]


def test_what_gets_a_name_later_stays_in_what_holds_it(notebook):
    notebook.cell("config = {'optimizer': {'lr': 1}}")
    notebook.cell("settings = config['optimizer']")
    notebook.here("settings['lr'] = 2")
    assert notebook.user_ns["config"] == {"optimizer": {"lr": 2}}
    notebook.cell("lr = config['optimizer']['lr']")
    assert notebook.user_ns["lr"] == 2


@pytest.mark.parametrize("runs", ["[{'k': 1}]", "{0: [1]}", "Config()"])
def test_what_gets_a_name_later_stays_in_what_a_line_of_the_cell_could_have_bound_anew(notebook, runs):
    notebook.here(f"runs = {runs}\nheld = runs")
    if runs == "Config()":
        notebook.here("runs.best = [1]")
    take = "runs.best" if runs == "Config()" else "runs[0]"
    notebook.cell(f"best = {take}\nif False: runs = None")
    notebook.here(f"one = best is {take} and runs is held")
    assert notebook.user_ns["one"] is True
    notebook.cell(f"one = best is {take} and runs is held")
    assert notebook.user_ns["one"] is True


def test_each_replicas_own_value_is_in_each_replicas_own_container(notebook):
    notebook.cell("mine = [replica_id]; box = [mine]")
    mine, box = notebook.user_ns["mine"], notebook.user_ns["box"]
    assert (list(mine), list(box)) == ([[0], [1]], [[[0]], [[1]]])
    assert all(box[r][0] is mine[r] for r in range(2))
    notebook.cell("mine.append(5)")
    assert list(notebook.user_ns["box"]) == [[[0, 5]], [[1, 5]]]
    notebook.cell("later = {'mine': mine}")
    assert [held["mine"] for held in notebook.user_ns["later"]] == [[0, 5], [1, 5]]


def test_a_value_of_one_replica_alone_is_in_its_container_alone(notebook):
    notebook.cell("shared = [1]")
    notebook.cell("if replica_id: only = [7]; box = [only, shared]")
    assert notebook.user_ns["box"] == [[7], [1]]
    assert notebook.user_ns["box"][0] is notebook.user_ns["only"]
    assert notebook.user_ns["box"][1] is notebook.user_ns["shared"]


def test_values_that_hold_each_other_arrive_each_with_copies(notebook):
    notebook.cell("one = [1]; two = [one]; one.append(two); beside = [2]; holder = [one, beside]")
    names = notebook.user_ns
    assert names["one"][1][0] is names["one"]
    assert names["two"][0][1] is names["two"]
    assert names["holder"][0] is names["one"]
    assert names["holder"][1] is names["beside"]


def test_what_replicas_hold_the_other_way_round_stays_with_them(notebook):
    notebook.cell("one, two = [1], [2]\n(one if replica_id else two).append(two if replica_id else one)")
    # Neither can be made first of values that are here.
    assert list(notebook.user_ns["one"]) == [[1], [1, [2]]]
    assert isinstance(notebook.user_ns["two"][0], Remote)
    assert notebook.user_ns["two"][1] is notebook.user_ns["one"][1][1]
    assert notebook.fetch("two", 0) == [2, [1]]


def test_what_stays_in_the_replicas_keeps_there_what_holds_it(notebook):
    notebook.cell("large = torch.zeros(1 << 19); box = [large]; generator = (i for i in ()); other = [generator]")
    assert [type(notebook.user_ns[name]) for name in ("large", "box", "generator", "other")] == [Remote] * 4
    notebook.cell("again = box[0] is large, other[0] is generator")
    assert notebook.user_ns["again"] == (True, True)


def test_names_of_less_than_the_limit_do_not_count_in_what_holds_them(notebook):
    notebook.cell("one, two = torch.zeros(1 << 17), torch.ones(1 << 17); both = [one, two, one + two]")
    assert notebook.user_ns["both"][1] is notebook.user_ns["two"]


def test_a_name_that_the_notebook_has_bound_anew_does_not_get_into_a_container(notebook):
    notebook.here("first = [1]\ndef read(): return globals()['fir' + 'st']")
    notebook.cell("first")
    notebook.here("first = 'another'")
    # No name of the cell tells that it reads this one.
    notebook.cell("box = [read()]")
    assert notebook.user_ns["box"] == [[1]]


@pytest.mark.parametrize("anew", ["first = 'another'", "del first"])
def test_what_a_cell_changes_keeps_values_whose_names_the_notebook_has_bound_anew(notebook, anew):
    notebook.cell("first = [1]; box = [first]")
    notebook.here(anew)
    notebook.cell("box.append(2)")
    assert notebook.user_ns["box"] == [[1], 2]


def test_a_name_that_the_notebook_has_bound_anew_is_left_to_it_by_a_cell_that_changes_its_earlier_value(notebook):
    notebook.cell("first = [1]; box = [first]")
    notebook.here("first = 'another'")
    notebook.cell("box[0].append(2)")
    assert notebook.user_ns["box"] == [[1, 2]]
    assert notebook.user_ns["first"] == "another"


def test_a_value_that_the_notebook_has_changed_stays_in_the_large_container_that_a_cell_changes(notebook):
    notebook.cell("first = [1]; box = [first, *range(40_000)]")
    notebook.here("first.append(2)")
    notebook.cell("box.append(2)")
    assert notebook.user_ns["box"][0] is notebook.user_ns["first"]
    assert notebook.user_ns["first"] == [1, 2]


def test_a_cell_that_deletes_the_name_leaves_what_held_it(notebook):
    notebook.cell("inner = [1]; outer = [inner]; del inner")
    assert notebook.user_ns["outer"] == [[1]]
    assert "inner" not in notebook.user_ns


def test_tensors_and_a_per_replica_of_the_notebook_are_those_that_the_replicas_have(notebook):
    notebook.user_ns["own"] = PerReplica(([1], [2]))
    notebook.cell("own.append(3)")
    notebook.cell("box = [own]")
    assert list(notebook.user_ns["box"]) == [[[1, 3]], [[2, 3]]]
    assert notebook.there("box", 1)[0] is notebook.there("own", 1)


def test_an_optimizer_over_a_tensor_in_a_container_trains_what_has_the_name(notebook):
    notebook.here("weight = torch.ones(2, requires_grad=True); weights = [weight]")
    notebook.cell("weights")
    notebook.cell(
        "sgd = torch.optim.SGD(weights, 1.0); weight.sum().backward(); sgd.step(); same = weights[0] is weight"
    )
    assert notebook.user_ns["same"] is True
    assert torch.equal(notebook.user_ns["weights"][0], torch.zeros(2))
    assert notebook.user_ns["weights"][0] is notebook.user_ns["weight"]
    assert notebook.user_ns["sgd"].param_groups[0]["params"][0] is notebook.user_ns["weight"]


@pytest.mark.parametrize("made", ["torch.zeros(2)", "torch.zeros(2, 3)[:, 1]", "torch.zeros(2, dtype=torch.int64)"])
def test_a_tensor_that_either_side_changes_in_place_is_changed_in_what_holds_it(notebook, made):
    notebook.here(f"stats = {made}; record = {{'stats': stats}}")
    notebook.cell("stats += 1")
    assert notebook.user_ns["record"]["stats"] is notebook.user_ns["stats"]
    assert notebook.user_ns["record"]["stats"].tolist() == [1, 1]
    notebook.cell("record")
    notebook.here("stats += 1")
    notebook.cell("seen = record['stats'].tolist(), stats.tolist()")
    assert notebook.user_ns["seen"] == ([2, 2], [2, 2])


@pytest.mark.parametrize("named", ["weight = torch.ones(2); weights = [weight]", "weights = [torch.ones(2)]"])
def test_whether_a_tensor_is_trained_is_the_same_on_both_sides_whoever_says_so(notebook, named):
    look = "[one.requires_grad for one in weights], [one.tolist() for one in weights]"
    notebook.here(named)
    for switched in (True, False):
        notebook.cell(f"for one in weights: one.requires_grad = {switched}")
        assert eval(look, notebook.user_ns) == ([switched], [[1, 1]])
    for switched in (True, False):
        notebook.here(f"for one in weights: one.requires_grad = {switched}")
        notebook.cell(f"seen = {look}")
        assert notebook.user_ns["seen"] == ([switched], [[1, 1]])


@pytest.mark.parametrize("side", ["here", "cell"])
def test_a_tensor_that_one_side_has_computed_takes_what_the_other_writes_to_it(notebook, side):
    notebook.here("a = torch.ones(2, requires_grad=True)")
    computed, changed = (notebook.here, notebook.cell) if side == "here" else (notebook.cell, notebook.here)
    computed("b = a * 2; held = [a * 3]")
    notebook.cell("b, held")
    for _ in range(2):
        changed("b.add_(1); held[0].add_(1)")
        notebook.cell("seen = b.tolist(), held[0].tolist()")
    assert notebook.user_ns["seen"] == ([4, 4], [5, 5])
    assert (notebook.user_ns["b"].tolist(), notebook.user_ns["held"][0].tolist()) == ([4, 4], [5, 5])


def test_an_expanded_tensor_that_a_cell_writes_to_is_here_as_it_is_there(notebook):
    notebook.here("row = torch.zeros(1).expand(3)")
    notebook.cell("row.set_(torch.full((3,), 6.0))")
    assert notebook.user_ns["row"].tolist() == [6, 6, 6]


def test_a_container_that_stays_in_the_replicas_is_not_told_of_again_where_a_part_of_it_gets_a_name(notebook):
    assert notebook.cell("kept = [torch.zeros(1 << 19)]").stayed == ["kept"]
    assert notebook.cell("part = kept[0]").stayed == ["part"]


def test_what_is_sent_for_what_holds_it_alone_is_told_apart(notebook):
    notebook.here("inner = [1]; outer = [inner]; asked = [2]")
    (parcel,) = notebook.names.prepare(["outer", "asked"], [0, 1])
    parcel.packed.close()
    assert (set(parcel.names), parcel.beside) == ({"outer", "asked", "inner"}, {"inner"})


def test_what_is_fetched_holds_what_has_a_name_here_and_copies_of_what_replicas_alone_have_changed(notebook):
    notebook.here("metrics = {'loss': []}; config = Config(); holder = holder_of([metrics, config])")
    notebook.cell("config.rate = 2; metrics['loss'].append(1); holder.more = [metrics]")
    fetched = notebook.fetch("holder", 0)
    assert fetched.value[0] is fetched.more[0] is notebook.user_ns["metrics"]
    assert (notebook.user_ns["metrics"], fetched.value[1].rate) == ({"loss": [1]}, 2)
    notebook.here("metrics = 'another'")
    assert notebook.fetch("holder", 0).more == [{"loss": [1]}]


@pytest.mark.parametrize(("rate", "altered"), [("2", []), ("2 + replica_id", ["config"])])
def test_an_object_that_a_cell_has_changed_stays_the_one_that_holders_of_its_have_on_both_sides(
    notebook, rate, altered
):
    notebook.here("config = Config(); configs = [config]")
    assert notebook.cell(f"config.rate = {rate}; more = {{'config': config}}").altered == altered
    notebook.here("same = configs[0] is more['config'] is config; configs.append(3)")
    assert notebook.user_ns["same"] is True
    notebook.cell(f"same = configs[0] is more['config'] is config, config.rate == {rate}")
    assert notebook.user_ns["same"] == (True, True)


@pytest.mark.parametrize(
    "named",
    [
        *("List", "Optional[int]", "T", "list[int]", "int | str", "...", "slice(2)", "re.compile('a')"),
        *("math.sin", "np.tanh", "torch.tanh", "np.dtype('float32')", "torch.strided"),
    ],
)
def test_an_object_that_has_what_a_copy_of_is_as_good_comes_back_as_it_was_changed(notebook, named):
    notebook.here("import math, re; from typing import *; T = TypeVar('T')")
    notebook.here(f"inner = {named}; config = Config(); config.value = inner")
    notebook.cell("inner")
    assert notebook.cell("config.rate = 2").altered == []
    notebook.here("inside = config.value == inner")
    assert (notebook.user_ns["config"].rate, notebook.user_ns["inside"]) == (2, True)


def test_an_object_of_an_annotated_class_comes_back_as_it_was_changed(notebook):
    notebook.here("from typing import Dict, List\nclass Log:\n    losses: List[float]\n    best: Dict[str, int]")
    notebook.here("log = Log(); log.losses = []")
    assert notebook.cell("log.losses.append(1.0)").altered == []
    assert notebook.user_ns["log"].losses == [1]


def test_an_object_that_has_a_method_of_a_list_with_a_name_stays_as_it_was_where_that_would_be_a_copys(notebook):
    notebook.here("losses = []; inner = losses.append; config = Config(); config.value = inner")
    notebook.cell("inner")
    notebook.cell("config.rate = 2")
    notebook.here("config.value(1)")
    assert notebook.user_ns["losses"] == [1]


NET = """
class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head = nn.Linear(1, 1)
        self.head.config = config
"""


@pytest.mark.parametrize(
    ("here", "cell"),
    [
        ("config = Config(); net = Net(config)", "net, config"),
        ("config = Config()", "net = Net(config)"),
        ("config = Config()", "other = [Net(config)]; net = other[0]"),
        ("", "config = Config(); net = Net(config)"),
        ("config = Config(); net = Net(config)", "net.more = nn.Linear(1, 1)"),
    ],
    ids=["here", "in a cell", "in a list", "both in a cell", "here, and of other parts since"],
)
def test_a_network_has_the_configuration_that_has_a_name(notebook, here, cell):
    notebook.here(NET + here)
    notebook.cell(cell)
    notebook.here("same = net.head.config is config; config.rate = 2")
    assert notebook.user_ns["same"]
    # The cell names the network alone.
    notebook.cell("there = net.head.config.rate")
    assert notebook.user_ns["there"] == 2
    assert notebook.there("net", 1).head.config is notebook.there("config", 1)
    notebook.cell("net.head.config.rate = 3")
    notebook.here("same = net.head.config is config, config.rate")
    assert notebook.user_ns["same"] == (True, 3)


def test_a_network_keeps_a_copy_of_a_configuration_whose_name_the_notebook_has_bound_anew(notebook):
    notebook.here(f"{NET}config = Config(); config.rate = 2")
    notebook.cell("config")
    notebook.here("config = Config()")
    notebook.cell("net = Net(globals().__getitem__('config'))")
    notebook.here("mine = net.head.config.rate")
    assert notebook.user_ns["mine"] == 2


def test_what_a_network_got_after_it_was_sent_need_not_be_fit_to_travel(notebook):
    notebook.here(f"import threading\n{NET}net = Net(None)")
    notebook.cell("net")
    notebook.here("lock = threading.Lock(); net.head.lock = lock")
    notebook.cell("there = hasattr(net.head, 'lock')")
    assert notebook.user_ns["there"] is False


@pytest.mark.parametrize(
    "held", ["[Item() for _ in range(n)]", "[add for _ in range(n)]", "{i: [i] for i in range(n)} | {-1: Item()}"]
)
def test_what_very_many_objects_look_up_is_watched_for_changes(notebook, held):
    notebook.here("log, n = [], 5000\ndef add(): log.append(1)\nclass Item:\n    def __call__(self): log.append(1)")
    notebook.here(f"held = {held}")
    notebook.cell("one = held[-1]\none()")
    assert notebook.user_ns["log"] == [1]


def test_a_stand_in_that_only_a_very_long_list_has_keeps_its_value(notebook):
    notebook.cell("import threading\nlock = threading.Lock()")
    notebook.here("kept = [*range(5000), lock]\ndel lock")
    notebook.cell("lock = 1")
    notebook.cell("free = not kept[-1].locked()")
    assert notebook.user_ns["free"] is True


def test_axes_that_a_cell_has_made_are_those_of_their_figure(notebook):
    notebook.here("import matplotlib; matplotlib.use('agg'); import matplotlib.pyplot as plt")
    notebook.cell(
        "fig, pair = plt.subplots(1, 2); ax = pair[0]; held = {'ax': ax}; ax.plot([1, 2]); alone = plt.subplots()[1]"
    )
    notebook.here(
        "same = [one is fig.axes[0] for one in (ax, pair[0], held['ax'])], pair[1] is fig.axes[1], len(ax.lines)"
    )
    assert notebook.user_ns["same"] == ([True] * 3, True, 1)
    notebook.here("ax.set_title('here'); titles = [one.get_title() for one in (*fig.axes, alone)]")
    assert notebook.user_ns["titles"] == ["here", "", ""]
