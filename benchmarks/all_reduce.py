"""All-reduce of fp32 through shared memory against gloo, and Open MPI where it is installed.

    python benchmarks/all_reduce.py [replicas] [seconds a size]

Processes of one thread each. Every op fills its tensor anew, reduces it and reads it; what filling and reading take
alone is measured beside it and taken off, so that what the op leaves in the caches counts. All, Open MPI's too, begin
together: the processes meet on counters in shared memory before each, and leave within a µs. The ops take turns, some
repetitions in a row, of which the first do not count: gloo sleeps for ms and leaves threads at work, and what comes
next would pay for it. "bare" is what the sums and copies alone take (benchmarks/bare.py).
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from bare import Bare, Meeting, folder
from machine import report

SIZES = (2**10, 2**16, 2**20, 2**22, 2**26)
IN_A_ROW, UNCOUNTED = 10, 3
LIMIT_SECONDS = 300
AIMS = {2**10: 40, 2**20: 30, 2**26: 10}
# Of "in a bucket" against gloo; an ordinary tensor shall take a quarter of gloo's time.


Ops = Mapping[str, tuple[torch.Tensor, Callable[..., object]]]
# By name: what is reduced, and by what.


def _measure(ops: Ops, barrier: Callable[[], object], seconds: float) -> dict[str, float]:
    """Return the median of each op's time in µs; all processes do as many turns."""
    source = torch.randn(next(iter(ops.values()))[0].numel())
    times: dict[str, list[float]] = {name: [] for name in ops}
    turns = max(2, min(40, int(seconds * 5e8 / (len(ops) * source.nbytes + 1e6)) // IN_A_ROW))
    for name, (tensor, op) in list(ops.items()) * turns:
        for i in range(UNCOUNTED + IN_A_ROW):
            barrier()
            began = time.perf_counter()
            tensor.copy_(source)
            op()
            tensor.sum()
            if i >= UNCOUNTED:
                times[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def _taken_off(middle: dict[str, float]) -> dict[str, float]:
    """Take off what filling and reading took."""
    off = {name: middle["bucket alone" if name in ("in a bucket", "bare") else "alone"] for name in middle}
    return {name: time - off[name] for name, time in middle.items() if "alone" not in name}


def _replica(replica_id: int, n: int, port: int, path: str, seconds: float, results: Any) -> None:
    from mirror_nb.collectives import process_group
    from mirror_nb.collectives.base import Member
    from mirror_nb.collectives.shared_memory import SharedMemoryAllReduce
    from mirror_nb.messages import Rendezvous

    torch.set_num_threads(1)
    process_group.form(Rendezvous("127.0.0.1", port, 1, replica_id, n, 120.0), torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    store = dist.PrefixStore("gloo itself", dist.TCPStore("127.0.0.1", port, None, False))
    gloo: Any = dist.ProcessGroupGloo(store, replica_id, n, timedelta(seconds=120))
    shared = SharedMemoryAllReduce()
    shared.bind(Member(replica_id, n, torch.device("cpu"), group))
    meet = Meeting(path, "ours", replica_id, n)
    found = {}
    for size in SIZES:
        ordinary, others, alone = (torch.zeros(size // 4) for _ in range(3))
        bucket, bucket_alone = (shared.allocate(size // 4, torch.float32) for _ in range(2))
        bare = Bare(path, replica_id, n, size // 4)
        ops: Ops = {
            "alone": (alone, lambda: None),
            "bucket alone": (bucket_alone, lambda: None),
            "in a bucket": (bucket, lambda t=bucket: shared.all_reduce("sum", t).wait()),
            "bare": (bare.tensor, bare),
            "dist.all_reduce": (ordinary, lambda t=ordinary: dist.all_reduce(t)),
            "gloo": (others, lambda t=others: gloo.allreduce([t]).wait()),
        }
        found[size] = _taken_off(_measure(ops, meet, seconds))
        shared.release(bucket)
        shared.release(bucket_alone)
    if replica_id == 0:
        results.put(found)
    dist.barrier()
    os._exit(0)


def _ours(n: int, path: str, seconds: float) -> dict[int, dict[str, float]]:
    """Return by size the time of each op."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=_replica, args=(i, n, port, path, seconds, results)) for i in range(n)]
    for process in processes:
        process.start()
    found = results.get()
    for process in processes:
        process.join()
    del store
    return found


def _mpi(n: int, path: str, seconds: float) -> dict[int, float] | str:
    """Open MPI's times, of the same measurement in processes of its own, or why there are none."""
    # Not imported here: mpiexec hangs when a process that is in MPI itself starts it.
    if importlib.util.find_spec("mpi4py") is None:
        return "there is no mpi4py"
    if shutil.which("mpiexec") is None:
        return "there is no mpiexec"
    command = ["mpiexec", "--oversubscribe", "-n", str(n), sys.executable, __file__, "mpi", path, str(seconds)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"mpiexec did not end within {LIMIT_SECONDS} s"
    if run.returncode:
        return run.stderr.strip().splitlines()[-1]
    return {int(size): float(value) for size, value in (line.split() for line in run.stdout.splitlines())}


def _mpi_process(path: str, seconds: float) -> None:
    mpi: Any = importlib.import_module("mpi4py.MPI")
    torch.set_num_threads(1)
    world = mpi.COMM_WORLD
    meet = Meeting(path, "mpi", world.Get_rank(), world.Get_size())
    for size in SIZES:
        tensor, alone = torch.zeros(size // 4), torch.zeros(size // 4)
        middle = _measure(
            {
                "alone": (alone, lambda: None),
                "op": (tensor, lambda t=tensor: world.Allreduce(mpi.IN_PLACE, t.numpy())),
            },
            meet,
            seconds,
        )
        if world.Get_rank() == 0:
            print(size, middle["op"] - middle["alone"])


def _in_words(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def _compared(times: dict[str, float], peer: float) -> str:
    return "  ".join(f"{times[name]:8.1f} {peer / times[name]:5.1f} ×" for name in ("dist.all_reduce", "in a bucket"))


def main() -> None:
    """Measure and report."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
    shared = folder()
    try:
        found = _ours(n, shared, seconds)
        mpi = _mpi(n, shared, seconds)
    finally:
        shutil.rmtree(shared)
    lines = [
        f"all-reduce of fp32, {n} processes of one thread, medians in µs, filling and reading taken off",
        f"{'':>8}  {'gloo':>8}  {'dist.all_reduce':>16}  {'in a bucket':>16}  {'bare':>16}",
    ]
    for size, times in found.items():
        aim = f" (aim: {AIMS[size]} ×)" if size in AIMS and n == 2 else ""
        bare = f"{times['bare']:8.1f} {times['gloo'] / times['bare']:5.1f} ×"
        lines.append(f"{_in_words(size):>8}  {times['gloo']:8.0f}  {_compared(times, times['gloo'])}  {bare}{aim}")
    lines.append("Aim of dist.all_reduce: 4 × gloo." if n == 2 else "Aim: never slower than gloo.")
    lines.append("bare: torch's sums and copies alone, and two meetings, in memory like a bucket's: about the least.")
    lines += ["", f"{'':>8}  {'Open MPI':>8}  {'dist.all_reduce':>16}  {'in a bucket':>16}"]
    for size, times in found.items():
        peer = mpi[size] if isinstance(mpi, dict) else math.nan
        lines.append(f"{_in_words(size):>8}  {peer:8.0f}  {_compared(times, peer)}")
    lines.append("Aim of dist.all_reduce: no slower than Open MPI from 1 MiB up.")
    if isinstance(mpi, str):
        lines.append(f"No Open MPI: {mpi}")
    report("all_reduce" if n == 2 else f"all_reduce_{n}", lines)


if __name__ == "__main__":
    if "mpi" in sys.argv:
        _mpi_process(sys.argv[2], float(sys.argv[3]))
    else:
        main()
