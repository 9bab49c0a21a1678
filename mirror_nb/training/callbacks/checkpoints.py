"""Callbacks that save the model while it is trained, and go on from there. Know no file's format."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any, Literal, final

from mirror_nb.errors import MirrorError, UsageError, users_level
from mirror_nb.training.callbacks.base import Callback, Logs
from mirror_nb.training.callbacks.watching import Steps, better, monitored, steps_or_epoch


@final
class ModelCheckpoint(Callback):
    """Save the model after each epoch, or every `save_freq` steps.

    `filepath` may have fields for `epoch` (from 1), `batch` (from 1; with a number as `save_freq`) and what is logged:
    `"{epoch:02d}-{val_loss:.2f}.pt"`; folders are made. Any ending will do: the file is that of `model.save`, written
    whole or not at all. `save_best_only`: only when `monitor` is better than ever before, `initial_value_threshold`
    included. `save_weights_only`: without the state of optimizer and training (Keras keeps the optimizer's);
    what Keras has `load_weights` for is `model.load_training(path)`, or `load_model(path)`.
    With a number as `save_freq`, steps are counted over epochs, in parts that end with an epoch: the last part of an
    epoch may be shorter.

    Raises UsageError for a `save_freq` that is neither 'epoch' nor a number of steps, for a folder as `filepath`, for
    a field that is not logged, and where `save_best_only` is asked for, `mode="auto"` and the name do not tell
    whether more or less is better.
    """

    _order = 1
    _together = True

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: int | Literal["epoch"] = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__()
        self._better = better(self, monitor, mode) if save_best_only else None
        self.filepath = os.fspath(filepath)
        self.monitor = monitor
        self.verbose = verbose
        self.save_weights_only = save_weights_only
        self.save_freq = steps_or_epoch("ModelCheckpoint's `save_freq`", save_freq)
        self.best = initial_value_threshold
        self._epoch = 0
        self._steps = Steps()

    @property
    def save_best_only(self) -> bool:
        """Whether only a better model than ever is saved."""
        return self._better is not None

    @property
    def _every(self) -> int | None:
        return self.save_freq if isinstance(self.save_freq, int) else None

    def on_train_begin(self, logs: Logs = None) -> None:
        self._steps.begin()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if isinstance(self.save_freq, int) and self._steps.taken(batch, self.save_freq):
            self._save(self._epoch, {"batch": batch + 1, **(logs or {})}, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._steps.end_epoch()
        if self.save_freq == "epoch":
            self._save(epoch, dict(logs or {}), logs)

    def _save(self, epoch: int, fields: dict[str, Any], logs: Logs) -> None:
        why = self._why(epoch, logs)
        if why is None:
            return
        path = self._path(epoch, fields)
        if self._leads:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.model.save(path, include_optimizer=not self.save_weights_only)
        if self.verbose:
            self._say(f"epoch {epoch + 1}: {why}saved in {path}")

    def _why(self, epoch: int, logs: Logs) -> str | None:
        """Return the reason to save, as the message says it; None where there is none."""
        if self._better is None:
            return ""
        current = monitored(self, self.monitor, logs)
        if current is None:
            # As Keras does: a model too many rather than none.
            return ""
        before = "none" if self.best is None else f"{self.best:.5f}"
        if not self._better.than(current, self.best):
            if self.verbose:
                self._say(f"epoch {epoch + 1}: {self.monitor} has not improved from {before}")
            return None
        self.best = current
        return f"{self.monitor} has improved from {before} to {current:.5f}, "

    def _path(self, epoch: int, fields: dict[str, Any]) -> Path:
        try:
            path = Path(self.filepath.format(**{**fields, "epoch": epoch + 1}))
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise UsageError(
                f"ModelCheckpoint's `filepath`, {self.filepath!r}, cannot be filled in ({error!r}); "
                f"fields are: epoch, {', '.join(fields)}"
            ) from error
        if path.is_dir():
            raise UsageError(f"ModelCheckpoint's `filepath`, {path}, is a folder; add the name of a file")
        return path

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "steps": self._steps.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self._steps.load_state_dict(state["steps"])


@final
class BackupAndRestore(Callback):
    """Save the whole state of training in `backup_dir`, and let a `fit` that finds it there go on from it.

    After each epoch, or with a number as `save_freq` after so many steps (as ModelCheckpoint counts them). The
    resumed `fit` goes on at the very step (Keras: at the beginning of the epoch), with the state of optimizer, random
    numbers, order of the data and other callbacks, and ends on the weights of one that was never interrupted. When
    `fit` ends by itself, the backup is deleted unless `delete_checkpoint=False`; other files in the folder stay. With
    `double_checkpoint` the backup before is kept too, and taken where the last cannot be read.

    Raises UsageError for an empty `backup_dir`, and for a `save_freq` that is neither 'epoch' nor a number of steps.
    """

    _order = 2
    _together = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: int | Literal["epoch"] = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        if not os.fspath(backup_dir):
            raise UsageError("`backup_dir` is empty; name a folder, which is made if it is not there")
        self.backup_dir = Path(backup_dir)
        self.save_freq = steps_or_epoch("BackupAndRestore's `save_freq`", save_freq)
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self._steps = Steps()

    @property
    def _latest(self) -> Path:
        return self.backup_dir / "latest.pt"

    @property
    def _previous(self) -> Path:
        return self.backup_dir / "previous.pt"

    @property
    def _every(self) -> int | None:
        return self.save_freq if isinstance(self.save_freq, int) else None

    def on_train_begin(self, logs: Logs = None) -> None:
        self._steps.begin()
        there = [path for path in (self._latest, self._previous) if self._agree(path.is_file())]
        while there:
            path = there.pop(0)
            try:
                self.model.load_training(path)
                return
            except (MirrorError, OSError) as error:
                if not there:
                    raise
                warnings.warn(
                    f"{path} cannot be read, the backup before it is taken: {error}", stacklevel=users_level()
                )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if isinstance(self.save_freq, int) and self._steps.taken(batch, self.save_freq):
            self._save()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._steps.end_epoch()
        if self.save_freq == "epoch":
            self._save()

    def _save(self) -> None:
        if self._leads:
            self.backup_dir.mkdir(parents=True, exist_ok=True)
            if self.double_checkpoint and self._latest.is_file():
                # Killed here, the next fit finds the previous one alone.
                self._latest.replace(self._previous)
        self.model.save(self._latest)

    def on_train_end(self, logs: Logs = None) -> None:
        if not (self.delete_checkpoint and self._leads):
            return
        for path in (self._latest, self._previous):
            path.unlink(missing_ok=True)
        # Others' files keep the folder.
        with contextlib.suppress(OSError):
            self.backup_dir.rmdir()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps.load_state_dict(state["steps"])
