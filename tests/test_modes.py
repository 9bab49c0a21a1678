"""Torch's modes of a thread in mirrored cells: what the notebook has set holds there, and the other way round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from driving import running

LOOK = "found = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled('cpu')"


@pytest.fixture
def run(shell) -> Iterator[Callable[[str], Any]]:
    made = running(shell)
    made("import torch")
    yield made
    torch.set_grad_enabled(True)


def test_gradients_that_the_notebook_has_switched_off_are_off_in_mirrored_cells(run):
    run("torch.set_grad_enabled(False)")
    run(f"%%mirrored --quiet\n{LOOK}")
    assert run("found") == (False, False, False)
    run("torch.set_grad_enabled(True)")
    run(f"%%mirrored --quiet\n{LOOK}")
    assert run("found") == (True, False, False)


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        ("torch.no_grad()", (False, False, False)),
        ("torch.inference_mode()", (False, True, False)),
        ("torch.autocast('cpu', dtype=torch.bfloat16)", (True, False, True)),
    ],
)
def test_a_mode_around_a_mirrored_cell_holds_in_it_and_ends_with_the_block(run, mode, found):
    run(f"with {mode}: get_ipython().run_cell_magic('mirrored', '--quiet', {LOOK!r} + '; y = torch.ones(99_999)')")
    assert run("found") == found
    run(f"%%mirrored --quiet\n{LOOK}; z = y + 1")
    assert run("found") == (True, False, False)


def test_what_a_mirrored_cell_sets_is_set_in_the_notebook_and_in_the_next_one(run):
    run("%%mirrored --quiet\ntorch.set_grad_enabled(False)")
    assert run("torch.is_grad_enabled()") is False
    run(f"%%mirrored --quiet\n{LOOK}\ntorch.set_grad_enabled(True)")
    assert run("found[0], torch.is_grad_enabled()") == (False, True)
    block = "with torch.no_grad(): get_ipython().run_cell_magic('mirrored', '--quiet', 'torch.set_grad_enabled(True)')"
    run(block)
    assert run("torch.is_grad_enabled()") is True
