"""What the replicas of one strategy say to each other, each call proved before any data moves.

    agree(call, form)   one all-gather of 80 bytes: does every replica make this call, with these shapes?
      all the same      the data follows
      not the same      the forms are gathered, and every replica raises the same error

So that a mismatch never reaches gloo, which ends the process for two buffers of different sizes. Knows tensors and
the default process group; knows no strategy. With one replica nothing is said.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps, gathered, word_device
from mirror_nb.collectives.gloo import GlooAllReduce
from mirror_nb.collectives.handles import WorkHandle, named
from mirror_nb.collectives.headers import MERGE_CALL, UNEVEN_MERGE_CALLS
from mirror_nb.collectives.nccl import NcclAllReduce
from mirror_nb.collectives.shared_memory import SharedMemoryAllReduce
from mirror_nb.errors import PeerFailed, ReplicaError, ReplicaTimeout, UsageError
from mirror_nb.pool.hangs import DECIDED_ALONE
from mirror_nb.strategies.reductions import common_dtype, in_short
from mirror_nb.tensors.layouts import as_row, memory_of
from mirror_nb.values import CARRIERS, ReduceOp, added, mean, wide, widened

_AS_THE_GROUP = (SharedMemoryAllReduce, GlooAllReduce, NcclAllReduce)

_EPOCH = "the agreement on an epoch"
_SMALL_BYTES = 64
# What is no larger travels with the agreement: one collective instead of two, 0.2 to 0.5 ms less with gloo.

_LISTED = 8
# Leaves in an error.
_CARRIERS = {torch.bool: torch.int32, torch.int16: torch.int32, **CARRIERS}
# gloo, or an op, adds no tensors of these dtypes.


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a call, as the others have to have it."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    # None where sizes may differ.
    weak: bool = False
    # A Python number, which takes the others' dtype.

    def __str__(self) -> str:
        sizes = ", ".join("*" if size is None else str(size) for size in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


@dataclass(frozen=True, slots=True)
class Form:
    """What a replica brings to a call."""

    structure: str = "*"
    leaves: tuple[Leaf, ...] = ()
    problem: str = ""
    # Why this replica cannot take part; the others have to hear of it.
    places: tuple[str, ...] = field(default=(), repr=False)
    # Where the leaves are in the nest, for errors; its repr is what replicas compare.

    def __str__(self) -> str:
        if self.problem:
            return f"the error “{self.problem}”"
        words = ", ".join(map(str, self.leaves))
        return words if self.structure == "*" else " in ".join(filter(None, (words, self.structure)))


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    form: Form


@final
class Peers:
    """The replicas of the default process group, as one of them talks to them.

    `announce()` is called before each agreement, so that whoever follows the replicas can end a wait for one that
    has returned and will never come.
    """

    def __init__(
        self,
        replica_id: int,
        num_replicas: int,
        device: torch.device,
        announce: Callable[[], None] = lambda: None,
        ops: Callable[[], CrossDeviceOps | None] = lambda: None,
    ) -> None:
        self.replica_id = replica_id
        self.num_replicas = num_replicas
        self.device = device
        self._announce = announce
        self._ops = ops

    # ------------------------------------------------------------------ agreement

    def agree(self, call: str, form: Form, extra: int = 0) -> tuple[list[int], tuple[Leaf, ...]]:
        """Prove that every replica makes this call with this form; return all `extra`s, and the leaves in common.

        The leaves differ from `form`'s only in the dtype that Python numbers take. Raises UsageError, the same on
        every replica, where forms or calls differ, ReplicaError where some lack a merge_call.
        """
        if form.problem and self.num_replicas == 1:
            raise UsageError(form.problem)
        if self.num_replicas == 1:
            return [extra], form.leaves
        extras, leaves, _ = self._agree(call, form, extra, b"")
        return extras, leaves

    def total(
        self, call: str, form: Form, part: Tensor, carrier: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    ) -> Tensor:
        """Return the sum over the replicas of `part`, made of the one leaf of `form`; raises as `agree`.

        `carrier`: of the leaf's dtype that of the parts.
        """
        total, _, _ = self._total(call, form, part, 0, carrier)
        return total

    def mean(self, call: str, form: Form, part: Tensor, count: int = 1) -> Tensor:
        """Return the mean over the replicas of the one leaf of `form`; raises as `agree`.

        `part`: this replica's sum of it, widened; `count`: the elements that went into that.
        """
        total, counts, dtype = self._total(call, form, part, count, wide)
        return mean(total, sum(counts), dtype)

    def _total(
        self, call: str, form: Form, part: Tensor, extra: int, carrier: Callable[[torch.dtype], torch.dtype]
    ) -> tuple[Tensor, list[int], torch.dtype]:
        """Return the sum, all extras and the leaf's dtype; `carrier`: of its dtype that of the sum."""
        if self.num_replicas == 1:
            extras, (leaf,) = self.agree(call, form, extra)
            return part.clone(), extras, leaf.dtype
        # What is on a GPU goes by itself: to look at it here would stop the host.
        small = part.nbytes <= _SMALL_BYTES and part.device.type == "cpu"
        raw = memory_of(as_row(part)).tobytes() if small and part.numel() else b""
        extras, (leaf,), rows = self._agree(call, form, extra, raw)
        if raw and rows is not None:
            flat = rows.view(torch.uint8)[:, : len(raw)].contiguous().view(part.dtype)
            return added(list(flat)).view(part.shape), extras, leaf.dtype
        return self._summed([part.to(carrier(leaf.dtype))])[0], extras, leaf.dtype

    def _agree(
        self, call: str, form: Form, extra: int, small: bytes
    ) -> tuple[list[int], tuple[Leaf, ...], Tensor | None]:
        """Return the extras, the leaves in common, and what each replica sent along; None if forms were settled."""
        digest = hashlib.blake2b(repr((call, form)).encode(), digest_size=8).digest()
        word = bytearray(16 + _SMALL_BYTES)
        struct.pack_into("<8sq", word, 0, digest, extra)
        word[16 : 16 + len(small)] = small
        self._announce()
        with self._explained(call):
            table = torch.stack(self._rows(torch.frombuffer(word, dtype=torch.int64), _in_words(call, form)))
            extras: list[int] = table[:, 1].tolist()
            if len(set(table[:, 0].tolist())) > 1:
                return extras, self._settle(_Call(call, form)), None
        if form.problem:
            raise UsageError(form.problem)
        return extras, form.leaves, table[:, 2:].contiguous()

    def _rows(self, mine: Tensor, what: str | None = None) -> list[Tensor]:
        """Return a flat tensor of each replica, by memory that they share if they do: all hear `what` it is.

        There those that are at another call meet this one.
        """
        ops = self._ops()
        fabric, limit = (None, None) if ops is None else (ops.fabric, ops.member.timeout_seconds)
        on_gpu = mine.device.type != "cpu"
        mine = mine if on_gpu or fabric is not None else mine.to(word_device(self.device))
        with torch.inference_mode(False):
            # A thread that is in no such mode may carry it on.
            rows = [torch.empty_like(mine) for _ in range(self.num_replicas)]
        if on_gpu:
            # This thread does not wait for it.
            dist.all_gather(rows, mine)
            return rows
        try:
            if fabric is not None:
                fabric.wait(fabric.all_gather(rows, mine, what), limit)
            else:
                WorkHandle([dist.all_gather(rows, mine, async_op=True)]).wait(limit)
        except ReplicaTimeout as late:
            raise named(late, limit) from late.__cause__
        return [row.cpu() for row in rows]

    def _settle(self, call: _Call) -> tuple[Leaf, ...]:
        """Gather what every replica wanted, and find the one thing they all mean, or raise."""
        calls: list[_Call] = gathered(call, self.num_replicas)
        if len({other.name for other in calls}) > 1:
            raise _different_calls(calls)
        forms = [other.form for other in calls]
        if any(form.problem for form in forms) or len({_shapes(form) for form in forms}) > 1:
            raise _different_forms(call.name, forms)
        settled = []
        for column in zip(*(form.leaves for form in forms), strict=True):
            dtype = common_dtype([leaf.dtype for leaf in column], [leaf.weak for leaf in column])
            if dtype is None:
                raise _different_forms(call.name, forms)
            settled.append(replace(column[0], dtype=dtype, weak=False))
        return tuple(settled)

    @contextlib.contextmanager
    def _explained(self, call: str) -> Iterator[None]:
        """Say what it means that the wait for the others was ended since one of them has returned."""
        try:
            yield
        except PeerFailed as reason:
            _, uneven, counted = str(reason).partition(UNEVEN_MERGE_CALLS)
            if not uneven:
                raise
            text = uneven + counted if call == MERGE_CALL else _left_out(call, self.replica_id)
            raise ReplicaError(text) from None

    # ------------------------------------------------------------------ data, after an agreement

    def reduced(self, op: ReduceOp, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums (or means) over the replicas of tensors whose shapes and dtypes were agreed on."""
        if op is ReduceOp.SUM:
            return self._summed(tensors)
        totals = self._summed(list(map(widened, tensors)))
        return [mean(total, self.num_replicas, own.dtype) for total, own in zip(totals, tensors, strict=True)]

    def _summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.num_replicas == 1:
            return [tensor.clone() for tensor in tensors]
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, tensor in enumerate(tensors):
            groups.setdefault((tensor.dtype, tensor.device), []).append(i)
        works, flats = [], []
        for (dtype, _), members in groups.items():
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in members]).to(_CARRIERS.get(dtype, dtype))
            flats.append(flat)
            if flat.numel():
                works.append(self._begin(flat))
        for work in works:
            work.wait()
        results: list[Any] = [None] * len(tensors)
        for members, flat in zip(groups.values(), flats, strict=True):
            pieces = flat.split([tensors[i].numel() for i in members])
            for i, piece in zip(members, pieces, strict=True):
                # No views: autograd lets nobody write in place to those that a function of ours returns.
                results[i] = piece.view(tensors[i].shape).to(tensors[i].dtype).data
        return results

    def _begin(self, flat: Tensor) -> Any:
        """Begin a sum, by the strategy's cross-device ops where they do it in another way than the process group."""
        ops = self._ops()
        if (
            ops is None
            or flat.device.type != ops.member.device.type
            # A group that a launcher has made knows no shared memory.
            or (isinstance(ops, _AS_THE_GROUP) and (flat.is_cuda or ops.own_fabric is None))
        ):
            return dist.all_reduce(flat, async_op=True)
        return ops.all_reduce(ReduceOp.SUM, flat)

    def gathered(self, tensor: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
        """Return the replicas' tensors joined along `axis`; `sizes` are theirs along it."""
        if self.num_replicas == 1:
            return tensor.clone()
        rows = tensor.detach().movedim(axis, 0).contiguous()
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        if not padded.numel():
            return rows.new_zeros((sum(sizes), *rows.shape[1:])).movedim(0, axis).data
        # As bytes: gloo gathers not every dtype.
        parts = self._rows(padded.reshape(-1).view(torch.uint8))
        whole = [part.view(tensor.dtype).view(padded.shape)[:size] for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(whole).movedim(0, axis).data

    def sizes(self, mine: Sequence[int]) -> list[list[int]]:
        """Return every replica's list of numbers, which are equally many."""
        if self.num_replicas == 1:
            return [list(mine)]
        return [row.tolist() for row in self._rows(torch.tensor(mine, dtype=torch.int64, device="cpu"))]

    def exchanged(self, mine: bytes, lengths: Sequence[int]) -> list[bytes]:
        """Return every replica's bytes; `lengths` are theirs."""
        if self.num_replicas == 1:
            return [mine]
        padded = torch.frombuffer(bytearray(mine.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        return [row[:length].numpy().tobytes() for row, length in zip(self._rows(padded), lengths, strict=True)]

    def first(self, tensor: Tensor) -> Tensor:
        """Return replica 0's tensor, of agreed shape and dtype, on every replica."""
        if self.num_replicas == 1:
            return tensor.clone()
        sent = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        if sent.numel():
            dist.broadcast(sent.reshape(-1).view(torch.uint8), 0)
        return sent

    def first_bytes(self, mine: bytes) -> bytes:
        """Return replica 0's bytes on every replica, whatever the lengths, as an epoch of a dataset begins."""
        self._announce()
        if self.num_replicas == 1:
            return mine
        with self._explained(_EPOCH):
            length = int(self._rows(torch.tensor([len(mine)], device="cpu"), _EPOCH)[0])
        data = torch.zeros(length, dtype=torch.uint8, device=word_device(self.device))
        if self.replica_id == 0:
            data.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        dist.broadcast(data, 0)
        return data.cpu().numpy().tobytes()


def form_of_nest(
    structure: str,
    tensors: Sequence[Tensor],
    weak: Sequence[bool],
    free: int | None = None,
    places: Sequence[str] = (),
) -> Form:
    """Return the form of a nest of tensors, which are at `places`; dimension `free` of each may differ in size."""
    leaves = []
    for tensor, number in zip(tensors, weak, strict=True):
        shape: tuple[int | None, ...] = tuple(tensor.shape)
        if free is not None:
            dim = free % tensor.ndim
            shape = (*shape[:dim], None, *shape[dim + 1 :])
        leaves.append(Leaf(tensor.dtype, shape, number))
    return Form(structure, tuple(leaves), places=tuple(places))


def of_dtype(form: Form, dtype: torch.dtype) -> Form:
    """Return a form of one leaf with the dtype that its part had before it was widened."""
    return replace(form, leaves=(replace(form.leaves[0], dtype=dtype),))


def _in_words(call: str, form: Form) -> str:
    return f"{call} of {', '.join(map(str, form.leaves))}" if form.leaves else call


def _left_out(call: str, replica_id: int) -> str:
    return (
        f"replica {replica_id} waited in {call}, but another one has returned without that call; every replica has to "
        f"make it (not under `if replica_id == ...`); {DECIDED_ALONE}"
    )


def _shapes(form: Form) -> Any:
    return form.structure, tuple(leaf.shape for leaf in form.leaves)


def _different_calls(calls: Sequence[_Call]) -> Exception:
    named = ", ".join(f"{call.name} on replica {i}" for i, call in enumerate(calls))
    if any(call.name == MERGE_CALL for call in calls):
        return ReplicaError(f"{UNEVEN_MERGE_CALLS} They are at different calls: {named}")
    return UsageError(
        f"the replicas are at different calls: {named}; all of them have to make the same calls in the same order"
    )


def _apart(forms: Sequence[Form]) -> list[str]:
    """Return what each replica brings, in words; of many leaves the structure, or if it is one those that differ."""
    structures, problems = [form.structure for form in forms], any(form.problem for form in forms)
    if problems or max(len(form.places) for form in forms) <= _LISTED:
        return in_short(list(map(str, forms)))
    if len(set(structures)) > 1 or len({form.places for form in forms}) > 1:
        return in_short(structures)
    columns = [
        (place, column)
        for place, *column in zip(forms[0].places, *(form.leaves for form in forms), strict=True)
        if len({str(leaf) for leaf in column}) > 1
    ]
    more = f" and {len(columns) - _LISTED} more" if len(columns) > _LISTED else ""
    shown = columns[:_LISTED]
    return [", ".join(f"{column[i]} at {place}" for place, column in shown) + more for i in range(len(forms))]


def _different_forms(call: str, forms: Sequence[Form]) -> UsageError:
    named = ", ".join(f"{words} on replica {i}" for i, words in enumerate(_apart(forms)))
    broken = [form.problem for form in forms if form.problem]
    advice = "all replicas have to give the same structure, shapes and dtypes" if not broken else "mend that"
    if call == MERGE_CALL and not broken:
        advice = "all replicas have to give one function, and what differs between them as its arguments"
    return UsageError(f"the replicas bring different values to {call}: {named}; {advice}")
