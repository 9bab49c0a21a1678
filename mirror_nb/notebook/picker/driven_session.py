"""A notebook's session as the picker drives it. Knows sessions, not widgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from mirror_nb import devices as device_names
from mirror_nb import readable
from mirror_nb.collectives.options import AUTO, COMPRESSIONS, IMPLEMENTATIONS, CommunicationOptions
from mirror_nb.notebook.options import GradientFlags
from mirror_nb.notebook.picker.choice import Choice, Driven, Offers, Operation, Standing
from mirror_nb.notebook.session import Session

BUCKETS = (2**20, 4 * 2**20, 100 * 2**20)
# Bytes: what is offered beside the default.


@final
class DrivenSession(Driven):
    """Starts and stops the replicas of a session, as `%mirror start` and its siblings do."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def gpus(self) -> int:
        """Return how many GPUs are visible."""
        return torch.cuda.device_count()

    def standing(self) -> Standing:
        """Return which replicas run."""
        pool = self._session.pool
        if pool is None or pool.closed:
            return Standing()
        return Standing(tuple(map(str, pool.devices)), tuple(status.pid for status in pool.status()))

    def offers(self, devices: Sequence[str]) -> Offers:
        """Return what can be picked: for a single replica, which reduces nothing, only its op."""
        names = _fitting(devices)
        if len(devices) < 2:
            return Offers(operations=tuple(map(Operation, names)))
        rows = table.rows if (table := self._session.measuring.measured.get(tuple(devices))) is not None else ()
        times = {name: tuple((row.nbytes, row.p50_us / 1e6) for row in rows if row.op == name) for name in names}
        return Offers(
            operations=(*(Operation(name, times[name]) for name in names), Operation(AUTO)),
            bucket_sizes=tuple(dict.fromkeys([CommunicationOptions().bytes_per_pack, *BUCKETS])),
            compressions=("none", *COMPRESSIONS),
            measurable=True,
        )

    def start(self, choice: Choice) -> str:
        """Start replicas."""
        return self._session.start(",".join(choice.devices), exchange=_exchange(choice))

    def restart(self, choice: Choice) -> str:
        """Stop the replicas and start others."""
        return self._session.restart(",".join(choice.devices), _exchange(choice))

    def stop(self) -> str:
        """Stop the replicas."""
        return self._session.stop()

    def measure(self, choice: Choice) -> str:
        """Time the all-reduces that fit the devices."""
        table = self._session.measuring.quickly(self._session.pool, ",".join(choice.devices))
        best: dict[str, list[str]] = {}
        for size in sorted({row.nbytes for row in table.rows}):
            best.setdefault(table.fastest(size), []).append(readable.size(size))
        said = [f"{op} for {' and '.join(sizes) if len(best) > 1 else 'all sizes'}" for op, sizes in best.items()]
        return f"measured on {', '.join(table.devices)}; fastest: {', '.join(said)}"


def _exchange(choice: Choice) -> GradientFlags:
    size = None if choice.bucket_size is None else choice.bucket_size / 2**20
    return GradientFlags(choice.operation, size, choice.compression)


def _fitting(devices: Sequence[str]) -> list[str]:
    named = [device_names.parse(name) for name in devices]
    # To ask whether GPUs reach each other's memory would start CUDA in the kernel, which goes without it.
    asked = {name: kind for name, kind in IMPLEMENTATIONS.items() if name != "symmetric_memory"}
    return [name for name, kind in asked.items() if kind().unfit_for(named) is None]
