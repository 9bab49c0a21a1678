"""How many cores this process may keep busy. Reads what the system says of it, and changes nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from mirror_nb.machine import control_groups


def cores() -> int:
    """Return how many of the machine's cores this process may keep busy, at least 1.

    A container that is given two CPUs of 64 (`docker run --cpus 2`, a pod's limit on Binder) may run on all of them,
    and stands still for the rest of each tenth of a second once it has used what it was given.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(int, _quotas())]))


def _quotas() -> Iterator[float]:
    """Yield how many cores' time Linux gives to each control group around this process that has a limit."""
    for words in control_groups.told("cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(ValueError):
            quota, period = words
            # "max", or -1 in v1, where there is no limit.
            if quota != "max" and int(quota) > 0:
                yield int(quota) / int(period)
