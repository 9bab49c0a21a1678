"""Which gradients are reduced together, in which order, and in whose memory they lie.

    Plan ── cut from what is agreed ──▶ Bucket ── opened for a round ──▶ memory, which the gradients show

Knows no hooks and no rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from mirror_nb.collectives.base import CrossDeviceOps
from mirror_nb.gradients.matching import gradient_dtype
from mirror_nb.gradients.tracked import Tracked

PATIENCE = 4
# So many backward passes in a row leave the same parameters out before the plan leaves them out too.
REMEMBERED = 64
# Plans, and entries of what followed what; when there are more, all are forgotten, alike on all replicas.
PURPOSE = "gradients, in which a backward pass that uses no parameter of a mirrored module takes no part"
# What messages say of an all-reduce: the first words in short.
_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
# How many look at a storage, by its address: torch's own, and private. Without it no gradient shows a bucket's memory.


@final
@dataclass(frozen=True, slots=True)
class Agreed:
    """A parameter that all replicas know by the same number."""

    tracked: Tracked | None
    # None: gone on this replica.
    shape: torch.Size
    dtype: torch.dtype
    device_type: str
    gradient: torch.dtype
    # The dtype of its gradients.
    sparse: bool = False
    # They are of some rows only, and go by themselves.

    def parameter(self) -> nn.Parameter | None:
        return None if self.tracked is None else self.tracked.parameter()

    def fits(self, parameter: nn.Parameter) -> bool:
        return (
            parameter.dtype is self.dtype
            and parameter.shape == self.shape
            and parameter.device.type == self.device_type
            and gradient_dtype(parameter) is self.gradient
        )

    def like(self) -> Tensor:
        """Return a tensor that is as its gradient in shape, dtype and device, without memory of that size."""
        parameter = self.parameter()
        if parameter is not None and self.gradient is self.dtype:
            return parameter.detach()
        device = self.device_type if parameter is None else parameter.device
        return torch.empty(1, dtype=self.gradient, device=device).expand(self.shape)

    def without_parameter(self) -> Agreed:
        return replace(self, tracked=None)

    def take_values(self, source: int, replica_id: int) -> None:
        parameter = self.parameter()
        if parameter is None:
            values = torch.empty(self.shape, dtype=self.dtype, device=self.device_type)
        else:
            values = parameter.detach().contiguous()
        dist.broadcast(values, source)
        if parameter is not None and replica_id != source:
            parameter.copy_(values)


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Which agreed parameters a round reduces, in which buckets, in which order."""

    numbers: frozenset[int]
    buckets: tuple[Bucket, ...]
    bucket_of: dict[int, int]
    early: int
    # Buckets that may leave before the backward pass ends; the others wait for the tail.

    @staticmethod
    def cut(numbers: frozenset[int], agreed: Sequence[Agreed], first_bytes: int, bytes_each: int, exact: bool) -> Plan:
        """Cut `numbers` by bytes, in the order in which replica 0 had them when they were agreed on; no sparse ones.

        `exact`: whether buckets become exact sums, with which a tail may ride.
        """
        open_: dict[tuple[torch.dtype, str], list[int]] = {}
        sizes: dict[tuple[torch.dtype, str], int] = {}
        # Of the open ones, in bytes.
        closed: list[list[int]] = []
        for number in sorted(number for number in numbers if not agreed[number].sparse):
            key = (agreed[number].gradient, agreed[number].device_type)
            open_.setdefault(key, []).append(number)
            sizes[key] = sizes.get(key, 0) + agreed[number].shape.numel() * agreed[number].gradient.itemsize
            if sizes[key] >= (bytes_each if closed else first_bytes):
                closed.append(open_.pop(key))
                del sizes[key]
        slots: dict[tuple[torch.dtype, str], int] = {}
        buckets = []
        for members in [*closed, *open_.values()]:
            key = (agreed[members[0]].gradient, agreed[members[0]].device_type)
            slots[key] = slots.get(key, -1) + 1
            buckets.append(Bucket(tuple(members), agreed, slots[key]))
        bucket_of = {number: i for i, bucket in enumerate(buckets) for number in bucket.numbers}
        # The tail rides with a last bucket of fp32 on the CPU. Reading it from a GPU would stop the host.
        carries = exact and bool(buckets) and (buckets[-1].dtype, buckets[-1].device_type) == (torch.float32, "cpu")
        return Plan(numbers, tuple(buckets), bucket_of, len(buckets) - carries)


@final
class Bucket:
    """Gradients that are reduced in one piece; those of one dtype and kind of device."""

    __slots__ = (
        "_flat",
        "_memory",
        "_placed",
        "_places",
        "_views",
        "device_type",
        "dtype",
        "key",
        "numbers",
        "numel",
        "shapes",
    )

    def __init__(self, numbers: tuple[int, ...], agreed: Sequence[Agreed], slot: int) -> None:
        self.numbers = numbers
        self.shapes = [agreed[number].shape for number in numbers]
        self.dtype = agreed[numbers[0]].gradient
        self.device_type = agreed[numbers[0]].device_type
        self.numel = sum(shape.numel() for shape in self.shapes)
        self.key = (self.dtype, self.device_type, slot)
        self._memory: _Memory | None = None
        self._flat: Tensor | None = None
        # Of the memory, as it was laid out.
        self._views: dict[int, Tensor] = {}
        # By number: where each gradient is reduced.
        self._places: dict[int, _Place] = {}
        # The same memory for gradients to show, where they may.
        self._placed: set[int] = set()
        # Numbers whose gradients show this memory already, in the present round.

    def open(self, buffers: Buffers, agreed: Sequence[Agreed], ops: CrossDeviceOps | None, extra: int) -> None:
        """Be ready for the gradients of a round, and `extra` numbers after them; every replica calls it."""
        memory = self._memory = buffers.get(self, extra, agreed, ops)
        if memory.flat is not self._flat:
            self._lay_out(memory)
        self._placed.clear()
        memory.take_back(self._stays)
        if memory.flat is not self._flat:
            self._lay_out(memory)
        elif not memory.lends:
            self._places.clear()

    def _lay_out(self, memory: _Memory) -> None:
        flat = self._flat = memory.flat
        pieces = flat[: self.numel].split([shape.numel() for shape in self.shapes])
        shaped = (piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True))
        self._views = dict(zip(self.numbers, shaped, strict=True))
        self._places = {n: _Place(view) for n, view in self._views.items() if view.numel()} if memory.lends else {}

    def _stays(self, gradient: Tensor, tracked: Tracked) -> bool:
        """Whether a gradient that shows the memory belongs where it is: the one that this round adds to."""
        # By its number of today: others have got theirs when parameters were gone.
        view = None if tracked.number is None else self._views.get(tracked.number)
        parameter = tracked.parameter()
        current = parameter is not None and parameter.grad is gradient
        return current and view is not None and _lies_in(gradient, view)

    def place(self, number: int, tracked: Tracked, parameter: nn.Parameter) -> None:
        """Let a gradient that has just been accumulated show this memory: copied while it is in the cache.

        The tensor stays who it is; its own memory is free for the next gradient.
        """
        gradient, place = parameter.grad, self._places.get(number)
        if self.device_type == "cpu" and place is not None and gradient is not None and _may_move(gradient, parameter):
            view = self._views[number]
            if not _lies_in(gradient, view):
                # Neither of the two has a graph, so nothing is recorded.
                view.copy_(gradient)
                gradient.data = place.tensor
            self._lend(gradient, place, tracked, number)

    def _lend(self, gradient: Tensor, place: _Place, tracked: Tracked, number: int) -> None:
        assert self._memory is not None
        self._placed.add(number)
        self._memory.lend(gradient, place, tracked)

    def fill(self, agreed: Sequence[Agreed], tail: Sequence[float]) -> Tensor:
        """Copy in the gradients that are not there yet, zeros where there are none; then the `tail` as it is."""
        assert self._memory is not None
        into, source = [], []
        for number, view in self._views.items():
            if number in self._placed:
                continue
            parameter = agreed[number].parameter()
            if parameter is None or parameter.grad is None:
                view.zero_()
            elif not _lies_in(parameter.grad, view):
                into.append(view)
                source.append(parameter.grad)
        _copy_all(into, source)
        return self._memory.piece(self.numel, tail)

    def hand_out(self, agreed: Sequence[Agreed], used: frozenset[int]) -> None:
        """Let the gradients show this memory, where some replica had one; the tensors stay who they are.

        Those in another layout, or with a graph of their own, get a copy; all do where users look at the memory.
        """
        into, source = [], []
        for number, view in self._views.items():
            if number in self._placed or number not in used:
                continue
            tracked = agreed[number].tracked
            parameter = None if tracked is None else tracked.parameter()
            if tracked is None or parameter is None:
                continue
            gradient = parameter.grad
            if gradient is None:
                gradient = parameter.grad = torch.empty_like(parameter, dtype=self.dtype, requires_grad=False)
            place = self._places.get(number)
            if place is not None and _may_move(gradient, parameter):
                gradient.data = place.tensor
                self._lend(gradient, place, tracked, number)
            else:
                into.append(gradient)
                source.append(view)
        _copy_all(into, source)


@final
class _Place:
    """Where one gradient lies: a storage of its own over a bucket's memory, so that it tells who looks at it.

    And so that what saves or copies a gradient takes its own bytes, not those of the whole bucket.
    """

    __slots__ = ("alone", "storage", "tensor")

    def __init__(self, view: Tensor) -> None:
        assert _uses is not None
        self.tensor = torch.from_dlpack(view)
        self.storage = self.tensor.untyped_storage()._cdata
        self.alone = _uses(self.storage)
        # While nobody else looks; asked for, since what Python holds of a storage counts in some versions of torch.

    def is_seen(self) -> bool:
        """Whether anybody besides us looks at it: a gradient, a view of one, an array."""
        assert _uses is not None
        return _uses(self.storage) > self.alone


_Lent = tuple[Callable[[], Tensor | None], Tracked, _Place]
# A gradient that shows a bucket's memory, whose it is, and its place. A tuple: one is made in every step.


@final
class _Memory:
    """A bucket's memory, and the gradients that show it."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.lends = _uses is not None
        # Whether gradients show it.
        self._home = flat
        # What was allocated; `flat` is another one while users look at it.
        self._piece = flat
        self._lent: dict[int, _Lent] = {}
        # By the storages of their places.
        self._seen: list[_Place] = []
        # What users look at in `_home`.

    def lend(self, gradient: Tensor, place: _Place, tracked: Tracked) -> None:
        """Remember a gradient that shows this memory."""
        known = self._lent.get(place.storage)
        if known is None or known[0]() is not gradient:
            self._lent[place.storage] = TensorWeakRef(gradient), tracked, place

    def piece(self, numel: int, tail: Sequence[float]) -> Tensor:
        """Return the first `numel` elements and, written behind them, the `tail`."""
        wanted = numel + len(tail)
        if self._piece.numel() != wanted:
            # Kept, since every step asks for the same: a slice takes longer than to look whether it is this one.
            self._piece = self.flat[:wanted]
        if tail:
            self._piece[numel:] = torch.tensor(tail, device="cpu")
        return self._piece

    def take_back(self, stays: Callable[[Tensor, Tracked], bool]) -> None:
        """Be free to be written to: give memory of their own to the gradients that somebody still holds.

        But for those that stay. A user may keep last step's gradients; and another plan's parameters keep theirs until
        they are reduced again. What users keep by another tensor or an array (`p.grad.detach()`, `.numpy()`) cannot be
        moved from here: then this memory is left to them until they let go of it.
        """
        seen = []
        for storage, (reference, tracked, place) in list(self._lent.items()):
            gradient = reference()
            if gradient is not None and stays(gradient, tracked):
                continue
            del self._lent[storage]
            if gradient is not None:
                gradient.data = gradient.clone()
            if place.is_seen():
                seen.append(place)
        if seen:
            self._move_out(seen)
        elif self._seen:
            self._move_back()

    def _move_out(self, seen: list[_Place]) -> None:
        """Reduce elsewhere, and lend no more: who looks at one step's gradients looks at the next step's too.

        This replica alone does so; the others' buckets are reduced through copies meanwhile.
        """
        # Those that stay keep their place, for who looks at them as well.
        self._seen = [*seen, *(place for *_, place in self._lent.values())]
        self._lent.clear()
        self.lends = False
        self.flat = self._piece = torch.empty_like(self.flat)

    def _move_back(self) -> None:
        self._seen = [place for place in self._seen if place.is_seen()]
        if not self._seen:
            self.flat = self._piece = self._home


@final
class Buffers:
    """Flat memory for buckets; plans share it, since one round goes at a time."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, str, int], _Memory] = {}
        self._release: dict[tuple[torch.dtype, str, int], Callable[[], None]] = {}
        # How what was allocated is given back.

    def get(self, bucket: Bucket, extra: int, agreed: Sequence[Agreed], ops: CrossDeviceOps | None) -> _Memory:
        memory = self._memory.get(bucket.key)
        if memory is None or memory.flat.numel() < bucket.numel + extra:
            self._give_back(bucket.key)
            flat = self._allocate(bucket, extra, agreed, ops)
            memory = self._memory[bucket.key] = _Memory(flat)
            fabric = None if ops is None else ops.fabric
            if fabric is not None:
                # Not by the ops: they may belong to no replica by then.
                self._release[bucket.key] = functools.partial(fabric.release, flat)
        return memory

    def _give_back(self, key: tuple[torch.dtype, str, int]) -> None:
        release = self._release.pop(key, None)
        if release is not None:
            release()

    @staticmethod
    def _allocate(bucket: Bucket, extra: int, agreed: Sequence[Agreed], ops: CrossDeviceOps | None) -> Tensor:
        if ops is not None:
            # Where the replicas reduce it as it lies, if there is such memory.
            with for_gradients(ops):
                return ops.allocate(bucket.numel + extra, bucket.dtype)
        owners = (agreed[number].parameter() for number in bucket.numbers)
        device = next((parameter.device for parameter in owners if parameter is not None), bucket.device_type)
        return torch.empty(bucket.numel + extra, dtype=bucket.dtype, device=device)

    def renew(self) -> None:
        """Take ordinary memory of the same sizes instead, without a word to the others, who may keep theirs."""
        for key, memory in self._memory.items():
            self._give_back(key)
            self._memory[key] = _Memory(torch.zeros_like(memory.flat))

    def clear(self) -> None:
        """Forget all; gradients that lie there stay as they are."""
        for key in list(self._memory):
            self._give_back(key)
        self._memory.clear()


@final
class History:
    """Predicts what the coming backward pass will use from what was used before: alike on all replicas.

    What followed once is expected again (a GAN's two losses alternate). What was missing is added at once, as
    it costs a second set of buckets; what was surplus is left out after `PATIENCE` equal passes, as it costs
    zeros.
    """

    def __init__(self) -> None:
        self._previous: frozenset[int] = frozenset()
        self._latest: frozenset[int] = frozenset()
        self._following: dict[frozenset[int], frozenset[int]] = {}
        self._surplus: dict[frozenset[int], tuple[frozenset[int], int]] = {}

    def predict(self) -> frozenset[int]:
        return self._following.get(self._previous, self._latest)

    def learn(self, used: frozenset[int]) -> None:
        predicted = self.predict()
        if not used <= predicted:
            self._expect(used | predicted)
        elif used != predicted:
            last, times = self._surplus.get(self._previous, (used, 0))
            times = times + 1 if last == used else 1
            if len(self._surplus) >= REMEMBERED and self._previous not in self._surplus:
                # Where layers are left out at random, what follows what hardly ever comes again.
                self._surplus.clear()
            self._surplus[self._previous] = (used, times)
            if times >= PATIENCE:
                self._expect(used)
        else:
            self._surplus.pop(self._previous, None)
        self._previous = used

    def _expect(self, numbers: frozenset[int]) -> None:
        if len(self._following) >= REMEMBERED:
            self._following.clear()
            self._surplus.clear()
        self._surplus.pop(self._previous, None)
        self._following[self._previous] = self._latest = numbers


@final
class for_gradients:  # noqa: N801
    """What begins inside says in messages that it is for gradients. No generator: that would take twice as long."""

    __slots__ = ("_fabric",)

    def __init__(self, ops: CrossDeviceOps | None) -> None:
        self._fabric = getattr(dist.group.WORLD, "shared", None) if ops is None else ops.fabric

    def __enter__(self) -> None:
        if self._fabric is not None:
            self._fabric.purpose = PURPOSE

    def __exit__(self, *exception: object) -> None:
        if self._fabric is not None:
            self._fabric.purpose = ""


def _may_move(gradient: Tensor, parameter: nn.Parameter) -> bool:
    return (
        gradient.is_contiguous()
        and parameter.is_contiguous()
        and not gradient.requires_grad
        # Part of a flat buffer of the user's own, which is to show what the replicas make of it. 0.2 µs.
        and not gradient._is_view()
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    )


def _lies_in(gradient: Tensor | None, view: Tensor) -> bool:
    return gradient is not None and gradient.data_ptr() == view.data_ptr() and gradient.is_contiguous()


def _copy_all(into: list[Tensor], source: list[Tensor]) -> None:
    if into:
        # 0.3 to 0.6 µs a gradient on a CPU, against 0.9 to 1.2 for torch.cat or a loop; one kernel on a GPU.
        torch._foreach_copy_(into, source)
