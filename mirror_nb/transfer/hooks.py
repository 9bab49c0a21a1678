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
from torch.nn.modules.lazy import LazyModuleMixin
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
Hooks = frozenset[tuple[str, int]]
# Kinds and numbers.
_owners: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
# By the id of such a dict: whose it is, and which, of parts that travel.
_staying: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
# Which hooks stay in this process, of those that this was found out of.
_IN_REPLICAS = 1 << 40
# The number of a replica's first hook: the notebook draws no such numbers.


def number_apart() -> None:
    """Have the hooks of this process, a replica, get no number that one of the notebook has, of all modules' ones too.

    A hook would take another one's place, or be called as that wants to be.
    """
    if hasattr(RemovableHandle, "next_id"):
        RemovableHandle.next_id = max(RemovableHandle.next_id, _IN_REPLICAS)


def keep_numbers(found: Hooks) -> None:
    """Let no hook of this process get the number of one that came from its kind of process."""
    count = getattr(RemovableHandle, "next_id", 0)
    own = [number for _, number in found if number // _IN_REPLICAS == count // _IN_REPLICAS]
    if own and max(own) >= count:
        RemovableHandle.next_id = max(own) + 1


def hook_dicts(module: nn.Module) -> dict[str, dict[int, Callable[..., object]]]:
    """Return a part's hooks by their kind, of kinds that it has; their handles can be told whose they are then."""
    own = vars(module)
    found = {kind: held for kind in HOOKS if (held := own.get(kind))}
    for kind, held in found.items():
        known = _owners.get(id(held))
        if known is None or known[0]() is not module:
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


def numbers(part: nn.Module) -> Hooks:
    """Return a part's own hooks, without torch's of a module that has no shape yet."""
    found = hook_dicts(part).items()
    return frozenset((kind, number) for kind, held in found for number, hook in held.items() if not is_lazy(hook))


def is_lazy(hook: Callable[..., object]) -> bool:
    """Whether it is torch's own, of a module that has no shape yet: the other side's may have one."""
    return getattr(getattr(hook, "hook", hook), "__func__", hook) in _OF_LAZY


# By names of torch's own: it takes both away itself.
_OF_LAZY = [getattr(LazyModuleMixin, name, None) for name in ("_infer_parameters", "_lazy_load_hook")]


def contents(part: object) -> dict[str, dict[int, Any]]:
    """Return copies of the dicts of a part's hooks, those that have none too, to `exchange`."""
    return {kind: dict(held) for kind, held in vars(part).items() if kind in HOOKS or kind in HOOK_SETTINGS}


def owner(handle: RemovableHandle) -> tuple[nn.Module | None, str]:
    """Return the part that a handle's hook is one of, and the hook's kind; None if it is none of a known part."""
    held = handle.hooks_dict_ref()
    reference, kind = _owners.get(id(held), (None, ""))
    module = None if reference is None else reference()
    return (module, kind) if module is not None and vars(module).get(kind) is held else (None, "")


def reduce_handle(handle: RemovableHandle) -> Any:
    """Say how to make a handle again, of the same part's hook if it is a part's.

    Torch's own way draws numbers, of which replicas are to draw the same ones, and fails for what is gone.
    """
    module, kind = owner(handle)
    others = [held for reference in handle.extra_dict_ref or () if (held := reference()) is not None]
    state = (module, kind) if module is not None else (handle.hooks_dict_ref(), others)
    # As a state: what it removes may have the handle.
    return _number, (handle.id,), state, None, None, _set_removed


def _number(number: int) -> RemovableHandle:
    made: Any = RemovableHandle.__new__(RemovableHandle)
    made.id, made.hooks_dict_ref, made.extra_dict_ref = number, weakref.ref(OrderedDict()), ()
    return made


def _set_removed(handle: Any, state: tuple[Any, Any]) -> None:
    owner, what = state
    if isinstance(owner, nn.Module):
        # It may have its hooks only after this.
        held = [functools.partial(_held, weakref.ref(owner), kind) for kind in (what, *HOOK_SETTINGS)]
        handle.hooks_dict_ref, handle.extra_dict_ref = held[0], tuple(held[1:])
    elif owner is not None:
        handle.hooks_dict_ref, handle.extra_dict_ref = weakref.ref(owner), tuple(map(weakref.ref, what))


def _held(reference: weakref.ref[nn.Module], kind: str) -> Any:
    module = reference()
    return None if module is None else vars(module).get(kind)
