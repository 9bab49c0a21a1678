"""The channel that messages travel on: frames on a private Unix socket pair.

Each frame tells its length; the descriptor of a payload's slab rides beside it. Knows how to send and to wait; knows
no replica and no pool.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mirror_nb.messages import Call, Done, Request, fields_of
from mirror_nb.transfer.payload import Payload

_CALL, _DONE = 0, 1


def _flat(message: object) -> object:
    """Return what is pickled for a message: tuples for those of each call, since pickle looks classes up by name."""
    if type(message) is Request and type(message.what) is Call:
        function, arguments, *rest = fields_of(Call)(message.what)
        return _CALL, message.number, function.flat(), arguments.flat(), *rest
    if type(message) is Done:
        number, failure, payload, *rest = fields_of(Done)(message)
        return _DONE, number, failure, payload.flat() if payload is not None else None, *rest
    return message


def _unflat(sent: Any) -> Any:
    if type(sent) is not tuple:
        return sent
    kind, number, first, second, *rest = sent
    if kind == _CALL:
        return Request(number, Call(Payload(*first), Payload(*second), *rest))
    return Done(number, first, Payload(*second) if second is not None else None, *rest)


_HEADER = struct.Struct("<QBI")
# Length of the pickle, whether a slab comes with it, and the number of buffers whose lengths follow.


give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))
# Lets others have the processor that wait for one; 0.4 µs where there are none.


class ChannelClosed(Exception):
    """The other end is gone."""


@dataclass(slots=True)
class Frame:
    """A message ready for any number of channels: what is sent, in pieces, and the descriptor that goes with it."""

    pieces: list[Any]
    slab: int | None

    @classmethod
    def of(cls, message: object, slab: int | None = None) -> Frame:
        """Make a message ready, with the descriptor of its payload's slab; the caller keeps that open."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(_flat(message), protocol=5, buffer_callback=buffers.append)
        # Tensors go from their memory to the socket: a copy of 100 KB takes as long as a small call.
        views = [buffer.raw() for buffer in buffers]
        header = _HEADER.pack(len(body), slab is not None, len(views))
        lengths = struct.pack(f"<{len(views)}Q", *map(len, views)) if views else b""
        return cls([header + lengths + body, *views], slab)


class Channel:
    """Messages over one end of a Unix socket pair. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        # Room for a whole message: the sender must not wait for a receiver that may be stopped.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._ended = False
        self._lock = threading.Lock()
        self._bytes = bytearray(_CHUNK)
        self._begin = self._end = 0
        # What has arrived and was not taken yet.
        self._descriptors: deque[int] = deque()
        self._arrived = select.poll()
        self._arrived.register(end, select.POLLIN)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: object, slab: int | None = None) -> None:
        """Send one message, with the descriptor of its payload's slab; the caller keeps its own copy open.

        Raises ChannelClosed when the other end is gone.
        """
        self.send_frame(Frame.of(message, slab))

    def send_frame(self, frame: Frame) -> None:
        """Send one message that is ready. Raises ChannelClosed when the other end is gone."""
        slab = frame.slab
        ancillary = [] if slab is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", slab))]
        try:
            with self._lock:
                self._send_all(frame.pieces, ancillary)
        except OSError as reason:
            raise ChannelClosed(str(reason)) from reason

    def _send_all(self, parts: list[Any], ancillary: list[Any]) -> None:
        sent = self._socket.sendmsg(parts, ancillary)
        for part in parts:
            if sent < len(part):
                self._socket.sendall(memoryview(part)[sent:])
            sent = max(0, sent - len(part))

    def receive(self, awake: float = 0.0) -> tuple[Any, int | None]:
        """Wait for the next message and its slab; the first `awake` seconds without falling asleep.

        Raises ChannelClosed when the other end is gone.
        """
        while (message := self._next()) is None:
            deadline = time.monotonic() + awake
            while awake and not self._arrived.poll(0) and time.monotonic() < deadline:
                give_way()
            self._read(0)
        return message

    def drain(self) -> list[tuple[Any, int | None]]:
        """Return the messages that have arrived, without waiting. Raises ChannelClosed at the end of the last."""
        try:
            while self._read(_DONT_WAIT):
                pass
        except BlockingIOError:
            pass
        except ChannelClosed:
            if self._begin == self._end:
                raise
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        if not messages and self._ended:
            raise ChannelClosed("the other end is gone")
        return messages

    def _read(self, flags: int) -> bool:
        """Take what has arrived; return whether there may be more."""
        room = self._room()
        try:
            # Not socket.recv_fds: it drops its flags (CPython 3.9 to 3.13), so that `drain` would wait.
            length, ancillary, *_ = self._socket.recvmsg_into([room], _ANCILLARY_BYTES, flags | _CLOSE_ON_EXEC)
        except BlockingIOError:
            raise
        except OSError as reason:
            self._ended = True
            raise ChannelClosed(str(reason)) from reason
        for _level, _kind, raw in ancillary:
            # Only descriptors are ever sent this way.
            self._descriptors.extend(item for (item,) in struct.iter_unpack("i", raw))
        if not length:
            self._ended = True
            raise ChannelClosed("the other end is gone")
        self._end += length
        return length == len(room)

    def _room(self) -> memoryview:
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._bytes) > 4 * _CHUNK:
                self._bytes = bytearray(_CHUNK)
        if len(self._bytes) - self._end < _CHUNK // 2:
            rest = memoryview(self._bytes)[self._begin : self._end]
            # Twice what is there: a long message is not copied for each of its pieces.
            self._bytes = bytearray(2 * len(rest) + _CHUNK)
            self._bytes[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        return memoryview(self._bytes)[self._end :]

    def _next(self) -> tuple[Any, int | None] | None:
        if self._end - self._begin < _HEADER.size:
            return None
        view = memoryview(self._bytes)[self._begin : self._end]
        body, with_slab, count = _HEADER.unpack_from(view)
        begin = _HEADER.size + 8 * count
        if len(view) < begin:
            return None
        lengths = struct.unpack_from(f"<{count}Q", view, _HEADER.size) if count else ()
        end = begin + body
        if len(view) < end + sum(lengths):
            return None
        pickled = view[begin:end]
        # Copies: the memory is used again for the next message.
        buffers = [bytearray(view[end : (end := end + length)]) for length in lengths]
        # First: one that cannot be opened must not be met again.
        self._begin += end
        slab = self._descriptors.popleft() if with_slab else None
        try:
            return _unflat(pickle.loads(pickled, buffers=buffers)), slab
        except BaseException:
            if slab is not None:
                os.close(slab)
            raise

    def close(self) -> None:
        """Close this end, and the descriptors of slabs that nobody took."""
        with contextlib.suppress(OSError):
            self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())


_CHUNK = 1 << 18
# Bytes read at once, into memory that is kept.
_ANCILLARY_BYTES = socket.CMSG_LEN(4 * struct.calcsize("i"))
_DONT_WAIT = int(socket.MSG_DONTWAIT)
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
