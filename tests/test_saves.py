"""`torch.save` in replicas: a file is the old one or the new one, whole."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from driving import run_cell

from mirror_nb.replica import saves


@pytest.fixture(autouse=True)
def whole() -> Iterator[None]:
    """`torch.save` is that of a replica."""
    before = torch.save, torch.serialization.save
    saves.save_whole()
    yield
    torch.save, torch.serialization.save = before


def inside(path: Path) -> list[str]:
    return zipfile.ZipFile(path).namelist()


def hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_what_torch_writes(tmp_path, kind):
    plain = io.BytesIO()
    torch.save({"a": torch.ones(3)}, plain)
    torch.save({"a": torch.ones(3)}, kind(tmp_path / "model.pt"))
    assert torch.load(tmp_path / "model.pt")["a"].tolist() == [1, 1, 1]
    assert {name.partition("/")[0] for name in inside(tmp_path / "model.pt")} == {"model"}
    assert torch.load(io.BytesIO(plain.getvalue()))["a"].tolist() == [1, 1, 1]
    assert os.listdir(tmp_path) == ["model.pt"]
    assert (tmp_path / "model.pt").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_file_in_the_working_folder_is_saved_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(1, "x.pt")
    torch.save(2, "x.pt", _use_new_zipfile_serialization=False)
    assert torch.load("x.pt") == 2
    assert os.listdir() == ["x.pt"]


def test_what_fails_leaves_the_file_that_was_there(tmp_path):
    torch.save("old", tmp_path / "x.pt")
    with pytest.raises(Exception, match="pickle"):
        torch.save({"a": torch.ones(3), "b": threading.Lock()}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt") == "old"
    assert hidden(tmp_path) == []


def test_the_rights_and_the_link_stay(tmp_path):
    (tmp_path / "there").mkdir()
    real = tmp_path / "there" / "x.pt"
    torch.save(1, real)
    real.chmod(0o640)
    (tmp_path / "link.pt").symlink_to(real)
    torch.save(2, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert (torch.load(real), real.stat().st_mode & 0o777) == (2, 0o640)


def test_where_there_is_no_folder_the_error_is_torchs_own(tmp_path):
    with pytest.raises(RuntimeError, match=r"Parent directory .* does not exist"):
        torch.save(1, tmp_path / "nowhere" / "x.pt")


def test_what_is_no_ordinary_file_is_written_to(tmp_path):
    torch.save(1, "/dev/null")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with pipe.open("wb") as file:
        torch.save(7, file)
    reader.join(20)
    assert torch.load(io.BytesIO(read[0])) == 7
    assert pipe.is_fifo()


def test_what_a_killed_replica_left_is_cleared_once_it_is_old(tmp_path):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    gone, here = int(ended.stdout), os.getpid()
    old = time.time() - 2 * saves.LEFT_AFTER_SECONDS
    left: dict[str, bool] = {f".mirror_nb-{gone}-a": False, f".mirror_nb-{here}-b": True, ".mirror_nb-mine": True}
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.pt").write_bytes(b"half")
        os.utime(tmp_path / name, (old, old))
    (tmp_path / f".mirror_nb-{gone}-new").mkdir()
    torch.save(1, tmp_path / "x.pt")
    assert {name: (tmp_path / name).exists() for name in left} == left
    assert (tmp_path / f".mirror_nb-{gone}-new").exists()


def test_what_another_replica_takes_away_meanwhile_leaves_no_folder_open(tmp_path, recwarn):
    (tmp_path / f".mirror_nb-{os.getpid()}-gone").symlink_to(tmp_path / "nowhere")
    torch.save(1, tmp_path / "x.pt")
    gc.collect()
    assert not recwarn.list


def test_replicas_that_save_one_file_at_once_never_leave_or_read_a_torn_one(replicas, tmp_path):
    ran = run_cell(
        replicas(2),
        f"""
import torch
network = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.BatchNorm1d(500))
for _ in range(30):
    network(torch.randn(4, 500) + replica_id)
    torch.save(network.state_dict(), {str(tmp_path / "best.pt")!r})
    read = torch.load({str(tmp_path / "best.pt")!r})
    assert len(read) == 7
""",
    )
    assert ran.errors == {}, ran.report.failures
    assert os.listdir(tmp_path) == ["best.pt"]
