"""Which parameters of the replicas are the same one: by how many were made, by their values, by the order of use.

Knows what replicas tell each other of parameters. Knows nothing of gradients, nor of how that travels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from mirror_nb.errors import UsageError
from mirror_nb.tensors.checksums import checksums


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """What one replica brings when parameters are agreed on."""

    unknown: tuple[tuple[str, int, tuple[int, ...], str], ...]  # name, ordinal, shape, dtype; in the order of use
    registered: dict[str, int]  # how many parameters of each name it ever tracked
    dead: frozenset[int]  # agreed numbers whose parameters are gone here
    left: frozenset[tuple[str, int]] = frozenset()  # of the unknown, what `no_sync` alone accumulated: name, ordinal

    def used(self, group: Group, left: bool = True) -> list[int]:
        """Return the ordinals of what is unknown of a group, in the order of use; without what is `left` for False."""
        found = (entry for entry in self.unknown if (entry[0], *entry[2:]) == group)
        return [entry[1] for entry in found if left or entry[:2] not in self.left]


Group = tuple[str, tuple[int, ...], str]
# Name, shape, dtype.

# By group, then by checksum: the ordinals of the parameters that one replica has.
Values = dict[Group, dict[int, list[int]]]


def made_alike(offers: Sequence[Offer], name: str) -> bool:
    """Whether all replicas made equally many of that name, so that the same ordinal is the same parameter."""
    return len({offer.registered.get(name, 0) for offer in offers}) == 1


def match(
    offers: Sequence[Offer], values: Sequence[Values] = (), doubted: Collection[str] = ()
) -> list[tuple[tuple[str, int], ...]]:
    """For each parameter that is offered, its key (name, ordinal) on every replica; replica 0's order first.

    The same ordinal is the same parameter where all replicas made equally many of that name; of `doubted` names only
    where `values` do not tell better: a replica may have got some later than the others. Where one made more (a module
    for itself) or fewer (a new process), those of equal `values` are matched if all that are used have their like on
    every replica. Else they are matched in order if all used equally many. Else those that are left of `no_sync` are
    nobody else's: they have no key, the others are matched, and UsageError says of which that is impossible.
    """
    matched: dict[tuple[Any, ...], tuple[tuple[str, int], ...]] = {}
    contested: dict[Group, None] = {}
    for offer in offers:
        for name, ordinal, shape, dtype in offer.unknown:
            if made_alike(offers, name) and name not in doubted:
                matched.setdefault((name, ordinal), ((name, ordinal),) * len(offers))
            else:
                contested[name, shape, dtype] = None
    for group in contested:
        name, shape, _ = group
        there = [of_replica.get(group, {}) for of_replica in values]
        if made_alike(offers, name):
            columns = _by_value([offer.used(group) for offer in offers], there)
            if columns is None:
                columns = [(ordinal,) * len(offers) for offer in offers for ordinal in offer.used(group)]
        else:
            columns = _columns([offer.used(group) for offer in offers], there)
            if columns is None:
                columns = _columns([offer.used(group, left=False) for offer in offers], there)
            if columns is None:
                raise UsageError(_mismatch(name, shape, [offer.registered.get(name, 0) for offer in offers]))
        for column in columns:
            matched[name, *column] = tuple((name, ordinal) for ordinal in column)
    return list(matched.values())


def _columns(used: list[list[int]], values: list[dict[int, list[int]]]) -> list[tuple[int, ...]] | None:
    """Return the ordinals by replica of every parameter that is used; None where it is not clear which is which."""
    columns = _by_value(used, values)
    if columns is None and len({len(ordinals) for ordinals in used}) == 1:
        columns = list(zip(*map(sorted, used), strict=True))
    return columns


def _by_value(used: list[list[int]], values: list[dict[int, list[int]]]) -> list[tuple[int, ...]] | None:
    """Return the ordinals by replica of every parameter that one used; None if one lacks its like somewhere.

    Of equal ones, a network's and its copy's say, the first that is used is like the first that is used elsewhere;
    where not all used equally many, the first is like the first.
    """
    found: dict[tuple[int, ...], None] = {}
    for i, mine in enumerate(values):
        for checksum, alike in mine.items():
            if set(alike).isdisjoint(used[i]):
                continue
            everywhere = [there.get(checksum, []) for there in values]
            if {len(others) for others in everywhere} != {len(alike)}:
                return None
            in_use = [[n for n in mine if n in others] for mine, others in zip(used, everywhere, strict=True)]
            if len(set(map(len, in_use))) == 1:
                everywhere = in_use
            found.update((column, None) for column in zip(*everywhere, strict=True) if column[i] in used[i])
    return list(found) if values else None


def _mismatch(name: str, shape: tuple[int, ...], made: list[int]) -> str:
    counts = ", ".join(f"{count} on replica {i}" for i, count in enumerate(made))
    return (
        f"the replicas train different modules: a parameter {name} of shape {shape} got a gradient, and of that "
        f"name there were made {counts}; create modules on every replica alike (not under `if replica_id == "
        "...`), or train without synchronisation (--no-sync)"
    )


@final
@dataclass(frozen=True, slots=True)
class Portrait:
    """A parameter as the other replicas see it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    gradient: torch.dtype
    checksum: int
    sparse: bool  # the gradient that it has

    @property
    def form(self) -> str:
        of = "" if self.gradient is self.dtype else f" with gradients of {self.gradient}"
        return f"{self.dtype} {self.shape} on {self.device_type}{of}"

    @staticmethod
    def of(parameter: nn.Parameter) -> Portrait:
        shape = tuple(parameter.shape)
        (values,) = checksums([parameter])
        kinds = parameter.dtype, parameter.device.type, gradient_dtype(parameter)
        return Portrait(shape, *kinds, values, is_sparse(parameter.grad))


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's gradients: its own, unless the user has said another."""
    said: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if said is None else said


def is_sparse(gradient: Tensor | None) -> bool:
    """Whether a gradient is of some rows only, as `nn.Embedding(sparse=True)` makes them."""
    return gradient is not None and gradient.layout is torch.sparse_coo
