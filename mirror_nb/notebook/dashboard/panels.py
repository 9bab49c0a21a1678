"""The dashboard's panels: a frame → a string of HTML and SVG, each. Pure; knows no themes and no widgets.

Colours are CSS classes: `r0` … of replicas, `f-…` of the parts of a step, `hot` of trouble.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mirror_nb import readable
from mirror_nb.notebook.dashboard import words
from mirror_nb.notebook.dashboard.frame import LATEST, Frame, latest
from mirror_nb.notebook.dashboard.palette import LIGHT
from mirror_nb.notebook.dashboard.plot import (
    LABEL,
    WIDTH,
    Floats,
    Integers,
    Label,
    abscissas,
    area,
    box,
    horizontals,
    line,
    plot,
    spread,
    stroke,
    ticks,
    verticals,
)
from mirror_nb.telemetry.findings import SLOW
from mirror_nb.telemetry.machine import Reading
from mirror_nb.telemetry.snapshot import BREAKDOWN, SizeClass

HEIGHT = 132
# Of curves, pixels.
SMALL_HEIGHT = 20
# Of the curves below the loss.
CLASSES = 5
# Sizes of all-reduces that are shown: those that take the most time.
LEVELS = 4
# Of lateness: more are not told apart.
RECENT = 20
# Steps over which a replica's lateness is told.
_HISTOGRAM = 40
_SMOOTH = np.array([1, 3, 5, 6, 5, 3, 1]) / 24
_BROAD = ("exposed", "collective")


def throughput(frame: Frame) -> str:
    """Examples a second of each replica, waits for data and for peers left out: who is slow by itself is seen here."""
    shot = frame.snapshot
    values = shot.throughputs
    if np.isfinite(values).sum() < 2:
        told = "strategy.distribute_dataset, or strategy.step(examples=…), tells how many examples a step has"
        return _card("Throughput per replica", _nothing("after the first steps" if shot.step < LATEST else told))
    # Where a replica is by now is always in sight.
    now = latest(values)
    low, high = visible(values, now)
    ys, places = _heights(values, low, high), abscissas(values.shape[1])
    marks = "".join([line(places, ys[r], f"s {_replica(r)}") for r in range(len(ys))])
    right = _ends(frame, ys, now)
    return _card("Throughput per replica", _curves(shot.steps, low, high, marks, right), "examples/s, waits left out")


def _ends(frame: Frame, ys: Floats, now: Sequence[float]) -> list[Label]:
    """Label each line at its end, with the mean of its last points."""
    found = [(r, y[np.isfinite(y)]) for r, y in enumerate(ys)]
    last = [(r, float(y[-1])) for r, y in found if len(y)]
    places = spread([y for _, y in last], LABEL, 5, HEIGHT - 5)
    slow = frame.slow()
    return [
        Label(at, f"r{r} {words.rate(now[r])}", _replica(r) + " b" * (r in slow))
        for (r, _), at in zip(last, places, strict=True)
    ]


def loss(frame: Frame) -> str:
    """The mean of a scalar over the replicas, the band from its least to its greatest, and whether all agree."""
    chosen = frame.curve()
    if chosen is None or np.isfinite(chosen[1].mean).sum() < 1:
        return _card("Loss", _nothing("mnb.log(loss=loss) in the training loop shows it here"))
    name, curve = chosen
    shot = frame.snapshot
    low, high = visible(np.append(curve.low, curve.high), [curve.last], floor=False)
    mean, lowest, highest = (_heights(values, low, high) for values in (curve.mean, curve.low, curve.high))
    places = abscissas(len(mean))
    band = area(places, lowest, highest, "band") if shot.num_replicas > 1 else ""
    marks = band + line(places, mean, "s ink")
    right = [Label(float(mean[np.isfinite(mean)][-1]), words.number(curve.last), "b")]
    body = _curves(shot.steps, low, high, marks, right) + _others(frame)
    title = name[:1].upper() + name[1:]
    if shot.num_replicas == 1:
        return _card(title, body, "by step")
    said = "mean, min–max over replicas"
    if shot.in_sync is not None:
        said = f"{words.sync(frame)}{' ✓' if shot.in_sync else ''} · mean, min–max"
    return _card(title, body, said, "differs" if shot.in_sync is False else "")


def _others(frame: Frame) -> str:
    """The other scalars, each as a small line of its mean with its name and its last value."""
    rows = []
    for name, curve in frame.others():
        low, high = visible(curve.mean, [curve.last], floor=False)
        ys = _heights(curve.mean, low, high) * (SMALL_HEIGHT / HEIGHT)
        drawn = line(abscissas(len(ys)), ys, "s ink")
        svg = f'<svg viewBox="0 0 {WIDTH} {SMALL_HEIGHT}" preserveAspectRatio="none">{drawn}</svg>'
        rows.append(f"<span>{html.escape(name)}</span>{svg}<b>{words.number(curve.last)}</b>")
    return f'<div class="also">{"".join(rows)}</div>' if rows else ""


def breakdown(frame: Frame) -> str:
    """Where the time of a step goes on each replica: waiting for data, computing, communicating and nothing else."""
    parts = frame.snapshot.breakdown * 1e3
    totals = parts.sum(axis=1)
    if not totals.any():
        return _card("Where a step goes", _nothing("after the first step"))
    top, ends = float(totals.max()), np.cumsum(parts, axis=1)
    row, thick = _rows(len(parts))
    scale = WIDTH / top
    marks = []
    for column, name in enumerate(BREAKDOWN):
        path = "".join(
            box((ends[r, column] - parts[r, column]) * scale, r * row + (row - thick) / 2, width * scale, thick)
            for r, width in enumerate(parts[:, column].tolist())
            if width * scale >= 1
        )
        marks.append(f'<path class="f-{name}" d="{path}"/>' if path else "")
    height = row * len(parts)
    at = ticks(0, top, 4)
    right = [Label(r * row + row / 2, readable.milliseconds(total / 1e3)) for r, total in enumerate(totals.tolist())]
    shown = [name for column, name in enumerate(BREAKDOWN) if parts[:, column].max() >= top / 200]
    body = _legend([(f"f-{name}", "exposed comm" if name == "exposed" else name) for name in shown]) + plot(
        height,
        verticals([value / top for value in at], height) + "".join(marks),
        _names(len(parts), row, frame),
        right,
        [Label(value / top, f"{value:g}") for value in at],
        "rows",
    )
    return _card("Where a step goes", body, "ms, mean of the last steps")


def all_reduces(frame: Frame) -> str:
    """How long all-reduces of about one size take, waits for peers left out, and what that is on the bus."""
    shown = sorted(frame.snapshot.all_reduces, key=lambda c: c.per_step * c.p50)[-CLASSES:]
    shown.sort(key=lambda c: c.size)
    if not shown:
        return _card("All-reduce time by size", _nothing("when gradients have been reduced"))
    row = 32
    logs = [np.log10(np.maximum(c.seconds, 1e-7) * 1e3) for c in shown]
    ends = [within(values, 0.01, 0.99) for values in logs]
    low, high = min(first for first, _ in ends) - 0.35, max(last for _, last in ends) + 0.35
    places = abscissas(_HISTOGRAM)
    marks = []
    for i, (c, values) in enumerate(zip(shown, logs, strict=True)):
        base = (i + 1) * row - 4
        bins = ((values - low) / (high - low) * _HISTOGRAM).astype(int).clip(0, _HISTOGRAM - 1)
        counts = np.bincount(bins, minlength=_HISTOGRAM)
        ridge = np.convolve(counts, _SMOOTH, "same")
        ys = base - ridge / max(ridge.max(), 1e-9) * (row - 9)
        marks.append(area(places, np.full(_HISTOGRAM, float(base)), ys, "ridge"))
        marks.append(_quantiles(c, low, high, base))
    at = [(value, (math.log10(value) - low) / (high - low)) for value in decades(low, high)]
    height = row * len(shown)
    right = [Label((i + 0.5) * row - 4, words.pair(c.p50, c.p95), "two") for i, c in enumerate(shown)]
    right += [Label((i + 0.5) * row + 8, words.bandwidth(c.bus_bandwidth), "two m") for i, c in enumerate(shown)]
    left = [Label((i + 1) * row - 9, readable.size(c.size)) for i, c in enumerate(shown)]
    body = plot(
        height,
        verticals([share for _, share in at], height) + "".join(marks),
        left,
        right,
        [Label(share, words.tick(value)) for value, share in at],
        "wide",
    )
    return _card("All-reduce time by size", body, "ms, log · p50 / p95 · bus")


def _quantiles(c: SizeClass, low: float, high: float, base: float) -> str:
    at = [(np.log10(max(value, 1e-7) * 1e3) - low) / (high - low) * WIDTH for value in (c.p50, c.p95)]
    return (
        f'<path class="q" d="M{at[0]:.0f} {base - 21}V{base + 2}"/>'
        f'<path class="q d" d="M{at[1]:.0f} {base - 12}V{base + 2}"/>'
    )


def lateness(frame: Frame) -> str:
    """How far each replica came behind the first to a collective, the worst of each step; red: see `trouble`."""
    shot = frame.snapshot
    title, late = "Who arrives late", np.nan_to_num(shot.lateness)
    if not late.shape[1] or not late.any():
        return _card(title, _nothing("when replicas have met in a collective"))
    row, _ = _rows(len(late))
    thick = row - (6 if row > 18 else 2)
    most, red = trouble(frame, late)
    level = np.ceil(late / most * LEVELS).astype(int).clip(0, LEVELS)
    # Half a level is what any two replicas differ by.
    level[late < most / LEVELS / 2] = 0
    level[red] = LEVELS + 1
    heights = [f"{(r + 0.5) * row:g}" for r in range(len(late))]
    paths = defaultdict[tuple[int, int], list[str]](list)
    for r, which, began, length in _runs(level):
        paths[r, which].append(f"M{began} {heights[r]}h{length}")
    ground = "".join([stroke(0, WIDTH, (r + 0.5) * row) for r in range(len(late))])
    marks = [f'<path class="f-ground" d="{ground}"/>']
    for (r, which), path in paths.items():
        kind = "hot" if which > LEVELS else f"{_replica(r)} o{which}"
        marks.append(f'<path class="{kind}" d="{"".join(path)}"/>')
    drawn = f'<g class="t" style="stroke-width:{thick}px">{"".join(marks)}</g>'
    right = [
        Label((r + 0.5) * row, readable.milliseconds(value), "hot b" if red[r, -RECENT:].any() else "")
        for r, value in enumerate(late[:, -RECENT:].mean(axis=1).tolist())
    ]
    below = _step_labels(shot.late_steps)
    body = plot(row * len(late), drawn, _names(len(late), row, frame), right, below, "rows crisp")
    return _card(title, body, "behind the first, by step")


def trouble(frame: Frame, late: Floats) -> tuple[float, NDArray[np.bool_]]:
    """Return how late is a tenth of a step, and where replicas that a finding names are later: others' is noise.

    Takes and returns seconds, and an array of (replicas, steps).
    """
    most = (frame.snapshot.step_seconds or float(late.max())) * (SLOW - 1)
    named = np.isin(np.arange(len(late)), list(frame.slow()))
    return most, named[:, None] & (late > most)


def _runs(levels: Integers) -> list[tuple[int, int, int, int]]:
    """Return (row, level, where it begins, length) of neighbours in a row that are alike and not 0, in drawn units."""
    # A column of another level after each row ends its last run.
    padded = np.pad(levels, ((0, 0), (0, 1)), constant_values=-1)
    flat = padded.ravel()
    starts = np.flatnonzero(np.diff(flat, prepend=-1))
    ends, found = np.append(starts[1:], len(flat)), flat[starts]
    rows, columns = np.divmod(starts, padded.shape[1])
    scale = WIDTH / levels.shape[1]
    began, until = (np.rint(at * scale).astype(np.int64) for at in (columns, columns + ends - starts))
    kept = [part[found > 0].tolist() for part in (rows, found, began, until - began)]
    return list(zip(*kept, strict=True))


def lanes(frame: Frame) -> str:
    """The last step of each replica on one time axis: above what it computed, below what it communicated."""
    shot = frame.snapshot
    alone = shot.num_replicas == 1
    title = "The last step" if alone else "Overlap, last step"
    ends = [bar.ended for bars in shot.lanes for bar in bars]
    if not ends:
        return _card(title, _nothing("after the first step"))
    top = max(ends)
    row, _ = _rows(shot.num_replicas)
    half = min(12.0, row / 2 - (2 if row > 18 else 1))
    before = row / 2 - half
    paths: dict[str, list[str]] = {}
    for r, bars in enumerate(shot.lanes):
        for bar in bars:
            y = r * row + before + (half if bar.part in _BROAD else 0)
            width = (bar.ended - bar.began) / top * WIDTH
            paths.setdefault(bar.part, []).append(box(bar.began / top * WIDTH, y, width, half - 0.5))
    order = [*BREAKDOWN, "collective"]
    marks = [f'<path class="f-{part}" d="{"".join(paths[part])}"/>' for part in order if part in paths]
    named = {"collective": "hidden", "exposed": "comm"}
    legend = [(f"f-{part}", named.get(part, part)) for part in order if part in paths]
    at, height = ticks(0, top * 1e3, 4), row * shot.num_replicas
    below = [Label(value / top / 1e3, f"{value:g}") for value in at]
    body = _legend(legend) + plot(
        height,
        verticals([value / top / 1e3 for value in at], height) + "".join(marks),
        _names(shot.num_replicas, row, frame),
        (),
        below,
        "rows flush",
    )
    hidden = f"{words.percent(shot.hidden)} of it hidden" if shot.hidden is not None else "ms"
    return _card(title, body, f"ms · step {shot.lane_step:,}" + ("" if alone else f" · {hidden}"))


def devices(frame: Frame) -> str:
    """Utilisation, memory, clock, temperature and power of each replica's device."""
    readings = frame.histories()
    if not any(readings):
        return _card("Devices", _memory(frame), "memory in use", "wide2")
    last = [its[-1] if its else None for its in readings]
    columns: list[Callable[[Reading], str | None]] = [
        lambda at: None if at.temperature is None else f"{at.temperature:.0f} °C",
        lambda at: None if at.power is None else f"{at.power:.0f} W",
    ]
    known = [column for column in columns if any(at and column(at) for at in last)]
    clocks = any(at and at.clock_rate for at in last)
    rows = []
    for r, (its, at) in enumerate(zip(readings, last, strict=True)):
        hot = bool(at and at.slowed and any(f.title.startswith(at.device) for f in frame.findings))
        cells = [_device_name(frame, r, at), *_usage(r, at), f"<i>{_spark(its, hot) if clocks and its else ''}</i>"]
        cells += [_told(column(at) if at else None, hot) for column in known]
        cells += ["<i></i>"] * (len(columns) - len(known))
        rows.append("".join(cells))
    names = ["utilisation", "memory"] + (["SM clock", "temperature", "power"] if known else [])
    return _card("Devices", f'<div class="d">{"".join(rows)}</div>', " · ".join(names), "wide2")


def _device_name(frame: Frame, replica_id: int, at: Reading | None) -> str:
    device = html.escape(frame.device(replica_id))
    name = html.escape(at.name.removeprefix("NVIDIA ")) if at else ""
    return f'<b class="n1 {_replica(replica_id)}">{device} <small>{name}</small></b>'


def _usage(replica_id: int, at: Reading | None) -> list[str]:
    if at is None:
        return ["<i></i>"] * 4
    used, total = at.memory_used, at.memory_total
    memory = "–" if used is None else f"{used / 2**30:.1f}" + (f" / {total / 2**30:.0f} GiB" if total else " GiB")
    return [
        _bar(replica_id, at.utilisation),
        _told(None if at.utilisation is None else f"{at.utilisation * 100:.0f} %", False),
        _bar(replica_id, used / total if used is not None and total else None, "o2"),
        _told(memory, False),
    ]


def _memory(frame: Frame) -> str:
    """What the replicas themselves tell of their memory, where the devices tell nothing."""
    rows = []
    most = max((state.reserved or state.allocated or 0 for state in frame.snapshot.replicas), default=0)
    for state in frame.snapshot.replicas:
        if state.allocated is not None and most:
            cells = [_device_name(frame, state.replica_id, None), _bar(state.replica_id, state.allocated / most)]
            cells += [_told(f"{state.allocated / 2**30:.1f} GiB", False), *["<i></i>"] * 5]
            rows.append("".join(cells))
    return f'<div class="d">{"".join(rows)}</div>' if rows else _nothing("when the devices have been read")


def _bar(replica_id: int, share: float | None, kind: str = "") -> str:
    if share is None:
        return "<i></i>"
    width = min(1.0, max(0.0, share)) * 100
    return f'<i class="bar"><i class="{_replica(replica_id)} {kind}" style="width:{width:.0f}%"></i></i>'


def _told(text: str | None, hot: bool) -> str:
    return f'<i class="n{" hot b" if hot else ""}">{html.escape(text) if text else ""}</i>'


def _spark(readings: Sequence[Reading], hot: bool) -> str:
    """The clock over the last half minute, against its limit; the lower edge is half of that."""
    rates = [reading.clock_rate for reading in readings if reading.clock_rate]
    limit = max([reading.clock_limit or 0.0 for reading in readings]) or max(rates, default=1.0)
    # A few dozen points: numpy would take longer to begin.
    heights = [14 - 12 * min(1.0, max(0.0, 2 * rate / limit - 1)) for rate in rates]
    path = " ".join([f"{i} {height:.1f}" for i, height in enumerate(heights)])
    drawn = f'<path class="{"s hot" if hot else "s m"}" d="M{path}"/>' if rates else ""
    return f'<svg class="spark" viewBox="0 0 {max(1, len(rates) - 1)} 16" preserveAspectRatio="none">{drawn}</svg>'


def look_at(frame: Frame) -> str:
    """Up to three findings, the weightiest first; or what is in order."""
    body = "".join(
        f'<div class="said {kind}"><b>{html.escape(title)}</b><span>{html.escape(detail)}</span></div>'
        for title, detail, kind in words.noticed(frame)
    )
    shot = frame.snapshot
    lost = shot.overwritten + shot.torn
    return _card("What to look at", body, f"{lost:,} timings not kept" if lost else "", "look")


def header(frame: Frame) -> str:
    """The state, what is trained and on what, the key numbers, and how far it is."""
    shot = frame.snapshot
    count = f"{shot.num_replicas} replica{'s' if shot.num_replicas > 1 else ''}"
    about = " · ".join(html.escape(text) for text in (frame.title, count, frame.operation) if text)
    numbers = "".join(
        f'<span class="{kind}"><b>{html.escape(value)}</b> {html.escape(what)}</span>'
        for value, what, kind in words.facts(frame)
    )
    numbers = numbers or "<span>no step has ended yet</span>"
    hot = " bad" if frame.troubled() else ""
    done, planned = words.done(frame)
    share = min(1.0, done / planned) if planned else 0.0
    note = f'<div class="note">{html.escape(frame.note)}</div>' if frame.note else ""
    return (
        f'<div class="top"><b>mirror_nb</b><i class="pill {frame.phase.value}{hot}">{frame.phase.value}</i>'
        f'<span>{about}</span></div><div class="facts">{numbers}</div>'
        f'<div class="bar way"><i style="width:{share * 100:.1f}%"></i></div>{note}'
    )


# ------------------------------------------------------------------ what panels share


def _card(title: str, body: str, note: str = "", kind: str = "") -> str:
    head = f"<header><b>{html.escape(title)}</b><span>{html.escape(note)}</span></header>"
    return f'<div class="c {kind}">{head}{body}</div>'


def _nothing(when: str) -> str:
    return f'<div class="none">{html.escape(when)}</div>'


def _replica(replica_id: int) -> str:
    """The CSS class of a replica's colour."""
    return f"r{replica_id % len(LIGHT)}"


def _rows(count: int) -> tuple[int, int]:
    """Return the height of a row and of the bar in it: few replicas get more."""
    row = max(14, min(40, HEIGHT // count))
    return row, min(22, row - 5 if row <= 18 else row - 11)


def _names(count: int, row: int, frame: Frame) -> list[Label]:
    slow = frame.slow()
    return [Label((r + 0.5) * row, f"r{r}", _replica(r) + " b" * (r in slow)) for r in range(count)]


def _legend(items: Sequence[tuple[str, str]]) -> str:
    key = '<svg viewBox="0 0 9 9"><path class="{}" d="M0 0h9v9h-9z"/></svg>'
    keys = "".join([f"<span>{key.format(kind)}{text}</span>" for kind, text in items])
    return f'<div class="legend">{keys}</div>'


def decades(low: float, high: float) -> list[float]:
    """Return 1, 3, 10, 30 … between two powers of ten."""
    return [value for k in range(-5, 7) for value in (10.0**k, 3 * 10.0**k) if low <= math.log10(value) <= high]


def visible(values: Floats, always: Sequence[float], floor: bool = True) -> tuple[float, float]:
    """Return the range of an axis that shows what matters: a cold start and single spikes are cut off.

    `always`: what is in it in any case. `floor`: it is a quarter of its top at least, so that noise does not fill it.
    """
    low, high = within(values, 0.03, 0.98)
    now = [value for value in always if math.isfinite(value)]
    low, high = min([low, *now]), max([high, *now])
    spare = max((high - low) * 0.12, abs(high) * 0.01, 1e-9)
    low, high = low - spare, high + spare
    if floor and high - low < high / 4:
        middle = (low + high) / 2
        low, high = middle - high / 8, middle + high / 8
    return (0.0 if floor and low < high * 0.3 else low), high


def within(values: Floats, low: float, high: float) -> tuple[float, float]:
    """Return two quantiles of the finite values; a tenth of the time that numpy's take."""
    known = np.sort(values[np.isfinite(values)], axis=None)
    last = len(known) - 1
    return float(known[int(last * low)]), float(known[math.ceil(last * high)])


def _heights(values: Floats, low: float, high: float) -> Floats:
    return HEIGHT - (np.clip(values, low, high) - low) / (high - low) * HEIGHT


def _curves(steps: Integers, low: float, high: float, marks: str, right: Sequence[Label]) -> str:
    values = ticks(low, high, 5)
    at = _heights(np.array(values), low, high).tolist()
    left = [Label(y, words.tick(value)) for value, y in zip(values, at, strict=True)]
    return plot(HEIGHT, horizontals(at) + marks, left, right, _step_labels(steps))


def _step_labels(steps: Integers) -> list[Label]:
    """Label steps below: round ones, where the points are at equal distances."""
    if len(steps) < 2:
        return [Label(0.0, f"{step:,}") for step in steps.tolist()]
    first, last = int(steps[0]), int(steps[-1])
    wanted = [value for value in ticks(first, last, 6) if value == round(value)]
    places = np.interp(wanted, steps, np.arange(len(steps)) / (len(steps) - 1)).tolist()
    return [Label(at, f"{value:,.0f}") for value, at in zip(wanted, places, strict=True)]
