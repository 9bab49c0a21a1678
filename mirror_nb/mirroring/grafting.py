"""Networks that are here made what ones from the other side are, with their own parts and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mirror_nb.mirroring.attributes import of_one_side
from mirror_nb.mirroring.hooks import graft_hooks, keeping, kept
from mirror_nb.mirroring.networks import give
from mirror_nb.mirroring.registrations import registrations
from mirror_nb.transfer.hooks import Hooks, hook_dicts


def graft(
    new: Iterable[nn.Module],
    here: Callable[[nn.Module], nn.Module | None],
    moved: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
    replacing: Iterable[torch.Tensor] = (),
    hooks_known: Callable[[nn.Module], Hooks] = lambda part: frozenset(),
) -> dict[int, nn.Module]:
    """Make the networks that are here what the `new` ones are, with their own parts and tensors.

    `here` gives what stands for a part of a new one already, None: nothing does. `moved` are parameters of new ones,
    each with the one that stands for it, of another place; for those `replacing` none does. `hooks_known` tells which
    hooks of a part both sides had. Returns what became of the new ones' parts, by the id of each. All at once: they
    may share parts, or have exchanged some.
    """
    new = list(new)
    became: dict[int, nn.Module] = {}
    tensors_of = {id(parameter): parameter for parameter in replacing}
    stands: dict[int, nn.Module | None] = {}
    # By the id of a new part: what stands for it already.

    def tensor(own: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        if id(value) not in tensors_of:
            alike = own is not None and type(own) is type(value) and own.is_meta == value.is_meta
            keeps = alike and not is_lazy(value)
            if keeps and own is not None and own is not value:
                give(own, value)
                if own.requires_grad != value.requires_grad:
                    own.requires_grad = value.requires_grad
            tensors_of[id(value)] = own if keeps and own is not None else value
        return tensors_of[id(value)]

    def part(_: object, value: nn.Module | None) -> nn.Module | None:
        if value is None or id(value) in became:
            return None if value is None else became[id(value)]
        own = stands[id(value)]
        result = became[id(value)] = value if own is None else own
        had, has = vars(result).copy(), vars(value).copy()
        for kind in ("_parameters", "_buffers", "_modules"):
            keep: Callable[[Any, Any], Any] = part if kind == "_modules" else tensor
            has[kind] = type(has[kind])((name, keep(had[kind].get(name), held)) for name, held in has[kind].items())
        if own is not None:
            graft_hooks(had, has, hooks_known(own))
            has |= of_one_side(had, has)
        # Past the ways of `nn.Module`, which would see parts registered.
        vars(result).clear()
        vars(result).update(has)
        return result

    with torch.no_grad():
        for parameter, same in moved:
            tensor(same, parameter)
        # First those of what is here: a part that is new may share one (`head.weight = embedding.weight`).
        for value in {id(value): value for module in new for value in module.modules()}.values():
            own = stands[id(value)] = _made_one_of(type(value), here(value))
            if own is not None:
                for kind in ("_parameters", "_buffers"):
                    for name, held in vars(value)[kind].items():
                        tensor(vars(own)[kind].get(name), held)
        for module in new:
            part(None, module)
        for module in became.values():
            _rebind(module, became)
    # No hook tells: another strategy may have the network too, as it was.
    registrations.count += 1
    return became


def _rebind(module: nn.Module, became: dict[int, nn.Module]) -> None:
    """Have methods that a part keeps, as hooks too, and what its functions have captured be of the parts that stay."""
    dicts: list[dict[Any, Any]] = [vars(module), *hook_dicts(module).values()]
    for held in dicts:
        for name, value in list(held.items()):
            for i, one in enumerate(kept(value)):
                if became.get(id(one), one) is not one:
                    held[name] = keeping(held[name], i, became[id(one)])


def _made_one_of(kind: type[nn.Module], module: nn.Module | None) -> nn.Module | None:
    """Return the module, from now on of this class; None where Python does not let it be one.

    Another class is what `parametrizations.weight_norm(layer)` gives the layer, which is the same layer all the same.
    """
    if module is not None and type(module) is not kind:
        try:
            module.__class__ = kind
        except TypeError:
            return None
    return module
