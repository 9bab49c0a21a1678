"""Replicas that map each other's rooms: the order in which they use them, on CPU replicas; all of it on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
from driving import run_cell

from mirror_nb.collectives.gloo import GlooAllReduce
from mirror_nb.collectives.hierarchical_copy import HierarchicalCopyAllReduce
from mirror_nb.collectives.nccl import NcclAllReduce
from mirror_nb.collectives.one_device import ReductionToOneDevice
from mirror_nb.collectives.options import Communication, CommunicationOptions
from mirror_nb.collectives.symmetric_memory import SymmetricMemoryAllReduce
from mirror_nb.devices import Device
from mirror_nb.pool.local import LocalPool
from mirror_nb.pool.recovery import recover
from mirror_nb.strategies.mirrored import SETUP

# A GPU's memory is the fabric's here, and an event counts how often it was recorded, where all see it.
MADE = """
import torch, torch.distributed as dist
from mirror_nb.collectives import peer_copies
from mirror_nb.collectives.base import Member
from mirror_nb.errors import UsageError
from mirror_nb.values import ReduceOp

originals = dict(vars(peer_copies)), torch.cuda.Event
peer_copies.ROOM_BYTES = 4096
seen = []

class Event:
    def __init__(self, counts, kind, room, peer):
        self.counts, self.kind, self.room, self.peer = counts, kind, room, peer

    def record(self):
        self.counts[self.kind, self.room] += 1

    def wait(self):
        seen.append((self.kind, self.room, self.peer, int(self.counts[self.kind, self.room])))

def mapped(member, fabric):
    def region(numel, dtype, *shape):
        kept.append(fabric.allocate(numel, dtype))
        parts = fabric._regions.held()[-1].parts
        return [part[: numel * dtype.itemsize].view(dtype).view(*shape) for part in parts]
    rooms, counts = region(8192, torch.uint8, 2, 4096), region(4, torch.int64, 2, 2)
    return [
        peer_copies.Rooms(
            memory,
            [Event(counts[peer], 0, room, peer) for room in range(2)],
            [Event(counts[peer], 1, room, peer) for room in range(2)],
        )
        for peer, memory in enumerate(rooms)
    ]

kept = []
peer_copies.mapped = mapped
ops = peer_copies.PeerCopies()
ops.bind(Member(replica_id, num_replicas, device, dist.group.WORLD))

def parts_of(numel, dtype, seed=0):
    "What every replica brings; each knows all of them."
    made = torch.Generator().manual_seed(numel + seed)
    return [(torch.randn(numel, generator=made) * 8).to(dtype) for _ in range(num_replicas)]
"""

PUT_BACK = """
ops.unbind()
vars(peer_copies).update(originals[0])
torch.cuda.Event = originals[1]
"""
# Other tests use the same replicas.


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} replicas")
def pool(request, replicas):
    return replicas(request.param)


@pytest.fixture
def two(replicas):
    return replicas(2)


def told(ran: Any) -> dict[int, Any]:
    """Why a cell did not end well."""
    report = ran.report
    failures = {r: (failure.type_name, failure.message or failure.traceback) for r, failure in report.failures.items()}
    return failures | {r: answer.death for r, answer in report.answers.items() if answer.death}


def run(pool: LocalPool, source: str) -> dict[int, dict[str, Any]]:
    ran = run_cell(pool, f"{MADE}\n{source}\n{PUT_BACK}", timeout=60)
    assert ran.report.clean, told(ran)
    return ran.values


def test_every_size_and_dtype_is_summed_in_the_order_of_the_replicas(pool):
    run(
        pool,
        """
for numel in (0, 1, 1000, 1024, 5000):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.int64):
        parts = parts_of(numel, dtype)
        total = torch.zeros(numel, dtype=torch.float32 if dtype.itemsize == 2 and dtype.is_floating_point else dtype)
        for part in parts:
            total += part
        for op in (ReduceOp.SUM, ReduceOp.MEAN)[: 1 + dtype.is_floating_point]:
            flat = parts[replica_id].clone()
            ops.start(op, flat).wait()
            expected = total / num_replicas if op is ReduceOp.MEAN else total
            assert torch.equal(flat, expected.to(dtype)), (numel, dtype, op)
""",
    )


def test_nobody_reads_a_room_before_it_is_full_nor_fills_one_that_is_yet_to_be_read(pool):
    values = run(
        pool,
        """
for number in range(7):
    ops.start(ReduceOp.SUM, torch.ones(10)).wait()
""",
    )
    for found in values.values():
        expected = []
        for number in range(7):
            uses, room = divmod(number, 2)
            expected += [(1, room, peer, uses) for peer in range(len(values))]
            expected += [(0, room, peer, uses + 1) for peer in range(len(values))]
        # Of the last ones others may have recorded more by then, of none less.
        assert [line[:3] for line in found["seen"]] == [line[:3] for line in expected]
        pairs = list(zip(found["seen"], expected, strict=True))
        assert all(line[3] == wanted[3] for line, wanted in pairs if line[0] == 1)
        assert all(line[3] >= wanted[3] for line, wanted in pairs)


def test_several_are_under_way_and_waited_for_in_any_order(two):
    run(
        two,
        """
flats = [torch.full((2000,), float(10 ** n * (replica_id + 1))) for n in range(4)]
handles = [ops.start(ReduceOp.SUM, flat) for flat in flats]
assert [handle.done() for handle in handles] == [True, True, True, False]
for handle in (handles[3], handles[0], handles[2], handles[1], handles[3]):
    handle.wait()
for n, flat in enumerate(flats):
    assert (flat == 3 * 10 ** n).all()
""",
    )


def test_replicas_that_bring_different_tensors_are_told_and_go_on(two):
    run(
        two,
        """
first = ops.start(ReduceOp.SUM, torch.ones(10 + replica_id))
second = torch.ones(5)
later = ops.start(ReduceOp.SUM, second)
try:
    first.wait()
    raise AssertionError("no error")
except UsageError as error:
    assert "replica 0: all_reduce (SUM) of float32[10] by peer copies" in str(error)
    assert "replica 1: all_reduce (SUM) of float32[11] by peer copies" in str(error)
later.wait()
assert (second == 2).all()
""",
    )


def test_where_one_replica_cannot_map_the_others_memory_gloo_carries_it_for_all(two):
    run(
        two,
        """
import warnings

class Told:
    "A room and its events, as one replica tells of them; on the other one they cannot be opened."
    def __init__(self, memory=None, *events):
        self.memory = memory
        made.append(self)
    def __reduce__(self):
        return (fails, ()) if replica_id == 0 else (Told, ())

def fails():
    raise RuntimeError("CUDA error: invalid device context")

peer_copies.mapped = originals[0]["mapped"]
peer_copies.Rooms, made = Told, []
torch.cuda.Event = lambda interprocess: None
ops = peer_copies.PeerCopies()
ops.bind(Member(replica_id, num_replicas, device, dist.group.WORLD))
flat = torch.full((10,), 1.0 + replica_id)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with torch.inference_mode():
        ops.start(ReduceOp.SUM, flat).wait()
assert (flat == 3).all() and ops._found[1] == ()
memory = made[0].memory
made.clear()
memory.zero_()
# Replica 1 opens what replica 0 told it of.
said = [str(each.message) for each in told if "share its GPU's memory" in str(each.message)]
assert len(said) == replica_id
assert all("replica 1 cannot share its GPU's memory with the others (CUDA error: invalid" in each for each in said)
""",
    )


# Symmetric memory

SHARED = """
import torch.distributed as dist
from mirror_nb.collectives.base import Member
from mirror_nb.collectives.symmetric_memory import _Shared, _torchs

before = _Shared.made
member = Member(replica_id, num_replicas, device, dist.group.WORLD)
fabric = dist.group.WORLD.shared
first, second = _Shared.of(member, fabric), _Shared.of(member, fabric)
known = [_torchs()._resolve_process_group(shared.group).get_group_store() for shared in (first, second)]
known[0].set(f"mine {replica_id}", str(replica_id))
found = [known[0].get(f"mine {peer}") for peer in range(num_replicas)]
names = [first.group, second.group]
_Shared.made += replica_id == 0
late = _Shared.of(member, fabric).group
_Shared.made = before + 2
"""


def test_replicas_that_share_memory_of_torchs_find_each_other_by_a_name_of_their_own(two):
    ran = run_cell(two, SHARED)
    assert ran.report.clean, told(ran)
    for values in ran.values.values():
        assert values["found"] == [b"0", b"1"]
        assert len(set(values["names"])) == 2
        assert values["names"] == ran.values[0]["names"]
        # One that has begun anew is no partner of the others.
        assert values["late"] == ""


# On one GPU

BY = {
    "gloo": GlooAllReduce,
    "nccl": NcclAllReduce,
    "hierarchical copy": HierarchicalCopyAllReduce,
    "one device": ReductionToOneDevice,
}

ON_ONE_GPU = """
import torch
from mirror_nb.errors import UsageError
ops = strategy.cross_device_ops

def parts_of(numel, dtype, seed=0):
    made = torch.Generator().manual_seed(numel + seed)
    return [(torch.randn(numel, generator=made) * 8).to(dtype) for _ in range(num_replicas)]

def check(numel, dtype, op, seed=0):
    parts = parts_of(numel, dtype, seed)
    exact = torch.stack([part.double() for part in parts]).sum(0) / (num_replicas if op == "mean" else 1)
    flat = parts[replica_id].to(device)
    handle = ops.all_reduce(op, flat)
    handle.wait()
    rounding = torch.finfo(dtype).eps if dtype.is_floating_point else 0
    assert (flat.cpu().double() - exact).abs().max() <= rounding * 8 * 5 * num_replicas**2, (numel, dtype, op)
    return flat

for numel in (1, 7, 1000, 2**20 + 3):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64):
        check(numel, dtype, "sum")
        if dtype.is_floating_point:
            check(numel, dtype, "mean")
# Several pieces, and many rooms in turn while the GPU is behind.
check(20_000_003, torch.float32, "mean")
sums = []
for number in range(40):
    torch.cuda._sleep(500_000 * (1 + (number + replica_id) % 3))
    sums.append(check(300_000, torch.float32, "sum", number).double().sum().item())
# Another stream than the one that the tensor was made on.
side, flat = torch.cuda.Stream(), torch.full((1000,), float(replica_id), device=device)
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    torch.cuda._sleep(20_000_000)
    flat.add_(1)
    handles = [ops.all_reduce("sum", flat)]
handles[0].wait()
assert (flat == sum(range(1, num_replicas + 1))).all()
# The other collectives.
one = torch.full((3,), float(replica_id), device=device)
total = ops.reduce("mean", one, 1)
assert (total is None) == (replica_id != 1) and (total is None or (total.device == device and (total == 0.5).all()))
rows = ops.gather(one, 0)
assert (rows is None) == (replica_id != 0) and (rows is None or [row.tolist() for row in rows] == [[0] * 3, [1] * 3])
sent = one.clone()
ops.broadcast(sent, 1)
assert (sent == 1).all() and sent.device == device
# Tensors that differ are an error on both, after which they go on.
try:
    ops.all_reduce("sum", torch.ones(1024 * (1 + replica_id), device=device)).wait()
    said = ""
except UsageError as error:
    said = str(error)
assert "1024" in said and "2048" in said, said
check(1000, torch.float32, "sum")
mapped = bool(getattr(getattr(ops, "_copies", None), "_found", (None, ()))[1])
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", BY)
def test_two_replicas_on_one_gpu_reduce_alike(name):
    by = Communication(BY[name](), CommunicationOptions()).pickled()
    with LocalPool((Device("cuda", 0), Device("cuda", 0)), setup=SETUP, communication=by) as pool:
        pool.start()
        ran = run_cell(pool, ON_ONE_GPU, timeout=120)
        assert ran.report.clean, told(ran)
    # The same bits on both.
    assert ran.values[0]["sums"] == ran.values[1]["sums"]
    assert {found["mapped"] for found in ran.values.values()} == {name in ("nccl", "hierarchical copy")}


@pytest.mark.gpu
def test_two_replicas_on_one_gpu_reduce_by_symmetric_memory(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    by = Communication(SymmetricMemoryAllReduce(), CommunicationOptions()).pickled()
    with LocalPool((Device("cuda", 0), Device("cuda", 0)), setup=SETUP, communication=by) as pool:
        pool.start()
        # One GPU reaches its own memory, which `reaches` is not asked for.
        near = "strategy.cross_device_ops._asked = strategy.cross_device_ops.member, None\n"
        ran = run_cell(pool, near + ON_ONE_GPU + "shared = sorted(map(str, ops._shared.rooms))\n", timeout=120)
        assert ran.report.clean, told(ran)
        assert ran.values[0]["sums"] == ran.values[1]["sums"]
        assert ran.values[0]["shared"] == ["torch.bfloat16", "torch.float32"]
        # After an error the group is another one, and so is the memory.
        failed = run_cell(pool, "if replica_id == 0: raise ValueError('mine')\nstrategy.reduce('sum', one)")
        assert failed.report.failures[0].type_name == "ValueError"
        assert pool.mend() == []
        recover(pool)
        ran = run_cell(pool, near + ON_ONE_GPU, timeout=120)
        assert ran.report.clean, told(ran)
