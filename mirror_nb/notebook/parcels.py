"""What a cell needs sent, packed so that what the replicas have already stays the objects that they have.

Knows payloads and networks; `Sides` says what the replicas have.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping, MutableMapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, cast, final

import torch
from torch import nn

from mirror_nb.errors import TransferError
from mirror_nb.messages import Changed, Setting, travels
from mirror_nb.mirroring.mirrors import Mirrors
from mirror_nb.notebook.lent import Lent
from mirror_nb.noticing.insides import inside
from mirror_nb.noticing.kinds import goes_by_name
from mirror_nb.noticing.refilling import LOOSE, filling, is_refillable, is_trained, values_of
from mirror_nb.transfer.packing import Begins, pack
from mirror_nb.transfer.payload import Packed
from mirror_nb.transfer.told import parameters_of


@dataclass(slots=True)
class Parcel:
    """What one group of replicas is sent before a cell."""

    replicas: tuple[int, ...]
    names: dict[str, object]
    packed: Packed
    modules: list[nn.Module]
    # The networks in it and their parts, however deep inside a value.
    lent: list[Any]
    # The optimizers, schedulers and scalers in it, likewise.
    beside: frozenset[str] = frozenset()
    # Those of the names that the cell does not need, but whose values lie in the values of others.
    settings: frozenset[str] = frozenset()
    # Those of objects of which only some attributes are sent.


class Sides(Protocol):
    """What replicas have of the notebook's values."""

    def reference(self, obj: object, replicas: tuple[int, ...]) -> Any:
        """Return what stands for a network, an optimizer or a stand-in that all of these have, else None."""

    def travels(self, name: str) -> bool:
        """Whether a name's value can be sent at all."""

    def lacked(self, name: str, replicas: tuple[int, ...]) -> bool:
        """Whether one of these lacks what the name has now, and can be sent it."""

    def was_sent(self, name: str, replicas: tuple[int, ...]) -> bool:
        """Whether all of these have the name's object, as it was sent to them."""

    def holding(self, tensors: Set[int], replicas: tuple[int, ...]) -> set[str]:
        """Return names that all of these have as they were sent, and whose values hold tensors with these ids."""

    def setting(self, name: str, replicas: tuple[int, ...]) -> Setting | None:
        """Return the attributes to send of an object that these have changed, too; None for others."""


@dataclass(slots=True)
class _Found:
    """What one packing comes upon."""

    modules: list[nn.Module] = field(default_factory=list)
    lent: list[Any] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    # Those that the replicas have not, and other tensors that are trained.
    names: set[str] = field(default_factory=set)
    # Names of values inside what is sent, that the replicas lack and are to know by these names.


@final
class Parcels:
    """Packs names of the notebook for replicas."""

    def __init__(self, user_ns: MutableMapping[str, Any], mirrors: Mirrors, lent: Lent, sides: Sides) -> None:
        self._user_ns = user_ns
        self._mirrors = mirrors
        self._lent = lent
        self._sides = sides

    def made(
        self, lacking: frozenset[str], replicas: tuple[int, ...], unsure: Set[str], kept: dict[str, str]
    ) -> Parcel:
        """Pack these names for these replicas, and those that their values turn out to need.

        Raises TransferError for one that cannot be packed; of those that it is `unsure` whether the cell reads them,
        the reason is put into `kept`, and the others go.
        """
        beside: frozenset[str] = frozenset()
        while True:
            values = {name: self._user_ns[name] for name in sorted(lacking)}
            found = _Found()
            settings = {n: given for n in values if (given := self._sides.setting(n, replicas)) is not None}
            sent_before = frozenset(n for n in values if n in settings or self._sides.was_sent(n, replicas))
            # What holds these there is to see the change.
            again = {n: v for n, v in values.items() if n in sent_before and is_refillable(v)}
            fillings = {name: filling(value) for name, value in again.items() if name not in settings}
            named = _so_that_it_is_told(values)
            told = _so_that_it_is_told(fillings), _so_that_it_is_told(settings)
            sent = Changed(named, sent_before, *told) if sent_before else named
            try:
                packed = self._pack(sent, replicas, found, values, again)
            except TransferError:
                name, reason = self._culprit(values, replicas)
                # What comes a second time is needed by another name's value.
                if name not in unsure or name in kept:
                    raise TransferError(reason) from None
                kept[name] = reason
                lacking -= {name}
                continue
            # Methods of classes deep inside a value may read names that no one has seen yet.
            needed = packed.global_names | self._owners(found) | found.names
            more = {name for name in needed - lacking if self._sides.lacked(name, replicas)}
            # There as here they are to hold what an optimizer trains that they have not got.
            more |= self._sides.holding(self._loose(found), replicas) - lacking
            if not more:
                return Parcel(replicas, values, packed, found.modules, found.lent, beside, frozenset(settings))
            packed.close()
            lacking |= more
            beside |= more & found.names

    def _pack(
        self,
        sent: object,
        replicas: tuple[int, ...],
        found: _Found,
        values: Mapping[str, object] = types.MappingProxyType({}),
        again: Mapping[str, object] = types.MappingProxyType({}),
    ) -> Packed:
        """Pack what is sent: names with these `values`; of those of `again` replicas have what they had earlier."""
        own = {id(value) for value in values.values()}
        # A value that is sent may have another name, by which the replicas have it.
        named = {
            id(value): name
            for name, value in list(self._user_ns.items())
            if name not in values and (id(value) not in own or self._is_there(name, value, replicas))
        }
        there = {id(value): ("changed", name, type(value)) for name, value in again.items()}
        # Objects may be many that have one class.
        lacked = functools.cache(lambda name: self._sides.lacked(name, replicas))
        trained = functools.cache(lambda: self._trained(replicas))
        tokens: dict[int, Any] = {}

        def reference(obj: object) -> Any:
            token = there.get(id(obj)) or self._sides.reference(obj, replicas)
            if token is not None:
                return token
            name = named.get(id(obj))
            if name is not None and self._is_named(name, obj):
                if not lacked(name):
                    return ("name", name, name)
                found.names.add(name)
            if type(obj) in LOOSE and (place := trained().get(id(obj))) is not None:
                return tokens.setdefault(id(obj), (*place, values_of(obj)))
            if isinstance(obj, nn.Parameter) or is_trained(obj):
                found.parameters.append(cast(torch.Tensor, obj))
            return None

        def handle(module: nn.Module) -> str:
            found.modules.append(module)
            return self._mirrors.handle(module)

        def lend(obj: Any) -> str:
            found.lent.append(obj)
            return self._lent.add(obj)

        return pack(
            sent, namespace=self._user_ns, reference=reference, handle=handle, lend=lend, containers=True, classes=True
        )

    def _is_there(self, name: str, value: object, replicas: tuple[int, ...]) -> bool:
        return goes_by_name(value) and (
            self._sides.was_sent(name, replicas)
            or (self._sides.travels(name) and not self._sides.lacked(name, replicas))
        )

    def _is_named(self, name: str, obj: object) -> bool:
        return goes_by_name(obj) and not isinstance(obj, nn.Module) and self._sides.travels(name)

    def _trained(self, replicas: tuple[int, ...]) -> dict[int, tuple[str, str, int]]:
        """Return what stands for each tensor of no network that optimizers of the replicas train, by its id."""
        own = self._of_networks()
        return {key: place for key, place in self._lent.trained_in(replicas).items() if key not in own}

    def _loose(self, found: _Found) -> set[int]:
        """Return the ids of tensors of no network that the optimizers which are sent train."""
        optimizers = [obj for obj in found.lent if isinstance(obj, torch.optim.Optimizer)]
        trained = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
        loose = trained.intersection(map(id, found.parameters))
        return loose - self._of_networks() if loose else loose

    def _of_networks(self) -> set[int]:
        networks = self._mirrors.all().values()
        return {id(parameter) for network in networks for parameter in network._parameters.values()}

    def _owners(self, found: _Found) -> set[str]:
        """Return names with networks that have one of the parameters found, other than the networks that are sent.

        An optimizer that went alone would be over copies of its network's parameters.
        """
        loose = {id(parameter) for parameter in found.parameters}
        loose -= {id(parameter) for module in found.modules for parameter in module._parameters.values()}
        owners = set()
        # Networks first: what holds one need not be sent for it if it has a name.
        for held in (_itself, _held) if loose else ():
            theirs = set()
            for name, value in list(self._user_ns.items()):
                some = {id(parameter) for network in held(value) for parameter in network.parameters()} & loose
                if some and travels(name):
                    owners.add(name)
                    theirs |= some
            loose -= theirs
        return owners

    def _culprit(self, values: Mapping[str, object], replicas: tuple[int, ...]) -> tuple[str, str]:
        """Return the first name that cannot be sent, and why."""
        for name, value in values.items():
            try:
                self._pack(value, replicas, _Found()).close()
            except TransferError as reason:
                return name, (
                    f"`{name}` ({type(value).__name__}) cannot be sent to the replicas: {reason.__cause__ or reason}. "
                    f"Make it inside the %%mirrored cell, or give the cell something that can be pickled."
                )
        return "", f"these names cannot be sent together: {', '.join(values)}"


def _so_that_it_is_told(values: Mapping[str, Any]) -> dict[Any, Any]:
    """Return values by their names, for a payload: a replica that cannot rebuild one says which."""
    return {Begins(name): value for name, value in values.items()}


def _is_network(value: object) -> TypeGuard[nn.Module]:
    # By its class: a proxy may raise whatever it is asked.
    return issubclass(type(value), nn.Module)


def _itself(value: object) -> Iterable[nn.Module]:
    return [value] if _is_network(value) else []


def _held(value: object) -> Iterable[nn.Module]:
    return cast(Iterable[nn.Module], inside(value, _is_network))
