"""Replicate a module on several devices, so that gradients flow back to the original."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from ..errors import warn
from .arrivals import Arrivals
from .coalesced_copy import Copies, copy_to
from .deferred_gradients import accumulate
from .move import move
from .parameter_copies import ParameterCopies, copy_attributes
from .replica import Replica
from .replica_pool import ReplicaPool
from .written_state import SetAttributes, WrittenState

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Replicator:
    """Replicate a module for each call, and recycle the replicas.

    Replicas differ from those of ``torch.nn.parallel.replicate``:

    - Their ``parameters()`` are the copies. Replicas on one device share them, and on the module's
      own device they are the parameters themselves.
    - Methods that are hooks or stored in an instance (its own ``forward``, for example) are bound
      to the replica.
    - A parameter that was not used gets no gradient rather than zeros.

    Parameters are copied differentiably: backward adds the gradients of each replica to those of
    the parameters as soon as a bucket of them is complete. The first replica shares the buffers on
    its device, so that in-place updates are kept; every other replica has copies of its own.

    Attributes:
        copies: the parameters on other devices.
    """

    def __init__(self) -> None:
        self.copies = ParameterCopies()
        self._pool: ReplicaPool | None = None
        self._tensors: list[int] = []
        """The ids of the buffers and parameters that ``_written_silently`` is about."""
        self._written_silently: dict[bool, frozenset[int]] = {}
        """By grad mode, the result of ``WrittenState.write_back``."""
        self._has_inner_backward: bool | None = None
        """Whether forward runs a backward pass of its own; None before there were copies to see."""
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
        if pool is None or not pool.is_of(network):
            self._pool = pool = ReplicaPool(network)
            tensors = [*map(id, pool.buffers), *map(id, pool.parameters)]
            if tensors != self._tensors:
                self._tensors, self._written_silently = tensors, {}
                self._has_inner_backward = None
        _check_homes(pool.parameters, pool.buffers, homes)
        buffers = _buffers_of_replicas(devices, pool.buffers)
        parameters, arrivals = self.copies.on(devices, pool.parameters)
        if pool.is_compiled or Arrivals.are_traced:
            arrivals.join()
        replicas = []
        for device, own in zip(devices, buffers, strict=True):
            replica = pool.take()
            replica.begin(parameters[device], own, device, arrivals)
            replicas.append(replica)
        first = devices[0]
        has_originals = parameters[first] is pool.parameters and buffers[0] is pool.buffers
        return Replicas(pool, replicas, parameters, arrivals, has_originals)

    @contextlib.contextmanager
    def running(self, network: nn.Module, replicas: Sequence[nn.Module]) -> Iterator[None]:
        """Context manager that keeps what replicas write to parameters and buffers inside it.

        At its end, replicas that a ``Replicator`` has made are recycled.

        Warns:
            BalanceWarning: once for each attribute that forward sets, found in the first, second,
                fourth, eighth call and so on; and once for each parameter that several replicas
                write, found in the first call with gradients and the first without.
        """
        has_gradients = torch.is_grad_enabled()
        ours = replicas if isinstance(replicas, Replicas) else None
        state = WrittenState(
            network,
            replicas,
            self._written_silently.get(has_gradients),
            has_originals=ours is not None and ours.has_originals,
        )
        attributes = (
            SetAttributes(replicas[0]) if ours is not None and ours.checks_attributes else None
        )
        try:
            yield
        finally:
            if ours is not None:
                ours.join()
                if not has_gradients and (
                    self._has_inner_backward is not False or ours.ends_have_gradients()
                ):
                    found = ours.accumulate_gradients()
                    self._has_inner_backward = self._has_inner_backward or found
        self._written_silently[has_gradients] = state.write_back()
        name = type(network).__name__
        self._warn(
            f"{name} writes {{}} in forward, which replicas on one device share, so each of them "
            "writes it; name each device once, unless the order and number of writes make no "
            "difference",
            state.written_by_several(),
        )
        self._warn(
            f"{name} writes {{}} in forward, by the samples of each device, and what the first "
            "replica writes is kept; write it outside, from the whole batch (an embedding's "
            "max_norm, for example)",
            state.written_differently(),
        )
        if attributes is not None:
            self._warn(
                f"{name} sets {{}} in forward, but a call runs copies of the module, so this is "
                "lost, or is that of a chunk; return it from forward (nn.DataParallel loses it, "
                "too)",
                attributes.names(),
            )
            if attributes.have_other_dictionaries():
                self.release()
            del attributes  # it refers to modules
        if ours is not None:
            ours.recycle()

    def _warn(self, message: str, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._warned]
        self._warned.update(new)
        if new:
            warn(message.format(", ".join(new)))

    def release(self) -> None:
        """Release the replicas that wait for the next call."""
        self._pool = None


def check_on_device(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Check that all tensors are on ``device``.

    Raises:
        RuntimeError: a tensor is elsewhere; the message is that of ``nn.DataParallel``.
    """
    for tensor in tensors:
        if tensor.device != device:
            raise RuntimeError(
                "module must have its parameters and buffers "
                f"on device {device} (device_ids[0]) but found one of "
                f"them on device: {tensor.device}"
            )


def _check_homes(
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    homes: Sequence[torch.device],
) -> None:
    if not homes:
        return
    check_on_device(buffers if len(homes) > 1 else chain(parameters, buffers), homes[0])
    elsewhere = {parameter.device for parameter in parameters}.difference(homes)
    if elsewhere:
        raise RuntimeError(
            f"module must have its parameters on {', '.join(map(str, homes))} (device_ids), "
            f"but found one of them on device: {elsewhere.pop()}"
        )


def _buffers_of_replicas(
    devices: Sequence[torch.device], buffers: Sequence[torch.Tensor]
) -> list[Sequence[torch.Tensor]]:
    """Return the buffers of each replica: copies, unless the first has them on its device."""
    homes = {buffer.device for buffer in buffers}
    away = [device for device in dict.fromkeys(devices) if homes - {device}]
    sent = copy_to(away, buffers)
    have_attributes = any(map(vars, buffers))
    copies: list[Sequence[torch.Tensor]] = []
    for device in devices:
        # The first replica on a device gets what was sent, another one a copy of the original.
        own = sent.pop(device, buffers)
        if copies:
            pairs = zip(own, buffers, strict=True)
            own = [move(one, device, copy=True) if one is other else one for one, other in pairs]
        if have_attributes:
            for buffer, copy in zip(buffers, own, strict=True):
                copy_attributes(buffer, copy)
        copies.append(own)
    return copies


class Replicas(list[ModuleT]):
    """The replicas of one call.

    Args:
        pool: the pool that they return to.
        replicas: the replicas, as the pool has made them.
        parameters: those of the replicas on each device.
        arrivals: the parameters that are on their way.
        has_originals: whether the first replica has no copies of parameters and buffers.

    Attributes:
        has_originals: as given.
        checks_attributes: whether to look for attributes that forward sets in this call.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        replicas: list[Replica],
        parameters: Copies,
        arrivals: Arrivals,
        has_originals: bool,
    ) -> None:
        super().__init__(replica.modules[0] for replica in replicas)
        self._pool = pool
        self._replicas = replicas
        self._parameters = parameters
        self._arrivals = arrivals
        self.has_originals = has_originals
        pool.num_calls = num_calls = pool.num_calls + 1  # other threads may count, too
        self.checks_attributes = num_calls.bit_count() == 1  # the first, second, fourth, eighth ...

    def join(self) -> None:
        """Let the streams on which the replicas were made wait for all parameters."""
        self._arrivals.join()
        for replica in self._replicas:
            replica.join()

    def ends_have_gradients(self) -> bool:
        """Return whether the first or the last copy of a trained parameter has a gradient.

        To look at all would take as long as a tenth of a small model's evaluation.
        """
        for copies in self._parameters.values():
            if copies is self._pool.parameters:
                continue
            for ordered in (copies, reversed(copies)):
                end = next((copy for copy in ordered if copy.requires_grad), None)
                if end is not None and end.is_leaf and end.grad is not None:
                    return True
        return False

    def accumulate_gradients(self) -> bool | None:
        """Accumulate into the parameters what a backward pass in forward has left in their copies.

        Return whether there was anything, None if there are no copies. With gradients enabled
        around the call, copies are no leaves, and autograd does this.
        """
        found = None
        for copies in self._parameters.values():
            if copies is self._pool.parameters:
                continue
            pairs = []
            for original, copy in zip(self._pool.parameters, copies, strict=True):
                if copy is not original and copy.is_leaf and copy.grad is not None:
                    pairs.append((original, move(copy.grad, original.device)))
                    copy.grad = None
            accumulate(pairs)
            found = found or bool(pairs)
        return found

    def __del__(self) -> None:
        self._arrivals.join()  # if the caller has not

    def recycle(self) -> None:
        """Make the replicas available to the next call. The list is empty afterwards."""
        self.clear()
        self._parameters = {}
        while self._replicas:
            self._pool.recycle(self._replicas.pop())
