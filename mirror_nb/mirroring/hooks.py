"""Hooks of a network's parts: those that one side registers or removes, the other has from it.

    layer.register_forward_hook(keep)    handle.remove()    layer._forward_hooks.clear()

Knows torch and pickling; knows no replicas and no channel.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mirror_nb.errors import TransferError, users_level
from mirror_nb.readable import size
from mirror_nb.transfer.hooks import HOOKS, Hooks, exchange, is_lazy, known_to_stay, note_staying, numbers
from mirror_nb.transfer.packing import pack
from mirror_nb.transfer.pickler import TooLarge
from mirror_nb.transfer.told import is_told

_BYTES = 64 * 2**20
# What a hook may bring along.
_NAMED = 3
# Parameters in a warning.


def own_hooks(part: nn.Module) -> Hooks:
    """Return a part's own hooks that both sides are to have."""
    return frozenset((kind, number) for kind, number in numbers(part) if not stays(vars(part)[kind][number]))


def registered() -> int | None:
    """Return what is another number once any hook was registered; None where torch does not tell."""
    return getattr(RemovableHandle, "next_id", None)


def graft_hooks(own: dict[str, Any], new: dict[str, Any], known: Hooks) -> None:
    """Have a part that came with the attributes `new` have the hooks that its `own` one has got or lost since then.

    When both had those that are `known`. All in the dicts of its own, whose handles are here.
    """
    for kind, number in known:
        if number not in own[kind]:
            new[kind].pop(number, None)
    lazy = {(kind, number) for kind in HOOKS for number, hook in own.get(kind, {}).items() if is_lazy(hook)}
    exchange(own, new, lambda kind, number: (kind, number) not in known | lazy)


def kept(function: object) -> tuple[object, ...]:
    """Return what a method is one of, a partial call has been given, or a function has captured."""
    if isinstance(function, types.MethodType):
        return (function.__self__,)
    if isinstance(function, functools.partial):
        return function.args
    captured = function.__closure__ if isinstance(function, types.FunctionType) else None
    return tuple(map(_content, captured or ()))


def keeping(function: Any, i: int, value: object) -> Any:
    """Return the function with another value in the place of that one of `kept`."""
    if isinstance(function, types.MethodType):
        return types.MethodType(function.__func__, value)
    if isinstance(function, functools.partial):
        arguments = (*function.args[:i], value, *function.args[i + 1 :])
        return functools.partial(function.func, *arguments, **function.keywords)
    function.__closure__[i].cell_contents = value
    return function


def _content(cell: types.CellType) -> object:
    # It may be empty.
    with contextlib.suppress(ValueError):
        return cell.cell_contents
    return None


def stays(function: Callable[..., object]) -> bool:
    """Whether a network's hook, or function, cannot be pickled, or brings too much along; a warning says so."""
    known = known_to_stay(function)
    if known is not None:
        return known
    reason = _reason_to_stay(function)
    if reason:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        warnings.warn(
            f"`{name}`, a network's hook or attribute, stays in the process that set it, since {reason}. Where "
            "notebook and replicas are both to have it, set it in each",
            stacklevel=users_level(),
        )
    note_staying(function, bool(reason))
    return bool(reason)


def warn_of_tensors(parts: Iterable[nn.Module], told: set[int]) -> None:
    """Warn of hooks that parameters have, which do not travel, once of each: `told` has the numbers of those known."""
    found = {
        number: f"{type(part).__name__}.{name}"
        for part in parts
        for name, parameter in vars(part).get("_parameters", {}).items()
        for number in _hooks_of(parameter)
        if number not in told
    }
    if found:
        told.update(found)
        names = list(dict.fromkeys(found.values()))
        named = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        warnings.warn(
            f"hooks of parameters ({named}) stay in this process, and do not run where replicas train the network. "
            "Change its gradients after backward(): they are those of the whole batch then. One that a mirrored cell "
            "registers, or what `run` calls, sees its replica's own gradient",
            stacklevel=users_level(),
        )


def _hooks_of(parameter: torch.Tensor | None) -> Iterable[int]:
    # One without a value yet refuses what it is asked in its own way.
    with torch._C.DisableTorchFunctionSubclass():
        held = [getattr(parameter, kind, None) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    return [number for hooks in held if hooks for number in hooks]


def _reason_to_stay(function: Callable[..., object]) -> str:
    inner: Any = getattr(function, "__func__", function)
    try:
        # As if networks and the like were there already, and what it looks up by name.
        namespace = getattr(inner, "__globals__", {})
        pack(function, namespace=namespace, reference=_is_apart, limit=_BYTES, in_band=True, classes=True)
    except TransferError as error:
        return f"it cannot be sent: {error.__cause__ or error}"
    except TooLarge:
        return f"it brings more than {size(_BYTES)} along"
    return ""


def _is_apart(obj: object) -> str | None:
    # A class that is pickled gets a name from this process, and is to have one from all.
    return "there" if isinstance(obj, nn.Module | type) or is_told(obj) else None
