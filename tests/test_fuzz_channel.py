"""Whatever arrives on a replica's pipe: a closed channel, never a hang, never half a message taken for a whole one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest
from driving import DEADLINE, eventually, gone, run_cell
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirror_nb.channel import Channel, ChannelClosed
from mirror_nb.messages import Interrupt, Request, Steps, Stream
from mirror_nb.pool import following
from mirror_nb.pool.local import LocalPool

FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
MESSAGES = st.one_of(
    st.builds(Stream, st.sampled_from(["stdout", "stderr"]), st.text(max_size=3000)),
    st.builds(Interrupt, st.integers()),
    st.builds(lambda number: Request(number, Steps()), st.integers()),
)


def received(receiver: Channel, *also: type[Exception]) -> object:
    """The next message; None at the end, and the exception itself if it is one of those."""
    try:
        return receiver.receive()[0]
    except ChannelClosed:
        return None
    except also as error:
        return error


@FUZZ
@given(messages=st.lists(MESSAGES, max_size=12), cuts=st.lists(st.integers(1, 900), min_size=1, max_size=30))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(messages, cuts):
    writing, reading = socket.socketpair()
    source, relay = socket.socketpair()
    sender, receiver = Channel(source), Channel(reading)

    def cut() -> None:
        i = 0
        while data := relay.recv(cuts[i % len(cuts)]):
            writing.sendall(data)
            i += 1
        writing.close()

    thread = threading.Thread(target=cut)
    thread.start()
    for message in messages:
        sender.send(message)
    sender.close()
    found = []
    found.extend(iter(lambda: received(receiver), None))
    thread.join(DEADLINE)
    assert found == messages
    receiver.close()
    relay.close()


@FUZZ
@given(junk=st.binary(min_size=1, max_size=400))
def test_junk_is_an_error_and_never_a_hang(junk):
    """The pipe has no name, so nobody can write to it but the two ends; a cell that found its descriptor may."""
    writing, reading = socket.socketpair()
    writing.sendall(junk)
    writing.close()
    receiver = Channel(reading)
    # The last is the end of the pipe, or what is no pickle.
    while not isinstance(received(receiver, Exception), Exception | None):
        pass
    receiver.close()


@pytest.mark.parametrize("junk", [b"\xff" * 64, b"\x03" + b"\0" * 8 + b"abc", b"\x05" + b"\0" * 8 + b"\x80\x05K\x01."])
def test_a_replica_whose_pipe_got_junk_is_replaced_and_the_session_goes_on(
    replicas: Callable[[int], LocalPool], junk: bytes, monkeypatch: pytest.MonkeyPatch
):
    # One that waits for the rest of a message hears of no interrupt.
    monkeypatch.setattr(following, "GRACE", 1.0)
    two = replicas(2)
    pid = two.status()[1].pid
    run_cell(two, "kept = 3")
    os.write(two._members[1].channel.fileno(), junk)
    ran = run_cell(two, "strategy.reduce('sum', 1)", timeout=0.5)
    if ran.report.deaths:
        eventually(lambda: gone(pid), "the replica that cannot be talked to ends")
    two.mend()
    assert run_cell(two, "n = int(strategy.reduce('sum', 1))").values[0]["n"] == 2
    assert run_cell(two, "k = kept", replicas=[0]).values[0]["k"] == 3
