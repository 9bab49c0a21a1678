"""What a replica gives its controller for the first time: networks, optimizers and the like, also inside values.

    a value ─▶ its pickle, with a token in the place of each of them
    each network, optimizer, scheduler, scaler ─▶ goes by itself, once, under a handle that all replicas derive alike

Knows payloads and networks; knows no names.
"""

from __future__ import annotations

import os
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import nn

from mirror_nb.errors import TransferError
from mirror_nb.mirroring.mirrors import Mirrors
from mirror_nb.mirroring.networks import all_parameters, tensors
from mirror_nb.noticing.refilling import LOOSE, values_of
from mirror_nb.replica.objects import Objects
from mirror_nb.tensors.layouts import nbytes
from mirror_nb.tensors.sharded import has_sharded
from mirror_nb.transfer.keras_objects import reduce_keras
from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.packing import pack
from mirror_nb.transfer.parametrized import reduce_parametrized
from mirror_nb.transfer.payload import Payload
from mirror_nb.transfer.pickler import TooLarge
from mirror_nb.transfer.told import is_told

PLAIN_BYTES = 1 << 20
# A plain value above this stays in the replica and is fetched on request.
MODULE_BYTES = 2 << 30
# Likewise a network: copying it after every cell would take longer than most cells.

_BY_NAME_ALONE = (list, dict, set, tuple, type, types.FunctionType)
# Values of these have no other tokens.
_BELONGS = "it belongs to the replica"


@dataclass(slots=True)
class Fresh:
    """What the controller has not got and is about to be given, by handle."""

    networks: dict[str, nn.Module] = field(default_factory=dict)
    objects: dict[str, tuple[Any, Payload]] = field(default_factory=dict)
    # Optimizers, schedulers and scalers, and what travels of them; each after those that it refers to.
    inside: dict[str, Any] = field(default_factory=dict)
    # Those that networks among these have as attributes, and that travel with them.
    _places: dict[int, tuple[nn.Module, str]] = field(default_factory=dict)
    # By the ids of the networks' parts and parameters: the part, and of a parameter its name there. An optimizer asks
    # for each of thousands.

    def add(self, more: Fresh) -> None:
        """Take over what was found elsewhere."""
        self.networks.update(more.networks)
        self._places = {**more._places, **self._places}
        self.objects.update(more.objects)
        self.inside.update(more.inside)

    def add_network(self, handle: str, network: nn.Module, known: Known) -> None:
        """Add a network with the optimizers over its parameters, their schedulers and the scalers that it has."""
        self.networks[handle] = network
        for part in network.modules():
            self._places.setdefault(id(part), (part, ""))
        for part, name, parameter in all_parameters([network]):
            self._places.setdefault(id(parameter), (part, name))
        own = {id(parameter) for parameter in network.parameters()}
        same: set[int] = set()
        for path, obj in sorted(
            told_inside(network), key=lambda found: not isinstance(found[1], torch.optim.Optimizer)
        ):
            groups = obj.param_groups if isinstance(obj, torch.optim.Optimizer) else []
            needs = [parameter for group in groups for parameter in group["params"] if id(parameter) not in own]
            needs += [one for one in getattr(obj, "__dict__", {}).values() if is_told(one) and id(one) not in same]
            if known.reference(obj) is None and all(known.reference(one) is not None for one in needs):
                same.add(id(obj))
                self.inside[f"{handle}:{path}"] = obj

    def has(self, part: nn.Module | None) -> bool:
        """Whether it is one of these networks, or a part of one."""
        return id(part) in self._places

    def token(self, obj: object, handle: Callable[[nn.Module], str | None]) -> Any:
        """Return what stands for one of these or for a parameter of one, else None; `handle` tells a network's."""
        if is_told(obj):
            given = [*((own, other) for own, (other, _) in self.objects.items()), *self.inside.items()]
            return next((("object", own) for own, other in given if other is obj), None)
        part, name = self._places.get(id(obj), (None, ""))
        if part is None:
            return None
        return ("parameter", handle(part), name) if name else ("module", handle(part))


class Known(Protocol):
    """What the controller has."""

    names: MutableMapping[str, Any]
    # Which functions of cells look up, there as here.
    mirrors: Mirrors
    objects: Objects

    def reference(self, obj: object) -> Any:
        """For `pack`: what stands for an object that the controller has as it is, else None."""

    def trained_by_name(self, obj: object) -> Any:
        """For `pack`: what stands for a tensor of no network that the controller has by its name, else None."""


@final
class Outgoing:
    """One value that travels under `handle`, and what it brings into `found`; `whole` lifts the size limits.

    `held(obj)` gives a token for what the value holds of other names, None for all else.
    """

    def __init__(
        self, known: Known, label: str, fresh: Fresh, handle: str, whole: bool, held: Callable[[object], Any]
    ) -> None:
        self.found = Fresh()
        self.found.add(fresh)
        self._known, self._label, self._handle, self._whole, self._held = known, label, handle, whole, held
        self._count = 0
        self._refused: list[tuple[object, str]] = []
        # Optimizers and the like that cannot be the same on both sides, and why; in values they travel as copies.
        self._underway: list[object] = []
        self._tokens: dict[int, Any] = {}
        # By the ids of tensors that optimizers train: wherever the value has one, it is the same.

    def pack(self, value: object) -> Payload:
        """Return the value's payload. Raises TooLarge, TransferError, RecursionError."""
        networks = len(self.found.networks)
        payload = self._packed(value, self._outer, containers=True)
        while self._refused and len(self.found.networks) > networks:
            # Networks came to light after what trains them.
            networks = len(self.found.networks)
            self._refused.clear()
            payload = self._packed(value, self._outer, containers=True)
        return payload

    def refused(self, value: object) -> str | None:
        """Return why an optimizer or the like cannot be the same on both sides, None of what can."""
        return next((why for obj, why in self._refused if value is obj), None)

    def _packed(
        self, value: object, reference: Callable[[object], Any], states: bool = True, containers: bool = False
    ) -> Payload:
        return pack(
            value,
            namespace=self._known.names,
            reference=reference,
            limit=None if self._whole else PLAIN_BYTES,
            in_band=True,
            label=self._label,
            states=states,
            containers=containers,
            classes=containers,
        ).payload

    def _outer(self, obj: object) -> Any:
        # Optimizers come before other values, and take none of these by its name.
        if type(obj) in _BY_NAME_ALONE:
            return self._held(obj)
        return self._held(obj) or self._reference(obj) or self._trained(obj)

    def _trained(self, obj: object) -> Any:
        """Return what stands, with its values, for a tensor that an optimizer of the controller's trains."""
        place = self._known.objects.trained(obj) if type(obj) in LOOSE else None
        return None if place is None else self._tokens.setdefault(id(obj), (*place, values_of(obj)))

    def _reference(self, obj: object) -> Any:
        token = self._known.reference(obj)
        if isinstance(obj, nn.Parameter) and token is not None and self.found.has(self._known.mirrors.find(token[1])):
            # That place is another's, once the controller has taken the network.
            token = None
        token = token or self.found.token(obj, self._known.mirrors.find_handle)
        if token is not None:
            return token
        if is_told(obj):
            return self._lend(obj)
        if not isinstance(obj, nn.Module) or type(obj) in weakref.ProxyTypes:
            return None
        if has_sharded(obj) or (not self._whole and is_large(obj)):
            return None
        if not rebuilds(obj, self._known.names, self._label):
            return None
        own = self._known.mirrors.name(obj, self._number())
        self.found.add_network(own, obj, self._known)
        return ("module", own)

    def _number(self) -> str:
        # By its place in this value: what else replicas have may differ.
        self._count += 1
        return f"{self._handle}.{self._count}"

    def _lend(self, obj: Any) -> Any:
        """Return a token for an optimizer, a scheduler or a scaler of networks that the controller has or gets."""
        handle = self._known.objects.handle(obj) or self._number()
        groups = obj.param_groups if isinstance(obj, torch.optim.Optimizer) else []
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        why = _BELONGS

        def inner(part: object) -> Any:
            nonlocal why
            if part is obj:
                return None
            token = None if any(part is other for other in self._underway) else self._reference(part)
            if token is None and id(part) in trained:
                token = self._known.objects.trained(part)
            token = token or self._known.trained_by_name(part)
            if token is None and (id(part) in trained or is_told(part)):
                # Here and there it would be two.
                nameless = "it is over a tensor that has no name of its own and is no network's"
                why = f"{_BELONGS}{f': {nameless}' if id(part) in trained else f', as {type(part).__name__} does'}"
                raise TransferError(why)
            return token

        self._underway.append(obj)
        try:
            payload = self._packed(obj, inner, states=False)
        except (TransferError, TooLarge, RecursionError):
            self._refused.append((obj, why))
            return None
        finally:
            self._underway.pop()
        self.found.objects[handle] = obj, payload
        return ("object", handle)


def told_inside(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers, schedulers and scalers that a network's parts have as attributes, or in lists or dicts."""
    for path, part in network.named_modules():
        stays = getattr(type(part), "_OF_ONE_PROCESS", ())
        for name, value in [item for item in vars(part).items() if item[0] not in stays]:
            items = (
                value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()
            )
            for key, one in [("", value), *items]:
                if is_told(one):
                    yield f"{path}.{name}.{key}", one


def rebuilds(network: nn.Module, namespace: MutableMapping[str, Any], label: str) -> bool:
    """Whether what pickle makes of a network can be opened again, where one of its parts has a say in that.

    The network that `torch.export` makes has, and cannot; the controller opens all that a replica sends at once.
    """
    if all(_pickles_plainly(part) for part in network.modules()):
        return True
    try:
        packed = pack(network, namespace=namespace, label=label)
    except TransferError:
        # Who packs it for good says so.
        return True
    try:
        unpack(packed.payload, None if packed.slab is None else os.dup(packed.slab), namespace=namespace)
    except Exception:
        return False
    finally:
        packed.close()
    return True


def _pickles_plainly(part: nn.Module) -> bool:
    kind = type(part)
    # Not object's: in the controller's process those of modules are watched.
    own = kind.__reduce__ is not nn.Module.__reduce__ or kind.__reduce_ex__ is not nn.Module.__reduce_ex__
    return not own or reduce_keras(part) is not None or reduce_parametrized(part) is not None


def is_large(network: nn.Module) -> bool:
    """Whether a network stays in the replica for its size."""
    return sum(nbytes(tensor) for _, tensor in tensors(network)) > MODULE_BYTES
