"""Variables: a tensor that knows how several replicas write to it, and how it is read from outside.

Never asks who is current: a Variable is given its home by the place that makes it, and asks that. Knows tensors;
knows no strategy, no process group and no process.

    Variable(value) ─▶ make_variable of the place whose scope this is ─▶ MirroredVariable, SyncOnReadVariable
                    └▶ outside every scope                            ─▶ PlainVariable
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mirror_nb.errors import UsageError
from mirror_nb.tensors.layouts import check_summable
from mirror_nb.values import CARRIERS, VariableAggregation, VariableSynchronization, labelled

_WRITES: dict[str, Callable[..., Tensor]] = {
    "assign": Tensor.copy_,
    "assign_add": Tensor.add_,
    "assign_sub": Tensor.sub_,
}


class VariableHome(Protocol):
    """What a Variable asks of the place that made it."""

    @property
    def num_replicas(self) -> int:
        """Number of its components."""

    def components(self, variable: Variable) -> Mapping[int, Tensor]:
        """Return the components that this place can see, by replica id; talks to no peer."""

    def assign(self, variable: Variable, how: str, value: Any) -> Any:
        """Carry out `how` ("assign", "assign_add", "assign_sub") by the Variable's rule; return what it returns."""

    def read(self, variable: Variable) -> Tensor:
        """Return the value: a replica's own component, or what all of them make together, read from outside."""

    def refresh(self, variable: Variable) -> None:
        """Bring the tensor here up to date; called before each use of its values."""

    def wrote(self, variable: Variable) -> None:
        """The tensor here was written to in place, by `copy_` or another operation of torch."""

    def draft(self, variable: Variable) -> Tensor | None:
        """Return what an operation in place is to write to, and is then assigned; None: the tensor here."""

    def replace(self, variable: Variable, value: Tensor) -> None:
        """Give its components a value of another shape or dtype: its `data` was set, as by `module.half()`."""

    def froze(self, variable: Variable) -> None:
        """The tensor here was told whether it is trained: its `requires_grad` was set."""

    def saved(self, variable: Variable) -> tuple[Tensor, bool]:
        """Return the value to pickle, and whether it is what all components make together.

        Talks to no peer, since one replica may save alone.
        """

    def copy(self, variable: Variable) -> Variable:
        """Return a copy, of the scope that the caller is in, with the same components if that is this place's."""

    def take(self, variable: Variable, value: Tensor) -> None:
        """Give its components here what they have of a value that was read from outside; replicas ask no peer."""

    def is_elsewhere(self, variable: Variable) -> bool:
        """Whether its components are in other processes, and are asked for by themselves: the tensor here is none."""


class Variable(torch.Tensor):
    """A tensor to be read and assigned; in a strategy's scope, one for all of its replicas.

    `initial_value` is a number, a list, an array, a tensor, or a function that returns one. Made in a scope it is a
    MirroredVariable, or with `synchronization` ON_READ a SyncOnReadVariable; outside, a PlainVariable. It takes part
    in torch's arithmetic and autograd as any tensor, and what comes out is a plain tensor; a trainable one of
    floating point requires gradients, and a module that holds it has it among its parameters.

    `aggregation` tells what becomes of the values that replicas assign in `strategy.run`: SUM or MEAN of them (of
    whole numbers one that is whole), replica 0's (ONLY_FIRST_REPLICA), or each its own (NONE). Trainable is the
    default, but with ON_READ. None leaves an option out, as in TensorFlow.

    Raises UsageError for `synchronization` NONE, for values that are no tensor and for a `dtype` that is not torch's.
    Source: tf.Variable, tf.distribute's MirroredVariable and SyncOnReadVariable.
    """

    _home: VariableHome | None
    _trainable: bool
    _aggregation: VariableAggregation
    _synchronization: VariableSynchronization
    _label: str | None
    _kind: str
    # Its class in the place that made it: one of a cell, say, which the notebook has as a PlainVariable.
    warned: bool

    def __new__(
        cls,
        initial_value: Any,
        trainable: bool | None = None,
        *,
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
        synchronization: VariableSynchronization | str | None = VariableSynchronization.AUTO,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> Variable:
        if cls is not Variable:
            raise UsageError(f"a {cls.__name__} cannot be made by itself; call Variable(...) in the strategy's scope")
        rule = _member(VariableAggregation, aggregation, "aggregation")
        when = _member(
            VariableSynchronization, "AUTO" if synchronization is None else synchronization, "synchronization"
        )
        if when is VariableSynchronization.NONE:
            raise UsageError(
                "`NONE` variable synchronization mode is not supported: leave `synchronization` out, or take ON_READ "
                "with aggregation=VariableAggregation.NONE to let each replica keep its own value"
            )
        make = _making() or plain
        return make(
            first_tensor(initial_value, _dtype(dtype)),
            trainable=when is not VariableSynchronization.ON_READ if trainable is None else bool(trainable),
            aggregation=rule,
            synchronization=when,
            name=name,
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything was done by __new__."""

    # ------------------------------------------------------------------ what it is

    @property
    def trainable(self) -> bool:
        """Whether it is meant to be trained."""
        return self._trainable

    @property
    def aggregation(self) -> VariableAggregation:
        """What becomes of the values that several replicas assign."""
        return self._aggregation

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the components are made one."""
        return self._synchronization

    @property
    def home(self) -> VariableHome | None:
        """The place that made it; None for a PlainVariable."""
        return self._home

    @property
    def is_read_together(self) -> bool:
        """Whether it is one of a place whose components are made one when it is read from outside."""
        return self._kind == SyncOnReadVariable.__name__

    @property
    def name(self) -> str:
        """Its name, "Variable" where none was given."""
        return self._label or "Variable"

    @property
    def values(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The components that can be seen here: in the controller one a replica, in a replica its own."""
        return tuple(self._components().values())

    def _components(self) -> Mapping[int, Tensor]:
        return {0: component(self)} if self._home is None else self._home.components(self)

    # ------------------------------------------------------------------ writing and reading

    def assign(self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        """Set the value, of the same shape; by the Variable's aggregation where replicas do it in `strategy.run`.

        Returns the new value there, a tensor, and elsewhere the Variable; with `read_value=False` nothing.
        `use_locking` and `name` are tf.Variable's, and change nothing. Raises UsageError for another shape, for a
        dtype that it cannot hold, and for what its aggregation does not allow.
        """
        return self._assign("assign", value, read_value)

    def assign_add(self, delta: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        """Add `delta` to the value; else as `assign`."""
        return self._assign("assign_add", delta, read_value)

    def assign_sub(self, delta: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        """Subtract `delta` from the value; else as `assign`. Raises UsageError where they are flags."""
        if self.dtype is torch.bool:
            raise UsageError(
                f"cannot assign_sub to {self.name}, which holds flags; assign the flags that it is to have"
            )
        return self._assign("assign_sub", delta, read_value)

    def _assign(self, how: str, value: Any, read_value: bool) -> Any:
        assigned = self._assigned(how, value)
        return assigned if read_value else None

    def _assigned(self, how: str, value: Any) -> Any:
        if self._home is not None:
            return self._home.assign(self, how, value)
        if self._aggregation is not VariableAggregation.NONE and _of_several():
            raise UsageError(
                f"cannot {how} to {self.name} on one of several replicas: it was made outside this strategy's scope, "
                f"where nothing makes their values one by {self._aggregation.value}. Make it inside `with "
                "strategy.scope():`, or without `aggregation` to let each replica keep its own"
            )
        apply_assign(self, how, value)
        # As with several replicas: what `run` returns is the value of now.
        return component(self) if _is_on_replica() else self

    def read_value(self) -> Tensor:
        """Return a copy of the value, a plain tensor: on a replica its own, from outside the aggregated one."""
        return component(self) if self._home is None else self._home.read(self)

    value = read_value

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy of the value as an array."""
        return self.read_value().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.numpy(), dtype=dtype)

    def __float__(self) -> float:
        return float(self.read_value())

    def __int__(self) -> int:
        return int(self.read_value())

    # ------------------------------------------------------------------ as a tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if getattr(func, "__self__", None) in _ABOUT or name in _ABOUT_CALLS:
            # Shape, dtype, gradient and the like: not the values.
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            if name in _FREEZES and func in _FREEZING and args[0]._home is not None:
                args[0]._home.froze(args[0])
            return result
        if getattr(func, "__module__", "") == "torch.distributed.distributed_c10d":
            # What processes tell each other of a tensor is each one's own.
            args, kwargs = pytree.tree_map_only(Variable, bare, (args, kwargs))
            return func(*args, **kwargs)
        if name in _CONVERSIONS and isinstance(args[0], SyncOnReadVariable):
            with torch._C.DisableTorchFunctionSubclass():
                unchanged = func(*args, **kwargs) is args[0]
            if unchanged:
                # As torch has it: nothing is copied. So a module's `to` leaves it the buffer that it is.
                return args[0]
        if name in _CONVERSIONS and _is_cast(args[0]):
            converted = func(component(args[0]), *args[1:], **kwargs)
            if converted.device == args[0].device:
                # Components that are made one when they are read keep their dtype.
                if converted.dtype is not args[0].dtype and not args[0].is_read_together:
                    args[0].data = args[0].detach().to(converted.dtype)
                return args[0]
        if func == _DATA.__get__ and args[0]._home is not None:
            # Autograd counts what is written to this, so that it is noticed.
            return args[0].detach()
        if func == _DATA.__set__ and args[0]._home is not None:
            # A module sets what it has not converted to itself.
            if args[1] is not args[0]:
                args[0]._set_data(args[1])
            return None
        targets = _targets(name, args, kwargs)
        if name == "copy_" and targets and isinstance(targets[0], SyncOnReadVariable):
            # What load_state_dict does: the value that was read from outside comes back as such, in the Variable's
            # dtype, which that of a mean is not.
            whole = component(targets[0])
            torch.Tensor.copy_(whole, *args[1:], **kwargs)
            targets[0].assign(whole)
            return targets[0]
        written = {id(target): _to_write(target) for target in targets}
        args, kwargs = _current(args, written), _current(kwargs, written)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        for target in targets:
            if written[id(target)] is not target:
                target.assign(written[id(target)])
            elif target._home is not None:
                target._home.wrote(target)
        return next((target for target in targets if written[id(target)] is result), result)

    def _set_data(self, value: Tensor) -> None:
        if alike(self, value):
            with torch.no_grad():
                self.copy_(value)
        elif self.is_read_together:
            raise UsageError(
                f"cannot set `data` of {self.name} to a tensor of {value.dtype} and shape {tuple(value.shape)}: its "
                f"components, of {self.dtype} and shape {tuple(self.shape)}, are made one when it is read; make a "
                "Variable of that kind anew"
            )
        elif self._home is not None:
            self._home.replace(self, value.detach())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # TensorFlow's layout, torch's own repr inside.
        lines = ",\n".join(labelled(i, value) for i, value in self._components().items())
        return f"{type(self).__name__}:{{\n{lines}\n}}"

    def __format__(self, specification: str) -> str:
        return format(self.read_value(), specification) if specification else repr(self)

    # ------------------------------------------------------------------ copies

    def _options(self) -> dict[str, Any]:
        return {
            "trainable": self._trainable,
            "aggregation": self._aggregation,
            "synchronization": self._synchronization,
            "name": self._label,
        }

    def __reduce_ex__(self, protocol: Any) -> Any:
        value, whole = (component(self), True) if self._home is None else self._home.saved(self)
        return rebuild, (self._kind, value, self._options(), self.requires_grad, whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        if id(self) not in memo:
            memo[id(self)] = copy_of(self, component(self)) if self._home is None else self._home.copy(self)
        made: Variable = memo[id(self)]
        return made


@final
class PlainVariable(Variable):
    """A Variable of this process alone, made outside every scope."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Variable({component(self)!r})"


@final
class MirroredVariable(Variable):
    """A Variable with a copy on each replica, kept equal when it is written."""


@final
class SyncOnReadVariable(Variable):
    """A Variable that each replica writes by itself; read from outside, its components are aggregated."""


# --------------------------------------------------------------------------- making


def _dtype(dtype: Any) -> torch.dtype | None:
    """Return torch's dtype, or one of Python's types, which torch takes too; others are told its name."""
    if dtype is None or isinstance(dtype, torch.dtype) or any(dtype is kind for kind in (bool, int, float, complex)):
        return dtype
    name = str(getattr(dtype, "__name__", dtype))
    named = f"write torch.{name}" if isinstance(getattr(torch, name, None), torch.dtype) else "give one of torch's"
    raise UsageError(f"`dtype` is {dtype!r}; {named}, or leave it out to have that of the value")


def first_tensor(value: Any, dtype: torch.dtype | None) -> Tensor:
    """Return a new tensor of `value`: a number, a list, an array, a tensor, or a function that returns one."""
    if callable(value) and not isinstance(value, Tensor):
        value = value()
    try:
        if isinstance(value, Tensor):
            return value.detach().to(dtype=dtype, copy=True) if dtype else value.detach().clone()
        return torch.as_tensor(value, dtype=dtype).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"a Variable holds numbers, not {value!r:.200}: {error}") from error


def plain(value: Tensor, **options: Any) -> PlainVariable:
    """Make a Variable of this process alone."""
    made = _build(PlainVariable, value, None, options)
    assert isinstance(made, PlainVariable)
    return made


def distributed(value: Tensor, home: VariableHome, **options: Any) -> Variable:
    """Make the Variable of a place: a SyncOnReadVariable with ON_READ, else a MirroredVariable."""
    on_read = options["synchronization"] is VariableSynchronization.ON_READ
    return _build(SyncOnReadVariable if on_read else MirroredVariable, value, home, options)


def component_variable(variable: Variable, own: Tensor | None = None) -> PlainVariable:
    """Return a component as a Variable of its own, on the same memory; without `own` this process's component."""
    options = {**variable._options(), "trainable": False}
    made = _build(PlainVariable, bare(variable if own is None else own), None, options)
    assert isinstance(made, PlainVariable)
    return made


def _build(kind: type[Variable], value: Tensor, home: VariableHome | None, options: Mapping[str, Any]) -> Variable:
    if value.is_inference():
        # Of such tensors autograd does not count the writes.
        with torch.inference_mode(False):
            value = value.clone()
    learns = options["trainable"] and (value.is_floating_point() or value.is_complex())
    made: Variable = torch.Tensor._make_subclass(kind, value, learns)
    made._home = home
    made._trainable = options["trainable"]
    made._aggregation = options["aggregation"]
    made._synchronization = options["synchronization"]
    made._label = options["name"]
    made._kind = kind.__name__
    made.warned = False
    if learns:
        # torch's own mark for what isinstance(…, nn.Parameter) is true of: modules register it.
        made._is_param = True
    return made


Make = Callable[..., Variable]

_scope: Callable[[], Make | None] | None = None
_arrival: Make | None = None
_on_replica: Callable[[], bool] | None = None
_replicas: Callable[[], int] | None = None


def provide_scope(find: Callable[[], Make | None]) -> None:
    """Say how the maker of the scope that the caller is in is found; it returns None outside every scope."""
    global _scope
    _scope = find


def provide_replica(ask: Callable[[], bool], count: Callable[[], int]) -> None:
    """Say how it is found whether the caller's code is one replica's alone, in `strategy.run`, and of how many."""
    global _on_replica, _replicas
    _on_replica, _replicas = ask, count


def _is_on_replica() -> bool:
    return _on_replica is not None and _on_replica()


def _of_several() -> bool:
    return _is_on_replica() and _replicas is not None and _replicas() > 1


def provide_arrivals(make: Make) -> None:
    """Say who makes the Variables that arrive in this process by pickle: a replica's place."""
    global _arrival
    _arrival = make


def _making() -> Make | None:
    return _scope() if _scope is not None and not _arriving else None


_arriving = False


@contextmanager
def arriving() -> Iterator[None]:
    """Within it what is unpickled comes from another process: nobody makes it in the scope that the caller is in."""
    global _arriving
    before, _arriving = _arriving, True
    try:
        yield
    finally:
        _arriving = before


def copy_of(variable: Variable, value: Tensor, whole: bool = True) -> Variable:
    """Return a Variable like this one; see `rebuild`."""
    return rebuild(variable._kind, value, variable._options(), variable.requires_grad, whole)


def rebuild(
    kind: str, value: Tensor, options: dict[str, Any], trained: bool | None = None, whole: bool = False
) -> Variable:
    """Make a Variable of what was pickled or copied: on a replica and in a scope one of that place, else a plain one.

    `value` is this process's component as it is, or with `whole` what all components make together: no peer is asked,
    whatever the aggregation. `trained`: its `requires_grad`, None as it was made. A plain one remembers its `kind`,
    so that it is that again where it comes to a replica.
    """
    made: Variable
    make = _making()
    if _arrival is not None and (kind != PlainVariable.__name__ or make is not None):
        sums = kind == SyncOnReadVariable.__name__ and options["aggregation"] is VariableAggregation.SUM
        made = _arrival(torch.zeros_like(value) if sums and _of_a_peer else value, **options)
    elif make is not None:
        made = make(value, **options)
    else:
        made = plain(value, **options)
        made._kind = kind
    if whole and made.home is not None:
        take_from_outside(made, value)
    if trained is not None and made.requires_grad != trained:
        made.requires_grad = trained
    return made


# What `torch.save` wrote of a Variable, `torch.load` reads as it stands: these three make nothing else.
torch.serialization.add_safe_globals([rebuild, VariableAggregation, VariableSynchronization])


_of_a_peer = False


@contextmanager
def of_a_peer() -> Iterator[None]:
    """Within it Variables arrive that are another replica's: what that has counted is counted there."""
    global _of_a_peer
    _of_a_peer = True
    try:
        yield
    finally:
        _of_a_peer = False


def is_component(value: Any) -> bool:
    """For the controller: whether it is a Variable that a replica's function has made and returned."""
    return isinstance(value, Variable) and value._home is None and value._kind != PlainVariable.__name__


def one_of(components: Sequence[Variable], make: Make) -> Variable:
    """Return a Variable made as these were, with the first one's value."""
    first = components[0]
    made = make(component(first), **first._options())
    if made.requires_grad != first.requires_grad:
        made.requires_grad = first.requires_grad
    return made


def set_trained(variable: Variable, trained: bool) -> None:
    """For the controller: have the replica that this is called on train the Variable, or not."""
    variable.requires_grad = trained


# --------------------------------------------------------------------------- the rules


def component(variable: Variable) -> Tensor:
    """Return a copy of the component in this process, a plain tensor."""
    return bare(variable).clone()


def update_component(variable: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `fn` with the component in this process, or with what is no Variable; its result has no Variables."""
    own = component_variable(variable) if isinstance(variable, Variable) else variable
    return pytree.tree_map_only(Variable, component, fn(own, *args, **kwargs))


def read_components(variables: Sequence[Variable]) -> tuple[Tensor, ...]:
    """For the controller: the components of the replica that this is called on."""
    return tuple(map(component, variables))


def copy_component(variable: Variable, copy: Variable) -> None:
    """For the controller: give the copy the component of the replica that this is called on."""
    bare(copy).copy_(bare(variable))


def apply_assign(variable: Variable, how: str, value: Any) -> None:
    """Write to the component in this process, with no word to the peers."""
    tensor, own = as_value(variable, how, value), bare(variable)
    with torch.no_grad():
        if own.dtype in CARRIERS and how != "assign":
            carrier = CARRIERS[own.dtype]
            own.copy_(_WRITES[how](own.to(carrier), tensor.to(carrier)))
        else:
            _WRITES[how](own, tensor)


def set_data(variable: Variable, value: Tensor) -> None:
    """Make a value that may be of another shape or dtype the component in this process."""
    with torch._C.DisableTorchFunctionSubclass():
        variable.data = value


def replace_component(variable: Variable, value: Tensor) -> None:
    """For the controller: likewise, on the replica that this is called on, where its components are."""
    set_data(variable, value.to(bare(variable).device, copy=True))


def take_from_outside(variable: Variable, value: Tensor) -> None:
    """Give the components of this place what they have of a value that was read from outside."""
    assert variable.home is not None
    variable.home.take(variable, value)


def as_value(variable: Variable, how: str, value: Any) -> Tensor:
    """Return `value` as a tensor of the Variable's shape, dtype and device.

    Raises UsageError for another shape, for a dtype that would lose what the value holds, and for a tensor that torch
    adds to no others.
    """
    own = bare(variable)
    try:
        with torch.no_grad():
            if isinstance(value, Variable):
                tensor = value.read_value()
            else:
                tensor = torch.as_tensor(value, device=value.device if isinstance(value, Tensor) else "cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"cannot {how} {value!r:.200} to {variable.name}: {error}") from error
    check_summable(tensor, how)
    if own.layout is torch.strided:
        tensor = tensor.to_dense()
    if tensor.shape != own.shape:
        raise UsageError(
            f"cannot {how} a value of shape {tuple(tensor.shape)} to {variable.name} of shape {tuple(own.shape)}"
        )
    if not torch.can_cast(tensor.dtype, own.dtype):
        raise UsageError(
            f"cannot {how} a value of {tensor.dtype} to {variable.name} of {own.dtype}; make the Variable of that "
            "dtype, or convert the value with .to(dtype)"
        )
    exact = isinstance(value, Tensor) or tensor.dtype is torch.bool
    if exact or (how != "assign" and not (own.is_floating_point() or own.is_complex())):
        return tensor.to(own.device, own.dtype)
    try:
        # Once more: numbers of Python's became torch's default dtype, which may round them, or hides an overflow.
        return torch.as_tensor(value, dtype=own.dtype, device=own.device)
    except (RuntimeError, OverflowError) as error:
        raise UsageError(f"cannot {how} {value!r:.200} to {variable.name} of {own.dtype}: {error}") from error


# --------------------------------------------------------------------------- as a tensor


_DATA: Any = torch.Tensor.data


def _is_cast(given: Any) -> bool:
    """Whether a module converts this Variable, a buffer of it: torch would put a plain tensor in its place.

    Or a parameter that is made one when it is read, which keeps its dtype.
    """
    if not isinstance(given, Variable) or torch.compiler.is_compiling():
        return False
    # Below are `__torch_function__`, and the function that the module applies to each tensor.
    caller = sys._getframe(2).f_back
    if caller is None or caller.f_code is not _APPLY:
        return False
    # One that is trained is a parameter to torch, and may be a buffer all the same.
    module = caller.f_locals["self"]
    held = [*module._buffers.values(), *(module._parameters.values() if given.is_read_together else ())]
    return any(tensor is given for tensor in held)


_APPLY = getattr(getattr(torch.nn.Module, "_apply", None), "__code__", None)


def is_apart(tensor: Any) -> bool:
    """Whether it is a Variable of which each replica has a value of its own, until it is read from outside."""
    return isinstance(tensor, Variable) and tensor.is_read_together


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether one can take the place of the other as it is: of its shape, dtype and device."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def writes_to(variable: Variable) -> int:
    """Return how often the tensor here was written to, as autograd counts it; writes by its views are among them."""
    with torch._C.DisableTorchFunctionSubclass():
        return variable._version


def bare(tensor: Tensor) -> Tensor:
    """Return a tensor, of a Variable the component in this process, as a plain one on the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def _about(names: Sequence[str]) -> frozenset[Any]:
    return frozenset(getattr(Tensor, name) for name in names if hasattr(Tensor, name))


_ABOUT = _about(
    (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "grad_fn", "_version",
        "is_cuda", "is_cpu", "is_sparse", "is_meta", "is_quantized", "is_nested", "retains_grad", "_backward_hooks",
        "_post_accumulate_grad_hooks", "output_nr", "itemsize", "nbytes", "names", "_base", "is_mps", "is_xpu",
    )
)  # fmt: skip
_CONVERSIONS = frozenset(
    {
        "to", "type", "type_as", "cpu", "cuda", "contiguous", "float", "double", "half", "bfloat16", "int", "long",
        "short", "char", "byte", "bool",
    }
)  # fmt: skip
_FREEZES = frozenset({"requires_grad_", "__set__"})
_FREEZING = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_ABOUT_CALLS = frozenset(
    {
        "dim", "size", "stride", "numel", "nelement", "is_floating_point", "is_complex", "__hash__", "requires_grad_",
        "share_memory_",
    }
)  # fmt: skip


def _writes(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


_IN_PLACE = frozenset(
    {"__setitem__"}
    | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
    | {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}
)


def _targets(name: str, args: Any, kwargs: Mapping[str, Any]) -> list[Variable]:
    """Return the Variables that an operation of this name is to write to.

    `v.add_(1)`, `torch.add(a, b, out=v)`, `torch._foreach_add_([v, w], 1)`, `nn.init.zeros_(v)`
    """
    found: list[Any] = [kwargs.get("out")]
    if _writes(name):
        # The functions of `nn.init` come without arguments that have no name.
        found.append(args[0] if args else kwargs.get("tensor"))
    flat = (item for one in found for item in (one if type(one) in (tuple, list) else (one,)))
    return [item for item in flat if isinstance(item, Variable)]


def _to_write(variable: Variable) -> Tensor:
    """Return what an operation in place writes to: the Variable, up to date, or a draft, to be assigned to it."""
    home = variable._home
    draft = None if home is None else home.draft(variable)
    if home is not None and draft is None:
        home.refresh(variable)
    return variable if draft is None else draft


def _current(nest: Any, written: Mapping[int, Tensor]) -> Any:
    """Return the arguments of an operation with the Variables among them up to date; `written`: its targets, by id."""
    if isinstance(nest, Variable):
        return written[id(nest)] if id(nest) in written else _current_value(nest)
    if type(nest) in (tuple, list):
        return type(nest)(_current(item, written) for item in nest)
    if type(nest) is dict:
        return {key: _current(item, written) for key, item in nest.items()}
    return nest


def _current_value(variable: Variable) -> Tensor:
    home = variable._home
    if home is None:
        return variable
    if isinstance(variable, SyncOnReadVariable) and not _is_on_replica():
        whole = home.read(variable)
        if not (variable.requires_grad and torch.is_grad_enabled()):
            return whole
        # Its gradient is each component's, as in `strategy.run`.
        with torch._C.DisableTorchFunctionSubclass():
            learnt = variable.clone()
            learnt.data.copy_(whole)
            return learnt
    home.refresh(variable)
    return variable


def _member(kind: Any, value: Any, argument: str) -> Any:
    if isinstance(value, kind):
        return value
    name = str(getattr(value, "name", value)).upper().rpartition(".")[2]
    if name not in kind.__members__:
        raise UsageError(f"`{argument}` is {value!r}; it must be one of {', '.join(kind.__members__)}")
    return kind[name]
