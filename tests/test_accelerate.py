"""A stranger's distributed tests: accelerate's own, unchanged, run by `%run` in a cell, twice in one session."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from driving import run_cell

from mirror_nb.devices import Device
from mirror_nb.pool.local import LocalPool
from mirror_nb.strategies.mirrored import SETUP

pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
# What each script prints on replica 0 only when it got that far.
SCRIPTS = {
    "test_script": "**Breakpoint trigger test**",
    "test_sync": "optimizer and scheduler",
    "test_ops": "testing sending tensors across devices",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    # Of their own: the scripts leave accelerate's singletons and settings behind.
    with LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP) as pool:
        pool.start()
        settings = "import os; os.environ.update(ACCELERATE_USE_CPU='true', OMP_NUM_THREADS='1')"
        # Its numbers are drawn anew each time: now and then a gradient is too small for the bound it is compared by.
        drawn = "import numpy.random as r; make = r.default_rng; r.default_rng = lambda seed=None: make(seed or 7)"
        assert run_cell(pool, f"{settings}\n{drawn}").errors == {}
        yield pool


@pytest.mark.parametrize("turn", ["first", "second"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_accelerates_own_script_passes(pool, script, turn):
    import accelerate.test_utils

    path = Path(accelerate.test_utils.__file__).parent / "scripts" / f"{script}.py"
    pool.mend()
    ran = run_cell(pool, f"%run {path}", timeout=240)
    assert [f"{f.type_name}: {f.message}" for f in ran.report.failures.values()] == []
    assert ran.report.deaths == []
    assert SCRIPTS[script] in ran.text[0]
