"""What devices this machine has, who uses them and how they are linked: NVML and psutil, no CUDA. Draws nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, final

import psutil

from mirror_nb.errors import UsageError
from mirror_nb.machine.cores import cores
from mirror_nb.telemetry.machine import Gpus, Host, Reading
from mirror_nb.telemetry.samples import clock

NVLINK = "NVLink"
_PATHS = {
    # nvml.h, nvmlGpuTopologyLevel_t, and the words of `nvidia-smi topo -m`: from near to far.
    0: "same board",
    10: "PIX",
    20: "PXB",
    30: "PHB",
    40: "NODE",
    50: "SYS",
}
MEANINGS = {
    NVLINK: "direct",
    "same board": "within one board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "through the host bridge",
    "NODE": "within one NUMA node",
    "SYS": "between NUMA nodes",
}


@final
@dataclass(frozen=True, slots=True)
class Tenant:
    """A process that has memory of a GPU."""

    pid: int
    who: str
    # "python of anna", as far as this process may know.
    memory: int | None
    # Bytes; None if the driver does not tell, as in many containers.


@final
@dataclass(frozen=True, slots=True)
class Card:
    """One GPU."""

    device: str
    # "cuda:0".
    reading: Reading
    tenants: tuple[Tenant, ...] = ()
    # The greatest first.


@final
@dataclass(frozen=True, slots=True)
class Inventory:
    """All devices at one moment."""

    gpus: tuple[Card, ...]
    host: Reading
    cores: int
    # That this process may use.
    links: tuple[tuple[str, ...], ...] = ()
    # (GPUs, GPUs): a key of MEANINGS, or "" where it is not known.
    note: str = ""
    # Why there are no readings of the GPUs, if there are none.


@final
class Machine:
    """Takes inventories. `gpus`: how many are visible; `nvml`: the package pynvml, found if left out.

    Drivers that do not answer cost the readings, never the devices: the note says why.
    """

    def __init__(self, gpus: int, nvml: ModuleType | Any = None, environment: Mapping[str, str] | None = None) -> None:
        visible = os.environ if environment is None else environment
        self._places = {f"cuda:{i}": place for i, place in enumerate(places(gpus, visible))}
        self._host = Host({})
        self._gpus: Gpus | None = None
        self._links: tuple[tuple[str, ...], ...] = ()
        # Asked once: boards do not move.
        self._note = ""
        if gpus:
            try:
                self._gpus = Gpus(self._places, nvml)
                self._links = _links(self._gpus)
            except UsageError as error:
                self._note = str(error)

    def look(self) -> Inventory:
        """Return what there is now."""
        read = {reading.device: reading for reading in self._gpus.read()} if self._gpus is not None else {}
        unread = (Reading(device, "", clock()) for device in self._places)
        return Inventory(
            gpus=tuple(Card(its.device, read.get(its.device, its), self._tenants(its.device)) for its in unread),
            host=self._host.read()[-1],
            cores=cores(),
            links=self._links,
            note=self._note,
        )

    def close(self) -> None:
        """Let go of drivers."""
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None

    def _tenants(self, device: str) -> tuple[Tenant, ...]:
        if self._gpus is None:
            return ()
        nvml, handle = self._gpus.nvml, self._gpus.handles[device]
        found = self._gpus.told(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
        tenants = [Tenant(int(its.pid), _who(int(its.pid)), its.usedGpuMemory) for its in found]
        return tuple(sorted(tenants, key=lambda tenant: tenant.memory or 0, reverse=True))


def _links(gpus: Gpus) -> tuple[tuple[str, ...], ...]:
    handles = list(gpus.handles.values())
    return tuple(tuple("" if a is b else _link(gpus, a, b) for b in handles) for a in handles)


def _link(gpus: Gpus, a: Any, b: Any) -> str:
    nvml = gpus.nvml
    if gpus.told(lambda: nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK)) == 0:
        return NVLINK
    level = gpus.told(lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(a, b))
    return _PATHS.get(level, "") if level is not None else ""


def places(gpus: int, environment: Mapping[str, str]) -> list[int | str]:
    """Return where NVML has the visible GPUs, in the order in which CUDA numbers them: index or UUID."""
    named = [part.strip() for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    found: list[int | str] = [int(part) if part.isdigit() else part for part in named]
    # Without the variable, all are visible, in the order of their slots on boards of one kind.
    return found[:gpus] if len(found) >= gpus else list(range(gpus))


def _who(pid: int) -> str:
    # A driver may number processes as another container does: then there is none of that number here, as a rule.
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        with process.oneshot():
            return f"{process.name()} of {process.username()}"
    return "a process that is not visible here"
