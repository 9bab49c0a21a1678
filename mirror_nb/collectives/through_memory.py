"""Which calls on a process group go through shared memory, and what their arguments mean.

Knows torch.distributed's options and the fabric. Whatever it does not know is left to the group's carrier: it answers
None, from what is the same on every replica, so that all take the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from mirror_nb.collectives.exchange import Exchange
from mirror_nb.collectives.fabric import Fabric
from mirror_nb.collectives.headers import DTYPES, Fold

_DTYPES = frozenset(DTYPES)
_FOLDS = (
    (dist.ReduceOp.SUM, Fold.SUM),
    (dist.ReduceOp.AVG, Fold.MEAN),
    (dist.ReduceOp.MAX, Fold.MAX),
    (dist.ReduceOp.MIN, Fold.MIN),
    (dist.ReduceOp.PRODUCT, Fold.PRODUCT),
)
# No dictionary: torch's options hold an object that equals these from its side only.

_SAME_SIZE = {
    "all_reduce": (0,),
    "all_reduce_coalesced": (0,),
    "broadcast": (0,),
    "reduce": (0,),
    "all_gather": (0,),
    "all_gather_coalesced": (0,),
    "all_gather_into_tensor": (0, 1),
    "gather": (1,),
    "gather_into_tensor": (1,),
    "scatter": (0,),
    "reduce_scatter": (1,),
    "reduce_scatter_tensor": (0, 1),
}
# By collective, the places of those arguments of which every replica gives as many elements, of one dtype.

_TO_EACH = frozenset({"all_to_all", "all_to_all_single"})
# Collectives of whose tensors the replicas have to give the same dtype, and each its own sizes.

_TO_ROOT = frozenset({"gather", "gather_into_tensor", "reduce"})

_IN_ONE_PIECE = frozenset({"all_reduce", "all_to_all_single", "broadcast", "reduce", "reduce_scatter", "scatter"})
# Collectives of whose first argument gloo takes the memory from its first element on, whatever its strides.

_IN_PARTS = frozenset({"reduce_scatter", "scatter"})
# Those whose second one is a list of parts, whose elements it takes in the order of memory, too.

_Begun = tuple[Exchange, list[Tensor]]
# With what torch's handle gives as its result.


def begin(fabric: Fabric, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
    """Begin the collective that a process group's method `name` means; None where the carrier has to do it."""
    call = _CALLS.get(name)
    return None if call is None else call(fabric, args, kwargs)


def alike(label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What of a collective's arguments is the same on every replica that runs the same one."""
    given = [*args, *kwargs.values()]
    said = [*_ops_in(given), *(f"root {root}" for root in _roots_in(given))]
    for place in _SAME_SIZE.get(label, ()):
        compared = given[place : place + 1]
        said += [f"{t.dtype} {t.numel()}" for t in pytree.tree_leaves(compared) if isinstance(t, Tensor)]
    said += _order_in_memory(label, given)
    if label in _TO_EACH:
        said += sorted({str(t.dtype) for t in pytree.tree_leaves(given[:2]) if isinstance(t, Tensor)})
    return " ".join(said)


def gap(label: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_replicas: int) -> str:
    """Why gloo would take other elements than a collective's tensors show, or in another order; empty: it would not.

    What lies between the elements of a slice it changes, and behind an expanded one the memory of others. Of a scalar
    it looks at the first dimension, which ends the process. Even parts it cuts by bytes, through an element.
    """
    given = [*args, *kwargs.values()]
    for tensor in pytree.tree_leaves(given[:1]) if label in _IN_ONE_PIECE else []:
        # One that is transposed, or in channels_last, has all its memory.
        if _strided_on_cpu(tensor) and not _in_one_piece(tensor):
            return (
                f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not one piece of memory, "
                "which gloo takes it for; pass tensor.contiguous(), and copy the result back"
            )
    if label == "reduce_scatter_tensor" and any(map(_scalar_on_cpu, pytree.tree_leaves(given[:2]))):
        return "gloo takes no scalar here; pass tensor.view(1)"
    if label == "all_to_all_single" and not any(_splits(args, kwargs)):
        for tensor in pytree.tree_leaves(given[:2]):
            if isinstance(tensor, Tensor) and tensor.numel() % num_replicas:
                return (
                    f"the {tensor.numel()} elements of a tensor of shape {tuple(tensor.shape)} are no {num_replicas} "
                    "equal parts, one for each replica; pass output_split_sizes and input_split_sizes"
                )
    tensors = list(filter(_strided_on_cpu, given[:2])) if label == "all_to_all_single" else []
    if len(tensors) > 1 and not _lie_alike(*tensors):
        output, tensor = tensors
        return (
            f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} lies in memory in another "
            f"order than the output with strides {output.stride()}, and gloo goes by that; pass "
            "tensor.contiguous() for both"
        )
    return ""


def as_the_output(label: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with parts that lie in memory as the output does, which has no `gap`: gloo goes by that.

    Autograd brings others: the gradient of a sum is one number, expanded.
    """
    output = next(filter(_strided_on_cpu, pytree.tree_leaves(args[:1])), None) if label in _IN_PARTS else None
    if output is None:
        return args
    return (args[0], pytree.tree_map(lambda part: _laid_as(part, output), args[1]), *args[2:])


def _laid_as(part: Any, output: Tensor) -> Any:
    # Other shapes and dtypes gloo refuses, in its words.
    fits = _strided_on_cpu(part) and part.shape == output.shape and part.dtype == output.dtype
    return torch.empty_like(output).copy_(part.detach()) if fits and not _lie_alike(part, output) else part


def _scalar_on_cpu(tensor: Any) -> bool:
    return _strided_on_cpu(tensor) and not tensor.dim()


def _in_one_piece(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    if one.is_contiguous() and other.is_contiguous():
        return True
    ways = [[step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (one, other)]
    return ways[0] == ways[1]


def _order_in_memory(label: str, given: list[Any]) -> list[str]:
    """How a tensor lies of which gloo goes by the memory on every replica, where that is in no usual order."""
    tensors = pytree.tree_leaves(given[:1]) if label in _IN_ONE_PIECE else []
    return [f"with strides {_steps(t)}" for t in tensors if _strided_on_cpu(t) and not t.is_contiguous()]


def _steps(tensor: Tensor) -> tuple[int, ...]:
    # Along a dimension of one element nobody steps.
    return tuple(step if size > 1 else 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def parts(label: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_replicas: int) -> list[int]:
    """How many elements an all-to-all sends to each replica, then takes from each; empty for others.

    -1 where the arguments make no sense: then the replicas differ, or all have what the carrier refuses.
    """
    if label not in _TO_EACH:
        return []
    output = _argument(args, kwargs, 0, "output", "output_tensor", "output_tensors")
    given = _argument(args, kwargs, 1, "input", "input_tensor", "input_tensors")
    if label == "all_to_all":
        sizes = [[t.numel() for t in tensors] for tensors in (given, output)]
    else:
        splits = _splits(args, kwargs)
        sizes = [_pieces(t, split, num_replicas) for t, split in zip((given, output), splits, strict=True)]
    if any(len(each) != num_replicas for each in sizes):
        return [-1] * (2 * num_replicas)
    return [*sizes[0], *sizes[1]]


def _splits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[int] | None, list[int] | None]:
    """How many rows an all_to_all_single sends to each replica, and takes from each, where its caller has said so."""
    return _argument(args, kwargs, 3, "input_split_sizes"), _argument(args, kwargs, 2, "output_split_sizes")


def _pieces(tensor: Tensor, splits: list[int] | None, num_replicas: int) -> list[int]:
    rows = tensor.size(0) if tensor.dim() else 1
    pieces = list(splits or [rows // num_replicas] * num_replicas)
    return [piece * (tensor.numel() // rows if rows else 0) for piece in pieces] if sum(pieces) == rows else []


def in_words(label: str, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, parts: list[int]) -> str:
    """A collective that gloo carries as a user would say it; `name`: without what its options say."""
    given = [*args, *kwargs.values()]
    said = label + "".join(f" ({op})" for op in _ops_in(given))
    said += "".join(f" {'to' if label in _TO_ROOT else 'from'} replica {root}" for root in _roots_in(given))
    half = len(parts) // 2
    each = f", sending {parts[:half]} and taking {parts[half:]} elements" if parts else ""
    if -1 in parts:
        each = ", whose sizes are not those of its tensors,"
    lies = "".join(f" {order}" for order in _order_in_memory(label, given))
    return f"{said}{name.removeprefix(label)}{lies}{each} through gloo"


def _ops_in(given: list[Any]) -> list[str]:
    ops: list[Any] = [getattr(option, "reduceOp", option) for option in given]
    found: list[Any] = [getattr(op, "op", op) for op in ops if isinstance(op, dist.ReduceOp)]
    return [op.name for op in found]


def _roots_in(given: list[Any]) -> list[int]:
    return [option.rootRank for option in given if hasattr(option, "rootRank")]


def _all_reduce(fabric: Fabric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
    tensor = _only(_argument(args, kwargs, 0, "tensors", "tensor"))
    fold = _fold(args, kwargs, 1, tensor)
    if tensor is None or fold is None:
        return None
    return fabric.all_reduce(_flat(tensor), fold, tensor), [tensor]


def _reduce(fabric: Fabric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
    tensor = _only(_argument(args, kwargs, 0, "tensors", "tensor"))
    root, fold = _root(fabric, args, kwargs), _fold(args, kwargs, 2, tensor)
    if tensor is None or fold is None or root is None:
        return None
    return fabric.reduce(_flat(tensor), root, fold, tensor), [tensor]


def _broadcast(fabric: Fabric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
    tensor = _only(_argument(args, kwargs, 0, "tensors", "tensor"))
    root = _root(fabric, args, kwargs)
    if tensor is None or root is None:
        return None
    return fabric.broadcast(_flat(tensor), root, tensor), [tensor]


def _all_gather(fabric: Fabric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
    outputs = _argument(args, kwargs, 0, "output_tensors")
    tensor = _only(_argument(args, kwargs, 1, "input_tensors", "input_tensor"))
    if tensor is None or not isinstance(outputs, (list, tuple)) or not outputs:
        return None
    rows = outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs
    # Shapes that differ are refused by the carrier, in its words.
    fits = len(rows) == fabric.num_replicas and all(
        _serves(row) and row.shape == tensor.shape and row.dtype == tensor.dtype for row in rows
    )
    if not fits or (rows is not outputs and len(outputs) != 1):
        return None
    return fabric.all_gather([_flat(row) for row in rows], _flat(tensor), tensor), list(rows)


def _all_gather_into(fabric: Fabric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
    output = _argument(args, kwargs, 0, "output", "output_tensor")
    tensor = _only(_argument(args, kwargs, 1, "input", "input_tensor"))
    if tensor is None or not _serves(output) or output.dtype != tensor.dtype:
        return None
    if output.numel() != tensor.numel() * fabric.num_replicas:
        return None
    rows = list(_flat(output).view(fabric.num_replicas, tensor.numel()))
    return fabric.all_gather(rows, _flat(tensor), tensor), [output]


def _barrier(fabric: Fabric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
    options = _argument(args, kwargs, 0, "opts")
    device = getattr(options, "device", None)
    return None if getattr(device, "type", "cpu") != "cpu" else (fabric.barrier(), [])


_CALLS: dict[str, Callable[[Fabric, tuple[Any, ...], dict[str, Any]], _Begun | None]] = {
    "allreduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "allgather": _all_gather,
    "_allgather_base": _all_gather_into,
    "all_gather_single": _all_gather_into,
    "barrier": _barrier,
}


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, *names: str) -> Any:
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _only(given: Any) -> Tensor | None:
    """The one tensor that is meant, if shared memory serves it."""
    if isinstance(given, (list, tuple)):
        given = given[0] if len(given) == 1 else None
    return given if _serves(given) else None


def _strided_on_cpu(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_cpu and tensor.layout is torch.strided


def _serves(tensor: Any) -> bool:
    return (
        _strided_on_cpu(tensor)
        and tensor.dtype in _DTYPES
        and tensor.is_contiguous()
        # torch writes into these only in its own mode; the carrier writes past torch.
        and not tensor.is_inference()
    )


def _flat(tensor: Tensor) -> Tensor:
    # Not detach(): that counts writes as changes of the user's tensor, which a carrier's are not.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            # It may be waited for outside.
            return tensor.data.view(-1)
    return tensor.data if tensor.dim() == 1 else tensor.data.view(-1)


def _root(fabric: Fabric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    given = _argument(args, kwargs, 1, "opts", "root")
    root = getattr(given, "rootRank", given)
    # A rank that no replica has is refused by the carrier, in its words.
    return root if isinstance(root, int) and 0 <= root < fabric.num_replicas else None


def _fold(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, tensor: Tensor | None) -> Fold | None:
    # Options come second, an operation by itself where the call has its place.
    op = getattr(_argument(args, kwargs, 1, "opts"), "reduceOp", None)
    if op is None:
        given = _argument(args, kwargs, place, "op")
        op = getattr(given, "reduceOp", dist.ReduceOp.SUM if given is None else given)
    for known, fold in _FOLDS:
        if op == known:
            whole = tensor is None or not tensor.is_floating_point()
            return None if fold is Fold.MEAN and whole else fold
    return None
