"""All-reduce of small tensors by torch's symmetric memory on NVLink GPUs; NCCL for large ones.

Run by two replicas on one GPU, not yet on several: the crossover is not measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps, Member, check_whole
from mirror_nb.collectives.fabric import Fabric
from mirror_nb.collectives.handles import Finished, Handle, WorkHandle
from mirror_nb.collectives.peer_copies import PeerCopies
from mirror_nb.collectives.topology import reaches
from mirror_nb.devices import Device
from mirror_nb.errors import DeviceError
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

    torch calls this part of itself alpha; what it lacks here is refused by `unfit_for`. Its kernels wait for those of
    the peers without an end: they are enqueued only when all replicas have come. Once a replica was replaced, NCCL
    takes all: torch does not find new processes among old ones.
    """

    _called = "symmetric_memory"

    exact = True
    _shared: _Shared | None = None
    _asked: tuple[Member, str | None] | None = None

    def __init__(self, crossover_bytes: int = 2 * 2**20) -> None:
        check_whole("crossover_bytes", crossover_bytes, 0)
        self.crossover_bytes = crossover_bytes
        self._copies = PeerCopies()

    def start(self, op: ReduceOp, flat: Tensor) -> Handle:
        """Enqueue an all-reduce on the current stream."""
        nbytes = flat.nbytes
        small = nbytes < self.crossover_bytes and not nbytes % _ALIGNMENT and flat.dtype in _DTYPES
        shared = self._mapped() if small and not self._far() else None
        if shared is None or not shared.group:
            if not self.member.has_nccl:
                return self._copies.start(op, flat)
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if op is ReduceOp.MEAN else dist.ReduceOp.SUM)
            return WorkHandle([self.member.group.allreduce([flat], options)])
        # A kernel would wait for ever for a replica that does not come, and torch's store for half an hour.
        shared.fabric.wait(shared.fabric.announce_all_reduce("symmetric memory", op.name, flat))
        whole, used = self._room(shared, flat.dtype)
        room = whole[: flat.numel()]
        # Another stream may have used it last.
        used.wait()
        room.copy_(flat)
        operations: Any = torch.ops.symm_mem
        reduce = operations.one_shot_all_reduce if nbytes <= ONE_SHOT_BYTES else operations.two_shot_all_reduce_
        flat.copy_(reduce(room, "sum", shared.group))
        used.record()
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
        names = ("_SymmetricMemory", "_register_process_group")
        kernels = hasattr(getattr(torch.ops, "symm_mem", None), "one_shot_all_reduce")
        if not kernels or not all(hasattr(_torchs(), name) for name in names):
            return f"torch {torch.__version__} has no symmetric memory"
        # To ask what reaches what would begin CUDA in the controller, which goes without; the replicas ask.
        return _apart(devices) if torch.cuda.is_initialized() else None

    def parts(self) -> Sequence[CrossDeviceOps]:
        """Return what stands in for NCCL where replicas share a GPU."""
        return (self._copies,)

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

    def _mapped(self) -> _Shared | None:
        """Return what the replicas of this group share, found at the first use; every replica comes here for it."""
        fabric = self.fabric
        if fabric is None:
            return None
        if self._shared is None or self._shared.fabric is not fabric:
            self._shared = _Shared.of(self.member, fabric)
        return self._shared

    # It is written to in every mode.
    @torch.inference_mode(False)
    def _room(self, shared: _Shared, dtype: torch.dtype) -> tuple[Tensor, torch.cuda.Event]:
        """Memory of this dtype that all map, made at the first use; every replica comes here for the same one."""
        if dtype not in shared.rooms:
            module = importlib.import_module("torch.distributed._symmetric_memory")
            room = module.empty(self.crossover_bytes // dtype.itemsize, dtype=dtype, device=self.member.device)
            _torchs()._SymmetricMemory.rendezvous(room, shared.group)
            shared.rooms[dtype] = room, torch.cuda.Event()
        return shared.rooms[dtype]

    def __getstate__(self) -> dict[str, object]:
        # Mapped memory belongs to this process.
        return {"crossover_bytes": self.crossover_bytes, "_copies": self._copies}


@final
@dataclass(frozen=True, slots=True)
class _Shared:
    """What one replica shares with the others of one group: after an error that is another one."""

    fabric: Fabric
    # Of the group.
    group: str
    # By which name torch's kernels find the replicas; empty where they cannot.
    beside: object = None
    # The group of that name, which torch does not keep.
    rooms: dict[torch.dtype, tuple[Tensor, torch.cuda.Event]] = field(default_factory=dict)
    # Each with what is behind the latest reduction in it.

    made: ClassVar[int] = 0
    # For how many groups this process has made symmetric memory.

    @staticmethod
    def of(member: Member, fabric: Fabric) -> _Shared:
        """Find a name that all replicas have; every one calls it."""
        group: Any = member.group
        if not hasattr(group, "beside"):
            return _Shared(fabric, group.group_name)
        made = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(member.num_replicas)]
        group.allgather([made], [torch.tensor([_Shared.made], device="cpu")]).wait()
        if len({int(number) for number in made}) > 1:
            # torch counts what processes exchange for it since each began, and a new one would wait for ever.
            return _Shared(fabric, "")
        _Shared.made += 1
        name = f"mirror_nb symmetric memory {_Shared.made}"
        beside, store = group.beside(name)
        _torchs()._register_process_group(name, beside)
        _torchs()._SymmetricMemory.set_group_info(name, member.replica_id, member.num_replicas, store)
        return _Shared(fabric, name, beside)


def _torchs() -> Any:
    return importlib.import_module("torch._C._distributed_c10d")


def _apart(devices: Sequence[Device]) -> str | None:
    """Return which two do not reach each other's memory, if there are such."""
    found = next(((a, b) for a in devices for b in devices if a < b and not reaches(a, b)), None)
    return None if found is None else f"{found[0]} and {found[1]} do not reach each other's memory"
