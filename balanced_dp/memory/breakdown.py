"""What the memory at the peak was used for, and the floor that no ``gpu0_bsz`` can lower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..emulation.ledger import ROUND_BYTES
from ..errors import ProbeError
from .step_memory import DevicePeak, StepMemory

_KEPT = ("parameter", "buffer", "gradient", "optimizer state")
_OF_THE_CHUNK = ("input", "activation", "rest")
"""Whose bytes may be those of the first device's own chunk."""


@dataclass(frozen=True, slots=True)
class DeviceBreakdown:
    """What one device's memory was used for when it was fullest, in bytes.

    Attributes:
        device: the device as torch names it.
        peak_bytes: the most that tensors held since the peak was last reset.
        uses: what for; the values add up to ``peak_bytes``. On emulated devices they are exact: the
            ledger's labels. Elsewhere ``parameter``, ``buffer``, ``gradient`` and ``optimizer
            state`` are what lives now, with the copies that the model made on the other devices,
            and ``rest`` is what else there was: activations, gathered outputs, the loss.
        floor_bytes: of the first device, about what it would hold with ``gpu0_bsz=0``, which no
            choice of ``gpu0_bsz`` can lower. None on the others, and where it is not known: before
            the first batch, or with samples on one device only.
    """

    device: str
    peak_bytes: int
    uses: dict[str, int]
    floor_bytes: int | None = None


def memory_breakdown(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[DeviceBreakdown, ...]:
    """Return what the memory of each of the model's devices was used for at its peak.

    Call it after a training step that is not the first, since the optimizer's state would not have
    been there at its peak, and with the gradients still there; on emulated devices at any time.
    The peak is the one since ``reset_peak_memory_stats``, or the beginning of a measured block or
    of a logger's record.

    The floor is the first device's peak less what its chunk takes there: what a sample takes of
    the other devices, and no more than there is of activations. It is low where the peak without
    samples would be at another moment of the step; ``gpu0_bsz=0``, measured, is exact.

    Args:
        model: a ``BalancedDataParallel``, or any module, whose devices are its parameters'.
        optimizer: the optimizer of its parameters, if its state is to be told from the rest.

    Raises:
        ProbeError: no device of the model counts its memory.
    """
    counted = {device: _uses(device, model, optimizer) for device in _devices_of(model)}
    chunk_sizes = samples_by_device(model)
    peaks = tuple(
        DevicePeak(
            device=str(device),
            capacity_bytes=None,
            start_allocated_bytes=sum(uses.get(use, 0) for use in _KEPT),
            peak_allocated_bytes=sum(uses.values()),
            chunk_size=None if chunk_sizes is None else chunk_sizes[device],
        )
        for device, uses in counted.items()
    )
    found = [
        DeviceBreakdown(peak.device, peak.peak_allocated_bytes, uses)
        for peak, uses in zip(peaks, counted.values(), strict=True)
    ]
    floor_bytes = StepMemory(devices=peaks).floor_bytes
    if floor_bytes is not None:
        first = found[0]
        movable_bytes = sum(first.uses.get(use, 0) for use in _OF_THE_CHUNK)
        floor_bytes = round(max(floor_bytes, first.peak_bytes - movable_bytes))
        found[0] = replace(first, floor_bytes=floor_bytes)
    return tuple(found)


def samples_by_device(model: Any) -> Counter[torch.device] | None:
    """Return how many samples of the model's last batch each device got, None if not known."""
    split = getattr(model, "chunk_sizes", None)
    if split is None:
        return None
    chunk_sizes: Counter[torch.device] = Counter()
    for device, size in zip(model.devices, split, strict=True):
        chunk_sizes[device] += size
    return chunk_sizes


def replica_bytes(model: Any, device: torch.device, chunk_size: int | None) -> int:
    """Return what copies of parameters and buffers a device gets for a chunk."""
    if not chunk_size or device == model.devices[0]:
        return 0
    return _num_bytes(chain(model.module.parameters(), model.module.buffers()))


def _devices_of(model: nn.Module) -> list[torch.device]:
    tensors = chain(model.parameters(), model.buffers())
    devices = getattr(model, "devices", None) or [tensor.device for tensor in tensors]
    counting = [
        device
        for device in dict.fromkeys(devices)
        if hasattr(torch.get_device_module(device), "max_memory_allocated")
    ]
    if not counting:
        raise ProbeError(
            f"no device of the model counts its memory: {sorted(set(map(str, devices)))}; to "
            "measure on a machine without accelerators, use emulate_devices"
        )
    return counting


def _uses(
    device: torch.device, model: Any, optimizer: torch.optim.Optimizer | None
) -> dict[str, int]:
    """Return bytes by use; they add up to the device's peak."""
    module = torch.get_device_module(device)
    if hasattr(module, "memory_breakdown"):
        labelled: dict[str, int] = module.memory_breakdown(device).peak
        return labelled
    parameters, buffers = list(model.parameters()), list(model.buffers())
    state = [] if optimizer is None else tree_leaves(list(optimizer.state.values()))
    tensors: dict[str, list[Any]] = {
        "parameter": parameters,
        "buffer": buffers,
        "gradient": [parameter.grad for parameter in parameters],
        "optimizer state": state,
    }
    seen: set[int] = set()
    uses = {use: _num_bytes(found, device, seen) for use, found in tensors.items()}
    rest = module.max_memory_allocated(device) - sum(uses.values())
    chunk_sizes = samples_by_device(model)
    if chunk_sizes and chunk_sizes[device] and device != model.devices[0]:
        copies = {"parameter": _num_bytes(parameters), "buffer": _num_bytes(buffers)}
        if rest >= sum(copies.values()):  # the peak is one of a batch, when there were copies
            uses = {use: size + copies.get(use, 0) for use, size in uses.items()}
            rest -= sum(copies.values())
    return uses | {"rest": rest}


def _num_bytes(
    tensors: Iterable[Any], device: torch.device | None = None, seen: set[int] | None = None
) -> int:
    """Return what the allocator holds for the tensors, of one device or of all.

    Storages in ``seen`` are not counted again; those that were counted are added to it.
    """
    seen = set() if seen is None else seen
    num_bytes = 0
    for tensor in tensors:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            if device in (None, part.device) and storage._cdata not in seen:
                seen.add(storage._cdata)
                num_bytes += -(-storage.nbytes() // ROUND_BYTES) * ROUND_BYTES
    return num_bytes


def _parts(tensor: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors with a storage that ``tensor`` consists of."""
    if not isinstance(tensor, torch.Tensor) or nn.parameter.is_lazy(tensor):
        return ()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,) if tensor.layout is torch.strided else ()
