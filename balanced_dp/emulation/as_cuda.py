"""``emulate_devices(..., as_cuda=True)``: scripts see emulated devices under the name "cuda".

A build of torch without CUDA refuses the device type "cuda". So inside torch, emulated tensors keep
the device type "lazy" (``DEVICE_TYPE``), and device names are translated where Python code calls
torch. Torch's Python functions translate "cuda" in their device arguments to "lazy", emulated
tensors report "cuda" as their device type, and ``torch.cuda`` and ``torch.accelerator`` describe
the emulated devices. Torch's modules and classes are patched, so the translation works in all
threads.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed
import torch.nn.parallel._functions as parallel_functions
import torch.utils._device as default_device

from ..errors import EmulationError
from . import cuda_functions, device_module
from .ledger import Label
from .machine import DEVICE_TYPE, Machine, Patches, current_machine, has_machine
from .tensor import EmulatedTensor

CUDA = "cuda"


_Device = torch.device


def to_emulated(device: Any) -> Any:
    """Return ``device`` with the type "lazy" (``DEVICE_TYPE``) if it is an int or of type "cuda".

    Any other device is returned unchanged, except that a string becomes a ``torch.device``.

    Raises:
        EmulationError: there is no emulated device with the index of ``device``.
    """
    if isinstance(device, str):
        device = _Device(device)
    if isinstance(device, int) or (isinstance(device, _Device) and device.type == CUDA):
        return _Device(DEVICE_TYPE, current_machine().index_of(device))
    return device


def to_named(device: torch.device) -> torch.device:
    """Return ``device`` with the type "cuda" if its type is "lazy", and else unchanged."""
    return _Device(CUDA, device.index) if device.type == DEVICE_TYPE else device


def translating(function: Callable[..., Any], position: int | None = None) -> Callable[..., Any]:
    """Return a wrapper of ``function`` that accepts "cuda" as the name of emulated devices.

    The wrapper translates the keyword argument ``device`` with ``to_emulated``. If ``position`` is
    given, it translates the positional argument at this position, too. The wrapper drops the
    keyword argument ``pin_memory``. If a factory, such as ``torch.empty``, is called without
    ``device``, and the result of ``_default_device`` is not None, the wrapper passes this result as
    ``device``.
    """
    is_factory = function in default_device._device_constructors()

    @functools.wraps(function)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if position is not None and len(args) > position:
            args = (*args[:position], to_emulated(args[position]), *args[position + 1 :])
        if kwargs.get("device") is not None:
            kwargs["device"] = to_emulated(kwargs["device"])
        elif is_factory and (default := _default_device()):
            kwargs["device"] = to_emulated(default)
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return translated


def _default_device() -> str | None:
    """Return "cuda" if ``torch.set_default_tensor_type`` made it the default device, else None.

    If the script also sets a default device in another way, for example by
    ``torch.set_default_device``, that device takes precedence, and the result is None. If no
    ``emulate_devices`` context is open, the result is None, too.
    """
    if not has_machine() or not current_machine().default_device:
        return None
    modes = torch.overrides._get_current_function_mode_stack()
    has_own = any(isinstance(mode, default_device.DeviceContext) for mode in modes)
    return None if has_own else current_machine().default_device


def _stand_in(
    name: str, make: Callable[..., Any], is_instance: Callable[[Any], bool], **attributes: Any
) -> Any:
    """Return a class that replaces one of torch's classes, such as ``torch.device``.

    Calling the class returns the result of ``make``, which is an object of another class.
    ``isinstance(x, stand_in)`` returns ``is_instance(x)``. ``attributes`` become attributes of the
    class.
    """
    special = {
        "__call__": lambda cls, *args, **kwargs: make(*args, **kwargs),
        "__instancecheck__": lambda cls, instance: is_instance(instance),
    }
    return type("StandIn", (type,), special)(name, (), {"__module__": "torch", **attributes})


device = _stand_in(
    "device",
    lambda *args, **kwargs: (
        _Device(CUDA, *args) if args and isinstance(args[0], int) else _Device(*args, **kwargs)
    ),
    lambda instance: isinstance(instance, _Device),
)
"""A replacement of ``torch.device`` that accepts an int as the index of an emulated device."""


# Tensors.

# ``Tensor.device`` is a property, but torch's stubs declare a plain attribute.
_device_of_tensor: Any = vars(torch._C.TensorBase)["device"]


@functools.wraps(torch._C.TensorBase.__new__)  # dynamo checks the signature at import
def _new_tensor(cls: Any, *args: Any, **kwargs: Any) -> Any:
    default = current_machine().default_device
    if default and cls is torch.Tensor and not kwargs:
        return legacy_tensor(torch.get_default_dtype(), default, args)
    return torch._C.TensorBase.__new__(cls, *args, **kwargs)


def _cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    return self.to(CUDA if device is None else device, non_blocking=non_blocking, **kwargs)


def _type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    if dtype is None:
        # Torch has no type name for sparse "lazy" tensors, so get the name from a CPU tensor.
        alike = torch.empty(0, dtype=self.dtype, layout=self.layout, device="cpu")
        name: str = torch._C.TensorBase.type(alike)
        return name.replace("torch.", f"torch.{CUDA}.", 1) if self.is_cuda else name
    if isinstance(dtype, str):
        dtype = pkgutil.resolve_name(dtype)
    if dtype in LEGACY_TYPES.values():
        return self.to(CUDA, dtype.dtype, non_blocking)
    return torch._C.TensorBase.type(self, dtype, non_blocking)


def _new(self: torch.Tensor, *args: Any) -> torch.Tensor:
    if self.is_sparse:  # SparseAdam makes a sparse tensor from indices and values
        return torch.sparse_coo_tensor(*args, dtype=self.dtype, device=self.device)
    return legacy_tensor(self.dtype, self.device, args)


# torch.cuda.FloatTensor and similar types are deprecated, but scripts still call them.


def _legacy_type(name: str) -> Any:
    dtype = getattr(torch, name).dtype
    return _stand_in(
        name,
        lambda *args: legacy_tensor(dtype, CUDA, args),
        lambda x: isinstance(x, torch.Tensor) and x.is_cuda and x.dtype == dtype,
        dtype=dtype,
        is_cuda=True,
    )


def legacy_tensor(dtype: torch.dtype, device: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """Create a tensor as ``torch.FloatTensor(*args)`` does, but with ``dtype`` and on ``device``.

    ``args`` are either the sizes of the tensor or its data. If they are the sizes, the values of
    the tensor are not initialized.
    """
    if len(args) == 1 and not isinstance(args[0], int | torch.Size):
        return torch.as_tensor(args[0], dtype=dtype).to(device)
    return torch.empty(*args or (0,), dtype=dtype, device=device)


LEGACY_TYPES = {name: _legacy_type(name) for name in torch.cuda.__all__ if name.endswith("Tensor")}


def set_default_tensor_type(kind: Any) -> None:
    """Set the default dtype and device, in all threads, to those of the tensor type ``kind``.

    ``kind`` is a tensor type, such as ``torch.cuda.FloatTensor``, or its name.
    """
    if isinstance(kind, str):
        kind = pkgutil.resolve_name(kind)
    torch.set_default_dtype(kind.dtype)
    current_machine().default_device = CUDA if kind.is_cuda else None


class Generator(torch.Generator):
    """A random number generator whose ``device`` can be any device, including emulated devices.

    The generator computes on the CPU, as emulated devices do.
    """

    def __new__(cls, device: Any = "cpu") -> Any:
        """Return a generator whose attribute ``device`` is ``device``."""
        generator: Any = super().__new__(cls)
        generator._device = to_named(torch.device(to_emulated(device)))
        return generator

    # Torch's stubs declare ``device`` as a plain attribute.
    device = property(lambda self: self._device)


# To load a tensor, torch first loads its storage. Then torch creates an empty tensor on the device
# of the storage, and makes the tensor use the storage.


class StorageOnDevice(torch.UntypedStorage):
    """A CPU storage whose attribute ``device`` is an emulated device.

    When torch loads a tensor with this storage, it creates the tensor on the emulated device.
    """

    _device: torch.device
    device: Any = property(lambda self: self._device)


def storage_on_device(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    """Return a copy of the storage ``self`` as a ``StorageOnDevice``.

    ``device`` is the emulated device of the copy; None means the current device.
    """
    machine = current_machine()
    index = machine.index_of(device)
    moved = self.clone()
    moved.__class__ = StorageOnDevice
    moved._device = machine.devices[index]
    machine.enter(index, moved, Label.OTHER)
    return moved


def location_of(storage: torch.UntypedStorage) -> str | None:
    """Return the location of the storage of an emulated tensor, or None for other storages.

    ``torch.save`` calls this function and writes the location into the file. If emulated devices
    are named "cuda", the location is the device, such as "cuda:0". If they are named "lazy", the
    location is "cpu", so that the file can be loaded on any machine.
    """
    machine, allocation = current_machine(), getattr(storage, "_allocation", None)
    if allocation is None:
        return None
    if machine.device_type != CUDA:
        return "cpu"
    return f"{CUDA}:{machine.ledgers.index(allocation.ledger)}"


def restore(storage: Any, location: str) -> Any:
    """Return a copy of ``storage`` on the emulated device ``location``, such as "cuda:0".

    Return None if the device type in ``location`` is not that of the emulated devices.
    ``torch.load`` calls this function.

    Raises:
        EmulationError: there is no emulated device with the index in ``location``.
    """
    is_emulated = location.split(":")[0] == current_machine().device_type
    return storage_on_device(storage, location) if is_emulated else None


# The patches.


def patches_of_names(machine: Machine) -> list[Patches]:
    """Return patches (changes to torch) that give the devices of ``machine`` the name "cuda"."""
    return [_tensors(), _factories(), _cuda_modules(machine), _without_hardware(machine)]


def _tensors() -> Patches:
    """Return patches of tensor methods, ``torch.device``, ``torch.Generator`` and storages."""
    base, nn = torch._C.TensorBase, cast(Any, torch._C._nn)
    new = [name for name in vars(base) if name.startswith("new_")]
    return {
        EmulatedTensor: {
            "__module__": "torch",  # tensorboardX looks for "torch" in str(type(tensor))
            "device": property(lambda self: to_named(_device_of_tensor.__get__(self))),
            "is_cuda": property(lambda self: True),
            "record_stream": lambda self, stream: None,
            "new": _new,
        },
        torch.Tensor: {
            "__new__": _new_tensor,
            **{name: translating(getattr(base, name)) for name in new},
            "to": translating(base.to, position=1),
            "cuda": _cuda,
            "type": _type,
            "pin_memory": lambda self, device=None: self,
        },
        nn: {"_parse_to": translating(nn._parse_to, position=0)},
        torch: {"device": device, "Generator": Generator},
        torch.UntypedStorage: {"cuda": storage_on_device},
    }


def _factories() -> Patches:
    """Return patches of torch's functions that take a device or concern the default device."""
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
        "set_default_tensor_type": set_default_tensor_type,
    }
    init = default_device.DeviceContext.__init__
    return patches | {default_device.DeviceContext: {"__init__": translating(init, position=1)}}


def _takes_device(name: str) -> bool:
    """Return whether torch's operator ``name`` has an argument ``device``."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return any(argument.name == "device" for schema in schemas for argument in schema.arguments)


def _cuda_modules(machine: Machine) -> Patches:
    """Return patches by which ``torch.cuda`` and ``torch.accelerator`` use emulated devices."""
    streams = {"Stream": cuda_functions.Stream, "Event": cuda_functions.Event}
    exchange = cuda_functions.exchange_device
    return {
        torch._C: cuda_functions.ANSWERS,
        torch.cuda: {
            **(streams | LEGACY_TYPES),
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
    """Return patches by which torch works without a GPU: they turn off cuDNN, for example.

    In symbolic mode, they also turn off ``GradScaler``, which reads the values of gradients.
    """
    backends: Any = torch.distributed.Backend.default_device_backend_map
    never = property(lambda self: None, lambda self, value: None)
    return {
        torch.multiprocessing: {"spawn": _refuse_to_spawn},
        torch.distributed.Backend: {"default_device_backend_map": {**backends, CUDA: "gloo"}},
        # A scaler skips the step if a gradient is not finite, and symbolic gradients have shapes
        # but no values.
        torch.amp.GradScaler: {"_enabled": never} if machine.symbolic else {},
        # If the profiler used the device "cuda", each operator would print that it failed to record
        # an event.
        torch.profiler.profiler._KinetoProfile: {"use_device": never},
        # Scripts parse torch's CUDA version, which is None in a build without CUDA. A build with
        # CUDA keeps the real version: torchvision compares it with the CUDA version that
        # torchvision was built with.
        torch.version: {"cuda": torch.version.cuda or "12.6"},
        torch.backends.cudnn: {"is_acceptable": lambda tensor: False},
        # nn.MultiheadAttention and nn.TransformerEncoder must not use their fast path: its kernels
        # hide the memory of intermediate results, and it converts padded batches to nested tensors.
        torch.backends.mha: {"get_fastpath_enabled": lambda: False},
    }


def _refuse_to_spawn(*args: Any, **kwargs: Any) -> None:
    raise EmulationError("spawned processes cannot use emulated devices; use one process")
