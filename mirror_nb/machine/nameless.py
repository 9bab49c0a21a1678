"""Files that no folder shows and that end with their last user."""

from __future__ import annotations

import os
import tempfile


def nameless_file(name: str) -> int:
    """Return the descriptor of a new one, empty; `name` shows in /proc.

    A memfd where there is one: it is bound by memory, not by /dev/shm (64 MB in Docker).
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
