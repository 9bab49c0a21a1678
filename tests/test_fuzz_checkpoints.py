"""Whatever a file holds, to load a model from it is a model or an error of ours: no crash, no hang, no code run."""

from __future__ import annotations

import errno
import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import mirror_nb as mnb
from mirror_nb.errors import CheckpointError, UsageError
from mirror_nb.training import files

FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
X, Y = torch.ones(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])


def made() -> mnb.Model:
    model = mnb.Model(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    model.compile(optimizer="adam", loss="cross_entropy", metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.pt"
    model = made()
    model.fit(X, Y, batch_size=3, verbose=0)
    model.save(path)
    return path.read_bytes()


@pytest.fixture
def refuse(tmp_path: Path) -> Callable[[bytes], BaseException | None]:
    """Load a model from these bytes; return what was raised, which must be one of two errors, or None."""
    path, ran = tmp_path / "model.pt", tmp_path / "ran"

    def attempt(content: bytes) -> BaseException | None:
        path.write_bytes(content)
        raised = None
        for load in (lambda: mnb.load_model(path), lambda: made().load_training(path)):
            try:
                load()
            except (CheckpointError, UsageError) as error:
                raised = error
            except RuntimeError as error:
                # Weights of another network, told by load_state_dict; others are no answer.
                if "Error(s) in loading state_dict" not in str(error):
                    raise
                raised = error
            assert not ran.exists(), "code of the file was run"
        return raised

    return attempt


@FUZZ
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_part_of_a_file(cut, whole, refuse):
    assert isinstance(refuse(whole[: int(cut * len(whole))]), CheckpointError)


@FUZZ
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_file_with_other_bytes_here_and_there(changes, whole, refuse):
    content = bytearray(whole)
    for place, value in changes:
        content[int(place * len(content))] = value
    refuse(bytes(content))


@FUZZ
@given(content=st.binary(max_size=300), prefix=st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x05"]))
def test_anything_at_all(content, prefix, refuse):
    assert isinstance(refuse(prefix + content), CheckpointError)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("state_dict", "architecture", "compile", "training", "format", "version")


@FUZZ
@given(key=st.sampled_from(KEYS), value=plain)
def test_a_file_whose_parts_make_no_sense(key, value, whole, refuse):
    content = torch.load(io.BytesIO(whole), weights_only=True)
    content[key] = value
    refuse(saved(content))


@FUZZ
@given(data=st.data(), value=plain)
def test_a_description_that_makes_no_sense(data, value, whole, refuse):
    """Somewhere inside, at any depth, is something else than was written."""
    content = torch.load(io.BytesIO(whole), weights_only=True)
    node: Any = content[data.draw(st.sampled_from(("architecture", "compile", "training")))]
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        inner = node[key]
        if isinstance(inner, (dict, list)) and inner and data.draw(st.booleans()):
            node = inner
            continue
        node[key] = value
        break
    refuse(saved(content))


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, call: tuple[Any, ...]) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


def evils(mark: Path) -> list[tuple[Any, ...]]:
    return [
        (os.system, (f"touch {mark}",)),
        (exec, (f"open({str(mark)!r}, 'w')",)),
        (eval, (f"__import__('os').system('touch {mark}')",)),
        (open, (str(mark), "w")),
        (torch.load, (str(mark),)),
        (torch.hub.load, ("x", "y")),
        (pickle.loads, (pickle.dumps(Path(mark)),)),
        (torch.utils.data.get_worker_info, ()),
        (torch._utils._rebuild_tensor_v2, (Evil((os.system, (f"touch {mark}",))), 0, (1,), (1,), False, {})),
    ]


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("deep", [True, False])
def test_a_file_that_would_run_code(number, zipped, deep, whole, refuse, tmp_path):
    evil = Evil(evils(tmp_path / "ran")[number])
    content = torch.load(io.BytesIO(whole), weights_only=True)
    if deep:
        content["training"]["callbacks"] = {"EarlyStopping": [[evil]]}
    file = io.BytesIO()
    torch.save(content if deep else evil, file, _use_new_zipfile_serialization=zipped)
    assert isinstance(refuse(file.getvalue()), CheckpointError)


def test_a_file_that_would_run_code_by_a_pickle_put_in_place_of_its_own(whole, refuse, tmp_path):
    evil = b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    pickletools.dis(evil, out=io.StringIO())
    for name in ("data.pkl", "constants.pkl", "code/__torch__.py"):
        assert isinstance(refuse(exchanged(whole, name, evil)), (CheckpointError, type(None)))
    # A TorchScript archive is refused too, whatever it holds.
    script = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(1, 1)), script)
    assert isinstance(refuse(script.getvalue()), CheckpointError)


@pytest.mark.parametrize("shape", [(2**40,), (2**31, 2**31), (-1,), (2**62, 4)])
def test_a_tensor_that_says_it_is_enormous(shape, whole, refuse):
    """It may not take memory for what is not there."""

    class Huge:
        def __reduce__(self) -> Any:
            strides = tuple(0 for _ in shape)
            return torch._utils._rebuild_tensor_v2, (torch.UntypedStorage(8), 0, shape, strides, False, {})

    content = torch.load(io.BytesIO(whole), weights_only=True)
    described = content["architecture"]["modules"]
    assert refuse(saved({**content, "state_dict": {**content["state_dict"], "0.weight": Huge()}})) is not None
    for module in described.values() if isinstance(described, dict) else described:
        if isinstance(module, dict) and module.get("parameters"):
            module["parameters"] = {name: list(shape) for name in module["parameters"]}
    assert isinstance(refuse(saved(content)), (CheckpointError, UsageError))


def test_nests_without_end_and_members_that_say_they_are_large(whole, refuse):
    deep = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    assert isinstance(refuse(exchanged(whole, "data.pkl", deep)), CheckpointError)
    # A count of 2**60 bytes that do not follow.
    assert isinstance(
        refuse(exchanged(whole, "data.pkl", b"\x80\x04\x8e" + struct.pack("<Q", 2**60))), CheckpointError
    )
    assert isinstance(refuse(exchanged(whole, "data.pkl", b"\x80\x02X" + struct.pack("<I", 2**31))), CheckpointError)


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def exchanged(archive: bytes, name: str, content: bytes) -> bytes:
    """Return the archive with a member, wherever it lies, of another content."""
    found = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(found, "w") as new:
        members = {entry.filename: old.read(entry) for entry in old.infolist()}
        folder = next(iter(members)).split("/")[0]
        members[f"{folder}/{name}"] = content
        for path, held in members.items():
            new.writestr(path, held)
    return found.getvalue()


# ---- a disk that is full


@pytest.mark.parametrize("after", [0, 100, 3000])
@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_a_disk_that_is_full_leaves_the_old_file_whole_and_no_other(after, fails, whole, tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    path.write_bytes(whole)
    left = [after]

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fails == "write":
        real = files._Watched.write

        def write(self: Any, data: Any) -> int:
            left[0] -= len(data)
            if left[0] < 0:
                self._file = type("Full", (), {"write": full})()
            return real(self, data)

        monkeypatch.setattr(files._Watched, "write", write)
    else:
        monkeypatch.setattr(os, fails, full)
    with pytest.raises(CheckpointError, match="No space left on device; the file that was there is as it was"):
        made().save(path)
    monkeypatch.undo()
    assert path.read_bytes() == whole
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt"]


def test_a_real_device_that_is_full():
    """/dev/full takes nothing."""
    with open("/dev/full", "wb", buffering=0) as file:
        watched = files._Watched(file)
        torch.save({"x": torch.ones(10)}, watched)  # type: ignore[arg-type]
        with pytest.raises(OSError, match="No space left"):
            watched.check()


# ---- backups


@pytest.mark.parametrize("damaged", [b"", b"PK\x03\x04", None])
def test_a_damaged_backup_is_an_error_that_names_it_or_the_one_before_is_taken(damaged, whole, tmp_path):
    latest, previous = tmp_path / "latest.pt", tmp_path / "previous.pt"
    latest.write_bytes(whole[: len(whole) // 2] if damaged is None else damaged)
    backup = mnb.callbacks.BackupAndRestore(tmp_path, double_checkpoint=True, delete_checkpoint=False)
    with pytest.raises(CheckpointError, match=r"latest\.pt"):
        made().fit(X, Y, epochs=2, verbose=0, callbacks=[backup])
    # It stays for who wants to look at it.
    assert latest.exists()
    previous.write_bytes(whole)
    with pytest.warns(UserWarning, match=r"latest\.pt cannot be read, the backup before it is taken"):
        history = made().fit(X, Y, epochs=2, verbose=0, callbacks=[backup])
    assert history.epoch == [0, 1]
    assert files.read(latest)["training"]["epoch"] == 2
