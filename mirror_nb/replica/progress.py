"""How far this replica's optimizers came in the last cell or call, and taking over how far another's came.

Replicas that are stopped in a training loop may stand one step apart: one had its gradients when another died,
was interrupted or raised. Nothing later would bring them together, since equal gradients keep a difference for
good. So it is with Variables that are equal on all replicas. Knows optimizers and Variables; knows neither who is
furthest nor how values travel.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mirror_nb.fused import step_times
from mirror_nb.held_variables import attribute_variables
from mirror_nb.mirrors import checksums
from mirror_nb.told import parameters_of
from mirror_nb.values import VariableAggregation
from mirror_nb.variables import MirroredVariable, Variable, bare


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """What one optimizer has made of its parameters."""

    parameters: tuple[torch.Tensor, ...]
    # In the order of its groups.
    state: dict[str, Any]
    # Its state_dict.
    schedulers: dict[str, dict[str, Any]]
    # State of the schedulers that drive it, by key.


@final
class Progress:
    """Counts steps; `objects` gives what the replica holds, under keys that are the same on all replicas."""

    def __init__(self, objects: Callable[[], Mapping[str, object]]) -> None:
        self._objects = objects
        self._begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._ended: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._stood: weakref.WeakKeyDictionary[LRScheduler, int] = weakref.WeakKeyDictionary()
        # The epoch of each scheduler as the cell began.

    def watch(self) -> None:
        """Count the steps of every optimizer of this process."""
        register_optimizer_step_pre_hook(lambda optimizer, *_: _count(self._begun, optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: _count(self._ended, optimizer))

    def begin(self) -> None:
        """A call begins, or a cell."""
        if self._begun:
            # To clear one takes five times as long.
            self._begun, self._ended = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
        if self._stood:
            # Those of a call are mirrored, and equal as it begins; to look for them takes a tenth of a small one.
            self._stood = weakref.WeakKeyDictionary()

    def begin_cell(self) -> None:
        """A cell begins, whose schedulers may differ by replica on purpose."""
        self.begin()
        for obj in self._objects().values():
            if isinstance(obj, LRScheduler):
                self._stood[obj] = _epoch(obj)

    def steps(self) -> dict[str, int]:
        """Return the steps since `begin` of each optimizer, and of the schedulers that drive it, by its key.

        -1 - steps for an optimizer that was left in the middle of one.
        """
        steps = {}
        for key, optimizer in self._optimizers().items():
            begun, ended = self._begun.get(optimizer, 0), self._ended.get(optimizer, 0)
            made = ended + sum(abs(_epoch(s) - self._stood.get(s, 0)) for s in self._schedulers(optimizer).values())
            steps[key] = made if begun == ended else -1 - made
        return steps

    def try_fused(self) -> tuple[str, float, float] | None:
        """Return the class of the optimizer that stepped most since `begin`, its step's ms, and those when fused."""
        stepped = [optimizer for optimizer in self._optimizers().values() if self._ended.get(optimizer)]
        tried = max(stepped, key=lambda optimizer: self._ended[optimizer], default=None)
        times = step_times(tried)
        return None if times is None else (type(tried).__name__, *times)

    def sums(self) -> dict[str, int]:
        """Return a checksum of each Variable that all replicas have equal, by key."""
        variables = self._variables()
        return dict(zip(variables, checksums(map(bare, variables.values())), strict=True))

    def standing(self, keys: Iterable[str]) -> dict[str, Standing | torch.Tensor]:
        """Return the standing of these optimizers, as far as they are here and can tell, and Variables' values."""
        optimizers, variables = self._optimizers(), self._variables()
        found: dict[str, Standing | torch.Tensor] = {}
        for key in keys:
            # A sharded optimizer cannot tell its whole state; its replicas are left as they are.
            with contextlib.suppress(RuntimeError):
                if key in variables:
                    found[key] = bare(variables[key])
                elif key in optimizers:
                    optimizer = optimizers[key]
                    parameters = tuple(p.detach() for p in parameters_of(optimizer))
                    driven = {name: dict(s.state_dict()) for name, s in self._schedulers(optimizer).items()}
                    found[key] = Standing(parameters, optimizer.state_dict(), driven)
        return found

    def stand_at(self, standings: Mapping[str, Standing | torch.Tensor]) -> None:
        """Go on from these standings, in place: modules, optimizers and Variables stay the objects that they are."""
        optimizers, variables = self._optimizers(), self._variables()
        for key, standing in standings.items():
            if isinstance(standing, torch.Tensor):
                if key in variables and _alike([variables[key]], [standing]):
                    bare(variables[key]).copy_(standing)
                continue
            optimizer = optimizers.get(key)
            if optimizer is None or not _alike(parameters_of(optimizer), standing.parameters):
                continue
            with torch.no_grad():
                for mine, theirs in zip(parameters_of(optimizer), standing.parameters, strict=True):
                    mine.copy_(theirs)
            optimizer.load_state_dict(standing.state)
            for name, scheduler in self._schedulers(optimizer).items():
                if name in standing.schedulers:
                    scheduler.load_state_dict(standing.schedulers[name])
        self.begin()

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            key: obj
            for key, obj in self._objects().items()
            # Parameters of another type are parts of a whole (DTensor): each replica's are its own.
            if isinstance(obj, torch.optim.Optimizer)
            and all(type(p) in (torch.Tensor, torch.nn.Parameter) for p in parameters_of(obj))
        }

    def _variables(self) -> dict[str, Variable]:
        """Return the Variables that have one value on all replicas, those among networks' attributes too."""
        found: dict[str, Variable] = {}
        for key, obj in self._objects().items():
            if isinstance(obj, torch.nn.Module):
                found.update((f"{key}.{name}", variable) for name, variable in attribute_variables(obj))
            elif isinstance(obj, Variable):
                found[key] = obj
        return {
            key: variable
            for key, variable in found.items()
            if isinstance(variable, MirroredVariable) and variable.aggregation is not VariableAggregation.NONE
        }

    def _schedulers(self, optimizer: torch.optim.Optimizer) -> dict[str, LRScheduler]:
        objects = self._objects().items()
        return {key: obj for key, obj in objects if isinstance(obj, LRScheduler) and obj.optimizer is optimizer}


def _epoch(scheduler: LRScheduler) -> int:
    while isinstance(scheduler, ChainedScheduler):
        # It has no count of its own, only those that it chains.
        scheduler = scheduler._schedulers[0]
    return getattr(scheduler, "last_epoch", 0)


def _count(counts: weakref.WeakKeyDictionary[Any, int], optimizer: Any) -> None:
    counts[optimizer] = counts.get(optimizer, 0) + 1


def _alike(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return [p.shape for p in mine] == [p.shape for p in theirs]
