"""Strategies with one replica, in this process: OneDeviceStrategy, and the default where none was entered."""

from __future__ import annotations

from typing import final

import torch

from mirror_nb import devices
from mirror_nb.errors import DeviceError
from mirror_nb.strategies.alone import AlonePlace
from mirror_nb.strategies.base import Strategy


@final
class OneDeviceStrategy(Strategy):
    """Puts everything on one device, in this process: to try code written for several without them.

    Modules and Variables made in its scope and the batches of its datasets land on `device` ("cuda:0", "GPU:0", 0,
    "cpu:0"). `run` calls the function here and returns its plain value, with no PerReplica around it.
    Source: tf.distribute.OneDeviceStrategy. Raises DeviceError for a device that is not there, and for several.
    """

    def __init__(self, device: str | int | torch.device) -> None:
        one = [device] if isinstance(device, torch.device) else device
        found = devices.resolve(one, torch.cuda.device_count())
        if len(found) != 1 or device is None:
            raise DeviceError(
                f"OneDeviceStrategy wants one device, not {device!r}; for several there is MirroredStrategy"
            )
        super().__init__(AlonePlace(found[0]))

    def __repr__(self) -> str:
        return f"<OneDeviceStrategy: {self._place.devices[0]}>"


@final
class DefaultStrategy(Strategy):
    """What `get_strategy()` gives where no strategy was entered: one replica, this process, torch's default device."""

    def __init__(self) -> None:
        default = torch.get_default_device()
        known = default.type in ("cpu", "cuda")
        super().__init__(AlonePlace(devices.Device(default.type if known else "cpu", default.index or 0)))

    def close(self) -> None:
        """Do nothing: it is there whenever no other strategy is."""

    def __repr__(self) -> str:
        return "<DefaultStrategy: one replica, this process>"
