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
    """Evaluate ``module(*inputs, **module_kwargs)`` in parallel, with a smaller first chunk.

    This is the functional form of ``BalancedDataParallel``, just as
    ``torch.nn.parallel.data_parallel`` is the functional form of ``nn.DataParallel``. It never
    moves the module.

    Args:
        gpu0_bsz: the most samples that the first device gets; None means no limit.
        module: the module to evaluate; its parameters and buffers must be on ``device_ids[0]``.
        inputs: a tuple of positional arguments, a single positional argument, or None for none.
        device_ids: as in ``BalancedDataParallel``.
        output_device: where the output goes, by default ``device_ids[0]``; may be ``"cpu"``.
        dim: the batch dimension.
        module_kwargs: keyword arguments.

    Raises:
        BalancedDataParallelError: the errors of ``BalancedDataParallel``, in the same cases.

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
