"""A small network, what trains it, and what it learns from, for tests of strategies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import mirror_nb as mnb


def replica_id() -> int:
    return mnb.get_replica_context().replica_id_in_sync_group


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


X = torch.arange(88.0).reshape(22, 4).sin()
Y = X.sum(1, keepdim=True)


def trained(strategy: mnb.MirroredStrategy) -> nn.Linear:
    """Return a model made in the scope whose weights are 1 in the replicas, and not yet here."""
    with strategy.scope():
        model = nn.Linear(2, 1)

    def fill() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)

    strategy.run(fill)
    return model


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


Trained = tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]


def with_adam() -> Trained:
    torch.manual_seed(0)
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return model, torch.optim.Adam(model.parameters(), 0.1), scaler


def adam_step(trained: Trained) -> None:
    model, optimizer, scaler = trained
    optimizer.zero_grad()
    scaler.scale(F.mse_loss(model(X), Y)).backward()
    scaler.step(optimizer)
    scaler.update()


def states(trained: Trained) -> list[Any]:
    return [copy.deepcopy(obj.state_dict()) for obj in trained]


def assert_equal_states(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
