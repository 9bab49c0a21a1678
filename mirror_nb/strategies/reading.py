"""Networks of the controller whose values live in the replicas: reading one brings them here first.

    model(x), model.state_dict(), model.parameters(), model.fc.weight, copy.deepcopy(model), optimizer.state

Gradients stay there, and are cleared there too: model.zero_grad(), optimizer.zero_grad().

Training steps must not pay for values that nobody reads, so nothing is brought back before. Knows networks and
whom to ask; knows no replicas.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import nn

from mirror_nb.environment.replaced import Replaced

_READS = ("__call__", "state_dict", "_apply", "__reduce_ex__", "train", "__delattr__")
# All that leads to a network's tensors: attributes, what state_dict and parameters() are made of, moves, copies. And
# what sets its mode, which is a change or none by the mode that it has in the replicas, or takes parts away: there may
# be others there. A forward pass may begin with plain attributes, which come along. `__getattr__` is one more.
_READS_OF_PARTS = ("named_parameters", "named_buffers", "load_state_dict")
# These read parts, or write to some of them, without a call of theirs: one may be in the replicas where the whole is
# not.


class Holder(Protocol):
    """Who has the values."""

    stale: bool
    # Whether the networks here may be behind.

    def holds(self, module: nn.Module) -> bool:
        """Whether this holder has the values of this network."""

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this holder has the optimizer, or at least its network."""

    def refresh(self) -> None:
        """Bring the networks here up to date; `stale` is False afterwards."""

    def clear_gradients(self, owner: Any, set_to_none: bool) -> None:
        """Do as `owner.zero_grad(set_to_none)` did here; nothing for what this holder has not."""


@final
class Reading:
    """Watches the reads of all networks of the process, for as long as there are holders."""

    def __init__(self) -> None:
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kept: set[Holder] = set()
        self._changes: list[Replaced] = []

    def add(self, holder: Holder, *, keep: bool = False) -> None:
        """Ask this holder from now on; `keep` it, whoever drops it: networks live here whose values it alone has."""
        self._holders.add(holder)
        if keep:
            self._kept.add(holder)
        if not self._changes:
            self._changes = [Replaced(nn.Module, "__getattr__", instead=self._attribute)]
            self._changes += [Replaced(nn.Module, name, before=self._read) for name in _READS]
            self._changes += [Replaced(nn.Module, name, before=self._read_parts) for name in _READS_OF_PARTS]
            for owner in (nn.Module, torch.optim.Optimizer):
                self._changes.append(Replaced(owner, "zero_grad", after=self._cleared))

    def remove(self, holder: Holder) -> None:
        """Ask this holder no more."""
        self.release(holder)
        self._holders.discard(holder)
        if not self._holders:
            while self._changes:
                self._changes.pop().remove()

    def release(self, holder: Holder) -> None:
        """Keep this holder no more: all that it had is gone here. Any thread may say so at any time."""
        self._kept.discard(holder)

    def bring(self, module: nn.Module) -> None:
        """Bring a network here up to date, as reading it does."""
        self._read_parts(module)

    def bring_trained(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring here what an optimizer trains: by its groups one comes to parameters past the networks' methods."""
        for holder in list(self._holders):
            if holder.stale and holder.trains(optimizer):
                holder.refresh()

    def _read(self, module: nn.Module, *_: object, **__: object) -> None:
        # A list: refreshing may add and remove holders.
        for holder in list(self._holders):
            if holder.stale and holder.holds(module):
                holder.refresh()

    def _attribute(self, get: Callable[[nn.Module, str], Any], module: nn.Module, name: str) -> Any:
        __tracebackhide__ = True
        self._read(module)
        # Torch looks for parts alone: what a replica was the first to set has come just now.
        own = module.__dict__
        return own[name] if name in own else get(module, name)

    def _read_parts(self, module: nn.Module, *_: object, **__: object) -> None:
        for holder in list(self._holders):
            if holder.stale and any(map(holder.holds, module.modules())):
                holder.refresh()

    def _cleared(self, owner: Any, set_to_none: bool = True) -> None:
        for holder in list(self._holders):
            holder.clear_gradients(owner, set_to_none)


reading = Reading()
# One for the process, as the methods of nn.Module are.
