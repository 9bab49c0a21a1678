"""The interruptible process group, in three real processes that meet at a store which this process hosts."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from mirror_nb.collectives import interruptible, process_group, waiting
from mirror_nb.collectives.base import Member
from mirror_nb.collectives.interruptible import InterruptibleGroup, Opened
from mirror_nb.errors import PeerFailed, ReplicaTimeout, UsageError
from mirror_nb.messages import Rendezvous

DEADLINE = 30.0
N = 3

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Failed(Exception):
    """What a function raised in a member: (type's name, message, traceback)."""


def serve(channel: Connection) -> None:
    """A member: the control thread takes messages, the main thread runs functions."""
    torch.set_num_threads(1)
    calls: queue.Queue[tuple[int, bytes] | None] = queue.Queue()
    interruptible = threading.Event()

    def raise_interrupt(*_: object) -> None:
        if interruptible.is_set():
            interruptible.clear()
            raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, raise_interrupt)
    process_group.install()
    threading.Thread(target=control, args=(channel, calls), daemon=True).start()
    while (message := calls.get()) is not None:
        number, body = message
        try:
            function, args = pickle.loads(body)
            interruptible.set()
            answer = (number, "value", function(*args))
            interruptible.clear()
        except BaseException as error:
            interruptible.clear()
            answer = (number, "error", (type(error).__name__, str(error), traceback.format_exc()))
            # Frames hold tensors, works and groups.
            error.__traceback__ = None
        channel.send_bytes(cloudpickle.dumps(answer))
    os._exit(0)


def control(channel: Connection, calls: queue.Queue[tuple[int, bytes] | None]) -> None:
    while True:
        try:
            kind, number, body = channel.recv()
        except EOFError:
            os._exit(1)
        if kind == "call":
            calls.put((number, body))
        elif kind == "end":
            calls.put(None)
        elif kind == "abort":
            process_group.abort(pickle.loads(body))
        elif kind == "waits":
            deadline = monotonic() + DEADLINE
            while not waiting.state.live and monotonic() < deadline:
                threading.Event().wait(0.002)
            channel.send_bytes(cloudpickle.dumps((number, "value", bool(waiting.state.live))))


class Crew:
    """Three members, and the store where they meet."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            "127.0.0.1",
            self.port,
            None,
            True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.generation = 0
        self.number = 0
        self.awaited = [0] * N
        self.stuck = False
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        self.processes, self.channels = [], []
        for _ in range(N):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.channels.append(mine)

    def start(self, function: Callable[..., Any], *args: Any, on: int | None = None) -> None:
        """Begin `function(replica_id, *args)` on all members, or on one."""
        for member in range(N) if on is None else [on]:
            body = cloudpickle.dumps((function, (member, *args)))
            self.awaited[member] = self.send(member, "call", body)

    def send(self, member: int, kind: str, body: bytes = b"") -> int:
        self.number += 1
        self.channels[member].send((kind, self.number, body))
        return self.number

    def result(self, member: int) -> Any:
        return self.answer(member, self.awaited[member])

    def answer(self, member: int, number: int) -> Any:
        """The answer to a message; answers to older ones, that a failed test left, are dropped."""
        deadline = monotonic() + DEADLINE
        while True:
            found = wait([self.channels[member], self.processes[member].sentinel], deadline - monotonic())
            if self.channels[member] not in found:
                self.stuck = True
                code = self.processes[member].exitcode
                raise TimeoutError(f"member {member} gave no answer in {DEADLINE} s (exit code {code})")
            answered, kind, value = pickle.loads(self.channels[member].recv_bytes())
            if answered == number and kind == "error":
                raise Failed(*value)
            if answered == number:
                return value

    def results(self) -> list[Any]:
        return [self.result(member) for member in range(N)]

    def error(self, member: int) -> Failed:
        try:
            value = self.result(member)
        except Failed as failed:
            return failed
        raise AssertionError(f"member {member} raised nothing and gave {value!r}")

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(function, *args)
        return self.results()

    def form(self, timeout_seconds: float = 20.0) -> None:
        if self.stuck:
            pytest.fail("a member is stuck or gone since an earlier test")
        self.generation += 1
        self.call(form, self.port, self.generation, timeout_seconds)

    def until_waiting(self, member: int) -> None:
        assert self.answer(member, self.send(member, "waits"))

    def abort(self, error: BaseException) -> None:
        for member in range(N):
            self.send(member, "abort", cloudpickle.dumps(error))

    def interrupt(self, member: int) -> None:
        os.kill(self.processes[member].pid, signal.SIGUSR1)

    def close(self) -> None:
        for member, process in enumerate(self.processes):
            if process.is_alive():
                self.send(member, "end")
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        # It listens as long as it is there.
        del self.store


def form(replica_id: int, port: int, generation: int, timeout_seconds: float) -> None:
    process_group.form(Rendezvous("127.0.0.1", port, generation, replica_id, N, timeout_seconds), torch.device("cpu"))


@pytest.fixture(scope="module")
def processes() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture
def crew(processes: Crew) -> Iterator[Crew]:
    processes.form()
    yield processes
    # Frees what a failed test left waiting.
    processes.abort(PeerFailed("the test is over"))
    processes.call(lambda _: process_group.dissolve())


# What it must do as gloo does


def outcomes(replica_id: int) -> dict[str, Any]:
    """What each collective of torch.distributed gives on this replica: tensors, or the error it raises."""
    import torch.distributed._functional_collectives as functional

    me = float(replica_id)

    def all_reduce(op: Any) -> torch.Tensor:
        tensor = torch.arange(6.0).reshape(2, 3) + me
        dist.all_reduce(tensor, op)
        return tensor

    def broadcast() -> torch.Tensor:
        tensor = torch.full((3,), me)
        dist.broadcast(tensor, 1)
        return tensor

    def reduce() -> torch.Tensor | None:
        tensor = torch.full((3,), me + 1)
        dist.reduce(tensor, 2)
        return tensor if replica_id == 2 else None

    def all_gather() -> list[torch.Tensor]:
        tensors = [torch.zeros(2) for _ in range(N)]
        dist.all_gather(tensors, torch.full((2,), me))
        return tensors

    def all_gather_into_tensor() -> torch.Tensor:
        out = torch.zeros(2 * N)
        dist.all_gather_into_tensor(out, torch.full((2,), me))
        return out

    def gather() -> list[torch.Tensor] | None:
        tensors = [torch.zeros(2) for _ in range(N)] if replica_id == 0 else None
        dist.gather(torch.full((2,), me), tensors, 0)
        return tensors

    def scatter() -> torch.Tensor:
        out = torch.zeros(2)
        parts = [torch.full((2,), float(i)) for i in range(N)] if replica_id == 0 else None
        dist.scatter(out, parts, 0)
        return out

    def reduce_scatter() -> torch.Tensor:
        out = torch.zeros(2)
        dist.reduce_scatter(out, [torch.full((2,), me + i) for i in range(N)])
        return out

    def reduce_scatter_tensor(op: Any) -> torch.Tensor:
        out = torch.zeros(2)
        dist.reduce_scatter_tensor(out, torch.arange(2.0 * N) + me, op)
        return out

    def all_to_all() -> list[torch.Tensor]:
        out = [torch.zeros(1) for _ in range(N)]
        dist.all_to_all(out, [torch.tensor([10 * me + i]) for i in range(N)])
        return out

    def all_to_all_single() -> torch.Tensor:
        out = torch.zeros(N)
        dist.all_to_all_single(out, torch.arange(float(N)) + 10 * me)
        return out

    def ring() -> torch.Tensor:
        out = torch.zeros(2)
        sent = dist.isend(torch.full((2,), me), (replica_id + 1) % N)
        received = dist.irecv(out, (replica_id - 1) % N)
        sent.wait(), received.wait()
        return out

    def batched_ring() -> torch.Tensor:
        out = torch.zeros(2)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((2,), me), (replica_id + 1) % N),
                dist.P2POp(dist.irecv, out, (replica_id - 1) % N),
            ]
        )
        for work in works:
            work.wait()
        return out

    def from_anyone() -> tuple[list[int], torch.Tensor] | None:
        if replica_id:
            dist.send(torch.ones(1), 0)
            return None
        out = torch.zeros(1)
        return sorted(dist.recv(out) for _ in range(N - 1)), out

    def coalesced() -> list[torch.Tensor]:
        tensors = [torch.full((2,), me), torch.full((3,), me)]
        dist.all_reduce_coalesced(tensors)
        return tensors

    def asynchronous() -> list[torch.Tensor]:
        tensors = [torch.full((2,), me + i) for i in range(5)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        assert all(work.is_completed() and work.is_success() for work in works)
        return tensors

    def in_a_future() -> list[torch.Tensor]:
        work = dist.all_reduce(torch.full((2,), me), async_op=True)
        return work.get_future().then(lambda future: [t / N for t in future.value()]).wait()

    def all_gather_object() -> list[Any]:
        out = [None] * N
        dist.all_gather_object(out, {"from": replica_id})
        return out

    def broadcast_object_list() -> list[Any]:
        out = [f"from {replica_id}", replica_id]
        dist.broadcast_object_list(out, 2)
        return out

    def gather_object() -> list[Any] | None:
        out = [None] * N if replica_id == 1 else None
        dist.gather_object(("of", replica_id), out, 1)
        return out

    def scatter_object_list() -> list[Any]:
        out = [None]
        dist.scatter_object_list(out, ["a", "b", "c"] if replica_id == 0 else None, 0)
        return out

    world = dist.group.WORLD
    cases: dict[str, Callable[[], Any]] = {
        "sum": lambda: all_reduce(dist.ReduceOp.SUM),
        "max": lambda: all_reduce(dist.ReduceOp.MAX),
        "average": lambda: all_reduce(dist.ReduceOp.AVG),
        "broadcast": broadcast,
        "reduce": reduce,
        "all_gather": all_gather,
        "all_gather_into_tensor": all_gather_into_tensor,
        "gather": gather,
        "scatter": scatter,
        "reduce_scatter": reduce_scatter,
        "reduce_scatter_tensor": lambda: reduce_scatter_tensor(dist.ReduceOp.SUM),
        "reduce_scatter_tensor, average": lambda: reduce_scatter_tensor(dist.ReduceOp.AVG),
        "all_to_all": all_to_all,
        "all_to_all_single": all_to_all_single,
        "ring": ring,
        "batched ring": batched_ring,
        "from anyone": from_anyone,
        "coalesced": coalesced,
        "asynchronous": asynchronous,
        "in a future": in_a_future,
        "barrier": lambda: dist.barrier(),
        "monitored_barrier": lambda: dist.monitored_barrier(),
        "all_gather_object": all_gather_object,
        "broadcast_object_list": broadcast_object_list,
        "gather_object": gather_object,
        "scatter_object_list": scatter_object_list,
        "functional all_reduce": lambda: functional.all_reduce(torch.full((2,), me), "sum", world) + 0,
        "functional all_gather": lambda: functional.all_gather_tensor(torch.full((2,), me), 0, world) + 0,
        "functional reduce_scatter": lambda: (
            functional.reduce_scatter_tensor(torch.arange(2.0 * N), "sum", 0, world) + 0
        ),
        "functional all_to_all": lambda: (
            functional.all_to_all_single(torch.arange(float(N)) + me, None, None, world) + 0
        ),
        "functional broadcast": lambda: functional.broadcast(torch.full((2,), me), 1, world) + 0,
        "wrong shape": lambda: dist.all_gather([torch.zeros(3)] * N, torch.zeros(2)),
        "sparse max": lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX),
        "name": lambda: (dist.get_backend(), dist.get_world_size(), dist.get_rank()),
        "broadcast from nobody": lambda: dist.broadcast(torch.ones(2), N),
        "reduce to nobody": lambda: dist.reduce(torch.ones(2), -1),
        "sum after that": lambda: all_reduce(dist.ReduceOp.SUM),
        "devices": lambda: sorted(str(device) for device in world._device_types),
    }
    return {name: outcome(case) for name, case in cases.items()}


def outcome(case: Callable[[], Any]) -> Any:
    try:
        return plain(case())
    except Exception as error:
        return type(error).__name__, str(error)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_each_collective_gives_what_gloo_gives(crew: Crew) -> None:
    ours = crew.call(outcomes)

    def use_gloo_itself(replica_id: int, port: int) -> dict[str, Any]:
        dist.destroy_process_group()
        store = dist.PrefixStore("gloo itself", dist.TCPStore("127.0.0.1", port, None, False))
        dist.init_process_group("gloo", store=store, rank=replica_id, world_size=N)
        assert type(dist.group.WORLD) is dist.ProcessGroup, "a user's own store must go to torch unchanged"
        return outcomes(replica_id)

    assert ours == crew.call(use_gloo_itself, crew.port)
    assert ours[0]["sum"] == [[3.0, 6.0, 9.0], [12.0, 15.0, 18.0]]


def test_columns_are_gathered_as_rows_are(crew: Crew) -> None:
    def use(replica_id: int) -> list[list[float]]:
        table = torch.zeros(2, N, 2)
        dist.all_gather(list(table.unbind(1)), torch.full((2, 2), replica_id + 1.0))
        return table[..., 1].tolist()

    assert crew.call(use) == [[[1.0, 2.0, 3.0]] * 2] * N


def test_a_batch_of_sends_for_nccl_is_handed_to_torchs_own_group(crew: Crew) -> None:
    def ring(replica_id: int) -> tuple[list[float], bool]:
        out = torch.zeros(2)
        operations = [
            dist.P2POp(dist.isend, torch.full((2,), float(replica_id)), (replica_id + 1) % N),
            dist.P2POp(dist.irecv, out, (replica_id - 1) % N),
        ]
        inner = [operation.group.inner_operation(operation) for operation in operations]
        for work in dist.batch_isend_irecv(inner):
            work.wait()
        # What torch looks at before it gives NCCL a batch as one.
        return out.tolist(), type(inner[0].group) is dist.ProcessGroup

    assert crew.call(ring) == [([2.0, 2.0], True), ([0.0, 0.0], True), ([1.0, 1.0], True)]


def test_a_ddp_step_gives_the_mean_of_the_gradients(crew: Crew) -> None:
    def step(replica_id: int) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        inputs = torch.randn(N, 5, 4)
        each = [torch.autograd.grad(model(batch).square().sum(), list(model.parameters())) for batch in inputs]
        expected = [torch.stack(gradients).mean(0) for gradients in zip(*each, strict=True)]
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        for _ in range(3):
            ddp.zero_grad()
            ddp(inputs[replica_id]).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        return [parameter.grad.sum().item() for parameter in model.parameters()]

    first, *others = crew.call(step)
    assert others == [first] * (N - 1)


@pytest.mark.parametrize("kind", ["FP16_COMPRESS", "ALLREDUCE"])
@pytest.mark.parametrize("subgroup", [False, True], ids=["default group", "subgroup"])
def test_torchs_builtin_communication_hooks_reduce(crew: Crew, kind: str, subgroup: bool) -> None:
    def train(replica_id: int) -> tuple[list[float], bool]:
        group = dist.new_group() if subgroup else None
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=group)
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
        for _ in range(3):
            model.zero_grad()
            (model(torch.ones(1, 2)) * (replica_id + 1 / 3)).sum().backward()
        gradient = model.module.weight.grad
        return gradient[0].tolist(), bool((gradient == gradient.half().float()).all())

    for gradient, halved in crew.call(train):
        assert gradient == pytest.approx([4 / 3] * 2, rel=2e-3)
        assert halved == (kind == "FP16_COMPRESS")


def test_uneven_inputs_under_join_end_on_every_replica(crew: Crew) -> None:
    def step(replica_id: int) -> float:
        from torch.distributed.algorithms.join import Join

        torch.manual_seed(0)
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
        with Join([ddp]):
            for _ in range(replica_id + 1):
                ddp(torch.ones(1, 2)).sum().backward()
        return ddp.module.weight.grad.sum().item()

    assert crew.call(step)


def test_uneven_inputs_may_be_averaged_over_the_replicas_that_still_have_some(crew: Crew) -> None:
    def step(replica_id: int) -> float:
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(replica_id + 1):
                ddp.zero_grad()
                ddp(torch.ones(1, 2)).sum().backward()
        return ddp.module.weight.grad.sum().item()

    assert crew.call(step) == [2.0] * N


def test_device_mesh_and_fully_shard_train_as_one_device_does(crew: Crew) -> None:
    def step(replica_id: int) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        inputs = torch.randn(N, 4, 6)
        reference = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        reference.load_state_dict(model.state_dict())
        (sum(reference(batch).square().sum() for batch in inputs) / N).backward()
        mesh = dist.init_device_mesh("cpu", (N,))
        fully_shard(model, mesh=mesh)
        model(inputs[replica_id]).square().sum().backward()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
        assert isinstance(mesh.get_group(), InterruptibleGroup)

    crew.call(step)


def test_a_mesh_of_two_dimensions_has_groups_of_ours(crew: Crew) -> None:
    def kinds(_: int) -> tuple[str, list[int]]:
        mesh = dist.init_device_mesh("cpu", (1, N), mesh_dim_names=("outer", "inner"))
        group = mesh.get_group("outer")
        return type(group).__name__, [group.size(), mesh.get_group("inner").size()]

    assert crew.call(kinds) == [("InterruptibleGroup", [1, N])] * N


def test_a_subgroup_is_one_of_ours_whatever_backend_was_named(crew: Crew) -> None:
    def reduce_in_subgroups(replica_id: int) -> list[tuple[float, str, str, float]]:
        seen = []
        for named in (None, "gloo", "cpu:gloo,cuda:nccl"):
            group = dist.new_group([0, 2], backend=named)
            if replica_id != 1:
                tensor = torch.tensor([replica_id + 1.0])
                dist.all_reduce(tensor, group=group)
                backend = f"{dist.get_backend(group)} ({dist.get_backend_config(group)})"
                seen.append((tensor.item(), type(group).__name__, backend, group._seconds))
        return seen

    expected = [(4.0, "InterruptibleGroup", "gloo (cpu:gloo,cuda:gloo)", 20.0)] * 3
    assert crew.call(reduce_in_subgroups) == [expected, [], expected]


def test_a_subgroup_waits_as_long_as_it_was_told_or_as_the_default_group(crew: Crew) -> None:
    def use(_: int) -> list[float]:
        times: list[dict[str, Any]] = [{"timeout": timedelta(seconds=7)}, {}]
        groups: list[Any] = [dist.new_group(list(range(N)), **time) for time in times]
        return [group._seconds for group in groups]

    assert crew.call(use) == [[7.0, 20.0]] * N


def test_accelerate_finds_the_replicas(crew: Crew) -> None:
    pytest.importorskip("accelerate")

    def use(replica_id: int) -> tuple[int, float]:
        os.environ.update(
            RANK=str(replica_id),
            LOCAL_RANK=str(replica_id),
            WORLD_SIZE=str(N),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
            ACCELERATE_USE_CPU="true",
        )
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        dist.destroy_process_group()
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(2, 1))
        accelerator.backward(model(torch.full((1, 2), replica_id + 1.0)).sum())
        accelerator.wait_for_everyone()
        gathered = accelerator.gather(torch.tensor([float(replica_id)]))
        assert gathered.tolist() == [0.0, 1.0, 2.0]
        assert isinstance(dist.group.WORLD, InterruptibleGroup)
        return accelerator.num_processes, model.module.weight.grad.sum().item()

    assert crew.call(use) == [(N, 4.0)] * N


def test_a_cell_may_destroy_the_group_and_make_its_own_twice(crew: Crew) -> None:
    def use(replica_id: int) -> list[float]:
        hook = sys.excepthook
        sums = []
        for arguments in (("gloo",), ("GLOO",), (), ("gloo", "env://", timedelta(seconds=10), N, replica_id)):
            dist.destroy_process_group()
            assert not dist.is_initialized()
            dist.init_process_group(*arguments)
            tensor = torch.tensor([replica_id + 1.0])
            dist.all_reduce(tensor)
            sums.append(tensor.item())
            assert isinstance(dist.group.WORLD, InterruptibleGroup)
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")
        assert sys.excepthook is hook
        return sums

    assert crew.call(use) == [[6.0] * 4] * N


def test_a_group_of_one_is_not_taken_for_that_of_all(crew: Crew) -> None:
    def use(_: int) -> tuple[str, str]:
        return outcome(lambda: dist.init_process_group("gloo", rank=0, world_size=1))

    for kind, message in crew.call(use):
        assert kind == ValueError.__name__
        assert "twice" in message


def test_a_group_of_its_own_that_one_replica_began_alone_does_not_part_it_from_the_others(crew: Crew) -> None:
    def own(replica_id: int) -> float:
        dist.destroy_process_group()
        dist.init_process_group()
        return total(replica_id)

    crew.start(own, on=0)
    crew.until_waiting(0)
    crew.abort(PeerFailed("replica 1 died"))
    assert crew.error(0).args[:2] == ("PeerFailed", "replica 1 died")
    crew.form(timeout_seconds=5.0)
    assert crew.call(own) == [6.0] * N


@pytest.mark.parametrize("address", ["env://", "tcp://127.0.0.1:1"])
def test_what_a_script_for_torchrun_begins_with_takes_the_group_that_is_there(crew: Crew, address: str) -> None:
    def use(replica_id: int) -> tuple[bool, float, float]:
        group: Any = dist.group.WORLD
        dist.init_process_group("gloo", address, timedelta(seconds=7), N, replica_id)
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")
        same, seconds = dist.group.WORLD is group, group._seconds
        # What gloo carries would end at its own time else.
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
        dist.destroy_process_group()
        dist.init_process_group("gloo", address, rank=replica_id, world_size=N)
        return same, seconds, total(replica_id)

    assert crew.call(use) == [(True, 7.0, 6.0)] * N


# Ends that can be had at any time


def all_reduce_alone(replica_id: int) -> None:
    dist.all_reduce(torch.zeros(3, 4))


def test_a_coalescing_that_an_error_has_left_takes_no_collective_of_the_next_request(crew: Crew) -> None:
    def leave(_: int) -> None:
        from torch.distributed.distributed_c10d import _coalescing_manager

        with contextlib.suppress(KeyError), _coalescing_manager():
            raise KeyError("in the middle")

    def go_on(replica_id: int) -> float:
        process_group.mark()
        return total(replica_id)

    crew.call(leave)
    assert crew.call(go_on) == [6.0] * N


def test_an_interrupt_ends_a_wait_in_all_reduce(crew: Crew) -> None:
    crew.start(all_reduce_alone, on=0)
    crew.until_waiting(0)
    crew.interrupt(0)
    assert crew.error(0).args[0] == "KeyboardInterrupt"


def test_an_abort_ends_a_wait_in_all_reduce_with_its_error(crew: Crew) -> None:
    crew.start(all_reduce_alone, on=0)
    crew.until_waiting(0)
    crew.abort(PeerFailed("replica 2 died"))
    assert crew.error(0).args[:2] == ("PeerFailed", "replica 2 died")


def waiting_calls() -> dict[str, Callable[[int], Any]]:
    def receive(_: int) -> None:
        dist.recv(torch.zeros(2), 1)

    def barrier(_: int) -> None:
        dist.monitored_barrier(timeout=timedelta(seconds=DEADLINE))

    def objects(_: int) -> None:
        dist.all_gather_object([None] * N, "mine")

    def new_group(_: int) -> None:
        dist.new_group([0, 1])

    def functional(_: int) -> None:
        import torch.distributed._functional_collectives as collectives

        print(collectives.all_gather_tensor(torch.zeros(2), 0, dist.group.WORLD))

    return {
        "receive": receive,
        "monitored barrier": barrier,
        "objects": objects,
        "new group": new_group,
        "functional": functional,
    }


@pytest.mark.parametrize("name", waiting_calls())
def test_an_abort_ends_every_kind_of_wait(crew: Crew, name: str) -> None:
    crew.start(waiting_calls()[name], on=0)
    crew.until_waiting(0)
    crew.abort(PeerFailed("replica 2 died"))
    kind, message, _ = crew.error(0).args
    assert kind in ("PeerFailed", "RuntimeError")
    assert "replica 2 died" in message


def test_a_monitored_barrier_meets_though_another_thread_begins_what_was_before_it(crew: Crew) -> None:
    class Emptied(deque[Any]):
        """What waits to begin, where the last of it is begun as soon as somebody has seen that there is one."""

        def __bool__(self) -> bool:
            return True

    def meet(_: int) -> None:
        group: Any = dist.group.WORLD
        before, group._announced = group._announced, Emptied()
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=DEADLINE))
        finally:
            group._announced = before

    crew.call(meet)


def test_a_monitored_barrier_comes_behind_what_was_begun_before_it_and_waits_for_others(crew: Crew) -> None:
    def use(replica_id: int) -> list[float]:
        taken = torch.zeros(N)
        if replica_id == 2:
            dist.recv(torch.zeros(1), 1)
        work = dist.all_to_all_single(taken, torch.full((N,), replica_id + 1.0), async_op=True)
        if replica_id == 1:
            dist.send(torch.zeros(1), 2)
        dist.monitored_barrier(timeout=timedelta(seconds=5))
        work.wait()
        return taken.tolist()

    assert crew.call(use) == [[1.0, 2.0, 3.0]] * N


def test_an_abort_ends_a_collective_in_a_subgroup(crew: Crew) -> None:
    def wait_in_subgroup(replica_id: int) -> None:
        group = dist.new_group([0, 1])
        if replica_id == 0:
            dist.broadcast(torch.zeros(2), 1, group=group)

    crew.start(wait_in_subgroup)
    crew.result(1), crew.result(2)
    crew.until_waiting(0)
    crew.abort(PeerFailed("replica 1 was interrupted"))
    assert crew.error(0).args[:2] == ("PeerFailed", "replica 1 was interrupted")


def test_an_abort_ends_a_ddp_backward_that_waits(crew: Crew) -> None:
    def step(replica_id: int) -> None:
        torch.manual_seed(0)
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        loss = ddp(torch.ones(1, 4)).sum()
        if replica_id != 1:
            loss.backward()

    crew.start(step)
    crew.result(1)
    crew.until_waiting(0), crew.until_waiting(2)
    crew.abort(PeerFailed("replica 1 raised ValueError"))
    for member in (0, 2):
        kind, message, _ = crew.error(member).args
        assert kind in ("PeerFailed", "RuntimeError")
        assert "replica 1 raised ValueError" in message


def test_after_an_abort_collectives_raise_until_the_group_is_formed_again(crew: Crew) -> None:
    crew.abort(PeerFailed("replica 0 died"))

    def use(_: int) -> list[Any]:
        first = outcome(lambda: dist.barrier())
        process_group.dissolve()
        return [first, outcome(lambda: dist.init_process_group("gloo")), dist.is_initialized()]

    crew.call(lambda _: process_group.abort(PeerFailed("replica 0 died")))
    died = ("PeerFailed", "replica 0 died")
    assert crew.call(use) == [[died, died, False]] * N
    crew.form()
    assert crew.call(total) == [6.0] * N


def total(replica_id: int) -> float:
    tensor = torch.tensor([replica_id + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def test_each_raise_after_an_abort_has_an_error_of_its_own(crew: Crew) -> None:
    def use(_: int) -> bool:
        given = PeerFailed("replica 0 died")
        process_group.abort(given)
        errors = []
        for _ in range(2):
            with pytest.raises(PeerFailed) as caught:
                dist.barrier()
            errors.append(caught.value)
        return errors[0] is not errors[1] and given.__traceback__ is None

    assert all(crew.call(use))


def test_what_begins_just_after_an_abort_is_refused() -> None:
    state = waiting.State()
    state.abort(PeerFailed("replica 0 died"))
    with pytest.raises(PeerFailed, match="replica 0 died"):
        state.begin(waiting.Operation("barrier", (), DEADLINE))
    assert not state.live


def test_what_an_abort_has_ended_stays_ended_though_its_result_comes_after_all() -> None:
    operation = waiting.Operation("all_reduce", (), DEADLINE)
    operation.fail(PeerFailed("replica 0 died"))
    operation.finish(1)
    with pytest.raises(PeerFailed, match="replica 0 died"):
        operation.wait()


def test_a_group_formed_again_fifty_times_is_right_and_leaves_nothing(crew: Crew) -> None:
    def resources(_: int) -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def settled(most: list[tuple[int, int]]) -> bool:
        """Whether threads and descriptors come back to what they were; groups are let go in threads."""
        deadline = monotonic() + DEADLINE
        while monotonic() < deadline:
            now = crew.call(resources)
            if all(n[0] <= m[0] and n[1] <= m[1] for n, m in zip(now, most, strict=True)):
                return True
        return False

    for cycle in range(50):
        stuck = cycle % N
        crew.start(all_reduce_alone, on=stuck)
        crew.until_waiting(stuck)
        crew.abort(PeerFailed(f"cycle {cycle}"))
        assert crew.error(stuck).args[1] == f"cycle {cycle}"
        crew.form()
        assert crew.call(total) == [6.0] * N
        if cycle == 4 and sys.platform == "linux":
            # A thread or a descriptor for every group that is left would be more than these few.
            most = [(threads + 12, files + 12) for threads, files in crew.call(resources)]
    if sys.platform == "linux":
        assert settled(most)


def test_a_group_formed_again_counts_anew(crew: Crew) -> None:
    def use(replica_id: int) -> None:
        # A collective that gloo carries, too.
        dist.all_to_all_single(torch.zeros(N), torch.ones(N))
        if replica_id < 2:
            (dist.recv if replica_id else dist.send)(torch.zeros(1), 1 - replica_id)

    def counted(_: int) -> list[Any]:
        return [(group.begun, group.between) for group in process_group.standing()]

    crew.call(use)
    assert crew.call(counted)[0] == [((("all_to_all_single", 1),), (("send", 1, 1),))]
    crew.form()
    assert crew.call(counted) == [[((), ())]] * N


def test_a_ddp_model_goes_on_after_the_group_was_formed_again(crew: Crew) -> None:
    def build(_: int) -> None:
        torch.manual_seed(0)
        kept = sys.modules["__main__"].__dict__.setdefault("kept_by_a_test", {})
        kept["ddp"] = nn.parallel.DistributedDataParallel(nn.Linear(4, 2, bias=False))

    def step(replica_id: int) -> float:
        ddp = sys.modules["__main__"].__dict__["kept_by_a_test"]["ddp"]
        ddp.zero_grad()
        ddp(torch.full((1, 4), replica_id + 1.0)).sum().backward()
        return ddp.module.weight.grad.sum().item()

    crew.call(build)
    assert crew.call(step) == [16.0] * N
    crew.abort(PeerFailed("interrupted"))
    crew.form()
    assert crew.call(step) == [16.0] * N
    crew.call(lambda _: sys.modules["__main__"].__dict__.pop("kept_by_a_test").clear())


def test_a_subgroup_that_is_destroyed_is_asked_no_more(crew: Crew) -> None:
    def use(_: int) -> list[int]:
        group = dist.new_group(list(range(N)))
        asked = [len(process_group.standing())]
        dist.destroy_process_group(group)
        return [*asked, len(process_group.standing())]

    assert crew.call(use) == [[2, 1]] * N


def test_a_subgroup_of_an_older_generation_says_that_it_is_gone(crew: Crew) -> None:
    def use(_: int) -> tuple[str, str]:
        group = dist.new_group(list(range(N)))
        process_group.dissolve()
        return outcome(lambda: group.barrier())

    for kind, message in crew.call(use):
        assert kind == UsageError.__name__
        assert "no longer there" in message


def test_what_torch_records_of_a_failure_takes_no_place_of_what_a_subgroup_says_that_is_gone(crew: Crew) -> None:
    def use(_: int) -> tuple[str, str]:
        group = dist.new_group(list(range(N)))
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        return outcome(lambda: dist.all_reduce(torch.ones(1), group=group))

    for kind, message in crew.call(use):
        assert kind == UsageError.__name__
        assert "no longer there" in message


def test_dissolving_with_work_in_flight_does_not_wait_for_it(crew: Crew) -> None:
    def use(replica_id: int) -> str:
        if replica_id:
            return ""
        work = dist.all_reduce(torch.zeros(2), async_op=True)
        process_group.dissolve()
        assert not dist.is_initialized()
        with pytest.raises(PeerFailed) as caught:
            work.wait()
        return str(caught.value)

    assert "dissolved" in crew.call(use)[0]


def test_dissolving_a_group_that_torch_made_does_not_wait_for_it_either(crew: Crew, tmp_path: Path) -> None:
    def use(replica_id: int) -> bool:
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "store"), N)
        dist.init_process_group("gloo", store=store, rank=replica_id, world_size=N)
        if replica_id == 0:
            dist.all_reduce(torch.zeros(2), async_op=True)
            process_group.dissolve()
        return dist.is_initialized()

    assert crew.call(use) == [False, True, True]


def test_a_cell_that_destroys_the_group_with_work_in_flight_goes_on(crew: Crew) -> None:
    def use(replica_id: int) -> str:
        if replica_id:
            return ""
        work = dist.all_reduce(torch.zeros(2), async_op=True)
        dist.destroy_process_group()
        with pytest.raises(PeerFailed) as caught:
            work.wait()
        return str(caught.value)

    assert "destroyed" in crew.call(use)[0]


def test_a_timeout_names_the_collective_and_what_to_look_for(processes: Crew) -> None:
    processes.form(timeout_seconds=1.0)
    processes.start(all_reduce_alone, on=0)
    kind, message, _ = processes.error(0).args
    processes.call(lambda _: process_group.dissolve())
    assert kind == ReplicaTimeout.__name__
    assert "all_reduce of float32[3, 4] did not end within 1 s" in message
    assert "every replica runs the same collectives" in message


@pytest.mark.parametrize(("all_ranks", "late"), [(False, "Rank 1"), (True, "Ranks 1, 2")])
def test_a_monitored_barrier_names_those_that_did_not_come(processes: Crew, all_ranks: bool, late: str) -> None:
    def barrier(_: int) -> None:
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=all_ranks)

    processes.form()
    processes.start(barrier, on=0)
    kind, message, _ = processes.error(0).args
    processes.call(lambda _: process_group.dissolve())
    assert kind == ReplicaTimeout.__name__
    assert f"monitored_barrier: [Rank 0]: {late} failed to pass monitoredBarrier in 1000 ms; see that" in message


def test_a_wait_with_a_time_of_its_own_may_be_waited_for_again(crew: Crew) -> None:
    def use(replica_id: int) -> tuple[float, float]:
        tensor, received = torch.tensor([replica_id + 1.0]), torch.zeros(1)
        if replica_id == 0:
            work = dist.all_reduce(tensor, async_op=True)
            through_gloo = dist.irecv(received, 1)
            for late in (work, through_gloo):
                with pytest.raises(ReplicaTimeout, match=r"within 0\.01 s"):
                    late.wait(timedelta(seconds=0.01))
            dist.send(torch.zeros(1), 1)
            dist.send(torch.zeros(1), 2)
            work.wait()
            through_gloo.wait()
        else:
            dist.recv(torch.zeros(1), 0)
            dist.all_reduce(tensor)
        if replica_id == 1:
            dist.send(torch.ones(1), 0)
        return tensor.item(), received.item()

    assert crew.call(use) == [(6.0, 1.0), (6.0, 0.0), (6.0, 0.0)]


def test_what_a_future_stands_for_is_told_among_the_waits(crew: Crew) -> None:
    def use(replica_id: int) -> list[str]:
        told: list[str] = []
        if replica_id == 0:
            future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
            told = [wait.collective for group in process_group.standing() for wait in group.waits]
            dist.send(torch.zeros(1), 1)
            dist.send(torch.zeros(1), 2)
            future.wait()
        else:
            dist.recv(torch.zeros(1), 0)
            dist.all_reduce(torch.ones(2))
        return told

    assert crew.call(use) == [["all_reduce of float32[2]"], [], []]


def test_a_time_that_holds_for_a_while_is_no_longer_than_the_groups_and_gone_after_an_error(crew: Crew) -> None:
    def use(_: int) -> list[float]:
        group: Any = dist.group.WORLD
        seconds = [group._seconds]
        for limit in (2.0, 1e6):
            with contextlib.suppress(KeyError), group.within(limit):
                seconds.append(group._seconds)
                raise KeyError
            seconds.append(group._seconds)
        return seconds

    assert crew.call(use) == [[20.0, 2.0, 20.0, 20.0, 20.0]] * N


def test_forming_without_all_replicas_says_how_many_were_meant(processes: Crew) -> None:
    processes.generation += 1
    processes.start(form, processes.port, processes.generation, 1.0, on=0)
    kind, message, _ = processes.error(0).args
    assert kind == ReplicaTimeout.__name__
    assert "forming a process group of 3 replicas" in message


def test_an_abort_ends_the_forming_of_a_group_and_the_next_one_forms(processes: Crew) -> None:
    processes.generation += 1
    processes.start(form, processes.port, processes.generation, DEADLINE, on=0)
    processes.until_waiting(0)
    processes.abort(PeerFailed("replica 1 died"))
    assert processes.error(0).args[:2] == ("PeerFailed", "replica 1 died")
    processes.form()
    assert processes.call(total) == [6.0] * N


def test_a_replica_that_leaves_is_told_of_at_once(crew: Crew) -> None:
    crew.start(all_reduce_alone, on=0)
    crew.until_waiting(0)
    crew.start(lambda _: process_group.dissolve(), on=1)
    crew.start(lambda _: process_group.dissolve(), on=2)
    crew.result(1), crew.result(2)
    kind, message, _ = crew.error(0).args
    assert kind == PeerFailed.__name__
    assert "all_reduce of float32[3, 4] failed: a peer may have left" in message


IMPOSSIBLE: dict[str, tuple[Callable[[], Any], str]] = {
    "a mean of whole numbers": (
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG),
        "all_reduce of int64[3]: the mean of torch.int64 is no torch.int64; convert it first: tensor.float()",
    ),
    "a scattered mean of whole numbers": (
        lambda: dist.reduce_scatter_tensor(
            torch.ones(1, dtype=torch.int64),
            torch.ones(dist.get_world_size(), dtype=torch.int64),
            dist.ReduceOp.AVG,
        ),
        "the mean of torch.int64 is no torch.int64",
    ),
    "bits of numbers that are not whole": (
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
        "all_reduce of float32[3]: Cannot use ReduceOp.BAND with non-integral dtype; use another operation",
    ),
    "NCCL's own operation": (
        lambda: dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(2.0)),
        "Cannot use ReduceOp.PREMUL_SUM with Gloo; use another operation",
    ),
    "the largest of complex numbers": (
        lambda: dist.reduce(torch.ones(3, dtype=torch.complex64), 0, dist.ReduceOp.MAX),
        "reduce of complex64[3]: gloo does not do this with torch.complex64; convert it first",
    ),
    "a scalar, of which gloo looks at the first dimension": (
        lambda: dist.reduce_scatter_tensor(torch.zeros(()), torch.zeros(N)),
        "reduce_scatter_tensor of float32[] and float32[3]: gloo takes no scalar here; pass tensor.view(1)",
    ),
    "writing outside of inference mode into what was made inside": (
        lambda: dist.reduce_scatter_tensor(torch.inference_mode()(torch.zeros)(1), torch.zeros(N)),
        "gloo writes into no tensor made in inference mode; pass tensor.clone()",
    ),
    "writing into what requires a gradient, where one is taken": (
        lambda: dist.reduce_scatter_tensor(torch.zeros(1, requires_grad=True), torch.zeros(N)),
        "gloo writes into no tensor that requires a gradient here; run it in torch.no_grad()",
    ),
    "sizes that are not those of the tensors": (
        lambda: dist.all_to_all_single(torch.zeros(2 * N), torch.zeros(2 * N), [1] * N, [1] * N),
        "Split sizes doesn't match total dim 0 size",
    ),
    "sizes that are not those of the tensor that is sent": (
        lambda: dist.all_to_all_single(torch.zeros(N), torch.zeros(2 * N), [1] * N, [1] * N),
        "Split sizes doesn't match total dim 0 size",
    ),
    "sizes for another number of replicas": (
        lambda: dist.all_to_all_single(torch.zeros(2 * N), torch.zeros(2 * N), None, [2 * N]),
        "Number of tensor splits not equal to group size",
    ),
    "what cannot be cut evenly": (
        # Between two replicas gloo cuts so through the middle of an element.
        lambda: dist.all_to_all_single(torch.zeros(4, 2), torch.zeros(4, 2)),
        "the 8 elements of a tensor of shape (4, 2) are no 3 equal parts, one for each replica; pass output",
    ),
    "an output whose rows do not lie one after the other": (
        lambda: dist.all_to_all_single(torch.zeros(2, N).t(), torch.zeros(N, 2)),
        "lies in memory in another order than the output with strides (1, 3), and gloo goes by that; pass",
    ),
    "the same with sizes": (
        lambda: dist.all_to_all_single(torch.zeros(2, N).t(), torch.zeros(N, 2), [1] * N, [1] * N),
        "lies in memory in another order than the output with strides (1, 3), and gloo goes by that; pass",
    ),
    "rows of a dimension that the output does not have": (
        lambda: dist.reduce_scatter_tensor(torch.zeros(1), torch.zeros(N, 1)),
        "reduce_scatter_tensor of float32[1] and float32[3, 1]: output with shape [1] doesn't match the broadcast",
    ),
    "a mean of short complex numbers": (
        lambda: dist.reduce(torch.ones(3, dtype=torch.complex32), 0, dist.ReduceOp.AVG),
        "reduce of complex32[3]: gloo does not do this with torch.complex32; convert it first",
    ),
}


@pytest.mark.parametrize("form", ["a slice", "one that is expanded"])
def test_what_is_not_one_piece_of_memory_is_refused_and_nothing_else_is_written_to(crew: Crew, form: str) -> None:
    def ask(replica_id: int, form: str) -> tuple[list[tuple[str, str]], list[float], float]:
        memory = torch.zeros(64)
        shown = memory.view(8, 8)[:, ::2] if form == "a slice" else memory[:4].expand(8, 4)
        same = torch.ones(shown.shape)
        tried = [
            outcome(lambda: dist.all_reduce(shown)),
            outcome(lambda: dist.reduce(shown, 0)),
            outcome(lambda: dist.broadcast(shown, 1)),
            outcome(lambda: dist.scatter(shown, [same] * N if replica_id == 0 else None, 0)),
            outcome(lambda: dist.reduce_scatter(shown, [same] * N)),
            outcome(lambda: dist.all_to_all_single(shown[:N], same[:N])),
        ]
        # What only has another order is carried as it lies.
        turned = torch.ones(2, 3).t()
        dist.all_reduce(turned)
        assert turned.tolist() == [[float(N)] * 2] * 3
        return tried, memory.tolist(), total(replica_id)

    for tried, memory, after in crew.call(ask, form):
        assert (memory, after) == ([0.0] * 64, 6.0)
        for kind, message in tried:
            assert kind == "UsageError"
            assert "is not one piece of memory, which gloo takes it for; pass tensor.contiguous()" in message
        assert tried[0][1].startswith("all_reduce of float32[8, 4]: a tensor of shape (8, 4) with strides ")


@pytest.mark.parametrize("form", ["columns", "turned parts", "turned output", "all turned", "expanded"])
def test_parts_are_scattered_as_they_read_in_whatever_order_they_lie_in_memory(crew: Crew, form: str) -> None:
    def ask(replica_id: int, form: str) -> tuple[bool, float]:
        columns = list(torch.arange(6.0 * N).view(2, 3 * N).chunk(N, 1))
        parts = columns if form == "columns" else [part.contiguous() for part in columns]
        if form in ("turned parts", "all turned"):
            parts = [part.t().contiguous().t() for part in parts]
        if form == "expanded":
            parts = columns = [torch.tensor(float(part)).expand(2, 3) for part in range(N)]
        right = True
        for name, times in (("reduce_scatter", N), ("scatter", 1)):
            output = torch.zeros(3, 2).t() if form in ("turned output", "all turned") else torch.zeros(2, 3)
            getattr(dist, name)(output, parts if name == "reduce_scatter" or replica_id == 0 else None)
            right &= output.equal(columns[replica_id] * times)
        return right, total(replica_id)

    assert crew.call(ask, form) == [(True, 6.0)] * N


@pytest.mark.parametrize("order", ["of a sum", "as it is", "turned"])
@pytest.mark.parametrize("name", ["gather", "all_gather", "all_to_all", "scatter"])
@pytest.mark.filterwarnings("ignore:.*torch.distributed.nn:FutureWarning")
def test_gradients_go_back_through_torchs_differentiable_collectives(crew: Crew, name: str, order: str) -> None:
    def ask(replica_id: int, name: str, order: str) -> list[list[float]]:
        from torch.distributed.nn import functional

        mine = torch.randn(2, 3, requires_grad=True)
        parts = [mine] * N
        gathered = {
            "gather": lambda: functional.gather(mine, 0),
            "all_gather": lambda: functional.all_gather(mine),
            "all_to_all": lambda: functional.all_to_all([torch.zeros(2, 3) for _ in range(N)], parts),
            "scatter": lambda: [functional.scatter(parts, 0)],
        }[name]()
        weights = torch.arange(6.0).view(2, 3)
        losses = {
            "of a sum": lambda part: part.sum(),
            "as it is": lambda part: (part * weights).sum(),
            "turned": lambda part: (part.t() * weights.t().contiguous()).sum(),
        }
        sum(losses[order](part) for part in gathered).backward()
        return mine.grad.tolist()

    weights = torch.ones(2, 3) if order == "of a sum" else torch.arange(6.0).view(2, 3)
    # A gathered tensor is the root's alone to use, and what is scattered is the root's.
    times = {"gather": [1] * N, "all_gather": [N] * N, "all_to_all": [N] * N, "scatter": [N] + [0] * (N - 1)}[name]
    assert crew.call(ask, name, order) == [(weights * each).tolist() for each in times]


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce", "scatter", "reduce_scatter"])
def test_replicas_whose_tensors_lie_in_another_order_in_memory_are_told_so(crew: Crew, name: str) -> None:
    def ask(replica_id: int, name: str) -> tuple[str, str, float]:
        # Of one shape, and neither as usual: gloo sums what lies in the same place.
        order = (2, 0, 1) if replica_id else (1, 2, 0)
        tensor, *parts = (torch.arange(8.0).view(2, 2, 2).permute(order) for _ in range(1 + N))
        given = {
            "all_reduce": (tensor,),
            "broadcast": (tensor, 0),
            "reduce": (tensor, 0),
            "scatter": (tensor, parts if replica_id == 0 else None, 0),
            "reduce_scatter": (tensor, parts),
        }
        return *outcome(lambda: getattr(dist, name)(*given[name])), total(replica_id)

    for kind, message, after in crew.call(ask, name):
        assert (kind, after) == ("UsageError", 6.0), message
        assert message.startswith(f"the replicas ran different collectives: replica 0: {name} ")
        assert "float32[2, 2, 2]" in message
        assert " with strides (2, 1, 4) through gloo, replica 1: " in message
        assert " with strides (1, 4, 2) through gloo, replica 2: " in message


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_gloo_cannot_do_is_a_mistake_and_nobody_is_said_to_have_left(crew: Crew, what: str) -> None:
    def ask(replica_id: int) -> tuple[str, str, float]:
        return *outcome(IMPOSSIBLE[what][0]), total(replica_id)

    for kind, message, after in crew.call(ask):
        # From torch 2.15 on it says some of that itself, before it asks a group.
        assert kind == "UsageError" or message == IMPOSSIBLE[what][1], kind
        assert IMPOSSIBLE[what][1] in message
        assert "\x04" not in message
        assert after == 6.0


def test_a_send_that_gloo_refuses_leaves_nothing_that_is_waited_for(crew: Crew) -> None:
    def ask(replica_id: int) -> tuple[str, int]:
        kind, _ = outcome(lambda: dist.send(torch.zeros(6)[::2], (replica_id + 1) % N))
        return kind, len(waiting.state.live)

    for kind, live in crew.call(ask):
        assert kind in ("RuntimeError", "ValueError")
        assert not live


def test_what_begins_once_all_have_come_may_have_got_a_graph_meanwhile(crew: Crew) -> None:
    def gather(replica_id: int) -> tuple[list[float], list[float]]:
        import torch.distributed._functional_collectives as functional

        mine = torch.full((2,), replica_id + 1.0, requires_grad=True)
        if replica_id:
            dist.recv(torch.zeros(1), 0)
        gathered = functional.all_gather_tensor_autograd(mine, 0, dist.group.WORLD)
        if not replica_id:
            for other in range(1, N):
                dist.send(torch.zeros(1), other)
        (gathered * gathered).sum().backward()
        return gathered.tolist(), mine.grad.tolist()

    for replica_id, (gathered, gradient) in enumerate(crew.call(gather)):
        assert gathered == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        assert gradient == [2.0 * N * (replica_id + 1)] * 2


def test_a_sum_is_written_as_the_modes_of_its_caller_allow(crew: Crew) -> None:
    def scatter(replica_id: int) -> list[list[float]]:
        with torch.inference_mode():
            inside = torch.zeros(2)
            dist.reduce_scatter_tensor(inside, torch.ones(2 * N))
        parameter = nn.Parameter(torch.zeros(2))
        with torch.no_grad():
            dist.reduce_scatter_tensor(parameter, torch.ones(2 * N))
        return [inside.tolist(), parameter.tolist()]

    assert crew.call(scatter) == [[[float(N)] * 2] * 2] * N


# What this build of torch must still have


def test_torch_still_has_the_private_names_that_are_relied_on() -> None:
    world = distributed_c10d._world
    assert all(hasattr(world, name) for name in process_group._WORLD_TABLES)
    assert hasattr(nn.parallel.DistributedDataParallel, "_register_builtin_comm_hook")
    for name in (
        "_new_process_group_helper",
        "_update_default_pg",
        "_unregister_all_process_groups",
    ):
        assert hasattr(distributed_c10d, name), name


def test_torchs_recorder_is_kept_from_our_groups() -> None:
    """From torch 2.15 on it is attached to new groups but of these backends, which raises for a group in Python."""
    program = (
        "from torch.distributed import distributed_c10d\n"
        "recording = vars(distributed_c10d).setdefault('_FR_SELF_RECORDING_BACKENDS', set())\n"
        "from mirror_nb.collectives import process_group\n"
        "process_group.install()\n"
        "print('mirror_nb' in recording)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout == "True\n"


def test_every_communicating_method_of_torchs_group_is_wrapped() -> None:
    ours = vars(InterruptibleGroup)
    communicating = {
        name
        for name in dir(dist.ProcessGroup)
        if "c10d::Work" in (getattr(dist.ProcessGroup, name).__doc__ or "") and not name.startswith("__")
    }
    assert communicating
    # Which torch 2.14 has for groups that it forms itself; ours are formed anew by the pool.
    assert communicating - {"reconfigure"} <= set(ours)


class MadeNccl:
    """NCCL of the test's making, on a GPU that a look finds at work `behind` times; tells what is done with it."""

    def __init__(self, behind: int) -> None:
        self.said: list[str] = []
        self._behind = behind

    def query(self) -> bool:
        self._behind -= 1
        if self._behind == -1:
            self.said.append("is done")
        return self._behind < 0

    def _group_start(self) -> None:
        self.said.append("start")

    def _group_end(self) -> None:
        self.said.append("end")

    def abort(self) -> None:
        self.said.append("abort")

    def shutdown(self) -> None:
        self.said.append("waits for all")


@pytest.mark.parametrize("behind", [3, 10**9], ids=["behind", "stuck"])
@pytest.mark.parametrize("way", ["abort", "dissolve"])
def test_a_gpu_has_time_for_what_all_came_to_and_what_it_waits_for_then_is_ended(
    processes: Crew, way: str, behind: int
) -> None:
    def end(_: int) -> list[str]:
        group: Any = dist.group.WORLD
        nccl = group._nccl = MadeNccl(behind)
        stream = mock.patch.object(torch.cuda, "current_stream", return_value=nccl)
        with stream, mock.patch.object(interruptible, "PATIENCE", 0.1):
            process_group.abort(PeerFailed("replica 1 raised")) if way == "abort" else process_group.dissolve()
            for thread in threading.enumerate():
                if thread.name.startswith(("mirror_nb ends", "mirror_nb lets")):
                    thread.join(DEADLINE)
        return nccl.said

    processes.form()
    said = ["start", "abort", "end"]
    assert processes.call(end) == [said if behind > 3 else ["is done", *said]] * N


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU; its memory is the CPU's, where gloo carries it."""

    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]


def test_after_an_abort_nobody_looks_for_another_way_than_nccl(processes: Crew) -> None:
    def look(replica_id: int) -> tuple[bool, bool, Any]:
        group: Any = dist.group.WORLD
        member = Member(replica_id, N, torch.device("cuda"), group)
        nccl = MadeNccl(0)
        group.adopt(Opened(group._inner, group._store, timedelta(seconds=DEADLINE), nccl, group.shared))
        had = member.has_nccl
        with mock.patch.object(torch.cuda, "current_stream", return_value=nccl):
            process_group.abort(PeerFailed("replica 1 raised"))
        return had, member.has_nccl, outcome(lambda: dist.all_reduce(torch.ones(1).as_subclass(OnGpu)))

    processes.form()
    assert processes.call(look) == [(True, True, ("PeerFailed", "replica 1 raised"))] * N


def test_what_nccl_was_given_counts_and_what_two_send_each_other_counts_for_those_two(processes: Crew) -> None:
    def count(replica_id: int) -> tuple[int, int, tuple[Any, ...]]:
        group: Any = dist.group.WORLD
        group._nccl = object()
        dist.all_reduce(torch.ones(1))
        process_group.mark()
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1).as_subclass(OnGpu), async_op=True).wait()
        both = process_group.begun()
        if replica_id == 0:
            dist.send(torch.ones(1).as_subclass(OnGpu), 1)
        elif replica_id == 1:
            dist.recv(torch.ones(1).as_subclass(OnGpu), 0)
        (standing,) = process_group.standing()
        group._nccl = None
        return both, process_group.begun(), standing.between

    processes.form()
    assert processes.call(count) == [(2, 2, (("send", 1, 1),)), (2, 2, (("recv", 0, 1),)), (2, 2, ())]


@pytest.mark.gpu
def test_cuda_tensors_go_over_nccl(processes: Crew) -> None:
    if not (dist.is_nccl_available() and torch.cuda.device_count() >= 1):
        pytest.skip("needs a GPU and NCCL")

    def use(replica_id: int, port: int, generation: int) -> tuple[str, float, float]:
        rendezvous = Rendezvous("127.0.0.1", port, generation, 0, 1, 30.0)
        process_group.form(rendezvous, torch.device("cuda:0"))
        on_gpu, on_cpu = torch.ones(3, device="cuda:0"), torch.ones(3)
        dist.all_reduce(on_gpu)
        dist.all_reduce(on_cpu)
        dist.barrier()
        found = dist.get_backend(), on_gpu.sum().item(), on_cpu.sum().item()
        process_group.abort(PeerFailed("stopped"))
        with pytest.raises(PeerFailed, match="stopped"):
            dist.all_reduce(on_gpu)
        process_group.form(Rendezvous("127.0.0.1", port, generation + 1, 0, 1, 30.0), torch.device("cuda:0"))
        dist.all_reduce(on_gpu)
        process_group.dissolve()
        return found

    processes.start(use, processes.port, processes.generation + 1, on=0)
    processes.generation += 2
    assert processes.result(0) == ("nccl", 3.0, 3.0)
