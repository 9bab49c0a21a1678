"""The home of Variables on a replica: each rule of tf.distribute for writing and reading them, in SPMD.

in strategy.run     MirroredVariable: the replicas' values aggregated, then written by all; NONE: its own each
                    SyncOnReadVariable: its own component alone
from outside        MirroredVariable: the one value that all replicas give
                    SyncOnReadVariable: read as the aggregate, a sum is assigned in n parts
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from mirror_nb.aggregation import check_parts, check_readable, from_outside
from mirror_nb.errors import UsageError, users_level
from mirror_nb.strategies.context import has_strategy, on_one_replica, updates_component
from mirror_nb.strategies.peers import Form, Leaf, Peers, form_of_nest
from mirror_nb.strategies.reductions import (
    check_size,
    is_mean_of_none,
    is_number,
    mean,
    not_distributed,
    own_of,
    select,
)
from mirror_nb.tensors.checksums import bits
from mirror_nb.values import DistributedValues, ReduceOp, VariableAggregation, widened
from mirror_nb.variables import SyncOnReadVariable, Variable, apply_assign, as_value, component, copy_of, set_data


@final
class ReplicaHome:
    """Where the Variables of one replica ask.

    `merging()` tells whether a merge_call runs, the same on all; `absent()` whether this replica has no examples.
    `commanded`: a controller has this replica do things for itself too, outside of cells and calls, and not always
    all replicas: there a Variable is its component, and no peer is asked.
    """

    def __init__(
        self, peers: Peers, merging: Callable[[], bool], absent: Callable[[], bool], *, commanded: bool
    ) -> None:
        self._peers = peers
        self._merging = merging
        self._absent = absent
        self._commanded = commanded

    @property
    def num_replicas(self) -> int:
        return self._peers.num_replicas

    def equal(self, value: Tensor) -> Tensor:
        """Return replica 0's initial value, if the replicas have different ones."""
        sums, _ = self._peers.agree("Variable", form_of_nest("*", [value], [False]), bits([value]))
        return value if len(set(sums)) == 1 else self._peers.first(value)

    # ------------------------------------------------------------------ what a Variable asks

    def components(self, variable: Variable) -> Mapping[int, Tensor]:
        return {self._peers.replica_id: component(variable)}

    def refresh(self, variable: Variable) -> None:
        """It is always up to date."""

    def wrote(self, variable: Variable) -> None:
        """It was written here, where it lives."""

    def draft(self, variable: Variable) -> Tensor | None:
        # Without a rule there is no one value: each writes to its own.
        own = variable.aggregation is VariableAggregation.NONE or not self._is_read_together(variable)
        return None if own else self.read(variable).to(variable.dtype)

    def _is_read_together(self, variable: Variable) -> bool:
        return isinstance(variable, SyncOnReadVariable) and not on_one_replica() and not self._unattended()

    def replace(self, variable: Variable, value: Tensor) -> None:
        set_data(variable, value)

    def froze(self, variable: Variable) -> None:
        """The replica trains it here, or not."""

    def saved(self, variable: Variable) -> tuple[Tensor, bool]:
        return component(variable), False

    def copy(self, variable: Variable) -> Variable:
        return copy_of(variable, component(variable), whole=False)

    def is_elsewhere(self, variable: Variable) -> bool:
        return False

    def read(self, variable: Variable) -> Tensor:
        if not self._is_read_together(variable):
            return component(variable)
        check_readable(variable)
        mine = component(variable)
        call, form = f"reading {variable.name}", form_of_nest("*", [mine], [False])
        if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            self._peers.agree(call, form)
            return self._peers.first(mine)
        if variable.aggregation is VariableAggregation.SUM:
            return self._peers.total(call, form, mine)
        return self._peers.mean(call, form, widened(mine))

    def assign(self, variable: Variable, how: str, value: Any) -> Any:
        if on_one_replica():
            self._assign_on_replica(variable, how, value)
            return component(variable)
        if self._unattended():
            apply_assign(variable, how, value)
        else:
            self._assign_from_outside(variable, how, value)
        return variable

    def _unattended(self) -> bool:
        """Whether a Variable is its component here, and no peer is asked."""
        return updates_component() or (self._commanded and not has_strategy())

    # ------------------------------------------------------------------ in strategy.run

    def _assign_on_replica(self, variable: Variable, how: str, value: Any) -> None:
        value = own_of(value, self._peers.replica_id, self._peers.num_replicas)
        rule = variable.aggregation
        if isinstance(variable, SyncOnReadVariable) or self._peers.num_replicas == 1:
            self._apply_own(variable, how, value)
        elif rule is VariableAggregation.NONE:
            self._warn_of_divergence(variable, how, value)
            apply_assign(variable, how, value)
        else:
            apply_assign(variable, how, self._aggregated(variable, how, value))

    def _aggregated(self, variable: Variable, how: str, value: Any) -> Tensor:
        """Return the one value that the replicas' values make, or raise the same error on all."""
        tensor, form = self._offered(variable, how, value)
        literal = is_number(value)
        # A number shows no sign of the replica: the others' tell whether it is the same literal on all.
        number = -1 - self._peers.replica_id
        if tensor is not None and self._is_of_no_examples(tensor):
            # Below the numbers of those that have some.
            tensor, number = torch.zeros_like(tensor), number - self._peers.num_replicas
        elif literal and tensor is not None:
            number = bits([torch.as_tensor(value, dtype=torch.complex128, device="cpu")])
        seen, _ = self._peers.agree(f"{how} to {variable.name} ({variable.aggregation.value})", form, number)
        assert tensor is not None
        if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self._peers.first(tensor)
        if variable.aggregation is VariableAggregation.MEAN:
            there = sum(each >= -self._peers.num_replicas for each in seen)
            return self._mean(variable, how, tensor, there or self._peers.num_replicas)
        if literal and value != 0 and len(set(seen)) == 1:
            raise not_distributed(value, ReduceOp.SUM)
        return self._peers.reduced(ReduceOp.SUM, [tensor])[0]

    def _is_of_no_examples(self, value: Any) -> bool:
        return self._absent() and is_mean_of_none(value)

    def _mean(self, variable: Variable, how: str, tensor: Tensor, n: int) -> Tensor:
        """Return the mean of n replicas' values, or raise the same error on all where it does not fit."""
        total = self._peers.reduced(ReduceOp.SUM, [widened(tensor)])[0]
        if tensor.is_floating_point() or tensor.is_complex():
            return mean(total, n, tensor.dtype)
        # Torch's mean of whole numbers is a float, which does not hold all of them.
        if (total % n).any():
            raise UsageError(
                f"cannot {how} {total / n}, the mean of the replicas' values, to {variable.name} of {variable.dtype}: "
                "it is not whole; make the Variable of a float dtype, or with another aggregation"
            )
        return (total // n).to(tensor.dtype)

    # ------------------------------------------------------------------ from outside

    def _assign_from_outside(self, variable: Variable, how: str, value: Any) -> None:
        given = isinstance(value, DistributedValues)
        if given:
            check_size(value, self._peers.num_replicas)
            check_parts(variable, how, value)
        own = select(value, self._peers.replica_id)
        if self._peers.num_replicas > 1 and not given:
            own = self._agreed(variable, how, own)
        part = self._part(variable, how, own)
        if variable.is_read_together:
            self._apply_own(variable, how, part)
        else:
            apply_assign(variable, how, part)

    def _part(self, variable: Variable, how: str, value: Any) -> Any:
        return from_outside(variable, how, value, self._peers.num_replicas, self._peers.replica_id)

    def take(self, variable: Variable, value: Tensor) -> None:
        apply_assign(variable, "assign", self._part(variable, "assign", value))

    def _agreed(self, variable: Variable, how: str, value: Any) -> Any:
        """Return what all replicas assign: what they do in a cell is one assignment, in a merge_call replica 0's."""
        tensor, form = self._offered(variable, how, value)
        sums, _ = self._peers.agree(f"{how} to {variable.name}", form, bits([tensor]) if tensor is not None else 0)
        if len(set(sums)) == 1:
            return value
        if self._merging() and tensor is not None:
            return self._peers.first(tensor)
        if variable.is_read_together and variable.aggregation is not VariableAggregation.SUM:
            # Each component is its replica's own, as of a PerReplica that is assigned.
            return value
        if variable.aggregation is VariableAggregation.NONE:
            self._warn_of_divergence(variable, how, tensor)
            return value
        raise UsageError(
            f"the replicas {how} different values to {variable.name} outside of strategy.run, on replica "
            f"{self._peers.replica_id} {value}; do it in a function given to strategy.run to have them aggregated by "
            f"{variable.aggregation.value}, or pass the one value that strategy.reduce(...) returns"
        )

    # ------------------------------------------------------------------ steps

    def _apply_own(self, variable: Variable, how: str, value: Any) -> None:
        # To a total of losses, one of no examples adds nothing.
        if how == "assign" or not self._is_of_no_examples(value):
            apply_assign(variable, how, value)

    def _offered(self, variable: Variable, how: str, value: Any) -> tuple[Tensor | None, Form]:
        try:
            tensor = as_value(variable, how, value)
        except UsageError as error:
            return None, Form(problem=str(error))
        return tensor, Form(leaves=(Leaf(tensor.dtype, tuple(tensor.shape)),))

    def _warn_of_divergence(self, variable: Variable, how: str, value: Any) -> None:
        if variable.warned or is_number(value):
            return
        variable.warned = True
        warnings.warn(
            f"{how} on replica {self._peers.replica_id} to {variable.name}, made with VariableAggregation.NONE: every "
            "replica writes its own value, so the copies may differ from now on; make the Variable with "
            "aggregation=VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA to keep them equal",
            stacklevel=users_level(),
        )
