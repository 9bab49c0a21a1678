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
from mirror_nb.variables import is_apart


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
    offers: Sequence[Offer],
    values: Sequence[Values] = (),
    together: Sequence[Values] = (),
    doubted: Collection[str] = (),
) -> list[tuple[tuple[str, int], ...]]:
    """For each parameter that is offered, its key (name, ordinal) on every replica; replica 0's order first.

    The same ordinal is the same parameter where all replicas made equally many of that name; of `doubted` names only
    where values do not tell better: a replica may have got some later than the others. Where one made more (a module
    for itself) or fewer (a new process), those of equal values are matched if all that are used have their like on
    every replica. Else they are matched in order if all used equally many. Else those that are left of `no_sync` are
    nobody else's: they have no key, the others are matched, and UsageError says of which that is impossible.

    Args:
        values: of the parameters by themselves, for names of which some replica made more.
        together: with those of their modules, which tell better: many a bias is zeros.
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
        there, apart = ([of_replica.get(group, {}) for of_replica in each] for each in (together, values))
        if made_alike(offers, name):
            columns = _by_value([offer.used(group) for offer in offers], there)
            if columns is None:
                columns = [(ordinal,) * len(offers) for offer in offers for ordinal in offer.used(group)]
        else:
            columns = _columns([offer.used(group) for offer in offers], there, apart)
            if columns is None:
                columns = _columns([offer.used(group, left=False) for offer in offers], there, apart)
            if columns is None:
                raise UsageError(_mismatch(name, shape, [offer.registered.get(name, 0) for offer in offers]))
        for column in columns:
            matched[name, *column] = tuple((name, ordinal) for ordinal in column)
    return list(matched.values())


def _columns(used: list[list[int]], *values: list[dict[int, list[int]]]) -> list[tuple[int, ...]] | None:
    """Return the ordinals by replica of every parameter that is used; None where it is not clear which is which."""
    columns = next((found for each in values if (found := _by_value(used, each)) is not None), None)
    if columns is None and len({len(ordinals) for ordinals in used}) == 1:
        columns = list(zip(*map(sorted, used), strict=True))
    return columns


def _by_value(used: list[list[int]], values: list[dict[int, list[int]]]) -> list[tuple[int, ...]] | None:
    """Return the ordinals by replica of every parameter that one used; None if one lacks its like somewhere."""
    found: dict[tuple[int, ...], None] = {}
    for checksum in dict.fromkeys(checksum for there in values for checksum in there):
        everywhere = [there.get(checksum, []) for there in values]
        in_use = [[n for n in mine if n in others] for mine, others in zip(used, everywhere, strict=True)]
        if any(in_use):
            columns = _equal_ones(everywhere, in_use)
            if columns is None:
                return None
            found.update((column, None) for column in columns)
    return list(found) if values else None


def _equal_ones(everywhere: list[list[int]], in_use: list[list[int]]) -> list[tuple[int, ...]] | None:
    """Return which of equal parameters, a network's and its copy's say, are alike; None where that is not clear.

    The first that is used is like the first that is used elsewhere. Where not all used equally many, the first is
    like the first: of as many as there are, or where a replica has made some for itself, of those that are used.
    """
    most = max(map(len, in_use))
    if len(set(map(len, in_use))) == 1:
        return list(zip(*in_use, strict=True))
    if len(set(map(len, everywhere))) > 1:
        # Who used fewer has to have no others: any of them may be the one that is used elsewhere.
        everywhere = [
            sorted(mine) if len(mine) == most else there for mine, there in zip(in_use, everywhere, strict=True)
        ]
        if any(len(there) != most for there in everywhere):
            return None
    return [
        column
        for column in zip(*everywhere, strict=True)
        if any(n in mine for n, mine in zip(column, in_use, strict=True))
    ]


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
        (values,) = [0] if is_apart(parameter) else checksums([parameter])
        kinds = parameter.dtype, parameter.device.type, gradient_dtype(parameter)
        return Portrait(shape, *kinds, values, is_sparse(parameter.grad))


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's gradients: its own, unless the user has said another."""
    said: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if said is None else said


def is_sparse(gradient: Tensor | None) -> bool:
    """Whether a gradient is of some rows only, as `nn.Embedding(sparse=True)` makes them."""
    return gradient is not None and gradient.layout is torch.sparse_coo
