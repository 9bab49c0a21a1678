"""The names of one replica: binding what arrives, finding what a cell changed, sending it back.

Knows payloads and networks; knows no process and no shell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mirror_nb import variables
from mirror_nb.distributed import Distributed
from mirror_nb.errors import TransferError
from mirror_nb.messages import Changed, Export, Exports, Holdings, Left, NewModule, Stayed, former, travels
from mirror_nb.mirroring.attributes import named_attributes, names_by_id, set_named
from mirror_nb.mirroring.mirrors import Mirrors
from mirror_nb.mirroring.networks import ATTRIBUTES, components_in, load, mirrored_values, told_by_all
from mirror_nb.noticing.kinds import has_an_identity
from mirror_nb.noticing.reads import names_bound, reached
from mirror_nb.noticing.refilling import REFILLED, is_trained, refill
from mirror_nb.replica.changes import Before, Changes, meant
from mirror_nb.replica.exporting import Exporting, stayed
from mirror_nb.replica.held import Held
from mirror_nb.replica.objects import Objects
from mirror_nb.replica.outgoing import Fresh
from mirror_nb.tensors.checksums import bits, checksums, mixed
from mirror_nb.tensors.sharded import has_sharded
from mirror_nb.transfer import torchmetrics_objects
from mirror_nb.transfer.opening import Arrivals, NotRebuilt, note_not_made_again, unpack
from mirror_nb.transfer.packing import Begins, Last, SearchPath, pack
from mirror_nb.transfer.payload import Packed, Payload
from mirror_nb.transfer.pickler import label_class
from mirror_nb.transfer.told import is_told, parameters_of

KEPT_RESULTS = 8
# Values of last expressions that did not travel: so many are kept for the user to fetch.


class Adopts(Protocol):
    """What the namespace needs of the scope."""

    def adopt(self, module: nn.Module) -> None:
        """Give a network that arrived its place on the device, and track it."""

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Track the tensors that an optimizer which arrived has."""


@dataclass(frozen=True, slots=True)
class Latest:
    """What was exported last."""

    names: tuple[str, ...]
    networks: tuple[str, ...]
    objects: tuple[str, ...]
    # Handles of those that the controller had not got.
    told: Exports
    # The rest, without values.
    whole: bool
    # The size limits were lifted.
    changes: Changes


class Namespace:
    """Names in a replica. `names` is the dictionary that its cells run in."""

    def __init__(
        self, names: MutableMapping[str, Any], own: Iterable[str], scope: Adopts, device: torch.device
    ) -> None:
        self.names = names
        self.mirrors = Mirrors("r")
        # Names that mirror_nb binds itself; they never travel unless the user rebinds them.
        self._given: dict[str, Any] = {name: names.get(name) for name in own}
        self._scope = scope
        self._device = device
        self._sums: dict[str, int] = {}
        self._anew = False
        # Whether attributes travel that have not changed since the last time.
        self.objects = Objects()
        self.trained: set[str] = set()
        # Names by which the controller has tensors, trained and of no network maybe.
        self._named: tuple[tuple[str, str, str, str], ...] = ()
        # As the notebook told them for the cell that begins; see `Holdings`.
        self._handles: tuple[str, ...] = ()
        self._retained: list[Any] = []
        # What the notebook has besides the names that are here, by handles.
        self._outdated: set[str] = set()
        # Names that have another value in the notebook by now.
        self._stale: set[str] = set()
        # Those, and names whose values it has changed, of names that the cell may bind.
        self._own_now: frozenset[str] = frozenset()
        # Those of `_given` that hold that as the cell begins.
        self._aside: dict[str, Any] = {}
        # What these held, while the cell runs.
        self._deletable: tuple[str, ...] = ()
        # Names that the notebook has, and that the cell may delete.
        self._unbound: tuple[str, ...] = ()
        # Those that are not here: while the cell runs they hold what tells whether it has bound and deleted them.
        self._former: tuple[str, ...] = ()
        # Names of what the cell has let go of, until that is told.
        self._results: deque[str] = deque()
        self._search = list(sys.path)
        # As the controller knows it.
        self._changes = Changes()
        # What the latest cell did that the controller has not been told.
        self._label = ""
        # Of the latest cell, for the classes that it made.
        self._latest: Latest | None = None

    # ------------------------------------------------------------------ in

    def open(
        self, payload: Any, slab: int | None, *, of_replica: bool = False, own: tuple[int, int] | None = None
    ) -> Any:
        """Rebuild a payload's object; networks in it move to the device and are tracked.

        What metrics in it have counted counts once: in the replica that it is from (`of_replica`), or in the first.
        `own`: see `unpack`.
        """
        with variables.of_a_peer() if of_replica else contextlib.nullcontext():
            value, arrivals = unpack(
                payload,
                slab,
                namespace=self.names,
                resolve=self._resolve,
                device=self._device,
                own=own,
                # A replica that is filled by another has names of its own for the same.
                known=(lambda handle: None) if of_replica else self._known,
            )
        for module in arrivals.modules:
            self._scope.adopt(module)
        torchmetrics_objects.arrived(arrivals.modules, counts=not (of_replica or self._given.get("replica_id")))
        self.mirrors.take(arrivals)
        for handle in arrivals.handles:
            # What was told last of one that comes again is not what the controller has any more.
            self._sums.pop(handle, None)
        for handle, obj in arrivals.lent.items():
            if isinstance(obj, torch.optim.Optimizer):
                self._scope.adopt_optimizer(obj)
            self.objects.keep(handle, obj)
        return value

    def _known(self, handle: str) -> Any:
        return self.mirrors.find(handle) or self.objects.find(handle)

    def hold(self, holdings: Holdings) -> None:
        """Keep what the notebook still has, and let go of what it has deleted."""
        for name, other in holdings.renamed:
            if name in self.names:
                self.names[other] = self.names[name]
        self.mirrors.lost(holdings.lost)
        self._handles, self._named = holdings.retained, holdings.named
        self._retain()
        for name in holdings.deleted:
            self.names.pop(name, None)
        self._outdated = set(holdings.outdated)
        self._stale = self._outdated.union(holdings.changed)
        self._deletable = holdings.deletable

    def _retain(self) -> None:
        self._retained = [self.mirrors.find(handle) or self.objects.find(handle) for handle in self._handles]

    def bind(self, payload: Any, slab: int | None) -> None:
        """Bind the names of a payload, which is a dict, or `Changed`."""
        opened = self._opened(payload, slab)
        # Some of what the notebook has besides may have come with it.
        self._retain()
        if isinstance(opened, Changed):
            for name, filling in opened.fillings.items():
                refill(opened.names[name], filling)
            for name, setting in opened.settings.items():
                own = vars(opened.names[name])
                own.update(setting.values)
                for gone in setting.deleted & own.keys():
                    del own[gone]
            opened = {**opened.names, **self._distributed_again(opened)}
        self.names.update(opened)
        self._outdated.difference_update(opened)
        self._stale.difference_update(opened)
        self.trained.update(name for name, value in opened.items() if is_trained(value))

    def _opened(self, payload: Any, slab: int | None) -> Any:
        try:
            return self.open(payload, slab, own=self._own())
        except NotRebuilt as error:
            reason = error.reason
            note_not_made_again(reason, f"`{error.name}`", "make it in the %%mirrored cell")
        # Not above, where each of the two would have the other one for its cause.
        raise reason

    def _distributed_again(self, changed: Changed) -> dict[str, Distributed]:
        """Return what has been distributed here under these names, made of its source as that is now."""
        there = {n: value for n in changed.again if isinstance(value := self.names.get(n), Distributed)}
        for name, dataset in there.items():
            dataset.follow(changed.names[name])
        return there

    def load(self, payload: Any, slab: int | None) -> None:
        """Copy the controller's values into networks that are here: {handle: {tensor name: value}}."""
        loaded = []
        for handle, state in self.open(payload, slab).items():
            module = self.mirrors.find(handle)
            if module is None:
                continue
            told = self._all_told(handle, module)
            # What was told last is not what the controller has any more.
            self._sums.pop(handle, None)
            if self.mirrors.outgrown(module):
                # It has other parts here, of which the controller is yet to hear.
                self.mirrors.take_left(module, state)
            else:
                load(module, state)
                loaded.append((handle, module, told))
        for handle, module, told in loaded:
            # When all have their values: networks may share tensors.
            self.mirrors.mark(module)
            if told is not None:
                self._sums[handle] = bits(told(module).values())

    def _all_told(self, handle: str, module: nn.Module) -> Callable[[nn.Module], dict[str, torch.Tensor]] | None:
        """Return what this replica tells of a network, if the controller has all of that: it will again, after `load`.

        None where the controller puts together what all replicas tell: it has let go of that.
        """
        last = self._sums.get(handle)
        if last is None or told_by_all(module):
            return None
        return next((tell for tell in (told_by_all, mirrored_values) if bits(tell(module).values()) == last), None)

    def _own(self) -> tuple[int, int]:
        return self._given["replica_id"], self._given["num_replicas"]

    # ------------------------------------------------------------------ mirrored objects of the controller

    def keep(self, payload: Payload, slab: int | None) -> None:
        """Take objects that the controller mirrors: {handle: object}."""
        for handle, obj in self.open(payload, slab).items():
            self.objects.keep(handle, obj)

    def held(self) -> dict[str, object]:
        """Return what this replica holds, by keys that are equal on all replicas.

        Names; handles after a colon; and after a point those of networks, optimizers and the like that cells have made
        without names of their own: a trainer's.
        """
        # A copy: threads that a cell left running bind names too.
        held = {**dict(self.names), **{f":{handle}": obj for handle, obj in self.objects.kept().items()}}
        made = {**self.objects.made(), **dict(self.mirrors.roots())}
        named = set(map(id, held.values())) if made else ()
        held.update((f".{handle}", obj) for handle, obj in made.items() if id(obj) not in named)
        return held

    def open_call(self, payload: Payload, slab: int | None) -> tuple[Any, Arrivals]:
        """Rebuild a call's function or arguments; return too what came as a copy."""
        try:
            value, arrivals = unpack(payload, slab, resolve=self._resolve, device=self._device, own=self._own())
        except Exception as error:
            note_not_made_again(error, "what the function captures or is given")
            raise
        for module in arrivals.modules:
            self._scope.adopt(module)
        return value, arrivals

    def reference(self, obj: object) -> Any:
        """For `pack`: a token for what the controller has too."""
        return self.objects.token(obj) or self.mirrors.reference(obj)

    def trained_by_name(self, obj: object) -> Any:
        """For `pack`: what stands for a tensor of no network that the controller has by its name, else None."""
        return next((("name", name, name) for name in self.trained if self.names.get(name) is obj), None)

    def has(self, obj: object) -> bool:
        """Whether the object lives here, and is no copy that came with a call."""
        # By their handles: what got other parts, or parameter groups, here has no token, and lives here all the same.
        known = self.objects.handle(obj) if self.reference(obj) is None else ""
        if known is None and isinstance(obj, nn.Module):
            known = self.mirrors.find_handle(obj)
        return known is not None or any(obj is given for given in self._given.values())

    def by_themselves(self) -> Iterator[tuple[str, object]]:
        """Yield what has a name and is no network or the like, for which a token stands wherever it is."""
        for name, value in self.names.items():
            own = travels(name) and name not in self._outdated and value is not self._given.get(name, _MISSING)
            if own and has_an_identity(value) and not issubclass(type(value), nn.Module) and not is_told(value):
                yield name, value

    def _resolve(self, token: Any) -> object:
        if token == ("strategy",):
            return self._given["strategy"]
        if isinstance(token, tuple) and token[0] == "object":
            return self.objects.resolve(token)
        if isinstance(token, tuple) and token[0] == "trained":
            tensor = parameters_of(self.objects.resolve(token))[token[2]]
            refill(tensor, token[3])
            return tensor
        if isinstance(token, tuple) and token[0] == "name":
            if token[1] not in self.names:
                raise TransferError(
                    f"`{token[-1]}` no longer exists in this replica; run the cell that makes it again"
                )
            return self.names[token[1]]
        if isinstance(token, tuple) and token[0] == "changed":
            return self._changed_object(*token[1:])
        return self.mirrors.resolve(token)

    def _changed_object(self, name: str, kind: Any) -> object:
        """Return what bears the name, to be refilled."""
        obj = meant(self._resolve(("name", name)))
        if type(obj) is not kind and kind in REFILLED:
            return kind()
        if type(obj) is not kind:
            # As it was in the notebook: autoreload gives objects another class.
            obj.__class__ = kind
        return obj

    # ------------------------------------------------------------------ out

    def before(self, mentioned: Iterable[str], tag: int, bound: Iterable[str] = ()) -> Before:
        """Remember what the names hold now. `tag` is a number of the cell, the same on all replicas.

        Of names that the cell may bind, and does not read, values that the notebook has others of are put aside until
        `changed`: where no line binds them after all, the notebook keeps its own.
        """
        self._label = str(tag)
        self._forget_former()
        for name, value in self._given.items():
            # An earlier cell may have deleted it: `%reset -f`.
            self.names.setdefault(name, value)
        self._own_now = frozenset(name for name, value in self._given.items() if self.names[name] is value)
        self._join()
        stale = {n for n in self._stale if n in self.names and n not in self._given}
        if stale:
            stale &= {*bound, *self._bound_by_functions(mentioned)}
        self._aside = {n: self.names.pop(n) for n in stale}
        before = Before(self.names, mentioned, bound, self._outdated, self.reference)
        self._unbound = tuple(n for n in self._deletable if n not in self.names)
        self.names.update(dict.fromkeys(self._unbound, _MISSING))
        return before

    def _join(self) -> None:
        """Give networks whose attributes have come the values that have names here, in the place of copies."""
        named, self._named = self._named, ()
        for handle, path, attribute, name in named:
            network = self.mirrors.find(handle)
            part = dict(network.named_modules()).get(path) if network is not None else None
            if network is not None and part is not None and name in self.names:
                set_named(part, attribute, meant(self.names[name]))
                if self.mirrors.known(network) is not None:
                    # What it has now is another object, of the same value.
                    self.mirrors.mark(network)

    def _bound_by_functions(self, mentioned: Iterable[str]) -> set[str]:
        names = reached(mentioned, self.names)
        return {bound for name in names for bound in names_bound(self.names[name], self.names)}

    def changed(self, before: Before, bound: Iterable[str], mentioned: Iterable[str]) -> list[str]:
        """Return the names that were bound since, or whose content was changed in place; uses `before` up.

        What was deleted since is told by the next `export`.
        """
        deleted = {n for n in self._unbound if n not in self.names}
        for name in [n for n in self._unbound if self.names.get(n) is _MISSING]:
            del self.names[name]
        changes = before.changes(bound, mentioned)
        deleted = deleted.union(changes.deleted) - self._own_now
        self._changes = dataclasses.replace(changes, deleted=tuple(sorted(deleted)))
        self._former = tuple(map(former, changes.former))
        self.names.update({n: value for n, value in self._aside.items() if n not in self.names and n not in deleted})
        self._aside.clear()
        names = sorted({*self._changes.names, *self._changes.filled})
        return [n for n in names if travels(n) and self.names[n] is not self._given.get(n, _MISSING)]

    def _forget_former(self) -> None:
        for name in self._former:
            self.names.pop(name, None)
            self.trained.discard(name)
        self._former = ()

    def export(
        self,
        names: Iterable[str],
        *,
        tag: int,
        owner: bool,
        trained: bool = False,
        result: object = None,
        whole: bool = False,
        compare: bool = False,
        left: Left | None = None,
        gone: tuple[str, ...] = (),
        networks: Iterable[nn.Module] = (),
        standing: Iterable[str] = (),
    ) -> Packed:
        """Pack what the names hold, as `Exports`.

        Networks and optimizers travel from the `owner` only, whole when the controller lacks them, else networks'
        changed values; the other replicas add the statistics that are averaged. `trained` tells that values may have
        changed in ways that only reading them shows. `compare` adds what tells whether the replicas differ. `whole`
        lifts the size limits: the user asked for it. `tag` is the same number on all replicas and makes their handles
        agree. `gone` are handles to tell again as those of what lives here no more; `networks` are sent whole, whether
        a name has them or not; `standing` are more names whose values the controller has as they are here.
        """
        standing = (*self._changes.standing, *(name for name in standing if name in self.names))
        exporting = self._exporting(dataclasses.replace(self._changes, standing=standing), networks, tag, whole)
        fresh = exporting.fresh
        exported = exporting.of(names)
        shown = None if result is None else self._result(meant(result), tag, exporting)
        for obj in self.objects.outgrown():
            exporting.plain(obj, "")
        changes, self._changes = exporting.changes, Changes()
        self._forget_former()
        sums: dict[tuple[str, str], int] = {}
        alike = sums if compare else None
        given = {handle: _read(handle, module, owner, alike)[1] for handle, module in fresh.networks.items()}
        changed = self._changed_roots(fresh.networks, owner, trained, alike)
        told = components_in if owner else told_by_all
        objects = {handle: payload if owner else None for handle, (_, payload) in fresh.objects.items()}
        exports = Exports(
            exported,
            self._changed_search(),
            dict(fresh.networks) if owner else {},
            {**{handle: told(module) for handle, module in fresh.networks.items()}, **changed},
            shown,
            (*gone, *self.mirrors.gone(), *self.objects.take_gone()),
            changes.altered,
            changes.settings,
            changes.deleted,
            changes.refilled,
            changes.filled.intersection(exported),
            changes.loaders,
            changes.unchanged,
            {**objects, **dict.fromkeys(fresh.inside)},
            sums,
            left=left,
            trained=tuple(name for name in exported if name in self.trained and is_trained(self.names[name])),
            former=changes.former,
            **(self._places(fresh.networks, changed, exported) if owner else {}),
        )
        try:
            packed = self._packed(exports, fresh)
        except TransferError:
            self._keep_unpicklable(exports)
            packed = self._packed(exports, fresh)
        self._gave(fresh, changed)
        self._sums.update(given)
        without = dataclasses.replace(exports, names={}, modules={}, states={}, result=None, objects={}, **_NOWHERE)
        self._latest = Latest(tuple(exported), tuple(fresh.networks), tuple(exports.objects), without, whole, changes)
        return packed

    def _exporting(self, changes: Changes, networks: Iterable[nn.Module], tag: int, whole: bool) -> Exporting:
        """Return what works out the exports, given these networks and those that have other parts by now."""
        exporting = Exporting(self, changes, self._label, tag, whole)
        for network in networks:
            exporting.fresh.add_network(self.mirrors.name(network, ""), network, self)
        for handle, network in self.mirrors.roots():
            # What the controller has under these names are other tensors.
            if self.mirrors.rebuilt(network) and not has_sharded(network):
                # A new part gets no handle of one that it has replaced, and that other names may have.
                exporting.fresh.add_network(self.mirrors.name(network, f"{handle}/r{tag}"), network, self)
        return exporting

    def _places(
        self,
        fresh: Mapping[str, nn.Module],
        changed: Mapping[str, Mapping[str, torch.Tensor]],
        exported: Iterable[str],
    ) -> dict[str, Any]:
        """Return where, in networks that travel, are parameters and values that the controller has elsewhere."""
        roots = dict(self.mirrors.roots())
        set_anew = {handle: roots[handle] for handle, state in changed.items() if ATTRIBUTES in state}
        bound = ((name, self.names.get(name)) for name in exported)
        tensors = names_by_id((name, value) for name, value in bound if type(value) is torch.Tensor)
        # Such a name may be a new one of what a network has had: `seen = net.attention`.
        known = [item for item in roots.items() if tensors and item[0] not in {**fresh, **set_anew}]
        return {
            "moved": tuple(self.mirrors.moved(fresh.values())),
            "replacing": tuple(self.mirrors.replacing(fresh.values())),
            "tied": tuple(self._tied(fresh.values())),
            "named": (
                *self._named_in({**fresh, **set_anew}),
                *((handle, *found) for handle, network in known for found in named_attributes(network, tensors)),
            ),
        }

    def _gave(self, fresh: Fresh, changed: Iterable[str]) -> None:
        """The controller has these, and the values of `changed` networks, as they are now."""
        for handle, (obj, _) in fresh.objects.items():
            self.objects.give(handle, obj)
        for handle, obj in fresh.inside.items():
            self.objects.give(handle, obj)
        self.mirrors.gave(fresh.networks.values())
        for handle in changed:
            module = self.mirrors.find(handle)
            if module is not None:
                # It may have been collected meanwhile.
                self.mirrors.mark(module)

    def _named_in(self, networks: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, str, str]]:
        """Yield where networks have values that names have too: here as there it is to be one value."""
        named = names_by_id((name, value) for name, value in self.names.items() if travels(name)) if networks else {}
        for handle, network in networks.items():
            yield from ((handle, *found) for found in named_attributes(network, named))

    def _tied(self, networks: Iterable[nn.Module]) -> Iterator[tuple[str, str, str]]:
        """Yield where networks have parameters that the controller knows by names: `net.scale = scale`."""
        trained = ((name, self.names.get(name)) for name in self.trained)
        named = names_by_id((name, value) for name, value in trained if is_trained(value))
        for handle, attribute, parameter in self.mirrors.added(networks) if named else ():
            yield from ((handle, attribute, name) for name in named.get(id(parameter), ()))

    def export_again(self, *, tag: int, owner: bool) -> Packed:
        """Pack once more what `export` has packed last, without its result; networks from another owner."""
        latest = self._latest
        assert latest is not None
        networks = [network for handle in latest.networks if (network := self.mirrors.find(handle)) is not None]
        for network in networks:
            self.mirrors.unmark(network)
        self.objects.undelivered(latest.objects)
        self.forget_told()
        told = latest.told
        # What the cell let go of is told once.
        gone = {former(name) for name in latest.changes.former}
        unchanged = {name: other for name, other in latest.changes.unchanged.items() if other not in gone}
        self._changes = dataclasses.replace(latest.changes, unchanged=unchanged, former=())
        self._search = self._search if told.search is None else []
        return self.export(
            [name for name in latest.names if name in self.names],
            tag=tag,
            owner=owner,
            trained=True,
            whole=latest.whole,
            compare=bool(told.sums),
            left=told.left,
            gone=told.gone,
            networks=networks,
        )

    def _packed(self, networks: object, fresh: Fresh) -> Packed:
        return pack(
            networks,
            namespace=self.names,
            reference=self.objects.token,
            handle=self.mirrors.handle,
            lend=lambda obj: next((handle for handle, other in fresh.inside.items() if other is obj), None),
            label=self._label,
        )

    def forget_given(self, handles: Iterable[str]) -> None:
        """The controller lacks these networks and optimizers: they were another replica's than the owner."""
        for handle in handles:
            self.objects.release(handle)
            network = self.mirrors.find(handle)
            if network is not None:
                self.mirrors.unmark(network)

    def release(self, handles: Iterable[str]) -> None:
        """The controller has these objects no more; of networks among them it may have parts, which are told then."""
        networks = (obj for handle in handles if isinstance(obj := self.objects.find(handle), nn.Module))
        self.mirrors.lost([self.mirrors.handle(network) for network in networks])
        self.objects.release(*handles)

    def forget_told(self) -> None:
        """Send the values of all networks the next time, also of those that have not changed since the last."""
        self._sums.clear()
        self._anew = True

    def _changed_search(self) -> SearchPath | None:
        changed, self._search = sys.path != self._search, list(sys.path)
        return SearchPath() if changed else None

    def label(self, kind: type) -> None:
        """Name the classes of cells that `kind` is or derives from, as `export` would: before it travels otherwise."""
        for base in kind.__mro__:
            label_class(base, self._label)

    def snapshot(
        self, beside: Callable[[list[Any]], object] = lambda packed: None, without: Iterable[str] = ()
    ) -> tuple[Packed, tuple[str, ...]]:
        """Pack every name that can travel, for `restore`; return the names that cannot.

        All in one pickle, so that an optimizer still holds the very parameters of its network. What is to go with
        them `beside` makes of the networks and optimizers that are packed.
        """
        mine = {
            name: value
            for name, value in self.names.items()
            if travels(name) and value is not self._given.get(name, _MISSING)
        }
        absent = {id(mine.pop(name, None)) for name in without}
        handles = {handle: module for handle, module in self.mirrors.all().items() if id(module) not in absent}
        objects = {handle: obj for handle, obj in self.objects.all().items() if id(obj) not in absent}
        left = list(without)
        while True:
            named = [(Begins(name), name, value) for name, value in mine.items()]
            packed: list[Any] = []
            compiled = None if _COMPILED in left else Last(functools.partial(_for_replicas, packed))
            last = Last(functools.partial(beside, packed))
            try:
                untold = [handle for handle, module in handles.items() if self.mirrors.outgrown(module)]
                told = handles, untold, objects, tuple(self.objects.kept())
                whole = (SearchPath(), named, Begins(""), told, Begins(_COMPILED), compiled, Begins(""), last)
                # Appended to: it is none of the handles that are asked for.
                return pack(whole, namespace=self.names, handle=packed.append, lend=packed.append), tuple(left)
            except TransferError:
                tried = len(mine) + len(handles) + len(objects)
                broken = [name for name in mine if not self._packs(mine[name])]
                left += broken
                mine = {name: value for name, value in mine.items() if name not in broken}
                # Of networks, those that were sent before they became what cannot be.
                handles = {handle: module for handle, module in handles.items() if self._packs(module)}
                objects = {handle: obj for handle, obj in objects.items() if self._packs(obj)}
                if len(mine) + len(handles) + len(objects) == tried:
                    if _COMPILED in left:
                        raise
                    left.append(_COMPILED)

    def _packs(self, value: object) -> bool:
        try:
            pack(value, namespace=self.names).close()
        except TransferError:
            return False
        return True

    def restore(self, payload: Payload, slab: int | None) -> Any:
        """Take over another replica's snapshot; return what came with it.

        Raises NotRebuilt, with the name, where one of its names cannot be had here: nothing is taken over then.
        """
        _, names, _, told, _, compiled, _, beside = self.open(payload, slab, of_replica=True)
        handles, untold, objects, kept = told
        self.objects = Objects()
        for handle, obj in objects.items():
            (self.objects.keep if handle in kept else self.objects.give)(handle, obj)
        self.names.update((name, value) for _, name, value in names)
        self.trained.update(name for _, name, value in names if is_trained(value))
        for handle, module in handles.items():
            self.mirrors.learn(handle, module)
        for module, held in compiled or ():
            vars(module).update(held)
        self.mirrors.gave(handles.values())
        # Until the next cell tells which of them the notebook has: they may have no names.
        self._retained = [*handles.values(), *objects.values()]
        # The controller may not have heard of all that these are by now: a call has no values read back.
        self.mirrors.outdate(untold)
        self.forget_told()
        return beside

    def _result(self, value: object, tag: int, exporting: Exporting) -> Export:
        """Export the value of a cell's last expression."""
        if isinstance(value, nn.Module) and any(value is other for other in self.names.values()):
            return exporting.export("", value, f"r{tag}", Held(()))
        export = exporting.plain(value, f"r{tag}")
        if not isinstance(export, Stayed):
            return export
        # Kept like `Out[n]`, under a name by which it can be fetched.
        self._results.append(f"_r{tag}")
        self.names[f"_r{tag}"] = value
        if len(self._results) > KEPT_RESULTS:
            self.names.pop(self._results.popleft(), None)
        return dataclasses.replace(export, name=f"_r{tag}")

    def _keep_unpicklable(self, exports: Exports) -> None:
        """Let the networks that cannot be pickled stay here, and say so under their names."""
        for handle, module in list(exports.modules.items()):
            try:
                self._packed(module, Fresh()).close()
            except TransferError as reason:
                del exports.modules[handle]
                for name in [n for n, export in exports.names.items() if export == NewModule(handle)]:
                    exports.names[name] = stayed(module, str(reason), for_good=True)

    def _changed_roots(
        self, fresh: Iterable[str], owner: bool, trained: bool, sums: dict[tuple[str, str], int] | None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return the values of networks that may have changed; what should be alike goes into `sums`, if given."""
        states = {}
        for handle, module in self.mirrors.roots():
            if handle in fresh or not (trained or self.mirrors.changed(module)) or has_sharded(module):
                continue
            state, total = _read(handle, module, owner, sums)
            if self._sums.get(handle) != total:
                states[handle] = {name: value.detach() for name, value in state.items()}
                self._sums[handle] = total
            attributes = self.mirrors.attributes(module, self._anew) if owner else None
            if attributes is not None:
                states.setdefault(handle, {})[ATTRIBUTES] = attributes
        self._anew = False
        return states


def _for_replicas(packed: Iterable[object]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return what networks have that no pickle of theirs has, but that another replica is to get."""
    networks = (obj for obj in packed if isinstance(obj, nn.Module))
    return [(each, {name: vars(each)[name] for name in getattr(type(each), "_OF_REPLICAS", ())}) for each in networks]


def _read(
    handle: str, network: nn.Module, owner: bool, sums: dict[tuple[str, str], int] | None
) -> tuple[dict[str, torch.Tensor], int]:
    """Return what is told of a network's values, and its checksum; what should be alike goes into `sums`, if given."""
    state = mirrored_values(network) if owner else told_by_all(network)
    found = checksums(state.values())
    if sums is not None:
        # An owner has summed them already.
        _sum_up(handle, network, sums, dict(zip(state, found, strict=True)) if owner else None)
    return state, mixed(found)


def _sum_up(
    handle: str, network: nn.Module, sums: dict[tuple[str, str], int], known: Mapping[str, int] | None = None
) -> None:
    """Add the checksums of what should be alike on all replicas; `known`: those of the network's tensors, by name."""
    for kind, held in (("parameters", _trained_alike(network)), ("buffers", _written_alike(network))):
        sums[handle, kind] = bits(held.values()) if known is None else mixed(known[n] for n in known if n in held)


def _trained_alike(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that have values, by name: of Keras's those that are trained.

    Statistics of its layers and the states of their generators are parameters, too, which each replica has of its own.
    """
    complete = ((name, p) for name, p in network.named_parameters() if not is_lazy(p) and not variables.is_apart(p))
    return {name: parameter for name, parameter in complete if parameter.requires_grad or _KERASS not in name}


def _written_alike(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are saved, by name: but for what is averaged when it is read, and Variables."""
    own = {
        id(buffer)
        for part in network.modules()
        for name, buffer in part._buffers.items()
        if name in part._non_persistent_buffers_set or (isinstance(part, _NORMS) and name in _STATISTICS)
    }
    return {name: b for name, b in network.named_buffers() if id(b) not in own and type(b) is torch.Tensor}


_NORMS = nn.modules.batchnorm._NormBase
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_KERASS = "_torch_params."
# Where a layer of Keras has all of its variables.
_COMPILED = "what a model was compiled with"
# Stands among the names that could not travel.
_MISSING = object()
_NOWHERE: dict[str, Any] = {"moved": (), "replacing": (), "tied": (), "named": ()}
# As `_places`.
