"""The floors of the house: a module imports only from its own floor or a lower one, and never in a circle."""

from __future__ import annotations

import ast
import functools
import graphlib
from pathlib import Path

import pytest

import mirror_nb

PACKAGE = Path(mirror_nb.__file__).parent
FLOORS = (
    {"errors"},
    {"devices", "machine", "telemetry", "readable"},
    {"plain", "tensors", "values", "variables", "aggregation", "held_variables", "distributed"},
    {"environment", "event_files", "transfer", "messages", "channel", "noticing", "mirroring", "fused"},
    {"pool", "replica", "gradients", "data", "collectives", "steps"},
    {"strategies"},
    {"training", "bench", "advice", "losses", "callbacks"},
    {"notebook"},
    # Programs of their own, which use all the rest.
    {"demo", "watch"},
    {"__init__", "__main__"},
)
FLOOR = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
NOTEBOOK_ONLY = {"IPython", "ipywidgets", "matplotlib"}
MODULES = sorted(PACKAGE.rglob("*.py"), key=str)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
def imported(path: Path) -> set[str]:
    """Every module that the file imports, in functions too; from the package itself, what is imported."""
    names: set[str] = set()
    package = ("mirror_nb", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "mirror_nb" else {module}
    return names


def ours(path: Path) -> set[str]:
    split = [name.split(".") for name in imported(path)]
    return {name[1] if len(name) > 1 else "__init__" for name in split if name[0] == "mirror_nb"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_own_floor_or_below(path):
    floor = FLOOR[part_of(path)]
    assert {part for part in ours(path) if FLOOR[part] > floor} == set()
    libraries = {name.split(".")[0] for name in imported(path)}
    if floor < FLOOR["notebook"] and path != PACKAGE / "replica" / "shell.py":
        assert libraries & NOTEBOOK_ONLY == set()
    if part_of(path) in ("machine", "telemetry"):
        assert "torch" not in libraries


def test_parts_on_one_floor_do_not_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        graph.setdefault(part_of(path), set()).update(ours(path) - {part_of(path)})
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_modules_do_not_load_each_other_in_a_circle():
    named = {".".join(("mirror_nb", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in MODULES}
    graph: dict[str, set[str]] = {}
    for name, path in named.items():
        # Under an `if` are imports for types alone.
        froms = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        modules = {f"{node.module}.{alias.name}": str(node.module) for node in froms for alias in node.names}
        graph[name] = {whole if whole in named else module for whole, module in modules.items()} & named.keys()
    assert sum(map(len, graph.values())) > len(named)
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_pool_and_replica_know_only_their_messages():
    # The pool names the worker's module to the process that it starts. Its in-process twin starts none.
    others = [path for path in MODULES if path != PACKAGE / "pool" / "in_process.py"]
    assert [path.name for path in others if part_of(path) == "pool" and "replica" in ours(path)] == []
    assert [path.name for path in others if part_of(path) == "replica" and "pool" in ours(path)] == []


def test_the_check_sees_an_import_inside_a_function(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / "devices.py"
    inside = ("from mirror_nb import data", "from .pool.local import Pool", "import IPython.display")
    path.write_text("def f():\n" + "".join(f"    {line}\n" for line in inside))
    assert ours(path) == {"data", "pool"}
    assert "IPython.display" in imported(path)
