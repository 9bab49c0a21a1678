"""What a live dashboard costs the training that it shows: throughput with it open against closed.

    python benchmarks/dashboard_cost.py [rounds]

Two CPU replicas of one thread on however many cores there are; the kernel draws beside them. Cells train the same
batches with and without, in turns, and in every other round the other way round; the dashboard's front end is left
out, as a browser elsewhere would be. The ratio is of medians over the rounds (aim: 0.97); the pairs' middle half says
how far it is to be believed.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import report
from torch import nn

import mirror_nb
from mirror_nb.notebook.live import LiveDashboard

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from test_dashboard_widget import Shell

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
SECONDS = 1.5
# About so long is a cell.
BATCH = 64


def networks() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Return what is trained, and one example's shape."""
    image = torch.rand(1, 28, 28)
    small = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2704, 10))
    wide = nn.Sequential(nn.Flatten(), nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))
    return {"CNN, 29 k parameters": (small, image), "MLP, 0.8 M parameters": (wide, image)}


def main() -> None:
    """Measure and report."""
    lines = [f"2 CPU replicas of one thread, batch {BATCH}, {ROUNDS} rounds, examples/s"]
    for name, (network, example) in networks().items():
        with mirror_nb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            with strategy.scope():
                model = mirror_nb.Model(network)
            model.compile("sgd", loss="cross_entropy")
            lines += _compared(name, strategy, model, example)
    report("dashboard_cost", lines)


def _compared(name: str, strategy: Any, model: Any, example: torch.Tensor) -> list[str]:
    data = example.expand(2048, *example.shape).clone(), torch.randint(10, (2048,))
    _fit(model, data, 2)
    epochs = max(2, round(SECONDS / (_fit(model, data, 4) / 4)))
    closed: list[float] = []
    opened: list[float] = []
    drawn: list[float] = []
    for i in range(ROUNDS):
        for open_now in (False, True) if i % 2 else (True, False):
            if open_now:
                with _dashboard(strategy) as spent:
                    opened.append(2048 * epochs / _fit(model, data, epochs))
                drawn += spent
            else:
                closed.append(2048 * epochs / _fit(model, data, epochs))
    if len(drawn) < ROUNDS:
        raise RuntimeError(f"{len(drawn)} frames in {ROUNDS} cells: nothing was live")
    ratio = statistics.median(opened) / statistics.median(closed)
    low, middle, high = statistics.quantiles((a / b for a, b in zip(opened, closed, strict=True)), n=4)
    return [
        f"{name:24s} closed {statistics.median(closed):8,.0f}  open {statistics.median(opened):8,.0f}  "
        f"ratio {ratio:.3f}  (pairs {middle:.3f}: {low:.3f} to {high:.3f})",
        f"{'':24s} {len(drawn) / ROUNDS:.0f} frames a cell, {sum(drawn) / len(drawn) * 1e3:.1f} ms of processor each: "
        f"{sum(drawn) / sum(2048 * epochs / each for each in opened):.1%} of one core",
    ]


@contextlib.contextmanager
def _dashboard(strategy: Any) -> Iterator[list[float]]:
    """Show what the replicas do, and keep the processor's seconds of each frame."""
    place = strategy._place
    shell = Shell(types.SimpleNamespace())
    live = place._dashboard = LiveDashboard(place._ready(), operation="", title=str, shell=shell)
    try:
        live.show()
        yield _count(live)
    finally:
        live.close()
        place._dashboard = None


def _count(live: LiveDashboard) -> list[float]:
    """Keep the processor's seconds of each frame from now on."""
    spent: list[float] = []
    draw = live._board._draw

    def counted(*args: Any) -> Any:
        began = time.thread_time()
        try:
            return draw(*args)
        finally:
            spent.append(time.thread_time() - began)

    live._board._draw = counted  # type: ignore[method-assign, assignment]
    return spent


def _fit(model: Any, data: tuple[torch.Tensor, torch.Tensor], epochs: int) -> float:
    began = time.perf_counter()
    model.fit(*data, batch_size=BATCH, epochs=epochs, verbose=0)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
