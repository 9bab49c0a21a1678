"""What replicas tell while they train, as data, and the history that the controller makes of it.

Records travel as displays of a MIME type of their own. Knows no terminal and no picture.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from IPython.display import publish_display_data

MIME = "application/vnd.mirror_nb.progress+json"
REPORT_SECONDS = 0.25
# At most four records a second of each replica: reading the losses waits for the device.


@dataclass(frozen=True, slots=True)
class Stepped:
    """Steps that a replica has done since its last record."""

    epoch: int
    # From 1.
    losses: tuple[float, ...]
    # Of each step: the mean over the replica's own examples; NaN where it had none.
    examples: tuple[int, ...]
    # Of each step: how many of its examples the replica had.
    seconds: float
    # What they took.
    until: float
    # When the last of them ended, in seconds on the machine's clock, which all replicas share.


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The test after an epoch."""

    epoch: int
    accuracy: float
    # Over all replicas, from 0 to 1.


@dataclass(frozen=True, slots=True)
class Predicted:
    """The classes that a replica found in the last test: for each global batch, those of its share."""

    shares: tuple[tuple[int, ...], ...]


Record = Stepped | Evaluated | Predicted
_KINDS: dict[str, type[Record]] = {kind.__name__: kind for kind in (Stepped, Evaluated, Predicted)}


def publish(record: Record) -> None:
    """Send a record from the cell that runs to whoever follows it."""
    publish_display_data({MIME: {"kind": type(record).__name__, **asdict(record)}})


def read(data: Mapping[str, Any]) -> Record | None:
    """Return the record in a display's data; None if it is another display."""
    if MIME not in data:
        return None
    values = dict(data[MIME])
    return _KINDS[values.pop("kind")](**values)


class Meter:
    """Counts one replica's steps and publishes them, a few times a second."""

    def __init__(self, publish: Callable[[Record], None]) -> None:
        self._publish = publish
        self._since = time.monotonic()
        self._epoch = 0
        self._losses: list[torch.Tensor] = []
        self._examples: list[int] = []

    def begin(self, epoch: int) -> None:
        """Steps of this epoch follow; the time since the last one counts for none."""
        self._epoch = epoch
        self._since = time.monotonic()

    def step(self, loss: torch.Tensor, examples: int) -> None:
        """One more step, with the loss of this replica's `examples`."""
        self._losses.append(loss.detach())
        self._examples.append(examples)
        if time.monotonic() - self._since > REPORT_SECONDS:
            self.end()

    def end(self) -> None:
        """Publish what has not been published."""
        if not self._losses:
            return
        losses = tuple(torch.stack(self._losses).tolist())
        # After the losses: on a GPU only their values tell that the steps have ended.
        now = time.monotonic()
        self._publish(Stepped(self._epoch, losses, tuple(self._examples), now - self._since, now))
        self._losses, self._examples, self._since = [], [], now


@dataclass(slots=True)
class History:
    """All records of one training."""

    num_replicas: int
    steps: dict[int, list[Stepped]] = field(default_factory=dict)
    # By replica id.
    evaluated: dict[int, list[Evaluated]] = field(default_factory=dict)
    predicted: dict[int, Predicted] = field(default_factory=dict)

    def take(self, replica_id: int, record: Record) -> None:
        """Add a replica's record."""
        match record:
            case Stepped():
                self.steps.setdefault(replica_id, []).append(record)
            case Evaluated():
                self.evaluated.setdefault(replica_id, []).append(record)
            case Predicted():
                self.predicted[replica_id] = record

    @property
    def steps_done(self) -> int:
        """Steps that every replica is known to have done."""
        return min(sum(len(some.losses) for some in self.steps.get(r, ())) for r in range(self.num_replicas))

    @property
    def began(self) -> float:
        """When the first step began, in seconds on the machine's clock."""
        return min(some[0].until - some[0].seconds for some in self.steps.values())

    @property
    def accuracy(self) -> float:
        """Of the last test, from 0 to 1; NaN before the first."""
        # Equal on all replicas.
        return self.evaluated[0][-1].accuracy if self.evaluated.get(0) else math.nan

    @property
    def epochs_done(self) -> int:
        """Epochs that every replica has done, their tests included."""
        return min(len(self.evaluated.get(r, ())) for r in range(self.num_replicas))

    def losses(self, replica_id: int) -> list[float]:
        """Return the loss of each step on the replica's own examples."""
        return [loss for some in self.steps.get(replica_id, ()) for loss in some.losses]

    def mean_losses(self) -> list[float]:
        """Return the loss of each step that every replica has done, over the whole global batch."""
        shares = [
            [pair for some in self.steps.get(r, ()) for pair in zip(some.losses, some.examples, strict=True)]
            for r in range(self.num_replicas)
        ]
        return [_weighted(step) for step in zip(*shares, strict=False)]

    def rate(self, replica_id: int) -> float:
        """Return the replica's examples a second, over the whole training without the tests."""
        return _rate(self.steps.get(replica_id, []))

    def rate_now(self, replica_id: int) -> float:
        """Return its examples a second in about the last second."""
        return _rate(self.steps.get(replica_id, [])[-4:])

    def predictions(self) -> list[int]:
        """Return the class found for each test image, in the order of the images; empty before the end."""
        if len(self.predicted) < self.num_replicas:
            return []
        # Replica i had the i-th part of each global batch.
        batches = zip(*(self.predicted[r].shares for r in range(self.num_replicas)), strict=True)
        return list(itertools.chain.from_iterable(itertools.chain.from_iterable(batches)))


def _weighted(step: tuple[tuple[float, int], ...]) -> float:
    total = sum(examples for _, examples in step)
    return sum(loss * examples for loss, examples in step if examples) / total


def _rate(steps: list[Stepped]) -> float:
    seconds = sum(some.seconds for some in steps)
    return sum(sum(some.examples) for some in steps) / seconds if seconds else math.nan
