"""The tree of errors, and what IPython shows of one that mirror_nb raises in the notebook."""

from __future__ import annotations

import inspect
import re

import pytest
from driving import plain
from IPython.core.interactiveshell import InteractiveShell

from mirror_nb import errors

SOURCE = """
import mirror_nb as mnb
def mine():
    mnb.MirroredStrategy("cuda:99")
mine()
"""


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = dict(re.findall(r"[├└]── (\w+) (?:\((\w+)\))?", errors.__doc__))
    kinds = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
    assert set(drawn) == set(kinds) - {"MirrorError"}
    for name, also in drawn.items():
        assert not also or also in {base.__name__ for base in kinds[name].__mro__}, name


def test_ours_is_shown_up_to_the_callers_line(capsys):
    InteractiveShell.instance().run_cell(SOURCE)
    shown = plain(capsys.readouterr().out)
    assert re.search(r'--> \d +mnb\.MirroredStrategy\("cuda:99"\)', shown)
    assert "mine()" in shown
    assert shown.rstrip().splitlines()[-1].startswith("DeviceError: cuda:99 not found; visible here")
    assert "_place(" not in shown


def test_one_without_a_line_of_the_users_is_its_message():
    with pytest.raises(errors.UsageError) as caught:
        raise errors.UsageError("x is 3")
    error = caught.value.with_traceback(None)
    assert error._render_traceback_() == ["UsageError: x is 3"]
