"""What callbacks tell by: whether a logged value is better than another, and how many steps were done."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from mirror_nb.errors import UsageError, users_level
from mirror_nb.training.callbacks.base import Callback, Logs
from mirror_nb.training.history import lower_is_better


@dataclass(frozen=True, slots=True)
class Better:
    """Which of two values of one metric is an improvement on the other."""

    lower: bool
    min_delta: float
    # Below it a change is none.

    def than(self, value: float, best: float | None) -> bool:
        """Whether `value` is an improvement; NaN never is, any number is one on None."""
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        return value + self.min_delta < best if self.lower else value - self.min_delta > best


def better(who: Callback, monitor: str, mode: str, min_delta: float = 0.0) -> Better:
    name = type(who).__name__
    if mode not in ("auto", "min", "max"):
        raise UsageError(f"{name}'s `mode` is 'auto', 'min' or 'max', not {mode!r}")
    lower = lower_is_better(monitor) if mode == "auto" else mode == "min"
    if lower is None:
        raise UsageError(
            f"whether more or less of {monitor!r} is better cannot be told from its name; "
            f"pass mode='max' or mode='min' to {name}"
        )
    return Better(lower, abs(min_delta))


def check_numbers(who: Callback, **given: Any) -> None:
    """Raise UsageError for what is no number: found out later, it would end a training in its middle."""
    for name, value in given.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise UsageError(f"{type(who).__name__}'s `{name}` is a number, not {value!r}")


def monitored(who: Callback, monitor: str, logs: Logs) -> float | None:
    """Return the monitored value; None with a warning where it was not logged.

    Raises UsageError for one that is no single number.
    """
    value = (logs or {}).get(monitor)
    if value is None:
        known = ", ".join(logs or {}) or "nothing"
        advice = "; give fit validation_data= or validation_split=" if monitor.startswith("val_") else ""
        warnings.warn(
            f"{type(who).__name__} looks at {monitor!r}, which was not logged in this epoch; there is: {known}"
            + advice,
            stacklevel=users_level(),
        )
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{type(who).__name__} looks at {monitor!r}, which is no single number: {value!r}") from error


class Steps:
    """Counts training steps by the numbers of the batches that hooks are called with, not one call a step."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.total = 0
        self.since = 0
        # Steps since they were last `taken`.
        self._last = -1
        # Number of the last batch of this epoch that was seen.

    def end_epoch(self) -> None:
        self._last = -1

    def taken(self, batch: int, enough: int) -> bool:
        """Count up to that batch; whether so many steps are done since this last was true."""
        done = batch - self._last
        self._last = batch
        self.total += done
        self.since += done
        if self.since < enough:
            return False
        self.since = 0
        return True

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total, "since": self.since, "last": self._last}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.total, self.since, self._last = state["total"], state["since"], state["last"]


def steps_or_epoch(argument: str, value: Any, others: str = "") -> int | Literal["epoch"]:
    """Return how often a callback does something. `others`: what else the caller knows, for the error."""
    if isinstance(value, str) and value == "epoch":
        return "epoch"
    if not isinstance(value, int | Integral) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{argument} is 'epoch'{others} or a number of steps, not {value!r}")
    return int(value)
