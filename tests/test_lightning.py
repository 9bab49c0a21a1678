"""Lightning in mirrored cells, unchanged: it finds the replicas as it finds torchrun's workers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from driving import run_cell
from torch import nn

from mirror_nb.devices import Device
from mirror_nb.pool.local import LocalPool
from mirror_nb.strategies.mirrored import SETUP

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")

MADE = """
import lightning as L, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
x = torch.randn(64, 4); y = x.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
torch.manual_seed(2)
net = nn.Linear(4, 1)
"""
TRAINER = """
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, i):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
lit = Lit()
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
train = DataLoader(TensorDataset(x, y), batch_size=8, sampler=torch.utils.data.DistributedSampler(x, shuffle=False))
trainer.fit(lit, train)
found = trainer.world_size, trainer.global_rank, trainer.global_step, float(trainer.callback_metrics["loss"])
del trainer, lit, train
"""
FABRIC = """
fabric = L.Fabric(accelerator="cpu", devices=2)
fabric.launch()
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
losses = []
for a, b in fabric.setup_dataloaders(loader):
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad(); fabric.backward(loss); optimizer.step()
    losses.append(fabric.all_reduce(loss.detach()))
found = fabric.world_size, fabric.global_rank, len(losses), float(sum(losses)) / len(losses)
del fabric, model, optimizer
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    # Of their own: Lightning leaves settings behind.
    with LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP) as pool:
        pool.start()
        yield pool


def on_one_device() -> tuple[list[torch.Tensor], float]:
    """The weights after the same four batches of 16, and the mean of their losses."""
    torch.manual_seed(1)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True)
    torch.manual_seed(2)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for a, b in zip(x.split(16), y.split(16), strict=True):
        loss = F.mse_loss(net(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return list(net.parameters()), sum(losses) / len(losses)


@pytest.mark.parametrize("way", [TRAINER, FABRIC], ids=["trainer", "fabric"])
def test_two_replicas_train_as_one_device_does(pool, way):
    ran = run_cell(pool, MADE + way + "weights = [p.detach().clone() for p in net.parameters()]", timeout=240)
    assert [f"{f.type_name}: {f.message}" for f in ran.report.failures.values()] == []
    weights, loss = on_one_device()
    for r in range(2):
        assert ran.values[r]["found"][:3] == (2, r, 4)
        assert ran.values[r]["found"][3] == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(ran.values[r]["weights"], weights)
