"""The device module of the stand-in for CUDA devices, ``torch.get_device_module("stand_in")``.

Its functions have the names of those in ``torch.cuda``.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

NAME = "stand_in"
NUM_DEVICES = 4
TOTAL_BYTES = 16 * 2**30


class DeviceModule(types.ModuleType):
    """The module ``torch.stand_in``. Most functions are those of ``torch.accelerator``.

    Attributes:
        is_open: whether the stand-in reports that it is available.
        total_bytes: the memory capacity that each device reports, in bytes.
    """

    Event, Stream, OutOfMemoryError = torch.Event, torch.Stream, torch.OutOfMemoryError
    _initialized = True

    def __init__(self, extension: Any) -> None:
        super().__init__(f"torch.{NAME}", "The stand-in for CUDA devices.")
        self.is_open = False
        self.total_bytes = [TOTAL_BYTES] * NUM_DEVICES
        self._extension = extension

    def __getattr__(self, name: str) -> Any:
        """Return a function of ``torch.accelerator``, such as ``memory_allocated``."""
        return getattr(self._extension if name == "is_initialized" else torch.accelerator, name)

    def is_available(self) -> bool:
        return self.is_open

    def init(self) -> None:
        torch.empty(0, device=NAME)

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return NUM_DEVICES if self.is_open else 0

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def device(self, device: Any) -> AbstractContextManager[Any]:
        return torch.accelerator.device_index(_index(device))

    @contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        # Several threads may enter this with the same stream. torch.Stream as a context manager
        # would remember the previous stream of only one of them.
        with self.device(stream.device):
            before = torch.accelerator.current_stream()
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        # As in torch.cuda. The function of torch.accelerator does nothing before the first tensor.
        torch._C._accelerator_resetPeakStats(_index(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        total_bytes = self.total_bytes[_index(device)]
        return total_bytes - torch.accelerator.memory_reserved(device), total_bytes

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name="stand-in", total_memory=self.total_bytes[_index(device)], multi_processor_count=1
        )

    def get_device_name(self, device: Any = None) -> str:
        return "stand-in"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        for index in range(NUM_DEVICES):
            self._extension.manual_seed(index, seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._extension.get_rng_state(_index(device))

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._extension.set_rng_state(_index(device), state)


def _index(device: torch.device | str | int | None = None) -> int:
    """Return the index of ``device``, or of the current device if ``device`` has no index."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return torch.accelerator.current_device_index() if index is None else index
