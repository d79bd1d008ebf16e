from __future__ import annotations

from collections.abc import Iterator

import pytest

from balanced_dp import EmulatedDevices, emulate_devices


@pytest.fixture
def devices() -> Iterator[EmulatedDevices]:
    """Three emulated devices with values; a tensor that outlives the test fails it."""
    with emulate_devices(3) as devices:
        yield devices


@pytest.fixture
def symbolic_devices() -> Iterator[EmulatedDevices]:
    """Two emulated devices in symbolic mode."""
    with emulate_devices(2, symbolic=True) as devices:
        yield devices
