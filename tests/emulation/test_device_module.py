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
    """Three devices of either name."""
    return emulate(3, as_cuda=request.param)


@pytest.fixture
def module(devices: EmulatedDevices) -> Any:
    return torch.get_device_module(devices[0])


def test_no_devices_outside_of_a_context():
    with emulate_devices(2):
        lazy = torch.get_device_module("lazy")
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


def test_each_thread_has_its_own_current_device(module):
    def before_and_after_setting(number):
        before = module.current_device()
        module.set_device(2)
        return before, module.current_device()

    module.set_device(1)
    assert at_once(before_and_after_setting, num_threads=1) == [(0, 2)]
    assert module.current_device() == 1


@pytest.mark.parametrize("name", [lambda device: device.index, str, torch.device])
def test_memory_of_devices_named_any_way(devices, module, name):
    device = name(devices[1])
    kept = torch.zeros(256, device=devices[1])
    _ = kept + 1
    assert module.memory_allocated(device) == module.memory_reserved(device) == 2 * KIB
    del _
    assert module.memory_allocated(device) == KIB
    assert module.max_memory_allocated(device) == module.max_memory_reserved(device) == 2 * KIB
    assert module.memory_allocated() == 0
    module.reset_peak_memory_stats(device)
    assert module.max_memory_allocated(device) == KIB
    module.synchronize(device)
    module.empty_cache()
    assert module.memory_allocated(device) == KIB


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
    devices, module = emulate(3), torch.get_device_module("lazy")
    names = """memory_allocated max_memory_allocated reset_peak_memory_stats memory_stats
        mem_get_info get_device_properties set_device device synchronize get_rng_state"""
    for function in (*(getattr(module, name) for name in names.split()), devices.memory_breakdown):
        with pytest.raises(EmulationError, match=reason):
            function(device)
    assert module.current_device() == 0


def test_a_tensor_on_no_such_device(devices, module):
    missing = f"{devices[0].type}:3"
    for name, argument in (
        *((lambda device: torch.zeros(1, device=device), missing), (torch.zeros(1).to, missing)),
        *((f, 3) for f in (module.memory_allocated, module.memory_stats, module.set_device)),
    ):
        with pytest.raises(EmulationError, match=f"no emulated device {missing}"):
            name(argument)


def test_memory_stats_are_named_as_cudas(devices, module):
    kept = torch.zeros(256, device=devices[0])
    _ = kept.exp().sin()
    del _
    stats = module.memory_stats(devices[0])
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        assert {
            name: stats[f"{kind}.all.{name}"] for name in ("current", "peak", "allocated", "freed")
        } == {"current": KIB, "peak": 3 * KIB, "allocated": 3 * KIB, "freed": 2 * KIB}
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (0, 0)


def test_devices_say_what_they_can_hold(emulate):
    emulate(2, memory=["1MiB", 4096])
    lazy = torch.get_device_module("lazy")
    assert lazy.mem_get_info(0) == (2**20, 2**20)
    _held = torch.zeros(128, device="lazy:1")
    assert lazy.mem_get_info(1) == (4096 - 512, 4096)
    properties = [lazy.get_device_properties(i) for i in (0, 1)]
    assert [p.total_memory for p in properties] == [2**20, 4096]
    assert [p.name for p in properties] == ["Emulated device 0", "Emulated device 1"]
    assert lazy.get_device_name(1) == properties[1].name


# Random numbers.


def test_a_generator_can_be_set_back(devices, module):
    state = module.get_rng_state(devices[1])
    drawn = torch.rand(5, device=devices[1]).tolist()
    assert torch.rand(5, device=devices[1]).tolist() != drawn
    module.set_rng_state(state, devices[1])
    assert torch.rand(5, device=devices[1]).tolist() == drawn


def test_a_context_continues_torchs_seed():
    def drawn(seed):
        torch.manual_seed(seed)
        with emulate_devices(1) as devices:
            return torch.rand(3, device=devices[0]).tolist()

    assert drawn(1) == drawn(1) != drawn(2)
