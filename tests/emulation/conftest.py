from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from balanced_dp import EmulatedDevices, emulate_devices


@pytest.fixture
def devices() -> Iterator[EmulatedDevices]:
    """Three emulated devices with real numbers; a tensor left on them fails the test."""
    with emulate_devices(3) as devices:
        yield devices


@pytest.fixture
def symbolic_devices() -> Iterator[EmulatedDevices]:
    """Two emulated devices that keep shapes only."""
    with emulate_devices(2, symbolic=True) as devices:
        yield devices


@pytest.fixture
def reference_counting_only() -> Iterator[None]:
    """No garbage collector, so that what is freed is freed by reference counting."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
