"""The machine a benchmark ran on, in words, for its result file."""

from __future__ import annotations

import platform
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from mirror_nb.machine.cores import cores


def calibration() -> float:
    """Return the milliseconds of processor that a million additions in Python take now: the fastest of ten."""
    times = []
    for _ in range(10):
        began, total = time.process_time(), 0
        for number in range(1_000_000):
            total += number
        times.append(time.process_time() - began)
    return min(times) * 1e3


def description() -> str:
    """Return cores, processor, how fast it is now, GPUs and versions, one a line."""
    model = "unknown processor"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return (
        f"{cores()} cores of {model}; GPUs: {', '.join(gpus) or 'none'}\n"
        f"a million additions in Python take {calibration():.0f} ms of it now (others may use it too)\n"
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}\n"
        f"{datetime.now(UTC):%Y-%m-%d}"
    )


def report(name: str, lines: list[str]) -> None:
    """Print a result and keep it under `benchmarks/results/`, with the machine."""
    text = "\n".join([*lines, "", description(), ""])
    print(text)
    (Path(__file__).parent / "results" / f"{name}.txt").write_text(text)
