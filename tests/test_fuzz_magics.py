"""Whatever is typed after `%mirror` and `%%mirrored`: an error with a message, never a crash, nothing half-done."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError as MagicUsageError
from IPython.core.interactiveshell import InteractiveShell

from mirror_nb.errors import MirrorError
from mirror_nb.notebook.magics import MirrorMagics
from mirror_nb.notebook.source import cell_names

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
KNOWN = [
    *("start", "stop", "status", "push", "pull", "restart", "--devices", "--seed", "--replica", "--replicas", "--out"),
    *(
        "--timeout",
        "--quiet",
        "--no-sync",
        "--in-process",
        "0",
        "-1",
        "0,2-3",
        "0-99999999999",
        "0-9999999999999999999",
    ),
    *("3-1", "nan", "inf", "1e400", "x", "'", '"', "cuda:0", "cpu:0,cpu:0", "cpu:-1"),
]
WORDS = st.one_of(st.sampled_from(KNOWN), st.text(max_size=12))
TOKENS = [
    *(
        "for",
        "x",
        "=",
        "1",
        "lambda",
        ":",
        "(",
        ")",
        "[",
        "]",
        "async",
        "def",
        "f",
        "import",
        "*",
        "match",
        "case",
        "_",
    ),
    *("{", "}", "del", "global", "\\", "'", '"""', "f'{", "\n", "    ", "\t", "\0", "\ud800"),
]
LINES = st.lists(WORDS, max_size=6).map(" ".join)


class Unstarted:
    """Stands where a session does, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[object, ...]]] = []
        self.dashboards_above_cells = False

    def __getattr__(self, name: str) -> object:
        def note(*args: object) -> str:
            self.asked.append((name, args))
            return name

        return note


@pytest.fixture(scope="module")
def magics() -> Iterator[MirrorMagics]:
    yield MirrorMagics(InteractiveShell())
    InteractiveShell.clear_instance()


@FUZZ
@given(line=LINES)
def test_any_line_after_mirror_is_understood_or_refused(magics, line):
    magics.session = asked = Unstarted()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            magics.mirror(line)
        except (MagicUsageError, MirrorError):
            assert asked.asked == []


@FUZZ
@given(line=LINES, cell=st.text(max_size=40))
def test_any_line_after_mirrored_is_understood_or_refused(magics, line, cell):
    magics.session = asked = Unstarted()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            magics.mirrored(line, cell)
        except (MagicUsageError, MirrorError):
            assert asked.asked == []
        else:
            ((name, (given_cell, options)),) = asked.asked
            assert (name, given_cell) == ("run_cell", cell)
            assert options.timeout is None or options.timeout > 0
            assert options.out is None or options.out.isidentifier()


@FUZZ
@given(source=st.one_of(st.text(max_size=200), st.lists(st.sampled_from(TOKENS), max_size=30).map(" ".join)))
def test_the_names_of_any_text_are_found_or_it_is_no_python(source):
    names = cell_names(source)
    assert all(isinstance(name, str) for name in [*names.read, *names.bound])
