from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from balanced_dp.emulation import EmulatedDevices


@pytest.fixture
def devices(emulate: Callable[..., EmulatedDevices]) -> EmulatedDevices:
    """Three emulated devices that compute values. A test fails if a tensor outlives it."""
    return emulate(3)


@pytest.fixture
def symbolic_devices(emulate: Callable[..., EmulatedDevices]) -> EmulatedDevices:
    """Two emulated devices in symbolic mode, which keep only the shapes of tensors."""
    return emulate(2, symbolic=True)


@pytest.fixture(params=[False, True], ids=["numbers", "symbolic"])
def symbolic(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def device(emulate: Callable[..., EmulatedDevices], symbolic: bool) -> torch.device:
    """An emulated device, which keeps only the shapes of tensors if ``symbolic`` is True."""
    return emulate(1, symbolic=symbolic)[0]
