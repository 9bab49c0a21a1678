"""Batches of any structure: which part is a replica's, cutting it out, counting, moving to a device.

Knows tensors, arrays, packed sequences and the containers that hold them: tuples, lists, mappings, dataclasses. Knows
no loader and no other replica.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from mirror_nb.errors import UsageError, users_level
from mirror_nb.tensors.layouts import is_block, rows_of, sizes

Together = Callable[[list[Any]], Any]
# Makes one value of one leaf's parts, one a replica.
PINNED_BYTES = 256 * 2**20
# Of a tensor that is pinned here: torch keeps such memory for good, and what is larger than a batch comes once.


def share_of(total: int, replica_id: int, num_replicas: int) -> slice:
    """The examples of a global batch of `total` that belong to one replica.

    TensorFlow's rule: with c = ceil(total / num_replicas), replica i gets [i*c : (i+1)*c], so that the last
    replicas may get fewer examples than the others, or none.
    """
    each = -(-total // num_replicas)
    return slice(min(replica_id * each, total), min((replica_id + 1) * each, total))


def checked_batch_size(batch_size: Any) -> int:
    """Return the number of examples of a global batch. Raises UsageError for what is none."""
    try:
        size = operator.index(batch_size)
    except TypeError:
        size = 0
    if size < 1 or isinstance(batch_size, bool):
        given = reprlib.repr(batch_size)
        raise UsageError(f"`batch_size` is the number of examples of a global batch, 1 or more, not {given}")
    return size


def cut(batch: Any, share: slice, total: int) -> Any:
    """The part `share` of a collated batch of `total` examples, in the same structure.

    Tensors, sparse and nested ones too, tensordicts and arrays are cut along dimension 0, lists of one item an example
    as lists, of a packed sequence its sequences; what does not have `total` items stays. A tuple, list or dict whose
    members are all batches is a structure: so a list of images counts as one item an example unless each image has as
    many rows as there are examples.
    """
    if isinstance(batch, torch.Tensor):
        return rows_of(batch, share) if is_batched(batch, total) else batch
    if isinstance(batch, np.ndarray) or _is_tensordict(batch):
        return batch[share] if is_batched(batch, total) else batch
    if isinstance(batch, PackedSequence):
        return _cut_packed(batch, share) if is_batched(batch, total) else batch
    if lists_examples(batch, total):
        return _like(batch, list(batch)[share])
    return _map_children(batch, lambda item: cut(item, share, total))


def emptied(batch: Any, total: int) -> Any:
    """A collated batch of `total` examples without them; what cannot be cut stays as it is, and is warned of."""
    nothing = cut(batch, slice(0, 0), total)
    before, after = leaves(batch), leaves(nothing)
    if len(before) == len(after) and all(map(operator.is_, before, after)):
        warnings.warn(
            f"a {type(batch).__qualname__} cannot be cut: where it is to have no examples, for a replica that a last "
            "batch leaves without any, it has one of another's. Gradients leave that out, losses and counts that you "
            "add up do not: use drop_last=True, or have collate_fn return tensors or arrays, or a tuple, list, dict "
            "or dataclass of them",
            stacklevel=users_level(),
        )
    return nothing


def _sequences(packed: PackedSequence) -> int:
    return int(packed.batch_sizes[0]) if len(packed.batch_sizes) else 0


def _cut_packed(packed: PackedSequence, share: slice) -> PackedSequence:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    if not len(lengths[share]):
        # One step of none: recurrent networks look at the first.
        return PackedSequence(packed.data[:0], packed.batch_sizes.new_zeros(1))
    sorted_already = packed.sorted_indices is None
    return pack_padded_sequence(padded[share], lengths[share], batch_first=True, enforce_sorted=sorted_already)


def spread(batch: Any, parts: Sequence[slice], total: int, together: Together) -> Any:
    """A collated batch of `total` examples with `together` of its parts in the place of each leaf.

    A structure that torch's pytrees do not open (a dataclass, say) is one leaf, and so is a list of examples.
    A leaf that is no batch and no tensor, a name for instance, stays as it is.
    """
    if type(batch) in (tuple, list) and all(_is_usual(item) and is_batched(item, total) for item in batch):
        # The usual batch, in a fifth of the time.
        return type(batch)(together([item[part] for part in parts]) for item in batch)
    if _is_open(batch) and not lists_examples(batch, total):
        return _map_children(batch, lambda item: spread(item, parts, total, together))
    pieces = [cut(batch, part, total) for part in parts]
    whole = not isinstance(batch, torch.Tensor) and all(piece is batch for piece in pieces)
    return batch if whole else together(pieces)


def _is_usual(item: Any) -> bool:
    return type(item) is torch.Tensor and item.layout is torch.strided and not item.is_nested


def joined(batches: Sequence[Any], totals: Sequence[int], together: Together) -> Any:
    """Batches of one structure as one, with `together` of theirs in the place of each leaf.

    `totals`: the number of examples of each. Batches whose structures differ are one leaf.
    """
    first = batches[0]
    if not _is_open(first) or any(_layout(batch) != _layout(first) for batch in batches):
        return together(list(batches))
    if any(lists_examples(batch, total) for batch, total in zip(batches, totals, strict=True) if total):
        return together(list(batches))
    columns = zip(*(_children(batch) or () for batch in batches), strict=True)
    return _map_children(first, lambda _: joined(next(columns), totals, together))


def _is_open(value: Any) -> bool:
    """Whether `value` is a structure both here and to torch's pytrees, by which its leaves are found again.

    And takes anything for a leaf: what a tensordict is given becomes a tensor.
    """
    return _children(value) is not None and not _is_of_tensordict(value) and not pytree.tree_is_leaf(value)


def _layout(value: Any) -> tuple[Any, ...]:
    members = list(value) if isinstance(value, Mapping) else len(_children(value) or ())
    return type(value), members


def lists_examples(batch: Any, total: int) -> bool:
    """Whether a batch of `total` examples is a list with one item an example, such as strings.

    Items of an example each are alike, where columns differ: tensors and a length, or None, as many as there are
    examples, are columns; so many pairs of an image and its class are examples.
    """
    if not _is_sequence(batch) or len(batch) != total:
        return False
    if not all(is_batched(item, total) for item in batch):
        return len(set(_kinds(batch))) == 1 or not any(_is_array(item) and is_batched(item, total) for item in batch)
    first = _kinds(batch[0]) if total and _is_sequence(batch[0]) else []
    alike = len(set(first)) > 1 and all(_is_sequence(item) and _kinds(item) == first for item in batch)
    return alike and not all(is_batched(part, total) for item in batch for part in item)


def _kinds(items: Sequence[Any]) -> list[Any]:
    return [(type(item), item.dtype, item.ndim) if _is_array(item) else type(item) for item in items]


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def is_batched(value: Any, total: int) -> bool:
    """Whether a value, or each member of a structure, has `total` items along its first dimension."""
    if isinstance(value, torch.Tensor):
        # Nested ones have no shape.
        return value.ndim > 0 and value.size(0) == total
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.shape[0] == total
    if isinstance(value, PackedSequence):
        return _sequences(value) == total
    if _is_tensordict(value):
        return bool(value.batch_size[0] == total)
    if _is_sequence(value) and len(value) == total:
        return True
    children = _children(value) or []
    return bool(children) and all(is_batched(child, total) for child in children)


def is_cuttable(batch: Any, total: int) -> bool:
    """Whether `cut` leaves nothing in a batch of `total` examples whole, but for numbers, names and single rows.

    It does where sequences were joined to one tensor, with their offsets beside it, where time comes first, and with
    an object that it cannot look into: a batch of graphs.
    """
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch.ndim == 0 or is_batched(batch, total) or is_batched(batch, 1)
    if isinstance(batch, PackedSequence) or _is_tensordict(batch) or lists_examples(batch, total):
        return True
    children = _children(batch)
    return isinstance(batch, _WHOLE) if children is None else all(is_cuttable(child, total) for child in children)


_WHOLE = (Number, np.generic, str, bytes, Enum, torch.dtype, torch.device, type(None))
# Of these every replica may have the same.


def is_single(batch: Any) -> bool:
    """Whether it is one element: of numbers, strings and tensors without a dimension alone, and no list of names."""
    found = leaves(batch)
    if not all(leaf.ndim == 0 if _is_array(leaf) else isinstance(leaf, _WHOLE) for leaf in found):
        return False
    return any(map(_is_array, found)) or (bool(found) and not isinstance(batch, list))


def count(batch: Any, *, or_single: bool = False) -> int:
    """The number of examples in a batch that nobody counted: the first dimension of all of its tensors.

    `or_single`: one element counts as one. Raises UsageError where they differ or there is none.
    """
    if or_single and is_single(batch):
        return 1
    found = leaves(batch)
    shapes: list[tuple[Any, ...]] = [sizes(leaf) for leaf in found if isinstance(leaf, torch.Tensor)]
    shapes += [leaf.shape for leaf in found if isinstance(leaf, np.ndarray)]
    shapes += [leaf.batch_size for leaf in found if _is_tensordict(leaf)]
    shapes += [(_sequences(leaf),) for leaf in found if isinstance(leaf, PackedSequence)]
    lengths = {shape[0] for shape in shapes if shape}
    if not shapes or not all(shapes) or len(lengths) > 1:
        raise UsageError(
            f"cannot count the examples of a {type(batch).__qualname__} with tensors of shapes {shapes}: "
            "all need them in dimension 0; set batch_size on the DataLoader, or batch in the dataset"
        )
    return int(lengths.pop())


def to_device(value: Any, device: torch.device) -> Any:
    """The batch with its tensors, and whatever else has a `.to(device)`, on `device`."""
    if isinstance(value, torch.Tensor):
        if device.type != "cuda" or value.device.type != "cpu":
            return value.to(device)
        # From other memory a copy waits until the GPU has done what it has to do; is_pinned() asks the driver.
        pinned = value.is_pinned()
        if not pinned and _can_be_pinned(value):
            # torch keeps it until the copy is done.
            value, pinned = value.pin_memory(), True
        return value.to(device, non_blocking=pinned)
    to = None
    # A dict with `__getattr__ = dict.__getitem__` raises KeyError.
    with contextlib.suppress(Exception):
        to = getattr(value, "to", None)
    if callable(to) and not isinstance(value, type):
        return to(device)
    return _map_children(value, lambda item: to_device(item, device))


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    """Whether a copy in pinned memory is the same: not of another class, nor part of a graph, expanded or sparse."""
    if type(tensor) is not torch.Tensor or tensor.requires_grad or not is_block(tensor):
        return False
    return tensor.is_contiguous() and 0 < tensor.nbytes <= PINNED_BYTES


def leaves(value: Any) -> list[Any]:
    """What a structure holds that is no structure itself, in order."""
    children = _children(value)
    if children is None:
        return [value]
    return [leaf for child in children for leaf in leaves(child)]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a structure, and of what is one to torch's pytrees alone; of a packed sequence its data."""
    for part in pytree.tree_leaves(value):
        yield from (found for leaf in leaves(part) if isinstance(found := in_memory(leaf), torch.Tensor))


def in_memory(value: Any) -> Any:
    """The tensor that holds a packed sequence; all else as it is."""
    return value.data if isinstance(value, PackedSequence) else value


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A structure of the same kind with each leaf changed."""
    if _children(value) is None:
        return change(value)
    return _map_children(value, lambda child: map_leaves(child, change))


def map_examples(batch: Any, total: int, change: Callable[[Any], Any]) -> Any:
    """A batch of `total` examples with each leaf changed; a leaf is what it is to `cut`: a list of examples is one."""
    if _children(batch) is None or lists_examples(batch, total):
        return change(batch)
    return _map_children(batch, lambda item: map_examples(item, total, change))


def _is_tensordict(value: Any) -> bool:
    """Whether it is a TensorDict or a tensorclass that knows its entries' first dimension, and holds them to it."""
    return _is_of_tensordict(value) and len(value.batch_size) > 0


def _is_of_tensordict(value: Any) -> bool:
    # A module of the user's may have the name.
    is_one = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    return is_one is not None and bool(is_one(value))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _children(value: Any) -> list[Any] | None:
    """The members of a structure; None for what is a leaf here."""
    if isinstance(value, (torch.Tensor, PackedSequence)) or _is_tensordict(value):
        return None
    if isinstance(value, (list, tuple)):
        return list(value)
    # Last of what is usual: an abstract class takes ten times as long to ask.
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, name) for name in _fields(value)]
    return None


def _map_children(value: Any, change: Callable[[Any], Any]) -> Any:
    """A structure of the same kind with each member changed; a leaf is returned as it is."""
    if isinstance(value, PackedSequence):
        return value
    if isinstance(value, (list, tuple)):
        return _like(value, [change(item) for item in value])
    if isinstance(value, Mapping):
        changed = {key: change(item) for key, item in value.items()}
        if not hasattr(value, "__setitem__"):
            return changed
        # A copy keeps what a dict subclass knows besides its items (a defaultdict's factory).
        same_kind: Any = copy.copy(value)
        for key, item in changed.items():
            # One by one: the outputs of transformers' models refuse `update`.
            same_kind[key] = item
        return same_kind
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed_fields = copy.copy(value)
        for name in _fields(value):
            # Past __setattr__, which a frozen dataclass refuses.
            object.__setattr__(changed_fields, name, change(getattr(value, name)))
        return changed_fields
    return value


def _fields(value: Any) -> list[str]:
    """The names of the fields that a dataclass has: others may come later."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _like(sequence: Any, items: list[Any]) -> Any:
    """`items` in a sequence of the kind of `sequence`; a namedtuple that lost its length becomes a tuple."""
    if hasattr(sequence, "_fields"):
        return type(sequence)(*items) if len(items) == len(sequence) else tuple(items)
    try:
        return type(sequence)(items)
    except TypeError:
        return tuple(items) if isinstance(sequence, tuple) else items
