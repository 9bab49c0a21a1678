"""`DistributedDataParallel` as it travels: the notebook has no process group, there it is its network alone.

    model = DistributedDataParallel(net)     in a cell, on every replica
    model(x)    model.module    model.state_dict()     afterwards in the notebook

Knows torch alone.
"""

from __future__ import annotations

import functools
from typing import Any, SupportsIndex

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class _Alone(DistributedDataParallel):
    """One that synchronises nothing, with the settings of the one that it stands for."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return begun, (_kind_of(self), True), self.__getstate__()


def reduce_ddp(module: nn.Module, begin: Any) -> tuple[Any, ...] | None:
    """Return how pickle shall take it, as `__reduce__` does; None: it is no `DistributedDataParallel`.

    Where it arrives `begin(class)` makes it. Raises RuntimeError, torch's own, if it is not of the default group.
    """
    if not isinstance(module, DistributedDataParallel):
        return None
    if dist.is_initialized() or isinstance(module, _Alone):
        return begin, (_kind_of(module),), module.__getstate__()
    # A script's last line has destroyed it, and torch asks for it all the same.
    dist.group.WORLD = module.process_group
    try:
        return begin, (_kind_of(module),), module.__getstate__()
    finally:
        dist.group.WORLD = None


def begun(kind: type[DistributedDataParallel], alone: bool) -> DistributedDataParallel:
    """Return one that has no state yet: of this class, or one that stands for it where there are no peers."""
    made = _alone(kind) if alone else kind
    return made.__new__(made)


@functools.cache
def _alone(kind: type[DistributedDataParallel]) -> type[DistributedDataParallel]:
    # Between a user's class and torch's, so that what the former adds is there.
    bases: tuple[Any, ...] = (_Alone,) if kind is DistributedDataParallel else (kind, _Alone)
    made: Any = type(kind.__name__, bases, {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    return made


def _kind_of(module: DistributedDataParallel) -> type[DistributedDataParallel]:
    kinds: tuple[Any, ...] = type(module).__mro__
    return next(kind for kind in kinds if not issubclass(kind, _Alone))
