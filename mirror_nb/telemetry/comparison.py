"""Whether the replicas' parameters are equal, by their checksums. Knows not how these are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

SHOWN = 5
# Parameters that are named in a sentence.


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing the parameters of all replicas gave: true where all are equal."""

    num_replicas: int
    parameters: int
    # How many were compared: those that the replicas have synchronised so far.
    differing: Mapping[str, tuple[int, ...]]
    # By name, the replicas whose values are not those that most have.

    def __bool__(self) -> bool:
        return not self.differing

    def __repr__(self) -> str:
        if not self.parameters:
            left = "those in DistributedDataParallel are left to it"
            return f"no parameters to compare: none were synchronised yet ({left})"
        many = f"{self.parameters} parameter{'s' if self.parameters > 1 else ''}"
        if not self.differing:
            return f"{many} in sync on {self.num_replicas} replicas"
        each = [f"{name} on r{', r'.join(map(str, ids))}" for name, ids in self.differing.items()]
        more = f" and {len(each) - SHOWN} more" if len(each) > SHOWN else ""
        return f"{len(each)} of {many} differ: {', '.join(each[:SHOWN])}{more}"


def compared(sums: Sequence[Mapping[str, int]]) -> Comparison:
    """Compare checksums by name, one mapping a replica, in the order of their ids.

    One that has none yet has taken the place of another: there is nothing to compare until it has synchronised, too.
    """
    if not all(sums):
        return Comparison(len(sums), 0, {})
    return Comparison(len(sums), max(map(len, sums)), differing(sums))


def differing(sums: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, ...]]:
    """Return the names whose checksums are not the same on all replicas, and on whom they are the odd ones."""
    names = {name: None for each in sums for name in each}
    return {name: ids for name in names if (ids := odd([each.get(name) for each in sums]))}


def odd(values: Sequence[int | None]) -> tuple[int, ...]:
    """Return who does not have the value that most have; of two that as many have, the first one's counts."""
    usual = max(values, key=values.count)
    return tuple(r for r, value in enumerate(values) if value != usual)
