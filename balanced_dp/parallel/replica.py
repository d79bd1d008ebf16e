"""A replica of a module, and whether it may be used again."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import warn
from ..free_threading import is_free_threaded_build
from .arrivals import Arrivals, ArrivingParameters, parameters_of
from .bound_methods import HOOKS, bind_to_replicas
from .homes import refuse_alone

_DICTIONARIES = ("_modules", "_parameters", "_buffers", *HOOKS)

_OF_ANY_MODULE = vars(nn.Module()).keys() - {"training"}
"""Attributes that a forward pass does not assign, although it may change their contents."""


class Members:
    """All submodules, parameters or buffers of a module, each once, and where they are registered.

    Args:
        kind: the attribute of a module in which they are registered.
        values: the first of them, in order.
    """

    def __init__(
        self, kind: Literal["_modules", "_parameters", "_buffers"], values: Iterable[Any] = ()
    ) -> None:
        self.kind = kind
        self.values = list(values)
        self._positions = {id(value): position for position, value in enumerate(self.values)}
        self._places: list[tuple[int, str, int]] = []  # index of the module, name, position

    def add(self, index: int, members: Mapping[str, Any]) -> None:
        """Add the members of the module with this index."""
        for name, value in members.items():
            if value is not None:
                position = self._positions.setdefault(id(value), len(self.values))
                if position == len(self.values):
                    self.values.append(value)
                self._places.append((index, name, position))

    def places(
        self, attributes: Sequence[Mapping[str, dict[str, Any]]]
    ) -> list[tuple[dict[str, Any], str, int]]:
        """Return the dictionary, name and position of each member in the modules of a replica.

        ``Module.__setattr__`` would find the dictionary itself, but registers as a parameter
        nothing but an ``nn.Parameter``.

        Args:
            attributes: the ``__dict__`` of each module.
        """
        return [(attributes[i][self.kind], name, position) for i, name, position in self._places]


class Replica:
    """A replica of a module.

    Args:
        originals: the submodules that it copies.
        parameters: the parameters that they have.
        buffers: the buffers that they have.

    Attributes:
        modules: the copies, in the order of ``originals``; the first is that of the module itself.
    """

    def __init__(self, originals: Members, parameters: Members, buffers: Members) -> None:
        self.modules: list[Any] = list(map(_shallow_copy, originals.values))
        self._attributes = [copy.__dict__ for copy in self.modules]
        self._register_children(originals)
        has_bound = bind_to_replicas(originals.values, self.modules)
        # These keep what end() does not reset.
        self._is_for_one_call = has_bound or any(map(_replicates_itself, originals.values))
        self._parameters = parameters.places(self._attributes)
        self._buffers = buffers.places(self._attributes)
        self._arriving: list[dict[str, Any]] = []
        self._rnns = [module for module in self.modules if isinstance(module, nn.RNNBase)]
        self._child_dicts = [a["_modules"] for a in self._attributes]
        hooks = [a[kind] for a in self._attributes for kind in HOOKS]
        self._hooks = list(filter(None, hooks))
        self._without_hooks = [own for own in hooks if not own]
        self._num_hooks_of_any = RemovableHandle.next_id
        self._tensor_dicts = [
            a[kind] for a in self._attributes for kind in ("_parameters", "_buffers")
        ]
        self._filled_dicts = list(
            filter(None, [*self._tensor_dicts, *self._child_dicts, *self._hooks])
        )
        self._reset_dicts = [*self._attributes, *self._tensor_dicts]
        self._as_made = [
            *(a.copy() for a in self._attributes),
            *map(dict.fromkeys, self._tensor_dicts),
        ]
        # A call may have changed these; they are few, so that it takes little time to reset them.
        values = [{k: v for k, v in d.items() if k not in _OF_ANY_MODULE} for d in self._as_made]
        self._changeable = list(compress(self._reset_dicts, values))
        self._values = list(filter(None, values))
        self._num_members = list(map(len, self._reset_dicts))
        self._thread = threading.get_ident()
        # sys.getrefcount counts local variables, so none may hold a module. The fingerprint holds
        # references itself, so the second one is what a call must leave.
        self._fingerprint = self._take_fingerprint()
        self._fingerprint = self._take_fingerprint()

    def _register_children(self, originals: Members) -> None:
        for members, name, position in originals.places(self._attributes):
            members[name] = self.modules[position]
        for module in filter(is_compiled, self.modules):
            module._initialize()  # binds its forward to the replica

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
        self._num_hooks_of_any = RemovableHandle.next_id
        for members, name, position in self._parameters:
            members[name] = parameters[position]
        for members, name, position in self._buffers:
            members[name] = buffers[position]
        events = arrivals.on(device)
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

    def state(self) -> list[dict[str, tuple[Any, int]]]:
        """Return the attributes of each module, and the lengths of containers.

        Of modules that set weights on purpose, only parameters and submodules are returned.
        """
        return [
            {
                name: (value, len(value) if isinstance(value, list | dict | set) else 0)
                for name, value in chain(
                    parameters_of(module).items(),
                    module._modules.items(),
                    *(
                        ()
                        if _sets_weights(module)
                        else (vars(module).items(), module._buffers.items())
                    ),
                )
            }
            for module in self.modules
        ]

    def is_recyclable(self) -> bool:
        """Return whether nobody else refers to its modules, and these have changed nothing.

        Activation checkpointing, for example, keeps modules, or dictionaries of them, until
        backward.
        """
        # There are many dictionaries of hooks, so look only if a hook was registered, on anything.
        may_have_hooks = RemovableHandle.next_id != self._num_hooks_of_any
        # A free-threaded build adds up the references of the thread that made an object and those
        # of all others. Only that thread reads both at one time; to others the sum is a guess.
        counts_exactly = self._thread == threading.get_ident() or not is_free_threaded_build()
        return (
            not self._is_for_one_call
            and counts_exactly
            and self._take_fingerprint() == self._fingerprint
            and not (may_have_hooks and any(self._without_hooks))
        )

    def has_other_dictionaries(self) -> bool:
        """Return whether a call has registered the first hooks, or replaced a dictionary.

        ``is_recyclable`` need not show that.
        """
        return any(self._without_hooks) or any(
            attributes[kind] is not as_made[kind]
            # _as_made goes on with the dictionaries of tensors.
            for attributes, as_made in zip(self._attributes, self._as_made, strict=False)
            for kind in _DICTIONARIES
        )

    def _take_fingerprint(self) -> tuple[list[Any], ...]:
        """Return what a call must not have changed, if another one is to use the replica.

        These are the references to modules and their dictionaries, weak ones included, the classes
        of modules, the names of parameters, buffers and children, the children, and hooks in
        dictionaries that were not empty.
        """
        return (
            list(map(sys.getrefcount, chain(self.modules, self._reset_dicts, self._child_dicts))),
            list(map(weakref.getweakrefcount, self.modules)),
            list(map(type, self.modules)),
            list(chain.from_iterable(self._filled_dicts)),
            gc.get_referents(*self._child_dicts, *self._hooks),
        )

    def end(self) -> None:
        """Remove the tensors, and whatever else a call has left."""
        deque(map(dict.update, self._changeable, self._values), maxlen=0)  # a loop in C
        if list(map(len, self._reset_dicts)) != self._num_members:  # there are new ones
            for members, as_made in zip(self._reset_dicts, self._as_made, strict=True):
                members.clear()
                members.update(as_made)


def _sets_weights(module: nn.Module) -> bool:
    """Return whether a module is torch's, or has hooks that may set a weight."""
    hooks = module._forward_pre_hooks.values()
    is_of_torch = type(module).__module__.startswith("torch.")
    return is_of_torch or any(hook is not refuse_alone for hook in hooks)


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
    for kind in _DICTIONARIES:
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
