"""Files that several replicas write at once are told of."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from driving import running
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import mirror_nb as mnb
from mirror_nb.replica import files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the user works in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def noted() -> Iterator[None]:
    """What is opened is noted, as in a replica."""
    before = io.open, builtins.open
    files.watch()
    files.taken()
    yield
    io.open, builtins.open = before


def test_what_is_opened_to_write_is_noted(folder, noted):
    Path("read.txt").touch()
    files.taken()
    with open("read.txt") as file, open(file.fileno(), "a", closefd=False):
        pass
    assert files.taken() == ()
    for mode, name in {"w": "a", "ab": "b", "x": "c", "r+": "read.txt"}.items():
        with open(name, mode):
            pass
    Path("made.txt").write_text("x")
    with pytest.raises(FileNotFoundError), open("no/where", "w"):
        pass
    names = ("a", "b", "c", "read.txt", "made.txt")
    assert files.taken() == tuple(str(folder.resolve() / name) for name in names)
    assert files.taken() == ()


def test_open_still_travels_by_its_name(noted):
    assert pickle.loads(pickle.dumps(open)) is open
    assert open.__module__ == "io"


def test_a_folder_whose_name_begins_as_that_of_temporary_files_is_another_one(tmp_path, noted, monkeypatch):
    for name in ("tmp", "tmp_of_mine"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "tmp_of_mine")
    for path in ("../tmp/a", "b"):
        Path(path).touch()
        Path(path).write_text("x")
    assert files.taken() == (str(tmp_path.resolve() / "tmp_of_mine" / "b"),)


def test_what_libraries_keep_for_themselves_is_not(folder, noted):
    with tempfile.TemporaryDirectory(dir=folder) as outside:
        os.mkdir("work")
        os.chdir("work")
        tempfile.tempdir, before = outside, tempfile.tempdir
        try:
            os.mkdir(".hidden")
            for name in (".hidden/a", ".b", os.path.join(outside, "c"), os.devnull, "d"):
                with open(name, "w"):
                    pass
        finally:
            tempfile.tempdir = before
            os.chdir(folder)
    # As it is asked where the user works.
    os.chdir("work")
    assert files.taken() == (str(folder.resolve() / "work" / "d"),)


def test_a_folder_that_is_gone_hides_nothing(folder, noted, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "for-a-while"))
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "log.csv"
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir(folder / "gone")
    try:
        with open(elsewhere, "w"):
            pass
        assert files.taken() == (str(elsewhere.resolve()),)
    finally:
        os.chdir(folder)


def closing(shell: InteractiveShell, source: str) -> str:
    with capture_output() as shown:
        result = shell.run_cell(source)
    result.raise_error()
    return str(shown.outputs[-1].data["text/plain"]).splitlines()[0]


def test_the_closing_line_names_them_once(shell, folder):
    running(shell)(f"import os; os.chdir({str(folder)!r})")
    cell = "%%mirrored\nfor name in ('log.csv', f'own{replica_id}'):\n    with open(name, 'a') as f: f.write('x')\n"
    told = closing(shell, cell + "if replica_id == 0: open('one', 'w').close()")
    assert "written by several replicas at once: log.csv (under `if replica_id == 0:` it is written once)" in told
    assert "written" not in closing(shell, cell)
    assert (folder / "log.csv").read_text() == "xxxx"


def test_a_function_that_writes_is_warned_of(folder):
    def step() -> None:
        with open("log.csv", "a") as file:
            file.write("x")

    told = pytest.warns(UserWarning, match=r"step wrote .*log\.csv on several replicas at once")
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, told as warned:
        strategy.run(step)
    assert [Path(warning.filename).name for warning in warned] == ["test_files.py"]
