"""Variables that networks hold, as buffers and as plain attributes, in lists and dicts too.

    self.register_buffer("total", Variable(0.0, …))    self.steps = Variable(0)    self.totals = [Variable(0.0), …]

Knows torch and Variables; knows no replicas and no channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from mirror_nb.aggregation import aggregate, from_outside
from mirror_nb.plain import FEW
from mirror_nb.values import VariableAggregation
from mirror_nb.variables import MirroredVariable, PlainVariable, SyncOnReadVariable, Variable, apply_assign, component

_CONTAINERS = frozenset({list, tuple, dict})
_KINDS = frozenset({PlainVariable, MirroredVariable, SyncOnReadVariable})
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})


def attribute_variables(module: nn.Module) -> Iterator[tuple[str, Variable]]:
    """Yield the Variables that a network's parts have as plain attributes, and a name for each: "block.totals.0"."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            # By kinds first: of the twenty attributes that every part has none is a Variable.
            if name not in _REGISTERED and (type(value) in _CONTAINERS or type(value) in _KINDS):
                yield from _inside(f"{path}.{name}" if path else name, value, FEW)


def scope_variables(module: nn.Module) -> Iterator[Variable]:
    """Yield the Variables of a scope that a network has, but those that it trains: they go with its parameters."""
    buffers = (buffer for part in module.modules() for buffer in part._buffers.values())
    for held in (*buffers, *(variable for _, variable in attribute_variables(module))):
        if isinstance(held, Variable) and held.home is not None:
            yield held


def read_together(components: Sequence[Any]) -> Variable | None:
    """Return the Variable that components make, one of each replica; None for others, and without one value."""
    first = components[0]
    if not all(isinstance(one, Variable) and _has_one_value(one) for one in components):
        return None
    apply_assign(first, "assign", whole(first, [component(one) for one in components]))
    return cast(Variable, first)


def whole(variable: Variable, components: Sequence[Tensor]) -> Tensor:
    """Return what components make, as one reads it from outside; the first where they have no one value."""
    if not _has_one_value(variable):
        return components[0]
    # A mean of integers has no place in the notebook's copy, which is of their dtype as in the replicas.
    return aggregate(variable, components).to(variable.dtype)


def part_of(variable: Variable, num_replicas: int, replica_id: int) -> Tensor:
    """Return the component that a replica has while the Variable here is what all of them make."""
    return cast(Tensor, from_outside(variable, "assign", component(variable), num_replicas, replica_id))


def _has_one_value(variable: Variable) -> bool:
    return variable.is_read_together and variable.aggregation is not VariableAggregation.NONE


def read_together_in(values: Iterable[tuple[str, Tensor]]) -> dict[str, Variable]:
    """Return those among a network's values whose components are made one when they are read from outside."""
    return {name: held for name, held in values if isinstance(held, Variable) and held.is_read_together}


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether it is a Variable whose components other processes have, and are asked for by themselves."""
    return isinstance(tensor, Variable) and tensor.home is not None and tensor.home.is_elsewhere(tensor)


def _inside(name: str, value: Any, most: int) -> Iterator[tuple[str, Variable]]:
    if isinstance(value, Variable):
        yield name, value
    elif type(value) in _CONTAINERS and len(value) <= most:
        # Less is looked into at each level: a container may hold itself.
        items = value.items() if type(value) is dict else enumerate(value)
        for key, item in items:
            yield from _inside(f"{name}.{key}", item, most // 10)
