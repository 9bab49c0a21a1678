"""The dashboard in Notebook 7: live while a cell trains, stopped by its button, a picture afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browser.lab import Lab, Notebook
from browser.test_dashboard import BEGIN, picture, reaction, training

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Lab]:
    pytest.importorskip("notebook", minversion="7", reason="Notebook 7 is not installed")
    with Lab(tmp_path / "notebook", "notebook") as running:
        yield running


@pytest.mark.alone
def test_a_cell_is_watched_and_stopped(server: Lab, browser: BrowserContext, tmp_path: Path) -> None:
    page = browser.new_page()
    name = server.write([BEGIN, "%%mirrored --dashboard" + training(tmp_path / "gate")])
    opened = Notebook(page, server, name)
    opened.run(0)
    opened.start(1)
    opened.output(1).locator(".pill.running").wait_for()
    assert reaction(opened, "Stop", "stopping") < 0.5
    opened.wait()
    assert "stopped on 2 replicas" in picture(opened).lower()
    page.close()
