"""One JupyterLab and one Chromium for the tests of this folder; each test opens notebooks of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from browser.lab import Lab, Notebook, chromium

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as server:
        yield server


# Not for the session: Playwright's event loop would go on in the main thread, in the way of other tests' own.
@pytest.fixture(scope="package")
def browser() -> Iterator[BrowserContext]:
    with chromium() as running:
        # One for all: it keeps JupyterLab's scripts, so that only the first page waits for them.
        context = running.new_context(viewport={"width": 1000, "height": 900})
        yield context
        context.close()


@pytest.fixture
def open_notebook(lab: Lab, browser: BrowserContext) -> Iterator[Callable[[str], Notebook]]:
    """Open a notebook of the server in a new page; page and kernel end with the test."""
    yield lambda name: Notebook(browser.new_page(), lab, name)
    for page in browser.pages:
        page.close()
    lab.end_kernels()


@pytest.fixture
def notebook(lab: Lab, open_notebook: Callable[[str], Notebook]) -> Callable[..., Notebook]:
    """Open a new notebook whose first cell, number 0, starts two CPU replicas, and run that cell."""

    def opened(*cells: str) -> Notebook:
        new = open_notebook(lab.write(["%load_ext mirror_nb\n%mirror start --devices cpu:0,cpu:1", *cells]))
        new.run(0)
        assert "2 replicas (cpu:0, cpu:1) ready" in new.shown(0)
        return new

    return opened
