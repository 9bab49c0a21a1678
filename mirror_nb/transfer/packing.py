"""Objects to payloads: cloudpickle, with tensors and arrays beside the pickle in one slab.

Knows nothing of sockets, replicas or notebooks.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeGuard, final

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from mirror_nb.environment.surroundings import look_in
from mirror_nb.errors import TransferError, UsageError
from mirror_nb.event_files import reduce_writer
from mirror_nb.tensors.layouts import memory_of, needed, with_memory
from mirror_nb.tensors.sharded import refuse
from mirror_nb.transfer import hooks
from mirror_nb.transfer import slab as slabs
from mirror_nb.transfer.compiled import reduce_compiled
from mirror_nb.transfer.ddp import reduce_ddp
from mirror_nb.transfer.keras_objects import reduce_keras
from mirror_nb.transfer.nest import Nest, NotSimpleError
from mirror_nb.transfer.opening import (
    NAMESPACE,
    bare_network,
    begins,
    found_or_made,
    hang_on,
    hooked_step,
    itself,
    open_ddp,
    open_generator,
    open_parameter,
    open_per_replica,
    open_storage,
    open_tensor,
    open_weighed,
    set_module_state,
    set_told_state,
)
from mirror_nb.transfer.parametrized import make_parametrized, reduce_parametrized
from mirror_nb.transfer.payload import Packed, Payload
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
from mirror_nb.transfer.told import is_told, whole_state, without_moments
from mirror_nb.values import PerReplica, Shares

IN_BAND_BYTES = 128 * 1024
# So much of an object's buffers stays in the pickle: for 100 KB a slab takes 90 µs, a socket 15.
IN_BAND_ITEMS = 512
# Of a nest that its message pickles: a message takes less than 1024 pieces (IOV_MAX).
MESSAGE_BYTES = 160 * 1024
# A longer pickle lies in the slab too: a message that a socket's buffer holds is sent without waiting for a
# receiver that may be stopped, and what is sent to many is not copied for each.
_LARGEST_ITEM = 16
# Bytes of an element: of a complex128.
_Joined = Mapping[int, tuple[torch.UntypedStorage, Sequence[tuple[int, int]]]]
# By the address of a storage, the longest one that begins there, and which parts of it travel as one each.


class _Storage:
    """The bytes of one tensor region; pickled once however many tensors look at it."""

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw

    def __reduce__(self) -> tuple[Any, ...]:
        return open_storage, (pickle.PickleBuffer(memory_of(self.raw)),)


@final
class Weighed:
    """A replica's part of a batch, with its shares; it arrives as the part itself, of which `Arrivals` tells them."""

    def __init__(self, part: Any, shares: Shares) -> None:
        self._opens = part, shares

    def __reduce__(self) -> tuple[Any, ...]:
        return open_weighed, self._opens


class Begins:
    """Stands before an object in a payload, so that the receiver can say which one it could not rebuild.

    As the key of a dict, where it becomes the name, before the object that has it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return begins, (self._name,)


class Last:
    """Stands for what is made only when all that stands before it in a payload has been packed."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self._make(),)


class SearchPath:
    """Where the sender looks for modules: the receiver looks there too before what follows in a payload is rebuilt."""

    def __reduce__(self) -> tuple[Any, ...]:
        return look_in, (list(sys.path),)


class _Outside:
    """The buffers of an object that travel beside its pickle; at most `budget` bytes of them."""

    def __init__(self, budget: int | None) -> None:
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
        joined: _Joined,
    ) -> None:
        self._joined = joined
        self._budget = budget
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

    def overlapping(self) -> _Joined:
        """Return which parts of a storage several tensors have looked at, each its own: where they begin and end.

        They are to travel as one, or these tensors would share no memory on arrival.
        """
        parts: dict[int, list[tuple[int, int]]] = {}
        regions: dict[int, list[_Storage]] = {}
        for (address, start, nbytes), region in self._storages.items():
            parts.setdefault(address, []).append((start, start + nbytes))
            regions.setdefault(address, []).append(region)
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
                aligned = [(begin - begin % _LARGEST_ITEM, end) for begin, end in joined]
                # Arrays that begin alike, one a part of the other, give storages of one address, each of its length.
                storages = [region.raw.untyped_storage() for region in regions[address]]
                found[address] = max(storages, key=torch.UntypedStorage.nbytes), aligned
        return found

    def persistent_id(self, obj: Any) -> Any:
        if obj is self._namespace and obj is not None:
            return (NAMESPACE,)
        # pickle asks for everything, mostly for these. A weak proxy passes for a network that it is a proxy of.
        return None if type(obj) in self._never_referred else self._reference(obj)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.FunctionType and self._namespace is not None and obj.__globals__ is self._namespace:
            self.global_names |= global_names(obj.__code__)
            self.files.add(obj.__code__.co_filename)
            return super().reducer_override(with_globals(obj, self._shadow))
        if type(obj) is types.FunctionType and obj.__dict__.get("hooked") and _wrapped_by_torch(obj):
            return hooked_step, (obj.__wrapped__,)  # type: ignore[attr-defined]
        compiled = reduce_compiled(obj)
        if compiled is not None:
            return compiled
        if type(obj) is RemovableHandle:
            return hooks.reduce_handle(obj)
        if type(obj) is PerReplica:
            return open_per_replica, (obj.values, obj.shares)
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
            if self._label:
                label_class(obj, self._label)
            return reduce_registered(obj, super().reducer_override(obj))
        if type(obj) is torch.Tensor and _plain(obj):
            return self._reduce_tensor(obj)
        if type(obj) is torch.Tensor and obj.is_mkldnn and not obj.requires_grad:
            # It has no memory that could be looked at.
            return torch.Tensor.to_mkldnn, (obj.to_dense(),)
        refuse(obj)
        if _is_leaf(obj) and type(obj).__reduce_ex__ in _TORCHS_OWN:
            make, args, *rest = obj.__reduce_ex__(5)
            return open_parameter, (type(obj), make, *args), *rest
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
        own = reduce_keras(module) or reduce_parametrized(module) or reduce_ddp(module, open_ddp)
        reduced = (own or ())[:3] or module.__reduce_ex__(5)
        if not isinstance(reduced, tuple) or any(part is not None for part in reduced[3:]):
            return reduced
        make, args, *rest = reduced
        if make is copyreg.__newobj__ and args == (type(module),):  # type: ignore[attr-defined]
            make = bare_network
        # Without a state: the network's class has a say of its own in how it is rebuilt.
        state = rest[0] if rest else None
        handle = self._handle(module)
        return *_once(handle, make, args), (state, handle), None, None, set_module_state

    def _reduce_told(self, obj: Any) -> Any:
        reduced = obj.__reduce_ex__(5)
        whole = isinstance(reduced, tuple) and len(reduced) > 2 and not any(reduced[3:])
        if not whole or not isinstance(reduced[2], dict | tuple):
            return reduced
        make, args, state = reduced[:3]
        if isinstance(obj, torch.Generator):
            make = open_generator
        if not is_told(obj):
            return make, args, whole_state(obj, state)
        state = whole_state(obj, state if self._states else without_moments(obj, state))
        handle = self._lend(obj)
        return *_once(handle, make, args), (state, handle), None, None, set_told_state

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        data = with_memory(tensor).detach()
        on_device = data.device.type != "cpu"
        if on_device:
            if self._budget is not None and data.nbytes > self._budget:
                # Before it is copied: that takes a second for some GB, and as much of the machine's memory.
                raise TooLarge
            data = data.cpu()
        start = int(data.storage_offset()) * data.itemsize
        nbytes = max(needed(data) - start, 0)
        storage, offset = data.untyped_storage(), 0
        whole, extents = self._joined.get(storage.data_ptr(), (storage, ()))
        for begin, end in extents:
            if begin <= start and start + nbytes <= end:
                start, nbytes, offset = begin, end - begin, (start - begin) // data.itemsize
                storage = whole
                break
        # Storages of nothing lie nowhere, and are not one for that: each may grow.
        key = (storage.data_ptr() or storage._cdata, start, nbytes)
        if on_device or key not in self._storages:
            # By name: the user may have set another default.
            raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))
            self._storages[key] = _Storage(raw)
        leaf_grad = tensor.requires_grad and tensor.is_leaf
        form = data.dtype, tuple(data.shape), tuple(data.stride())
        opened = open_tensor, (self._storages[key], *form, leaf_grad, on_device, offset)
        # As a state: what hangs on a tensor may have the tensor.
        return (*opened, dict(vars(tensor)), None, None, hang_on) if vars(tensor) else opened


def _once(handle: str | None, make: Any, args: Any) -> tuple[Any, Any]:
    """Return how to make an object, or to find it: the receiver may have it by the handle, as it was earlier.

    Not what its class, or Keras, makes in a way of its own: that may refer to the very object that it makes.
    """
    plainly = make in (copyreg.__newobj__, bare_network, make_parametrized)  # type: ignore[attr-defined]
    return (found_or_made, (handle, make, args)) if handle is not None and plainly else (make, args)


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
    no slab. `label` is given to classes that have not travelled before: see `label_class`. Without `states`,
    optimizers travel without their moments.

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

    def dumped(joined: _Joined) -> tuple[Limited, _Packer]:
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


def unsendable(reason: TransferError, parts: Mapping[str, Any], instead: str, **how: Any) -> TransferError:
    """Return the error that names the first of these parts that cannot be packed; `reason`: of all in one.

    `instead`: what to do. What a class says of itself is left as it is.
    """
    if reason.__cause__ is None:
        return reason
    for name, part in parts.items():
        try:
            pack(part, **how).close()
        except TransferError as error:
            return TransferError(f"`{name}`: {error}; {instead}")
    return reason


def members(path: str, value: Any) -> dict[str, Any]:
    """Return what a dict, a list or a tuple has, by where it is; of anything else itself."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {f"{path}[{key!r}]": inner for key, inner in items}
    return {path: value}


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
