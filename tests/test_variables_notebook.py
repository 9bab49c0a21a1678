"""Variables of mirrored cells in the notebook's ordinary cells: how they read there, and what becomes of writes."""

from __future__ import annotations

import re

import pytest
from driving import running

IMPORTS = """
import torch
from torch import nn
import mirror_nb as mnb

def mine():
    return torch.tensor(mnb.get_replica_context().replica_id_in_sync_group + 1.0)
"""


COUNTER = """
class Counter(nn.Module):
    def __init__(self, aggregation):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("total", mnb.Variable(0.0, aggregation=aggregation, synchronization="on_read"))
        self.register_buffer("average", mnb.Variable(0.0, trainable=False, aggregation="mean"))
        self.steps, self.many = mnb.Variable(0, aggregation="sum"), {"all": [mnb.Variable(0.0, aggregation="sum")]}

    def forward(self):
        self.total.assign_add(mine())
        self.average.assign(mine())
        self.steps.assign_add(torch.tensor(1))
        self.many["all"][0].assign_add(mine())

    def told(self):
        return float(self.total), float(self.average), int(self.steps), float(self.many["all"][0])
"""


@pytest.fixture
def run(shell):
    """What runs a cell in the notebook; `mnb` and `mine()` are there."""
    cells = running(shell)
    cells(IMPORTS)
    return cells


def test_a_variable_that_the_notebook_assigns_to_is_still_aggregated_in_cells(run):
    run("%%mirrored\nv = mnb.Variable(0.0, aggregation='sum')\nstrategy.run(lambda: v.assign_add(mine()))")
    assert run("float(v)") == 3.0
    run("v.assign(10.0)")
    run("%%mirrored\nstrategy.run(lambda: v.assign_add(mine()))\nname = type(v).__name__")
    assert run("float(v), name") == (13.0, "MirroredVariable")


@pytest.mark.parametrize(("aggregation", "expected"), [("sum", 3.0), ("mean", 1.5), ("only_first_replica", 1.0)])
def test_a_variable_that_is_synchronised_on_read_reads_the_same_in_the_notebook(run, aggregation, expected):
    run(
        f"%%mirrored\nr = mnb.Variable(0.0, aggregation={aggregation!r}, synchronization='on_read')\n"
        "strategy.run(lambda: r.assign_add(mine()))\nthere = float(r)"
    )
    assert run("float(r), there") == (expected, expected)
    run("r.assign(8.0)")
    run("%%mirrored\nthere, kind = float(r), type(r).__name__")
    assert run("float(r), there, kind") == (8.0, 8.0, "SyncOnReadVariable")


def test_components_that_have_no_one_value_come_each_for_itself(run):
    run("%%mirrored\nn = mnb.Variable(0.0, synchronization='on_read')\nstrategy.run(lambda: n.assign_add(mine()))")
    assert re.findall(r"tensor\((.)\.\)", run("repr(n)")) == ["1", "2"]


@pytest.mark.parametrize(
    ("aggregation", "first", "second", "third"), [("sum", 3.0, 11.0, 13.0), ("mean", 1.5, 9.5, 10.5)]
)
def test_variables_of_a_network_read_the_same_in_the_notebook_and_are_assigned_there(
    run, aggregation, first, second, third
):
    run(COUNTER)
    run(f"%%mirrored\ncounter = Counter({aggregation!r})\nstrategy.run(counter)\nthere = counter.told()")
    assert run("counter.told(), there") == ((first, 1.5, 2, 3.0), (first, 1.5, 2, 3.0))
    assert run("counter.state_dict()['total'].item()") == first
    run("counter.total.assign(8.0); counter.steps.assign(10); counter.many['all'][0].assign(20.0)")
    run("%%mirrored\nbefore = counter.told()\nstrategy.run(counter)")
    assert run("before, counter.told()") == ((8.0, 1.5, 10, 20.0), (second, 1.5, 12, 23.0))
    # What one replica alone has changed is a part of the whole.
    run(
        "%%mirrored\ndef add(by): counter.total.assign_add(by)\n"
        "strategy.run(lambda: add(2.0) if replica_id == 1 else None)\nthere = counter.told()"
    )
    assert run("counter.told()[0], there[0]") == (third, third)


def test_a_state_that_the_notebook_loads_is_the_whole_on_all_replicas(run):
    run(COUNTER)
    run("%%mirrored\ncounter = Counter('sum')\nstrategy.run(counter)")
    run("counter.load_state_dict({**counter.state_dict(), 'total': torch.tensor(6.0)})")
    run("%%mirrored\nthere, own = float(counter.total), strategy.run(lambda: float(counter.total))")
    assert run("there, own") == (6.0, 3.0)


def test_a_network_that_gets_another_part_in_the_notebook_keeps_its_variables(run):
    run(COUNTER)
    run("%%mirrored\ncounter = Counter('sum')\nstrategy.run(counter)")
    run("counter.layer = nn.Linear(2, 2)")
    run("%%mirrored\nthere, kind = counter.told(), type(counter.total).__name__\nstrategy.run(counter)")
    assert run("there, kind, counter.told()") == ((3.0, 1.5, 2, 3.0), "SyncOnReadVariable", (6.0, 1.5, 4, 6.0))
    run("%%mirrored\ncounter.layer = nn.Linear(3, 3)\nstrategy.run(counter)\nthere = counter.told()")
    assert run("there, counter.told()") == ((9.0, 1.5, 6, 9.0), (9.0, 1.5, 6, 9.0))
