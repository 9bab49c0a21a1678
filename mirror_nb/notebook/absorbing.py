"""What a cell brought back: networks that take their values, objects that are filled, names that are bound.

Knows payloads, networks and the replicas' ids; shows nothing.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mirror_nb.messages import Export, Exports, KnownModule, Left, Plain, Same, former, travels
from mirror_nb.mirroring.attributes import set_named
from mirror_nb.mirroring.mirrors import Mirrors, absorb_states
from mirror_nb.notebook.holders import Holders
from mirror_nb.notebook.incoming import Incoming, Undelivered, all_alike
from mirror_nb.notebook.lent import Lent
from mirror_nb.notebook.shared import MISSING, SharedNames
from mirror_nb.notebook.stand_ins import StandIns
from mirror_nb.noticing.contents import Content
from mirror_nb.noticing.refilling import filling, is_refillable, refill, stays_itself
from mirror_nb.telemetry.comparison import Parted
from mirror_nb.transfer import torchmetrics_objects
from mirror_nb.transfer.opening import Arrivals, unpack
from mirror_nb.transfer.payload import Payload
from mirror_nb.values import PerReplica, Remote, merged


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
    diverged: dict[str, str] = field(default_factory=dict)
    # Networks that are not the same on all replicas any more, as this cell was the first to show; and what of each.
    loose: list[str] = field(default_factory=list)
    # Names of tensors that can be trained, in no network, and not the same on all replicas, likewise.
    result: Any = None
    left: Left | None = None
    # What the cell has set for all code that follows it.
    nbytes: int = 0
    problem: str | None = None
    # Why something could not be rebuilt here.


@final
@dataclass(frozen=True, slots=True)
class _Told:
    """What the replicas tell of one cell."""

    owner: int
    # The replica that sent its networks.
    pulled: bool
    returned: Returned
    by: dict[int, Exports] = field(default_factory=dict)
    # What each tells, its networks being here.
    inside: dict[str, Any] = field(default_factory=dict)
    # Optimizers and the like that networks have, by handle.
    altered: set[str] = field(default_factory=set)
    # Names of objects that are here not what the replicas have made of them in place: fewer, as they are taken in.
    follow: set[str] = field(default_factory=set)
    # Names of objects that are to hold here what a cell has made of them, if that is alike in all replicas.

    @property
    def of_owner(self) -> Exports | None:
        """What the owner tells, if that could be opened."""
        return self.by.get(self.owner)

    def exports(self, name: str) -> dict[int, Export]:
        """Return what replicas tell of a name."""
        return {r: exports.names[name] for r, exports in self.by.items() if name in exports.names}


@final
class Absorbing:
    """Takes in what replicas tell. `user_ns` is the dictionary of ordinary cells.

    `content(value)` tells what one holds, `has(replica_id, name, content)` whether a replica has what a name holds;
    `ask` is given to metrics that came, to ask all replicas.
    """

    def __init__(
        self,
        user_ns: MutableMapping[str, Any],
        mirrors: Mirrors,
        lent: Lent,
        shared: SharedNames,
        holders: Holders,
        stand_ins: StandIns,
        *,
        fetch: Callable[[str, int], Any],
        content: Callable[[object], Content | None],
        has: Callable[[int, str, Content | None], bool],
        ask: Callable[[Any, str], Any],
    ) -> None:
        self._user_ns = user_ns
        self._mirrors = mirrors
        self._lent = lent
        self._shared = shared
        self._holders = holders
        self._stand_ins = stand_ins
        self.incoming = Incoming(user_ns, mirrors, lent, fetch, self._held)
        self._content = content
        self._has = has
        self._ask = ask
        self._awaited: dict[int, set[str]] = {}
        # Of what is being taken in; see `_Told`.
        self._parted = Parted()
        # By their handles: networks that differ between the replicas, as the user has been told.
        self._loose: set[str] = set()
        # Names of tensors that do, likewise.

    def absorb(self, payloads: Mapping[int, tuple[Payload, int | None]], owner: int, pulled: bool) -> Returned:
        """See `Names.absorb`."""
        returned = Returned(nbytes=sum(payload.nbytes for payload, _ in payloads.values()))
        told = _Told(owner, pulled, returned)
        # A part that the cell has taken out of a network may have a name there.
        parts = self._mirrors.all()
        self._open(payloads, told)
        with self._former(frozenset(name for exports in told.by.values() for name in exports.former)) as taken:
            self._absorb(told)
        for found in (returned.bound, returned.stayed, returned.loose, returned.altered):
            found[:] = sorted(set(found) - taken)
        returned.deleted = self._follow_deleted(told.by)
        returned.diverged = self._note_diverged(told.by)
        returned.left = told.of_owner.left if told.of_owner is not None else None
        if returned.left is not None and any(exports.left != returned.left for exports in told.by.values()):
            # Replicas that differ are left to themselves.
            returned.left = replace(returned.left, process=None)
        results = {r: e.result for r, e in told.by.items() if e.result is not None}
        if results:
            returned.result = self.incoming.value("_", results, owner)
        del parts
        return returned

    def _open(self, payloads: Mapping[int, tuple[Payload, int | None]], told: _Told) -> None:
        for replica_id, (payload, slab) in payloads.items():
            try:
                exports, arrivals = unpack(
                    payload, slab, namespace=self._user_ns, resolve=self.incoming.resolve, lenient=True
                )
            except Exception as reason:
                # A network's class has a say in how it is rebuilt.
                told.returned.problem = f"{type(reason).__name__}: {reason}"
                continue
            told.by[replica_id] = exports
            if arrivals.lacking:
                self.incoming.lacking.update(dict.fromkeys(exports.modules, arrivals.lacking))
                exports.modules.clear()
                exports.objects.clear()
            else:
                told.inside.update(arrivals.lent)
            if replica_id == told.owner:
                self._graft(exports, arrivals)
            self._mirrors.take(arrivals)
            self.incoming.undelivered -= arrivals.handles.keys()

    def _let_go(self, handle: str, replica_id: int) -> None:
        self._holders.let_go(handle, replica_id)
        network = self._mirrors.find(handle)
        if network is not None:
            self._lent.bereave(network, replica_id)
        self._lent.gone(handle, replica_id)

    @contextlib.contextmanager
    def _former(self, taken: frozenset[str]) -> Iterator[set[str]]:
        """Let the objects that a cell has taken these names from have their former names; give those."""
        names = {former(name): name for name in taken if name in self._user_ns}
        for other, name in names.items():
            self._user_ns[other] = self._user_ns[name]
            self._shared.copy(name, other)
        try:
            yield set(names)
        finally:
            for other in names:
                self._user_ns.pop(other, None)
                for replica_id in self._shared.replicas:
                    self._shared.forget(replica_id, (other,))

    def _absorb(self, told: _Told) -> None:
        names = {name for exports in told.by.values() for name in exports.names}
        trained = {name for exports in told.by.values() for name in exports.trained}
        filled = {name for exports in told.by.values() for name in exports.filled}
        loaders = {name for exports in told.by.values() for name in exports.loaders}
        told.altered.update(name for exports in told.by.values() for name in exports.altered)
        # Before networks hear of their attributes, of which an object may be one: model.config. And while what objects
        # had there has its handles: trainer.optimizer = SGD(...).
        left = {name for name in told.altered | filled | loaders if self._was_left(name)}
        told.follow.update(filled & left)
        for replica_id, exports in told.by.items():
            for handle in exports.gone:
                self._let_go(handle, replica_id)
        self._holders.gone(self._mirrors.gone())
        self._absorb_modules(told)
        # A name that is bound anew may have been the last of what another one is to hold.
        held = [self._user_ns.get(name) for name in names]
        self._awaited = {r: exports.names.keys() - exports.filled for r, exports in told.by.items()}
        self._absorb_names(trained, told)
        self._tie(told)
        # Held until names have them.
        objects = self._absorb_objects(told)
        self._absorb_names(names - trained, told)
        self._join(told)
        told.altered.difference_update(self._methods_of_followed(told))
        settings = {name: known for name in told.altered if (known := _set_in(name, told.by.values())) is not None}
        told.returned.altered = self._shared.alter(told.altered, left, settings)
        # Objects that hold each other are filled one after the other.
        self._shared.renew({*left, *told.returned.bound} if left else (), told.by)
        del objects, held

    def _hold(self, handle: str, replicas: Iterable[int]) -> None:
        root = self._mirrors.find(handle)
        for part in root.modules() if root is not None else ():
            self._holders.add(self._mirrors.handle(part), replicas)

    def _follow_deleted(self, opened: Mapping[int, Exports]) -> list[str]:
        """Delete here what the cell has deleted, unless one of its replicas still has it.

        So has one that never had it, and in which no line deleted it.
        """
        had = {name for replica_id in opened for name in self._shared.there(replica_id)}
        for replica_id, exports in opened.items():
            self._shared.forget(replica_id, exports.deleted)
        kept = {name for replica_id in opened for name in self._shared.there(replica_id)}
        told = [set(exports.deleted) for exports in opened.values()]
        names = (set().union(*told) & had) | (set.intersection(*told) if told else set())
        followed = sorted(name for name in names - kept if name in self._user_ns)
        for name in followed:
            del self._user_ns[name]
        return followed

    def _note_diverged(self, opened: dict[int, Exports]) -> dict[str, str]:
        first = {}
        # Of those that are here: one that has stayed in the replicas is told of once it has come.
        here = {handle: self._mirrors.find(handle) for exports in opened.values() for handle, _ in exports.sums}
        sums = [{k: each for k, each in exports.sums.items() if here[k[0]] is not None} for exports in opened.values()]
        parted = self._parted.note(sums)
        for handle in dict.fromkeys(handle for handle, _ in parted):
            names = [name for name, value in self._user_ns.items() if value is here[handle] and travels(name)]
            said = names[0] if names else f"a {type(here[handle]).__name__}"
            first[said] = said if (handle, "parameters") in parted else f"buffers of {said}"
        return first

    def _graft(self, exports: Exports, arrivals: Arrivals) -> None:
        """Networks that are here and have other parts since, or are parts of a new one, stay who they are.

        And so do parameters that a new one has, too. Others here may have them: optimizers, objects, other networks.
        """
        here = {id(part) for handle, part in arrivals.handles.items() if self._mirrors.find(handle) is not None}
        here |= {id(parameter) for parameter, *_ in exports.moved}
        modules = {
            handle: module
            for handle, module in exports.modules.items()
            if any(id(one) in here for one in (*module.modules(), *module.parameters()))
        }
        exports.modules.update(self._mirrors.graft(modules, arrivals, exports.moved, exports.replacing))

    def _absorb_modules(self, told: _Told) -> None:
        for handle, module in told.of_owner.modules.items() if told.of_owner is not None else ():
            self._mirrors.learn(handle, module)
            # All that have it tell something of it.
            self._hold(handle, [r for r, exports in told.by.items() if handle in exports.states])
            # What they have counted counts there: a copy of the owner's would count again where it is sent.
            torchmetrics_objects.arrived([module], counts=False)
            torchmetrics_objects.watch(module, self._ask)
        absorb_states(self._mirrors, {r: exports.states for r, exports in told.by.items()}, told.owner)

    def _join(self, told: _Told) -> None:
        """Give networks that came the values that have names here, in the place of copies."""
        parts: dict[str, dict[str, nn.Module]] = {}
        for handle, path, attribute, name in told.of_owner.named if told.of_owner is not None else ():
            network = self._mirrors.find(handle)
            if handle not in parts and network is not None:
                parts[handle] = dict(network.named_modules())
            part = parts.get(handle, {}).get(path)
            with contextlib.suppress(Undelivered):
                if part is not None:
                    set_named(part, attribute, self._held(name, told.owner))
        for handle in parts:
            network = self._mirrors.find(handle)
            if network is not None and self._mirrors.known(network) is not None:
                # What it has now is another object, of the same value.
                self._mirrors.mark(network)

    def _tie(self, told: _Told) -> None:
        """Give networks that came the parameters that have names here, before optimizers are made that have these."""
        if told.of_owner is None or not told.of_owner.tied:
            return
        for handle, attribute, name in told.of_owner.tied:
            part, parameter = self._mirrors.find(handle), self._user_ns.get(name)
            with contextlib.suppress(Undelivered):
                if part is not None and self._held(name, told.owner) is parameter and type(parameter) is nn.Parameter:
                    part._parameters[attribute] = parameter
        for module in told.of_owner.modules.values():
            for part in module.modules():
                self._mirrors.mark(part)

    def _absorb_objects(self, told: _Told) -> list[Any]:
        objects = []
        payloads = told.of_owner.objects if told.of_owner is not None else {}
        for handle, payload in sorted(payloads.items(), key=lambda given: given[1] is not None):
            try:
                obj = told.inside[handle] if payload is None else self.incoming.unpacked(payload, told.owner)
            except Exception:
                # What it needs has not come: names that mean it have a stand-in.
                continue
            objects.append(obj)
            self.incoming.undelivered.discard(handle)
            holders = [r for r, exports in told.by.items() if handle in exports.objects]
            self._lent.learn(handle, obj, holders, with_state=payload is None)
        return objects

    def _absorb_names(self, names: Iterable[str], told: _Told) -> None:
        for name in _in_order(names, told.by):
            exports, same = _resolved(told.exports(name), told.by)
            if any(name in e.filled for e in told.by.values()):
                if name in told.follow and self._follows(name, exports, same, told.altered):
                    told.altered.discard(name)
                    told.returned.bound.append(name)
            elif isinstance(self._user_ns.get(name), type) and not all_alike(exports):
                # Here it is one class, and each replica counts in it by itself, say.
                told.altered.add(name)
            else:
                self._absorb_name(name, exports, same, told)
            for awaited in self._awaited.values():
                awaited.discard(name)

    def _was_left(self, name: str) -> bool:
        """Whether nobody has changed the notebook's object since the replicas that have it got it."""
        obj = self._user_ns.get(name, MISSING)
        had = [self._shared.of(r, name) for r in self._shared.replicas if self._shared.shares(r, name, obj)]
        now = self._content(obj)
        return all(shared is not None and shared.same(now) for shared in had)

    def _follows(self, name: str, exports: dict[int, Export], same: str | None, altered: Set[str]) -> bool:
        """Have an object hold what the cell has made of it, if that is alike in all replicas; each one's, its own."""
        obj = self._user_ns.get(name, MISSING)
        sharing = {r for r in self._shared.replicas if self._shared.shares(r, name, obj)}
        if not sharing or sharing - exports.keys():
            return False
        if same is not None:
            followed = self._user_ns.get(same) is obj and same not in altered
        else:
            followed = self._fill(name, exports, self._by_teller(name, obj, exports, sharing))
        if followed:
            self._shared.share(exports, {name: obj}, tellers=tuple(sorted(exports)))
        return followed

    def _methods_of_followed(self, told: _Told) -> set[str]:
        """Return the altered names of methods of objects that have followed: `step`, of `step = trainer.step`."""
        followed = {id(self._user_ns[name]) for name in told.follow.intersection(told.returned.bound)}
        methods = ((n, m) for n in told.altered if type(m := self._user_ns.get(n)) is types.MethodType)
        return {name for name, method in methods if id(method.__self__) in followed}

    def _by_teller(self, name: str, obj: object, exports: dict[int, Export], sharing: set[int]) -> dict[int, object]:
        """Return the notebook's objects by the replica that tells of each: one for all, or their own; else nothing."""
        if isinstance(obj, PerReplica):
            tellers = self._tellers(min(sharing), name, obj)
            known = len(tellers) == len(obj) and sharing.issubset(tellers)
            return {r: one for r, one in zip(tellers, obj.values, strict=True) if r in sharing} if known else {}
        return {min(exports): obj} if self.incoming.is_one(exports) or self._is_told_alike(name, exports) else {}

    def _is_told_alike(self, name: str, exports: dict[int, Export]) -> bool:
        """Whether it is the same in other bytes: a replica that was started anew has other strings that are equal."""
        told = [self.incoming.told(name, export, r) for r, export in sorted(exports.items())]
        return isinstance(told[0], tuple) and merged(told) is told[0]

    def _fill(self, name: str, exports: dict[int, Export], ours: dict[int, object]) -> bool:
        """Fill these objects with what the replicas tell of them, all or none; return whether it was done."""
        held = {r: self.incoming.told(name, exports[r], r, one=len(ours) == 1) for r in ours}
        for r, one in ours.items():
            # What cannot be rebuilt here comes as a stand-in.
            if not (isinstance(held[r], tuple) and held[r][0] is type(one) and is_refillable(one)):
                return False
        for r, one in ours.items():
            refill(one, held[r][1])
        return bool(ours)

    def _tellers(self, replica_id: int, name: str, value: PerReplica) -> Sequence[int]:
        """Return whose values a PerReplica has that the replica has by a name, in its order."""
        shared = self._shared.of(replica_id, name)
        return (shared.tellers if shared is not None else ()) or range(len(value))

    def _held(self, name: str, replica_id: int) -> Any:
        """Return what is here of a name whose value another one of that replica holds. Raises Undelivered."""
        value = self._user_ns.get(name, MISSING)
        awaited = value is MISSING or name in self._awaited.get(replica_id, ())
        if awaited or not self._shared.shares(replica_id, name, value):
            raise Undelivered
        if isinstance(value, PerReplica):
            tellers = self._tellers(replica_id, name, value)
            if replica_id not in tellers:
                raise Undelivered
            value = value[tellers.index(replica_id)]
        if isinstance(value, Remote):
            raise Undelivered
        return value

    def _absorb_name(self, name: str, exports: dict[int, Export], same: str | None, told: _Told) -> None:
        known = exports.get(told.owner)
        before = self._user_ns.get(name, MISSING)
        kept = self._kept(name, exports, told.by)
        if kept == name:
            return
        kept = same if kept is None else kept
        value = self.incoming.value(name, exports, told.owner) if kept is None else self._user_ns[kept]
        refills = (told.pulled and is_refillable(before)) or all(name in told.by[r].refilled for r in exports)
        if (
            refills
            and value is not before
            and type(value) is type(before)
            and all(self._shared.shares(r, name, before) for r in exports)
        ):
            # As the cell did: who else has it here sees the change.
            value = _refilled(before, value)
        if isinstance(value, Remote):
            self._stand_ins.keep_earlier(name, value, before, exports)
        self._user_ns[name] = value
        self._shared.share(exports, {name: value}, tellers=tuple(sorted(exports)))
        if name not in self._loose and _trains_apart(value):
            self._loose.add(name)
            told.returned.loose.append(name)
        if isinstance(value, Remote):
            told.returned.stayed.append(name)
        elif not (isinstance(known, KnownModule) and before is value and not _changed(known.handle, told.by)):
            told.returned.bound.append(name)

    def _kept(self, name: str, exports: Iterable[int], opened: Mapping[int, Exports]) -> str | None:
        """Return the name that has here what a name holds in all of these replicas, of which nothing was changed."""
        held = {opened[r].unchanged.get(name) for r in exports}
        kept = held.pop() if len(held) == 1 else None
        if kept is None or kept not in self._user_ns:
            return None
        now = self._content(self._user_ns[kept])
        return kept if all(self._has(r, kept, now) for r in exports) else None


def _changed(handle: str, opened: Mapping[int, Exports]) -> bool:
    """Whether a replica tells of other values of a network."""
    return any(handle in exports.states for exports in opened.values())


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
    try:
        held = pytree.tree_leaves(value[0]) if isinstance(value, PerReplica) else []
    except RecursionError:
        # A container that holds itself.
        return False
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf for leaf in held)
