"""``torch.nn.DataParallel`` with a smaller share of the batch for the first device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from ..devices import Device, default_device_type, is_out_of_memory, resolve_device, resolve_devices
from ..errors import ArgumentError, ArgumentTypeError, warn
from ..memory.probe import MemoryProbe
from ..split import even_share, split_batch, split_by_weights
from .auto_split import AutoSplit
from .call_inputs import check_paths, named_arguments
from .losses.join import ChunkLosses, Looks
from .parallel_apply import Workers, add_note, parallel_apply
from .per_device import PerDevice
from .replicate import Replicator, check_on_device, is_compiled
from .scatter_gather import ScalarOutputs, find_batch_size, gather, scatter_arguments

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class BalancedDataParallel(nn.DataParallel[ModuleT]):
    """``torch.nn.DataParallel`` that gives ``device_ids[0]`` at most ``gpu0_bsz`` samples.

    The first device also holds the gathered outputs, the loss, the reduced gradients and the
    optimizer state; a smaller share of the batch evens that out. The batch is split by
    ``split_batch``. Where samples do not mix in the module, outputs and gradients are those of the
    whole batch on one device, whatever the split.

    It is an ``nn.DataParallel``: ``module``, ``device_ids``, ``output_device``, ``dim`` and the
    keys of its state dict mean the same. What differs on purpose:

    - Only devices with samples run; a batch of any size works, with any kind of arguments.
    - ``device_ids`` may name devices of any type and repeat one, as ``["cpu", "cpu"]`` does.
    - A tensor that is not one entry a sample is an error that says so; stock cuts it anyway.
    - Outputs may hold dataclasses, strings and numbers, if those are equal on every replica.
    - Worker threads keep autocast's dtype, inference mode and context variables.
    - An exception from a replica is raised as it is, with a note that names the replica.

    Args:
        gpu0_bsz: the most samples that the first device gets, at least 0. With 0 it runs nothing.
            ``"auto"`` finds the value during the first iterations of training: it begins with the
            even split, reads how full each device was until the next call, changes the value at
            most five times and then stays. Memory that runs out moves it, too; the caller may
            catch ``torch.OutOfMemoryError`` and repeat the step. None, with ``device_weights``,
            means no limit.
        module: the module to be parallelized; its parameters and buffers are on ``device_ids[0]``.
        device_ids: devices as ints (of the accelerator), strings or ``torch.device``. None means
            all accelerators; where there are none, calls pass through to ``module``. Inside
            ``emulate_devices``, ints and None mean the emulated ones.
        output_device: where outputs are gathered, by default ``device_ids[0]``; may be ``"cpu"``.
        dim: the batch dimension of inputs and outputs.
        gather: whether outputs are joined on ``output_device``. If not, a call returns a
            ``PerDevice`` of them, for ``BalancedCriterion`` to compute the loss where
            they are.
        broadcast: dotted paths of inputs that go whole to each device, such as ``"mask"`` or
            ``"batch.mask"``; a path covers all below it. Positional arguments go by the name of
            ``module.forward``'s parameter.
        split: dotted paths of lists, tuples and arrays with an entry for each sample, such as
            ``"texts"``; each device gets the entries of its samples.
        scalar_outputs: what becomes of 0-dim outputs. ``"auto"``: the value that the whole batch
            has, with its gradient. What a loss is a mean over, or that it is a sum, is read from
            how it was computed; what cannot be made exact, such as the square root of a mean, is
            averaged by chunk size and warned of. Integers must be equal, since a count has no
            mean. ``"mean"``: their mean, weighted by chunk size. ``"sum"``: their sum.
            ``"stack"``: a vector of one a replica, as ``nn.DataParallel`` returns.
        loss_weight: for a mean over what cannot be read: a function of a chunk's arguments, of
            which it gets those that it names, as ``lambda mask: mask.sum()``. It returns a number
            of at least 0, or a tensor with one, that the chunk's 0-dim outputs weigh, or a
            dictionary of such by the names of outputs. Or the name of an argument, such as
            ``"labels"``: the entries that are not -100 count. It is asked if an output is a 0-dim
            floating tensor.
        device_weights: for devices of unlike capacity, the share of each: the batch is split in
            proportion, by ``split_by_weights``.

    Attributes:
        chunk_sizes: how many samples of the last batch each device got; None before the first, and
            with a single device.
        gathers_outputs: what ``gather`` said.

    Shape:
        - Input: tensors of ``(N, *)``, with N at ``dim``, on any device.
        - Output: as the module's on the whole batch, on ``output_device``; with ``gather=False`` a
          ``PerDevice``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument cannot be used.
        ScatterError, GatherError: on a call, an input cannot be split or the outputs not joined.
        RuntimeError: on a call, a parameter or buffer is not on ``device_ids[0]``, the module is
            scripted, compiled in place or lazy, or weights were changed in ``shared_weights``.

    Warns:
        BalanceWarning: once each, where ``gpu0_bsz`` is not below the even share of the first
            batch; where the value of a 0-dim output need not be that of the whole batch; where a
            sequence that goes whole to each device is as long as the batch; for what ``forward``
            sets on the module, which is lost; and for parameters that it writes where a device
            repeats.

    Source:
        Transformer-XL's ``BalancedDataParallel`` (Dai et al. 2019,
        https://arxiv.org/abs/1901.02860) and ``torch.nn.parallel.data_parallel`` of torch 2.13.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> parallel = BalancedDataParallel(2, model, device_ids=["cpu", "cpu"])
        >>> parallel(torch.ones(8, 4)).shape
        torch.Size([8, 2])
        >>> parallel.split(8)
        (2, 6)
    """

    # Wider than stock's annotations: a device that is no accelerator has no index.
    device_ids: list[int | torch.device]  # type: ignore[assignment]
    output_device: int | torch.device | None  # type: ignore[assignment]
    src_device_obj: torch.device | None  # type: ignore[assignment]

    def __init__(
        self,
        gpu0_bsz: int | Literal["auto"] | None,
        module: ModuleT = None,  # type: ignore[assignment]  # required: see the errors below
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        gather: bool = True,
        broadcast: Iterable[str] = (),
        split: Iterable[str] = (),
        scalar_outputs: ScalarOutputs = "auto",
        loss_weight: Callable[..., Any] | str | None = None,
        device_weights: Sequence[float] | None = None,
    ) -> None:
        # nn.DataParallel.__init__ refuses the CPU, and may advise to leave out the smaller GPU.
        nn.Module.__init__(self)
        self._device_type = default_device_type()
        devices = resolve_devices(device_ids, self._device_type)
        self.device_ids = [self._stock_id(device) for device in devices]
        self._device_weights = None if device_weights is None else tuple(device_weights)
        if isinstance(gpu0_bsz, nn.Module):  # assigned, it would become a submodule
            raise ArgumentTypeError(
                f"gpu0_bsz comes first and must be an integer, got a {type(gpu0_bsz).__name__}: "
                "BalancedDataParallel(gpu0_bsz, module)"
            )
        self.gpu0_bsz = gpu0_bsz
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                f"module must be an nn.Module, got {type(module).__name__}; an optimizer, for "
                "example, is not wrapped"
            )
        if scalar_outputs not in get_args(ScalarOutputs):
            raise ArgumentError(
                f"scalar_outputs must be one of {get_args(ScalarOutputs)}, got {scalar_outputs!r}"
            )
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise ArgumentTypeError(f"dim must be an integer, got {dim!r}")
        if loss_weight is not None and scalar_outputs not in ("auto", "mean"):
            raise ArgumentError(
                f"loss_weight weighs a mean, but scalar_outputs is {scalar_outputs!r}"
            )
        self.module = module
        self.dim = dim
        self.gathers_outputs = gather
        self.broadcast = check_paths("broadcast", broadcast, module.forward)
        self.split_inputs = check_paths("split", split, module.forward)
        self.scalar_outputs = scalar_outputs
        self.loss_weight = loss_weight
        self.src_device_obj = devices[0] if devices else None
        self.output_device = self.device_ids[0] if devices else None
        if devices and output_device is not None:
            self.output_device = self._stock_id(resolve_device(output_device, self._device_type))
        self.chunk_sizes: tuple[int, ...] | None = None
        self._is_split_checked = False
        self._looks = Looks(may_note=not any(map(is_compiled, module.modules())))
        self._replicator = Replicator()
        self._workers = Workers()
        if len(devices) == 1:
            module.to(devices[0])

    @property
    def devices(self) -> list[torch.device]:
        """The devices of ``device_ids``, in order."""
        return [self._device_of(device_id) for device_id in self.device_ids]

    def _stock_id(self, device: torch.device) -> int | torch.device:
        """Returns what nn.DataParallel keeps of a device: its index, if it is an accelerator."""
        return device.index if device.type == self._device_type else device

    def _device_of(self, device_id: int | torch.device | None) -> torch.device:
        if isinstance(device_id, torch.device):
            return device_id
        assert self._device_type is not None and device_id is not None
        return torch.device(self._device_type, device_id)

    @property
    def device_weights(self) -> tuple[float, ...] | None:
        """The share of each device, as it was given."""
        return self._device_weights

    @property
    def gpu0_bsz(self) -> int | None:
        """The most samples that the first device gets.

        With ``"auto"``, what it gets now; None before the first batch. Set it to a number or to
        ``"auto"`` at any time.
        """
        if self._auto is not None:
            return self._auto.gpu0_bsz
        return None if isinstance(self._gpu0_bsz, str) else self._gpu0_bsz

    @gpu0_bsz.setter
    def gpu0_bsz(self, value: int | Literal["auto"] | None) -> None:
        weights, num_devices = self.device_weights, max(1, len(self.device_ids))
        auto = None
        split: Callable[[int], tuple[int, ...]]
        if weights is not None:
            if value == "auto" or len(weights) != num_devices:
                raise ArgumentError(
                    f"device_weights must be one number for each of {num_devices} devices, with a "
                    f"gpu0_bsz that is a number or None, got {len(weights)} and gpu0_bsz={value!r}"
                )
            split = functools.partial(split_by_weights, device_weights=weights, gpu0_bsz=value)
        elif value == "auto":
            auto = AutoSplit(self.devices)
            split = auto.split
        elif value is None or isinstance(value, str):
            raise ArgumentTypeError(
                "gpu0_bsz must be an integer or 'auto', or None where device_weights are given, "
                f"got {value!r}"
            )
        else:
            split = functools.partial(split_batch, num_devices=num_devices, gpu0_bsz=value)
        split(0)  # raises before anything has changed
        self._gpu0_bsz, self._auto, self._split = value, auto, split

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Returns how many samples of a batch of ``batch_size`` each device gets."""
        return self._split(batch_size)

    @property
    def memory(self) -> MemoryProbe:
        """A new probe on the devices, which knows how this model splits.

        Raises:
            ProbeError: the devices do not count their memory, as ``"cpu"`` does not.
        """
        return MemoryProbe(model=self)

    # Compiled, it runs as it is: threads cannot be compiled. Torch's stubs do not export it.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Split the batch, run the replicas, gather the outputs unless ``gather=False``."""
        with torch.autograd.profiler.record_function("BalancedDataParallel.forward"):
            if not self.device_ids:
                return self._forward_where_module_is(inputs, kwargs)
            if len(self.device_ids) == 1:
                return self._forward_on_one_device(inputs, kwargs)
            batch_size = self._batch_size(inputs, kwargs)
            if batch_size:
                self._check_split(batch_size)
            self.chunk_sizes = split = self.split(batch_size or 0)
            # Without a tensor to cut there is one call to make. An empty batch is one, too.
            active = [i for i, size in enumerate(split) if size] or [0]
            sizes = None if batch_size is None else [split[i] for i in active]
            try:
                return self._forward_in_parallel(inputs, kwargs, active, sizes)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    add_note(error, self._memory_advice(split))
                raise

    def _batch_size(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        named = named_arguments(self.module.forward, inputs, kwargs)
        return find_batch_size(named, self.dim, self.broadcast, self.split_inputs)

    def _forward_where_module_is(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def whole(value: Any) -> Any:
            return value[0] if isinstance(value, PerDevice) else value

        arguments = {name: whole(value) for name, value in kwargs.items()}
        output = self.module(*map(whole, inputs), **arguments)
        if self.gathers_outputs:
            return output
        tensors = chain(self.module.parameters(), self.module.buffers())
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        return self._alone(output, device, self._batch_size(inputs, kwargs))

    def _forward_on_one_device(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_on_device(chain(self.module.parameters(), self.module.buffers()), self.devices[0])
        scattered_inputs, scattered_kwargs = self.scatter(inputs, kwargs, self.device_ids)
        output = self.module(*scattered_inputs[0], **scattered_kwargs[0])
        if not self.gathers_outputs:
            return self._alone(output, self.devices[0], self._batch_size(inputs, kwargs))
        if self.output_device == self.device_ids[0]:
            return output
        return self.gather([output], self.output_device)

    def _alone(self, output: Any, device: torch.device, batch_size: int | None) -> PerDevice:
        """Returns the output of a single device as one that is not gathered."""
        return self._per_device([output], [device], None if batch_size is None else [batch_size])

    def _per_device(
        self,
        outputs: Sequence[Any],
        devices: Sequence[torch.device],
        chunk_sizes: Sequence[int] | None,
        losses: ChunkLosses | None = None,
    ) -> PerDevice:
        return PerDevice(
            outputs,
            devices,
            chunk_sizes,
            output_device=self._device_of(self.output_device) if self.device_ids else devices[0],
            dim=self.dim,
            scalar_outputs=self.scalar_outputs,
            losses=losses,
            workers=self._workers,
        )

    def _forward_in_parallel(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        active: Sequence[int],
        sizes: Sequence[int] | None,
    ) -> Any:
        device_ids = [self.device_ids[i] for i in active]
        scattered_inputs, scattered_kwargs = self.scatter(inputs, kwargs, device_ids, sizes)
        losses = ChunkLosses(
            self._looks,
            self.module.forward,
            sizes or [1],
            self.dim,
            list(zip(scattered_inputs, scattered_kwargs, strict=True)),
            self.loss_weight,
            self.scalar_outputs == "auto",
        )
        replicas = self.replicate(self.module, device_ids)
        with losses.observed(), self._replicator.running(self.module, replicas):
            outputs = self.parallel_apply(
                replicas, scattered_inputs, scattered_kwargs, device_ids, sizes
            )
        losses.settle(outputs)
        if self.gathers_outputs:
            return self.gather(outputs, self.output_device, losses)
        devices = [self._device_of(device_id) for device_id in device_ids]
        return self._per_device(outputs, devices, sizes, losses)

    def shared_weights(self) -> AbstractContextManager[None]:
        """Share one weight broadcast and one gradient reduction across the block.

        For loops that do not change the weights: evaluation, and gradient accumulation. Each device
        adds up the gradients of its own chunks, and when the block ends they are added to those of
        the parameters. Until then ``.grad`` is an error to use: ``zero_grad()`` comes before the
        block, clipping and the optimizer's step after it. Parameters with hooks are exempt: their
        gradients come at each call. What is written to weights through ``.data``, or to frozen ones
        by the module itself, is not seen before the block ends.

        Raises:
            RuntimeError: where a gradient is used in the block, or at its end if one was replaced;
                on a call, if a parameter that is trained was changed.

        Examples:
            >>> model = BalancedDataParallel(1, torch.nn.Linear(4, 1), ["cpu", "cpu"])
            >>> with model.shared_weights():
            ...     for batch in torch.ones(3, 8, 4):
            ...         model(batch).mean().backward()
            >>> model.module.bias.grad
            tensor([3.])
        """
        return self._replicator.copies.shared()

    accumulate = no_sync = shared_weights
    """Its name in loops that accumulate, and the one that ``DistributedDataParallel`` has."""

    def close(self) -> None:
        """Ends the threads and gives back what is kept between calls. A later call starts anew."""
        self._workers.close()
        self._replicator.release()

    # The steps, as in nn.DataParallel; device_ids and chunk_sizes are those of active devices.

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[int | torch.device],
        chunk_sizes: Sequence[int] | None = None,
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Returns positional and keyword arguments for each device.

        ``chunk_sizes`` of None means that nothing is cut: each device gets every tensor whole.
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
            self._looks.warned,
        )
        return [args for args, _ in arguments], [kwargs for _, kwargs in arguments]

    def replicate(self, module: ModuleT, device_ids: Sequence[int | torch.device]) -> list[ModuleT]:
        """Returns a replica of ``module`` for each device."""
        devices = [self._device_of(device_id) for device_id in device_ids]
        return self._replicator.replicate(module, devices, home=self.devices[0])

    def parallel_apply(
        self,
        replicas: Sequence[ModuleT],
        inputs: Sequence[Any],
        kwargs: Sequence[dict[str, Any]],
        device_ids: Sequence[int | torch.device] | None = None,
        chunk_sizes: Sequence[int] | None = None,
    ) -> list[Any]:
        """Returns the output of each replica on its arguments; by default on the first devices."""
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
        """Returns the outputs joined on ``output_device``; ``losses`` knows of 0-dim ones."""
        sizes = None if losses is None else losses.chunk_sizes
        device = self._device_of(output_device)
        return gather(outputs, device, self.dim, self.scalar_outputs, sizes, losses)

    def _check_split(self, batch_size: int) -> None:
        """Update ``"auto"``; warn if ``gpu0_bsz`` has no effect."""
        message = None
        if self._auto is not None:
            message = self._auto.begin_call(self.module, batch_size)
        elif not self._is_split_checked and isinstance(self._gpu0_bsz, int):
            num_devices = len(self.device_ids)
            even = even_share(batch_size, num_devices)
            if self._gpu0_bsz >= even and self.device_weights is None:
                message = (
                    f"gpu0_bsz={self._gpu0_bsz} balances nothing: the even share of this first "
                    f"batch of {batch_size} on {num_devices} devices is {even}, so the split is "
                    f"that of nn.DataParallel, {self.split(batch_size)}; choose gpu0_bsz below "
                    f"{even}"
                )
        self._is_split_checked = True
        if message is not None:
            warn(message)

    def _memory_advice(self, chunk_sizes: Sequence[int]) -> str:
        split = ", ".join(
            f"{device}: {size}" for device, size in zip(self.devices, chunk_sizes, strict=True)
        )
        fact = f"the batch of {sum(chunk_sizes)} was split {split}"
        if self._auto is not None:
            if self._auto.look_for_out_of_memory(has_failed=True):
                return f"{fact}. gpu0_bsz='auto' is now {self.gpu0_bsz}: the step may be repeated"
            return f"{fact}, and gpu0_bsz='auto' knows no better; lower the batch size"
        remedy = f"lower gpu0_bsz (now {self.gpu0_bsz})"
        if self.device_weights is not None:
            remedy = f"lower its weight (device_weights={list(self.device_weights)})"
        return (
            f"{fact}. If {self.devices[0]} ran out, {remedy}; if another device did, lower the "
            "batch size"
        )


def balanced_data_parallel(
    gpu0_bsz: int,
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Returns ``module(*inputs, **module_kwargs)``, evaluated in parallel with a smaller chunk 0.

    The functional form of ``BalancedDataParallel``, as ``torch.nn.parallel.data_parallel`` is
    of ``nn.DataParallel``. It never moves the module.

    Args:
        gpu0_bsz: the most samples that the first device gets.
        module: the module to evaluate; its parameters and buffers are on ``device_ids[0]``.
        inputs: a tuple of positional arguments, or the only one, or None.
        device_ids: as in ``BalancedDataParallel``.
        output_device: where the output goes, by default ``device_ids[0]``; may be ``"cpu"``.
        dim: the batch dimension.
        module_kwargs: keyword arguments.

    Raises:
        BalancedDataParallelError: where ``BalancedDataParallel`` does, of the kinds named there.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> balanced_data_parallel(1, model, torch.ones(8, 4), ["cpu", "cpu"]).shape
        torch.Size([8, 2])
    """
    devices = resolve_devices(device_ids, default_device_type())
    if devices:
        check_on_device(chain(module.parameters(), module.buffers()), devices[0])
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    parallel = BalancedDataParallel(gpu0_bsz, module, device_ids, output_device, dim)
    try:
        return parallel(*inputs, **(module_kwargs or {}))
    finally:
        parallel.close()
