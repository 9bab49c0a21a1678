"""What Keras was told for all that is made with it: dtypes, a policy, the order of axes. Never imports Keras.

Read as plain values, and set from them in another process: there, once Keras is imported. Knows no replicas.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from mirror_nb.environment.imported import when_imported

_CONFIG, _POLICIES = "keras.src.backend.config", "keras.src.dtype_policies.dtype_policy"
_FRESH = {"floatx": "float32", "epsilon": 1e-7, "image_data_format": "channels_last"}
# As Keras begins; the policy is floatx then.
_wanted: dict[str, Any] = {}
# As another process has it.
_followed: set[str] = set()
# What was set so here.


def settings() -> dict[str, Any]:
    """Return what is not as Keras begins with it."""
    config, policies = sys.modules.get(_CONFIG), sys.modules.get(_POLICIES)
    if config is None or not hasattr(policies, "dtype_policy"):
        return {}
    now = {name: getattr(config, name)() for name in _FRESH}
    found = {name: value for name, value in now.items() if value != _FRESH[name]}
    policy = policies.dtype_policy().name  # type: ignore[union-attr]
    return found if policy == now["floatx"] else {**found, "policy": policy}


def set_settings(wanted: dict[str, Any]) -> None:
    """Have these, and what was set so before as Keras begins with it."""
    _wanted.clear()
    _wanted.update(wanted)
    if hasattr(sys.modules.get(_POLICIES), "set_dtype_policy"):
        settle()
    else:
        when_imported(_POLICIES, "mirror_nb.environment.keras_settings:settle")


def settle() -> None:
    """Keras is there: set what is wanted."""
    config, policies = sys.modules[_CONFIG], sys.modules[_POLICIES]
    changed = _followed | _wanted.keys()
    for name, fresh in _FRESH.items():
        if name in changed:
            getattr(config, f"set_{name}")(_wanted.get(name, fresh))
    if "policy" in changed:
        # One of the user's own class has no name that means it there.
        with contextlib.suppress(ValueError):
            policies.set_dtype_policy(_wanted.get("policy", config.floatx()))
    _followed.clear()
    _followed.update(_wanted)
