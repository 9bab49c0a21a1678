"""A replica in a process that something else started once per device, torchrun for instance: no controller."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import os
import re
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mirror_nb.collectives.base import Member
from mirror_nb.collectives.options import Communication, chosen
from mirror_nb.devices import Device
from mirror_nb.environment import seeds
from mirror_nb.errors import UsageError, users_level
from mirror_nb.gradients.synchronizer import GradientSynchronizer
from mirror_nb.replica.scope import Scope
from mirror_nb.steps.recorder import Recorder
from mirror_nb.steps.steering import Steering
from mirror_nb.strategies.context import get_strategy, on_one_replica
from mirror_nb.tensors.batch_norms_of_shares import BatchNormsOfShares
from mirror_nb.tensors.sharded import is_sharded
from mirror_nb.transfer.pickler import label_class

_groups = itertools.count()
# By which the processes number the groups that they make, all alike.
REST_SECONDS = 2.0
# At the end of a process.
_LOOK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class OwnIdentity:
    """Which replica this process is."""

    replica_id: int
    num_replicas: int
    device: torch.device


@dataclass(slots=True)
class Standalone:
    """What the strategy needs of such a replica."""

    identity: OwnIdentity
    gradients: GradientSynchronizer
    scope: Scope
    leave: Callable[[], None]
    # Gives back the process group, if it was made here.
    communication: Communication
    recorder: Recorder
    # Without a ring: nobody would read it.
    steering: Steering
    # Nobody steers.
    own_process: bool = True
    partial: bool = False
    # All processes run the script.

    def label(self, kind: type) -> None:
        """Name the classes of the script that `kind` is or derives from as all processes do, before it travels."""
        for base in kind.__mro__:
            label_class(base, "")

    def communicate(self, by: Communication) -> None:
        """Reduce gradients by these cross-device ops from now on; every replica makes the same call."""
        who = self.identity
        group = cast(dist.ProcessGroup, dist.group.WORLD)
        by.take_over(self.communication, Member(who.replica_id, who.num_replicas, who.device, group))
        self.communication = by
        self.gradients.use(by.reducer, bytes_per_bucket=by.options.bytes_per_pack)

    def named_parameters(self) -> tuple[()]:
        """It is not known here what the script calls its networks."""
        return ()

    def unsynchronized(self) -> dict[str, int]:
        """Nor, therefore, which others there are."""
        return {}

    def emit(self, message: object, slab: int | None = None) -> None:
        """There is no controller to hear it."""


def standalone(seed: int = 0) -> Standalone:
    """Join the others that the environment tells of (RANK, WORLD_SIZE, LOCAL_RANK, …), if that is not done yet.

    The device is the GPU of number LOCAL_RANK, or the CPU where there are none. Raises UsageError for an environment
    that is not a launcher's, and for fewer GPUs than processes.
    """
    replica_id, num_replicas = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= replica_id < num_replicas:
        # torch would wait for the others for minutes.
        raise UsageError(
            f"the environment variable RANK is {replica_id}, but WORLD_SIZE {num_replicas}: ranks count from 0 to "
            f"WORLD_SIZE - 1; {_LAUNCHED}"
        )
    device = _device(_number("LOCAL_RANK", replica_id))
    joined = dist.is_initialized()
    if not joined:
        # Of a name of its own: a store in which a group has met before gives the next one that one's addresses.
        store = dist.PrefixStore(f"mirror_nb/{next(_groups)}", _meeting_place())
        backend = "gloo" if device.type == "cpu" else None
        dist.init_process_group(backend, store=store, rank=replica_id, world_size=num_replicas)
    if device.type == "cpu":
        # A script seldom closes its strategy.
        atexit.register(_let_gloo_rest if joined else _leave)
    gradients = GradientSynchronizer(replica_id, num_replicas)
    scope = Scope(replica_id, num_replicas, device, gradients, seed, seeds.seeded)
    identity = OwnIdentity(replica_id, num_replicas, device)
    devices = [Device(device.type, i) for i in range(num_replicas)]
    # Memory can be shared, and GPUs can reach each other's, within one machine.
    one_machine = _number("LOCAL_WORLD_SIZE", 0) == num_replicas
    by = chosen(None if one_machine else "gloo" if device.type == "cpu" else "nccl", None, devices)
    recorder = Recorder(device)
    watch = register_optimizer_step_pre_hook(Outsiders(gradients))
    # A script's loop is not in the scope as a rule.
    normalizing = BatchNormsOfShares(gradients)

    def leave() -> None:
        watch.remove()
        normalizing.remove()
        if not joined:
            _leave()

    replica = Standalone(identity, gradients, scope, leave, by, recorder, Steering(recorder.mark))
    replica.communicate(by)
    return replica


@final
class Outsiders:
    """Warns, once for each, of optimizers that train on the replicas' shares what was made outside of the scope.

    In a script nothing else tells: the controller refuses them, and to a cell all that is made in it belongs.
    """

    def __init__(self, gradients: GradientSynchronizer) -> None:
        self._gradients = gradients
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = self._gradients
        if gradients.replica_id or gradients.num_replicas == 1 or optimizer in self._seen:
            return
        if gradients.shares is None and not (on_one_replica() and get_strategy().num_replicas_in_sync > 1):
            return
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not trained:
            return
        self._seen.add(optimizer)
        apart = [p for p in trained if not gradients.tracks(p) and not is_sharded(p)]
        if apart and not _in_wrappers().issuperset(map(id, apart)):
            warnings.warn(
                f"the {type(optimizer).__name__} trains a {type(apart[0]).__name__} of shape {tuple(apart[0].shape)} "
                "that was made outside this strategy's scope: its gradients are each replica's own, and the copies "
                "part ways, unless the script sums them itself. Create the network and its optimizer inside `with "
                "strategy.scope():`, or call strategy.mirror(network) before it is trained",
                stacklevel=users_level(),
            )


def _in_wrappers() -> set[int]:
    """Return the ids of the parameters that torch's wrappers synchronise; looks at all objects there are."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = (DistributedDataParallel, *(() if fsdp is None else (fsdp.FullyShardedDataParallel,)))
    wrappers: list[Any] = [obj for obj in gc.get_objects() if issubclass(type(obj), kinds)]
    return {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}


@functools.cache
def _meeting_place() -> dist.Store:
    """Return the store in which a launcher's processes find each other; kept, for one of them may serve it."""
    store: dist.Store = next(rendezvous("env://"))[0]
    return store


def _number(name: str, default: Any = None) -> int:
    value = os.environ.get(name, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UsageError(f"the environment variable {name} is {value!r}, not a number; {_LAUNCHED}") from None


_LAUNCHED = (
    "start the script with torchrun, or unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT to let the strategy start "
    "its own replicas"
)


def _device(local: int) -> torch.device:
    found = torch.cuda.device_count()
    if not found:
        return torch.device("cpu")
    if local >= found:
        raise UsageError(
            f"LOCAL_RANK is {local}, but {found} GPUs are visible; start one process a GPU (--nproc_per_node={found}) "
            "or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    _let_gloo_rest()


def _let_gloo_rest() -> None:
    """Wait until gloo's threads sleep, for REST_SECONDS at most.

    Who of them still lets go of a tensor when Python ends asks for Python's lock, which is gone by then, and aborts
    the process (torch 2.13). They are the group's, which lives on as long as anybody, DDP for instance, knows it.
    """
    deadline, before = time.monotonic() + REST_SECONDS, None
    while time.monotonic() < deadline:
        # They get the lock meanwhile.
        time.sleep(_LOOK_SECONDS)
        now = _at_work()
        if now is None or now == before:
            return
        before = now


def _at_work() -> dict[str, str] | None:
    """Return how often each of gloo's threads has given up its core; None where that cannot be seen.

    Equal twice in a row: all of them sleep, for one that runs or waits for the lock changes it.
    """
    found = {}
    for task in Path("/proc/self/task").glob("*/status"):
        # Between the two a thread may end.
        with contextlib.suppress(OSError):
            status = task.read_text()
            if status.startswith("Name:\tpt_gloo_runloop"):
                state, *switches = re.findall(r"^(?:State|\w*voluntary_ctxt_switches):\t(\w+)", status, re.MULTILINE)
                found[task.parent.name] = f"{time.monotonic() if state != 'S' else ''}{switches}"
    return found or None
