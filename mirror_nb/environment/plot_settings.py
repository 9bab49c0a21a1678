"""What matplotlib was told for all figures of a process: `plt.style.use(...)`, `plt.rcParams[...] = ...`.

Read as plain values, and set from them in another process: there, once matplotlib is imported, which this never does.
Knows no replicas.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from mirror_nb.environment.imported import when_imported

_OWN = ("backend", "interactive", "toolbar", "tk.", "webagg.", "savefig.directory")
# How a process draws, and where to; nothing of how it looks.
_wanted: dict[str, Any] = {}
# As another process has it.
_followed: set[str] = set()
# What was set so here.


def settings() -> dict[str, Any]:
    """Return what is not as matplotlib's file of settings says."""
    module = sys.modules.get("matplotlib")
    now, first = getattr(module, "rcParams", {}), getattr(module, "rcParamsOrig", {})
    # Past what its class makes of being read: to ask for the backend chooses one.
    known = dict.get
    return {
        name: value for name, value in dict.items(now) if known(first, name) != value and not name.startswith(_OWN)
    }


def set_settings(wanted: dict[str, Any]) -> None:
    """Have these, and what was set so before as matplotlib's file says."""
    _wanted.clear()
    _wanted.update(wanted)
    if hasattr(sys.modules.get("matplotlib"), "rcParamsOrig"):
        settle()
    else:
        when_imported("matplotlib", "mirror_nb.environment.plot_settings:settle")


def settle() -> None:
    """Matplotlib is there: set what is wanted."""
    module: Any = sys.modules["matplotlib"]
    with warnings.catch_warnings():
        # Of names that will be gone it warns here, too, where nobody wrote them.
        warnings.simplefilter("ignore")
        module.rcParams.update({name: module.rcParamsOrig[name] for name in _followed - _wanted.keys()})
        module.rcParams.update(_wanted)
    _followed.clear()
    _followed.update(_wanted)
