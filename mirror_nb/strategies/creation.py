"""What is made in a scope of the controller: modules, optimizers, schedulers, scalers, generators.

Notes each object when it is made; knows no replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mirror_nb.replaced import Replaced

_CLASSES: tuple[type, ...] = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    # These do not call LRScheduler's.
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.optim.lr_scheduler.SequentialLR,
    torch.optim.lr_scheduler.ChainedScheduler,
    torch.amp.GradScaler,
)


@contextmanager
def noted(note: Callable[[Any], None]) -> Iterator[None]:
    """Call `note(obj)` for every object of these kinds that is made inside."""

    def after(made: Any, *args: object, **kwargs: object) -> None:
        note(made)

    changes = [Replaced(owner, "__init__", after=after) for owner in _CLASSES if "__init__" in vars(owner)]
    # Copies (copy.deepcopy) and what is unpickled (torch.load). Not an optimizer's, which loads states by it, too.
    changes += [Replaced(owner, "__setstate__", after=after) for owner in (nn.Module, torch.amp.GradScaler)]
    generator = torch.Generator
    torch.Generator = _noting(generator, note)  # type: ignore[misc]
    try:
        yield
    finally:
        torch.Generator = generator  # type: ignore[misc]
        for change in reversed(changes):
            change.remove()


def _noting(real: Any, note: Callable[[Any], None]) -> Any:
    """Stand in for a class written in C, whose `__init__` cannot be replaced."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            made = real(*args, **kwargs)
            note(made)
            return made

        def __instancecheck__(cls, obj: object) -> bool:
            return isinstance(obj, real)

    return Meta("Generator", (), {"__doc__": real.__doc__})
