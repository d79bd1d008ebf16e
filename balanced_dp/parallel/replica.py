"""A replica of a module, and whether it may be used again."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import warn
from ..free_threading import is_free_threaded_build
from .arrivals import Arrivals, ArrivingParameters
from .bound_methods import DICTIONARIES, HOOKS, bind_to_replicas

_OF_ANY_MODULE = vars(nn.Module()).keys() - {"training"}
"""Attributes that a forward pass does not assign, although it may change their contents."""


class Replica:
    """A replica of a module.

    Args:
        originals: the submodules of the module, each once.
        parameters: their parameters, each once.
        buffers: their buffers, each once.

    Attributes:
        modules: the copies, in the order of ``originals``; the first is that of the module itself.
    """

    def __init__(
        self,
        originals: Sequence[nn.Module],
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        self.modules: list[Any] = list(map(_shallow_copy, originals))
        self._attributes = [copy.__dict__ for copy in self.modules]
        self._register_children(originals)
        has_bound = bind_to_replicas(originals, self.modules)
        # These keep what end() does not reset.
        self._is_for_one_call = has_bound or any(map(_replicates_itself, originals))
        self._parameters = self._places("_parameters", originals, parameters)
        self._buffers = self._places("_buffers", originals, buffers)
        self._arriving: list[dict[str, Any]] = []
        self._rnns = [module for module in self.modules if isinstance(module, nn.RNNBase)]
        self._watch()
        self._thread = threading.get_ident()
        # sys.getrefcount counts local variables, so none may hold a module. The fingerprint holds
        # references itself, so the second one is what a call must leave.
        self._fingerprint = self._take_fingerprint()
        self._fingerprint = self._take_fingerprint()

    def _register_children(self, originals: Sequence[nn.Module]) -> None:
        for members, name, position in self._places("_modules", originals, originals):
            members[name] = self.modules[position]
        for module in filter(is_compiled, self.modules):
            module._initialize()  # binds its forward to the replica

    def _places(
        self, kind: str, originals: Sequence[nn.Module], values: Sequence[Any]
    ) -> list[tuple[dict[str, Any], str, int]]:
        """Return the dictionary, name and position in ``values`` of each member of the modules.

        ``Module.__setattr__`` would find the dictionary itself, but registers as a parameter
        nothing but an ``nn.Parameter``.

        Args:
            kind: the attribute of a module in which they are registered.
            originals: the modules that hold ``values``.
            values: all members of this kind.
        """
        positions = {id(value): position for position, value in enumerate(values)}
        return [
            (own[kind], name, positions[id(value)])
            for original, own in zip(originals, self._attributes, strict=True)
            for name, value in original.__dict__[kind].items()
            if value is not None
        ]

    def _watch(self) -> None:
        """Note what a call must not change, and what is reset after it."""
        attributes = self._attributes
        tensors = [own[kind] for own in attributes for kind in ("_parameters", "_buffers")]
        children = [own["_modules"] for own in attributes]
        hooks = [own[kind] for own in attributes for kind in HOOKS]
        self._without_hooks = [own for own in hooks if not own]  # must stay empty
        self._constant = [*children, *filter(None, hooks)]  # must keep their values
        self._named = list(filter(None, [*tensors, *self._constant]))  # must keep their keys
        self._counted = [*attributes, *tensors, *children]  # nobody else may refer to them
        self._reset = [*attributes, *tensors]  # are as made before each call
        self._as_made = [*map(dict.copy, attributes), *map(dict.fromkeys, tensors)]
        self._num_members = list(map(len, self._reset))
        # What a call may have changed without adding members. It is little, so the reset is fast.
        values = [{k: v for k, v in d.items() if k not in _OF_ANY_MODULE} for d in self._as_made]
        self._changeable = list(compress(self._reset, values))
        self._values = list(filter(None, values))

    def begin(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        device: torch.device,
        arrivals: Arrivals,
    ) -> None:
        """Register the tensors of a call.

        Args:
            parameters: a copy of each parameter, which may still be on its way.
            buffers: a copy of each buffer.
            device: the device of both.
            arrivals: the events to wait for before a parameter is used.
        """
        self._next_hook_id = RemovableHandle.next_id
        for members, name, position in self._parameters:
            members[name] = parameters[position]
        for members, name, position in self._buffers:
            members[name] = buffers[position]
        events = arrivals.events(device)
        if events:
            for attributes in self._attributes:
                plain = attributes["_parameters"]
                if awaited := [events[id(p)] for p in plain.values() if id(p) in events]:
                    attributes["_parameters"] = ArrivingParameters(plain, device, awaited)
                    self._arriving.append(attributes)
        for rnn in self._rnns:  # or flatten_parameters() in forward would be that of the original
            rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]

    def join(self) -> None:
        """Replace parameters that wait for their arrival by plain dictionaries."""
        while self._arriving:
            attributes = self._arriving.pop()
            attributes["_parameters"] = attributes["_parameters"].plain

    def end(self) -> bool:
        """Remove what a call has left, or return False if the replica must not be used again.

        It must not if its modules are still referred to, or have changed in a way that is not
        reset. Activation checkpointing, for example, keeps modules, or dictionaries of them, until
        backward. Then nothing is removed.
        """
        # There are many dictionaries of hooks, so look only if a hook was registered, on anything.
        may_have_hooks = RemovableHandle.next_id != self._next_hook_id
        # A free-threaded build adds up the references of the thread that made an object and those
        # of all others. Only that thread reads both at one time; to others the sum is a guess.
        counts_exactly = self._thread == threading.get_ident() or not is_free_threaded_build()
        if (
            self._is_for_one_call
            or not counts_exactly
            or self._take_fingerprint() != self._fingerprint
            or (may_have_hooks and any(self._without_hooks))
        ):
            return False
        deque(map(dict.update, self._changeable, self._values), maxlen=0)  # a loop in C
        if list(map(len, self._reset)) != self._num_members:  # there are new ones
            for members, as_made in zip(self._reset, self._as_made, strict=True):
                members.clear()
                members.update(as_made)
        return True

    def _take_fingerprint(self) -> tuple[list[Any], ...]:
        """Return what a call must not have changed, if another one is to use the replica.

        These are the references to modules and their dictionaries, weak ones included, the classes
        of modules, the names of parameters, buffers and children, the children, and hooks in
        dictionaries that were not empty.
        """
        return (
            list(map(sys.getrefcount, chain(self.modules, self._counted))),
            list(map(weakref.getweakrefcount, self.modules)),
            list(map(type, self.modules)),
            list(chain.from_iterable(self._named)),
            gc.get_referents(*self._constant),
        )


def _shallow_copy(module: nn.Module) -> nn.Module:
    if _replicates_itself(module):
        replica: nn.Module = module._replicate_for_data_parallel()
        replica._parameters = module._parameters.copy()
        return replica
    copy: nn.Module = object.__new__(type(module))  # its own __new__ may need arguments
    attributes = copy.__dict__
    attributes.update(module.__dict__, _is_replica=True)
    if type(module).zero_grad is nn.Module.zero_grad:
        attributes["zero_grad"] = _zero_grad_of_replica
    for kind in DICTIONARIES:
        attributes[kind] = attributes[kind].copy()
    return copy


def _zero_grad_of_replica(set_to_none: bool = True) -> None:
    """Do what ``zero_grad`` does in a replica of ``nn.DataParallel``: nothing."""
    warn(  # torch's words, by which scripts filter it
        "Calling .zero_grad() from a module created with nn.DataParallel() has no effect. A "
        "replica has no gradients of its own; call it outside of forward"
    )


def _replicates_itself(module: nn.Module) -> bool:
    """Return whether a module overrides ``_replicate_for_data_parallel``, as RNNs do."""
    default = nn.Module._replicate_for_data_parallel
    return type(module)._replicate_for_data_parallel is not default


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what ``torch.compile(module)`` returns."""
    return "_orig_mod" in module._modules
