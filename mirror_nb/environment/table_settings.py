"""How pandas was told to show tables: `pd.set_option("display.max_rows", 5)`. Never imports pandas.

Read as plain values, and set from them in another process: there, once pandas is imported. Knows no replicas.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

from mirror_nb.environment.imported import when_imported

_CONFIG = "pandas._config.config"
_PLAIN = (bool, int, float, str, type(None))
_FORMAT = "display.float_format"
# Of a text, `"{:.2f}".format`, that is told; another function of one's own stays.
_FRESH = object()
_wanted: dict[str, Any] = {}
# As another process has it.
_followed: dict[str, Any] = {}
# What was set so here.


def settings() -> dict[str, Any]:
    """Return what is not as pandas begins with it."""
    # By names of its own: its public functions take ten times as long.
    config = sys.modules.get(_CONFIG)
    known, now = getattr(config, "_registered_options", {}), getattr(config, "_global_config", {})
    found = {}
    for name, option in list(known.items()):
        if name.startswith("display."):
            value: Any = functools.reduce(dict.__getitem__, name.split("."), now)
            if name == _FORMAT and getattr(value, "__name__", "") == "format":
                value = getattr(value, "__self__", None)
            if value != option.defval and isinstance(value, _PLAIN):
                found[name] = value
    return found


def set_settings(wanted: dict[str, Any]) -> None:
    """Have these, and what was set so before as pandas begins with it; not once more what has not changed."""
    _wanted.clear()
    _wanted.update(wanted)
    if hasattr(sys.modules.get("pandas"), "set_option"):
        settle()
    else:
        when_imported("pandas", "mirror_nb.environment.table_settings:settle")


def settle() -> None:
    """Pandas is there: set what is wanted."""
    pandas: Any = sys.modules["pandas"]
    for name, value in {**dict.fromkeys(_followed, _FRESH), **_wanted}.items():
        # There are some that only another version has.
        with contextlib.suppress(KeyError):
            if value is _FRESH:
                pandas.reset_option(name)
            elif _followed.get(name, _FRESH) != value:
                pandas.set_option(name, value.format if name == _FORMAT and value is not None else value)
    _followed.clear()
    _followed.update(_wanted)
