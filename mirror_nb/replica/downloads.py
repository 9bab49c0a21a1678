"""Files that all replicas would download to one place at once: one of them does, and the others use what it brought.

A cell with `MNIST("data", download=True)`, or with a network's pretrained weights, runs on every replica. Each would
fetch the same file, unpack it over what another reads already, and ask the server as often as there are replicas.

The one whose turn it is has a lock on the folder; replica 0 comes first, so that its progress bar is seen. Knows
torch's, torchvision's and Python's own ways to download; knows files; knows no other replica.
"""

from __future__ import annotations

import contextlib
import email.message
import fcntl
import functools
import inspect
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import torch.hub

from mirror_nb.environment.imported import when_imported
from mirror_nb.replica.saves import beside

PATIENCE_SECONDS = 0.5
# So long the others let replica 0 come first.
LOOK_SECONDS = 0.01

_patience = 0.0
_held: set[str] = set()
# Folders whose lock this process has: what it calls meanwhile may download to the same one.


def take_turns(replica_id: int) -> None:
    """Have the ways to download take turns from now on."""
    global _patience
    _patience = PATIENCE_SECONDS if replica_id else 0.0
    urllib.request.urlretrieve = _retrieving_once(urllib.request.urlretrieve)
    torch.hub.download_url_to_file = _fetching_once(torch.hub.download_url_to_file)
    repository = getattr(torch.hub, "_get_cache_or_reload", None)
    if repository is not None:
        torch.hub._get_cache_or_reload = _cloning_once(repository)
    when_imported("torchvision.datasets", f"{__name__}:take_turns_in_torchvision")


def take_turns_in_torchvision() -> None:
    """Have torchvision's datasets that can download themselves take turns, once they are imported."""
    datasets: Any = sys.modules["torchvision.datasets"]
    found = list(vars(datasets).values())
    kinds: list[Any] = [kind for kind in found if isinstance(kind, type) and issubclass(kind, datasets.VisionDataset)]
    for kind in kinds:
        init = vars(kind).get("__init__")
        if init is not None and {"root", "download"} <= inspect.signature(init).parameters.keys():
            kind.__init__ = _made_once(init)


def _retrieving_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def urlretrieve(url: str, filename: Any = None, *args: Any, **kwargs: Any) -> Any:
        if filename is None:
            return original(url, filename, *args, **kwargs)
        with _once(filename) as there:
            if there:
                return filename, email.message.Message()
            with beside(filename) as written:
                return filename, original(url, written, *args, **kwargs)[1]

    return urlretrieve


def _fetching_once(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def download_url_to_file(url: str, dst: str, *args: Any, **kwargs: Any) -> None:
        with _once(os.path.expanduser(dst)) as there:
            if not there:
                original(url, dst, *args, **kwargs)

    return download_url_to_file


def _cloning_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_cache_or_reload(*args: Any, **kwargs: Any) -> Any:
        folder = torch.hub.get_dir()
        os.makedirs(folder, exist_ok=True)
        with _locked(folder):
            return original(*args, **kwargs)

    return get_cache_or_reload


def _made_once(original: Callable[..., None]) -> Callable[..., None]:
    """Return a dataset's `__init__` of which one replica downloads, and the others read what is there then."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            bound = None
        if bound is None or not bound.arguments.get("download"):
            original(self, *args, **kwargs)
            return
        root = os.path.expanduser(bound.arguments["root"])
        with contextlib.suppress(OSError):
            # As the dataset itself would; its errors are its own to raise.
            os.makedirs(root, exist_ok=True)
        if _patience:
            bound.arguments["download"] = False
            for wait in (False, True):
                if wait:
                    _await_the_first(root)
                with _locked(root, fcntl.LOCK_SH), contextlib.suppress(Exception):
                    original(*bound.args, **bound.kwargs)
                    return
        # It is not there, and nobody brings it; or why not, the dataset says to each that asks.
        with _locked(root):
            original(self, *args, **kwargs)

    return init


@contextlib.contextmanager
def _once(target: Any) -> Iterator[bool]:
    """Hold the lock of a file's folder; yield whether another one has put the file there meanwhile."""
    before, folder = _sign_of(target), os.path.dirname(os.path.realpath(target))
    _await_the_first(folder)
    with _locked(folder):
        now = _sign_of(target)
        yield now is not None and now != before


def _sign_of(target: Any) -> tuple[int, int, int] | None:
    try:
        status = os.stat(target)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _await_the_first(folder: str) -> None:
    """Give replica 0 some time to come, until somebody has the folder's lock for itself."""
    end = time.monotonic() + _patience
    with contextlib.suppress(OSError), _descriptor(folder) as descriptor:
        while time.monotonic() < end:
            # An error where somebody has it.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            time.sleep(LOOK_SECONDS)


@contextlib.contextmanager
def _locked(folder: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the folder's lock: by oneself, or together with others that only read.

    Where a folder has no locks, and for what is called by who has it already, there is none.
    """
    folder = os.path.realpath(folder)
    if folder in _held or not os.path.isdir(folder):
        yield
        return
    with _descriptor(folder) as descriptor:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, kind)
        _held.add(folder)
        try:
            yield
        finally:
            _held.discard(folder)


@contextlib.contextmanager
def _descriptor(folder: str) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        # Which gives a lock back.
        os.close(descriptor)
