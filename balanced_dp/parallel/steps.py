"""The steps of a call, as methods of ``nn.DataParallel`` for devices of any type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..devices import Device, default_device_type, resolve_device, resolve_devices
from .gather import ScalarOutputs, gather
from .losses.join import ChunkLosses, OutputHistory
from .parallel_apply import Workers, parallel_apply
from .replicate import Replicator
from .scatter import scatter_arguments

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class DataParallelSteps(nn.DataParallel[ModuleT]):
    """``nn.DataParallel`` on devices of any type: its attributes, and its four steps.

    ``BalancedDataParallel.forward`` takes one step after the other. They have the arguments of
    ``nn.DataParallel``'s and further ones with defaults. ``forward`` passes all of them, so an
    override has to accept them and hand them on. Their ``device_ids`` and ``chunk_sizes`` are those
    of the devices with samples.

    Args:
        device_ids: devices as ints (of the accelerator), strings or ``torch.device``; None means
            all accelerators, or all emulated devices.
        output_device: where outputs are gathered; by default the first device.

    Raises:
        ArgumentError, ArgumentTypeError: a device does not exist.
    """

    # nn.DataParallel annotates ints: a device that is not an accelerator has no index.
    device_ids: list[int | torch.device]  # type: ignore[assignment]
    output_device: int | torch.device | None  # type: ignore[assignment]
    src_device_obj: torch.device | None  # type: ignore[assignment]
    # BalancedDataParallel sets these.
    module: ModuleT
    dim: int
    broadcast: frozenset[str]
    split_inputs: frozenset[str]
    scalar_outputs: ScalarOutputs
    spread: bool

    def __init__(self, device_ids: Sequence[Device] | None, output_device: Device | None) -> None:
        # nn.DataParallel.__init__ refuses the CPU, and may advise to leave out the smaller GPU.
        nn.Module.__init__(self)
        self._device_type = default_device_type()
        devices = resolve_devices(device_ids, self._device_type)
        self.device_ids = [self._id_of(device) for device in devices]
        self.src_device_obj = devices[0] if devices else None
        self.output_device = self.device_ids[0] if devices else None
        if devices and output_device is not None:
            self.output_device = self._id_of(resolve_device(output_device, self._device_type))
        self._history = OutputHistory()
        self._replicator = Replicator()
        self._workers = Workers()

    @property
    def devices(self) -> list[torch.device]:
        """The devices of ``device_ids``, in order."""
        return [self._device_of(device_id) for device_id in self.device_ids]

    def _id_of(self, device: torch.device) -> int | torch.device:
        """Return what nn.DataParallel calls a device: its index, if it is an accelerator."""
        return device.index if device.type == self._device_type else device

    def _device_of(self, device_id: int | torch.device | None) -> torch.device:
        if isinstance(device_id, torch.device):
            return device_id
        assert self._device_type is not None and device_id is not None
        return torch.device(self._device_type, device_id)

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[int | torch.device],
        chunk_sizes: Sequence[int] | None = None,
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Return positional and keyword arguments for each device.

        With ``chunk_sizes`` of None nothing is cut: each device gets every tensor whole.
        """
        kwargs = kwargs or {}
        arguments = scatter_arguments(
            self.module.forward,
            inputs,
            kwargs,
            [self._device_of(device_id) for device_id in device_ids],
            chunk_sizes,
            self.dim,
            self.broadcast,
            self.split_inputs,
            self._history.warned,
        )
        return [args for args, _ in arguments], [named for _, named in arguments]

    def replicate(self, module: ModuleT, device_ids: Sequence[int | torch.device]) -> list[ModuleT]:
        """Return a replica of ``module`` for each device."""
        devices = [self._device_of(device_id) for device_id in device_ids]
        homes = self.devices if self.spread else self.devices[:1]
        return self._replicator.replicate(module, devices, homes)

    def parallel_apply(
        self,
        replicas: Sequence[ModuleT],
        inputs: Sequence[Any],
        kwargs: Sequence[dict[str, Any]],
        device_ids: Sequence[int | torch.device] | None = None,
        chunk_sizes: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return each replica's output for its arguments; by default on the first devices."""
        ids = self.device_ids[: len(replicas)] if device_ids is None else device_ids
        devices = [self._device_of(device_id) for device_id in ids]
        arguments = list(zip(inputs, kwargs, strict=True))
        return parallel_apply(replicas, arguments, devices, chunk_sizes, self._workers)

    def gather(
        self,
        outputs: Sequence[Any],
        output_device: int | torch.device | None,
        losses: ChunkLosses | None = None,
    ) -> Any:
        """Return the outputs joined on ``output_device``; ``losses`` joins the 0-dim ones."""
        sizes = None if losses is None else losses.sizes
        device = self._device_of(output_device)
        return gather(outputs, device, self.dim, self.scalar_outputs, sizes, losses)

    def close(self) -> None:
        """End the worker threads and drop the replicas. A later call makes new ones."""
        self._workers.close()
        self._replicator.release()
