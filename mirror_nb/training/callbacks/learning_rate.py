"""Callbacks that set the learning rate between epochs. Know the optimizer by its parameter groups."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, final

from mirror_nb.errors import UsageError
from mirror_nb.training.callbacks.base import Callback, Logs
from mirror_nb.training.callbacks.watching import better, check_numbers, monitored


@final
class LearningRateScheduler(Callback):
    """Set the learning rate at the beginning of each epoch to `schedule(epoch, lr)`, or `schedule(epoch)`.

    `epoch` counts from 0; `lr` is the present rate. All parameter groups get the result. Logged as `learning_rate`.
    Raises UsageError for a result that is not a number of at least 0.
    """

    _together = True

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        super().__init__()
        if not callable(schedule):
            raise UsageError(f"`schedule` is a function of (epoch, lr), not {schedule!r}")
        self.schedule = schedule
        self.verbose = verbose
        self._takes_rate = _takes_two(schedule)
        self._set: int | None = None
        # The epoch whose rate it has set.

    def on_train_begin(self, logs: Logs = None) -> None:
        self._set = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if epoch == self._set:
            # A fit that goes on in its middle: the optimizer has the rate.
            return
        now = float(self.model.learning_rate)
        result = self.schedule(epoch, now) if self._takes_rate else self.schedule(epoch)
        try:
            rate = float(result)
        except (TypeError, ValueError, RuntimeError):
            rate = math.nan
        if isinstance(result, str | bool) or not (math.isfinite(rate) and rate >= 0):
            raise UsageError(f"`schedule` has to return a learning rate, a number of at least 0, not {result!r}")
        self.model.learning_rate, self._set = rate, epoch
        if self.verbose:
            self._say(f"epoch {epoch + 1}: the learning rate is {rate:g}")

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        _log_rate(self.model, logs)

    def state_dict(self) -> dict[str, Any]:
        return {"set": self._set}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._set = state["set"]


@final
class ReduceLROnPlateau(Callback):
    """Multiply the learning rate by `factor` when `monitor` has not improved for `patience` epochs.

    Not below `min_lr`, and not in the `cooldown` epochs after it did. Each parameter group's rate is multiplied.
    Logged as `learning_rate`. Raises UsageError for what is no number, for a `factor` below 0 or from 1 on, and where
    `mode="auto"` and the name do not tell whether more or less is better.
    """

    _together = True

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__()
        check_numbers(self, factor=factor, patience=patience, min_delta=min_delta, cooldown=cooldown, min_lr=min_lr)
        if not 0.0 <= factor < 1.0:
            raise UsageError(f"`factor` has to be from 0 to less than 1 to reduce the learning rate, not {factor}")
        self._better = better(self, monitor, mode, min_delta)
        self.monitor = monitor
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        self.wait = 0
        # Epochs since the last improvement or reduction.
        self.cooldown_counter = 0
        # Epochs of cooldown that are left.

    def on_train_begin(self, logs: Logs = None) -> None:
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        _log_rate(self.model, logs)
        current = monitored(self, self.monitor, logs)
        if current is None:
            return
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._better.than(current, self.best):
            self.best, self.wait = current, 0
        elif not self.cooldown_counter:
            self.wait += 1
            if self.wait >= self.patience and self._reduce(epoch):
                self.cooldown_counter, self.wait = self.cooldown, 0

    def _reduce(self, epoch: int) -> bool:
        groups = [group for group in self.model.optimizer.param_groups if float(group["lr"]) > self.min_lr]
        for group in groups:
            rate = max(float(group["lr"]) * self.factor, self.min_lr)
            # A tensor stays one: an optimizer that was made capturable wants it.
            group["lr"] = group["lr"].new_tensor(rate) if hasattr(group["lr"], "new_tensor") else rate
        if groups and self.verbose:
            self._say(f"epoch {epoch + 1}: the learning rate is reduced to {float(groups[0]['lr']):g}")
        return bool(groups)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "wait": self.wait, "cooldown_counter": self.cooldown_counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.wait, self.cooldown_counter = state["best"], state["wait"], state["cooldown_counter"]


def _log_rate(model: Any, logs: Logs) -> None:
    if isinstance(logs, dict):
        logs["learning_rate"] = float(model.learning_rate)


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(0, 0.0)
    except TypeError:
        return False
    except ValueError:
        # Nothing is known of it.
        return True
    return True
