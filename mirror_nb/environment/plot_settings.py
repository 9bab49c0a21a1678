"""What matplotlib was told for all figures of a process, and a notebook for those that it shows.

    plt.style.use(...), plt.rcParams[...] = ...         %config InlineBackend.figure_format = "retina"

Read as plain values, and set from them in another process: there, once matplotlib is imported, which this never does.
Knows no replicas.
"""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from typing import Any

from mirror_nb import plain
from mirror_nb.environment.imported import when_imported

_OWN = ("backend", "interactive", "toolbar", "tk.", "webagg.", "savefig.directory")
# How a process draws, and where to; nothing of how it looks.
_SHOWN: dict[str, Any] = {"figure_formats": {"png"}, "print_figure_kwargs": {"bbox_inches": "tight"}}
# Of matplotlib-inline, as it begins; in the settings by names that begin so:
_INLINE = "InlineBackend."
_wanted: dict[str, Any] = {}
# As another process has it.
_followed: dict[str, Any] = {}
# What was set so here.


def settings() -> dict[str, Any]:
    """Return what is not as matplotlib's file of settings says, and as matplotlib-inline begins.

    Numbers and words as they are, pickled what may be of matplotlib's classes or have arrays, as colours do.
    """
    module = sys.modules.get("matplotlib")
    now, first = getattr(module, "rcParams", None), getattr(module, "rcParamsOrig", None)
    found = {}
    if isinstance(now, dict) and isinstance(first, dict):
        # Past what its class makes of being read: to ask for the backend chooses one.
        for name, value in dict.items(now):
            known = dict.get(first, name)
            if value is not known and not name.startswith(_OWN):
                written = _written(value)
                if written is not plain.NOT_PLAIN and written != _written(known):
                    found[name] = written
    kind = getattr(sys.modules.get("matplotlib_inline.config"), "InlineBackend", None)
    if kind is not None and kind.initialized():
        shown = {name: getattr(kind.instance(), name) for name in _SHOWN}
        found |= {_INLINE + name: copy.copy(value) for name, value in shown.items() if value != _SHOWN[name]}
    return found


def set_settings(wanted: dict[str, Any]) -> None:
    """Have these, and what was set so before as it is where nobody has set it; not once more what has not changed."""
    _wanted.clear()
    _wanted.update(wanted)
    if hasattr(sys.modules.get("matplotlib"), "rcParamsOrig"):
        settle()
    else:
        when_imported("matplotlib", "mirror_nb.environment.plot_settings:settle")


def settle() -> None:
    """Matplotlib is there: set what is wanted."""
    module: Any = sys.modules["matplotlib"]
    none = plain.NOT_PLAIN
    changed = {name for name in {**_followed, **_wanted} if _wanted.get(name, none) != _followed.get(name, none)}
    shown = {name: _wanted.get(_INLINE + name) for name in _SHOWN if _INLINE + name in changed}
    with warnings.catch_warnings():
        # Of names that will be gone it warns here, too, where nobody wrote them.
        warnings.simplefilter("ignore")
        for name in changed:
            if not name.startswith(_INLINE):
                value = _wanted[name] if name in _wanted else module.rcParamsOrig[name]
                module.rcParams[name] = pickle.loads(value) if isinstance(value, bytes) else value
    _show(shown)
    _followed.clear()
    _followed.update(_wanted)


def _written(value: Any) -> Any:
    """Return what tells a value, NOT_PLAIN of one that no other process knows: of the notebook's own class, say."""
    if type(value) in plain.ATOMS:
        return value
    try:
        written = pickle.dumps(value)
    except Exception:
        return plain.NOT_PLAIN
    return plain.NOT_PLAIN if b"__main__" in written else written


def _show(shown: dict[str, Any]) -> None:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shown and shell is not None:
        from matplotlib_inline.config import InlineBackend

        for name, value in shown.items():
            # With the first figure of pyplot's they are looked at; from then on they hold at once.
            setattr(InlineBackend.instance(parent=shell), name, _SHOWN[name] if value is None else value)
