"""What can be picked, what was picked, and the line of code that does the same. Knows no widgets and no replicas."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """Cross-device ops that fit the picked devices."""

    name: str
    times: tuple[tuple[int, float], ...] = ()
    # What an all-reduce took when it was last measured: bytes, seconds. Empty: not measured here.


@final
@dataclass(frozen=True, slots=True)
class Offers:
    """What there is to pick beside devices. Where nothing is offered, nothing is shown: the default holds."""

    operations: tuple[Operation, ...] = ()
    # The default first.
    bucket_sizes: tuple[int, ...] = ()
    # Bytes; the default first.
    compressions: tuple[str, ...] = ()
    # As `%mirror start --compression` takes them; the default first.
    measurable: bool = False
    # Whether `measure` works.


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """What was picked; None is the default."""

    devices: tuple[str, ...]
    operation: str | None = None
    bucket_size: int | None = None
    # Bytes.
    compression: str | None = None
    # Of gradients on their way. What a network computes in is its own lines' affair: `torch.autocast`, or `precision`
    # of `compile`.

    def arguments(self) -> str:
        """Return the options of `%mirror start` that say the same."""
        said = [f"--devices {','.join(self.devices)}"]
        if self.operation is not None:
            said.append(f"--ops {self.operation}")
        if self.bucket_size is not None:
            said.append(f"--bucket-mb {self.bucket_size / 2**20:g}")
        if self.compression is not None:
            said.append(f"--compression {self.compression}")
        return " ".join(said)

    def line(self, running: bool = False) -> str:
        """Return the line of a notebook that does the same as Start or, while replicas are `running`, as Restart."""
        return f"%mirror {'restart' if running else 'start'} {self.arguments()}"


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """Which replicas run at the moment."""

    devices: tuple[str, ...] = ()
    # For each replica; empty: none run.
    pids: tuple[int, ...] = ()
    # Their processes.


class Driven(abc.ABC):
    """What the picker drives: the session of a notebook. Called in the kernel's main thread only."""

    @abc.abstractmethod
    def gpus(self) -> int:
        """Return how many GPUs are visible."""

    @abc.abstractmethod
    def standing(self) -> Standing:
        """Return which replicas run."""

    @abc.abstractmethod
    def offers(self, devices: Sequence[str]) -> Offers:
        """Return what can be picked for these devices."""

    @abc.abstractmethod
    def start(self, choice: Choice) -> str:
        """Start replicas, and return a line that says so. Raises MirrorError for what cannot be."""

    @abc.abstractmethod
    def restart(self, choice: Choice) -> str:
        """Stop the replicas and start others, and return a line that says so. Raises MirrorError likewise."""

    @abc.abstractmethod
    def stop(self) -> str:
        """Stop the replicas, and return a line that says so."""

    @abc.abstractmethod
    def measure(self, choice: Choice) -> str:
        """Measure the all-reduces that fit, and return a line that says so; `offers` has the times from then on."""
