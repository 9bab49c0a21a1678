"""Which devices are near each other: NUMA nodes, GPUs that reach each other. Asks the system, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mirror_nb.devices import Device

_NODES = Path("/sys/devices/system/node")


def groups_of(devices: Sequence[Device]) -> tuple[tuple[int, ...], ...]:
    """Return the replica ids in groups of devices that are near each other, every id once, in order.

    GPUs that reach each other's memory are one group; CPU replicas are spread over the NUMA nodes in order, as the
    system spreads processes. Where that makes one group, or one for every replica, it is cut in halves.
    """
    n = len(devices)
    if devices and devices[0].kind == "cuda":
        found = islands(n, lambda a, b: reaches(devices[a], devices[b]))
    else:
        found = _cut(n, numa_nodes())
    return found if 1 < len(found) < n or n < 2 else _cut(n, 2)


def islands(n: int, near: Callable[[int, int], bool]) -> tuple[tuple[int, ...], ...]:
    """Return 0 … n−1 in groups: each joins the first group whose members are all near it."""
    found: list[list[int]] = []
    for i in range(n):
        group = next((group for group in found if all(near(i, other) for other in group)), None)
        if group is None:
            found.append([i])
        else:
            group.append(i)
    return tuple(map(tuple, found))


def numa_nodes(folder: Path = _NODES) -> int:
    """Return how many NUMA nodes with processors there are, at least 1."""
    nodes = [path for path in folder.glob("node[0-9]*/cpulist") if path.read_text().strip()]
    return max(1, len(nodes))


def _cut(n: int, parts: int) -> tuple[tuple[int, ...], ...]:
    each = -(-n // max(1, min(parts, n)))
    return tuple(tuple(range(low, min(low + each, n))) for low in range(0, n, each))


def reaches(a: Device, b: Device) -> bool:
    """Whether a GPU reaches another's memory; not one that is not visible here. Begins CUDA in this process."""
    return max(a.index, b.index) < torch.cuda.device_count() and torch.cuda.can_device_access_peer(a.index, b.index)
