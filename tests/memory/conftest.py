"""Fixtures to test ``MemoryProbe`` without a GPU.

The real package pynvml loads a stand-in for NVIDIA's driver library.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

SOURCE = Path(__file__).with_name("nvml_stand_in.c")
NUM_BOARDS, NUM_UNITS = 3, 5
GIB = 2**30

GTX, A100, H100 = 0, 1, 2  # by NVML's index
SLICE = 3  # the first MIG slice of the A100
UUIDS = (
    "GPU-5a1f0c55-11d2-4e7a-9a31-3c0b6f0d2a01",
    "GPU-5a2e9b10-72c4-4b5f-8d11-90e2c4a1b702",
    "GPU-c3b7d6e4-0f5a-4c88-b2f0-6a7d1e9c5403",
    "MIG-0d4b8f21-5e6c-5a9b-8c7d-1f2e3d4c5b06",
    "MIG-e7a6b5c4-3d2e-5f1a-9b8c-7d6e5f4a3b07",
)
BUSES = (0x04, 0x07, 0x0B, 0x07, 0x07)
RESERVED = 2**29
USED = (1 * GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB)
NOT_SUPPORTED, NO_PERMISSION, NOT_LOADED, NO_LIBRARY, LOST = 3, 4, 9, 12, 15  # errors of NVML


class Driver(ctypes.Structure):
    """The state of the stand-in for the driver. The fields are those of the struct in C."""

    _fields_ = (
        ("used", ctypes.c_uint64 * NUM_UNITS),
        ("reserved", ctypes.c_uint64),
        ("memory_error", ctypes.c_uint32 * NUM_UNITS),
        ("handle_error", ctypes.c_uint32 * NUM_BOARDS),
        ("init_error", ctypes.c_uint32),
        ("name_error", ctypes.c_uint32),
        ("has_mig", ctypes.c_uint32),
        ("is_before_510", ctypes.c_uint32),
        ("num_memory_queries", ctypes.c_uint32),
    )


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("gcc") is None:
        pytest.fail("these tests build a stand-in for NVIDIA's driver and need gcc on the PATH")
    path = tmp_path_factory.mktemp("driver") / "libnvidia-ml.so.1"
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-function", "-Werror"]
    subprocess.run(["gcc", *options, "-o", str(path), str(SOURCE)], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def driver(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, no_accelerator: None) -> Driver:
    """The state of the stand-in for the driver, which pynvml uses. torch sees no GPU."""
    state = Driver.in_dll(library, "state")
    ctypes.memset(ctypes.addressof(state), 0, ctypes.sizeof(state))
    state.used[:], state.reserved = USED, RESERVED
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return state


def cuda_device(unit: int, uuid: str | None = None) -> SimpleNamespace:
    """Return what ``torch.cuda.get_device_properties`` shall return for a unit of the driver.

    ``uuid`` replaces the UUID of the unit.
    """
    return SimpleNamespace(
        name=f"a GPU, says CUDA ({unit})",
        total_memory=7 * GIB,
        uuid=(uuid or UUIDS[unit]).split("-", 1)[-1],  # as torch returns it
        pci_domain_id=0,
        pci_bus_id=BUSES[unit],
        pci_device_id=0,
    )


@pytest.fixture
def cuda(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """A function that makes ``torch.cuda`` list the given units of the driver, in the given order.

    The function returns an object with the devices as torch names them, their properties, and the
    bytes that torch's allocator reports. A test may change these.
    """

    def show(*units: int) -> SimpleNamespace:
        properties = [cuda_device(unit) for unit in units]
        side = SimpleNamespace(properties=properties, bytes=0, num_retries=0, reset=lambda: None)
        side.devices = [f"cuda:{index}" for index in range(len(units))]
        functions = {
            "init": lambda: None,
            "device_count": lambda: len(units),
            "get_device_properties": lambda device: properties[device.index],
            "memory_stats": lambda device: {"num_alloc_retries": side.num_retries},
            "reset_peak_memory_stats": lambda device: side.reset(),
        }
        for name in ("memory_allocated", "memory_reserved"):
            functions |= dict.fromkeys((name, f"max_{name}"), lambda device: side.bytes)
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)
        return side

    return show
