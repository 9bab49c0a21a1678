"""States of the controller's optimizers, moments and the like: they live in the replicas.

    optimizer.state_dict()       ◀─ replica 0's state, if the replicas have run since
    optimizer.load_state_dict()  ─▶ every replica

Knows optimizers and how to have a function called on the replicas.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol, final

import torch

from mirror_nb.errors import UsageError
from mirror_nb.values import PerReplica


class Commands(Protocol):
    """What is asked of the controller's place."""

    num_replicas: int
    calls: int

    @property
    def open(self) -> bool:
        """Whether there are replicas to ask."""

    def has_sent(self, obj: object) -> bool:
        """Whether the replicas have an object that is mirrored."""

    def command(self, fn: Any, args: tuple[Any, ...] = (), *, changes: bool = True) -> list[Any]:
        """Call a function on every replica."""


@final
class States:
    """Brings states here when they are asked for, and out when they are loaded."""

    def __init__(self, place: Commands) -> None:
        # Weakly: an optimizer may outlive its strategy.
        self._place = weakref.ref(place)
        self._read_at: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # After how many calls the state here was that of the replicas.

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Look after an optimizer from now on."""
        optimizer.register_state_dict_pre_hook(self.read)
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def read(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring replica 0's state here, unless it is here.

        Raises what a call raises, and UsageError for an optimizer that has parameters there alone.
        """
        place = self._asked(optimizer)
        if place is None or self._read_at.get(optimizer) == place.calls:
            return
        wanted = PerReplica([replica_id == 0 for replica_id in range(place.num_replicas)])
        state = place.command(_state_of, (optimizer, wanted), changes=False)[0]
        parameters = _parameters(optimizer)
        if any(isinstance(key, int) and key >= len(parameters) for key in state):
            raise UsageError(
                f"the {type(optimizer).__name__} got parameter groups in the replicas that it has not here: call its "
                "state_dict in the function given to strategy.run"
            )
        optimizer.state.clear()
        for key, value in state.items():
            optimizer.state[parameters[key] if isinstance(key, int) else key] = value
        self._read_at[optimizer] = place.calls

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        place = self._asked(optimizer)
        if place is None:
            return
        # Not read again first.
        self._read_at[optimizer] = place.calls
        try:
            place.command(_load, (optimizer, optimizer.state_dict()["state"]), changes=False)
        except BaseException:
            del self._read_at[optimizer]
            raise

    def _asked(self, optimizer: torch.optim.Optimizer) -> Commands | None:
        place = self._place()
        return place if place is not None and place.open and place.has_sent(optimizer) else None


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_of(optimizer: torch.optim.Optimizer, wanted: bool) -> dict[Any, Any] | None:
    return optimizer.state_dict()["state"] if wanted else None


def _load(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
