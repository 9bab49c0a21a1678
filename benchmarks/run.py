"""`strategy.run` from the controller: of an empty function, and of a training step against the same loop in a cell.

    python benchmarks/run.py [rounds]

Two CPU replicas. The loops train the demo's network on random images of its size; they take turns, on the same
strategy's replicas and on the notebook's kind of pool, each with its own model.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from machine import report
from torch.utils.data import DataLoader, TensorDataset

import mirror_nb as mnb
from mirror_nb.demo.training import network
from mirror_nb.devices import Device
from mirror_nb.messages import RunCell
from mirror_nb.pool.local import LocalPool
from mirror_nb.strategies.mirrored import SETUP

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
BATCH, SIDE, STEPS = 64, 28, 60

CELL = f"""
import time, torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from mirror_nb.demo.training import network
if "model" not in globals():
    torch.manual_seed(0)
    model = network({SIDE}, 10, 32, 0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn({BATCH * STEPS}, 1, {SIDE}, {SIDE}), torch.randint(0, 10, ({BATCH * STEPS},)))
    loader = DataLoader(data, batch_size={BATCH})
began = time.perf_counter()
for x, y in strategy.distribute_dataset(loader):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(time.perf_counter() - began)
"""


def main() -> None:
    """Measure and report."""
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        empty = _empty(strategy)
        with strategy.scope():
            model = network(SIDE, 10, 32, 0.2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        images = torch.randn(BATCH * STEPS, 1, SIDE, SIDE)
        loader = DataLoader(TensorDataset(images, torch.randint(0, 10, (BATCH * STEPS,))), batch_size=BATCH)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def loop() -> float:
            began = time.perf_counter()
            for x, y in strategy.distribute_dataset(loader):
                strategy.run(step, args=(x, y))
            return time.perf_counter() - began

        with LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP) as pool:
            pool.start()
            times = [(loop(), _cell(pool)) for _ in range(ROUNDS + 1)][1:]
    run = statistics.median(a for a, _ in times) / STEPS * 1000
    cell = statistics.median(b for _, b in times) / STEPS * 1000
    report(
        "run",
        [
            f"two CPU replicas, medians; {ROUNDS} rounds of {STEPS} steps in turns",
            f"strategy.run of an empty function   {empty:.3f} ms (aim: under 0.3)",
            f"step in a %%mirrored cell           {cell:.2f} ms",
            f"step by strategy.run                {run:.2f} ms   {cell / run:.3f} of the cell's speed (aim: 0.95)",
        ],
    )


def _empty(strategy: mnb.MirroredStrategy) -> float:
    def nothing() -> None:
        pass

    times = []
    for _ in range(500):
        began = time.perf_counter()
        strategy.run(nothing)
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times[50:])


def _cell(pool: LocalPool) -> float:
    texts: list[str] = []
    empty: frozenset[str] = frozenset()
    cell = RunCell(CELL, None, empty, empty, 1, ".", True, False)
    done = pool.run(dict.fromkeys(range(2), cell), on_message=lambda r, m: texts.append(getattr(m, "text", "")))
    if not done.clean:
        raise RuntimeError(done.failures)
    return max(float(line) for line in "".join(texts).split())


if __name__ == "__main__":
    main()
