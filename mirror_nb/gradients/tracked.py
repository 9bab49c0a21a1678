"""One parameter whose gradients are synchronised: its hooks, and how this replica's examples weigh in.

Knows autograd, and what else the module has that it is in. Knows nothing of the other replicas; what is to be done
with a gradient that is there is handed in.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef

from mirror_nb.errors import ReplicaError
from mirror_nb.gradients.matching import is_sparse


class Synchronizer(Protocol):
    """Who makes gradients equal over the replicas."""

    enabled: bool
    accumulating: bool
    # Gradients are only added up for now.
    factor: float
    # By which this replica's gradients are multiplied before a plain mean.

    def accumulated(self, tracked: Tracked, parameter: nn.Parameter) -> None:
        """Take note that the gradient of `parameter` is in its ``.grad``, weighted."""


@final
class Tracked:
    """One parameter's two hooks, and what is known of it on this replica."""

    __slots__ = (
        "alone",
        "aside",
        "back",
        "module",
        "name",
        "number",
        "ordinal",
        "owner",
        "parameter",
        "round",
        "synchronizer",
    )

    def __init__(
        self,
        synchronizer: Synchronizer,
        parameter: nn.Parameter,
        name: str,
        ordinal: int,
        module: nn.Module | None = None,
    ) -> None:
        self.synchronizer = synchronizer
        # That had it when it was tracked.
        self.module: Callable[[], nn.Module | None] = (lambda: None) if module is None else weakref.ref(module)
        self.parameter: Callable[[], nn.Parameter | None] = TensorWeakRef(parameter)
        self.name = name
        self.ordinal = ordinal
        self.number: int | None = None
        # Its place among what is agreed, the same on all replicas.
        self.alone = False
        # No other replica had it when its gradients of `no_sync` were to be reduced. Until it has a number.
        self.owner: Callable[[], object | None] | None = None
        self.aside: Tensor | None = None
        self.back: object = None
        # Tells that the pass for which it was set aside is over.
        self.round: object = None
        # In which the gradient was there last.

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.ordinal

    def alive(self) -> nn.Parameter:
        parameter = self.parameter()
        if parameter is None:
            raise ReplicaError(f"parameter {self.name} was deleted during its own backward pass")
        return parameter

    # Or to save such a tensor (`torch.save(weights, path)`) would warn the user of a hook of ours.
    @unserializable_hook
    def before_accumulation(self, gradient: Tensor) -> None:
        # torch.autograd.grad comes here too, and goes away with `gradient`, which therefore stays as it is.
        synchronizer = self.synchronizer
        if synchronizer.factor == 1.0 or not synchronizer.enabled or self.is_left():
            return
        parameter = self.alive()
        if parameter.grad is not None:
            self.aside, parameter.grad = parameter.grad, None
            back = functools.partial(self.put_back)
            # Autograd lets go of it when the pass ends, by the exception of another hook, too.
            self.back = weakref.ref(back, lambda _: self.put_back())
            at_end_of_backward(back)

    def after_accumulation(self, parameter: nn.Parameter) -> None:
        synchronizer = self.synchronizer
        if not synchronizer.enabled or self.is_left():
            return
        gradient = parameter.grad
        if gradient is None:
            return
        if synchronizer.factor != 1.0:
            self._weigh(parameter, gradient, synchronizer.factor)
        synchronizer.accumulated(self, parameter)

    def weigh_late(self) -> None:
        """Weigh the gradient of a pass before it was tracked."""
        parameter = self.alive()
        if parameter.grad is not None and self.synchronizer.factor != 1.0:
            self._weigh(parameter, parameter.grad, self.synchronizer.factor)

    def mates(self) -> list[nn.Parameter]:
        """Return the parameters of the module that it is in; none where it is in no module any more."""
        module, parameter = self.module(), self.parameter()
        there = [] if module is None else [mate for mate in module._parameters.values() if mate is not None]
        return there if any(mate is parameter for mate in there) else []

    def is_left(self) -> bool:
        return self.owner is not None and self.owner() is not None

    def _weigh(self, parameter: nn.Parameter, fresh: Tensor, weight: float) -> None:
        # The loss of no examples is NaN, and so is NaN * 0.
        if fresh.requires_grad and not is_sparse(fresh):
            # Without its graph, since a second backward pass through it (create_graph) is weighted by itself.
            fresh.detach().mul_(weight) if weight else fresh.detach().zero_()
        else:
            # Not in place: other branches of the pass may go on with its memory (`a + b[None]`), and
            # a sparse one's `detach()` would change alone.
            fresh = fresh.detach() * weight if weight else torch.zeros_like(fresh)
        if self.aside is None:
            parameter.grad = fresh
        elif fresh.requires_grad or is_sparse(self.aside):
            # This way round: torch adds no dense gradient to a sparse one.
            parameter.grad = fresh + self.aside
        else:
            parameter.grad = self.aside.add_(fresh)
        self.aside = None

    def put_back(self) -> None:
        parameter = self.parameter()
        if self.aside is not None and parameter is not None and parameter.grad is None:
            parameter.grad = self.aside
        self.aside = self.back = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """Somebody's hook for an accumulated gradient, an optimizer's step of a single parameter for instance."""

    tracked: Tracked
    hook: Callable[[Any], object]

    def __call__(self, parameter: nn.Parameter) -> None:
        synchronizer = self.tracked.synchronizer
        if not synchronizer.enabled or synchronizer.accumulating or self.tracked.is_left():
            self.hook(parameter)


class _Engine(Protocol):
    def queue_callback(self, callback: Callable[[], None]) -> None: ...


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have autograd call it when the backward pass that runs has ended; not after an exception."""
    engine: _Engine | None = getattr(Variable, "_execution_engine", None)
    if engine is None or not hasattr(engine, "queue_callback"):
        raise ReplicaError(
            f"torch {torch.__version__} does not tell when a backward pass ends, which synchronised gradients "
            "need; use torch 2.13, or train without synchronisation (--no-sync)"
        )
    engine.queue_callback(callback)
