"""What a frame of the dashboard costs the kernel: reading, summing up, judging, drawing; and its bytes.

    python benchmarks/dashboard.py

Frames draw one half of the panels anew and the other, in turns, as Dashboard does; the figures are means of both. The
fastest of many of each: on a machine that others use, only that is the cost itself. Frames are of made rings.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from machine import report

from mirror_nb.notebook.dashboard import page
from mirror_nb.notebook.dashboard.frame import Frame
from mirror_nb.notebook.dashboard.still import draw
from mirror_nb.telemetry.findings import Finding, findings
from mirror_nb.telemetry.snapshot import Half

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from made_rings import MadeRings, readings

FRAMES = 200
STEPS_A_FRAME = 5
# 20 steps a second at four frames a second.
PARTS = ("update", "snapshot", "findings", "drawing")


def main() -> None:
    """Measure, print and keep."""
    lines = [_frames(replicas) for replicas in (1, 2, 4, 8)]
    lines += [
        f"({STEPS_A_FRAME} steps of 4 buckets and a loss in each frame; aims at 8 replicas: 4 ms, 40 kB)",
        f"the style, sent once   {len(page.STYLE) / 1e3:.1f} kB",
        f"the still figure of 8 replicas, once at the end   {_still():.0f} ms",
    ]
    report("dashboard", lines)


def _frames(replicas: int) -> str:
    devices = tuple(f"cuda:{r}" for r in range(replicas))
    read = readings(replicas)
    costs: dict[Half, dict[str, list[float]]] = {half: {part: [] for part in PARTS} for half in Half}
    sizes = []
    with MadeRings(replicas) as made:
        made.step(200)
        made.timeline.update(now=made.now)
        shown, shot = page.Page(), made.timeline.snapshot(now=made.now)
        found: tuple[Finding, ...] = ()
        for _ in range(FRAMES):
            for half in Half:
                made.step(STEPS_A_FRAME)
                made.log_loss()
                times = [time.process_time()]
                made.timeline.update(now=made.now)
                times.append(time.process_time())
                shot = made.timeline.snapshot(now=made.now, half=half, earlier=shot)
                times.append(time.process_time())
                found = findings(shot, read) if half is Half.MEETINGS else found
                times.append(time.process_time())
                drawn = shown.body(Frame(shot, found, read, devices, "ResNet-50", "NcclAllReduce"), half)
                times.append(time.process_time())
                sizes.append(len(drawn.encode()))
                for part, began, ended in zip(PARTS, times, times[1:], strict=False):
                    costs[half][part].append((ended - began) * 1e3)
    least = {half: {part: min(values) for part, values in its.items()} for half, its in costs.items()}
    parts = "  ".join(f"{part} {sum(its[part] for its in least.values()) / len(Half):.2f}" for part in PARTS)
    whole = [sum(its.values()) for its in least.values()]
    return (
        f"{replicas} replicas, CPU ms   {parts}   together {sum(whole) / len(Half):.2f} "
        f"({' and '.join(f'{each:.2f}' for each in whole)})   {max(sizes) / 1e3:.1f} kB"
    )


def _still() -> float:
    with MadeRings(8) as made:
        made.step(200)
        made.log_loss()
        made.timeline.update(now=made.now)
        frame = Frame(made.timeline.snapshot(now=made.now))
    times = []
    for _ in range(5):
        began = time.process_time()
        draw(frame).canvas.draw()
        times.append(time.process_time() - began)
    return min(times) * 1e3


if __name__ == "__main__":
    main()
