"""The controller's objects that replicas have or will have: handles, who was sent, what is known of their settings.

Holds none of them alive. Knows no replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, final

import torch

from mirror_nb.errors import UsageError
from mirror_nb.mirroring.handles import Handles
from mirror_nb.transfer.told import Groups, Told, take_told


def optimizer_of(obj: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that an object is, or that a scheduler has."""
    found = obj if isinstance(obj, torch.optim.Optimizer) else getattr(obj, "__dict__", {}).get("optimizer")
    return found if isinstance(found, torch.optim.Optimizer) else None


@final
class Objects:
    """Objects made in the scope: their handles, which the replicas have, and what these know of their settings.

    `none_sent()` is called when the last of those is gone that the replicas have; any thread may be the one.
    """

    def __init__(self, none_sent: Callable[[], None] = lambda: None) -> None:
        self._none_sent = none_sent
        self._count = itertools.count()
        self._handles: Handles[Any] = Handles(self._forget)
        self._sent: set[str] = set()
        self._released: list[str] = []
        self._groups: dict[str, Groups] = {}
        # Of each optimizer that was sent, those that it had.
        self._grown_there: set[str] = set()
        # Handles of those that have more in the replicas.
        self._told = Told()
        # The settings that the replicas know.

    def add(self, obj: Any) -> str:
        """Return the object's handle; a new one if it has none."""
        handle = self.handle(obj)
        if handle is None:
            handle = f"o{next(self._count)}"
            self._handles.learn(handle, obj)
        return handle

    def learn(self, handle: str, obj: Any) -> None:
        """From now on this handle, which the replicas have given it, means the object."""
        self._handles.learn(handle, obj)

    def _forget(self, handle: str) -> None:
        self._told.forget(handle)
        self._groups.pop(handle, None)
        self._grown_there.discard(handle)
        if handle in self._sent:
            self._sent.discard(handle)
            self._released.append(handle)
            if not self._sent:
                self._none_sent()

    def handle(self, obj: object) -> str | None:
        """Return the object's handle, if it has one."""
        return self._handles.of(obj)

    def has(self, obj: object) -> bool:
        """Whether the object was made in the scope."""
        return self.handle(obj) is not None

    def all(self) -> list[Any]:
        """Return those that still live, in the order in which they were made."""
        return list(self._handles.all().values())

    def find(self, handle: str) -> Any:
        """Return the object that a handle means, None if it is gone."""
        return self._handles.find(handle)

    @property
    def any_sent(self) -> bool:
        """Whether the replicas have any."""
        return bool(self._sent)

    def is_sent(self, obj: object) -> bool:
        """Whether the replicas have the object."""
        return self.handle(obj) in self._sent

    def same_groups(self, obj: Any) -> bool:
        """Whether an optimizer trains what it did when it was sent, group by group; true of other objects."""
        groups = self._groups.get(self.handle(obj) or "")
        return groups is None or groups.are(obj)

    def grown(self, obj: Any) -> int | None:
        """Return how many groups the replicas have of an optimizer that got more here; None of what got none.

        Of a scheduler it is its optimizer that counts.
        """
        optimizer = optimizer_of(obj)
        if optimizer is None:
            return None
        groups = self._groups.get(self.handle(optimizer) or "")
        return len(groups) if groups is not None and groups.begin(optimizer) and not groups.are(optimizer) else None

    def know_groups(self, optimizer: torch.optim.Optimizer, count: int | None = None) -> None:
        """The replicas' optimizer has these parameter groups, or the first `count` of them."""
        self._groups[self.handle(optimizer) or ""] = Groups(optimizer, count)

    def trained(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
        """Return what the replicas' optimizer trains, in the order of its groups; None for what is gone here."""
        return self._groups.get(self.handle(optimizer) or "", Groups(optimizer)).parameters()

    def check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that lost a parameter here since it was sent: the replicas' has it still."""
        if not self.same_groups(optimizer) and self.grown(optimizer) is None:
            now, sent = len(optimizer.param_groups), len(self._groups[self.handle(optimizer) or ""])
            what = f"{now} parameter groups here" if now != sent else "other parameters here"
            then = f"with {sent}" if now != sent else "with those that it had then"
            raise UsageError(
                f"the {type(optimizer).__name__} has {what}, but was sent to the replicas {then}: "
                "make a new optimizer in the scope"
            )

    def mark_sent(self, obj: Any) -> None:
        """The replicas have the object as it is now."""
        handle = self.add(obj)
        self._sent.add(handle)
        if isinstance(obj, torch.optim.Optimizer):
            self._groups[handle] = Groups(obj)
        self._told.know(handle, obj)

    def forget_sent(self) -> None:
        """The replicas have none any more."""
        self._sent.clear()
        self._groups.clear()
        self._grown_there.clear()
        self._none_sent()

    def take_released(self) -> list[str]:
        """Return, once, the handles of objects that the replicas have and that are gone here."""
        released, self._released = self._released, []
        return released

    def changed_settings(self) -> tuple[tuple[str, Any], ...]:
        """Return the settings that were changed here since the replicas had the same, and whose they are."""
        return self._told.changes(self.find)

    def unsettle(self, obj: Any) -> None:
        """Have the object's settings told anew: those of some replica may be others."""
        self._told.unsettle(self.handle(obj) or "")

    def take_settings(self, handle: str, settings: Any) -> None:
        """A replica's scheduler, for instance, has changed an optimizer's settings, and its own."""
        obj = self.find(handle)
        if obj is not None:
            take_told(obj, settings)
            self._told.know(handle, obj)
            if isinstance(obj, torch.optim.Optimizer) and len(settings[0]) > len(obj.param_groups):
                self.grew_there(obj)

    def grew_there(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has more parameter groups in the replicas than here."""
        self._grown_there.add(self.handle(optimizer) or "")

    def take_grown_there(self) -> list[torch.optim.Optimizer]:
        """Return, once, the optimizers that have more parameter groups in the replicas, and got none here."""
        handles, self._grown_there = self._grown_there, set()
        found = (self.find(handle) for handle in handles)
        return [obj for obj in found if obj is not None and self.same_groups(obj)]
