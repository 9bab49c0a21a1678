"""What each side tells the other of optimizers, schedulers, scalers and generators besides tensors: where they stand.

Knows torch; knows no replicas and no channel.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, TypeGuard, final

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from mirror_nb import plain

_Told = torch.optim.Optimizer | LRScheduler | torch.amp.GradScaler | torch.Generator


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return what an optimizer trains, in the order of its groups."""
    # A cell may have deleted them, and one that is around another may have none.
    groups = getattr(optimizer, "param_groups", ())
    return [parameter for group in groups for parameter in group["params"]]


@final
class Groups:
    """What an optimizer's parameter groups train, or the first `count` of them; keeps none of it alive."""

    def __init__(self, optimizer: torch.optim.Optimizer, count: int | None = None) -> None:
        groups = vars(optimizer).get("param_groups", ())[:count]
        self._trained = [[weakref.ref(parameter) for parameter in group["params"]] for group in groups]

    def __len__(self) -> int:
        return len(self._trained)

    def parameters(self) -> list[torch.Tensor | None]:
        """Return the parameters in the order of the groups; None for what is gone."""
        return [parameter() for trained in self._trained for parameter in trained]

    def begin(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's groups begin with these."""
        groups = vars(optimizer).get("param_groups", ())
        return len(self) <= len(groups) and all(
            len(trained) == len(group["params"])
            and all(map(operator.is_, [known() for known in trained], group["params"]))
            for trained, group in zip(self._trained, groups, strict=False)
        )

    def are(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether these are the optimizer's groups."""
        return self.begin(optimizer) and len(self) == len(vars(optimizer).get("param_groups", ()))


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return an optimizer's settings (learning rate and the like), group by group, as far as they are plain values."""
    return [
        _plain_part({name: value for name, value in group.items() if name != "params"})
        for group in optimizer.param_groups
    ]


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return shape and dtype of those of an optimizer's settings, group by group, that are tensors of one number."""
    return [
        {
            name: (tuple(value.shape), value.dtype)
            for name, value in group.items()
            if isinstance(value, torch.Tensor) and value.numel() == 1
        }
        for group in optimizer.param_groups
    ]


def change_settings(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    """Give an optimizer other settings; a learning rate that is a tensor stays that tensor.

    Groups that were added on one side alone keep theirs.
    """
    for group, values in zip(optimizer.param_groups, settings, strict=False):
        for name, value in values.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = value


def is_told(obj: object) -> TypeGuard[_Told]:
    """Whether each side tells the other what it changes in an object besides its tensors.

    Not an optimizer around another one, as accelerate makes them: it has nothing of its own, the other one is told of.
    """
    # By its class: a proxy may raise whatever it is asked.
    kind = type(obj)
    return issubclass(kind, _Told) and (not issubclass(kind, torch.optim.Optimizer) or "param_groups" in vars(obj))


def whole_state(obj: object, state: Any) -> Any:
    """Return an object's state for pickle with what a class of optimizers adds to torch's own, which leaves it out.

    With the hooks of its steps that are the user's. Without its others, and without its `step` where a scheduler has
    replaced that: they are this process's. Without torch's own where that is another optimizer's, which it is around.
    Of a scaler also whether it has begun.
    """
    if isinstance(obj, torch.amp.GradScaler):
        return {**state, "_scale": None, _BEGUN: _has_begun(obj)}
    if isinstance(obj, torch.optim.Optimizer) and type(obj).__getstate__ is torch.optim.Optimizer.__getstate__:
        own = {name: value for name, value in vars(obj).items() if name != "step" and "_hooks" not in name}
        own |= {name: _users(vars(obj)[name]) for name in _STEP_HOOKS if name in vars(obj)}
        if not is_told(obj):
            return own
        inner = next((one for one in own.values() if has_groups_of(one, obj)), None)
        return {**own, **state, **({} if inner is None else {"param_groups": _GroupsOf(inner)})}
    return state


@final
class _GroupsOf:
    """Stands for an optimizer's parameter groups with one that is around it, which has that list where it arrives."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._optimizer, "param_groups")


def has_groups_of(one: object, optimizer: Any) -> bool:
    """Whether it is another optimizer with the same list of parameter groups: the one that this is around."""
    other = one is not optimizer and issubclass(type(one), torch.optim.Optimizer)
    return other and vars(one).get("param_groups") is optimizer.param_groups


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _users(hooks: dict[int, Callable[..., Any]]) -> dict[int, Callable[..., Any]]:
    """Return hooks without those of ours: what refuses to step in the notebook would do so in the replicas."""
    return OrderedDict(
        (number, hook)
        for number, hook in hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith("mirror_nb.")
    )


def complete(obj: object) -> None:
    """Complete an object that has arrived."""
    if isinstance(obj, LRScheduler):
        count_steps(obj)
    elif isinstance(obj, torch.amp.GradScaler) and vars(obj).pop(_BEGUN, False):
        _begin(obj)


def _has_begun(scaler: torch.amp.GradScaler) -> bool:
    """Whether a scaler has its scale as a tensor: its `update` needs that, and it is made by the first `scale`."""
    return getattr(scaler, "_scale", None) is not None


def _begin(scaler: torch.amp.GradScaler) -> None:
    make = getattr(scaler, "_lazy_init_scale_growth_tracker", None)
    if make is not None and not _has_begun(scaler):
        # The notebook may be without CUDA, or is not to begin it.
        make(torch.device(getattr(scaler, "_device", "cuda") if torch.cuda.is_initialized() else "cpu"))


_BEGUN = "_mirror_nb_begun"


def without_moments(obj: _Told, state: Any) -> Any:
    """Return an object's state for pickle without what an optimizer keeps of each parameter."""
    return {**state, "state": defaultdict(dict)} if isinstance(obj, torch.optim.Optimizer) else state


def count_steps(scheduler: LRScheduler) -> None:
    """Mark the optimizer of a scheduler that arrived as its constructor does, or it warns of a missing step."""
    optimizer = getattr(scheduler, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    step = optimizer.step

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = counted  # type: ignore[method-assign]


def note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Note a step that an optimizer has made: its scheduler, which warns of none, may be in another process."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def told_of(obj: _Told) -> Any:
    """Return what is told of an optimizer: its settings, and numbers and the like that it has besides.

    Among these that it has made a step, or schedulers would warn; and of each group the settings that somebody has
    deleted, which `Told` knows.
    Of a scheduler or a scaler, where it stands: its `state_dict()`, as far as that is plain values, and whether it has
    begun; None where there is none. Of a generator the bytes of its state.
    """
    if isinstance(obj, torch.Generator):
        return obj.get_state().numpy().tobytes()
    if isinstance(obj, torch.optim.Optimizer):
        return settings_of(obj), _tensors_of(obj), _own_values(obj), ()
    # A user's own class may refuse.
    with contextlib.suppress(Exception):
        return _plain_part(obj.state_dict()), isinstance(obj, torch.amp.GradScaler) and _has_begun(obj)
    return None


def take_told(obj: _Told, told: Any) -> None:
    """Make an optimizer, a scheduler, a scaler or a generator what the other side told of it."""
    if isinstance(obj, torch.Generator):
        obj.set_state(torch.frombuffer(bytearray(told), dtype=torch.uint8))
    elif isinstance(obj, torch.optim.Optimizer):
        settings, tensors, own, deleted = told
        for group, names in zip(obj.param_groups, deleted, strict=False):
            for name in names:
                group.pop(name, None)
        for group, made in zip(obj.param_groups, tensors, strict=False):
            # By a first step on the other side: further ones, on this side, count on in it.
            for name, (shape, dtype) in made.items():
                group.setdefault(name, torch.empty(shape, dtype=dtype, device="cpu"))
        change_settings(obj, settings)
        vars(obj).update(own)
    elif told is not None:
        state, begun = told
        # It takes apart what it is given. What was not told, a function of its own say, each side keeps.
        obj.load_state_dict({**obj.state_dict(), **_plain_part(state)})
        if isinstance(obj, torch.amp.GradScaler) and begun:
            _begin(obj)


@final
class Told:
    """What the other side knows of optimizers and schedulers, by handle."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, list[object] | None]] = {}

    def know(self, handle: str, obj: Any) -> None:
        """The other side has the object as it is now; nothing is noted of one that is not told of."""
        if is_told(obj):
            self._known[handle] = told_of(obj), _signs(obj)

    def unsettle(self, handle: str) -> None:
        """It is not sure any more what the other side has."""
        if handle in self._known:
            self._known[handle] = _UNSURE, None

    def forget(self, handle: str) -> None:
        """The object is gone."""
        self._known.pop(handle, None)

    def changes(self, find: Callable[[str], Any]) -> tuple[tuple[str, Any], ...]:
        """Return what is to be told, by handle, and take it for told; `find` gives objects, None if they are gone."""
        changed = []
        for handle, (told, signs) in list(self._known.items()):
            obj = find(handle)
            if obj is None or (signs is not None and _same(signs, _signs_of(obj))):
                continue
            self.know(handle, obj)
            now = self._known[handle][0]
            if now != told:
                changed.append((handle, _news(obj, now, told) if isinstance(obj, torch.optim.Optimizer) else now))
        return tuple(changed)


_UNSURE = object()


def _news(optimizer: torch.optim.Optimizer, now: Any, told: Any) -> Any:
    """Return what is told of an optimizer: of its own values what has changed, since others, its rank say, differ.

    And what its groups have no more of what was told before.
    """
    settings, tensors, own, _ = now
    if told is _UNSURE:
        return now
    changed = {name: value for name, value in own.items() if told[2].get(name, _UNSURE) != value}
    pairs = zip(told[0], optimizer.param_groups, strict=False)
    deleted = tuple(before.keys() - group.keys() for before, group in pairs)
    return settings, tensors, changed, deleted if any(deleted) else ()


def _own_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if type(value) in _SINGLE}


def _signs_of(optimizer: torch.optim.Optimizer) -> list[object]:
    signs: list[object] = [*_own_values(optimizer).values()]
    for group in optimizer.param_groups:
        signs += group.values()
    return signs


def _signs(obj: object) -> list[object] | None:
    """Return objects that are others once `told_of` has changed; None where something may change in place."""
    if not isinstance(obj, torch.optim.Optimizer):
        return None
    values = [value for group in obj.param_groups for name, value in group.items() if name != "params"]
    return _signs_of(obj) if all(type(value) in _UNCHANGING for value in values) else None


_SINGLE = frozenset({int, float, bool, str, type(None)})
_UNCHANGING = _SINGLE | {tuple}


def _same(some: list[object], others: list[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _plain_part(entries: dict[str, Any]) -> dict[str, Any]:
    """Return copies of those of the entries that are nests of plain values: others may be nothing that travels."""
    copies = {}
    for name, value in entries.items():
        with contextlib.suppress(TypeError, RecursionError):
            copies[name] = _copied(value)
    return copies


def _copied(value: Any) -> Any:
    """Copy a nest of plain values. Raises TypeError for others."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    kind = type(value)
    if kind in (dict, Counter):
        return kind({_copied(key): _copied(item) for key, item in value.items()})
    if kind in (list, tuple, set, frozenset):
        return kind(map(_copied, value))
    if kind in _ATOMS:
        return value
    raise TypeError(f"{kind.__name__} is no plain value")


_ATOMS = plain.ATOMS | {torch.dtype, torch.device}
