"""A drawing that is stretched to its card's width, with labels around it that are not. Knows nothing of training.

Text inside a stretched SVG would grow and shrink with the card; so labels are HTML, placed by pixels from the top and
by percent from the left, and lines keep their width.
"""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
WIDTH = 1000
# Of every drawing, in its own units; one pixel of height is one unit.
_FINE = 'transform="scale(1 .25)"'
# Of paths whose heights are in quarters of a pixel.
LABEL = 12
# Pixels that a line of labels takes.


@final
@dataclass(frozen=True, slots=True)
class Label:
    """A text beside a drawing."""

    at: float
    # Its middle: pixels from the top, or the share of the width from the left, 0 to 1.
    text: str
    kind: str = ""
    # CSS classes.


def plot(
    height: int,
    marks: str,
    left: Iterable[Label] = (),
    right: Iterable[Label] = (),
    below: Iterable[Label] = (),
    kind: str = "",
) -> str:
    """Return a drawing of so many pixels' height with its labels; `marks` are SVG in units of WIDTH × height."""
    parts = [
        f'<div class="p {kind}" style="height:{height}px"><svg viewBox="0 0 {WIDTH} {height}" '
        f'preserveAspectRatio="none">{marks}</svg>'
    ]
    for side, labels in (("l", left), ("e", right)):
        parts += [
            f'<span class="{side} {label.kind}" style="top:{label.at:.0f}px">{html.escape(label.text)}</span>'
            for label in labels
        ]
    parts += [
        f'<span class="x {label.kind}" style="left:{label.at * 100:.1f}%">{html.escape(label.text)}</span>'
        for label in below
    ]
    return "".join([*parts, "</div>"])


def line(xs: Integers, ys: Floats, kind: str) -> str:
    """Return a line through the points; it is broken where there are none."""
    known = np.flatnonzero(np.isfinite(ys))
    if len(known) == len(ys):
        return f'<path class="{kind}" {_FINE} d="{_path(xs, ys)}"/>'
    runs = np.split(known, np.flatnonzero(np.diff(known) > 1) + 1)
    # A lone point would not be seen: it is drawn as far as to itself, with round ends.
    paths = [_path(xs[run], ys[run]) + ("h0" if len(run) == 1 else "") for run in runs if len(run)]
    return f'<path class="{kind}" {_FINE} d="{"".join(paths)}"/>' if paths else ""


def area(xs: Integers, low: Floats, high: Floats, kind: str) -> str:
    """Return the band between two lines, where both are known."""
    known = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
    if len(known) < 2:
        return ""
    there, back = np.append(xs[known], xs[known][::-1]), np.append(low[known], high[known][::-1])
    return f'<path class="{kind}" {_FINE} d="{_path(there, back)}z"/>'


def _path(xs: Integers, ys: Floats) -> str:
    """Return a path through the points, in quarters of a pixel, each told from the one before: half the bytes."""
    quarters = np.rint(ys * 4).astype(np.int64)
    # Not np.diff, which takes longer to begin than to subtract.
    quarters[1:] -= quarters[:-1].copy()
    return _template(xs.tobytes()) % tuple(quarters.tolist())


@functools.lru_cache(maxsize=256)
def _template(xs: bytes) -> str:
    """Return a path with gaps for the heights: most lines of a frame, and of all frames, have the same places."""
    places = np.frombuffer(xs, np.int64)
    return f"M{places[0]} %dl" + " ".join([f"{x} %d" for x in (places[1:] - places[:-1]).tolist()])


@functools.lru_cache(maxsize=64)
def abscissas(count: int) -> Integers:
    """Return the places of so many points, from edge to edge."""
    return np.rint(np.linspace(0, WIDTH, count)).astype(np.int64)


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as a part of a path: one path holds all that have one colour."""
    wide = max(1, round(width))
    return f"M{x:.0f} {y:g}h{wide}v{height:g}h-{wide}z"


def stroke(x: float, width: float, y: float) -> str:
    """Return a rectangle as a part of a path whose lines are as thick as it is high."""
    return f"M{x:.0f} {y:g}h{max(1, round(width))}"


def horizontals(heights: Iterable[float]) -> str:
    """Return the lines of a grid."""
    path = "".join([f"M0 {y:.1f}h{WIDTH}" for y in heights])
    return f'<path class="g" d="{path}"/>'


def verticals(shares: Iterable[float], height: float) -> str:
    """Return the lines of a grid, at shares of the width."""
    path = "".join([f"M{share * WIDTH:.0f} 0v{height:g}" for share in shares])
    return f'<path class="g" d="{path}"/>'


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round values from low to high, about so many."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def spread(wanted: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Return places near the wanted ones, in the same order, that are so far apart and between low and high."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    apart = min(apart, (high - low) / max(1, len(wanted) - 1))
    places = [0.0] * len(wanted)
    at = low - apart
    for i in order:
        at = places[i] = max(wanted[i], at + apart)
    at = high + apart
    for i in reversed(order):
        at = places[i] = min(places[i], at - apart)
    return places
