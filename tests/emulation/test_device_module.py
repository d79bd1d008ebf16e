from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from balanced_dp import EmulationError, emulate_devices
from balanced_dp.emulation import EmulatedDevices

from ..at_once import at_once

KIB = 1024


@pytest.fixture(params=[False, True], ids=["lazy", "cuda"])
def devices(request: pytest.FixtureRequest, emulate: Callable[..., Any]) -> EmulatedDevices:
    """Three devices of either name, the last with 4 KiB."""
    return emulate(3, memory=["1MiB", "1MiB", 4 * KIB], as_cuda=request.param)


@pytest.fixture
def module(devices: EmulatedDevices) -> Any:
    return torch.get_device_module(devices[0])


def test_no_devices_outside_of_a_context():
    with emulate_devices(2):
        lazy = torch.lazy
        assert (lazy.is_available(), lazy.device_count()) == (True, 2)
    assert (lazy.is_available(), lazy.device_count()) == (False, 0)
    for function in (lazy.current_device, lazy.memory_allocated, lazy.synchronize):
        with pytest.raises(EmulationError, match=r"with balanced_dp.emulate_devices"):
            function()
    with pytest.raises(EmulationError, match=r"with balanced_dp.emulate_devices"):
        torch.zeros(1, device="lazy")


def test_the_current_device(devices, module):
    assert module.current_device() == 0
    module.set_device(2)
    assert module.current_device() == 2
    with module.device(str(devices[1])):
        assert module.current_device() == 1
        with module.device(None), module.device(devices[0]):
            assert module.current_device() == 0
        assert module.current_device() == 1
        module.set_device(0)
    assert module.current_device() == 2
    kind = devices[0].type
    x = torch.zeros(1, device=kind)
    assert x.device == torch.zeros(1).to(kind).device == devices[2]
    assert module.memory_allocated() == module.memory_allocated(2) == 512


def test_each_thread_has_its_own_device(module):
    module.set_device(1)
    assert at_once(lambda _: module.current_device(), num_threads=1) == [0]
    at_once(lambda _: module.set_device(2), num_threads=1)
    assert module.current_device() == 1


@pytest.mark.parametrize("name", [lambda device: device.index, str, torch.device])
def test_memory_of_devices_named_any_way(devices, module, name):
    """The names of the statistics are CUDA's."""
    device = name(devices[1])
    kept = torch.zeros(256, device=devices[1])
    _ = kept.exp().sin()
    assert module.memory_allocated(device) == module.memory_reserved(device) == 2 * KIB
    assert module.max_memory_allocated(device) == module.max_memory_reserved(device) == 3 * KIB
    stats = module.memory_stats(device)
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        sizes = [stats[f"{kind}.all.{key}"] for key in ("current", "peak", "allocated", "freed")]
        assert sizes == [2 * KIB, 3 * KIB, 3 * KIB, KIB]
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (0, 0)
    assert module.mem_get_info(device) == (2**20 - 2 * KIB, 2**20)
    assert module.memory_allocated() == 0
    module.reset_peak_memory_stats(device)
    assert module.max_memory_allocated(device) == 2 * KIB
    module.synchronize(device)
    module.empty_cache()
    assert module.memory_allocated(device) == 2 * KIB


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (3, "no emulated device lazy:3: this context has 3"),
        (-1, "no emulated device lazy:-1"),
        ("lazy:7", "no emulated device lazy:7"),
        ("cpu", "cpu is not an emulated device"),
        (torch.device("meta"), "meta is not an emulated device"),
    ],
)
def test_no_such_device(emulate, device, reason):
    devices, module = emulate(3), torch.lazy
    names = """memory_allocated max_memory_allocated reset_peak_memory_stats memory_stats
        mem_get_info get_device_properties set_device device synchronize get_rng_state"""
    for function in (*(getattr(module, name) for name in names.split()), devices.memory_breakdown):
        with pytest.raises(EmulationError, match=reason):
            function(device)
    assert module.current_device() == 0


def test_a_tensor_on_no_such_device(devices, module):
    missing = f"{devices[0].type}:3"
    for call in (lambda: torch.zeros(1, device=missing), lambda: torch.zeros(1).to(missing)):
        with pytest.raises(EmulationError, match=f"no emulated device {missing}"):
            call()


def test_the_properties_of_a_device(devices, module):
    properties = module.get_device_properties(2)
    assert (properties.name, properties.total_memory) == ("Emulated device 2", 4096)
    assert module.get_device_name(2) == properties.name


# Random numbers.


def test_a_context_continues_torchs_seed():
    def drawn(seed):
        torch.manual_seed(seed)
        with emulate_devices(1) as devices:
            return torch.rand(3, device=devices[0]).tolist()

    assert drawn(1) == drawn(1) != drawn(2)
