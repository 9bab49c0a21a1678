"""One JupyterLab and one Chromium for the tests of this folder; each test opens notebooks of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from browser.lab import LAB, Lab, Notebook, chromium

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, ViewportSize

VIEWPORT: ViewportSize = {"width": 1000, "height": 900}
# Pixels.
TIDY = """
import ipywidgets
from unittest.mock import patch
import mirror_nb.notebook.session
# The next test's replicas come from the same forkserver.
with patch.object(mirror_nb.notebook.session, "stop_forkserver"):
    get_ipython().run_line_magic("unload_ext", "mirror_nb")
ipywidgets.Widget.close_all()
get_ipython().run_line_magic("reset", "-f")
"""


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as server:
        yield server


# Not for the session: Playwright's event loop would go on in the main thread, in the way of other tests' own.
@pytest.fixture(scope="package")
def browser() -> Iterator[BrowserContext]:
    with chromium() as running:
        # One for all: it keeps JupyterLab's scripts, so that only the first page waits for them.
        context = running.new_context(viewport=VIEWPORT)
        yield context
        context.close()


@pytest.fixture
def open_notebook(lab: Lab, browser: BrowserContext) -> Iterator[Callable[..., Notebook]]:
    """Open a notebook of the server, alone in its page: in JupyterLab, or in another program.

    Tests share JupyterLab's page and the kernel: each finds the kernel without replicas, widgets and names.
    """
    last: list[Notebook] = []

    def opened(name: str, program: str = LAB) -> Notebook:
        page = browser.pages[0] if browser.pages and program == LAB else browser.new_page()
        page.set_viewport_size(VIEWPORT)
        last[:] = [Notebook(page, lab, name, program)]
        return last[0]

    yield opened
    if not (last and not last[0].page.is_closed() and last[0].execute(TIDY)):
        lab.end_kernels()
    if last and not lab.serves(last[0].page.url):
        last[0].page.close()


@pytest.fixture
def notebook(lab: Lab, open_notebook: Callable[[str], Notebook]) -> Callable[..., Notebook]:
    """Open a new notebook whose first cell, number 0, starts two CPU replicas, and run that cell."""

    def opened(*cells: str) -> Notebook:
        new = open_notebook(lab.write(["%load_ext mirror_nb\n%mirror start --devices cpu:0,cpu:1", *cells]))
        new.run(0)
        assert "2 replicas (cpu:0, cpu:1) ready" in new.shown(0)
        return new

    return opened
