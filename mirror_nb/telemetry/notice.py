"""Who is training on this machine: a controller posts a notice, another process of the same user finds it.

```
controller                                          watcher
Posted(Notice) ── memfd "mirror_nb notice" ◀── /proc/<pid>/fd ── find() ─▶ Notice
Ring.create()  ── memfd "mirror_nb telemetry" ◀── /proc/<pid>/fd/<n> ── open_rings() ─▶ Readers
```

The notice is a memfd that the controller holds, and says which of its descriptors are rings. Nothing is asked of
anybody, so that a controller that is busy, stopped or stuck is seen too; nothing listens, and no file is left when it
is killed. Linux lets nobody but the user, and root, open another process's descriptors. Both must see the same
processes: from outside of a container its trainings are not found.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Self, final

from mirror_nb.errors import UsageError
from mirror_nb.telemetry.ring import Reader

_NAME = "mirror_nb notice"
_RING = "/memfd:mirror_nb telemetry"
_MOST = 1 << 20
# Bytes. Far more than a notice has: what is longer is none.


@final
@dataclass(frozen=True, slots=True)
class Notice:
    """One strategy that runs, as its controller tells of it."""

    pid: int
    # The controller's.
    rings: tuple[int, ...]
    # For each replica, the descriptor of its ring in the controller.
    devices: tuple[str, ...]
    # For each replica: "cuda:0", "cpu:1".
    places: tuple[int | str, ...] = ()
    # For each replica, where its readings are found: its process id on the CPU; a GPU's index or UUID, as NVML has it.
    title: str = ""
    # What is trained.
    operation: str = ""
    # The cross-device ops.


@final
class Posted:
    """A notice that can be found, until `close()` or the end of this process.

    Raises UsageError for a notice of another process, or one whose devices and rings do not match.
    """

    def __init__(self, notice: Notice) -> None:
        self._descriptor = _written(notice)

    def change(self, notice: Notice) -> None:
        """Let another notice take its place, as when a replica has got another process."""
        # The new one is there before the old one goes: a watcher that looks now finds one of them.
        before, self._descriptor = self._descriptor, _written(notice)
        if before >= 0:
            os.close(before)

    def close(self) -> None:
        """Take it down."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def find() -> tuple[Notice, ...]:
    """Return the notices of this user's processes, by process id. On a system without memfd there are none."""
    found: dict[tuple[int, tuple[int, ...]], Notice] = {}
    for pid in _processes():
        for notice in _posted(pid):
            # One that is being changed may be there twice; the rings tell two strategies of a process apart.
            found[pid, notice.rings] = notice
    return tuple(found[key] for key in sorted(found))


def open_rings(notice: Notice) -> tuple[Reader, ...]:
    """Return a reader of each ring, for the caller to close.

    Raises UsageError if they are gone: the controller has ended, or stopped its replicas.
    """
    readers: list[Reader] = []
    try:
        for ring in notice.rings:
            readers.append(_reader(notice.pid, ring))
    except (OSError, UsageError) as error:
        for reader in readers:
            reader.close()
        raise UsageError(f"the rings of process {notice.pid} are gone ({error}); look for its notice again") from error
    return tuple(readers)


def _written(notice: Notice) -> int:
    if notice.pid != os.getpid():
        raise UsageError(f"the notice is of process {notice.pid}, but this is process {os.getpid()}; post your own")
    if not notice.rings or len(notice.rings) != len(notice.devices):
        raise UsageError(
            f"the notice has {len(notice.rings)} rings for {len(notice.devices)} devices; a replica has one of each"
        )
    descriptor = os.memfd_create(_NAME)
    try:
        os.write(descriptor, json.dumps(asdict(notice)).encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _processes() -> Iterator[int]:
    own = os.getuid()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            # A process may end between any two looks at it.
            with contextlib.suppress(OSError):
                if name.isdigit() and os.stat(f"/proc/{name}").st_uid == own:
                    yield int(name)


def _posted(pid: int) -> Iterator[Notice]:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in descriptors:
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if os.readlink(path).startswith(f"/memfd:{_NAME} "):
                notice = _read(path)
                # A process that was forked from the controller holds the same descriptor.
                if notice.pid == pid:
                    yield notice


def _read(path: str) -> Notice:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        told: dict[str, Any] = json.loads(os.pread(descriptor, _MOST, 0))
    finally:
        os.close(descriptor)
    return Notice(
        pid=int(told["pid"]),
        rings=tuple(map(int, told["rings"])),
        devices=tuple(map(str, told["devices"])),
        places=tuple(place if isinstance(place, int) else str(place) for place in told["places"]),
        title=str(told["title"]),
        operation=str(told["operation"]),
    )


def _reader(pid: int, ring: int) -> Reader:
    path = f"/proc/{pid}/fd/{ring}"
    # The number may mean something else by now, and to open a pipe could wait for ever.
    if not os.readlink(path).startswith(_RING):
        raise UsageError(f"descriptor {ring} is no ring any more")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return Reader(descriptor)
    finally:
        os.close(descriptor)
