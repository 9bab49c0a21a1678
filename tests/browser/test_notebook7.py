"""The dashboard in Notebook 7: live while a cell trains, stopped by its button, a picture afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from browser.lab import NOTEBOOK_7, Lab, Notebook
from browser.test_dashboard import BEGIN, picture, reaction, training

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


@pytest.mark.alone
def test_a_cell_is_watched_and_stopped(lab: Lab, open_notebook: Callable[..., Notebook], tmp_path: Path) -> None:
    pytest.importorskip("notebook", minversion="7", reason="Notebook 7 is not installed")
    name = lab.write([BEGIN, "%%mirrored --dashboard" + training(tmp_path / "gate")])
    opened = open_notebook(name, NOTEBOOK_7)
    opened.run(0)
    opened.start(1)
    opened.output(1).locator(".pill.running").wait_for()
    assert reaction(opened, "Stop", "stopping") < 0.5
    opened.wait()
    assert "stopped on 2 replicas" in picture(opened).lower()
