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
    """Make replicas of a module for each call, and reuse the replicas in later calls.

    Replicas differ from those of ``torch.nn.parallel.replicate``:

    - Their ``parameters()`` are copies of the module's parameters. Torch's replicas have none.
      Replicas on the same device share these copies. A parameter that already is on a replica's
      device is not copied: the replica uses the original.
    - Methods that are registered as hooks, or stored as attributes of a module (such as a replaced
      ``forward``), are bound to the replica.
    - A parameter that no replica used gets no gradient. With torch's replicas, it gets zeros.

    The copies of parameters are differentiable. In backward, the gradients that a replica computes
    are sent to the original parameters in groups, and are added to ``.grad``. A group is sent as
    soon as all of its gradients are computed.

    The first replica uses the original buffers that are on its device, and copies of all other
    buffers. After the call, the values of these copies are copied to the module. The replicas after
    the first have only copies of the buffers, and updates of these copies are lost.

    Attributes:
        copies: the object that makes the copies of the parameters on other devices. Inside a
            ``with`` block of ``copies.shared()``, all calls use the same copies.
    """

    def __init__(self) -> None:
        self.copies = ParameterCopies()
        self._pool: tuple[Blueprint, list[Replica]] | None = None
        """The ``Blueprint`` of the module, and the idle replicas that later calls may use."""

    def __reduce__(self) -> tuple[type[Replicator], tuple[()]]:
        return Replicator, ()  # a copy of the model gets a new Replicator

    def replicate(
        self, network: ModuleT, devices: Sequence[torch.device], homes: Sequence[torch.device] = ()
    ) -> Replicas[ModuleT]:
        """Return a list with one replica of ``network`` for each device.

        Args:
            network: the module to replicate.
            devices: the device of each replica.
            homes: the devices on which the parameters of ``network`` may be. Its buffers must be on
                the first of these devices. If ``homes`` is empty, parameters and buffers may be on
                any device.

        Raises:
            RuntimeError: in each of these cases:

                - A parameter or buffer is on a device that ``homes`` does not allow.
                - The module is scripted, compiled in place or lazy.
                - Inside ``copies.shared()``, parameters have changed since the first call in
                  the block.
        """
        pool = self._pool
        if pool is None or not pool[0].is_of(network):
            self._pool = pool = (Blueprint(network), [])
        blueprint = pool[0]
        if homes:
            check_on_device(blueprint.parameters, *homes)
            check_on_device(blueprint.buffers, homes[0])
        # Replicas wait for all buffers before they run. If parameters were sent before the buffers,
        # the replicas would wait for all parameters, too.
        buffers = list(_buffers_of_replicas(devices, blueprint.buffers))
        copies, arrivals = self.copies.on(devices, blueprint.parameters)
        if blueprint.compiled or Arrivals.are_traced:
            arrivals.wait()
        tensors = [[*copies[d], *own] for d, own in zip(devices, buffers, strict=True)]
        return Replicas(*pool, tensors, arrivals)


def check_on_device(tensors: Iterable[torch.Tensor], *devices: torch.device) -> None:
    """Raise an error unless each tensor is on one of ``devices``.

    Raises:
        RuntimeError: a tensor is on another device. The message begins like the message of
            ``nn.DataParallel``.
    """
    for tensor in tensors:
        if tensor.device not in devices:
            ids = "(device_ids[0])" if len(devices) == 1 else "(device_ids),"
            raise RuntimeError(
                "module must have its parameters and buffers on device "
                f"{', '.join(map(str, devices))} {ids} but found one of them on device: "
                f"{tensor.device}; call module.to('{devices[0]}'), and wrap the module only once"
            )


def _buffers_of_replicas(
    devices: Sequence[torch.device], buffers: Sequence[torch.Tensor]
) -> Iterator[Sequence[torch.Tensor]]:
    """Yield the buffers of each replica, in the order of ``devices``.

    The first replica gets the original buffers that are on its device, and copies of all others.
    Every other replica gets only copies.
    """
    sent = copy_to(devices, buffers)
    for i, device in enumerate(devices):
        # The first replica on each device gets the result of copy_to, and any other replica on the
        # same device gets further copies.
        own = sent.pop(device, buffers)
        if i:
            pairs = zip(own, buffers, strict=True)
            own = [move(one, device, copy=True) if one is other else one for one, other in pairs]
        copy_attributes(buffers, own)
        yield own


class Replicas(list[ModuleT]):
    """A list of the replicas that one call of a model uses.

    The first replica uses the module's own parameters and buffers if they are on the device of this
    replica. It has copies of all other parameters and buffers. The replicas run in the ``with``
    block of ``running()``. If the first replica writes to its copies, the new values are copied to
    the module at the end of this block. To notice such writes, the version counter and the storage
    of each copy are recorded before the call.

    Args:
        blueprint: the ``Blueprint`` of the module.
        waiting: the idle replicas of earlier calls. The replicas of this call are taken from this
            list; if it has too few, new replicas are made. After the call, the replicas that
            may be reused are added to the list.
        tensors: the parameters and buffers of each replica, in the order of ``Blueprint.tensors``.
        arrivals: the CUDA events that mark the end of each copy of a parameter. Some copies may
            still be incomplete.
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
        """Context manager inside which the replicas run.

        At the end of the ``with`` block, values that the first replica has written to its copies of
        parameters and buffers are copied to the module. Then this list is emptied, and those
        replicas that may be reused are kept for the next call. After an exception in the block,
        none of this is done.
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
        """Let the streams that run the replicas wait for all copies of parameters.

        These are the streams that were current when the copies were made.
        """
        self._arrivals.wait()
        for replica in self._replicas:
            replica.stop_waiting()

    __del__ = wait  # for a caller that has not waited

    @torch.no_grad()
    def _bring_home(self) -> None:
        """Copy the values that the first replica has written to its copies back to the module."""
        for original, copy, stamp in self._away:
            # Batch norm's kernels write statistics without incrementing the version of a buffer. So
            # every copy of a buffer counts as written.
            is_written = _stamp(copy) != stamp or not isinstance(original, nn.Parameter)
            if copy.shape != original.shape:
                original.data = move(copy.detach(), original.device)
            elif is_written and original.layout is torch.strided and 0 not in original.stride():
                # Through .data, so that the version stays: backward may still need the tensor,
                # and would raise an error if its version had changed.
                original.data.copy_(copy)


def _stamp(tensor: torch.Tensor) -> tuple[int, torch.UntypedStorage | None]:
    """Return the version counter and the storage of a tensor. Most writes change one of the two."""
    # The storage itself, not its address: once a storage is freed, another may get its address.
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    return (0 if tensor.is_inference() else tensor._version, storage)
