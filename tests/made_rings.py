"""Rings of a training that never was: replicas with a clock of their own making, for tests and for screenshots.

Nothing sleeps: `step()` writes what n replicas would have written, and moves the made clock on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from mirror_nb.telemetry.machine import Reading
from mirror_nb.telemetry.ring import CAPACITY, Reader, Ring, Writer
from mirror_nb.telemetry.samples import Kind, Mark, Operation
from mirror_nb.telemetry.timeline import Timeline

KB, MB = 1024, 1024 * 1024
MS = 1_000_000
# Nanoseconds.


def readings(num_replicas: int, hot: int | None = None, seconds: int = 30) -> tuple[Reading, ...]:
    """Return one reading a second of each replica's made GPU; the one of the replica `hot` lowers its clock."""
    random = np.random.default_rng(1)
    found = []
    for second in range(seconds):
        for r in range(num_replicas):
            slowed = r == hot and second > seconds // 3
            cool = Reading(
                device=f"cuda:{r}",
                name="NVIDIA H100 80GB HBM3",
                at=second * 1_000_000_000,
                utilisation=0.98,
                memory_used=int((61 + 0.1 * r) * 2**30),
                memory_total=80 * 2**30,
                temperature=66.0 + r % 3,
                power=640.0 + r,
                power_limit=700.0,
                clock_rate=1950.0 + float(random.normal(0, 12)),
                clock_limit=1980.0,
                slowed=(),
            )
            rate = 1950.0 - 20 * (second - seconds // 3)
            reasons = ("too hot (software)",)
            warm = dataclasses.replace(
                cool, utilisation=0.84, temperature=83.0, power=498.0, clock_rate=rate, slowed=reasons
            )
            found.append(warm if slowed else cool)
    return tuple(found)


class MadeRings:
    """n replicas that train in step; what is public may be changed between steps."""

    def __init__(
        self,
        num_replicas: int = 4,
        *,
        examples: int = 64,
        data: float = 1.0,
        forward: float = 20.0,
        backward: float = 40.0,
        optimizer: float = 3.0,
        buckets: Sequence[int] = (25 * MB, 25 * MB, 25 * MB, 4 * MB),
        bandwidth: float = 20e9,
        latency: float = 0.02,
        jitter: float = 0.01,
        overlap: bool = True,
        blocking: bool = False,
        capacity: int = CAPACITY,
        begin: int = 1_000_000_000_000,
        seed: int = 0,
    ) -> None:
        self.num_replicas = num_replicas
        self.examples = [examples] * num_replicas
        self.data = [data] * num_replicas
        # Milliseconds of waiting for a batch, by replica.
        self.forward, self.backward, self.optimizer = forward, backward, optimizer
        # Milliseconds.
        self.slowness = [1.0] * num_replicas
        # Times of forward and backward, by replica.
        self.buckets = list(buckets)
        # Bytes of each, in the order in which they become ready.
        self.bandwidth = bandwidth
        # Bytes a second on the bus, as nccl-tests count it.
        self.latency = latency
        # Milliseconds of each collective, whatever its size.
        self.jitter = jitter
        # Of all spans, one standard deviation.
        self.overlap = overlap
        # Whether collectives run beside the backward pass, else after it.
        self.blocking = blocking
        # Whether they are told to have run where the replica computes.
        self.steps = 0
        self.serial = 0
        self.now = begin
        # The made clock, nanoseconds.
        self.lateness: list[list[float]] = []
        # Of each step, by replica: milliseconds behind the first at the worst bucket.
        self._random = np.random.default_rng(seed)
        self.rings = [Ring.create(capacity) for _ in range(num_replicas)]
        self.writers = [Writer(ring.descriptor) for ring in self.rings]
        self.readers = [Reader(ring.descriptor) for ring in self.rings]
        self.timeline = Timeline(self.readers)

    def step(self, count: int = 1) -> None:
        """Train so many steps, all replicas."""
        for _ in range(count):
            self._step()

    def mark(self, mark: Mark, amount: int = 0) -> None:
        """Mark this moment on all replicas."""
        for writer in self.writers:
            writer.mark(mark, self.steps, amount, at=self.now)

    def pause(self, seconds: float) -> None:
        """Stand still for so long, on purpose."""
        self.mark(Mark.PAUSED)
        self.now += int(seconds * 1e9)
        self.mark(Mark.RUNNING)

    def stall(self, replica_id: int, seconds: float) -> None:
        """One replica begins a step and is not heard of again; the others wait for it in their first bucket."""
        for r, writer in enumerate(self.writers):
            writer.step_begun(self.steps + 1, self.now)
            if r != replica_id:
                ready = self.now + int(self.forward * MS)
                writer.collective(
                    Operation.ALL_REDUCE, self.steps + 1, 0, self.buckets[0], self.serial, ready, ready, 0
                )
        self.now += int(self.forward * MS) + int(seconds * 1e9)

    def die(self, replica_id: int, seconds: float) -> None:
        """One replica dies in a step; after so long another process takes its ring, and the step is done anew."""
        self.stall(replica_id, seconds)
        self.writers[replica_id].close()
        self.writers[replica_id] = Writer(self.rings[replica_id].descriptor)
        self.serial += 1
        # The generation's collectives are new ones.

    def log(self, name: str, values: Sequence[float]) -> None:
        """Log one value a replica for the last step."""
        for writer, value in zip(self.writers, values, strict=True):
            writer.scalar(name, value, self.steps, at=self.now)

    def log_loss(self) -> None:
        """Log a loss that falls as losses do."""
        mean = 2.35 * math.exp(-self.steps / 70) + 0.38
        self.log("loss", [mean * (1 + float(self._random.normal(0, 0.03))) for _ in self.writers])

    def log_memory(self, used: int) -> None:
        """Log memory in use on all replicas, and a fifth more that is held."""
        for writer in self.writers:
            writer.memory(self.steps, used, used + used // 5, at=self.now)

    def log_checksums(self, checksums: Sequence[int], others: int = 1) -> None:
        """Log a checksum of each replica's parameter `weight`, and of so many others that are equal."""
        for writer, checksum in zip(self.writers, checksums, strict=True):
            equal = {f"layer{i}.bias": 5 + i for i in range(others)}
            writer.checksums(self.steps, {"weight": checksum, **equal}, at=self.now)

    def close(self) -> None:
        """Give the memory back."""
        for part in (*self.writers, *self.readers, *self.rings):
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _step(self) -> None:
        self.steps += 1
        n, began = self.num_replicas, self.now
        got = [began + self._length(self.data[r]) for r in range(n)]
        went = [got[r] + self._length(self.forward * self.slowness[r]) for r in range(n)]
        ready = [went[r] + self._length(self.backward * self.slowness[r]) for r in range(n)]
        for r, writer in enumerate(self.writers):
            writer.step_begun(self.steps, began)
            writer.span(Kind.DATA, self.steps, began, got[r])
            writer.span(Kind.FORWARD, self.steps, got[r], went[r])
        reduced = self._reduce(went, ready) if n > 1 else ready
        for r, writer in enumerate(self.writers):
            writer.span(Kind.BACKWARD, self.steps, went[r], ready[r])
            starts = max(ready[r], reduced[r])
            ends = starts + self._length(self.optimizer)
            writer.span(Kind.OPTIMIZER, self.steps, starts, ends)
            writer.step_ended(self.steps, self.examples[r], began, ends)
            self.now = max(self.now, ends)

    def _reduce(self, went: list[int], ready: list[int]) -> list[int]:
        free = [0] * self.num_replicas
        worst = [0.0] * self.num_replicas
        for bucket, size in enumerate(self.buckets):
            part = (bucket + 1) / len(self.buckets) if self.overlap else 1.0
            arrived = [a + int((b - a) * part) for a, b in zip(went, ready, strict=True)]
            began = [max(pair) for pair in zip(arrived, free, strict=True)]
            n = self.num_replicas
            took = self._length(self.latency + size * 2 * (n - 1) / n / self.bandwidth * 1e3)
            free = [max(began) + took] * n
            for r, writer in enumerate(self.writers):
                its = (Operation.ALL_REDUCE, self.steps, bucket, size, self.serial, arrived[r])
                # When a replica comes to it, and when it is over, as a Recorder does.
                writer.collective(*its, 0, 0, self.blocking)
                writer.collective(*its, began[r], free[r], self.blocking)
                worst[r] = max(worst[r], (arrived[r] - min(arrived)) / MS)
            self.serial += 1
        self.lateness.append(worst)
        return free

    def _length(self, milliseconds: float) -> int:
        return int(milliseconds * MS * max(0.1, 1 + float(self._random.normal(0, self.jitter))))
