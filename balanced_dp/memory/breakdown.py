"""The memory at the peak by use, and the floor that no ``gpu0_bsz`` can lower."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..emulation.ledger import round_up
from ..errors import ProbeError
from .step_memory import DevicePeak, StepMemory

_PERSISTENT = ("parameter", "buffer", "gradient", "optimizer state")
_OF_THE_CHUNK = ("input", "activation", "rest")
"""Uses that grow with the chunk of the first device."""


@dataclass(frozen=True, slots=True)
class DeviceBreakdown:
    """The memory of one device at its peak, by use, in bytes.

    Attributes:
        device: torch's name of the device.
        peak_bytes: maximum memory occupied by tensors since the peak was last reset.
        uses: bytes by use, with the sum ``peak_bytes``. On emulated devices they are exact. On
            others, ``parameter``, ``buffer``, ``gradient`` and ``optimizer state`` are the tensors
            that exist now, with the model's copies on the other devices, and ``rest`` is everything
            else: activations, gathered outputs, the loss.
        floor_bytes: an estimate of the first device's peak with ``gpu0_bsz=0``, which no
            ``gpu0_bsz`` can lower. None for the other devices, before the first batch, and if one
            device only had samples.
    """

    device: str
    peak_bytes: int
    uses: dict[str, int]
    floor_bytes: int | None = None


def memory_breakdown(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[DeviceBreakdown, ...]:
    """Return the memory by use of each of the model's devices, at its peak.

    Call it after a training step, before ``zero_grad``, and not after the first step: the
    optimizer had no state at that step's peak. (With emulated devices, call it at any time.) The
    peak is the one since the last ``reset_peak_memory_stats``, the beginning of the last measured
    block, or the last record of a logger.

    The floor is the first device's peak less the memory of its chunk: the bytes per sample of the
    other devices times its chunk size, and at most its activations. It is too low if without
    samples the peak would be at another moment of the step; measure ``gpu0_bsz=0`` for the exact
    value.

    Args:
        model: a ``BalancedDataParallel``, or any module; then the devices are its parameters'.
        optimizer: the optimizer of the parameters, to list its state separately.

    Raises:
        ProbeError: no device of the model counts its memory.
    """
    breakdowns, peaks = [], []
    for device in _devices_of(model):
        uses = _uses(device, model, optimizer)
        kept_bytes, peak_bytes = sum(uses.get(use, 0) for use in _PERSISTENT), sum(uses.values())
        breakdowns.append(DeviceBreakdown(str(device), peak_bytes, uses))
        chunk_size = chunk_size_of(model, device)
        peaks.append(DevicePeak(str(device), None, kept_bytes, peak_bytes, chunk_size=chunk_size))
    floor_bytes = StepMemory(devices=tuple(peaks)).floor_bytes
    if floor_bytes is not None:
        first = breakdowns[0]
        movable_bytes = sum(first.uses.get(use, 0) for use in _OF_THE_CHUNK)
        floor_bytes = round(max(floor_bytes, first.peak_bytes - movable_bytes))
        breakdowns[0] = replace(first, floor_bytes=floor_bytes)
    return tuple(breakdowns)


def chunk_size_of(model: Any, device: torch.device) -> int | None:
    """Return the number of samples on a device in the model's last batch, None if unknown."""
    split: tuple[int, ...] | None = getattr(model, "chunk_sizes", None)
    if split is None:
        return None
    return sum(size for used, size in zip(model.devices, split, strict=True) if used == device)


def replica_bytes(model: Any, device: torch.device, chunk_size: int | None) -> int:
    """Return the size of the copies of parameters and buffers on a device with a chunk."""
    if not chunk_size:
        return 0
    tensors = chain(model.module.parameters(), model.module.buffers())
    return _num_bytes(tensor for tensor in tensors if tensor.device != device)


def _devices_of(model: nn.Module) -> list[torch.device]:
    tensors = chain(model.parameters(), model.buffers())
    devices = dict.fromkeys(getattr(model, "devices", None) or (t.device for t in tensors))
    counting = [d for d in devices if hasattr(torch.get_device_module(d), "max_memory_allocated")]
    if not counting:
        raise ProbeError(
            f"no device of the model counts its memory: {sorted(map(str, devices))}; to "
            "measure on a machine without accelerators, use emulate_devices"
        )
    return counting


def _uses(
    device: torch.device, model: Any, optimizer: torch.optim.Optimizer | None
) -> dict[str, int]:
    """Return the bytes by use, with the sum of the device's peak."""
    module = torch.get_device_module(device)
    if hasattr(module, "memory_breakdown"):
        labelled: dict[str, int] = module.memory_breakdown(device).peak
        return labelled
    tensors: dict[str, list[Any]] = {
        "parameter": list(model.parameters()),
        "buffer": list(model.buffers()),
        "gradient": [parameter.grad for parameter in model.parameters()],
        "optimizer state": [] if optimizer is None else tree_leaves([*optimizer.state.values()]),
    }
    seen: set[int] = set()
    uses = {use: _num_bytes(of_use, device, seen) for use, of_use in tensors.items()}
    peak_bytes = module.max_memory_allocated(device)
    if chunk_size_of(model, device):
        copied = {
            use: uses[use] + _num_bytes(t for t in tensors[use] if t.device != device)
            for use in ("parameter", "buffer")
        }
        if sum((uses | copied).values()) <= peak_bytes:  # else there were no replicas at the peak
            uses |= copied
    return uses | {"rest": peak_bytes - sum(uses.values())}


def _num_bytes(
    tensors: Iterable[Any], device: torch.device | None = None, seen: set[int] | None = None
) -> int:
    """Return the allocated size of the tensors on one device, or on all.

    Storages in ``seen`` are skipped; those that are counted are added to it.
    """
    seen = set() if seen is None else seen
    num_bytes = 0
    for tensor in tensors:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            if device in (None, part.device) and storage._cdata not in seen:
                seen.add(storage._cdata)
                num_bytes += round_up(storage.nbytes())
    return num_bytes


def _parts(tensor: Any) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that have the data of ``tensor``."""
    if not isinstance(tensor, torch.Tensor) or nn.parameter.is_lazy(tensor):
        return ()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,) if tensor.layout is torch.strided else ()
