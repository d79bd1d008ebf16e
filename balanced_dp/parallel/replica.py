"""A replica of a module: a shallow copy that gets its tensors for each call, and is used again.

Making a replica takes Python work for each submodule, parameter and buffer, and most of it gives
the same result in each call. So replicas that have run are kept for the next one, as long as the
module holds the same objects as when they were made. While a replica waits, it holds no tensors.
It is recycled only if nobody else refers to its modules.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..free_threading import is_free_threaded_build
from .copies import Arrivals, ArrivingParameters

MEMBERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes in which a module stores what is registered; each replica has its own."""

_CARRIERS = (types.MethodType, functools.partial)
"""Types of hooks and of ``forward`` that may hold modules; those of a replica hold the copies."""

_Member = tuple[int, str, str, Any]
"""The index of a module, a kind of members, the name of one, and the member."""

_Place = tuple[int, str, str, int]
"""The same with the position of the member in a list."""


class Blueprint:
    """The parts that all replicas of a module have in common.

    Args:
        network: the module.

    Attributes:
        modules: its submodules, each once, with itself as the first.
        tensors: the parameters and then the buffers of the modules, each once, in the order of
            registration: neighbors are used together.
        parameters, buffers: both of them alone.
        places: where the tensors are registered.
        children: where submodules are.
        bound: the values that may be bound to modules: the index of a dictionary among those with
            attributes and hooks, the key, and the value.
        compiled: the indices of the modules that are results of ``torch.compile``.
        can_recycle: whether replicas may be used again.

    Raises:
        RuntimeError: a submodule is scripted or compiled in place.
    """

    def __init__(self, network: nn.Module) -> None:
        self.modules = list(network.modules())
        for module in self.modules:
            _check_replicable(module)
        parameters, buffers = self._members("_parameters"), self._members("_buffers")
        self.parameters: list[torch.Tensor] = list(dict.fromkeys(p for *_, p in parameters))
        self.tensors = list(dict.fromkeys([*self.parameters, *(b for *_, b in buffers)]))
        self.buffers = self.tensors[len(self.parameters) :]
        self.places = _places(parameters + buffers, self.tensors)
        self.children = _places(self._members("_modules"), self.modules)
        own = [module.__dict__ for module in self.modules]
        places = enumerate([*own, *_registered(HOOKS, own)])
        items = ((i, key, value) for i, held in places for key, value in held.items())
        self.bound = [item for item in items if isinstance(item[-1], _CARRIERS)]
        self.compiled = [i for i, m in enumerate(self.modules) if "_orig_mod" in m._modules]
        # A free-threaded build counts the references of each thread apart.
        can_count = not is_free_threaded_build()
        self.can_recycle = can_count and not any(map(_replicates_itself, self.modules))
        members = _registered((*MEMBERS, *HOOKS), own)
        self._filled, self._empty = list(filter(None, members)), [d for d in members if not d]
        self._contents = self._take_contents()

    def _members(self, kind: str) -> list[_Member]:
        """Return all members of a kind, in the order of registration."""
        own = [(i, module.__dict__[kind].items()) for i, module in enumerate(self.modules)]
        return [(i, kind, name, v) for i, items in own for name, v in items if v is not None]

    def is_of(self, network: nn.Module) -> bool:
        """Return whether ``network`` is the module, and its attributes have not changed."""
        *before, values_before = self._contents
        *now, values_now = self._take_contents()
        is_same = self.modules[0] is network and before == now and not any(self._empty)
        return is_same and all(map(operator.is_, values_before, values_now))

    def _take_contents(self) -> tuple[list[Any], ...]:
        """Return the types of the modules, and the sizes, keys and values of their dictionaries.

        Compare the values by identity, since not all of them support equality. Those of a
        ``__dict__`` include the dictionaries of members and hooks, so these are still the same.
        """
        dictionaries = [*[module.__dict__ for module in self.modules], *self._filled]
        return (
            list(map(type, self.modules)),
            list(map(len, dictionaries)),
            list(chain.from_iterable(dictionaries)),
            list(chain.from_iterable(map(dict.values, dictionaries))),
        )


def _places(members: Sequence[_Member], values: Sequence[Any]) -> list[_Place]:
    positions = {id(value): position for position, value in enumerate(values)}
    return [(i, kind, name, positions[id(member)]) for i, kind, name, member in members]


class Replica:
    """Shallow copies of the modules of a network.

    Args:
        blueprint: the blueprint of the network.

    Attributes:
        modules: the copies of its modules; the first is the copy of the network itself.
        attributes: the ``__dict__`` of each copy.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self._bound: list[tuple[dict[Any, Any], Any, Any, Any]] = []
        self._blueprint = blueprint
        self.modules: list[Any] = [*map(_shallow_copy, blueprint.modules)]
        self.attributes: list[dict[str, Any]] = [copy.__dict__ for copy in self.modules]
        for index, kind, name, position in blueprint.children:
            self.attributes[index][kind][name] = self.modules[position]
        for index, kind, name, _ in blueprint.places:
            self.attributes[index][kind][name] = None
        self._slots = [(self.attributes[i][kind], *place) for i, kind, *place in blueprint.places]
        """For each tensor, the dictionary of its module, its name there, and its position."""
        self._hooks = _registered(HOOKS, self.attributes)
        self._bind()
        for index in blueprint.compiled:
            self.modules[index]._initialize()  # binds its forward to the copy
        self._resettable = [*self.attributes, *_registered(MEMBERS, self.attributes)]
        self._filled = list(filter(None, self._resettable))
        self._made_with = list(map(dict, self._filled))
        """The attributes and members between calls: children, and no tensors."""
        self._rnns = [module for module in self.modules if isinstance(module, nn.RNNBase)]
        self._arriving: list[dict[str, Any]] = []
        self._fingerprint = self._take_fingerprint()

    def _bind(self) -> None:
        """Bind methods and hooks to the copies.

        A method in the dictionary of its module makes a cycle, and the memory of the replica would
        wait for the garbage collector. So ``__del__`` replaces it by one that is bound when it is
        called, for those who keep the module.
        """
        bound, dictionaries = self._blueprint.bound, [*self.attributes, *self._hooks]
        pairs = zip(self._blueprint.modules, self.modules, strict=True)
        copies = weakref.WeakValueDictionary(pairs if bound else ())
        for index, key, value in bound:
            own = dictionaries[index]
            own[key] = strong = _bind(value, copies)
            self._bound.append((own, key, strong, functools.partial(_call_bound, value, copies)))

    def __del__(self) -> None:
        for own, key, _, weak in self._bound:
            own[key] = weak

    def begin(
        self, tensors: Sequence[torch.Tensor], device: torch.device, arrivals: Arrivals
    ) -> None:
        """Register the tensors of a call.

        Args:
            tensors: a copy of each tensor, which may still be on its way.
            device: their device.
            arrivals: the events to wait for before a parameter is used.
        """
        for own, name, position in self._slots:
            own[name] = tensors[position]
        events = arrivals.events
        for own in self.attributes if events else ():
            plain = own["_parameters"]
            if awaited := [events[id(p)] for p in plain.values() if id(p) in events]:
                own["_parameters"] = ArrivingParameters(plain, device, awaited)
                self._arriving.append(own)
        for rnn in self._rnns:  # or flatten_parameters() in forward would be that of the original
            # A weight that forward computes, as in DropConnect, is not there yet.
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]

    def stop_waiting(self) -> None:
        """Replace parameters that wait for their arrival by plain dictionaries."""
        while self._arriving:
            own = self._arriving.pop()
            own["_parameters"] = own["_parameters"].data

    def end(self) -> bool:
        """Reset the replica after a call, or leave it and return False if it must not be reused.

        It must not be used if its modules are still referred to, or have changed in a way that is
        not reset. Activation checkpointing, for example, keeps modules, or dictionaries of them,
        until backward.
        """
        if not self._blueprint.can_recycle or self._fingerprint != self._take_fingerprint():
            return False
        deque(map(dict.clear, filter(None, self._resettable)), maxlen=0)  # a loop in C
        deque(map(dict.update, self._filled, self._made_with), maxlen=0)
        return True

    def _take_fingerprint(self) -> tuple[list[Any], ...]:
        """Return the state that a call must not change if the replica is to be used again.

        These are the references to modules and their dictionaries, weak ones included, the classes
        of modules and their hooks.
        """
        # sys.getrefcount counts local variables, so none may hold a module.
        bound, hooks = [strong for _, _, strong, _ in self._bound], filter(None, self._hooks)
        return (
            list(map(sys.getrefcount, chain(self.modules, self._filled, bound))),
            list(map(weakref.getweakrefcount, self.modules)),
            list(map(type, self.modules)),
            list(map(id, chain.from_iterable(map(dict.values, hooks)))),
        )


def _shallow_copy(module: nn.Module) -> nn.Module:
    copy: nn.Module
    if _replicates_itself(module):
        copy = module._replicate_for_data_parallel()
    else:
        copy = object.__new__(type(module))  # its own __new__ may need arguments
        copy.__dict__.update(module.__dict__)
        copy.__dict__["_is_replica"] = True
    own = copy.__dict__
    for kind in HOOKS:
        own[kind] = own[kind].copy()
    for kind in MEMBERS:
        own[kind] = dict(module.__dict__[kind])  # a plain one, also in a replica of a replica
    if type(module).zero_grad is nn.Module.zero_grad:
        own["zero_grad"] = _OF_REPLICAS.zero_grad
    # Torch's would refuse copies, because they are not leaves.
    own["register_parameter"] = functools.partial(operator.setitem, own["_parameters"])
    return copy


_OF_REPLICAS = nn.Module()
"""A replica without parameters, as those of ``nn.DataParallel``: its ``zero_grad`` only warns."""
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


def _registered(kinds: Sequence[str], attributes: list[dict[str, Any]]) -> list[dict[Any, Any]]:
    """Return the dictionaries in which modules with these attributes store members or hooks."""
    return list(chain.from_iterable(map(operator.itemgetter(*kinds), attributes)))


_DEFAULTS = [kind._replicate_for_data_parallel for kind in (nn.Module, nn.RNNBase)]


def _replicates_itself(module: nn.Module) -> bool:
    """Return whether a module overrides ``_replicate_for_data_parallel``.

    RNNs' own does not count, as ``Replica`` sets their flat weights.
    """
    return type(module)._replicate_for_data_parallel not in _DEFAULTS


def _check_replicable(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        raise RuntimeError(
            f"a {type(module).__name__} that was compiled in place or scripted cannot be "
            "replicated, because its code is bound to the original; wrap "
            "torch.compile(module), or the Python module"
        )
