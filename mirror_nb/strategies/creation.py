"""What is made in a scope of the controller: modules, optimizers, schedulers, scalers, generators.

Notes each object when it is made; knows no replicas.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from mirror_nb.environment.replaced import Replaced

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


@final
class noted:  # noqa: N801
    """Call `note(obj)` for every object of these kinds that is made inside.

    Not a generator: Python ends one that nobody refers to, and one that is left at the process's end without torch.
    """

    def __init__(self, note: Callable[[Any], None]) -> None:
        self._note: Callable[[Any], None] | None = note

    def __enter__(self) -> None:
        def after(made: Any, *args: object, **kwargs: object) -> None:
            if self._note is not None:
                self._note(made)

        self._changes: list[Replaced | _Restored] = [
            Replaced(owner, "__init__", after=after) for owner in _CLASSES if "__init__" in vars(owner)
        ]
        # Copies (copy.deepcopy) and what is unpickled (torch.load).
        self._changes += [Replaced(owner, "__setstate__", after=after) for owner in (nn.Module, torch.amp.GradScaler)]
        self._changes += [_noting_copies(after), _Restored(torch.optim.lr_scheduler.LRScheduler, after)]
        self._generator = torch.Generator
        torch.Generator = _noting(self._generator, after)  # type: ignore[misc]

    def __exit__(self, *exception: object) -> None:
        torch.Generator = self._generator  # type: ignore[misc]
        while self._changes:
            self._changes.pop().remove()
        # Whoever took what stood in a function's or a class's place for the real one, as what imports torch's compiler
        # does, has it for good: not the strategy, too.
        self._note = None


def _noting_copies(note: Callable[[Any], None]) -> Replaced:
    """Note optimizers that are copied or unpickled; not those that load a state, which is by the same function."""
    coming: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def before(made: torch.optim.Optimizer, *_: object) -> None:
        if "param_groups" not in vars(made):
            coming.add(made)

    def after(made: torch.optim.Optimizer, *_: object) -> None:
        if made in coming:
            coming.discard(made)
            note(made)

    return Replaced(torch.optim.Optimizer, "__setstate__", before=before, after=after)


@final
class _Restored:
    """Notes what is copied or unpickled of a class that has no `__setstate__`, as schedulers have none."""

    def __init__(self, owner: Any, note: Callable[[Any], None]) -> None:
        # One that another scope has put there.
        known = vars(owner).get("__setstate__")

        def restored(made: Any, state: Any) -> None:
            if known is None:
                # What copy and pickle do by themselves.
                vars(made).update(state)
            else:
                known(made, state)
            note(made)

        self._owner, self._known, self._restored = owner, known, restored
        owner.__setstate__ = restored

    def remove(self) -> None:
        if vars(self._owner).get("__setstate__") is not self._restored:
            return
        if self._known is None:
            del self._owner.__setstate__
        else:
            self._owner.__setstate__ = self._known


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
