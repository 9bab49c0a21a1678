"""Processes in a process group of their own, and what runs in one: training loops that every replica makes alike."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mirror_nb.gradients.synchronizer import GradientSynchronizer
from mirror_nb.replica.scope import Scope

DEADLINE = 60.0
CPU = torch.device("cpu")
# Global batches that two and three replicas cannot share evenly; of the one example, somebody gets none.
SIZES = (8, 7, 5, 1, 8)


class Failed(Exception):
    """What a function raised in a replica: its type's name, its message, its traceback."""


def serve(channel: Connection, replica_id: int, num_replicas: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=DEADLINE))
    formed = 0
    while True:
        try:
            function, args = pickle.loads(channel.recv_bytes())
        except EOFError:
            break
        if not dist.is_initialized():
            formed += 1
            prefixed = dist.PrefixStore(f"group{formed}", store)
            timeout = timedelta(seconds=20)
            dist.init_process_group("gloo", store=prefixed, rank=replica_id, world_size=num_replicas, timeout=timeout)
        try:
            answer = ("value", function(Replica(replica_id, num_replicas), *args))
        except BaseException as error:
            answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        channel.send_bytes(cloudpickle.dumps(answer))
    if dist.is_initialized():
        dist.destroy_process_group()


class Crew:
    """Some replicas that meet at a store which this process hosts."""

    def __init__(self, size: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        self.processes, self.channels = [], []
        for i in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, i, size, port), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.channels.append(mine)

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(replica, *args)` gave on each replica, or the Failed that it raised."""
        for channel in self.channels:
            channel.send_bytes(cloudpickle.dumps((function, args)))
        return [self._outcome(i) for i in range(len(self.channels))]

    def _outcome(self, i: int) -> Any:
        ready = wait([self.channels[i], self.processes[i].sentinel], DEADLINE)
        if self.channels[i] not in ready:
            raise TimeoutError(f"replica {i} gave no answer (exit code {self.processes[i].exitcode})")
        kind, value = pickle.loads(self.channels[i].recv_bytes())
        return Failed(*value) if kind == "error" else value

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        outcomes = self.outcomes(function, *args)
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                raise outcome
        return outcomes

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        del self.store


@dataclass
class Replica:
    """One replica of `n`; with none at all (`plain`), PyTorch as it is."""

    id: int
    n: int
    plain: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gradients = GradientSynchronizer(self.id, self.n, **self.options)
        self.scope: Any = contextlib.nullcontext() if self.plain else self.new_scope()

    def new_scope(self) -> Scope:
        return Scope(self.id, self.n, CPU, self.gradients, seed=17)

    def remade(self, **options: Any) -> Replica:
        return Replica(self.id, self.n, self.plain, options)

    def share(self, *tensors: Tensor) -> list[Tensor]:
        """The part of a global batch that this replica gets; its gradients weigh accordingly."""
        size = len(tensors[0])
        each = -(-size // self.n)
        parts = [tensor[self.id * each : (self.id + 1) * each] for tensor in tensors]
        self.gradients.set_shares(len(parts[0]), size)
        return parts


def batches(features: int = 6, targets: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for size in SIZES:
        yield (
            torch.randn(size, features, generator=generator),
            torch.randn(size, targets, generator=generator),
        )


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def values(*modules: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for module in modules for parameter in module.parameters()]


def in_scope(r: Replica, recipe: Callable[[Replica], Any], **options: Any) -> Any:
    r = r.remade(**options)
    with r.scope:
        return recipe(r)


def small_buckets(r: Replica, recipe: Callable[[Replica], Any]) -> Any:
    return in_scope(r, recipe, bytes_per_bucket=128, first_bucket_bytes=32)


def check_as_plain(crews: dict[int, Crew], recipe: Callable[[Replica], list[Tensor]]) -> None:
    """Check that each replica ends on the weights that plain PyTorch gives on whole batches, all on the same."""
    expected = recipe(Replica(0, 1, plain=True))
    torch.testing.assert_close(in_scope(Replica(0, 1), recipe), expected, rtol=0, atol=0)
    for n, crew in crews.items():
        # Small buckets, so that there are some.
        results = crew.run(in_scope, recipe) if n == 2 else crew.run(small_buckets, recipe)
        for result in results:
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(result, results[0], rtol=0, atol=0)
