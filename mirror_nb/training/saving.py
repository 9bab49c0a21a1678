"""A model's file: its network's structure and weights, how it is trained, and where its training stands.

    {"format", "version", "state_dict", "architecture", "compile", "training"}

Everything in it is tensors and plain values. Knows a Model by its methods; how a file gets onto the disk is
files.py's, what a network is made of architecture.py's.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mirror_nb.errors import CheckpointError, UsageError, users_level
from mirror_nb.training import architecture, files
from mirror_nb.training.model import Model
from mirror_nb.training.settings import CompileSettings


def save_model(
    path: str | os.PathLike[str],
    *,
    network: nn.Module,
    settings: CompileSettings | None,
    optimizer_name: str | None,
    training: Mapping[str, Any] | None,
) -> None:
    """Write a model's file, as a whole or not at all.

    `settings`: what `compile` was told, None if it was not called; `optimizer_name`: the class of the optimizer that
    came of it, None if there is none. `training`: the state of the training; None: it begins anew from the file.

    Raises UsageError for a state with more than tensors and plain values, CheckpointError where the disk refuses.
    """
    content: dict[str, Any] = {
        "state_dict": network.state_dict(),
        "architecture": architecture.describe(network, without=_bound_here(network)),
        "compile": None if settings is None else _described(settings, optimizer_name, network),
    }
    if training is not None:
        content["training"] = training
    files.write(path, content)


def load_model(
    path: str | os.PathLike[str],
    *,
    custom_objects: Mapping[str, type] | None = None,
    network: nn.Module | None = None,
    compile: bool = True,
) -> Model:
    """Return the model that `Model.save` wrote, mirrored by the strategy in whose scope this is called.

    A network of torch.nn's modules is made from the file. For one with classes of your own give them, by name:
    `custom_objects={"Net": Net}`; or `network`, made as the saved one was (a Model of your own class, too), which
    then takes the weights. With `compile` the model is compiled as it was, and `fit` goes on with the training state
    that was saved. Losses and metrics that are functions or objects of your own are not in a file: there is a warning
    then, and `compile` has to be called before `fit`.

    Raises CheckpointError for a file that cannot be read, UsageError for a network that it does not fit, or where
    classes are lacking. Nothing but tensors and plain values is ever unpickled.
    """
    content = files.read(path)
    state = _part(content, "state_dict", path)
    if network is None:
        model = _model(architecture.rebuild(_part(content, "architecture", path), state, custom_objects))
    else:
        model = network if isinstance(network, Model) else Model(network)
    try:
        with files.taking_apart(path):
            model.load_state_dict(state)
    except (RuntimeError, AttributeError) as reason:
        raise UsageError(f"the weights in {os.fspath(path)!r} are not of this network: {reason}") from reason
    if compile and content.get("compile") is not None:
        with files.taking_apart(path):
            _compile(model, content, path)
    return model


def _part(content: Mapping[str, Any], name: str, path: str | os.PathLike[str]) -> Mapping[str, Any]:
    part = content.get(name)
    if not isinstance(part, Mapping):
        raise CheckpointError(f"{os.fspath(path)!r} has no {name}; it is damaged, take another checkpoint")
    return part


# ---- models of a user's own class ---------------------------------------------------------------------


def _bound_here(network: nn.Module) -> frozenset[str]:
    """What a Model has that belongs to this process and does not travel."""
    if not isinstance(network, Model):
        return frozenset()
    return frozenset(vars(network).keys() - network.__getstate__().keys())


def _model(rebuilt: nn.Module) -> Model:
    if not isinstance(rebuilt, Model):
        return Model(rebuilt)
    # Its own constructor was not run; Model's gives it what belongs to this process, and its parts come back after.
    parts = dict(vars(rebuilt))
    Model.__init__(rebuilt)
    vars(rebuilt).update(parts)
    for part in rebuilt.modules():
        rebuilt.strategy._place.mirror(part)
    return rebuilt


# ---- compile's settings -------------------------------------------------------------------------------


def _described(settings: CompileSettings, optimizer_name: str | None, network: nn.Module) -> dict[str, Any]:
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    values["optimizer"] = None if optimizer_name is None else _named(settings.optimizer)
    trained = None if optimizer_name is None else _trained(settings.optimizer, network)
    if trained is not None:
        values["trained"] = trained
    return {name: architecture.encode(value) for name, value in values.items()}


def _named(optimizer: Any) -> Any:
    """An optimizer over all parameters alike is its class and its arguments."""
    if not isinstance(optimizer, Optimizer) or len(optimizer.param_groups) > 1:
        return optimizer
    known = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in known}
    return type(optimizer), {name: _number(value) for name, value in arguments.items()}


def _trained(optimizer: Any, network: nn.Module) -> list[str | None] | None:
    """The names of the parameters of an optimizer that has not all of them, in the network's order; else None."""
    if not isinstance(optimizer, Optimizer) or len(optimizer.param_groups) > 1:
        return None
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    found = [names.get(id(parameter)) for parameter in optimizer.param_groups[0]["params"]]
    return None if found == list(names.values()) else found


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and value.numel() == 1 else value


def _compile(model: Model, content: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    described = _part(content, "compile", path)
    lacking = {name: what for name, value in described.items() if (what := architecture.missing(value))}
    if lacking:
        told = "; ".join(f"{name} ({', '.join(what)})" for name, what in lacking.items())
        warnings.warn(
            f"{os.fspath(path)!r} could not hold what the model was compiled with: {told}. Call compile(...) before "
            "fit or evaluate, then load_training(path) to go on with the training; predict works as it is",
            stacklevel=users_level(),
        )
        return
    settings = {name: architecture.decode(value) for name, value in described.items()}
    trained = settings.pop("trained", None)
    known = {field.name for field in dataclasses.fields(CompileSettings)}
    if not settings.keys() <= known:
        raise CheckpointError(
            f"{os.fspath(path)!r} has settings that compile does not know: {sorted(settings.keys() - known)}; pass "
            "compile=False, or update mirror_nb"
        )
    if trained is not None:
        kind, arguments = settings["optimizer"]
        parameters = dict((model.network if model._is_plain() else model).named_parameters())
        with model.strategy.scope():
            settings["optimizer"] = kind([parameters[name] for name in trained], **arguments)
    model.compile(**settings)
    if content.get("training") is not None:
        model.load_training_state(_part(content, "training", path))
