"""What an op of the user's has made of gradients: whether all replicas have the same, and whether it is their mean.

Knows the default process group. Knows no rounds: which passes are looked at is the caller's; all replicas look alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps, word_device
from mirror_nb.errors import UsageError
from mirror_nb.tensors.checksums import checksums

_NEAR = 0.05
# Of its own length: what compresses may be that far from the sum.


def check_alike(ops: CrossDeviceOps, reduced: Sequence[Tensor]) -> None:
    """Raise UsageError, on every replica alike, where `ops` has given them different gradients."""
    own = torch.tensor(checksums(reduced), device="cpu")
    device = word_device(reduced[0].device)
    # The largest of a number and of its opposite are opposite where all have the same.
    both = torch.cat([own, -own]).to(device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    largest, smallest = both.chunk(2)
    if not torch.equal(largest, -smallest):
        raise UsageError(
            f"{ops!r} gave the replicas different gradients; its `start` has to reduce `flat` in place, and to leave "
            "the same numbers there on every replica: draw random ones on one and broadcast them, or from equal seeds"
        )


def is_sum(given: Tensor, reduced: Tensor) -> bool | None:
    """Return whether `reduced` is the sum of what the replicas have given, not the mean; None where nobody can tell.

    Every replica makes the same call, and gets the same answer.
    """
    total, found = (
        (torch.view_as_real(each) if each.is_complex() else each).to(word_device(each.device), torch.float64)
        for each in (given, reduced)
    )
    dist.all_reduce(total)
    length = total.norm()
    if not 0 < length < torch.inf:
        return None
    return bool((found - total).norm() < _NEAR * length)
