"""The Python stack of a process that cannot tell it: stopped, or with its lock held. By py-spy, where that is there.

py-spy is a program of its own (`pip install py-spy`) that reads the other process's memory; a system may forbid it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

SECONDS = 2.0
MOST_LINES = 12


def stack(pid: int) -> tuple[str, ...]:
    """Return the main thread's frames, the latest call first; none where py-spy is not there or may not look."""
    program = shutil.which(
        "py-spy", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    )
    if program is None:
        return ()
    # It does not stop the process, which might be ended meanwhile and never go on.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return frames(said.stdout) if said.returncode == 0 else ()


def frames(said: str) -> tuple[str, ...]:
    """Return the frames of the thread "MainThread" in what `py-spy dump` printed, without those below the user's."""
    found: list[str] = []
    of_main = False
    for line in said.splitlines():
        if line.startswith("Thread "):
            of_main = '"MainThread"' in line
        elif of_main and line.startswith(" "):
            if "IPython/core" in line or "mirror_nb/" in line:
                break
            found.append(line.strip())
    return tuple(found[:MOST_LINES])
