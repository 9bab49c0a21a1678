"""Cross-device ops timed against each other on the replicas that they are bound to, and checked.

Knows ops and tensors; knows nothing of gradients, tables or files. Every replica runs the same trial, and all of them
end with the same numbers. A collective begins when the last replica comes to it, and is over when it is over
everywhere: replicas of one machine have one clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps, Member
from mirror_nb.values import ReduceOp

_TILE = 65_537
# Prime, so that what lands in the wrong place differs: tensors are cut by powers of two.
_WARM_UP = 2
_LEAST, _MOST = 5, 200
# Rounds that count.


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """How long one op took, and whether it was right."""

    microseconds: tuple[float, ...]
    # Of each round, from when the last replica began it until the last one had the sum.
    correct: bool
    # In all rounds, on all replicas.

    def quantile(self, q: float) -> float:
        """Return the time that a part `q` of the rounds took at most, µs."""
        return float(torch.tensor(self.microseconds, dtype=torch.float64, device="cpu").quantile(q))

    @property
    def spread(self) -> float:
        """How far the middle half of the rounds is apart, µs."""
        return self.quantile(0.75) - self.quantile(0.25)


def compare(ops: Mapping[str, CrossDeviceOps], numel: int, *, seconds: float) -> dict[str, Trial]:
    """Time the sum of `numel` fp32 by each of `ops`, which take turns; every replica makes the same call.

    The tensor is filled anew each time, with numbers that no round before had, and lies where gradient buckets lie: an
    op that is repeated on the same numbers measures the caches. About `seconds` are spent, and between 5 and 200
    rounds. Raises what the ops raise.
    """
    first = next(iter(ops.values()))
    member = first.member
    flat = first.allocate(numel, torch.float32)
    course = _Course(member, flat)
    try:
        with first.limited():
            for _ in range(_WARM_UP):
                begun = time.perf_counter()
                for name in ops:
                    course.run(ops[name])
                took = time.perf_counter() - begun
            took = float(_worst(member, torch.tensor([took], dtype=torch.float64, device="cpu")))
            rounds = max(_LEAST, min(_MOST, int(seconds / max(took, 1e-6))))
            found = torch.tensor(
                [[course.run(ops[name]) for name in ops] for _ in range(rounds)], dtype=torch.float64, device="cpu"
            )
            worst = _worst(member, found.reshape(-1))
    finally:
        first.release(flat)
    # Of all replicas the last to begin, the last to end, and whether any was wrong.
    begun_at, ended_at, wrong = worst.view(rounds, len(ops), 3).unbind(2)
    taken = (ended_at - begun_at) / 1000
    return {name: Trial(tuple(taken[:, i].tolist()), not bool(wrong[:, i].any())) for i, name in enumerate(ops)}


@final
class _Course:
    """One tensor, and what each replica puts into it in each round."""

    def __init__(self, member: Member, flat: Tensor) -> None:
        self._member = member
        self._flat = flat
        self._dice = torch.Generator().manual_seed(flat.numel())
        # The same on every replica, so that each knows what all of them bring.
        size = min(_TILE, max(flat.numel(), 1))
        tiles = torch.randn(member.num_replicas, size, generator=self._dice, device="cpu")
        self._tiles = tiles.to(flat.device, flat.dtype)

    def run(self, ops: CrossDeviceOps) -> tuple[float, float, float]:
        """Fill, reduce, check; return when it began and ended here, ns, and 1 if its result was wrong."""
        member, flat = self._member, self._flat
        scale, *offsets = (torch.rand(1 + member.num_replicas, generator=self._dice, device="cpu") + 0.5).tolist()
        parts = [tile * scale + offset for tile, offset in zip(self._tiles, offsets, strict=True)]
        _fill(flat, parts[member.replica_id])
        _settle(member)
        begun = time.perf_counter_ns()
        ops.all_reduce(ReduceOp.SUM, flat).wait()
        if flat.device.type != "cpu":
            torch.cuda.synchronize(flat.device)
        ended = time.perf_counter_ns()
        total = torch.stack(parts).sum(0, dtype=torch.float64).to(flat.dtype)
        return begun, ended, float(not _holds(flat, total, member.num_replicas))


def _pieces(flat: Tensor, tile: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The part of `flat` that whole tiles cover, as rows; the rest, and what covers it."""
    rows = flat.numel() // tile.numel()
    whole = rows * tile.numel()
    return flat[:whole].view(rows, tile.numel()), flat[whole:], tile[: flat.numel() - whole]


def _fill(flat: Tensor, tile: Tensor) -> None:
    if flat.numel():
        rows, rest, covering = _pieces(flat, tile)
        rows.copy_(tile.expand_as(rows))
        rest.copy_(covering)


def _holds(flat: Tensor, tile: Tensor, num_replicas: int) -> bool:
    """Whether `flat` is the sum, to the rounding of its dtype; what it held is gone then."""
    if not flat.numel():
        return True
    allowed = torch.finfo(flat.dtype).eps * 4 * num_replicas * float(tile.abs().max() + num_replicas)
    rows, rest, covering = _pieces(flat, tile)
    # In place: a tensor of 256 MiB must not need three of them. NaN is no less than what is allowed.
    wrong = [float(part.sub_(right).abs_().max()) for part, right in ((rows, tile), (rest, covering)) if part.numel()]
    return all(difference <= allowed for difference in wrong)


def _settle(member: Member) -> None:
    """Return when all replicas are here, with nothing left to do on their devices."""
    if member.num_replicas > 1:
        member.group.barrier().wait()
    if member.device.type != "cpu":
        torch.cuda.synchronize(member.device)


def _worst(member: Member, values: Tensor) -> Tensor:
    """Return the largest of all replicas' values, one by one."""
    if member.num_replicas == 1:
        return values
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    given = values.to(member.device)
    member.group.allreduce([given], options).wait()
    return given.cpu()
