"""Training as lines of text: one an epoch, and a live bar under them where somebody watches.

Knows terminals and a notebook's standard output, which both go back to the start of a line at a carriage return; knows
no widgets: a bar of text is drawn over, and a notebook that is saved, opened again, or run by nbval has the lines
alone. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO, final

from tqdm import tqdm

from mirror_nb.errors import UsageError
from mirror_nb.readable import duration, writable
from mirror_nb.training.history import plain, shown

DRAW_SECONDS = 0.1
# Between two drawings of the bar on a terminal.
NOTEBOOK_SECONDS = 0.25
# In a notebook each is a message to the browser.
COLUMNS = 100
# Width of the bar's line in a notebook, which does not tell its own.


def say(text: str) -> None:
    """Write a line to standard output, above any bar."""
    out = _console()
    tqdm.write(writable(text, out), file=out)
    out.flush()


def _console() -> TextIO:
    """Return standard output; a program without a console has none."""
    return sys.stdout or io.StringIO()


@final
class Progress:
    """Shows a `fit`, an `evaluate` or a `predict` while it goes on.

    `verbose`: 0 shows nothing; 1 (or "auto") a line an epoch with a live bar below, where `out` is a terminal or a
    notebook, and the lines alone elsewhere, in logs say; 2 the lines alone. `close` ends it, after an error too.
    Without `leads` nothing is shown: another replica does.

    Raises UsageError for another `verbose`.
    """

    def __init__(
        self,
        verbose: int | str = 1,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        leads: bool = True,
    ) -> None:
        if verbose not in (0, 1, 2, "auto"):
            raise UsageError(f"`verbose` is 0 (nothing), 1 or 'auto' (a bar), or 2 (a line an epoch), not {verbose!r}")
        verbose = verbose if leads else 0
        self._lines = verbose != 0
        self._out = _console() if out is None else out
        self._terminal = hasattr(self._out, "isatty") and self._out.isatty()
        self._live = verbose in (1, "auto") and (self._terminal or _in_notebook(self._out))
        self._between = DRAW_SECONDS if self._terminal else NOTEBOOK_SECONDS
        self._clock = clock
        self._bar: _Bar | None = None
        self._title = ""
        self._steps: int | None = None
        self._epoch, self._epochs = 0, 0
        self._first: tuple[int, float] | None = None
        # The epoch that this began with, and when.
        self._began = self._drawn = self._trained = 0.0
        self._examples = 0
        self._held: list[str] | None = None
        # What was said while the line that it belongs to is not there yet.

    def begin_epoch(self, epoch: int, epochs: int, steps: int | None) -> None:
        """An epoch of training begins: its number from 0, how many there will be, its global batches if known."""
        self._epoch, self._epochs = epoch, epochs
        if self._first is None:
            self._first = (epoch, self._clock())
        self.begin(f"epoch {epoch + 1:{len(str(epochs))}}/{epochs}", steps)

    def begin(self, title: str, steps: int | None) -> None:
        """Anything else of so many steps begins, an evaluation say."""
        self._end_bar()
        self._title, self._steps, self._examples = title, steps, 0
        self._began = self._drawn = self._trained = self._clock()

    def update(self, step: int, logs: Mapping[str, Any], examples: int) -> None:
        """So many steps of the epoch are done, with that loss and metrics, and so many examples since it began."""
        self._trained, self._examples = self._clock(), examples
        if self._live and self._trained - self._drawn >= self._between:
            self._draw(step, logs)
            self._drawn = self._trained

    def end(self, logs: Mapping[str, Any]) -> None:
        """What was begun has ended, of an epoch the validation too: write its line."""
        self._end_bar()
        if not self._lines:
            return
        left = self._left(1.0)
        spent = duration(self._clock() - self._began) + (f", {duration(left)} left" if left else "")
        say_to = [self._title, *_metrics(logs), *self._rate(), spent]
        tqdm.write(writable("  ".join(say_to), self._out), file=self._out)
        self._out.flush()

    def say(self, text: str) -> None:
        """Write a line above the bar; inside `held`, after it."""
        if self._held is None:
            say(text)
        else:
            self._held.append(text)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What is said inside is written at the end: below the line of an epoch that ends there."""
        held: list[str] = []
        self._held = held
        try:
            yield
        finally:
            self._held = None
            for text in held:
                say(text)

    def close(self) -> None:
        """Take the bar away; a second time does nothing."""
        self._end_bar()

    # ------------------------------------------------------------------ inner working

    def _draw(self, step: int, logs: Mapping[str, Any]) -> None:
        if self._bar is None:
            width: dict[str, Any] = {"dynamic_ncols": True} if self._terminal else {"ncols": COLUMNS}
            self._bar = _Bar(total=self._steps, file=self._out, leave=False, bar_format=" ", **width)
        part = min(step / self._steps, 1.0) if self._steps else None
        left = None if part is None else self._left(part)
        # What a narrow terminal cuts off comes last.
        right = [*([f"{duration(left)} left"] if left else []), *_metrics(logs), *self._rate()]
        done = f"step {step}" if part is None else f"{part:4.0%} {{bar}} {step}/{self._steps}"
        # What comes from outside may have braces.
        each = (writable("  ".join(some), self._out) for some in ([self._title], right))
        texts = (text.replace("{", "{{").replace("}", "}}") for text in each)
        self._bar.bar_format = "  ".join([next(texts), done, next(texts)])
        self._bar.n = step
        self._bar.refresh()

    def _rate(self) -> list[str]:
        seconds = self._trained - self._began
        return [f"{self._examples / seconds:,.0f} examples/s"] if self._examples and seconds > 0 else []

    def _left(self, part: float) -> float | None:
        """Return the seconds to the end of all epochs, if this one is done to that part; None where none is known."""
        if self._first is None:
            return None
        first, began = self._first
        done = self._epoch - first + part
        remaining = self._epochs - self._epoch - part
        return (self._clock() - began) / done * remaining if done > 0 and remaining > 0 else None

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Bar(tqdm):
    # None of tqdm's thread that refreshes bars which nobody updates.
    monitor_interval = 0


def _metrics(logs: Mapping[str, Any]) -> list[str]:
    return [f"{name} {shown(plain(value))}" for name, value in logs.items()]


def _in_notebook(out: TextIO) -> bool:
    """Whether text goes to a notebook: from its kernel, or from a replica whose cell it runs."""
    return type(out).__module__.startswith(("ipykernel.", "mirror_nb.replica."))
