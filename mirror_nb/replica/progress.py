"""How far this replica's optimizers came in the last cell or call, and taking over how far another's came.

Replicas that are stopped in a training loop may stand one step apart: one had its gradients when another died,
was interrupted or raised. Nothing later would bring them together, since equal gradients keep a difference for
good. So it is with Variables that are equal on all replicas, and with networks that no optimizer trains, averages of
others for instance, and with scalers. Knows optimizers, networks, scalers and Variables; knows neither who is furthest
nor how values travel.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, final

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from mirror_nb.fused import step_times
from mirror_nb.held_variables import attribute_variables
from mirror_nb.mirroring.networks import all_values, give
from mirror_nb.tensors.checksums import checksums, mixed
from mirror_nb.tensors.layouts import nbytes, with_memory
from mirror_nb.transfer.told import parameters_of
from mirror_nb.values import VariableAggregation
from mirror_nb.variables import MirroredVariable, Variable, bare

SUMMED_BYTES = 256 << 20
# Of a larger network what no optimizer trains is not read before each cell: that would take a tenth of a second.

_T = TypeVar("_T")


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


_Other = list[torch.Tensor] | dict[str, Any]
# Tensors of a Variable or a network, or a scaler's state_dict.


@final
class Progress:
    """Counts steps; `objects` gives what the replica holds, under keys that are the same on all replicas."""

    def __init__(self, objects: Callable[[], Mapping[str, object]]) -> None:
        self._objects = objects
        self._begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._ended: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._stood: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # The epoch of each scheduler as the cell began, and of how many networks each average was.
        self._sums_before: dict[str, int] | None = None
        # Checksums of networks and scalers as the cell began; None in a call.

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
        self._sums_before = None

    def begin_cell(self) -> None:
        """After `begin`: it is a cell, whose schedulers, networks and scalers may differ by replica on purpose."""
        counted: list[LRScheduler | AveragedModel] = [*self._held(LRScheduler).values()]
        for one in (*counted, *self._held(AveragedModel).values()):
            self._stood[one] = _epoch(one)
        self._sums_before = self._sums_of_others()

    def steps(self) -> dict[str, int]:
        """Return the steps since `begin` of each optimizer, and of the schedulers that drive it, by its key.

        -1 - steps for an optimizer that was left in the middle of one. Of a network that averages others, how many it
        has taken in since; of a scaler -1 between an optimizer's `unscale_` or `step` and its own `update`, else 0.
        """
        steps = {key: abs(_epoch(obj) - self._stood.get(obj, 0)) for key, obj in self._held(AveragedModel).items()}
        steps |= {key: -1 if _is_underway(scaler) else 0 for key, scaler in self._held(GradScaler).items()}
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

    def sums(self) -> dict[str, tuple[int, int]]:
        """Return checksums of what may be equal on all replicas, by key: as the cell began, and now.

        Of each Variable that is equal (0, now). In a call networks and scalers that are mirrored are, too.
        """
        variables = self._variables()
        sums = checksums(map(bare, variables.values()))
        found = {key: (0, now) for key, now in zip(variables, sums, strict=True)}
        before = self._sums_before
        for key, now in self._sums_of_others().items():
            if key.startswith(":") if before is None else key in before:
                found[key] = 0 if before is None else before[key], now
        return found

    def _sums_of_others(self) -> dict[str, int]:
        summed = {key: held for key, held in self._untrained().items() if sum(map(nbytes, held)) <= SUMMED_BYTES}
        for key, scaler in self._held(GradScaler).items():
            # A class of the user's may add what is no number.
            numbers = GradScaler.state_dict(scaler).values()
            summed[key] = [torch.tensor([*numbers], dtype=torch.float64, device="cpu")]
        sums = iter(checksums(itertools.chain(*summed.values())))
        return {key: mixed(itertools.islice(sums, len(held))) for key, held in summed.items()}

    def standing(self, keys: Iterable[str]) -> dict[str, Standing | _Other]:
        """Return the standing of these optimizers, as far as they are here and can tell, and others' values."""
        optimizers, others, scalers = self._optimizers(), self._others(), self._held(GradScaler)
        found: dict[str, Standing | _Other] = {}
        for key in keys:
            # A sharded optimizer cannot tell its whole state; its replicas are left as they are.
            with contextlib.suppress(RuntimeError):
                if key in others:
                    found[key] = others[key]
                elif key in scalers:
                    found[key] = {**scalers[key].state_dict(), _UNDERWAY: _is_underway(scalers[key])}
                elif key in optimizers:
                    optimizer = optimizers[key]
                    parameters = tuple(p.detach() for p in parameters_of(optimizer))
                    driven = {name: dict(s.state_dict()) for name, s in self._schedulers(optimizer).items()}
                    found[key] = Standing(parameters, optimizer.state_dict(), driven)
        return found

    def stand_at(self, standings: Mapping[str, Standing | _Other]) -> None:
        """Go on from these standings, in place: modules, optimizers and Variables stay the objects that they are."""
        optimizers, others, scalers = self._optimizers(), self._others(), self._held(GradScaler)
        for key, standing in standings.items():
            if isinstance(standing, list):
                _take(others.get(key, []), standing)
                continue
            if isinstance(standing, dict):
                if key in scalers:
                    _take_scales(scalers[key], standing)
                continue
            optimizer = optimizers.get(key)
            if optimizer is None or not _take(parameters_of(optimizer), standing.parameters):
                continue
            optimizer.load_state_dict(standing.state)
            for name, scheduler in self._schedulers(optimizer).items():
                if name in standing.schedulers:
                    scheduler.load_state_dict(standing.schedulers[name])
        self.begin()

    def give_memory(self) -> None:
        """Give tensors that could not grow the memory that they lack; see `with_memory`."""
        inside = (tensor for network in self._held(torch.nn.Module).values() for _, tensor in all_values(network))
        # Past Variables' own ways.
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in itertools.chain(self._held(torch.Tensor).values(), inside):
                if not is_lazy(tensor):
                    with_memory(tensor)

    def _others(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors of Variables, and of networks what no optimizer trains, by key."""
        variables = {key: [bare(variable)] for key, variable in self._variables().items()}
        return variables | self._untrained()

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        held = self._held(torch.optim.Optimizer).items()
        return {key: optimizer for key, optimizer in held if all(map(_is_whole, parameters_of(optimizer)))}

    def _untrained(self) -> dict[str, list[torch.Tensor]]:
        """Return what no optimizer trains of each network: parameters, and of how many networks it is an average.

        Other buffers may be each replica's own, as statistics of its share of the batches are.
        """
        # Those that stepped may have no name.
        optimizers = (*self._begun, *self._held(torch.optim.Optimizer).values())
        trained = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
        found: dict[str, list[torch.Tensor]] = {}
        for key, network in self._held(torch.nn.Module).items():
            own = (p.detach() for p in network.parameters() if id(p) not in trained and _is_whole(p) and not p.is_meta)
            found[key] = [*own, network.n_averaged] if isinstance(network, AveragedModel) else [*own]
        return {key: held for key, held in found.items() if held}

    def _variables(self) -> dict[str, Variable]:
        """Return the Variables that have one value on all replicas, those among networks' attributes too."""
        found: dict[str, Variable] = {}
        for key, network in self._held(torch.nn.Module).items():
            found.update((f"{key}.{name}", variable) for name, variable in attribute_variables(network))
        found.update(self._held(Variable))
        return {
            key: variable
            for key, variable in found.items()
            if isinstance(variable, MirroredVariable) and variable.aggregation is not VariableAggregation.NONE
        }

    def _schedulers(self, optimizer: torch.optim.Optimizer) -> dict[str, LRScheduler]:
        return {key: one for key, one in self._held(LRScheduler).items() if one.optimizer is optimizer}

    def _held(self, kind: type[_T]) -> dict[str, _T]:
        """Return what is held of a kind, by key."""
        # By their types: a proxy of what is gone raises at whatever it is asked.
        return {key: cast(_T, obj) for key, obj in self._objects().items() if issubclass(type(obj), kind)}


def _epoch(obj: LRScheduler | AveragedModel) -> int:
    if isinstance(obj, AveragedModel):
        return int(obj.n_averaged)
    while isinstance(obj, ChainedScheduler):
        # It has no count of its own, only those that it chains.
        obj = obj._schedulers[0]
    return getattr(obj, "last_epoch", 0)


def _count(counts: weakref.WeakKeyDictionary[Any, int], optimizer: Any) -> None:
    counts[optimizer] = counts.get(optimizer, 0) + 1


def _is_whole(parameter: torch.Tensor) -> bool:
    # Those of another type are parts of a whole (DTensor): each replica's are its own.
    return type(parameter) in (torch.Tensor, torch.nn.Parameter)


@torch.no_grad()
def _take(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """Copy values, in place; False where they are of others."""
    if [tensor.shape for tensor in mine] != [tensor.shape for tensor in theirs]:
        return False
    for tensor, value in zip(mine, theirs, strict=True):
        give(tensor, value)
    return True


_UNDERWAY = "underway"
# Beside a scaler's state: whether an `update` of it is still to come.


def _is_underway(scaler: GradScaler) -> bool:
    # One that is not enabled keeps nothing of optimizers.
    states = scaler._per_optimizer_states if scaler.is_enabled() else {}
    return any(state["stage"] is not OptState.READY for state in states.values())


def _take_scales(scaler: GradScaler, standing: dict[str, Any]) -> None:
    state = {name: value for name, value in standing.items() if name != _UNDERWAY}
    if not state or not scaler.is_enabled():
        # One that is not enabled has none.
        return
    scaler.load_state_dict(state)
    if not standing[_UNDERWAY]:
        # As its `update` does.
        scaler._per_optimizer_states.clear()
