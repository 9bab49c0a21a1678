"""Advice below a cell that has trained, each piece once: from what its replicas recorded, and from a short trial.

Knows a pool and what its replicas have recorded; knows no shell, and does not show anything.
"""

from __future__ import annotations

from typing import final

from mirror_nb import advice
from mirror_nb.collectives.base import BYTES_PER_PACK
from mirror_nb.collectives.options import CommunicationOptions
from mirror_nb.fused import STEPS
from mirror_nb.messages import TryFused
from mirror_nb.pool.base import Pool
from mirror_nb.pool.failures import settle
from mirror_nb.telemetry.findings import ENOUGH, slow_replica, small_buckets
from mirror_nb.telemetry.snapshot import BREAKDOWN, Snapshot

LEAST_SECONDS = 2.0
# Of training in a cell of which something is said: what is over sooner need not be faster, and a trial would be felt.
_WORTH_A_TRIAL = 0.05
# Part of a step that the optimizer takes.
_TRIAL = 0.05
# Part of the time of the training that a trial may take, at most.


@final
class CellAdvice:
    """What has been said to this notebook."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        # By what is advised.
        self._step = 0
        # The last one that a cell was judged by.

    def after_cell(self, pool: Pool, options: CommunicationOptions) -> list[str]:
        """Return what there is to say of the cell that has ended on all of these replicas, and of no earlier one.

        Nothing on GPUs, where other things count. Raises KeyboardInterrupt.
        """
        timeline = pool.timeline() if pool.size > 1 and pool.devices[0].kind == "cpu" else None
        if timeline is None:
            return []
        timeline.update()
        snapshot = timeline.snapshot(steps=1)
        # Other replicas count from the beginning.
        steps, self._step = snapshot.step - min(self._step, snapshot.step), snapshot.step
        step_ms = float(snapshot.breakdown.sum(axis=1).mean()) * 1e3
        if steps < ENOUGH or steps * step_ms < LEAST_SECONDS * 1e3:
            return []
        said = {
            "one process": _one_process(snapshot, step_ms),
            "buckets": _buckets(snapshot, options),
            "fused": self._fused(pool, snapshot, step_ms, steps),
        }
        new = {about: text for about, text in said.items() if text is not None and about not in self._said}
        self._said.update(new)
        return list(new.values())

    def _fused(self, pool: Pool, snapshot: Snapshot, step_ms: float, steps: int) -> str | None:
        optimizer_ms = _part(snapshot, "optimizer")
        too_long = STEPS * optimizer_ms > _TRIAL * steps * step_ms
        if optimizer_ms < _WORTH_A_TRIAL * step_ms or too_long or "fused" in self._said:
            return None
        report = pool.run(dict.fromkeys(range(pool.size), TryFused()))
        if report.deaths:
            # The next cell tells of them.
            return None
        settle(report, pool.devices)
        tried = [times for times, _ in report.unpacked().values()]
        if None in tried:
            return None
        # A step is over when it is over everywhere.
        (name, *_), plain, fused = tried[0], max(times[1] for times in tried), max(times[2] for times in tried)
        return advice.could_be_fused(name, plain, fused, step_ms)


def _one_process(snapshot: Snapshot, step_ms: float) -> str | None:
    if slow_replica(snapshot) is not None:
        # The others wait for it, not for communication.
        return None
    return advice.mostly_communication(_part(snapshot, "exposed"), step_ms, "%mirror bench --model NAME --shape ...")


def _buckets(snapshot: Snapshot, options: CommunicationOptions) -> str | None:
    found = small_buckets(snapshot) if options.bytes_per_pack < BYTES_PER_PACK else None
    usual = f"%mirror restart --bucket-mb {BYTES_PER_PACK / 2**20:g}"
    return None if found is None else f"{found.title}, {found.detail} ({usual})"


def _part(snapshot: Snapshot, name: str) -> float:
    """Return the ms of a step that a part of it takes, the mean of the replicas."""
    return float(snapshot.breakdown[:, BREAKDOWN.index(name)].mean()) * 1e3
