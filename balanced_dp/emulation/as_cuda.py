"""``emulate_devices(..., as_cuda=True)``: scripts see emulated devices under the name "cuda".

Torch without CUDA refuses that device type, so tensors stay on ``DEVICE_TYPE``, and names are
translated where Python code meets torch: functions translate the devices that they get,
emulated tensors report "cuda", and ``torch.cuda`` and ``torch.accelerator`` are about emulated
devices. Modules and classes are patched, so this holds in all threads.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.nn.parallel._functions as parallel_functions
import torch.utils._device as default_device

from ..errors import EmulationError
from . import cuda_functions, cuda_tensors, device_module
from .cuda_tensors import CUDA, to_named, translating
from .machine import Machine, Patches
from .tensor import EmulatedTensor


def patches_of_names(machine: Machine) -> list[Patches]:
    """Return the patches that give the devices of ``machine`` the name "cuda"."""
    return [_tensors(), _factories(), _cuda_modules(machine), _without_hardware(machine)]


def _tensors() -> Patches:
    nn: Any = torch._C._nn
    return {
        EmulatedTensor: cuda_tensors.EMULATED_TENSOR_METHODS,
        torch.Tensor: cuda_tensors.tensor_methods(),
        nn: {"_parse_to": translating(nn._parse_to, position=0)},
        torch: {"device": cuda_tensors.device, "Generator": cuda_tensors.Generator},
        torch.UntypedStorage: {"cuda": cuda_tensors.storage_on_device},
    }


def _factories() -> Patches:
    """Return patches of torch's functions that take a device, and of the default device."""
    factories = default_device._device_constructors()
    get_default: Any = torch.get_default_device
    patches: Patches = {
        module: {
            name: translating(function)
            for name, function in vars(module).items()
            if inspect.isroutine(function) and (function in factories or _takes_device(name))
        }
        for module in (torch, torch.fft)
    }
    patches[torch.nested] = {"nested_tensor": translating(torch.nested.nested_tensor)}
    patches[torch] |= {
        "get_default_device": lambda: to_named(get_default()),
        "set_default_tensor_type": cuda_tensors.set_default_tensor_type,
    }
    init = default_device.DeviceContext.__init__
    return patches | {default_device.DeviceContext: {"__init__": translating(init, position=1)}}


def _takes_device(name: str) -> bool:
    """Return whether a function of torch has a keyword ``device``."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return any(argument.name == "device" for schema in schemas for argument in schema.arguments)


def _cuda_modules(machine: Machine) -> Patches:
    """Return patches of the functions that ``torch.cuda`` and ``torch.accelerator`` call."""
    streams = {"Stream": cuda_functions.Stream, "Event": cuda_functions.Event}
    exchange = cuda_functions.exchange_device
    return {
        torch._C: cuda_functions.ANSWERS,
        torch.cuda: {
            **(streams | cuda_tensors.LEGACY_TYPES),
            **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), exchange),
            "_initialized": True,
            "_cached_device_count": len(machine.devices),
            "_cudart": SimpleNamespace(cudaMemGetInfo=device_module.mem_get_info),
            "_get_device_properties": device_module.get_device_properties,
            "default_generators": tuple(machine.generators),
            "memory_breakdown": device_module.memory_breakdown,
        },
        torch.cuda.streams: streams,
        torch.cuda.graphs: {"_cuda_isCurrentStreamCapturing": lambda: False},
        torch.cuda.nvtx: dict.fromkeys(("range_push", "range_pop", "mark"), lambda *args: 0),
        torch.cuda.nccl: {"is_available": lambda tensors: False},
        torch.distributed.distributed_c10d: {"_NCCL_AVAILABLE": False},
        parallel_functions: {"_get_stream": cuda_functions.Stream},
    }


def _without_hardware(machine: Machine) -> Patches:
    """Return patches of functions that differ without CUDA or with unknown gradients."""
    backends: Any = torch.distributed.Backend.default_device_backend_map
    never = property(lambda self: None, lambda self, value: None)
    return {
        torch.multiprocessing: {"spawn": _refuse_to_spawn},
        torch.distributed.Backend: {"default_device_backend_map": {**backends, CUDA: "gloo"}},
        # A scaler skips the step if a gradient is not finite, which symbolic devices do not know.
        torch.amp.GradScaler: {"_enabled": never} if machine.symbolic else {},
        # Else each operator prints that it failed to record an event.
        torch.profiler.profiler._KinetoProfile: {"use_device": never},
        # Scripts compare it, and torchvision compares it with its own.
        torch.version: {"cuda": torch.version.cuda or "12.6"},
        torch.backends.cudnn: {"is_acceptable": lambda tensor: False},
        # Its kernels hide their memory, and take the tokens besides padding as nested tensors.
        torch.backends.mha: {"get_fastpath_enabled": lambda: False},
    }


def _refuse_to_spawn(*args: Any, **kwargs: Any) -> None:
    raise EmulationError("processes that a script spawns see no emulated devices")
