"""A training step in a `%%mirrored` cell, against the same loop with DDP over gloo, started as torchrun does.

    python benchmarks/step.py [rounds] [replicas] [number of the only workload, from 0]

CPU replicas of one thread each, loading included. In every round the peer (benchmarks/ddp_step.py) and the cells
train the same 60 global batches twice; medians of the second time. "floor" is the cell without synchronisation; "bare"
is that with gradients copied into shared memory as they are there, and summed by torch alone (benchmarks/bare.py).
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bare import folder
from machine import report
from workloads import WORKLOADS

from mirror_nb.devices import Device
from mirror_nb.messages import RunCell
from mirror_nb.pool.local import LocalPool
from mirror_nb.strategies.mirrored import SETUP

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
REPLICAS = int(sys.argv[2]) if len(sys.argv) > 2 else 2
ONLY = int(sys.argv[3]) if len(sys.argv) > 3 else None
HERE = Path(__file__).parent

CELL = """
import sys; sys.path.insert(0, {folder!r})
import gc
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from bare import Bare
from workloads import WORKLOADS, data, steps
torch.set_num_threads(1)
model = optimizer = loader = None
gc.collect()
make, optimizer_of, batch = WORKLOADS[{name!r}]
torch.manual_seed(0)
model = make()
if {ddp}:
    model = DistributedDataParallel(model)
optimizer = optimizer_of(model.parameters())
if {bare!r}:
    parameters = list(model.parameters())
    bare = Bare({bare!r}, replica_id, num_replicas, sum(p.numel() for p in parameters), mean=True)
    for parameter, view in zip(parameters, bare.tensor.split([p.numel() for p in parameters])):
        def move(parameter, view=view.view(parameter.shape)):
            view.copy_(parameter.grad)
            parameter.grad.data = view
        parameter.register_post_accumulate_grad_hook(move)
    optimizer.register_step_pre_hook(lambda *_: bare())
loader = DataLoader(data(batch), batch_size=batch)
steps(model, optimizer, strategy.distribute_dataset(loader))
median = steps(model, optimizer, strategy.distribute_dataset(loader))
if replica_id == 0:
    print(median)
model = optimizer = loader = bare = parameters = parameter = view = None
"""


def main() -> None:
    """Measure and report."""
    lines = [
        f"{REPLICAS} CPU replicas of one thread, medians of {ROUNDS} rounds, ms a step; × is the peer's time / ours"
    ]
    lines.append(
        f"{'':22s}{'DDP+gloo':>9s}{'cell':>8s}{'×':>6s}{'floor':>8s}{'floor/cell':>11s}{'bare':>8s}{'bare/cell':>10s}"
        f"{'DDP in cell':>13s}{'×':>6s}"
    )
    with LocalPool(tuple(Device("cpu", i) for i in range(REPLICAS)), setup=SETUP) as pool:
        pool.start()
        for name in WORKLOADS if ONLY is None else [list(WORKLOADS)[ONLY]]:
            rounds = [
                (
                    *(_peer(name), _cell(pool, name), _cell(pool, name, synchronize=False)),
                    *(_bare(pool, name), _cell(pool, name, ddp=True)),
                )
                for _ in range(ROUNDS)
            ]
            peer, cell, floor, bare, ddp = (statistics.median(column) for column in zip(*rounds, strict=True))
            lines.append(
                f"{name:22s}{peer:9.1f}{cell:8.1f}{peer / cell:6.2f}{floor:8.1f}{floor / cell:11.2f}"
                f"{bare:8.1f}{bare / cell:10.2f}{ddp:13.1f}{peer / ddp:6.2f}"
            )
    report("step" if REPLICAS == 2 else f"step_{REPLICAS}", lines)


def _peer(name: str) -> float:
    # As torchrun does, but meeting in a file: torch asks the network for the names of addresses, up to a minute here.
    meeting = tempfile.mkdtemp()
    shared = {"MEETING": f"file://{meeting}/store", "WORLD_SIZE": str(REPLICAS)}
    processes = []
    for rank in range(REPLICAS):
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(HERE / "ddp_step.py"), name]
        processes.append(
            subprocess.Popen(command, env={**os.environ, **shared, **mine}, stdout=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=300)[0] for process in processes]
    shutil.rmtree(meeting)
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{name}: a process of the peer failed: {said}")
    return float(said[0].split()[-1])


def _bare(pool: LocalPool, name: str) -> float:
    shared = folder()
    try:
        return _cell(pool, name, synchronize=False, bare=shared)
    finally:
        shutil.rmtree(shared)


def _cell(pool: LocalPool, name: str, *, synchronize: bool = True, ddp: bool = False, bare: str = "") -> float:
    texts: list[str] = []
    source = CELL.format(folder=str(HERE), name=name, ddp=ddp, bare=bare)
    empty: frozenset[str] = frozenset()
    cell = RunCell(source, None, empty, empty, 1, ".", synchronize, False)
    done = pool.run(dict.fromkeys(range(REPLICAS), cell), on_message=lambda r, m: texts.append(getattr(m, "text", "")))
    if not done.clean:
        raise RuntimeError(done.failures)
    return float("".join(texts).split()[-1])


if __name__ == "__main__":
    main()
