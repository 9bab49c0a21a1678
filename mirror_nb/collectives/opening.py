"""How a group comes about: the members meet at the controller's store and connect by gloo, NCCL and shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from mirror_nb.collectives import segments
from mirror_nb.collectives.fabric import Fabric
from mirror_nb.collectives.interruptible import InterruptibleGroup, Opened
from mirror_nb.collectives.waiting import aside, state
from mirror_nb.errors import ReplicaError
from mirror_nb.messages import Rendezvous


@dataclass(frozen=True, slots=True)
class Carriers:
    """What carries a group's tensors; travels through torch's `backend_options` to `create`."""

    nccl: bool


@final
class Client:
    """A connection to the controller's store, of which there is one for the life of a replica.

    Kept from one forming to the next, since torch asks the name service for a name of 127.0.0.1 at each connect: 5 s
    were seen where that loses a question. Not while a call waits on it, since it holds back every other request until
    then.
    """

    def __init__(self, store: dist.TCPStore) -> None:
        self.store = store
        self.waiting = 0

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        with state.lock:
            self.waiting += 1
        try:
            yield
        finally:
            with state.lock:
                self.waiting -= 1


def connect(rendezvous: Rendezvous, user_group: int) -> dist.Store:
    """The controller's store, below a prefix that no other group has."""
    client = state.client
    if client is None or client.waiting:
        host, port, timeout = rendezvous.host, rendezvous.port, timedelta(seconds=rendezvous.timeout_seconds)
        store = aside(
            f"connecting to the store at {host}:{port}",
            lambda: dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False),
            rendezvous.timeout_seconds,
        )
        client = state.client = Client(store)
    return dist.PrefixStore(f"mirror_nb/{rendezvous.generation}/{user_group}", client.store)


def create(options: Any, carriers: object) -> InterruptibleGroup:
    """What torch calls for backend "mirror_nb"; `options` is its `_DistributedBackendOptions`."""
    wants_nccl = carriers.nccl if isinstance(carriers, Carriers) else True
    device = state.device if wants_nccl else torch.device("cpu")
    client = state.client

    def open_group() -> Opened:
        with client.waits() if client is not None else contextlib.nullcontext():
            return _open(options, device)

    opened = aside(
        f"forming a process group of {options.group_size} replicas", open_group, options.timeout.total_seconds()
    )
    if dist.is_initialized():
        return InterruptibleGroup(opened)
    previous = state.world
    if previous is not None and previous.may_adopt(opened):
        previous.adopt(opened)
        return previous
    state.world = InterruptibleGroup(opened)
    return state.world


def _open(options: Any, device: torch.device) -> Opened:
    """Connect gloo, and NCCL where every member has a GPU of its own. Blocks until all members are there."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    inner = dist.ProcessGroup(options.store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", options.store), rank, size, timeout)
    nccl = None
    if _each_has_a_gpu(options.store, rank, size, device):
        nccl = _open_nccl(dist.PrefixStore("nccl/", options.store), rank, size, timeout, device)
    inner._set_default_backend(kinds.GLOO if nccl is None else kinds.NCCL)
    inner._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if nccl is None:
        inner._register_backend(torch.device("cuda"), kinds.GLOO, gloo)
    else:
        inner._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    inner._set_group_name(options.group_id)
    shared = _open_shared(dist.PrefixStore("memory/", options.store), rank, size, timeout.total_seconds())
    return Opened(inner, options.store, timeout, nccl, shared)


def _open_shared(store: dist.Store, rank: int, size: int, seconds: float) -> Fabric | str:
    """What the members share, or why they do not: they are on several machines, or there is no such memory."""
    rounds = 0

    def gather(value: Any) -> list[Any]:
        nonlocal rounds
        rounds += 1
        store.set(f"{rounds}/{rank}", segments.written(value))
        # The store has no key, so nothing of it is unpickled.
        return [segments.read(store.get(f"{rounds}/{peer}").decode()) for peer in range(size)]

    # Also of one replica: what several reduce it reduces, too.
    try:
        return Fabric.form(gather, rank, size, seconds)
    except ReplicaError as error:
        return str(error)


def _open_nccl(store: dist.Store, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(store, rank, size, options)
    nccl._set_sequence_number_for_group()
    # The communicator is made here, in a thread, and not by the first collective: the making waits for peers.
    if hasattr(nccl, "eager_connect_single_device"):
        with torch.cuda.device(device):
            nccl.eager_connect_single_device(device)
    return nccl


def _each_has_a_gpu(store: dist.Store, rank: int, size: int, device: torch.device) -> bool:
    """Whether every member has a GPU and no two the same; all members must ask, and all get one answer."""
    store.set(f"device/{rank}", _gpu_name(device))
    if device.type != "cuda":
        return False
    names = {store.get(f"device/{peer}") for peer in range(size)}
    return dist.is_nccl_available() and len(names) == size and b"" not in names


def _gpu_name(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
