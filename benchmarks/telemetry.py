"""What telemetry costs: a replica to write a sample and a step of them, a training step, the kernel to read a frame.

    python benchmarks/telemetry.py [steps]

The fastest of many rounds: on a machine that others use, only that is the cost itself. Frames are of made rings. Steps
are of two CPU replicas of one thread, which write into their rings in half of them. Ratios are
off / on, so 0.99 is a step 1 % longer: of the medians, and the median of those of neighbours, from which drifts are
gone; ± is half of the interval that holds 95 % of it where pairs are drawn anew.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import report
from workloads import STEPS, WORKLOADS

from mirror_nb.collectives.handles import Timing
from mirror_nb.devices import Device
from mirror_nb.messages import RunCell
from mirror_nb.pool.local import LocalPool
from mirror_nb.steps.recorder import Recorder
from mirror_nb.strategies.mirrored import SETUP
from mirror_nb.telemetry.findings import findings
from mirror_nb.telemetry.ring import Reader, Ring, Writer
from mirror_nb.telemetry.samples import Kind, Operation, clock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from made_rings import MadeRings

ROUNDS = 25
WRITES = 20_000
FRAMES = 200
STEPS_A_FRAME = 5
# 20 steps a second at four frames a second.
TRAINED = int(sys.argv[1]) if len(sys.argv) > 1 else 1200
# Steps of each network.
BUCKETS = 3
AIM = 0.005
# Part of a step.

CELL = """
import sys; sys.path.insert(0, {folder!r})
import json, time
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from workloads import STEPS, WORKLOADS, data
torch.set_num_threads(1)
recorder = strategy._place.seat.recorder
writer = recorder._writer
make, optimizer_of, batch = WORKLOADS[{name!r}]
torch.manual_seed(0)
model = make()
optimizer = optimizer_of(model.parameters())
loader = DataLoader(data(batch), batch_size=batch)
# On, off, off, on, and in the next epoch the other way round: what drifts or recurs meets both alike.
def on(epoch, i):
    return (i % 4 in (0, 3)) == (epoch % 2 == 0)
before, wrote, spent = recorder.step, 0, []
for epoch in range({epochs}):
    recorder.open(writer if on(epoch, 0) else None)
    began = time.perf_counter_ns(), time.thread_time_ns()
    for i, (x, y) in enumerate(strategy.distribute_dataset(loader)):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter_ns(), time.thread_time_ns()
        wrote += on(epoch, i)
        if i >= 4:
            spent.append((on(epoch, i), now[0] - began[0], now[1] - began[1]))
        recorder.open(writer if on(epoch, i + 1) else None)
        began = time.perf_counter_ns(), time.thread_time_ns()
recorder.open(writer)
assert recorder.step - before == wrote, (recorder.step, before, wrote)
if replica_id == 0:
    print(json.dumps(spent))
model = optimizer = loader = None
"""


def main() -> None:
    """Measure, print and keep."""
    writing, step_us = _writing()
    report("telemetry", [*writing, *_training(step_us), *_reading(), *_frames()])


def _writing() -> tuple[list[str], float]:
    """Return what to report, and the microseconds of a step's samples."""
    with Ring.create() as ring:
        writer = Writer(ring.descriptor)
        recorder = Recorder(torch.device("cpu"))

        def nothing() -> None:
            for _ in range(WRITES):
                pass

        def span() -> None:
            for _ in range(WRITES):
                began = clock()
                writer.span(Kind.FORWARD, 1, began, clock())

        def collective() -> None:
            for _ in range(WRITES):
                began = clock()
                writer.collective(Operation.ALL_REDUCE, 1, 0, 1 << 20, 7, began, began, clock())

        def scalar() -> None:
            for _ in range(WRITES):
                writer.scalar("loss", 0.5, 1)

        def step() -> None:
            for _ in range(WRITES // 10):
                recorder.wanted()
                recorder.arrived(32)
                recorder.backward_begun()
                serials = [recorder.queued(bucket, 1 << 20) for bucket in range(BUCKETS)]
                recorder.backward_computed()
                for bucket in range(BUCKETS):
                    recorder.collective(Timing("all_reduce", 1 << 20, bucket, 1, 1, 2, serials[bucket]))
                recorder.optimizer_begun()
                recorder.optimizer_ended()

        loop = _fastest(nothing)
        costs = {f.__name__: (_fastest(f) - loop) / WRITES * 1e6 for f in (span, collective, scalar)}
        off = _fastest(step)
        recorder.open(writer)
        whole = (_fastest(step) - off) / (WRITES // 10) * 1e6
        writer.close()
    lines = [
        f"fastest of {ROUNDS} rounds of {WRITES} writes",
        f"two clocks and a span         {costs['span']:.2f} µs (aim: 0.4)",
        f"two clocks and a collective   {costs['collective']:.2f} µs",
        f"a scalar, its clock in it     {costs['scalar']:.2f} µs",
        f"a step with {BUCKETS} buckets           {whole:.1f} µs more than without a ring: under {AIM:.1%} of any "
        f"that takes {whole / AIM / 1000:.1f} ms",
    ]
    return lines, whole


def _training(step_us: float) -> list[str]:
    epochs = max(1, TRAINED // STEPS)
    lines = [f"a training step with and without a ring, {epochs * (STEPS - 4)} steps, medians in ms (aim: {1 - AIM})"]
    with LocalPool((Device("cpu", 0), Device("cpu", 1)), setup=SETUP) as pool:
        pool.start()
        for name in list(WORKLOADS)[:2]:
            spent = torch.tensor(_trained(pool, name, epochs), dtype=torch.float64)
            # Of each two steps one wrote: equal rows of the two are neighbours.
            on, off = (spent[spent[:, 0] == wrote, 1:] / 1e6 for wrote in (1, 0))
            lines.append(f"{name:20s}{_compared('by the clock', on[:, 0], off[:, 0])}")
            lines.append(f"{'':20s}{_compared('of CPU', on[:, 1], off[:, 1])}")
            by_samples = 1 - step_us / 1000 / float(off[:, 0].median())
            lines.append(f"{'':20s}by what a step's samples cost: {by_samples:.4f}")
    return lines


def _trained(pool: LocalPool, name: str, epochs: int) -> list[tuple[bool, int, int]]:
    """Return of replica 0's steps: whether it wrote, nanoseconds by the clock and of its thread's processor."""
    texts: list[str] = []
    source = CELL.format(folder=str(Path(__file__).parent), name=name, epochs=epochs)
    empty: frozenset[str] = frozenset()
    cell = RunCell(source, None, empty, empty, 1, ".", True, False)
    done = pool.run({0: cell, 1: cell}, on_message=lambda r, m: texts.append(getattr(m, "text", "")))
    if not done.clean:
        raise RuntimeError(done.failures)
    found: list[tuple[bool, int, int]] = json.loads("".join(texts))
    return found


def _compared(what: str, on: torch.Tensor, off: torch.Tensor) -> str:
    pairs = off / on
    drawn = torch.randint(len(pairs), (500, len(pairs)), generator=torch.Generator().manual_seed(0))
    low, high = pairs[drawn].quantile(0.5, 1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    a, b = float(on.quantile(0.5)), float(off.quantile(0.5))
    return (
        f"{what:13s} on {a:6.2f}  off {b:6.2f}  ratio {b / a:.4f}  of neighbours {float(pairs.quantile(0.5)):.4f} "
        f"± {(high - low) / 2:.4f}"
    )


def _reading() -> list[str]:
    lines = []
    with Ring.create() as ring:
        writer, reader = Writer(ring.descriptor), Reader(ring.descriptor)
        for count in (0, 100, 16_000):
            times = []
            for _ in range(ROUNDS):
                for _ in range(count):
                    writer.span(Kind.FORWARD, 1, 1, 2)
                began = time.perf_counter()
                rows = reader.read()
                times.append(time.perf_counter() - began)
                if len(rows) != count:
                    raise RuntimeError(f"read {len(rows)} of {count} samples")
            lines.append(f"reading {count:6,} new samples   {min(times) * 1e6:.0f} µs a ring")
        writer.close()
        reader.close()
    return lines


def _frames() -> list[str]:
    lines = []
    for replicas in (1, 2, 8):
        with MadeRings(replicas) as made:
            made.step(200)
            made.timeline.update(now=made.now)
            costs: dict[str, list[float]] = {"update": [], "snapshot": [], "findings": []}
            for _ in range(FRAMES):
                made.step(STEPS_A_FRAME)
                made.log_loss()
                times = [time.process_time()]
                made.timeline.update(now=made.now)
                times.append(time.process_time())
                snapshot = made.timeline.snapshot(now=made.now)
                times.append(time.process_time())
                findings(snapshot)
                times.append(time.process_time())
                for name, a, b in zip(costs, times, times[1:], strict=False):
                    costs[name].append((b - a) * 1e3)
        parts = "  ".join(f"{name} {min(values):.2f}" for name, values in costs.items())
        whole = sum(min(values) for values in costs.values())
        lines.append(f"a frame of {replicas} replicas, CPU ms   {parts}   together {whole:.2f}")
    lines.append(f"({STEPS_A_FRAME} steps of 4 buckets in each frame; drawing not counted)")
    return lines


def _fastest(run: Callable[[], None]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main()
