"""Which files a request writes by Python's `open`, for the controller to compare with those of the other replicas.

Two that write one file at once leave a mixture of what they wrote, or all of it twice. Knows files; knows no replica.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

KEPT_FILES = 100

_opened: dict[str, None] = {}


def watch() -> Callable[..., Any]:
    """Note from now on what is opened to be written; return what stands for `open`."""
    original = io.open

    @functools.wraps(original)
    def noting(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = original(file, mode, *args, **kwargs)
        if not isinstance(file, int) and not _WRITES.isdisjoint(mode) and len(_opened) < KEPT_FILES:
            _opened[os.path.realpath(os.fsdecode(file))] = None
        return opened

    # From Python 3.12 on it says that it is `_io`'s, where this is not: it would not be pickled by its name.
    noting.__module__ = "io"
    builtins.open = io.open = noting
    return noting


def taken() -> tuple[str, ...]:
    """Return the users' files that were opened since this was asked last."""
    if not _opened:
        return ()
    found = tuple(path for path in _opened if _is_users(path))
    _opened.clear()
    return found


_WRITES = frozenset("wax+")


def _is_users(path: str) -> bool:
    """Whether a file is not one that libraries keep for themselves: hidden ones, and those for a while."""
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:
        # It was removed meanwhile.
        here = os.sep
    hidden = any(part.startswith(".") for part in os.path.relpath(path, here).split(os.sep) if part != os.pardir)
    return os.path.isfile(path) and not hidden and not any(_is_in(path, folder, here) for folder in _libraries())


def _libraries() -> Iterator[str]:
    yield os.path.realpath(tempfile.gettempdir())
    yield os.path.realpath(sys.prefix)


def _is_in(path: str, folder: str, here: str) -> bool:
    """Whether a path is in a folder; one that the user works in is none of these."""
    return path.startswith(folder + os.sep) and not f"{here}{os.sep}".startswith(folder + os.sep)
