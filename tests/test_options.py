"""Which cross-device op is taken, what does not fit, and what GPUs would do; the algorithms are under contracts/."""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from driving import run_cell
from made_gpu import Later, MadeGpu, OnMadeGpu, Slow

import mirror_nb as mnb
from mirror_nb.collectives import hierarchical_copy, options, symmetric_memory, topology
from mirror_nb.collectives.base import CrossDeviceOps, Member
from mirror_nb.collectives.gloo import GlooAllReduce
from mirror_nb.collectives.handles import Expanding, Finished, Handle, Reduction, Timing, WorkHandle
from mirror_nb.collectives.hierarchical_copy import HierarchicalCopyAllReduce
from mirror_nb.collectives.nccl import NcclAllReduce
from mirror_nb.collectives.one_device import ReductionToOneDevice
from mirror_nb.collectives.options import Communication, CommunicationOptions
from mirror_nb.collectives.peer_copies import PeerCopies
from mirror_nb.collectives.shared_memory import SharedMemoryAllReduce, needs_shared_memory
from mirror_nb.collectives.symmetric_memory import SymmetricMemoryAllReduce
from mirror_nb.devices import Device
from mirror_nb.errors import DeviceError, ReplicaError, TransferError, UsageError
from mirror_nb.pool.local import LocalPool
from mirror_nb.strategies.mirrored import SETUP
from mirror_nb.values import ReduceOp

CPUS = (Device("cpu", 0), Device("cpu", 1))
GPUS = (Device("cuda", 0), Device("cuda", 1))


# Choosing


def test_cpu_replicas_reduce_through_shared_memory_by_default():
    assert isinstance(options.default_for(CPUS), SharedMemoryAllReduce)
    assert options.fitting(CPUS) == ["shared_memory", "hierarchical_copy", "one_device", "gloo"]


def test_gpus_reduce_by_nccl_by_default(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert isinstance(options.default_for(GPUS), NcclAllReduce)


def test_an_op_is_found_by_its_name():
    assert isinstance(options.named("Shared-Memory"), SharedMemoryAllReduce)
    assert isinstance(options.named("SharedMemoryAllReduce()"), SharedMemoryAllReduce)
    with pytest.raises(UsageError, match=r"no cross-device op 'ncl'; there are: nccl, shared_memory"):
        options.named("ncl")
    with pytest.raises(UsageError, match="there are: shared_memory, hierarchical_copy, one_device, gloo, auto"):
        options.named("ncl", CPUS)


def test_an_op_that_cannot_work_says_why_and_which_can():
    with pytest.raises(DeviceError) as caught:
        options.fitted(NcclAllReduce(), CPUS)
    assert str(caught.value) == (
        "NcclAllReduce cannot work on cpu:0, cpu:1: it is for GPUs; these can: shared_memory, hierarchical_copy, "
        "one_device, gloo, auto"
    )
    fits = SharedMemoryAllReduce()
    assert options.fitted(fits, CPUS) is fits


def test_what_does_not_fit_is_told_apart(monkeypatch):
    assert SharedMemoryAllReduce().unfit_for(GPUS) == "it is for CPU replicas"
    assert "none of them" in ReductionToOneDevice("cpu:7").unfit_for(CPUS)
    assert ReductionToOneDevice("CPU:1").unfit_for(CPUS) is None
    assert ReductionToOneDevice(1).unfit_for(CPUS) is None
    assert SymmetricMemoryAllReduce().unfit_for(GPUS[:1]) == "it needs at least two GPUs"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "no NCCL" in NcclAllReduce().unfit_for(GPUS)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert "no gloo" in GlooAllReduce().unfit_for(CPUS)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert needs_shared_memory(CPUS) == "it needs Linux, this is darwin"


def test_gpus_that_do_not_reach_each_other_have_no_symmetric_memory(monkeypatch):
    monkeypatch.setattr(symmetric_memory, "reaches", lambda a, b: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = SymmetricMemoryAllReduce().unfit_for(GPUS)
    assert "cuda:0 and cuda:1 do not reach" in found or "has no symmetric memory" in found
    chosen = Communication(SymmetricMemoryAllReduce(), CommunicationOptions(compression="bf16"))
    with pytest.raises(DeviceError, match="cuda:0 and cuda:1 do not reach each other's memory; take NcclAllReduce"):
        chosen.bind(Member(0, 2, torch.device("cuda:0"), Carrying()))


def test_replicas_that_refuse_another_op_go_on_with_the_one_before(monkeypatch):
    monkeypatch.setattr(symmetric_memory, "reaches", lambda a, b: False)
    member = Member(0, 2, torch.device("cuda:0"), Carrying())
    before, refused = (
        Communication(ops, CommunicationOptions()) for ops in (NcclAllReduce(), SymmetricMemoryAllReduce())
    )
    before.bind(member)
    with pytest.raises(DeviceError, match="do not reach"):
        refused.take_over(before, member)
    assert before.ops.member.num_replicas == 2
    with pytest.raises(ReplicaError, match="bound to none"):
        _ = refused.ops.member


def test_the_controller_does_not_ask_which_gpus_reach_each_other(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(symmetric_memory, "reaches", lambda *gpus: asked.append(gpus))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    reason = SymmetricMemoryAllReduce().unfit_for(GPUS)
    assert reason is None or "has no symmetric memory" in reason
    assert not asked


def test_memory_that_gpus_map_and_that_is_made_in_inference_mode_is_written_to_outside(monkeypatch):
    torchs = SimpleNamespace(
        empty=lambda numel, dtype, device: torch.empty(numel, dtype=dtype),
        _SymmetricMemory=SimpleNamespace(rendezvous=lambda room, group: None),
    )
    monkeypatch.setattr(symmetric_memory, "importlib", SimpleNamespace(import_module=lambda name: torchs))
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    ops, shared = SymmetricMemoryAllReduce(64), symmetric_memory._Shared(None, "")
    ops.bind(Member(0, 1, torch.device("cuda:0"), Carrying()))
    with torch.inference_mode():
        room, _ = ops._room(shared, torch.float32)
    assert room.fill_(1.0).sum() == 16


def test_gpus_that_are_not_visible_here_are_not_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: pytest.fail("Invalid device id"))
    assert topology.groups_of(GPUS) == ((0,), (1,))


def test_which_gpus_are_near_is_asked_once_for_a_group(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(hierarchical_copy, "groups_of", lambda gpus: asked.append(gpus) or ((0,),))
    ops = HierarchicalCopyAllReduce()
    for _ in range(2):
        ops.bind(Member(0, 1, torch.device("cuda:0"), Carrying()))
        for _ in range(3):
            ops.start(ReduceOp.SUM, torch.ones(2).as_subclass(OnGpu))
    assert len(asked) == 2
    again = pickle.loads(pickle.dumps(ops))
    assert again.num_packs == 1
    with pytest.raises(ReplicaError, match="bound to none"):
        again.start(ReduceOp.SUM, torch.ones(2))


@pytest.mark.parametrize("make", [NcclAllReduce, HierarchicalCopyAllReduce, SymmetricMemoryAllReduce])
def test_where_replicas_share_a_gpu_gloo_carries_what_they_reduce(make):
    ops, group = make(), Carrying()
    group.carrier = "gloo"
    ops.bind(Member(0, 2, torch.device("cuda:0"), group))
    flat = torch.arange(4.0).as_subclass(OnGpu)
    ops.all_reduce("mean", flat).wait()
    assert group.given == [torch.device("cpu")]
    assert flat.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_whole_numbers_that_nccl_does_not_add_travel_as_others(dtype):
    class Doubling(CrossDeviceOps):
        def start(self, op, flat):
            assert flat.dtype in (torch.int32, torch.int64)
            flat.mul_(2)

        def unfit_for(self, devices):
            return None

    ops = Doubling()
    ops.bind(Member(0, 2, torch.device("cuda:0"), Carrying()))
    flat = torch.tensor([1, 30_000], dtype=dtype)
    reduction = ops.all_reduce("sum", flat)
    reduction.wait()
    assert flat.tolist() == [2, 60_000 - (65_536 if dtype is torch.int16 else 0)]
    flat.zero_()
    # What has been waited for is left alone.
    reduction.wait()
    assert not flat.any()


@pytest.mark.parametrize("make", [NcclAllReduce, HierarchicalCopyAllReduce])
def test_packs_are_counted_from_0_on_as_in_tensorflow(make):
    for wrong in (-1, "2", 1.5):
        with pytest.raises(UsageError, match=f"`num_packs` is {wrong!r}"):
            make(num_packs=wrong)
    for right in (0, 3):
        assert make(num_packs=right).num_packs == right


def test_what_accumulates_is_a_function():
    with pytest.raises(UsageError, match="`accumulation_fn` must be a function of a list of tensors, not 'max'"):
        ReductionToOneDevice(accumulation_fn="max")


@pytest.mark.parametrize("wrong", [-1, 1e6, "2M"])
def test_a_crossover_is_a_whole_number_of_bytes(wrong):
    with pytest.raises(UsageError, match=f"`crossover_bytes` is {wrong!r}"):
        SymmetricMemoryAllReduce(crossover_bytes=wrong)


# Options


def test_communication_options_have_tensorflows_defaults():
    assert CommunicationOptions() == CommunicationOptions(25 * 2**20, None, "auto")
    assert CommunicationOptions(bytes_per_pack=0).bytes_per_pack == 25 * 2**20
    assert CommunicationOptions(implementation="NCCL").implementation == "nccl"


@pytest.mark.parametrize(("given", "taken"), [(None, GlooAllReduce), ("one_device", ReductionToOneDevice)])
def test_the_options_op_is_taken_where_none_is_given(given, taken):
    asked = CommunicationOptions(implementation="gloo")
    assert type(options.chosen(given, asked, CPUS).ops) is taken


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bytes_per_pack": -1}, "`bytes_per_pack` is -1"),
        ({"bytes_per_pack": None}, "`bytes_per_pack` is None; it must be a number, 0 for the default"),
        ({"bytes_per_pack": math.nan}, "`bytes_per_pack` is nan"),
        ({"bytes_per_pack": True}, "`bytes_per_pack` is True; it must be a number, 0 for the default"),
        ({"bytes_per_pack": 0.5}, "`bytes_per_pack` is 0.5; it is a whole number of bytes from 0 on"),
        ({"timeout_seconds": True}, "`timeout_seconds` is True; it must be a number or None"),
        ({"timeout_seconds": 0}, "`timeout_seconds` is 0"),
        ({"timeout_seconds": "1"}, "`timeout_seconds` is '1'"),
        ({"timeout_seconds": math.inf}, "`timeout_seconds` is inf; it must be above 0 and at most 1e.09, or None"),
        ({"timeout_seconds": 1e12}, "`timeout_seconds` is 1000000000000.0; it must be above 0"),
        ({"implementation": "carrier pigeon"}, "no cross-device op 'carrier pigeon'"),
        ({"implementation": GlooAllReduce}, "an op itself goes into `cross_device_ops`"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(UsageError, match=said):
        CommunicationOptions(**wrong)


def test_numbers_of_numpy_are_numbers():
    options = CommunicationOptions(bytes_per_pack=np.int64(4096), timeout_seconds=np.float32(2))
    assert (options.bytes_per_pack, options.timeout_seconds) == (4096, 2)
    # What waits for gloo's works takes Python's own alone.
    assert timedelta(seconds=options.timeout_seconds).seconds == 2
    assert type(options.bytes_per_pack) is int
    assert HierarchicalCopyAllReduce(np.int64(2)).num_packs == 2


class Locked(CrossDeviceOps):
    """Holds what cannot travel."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def start(self, op, flat):
        return dist.all_reduce(flat, async_op=True)

    def unfit_for(self, devices):
        return None


def test_an_op_that_cannot_travel_is_refused_where_it_is_chosen():
    said = (
        r"`cross_device_ops` is Locked\(lock=.*, which cannot be sent to the replicas \(.*lock.*\); make in `start` "
        "what cannot travel, a lock say, and where one has made it already, assign a new Locked"
    )
    with pytest.raises(TransferError, match=said):
        mnb.MirroredStrategy(["cpu:0", "cpu:1"], Locked())
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with pytest.raises(TransferError, match=said):
            strategy.cross_device_ops = Locked()
        assert strategy.run(lambda: 1) is not None


def test_a_long_time_is_waited_with(replicas):
    ran = run_cell(
        replicas(2),
        """
import torch
import mirror_nb as mnb
options = mnb.CommunicationOptions(timeout_seconds=1e9)
from mirror_nb.collectives.base import Member
import torch.distributed as dist
sums = []
for made in (mnb.GlooAllReduce(), mnb.SharedMemoryAllReduce()):
    made.bind(Member(replica_id, num_replicas, device, dist.group.WORLD, timeout_seconds=options.timeout_seconds))
    flat = torch.ones(100_000)
    made.all_reduce("sum", flat).wait()
    sums.append(float(made.reduce("sum", flat[:1], 0) or 0))
    made.unbind()
""",
    )
    assert ran.report.clean, ran.report.failures
    assert ran.values[0]["sums"] == [4.0, 4.0]


# Topology


@pytest.mark.parametrize(
    ("n", "nodes", "groups"),
    [
        (1, 1, ((0,),)),
        (2, 1, ((0,), (1,))),
        (4, 1, ((0, 1), (2, 3))),
        (5, 1, ((0, 1, 2), (3, 4))),
        (4, 2, ((0, 1), (2, 3))),
        (6, 3, ((0, 1), (2, 3), (4, 5))),
        (2, 4, ((0,), (1,))),
    ],
)
def test_cpu_replicas_are_grouped_by_numa_nodes_else_in_halves(monkeypatch, n, nodes, groups):
    monkeypatch.setattr(topology, "numa_nodes", lambda: nodes)
    assert topology.groups_of([Device("cpu", i) for i in range(n)]) == groups


def test_gpus_that_reach_each_other_are_one_group(monkeypatch):
    monkeypatch.setattr(topology, "reaches", lambda a, b: a.index // 2 == b.index // 2)
    assert topology.groups_of([Device("cuda", i) for i in range(6)]) == ((0, 1), (2, 3), (4, 5))
    monkeypatch.setattr(topology, "reaches", lambda a, b: True)
    assert topology.groups_of([Device("cuda", i) for i in range(4)]) == ((0, 1), (2, 3))


def test_numa_nodes_with_processors_are_counted(tmp_path: Path):
    for name, cpus in (("node0", "0-3\n"), ("node1", "4-7\n"), ("node2", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
    assert topology.numa_nodes(tmp_path) == 2
    assert topology.numa_nodes(tmp_path / "nothing") == 1


# Timings of what a GPU does later


def test_a_timing_is_recorded_when_the_device_has_ended_and_in_order():
    timings: list[Timing] = []
    ops = Slow()
    ops.bind(Member(0, 2, torch.device("meta"), SimpleNamespace(shared=None), timings.append))
    for bucket in range(2):
        ops.all_reduce("sum", torch.ones(4), bucket=bucket).wait()
    assert timings == []
    ops.handles[0].over = True
    ops.record_ended()
    assert [(t.bucket, t.started, t.ended) for t in timings] == [(0, 5, 8)]
    ops.handles[1].over = True
    ops.all_reduce("sum", torch.ones(4))
    assert [t.bucket for t in timings] == [0, 1]


def test_waiting_twice_records_once():
    timings: list[Timing] = []
    reduction = Reduction(Finished(), timings.append, 4, -1, 0, deque())
    reduction.wait()
    reduction.wait()
    assert len(timings) == 1


def test_waiting_twice_puts_a_sum_of_shorter_numbers_back_once():
    flat = torch.zeros(2)
    handle = Expanding(Finished(), torch.ones(2, dtype=torch.bfloat16), flat)
    handle.wait()
    assert flat.tolist() == [1.0, 1.0]
    flat.mul_(3)
    handle.wait()
    assert flat.tolist() == [3.0, 3.0]


def test_nccl_tells_the_time_to_microseconds_after_an_hour_too(monkeypatch):
    gpu = MadeGpu(monkeypatch)
    ops = NcclAllReduce()
    ops.bind(Member(0, 2, torch.device("cuda:0"), gpu))
    flat = SimpleNamespace(device=torch.device("cuda:0"), record_stream=lambda stream: None)
    flat.chunk = lambda packs: [flat]
    ops.start(ReduceOp.MEAN, flat)
    for _ in range(3):
        gpu.now += 1_234_567_891_011
        began = gpu.now
        started, ended = ops.start(ReduceOp.MEAN, flat).times()
        assert abs(started - began) < 2_000
        assert abs(ended - started - 123_000) < 1_000


def test_a_collective_is_timed_by_the_anchor_that_it_began_with(monkeypatch):
    gpu = MadeGpu(monkeypatch)
    ops = NcclAllReduce()
    ops.bind(Member(0, 2, torch.device("cuda:0"), gpu))
    flat = SimpleNamespace(device=torch.device("cuda:0"), record_stream=lambda stream: None)
    flat.chunk = lambda packs: [flat]
    began = gpu.now
    handle = ops.start(ReduceOp.MEAN, flat)
    gpu.now += 60_000_000_000
    ops.start(ReduceOp.MEAN, flat)
    assert handle.times() == (began, began + 123_000)


class Enqueueing(CrossDeviceOps):
    """An op that enqueues 80 µs of work on the current stream of a made GPU."""

    def __init__(self, gpu: MadeGpu, handle: Handle | None = None) -> None:
        self.gpu = gpu
        self.handle = handle

    def start(self, op, flat):
        self.gpu.lag += 80_000
        return self.handle

    def unfit_for(self, devices):
        return None


def on_made_gpu(gpu: MadeGpu, ops: CrossDeviceOps, group: object) -> list[Timing]:
    timings: list[Timing] = []
    ops.bind(Member(0, 2, torch.device("cuda:0"), group, timings.append))
    gpu.lag = 5_000_000
    return timings


def test_what_an_op_enqueues_on_a_gpu_is_timed_there_and_not_where_it_is_asked_for(monkeypatch):
    gpu = MadeGpu(monkeypatch)
    ops = Enqueueing(gpu)
    timings = on_made_gpu(gpu, ops, gpu)
    asked = gpu.now
    reduction = ops.all_reduce("sum", torch.ones(4).as_subclass(OnMadeGpu), bucket=3, serial=7)
    # The rest of the backward pass.
    gpu.lag += 1_000_000
    reduction.wait()
    ops.record_ended()
    assert timings == []
    gpu.now += 5_080_000
    ops.record_ended()
    (timing,) = timings
    assert (timing.op, timing.nbytes, timing.bucket, timing.serial) == ("all_reduce", 16, 3, 7)
    assert (timing.queued, timing.blocking) == (asked, True)
    assert abs(timing.started - asked - 5_000_000) < 10
    assert abs(timing.ended - timing.started - 80_000) < 10


def test_another_stream_that_waits_for_what_an_op_enqueued_has_the_result(monkeypatch):
    gpu = MadeGpu(monkeypatch)
    ops = Enqueueing(gpu)
    on_made_gpu(gpu, ops, gpu)
    reduction = ops.all_reduce("sum", torch.ones(4).as_subclass(OnMadeGpu))
    # One that has nothing to do.
    gpu.lag = 0
    reduction.wait()
    assert gpu.lag == 5_080_000


def test_a_work_of_torchs_on_a_gpu_ends_where_the_stream_has_waited_for_it(monkeypatch):
    gpu = MadeGpu(monkeypatch)

    def wait() -> None:
        gpu.lag += 20_000

    ops = Enqueueing(gpu, WorkHandle([SimpleNamespace(wait=wait, is_completed=lambda: True)]))
    timings = on_made_gpu(gpu, ops, gpu)
    reduction = ops.all_reduce("sum", torch.ones(4).as_subclass(OnMadeGpu))
    gpu.lag += 1_000_000
    reduction.wait()
    gpu.now += 10_000_000
    ops.record_ended()
    assert not timings[0].blocking
    assert abs(timings[0].ended - timings[0].started - 1_100_000) < 10


def test_a_wait_for_several_works_goes_on_where_it_was_interrupted_and_ends_once():
    seen: list[str] = []

    def waits(name: str, *raised: BaseException) -> Any:
        left = list(raised)

        def wait() -> None:
            if left:
                raise left.pop()
            seen.append(name)

        return SimpleNamespace(wait=wait, is_completed=lambda: not left)

    handle = WorkHandle([waits("a"), waits("b", KeyboardInterrupt()), waits("c")], lambda: seen.append("then"))
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert seen == ["a"]
    for _ in range(2):
        handle.wait()
        assert (seen, handle.done()) == (["a", "b", "c", "then"], True)


def test_a_handle_that_tells_a_gpus_times_is_believed(monkeypatch):
    gpu = MadeGpu(monkeypatch)
    handle = Later()
    ops = Enqueueing(gpu, handle)
    timings = on_made_gpu(gpu, ops, gpu)
    ops.all_reduce("sum", torch.ones(4).as_subclass(OnMadeGpu)).wait()
    handle.over = True
    ops.record_ended()
    assert [(t.started, t.ended) for t in timings] == [(5, 8)]


def test_a_broadcast_on_a_gpu_is_timed_there(monkeypatch):
    gpu = MadeGpu(monkeypatch)

    def wait() -> None:
        gpu.lag += 70_000

    group = SimpleNamespace(shared=None, broadcast=lambda tensors, options: SimpleNamespace(wait=wait))
    ops = Enqueueing(gpu)
    timings = on_made_gpu(gpu, ops, group)
    ops.broadcast(torch.ones(4).as_subclass(OnMadeGpu), 1)
    assert timings == []
    gpu.now += 10_000_000
    ops.record_ended()
    (timing,) = timings
    assert (timing.op, timing.nbytes, timing.bucket, timing.blocking) == ("broadcast", 16, -1, True)
    assert abs(timing.ended - timing.started - 70_000) < 10


def test_what_goes_into_a_graph_of_cudas_is_not_timed_by_its_events(monkeypatch):
    gpu = MadeGpu(monkeypatch)
    ops = Enqueueing(gpu)
    timings = on_made_gpu(gpu, ops, gpu)
    gpu.capturing = True
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: pytest.fail("an event in a graph"))
    ops.all_reduce("sum", torch.ones(4).as_subclass(OnMadeGpu)).wait()
    assert len(timings) == 1


def test_nccl_goes_into_a_graph_of_cudas_behind_steps_that_the_gpu_has_yet_to_finish(monkeypatch):
    gpu = MadeGpu(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    ops = NcclAllReduce()
    timings = on_made_gpu(gpu, ops, gpu)
    flat = torch.ones(4).as_subclass(OnMadeGpu)
    ops.all_reduce("mean", flat, serial=1).wait()
    gpu.capturing = True
    gpu.now += 60_000_000_000
    for serial in (2, 3):
        ops.all_reduce("mean", flat, serial=serial).wait()
    ops.record_ended()
    assert [timing.serial for timing in timings] == [2, 3]
    gpu.capturing = False
    ops.record_ended()
    assert [timing.serial for timing in timings] == [2, 3, 1]


@pytest.mark.gpu
def test_what_an_op_enqueues_on_a_real_gpu_is_timed_there():
    class Sleeping(CrossDeviceOps):
        def start(self, op, flat):
            torch.cuda._sleep(20_000_000)

        def unfit_for(self, devices):
            return None

    timings: list[Timing] = []
    ops, flat = Sleeping(), torch.ones(4, device="cuda:0")
    ops.bind(Member(0, 2, torch.device("cuda:0"), SimpleNamespace(shared=None), timings.append))
    ops.all_reduce("sum", flat).wait()
    torch.cuda.synchronize()
    ops.record_ended()
    timings.clear()
    asked = time.perf_counter_ns()
    # The host is ahead by this one.
    torch.cuda._sleep(20_000_000)
    ops.all_reduce("sum", flat).wait()
    assert timings == []
    torch.cuda.synchronize()
    over = time.perf_counter_ns()
    ops.record_ended()
    (timing,) = timings
    # 20 million cycles are some 10 ms.
    assert asked + 2_000_000 < timing.started < timing.ended - 2_000_000
    assert timing.ended < over + 1_000_000


@pytest.mark.gpu
def test_nccl_reduces_on_its_own_stream_and_tells_the_time(tmp_path):
    # Its thread for diagnosis would listen until this process ends.
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0"})
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        timings: list[Timing] = []
        ops = NcclAllReduce(num_packs=2)
        ops.bind(Member(0, 1, torch.device("cuda:0"), dist.group.WORLD, timings.append))
        tensor = torch.ones(1000, device="cuda:0")
        handle = ops.start(ReduceOp.MEAN, tensor)
        handle.wait()
        torch.cuda.synchronize()
        assert (tensor == 1).all()
        started, ended = handle.times()
        assert started <= ended
    finally:
        dist.destroy_process_group()


ON_ONE_GPU = """
import torch
from torch import nn
torch.cuda.synchronize()
summed = torch.full((1000,), float(replica_id + 1), device=device)
strategy.cross_device_ops.all_reduce('sum', summed).wait()
summed = summed.cpu()
model = nn.Linear(3, 1)
model.load_state_dict(state)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(batch.chunk(num_replicas)[replica_id].to(device)).square().mean().backward()
    optimizer.step()
on = model.weight.device.type
trained = [parameter.detach().cpu() for parameter in model.parameters()]
"""


@pytest.mark.gpu
@pytest.mark.parametrize("ops", [GlooAllReduce, NcclAllReduce])
def test_two_replicas_on_one_gpu_train_as_one_process_does(ops):
    alone = torch.nn.Linear(3, 1)
    batch = torch.arange(12.0).view(4, 3) / 10
    names = {"state": {key: value.clone() for key, value in alone.state_dict().items()}, "batch": batch}
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        alone(batch).square().mean().backward()
        optimizer.step()
    by = Communication(ops(), CommunicationOptions()).pickled()
    with LocalPool((Device("cuda", 0), Device("cuda", 0)), setup=SETUP, communication=by) as pool:
        pool.start()
        ran = run_cell(pool, ON_ONE_GPU, names, timeout=120)
        assert ran.report.clean, ran.report.failures
        for values in ran.values.values():
            assert values["on"] == "cuda"
            assert (values["summed"] == 3).all()
            for mine, expected in zip(values["trained"], alone.parameters(), strict=True):
                torch.testing.assert_close(mine, expected.detach())


@pytest.mark.gpu
@pytest.mark.parametrize("ops", [NcclAllReduce, HierarchicalCopyAllReduce, SymmetricMemoryAllReduce, PeerCopies])
def test_several_gpus_reduce_alike(ops):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    devices = tuple(Device("cuda", i) for i in range(torch.cuda.device_count()))
    reason = ops().unfit_for(devices)
    if reason is not None:
        pytest.skip(reason)
    with LocalPool(devices, setup=SETUP) as pool:
        pool.start()
        ran = run_cell(
            pool,
            """
import torch, torch.distributed as dist
from mirror_nb.collectives.base import Member
ops.bind(Member(replica_id, num_replicas, device, dist.group.WORLD))
for numel in (1, 1000, 1_000_003):
    x = torch.full((numel,), float(replica_id), device=device)
    ops.all_reduce("mean", x).wait()
    assert (x == (num_replicas - 1) / 2).all()
""",
            {"ops": ops()},
            timeout=120,
        )
    assert ran.report.clean, ran.report.failures


@pytest.mark.parametrize(
    "wrong", [{"timeout_seconds": "3"}, {"bytes_per_pack": "25"}, {"bytes_per_pack": float("inf")}]
)
def test_what_is_no_number_is_refused_as_such(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        CommunicationOptions(**wrong)


def test_the_default_is_found_without_asking_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: pytest.fail("CUDA would begin here"))
    assert type(options.default_for((Device("cuda", 0), Device("cuda", 1)))).__name__ == "NcclAllReduce"


def test_the_device_that_reduces_is_found_among_those_of_the_strategy():
    devices = (Device("cpu", 3), Device("cpu", 2))
    op = ReductionToOneDevice("cpu:2")
    placed = options.chosen(op, None, devices).ops
    assert (placed._root, placed.reduce_to_device) == (1, "cpu:2")
    # The same op for another strategy.
    assert options.chosen(op, None, devices[::-1]).ops._root == 0
    assert options.chosen(ReductionToOneDevice(1), None, devices).ops._root == 1
    assert options.chosen(ReductionToOneDevice(np.int64(1)), None, devices).ops._root == 1
    assert options.chosen(ReductionToOneDevice(), None, devices).ops._root == 0


def test_a_strategy_on_other_devices_reduces_to_the_one_that_is_named():
    def reduced():
        layer = torch.nn.Linear(1, 1)
        for parameter in layer.parameters():
            parameter.data.zero_()
        layer(torch.ones(1, 1)).sum().backward()
        return layer.weight.grad.item()

    ops = ReductionToOneDevice("cpu:3", accumulation_fn=lambda parts: parts[1] * 3)
    with mnb.MirroredStrategy(["cpu:2", "cpu:3"], cross_device_ops=ops) as strategy:
        assert strategy.run(reduced) == 1.5


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, though its memory is the CPU's."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0")

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


class Carrying:
    """A group of two whose peer brings the same; it keeps on what it was given."""

    shared = None

    def __init__(self) -> None:
        self.given: list[torch.device] = []
        self.ended = False

    def carry(self, name: str, label: str, args: Any, kwargs: Any) -> Any:
        ((tensor,), _) = args
        self.given.append(tensor.device)

        def wait(timeout: Any = None) -> None:
            # gloo writes while it is waited for.
            tensor.mul_(2)

        return SimpleNamespace(wait=wait, is_completed=lambda: True)


@pytest.mark.parametrize(("op", "dtype"), [("sum", torch.float32), ("sum", torch.int16), ("mean", torch.float32)])
def test_gloo_reduces_what_is_on_a_gpu_through_the_cpu(op, dtype):
    ops, group = GlooAllReduce(), Carrying()
    ops.bind(Member(0, 2, torch.device("cuda:0"), group))
    flat = torch.arange(4, dtype=dtype).as_subclass(OnGpu)
    ops.all_reduce(op, flat).wait()
    assert group.given == [torch.device("cpu")]
    assert flat.tolist() == [0, 2, 4, 6] if op == "sum" else [0, 1, 2, 3]
