"""What differs between versions of torch."""

from __future__ import annotations

from types import ModuleType

import torch

_ACCELERATOR = getattr(torch, "accelerator", None)
ACCELERATOR_MODULES: list[ModuleType] = [
    module for module in (_ACCELERATOR, getattr(_ACCELERATOR, "memory", None)) if module is not None
]
"""``torch.accelerator``, which is there from 2.6 on, and its ``memory``, from 2.9 on."""


def accelerator_type() -> str | None:
    """Return the type of this machine's accelerators; None if there are none."""
    # torch.accelerator is there from 2.6 on, and raises in 2.6 where there is no accelerator.
    device: torch.device = torch._C._get_accelerator()  # type: ignore[attr-defined]
    is_there = device.type != "cpu" and torch.get_device_module(device).is_available()
    return device.type if is_there else None


def accelerator_count() -> int:
    """Return the number of this machine's accelerators."""
    device_type = accelerator_type()
    return 0 if device_type is None else int(torch.get_device_module(device_type).device_count())
