"""How a front end is told to show a widget. Knows no widget of ours."""

from __future__ import annotations

from typing import Any


def view_of(widget: Any) -> dict[str, Any]:
    """Return what to display for a widget, by its MIME type; a text for who cannot show it goes beside it."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view}


def is_closed(widget: Any) -> bool:
    """Whether it cannot be displayed any more: `ipywidgets.Widget.close_all()` closes ours too."""
    return widget.comm is None
