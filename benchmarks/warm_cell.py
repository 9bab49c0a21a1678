"""A trivial `%%mirrored` cell on two warm CPU replicas against the same cell in the kernel.

    python benchmarks/warm_cell.py [cells]

Measured at the front end's end of a real ipykernel: from the execute request to the kernel's idle message.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from jupyter_client.manager import start_new_kernel
from machine import report

CELLS = int(sys.argv[1]) if len(sys.argv) > 1 else 60


def _seconds(client: Any, code: str) -> float:
    began = time.perf_counter()
    reply = client.execute_interactive(code, timeout=60, output_hook=lambda message: None)
    seconds = time.perf_counter() - began
    if reply["content"]["status"] != "ok":
        raise RuntimeError(f"{code!r} failed: {reply['content'].get('evalue')}")
    return seconds


def main() -> None:
    """Run the cells in turns and report medians."""
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        _seconds(client, "%load_ext mirror_nb\n%mirror start --devices cpu:0,cpu:1")
        kinds = {"ordinary": "1+1", "mirrored": "%%mirrored\n1+1", "quiet": "%%mirrored --quiet\n1+1"}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for i in range(CELLS + 5):
            for kind, code in kinds.items():
                seconds = _seconds(client, code)
                if i >= 5:
                    times[kind].append(seconds * 1000)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    middle = {kind: statistics.median(values) for kind, values in times.items()}
    plain = middle["ordinary"]
    report(
        "warm_cell",
        [
            f"trivial warm cell `1+1`, two CPU replicas, medians of {CELLS} cells in turns",
            f"ordinary cell          {plain:.1f} ms",
            f"%%mirrored             {middle['mirrored']:.1f} ms   {middle['mirrored'] - plain:+.1f} ms (aim: +5)",
            f"%%mirrored --quiet     {middle['quiet']:.1f} ms   {middle['quiet'] - plain:+.1f} ms",
        ],
    )


if __name__ == "__main__":
    main()
