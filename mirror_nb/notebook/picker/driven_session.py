"""A notebook's session as the picker drives it. Knows sessions, not widgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from mirror_nb import devices as device_names
from mirror_nb.collectives.options import IMPLEMENTATIONS
from mirror_nb.errors import UsageError
from mirror_nb.notebook.picker.choice import Choice, Driven, Offers, Operation, Standing
from mirror_nb.notebook.session import Session


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
        """Return the cross-device ops that fit; a session cannot choose bucket size and precision yet."""
        return Offers(operations=tuple(map(Operation, _fitting(devices))))

    def start(self, choice: Choice) -> str:
        """Start replicas."""
        return self._session.start(_devices(choice), ops=choice.operation)

    def restart(self, choice: Choice) -> str:
        """Stop the replicas and start others."""
        return self._session.restart(_devices(choice), choice.operation)

    def stop(self) -> str:
        """Stop the replicas."""
        return self._session.stop()

    def measure(self, choice: Choice) -> str:
        """Raise UsageError: see `offers`."""
        raise UsageError("all-reduces cannot be measured here yet; `python -m mirror_nb watch` shows a training's")


def _devices(choice: Choice) -> str:
    if choice != Choice(choice.devices, choice.operation):
        raise UsageError(f"{choice.arguments()}: only devices and ops can be chosen yet; leave the rest out")
    return ",".join(choice.devices)


def _fitting(devices: Sequence[str]) -> list[str]:
    named = [device_names.parse(name) for name in devices]
    # To ask whether GPUs reach each other's memory would start CUDA in the kernel, which goes without it.
    asked = {name: kind for name, kind in IMPLEMENTATIONS.items() if name != "symmetric_memory"}
    return [name for name, kind in asked.items() if kind().unfit_for(named) is None]
