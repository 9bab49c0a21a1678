"""Networks that exist on both sides of the channel: who is whose copy, and whether one has changed since.

Each side keeps one `Mirrors`. A network that travels gets a handle; from then on a reference travels in its
place. Knows payloads and torch, no replicas and no channel.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mirror_nb.errors import TransferError
from mirror_nb.held_variables import is_elsewhere, part_of, read_together_in, whole
from mirror_nb.mirroring.attributes import Attributes, set_attributes
from mirror_nb.mirroring.grafting import graft
from mirror_nb.mirroring.handles import Handles
from mirror_nb.mirroring.hooks import own_hooks, registered, warn_of_tensors
from mirror_nb.mirroring.networks import (
    ATTRIBUTES,
    FLAGS,
    all_parameters,
    all_values,
    averaged_statistics,
    give,
    kept_equal,
    load,
    mirrored_values,
    parameters_of,
    parts_below,
    places,
    structure,
    sums,
    training_modes,
    versions,
)
from mirror_nb.mirroring.registrations import registrations
from mirror_nb.transfer.hooks import Hooks, hook_dicts, keep_numbers
from mirror_nb.transfer.opening import Arrivals
from mirror_nb.variables import bare

Moved = tuple[nn.Parameter, str, str]
# A parameter, and the handle and the name under which the other side has it.


@final
@dataclass(frozen=True, slots=True)
class _Mark:
    """What a network was when both sides held equal values."""

    structure: tuple[int, ...]
    places: tuple[object, ...]
    # As `places` tells them.
    registrations: int
    # How many parts had been registered anywhere by then: while that stays, no structure can have changed.
    conversions: int
    # How often a network had been converted anywhere: while that stays, all have the buffers of then.
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    # As `tensors` yields them.
    versions: list[int]
    parts: list[weakref.ref[nn.Module]]
    training: list[bool | None]
    trained: list[torch.Tensor]
    # Every part's parameters, in the order of `parameters_of`.
    own: dict[str, nn.Parameter | None]
    # The network's own parameters, without its parts'.
    attributes: Attributes
    hooked: int | None = -1
    # How many hooks had been registered anywhere when the network had none: while that stays, it has none.


def _as_in(part: _Mark, tensors: list[weakref.ref[torch.Tensor]], whole: _Mark) -> _Mark:
    """Return a part's mark with the counts of writes and the attributes that the whole had at its own."""
    latest = {id(held()): whole.versions[3 * i : 3 * i + 3] for i, held in enumerate(tensors)}
    counts = (latest.get(id(t), part.versions[3 * i : 3 * i + 3]) for i, t in enumerate(part.tensors))
    modes = {id(reference()): mode for reference, mode in zip(whole.parts, whole.training, strict=True)}
    training = [modes.get(id(reference()), mode) for reference, mode in zip(part.parts, part.training, strict=True)]
    part.attributes.follow(whole.attributes)
    return replace(part, versions=list(itertools.chain.from_iterable(counts)), training=training)


class Mirrors:
    """Handles of the networks that the other side has too."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = itertools.count()
        self._handles: Handles[nn.Module] = Handles(self._forget)
        self._marks: dict[str, _Mark] = {}
        self._roots: set[str] = set()
        self._gone: list[str] = []
        self._bereft = False
        # A network is gone that may have left parts behind.
        self._former: list[tuple[list[weakref.ref[torch.Tensor]], _Mark]] = []
        # What those were that are gone, without their tensors: of parts that they left, both sides held equal values.
        self._counted = 0
        # Registrations when roots were looked for last: since then a network may have let go of a part.
        self._held: dict[str, list[int]] = {}
        # By handle: checksums of a network's tensors, while somebody may write to them past autograd's count.
        self._changes = 0
        # How often a mark has come or gone.
        self._tokens: dict[int, tuple[str, str, str]] = {}
        self._tokens_of = (-1, -1)
        # By the ids of parameters, and after which changes and registrations: each is asked for.
        self.statistics: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
        # By handle and replica: what is averaged of a network, as the replica told it last. None of what both sides
        # have equal.
        self._hooks: dict[str, Hooks] = {}
        # By the handles of networks and their parts: which hooks of each the other side has.
        self._told: set[int] | None = set() if prefix == "k" else None
        # Hooks of tensors that a warning has told of. In a replica there are our own.

    def handle(self, module: nn.Module) -> str:
        """Return the network's handle; a new one if it has none."""
        known = self.find_handle(module)
        if known is None:
            known = f"{self._prefix}{next(self._count)}"
            self.learn(known, module)
        return known

    def name(self, module: nn.Module, handle: str) -> str:
        """Give the network and its parts handles that every replica derives alike; return the network's."""
        root = self.find_handle(module) or handle
        for path, part in module.named_modules():
            if self.find_handle(part) is None:
                self.learn(f"{handle}/{path}" if path else root, part)
        return root

    def learn(self, handle: str, module: nn.Module) -> None:
        """Remember which network here a handle means."""
        self._handles.learn(handle, module)
        hook_dicts(module)

    def _forget(self, handle: str) -> None:
        self._changes += 1
        mark = self._marks.pop(handle, None)
        if handle in self._roots:
            self._roots.discard(handle)
            self._bereft = True
            if mark is not None:
                self._former.append(
                    (list(map(weakref.ref, mark.tensors)), replace(mark, tensors=(), trained=[], own={}))
                )
        # It has the network's tensors, which nobody else may want any more.
        self.statistics.pop(handle, None)
        self._held.pop(handle, None)
        self._hooks.pop(handle, None)
        if mark is not None:
            self._gone.append(handle)

    def graft(
        self,
        modules: Mapping[str, nn.Module],
        arrivals: Arrivals,
        moved: Iterable[Moved] = (),
        replacing: Iterable[nn.Parameter] = (),
    ) -> dict[str, nn.Module]:
        """Have networks that are here, and arrived anew since they have other parts, stay who they are; return those.

        So do their parts that are here, and the tensors of these: others may have them. `moved` and `replacing` are
        what these methods told there.
        """
        known = {id(part): self.find(handle) for handle, part in arrivals.handles.items()}
        same = [
            (parameter, tensor)
            for parameter, handle, name in moved
            if handle in self._marks
            for known_as, tensor in zip(self._marks[handle].names, self._marks[handle].tensors, strict=True)
            if known_as == name
        ]
        became = graft(modules.values(), lambda part: known.get(id(part)), same, replacing, self._hooks_there)
        arrivals.replace(became)
        return {handle: became[id(module)] for handle, module in modules.items()}

    def moved(self, modules: Iterable[nn.Module]) -> Iterator[Moved]:
        """Yield parameters of these that the other side has elsewhere, with the handle and the name that tell where.

        As `prune.l1_unstructured(layer, "weight")` makes `weight_orig` of the weight, which optimizers have.
        """
        places = self._places()
        for part, name, parameter in all_parameters(modules):
            known = places.get(id(parameter), [])
            if known and (self.find_handle(part), name) not in known:
                yield parameter, *known[0]

    def replacing(self, modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
        """Yield parameters of these that the other side has not got, in the places of some that it has.

        As `layer.weight = nn.Parameter(…)` puts them: who has the old one, an optimizer say, keeps that.
        """
        places = self._places()
        for part, name, parameter in all_parameters(modules):
            mark = self._marks.get(self.find_handle(part) or "")
            if id(parameter) not in places and mark is not None and mark.own.get(name) is not None:
                yield parameter

    def added(self, modules: Iterable[nn.Module]) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield parameters of these that the other side has in no network, with the part's handle and their name."""
        places = self._places()
        for part, name, parameter in all_parameters(modules):
            if id(parameter) not in places:
                yield self.handle(part), name, parameter

    def _places(self) -> dict[int, list[tuple[str, str]]]:
        """Return where the other side has tensors, by their ids: handles and names.

        By the names that whole networks have for them, too: their own part may be gone since.
        """
        places: dict[int, list[tuple[str, str]]] = {}
        # A copy: a network may go meanwhile.
        for handle, mark in list(self._marks.items()):
            for name, tensor in zip(mark.names, mark.tensors, strict=True):
                places.setdefault(id(tensor), []).append((handle, name))
        return places

    def take(self, arrivals: Arrivals) -> None:
        """Remember every network of a payload that came with a handle."""
        for handle, module in arrivals.handles.items():
            self.learn(handle, module)
        for handle, came in arrivals.hooked.items():
            self._hooks[handle] = came
            keep_numbers(came)
        self._mark_all(arrivals.modules)

    def gave(self, modules: Iterable[nn.Module]) -> None:
        """These networks have just been sent whole; their parts got handles on the way."""
        parts = [part for module in modules for part in module.modules()]
        self._hooks.update((self.handle(part), own_hooks(part)) for part in parts)
        self._mark_all(parts)
        if self._told is not None:
            warn_of_tensors(parts, self._told)

    def _mark_all(self, modules: list[nn.Module]) -> None:
        parts = {id(child) for module in modules for child in module.children()}
        for module in modules:
            self.mark(module)
            handle = self.find_handle(module)
            if handle is not None and id(module) not in parts:
                self._roots.add(handle)

    def gone(self) -> tuple[str, ...]:
        """Return, once, the handles of networks that the other side may refer to and that no longer live here."""
        gone, self._gone = self._gone, []
        # The other side may have sent one again meanwhile.
        return tuple(handle for handle in gone if self.find(handle) is None)

    def roots(self) -> list[tuple[str, nn.Module]]:
        """Return the networks that travelled as such, not as a part of another that lives, with their handles."""
        if self._bereft or self._counted != registrations.count:
            self._bereft, self._counted = False, registrations.count
            marked = {handle: module for handle, module in self.all().items() if handle in self._marks}
            parts = parts_below(marked.values())
            left = {handle for handle, module in marked.items() if id(module) not in parts} - self._roots
            former, self._former = self._former, []
            for tensors, mark in former:
                for handle in left:
                    self._marks[handle] = _as_in(self._marks[handle], tensors, mark)
            self._roots |= left
        return [(handle, module) for handle in sorted(self._roots) if (module := self.find(handle)) is not None]

    def known(self, module: nn.Module) -> str | None:
        """Return the handle of a network that the other side has with the same structure, else None."""
        handle = self.find_handle(module)
        mark = self._marks.get(handle or "")
        if mark is None or handle is None:
            return None
        if mark.registrations != registrations.count:
            if mark.structure != structure(module) or mark.places != places(module):
                return None
            self._marks[handle] = replace(mark, registrations=registrations.count)
        elif mark.conversions != registrations.conversions:
            # Of what was on the meta device the parameters are others, too.
            own = parameters_of(list(map(vars, module.modules())))
            if list(map(id, own)) != list(map(id, mark.trained)):
                return None
        return None if self._has_other_functions(handle, module) else handle

    def _has_other_functions(self, handle: str, module: nn.Module) -> bool:
        """Whether the network has other hooks than the other side, or functions among its attributes."""
        mark, count = self._marks[handle], registered()
        if mark.attributes.other_functions():
            return True
        if mark.hooked == count is not None:
            return False
        parts = list(module.modules())
        if self._told is not None:
            warn_of_tensors(parts, self._told)
        found = list(map(own_hooks, parts))
        if found != list(map(self._hooks_there, parts)):
            return True
        if not any(found):
            self._marks[handle] = replace(mark, hooked=count)
        return False

    def _hooks_there(self, part: nn.Module) -> Hooks:
        return self._hooks.get(self.find_handle(part) or "", frozenset())

    def all(self) -> dict[str, nn.Module]:
        """Return every network that has a handle."""
        return self._handles.all()

    def find_handle(self, module: nn.Module) -> str | None:
        """Return the handle of a network here, if it has one."""
        return self._handles.of(module)

    def find(self, handle: str) -> nn.Module | None:
        """Return the network here that a handle means, if it still lives."""
        return self._handles.find(handle)

    def mark(self, module: nn.Module) -> None:
        """Both sides hold equal values from now on."""
        handle = self.find_handle(module)
        if handle is not None:
            self._changes += 1
            self.statistics.pop(handle, None)
            self._held.pop(handle, None)
            registrations.watch()
            named = dict(kept_equal(module))
            watched = tuple(named.values())
            parts = [weakref.ref(part) for part in module.modules()]
            self._marks[handle] = _Mark(
                structure(module),
                places(module),
                registrations.count,
                registrations.conversions,
                tuple(named),
                watched,
                versions(watched),
                parts,
                training_modes(parts),
                parameters_of(list(map(vars, module.modules()))),
                dict(module._parameters),
                Attributes(module.modules()),
            )

    def given(self, module: nn.Module, names: set[str] | None = None) -> dict[str, torch.Tensor]:
        """Return the values of a network, those of these names alone, which both sides have from now on."""
        held = mirrored_values(module)
        values = {name: value.detach() for name, value in held.items() if names is None or name in names}
        # Only what has changed here: replicas may have attributes of their own.
        attributes = self.attributes(module)
        if attributes is not None:
            values[ATTRIBUTES] = attributes
        self.mark(module)
        return values

    def unmark(self, module: nn.Module) -> None:
        """The other side has not got the network, and none of its parts."""
        self._changes += 1
        for part in module.modules():
            handle = self.find_handle(part) or ""
            self._marks.pop(handle, None)
            self._roots.discard(handle)

    def lost(self, handles: Iterable[str]) -> None:
        """The other side has these networks no more; it may have parts of them."""
        for handle in handles:
            if self._marks.pop(handle, None) is not None:
                self._changes += 1
                self._roots.discard(handle)
                self._bereft = True

    def remember(self) -> None:
        """Remember what the networks hold: they are read, and who has their tensors may write to them anyhow.

        As `parameter.data.copy_(other)` does, which autograd does not count. Takes 0.5 ms for a million numbers.
        """
        for handle, _ in self.roots():
            if handle in self._marks:
                self._held[handle] = sums(self._marks[handle].tensors)

    def let_go(self) -> None:
        """Nobody writes to them until they are read again."""
        self._held.clear()

    def changed(self, module: nn.Module) -> bool:
        """Whether the network's values have changed since `mark`: by what autograd counts, or since `remember`."""
        handle = self.find_handle(module) or ""
        mark = self._marks.get(handle)
        if mark is None or mark.versions != versions(mark.tensors) or mark.training != training_modes(mark.parts):
            return True
        return mark.attributes.changed() or self._exchanged(handle, module) or bool(self._overwritten(handle, mark))

    def _exchanged(self, handle: str, module: nn.Module) -> bool:
        """Whether a conversion has given the network other tensors than at `mark`."""
        mark = self._marks[handle]
        if mark.conversions == registrations.conversions:
            return False
        if mark.structure != structure(module):
            return True
        self._marks[handle] = replace(mark, conversions=registrations.conversions)
        return False

    def _overwritten(self, handle: str, mark: _Mark) -> set[str]:
        """Return the names of tensors that hold something else than at `remember`."""
        held = self._held.get(handle)
        if held is None:
            return set()
        return {name for name, was, now in zip(mark.names, held, sums(mark.tensors), strict=True) if was != now}

    def attributes(self, module: nn.Module, everything: bool = False) -> torch.Tensor | None:
        """Return the plain attributes that have changed since `mark`, or all, for `load`; None if there are none."""
        mark = self._marks.get(self.find_handle(module) or "")
        return None if mark is None else mark.attributes.since(everything)

    def rebuilt(self, module: nn.Module) -> bool:
        """Whether the network has other parts than at its `mark`, or has them, or its tensors, in other places."""
        handle = self.find_handle(module) or ""
        mark = self._marks.get(handle)
        if mark is None or self.known(module) is not None:
            return False
        same = [reference() for reference in mark.parts] == list(module.modules())
        now = dict(kept_equal(module))
        # What was on the meta device and has got memory is another tensor.
        moved = [tensor.is_meta for tensor in mark.tensors] != [tensor.is_meta for tensor in now.values()]
        replaced = list(map(id, mark.trained)) != list(map(id, parameters_of(list(map(vars, module.modules())))))
        if not same or replaced or self._has_other_functions(handle, module):
            return True
        return mark.names != tuple(now) or mark.places != places(module) or moved

    def outgrown(self, module: nn.Module) -> bool:
        """Whether the other side has the network, but with other parts or tensors."""
        return (self.find_handle(module) or "") in self._marks and self.known(module) is None

    def parts_there(self, module: nn.Module) -> set[int]:
        """Return the ids of the parts that the network had at its `mark`, as far as they live."""
        mark = self._marks.get(self.find_handle(module) or "")
        return set() if mark is None else {id(part) for reference in mark.parts if (part := reference()) is not None}

    def outdate(self, handles: Iterable[str]) -> None:
        """The other side has these networks with other parts or tensors, which are not here."""
        self._changes += 1
        for handle in handles:
            if handle in self._marks:
                self._marks[handle] = _Mark((), (), -1, -1, (), (), [], [], [], [], {}, Attributes(()))

    def forget_replica(self, replica_id: int) -> None:
        """The replica is no more: what it told last of networks does not count."""
        for shares in self.statistics.values():
            shares.pop(replica_id, None)

    def left(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return, once, what was written since `mark` to the tensors of then; the network has other parts since.

        By the names of then, which are the other side's still: for its `load`.
        """
        handle = self.find_handle(module) or ""
        mark = self._marks.get(handle)
        if mark is None or self.known(module) is not None:
            return {}
        now, training = versions(mark.tensors), training_modes(mark.parts)
        overwritten = self._overwritten(handle, mark)
        if overwritten:
            self._held[handle] = sums(mark.tensors)
        values = {
            name: tensor.detach()
            for i, (name, tensor) in enumerate(zip(mark.names, mark.tensors, strict=True))
            if (now[3 * i : 3 * i + 2] != mark.versions[3 * i : 3 * i + 2] or name in overwritten)
            and not is_lazy(tensor)
        }
        if training != mark.training or now[2::3] != mark.versions[2::3]:
            modes = [2 if mode is None else mode for mode in training]
            values[FLAGS] = torch.tensor(
                [*modes, *(p.requires_grad for p in mark.trained)], dtype=torch.uint8, device="cpu"
            )
        attributes = mark.attributes.since()
        if attributes is not None:
            values[ATTRIBUTES] = attributes
            mark.attributes.settle()
        if values:
            self._marks[handle] = replace(mark, versions=now, training=training)
        return values

    def take_left(self, module: nn.Module, state: dict[str, torch.Tensor]) -> None:
        """Give the tensors of then the other side's values, under their names of then; see `left`."""
        handle = self.find_handle(module) or ""
        mark = self._marks.get(handle)
        if mark is not None:
            there = dict(zip(mark.names, mark.tensors, strict=True))
            with torch.no_grad():
                for name in state.keys() & there.keys():
                    give(there[name], state[name])
            if ATTRIBUTES in state:
                set_attributes([reference() for reference in mark.parts], state[ATTRIBUTES])
            self._marks[handle] = replace(mark, versions=versions(mark.tensors))

    def written(self, module: nn.Module) -> set[str]:
        """Return the names of the values that were written to, or replaced, since `mark`.

        No names where the network has other parts since then: it goes out whole.
        """
        handle = self.known(module)
        if handle is None:
            return set()
        mark = self._marks[handle]
        was, now, same_mode = mark.versions, versions(mark.tensors), mark.training == training_modes(mark.parts)
        names = {ATTRIBUTES} if mark.attributes.changed() else set()
        names |= self._overwritten(handle, mark)
        if now == was and same_mode and not self._exchanged(handle, module):
            return names
        names |= set() if same_mode and now[2::3] == was[2::3] else {FLAGS}
        before = dict(zip(map(id, mark.tensors), zip(was[::3], was[1::3], strict=True), strict=True))
        own = [(name, tensor) for name, tensor in kept_equal(module) if not is_lazy(tensor)]
        return names | {name for name, t in own if before.get(id(t)) != tuple(versions([t])[:2])}

    def written_in_place(self, module: nn.Module) -> list[str]:
        """Return the names of the tensors that were written to since `mark` where they are, as autograd counts it."""
        mark = self._marks[self.find_handle(module) or ""]
        was, now = mark.versions, versions(mark.tensors)
        same = zip(mark.names, was[::3], now[::3], was[1::3], now[1::3], strict=True)
        return [name for name, before, after, there, here in same if before != after and there == here]

    def reference(self, obj: object) -> Any:
        """For `pack`: a token for a network, or a parameter of one, that the other side has; else None."""
        if type(obj) is torch.Tensor:
            # Most of what is asked for; to ask whether it is a Parameter takes longer than all else here.
            return None
        if isinstance(obj, nn.Module):
            handle = self.known(obj)
            return None if handle is None else ("module", handle)
        if isinstance(obj, nn.Parameter):
            return self._parameter_token(obj)
        return None

    def _parameter_token(self, parameter: nn.Parameter) -> Any:
        now = self._changes, registrations.count
        if self._tokens_of != now:
            self._tokens = self._parameter_tokens()
            self._tokens_of = now
        return self._tokens.get(id(parameter))

    def _parameter_tokens(self) -> dict[int, tuple[str, str, str]]:
        found: dict[int, tuple[str, str, str]] = {}
        for handle in self.all():
            if handle in self._marks:
                # As the other side has them, whatever became of the network here.
                for name, own in self._marks[handle].own.items():
                    found.setdefault(id(own), ("parameter", handle, name))
        # The part that had it is gone: a parametrization that was removed, say. The whole had it, too.
        for handle, _ in self.roots():
            mark = self._marks.get(handle)
            for name, tensor in zip(mark.names, mark.tensors, strict=True) if mark is not None else ():
                found.setdefault(id(tensor), ("of", handle, name))
        return found

    def resolve(self, token: Any) -> object:
        """For `unpack`: the object here that the other side's token means. Raises TransferError if it is gone."""
        found: Any = self.find(token[1]) if isinstance(token, tuple) and len(token) > 1 else None
        if found is not None and token[0] == "parameter":
            # The one of `mark`, as the other side means it: here it may have another place or name since.
            mark = self._marks.get(token[1])
            own = mark.own.get(token[2]) if mark is not None else None
            found = found._parameters.get(token[2]) if own is None else own
        elif found is not None and token[0] == "of":
            mark = self._marks.get(token[1])
            found = dict(zip(mark.names, mark.tensors, strict=True)).get(token[2]) if mark is not None else None
        if found is None:
            raise TransferError(f"the payload refers to {token!r}, which no longer exists here; bind it anew")
        return found


def absorb_states(mirrors: Mirrors, states: dict[int, dict[str, dict[str, torch.Tensor]]], owner: int) -> None:
    """Copy what the replicas sent into the networks here: the owner's values, averaged statistics of all."""
    loaded = []
    told: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for handle in {handle for sent in states.values() for handle in sent}:
        module = mirrors.find(handle)
        if module is None:
            continue
        state = dict(states.get(owner, {}).get(handle, {}))
        # Replicas tell of statistics that have changed: of the others those count that they told last.
        shares = dict(mirrors.statistics.get(handle, {}))
        own = dict(kept_equal(module))
        together = read_together_in(own.items())
        averaged = averaged_statistics(module).keys() | {
            name for r, sent in states.items() if r != owner for name in sent.get(handle, {})
        }
        averaged |= together.keys()
        # These are asked for by themselves.
        averaged -= {name for name, held in all_values(module) if is_elsewhere(held)}
        for r, sent in states.items():
            if handle in sent:
                shares[r] = {name: value for name, value in sent[handle].items() if name in averaged}
        # Else it has what is here: this network has just come from it, or all had the same before.
        silent = averaged & own.keys() - together.keys() - shares.get(owner, {}).keys()
        shares[owner] = {name: bare(own[name]).clone() for name in silent} | shares.get(owner, {})
        for r in states if together else ():
            # Who is silent has its part of what is here.
            parts_of = {name: part_of(held, len(states), r) for name, held in together.items()}
            shares[r] = parts_of | shares.get(r, {})
        for name in {name for share in shares.values() for name in share}:
            parts = [shares[r][name] for r in sorted(shares) if name in shares[r]]
            state[name] = whole(together[name], parts) if name in together else torch.stack(parts).mean(0)
        told[handle] = shares
        if mirrors.known(module) is not None:
            load(module, state)
            loaded.append(module)
        else:
            # It has other parts here since: what is left of the old ones takes its values, and it goes out anew.
            mirrors.take_left(module, state)
    for module in loaded:
        # When all have their values: networks may share tensors.
        mirrors.mark(module)
    mirrors.statistics.update(told)
