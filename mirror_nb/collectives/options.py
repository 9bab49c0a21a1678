"""Which cross-device op to take: by name, by what fits the devices, by the user's options."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, final

from mirror_nb.collectives.auto import AutoAllReduce
from mirror_nb.collectives.base import BYTES_PER_PACK, CrossDeviceOps, Member
from mirror_nb.collectives.compressed import Compressed
from mirror_nb.collectives.gloo import GlooAllReduce
from mirror_nb.collectives.hierarchical_copy import HierarchicalCopyAllReduce
from mirror_nb.collectives.nccl import NcclAllReduce
from mirror_nb.collectives.one_device import ReductionToOneDevice
from mirror_nb.collectives.shared_memory import SharedMemoryAllReduce
from mirror_nb.collectives.symmetric_memory import SymmetricMemoryAllReduce
from mirror_nb.devices import Device
from mirror_nb.errors import DeviceError, TransferError, UsageError
from mirror_nb.transfer.pickler import dumps

IMPLEMENTATIONS: dict[str, type[CrossDeviceOps]] = {
    "nccl": NcclAllReduce,
    "shared_memory": SharedMemoryAllReduce,
    "hierarchical_copy": HierarchicalCopyAllReduce,
    "symmetric_memory": SymmetricMemoryAllReduce,
    "one_device": ReductionToOneDevice,
    "gloo": GlooAllReduce,
}
# In the order in which the default is looked for.
AUTO = "auto"
COMPRESSIONS = ("bf16",)
LONGEST_SECONDS = 1e9
# What every clock that waits here can count to.


@final
@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """How gradients travel.

    `bytes_per_pack`: size of a gradient bucket; 0 means the default, 25 MiB, as in TensorFlow. `timeout_seconds`: how
    long a replica on the CPU waits for a collective; None: as long as the process group allows. A GPU waits until the
    cell is interrupted or a replica fails, under torchrun as long as NCCL's own watch allows. `implementation`: the
    name of cross-device ops, or "auto" for the default of the devices, unmeasured. `compression`: "bf16" for gradients
    of fp32 in half the bytes, rounded to 8 bits; None: as they are.

    Raises UsageError for sizes and times that cannot be, and for an implementation that is not there.
    """

    bytes_per_pack: int = BYTES_PER_PACK
    timeout_seconds: float | None = None
    implementation: str = AUTO
    compression: str | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.bytes_per_pack):
            raise UsageError(f"`bytes_per_pack` is {self.bytes_per_pack!r}; it must be a number, 0 for the default")
        if self.timeout_seconds is not None and not _is_number(self.timeout_seconds):
            raise UsageError(f"`timeout_seconds` is {self.timeout_seconds!r}; it must be a number or None")
        if not 0 <= self.bytes_per_pack < math.inf or self.bytes_per_pack % 1:
            raise UsageError(f"`bytes_per_pack` is {self.bytes_per_pack}; it is a whole number of bytes from 0 on")
        object.__setattr__(self, "bytes_per_pack", int(self.bytes_per_pack) or BYTES_PER_PACK)
        if self.timeout_seconds is not None and not 0 < self.timeout_seconds <= LONGEST_SECONDS:
            raise UsageError(
                f"`timeout_seconds` is {self.timeout_seconds}; it must be above 0 and at most {LONGEST_SECONDS:.0e}, "
                "or None for as long as the process group allows"
            )
        if self.timeout_seconds is not None:
            # A number of NumPy's is none to a timedelta.
            object.__setattr__(self, "timeout_seconds", float(self.timeout_seconds))
        name = getattr(self.implementation, "name", self.implementation)
        if not isinstance(name, str):
            raise UsageError(f"`implementation` is {name!r}; it is a name, an op itself goes into `cross_device_ops`")
        name = name.lower()
        if name != AUTO:
            named(name)
        object.__setattr__(self, "implementation", name)
        if self.compression is not None and self.compression not in COMPRESSIONS:
            raise UsageError(
                f"`compression` is {self.compression!r}; it is None or {', '.join(map(repr, COMPRESSIONS))}"
            )


def _is_number(value: object) -> bool:
    # Truth values are integers to Python, and to nobody else.
    return isinstance(value, int | float | Real) and not isinstance(value, bool)


@final
@dataclass(frozen=True, slots=True)
class Communication:
    """What replicas reduce by, and how."""

    ops: CrossDeviceOps
    # What was asked for.
    options: CommunicationOptions
    reducer: CrossDeviceOps = field(init=False)
    # What gradients go through: `ops`, or what compresses for it.

    def __post_init__(self) -> None:
        compresses = self.options.compression is not None and not isinstance(self.ops, Compressed)
        object.__setattr__(self, "reducer", Compressed(self.ops) if compresses else self.ops)

    def take_over(self, before: Communication, member: Member) -> None:
        """Work for this replica in the place of what it reduced by `before`, which goes on where this one raises."""
        before.unbind()
        try:
            self.bind(member)
        except BaseException:
            if before is not self:
                self.unbind()
                before.bind(member)
            raise

    def bind(self, member: Member) -> None:
        """Have it work for this replica, within the time that the options allow.

        Raises DeviceError where what was asked for needs GPUs that reach each other's memory, and these do not.
        """
        self.reducer.bind(replace(member, timeout_seconds=self.options.timeout_seconds))
        if isinstance(self.ops, SymmetricMemoryAllReduce) and member.num_replicas > 1 and member.has_nccl:
            self.ops.check_reach()

    def unbind(self) -> None:
        """Have it belong to no replica."""
        self.reducer.unbind()

    def record_ended(self) -> None:
        """Record the timings of what a GPU has finished since; it never waits."""
        self.reducer.record_ended()
        if self.ops is not self.reducer:
            self.ops.record_ended()

    def pickled(self) -> bytes:
        """Return it as it travels: a user's op may be a class of the notebook."""
        return dumps(self)


def chosen(ops: Any, options: Any, devices: Sequence[Device]) -> Communication:
    """Return what replicas on `devices` reduce by: an op, its name, or None for the options' or the default one.

    Raises UsageError for what is none, TransferError for an op that cannot be sent to replicas, DeviceError for one
    that cannot work on these devices.
    """
    if options is None:
        options = CommunicationOptions()
    if not isinstance(options, CommunicationOptions):
        raise UsageError(f"`communication_options` must be CommunicationOptions(...), not {reprlib.repr(options)}")
    if ops is None and options.implementation != AUTO:
        ops = options.implementation
    if isinstance(ops, str):
        ops = fastest_for(devices) if ops.strip().lower() == AUTO else named(ops, devices)
    if ops is None:
        return Communication(default_for(devices), options)
    if isinstance(ops, type) and issubclass(ops, CrossDeviceOps):
        raise UsageError(f"`cross_device_ops` is the class {ops.__name__}; pass an op: {ops.__name__}()")
    if not isinstance(ops, CrossDeviceOps):
        raise UsageError(
            f"`cross_device_ops` is {ops!r}; it must be a CrossDeviceOps, or one of the names "
            + ", ".join([*IMPLEMENTATIONS, AUTO])
        )
    found = Communication(fitted(ops, devices), options)
    try:
        found.pickled()
    except Exception as error:
        raise TransferError(
            f"`cross_device_ops` is {ops!r}, which cannot be sent to the replicas ({error}); make in `start` what "
            f"cannot travel, a lock say, and where one has made it already, assign a new {type(ops).__name__}"
        ) from error
    return found


def named(name: str, devices: Sequence[Device] | None = None) -> CrossDeviceOps:
    """Return a new op by its name ("shared_memory", "nccl", …), or that of its class.

    Raises UsageError for another one, and says which there are: for `devices`, if these are given.
    """
    key = name.strip().lower().replace("-", "_").removesuffix("()")
    classes = {kind.__name__.lower(): kind for kind in IMPLEMENTATIONS.values()}
    found = IMPLEMENTATIONS.get(key) or classes.get(key)
    if found is None:
        there = [*IMPLEMENTATIONS] if devices is None else fitting(devices)
        raise UsageError(f"there is no cross-device op {name!r}; there are: {', '.join([*there, AUTO])}")
    return found()


def fitting(devices: Sequence[Device]) -> list[str]:
    """Return the names of the ops that work on `devices`, the default first."""
    return [name for name, kind in IMPLEMENTATIONS.items() if kind().unfit_for(devices) is None]


def default_for(devices: Sequence[Device]) -> CrossDeviceOps:
    """Return the op that is fastest on `devices` as a rule. Raises DeviceError where none works."""
    # No further than the first that does, since in a replica an op may ask which GPUs reach each other's memory.
    for kind in IMPLEMENTATIONS.values():
        ops = kind()
        if ops.unfit_for(devices) is None:
            return ops
    raise DeviceError(f"no cross-device op works on {_listed(devices)} with this build of torch")


def fastest_for(devices: Sequence[Device]) -> CrossDeviceOps:
    """Return the op that measures, at its first use, which of those that work on `devices` is the fastest.

    Raises DeviceError where none works.
    """
    default_for(devices)
    return AutoAllReduce([named(name) for name in fitting(devices)])


def fitted(ops: CrossDeviceOps, devices: Sequence[Device]) -> CrossDeviceOps:
    """Return what `ops` is on `devices`.

    Raises DeviceError where it cannot work there: why, and which can; UsageError where its class returns what says
    nothing.
    """
    reason: Any = ops.unfit_for(devices)
    if not isinstance(reason, str | None):
        raise UsageError(
            f"{type(ops).__name__}.unfit_for returned {reason!r}; it has to return why the op cannot work, or None"
        )
    if reason is not None:
        raise DeviceError(
            f"{type(ops).__name__} cannot work on {_listed(devices)}: {reason}; these can: "
            + ", ".join([*fitting(devices), AUTO])
        )
    found: Any = ops.on(devices)
    if not isinstance(found, CrossDeviceOps):
        raise UsageError(f"{type(ops).__name__}.on returned {found!r}; it has to return an op, `self` as a rule")
    parts: Any = found.parts()
    if not isinstance(parts, Sequence) or not all(isinstance(part, CrossDeviceOps) for part in parts):
        raise UsageError(f"{type(found).__name__}.parts returned {parts!r}; it has to return a list of ops")
    return found


def _listed(devices: Sequence[Device]) -> str:
    return ", ".join(map(str, devices))
