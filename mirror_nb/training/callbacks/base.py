"""What a callback is, and several as one. Knows no callback in particular, no replicas and no training loop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, final

from mirror_nb.errors import UsageError
from mirror_nb.training.history import History
from mirror_nb.training.progress import say

Logs = Mapping[str, Any] | None
T = TypeVar("T")
_TRAIN_STEP = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_TEST_STEP = ("on_test_batch_begin", "on_test_batch_end")
_PREDICT_STEP = ("on_predict_batch_begin", "on_predict_batch_end")


def _itself(value: T) -> T:
    return value


class Callback:
    """Derive from it and override the hooks that you want; `self.model` and `self.params` are there in all of them.

    `params` has `epochs`, `steps` (global batches of an epoch, None if unknown) and `verbose`. `logs` has the loss and
    the metrics over all replicas: of the epoch so far in a batch hook, of the whole epoch and with `val_` those of the
    validation data in `on_epoch_end`; empty where nothing is known yet. What a hook puts into the `logs` of
    `on_epoch_end` goes to the history.

    An epoch is one message to the replicas; with a batch hook overridden, each step is one.
    """

    _order = 0
    # Callbacks with a higher one are called after those with a lower: what writes the others' state comes last.
    _leads = True
    # Whether this process is the one that writes files and shows things: in a `%%mirrored` cell, replica 0.
    _together = False
    # Whether all replicas of a cell need it: it changes the model, or saves it, which all take part in.
    _agree: Callable[[Any], Any] = staticmethod(_itself)
    # Gives replica 0's value on all replicas: for what each would find out at its own time, about a file say.
    _tell: Callable[[str], None] = staticmethod(say)
    # Shows a line of text, above the bar and below the line of an epoch that ends.

    def __init__(self) -> None:
        self.model: Any = None
        self.params: dict[str, Any] = {}

    def set_model(self, model: Any) -> None:
        """Take the model; called before any other hook."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Take what `fit` was called with."""
        self.params = params

    @property
    def _every(self) -> int | None:
        """After how many training steps a batch hook has to be called; None: never."""
        return 1 if _overrides(self, _TRAIN_STEP) else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a later `fit` needs to go on where this one is: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave; called after `on_train_begin`."""

    def close(self) -> None:
        """Give back what is open; called last, after an error or an interrupt too."""

    def on_train_begin(self, logs: Logs = None) -> None:
        """`fit` begins."""

    def on_train_end(self, logs: Logs = None) -> None:
        """`fit` has ended, with the last epoch's logs; not called after an error or an interrupt."""

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """An epoch, counted from 0, begins."""

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """An epoch has ended, its validation too."""

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Another name of `on_train_batch_begin`."""

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Another name of `on_train_batch_end`."""

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """A step begins, counted from 0 in its epoch."""
        self.on_batch_begin(batch, logs=logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """A step has ended."""
        self.on_batch_end(batch, logs=logs)

    def on_test_begin(self, logs: Logs = None) -> None:
        """`evaluate`, or the validation of an epoch, begins."""

    def on_test_end(self, logs: Logs = None) -> None:
        """`evaluate`, or the validation of an epoch, has ended."""

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """A batch of `evaluate` begins."""

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """A batch of `evaluate` has ended."""

    def on_predict_begin(self, logs: Logs = None) -> None:
        """`predict` begins."""

    def on_predict_end(self, logs: Logs = None) -> None:
        """`predict` has ended."""

    def on_predict_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """A batch of `predict` begins."""

    def on_predict_batch_end(self, batch: int, logs: Logs = None) -> None:
        """A batch of `predict` has ended."""

    def _say(self, text: str) -> None:
        if self._leads:
            self._tell(text)


_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def _overrides(callback: Callback, hooks: Iterable[str]) -> bool:
    """Whether a callback has one of the hooks of its own: from its class, or set on it."""
    return any(
        getattr(type(callback), hook) is not getattr(Callback, hook) or hook in vars(callback) for hook in hooks
    )


_LENT = ("_leads", "_agree", "_tell")
# What a callback has from those who call it, for as long: it would not travel with that.


def _give_back(callback: Callback, before: dict[str, Any]) -> None:
    for name in _LENT:
        vars(callback).pop(name, None)
    vars(callback).update(before)


@final
class CallbackList(Callback):
    """Several callbacks as one, in the order in which they were given, those that save last.

    `history` takes what each epoch ended with, after the callbacks that add to the logs and before those that save.
    `leads`: whether this process writes and shows. `agree` gives replica 0's value on all replicas, for decisions
    that depend on files. `tell` shows a line of text. Raises UsageError for what is no callback.
    """

    def __init__(
        self,
        callbacks: Any = None,
        *,
        model: Any = None,
        params: dict[str, Any] | None = None,
        history: History | None = None,
        leads: bool = True,
        agree: Callable[[Any], Any] = _itself,
        tell: Callable[[str], None] = say,
    ) -> None:
        super().__init__()
        given = [_checked(callback) for callback in _flat(callbacks)]
        recorder = [] if history is None else [_Recorder(history)]
        self.callbacks = sorted([*given, *recorder], key=lambda callback: callback._order)
        self._before = [{name: vars(one)[name] for name in _LENT if name in vars(one)} for one in self.callbacks]
        for callback in self.callbacks:
            callback._leads = leads
            callback._agree = agree
            callback._tell = tell
        self.set_model(model)
        self.set_params(params or {})

    def set_model(self, model: Any) -> None:
        self.model = model
        self._each("set_model", model)

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params
        self._each("set_params", params)

    @property
    def _every(self) -> int | None:
        """After how many steps from the start of an epoch the batch hooks have to be called, so that all get theirs.

        At the end of an epoch they are called too, with the number of its last batch.
        """
        wanted = [callback._every for callback in self.callbacks]
        return math.gcd(*(steps for steps in wanted if steps is not None)) or None

    @property
    def every_test(self) -> int | None:
        """1 if a callback has a hook for the batches of `evaluate`, else None."""
        return 1 if any(_overrides(callback, _TEST_STEP) for callback in self.callbacks) else None

    @property
    def every_predict(self) -> int | None:
        """1 if a callback has a hook for the batches of `predict`, else None."""
        return 1 if any(_overrides(callback, _PREDICT_STEP) for callback in self.callbacks) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of those that have one, by the name of their class."""
        states: dict[str, Any] = {}
        for callback in self.callbacks:
            states.setdefault(type(callback).__name__, []).append(callback.state_dict())
        return {name: several for name, several in states.items() if any(several)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give each its state; one that was not there begins anew, and the state of one that is gone is left."""
        states = {name: list(several) for name, several in state.items()}
        for callback in self.callbacks:
            several = states.get(type(callback).__name__)
            if several and (own := several.pop(0)):
                callback.load_state_dict(own)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            # All of them, whichever raises.
            for callback, before in zip(self.callbacks, self._before, strict=True):
                stack.callback(_give_back, callback, before)
                stack.callback(callback.close)

    def _each(self, hook: str, *args: Any, **named: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(*args, **named)

    def on_train_begin(self, logs: Logs = None) -> None:
        self._each("on_train_begin", _given(logs))

    def on_train_end(self, logs: Logs = None) -> None:
        self._each("on_train_end", _given(logs))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._each("on_epoch_begin", epoch, _given(logs))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._each("on_epoch_end", epoch, _given(logs))

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._each("on_train_batch_begin", batch, logs=_given(logs))

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._each("on_train_batch_end", batch, logs=_given(logs))

    def on_test_begin(self, logs: Logs = None) -> None:
        self._each("on_test_begin", _given(logs))

    def on_test_end(self, logs: Logs = None) -> None:
        self._each("on_test_end", _given(logs))

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._each("on_test_batch_begin", batch, logs=_given(logs))

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._each("on_test_batch_end", batch, logs=_given(logs))

    def on_predict_begin(self, logs: Logs = None) -> None:
        self._each("on_predict_begin", _given(logs))

    def on_predict_end(self, logs: Logs = None) -> None:
        self._each("on_predict_end", _given(logs))

    def on_predict_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._each("on_predict_batch_begin", batch, logs=_given(logs))

    def on_predict_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._each("on_predict_batch_end", batch, logs=_given(logs))


@final
class _Recorder(Callback):
    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._history.record(epoch, logs or {})


def _given(logs: Logs) -> Mapping[str, Any]:
    """Return the logs; where there are none, a dict without entries, as Keras does: hooks look into it."""
    return {} if logs is None else logs


def _flat(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return [c for some in callbacks for c in _flat(some)] if isinstance(callbacks, list | tuple) else [callbacks]


def _checked(callback: Any) -> Callback:
    if isinstance(callback, Callback):
        if not hasattr(callback, "params"):
            # Its own __init__ did not call Callback's.
            Callback.__init__(callback)
        return callback
    if isinstance(callback, type) and issubclass(callback, Callback):
        what = f"the class {callback.__name__}: make one, {callback.__name__}(...)"
    elif type(callback).__module__.partition(".")[0] in ("keras", "tf_keras"):
        what = f"Keras's {type(callback).__name__}: those of mirror_nb.callbacks have the same names"
    else:
        what = f"{callback!r}: derive from mirror_nb.callbacks.Callback, or use LambdaCallback(on_epoch_end=...)"
    raise UsageError(f"`callbacks` has {what}")


@final
class LambdaCallback(Callback):
    """A callback made of functions: `LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs))`.

    Any hook of `Callback` may be given, by its name, with the hook's arguments: `(epoch, logs)`, `(batch, logs)` or
    `(logs)`. Raises UsageError for a name that is no hook and for what is no function.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        super().__init__()
        for name, function in hooks.items():
            if name not in _HOOKS:
                raise UsageError(f"{name!r} is no hook; there are: {', '.join(_HOOKS)}")
            if function is None:
                continue
            if not callable(function):
                raise UsageError(f"`{name}` is a function, not {function!r}")
            setattr(self, name, function)
