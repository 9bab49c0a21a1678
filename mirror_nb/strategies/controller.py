"""The controller's place: the notebook kernel or a script that commands replicas in processes of their own.

run ─▶ what is captured ─┬─ mirrored: a reference (the object itself, once) ─▶ replicas
                         └─ the rest: by value, each time
results ◀─ regrouped ◀───── replicas;  networks are read back when somebody reads them
"""

from __future__ import annotations

import functools
import importlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from typing import Any, TypeVar, final

import torch
from torch import nn

from mirror_nb.collectives.options import Communication
from mirror_nb.devices import Device
from mirror_nb.environment import modes, surroundings
from mirror_nb.errors import ContextError, ReplicaDied, TransferError, UsageError, users_level
from mirror_nb.messages import Call, Communicate, Fetch, LoadModules, Mirror
from mirror_nb.mirroring.mirrors import absorb_states
from mirror_nb.mirroring.networks import called
from mirror_nb.pool.failures import raise_for, settle
from mirror_nb.pool.local import LocalPool, warm_up
from mirror_nb.pool.recovery import compare, recover
from mirror_nb.pool.report import Report
from mirror_nb.strategies import creation, input
from mirror_nb.strategies.base import Strategy
from mirror_nb.strategies.batch_shares import batches_in, of_batch, weigh_alike, weighed
from mirror_nb.strategies.controller_variables import ControllerHome
from mirror_nb.strategies.functions import Functions, names_in
from mirror_nb.strategies.listener import Listener
from mirror_nb.strategies.misuse import (
    made_elsewhere,
    refuse_steps,
    warn_of_blind_writes,
    warn_of_lost,
    warn_of_mixed,
    warn_of_parted_networks,
    warn_of_undivided,
)
from mirror_nb.strategies.objects import optimizer_of
from mirror_nb.strategies.place import Mended, Place
from mirror_nb.strategies.reading import reading
from mirror_nb.strategies.reductions import (
    check_size,
    gather_local,
    local_parts,
    parts_of,
    reduce_local,
    regroup,
    select,
)
from mirror_nb.strategies.references import References
from mirror_nb.strategies.states import States, add_groups, groups_from, kept, load_state, state_of
from mirror_nb.telemetry.comparison import Comparison, Parted
from mirror_nb.telemetry.timeline import Timeline
from mirror_nb.transfer import torchmetrics_objects
from mirror_nb.transfer.opening import note_not_made_again
from mirror_nb.transfer.packing import members, pack, unsendable
from mirror_nb.transfer.payload import Packed
from mirror_nb.transfer.told import is_told
from mirror_nb.values import DistributedValues, PerReplica, ReduceOp
from mirror_nb.variables import Variable, alike, component, one_of, update_component

_NO_ARGUMENTS = pack(((), {}))
READS = 3
# Attempts to read from replicas that die meanwhile.

_Answer = TypeVar("_Answer")


@final
class ControllerPlace(Place):
    """Commands a pool of its own, started with the first call; `setup` names what its replicas call first."""

    def __init__(
        self, devices: tuple[Device, ...], *, setup: str, seed: int, reduction: str, communication: Communication
    ) -> None:
        self.num_replicas = len(devices)
        self.devices = tuple(str(device) for device in devices)
        self.replica_id = self.device = self.seat = None
        self.stale = False
        self.calls = 0
        self._refreshing = False
        self._half_read = False
        # The replicas take for known here what an interrupted read may have lost.
        self._names = devices
        self.communication = communication
        self._make_pool = lambda: LocalPool(
            devices, setup=setup, seed=seed, reduction=reduction, communication=self.communication.pickled()
        )
        self._pool: LocalPool | None = None
        self._timeline: Timeline | None = None
        # One, so that it knows what rings have overwritten since.
        self._dashboard: Any = None
        # Made by the notebook floor, when it is asked for.
        self._replaced: dict[int, str] = {}
        self._survived = True
        # Since `mend` told it.
        self._told_of_undivided = False
        self._parted = Parted()
        # Bound now: the last objects go as the interpreter ends, when this module has no names any more.
        released = functools.partial(reading.release, self)
        self._references = References(lambda strategy: strategy._place is self, released, self._note)
        self._objects = self._references.objects
        self._followed: tuple[int, int] | None = None
        # When the replicas were last told what this process has set for all of its code.
        self._signs = surroundings.Signs()
        surroundings.follow_cells()
        self._functions = Functions(self._references.has_token)
        self._states = States(self)
        self._home = ControllerHome(self)
        # The forkserver loads torch while the caller goes on.
        warm_up()

    # ------------------------------------------------------------------ scope

    def scope(self) -> AbstractContextManager[None]:
        self.check_open()
        return creation.noted(self._note)

    def mirror(self, obj: Any) -> Any:
        # A torch.Generator has no weak references in torch 2.11, and is mirrored all the same.
        if not type(obj).__weakrefoffset__ and not is_told(obj):
            raise UsageError(
                f"a {type(obj).__name__} cannot be mirrored: numbers, strings and containers travel by value with "
                "each call. Make it an attribute of an object, and mirror that; or a mnb.Variable"
            )
        if isinstance(obj, torch.Tensor) and obj.requires_grad and not isinstance(obj, Variable):
            raise UsageError(
                f"a {type(obj).__name__} that is trained cannot be mirrored alone: what replicas make of it would not "
                "come back here. Make it a mnb.Variable, or mirror the module that has it"
            )
        if isinstance(obj, torch.optim.Optimizer) and not is_told(obj):
            raise UsageError(
                f"{type(obj).__name__} is an optimizer around another one, with nothing of its own to mirror: make"
                " that one inside `with strategy.scope():`, or mirror it, and functions may use this one as it is"
            )
        if isinstance(obj, Variable) and obj.home is not self._home:
            raise made_elsewhere(obj)
        for part in obj.modules() if isinstance(obj, nn.Module) else (obj,):
            self._note(part)
        return obj

    def _note(self, made: Any) -> None:
        """Mirror what has just been made, without its parts: those of a module were made before, or come later."""
        if not self._objects.has(made):
            self._objects.add(made)
            if isinstance(made, torch.optim.Optimizer):
                self._states.watch(made)
                # Weakly: it may outlive the strategy, and is then an optimizer like any other.
                place = weakref.ref(self)
                refuse_steps(made, lambda: (known := place()) is not None and not known.closed)

    @property
    def takes_part(self) -> bool:
        return True

    def no_sync(self) -> AbstractContextManager[None]:
        raise ContextError("no_sync belongs to a replica: use it in the function given to strategy.run")

    def mirrors(self, obj: Any) -> bool:
        return self._objects.has(obj)

    def communicate(self, by: Communication) -> None:
        self.check_open()
        if self._pool is not None:
            pickled = by.pickled()
            requests = dict.fromkeys(range(self.num_replicas), Communicate(pickled))
            self._answered(lambda attempt: self._settled(self._ready().run(requests)))
            # Only now: what replicas refuse, those that take the place of dead ones would refuse, too.
            self._pool.communication = pickled
        self.communication = by
        if self._pool is not None:
            self._pool.tell(self._title(), self._operation())
            if self._dashboard is not None:
                self._dashboard.reduces_by(self._operation())

    # ------------------------------------------------------------------ run

    def run(self, strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._dashboard is not None:
            self._dashboard.between_calls()
        try:
            captured: list[DistributedValues] = []
            parts = parts_of((args, kwargs))
            results = regroup(self._call(fn, args, kwargs, parts, captured), functools.partial(self._join, {}))
            batches = batches_in([*parts, *captured])
            return of_batch(results, batches[0].shares) if batches else results
        except UsageError as error:
            # The caller's lines tell where; those of the pickling below them help nobody.
            raise error.with_traceback(None) from None
        finally:
            self._let_go()

    def command(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        changes: bool = True,
        on_note: Callable[[Any], None] = lambda value: None,
    ) -> list[Any]:
        behind, calls = self.stale, self.calls
        try:
            return self._call(fn, args, {}, plain=True, on_note=on_note)
        finally:
            if not changes:
                self.stale, self.calls = behind, calls
            self._let_go()

    def ask(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        return self._answered(lambda attempt: self.command(fn, args, changes=False))

    def _let_go(self) -> None:
        if self.stale:
            # Who reads a network again gets its new values first.
            self._references.mirrors.let_go()

    @property
    def open(self) -> bool:
        """Whether there are replicas to ask."""
        return self._pool is not None and not self.closed and not self._pool.forked

    def has_sent(self, obj: object) -> bool:
        """Whether there are replicas that have an object that is mirrored."""
        return self.open and self._objects.is_sent(obj)

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Return replica 0's state of an optimizer."""
        wanted = PerReplica([replica_id == 0 for replica_id in range(self.num_replicas)])
        state: dict[Any, Any] = self.ask(state_of, (optimizer, wanted))[0]
        return state

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
        """Give all replicas a state."""
        self.ask(load_state, (optimizer, state))

    def trained(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
        """Return what the replicas' optimizer trains, in its order."""
        return self._objects.trained(optimizer)

    def log(self, values: dict[str, Any]) -> None:
        raise ContextError("losses are a replica's: log them in the function given to strategy.run")

    def told(self, examples: int | None) -> None:
        raise ContextError("steps are a replica's: tell of them in the function given to strategy.run")

    def timeline(self) -> Timeline:
        if self._timeline is None:
            self._timeline = self._ready().timeline()
            assert self._timeline is not None
        self._timeline.update()
        return self._timeline

    def dashboard(self) -> Any:
        pool = self._ready()
        if self._dashboard is None:
            # By name: what draws lies above.
            live = importlib.import_module("mirror_nb.notebook.live")
            here = weakref.WeakMethod(self._title)

            def title() -> str:
                # Notebooks keep what they show; the replicas they need not keep.
                known = here()
                return "" if known is None else known()

            self._dashboard = live.LiveDashboard(pool, operation=self._operation(), title=title)
        return self._dashboard.show()

    def compare_parameters(self) -> Comparison:
        def ask(attempt: int) -> Comparison:
            pool = self._ready()
            self._push_changes()
            return compare(pool)

        return self._answered(ask)

    def _title(self) -> str:
        networks = self._references.mirrors.roots()
        return called(networks[-1][1]) if networks else ""

    def _operation(self) -> str:
        return type(self.communication.ops).__name__

    def _tick(self, pending: set[int]) -> None:
        if self._dashboard is not None:
            self._dashboard.tick(pending)

    def every(self, results: list[Any]) -> list[Any]:
        return results

    def draw_seed(self) -> int:
        return int(torch.randint(1 << 62, (), device="cpu"))

    def _call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parts: Sequence[DistributedValues] | None = None,
        captured: list[DistributedValues] | None = None,
        plain: bool = False,
        on_note: Callable[[Any], None] = lambda value: None,
    ) -> list[Any]:
        """Call a function on every replica, and return what each made of it.

        `parts`: what differs by replica in its arguments; what does so in the function itself is added to `captured`.
        """
        pool = self._ready()
        parts = parts_of((args, kwargs)) if parts is None else parts
        captured = [] if captured is None else captured
        for part in parts:
            check_size(part, self.num_replicas)
        packed: list[Packed] = []
        try:
            mirrors = None
            while mirrors is not self._references.mirrors:
                # Once more where all replicas died meanwhile: those in their places know nothing by what was packed.
                mirrors = self._references.mirrors
                while packed:
                    packed.pop().close()
                calls = self._prepared(pool, fn, args, kwargs, parts, captured, packed, plain)
            slabs = {i: packed[i if parts else 0].slab for i in calls}
            any_sent = self._objects.any_sent
            listener = Listener(on_note, calls)
            try:
                report = pool.run(calls, slabs=slabs, on_message=listener.take, on_tick=self._tick)
            finally:
                # Here, with no call between: an interrupt may come as soon as `run` collects it no more.
                self.stale = self.stale or any_sent
                self.calls += 1
                listener.close()
            if self._dashboard is not None:
                self._dashboard.ended(report)
        finally:
            for sent in packed:
                sent.close()
        try:
            return self._taken(fn, report, plain)
        except BaseException:
            self._functions.drop(fn)
            raise

    def _prepared(
        self,
        pool: LocalPool,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parts: Sequence[DistributedValues],
        captured: list[DistributedValues],
        packed: list[Packed],
        plain: bool,
    ) -> dict[int, Call]:
        """Return each replica's call, all of whose objects it has by then; arguments are `packed`, to be closed."""
        wanted: list[Any] = []
        replicas, mirrors = range(self.num_replicas), self._references.mirrors

        def reference(obj: object) -> Any:
            if type(obj) is PerReplica:
                captured.append(obj)
            return self._references.token(obj, wanted)

        kept = self._functions.get(fn)
        self._follow(pool, anew=kept is None)
        try:
            function = kept or pack(fn, reference=reference, in_band=True).payload
        except TransferError as reason:
            raise unsendable(reason, names_in(fn), "make it in the function", reference=reference) from None
        batches = batches_in([*parts, *captured])
        given = (args, kwargs) if weigh_alike(batches) else weighed((args, kwargs))
        # One for all where nothing in them differs.
        for own in [select(given, i) for i in replicas] if parts else [given]:
            try:
                packed.append(pack(own, reference=reference) if args or kwargs else _NO_ARGUMENTS)
            except TransferError as reason:
                named = {**members("args", own[0]), **own[1]}
                raise unsendable(reason, named, "make it in the function", reference=reference) from None
        if wanted:
            self._send_lacking(wanted)
        self._push_changes()
        self._states.push()
        self._home.push()
        if kept is None and mirrors is self._references.mirrors:
            self._functions.keep(fn, function)
        changed = self._objects.changed_settings()
        released = tuple(self._objects.take_released())
        around, now = (None, None) if plain else (modes.current(), surroundings.moment)
        about = released, changed, kept is not None, around, now
        shares = batches[0].shares if batches else None
        made = [
            Call(function, own.payload, plain, None if shares is None else (shares[i], sum(shares)), *about)
            for i, own in enumerate(packed)
        ]
        return {i: made[i if parts else 0] for i in replicas}

    def _send_lacking(self, wanted: list[Any]) -> None:
        """Have the replicas get what they lack of the objects that a call needs."""
        if self.stale and any(map(self.holds, self._references.parts(wanted))):
            # Both sides take for equal from then on what a network has that is sent, parts there included.
            self.refresh()
        # First what was written to the parts that a network of other parts has kept: they stay there.
        self._push_changes()
        self._send_objects([w for w in wanted if isinstance(w, nn.Module) or not self._objects.is_sent(w)])
        self._push_groups(wanted)

    def _taken(self, fn: Callable[..., Any], report: Report, plain: bool) -> list[Any]:
        """Take over what a call has changed, and return its results. Raises what the replicas raised."""
        # Of a call that failed, too: networks here show what it did before that, and so do learning rates.
        self._take_settings(report)
        settle(report, self._names)
        results = self._results(report)
        for optimizer in self._objects.take_grown_there():
            self._take_groups(optimizer)
        lost = [path for answer in report.answers.values() if answer.done is not None for path in answer.done.lost]
        # Last: who makes errors of warnings has what was trained all the same.
        if lost:
            warn_of_lost(fn, list(dict.fromkeys(lost)))
        mixed = report.mixed_files()
        if mixed:
            warn_of_mixed(fn, mixed)
        if not (plain or self._told_of_undivided) and report.undivided_loaders():
            self._told_of_undivided = True
            warn_of_undivided(fn, self.num_replicas)
        return results

    def _follow(self, pool: LocalPool, anew: bool) -> None:
        """Tell the replicas what this process has set for all of its code since they were told."""
        moment = surroundings.moment, pool.generation
        # Not all at each call: to look takes a third of the time of a small one.
        if anew or moment != self._followed or not self._signs.hold():
            signs = surroundings.Signs()
            followed = pool.follow_controller(signs)
            if followed is not None:
                settle(followed, self._names)
            self._followed, self._signs = moment, signs

    def _take_settings(self, report: Report) -> None:
        """Take over what replica 0 tells of optimizers and schedulers, or who takes its place if it has died."""
        ended = {r: answer.done for r, answer in report.answers.items() if answer.done is not None}
        for handle, settings in ended[min(ended)].settings if ended else ():
            self._objects.take_settings(handle, settings)

    def _results(self, report: Report) -> list[Any]:
        try:
            with closing(report):
                return [result for result, _ in report.unpacked(self._references.resolve).values()]
        except Exception as error:
            note_not_made_again(error, "what the function returned")
            raise

    # ------------------------------------------------------------------ objects by reference

    def _send_objects(self, wanted: list[Any]) -> None:
        """Send objects that the replicas lack."""
        if not wanted:
            return
        packed, objects, networks = self._references.packed(wanted)
        self._request(Mirror(packed.payload), packed)
        for obj in objects.values():
            if isinstance(obj, Variable):
                self._home.sent(obj)
        # Only now: Variables that the replicas have are none of their networks' values any more.
        self._references.sent(objects, networks)
        assert self._pool is not None
        self._pool.tell(self._title(), self._operation())
        reading.add(self, keep=True)
        for network in networks:
            torchmetrics_objects.watch(network, self._ask)

    def _ask(self, metric: Any, method: str) -> Any:
        return self.ask(torchmetrics_objects.asked, (metric, method))[0]

    def _push_groups(self, wanted: list[Any]) -> None:
        """Give the replicas the parameter groups that optimizers among these, and of schedulers, have got here."""
        for obj in wanted:
            optimizer, known = optimizer_of(obj), self._objects.grown(obj)
            if optimizer is None or known is None:
                continue
            # Before they have them: the call below comes here too.
            self._objects.know_groups(optimizer)
            try:
                self.command(add_groups, (optimizer, known, optimizer.param_groups[known:]), changes=False)
            except BaseException:
                self._objects.know_groups(optimizer, known)
                raise
            # For the replicas to learn that both sides have these groups.
            self._objects.unsettle(optimizer)

    def _take_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the parameter groups that an optimizer has got in the replicas: its parameters may be of new parts."""
        first = len(optimizer.param_groups)
        wanted = PerReplica([replica_id == 0 for replica_id in range(self.num_replicas)])
        try:
            self.refresh()
            add_groups(optimizer, first, self.command(groups_from, (optimizer, first, wanted), changes=False)[0])
        except BaseException:
            self._objects.grew_there(optimizer)
            raise
        self._objects.know_groups(optimizer)
        # For the replicas to learn that both sides have these groups.
        self._objects.unsettle(optimizer)

    def _push_changes(self) -> None:
        """Give the replicas the values of networks that were written to here."""
        changed, blindly = self._references.changes(unread=self.stale)
        if changed:
            packed = pack(changed)
            self._request(LoadModules(packed.payload), packed)
        if blindly:
            # Last, as in `_taken`.
            warn_of_blind_writes(blindly)

    # ------------------------------------------------------------------ reading networks back

    def holds(self, module: nn.Module) -> bool:
        """Whether the replicas have this network."""
        return self._references.mirrors.find_handle(module) is not None

    def refresh(self) -> None:
        """Bring the networks here up to date with replica 0, statistics averaged over the replicas."""
        if self._refreshing or not self.open:
            return
        self._refreshing = True
        try:
            anew, self._half_read = self._half_read, True
            report = self._fetched(anew)
            states, sums = {}, []
            # Who reads a network in inference mode goes on to train it.
            with torch.inference_mode(False):
                for replica_id, (exports, arrivals) in report.unpacked(self._references.resolve).items():
                    states[replica_id] = exports.states
                    sums.append(exports.sums)
                    self._references.graft(exports.modules, arrivals, exports.moved, exports.replacing)
                absorb_states(self._references.mirrors, states, 0)
            # Only now: after a read that was interrupted the next one has to ask again.
            self.stale = self._half_read = False
            self._references.mirrors.remember()
        finally:
            self._refreshing = False
        parted = self._parted.note(sums)
        for kind in ("parameters", "buffers"):
            found = (self._references.mirrors.find(handle) for handle, which in parted if which == kind)
            # Last, as in `_taken`.
            warn_of_parted_networks(kind, [called(network) for network in found if network is not None])

    def clear_gradients(self, owner: Any, set_to_none: bool) -> None:
        if self.open and (self.holds(owner) if isinstance(owner, nn.Module) else self.trains(owner)):
            self.ask(_clear_gradients, (owner, set_to_none))

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the replicas have the optimizer, or at least its network."""
        if not self.mirrors(optimizer):
            return False
        return self.has_sent(optimizer) or any(
            self._references.mirrors.reference(p) is not None for p in optimizer.param_groups[0]["params"][:1]
        )

    def _fetched(self, anew: bool) -> Report:
        """Ask for the networks."""
        # A network that has been wrapped is told of by itself once the whole is gone here (`del wrapped`).
        released = tuple(self._objects.take_released())

        def ask(attempt: int) -> Report:
            pool = self._ready()
            self._push_changes()
            again = anew or attempt > 0
            requests = {r: Fetch((), r == 0, again, compare=True, released=released) for r in range(self.num_replicas)}
            return self._settled(pool.run(requests))

        return self._answered(ask)

    def _settled(self, report: Report) -> Report:
        settle(report, self._names)
        return report

    @staticmethod
    def _answered(ask: Callable[[int], _Answer]) -> _Answer:
        """Ask what may be asked twice; again where a replica dies meanwhile: nobody has lost anything by that."""
        for attempt in range(READS - 1):
            with suppress(ReplicaDied):
                return ask(attempt)
        return ask(READS - 1)

    # ------------------------------------------------------------------ values

    def reduce(self, op: ReduceOp, value: Any, axis: tuple[int, ...] | None, where: str) -> Any:
        return reduce_local(op, value, axis, self.num_replicas)

    def gather(self, value: Any, axis: int, where: str) -> Any:
        return gather_local(value, axis, self.num_replicas)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        return local_parts(value, self.num_replicas)

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        raise ContextError("all_reduce belongs to a replica: call it in the function given to strategy.run")

    def all_gather(self, value: Any, axis: int) -> Any:
        raise ContextError("all_gather belongs to a replica: call it in the function given to strategy.run")

    def merge_call(
        self, strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise ContextError("merge_call belongs to a replica: call it in the function given to strategy.run")

    def values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        return input.values_from_function(value_fn, self.num_replicas)

    # ------------------------------------------------------------------ input

    def distribute_dataset(self, source: Any, **options: Any) -> Any:
        return input.ControllerDataset.of(source, self.num_replicas, **options)

    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any) -> Any:
        return input.ControllerFunctionDataset(dataset_fn, num_replicas=self.num_replicas, options=options)

    # ------------------------------------------------------------------ Variables

    def make_variable(self, value: Any, **options: Any) -> Any:
        return self.mirror(self._home.make(value, **options))

    def _join(self, known: dict[tuple[int, ...], Variable], components: Sequence[Variable]) -> Any:
        """Return the Variable that replicas have made in a function and returned, as tf.distribute does.

        `known`: those of the same results, each of which is one however often it is among them.
        """
        if not all(alike(components[0], other) for other in components[1:]):
            return PerReplica(components)
        key = tuple(map(id, components))
        if key not in known:
            known[key] = one_of(components, self.make_variable)
            self._home.join(known[key], [component(own) for own in components])
        return known[key]

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        return self._call(update_component, (variable, fn, args, kwargs), {}, plain=True)

    # ------------------------------------------------------------------ the pool

    def _ready(self) -> LocalPool:
        self.check_open()
        if self._pool is None:
            pool = self._make_pool()
            try:
                pool.start()
            except BaseException:
                pool.close()
                raise
            self._pool = pool
            # For who drops the strategy. At the process's end all pools are closed.
            weakref.finalize(self, pool.close).atexit = False
            return pool
        if not self._mend(self._pool):
            warnings.warn(
                "all replicas had died: networks, Variables and optimizers go on from what was last read here",
                stacklevel=users_level(),
            )
        return self._pool

    def mend(self) -> Mended:
        self.check_open()
        if self._pool is not None:
            self._mend(self._pool)
        replaced, survived = self._replaced, self._survived
        self._replaced, self._survived = {}, True
        return Mended(replaced, survived)

    def forget_deaths(self) -> None:
        if self._pool is not None:
            # One that dies meanwhile is missed by the next request.
            with suppress(ReplicaDied):
                self._ready()
        self._replaced, self._survived = {}, True

    def _mend(self, pool: LocalPool) -> bool:
        """Give replicas that were started anew what a survivor has; without one, what is here, and return False."""
        for death in pool.mend():
            self._replaced[death.replica_id] = str(death)
        if not (pool.blank or pool.apart) or recover(pool).source is not None:
            return True
        self._survived = False
        self._references.forget_sent()
        # Their pickles name objects as the dead knew them.
        self._functions.forget()
        return False

    def _request(self, what: object, packed: Packed) -> None:
        """Send every replica the same request, whose payload is `packed`."""
        pool = self._pool
        assert pool is not None
        replicas = range(self.num_replicas)
        try:
            report = pool.run(dict.fromkeys(replicas, what), slabs=dict.fromkeys(replicas, packed.slab))
        finally:
            packed.close()
        raise_for(report, self._names)

    def close(self) -> None:
        if self.closed or (self._pool is not None and self._pool.forked):
            return
        try:
            self._keep_what_was_learned()
        finally:
            self._end()

    def _keep_what_was_learned(self) -> None:
        """Bring networks, Variables, states of optimizers and metrics here, where they stay readable."""
        for lost in kept(self._learned()) if self._pool is not None else ():
            warnings.warn(f"closed without the latest values of {lost}", stacklevel=users_level())

    def _learned(self) -> Iterator[tuple[str, Callable[[], None]]]:
        if self.stale:
            yield "networks", self.refresh
        objects = self._objects.all()
        variables = [obj for obj in objects if isinstance(obj, Variable) and self._objects.is_sent(obj)]
        # All by one request, and each by itself: what cannot be kept costs the others nothing.
        fetched = functools.cache(lambda: self._home.fetched(variables))
        for variable in variables:
            yield f"the Variable {variable.name!r}", functools.partial(self._home.keep, variable, fetched)
        for obj in objects:
            if isinstance(obj, torch.optim.Optimizer):
                yield f"the {type(obj).__name__}", functools.partial(self._states.read, obj)
        modules = [obj for obj in objects if isinstance(obj, nn.Module)]
        yield "metrics", functools.partial(torchmetrics_objects.settle, modules)

    def _end(self) -> None:
        self.closed = True
        reading.remove(self)
        if self._dashboard is not None:
            self._dashboard.close()
        if self._pool is not None:
            self._pool.close()


def _clear_gradients(owner: Any, set_to_none: bool) -> None:
    owner.zero_grad(set_to_none)
