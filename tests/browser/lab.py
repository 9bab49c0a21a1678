"""A JupyterLab server, a Chromium, and a notebook open in it. Knows nothing of mirror_nb.

Every wait has a deadline; what is started here is ended by the block that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import psutil
from driving import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

START_SECONDS = 90.0
CELL_SECONDS = 60.0
# Deadlines. Far more than anything takes on two busy cores.
_CHROMIUM = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Chromium asks its maker for these.
)
LAB, NOTEBOOK_7 = "doc/tree", "notebooks"
# Where the server's two programs open a notebook, alone in its page.
_SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    # All cells are in the page, those out of sight too.
    "notebook-extension/tracker": {"windowingMode": "none"},
}


class Lab:
    """A JupyterLab server on loopback, with Notebook 7 where that is installed; its every file lies in `folder`.

    Use it as a context manager.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.notebooks = folder / "notebooks"
        self._token = uuid.uuid4().hex
        self._server: subprocess.Popen[bytes] | None = None
        self._url = ""

    def __enter__(self) -> Lab:
        self.notebooks.mkdir(parents=True)
        for name, values in _SETTINGS.items():
            path = self._folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
        command += [f"--{program}.expose_app_in_browser=True" for program in ("LabApp", "JupyterNotebookApp")]
        command += [f"--ServerApp.root_dir={self.notebooks}"]
        with open(self._folder / "server.log", "wb") as log:
            self._server = subprocess.Popen(
                command, env=self._environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._url = eventually(self._address, "the server tells its address", START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _environment(self) -> dict[str, str]:
        # The interpreter of the tests comes first on the path: `python3` in a kernel's cell is this one.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
        own = {f"JUPYTER_{name}": str(self._folder / name.lower()) for name in names}
        own |= {f"JUPYTERLAB_{name}_DIR": str(self._folder / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
        own |= {"IPYTHONDIR": str(self._folder / "ipython"), "JUPYTER_TOKEN": self._token, "PATH": path}
        return os.environ | own

    def _address(self) -> str | None:
        assert self._server is not None
        if self._server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended: {(self._folder / 'server.log').read_text()[-3000:]}")
        for path in self._folder.glob("runtime_dir/jpserver-*.json"):
            self._url = json.loads(path.read_text() or "{}").get("url", "")
            if self._url and self.ask("GET", "api/status") is not None:
                return self._url
        return None

    def __exit__(self, *exception: object) -> None:
        assert self._server is not None
        if self._url:
            self.end_kernels()
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait(10)

    def ask(self, method: str, path: str, told: object = None) -> Any:
        """Send a request to the server's interface; return its answer, None where there is none yet."""
        headers = {"Authorization": f"token {self._token}"}
        body = None if told is None else json.dumps(told).encode()
        request = urllib.request.Request(f"{self._url}{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError:
            raise
        except (urllib.error.URLError, ConnectionError):
            return None

    def address(self, notebook: str, program: str = LAB) -> str:
        """Return where a notebook opens, alone in its page."""
        return f"{self._url}{program}/{notebook}?token={self._token}&reset"

    def serves(self, url: str) -> bool:
        """Whether a page of this server's JupyterLab is at an address."""
        return bool(self._url) and url.startswith(f"{self._url}{LAB}")

    def write(self, cells: Sequence[str]) -> str:
        """Write a notebook of these code cells; return its name."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        name = f"{uuid.uuid4().hex[:8]}.ipynb"
        nbformat.write(notebook, self.notebooks / name)
        return name

    def copy(self, path: Path) -> str:
        """Copy a notebook to where the server finds it, without its outputs; return its name."""
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.update(outputs=[], execution_count=None)
        nbformat.write(notebook, self.notebooks / path.name)
        return path.name

    def kernel(self) -> dict[str, str] | None:
        """Return the id and the name of the kernel that runs, if there is one."""
        running = self.ask("GET", "api/kernels") or [None]
        return running[0] and {"id": running[0]["id"], "name": running[0]["name"]}

    def lend_kernel(self, notebook: str) -> None:
        """Have a notebook begin with the kernel that runs, if there is one."""
        if kernel := self.kernel():
            self.ask("POST", "api/sessions", {"path": notebook, "name": "", "type": "notebook", "kernel": kernel})

    def kernel_processes(self) -> list[psutil.Process]:
        """Return the processes of the kernels that run."""
        assert self._server is not None
        return [p for p in psutil.Process(self._server.pid).children() if _is_kernel(p)]

    def end_kernels(self) -> None:
        """Shut all kernels down, as closing their notebooks would, and wait until they have ended."""

        def ended() -> bool:
            for session in self.ask("GET", "api/sessions") or []:
                # The server refuses while it starts that kernel anew.
                with contextlib.suppress(urllib.error.HTTPError):
                    self.ask("DELETE", f"api/sessions/{session['id']}")
            return not self.kernel_processes()

        eventually(ended, "the kernels end")


def _is_kernel(process: psutil.Process) -> bool:
    try:
        return "ipykernel_launcher" in process.cmdline()
    except psutil.Error:
        # It has ended.
        return False


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a headless Chromium, with a profile of its own."""
    # Where it is not installed, tests are skipped: none of them fails on the import of this module.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(_CHROMIUM))
        try:
            yield browser
        finally:
            browser.close()


class Notebook:
    """A notebook open in a page. Cells are counted from 0, text cells too."""

    def __init__(self, page: Page, lab: Lab, name: str, program: str = LAB) -> None:
        self.page = page
        self._lab = lab
        self.path = lab.notebooks / name
        page.set_default_timeout(CELL_SECONDS * 1000)
        self._open(program)

    def _open(self, program: str) -> None:
        """Open it alone in the page: in the JupyterLab and with the kernel that are there, or in new ones."""
        if program == NOTEBOOK_7:
            self._lab.lend_kernel(self.path.name)
            self.page.goto(self._lab.address(self.path.name, program), timeout=START_SECONDS * 1000)
        # A dialog that an earlier notebook left would be in the way.
        elif self._lab.serves(self.page.url) and not self.page.locator(".jp-Dialog").count():
            self.page.evaluate(
                "async ([path, kernel]) => { window.running = 0;"
                " for (const shown of [...window.jupyterapp.shell.widgets('main')]) shown.dispose();"
                " await window.jupyterapp.commands.execute('docmanager:open', { path, kernel }) }",
                [self.path.name, self._lab.kernel()],
            )
        else:
            self._lab.end_kernels()
            self.page.goto(self._lab.address(self.path.name), timeout=START_SECONDS * 1000)
        self.page.wait_for_function(
            "name => { const shown = window.jupyterapp?.shell.currentWidget;"
            " return shown?.context?.path === name && shown.sessionContext?.session?.kernel?.status === 'idle'"
            " && document.querySelector('.jp-Notebook .jp-Cell') }",
            arg=self.path.name,
            timeout=START_SECONDS * 1000,
        )

    def execute(self, source: str) -> bool:
        """Run lines in the kernel that no cell has; return whether it was idle within some seconds, and could."""
        ran = self.page.evaluate(
            "async code => { const kernel = window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel;"
            # What widgets tell it keeps it busy for a moment.
            " for (let i = 0; kernel?.status === 'busy' && i < 30; i++) await new Promise(go => setTimeout(go, 100));"
            " if (kernel?.status !== 'idle') return false;"
            " return (await kernel.requestExecute({ code }).done).content.status === 'ok' }",
            source,
        )
        return bool(ran)

    # ------------------------------------------------------------------ what a person does

    def select(self, cell: int) -> None:
        """Make a cell the active one."""
        self.page.evaluate(
            "cell => { const content = window.jupyterapp.shell.currentWidget.content;"
            " content.deselectAll(); content.activeCellIndex = cell }",
            cell,
        )

    def start(self, cell: int) -> None:
        """Run a cell; does not wait for its end."""
        self.select(cell)
        self.command("notebook:run-cell")

    def start_all(self) -> None:
        """Run All; does not wait for its end."""
        self.command("notebook:run-all-cells")

    def run(self, *cells: int) -> None:
        """Run cells, one after the other, each to its end, when those that run have ended."""
        self.wait()
        for cell in cells:
            self.start(cell)
            self.wait()

    def run_all(self, seconds: float = CELL_SECONDS) -> None:
        """Run All, to its end."""
        self.start_all()
        self.wait(seconds)

    def press_stop(self) -> None:
        """Press the stop square of the toolbar."""
        self.page.locator('.jp-NotebookPanel-toolbar [data-command="notebook:interrupt-kernel"]').click()

    def restart_kernel(self) -> None:
        """Choose Restart Kernel from the menu, say yes, and wait for the new kernel."""
        before = set(self._lab.kernel_processes())
        self.page.get_by_role("menuitem", name="Kernel", exact=True).click()
        self.page.locator('.lm-Menu-item[data-command="kernelmenu:restart"]').click()
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        eventually(lambda: not before & set(self._lab.kernel_processes()), "the old kernel ends")
        self.page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'"
        )

    def save(self) -> None:
        """Save, and wait until the file is written."""
        self.command("docmanager:save")
        self.wait()

    def command(self, name: str, **arguments: object) -> None:
        """Begin a command of JupyterLab; `wait` waits for its end."""
        self.page.evaluate(
            "([name, given]) => { window.running = (window.running ?? 0) + 1;"
            " const end = () => { window.running -= 1 };"
            " window.jupyterapp.commands.execute(name, given).then(end, end) }",
            [name, arguments],
        )

    def wait(self, seconds: float = CELL_SECONDS) -> None:
        """Wait until what was begun has ended, and no cell runs or waits for its turn."""
        # Run All's own promise ends at the first error, expected or not.
        self.page.wait_for_function(
            "() => !window.running && window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status"
            " === 'idle' && ![...document.querySelectorAll('.jp-InputPrompt')].some(p => p.innerText.includes('*'))",
            timeout=seconds * 1000,
        )

    # ------------------------------------------------------------------ what a person sees

    def shown(self, cell: int) -> str:
        """Return the text on the screen below a cell."""
        return str(self.page.evaluate(_SHOWN, cell))

    def wait_for(self, cell: int, text: str) -> str:
        """Wait until `text` is on the screen below a cell; return all that is there."""
        self.page.wait_for_function(f"([cell, text]) => ({_SHOWN})(cell).includes(text)", arg=[cell, text])
        return self.shown(cell)

    def output(self, cell: int) -> Locator:
        """Return the locator of what is below a cell."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-OutputArea")

    def number(self, cell: int) -> int | None:
        """Return the number between a cell's brackets; None for a cell that was not run."""
        read = "cell => window.jupyterapp.shell.currentWidget.content.widgets[cell].model.executionCount"
        return self.page.evaluate(read, cell)

    def outputs(self, cell: int) -> list[dict[str, Any]]:
        """Return the outputs that the notebook holds for a cell, as they would be saved."""
        read = "cell => window.jupyterapp.shell.currentWidget.content.widgets[cell].model.outputs.toJSON()"
        return list(self.page.evaluate(read, cell))


_SHOWN = (
    "cell => [...document.querySelectorAll('.jp-Notebook .jp-Cell')][cell]"
    "?.querySelector('.jp-OutputArea')?.innerText ?? ''"
)
