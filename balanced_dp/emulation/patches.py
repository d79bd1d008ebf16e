"""The changes to torch (patches) that hold while an ``emulate_devices`` context is open."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils._device as default_device
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import warn
from . import device_module
from .as_cuda import location_of, patches_of_names, restore
from .autocast import patches_of_autocast, register_casts
from .kernels import register_kernels
from .ledger import Label
from .machine import DEVICE_TYPE, Machine, Patches, current_machine
from .tensor import NOT_STATE, EmulatedTensor, set_label


@contextmanager
def patched(machine: Machine) -> Iterator[None]:
    """Context manager in which torch uses the devices of ``machine`` like CUDA devices."""
    register_kernels()
    register_casts()
    if not hasattr(torch, DEVICE_TYPE):
        torch._register_device_module(DEVICE_TYPE, device_module)
    all_patches = [_patches(machine), patches_of_autocast(machine.device_type)]
    with (
        register_optimizer_step_pre_hook(_begin_step),
        register_optimizer_step_post_hook(_end_step),
        ExitStack() as stack,
    ):
        if machine.symbolic:
            all_patches.append(_no_files())
        if machine.device_type != DEVICE_TYPE:
            all_patches += patches_of_names(machine)
            stack.callback(torch.set_default_device, default_device.CURRENT_DEVICE)
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        builtins = torch.jit._builtins._get_builtin_table()  # TorchScript finds builtins by id()
        stack.enter_context(mock.patch.dict(builtins))
        for patches in all_patches:
            for target, attributes in patches.items():
                for name, value in attributes.items():
                    if id(getattr(target, name, None)) in builtins:
                        builtins[id(value)] = builtins[id(getattr(target, name))]
                    stack.enter_context(mock.patch.object(target, name, value, create=True))
        yield


def _patches(machine: Machine) -> Patches:
    optimizer: Any = sys.modules[torch.optim.Optimizer.__module__]
    foreach = [*optimizer._get_foreach_kernels_supported_devices(), DEVICE_TYPE]
    fused = [*optimizer._get_fused_kernels_supported_devices(), DEVICE_TYPE]
    registry = [(0, location_of, restore), *torch.serialization._package_registry]
    return {
        torch.nn.Module: {"_apply": _apply_in_place},
        torch.utils: {"swap_tensors": _swap_data},
        torch.Tensor: {"as_subclass": _as_subclass},
        # torch.manual_seed calls this function to seed the generators of a custom device type.
        # Torch's own version of this function seeds only devices of the type PrivateUse1.
        torch.random: {"_seed_custom_device": machine.manual_seed_all},
        # By default, optimizers on CUDA update all parameters at once (foreach), which takes
        # temporary memory for all parameters. With fused=True, optimizers use a fused kernel,
        # which takes no temporary memory. Emulated devices support both.
        optimizer: {
            "_foreach_supported_types": [*optimizer._foreach_supported_types, EmulatedTensor],
            "_get_foreach_kernels_supported_devices": lambda: foreach,
            "_get_fused_kernels_supported_devices": lambda: fused,
        },
        torch.autograd: {"_engine_run_backward": _run_backward},
        torch.serialization: {"_package_registry": registry},
        # Dynamo would trace the Python code of emulated tensors, and print dozens of warnings.
        torch: {"compile": functools.partial(torch.compile, disable=True)},
    }


def _as_subclass(self: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    # fastai calls as_subclass to give a CPU copy the class of its source. If the source is an
    # emulated tensor, the CPU copy keeps its own class.
    return self if issubclass(cls, EmulatedTensor) else torch._C.TensorBase.as_subclass(self, cls)


# Torch has no type annotations for these functions.
_future: Any = torch.__future__
_apply: Any = torch.nn.Module._apply
_swap_all: Any = torch.utils.swap_tensors
_lock = threading.RLock()


@functools.wraps(_apply)
def _apply_in_place(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    # `param.data = ...` cannot turn a plain tensor into a subclass, so Module.to would replace the
    # parameters of each module and untie tied parameters. If a flag of torch is set, Module.to
    # swaps the parameters in place instead. The flag is set only inside of Module._apply. If the
    # flag stayed set, load_state_dict would swap parameters, too, and would fail if an autograd
    # graph holds a parameter.
    with _lock:  # all threads share the flag
        before = _future.get_swap_module_params_on_conversion()
        _future.set_swap_module_params_on_conversion(True)
        try:
            return _apply(self, *args, **kwargs)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
            # An autograd graph, a view or a weak reference holds a parameter, so it cannot be
            # swapped: replace the parameter instead.
            _future.set_swap_module_params_on_conversion(False)
            return _apply(self, *args, **kwargs)
        finally:
            _future.set_swap_module_params_on_conversion(before)
            for buffer in self._buffers.values():
                set_label(buffer, Label.BUFFER, over=NOT_STATE)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _swap_data(parameter: Any, other: torch.Tensor) -> None:
    """Swap two tensors, but let ``parameter`` keep its attributes and hooks.

    While an ``emulate_devices`` context is open, ``Module.to`` calls this function in place of
    ``torch.utils.swap_tensors``, which would swap the attributes and hooks, too. On CUDA, a
    parameter keeps them, because there ``Module.to`` assigns to ``parameter.data``.
    """
    own = ("_elem", "_machine", "_blocks")
    attributes = {k: v for k, v in vars(parameter).items() if k not in own}
    hooks = {name: getattr(parameter, name) for name in _HOOKS}
    _swap_all(parameter, other)
    vars(parameter).update(attributes)
    for name, value in hooks.items():
        setattr(parameter, name, None)  # else setting the same dictionary has no effect
        setattr(parameter, name, value)


def _no_files() -> Patches:
    """Return patches by which ``torch.save`` and safetensors write no files, but warn.

    The patches are for symbolic mode, in which tensors have shapes but no values. Without these
    patches, saving a tensor that has no values would fail after the file has been emptied. With a
    file object instead of a path, ``torch.save`` does the same as without these patches: it saves
    tensors that have values, and raises ``SymbolicValueError`` for the others.
    """
    save = torch.save

    def skip(path: Any) -> None:
        warn(f"{os.fspath(path)} is not saved: symbolic devices keep only the shapes of tensors")

    @functools.wraps(save)
    def save_in_memory_only(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        skip(f) if isinstance(f, str | os.PathLike) else save(obj, f, *args, **kwargs)

    patches: Patches = {torch: {"save": save_in_memory_only}}
    if importlib.util.find_spec("safetensors"):
        skip_file = {"serialize_file": lambda tensors, path, **kwargs: skip(path)}
        patches[importlib.import_module("safetensors.torch")] = skip_file
    return patches


# torch.autograd imports this function from torch.autograd.graph, but type checkers do not see it.
_run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    # On the CPU, a failed backward pass leaves tasks in the queue of the calling thread. They hold
    # memory until the thread's next backward pass, so a tiny backward pass is run here. On CUDA,
    # each device has a thread of its own, which empties its queue.
    try:
        return _run(*args, **kwargs)
    except RuntimeError:
        one = torch.ones((), requires_grad=True)
        _run((one.clone(),), (torch.ones(()),), False, False, (), accumulate_grad=True)
        raise


# Only an optimizer knows which tensors are its state, so hooks on the optimizer's step label these
# tensors.


def _begin_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    current_machine().thread.optimizer_task = torch._C._current_graph_task_id()


def _end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    current_machine().thread.optimizer_task = None
    for state in optimizer.state.values():
        for value in state.values():
            set_label(value, Label.OPTIMIZER_STATE)
