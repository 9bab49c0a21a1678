"""The machine a benchmark ran on, in words, for its result file."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch


def description() -> str:
    """Return cores, processor, memory, GPUs and versions, one a line."""
    model = "unknown processor"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores of {model}; GPUs: {', '.join(gpus) or 'none'}\n"
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}\n"
        f"{datetime.now(UTC):%Y-%m-%d}"
    )


def report(name: str, lines: list[str]) -> None:
    """Print a result and keep it under `benchmarks/results/`, with the machine."""
    text = "\n".join([*lines, "", description(), ""])
    print(text)
    (Path(__file__).parent / "results" / f"{name}.txt").write_text(text)
