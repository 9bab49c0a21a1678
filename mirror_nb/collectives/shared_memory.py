"""All-reduce of CPU replicas through memory that all of them map. The algorithm itself is the fabric's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import final

from torch import Tensor

from mirror_nb.collectives.base import CrossDeviceOps
from mirror_nb.collectives.exchange import Exchange
from mirror_nb.collectives.fabric import Fabric
from mirror_nb.collectives.handles import Handle
from mirror_nb.collectives.headers import DTYPES, Fold
from mirror_nb.devices import Device
from mirror_nb.errors import ReplicaError, UsageError
from mirror_nb.values import ReduceOp


def fold_of(op: ReduceOp) -> Fold:
    """Return the fold that makes an op's result."""
    return Fold.MEAN if op is ReduceOp.MEAN else Fold.SUM


@final
class SharedMemoryAllReduce(CrossDeviceOps):
    """The default for CPU replicas: each sums a slice where all read it, waits take microseconds.

    Tensors of `allocate` are reduced where they lie, others through a copy. bf16 and fp16 are summed in fp32. The bits
    of the result depend on nothing but the values: replica 0 + 1 + 2 + …, however tensors are cut into buckets.
    """

    _called = "shared_memory"

    exact = True

    def start(self, op: ReduceOp, flat: Tensor) -> Handle:
        """Begin an all-reduce; it goes on when waited for, at `progress`, and when another one begins."""
        fabric = fabric_for(self, flat)
        return ExchangeHandle(fabric, fabric.all_reduce(flat, fold_of(op)))

    def unfit_for(self, devices: Sequence[Device]) -> str | None:
        """Return why not: GPUs, or no Linux."""
        return needs_shared_memory(devices)


@final
class ExchangeHandle(Handle):
    """A collective through shared memory."""

    __slots__ = ("_exchange", "_fabric")

    def __init__(self, fabric: Fabric, exchange: Exchange) -> None:
        self._fabric = fabric
        self._exchange = exchange

    def wait(self, seconds: float | None = None) -> None:
        """Carry it on until it has ended."""
        self._fabric.wait(self._exchange, seconds)

    def done(self) -> bool:
        """Whether it has ended, after carrying it on as far as it goes without waiting."""
        if not self._exchange.ended:
            self._fabric.progress()
        return self._exchange.ended

    def times(self) -> tuple[int, int] | None:
        """From when all had come to it until its end."""
        return self._exchange.started_ns, self._exchange.ended_ns


def fabric_for(ops: CrossDeviceOps, flat: Tensor) -> Fabric:
    """Return what an op's replicas exchange a tensor by. Raises what there is to say where they share no memory."""
    fabric = ops.fabric
    if fabric is None:
        why = getattr(ops.member.group, "unshared", "") or "the replicas share no memory"
        raise ReplicaError(f"{type(ops).__name__} cannot work here: {why}; use GlooAllReduce()")
    if flat.is_cpu and flat.dtype not in DTYPES:
        raise UsageError(f"nothing here reduces {flat.dtype}; convert it first: tensor.float()")
    if not flat.is_cpu:
        raise UsageError(
            f"{type(ops).__name__} reduces on the CPU, but the tensor is on {flat.device}; move it: tensor.cpu()"
        )
    return fabric


def needs_shared_memory(devices: Sequence[Device]) -> str | None:
    """Say why replicas on `devices` cannot reduce through shared memory, None if they can."""
    if any(device.kind != "cpu" for device in devices):
        return "it is for CPU replicas"
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    return None
