"""Devices by name: what a user may write, and which device is meant.

Asks no driver: the caller says how many GPUs are visible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

from mirror_nb.errors import DeviceError

_SPELLING = re.compile(
    r"^(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?/?(?:device:)?(cpu|gpu|cuda)(?::(\d+))?$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One device that a replica computes on."""

    kind: str
    # "cuda" or "cpu"
    index: int
    # GPU: its index among the visible ones. CPU: only tells replicas apart.

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def parse(name: object) -> Device:
    """Return the device that `name` means.

    `"cuda:0"`, `"GPU:0"`, `"/gpu:0"`, TensorFlow's full `"/job:localhost/replica:0/task:0/device:GPU:0"`,
    `torch.device("cuda", 0)`, the integer 0 and `"0"` are the same GPU; `"cpu:1"` is the second CPU replica.

    Raises DeviceError for anything else.
    """
    if isinstance(name, Device):
        return name
    if isinstance(name, str) and name.strip().isdecimal():
        name = int(name)
    if isinstance(name, int | Integral) and not isinstance(name, bool) and int(name) >= 0:
        return Device("cuda", int(name))
    spelled = _SPELLING.match(str(name).strip()) if not isinstance(name, (bool, int, float)) else None
    if spelled is None:
        raise DeviceError(
            f"{name!r} names no device; write 'cuda:0' (or 'GPU:0', or 0) for a GPU, 'cpu:0' for the CPU"
        )
    kind = "cpu" if spelled[1].lower() == "cpu" else "cuda"
    return Device(kind, int(spelled[2] or 0))


def resolve(devices: Sequence[object] | str | int | None, num_gpus: int) -> tuple[Device, ...]:
    """Return one device a replica for what the user asked, `num_gpus` GPUs being visible.

    None means every visible GPU, else one CPU replica. A string may hold several names, parted by commas.

    Raises DeviceError for an empty list, an unknown name, a GPU that is not there, one named twice, or
    CPU and GPU replicas mixed (no cross-device op spans both).
    """
    if devices is None:
        return tuple(Device("cuda", i) for i in range(num_gpus)) or (Device("cpu", 0),)
    chosen = named(devices)
    missing = [str(d) for d in chosen if d.kind == "cuda" and d.index >= num_gpus]
    if missing:
        there = ", ".join([f"cuda:{i}" for i in range(num_gpus)] + ["cpu:0, cpu:1, … (CPU replicas)"])
        # As Lightning's `devices=2` is.
        counted = (
            f"; {devices} is the number of one GPU, for several list them" if str(devices).strip().isdecimal() else ""
        )
        raise DeviceError(f"{', '.join(missing)} not found; visible here: {there}{counted}")
    return chosen


def named(devices: Sequence[object] | str | int) -> tuple[Device, ...]:
    """Return one device a replica for what the user named, there or not.

    Raises DeviceError as `resolve` does, but for GPUs that are not there.
    """
    if isinstance(devices, str):
        devices = [part for part in devices.split(",") if part.strip()]
    elif isinstance(devices, (int, Device)) or not isinstance(devices, Iterable):
        devices = [devices]
    chosen = tuple(parse(name) for name in devices)
    if not chosen:
        raise DeviceError("`devices` is empty; name at least one device, or leave it out for every visible GPU")
    twice = sorted({str(d) for d in chosen if chosen.count(d) > 1})
    if twice:
        raise DeviceError(f"{', '.join(twice)} named twice; every replica needs a device of its own")
    if len({d.kind for d in chosen}) > 1:
        raise DeviceError(
            f"CPU and GPU replicas cannot be mixed: {', '.join(map(str, chosen))}; name devices of one kind"
        )
    return chosen
