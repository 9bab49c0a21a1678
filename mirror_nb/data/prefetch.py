"""Items made ready ahead of their use, by a thread. Knows iterators and nothing of what they give."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeVar, cast, final

import torch

T = TypeVar("T")
_END: Any = object()
_GRACE = 5.0
# Seconds that an iterator left early waits for its thread. One that is stuck in a dataset ends with its item.


def ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield `items`, of which a thread keeps up to `depth` ready, errors in their places.

    The first item is made by the caller: what draws random numbers only then (PyTorch's own samplers do) draws
    them where it would without a thread. The thread ends with the iterator, also one that is dropped or closed;
    it closes `items` if they can be closed.
    """
    first = next(items, _END)
    if first is _END:
        return
    buffer = _Buffer(items, depth)
    try:
        yield first
        while (item := buffer.take()) is not _END:
            yield item
    finally:
        buffer.close()


@final
class _Buffer(Generic[T]):
    """A thread that goes through `items`, and those of them that nobody took yet."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._depth = depth
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._left = False
        self._over = False
        self._error: BaseException | None = None
        # A thread begins at the first GPU, whichever its caller is at: what a dataset takes to "cuda" goes there.
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # A daemon: a dataset that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._fill, name="mirror_nb prefetch", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """Return the next item, _END after the last one; raise what the iterator raised instead of one."""
        with self._changed:
            # No deadline: the thread always says when it ends, and an interrupt ends the wait.
            self._changed.wait_for(lambda: self._ready or self._over)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return cast(T, _END)

    def close(self) -> None:
        """End the thread after the item that it is at."""
        with self._changed:
            self._left = True
            self._changed.notify_all()
        self._thread.join(_GRACE)
        self._ready.clear()

    def _fill(self) -> None:
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            while self._has_room() and (item := next(self._items, _END)) is not _END:
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                # A batch that was taken must not be kept alive from here.
                del item
        except BaseException as error:
            self._error = error
        finally:
            self._finish()

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._left or len(self._ready) < self._depth)
            return not self._left

    def _finish(self) -> None:
        try:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()
        except BaseException as error:
            self._error = self._error or error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
