"""To be called when somebody imports a library, without importing it oneself; and imports that are not cut off."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mirror_nb.environment.imported import uninterrupted, when_imported

CALLS: list[str] = []


def called() -> None:
    CALLS.append("called")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module that nobody has imported yet."""
    (tmp_path / "lonely_library.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("mirror_nb.environment.imported._asked", set())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    CALLS.clear()
    yield "lonely_library"
    sys.modules.pop("lonely_library", None)


def test_the_call_comes_once_after_the_import(library):
    when_imported(library, f"{__name__}:called")
    when_imported(library, f"{__name__}:called")
    assert library not in sys.modules
    assert CALLS == []
    module = importlib.import_module(library)
    assert module.VALUE == 3
    assert CALLS == ["called"]
    importlib.reload(module)
    assert CALLS == ["called"]


def test_what_is_imported_already_is_met_at_once(library):
    importlib.import_module(library)
    when_imported(library, f"{__name__}:called")
    assert CALLS == ["called"]


def test_a_library_that_is_not_there_is_still_not_there(library):
    when_imported("no_such_library", f"{__name__}:called")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_library")
    assert CALLS == []


def test_an_import_that_fails_may_be_tried_again(library, tmp_path):
    (tmp_path / "lonely_library.py").write_text("raise ValueError('today')\n")
    when_imported(library, f"{__name__}:called")
    with pytest.raises(ValueError, match="today"):
        importlib.import_module(library)
    assert CALLS == []
    (tmp_path / "lonely_library.py").write_text("VALUE = 4444\n")
    importlib.invalidate_caches()
    assert importlib.import_module(library).VALUE == 4444
    assert CALLS == ["called"]


def test_an_import_that_is_interrupted_ends_first(library, tmp_path):
    (tmp_path / "lonely_library.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nVALUE = 3\n")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        importlib.import_module(library)
    assert sys.modules[library].VALUE == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_imports_as_ever(library):
    def imported() -> int:
        with uninterrupted():
            value: int = importlib.import_module(library).VALUE
            return value

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(imported).result() == 3


@pytest.mark.parametrize("error", ["1 / 0", "raise ImportError('broken')"])
def test_an_import_that_fails_is_told_by_the_users_lines_alone(tmp_path, error):
    for file, text in {"outer": "import inner", "inner": error, "libraries": "1 / 0"}.items():
        (tmp_path / f"{file}.py").write_text(text + "\n")
    program = (
        "import traceback, mirror_nb\n"
        "from mirror_nb.environment.imported import when_imported\n"
        "when_imported('libraries', 'mirror_nb.environment.seeds:watch')\n"
        "for name in ('outer', 'libraries'):\n"
        "    try: __import__(name)\n"
        "    except Exception as error:\n"
        "        print(*(frame.filename for frame in traceback.extract_tb(error.__traceback__)), sep='\\n')\n"
    )
    out = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    files = ["<string>", f"{tmp_path}/outer.py", f"{tmp_path}/inner.py", "<string>", f"{tmp_path}/libraries.py"]
    assert out.stdout.splitlines() == files
