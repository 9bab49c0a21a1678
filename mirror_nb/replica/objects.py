"""Optimizers, schedulers and scalers that the controller has too: those it sent, and those that cells made here.

The former live as long as the controller has them, the latter as long as the cells do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn

from mirror_nb.errors import TransferError
from mirror_nb.mirroring.handles import Handles
from mirror_nb.noticing.refilling import is_trained
from mirror_nb.transfer.told import Groups, Told, is_told, parameters_of, take_told


@final
class Objects:
    """What the controller mirrors besides networks, by handle, and what it knows of their settings."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self._made: Handles[Any] = Handles(self._forget)
        self._told = Told()
        self._groups: dict[str, Groups] = {}
        # Which parameter groups the controller's optimizers have.
        self._places: dict[int, tuple[weakref.ref[torch.Tensor], Any]] | None = None
        # What stands for each tensor in these, by its id; None where it is to be found anew.
        self._gone: list[str] = []
        self._undelivered: set[str] = set()
        # Handles of those that the controller was given and has not got.

    def keep(self, handle: str, obj: Any) -> None:
        """The controller has sent the object; another one that had the handle has none any more."""
        self._made.unlearn(handle)
        self._kept[handle] = obj
        self._know(handle, obj)

    def give(self, handle: str, obj: Any) -> None:
        """The controller gets the object as it is now."""
        if handle not in self._kept:
            self._made.learn(handle, obj)
        self._undelivered.discard(handle)
        self._know(handle, obj)

    def undelivered(self, handles: Iterable[str]) -> None:
        """What the controller was given under these handles last has not reached it."""
        self._undelivered.update(handles)

    def _know(self, handle: str, obj: Any) -> None:
        self._know_groups(handle, obj)
        self._told.know(handle, obj)

    def _know_groups(self, handle: str, obj: Any) -> None:
        if isinstance(obj, torch.optim.Optimizer):
            self._groups[handle] = Groups(obj)
            self._places = None

    def trained(self, obj: object) -> Any:
        """For `pack`: what stands for a tensor that an optimizer of the controller's trains, by its place in that.

        It may be in no network any more: another layer has come in the place of its own.
        """
        if self._places is None:
            self._places = {}
            for handle, groups in list(self._groups.items()):
                for i, parameter in enumerate(groups.parameters()):
                    if parameter is not None:
                        self._places.setdefault(id(parameter), (weakref.ref(parameter), ("trained", handle, i)))
        there, token = self._places.get(id(obj), (lambda: None, None))
        return token if there() is obj else self._put_in_its_place(obj) if is_trained(obj) else None

    def _put_in_its_place(self, obj: object) -> Any:
        """Return what stands for a tensor that has come in the place of another one that an optimizer trained."""
        for handle, groups in self._groups.items():
            now = parameters_of(self.find(handle))
            found = next((i for i, parameter in enumerate(now) if parameter is obj), None)
            if found is not None and len(now) == len(groups.parameters()):
                return ("trained", handle, found)
        return None

    def release(self, *handles: str) -> None:
        """The controller has them no more."""
        for handle in handles:
            self._kept.pop(handle, None)
            self._made.unlearn(handle)
            self._told.forget(handle)
            self._groups.pop(handle, None)
            self._places = None
            self._undelivered.discard(handle)

    def _forget(self, handle: str) -> None:
        self.release(handle)
        self._gone.append(handle)

    def take_gone(self) -> tuple[str, ...]:
        """Return, once, the handles of those that cells had made and that no longer live."""
        gone, self._gone = self._gone, []
        return tuple(gone)

    def handle(self, obj: object) -> str | None:
        """Return the handle of an object that the controller has, if it has."""
        for handle, kept in self._kept.items():
            if kept is obj and not isinstance(obj, nn.Module):
                return handle
        return self._made.of(obj)

    def token(self, obj: object) -> Any:
        """For `pack`: what stands for an object that the controller has as it is, else None."""
        handle = self.handle(obj)
        return None if handle is None or self._outgrown(handle, obj) else ("object", handle)

    def _outgrown(self, handle: str, obj: Any) -> bool:
        if handle in self._undelivered:
            return True
        return handle in self._groups and not self._groups[handle].are(obj)

    def outgrown(self) -> list[Any]:
        """Return optimizers that have got other parameter groups than the controller's, and what it has not got."""
        return [obj for handle, obj in self.all().items() if self._outgrown(handle, obj)]

    def resolve(self, token: Any) -> Any:
        """For `unpack`: the object that a token means. Raises TransferError if it is gone."""
        found = self.find(token[1])
        if found is None:
            raise TransferError(f"the payload refers to {token!r}, which does not exist in this replica")
        return found

    def find(self, handle: str) -> Any:
        """Return the object that a handle means, None if it is gone."""
        return self._kept[handle] if handle in self._kept else self._made.find(handle)

    def all(self) -> dict[str, Any]:
        """Return all of them, by handle."""
        return {**self._kept, **self.made()}

    def kept(self) -> dict[str, Any]:
        """Return those that the controller has sent, by handle."""
        return self._kept

    def made(self) -> dict[str, Any]:
        """Return those that cells have made, by handle."""
        return self._made.all()

    def apply_settings(self, settings: Iterable[tuple[str, Any]]) -> None:
        """Take over what the controller changed."""
        for handle, changed in settings:
            obj = self.find(handle)
            if is_told(obj):
                take_told(obj, changed)
                self._told.know(handle, obj)
            if isinstance(obj, torch.optim.Optimizer) and len(changed[0]) == len(obj.param_groups):
                # The controller has told of each of its groups.
                self._know_groups(handle, obj)

    def changed_settings(self) -> tuple[tuple[str, Any], ...]:
        """Return what has changed since the controller was told, by the handles of what has it."""
        return self._told.changes(self.find)
