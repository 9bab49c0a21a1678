"""How our pictures look: colours, and settings for matplotlib. Imports nothing that draws."""

from __future__ import annotations

from typing import Any

INK, PALE = "#24292f", "#8c959f"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Okabe and Ito's, which colour-blind readers tell apart: blue and vermilion first.
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
