"""What became of a request: each replica's answer or death, and what stands in the answers.

Knows messages, and opens what they carry for others; knows no process.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mirror_nb.devices import Device
from mirror_nb.messages import Done, Failure
from mirror_nb.pool import hangs
from mirror_nb.readable import size
from mirror_nb.transfer.opening import Arrivals, unpack


@dataclass(frozen=True, slots=True)
class Death:
    """A replica's process ended."""

    replica_id: int
    device: Device
    pid: int
    exit_code: int | None
    # Negative: the signal that killed it.
    by_us: bool = False
    # It would not stop and was killed by the pool.
    last_words: tuple[str, ...] = ()
    # Lines: what its C code wrote to stderr at the end, and the stack of a crash.
    short_of: int = 0
    # Bytes that processes here may use, where the system has ended some for want of memory.

    def __str__(self) -> str:
        return f"{self.who} {self.how()}"

    @property
    def who(self) -> str:
        """Which replica it was."""
        return f"replica {self.replica_id} ({self.device}, pid {self.pid})"

    def how(self, was: str = "was") -> str:
        """Return how it ended, to follow `who`; of several, what they were."""
        if self.by_us:
            return f"did not stop when asked and {was} ended"
        if self.exit_code is None:
            return "ended"
        if self.exit_code >= 0:
            return f"ended with exit code {self.exit_code}"
        try:
            name = signal.Signals(-self.exit_code).name
        except ValueError:
            name = f"signal {-self.exit_code}"
        short = f"the system was out of memory ({size(self.short_of)} for all processes here)"
        hint = {
            "SIGKILL": f": {short}" if self.short_of else ": kill -9, or the system was out of memory",
            "SIGSEGV": ": a crash in native code",
            "SIGABRT": ": native code gave up",
        }.get(name, "")
        return f"{was} killed by signal {-self.exit_code} ({name}){hint}"


def together(deaths: Iterable[Death]) -> list[str]:
    """Say who ended, in a sentence for each way: a machine without memory ends many of them alike."""
    return list(map(ended, alike(deaths)))


def alike(deaths: Iterable[Death]) -> list[list[Death]]:
    """Return the deaths of each way."""
    found: dict[str, list[Death]] = {}
    for death in deaths:
        found.setdefault(death.how(), []).append(death)
    return list(found.values())


def ended(deaths: Sequence[Death]) -> str:
    """Say who ended, all in one way."""
    *others, last = deaths
    return f"{', '.join(death.who for death in others)} and {last.who} {last.how('were')}" if others else str(last)


@dataclass(slots=True)
class Answer:
    """How one replica ended a request: with `done`, or by dying, or by dying after it was done."""

    done: Done | None
    slab: int | None = None
    death: Death | None = None

    @property
    def failure(self) -> Failure | None:
        """What it raised, if it did."""
        return self.done.failure if self.done is not None else None

    @property
    def clean(self) -> bool:
        """Whether it did what it was asked, and lives."""
        return self.death is None and self.failure is None

    def taken(self) -> int | None:
        """Return the slab, which is the caller's from now on."""
        slab, self.slab = self.slab, None
        return slab

    def close(self) -> None:
        """Close the slab if nobody has taken it."""
        slab = self.taken()
        if slab is not None:
            os.close(slab)


@dataclass(slots=True)
class Report:
    """How a request ended on all the replicas it went to."""

    answers: dict[int, Answer]
    interrupted: bool
    # The user asked for the end.
    timed_out: bool
    standings: dict[int, hangs.Found] = field(default_factory=dict)
    # Where they were, those that were asked: by replica id.
    uneven: bool = False
    # Some waited in a collective for others that had come to the end without it.

    @property
    def failures(self) -> dict[int, Failure]:
        """What was raised, by replica id."""
        return {r: a.failure for r, a in self.answers.items() if a.failure is not None}

    @property
    def deaths(self) -> list[Death]:
        """Replicas that ended meanwhile."""
        return [a.death for a in self.answers.values() if a.death is not None]

    @property
    def crashes(self) -> list[Death]:
        """Replicas that ended meanwhile and had not said that they would: of a lost GPU the failure tells."""
        failures = self.failures
        return [d for d in self.deaths if d.replica_id not in failures or not failures[d.replica_id].gpu_lost]

    @property
    def handled(self) -> bool:
        """Whether the user's code caught the interrupt on a replica."""
        return any(answer.done is not None and answer.done.interrupted for answer in self.answers.values())

    def unpacked(self, resolve: Callable[[Any], object] | None = None) -> dict[int, tuple[Any, Arrivals]]:
        """Rebuild what the replicas answered, as `unpack` does, by replica id; what is left then is closed."""
        try:
            return {
                replica_id: unpack(answer.done.payload, answer.taken(), resolve=resolve)
                for replica_id, answer in self.answers.items()
                if answer.done is not None and answer.done.payload is not None
            }
        finally:
            self.close()

    def close(self) -> None:
        """Close the slabs that nobody has taken: of what could not be opened, or need not be."""
        for answer in self.answers.values():
            answer.close()

    def mixed_files(self) -> list[str]:
        """Return the files that more than one replica has opened to write."""
        opened = [path for answer in self.answers.values() if answer.done is not None for path in answer.done.files]
        return [path for path, count in Counter(opened).items() if count > 1] if opened else []

    def undivided_loaders(self) -> list[str]:
        """Return the names of loaders that every replica has trained on as a whole; of one without, an empty one."""
        told = [set(answer.done.undivided) for answer in self.answers.values() if answer.done is not None]
        return sorted({name for name, _ in set.intersection(*told)}) if len(told) > 1 else []

    @property
    def clean(self) -> bool:
        """Whether every replica did what it was asked."""
        return all(answer.clean for answer in self.answers.values())


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One line of `%mirror status`."""

    replica_id: int
    device: Device
    pid: int
    memory_bytes: int | None
    # Resident, with what it shares; None where it cannot be read.
    state: str
    # "ready" or "dead".
    how: str = ""
    # It died: a sentence.


Incoming = tuple[int, Any, int | None]
# Replica id, message or Death, slab.
