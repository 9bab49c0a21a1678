"""Ctrl-C in the middle of what must not be left halfway."""

from __future__ import annotations

import signal
import sys
import threading

import pytest
import torch
from driving import press_ctrl_c

from mirror_nb.messages import Stream
from mirror_nb.replica.streams import Streams
from mirror_nb.replica.whole import heed, held_back, runs, whole


class Counter:
    def __init__(self) -> None:
        self.steps = 0
        self.halves = 0

    @whole
    def step(self) -> None:
        self.halves += 1
        press_ctrl_c()
        self.halves += 1
        self.steps += 1


def test_an_interrupt_waits_for_the_end_of_the_step():
    counter = Counter()

    def two_steps() -> None:
        for _ in range(2):
            counter.step()
            heed()

    with pytest.raises(KeyboardInterrupt), held_back():
        two_steps()
    assert (counter.steps, counter.halves) == (1, 2)


def test_an_interrupt_that_nobody_heeded_comes_at_the_end():
    counter = Counter()
    with pytest.raises(KeyboardInterrupt), held_back():
        counter.step()
    assert counter.steps == 1
    with held_back():
        heed()


def test_an_interrupt_elsewhere_comes_at_once():
    after = []

    def pressed() -> None:
        press_ctrl_c()
        after.append(1)

    with pytest.raises(KeyboardInterrupt), held_back():
        pressed()
    assert after == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_optimizers_step_is_whole_by_itself():
    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            press_ctrl_c()
            return super().step(closure)

    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    with pytest.raises(KeyboardInterrupt), held_back():
        Slow([weight], 0.5).step()
    assert weight.item() == 0.5
    assert not runs(None)


class Deleted:
    def __del__(self) -> None:
        press_ctrl_c()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_comes_again():
    def steps() -> int:
        for step in range(3):
            if step == 1:
                Deleted()
            heed()
        return step

    with pytest.raises(KeyboardInterrupt), held_back():
        steps()
    heed()


def test_one_inside_another_changes_nothing():
    handlers = []

    def within() -> None:
        with held_back():
            Counter().step()
        handlers.append(signal.getsignal(signal.SIGINT))
        heed()

    with pytest.raises(KeyboardInterrupt), held_back():
        within()
    assert handlers != [signal.default_int_handler]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_an_interrupt_on_the_way_in_or_out_leaves_the_handler_that_was(method):
    code = getattr(type(held_back()), method).__code__

    def press_after_the_handler_has_changed(frame, event, function) -> None:
        if frame.f_code is code and event == "c_return" and getattr(function, "__module__", "") == "_signal":
            sys.setprofile(None)
            press_ctrl_c()

    def held() -> None:
        with held_back():
            pass

    sys.setprofile(press_after_the_handler_has_changed)
    try:
        with pytest.raises(KeyboardInterrupt):
            held()
    finally:
        sys.setprofile(None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_a_thread_and_under_anothers_handler_nothing_is_changed():
    seen = []

    def work() -> None:
        with held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]

    def mine(number: int, frame: object) -> None:
        """Somebody else's."""

    before = signal.signal(signal.SIGINT, mine)
    try:
        with held_back():
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_between_two_texts_that_go_together_loses_neither():
    sent: list[object] = []

    def emit(message: object) -> None:
        """As a replica sends: an interrupt that has come meanwhile is raised after it."""
        sent.append(message)
        if len(sent) == 1:
            raise KeyboardInterrupt

    streams = Streams(emit)
    streams._open = True
    streams.stdout.write("one")
    streams.stderr.write("two")
    with pytest.raises(KeyboardInterrupt):
        streams.flush()
    streams.stderr.write(" and three")
    streams.flush()
    assert sent == [Stream("stdout", "one"), Stream("stderr", "two and three")]
