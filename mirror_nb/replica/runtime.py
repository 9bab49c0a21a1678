"""One replica: its namespace, scope and gradients, and what each request makes it do.

The worker process and the in-process pool both drive it. Knows no process, no pipe and no signal: requests come
in by `handle`, everything else goes out by `emit`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import re
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils.data import _utils as torch_loaders

from mirror_nb.collectives import process_group
from mirror_nb.collectives.base import Member, gathered
from mirror_nb.collectives.options import Communication, chosen
from mirror_nb.data.batches import to_device
from mirror_nb.devices import Device
from mirror_nb.environment import modes, reporting, sources, surroundings
from mirror_nb.errors import MirrorError, PeerFailed, TransferError, UsageError, users_frames, without_hidden
from mirror_nb.gradients.synchronizer import GradientSynchronizer
from mirror_nb.messages import (
    Again,
    Bind,
    Call,
    Check,
    Communicate,
    Done,
    Failure,
    Fetch,
    Follow,
    Form,
    Left,
    LoadModules,
    Mirror,
    Rendezvous,
    Request,
    Restore,
    RunCell,
    Snapshot,
    StandAt,
    Standing,
    Steps,
    TryFused,
)
from mirror_nb.replica import broken, files, full, whereabouts
from mirror_nb.replica.lost import Copies
from mirror_nb.replica.namespace import Namespace
from mirror_nb.replica.progress import Progress
from mirror_nb.replica.scope import Scope
from mirror_nb.replica.shell import ReplicaShell, cell_numbers, learn, make_shell
from mirror_nb.replica.undivided import Undivided
from mirror_nb.steps.recorder import Recorder
from mirror_nb.steps.steering import Steering
from mirror_nb.tensors.checksums import checksums
from mirror_nb.tensors.sharded import is_sharded
from mirror_nb.transfer import raised, submodules
from mirror_nb.transfer.opening import Arrivals, NotRebuilt
from mirror_nb.transfer.packing import members, pack, unsendable
from mirror_nb.transfer.payload import Packed, Payload
from mirror_nb.transfer.pickler import dumps
from mirror_nb.values import Shares
from mirror_nb.variables import is_apart

_NOTHING = Arrivals()
_usual = contextlib.nullcontext()
KEPT_FUNCTIONS = 16
LOADER_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Identity:
    """Which replica this is."""

    replica_id: int
    num_replicas: int
    device: torch.device
    # As torch names it in the replica's own process.
    seed: int
    reduction: str = "mean"
    # Of gradients: "mean" or "sum".


class Emit(Protocol):
    """Takes a message for the controller, and the descriptor of its payload's slab."""

    def __call__(self, message: object, slab: int | None = None) -> None: ...


class Replica:
    """What one replica holds.

    `setup` names a function, as "module:function", that is called with the replica and gives the names that its
    cells find bound, such as `strategy`. `home` is where its names live: the shell of a process of its own, or a
    module.
    """

    def __init__(
        self,
        identity: Identity,
        emit: Emit,
        setup: str,
        home: ReplicaShell | types.ModuleType,
        interruptible: Callable[[int], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,  # type: ignore[assignment]
        communication: bytes = b"",
        recorder: Recorder | None = None,
        steering: Steering | None = None,
    ) -> None:
        self.identity = identity
        self.gradients = GradientSynchronizer(identity.replica_id, identity.num_replicas, reduction=identity.reduction)
        self.recorder = self.gradients.recorder = recorder or Recorder(identity.device)
        self.steering = self.gradients.steering = steering or Steering(self.recorder.mark)
        self.scope = Scope(identity.replica_id, identity.num_replicas, identity.device, self.gradients, identity.seed)
        self.communication = _communication(communication, identity)
        self._as_chosen = communication
        # Before any step: what an op keeps of the steps may be nothing that travels.
        self._choices = 0
        # How often another one was chosen.
        self.emit = emit
        # The strategy puts these in place: what a user's function, and a cell, run in.
        self.invoke: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] = _plainly
        self.weighing: Callable[[Sequence[tuple[Any, Shares]]], contextlib.AbstractContextManager[None]] = _as_they_are
        self.cell_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.own_process = isinstance(home, ReplicaShell)
        if self.own_process:
            # Entered for good: to put the hooks in place and away again would take half the time of a small call.
            self.scope.__enter__()
        divides = self.own_process and identity.num_replicas > 1
        self.undivided = Undivided(self.gradients) if divides else None
        self._failed: list[types.TracebackType] = []
        # Of what the present request raised: their frames hold what the failed code held.
        self._was_full = False
        # It raised since there was no memory left.
        self.gpu_lost = False
        # It failed, and so will all that follows in this process.
        self._functions: dict[bytes, Any] = {}
        # By their pickles: those that the controller calls again and again.
        self.partial = False
        # True while a cell runs that some replicas do not run.
        self._interruptible = interruptible
        self._home = home
        self._own = {
            "replica_id": identity.replica_id,
            "num_replicas": identity.num_replicas,
            "device": identity.device,
            **_named(setup)(self),
        }
        # The shell of a process of our own brings its `__main__`.
        self.names = home.user_ns if isinstance(home, ReplicaShell) else home.__dict__
        self.names.update(self._own)
        self.namespace = Namespace(self.names, self._own, self.scope, identity.device)
        self._progress = Progress(self.namespace.held)
        if identity.num_replicas > 1:
            self._progress.watch()

    @property
    def shell(self) -> ReplicaShell:
        """The shell that runs cells; made at the first cell where the process has another one."""
        if not isinstance(self._home, ReplicaShell):
            self._home = make_shell(self.emit, self._home)
        return self._home

    @property
    def cell_numbers(self) -> Mapping[str, int]:
        """The notebook's numbers of its cells, by the file that their code names."""
        return cell_numbers(self._home) if isinstance(self._home, ReplicaShell) else {}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of the networks that are held here: `model.0.weight`, `0.weight` without a name.

        A further one without a name is `0.weight (2)`.
        """
        found = self.namespace.held().items()
        held = {k: m for k, m in found if isinstance(m, nn.Module) and not k.startswith(("_", "."))}
        parts = {id(part) for module in held.values() for part in module.modules() if part is not module}
        times = Counter[str]()
        for key, module in held.items():
            if not key.startswith(":"):
                yield from module.named_parameters(key)
            elif id(module) not in parts:
                for name, parameter in module.named_parameters():
                    times[name] += 1
                    yield (f"{name} ({times[name]})" if times[name] > 1 else name), parameter

    def label(self, kind: type) -> None:
        """Name the classes of cells that `kind` is or derives from as all replicas do, before it travels to them."""
        self.namespace.label(kind)

    def unsynchronized(self) -> dict[str, int]:
        """Return checksums of the other parameters of these networks, by name; of parts of a tensor there are none."""
        seen = {id(parameter) for parameter in self.gradients.synchronized().values()}
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters():
            if not (id(parameter) in seen or is_lazy(parameter) or is_sharded(parameter) or is_apart(parameter)):
                found.setdefault(name, parameter)
            seen.add(id(parameter))
        return dict(zip(found, checksums(found.values()), strict=True))

    # ------------------------------------------------------------------ requests

    def handle(self, request: Request, slab: int | None) -> None:
        """Carry a request out and emit its `Done`."""
        began = time.perf_counter()
        self.steering.begin()
        self.recorder.begin()
        packed: Packed | None = None
        failure: Failure | None = None
        bundle: dict[str, Any] | None = None
        left: tuple[str, ...] = ()
        settings: tuple[tuple[str, Any], ...] = ()
        lost: tuple[str, ...] = ()
        try:
            match request.what:
                case Form(rendezvous):
                    self.form(rendezvous)
                case RunCell() as cell:
                    failure, packed, bundle = self._run_cell(cell, slab, request.number)
                    settings = self.namespace.objects.changed_settings()
                case Call() as call:
                    failure, packed, lost = self._call(call, slab, request.number)
                    settings = self.namespace.objects.changed_settings()
                case Communicate(pickled):
                    self.communicate(_communication(pickled, self.identity))
                case Follow(changes):
                    surroundings.follow(changes)
                case Mirror(objects):
                    self.namespace.keep(objects, slab)
                    # A network that comes again, with other parts, is another object than the one in them.
                    self._functions.clear()
                case Bind(names):
                    self.namespace.bind(names, slab)
                case LoadModules(states):
                    self.namespace.load(states, slab)
                case Fetch() as fetch:
                    self.namespace.forget_given(fetch.undelivered)
                    self._let_go(fetch.released)
                    if fetch.anew:
                        self.namespace.forget_told()
                    packed = self._fetch(fetch, request.number)
                case Again(owner):
                    packed = self.namespace.export_again(tag=request.number, owner=owner)
                case Snapshot(without):
                    packed, left = self.namespace.snapshot(self._beside, without)
                case Restore(names):
                    left = self._restore(names, slab)
                case Steps():
                    packed = pack((self._progress.steps(), self._progress.sums()), in_band=True)
                case TryFused():
                    # Its steps are none of the training's.
                    with self.recorder.silent():
                        packed = pack(self._progress.try_fused(), in_band=True)
                case Check():
                    packed = pack((self.steering.compare(), self.unsynchronized()), in_band=True)
                case Standing(keys):
                    packed = pack((self._progress.standing(keys), self.scope.random_streams()))
                case StandAt(standing):
                    standings, streams = self.namespace.open(standing, slab)
                    self._progress.stand_at(standings)
                    self.scope.follow(streams)
            # Where a GPU is broken, asking it what it has finished tells so.
            self.recorder.end(failed=failure is not None)
        except BaseException as error:
            failure = self.failure(error)
        reporting.rest()
        sources.note()
        seconds = time.perf_counter() - began
        payload = packed.payload if packed is not None else None
        grouped = self.identity.num_replicas == 1 or process_group.usable()
        written = files.taken()
        undivided = self.undivided.taken(self.namespace.names) if self.undivided is not None else ()
        told = left, grouped, settings, lost, written, undivided, process_group.begun(), self.recorder.settled
        done = Done(request.number, failure, payload, seconds, bundle, *told)
        if packed is None or packed.slab is None:
            self.emit(done)
        else:
            with contextlib.closing(packed):
                self.emit(done, packed.slab)
        self._release()

    def _release(self) -> None:
        """Let go of what failed code held: a large tensor, a DataLoader's workers.

        Only now that the controller has been told: a loader waits for workers that are busy, and who does not answer
        an interrupt is ended.
        """
        if not self._failed:
            return
        was_full, self._was_full = self._was_full, False
        with _impatient_loaders():
            if isinstance(self._home, ReplicaShell):
                self._home.forget_failure()
            while self._failed:
                traceback.clear_frames(self._failed.pop())
            # Exceptions and frames refer to each other.
            gc.collect()
        if was_full:
            full.give_back(self.identity.device)

    def form(self, rendezvous: Rendezvous) -> None:
        """Join the group of this generation; ready means that an all-reduce gave the right sum."""
        self.gradients.regroup()
        process_group.form(rendezvous, self.identity.device)
        self.scope.regroup()
        probe = torch.full((1,), float(rendezvous.replica_id), dtype=torch.float32, device=self.identity.device)
        dist.all_reduce(probe)
        n = rendezvous.num_replicas
        if float(probe) != n * (n - 1) / 2:
            raise RuntimeError(f"the first all-reduce over {n} replicas gave {float(probe)}, not {n * (n - 1) / 2}")
        self._communicate(self._latest(rendezvous.generation))

    def communicate(self, by: Communication) -> None:
        """Reduce gradients by these cross-device ops from now on; every replica makes the same call."""
        self._choices += 1
        with contextlib.suppress(Exception):
            # Of an op that has made steps already, what was chosen first serves.
            self._as_chosen = by.pickled()
        self._communicate(by)

    def _communicate(self, by: Communication) -> None:
        who = self.identity
        group = cast(dist.ProcessGroup, dist.group.WORLD)
        member = Member(who.replica_id, who.num_replicas, who.device, group, self.recorder.collective)
        by.take_over(self.communication, member)
        self.recorder.record_ended = by.record_ended
        self.communication = by
        self.gradients.use(by.reducer, bytes_per_bucket=by.options.bytes_per_pack)

    def _latest(self, generation: int) -> Communication:
        """Return what the replicas reduce by: one that was started anew does not know what a cell chose.

        Nor which step is the next.
        """
        offers = gathered((self._choices, self.recorder.step), self.identity.num_replicas)
        self.recorder.begin_generation(generation, max(step for _, step in offers))
        counts = [choices for choices, _ in offers]
        latest = max(counts)
        if min(counts) == latest:
            return self.communication
        # Only where somebody lacks it: an op may keep megabytes of its steps.
        source = counts.index(latest)
        sent = [self._travelling() if self.identity.replica_id == source else None]
        dist.broadcast_object_list(sent, source)
        if self._choices == latest:
            return self.communication
        self._choices = latest
        self._as_chosen = cast(bytes, sent[0])
        return _communication(self._as_chosen, self.identity)

    def _travelling(self) -> bytes:
        """Return what this replica reduces by: with what the op keeps of its steps, or else as it was chosen."""
        try:
            return self.communication.pickled()
        except Exception:
            # A process group that its `start` made, say.
            chosen_first = _communication(self._as_chosen, self.identity)
            return replace(chosen_first, options=self.communication.options).pickled()

    def _run_cell(
        self, cell: RunCell, slab: int | None, number: int
    ) -> tuple[Failure | None, Packed | None, dict[str, Any] | None]:
        self._progress.begin()
        with contextlib.suppress(OSError):
            os.chdir(cell.working_directory)
        self.namespace.hold(cell.holdings)
        if cell.names is not None:
            self.namespace.bind(cell.names, slab)
        if self.identity.num_replicas > 1 and cell.synchronize and not cell.partial:
            self._progress.begin_cell()
        before = self.namespace.before(cell.mentioned, number, cell.bound)
        shell = self.shell
        learn(shell, cell.sources)
        reporting.settle()
        self.gradients.shares = None
        failure = None
        synchronizing = self._synchronizing(cell.synchronize and not cell.partial)
        with synchronizing, self.cell_context(), modes.entered(cell.modes):
            enabled, standing = torch.is_grad_enabled(), surroundings.Standing()
            self.partial = cell.partial
            try:
                with self._interruptible(number):
                    submodules.bring(cell.submodules)
                    end = shell.run(cell.source, cell.count)
                if end.error is not None:
                    failure = self.failure(end.error, end.traceback)
            except BaseException as error:
                end = None
                failure = self.failure(error)
            finally:
                self.partial = False
            grads = None if torch.is_grad_enabled() is enabled else not enabled
            process = None if cell.partial else standing.since(cell.source)
            left = None if grads is None and process is None else Left(grads, process)
        if self.gpu_lost:
            # What the cell made lies on the GPU.
            return failure, None, None
        value, bundle = (end.value, end.bundle) if end is not None else (None, None)
        if value is not None:
            # The names of the cell hold it if it has one; this frame must not keep it alive.
            end = None
        names = self.namespace.changed(before, cell.bound, cell.mentioned)
        trained = any(name in self.names for name in cell.mentioned)
        # Who fails may be a step behind the others, for now.
        compare = cell.synchronize and not cell.partial and failure is None and self.identity.num_replicas > 1
        packed = self.namespace.export(
            names, tag=number, owner=cell.owner, trained=trained, result=value, compare=compare, left=left
        )
        return failure, packed, bundle

    def _let_go(self, handles: tuple[str, ...]) -> None:
        if handles:
            self.namespace.release(handles)
            self._functions.clear()

    def _call(
        self, call: Call, slab: int | None, number: int
    ) -> tuple[Failure | None, Packed | None, tuple[str, ...]]:
        self._progress.begin()
        self._let_go(call.released)
        self.namespace.objects.apply_settings(call.settings)
        function, visitors = self._function(call)
        (args, kwargs), more = self.namespace.open_call(call.arguments, slab)
        weighed = [*visitors.weighed, *more.weighed]
        if self.identity.device.type != "cpu":
            args, kwargs, weighed = _on_device(self.identity.device, args, kwargs, weighed)
        versions = [(leaf, leaf._version) for leaf in visitors.leaves]
        copies = None if call.plain else Copies(function, self.namespace.has, (args, kwargs), unchanging=call.kept)
        passes = self.gradients.undivided_passes
        try:
            reporting.settle()
            reporting.forget_warned(call.moment)
            if call.shares is not None:
                self.gradients.set_shares(*call.shares)
            around = _usual if call.modes is None else modes.entered(call.modes)
            weighing = self.weighing(weighed) if weighed else _usual
            with self.scope, self._interruptible(number), around, weighing:
                if call.shares is not None:
                    # It works on a batch, as a cell that was handed one.
                    self.scope.start_running()
                value = function(*args, **kwargs) if call.plain else self.invoke(function, args, kwargs)
            _check_visitors([*visitors.modules, *more.modules], self.namespace.has)
            _check_unchanged(versions)
        except KeyboardInterrupt as error:
            # Where a loop of ours was interrupted tells the user nothing.
            return self.failure(error, () if _in_users_code(error) else (type(error).__name__,)), None, ()
        except BaseException as error:
            return self.failure(error), None, ()
        finally:
            self.gradients.clear_shares()
            self.scope.settle()
        if self.undivided is not None and not call.plain:
            self.undivided.called(passes, (args, kwargs), value)
        lost = copies.changed() if copies is not None else ()
        try:
            return None, pack(value, reference=self.namespace.reference), lost
        except TransferError as reason:
            instead = "return what can be pickled: numbers, tensors and containers of them"
            parts = members("result", value)
            raise unsendable(reason, parts, instead, reference=self.namespace.reference) from None

    def _function(self, call: Call) -> tuple[Any, Arrivals]:
        known = self._functions.get(call.function.pickled) if call.kept else None
        if known is not None:
            return known, _NOTHING
        function, visitors = self.namespace.open_call(call.function, None)
        if call.kept:
            if len(self._functions) >= KEPT_FUNCTIONS:
                self._functions.clear()
            self._functions[call.function.pickled] = function
        return function, visitors

    def _restore(self, names: Payload, slab: int | None) -> tuple[str, ...]:
        """Take over another replica's snapshot; return the name, if there is one, that kept all of it from it."""
        try:
            streams, keys = self.namespace.restore(names, slab)
        except NotRebuilt as error:
            if full.cause(error) is not None:
                raise
            return (error.name,)
        self.scope.follow(streams)
        self.scope.take_keys(keys)
        return ()

    def _beside(self, packed: list[Any]) -> tuple[Any, ...]:
        return self.scope.random_streams(), self.scope.keys(packed)

    def _fetch(self, fetch: Fetch, number: int) -> Packed:
        lacking = [name for name in fetch.names if name not in self.names]
        if lacking:
            raise UsageError(f"replica {self.identity.replica_id} has no name `{'`, `'.join(lacking)}`")
        return self.namespace.export(
            fetch.names,
            tag=number,
            owner=fetch.owner,
            trained=True,
            whole=True,
            compare=fetch.compare,
            standing=fetch.standing,
        )

    @contextlib.contextmanager
    def _synchronizing(self, synchronize: bool) -> Iterator[None]:
        self.gradients.enabled = synchronize
        try:
            with self.scope:
                yield
        finally:
            self.gradients.enabled = True
            self.scope.settle()

    # ------------------------------------------------------------------ failures

    def failure(self, error: BaseException, rendered: tuple[str, ...] = ()) -> Failure:
        """Turn an exception into what travels."""
        shares = self.gradients.shares
        self.gradients.reset()
        self._keep_until_told(error)
        told = _by_a_peer(error)
        if told is not None:
            error, rendered = told, (f"{type(told).__name__}: {told}",)
        lack = full.cause(error)
        memory = full.memory(lack, self.identity.device) if lack is not None else ""
        line = whereabouts.line_of(error.__traceback__, self.cell_numbers)
        lines = rendered or tuple("".join(traceback.format_exception(type(error), error, _users(error))).splitlines())
        self._was_full = self._was_full or lack is not None
        # In the notebook's own process the user has to see to it.
        self.gpu_lost = self.gpu_lost or (self.own_process and broken.is_lost(self.identity.device))
        grown = any(map(_could_not_grow, raised.chain(error, suppressed=False)))
        if grown:
            self._progress.give_memory()
        clean = error.with_traceback(None)
        self.label(type(error))
        try:
            # Frames keep the failed cell's tensors alive, here and in the copy.
            clean.__cause__ = clean.__context__ = None
            pickled: bytes | None = dumps(clean)
            pickle.loads(pickled or b"")
        except Exception:
            pickled = None
        for name in ("last_traceback", "last_value", "last_type", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        return Failure(
            type_name=type(error).__name__,
            message=raised.text(error),
            traceback=lines,
            pickled=pickled,
            interrupted=isinstance(error, KeyboardInterrupt),
            secondary=isinstance(error, PeerFailed) or _told_by_torch(error),
            line=line,
            memory=memory,
            grown=grown,
            gpu_lost=self.gpu_lost,
            shares=shares,
        )

    def _keep_until_told(self, error: BaseException) -> None:
        for one in raised.chain(error):
            if one.__traceback__ is not None:
                self._failed.append(one.__traceback__)


def _could_not_grow(error: BaseException) -> bool:
    """Whether it is what torch says of a tensor whose memory others map, and which it leaves with the new sizes."""
    return isinstance(error, RuntimeError) and "resize storage that is not resizable" in raised.text(error)


def _by_a_peer(error: BaseException) -> PeerFailed | None:
    """Return what an interrupt for a peer's failure has come in the midst of, where that tells of the same."""
    found = raised.chain(error) if getattr(error, "unseen", False) else ()
    return next((one for one in found if isinstance(one, PeerFailed)), None)


def _told_by_torch(error: BaseException) -> bool:
    """Whether it is a PeerFailed that has passed through torch's C++, a future's callback say: its text alone does."""
    return type(error) is RuntimeError and _TOLD.match(str(error)) is not None


_TOLD = re.compile(
    r"(Got the following error when running the callback: |RuntimeError: )*PeerFailed: .*\n\nAt:\n", re.DOTALL
)


def _users(error: BaseException) -> types.TracebackType | None:
    """Return the traceback without frames of mirror_nb around the user's; where there are no others, an error of ours
    needs none: it tells what is wrong with a call.
    """
    trace = _after_ours(error.__traceback__)
    return users_frames(trace) if isinstance(error, MirrorError) else without_hidden(trace)


def _after_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without the frames of mirror_nb that it begins with, unless there are no others."""
    first = trace
    while first is not None and first.tb_frame.f_globals.get("__name__", "").startswith("mirror_nb."):
        first = first.tb_next
    return trace if first is None else first


def _in_users_code(error: BaseException) -> bool:
    """Whether lines of the user's led to an exception, or only those of mirror_nb, torch and Python."""
    roots = {f.f_globals.get("__name__", "").partition(".")[0] for f, _ in traceback.walk_tb(error.__traceback__)}
    return not roots <= {"mirror_nb", "torch", *sys.stdlib_module_names}


def _communication(pickled: bytes, identity: Identity) -> Communication:
    if pickled:
        found: Communication = pickle.loads(pickled)
        return found
    kind = identity.device.type
    return chosen(None, None, [Device(kind, i) for i in range(identity.num_replicas)])


@contextlib.contextmanager
def _impatient_loaders() -> Iterator[None]:
    """Have loaders that are let go of wait for their workers for LOADER_SECONDS, and then end them.

    Not the 5 s that torch gives them: the next cell would wait for workers whose work nobody wants any more.
    """
    before = torch_loaders.MP_STATUS_CHECK_INTERVAL
    torch_loaders.MP_STATUS_CHECK_INTERVAL = LOADER_SECONDS
    try:
        yield
    finally:
        torch_loaders.MP_STATUS_CHECK_INTERVAL = before


def _plainly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _as_they_are(weighed: Sequence[tuple[Any, Shares]]) -> contextlib.AbstractContextManager[None]:
    return _usual


def _on_device(
    device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any], weighed: Sequence[tuple[Any, Shares]]
) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[Any, Shares]]]:
    """Bring arguments to the device; parts of batches among them are other tensors then."""
    moved = to_device((args, kwargs), device)
    before, after = map(pytree.tree_leaves, ((args, kwargs), moved))
    became = dict(zip(map(id, before), after, strict=True))
    leaves = ((leaf, shares) for part, shares in weighed for leaf in pytree.tree_leaves(part))
    return *moved, [(became.get(id(leaf), leaf), shares) for leaf, shares in leaves]


def _check_visitors(modules: list[nn.Module], stays: Callable[[object], bool]) -> None:
    """Refuse that a copy, which is gone after the call, was trained; parts of it may be mirrored."""
    # Parts are complete before what they are parts of.
    for module in reversed(modules):
        if any(parameter.grad is not None and not stays(parameter) for parameter in module.parameters()):
            raise UsageError(
                f"a {type(module).__name__} the function captured got gradients, but it is not mirrored: this was "
                "a copy, and what it learns would be lost. Create it inside `with strategy.scope():`, or mirror it "
                "with strategy.mirror(module)"
            )


def _check_unchanged(leaves: list[tuple[torch.Tensor, int]]) -> None:
    """Refuse that a copy of what can be trained, which is gone after the call, was written to; `leaves`: versions."""
    for leaf, version in leaves:
        if leaf._version != version:
            raise UsageError(
                f"the function wrote to a {type(leaf).__name__} of shape {tuple(leaf.shape)} that it captured and "
                "that is not mirrored: this was a copy, and the change would be lost. Create its module inside `with "
                "strategy.scope():`, mirror that with strategy.mirror(module), or make the tensor a mnb.Variable; to "
                "change something for this call alone, copy it in the function (copy.deepcopy)"
            )


def _named(path: str) -> Callable[[Replica], dict[str, Any]]:
    module, _, function = path.partition(":")
    found: Callable[[Replica], dict[str, Any]] = getattr(importlib.import_module(module), function)
    return found
