"""The place of a strategy with one replica: this process, with no other process and no process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils import _pytree as pytree

from mirror_nb.collectives.options import Communication, chosen
from mirror_nb.data.dataset import Loaders
from mirror_nb.devices import Device
from mirror_nb.errors import ContextError
from mirror_nb.gradients.synchronizer import GradientSynchronizer
from mirror_nb.replica.scope import Scope
from mirror_nb.replica.whole import heed, held_back
from mirror_nb.strategies.context import ReplicaContext, entered
from mirror_nb.strategies.input import ReplicaInput
from mirror_nb.strategies.place import OwnPlace
from mirror_nb.strategies.reductions import (
    as_tensor,
    checked_axis,
    gather_local,
    is_whole,
    local_parts,
    own_of,
    reduce_local,
    select,
)
from mirror_nb.strategies.seat import AloneSeat
from mirror_nb.telemetry.comparison import Comparison, compared
from mirror_nb.values import ReduceOp, mean, widened
from mirror_nb.variables import plain

if TYPE_CHECKING:
    from mirror_nb.strategies.base import Strategy


@final
class AlonePlace(OwnPlace):
    """This process computes everything; reductions return what they are given."""

    num_replicas = 1

    def __init__(self, device: Device) -> None:
        self.devices = (str(device),)
        self.replica_id = 0
        self.communication = chosen(None, None, (device,))
        self.device: torch.device = (
            torch.device("cpu") if device.kind == "cpu" else torch.device(device.kind, device.index)
        )
        self._scope = Scope(0, 1, self.device, GradientSynchronizer(0, 1), seed=0)
        self._listeners: list[Callable[[Any], None]] = []
        self.seat = AloneSeat(self.device, heed, lambda value: self._listeners[-1](value))
        self.input = ReplicaInput(
            replica_id=0,
            num_replicas=1,
            device=self.device,
            randomness=contextlib.nullcontext,
            agree=_same,
            on_batch=_nothing,
            on_end=_nothing,
            loaders=Loaders(),
        )

    def scope(self) -> AbstractContextManager[Any]:
        self.check_open()
        return self._scope

    def run(self, strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check_open()
        with entered(strategy, ReplicaContext(strategy, 0), cross=False), self._scope:
            return fn(*own_of(args, 0, 1), **own_of(kwargs, 0, 1))

    def communicate(self, by: Communication) -> None:
        self.communication = by

    def command(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        changes: bool = True,
        on_note: Callable[[Any], None] = lambda value: None,
    ) -> list[Any]:
        self._listeners.append(on_note)
        try:
            with held_back(), self._scope:
                return [fn(*args)]
        finally:
            self._listeners.pop()

    def log(self, values: dict[str, Any]) -> None:
        """Nothing is recorded where there is one device and nobody to wait for."""

    def told(self, examples: int | None) -> None:
        """Likewise."""

    def timeline(self) -> Any:
        raise ContextError("a strategy of one device in this process records nothing; make a MirroredStrategy")

    def dashboard(self) -> Any:
        self.timeline()

    def compare_parameters(self) -> Comparison:
        return compared([({}, {})])

    def every(self, results: list[Any]) -> list[Any]:
        return results

    def draw_seed(self) -> int:
        return int(torch.randint(1 << 62, (), device="cpu"))

    @property
    def takes_part(self) -> bool:
        return True

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing: there is nobody to synchronise with."""
        return contextlib.nullcontext()

    def reduce(self, op: ReduceOp, value: Any, axis: tuple[int, ...] | None, where: str) -> Any:
        return reduce_local(op, value, axis, 1)

    def gather(self, value: Any, axis: int, where: str) -> Any:
        return gather_local(value, axis, 1)

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        def reduced(leaf: Any) -> torch.Tensor:
            tensor = as_tensor(leaf, "all_reduce", self.device)
            if op is ReduceOp.SUM:
                return tensor.long() if tensor.dtype is torch.bool else tensor.clone()
            return mean(widened(tensor), 1, tensor.dtype)

        return pytree.tree_map(reduced, select(value, 0), is_leaf=is_whole)

    def all_gather(self, value: Any, axis: int) -> Any:
        def gathered(leaf: Any) -> torch.Tensor:
            tensor = as_tensor(leaf, "all_gather", self.device)
            checked_axis(axis, tensor, "all_gather")
            return tensor.clone()

        return pytree.tree_map(gathered, select(value, 0), is_leaf=is_whole)

    def merge_call(
        self, strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with entered(strategy, None, cross=True):
            return select(fn(strategy, *args, **kwargs), 0)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        return local_parts(value, 1)

    def make_variable(self, value: Any, **options: Any) -> Any:
        return plain(value.to(self.device), **options)

    def mirror(self, obj: Any) -> Any:
        return obj

    def mirrors(self, obj: Any) -> bool:
        # With one replica nothing tells what was made in the scope from what was not.
        return True

    def close(self) -> None:
        self.closed = True
        self.input.loaders.close()


def _same(state: bytes) -> bytes:
    return state


def _nothing(*_: object) -> None:
    pass
