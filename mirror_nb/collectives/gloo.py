"""All-reduce by gloo, torch's library for CPUs: for comparison, and where there is nothing better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps, Member, averages_first
from mirror_nb.collectives.handles import Handle, WorkHandle
from mirror_nb.devices import Device
from mirror_nb.values import ReduceOp


@final
class GlooAllReduce(CrossDeviceOps):
    """gloo's own all-reduce, over loopback on one machine, over the network between several.

    Tensors on GPUs go through the CPU. The order of summation is gloo's, and depends on the tensor's size.
    """

    _called = "gloo"

    exact = True

    def start(self, op: ReduceOp, flat: Tensor) -> Handle:
        """Begin an all-reduce, which gloo's threads carry on."""
        return reduce_by_gloo(self.member, op, flat)

    def unfit_for(self, devices: Sequence[Device]) -> str | None:
        """Return why not: this torch has no gloo."""
        return None if dist.is_gloo_available() else "this build of torch has no gloo"


def reduce_by_gloo(member: Member, op: ReduceOp, flat: Tensor) -> Handle:
    """Begin an all-reduce that gloo carries on the CPU: also where another op finds that nothing else does."""
    group, options, num_replicas = member.group, dist.AllreduceOptions(), member.num_replicas
    first = averages_first(op, flat.dtype)
    if first:
        flat.div_(num_replicas)
    # gloo adds no numbers of 16 bits, of which these hold the sum, or overflow alike.
    summed = flat.int() if flat.dtype is torch.int16 else flat
    # A tensor on a GPU the group would hand to NCCL.
    summed = summed.cpu()
    work = (
        group.carry("allreduce", "all_reduce", ([summed], options), {})
        if hasattr(group, "carry")
        # torch's own group knows no shared memory.
        else group.allreduce([summed], options)
    )

    def finish() -> None:
        if summed is not flat:
            flat.copy_(summed)
        if op is ReduceOp.MEAN and not first:
            # gloo's own mean is not in every torch.
            flat.div_(num_replicas)

    return WorkHandle([work], finish)
