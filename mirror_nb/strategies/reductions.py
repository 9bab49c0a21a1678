"""From the values of all replicas one, and from their results a nest of PerReplica: pure functions on lists.

Knows tensors, nests (torch's pytrees), PerReplica and what a Variable shows. Knows no place: whoever has the values of
all replicas together calls these, the controller and a `merge_call` alike.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from mirror_nb.collectives.headers import shown
from mirror_nb.errors import UsageError
from mirror_nb.tensors.layouts import check_summable
from mirror_nb.values import CARRIERS, DistributedValues, PerReplica, ReduceOp, added, mean, widened
from mirror_nb.variables import Variable, is_component

_SHOWN, _AROUND = 400, 40
# Characters of a structure in an error, and of what is alike beside what differs.

# --------------------------------------------------------------------------- one value from many


def reduce_values(
    op: ReduceOp, values: Sequence[Any], axis: tuple[int, ...] | None, absent: Collection[int] = ()
) -> Tensor:
    """Return the replicas' `values`, tensors, arrays or numbers, as one tensor, on the first one's device.

    Without `axis` they are added element by element, and the mean divides by their number. With it each is summed
    over these dimensions first, and the mean divides by the true number of elements; an empty one counts 0.
    `absent`: replicas that had no examples, of which a mean does not count.

    Sums keep the dtype, or widen as torch.sum does; a mean of integers is of torch's default float.
    Raises UsageError for shapes or dtypes that differ, for an axis that is not there, and for what is no number.
    """
    tensors = _one_device(_alike([as_tensor(value, "reduce") for value in values], values, "reduce"))
    parts = [sum_over(tensor if op is ReduceOp.SUM else widened(tensor), axis) for tensor in tensors]
    check_shapes([tuple(part.shape) for part in parts], "reduce", [tuple(tensor.shape) for tensor in tensors])
    if axis is None:
        there = [part for i, part in enumerate(parts) if not (i in absent and is_mean_of_none(part))]
        parts = there or parts
    total = added(parts)
    if op is ReduceOp.SUM:
        return total
    count = len(parts) if axis is None else sum(counted(tensor, axis) for tensor in tensors)
    return mean(total, count, tensors[0].dtype)


def is_mean_of_none(value: Any) -> bool:
    """Whether this may be a mean, a loss for instance, of no examples: NaN."""
    if isinstance(value, float):
        return math.isnan(value)
    fractions = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return fractions and bool(value.isnan().all())


def gather_values(values: Sequence[Any], axis: int) -> Tensor:
    """Return the replicas' tensors joined along `axis`, on the first one's device; sizes may differ along it alone.

    Raises UsageError for other sizes or dtypes that differ, for scalars, and for an axis that is not there.
    """
    tensors = _one_device([as_tensor(value, "gather").detach() for value in values])
    dims = {checked_axis(axis, tensor, "gather") for tensor in tensors}
    ranks = {tensor.ndim for tensor in tensors}
    shapes = [_without(tuple(tensor.shape), min(dims)) for tensor in tensors] if len(ranks) == 1 else []
    if len(ranks) > 1 or len(set(shapes)) > 1 or len({tensor.dtype for tensor in tensors}) > 1:
        forms = ", ".join(f"{shown(tensor)} on replica {i}" for i, tensor in enumerate(tensors))
        raise UsageError(f"cannot gather {forms}: dtypes and all sizes but that of axis {axis} must be equal")
    return torch.cat(tensors, min(dims))


def reduce_local(op: ReduceOp, value: Any, axis: tuple[int, ...] | None, num_replicas: int) -> Tensor:
    """Reduce a leaf whose parts are all here; what is not distributed stands for one equal value on each replica.

    `run` returns a number that is equal on all replicas as that number, so a sum counts it once a replica; of a
    Variable each replica's component counts. Raises UsageError for the sum of one tensor, which belongs to no replica
    (as tf.distribute does), and for values of more or fewer replicas.
    """
    value = components(value)
    if isinstance(value, DistributedValues):
        check_size(value, num_replicas)
        return reduce_values(op, value.values, axis, value.absent if isinstance(value, PerReplica) else ())
    if op is ReduceOp.SUM and num_replicas > 1 and isinstance(value, Tensor | np.ndarray):
        raise not_distributed(value, op)
    return reduce_values(op, [value] * num_replicas, axis)


def gather_local(value: Any, axis: int, num_replicas: int) -> Tensor:
    """Gather a leaf whose parts are all here; a tensor that is not distributed is returned alone.

    Of a Variable each replica's component counts. Raises UsageError for values of more or fewer replicas.
    """
    value = components(value)
    if not isinstance(value, DistributedValues):
        return gather_values([value], axis)
    check_size(value, num_replicas)
    return gather_values(value.values, axis)


def components(leaf: Any) -> Any:
    """Return the components of a Variable that can be seen here, one a replica as a PerReplica; else the leaf."""
    if not isinstance(leaf, Variable):
        return leaf
    values = leaf.values
    return values[0] if len(values) == 1 else PerReplica(values)


def check_size(value: DistributedValues, num_replicas: int) -> None:
    """Raise UsageError for a value that has not one part a replica."""
    if len(value) != num_replicas:
        raise UsageError(
            f"this {type(value).__name__} has {len(value)} values, but the strategy has {num_replicas} replicas: it "
            "belongs to another strategy"
        )


def not_distributed(value: Any, op: ReduceOp) -> UsageError:
    """The error for one value where one a replica is needed; tf.distribute's, and what to do."""
    return UsageError(
        f"A non-DistributedValues value {value} cannot be reduced with the given reduce op {op}. It is one value, "
        "not one of each replica: give what strategy.run returned, or inside a replica a tensor "
        f"(torch.tensor({value if is_number(value) else '…'})), to have one counted for each replica"
    )


# --------------------------------------------------------------------------- the steps of a reduction


def is_number(value: Any) -> bool:
    """Whether a value is a Python or NumPy number."""
    return isinstance(value, numbers.Number | np.generic)


def as_tensor(value: Any, what: str, device: torch.device | None = None) -> Tensor:
    """Return a tensor, an array, a size or a number as a dense tensor. Raises UsageError for anything else."""
    if not isinstance(value, Tensor | np.ndarray | torch.Size) and not is_number(value):
        kind = type(value).__name__
        # Of a nest its leaves come here: it is one replica's.
        instead = f"; give a {kind} of PerReplica" if isinstance(value, (list, tuple, dict)) else ""
        raise UsageError(
            f"cannot {what} a {kind} ({_short(value)}){' of each replica' if instead else ''}: only tensors, arrays, "
            f"numbers and nests of them{instead}"
        )
    if isinstance(value, Tensor):
        check_summable(value, what)
    try:
        # A default device of the user's is for what they make themselves; torch would move tensors there, too.
        known = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        what_it_is = f"an array of dtype {value.dtype}" if hasattr(value, "dtype") else f"the number {_short(value)}"
        raise UsageError(f"cannot {what} {what_it_is}: {error}; make it a tensor or a float") from error
    tensor = torch.as_tensor(known, device=device or known.device)
    if tensor.layout is not torch.strided:
        raise UsageError(f"cannot {what} a tensor in layout {tensor.layout}; make it dense with .to_dense()")
    return tensor


def sum_over(tensor: Tensor, axis: tuple[int, ...] | None) -> Tensor:
    """Return what a replica adds to a sum: its tensor, summed over `axis`; flags are counted."""
    counted_flags = (tensor.long() if tensor.dtype is torch.bool else tensor).detach()
    if not axis:
        return counted_flags
    total = counted_flags.to(CARRIERS.get(tensor.dtype, counted_flags.dtype)).sum(checked_axes(axis, tensor))
    return total.to(sum_dtype(tensor.dtype, axis))


def sum_dtype(dtype: torch.dtype, axis: tuple[int, ...] | None) -> torch.dtype:
    """Return the dtype of `sum_over` of a tensor of this one."""
    fractions = dtype.is_floating_point or dtype.is_complex
    return torch.int64 if dtype is torch.bool or (axis and not fractions) else dtype


def counted(tensor: Tensor, axis: tuple[int, ...]) -> int:
    """Return how many elements went into each element of `sum_over`."""
    return math.prod(tensor.shape[dim] for dim in checked_axes(axis, tensor))


def checked_axes(axis: tuple[int, ...], tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions that `axis` means. Raises UsageError for one that is not there or that is there twice."""
    dims = tuple(checked_axis(single, tensor, "reduce") for single in axis)
    if len(set(dims)) < len(dims):
        raise UsageError(f"`axis` {axis} names a dimension twice, of a tensor of shape {tuple(tensor.shape)}")
    return dims


def checked_axis(axis: Any, tensor: Tensor, what: str) -> int:
    """Return the dimension that `axis` means, from 0. Raises UsageError where there is none."""
    try:
        dim = operator.index(axis)
    except TypeError:
        dim = None
    if dim is None or isinstance(axis, bool):
        raise UsageError(f"`axis` must be an integer, not {reprlib.repr(axis)}")
    if not -tensor.ndim <= dim < tensor.ndim:
        instead = "a scalar has none" if tensor.ndim == 0 else f"it has {tensor.ndim} dimensions"
        raise UsageError(f"cannot {what} a tensor of shape {tuple(tensor.shape)} over axis {axis}: {instead}")
    return dim % tensor.ndim


def check_shapes(shapes: Sequence[tuple[int, ...]], what: str, given: Sequence[tuple[int, ...]]) -> None:
    """Raise UsageError where the replicas' shapes differ."""
    if len(set(shapes)) > 1:
        named = ", ".join(f"{shape} on replica {i}" for i, shape in enumerate(given))
        raise UsageError(
            f"cannot {what} tensors of different shapes: {named}; with axis=0 (or another) each is reduced over that "
            "dimension first, and only the others must be equal"
        )


def common_dtype(dtypes: Sequence[torch.dtype], weak: Sequence[bool]) -> torch.dtype | None:
    """Return the dtype that the replicas' values have in common; None where tensors differ.

    `weak` marks numbers: as in torch's arithmetic they take the tensors' dtype if that can hold their kind.
    """
    strong = {dtype for dtype, number in zip(dtypes, weak, strict=True) if not number}
    if len(strong) > 1:
        return None
    return max((*strong, *dtypes), key=_kind)


def _kind(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1 if dtype is not torch.bool else 0


def _alike(tensors: list[Tensor], values: Sequence[Any], what: str) -> list[Tensor]:
    dtype = common_dtype([tensor.dtype for tensor in tensors], [is_number(value) for value in values])
    if dtype is None:
        forms = ", ".join(f"{shown(tensor)} on replica {i}" for i, tensor in enumerate(tensors))
        raise UsageError(f"cannot {what} tensors of different dtypes: {forms}; convert them to one with .to(dtype)")
    return [tensor.to(dtype) for tensor in tensors]


def _one_device(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to(tensors[0].device) for tensor in tensors]


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


# --------------------------------------------------------------------------- nests


def regroup(results: Sequence[Any], join: Callable[[Sequence[Any]], Any] | None = None) -> Any:
    """Return the nest of PerReplica that the replicas' `results`, nests of equal structure, make together.

    A leaf that is the same object, or an equal immutable Python value (None, a number, a string, …), on all
    replicas stays that one; tensors and everything else become a PerReplica, lists of strings that differ in length
    too. With one replica its result.
    `join` makes one Variable of those that all replicas have made and returned.
    Source: tf.distribute's `regroup`. Raises UsageError that shows two structures that differ.
    """
    if all(type(result) in _LEAVES for result in results):
        # The usual loss, or nothing: no structure to take apart.
        return _group(results, join) if len(results) > 1 else results[0]
    if len(results) == 1:
        return results[0] if join is None else _replaced(results[0], is_component, lambda own: join([own]))
    flat, specs = _flattened(results, is_whole)
    if any(spec != specs[0] for spec in specs[1:]):
        ordered = [_ordered_like(results[0], result, i, results) for i, result in enumerate(results)]
        flat, specs = _flattened(ordered, is_whole)
        if any(spec != specs[0] for spec in specs[1:]):
            flat, specs = _flattened(ordered, _is_whole_or_names)
    return pytree.tree_unflatten([_group(leaves, join) for leaves in zip(*flat, strict=True)], specs[0])


def _flattened(nests: Sequence[Any], is_leaf: Callable[[Any], bool]) -> tuple[Sequence[list[Any]], Sequence[Any]]:
    """Return the leaves of each nest, and how each is made of them."""
    flat, specs = zip(*(pytree.tree_flatten(nest, is_leaf=is_leaf) for nest in nests), strict=True)
    return flat, specs


def _is_whole_or_names(node: Any) -> bool:
    return is_whole(node) or _lists_names(node)


def _lists_names(node: Any) -> bool:
    """Whether it is a list of strings, of which replicas have as many as they have examples."""
    return type(node) in (list, tuple) and all(isinstance(item, str | bytes) for item in node)


def is_whole(node: Any) -> bool:
    """Whether it is a tuple that cannot hold a PerReplica, or anything else, in the place of its members.

    Of a torch.Size that was taken apart, torch's pytrees make a plain tuple.
    """
    return isinstance(node, PackedSequence | torch.Size)


def select(nest: Any, replica_id: int) -> Any:
    """Return what one replica gets of a nest: its part of each PerReplica, everything else as it is.

    Containers without a PerReplica in them are the very objects that were given.
    """

    def part(values: DistributedValues) -> Any:
        if replica_id >= len(values):
            raise UsageError(f"a {type(values).__name__} of {len(values)} values has none for replica {replica_id}")
        return values[replica_id]

    return _replaced(nest, _differs, part)


def _differs(value: Any) -> bool:
    return isinstance(value, DistributedValues)


def _replaced(nest: Any, sought: Callable[[Any], bool], instead: Callable[[Any], Any]) -> Any:
    """Return a nest with something else for what is sought; containers without that are the very objects."""
    if sought(nest):
        return instead(nest)
    kind = type(nest)
    if kind in _LEAVES or (kind in _CONTAINERS and not nest):
        return nest
    make: Callable[[list[Any]], Any]
    if kind is tuple or kind is list:
        # The usual arguments: torch's pytrees take ten times as long.
        children, make = nest, kind
    else:
        children, spec = _children(nest)
        if spec is None:
            return nest
        make = functools.partial(pytree.tree_unflatten, treespec=spec)
    if _LEAVES.issuperset(map(type, children)):
        return nest
    chosen = [_replaced(child, sought, instead) for child in children]
    return nest if all(map(operator.is_, chosen, children)) else make(chosen)


_LEAVES = frozenset({Tensor, str, bytes, int, float, bool, type(None)})
_CONTAINERS = frozenset({tuple, list, dict})


def own_of(nest: Any, replica_id: int, num_replicas: int) -> Any:
    """Return what one replica gets of a nest, as `select`. Raises UsageError for values of other replicas."""
    chosen = select(nest, replica_id)
    if chosen is not nest:
        for part in parts_of(nest):
            check_size(part, num_replicas)
    return chosen


def parts_of(nest: Any) -> list[DistributedValues]:
    """Return what differs by replica in a nest, arguments say."""
    if isinstance(nest, DistributedValues):
        return [nest]
    if type(nest) is tuple or type(nest) is list:
        # The usual arguments: torch's pytrees take ten times as long.
        return [part for item in nest for part in parts_of(item)]
    if type(nest) is Tensor or (type(nest) is dict and not nest):
        return []
    leaves = pytree.tree_leaves(nest, is_leaf=lambda leaf: isinstance(leaf, DistributedValues))
    return [leaf for leaf in leaves if isinstance(leaf, DistributedValues)]


def local_parts(nest: Any, num_replicas: int, of_one: bool = False) -> tuple[Any, ...]:
    """Return what each replica has of a nest, of a Variable its component; a value that is one for all stands alone.

    `of_one`: the caller is one of the replicas, and its nest is its own.
    """
    nest = pytree.tree_map(components, nest, is_leaf=is_whole)
    parts = [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, DistributedValues)]
    if not parts and (of_one or _children(nest)[1] is None):
        return (nest,)
    for part in parts:
        check_size(part, num_replicas)
    return tuple(select(nest, replica_id) for replica_id in range(num_replicas))


def structure(nest: Any) -> str:
    """Return a nest in words, its leaves left out: {'loss': *, 'logits': [*, *]}. Keys are sorted."""
    return repr(_in_words(nest))


def _in_words(nest: Any) -> Any:
    if type(nest) is dict:
        return {key: _in_words(nest[key]) for key in sorted(nest, key=repr)}
    if type(nest) in (list, tuple):
        return type(nest)(map(_in_words, nest))
    children, spec = _children(nest)
    if spec is None:
        return _Word("*")
    members, shown_by = list(map(_in_words, children)), getattr(type(nest), "__repr__", None)
    if shown_by is object.__repr__:
        # Its address would differ between replicas.
        return _Word(f"{type(nest).__qualname__}({', '.join(map(repr, members))})")
    try:
        return pytree.tree_unflatten(members, spec)
    except Exception:
        # A class that checks what it is made of.
        return _Word(f"{type(nest).__qualname__}({', '.join(map(repr, members))})")


def in_order(
    nest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], list[str], Callable[[Sequence[Any]], Any]]:
    """Return a nest's leaves, where each is, and what makes the nest of others.

    In an order that is the same on all replicas: that in which the keys of a dict were added need not be.
    """
    if type(nest) is Tensor:
        return [nest], ["*"], lambda made: made[0]

    def ends(node: Any) -> bool:
        return is_whole(node) or (is_leaf is not None and is_leaf(node))

    found, spec = _placed(nest, ends), pytree.tree_structure(nest, is_leaf=ends)
    order = sorted(range(len(found)), key=lambda i: list(map(repr, found[i][0])))

    def made(leaves: Sequence[Any]) -> Any:
        back = list(leaves)
        for i, leaf in zip(order, leaves, strict=True):
            back[i] = leaf
        return pytree.tree_unflatten(back, spec)

    return [found[i][1] for i in order], [pytree.keystr(found[i][0]) or "*" for i in order], made


def _placed(
    nest: Any, is_leaf: Callable[[Any], bool], path: tuple[Any, ...] = ()
) -> list[tuple[tuple[Any, ...], Any]]:
    """Return each leaf and the keys that lead to it, in the order of torch's pytrees."""
    children, spec = ([nest], None) if is_leaf(nest) else _children(nest)
    if spec is None:
        return [(path, nest)]
    known = pytree.SUPPORTED_NODES.get(type(nest))
    keys: list[Any]
    if known is not None and known.flatten_with_keys_fn is None:
        # torch refuses those whose class was registered without names for its members.
        keys = [pytree.SequenceKey(i) for i in range(len(children))]
    else:
        keys = [own[0] for own, _ in pytree.tree_flatten_with_path(nest, is_leaf=lambda node: node is not nest)[0]]
    return [
        found for key, child in zip(keys, children, strict=True) for found in _placed(child, is_leaf, (*path, key))
    ]


def _children(nest: Any) -> tuple[list[Any], Any]:
    """Return the members of a container and how to make it of them; a leaf has (itself, None)."""
    if isinstance(nest, Tensor) or is_whole(nest):
        return [nest], None
    children, spec = pytree.tree_flatten(nest, is_leaf=lambda node: node is not nest)
    return (children, None) if len(children) == 1 and children[0] is nest else (children, spec)


def _group(leaves: Sequence[Any], join: Callable[[Sequence[Any]], Any] | None) -> Any:
    first = leaves[0]
    if type(first) is Tensor:
        # Each replica's own even where a process sees one object: the controller's twin has one replica.
        return PerReplica(leaves)
    if join is not None and all(map(is_component, leaves)):
        return join(leaves)
    same = all(leaf is first for leaf in leaves) or (
        (_is_immutable(first) or _lists_names(first))
        and all(type(leaf) is type(first) and _equal(leaf, first) for leaf in leaves)
    )
    return first if same and not isinstance(first, np.ndarray) else PerReplica(leaves)


def _is_immutable(value: Any) -> bool:
    return isinstance(
        value, numbers.Number | np.generic | str | bytes | enum.Enum | type | torch.dtype | torch.device | torch.Size
    )


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b) or bool(a != a and b != b)


def _ordered_like(first: Any, other: Any, replica_id: int, results: Sequence[Any]) -> Any:
    """Return `other` with the keys of its dicts in the order of `first`'s. Raises UsageError where they differ."""
    ours, spec = _children(first)
    theirs, kind = _children(other)
    if (spec is None and kind is None) or (_lists_names(first) and _lists_names(other)):
        return other
    if isinstance(first, Mapping) and type(first) is type(other) and first.keys() == other.keys():
        theirs = [other[key] for key in first]
    elif spec != kind:
        raise _different(results, replica_id)
    return pytree.tree_unflatten(
        [_ordered_like(a, b, replica_id, results) for a, b in zip(ours, theirs, strict=True)], spec
    )


def _different(results: Sequence[Any], replica_id: int) -> UsageError:
    first, *_ = shapes = [structure(result) for result in results]
    named = [f"{short} on replica {i}" for i, short in enumerate(in_short(shapes))]
    differing = [words for i, words in enumerate(named) if shapes[i] != first or i in (0, replica_id)]
    return UsageError(
        f"the replicas' values differ in structure: {', '.join(differing)}; the same is needed on every replica"
    )


def in_short(texts: Sequence[str]) -> list[str]:
    """Return texts; of long ones what they begin and end with alike is left out, and what is too long all the same."""
    if max(map(len, texts)) <= _SHOWN:
        return list(texts)
    begin = max(0, _alike_for(texts) - _AROUND)
    end = max(0, _alike_for([text[begin + _AROUND :][::-1] for text in texts]) - _AROUND)
    parts = [text[begin : len(text) - end] for text in texts]
    parts = [part if len(part) <= _SHOWN else part[:_SHOWN] + "…" for part in parts]
    return [f"{'…' if begin else ''}{part}{'…' if end else ''}" for part in parts]


def _alike_for(texts: Sequence[str]) -> int:
    """Return with how many characters all begin alike."""
    columns = zip(*texts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


class _Word:
    """What stands in a structure for what has been left out."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
