"""Modules with parametrizations (torch.nn.utils.parametrize: weight_norm, spectral_norm, …) as pickle takes them.

Torch gives each such module a class of its own, which refuses to be pickled. All that this class adds to the module's
own one is made anew where the module arrives. Knows torch alone.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

_CLASS, _PROPERTY = "_inject_new_class", "_inject_property"


def reduce_parametrized(module: nn.Module) -> tuple[Any, ...] | None:
    """Return how pickle shall take a parametrized module, as `__reduce__` does; None: it is none.

    None, too, where this torch makes such modules in another way: then torch's own error says what is wrong.
    """
    known = hasattr(parametrize, _CLASS) and hasattr(parametrize, _PROPERTY)
    if not known or not parametrize.is_parametrized(module):
        return None
    own: Any = parametrize.type_before_parametrizations(module)
    names = tuple(module.parametrizations)  # type: ignore[arg-type]
    return make_parametrized, (own, names), own.__getstate__(module)


def make_parametrized(own: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Make a module of a class with these parametrizations, without its state."""
    module = own.__new__(own)
    getattr(parametrize, _CLASS)(module)
    for name in names:
        getattr(parametrize, _PROPERTY)(module, name)
    return module
