"""What the controller tells a user whose objects would not do there what they do on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mirror_nb.errors import ContextError, UsageError, users_level
from mirror_nb.variables import Variable

_LOST_SHOWN = 5
# Names in a warning.
BlindWrites = list[tuple[nn.Module, list[str]]]
# Networks, with the names of their tensors.


def _a(kind: str) -> str:
    """Return a class with its article, as it is spoken: a Linear, an Adam, an SGD."""
    return f"{'an' if kind[0] in 'AEIO' or kind == 'SGD' else 'a'} {kind}"


def _first(names: list[str]) -> str:
    return ", ".join(names[:_LOST_SHOWN]) + (", …" if len(names) > _LOST_SHOWN else "")


def not_mirrored(obj: object) -> UsageError:
    """The error for an object that only makes sense mirrored."""
    kind = type(obj).__name__
    return UsageError(
        f"the function captures {_a(kind)} that was made outside this strategy's scope; what a replica did with its "
        f"copy would be lost. Create it inside `with strategy.scope():`, or mirror it with strategy.mirror(...)"
    )


def of_another_strategy(obj: object) -> UsageError:
    """The error for a Variable that another strategy's replicas have."""
    return UsageError(
        f"the function captures {_a(type(obj).__name__)} of another strategy than the one that runs it: what replicas "
        "assigned to their copies would be lost. Make it in this strategy's scope, or pass its value "
        "(variable.detach().clone())"
    )


def made_elsewhere(variable: Variable) -> UsageError:
    """The error for a Variable that is to be mirrored and is none of this strategy's."""
    return UsageError(
        f"{variable.name} was made outside this strategy's scope, and a Variable cannot be mirrored afterwards: what "
        "replicas assign would not show here. Make one of its value, `with strategy.scope(): variable = "
        "mnb.Variable(variable.detach().clone())`, or an attribute of a module, and mirror that"
    )


def not_owned(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> UsageError:
    """The error for an optimizer whose parameter no network of the scope has."""
    return UsageError(
        f"the {type(optimizer).__name__} trains a {type(parameter).__name__} of shape {tuple(parameter.shape)} that "
        "belongs to no module made in this strategy's scope: what replicas make of it would not come back here. "
        "Create the module inside `with strategy.scope():`, or mirror it with strategy.mirror(module); make a tensor "
        "that stands alone a mnb.Variable"
    )


def warn_of_lost(fn: Any, paths: list[str]) -> None:
    """Warn, at the line of strategy.run, that a function changed copies; called where `run` has its results."""
    named = _first([f"`{path}`" for path in paths])
    warnings.warn(
        f"{getattr(fn, '__qualname__', fn)} changed {named} in the replicas, on a copy that is gone: here nothing has "
        "changed. Return from the function what you want here, make a number a mnb.Variable in the scope, or have "
        "the replicas keep an object with strategy.mirror(obj)",
        stacklevel=users_level(),
    )


def warn_of_mixed(fn: Any, paths: list[str]) -> None:
    """Warn, at the line of strategy.run, that replicas wrote to one file; called where `run` has its results."""
    named = _first(paths)
    warnings.warn(
        f"{getattr(fn, '__qualname__', fn)} wrote {named} on several replicas at once: the file has a mixture of what "
        "they wrote, or all of it twice. Let one of them do it, `if "
        "mnb.get_replica_context().replica_id_in_sync_group == 0:`, or return it and write it here",
        stacklevel=users_level(),
    )


def warn_of_undivided(fn: Any, num_replicas: int) -> None:
    """Warn, at the line of strategy.run, that all replicas did the same work; called where `run` has its results."""
    which = "both replicas" if num_replicas == 2 else f"all {num_replicas} replicas"
    warnings.warn(
        f"{getattr(fn, '__qualname__', fn)} trained {which} on the same examples: as much work for each as on one "
        "device. To divide them, go through strategy.distribute_dataset(loader) and give its batches to `run`",
        stacklevel=users_level(),
    )


def warn_of_parted(variable: Variable) -> None:
    """Warn, where a Variable is read, that its copies differ though they are to be one."""
    warnings.warn(
        f"the copies of {variable.name} differ between the replicas, though it was made with VariableAggregation."
        f"{variable.aggregation.name}: each replica has written to its own (v.add_(x), v += x, v[i] = x, v.data). "
        "Read here is replica 0's; v.assign_add(x), assign_sub and assign aggregate what replicas give them",
        stacklevel=users_level(),
    )


def warn_of_parted_networks(kind: str, networks: list[str]) -> None:
    """Warn, where networks are read, that the replicas' "parameters" or "buffers" differ; of none nothing is said."""
    if networks:
        warnings.warn(
            f"{kind} differ between the replicas ({'; '.join(networks)}); read here are replica 0's. {_PARTED[kind]}; "
            "net.load_state_dict(net.state_dict()) gives all replicas what is here",
            stacklevel=users_level(),
        )


_PARTED = {
    "parameters": "Each replica has trained or changed its own: by gradients that backward() did not make "
    "(torch.autograd.grad), in no_sync, by random numbers, by a write in place. strategy.compare_parameters() names "
    "them. Reduce such gradients before optimizer.step(), mnb.get_replica_context().all_reduce('mean', gradients)",
    "buffers": "Each replica has written its own, from its share of the batches. Reduce what is written, "
    "mnb.get_replica_context().all_reduce('mean', new), or say with register_buffer(..., persistent=False) that it is "
    "each replica's own (BatchNorm's statistics are averaged here)",
}


def warn_of_blind_writes(written: BlindWrites) -> None:
    """Warn, where the replicas get them, that tensors of networks were made from older values than theirs."""
    told = "; ".join(f"{_first(names)} of {_a(type(network).__name__)}" for network, names in written)
    warnings.warn(
        f"written to through tensors that were taken before the replicas trained them: {told}. They had "
        "older values, and what was made of these replaces what was learned since. Take them anew from their network, "
        "`for p in net.parameters():`, which brings the values here first",
        stacklevel=users_level(),
    )


def refuse_steps(optimizer: torch.optim.Optimizer, lives_there: Callable[[], bool]) -> None:
    """Have an optimizer refuse to step here, as long as it lives in the replicas."""

    def refuse(stepping: torch.optim.Optimizer, *_: object) -> None:
        if lives_there():
            raise ContextError(
                f"{type(stepping).__name__}.step() of a mirrored optimizer in cross-replica context would change the "
                "copy here alone; call it inside the function given to strategy.run"
            )

    optimizer.register_step_pre_hook(refuse)
