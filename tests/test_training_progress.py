"""The lines and the bar of a training, on a terminal, in a notebook, and in a log."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
import torch

from mirror_nb.errors import UsageError
from mirror_nb.training import progress as module
from mirror_nb.training.progress import Progress, say


class Screen(io.StringIO):
    """Text as somebody sees it."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def lines(self) -> list[str]:
        """Return what is left when carriage returns have been obeyed."""
        rows = []
        for row in self.getvalue().split("\n"):
            cells: list[str] = []
            for part in row.split("\r"):
                cells[: len(part)] = part
            rows.append("".join(cells).rstrip())
        return [row for row in rows if row]


class OutStream(Screen):
    """A notebook's standard output, by what tells it."""


OutStream.__module__ = "ipykernel.iostream"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def train(progress: Progress, clock: Clock, epochs: int = 2, **more: Any) -> None:
    """Two epochs of four steps of 25 examples, a second each, then half a second of validation."""
    for epoch in range(epochs):
        progress.begin_epoch(epoch, epochs, 4)
        for step in range(1, 5):
            clock.now += 1
            progress.update(step, {"loss": 1 / step}, 25 * step)
        clock.now += 0.5
        progress.end({"loss": 0.25, "val_loss": 0.5, **more})


LINES = [
    "epoch 1/2  loss 0.2500  val_loss 0.5000  25 examples/s  4.5 s, 4.5 s left",
    "epoch 2/2  loss 0.2500  val_loss 0.5000  25 examples/s  4.5 s",
]


def shown(verbose: int | str, screen: Screen) -> Screen:
    clock = Clock()
    progress = Progress(verbose, screen, clock)
    train(progress, clock)
    progress.close()
    return screen


@pytest.mark.parametrize("verbose", [1, 2, "auto"])
def test_a_log_has_a_line_an_epoch_and_no_bar(verbose):
    screen = shown(verbose, Screen(terminal=False))
    assert screen.getvalue().splitlines() == LINES


@pytest.mark.parametrize("screen", [Screen(terminal=True), OutStream(terminal=False)], ids=["terminal", "notebook"])
def test_the_bar_is_live_and_leaves_the_lines_alone(screen):
    shown(1, screen)
    assert "epoch 1/2   25% " in screen.getvalue()
    assert re.search(r"epoch 2/2   50% .*2/4  2\.\d s left  loss 0\.5000  25 examples/s", screen.getvalue())
    assert screen.lines() == LINES


def test_verbose_2_shows_no_bar_on_a_terminal_and_0_nothing():
    assert shown(2, Screen(terminal=True)).getvalue().splitlines() == LINES
    assert shown(0, Screen(terminal=True)).getvalue() == ""


@pytest.mark.parametrize("leads", [True, False])
def test_a_verbose_that_there_is_not_is_refused_on_every_replica(leads):
    with pytest.raises(UsageError, match=r"0 \(nothing\), 1 or 'auto' .* not 3"):
        Progress(3, leads=leads)


def test_the_bar_is_not_drawn_at_every_step():
    screen, clock = Screen(terminal=True), Clock()
    progress = Progress(1, screen, clock)
    progress.begin_epoch(0, 1, 1000)
    for step in range(1, 1001):
        clock.now += 0.001
        progress.update(step, {"loss": 1.0}, step)
    progress.close()
    assert 1 <= screen.getvalue().count("examples/s") <= 10


def test_steps_are_counted_where_their_number_is_not_known():
    screen, clock = Screen(terminal=True), Clock()
    progress = Progress(1, screen, clock)
    progress.begin_epoch(0, 1, None)
    clock.now += 1
    progress.update(7, {"loss": 1.0}, 70)
    assert screen.lines() == ["epoch 1/1  step 7  loss 1.0000  70 examples/s"]
    progress.close()
    assert screen.lines() == []


def test_names_with_braces_are_shown_as_they_are():
    screen, clock = Screen(terminal=True), Clock()
    progress = Progress(1, screen, clock)
    progress.begin_epoch(0, 1, 2)
    clock.now += 1
    progress.update(1, {"{n}": 1.0}, 1)
    assert "{n} 1.0000" in screen.getvalue()
    progress.end({"{n}": torch.tensor(1.0)})
    assert screen.lines() == ["epoch 1/1  {n} 1.0000  1 examples/s  1.0 s"]


def test_an_interrupted_training_takes_its_bar_away():
    screen, clock = Screen(terminal=True), Clock()
    progress = Progress(1, screen, clock)
    progress.begin_epoch(0, 1, 2)
    clock.now += 1
    progress.update(1, {}, 1)
    progress.close()
    progress.close()
    assert screen.lines() == []


def test_an_evaluation_has_its_line():
    screen, clock = Screen(terminal=False), Clock()
    progress = Progress(1, screen, clock)
    progress.begin("evaluate", 2)
    clock.now += 0.5
    progress.update(2, {"loss": 1.0}, 50)
    progress.end({"loss": 1.0, "accuracy": 0.5})
    assert screen.lines() == ["evaluate  loss 1.0000  accuracy 0.5000  100 examples/s  500 ms"]


def test_epochs_are_aligned_and_a_resumed_training_counts_its_own_time():
    screen, clock = Screen(terminal=False), Clock()
    progress = Progress(1, screen, clock)
    progress.begin_epoch(8, 10, 4)
    clock.now += 3
    progress.end({})
    assert screen.lines() == ["epoch  9/10  3.0 s, 3.0 s left"]


def test_no_thread_is_started_to_draw_a_bar():
    shown(1, Screen(terminal=True))
    # tqdm keeps its thread there; one of other bars is on the class that these derive from.
    assert "monitor" not in vars(module._Bar)


def test_a_line_is_written_above_the_bar(capsys):
    say("epoch 1: saved")
    assert capsys.readouterr().out == "epoch 1: saved\n"


def test_what_a_callback_says_of_an_epoch_follows_its_line(capsys):
    progress = Progress(2, sys.stdout, Clock())
    progress.begin_epoch(0, 1, 4)
    progress.say("step 3: saved")
    with progress.held():
        progress.say("epoch 1: saved")
        progress.end({"loss": 1.0})
    assert capsys.readouterr().out == "step 3: saved\nepoch 1/1  loss 1.0000  0 ms\nepoch 1: saved\n"


def test_what_a_callback_says_before_it_fails_is_not_lost(capsys):
    progress = Progress(2, sys.stdout, Clock())

    def fail() -> None:
        with progress.held():
            progress.say("epoch 1: val_loss has improved")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert capsys.readouterr().out == "epoch 1: val_loss has improved\n"


class Tee:
    """What people put in the place of standard output, to keep it in a file too."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


class Terminal(io.TextIOWrapper):
    """One that has no more than ASCII's signs."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), "ascii")

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("console", [None, io.TextIOWrapper(io.BytesIO(), "ascii"), Terminal(), Tee()])
def test_any_console_or_none_does(monkeypatch, console):
    monkeypatch.setattr(sys, "stdout", console)
    clock = Clock()
    progress = Progress(clock=clock)
    progress.begin_epoch(0, 1, 4)
    clock.now += 1
    progress.update(1, {"über": 1.0}, 25)
    progress.end({"über": 0.5})
    say("12 µs")
    progress.close()
    if isinstance(console, Tee):
        assert "über 0.5" in console.text
        assert console.text.endswith("12 µs\n")
    elif console is not None:
        console.flush()
        assert rb"\xfcber 0.5" in console.buffer.getvalue()
        assert console.buffer.getvalue().endswith(b"12 \\xb5s\n")
