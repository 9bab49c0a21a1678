"""Replicas to measure on, whoever started them. Knows strategies and pools; knows no measurement."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

from mirror_nb import devices as device_names
from mirror_nb.devices import Device
from mirror_nb.errors import UsageError
from mirror_nb.messages import Call
from mirror_nb.pool.base import Pool
from mirror_nb.pool.failures import settle
from mirror_nb.strategies.base import Strategy
from mirror_nb.strategies.mirrored import MirroredStrategy
from mirror_nb.transfer.packing import pack


class Replicas(ABC):
    """Several replicas that do as they are told."""

    devices: tuple[Device, ...]

    @abstractmethod
    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(strategy, *args)` on each of them, with its strategy; return the results by replica id."""


@final
class OfStrategy(Replicas):
    """The replicas of a strategy, wherever the caller stands; on a replica, every one has to call."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.devices = check_several(tuple(map(device_names.parse, strategy._place.devices)))

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn` through the strategy."""
        place = self._strategy._place
        return place.every(place.command(fn, (self._strategy, *args), changes=False))


@final
class OfPool(Replicas):
    """The replicas of a pool that no strategy holds: a notebook's."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.devices = check_several(pool.devices)

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn` with the strategy that each replica has itself."""
        pool = self._pool
        function = pack(_with_its_strategy, in_band=True).payload
        with contextlib.closing(pack(((fn, *args), {}))) as packed:
            call = Call(function, packed.payload, plain=True)
            report = pool.run(
                dict.fromkeys(range(pool.size), call), slabs=dict.fromkeys(range(pool.size), packed.slab)
            )
        settle(report, pool.devices)
        return [result for result, _ in report.unpacked().values()]


def of(where: Strategy | Pool) -> Replicas:
    """Return the replicas of a strategy or a pool.

    Raises UsageError for what is none, and where there is one replica only.
    """
    if isinstance(where, Strategy):
        return OfStrategy(where)
    if isinstance(where, Pool):
        return OfPool(where)
    raise UsageError(f"`strategy` is {where!r}; pass a strategy: MirroredStrategy([...])")


def _with_its_strategy(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(MirroredStrategy(), *args)


def check_several(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the devices. Raises UsageError for a single one."""
    if len(devices) < 2:
        raise UsageError(
            f"one replica ({', '.join(map(str, devices))}) reduces with nobody; measure on several, such as "
            "--devices cpu:0,cpu:1 or MirroredStrategy(['cpu:0', 'cpu:1'])"
        )
    return devices
