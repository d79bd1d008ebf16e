"""Copies of a module, one for each device, whose gradients flow back to the original."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from .scatter_gather import move

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def replicate(network: ModuleT, devices: Sequence[torch.device]) -> list[ModuleT]:
    """Returns one replica of ``network`` for each device.

    As ``torch.nn.parallel.replicate``, with these differences: a replica's ``parameters()`` are
    its copies; replicas on one device share them, and on the network's own device they are the
    parameters themselves; methods that are hooks or stored in an instance (its own ``forward``,
    say) are bound to the replica; and a parameter that was not used gets no gradient rather than
    zeros.

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
            {b: move(b, device, copy=index > 0) for b in network.buffers()},
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
        return move(tensor, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        """Returns the gradient on the tensor's own device."""
        return None if grad is None else grad.to(ctx.device), None


class WrittenState:
    """Buffers and frozen parameters of a replica, as they were before it ran.

    Where the replica is on the network's device it shares them. Where the network's device runs
    nothing, what the first replica writes to its copies is to be kept all the same.
    """

    def __init__(self, network: nn.Module, replica: nn.Module) -> None:
        def state(module: nn.Module) -> Iterator[torch.Tensor]:
            return chain(module.buffers(), module.parameters())

        self._copies = [
            (original, copy, _version(copy))
            for original, copy in zip(state(network), state(replica), strict=True)
            if copy is not original
            and not (isinstance(original, nn.Parameter) and original.requires_grad)
        ]

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies to the network what was written since."""
        for original, copy, version in self._copies:
            if version is None or version != _version(copy):
                original.copy_(copy)
            elif not isinstance(original, nn.Parameter) and not _is_expanded(original):
                # Batch norm's kernels write statistics without a new version, so a buffer may be
                # new all the same; to autograd it is not, here as there.
                original.data.copy_(copy)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


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
    references = {module: weakref.ref(copy) for module, copy in copies.items()}
    for module, copy in copies.items():
        # Into the dictionaries: Module.__setattr__ takes nothing but an nn.Parameter for one.
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            copy._parameters[name] = None if parameter is None else parameters[parameter]
        for name, buffer in module._buffers.items():
            copy._buffers[name] = None if buffer is None else buffers[buffer]
        _bind_methods(module, copy, references)
        _bind_hooks(copy, references)
    return copies[modules[0]]


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# The replicas of modules. A strong reference from within a replica would make a cycle, and the
# replica's memory would wait for the garbage collector.
_References = Mapping[nn.Module, "weakref.ref[nn.Module]"]


def _bind_methods(module: nn.Module, copy: nn.Module, references: _References) -> None:
    """Binds to the replica what the module keeps in its own dictionary and was bound to modules."""
    bound: dict[str, Any] = {
        name: _Rebound(value, references)
        for name, value in module.__dict__.items()
        if _is_bound(value, references)
    }
    if not bound:
        return
    for name in bound:
        del copy.__dict__[name]
    kind = type(copy)
    bound |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    copy.__class__ = types.new_class(kind.__name__, (kind,), exec_body=lambda ns: ns.update(bound))


def _bind_hooks(copy: nn.Module, references: _References) -> None:
    for name in _HOOKS:
        hooks = copy.__dict__[name]
        if any(_is_bound(hook, references) for hook in hooks.values()):
            copy.__dict__[name] = OrderedDict(
                (key, _Rebound(hook, references) if _is_bound(hook, references) else hook)
                for key, hook in hooks.items()
            )


def _is_bound(value: Any, references: _References) -> bool:
    """Returns whether a method or partial holds a module that has a replica."""
    if isinstance(value, types.MethodType):
        inner: Sequence[Any] = (value.__self__,)
    elif isinstance(value, functools.partial):
        inner = (value.func, *value.args, *value.keywords.values())
    else:
        return False
    return any(
        (isinstance(item, nn.Module) and item in references) or _is_bound(item, references)
        for item in inner
    )


class _Rebound:
    """A method or partial in which every module is replaced by its replica, when it is needed.

    As an attribute of a class it gives just that; itself it is called like it.
    """

    def __init__(self, value: Any, references: _References) -> None:
        self.value = value
        self.references = references

    def __get__(self, instance: object, owner: type) -> Any:
        return self._rebound(self.value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._rebound(self.value)(*args, **kwargs)

    def _rebound(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            reference = self.references.get(value)
            replica = None if reference is None else reference()
            return value if replica is None else replica
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._rebound(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(
                self._rebound(value.func),
                *map(self._rebound, value.args),
                **{name: self._rebound(argument) for name, argument in value.keywords.items()},
            )
        return value
