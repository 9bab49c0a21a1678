"""The user's own modules: what one process loads anew, the others do."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from mirror_nb.environment import sources
from mirror_nb.replica.shell import _load_in_place

TEXT = "VALUE = {0}\ndef told(): return {0}\nclass Kind:\n    def told(self): return {0}\n" + "#" * 10


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Write the module; how often earlier tests have loaded it anew is forgotten."""
    monkeypatch.setattr(sources, "_reloads", {})

    def written(value: int) -> None:
        # Of another length: Python looks at that and at whole seconds.
        (tmp_path / "mirror_nb_edited.py").write_text(TEXT.format(value) + "#" * value)

    return written


@pytest.fixture
def module(write: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    write(1)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("mirror_nb_edited")
    del sys.modules["mirror_nb_edited"]
    sources.changed()


def test_a_module_that_is_loaded_anew_is_told_each_time(module, write):
    assert module.__name__ not in sources.changed()
    for number in (1, 2):
        importlib.reload(module)
        assert sources.changed()[module.__name__] == ("reloaded", number)
    assert sources.changed()[module.__name__] == ("reloaded", 2)


@pytest.fixture
def autoreload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "in_place", _load_in_place)


@pytest.mark.usefixtures("autoreload")
@pytest.mark.parametrize(("how", "in_place"), [("reloaded", False), ("edited", True)])
def test_it_is_loaded_anew_here_once_for_each_number(module, write, how, in_place):
    sources.note()
    told, kind, made = module.told, module.Kind, module.Kind()
    write(2)
    sources.load_anew({module.__name__: (how, 7), "mirror_nb_not_here": (how, 7)})
    assert (module.VALUE, module.told(), module.Kind().told()) == (2, 2, 2)
    assert (told(), made.told(), kind().told()) == ((2, 2, 2) if in_place else (1, 1, 1))
    write(33)
    sources.load_anew({module.__name__: (how, 7)})
    assert module.VALUE == 2
    sources.load_anew({module.__name__: (how, 8)})
    assert module.VALUE == 33


def test_what_was_imported_after_the_edit_is_not_loaded_twice(module, write, tmp_path):
    sources.note()
    module.VALUE = "kept"
    written = (tmp_path / "mirror_nb_edited.py").stat().st_mtime_ns
    sources.load_anew({module.__name__: ("edited", written)})
    assert module.VALUE == "kept"


@pytest.mark.usefixtures("autoreload")
@pytest.mark.parametrize("how", ["reloaded", "edited"])
def test_a_text_that_cannot_be_loaded_leaves_the_old_one_and_is_told(module, tmp_path, how):
    sources.note()
    (tmp_path / "mirror_nb_edited.py").write_text("VALUE = = 3")
    with pytest.warns(UserWarning, match="could not load `mirror_nb_edited` anew: SyntaxError"):
        sources.load_anew({module.__name__: (how, 9)})
    assert module.told() == 1


def test_only_the_users_own_modules_are_looked_at(module):
    assert sources.is_users(module.__name__)
    assert sources.is_users("__main__")
    assert not any(map(sources.is_users, ("torch", "json", "sys", "mirror_nb_not_here")))


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the modules that are looked at from here on."""
    sources.users()
    names: list[str] = []
    is_users = sources.is_users
    monkeypatch.setattr(sources, "is_users", lambda name: names.append(name) or is_users(name))
    return names


def test_of_modules_that_were_looked_at_only_those_that_came_since_are(module, looked_at, monkeypatch):
    monkeypatch.setitem(sys.modules, "mirror_nb_later", ModuleType("mirror_nb_later"))
    assert module.__name__ in sources.users()
    assert "mirror_nb_later" in looked_at
    assert "torch" not in looked_at
    assert sources.users()[module.__name__] is module
    assert len(looked_at) == len(set(looked_at)), "nothing has come since"


def test_one_that_comes_as_another_goes_or_is_moved_to_the_end_is_found(module, looked_at, monkeypatch):
    first, last = (ModuleType(name) for name in ("mirror_nb_first", "mirror_nb_last"))
    for one in (first, last):
        one.__file__ = module.__file__
        monkeypatch.setitem(sys.modules, one.__name__, one)
    assert sources.users()["mirror_nb_last"] is last
    # As Python does once it has imported what imports others.
    monkeypatch.setitem(sys.modules, "mirror_nb_between", first)
    monkeypatch.delitem(sys.modules, "mirror_nb_last")
    monkeypatch.setitem(sys.modules, "mirror_nb_last", last)
    assert sources.users()["mirror_nb_between"] is first
    monkeypatch.delitem(sys.modules, "mirror_nb_first")
    monkeypatch.setitem(sys.modules, "mirror_nb_latest", first)
    found = sources.users()
    assert "mirror_nb_first" not in found
    assert found["mirror_nb_latest"] is first


def tell_of_later_ones(end: Any) -> None:
    end.send(sources._later(sources._known))


@pytest.mark.skipif(sys.platform != "linux", reason="needs the forkserver")
def test_what_the_forkserver_has_loaded_is_not_looked_at_in_each_replica(forkserver):
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=tell_of_later_ones, args=(theirs,))
    process.start()
    assert mine.poll(60)
    later = mine.recv()
    process.join()
    assert later is not None
    assert not [name for name in later if name.startswith(("torch.", "mirror_nb."))]


class Refusing(ModuleType):
    def __getattribute__(self, name: str) -> object:
        raise ImportError(f"{name} asked for")


def test_modules_that_have_a_say_of_their_own_are_not_asked(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "mirror_nb_refusing", Refusing("mirror_nb_refusing"))
    monkeypatch.setitem(sys.modules, "mirror_nb_slotted", object())
    sources.note()
    assert "mirror_nb_refusing" not in sources.changed()
    assert not sources.is_users("mirror_nb_refusing")
    assert sources.is_users(module.__name__)


BEGIN = """
import mirror_nb_edited as edited, mirror_nb as mnb
from mirror_nb_edited import told, Kind
made, strategy = Kind(), mnb.MirroredStrategy(["cpu:0", "cpu:1"])
def all_of_it(): return edited.VALUE, told(), edited.told()
"""
LOOKS = (
    "%%mirrored\nprint(edited.VALUE, told(), edited.told(), made.told(), flush=True)",
    "print(*strategy.run(all_of_it))",
)


@pytest.fixture
def run(
    write: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], list[str]]]:
    """Run a cell of a new notebook with two replicas, where the module lies; return its lines of numbers."""
    write(1)
    monkeypatch.syspath_prepend(tmp_path)
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))

    def printed(cell: str) -> list[str]:
        with capture_output() as shown:
            shell.run_cell(cell).raise_error()
        return [line for line in shown.stdout.splitlines() if line.replace(" ", "").isdigit()]

    printed("%load_ext mirror_nb\n%mirror start --devices cpu:0,cpu:1")
    yield printed
    if "strategy" in shell.user_ns:
        shell.user_ns["strategy"].close()
    shell.extension_manager.unload_extension("mirror_nb")
    InteractiveShell.clear_instance()
    sys.modules.pop("mirror_nb_edited", None)
    sources.changed()


@pytest.mark.parametrize(
    ("first", "then", "after"),
    [
        ("%load_ext autoreload\n%autoreload 2", "", ["2 2 2 2", "2 2 2"]),
        ("", "import importlib; importlib.reload(edited)", ["2 1 2 1"]),
        ("", "", ["1 1 1 1", "1 1 1"]),
    ],
    ids=["autoreload", "reload", "edited alone"],
)
def test_an_edited_module_is_the_same_in_cells_and_with_run(write, run, first, then, after):
    run(first)
    run(BEGIN)
    assert [line for look in LOOKS for line in run(look)] == ["1 1 1 1", "1 1 1"]
    write(2)
    run(then)
    assert [line for look in LOOKS for line in run(look)][: len(after)] == after


@pytest.fixture
def package(tmp_path: Path) -> Iterator[None]:
    """A package that imports none of its modules itself."""
    for n, folder in enumerate(["mirror_nb_outer", "mirror_nb_outer/inner"]):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(f"VALUE = {n}\n")
    for n in range(4):
        (tmp_path / f"mirror_nb_outer/inner/part{n}.py").write_text(f"VALUE = {n + 2}\n")
    yield
    for name in [name for name in sys.modules if name.startswith("mirror_nb_outer")]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_a_module_of_a_package_that_one_side_imports_is_there_on_the_other(run):
    assert run("%%mirrored\nimport mirror_nb_outer\nprint(mirror_nb_outer.VALUE, flush=True)") == ["0"]
    run("import mirror_nb_outer.inner.part0")
    assert run("%%mirrored\nprint(mirror_nb_outer.inner.part0.VALUE, flush=True)") == ["2"]
    run("import mirror_nb_outer.inner.part1")
    assert run("%%mirrored\ndef get(): return mirror_nb_outer.inner.part1.VALUE\nprint(get(), flush=True)") == ["3"]
    run("%%mirrored\nif True: import mirror_nb_outer.inner.part2")
    assert run("print(mirror_nb_outer.inner.part2.VALUE)") == ["4"]


def test_what_a_cell_sets_in_a_class_of_a_module_is_here_too(run, tmp_path):
    (tmp_path / "mirror_nb_set.py").write_text("class CFG:\n    lr, layers = 1, [1]\n")
    run("from mirror_nb_set import CFG")
    run("%%mirrored\nCFG.lr = 2; CFG.layers.append(2)")
    assert run("print(CFG.lr, *CFG.layers)") == ["2 1 2"]
    run("CFG.lr = 3")
    assert run("%%mirrored\nprint(CFG.lr, *CFG.layers, flush=True)") == ["3 1 2"]
    run("%%mirrored\nCFG.lr = 4 + replica_id")
    assert run("print(CFG.lr)") == ["3"]
    del sys.modules["mirror_nb_set"]


@pytest.mark.usefixtures("package")
def test_what_a_function_of_run_lacks_of_a_package_may_be_imported_after_it_has_failed(run):
    run("import mirror_nb_outer, mirror_nb as mnb\nstrategy = mnb.MirroredStrategy(['cpu:0', 'cpu:1'])")
    run("def get(): return mirror_nb_outer.inner.part3.VALUE")
    with pytest.raises(AttributeError, match="inner"):
        run("strategy.run(get)")
    run("import mirror_nb_outer.inner.part3")
    assert run("print(strategy.run(get))") == ["5"]
