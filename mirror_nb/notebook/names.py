"""Which of the notebook's names each replica has, what a cell needs sent, and what it brought back.

Knows payloads, networks and the replicas' ids; sends nothing itself and shows nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mirror_nb.errors import TransferError, UsageError
from mirror_nb.messages import (
    Export,
    Exports,
    Holdings,
    KnownModule,
    Plain,
    Same,
    Setting,
    former,
    travels,
)
from mirror_nb.mirroring.attributes import set_named
from mirror_nb.mirroring.mirrors import Mirrors, absorb_states
from mirror_nb.notebook.incoming import Incoming, Undelivered, all_alike
from mirror_nb.notebook.lent import Lent
from mirror_nb.notebook.needs import Needs
from mirror_nb.notebook.parcels import Parcel, Parcels
from mirror_nb.notebook.shared import MISSING, SharedNames
from mirror_nb.noticing.contents import Content, class_content, content
from mirror_nb.noticing.insides import inside
from mirror_nb.noticing.kinds import has_an_identity
from mirror_nb.noticing.refilling import filling, is_refillable, refill, stays_itself
from mirror_nb.pool.failures import spans
from mirror_nb.strategies.reading import reading
from mirror_nb.transfer import torchmetrics_objects
from mirror_nb.transfer.keras_objects import reduce_keras
from mirror_nb.transfer.payload import Arrivals, Payload, unpack
from mirror_nb.transfer.told import is_told
from mirror_nb.values import PerReplica, Remote, merged

RESERVED = frozenset({"strategy", "replica_id", "num_replicas", "device"})
# Bound in every replica by mirror_nb; the notebook's own names of that kind stay in the notebook.


@dataclass(slots=True)
class Returned:
    """What came back from a cell."""

    bound: list[str] = field(default_factory=list)
    # Names that hold a value in the notebook now.
    stayed: list[str] = field(default_factory=list)
    # Names that hold a stand-in.
    deleted: list[str] = field(default_factory=list)
    # Names that the cell has deleted, in the notebook too.
    altered: list[str] = field(default_factory=list)
    # Names whose objects were changed in the replicas alone, as this cell was the first to show.
    diverged: list[str] = field(default_factory=list)
    # Networks whose parameters are not the same on all replicas any more, as this cell was the first to show.
    loose: list[str] = field(default_factory=list)
    # Names of tensors that can be trained, in no network, and not the same on all replicas, likewise.
    result: Any = None
    grads: bool | None = None
    # What the cell has given to torch.set_grad_enabled, if it left that other than it was.
    nbytes: int = 0
    problem: str | None = None
    # Why something could not be rebuilt here.


class Names:
    """The notebook's side of the names. `user_ns` is the dictionary of ordinary cells."""

    def __init__(self, user_ns: MutableMapping[str, Any], fetch: Callable[[str, int], Any], lent: Lent) -> None:
        self.user_ns = user_ns
        self.lent = lent
        self.mirrors = Mirrors("k")
        self.shared = SharedNames(user_ns, self._content)
        self._incoming = Incoming(user_ns, self.mirrors, lent, fetch, self._held)
        self._parcels = Parcels(user_ns, self.mirrors, lent, self)
        self._needs = Needs(user_ns, self.mirrors, self.shared, self.travels)
        self._awaited: dict[int, set[str]] = {}
        # By replica: names that have come from it and are not bound yet.
        self._holders: dict[str, set[int]] = {}
        # By handle of a network: the replicas that have it.
        self._lost: dict[int, set[str]] = {}
        # By replica: handles of those that are no more, as it is yet to hear.
        self._apart: set[str] = set()
        # Handles of networks that differ between the replicas, as the user has been told.
        self._loose: set[str] = set()
        # Names of tensors that do, likewise.
        self._inside: dict[str, set[str]] = {}
        # By name: the handles of what its value holds, as the latest cell found it.
        self._arriving: frozenset[str] = frozenset()
        # Those of them that replicas get with it.
        self._count = itertools.count()
        self._given_names: dict[str, weakref.ref[Remote]] = {}
        # Names of ours in the replicas, by which stand-ins mean their values.
        self._earlier: dict[str, tuple[Remote, object]] = {}
        # By name: a stand-in, and what the notebook had, and has sent, before cells changed it.
        self._renamed: dict[int, dict[str, str]] = {}
        # By replica: those that it is yet to give, and the names that have the values until then.
        self.stale = False
        # Nobody has read a network since the latest cell.
        self.withheld: list[str] = []
        # Names that were not sent to the latest cell, since both sides have changed their objects.

    @property
    def undelivered(self) -> set[str]:
        """Handles of networks that a replica takes for known here, and that are not."""
        return self._incoming.undelivered

    def forget_replica(self, replica_id: int) -> None:
        """The replica starts anew and has nothing."""
        self.shared.forget_replica(replica_id)
        self._renamed.pop(replica_id, None)
        self._lost.pop(replica_id, None)
        self.lent.forget_replica(replica_id)
        self.mirrors.forget_replica(replica_id)
        for holders in self._holders.values():
            holders.discard(replica_id)

    def restored(self, replica_id: int, source: int) -> None:
        """The replica took over everything that `source` has."""
        self.shared.restored(replica_id, source)
        self._renamed[replica_id] = dict(self._renamed.get(source, {}))
        self._lost[replica_id] = set(self._lost.get(source, ()))
        self.lent.restored(replica_id, source)
        for holders in self._holders.values():
            if source in holders:
                holders.add(replica_id)

    # ------------------------------------------------------------------ out

    def prepare(self, read: Iterable[str], replicas: Iterable[int]) -> list[Parcel]:
        """Return what these replicas lack of the names that a cell reads, and of those that these need in turn.

        Raises TransferError, naming the first name that cannot be sent, before anything was sent.
        """
        replicas = list(replicas)
        self.shared.begin(replicas)
        self._prune()
        self._look_into()
        wanted = {name for name in read if self.travels(name)}
        wanted |= self._needs.of(wanted, self._inside)
        self.withheld = []
        groups: dict[frozenset[str], list[int]] = {}
        named = self._named() if wanted else {}
        inside: dict[str, set[str]] = {name: set() for name in wanted}
        now = {name: self._content(self.user_ns[name], named, inside[name]) for name in wanted}
        parted = {name for name in wanted if self._is_parted(name, inside[name], replicas)}
        for replica_id in replicas:
            lacking = frozenset(name for name in wanted if not self._has(replica_id, name, now[name])) | parted
            clashing = {name for name in wanted - lacking if self._clashes(replica_id, name, now[name])}
            settable = {name for name in clashing if self.shared.setting(name, (replica_id,)) is not None}
            lacking |= settable
            self.withheld += clashing - settable
            if lacking:
                groups.setdefault(lacking, []).append(replica_id)
        parcels: list[Parcel] = []
        try:
            for lacking, ids in groups.items():
                parcels.append(self._parcels.made(lacking, tuple(ids)))
        except BaseException:
            for parcel in parcels:
                parcel.packed.close()
            raise
        self._find_arriving(parcels)
        return parcels

    def _find_arriving(self, parcels: Iterable[Parcel]) -> None:
        """Find what else holds the networks and optimizers in these, which have handles only now."""
        before, self._arriving = self._inside, frozenset()
        if any(parcel.modules or parcel.lent for parcel in parcels):
            self._look_into()
            self._arriving = frozenset(set().union(*self._inside.values()).difference(*before.values()))
            for name, handles in before.items():
                self._inside.setdefault(name, set()).update(handles)

    def _content(
        self, value: object, named: Mapping[int, str] = types.MappingProxyType({}), inside: set[str] | None = None
    ) -> Content | None:
        """Return what a value holds now; of what is `named` and in it, the names are put `inside`."""
        now = self._token_of_now
        if isinstance(value, type):
            # Of classes here alone: replicas may count in theirs, each by itself.
            return class_content(value, now)
        found: set[str] = set() if inside is None else inside
        return content(value, now, sought=named, seen=lambda obj: found.add(named[id(obj)]))

    def _named(self) -> dict[int, str]:
        """Return the names of containers and objects, by id."""
        named = {}
        for name, value in list(self.user_ns.items()):
            # There are objects that cannot be looked into.
            with contextlib.suppress(Exception):
                if self.travels(name) and is_refillable(value) and not isinstance(value, torch.Tensor):
                    named[id(value)] = name
        return named

    def _is_parted(self, name: str, inside: set[str], replicas: list[int]) -> bool:
        """Whether something in the name's object got a name of its own here since the replicas got the object."""
        obj = self.user_ns[name]
        names = [n for n in inside if self.user_ns[n] is not obj]
        new = any(not self.shared.shares(r, n, self.user_ns[n]) for n in names for r in replicas)
        return new and is_refillable(obj) and self.shared.unaltered(name, replicas)

    def _token_of_now(self, obj: object) -> Any:
        """Return what stands for an object as it is: an optimizer that is to be sent again is another."""
        token = self._token(obj)
        return token if token is None or self.lent.is_as_sent(obj) else (token, "to be sent again")

    def _token(self, obj: object) -> Any:
        if isinstance(obj, Remote):
            return ("name", obj.name, obj.shown)
        return self.lent.token(obj) or self.mirrors.reference(obj)

    def reference(self, obj: object, replicas: tuple[int, ...]) -> Any:
        """For `Parcels`: what stands for a network, an optimizer or a stand-in that all of these have, else None."""
        if isinstance(obj, Remote) and obj.lost:
            # Other replicas may have something else by this name.
            raise TransferError(obj.where())
        if is_told(obj):
            return self.lent.reference(obj, replicas)
        token = self._token(obj)
        if token is None and isinstance(obj, nn.Module) and reduce_keras(obj) is not None:
            # It goes out whole: to the parts of then belong the layers of then, which are no parts to torch.
            self.mirrors.unmark(obj)
        if token is None or isinstance(obj, Remote):
            return token
        return token if self._holders.get(token[1], set()).issuperset(replicas) else None

    def sent(self, parcel: Parcel, replicas: Iterable[int]) -> None:
        """These replicas have opened the parcel and have its names from now on."""
        arrived = [r for r in parcel.replicas if r in set(replicas)]
        self.mirrors.gave(parcel.modules)
        for module in parcel.modules:
            torchmetrics_objects.watch(module, self._ask)
        self.lent.arrived(parcel.lent, arrived)
        for module in parcel.modules:
            self._holders.setdefault(self.mirrors.handle(module), set()).update(arrived)
        whole = {name: value for name, value in parcel.names.items() if name not in parcel.settings}
        self.shared.share(arrived, whole, parcel.packed.global_names)
        self.shared.was_set(parcel.settings, arrived)
        own = {id(value) for value in parcel.names.values() if has_an_identity(value)}
        others = [name for name, value in list(self.user_ns.items()) if id(value) in own and name not in parcel.names]
        # To the replicas, too, they are the same.
        self.shared.renew(others, arrived)

    def _ask(self, metric: Any, method: str) -> Any:
        # Those that died have others in their place by now.
        replicas, have = self.lent.replicas(), self._holders.get(self.mirrors.handle(metric), set())
        if not have:
            # All that had it are gone, and what they had counted.
            torchmetrics_objects.forget(metric)
            return torchmetrics_objects.asked(metric, method)
        if lacking := replicas - have:
            some = f"replicas {spans(lacking)} lack" if len(lacking) > 1 else f"replica {spans(lacking)} lacks"
            raise UsageError(
                f"{type(metric).__name__}.{method}() is a matter of all replicas, and {some} this one: name it in a "
                "mirrored cell that runs on all of them"
            )
        return self.lent.ask_all(torchmetrics_objects.asked, (metric, method), self._token)

    def keep(self) -> None:
        """Keep here what only the replicas know, since they are about to end."""
        torchmetrics_objects.settle(module for _, module in self.mirrors.roots())

    def ended(self) -> tuple[list[str], list[str]]:
        """All replicas are gone: return the names whose values are lost, and those that get back what they had before.

        The latter are of values that cells have changed, and that the notebook has kept.
        """
        self._prune()
        for stand_in in self._incoming.stand_ins:
            stand_in.lost = True
        earlier, self._earlier = self._earlier, {}
        self.user_ns.update((name, value) for name, (_, value) in earlier.items())
        held = list(self.user_ns.items())
        lost = sorted(n for n, value in held if isinstance(value, Remote) and value.lost and travels(n))
        return [name for name in lost if self.user_ns[name] in self._incoming.stand_ins], sorted(earlier)

    def _hold(self, handle: str, replicas: Iterable[int]) -> None:
        root = self.mirrors.find(handle)
        for part in root.modules() if root is not None else ():
            self._holders.setdefault(self.mirrors.handle(part), set()).update(replicas)

    def changed_modules(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the values of networks that were written to in the notebook since both sides had the same."""
        self.stale = False
        values = {}
        for handle, module in self.mirrors.roots():
            # A strategy of a plain cell may have trained it since: a cell may use it by a function that the replicas
            # have, which reads nothing here.
            reading.bring(module)
            if self.mirrors.known(module) is None:
                values[handle] = self.mirrors.left(module)
            elif self.mirrors.changed(module):
                values[handle] = self.mirrors.given(module, self.mirrors.written(module))
        self.mirrors.let_go()
        # Nothing is to be said of an attribute that is not plain.
        return {handle: given for handle, given in values.items() if given}

    def values_of(self, names: Iterable[str]) -> dict[str, dict[str, torch.Tensor]]:
        """Return the values of the networks that have these names, to give them to the replicas."""
        values = {}
        for name in names:
            module = self.user_ns[name]
            handle = self.mirrors.known(module) if isinstance(module, nn.Module) else None
            if handle is not None:
                values[handle] = self.mirrors.given(module)
        return values

    def travels(self, name: str) -> bool:
        """For `Parcels`: whether a name's value can be sent at all."""
        if name not in self.user_ns or name in RESERVED or not travels(name):
            return False
        # A stand-in under its own name means what the replicas have there, or have not.
        value = self.user_ns[name]
        return not (isinstance(value, Remote) and (value.name == name or value.lost))

    def lacked(self, name: str, replicas: tuple[int, ...]) -> bool:
        """For `Parcels`: whether one of these replicas lacks what the name has now, and can be sent it."""
        if not self.travels(name):
            return False
        now = self._content(self.user_ns[name])
        return not all(self._has(r, name, now) for r in replicas)

    def _has(self, replica_id: int, name: str, now: Content | None) -> bool:
        value = self.user_ns[name]
        shared = self.shared.of(replica_id, name)
        if shared is None or shared.value is not value:
            return False
        # What was changed on both sides stays as it is on both.
        if not shared.altered and not shared.same(now):
            return False
        if is_told(value):
            return self.lent.held(value, replica_id)
        # A network with other parts than it was sent with is another network.
        return not isinstance(value, nn.Module) or self.mirrors.known(value) is not None

    def was_sent(self, name: str, replicas: tuple[int, ...]) -> bool:
        """For `Parcels`: whether all of these replicas have the name's object, as it was sent to them."""
        return self.shared.unaltered(name, replicas)

    def setting(self, name: str, replicas: tuple[int, ...]) -> Setting | None:
        """For `Parcels`: the attributes to send of an object that these replicas have changed, too."""
        return self.shared.setting(name, replicas)

    def _clashes(self, replica_id: int, name: str, now: Content | None) -> bool:
        """Whether an object was changed here and in the replica."""
        shared = self.shared.of(replica_id, name)
        return shared is not None and shared.altered and not shared.same(now)

    def _prune(self) -> None:
        """Let go of objects that the notebook no longer has under their name."""
        self.shared.prune()
        for name in [n for n, (stand_in, _) in self._earlier.items() if self.user_ns.get(n) is not stand_in]:
            del self._earlier[name]

    def _look_into(self) -> None:
        """Find what the notebook has of the replicas' values besides the names that they have there.

        best = model;  runs.append(optimizer)    ─▶ the replicas keep these, whatever becomes of their names there
        mine = large        (a stand-in)         ─▶ the replicas keep its value, under a name of its own
        """
        self._inside = {}
        for name, value in list(self.user_ns.items()) if self.shared.replicas else ():
            if name in RESERVED or not travels(name):
                continue
            found = inside(value, lambda obj: isinstance(obj, Remote) or self._handle(obj) is not None)
            for one in found:
                own = one is value or isinstance(value, PerReplica)
                if isinstance(one, Remote) and not (own and one.name == name):
                    self._give_a_name(one)
            handles = {handle for one in found if (handle := self._handle(one)) is not None}
            if handles:
                self._inside[name] = handles

    def _handle(self, obj: object) -> str | None:
        """Return the handle of a network, an optimizer or the like that the replicas may have."""
        if isinstance(obj, nn.Module):
            return self.mirrors.find_handle(obj)
        return self.lent.handle(obj)

    def _give_a_name(self, stand_in: Remote) -> None:
        """Have the replicas keep the value of a stand-in under a name that no cell will bind anew."""
        if stand_in.name in self._given_names:
            return
        name = f"_mirror_nb_{next(self._count)}"
        self._given_names[name] = weakref.ref(stand_in)
        for replica_id in self.shared.replicas:
            self._renamed.setdefault(replica_id, {})[name] = stand_in.name
            self.shared.keep(replica_id, name)
        stand_in.name = name

    def lies_under(self, name: str, replica_id: int) -> str:
        """Return the name that the replica has for a stand-in's name by now."""
        return self._renamed.get(replica_id, {}).get(name, name)

    def holdings(self, replica_id: int, bound: Iterable[str] = (), sent: Collection[str] = ()) -> Holdings:
        """Return what the replica is to know of what the notebook has and has not.

        `bound` are names that the cell binds, `sent` those whose values go with it.
        """
        renamed = tuple((old, new) for new, old in self._renamed.get(replica_id, {}).items())
        retained = {
            handle
            for name, handles in self._inside.items()
            if not self._covers(replica_id, name)
            for handle in (handles - self._arriving if name in sent else handles)
        }
        deleted = [n for n in self.shared.there(replica_id) if n not in RESERVED and not self._lives(n)]
        outdated = self.shared.untold(replica_id).difference(deleted)
        changed = sorted(n for n in bound if self._was_changed(replica_id, n))
        self._note_lost()
        lost = sorted(handle for handle in self._lost.get(replica_id, ()) if self.mirrors.find(handle) is None)
        return Holdings(
            renamed,
            tuple(sorted(retained)),
            tuple(sorted(deleted)),
            tuple(sorted(outdated)),
            tuple(changed),
            tuple(lost),
        )

    def _note_lost(self) -> None:
        for handle in self.mirrors.gone():
            for replica_id in self._holders.pop(handle, ()):
                self._lost.setdefault(replica_id, set()).add(handle)

    def _was_changed(self, replica_id: int, name: str) -> bool:
        """Whether the value that the replica has by a name has been changed here since."""
        shared = self.shared.of(replica_id, name)
        value = self.user_ns.get(name)
        if shared is None or shared.value is not value:
            return False
        # By its class: a proxy may raise whatever it is asked.
        if issubclass(type(value), nn.Module):
            return self.mirrors.outgrown(cast(nn.Module, value))
        return not is_told(value) and not shared.same(self._content(value))

    def told(self, replica_id: int, holdings: Holdings) -> None:
        """Take these holdings for known to the replica."""
        self._renamed.pop(replica_id, None)
        self._lost.get(replica_id, set()).difference_update(holdings.lost)
        self.shared.deleted(replica_id, holdings.deleted)

    def _covers(self, replica_id: int, name: str) -> bool:
        """Whether the replica has a name with all that it holds here."""
        value = self.user_ns[name]
        if not isinstance(value, nn.Module) and not is_told(value):
            now = self._content(value)
            return now is not None and self._has(replica_id, name, now)
        return self._has(replica_id, name, None)

    def _lives(self, name: str) -> bool:
        stand_in = self._given_names.get(name)
        return name in self.user_ns if stand_in is None else stand_in() is not None

    # ------------------------------------------------------------------ in

    def absorb(
        self, payloads: Mapping[int, tuple[Payload, int | None]], owner: int, *, pulled: bool = False
    ) -> Returned:
        """Bind in the notebook what the replicas' names hold now; `owner` sent its networks.

        `pulled`: the user has asked for it, so that objects which stay as they are on both sides are refilled here.
        """
        returned = Returned(nbytes=sum(payload.nbytes for payload, _ in payloads.values()))
        # Optimizers and the like that networks have.
        inside: dict[str, Any] = {}
        # A part that the cell has taken out of a network may have a name there.
        parts = self.mirrors.all()
        opened = self._opened(payloads, owner, inside, returned)
        with self._former(frozenset(name for exports in opened.values() for name in exports.former)) as taken:
            self._absorb(opened, owner, inside, returned, pulled)
        for found in (returned.bound, returned.stayed, returned.loose, returned.altered):
            found[:] = sorted(set(found) - taken)
        returned.deleted = self._follow_deleted(opened)
        returned.diverged = self._note_diverged(opened)
        returned.grads = opened[owner].grads if owner in opened else None
        results = {r: e.result for r, e in opened.items() if e.result is not None}
        if results:
            returned.result = self._incoming.value("_", results, owner)
        del parts
        self.stale = True
        reading.add(self)
        return returned

    def _opened(
        self,
        payloads: Mapping[int, tuple[Payload, int | None]],
        owner: int,
        inside: dict[str, Any],
        returned: Returned,
    ) -> dict[int, Exports]:
        """Return what each replica tells, its networks being here; what these have goes `inside`, by handle."""
        opened: dict[int, Exports] = {}
        for replica_id, (payload, slab) in payloads.items():
            try:
                opened[replica_id], arrivals = unpack(
                    payload, slab, namespace=self.user_ns, resolve=self._incoming.resolve, lenient=True
                )
            except Exception as reason:
                # A network's class has a say in how it is rebuilt.
                returned.problem = f"{type(reason).__name__}: {reason}"
                continue
            if arrivals.lacking:
                self._incoming.lacking.update(dict.fromkeys(opened[replica_id].modules, arrivals.lacking))
                opened[replica_id].modules.clear()
                opened[replica_id].objects.clear()
            else:
                inside.update(arrivals.lent)
            if replica_id == owner:
                self._graft(opened[replica_id], arrivals)
            self.mirrors.take(arrivals)
            self._incoming.undelivered -= arrivals.handles.keys()
        return opened

    def _let_go(self, handle: str, replica_id: int) -> None:
        self._lost.get(replica_id, set()).discard(handle)
        holders = self._holders.get(handle, set())
        holders.discard(replica_id)
        if not holders:
            self._holders.pop(handle, None)
        network = self.mirrors.find(handle)
        if network is not None:
            self.lent.bereave(network, replica_id)
        self.lent.gone(handle, replica_id)

    @contextlib.contextmanager
    def _former(self, taken: frozenset[str]) -> Iterator[set[str]]:
        """Let the objects that a cell has taken these names from have their former names; give those."""
        names = {former(name): name for name in taken if name in self.user_ns}
        for other, name in names.items():
            self.user_ns[other] = self.user_ns[name]
            self.shared.copy(name, other)
        try:
            yield set(names)
        finally:
            for other in names:
                self.user_ns.pop(other, None)
                for replica_id in self.shared.replicas:
                    self.shared.forget(replica_id, (other,))

    def _absorb(
        self, opened: dict[int, Exports], owner: int, inside: dict[str, Any], returned: Returned, pulled: bool
    ) -> None:
        altered = {name for exports in opened.values() for name in exports.altered}
        filled = {name for exports in opened.values() for name in exports.filled}
        # Before networks hear of their attributes, of which an object may be one: model.config. And while what objects
        # had there has its handles: trainer.optimizer = SGD(...).
        left = {name for name in altered | filled if self._was_left(name)}
        for replica_id, exports in opened.items():
            for handle in exports.gone:
                self._let_go(handle, replica_id)
        self._note_lost()
        self._absorb_modules(opened, owner)
        # A name that is bound anew may have been the last of what another one is to hold.
        held = [self.user_ns.get(name) for exports in opened.values() for name in exports.names]
        names = {name for exports in opened.values() for name in exports.names}
        self._awaited = {r: exports.names.keys() - exports.filled for r, exports in opened.items()}
        trained = {name for exports in opened.values() for name in exports.trained}
        self._absorb_names(trained, opened, owner, returned, pulled, altered, filled & left)
        self._tie(opened, owner)
        # Held until names have them.
        objects = self._absorb_objects(opened, owner, inside)
        self._absorb_names(names - trained, opened, owner, returned, pulled, altered, filled & left)
        self._join(opened, owner)
        settings = {name: known for name in altered if (known := _set_in(name, opened.values())) is not None}
        returned.altered = self.shared.alter(altered, left, settings)
        # Objects that hold each other are filled one after the other.
        self.shared.renew({*left, *returned.bound} if left else (), opened)
        del objects, held

    # ------------------------------------------------------------------ networks that are read here

    def holds(self, module: nn.Module) -> bool:
        """Whether the replicas have this network too."""
        return self.mirrors.find_handle(module) is not None

    def refresh(self) -> None:
        """A network is read, the first since the latest cell: it may be written to in ways that only this shows."""
        self.stale = False
        self.mirrors.remember()

    def clear_gradients(self, owner: Any, set_to_none: bool) -> None:
        """Those of replicas are cleared in cells."""

    def _follow_deleted(self, opened: Mapping[int, Exports]) -> list[str]:
        """Delete here what the cell has deleted, unless one of its replicas still has it."""
        for replica_id, exports in opened.items():
            self.shared.forget(replica_id, exports.deleted)
        kept = {name for replica_id in opened for name in self.shared.there(replica_id)}
        names = {name for exports in opened.values() for name in exports.deleted}
        followed = sorted(name for name in names - kept if name in self.user_ns)
        for name in followed:
            del self.user_ns[name]
        return followed

    def _note_diverged(self, opened: dict[int, Exports]) -> list[str]:
        first = []
        for handle in sorted({handle for exports in opened.values() for handle in exports.sums}):
            sums = {exports.sums[handle] for exports in opened.values() if handle in exports.sums}
            network = self.mirrors.find(handle)
            if len(sums) < 2:
                self._apart.discard(handle)
            elif network is not None and handle not in self._apart:
                names = [name for name, value in self.user_ns.items() if value is network and travels(name)]
                first.append(names[0] if names else f"a {type(network).__name__}")
                self._apart.add(handle)
        return first

    def _graft(self, exports: Exports, arrivals: Arrivals) -> None:
        """Networks that are here and have other parts since, or are parts of a new one, stay who they are.

        Others here may have them: optimizers, objects, other networks.
        """
        here = {id(part) for handle, part in arrivals.handles.items() if self.mirrors.find(handle) is not None}
        modules = {
            handle: module
            for handle, module in exports.modules.items()
            if any(id(part) in here for part in module.modules())
        }
        exports.modules.update(self.mirrors.graft(modules, arrivals, exports.moved, exports.replacing))

    def _absorb_modules(self, opened: dict[int, Exports], owner: int) -> None:
        if owner in opened:
            for handle, module in opened[owner].modules.items():
                self.mirrors.learn(handle, module)
                # All that have it tell something of it.
                self._hold(handle, [r for r, exports in opened.items() if handle in exports.states])
                # What they have counted counts there: a copy of the owner's would count again where it is sent.
                torchmetrics_objects.arrived([module], counts=False)
                torchmetrics_objects.watch(module, self._ask)
        absorb_states(self.mirrors, {r: exports.states for r, exports in opened.items()}, owner)

    def _join(self, opened: dict[int, Exports], owner: int) -> None:
        """Give networks that came the values that have names here, in the place of copies."""
        parts: dict[str, dict[str, nn.Module]] = {}
        for handle, path, attribute, name in opened[owner].named if owner in opened else ():
            network = self.mirrors.find(handle)
            if handle not in parts and network is not None:
                parts[handle] = dict(network.named_modules())
            part = parts.get(handle, {}).get(path)
            with contextlib.suppress(Undelivered):
                if part is not None:
                    set_named(part, attribute, self._held(name, owner))

    def _tie(self, opened: dict[int, Exports], owner: int) -> None:
        """Give networks that came the parameters that have names here, before optimizers are made that have these."""
        tied = opened[owner].tied if owner in opened else ()
        for handle, attribute, name in tied:
            part, parameter = self.mirrors.find(handle), self.user_ns.get(name)
            with contextlib.suppress(Undelivered):
                if part is not None and self._held(name, owner) is parameter and type(parameter) is nn.Parameter:
                    part._parameters[attribute] = parameter
        for module in opened[owner].modules.values() if tied else ():
            for part in module.modules():
                self.mirrors.mark(part)

    def _absorb_objects(self, opened: dict[int, Exports], owner: int, inside: dict[str, Any]) -> list[Any]:
        objects = []
        payloads = opened[owner].objects if owner in opened else {}
        for handle, payload in sorted(payloads.items(), key=lambda given: given[1] is not None):
            try:
                obj = inside[handle] if payload is None else self._incoming.unpacked(payload, owner)
            except Exception:
                # What it needs has not come: names that mean it have a stand-in.
                continue
            objects.append(obj)
            self._incoming.undelivered.discard(handle)
            holders = [r for r, exports in opened.items() if handle in exports.objects]
            self.lent.learn(handle, obj, holders, with_state=payload is None)
        return objects

    def _absorb_names(
        self,
        names: Iterable[str],
        opened: dict[int, Exports],
        owner: int,
        returned: Returned,
        pulled: bool,
        altered: set[str],
        follow: Collection[str],
    ) -> None:
        """Bind these names; one of a class that differs is `altered`: each replica counts in it by itself, say.

        Objects to `follow` are not altered any more once they are here what the cell has made of them in all replicas.
        """
        for name in _in_order(names, opened):
            exports, same = _resolved({r: e.names[name] for r, e in opened.items() if name in e.names}, opened)
            if any(name in e.filled for e in opened.values()):
                if name in follow and self._follows(name, exports, same, altered):
                    altered.discard(name)
                    returned.bound.append(name)
            elif isinstance(self.user_ns.get(name), type) and not all_alike(exports):
                # Here it is one class.
                altered.add(name)
            else:
                self._absorb_name(name, exports, same, owner, opened, returned, pulled)
            for awaited in self._awaited.values():
                awaited.discard(name)

    def _was_left(self, name: str) -> bool:
        """Whether nobody has changed the notebook's object since the replicas that have it got it."""
        obj = self.user_ns.get(name, MISSING)
        had = [self.shared.of(r, name) for r in self.shared.replicas if self.shared.shares(r, name, obj)]
        now = self._content(obj)
        return all(shared is not None and shared.same(now) for shared in had)

    def _follows(self, name: str, exports: dict[int, Export], same: str | None, altered: Collection[str]) -> bool:
        """Have an object hold what the cell has made of it, if that is alike in all replicas; each one's, its own."""
        obj = self.user_ns.get(name, MISSING)
        sharing = {r for r in self.shared.replicas if self.shared.shares(r, name, obj)}
        if not sharing or sharing - exports.keys():
            return False
        if same is not None:
            followed = self.user_ns.get(same) is obj and same not in altered
        else:
            followed = self._fill(name, exports, self._by_teller(name, obj, exports, sharing))
        if followed:
            self.shared.share(exports, {name: obj}, tellers=tuple(sorted(exports)))
        return followed

    def _by_teller(self, name: str, obj: object, exports: dict[int, Export], sharing: set[int]) -> dict[int, object]:
        """Return the notebook's objects by the replica that tells of each: one for all, or their own; else nothing."""
        if isinstance(obj, PerReplica):
            tellers = self._tellers(min(sharing), name, obj)
            known = len(tellers) == len(obj) and sharing.issubset(tellers)
            return {r: one for r, one in zip(tellers, obj.values, strict=True) if r in sharing} if known else {}
        return {min(exports): obj} if self._incoming.is_one(exports) or self._is_told_alike(name, exports) else {}

    def _is_told_alike(self, name: str, exports: dict[int, Export]) -> bool:
        """Whether it is the same in other bytes: a replica that was started anew has other strings that are equal."""
        told = [self._incoming.told(name, export, r) for r, export in sorted(exports.items())]
        return isinstance(told[0], tuple) and merged(told) is told[0]

    def _fill(self, name: str, exports: dict[int, Export], ours: dict[int, object]) -> bool:
        """Fill these objects with what the replicas tell of them, all or none; return whether it was done."""
        held = {r: self._incoming.told(name, exports[r], r) for r in ours}
        for r, one in ours.items():
            # What cannot be rebuilt here comes as a stand-in.
            if not (isinstance(held[r], tuple) and held[r][0] is type(one) and is_refillable(one)):
                return False
        for r, one in ours.items():
            refill(one, held[r][1])
        return bool(ours)

    def _tellers(self, replica_id: int, name: str, value: PerReplica) -> Sequence[int]:
        """Return whose values a PerReplica has that the replica has by a name, in its order."""
        shared = self.shared.of(replica_id, name)
        return (shared.tellers if shared is not None else ()) or range(len(value))

    def _held(self, name: str, replica_id: int) -> Any:
        """Return what is here of a name whose value another one of that replica holds. Raises Undelivered."""
        value = self.user_ns.get(name, MISSING)
        awaited = value is MISSING or name in self._awaited.get(replica_id, ())
        if awaited or not self.shared.shares(replica_id, name, value):
            raise Undelivered
        if isinstance(value, PerReplica):
            tellers = self._tellers(replica_id, name, value)
            if replica_id not in tellers:
                raise Undelivered
            value = value[tellers.index(replica_id)]
        if isinstance(value, Remote):
            raise Undelivered
        return value

    def _absorb_name(
        self,
        name: str,
        exports: dict[int, Export],
        same: str | None,
        owner: int,
        opened: dict[int, Exports],
        returned: Returned,
        pulled: bool,
    ) -> None:
        known = isinstance(exports.get(owner), KnownModule)
        before = self.user_ns.get(name, MISSING)
        kept = self._kept(name, exports, opened)
        if kept == name:
            return
        kept = same if kept is None else kept
        value = self._incoming.value(name, exports, owner) if kept is None else self.user_ns[kept]
        refills = (pulled and is_refillable(before)) or all(name in opened[r].refilled for r in exports)
        if (
            refills
            and value is not before
            and type(value) is type(before)
            and all(self.shared.shares(r, name, before) for r in exports)
        ):
            # As the cell did: who else has it here sees the change.
            value = _refilled(before, value)
        if isinstance(value, Remote):
            self._keep_earlier(name, value, before, exports)
        self.user_ns[name] = value
        self.shared.share(exports, {name: value}, tellers=tuple(sorted(exports)))
        if name not in self._loose and _trains_apart(value):
            self._loose.add(name)
            returned.loose.append(name)
        if isinstance(value, Remote):
            returned.stayed.append(name)
        elif not known or before is not value or any(exports[owner].handle in e.states for e in opened.values()):  # type: ignore[union-attr]
            returned.bound.append(name)

    def _keep_earlier(self, name: str, stand_in: Remote, before: object, replicas: Iterable[int]) -> None:
        """Keep what the notebook had in the place of a stand-in: should the replicas end, there is nothing else."""
        known, earlier = self._earlier.pop(name, (None, None))
        if known is not before and any(self.shared.shares(r, name, before) for r in replicas):
            earlier = before
        if type(earlier).__name__ == stand_in.type_name:
            self._earlier[name] = stand_in, earlier

    def _kept(self, name: str, exports: Iterable[int], opened: Mapping[int, Exports]) -> str | None:
        """Return the name that has here what a name holds in all of these replicas, of which nothing was changed."""
        held = {opened[r].unchanged.get(name) for r in exports}
        kept = held.pop() if len(held) == 1 else None
        if kept is None or kept not in self.user_ns:
            return None
        now = self._content(self.user_ns[kept])
        return kept if all(self._has(r, kept, now) for r in exports) else None


def _resolved(exports: dict[int, Export], opened: Mapping[int, Exports]) -> tuple[dict[int, Export], str | None]:
    """Return what the replicas' names hold, and the name that has the very same in all of them."""
    others = {export.name if isinstance(export, Same) else None for export in exports.values()}
    if len(others) == 1:
        return exports, others.pop()
    # In some of them alone.
    return {r: opened[r].names[e.name] if isinstance(e, Same) else e for r, e in exports.items()}, None


def _set_in(name: str, opened: Iterable[Exports]) -> frozenset[str] | None:
    """Return the attributes of a name's object that replicas have set; None where one of them cannot tell."""
    told = [exports.settings.get(name) for exports in opened if name in exports.altered]
    return None if None in told else frozenset().union(*told)  # type: ignore[arg-type]


def _refilled(before: Any, value: Any) -> Any:
    """Let what is here hold what came, a PerReplica's values each by itself where they can; return it."""
    pairs = list(zip(before, value, strict=False)) if isinstance(value, PerReplica) else []
    if pairs and len(before) == len(value) and all(type(one) is type(new) and stays_itself(one) for one, new in pairs):
        for one, new in pairs:
            refill(one, filling(new))
    else:
        refill(before, filling(value))
    return before


def _in_order(names: Iterable[str], opened: Mapping[int, Exports]) -> list[str]:
    """Return the names, each after those of them whose values it has, or holds."""
    left = dict.fromkeys(sorted(names))
    ordered: list[str] = []

    def add(name: str) -> None:
        if name in left:
            del left[name]
            for exports in opened.values():
                match exports.names.get(name):
                    case Plain(_, holds):
                        # Objects that are changed in place are there already.
                        for held in (one for one in holds if one not in exports.filled):
                            add(held)
                    case Same(first):
                        add(first)
            ordered.append(name)

    for name in list(left):
        add(name)
    return ordered


def _trains_apart(value: object) -> bool:
    """Whether there is a tensor in it that each replica trains by itself."""
    held = pytree.tree_leaves(value[0]) if isinstance(value, PerReplica) else []
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf for leaf in held)
