"""matplotlib's figures in mirrored cells: those of the notebook, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest
from driving import running
from IPython.utils.capture import capture_output


@pytest.fixture
def run(shell):
    made = running(shell)
    made("from matplotlib.figure import Figure\nfigure = Figure()\n_ = figure.subplots().plot([1, 2])")
    return made


def shown(shell: Any, source: str) -> list[dict[str, Any]]:
    with capture_output() as captured:
        shell.run_cell(source)
    return [output.data for output in captured.outputs]


def test_a_figure_of_the_notebook_is_shown_as_a_picture_in_a_mirrored_cell(run, shell):
    run("%mirror restart")
    run("%%mirrored --quiet\nimport sys\nloaded = 'matplotlib' in sys.modules")
    assert run("loaded") is False
    pictures = [data for data in shown(shell, "%%mirrored --quiet\ndisplay(figure)") if "image/png" in data]
    assert len(pictures) == 1
    run("%%mirrored --quiet\nimport matplotlib.pyplot as plt\nfigure.axes[0].plot([2, 1])")
    assert sum("image/png" in data for data in shown(shell, "%%mirrored --quiet\ndisplay(figure)")) == 1


def test_a_figure_that_a_cell_makes_is_one_figure_in_the_notebook(run, tmp_path):
    run(
        "%%mirrored --quiet\nfrom matplotlib.figure import Figure\nmade = Figure()\naxes = made.subplots(1, 2)\n"
        "axes[0].plot([replica_id])\nlines = axes[1].plot([1, replica_id])\nown = made if replica_id == 0 else None"
    )
    run(f"made.savefig({str(tmp_path / 'made.png')!r}); own.savefig({str(tmp_path / 'own.png')!r})")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("made.png", "own.png"))
    assert run("axes.shape, [list(line.get_ydata()) for line in lines]") == ((2,), [[1, 0]])


def test_what_plot_returns_at_the_end_of_a_cell_is_one_list(run):
    lines = run("%%mirrored --quiet\nfrom matplotlib.figure import Figure\nFigure().subplots().plot([1, replica_id])")
    assert [type(line).__name__ for line in lines] == ["Line2D"]


def test_a_figure_that_comes_from_a_mirrored_cell_is_shown_as_a_picture_in_the_notebook(run, shell):
    run("%%mirrored --quiet\nfrom matplotlib.figure import Figure\nmade = Figure(); made.subplots()")
    assert [data.keys() >= {"image/png"} for data in shown(shell, "display(made)")] == [True]


def test_display_that_an_ordinary_cell_has_imported_is_that_of_a_mirrored_one(run, shell):
    # IPython puts it among Python's own names, too.
    run("from IPython.display import display\ndef show(x): display(x)")
    assert [data["text/plain"] for data in shown(shell, "%%mirrored --quiet\nshow(1); display(2)")] == ["1", "2"]
    run("%%mirrored --quiet\nfrom IPython.display import display as again")
    assert run("again is display")
