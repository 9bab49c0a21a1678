"""All-reduce of small tensors by torch's symmetric memory on NVLink GPUs; NCCL for large ones.

Not yet run on GPUs that reach each other: it follows torch's documentation, and the crossover is not measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps, Member
from mirror_nb.collectives.gloo import reduce_by_gloo
from mirror_nb.collectives.handles import Finished, Handle, WorkHandle
from mirror_nb.collectives.topology import reaches
from mirror_nb.devices import Device
from mirror_nb.errors import DeviceError, UsageError
from mirror_nb.values import ReduceOp

ONE_SHOT_BYTES = 256 * 1024
# Up to here every GPU reads all the others' parts; above, each sums a slice (two-shot).
_DTYPES = (torch.float32, torch.bfloat16)
_ALIGNMENT = 16
# Bytes that its kernels read at once.


@final
class SymmetricMemoryAllReduce(CrossDeviceOps):
    """Small buckets through memory that the GPUs map of each other, `crossover_bytes` and more by NCCL.

    Where GPUs do not reach each other, replicas that are to reduce by it raise DeviceError; among the candidates of
    another op it leaves all to NCCL.

    torch calls this part of itself alpha; what it lacks here is refused by `unfit_for`. Not yet run on several GPUs.
    """

    _called = "symmetric_memory"

    exact = True
    _room: tuple[Member, dict[torch.dtype, Tensor]] | None = None
    # Of one replica in one group: who takes a dead one's place has none, and to make it takes all.
    _asked: tuple[Member, str | None] | None = None

    def __init__(self, crossover_bytes: int = 2 * 2**20) -> None:
        if crossover_bytes < 0:
            raise UsageError(f"`crossover_bytes` is {crossover_bytes}; it cannot be below 0")
        self.crossover_bytes = crossover_bytes

    def start(self, op: ReduceOp, flat: Tensor) -> Handle:
        """Enqueue an all-reduce on the current stream."""
        if not self.member.has_nccl:
            return reduce_by_gloo(self.member, op, flat)
        nbytes = flat.numel() * flat.element_size()
        if nbytes >= self.crossover_bytes or nbytes % _ALIGNMENT or flat.dtype not in _DTYPES or self._far():
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if op is ReduceOp.MEAN else dist.ReduceOp.SUM)
            return WorkHandle([self.member.group.allreduce([flat], options)])
        room = self._symmetric(flat.dtype)[: flat.numel()]
        room.copy_(flat)
        operations: Any = torch.ops.symm_mem
        reduce = operations.one_shot_all_reduce if nbytes <= ONE_SHOT_BYTES else operations.two_shot_all_reduce_
        flat.copy_(reduce(room, "sum", self.member.group.group_name))
        if op is ReduceOp.MEAN:
            flat.div_(self.member.num_replicas)
        # On the current stream, so that its end is here and not where it is waited for.
        return Finished()

    def unfit_for(self, devices: Sequence[Device]) -> str | None:
        """Return why not: CPU replicas, one GPU, a torch without it; in a replica, no direct way between two GPUs."""
        if any(device.kind != "cuda" for device in devices):
            return "it is for GPUs"
        if len(devices) < 2:
            return "it needs at least two GPUs"
        if not hasattr(getattr(torch.ops, "symm_mem", None), "one_shot_all_reduce"):
            return f"torch {torch.__version__} has no symmetric memory"
        # To ask what reaches what would begin CUDA in the controller, which goes without; the replicas ask.
        return _apart(devices) if torch.cuda.is_initialized() else None

    def check_reach(self) -> None:
        """Raise DeviceError where the replicas' GPUs do not reach each other's memory."""
        reason = self._far()
        if reason is not None:
            raise DeviceError(f"SymmetricMemoryAllReduce cannot work on these GPUs: {reason}; take NcclAllReduce()")

    def _far(self) -> str | None:
        """Return which GPUs do not reach each other; asked once, since that takes a while."""
        member = self.member
        if self._asked is None or self._asked[0] is not member:
            # As torch numbers them here: every replica sees the one of replica i as number i.
            self._asked = member, _apart([Device("cuda", i) for i in range(member.num_replicas)])
        return self._asked[1]

    def _symmetric(self, dtype: torch.dtype) -> Tensor:
        """Memory of this dtype that all map, made at the first use; every replica comes here for the same one."""
        if self._room is None or self._room[0] is not self.member:
            self._room = self.member, {}
        rooms = self._room[1]
        if dtype not in rooms:
            module = importlib.import_module("torch.distributed._symmetric_memory")
            room = module.empty(self.crossover_bytes // dtype.itemsize, dtype=dtype, device=self.member.device)
            module.rendezvous(room, self.member.group.group_name)
            rooms[dtype] = room
        return rooms[dtype]

    def __getstate__(self) -> dict[str, object]:
        # Mapped memory belongs to this process.
        return {"crossover_bytes": self.crossover_bytes}


def _apart(devices: Sequence[Device]) -> str | None:
    """Return which two do not reach each other's memory, if there are such."""
    found = next(((a, b) for a in devices for b in devices if a < b and not reaches(a, b)), None)
    return None if found is None else f"{found[0]} and {found[1]} do not reach each other's memory"
