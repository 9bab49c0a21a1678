"""Labelled images for the demo: scikit-learn's digits, or Fashion-MNIST from a folder of idx files.

Knows file formats and splits. Knows nothing of replicas, and downloads nothing.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mirror_nb.errors import UsageError

_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """Images and their classes, cut into what is trained on and what is tested on."""

    name: str
    """What the data set is called."""
    classes: tuple[str, ...]
    """The name of each class; a label is an index into it."""
    train_images: torch.Tensor
    """float32 [examples, 1, height, width], from 0 (background) to 1."""
    train_labels: torch.Tensor
    """int64 [examples]."""
    test_images: torch.Tensor
    """As `train_images`."""
    test_labels: torch.Tensor
    """As `train_labels`."""


def digits() -> LabelledImages:
    """scikit-learn's 1797 handwritten digits of 8×8 pixels, each class cut in the same proportion.

    The cut is the same in every run. Raises ModuleNotFoundError, with what to install, without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed: pip install 'mirror_nb[demo]'"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels.reshape(-1, 8, 8), labels, test_size=0.2, stratify=labels, random_state=0
    )
    return LabelledImages(
        name="handwritten digits",
        classes=tuple("0123456789"),
        train_images=_images(train_x, brightest=16),
        train_labels=torch.from_numpy(train_y).long(),
        test_images=_images(test_x, brightest=16),
        test_labels=torch.from_numpy(test_y).long(),
    )


def fashion_mnist(folder: str | Path) -> LabelledImages:
    """Fashion-MNIST's 60000 and 10000 articles of 28×28 pixels, from its four idx files in `folder`.

    Debian's package dataset-fashion-mnist puts them into /usr/share/datasets/fashion-mnist. The files may be
    gzipped. Raises UsageError where one is missing or is not what its name says.
    """
    folder = Path(folder)
    parts = []
    for part in ("train", "t10k"):
        images = read_idx(_idx_file(folder, f"{part}-images-idx3-ubyte"))
        labels = read_idx(_idx_file(folder, f"{part}-labels-idx1-ubyte"))
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise UsageError(
                f"{part}-images and {part}-labels in {folder} do not belong together: their shapes are "
                f"{images.shape} and {labels.shape}"
            )
        if len(labels) and int(labels.max()) >= len(_FASHION_CLASSES):
            raise UsageError(f"{part}-labels in {folder} has class {labels.max()}; Fashion-MNIST has 0 to 9")
        parts.append((_images(images, brightest=255), torch.from_numpy(labels.astype(np.int64))))
    return LabelledImages("Fashion-MNIST", _FASHION_CLASSES, *parts[0], *parts[1])


def read_idx(path: str | Path) -> NDArray[np.generic]:
    """The array in an idx file, gzipped or not, in the machine's byte order.

    The format (Yann LeCun, MNIST's page): two zero bytes, a byte for the type, one for the number of
    dimensions, each dimension as a big-endian 32-bit integer, then the items, row by row, big-endian.
    Raises UsageError, naming the file, for what is no idx file, or is longer or shorter than it says.
    """
    path = Path(path)
    content = _read(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_DTYPES:
        raise UsageError(f"{path} is no idx file: it begins with {content[:4].hex(' ') or 'nothing'}")
    dtype = np.dtype(_IDX_DTYPES[content[2]])
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise UsageError(f"{path} is cut off: {len(content)} bytes, its header alone has {start}")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], ">u4"))
    expected = start + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise UsageError(f"{path} should have {expected} bytes for its shape {shape}, but has {len(content)}")
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is a damaged gzip file: {error}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _idx_file(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
    raise UsageError(
        f"{folder} has no {name} or {name}.gz; "
        + ("it is no folder" if found is None else f"it has {', '.join(found[:8]) or 'nothing'}")
        + "; give the folder with Fashion-MNIST's four idx files (Debian: apt install dataset-fashion-mnist, "
        "/usr/share/datasets/fashion-mnist)"
    )


def _images(pixels: NDArray[np.generic], brightest: float) -> torch.Tensor:
    return torch.from_numpy(pixels.astype(np.float32) / np.float32(brightest)).unsqueeze(1)
