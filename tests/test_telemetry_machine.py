"""Readings of devices: a made NVML, the real one where there is a GPU, and this machine's CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from driving import eventually

from mirror_nb.errors import DeviceError, UsageError
from mirror_nb.machine.cores import cores
from mirror_nb.machine.memory import Memory
from mirror_nb.telemetry import machine
from mirror_nb.telemetry.machine import HOT, Gpus, Host


class NVMLError(Exception):
    pass


def made_nvml(**replaced):
    """An NVML with two GPUs, the second of which tells little."""

    def only_first(answer):
        def ask(handle, *_):
            if handle != 0:
                raise NVMLError("Not Supported")
            return answer

        return ask

    def by_index(index):
        if index > 1:
            raise NVMLError("Invalid Argument")
        return index

    opened = []
    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        opened=opened,
        nvmlInit=lambda: opened.append(True),
        nvmlShutdown=lambda: opened.pop(),
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-aa": 0, "GPU-bb": 1}[uuid],
        nvmlDeviceGetName=lambda handle: b"Made GPU" if handle else "Made GPU 80GB",
        nvmlDeviceGetUtilizationRates=only_first(SimpleNamespace(gpu=98)),
        nvmlDeviceGetMemoryInfo=only_first(SimpleNamespace(used=61, total=80)),
        nvmlDeviceGetPowerUsage=only_first(642_000),
        nvmlDeviceGetEnforcedPowerLimit=only_first(700_000),
        nvmlDeviceGetTemperature=only_first(83),
        nvmlDeviceGetClockInfo=only_first(1500),
        nvmlDeviceGetMaxClockInfo=only_first(1980),
        nvmlDeviceGetCurrentClocksThrottleReasons=only_first(0x04 | 0x20),
    )
    vars(nvml).update(replaced)
    return nvml


def test_a_gpu_tells_in_plain_units():
    gpus = Gpus({"cuda:0": 0}, nvml=made_nvml())
    (reading,) = gpus.read()
    assert (reading.device, reading.name) == ("cuda:0", "Made GPU 80GB")
    assert (reading.utilisation, reading.memory_used, reading.memory_total) == (0.98, 61, 80)
    assert (reading.power, reading.power_limit, reading.temperature) == (642.0, 700.0, 83.0)
    assert (reading.clock_rate, reading.clock_limit) == (1500.0, 1980.0)
    assert reading.slowed == ("power cap", "too hot (software)")
    assert HOT & set(reading.slowed) == {"too hot (software)"}


def test_what_a_gpu_does_not_tell_is_none():
    (reading,) = Gpus({"cuda:0": "GPU-bb"}, nvml=made_nvml()).read()
    assert reading.name == "Made GPU"
    assert (reading.utilisation, reading.memory_used, reading.power, reading.temperature) == (None,) * 4
    assert reading.slowed == ()


def test_a_gpu_is_found_by_its_uuid_with_or_without_its_prefix():
    assert len(Gpus({"cuda:0": "GPU-aa", "cuda:1": "bb"}, nvml=made_nvml()).read()) == 2


def test_nvml_is_let_go_of():
    nvml = made_nvml()
    Gpus({"cuda:0": 0}, nvml=nvml).close()
    assert nvml.opened == []


def test_a_gpu_that_is_not_there_is_named():
    nvml = made_nvml()
    with pytest.raises(DeviceError, match=r"no cuda:5 at 5 \(Invalid Argument\); `nvidia-smi -L` lists the GPUs"):
        Gpus({"cuda:5": 5}, nvml=nvml)
    assert nvml.opened == []


def test_without_a_driver_the_error_says_so():
    def fail():
        raise NVMLError("Driver Not Loaded")

    with pytest.raises(DeviceError, match=r"NVML does not start \(Driver Not Loaded\)"):
        Gpus({"cuda:0": 0}, nvml=made_nvml(nvmlInit=fail))


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UsageError, match="pip install nvidia-ml-py"):
        Gpus({"cuda:0": 0})


@pytest.mark.gpu
def test_a_real_gpu_tells_its_memory():
    pytest.importorskip("pynvml")
    gpus = Gpus({"cuda:0": 0})
    (reading,) = gpus.read()
    gpus.close()
    assert 0 < reading.memory_used < reading.memory_total


def test_memory_of_a_cpu_replica_is_what_the_system_says(monkeypatch):
    container = Memory(2**31, 2**30)
    monkeypatch.setattr(machine, "usable", lambda: container)
    host = Host({"cpu:0": os.getpid()})
    time.sleep(0.11)
    mine, whole = host.read()
    host.close()
    assert (mine.device, whole.device) == ("cpu:0", "host")
    assert mine.memory_used == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    assert (mine.memory_total, whole.memory_total, whole.memory_used) == (2**31, 2**31, 2**30)
    assert 0 <= whole.utilisation <= 1
    assert mine.temperature is None
    assert whole.cores == cores()


def test_what_a_cpu_did_in_a_moment_is_not_told():
    host = Host({"cpu:0": os.getpid()})
    assert [reading.utilisation for reading in host.read()] == [None, None]
    eventually(lambda: host.read()[0].utilisation is not None, "a tenth of a second is enough")


def test_a_replica_that_has_died_has_no_reading():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        host = Host({"cpu:0": process.pid, "cpu:1": os.getpid()})
        assert [reading.device for reading in host.read()] == ["cpu:0", "cpu:1", "host"]
        process.communicate(b"\n")
    assert [reading.device for reading in host.read()] == ["cpu:1", "host"]
    assert [reading.device for reading in Host({"cpu:0": process.pid}).read()] == ["host"]
