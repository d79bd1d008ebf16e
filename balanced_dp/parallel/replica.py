"""A replica of a module: a shallow copy that gets new tensors in each call, and is reused.

Making a replica takes Python work for each submodule, parameter and buffer, and most of this work
gives the same result in each call. So a replica that has run is usually kept for the next call.
Between calls, it holds no tensors. A replica is not reused in either of these cases:

- After the replica was made, a parameter, buffer, submodule, hook or other attribute of the
  original module, or of one of its submodules, was added, removed or set to another object.
- When the call ends, something outside the replica still refers to a module of the replica.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from ..free_threading import is_free_threaded_build
from .copies import Arrivals, ArrivingParameters

MEMBERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
KINDS = (*MEMBERS, *HOOKS)
"""The attributes in which a module stores registered objects (``MEMBERS``) and hooks (``HOOKS``).

``KINDS`` are all of them. Each of these attributes is a dictionary. A replica's modules have copies
of these dictionaries.
"""

_CARRIERS = (types.MethodType, functools.partial)
"""Types of callables that may refer to modules: bound methods and ``functools.partial`` objects.

A hook or a replaced ``forward`` may be such a callable. In a replica, the callable is replaced by
one that refers to the copies of the modules.
"""

_Member = tuple[int, str, str, Any]
"""A parameter, buffer or submodule, with the place where it is registered.

``(3, "_parameters", "weight", tensor)`` is the parameter ``weight`` of the module that has the
index 3 in ``Blueprint.modules``. The second entry is one of ``MEMBERS``.
"""

_Place = tuple[int, str, str, int]
"""A ``_Member`` whose last entry is not the object, but the object's position in a list.

The list is ``Blueprint.tensors`` or ``Blueprint.modules``.
"""


class Blueprint:
    """The information about a module from which all its replicas are made.

    Args:
        network: the module to replicate.

    Attributes:
        modules: the module itself and then its submodules, each once.
        tensors: the parameters and then the buffers of the modules, each once. Both are in the
            order of registration.
        parameters, buffers: the two parts of ``tensors``.
        places: where each tensor is registered. In the entry ``(3, "_parameters", "weight", 5)``,
            3 is the index of the module in ``modules``, and 5 is the position of the tensor in
            ``tensors``. A tensor that is registered several times has several entries.
        children: where each submodule is registered. The entry ``(3, "_modules", "head", 7)`` says
            that ``modules[3].head`` is ``modules[7]``.
        bound: the attributes and hooks that may refer to modules, such as bound methods. The
            entry ``(2, "forward", method)`` says that dictionary 2 has the method under the key
            ``"forward"``. Dictionaries are numbered from 0: first the ``__dict__`` of each module,
            then the ``HOOKS`` dictionaries of each module.
        compiled: the indices of those modules that ``torch.compile`` has returned.
        custom: the indices of those modules that override ``_replicate_for_data_parallel``.
        templates: for each module, the ``__dict__`` of its replicas, except that it has the
            module's own dictionaries of ``KINDS``. Python copies these templates faster than the
            ``__dict__`` of an object.
        can_recycle: whether a replica may be used in more than one call.

    Raises:
        RuntimeError: the module or a submodule is scripted, or was compiled in place.
    """

    def __init__(self, network: nn.Module) -> None:
        self.modules = list(network.modules())
        for module in self.modules:
            if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
                raise RuntimeError(
                    f"a {type(module).__name__} that was compiled in place or scripted cannot be "
                    "replicated, because its code is bound to the original module; wrap "
                    "torch.compile(module), or the module before it was scripted"
                )
        parameters, buffers = self._members("_parameters"), self._members("_buffers")
        self.parameters: list[torch.Tensor] = list(dict.fromkeys(p for *_, p in parameters))
        self.tensors = list(dict.fromkeys([*self.parameters, *(b for *_, b in buffers)]))
        self.buffers = self.tensors[len(self.parameters) :]
        self.places = _places(parameters + buffers, self.tensors)
        self.children = _places(self._members("_modules"), self.modules)
        own = [module.__dict__ for module in self.modules]
        self.compiled = [i for i, m in enumerate(self.modules) if "_orig_mod" in m._modules]
        # A replica is reused only if its reference counts show that nothing else uses it. In a
        # free-threaded build, the counts do not show this: see is_free_threaded_build.
        self.custom = [i for i, m in enumerate(self.modules) if _replicates_itself(m)]
        self.can_recycle = not (self.custom or is_free_threaded_build())
        members = _registered(KINDS, own)
        self._filled, self._empty = list(filter(None, members)), [d for d in members if not d]
        self._contents = self._take_contents()
        self.templates = list(map(_template, self.modules))
        # Most models have no carriers. Looking at the types first takes a third of the time.
        types = [kind for kind in {*map(type, self._contents[-1])} if issubclass(kind, _CARRIERS)]
        items = ((i, d.items()) for i, d in enumerate([*own, *_registered(HOOKS, own)]) if types)
        self.bound = [(i, k, v) for i, held in items for k, v in held if isinstance(v, _CARRIERS)]

    def _members(self, kind: str) -> list[_Member]:
        """Return a ``_Member`` for each object in the dictionary named ``kind`` of each module.

        They are in the order of the modules and, within a module, in the order of registration.
        """
        own = [(i, module.__dict__[kind].items()) for i, module in enumerate(self.modules)]
        return [(i, kind, name, v) for i, items in own for name, v in items if v is not None]

    def is_of(self, network: nn.Module) -> bool:
        """Return whether ``network`` is the module of this blueprint, with unchanged attributes."""
        *before, values_before = self._contents
        *now, values_now = self._take_contents()
        is_same = self.modules[0] is network and before == now and not any(self._empty)
        return is_same and all(map(operator.is_, values_before, values_now))

    def _take_contents(self) -> tuple[list[Any], ...]:
        """Return the types of the modules, and the keys and values of their dictionaries.

        The dictionaries are the ``__dict__`` of each module, and the dictionaries of ``MEMBERS``
        and ``HOOKS`` that were not empty when this object was made. Compare the values by identity,
        since not all of them support equality. The comparison also shows whether a dictionary such
        as ``_parameters`` was replaced, because this dictionary is a value in the ``__dict__``.
        """
        dictionaries = [*[module.__dict__ for module in self.modules], *self._filled]
        return (
            list(map(type, self.modules)),
            list(chain.from_iterable(dictionaries)),
            list(chain.from_iterable(map(dict.values, dictionaries))),
        )


def _places(members: Sequence[_Member], values: Sequence[Any]) -> list[_Place]:
    positions = {id(value): position for position, value in enumerate(values)}
    return [(i, kind, name, positions[id(member)]) for i, kind, name, member in members]


class Replica:
    """A replica of a module: shallow copies of the module and of its submodules.

    Args:
        blueprint: the ``Blueprint`` of the module.

    Attributes:
        modules: the copies, in the order of ``Blueprint.modules``. The first, the copy of the
            module itself, is the one to call.
        attributes: the ``__dict__`` of each copy.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self._bound: list[tuple[dict[Any, Any], Any, Any, Any]] = []
        self._blueprint = blueprint
        # object.__new__, because the __new__ of a class may need arguments.
        self.modules: list[Any] = [object.__new__(type(m)) for m in blueprint.modules]
        self._made_with = blueprint.templates[:]
        for index in blueprint.custom:
            self.modules[index] = blueprint.modules[index]._replicate_for_data_parallel()
            self._made_with[index] = self._made_with[index] | self.modules[index].__dict__
        self.attributes: list[dict[str, Any]] = [copy.__dict__ for copy in self.modules]
        self._own = {kind: [t[kind].copy() for t in blueprint.templates] for kind in KINDS}
        """The objects in each ``__dict__`` that belong to this replica alone, by their keys."""
        # nn.Module.register_parameter would refuse copies of parameters, as they are not leaves.
        self._own["register_parameter"] = [d.__setitem__ for d in self._own["_parameters"]]
        for index, kind, name, position in blueprint.children:
            self._own[kind][index][name] = self.modules[position]
        for index, kind, name, _ in blueprint.places:
            self._own[kind][index][name] = None
        self._slots = [(self._own[kind][i], *place) for i, kind, *place in blueprint.places]
        """Where each tensor is registered: dictionary, name, position in ``Blueprint.tensors``."""
        self._dictionaries = [*self.attributes, *chain.from_iterable(self._own[k] for k in MEMBERS)]
        """The dictionaries to reset after a call: each ``__dict__``, then those of ``MEMBERS``.

        ``_made_with`` has the entries to which they are reset, except for the objects in ``_own``.
        """
        self._made_with += map(dict, self._dictionaries[len(self.modules) :])
        self._reset()
        self._hooks = _registered(HOOKS, self.attributes)
        self._bind()
        for index in blueprint.compiled:
            self.modules[index]._initialize()  # binds its forward to the copy
        if blueprint.compiled or blueprint.bound:
            self._made_with[: len(self.modules)] = map(dict, self.attributes)
        self._rnns = [module for module in self.modules if isinstance(module, nn.RNNBase)]
        self._arriving: list[dict[str, Any]] = []
        self._fingerprint = self._take_fingerprint()

    def _reset(self) -> None:
        """Give the dictionaries of the modules the entries that they have between calls."""
        deque(map(dict.clear, filter(None, self._dictionaries)), maxlen=0)  # a loop in C
        deque(map(dict.update, self._dictionaries, self._made_with), maxlen=0)
        for key, values in self._own.items():
            deque(map(operator.setitem, self.attributes, repeat(key), values), maxlen=0)

    def _bind(self) -> None:
        """Let the methods and hooks stored in the replica refer to its copies of the modules.

        A bound method in a dictionary of its own module makes a reference cycle, which only the
        garbage collector could free. So when the replica is deleted, ``__del__`` replaces the
        stored methods and hooks by functions that have only weak references to the copies. Code
        that still holds a module of the replica may call such a function. The function then binds
        the original method or hook to the copies again, and calls the result.
        """
        bound, dictionaries = self._blueprint.bound, [*self.attributes, *self._hooks]
        pairs = zip(self._blueprint.modules, self.modules, strict=True)
        copies = self._copies = weakref.WeakValueDictionary(pairs if bound else ())
        for index, key, value in bound:
            own = dictionaries[index]
            own[key] = strong = _bind(value, copies)
            if strong is not value:
                self._bound.append((own, key, strong, value))

    def __del__(self) -> None:
        for own, key, strong, value in self._bound:
            if own.get(key) is strong:  # backward may use something else that forward has stored
                own[key] = functools.partial(_call_bound, value, self._copies)

    def begin(self, tensors: Sequence[torch.Tensor], arrivals: Arrivals) -> None:
        """Give the modules of this replica their parameters and buffers for a call.

        Args:
            tensors: a tensor for each of ``Blueprint.tensors``, all on the device of this replica.
                Copies of parameters may still be incomplete.
            arrivals: the CUDA events that mark the end of each copy of a parameter. When a module
                of the replica reads one of its own parameters, the current stream first waits until
                all of the module's own parameters are copied.
        """
        for own, name, position in self._slots:
            own[name] = tensors[position]
        events = arrivals.events
        for own in self.attributes if events else ():
            plain = own["_parameters"]
            if awaited := [events[id(p)] for p in plain.values() if id(p) in events]:
                own["_parameters"] = ArrivingParameters(plain, tensors[0].device, awaited)
                self._arriving.append(own)
        # The list _flat_weights of an RNN still holds the original's weights. It is replaced, since
        # the model's forward may call flatten_parameters(), which uses this list.
        for rnn in self._rnns:
            # A weight that forward computes, as in DropConnect, does not exist yet. Its entry is
            # None.
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]

    def stop_waiting(self) -> None:
        """Give each module its plain ``_parameters`` dictionary back.

        In each module whose parameters were still being copied, ``begin`` has replaced this
        dictionary by an ``ArrivingParameters``, which waits for the copies when it is read.
        """
        while self._arriving:
            own = self._arriving.pop()
            own["_parameters"] = own["_parameters"].data

    def end(self) -> bool:
        """Reset the replica after a call, and return whether it may be reused.

        Only a replica that may be reused is reset. A replica must not be reused if something else
        still refers to its modules, or if its modules have changed in a way that the reset does not
        undo. Activation checkpointing, for example, keeps references to modules, or to their
        dictionaries, until backward.
        """
        if not self._blueprint.can_recycle or self._fingerprint != self._take_fingerprint():
            return False
        self._reset()
        return True

    def _take_fingerprint(self) -> tuple[list[Any], ...]:
        """Return the state that a call must leave unchanged; otherwise the replica is not reused.

        The state consists of these parts:

        - the number of references, and of weak references, to each module,
        - the number of references to the ``__dict__`` and the ``MEMBERS`` of each module,
        - the number of references to each method or hook that ``_bind`` has stored,
        - the class and the hooks of each module.
        """
        # sys.getrefcount counts local variables, so no local variable may hold a module.
        bound, hooks = [strong for _, _, strong, _ in self._bound], filter(None, self._hooks)
        return (
            list(map(sys.getrefcount, chain(self.modules, self._dictionaries, bound))),
            list(map(weakref.getweakrefcount, self.modules)),
            list(map(type, self.modules)),
            list(map(id, chain.from_iterable(map(dict.values, hooks)))),
        )


def _template(module: nn.Module) -> dict[str, Any]:
    """Return the entry of ``Blueprint.templates`` for a module."""
    # The _parameters are copied, since they may be an ArrivingParameters.
    template = {**module.__dict__, "_parameters": dict(module._parameters), "_is_replica": True}
    if type(module).zero_grad is nn.Module.zero_grad:
        template["zero_grad"] = _OF_REPLICAS.zero_grad
    return template


_OF_REPLICAS = nn.Module()._replicate_for_data_parallel()
"""An empty module that is marked as a replica.

Its ``zero_grad`` only warns that it has no effect. The modules of each replica use this
``zero_grad``, so they warn as the replicas of ``nn.DataParallel`` do.
"""


def _bind(value: Any, copies: Mapping[Any, Any]) -> Any:
    """Return ``value``, with copies in place of the modules that it refers to.

    The value may be a bound method, a ``functools.partial`` or a module itself. Any other value,
    and one that refers to no module in ``copies``, is returned unchanged.
    """
    if isinstance(value, functools.partial):
        end, parts = 1 + len(value.args), [value.func, *value.args, *value.keywords.values()]
        own = [_bind(part, copies) for part in parts]
        if all(map(operator.is_, own, parts)):
            return value
        return type(value)(own[0], *own[1:end], **dict(zip(value.keywords, own[end:], strict=True)))
    if isinstance(value, types.MethodType):
        owner = _bind(value.__self__, copies)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    return copies.get(value, value) if isinstance(value, nn.Module) else value


def _call_bound(value: Any, copies: Mapping[Any, Any], *args: Any, **kwargs: Any) -> Any:
    return _bind(value, copies)(*args, **kwargs)


def _registered(kinds: Sequence[str], attributes: list[dict[str, Any]]) -> list[dict[Any, Any]]:
    """Return the dictionaries named by ``kinds`` from the ``__dict__`` of each module.

    Args:
        kinds: the names of at least two dictionaries that each module has, such as
            ``_parameters``. ``MEMBERS`` and ``HOOKS`` are tuples of such names.
        attributes: the ``__dict__`` of each module.
    """
    return list(chain.from_iterable(map(operator.itemgetter(*kinds), attributes)))


_DEFAULTS = [kind._replicate_for_data_parallel for kind in (nn.Module, nn.RNNBase)]


def _replicates_itself(module: nn.Module) -> bool:
    """Return whether a module overrides ``_replicate_for_data_parallel``.

    The override in ``nn.RNNBase`` does not count. It copies the list ``_flat_weights``, which
    ``Replica.begin`` replaces anyway.
    """
    return type(module)._replicate_for_data_parallel not in _DEFAULTS
