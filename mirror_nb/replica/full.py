"""A device that is full: which errors say so, and what they leave out.

Knows torch's and NumPy's words for it. Knows no replica and no channel.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import psutil
import torch

from mirror_nb.machine.memory import usable
from mirror_nb.readable import size
from mirror_nb.transfer.raised import chain, text

_CPU = "DefaultCPUAllocator: can't allocate memory"
_GPU = re.compile(r"CUDA error: out of memory|_STATUS_ALLOC_FAILED|Cuda failure.{0,4}'out of memory'")
# What CUDA, cuBLAS, cuDNN and NCCL lack for themselves: torch has no error of its own for that.
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)|[Uu]nable to allocate ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def cause(error: BaseException) -> BaseException | None:
    """Return what says that there was no memory left, on a GPU or on the machine: `error`, or what it came from."""
    for one in chain(error, suppressed=False):
        if isinstance(one, torch.OutOfMemoryError | MemoryError):
            return one
        if isinstance(one, RuntimeError) and (_CPU in text(one) or _GPU.search(text(one))):
            return one
    return None


def memory(error: BaseException, device: torch.device) -> str:
    """Say what was asked, what is free and what is reserved, as of now: before what failed is let go."""
    asked = _asked(text(error))
    parts = [f"asked for {size(asked)}" if asked is not None else "it does not say how much was asked for"]
    on_gpu = isinstance(error, torch.OutOfMemoryError) or _GPU.search(text(error)) is not None
    if on_gpu and torch.cuda.is_available():
        # Where others have all of it, there is not even room to ask.
        with contextlib.suppress(torch.AcceleratorError):
            free, total = torch.cuda.mem_get_info(device)
            parts.append(f"{size(free)} of {size(total)} free")
        reserved, held = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        parts.append(f"torch has reserved {size(reserved)}, {size(held)} in use")
    else:
        there = usable()
        parts += [f"{size(there.free)} of {size(there.total)} free"]
        process = psutil.Process().memory_info()
        parts += [f"this replica has {size(process.rss)}"]
        limit = _limit()
        if limit is not None:
            parts += [f"its address space is {size(process.vms)} of the {size(limit)} that its limit allows"]
    return "; ".join(parts)


def give_back(device: torch.device) -> None:
    """Have torch give memory back that it keeps for later, which may be cut into pieces that are too small."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _asked(message: str) -> int | None:
    found = _ASKED.search(message)
    if found is None:
        return None
    number, unit = [part for part in found.groups() if part is not None]
    return int(float(number) * _UNITS[unit])


def _limit() -> int | None:
    """Return the limit on this process's address space in bytes, None if there is none."""
    try:
        words = next(line for line in Path("/proc/self/limits").read_text().splitlines() if "address space" in line)
    except (OSError, StopIteration):
        return None
    soft = words.split()[3]
    return int(soft) if soft.isdigit() else None
