"""A network's structure as plain values, and back: which classes with which settings, and no code.

Knows torch.nn's modules, and what a user hands in. Of a description only classes from torch.nn.modules, functions
from torch.nn.functional (and of torch, those that tensors have as methods) and the user's own are ever made or
called; names lead nowhere else. Constructors are not run: a module gets the attributes that it had.

    network ─▶ describe ─▶ {"class", "attributes", "parameters", "buffers", "modules"} ─▶ rebuild ─▶ network

Values of parameters and buffers are the state dict's.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mirror_nb.errors import CheckpointError, UsageError
from mirror_nb.transfer.hooks import HOOK_SETTINGS, HOOKS

_PLAIN = (str, int, float, bool, type(None))
_KIND = "kind"
# Marks a dict that stands for something else than itself.


def describe(network: nn.Module, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the network's structure: plain values, and tensors that no state dict holds.

    `without`: attributes of the network itself that are left out.
    What cannot be described (a lambda, a hook) is named in its place, and `rebuild` refuses it.
    """
    return _Description(network).module(network, "", without)


def rebuild(
    description: Mapping[str, Any], shapes: Mapping[str, Tensor], custom_objects: Mapping[str, type] | None = None
) -> nn.Module:
    """Return a network of this structure, with parameters and buffers that hold nothing yet.

    `shapes`: the state dict that will be loaded; what the description says of it is compared, before any memory is
    taken. `custom_objects`: the classes of the network's own modules, by their names.

    Raises UsageError where a class is needed that was not given, or something that could not be described;
    CheckpointError where the description makes no sense.
    """
    custom = _checked_classes(custom_objects or {})
    try:
        _check_buildable(description, custom)
        return _Building(shapes, custom).module(description, "")
    except (CheckpointError, UsageError):
        raise
    except Exception as reason:
        raise CheckpointError(
            f"the file's description of the network is damaged ({type(reason).__name__}: {reason}); pass "
            "network=..., a network of this structure, to load the weights alone"
        ) from reason


def encode(value: Any) -> Any:
    """Return a setting in plain values: those themselves, torch's modules, functions, classes, and containers.

    What is none of these becomes {"kind": "missing", "what": ...}: see `missing`.
    """
    return _Description(None).value(value)


def decode(encoded: Any) -> Any:
    """Return what `encode` was given. Raises CheckpointError for what nobody encoded."""
    try:
        return _Building({}, {}).value(encoded)
    except CheckpointError:
        raise
    except Exception as reason:
        raise CheckpointError(f"a setting in the file is damaged: {type(reason).__name__}: {reason}") from reason


def missing(encoded: Any) -> list[str]:
    """Return what could not be encoded, in words."""
    if isinstance(encoded, Mapping):
        if encoded.get(_KIND) == "missing":
            return [str(encoded.get("what"))]
        return [what for item in encoded.values() for what in missing(item)]
    return [what for item in encoded for what in missing(item)] if isinstance(encoded, (list, tuple)) else []


# ---- names of torch -----------------------------------------------------------------------------------


@functools.cache
def _torch_modules() -> dict[str, type[nn.Module]]:
    """Every module class of torch.nn.modules by its name."""
    return {
        name: kind
        for where, module in list(sys.modules.items())
        if where.startswith("torch.nn.modules.")
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == where
    }


@functools.cache
def _torch_functions() -> dict[str, Any]:
    """Functions of tensors, by the name under which everybody finds them."""
    found = {
        f"torch.{name}": value
        for name, value in vars(torch).items()
        # Of torch's own functions only those that are methods too: no load, no compile, no from_file.
        if isinstance(value, types.BuiltinFunctionType) and name[0] != "_" and hasattr(Tensor, name)
    }
    for name, value in vars(torch.nn.functional).items():
        written = isinstance(value, types.FunctionType) and value.__module__ == torch.nn.functional.__name__
        if name[0] != "_" and (written or isinstance(value, types.BuiltinFunctionType)):
            found[f"torch.nn.functional.{name}"] = value
    return found


@functools.cache
def _torch_classes() -> dict[str, type]:
    """Classes that a setting may name: losses, optimizers, schedulers."""
    found: dict[str, type] = {f"torch.nn.{name}": kind for name, kind in _torch_modules().items()}
    for prefix, names, base in (
        ("torch.optim", vars(torch.optim), torch.optim.Optimizer),
        ("torch.optim.lr_scheduler", vars(torch.optim.lr_scheduler), torch.optim.lr_scheduler.LRScheduler),
    ):
        for name, kind in names.items():
            if isinstance(kind, type) and issubclass(kind, base) and kind.__module__.startswith("torch.optim"):
                found[f"{prefix}.{name}"] = kind
    return found


@functools.cache
def _names_of(table: Any) -> dict[int, str]:
    # The last of several names of one function: torch.nn.functional's.
    return {id(value): name for name, value in table().items()}


# ---- describing ---------------------------------------------------------------------------------------

# What nn.Module keeps for itself, and what is made anew.
_OF_MODULE = frozenset(
    {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}
    | {"_compiled_call_impl", "_flat_weights", "_flat_weight_refs"}
)


@final
class _Description:
    """One network on its way to plain values."""

    def __init__(self, network: nn.Module | None) -> None:
        self._modules: dict[int, str] = {}
        self._tensors: dict[int, str] = {}
        self._paths: dict[int, str] = {}
        if network is not None:
            # Attributes may refer to what comes later.
            self._paths = {id(part): path for path, part in network.named_modules()}
            self._paths |= {id(part): path for path, part in network.named_parameters()}
            self._paths |= {id(part): path for path, part in network.named_buffers()}

    def module(self, module: nn.Module, path: str, without: Collection[str] = ()) -> dict[str, Any]:
        if id(module) in self._modules:
            return {"same_as": self._modules[id(module)]}
        self._modules[id(module)] = path
        kind = type(module)
        of_torch = _torch_modules().get(kind.__name__) is kind
        attributes = {
            name: self.value(value)
            for name, value in vars(module).items()
            if not (name in _OF_MODULE or name in HOOKS or name in HOOK_SETTINGS or name in without)
        }
        hooks = [name for name in HOOKS if getattr(module, name, None)]
        return {
            "class": kind.__name__,
            "of": "torch" if of_torch else kind.__module__,
            "training": module.training,
            "attributes": attributes | {name: _missing("hooks") for name in hooks},
            "parameters": {name: self.tensor(p, path, name) for name, p in module._parameters.items()},
            "buffers": {
                name: self.tensor(b, path, name, name not in module._non_persistent_buffers_set)
                for name, b in module._buffers.items()
            },
            "modules": {
                name: None if part is None else self.module(part, _join(path, name))
                for name, part in module._modules.items()
            },
        }

    def tensor(self, tensor: Tensor | None, path: str, name: str, persistent: bool = True) -> dict[str, Any] | None:
        if tensor is None:
            return None
        if id(tensor) in self._tensors:
            return {"same_as": self._tensors[id(tensor)], "persistent": persistent}
        self._tensors[id(tensor)] = _join(path, name)
        if is_lazy(tensor):
            return _missing("a lazy layer's shape: call the network once before it is saved")
        if type(tensor) not in (Tensor, nn.Parameter):
            return _missing(f"a {type(tensor).__qualname__}")
        found: dict[str, Any] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "requires_grad": tensor.requires_grad,
            "persistent": persistent,
        }
        if not persistent:
            found["value"] = tensor.detach()
        return found

    def value(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) in self._paths and isinstance(value, (nn.Module, Tensor)):
            return {_KIND: "part", "path": self._paths[id(value)]}
        if type(value) in (list, tuple):
            return {_KIND: type(value).__name__, "items": [self.value(item) for item in value]}
        if isinstance(value, torch.Size):
            return {_KIND: "size", "items": list(value)}
        if type(value) in (set, frozenset):
            # In a settled order: the same network gives the same file.
            items = sorted(value, key=repr)
            return {_KIND: type(value).__name__, "items": [self.value(item) for item in items]}
        if type(value) in (dict, OrderedDict):
            return {_KIND: "dict", "items": [[self.value(key), self.value(item)] for key, item in value.items()]}
        if isinstance(value, np.generic):
            return self.value(value.item())
        return self._of_torch(value)

    def _of_torch(self, value: Any) -> Any:
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return {_KIND: "constant", "name": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {_KIND: "device", "name": str(value)}
        if type(value) is Tensor:
            return {_KIND: "tensor", "value": value.detach()}
        if isinstance(value, nn.Module):
            inner = _Description(value).module(value, "")
            state = {key: item.detach() for key, item in value.state_dict().items() if isinstance(item, Tensor)}
            wrong = unbuildable(inner)
            return _missing("; ".join(wrong)) if wrong else {_KIND: "module", "module": inner, "state": state}
        for kind, table in (("function", _torch_functions), ("class", _torch_classes)):
            name = _names_of(table).get(id(value))
            if name is not None:
                return {_KIND: kind, "name": name}
        return _missing(_told(value))


def _missing(what: str) -> dict[str, Any]:
    return {_KIND: "missing", "what": what}


def _told(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    if name is None:
        return f"a {type(value).__qualname__}"
    return f"the {'class' if isinstance(value, type) else 'function'} {name}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# ---- what cannot be rebuilt ---------------------------------------------------------------------------


def unbuildable(description: Mapping[str, Any]) -> list[str]:
    """Return, in words, every part that `rebuild` cannot make: classes of the user's first."""
    classes: dict[str, str] = {}
    parts: list[str] = []
    _look(description, "", {}, classes, parts)
    return [*(f"the class {name} ({where})" for name, where in classes.items()), *parts]


def _look(node: Any, path: str, custom: Mapping[str, type], classes: dict[str, str], parts: list[str]) -> None:
    if not isinstance(node, Mapping) or "same_as" in node:
        return
    name, where = node.get("class"), path or "the network itself"
    if node.get("of") != "torch" and name not in custom:
        classes.setdefault(f"{node.get('of')}.{name}", where)
    for group in ("attributes", "parameters", "buffers"):
        for key, value in (node.get(group) or {}).items():
            parts += [f"`{key}` of {name} ({where}), {what}" for what in missing(value)]
    for key, part in (node.get("modules") or {}).items():
        _look(part, _join(path, str(key)), custom, classes, parts)


def _check_buildable(description: Mapping[str, Any], custom: Mapping[str, type]) -> None:
    classes: dict[str, str] = {}
    parts: list[str] = []
    _look(description, "", custom, classes, parts)
    if classes:
        names = sorted({name.rpartition(".")[2] for name in classes})
        told = ", ".join(f"{name} ({where})" for name, where in classes.items())
        given = ", ".join(f'"{name}": {name}' for name in names)
        raise UsageError(
            f"the network has classes that are not torch.nn's: {told}. No code is taken from a file: pass "
            f"custom_objects={{{given}}}, or network=..., a network made as this one was"
        )
    if parts:
        raise UsageError(
            f"the network cannot be made from the file alone, which lacks {'; '.join(parts)}. Pass network=..., a "
            "network made as this one was"
        )


def _checked_classes(custom_objects: Mapping[str, Any]) -> dict[str, type]:
    if not isinstance(custom_objects, Mapping):
        raise UsageError(f"`custom_objects` is {custom_objects!r}; it is a dict, such as {{'Net': Net}}")
    for name, kind in custom_objects.items():
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise UsageError(f"custom_objects[{name!r}] is {kind!r}; it has to be a class of nn.Module")
    return dict(custom_objects)


# ---- rebuilding ---------------------------------------------------------------------------------------


@final
class _Building:
    """One network on its way back."""

    def __init__(self, shapes: Mapping[str, Tensor], custom: Mapping[str, type]) -> None:
        self._shapes = shapes
        self._custom = custom
        self._parts: dict[str, Any] = {}
        # Modules, parameters and buffers by path.

    def module(self, node: Mapping[str, Any], path: str) -> nn.Module:
        made = self._make(node, path)
        # Only when all parts are there: an attribute may refer to any.
        self._set_attributes(node, made)
        return made

    def _make(self, node: Mapping[str, Any], path: str) -> nn.Module:
        if "same_as" in node:
            return self._part(node["same_as"], nn.Module)
        kind = self._class(node)
        module = kind.__new__(kind)
        # Not the class's own constructor: its arguments are unknown. The parts are registered as they always are,
        # so that a scope notes them.
        nn.Module.__init__(module)
        self._parts[path] = module
        for name, spec in node["parameters"].items():
            nn.Module.register_parameter(module, name, self._parameter(spec, _join(path, name)))
        for name, spec in node["buffers"].items():
            buffer = self._buffer(spec, _join(path, name))
            nn.Module.register_buffer(module, name, buffer, persistent=spec is None or bool(spec["persistent"]))
        for name, part in node["modules"].items():
            nn.Module.add_module(module, name, None if part is None else self._make(part, _join(path, name)))
        return module

    def _class(self, node: Mapping[str, Any]) -> type[nn.Module]:
        name, known = node["class"], _torch_modules() if node["of"] == "torch" else self._custom
        if name not in known:
            raise CheckpointError(f"there is no class {name!r} in torch.nn of torch {torch.__version__}")
        kind: type[nn.Module] = known[name]
        return kind

    def _set_attributes(self, node: Mapping[str, Any], module: nn.Module) -> None:
        if "same_as" in node:
            return
        for name, value in node["attributes"].items():
            if not isinstance(name, str) or name in _OF_MODULE or name in HOOKS or name in HOOK_SETTINGS:
                raise CheckpointError(f"{name!r} is no attribute of a {node['class']}")
            module.__dict__[name] = self.value(value)
        module.training = bool(node["training"])
        for name, part in node["modules"].items():
            if part is not None:
                self._set_attributes(part, module._modules[name])  # type: ignore[arg-type]
        if isinstance(module, nn.RNNBase) and hasattr(module, "_init_flat_weights"):
            # A list of its own parameters, in the order of cuDNN.
            module._init_flat_weights()

    def _parameter(self, spec: Mapping[str, Any] | None, path: str) -> nn.Parameter | None:
        if spec is None:
            return None
        if "same_as" in spec:
            return self._part(spec["same_as"], nn.Parameter)
        empty = self._empty(spec, path)
        return self._kept(path, nn.Parameter(empty, requires_grad=bool(spec["requires_grad"])))

    def _buffer(self, spec: Mapping[str, Any] | None, path: str) -> Tensor | None:
        if spec is None:
            return None
        if "same_as" in spec:
            return self._part(spec["same_as"], Tensor)
        if "value" in spec:
            return self._kept(path, _tensor(spec["value"]).clone())
        return self._kept(path, self._empty(spec, path).requires_grad_(bool(spec["requires_grad"])))

    def _empty(self, spec: Mapping[str, Any], path: str) -> Tensor:
        there = self._shapes.get(path)
        shape = None if there is None else list(there.shape)
        if there is None or shape != list(spec["shape"]):
            raise CheckpointError(f"`{path}` should have shape {spec['shape']}, but the file has {shape}")
        return torch.empty_like(there, dtype=_constant(spec["dtype"], torch.dtype))

    def _kept(self, path: str, part: Any) -> Any:
        self._parts[path] = part
        return part

    def _part(self, path: Any, kind: type) -> Any:
        part = self._parts.get(path)
        if part is None or not isinstance(part, kind):
            raise CheckpointError(f"a part of the network refers to {path!r}, which is no {kind.__name__}")
        return part

    def value(self, encoded: Any) -> Any:
        if type(encoded) in _PLAIN:
            return encoded
        if isinstance(encoded, Mapping):
            return self._of_kind(encoded, encoded.get(_KIND))
        raise CheckpointError(f"a {type(encoded).__qualname__} is no value of an attribute")

    def _of_kind(self, encoded: Mapping[str, Any], kind: Any) -> Any:
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self.value(item) for item in encoded["items"])
        match kind:
            case "dict":
                return {self.value(key): self.value(item) for key, item in encoded["items"]}
            case "part":
                return self._part(encoded["path"], object)
            case "tensor":
                return _tensor(encoded["value"]).clone()
            case "constant":
                return _constant(encoded["name"], (torch.dtype, torch.memory_format, torch.layout))
            case "device":
                return torch.device(encoded["name"])
            case "module":
                inner = rebuild(encoded["module"], encoded["state"])
                inner.load_state_dict(encoded["state"])
                return inner
            case "function" | "class":
                known = _torch_functions() if kind == "function" else _torch_classes()
                if encoded["name"] in known:
                    return known[encoded["name"]]
        raise CheckpointError(f"{encoded.get('name', kind)!r} is no {kind} that a file may name")


_CONTAINERS: dict[Any, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckpointError(f"a {type(value).__qualname__} is no tensor")
    return value


def _constant(name: Any, kind: Any) -> Any:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, kind):
        raise CheckpointError(f"{name!r} is no constant of torch that a network may have")
    return found
