"""The steps of a call, as methods of ``nn.DataParallel`` for devices of any type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from ..devices import Device, default_device_type, resolve_device, resolve_devices
from ..split import as_integer
from .call_inputs import Arguments, check_paths
from .gather import ScalarOutputs, check_scalar_outputs, gather
from .homes import on_one_device, spread_parameters
from .losses.join import ChunkLosses, OutputHistory
from .losses.weight import check_loss_weight
from .parallel_apply import Workers, parallel_apply
from .per_device import PerDevice
from .replicate import Replicator
from .scatter import scatter

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class DataParallelSteps(nn.DataParallel[ModuleT]):
    """The attributes and the four steps of ``nn.DataParallel``, on devices of any type.

    ``BalancedDataParallel.forward`` calls one step after the other. Each has the arguments of the
    method of ``nn.DataParallel``, and further ones with defaults. ``forward`` passes all of them,
    so an override must accept and pass them on. ``device_ids`` and ``chunk_sizes`` leave out
    devices without samples.

    Args and Raises: see ``BalancedDataParallel``.
    """

    # nn.DataParallel annotates ints: a device that is not an accelerator has no index.
    device_ids: list[int | torch.device]  # type: ignore[assignment]
    output_device: int | torch.device | None  # type: ignore[assignment]
    src_device_obj: torch.device | None  # type: ignore[assignment]

    def __init__(
        self,
        module: ModuleT,
        device_ids: Sequence[Device] | None,
        output_device: Device | None,
        dim: int,
        *,
        gather: bool,
        broadcast: Iterable[str],
        split: Iterable[str],
        scalar_outputs: ScalarOutputs,
        loss_weight: Callable[..., Any] | str | None,
        spread: bool,
    ) -> None:
        # nn.DataParallel.__init__ refuses the CPU, and may advise to leave out the smaller GPU.
        nn.Module.__init__(self)
        check_scalar_outputs(scalar_outputs)
        check_loss_weight(loss_weight, scalar_outputs)
        device_type = default_device_type()
        devices = resolve_devices(device_ids, device_type)
        self._device_type = device_type or ""
        self.device_ids = [self._id_of(device) for device in devices]
        self.src_device_obj = devices[0] if devices else None
        self.output_device = self.device_ids[0] if devices else None
        if devices and output_device is not None:
            self.output_device = self._id_of(resolve_device(output_device, device_type))
        self.module = module
        self.dim = as_integer("dim", dim)
        self.gathers_outputs = gather
        self.broadcast = check_paths("broadcast", broadcast, module.forward)
        self.split_inputs = check_paths("split", split, module.forward)
        self.scalar_outputs: ScalarOutputs = scalar_outputs
        self.loss_weight = loss_weight
        self.spread = spread
        self._history = OutputHistory()
        self._replicator = Replicator()
        self._workers = Workers()

    @property
    def devices(self) -> list[torch.device]:
        """The devices of ``device_ids``, in order."""
        return self._devices_of(self.device_ids)

    def _id_of(self, device: torch.device) -> int | torch.device:
        """Return what nn.DataParallel calls a device: its index, if it is an accelerator."""
        return device.index if device.type == self._device_type else device

    def _devices_of(self, ids: Iterable[int | torch.device]) -> list[torch.device]:
        return [torch.device(self._device_type, i) if isinstance(i, int) else i for i in ids]

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[int | torch.device],
        chunk_sizes: Sequence[int] | None = None,
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Return positional and keyword arguments for each device.

        If ``chunk_sizes`` is None, each device gets every tensor whole.
        """
        devices = self._devices_of(device_ids)
        arguments = self._scattered(inputs, kwargs or {}, devices, chunk_sizes)
        return [args for args, _ in arguments], [keywords for _, keywords in arguments]

    def _scattered(
        self,
        inputs: Sequence[Any],
        kwargs: Mapping[str, Any],
        devices: Sequence[torch.device],
        chunk_sizes: Sequence[int] | None,
    ) -> list[Arguments]:
        return scatter(
            self.module.forward,
            inputs,
            kwargs,
            devices,
            chunk_sizes,
            self.dim,
            self.broadcast,
            self.split_inputs,
            self._history.warned,
        )

    def replicate(self, module: ModuleT, device_ids: Sequence[int | torch.device]) -> list[ModuleT]:
        """Return a replica of ``module`` for each device."""
        homes = self.devices if self.spread else self.devices[:1]
        return self._replicator.replicate(module, self._devices_of(device_ids), homes)

    def parallel_apply(
        self,
        replicas: Sequence[ModuleT],
        inputs: Sequence[Any],
        kwargs: Sequence[dict[str, Any]],
        device_ids: Sequence[int | torch.device] | None = None,
        chunk_sizes: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return the output of each replica; by default they run on the first devices."""
        devices = self._devices_of(device_ids or self.device_ids[: len(replicas)])
        arguments = list(zip(inputs, kwargs, strict=True))
        return parallel_apply(replicas, arguments, devices, chunk_sizes, self._workers)

    def gather(
        self,
        outputs: Sequence[Any],
        output_device: int | torch.device,
        losses: ChunkLosses | None = None,
    ) -> Any:
        """Return the outputs joined on ``output_device``; ``losses`` joins the 0-dim ones."""
        sizes = None if losses is None else losses.chunk_sizes
        [device] = self._devices_of([output_device])
        return gather(outputs, device, self.dim, self.scalar_outputs, sizes, losses)

    def _losses(self, chunk_sizes: Sequence[int] | None) -> ChunkLosses:
        return ChunkLosses(
            self._history,
            self.module.forward,
            chunk_sizes,
            self.dim,
            self.loss_weight,
            is_auto=self.scalar_outputs == "auto",
        )

    def _joined(
        self, outputs: Sequence[Any], devices: Sequence[torch.device], losses: ChunkLosses
    ) -> Any:
        """Gather the outputs, or leave them on ``devices``."""
        output_device = devices[0] if self.output_device is None else self.output_device
        if self.gathers_outputs:
            return self.gather(outputs, output_device, losses)
        [output_device] = self._devices_of([output_device])
        return PerDevice(
            losses.in_place(outputs, output_device),
            devices,
            losses.chunk_sizes,
            output_device=output_device,
            dim=self.dim,
            scalar_outputs=self.scalar_outputs,
            history=self._history,
            workers=self._workers,
        )

    def close(self) -> None:
        """End the worker threads and drop the replicas. A later call makes new ones."""
        self._workers.close()
        self._replicator.release()

    def shared_weights(self) -> AbstractContextManager[None]:
        """Share one weight broadcast and one gradient reduction across the block.

        For loops that do not change the weights: evaluation and gradient accumulation. Each device
        adds up the gradients of its own chunks; when the block ends, they are added to those of the
        parameters. Until then ``.grad`` cannot be used: call ``zero_grad()`` before the block, clip
        gradients and step the optimizer after it. Parameters with hooks are exempt: their gradients
        arrive in each backward pass. Other devices do not see writes to weights through ``.data``,
        or to frozen ones by the module itself, before the block ends.

        Raises:
            RuntimeError: a gradient was used in the block, or replaced, which is found at its end;
                or, on a call, a parameter that requires grad was changed, or one was replaced,
                frozen or unfrozen.

        Examples:
            >>> from balanced_dp import BalancedDataParallel
            >>> model = BalancedDataParallel(1, torch.nn.Linear(4, 1), ["cpu", "cpu"])
            >>> with model.shared_weights():
            ...     for batch in torch.ones(3, 8, 4):
            ...         model(batch).mean().backward()
            >>> model.module.bias.grad
            tensor([3.])
        """
        return self._replicator.copies.shared()

    accumulate = no_sync = shared_weights
    """The same for gradient accumulation, and under the name of ``DistributedDataParallel``."""

    def homes(self) -> dict[str, torch.device]:
        """Return the device that keeps each parameter, by name."""
        return {name: parameter.device for name, parameter in self.module.named_parameters()}

    def on_one_device(self) -> AbstractContextManager[ModuleT]:
        """Context manager that yields the module with all its parameters on ``device_ids[0]``.

        For ``generate``, export and so on: with ``spread``, the module cannot run by itself.
        Afterwards, parameters are at their homes again.
        """
        devices = self.devices
        return on_one_device(self.module, devices[0]) if devices else nullcontext(self.module)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DataParallelSteps[ModuleT]:
        # torch gives this method no types.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # After cuda(), which scripts call on wrappers: all parameters are on the first device.
        if self.spread and {p.device for p in self.module.parameters()} == {self.src_device_obj}:
            spread_parameters(self.module, self.devices)
        return self
