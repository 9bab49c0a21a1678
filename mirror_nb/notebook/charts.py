"""Measurements as pictures: all-reduces over their sizes, a model's steps as bars.

Draws with matplotlib, without pyplot, in the look of ink.py. Knows tables; knows no replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullLocator

from mirror_nb.bench.collectives import AllReduceTable
from mirror_nb.bench.steps import StepTable
from mirror_nb.errors import UsageError
from mirror_nb.notebook.curves import Curves
from mirror_nb.notebook.ink import COLOURS, INK, PALE, STYLE
from mirror_nb.readable import number, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKS = "osD^vP"


def draw_all_reduce(table: AllReduceTable) -> Curves:
    """Return the figure: time, and bus bandwidth, over the size, a line an op.

    Raises UsageError for an empty table.
    """
    if not table.rows:
        raise UsageError("there is nothing to plot: nothing was measured")
    with rc_context(STYLE):
        figure = Curves(figsize=(9.2, 3.4), layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.09))
        FigureCanvasAgg(figure)
        times, bandwidths = figure.subplots(1, 2)
        for i, op in enumerate(dict.fromkeys(row.op for row in table.rows)):
            rows = [row for row in table.rows if row.op == op]
            sizes = [row.nbytes for row in rows]
            style = {"color": COLOURS[i % 6], "marker": _MARKS[i % 6], "ms": 3.5, "lw": 1.6, "label": op}
            times.plot(sizes, [row.p50_us for row in rows], **style)
            times.fill_between(
                sizes, [r.p50_us for r in rows], [r.p95_us for r in rows], color=COLOURS[i % 6], alpha=0.12, lw=0
            )
            bandwidths.plot(sizes, [row.bus_gbps for row in rows], **style)
        times.set(title="time, µs: median to p95", yscale="log")
        times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        times.yaxis.set_major_formatter(lambda us, _: f"{us:,.10g}")
        times.yaxis.set_minor_locator(NullLocator())
        bandwidths.set(title="bus bandwidth, GB/s")
        for axes in (times, bandwidths):
            _bytes_below(axes, sorted({row.nbytes for row in table.rows}))
        times.legend(loc="best", fontsize=8.5)
    figure.alt = ". ".join(["Time and bus bandwidth of all-reduces over their size, a line an op", *table.advice])
    return figure


def draw_steps(table: StepTable) -> Curves:
    """Return the figure: a bar a way to train, its length the median of a step.

    Raises UsageError for an empty table.
    """
    if not table.rows:
        raise UsageError("there is nothing to plot: nothing was measured")
    with rc_context(STYLE):
        figure = Curves(figsize=(6.6, 0.9 + 0.34 * len(table.rows)), layout=ConstrainedLayoutEngine(h_pad=0.09))
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        names = [row.way for row in table.rows]
        best = table.fastest().way
        colours = [COLOURS[0] if name == best else PALE for name in names]
        bars = axes.barh(names, [row.p50_ms for row in table.rows], color=colours, height=0.62)
        axes.bar_label(bars, [number(row.p50_ms) for row in table.rows], padding=4, color=INK, fontsize=8.5)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(title="a training step, ms", xlim=(0, 1.12 * max(row.p50_ms for row in table.rows)))
    figure.alt = "Milliseconds of a training step: " + ", ".join(f"{r.way} {number(r.p50_ms)}" for r in table.rows)
    return figure


def _bytes_below(axes: Axes, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    shown = sizes[:: max(1, (len(sizes) + 4) // 5)]
    axes.set_xticks(shown, [size(nbytes) for nbytes in shown])
    axes.xaxis.set_minor_locator(NullLocator())
