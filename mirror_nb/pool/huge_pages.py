"""Pages of 2 MiB for what replicas allocate, where Linux gives them to those who ask.

Training goes through parameters, gradients and states from one end to the other: with pages of 4 KiB a step of a
network of 10 M parameters takes a twentieth longer (two CPU replicas, SGD and Adam). glibc asks for huge ones if its
environment said so as the process began; so the forkserver is started with that, and its replicas have it from there.
Knows no replicas, which take the controller's environment without it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.malloc.hugetlb"
_LARGEST = 2**21
# Bytes. With others (512 MiB where ordinary ones have 64 KiB) every process would take that much.
_FOLDER = Path("/sys/kernel/mm/transparent_hugepage")


@contextlib.contextmanager
def asked_for() -> Iterator[None]:
    """Give a process that is started meanwhile huge pages, unless the user has said what glibc is to do."""
    own = os.environ.get(_VARIABLE, "")
    if _TUNABLE in own or not _to_be_had():
        yield
        return
    os.environ[_VARIABLE] = ":".join(filter(None, [own, f"{_TUNABLE}=1"]))
    try:
        yield
    finally:
        if own:
            os.environ[_VARIABLE] = own
        else:
            del os.environ[_VARIABLE]


def _to_be_had() -> bool:
    # Where all get them anyway ("always") or nobody does there is nothing to ask for.
    with contextlib.suppress(OSError, ValueError):
        on_request = "[madvise]" in (_FOLDER / "enabled").read_text()
        return on_request and int((_FOLDER / "hpage_pmd_size").read_text()) <= _LARGEST
    return False
