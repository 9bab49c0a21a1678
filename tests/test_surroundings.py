"""What the controller sets for all of its code: told where it has changed, and set in the replicas."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mirror_nb as mnb
from mirror_nb import surroundings
from mirror_nb.surroundings import at_start, changes, current, follow


@pytest.fixture
def own() -> Iterator[None]:
    """Leave this process as it was."""
    path, folder, before = list(sys.path), os.getcwd(), current()
    yield
    sys.path[:] = path
    now = current()
    after = changes(now, before)
    if after is not None:
        follow(after)
    assert os.getcwd() == folder
    assert current() == before


@pytest.fixture(scope="module")
def two() -> Iterator[mnb.MirroredStrategy]:
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def test_a_process_that_has_set_nothing_tells_nothing(own):
    torch.set_default_dtype(torch.float32)
    assert changes(current(), current()) is None
    assert changes(at_start(), current()) is None


def test_what_has_changed_is_told_and_followed(own, tmp_path, monkeypatch):
    monkeypatch.setenv("MIRROR_NB_KEPT", "1")
    monkeypatch.setenv("MIRROR_NB_GONE", "1")
    before = current()
    os.chdir(tmp_path)
    sys.path.insert(0, str(tmp_path))
    monkeypatch.setenv("MIRROR_NB_NEW", "2")
    monkeypatch.delenv("MIRROR_NB_GONE")
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = True
    now = current()
    told = changes(before, now)
    assert told is not None
    assert told.environment == {"MIRROR_NB_NEW": "2", "MIRROR_NB_GONE": None}
    back = changes(now, before)
    assert back is not None
    follow(back)
    assert "MIRROR_NB_NEW" not in os.environ
    assert os.environ["MIRROR_NB_GONE"] == "1"
    assert torch.get_default_dtype() is torch.float32
    follow(told)
    # Paths are only added: what a cell of the replica put there stays.
    assert current() == now


def test_variables_that_each_replica_has_its_own_of_are_not_told(own, monkeypatch):
    before = current()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "7")
    told = changes(before, current())
    assert told is not None
    assert told.environment == {}


def test_a_folder_that_is_gone_is_not_followed(own, tmp_path):
    here, before = os.getcwd(), current()
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    now = current()
    (tmp_path / "gone").rmdir()
    assert current().folder == ""
    os.chdir(here)
    told = changes(before, now)
    assert told is not None
    follow(told)
    assert os.getcwd() == here


def look() -> tuple[object, ...]:
    settings = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    return os.getcwd(), os.environ.get("MIRROR_NB_NEW"), *settings


def test_replicas_follow_before_the_first_call_of_a_function_and_in_each_cell_of_a_notebook(
    two, own, tmp_path, monkeypatch
):
    (tmp_path / "mirror_nb_lying_here.py").write_text("VALUE = 5")
    two.run(look)
    sys.path.append(str(tmp_path))
    os.chdir(tmp_path)
    monkeypatch.setenv("MIRROR_NB_NEW", "1")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True

    def imports() -> int:
        import mirror_nb_lying_here

        return int(mirror_nb_lying_here.VALUE)

    assert two.run(imports) == 5
    assert two.run(look) == (str(tmp_path), "1", torch.float64, True, True)
    monkeypatch.setenv("MIRROR_NB_NEW", "2")
    surroundings.new_moment()
    assert two.run(look)[1] == "2"


def test_a_replica_that_is_started_anew_follows_too(two, own):
    assert two.run(torch.get_default_dtype) is not None
    torch.set_default_dtype(torch.float64)
    two.run(torch.get_default_dtype)
    with pytest.raises(mnb.ReplicaDied):
        two.run(lambda: os._exit(3) if mnb.get_replica_context().replica_id_in_sync_group else None)
    assert two.run(torch.get_default_dtype) is torch.float64


def test_what_a_replica_sets_for_itself_stays(two, own, monkeypatch):
    def sets() -> None:
        torch.backends.cudnn.deterministic = True

    two.run(sets)
    monkeypatch.setenv("MIRROR_NB_NEW", "3")
    surroundings.new_moment()
    assert two.run(lambda: torch.backends.cudnn.deterministic) is True


def test_precision_is_followed_by_its_new_names(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "import mirror_nb as mnb\n"
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'\n"
        "with mnb.MirroredStrategy(['cpu:0', 'cpu:1']) as strategy:\n"
        "    b = torch.backends\n"
        "    print(strategy.run(lambda: (b.cuda.matmul.fp32_precision, b.cudnn.conv.fp32_precision)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "('tf32', 'ieee')\n", done.stderr
