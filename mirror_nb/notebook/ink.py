"""How our pictures look: colours, and settings for matplotlib. Imports nothing that draws."""

from __future__ import annotations

from typing import Any

INK, PALE = "#24292f", "#8c959f"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eaeef2",
    "xtick.color": PALE,
    "ytick.color": PALE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    # Paper of its own, so that the ink can be read on a dark page too.
    "figure.facecolor": "white",
    "axes.facecolor": "white",
}
