"""A replica of a module: a shallow copy that has tensors of its own."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .copies import Arrivals, ArrivingParameters

MEMBERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes in which a module stores what is registered; each replica has its own."""

_CARRIERS = (types.MethodType, functools.partial)
"""Attributes that may hold modules, and must hold their copies in a replica: hooks and ``forward``.
"""


class Blueprint:
    """The parts of a module that replicas copy.

    Args:
        network: the module.

    Attributes:
        names, modules: its submodules, each once, with itself as the first.
        parameters, buffers: its tensors, each once, in the order of registration: neighbors are
            used together.
        tensors: both by name.
        bound: the values that may be bound to modules: the index of a module, the attribute with
            its hooks or "" for the module's own attributes, the key, and the value.
        has_compiled: whether a module is the result of ``torch.compile``.

    Raises:
        RuntimeError: a submodule is scripted or compiled in place.
    """

    def __init__(self, network: nn.Module) -> None:
        self.names, self.modules = map(list, zip(*network.named_modules(), strict=True))
        for module in self.modules:
            _check_replicable(module)
        # Whatever parameters() of a class leaves out.
        parameters = dict(nn.Module.named_parameters(network))
        buffers = dict(nn.Module.named_buffers(network))
        self.parameters: list[torch.Tensor] = [*parameters.values()]
        self.buffers = [*buffers.values()]
        self.tensors: dict[str, torch.Tensor] = {**parameters, **buffers}
        self.bound = [
            (index, kind, key, value)
            for index, module in enumerate(self.modules)
            for kind in ("", *HOOKS)
            for key, value in (module.__dict__[kind] if kind else module.__dict__).items()
            if isinstance(value, _CARRIERS)
        ]
        self.has_compiled = any("_orig_mod" in module._modules for module in self.modules)


class Replica:
    """Shallow copies of the modules of a network.

    A method in the dictionary of its module makes a cycle, and the memory of the replica would wait
    for the garbage collector. So its place is taken in the end by one that is bound when it is
    called, for those who keep the module.

    Args:
        blueprint: the blueprint of the network.
        tensors: a copy of each tensor, which may still be on its way.
        device: their device.
        arrivals: the events to wait for before a parameter is used.

    Attributes:
        modules: the copies of its modules; the first is the copy of the network itself.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        arrivals: Arrivals,
    ) -> None:
        self._bound: list[tuple[dict[Any, Any], Any, Any]] = []
        self._arriving: list[dict[str, Any]] = []
        self.modules: list[Any] = [*map(_shallow_copy, blueprint.modules)]
        pairs = list(zip(blueprint.modules, self.modules, strict=True))
        modules = weakref.WeakValueDictionary(pairs)
        for index, kind, key, value in blueprint.bound:
            own = vars(self.modules[index])[kind] if kind else vars(self.modules[index])
            own[key] = _bind(value, modules)
            self._bound.append((own, key, functools.partial(_call_bound, value, modules)))
        copies: dict[int, Any] = {id(original): copy for original, copy in pairs}
        copies |= zip(map(id, blueprint.tensors.values()), tensors, strict=True)
        events = arrivals.events(device)
        for original, copy in pairs:
            own = vars(copy)
            for kind in MEMBERS:
                members = vars(original)[kind].items()
                own[kind] = {name: copies.get(id(value), value) for name, value in members}
            if plain := own["_parameters"]:
                own["register_parameter"] = functools.partial(_register_parameter, plain)
            if awaited := [events[id(p)] for p in plain.values() if id(p) in events]:
                own["_parameters"] = ArrivingParameters(plain, device, awaited)
                self._arriving.append(own)
            if "_orig_mod" in own["_modules"]:
                copy._initialize()  # binds its forward to the copy
            if isinstance(copy, nn.RNNBase):
                # Or flatten_parameters() in forward would be that of the original. A weight that
                # forward computes, as in DropConnect, is not there yet.
                copy._flat_weights = [getattr(copy, n, None) for n in copy._flat_weights_names]

    def __del__(self) -> None:
        for own, key, weak in self._bound:
            own[key] = weak

    def stop_waiting(self) -> None:
        """Replace parameters that wait for their arrival by plain dictionaries."""
        while self._arriving:
            own = self._arriving.pop()
            own["_parameters"] = own["_parameters"].data


_DEFAULTS = [kind._replicate_for_data_parallel for kind in (nn.Module, nn.RNNBase)]
"""RNNs override it to get flat weights of their own, which ``Replica`` gives them."""


def _shallow_copy(module: nn.Module) -> nn.Module:
    copy: nn.Module
    if type(module)._replicate_for_data_parallel not in _DEFAULTS:
        copy = module._replicate_for_data_parallel()
    else:
        copy = object.__new__(type(module))  # its own __new__ may need arguments
        copy.__dict__.update(module.__dict__)
        copy.__dict__["_is_replica"] = True
    own = copy.__dict__
    for kind in HOOKS:
        own[kind] = own[kind].copy()
    if type(module).zero_grad is nn.Module.zero_grad:
        own["zero_grad"] = _OF_REPLICAS.zero_grad
    return copy


def _register_parameter(parameters: dict[str, Any], name: str, param: Any) -> None:
    """Register members that torch would refuse, because the copies in a replica are not leaves."""
    parameters[name] = param


_OF_REPLICAS = nn.Module()
"""Marked as a replica, and without parameters, as those of ``nn.DataParallel``: ``zero_grad`` only
warns.
"""
_OF_REPLICAS.__dict__["_is_replica"] = True


def _bind(value: Any, copies: Mapping[Any, Any]) -> Any:
    """Return the copy of a module, a method or partial bound to copies, or else the value."""
    if isinstance(value, functools.partial):
        function, *args = (_bind(part, copies) for part in (value.func, *value.args))
        keywords = {name: _bind(part, copies) for name, part in value.keywords.items()}
        return functools.partial(function, *args, **keywords)
    if isinstance(value, types.MethodType):
        owner = _bind(value.__self__, copies)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    return copies.get(value, value) if isinstance(value, nn.Module) else value


def _call_bound(value: Any, copies: Mapping[Any, Any], *args: Any, **kwargs: Any) -> Any:
    return _bind(value, copies)(*args, **kwargs)


def _check_replicable(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        raise RuntimeError(
            f"a {type(module).__name__} that was compiled in place or scripted cannot be "
            "replicated, because its code is bound to the original; wrap "
            "torch.compile(module), or the Python module"
        )
