"""Objects to bytes and back: cloudpickle, with tensors and arrays beside the pickle in one slab.

Knows nothing of sockets, replicas or notebooks.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, final

import cloudpickle
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from mirror_nb.environment.surroundings import look_in
from mirror_nb.errors import MirrorError, TransferError, UsageError
from mirror_nb.event_files import reduce_writer
from mirror_nb.tensors.layouts import memory_of, needed, with_memory
from mirror_nb.tensors.sharded import refuse
from mirror_nb.transfer import hooks, transformers_models
from mirror_nb.transfer import slab as slabs
from mirror_nb.transfer.compiled import reduce_compiled
from mirror_nb.transfer.ddp import begun, reduce_ddp
from mirror_nb.transfer.keras_objects import reduce_keras, repairing
from mirror_nb.transfer.nest import Nest, NotSimpleError, dressed
from mirror_nb.transfer.parametrized import make_parametrized, reduce_parametrized
from mirror_nb.transfer.pickler import (
    Limited,
    Pickler,
    TooLarge,
    global_names,
    label_class,
    module_by_name,
    with_globals,
)
from mirror_nb.transfer.pytree_nodes import reduce_registered
from mirror_nb.transfer.told import complete, is_told, whole_state, without_moments
from mirror_nb.values import PerReplica, Shares
from mirror_nb.variables import arriving

IN_BAND_BYTES = 128 * 1024
# So much of an object's buffers stays in the pickle: for 100 KB a slab takes 90 µs, a socket 15.
IN_BAND_ITEMS = 512
# Of a nest that its message pickles: a message takes less than 1024 pieces (IOV_MAX).
MESSAGE_BYTES = 160 * 1024
# A longer pickle lies in the slab too: a message that a socket's buffer holds is sent without waiting for a
# receiver that may be stopped, and what is sent to many is not copied for each.
_GROWING_BYTES = 16 * 1024
# A tensor of up to so many is copied on arrival, within 10 µs.
_NAMESPACE = "namespace"
_LARGEST_ITEM = 16
# Bytes of an element: of a complex128.


@dataclass(slots=True)
class Payload:
    """A pickled object and where its large buffers lie in the slab that travels beside it.

    It, and what else is made for every call, is not frozen: that takes 10 µs more for each where nothing is cached.
    """

    pickled: bytes = b""
    # Empty: the last extent holds it, if there is one.
    extents: tuple[tuple[int, int], ...] = ()
    # Offset and length of each buffer in the slab, bytes.
    slab_bytes: int = 0
    # 0: there is no slab.
    simple: bool = False
    # Made by pickle's own pickler, of what refers to nothing.
    nest: tuple[Any, ...] = ()
    # Of `Nest`, which its message pickles: the object is simple and small, and needs no pickle of its own.
    arrived: bool = False
    # The nest was in a message, so that nobody else has its tensors.

    def flat(self) -> tuple[Any, ...]:
        """Return it as a tuple to send: `Payload(*flat)` at the other end."""
        return self.pickled, self.extents, self.slab_bytes, self.simple, self.nest, True

    def __reduce__(self) -> Any:
        # Three times as fast as dataclasses' own way, in every message.
        return Payload, self.flat()

    @property
    def nbytes(self) -> int:
        """Size of all that travels, in bytes."""
        return len(self.pickled) + self.slab_bytes + (len(pickle.dumps(self.nest, 5)) if self.nest else 0)


@dataclass(slots=True)
class Arrivals:
    """What was rebuilt while a payload was opened and needs a home on this side."""

    modules: list[nn.Module] = field(default_factory=list)
    handles: dict[str, nn.Module] = field(default_factory=dict)
    lent: dict[str, Any] = field(default_factory=dict)
    # Optimizers, schedulers and scalers that came with a handle.
    leaves: list[torch.Tensor] = field(default_factory=list)
    # Tensors that require gradients, those of the modules among them.
    weighed: list[tuple[Any, Shares]] = field(default_factory=list)
    # This replica's parts of batches.
    hooked: dict[str, hooks.Hooks] = field(default_factory=dict)
    # By the handles of networks and their parts: the hooks that they came with.
    lacking: str = ""
    # What could not be imported here, if the payload was opened for all the rest of it.

    def replace(self, became: Mapping[int, nn.Module]) -> None:
        """Take these in the place of networks that arrived, by the id of each."""
        self.modules = [became.get(id(module), module) for module in self.modules]
        self.handles = {handle: became.get(id(module), module) for handle, module in self.handles.items()}


class _Storage:
    """The bytes of one tensor region; pickled once however many tensors look at it."""

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_storage, (pickle.PickleBuffer(memory_of(self.raw)),)


def _open_storage(buffer: Any) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.UntypedStorage(0)
    opened = torch.frombuffer(buffer, dtype=torch.uint8)
    # Memory of torch's own can grow: layers that are to be quantised enlarge what they have observed.
    return (opened.clone() if len(buffer) <= _GROWING_BYTES else opened).untyped_storage()


def _open_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    on_device: bool,
    offset: int = 0,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    if on_device and _opening is not None and _opening.device is not None:
        tensor = tensor.to(_opening.device)
    return _leaf(tensor.requires_grad_()) if requires_grad else tensor


def _hang_on(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    # Past `__setstate__`, by which torch means something else.
    vars(tensor).update(attributes)


def _open_parameter(kind: type[torch.Tensor], make: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
    made = make(*args)
    if type(made) is not kind or not made.is_leaf:
        # Torch makes a mere Parameter of a class derived from that, and computes a tensor of another class.
        own = vars(made)
        made = torch.Tensor._make_subclass(kind, made.detach(), made.requires_grad)
        vars(made).update(own)
    return _leaf(made)


@final
class Weighed:
    """A replica's part of a batch, with its shares; it arrives as the part itself, of which `Arrivals` tells them."""

    def __init__(self, part: Any, shares: Shares) -> None:
        self._opens = part, shares

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_weighed, self._opens


def _open_weighed(part: Any, shares: Shares) -> Any:
    if _opening is not None:
        _opening.arrivals.weighed.append((part, shares))
    return part


def _open_per_replica(values: tuple[Any, ...], examples: tuple[int, ...] | None) -> Any:
    """Make a PerReplica; in a replica that is to have its own value that: as arguments are there."""
    own, count = (None if _opening is None else _opening.own) or (0, None)
    if len(values) != count:
        # Values of other replicas, more or fewer, belong to none of these.
        return PerReplica(values)
    return _open_weighed(values[own], (examples[own], sum(examples))) if examples and any(examples) else values[own]


def _open_generator(device: torch.device) -> torch.Generator:
    """Make a generator; a GPU's is the replica's own GPU's."""
    own = _opening.device if _opening is not None else None
    return torch.Generator(device if own is None or device.type != own.type else own)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    if _opening is not None and tensor.requires_grad:
        _opening.arrivals.leaves.append(tensor)
    return tensor


def _begun_ddp(kind: Any) -> nn.Module:
    # The controller names no device.
    return begun(kind, alone=_opening is not None and _opening.device is None)


def _once(handle: str | None, make: Any, args: Any) -> tuple[Any, Any]:
    """Return how to make an object, or to find it: the receiver may have it by the handle, as it was earlier.

    Not what its class, or Keras, makes in a way of its own: that may refer to the very object that it makes.
    """
    plainly = make in (copyreg.__newobj__, _bare, make_parametrized)  # type: ignore[attr-defined]
    return (_found_or_made, (handle, make, args)) if handle is not None and plainly else (make, args)


def _bare(kind: type[nn.Module]) -> nn.Module:
    """Make a network that is to get its state, as pickle does."""
    try:
        return kind.__new__(kind)
    except TypeError:
        # It wants what `__init__` is given, which no pickle has.
        return object.__new__(kind)


def _found_or_made(handle: str, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    made = make(*args)
    known = _opening.known(handle) if _opening is not None else None
    if known is None:
        return made
    was = known, type(known), dict(vars(known)), hooks.contents(known)
    try:
        known.__class__ = type(made)
    except TypeError:
        # Python does not let it be one.
        return made
    assert _opening is not None
    _opening.were[handle] = was
    return known


def _set_module_state(module: nn.Module, state: tuple[Any, str | None]) -> None:
    values, handle = state
    came: hooks.Hooks = frozenset()
    if values is not None:
        own = dict(vars(module)) if _opening is not None and handle in _opening.were else None
        if own is not None:
            # Its state is all of it: a part that was taken away there goes here too.
            vars(module).clear()
        module.__setstate__(values)
        came = hooks.numbers(module)
        if own is not None:
            hooks.exchange(own, vars(module), lambda kind, number: hooks.known_to_stay(own[kind][number]) is True)
    transformers_models.arrived(module)
    if _opening is not None:
        _opening.arrivals.modules.append(module)
        if handle is not None:
            _opening.arrivals.handles[handle] = module
            _opening.arrivals.hooked[handle] = came


def _set_told_state(obj: Any, state: tuple[dict[str, Any], str | None]) -> None:
    values, handle = state
    # Over what is here already, which keeps hooks of its steps and the like: they belong to this process.
    put = getattr(obj, "__setstate__", None) or vars(obj).update
    put(values)
    complete(obj)
    if _opening is not None and handle is not None:
        _opening.arrivals.lent[handle] = obj


class Begins:
    """Stands before an object in a payload, so that the receiver can say which one it could not rebuild.

    As the key of a dict, where it becomes the name, before the object that has it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _begins, (self._name,)


def _begins(name: str) -> str:
    if _opening is not None:
        _opening.at = name
    return name


class Last:
    """Stands for what is made only when all that stands before it in a payload has been packed."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._make(),)


def _itself(value: object) -> object:
    return value


class NotRebuilt(TransferError):
    """What stands after `Begins(name)` cannot be rebuilt here."""

    def __init__(self, name: str, reason: Exception) -> None:
        super().__init__(f"`{name}` cannot be rebuilt here: {type(reason).__name__}: {reason}")
        self.name = name
        self.reason = reason


class SearchPath:
    """Where the sender looks for modules: the receiver looks there too before what follows in a payload is rebuilt."""

    def __reduce__(self) -> tuple[Any, ...]:
        return look_in, (list(sys.path),)


class Lacking(nn.Module):
    """In the place of an object whose class is not to be had here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        """Nothing of it can be used."""


class _Outside:
    """The buffers of an object that travel beside its pickle; at most `budget` bytes of them."""

    def __init__(self, budget: int | None = None) -> None:
        self.buffers: list[memoryview] = []
        self._budget = budget
        self._room = IN_BAND_BYTES

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """For pickle: whether this buffer stays in the pickle."""
        raw = buffer.raw()
        if raw.nbytes < self._room:
            self._room -= raw.nbytes
            return True
        if self._budget is not None and sum(b.nbytes for b in self.buffers) + raw.nbytes > self._budget:
            raise TooLarge
        self.buffers.append(raw)
        return False


class _Packer(Pickler):
    """cloudpickle, but functions of the notebook keep reading the namespace they land in."""

    def __init__(
        self,
        file: io.BytesIO,
        namespace: MutableMapping[str, Any] | None,
        reference: Callable[[object], Any],
        handle: Callable[[nn.Module], str | None],
        lend: Callable[[Any], str | None],
        budget: int | None,
        in_band: bool,
        label: str,
        states: bool,
        containers: bool,
        classes: bool,
        joined: Mapping[int, list[tuple[int, int]]],
    ) -> None:
        self._joined = joined
        self.outside = _Outside(budget)
        super().__init__(file, protocol=5, buffer_callback=None if in_band else self.outside)
        self.global_names: set[str] = set()
        self.files: set[str] = set()
        self._label = label
        self._states = states
        self._namespace = namespace
        self._reference = reference
        asked = (*((list, dict, set, tuple) if containers else ()), *((type, types.FunctionType) if classes else ()))
        self._never_referred = _NEVER_REFERRED.difference(asked)
        self._handle = handle
        self._lend = lend
        self._shadow: dict[str, Any] = {}
        self._storages: dict[tuple[int, int, int], _Storage] = {}
        if namespace is not None:
            # cloudpickle looks up here which dictionary a rebuilt function shall have as its globals.
            self.globals_ref[id(self._shadow)] = namespace

    def overlapping(self) -> dict[int, list[tuple[int, int]]]:
        """Return which parts of a storage several tensors have looked at, each its own: where they begin and end.

        By the storage's address. They are to travel as one, or these tensors would share no memory on arrival.
        """
        parts: dict[int, list[tuple[int, int]]] = {}
        for address, start, nbytes in self._storages:
            parts.setdefault(address, []).append((start, start + nbytes))
        found = {}
        for address, extents in parts.items():
            joined: list[tuple[int, int]] = []
            for start, end in sorted(extents):
                if joined and start < joined[-1][1]:
                    joined[-1] = joined[-1][0], max(end, joined[-1][1])
                else:
                    joined.append((start, end))
            if len(joined) < len(extents):
                # From where elements of every dtype lie that begin in it.
                found[address] = [(begin - begin % _LARGEST_ITEM, end) for begin, end in joined]
        return found

    def persistent_id(self, obj: Any) -> Any:
        if obj is self._namespace and obj is not None:
            return (_NAMESPACE,)
        # pickle asks for everything, mostly for these. A weak proxy passes for a network that it is a proxy of.
        return None if type(obj) in self._never_referred else self._reference(obj)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.FunctionType and self._namespace is not None and obj.__globals__ is self._namespace:
            self.global_names |= global_names(obj.__code__)
            self.files.add(obj.__code__.co_filename)
            return super().reducer_override(with_globals(obj, self._shadow))
        if type(obj) is types.FunctionType and obj.__dict__.get("hooked") and _wrapped_by_torch(obj):
            return _hooked, (obj.__wrapped__,)  # type: ignore[attr-defined]
        compiled = reduce_compiled(obj)
        if compiled is not None:
            return compiled
        if type(obj) is RemovableHandle:
            return hooks.reduce_handle(obj)
        if type(obj) is PerReplica:
            return _open_per_replica, (obj.values, obj.shares)
        if type(obj) in weakref.ProxyTypes:
            return weakref.proxy, (obj.__reduce_ex__.__self__,)
        if type(obj) is weakref.ref and obj.__callback__ is None:
            # Whose referent is gone refers to what goes at once.
            return weakref.ref, (set() if (referent := obj()) is None else referent,)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            found = module_by_name(obj)
            if found is not None:
                return found
        if isinstance(obj, type):
            if self._label and self._namespace is not None:
                label_class(obj, self._label, self._namespace)
            return reduce_registered(obj, super().reducer_override(obj))
        if type(obj) is torch.Tensor and _plain(obj):
            return self._reduce_tensor(obj)
        if type(obj) is torch.Tensor and obj.is_mkldnn and not obj.requires_grad:
            # It has no memory that could be looked at.
            return torch.Tensor.to_mkldnn, (obj.to_dense(),)
        refuse(obj)
        if _is_leaf(obj) and type(obj).__reduce_ex__ in _TORCHS_OWN:
            make, args, *rest = obj.__reduce_ex__(5)
            return _open_parameter, (type(obj), make, *args), *rest
        writer = reduce_writer(obj)
        if writer is not None:
            return writer
        keras = reduce_keras(obj)
        if keras is not None and not isinstance(obj, nn.Module):
            return keras
        if isinstance(obj, nn.Module) and not isinstance(obj, torch.jit.ScriptModule):
            return self._reduce_module(obj)
        if isinstance(obj, torch.optim.Optimizer) or is_told(obj):
            return self._reduce_told(obj)
        if isinstance(obj, DataLoader) and vars(obj).get("_iterator") is not None:
            # With persistent workers: their processes stay here.
            reduced: Any = obj.__reduce_ex__(5)
            return *reduced[:2], {**reduced[2], "_iterator": None}, *reduced[3:]
        return super().reducer_override(obj)

    def _reduce_module(self, module: nn.Module) -> Any:
        own = reduce_keras(module) or reduce_parametrized(module) or reduce_ddp(module, _begun_ddp)
        reduced = (own or ())[:3] or module.__reduce_ex__(5)
        if not isinstance(reduced, tuple) or any(part is not None for part in reduced[3:]):
            return reduced
        make, args, *rest = reduced
        if make is copyreg.__newobj__ and args == (type(module),):  # type: ignore[attr-defined]
            make = _bare
        # Without a state: the network's class has a say of its own in how it is rebuilt.
        state = rest[0] if rest else None
        handle = self._handle(module)
        return *_once(handle, make, args), (state, handle), None, None, _set_module_state

    def _reduce_told(self, obj: Any) -> Any:
        reduced = obj.__reduce_ex__(5)
        whole = isinstance(reduced, tuple) and len(reduced) > 2 and not any(reduced[3:])
        if not whole or not isinstance(reduced[2], dict | tuple):
            return reduced
        make, args, state = reduced[:3]
        if isinstance(obj, torch.Generator):
            make = _open_generator
        if not is_told(obj):
            return make, args, whole_state(obj, state)
        state = whole_state(obj, state if self._states else without_moments(obj, state))
        handle = self._lend(obj)
        return *_once(handle, make, args), (state, handle), None, None, _set_told_state

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        data = with_memory(tensor).detach()
        on_device = data.device.type != "cpu"
        if on_device:
            data = data.cpu()
        start = int(data.storage_offset()) * data.itemsize
        nbytes = max(needed(data) - start, 0)
        storage, offset = data.untyped_storage(), 0
        for begin, end in self._joined.get(storage.data_ptr(), ()):
            if begin <= start and start + nbytes <= end:
                start, nbytes, offset = begin, end - begin, (start - begin) // data.itemsize
                break
        # Storages of nothing lie nowhere, and are not one for that: each may grow.
        key = (storage.data_ptr() or storage._cdata, start, nbytes)
        if on_device or key not in self._storages:
            # By name: the user may have set another default.
            raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))
            self._storages[key] = _Storage(raw)
        leaf_grad = tensor.requires_grad and tensor.is_leaf
        form = data.dtype, tuple(data.shape), tuple(data.stride())
        opened = _open_tensor, (self._storages[key], *form, leaf_grad, on_device, offset)
        # As a state: what hangs on a tensor may have the tensor.
        return (*opened, dict(vars(tensor)), None, None, _hang_on) if vars(tensor) else opened


def _is_leaf(obj: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a parameter, or another tensor that is trained."""
    if not isinstance(obj, torch.Tensor):
        return False
    return issubclass(type(obj), nn.Parameter) or (obj.requires_grad and obj.is_leaf)


_TORCHS_OWN = (torch.Tensor.__reduce_ex__, nn.Parameter.__reduce_ex__)
# How tensors of classes are pickled that have no say in it.


def _wrapped_by_torch(function: types.FunctionType) -> bool:
    """Whether it is the step of an optimizer's class that torch made call everybody's hooks."""
    return function.__globals__.get("__name__") == "torch.optim.optimizer" and hasattr(function, "__wrapped__")


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap it as torch does: hooks of the process where it was wrapped before stay there, those of this one count."""
    wrapped = torch.optim.Optimizer.profile_hook_step(step)
    wrapped.hooked = True  # type: ignore[attr-defined]
    return wrapped


_NEVER_REFERRED = frozenset(
    (
        *(str, bytes, int, float, bool, type(None), tuple, list, dict, set, type),
        *(types.CodeType, types.CellType, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
        *weakref.ProxyTypes,
    )
)


def _plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_nested
    )


@dataclass(slots=True)
class Packed:
    """A payload with the descriptor of its slab; `close()` it once it was sent."""

    payload: Payload
    slab: int | None
    global_names: frozenset[str]
    # Names that functions of the namespace look up; they are not part of the payload.
    files: frozenset[str] = frozenset()
    # Where these functions were written, as their code says it.

    def close(self) -> None:
        """Close this process's descriptor of the slab, once; those who received it keep theirs."""
        slab, self.slab = self.slab, None
        if slab is not None:
            os.close(slab)


def pack(
    obj: object,
    *,
    namespace: MutableMapping[str, Any] | None = None,
    reference: Callable[[object], Any] = lambda obj: None,
    handle: Callable[[nn.Module], str | None] = lambda module: None,
    lend: Callable[[Any], str | None] = lambda obj: None,
    limit: int | None = None,
    in_band: bool = False,
    label: str = "",
    states: bool = True,
    containers: bool = False,
    classes: bool = False,
) -> Packed:
    """Turn `obj` into a payload.

    Functions whose globals are `namespace` travel without them and look names up where they arrive.
    `reference(obj)` may give a small token to send in the place of an object that the other side has; it is asked for
    lists, dicts, sets and tuples only with `containers`, for classes with `classes`. `handle(module)` numbers a
    module so that it can be referred to later, `lend(obj)` an optimizer, a scheduler or a scaler. CUDA tensors travel
    through host memory. `limit`, bytes, bounds the size; `in_band` puts all of it into the pickle, so that there is
    no slab. `label` is given to classes of the namespace that have not travelled before: see `label_class`. Without
    `states`, optimizers travel without their moments.

    Raises TooLarge beyond `limit`, TransferError when something in `obj` cannot be pickled.
    """
    if namespace is None and limit is None and not in_band:
        if obj is None:
            return _NONE
        nest = Nest(reference)
        try:
            bare = nest.bare(obj), nest.forms
        except NotSimpleError:
            pass
        else:
            return _pack_simple(bare, nest.items <= IN_BAND_ITEMS and nest.nbytes <= IN_BAND_BYTES)

    def dumped(joined: Mapping[int, list[tuple[int, int]]]) -> tuple[Limited, _Packer]:
        file = Limited(limit)
        how = in_band, label, states, containers, classes
        packer = _Packer(file, namespace, reference, handle, lend, limit, *how, joined)
        packer.dump(obj)
        return file, packer

    try:
        file, packer = dumped({})
        overlapping = packer.overlapping()
        if overlapping:
            # Only now it is known what looks at the same memory.
            file, packer = dumped(overlapping)
    except (TooLarge, KeyboardInterrupt, UsageError):
        raise
    except Exception as reason:
        raise TransferError(f"{type(obj).__name__} cannot be sent: {type(reason).__name__}: {reason}") from reason
    names, files = frozenset(packer.global_names), frozenset(packer.files)
    if in_band:
        return Packed(Payload(file.getvalue()), None, names, files)
    return _in_slab(file.getvalue(), packer.outside.buffers, names, files)


def _pack_simple(bare: tuple[Any, Any], small: bool) -> Packed:
    if small:
        return Packed(Payload(nest=bare), None, frozenset())
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(bare, 5, buffer_callback=buffers.append)
    return _in_slab(pickled, [buffer.raw() for buffer in buffers], simple=True)


_NONE = _pack_simple((None, []), small=True)
# What most calls return.


def _in_slab(
    pickled: bytes,
    buffers: list[memoryview],
    names: frozenset[str] = frozenset(),
    files: frozenset[str] = frozenset(),
    simple: bool = False,
) -> Packed:
    """Put the buffers into a slab, and the pickle too if it is long."""
    if len(pickled) > MESSAGE_BYTES:
        pickled, buffers = b"", [*buffers, memoryview(pickled)]
    extents, slab = slabs.write(buffers)
    size = extents[-1][0] + extents[-1][1] if extents else 0
    return Packed(Payload(pickled, extents, size, simple), slab, names, files)


class _Opener(pickle.Unpickler):
    def __init__(
        self,
        pickled: Any,
        buffers: Iterable[Any],
        namespace: MutableMapping[str, Any] | None,
        resolve: Callable[[Any], object] | None,
        device: torch.device | None,
        lenient: bool,
        own: tuple[int, int] | None,
        known: Callable[[str], Any],
    ) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
        self._lenient = lenient
        self.arrivals = Arrivals()
        self.device = device
        self.own = own
        self.known = known
        self.were: dict[str, tuple[Any, type, dict[str, Any], dict[str, dict[int, Any]]]] = {}
        # By handle what is here and comes again: itself, its class, its attributes and its hooks of before.
        self.at = ""
        self._namespace = namespace
        self._resolve = resolve

    def put_back(self) -> None:
        """Let all be what it was that is here already."""
        for obj, kind, attributes, hooked in self.were.values():
            obj.__class__ = kind
            vars(obj).clear()
            vars(obj).update(attributes)
            hooks.exchange(attributes, hooked, lambda kind, number: False)

    def find_class(self, module: str, name: str) -> Any:
        """For pickle: the class or function of that name, or what stands for it."""
        if not self._lenient:
            return super().find_class(module, name)
        try:
            found = super().find_class(module, name)
        except (ImportError, AttributeError) as reason:
            self.arrivals.lacking = str(reason)
            return Lacking
        # cloudpickle's way to a module that an object refers to.
        return self._import if found is cloudpickle.cloudpickle.subimport else found

    def _import(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as reason:
            self.arrivals.lacking = str(reason)
            return Lacking()

    def persistent_load(self, pid: Any) -> Any:
        if pid == (_NAMESPACE,):
            return self._namespace if self._namespace is not None else {}
        if self._resolve is None:
            raise TransferError(f"a payload refers to {pid!r}, which is not known here")
        return self._resolve(pid)


_opening: _Opener | None = None
# The opener at work, for the rebuild functions that pickle calls with no context. Payloads are opened by the
# main thread of a replica or of the notebook only.


def unpack(
    payload: Payload,
    slab: int | None,
    *,
    namespace: MutableMapping[str, Any] | None = None,
    resolve: Callable[[Any], object] | None = None,
    device: torch.device | None = None,
    lenient: bool = False,
    own: tuple[int, int] | None = None,
    known: Callable[[str], Any] = lambda handle: None,
) -> tuple[Any, Arrivals]:
    """Rebuild what `pack` was given, and tell which modules arrived in it. Takes over `slab` and closes it.

    Tensors and arrays look at the slab's pages; writing to them changes this process's copy alone. Tensors
    that were on a GPU go to `device` (None: they stay on the CPU). `resolve` turns a reference into its object.
    With `own`, a replica's id and the number of replicas, a PerReplica of so many is that replica's value.

    `known(handle)` gives what is here by a handle: a network, an optimizer or the like that comes again, with other
    parts say, becomes what it is there; so whatever has it here has it still. None of them does if rebuilding fails.

    With `lenient`, what cannot be imported here does not fail: see `Arrivals.lacking`, of which no network is told.

    Raises NotRebuilt where the payload says which of its objects begin, else what rebuilding raised.
    """
    global _opening
    if payload.nest:
        # In a pool without processes no message has copied it.
        bare, forms = payload.nest if payload.arrived else pickle.loads(pickle.dumps(payload.nest, 5))
        return dressed(bare, iter(forms)) if forms else bare, Arrivals()
    buffers = slabs.opened(slab, payload.slab_bytes, payload.extents)
    pickled: Any = payload.pickled or buffers.pop()
    if payload.simple:
        bare, forms = pickle.loads(pickled, buffers=buffers)
        return dressed(bare, iter(forms)) if forms else bare, Arrivals()
    opener = _Opener(pickled, buffers, namespace, resolve, device, lenient, own, known)
    before, _opening = _opening, opener
    try:
        with repairing(), arriving():
            value, arrivals = opener.load(), opener.arrivals
            # What follows is about no one of them.
            opener.at = ""
            if arrivals.lacking:
                # Any of them may hold what is not there.
                arrivals.modules, arrivals.handles = [], {}
            return value, arrivals
    except BaseException as reason:
        opener.put_back()
        if not opener.at or not isinstance(reason, Exception):
            raise
        raise NotRebuilt(opener.at, reason) from reason
    finally:
        _opening = before


def note_not_made_again(
    error: Exception, what: str, instead: str = "pass numbers, tensors and containers of them"
) -> None:
    """Note on what a class of the user's has raised while it was unpickled that it was then, and inside of what."""
    if isinstance(error, RecursionError):
        # A `__getattr__` that asks for what is not there yet: a thousand frames that are all alike.
        trace = error.__traceback__
        for _ in range(_FRAMES):
            trace = trace and trace.tb_next
        if trace is not None:
            trace.tb_next = None
    elif isinstance(error, _SAYS_ENOUGH):
        return
    error.add_note(
        f"raised while {what} was made again from its pickle: an object in it is pickled, but not unpickled. Give "
        f"its class a __reduce__ that its __init__ takes, or {instead}"
    )


_FRAMES = 12
# Of ours the first half.
_SAYS_ENOUGH = (MirrorError, ImportError, OSError, MemoryError, RuntimeError)
# Of ours, of a module that is not there, and of memory, a GPU's too.
