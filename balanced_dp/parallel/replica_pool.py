"""Replicas of a module without their tensors, recycled from one call to the next.

Making a replica takes Python work for each submodule, parameter and buffer, and most of it gives
the same result in each call. So a ``ReplicaPool`` keeps replicas that have run, as long as the
module holds what it held when they were made. A replica is recycled only if nobody else refers to
its modules.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import nn

from .bound_methods import DICTIONARIES
from .replica import Replica, is_compiled


class ReplicaPool:
    """The replicas of a module that wait for the next call.

    Args:
        network: the module.

    Attributes:
        parameters: the parameters of the module, each once.
        buffers: the buffers of the module, each once.
        is_compiled: whether a submodule is what ``torch.compile`` returns.
        num_calls: how many calls have taken replicas.

    Raises:
        RuntimeError: a submodule is scripted or compiled in place.
    """

    def __init__(self, network: nn.Module) -> None:
        self._modules = list(network.modules())
        for module in self._modules:
            _check_replicable(module)
        self.parameters = self._members("_parameters")
        self.buffers = self._members("_buffers")
        self.is_compiled = any(map(is_compiled, self._modules))
        self.num_calls = 0
        self._contents = _contents(self._modules)
        self._waiting: list[Replica] = []

    def _members(self, kind: str) -> list[torch.Tensor]:
        """Return what the modules hold of a kind, as registered: neighbors are used together."""
        values = chain.from_iterable(module.__dict__[kind].values() for module in self._modules)
        return list({id(value): value for value in values if value is not None}.values())

    def is_of(self, network: nn.Module) -> bool:
        """Return whether ``network`` is the module, and its attributes have not changed."""
        *before, values_before = self._contents
        *now, values_now = _contents(self._modules)
        is_same = self._modules[0] is network and before == now
        return is_same and all(map(operator.is_, values_before, values_now))

    def take(self) -> Replica:
        """Return a replica that waited, or else a new one. ``begin`` gives it its tensors."""
        try:
            return self._waiting.pop()
        except IndexError:  # none waits, or another thread has just taken the last one
            return Replica(self._modules, self.parameters, self.buffers)

    def recycle(self, replica: Replica) -> None:
        """Keep a replica for another call, unless it has changed or somebody else refers to it."""
        if replica.end():
            self._waiting.append(replica)


def _contents(
    modules: Sequence[nn.Module],
) -> tuple[list[type], list[int], list[str], list[Any]]:
    """Return the contents of modules: their types, and the sizes, keys and values of dictionaries.

    Compare the values by identity, since not all of them support equality.
    """
    own = [module.__dict__ for module in modules]
    registered = chain.from_iterable(map(operator.itemgetter(*DICTIONARIES), own))
    dictionaries = [*own, *registered]
    sizes = list(map(len, dictionaries))
    filled = list(compress(dictionaries, sizes))
    return (
        list(map(type, modules)),
        sizes,
        list(chain.from_iterable(filled)),
        # gc.get_referents takes half the time, but from Python 3.13 on it finds nothing in the
        # __dict__ of an object whose values are stored in the object.
        list(chain.from_iterable(map(dict.values, filled))),
    )


def _check_replicable(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError(
            f"{type(module).__name__} is a torch.jit.ScriptModule, which cannot be replicated; "
            "wrap the Python module instead"
        )
    if module._compiled_call_impl is not None:
        raise RuntimeError(
            f"a {type(module).__name__} that was compiled in place cannot be replicated, because "
            "the compiled code is bound to the original; wrap what torch.compile(module) returns"
        )
