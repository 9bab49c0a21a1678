"""Which submodules code uses: a module travels by its name, and the other side may have imported less of a package.

Of every function cloudpickle asks, and goes through all of `sys.modules` for every module that the function refers to:
0.3 ms each where torch is loaded, which made 8 ms of a method of a class from the notebook. What is found by looking
names up is the same.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from cloudpickle import cloudpickle

_NAME = "_find_imported_submodules"
# Private: where cloudpickle has no such function, it stays as it is.


def find_imported_submodules(code: types.CodeType, dependencies: Iterable[Any]) -> list[types.ModuleType]:
    """Return the loaded submodules of `dependencies` whose names, part by part, are among those that `code` uses."""
    found: dict[str, types.ModuleType] = {}
    for module in dependencies:
        if isinstance(module, types.ModuleType) and getattr(module, "__package__", None):
            packages = [module.__name__]
            # A package is loaded before what is in it.
            for package in packages:
                for name in code.co_names:
                    path = f"{package}.{name}"
                    if path in sys.modules and path not in found:
                        found[path] = sys.modules[path]
                        packages.append(path)
    return list(found.values())


def reached(paths: Iterable[tuple[str, ...]], namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the submodules through which attribute paths lead from these names, as `a.b` is one in `a.b.c`."""
    found: dict[str, None] = {}
    for root, *attributes in paths:
        module = namespace.get(root)
        for attribute in attributes:
            # Nothing else is asked for a name: a dict with `__getattr__ = dict.__getitem__` raises KeyError.
            if type(module) is not types.ModuleType:
                break
            # Past the module's own __getattr__, which may import.
            inner = vars(module).get(attribute)
            name = f"{module.__name__}.{attribute}"
            if inner is None or sys.modules.get(name) is not inner:
                break
            found[name] = None
            module = inner
    return tuple(found)


def bring(names: Iterable[str]) -> None:
    """Import those of these modules that are not there yet. Raises what an import raises."""
    for name in names:
        if name not in sys.modules:
            importlib.import_module(name)


def install() -> None:
    """Have cloudpickle ask here."""
    if hasattr(cloudpickle, _NAME):
        setattr(cloudpickle, _NAME, find_imported_submodules)
