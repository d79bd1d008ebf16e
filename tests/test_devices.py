"""Which devices there are to train on. What ``device_ids`` names is tested with the wrapper."""

from __future__ import annotations

import pytest
import torch

from balanced_dp import (
    ArgumentError,
    ArgumentTypeError,
    EmulationError,
    emulate_devices,
    training_devices,
)
from balanced_dp.emulation import EmulatedDevices

from .cuda_stand_in import NUM_DEVICES

without_accelerator = pytest.mark.usefixtures("no_accelerator")


def names(devices):
    return [str(device) for device in devices]


@without_accelerator
def test_without_gpus_they_are_four_emulated_ones():
    with training_devices() as devices:
        assert isinstance(devices, EmulatedDevices)
        assert names(devices) == ["lazy:0", "lazy:1", "lazy:2", "lazy:3"]
    assert not torch.get_device_module("lazy").is_available()


def test_they_are_all_gpus_if_there_are_two_or_more(stand_in):
    with training_devices() as devices:
        assert list(devices) == stand_in.devices


@pytest.mark.parametrize("num_devices", range(1, NUM_DEVICES + 3))
def test_a_number_is_of_gpus_if_there_are_so_many(stand_in, num_devices):
    with training_devices(num_devices) as devices:
        assert len(devices) == num_devices
        if num_devices <= NUM_DEVICES:
            assert list(devices) == stand_in.devices[:num_devices]
        else:
            assert isinstance(devices, EmulatedDevices)


def test_a_single_gpu_is_not_taken_unless_one_device_is_asked_for(stand_in, monkeypatch):
    monkeypatch.setattr(torch.get_device_module("stand_in"), "device_count", lambda: 1)
    with training_devices() as devices:
        assert names(devices) == ["lazy:0", "lazy:1", "lazy:2", "lazy:3"]
    with training_devices(1) as devices:
        assert list(devices) == stand_in.devices[:1]


@without_accelerator
def test_the_options_are_those_of_emulated_devices():
    with training_devices(2, memory=["1MiB", "2MiB"], as_cuda=True) as devices:
        assert names(devices) == ["cuda:0", "cuda:1"]
        assert [torch.cuda.mem_get_info(device)[1] for device in devices] == [2**20, 2**21]
    with training_devices(2, symbolic=True) as devices:
        weights = torch.empty(2**20, 2**20, device=devices[1])  # 4 TiB
        assert torch.get_device_module("lazy").memory_allocated(devices[1]) == 2**42
        del weights


def test_gpus_have_their_own_memory(stand_in):
    with training_devices(2, memory="1KiB", symbolic=True) as devices:
        assert torch.ones(1000, device=devices[1]).sum().item() == 1000


@pytest.mark.parametrize("as_cuda", [False, True])
@without_accelerator
def test_inside_emulate_devices_they_are_its_devices(as_cuda):
    with emulate_devices(3, as_cuda=as_cuda) as opened:
        with training_devices() as devices:
            assert list(devices) == list(opened)
        with training_devices(2) as devices:
            assert list(devices) == opened[:2]
        assert torch.ones(3, device=opened[0]).sum().item() == 3  # they have not ended
        with pytest.raises(EmulationError, match="has 3"), training_devices(4):
            pass


@pytest.mark.parametrize("has_gpus", [False, True])
def test_numbers_that_cannot_be_are_errors(has_gpus, request):
    request.getfixturevalue("stand_in" if has_gpus else "no_accelerator")
    for num_devices in (0, -1):
        with pytest.raises(ArgumentError, match="at least 1"), training_devices(num_devices):
            pass
    for num_devices in (True, 2.0, "2"):
        with pytest.raises(ArgumentTypeError, match="integer"), training_devices(num_devices):
            pass
