"""All-reduce by NCCL, NVIDIA's library for GPUs, on a stream of its own.

Not yet measured: the tests marked `gpu` skip where there are too few GPUs, and no result of several is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps, check_whole
from mirror_nb.collectives.handles import BetweenEvents, Finished, Handle
from mirror_nb.collectives.peer_copies import PeerCopies
from mirror_nb.devices import Device
from mirror_nb.values import ReduceOp


@final
class NcclAllReduce(CrossDeviceOps):
    """The default where every replica has a GPU of its own.

    `num_packs`: into how many parts a tensor is cut; NCCL takes them one after the other. 0: into none, as in
    TensorFlow.
    """

    _called = "nccl"

    exact = True
    _stream: torch.cuda.Stream | None = None

    def __init__(self, num_packs: int = 1) -> None:
        check_whole("num_packs", num_packs, 0)
        self.num_packs = num_packs
        self._copies = PeerCopies()

    def start(self, op: ReduceOp, flat: Tensor) -> Handle:
        """Enqueue an all-reduce behind what was enqueued for `flat`, and beside what comes.

        Where replicas share a GPU, which NCCL refuses, they copy from each other's memory.
        """
        if not self.member.has_nccl:
            return self._copies.start(op, flat)
        if self._stream is None:
            self._stream = torch.cuda.Stream(flat.device)
        # An event of a graph that is being recorded tells no time, and to ask for one would end the recording.
        anchor = None if torch.cuda.is_current_stream_capturing() else self._anchor(flat.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if op is ReduceOp.MEAN else dist.ReduceOp.SUM)
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(self._stream):
            started.record()
            for pack in flat.chunk(self.num_packs or 1):
                # Makes this stream wait, not this thread.
                self.member.group.allreduce([pack], options).wait()
            ended.record()
        # The allocator must not give the memory away while this stream uses it.
        flat.record_stream(self._stream)
        return BetweenEvents(Finished(), started, anchor, flat.device, ended)

    def unfit_for(self, devices: Sequence[Device]) -> str | None:
        """Return why not: CPU replicas, or a torch without NCCL."""
        if any(device.kind != "cuda" for device in devices):
            return "it is for GPUs"
        return None if dist.is_nccl_available() else "this build of torch has no NCCL"

    def parts(self) -> Sequence[CrossDeviceOps]:
        """Return what stands in for NCCL."""
        return (self._copies,)

    def __getstate__(self) -> dict[str, object]:
        # Streams and events belong to this process.
        return {"num_packs": self.num_packs, "_copies": self._copies}
