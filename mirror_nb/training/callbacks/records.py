"""Callbacks that write what was logged into files that others read: a table, and TensorBoard's."""

from __future__ import annotations

import csv
import importlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, final

import torch

from mirror_nb.errors import MirrorError, UsageError
from mirror_nb.training.callbacks.base import Callback, Logs
from mirror_nb.training.callbacks.watching import Steps, steps_or_epoch
from mirror_nb.training.history import plain


@final
class CSVLogger(Callback):
    """Write a line an epoch into a CSV file: `epoch` from 0, then what was logged, in the order of the names.

    Where no validation data was used in the first epoch there are columns for it, with NA. `append`: add to a file
    that is there, in its columns. The file is open only while a line is written. Folders are made.

    Raises UsageError where the file to append to has no column for something that is logged.
    """

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        super().__init__()
        self.filename = Path(filename)
        self.sep = separator
        self.append = append
        self._columns: list[str] | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        self._columns = None
        if not self._leads:
            return
        self.filename.parent.mkdir(parents=True, exist_ok=True)
        if not self.append:
            self.filename.write_text("")
        elif self.filename.is_file():
            with self.filename.open(newline="") as file:
                self._columns = next(csv.reader(file, delimiter=self.sep), None)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not self._leads:
            return
        logs = logs or {}
        rows: list[dict[str, Any]] = [{"epoch": epoch} | {name: _in_csv(value) for name, value in logs.items()}]
        if self._columns is None:
            self._columns = _csv_columns(logs)
            rows.insert(0, {name: name for name in self._columns})
        elif self.append and (missing := set(logs) - set(self._columns)):
            raise UsageError(
                f"{self.filename} has no column for {', '.join(sorted(missing))}, but: {', '.join(self._columns)}; "
                "give another file, or append=False"
            )
        with self.filename.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="NA", extrasaction="ignore", delimiter=self.sep).writerows(
                rows
            )


def _csv_columns(logs: Mapping[str, Any]) -> list[str]:
    names = sorted(logs)
    validated = any(name.startswith("val_") for name in names)
    return ["epoch", *names, *([] if validated else [f"val_{name}" for name in names])]


def _in_csv(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else value


@final
class TensorBoard(Callback):
    """Write what is logged for TensorBoard, with torch's writer: `log_dir/train` and `log_dir/validation`.

    Tags and steps are Keras's: `epoch_loss` by epoch, with `update_freq` a number of steps (or "batch", 1) also
    `batch_loss` by step, `evaluation_loss_vs_iterations` after each validation, and with `histogram_freq` a histogram
    of each parameter and buffer every so many epochs. `write_steps_per_second`: that too, by epoch.

    Raises MirrorError where TensorBoard is not installed, and UsageError for an `update_freq` that is neither 'epoch',
    'batch' nor a number of steps.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_steps_per_second: bool = False,
        update_freq: int | Literal["epoch", "batch"] = "epoch",
    ) -> None:
        super().__init__()
        self._open = _writer_class()
        self.log_dir = Path(log_dir)
        self.histogram_freq = histogram_freq
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = 1 if update_freq == "batch" else steps_or_epoch("`update_freq`", update_freq, ", 'batch'")
        self._writers: dict[str, Any] = {}
        self._steps = Steps()
        self._epoch = 0
        self._began = 0.0

    @property
    def _every(self) -> int | None:
        return self.update_freq if isinstance(self.update_freq, int) else None

    def on_train_begin(self, logs: Logs = None) -> None:
        self._steps.begin()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch
        self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if isinstance(self.update_freq, int) and self._steps.taken(batch, self.update_freq):
            self._write("train", {f"batch_{name}": value for name, value in (logs or {}).items()}, self._steps.total)

    def on_test_end(self, logs: Logs = None) -> None:
        step = self._iterations()
        if step is not None:
            logs = {f"evaluation_{n.removeprefix('val_')}_vs_iterations": v for n, v in (logs or {}).items()}
            self._write("validation", logs, step)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._steps.end_epoch()
        logs = logs or {}
        train = {f"epoch_{name}": value for name, value in logs.items() if not name.startswith("val_")}
        if self.model.optimizer is not None:
            # A model with a training step of its own may have none, or several.
            train["epoch_learning_rate"] = float(self.model.learning_rate)
        steps = self.params.get("steps")
        if self.write_steps_per_second and steps:
            train["epoch_steps_per_second"] = steps / (time.monotonic() - self._began)
        self._write("train", train, epoch)
        validation = {f"epoch_{n.removeprefix('val_')}": v for n, v in logs.items() if n.startswith("val_")}
        self._write("validation", validation, epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._write_histograms(epoch)
        for writer in self._writers.values():
            # Whoever looks on sees the epoch.
            writer.flush()

    def close(self) -> None:
        while self._writers:
            self._writers.popitem()[1].close()

    def _iterations(self) -> int | None:
        """Return how many steps were done, at the end of an epoch; None where it is not known."""
        if isinstance(self.update_freq, int):
            return self._steps.total
        steps = self.params.get("steps")
        return steps and (self._epoch + 1) * steps

    def _write(self, part: str, values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            number = plain(value)
            if self._leads and isinstance(number, int | float):
                self._writer(part).add_scalar(name, float(number), step)

    def _write_histograms(self, epoch: int) -> None:
        for name, value in self.model.state_dict().items():
            if not (self._leads and isinstance(value, torch.Tensor) and value.is_floating_point()):
                continue
            # NumPy, which counts, has no bfloat16, and no place for what is infinite or no number.
            counted = value[value.isfinite()].float().cpu()
            if counted.numel():
                self._writer("train").add_histogram(f"{name.replace('.', '/')}/histogram", counted, epoch)

    def _writer(self, part: str) -> Any:
        if part not in self._writers:
            self._writers[part] = self._open(str(self.log_dir / part))
        return self._writers[part]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps.load_state_dict(state["steps"])


def _writer_class() -> Callable[[str], Any]:
    try:
        writer: Callable[[str], Any] = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise MirrorError("TensorBoard is not installed: pip install 'mirror_nb[tensorboard]'") from error
    return writer
