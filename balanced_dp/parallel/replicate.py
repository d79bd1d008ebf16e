"""Copies of a module, one for each device, whose gradients flow back to the original."""

from __future__ import annotations

import contextlib
import operator
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ..errors import warn
from .arrivals import Arrivals, ArrivingParameters
from .bound_methods import HOOKS, rebind
from .coalesced_copy import copy_to
from .parameter_copies import ParameterCopies
from .scatter_gather import move_all
from .written_state import WrittenState

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_OF_ANY_MODULE = vars(nn.Module()).keys() - {"training"}
"""Attributes that a forward pass does not assign: it changes what is in them."""

_DICTIONARIES = ("_modules", "_parameters", "_buffers", *HOOKS)


def replicate(network: ModuleT, devices: Sequence[torch.device]) -> list[ModuleT]:
    """Returns one replica of ``network`` for each device.

    As ``torch.nn.parallel.replicate``, with these differences: a replica's ``parameters()`` are
    its copies; replicas on one device share them, and on the network's own device they are the
    parameters themselves; methods that are hooks or stored in an instance (its own ``forward``,
    say) are bound to the replica; and a parameter that was not used gets no gradient rather than
    zeros.

    Parameters are copied differentiably, so backward adds each replica's gradients to the
    parameters' as soon as a bucket of them is there. The first replica shares the buffers that are
    on its device, so that in-place updates are kept; every other replica has copies of its own.

    Args:
        network: the module; its parameters and buffers are on one device.
        devices: where the replicas go; of any type, and a device may repeat.

    Raises:
        RuntimeError: ``network`` holds modules that are lazy, scripted or compiled in place.
    """
    return Replicator().replicate(network, devices)


class Replicator:
    """Makes replicas for one call after the other, and uses again what did not change.

    Attributes:
        copies: the parameters on other devices.
    """

    def __init__(self) -> None:
        self.copies = ParameterCopies()
        self._blueprint: _Blueprint | None = None
        self._written_silently: dict[bool, frozenset[int]] = {}
        self._looked_at: list[int] = []
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[type[Replicator], tuple[()]]:
        return Replicator, ()  # a copy of the model makes its own

    def replicate(
        self,
        network: ModuleT,
        devices: Sequence[torch.device],
        home: torch.device | None = None,
    ) -> Replicas[ModuleT]:
        """Returns one replica for each device; see ``replicate``.

        Args:
            network: the module.
            devices: where the replicas go.
            home: where its parameters and buffers must be; None for anywhere.

        Returns:
            The replicas. Given back when they have run, they serve the next call.

        Raises:
            RuntimeError: one of them is elsewhere, the module cannot be replicated, or a parameter
                was changed inside ``copies.shared()``.
        """
        blueprint = self._blueprint
        if blueprint is None or not blueprint.is_of(network):
            self._blueprint = blueprint = _Blueprint(network)
            tensors = [*map(id, blueprint.buffers), *map(id, blueprint.parameters)]
            if tensors != self._looked_at:
                self._looked_at, self._written_silently = tensors, {}
        if home is not None:
            check_on_device(chain(blueprint.parameters, blueprint.buffers), home)
        buffers = _buffers_of_replicas(devices, blueprint.buffers)
        parameters, arrivals = self.copies.on(devices, blueprint.parameters)
        if blueprint.is_compiled or Arrivals.are_traced:
            arrivals.join()
        return Replicas(
            blueprint,
            [
                blueprint.replica(parameters[device], own, device, arrivals)
                for device, own in zip(devices, buffers, strict=True)
            ],
            arrivals,
        )

    @contextlib.contextmanager
    def running(self, network: nn.Module, replicas: Sequence[nn.Module]) -> Iterator[None]:
        """Keeps what the replicas write to parameters and buffers while they run in this context.

        Afterwards the replicas are given back. Where somebody else has made them, they are not.

        Warns:
            BalanceWarning: once for each attribute that forward sets, and each parameter that
                replicas on one device write, found in the first calls.
        """
        has_gradients = torch.is_grad_enabled()
        state = WrittenState(network, replicas, self._written_silently.get(has_gradients))
        try:
            yield
        finally:
            if isinstance(replicas, Replicas):
                replicas.join()
        self._written_silently[has_gradients] = state.write_back()
        name = type(network).__name__
        self._warn(
            f"{name} writes {{}} in forward, which replicas on one device share, so that each of "
            "them writes it; name each device once, unless the order and number of the writes "
            "make no difference",
            state.written_by_several(),
        )
        if isinstance(replicas, Replicas):
            self._warn(
                f"{name} sets {{}} in forward, but a call runs copies of the module, so that this "
                "is lost, or counts a chunk for the batch; return it from forward (under "
                "nn.DataParallel it is lost, too)",
                replicas.lost_attributes(),
            )
            replicas.give_back()

    def _warn(self, message: str, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._warned]
        self._warned.update(new)
        if new:
            warn(message.format(", ".join(new)))

    def release(self) -> None:
        """Gives up all that is kept for the next call."""
        self._blueprint = None


def check_on_device(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Raises RuntimeError, in the words of ``nn.DataParallel``, where a tensor is elsewhere."""
    for tensor in tensors:
        if tensor.device != device:
            raise RuntimeError(
                "module must have its parameters and buffers "
                f"on device {device} (device_ids[0]) but found one of "
                f"them on device: {tensor.device}"
            )


class Replicas(list[ModuleT]):
    """The replicas of one call."""

    def __init__(
        self, blueprint: _Blueprint, replicas: Sequence[_Replica], arrivals: Arrivals
    ) -> None:
        super().__init__(replica.root for replica in replicas)
        self._blueprint = blueprint
        self._arrivals = arrivals
        self._replicas = list(replicas)
        self._before = replicas[0].state() if blueprint.num_calls < _NUM_LOOKS else None
        blueprint.num_calls += 1

    def join(self) -> None:
        """Let the streams on which they were made wait for all of their weights."""
        self._arrivals.join()
        for replica in self._replicas:
            replica.join()

    def __del__(self) -> None:
        self._arrivals.join()  # where they were made by hand

    def lost_attributes(self) -> list[str]:
        """Returns what forward has set on the modules, if this is one of the first calls."""
        if self._before is None:
            return []
        replica = self._replicas[0]
        looks = zip(
            self._blueprint.names, replica.modules, self._before, replica.state(), strict=True
        )
        return [
            f"{name}.{attribute}".lstrip(".")
            for name, module, before, after in looks
            # Torch's modules know what they do, and so do hooks that set a weight. What is private
            # is a cache or a flag: transformers installs its hooks in the first call.
            if not type(module).__module__.startswith("torch.") and not module._forward_pre_hooks
            for attribute, value in after.items()
            if attribute[0] != "_" and not _is_same(before.get(attribute, _NOTHING), value)
        ]

    def give_back(self) -> None:
        """Lets the next call use what nobody else refers to. The list is empty afterwards."""
        self._before = None
        self.clear()
        while self._replicas:
            self._blueprint.take_back(self._replicas.pop())


_NUM_LOOKS = 3
"""In how many calls it is looked for attributes that forward sets."""

_NOTHING = (object(), 0)


def _is_same(before: tuple[Any, int], after: tuple[Any, int]) -> bool:
    """Returns whether an attribute is the object that it was, of the same length, or its equal."""
    (old, old_length), (new, length) = before, after
    is_plain = isinstance(new, int | float | str | bool | None) and type(new) is type(old)
    return (old is new or (is_plain and old == new)) and old_length == length


def _buffers_of_replicas(
    devices: Sequence[torch.device], buffers: Sequence[torch.Tensor]
) -> list[Sequence[torch.Tensor]]:
    """Returns each replica's buffers: its own copies, but the first one shares what is there."""
    away = [d for d in dict.fromkeys(devices) if any(buffer.device != d for buffer in buffers)]
    sent = copy_to(away, buffers)
    first, *others = devices
    shared = [
        buffer if buffer.device == first else copy
        for buffer, copy in zip(buffers, sent.pop(first, buffers), strict=True)
    ]
    return [shared, *(sent.pop(d, []) or move_all(buffers, d, copy=True) for d in others)]


class _Blueprint:
    """What all replicas of a module have in common, and those that wait for another call."""

    def __init__(self, network: nn.Module) -> None:
        self._modules = _Slots("_modules", network.modules())
        self._parameters = _Slots("_parameters")
        self._buffers = _Slots("_buffers")
        for index, module in enumerate(self._modules.values):
            _check_replicable(module)
            for slots in (self._modules, self._parameters, self._buffers):
                slots.add(index, module.__dict__[slots.kind])
        self._contents = _contents(self._modules.values)
        self._waiting: list[_Replica] = []
        self.names = [name for name, _ in network.named_modules()]
        self.is_compiled = any(map(is_compiled, self._modules.values))
        self.num_calls = 0

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters, each once."""
        return self._parameters.values

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers, each once."""
        return self._buffers.values

    def is_of(self, network: nn.Module) -> bool:
        """Returns whether ``network`` holds what it held, to the last attribute."""
        if self._modules.values[0] is not network:
            return False
        *before, values_before = self._contents
        *now, values_now = _contents(self._modules.values)
        return before == now and all(map(operator.is_, values_before, values_now))

    def replica(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        device: torch.device,
        arrivals: Arrivals,
    ) -> _Replica:
        """Returns a replica on a device that has these parameters and buffers."""
        try:
            replica = self._waiting.pop()
        except IndexError:
            replica = _Replica(self._modules, self._parameters, self._buffers)
        replica.begin(parameters, buffers, device, arrivals)
        return replica

    def take_back(self, replica: _Replica) -> None:
        """Keeps a replica for another call, if it may be used again."""
        if replica.may_be_used_again():
            replica.end()
            self._waiting.append(replica)


def _contents(modules: Sequence[nn.Module]) -> tuple[list[type], list[int], list[str], list[Any]]:
    """Returns all that modules hold: their types, and the sizes, keys and values of dictionaries.

    The values are to be compared by identity: not all of them know equality.
    """
    own = [module.__dict__ for module in modules]
    dictionaries = [*own, *chain.from_iterable(map(operator.itemgetter(*_DICTIONARIES), own))]
    filled = list(filter(None, dictionaries))
    return (
        list(map(type, modules)),
        list(map(len, dictionaries)),
        list(chain.from_iterable(filled)),
        list(chain.from_iterable(map(operator.methodcaller("values"), filled))),
    )


class _Slots:
    """All submodules, parameters or buffers, each once, and who has which by which name."""

    def __init__(
        self, kind: Literal["_modules", "_parameters", "_buffers"], values: Iterable[Any] = ()
    ) -> None:
        self.kind = kind
        self.values = list(values)
        self._positions = {id(value): position for position, value in enumerate(self.values)}
        self._slots: list[tuple[int, str, int]] = []  # index of the module, name, position

    def add(self, index: int, members: Mapping[str, Any]) -> None:
        """Adds the members of the module of that index."""
        for name, value in members.items():
            if value is not None:
                position = self._positions.setdefault(id(value), len(self.values))
                if position == len(self.values):
                    self.values.append(value)
                self._slots.append((index, name, position))

    def of(
        self, attributes: Sequence[Mapping[str, dict[str, Any]]]
    ) -> list[tuple[dict[str, Any], str, int]]:
        """Returns dictionary, name and position of each member, in the attributes of a replica.

        ``Module.__setattr__``, which would find the dictionary, takes nothing but an
        ``nn.Parameter`` for a parameter.
        """
        return [(attributes[i][self.kind], name, position) for i, name, position in self._slots]


class _Replica:
    """The modules of a replica, which another call may use once nobody else refers to them."""

    def __init__(self, originals: _Slots, parameters: _Slots, buffers: _Slots) -> None:
        self.modules: list[nn.Module] = list(map(_shallow_copy, originals.values))
        self._attributes = [copy.__dict__ for copy in self.modules]
        self._give_children(originals)
        has_bound = rebind(originals.values, self.modules)
        self._is_reusable = not has_bound and all(map(_is_copied_as_stock, originals.values))
        self._as_made = [attributes.copy() for attributes in self._attributes]
        self._own = [
            {name: value for name, value in a.items() if name not in _OF_ANY_MODULE}
            for a in self._as_made
        ]
        hooks = [a[kind] for a in self._as_made for kind in HOOKS]
        self._without_hooks = [dictionary for dictionary in hooks if not dictionary]
        self._with_hooks = [dictionary for dictionary in hooks if dictionary]
        self._hooks = self._list_hooks()
        self._parameters = parameters.of(self._as_made)
        self._arriving: list[dict[str, Any]] = []
        self._buffers = buffers.of(self._as_made)
        self._tensors = [a[kind] for a in self._as_made for kind in ("_parameters", "_buffers")]
        self._without_tensors = [dict.fromkeys(members) for members in self._tensors]
        self._children = [a["_modules"] for a in self._as_made]
        self._rnns = [module for module in self.modules if isinstance(module, nn.RNNBase)]
        self._filled = list(filter(None, self._tensors))
        self._none: list[dict[str, Any]] = list(map(dict.fromkeys, self._filled))
        self._num_members = self._count_members()
        self._members = self._list_members()
        self._types = list(map(type, self.modules))
        self._objects = [*self.modules, *self._attributes, *self._tensors, *self._children]
        self._num_references = self._count_references()

    def _give_children(self, originals: _Slots) -> None:
        for members, name, position in originals.of(self._attributes):
            members[name] = self.modules[position]
        for module in self.modules:
            if is_compiled(module):
                module._initialize()  # type: ignore[operator]  # rebinds forward to the replica

    @property
    def root(self) -> Any:
        """The replica of the network itself."""
        return self.modules[0]

    def begin(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        device: torch.device,
        arrivals: Arrivals,
    ) -> None:
        """Gives the modules these parameters, which may be on their way, and buffers."""
        for members, name, position in self._parameters:
            members[name] = parameters[position]
        for members, name, position in self._buffers:
            members[name] = buffers[position]
        events = {id(parameters[i]): event for i, event in arrivals.on(device).items()}
        for attributes in self._attributes if events else ():
            plain = attributes["_parameters"]
            if awaited := [events[id(p)] for p in plain.values() if id(p) in events]:
                attributes["_parameters"] = ArrivingParameters(plain, device, awaited)
                self._arriving.append(attributes)
        for rnn in self._rnns:  # or flatten_parameters() in forward would be that of the original
            rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]

    def join(self) -> None:
        """Give the modules plain dictionaries of parameters, which have arrived."""
        while self._arriving:
            attributes = self._arriving.pop()
            attributes["_parameters"] = attributes["_parameters"].plain

    def may_be_used_again(self) -> bool:
        """Returns whether nobody else can see its modules, which are what they were.

        Activation checkpointing, for one, keeps modules, or dictionaries of them, until backward.
        """
        return (
            self._is_reusable
            and self._count_references() == self._num_references
            and self._list_members() == self._members
            and list(map(type, self.modules)) == self._types
            and not any(self._without_hooks)
            and self._list_hooks() == self._hooks
        )

    def _count_references(self) -> list[int]:
        """Returns how many references there are to modules and their dictionaries, also weak."""
        return [
            *map(sys.getrefcount, self._objects),
            *map(weakref.getweakrefcount, self.modules),
        ]

    def state(self) -> list[dict[str, tuple[Any, int]]]:
        """Returns the attributes of each module, and how long those are that can grow."""
        return [
            {
                name: (value, len(value) if isinstance(value, list | dict | set) else 0)
                for name, value in chain(attributes.items(), attributes["_buffers"].items())
            }
            for attributes in self._attributes
        ]

    def _list_members(self) -> tuple[list[str], list[str], list[Any]]:
        """Returns the names of parameters and buffers, those of children, and the children."""
        return (
            list(chain.from_iterable(self._filled)),
            list(chain.from_iterable(self._children)),
            list(chain.from_iterable(map(dict.values, self._children))),
        )

    def _list_hooks(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._with_hooks)))

    def _count_members(self) -> list[int]:
        return list(map(len, chain(self._attributes, self._tensors)))

    def end(self) -> None:
        """Takes the tensors away, and whatever else a call has left."""
        deque(map(dict.update, self._attributes, self._own), maxlen=0)
        deque(map(dict.update, self._filled, self._none), maxlen=0)
        if self._count_members() != self._num_members:  # there are new ones
            for members, as_made in zip(
                chain(self._attributes, self._tensors),
                chain(self._as_made, self._without_tensors),
                strict=True,
            ):
                members.clear()
                members.update(as_made)


def _shallow_copy(module: nn.Module) -> nn.Module:
    if not _is_copied_as_stock(module):
        replica: nn.Module = module._replicate_for_data_parallel()
        replica._parameters = module._parameters.copy()
        return replica
    copy: nn.Module = type(module).__new__(type(module))
    attributes = copy.__dict__
    attributes.update(module.__dict__, _is_replica=True)
    for kind in _DICTIONARIES:
        attributes[kind] = attributes[kind].copy()
    return copy


def _is_copied_as_stock(module: nn.Module) -> bool:
    stock = nn.Module._replicate_for_data_parallel
    return type(module)._replicate_for_data_parallel is stock


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module is what ``torch.compile(module)`` returns."""
    return "_orig_mod" in module._modules


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
