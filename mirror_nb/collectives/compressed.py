"""All-reduce in half the bytes: fp32 travels as bf16. The algorithm is another op's.

Knows tensors and the op that it is put around; knows nothing of buckets or gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps, Member
from mirror_nb.collectives.fabric import Fabric
from mirror_nb.collectives.handles import Expanding, Handle
from mirror_nb.devices import Device
from mirror_nb.values import ReduceOp


@final
class Compressed(CrossDeviceOps):
    """Rounds fp32 to bf16 (8 bits, fp32's range), has `ops` reduce that, and puts the result back.

    What is not zero stays so, unless it is below 1e-40. Other dtypes go through `ops` as they are.
    """

    def __init__(self, ops: CrossDeviceOps) -> None:
        self.ops = ops

    @property
    def exact(self) -> bool:
        """Whether `ops` is: a rounded sum of numbers that are not negative is zero only if all of them are."""
        return self.ops.exact

    def parts(self) -> Sequence[CrossDeviceOps]:
        """Return the op that reduces."""
        return (self.ops,)

    def _belong(self, member: Member | None, fabric: Fabric | None) -> None:
        super()._belong(member, fabric)
        # It records what is asked of it alone: gradients are compressed, what replicas tell each other beside is not.
        self.ops._belong(member, fabric)

    def start(self, op: ReduceOp, flat: Tensor) -> Handle:
        """Begin an all-reduce of a rounded copy."""
        if flat.dtype is not torch.float32:
            return self.ops.begin(op, flat)
        rounded = flat.to(torch.bfloat16)
        return Expanding(self.ops.begin(op, rounded), rounded, flat)

    def unfit_for(self, devices: Sequence[Device]) -> str | None:
        """Return why not: as `ops`."""
        return self.ops.unfit_for(devices)
