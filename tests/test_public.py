"""The public names: the README lists them all, each says what it is, and to import them does nothing."""

from __future__ import annotations

import inspect
import json
import operator
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mirror_nb as mnb

README = (Path(__file__).parent.parent / "README.md").read_text()
CLASSES = sorted(name for name in mnb.__all__ if inspect.isclass(getattr(mnb, name)))

IMPORT = """
import json, sys, threading
import psutil, torch

native = psutil.Process().num_threads()
import mirror_nb

print(json.dumps({
    "threads": [thread.name for thread in threading.enumerate()],
    "native": psutil.Process().num_threads() - native,
    "children": len(psutil.Process().children()),
    "jupyter": sorted({"IPython", "ipywidgets", "ipykernel", "matplotlib"} & set(sys.modules)),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def section(title: str) -> str:
    """Return the text under a heading of the README, up to the next one."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    assert found is not None, f"the README has no section {title!r}"
    return found[1]


def run_python(source: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(mnb.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120, cwd=cwd, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_readme_lists_every_public_name_once():
    cells = re.findall(r"^\| (`.*?) \|", section("Names"), re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == dir(mnb) == sorted(mnb.__all__)


def test_the_example_of_the_readme_runs_as_it_stands():
    example = re.search(r"```python\n(.*?)```", section("From plain Python"), re.DOTALL)
    assert example is not None
    lines = run_python(example[1] + "\nprint(torch.allclose(model.weight, torch.ones(4), atol=0.01))\n").splitlines()
    assert lines[:5] == ["2", "MirroredVariable:{", "  0: tensor(0.),", "  1: tensor(0.)", "}"]
    assert lines[5:9] == ["MirroredVariable:{", "  0: tensor(48.),", "  1: tensor(48.)", "}"]
    assert lines[-1] == "True"


def test_the_example_of_compile_and_fit_runs_as_it_stands(tmp_path):
    example = re.search(r"```python\n(.*?)```", section("compile and fit"), re.DOTALL)
    assert example is not None
    lines = run_python(example[1] + "\nprint(accuracy > 0.7, outputs.shape)\n", cwd=tmp_path).splitlines()
    assert lines[0].startswith("epoch  1/10  loss ")
    assert lines[-1] == "True torch.Size([1000, 2])"


def own_members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that mirror_nb itself defines, with those it inherits."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "mirror_nb":
            for name, member in vars(base).items():
                function = getattr(member, "__func__", member)
                if not name.startswith("_") and (inspect.isfunction(function) or isinstance(member, property)):
                    yield f"{base.__name__}.{name}", member


def says_what_it_is(thing: Any) -> bool:
    # A dataclass without a docstring is given its signature for one.
    doc = thing.__doc__ or ""
    return bool(doc.strip()) and not doc.startswith(f"{getattr(thing, '__name__', '')}(")


@pytest.mark.parametrize("name", ["make_dashboards", "make_pictures"])
def test_the_programs_that_make_the_readmes_pictures_can_start(name, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(Path(__file__).parent.parent / "docs" / f"{name}.py"))


def test_every_public_class_and_function_has_a_docstring():
    public = {name: getattr(mnb, name) for name in mnb.__all__ if name != "__version__"}
    assert [name for name, thing in public.items() if not says_what_it_is(thing)] == []


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_has_a_docstring(name):
    assert [path for path, member in own_members(getattr(mnb, name)) if not says_what_it_is(member)] == []


TF_NAMES = [
    (mnb.Strategy.run, "fn args kwargs options"),
    (mnb.Strategy.reduce, "reduce_op value axis"),
    (mnb.Strategy.gather, "value axis"),
    (mnb.Strategy.experimental_distribute_dataset, "dataset options"),
    (mnb.Strategy.distribute_datasets_from_function, "dataset_fn options"),
    (mnb.Strategy.experimental_distribute_values_from_function, "value_fn"),
    (mnb.Strategy.experimental_local_results, "value"),
    (mnb.ReplicaContext.all_reduce, "reduce_op value options"),
    (mnb.ReplicaContext.all_gather, "value axis options"),
    (mnb.ReplicaContext.merge_call, "merge_fn args kwargs"),
    (mnb.Variable.__new__, "initial_value trainable aggregation synchronization dtype name"),
    (mnb.Variable.assign, "value use_locking name read_value"),
    (mnb.Variable.assign_add, "delta use_locking name read_value"),
    (mnb.Variable.assign_sub, "delta use_locking name read_value"),
]


@pytest.mark.parametrize(("method", "names"), TF_NAMES, ids=[method.__qualname__ for method, _ in TF_NAMES])
def test_arguments_have_the_names_that_tensorflow_gives_them(method, names):
    own = list(inspect.signature(method).parameters)[1:]
    assert own[: len(names.split())] == names.split()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("experimental_run_v2", r"strategy\.run\("),
        ("unwrap", "experimental_local_results"),
        ("experimental_make_numpy_dataset", r"strategy\.distribute_dataset\("),
        ("make_dataset_iterator", r"iter\(strategy"),
        ("extended.call_for_each_replica", r"strategy\.run\("),
        ("extended.read_var", r"variable\.read_value\(\)"),
    ],
)
def test_names_that_tensorflow_had_once_say_what_to_write(name, instead):
    with pytest.raises(AttributeError, match=f"has no `{name.rpartition('.')[2]}`: write .*{instead}"):
        operator.attrgetter(name)(mnb.get_strategy())
    for obj in (mnb.get_strategy(), mnb.get_strategy().extended):
        with pytest.raises(AttributeError, match="object has no attribute 'nothing'") as raised:
            _ = obj.nothing  # type: ignore[attr-defined]
        # By these, Python finds what may have been meant.
        assert (raised.value.name, raised.value.obj) == ("nothing", obj)


def test_type_checkers_take_its_types_from_an_installation_too():
    settings = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert settings["tool"]["setuptools"]["package-data"]["mirror_nb"] == ["py.typed"]
    assert (Path(mnb.__file__).parent / "py.typed").is_file()


def test_to_import_the_package_starts_nothing_and_needs_no_jupyter():
    found = json.loads(run_python(IMPORT))
    assert found == {"threads": ["MainThread"], "native": 0, "children": 0, "jupyter": [], "cuda": False}
