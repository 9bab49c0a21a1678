"""On one GPU: steps against stock DDP's, an all-reduce by our events and the profiler, and one of two replicas.

    python benchmarks/gpu.py [rounds]

The network is ResNet-50: 161 tensors of parameters, 25.6 million numbers. The steps of all kinds are taken in one
replica, in turns; ratios are of medians. A replica that is alone has nobody to reduce with, so that its gradients stay
as they are; DDP copies them into buckets and calls NCCL all the same. Two replicas on one GPU, which NCCL refuses,
copy from each other's memory; their peer is gloo, by way of the CPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from math import nan
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from machine import report
from torch import nn

import mirror_nb as mnb
from mirror_nb.collectives.base import Member
from mirror_nb.collectives.gloo import GlooAllReduce
from mirror_nb.collectives.measuring import compare
from mirror_nb.collectives.nccl import NcclAllReduce
from mirror_nb.collectives.peer_copies import PeerCopies

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
STEPS = 10
# Of each kind in a round.
BATCH = 32
SIDE = 112
BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))
# Channels inside the blocks of a stage, and how many there are: ResNet-50's.
SIZES = (2**20, 2**24, 2**27)
# Bytes of fp32 that are reduced.
AHEAD = 4_000_000
# Cycles that the GPU is busy for when the next all-reduce is asked for: some 2 ms.


class Block(nn.Module):
    """A bottleneck: 1×1, 3×3 and 1×1 convolutions around a shortcut."""

    def __init__(self, into: int, inside: int, stride: int) -> None:
        super().__init__()
        out = 4 * inside
        layers: list[nn.Module] = []
        for a, b, size, step in ((into, inside, 1, 1), (inside, inside, 3, stride), (inside, out, 1, 1)):
            layers += [nn.Conv2d(a, b, size, step, size // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        self.short: nn.Module = nn.Identity()
        if into != out:
            self.short = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


def network() -> nn.Module:
    """Return a network of ResNet-50's layers."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    into = 64
    for stage, (inside, count) in enumerate(BLOCKS):
        for i in range(count):
            layers.append(Block(into, inside, 2 if stage and not i else 1))
            into = 4 * inside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 1000))


def steps(model: nn.Module, x: torch.Tensor, y: torch.Tensor, count: int) -> list[float]:
    """Return the milliseconds of each step of training."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    taken = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def measure() -> tuple[dict[str, float], int, list[tuple[int, float, float]]]:
    """In the replica: return the medians of the kinds of steps, the network's size, and the times of all-reduces."""
    device = torch.device("cuda:0")
    if not dist.is_initialized():
        store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    torch.manual_seed(0)
    ours, theirs, alone = (network().to(device) for _ in range(3))
    ddp = nn.parallel.DistributedDataParallel(theirs, device_ids=[0])
    x, y = torch.randn(BATCH, 3, SIDE, SIDE, device=device), torch.randint(1000, (BATCH,), device=device)
    kinds: dict[str, Any] = {"one replica": ours, "DDP": ddp, "one replica again": alone}
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for model in kinds.values():
        steps(model, x, y, STEPS)
    for _ in range(ROUNDS):
        for name, model in kinds.items():
            taken[name] += steps(model, x, y, STEPS)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return medians, sum(p.numel() for p in ours.parameters()), [reduced(nbytes, device) for nbytes in SIZES]


def reduced(nbytes: int, device: torch.device) -> tuple[int, float, float]:
    """Return bytes, and the microseconds of their all-reduce as our events tell them and as the profiler does."""
    ops = NcclAllReduce()
    ops.bind(Member(0, 1, device, world()))
    flat = torch.ones(nbytes // 4, device=device)
    for _ in range(3):
        ops.start(mnb.ReduceOp.MEAN, flat).wait()
    torch.cuda.synchronize()
    told = []
    with torch.profiler.profile() as profile:
        for _ in range(10):
            # The GPU is behind, as it is in training: what is measured is not how fast the host asks.
            torch.cuda._sleep(AHEAD)
            handle = ops.start(mnb.ReduceOp.MEAN, flat)
            handle.wait()
            torch.cuda.synchronize()
            started, ended = handle.times() or (nan, nan)
            told.append((ended - started) / 1e3)
    kernels = [
        event.device_time_total
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name == "nccl:all_reduce"
    ]
    ops.unbind()
    return nbytes, statistics.median(told), statistics.median(kernels) if kernels else nan


def world() -> dist.ProcessGroup:
    """Return the default group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def share(replica_id: int, folder: str) -> None:
    """In one of two processes: reduce by each op in turns, and keep the medians, µs."""
    device = torch.device("cuda:0")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=replica_id, world_size=2)
    ops = {"gloo": GlooAllReduce(), "peer copies": PeerCopies()}
    for each in ops.values():
        each.bind(Member(replica_id, 2, device, world()))
    trials = [compare(ops, nbytes // 4, seconds=3) for nbytes in SIZES]
    assert all(trial.correct for found in trials for trial in found.values())
    if replica_id == 0:
        torch.save([[found[name].quantile(0.5) for name in ops] for found in trials], f"{folder}/medians")
    dist.destroy_process_group()


def shared() -> list[list[float]]:
    """Return for each size what two replicas on one GPU need by gloo and by peer copies, µs."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(share, (folder,), nprocs=2)
        medians: list[list[float]] = torch.load(f"{folder}/medians")
    return medians


if __name__ == "__main__":
    with mnb.MirroredStrategy(["cuda:0"]) as strategy:
        medians, size, times = strategy.run(measure)
    ddp = medians["DDP"]
    lines = [
        f"one replica on one GPU, {size / 1e6:.1f} million parameters, batch {BATCH}; "
        f"{ROUNDS} rounds of {STEPS} steps in turns",
        *(f"step, {name:<18} {ms:8.3f} ms   {ddp / ms:.3f} of DDP's speed" for name, ms in medians.items()),
        "",
        "all-reduce by NCCL, one replica: our events, the profiler's kernels, µs",
        *(f"{nbytes / 2**20:6.0f} MiB   {ours:9.1f}   {kernel:9.1f}" for nbytes, ours, kernel in times),
        "",
        "all-reduce of two replicas on one GPU: by gloo, by peer copies, µs",
        *(
            f"{nbytes / 2**20:6.0f} MiB   {gloo:9.1f}   {copies:9.1f}   {gloo / copies:5.1f} ×"
            for nbytes, (gloo, copies) in zip(SIZES, shared(), strict=True)
        ),
    ]
    report("gpu", lines)
