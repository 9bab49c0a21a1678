"""What telemetry costs: a replica to write a sample, the kernel to read them and to sum them up for a frame.

    python benchmarks/telemetry.py

The fastest of many rounds: on a machine that others use, only that is the cost itself. Frames are of made rings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from machine import report

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


def main() -> None:
    """Measure, print and keep."""
    report("telemetry", [*_writing(), *_reading(), *_frames()])


def _writing() -> list[str]:
    with Ring.create() as ring:
        writer = Writer(ring.descriptor)

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

        loop = _fastest(nothing)
        costs = {f.__name__: (_fastest(f) - loop) / WRITES * 1e6 for f in (span, collective, scalar)}
        writer.close()
    return [
        f"fastest of {ROUNDS} rounds of {WRITES} writes",
        f"two clocks and a span         {costs['span']:.2f} µs (aim: 0.4)",
        f"two clocks and a collective   {costs['collective']:.2f} µs",
        f"a scalar, its clock in it     {costs['scalar']:.2f} µs",
    ]


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
