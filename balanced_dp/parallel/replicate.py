"""Replicate a module on several devices, so that gradients flow back to the original."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import warn
from .copies import Arrivals, copy_to
from .replica import Blueprint, Replica
from .scatter import move
from .shared_weights import ParameterCopies, copy_attributes

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_State = dict[str, tuple[Any, dict[Any, Any]]]
"""The attributes of a module, each with the entries of its list or dictionary."""

_PLAIN = (int, float, str)

_DIFFERENT = (
    "writes {} in forward, differently on each device, and the writes of the first replica are "
    "kept; write it outside, from the whole batch (an embedding's max_norm, for example)"
)
_LOST = (
    "sets {} in forward, but a call runs copies of the module, so its value is lost, or covers "
    "one chunk; return it from forward (nn.DataParallel loses it, too)"
)


class Replicator:
    """Replicate a module for each call, and recycle the replicas.

    Replicas differ from those of ``torch.nn.parallel.replicate``:

    - Their ``parameters()`` are the copies. Replicas on one device share them, and on the module's
      own device they are the parameters themselves.
    - Methods that are hooks or stored in an instance (its own ``forward``, for example) are bound
      to the replica.
    - A parameter that was not used gets no gradient rather than zeros.

    Parameters are copied differentiably: backward adds the gradients of each replica to ``.grad``
    of the parameters as soon as a bucket of them is complete. The first replica shares the buffers
    on its device, so that in-place updates are kept; every other replica has copies of its own.

    Attributes:
        copies: the parameters on other devices.
    """

    def __init__(self) -> None:
        self.copies = ParameterCopies()
        self._pool: tuple[Blueprint, list[Replica]] | None = None
        """The blueprint of the module, and replicas that wait for the next call."""
        self._num_calls = 0
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[type[Replicator], tuple[()]]:
        return Replicator, ()  # a copy of the model makes its own

    def replicate(
        self,
        network: ModuleT,
        devices: Sequence[torch.device],
        homes: Sequence[torch.device] = (),
    ) -> Replicas[ModuleT]:
        """Return one replica for each device.

        Args:
            network: the module.
            devices: the devices of the replicas.
            homes: the devices on which its parameters must be; the buffers must be on the first.
                If empty, both may be anywhere.

        Raises:
            RuntimeError: a parameter or buffer is elsewhere, the module cannot be replicated, or a
                parameter was changed inside ``copies.shared()``.
        """
        pool = self._pool
        if pool is None or not pool[0].is_of(network):
            self._pool = pool = (Blueprint(network), [])
        blueprint = pool[0]
        if homes:
            check_on_device(blueprint.parameters, *homes)
            check_on_device(blueprint.buffers, homes[0])
        copies, arrivals = self.copies.on(devices, blueprint.parameters)
        if blueprint.compiled or Arrivals.are_traced:
            arrivals.wait()
        pairs = zip(devices, _buffers_of_replicas(devices, blueprint.buffers), strict=True)
        tensors = [[*copies[device], *own] for device, own in pairs]
        self._num_calls += 1
        looks = self._num_calls.bit_count() == 1  # in the first, second, fourth call and so on
        return Replicas(*pool, devices, tensors, arrivals, looks)

    @contextlib.contextmanager
    def running(self, network: nn.Module, replicas: Sequence[nn.Module]) -> Iterator[None]:
        """Context manager that copies what the first replica writes back to the module.

        At its end, the replicas are recycled. It does nothing for replicas of another class.

        Warns:
            BalanceWarning: once for each attribute that forward sets, and for each parameter or
                buffer that replicas write differently. Calls 1, 2, 4, 8, ... look for them.
        """
        if not isinstance(replicas, Replicas):
            yield
            return
        try:
            yield
        finally:
            replicas.wait()
        written = replicas.bring_home()
        for message, names in replicas.found(written).items():
            new = [name for name in dict.fromkeys(names) if name not in self._warned]
            self._warned.update(new)
            if new:
                warn(f"{type(network).__name__} {message.format(', '.join(new))}")
        replicas.recycle()


def check_on_device(tensors: Iterable[torch.Tensor], *devices: torch.device) -> None:
    """Check that all tensors are on one of the devices.

    Raises:
        RuntimeError: a tensor is elsewhere; the message begins like ``nn.DataParallel``'s.
    """
    for tensor in tensors:
        if tensor.device not in devices:
            ids = "(device_ids[0])" if len(devices) == 1 else "(device_ids),"
            raise RuntimeError(
                "module must have its parameters and buffers on device "
                f"{', '.join(map(str, devices))} {ids} but found one of them on device: "
                f"{tensor.device}; move the module there, and wrap it only once"
            )


def _buffers_of_replicas(
    devices: Sequence[torch.device], buffers: Sequence[torch.Tensor]
) -> list[Sequence[torch.Tensor]]:
    """Return the buffers of each replica: copies, unless the first has them on its device."""
    sent = copy_to([*dict.fromkeys(devices)], buffers)
    copies: list[Sequence[torch.Tensor]] = []
    for device in devices:
        # The first replica on a device gets what was sent, another one copies of the originals.
        own = sent.pop(device, buffers)
        if copies:
            pairs = zip(own, buffers, strict=True)
            own = [move(one, device, copy=True) if one is other else one for one, other in pairs]
        copy_attributes(buffers, own)
        copies.append(own)
    return copies


class Replicas(list[ModuleT]):
    """The replicas of one call and their state before they ran, to find the writes of forward.

    The first replica shares the tensors that the module has on its device, and has copies of all
    others. ``bring_home`` copies its writes to these back.

    Args:
        blueprint: the blueprint of the module.
        waiting: replicas of other calls, to which these return.
        devices: the devices of the replicas.
        tensors: the tensors of each replica, in the order of the blueprint.
        arrivals: the parameters that are on their way.
        looks: whether to record the versions of all tensors and the contents of lists and
            dictionaries, instead of only the versions of the tensors that are brought home.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        waiting: list[Replica],
        devices: Sequence[torch.device],
        tensors: list[list[torch.Tensor]],
        arrivals: Arrivals,
        looks: bool,
    ) -> None:
        self._blueprint, self._waiting = blueprint, waiting
        self._tensors, self._arrivals = tensors, arrivals
        self._device_keys = {*devices, *map(str, devices)}
        self._replicas: list[Replica] = []
        for own, device in zip(tensors, devices, strict=True):
            try:
                replica = waiting.pop()
            except IndexError:  # none waits, or another thread has just taken the last one
                replica = Replica(blueprint)
            replica.begin(own, device, arrivals)
            self._replicas.append(replica)
        super().__init__(replica.modules[0] for replica in self._replicas)
        pairs = zip(blueprint.tensors, tensors[0], strict=True)
        self._away = [(original, copy) for original, copy in pairs if copy is not original]
        noted = dict.fromkeys(chain(*tensors)) if looks else (copy for _, copy in self._away)
        self._stamps = [(tensor, _stamp(tensor)) for tensor in noted]
        self._states = [self._state(m) for m in (blueprint.modules if looks else ())]

    def wait(self) -> None:
        """Let the streams on which the replicas were made wait for all parameters."""
        self._arrivals.wait()
        for replica in self._replicas:
            replica.stop_waiting()

    __del__ = wait  # if the caller has not

    @torch.no_grad()
    def bring_home(self) -> set[int]:
        """Copy the writes of the first replica to copies of tensors back to the module.

        Returns:
            The identities of the tensors that replicas have written to, as far as it looks.
        """
        written = {id(tensor) for tensor, stamp in self._stamps if _stamp(tensor) != stamp}
        for original, copy in self._away:
            # Batch norm's kernels write statistics without a new version.
            is_written = id(copy) in written or not isinstance(original, nn.Parameter)
            if copy.shape != original.shape:
                original.data = move(copy.detach(), original.device)
            elif is_written and original.layout is torch.strided and 0 not in original.stride():
                # Without a new version: backward may need the one that a replica has used.
                original.data.copy_(copy)
        return written

    def _state(self, module: nn.Module) -> _State:
        """Return attributes and buffers of a module, and the contents of lists and dictionaries."""
        state: _State = {}
        # Code around torch's modules sets their weights, and these hold no state of their own.
        if type(module).__module__.startswith("torch."):
            return state
        for name, value in chain(vars(module).items(), module._buffers.items()):
            # Other private names are caches, or flags: transformers' hooks set some at first.
            is_state = type(value) in (int, float) if name[0] == "_" else not callable(value)
            if is_state and name != "training":
                # A dictionary may have an entry for each device.
                items = dict(enumerate(value)) if isinstance(value, list) else value
                own = items.items() if isinstance(items, dict) else ()
                state[name] = value, {k: v for k, v in own if k not in self._device_keys}
        return state

    def found(self, written: set[int]) -> dict[str, list[str]]:
        """Return the names that forward has written and set, by the warning about them."""
        found: dict[str, list[str]] = {_DIFFERENT: [], _LOST: []}
        if not self._states:
            return found
        path, replica = self._blueprint.path, self._replicas[0]
        for index, _, name, position in self._blueprint.places if written else ():
            first, *others = own = [tensors[position] for tensors in self._tensors]
            is_written = not written.isdisjoint(map(id, own))
            if is_written and not all(_are_equal(first, copy) for copy in others):
                found[_DIFFERENT].append(path(index, name))
        # Members that are tied or exchanged are not lost.
        members = set(map(id, (None, *replica.modules, *self._tensors[0])))
        for index, original in enumerate(self._blueprint.modules):
            copy = replica.modules[index]
            registered = {**copy._modules, **copy._parameters}.items()
            names = [name for name, value in registered if id(value) not in members]
            for module in (original, copy):
                state = self._state(module).items()
                after = {k: pair for k, pair in state if id(pair[0]) not in members}
                names += _lost(type(original), self._states[index], after)
            found[_LOST] += [path(index, name) for name in names]
        return found

    def recycle(self) -> None:
        """Make the replicas available to the next call. The list is empty afterwards."""
        self.clear()
        self._tensors.clear()
        self._stamps.clear()
        self._waiting.extend(filter(Replica.end, self._replicas))
        self._replicas.clear()


def _lost(kind: type, before: _State, after: _State) -> list[str]:
    """Return the names of attributes that forward has set, except for caches.

    A cache is a new tensor with dimensions and without a graph. A number that is set along with one
    is its length or the like.

    Args:
        kind: the class of the module.
        before: its state before the call.
        after: its state after the call.
    """
    lost, numbers, has_cache = [], [], False
    for name, (value, entries) in after.items():
        old, old_entries = before.get(name, (None, {}))
        if value is old:
            if any(v is not old_entries.get(k) for k, v in entries.items()):
                lost.append(name)
        elif isinstance(value, _PLAIN) and isinstance(old, _PLAIN):
            numbers += [name] if value != old else []
        elif not isinstance(getattr(kind, name, None), cached_property):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            shapes = [getattr(one, "shape", None) for one in (old, value)]
            is_update = shapes[0] == shapes[1] is not None
            if is_update or any(tensor.requires_grad or not tensor.dim() for tensor in tensors):
                lost.append(name)
            has_cache |= bool(tensors)
    return lost if has_cache else lost + numbers


def _stamp(tensor: torch.Tensor) -> tuple[int, torch.UntypedStorage | None]:
    """Return the version and storage of a tensor; most writes change one of them."""
    # The storage itself, since another one may get the address of one that is freed.
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    return (0 if tensor.is_inference() else tensor._version, storage)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal up to rounding, or cannot be compared."""
    try:
        one, other = one.detach().cpu(), other.detach().cpu()
        return one.shape == other.shape and torch.allclose(one.double(), other.double())
    except RuntimeError:  # sparse tensors, and symbolic ones, which have no values
        return True
