"""Which of the notebook's names each replica has, and what a cell needs sent; what it brought back, `Absorbing` takes.

Knows payloads, networks and the replicas' ids; sends nothing itself and shows nothing.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Set
from typing import Any, cast

import torch
from torch import nn

from mirror_nb.errors import TransferError, UsageError
from mirror_nb.messages import Holdings, Setting, travels
from mirror_nb.mirroring.attributes import named_attributes, names_by_id
from mirror_nb.mirroring.mirrors import Mirrors
from mirror_nb.mirroring.networks import ATTRIBUTES
from mirror_nb.notebook.absorbing import Absorbing, Returned
from mirror_nb.notebook.holders import Holders
from mirror_nb.notebook.lent import Lent
from mirror_nb.notebook.needs import Needs
from mirror_nb.notebook.parcels import Parcel, Parcels
from mirror_nb.notebook.shared import SharedNames
from mirror_nb.notebook.source import CellNames
from mirror_nb.notebook.stand_ins import StandIns
from mirror_nb.noticing.contents import Content, class_content, content
from mirror_nb.noticing.insides import inside
from mirror_nb.noticing.kinds import has_an_identity
from mirror_nb.noticing.refilling import is_refillable
from mirror_nb.pool.failures import spans
from mirror_nb.strategies.reading import reading
from mirror_nb.transfer import torchmetrics_objects
from mirror_nb.transfer.keras_objects import reduce_keras
from mirror_nb.transfer.payload import Payload
from mirror_nb.transfer.told import is_told
from mirror_nb.values import PerReplica, Remote

RESERVED = frozenset({"strategy", "replica_id", "num_replicas", "device"})
# Bound in every replica by mirror_nb; the notebook's own names of that kind stay in the notebook.


class Names:
    """The notebook's side of the names. `user_ns` is the dictionary of ordinary cells."""

    def __init__(self, user_ns: MutableMapping[str, Any], fetch: Callable[[str, int], Any], lent: Lent) -> None:
        self.user_ns = user_ns
        self.lent = lent
        self.mirrors = Mirrors("k")
        self.shared = SharedNames(user_ns, self._content)
        self._holders = Holders()
        self._stand_ins = StandIns(user_ns, self.shared)
        self._parcels = Parcels(user_ns, self.mirrors, lent, self)
        self._needs = Needs(user_ns, self.mirrors, self.shared, self.travels)
        both = user_ns, self.mirrors, lent, self.shared, self._holders, self._stand_ins
        self._absorbing = Absorbing(*both, fetch=fetch, content=self._content, has=self._has, ask=self._ask)
        self._inside: dict[str, set[str]] = {}
        # By name: the handles of what its value holds, as the latest cell found it.
        self._arriving: frozenset[str] = frozenset()
        # Those of them that replicas get with it.
        self._set_anew: list[str] = []
        # Handles of networks of which replicas have just been sent attributes.
        self._prepared: dict[str, Content | None] = {}
        # What the values that the latest cell needs held before it was sent anything.
        self.stale = False
        # Nobody has read a network since the latest cell.
        self.withheld: list[str] = []
        # Names that were not sent to the latest cell, since both sides have changed their objects.
        self.kept: dict[str, str] = {}
        # Why others were not, which it may have bound before it read them.

    @property
    def undelivered(self) -> set[str]:
        """Handles of networks that a replica takes for known here, and that are not."""
        return self._absorbing.incoming.undelivered

    def forget_replica(self, replica_id: int) -> None:
        """The replica starts anew and has nothing."""
        self.mirrors.forget_replica(replica_id)
        for known in (self.shared, self._stand_ins, self._holders, self.lent):
            known.forget_replica(replica_id)

    def restored(self, replica_id: int, source: int, left: Collection[str]) -> None:
        """The replica took over everything that `source` has, but for the names that are `left`."""
        for known in (self.shared, self._stand_ins, self._holders, self.lent):
            known.restored(replica_id, source)
        self.shared.forget(replica_id, left)
        values = list(self.user_ns.items()) if left else ()
        there = {id(part) for part in _parts_in(value for name, value in values if name not in left)}
        for part in _parts_in(value for name, value in values if name in left):
            handle = self.mirrors.find_handle(part)
            if handle is not None and id(part) not in there:
                # What the notebook has of it is sent when a cell needs it.
                self._holders.let_go(handle, replica_id)
                self.lent.bereave(part, replica_id)

    # ------------------------------------------------------------------ out

    def prepare(self, read: Iterable[str], replicas: Iterable[int], unsure: Set[str] = frozenset()) -> list[Parcel]:
        """Return what these replicas lack of the names that a cell reads, and of those that these need in turn.

        Raises TransferError, naming the first name that cannot be sent, before anything was sent. What the cell is
        `unsure` to read is not sent then.
        """
        replicas = list(replicas)
        self.shared.begin(replicas)
        self._prune()
        self._look_into()
        wanted = {name for name in read if self.travels(name)}
        wanted |= self._needs.of(wanted, self._inside)
        self.withheld = []
        self.kept = {}
        groups: dict[frozenset[str], list[int]] = {}
        named = self._named() if wanted else {}
        inside: dict[str, set[str]] = {name: set() for name in wanted}
        now = {name: self._content(self.user_ns[name], named, inside[name]) for name in wanted}
        self._prepared = now
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
                kept: dict[str, str] = {}
                parcels.append(self._parcels.made(lacking, tuple(ids), unsure, kept))
                self.kept |= kept
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
        return token if self._holders.of(token[1]) >= set(replicas) else None

    def sent(self, parcel: Parcel, replicas: Iterable[int]) -> None:
        """These replicas have opened the parcel and have its names from now on."""
        arrived = [r for r in parcel.replicas if r in set(replicas)]
        self.mirrors.gave(parcel.modules)
        for module in parcel.modules:
            torchmetrics_objects.watch(module, self._ask)
        self.lent.arrived(parcel.lent, arrived)
        for module in parcel.modules:
            self._holders.add(self.mirrors.handle(module), arrived)
        whole = {name: value for name, value in parcel.names.items() if name not in parcel.settings}
        self.shared.share(arrived, whole, parcel.packed.global_names)
        self.shared.was_set(parcel.settings, arrived)
        own = {id(value) for value in parcel.names.values() if has_an_identity(value)}
        others = [name for name, value in list(self.user_ns.items()) if id(value) in own and name not in parcel.names]
        # To the replicas, too, they are the same.
        self.shared.renew(others, arrived)
        for replica_id in arrived if parcel.lent else ():
            # What holds an optimizer that was to be sent again is what it was.
            self.shared.renew((n for n in self._prepared if self._had(replica_id, n)), (replica_id,))

    def _had(self, replica_id: int, name: str) -> bool:
        """Whether the replica had what the name held when the latest cell was prepared."""
        shared = self.shared.of(replica_id, name)
        return shared is not None and shared.same(self._prepared[name])

    def _ask(self, metric: Any, method: str) -> Any:
        # Those that died have others in their place by now.
        replicas, have = self.lent.replicas(), self._holders.of(self.mirrors.handle(metric))
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
        self._set_anew = [handle for handle, given in values.items() if ATTRIBUTES in given]
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
        # By its class: a proxy may raise whatever it is asked.
        return not (type(value) is Remote and (value.name == name or value.lost))

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

    def holding(self, tensors: Set[int], replicas: tuple[int, ...]) -> set[str]:
        """For `Parcels`: names that these have as they were sent, and whose values hold tensors with these ids."""
        found: set[str] = set()
        for name, value in list(self.user_ns.items()) if tensors else ():
            seen: list[object] = []
            if self.was_sent(name, replicas) and id(value) not in tensors:
                content(value, self._token, sought=tensors, seen=seen.append)
            found.update({name} if seen else ())
        return found

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
        self._stand_ins.prune()

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
                    self._stand_ins.give_a_name(one)
            handles = {handle for one in found if (handle := self._handle(one)) is not None}
            if handles:
                self._inside[name] = handles

    def _handle(self, obj: object) -> str | None:
        """Return the handle of a network, an optimizer or the like that the replicas may have."""
        if isinstance(obj, nn.Module):
            return self.mirrors.find_handle(obj)
        return self.lent.handle(obj)

    def holdings(self, replica_id: int, cell: CellNames, sent: Collection[str] = ()) -> Holdings:
        """Return what the replica is to know of what the notebook has and has not.

        `sent` are the names whose values go with the cell.
        """
        retained = {
            handle
            for name, handles in self._inside.items()
            if not self._covers(replica_id, name)
            for handle in (handles - self._arriving if name in sent else handles)
        }
        deleted = [n for n in self.shared.there(replica_id) if n not in RESERVED and not self._stand_ins.lives(n)]
        outdated = self.shared.untold(replica_id).difference(deleted)
        changed = sorted(n for n in cell.bound if self._was_changed(replica_id, n))
        self._holders.gone(self.mirrors.gone())
        lost = sorted(handle for handle in self._holders.lost(replica_id) if self.mirrors.find(handle) is None)
        return Holdings(
            self._stand_ins.renamed(replica_id),
            tuple(sorted(retained)),
            tuple(sorted(deleted)),
            tuple(sorted(outdated)),
            tuple(changed),
            tuple(lost),
            tuple(self._named_in_changed(replica_id, sent)),
            tuple(sorted(n for n in cell.deleted - RESERVED if n in self.user_ns and travels(n))),
        )

    @contextlib.contextmanager
    def stay(self) -> Iterator[None]:
        """Keep the networks and optimizers that replicas refer to: for them there is until the end of the block.

        One in a cycle of references ends whenever Python collects these. A replica that took it for there would tell
        of it alone, and not of its parts, which others may have.
        """
        held = self.mirrors.all(), self.lent.all()
        try:
            yield
        finally:
            del held

    def _named_in_changed(self, replica_id: int, sent: Collection[str]) -> Iterator[tuple[str, str, str, str]]:
        """Yield where networks have values that the replica has by names: there as here it is to be one value.

        In those whose attributes go with the cell, and of names that do in any.
        """
        held = list(self.user_ns.items()) if self._set_anew or sent else ()
        named = names_by_id((n, v) for n, v in held if n in sent or self.shared.shares(replica_id, n, v))
        coming = names_by_id((n, v) for n, v in held if n in sent)
        for handle, network in self.mirrors.roots() if held else ():
            of_it = named if handle in self._set_anew else coming
            yield from ((handle, *where) for where in named_attributes(network, of_it))

    def told(self, replica_id: int, holdings: Holdings) -> None:
        """Take these holdings for known to the replica."""
        self._stand_ins.told(replica_id)
        self._holders.told(replica_id, holdings.lost)
        self.shared.deleted(replica_id, holdings.deleted)

    def lies_under(self, name: str, replica_id: int) -> str:
        """Return the name that the replica has for a stand-in's name by now."""
        return self._stand_ins.lies_under(name, replica_id)

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

    def _covers(self, replica_id: int, name: str) -> bool:
        """Whether the replica has a name with all that it holds here."""
        value = self.user_ns[name]
        if not isinstance(value, nn.Module) and not is_told(value):
            now = self._content(value)
            return now is not None and self._has(replica_id, name, now)
        return self._has(replica_id, name, None)

    # ------------------------------------------------------------------ in

    def absorb(
        self, payloads: Mapping[int, tuple[Payload, int | None]], owner: int, *, pulled: bool = False
    ) -> Returned:
        """Bind in the notebook what the replicas' names hold now; `owner` sent its networks.

        `pulled`: the user has asked for it, so that objects which stay as they are on both sides are refilled here.
        """
        returned = self._absorbing.absorb(payloads, owner, pulled)
        self.stale = any(self.mirrors.roots())
        if self.stale:
            reading.add(self)
        return returned

    def ended(self) -> tuple[list[str], list[str]]:
        """All replicas are gone: return the names whose values are lost, and those that get back what they had before.

        The latter are of values that cells have changed, and that the notebook has kept.
        """
        reading.remove(self)
        self._prune()
        stand_ins = self._absorbing.incoming.stand_ins
        for stand_in in stand_ins:
            stand_in.lost = True
        put_back = self._stand_ins.put_back()
        held = list(self.user_ns.items())
        lost = sorted(n for n, value in held if type(value) is Remote and value.lost and travels(n))
        return [name for name in lost if self.user_ns[name] in stand_ins], put_back

    # ------------------------------------------------------------------ networks that are read here

    def holds(self, module: nn.Module) -> bool:
        """Whether the replicas have this network too."""
        return self.mirrors.find_handle(module) is not None

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether replicas have this optimizer too, and so what it trains."""
        return self.lent.has_sent(optimizer)

    def refresh(self) -> None:
        """A network is read, the first since the latest cell: it may be written to in ways that only this shows."""
        self.stale = False
        # Until the next cell there is nothing to watch: torch.compile goes through no call that is watched.
        reading.remove(self)
        self.mirrors.remember()

    def clear_gradients(self, owner: Any, set_to_none: bool) -> None:
        """Those of replicas are cleared in cells."""


def _parts_in(values: Iterable[object]) -> Iterator[nn.Module]:
    """Yield the networks that are in these, with all of their parts."""
    for value in values:
        for network in inside(value, lambda obj: isinstance(obj, nn.Module)):
            yield from cast(nn.Module, network).modules()
