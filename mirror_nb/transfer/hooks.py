"""Hooks of networks' parts as they travel: where torch keeps them, and the handles that remove them.

Knows torch alone.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# Of a module's `vars`: dicts of hooks by their handles' numbers.
HOOK_SETTINGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
# By the same numbers: how some are to be called.
_owners: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
# By the id of such a dict: whose it is, and which, of parts that travel.
_staying: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
# Which hooks stay in this process, of those that this was found out of.


def hook_dicts(module: nn.Module) -> dict[str, dict[int, Callable[..., object]]]:
    """Return a part's hooks by their kind, of kinds that it has; their handles can be told whose they are then."""
    own = vars(module)
    found = {kind: held for kind in HOOKS if (held := own.get(kind))}
    for kind, held in found.items():
        owner = _owners.get(id(held))
        if owner is None or owner[0]() is not module:
            _owners[id(held)] = weakref.ref(module, functools.partial(_forget, id(held))), kind
    return found


def _forget(dict_id: int, gone: weakref.ref[nn.Module]) -> None:
    if dict_id in _owners and _owners[dict_id][0] is gone:
        del _owners[dict_id]


def exchange(own: Mapping[str, Any], new: dict[str, Any], kept: Callable[[str, int], bool]) -> None:
    """Have a part's `new` attributes have the dicts of its `own`, which handles know, with the new ones' hooks.

    And with those of its own that are `kept`, by their kind and number.
    """
    left: set[int] = set()
    for kind in (*HOOKS, *HOOK_SETTINGS):
        if kind in own and kind in new:
            held, came = own[kind], dict(new[kind])
            stay = {n: hook for n, hook in held.items() if (kept(kind, n) if kind in HOOKS else n in left)}
            held.clear()
            held.update({**stay, **came})
            left.update(stay)
            new[kind] = held


def known_to_stay(hook: Callable[..., object]) -> bool | None:
    """Return what `note_staying` was told of a hook; None: nothing."""
    # It may be one that has no hash.
    with contextlib.suppress(TypeError):
        return _staying.get(hook)
    return None


def note_staying(hook: Callable[..., object], stays: bool) -> None:
    """Remember that a hook cannot travel, or that it can."""
    with contextlib.suppress(TypeError):
        _staying[hook] = stays


def contents(part: object) -> dict[str, dict[int, Any]]:
    """Return copies of the dicts of a part's hooks, those that have none too, to `exchange`."""
    return {kind: dict(held) for kind, held in vars(part).items() if kind in HOOKS or kind in HOOK_SETTINGS}


def reduce_handle(handle: RemovableHandle) -> Any:
    """Say how to make a handle again of the same hook, if it is a part's; None: as torch does."""
    held = handle.hooks_dict_ref()
    owner, kind = _owners.get(id(held), (None, ""))
    module = None if owner is None else owner()
    if module is not None and vars(module).get(kind) is held:
        return _handle, (module, kind, handle.id)
    if held is None or any(reference() is None for reference in handle.extra_dict_ref or ()):
        # Torch's own way fails where but some of it are gone.
        return _handle, (None, "", handle.id)
    return None


def _handle(module: nn.Module | None, kind: str, number: int) -> RemovableHandle:
    # Not by its constructor, which draws a number: replicas are to draw the same ones.
    made: Any = RemovableHandle.__new__(RemovableHandle)
    made.id, made.hooks_dict_ref, made.extra_dict_ref = number, weakref.ref(OrderedDict()), ()
    if module is not None:
        # It may have its hooks only after this.
        own = [functools.partial(_held, weakref.ref(module), name) for name in (kind, *HOOK_SETTINGS)]
        made.hooks_dict_ref, made.extra_dict_ref = own[0], tuple(own[1:])
    return made


def _held(owner: weakref.ref[nn.Module], kind: str) -> Any:
    module = owner()
    return None if module is None else vars(module).get(kind)
