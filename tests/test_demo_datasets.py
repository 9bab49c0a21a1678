"""The demo's data: what is read from scikit-learn and from idx files, and what is said when it cannot be."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mirror_nb.demo.datasets import digits, fashion_mnist, read_idx
from mirror_nb.errors import UsageError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array: np.ndarray) -> bytes:
    kind = f"{array.dtype.kind}{array.dtype.itemsize}"
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, CODES[kind], array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_fashion(folder: Path, zipped: bool = False) -> None:
    for part, count in (("train", 6), ("t10k", 3)):
        images = np.arange(count * 4, dtype=np.uint8).reshape(count, 2, 2)
        for name, array in (("images-idx3", images), ("labels-idx1", np.arange(count, dtype=np.uint8))):
            content = idx(array)
            path = folder / f"{part}-{name}-ubyte"
            if zipped:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)


def test_the_digits_are_all_there_scaled_and_cut_evenly():
    data = digits()
    assert len(data.train_images) + len(data.test_images) == 1797
    assert data.train_images.shape[1:] == data.test_images.shape[1:] == (1, 8, 8)
    assert data.train_images.dtype == torch.float32
    assert (data.train_images.min().item(), data.train_images.max().item()) == (0.0, 1.0)
    assert data.train_labels.dtype == torch.int64
    tested = torch.bincount(data.test_labels) / torch.bincount(torch.cat([data.train_labels, data.test_labels]))
    assert ((tested - 0.2).abs() < 0.01).all()
    assert len(data.classes) == 10


def test_the_digits_are_cut_the_same_way_in_every_run():
    assert torch.equal(digits().test_images, digits().test_images)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'mirror_nb\[demo\]'"):
        digits()


@pytest.mark.parametrize("kind", list(CODES))
@pytest.mark.parametrize("zipped", [False, True])
def test_an_idx_file_of_every_type_is_read(tmp_path, kind, zipped):
    array = np.array([[1, 2, 3], [100, 5, 6]], dtype=kind)
    path = tmp_path / "numbers"
    path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    read = read_idx(path)
    assert np.array_equal(read, array)
    assert read.dtype == array.dtype


def test_what_is_no_idx_file_is_named(tmp_path):
    content = idx(np.arange(6, dtype=np.uint8).reshape(2, 3))
    cases = {
        "is no idx file: it begins with 50 4b 03 04": b"PK\x03\x04something",
        "is no idx file: it begins with nothing": b"",
        "is cut off: 6 bytes, its header alone has 12": content[:6],
        r"should have 18 bytes for its shape \(2, 3\), but has 17": content[:-1],
        r"should have 18 bytes for its shape \(2, 3\), but has 19": content + b"x",
        "is a damaged gzip file": gzip.compress(content)[:-9],
    }
    path = tmp_path / "numbers"
    for message, written in cases.items():
        path.write_bytes(written)
        with pytest.raises(UsageError, match=f"numbers {message}"):
            read_idx(path)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_idx(tmp_path / "nowhere")


@pytest.mark.parametrize("zipped", [False, True])
def test_fashion_mnist_is_read_from_its_four_files(tmp_path, zipped):
    write_fashion(tmp_path, zipped)
    data = fashion_mnist(tmp_path)
    assert (data.train_images.shape, data.test_images.shape) == ((6, 1, 2, 2), (3, 1, 2, 2))
    assert data.train_images[1, 0, 0, 0].item() == pytest.approx(4 / 255)
    assert data.train_labels.tolist() == list(range(6))
    assert data.classes[9] == "Ankle boot"


def test_a_folder_without_the_files_is_told_what_it_has(tmp_path):
    (tmp_path / "cats.jpg").touch()
    with pytest.raises(UsageError, match=r"no train-images-idx3-ubyte or .*it has cats\.jpg; give"):
        fashion_mnist(tmp_path)
    with pytest.raises(UsageError, match="it is no folder"):
        fashion_mnist(tmp_path / "nowhere")


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    write_fashion(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(np.zeros(5, dtype=np.uint8)))
    with pytest.raises(UsageError, match=r"shapes are \(6, 2, 2\) and \(5,\)"):
        fashion_mnist(tmp_path)
    labels.write_bytes(idx(np.full(6, 10, dtype=np.uint8)))
    with pytest.raises(UsageError, match="has class 10; Fashion-MNIST has 0 to 9"):
        fashion_mnist(tmp_path)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_debians_fashion_mnist_is_read():
    data = fashion_mnist(DEBIAN)
    assert (data.train_images.shape, data.test_images.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert torch.bincount(data.train_labels).tolist() == [6000] * 10
    assert data.test_images.max().item() == 1.0
