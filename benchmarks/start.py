"""Start of two CPU replicas up to their first all-reduce, against bare torch.multiprocessing spawn with gloo.

    python benchmarks/start.py [trials]

Every trial runs in a fresh Python that has torch loaded, as a notebook kernel has; the two take turns.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time

import torch

TRIALS = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 7


def _bare_worker(rank: int, port: int, done: object) -> None:
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    done.send(True)  # type: ignore[attr-defined]


def bare() -> float:
    """Spawn two processes that import torch and do one gloo all-reduce; seconds until both have."""
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    began = time.perf_counter()
    ends = []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_bare_worker, args=(rank, port, theirs))
        process.start()
        ends.append((ours, process))
    for ours, _ in ends:
        ours.recv()
    seconds = time.perf_counter() - began
    for _, process in ends:
        process.join()
    return seconds


def mirrored() -> tuple[float, float]:
    """Start a pool, which is ready after an all-reduce; seconds of the first, and of a second one."""
    from mirror_nb.devices import resolve
    from mirror_nb.pool.local import LocalPool
    from mirror_nb.strategies.mirrored import SETUP

    seconds = []
    for _ in range(2):
        pool = LocalPool(resolve("cpu:0,cpu:1", 0), setup=SETUP)
        began = time.perf_counter()
        pool.start()
        seconds.append(time.perf_counter() - began)
        pool.close()
    return seconds[0], seconds[1]


def _trial(what: str) -> list[float]:
    output = subprocess.run([sys.executable, __file__, what], capture_output=True, text=True, check=True).stdout
    return [float(part) for part in output.split()]


if __name__ == "__main__":
    if "bare" in sys.argv:
        print(bare())
    elif "mirrored" in sys.argv:
        print(*mirrored())
    else:
        from machine import report

        trials = [(_trial("bare"), _trial("mirrored")) for _ in range(TRIALS)]
        peer = statistics.median(b[0] for b, _ in trials)
        first = statistics.median(m[0] for _, m in trials)
        later = statistics.median(m[1] for _, m in trials)
        report(
            "start",
            [
                f"start of two CPU replicas up to the first all-reduce, medians of {TRIALS} interleaved trials",
                f"bare spawn + gloo          {peer:.3f} s",
                f"mirror_nb, first start     {first:.3f} s   {first / peer:.2f} of bare (aim: at most 1.0)",
                f"mirror_nb, later start     {later:.3f} s   {later / peer:.2f} of bare",
            ],
        )
