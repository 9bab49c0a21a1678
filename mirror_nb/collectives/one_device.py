"""Reduction on one of the devices, which then sends the result to all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps, as_sent, averages_first
from mirror_nb.collectives.handles import Finished, Handle
from mirror_nb.devices import Device, parse
from mirror_nb.errors import UsageError
from mirror_nb.values import ReduceOp


@final
class ReductionToOneDevice(CrossDeviceOps):
    """All replicas send to one, which sums and sends the sum back.

    `reduce_to_device`: on which one, by its name or as a replica id; None: replica 0's. `accumulation_fn`: makes one
    tensor of a list of them, in the order of replica ids, in place of the sum; a mean divides what it makes by the
    number of replicas. It must be picklable, and runs on that device only.
    """

    _called = "one_device"

    def __init__(
        self, reduce_to_device: object = None, accumulation_fn: Callable[[list[Tensor]], Tensor] | None = None
    ) -> None:
        self.reduce_to_device = reduce_to_device
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise UsageError(f"`accumulation_fn` must be a function of a list of tensors, not {accumulation_fn!r}")
        self.accumulation_fn = accumulation_fn
        self._root = int(reduce_to_device) if isinstance(reduce_to_device, int | Integral) else 0
        # The id of the replica that sums.

    def on(self, devices: Sequence[Device]) -> ReductionToOneDevice:
        """Return the op that knows which replica has the device."""
        found = copy.copy(self)
        found._root = self._place_among(devices) or 0
        return found

    def start(self, op: ReduceOp, flat: Tensor) -> Handle:
        """Reduce, at once: the handle is of something finished."""
        root, num_replicas = self._root, self.member.num_replicas
        sent = self.carried(flat)
        first = self.accumulation_fn is None and averages_first(op, flat.dtype)
        if first:
            sent.div_(num_replicas)
        if self.accumulation_fn is None:
            self._add_up(sent, root)
        else:
            self._accumulate(self.accumulation_fn, sent, root)
        if op is ReduceOp.MEAN and not first and self.member.replica_id == root:
            sent.div_(num_replicas)
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._complete(self.member.group.broadcast([sent], options))
        if sent is not flat:
            flat.copy_(sent)
        return Finished()

    @property
    def exact(self) -> bool:
        """Whether it adds up: what `accumulation_fn` makes may be anything."""
        return self.accumulation_fn is None

    def unfit_for(self, devices: Sequence[Device]) -> str | None:
        """Return why not: the device that reduces is none of them."""
        if self._place_among(devices) is not None:
            return None
        return f"`reduce_to_device` is {self.reduce_to_device!r}, which is none of them"

    def _add_up(self, flat: Tensor, root: int) -> None:
        options = dist.ReduceOptions()
        options.rootRank = root
        self._complete(self.member.group.reduce([flat], options))

    def _accumulate(self, accumulate: Callable[[list[Tensor]], Tensor], flat: Tensor, root: int) -> None:
        parts = self._gathered(flat, root)
        if parts is None:
            return
        total: Any = accumulate(parts)
        if not isinstance(total, Tensor) or total.shape != flat.shape:
            made = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else _a(total)
            raise UsageError(
                f"`accumulation_fn` returned {made}; it must return one tensor of shape {tuple(flat.shape)}, made of "
                f"the {len(parts)} that it is given"
            )
        flat.copy_(total)

    def _gathered(self, flat: Tensor, root: int) -> list[Tensor] | None:
        options = dist.GatherOptions()
        options.rootRank = root
        mine = self.member.replica_id == root
        parts = [flat.new_empty(flat.shape) for _ in range(self.member.num_replicas)] if mine else []
        into = [[as_sent(part) for part in parts]] if mine else []
        self._complete(self.member.group.gather(into, [as_sent(flat)], options))
        return [part.to(self.member.device) for part in parts] if mine else None

    def _place_among(self, devices: Sequence[Device]) -> int | None:
        wanted = self.reduce_to_device
        if wanted is None:
            return 0
        if isinstance(wanted, int | Integral):
            return int(wanted) if 0 <= int(wanted) < len(devices) else None
        device = parse(wanted)
        return devices.index(device) if device in devices else None


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
