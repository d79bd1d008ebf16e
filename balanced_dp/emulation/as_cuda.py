"""``emulate_devices(..., as_cuda=True)``: scripts see emulated devices under the name "cuda".

Torch without CUDA refuses that device type, so tensors stay on ``DEVICE_TYPE``, and names are
translated where Python code meets torch: functions that take a device translate what they get,
emulated tensors report "cuda", and ``torch.cuda`` and ``torch.accelerator`` are about emulated
devices. Modules and classes are patched, so this holds in all threads.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed
import torch.nn.parallel._functions as parallel_functions
import torch.utils._device as default_device

from ..errors import EmulationError
from ..torch_versions import ACCELERATOR_MODULES
from . import cuda_functions, cuda_tensors, device_module
from .cuda_functions import COMMUNICATION, refusal
from .cuda_tensors import CUDA, to_emulated, translating
from .machine import Machine
from .tensor import EmulatedTensor

_Patches = dict[Any, dict[str, Any]]
"""By object, the attributes that it gets."""


@contextmanager
def named_cuda(machine: Machine) -> Iterator[None]:
    """Give the devices of the current machine the name "cuda" inside a ``with`` block."""
    everything = (
        _tensors(),
        _factories(),
        _cuda_modules(machine),
        _accelerator_modules(),
        _data_parallel(),
        _refused(),
        _without_hardware(machine),
    )
    builtins = torch.jit._builtins._get_builtin_table()  # TorchScript knows functions by their id
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(builtins))
        for patches in everything:
            for target, attributes in patches.items():
                for name, value in attributes.items():
                    if id(getattr(target, name, None)) in builtins:
                        builtins[id(value)] = builtins[id(getattr(target, name))]
                    stack.enter_context(mock.patch.object(target, name, value, create=True))
        stack.callback(torch.set_default_device, default_device.CURRENT_DEVICE)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        yield


def _tensors() -> _Patches:
    nn: Any = torch._C._nn
    return {
        EmulatedTensor: cuda_tensors.EMULATED_TENSOR_METHODS,
        torch.Tensor: cuda_tensors.tensor_methods(),
        nn: {"_parse_to": translating(nn._parse_to, position=0)},
        torch: {
            "Generator": cuda_tensors.Generator,
            "set_default_tensor_type": cuda_tensors.set_default_tensor_type,
        },
        torch.UntypedStorage: {"cuda": cuda_tensors.storage_on_device},
    }


def _factories() -> _Patches:
    """Return torch's factories, and the mode that passes the default device to them."""
    constructors = default_device._device_constructors()
    like = [getattr(torch, name) for name in dir(torch) if name.endswith("_like")]
    identities = {id(function) for function in (*constructors, *like)}

    def pass_default_device(
        self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in constructors and kwargs.get("device") is None:
            kwargs["device"] = to_emulated(self.device)
        return func(*args, **kwargs)

    return {default_device.DeviceContext: {"__torch_function__": pass_default_device}} | {
        module: {
            name: translating(function)
            for name, function in vars(module).items()
            if id(function) in identities
        }
        for module in (torch, torch.fft, torch.nested)
    }


_FUNCTIONS = {
    name: function
    for module in (device_module, cuda_functions)
    for name, function in vars(module).items()
    if hasattr(torch.cuda, name)
    and (getattr(function, "__module__", None) or "").startswith(__package__)
}


def _cuda_modules(machine: Machine) -> _Patches:
    """Return ``torch.cuda`` and its submodules; functions that we lack raise an error."""
    provided = _FUNCTIONS | cuda_tensors.LEGACY_TYPES
    public = {name: getattr(torch.cuda, name) for name in torch.cuda.__all__}
    refused = {
        name: refusal(f"torch.cuda.{name}")
        for name, value in public.items()
        if callable(value) and name not in provided
        if not (inspect.isclass(value) and issubclass(value, BaseException))
    }
    everything = provided | refused
    submodules = (torch.cuda.random, torch.cuda.streams)
    return {
        torch.cuda: {
            **everything,
            "default_generators": tuple(machine.generators),
            "memory_breakdown": device_module.memory_breakdown,
            "_initialized": True,  # else torch.utils.checkpoint saves no states of generators
        },
        torch.cuda.nvtx: dict.fromkeys(("range_push", "range_pop", "mark"), lambda *args: 0),
        **{module: _of(module, everything) for module in submodules},
        torch.cuda.memory: _of(torch.cuda.memory, everything)
        | {name: refusal(f"torch.cuda.memory.{name}") for name in _RECORDS_ALLOCATIONS},
    }


_RECORDS_ALLOCATIONS = ("_record_memory_history", "_snapshot", "_dump_snapshot")


def _accelerator_modules() -> _Patches:
    everything = _FUNCTIONS | {
        "current_accelerator": lambda check_available=False: torch.device(CUDA),
        "current_device_index": device_module.current_device,
        "set_device_index": device_module.set_device,
        "device_index": device_module.device,
        "get_memory_info": device_module.mem_get_info,
        "Graph": refusal("torch.accelerator.Graph"),
    }
    return {module: _of(module, everything) for module in ACCELERATOR_MODULES}


def _of(module: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that a module has."""
    return {name: value for name, value in attributes.items() if name in vars(module)}


def _data_parallel() -> _Patches:
    """Return what ``nn.DataParallel`` calls; builds without CUDA lack it."""

    def scatter(
        ctx: Any, target_gpus: Any, chunk_sizes: Any, dim: int, input: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # torch's own makes devices of ints, which it refuses without an accelerator.
        ctx.dim = dim
        ctx.input_device = input.get_device() if input.is_cuda else -1
        return tuple(cuda_functions.scatter(input, target_gpus, chunk_sizes, dim))

    return {
        torch._C: COMMUNICATION,
        parallel_functions.Scatter: {"forward": staticmethod(scatter)},
        torch.cuda.nccl: {"is_available": lambda tensors: False},
    }


def _refused() -> _Patches:
    """Return functions that need the hardware, which raise an error instead."""
    compile_, init_process_group = torch.compile, torch.distributed.init_process_group

    def compile(model: Any = None, *, backend: Any = "inductor", **kwargs: Any) -> Any:
        if backend == "inductor" and not kwargs.get("disable"):
            raise EmulationError(
                "emulated devices do not support torch.compile with inductor; leave it out, or use "
                "backend='eager'"
            )
        return compile_(model, backend=backend, **kwargs)

    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend is None or "nccl" in backend.lower():
            raise EmulationError(
                f"emulated devices do not support NCCL process groups (backend={backend!r}); use "
                "backend='gloo'"
            )
        init_process_group(backend, *args, **kwargs)

    return {
        torch: {"compile": compile},
        torch.distributed: {"init_process_group": init},
        torch.multiprocessing: {"spawn": refusal("processes that are spawned")},
    }


def _without_hardware(machine: Machine) -> _Patches:
    """Return what torch does otherwise without CUDA, or where gradients are not known."""
    backends: Any = torch.distributed.Backend.default_device_backend_map
    init_scaler = torch.amp.GradScaler.__init__

    def init_without_scaling(self: Any, *args: Any, **kwargs: Any) -> None:
        # A scaler skips the step if a gradient is not finite, which symbolic devices do not know.
        init_scaler(self, *args, **kwargs)
        self._enabled = False

    return {
        torch.distributed.Backend: {"default_device_backend_map": {**backends, CUDA: "gloo"}},
        torch.amp.GradScaler: {"__init__": init_without_scaling} if machine.symbolic else {},
        torch.version: {"cuda": "12.6"},  # for scripts that compare it
        torch.backends.cudnn: {"is_acceptable": lambda tensor: False},
    }
