"""Plain attributes of a network's parts: numbers, strings, and tuples, lists, dicts and sets of them.

    model.temperature = 0.5    model.dropout.p = 0.1    self.losses.append(loss)

Also functions and classes of modules, `layer.activation = F.gelu`, which every process finds by their names, and what
is plain in an attribute that holds settings, `model.config.dropout = 0.1`; and tensors that are neither parameters nor
buffers, as far as they are small, alone or in such collections: `self.seen[layer] = output`. Other functions,
`model.forward = faster`, go out with the network. And which of the rest have a name besides: self.config = config.
Knows torch; knows no replicas and no channel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import itertools
import operator
import pathlib
import pickle
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, final

import numpy as np
import torch
from torch import nn

from mirror_nb import plain
from mirror_nb.errors import users_level
from mirror_nb.mirroring.hooks import keeping, kept, stays
from mirror_nb.mirroring.lazy import becoming
from mirror_nb.noticing.kinds import WITHOUT_IDENTITY
from mirror_nb.noticing.refilling import is_free, refill
from mirror_nb.tensors.layouts import as_row, is_block, memory_of
from mirror_nb.transfer.hooks import HOOKS, hook_dicts
from mirror_nb.transfer.pickler import travels_by_name
from mirror_nb.transfer.told import is_told

_INTERNAL = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_ATOMS = plain.ATOMS | {np.dtype(code).type for code in np.typecodes["All"] if code not in "OV"}
# NumPy's numbers too: what the mean of a list is, say.
_ATOMS |= {torch.dtype, torch.layout, torch.memory_format, torch.Size, range, slice, type(pathlib.Path())}
# No devices, which are each process's own.
TENSOR_BYTES = 1 << 20
# A larger tensor, or more in a collection, stays where it was set: what is computed anew in each step would be copied
# after each cell.
TENSORS = 1 << 10
# More in a collection stay there, too: each takes 30 µs, as long as 1 KiB or more.
SHORT = 16
# Items of a tuple that is compared by its identity.
_FUNCTIONS = frozenset({types.FunctionType, types.MethodType, functools.partial})
_OTHERS = ("keras.", "torchmetrics.", "mirror_nb.transfer.ddp.", "torch._dynamo.", "torch.jit.")
# Packages whose networks keep in attributes what only goes with other states of theirs.
_CONFIGURATIONS = ("transformers.configuration_utils.", "transformers.generation.configuration_utils.")


@final
class Attributes:
    """What the parts of a network had at some moment."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        # Of others nothing is looked at, so that nothing changes.
        self._parts = [
            _Part(_nobody if _is_others(type(part)) else weakref.ref(part), _skipped(type(part))) for part in parts
        ]
        self._inside: dict[tuple[int, str], _Part] = {}
        # By part and attribute: what holds settings, each once, though all parts may have it.
        self._look_inside()

    def _look_inside(self) -> None:
        found = {id(value): ((i, name), value) for i, part in enumerate(self._parts) for name, value in part.settings}
        self._inside = {
            where: _Part(functools.partial(_itself, value), frozenset()) for where, value in found.values()
        }
        self._glance = _Glance((*self._parts, *self._inside.values()))

    def _living(self) -> list[tuple[Any, _Part]]:
        """Return what belongs to a part that still lives, with where it is."""
        parts = (*enumerate(self._parts), *self._inside.items())
        return [(where, part) for where, part in parts if part.owner() is not None]

    def changed(self) -> bool:
        """Whether a part has an attribute that it had not, or another value in one."""
        unchanged = self._glance.holds()
        for part in self._glance.collecting if unchanged else (part for _, part in self._living()):
            if not unchanged and part.atoms_changed():
                return True
            held = part.held
            if not all(map(plain.same, map(held.get, part.copies), part.copies.values())):
                return True
            if not all(sign.is_of(held.get(name)) for name, sign in part.tensors.items()):
                return True
        return False

    def other_functions(self) -> bool:
        """Whether a part has other functions of the user's among its attributes, or those of another class."""
        glance = self._glance
        if glance.holds():
            changed = any(part.functions_changed() for part in glance.working)
            return changed or any(part.kind_changed(part.kind) for part in glance.classes)
        living = ((part, owner) for part in self._parts if (owner := part.owner()) is not None)
        return any(part.functions_changed() or part.kind_changed(type(owner)) for part, owner in living)

    def settle(self) -> None:
        """Take what the parts have now for what they had."""
        for part in self._parts:
            part.note()
        self._look_inside()

    def follow(self, whole: Attributes) -> None:
        """Take for what the parts had what they had in the whole, which was settled later."""
        owned = ((part, part.owner()) for part in (*whole._parts, *whole._inside.values()))
        latest = {id(owner): part for part, owner in owned if owner is not None}
        self._parts = [latest.get(id(part.owner()), part) for part in self._parts]
        self._inside = {where: latest.get(id(part.owner()), part) for where, part in self._inside.items()}
        self._glance = _Glance((*self._parts, *self._inside.values()))

    def since(self, everything: bool = False) -> torch.Tensor | None:
        """Return, as bytes, what has changed, or everything, for `set_attributes`; None if there is nothing."""
        found = {where: values for where, part in self._living() if (values := part.since(everything))}
        return torch.frombuffer(bytearray(pickle.dumps(found)), dtype=torch.uint8) if found else None


@final
class _Sign:
    """Which tensor there was, and how often it had been written to. Keeps none: there may be a graph behind."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = weakref.ref(tensor), _version(tensor)

    def __eq__(self, other: object) -> bool:
        # In a copy of a collection it stands for the tensor, which leaves comparing to it.
        return self.is_of(other)

    def is_of(self, value: object) -> bool:
        return self.is_same(value) and _version(value) == self.version

    def is_same(self, value: object) -> TypeGuard[torch.Tensor]:
        """Whether it is the tensor of then, whatever was written to it since."""
        return value is self.tensor() and value is not None


def _version(tensor: torch.Tensor) -> int:
    # Of what was made in inference mode nobody counts the writes.
    return 0 if tensor.is_inference() else tensor._version


@final
class _Part:
    __slots__ = (
        *("atoms", "copies", "count", "functions", "kind", "methods"),
        *("names", "owner", "settings", "skipped", "tensors"),
    )

    def __init__(self, owner: Callable[[], object], skipped: frozenset[str]) -> None:
        self.owner = owner
        # A part of a network weakly: one that an attribute leads back to (`self.step = self.once`) would never end.
        self.skipped = skipped
        self.note()

    @property
    def held(self) -> dict[str, Any]:
        owner = self.owner()
        return {} if owner is None else vars(owner)

    def note(self) -> None:
        self.kind: type[Any] = type(self.owner())
        self.methods = _methods(self.kind)
        self.count = len(self.held)
        self.names: list[str] = []
        self.atoms: list[Any] = []
        self.copies: dict[str, Any] = {}
        # Of plain attributes that are none.
        self.functions = {name: weakref.ref(value) for name, value in self._functions().items()}
        self.settings: list[tuple[str, object]] = []
        self.tensors: dict[str, _Sign] = {}
        for name, value in self.held.items():
            if name not in self.skipped:
                if type(value) in _ATOMS or _is_found_by_name(value) or _is_short_tuple(value):
                    self.names.append(name)
                    self.atoms.append(value)
                elif (copy := _copied(value, _Sign)) is not plain.NOT_PLAIN:
                    self.copies[name] = copy
                elif _is_computed(value):
                    self.tensors[name] = _Sign(value)
                elif _holds_settings(value):
                    self.settings.append((name, value))

    def _functions(self) -> dict[str, Callable[..., object]]:
        """Return those that no process finds by their names, and that travel with the network."""
        own = ((name, value) for name, value in self.held.items() if type(value) in _FUNCTIONS)
        return {
            name: value
            for name, value in own
            if name not in self.skipped and not _is_found_by_name(value) and not stays(value)
        }

    def atoms_changed(self) -> bool:
        """Whether an attribute has come or gone, or one that is compared by its identity is another."""
        held = self.held
        return len(held) != self.count or not all(map(operator.is_, map(held.get, self.names), self.atoms))

    def functions_changed(self) -> bool:
        if not self.functions and not self.atoms_changed():
            return False
        now = self._functions()
        return now.keys() != self.functions.keys() or any(now[name] is not self.functions[name]() for name in now)

    def kind_changed(self, kind: type[Any]) -> bool:
        """Whether it is another class, or has been given other methods (`Net.forward = …`)."""
        if kind is not self.kind:
            # A lazy part becomes what it is on both sides, each by itself.
            return becoming(kind) is not becoming(self.kind)
        # Of most parts it is asked no more: they are of torch's classes, and there may be thousands.
        now = self.methods and _methods(kind)
        if len(now) == len(self.methods) and all(map(operator.is_, now, self.methods)):
            return False
        # With an object that comes back its class gets its methods anew.
        return list(map(_in_words, now)) != list(map(_in_words, self.methods))

    def since(self, everything: bool) -> dict[str, Any]:
        before = {**dict(zip(self.names, self.atoms, strict=True)), **self.copies}
        held = [item for item in self.held.items() if item[0] not in self.skipped]
        tensors = {
            name: values
            for name, value in held
            if _is_computed(value)
            and (everything or name not in self.tensors or not self.tensors[name].is_of(value))
            and (values := _Values.of(value, self.tensors.get(name))) is not None
        }
        copies = {
            name: _Collection.of(value, before.get(name))
            for name, value in held
            if everything or name not in before or not plain.same(value, before[name])
        }
        for name in copies.keys() & self.copies.keys():
            if copies[name] is not plain.NOT_PLAIN:
                continue
            # Where nothing else travels, nobody takes what there is now for what there was.
            del self.copies[name]
            if much := _too_much(name, self.held[name]):
                warnings.warn(
                    f"`{name}` of a network has more than {much}: notebook and replicas hear no more of each other's "
                    "changes in it. Keep it outside the network, or shorten it",
                    stacklevel=users_level(),
                )
        gone = dict.fromkeys({*before, *self.tensors}.difference(self.held), _Gone)
        return {**gone, **{name: copy for name, copy in copies.items() if copy is not plain.NOT_PLAIN}, **tensors}


@final
class _Glance:
    """What identity tells of all parts at once, by few calls from C: there are hundreds, and every `run` asks."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        looked_at = [part for part in parts if part.owner is not _nobody]
        self._owners = [part.owner for part in looked_at]
        self._kinds = [part.kind for part in looked_at]
        self._counts = [part.count for part in looked_at]
        self._sizes = [len(part.names) for part in looked_at]
        self._names = [name for part in looked_at for name in part.names]
        self._atoms = [atom for part in looked_at for atom in part.atoms]
        self.collecting = [part for part in looked_at if part.copies or part.tensors]
        self.working = [part for part in looked_at if part.functions]
        self.classes = list({(part.kind, *map(id, part.methods)): part for part in looked_at if part.methods}.values())
        # What this says nothing of: what is compared by its value, functions, and methods of the notebook's classes.

    def holds(self) -> bool:
        """Whether all live, are of their class, and have as many attributes as they had, and the same atoms."""
        owners = [owner for reference in self._owners if (owner := reference()) is not None]
        held = list(map(vars, owners))
        if list(map(len, held)) != self._counts or list(map(type, owners)) != self._kinds:
            return False
        each = itertools.chain.from_iterable(map(itertools.repeat, held, self._sizes))
        return all(map(operator.is_, map(dict.get, each, self._names), self._atoms))


def _methods(kind: type) -> list[Any]:
    """Return each class of the notebook or the script that a class is or derives from, with its methods, if any."""
    bases = [base for base in kind.__mro__ if base.__module__ == "__main__"]
    methods = ([value for value in vars(base).values() if type(value) is types.FunctionType] for base in bases)
    return [one for base, own in zip(bases, methods, strict=True) for one in (base, *own)]


def _in_words(one: Any) -> object:
    if isinstance(one, type):
        return one
    return one.__name__, one.__code__, one.__defaults__, one.__kwdefaults__


def _itself(value: object) -> object:
    return value


def _nobody() -> None:
    return None


def _is_computed(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a small tensor that nothing trains."""
    return (
        type(value) is torch.Tensor
        and is_block(value)
        and value.nbytes <= TENSOR_BYTES
        and not (value.requires_grad and value.is_leaf)
    )


def _copied(value: object, of_tensor: Callable[[torch.Tensor], Any] = plain.none) -> Any:
    """Return a copy of a plain value, NOT_PLAIN for any other; `of_tensor` returns what stands in it for a tensor."""
    if _is_found_by_name(value):
        return value
    left = TENSOR_BYTES

    def stand_in(one: object) -> Any:
        nonlocal left
        if not _is_computed(one) or (left := left - max(one.nbytes, TENSOR_BYTES // TENSORS)) < 0:
            raise TypeError
        return of_tensor(one)

    return plain.copied(value, _ATOMS, plain.LIKE_THEM, plain.ITEMS, plain.FLAT_ITEMS, stand_in)


def _too_much(name: str, value: object) -> str | None:
    """Return what an attribute that is plain no more has too much of, if it is that."""
    if plain.is_large(value, _ATOMS):
        return f"some {plain.ITEMS:,} items, or {plain.FLAT_ITEMS:,} of numbers and strings alone"
    # A private one of tensors is a cache as a rule, which nobody misses.
    if (
        not name.startswith("_")
        and plain.copied(value, _ATOMS | {torch.Tensor}, plain.LIKE_THEM) is not plain.NOT_PLAIN
    ):
        return f"{TENSOR_BYTES >> 20} MiB of tensors, or {TENSORS:,} of them, or one that is trained or sparse"
    return None


def _is_short_tuple(value: object) -> bool:
    """Whether it cannot change, as the kernel size of a convolution: who has it still is as before."""
    return type(value) is tuple and len(value) <= SHORT and _ATOMS.issuperset(map(type, value))


def _is_found_by_name(value: object) -> bool:
    """Whether it is a function or a class of a module, or a partial call of one."""
    if isinstance(value, functools.partial):
        given = _copied([value.args, value.keywords, vars(value)])
        return type(value) is functools.partial and given is not plain.NOT_PLAIN and _is_found_by_name(value.func)
    if isinstance(value, types.BuiltinFunctionType):
        # Those of a module, none that is bound to an object.
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType | type)
    return isinstance(value, types.FunctionType | type) and travels_by_name(value)


def _holds_settings(value: object) -> bool:
    """Whether it is a namespace, a dataclass's object, or a configuration of transformers."""
    kind = type(value)
    if isinstance(value, (nn.Module, torch.Tensor)) or not kind.__dictoffset__:
        return False
    spaces = (types.SimpleNamespace, argparse.Namespace)
    return isinstance(value, spaces) or dataclasses.is_dataclass(kind) or _is_of(kind, _CONFIGURATIONS)


def _is_others(kind: type) -> bool:
    return _is_of(kind, _OTHERS)


def _is_of(kind: type, packages: tuple[str, ...]) -> bool:
    return any(f"{base.__module__}.".startswith(packages) for base in kind.__mro__)


def _skipped(kind: type) -> frozenset[str]:
    """Attributes that no process has from another: torch's own, and those that the class says."""
    own: frozenset[str] | None = getattr(kind, "_OF_ONE_PROCESS", None)
    return _INTERNAL if own is None else _INTERNAL | own


def set_attributes(parts: Sequence[nn.Module | None], changes: torch.Tensor) -> None:
    """Give a network's parts, of which some may be gone, the attributes that another process had."""
    for where, values in _Unpickler(io.BytesIO(changes.numpy().tobytes())).load().items():
        i, *inside = where if type(where) is tuple else (where,)
        part = parts[i] if i < len(parts) else None
        held: object = part if part is None or not inside else vars(part).get(inside[0])
        if held is not None and (not inside or _holds_settings(held)):
            own = vars(held)
            for name, value in values.items():
                if value is _Gone:
                    own.pop(name, None)
                else:
                    travelled = isinstance(value, _Values | _Collection)
                    own[name] = value.opened(own.get(name), parts) if travelled else value


class _Gone:
    """Stands for an attribute that was deleted."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Values:
    """A tensor on its way: torch's own would take all of its memory along, and its device."""

    written: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    in_place: bool
    # It is the tensor that the attribute was.
    __hash__ = None  # type: ignore[assignment]
    # None stands for a key or in a set: others may have that very tensor.

    @classmethod
    def of(cls, tensor: torch.Tensor, before: object) -> _Values | None:
        """Return what a tensor holds; None of one that a function of torch.func has left behind, as vmap does."""
        try:
            written = memory_of(as_row(tensor.detach().cpu())).tobytes()
        except RuntimeError:
            return None
        return cls(written, tensor.dtype, tuple(tensor.shape), isinstance(before, _Sign) and before.is_same(tensor))

    def opened(self, known: object, parts: Iterable[nn.Module | None]) -> torch.Tensor:
        """Return the tensor, where the network of these parts is; the `known` one, written to, if that is what it is.

        Others may have it.
        """
        if self.in_place and is_free(known):
            refill(known, self._made())
            return known
        held = (tensor for part in parts if part is not None for tensor in part._parameters.values())
        device = next((tensor.device for tensor in held if tensor is not None and not tensor.is_meta), None)
        return self._made().to(device)

    def _made(self) -> torch.Tensor:
        made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        if self.written:
            made.copy_(torch.frombuffer(bytearray(self.written), dtype=self.dtype).reshape(self.shape))
        return made


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Collection:
    """A plain collection on its way, in which _Values stand for tensors."""

    written: Any

    @classmethod
    def of(cls, value: object, before: object) -> Any:
        """Return what travels for an attribute's value: for a collection without tensors itself, or NOT_PLAIN."""
        known = iter(_signs(before))
        tensors = 0

        def written(tensor: torch.Tensor) -> _Values:
            nonlocal tensors
            tensors += 1
            values = _Values.of(tensor, next(known, None))
            if values is None:
                raise TypeError
            return values

        copy = _copied(value, written)
        return cls(copy) if tensors and copy is not plain.NOT_PLAIN else copy

    def opened(self, known: object, parts: Sequence[nn.Module | None]) -> Any:
        """As _Values' own, with what is `known` in the same order."""
        there: list[torch.Tensor] = []
        _copied(known, there.append)
        tensors = iter(there)
        return plain.copied(
            self.written,
            _ATOMS,
            plain.LIKE_THEM,
            plain.ITEMS,
            plain.FLAT_ITEMS,
            lambda values: values.opened(next(tensors, None), parts),
        )


def _signs(copy: object) -> list[_Sign]:
    """Return those that stand in a copy of a collection, in the order of their tensors."""
    found: list[_Sign] = []
    plain.copied(copy, _ATOMS, plain.LIKE_THEM, plain.ITEMS, plain.FLAT_ITEMS, found.append)
    return found


@final
class _Unpickler(pickle.Unpickler):
    """What cannot be imported in this process is an error for who calls it, and costs no other attribute its value."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError) as reason:
            why = f"{module}.{name}, an attribute of a network, cannot be imported in this process: {reason}"

        def missing(*_: object, **__: object) -> None:
            raise ImportError(why)

        return missing


def of_one_side(had: Mapping[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that a part `had` here, and that the other side, which `has` others, was not told of."""
    gone = had.keys() - has.keys() - {*has["_parameters"], *has["_buffers"], *has["_modules"]}
    return {name: had[name] for name in had if name in gone and not _is_told_of(had[name])}


def _is_told_of(value: Any) -> bool:
    own_function = type(value) in _FUNCTIONS and not stays(value)
    return own_function or _is_computed(value) or _copied(value, _Sign) is not plain.NOT_PLAIN


def names_by_id(names: Iterable[tuple[str, object]]) -> dict[int, list[str]]:
    """Return the names by the ids of their values, of those that a network may have as an attribute."""
    found: dict[int, list[str]] = {}
    for name, value in names:
        if type(value) not in WITHOUT_IDENTITY:
            found.setdefault(id(value), []).append(name)
    return found


def named_attributes(network: nn.Module, named: Mapping[int, Sequence[str]]) -> Iterator[tuple[str, str, str]]:
    """Yield where the parts of a network have a value that has a name: the part's path, the attribute and the name.

    Or a hook that keeps one: in the attribute's place the hook's kind, its number, and which it is of what it keeps.
    `named` are the names by the values' ids. Not of parts.
    """
    for path, part in network.named_modules():
        yield from ((path, attribute, name) for attribute, name in _named_of(part, named))


def names_in(network: nn.Module, named: Mapping[int, Sequence[str]]) -> set[str]:
    """Return which of these names the network's attributes have."""
    return {name for part in network.modules() for _, name in _named_of(part, named)}


def _named_of(part: nn.Module, named: Mapping[int, Sequence[str]]) -> Iterable[tuple[str, str]]:
    if _is_others(type(part)):
        return ()
    own = vars(part)
    held: list[tuple[str, object]] = [
        (f"{kind}.{number}.{i}", value)
        for kind, hooks in hook_dicts(part).items()
        for number, hook in hooks.items()
        for i, value in enumerate(kept(hook))
        if not _is_mirrored(value)
    ]
    # Not one by one: networks have thousands, and this is done for every cell.
    if not named.keys().isdisjoint(map(id, own.values())):
        skipped = _skipped(type(part))
        found = ((name, value) for name, value in own.items() if id(value) in named and name not in skipped)
        held += [(name, value) for name, value in found if not _is_mirrored(value)]
    return [(attribute, name) for attribute, value in held for name in named.get(id(value), ())]


def _is_mirrored(value: object) -> bool:
    return isinstance(value, (nn.Module, nn.Parameter)) or is_told(value)


def set_named(part: nn.Module, attribute: str, value: object) -> None:
    """Give a part of a network the value that has a name, in the place of its copy of that; see `named_attributes`."""
    own = vars(part)
    kind, *numbers = attribute.split(".")
    if kind in HOOKS:
        number, i = map(int, numbers)
        hook = own[kind].get(number)
        if hook is not None and type(kept(hook)[i]) is type(value):
            own[kind][number] = keeping(hook, i, value)
    elif type(own.get(attribute)) is type(value):
        own[attribute] = value
