"""The default process group of a replica: torch's own gloo and NCCL behind waits that can always be ended.

Knows torch.distributed and its registries. Knows nothing of pools, cells, modules or gradients, and decides
neither when a group is formed nor why it is aborted: the replica's worker does.

    a cell, DDP, accelerate, FSDP          any thread
              │ dist.all_reduce(…)            │ abort(error)
              ▼                               ▼
      InterruptibleGroup ──▶ Operation ◀── state.live          what Python and C++ wait for is ours: works, waiting
       (interruptible)           ▲
              │      │           │ done, in a thread of gloo
              │      └──▶ dist.ProcessGroup(gloo, NCCL) ─ what torch itself would have built: opening
              ▼
      Fabric: tensors on the CPU through shared memory, where all members are on one machine; see through_memory
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger, constants, device_mesh, distributed_c10d
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from mirror_nb.collectives.interruptible import BACKEND, InterruptibleGroup, abort_nccl, bury
from mirror_nb.collectives.opening import Carriers, connect, create
from mirror_nb.collectives.waiting import state
from mirror_nb.errors import PeerFailed, UsageError
from mirror_nb.messages import Collectives, Rendezvous

__all__ = ["Rendezvous", "abort", "dissolve", "form", "install", "mark", "standing"]

# Whoever asks torch for one of these while our default group is there gets a group of ours.
_BACKENDS_SERVED = frozenset({"gloo", "nccl", "undefined", BACKEND})

# What torch gives a subgroup when no timeout was named: half an hour, ten minutes with NCCL.
_TORCH_TIMEOUTS = (constants.default_pg_timeout, constants.default_pg_nccl_timeout)

_WORLD_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)


def install() -> None:
    """Make torch.distributed in this process give our groups; call it once, before the first cell.

    Registers the backend "mirror_nb", wraps `torch.distributed.init_process_group`, and has every subgroup of
    our default group made by us too. A second call does nothing. Sets `GLOO_SOCKET_IFNAME` to the loopback
    interface, and NCCL's own error handling off (it would end the process), unless the variables are set.

    A process that may have collectives under way is to be ended by `os._exit`: gloo's threads do not survive
    the interpreter's own way out.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    # Its watchdog would throw a GPU's error in a thread of its own, before the user's code tells of it.
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    if state.torch_init is not None:
        return
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    # torch 2.15 attaches a recorder of collectives to each new group but of these, and to do so to a group in Python
    # raises.
    recording: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(BACKEND)
    state.torch_init = distributed_c10d.init_process_group
    _replace("init_process_group", _wrap_init)
    _replace("batch_isend_irecv", _wrap_batch)
    hooked: Any = DistributedDataParallel
    hooked._register_builtin_comm_hook = _wrap_builtin_hook(hooked._register_builtin_comm_hook)
    joined: Any = Join
    joined.notify_join_context = staticmethod(_wrap_notice(joined.notify_join_context))
    records: Any = c10d_logger
    if hasattr(records, "_get_msg_dict"):
        records._get_msg_dict = _wrap_record(records._get_msg_dict)
    # Without this private function (torch 2.11 and 2.13 have it) groups still form, as backend "mirror_nb".
    helper = getattr(distributed_c10d, "_new_process_group_helper", None)
    if helper is not None and "backend_options" in inspect.signature(helper).parameters:
        distributed_c10d._new_process_group_helper = _wrap_helper(helper)
        state.makes_subgroups = True


def _replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(distributed_c10d, name)
    wrapped = wrap(original)
    # device_mesh imports functions by name, so it needs the wrapped one as well.
    for names in (vars(dist), vars(distributed_c10d), vars(device_mesh)):
        if names.get(name) is original:
            names[name] = wrapped


def form(rendezvous: Rendezvous, device: torch.device) -> None:
    """Make the default process group over all replicas, and allow collectives again after an `abort`.

    Every replica calls it with the same generation, which no other group had at this store; it returns when
    all have met. A group that is still there is dissolved first. The default group is the same object as
    before if its size is, so that a DistributedDataParallel made before an interrupt goes on to work.

    Args:
        device: this replica's device; NCCL is used when every replica has a GPU of its own, else gloo.

    Raises:
        ReplicaTimeout, PeerFailed: not all replicas came.
        Exception: the error given to `abort`, when that came meanwhile.
    """
    install()
    dissolve()
    state.start(rendezvous, device)
    _init(connect(rendezvous, user_group=0), rendezvous, timedelta(seconds=rendezvous.timeout_seconds))


def dissolve() -> None:
    """Forget the default group and all subgroups at once, without waiting for anybody.

    Collectives that are still live fail. Groups that have work in flight are parked in a thread that ends
    with that work; what a GPU does not come to the end of is ended. After an `abort`, collectives go on to raise
    its error until the next `form`.
    """
    groups = state.take_groups()
    # To shut it down would wait for peers that have left, and leave this GPU to a kernel that waits for them.
    abort_nccl([group.take_nccl() for group in groups], state.device)
    for group in groups:
        group.retire(PeerFailed("the process group was dissolved while this collective ran"))
    _forget_world()


def abort(error: BaseException) -> None:
    """End every live collective of every group in this process with `error`, from any thread, at once.

    Later collectives, and the making of groups, raise copies of `error` until the next `form`.
    """
    operations, groups = state.abort(error)
    for operation in operations:
        operation.fail(error)
    for group in groups:
        group.abort_shared(error)
    communicators = [group.take_nccl() for group in groups]
    if any(communicators):
        # Beside this thread, which may have more to hear: a GPU that is behind has time to do what all have come to.
        threading.Thread(
            target=abort_nccl, args=(communicators, state.device), name="mirror_nb ends NCCL", daemon=True
        ).start()


def aborted() -> bool:
    """Whether collectives are refused, since an `abort`."""
    return state.aborted is not None


def mark() -> None:
    """Count collectives from here on, for `standing`: a request begins, and may initialise the group as scripts do."""
    state.offered = True
    # torch keeps the list of a coalescing that an error has left, and would add every later collective to it alone.
    getattr(getattr(distributed_c10d, "_world", None), "pg_coalesce_state", {}).clear()
    for group in list(state.groups):
        group.mark()


def usable() -> bool:
    """Whether the default group is there and takes collectives: a failure that was caught may have ended it."""
    if not dist.is_initialized() or state.severed:
        return False
    shared: Any = getattr(dist.group.WORLD, "shared", None)
    return shared is None or not shared.broken


def begun() -> int:
    """Return how many collectives of the default group were begun here since `mark`; -1: nobody has counted."""
    return int(getattr(dist.group.WORLD, "begun_since", -1))


def standing() -> list[Collectives]:
    """Return what this process has begun in each group and what it waits for; from any thread, without a lock."""
    return [group.standing() for group in list(state.groups)]


def _init(store: dist.Store, rendezvous: Rendezvous, timeout: timedelta) -> None:
    hook = sys.excepthook
    try:
        _original_init()(
            BACKEND, store=store, rank=rendezvous.replica_id, world_size=rendezvous.num_replicas, timeout=timeout
        )
    finally:
        # torch chains a hook of its own at each init, and never takes it away.
        sys.excepthook = hook
    group = dist.group.WORLD
    if isinstance(group, InterruptibleGroup):
        _say_what_carries(group)


def _original_init() -> Callable[..., None]:
    if state.torch_init is None:
        raise UsageError("the process group is not installed in this process: call install() first")
    return state.torch_init


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        rendezvous, group = state.rendezvous, dist.group.WORLD
        free = group is None or (state.offered and isinstance(group, InterruptibleGroup))
        if rendezvous is None or not free or not _means_all_replicas(given, rendezvous):
            original(*args, **kwargs)
            return
        state.offered = False
        if group is not None:
            # The replicas have met already: what a script for torchrun begins with asks for this very group.
            if given.get("timeout"):
                group.set_timeout(given["timeout"])
            return
        # Counted, so that replicas that run the same cell meet under the same prefix.
        state.user_groups += 1
        store = connect(rendezvous, state.user_groups)
        _init(store, rendezvous, given.get("timeout") or timedelta(seconds=rendezvous.timeout_seconds))

    return init_process_group


def _means_all_replicas(given: dict[str, Any], rendezvous: Rendezvous) -> bool:
    """Whether a user's own init asks for what torchrun gives: every replica, each with its own rank.

    They meet at our store, also where an address or a file was named with both: as torchrun's workers, no replica
    would listen there.
    """
    said = given.get("rank", -1), given.get("world_size", -1)
    here = rendezvous.replica_id, rendezvous.num_replicas
    return (
        given.get("store") is None
        and (given.get("init_method") in (None, "env://") or said == here)
        and all(one in (-1, mine) for one, mine in zip(said, here, strict=True))
        and _served(given.get("backend"))
    )


def _served(backend: object) -> bool:
    """Whether `backend` ("nccl", "cpu:gloo,cuda:nccl", None, …) names only what our groups are made of."""
    if not backend:
        return True
    return {part.split(":")[-1] for part in str(backend).lower().split(",")} <= _BACKENDS_SERVED


def _wrap_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch gives NCCL a batch as one only in a group of exactly its own class; one by one they may deadlock."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> Any:
        group = p2p_op_list[0].group if p2p_op_list else None
        if isinstance(group, InterruptibleGroup) and group.carrier == "nccl" and p2p_op_list[0].tensor.is_cuda:
            p2p_op_list = [group.inner_operation(operation) for operation in p2p_op_list]
        return original(p2p_op_list)

    return batch_isend_irecv


def _wrap_builtin_hook(original: Callable[..., None]) -> Callable[..., None]:
    """torch's compression in C++ wants a future that Python cannot make; its twin in Python does the same."""

    @functools.wraps(original)
    def _register_builtin_comm_hook(self: DistributedDataParallel, comm_hook_type: dist.BuiltinCommHookType) -> None:
        group: Any = self.process_group
        if comm_hook_type != dist.BuiltinCommHookType.FP16_COMPRESS or not isinstance(group, InterruptibleGroup):
            original(self, comm_hook_type)
            return
        # Not at each start, which this would take 3 ms of.
        hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
        # None stands for the default group; the group itself could not travel with the module.
        state = None if group is dist.group.WORLD else group
        self.register_comm_hook(state, hooks.fp16_compress_hook)

    return _register_builtin_comm_hook


def _wrap_notice(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """C++ keeps of this work no more than its own part, whose wait nobody ends: that of DDP with uneven inputs."""
    latest: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def notify_join_context(joinable: Any) -> Any:
        work = latest[joinable] = original(joinable)
        return work

    return notify_join_context


def _wrap_record(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """torch asks a group for its name to record what failed; one that is gone raised in the place of the failure."""

    @functools.wraps(original)
    def _get_msg_dict(func_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return original(func_name, *args, **kwargs)
        except ValueError:
            return {"func_name": func_name}

    return _get_msg_dict


def _wrap_helper(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's one place where groups are made; DeviceMesh, new_group and new_subgroups all come here."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        subgroup = isinstance(dist.group.WORLD, InterruptibleGroup)
        if not (subgroup and _served(given["backend"])):
            return original(*args, **kwargs)
        wanted = str(given["backend"]).lower()
        # torch gives subgroups a time of its own when none was named, whatever the default group has.
        if given.get("timeout") in _TORCH_TIMEOUTS and state.rendezvous is not None:
            given["timeout"] = timedelta(seconds=state.rendezvous.timeout_seconds)
        given.update(backend=dist.Backend(BACKEND), backend_options=Carriers(nccl=wanted != "gloo"), device_id=None)
        made = original(*bound.args, **bound.kwargs)
        if isinstance(made[0], InterruptibleGroup):
            _say_what_carries(made[0])
        return made

    return new_process_group


def _say_what_carries(group: InterruptibleGroup) -> None:
    """Have dist.get_backend() say "gloo" or "nccl": DDP, FSDP, DeviceMesh and users' code decide by it.

    Only where subgroups are made by us: torch makes them of the backend that bears the default group's name.
    """
    world: Any = getattr(distributed_c10d, "_world", None)
    if not state.makes_subgroups or group not in getattr(world, "pg_map", {}):
        return
    _, store = world.pg_map[group]
    world.pg_map[group] = (dist.Backend(group.carrier), store)
    if group in getattr(world, "pg_backend_config", {}):
        world.pg_backend_config[group] = group.backend_config


def _forget_world() -> None:
    """What destroy_process_group does to torch's registries, also after an init that failed half-way."""
    world: Any = getattr(distributed_c10d, "_world", None)
    strangers: list[Any] = []
    if world is not None:
        strangers += [group for group in world.pg_map if not isinstance(group, InterruptibleGroup)]
        for name in _WORLD_TABLES:
            getattr(world, name, {}).clear()
        world.group_count = 0
    if hasattr(distributed_c10d, "_update_default_pg"):
        distributed_c10d._update_default_pg(None)
    if hasattr(distributed_c10d, "_unregister_all_process_groups"):
        distributed_c10d._unregister_all_process_groups()
    bury(strangers, None)
