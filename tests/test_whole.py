"""Ctrl-C in the middle of what must not be left halfway."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from driving import press_ctrl_c

from mirror_nb.replica.whole import HeldBack, runs, whole


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
    held, counter = HeldBack(), Counter()

    def two_steps() -> None:
        for _ in range(2):
            counter.step()
            held.heed()

    with pytest.raises(KeyboardInterrupt), held():
        two_steps()
    assert (counter.steps, counter.halves) == (1, 2)


def test_an_interrupt_that_nobody_heeded_comes_at_the_end():
    held, counter = HeldBack(), Counter()
    with pytest.raises(KeyboardInterrupt), held():
        counter.step()
    assert counter.steps == 1
    with held():
        held.heed()


def test_an_interrupt_elsewhere_comes_at_once():
    held, after = HeldBack(), []

    def pressed() -> None:
        press_ctrl_c()
        after.append(1)

    with pytest.raises(KeyboardInterrupt), held():
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
    held = HeldBack()
    with pytest.raises(KeyboardInterrupt), held():
        Slow([weight], 0.5).step()
    assert weight.item() == 0.5
    assert not runs(None)


def test_in_a_thread_and_under_anothers_handler_nothing_is_changed():
    held, seen = HeldBack(), []

    def work() -> None:
        with held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]

    def mine(number: int, frame: object) -> None:
        """Somebody else's."""

    before = signal.signal(signal.SIGINT, mine)
    try:
        with held():
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
