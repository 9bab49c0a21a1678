"""The picker in JupyterLab: by mouse, by keyboard, while a cell runs, and in cells of any width."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from browser.lab import Lab, Notebook

# Far longer than any of them takes.
pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

MADE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from made_devices import MadeMachine, MadeSession
from mirror_nb.notebook.picker.widget import Picker
Picker(MadeSession(4), machine=MadeMachine(4)).show()
"""

Open = Callable[[str], Notebook]


def test_replicas_are_started_by_the_picker_used_by_a_cell_and_stopped(lab: Lab, open_notebook: Open) -> None:
    opened = open_notebook(
        lab.write(["%load_ext mirror_nb\n%mirror", "%%mirrored\nprint('on', num_replicas)", "%mirror stop"])
    )
    opened.run(0)
    picker = opened.output(0)
    picker.get_by_label("CPU replicas").fill("2")
    picker.get_by_label("CPU replicas").press("Enter")
    opened.wait_for(0, "%mirror start --devices cpu:0,cpu:1")
    picker.get_by_role("button", name="Measure").click()
    opened.wait_for(0, "measured on cpu:0, cpu:1; fastest: ")
    picker.get_by_text(re.compile(r"shared_memory \(default\).* 25 MiB \d")).wait_for()
    picker.get_by_label("Bucket size").select_option("4 MiB")
    picker.get_by_label("Gradients travel as").select_option("bf16, half the bytes")
    opened.wait_for(0, "%mirror start --devices cpu:0,cpu:1 --bucket-mb 4 --compression bf16")
    picker.locator("button.mod-primary").click()
    opened.wait_for(0, "2 replicas (cpu:0, cpu:1) ready in")
    opened.wait_for(0, "%mirror restart --devices cpu:0,cpu:1 --ops shared_memory --bucket-mb 4 --compression bf16")
    opened.run(1)
    assert "on 2" in opened.shown(1)
    # What a cell does to the replicas is seen by the picker.
    opened.run(2)
    opened.wait_for(0, "NO REPLICAS")


def test_it_is_used_by_keyboard_alone(lab: Lab, open_notebook: Open) -> None:
    opened = open_notebook(lab.write([MADE]))
    opened.run(0)
    picker, page = opened.output(0), opened.page
    picker.get_by_label("cuda:0").focus()
    page.keyboard.press("Space")
    opened.wait_for(0, "%mirror start --devices cuda:1,cuda:2,cuda:3")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    opened.wait_for(0, "%mirror start --devices cuda:2,cuda:3")
    focus = "() => document.activeElement.textContent + (document.activeElement.getAttribute('aria-label') ?? '')"
    for _ in range(20):
        page.keyboard.press("Tab")
        if "Start" in page.evaluate(focus):
            break
    page.keyboard.press("Space")
    opened.wait_for(0, "2 replicas ready in 0.9 s")


def test_the_line_of_code_is_copied(lab: Lab, open_notebook: Open) -> None:
    opened = open_notebook(lab.write([MADE]))
    opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.run(0)
    opened.output(0).get_by_role("button", name="Copy the line of code").click()
    opened.output(0).get_by_text("Copied").wait_for()
    assert opened.page.evaluate("navigator.clipboard.readText()") == "%mirror start --devices " + ",".join(
        f"cuda:{i}" for i in range(4)
    )


def test_a_press_during_a_cell_is_heard_after_it(lab: Lab, open_notebook: Open, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\nprint('over')"
    opened = open_notebook(lab.write(["%load_ext mirror_nb\n%mirror", waits]))
    opened.run(0)
    start = opened.output(0).locator("button.mod-primary")
    start.wait_for()
    opened.start(1)
    start.click()
    assert "ready in" not in opened.shown(0)
    gate.touch()
    opened.wait_for(0, "ready in")
    opened.wait()
    assert "over" in opened.shown(1)


@pytest.mark.parametrize("width", [480, 1600])
def test_nothing_is_wider_than_the_cell(lab: Lab, open_notebook: Open, width: int) -> None:
    opened = open_notebook(lab.write([MADE]))
    opened.page.set_viewport_size({"width": width, "height": 900})
    opened.run(0)
    opened.output(0).locator(".mnb-picker").wait_for()
    wider = (
        "() => { const p = document.querySelector('.mnb-picker'), edge = p.getBoundingClientRect().right;"
        " return [...p.querySelectorAll('.mnb-card, .mnb-options, .code, .mnb-go, button')]"
        ".filter(e => e.getBoundingClientRect().right > edge + 1).map(e => e.className) }"
    )
    assert opened.page.evaluate(wider) == []
