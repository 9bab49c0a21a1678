"""What a network has, and how it is given other values: tensors, flags, statistics. Knows of no other side."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mirror_nb.held_variables import attribute_variables, is_elsewhere, read_together_in
from mirror_nb.mirroring import lazy
from mirror_nb.mirroring.attributes import set_attributes
from mirror_nb.tensors.checksums import checksums
from mirror_nb.tensors.layouts import address, is_expanded, with_memory
from mirror_nb.variables import SyncOnReadVariable, bare, take_from_outside


def tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a network: parameters, then buffers (those not in state_dict too)."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def kept_equal(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a network whose values both sides bring each other, Variables it has too.

    Not a Variable whose components are the other side's, and are asked for by themselves.
    """
    seen = set()
    for name, tensor in all_values(module):
        if id(tensor) not in seen and not is_elsewhere(tensor):
            seen.add(id(tensor))
            yield name, tensor


def all_values(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a network, and of Variables among its plain attributes."""
    return itertools.chain(tensors(module), attribute_variables(module))


def all_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield each parameter of each part of these, with the part and its name there."""
    for part in dict.fromkeys(part for module in modules for part in module.modules()):
        yield from ((part, name, held) for name, held in part._parameters.items() if held is not None)


def structure(module: nn.Module) -> tuple[int, ...]:
    """Return what changes when parts of the network are replaced, but not when values are."""
    parts = list(module.modules())
    # Past named_parameters, which brings the replicas' values here first: nobody wants to see them.
    held = [vars(part).get(kind, {}) for part in parts for kind in ("_parameters", "_buffers")]
    found = (id(tensor) for tensors in held for tensor in tensors.values())
    return (*map(id, parts), *dict.fromkeys(found))


def places(module: nn.Module) -> tuple[object, ...]:
    """Return what is where in the network: a part, or a tensor, may be in several places."""
    parts, chain = list(map(vars, module.modules())), itertools.chain.from_iterable
    # What torch has scripted keeps its parts in something else.
    children, parameters, buffers = (
        [held for part in parts if isinstance(held := part.get(kind), dict)] for kind in _HELD
    )
    order: dict[int, int] = {}
    # Which tensors they are, `structure` tells.
    seen = [order.setdefault(own, len(order)) for own in map(id, chain(map(dict.values, (*parameters, *buffers))))]
    return (*chain((*children, *parameters, *buffers)), *map(id, chain(map(dict.values, children))), *seen)


_HELD = ("_modules", "_parameters", "_buffers")
FLAGS = "flags()"
# A name that no tensor of a network has: under it is which of its parts are in training mode, and what is trained.
ATTRIBUTES = "attributes()"
# Likewise, for plain attributes that have changed.


def mirrored_values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what is equal on both sides: the network's tensors by name, those that have values, and its flags."""
    flags = [2 if flag is None else flag for flag in _flags(module.modules())]
    with torch._C.DisableTorchFunctionSubclass():
        held = {name: bare(with_memory(tensor)) for name, tensor in kept_equal(module) if not is_lazy(tensor)}
    return {**held, FLAGS: torch.tensor(flags, dtype=torch.uint8, device="cpu")}


def training_modes(parts: list[weakref.ref[nn.Module]]) -> list[bool | None]:
    """Return whether each part is in training mode, None if it does not know, or is gone."""
    return [None if (part := reference()) is None else vars(part).get("training") for reference in parts]


def _flags(modules: Iterable[nn.Module]) -> list[bool | None]:
    """Return whether each part is in training mode, None if it does not know, and which parameters are trained."""
    parts = list(map(vars, modules))
    return [part.get("training") for part in parts] + [p.requires_grad for p in parameters_of(parts)]


def parameters_of(parts: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the parameters of parts that are given by their `vars`, in their order."""
    # Past __getattr__, which brings the replicas' values here first.
    return [p for part in parts for p in part.get("_parameters", {}).values() if p is not None]


def _set_flags(module: nn.Module, flags: list[int]) -> None:
    parts = list(module.modules())
    parameters = parameters_of(list(map(vars, parts)))
    if len(flags) != len(parts) + len(parameters):
        # Parts were replaced on one side: it goes out whole.
        return
    for part, flag in zip(parts, flags, strict=False):
        if flag != 2:
            part.training = bool(flag)
    for parameter, flag in zip(parameters, flags[len(parts) :], strict=True):
        if parameter.requires_grad != flag:
            # No method: those that have no values yet refuse it.
            parameter.requires_grad = bool(flag)


def versions(watched: Sequence[torch.Tensor]) -> list[int]:
    """Return autograd's count of writes of each tensor, its address, and whether it is trained."""
    counts: list[int] = []
    # Past subclasses' own ways: those that have no values yet have no address, either.
    with torch._C.DisableTorchFunctionSubclass():
        try:
            for tensor in watched:
                # Together: where to find each of them takes longer than to read it.
                counts += (tensor._version, address(tensor), tensor.requires_grad)
        except RuntimeError:
            # Of what was made in inference mode nobody counts the writes.
            counts = [each for t in watched for each in (_writes_to(t), address(t), t.requires_grad)]
    return counts


def _writes_to(tensor: torch.Tensor) -> int:
    return sums([tensor])[0] if tensor.is_inference() else tensor._version


def sums(watched: Iterable[torch.Tensor]) -> list[int]:
    """Return a checksum of each tensor; of one that has no value yet as of an empty one."""
    return checksums(torch.empty(0) if is_lazy(tensor) else bare(tensor) for tensor in watched)


def load(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Give the network other values, in place, so that optimizers and views keep its tensors."""
    own = dict(kept_equal(module))
    with torch.no_grad():
        for name, value in state.items():
            if name == FLAGS:
                _set_flags(module, value.tolist())
            elif name == ATTRIBUTES:
                set_attributes(list(module.modules()), value)
            elif name in own:
                # Others are Variables that are asked for by themselves, or that the other side alone has got since.
                lazy.take_shape(own[name], value)
                give(own[name], value)
    lazy.settle(module)


def give(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor of a network another value, in place; it takes on another shape or type where it has to."""
    if isinstance(tensor, SyncOnReadVariable):
        # The other side has what all components make together.
        take_from_outside(tensor, value)
    elif tensor.dtype == value.dtype and tensor.shape == value.shape and not is_expanded(tensor):
        # What was made in inference mode is written to in that alone.
        with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
            with_memory(tensor).copy_(value)
    else:
        # It was converted on the other side, by `module.double()` for instance, or has grown there. Or it is one that
        # nobody can write to.
        gradient, tensor.grad = tensor.grad, None
        tensor.data = value.to(tensor.device, copy=True)
        if gradient is not None and gradient.shape == tensor.shape:
            # Converted along, as by the module's own methods: the next backward pass adds to it.
            tensor.grad = gradient.to(tensor.dtype)


def parts_below(networks: Iterable[nn.Module]) -> set[int]:
    """Return the ids of all parts of these networks, however deep."""
    parts: set[int] = set()
    queue = [child for network in networks for child in network.children()]
    while queue:
        part = queue.pop()
        if id(part) not in parts:
            parts.add(id(part))
            queue += part.children()
    return parts


def averaged_statistics(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the running statistics that replicas average when they are read from outside."""
    kept = {}
    for prefix, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            for name in ("running_mean", "running_var"):
                kept[f"{prefix}.{name}" if prefix else name] = part._buffers[name]
    return {name: value for name, value in kept.items() if value is not None and not is_lazy(value)}


def told_by_all(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what every replica tells of a network, not its owner alone: what is averaged, and components."""
    return {**averaged_statistics(module), **components_in(module)}


def components_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return this process's components of a network's Variables that are made one when they are read from outside."""
    return {name: bare(held) for name, held in read_together_in(kept_equal(module)).items()}


def called(module: nn.Module) -> str:
    """Return what to call a network on a screen: its class and size, `ResNet, 11.2 M parameters`."""
    inner = list(module._modules.values())
    if type(module).__module__.startswith("mirror_nb.") and len(inner) == 1 and inner[0] is not None:
        # A wrapper of ours; the user's is inside.
        return called(inner[0])
    # Not by parameters(): that would bring the replicas' values here first.
    held = (p for part in module.modules() for p in part._parameters.values())
    count = sum(p.numel() for p in held if p is not None and not is_lazy(p))
    size = next(
        (f"{count / unit:.3g} {name}" for name, unit in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if count >= unit), ""
    )
    return f"{type(module).__name__}, {size or count} parameters"
