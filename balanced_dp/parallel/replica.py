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
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from ..free_threading import is_free_threaded_build
from .copies import Arrivals, ArrivingParameters

MEMBERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes in which a module stores what is registered; each replica has its own."""

_OF_ANY_MODULE = vars(nn.Module()).keys() - {"training"}
"""Attributes that a forward pass does not assign, although it may change their contents."""

_OF_ANY_REPLICA = _OF_ANY_MODULE | {"_is_replica", "zero_grad", "register_parameter"}

_CARRIERS = (types.MethodType, functools.partial)
"""Attributes that may hold modules, and must hold their copies in a replica: hooks and ``forward``.
"""

_Place = tuple[int, str, str, int]
"""The index of a module, a kind and a name of members, and the position among all members."""


class Blueprint:
    """The parts that all replicas of a module have in common.

    Args:
        network: the module.

    Attributes:
        names, modules: its submodules, each once, with itself as the first.
        tensors: the parameters and then the buffers of the modules, each once, in the order of
            registration: neighbors are used together.
        parameters, buffers: both of them alone.
        places: where the tensors are registered.
        children: where submodules are.
        attributes: the attributes of each module that forward may assign.
        bound: the values that may be bound to modules: the index of a module, the kind of hooks or
            None for an attribute, the key, and the value.
        is_compiled: whether a submodule is the result of ``torch.compile``.

    Raises:
        RuntimeError: a submodule is scripted or compiled in place.
    """

    def __init__(self, network: nn.Module) -> None:
        self.names, self.modules = map(list, zip(*network.named_modules(), strict=True))
        self.tensors: list[torch.Tensor] = []
        self.places = self._index("_parameters", self.tensors)
        self.parameters = self.tensors.copy()
        self.places += self._index("_buffers", self.tensors)
        self.buffers = self.tensors[len(self.parameters) :]
        self.children = self._index("_modules", self.modules)
        self.attributes: list[dict[str, Any]] = []
        self.bound: list[tuple[int, str | None, Any, Any]] = []
        for index, module in enumerate(self.modules):
            _check_replicable(module)
            own = module.__dict__
            attributes = {n: v for n, v in own.items() if n not in _OF_ANY_MODULE}
            if _is_compiled(module):
                attributes.pop("forward", None)  # which each copy binds itself
            self.attributes.append(attributes)
            for kind, values in ((None, attributes), *((k, own[k]) for k in HOOKS if own[k])):
                carriers = [(k, v) for k, v in values.items() if isinstance(v, _CARRIERS)]
                self.bound += [(index, kind, k, v) for k, v in carriers]
        self.is_compiled = any(map(_is_compiled, self.modules))
        pairs = zip(self.modules, self.attributes, strict=True)
        owners = [module.__dict__ for module, attributes in pairs for _ in attributes]
        self._slots = owners, list(chain.from_iterable(self.attributes))
        """Where each of these attributes is, and its name: one loop in C reads them all."""
        self._contents = self._take_contents()

    def _index(self, kind: str, values: list[Any]) -> list[_Place]:
        """Return the places of all members of a kind, and append new ones to ``values``."""
        positions = {id(value): position for position, value in enumerate(values)}
        places = []
        for index, module in enumerate(self.modules):
            for name, value in module.__dict__[kind].items():
                if value is not None:
                    position = positions.setdefault(id(value), len(values))
                    if position == len(values):
                        values.append(value)
                    places.append((index, kind, name, position))
        return places

    def path(self, index: int, name: str) -> str:
        """Return the dotted path of an attribute of a module."""
        return f"{self.names[index]}.{name}".lstrip(".")

    def is_of(self, network: nn.Module) -> bool:
        """Return whether ``network`` is the module, and its attributes have not changed."""
        *before, values_before = self._contents
        *now, values_now = self._take_contents()
        is_same = self.modules[0] is network and before == now
        return is_same and all(map(operator.is_, values_before, values_now))

    def _take_contents(self) -> tuple[list[Any], ...]:
        """Return the types of the modules, and the sizes, keys and values of their dictionaries.

        Compare the values by identity, since not all of them support equality.
        """
        own = [module.__dict__ for module in self.modules]
        registered = _of_kinds((*MEMBERS, *HOOKS), own)
        filled = list(filter(None, registered))
        values = chain.from_iterable(map(dict.values, filled))
        return (
            list(map(type, self.modules)),
            list(map(len, own)),
            list(map(len, registered)),
            list(chain.from_iterable(filled)),
            [*values, *map(dict.get, *self._slots, repeat(self))],  # self where there is none
        )


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
        self.modules: list[Any] = list(map(_shallow_copy, blueprint.modules))
        self.attributes: list[dict[str, Any]] = [copy.__dict__ for copy in self.modules]
        self._register(blueprint.children, self.modules)
        self._register(blueprint.places, [None] * len(blueprint.tensors))
        if blueprint.bound:
            self._bind()
        for index, module in enumerate(blueprint.modules):
            if _is_compiled(module):
                self.modules[index]._initialize()  # binds its forward to the copy
        self._registered = _of_kinds((*MEMBERS, *HOOKS), self.attributes)
        self._members = list(filter(None, _of_kinds(MEMBERS, self.attributes)))
        self._made_with = [*blueprint.attributes, *map(dict.copy, self._members)]
        """The attributes and members between calls: children, and no tensors."""
        self._rnns = [module for module in self.modules if isinstance(module, nn.RNNBase)]
        # A free-threaded build counts the references of each thread apart.
        can_count = not is_free_threaded_build()
        self._can_recycle = can_count and not any(map(_replicates_itself, self.modules))
        self._arriving: list[dict[str, Any]] = []
        self._sizes = list(map(len, self.attributes))
        self._fingerprint = self._take_fingerprint()

    def _register(self, places: Iterable[_Place], values: Sequence[Any]) -> None:
        """Register members.

        ``Module.__setattr__`` would find the dictionary itself, but registers as a parameter
        nothing but an ``nn.Parameter``.
        """
        attributes = self.attributes
        for index, kind, name, position in places:
            attributes[index][kind][name] = values[position]

    def _bind(self) -> None:
        """Bind methods and hooks to the copies.

        A method in the dictionary of its module makes a cycle, and the memory of the replica would
        wait for the garbage collector. So its place is taken in the end by one that is bound when
        it is called, for those who keep the module.
        """
        pairs = zip(self._blueprint.modules, self.modules, strict=True)
        copies = weakref.WeakValueDictionary(pairs)
        for index, kind, key, value in self._blueprint.bound:
            own = self.attributes[index] if kind is None else self.attributes[index][kind]
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
        self._register(self._blueprint.places, tensors)
        events = arrivals.events(device)
        for own in self.attributes if events else ():
            plain = own["_parameters"]
            if awaited := [events[id(p)] for p in plain.values() if id(p) in events]:
                own["_parameters"] = ArrivingParameters(plain, device, awaited)
                self._arriving.append(own)
        for rnn in self._rnns:  # or flatten_parameters() in forward would be that of the original
            # A weight that forward computes, as in DropConnect, is not there yet.
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]

    def join(self) -> None:
        """Replace parameters that wait for their arrival by plain dictionaries."""
        while self._arriving:
            own = self._arriving.pop()
            own["_parameters"] = own["_parameters"].data

    def end(self) -> bool:
        """Reset the replica after a call, or return False if it must not be used again.

        It must not be used if its modules are still referred to, or have changed in a way that is
        not reset. Activation checkpointing, for example, keeps modules, or dictionaries of them,
        until backward. Then nothing is removed.
        """
        if not self._can_recycle or self._fingerprint != self._take_fingerprint():
            return False
        states = chain(self.attributes, self._members)
        deque(map(dict.update, states, self._made_with), maxlen=0)  # a loop in C
        for own, key, strong, _ in self._bound:
            own[key] = strong
        if list(map(len, self.attributes)) != self._sizes:  # there are new ones
            for module, made_with in zip(self.modules, self._made_with, strict=False):
                own = module.__dict__
                kept = _OF_ANY_REPLICA | ({"forward"} if _is_compiled(module) else set())
                for name in own.keys() - made_with.keys() - kept:
                    del own[name]
        return True

    def _take_fingerprint(self) -> tuple[list[Any], ...]:
        """Return the state that a call must not change if the replica is to be used again.

        These are the references to modules and their dictionaries, weak ones included, the classes
        of modules and the names of members and hooks.
        """
        # sys.getrefcount counts local variables, so none may hold a module.
        registered, bound = self._registered, [strong for _, _, strong, _ in self._bound]
        return (
            list(map(sys.getrefcount, chain(self.modules, self.attributes, self._members, bound))),
            list(map(weakref.getweakrefcount, self.modules)),
            list(map(type, self.modules)),
            list(map(len, registered)),
            list(chain.from_iterable(filter(None, registered))),
        )


def _shallow_copy(module: nn.Module) -> nn.Module:
    copy: nn.Module
    if _replicates_itself(module):
        copy = module._replicate_for_data_parallel()
    else:
        copy = object.__new__(type(module))  # its own __new__ may need arguments
        copy.__dict__.update(module.__dict__, _is_replica=True)
    own = copy.__dict__
    for kind in ("_buffers", "_modules", *HOOKS):
        own[kind] = own[kind].copy()
    own["_parameters"] = dict(module._parameters)  # a plain one, also in a replica of a replica
    if type(module).zero_grad is nn.Module.zero_grad:
        own["zero_grad"] = _OF_REPLICAS.zero_grad
    if own["_parameters"]:
        own["register_parameter"] = functools.partial(_register_parameter, own["_parameters"])
    return copy


def _register_parameter(parameters: dict[str, Any], name: str, param: Any) -> None:
    """Register members that torch would refuse, because the copies in a replica are not leaves."""
    parameters[name] = param


_OF_REPLICAS = nn.Module()
"""Marked as a replica, so that ``zero_grad`` warns as in replicas of ``nn.DataParallel``."""
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


def _of_kinds(kinds: Sequence[str], attributes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the dictionaries of some kinds, which ``attributes`` of modules have."""
    return list(chain.from_iterable(map(operator.itemgetter(*kinds), attributes)))


def _replicates_itself(module: nn.Module) -> bool:
    """Return whether a module overrides ``_replicate_for_data_parallel``.

    RNNs do to get flat weights of their own, which ``Replica`` gives them.
    """
    defaults = (nn.Module, nn.RNNBase)
    own = type(module)._replicate_for_data_parallel
    return own not in [kind._replicate_for_data_parallel for kind in defaults]


def _is_compiled(module: nn.Module) -> bool:
    """Return whether a module is the result of ``torch.compile(module)``."""
    return "_orig_mod" in module._modules


def _check_replicable(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        raise RuntimeError(
            f"a {type(module).__name__} that was compiled in place or scripted cannot be "
            "replicated, because its code is bound to the original; wrap "
            "torch.compile(module), or the Python module"
        )
