"""Copies of a module, one for each device, whose gradients flow back to the original."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def replicate(network: ModuleT, devices: Sequence[torch.device]) -> list[ModuleT]:
    """Returns one replica of ``network`` for each device.

    As ``torch.nn.parallel.replicate``, with these differences: a replica's ``parameters()`` are
    its copies; replicas on one device share them, and on the network's own device they are the
    parameters themselves; methods stored in an instance (its own ``forward``, say) are bound to
    the replica; and a parameter that was not used gets no gradient rather than zeros.

    Parameters are copied differentiably, so backward adds each replica's gradient to the
    parameter's as soon as it is there. The first replica shares the buffers that are on its
    device, so that in-place updates are kept; every other replica has copies of its own.

    Args:
        network: the module; its parameters and buffers are on one device.
        devices: where the replicas go; of any type, and a device may repeat.

    Raises:
        RuntimeError: ``network`` holds lazy modules, scripted ones or compiled ones.
    """
    modules = list(network.modules())
    for module in modules:
        _check_replicable(module)
    parameters = {
        device: {p: _on_device(p, device) for p in network.parameters()}
        for device in dict.fromkeys(devices)
    }
    return [
        _replica(
            modules,
            parameters[device],
            {b: b.to(device, non_blocking=True, copy=index > 0) for b in network.buffers()},
        )
        for index, device in enumerate(devices)
    ]


def _on_device(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    if parameter.device == device:
        return parameter
    copy: torch.Tensor = CopyTo.apply(parameter, device)  # type: ignore[no-untyped-call]
    return copy


class CopyTo(torch.autograd.Function):
    """``Tensor.to(device)`` whose gradient may be sparse, which that of ``to`` may not."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a copy on ``device``."""
        ctx.device = tensor.device
        ctx.set_materialize_grads(False)  # what was not used gets no gradient
        return tensor.to(device, non_blocking=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        """Returns the gradient on the tensor's own device."""
        return None if grad is None else grad.to(ctx.device), None


def _check_replicable(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError(
            f"{type(module).__name__} is a torch.jit.ScriptModule, which cannot be replicated; "
            "wrap the Python module instead"
        )
    if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
        raise RuntimeError(
            f"a compiled {type(module).__name__} cannot be replicated, because the compiled code "
            "is bound to the original's parameters; wrap the module before torch.compile saw it, "
            "or use torch.nn.parallel.DistributedDataParallel"
        )


def _replica(
    modules: Sequence[nn.Module],
    parameters: Mapping[nn.Parameter, torch.Tensor],
    buffers: Mapping[torch.Tensor, torch.Tensor],
) -> Any:
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, copy in copies.items():
        # Into the dictionaries: Module.__setattr__ takes nothing but an nn.Parameter for one.
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            copy._parameters[name] = None if parameter is None else parameters[parameter]
        for name, buffer in module._buffers.items():
            copy._buffers[name] = None if buffer is None else buffers[buffer]
        for name, value in module.__dict__.items():
            if isinstance(value, types.MethodType | functools.partial):
                copy.__dict__[name] = _rebound(value, copies)
    return copies[modules[0]]


def _rebound(value: Any, copies: Mapping[nn.Module, nn.Module]) -> Any:
    """Returns a method or partial with every module in it replaced by its replica."""
    if isinstance(value, nn.Module):
        return copies.get(value, value)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _rebound(value.__self__, copies))
    if isinstance(value, functools.partial):
        return functools.partial(
            _rebound(value.func, copies),
            *(_rebound(argument, copies) for argument in value.args),
            **{name: _rebound(argument, copies) for name, argument in value.keywords.items()},
        )
    return value
