"""Training as lines of text: one an epoch, and a live bar under them on a terminal.

Draws a History. Knows nothing of how replicas are reached.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

from mirror_nb.demo.progress import Evaluated, History, Record
from mirror_nb.devices import Device

_FEW = 4
# With more replicas a line shows their range.
_BAR = "{percentage:3.0f} %|{bar}| step {n_fmt}/{total_fmt} · {desc} [{elapsed}, {remaining} left]"


class Terminal:
    """Shows a training on `out` while it goes on; use it as a context manager, so that the bar ends."""

    def __init__(self, history: History, epochs: int, steps_per_epoch: int, out: TextIO) -> None:
        self._history = history
        self._epochs = epochs
        self._steps = epochs * steps_per_epoch
        self._out = out
        self._began = time.monotonic()
        self._bar = tqdm(
            total=self._steps,
            file=out,
            leave=False,
            dynamic_ncols=True,
            desc="the first steps",
            bar_format=_BAR,
            # Logs get the epochs' lines only.
            disable=not out.isatty(),
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def say(self, text: str) -> None:
        """Write a line above the bar."""
        tqdm.write(text, file=self._out)
        self._out.flush()

    def take(self, record: Record) -> None:
        """Show what a record changed that the history has taken."""
        if isinstance(record, Evaluated) and record.epoch == self._history.epochs_done:
            self.say(self._epoch_line(record))
        done = self._history.steps_done
        if done and not self._bar.disable:
            epoch = min(self._history.epochs_done + 1, self._epochs)
            self._bar.set_description_str(
                f"epoch {epoch}/{self._epochs} · loss {self._loss():.3f} · {self._rates(now=True)}", refresh=False
            )
            self._bar.update(done - self._bar.n)

    def _epoch_line(self, tested: Evaluated) -> str:
        spent = time.monotonic() - self._began
        left = spent / tested.epoch * (self._epochs - tested.epoch)
        number = f"{tested.epoch:{len(str(self._epochs))}}"
        return (
            f"epoch {number}/{self._epochs}  loss {self._loss():.3f}  test {tested.accuracy:6.1%}  "
            f"{self._rates(now=False)}  {spent:.0f} s, {left:.0f} s left"
        )

    def _loss(self) -> float:
        recent = self._history.mean_losses()[-20:]
        return sum(recent) / len(recent) if recent else float("nan")

    def _rates(self, now: bool) -> str:
        rate = self._history.rate_now if now else self._history.rate
        rates = [rate(r) for r in range(self._history.num_replicas)]
        if len(rates) > _FEW:
            return f"{min(rates):.0f} to {max(rates):.0f} examples/s on each of {len(rates)} replicas"
        return f"{' + '.join(f'{r:.0f}' for r in rates)} examples/s"


def summary(history: History, devices: Sequence[Device], seconds: float, picture: str) -> str:
    """Return the lines at the end: accuracy, throughput of each replica, time, and where the picture is."""
    width = max(len(str(device)) for device in devices)
    lines = [f"test accuracy  {history.accuracy:.1%}"]
    lines += [
        f"replica {r} on {device!s:{width}}  {history.rate(r):.0f} examples/s" for r, device in enumerate(devices)
    ]
    return "\n".join([*lines, f"wall time  {seconds:.1f} s", f"picture  {picture}"])
