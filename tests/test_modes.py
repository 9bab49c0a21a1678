"""Torch's modes of a thread in mirrored cells: what the notebook has set holds there, and the other way round."""

from __future__ import annotations

import os
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


def test_a_folder_variables_and_torchs_settings_of_a_mirrored_cell_are_the_notebooks_too(run, tmp_path, monkeypatch):
    monkeypatch.chdir(os.getcwd())
    monkeypatch.setenv("MIRROR_NB_SET", "1")
    monkeypatch.setenv("MIRROR_NB_GONE", "1")
    before = dict(os.environ)
    run(
        "%%mirrored --quiet\n"
        f"import os; os.chdir({str(tmp_path)!r}); torch.set_default_dtype(torch.float64)\n"
        "os.environ['MIRROR_NB_SET'] = '2'; del os.environ['MIRROR_NB_GONE']\n"
        "os.environ.update({'RANK': '5', 'BY_A_' + 'LIBRARY': '3'})"
    )
    try:
        assert (os.getcwd(), torch.get_default_dtype()) == (str(tmp_path), torch.float64)
        assert before.pop("MIRROR_NB_GONE") == "1"
        assert os.environ == before | {"MIRROR_NB_SET": "2"}
        run("%%mirrored --quiet\nfound = os.getcwd(), torch.ones(1).dtype, os.environ['MIRROR_NB_SET']")
        assert run("found") == (str(tmp_path), torch.float64, "2")
        run("torch.set_default_dtype(torch.float32)")
        run("%%mirrored --quiet\nfound = torch.ones(1).dtype")
        assert run("found") is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", ["", "--replicas 0"])
def test_what_one_replica_alone_has_set_the_notebook_has_not(run, options, monkeypatch):
    monkeypatch.setenv("MIRROR_NB_SET", "1")
    run(f"%%mirrored --quiet {options}\nimport os; os.environ['MIRROR_NB_SET'] = f'of {{replica_id}}'")
    assert os.environ["MIRROR_NB_SET"] == "1"


def test_a_variable_of_a_module_that_a_mirrored_cell_sets_is_set_in_the_notebook(run, tmp_path, monkeypatch):
    (tmp_path / "settings_here.py").write_text("rate = 0.1\nsizes = [1]\nof_each = 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run("import settings_here; sizes_of_here = settings_here.sizes")
    for rate in (0.5, 0.7):
        run(
            "%%mirrored --quiet\nimport settings_here\n"
            f"settings_here.rate = {rate}; settings_here.sizes.append(2); settings_here.of_each += 1"
        )
        assert run("settings_here.rate") == rate
        run("settings_here.rate = 0.5")
    assert run("settings_here.of_each, settings_here.sizes, settings_here.sizes is sizes_of_here") == (
        2,
        [1, 2, 2],
        True,
    )
    run("%%mirrored --quiet\nsettings_here.of_each = replica_id; found = settings_here.rate")
    assert run("settings_here.of_each, found") == (2, 0.5)
