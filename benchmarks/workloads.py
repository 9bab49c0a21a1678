"""The training steps that benchmarks compare, for cells, for scripts under torchrun, and for one process alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

STEPS = 60


def cnn() -> nn.Module:
    """Return a small network for 28 × 28 images; 1.0 M parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 1200), nn.ReLU(), nn.Linear(1200, 10)),
    )


def mlp() -> nn.Module:
    """Return a network of 9.9 M parameters."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 2560), nn.ReLU()), *(nn.Linear(2560, 3072), nn.ReLU()), nn.Linear(3072, 10)
    )


# Name: network, optimizer, global batch.
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer], int]] = {
    "CNN 1.0M, SGD, 64": (cnn, lambda p: torch.optim.SGD(p, lr=0.01), 64),
    "MLP 9.9M, SGD, 64": (mlp, lambda p: torch.optim.SGD(p, lr=0.01), 64),
    "MLP 9.9M, Adam, 256": (mlp, lambda p: torch.optim.Adam(p, lr=1e-4), 256),
}


def data(batch: int) -> TensorDataset:
    """Return random images for STEPS global batches."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch * STEPS, 1, 28, 28, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (batch * STEPS,), generator=generator))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> float:
    """Train on the batches; return the median time of a step, ms."""
    times = []
    began = time.perf_counter()
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        times.append((now - began) * 1000)
        began = now
    return statistics.median(times)
