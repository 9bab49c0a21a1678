"""Devices by name: every spelling that users bring along, and errors that say what there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mirror_nb.devices import Device, parse, resolve
from mirror_nb.errors import DeviceError, UsageError


@pytest.mark.parametrize(
    "name",
    [
        "cuda:3",
        "CUDA:3",
        "GPU:3",
        "gpu:3",
        "/gpu:3",
        "/GPU:3",
        "/device:GPU:3",
        "device:gpu:3",
        "/job:localhost/replica:0/task:0/device:GPU:3",
        " cuda:3 ",
        3,
        "3",
        np.int64(3),
        torch.device("cuda", 3),
        Device("cuda", 3),
    ],
)
def test_all_spellings_mean_the_same_gpu(name):
    assert parse(name) == Device("cuda", 3)


@pytest.mark.parametrize(
    ("name", "device"), [("cuda", Device("cuda", 0)), ("cpu", Device("cpu", 0)), ("/CPU:2", Device("cpu", 2))]
)
def test_a_name_without_an_index_means_the_first(name, device):
    assert parse(name) == device


@pytest.mark.parametrize("name", ["", "tpu:0", "cuda:x", "cuda:-1", "cuda:0:1", -1, True, 1.0, None, "0x", [0]])
def test_what_names_no_device_is_refused_with_an_example(name):
    with pytest.raises(DeviceError, match="names no device; write 'cuda:0'"):
        parse(name)


@given(st.sampled_from(["cpu", "cuda"]), st.integers(0, 10**6))
def test_a_device_reads_back_as_it_is_written(kind, index):
    assert parse(str(Device(kind, index))) == Device(kind, index)


def test_no_devices_named_means_every_gpu_else_one_cpu_replica():
    assert resolve(None, 2) == (Device("cuda", 0), Device("cuda", 1))
    assert resolve(None, 0) == (Device("cpu", 0),)


@pytest.mark.parametrize(
    "devices",
    ["cpu:1,cpu:0", "cpu:1, /cpu:0,", ["cpu:1", "cpu:0"], ("CPU:1", Device("cpu", 0)), iter(["cpu:1", "cpu"])],
)
def test_devices_keep_the_order_in_which_they_were_named(devices):
    assert resolve(devices, 0) == (Device("cpu", 1), Device("cpu", 0))


@pytest.mark.parametrize("devices", [1, "GPU:1", torch.device("cuda", 1), Device("cuda", 1)])
def test_one_device_needs_no_list(devices):
    assert resolve(devices, 2) == (Device("cuda", 1),)


def test_a_gpu_that_is_not_there_is_an_error_that_lists_those_that_are():
    with pytest.raises(DeviceError, match="cuda:2, cuda:7 not found; visible here: cuda:0, cuda:1, cpu:0"):
        resolve([0, 2, 7], 2)
    with pytest.raises(DeviceError, match="cuda:0 not found; visible here: cpu:0"):
        resolve("cuda:0", 0)
    with pytest.raises(DeviceError, match="; 2 is the number of one GPU, for several list them"):
        resolve(2, 2)


def test_a_device_named_twice_is_an_error_under_any_spelling():
    with pytest.raises(DeviceError, match="cuda:1 named twice"):
        resolve(["cuda:1", "GPU:1"], 2)


@pytest.mark.parametrize("devices", [[], "", " , ", ()])
def test_no_device_at_all_is_an_error(devices):
    with pytest.raises(DeviceError, match="`devices` is empty"):
        resolve(devices, 2)


def test_cpu_and_gpu_replicas_cannot_be_mixed():
    with pytest.raises(DeviceError, match="cannot be mixed: cuda:0, cpu:0"):
        resolve("cuda:0,cpu:0", 1)


def test_a_device_error_is_a_mistake_in_the_call():
    assert issubclass(DeviceError, UsageError)
    assert issubclass(DeviceError, ValueError)
