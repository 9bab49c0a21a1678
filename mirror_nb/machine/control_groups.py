"""What Linux limits this process to, as the control groups around it say. Knows where the files are, not their sense.

The files are those of "Control Group v2" and, for v1, of the controllers' pages in the kernel's documentation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def told(controller: str, files: Sequence[str], files_of_v1: Sequence[str]) -> Iterator[list[str]]:
    """Yield the words of these files in each group around this process, from its own outwards, one file after another.

    `controller` is the name in v1 of the groups that have `files_of_v1`. A group that lacks a file is left out.
    """
    try:
        lines = [line.split(":", 2) for line in OWN.read_text().splitlines()]
    except OSError:
        # No Linux, or no control groups.
        return
    for _, controllers, path in lines:
        if not controllers:
            root, names = GROUPS, files
        elif controller in controllers.split(","):
            root, names = GROUPS / controller, files_of_v1
        else:
            continue
        inner = PurePosixPath(path).relative_to("/")
        # A container may see its own group as the root, under the name that it has outside.
        for group in (inner, *inner.parents):
            with contextlib.suppress(OSError):
                yield " ".join((root / group / name).read_text() for name in names).split()
