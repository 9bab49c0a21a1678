"""Variables of the controller: their components live in the replicas, and are asked for when somebody reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from mirror_nb.aggregation import aggregate, check_parts, from_outside
from mirror_nb.errors import UsageError
from mirror_nb.strategies.misuse import warn_of_parted
from mirror_nb.strategies.reductions import check_size, is_mean_of_none, select
from mirror_nb.values import DistributedValues, PerReplica, VariableAggregation, same
from mirror_nb.variables import (
    SyncOnReadVariable,
    Variable,
    alike,
    apply_assign,
    bare,
    component,
    component_variable,
    copy_component,
    copy_of,
    distributed,
    read_components,
    replace_component,
    set_data,
    set_trained,
    writes_to,
)

NEVER = -1
# Of `_seen`, the number of calls after which the tensor here had the replicas' value.
ALONG = 1 << 20
# Bytes of other Variables that are brought up to date with one that is read: many are mostly read one by one.


class Replicas(Protocol):
    """What a home needs of the controller's place."""

    num_replicas: int
    calls: int
    # Grows with every call that may have changed a Variable.

    def command(self, fn: Callable[..., Any], args: tuple[Any, ...], *, changes: bool) -> list[Any]:
        """Call a function on every replica."""

    def ask(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Call one that changes nothing, or may be called twice; again where a replica dies meanwhile."""

    def has_sent(self, obj: object) -> bool:
        """Whether the replicas have the object."""


@final
class ControllerHome:
    """The home of the Variables of one strategy in the controller."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._sent: dict[int, weakref.ref[Variable]] = {}
        # By id: a set of weak references would ask tensors whether they are equal.

    @property
    def num_replicas(self) -> int:
        return self._replicas.num_replicas

    def make(self, value: Tensor, **options: Any) -> Variable:
        """Make a Variable; the replicas get their components when it is first captured."""
        made = distributed(value, self, **options)
        self._settle(made)
        return made

    def join(self, variable: Variable, components: Sequence[Tensor]) -> None:
        """Give the replicas what each of them has made of a Variable that is new here."""
        if not all(same(components[0], other) for other in components[1:]):
            # Each replica gets its own, of a Variable that it has to have first.
            self.fetched([variable])
            self._replicas.command(apply_assign, (variable, "assign", PerReplica(components)), changes=False)

    def sent(self, variable: Variable) -> None:
        """The replicas have the Variable as it is here."""
        self._sent[id(variable)] = weakref.ref(variable)
        self._settle(variable)

    def push(self) -> None:
        """Give the replicas what was written here in ways that the Variables could not see.

        By their views, `v[1:].fill_(0)`, for instance; autograd counts those.
        """
        for known, reference in list(self._sent.items()):
            variable = reference()
            if variable is None:
                del self._sent[known]
            else:
                self.wrote(variable)

    def _settle(self, variable: Variable) -> None:
        """All that was written to the tensor here is known wherever the components are."""
        variable._writes = writes_to(variable)  # type: ignore[attr-defined]

    def keep(self, variable: Variable, fetched: Callable[[], Mapping[Variable, Sequence[Tensor]]]) -> None:
        """Keep the components here for good, as they are among those `fetched`: the replicas are about to end."""
        components = fetched()[variable]
        variable._kept = {i: component_variable(variable, own) for i, own in enumerate(components)}  # type: ignore[attr-defined]
        if not variable.is_read_together:
            self._take_first(variable, components)

    def components(self, variable: Variable) -> Mapping[int, Tensor]:
        self.wrote(variable)
        kept = _kept(variable)
        if kept:
            return {i: component(own) for i, own in kept.items()}
        if self._replicas.has_sent(variable):
            return dict(enumerate(self.fetched([variable])[variable]))
        return dict.fromkeys(range(self._replicas.num_replicas), component(variable))

    def fetched(self, variables: Sequence[Variable]) -> dict[Variable, tuple[Tensor, ...]]:
        """Return the components of each of these Variables, all of which the replicas have, by one request."""
        parts = self._replicas.ask(read_components, (tuple(variables),))
        return dict(zip(variables, zip(*parts, strict=True), strict=True))

    def assign(self, variable: Variable, how: str, value: Any) -> Any:
        if isinstance(value, DistributedValues):
            check_size(value, self._replicas.num_replicas)
            check_parts(variable, how, value)
            if how != "assign" and variable.is_read_together and isinstance(value, PerReplica):
                value = _added(value)
        share = self._share(variable, how, value)
        if isinstance(share, Tensor):
            share = share.detach().clone()
        elif isinstance(share, DistributedValues) and not _kept(variable):
            # Each replica gets its own, of a Variable that it has to have first.
            self.fetched([variable])
        self.wrote(variable)
        # Here first: what cannot be assigned is refused before any replica has changed.
        apply_assign(variable, how, select(share, 0))
        self._settle(variable)
        for replica_id, own in _kept(variable).items():
            apply_assign(own, how, select(share, replica_id))
        if self._replicas.has_sent(variable):
            try:
                # What is set may be set twice, what is added may not.
                if how == "assign":
                    self._replicas.ask(apply_assign, (variable, how, share))
                else:
                    self._replicas.command(apply_assign, (variable, how, share), changes=False)
            except BaseException:
                # They may have it or not: who reads it here is to be told.
                variable._seen = NEVER  # type: ignore[attr-defined]
                raise
        return variable

    def _share(self, variable: Variable, how: str, value: Any) -> Any:
        """Return what every component takes, or a PerReplica where they take different ones."""
        n = self._replicas.num_replicas
        shares = [from_outside(variable, how, value, n, i) for i in range(n)]
        alike = all(one is shares[0] or same(shares[0], one) for one in shares)
        return shares[0] if alike else PerReplica(shares)

    def take(self, variable: Variable, value: Tensor) -> None:
        self.assign(variable, "assign", value)

    def read(self, variable: Variable) -> Tensor:
        if isinstance(variable, SyncOnReadVariable):
            return aggregate(variable, list(self.components(variable).values()))
        self.refresh(variable)
        return component(variable)

    def refresh(self, variable: Variable) -> None:
        if not self._is_behind(variable) or not self._replicas.has_sent(variable):
            return
        self.wrote(variable)
        for each, components in self.fetched([variable, *self._behind(variable)]).items():
            # Where those of another one differ, that is told to who reads it.
            if each is variable or not _have_parted(each, components):
                self._take_first(each, components)
                each._seen = self._replicas.calls  # type: ignore[attr-defined]

    def _is_behind(self, variable: Variable) -> bool:
        seen: int = getattr(variable, "_seen", NEVER)
        return seen != self._replicas.calls

    def _behind(self, variable: Variable) -> list[Variable]:
        """Return other Variables whose values here are old, and that are small together."""
        found, room = [], ALONG
        for reference in list(self._sent.values()):
            other = reference()
            if other is None or other is variable or other.is_read_together or not self._is_behind(other):
                continue
            size = bare(other).nbytes
            if size <= room and self._replicas.has_sent(other):
                found.append(other)
                room -= size
        return found

    def _take_first(self, variable: Variable, components: Sequence[Tensor]) -> None:
        first = components[0]
        if not same(bare(variable), first):
            # Not otherwise: autograd may hold it for a backward to come.
            if alike(variable, first):
                apply_assign(variable, "assign", first)
            else:
                set_data(variable, first)
            self._settle(variable)
        if not variable.warned and _have_parted(variable, components):
            variable.warned = True
            warn_of_parted(variable)

    def wrote(self, variable: Variable) -> None:
        known = variable._writes  # type: ignore[attr-defined]
        if known == writes_to(variable):
            return
        # First, since the command asks for what is to be pushed.
        self._settle(variable)
        value = component(variable)
        for own in _kept(variable).values():
            apply_assign(own, "assign", value)
        if self._replicas.has_sent(variable):
            try:
                self._replicas.ask(apply_assign, (variable, "assign", value))
            except BaseException:
                variable._writes = known  # type: ignore[attr-defined]
                raise

    def draft(self, variable: Variable) -> Tensor | None:
        sent = self._replicas.has_sent(variable)
        apart = variable.aggregation is VariableAggregation.NONE and not sent and not _kept(variable)
        if apart or not variable.is_read_together:
            return None
        # A mean of integers could not be assigned.
        return self.read(variable).to(variable.dtype)

    def replace(self, variable: Variable, value: Tensor) -> None:
        for own in (variable, *_kept(variable).values()):
            set_data(own, value.clone())
        self._settle(variable)
        if self._replicas.has_sent(variable):
            self._replicas.ask(replace_component, (variable, value))

    def froze(self, variable: Variable) -> None:
        if self._replicas.has_sent(variable):
            self._replicas.ask(set_trained, (variable, variable.requires_grad))

    def saved(self, variable: Variable) -> tuple[Tensor, bool]:
        apart = self._replicas.has_sent(variable) or bool(_kept(variable))
        # A mean of integers is of another dtype.
        return self.read(variable).to(variable.dtype) if apart else component(variable), apart

    def copy(self, variable: Variable) -> Variable:
        made = copy_of(variable, component(variable), whole=False)
        if made.home is not self:
            if variable.is_read_together and variable.aggregation is VariableAggregation.NONE:
                raise UsageError(
                    f"{variable.name} is a SyncOnReadVariable with VariableAggregation.NONE, whose components have no "
                    "common value that a copy outside of its strategy could have; copy it inside "
                    "`with strategy.scope():`"
                )
            return copy_of(variable, self.read(variable).to(variable.dtype))
        if self._replicas.has_sent(variable):
            # There: of a sum the parts could not be told from the whole.
            self._replicas.command(copy_component, (variable, made), changes=False)
        return made

    def is_elsewhere(self, variable: Variable) -> bool:
        return self._replicas.has_sent(variable)


def _added(values: PerReplica) -> PerReplica:
    """Return what is added of losses: nothing of a replica that had no examples, whose mean is NaN."""

    def part(i: int, own: Any) -> Any:
        if i not in values.absent or not is_mean_of_none(own):
            return own
        return torch.zeros_like(own) if isinstance(own, Tensor) else 0.0

    return PerReplica([part(i, own) for i, own in enumerate(values)])


def _have_parted(variable: Variable, components: Sequence[Tensor]) -> bool:
    """Whether components differ that are meant to be equal."""
    apart = variable.is_read_together or variable.aggregation is VariableAggregation.NONE
    return not apart and not all(same(components[0], other) for other in components[1:])


def _kept(variable: Variable) -> Mapping[int, Variable]:
    """Return the components of a Variable whose replicas have ended, by replica id."""
    kept: Mapping[int, Variable] = getattr(variable, "_kept", {})
    return kept
