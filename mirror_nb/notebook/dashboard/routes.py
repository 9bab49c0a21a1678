"""How a press of a button reaches the kernel while a cell runs. Knows ipykernel's insides, each behind a guard.

| ipykernel | way |
|---|---|
| 6 | messages wait in the kernel's queue: `pump()`, called by whoever waits for the cell, handles those of widgets |
| 7.1 to 7.3 | the front end sends them to a subshell by itself |
| 7.4 on | they go to the shell that last drew the widget, which is the busy one: `free()` names another |
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
from typing import Any

SECONDS = 5.0
# For a subshell to be made; it takes a millisecond.
_OURS = ("comm_msg", "comm_close")


def free(kernel: Any, comm: Any) -> bool:
    """Let a widget's messages be handled beside the cell that runs; return whether the widget had to be told."""
    if not hasattr(comm, "_reply_subshell_for") or getattr(kernel, "shell_channel_thread", None) is None:
        return False
    subshell = _subshell(kernel)
    if subshell is None:
        return False
    comm._reply_subshell_for = lambda data, default: default or subshell
    return True


@functools.lru_cache(maxsize=1)
def _subshell(kernel: Any) -> str | None:
    """Make a subshell of our own, once a kernel: it costs a thread that waits."""
    thread = kernel.shell_channel_thread
    make = getattr(getattr(thread, "manager", None), "_create_subshell", None)
    if make is None or not hasattr(thread, "io_loop"):
        return None
    made: concurrent.futures.Future[str] = concurrent.futures.Future()

    def create() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    # The kernel makes subshells only in that thread.
    thread.io_loop.add_callback(create)
    return made.result(SECONDS)


def pump(kernel: Any) -> int:
    """Handle the widget messages that wait behind the running cell of ipykernel 6; return how many there were.

    From the main thread only. Everything else stays in the queue, in its order.
    """
    queue = getattr(kernel, "msg_queue", None)
    stream = getattr(kernel, "shell_stream", None)
    if queue is None or stream is None or getattr(kernel, "shell_channel_thread", None) is not None:
        return 0
    # What has arrived is moved from the socket to the queue.
    stream.flush()
    waiting = [queue.get_nowait() for _ in range(queue.qsize())]
    handled = 0
    for item in waiting:
        if _is_ours(kernel, item):
            _handle(kernel, stream, item[2][0])
            handled += 1
        else:
            queue.put_nowait(item)
    return handled


def _is_ours(kernel: Any, item: Any) -> bool:
    """Look at a message's header only: a message that is deserialized twice counts as a forgery."""
    try:
        _, frames = kernel.session.feed_identities(item[2][0], copy=False)
        return kernel.session.unpack(frames[1].bytes)["msg_type"] in _OURS
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):
        # Not of this shape: it is the kernel's own.
        return False


def _handle(kernel: Any, stream: Any, message: Any) -> None:
    identities, frames = kernel.session.feed_identities(message, copy=False)
    opened = kernel.session.deserialize(frames, content=True, copy=False)
    before = kernel._parent_ident["shell"], kernel.get_parent("shell")
    kernel.set_parent(identities, opened, channel="shell")
    kernel._publish_status("busy", "shell")
    try:
        answer = kernel.shell_handlers[opened["header"]["msg_type"]](stream, identities, opened)
        if inspect.iscoroutine(answer):
            _run(answer)
    finally:
        kernel._publish_status("idle", "shell")
        # Output that follows belongs to the running cell again.
        kernel.set_parent(*before, channel="shell")


def _run(coroutine: Any) -> None:
    """Run a handler to its end, which it reaches without waiting: comm handlers await nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
