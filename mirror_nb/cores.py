"""How many cores this process may keep busy. Reads what the system says of it, and changes nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def cores() -> int:
    """Return how many of the machine's cores this process may keep busy, at least 1.

    A container that is given two CPUs of 64 (`docker run --cpus 2`, a pod's limit on Binder) may run on all of them,
    and stands still for the rest of each tenth of a second once it has used what it was given.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(int, _quotas())]))


def _quotas() -> Iterator[float]:
    """Yield how many cores' time Linux gives to each control group around this process that has a limit.

    The files are those of "CPU Bandwidth Control" (v1) and "Control Group v2" in the kernel's documentation.
    """
    try:
        groups = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:
        # No Linux, or no control groups.
        return
    for _, controllers, path in groups:
        if not controllers:
            root, files = GROUPS, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            root, files = GROUPS / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        inner = PurePosixPath(path).relative_to("/")
        # A container may see its own group as the root, under the name that it has outside.
        for group in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):
                quota, period = " ".join((root / group / file).read_text() for file in files).split()
                # "max", or -1 in v1, where there is no limit.
                if quota != "max" and int(quota) > 0:
                    yield int(quota) / int(period)
