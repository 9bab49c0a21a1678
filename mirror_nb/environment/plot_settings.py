"""What matplotlib was told for all figures of a process, and a notebook for those that it shows.

    plt.style.use(...), plt.rcParams[...] = ...         %config InlineBackend.figure_format = "retina"

Read as plain values, and set from them in another process: there, once matplotlib is imported, which this never does.
Knows no replicas.
"""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

from mirror_nb.environment.imported import when_imported

_OWN = ("backend", "interactive", "toolbar", "tk.", "webagg.", "savefig.directory")
# How a process draws, and where to; nothing of how it looks.
_SHOWN: dict[str, Any] = {"figure_formats": {"png"}, "print_figure_kwargs": {"bbox_inches": "tight"}}
# Of matplotlib-inline, as it begins; in the settings by names that begin so:
_INLINE = "InlineBackend."
_wanted: dict[str, Any] = {}
# As another process has it.
_followed: set[str] = set()
# What was set so here.


def settings() -> dict[str, Any]:
    """Return what is not as matplotlib's file of settings says, and as matplotlib-inline begins."""
    module = sys.modules.get("matplotlib")
    now, first = getattr(module, "rcParams", {}), getattr(module, "rcParamsOrig", {})
    # Past what its class makes of being read: to ask for the backend chooses one.
    known = dict.get
    found = {
        name: value for name, value in dict.items(now) if known(first, name) != value and not name.startswith(_OWN)
    }
    kind = getattr(sys.modules.get("matplotlib_inline.config"), "InlineBackend", None)
    if kind is not None and kind.initialized():
        shown = {name: getattr(kind.instance(), name) for name in _SHOWN}
        found |= {_INLINE + name: copy.copy(value) for name, value in shown.items() if value != _SHOWN[name]}
    return found


def set_settings(wanted: dict[str, Any]) -> None:
    """Have these, and what was set so before as it is where nobody has set it."""
    _wanted.clear()
    _wanted.update(wanted)
    if hasattr(sys.modules.get("matplotlib"), "rcParamsOrig"):
        settle()
    else:
        when_imported("matplotlib", "mirror_nb.environment.plot_settings:settle")


def settle() -> None:
    """Matplotlib is there: set what is wanted."""
    module: Any = sys.modules["matplotlib"]
    changed = {name: _wanted.get(name) for name in _followed | _wanted.keys()}
    shown = {name: changed.pop(_INLINE + name) for name in _SHOWN if _INLINE + name in changed}
    with warnings.catch_warnings():
        # Of names that will be gone it warns here, too, where nobody wrote them.
        warnings.simplefilter("ignore")
        for name in changed:
            module.rcParams[name] = _wanted[name] if name in _wanted else module.rcParamsOrig[name]
    _show(shown)
    _followed.clear()
    _followed.update(_wanted)


def _show(shown: dict[str, Any]) -> None:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shown and shell is not None:
        from matplotlib_inline.config import InlineBackend

        for name, value in shown.items():
            # With the first figure of pyplot's they are looked at; from then on they hold at once.
            setattr(InlineBackend.instance(parent=shell), name, _SHOWN[name] if value is None else value)
