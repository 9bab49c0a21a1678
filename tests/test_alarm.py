"""The alarm that lets the control thread sleep through short requests."""

from __future__ import annotations

import os
import select
import sys
import threading

import pytest

from mirror_nb.replica.alarm import Alarm


def test_an_alarm_wakes_the_thread_that_waits_for_it():
    alarm = Alarm(0.01)
    woken = threading.Event()
    waiting = threading.Thread(target=lambda: (alarm.wait(), woken.set()), daemon=True)
    waiting.start()
    alarm.start()
    assert woken.wait(10)
    waiting.join(10)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the thread is woken at once")
def test_an_alarm_that_was_stopped_does_not_ring():
    alarm = Alarm(0.05)
    alarm.start()
    alarm.stop()
    ready, _, _ = select.select([alarm._descriptor], [], [], 0.2)
    assert not ready
    alarm.start()
    ready, _, _ = select.select([alarm._descriptor], [], [], 10)
    assert ready
    os.close(alarm._descriptor)
