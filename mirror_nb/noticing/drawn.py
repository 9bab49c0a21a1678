"""Axes of matplotlib by their place in a figure, which has them as they have it: the two are one on each side.

Knows no names. Never imports matplotlib.
"""

from __future__ import annotations

import sys
from typing import Any


def axes() -> tuple[type, ...]:
    """Return the class of all axes; none where nothing draws."""
    kind = getattr(sys.modules.get("matplotlib.axes"), "Axes", None)
    return () if kind is None else (kind,)


def place_of(obj: Any) -> tuple[object, int] | None:
    """Return the figure that axes are in, and which of its axes they are; None of axes that are in none any more."""
    # Of a part of a figure, the whole.
    figure = getattr(obj.figure, "figure", None) or obj.figure
    return next(((figure, i) for i, one in enumerate(getattr(figure, "axes", ())) if one is obj), None)


def at(figure: Any, number: int) -> object:
    """Return the axes that have this place."""
    return figure.axes[number]
