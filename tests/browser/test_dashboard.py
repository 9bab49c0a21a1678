"""The dashboard in JupyterLab: live while a cell trains, its buttons, a picture afterwards; theme, reload, a death."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from driving import eventually

from browser.lab import Lab, Notebook

# Far longer than any of them takes.
pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

BEGIN = """
%load_ext mirror_nb
%mirror start --devices cpu:0,cpu:1
import torch
from torch import nn
x = torch.rand(4000, 20)
y = (x.sum(1) > 10).long()
%mirror status
"""


def training(gate: Path) -> str:
    """A cell's lines that train until the gate is there: the replicas look after each epoch, and decide alike."""
    return f"""
import os
import mirror_nb
model = nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(10_000):
    for a, b in strategy.distribute_dataset((x, y), batch_size=200):
        loss = nn.functional.cross_entropy(model(a), b)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        mirror_nb.log(loss=loss)
    if strategy.reduce("sum", int(os.path.exists({str(gate)!r}))) > 0:
        break
"""


Open = Callable[[str], Notebook]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def trains(lab: Lab, open_notebook: Open, gate: Path) -> Callable[..., Notebook]:
    """Open a notebook whose cell 1 has a dashboard and trains until the gate is there; start it and see it live."""

    def opened(*more: str, first: str = "%%mirrored --dashboard") -> Notebook:
        new = open_notebook(lab.write([BEGIN, first + training(gate), "print('next', loss)", *more]))
        new.run(0)
        new.start(1)
        new.output(1).locator(".pill.running").wait_for()
        return new

    return opened


def steps(notebook: Notebook, cell: int = 1) -> int:
    """The number of steps on the screen; 0 where none stands there."""
    found = re.search(r"([\d,]+)\s*steps", notebook.shown(cell))
    return int(found[1].replace(",", "")) if found else 0


def picture(notebook: Notebook, cell: int = 1) -> str:
    """Wait for the picture below a cell; return its alternative text, which JupyterLab keeps but does not show."""
    notebook.output(cell).locator("img").first.wait_for()
    (shown,) = [output for output in notebook.outputs(cell) if "image/png" in output.get("data", {})]
    return str(shown["metadata"]["image/png"]["alt"])


def test_every_panel_changes_while_the_cell_runs_and_the_picture_stays(trains, gate):
    opened = trains()
    board = opened.output(1).locator(".mnb-board")
    panels = ("Throughput", "Loss", "Where a step goes", "All-reduce", "late", "Overlap", "Devices", "What to look at")
    for title in panels:
        board.get_by_text(title).first.wait_for()
    # Each card by itself, until each was drawn anew; what to look at may have nothing new to say.
    cards = board.locator(".c")
    before, drawn = steps(opened), cards.evaluate_all(INNER)
    changed: set[int] = set()

    def all_changed() -> bool:
        changed.update(i for i, now in enumerate(cards.evaluate_all(INNER)) if now != drawn[i])
        return changed >= set(range(len(panels) - 1))

    eventually(all_changed, "each panel changes")
    assert steps(opened) > before
    gate.touch()
    opened.wait()
    alt = picture(opened)
    assert "finished on 2 replicas with SharedMemoryAllReduce" in alt
    assert board.count() == 0


INNER = "cards => cards.map(card => card.innerHTML)"


def reaction(notebook: Notebook, button: str, pill: str) -> float:
    """Press a button; return the seconds until the screen shows the state that follows, by the page's clock."""
    return float(
        notebook.page.evaluate(
            """([button, pill]) => new Promise((resolve) => {
                const board = document.querySelector('.mnb-board');
                const pressed = [...board.querySelectorAll('button')].find(b => b.innerText.includes(button));
                const began = performance.now();
                const look = () => board.isConnected && !board.querySelector('.pill.' + pill)
                    ? requestAnimationFrame(look) : resolve((performance.now() - began) / 1000);
                pressed.click();
                look();
            })""",
            [button, pill],
        )
    )


def test_compare_says_whether_parameters_are_equal_while_the_cell_runs(trains, gate):
    opened = trains(first="%%mirrored --dashboard\nx, y = torch.rand(10**6, 20), torch.zeros(10**6).long()")
    board = opened.output(1).locator(".mnb-board")
    assert "in sync" not in board.inner_text()
    board.get_by_role("button", name="Compare").click()
    board.get_by_text("parameters in sync at step").wait_for()
    board.get_by_role("button", name="Stop").click()
    opened.wait()
    assert "parameters in sync at step" in picture(opened)


@pytest.mark.alone
def test_stop_ends_the_training_while_the_cell_runs(trains):
    opened = trains()
    # A step takes a few milliseconds.
    assert reaction(opened, "Stop", "stopping") < 0.5
    opened.wait()
    assert "stopped on 2 replicas" in picture(opened).lower()
    opened.run(2)
    assert "next" in opened.shown(2)


@pytest.mark.alone
def test_pause_holds_and_resume_goes_on(trains, gate):
    opened = trains()
    assert reaction(opened, "Pause", "paused") < 0.5
    held = steps(opened)
    opened.output(1).get_by_role("button", name="Resume").click()
    opened.output(1).locator(".pill.running").wait_for()
    eventually(lambda: steps(opened) > held, "it goes on")
    gate.touch()
    opened.wait()
    assert "finished" in picture(opened)


def test_the_stop_square_interrupts_the_cell_and_the_picture_says_so(trains):
    opened = trains()
    opened.press_stop()
    opened.wait()
    assert "interrupted" in picture(opened)
    opened.run(2)


def test_a_replica_that_is_killed_while_one_watches_is_named(trains):
    opened = trains()
    status = next(line for line in opened.shown(0).splitlines() if line.startswith("1 ")).split()
    assert status[:2] == ["1", "cpu:1"]
    os.kill(int(status[2]), signal.SIGKILL)
    opened.wait()
    assert "was killed by signal 9 (SIGKILL)" in picture(opened)
    assert "ReplicaDied" in opened.shown(1)


def test_a_second_view_is_live_too_and_both_change_with_the_theme_and_become_the_same_picture(trains, gate):
    opened = trains()
    opened.select(1)
    opened.command("notebook:create-output-view")
    boards = opened.page.locator(".mnb-board")
    eventually(lambda: boards.count() == 2, "both are there")
    read = "boards => boards.map(e => getComputedStyle(e.querySelector('svg, .mnb-dash, div')).color)"
    before = boards.evaluate_all(read)
    opened.command("apputils:change-theme", theme="JupyterLab Dark")
    try:
        eventually(
            lambda: all(now != then for now, then in zip(boards.evaluate_all(read), before, strict=True)),
            "the colours change",
        )
    finally:
        opened.command("apputils:change-theme", theme="JupyterLab Light")
        gate.touch()
    opened.wait()
    eventually(
        lambda: boards.count() == 0 and opened.page.locator(".jp-OutputArea img").count() == 2, "both are pictures"
    )


def test_after_a_reload_during_the_run_the_cell_ends_and_a_dashboard_shows_what_it_did(trains, gate, lab):
    opened = trains("%mirror dashboard")
    opened.page.goto(lab.address(opened.path.name))
    opened.page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel")
    gate.touch()
    # JupyterLab itself loses what a cell shows after a reload; the replicas' records are where they were.
    opened.page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'"
    )
    opened.run(2, 3)
    assert "next" in opened.shown(2)
    assert "on 2 replicas with SharedMemoryAllReduce" in picture(opened, 3)


def test_the_dashboard_of_all_cells_becomes_live_again_where_it_stands(lab, open_notebook, gate):
    opened = open_notebook(lab.write([BEGIN, "%mirror dashboard", "%%mirrored" + training(gate)]))
    opened.run(0, 1)
    opened.output(1).locator(".pill.waiting").wait_for()
    opened.start(2)
    opened.output(1).locator(".pill.running").wait_for()
    gate.touch()
    opened.wait()
    assert "finished" in picture(opened)
    gate.unlink()
    opened.start(2)
    opened.output(1).locator(".pill.running").wait_for()
    gate.touch()
    opened.wait()
    assert "finished" in picture(opened)
