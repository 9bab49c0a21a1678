"""What travels under each of a replica's names: its value, what stands for one, or word that it stays.

Knows payloads and networks; keeps nothing from one cell to the next.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, final

import torch
from torch import nn

from mirror_nb.distributed import Underway
from mirror_nb.errors import TransferError
from mirror_nb.messages import Export, Imported, KnownModule, NewModule, Plain, Same, Stayed
from mirror_nb.noticing.kinds import goes_by_name
from mirror_nb.noticing.refilling import filling, is_trained
from mirror_nb.readable import size
from mirror_nb.replica.changes import Changes, meant
from mirror_nb.replica.held import Held
from mirror_nb.replica.outgoing import MODULE_BYTES, PLAIN_BYTES, Fresh, Known, Outgoing, is_large, rebuilds
from mirror_nb.tensors.sharded import WHY, has_sharded
from mirror_nb.transfer.pickler import TooLarge, is_nameless
from mirror_nb.transfer.told import is_told, parameters_of


class Holds(Known, Protocol):
    """What the replica has, and the controller of that."""

    trained: set[str]
    # Names by which the controller has tensors, trained and of no network maybe.

    def has(self, obj: object) -> bool:
        """Whether the object lives here, and is no copy that came with a call."""

    def by_themselves(self) -> Iterator[tuple[str, object]]:
        """Yield what has a name and is no network or the like, for which a token stands wherever it is."""


@final
class Exporting:
    """What one cell's names are bound to, for the controller.

    `tag` makes handles that all replicas derive alike; `whole` lifts the size limits: the user asked for it.
    """

    def __init__(self, holds: Holds, changes: Changes, label: str, tag: int, whole: bool) -> None:
        self._holds = holds
        self.changes = changes
        self._label = label
        self._tag = tag
        self._whole = whole
        self._exported: dict[str, Export] = {}
        self.fresh = Fresh()
        # Networks and objects that go with the values.

    def of(self, names: Iterable[str]) -> dict[str, Export]:
        """Return what travels under each of these names."""
        ordered = self._ordered(names)
        holding = self._holding(ordered)
        first: dict[int, str] = {}
        # By the id of a value that travels by itself: the name of it that comes first.
        for name in ordered:
            value = self._value(name)
            if id(value) in first:
                self._exported[name] = Same(first[id(value)])
            else:
                self._export(name, holding)
                if isinstance(self._exported[name], Plain) and goes_by_name(value):
                    first[id(value)] = name
            if is_trained(self._holds.names[name]) and self._is_by_itself(name):
                # Before optimizers, which may have it.
                self._holds.trained.add(name)
        while again := holding.unsettled({*self.changes.standing, *filter(self._is_by_itself, self._exported)}):
            for name in again:
                self._export(name, holding)
        self._leave_out(holding)
        return self._exported

    def _ordered(self, names: Iterable[str]) -> list[str]:
        """Return the names, networks first, since what else has them refers to them, then tensors that are trained.

        Optimizers last: other values may have theirs. Of several names of one value the one first whose value the
        controller has already, and refills.
        """
        refills = self.changes.filled.union(self.changes.refilled)

        def place(name: str) -> tuple[object, ...]:
            value = self._value(name)
            return is_told(value), not isinstance(value, nn.Module), not is_trained(value), name not in refills, name

        return sorted(names, key=place)

    def _holding(self, ordered: Iterable[str]) -> Held:
        changes = self.changes
        plain = [n for n in ordered if not isinstance(self._value(n), nn.Module) and not is_told(self._value(n))]
        # Of one value's names first those by which it stays in the controller what it is.
        inner = [(name, self._value(name)) for name in (*changes.standing, *plain)]
        named = ((name, value) for name, value in inner if goes_by_name(value))
        return Held(named, changes.filled, self._holds.by_themselves() if changes.filled else ())

    def _leave_out(self, holding: Held) -> None:
        """Tell nothing of what the controller keeps as it is there."""
        for name in self.changes.filled:
            if not self._is_by_itself(name) or holding.copies(name):
                self._exported.pop(name, None)
        for name, export in self._exported.items():
            if isinstance(export, Same) and export.name not in self._exported:
                self._export(name, holding)
        for name in self.changes.holding.intersection(self._exported):
            export = self._exported[name]
            if not (isinstance(export, Plain) and export.holds):
                # What has another name now stays here: the controller has the container as it is.
                del self._exported[name]

    def _value(self, name: str) -> Any:
        return meant(self._holds.names[name])

    def _is_by_itself(self, name: str) -> bool:
        """Whether the name's value travels by itself."""
        return isinstance(self._exported.get(name), Plain | Same)

    def _export(self, name: str, holding: Held) -> None:
        self._exported[name] = self.export(name, self._value(name), f"r{self._tag}.{name}", holding)

    def export(self, name: str, value: object, handle: str, holding: Held) -> Export:
        """Return what travels of the value of a name; a network is new under `handle`."""
        if isinstance(value, types.ModuleType) and not is_nameless(value):
            return Imported(value.__name__)
        if not isinstance(value, nn.Module) or type(value) in weakref.ProxyTypes:
            told = (type(value), filling(value)) if name in self.changes.filled else value
            export = self.plain(told, handle, holding.inside(name, value))
            return dataclasses.replace(export, holds=holding.uses(name)) if isinstance(export, Plain) else export
        mirrors = self._holds.mirrors
        if has_sharded(value):
            # What the controller has of it, from before, is not what it is now.
            mirrors.unmark(value)
            return stayed(value, WHY, for_good=True)
        known = mirrors.known(value)
        if known is not None:
            return KnownModule(known)
        if not self._whole and is_large(value):
            return stayed(value, f"it is larger than {size(MODULE_BYTES)}")
        if not rebuilds(value, self._holds.names, self._label):
            return stayed(value, "it cannot be made again from what pickle makes of it", for_good=True)
        handle = mirrors.name(value, handle)
        self.fresh.add_network(handle, value, self._holds)
        return NewModule(handle)

    def plain(self, value: object, handle: str, held: Callable[[object], Any] = lambda obj: None) -> Plain | Stayed:
        """Return what travels of a value that is no network; see `Outgoing` for `held`."""
        on_gpu = isinstance(value, torch.Generator) and value.device.type != "cpu"
        if on_gpu and not self._whole and not self._holds.has(value):
            # The notebook would need a GPU for it.
            return stayed(value, "it belongs to the replica")
        if isinstance(value, Underway):
            return stayed(value, "its batches are loaded there", for_good=True)
        outgoing = Outgoing(self._holds, self._label, self.fresh, handle, self._whole, held)
        try:
            payload = outgoing.pack(value)
            refused = outgoing.refused(value)
            if not self._whole and refused is not None:
                return stayed(value, refused)
            self.fresh.add(outgoing.found)
            return Plain(payload)
        except TooLarge:
            return stayed(value, f"it is larger than {size(PLAIN_BYTES)}")
        except (TransferError, RecursionError) as reason:
            return stayed(value, str(reason), for_good=True)


def stayed(value: object, why: str, for_good: bool = False) -> Stayed:
    """Return word that a value stays in the replica; `for_good`: it cannot be fetched, either."""
    return Stayed(type(value).__name__, describe(value), why, for_good=for_good)


def describe(value: object) -> str:
    """Return a few words on a value, without running its repr: that may be long, slow or wrong."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        shape = "nested" if value.is_nested else tuple(value.shape)
        return f"{name} {shape} {str(value.dtype).removeprefix('torch.')} on {value.device}"
    if isinstance(value, torch.optim.Optimizer):
        return f"{name} over {len(parameters_of(value))} tensors"
    if isinstance(value, (list, tuple, dict, set, str, bytes)):
        return f"{name} of {len(value)}"
    return name
