"""All-reduce within groups of near devices first, then across the groups, then back.

On several GPUs it is not yet measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps, Member, averages_first, check_whole
from mirror_nb.collectives.handles import Finished, Handle
from mirror_nb.collectives.peer_copies import PeerCopies
from mirror_nb.collectives.shared_memory import ExchangeHandle, fabric_for, fold_of, needs_shared_memory
from mirror_nb.collectives.topology import groups_of
from mirror_nb.devices import Device
from mirror_nb.values import ReduceOp


@final
class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Reduces within the groups that the topology gives, across them, and copies back.

    `num_packs`: into how many parts a tensor on GPUs is cut, so that one travels while the next is summed; 0: into
    none, as in TensorFlow. CPU replicas do all of it through shared memory, in pieces that fit their caches.
    """

    _called = "hierarchical_copy"

    exact = True
    _groups: tuple[Member, tuple[tuple[int, ...], ...]] | None = None

    def __init__(self, num_packs: int = 1) -> None:
        check_whole("num_packs", num_packs, 0)
        self.num_packs = num_packs
        self._copies = PeerCopies()

    def start(self, op: ReduceOp, flat: Tensor) -> Handle:
        """Begin an all-reduce; on GPUs it is enqueued at once, unless replicas share one: see `PeerCopies`."""
        member, groups = self.member, self._near_each_other()
        if flat.device.type != "cpu" and not member.has_nccl:
            return self._copies.start(op, flat)
        if flat.device.type == "cpu":
            fabric = fabric_for(self, flat)
            return ExchangeHandle(fabric, fabric.all_reduce_by_groups(flat, fold_of(op), groups))
        first = averages_first(op, flat.dtype)
        if first:
            flat.div_(member.num_replicas)
        for pack in flat.chunk(self.num_packs or 1):
            self._reduce_pack(pack, groups)
        if op is ReduceOp.MEAN and not first:
            flat.div_(member.num_replicas)
        return Finished()

    def unfit_for(self, devices: Sequence[Device]) -> str | None:
        """Return why not: CPU replicas that share no memory."""
        return None if all(device.kind == "cuda" for device in devices) else needs_shared_memory(devices)

    def parts(self) -> Sequence[CrossDeviceOps]:
        """Return what copies where replicas share a GPU."""
        return (self._copies,)

    def _near_each_other(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups, found once: to ask whether all GPUs reach each other takes a while."""
        member = self.member
        if self._groups is None or self._groups[0] is not member:
            # As torch numbers them here: every replica sees the one of replica i as number i.
            devices = [Device(member.device.type, i) for i in range(member.num_replicas)]
            self._groups = member, groups_of(devices)
        return self._groups[1]

    def __getstate__(self) -> dict[str, object]:
        # The groups are those of one member.
        return {"num_packs": self.num_packs, "_copies": self._copies}

    def _reduce_pack(self, pack: Tensor, groups: Sequence[Sequence[int]]) -> None:
        me = self.member.replica_id
        mine = next(group for group in groups if me in group)
        leaders = [group[0] for group in groups]
        self._to_first(pack, mine)
        if me in leaders:
            self._to_first(pack, leaders)
            self._from_first(pack, leaders)
        self._from_first(pack, mine)

    def _to_first(self, pack: Tensor, members: Sequence[int]) -> None:
        group, me = self.member.group, self.member.replica_id
        if me != members[0]:
            group.send([pack], members[0], 0).wait()
            return
        room = torch.empty_like(pack)
        for peer in members[1:]:
            group.recv([room], peer, 0).wait()
            pack.add_(room)

    def _from_first(self, pack: Tensor, members: Sequence[int]) -> None:
        group, me = self.member.group, self.member.replica_id
        if me != members[0]:
            group.recv([pack], members[0], 0).wait()
            return
        for peer in members[1:]:
            group.send([pack], peer, 0).wait()
