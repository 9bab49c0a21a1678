"""The dashboard as a matplotlib figure: the picture that stays in a saved notebook. Knows no widgets.

The same panels with the same colours as the live one, on white.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from mirror_nb import readable
from mirror_nb.notebook.dashboard import palette, words
from mirror_nb.notebook.dashboard.frame import Frame, latest
from mirror_nb.notebook.dashboard.panels import CLASSES, RECENT, decades, trouble, visible, within
from mirror_nb.notebook.dashboard.plot import spread
from mirror_nb.notebook.ink import STYLE
from mirror_nb.telemetry.snapshot import BREAKDOWN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

_INK, _PALE, _EDGE, _GROUND = "#1d2330", "#6b7280", "#e1e4e8", "#eceef1"
_HOT, _COMM = palette.TROUBLE[0], palette.COMMUNICATION[0]
_STYLE: Any = STYLE | {
    "font.size": 8.5,
    "text.color": _INK,
    "axes.edgecolor": _EDGE,
    "axes.labelcolor": _PALE,
    "axes.spines.left": False,
    "axes.titlesize": 10,
    "axes.titlepad": 10,
    "axes.grid": False,
    "grid.color": _EDGE,
    "xtick.color": _EDGE,
    "ytick.color": _EDGE,
    "xtick.labelcolor": _PALE,
    "ytick.labelcolor": _PALE,
    "legend.fontsize": 7,
}


def draw(frame: Frame) -> Figure:
    """Return the frame as a figure of 13 × 8.5 inches."""
    # Without pyplot, which would look for a screen and keep the figure; and only when a picture is wanted.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(13, 8.5))
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(3, 3, left=0.05, right=0.94, top=0.84, bottom=0.05, hspace=0.55, wspace=0.36)
        _header(figure, frame)
        _throughput(figure.add_subplot(grid[0, 0]), frame)
        _losses(figure, grid[0, 1], frame)
        _breakdown(figure.add_subplot(grid[0, 2]), frame)
        _all_reduces(figure.add_subplot(grid[1, 0]), frame)
        _lateness(figure.add_subplot(grid[1, 1]), frame)
        _lanes(figure.add_subplot(grid[1, 2]), frame)
        _devices(figure.add_subplot(grid[2, :2]), frame)
        _look_at(figure.add_subplot(grid[2, 2]), frame)
        return figure


def _header(figure: Figure, frame: Frame) -> None:
    shot = frame.snapshot
    count = f"{shot.num_replicas} replica{'s' if shot.num_replicas > 1 else ''}"
    about = " · ".join(text for text in (frame.title, count, frame.operation) if text)
    figure.text(0.015, 0.965, "mirror_nb", fontsize=14, fontweight="bold", va="center")
    look: Any = {"color": _HOT if frame.troubled() else _PALE, "fontweight": "bold"}
    ends = _text(figure, 0.112, 0.964, frame.phase.value, **look)
    _text(figure, ends, 0.964, f" · {about}", color=_PALE)
    at = 0.015
    for value, what, kind in words.facts(frame):
        ends = _text(figure, at, 0.923, value, fontsize=13, fontweight="bold", color=_COMM if kind else _INK)
        at = max(ends, _text(figure, at, 0.9, what, color=_PALE, fontsize=8), at + 0.08) + 0.025
    if frame.note:
        # Whole, it is below.
        note = textwrap.shorten(frame.note, 80, placeholder=" …")
        _text(figure, 0.985, 0.964, note, color=_HOT, fontweight="bold", ha="right")


def _text(figure: Figure, x: float, y: float, text: str, **look: Any) -> float:
    """Write a text and return where it ends, as a share of the figure's width."""
    # Dollars in what users wrote are no formulas.
    written = figure.text(x, y, text, va="center", parse_math=False, **look)
    return written.get_window_extent().x1 / figure.bbox.width


def _title(axes: Axes, title: str, note: str = "", right: float = 1.0) -> None:
    """Write a panel's title, and a note that ends at `right`, where labels beside the axes may end."""
    axes.set_title(title, parse_math=False)
    said = axes.set_title(note, loc="right", fontsize=7.5, fontweight="normal", color=_PALE, parse_math=False)
    said.set_x(right)


def _nothing(axes: Axes, title: str, when: str) -> None:
    _title(axes, title)
    axes.set_axis_off()
    axes.text(0.5, 0.5, when, ha="center", va="center", color=_PALE, transform=axes.transAxes)


def _throughput(axes: Axes, frame: Frame) -> None:
    shot = frame.snapshot
    values = shot.throughputs
    if np.isfinite(values).sum() < 2:
        return _nothing(axes, "Throughput per replica", "no steps with examples")
    now = latest(values)
    low, high = visible(values, now)
    for r, row in enumerate(values):
        axes.plot(shot.steps, np.clip(row, low, high), color=palette.colour(r), lw=1.3)
    axes.set_ylim(low, high)
    axes.margins(x=0)
    axes.grid(axis="y")
    _steps(axes)
    axes.yaxis.set_major_formatter(lambda value, _: words.tick(value))
    known = [(r, value) for r, value in enumerate(now) if np.isfinite(value)]
    places = spread([value for _, value in known], (high - low) * 0.11, low, high)
    for (r, value), at in zip(known, places, strict=True):
        weight = "bold" if r in frame.slow() else "normal"
        _beside(axes, at, f"r{r} {words.rate(value)}", palette.colour(r), weight)
    _title(axes, "Throughput per replica", "examples/s, waits left out", 1.18)


def _steps(axes: Axes) -> None:
    """Label steps as the live picture does."""
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _beside(axes: Axes, y: float, text: str, colour: str, weight: str = "normal") -> None:
    axes.text(1.02, y, text, color=colour, fontweight=weight, va="center", transform=axes.get_yaxis_transform())


def _losses(figure: Figure, cell: SubplotSpec, frame: Frame) -> None:
    """The loss, and below it the other scalars, small."""
    others = frame.others()
    rows = cell.subgridspec(1 + len(others), 1, height_ratios=[3.2, *[0.7] * len(others)], hspace=0.5)
    _loss(figure.add_subplot(rows[0]), frame)
    for row, (name, curve) in enumerate(others):
        axes = figure.add_subplot(rows[row + 1])
        axes.plot(frame.snapshot.steps, curve.mean, color=_INK, lw=1.2)
        axes.set_ylim(*visible(curve.mean, [curve.last], floor=False))
        axes.margins(x=0)
        axes.set(xticks=[], yticks=[])
        axes.spines["bottom"].set_visible(False)
        look: Any = {"va": "center", "transform": axes.transAxes, "fontsize": 7.5, "parse_math": False}
        axes.text(-0.02, 0.5, name, ha="right", color=_PALE, **look)
        axes.text(1.02, 0.5, words.number(curve.last), fontweight="bold", **look)


def _loss(axes: Axes, frame: Frame) -> None:
    chosen = frame.curve()
    if chosen is None or not np.isfinite(chosen[1].mean).any():
        return _nothing(axes, "Loss", "none was logged")
    name, curve = chosen
    shot = frame.snapshot
    low, high = visible(np.append(curve.low, curve.high), [curve.last], floor=False)
    if shot.num_replicas > 1:
        axes.fill_between(shot.steps, curve.low, curve.high, color=_INK, alpha=0.15, lw=0)
    axes.plot(shot.steps, curve.mean, color=_INK, lw=1.5)
    axes.set_ylim(low, high)
    first = int(shot.steps[np.isfinite(curve.mean)][0])
    axes.set_xlim(first, max(shot.steps[-1], first + 1))
    axes.grid(axis="y")
    _steps(axes)
    axes.yaxis.set_major_formatter(lambda value, _: words.tick(value))
    _beside(axes, min(high, max(low, curve.last)), words.number(curve.last), _INK, "bold")
    note = "mean, min–max" if shot.in_sync is None else words.sync(frame) + " ✓" * shot.in_sync
    _title(axes, name[:1].upper() + name[1:], note)
    if shot.in_sync is False:
        axes.title.set_color(_HOT)


def _by_replica(axes: Axes, frame: Frame) -> None:
    """Rows for replicas, named in their colours, replica 0 on top."""
    count = frame.snapshot.num_replicas
    axes.set_ylim(max(count, 2) - 0.5, -0.5)
    axes.set_yticks(range(count), [f"r{r}" for r in range(count)])
    axes.tick_params(axis="y", length=0)
    for r, label in enumerate(axes.get_yticklabels()):
        label.set_color(palette.colour(r))
        label.set_fontweight("bold" if r in frame.slow() else "normal")


def _breakdown(axes: Axes, frame: Frame) -> None:
    parts = frame.snapshot.breakdown * 1e3
    if not parts.any():
        return _nothing(axes, "Where a step goes", "no step has ended")
    left = np.zeros(len(parts))
    for column, name in enumerate(BREAKDOWN):
        widths = parts[:, column]
        shown = widths.max() >= parts.sum(axis=1).max() / 200
        label = ("exposed comm" if name == "exposed" else name) if shown else None
        axes.barh(range(len(parts)), widths, 0.62, left, color=palette.PARTS[name][0], label=label)
        left = left + widths
    _by_replica(axes, frame)
    for r, total in enumerate(left.tolist()):
        _beside(axes, r, readable.milliseconds(total / 1e3), _PALE)
    axes.set_xlim(0, left.max())
    _legend(axes)
    _title(axes, "Where a step goes", "ms, mean of the last steps")
    return None


def _legend(axes: Axes) -> None:
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.06, -0.1),
        ncols=6,
        fontsize=6.5,
        handlelength=0.7,
        handletextpad=0.3,
        columnspacing=0.5,
        labelcolor=_PALE,
    )


def _all_reduces(axes: Axes, frame: Frame) -> None:
    shown = sorted(frame.snapshot.all_reduces, key=lambda c: c.per_step * c.p50)[-CLASSES:]
    shown.sort(key=lambda c: c.size)
    if not shown:
        return _nothing(axes, "All-reduce time by size", "nothing was reduced")
    logs = [np.log10(np.maximum(c.seconds, 1e-7) * 1e3) for c in shown]
    ends = [within(values, 0.01, 0.99) for values in logs]
    edges = np.linspace(min(low for low, _ in ends) - 0.35, max(high for _, high in ends) + 0.35, 48)
    # Its labels are the longest.
    place = axes.get_position()
    axes.set_position((place.x0, place.y0, place.width * 0.86, place.height))
    axes.set_xscale("log")
    for row, (c, values) in enumerate(zip(shown, logs, strict=True)):
        counts = np.convolve(np.histogram(values, edges)[0], np.ones(5) / 5, "same")
        middles = 10 ** ((edges[1:] + edges[:-1]) / 2)
        axes.fill_between(middles, row, row - counts / max(counts.max(), 1e-9) * 0.75, color=_COMM, alpha=0.35, lw=0)
        axes.plot([c.p50 * 1e3] * 2, [row, row - 0.8], color=_INK, lw=1.4)
        axes.plot([c.p95 * 1e3] * 2, [row, row - 0.45], color=_INK, lw=1.2, ls=":")
        _beside(axes, row - 0.5, words.pair(c.p50, c.p95), _INK)
        _beside(axes, row - 0.12, words.bandwidth(c.bus_bandwidth), _PALE)
    axes.set_ylim(len(shown) - 0.9, -1)
    axes.set_yticks(range(len(shown)), [readable.size(c.size) for c in shown])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(10 ** edges[0], 10 ** edges[-1])
    at = decades(edges[0], edges[-1])
    axes.set_xticks(at, [words.tick(value) for value in at])
    axes.set_xticks([], minor=True)
    axes.grid(axis="x")
    _title(axes, "All-reduce time by size", "ms, log · p50 / p95 · bus", 1.4)


def _lateness(axes: Axes, frame: Frame) -> None:
    shot = frame.snapshot
    late = np.nan_to_num(shot.lateness)
    if not late.any():
        return _nothing(axes, "Who arrives late", "no replica met another")
    from matplotlib.colors import to_rgba

    most, red = trouble(frame, late)
    image = np.empty((*late.shape, 4))
    for r, row in enumerate(late):
        image[r] = to_rgba(palette.colour(r))
        image[r, :, 3] = np.clip(row / most, 0.0, 1.0) ** 0.7
        image[r, red[r]] = to_rgba(_HOT)
    first, last = int(shot.late_steps[0]), int(shot.late_steps[-1])
    axes.set_facecolor(_GROUND)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(first - 0.5, last + 0.5, len(late) - 0.5, -0.5))
    _by_replica(axes, frame)
    axes.set_ylim(len(late) - 0.5, -0.5)
    _steps(axes)
    for r in range(len(late) - 1):
        axes.axhline(r + 0.5, color="white", lw=3)
    for r, value in enumerate(late[:, -RECENT:].mean(axis=1).tolist()):
        hot = red[r, -RECENT:].any()
        _beside(axes, r, readable.milliseconds(value), _HOT if hot else _PALE, "bold" if hot else "normal")
    _title(axes, "Who arrives late", "behind the first, by step")


def _lanes(axes: Axes, frame: Frame) -> None:
    shot = frame.snapshot
    title = "The last step" if shot.num_replicas == 1 else "Overlap, last step"
    if not any(shot.lanes):
        return _nothing(axes, title, "no step has ended")
    for part in (*BREAKDOWN, "collective"):
        comm = part in ("exposed", "collective")
        bars = [(r, bar) for r, its in enumerate(shot.lanes) for bar in its if bar.part == part]
        if bars:
            rows = [r + (0.18 if comm else -0.18) for r, _ in bars]
            widths, starts = [(b.ended - b.began) * 1e3 for _, b in bars], [b.began * 1e3 for _, b in bars]
            colour = _COMM if comm else palette.PARTS[part][0]
            label = {"exposed": "comm", "collective": "hidden"}.get(part, part)
            axes.barh(rows, widths, 0.34, starts, color=colour, alpha=0.4 if part == "collective" else 1, label=label)
    _by_replica(axes, frame)
    _legend(axes)
    _title(axes, title, f"ms · {words.percent(shot.hidden)} of it hidden" if shot.hidden is not None else "ms")


def _devices(axes: Axes, frame: Frame) -> None:
    shot = frame.snapshot
    readings = frame.histories()
    if not any(readings):
        return _nothing(axes, "Devices", "they were not read")
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(max(shot.num_replicas, 4) - 0.5, -0.5))
    for r, its in enumerate(readings):
        name = frame.device(r) + (f"  {its[-1].name.removeprefix('NVIDIA ')}" if its else "")
        axes.text(0, r, name, color=palette.colour(r), va="center", parse_math=False)
        if not its:
            continue
        at = its[-1]
        memory = at.memory_used / at.memory_total if at.memory_used is not None and at.memory_total else None
        for left, share, alpha in ((0.24, at.utilisation, 1.0), (0.52, memory, 0.5)):
            if share is not None:
                axes.barh(r, 0.16, 0.4, left, color=_GROUND)
                axes.barh(r, 0.16 * min(1.0, share), 0.4, left, color=palette.colour(r), alpha=alpha)
        used = "" if at.memory_used is None else f"{at.memory_used / 2**30:.1f}"
        used += f" / {at.memory_total / 2**30:.0f} GiB" if at.memory_total and used else ""
        told = [
            (0.47, "–" if at.utilisation is None else f"{at.utilisation * 100:.0f} %"),
            (0.81, used or "–"),
            (0.9, "" if at.temperature is None else f"{at.temperature:.0f} °C"),
            (1.0, "" if at.power is None else f"{at.power:.0f} W"),
        ]
        for x, text in told:
            axes.text(x, r, text, va="center", ha="right", color=_HOT if at.slowed and x > 0.85 else _INK)
    known = any(its and (its[-1].temperature is not None or its[-1].power is not None) for its in readings)
    _title(axes, "Devices", "utilisation · memory" + " · temperature · power" * known)


def _look_at(axes: Axes, frame: Frame) -> None:
    _title(axes, "What to look at")
    axes.set_axis_off()
    y = 0.95
    for title, detail, kind in words.noticed(frame):
        colour = {"bad": _HOT, "hint": _PALE}.get(kind, _EDGE)
        lines = textwrap.wrap(title, 46) or [""]
        more = textwrap.wrap(detail, 56)
        height = 0.11 * (len(lines) + len(more))
        axes.plot([0.0, 0.0], [y + 0.03, y - height + 0.03], color=colour, lw=3, transform=axes.transAxes)
        look: Any = {"va": "top", "transform": axes.transAxes, "parse_math": False, "linespacing": 1.35}
        axes.text(0.03, y, "\n".join(lines), fontweight="bold", **look)
        axes.text(0.03, y - 0.11 * len(lines), "\n".join(more), color=_PALE, **look)
        y -= height + 0.1
