"""The context manager ``emulate_devices`` and the sequence of devices that it yields."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import ArgumentError, EmulationError
from ..memory.units import format_bytes, parse_bytes
from ..split import as_integer
from ..torch_versions import require
from .ledger import MemoryBreakdown
from .machine import DEVICE_TYPE, MAX_DEVICES, Machine, make_current

FOR_EMULATION = """
    Tensor._is_view Tensor._make_wrapper_subclass nn.Module._apply autograd._engine_run_backward
    _register_device_module random._seed_custom_device serialization._package_registry
    optim.optimizer._foreach_supported_types jit._builtins._get_builtin_table
    optim.optimizer._get_foreach_kernels_supported_devices
    optim.optimizer._get_fused_kernels_supported_devices
    nn.parallel._functions._get_stream overrides._get_current_function_mode_stack
    utils._device._device_constructors cuda._exchange_device cuda._maybe_exchange_device
    cuda._cudart cuda._cached_device_count _C._nn._parse_to _C._jit_get_schemas_for_operator
    distributed.distributed_c10d._NCCL_AVAILABLE profiler.profiler._KinetoProfile
    _C._current_autograd_node _C._current_graph_task_id _C._dispatch_has_kernel_for_dispatch_key
    _C._is_autocast_available _C._ExcludeDispatchKeyGuard _C.DispatchKeySet
    _C.DispatchKey.AutocastPrivateUse1 _C.DispatchKey.CompositeImplicitAutograd
    _C.DispatchKey.AutogradNestedTensor ops.aten.linear_backward ops.aten._conj.default._schema
    ops.aten._neg_view ops.aten._to_copy ops.aten._scaled_dot_product_attention_math
    _C._storage_Use_Count ops.aten._efficientzerotensor
    _C._dispatch_get_registrations_for_dispatch_key _C._len_torch_dispatch_stack
    autograd.forward_ad._current_level
"""
"""The names in torch that the emulation uses, such as functions and classes.

If the installed torch lacks some of these names, ``emulate_devices`` raises an ``EmulationError``
that lists the missing names.
"""


class EmulatedDevices(list[torch.device]):
    """The list of devices that ``emulate_devices`` yields, with methods that report on them.

    The devices are sorted by index. The methods report the memory of a device and the bytes that
    were copied between devices.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.devices)
        self._machine = machine

    def copied_bytes(self) -> dict[tuple[torch.device, torch.device], int]:
        """Return the number of bytes copied, for each pair of devices ``(source, target)``.

        Counting starts when the ``emulate_devices`` context is entered. The CPU counts as a device,
        too. Copies within a device are not counted, and pairs without copies are left out.
        """
        return self._machine.copied_bytes()

    def memory_breakdown(self, device: torch.device | str | int) -> MemoryBreakdown:
        """Return the bytes allocated on ``device`` for each use of memory, now and at the peak.

        The uses are:

        - "parameter": each ``nn.Parameter`` that an operator has used, and parameters that were
          copied from another device.
        - "buffer": the buffers of a module that was moved to the device.
        - "gradient": the gradients of leaf tensors. A gradient may count as an activation until the
          backward pass has accumulated it in ``grad``.
        - "optimizer state": the tensors of an optimizer's state, once a ``step`` of the optimizer
          has ended.
        - "input": tensors that were copied from the CPU, and activations that were copied from
          device 0.
        - "gathered output": activations that were copied from a device other than device 0.
        - "activation": all other results of operators, whether they are computed in the forward
          pass, in the loss or in the backward pass. Copies in the backward pass count, too.
        - "other": tensors that ``torch.zeros`` and similar functions create, and temporary tensors
          of an optimizer's ``step``.

        Raises:
            EmulationError: ``device`` does not exist.
        """
        return self._machine.ledgers[self._machine.index_of(device)].breakdown()


@contextmanager
def emulate_devices(
    num_devices: int,
    *,
    memory: int | str | Sequence[int | str] | None = None,
    symbolic: bool = False,
    as_cuda: bool = False,
) -> Iterator[EmulatedDevices]:
    """Emulate ``num_devices`` accelerators, ``torch.device("lazy", i)``, on the CPU.

    Operators compute actual values, unless ``symbolic`` is true. An operator whose tensors are on
    different devices fails as it does on CUDA.

    The memory of each device is counted to the byte. A storage is counted as long as a tensor uses
    it, and only once if several tensors share it. The size of a storage is rounded up to a multiple
    of 512 bytes, as in CUDA's allocator. ``torch.get_device_module("lazy")`` provides functions
    that ``torch.cuda`` has, such as ``max_memory_allocated``, for the emulated devices.

    Inside the context, ``nn.Module.to`` keeps the ``nn.Parameter`` objects, as on CUDA, so tied
    weights stay tied. But a parameter may be replaced if a view, a weak reference or an autograd
    graph refers to it.

    Args:
        num_devices: number of devices, at least 1.
        memory: capacity of every device, in bytes or as text such as ``"11GiB"``. A sequence gives
            the capacity of each device separately. An allocation that does not fit raises
            ``torch.OutOfMemoryError``. None means no limit.
        symbolic: whether to keep only the shapes of floating-point and complex tensors. Such
            tensors have no data, and operators on them do no arithmetic, so a model far larger than
            the memory of this machine can be measured. Integer and bool tensors keep their values.
            But the mask ``x > 0``, for example, has no values if ``x`` has none. Reading a value
            that was not computed raises ``SymbolicValueError``.
        as_cuda: whether the devices are named ``torch.device("cuda", i)``, for code that was
            written for GPUs. ``.cuda()``, ``device="cuda:1"``, ``torch.cuda``,
            ``torch.accelerator``, ``tensor.is_cuda`` and similar names then refer to the emulated
            devices in all threads. CUDA graphs, NCCL and other features that are not supported
            raise an error, often the error that a torch without CUDA raises.

    Yields:
        The devices, as a list that also has the methods ``copied_bytes()`` and
        ``memory_breakdown(device)``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid.
        EmulationError: another ``emulate_devices`` context is open, or the installed torch lacks a
            function or class that the emulation needs.

    Warns:
        ResourceWarning: tensors on the devices still exist at the end of the ``with`` block. Using
            such a tensor later raises ``EmulationError``. If an exception ends the block, there is
            no warning.

    Examples:
        >>> with emulate_devices(2, memory="1MiB") as devices:
        ...     x = torch.ones(1000, device=devices[1])
        ...     torch.get_device_module(x.device).memory_allocated(devices[1])
        ...     del x
        4096
    """
    device_type = "cuda" if as_cuda else DEVICE_TYPE
    machine = Machine(_capacities(num_devices, memory), symbolic, device_type)
    require(FOR_EMULATION, "emulated devices", EmulationError)
    # Imported here, so that training without emulation works even if torch lacks names that
    # patches.py uses.
    from .patches import patched

    with make_current(machine), patched(machine):
        yield EmulatedDevices(machine)
        _warn_of_leaks(machine)


def _capacities(num_devices: int, memory: Any) -> list[int]:
    num_devices = as_integer("num_devices", num_devices, minimum=1)
    if num_devices > MAX_DEVICES:
        raise ArgumentError(
            f"num_devices must be at most {MAX_DEVICES}, the limit of torch, got {num_devices}"
        )
    if memory is None:
        return [sys.maxsize] * num_devices
    is_one = isinstance(memory, str | bytes) or not isinstance(memory, Sequence)
    capacities = [parse_bytes(size) for size in ([memory] * num_devices if is_one else memory)]
    if len(capacities) != num_devices:
        fact = f"memory must be one size or one for each of the {num_devices} devices"
        raise ArgumentError(f"{fact}, got {len(capacities)} sizes")
    return capacities


def _warn_of_leaks(machine: Machine) -> None:
    if any(ledger.allocated_bytes for ledger in machine.ledgers):
        gc.collect()  # the first optimizer of a process leaves a reference cycle, not a leak
    leaks = [
        f"{use} {format_bytes(num_bytes)} on {device}"
        for device, ledger in zip(machine.devices, machine.ledgers, strict=True)
        for use, num_bytes in ledger.breakdown().now.items()
        if num_bytes
    ]
    if leaks:
        warnings.warn(
            f"tensors outlive their emulate_devices context: {', '.join(leaks)}. They can no "
            "longer be used. Copy results with .cpu(), and delete the variables that refer to "
            "other tensors.",
            ResourceWarning,
            stacklevel=4,
        )
