"""The user's own modules, which are edited while a notebook lives: where one process loads one anew, others do too.

    %autoreload 2            whoever has a file's older text loads it again, in objects that are there already
    importlib.reload(mine)   as the function does it

Knows no replicas and no channel.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

_STDLIB = sysconfig.get_path("stdlib")
# Found once: Python 3.13 cannot say while it imports what it finds that with, after which it is asked here.

_specs: dict[str, Any] = {}
# By module: the spec that it had when it was looked at; it gets another one where it is loaded anew.
_reloads: dict[str, int] = {}
# How often each was.
_loaded: dict[str, tuple[ModuleType, int]] = {}
# By name: a module and when the text was written that it has here, in ns.
_users: dict[str, ModuleType] = {}
# The user's own modules, as of when this was known of all:
_known: tuple[Any, ...] = ()
in_place: Callable[[ModuleType], object] | None = None
# Loads a module anew and changes its functions, classes and their objects in place, as autoreload does; None: a plain
# reload has to do.


def is_users(name: str) -> bool:
    """Whether a module is the user's own: `__main__`, or a file that is neither Python's nor of what is installed."""
    if name == "__main__":
        return True
    file = _attribute(sys.modules.get(name), "__file__")
    return isinstance(file, str) and _is_users_file(file)


@functools.lru_cache(8192)
def _is_users_file(file: str) -> bool:
    if "site-packages" in file or "dist-packages" in file:
        return False
    return not file.startswith(_STDLIB)


def changed() -> dict[str, tuple[str, int]]:
    """Return what this process may have loaded anew: by module, how, and a number that is another one each time."""
    found: dict[str, tuple[str, int]] = {}
    edited = _follows_edits()
    for name, module in users().items():
        spec = _attribute(module, "__spec__")
        if _specs.setdefault(name, spec) is not spec:
            _specs[name] = spec
            _reloads[name] = _reloads.get(name, 0) + (not edited)
        if edited:
            written = _written(module)
            if written is not None:
                found[name] = ("edited", written)
        elif _reloads.get(name):
            found[name] = ("reloaded", _reloads[name])
    return found


def load_anew(changes: dict[str, tuple[str, int]]) -> None:
    """Load those anew that another process has changed, and that are here."""
    for name, (how, number) in changes.items():
        module = sys.modules.get(name)
        if module is None or number == (_loaded.get(name, (None, 0))[1] if how == "edited" else _reloads.get(name)):
            continue
        if how == "edited":
            _loaded[name] = module, number
        else:
            _reloads[name] = number
        try:
            (in_place if how == "edited" and in_place is not None else importlib.reload)(module)
        except Exception as reason:
            warnings.warn(f"a replica could not load `{name}` anew: {type(reason).__name__}: {reason}", stacklevel=2)


def note() -> None:
    """Note which texts have been loaded here: before somebody edits them."""
    if _signs() != _known:
        for name, module in users().items():
            if name not in _loaded or _loaded[name][0] is not module:
                _loaded[name] = module, _written(module) or 0


def users() -> dict[str, ModuleType]:
    """Return the user's own modules that are here, without `__main__`."""
    global _users, _known
    known = _signs()
    if known != _known or not known:
        later = _later(_known)
        names = list(sys.modules) if later is None else [*_users, *later]
        others = {"__main__", "__mp_main__", "mirror_nb"}
        found = {name: sys.modules.get(name) for name in names if name.partition(".")[0] not in others}
        _users = {name: module for name, module in found.items() if module is not None and is_users(name)}
        _known = known
    return _users


def _later(known: tuple[Any, ...]) -> list[str] | None:
    """Return the names of the modules that came after these; None: some of these have gone, or come anew.

    A replica that looks at all has pages copied for each of them, which takes it a quarter of the time of its start.
    """
    try:
        names = list(itertools.islice(reversed(sys.modules), len(sys.modules) - known[0] + 1))
    except (IndexError, ValueError, RuntimeError):
        # Of nothing, of more than there are now, and while a thread imports.
        return None
    # What comes goes to the end: where the last one stands as many places from there, all before it stand as they did.
    return names[-2::-1] if names and (names[-1], id(sys.modules.get(names[-1]))) == known[1:] else None


def _signs() -> tuple[Any, ...]:
    # To look at all of them takes a millisecond.
    try:
        last = next(reversed(sys.modules))
    except RuntimeError:
        # A thread imports.
        return ()
    return len(sys.modules), last, id(sys.modules.get(last))


def _attribute(module: object, name: str) -> Any:
    # Past the module's own say: one that is loaded when it is used would be, and one that is missing raises.
    try:
        return object.__getattribute__(module, "__dict__").get(name)
    except AttributeError:
        return None


def _written(module: ModuleType) -> int | None:
    try:
        return os.stat(_attribute(module, "__file__") or "").st_mtime_ns
    except OSError:
        return None


def _follows_edits() -> bool:
    """Whether IPython's autoreload is at work here."""
    interactive = sys.modules.get("IPython.core.getipython")
    shell = interactive.get_ipython() if interactive is not None else None
    magics = shell.magics_manager.registry.get("AutoreloadMagics") if shell is not None else None
    # A version that does not tell has it switched on.
    return magics is not None and bool(getattr(getattr(magics, "_reloader", None), "enabled", True))
