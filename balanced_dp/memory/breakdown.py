"""What the memory of each device was used for when the device's memory was at its peak."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..emulation.ledger import round_up
from ..errors import ProbeError


def memory_breakdown(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, dict[str, int]]:
    """Return what the peak memory of each device of ``model`` was used for, in bytes.

    The result is a dict by device name, such as ``"cuda:0"``. Each value is a dict from the uses of
    memory, such as ``"parameter"`` or ``"gradient"``, to bytes. The bytes of a device add up to its
    peak memory since the peak was last reset. The peak is reset by ``reset_peak_memory_stats``, by
    ``MemoryProbe.measure`` when its block begins, and by a ``MemoryLogger`` when it is created or
    writes a record. While ``gpu0_bsz="auto"`` searches for the best split, the peak is also reset
    at the beginning of each training iteration. Devices for which torch has no memory statistics,
    such as the CPU, are left out.

    On emulated devices, the bytes are exact. On other devices, they are estimates: ``parameter``,
    ``buffer``, ``gradient`` and ``optimizer state`` count the tensors that exist when this function
    is called, not those that existed at the peak. So call this function before ``zero_grad`` frees
    the gradients. Call it after the second training step or a later one, because at the peak of the
    first step, most optimizers have no state yet. ``parameter`` and ``buffer`` include the copies
    that each device holds during a call of the model. ``rest`` is the remainder of the peak:
    activations, gathered outputs, the loss.

    Args:
        model: a ``BalancedDataParallel``, or any other module. The devices of any other module are
            those of its parameters and buffers.
        optimizer: the optimizer of the parameters. If it is given, the bytes of its state are
            listed separately, and not as part of ``rest``. On emulated devices, they are listed
            separately without this argument, too.

    Raises:
        ProbeError: torch has no memory statistics for any device of the model.
    """
    return {str(device): _uses(device, model, optimizer) for device in _devices_of(model)}


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
    """Return the bytes of each use of memory, such as "gradient"; the sum is the device's peak."""
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
    if getattr(model, "chunk_sizes", None):  # a batch was split
        seen = set()
        copied = {use: _num_bytes(tensors[use], None, seen) for use in ("parameter", "buffer")}
        if sum((uses | copied).values()) <= peak_bytes:  # else no replicas existed at the peak
            uses |= copied
    return uses | {"rest": peak_bytes - sum(uses.values())}


def _num_bytes(tensors: Iterable[Any], device: torch.device | None, seen: set[int]) -> int:
    """Return the allocated bytes of the ``tensors`` on ``device``; None means all devices.

    Storages in ``seen`` are skipped, and storages that are counted are added to ``seen``.
    """
    num_bytes = 0
    for tensor in tensors:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            if device in (None, part.device) and storage._cdata not in seen:
                seen.add(storage._cdata)
                num_bytes += round_up(storage.nbytes())
    return num_bytes


def _parts(tensor: Any) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that hold the data of ``tensor``, which may be sparse (COO).

    Return an empty tuple for other layouts, lazy parameters and objects that are not tensors.
    """
    if not isinstance(tensor, torch.Tensor) or nn.parameter.is_lazy(tensor):
        return ()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,) if tensor.layout is torch.strided else ()
