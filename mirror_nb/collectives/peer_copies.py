"""All-reduce of replicas that map each other's memory on GPUs: for those that NCCL refuses, such as two on one GPU.

    a tensor ─▶ this replica's room, `staged` ─▶ all have come here? ─▶ read all rooms, sum, `taken`
                                                 (shared memory)

Each replica has two rooms on its GPU and events that tell the others' streams when a room is full and when it has
been read. Only that all have enqueued as much is waited for on the CPU. Knows CUDA's IPC by what torch.multiprocessing
makes of it, and the fabric.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import final

import torch
import torch.multiprocessing  # teaches ForkingPickler tensors and events of CUDA
from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps, Member
from mirror_nb.collectives.exchange import Exchange
from mirror_nb.collectives.fabric import Fabric
from mirror_nb.collectives.gloo import reduce_by_gloo
from mirror_nb.collectives.handles import Finished, Handle
from mirror_nb.collectives.headers import HALF
from mirror_nb.devices import Device
from mirror_nb.errors import UsageError
from mirror_nb.values import ReduceOp

ROOMS = 2
ROOM_BYTES = 32 * 2**20
# Larger tensors go in pieces of it.
_TOLD_BYTES = 16 * 1024
# Of what a replica tells the others of its rooms, at most.


@final
@dataclass(frozen=True, slots=True)
class Rooms:
    """What one replica has the others map: its rooms, and events of each."""

    memory: Tensor
    # uint8, ROOMS × ROOM_BYTES.
    staged: Sequence[torch.cuda.Event]
    taken: Sequence[torch.cuda.Event]
    # That this replica has read everybody's.


@final
class PeerCopies(CrossDeviceOps):
    """Each replica copies from the others' memory and sums, in the order of their ids: the same bits on all.

    bf16 and fp16 are summed in fp32. Where CUDA does not let processes map each other's memory, a replica warns of it
    and why, and gloo carries all.
    """

    _called = "peer_copies"

    exact = True
    _found: tuple[Fabric, Sequence[Rooms]] | None = None
    # Empty where there are none. Of one group: after an error it is formed anew, maybe with another replica.
    _begun = 0
    _latest: _Copying | None = None

    def start(self, op: ReduceOp, flat: Tensor) -> Handle:
        """Lay it out for the others; they are waited for where its handle is, and where the next one begins."""
        fabric = self.fabric
        rooms = self._rooms(fabric) if fabric is not None else ()
        if fabric is None or not rooms:
            return reduce_by_gloo(self.member, op, flat)
        handle: Handle = Finished()
        for piece in flat.split(ROOM_BYTES // flat.element_size()):
            handle = self._begin(op, piece, flat, rooms, fabric)
        return handle

    def unfit_for(self, devices: Sequence[Device]) -> str | None:
        """Return why not: CPU replicas."""
        return "it is for GPUs" if any(device.kind != "cuda" for device in devices) else None

    def _begin(self, op: ReduceOp, piece: Tensor, flat: Tensor, rooms: Sequence[Rooms], fabric: Fabric) -> Handle:
        if self._latest is not None and not self._latest.done():
            # Two rooms are enough, since whoever comes to a collective has enqueued all of the one before.
            with contextlib.suppress(UsageError):
                # Whoever waits for that one is told.
                self._latest.wait()
        room = self._begun % ROOMS
        self._begun += 1
        for peer in rooms:
            peer.taken[room].wait()
        mine = rooms[self.member.replica_id]
        _of(mine, room, piece).copy_(piece)
        mine.staged[room].record()
        exchange = fabric.announce_all_reduce("peer copies", op.name, flat)
        self._latest = _Copying(fabric, exchange, op, piece, rooms, room, self.member.replica_id)
        return self._latest

    def _rooms(self, fabric: Fabric) -> Sequence[Rooms]:
        """Return every replica's rooms, made at the first use: all come here for the same collective."""
        if self._found is None or self._found[0] is not fabric:
            # Replicas may have come to different ones before.
            self._begun, self._latest = 0, None
            self._found = fabric, mapped(self.member, fabric)
        return self._found[1]

    def __getstate__(self) -> dict[str, object]:
        # Mapped memory belongs to this process.
        return {}


@final
class _Copying(Handle):
    """An all-reduce that this replica has laid its part out for."""

    def __init__(
        self,
        fabric: Fabric,
        exchange: Exchange,
        op: ReduceOp,
        piece: Tensor,
        rooms: Sequence[Rooms],
        room: int,
        replica_id: int,
    ) -> None:
        self._fabric = fabric
        self._exchange = exchange
        self._op = op
        self._piece: Tensor | None = piece
        self._rooms = rooms
        self._room = room
        self._replica_id = replica_id

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all have come, and enqueue the sum; once."""
        self._fabric.wait(self._exchange, seconds)
        piece, self._piece = self._piece, None
        if piece is None:
            # Maybe by another stream, when the next one began.
            self._rooms[self._replica_id].taken[self._room].wait()
            return
        for peer in self._rooms:
            peer.staged[self._room].wait()
        self._sum(piece)
        self._rooms[self._replica_id].taken[self._room].record()

    def done(self) -> bool:
        """Whether the sum is enqueued."""
        return self._piece is None

    def _sum(self, piece: Tensor) -> None:
        total = torch.empty_like(piece, dtype=torch.float32) if piece.dtype in HALF else piece
        first, *others = (_of(peer, self._room, piece) for peer in self._rooms)
        total.copy_(first)
        for part in others:
            # From another GPU by way of this one's memory.
            total.add_(part if part.device == total.device else part.to(total.device))
        if self._op is ReduceOp.MEAN:
            total.div_(len(self._rooms))
        if total is not piece:
            piece.copy_(total)


def _of(rooms: Rooms, room: int, piece: Tensor) -> Tensor:
    """Return where the values of `piece` lie in a room."""
    return rooms.memory[room, : piece.nbytes].view(piece.dtype)


# They are written to in every mode.
@torch.inference_mode(False)
def mapped(member: Member, fabric: Fabric) -> Sequence[Rooms]:
    """Make this replica's rooms and map the others'; every replica calls it. Empty where one of them cannot."""
    told, mine, why = b"", None, ""
    try:
        mine = Rooms(
            torch.empty(ROOMS, ROOM_BYTES, dtype=torch.uint8, device=member.device),
            [torch.cuda.Event(interprocess=True) for _ in range(ROOMS)],
            [torch.cuda.Event(interprocess=True) for _ in range(ROOMS)],
        )
        told = bytes(ForkingPickler.dumps(mine))
    except RuntimeError as error:
        why = str(error)
    all_told = _gathered(fabric, told)
    rooms: list[Rooms] = []
    if mine is not None and all(all_told):
        try:
            rooms = [mine if i == member.replica_id else pickle.loads(its) for i, its in enumerate(all_told)]
        except RuntimeError as error:
            why = str(error)
    if why:
        warnings.warn(
            f"replica {member.replica_id} cannot share its GPU's memory with the others ({why.splitlines()[0]}); gloo "
            "carries what they reduce by way of the CPU, which is slower. See that this system allows CUDA IPC",
            stacklevel=2,
        )
    # One that maps and one that does not would wait for each other.
    return rooms if all(_gathered(fabric, b"mapped" if rooms else b"")) else ()


def _gathered(fabric: Fabric, told: bytes) -> list[bytes]:
    """Return what each replica tells, by way of memory that only they map."""
    row = torch.frombuffer(bytearray(len(told).to_bytes(4, "little") + told).ljust(_TOLD_BYTES), dtype=torch.uint8)
    rows = row.new_empty(fabric.num_replicas, _TOLD_BYTES)
    fabric.wait(fabric.all_gather(list(rows), row, "what to map of the others' GPUs"))
    found = [each.numpy().tobytes() for each in rows]
    return [its[4 : 4 + int.from_bytes(its[:4], "little")] for its in found]
