"""The channel between the controller and a replica: framing, descriptors, and the end of either side."""

from __future__ import annotations

import copy
import os
import socket
import threading
from collections.abc import Iterator
from pickle import PickleBuffer
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_nb import channel
from mirror_nb.channel import Channel, ChannelClosed, Frame
from mirror_nb.messages import Abort, Call, Done, Failure, Interrupt, Mirror, Request, Snapshot, Stream
from mirror_nb.transfer.payload import Payload
from mirror_nb.transfer.slab import anonymous_file


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = map(Channel, socket.socketpair())
    yield first, second
    first.close()
    second.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def slab_of(content: bytes) -> int:
    slab = anonymous_file(len(content))
    os.pwrite(slab, content, 0)
    return slab


def test_a_message_arrives_as_it_was_sent(ends):
    ends[0].send(Request(7, Snapshot()))
    assert ends[1].receive() == (Request(7, Snapshot()), None)


class _Gone:
    """What cannot be made again from its pickle."""

    def __reduce__(self) -> object:
        return int, ("no number",)


def test_a_message_that_cannot_be_opened_is_met_once(ends):
    slab, before = slab_of(b"abc"), descriptors()
    ends[0].send(_Gone(), slab)
    ends[0].send(Interrupt(1))
    with pytest.raises(ValueError, match="no number"):
        ends[1].receive()
    assert ends[1].receive() == (Interrupt(1), None)
    assert descriptors() == before
    os.close(slab)


@pytest.mark.parametrize(
    "message",
    [
        Request(7, Call(Payload(b"f"), Payload(b"a", ((0, 3), (64, 9)), 73, True))),
        Request(8, Call(Payload(b"f"), Payload(nest=(((), {}), [])), True, (3, 8), ("o1",), (("o2", [1]),), True)),
        Done(9),
        Done(10, Failure("E", "why", ("line",), None), Payload(b"p"), 0.5, {"a": "b"}, ("x",), False, (("o2", [1]),)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_call_and_its_end_arrive_with_all_that_they_say(ends, message):
    ends[0].send(message)
    arrived, _ = ends[1].receive()
    sent = copy.deepcopy(message)
    for payload in (sent.what.function, sent.what.arguments) if isinstance(sent, Request) else [sent.payload]:
        if payload is not None:
            payload.arrived = True
    assert arrived == sent


def test_messages_keep_their_order_and_their_slabs(ends):
    for i in range(4):
        slab = slab_of(b"%d" % i) if i % 2 else None
        ends[0].send(Interrupt(i), slab)
        if slab is not None:
            os.close(slab)
    for i in range(4):
        message, slab = ends[1].receive()
        assert message == Interrupt(i)
        assert (slab is not None) == bool(i % 2)
        if slab is not None:
            assert os.pread(slab, 9, 0) == b"%d" % i
            os.close(slab)


def test_one_frame_goes_to_many_with_its_buffers_and_its_slab(ends):
    others = tuple(map(Channel, socket.socketpair()))
    slab, large = slab_of(b"values"), bytes(range(256)) * 4096
    frame = Frame.of([PickleBuffer(large), "text"], slab)
    try:
        for sender, receiver in (ends, others):
            thread = threading.Thread(target=sender.send_frame, args=(frame,))
            thread.start()
            [buffer, text], arrived = receiver.receive()
            thread.join()
            assert (bytes(buffer), text, os.pread(arrived, 6, 0)) == (large, "text", b"values")
            os.close(arrived)
        others[0].close()
        with pytest.raises(ChannelClosed):
            others[0].send_frame(frame)
    finally:
        os.close(slab)
        for other in others:
            other.close()


def test_a_slab_arrives_in_time_however_many_wait_unread(ends):
    slab = slab_of(b"x")
    for i in range(50):
        ends[0].send(Interrupt(i), slab)
    os.close(slab)
    arrived = []
    while len(arrived) < 50:
        arrived += ends[1].drain()
    assert [message.request for message, _ in arrived] == list(range(50))
    assert all(os.pread(slab, 1, 0) == b"x" for _, slab in arrived)
    for _, slab in arrived:
        os.close(slab)


def test_a_message_larger_than_the_sockets_buffer_arrives_whole(ends):
    text = "é" * 3_000_000
    sender = threading.Thread(target=ends[0].send, args=(Stream("stdout", text),))
    sender.start()
    message, _ = ends[1].receive()
    sender.join()
    assert message.text == text


def test_draining_waits_for_nothing(ends):
    assert ends[1].drain() == []
    ends[0].send(Abort("a"))
    ends[0].send(Abort("b"))
    assert [message.reason for message, _ in ends[1].drain()] == ["a", "b"]


def test_half_a_message_is_kept_until_the_rest_is_there():
    raw, end = socket.socketpair()
    receiver, sender = Channel(end), Channel(raw)
    whole = on_the_wire(Stream("stdout", "text"))
    raw.sendall(whole[:20])
    assert receiver.drain() == []
    raw.sendall(whole[20:])
    assert receiver.drain() == [(Stream("stdout", "text"), None)]
    sender.close()
    receiver.close()


def test_what_was_sent_before_the_end_can_still_be_read(ends):
    ends[0].send(Abort("last words"))
    ends[0].close()
    assert ends[1].drain() == [(Abort("last words"), None)]
    with pytest.raises(ChannelClosed):
        ends[1].drain()


def test_the_end_of_the_other_side_is_told_to_who_reads_and_to_who_sends(ends):
    ends[0].close()
    with pytest.raises(ChannelClosed, match="the other end is gone"):
        ends[1].receive()
    with pytest.raises(ChannelClosed):
        ends[1].send(Abort("nobody hears"))


def test_messages_of_many_threads_are_not_mixed(ends):
    def send(i: int) -> None:
        for j in range(50):
            ends[0].send(Stream(str(i), str(j) * 1000))

    threads = [threading.Thread(target=send, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    got: dict[str, list[str]] = {}
    for _ in range(200):
        message, _ = ends[1].receive()
        got.setdefault(message.name, []).append(message.text)
    for thread in threads:
        thread.join()
    assert got == {str(i): [str(j) * 1000 for j in range(50)] for i in range(4)}


def test_closing_gives_back_the_slabs_that_nobody_took():
    before = descriptors()
    first, second = map(Channel, socket.socketpair())
    slab = slab_of(b"x")
    first.send(Interrupt(1), slab)
    os.close(slab)
    second._read(0)
    first.close()
    second.close()
    assert descriptors() == before


def test_a_receiver_looks_for_a_message_for_a_while_before_it_sleeps(ends, monkeypatch):
    looks = []

    def give_way() -> None:
        looks.append(1)
        if len(looks) == 3:
            ends[0].send(Interrupt(7))

    monkeypatch.setattr(channel, "give_way", give_way)
    monkeypatch.setattr(ends[1], "_read", mock.Mock(side_effect=ends[1]._read))
    assert ends[1].receive(awake=60)[0] == Interrupt(7)
    assert len(looks) == 3
    ends[1]._read.assert_called_once()


@pytest.mark.parametrize("awake", [0.0, 0.001])
def test_a_receiver_sleeps_when_nothing_comes(ends, monkeypatch, awake):
    sleeps = ends[1]._read

    def read(flags: int) -> bool:
        ends[0].send(Interrupt(8))
        return sleeps(flags)

    monkeypatch.setattr(ends[1], "_read", read)
    assert ends[1].receive(awake)[0] == Interrupt(8)


def test_what_came_before_is_taken_without_a_look(ends, monkeypatch):
    monkeypatch.setattr(channel, "give_way", mock.Mock(side_effect=AssertionError))
    for number in (1, 2):
        ends[0].send(Interrupt(number))
    assert [ends[1].receive(awake=60)[0] for _ in range(2)] == [Interrupt(1), Interrupt(2)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=500), max_size=20), st.integers(1, 40))
def test_any_cut_of_the_stream_gives_the_same_messages(texts, step):
    raw, end = socket.socketpair()
    receiver = Channel(end)
    nests = [tuple(map(PickleBuffer, (bytearray(text), b"", text))) for text in texts]
    stream = b"".join(on_the_wire(Mirror(Payload(nest=nest))) for nest in nests)
    got = []
    for i in range(0, len(stream), step * 100):
        raw.sendall(stream[i : i + step * 100])
        got += [message.objects.nest for message, _ in receiver.drain()]
    assert got == [(text, b"", text) for text in texts]
    assert all(type(written) is bytearray for written, *_ in got)
    raw.close()
    receiver.close()


def test_many_buffers_and_large_ones_arrive_whole(ends):
    buffers = tuple(bytes([i % 256]) * (i * 37 % 5000) for i in range(300))
    sender = threading.Thread(target=ends[0].send, args=(Mirror(Payload(nest=tuple(map(PickleBuffer, buffers)))),))
    sender.start()
    message, _ = ends[1].receive()
    sender.join()
    assert message.objects.nest == buffers


def on_the_wire(message: object) -> bytes:
    """Return the bytes that a channel makes of a message."""
    ours, theirs = socket.socketpair()
    with theirs:
        sender = Channel(ours)
        sender.send(message)
        sender.close()
        return b"".join(iter(lambda: theirs.recv(1 << 20), b""))
