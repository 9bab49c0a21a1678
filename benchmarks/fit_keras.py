"""`fit`'s rival: Keras 3's own `fit` on one device, with all cores. Started by benchmarks/fit.py, not by hand.

KERAS_BACKEND=torch python benchmarks/fit_keras.py ADDRESS FILE     the two as for fit_torchrun.py
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from multiprocessing.connection import Client
from typing import Any

import keras
import torch
from fit_loop import BATCH, KINDS


class FirstStep(keras.callbacks.Callback):
    """When the first step was done."""

    at: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time, once."""
        self.at = self.at or time.perf_counter()


def network(kind: str) -> Any:
    """Return the network of fit_loop.py, for images [n, 28, 28, 1]."""
    layers = keras.layers
    if kind == "MLP":
        inner = [layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10)]
    else:
        inner = [
            *(layers.Conv2D(16, 3, activation="relu"), layers.MaxPooling2D(2)),
            *(layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(2)),
            *(layers.Flatten(), layers.Dense(10)),
        ]
    model = keras.Sequential([keras.Input((28, 28, 1)), *inner])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


if __name__ == "__main__":
    with Client(sys.argv[1], "AF_UNIX") as connection:
        images, labels = torch.load(sys.argv[2], weights_only=True)
        x, y = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.numpy()
        models = {kind: network(kind) for kind in KINDS}
        with suppress(EOFError):
            while True:
                kind = connection.recv()
                first, began = FirstStep(), time.perf_counter()
                if kind.startswith("first "):
                    models[kind.removeprefix("first ")].fit(
                        x, y, batch_size=BATCH, steps_per_epoch=1, verbose=0, callbacks=[first]
                    )
                    assert first.at is not None
                    connection.send(first.at - began)
                else:
                    models[kind].fit(x, y, batch_size=BATCH, verbose=0)
                    connection.send(time.perf_counter() - began)
