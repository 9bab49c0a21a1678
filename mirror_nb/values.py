"""Values that differ over replicas, and values that stayed in one. Never asks who is current."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import enum
import html
import numbers
import reprlib
import types
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from typing import Any, Never, final

import numpy as np
import torch
from torch.utils import _pytree as pytree

from mirror_nb.errors import ReplicaError, UsageError
from mirror_nb.tensors.layouts import blocks, sizes

Shares = tuple[int, int]
# A replica's examples of a batch, and all replicas'.


class ReduceOp(enum.Enum):
    """How values of several replicas become one."""

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def of(op: object, argument: str = "op") -> ReduceOp:
        """Return the op that `op` means: a ReduceOp, or "sum" or "mean" in any case.

        Raises UsageError for anything else, which names the argument that it was given as.
        """
        known = _BY_NAME.get(op) if isinstance(op, (ReduceOp, str)) else None
        if known is not None:
            return known
        name = str(getattr(op, "name", op)).upper().rpartition(".")[2]
        if name not in ReduceOp.__members__:
            raise UsageError(f"`{argument}` is {reprlib.repr(op)}; it must be ReduceOp.SUM or ReduceOp.MEAN")
        return ReduceOp[name]

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Return the op that a Variable's aggregation is. Raises UsageError for those that reduce nothing."""
        if aggregation is VariableAggregation.SUM or aggregation is VariableAggregation.MEAN:
            return ReduceOp[aggregation.value]
        raise UsageError(
            f"could not convert {aggregation!r} to a ReduceOp: of a Variable's aggregations SUM and MEAN alone are one"
        )


_BY_NAME: dict[object, ReduceOp] = {
    name: op for op in ReduceOp for name in (op, op.value, op.value.lower(), op.value.capitalize())
}


_FLOAT8 = dict.fromkeys(
    (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float32,
)
CARRIERS = {
    **dict.fromkeys((torch.uint16, torch.uint32, torch.uint64), torch.int64),
    **_FLOAT8,
    torch.complex32: torch.complex64,
}
# Torch does not add up all tensors of these dtypes.
_WIDE = {**CARRIERS, torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of a dtype are added up for a mean: one that their sum fits in."""
    fractions = dtype.is_floating_point or dtype.is_complex
    return _WIDE.get(dtype, dtype) if fractions else torch.int64


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a mean is made of: the tensor in the dtype in which it is added up."""
    return tensor.to(wide(tensor.dtype))


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors of one shape and dtype, added up in their order, with the same bits everywhere.

    Rounded once, as an all-reduce does it.
    """
    dtype = parts[0].dtype
    total = parts[0].to(_WIDE.get(dtype, dtype), copy=True)
    for part in parts[1:]:
        total += part.to(total)
    return total.to(dtype)


def mean(total: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `total / count` in the values' `dtype`, in torch's default float where that is whole; NaN for nothing."""
    if dtype.is_floating_point or dtype.is_complex:
        return (total / count).to(dtype)
    return total.to(torch.get_default_dtype()) / count


class VariableAggregation(enum.Enum):
    """What becomes of the values that several replicas assign to one Variable."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class VariableSynchronization(enum.Enum):
    """When the components of a Variable are made one: when written, or when read from outside.

    NONE is one of TensorFlow's names, which no Variable takes: with `aggregation` NONE each replica keeps its own.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class DistributedValues:
    """One value from each replica, in the order of their ids."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """The value of each replica."""
        return self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __getitem__(self, replica_id: int) -> Any:
        return self._values[replica_id]

    def __repr__(self) -> str:
        # TensorFlow's layout (tensorflow/python/distribute/values.py).
        lines = ",\n".join(labelled(i, value) for i, value in enumerate(self._values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"


def labelled(replica_id: int, value: object) -> str:
    """Return the lines of a value below its replica's id; rows of a tensor stand below each other."""
    label = f"  {replica_id}: "
    return label + repr(value).replace("\n", "\n" + " " * len(label))


@final
class PerReplica(DistributedValues):
    """One value from each replica, which may differ.

    `values`, `len()`, iteration and indexing by replica id give the single values. Of dicts, an item that is set or
    deleted is so in each. One that a function has captured is in each replica that replica's value.

    `shares`: of a batch, the number of examples in each replica's part, by which `run` weighs the gradients; the
    notebook alone has it. `absent`: of what a function has made of a batch, the replicas that had no examples of it.
    """

    def __init__(
        self, values: Sequence[Any], *, shares: tuple[int, ...] | None = None, absent: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(values)
        self.shares = shares
        self.absent = absent

    def __getitem__(self, replica_id: Any) -> Any:
        if isinstance(replica_id, int | slice) or hasattr(replica_id, "__index__"):
            try:
                return super().__getitem__(replica_id)
            except IndexError:
                raise IndexError(f"{self._what()}: none at {replica_id!r}, they are counted from 0") from None
        raise UsageError(f"{self._what()}: index it by the replica first, as in value[0][{replica_id!r}]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"'PerReplica' object has no attribute '{name}'")
        raise AttributeError(f"{self._what()}: take one of them, as in value[0].{name}, or {_ONE}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in ("shares", "absent"):
            super().__setattr__(name, value)
        else:
            raise AttributeError(
                f"{self._what()}, where setting `{name}` would change nothing: set it in the replicas"
            )

    def __setitem__(self, key: Any, value: Any) -> None:
        for own in self._dicts(key):
            own[key] = value

    def __delitem__(self, key: Any) -> None:
        having = [own for own in self._dicts(key) if key in own]
        if not having:
            raise KeyError(key)
        for own in having:
            del own[key]

    def _dicts(self, key: Any) -> Sequence[MutableMapping[Any, Any]]:
        """Return the values, dicts, each of which gets an item: a network's hook writes to them here, too."""
        dicts = [value for value in self._values if isinstance(value, MutableMapping)]
        if len(dicts) < len(self) or isinstance(key, int):
            raise UsageError(f"{self._what()}: set and delete items in one of them, value[0], or in the replicas")
        return dicts

    def __contains__(self, item: object) -> bool:
        # Of dicts or lists it would say "no" to whatever each of them has.
        if any(isinstance(value, Container) for value in self._values):
            raise UsageError(f"{self._what()}: ask one of them, as in {item!r} in value[0]")
        return item in self._values

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        raise UsageError(f"{self._what()}: format one of them, as in value[0], or {_ONE}")

    def _what(self) -> str:
        kinds = " or ".join(sorted({type(value).__name__ for value in self._values}))
        return f"this is a PerReplica, which has a value (here {kinds}) from each of {len(self)} replicas"

    def __eq__(self, other: object) -> bool:
        # To Python each would be unlike any number, whatever its values.
        if self is not other and isinstance(other, numbers.Number | torch.Tensor | np.ndarray | PerReplica):
            raise _in_arithmetic()
        return self is other

    __hash__ = object.__hash__

    def __copy__(self) -> PerReplica:
        return PerReplica(self._values, shares=self.shares, absent=self.absent)

    def __deepcopy__(self, memo: dict[int, Any]) -> PerReplica:
        # A copy of a batch weighs gradients as the batch does.
        return PerReplica(copy.deepcopy(self._values, memo), shares=self.shares, absent=self.absent)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _in_arithmetic()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise _in_arithmetic()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        # torch.as_tensor asks for these two; without them it takes a PerReplica for a sequence and joins its values.
        raise _in_arithmetic()

    def __dlpack_device__(self) -> Any:
        raise _in_arithmetic()


_ONE = 'make one value of all with strategy.reduce("mean", value)'


def _in_arithmetic() -> UsageError:
    return UsageError(
        "It looks like you are using a PerReplica object while not inside a replica context, which is not supported. "
        "Run your function inside a replica context by strategy.run, make one value of it by strategy.reduce, or take "
        "one replica's with value[0]"
    )


def _refuse(self: PerReplica, *others: object) -> Never:
    raise _in_arithmetic()


def _refuse_to_be_a_number(self: PerReplica, *others: object) -> Never:
    # As Python says it of what is none: some who ask go on with another way.
    raise TypeError(str(_in_arithmetic()))


for _name in ("__round__", "__index__", "__trunc__", "__floor__", "__ceil__", "__complex__"):
    setattr(PerReplica, _name, _refuse_to_be_a_number)

_OPERATORS = (
    *(
        f"__{side}{op}__"
        for op in (
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"),
            *("and", "or", "xor", "lshift", "rshift"),
        )
        for side in ("", "r")
    ),
    *("__neg__", "__pos__", "__abs__", "__invert__", "__float__", "__int__", "__bool__"),
    *("__lt__", "__le__", "__gt__", "__ge__"),
)
for _name in _OPERATORS:
    setattr(PerReplica, _name, _refuse)


@final
class Mirrored(DistributedValues):
    """One logical value, the same on each replica."""


@final
class Remote:
    """Stands for a value that stayed in the replicas; `fetch()` brings it.

    Passed to a replica (read by a `%%mirrored` cell under any name), it is the value itself.
    """

    def __init__(
        self,
        name: str,
        type_name: str,
        text: str,
        why: str,
        fetch: Callable[[str, int], Any],
        replica_id: int = 0,
        for_good: bool = False,
    ) -> None:
        self.name = self.shown = name
        # Under which the value lies in the replicas, and by which the notebook calls it.
        self.replica_id = replica_id
        self.type_name = type_name
        self.why = why
        self._text = text
        self._fetch = fetch
        self._for_good = for_good
        # As far as is known, `fetch` cannot bring it either.
        self.lost = False
        # The replicas that had it are gone.

    def fetch(self) -> Any:
        """Return the value of replica `replica_id`, whatever its size.

        Raises TransferError if it cannot be pickled, or not be made again here, ReplicaError if the replica no longer
        has it.
        """
        try:
            if not self.lost:
                return self._fetch(self.name, self.replica_id)
        except Exception:
            # This may have been the first to find it out.
            if not self.lost:
                raise
        raise ReplicaError(self.where())

    def __repr__(self) -> str:
        if self.lost:
            return f"<{self.shown}: {self._text}, was in the replicas alone, which have ended: its value is lost>"
        how = "use it in %%mirrored cells" if self._for_good else f".fetch() brings replica {self.replica_id}'s"
        return f"<{self.shown}: {self._text}, in the replicas ({self.why}); {how}>"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("__", "_repr_")):
            raise AttributeError(attribute)
        raise AttributeError(self.where())

    def __setattr__(self, attribute: str, value: Any) -> None:
        if not attribute.startswith("_") and attribute not in _OF_STAND_INS:
            raise AttributeError(self.where())
        super().__setattr__(attribute, value)

    def __eq__(self, other: object) -> bool:
        # To Python it would be unlike any number, whatever its value.
        if isinstance(other, numbers.Number | torch.Tensor | np.ndarray):
            raise UsageError(self.where())
        return self is other

    __hash__ = object.__hash__

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        raise UsageError(self.where())

    def where(self) -> str:
        """Say where the value is, and how to have it."""
        if self.lost:
            was = f"`{self.shown}` ({self.type_name}) was in the replicas alone, which have ended"
            return f"{was}: its value is lost; run the cell that makes it again"
        where = f"`{self.shown}` ({self.type_name}) is in the replicas, not in the notebook"
        how = f": {self.why}" if self._for_good else f", or bring it: {self.shown} = {self.shown}.fetch()"
        return f"{where}: use it in a %%mirrored cell{how}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs or {}))
        raise UsageError(next(one for one in given if isinstance(one, Remote)).where())

    def __reduce__(self) -> Any:
        raise ReplicaError(f"`{self.shown}` stays in the replicas and cannot be pickled; .fetch() brings the value")


_OF_STAND_INS = ("name", "shown", "replica_id", "type_name", "why", "lost")
# Attributes of theirs.


def _refused(self: Remote, *_: object, **__: object) -> Any:
    raise UsageError(self.where())


for _name in (
    *_OPERATORS,
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__len__", "__iter__", "__next__", "__call__"),
    *("__index__", "__complex__", "__enter__", "__exit__", "__array__", "__dlpack__", "__dlpack_device__"),
):
    setattr(Remote, _name, _refused)


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal in type, structure and every bit that counts; NaN equals NaN."""
    try:
        left, shape = pytree.tree_flatten(first)
        right, other = pytree.tree_flatten(second)
    except RecursionError:
        # A container that holds itself: their pickles were compared before.
        return False
    return shape == other and all(map(_same_leaf, left, right))


def _same_leaf(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    try:
        if isinstance(a, torch.Tensor):
            return _same_tensors(a, b)
        if isinstance(a, np.ma.MaskedArray):
            # Equal to NumPy are those that are so where neither is masked.
            return same(a.__getstate__(), b.__getstate__())
        if isinstance(a, np.ndarray):
            floating = a.dtype.kind in "fc"
            return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=floating)
        if isinstance(a, types.FunctionType):
            return a is b or (a.__code__ == b.__code__ and same(_kept(a), _kept(b)))
        if _held_alone(type(a)):
            return a is b or same(object.__reduce_ex__(a, 2)[2], object.__reduce_ex__(b, 2)[2])
        return bool(a == b) or bool(a != a and b != b)
    except Exception:
        # An == that gives no truth value (a data frame, an array of arrays), or an object that holds itself: their
        # pickles were compared before.
        return False


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.layout, sizes(a)) != (b.dtype, b.layout, sizes(b)):
        return False
    # Two that are quantized alike have one scale, too.
    pairs = [(a, b)] if a.is_quantized else zip(blocks(a), blocks(b), strict=True)
    return all(_same_blocks(*pair) for pair in pairs)


def _same_blocks(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype in _FLOAT8 or a.dtype is torch.complex32:
        # torch.equal does not take all of them.
        a, b = widened(a), widened(b)
    fractions = a.is_floating_point() or a.is_complex()
    return torch.equal(a, b) or (fractions and bool(((a == b) | ((a != a) & (b != b))).all()))


def _kept(function: types.FunctionType) -> Any:
    """Return what a function has besides its code and the names that it looks up."""
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__defaults__, function.__kwdefaults__, vars(function), closed


def _held_alone(kind: type) -> bool:
    """Whether objects of a class are what they hold, as far as they have no ways of their own to be compared."""
    ways = ("__reduce__", "__reduce_ex__", "__getstate__", *(() if dataclasses.is_dataclass(kind) else ("__eq__",)))
    return all(getattr(kind, name, None) is getattr(object, name, None) for name in ways)


def merged(values: Sequence[Any]) -> Any:
    """Return the one value if all are the same, else a PerReplica of them."""
    return values[0] if all(same(values[0], value) for value in values[1:]) else PerReplica(values)


# A PerReplica is a leaf to torch's pytrees and pickles by its values.
copyreg.pickle(PerReplica, lambda value: (PerReplica, (value.values,)))
# In a checkpoint it may be read as it stands: it makes nothing but itself.
torch.serialization.add_safe_globals([PerReplica])
