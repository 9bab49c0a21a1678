"""Training as one picture: loss, throughput of each replica, and test images with what the network says.

Draws a History with matplotlib. Knows no replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mirror_nb.demo.datasets import LabelledImages
from mirror_nb.demo.progress import History, Stepped
from mirror_nb.devices import Device
from mirror_nb.notebook.ink import INK, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

ENDINGS = (".png", ".svg", ".pdf")
# Okabe and Ito's colours without yellow and black, which colour-blind readers tell apart, and two more.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F3C8D", "#6E7781")
_WRONG = "#cf222e"
_COLUMNS, _ROWS = 8, 5
_POINTS = 40
_FEW = 4
# Up to so many replicas, the legend has room for their devices.


def draw(history: History, data: LabelledImages, devices: Sequence[Device], path: Path) -> None:
    """Write the picture of a finished training to `path`; its ending tells the format (.png, .svg, .pdf).

    Raises OSError where it cannot be written, ValueError for an unknown ending.
    """
    # Loaded here, while nobody waits for training to begin; and without pyplot, which would look for a screen.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(STYLE):
        figure = Figure(figsize=(13, 6.8), layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09))
        FigureCanvasAgg(figure)
        figure.suptitle(_headline(history, data, devices), fontsize=14, fontweight="bold", x=0.008, ha="left")
        parts: Any = figure.subfigures(1, 2, width_ratios=(1, 1.15), wspace=0.03)
        losses, rates = parts[0].subplots(2, 1, height_ratios=(1.2, 1))
        _draw_losses(losses, history, devices)
        _draw_rates(rates, history, devices)
        _draw_images(parts[1], history, data)
        figure.savefig(path, dpi=120, facecolor="white")


def _headline(history: History, data: LabelledImages, devices: Sequence[Device]) -> str:
    where = f"{len(devices)} replicas" if len(devices) > 1 else f"one replica ({devices[0]})"
    name = data.name[:1].upper() + data.name[1:]
    return f"{name}, trained on {where}: {history.accuracy:.1%} test accuracy"


def _colour(replica_id: int) -> str:
    return _COLOURS[replica_id % len(_COLOURS)]


def _draw_losses(axes: Axes, history: History, devices: Sequence[Device]) -> None:
    for r in range(len(devices)):
        values = history.losses(r)
        axes.plot(range(1, len(values) + 1), values, color=_colour(r), alpha=0.35, lw=0.8)
    smooth = _smoothed(history.mean_losses())
    axes.plot(range(1, len(smooth) + 1), smooth, color=INK, lw=1.6, label="global batch, smoothed")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(0, len(smooth))
    axes.set(title="Loss", xlabel="step")
    axes.legend(loc="upper right", fontsize=8.5)


def _draw_rates(axes: Axes, history: History, devices: Sequence[Device]) -> None:
    for r in range(len(devices)):
        times, rates = _rates(history.steps[r], history.began)
        axes.plot(times, rates, ".-", color=_colour(r), lw=1.4, ms=5, label=_legend(r, history, devices))
    columns = 2 if len(devices) <= _FEW else 4
    # Room above the lines for the legend.
    axes.set_ylim(0, axes.get_ylim()[1] * (1.06 + 0.12 * math.ceil(len(devices) / columns)))
    axes.set_xlim(left=0)
    axes.set(title="Throughput of each replica", xlabel="seconds", ylabel="examples/s")
    axes.legend(loc="upper right", fontsize=8.5, ncols=columns, columnspacing=1.2)


def _rates(steps: Sequence[Stepped], began: float) -> tuple[list[float], list[float]]:
    """Return seconds after `began` and the examples a second around then, in points few enough to be told apart."""
    size = math.ceil(len(steps) / _POINTS)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    seconds = [sum(some.seconds for some in group) for group in groups]
    examples = [sum(sum(some.examples) for some in group) for group in groups]
    times = [(group[0].until - group[0].seconds + group[-1].until) / 2 - began for group in groups]
    return times, [e / s for e, s in zip(examples, seconds, strict=True)]


def _legend(replica_id: int, history: History, devices: Sequence[Device]) -> str:
    rate = f"{history.rate(replica_id):.0f}/s"
    few = len(devices) <= _FEW
    return f"replica {replica_id} ({devices[replica_id]}): {rate}" if few else f"{replica_id}: {rate}"


def _draw_images(figure: SubFigure, history: History, data: LabelledImages) -> None:
    predictions = np.array(history.predictions())
    labels = data.test_labels.numpy()
    mistakes = np.flatnonzero(predictions != labels)
    figure.suptitle(
        f"Test images: {len(mistakes)} of {len(labels)} wrong", fontsize=10.5, fontweight="bold", x=0.012, ha="left"
    )
    shown = _chosen(len(labels), mistakes)
    for place, axes in enumerate(np.ravel(figure.subplots(_ROWS, _COLUMNS))):
        axes.set_axis_off()
        if place < len(shown):
            _draw_image(axes, data, shown[place], predictions[shown[place]])


def _chosen(count: int, mistakes: Any) -> list[int]:
    """Return the first test images and, in the last row, the first mistakes."""
    last = [int(i) for i in mistakes[:_COLUMNS]]
    first = [i for i in range(count) if i not in last]
    return first[: _COLUMNS * _ROWS - len(last)] + last


def _draw_image(axes: Axes, data: LabelledImages, index: int, predicted: int) -> None:
    axes.imshow(data.test_images[index, 0].numpy(), cmap="gray_r", interpolation="nearest")
    right = predicted == data.test_labels[index]
    said = data.classes[predicted]
    text = said if right else f"{said}\nis {data.classes[int(data.test_labels[index])]}"
    axes.set_title(
        text,
        color=INK if right else _WRONG,
        fontsize=8.5,
        loc="center",
        pad=3,
        fontweight="normal" if right else "bold",
    )


def _smoothed(values: Sequence[float]) -> Any:
    """Return the mean of each value and its neighbours, a fortieth of all of them."""
    ones = np.ones(2 * (len(values) // 80) + 1)
    return np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")
