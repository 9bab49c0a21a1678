"""To be called when a library of somebody else is imported, and to have an import whole. Knows not whose it is."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final


def when_imported(module: str, call: str) -> None:
    """Call the function named `call`, as "module:function", once `module` is there: now, or after its import.

    It is called once, however often this is asked for.
    """
    watch = _Watch(module, call)
    if watch.key in _asked:
        return
    _asked.add(watch.key)
    if module in sys.modules:
        watch.call()
    else:
        sys.meta_path.insert(0, watch)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Raise a Ctrl-C that comes in this block after it: torch, once interrupted, is never imported in this process."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


def left_out_of_tracebacks(function: Any) -> None:
    """Show its frames no more than the import system's own: an import that fails is told by the user's lines alone.

    Python (`remove_importlib_frames` in import.c) knows those by the file and the function that their code names, and
    ends at ours otherwise, so that three of the import system's are shown beside each.
    """
    function.__code__ = function.__code__.replace(
        co_filename="<frozen importlib._bootstrap_external>", co_name="_call_with_frames_removed"
    )


_asked: set[tuple[str, str]] = set()


@final
class _Watch(MetaPathFinder):
    """Finds one module the way the others do, and calls once it was executed."""

    def __init__(self, module: str, call: str) -> None:
        self.key = module, call
        self._asking = False

    def call(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        place, _, function = self.key[1].partition(":")
        getattr(importlib.import_module(place), function)()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.key[0] or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, self)
        return spec


@final
class _Calling(Loader):
    def __init__(self, loader: Any, watch: _Watch) -> None:
        self._loader = loader
        self._watch = watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._watch.call()


left_out_of_tracebacks(_Calling.exec_module)
