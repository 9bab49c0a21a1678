"""Callbacks that end a training. Know nothing of files."""

from __future__ import annotations

import copy
import math
from typing import Any, final

from mirror_nb.training.callbacks.base import Callback, Logs
from mirror_nb.training.callbacks.watching import better, check_numbers, monitored


@final
class EarlyStopping(Callback):
    """Stop when `monitor` has not improved by more than `min_delta` for `patience` epochs.

    `baseline`: a value that has to be beaten before patience starts anew; `start_from_epoch`: epochs before it do not
    count; `restore_best_weights`: put the weights of the best epoch back at the end. Never stops after the first
    epoch. NaN is no improvement (Keras takes a first one for the best). Raises UsageError for what is no number, and
    where `mode="auto"` and the name do not tell whether more or less is better.
    """

    _together = True

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__()
        check_numbers(self, min_delta=min_delta, patience=patience, start_from_epoch=start_from_epoch)
        if baseline is not None:
            check_numbers(self, baseline=baseline)
        self._better = better(self, monitor, mode, min_delta)
        self.monitor = monitor
        self.patience = patience
        self.verbose = verbose
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        self.best_epoch = 0
        self.best_weights: dict[str, Any] | None = None
        self.wait = 0
        # Epochs since the last improvement.
        self.stopped_epoch = 0
        # 0: it has not stopped.

    def on_train_begin(self, logs: Logs = None) -> None:
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        current = monitored(self, self.monitor, logs)
        if current is None or epoch < self.start_from_epoch:
            return
        improved = self._better.than(current, self.best)
        if improved:
            self.best, self.best_epoch = current, epoch
        if self.restore_best_weights and (improved or self.best_weights is None):
            # A copy: what a mirrored model gives may be where the next step writes.
            self.best_weights = copy.deepcopy(self.model.state_dict())
            self.best_epoch = epoch
        self.wait += 1
        if improved:
            if self.baseline is None or self._better.than(current, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Logs = None) -> None:
        if self.stopped_epoch and self.verbose:
            self._say(f"epoch {self.stopped_epoch + 1}: stopped early, {self.monitor} has not improved")
        if self.best_weights is not None:
            if self.verbose:
                self._say(f"the weights are those of the best epoch, {self.best_epoch + 1}")
            self.model.load_state_dict(self.best_weights)

    def state_dict(self) -> dict[str, Any]:
        names = ("best", "best_epoch", "best_weights", "wait", "stopped_epoch")
        state = {name: getattr(self, name) for name in names}
        # A plain dict in place of the module's ordered one with its metadata.
        return state | {"best_weights": None if self.best_weights is None else dict(self.best_weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        if self.stopped_epoch:
            # It was saved between this callback's decision and the end.
            self.model.stop_training = True


@final
class TerminateOnNaN(Callback):
    """Stop at the first step after which the loss is NaN or infinite.

    `raise_error`: raise RuntimeError there, so that `on_train_end` is called for no callback and a backup stays. Asks
    after each step.
    """

    def __init__(self, raise_error: bool = False) -> None:
        super().__init__()
        self.raise_error = raise_error

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        loss = (logs or {}).get("loss")
        if loss is None or math.isfinite(loss):
            return
        if self.raise_error:
            raise RuntimeError(f"the loss is {float(loss)} after batch {batch} of the epoch, counted from 0")
        self._say(f"batch {batch}: the loss is {float(loss)}, training stops")
        self.model.stop_training = True
