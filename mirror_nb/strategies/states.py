"""States of the controller's optimizers, moments and the like: they live in the replicas.

    optimizer.state_dict(), optimizer.state, copies        ◀─ a replica's state, if the replicas have run since
    optimizer.load_state_dict(), writes to optimizer.state ─▶ every replica; the latter before they run again

Knows optimizers and whom to ask.
"""

from __future__ import annotations

import functools
import operator
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol, final

import torch

from mirror_nb.errors import UsageError, users_level
from mirror_nb.readable import listed
from mirror_nb.strategies.reading import reading
from mirror_nb.transfer.told import parameters_of


class Keeper(Protocol):
    """Where the states are."""

    calls: int
    # What may have changed them was run so often.

    def has_sent(self, obj: object) -> bool:
        """Whether there are replicas that have an object."""

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Return a replica's state of an optimizer, as its state_dict has it; raises what asking raises."""

    def trained(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
        """Return whose entries are in that, in its order, None for what is gone here."""

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
        """Give all replicas such a state."""


@final
class States:
    """Brings states here when they are asked for, and out when they are loaded."""

    def __init__(self, keeper: Keeper) -> None:
        # Weakly: an optimizer may outlive its strategy.
        self._keeper = weakref.ref(keeper)
        self._read_at: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # After how many calls the state here was that of the replicas.
        self._signs: weakref.WeakKeyDictionary[Any, _Signs | None] = weakref.WeakKeyDictionary()
        # What was in it then; None of one that was never read.
        self._ahead: weakref.WeakSet[Any] = weakref.WeakSet()
        # Whose state here was written to and is of other parameters than the replicas': it is sent with these.

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Look after an optimizer from now on."""
        _with_hooks(optimizer)
        # Besides the state itself, which somebody may replace.
        optimizer.register_state_dict_pre_hook(self._read_trained)
        optimizer.register_load_state_dict_post_hook(self._loaded)
        self._follow(optimizer)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer.state) is defaultdict:
            optimizer.state = _State(dict, optimizer.state)
        if isinstance(optimizer.state, _State):
            optimizer.state.readers[self] = functools.partial(_read, self, weakref.ref(optimizer))
            self._signs.setdefault(optimizer, None)

    def have(self, optimizer: Any) -> None:
        """The replicas have the state that is here."""
        keeper = self._keeper()
        self._ahead.discard(optimizer)
        if keeper is not None:
            self._read_at[optimizer] = keeper.calls
            if optimizer in self._signs:
                self._signs[optimizer] = _signs_of(optimizer)

    def push(self) -> None:
        """Give the replicas the states that somebody has written to here since they were read, or has replaced."""
        keeper = self._keeper()
        if keeper is None:
            return
        for optimizer, signs in list(self._signs.items()):
            replaced = self not in getattr(optimizer.state, "readers", ())
            read = self._read_at.get(optimizer) == keeper.calls
            try:
                written = replaced or (read and signs is not None and not signs.hold(_signs_of(optimizer)))
            except UsageError as lost:
                # By mirrored cells that had it, too. The call may be about others.
                warnings.warn(f"{lost}; the strategy's replicas go on with theirs", stacklevel=users_level())
                continue
            if written:
                self._loaded(optimizer)

    def here(self, optimizer: Any) -> bool:
        """Whether the state here is that which the replicas had when the latest call began."""
        keeper = self._keeper()
        return keeper is None or self._read_at.get(optimizer, -1) >= keeper.calls - 1

    def read(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the replicas' state here, unless it is here.

        Raises what a call raises, and UsageError for an optimizer that has parameters there alone.
        """
        keeper = self._asked(optimizer)
        if keeper is None or self._read_at.get(optimizer) == keeper.calls or optimizer in self._ahead:
            return
        # Who asks in inference mode goes on to train.
        with torch.inference_mode(False):
            state = keeper.state_of(optimizer)
        parameters = keeper.trained(optimizer)
        if any(isinstance(key, int) and key >= len(parameters) for key in state):
            raise UsageError(
                f"the {type(optimizer).__name__} got parameter groups in the replicas that it has not here: call its "
                "state_dict there, in a mirrored cell or in the function given to strategy.run"
            )
        # Past `_State`, which would read first.
        dict.clear(optimizer.state)
        for key, value in state.items():
            parameter = parameters[key] if isinstance(key, int) else None
            if not isinstance(key, int) or parameter is not None:
                dict.__setitem__(optimizer.state, key if parameter is None else parameter, _beside(parameter, value))
        self.have(optimizer)

    def _read_trained(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the state here, without what is of parameters that others have come for: torch's would fail on it."""
        self.read(optimizer)
        state, own = optimizer.state, set(map(id, parameters_of(optimizer)))
        if isinstance(state, _State):
            for key in [key for key in dict.keys(state) if isinstance(key, torch.Tensor) and id(key) not in own]:
                dict.__delitem__(state, key)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self._follow(optimizer)
        keeper = self._asked(optimizer)
        if keeper is None:
            return
        # Not read again first.
        self.have(optimizer)
        if list(map(id, keeper.trained(optimizer))) != list(map(id, parameters_of(optimizer))):
            self._ahead.add(optimizer)
            return
        try:
            keeper.load_state(optimizer, own_state(optimizer))
        except BaseException:
            del self._read_at[optimizer]
            raise

    def _asked(self, optimizer: torch.optim.Optimizer) -> Keeper | None:
        keeper = self._keeper()
        return keeper if keeper is not None and keeper.has_sent(optimizer) else None


class _State(defaultdict[Any, Any]):
    """An optimizer's state that is brought here before anybody looks at it. A copy of it is an ordinary one."""

    def __init__(self, *args: Any) -> None:
        # Python makes copies by the class, with what a defaultdict takes: those nobody brings anything.
        super().__init__(*args)
        self.readers: dict[States, Callable[[], None]] = {}

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.items()))


def _looked_at(name: str) -> Callable[..., Any]:
    look = getattr(defaultdict, name)

    @functools.wraps(look)
    def looked_at(state: _State, *args: Any) -> Any:
        for read in list(state.readers.values()):
            read()
        return look(state, *args)

    return looked_at


_LOOKS = ("__getitem__", "__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__repr__", "__reversed__")
_WRITES = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")
_COPIES = ("__copy__", "__or__", "__ror__", "copy")
for _name in (*_LOOKS, *_WRITES, *_COPIES, "get", "items", "keys", "values"):
    setattr(_State, _name, _looked_at(_name))


def _read(states: States, reference: weakref.ref[torch.optim.Optimizer]) -> None:
    optimizer = reference()
    if optimizer is not None:
        # Who looks at it may go on to the parameters: `eval()` of a schedule-free one does. State_dict does not.
        if sys._getframe(2).f_globals.get("__name__") != torch.optim.Optimizer.__module__:
            reading.bring_trained(optimizer)
        states.read(optimizer)


def _signs_of(optimizer: torch.optim.Optimizer) -> _Signs:
    """Return what is another once somebody has written to the state, or another's replicas have gone on with it."""
    for states in list(getattr(optimizer.state, "readers", ())):
        states.read(optimizer)
    # Past `_State`, which would bring networks, too.
    items = dict.items if isinstance(optimizer.state, dict) else type(optimizer.state).items
    marks: list[object] = []
    values: list[object] = []
    for key, entries in items(optimizer.state):
        marks.append(id(key))
        for name, value in entries.items() if isinstance(entries, dict) else [("", entries)]:
            marks += [name, value._version if isinstance(value, torch.Tensor) else None]
            values.append(value)
    return _Signs(marks, values)


@final
class _Signs:
    """What was in a state. The values themselves: where one lay that is gone, another may lie now."""

    def __init__(self, marks: list[object], values: list[object]) -> None:
        self._marks = marks
        self._values = values

    def hold(self, now: _Signs) -> bool:
        """Whether nobody has written to the state since."""
        return self._marks == now._marks and all(map(operator.is_, self._values, now._values))


def _beside(parameter: torch.Tensor | None, value: Any) -> Any:
    """Return a parameter's state, which may have been on a GPU there, with tensors of its shape where it is here."""
    if parameter is None or not isinstance(value, dict):
        return value
    return {
        name: one.to(parameter.device) if isinstance(one, torch.Tensor) and one.shape == parameter.shape else one
        for name, one in value.items()
    }


_Torchs = torch.optim.Optimizer


def _with_hooks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give one that is around another, and has not called torch's constructor, its hooks, as copies get them."""
    if "_optimizer_state_dict_pre_hooks" not in vars(optimizer):
        _Torchs.__setstate__(optimizer, {})
    return optimizer


def kept(learned: Iterable[tuple[str, Callable[[], None]]]) -> list[str]:
    """Bring here what only the replicas know, each by itself: what one cannot tell costs no other its value.

    Returns what was lost, with the reason.
    """
    lost: dict[str, list[str]] = {}
    for what, keep in list(learned):
        try:
            keep()
        except Exception as reason:
            lost.setdefault(str(reason), []).append(what)
    return [f"{listed(those)}: {why}" for why, those in lost.items()]


def own_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return the state by the numbers of parameters: torch's form, whatever a class of the user's tells of itself."""
    return _Torchs.state_dict(_with_hooks(optimizer))["state"]


def state_of(optimizer: torch.optim.Optimizer, wanted: bool = True) -> dict[Any, Any] | None:
    """In a replica: return the state, if it is wanted."""
    return own_state(optimizer) if wanted else None


def groups_from(optimizer: torch.optim.Optimizer, first: int, wanted: bool = True) -> list[dict[str, Any]]:
    """In a replica: return the parameter groups from number `first` on, if they are wanted."""
    return optimizer.param_groups[first:] if wanted else []


def add_groups(optimizer: torch.optim.Optimizer, first: int, groups: list[dict[str, Any]]) -> None:
    """On either side: add those of these parameter groups, which begin with number `first`, that are not there yet.

    Raises UsageError where others were added here.
    """
    for i, group in enumerate(groups, first):
        if i >= len(optimizer.param_groups):
            optimizer.add_param_group(group)
        elif list(map(id, optimizer.param_groups[i]["params"])) != list(map(id, group["params"])):
            raise UsageError(
                f"the {type(optimizer).__name__} got other parameter groups in the replicas than here: add them on "
                "one side alone, or make a new optimizer in the scope"
            )


def load_state(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
    """In a replica: take over a state."""
    groups = optimizer.param_groups
    # As its class does it, unless that wants another form.
    load = _Torchs if type(optimizer).state_dict is not _Torchs.state_dict else type(optimizer)
    load.load_state_dict(optimizer, {**_Torchs.state_dict(_with_hooks(optimizer)), "state": state})
    # One around another has that one's.
    optimizer.param_groups = groups
    # That made it of the parameters' dtype, which may have changed since the moments were made (`model.half()`).
    for key, parameter in enumerate(parameters_of(optimizer)):
        entries: Any = optimizer.state.get(parameter)
        if not isinstance(entries, dict):
            continue
        for name, value in state.get(key, {}).items():
            loaded = entries.get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                entries[name] = value.to(loaded.device)
