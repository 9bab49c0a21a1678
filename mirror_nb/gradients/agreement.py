"""What the replicas agree on: parameters that all of them know by the same numbers, with equal values.

Knows the default process group, and which parameters are tracked here. Knows no gradients and no rounds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mirror_nb.collectives.base import gathered
from mirror_nb.errors import UsageError, users_level
from mirror_nb.gradients.buckets import Agreed
from mirror_nb.gradients.matching import Offer, Portrait, Values, made_alike, match
from mirror_nb.gradients.tracked import Tracked
from mirror_nb.readable import listed
from mirror_nb.tensors.checksums import bits
from mirror_nb.values import VariableAggregation
from mirror_nb.variables import Variable, is_apart

Keys = tuple[dict[str, int], list[tuple[Any, str, int]]]
# How many parameters of each name were made, and parameters with their names and which of them they are.
NAMED = 5
# Parameters whose names a warning gives.
SWEPT = 1000
# So many are tracked at least before those that are gone are looked for.


@final
class Agreement:
    """The tracked parameters of one replica, and those that are agreed on; every replica makes the same calls."""

    def __init__(self, replica_id: int, num_replicas: int) -> None:
        self.replica_id = replica_id
        self.num_replicas = num_replicas
        self.agreed: list[Agreed] = []
        # By their numbers.
        self._before: list[Agreed] = []
        self._tracked: dict[tuple[str, int], Tracked] = {}
        self._by_id: dict[int, Tracked] = {}
        self._registered: dict[str, int] = {}
        self._sweep_at = SWEPT

    def new_ordinal(self, name: str) -> int:
        """Return how many parameters of this name there were before."""
        ordinal = self._registered.get(name, 0)
        self._registered[name] = ordinal + 1
        return ordinal

    def add(self, tracked: Tracked, parameter: nn.Parameter) -> None:
        """Have a parameter be agreed on once it is used."""
        if len(self._tracked) >= self._sweep_at:
            # Who copies a network in every step trains none of the copies.
            self._drop_dead()
            self._sweep_at = max(SWEPT, 2 * len(self._tracked))
        self._tracked[tracked.key] = tracked
        self._by_id[id(parameter)] = tracked

    def keys(self, parameters: Iterable[Tensor]) -> Keys:
        """Return by what the other replicas know these, those that are tracked, for `take_keys` of one of them."""
        found = {id(parameter): self.find(parameter) for parameter in parameters}
        tracked = [(one.parameter(), one.name, one.ordinal) for one in found.values() if one is not None]
        return dict(self._registered), tracked

    def take_keys(self, keys: Keys) -> None:
        """Know parameters by what another replica knows them, whose copies they are; nothing is agreed on here yet."""
        registered, named = keys
        told = {id(parameter): (name, ordinal) for parameter, name, ordinal in named}
        mine = list(self._tracked.values())
        self._registered, self._tracked = dict(registered), {}
        for tracked in mine:
            key = told.get(id(tracked.parameter()))
            tracked.name, tracked.ordinal = key or (tracked.name, self.new_ordinal(tracked.name))
            self._tracked[tracked.key] = tracked

    def find(self, parameter: Tensor) -> Tracked | None:
        """Return what is known of a parameter that is tracked."""
        tracked = self._by_id.get(id(parameter))
        return tracked if tracked is not None and tracked.parameter() is parameter else None

    def synchronized(self) -> dict[str, nn.Parameter]:
        """Return what lives and is to be equal: "Linear.weight", the further ones of a name "Linear.weight (2)"."""
        found: dict[str, nn.Parameter] = {}
        for agreed in self.agreed or self._before:
            parameter, tracked = agreed.parameter(), agreed.tracked
            if parameter is not None and tracked is not None and not is_apart(parameter):
                found[f"{tracked.name} ({tracked.ordinal + 1})" if tracked.ordinal else tracked.name] = parameter
        return found

    def forget(self) -> None:
        """All that was agreed on is void."""
        # It still tells which parameters are to be equal.
        self._before = self.agreed or self._before
        self.agreed = []
        for tracked in self._tracked.values():
            tracked.number = None

    def agree(self, unknown: list[Tracked], left: Iterable[Tracked]) -> tuple[frozenset[int], frozenset[int]]:
        """Number the parameters that someone used for the first time; returns the new numbers, the dead.

        Of those that are `left` of `no_sync` some may stay without a number: no other replica has them.
        """
        self._drop_dead()
        dead = [number for number, agreed in enumerate(self.agreed) if agreed.parameter() is None]
        offer = Offer(
            tuple((*tracked.key, tuple(tracked.alive().shape), str(tracked.alive().dtype)) for tracked in unknown),
            dict(self._registered),
            frozenset(dead),
            frozenset(tracked.key for tracked in left),
        )
        offers = gathered(offer, self.num_replicas)
        contested = {entry[0] for other in offers for entry in other.unknown if not made_alike(offers, entry[0])}
        alone, together = self._gather_values(contested)
        mine = [keys[self.replica_id] for keys in match(offers, alone, together)]
        portraits = self._portraits(mine)
        kinds = {_kind(key[0]) for key, column in zip(mine, portraits, strict=True) if _differ(column)}
        # With a weight its bias: those of other modules may be zeros, too.
        doubted = {name for name, _ in mine if _kind(name) in kinds} - contested
        if doubted:
            # One may have got in a parcel what others made, and has it as a later one of that name; or each has made
            # one for itself and let go of it, at another time, so that the counts say nothing.
            alone, together = self._gather_values(contested | doubted)
            mine = [keys[self.replica_id] for keys in match(offers, alone, together, doubted)]
            portraits = self._portraits(mine)
        new = self._compare([self._tracked.get(key) for key in mine], [name for name, _ in mine], portraits)
        numbers = range(len(self.agreed), len(self.agreed) + len(new))
        for number, agreed in zip(numbers, new, strict=True):
            self.agreed.append(agreed)
            if agreed.tracked is not None:
                old = agreed.tracked.number
                if old is not None:
                    # Converted here, too, and in this pass used elsewhere only: it is known by one number at a time.
                    self.agreed[old] = self.agreed[old].without_parameter()
                agreed.tracked.number = number
        return frozenset(numbers), frozenset.intersection(*(other.dead for other in offers))

    def _portraits(self, keys: Iterable[tuple[str, int]]) -> list[tuple[Portrait | None, ...]]:
        """Return what every replica has under its key of each parameter."""
        held = (self._tracked.get(key) for key in keys)
        parameters = [None if tracked is None else tracked.parameter() for tracked in held]
        portraits = [None if parameter is None else Portrait.of(parameter) for parameter in parameters]
        return list(zip(*gathered(portraits, self.num_replicas), strict=True))

    def _compare(
        self,
        candidates: list[Tracked | None],
        names: list[str],
        portraits: list[tuple[Portrait | None, ...]],
    ) -> list[Agreed]:
        """Raise where shapes differ; where values differ, take those of the first replica that has them."""
        differing: list[str] = []
        sources: set[int] = set()
        # Of them, who gave the values.
        assigned: list[str] = []
        # Variables that each replica assigns to by itself.
        agreed: list[Agreed] = []
        for tracked, name, column in zip(candidates, names, portraits, strict=True):
            there = [(i, portrait) for i, portrait in enumerate(column) if portrait is not None]
            source, first = there[0]
            if any(portrait.form != first.form for _, portrait in there):
                raise UsageError(
                    f"replicas disagree about parameter {name}: "
                    + ", ".join(f"{portrait.form} on replica {i}" for i, portrait in there)
                    + "; create and convert modules alike on every replica"
                )
            sparse = any(portrait.sparse for _, portrait in there)
            kinds = first.dtype, first.device_type, first.gradient
            entry = Agreed(tracked, torch.Size(first.shape), *kinds, sparse)
            if any(portrait.checksum != first.checksum for _, portrait in there):
                parameter = entry.parameter()
                if isinstance(parameter, Variable) and parameter.aggregation is VariableAggregation.NONE:
                    assigned.append(repr(parameter.name))
                else:
                    differing.append(name)
                    sources.add(source)
                entry.take_values(source, self.replica_id)
            agreed.append(entry)
        if self.replica_id == 0:
            _warn(assigned, differing, sources)
        return agreed

    def _gather_values(self, names: set[str]) -> tuple[list[Values], list[Values]]:
        there = gathered(self._values_of(names), self.num_replicas) if names else []
        return [alone for alone, _ in there], [together for _, together in there]

    def _values_of(self, names: set[str]) -> tuple[Values, Values]:
        """Return the checksums of the parameters of these names that are not agreed on, used or not.

        First by themselves, then each with all that its module has: many are zeros or ones.
        """
        alone: Values = {}
        together: Values = {}
        for tracked in self._tracked.values():
            parameter = tracked.parameter()
            if parameter is None or is_lazy(parameter) or tracked.name not in names or self._knows(tracked, parameter):
                continue
            portrait = Portrait.of(parameter)
            group = tracked.name, portrait.shape, str(portrait.dtype)
            mates = bits([parameter, *(mate for mate in tracked.mates() if not is_lazy(mate))])
            for values, checksum in ((alone, portrait.checksum), (together, mates)):
                values.setdefault(group, {}).setdefault(checksum, []).append(tracked.ordinal)
        return alone, together

    def _knows(self, tracked: Tracked, parameter: nn.Parameter) -> bool:
        """Whether it is agreed on as it is: one that was converted since is not."""
        return tracked.number is not None and self.agreed[tracked.number].fits(parameter)

    def _drop_dead(self) -> None:
        dead = [tracked for tracked in self._tracked.values() if tracked.parameter() is None]
        for tracked in dead:
            del self._tracked[tracked.key]
        self._by_id = {id(tracked.parameter()): tracked for tracked in self._tracked.values()}

    def let_go(self, dead: frozenset[int]) -> dict[int, int]:
        """Let go of numbers whose parameters are gone on every replica; returns the new ones of the others, by old."""
        kept = [number for number in range(len(self.agreed)) if number not in dead]
        self.agreed = [self.agreed[number] for number in kept]
        renamed = {old: new for new, old in enumerate(kept)}
        for agreed in self.agreed:
            if agreed.tracked is not None and agreed.tracked.number is not None:
                agreed.tracked.number = renamed[agreed.tracked.number]
        return renamed


def _kind(name: str) -> str:
    """Return the kind of module that has a parameter of this name."""
    return name.rpartition(".")[0]


def _differ(column: Iterable[Portrait | None]) -> bool:
    return len({portrait and (portrait.form, portrait.checksum) for portrait in column}) > 1


def _warn(assigned: list[str], differing: list[str], sources: set[int]) -> None:
    if assigned:
        warnings.warn(
            f"the replicas had assigned different values to the Variable {listed(assigned)}, made with "
            "VariableAggregation.NONE; since gradients train it, all have replica 0's from now on. Make it with "
            "aggregation=VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or assign the same value on all",
            stacklevel=users_level(),
        )
    if differing:
        more = len(differing) - NAMED
        rest = [f"{more} more parameter{'s' if more > 1 else ''}"] if more > 0 else []
        whose = listed([f"replica {i}'s" for i in sorted(sources)])
        warnings.warn(
            f"the replicas had different values in {listed([*differing[:NAMED], *rest])}; {whose} were taken. "
            "Build modules in the same order on every replica, from random numbers of torch, NumPy or Python. "
            "After training without synchronisation (--no-sync) this is how they become equal again",
            stacklevel=users_level(),
        )
