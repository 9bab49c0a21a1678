"""One backward pass on its way, and what each replica tells the others at its end.

Knows plans and buckets. Knows no hooks and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from mirror_nb.collectives.handles import Reduction
from mirror_nb.gradients.buckets import Plan
from mirror_nb.gradients.tracked import Tracked
from mirror_nb.steps.steering import QUIET


@final
@dataclass(slots=True, eq=False)
class Round:
    """One backward pass on its way."""

    plan: Plan
    owner: Callable[[], object | None]
    # Gone when autograd has let go of this pass.
    touched: list[int] = field(default_factory=list)
    unknown: list[Tracked] = field(default_factory=list)
    works: list[Reduction | Any] = field(default_factory=list)
    unproven: list[Tensor] = field(default_factory=list)
    # What ops reduced that may be no exact sum.
    given: Tensor | None = None
    # What the first of them was before, where it is not known that the op leaves the mean.
    launched: int = 0
    given_up: bool = False
    lacking: list[int] = field(init=False)
    # Gradients that each bucket waits for.

    def __post_init__(self) -> None:
        self.lacking = [len(bucket.numbers) for bucket in self.plan.buckets]

    def has_launched(self, number: int) -> bool:
        bucket = self.plan.bucket_of.get(number)
        return bucket is not None and bucket < self.launched

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


@final
@dataclass(frozen=True, slots=True)
class Tail:
    """What each replica tells the others at the end of a round: a float a fact, not zero if it is so somewhere."""

    used: frozenset[int]
    unknown: float
    given_up: list[float]
    steering: list[float]

    @staticmethod
    def length(agreed: int, num_replicas: int) -> int:
        return agreed + 1 + num_replicas + len(QUIET)

    def numbers(self, agreed: int) -> list[float]:
        flags = [0.0] * agreed
        for number in self.used:
            flags[number] = 1.0
        return [*flags, float(self.unknown), *self.given_up, *self.steering]

    @staticmethod
    def read(sums: list[float], agreed: int) -> Tail:
        used = frozenset(number for number in range(agreed) if sums[number])
        return Tail(used, sums[agreed], sums[agreed + 1 : -len(QUIET)], sums[-len(QUIET) :])
