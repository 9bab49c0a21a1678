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
