"""Payloads to objects: what a sender has packed, rebuilt here, and what of it needs a home on this side."""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from torch import nn

from mirror_nb.errors import MirrorError, TransferError
from mirror_nb.transfer import hooks, transformers_models
from mirror_nb.transfer import slab as slabs
from mirror_nb.transfer.ddp import begun
from mirror_nb.transfer.keras_objects import repairing
from mirror_nb.transfer.nest import dressed
from mirror_nb.transfer.payload import Payload
from mirror_nb.transfer.told import complete
from mirror_nb.values import PerReplica, Shares
from mirror_nb.variables import arriving

_GROWING_BYTES = 16 * 1024
# A tensor of up to so many is copied on arrival, within 10 µs.
NAMESPACE = "namespace"
# What stands in a payload for the namespace that it lands in.


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


def open_storage(buffer: Any) -> torch.UntypedStorage:
    """Return these bytes as the memory of tensors."""
    if not len(buffer):
        return torch.UntypedStorage(0)
    opened = torch.frombuffer(buffer, dtype=torch.uint8)
    # Memory of torch's own can grow: layers that are to be quantised enlarge what they have observed.
    return (opened.clone() if len(buffer) <= _GROWING_BYTES else opened).untyped_storage()


def open_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    on_device: bool,
    offset: int = 0,
) -> torch.Tensor:
    """Make a tensor that looks at the storage, in elements; on the device of its replica, if it lay on one."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    if on_device and _opening is not None and _opening.device is not None:
        tensor = tensor.to(_opening.device)
    return _leaf(tensor.requires_grad_()) if requires_grad else tensor


def hang_on(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Give the tensor the attributes that hung on it."""
    # Past `__setstate__`, by which torch means something else.
    vars(tensor).update(attributes)


def open_parameter(kind: type[torch.Tensor], make: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
    """Make a parameter, or another tensor that is trained, of that class."""
    made = make(*args)
    if type(made) is not kind or not made.is_leaf:
        # Torch makes a mere Parameter of a class derived from that, and computes a tensor of another class.
        own = vars(made)
        made = torch.Tensor._make_subclass(kind, made.detach(), made.requires_grad)
        vars(made).update(own)
    return _leaf(made)


def open_weighed(part: Any, shares: Shares) -> Any:
    """Return a replica's part of a batch, and tell its shares."""
    if _opening is not None:
        _opening.arrivals.weighed.append((part, shares))
    return part


def open_per_replica(values: tuple[Any, ...], examples: tuple[int, ...] | None) -> Any:
    """Make a PerReplica; in a replica that is to have its own value that: as arguments are there."""
    own, count = (None if _opening is None else _opening.own) or (0, None)
    if len(values) != count:
        # Values of other replicas, more or fewer, belong to none of these.
        return PerReplica(values)
    return open_weighed(values[own], (examples[own], sum(examples))) if examples and any(examples) else values[own]


def open_generator(device: torch.device) -> torch.Generator:
    """Make a generator; a GPU's is the replica's own GPU's."""
    own = _opening.device if _opening is not None else None
    return torch.Generator(device if own is None or device.type != own.type else own)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    if _opening is not None and tensor.requires_grad:
        _opening.arrivals.leaves.append(tensor)
    return tensor


def open_ddp(kind: Any) -> nn.Module:
    """Make a DistributedDataParallel that is to get its state."""
    # The controller names no device.
    return begun(kind, alone=_opening is not None and _opening.device is None)


def bare_network(kind: type[nn.Module]) -> nn.Module:
    """Make a network that is to get its state, as pickle does."""
    try:
        return kind.__new__(kind)
    except TypeError:
        # It wants what `__init__` is given, which no pickle has.
        return object.__new__(kind)


def found_or_made(handle: str, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return what is here by that handle, made one of the same class as what has come, or else a new one."""
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


def set_module_state(module: nn.Module, state: tuple[Any, str | None]) -> None:
    """Give a network the state, and the handle, that it came with."""
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


def set_told_state(obj: Any, state: tuple[dict[str, Any], str | None]) -> None:
    """Give an optimizer, a scheduler or the like the state, and the handle, that it came with."""
    values, handle = state
    # Over what is here already, which keeps hooks of its steps and the like: they belong to this process.
    put = getattr(obj, "__setstate__", None) or vars(obj).update
    put(values)
    complete(obj)
    if _opening is not None and handle is not None:
        _opening.arrivals.lent[handle] = obj


def begins(name: str) -> str:
    """Remember which object follows: see `packing.Begins`."""
    if _opening is not None:
        _opening.at = name
    return name


def itself(value: object) -> object:
    """Return it: see `packing.Last`."""
    return value


def hooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap it as torch does: hooks of the process where it was wrapped before stay there, those of this one count."""
    wrapped = torch.optim.Optimizer.profile_hook_step(step)
    wrapped.hooked = True  # type: ignore[attr-defined]
    return wrapped


class NotRebuilt(TransferError):
    """What stands after `Begins(name)` cannot be rebuilt here."""

    def __init__(self, name: str, reason: Exception) -> None:
        super().__init__(f"`{name}` cannot be rebuilt here: {type(reason).__name__}: {reason}")
        self.name = name
        self.reason = reason


class Lacking(nn.Module):
    """In the place of an object whose class is not to be had here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        """Nothing of it can be used."""


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
        if pid == (NAMESPACE,):
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
