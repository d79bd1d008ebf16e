"""``torch.nn.parallel.data_parallel`` with a smaller chunk of the batch for the first device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from ..devices import Device, resolve_devices
from .data_parallel import BalancedDataParallel
from .replicate import check_on_device


def balanced_data_parallel(
    gpu0_bsz: int | None,
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Compute ``module(*inputs, **module_kwargs)`` on several devices, in parallel.

    The batch is split over the devices, and the first device gets at most ``gpu0_bsz`` samples.
    This function is the functional form of ``BalancedDataParallel``, just as
    ``torch.nn.parallel.data_parallel`` is the functional form of ``nn.DataParallel``. The function
    never moves the module to another device.

    Args:
        gpu0_bsz: the most samples of the batch that the first device gets; None means no limit.
        module: the module to evaluate; its parameters and buffers must be on ``device_ids[0]``.
        inputs: a tuple of positional arguments, a single positional argument, or None if there are
            no positional arguments.
        device_ids: the devices, as in ``BalancedDataParallel``.
        output_device: the device of the output, by default ``device_ids[0]``. It may be ``"cpu"``.
        dim: the batch dimension of the inputs and outputs.
        module_kwargs: the keyword arguments of the module, or None if there are none.

    Returns:
        The output of the module for the whole batch.

    Raises:
        BalancedDataParallelError: an argument cannot be used, an input cannot be split, or the
            outputs cannot be joined, as in ``BalancedDataParallel``.
        RuntimeError: a parameter or buffer is not on ``device_ids[0]``, or the module cannot be
            replicated.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> balanced_data_parallel(1, model, torch.ones(8, 4), ["cpu", "cpu"]).shape
        torch.Size([8, 2])
    """
    devices = resolve_devices(device_ids)
    if devices:
        check_on_device(chain(module.parameters(), module.buffers()), devices[0])
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    model = BalancedDataParallel(gpu0_bsz, module, device_ids, output_device, dim)
    return model(*inputs, **(module_kwargs or {}))
