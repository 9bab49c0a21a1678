"""How much memory this process may use. Reads what the system says of it, and changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from mirror_nb.machine import control_groups

_FILES = ["memory.max", "memory.current", "memory.stat"]
_FILES_OF_V1 = ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"]
MACHINE = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine, or of the container that has less of it."""

    total: int
    # Bytes.
    free: int
    # Bytes that can be had, among them those of files that are kept in case somebody reads them again.


def usable() -> Memory:
    """Return what this process may use: more than that, and the system ends it (`docker run --memory 2g`, a pod)."""
    machine = psutil.virtual_memory()
    found = [Memory(machine.total, machine.available), *_limits()]
    return Memory(min(each.total for each in found), max(0, min(each.free for each in found)))


def ended() -> int:
    """Return how many processes the system has ended for want of memory: of this process's container, or of all."""
    groups = control_groups.told("memory", ["memory.events"], ["memory.oom_control"])
    words = next(groups, None) or _words_of_the_machine()
    # Old kernels count none.
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def _words_of_the_machine() -> list[str]:
    try:
        return MACHINE.read_text().split()
    except OSError:
        return []


def _limits() -> Iterator[Memory]:
    """Yield what each control group around this process has, where that is limited."""
    for limit, used, *stat in control_groups.told("memory", _FILES, _FILES_OF_V1):
        # "max", or some 2**63 in v1, where there is no limit.
        with contextlib.suppress(ValueError):
            # v1's other count is the group's alone, without those of groups in it.
            count = "total_inactive_file" if "total_inactive_file" in stat else "inactive_file"
            yield Memory(int(limit), int(limit) - int(used) + int(stat[stat.index(count) + 1]))
