"""Optimizers, schedulers and scalers of the notebook that its replicas have too: mirrored cells use them there.

    settings, where schedulers and scalers stand   ◀─ after each cell ─▶ before the next, if they changed here
    states of optimizers (moments and the like)    ◀─ when they are asked for ─▶ before the next, if they changed here

Knows the pool's requests; knows no names and shows nothing.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import nn

from mirror_nb.errors import ReplicaDied, ReplicaError, TransferError, UsageError, users_level
from mirror_nb.messages import Call
from mirror_nb.pool.base import Pool
from mirror_nb.pool.failures import raise_for, settle
from mirror_nb.pool.report import Report
from mirror_nb.strategies.objects import Objects, optimizer_of
from mirror_nb.strategies.states import States, kept, load_state, own_state, state_of
from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.packing import pack
from mirror_nb.transfer.told import is_told, parameters_of

KEEP_SECONDS = 5.0
# So long the end of replicas waits for states that nobody has asked for.
READS = 3
# Attempts to read a state from replicas that die meanwhile.


@final
class Lent:
    """Which of the notebook's objects each replica has; `ready()` gives the replicas, None where there are none."""

    def __init__(self, ready: Callable[[], Pool | None]) -> None:
        self.calls = 0
        # Cells that have run, each of which may have changed states.
        self._ready = ready
        self._objects = Objects()
        self._states = States(self)
        self._holders: dict[str, set[int]] = {}
        self._bereft: weakref.WeakKeyDictionary[Any, dict[int, list[weakref.ref[nn.Module]]]]
        self._bereft = weakref.WeakKeyDictionary()
        # Optimizers that replicas have, but no more the networks here that these train: over others' tensors there.
        self._lead = 0
        # Whose states are read, if it has them.
        self._lost: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # Whose states were in replicas that have them no more.
        self._timeout: float | None = None

    # ------------------------------------------------------------------ who has what

    def add(self, obj: Any) -> str:
        """Return the object's handle, and look after it from now on."""
        if not self._objects.has(obj):
            self._watch(obj)
        return self._objects.add(obj)

    def learn(self, handle: str, obj: Any, replicas: Iterable[int], with_state: bool = False) -> None:
        """Look after an object that a cell made in these replicas, where the handle means it.

        `with_state`: an optimizer has the state here that it has there. One that is here already takes over its
        parameter groups: the cell has added some.
        """
        known = self._objects.find(handle)
        if known is None:
            self._watch(obj)
            self._objects.learn(handle, obj)
            known = obj
        else:
            known.param_groups = obj.param_groups
        self._objects.mark_sent(known)
        if with_state:
            self._states.have(known)
        self._holders.setdefault(handle, set()).update(replicas)

    def _watch(self, obj: Any) -> None:
        if isinstance(obj, torch.optim.Optimizer):
            self._states.watch(obj)

    def all(self) -> list[Any]:
        """Return every object that has a handle."""
        return self._objects.all()

    def token(self, obj: object) -> Any:
        """Return what stands for the object whoever has it, None if it is none that is lent."""
        return ("object", self.add(obj)) if is_told(obj) else None

    def handle(self, obj: object) -> str | None:
        """Return the handle of an object that is lent, None if it is not."""
        return self._objects.handle(obj) if is_told(obj) else None

    def reference(self, obj: Any, replicas: Iterable[int]) -> Any:
        """For `pack`: the object's token if all these replicas have it; else it is made ready to be sent."""
        if all(self.held(obj, replica_id) for replica_id in replicas):
            return self.token(obj)
        if isinstance(obj, torch.optim.Optimizer):
            # For what this brings here: its state, from the replicas that have it, these or a strategy's.
            own_state(obj)
        return None

    def held(self, obj: Any, replica_id: int) -> bool:
        """Whether the replica has the object, and it need not be sent again."""
        return replica_id in self._holders.get(self._objects.handle(obj) or "", ()) and self.is_as_sent(obj)

    def trained_in(self, replicas: Iterable[int]) -> dict[int, tuple[str, str, int]]:
        """Return what stands for each tensor that optimizers of all these replicas train, by its id."""
        replicas = tuple(replicas)
        optimizers = [obj for obj in self._objects.all() if isinstance(obj, torch.optim.Optimizer)]
        return {
            id(parameter): ("trained", self.add(obj), i)
            for obj in reversed(optimizers)
            if all(self.held(obj, replica_id) for replica_id in replicas)
            for i, parameter in enumerate(parameters_of(obj))
        }

    def is_as_sent(self, obj: object) -> bool:
        """Whether it is no optimizer, nor the scheduler of one, that is to be sent again.

        Since it got other parameters here, or its network is gone where it was sent.
        """
        optimizer = optimizer_of(obj) if is_told(obj) else None
        if optimizer is None:
            return True
        gone = (network for networks in self._bereft.get(optimizer, {}).values() for network in networks)
        return self._objects.same_groups(optimizer) and all(network() is None for network in gone)

    def bereave(self, network: nn.Module, replica_id: int) -> None:
        """The replica has a network, or a part of one, no more: what trains it there is over its old tensors."""
        own = {id(parameter) for parameter in network._parameters.values()}
        for obj in self._objects.all() if own else ():
            if isinstance(obj, torch.optim.Optimizer) and not own.isdisjoint(map(id, parameters_of(obj))):
                self._bereft.setdefault(obj, {}).setdefault(replica_id, []).append(weakref.ref(network))

    def resolve(self, token: Any) -> object:
        """For `unpack`: the object that a replica's token means. Raises TransferError if it is gone."""
        obj = self._objects.find(token[1])
        if obj is None:
            raise TransferError(f"the payload refers to {token!r}, which no longer exists here; bind it anew")
        return obj

    def arrived(self, objects: Iterable[Any], replicas: Iterable[int]) -> None:
        """These replicas have these objects as they are here."""
        replicas = set(replicas)
        for obj in objects if replicas else ():
            self._objects.mark_sent(obj)
            self._holders.setdefault(self.add(obj), set()).update(replicas)
            if isinstance(obj, torch.optim.Optimizer):
                for replica_id in replicas:
                    self._bereft.get(obj, {}).pop(replica_id, None)
                self._states.have(obj)

    def forget_replica(self, replica_id: int) -> None:
        """The replica starts anew and has nothing."""
        for holders in self._holders.values():
            holders.discard(replica_id)

    def gone(self, handle: str, replica_id: int) -> None:
        """The replica's cells have let go of what they had made."""
        self._holders.get(handle, set()).discard(replica_id)
        obj = self._objects.find(handle)
        if isinstance(obj, torch.optim.Optimizer) and not self._holders.get(handle) and not self._states.here(obj):
            self._lost.add(obj)

    def restored(self, replica_id: int, source: int) -> None:
        """The replica took over everything that `source` has."""
        for holders in self._holders.values():
            if source in holders:
                holders.add(replica_id)

    # ------------------------------------------------------------------ what changed

    def send_changes(self) -> None:
        """Tell the replicas what changed here; what a report says is raised."""
        self._states.push()
        changed, released = self._objects.changed_settings(), tuple(self._objects.take_released())
        for handle in released:
            self._holders.pop(handle, None)
        pool = self._ready()
        if pool is not None and (changed or released):
            raise_for(self._asked(pool, range(pool.size), _nothing, (), changed, released), pool.devices)

    def send_again(self, objects: Iterable[Any]) -> None:
        """Give the replicas what is here of these objects, though nothing has changed here."""
        for obj in objects:
            if is_told(obj) and self.has_sent(obj):
                self._objects.unsettle(obj)
                if isinstance(obj, torch.optim.Optimizer):
                    self.load_state(obj, own_state(obj))
        self.send_changes()

    def take_changes(self, report: Report, lead: int) -> None:
        """A cell has run: take over what `lead` tells of it."""
        self.calls += 1
        ended = {replica_id: answer.done for replica_id, answer in report.answers.items() if answer.done is not None}
        self._lead = lead if lead in ended else min(ended, default=lead)
        for handle, settings in ended[self._lead].settings if ended else ():
            self._objects.take_settings(handle, settings)

    def read_settings(self, pool: Pool, lead: int) -> None:
        """Take over what `lead` has to tell, as after a cell."""
        self.take_changes(self._asked(pool, [lead], _nothing, ()), lead)

    def keep(self, pool: Pool, also: Callable[[], None]) -> None:
        """Bring all states here, since the replicas are about to end, and forget who had what; `also` asks all."""
        before = self._ready

        def living() -> Pool:
            for death in pool.dead():
                # Nobody is to take their place any more.
                self.forget_replica(death.replica_id)
            return pool

        def together() -> None:
            # What all compute together needs them whole again after one's error, and as many of them.
            self._ready = before if len(pool.dead()) < pool.size else living
            also()

        self._ready, self._timeout = living, KEEP_SECONDS
        try:
            living()
            for lost in kept([*self._learned(), ("metrics", together)]):
                warnings.warn(f"the replicas ended without the latest values of {lost}", stacklevel=users_level())
        finally:
            self._ready, self._timeout = before, None
        # Not after an interrupt: the replicas live on.
        self._holders.clear()

    def _learned(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for obj in self._objects.all():
            if isinstance(obj, torch.optim.Optimizer) and obj not in self._lost:
                yield f"the {type(obj).__name__}", functools.partial(self._states.read, obj)

    # ------------------------------------------------------------------ for States

    def has_sent(self, obj: object) -> bool:
        """Whether a replica has the object, or had what is of it."""
        return bool(self._holders.get(self._objects.handle(obj) or "")) or obj in self._lost

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Return the state that the optimizer has in the replica whose networks came back last."""
        if optimizer in self._lost:
            raise UsageError(
                f"the state of this {type(optimizer).__name__} was in the replicas, where a cell has since given its "
                "name to something else: call its state_dict() before that, or give it a state with load_state_dict()"
            )
        for attempt in range(READS):
            pool = self._ready()
            holders = self._holders.get(self.add(optimizer))
            if pool is None or not holders:
                break
            asked = self._lead if self._lead in holders else min(holders)
            report = self._asked(pool, [asked], state_of, (optimizer,))
            answer = report.answers[asked]
            if answer.done is not None and answer.done.payload is not None:
                # Whatever became of others meanwhile.
                state: dict[Any, Any] = unpack(answer.done.payload, answer.taken())[0]
                return state
            try:
                raise_for(report, pool.devices, self._timeout)
            except ReplicaDied:
                if attempt + 1 == READS:
                    raise
        # All that had it died: there is none but the one here, which is not to be asked for in turn.
        self._states.have(optimizer)
        return own_state(optimizer)

    def trained(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
        """Return what the optimizer trains in the replicas, in its order."""
        return self._objects.trained(optimizer)

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
        """Give all replicas that have the optimizer this state."""
        self._lost.discard(optimizer)
        pool = self._ready()
        holders = self._holders.get(self.add(optimizer))
        if pool is not None and holders:
            raise_for(self._asked(pool, sorted(holders), load_state, (optimizer, state)), pool.devices)

    def replicas(self) -> set[int]:
        """Return the ids of the replicas that there are now, new ones in the place of those that died."""
        pool = self._ready()
        return set() if pool is None else set(range(pool.size))

    def ask_all(self, fn: Callable[..., Any], args: tuple[Any, ...], token: Callable[[object], Any]) -> Any:
        """Call `fn` in all replicas, whose objects `token` means; return what the first of them returned."""
        pool = self._ready()
        if pool is None:
            raise ReplicaError("there are no replicas to ask; start some (%mirror start)")
        report = self._asked(pool, range(pool.size), fn, args, token=token)
        settle(report, pool.devices, self._timeout)
        return next(result for result, _ in report.unpacked().values())

    def _asked(
        self,
        pool: Pool,
        replicas: Iterable[int],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        settings: tuple[tuple[str, Any], ...] = (),
        released: tuple[str, ...] = (),
        token: Callable[[object], Any] | None = None,
    ) -> Report:
        function = pack(fn, in_band=True).payload
        with contextlib.closing(pack((args, {}), reference=token or self.token)) as packed:
            call = Call(function, packed.payload, plain=True, released=released, settings=settings)
            replicas = list(replicas)
            slabs = dict.fromkeys(replicas, packed.slab)
            return pool.run(dict.fromkeys(replicas, call), slabs=slabs, timeout=self._timeout)


def _nothing() -> None:
    pass
