"""Test ``training_devices``. ``tests/parallel`` tests the argument ``device_ids``."""

from __future__ import annotations

import pytest
import torch

from balanced_dp import EmulationError, emulate_devices, training_devices
from balanced_dp.emulation import EmulatedDevices

from .cuda_stand_in import NUM_DEVICES


@pytest.mark.parametrize("num_devices", [None, *range(1, NUM_DEVICES + 3)])
@pytest.mark.parametrize("num_gpus", [0, 1, NUM_DEVICES])
def test_gpus_if_there_are_enough(num_gpus, num_devices, request, monkeypatch):
    if num_gpus:
        gpus = request.getfixturevalue("stand_in").devices
        module = torch.get_device_module("stand_in")
        monkeypatch.setattr(module, "device_count", lambda: num_gpus)
    else:
        request.getfixturevalue("no_accelerator")
    with training_devices(num_devices) as devices:
        if num_gpus >= (num_devices or 2):
            assert list(devices) == gpus[:num_devices]
        else:
            assert isinstance(devices, EmulatedDevices)
            assert [*map(str, devices)] == [f"lazy:{i}" for i in range(num_devices or 4)]
    # Registered by the first emulate_devices of a process.
    assert not (hasattr(torch, "lazy") and torch.lazy.is_available())


def test_the_options_are_of_emulated_devices(stand_in):
    options = {"memory": "4TiB", "symbolic": True, "as_cuda": True}
    with training_devices(2, **options) as devices:  # GPUs have their own
        assert torch.ones(1000, device=devices[1]).sum().item() == 1000
    with training_devices(NUM_DEVICES + 1, **options) as devices:
        weights = torch.empty(2**20, 2**20, device=devices[1])
        assert str(devices[1]) == "cuda:1" and torch.cuda.mem_get_info(1) == (0, 2**42)
        del weights


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("as_cuda", [False, True])
def test_inside_emulate_devices_they_are_those(as_cuda):
    with emulate_devices(3, as_cuda=as_cuda) as opened:
        for num_devices in (None, 2):
            with training_devices(num_devices) as devices:
                assert list(devices) == list(opened)[:num_devices]
        assert torch.ones(3, device=opened[0]).sum().item() == 3  # they have not ended
        with pytest.raises(EmulationError, match="has 3"), training_devices(4):
            pass
