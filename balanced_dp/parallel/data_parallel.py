"""``torch.nn.DataParallel`` with a smaller chunk of the batch for the first device.

A call goes through the files of this folder::

    auto.py          split            batch size -> chunk sizes
    scatter.py       scatter          inputs -> the arguments for each device
    replicate.py     replicate        module -> a replica on each device
                     parallel_apply   replicas -> outputs, each device in a thread of its own
    gather.py        gather           outputs -> one, its losses joined by losses/
    per_device.py                     instead of gather, with ``gather=False``

Autograd goes the same way back. ``Concatenate.backward`` in gather.py sends each device its part of
the gradient. copies.py has copied the parameters to the other devices; its ``Broadcast.backward``
copies their gradients to the device of the parameter, where autograd adds them up. Inside
``shared_weights()`` all calls use the same copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from ..devices import Device, default_device_type, resolve_device, resolve_devices
from ..errors import ArgumentTypeError
from ..memory.out_of_memory import advising
from ..memory.probe import MemoryProbe
from ..split import as_integer
from .auto import STATE_KEY, split_policy
from .check import CheckResult, compare
from .gather import Gather
from .homes import move_in_place, spread_parameters
from .losses.cross_entropy import current_call, running
from .losses.join import Call, OutputHistory
from .losses.weights import ScalarOutputs, check_options
from .nested import check_paths
from .parallel_apply import parallel_apply
from .per_device import PerDevice
from .replicate import ModuleT, Replicator
from .scatter import Inputs

DeviceIds = Sequence[int | torch.device]
"""Devices as in nn.DataParallel: an accelerator by its index, any other device as itself."""


class BalancedDataParallel(nn.DataParallel[ModuleT]):
    """``torch.nn.DataParallel`` that gives ``device_ids[0]`` at most ``gpu0_bsz`` samples.

    The first device also holds the gathered outputs, the loss and, without ``spread``, the reduced
    gradients and the optimizer state; a smaller chunk of the batch leaves room for them. Each call
    splits the batch with ``split_batch`` or ``split_by_weights``. Unless samples interact in the
    module, outputs and gradients are those of the whole batch on one device, whatever the split.

    ``module``, ``device_ids``, ``output_device``, ``dim`` and the keys of the state dict are those
    of ``nn.DataParallel``. It differs on purpose in these points:

    - Only devices with samples run, so a batch may be smaller than their number, or empty.
    - ``device_ids`` may name devices of any type and repeat one, as ``["cpu", "cpu"]`` does.
    - A tensor whose size along ``dim`` is not the batch size raises an error instead of being cut.
    - Outputs may hold dataclasses, and strings, numbers and constants that are equal everywhere.
    - Worker threads have the caller's autocast dtype, inference mode and context variables.
    - A replica's exception is raised unwrapped, with a note that names the replica.
    - A list of outputs with an entry for each sample comes back as one list.

    Args:
        gpu0_bsz: the most samples that the first device gets, at least 0. With 0 it only runs calls
            that have no samples. None means no limit: the split is even, or follows
            ``device_weights``. ``"auto"`` starts with the even split, reads the peaks after each
            optimizer step, tries at most six splits and keeps the one with the lowest peak. If
            memory runs out, catch ``torch.OutOfMemoryError`` and repeat the step. State dicts
            contain the result.
        module: the module to parallelize. Its parameters and buffers must be on ``device_ids[0]``.
            With ``spread`` or a single device, the constructor moves them.
        device_ids: devices as ints (of the accelerator), strings or ``torch.device``. None means
            all accelerators; without any, calls go to ``module`` as they are. Inside
            ``emulate_devices``, ints and None mean the emulated ones.
        output_device: where outputs are gathered, by default ``device_ids[0]``; may be ``"cpu"``.
        dim: the batch dimension of inputs and outputs.
        gather: whether outputs are joined on ``output_device``. If not, a call returns a
            ``PerDevice`` of them, and ``BalancedCriterion`` computes the loss on each device.
        broadcast: dotted paths of inputs that go whole to each device, such as ``"mask"`` or
            ``"batch.mask"``; a path covers all below it. Positional arguments go by the name of
            ``module.forward``'s parameter.
        split: dotted paths of lists, tuples and arrays with an entry for each sample, such as
            ``"texts"``, or of these and tensors with several, such as ``"passages"``, grouped by
            sample; each device gets the entries of its samples.
        scalar_outputs: how 0-dim outputs are joined. ``"auto"``: to the value of the whole batch,
            if they are sums of means over samples, or of cross entropies, or of sums over samples;
            anything else is averaged as with ``"mean"``, with a warning. ``"mean"``: to their
            mean, weighted by chunk size. ``"sum"``: to their sum. ``"stack"``: to a vector, as in
            ``nn.DataParallel``. ``"auto"`` and ``"mean"`` add up integers and bools that differ,
            and warn.
        loss_weight: a function that returns the weight of a chunk's 0-dim floating outputs, for
            means over anything but samples, such as selected tokens. Its parameters name the
            arguments of ``forward`` that it gets: ``lambda mask: mask.sum()``. A weight is a number
            of at least 0, a tensor with one, or a dictionary of them by output name.
        device_weights: one number for each device; the batch is split in proportion to them.
        spread: whether parameters are spread over all devices, in proportion to their memory, with
            their gradients and optimizer state. If not, all are on ``device_ids[0]``.

    Attributes:
        chunk_sizes: how many samples each device got in the last call; None before the first, and
            with a single device.
        gathers_outputs, spread: the arguments ``gather`` and ``spread``.

    Shape:
        - Input: tensors of ``(N, *)``, with N at ``dim``, on any device.
        - Output: as the module's on the whole batch, on ``output_device``; with ``gather=False`` a
          ``PerDevice``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument cannot be used.
        ScatterError, GatherError: on a call, an input cannot be split or the outputs not joined.
        RuntimeError: on a call, a parameter or buffer is not on ``device_ids[0]``, or with
            ``spread`` a parameter on none of ``device_ids``; the module is scripted, compiled in
            place or lazy; or weights were changed inside ``shared_weights()``.

    Warns:
        BalanceWarning: once for each output or input concerned; for an output, again with
            gradients if first without.

            - ``gpu0_bsz`` is not below the even share of the first batch.
            - A 0-dim output may differ from that of the whole batch, or the graph shows that
              samples of a chunk are computed from each other: see ``check``.
            - A list as long as the batch, or an object that holds tensors, goes whole to each
              device.
            - No input is split though there are lists or arrays, or only the tensors of a list are.
            - An output does not have one row for each sample: the rows are in the order of the
              devices.

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

    # nn.DataParallel annotates ints: a device that is not an accelerator has no index.
    device_ids: list[int | torch.device]  # type: ignore[assignment]
    output_device: int | torch.device | None  # type: ignore[assignment]
    src_device_obj: torch.device | None  # type: ignore[assignment]

    def __init__(
        self,
        gpu0_bsz: int | Literal["auto"] | None,
        module: ModuleT,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        gather: bool = True,
        broadcast: Iterable[str] = (),
        split: Iterable[str] = (),
        scalar_outputs: ScalarOutputs = "auto",
        loss_weight: Callable[..., Any] | None = None,
        device_weights: Sequence[float] | None = None,
        spread: bool = False,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                f"module must be an nn.Module, got {type(module).__name__}; give (gpu0_bsz, module)"
            )
        # nn.DataParallel.__init__ refuses the CPU, and may advise to leave out the smaller GPU.
        nn.Module.__init__(self)
        check_options(scalar_outputs, loss_weight)
        devices = resolve_devices(device_ids)
        self._device_type = default_device_type() or ""
        self.device_ids = [self._id_of(device) for device in devices]
        self.src_device_obj = devices[0] if devices else None
        where = "cpu" if output_device == -1 else output_device  # torch's name for the CPU
        given = resolve_device(where) if devices and where is not None else None
        self.output_device = self._id_of(given or devices[0]) if devices else None
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
        self._policy = split_policy(gpu0_bsz, self.devices, device_weights)
        self.chunk_sizes: tuple[int, ...] | None = None
        if len(devices) == 1:
            module.to(devices[0])
        elif spread and devices:
            spread_parameters(module, devices)

    # Threads cannot be compiled, so torch.compile leaves this method as it is. This name is
    # private, but torch.compiler.disable would import Dynamo, which takes a second, with this file.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Split the batch, run the replicas, gather the outputs unless ``gather=False``."""
        with torch.autograd.profiler.record_function("BalancedDataParallel.forward"):
            if len(self.device_ids) < 2:
                return self._call_module(inputs, kwargs)
            batch_size = self._inputs(inputs, kwargs).batch_size()
            sizes = self.chunk_sizes = self._policy.begin_call(self.module, batch_size or 0)
            # A batch without samples, or a call without tensors, runs on the first device.
            active = [i for i, size in enumerate(sizes) if size] or [0]
            ids = [self.device_ids[i] for i in active]
            call = self._new_call(ids, () if batch_size is None else [sizes[i] for i in active])
            # In the call, the steps find it as ``self._current_call``.
            with advising(self.devices, sizes, self._policy.remedy), running(call):
                args, keywords = self.scatter(inputs, kwargs, ids)
                call.arguments = list(zip(args, keywords, strict=True))
                replicas = self.replicate(self.module, ids)
                with self._replicator.running(replicas):
                    outputs = self.parallel_apply(replicas, args, keywords)
                joined = self._joined(outputs, call)
                call.look_for_mixing(outputs)
                return joined

    def _inputs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        options = self.dim, self.broadcast, self.split_inputs, self._history.seen
        return Inputs(self.module.forward, inputs, kwargs, *options)

    def _call_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module itself, on the only device or, without one, where it is."""
        devices = self.devices
        [args], [keywords] = self.scatter(inputs, kwargs, devices)
        output = self.module(*args, **keywords)
        if self.gathers_outputs and self.output_device in (None, *self.device_ids):
            return output
        # Joining one output needs no batch size, but a PerDevice shows it.
        batch_size = None if self.gathers_outputs else self._inputs(inputs, kwargs).batch_size()
        call = self._new_call(devices, () if batch_size is None else [batch_size])
        return self._joined([output], call)

    # The steps of nn.DataParallel, with its signatures, on devices of any type.

    @property
    def _current_call(self) -> Call | None:
        """The running call of this model, if any: what the steps' signatures leave out."""
        call: Call | None = current_call.get()
        return call if call and call.history is self._history else None

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: DeviceIds,
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Return the arguments for each device, positional and keyword ones, split as in a call."""
        found = self._inputs(inputs, kwargs or {})
        sizes = call.chunk_sizes if (call := self._current_call) else ()
        if call is None and len(device_ids) > 1 and (batch_size := found.batch_size()):
            sizes = self.split(batch_size)
        arguments = found.scatter(self._devices_of(device_ids), sizes)
        return [args for args, _ in arguments], [keywords for _, keywords in arguments]

    def replicate(self, module: ModuleT, device_ids: DeviceIds) -> list[ModuleT]:
        """Return a replica of ``module`` for each device.

        An override must return this list, or writes of replicas to buffers and parameters are lost.
        """
        homes = self.devices if self.spread else self.devices[:1]
        return self._replicator.replicate(module, self._devices_of(device_ids), homes)

    def parallel_apply(
        self,
        replicas: Sequence[ModuleT],
        inputs: Sequence[Any],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        """Return the output of each replica; outside of a call they run on the first devices."""
        call = self._current_call or self._new_call(self.device_ids[: len(replicas)])
        pairs = list(zip(inputs, kwargs, strict=True))
        return parallel_apply(replicas, pairs, call.devices, call.chunk_sizes)

    def gather(self, outputs: Sequence[Any], output_device: int | torch.device) -> Any:
        """Return the outputs joined on ``output_device``."""
        [device] = self._devices_of([output_device])
        return Gather(device, self._current_call or self._new_call(self.device_ids)).join(outputs)

    def _new_call(self, device_ids: DeviceIds, sizes: Iterable[int] = ()) -> Call:
        """Return a call on devices, with ``sizes`` samples on them if the batch is split."""
        options = self.dim, self.scalar_outputs, self.loss_weight
        devices, function = self._devices_of(device_ids), self.module.forward
        return Call(self._history, function, devices, tuple(sizes), *options)

    def _joined(self, outputs: Sequence[Any], call: Call) -> Any:
        """Gather the outputs, or leave them on their devices."""
        output_device = call.devices[0] if self.output_device is None else self.output_device
        if self.gathers_outputs:
            return self.gather(outputs, output_device)
        [device] = self._devices_of([output_device])
        return PerDevice(outputs, call, device)

    @property
    def devices(self) -> list[torch.device]:
        """The devices of ``device_ids``, in order; without any, that of the module."""
        here = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        return self._devices_of(self.device_ids) or [here]

    def _id_of(self, device: torch.device) -> int | torch.device:
        """Return the index of an accelerator, or any other device itself."""
        return device.index if device.type == self._device_type else device

    def _devices_of(self, ids: Iterable[int | torch.device]) -> list[torch.device]:
        return [torch.device(self._device_type, i) if isinstance(i, int) else i for i in ids]

    @property
    def gpu0_bsz(self) -> int | None:
        """The most samples that the first device gets.

        With ``"auto"``, the value for the largest batch so far, or from a checkpoint; None
        before either. Reading it also checks whether memory has run out. It may be set to whatever
        the constructor accepts.
        """
        return self._policy.gpu0_bsz

    @gpu0_bsz.setter
    def gpu0_bsz(self, value: int | Literal["auto"] | None) -> None:
        self._policy = split_policy(value, self.devices, self.device_weights)

    @property
    def device_weights(self) -> tuple[float, ...] | None:
        """The weight of each device, as it was given; None if none were."""
        return self._policy.device_weights

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return how many samples of a batch of ``batch_size`` each device gets."""
        return self._policy.split(batch_size)

    @property
    def memory(self) -> MemoryProbe:
        """A new ``MemoryProbe`` of the devices of this model.

        Raises:
            ProbeError: the devices do not count their memory, as ``"cpu"`` does not.
        """
        return MemoryProbe(self.devices)

    def check(self, *inputs: Any, **kwargs: Any) -> CheckResult:
        """Compare a batch that is split with the whole batch on ``device_ids[0]``.

        Call it once after wrapping a model. Both run in evaluation mode, with gradients, on a copy
        of the module, so parameters, gradients, buffers and random numbers stay as they are. The
        first device holds the whole batch and a copy of the parameters, so give a small batch.

        Returns:
            Each output, and each gradient of a weighted sum of the outputs, that differs by more
            than rounding, with the likely cause. It prints as a table.

        Examples:
            >>> parallel = BalancedDataParallel(1, torch.nn.Linear(4, 2), ["cpu", "cpu"])
            >>> print(parallel.check(torch.ones(8, 4)))
            3 outputs and gradients, chunks of (1, 7): all equal the whole batch's
        """
        return compare(self, inputs, kwargs)

    def shared_weights(self) -> AbstractContextManager[None]:
        """Share one weight broadcast across the block.

        For loops that do not change the weights: evaluation and gradient accumulation. Step the
        optimizer after the block: until it ends, other devices do not see writes through ``.data``,
        or the module's writes to frozen weights.

        Raises:
            RuntimeError: on a call, a parameter that requires grad was changed, or one was
                replaced, frozen or unfrozen.

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
    """Aliases: one for gradient accumulation, and the name in ``DistributedDataParallel``."""

    def homes(self) -> dict[str, torch.device]:
        """Return the device that keeps each parameter, by name."""
        return {name: parameter.device for name, parameter in self.module.named_parameters()}

    @contextmanager
    def on_one_device(self) -> Iterator[ModuleT]:
        """Context manager that yields the module with all its parameters on ``device_ids[0]``.

        For ``generate``, export and so on: with ``spread``, the module cannot run by itself.
        Afterwards, parameters are at their homes again.
        """
        homes = [(parameter, parameter.device) for parameter in self.module.parameters()]
        try:
            for parameter, _ in homes:
                move_in_place(parameter, self.devices[0])
            yield self.module
        finally:
            for parameter, home in homes:
                move_in_place(parameter, home)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self._policy.state_dict()
        if state and hasattr(destination, "_metadata"):
            # Beside the version of the module: nn.DataParallel would refuse another key.
            destination._metadata[prefix[:-1]][STATE_KEY] = state

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if STATE_KEY in local_metadata:
            self._policy.load_state_dict(local_metadata[STATE_KEY])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> BalancedDataParallel[ModuleT]:
        # torch gives this method no types.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # After cuda(), which scripts call on wrappers: all parameters are on the first device.
        if self.spread and {p.device for p in self.module.parameters()} == {self.src_device_obj}:
            spread_parameters(self.module, self.devices)
        return self
