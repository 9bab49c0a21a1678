"""Memory that processes of one machine share: one makes a segment, the others open it by its address.

Knows files and mappings. Knows nothing of what lies in a segment, or how an address travels.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from mirror_nb.errors import MirrorError, ReplicaError
from mirror_nb.readable import size

# How a segment can be made, the better first. A memfd counts as memory, not against /dev/shm (64 MB in Docker).
KINDS = ("memfd", "file")
_FOLDER = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Address:
    """Where other processes of the machine find a segment, as long as its maker offers it."""

    machine: str
    path: str
    nbytes: int


def written(value: Address | str | None) -> str:
    """Return an address, or a reason why there is none, as text to send; at most about 1000 characters."""
    return json.dumps(asdict(value) if isinstance(value, Address) else value and value[:800])


def read(text: str) -> Address | str | None:
    """Return what `written` was given. Raises ReplicaError for what it did not write."""
    try:
        found = json.loads(text)
        if isinstance(found, dict):
            return Address(str(found["machine"]), str(found["path"]), int(found["nbytes"]))
    except (ValueError, KeyError, TypeError) as reason:
        raise ReplicaError(f"what says where shared memory lies makes no sense: {text[:80]!r}") from reason
    return found if found is None else str(found)


@final
class Segment:
    """A mapped piece of shared memory; it lasts as long as any tensor that looks at it, in any process."""

    def __init__(self, memory: Tensor, address: Address, descriptor: int | None) -> None:
        self.memory = memory
        # uint8, zeros at first
        self.address = address
        self._descriptor = descriptor

    @staticmethod
    def create(nbytes: int, kind: str = KINDS[0]) -> Segment:
        """Make a segment of `nbytes` bytes, and offer it until `withdraw`.

        Raises ReplicaError where there is no such memory or not enough of it.
        """
        try:
            descriptor, path = _anonymous(nbytes) if kind == "memfd" else _named(nbytes)
        except (OSError, AttributeError) as reason:
            raise ReplicaError(_no_room(nbytes, kind, reason)) from reason
        address = Address(machine(), path, nbytes)
        try:
            return Segment(_map(descriptor, nbytes), address, descriptor)
        except BaseException as reason:
            Segment(torch.empty(0), address, descriptor).withdraw()
            if isinstance(reason, RuntimeError) and not isinstance(reason, MirrorError):
                # From where this process may map no more: others wait to hear of it.
                raise ReplicaError(f"process {os.getpid()} cannot map {size(nbytes)} more: {reason}") from reason
            raise

    @staticmethod
    def open(address: Address) -> Segment:
        """Map a segment that another process offers. Raises ReplicaError where it cannot be reached."""
        if address.machine != machine():
            raise ReplicaError("the replicas are on different machines or in different containers")
        try:
            descriptor = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                _check_owner(descriptor)
                return Segment(_map(descriptor, address.nbytes), address, None)
            finally:
                os.close(descriptor)
        except (OSError, RuntimeError) as reason:
            raise ReplicaError(f"process {os.getpid()} cannot map {address.path}: {reason}") from reason

    def withdraw(self) -> None:
        """End the offer: all who shall have it have opened it. From then on no name leads to it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        os.close(descriptor)
        if self.address.path.startswith(str(_FOLDER)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.path)


def _check_owner(descriptor: int) -> None:
    """Refuse what is no segment of this user's: where addresses travel, others may write nonsense."""
    name = os.readlink(f"/proc/self/fd/{descriptor}")
    if os.fstat(descriptor).st_uid != os.getuid() or not name.startswith(("/memfd:mirror_nb", f"{_FOLDER}/mirror_nb")):
        raise OSError(f"{name} is no memory of this user's replicas")


def machine() -> str:
    """Name what processes must have in common to reach each other's memory: the machine, boot and container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _anonymous(nbytes: int) -> tuple[int, str]:
    descriptor = os.memfd_create("mirror_nb", os.MFD_CLOEXEC)
    try:
        os.truncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def _named(nbytes: int) -> tuple[int, str]:
    room = os.statvfs(_FOLDER)
    if room.f_bavail * room.f_frsize < nbytes:
        raise OSError(f"{size(room.f_bavail * room.f_frsize)} are free")
    path = _FOLDER / f"mirror_nb-{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Without the reservation a full /dev/shm shows as SIGBUS in the middle of a sum.
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        os.unlink(path)
        raise
    return descriptor, str(path)


def _map(descriptor: int, nbytes: int) -> Tensor:
    if sys.platform != "linux":
        raise ReplicaError(f"shared memory between replicas needs Linux, this is {sys.platform}")
    # torch keeps no descriptor of its own, unlike `mmap`.
    path = f"/proc/self/fd/{descriptor}"
    with torch.inference_mode(False):
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")


def _no_room(nbytes: int, kind: str, reason: Exception) -> str:
    wanted = size(nbytes)
    if kind == "memfd":
        return f"no anonymous shared memory of {wanted} (memfd_create): {reason}"
    return f"no {wanted} in {_FOLDER}: {reason}; in Docker start the container with a larger --shm-size"


Gather = Callable[[Any], list[Any]]
# Gives every replica what each of them gave, in the order of their ids.


def common_segment(gather: Gather, replica_id: int, nbytes: int) -> Segment:
    """Memory that replica 0 makes and all map; in the first way that works for all of them."""
    reasons: dict[str, None] = {}
    for kind in KINDS:
        made = _attempt(Segment.create, nbytes, kind) if replica_id == 0 else None
        try:
            offer = gather(made.address if isinstance(made, Segment) else made)[0]
            opened = _attempt(Segment.open, offer) if replica_id and isinstance(offer, Address) else made
            problems = gather(opened if isinstance(opened, str) else None)
        finally:
            if isinstance(made, Segment):
                made.withdraw()
        if isinstance(opened, Segment) and not any(problems):
            return opened
        reasons.update(dict.fromkeys(problem for problem in [offer, *problems] if isinstance(problem, str)))
    raise ReplicaError(f"the replicas cannot share memory: {'; '.join(reasons)}")


def _attempt(make: Callable[..., Segment], *args: Any) -> Segment | str:
    try:
        return make(*args)
    except MirrorError as error:
        return str(error)
