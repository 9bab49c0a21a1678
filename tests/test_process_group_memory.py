"""What the process group sends through shared memory, in three real processes."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from test_process_group import Crew, N, crew, outcome, plain, processes, total
from torch import nn

from mirror_nb.collectives import fabric, process_group
from mirror_nb.errors import PeerFailed, ReplicaError

__all__ = ["crew", "processes"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules[plain.__module__])


def carried(replica_id: int) -> list[str]:
    """Which calls the carrier was asked for from here on."""
    group = dist.group.WORLD
    asked: list[str] = []
    carry = group.carry

    def note(name: str, *rest: Any) -> Any:
        asked.append(name)
        return carry(name, *rest)

    group.carry = note
    return asked


def test_tensors_on_the_cpu_go_through_shared_memory(crew: Crew) -> None:
    def use(replica_id: int) -> tuple[list[str], str]:
        asked = carried(replica_id)
        for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
            dist.all_reduce(torch.ones(3), getattr(dist.ReduceOp, op))
        dist.all_reduce(torch.ones(3, 4), async_op=True).wait()
        dist.broadcast(torch.ones(5), 1)
        dist.reduce(torch.ones(5), 1)
        dist.all_gather([torch.ones(2) for _ in range(N)], torch.ones(2))
        dist.all_gather_into_tensor(torch.ones(2 * N), torch.ones(2))
        dist.barrier()
        del dist.group.WORLD.carry
        return asked, dist.group.WORLD.unshared

    assert crew.call(use) == [([], "")] * N


def test_what_shared_memory_lacks_is_carried_by_gloo(crew: Crew) -> None:
    def use(replica_id: int) -> tuple[list[str], int, bool]:
        asked = carried(replica_id)
        dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.BXOR)
        dist.all_reduce(torch.eye(2).to_sparse())
        with torch.inference_mode():
            dist.all_reduce(torch.ones(3))
        refused = outcome(lambda: dist.all_gather_into_tensor(torch.ones(N, dtype=torch.float64), torch.ones(1)))
        del dist.group.WORLD.carry
        return asked[:3], len(asked), "invalid tensor type" in refused[1]

    assert crew.call(use) == [(["allreduce"] * 3, 4, True)] * N


def test_large_tensors_are_what_gloo_makes_of_them(crew: Crew) -> None:
    def use(replica_id: int) -> None:
        numel = 200_003
        parts = [torch.arange(numel, dtype=torch.float64) % 1000 + r for r in range(N)]
        for op, expected in (
            (dist.ReduceOp.SUM, sum(parts)),
            (dist.ReduceOp.AVG, sum(parts) / N),
            (dist.ReduceOp.MAX, parts[-1]),
            (dist.ReduceOp.MIN, parts[0]),
            (dist.ReduceOp.PRODUCT, parts[0] * parts[1] * parts[2]),
        ):
            tensor = parts[replica_id].clone()
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, expected)
        tensor = parts[replica_id].clone()
        dist.reduce(tensor, 1)
        assert torch.equal(tensor, sum(parts) if replica_id == 1 else parts[replica_id])
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, sum(parts))
        gathered = torch.empty(N, numel, dtype=torch.float64)
        dist.all_gather_into_tensor(gathered, parts[replica_id])
        assert torch.equal(gathered, torch.stack(parts))
        rows = [torch.empty(numel, dtype=torch.float64) for _ in range(N)]
        dist.all_gather(rows, parts[replica_id])
        assert torch.equal(torch.stack(rows), torch.stack(parts))

    crew.call(use)


def test_a_write_is_no_change_to_autograd_as_with_gloo(crew: Crew) -> None:
    def use(replica_id: int) -> bool:
        weight = torch.ones(3, requires_grad=True)
        factor = torch.full((3,), 2.0)
        loss = (weight * factor).sum()
        dist.all_reduce(factor)
        dist.all_reduce(weight)
        loss.backward()
        return weight.grad is not None

    assert crew.call(use) == [True] * N


@pytest.mark.parametrize("op", ["SUM", "BXOR"])
def test_a_work_that_is_left_alone_does_not_hold_the_others_up(crew: Crew, op: str) -> None:
    def use(replica_id: int) -> list[float]:
        tensors = [torch.full((n,), 1 << replica_id) for n in (5, 300_000)]
        works = [dist.all_reduce(tensor, getattr(dist.ReduceOp, op), async_op=True) for tensor in tensors]
        if replica_id == 0:
            # Waits for the peers, who wait for it to say so.
            for peer in (1, 2):
                dist.recv(torch.zeros(1), peer)
        else:
            for work in works:
                work.wait()
            dist.send(torch.zeros(1), 0)
        for work in works:
            work.wait()
        return [tensor.double().mean().item() for tensor in tensors]

    assert crew.call(use) == [[7.0, 7.0]] * N


@pytest.mark.parametrize("op", ["SUM", "BXOR"])
def test_a_future_comes_true_though_nobody_waits_through_python(crew: Crew, op: str) -> None:
    """Of what goes through shared memory, and of what gloo carries."""

    def use(replica_id: int) -> list[float]:
        tensor = torch.full((300_000,), 1 << replica_id)
        if replica_id == 2:
            # Long after the others have given up waiting in place.
            for peer in (0, 1):
                dist.recv(torch.zeros(1), peer)
        work = dist.all_reduce(tensor, getattr(dist.ReduceOp, op), async_op=True)
        future = work.get_future()
        if replica_id != 2:
            dist.send(torch.zeros(1), 2)
        return [value.double().mean().item() for value in future.wait()]

    assert crew.call(use) == [[7.0]] * N


@pytest.mark.parametrize("op", ["SUM", "BXOR"])
def test_an_abort_ends_a_future(crew: Crew, op: str) -> None:
    def use(replica_id: int) -> None:
        if replica_id == 0:
            work = dist.all_reduce(torch.zeros(3, dtype=torch.int64), getattr(dist.ReduceOp, op), async_op=True)
            work.get_future().wait()

    crew.start(use)
    crew.result(1), crew.result(2)
    crew.until_waiting(0)
    crew.abort(PeerFailed("replica 2 died"))
    kind, message, _ = crew.error(0).args
    assert kind in ("PeerFailed", "RuntimeError")
    assert "replica 2 died" in message


@pytest.mark.parametrize("numel", [3, 300_000])
def test_different_collectives_are_an_error_on_every_replica_and_no_hang(crew: Crew, numel: int) -> None:
    def use(replica_id: int) -> tuple[str, str]:
        tensor = torch.ones(numel)
        if replica_id == 1:
            return outcome(lambda: dist.broadcast(tensor, 0))
        return outcome(lambda: dist.all_reduce(tensor))

    for kind, message in crew.call(use):
        assert kind == "UsageError"
        assert f"replica 0: all_reduce (SUM) of float32[{numel}], replica 1: broadcast from replica 0 of" in message
    assert crew.call(total) == [6.0] * N


def test_an_interrupt_in_the_middle_of_a_large_one_frees_the_peers(crew: Crew) -> None:
    def use(replica_id: int) -> None:
        if replica_id == 0:
            group = dist.group.WORLD

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            group.shared._fold = interrupted
        dist.all_reduce(torch.ones(300_000))

    crew.start(use)
    assert crew.error(0).args[0] == "KeyboardInterrupt"
    for member in (1, 2):
        kind, message, _ = crew.error(member).args
        assert kind == "PeerFailed"
        assert "replica 0 has left" in message
    crew.form()
    assert crew.call(total) == [6.0] * N


def test_the_memory_of_a_group_goes_with_it(crew: Crew) -> None:
    def mapped(_: int) -> int:
        # Errors of earlier tests hold frames.
        gc.collect()
        with open("/proc/self/maps") as maps:
            return sum("memfd:mirror_nb" in line for line in maps)

    def descriptors(_: int) -> int:
        found = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                found += "memfd:mirror_nb" in os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue
        return found

    crew.call(total)
    assert crew.call(mapped) == [1] * N
    for _ in range(3):
        crew.form()
        crew.call(total)
    assert crew.call(mapped) == [1] * N
    assert crew.call(descriptors) == [0] * N
    crew.call(lambda _: process_group.dissolve())
    assert crew.call(mapped) == [0] * N


def test_without_memory_to_share_gloo_carries_everything_and_the_reason_is_kept(processes: Crew) -> None:
    def refuse(_: int) -> None:
        def create(nbytes: int, kind: str) -> Any:
            raise ReplicaError(f"no {kind} here")

        sys.modules["__main__"].__dict__["kept_by_a_test"] = fabric.Segment.create
        fabric.Segment.create = staticmethod(create)

    def use(replica_id: int) -> tuple[float, str]:
        return total(replica_id), dist.group.WORLD.unshared

    def restore(_: int) -> None:
        fabric.Segment.create = staticmethod(sys.modules["__main__"].__dict__.pop("kept_by_a_test"))

    processes.call(refuse)
    processes.form()
    assert processes.call(use) == [(6.0, "the replicas cannot share memory: no memfd here; no file here")] * N
    processes.call(restore)
    processes.form()
    assert processes.call(use) == [(6.0, "")] * N
    processes.call(lambda _: process_group.dissolve())


def test_a_default_device_of_the_user_does_not_lead_astray(crew: Crew) -> None:
    def use(replica_id: int) -> float:
        with torch.device("meta"):
            tensor = torch.full((70_000,), replica_id + 1.0, device="cpu")
            dist.all_reduce(tensor)
            dist.barrier()
        return tensor.mean().item()

    assert crew.call(use) == [6.0] * N


def test_ddp_sums_in_the_same_order_whatever_its_buckets(crew: Crew) -> None:
    def step(replica_id: int) -> list[bytes]:
        found = []
        for cap in (0.0001, 25):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 2))
            inputs = torch.randn(N, 16, 40)
            ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap)
            for _ in range(2):
                ddp.zero_grad()
                ddp(inputs[replica_id]).square().sum().backward()
            found.append(b"".join(parameter.grad.numpy().tobytes() for parameter in model.parameters()))
        return found

    first = crew.call(step)[0]
    assert first[0] == first[1]


def test_what_was_first_reduced_in_inference_mode_is_reduced_outside_too(crew: Crew) -> None:
    def use(replica_id: int) -> list[float]:
        # Of sizes and dtypes that no other test has: memory is cut for them anew.
        tensors = [torch.ones(n, dtype=dtype) for n in (29, 311_111) for dtype in (torch.float32, torch.bfloat16)]
        with torch.inference_mode():
            for tensor in tensors:
                dist.all_reduce(tensor)
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        for tensor in tensors:
            dist.all_reduce(tensor)
        return [tensor.float().mean().item() for tensor in tensors]

    assert crew.call(use) == [[float(N**3)] * 4] * N
