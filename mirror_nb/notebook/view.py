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


def let_go(*widgets: Any) -> None:
    """Close widgets and those in them, in the front end too.

    And the layouts and styles that ipywidgets makes for each: it would keep them for good.
    """
    for widget in widgets:
        let_go(*getattr(widget, "children", ()))
        for part in (widget, widget.layout, getattr(widget, "style", None)):
            if part is not None:
                part.close()
