"""From a ``BalancedDataParallel`` to ``DistributedDataParallel``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..devices import default_device_type
from ..errors import ArgumentError, ArgumentTypeError
from ..parallel.data_parallel import BalancedDataParallel


def convert(
    model: BalancedDataParallel[Any],
    device: torch.device | str | None = None,
    **ddp_arguments: Any,
) -> DistributedDataParallel:
    """Return the model's module in ``DistributedDataParallel``.

    Each process calls it, after ``init_process_group``. The module moves to this rank's device and
    is the same object, so its parameters, buffers and hooks stay; hooks of the wrapper move on to
    the new one, and so does ``training``. The state dict has the same keys, so checkpoints load
    both ways. Gradients are those of the whole batch if losses go through ``scale_loss``, since
    ranks have unlike shares; ``split_ranks(batch_size, rank0_bsz=model.gpu0_bsz)`` says what those
    are to be for any number of ranks. An optimizer that has state stays valid if the device is the
    same; else load its state dict anew.

    Outputs are no longer gathered: each rank has those of its own samples.

    Args:
        model: what trained in one process. It gives up its replicas and threads.
        device: where this rank trains. By default the one of ``model.devices`` with this rank's
            number on its machine (``LOCAL_RANK``, which torchrun sets), or where the module is if
            ``model`` has none.
        **ddp_arguments: as of ``DistributedDataParallel``. Unless said otherwise, gradients are
            views of its buckets (``gradient_as_bucket_view=True``), which spares a copy of them,
            and inputs are moved to an accelerator (``device_ids=[device]``).

    Raises:
        ArgumentTypeError: ``model`` is no ``BalancedDataParallel``.
        ArgumentError: there are more processes than devices.
        ValueError, RuntimeError: as of ``DistributedDataParallel``: there is no process group, or
            nothing to train.
    """
    if not isinstance(model, BalancedDataParallel):
        raise ArgumentTypeError(
            f"model must be a BalancedDataParallel, got a {type(model).__name__}; any other module "
            "goes into DistributedDataParallel(module)"
        )
    model.close()
    module = model.module
    if device is None and model.devices:
        device = _own(model.devices)
    arguments: dict[str, Any] = {"gradient_as_bucket_view": True}
    if device is not None:
        device = torch.device(device)
        module.to(device)
        if device.type == default_device_type():
            arguments["device_ids"] = [device]  # so that inputs are moved there, as before
    ddp = DistributedDataParallel(module, **{**arguments, **ddp_arguments})
    ddp.training = model.training  # of the module and what is in it, nothing changes
    _move_hooks(model, ddp)
    return ddp


def _move_hooks(model: nn.Module, ddp: nn.Module) -> None:
    ddp._is_full_backward_hook = model._is_full_backward_hook
    for name in vars(nn.Module()):
        if "_hooks" in name:  # the same dictionaries, so that their handles still remove them
            getattr(model, name).update(getattr(ddp, name))
            setattr(ddp, name, getattr(model, name))


def _own(devices: Sequence[torch.device]) -> torch.device:
    """Return the device of this rank."""
    local_rank = int(os.environ.get("LOCAL_RANK") or dist.get_rank())
    if len(set(devices)) == 1:  # a repeated CPU, or one accelerator that each process sees
        return devices[0]
    if local_rank >= len(devices):
        raise ArgumentError(
            f"this is process {local_rank} of its machine, but the model has {len(devices)} "
            "devices; start as many processes, or give device"
        )
    return devices[local_rank]
