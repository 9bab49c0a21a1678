"""What the devices say of themselves: NVML for GPUs, psutil for processes on the CPU. Knows no rings and no torch."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, final

import psutil

from mirror_nb.errors import DeviceError, UsageError
from mirror_nb.machine.cores import cores
from mirror_nb.machine.memory import usable
from mirror_nb.telemetry.samples import clock

T = TypeVar("T")
_SLOWED = {
    # nvml.h, nvmlClocksEventReason*: why clocks are lower than they could be. A power cap is everyday on a busy GPU.
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
SHORTEST = 0.1
# Seconds that a CPU's utilisation is taken over, as psutil's documentation says: over less it means nothing.
HOT = frozenset(_SLOWED.values()) - {"power cap"}


@dataclass(frozen=True, slots=True)
class Reading:
    """One device at one moment; None where it does not tell."""

    device: str
    # As the strategy calls it: "cuda:0", "cpu:1"; "host" is the whole machine.
    name: str
    # What a person calls it: "NVIDIA H100 80GB HBM3", "process 4711".
    at: int
    # Nanoseconds of samples.clock.
    utilisation: float | None = None
    # Of a GPU, the share of time in which a kernel ran; of a process, cores in use (may pass 1); of the host, 0 to 1.
    memory_used: int | None = None
    # Bytes.
    memory_total: int | None = None
    # Bytes.
    temperature: float | None = None
    # °C.
    power: float | None = None
    # Watts.
    power_limit: float | None = None
    # Watts.
    clock_rate: float | None = None
    # MHz, of the processors.
    clock_limit: float | None = None
    # MHz.
    slowed: tuple[str, ...] = ()
    # Why the clock is lowered; empty if it is not, or not known.
    cores: int | None = None
    # Of the host: how many this process may use.


class Machine(abc.ABC):
    """The devices of one strategy, asked a few times a second."""

    @abc.abstractmethod
    def read(self) -> tuple[Reading, ...]:
        """Return a reading of each device; a device that is gone is left out."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of drivers."""


@final
class Gpus(Machine):
    """NVIDIA GPUs by NVML, which needs no CUDA context.

    `devices`: for each name ("cuda:0") NVML's index, or the GPU's UUID ("GPU-…"), which holds whatever
    CUDA_VISIBLE_DEVICES says.

    Raises UsageError without the package nvidia-ml-py, DeviceError without a driver or for a device that is not there.
    """

    def __init__(self, devices: Mapping[str, int | str], nvml: ModuleType | Any = None) -> None:
        self.nvml = nvml if nvml is not None else _load_nvml()
        try:
            self.nvml.nvmlInit()
        except self.nvml.NVMLError as error:
            raise DeviceError(f"NVML does not start ({error}); `nvidia-smi` tells if there is a driver") from error
        self.handles: dict[str, Any] = {}
        # NVML's, by the names of the devices.
        for device, where in devices.items():
            try:
                self.handles[device] = self._found(where)
            except self.nvml.NVMLError as error:
                self.close()
                raise DeviceError(f"no {device} at {where!r} ({error}); `nvidia-smi -L` lists the GPUs") from error

    def read(self) -> tuple[Reading, ...]:
        """Return a reading of each GPU."""
        return tuple(self._read(device, handle) for device, handle in self.handles.items())

    def close(self) -> None:
        """Let go of NVML."""
        with contextlib.suppress(self.nvml.NVMLError):
            self.nvml.nvmlShutdown()

    def _found(self, where: int | str) -> Any:
        if isinstance(where, int):
            return self.nvml.nvmlDeviceGetHandleByIndex(where)
        return self.nvml.nvmlDeviceGetHandleByUUID(where if where.startswith(("GPU-", "MIG-")) else f"GPU-{where}")

    def _read(self, device: str, handle: Any) -> Reading:
        nvml = self.nvml
        name = self.told(lambda: nvml.nvmlDeviceGetName(handle)) or device
        busy = self.told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        memory = self.told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        power = self.told(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        limit = self.told(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        return Reading(
            device=device,
            name=name.decode() if isinstance(name, bytes) else str(name),
            at=clock(),
            utilisation=None if busy is None else busy / 100,
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            temperature=self.told(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            power=None if power is None else power / 1000,
            power_limit=None if limit is None else limit / 1000,
            clock_rate=self.told(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            clock_limit=self.told(lambda: float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
            slowed=self._slowed(handle),
        )

    def _slowed(self, handle: Any) -> tuple[str, ...]:
        # The older name is the one that every driver knows.
        bits = self.told(lambda: self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
        return tuple(reason for bit, reason in _SLOWED.items() if bits & bit)

    def told(self, ask: Callable[[], T]) -> T | None:
        """Return what NVML answers; None if it does not know, as of MIG slices and laptops it often does not."""
        try:
            return ask()
        except (self.nvml.NVMLError, AttributeError):
            return None


@final
class Host(Machine):
    """The machine and the processes of CPU replicas, by psutil.

    `processes`: for each device name ("cpu:0") the replica's process id.
    """

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes: dict[str, psutil.Process] = {}
        for device, pid in processes.items():
            with contextlib.suppress(psutil.Error):
                self._processes[device] = psutil.Process(pid)
        self._asked = 0
        # When psutil's counters were asked last, nanoseconds; the first answer means nothing.
        self.read()

    def read(self) -> tuple[Reading, ...]:
        """Return a reading of each process, and one of the host.

        Utilisation is since it was told last; None if that is less than a tenth of a second ago.
        """
        told = clock() - self._asked >= SHORTEST * 1e9
        if told:
            self._asked = clock()
        whole = usable()
        busy = psutil.cpu_percent(interval=None) / 100 if told else None
        used = whole.total - whole.free
        host = Reading("host", f"{psutil.cpu_count()} CPUs", clock(), busy, used, whole.total, cores=cores())
        found = []
        for device, process in self._processes.items():
            # A replica that has died has no reading.
            with contextlib.suppress(psutil.Error), process.oneshot():
                busy = process.cpu_percent(interval=None) / 100 if told else None
                used = process.memory_info().rss
                found.append(Reading(device, f"process {process.pid}", clock(), busy, used, whole.total))
        return (*found, host)

    def close(self) -> None:
        """Nothing is held."""


def machine_of(devices: Sequence[str], places: Sequence[int | str]) -> Machine | None:
    """Return who reads these devices, by where their readings are found (see `notice.Notice`); None for no places.

    Raises UsageError if the GPUs' driver or its package is not there.
    """
    found = dict(zip(devices, places, strict=False))
    if not found:
        return None
    if devices[0].startswith("cuda"):
        return Gpus(found)
    return Host({device: place for device, place in found.items() if isinstance(place, int)})


def _load_nvml() -> ModuleType:
    try:
        import pynvml
    except ImportError as error:
        raise UsageError("readings of GPUs need nvidia-ml-py: pip install nvidia-ml-py") from error
    return pynvml
