"""The peer of benchmarks/step.py: DistributedDataParallel over gloo, a process a replica, one thread a process."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workloads import WORKLOADS, data, steps


def main(name: str) -> None:
    """Print replica 0's median step."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=world_size)
    make, optimizer_of, batch = WORKLOADS[name]
    torch.manual_seed(0)
    model = DistributedDataParallel(make())
    optimizer = optimizer_of(model.parameters())
    dataset = data(batch)
    share = batch // dist.get_world_size()
    loader = DataLoader(dataset, batch_size=share, sampler=DistributedSampler(dataset, shuffle=False))
    steps(model, optimizer, loader)
    median = steps(model, optimizer, loader)
    if dist.get_rank() == 0:
        print(median, flush=True)
    dist.destroy_process_group()
    # Not by Python's way out: gloo's threads may still let go of tensors then, which ends the process with SIGABRT.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
