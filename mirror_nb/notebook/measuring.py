"""How long all-reduces and steps take: on the notebook's replicas, else on others that live as long as this takes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mirror_nb import devices as device_names
from mirror_nb.bench.collectives import AllReduceTable, all_reduce
from mirror_nb.bench.command import Options, check, imported, measure, several
from mirror_nb.bench.steps import StepTable
from mirror_nb.collectives.base import BYTES_PER_PACK
from mirror_nb.devices import Device
from mirror_nb.errors import UsageError
from mirror_nb.pool.base import Pool
from mirror_nb.pool.local import LocalPool
from mirror_nb.strategies.mirrored import SETUP

QUICK_SIZES = (64 * 2**10, 2**20, BYTES_PER_PACK)
# Bytes, of all-reduces that are measured for the picker.
QUICK_SECONDS = 0.3
# For each size.


class Measuring:
    """What is measured in one notebook. `mended` gives its replicas, all alive, if there are any."""

    def __init__(self, user_ns: Mapping[str, Any], mended: Callable[[], Pool | None]) -> None:
        self._user_ns = user_ns
        self._mended = mended
        self.measured: dict[tuple[str, ...], AllReduceTable] = {}
        # What all-reduces took when they were last measured here, by devices.

    def bench(self, pool: Pool | None, options: Options, model: str | None = None) -> AllReduceTable | StepTable:
        """Measure the cross-device ops: alone, or under the steps of a model.

        `pool`: the notebook's replicas as they stand. `model`: the notebook's name of a module or of what makes one,
        else `module:function`. Raises UsageError for one that is not there and for a wrong call, DeviceError for
        devices that are not there, and what the measurement raises.
        """
        devices = several(options.devices) if pool is None else _measurable(pool, options.devices)
        check(options, devices, model is not None)
        made = None if model is None else self._model(model)
        running = self._mended()
        with contextlib.nullcontext(running) if running is not None else _started(devices) as measured:
            table = measure(measured, options, made)
        return self._kept(table) if isinstance(table, AllReduceTable) else table

    def _model(self, name: str) -> Any:
        if name not in self._user_ns and ":" not in name:
            raise UsageError(f"--model {name}: the notebook has no such name")
        return self._user_ns[name] if name in self._user_ns else imported(name)

    def quickly(self, pool: Pool | None, devices: str) -> AllReduceTable:
        """Time the all-reduces that fit these devices, a few sizes each, for the picker.

        On the replicas that run, if they are on these devices. Raises DeviceError for devices that are not there,
        UsageError for a single one, and what `all_reduce` raises.
        """
        chosen = device_names.resolve(devices, torch.cuda.device_count())
        running = self._mended() if pool is not None and pool.devices == chosen else None
        with contextlib.nullcontext(running) if running is not None else _started(chosen) as measured:
            return self._kept(all_reduce(measured, sizes=QUICK_SIZES, seconds=QUICK_SECONDS))

    def _kept(self, table: AllReduceTable) -> AllReduceTable:
        table = dataclasses.replace(table, in_notebook=True)
        self.measured[table.devices] = table
        return table


def _measurable(pool: Pool, devices: str | None) -> tuple[Device, ...]:
    """Return the devices of the replicas that run. Raises UsageError for a single one, and if others are named."""
    if devices is not None:
        raise UsageError(
            f"%mirror bench measures the replicas that run, on {', '.join(map(str, pool.devices))}; leave out "
            f"--devices, or use %mirror restart --devices {devices} first (their names are lost then)"
        )
    if pool.size < 2:
        raise UsageError(
            f"one replica ({pool.devices[0]}) reduces with nobody; %mirror restart --devices cpu:0,cpu:1, say, "
            "starts several (its names are lost then), and after %mirror stop, %mirror bench has some of its own"
        )
    return pool.devices


@contextlib.contextmanager
def _started(devices: tuple[Device, ...]) -> Iterator[Pool]:
    """Yield replicas that live as long as the block."""
    with LocalPool(devices, setup=SETUP) as pool:
        pool.start()
        yield pool
