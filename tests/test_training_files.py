"""A model's file is there whole or not at all, and reading one runs nothing."""

from __future__ import annotations

import os
import pickle
import resource
import stat
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mirror_nb.errors import CheckpointError, UsageError
from mirror_nb.training import files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


def only(path: Path) -> bool:
    """Whether nothing lies beside the file."""
    return list(path.parent.iterdir()) == [path]


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """As on a full disk: no file may grow beyond the limit, in bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- there and back -----------------------------------------------------------------------------------


def test_what_is_written_is_read(path):
    content = {
        "tensor": torch.rand(2, 3, dtype=torch.float64),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "numbers": [1, 2.5, True, None, 2**70, float("inf")],
        "tuple": (1, ("a", "b")),
        1: {"nested": {}},
    }
    files.write(path, content)
    read = files.read(path)
    assert torch.equal(read["tensor"], content["tensor"])
    assert read["half"].dtype is torch.bfloat16
    assert read["empty"].shape == (0, 3)
    assert (read["numbers"], read["tuple"], read[1]) == (content["numbers"], content["tuple"], content[1])
    assert (read["format"], read["version"]) == ("mirror_nb", 1)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_what_is_sparse_stays_so(path, layout):
    sparse = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]]).to_sparse(layout=layout)
    files.write(path, {"state_dict": {"adjacency": sparse}})
    read = files.read(path)["state_dict"]["adjacency"]
    assert read.layout is layout
    assert torch.equal(read.to_dense(), sparse.to_dense())


def test_torch_alone_reads_it(path):
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    files.write(path, {"state_dict": network.state_dict()})
    state = torch.load(path, weights_only=True)["state_dict"]
    nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).load_state_dict(state)
    assert state._metadata == network.state_dict()._metadata


def test_other_kinds_of_numbers_and_dicts_become_plain(path):
    files.write(
        path,
        {
            "numpy": np.float64(1.5),
            "count": np.int32(3),
            "ordered": OrderedDict(a=1),
            "default": defaultdict(list, a=[1]),
            "parameter": nn.Parameter(torch.ones(2)),
        },
    )
    read = files.read(path)
    assert (read["numpy"], read["count"], read["ordered"], read["default"]) == (1.5, 3, {"a": 1}, {"a": [1]})
    assert type(read["parameter"]) is torch.Tensor


def test_a_view_takes_no_more_than_its_own_bytes_and_ties_stay(path):
    whole = torch.rand(100_000)
    files.write(path, {"view": whole[:10], "again": whole[:10], "expanded": torch.ones(1).expand(10)})
    assert path.stat().st_size < 10_000
    read = files.read(path)
    assert torch.equal(read["view"], whole[:10])
    assert read["view"].data_ptr() == read["again"].data_ptr()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda: lambda x: x, "training.x.0: a function"),
        (lambda: {1, 2}, "a set"),
        (lambda: np.ones(2), "a ndarray"),
        (lambda: Path("x"), "Path"),
        (lambda: {(1, 2): 3}, "a tuple"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a Tensor"),
        (lambda: torch.ones(2, device="meta"), "a Tensor"),
        (lambda: nn.LazyLinear(2).weight, "call the network once"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(path, value, told):
    with pytest.raises(UsageError, match=told):
        files.write(path, {"training": {"x": [value()]}})
    assert list(path.parent.iterdir()) == []


# ---- whole or not at all ------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file(path):
    files.write(path, {"number": 1})
    before = path.read_bytes()
    with (
        small_files(200_000),
        pytest.raises(CheckpointError, match="File too large; the file that was there"),
    ):
        files.write(path, {"number": 2, "big": torch.rand(100_000)})
    assert path.read_bytes() == before
    assert only(path)


def test_a_full_disk_leaves_no_half_of_a_first_file(path):
    with small_files(200_000), pytest.raises(CheckpointError, match="nothing was left there"):
        files.write(path, {"big": torch.rand(100_000)})
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_an_interrupt_leaves_the_old_file(path, moment, monkeypatch):
    files.write(path, {"number": 1})

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    if moment == "write":

        class Interrupting:
            def __init__(self, file: Any) -> None:
                self._file = file

            def write(self, data: Any) -> None:
                interrupted()

        watched = files._Watched
        monkeypatch.setattr(files, "_Watched", lambda file: watched(Interrupting(file)))
    else:
        monkeypatch.setattr(os, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write(path, {"number": 2})
    assert files.read(path)["number"] == 1
    assert only(path)


def test_the_new_file_replaces_the_old_one_and_leaves_nothing_beside_it(path):
    for number in (1, 2):
        files.write(path, {"number": number})
    assert files.read(path)["number"] == 2
    assert only(path)


def test_a_file_has_the_rights_of_any_new_one(path):
    before = os.umask(0o027)
    try:
        files.write(path, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_a_link(path):
    real = path.parent / "real.pt"
    path.symlink_to(real)
    files.write(path, {"number": 1})
    assert path.is_symlink()
    assert files.read(real)["number"] == 1


@pytest.mark.parametrize("name", ["nowhere/model.pt", "."])
def test_a_place_that_is_none_is_told(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot write"):
        files.write(tmp_path / name, {})


# ---- what is no file of ours --------------------------------------------------------------------------


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize("protocol", ["torch", "torch's old one", "pickle"])
def test_code_in_a_file_is_not_run(path, protocol):
    witness = path.parent / "witness"
    content = {"format": "mirror_nb", "version": 1, "state_dict": Evil(witness)}
    if protocol == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=protocol == "torch")
    with pytest.raises(CheckpointError, match=r"not loaded|is no file"):
        files.read(path)
    assert not witness.exists()


def test_a_whole_pickled_model_is_refused(path):
    torch.save({"format": "mirror_nb", "version": 1, "model": nn.Linear(1, 1)}, path)
    with pytest.raises(CheckpointError, match="nothing of it was run"):
        files.read(path)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_breaks_off_is_told(path, part):
    files.write(path, {"tensor": torch.rand(1000)})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(CheckpointError, match=r"model\.pt.*take another checkpoint"):
        files.read(path)


@pytest.mark.parametrize("content", [b"hello", b"\x80\x02}q\x00.", os.urandom(1000)])
def test_a_file_of_another_kind_is_told(path, content):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.pt"):
        files.read(path)


def test_a_plain_state_dict_is_told_how_to_load_it(path):
    torch.save(nn.Linear(1, 1).state_dict(), path)
    with pytest.raises(CheckpointError, match=r"load_state_dict\(torch.load"):
        files.read(path)


@pytest.mark.parametrize("version", [2, None, "1"])
def test_a_newer_version_is_told(path, version):
    torch.save({"format": "mirror_nb", "version": version}, path)
    with pytest.raises(CheckpointError, match=f"version {version!r}.*update"):
        files.read(path)


@pytest.mark.parametrize("name", ["nowhere.pt", "."])
def test_a_file_that_is_not_there_is_told(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot read"):
        files.read(tmp_path / name)


def test_a_conjugate_of_what_is_saved_too_keeps_its_own_numbers(tmp_path):
    number = torch.tensor([1 + 2j, 3 - 4j])
    content = {"it": number, "conjugate": number.conj(), "negative": number.conj().imag, "again": number.conj()}
    files.write(tmp_path / "file.pt", content)
    found = files.read(tmp_path / "file.pt")
    for name, tensor in content.items():
        assert torch.equal(found[name], tensor), name
