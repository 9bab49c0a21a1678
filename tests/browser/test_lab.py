"""What a person sees of a mirrored cell in JupyterLab, and what the buttons of the notebook do to it."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pytest
from driving import eventually, gone

from browser.lab import Lab, Notebook
from browser.test_dashboard import picture, training

# Far longer than any of them takes.
pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

TUTORIAL = Path(__file__).parents[2] / "notebooks" / "01_first_mirrored_cell.ipynb"
RESTART_SECONDS = 2.0
# After a restart, for all processes of the old kernel to be gone.
LIVE = """%%mirrored --dashboard
import torch
from torch import nn
x, y = torch.rand(4000, 20), torch.zeros(4000).long()
"""

Opened = Callable[..., Notebook]


class Gate:
    """A file that a cell waits for, so that the test says when the cell goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wait_in_cell(self) -> str:
        """Return the lines for the cell."""
        path = str(self.path)
        return f"import os, time\nwhile not os.path.exists({path!r}):\n    time.sleep(0.01)\n"

    def open(self) -> None:
        self.path.touch()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


def pids(notebook: Notebook, cell: int) -> list[int]:
    """Run `%mirror status` in that cell; return the pids that it shows, by replica."""
    notebook.run(cell)
    lines = [line.split() for line in notebook.shown(cell).splitlines() if line[:1].isdigit() and "cpu:" in line]
    assert [int(line[0]) for line in lines] == [0, 1]
    return [int(line[2]) for line in lines]


# --------------------------------------------------------------------------- a tutorial


def test_the_first_tutorial_runs_from_its_first_cell_to_its_last(
    lab: Lab, open_notebook: Callable[[str], Notebook]
) -> None:
    saved = nbformat.read(TUTORIAL, as_version=4)
    opened = open_notebook(lab.copy(TUTORIAL))
    opened.run_all(seconds=100)
    for index, cell in enumerate(saved.cells):
        if cell.cell_type == "code":
            # The last answer may come after the kernel has said that it is idle.
            eventually(partial(opened.number, index), f"cell {index} ran: {cell.source}")
            kinds = [output["output_type"] for output in opened.outputs(index)]
            assert kinds == [output["output_type"] for output in cell.outputs], opened.shown(index)


# --------------------------------------------------------------------------- the stop square


def test_the_stop_square_ends_a_loop_and_the_replicas_keep_their_names(notebook: Opened) -> None:
    opened = notebook(
        "%%mirrored\nturns = 0\nprint('looping')\nwhile True:\n    turns += 1",
        "%%mirrored\nassert turns > 0\nprint('replica', replica_id, 'has its turns')",
    )
    opened.start(1)
    opened.wait_for(1, "looping")
    opened.press_stop()
    assert "KeyboardInterrupt" in opened.wait_for(1, "interrupted on all 2 replicas")
    opened.run(2)
    assert "replica 0 has its turns" in opened.shown(2)
    assert "replica 1: 1 line, differing" in opened.shown(2)


def test_the_stop_square_frees_replicas_that_wait_in_a_collective(notebook: Opened) -> None:
    opened = notebook(
        "%%mirrored\nimport time, torch\nkept = 7\nprint('waiting')\n"
        "if replica_id == 1:\n    time.sleep(1000)\n"
        "torch.distributed.all_reduce(torch.ones(1))",
        "%%mirrored\nprint('sum', int(strategy.reduce('sum', kept)))",
    )
    opened.start(1)
    opened.wait_for(1, "waiting")
    opened.press_stop()
    shown = opened.wait_for(1, "interrupted on all 2 replicas")
    assert "----> 7 torch.distributed.all_reduce(torch.ones(1))" in shown
    assert "File" not in shown, "frames that are not the user's"
    opened.run(2)
    assert "sum 14" in opened.shown(2)
    assert "anew" not in opened.shown(2)


# --------------------------------------------------------------------------- replicas that die


def test_a_replica_killed_while_a_cell_runs_is_named_and_replaced_by_the_next_cell(notebook: Opened) -> None:
    opened = notebook(
        "%%mirrored\nkept = 7",
        "%mirror status",
        "%%mirrored\nimport time\nprint('going')\nwhile True:\n    time.sleep(0.01)",
        "%%mirrored\nprint('sum', int(strategy.reduce('sum', kept)))",
    )
    opened.run(1)
    victim = pids(opened, 2)[1]
    opened.start(3)
    opened.wait_for(3, "going")
    os.kill(victim, signal.SIGKILL)
    shown = opened.wait_for(3, "ReplicaDied")
    assert re.search(rf"replica 1 \(cpu:1, pid {victim}\) was killed by signal 9 \(SIGKILL\)", shown)
    opened.run(4)
    assert "sum 14" in opened.shown(4)
    assert "it was started anew with the names of replica 0" in opened.shown(4)


def test_a_replica_killed_between_cells_is_named_and_replaced_by_the_next_cell(notebook: Opened) -> None:
    opened = notebook(
        "%%mirrored\nkept = 7", "%mirror status", "%%mirrored\nprint('sum', int(strategy.reduce('sum', kept)))"
    )
    opened.run(1)
    victim, survivor = pids(opened, 2)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: pids(opened, 2) and "signal 9 (SIGKILL)" in opened.shown(2), "the status tells it")
    opened.run(3)
    assert "sum 14" in opened.shown(3)
    assert re.search(r"replica 0 \(cpu:0, .*signal 9 .*started anew with the names of replica 1", opened.shown(3))
    assert pids(opened, 2)[1] == survivor


def test_a_restart_of_the_kernel_leaves_no_replica_what_is_shown_says_so_and_a_cell_works_again(
    lab: Lab, notebook: Opened, gate: Gate
) -> None:
    opened = notebook(
        "%mirror",
        "%mirror status",
        LIVE + training(gate.path),
        "%%mirrored\nprint('sum', int(strategy.reduce('sum', 1)))",
    )
    opened.run(1)
    opened.output(1).locator(".mnb-picker").wait_for()
    assert "is gone" not in opened.shown(1)
    (kernel,) = lab.kernel_processes()
    old = {process.pid for process in kernel.children(recursive=True)} | set(pids(opened, 2))
    opened.start(3)
    opened.output(3).locator(".pill.running").wait_for()
    opened.restart_kernel()
    eventually(lambda: all(map(gone, old)), "the old kernel's processes end", RESTART_SECONDS)
    opened.wait_for(1, "The kernel that these boxes belong to is gone.")
    opened.output(3).get_by_text("The kernel that drew this is gone").wait_for()
    assert not opened.output(3).get_by_role("button", name="Stop").is_visible()
    opened.run(0, 4)
    assert "sum 2" in opened.shown(4)
    assert not old & set(pids(opened, 2))


def test_run_all_stops_at_a_mirrored_cell_that_fails(notebook: Opened) -> None:
    opened = notebook(
        "%%mirrored\nif replica_id == 1:\n    raise ValueError('no such luck')", "print('never')", "%%mirrored\n1"
    )
    opened.run_all()
    shown = opened.shown(1)
    assert "ValueError: no such luck" in shown
    assert "raised by replica 1 (cpu:1)" in shown
    assert f"Cell In[{opened.number(1)}], line 3" in shown
    assert "----> 3     raise ValueError('no such luck')" in shown
    assert [opened.number(cell) for cell in (2, 3)] == [None, None]


# --------------------------------------------------------------------------- what is shown


def test_status_lines_are_there_while_a_cell_runs_and_gone_when_it_has_ended(notebook: Opened, gate: Gate) -> None:
    opened = notebook(f"%%mirrored\nprint('hello from', replica_id)\n{gate.wait_in_cell()}")
    opened.start(1)
    assert "hello from 0" in opened.wait_for(1, "hello from 1")
    assert re.search(r"0 *\s+cpu:0\s+\d.*\n.*1 *\s+cpu:1\s+\d", opened.shown(1))
    gate.open()
    opened.wait()
    shown = opened.shown(1)
    assert "cpu:1" not in shown
    assert shown.index("hello from 0") < shown.index("2 replicas ·") < shown.index("replica 1: 1 line, differing")
    # Folded, to be opened.
    assert "hello from 1" not in shown
    opened.output(1).locator("summary").click()
    assert "hello from 1" in opened.shown(1)


def test_a_progress_bar_reaches_its_end_and_a_figure_is_shown(notebook: Opened) -> None:
    opened = notebook(
        "%%mirrored\nfrom tqdm.notebook import tqdm\nfor i in tqdm(range(30)):\n    pass",
        "%%mirrored\nimport matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()\nprint('drawn')",
    )
    opened.run(1, 2)
    assert "100%" in opened.wait_for(1, "30/30")
    assert opened.output(1).locator(".progress").count() == 1
    assert opened.output(2).locator("img").count() == 1
    assert opened.output(2).locator("img").evaluate("image => image.naturalWidth") > 100
    assert "replica 1: the same output" in opened.shown(2)


def test_twenty_thousand_lines_leave_the_page_alive_and_the_notebook_small(notebook: Opened) -> None:
    opened = notebook(
        "%%mirrored\nfor line in range(20_000):\n    print('line', line, 'of replica', replica_id)", "print('alive')"
    )
    opened.run(1, 2)
    shown = opened.shown(1)
    assert shown.count("of replica 0") == 20_000
    assert "replica 1: 20000 lines, differing from replica 0; the last 100" in shown
    assert opened.shown(2).strip() == "alive"
    assert len(json.dumps(opened.outputs(1))) < 2 * len(shown)


def test_a_saved_notebook_still_makes_sense_when_its_kernel_is_gone(
    lab: Lab, notebook: Opened, open_notebook: Callable[[str], Notebook], gate: Gate
) -> None:
    opened = notebook(
        f"%%mirrored\nprint('hello from', replica_id)\n{gate.wait_in_cell()}replica_id",
        LIVE + training(gate.path),
        "%mirror",
    )
    opened.start(1)
    opened.wait_for(1, "hello from 1")
    gate.open()
    opened.run(2, 3)
    assert "finished on 2 replicas" in picture(opened, 2)
    before = opened.shown(1)
    opened.save()

    def saved(cell: int) -> list[dict[str, Any]]:
        outputs = json.loads(opened.path.read_text())["cells"][cell]["outputs"]
        return [output["data"] for output in outputs if "data" in output]

    data = eventually(lambda: [data for data in saved(2) if "image/png" in data], "the picture is in the file")
    assert "application/vnd.jupyter.widget-view+json" not in data[0]
    assert "%mirror start --devices" in "".join(saved(3)[0]["text/plain"])
    lab.end_kernels()
    again = open_notebook(opened.path.name)
    assert again.shown(1) == before
    again.output(1).locator("summary").click()
    assert "hello from 1" in again.shown(1)
    assert "widget" not in again.shown(1)
    assert "finished on 2 replicas" in picture(again, 2)
