"""Replicate a module on several devices, so that gradients flow back to the original."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from .copies import Arrivals, copy_to
from .replica import Blueprint, Replica
from .scatter import move
from .shared_weights import ParameterCopies, copy_attributes

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Replicator:
    """Replicate a module for each call, and recycle the replicas.

    Replicas differ from those of ``torch.nn.parallel.replicate``:

    - Their ``parameters()`` are copies of the module's parameters. Replicas on one device share
      these copies. Replicas on the module's own device have the parameters themselves.
    - Methods that are registered as hooks, or stored as attributes of a module (such as a replaced
      ``forward``), are bound to the replica.
    - A parameter that was not used gets no gradient; torch's replicas give it zeros.

    Parameters are copied differentiably: backward adds the gradients of each replica to ``.grad``
    of the parameters as soon as a bucket of gradients is complete. The first replica shares the
    module's buffers if they are on its device, so that in-place updates are kept; every other
    replica has copies of the buffers.

    Attributes:
        copies: the parameters on other devices.
    """

    def __init__(self) -> None:
        self.copies = ParameterCopies()
        self._pool: tuple[Blueprint, list[Replica]] | None = None
        """The blueprint of the module, and replicas that wait for the next call."""

    def __reduce__(self) -> tuple[type[Replicator], tuple[()]]:
        return Replicator, ()  # a copy of the model gets a new one

    def replicate(
        self, network: ModuleT, devices: Sequence[torch.device], homes: Sequence[torch.device] = ()
    ) -> Replicas[ModuleT]:
        """Return one replica for each device.

        Args:
            network: the module.
            devices: the devices of the replicas.
            homes: the devices that may hold its parameters; the first must hold its buffers. If
                empty, parameters and buffers may be anywhere.

        Raises:
            RuntimeError: a parameter or buffer is not where ``homes`` requires it, the module
                cannot be replicated, or a parameter was changed inside ``copies.shared()``.
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
        return Replicas(*pool, tensors, arrivals)


def check_on_device(tensors: Iterable[torch.Tensor], *devices: torch.device) -> None:
    """Check that each tensor is on one of the devices.

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
) -> Iterator[Sequence[torch.Tensor]]:
    """Yield each replica's buffers; only the first shares the originals on its device."""
    sent = copy_to([*dict.fromkeys(devices)], buffers)
    for i, device in enumerate(devices):
        # The first replica on each device gets what was sent, the others get further copies.
        own = sent.pop(device, buffers)
        if i:
            pairs = zip(own, buffers, strict=True)
            own = [move(one, device, copy=True) if one is other else one for one, other in pairs]
        copy_attributes(buffers, own)
        yield own


class Replicas(list[ModuleT]):
    """The replicas of one call, and their state before the call, to find what forward wrote.

    The first replica shares the module's tensors that are on the replica's device, and has copies
    of all other tensors. ``running`` copies to the module what this replica writes there.

    Args:
        blueprint: the blueprint of the module.
        waiting: the list of idle replicas, to which these are added after the call.
        tensors: the tensors of each replica, in the order of the blueprint.
        arrivals: the events of the parameters that are still on their way.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        waiting: list[Replica],
        tensors: list[list[torch.Tensor]],
        arrivals: Arrivals,
    ) -> None:
        self._waiting, self._arrivals = waiting, arrivals
        self._replicas: list[Replica] = []
        for own in tensors:
            try:
                replica = waiting.pop()
            except IndexError:  # none waits, or another thread has just taken the last one
                replica = Replica(blueprint)
            replica.begin(own, arrivals)
            self._replicas.append(replica)
        super().__init__(replica.modules[0] for replica in self._replicas)
        pairs = zip(blueprint.tensors, tensors[0], strict=True)
        self._away = [(one, copy, _stamp(copy)) for one, copy in pairs if copy is not one]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager in which the replicas run.

        At its end, it copies to the module what the first replica has written, and makes the
        replicas available to the next call. The list is empty afterwards.
        """
        try:
            yield
        finally:
            self.wait()
        self._bring_home()
        self.clear()
        self._away.clear()
        self._waiting.extend(filter(Replica.end, self._replicas))
        self._replicas.clear()

    def wait(self) -> None:
        """Let the streams on which the replicas were made wait for all parameters."""
        self._arrivals.wait()
        for replica in self._replicas:
            replica.stop_waiting()

    __del__ = wait  # for a caller that has not waited

    @torch.no_grad()
    def _bring_home(self) -> None:
        """Copy to the module what the first replica wrote to its copies of tensors."""
        for original, copy, stamp in self._away:
            # Batch norm's kernels write statistics without incrementing the version of a buffer.
            is_written = _stamp(copy) != stamp or not isinstance(original, nn.Parameter)
            if copy.shape != original.shape:
                original.data = move(copy.detach(), original.device)
            elif is_written and original.layout is torch.strided and 0 not in original.stride():
                # Through .data, so that the version stays: backward may still need the tensor,
                # and would raise an error if its version had changed.
                original.data.copy_(copy)


def _stamp(tensor: torch.Tensor) -> tuple[int, torch.UntypedStorage | None]:
    """Return the version and storage of a tensor; most writes change one of them."""
    # The storage itself, not its address, which a new storage may get after this one is freed.
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    return (0 if tensor.is_inference() else tensor._version, storage)
