"""All replicas' samples on one time axis: reads the rings, remembers, sums up. Draws nothing and judges nothing.

```
Reader ─▶ update() ─▶ kept samples ─▶ tables of steps and collectives ─▶ snapshot(), arrays(), frame(), save()
```

Samples enter the tables when the step that they belong to has ended, since only then it is known what was computed
beside its collectives. What is remembered is bounded; totals go on.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from mirror_nb.errors import UsageError
from mirror_nb.telemetry import trace
from mirror_nb.telemetry.comparison import differing, odd
from mirror_nb.telemetry.lanes import lane, of_step
from mirror_nb.telemetry.ring import OVERALL, Reader
from mirror_nb.telemetry.samples import BLOCKING, DTYPE, ON_GPU, OVER, Kind, Mark, Operation, Samples, clock, joined
from mirror_nb.telemetry.snapshot import (
    UNKNOWN,
    Curve,
    Floats,
    Half,
    Integers,
    LaneSpan,
    ReplicaState,
    SizeClass,
    Snapshot,
    State,
    Waiting,
)
from mirror_nb.telemetry.tables import PARTS, SPANS, CollectiveTable, Cover, StepTable, exposed_parts, in_computing

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

STEPS = 8192
# That are remembered.
COLLECTIVES = 16_384
# Likewise: as many as a ring of the usual length can bring at once.
ALL_REDUCES = 2048
# The latest of them, of which times are told.
SAMPLES = 65_536
# Of each replica, 4 MB: what `samples` and `save` give.
RECENT = 50
# Steps over which means are taken.
LATE = 90
# Steps whose lateness is shown.
POINTS = 140
# Of a curve: more are not told apart on a screen.
CHECKS = 20
# Comparisons of parameters that are remembered.
BEHIND = 16
# Steps that a GPU may be behind for one to be shown.
KEPT_SPANS = 64
# Of each replica.
UNDECIDED_SECONDS = 1.0
# Samples that no step seems to end enter the tables after this long, so that work without steps is seen too.
_NS = 1e9
_NEVER = 1 << 62
_BEGUN, _ENDED, _COLLECTIVE, _MARK = map(int, (Kind.STEP_BEGUN, Kind.STEP_ENDED, Kind.COLLECTIVE, Kind.MARK))
_SCALAR, _MEMORY, _CHECKSUM, _GPU_STEP = map(int, (Kind.SCALAR, Kind.MEMORY, Kind.CHECKSUM, Kind.GPU_STEP))
_SPANS = [(int(kind), name) for kind, name in SPANS.items()]
# Looking members up in an enum would be a tenth of a frame's time.
_STATES = {
    Mark.RESTARTED: State.RUNNING,
    Mark.RUNNING: State.RUNNING,
    Mark.PAUSED: State.PAUSED,
    Mark.STOPPED: State.STOPPED,
}


@final
class _Track:
    """What was read of one replica."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.kept: deque[Samples] = deque()
        self.count = 0
        # Of the samples that are kept.
        self.pending: Samples = np.empty(0, DTYPE)
        self.names: tuple[str, ...] = ()
        self.marks: deque[tuple[int, Mark, int]] = deque(maxlen=1000)
        # When, which, amount.
        self.open: dict[int, tuple[int, int, int]] = {}
        # The collectives that it is in, by serial: step, operation, when it was ready.
        self.over = -1
        # The greatest serial of one that it has left.
        self.newest = 0
        # When its last sample was read to be from, nanoseconds.
        self.step = 0
        # The last that it ended.
        self.examples = 0
        self.memory = (0, 0, 0)
        # Allocated, reserved, peak.
        self.checksums: dict[int, dict[int, int]] = {}
        # By step, and by the number of the parameter's name; whole once OVERALL is among them.
        self.restarts = 0


@final
class Timeline:
    """The samples of all replicas, read from their rings without asking them.

    Takes one Reader a replica, by replica id; they stay the caller's. `update()` reads what is new. For one thread.

    Raises UsageError for no reader at all.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        if not readers:
            raise UsageError("`readers` is empty; a timeline needs the ring of at least one replica")
        self.num_replicas = len(readers)
        self._tracks = [_Track(reader) for reader in readers]
        self._steps = StepTable(self.num_replicas, STEPS)
        self._collectives = CollectiveTable(self.num_replicas, COLLECTIVES)
        self._scalars: dict[str, Floats] = {}
        # By name: (replicas, STEPS), NaN where nothing was logged at the step that the table has there.
        self._scalar_steps: dict[str, Integers] = {}
        self._spans: Integers = np.empty((4, 0), np.int64)
        # The latest spans of computing and blocking collectives: a collective may end after its step did. Whose they
        # are, when they began, when they ended, whether they blocked.
        self._idle: deque[tuple[int, int]] = deque(maxlen=1000)
        # When nobody asked the replicas for anything, nanoseconds: since, until.
        self.forgotten = 0
        # The last step that was left out.

    @property
    def last_step(self) -> int:
        """The last step that any replica has ended, as far as was read; 0 before the first."""
        return self._last()

    def forget(self) -> None:
        """Leave out what the replicas have written so far; names of scalars stay known."""
        for track in self._tracks:
            rows = track.reader.read()
            self.forgotten = max(self.forgotten, int(rows["step"][rows["kind"] == _ENDED].max(initial=0)))

    def idle(self, since: int, until: int) -> None:
        """Nobody asked the replicas for anything then, in nanoseconds of `samples.clock`: throughput leaves it out."""
        self._idle.append((since, until))

    def update(self, now: int | None = None) -> int:
        """Read what the replicas have written since the last call; return how many samples that was."""
        now = clock() if now is None else now
        # All replicas' at once, here and below: a call of numpy takes as long for eight of them as for one.
        news = [track.reader.read() for track in self._tracks]
        read = sum(map(len, news))
        if read:
            who, rows = _together(news)
            self._take(news, rows)
            for place in np.flatnonzero(rows["kind"] == _MARK).tolist():
                at, mark, amount = (int(rows[name][place]) for name in ("began", "code", "amount"))
                self._mark(self._tracks[who[place]], Mark(mark), at, amount)
            self._follow(who, rows)
            self._enter_values(who, rows)
        self._enter_steps([_settled(track, now) for track in self._tracks])
        self._compare()
        return read

    def samples(self, replica_id: int) -> Samples:
        """Return the remembered samples of a replica, oldest first: a structured array of `samples.DTYPE`."""
        kept = self._tracks[replica_id].kept
        return joined(kept) if kept else np.empty(0, DTYPE)

    def names(self, replica_id: int) -> tuple[str, ...]:
        """Return the names of a replica's scalars, by the numbers that its samples bear."""
        return self._tracks[replica_id].names

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the remembered steps as arrays.

        "step": (steps,). All others are (replicas, steps): "began", "ended", seconds of the machine's monotonic clock;
        "data", "forward", "backward", "exposed", "optimizer", "wait", "late", seconds; "examples", "collectives",
        "bytes"; and each scalar under its name, unless that is one of these. What is not known is NaN.
        """
        steps, places, there = self._steps.window(self._last(), STEPS)
        used = there.any(axis=0)
        steps, places, there = steps[used], places[used], there[:, used]
        counts = ("examples", "collectives", "bytes")
        found: dict[str, np.ndarray] = {"step": steps}
        timed = there & (self._steps["whole"][:, places] >= 0)
        for name in StepTable.COLUMNS:
            scale = 1.0 if name in counts else _NS
            known = timed if name in (*PARTS, "wait") else there
            found[name] = np.where(known, self._steps[name][:, places] / scale, np.nan)
        # Of a GPU's steps it is no difference of the two that are there.
        del found["whole"]
        return {name: self._scalar(name, steps, places) for name in self._scalars} | found

    def frame(self) -> pd.DataFrame:
        """Return `arrays()` as a pandas DataFrame, a row for each replica and step.

        Raises UsageError if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise UsageError("a DataFrame needs pandas: pip install pandas, or use arrays()") from error
        arrays = self.arrays()
        steps = arrays.pop("step")
        index = pd.MultiIndex.from_product([range(self.num_replicas), steps], names=["replica", "step"])
        return pd.DataFrame({name: values.ravel() for name, values in arrays.items()}, index=index)

    def save(self, path: str | Path) -> Path:
        """Write the remembered samples as a Chrome trace, which https://ui.perfetto.dev opens; return its path.

        A name that ends in ".gz" is compressed.
        """
        tracks = {r: (self.samples(r), self.names(r)) for r in range(self.num_replicas)}
        return trace.save(Path(path), tracks)

    def snapshot(
        self, steps: int = 240, now: int | None = None, half: Half | None = None, earlier: Snapshot | None = None
    ) -> Snapshot:
        """Return what the dashboard shows, its curves over the last `steps` steps.

        `half`: what is summed up anew, beside what is known at once; the rest is that of the `earlier` snapshot.
        """
        now = clock() if now is None else now
        done = self._done()
        _, places, there = self._steps.window(done, RECENT)
        means = self._means(places, there)
        step_seconds, throughput = self._by_the_clock(places[there.all(axis=0)])
        (planned_at, planned), (epoch_at, epoch) = self._latest(Mark.PLANNED), self._latest(Mark.EPOCH)
        if planned and done > planned:
            # That training is over; the one that goes on has told of no plan.
            planned, epoch = None, epoch if epoch_at > planned_at else None
        checked, odd_ones = self._checked()
        summed_up: dict[str, Any] = {}
        for each in Half:
            if earlier is not None and half is not None and half is not each:
                summed_up |= {name: getattr(earlier, name) for name in each.value}
            else:
                summed_up |= self._course(steps, means) if each is Half.COURSE else self._meetings(done)
        overwritten = sum(track.reader.overwritten for track in self._tracks)
        torn = sum(track.reader.torn for track in self._tracks)
        return Snapshot(
            num_replicas=self.num_replicas,
            replicas=tuple(self._replica(r, now, means) for r in range(self.num_replicas)),
            step=done,
            steps_planned=planned or None,
            seconds_left=(planned - done) * step_seconds if planned and step_seconds else None,
            epoch=epoch,
            examples=sum(track.examples for track in self._tracks),
            throughput=throughput,
            step_seconds=step_seconds,
            in_sync=None if odd_ones is None else not odd_ones,
            differing=odd_ones or {},
            checked_step=checked,
            overwritten=overwritten,
            torn=torn,
            **summed_up,
        )

    # Reading.

    def _take(self, news: Sequence[Samples], rows: Samples) -> None:
        """Remember what was read, by replica and together."""
        written, at = np.maximum(rows["began"], rows["ended"]), 0
        for track, its in zip(self._tracks, news, strict=True):
            if not len(its):
                continue
            track.names = track.reader.names()
            track.kept.append(its)
            track.count += len(its)
            while track.count - len(track.kept[0]) >= SAMPLES:
                track.count -= len(track.kept.popleft())
            track.pending = joined([track.pending, its]) if len(track.pending) else its
            track.newest = max(track.newest, int(written[at : at + len(its)].max()))
            at += len(its)

    def _mark(self, track: _Track, mark: Mark, at: int, amount: int) -> None:
        track.marks.append((at, mark, amount))
        if mark is Mark.RESTARTED:
            track.restarts += 1
            track.open.clear()

    def _follow(self, who: Integers, rows: Samples) -> None:
        """Keep up which collectives the replicas are in."""
        places = np.flatnonzero(rows["kind"] == _COLLECTIVE)
        replicas, serials = who[places], rows["serial"][places]
        open_yet = (rows["ended"][places] == 0) & ((rows["code"][places] & OVER) == 0)
        for place in np.flatnonzero((rows["kind"] == _MARK) & (rows["code"] == Mark.RESTARTED)).tolist():
            # What its earlier process was in; that is forgotten already where it was read before.
            open_yet &= (replicas != who[place]) | (places > place)
        # One number for a replica's collective, whatever the replica's generation counts from.
        keys = serials * self.num_replicas + replicas
        closed = keys[~open_yet]
        for place in places[open_yet & ~np.isin(keys, closed)].tolist():
            row = rows[place]
            about = int(row["step"]), int(row["code"]) & ~BLOCKING, int(row["queued"])
            self._tracks[who[place]].open[int(row["serial"])] = about
        for replica_id, track in enumerate(self._tracks):
            track.over = max(track.over, int(serials[(replicas == replica_id) & ~open_yet].max(initial=-1)))
            if track.open:
                # One that was ended from outside is never closed, but its step is done, anew, some time.
                ends = (rows["kind"] == _ENDED) & (who == replica_id)
                done = int(rows["step"][ends].max(initial=0))
                over = set(serials[(replicas == replica_id) & ~open_yet].tolist())
                track.open = {k: about for k, about in track.open.items() if k not in over and about[0] > done}

    def _enter_steps(self, parts: Sequence[Samples]) -> None:
        """Put samples of steps that have ended into the tables, one array a replica."""
        if not any(map(len, parts)):
            return
        who, rows = _without_abandoned(*_together(parts))
        table, kind, step = self._steps, rows["kind"], rows["step"]
        began, ended = rows["began"], rows["ended"]
        places, keep = table.place(who, step, kind == _BEGUN)
        over = np.flatnonzero(keep & (kind == _ENDED))
        for name, values in (("began", began), ("ended", ended), ("examples", rows["amount"])):
            table.put(name, places[over], values[over])
        table.put("whole", places[over], np.where(rows["code"][over] == ON_GPU, -1, ended[over] - began[over]))
        told = np.flatnonzero(keep & (kind == _GPU_STEP))
        table.put("whole", places[told], ended[told] - began[told])
        for r, its_step, examples in zip(*(at[over].tolist() for at in (who, step, rows["amount"])), strict=True):
            self._tracks[r].step = max(self._tracks[r].step, its_step)
            self._tracks[r].examples += examples
        blocks = (rows["code"] & BLOCKING) > 0
        done = np.flatnonzero((kind == _COLLECTIVE) & (ended > 0))
        timed = np.flatnonzero(in_computing(kind) | ((kind == _COLLECTIVE) & (ended > 0) & blocks))
        whole = ended > 0
        bounds = int(began[whole].min(initial=_NEVER)), int(ended[whole].max(initial=0))
        apart, compute, held_up = self._covers(np.stack([who, began, ended, blocks])[:, timed], *bounds)
        for span, name in _SPANS:
            its = np.flatnonzero(keep & (kind == span))
            since, until = began[its] + apart[who[its]], ended[its] + apart[who[its]]
            # A blocking collective inside of it is communication, not computing.
            table.add(name, places[its], until - since - held_up.within(since, until))
        collectives, whose = rows[done], who[done]
        since, until = began[done] + apart[whose], ended[done] + apart[whose]
        exposed = exposed_parts(since, until, blocks[done], compute)
        self._collectives.add(whose, collectives, exposed)
        places, keep = places[done], keep[done]
        counted = {"exposed": exposed, "collectives": np.ones_like(exposed), "bytes": collectives["amount"]}
        for name, amounts in counted.items():
            table.add(name, places[keep], amounts[keep])

    def _covers(self, spans: Integers, first: int, last: int) -> tuple[Integers, Cover, Cover]:
        """Return when replicas computed, and when a blocking collective held them up; these spans are entered.

        Each replica's times are moved by what is returned first, so that no two replicas' meet between `first` and
        `last`, the times that will be asked for.
        """
        spans = np.concatenate([self._spans, spans], axis=1)
        who, began, ended, blocks = spans
        length = int(ended.max(initial=last)) - int(began.min(initial=first)) + 1
        apart = length * np.arange(self.num_replicas)
        order = np.argsort(who, kind="stable")
        # How many of the same replica's follow.
        following = np.bincount(who, minlength=self.num_replicas).cumsum()[who[order]] - np.arange(len(who)) - 1
        self._spans = spans[:, order[following < KEPT_SPANS]]
        computing = blocks == 0
        since, until = began + apart[who], ended + apart[who]
        return apart, Cover(since[computing], until[computing]), Cover(since[~computing], until[~computing])

    def _enter_values(self, who: Integers, rows: Samples) -> None:
        kind = rows["kind"]
        places = np.flatnonzero((kind == _SCALAR) & (rows["step"] > 0))
        replicas, numbers = who[places], rows["number"][places]
        # Each replica numbers its names by itself, mostly as the others do. Not np.unique: there are few.
        for number in sorted(set(numbers.tolist())):
            its, named = numbers == number, defaultdict[str, list[int]](list)
            for replica_id in set(replicas[its].tolist()):
                for name in self._tracks[replica_id].names[number : number + 1]:
                    named[name].append(replica_id)
            for name, whose in named.items():
                chosen = places[its & np.isin(replicas, whose)]
                self._put_scalar(name, who[chosen], rows["step"][chosen], rows["value"][chosen])
        for place in np.flatnonzero(kind == _MEMORY).tolist():
            track, allocated = self._tracks[who[place]], int(rows["amount"][place])
            track.memory = (allocated, int(rows["queued"][place]), max(track.memory[2], allocated))
        for place in np.flatnonzero(kind == _CHECKSUM).tolist():
            step, number, checksum = (int(rows[name][place]) for name in ("step", "number", "amount"))
            checksums = self._tracks[who[place]].checksums
            checksums.setdefault(step, {})[number] = checksum
            while len(checksums) > CHECKS:
                del checksums[next(iter(checksums))]

    def _compare(self) -> None:
        """Find who came late to the collectives that all replicas have done by now, and who waited for them.

        A replica waited in a collective for what it took longer than the replica that was in it the shortest; it was
        held up by that only as far as nothing was computed meanwhile.
        """
        table = self._collectives
        places = table.news() if self.num_replicas > 1 else np.empty(0, np.intp)
        if not len(places):
            return
        queued, took = table["queued"][:, places], table["ended"][:, places] - table["began"][:, places]
        late = queued - queued.min(axis=0)
        waited = np.minimum(table["exposed"][:, places], took - took.min(axis=0))
        who = np.repeat(np.arange(self.num_replicas), len(places))
        columns, keep = self._steps.place(who, table["step"][:, places].ravel())
        self._steps.raise_to("late", columns[keep], late.ravel()[keep])
        self._steps.add("wait", columns[keep], waited.ravel()[keep])

    def _put_scalar(self, name: str, who: Integers, steps: Integers, values: Floats) -> None:
        if name not in self._scalars:
            self._scalars[name] = np.full((self.num_replicas, STEPS), np.nan)
            self._scalar_steps[name] = np.zeros((self.num_replicas, STEPS), np.int64)
        places = steps % STEPS
        self._scalars[name][who, places] = values
        self._scalar_steps[name][who, places] = steps

    # Summing up.

    def _last(self) -> int:
        """The last step that any replica has ended."""
        return max(track.step for track in self._tracks)

    def _done(self) -> int:
        """The last step that all replicas have ended."""
        return min(track.step for track in self._tracks)

    def _window(self, count: int) -> tuple[Integers, Integers, np.ndarray]:
        """The last steps, from the first that is known: those of earlier cells may be left out."""
        steps, places, there = self._steps.window(self._last(), count)
        first = int(there.any(axis=0).argmax()) if len(steps) else 0
        return steps[first:], places[first:], there[:, first:]

    def _course(self, steps: int, means: Mapping[str, Floats]) -> dict[str, Any]:
        steps_shown, places, there = self._window(steps)
        ends, throughputs = self._curve_of_throughput(steps_shown, places, there)
        breakdown = self._breakdown(means)
        known = breakdown[:, : len(PARTS) + 1]
        return {
            "steps": ends,
            "throughputs": throughputs,
            "curves": self._curves(steps_shown, places),
            "breakdown": breakdown,
            "waits": np.nan_to_num(means["wait"]),
            "exposed": known[:, PARTS.index("exposed")].sum() / known.sum() if known.sum() > 0 else None,
        }

    def _meetings(self, done: int) -> dict[str, Any]:
        steps, places, there = self._window(LATE)
        columns = self._steps.at(places, ("examples", "data", "wait", "late", "whole"))
        timed = there & (columns["whole"] >= 0)
        lane_step, lanes, hidden = self._lanes(done)
        return {
            "late_steps": steps,
            "lateness": np.where(there, columns["late"] / _NS, np.nan),
            "busy": np.where(timed, _busy(columns), np.nan),
            "data_waits": np.where(timed, columns["data"] / _NS, np.nan),
            "shares": np.where(there, columns["examples"], np.nan),
            "all_reduces": self._all_reduces(),
            "lane_step": lane_step,
            "lanes": lanes,
            "hidden": hidden,
        }

    def _means(self, places: Integers, there: np.ndarray) -> dict[str, Floats]:
        """By replica, over its steps at these places: seconds of each part and of the "whole" step; NaN without any.

        Also how many steps these are ("count"), and the sum of their "examples". Those that a GPU has yet to time are
        left out.
        """
        columns = self._steps.at(places)
        there = there & (columns["whole"] >= 0)
        count = there.sum(axis=1)
        names = ("whole", "wait", "examples", *PARTS)
        sums = np.where(there, np.stack([columns[name] for name in names]), 0).sum(axis=2)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = dict(zip(names, sums / count / _NS, strict=True))
        return means | {"examples": sums[names.index("examples")], "count": count}

    def _breakdown(self, means: Mapping[str, Floats]) -> Floats:
        parts = np.stack([means[name] for name in PARTS], axis=1)
        other = np.maximum(0.0, means["whole"] - parts.sum(axis=1))
        return np.nan_to_num(np.column_stack([parts, other]))

    def _by_the_clock(self, places: Integers) -> tuple[float | None, float | None]:
        """Seconds from step to step, and examples of all replicas a second, pauses left out.

        Counted from the end of the first of the steps; from its beginning if it is the only one. Each of them was
        ended by all replicas: a step that was begun and never ended, at the end of a dataset, is none.
        """
        if not len(places):
            return None, None
        ended = self._steps["ended"][:, places].max(axis=0)
        examples = self._steps["examples"][:, places].sum(axis=0)
        if len(places) == 1:
            began = int(self._steps["began"][:, places[0]].min())
            counted = 1
        else:
            began, counted, examples = int(ended[0]), len(places) - 1, examples[1:]
        seconds = (int(ended[-1]) - began - self._paused(began, int(ended[-1]))) / _NS
        return (seconds / counted, float(examples.sum()) / seconds) if seconds > 0 else (None, None)

    def _paused(self, began: int, ended: int) -> int:
        """Nanoseconds of this time in which replica 0 was paused, stopped, or not training."""
        since, total = None, sum(max(0, min(ended, upto) - max(began, start)) for start, upto in self._idle)
        for at, mark, _ in self._tracks[0].marks:
            if mark in (Mark.PAUSED, Mark.STOPPED):
                since = at if since is None else since
            elif mark is Mark.RUNNING and since is not None:
                total += max(0, min(at, ended) - max(since, began))
                since = None
        return total + (max(0, ended - max(since, began)) if since is not None else 0)

    def _curve_of_throughput(self, steps: Integers, places: Integers, there: np.ndarray) -> tuple[Integers, Floats]:
        columns = self._steps.at(places, ("examples", "data", "wait", "whole"))
        there = there & (columns["whole"] >= 0)
        examples = np.where(there, columns["examples"], 0).astype(float)
        busy = np.where(there, _busy(columns), 0.0)
        starts = _groups(len(steps))
        if not len(starts):
            return steps, examples
        examples, busy = (np.add.reduceat(values, starts, axis=1) for values in (examples, busy))
        with np.errstate(invalid="ignore", divide="ignore"):
            speeds = np.where((busy > 0) & (examples > 0), examples / busy, np.nan)
        return steps[np.append(starts[1:], len(steps)) - 1], speeds

    def _scalar(self, name: str, steps: Integers, places: Integers) -> Floats:
        return np.where(self._scalar_steps[name][:, places] == steps, self._scalars[name][:, places], np.nan)

    def _curves(self, steps: Integers, places: Integers) -> dict[str, Curve]:
        starts = _groups(len(steps))
        weights = self._steps["examples"][:, places].astype(float)
        weights[(self._steps.step[:, places] != steps) | (weights.sum(axis=0) == 0)] = 1.0
        return {name: _curve(self._scalar(name, steps, places), weights, starts) for name in self._scalars}

    def _all_reduces(self) -> tuple[SizeClass, ...]:
        table, n = self._collectives, self.num_replicas
        places = table.common()
        places = places[(table["operation"][0, places] == Operation.ALL_REDUCE) & (table["bytes"][0, places] > 0)]
        places = places[-ALL_REDUCES:]
        if n < 2 or not len(places):
            return ()
        size = table["bytes"][0, places]
        seconds = table.shortest(places) / _NS
        # In order, but for those that were done again.
        steps = table["step"][0, places]
        # Of the earliest step, some may be forgotten.
        whole = steps > steps[0] if steps[0] < steps[-1] else np.ones(len(steps), bool)
        num_steps = max(1, int(np.count_nonzero(steps[1:] != steps[:-1])))
        # Sizes within a factor of four are one class: 1 KB to 4 KB, 4 KB to 16 KB, …
        classes = np.floor(np.log2(size) / 2).astype(int)
        found = []
        for which in np.unique(classes):
            its, mean = seconds[classes == which], float(size[classes == which].mean())
            # What np.quantile gives, in a quarter of its time.
            p50, p95 = np.interp(
                [0.5 * (len(its) - 1), 0.95 * (len(its) - 1)], np.arange(len(its)), np.sort(its)
            ).tolist()
            bus = mean / p50 * 2 * (n - 1) / n if p50 > 0 else math.nan
            per_step = int((classes[whole] == which).sum()) / num_steps
            found.append(SizeClass(round(mean), len(its), per_step, p50, p95, bus, its[-512:]))
        return tuple(found)

    def _latest(self, wanted: Mark) -> tuple[int, int | None]:
        """When a mark was made last, and its amount; 0 and None if never."""
        found = ((at, amount) for track in self._tracks for at, mark, amount in track.marks if mark is wanted)
        return max(found, default=(0, None))

    def _checked(self) -> tuple[int | None, dict[str, tuple[int, ...]] | None]:
        """The last step after which all have told their checksums, and what differed: by name, on whom."""
        whole = ({step for step, sums in track.checksums.items() if OVERALL in sums} for track in self._tracks)
        step = max(set.intersection(*whole), default=None)
        if step is None:
            return None, None
        sums = [track.checksums[step] for track in self._tracks]
        if all(each[OVERALL] == sums[0][OVERALL] for each in sums):
            return step, {}
        named = [
            {track.names[number]: checksum for number, checksum in each.items() if number != OVERALL}
            for track, each in zip(self._tracks, sums, strict=True)
        ]
        return step, differing(named) or {UNKNOWN: odd([each[OVERALL] for each in sums])}

    def _replica(self, replica_id: int, now: int, means: Mapping[str, Floats]) -> ReplicaState:
        track = self._tracks[replica_id]
        whole, data, wait, examples, count = (
            float(means[name][replica_id]) for name in ("whole", "data", "wait", "examples", "count")
        )
        busy = whole - data - wait if count else None
        wrote = track.newest > 0
        states = [_STATES[mark] for _, mark, _ in track.marks if mark in _STATES]
        state = (states[-1] if states else State.RUNNING) if wrote else State.WAITING
        serial = min(track.open, default=None)
        waiting = None
        # Who died in one that another has left waits for nobody.
        if serial is not None and all(other.over < serial for other in self._tracks):
            _, operation, queued = track.open[serial]
            waiting = Waiting(serial, operation, max(0.0, (now - queued) / _NS))
        allocated, reserved, peak = track.memory if any(track.memory) else (None, None, None)
        return ReplicaState(
            replica_id=replica_id,
            state=state,
            step=track.step,
            silent=max(0.0, (now - track.newest) / _NS) if wrote else None,
            throughput=examples / (busy * count) if busy and busy > 0 and examples else None,
            step_seconds=whole if count else None,
            busy_seconds=busy,
            allocated=allocated,
            reserved=reserved,
            peak=peak,
            in_collective=waiting,
            restarts=track.restarts,
        )

    def _lanes(self, step: int) -> tuple[int | None, tuple[tuple[LaneSpan, ...], ...], float | None]:
        newest, found = step, [of_step(track.kept, step) for track in self._tracks]
        while not all(map(len, found)) and newest - BEHIND < step > 1:
            # A GPU tells later when it computed what.
            step -= 1
            found = [of_step(track.kept, step) for track in self._tracks]
        if not step or not all(len(rows) for rows in found):
            return None, tuple(() for _ in self._tracks), None
        origin = min(int(rows["began"].min()) for rows in found)
        lanes = tuple(lane(rows, origin) for rows in found)
        lengths = {"collective": 0.0, "exposed": 0.0}
        for span in (span for bars in lanes for span in bars if span.part in lengths):
            lengths[span.part] += span.ended - span.began
        total = sum(lengths.values())
        return step, lanes, lengths["collective"] / total if total else None


def _busy(columns: Mapping[str, Integers]) -> Floats:
    """Seconds of each step without the waits for data and for peers."""
    return (columns["whole"] - columns["data"] - columns["wait"]) / _NS


def _together(parts: Sequence[Samples]) -> tuple[Integers, Samples]:
    """Return all replicas' samples behind one another, and whose each is."""
    return np.repeat(np.arange(len(parts)), list(map(len, parts))), joined(parts)


def _settled(track: _Track, now: int) -> Samples:
    """Take from what is pending the samples up to the last step's end."""
    pending = track.pending
    if not len(pending):
        return pending
    ends = np.nonzero(pending["kind"] == _ENDED)[0]
    upto = int(ends[-1]) + 1 if len(ends) else 0
    silent = now - track.newest > UNDECIDED_SECONDS * _NS
    in_step = silent and (pending["kind"][upto:] == _BEGUN).any()
    if (silent and not in_step) or len(pending) - upto > track.reader.capacity:
        upto = len(pending)
    track.pending = pending[upto:]
    return pending[:upto]


def _without_abandoned(who: Integers, rows: Samples) -> tuple[Integers, Samples]:
    """Leave out what was done of a step before it was begun anew, as it is after a replica has died in it."""
    begun = np.flatnonzero(rows["kind"] == _BEGUN)
    whose, steps = who[begun], rows["step"][begun]
    if ((steps[1:] > steps[:-1]) | (whose[1:] != whose[:-1])).all():
        return who, rows
    keep = np.ones(len(rows), bool)
    for replica_id, step in set(zip(whose.tolist(), steps.tolist(), strict=True)):
        last = int(begun[(whose == replica_id) & (steps == step)][-1])
        keep[:last] &= (rows["step"][:last] != step) | (who[:last] != replica_id)
    return who[keep], rows[keep]


def _groups(length: int) -> Integers:
    """Where each of at most POINTS groups of equal length begins; the first may be shorter."""
    size = max(1, math.ceil(length / POINTS))
    starts = np.arange(length % size - size if length % size else 0, length, size)
    return np.maximum(starts, 0)


def _curve(values: Floats, weights: Floats, starts: Integers) -> Curve:
    known = np.isfinite(values)
    weights = np.where(known, weights, 0.0)
    if not len(starts):
        return Curve(np.empty(0), np.empty(0), np.empty(0), math.nan)
    total = np.where(known, values, 0.0) * weights
    at_step = np.flatnonzero(weights.sum(axis=0) > 0)
    last = float(total[:, at_step[-1]].sum() / weights[:, at_step[-1]].sum()) if len(at_step) else math.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(total.sum(axis=0), starts) / np.add.reduceat(weights.sum(axis=0), starts)
    low = np.minimum.reduceat(np.where(known, values, np.inf).min(axis=0), starts)
    high = np.maximum.reduceat(np.where(known, values, -np.inf).max(axis=0), starts)
    return Curve(mean, np.where(np.isfinite(low), low, np.nan), np.where(np.isfinite(high), high, np.nan), last)
