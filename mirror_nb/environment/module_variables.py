"""Variables of the user's own modules that are set from outside: where one process has set its own, others do too.

    import config
    config.LR = 0.1    config.OPTIONS["depth"] = 3    config.args.epochs = 5    config.Net.width = 64

Told are plain values that are others than after the import: what a module finds out by itself, its rank say, is each
process's own. Knows no replicas and no channel.
"""

from __future__ import annotations

import importlib.machinery
import sys
import warnings
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any, final

from mirror_nb import plain
from mirror_nb.environment import sources
from mirror_nb.environment.imported import left_out_of_tracebacks
from mirror_nb.environment.replaced import Replaced

_Path = tuple[str, ...]
Variables = dict[str, dict[_Path, Any]]
# By module and path: ("LR",), or ("args", "epochs") of an object or a class that the module has.
WATCHED = 5_000
# So many variables, 0.1 µs each, are looked at between two calls of one cell; where there are more, in each cell once.

_imported: dict[str, tuple[ModuleType, dict[_Path, dict[str, Any]]]] = {}
# What a module held after its import, or when it was looked at first, and what objects and classes in it did.
_set: dict[str, set[_Path]] = {}
# What has been something else since: it is told even where it is again what it was.
_wanted: Variables = {}
# What another process has set.
_taken: Variables = {}
# That as it was set here: what this process has made of it since stays.


def watch() -> None:
    """Notice from now on what modules hold after their import; again is once."""
    if not _watched:
        loader = importlib.machinery.SourceFileLoader
        _watched.append(Replaced(loader, "exec_module", after=_executed))
        left_out_of_tracebacks(loader.exec_module)
        for name, module in sources.users().items():
            _note(name, module)


_watched: list[Replaced] = []


def _executed(loader: object, module: ModuleType) -> None:
    name = module.__name__
    if sources.is_users(name):
        _note(name, module)
        _taken.pop(name, None)
        _apply(name)


def _note(name: str, module: ModuleType) -> None:
    # By the name that it is imported by: its own may be another one.
    _imported[name] = module, {path: _plain_in(held) for path, held in _owners(module)}
    _set.pop(name, None)


def changed() -> Variables:
    """Return what was set in the user's modules since their import."""
    return Signs().changed


def take(variables: Variables) -> None:
    """Set what another process has set: in modules that are here now, in others after their import."""
    _wanted.clear()
    _wanted.update(variables)
    for name in variables:
        if name in sys.modules:
            _apply(name)


def put(variables: Variables) -> None:
    """Set what a cell has set in another process, in the modules that are here."""
    for name, values in variables.items():
        for path, value in values.items() if name in sys.modules else ():
            _put_or_warn(name, path, value, "the notebook")


def _apply(name: str) -> None:
    taken = _taken.setdefault(name, {})
    for path, value in _wanted.get(name, {}).items():
        if path in taken and _equal(taken[path], value):
            continue
        taken[path] = plain.copied(value)
        _put_or_warn(name, path, value, "a replica")


def _put_or_warn(module: str, path: _Path, value: Any, who: str) -> None:
    try:
        _put(sys.modules[module], path, value)
    except Exception as reason:
        where = ".".join((module, *path))
        warnings.warn(f"{who} could not set `{where}`: {type(reason).__name__}: {reason}", stacklevel=3)


def _put(owner: Any, path: _Path, value: Any) -> None:
    for name in path[:-1]:
        owner = getattr(owner, name)
    there: Any = getattr(owner, path[-1], None)
    if type(there) is type(value) and isinstance(there, list):
        # In place: other modules may have it by a name of their own.
        there[:] = value
    elif type(there) is type(value) and isinstance(there, (dict, set)):
        there.clear()
        there.update(value)
    else:
        setattr(owner, path[-1], value)


def _plain_in(held: Mapping[str, Any], before: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return copies of plain values; of none that are private. What is equal to one of `before` has that."""
    copies = {}
    for name, value in list(held.items()):
        if type(value) in plain.KINDS and name[:1] != "_":
            known = before.get(name, plain.NOT_PLAIN)
            copy = known if plain.same(value, known) else plain.copied(value)
            if copy is not plain.NOT_PLAIN:
                copies[name] = copy
    return copies


def _owners(module: ModuleType) -> Iterator[tuple[_Path, Mapping[str, Any]]]:
    """Yield the module, and classes and objects in it, by path, with what they hold."""
    yield (), vars(module)
    for name, value in list(vars(module).items()):
        if type(value) not in _WITHOUT and name[:1] != "_":
            held = _held(value, module)
            if held is not None:
                yield (name,), held


def _held(value: object, module: ModuleType) -> Mapping[str, Any] | None:
    # Past all that the object itself says: one that is loaded when it is used would be.
    if isinstance(value, type):
        held: Any = type.__dict__["__dict__"].__get__(value)
        return held if held.get("__module__") == module.__name__ else None
    kind = type.__dict__["__module__"].__get__(type(value))
    if kind not in _NAMESPACES and not (isinstance(kind, str) and sources.is_users(kind)):
        return None
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    # A network's are its own to travel with.
    return held if type(held) is dict and "_parameters" not in held else None


_NAMESPACES = ("types", "argparse")
_WITHOUT = plain.KINDS | {FunctionType, BuiltinFunctionType, ModuleType}
# The types of most of what modules have: to look at each of a hundred modules' before each cell takes time.


def _equal(value: Any, before: Any) -> bool:
    return plain.same(value, before) or (type(value) is type(before) and bool(value == before))


@final
class Signs:
    """Tells in some µs whether a variable was set since."""

    def __init__(self) -> None:
        self.changed: Variables = {}
        # What was set by now, since the modules' import: one look at them all is for both.
        self._modules = sources.users()
        self._held: list[tuple[Mapping[str, Any], int, list[str], list[Any]]] = []
        for name, module in self._modules.items():
            if name not in _imported or _imported[name][0] is not module:
                _note(name, module)
            self._look(name, module)
        if sum(len(names) for _, _, names, _ in self._held) > WATCHED:
            self._held.clear()

    def _look(self, name: str, module: ModuleType) -> None:
        before, known = _imported[name][1], _set.setdefault(name, set())
        now: dict[_Path, Any] = {}
        for path, held in _owners(module):
            its = before.get(path)
            # Of a module in which something was set, copies of what is there now: 1.0 is equal to 1.
            values = _plain_in(held, its if its and not known else {})
            self._held.append((held, len(held), list(values), list(values.values())))
            if its is not None:
                now |= {(*path, variable): value for variable, value in values.items()}
                others = [v for v, value in values.items() if v not in its or not _equal(value, its[v])]
                known |= {(*path, variable) for variable in others}
        if known:
            self.changed[name] = {path: now[path] for path in known if path in now}

    def since(self) -> Variables:
        """Return what was set since, also in modules that were imported since."""
        if self.hold() and self._modules == sources.users():
            return {}
        found = {}
        for name, now in Signs().changed.items():
            known = self.changed.get(name, {})
            found[name] = {p: value for p, value in now.items() if p not in known or not _equal(value, known[p])}
        return found

    def hold(self) -> bool:
        """Whether none was."""
        for held, count, names, values in self._held:
            if len(held) != count or not all(map(plain.same, map(held.get, names), values)):
                return False
        return True
