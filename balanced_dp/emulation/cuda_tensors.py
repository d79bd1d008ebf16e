"""Tensors, storages and generators of emulated devices that are named "cuda".

Below, they are on ``DEVICE_TYPE``: methods that take a device translate it, and what reports one
translates it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .machine import DEVICE_TYPE, current_machine

CUDA = "cuda"


def to_emulated(device: Any) -> Any:
    """Return the emulated device that ``device`` names; return it as it is if it names none.

    Raises:
        EmulationError: the device does not exist.
    """
    is_name = isinstance(device, str) and device.split(":")[0] == CUDA
    is_device = isinstance(device, torch.device) and device.type == CUDA
    if is_name or is_device or isinstance(device, int):
        return torch.device(DEVICE_TYPE, current_machine().index_of(device))
    return device


def to_named(device: torch.device) -> torch.device:
    """Return the name of an emulated device; return any other device as it is."""
    return torch.device(CUDA, device.index) if device.type == DEVICE_TYPE else device


def translating(function: Callable[..., Any], position: int | None = None) -> Callable[..., Any]:
    """Return ``function`` with its device translated, and with ``pin_memory`` emulated.

    The device is the keyword ``device`` or, if it is given, the argument at ``position``.
    """

    @functools.wraps(function)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if position is not None and len(args) > position:
            args = (*args[:position], to_emulated(args[position]), *args[position + 1 :])
        if "device" in kwargs:
            kwargs["device"] = to_emulated(kwargs["device"])
        is_pinned = kwargs.pop("pin_memory", False)
        result = function(*args, **kwargs)
        return result.pin_memory() if is_pinned and not result.is_cuda else result

    return translated


# Tensors.

# A property, of which torch's stubs know no more than that it is an attribute.
_device_of_tensor: Any = vars(torch._C.TensorBase)["device"]


def tensor_methods() -> dict[str, Any]:
    """Return methods for all tensors: those that take a device or name CUDA."""
    base = torch._C.TensorBase
    new = [name for name in vars(base) if name.startswith("new_")]
    return {
        **{name: translating(getattr(base, name)) for name in new},
        "_make_wrapper_subclass": staticmethod(translating(base._make_wrapper_subclass)),
        "to": translating(base.to, position=1),
        "cuda": _cuda,
        "type": _type,
        "pin_memory": _pin_memory,
        "is_pinned": lambda self, device=None: getattr(self, "_is_pinned", False),
    }


EMULATED_TENSOR_METHODS = {
    "device": property(lambda self: to_named(_device_of_tensor.__get__(self))),
    "is_cuda": property(lambda self: True),
    "record_stream": lambda self, stream: None,
    "new": lambda self, *args, **kwargs: _new(self, args),
}
"""Methods for emulated tensors."""


def _cuda(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    target = CUDA if device is None else device
    return self.to(target, non_blocking=non_blocking, memory_format=memory_format)


def _pin_memory(self: Any, device: Any = None) -> Any:
    if self.is_cuda:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
    if self.is_pinned():
        return self
    pinned = self.clone()
    pinned._is_pinned = True
    return pinned


def _type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    if dtype is None:
        if not self.is_cuda:
            return torch._C.TensorBase.type(self)
        # Torch has no name for sparse tensors on DEVICE_TYPE.
        alike = torch.empty(0, dtype=self.dtype, layout=self.layout, device="cpu")
        name: str = torch._C.TensorBase.type(alike)
        return name.replace("torch.", f"torch.{CUDA}.", 1)
    if isinstance(dtype, str) and dtype.startswith(f"torch.{CUDA}."):
        dtype = LEGACY_TYPES[dtype.rpartition(".")[2]]
    if isinstance(dtype, _LegacyType):
        return self.to(CUDA, dtype.dtype, non_blocking)
    return torch._C.TensorBase.type(self, dtype, non_blocking)


def _new(self: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    if self.is_sparse:
        return torch.sparse_coo_tensor(*args, dtype=self.dtype, device=self.device)
    return _legacy_tensor(self.dtype, self.device, args)


# torch.cuda.FloatTensor and the like: deprecated, and still called by scripts.


class _LegacyType(type):
    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        if not isinstance(instance, torch.Tensor):
            return False
        return instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        return _legacy_tensor(cls.dtype, CUDA, args)


def _legacy_tensor(dtype: torch.dtype, device: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """Return a tensor with the sizes or with the data that are given."""
    if all(isinstance(arg, int) for arg in args):
        return torch.empty(args or (0,), dtype=dtype, device=device)
    [data] = args
    if isinstance(data, torch.Size):
        return torch.empty(data, dtype=dtype, device=device)
    return torch.as_tensor(data, dtype=dtype).to(device)


LEGACY_TYPES = {
    name: _LegacyType(name, (), {"dtype": getattr(torch, name).dtype})
    for name in torch.cuda.__all__
    if name.endswith("Tensor")
}


def set_default_tensor_type(kind: Any) -> None:
    """Set the default dtype and device to those of a type, or of its name."""
    if isinstance(kind, str):
        kind = functools.reduce(getattr, kind.split(".")[1:], torch)
    torch.set_default_dtype(kind.dtype)
    torch.set_default_device(CUDA if isinstance(kind, _LegacyType) else None)


# Generators.

# torch's class, as the context patches its name. Being Any, it is no base class to mypy.
_TorchGenerator: Any = torch.Generator


class _GeneratorType(type(_TorchGenerator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TorchGenerator)


class Generator(_TorchGenerator, metaclass=_GeneratorType):  # type: ignore[misc]
    """A ``torch.Generator`` of any device; as emulated devices, it computes on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """Return a new generator."""
        generator = super().__new__(cls)
        generator._device = to_named(torch.device(to_emulated(device)))
        return generator

    device = property(lambda self: self._device)


# Torch makes a tensor that it loads on the device of its storage, then sets the storage.


class StorageOnDevice(torch.UntypedStorage):
    """A CPU storage that has torch make its tensor on an emulated device."""

    _device: torch.device
    device: Any = property(lambda self: self._device)


def storage_on_device(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    """Return a copy of a storage from which torch makes tensors on an emulated device."""
    machine = current_machine()
    moved = self.clone()
    moved.__class__ = StorageOnDevice
    moved._device = machine.devices[machine.index_of(device)]
    return moved


def location_of(storage: torch.UntypedStorage) -> str | None:
    """Return where a file says that a storage was, or None if it is on no emulated device.

    That is its device if it is named "cuda", and else the CPU, so that the file loads anywhere.
    """
    allocation = getattr(storage, "_allocation", None)
    if allocation is None:
        return None
    machine = current_machine()
    device = machine.devices[machine.ledgers.index(allocation.ledger)]
    return str(device) if device.type == CUDA else "cpu"


def restore(storage: Any, location: str) -> Any:
    """Return the storage for a tensor on ``location``, or None if that is no emulated device."""
    is_emulated = location.split(":")[0] == current_machine().device_type
    return storage_on_device(storage, location) if is_emulated else None
