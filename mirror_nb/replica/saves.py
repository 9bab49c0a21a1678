"""Files that every replica saves under one name: each save puts a whole file in the place of the one before.

`torch.save` in a mirrored cell runs on all replicas at once. Written where they are to be, one would be read, or left
by an interrupt, as a mixture of two. Knows torch's function and files; knows no replica.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

LEFT_AFTER_SECONDS = 3600.0
# What is as old and belongs to no process any more a killed replica has left.
_PREFIX = ".mirror_nb-"


def save_whole() -> None:
    """Have `torch.save` write beside the file that it is given, and move what it wrote there once it is whole."""
    original = torch.save

    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        with beside(f) as file:
            original(obj, file, *args, **kwargs)

    torch.save = torch.serialization.save = save


@contextlib.contextmanager
def beside(file: Any) -> Iterator[Any]:
    """Yield where to write: at the end that takes the file's place. Where nothing can, it is `file` itself."""
    path = os.path.realpath(file) if isinstance(file, (str, os.PathLike)) else None
    folder = _folder_in(os.path.dirname(path)) if path is not None and _is_ordinary(path) else None
    if path is None or folder is None:
        yield file
        return
    try:
        # Of the same name: the archive says it.
        written = os.path.join(folder, os.path.basename(path))
        yield written
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, written)
        os.replace(written, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_ordinary(path: str) -> bool:
    """Whether there is an ordinary file, which may be written to, or none."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode) and os.access(path, os.W_OK)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _folder_in(parent: str) -> str | None:
    try:
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent)
    except OSError:
        # There is no such folder, or it takes no new files: what there is to say of it torch says.
        return None
    with contextlib.suppress(OSError):
        _clear(parent)
    return folder


def _clear(parent: str) -> None:
    with os.scandir(parent) as entries:
        for entry in entries:
            process = entry.name.removeprefix(_PREFIX).partition("-")[0] if entry.name.startswith(_PREFIX) else ""
            if process.isdecimal() and time.time() - entry.stat().st_mtime > LEFT_AFTER_SECONDS:
                try:
                    os.kill(int(process), 0)
                except ProcessLookupError:
                    shutil.rmtree(entry.path, ignore_errors=True)
