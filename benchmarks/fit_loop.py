"""The training loop that `fit` is measured against, as one writes it by hand. Knows PyTorch, no mirror_nb.

Runs once per replica, in a default process group: under torchrun, or on a strategy's replicas. It keeps its images as
one tensor and takes each share by index, which is much faster than a DataLoader over single images.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 64
# Examples of a global batch.
KINDS = ("MLP", "CNN")


def network(kind: str) -> nn.Sequential:
    """Return a small network for images [n, 1, 28, 28] and ten classes."""
    if kind == "MLP":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 10)),
    )


class Loop:
    """Adam in one kernel, as `fit` has it, cross entropy and accuracy on this replica's half of each global batch."""

    def __init__(self, kind: str, file: str | Path, *, wrapped: bool) -> None:
        """`file`: images and labels; `wrapped`: in DistributedDataParallel."""
        torch.manual_seed(0)
        self._images, self._labels = torch.load(file, weights_only=True)
        network_ = network(kind)
        self._model = DistributedDataParallel(network_) if wrapped else network_
        self._optimizer = torch.optim.Adam(network_.parameters(), fused=True)
        self._epoch = 0

    def epoch(self) -> float:
        """Train on every image once; return the seconds."""
        dist.barrier()
        began = time.perf_counter()
        self._epoch += 1
        order = torch.randperm(len(self._labels), generator=torch.Generator().manual_seed(self._epoch))
        loss, right = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        rank, half = dist.get_rank(), BATCH // dist.get_world_size()
        for first in range(rank * half, len(order), BATCH):
            rows = order[first : first + half]
            part, correct = self._step(self._images.index_select(0, rows), self._labels[rows])
            loss += part
            right += correct
        totals = torch.stack([loss.double(), right.double()])
        dist.all_reduce(totals)
        return time.perf_counter() - began

    def _step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self._model(x)
        loss = F.cross_entropy(outputs, y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach(), (outputs.detach().argmax(1) == y).sum()


_kept: dict[tuple[str, bool], Loop] = {}


def kept(kind: str, file: str, *, wrapped: bool) -> Loop:
    """Return this process's loop of that kind, made when it was first asked for."""
    if (kind, wrapped) not in _kept:
        _kept[kind, wrapped] = Loop(kind, file, wrapped=wrapped)
    return _kept[kind, wrapped]
