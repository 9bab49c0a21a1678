"""A History as curves: each metric with its twin on the validation data, over the epochs.

Draws with matplotlib, without pyplot, which would look for a screen and would show the figure a second time. Knows no
model.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from mirror_nb.errors import UsageError
from mirror_nb.notebook.ink import COLOURS, INK, PALE, STYLE
from mirror_nb.training.history import History, lower_is_better, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAINING, _VALIDATION, *_ = COLOURS
_COLUMNS = 3
_DPI = 144
# Twice a screen's, shown at half the size.
_FEW = 30
# Up to so many epochs, each is a dot.


class Curves(Figure):
    """A figure that a notebook shows as a cell's last value, whether or not anything of matplotlib was set up."""

    alt = ""
    # The same in words, for who cannot see it.

    def _repr_png_(self) -> tuple[bytes, dict[str, int | str]]:
        png = io.BytesIO()
        self.savefig(png, format="png", dpi=_DPI)
        width, height = self.get_size_inches()
        told: dict[str, int | str] = {"width": round(width * _DPI / 2), "height": round(height * _DPI / 2)}
        return png.getvalue(), told | ({"alt": self.alt} if self.alt else {})


def draw(history: History, metrics: Sequence[str] | None) -> Curves:
    """Return the figure: a panel for each metric, or for those named, with the best epoch marked.

    Raises UsageError for a metric that was not logged or has no single value an epoch, and for a history of no epoch.
    """
    names = _panels(history, metrics)
    columns = min(_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    with rc_context(STYLE):
        figure = Curves(figsize=(4.6 * columns, 3.1 * rows), layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09))
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for panel, name in zip(axes, names, strict=False):
            _draw_metric(panel, history, name)
        for unused in list(axes):
            unused.remove()
    return figure


def _panels(history: History, metrics: Sequence[str] | None) -> list[str]:
    """Return the names of the panels: of training metrics, and of validation metrics without a twin."""
    if not history.epoch:
        raise UsageError("there is nothing to plot: no epoch has ended")
    if metrics is None:
        single = [name for name in history.history if _numbers(history, name)]
        names = [n for n in single if not (n.startswith("val_") and n.removeprefix("val_") in single)]
    else:
        names = [metrics] if isinstance(metrics, str) else list(metrics)
    if not names:
        raise UsageError(f"there is nothing to plot: none of {', '.join(history.history) or 'nothing'} is a number")
    for name in names:
        if not _numbers(history, name):
            raise UsageError(f"{name!r} cannot be plotted: it has several values an epoch")
    return names


def _numbers(history: History, name: str) -> bool:
    return all(isinstance(value, int | float) for value in history.values(name).values())


def _draw_metric(axes: Axes, history: History, name: str) -> None:
    twin = f"val_{name}"
    curves = {name: _VALIDATION if name.startswith("val_") else _TRAINING}
    if twin in history.history and _numbers(history, twin):
        curves[twin] = _VALIDATION
    mark = "o" if len(history.epoch) <= _FEW else ""
    for curve, colour in curves.items():
        values = history.values(curve)
        label = "validation" if curve.startswith("val_") else "training"
        epochs = [epoch + 1 for epoch in values]
        axes.plot(epochs, list(values.values()), marker=mark, ms=3, lw=1.6, color=colour, label=label)
    judged = twin if twin in curves else name
    if lower_is_better(judged) is not None:
        _mark_best(axes, history, judged)
    axes.set(title=name, xlabel="epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if len(curves) > 1:
        axes.legend(loc="best", fontsize=8.5)


def _mark_best(axes: Axes, history: History, metric: str) -> None:
    best = history.best_epoch(metric)
    if best is None:
        return
    value = history.values(metric)[best]
    axes.axvline(best + 1, color=PALE, lw=1, ls=":")
    axes.plot([best + 1], [value], "o", ms=7, mfc="none", mec=INK, mew=1.3)
    which = "best validation" if metric.startswith("val_") else "best"
    axes.set_title(f"{which} {shown(value)}, epoch {best + 1}", loc="right", fontsize=8.5, fontweight="normal")
