"""The context manager ``emulate_devices`` and the sequence of devices that it yields."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, overload
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import ArgumentError, ArgumentTypeError
from ..split import as_integer
from ..units import format_bytes, parse_bytes
from . import device_module
from .as_cuda import named_cuda
from .autocast import autocast_for_emulated_devices
from .kernels import register_kernels
from .ledger import Label, MemoryBreakdown
from .machine import DEVICE_TYPE, Machine, make_current
from .tensor import EmulatedTensor, set_label

Patch = AbstractContextManager[object]


class EmulatedDevices(Sequence[torch.device]):
    """The devices of an ``emulate_devices`` context, in order, with their memory statistics."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @overload
    def __getitem__(self, index: int) -> torch.device: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.device]: ...
    def __getitem__(self, index: int | slice) -> torch.device | list[torch.device]:
        return self._machine.devices[index]

    def __len__(self) -> int:
        return len(self._machine.devices)

    def __repr__(self) -> str:
        return f"EmulatedDevices({list(map(str, self))})"

    def copied_bytes(self) -> dict[tuple[torch.device, torch.device], int]:
        """Return the bytes copied since the context was entered, by pair (source, target).

        The CPU is one of the devices. Copies within a device are not counted.
        """
        return self._machine.copied_bytes()

    def memory_breakdown(self, device: torch.device | str | int) -> MemoryBreakdown:
        """Return the bytes on ``device`` by use, now and at the peak.

        The uses are parameter, buffer, gradient, optimizer state, input, activation (all other
        results of the forward and backward passes, including the loss's), gathered output (outputs
        copied from another device) and other. A tensor counts as a parameter if it is an
        ``nn.Parameter`` or a copy of one, as a buffer from its module's first forward pass on, as a
        gradient once backward accumulates it, and as optimizer state after the optimizer step.

        Raises:
            EmulationError: the device does not exist.
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
    """Emulate ``num_devices`` accelerators on the CPU, ``torch.device("lazy", i)``.

    Values are computed, code that mixes devices fails as on CUDA, and the memory of each device is
    counted to the byte: each storage once, rounded up to 512 bytes as by CUDA's allocator, and
    freed with its last tensor. ``torch.get_device_module("lazy")`` has the functions of
    ``torch.cuda``.

    Inside the context ``nn.Module.to`` preserves the identity of parameters, as on CUDA, so tied
    weights stay tied.

    Args:
        num_devices: number of devices, at least 1.
        memory: capacity of each device, in bytes or as text such as ``"11GiB"``, or a sequence
            with one capacity for each device. An allocation that does not fit raises
            ``torch.OutOfMemoryError``. None means no limit.
        symbolic: whether to keep only the shapes of floating-point tensors. Without data and
            arithmetic, a model far larger than this machine's memory can be measured. Integer and
            bool tensors keep their values. Reading a value that was not computed raises
            ``SymbolicValueError``.
        as_cuda: whether the devices are named ``torch.device("cuda", i)``, for code that was
            written for GPUs: ``.cuda()``, ``device="cuda:1"``, ``torch.cuda``,
            ``torch.accelerator``, ``tensor.is_cuda`` and the like are about them then, in all
            threads. What they cannot do, such as CUDA graphs and NCCL, raises ``EmulationError``.

    Yields:
        The devices, as a sequence with ``copied_bytes()`` and ``memory_breakdown(device)``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid.
        EmulationError: another ``emulate_devices`` context is open.

    Warns:
        ResourceWarning: tensors outlive the context. Their memory is freed nevertheless, and using
            them raises ``EmulationError``.

    Examples:
        >>> with emulate_devices(2, memory="1MiB") as devices:
        ...     x = torch.ones(1000, device=devices[1])
        ...     torch.get_device_module(x.device).memory_allocated(devices[1])
        ...     del x
        4096
    """
    device_type = "cuda" if as_cuda else DEVICE_TYPE
    machine = Machine(_capacities(num_devices, memory), symbolic, device_type)
    register_kernels()
    if not hasattr(torch, DEVICE_TYPE):
        torch._register_device_module(DEVICE_TYPE, device_module)
    with (
        make_current(machine),
        _parameters_keep_identity(),
        _seeded_by_torch(machine),
        _optimizers_as_on_cuda(),
        autocast_for_emulated_devices(device_type),
        _failed_backward_frees_its_queue(),
        _labels_from_hooks(machine),
        named_cuda(machine) if as_cuda else nullcontext(),
    ):
        yield EmulatedDevices(machine)
        _warn_of_leaks(machine)


def _capacities(num_devices: int, memory: int | str | Sequence[int | str] | None) -> list[int]:
    num_devices = as_integer("num_devices", num_devices, minimum=1)
    if memory is None:
        return [sys.maxsize] * num_devices
    if isinstance(memory, int | str):
        return [parse_bytes(memory)] * num_devices
    if not isinstance(memory, Sequence) or isinstance(memory, bytes):
        raise ArgumentTypeError(
            f"memory must be a size such as '11GiB' or a sequence of sizes, got {memory!r}"
        )
    capacities = [parse_bytes(item) for item in memory]
    if len(capacities) != num_devices:
        raise ArgumentError(
            f"memory must be one size or one for each of the {num_devices} devices, "
            f"got {len(capacities)} sizes"
        )
    return capacities


def _parameters_keep_identity() -> Patch:
    # `param.data = ...` cannot turn a plain tensor into a subclass, so Module.to would replace the
    # parameters of each module and untie tied ones. It swaps them in place if torch's flag for that
    # is set. The flag is set in Module._apply only: load_state_dict would swap them, too, and fail
    # if a graph holds a parameter.
    future: Any = torch.__future__
    apply = torch.nn.Module._apply
    lock = threading.RLock()

    # Module._apply has no annotations, so mypy wants its calls ignored.
    @functools.wraps(apply)
    def swapping_apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        known = [(p, _own_state(p)) for p in self._parameters.values() if p is not None]
        with lock:  # all threads share the flag
            before = future.get_swap_module_params_on_conversion()
            future.set_swap_module_params_on_conversion(True)
            try:
                return apply(self, *args, **kwargs)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if "Couldn't swap" not in str(error):
                    raise
                # A graph, a view or a weak reference holds a parameter: replace it instead.
                future.set_swap_module_params_on_conversion(False)
                return apply(self, *args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                future.set_swap_module_params_on_conversion(before)
                for parameter, state in known:
                    _restore_own_state(parameter, state)

    return mock.patch.object(torch.nn.Module, "_apply", swapping_apply)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_EMULATION = {"_elem", "_allocations"}


def _own_state(parameter: torch.Tensor) -> dict[str, Any]:
    """Return what a parameter has beside its data: attributes and hooks."""
    attributes = {k: v for k, v in vars(parameter).items() if k not in _OF_EMULATION}
    return attributes | {name: getattr(parameter, name) for name in _HOOKS}


def _restore_own_state(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Give a parameter that was swapped its attributes and hooks again."""
    for name, value in state.items():
        if value is not None and name in _HOOKS:
            setattr(parameter, name, None)  # else setting the same dictionary has no effect
        if value is not getattr(parameter, name, None):
            setattr(parameter, name, value)


def _optimizers_as_on_cuda() -> Patch:
    # On CUDA optimizers update all parameters at once by default (foreach), which takes temporary
    # memory for all of them, and have a fused kernel on request, which takes none.
    optimizer: Any = sys.modules[torch.optim.Optimizer.__module__]
    foreach = [*optimizer._get_foreach_kernels_supported_devices(), DEVICE_TYPE]
    fused = [*optimizer._get_fused_kernels_supported_devices(), DEVICE_TYPE]
    return mock.patch.multiple(
        optimizer,
        _foreach_supported_types=[*optimizer._foreach_supported_types, EmulatedTensor],
        _get_foreach_kernels_supported_devices=lambda: foreach,
        _get_fused_kernels_supported_devices=lambda: fused,
    )


def _failed_backward_frees_its_queue() -> Patch:
    # On the CPU the tasks that a failed backward pass has queued stay in the calling thread's queue
    # and hold their memory until its next backward pass, so a tiny one is run. CUDA devices have
    # threads of their own, which empty their queues.
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError:
            one = torch.ones((), requires_grad=True)
            run((one.clone(),), (torch.ones(()),), False, False, (), accumulate_grad=True)
            raise

    return mock.patch.object(autograd, "_engine_run_backward", run_backward)


def _seeded_by_torch(machine: Machine) -> Patch:
    # torch.manual_seed calls this function for devices outside of torch, but it seeds only those of
    # PrivateUse1.
    seed_other_devices = torch.random._seed_custom_device

    def seed_custom_device(seed: int) -> None:
        machine.manual_seed_all(seed)
        seed_other_devices(seed)

    return mock.patch.object(torch.random, "_seed_custom_device", seed_custom_device)


@contextmanager
def _labels_from_hooks(machine: Machine) -> Iterator[None]:
    """Label buffers and optimizer state, which only modules and optimizers know."""

    def label_buffers(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        machine.thread.in_optimizer_step = False
        for buffer in module._buffers.values():
            set_label(buffer, Label.BUFFER, over=_MAYBE_BUFFER)

    def begin_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        machine.thread.in_optimizer_step = True

    def end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        machine.thread.in_optimizer_step = False
        for state in optimizer.state.values():
            for value in state.values():
                set_label(value, Label.OPTIMIZER_STATE)

    with (
        register_module_forward_pre_hook(label_buffers),
        register_optimizer_step_pre_hook(begin_step),
        register_optimizer_step_post_hook(end_step),
    ):
        yield


_MAYBE_BUFFER = {Label.ACTIVATION, Label.OTHER, Label.INPUT, Label.GATHERED_OUTPUT}


def _warn_of_leaks(machine: Machine) -> None:
    if any(ledger.num_blocks for ledger in machine.ledgers):
        gc.collect()  # the first optimizer of a process leaves a cycle, which is not a leak
    leaks = []
    for device, ledger in zip(machine.devices, machine.ledgers, strict=True):
        if ledger.num_blocks:
            uses = ", ".join(
                f"{label} {format_bytes(num_bytes)}"
                for label, num_bytes in ledger.breakdown().now.items()
                if num_bytes
            )
            leaks.append(f"{ledger.num_blocks} on {device} ({uses or 'empty'})")
    if leaks:
        warnings.warn(
            f"tensors outlive their emulate_devices context: {'; '.join(leaks)}. Their memory is "
            "freed now and they cannot be used any more. Copy results with .cpu(), and delete the "
            "variables that refer to other tensors.",
            ResourceWarning,
            stacklevel=4,
        )
