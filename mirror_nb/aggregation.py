"""How the values of several replicas become the one of a Variable, and what each has of one that is assigned.

Knows Variables and their aggregation; talks to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mirror_nb.errors import UsageError
from mirror_nb.values import DistributedValues, VariableAggregation, added, mean, same, widened
from mirror_nb.variables import Variable, as_value


def from_outside(variable: Variable, how: str, value: Any, num_replicas: int, replica_id: int) -> Any:
    """Return what a replica's component takes when `value` is assigned in cross-replica context.

    Of a sum each gets its n-th part, so that it reads back as `value`, of whole numbers replica 0's what is left;
    nothing can be added to one. Source: TensorFlow's SyncOnReadVariable. Raises UsageError (`assign_add` to a sum).
    """
    if not variable.is_read_together or variable.aggregation is not VariableAggregation.SUM:
        return value
    if how != "assign":
        raise UsageError(
            f"SyncOnReadVariable does not support `{how}` in cross-replica context when aggregation is set to "
            "`VariableAggregation.SUM`. Add inside strategy.run, on each replica, or assign the new value"
        )
    total = as_value(variable, how, value)
    dtype = total.dtype
    if dtype is torch.bool:
        return total if replica_id == 0 else torch.zeros_like(total)
    total = widened(total)
    if dtype.is_floating_point or dtype.is_complex:
        return (total / num_replicas).to(dtype)
    share = total // num_replicas
    return (total - share * (num_replicas - 1) if replica_id == 0 else share).to(dtype)


def check_parts(variable: Variable, how: str, value: DistributedValues) -> None:
    """Raise UsageError where a value of each replica is assigned in cross-replica context to what is one for all.

    Copies that are kept equal take equal values; a sum that is synchronised on read takes the whole.
    """
    rule = variable.aggregation
    if variable.is_read_together:
        apart = rule is VariableAggregation.SUM
    else:
        apart = not all(same(value[0], one) for one in value.values)
    if apart and rule is not VariableAggregation.NONE:
        raise UsageError(
            f"cannot {how} a value of each replica to {variable.name} outside of strategy.run: {value!r}; do it in a "
            f"function given to strategy.run to have them aggregated by {rule.value}, or pass the one value that "
            "strategy.reduce(...) returns"
        )


def aggregate(variable: Variable, components: Sequence[Tensor]) -> Tensor:
    """Return what a SyncOnReadVariable reads as from outside. Raises UsageError with aggregation NONE."""
    check_readable(variable)
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return components[0].clone()
    if variable.aggregation is VariableAggregation.SUM:
        return added(components)
    return mean(added(list(map(widened, components))), len(components), components[0].dtype)


def check_readable(variable: Variable) -> None:
    """Raise UsageError if the components of a SyncOnReadVariable have no common value."""
    if variable.aggregation is VariableAggregation.NONE:
        raise UsageError(
            f"{variable.name} is a SyncOnReadVariable with VariableAggregation.NONE: its components have no common "
            "value; read it inside strategy.run, or make it with aggregation SUM, MEAN or ONLY_FIRST_REPLICA"
        )
