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
    # How many were compared: those that the replicas have synchronised, and others of networks that all of them hold.
    differing: Mapping[str, tuple[int, ...]]
    # By name, the replicas whose values are not those that most have.

    def __bool__(self) -> bool:
        return not self.differing

    def __repr__(self) -> str:
        if self.num_replicas == 1:
            return "one replica: nothing to compare"
        if not self.parameters:
            return "no parameters to compare: none were synchronised yet, and no network is held by all replicas"
        many = f"{self.parameters} parameter{'s' if self.parameters > 1 else ''}"
        if not self.differing:
            return f"{many} in sync on {self.num_replicas} replicas"
        each = [f"{name} on r{', r'.join(map(str, ids))}" for name, ids in self.differing.items()]
        more = f" and {len(each) - SHOWN} more" if len(each) > SHOWN else ""
        return f"{len(each)} of {many} differ: {', '.join(each[:SHOWN])}{more}"


def compared(sums: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]) -> Comparison:
    """Compare checksums by name, of each replica those of what is synchronised and of what else its networks have.

    In the order of their ids. What is not synchronised may be some replicas' own; so is all where one has synchronised
    nothing yet, since it has taken the place of another.
    """
    several = all(synchronized for synchronized, _ in sums)
    whole = [{**others, **synchronized} for synchronized, others in sums]
    everywhere = set.intersection(*map(set, whole))
    wanted = {name for synchronized, _ in sums for name in synchronized if several} | everywhere
    each = [{name: value for name, value in one.items() if name in wanted} for one in whole]
    return Comparison(len(sums), len(wanted), differing(each))


def differing(sums: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, ...]]:
    """Return the names whose checksums are not the same on all replicas, and on whom they are the odd ones."""
    names = {name: None for each in sums for name in each}
    return {name: ids for name in names if (ids := odd([each.get(name) for each in sums]))}


@final
class Parted:
    """What differed when it was last compared: of what is compared time and again, each is told once."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def note(self, sums: Sequence[Mapping[tuple[str, str], int]]) -> list[tuple[str, str]]:
        """Return the names whose checksums differ now, and did not before; each replica tells those that it has."""
        names = sorted({name for each in sums for name in each})
        values = {name: {each[name] for each in sums if name in each} for name in names}
        found = [name for name in names if len(values[name]) > 1]
        new = [name for name in found if name not in self._known]
        self._known = self._known.difference(names).union(found)
        return new


def odd(values: Sequence[int | None]) -> tuple[int, ...]:
    """Return who does not have the value that most have; of two that as many have, the first one's counts."""
    usual = max(values, key=values.count)
    return tuple(r for r, value in enumerate(values) if value != usual)
