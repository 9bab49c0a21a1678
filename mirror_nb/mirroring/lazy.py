"""Lazy modules on two sides: their parameters get shapes and values by a first forward pass, on one of them.

    LazyLinear here ──▶ LazyLinear in the replicas ── a forward pass ──▶ Linear there ── its values ──▶ Linear here

Knows torch alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

_SIZES = ("in_features", "in_channels", "num_features")
# What torch's lazy modules learn at a forward pass; 0 before. Values alone (load_state_dict) do not tell them.
_HOOKS = ("_initialize_hook", "_load_hook")
# Torch's, by which a lazy module takes shape; a module that is lazy no more has none.


def take_shape(tensor: Any, value: torch.Tensor) -> None:
    """Give a tensor that has no shape yet that of `value`; others are left as they are."""
    if is_lazy(tensor):
        tensor.materialize(value.shape, device=tensor.device, dtype=value.dtype)


def settle(module: nn.Module) -> None:
    """Make lazy parts of a network, that had their forward pass elsewhere, what torch makes them at one."""
    for part in module.modules():
        if isinstance(part, LazyModuleMixin) and _is_complete(part):
            for name in _HOOKS:
                hook = vars(part).pop(name, None)
                if hook is not None:
                    hook.remove()
            if part.cls_to_become is not None:
                part.__class__ = part.cls_to_become


def _is_complete(part: Any) -> bool:
    return not part.has_uninitialized_params() and all(vars(part).get(name) != 0 for name in _SIZES)


def becoming(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a lazy module of this one becomes; others stay what they are."""
    return (kind.cls_to_become if issubclass(kind, LazyModuleMixin) else None) or kind


def kind_of(module: nn.Module) -> str:
    """Return the name of a module's class, of a lazy one that of the class it becomes."""
    return becoming(type(module)).__name__
