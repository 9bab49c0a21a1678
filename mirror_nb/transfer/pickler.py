"""cloudpickle's pickler as mirror_nb needs it: code keeps its file, classes of cells are the same on all replicas.

Knows no tensors and no slab.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import enum
import functools
import importlib
import io
import os
import random
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import cloudpickle
import numpy as np

from mirror_nb.environment import sources
from mirror_nb.environment.replaced import name_of
from mirror_nb.environment.reporting import warned_of
from mirror_nb.transfer import submodules
from mirror_nb.transfer.raised import reduce_raised

submodules.install()

OF_PROCESS: dict[str, Any] = {
    "random": random.random.__self__,  # type: ignore[attr-defined]
    "numpy.random": np.random.random.__self__,  # type: ignore[attr-defined]
    "os": os.environ,
}
# What these modules have, and what their functions draw from: each process has its own, and `from random import
# randint` or `from os import environ` means that.


_MODULES = {id(own): module for module, own in OF_PROCESS.items()}
# One look-up: it is asked of everything that is pickled.
_BOUND = (types.MethodType, types.BuiltinFunctionType)


def is_of_process(obj: object) -> bool:
    """Whether it is what each process has of its own, or a method of that."""
    return id(obj.__self__ if isinstance(obj, _BOUND) else obj) in _MODULES


class Limited(io.BytesIO):
    """A file that refuses to grow beyond a limit, so that a huge object is given up early."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.limit = limit

    def write(self, data: Any) -> int:
        if self.limit is not None and self.tell() + memoryview(data).nbytes > self.limit:
            raise TooLarge
        return super().write(data)


class TooLarge(Exception):
    """The object takes more than the limit given to `pack`."""


class Pickler(cloudpickle.Pickler):
    """cloudpickle's, but code keeps the file where it was written, for tracebacks; from 3.1.3 on it loses it.

    And a function that arrives anew with each call warns once all the same: what it has warned of is known there.
    A function in a function of a package reads the package's names there: a hook of transformers, what it collects.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._packages: dict[str, dict[str, Any]] = {}
        # Stand for the names of modules, by which cloudpickle knows them.

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.CodeType:
            return _code_at, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))
        if (module := _MODULES.get(id(obj))) is not None:
            return _of_process, (module,)
        bound = type(obj) in _BOUND and _MODULES.get(id(obj.__self__))
        if bound and getattr(sys.modules[bound], obj.__name__, None) == obj:
            return _member, (bound, obj.__name__)
        if (name := name_of(obj)) is not None:
            # What has that name where it arrives: it hears of seeds there.
            return _member, name
        if type(obj) is types.FunctionType and id(obj.__globals__) not in self.globals_ref:
            here = obj.__globals__
            anew = {name: here[name] for name in ("__package__", "__name__", "__path__", "__file__") if name in here}
            self.globals_ref[id(here)] = anew | {"__warningregistry__": _Warned(str(here.get("__name__")))}
        if type(obj) is types.FunctionType and obj.__code__ is _DISPATCHES and not travels_by_name(obj):
            # What it has found out, it keeps by weak references.
            kinds: dict[Any, Any] = dict(vars(obj)["registry"])
            return _dispatching, (kinds.pop(object), kinds)
        if type(obj) is types.FunctionType and (module := _package_of(obj)):
            names = self._packages.setdefault(module, {})
            self.globals_ref.setdefault(id(names), _NamesOf(module))
            return super().reducer_override(with_globals(obj, names))
        if is_nameless(obj):
            # Its functions read its names there, too, and not copies of them.
            self.globals_ref[id(vars(obj))] = _NamesIn(obj)
            names = {name: held for name, held in vars(obj).items() if name != "__builtins__"}
            return types.ModuleType, (obj.__name__,), names, None, None, _set_module
        if isinstance(obj, BaseException) and (made := reduce_raised(obj)) is not None:
            return made
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
            # By its name, as it wants to, it would be looked for in another __main__. What it remembers stays here.
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if type(obj) is functools.cached_property:
            # Python 3.11's has a lock.
            return _cached_property, (obj.func, obj.attrname)
        if isinstance(obj, type) and _is_by_name_alone(obj):
            # torch's SDPBackend, say, written in C: pickle looks for the qualified name, and does not find it.
            return _member, (obj.__module__, obj.__name__)
        reduced = super().reducer_override(obj)
        if (
            isinstance(obj, type)
            and not issubclass(obj, enum.Enum)
            and isinstance(reduced, tuple)
            and len(reduced) == 6
        ):
            # By value. To a class that is there already cloudpickle only adds.
            make, args, state, *_, put = reduced
            arguments = make, *_with_slots(obj, args)
            return _made_again, arguments, (put, _own_members(obj, state)), None, None, _set_class
        if reduced is NotImplemented and (name := self._mark(obj)) is not None:
            return _member, name
        return reduced

    def _mark(self, obj: object) -> tuple[str, str] | None:
        """Return the module and the name there of what has nothing to it but who it is; None for others.

        `_MISSING = object()`, say, or dataclasses.MISSING: a copy is another one to whoever asks for it.
        """
        kind = type(obj)
        if kind is object:
            return self._bare.get(id(obj))
        if getattr(obj, "__dict__", True) or kind.__reduce_ex__ is not object.__reduce_ex__:
            return None
        # A function is Python's kind, and found by its own name: IPython has its `display` among the builtins.
        others = kind.__module__ not in ("__main__", "builtins")
        own = getattr(sys.modules.get(kind.__module__), "__dict__", {}) if others else {}
        found = next((name for name, value in tuple(own.items()) if value is obj), None)
        if found is None or any(part is not None for part in obj.__reduce_ex__(2)[2:]):
            return None
        return kind.__module__, found

    @functools.cached_property
    def _bare(self) -> dict[int, tuple[str, str]]:
        """Where modules have objects of no class of their own, by id."""
        # Not one that is loaded once something is asked of it, and none that others could not import.
        loaded = [(name, vars(it)) for name, it in tuple(sys.modules.items()) if type(it) is types.ModuleType]
        return {
            id(value): (module, name)
            for module, names in loaded
            if module != "__main__" and names.get("__spec__") is not None
            for name, value in tuple(names.items())
            if type(value) is object
        }


def _of_process(module: str) -> Any:
    return OF_PROCESS[module]


def _package_of(function: types.FunctionType) -> str:
    """Return the module of a package that a function without a name of its own is from; empty: of none."""
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) and not sources.is_users(name) else None
    nameless = "<" in function.__code__.co_qualname
    ours = nameless and isinstance(module, types.ModuleType) and vars(module) is function.__globals__
    return str(name) if ours and not travels_by_name(function) else ""


def _is_by_name_alone(kind: type) -> bool:
    """Whether a module of a package has a class by its name, and by its qualified name nothing."""
    module, name = kind.__module__, kind.__name__
    found = getattr(sys.modules.get(module), name, None) if name != kind.__qualname__ else None
    return found is kind and not sources.is_users(module) and not travels_by_name(kind)


def _member(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


class _NamesOf:
    """Stands for what a module's functions read."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return _names_of, (self._module,)


class _NamesIn:
    """Stands for what functions of a module read that nobody can import."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return vars, (self._module,)


def _set_module(module: types.ModuleType, names: dict[str, Any]) -> None:
    vars(module).update(names, __builtins__=builtins)


def is_nameless(value: object) -> TypeGuard[types.ModuleType]:
    """Whether it is a module that nobody can import: made by hand, or loaded from a file as a configuration."""
    return type(value) is types.ModuleType and vars(value).get("__name__") not in sys.modules


def _names_of(module: str) -> dict[str, Any]:
    return vars(importlib.import_module(module))


def with_globals(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """Return the same function with other globals: of empty ones none travel, and hide the receiver's."""
    twin = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    for name in (
        *("__module__", "__qualname__", "__doc__"),
        *("__kwdefaults__", "__annotations__", "__type_params__"),
    ):
        if hasattr(function, name):
            setattr(twin, name, getattr(function, name))
    twin.__dict__.update(function.__dict__)
    return twin


def _made_again(make: Callable[..., type], constructor: Any, name: str, bases: tuple[Any, ...], *rest: Any) -> type:
    """Make a class as `make` does, past what its metaclass and classes like it do with each new one.

    That was done where it was made, and came with them: here it would be done once more, before the names are there
    that it needs, and with a class that is let go of where there is one already.
    """
    with contextlib.ExitStack() as stack:

        def leave_out(kind: type, name: str, instead: Any) -> None:
            own = vars(kind).get(name)
            if own is not None and not travels_by_name(kind):
                # Past what their own class may say to that.
                stack.callback(type.__setattr__, kind, name, own)
                type.__setattr__(kind, name, instead)

        for kind in {kind: None for base in bases if isinstance(base, type) for kind in base.__mro__}:
            leave_out(kind, "__init_subclass__", classmethod(_leave))
        for kind in constructor.__mro__ if isinstance(constructor, type) else ():
            leave_out(kind, "__new__", staticmethod(functools.partial(_new_past, kind)))
            leave_out(kind, "__init__", _leave)
        return make(constructor, name, bases, *rest)


def _leave(kind: type, /, *_: object, **__: object) -> None:
    """Do nothing with a new class."""


def _new_past(past: Any, /, kind: Any, *args: Any, **_: object) -> Any:
    """Make a class as the metaclass after this one does."""
    return super(past, kind).__new__(kind, *args)


def _with_slots(kind: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let a class be made with its slots: cloudpickle's newer ones give it that name alone, and a `__dict__`.

    What an object of one holds cannot be put into one of the other.
    """
    make, name, bases, own, *rest = args
    # A NamedTuple has slots of Python's, which refuses to be given any.
    if "__slots__" not in vars(kind) or NamedTuple in bases:
        return args
    return make, name, bases, {**own, "__slots__": vars(kind)["__slots__"]}, *rest


def _own_members(kind: type, state: Any) -> Any:
    """Add what cloudpickle takes for a base's, since that has the same: `total = 0` in both.

    And leave out what Python makes of slots: of `__private` ones cloudpickle does not know the name.
    """
    held, *rest = state
    # In their order, and with names of its own, as cloudpickle takes the others: pickles of replicas are compared.
    more = sorted(name for name in vars(kind).keys() - held.keys() if not name.startswith(PYTHONS))
    ours = {**held, **{"".join(name): vars(kind)[name] for name in more}}
    # The class is made with it; here it stands only where it is another string than the base's.
    ours.pop("__module__", None)
    if "__slots__" not in vars(kind):
        return (ours, *rest)
    ours = {name: value for name, value in ours.items() if type(value) is not types.MemberDescriptorType}
    if NamedTuple in vars(kind).get("__orig_bases__", ()):
        # Of one that is Generic, typing makes it too; it cannot be pickled.
        ours.pop("__class_getitem__", None)
    return (ours, *rest)


def _set_class(kind: type, state: tuple[Callable[[type, Any], object], Any]) -> None:
    put, held = state
    put(kind, held)
    own = held[0] if isinstance(held, tuple) else held
    # Of the rest some are Python's and the class's bases'.
    for name in [name for name in vars(kind) if name not in own and not name.startswith("_")]:
        if not isinstance(vars(kind)[name], types.MemberDescriptorType):
            delattr(kind, name)


PYTHONS = ("__", "_abc_")
# How names of a class begin that are Python's: what pickle remembers of it, say.
_DISPATCHES = vars(types.FunctionType)["__code__"].__get__(functools.singledispatch(len))


def _dispatching(function: Any, others: dict[type, Any]) -> Any:
    made = functools.singledispatch(function)
    for kind, other in others.items():
        made.register(kind, other)
    return made


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Any, name: str | None) -> Any:
    made = functools.cached_property(function)
    made.attrname = name
    return made


class _Warned:
    """Stands for what functions of a module have warned of, where they arrive."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return warned_of, (self._module,)


def _code_at(file: str, make: Callable[..., types.CodeType], parts: tuple[Any, ...]) -> types.CodeType:
    return make(*parts).replace(co_filename=file)


def dumps(obj: object) -> bytes:
    """Pickle an object as cloudpickle's function of that name does."""
    file = io.BytesIO()
    Pickler(file, protocol=5).dump(obj)
    return file.getvalue()


def travels_by_name(obj: type | types.FunctionType) -> bool:
    """Whether a class or a function travels by its name: it is that of a module which is no notebook and no script."""
    found: Any = sys.modules.get(obj.__module__) if obj.__module__ != "__main__" else None
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def module_by_name(module: types.ModuleType) -> tuple[Any, ...] | None:
    """Return how to import a module that is of a class of its own, `torch.ops` for instance; None: it has no name.

    cloudpickle takes it along with `torch` wherever code says `.ops`, as in `keras.ops`, and cannot pickle it.
    """
    name = module.__name__
    return (importlib.import_module, (name,)) if sys.modules.get(name) is module else None


_GLOBAL_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


def global_names(code: types.CodeType, instructions: frozenset[str] = _GLOBAL_READS) -> set[str]:
    """Return every name that `code`, or a function inside it, may look up in its globals, or of other instructions."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in instructions}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant, instructions)
    return names


def label_class(kind: type, label: str) -> None:
    """Let a class that no module has by its name be the same one wherever it comes from, if `label` is that as well.

    cloudpickle knows such a class, a cell's or one that a function makes, by an id that each process draws for itself:
    it would arrive as one class from each replica, and objects of it would never be equal.
    """
    known = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", None)
    by_id = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", None)
    if known is None or by_id is None or kind in known or travels_by_name(kind):
        return
    name = f"mirror_nb {label} {kind.__module__}.{kind.__qualname__}"
    while name in by_id:
        name += "'"
    known[kind], by_id[name] = name, kind
