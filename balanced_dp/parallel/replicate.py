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
        return Replicas(*pool, devices, tensors, arrivals)

    @contextlib.contextmanager
    def running(self, replicas: Sequence[nn.Module]) -> Iterator[None]:
        """Context manager that copies what the first replica writes back to the module.

        At its end, the replicas are recycled. It does nothing for replicas of another class.
        """
        if not isinstance(replicas, Replicas):
            yield
            return
        try:
            yield
        finally:
            replicas.wait()
        replicas.bring_home()
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
    """

    def __init__(
        self,
        blueprint: Blueprint,
        waiting: list[Replica],
        devices: Sequence[torch.device],
        tensors: list[list[torch.Tensor]],
        arrivals: Arrivals,
    ) -> None:
        self._waiting, self._arrivals = waiting, arrivals
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
        self._stamps = [_stamp(copy) for _, copy in self._away]

    def wait(self) -> None:
        """Let the streams on which the replicas were made wait for all parameters."""
        self._arrivals.wait()
        for replica in self._replicas:
            replica.stop_waiting()

    __del__ = wait  # if the caller has not

    @torch.no_grad()
    def bring_home(self) -> None:
        """Copy what the first replica wrote to its copies back to the module."""
        for (original, copy), stamp in zip(self._away, self._stamps, strict=True):
            # Batch norm's kernels write statistics without a new version.
            is_written = _stamp(copy) != stamp or not isinstance(original, nn.Parameter)
            if copy.shape != original.shape:
                original.data = move(copy.detach(), original.device)
            elif is_written and original.layout is torch.strided and 0 not in original.stride():
                # Without a new version: backward may need the one that a replica has used.
                original.data.copy_(copy)

    def recycle(self) -> None:
        """Make the replicas available to the next call. The list is empty afterwards."""
        self.clear()
        self._away.clear()
        self._stamps.clear()
        self._waiting.extend(filter(Replica.end, self._replicas))
        self._replicas.clear()


def _stamp(tensor: torch.Tensor) -> tuple[int, torch.UntypedStorage | None]:
    """Return the version and storage of a tensor; most writes change one of them."""
    # The storage itself, since another one may get the address of one that is freed.
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    return (0 if tensor.is_inference() else tensor._version, storage)
