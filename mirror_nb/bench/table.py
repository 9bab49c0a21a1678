"""Tables as text, as HTML and as a DataFrame. Knows rows of texts; knows nothing of what was measured."""

from __future__ import annotations

import html
import importlib
from collections.abc import Sequence
from typing import Any

from mirror_nb.errors import MirrorError

Cells = Sequence[tuple[str, bool]]
# Of a row: each text, and whether it is the best of its kind.


def as_text(
    headline: str, header: Sequence[str], rows: Sequence[Cells], advice: Sequence[str], *, names: int, best: str
) -> str:
    """Return the table for a terminal; a star stands before what is the best of its kind, `best` in words.

    The first `names` columns are texts.
    """
    lines = [list(header), *([f"* {text}" if best else text for text, best in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    aligned = (
        "  ".join(
            text.ljust(w) if i < names else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join([f"{headline}; *: {best}", *(line.rstrip() for line in aligned), *advice])


def as_html(
    headline: str, header: Sequence[str], rows: Sequence[Cells], advice: Sequence[str], *, names: int, best: str
) -> str:
    """Return the table for a notebook, in the colours of its page, dark or light; arguments as in `as_text`."""
    cell = "padding:.15em .7em;font-variant-numeric:tabular-nums;text-align:"
    marked = ";font-weight:bold;background:color-mix(in srgb,currentColor 14%,transparent)"
    sides = [*["left"] * names, *["right"] * (len(header) - names)]
    head = "".join(f'<th style="{cell}{s}">{html.escape(t)}</th>' for s, t in zip(sides, header, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{cell}{s}{marked if b else ""}">{html.escape(t)}</td>'
            for s, (t, b) in zip(sides, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    said = "".join(f"<div>{html.escape(line)}</div>" for line in advice)
    return (
        f"<div><div>{html.escape(headline)}; shaded: {html.escape(best)}</div>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{said}</div>"
    )


def as_frame(rows: Sequence[dict[str, Any]]) -> Any:
    """Return a DataFrame of a row each. Raises MirrorError where pandas is not installed."""
    try:
        frame = importlib.import_module("pandas").DataFrame
    except ImportError as error:
        raise MirrorError("a DataFrame needs pandas, which is not installed: pip install pandas") from error
    return frame(rows)
