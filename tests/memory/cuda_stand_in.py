"""Simulated CUDA devices for a torch without CUDA, for use in separate processes.

They are the boards of the NVML stand-in, in the order that a test chooses for CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from .driver import BUSES, GIB, UUIDS


class CudaStandIn:
    """A replacement for functions of ``torch.cuda`` whose memory statistics can be set.

    Args:
        units: the units of the stand-in driver, in CUDA's order.
    """

    def __init__(self, units: Sequence[int]) -> None:
        self.units = units
        self.initialized = False
        self.has_context = True
        self.synchronized: list[int] = []
        self.reserved_bytes = [0] * len(units)
        self.num_alloc_retries = 0
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # which hides the real ones
            del os.environ["CUDA_VISIBLE_DEVICES"]
        cuda: Any = torch.cuda
        cuda.init = lambda: None
        cuda.device_count = lambda: len(units)
        cuda.is_initialized = lambda: self.initialized
        torch._C._cuda_hasPrimaryContext = lambda index: self.has_context
        cuda.get_device_properties = lambda device: self.properties(device.index)
        cuda.memory_stats = lambda device: {"num_alloc_retries": self.num_alloc_retries}
        for name in ("memory_allocated", "memory_reserved"):
            for prefix in ("", "max_"):
                setattr(cuda, prefix + name, lambda device: self.reserved_bytes[device.index])
        cuda.synchronize = self.synchronize
        cuda.reset_peak_memory_stats = lambda device: self.before_peaks_are_reset()
        self.before_peaks_are_reset: Callable[[], object] = lambda: None
        self.broken = False
        self.devices = [f"cuda:{index}" for index in range(len(units))]

    def synchronize(self, device: torch.device) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self.synchronized.append(device.index)
        self.has_context = True  # synchronizing a device creates its context

    def properties(self, cuda_index: int) -> SimpleNamespace:
        self.initialized = True  # reading the properties initializes CUDA
        unit = self.units[cuda_index]
        return SimpleNamespace(
            name=f"a GPU, says CUDA ({unit})",
            total_memory=7 * GIB,
            uuid=UUIDS[unit].split("-", 1)[1],  # as torch returns it
            pci_domain_id=0,
            pci_bus_id=BUSES[unit],
            pci_device_id=0,
        )
