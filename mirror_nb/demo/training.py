"""The demo's network and its training loop, as a user would write them. Runs in every replica.

Knows PyTorch, the `strategy` that a cell finds bound, and records to publish. Knows no processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirror_nb.demo.datasets import LabelledImages
from mirror_nb.demo.progress import Evaluated, Meter, Predicted, Record
from mirror_nb.strategies.mirrored import MirroredStrategy

TEST_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train."""

    epochs: int
    batch_size: int
    # Examples of a global batch, over all replicas.
    learning_rate: float
    # The highest one; it rises to it and falls again.
    channels: int
    # Of the first convolution; the second has twice as many.
    dropout: float
    # The share of what the linear layers are given that is dropped.
    seed: int


def network(image_side: int, classes: int, channels: int, dropout: float) -> nn.Sequential:
    """Return two convolutions and two linear layers, for images [n, 1, image_side, image_side]."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * channels * (image_side // 4) ** 2, 128),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(128, classes),
    )


def train(
    strategy: MirroredStrategy, data: LabelledImages, recipe: Recipe, publish: Callable[[Record], None]
) -> nn.Sequential:
    """Train a network on `data` and return it, evaluated after each epoch; `publish` is told how it goes."""
    torch.manual_seed(recipe.seed)
    model = network(data.train_images.shape[-1], len(data.classes), recipe.channels, recipe.dropout)
    optimizer = torch.optim.Adam(model.parameters(), recipe.learning_rate)
    batches = strategy.distribute_dataset(
        (data.train_images, data.train_labels), batch_size=recipe.batch_size, shuffle=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.epochs * len(batches)
    )
    meter = Meter(publish)
    predictions: tuple[tuple[int, ...], ...] = ()
    for epoch in range(1, recipe.epochs + 1):
        meter.begin(epoch)
        for images, labels in batches:
            loss = F.cross_entropy(model(shifted(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            meter.step(loss, len(labels))
        meter.end()
        accuracy, predictions = evaluate(strategy, model, data.test_images, data.test_labels)
        publish(Evaluated(epoch, accuracy))
    publish(Predicted(predictions))
    return model


def shifted(images: Tensor) -> Tensor:
    """Return the images moved by up to one pixel, all alike: where a digit stands tells nothing of it."""
    height, width = images.shape[-2:]
    y, x = torch.randint(0, 3, (2,)).tolist()
    return F.pad(images, (1, 1, 1, 1))[..., y : y + height, x : x + width]


@torch.no_grad()
def evaluate(
    strategy: MirroredStrategy, model: nn.Module, images: Tensor, labels: Tensor
) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """Return the accuracy over all of `images`, from 0 to 1, and this replica's predictions, batch by batch."""
    model.eval()
    right = torch.zeros((), dtype=torch.long, device=strategy.device)
    predictions = []
    for some, their_labels in strategy.distribute_dataset((images, labels), batch_size=TEST_BATCH):
        predicted = model(some).argmax(1)
        right += (predicted == their_labels).sum()
        predictions.append(tuple(predicted.tolist()))
    model.train()
    return strategy.reduce("sum", right).item() / len(labels), tuple(predictions)
