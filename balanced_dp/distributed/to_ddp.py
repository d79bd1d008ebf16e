"""Conversion of a ``BalancedDataParallel`` to a ``DistributedDataParallel``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..devices import default_device_type
from ..errors import ArgumentError
from ..parallel.data_parallel import BalancedDataParallel


def convert(
    model: BalancedDataParallel[Any],
    device: torch.device | str | None = None,
    **ddp_arguments: Any,
) -> DistributedDataParallel:
    """Return the module of ``model``, wrapped in ``DistributedDataParallel``.

    Every process must call this function, after ``init_process_group``. The module is moved in
    place to the device of this rank, so it keeps its parameters, buffers and hooks. Hooks of
    ``model`` itself are not kept. The state dicts of both classes have the same keys, so a
    checkpoint of either class can be loaded into the other. An existing optimizer remains valid.
    But if it has state, and the module is moved to another device, the state must be moved, too:
    ``optimizer.load_state_dict(optimizer.state_dict())``.

    If the ranks have chunks of different sizes, apply ``balanced_dp.distributed.scale_loss`` to the
    loss of each rank. Then the averaged gradients are those of the whole batch.
    ``split_ranks(batch_size, rank0_bsz=model.gpu0_bsz)`` returns the chunk sizes for any number of
    ranks. Outputs are not gathered: each rank has the outputs of its own samples.

    Args:
        model: the model to convert.
        device: the device of this rank. The default is the entry of ``model.devices`` whose index
            is torchrun's ``LOCAL_RANK``; without ``LOCAL_RANK``, the index is the global rank. If
            all entries are the same device, this device is the default on every rank. If
            ``model.device_ids`` is empty, as it is by default on a machine without accelerators,
            the module stays on its device.
        **ddp_arguments: arguments of ``DistributedDataParallel``. Two of them have other defaults
            than in torch. The default ``gradient_as_bucket_view=True`` avoids a copy of the
            gradients. On an accelerator, the default ``device_ids=[device]`` moves inputs to the
            device.

    Raises:
        ArgumentError: ``device`` is None and has no default: ``model.devices`` has no entry for
            this rank, and its entries are not all the same device.
        ValueError, RuntimeError: raised by ``DistributedDataParallel``, for example if there is no
            process group or no parameter requires a gradient.
    """
    module = model.module
    if device is None and model.device_ids:
        device = _device_of_this_rank(model.devices)
    arguments = {"gradient_as_bucket_view": True, **ddp_arguments}
    if device is not None:
        device = torch.device(device)
        module.to(device)
        if device.type == default_device_type():
            # Let DistributedDataParallel move inputs there, as BalancedDataParallel does.
            arguments.setdefault("device_ids", [device])
    ddp = DistributedDataParallel(module, **arguments)
    ddp.training = model.training  # train() would set the mode of the module, too
    return ddp


def _device_of_this_rank(devices: Sequence[torch.device]) -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK") or dist.get_rank())
    if len(set(devices)) == 1:  # such as ["cpu", "cpu"], or the only visible accelerator
        return devices[0]
    if local_rank >= len(devices):
        raise ArgumentError(
            f"the local rank is {local_rank}, but the model has {len(devices)} devices; start one "
            "process for each device, or give each process its device by the argument device"
        )
    return devices[local_rank]
