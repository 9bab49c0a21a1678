"""What `fit` returns: the loss and the metrics of each epoch, as lists, as a table, and as a picture when asked.

Knows which of two values of a metric is the better one. Knows no model and no training; how the picture is drawn is
not known here.
"""

from __future__ import annotations

import html
import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mirror_nb.errors import MirrorError, UsageError

_ROWS = 20
# A longer table shows its first and its last half of these.
_LOWER = re.compile(
    r"loss|error|(^|_)(mse|mae|rmse|mape|msle|nll|wer|cer|mean_(squared|absolute)\w*)($|_)|entropy|crossentropy|hinge"
    r"|divergence|perplexity|huber|smooth_l1|distance"
)
_HIGHER = re.compile(
    r"accuracy|auc|auroc|precision|recall|specificity|sensitivity|jaccard|dice|similarity|kappa|correlation"
    r"|(^|_)(acc|top_?\d+\w*|f\d+|f_?1\w*|fbeta\w*|iou|miou|r2\w*|map|psnr|ssim|bleu|rouge\w*|explained_variance)($|_)"
)


def lower_is_better(metric: str) -> bool | None:
    """Tell from a metric's name whether less of it is better; None where the name does not tell.

    The prefix `val_` and the names of outputs do not matter: `val_digit_loss` is a loss. Keras's
    `cosine_similarity` is more for vectors that are more alike.
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", metric.removeprefix("val_")).lower()
    if _LOWER.search(words):
        return True
    return False if _HIGHER.search(words) else None


class History:
    """The loss and the metrics of each epoch of one `fit`.

    `history` has a list for each name that was logged, `val_` before those of the validation data: floats, or lists
    of floats for a metric of several values. Something that is not there in every epoch (validation every k epochs)
    has a shorter list. `epoch` has the numbers of the epochs, from 0; `params` what `fit` was called with.
    In a notebook it shows itself as a table, in which epochs are counted from 1, as in the lines of `fit`.
    """

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self.history: dict[str, list[Any]] = {}
        self.epoch: list[int] = []
        self.params: dict[str, Any] = dict(params or {})
        self._when: dict[str, list[int]] = {}
        # The epoch of each value.

    def record(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Add what an epoch, counted from 0, ended with."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(plain(value))
            self._when.setdefault(name, []).append(epoch)

    # ------------------------------------------------------------------ questions

    def values(self, metric: str) -> dict[int, Any]:
        """Return a metric's value by epoch, from 0.

        Raises UsageError for one that was not logged.
        """
        if metric not in self.history:
            raise UsageError(f"{metric!r} was not logged; there are: {', '.join(self.history) or 'none yet'}")
        # The lists are the user's, as in Keras: one may have put more into them, or other lists beside them.
        return dict(zip(self._when.get(metric, self.epoch), self.history[metric], strict=False))

    def best_epoch(self, metric: str | None = None) -> int | None:
        """Return the epoch, from 0, with the best value of a metric; None if no value of it is a finite number.

        Without a name: of `val_loss`, else of `loss`. Raises UsageError for a metric that was not logged, and for
        one whose name does not tell which values are better.
        """
        if metric is None:
            metric = next((name for name in ("val_loss", "loss") if name in self.history), None)
            if metric is None:
                return None
        lower = lower_is_better(metric)
        values = self.values(metric)
        if lower is None:
            raise UsageError(f"whether more or less of {metric!r} is better is not known; compare history[{metric!r}]")
        return _best(values, lower)

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row an epoch, its index `epoch` from 0; what was not logged is NaN.

        Raises MirrorError where pandas is not installed.
        """
        try:
            frame = importlib.import_module("pandas").DataFrame
        except ImportError as error:
            raise MirrorError("a DataFrame needs pandas, which is not installed: pip install pandas") from error
        columns = {name: [self.values(name).get(e, math.nan) for e in self.epoch] for name in self.history}
        return frame(columns, index=self.epoch).rename_axis("epoch")

    def plot(self, metrics: Sequence[str] | None = None) -> Any:
        """Draw each metric with its `val_` twin over the epochs, the best epoch marked; return the matplotlib figure.

        `metrics` chooses and orders them: `["loss", "accuracy"]`. In a notebook the figure shows itself as the last
        value of a cell; elsewhere `history.plot().savefig("history.png")`. Raises UsageError for a metric that was
        not logged or has no single value an epoch, and where no epoch has ended.
        """
        # By name: what draws lives above.
        draw: Callable[[History, Sequence[str] | None], Any]
        draw = importlib.import_module("mirror_nb.notebook.curves").draw
        return draw(self, metrics)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for a checkpoint."""
        return {"epoch": list(self.epoch), "values": {n: dict(self.values(n)) for n in self.history}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        self.epoch = list(state["epoch"])
        self._when = {name: list(values) for name, values in state["values"].items()}
        self.history = {name: list(values.values()) for name, values in state["values"].items()}

    # ------------------------------------------------------------------ the table

    def __repr__(self) -> str:
        header, rows = self._cells()
        lines = [[text for text, _ in row] for row in rows]
        widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
        table = ("  ".join(f"{text:>{w}}" for text, w in zip(line, widths, strict=True)) for line in [header, *lines])
        return "\n".join([self._headline(), *(table if rows else ())])

    def _repr_html_(self) -> str:
        header, rows = self._cells()
        # The colours of the page, whatever they are: dark and light themes both.
        cell = "padding:.15em .7em;text-align:right;font-variant-numeric:tabular-nums"
        best = "font-weight:bold;background:color-mix(in srgb,currentColor 14%,transparent)"
        head = "".join(f'<th style="{cell}">{html.escape(name)}</th>' for name in header)
        body = "".join(
            "<tr>" + "".join(f'<td style="{cell};{best if b else ""}">{html.escape(t)}</td>' for t, b in row) + "</tr>"
            for row in rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        return f"<div><div>{html.escape(self._headline())}</div>{table}</div>"

    def _headline(self) -> str:
        epochs = f"{len(self.epoch)} epoch{'' if len(self.epoch) == 1 else 's'}"
        best = self.best_epoch()
        if best is None:
            return f"History of {epochs}"
        name = "val_loss" if "val_loss" in self.history else "loss"
        return f"History of {epochs}; the best {name}, {shown(self.values(name)[best])}, in epoch {best + 1}"

    def _cells(self) -> tuple[list[str], list[list[tuple[str, bool]]]]:
        """Return the header and, of each row, its texts and whether each is the best of its column."""
        columns = {name: self.values(name) for name in self.history}
        best = {name: _best(values, lower_is_better(name)) for name, values in columns.items()}
        rows = []
        for place in _few(range(len(self.epoch))):
            if place is None:
                rows.append([("…", False)] * (1 + len(columns)))
                continue
            e = self.epoch[place]
            values = [(shown(v[e]) if e in v else "", best[name] == e) for name, v in columns.items()]
            rows.append([(str(e + 1), False), *values])
        return ["epoch", *columns], rows


def shown(value: Any) -> str:
    """Return a metric's value as a table or a line shows it: four decimals, or four digits of what is small."""
    if isinstance(value, list | tuple):
        return f"{len(value)} values"
    if not isinstance(value, float | bool):
        # Whole numbers, and whatever else a callback has put into the logs.
        return str(value)
    number = float(value)
    return f"{number:.4f}" if number == 0 or not 0 < abs(number) < 1e-2 else f"{number:#.4g}"


def _few(places: range) -> Iterable[int | None]:
    """Return all of them, or the first and the last with None between."""
    if len(places) <= _ROWS:
        return places
    return (*places[: _ROWS // 2], None, *places[-_ROWS // 2 :])


def _best(values: Mapping[int, Any], lower: bool | None) -> int | None:
    finite = {e: v for e, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
    if lower is None or not finite:
        return None
    # The first of equal ones: it was reached with less training.
    return (min if lower else max)(finite, key=lambda epoch: finite[epoch])


def plain(value: Any) -> Any:
    """Return a number, or a list of numbers, in place of a tensor or an array."""
    return value.tolist() if hasattr(value, "tolist") else value
