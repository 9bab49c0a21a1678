"""What scripts that torchrun starts once per replica find: the same as in a cell and in the controller.

All run one after the other in the same two processes, of which each takes seconds to load torch and its compiler.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import test_in_replica as calls
import test_training_places as places
import test_variables_everywhere as variables
import torch
from driving import launch

import mirror_nb as mnb

ONE_AFTER_THE_OTHER = """
import os, runpy, sys
import torch.distributed as dist

folder, *names = sys.argv[1:]
# Each strategy leaves as it has found it: a store meets no group of a name twice.
dist.init_process_group("gloo")
for name in names:
    sys.argv[1:] = [os.path.join(folder, name)]
    os.makedirs(sys.argv[1], exist_ok=True)
    runpy.run_path(sys.argv[1] + ".py", run_name="__main__")
# torch 2.13 now and then aborts while the interpreter ends, in plain scripts under torchrun too.
sys.stdout.flush()
os._exit(0)
"""

SCRIPTS = {
    # First: it warns once for each process, and begins with torch's own seed.
    "calls": calls.SCRIPT,
    "variables": f"""{variables.CASES}
strategy = mnb.MirroredStrategy()
found = {{name: globals()[name](strategy) for name in {list(variables.EXPECTED)}}}
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(found, file)
strategy.close()
""",
    "places": f"""{places.BODY}
import os, sys
strategy = mnb.MirroredStrategy()
model, history, weights, scores, outputs = trained(strategy)
torch.save((history, weights, scores, outputs), os.path.join(sys.argv[1], os.environ["RANK"]))
strategy.close()
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each script, with a file from each replica."""
    folder = tmp_path_factory.mktemp("torchrun")
    for name, source in {**SCRIPTS, "all": ONE_AFTER_THE_OTHER}.items():
        (folder / f"{name}.py").write_text(source)
    path = {"PYTHONPATH": str(Path(mnb.__file__).parent.parent), "TMPDIR": str(folder)}
    launch([sys.executable, str(folder / "all.py"), str(folder), *SCRIPTS], 2, path, seconds=240)
    return folder


def told(folder: Path, name: str) -> list[Any]:
    """What a script has found on each replica."""
    return [json.loads((folder / name / str(rank)).read_text()) for rank in range(2)]


@pytest.fixture
def under_torchrun(folder: Path) -> list[dict[str, Any]]:
    return told(folder, "calls")


def test_a_script_under_torchrun_has_the_same_calls(under_torchrun):
    for found in under_torchrun:
        assert (found["n"], found["gathered"], found["merged"], found["after"]) == (2, [1, 2], 3, 3)
        assert (found["total"], found["counter"]) == (6 * 3, 10 + 6 * 3)
        assert found["error"][0] == "UsageError"
        assert [name for name, _ in found["closed"]] == ["PoolClosed"] * 6
        assert "float32[1] on replica 0, float32[2] on replica 1" in found["error"][1]
    assert under_torchrun[0]["losses"] == under_torchrun[1]["losses"]
    assert under_torchrun[0]["weight"] == under_torchrun[1]["weight"]
    assert under_torchrun[0]["normed"] == under_torchrun[1]["normed"]


def test_devices_that_are_not_those_of_the_launcher_are_checked_and_told_of_once(under_torchrun):
    for replica_id, found in enumerate(under_torchrun):
        no_device, twice, none, same, others, fewer = found["devices"]
        assert [kind for kind, _ in (no_device, twice, none)] == ["DeviceError"] * 3
        here = "but the replicas are here already, on cpu:0, cpu:1"
        asked = () if replica_id else ("cuda:5, cuda:6", "cpu:0")
        told = [[text for text in texts if "`devices`" in text] for (texts,) in (same, others, fewer)]
        assert told == [[], *([f"`devices` is {names}, {here}"] for names in asked)] if asked else [[]] * 3


def check_uneven(reductions, merges):
    (kind, told), (merging, uneven) = reductions, merges
    assert (kind, merging) == ("UsageError", "ReplicaError")
    assert "replica 0: all_reduce (MEAN) of float32[" in told
    assert "replica 1: all_reduce SUM of float32[]" in told
    assert uneven.startswith(calls.DIFFERENT)
    assert "replica 1: merge_call" in uneven


def test_a_call_too_many_before_a_step_is_told_by_its_name(under_torchrun):
    for found in under_torchrun:
        check_uneven(*found["uneven"])


def test_the_same_loop_in_a_cell_gives_the_same_numbers(under_torchrun, replicas):
    # The cell's strategy is bound; the script makes its own. Seeded alike, since the shared pool's streams have moved.
    body = calls.SCRIPT.partition("found = {")[2].partition("if len(sys.argv)")[0]
    start = calls.SCRIPT.partition("strategy = ")[0]
    helper = calls.SCRIPT.partition("mine = ")[2].partition("found = ")[0]
    source = f"{start}\ntorch.manual_seed(0)\nmine = {helper}found = {{{body}\nfound"
    here = calls.cell(replicas(2), source)
    for found in here:
        # What else the shared pool's replicas have trained shows in the size of what they reduce.
        check_uneven(*found.pop("uneven"))
    there = [{name: found[name] for name in here[0]} for found in under_torchrun]
    assert json.loads(json.dumps(here)) == there


@pytest.mark.parametrize("case", variables.EXPECTED)
def test_variables_are_the_same_under_torchrun(case, folder):
    assert [found[case] for found in told(folder, "variables")] == [variables.EXPECTED[case]] * 2


def test_a_model_trains_under_torchrun_as_on_one_device(folder):
    alone = places.here()["trained"](mnb.OneDeviceStrategy("cpu:0"))
    for rank in range(2):
        places.same((None, *torch.load(folder / "places" / str(rank), weights_only=True)), alone)
