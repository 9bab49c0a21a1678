"""All-reduces by every op that fits, over many sizes: times, bandwidths, and whether the sums are right.

Knows replicas and ops; how the table is drawn is not known here.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, cast, final

import torch.distributed as dist

from mirror_nb import advice, readable
from mirror_nb.bench import table
from mirror_nb.bench.replicas import of
from mirror_nb.collectives.auto import AutoAllReduce
from mirror_nb.collectives.base import CrossDeviceOps, Member, name_of
from mirror_nb.collectives.measuring import Trial, compare
from mirror_nb.collectives.options import AUTO, IMPLEMENTATIONS, fitted, fitting, named
from mirror_nb.devices import Device
from mirror_nb.errors import UsageError
from mirror_nb.machine.memory import usable

if TYPE_CHECKING:
    from mirror_nb.pool.base import Pool
    from mirror_nb.strategies.base import Strategy

SMALLEST, LARGEST = 2**10, 2**28
COPIES = 8
# Of the largest tensor, that a CPU replica may have to find room for: its own, and what ops make of all of them.
LARGE = 2**20
# From here on a tensor is called large: gradient buckets are, as a rule.
SECONDS_A_SIZE = 0.4


@final
@dataclass(frozen=True, slots=True)
class AllReduceRow:
    """One op at one size."""

    op: str
    nbytes: int
    # Of each replica's fp32 tensor.
    p50_us: float
    p95_us: float
    # From when the last replica began until the last one had the sum, µs.
    algorithm_gbps: float
    # nbytes / p50, in 1e9 bytes a second, as nccl-tests has it.
    bus_gbps: float
    # That times 2 (n − 1) / n: what each replica has to send and receive at least.
    correct: bool
    # Every sum, of numbers that were new each time.

    @staticmethod
    def of(op: str, nbytes: int, trial: Trial, num_replicas: int) -> AllReduceRow:
        """Return the row of a trial. Source of the definitions: nccl-tests, doc/PERFORMANCE.md."""
        p50 = trial.quantile(0.5)
        algorithm = nbytes / p50 / 1000 if p50 else 0.0
        bus = algorithm * 2 * (num_replicas - 1) / num_replicas
        return AllReduceRow(op, nbytes, p50, trial.quantile(0.95), algorithm, bus, trial.correct)


@final
@dataclass(frozen=True, slots=True)
class AllReduceTable:
    """What `all_reduce` measured. It shows itself as a table, in a notebook and in a terminal."""

    rows: tuple[AllReduceRow, ...]
    devices: tuple[str, ...]
    # One a replica.
    default: str = ""
    # The op that these devices get where none is named.
    in_notebook: bool = False
    # Whether advice is in the words of `%mirror`.

    @property
    def advice(self) -> tuple[str, ...]:
        """Which op is the fastest for small and for large tensors, and how to choose it: one sentence, or none.

        Of a group of sizes that is the op with the least geometric mean of its medians, among those that were right.
        """
        sizes = sorted({row.nbytes for row in self.rows})
        groups = [("small", [n for n in sizes if n < LARGE]), ("large", [n for n in sizes if n >= LARGE])]
        found = [(op, _said(kind, group)) for kind, group in groups if (op := self._fastest_over(group)) is not None]
        if found and all(self._wins(found[0][0], n) for n in sizes):
            found = [(found[0][0], "all sizes measured")]
        argument, auto = (_restart, "--ops auto") if self.in_notebook else (_argument, repr(AUTO))
        return (advice.fastest_ops(found, argument, auto, self.default),) if found else ()

    def _wins(self, op: str, nbytes: int) -> bool:
        right = [row for row in self.rows if row.nbytes == nbytes and row.correct]
        return bool(right) and self.fastest(nbytes) == op

    def _fastest_over(self, sizes: Sequence[int]) -> str | None:
        rows = [row for row in self.rows if row.nbytes in sizes]
        right = {row.op for row in rows} - {row.op for row in rows if not row.correct}
        means = {op: statistics.geometric_mean([r.p50_us for r in rows if r.op == op]) for op in sorted(right)}
        return min(means, key=lambda op: means[op], default=None)

    def fastest(self, nbytes: int) -> str:
        """Return the op with the least median at a size, bytes, among those that were right.

        Raises UsageError for a size that was not measured.
        """
        rows = [row for row in self.rows if row.nbytes == nbytes and row.correct]
        if not rows:
            sizes = ", ".join(map(str, sorted({row.nbytes for row in self.rows})))
            raise UsageError(f"nothing of {nbytes} bytes was measured; there are: {sizes}")
        return min(rows, key=lambda row: row.p50_us).op

    def to_pandas(self) -> Any:
        """Return a DataFrame with the fields of AllReduceRow. Raises MirrorError where pandas is not installed."""
        return table.as_frame([asdict(row) for row in self.rows])

    def plot(self) -> Any:
        """Draw time and bus bandwidth over the size; return the matplotlib figure, which a notebook shows."""
        # By name: what draws lives above.
        return importlib.import_module("mirror_nb.notebook.charts").draw_all_reduce(self)

    def __repr__(self) -> str:
        return table.as_text(self._headline(), _HEADER, self._cells(), self.advice, names=2, best=_BEST)

    def _repr_html_(self) -> str:
        return table.as_html(self._headline(), _HEADER, self._cells(), self.advice, names=2, best=_BEST)

    def _headline(self) -> str:
        return f"all-reduce of fp32 over {len(self.devices)} replicas ({', '.join(self.devices)})"

    def _cells(self) -> list[table.Cells]:
        best = {n: self.fastest(n) for n in {row.nbytes for row in self.rows if row.correct}}
        return [
            [
                (readable.size(row.nbytes), False),
                (row.op, False),
                (readable.number(row.p50_us), best.get(row.nbytes) == row.op),
                (readable.number(row.p95_us), False),
                (f"{row.algorithm_gbps:.3g}", False),
                (f"{row.bus_gbps:.3g}", False),
                ("yes" if row.correct else "NO", False),
            ]
            for row in self.rows
        ]


_BEST = "the fastest of its size"
_HEADER = ("size", "op", "p50 µs", "p95 µs", "algorithm GB/s", "bus GB/s", "correct")


def _said(kind: str, sizes: Sequence[int]) -> str:
    ends = dict.fromkeys(readable.size(n) for n in (sizes[0], sizes[-1]))
    return f"{kind} tensors ({' to '.join(ends)})"


def _argument(op: str) -> str:
    # Of a class of the user's own only the name is known.
    return f"cross_device_ops={op!r}" if op in IMPLEMENTATIONS else f"cross_device_ops={op}(...)"


def _restart(op: str) -> str:
    return f"%mirror restart --ops {op}"


def all_reduce(
    strategy: Strategy | Pool,
    *,
    sizes: int | Sequence[int] | None = None,
    ops: CrossDeviceOps | str | Sequence[CrossDeviceOps | str] | None = None,
    seconds: float = SECONDS_A_SIZE,
) -> AllReduceTable:
    """Time an all-reduce by each op, in turns, on tensors that are filled anew each time, and check every sum.

    `sizes`: bytes of a replica's fp32 tensor, one or several; None: 1 KiB to 256 MiB, each four times the last; CPU
    replicas take no more than the machine's memory allows.
    `ops`: an op or its name, or several; None: all that fit the devices. `seconds`: about so long for each size. In a
    `%%mirrored` cell every replica has to call it.

    Raises UsageError for sizes and times that cannot be, for what memory has no room for and for a single replica,
    DeviceError for an op that cannot work on these devices, and what an op raises.
    """
    replicas = of(strategy)
    chosen = chosen_ops(ops, replicas.devices)
    bytes_each = _sizes(sizes, replicas.devices)
    check_seconds(seconds)
    found: dict[int, dict[str, Trial]] = replicas.call(_measure, chosen, bytes_each, seconds)[0]
    n = len(replicas.devices)
    rows = tuple(AllReduceRow.of(op, s, trial, n) for s, trials in found.items() for op, trial in trials.items())
    return AllReduceTable(rows, tuple(map(str, replicas.devices)), fitting(replicas.devices)[0])


def check_seconds(seconds: float, called: str = "`seconds`") -> None:
    """Raise UsageError for a time that cannot be, or that has no end."""
    if not isinstance(seconds, int | float | Real):
        raise UsageError(f"{called} is {seconds!r}; it must be a number")
    if not 0 < seconds < math.inf:
        raise UsageError(f"{called} is {seconds:g}; it must be above 0, and have an end")


def chosen_ops(
    ops: CrossDeviceOps | str | Sequence[CrossDeviceOps | str] | None, devices: Sequence[Device]
) -> dict[str, CrossDeviceOps]:
    """Return ops by the names that tables give them.

    Raises UsageError for a name that is none or comes twice, DeviceError for an op that does not fit `devices`.
    """
    chosen: dict[str, CrossDeviceOps] = {}
    if ops is None:
        ops = fitting(devices)
    elif isinstance(ops, str | type) or not isinstance(ops, Iterable):
        ops = [ops]
    for given in ops:
        if isinstance(given, str) and given.strip().lower() == AUTO:
            raise UsageError(f"`ops` holds {given!r}, which takes one of {', '.join(fitting(devices))}: name those")
        op = named(given, devices) if isinstance(given, str) else given
        if not isinstance(op, CrossDeviceOps):
            raise UsageError(f"`ops` holds {given!r}; it takes cross-device ops and their names")
        name = name_of(op) if isinstance(given, str) else type(op).__name__
        if name in chosen:
            raise UsageError(f"`ops` has {name} twice")
        chosen[name] = fitted(op, devices)
    if not chosen:
        raise UsageError("`ops` is empty; name at least one")
    return chosen


def sizes_to(largest: int) -> tuple[int, ...]:
    """Return the sizes of a table up to `largest` bytes, each four times the last. Raises UsageError where none is."""
    if largest < SMALLEST:
        raise UsageError(f"the largest size is {largest} bytes; it starts with {SMALLEST}, and {LARGEST} is usual")
    return tuple(2**k for k in range(SMALLEST.bit_length() - 1, largest.bit_length(), 2))


def _sizes(sizes: int | Sequence[int] | None, devices: Sequence[Device]) -> tuple[int, ...]:
    # Of all memory, not of what is free: in a cell each replica asks for itself.
    room = math.inf if devices[0].kind == "cuda" else usable().total // len(devices)
    if sizes is None:
        return tuple(size for size in sizes_to(LARGEST) if size <= max(room / COPIES, SMALLEST))
    sizes = list(sizes) if isinstance(sizes, Iterable) else [sizes]
    wrong = [size for size in sizes if not isinstance(size, int | Integral) or size < 4]
    if wrong:
        raise UsageError(f"`sizes` holds {wrong[0]!r}; it takes whole numbers of bytes, and an fp32 takes 4 bytes")
    if not sizes:
        raise UsageError("`sizes` is empty")
    if max(sizes) > room:
        # The system would end the replicas, or another process.
        raise UsageError(
            f"`sizes` holds {readable.size(max(sizes))}; each of {len(devices)} replicas has at most "
            f"{readable.size(int(room))} of memory"
        )
    # Whole elements.
    return tuple(dict.fromkeys(int(size) // 4 * 4 for size in sizes))


def _measure(
    strategy: Strategy, ops: Mapping[str, CrossDeviceOps], sizes: Sequence[int], seconds: float
) -> dict[int, dict[str, Trial]]:
    """On a replica: time the ops."""
    place = strategy._place
    assert place.replica_id is not None
    assert place.device is not None
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    # Bound as one, so that they share memory also where the process group brings none.
    before, together = place.communication, AutoAllReduce(list(ops.values()))
    together.bind(Member(place.replica_id, place.num_replicas, place.device, group))
    try:
        return {size: compare(ops, size // 4, seconds=seconds) for size in sizes}
    finally:
        together.unbind()
        # In a cell, or a script of its own processes, one of them may be what gradients go through.
        if dist.is_initialized():
            place.communicate(before)
