"""How the dashboard writes numbers, and the sentences that stand for the whole picture. Draws nothing."""

from __future__ import annotations

import math

from mirror_nb.notebook.dashboard.frame import Frame, Phase, latest
from mirror_nb.readable import bare_milliseconds
from mirror_nb.telemetry.findings import AT_MOST, ENOUGH, Weight
from mirror_nb.telemetry.snapshot import UNKNOWN

EVEN = 0.10
# Of replicas' busy times: what the greatest may be longer than the least.


def number(value: float | None) -> str:
    """Return a value for a label: `13,020`, `41.2`, `0.412`, `0.0022`, `1.2e-05`; an en dash if it is not known."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}" if size < 1e7 else f"{value:.2e}"
    if size >= 1:
        return f"{value:.1f}" if size >= 10 else f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.01 else f"{value:.2g}"


def tick(value: float) -> str:
    """Return a value for an axis, as short as can be: `3.5k`, `0.05`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def rate(value: float) -> str:
    """Return examples a second for a label, which has a place of six characters: `13,020`, `161.4k`."""
    return number(value) if not value >= 1e5 else tick(value)


def pair(p50: float, p95: float) -> str:
    """Return two times with one unit: `0.21 / 0.40 ms`."""
    if max(p50, p95) >= 1:
        return f"{p50:.1f} / {p95:.1f} s"
    return f"{bare_milliseconds(p50)} / {bare_milliseconds(p95)} ms"


def bandwidth(rate: float) -> str:
    """Return bytes a second: `188 GB/s`, `0.4 GB/s`, `84 MB/s`, `0.4 MB/s`."""
    value, unit = (rate / 1e9, "GB/s") if rate >= 1e8 else (rate / 1e6, "MB/s")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def left(seconds: float) -> str:
    """Return a time to come: `01:12`, `2:03:20`."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"


def percent(share: float) -> str:
    """Return a share of 1: `12.5 %`, `98 %`."""
    value = share * 100
    return f"{value:.1f} %" if value < 20 else f"{value:.0f} %"


def done(frame: Frame) -> tuple[int, int | None]:
    """Return how many steps were done and how many are planned, those of earlier cells left out."""
    shot = frame.snapshot
    before = frame.since if frame.since < shot.step else 0
    return shot.step - before, shot.steps_planned - before if shot.steps_planned else None


def steps(frame: Frame) -> str:
    """Return how far the training is: `480 / 1,200`, `480`."""
    its, planned = done(frame)
    return f"{its:,} / {planned:,}" if planned else f"{its:,}"


def sync(frame: Frame) -> str:
    """Return whether parameters are equal, as was seen last: `parameters in sync at step 480`, `0.bias differs …`."""
    shot, names = frame.snapshot, list(frame.snapshot.differing)
    which = "parameters in sync" if not names else f"{names[0]} differs"
    if names == [UNKNOWN] or len(names) > 1:
        which = f"{len(names) if len(names) > 1 else 'some'} parameters differ"
    return f"{which} at step {shot.checked_step:,}"


def facts(frame: Frame) -> list[tuple[str, str, str]]:
    """Return the key numbers: (value, what it is, its CSS class). What is not known is left out, never guessed."""
    shot = frame.snapshot
    curve = frame.curve()
    together = " together" if shot.num_replicas > 1 else ""
    found: list[tuple[str | None, str, str]] = [
        (number(shot.throughput) if shot.throughput else None, f"examples/s{together}, waits included", ""),
        (f"{frame.speed_up:.2f}×" if frame.speed_up else None, "vs 1 replica", ""),
        (number(curve[1].last) if curve else None, curve[0] if curve else "", ""),
        *((number(other.last), name, "") for name, other in frame.others()),
        (
            percent(shot.exposed) if shot.exposed is not None and shot.num_replicas > 1 else None,
            "exposed comm",
            "comm",
        ),
        (steps(frame) if shot.step else None, "steps", ""),
        # A picture of one cell has steps of its own, and axes that go on.
        (f"{shot.step:,}" if shot.step and done(frame)[0] < shot.step else None, "in all", ""),
        (str(shot.epoch) if shot.epoch else None, "epoch", ""),
        (left(shot.seconds_left) if shot.seconds_left is not None and not frame.phase.over else None, "left", ""),
    ]
    return [(value, what, kind) for value, what, kind in found if value is not None]


def noticed(frame: Frame) -> list[tuple[str, str, str]]:
    """Return at most three things to look at, the weightiest first: (sentence, its numbers, its CSS class)."""
    found = [(f.title, f.detail, "bad" if f.weight > Weight.HINT else "hint") for f in frame.findings]
    if frame.phase is Phase.FAILED:
        found.insert(0, ("The training failed", frame.note, "bad"))
    return found[:AT_MOST] or [(title, detail, "good") for title, detail in fine(frame)]


def fine(frame: Frame) -> list[tuple[str, str]]:
    """Return what to say when nothing is to be said: (sentence, the numbers it rests on)."""
    shot = frame.snapshot
    if len(shot.late_steps) < ENOUGH:
        return [("Too early to say", f"{ENOUGH} steps are needed, {len(shot.late_steps)} were seen")]
    found = [("Nothing stands out", f"in the last {len(shot.late_steps)} steps")]
    busy = [state.busy_seconds for state in shot.replicas if state.busy_seconds]
    uneven = max(busy) / min(busy) - 1 if busy else 0.0
    if uneven >= EVEN:
        found = [("No replica is slow throughout", f"busy {pair(min(busy), max(busy))} a step, by replica")]
    elif len(busy) > 1:
        found.append((f"Replicas within {percent(uneven)} of each other", f"busy {pair(min(busy), max(busy))} a step"))
    if shot.in_sync and shot.num_replicas > 1:
        # At which step, the loss's panel says: two panels may be of different frames.
        found.append(("Parameters in sync", "checksums of all replicas are equal"))
    return found


def alternative(frame: Frame) -> str:
    """Return the picture in a few sentences: for screen readers, and where no picture can be shown."""
    shot = frame.snapshot
    count = f"{shot.num_replicas} replica{'s' if shot.num_replicas > 1 else ''}"
    head = f"{frame.title}: {frame.phase.value}" if frame.title else frame.phase.value.capitalize()
    said = [f"{head} on {count}" + (f" with {frame.operation}" if frame.operation else "")]
    if frame.note:
        said.append(frame.note.rstrip("."))
    if frame.phase is Phase.WAITING:
        said.append("no step has ended yet")
    said.append(", ".join(f"{what} {value}" for value, what, _ in facts(frame)))
    # The numbers of the picture's labels.
    rates = [f"r{r} {rate(value)}" for r, value in enumerate(latest(shot.throughputs)) if math.isfinite(value)]
    if len(rates) > 1:
        said.append(f"examples/s by replica, waits left out: {', '.join(rates)}")
    if shot.in_sync is not None and shot.num_replicas > 1:
        said.append(sync(frame))
    said += [f"{finding.title}, {finding.detail}" for finding in frame.findings]
    return ". ".join(part for part in said if part) + "."
