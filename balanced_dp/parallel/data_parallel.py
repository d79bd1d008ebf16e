"""``torch.nn.DataParallel`` with a smaller chunk of the batch for the first device.

A call of a ``BalancedDataParallel`` uses the files of this folder in this order::

    auto.py             split            batch size -> chunk sizes
    scatter.py          scatter          inputs -> the arguments for each device
    replicate.py        replicate        module -> a replica on each device
    parallel_apply.py   parallel_apply   replicas -> outputs, with one thread for each device
    gather.py           gather           outputs -> one output; the folder losses/ joins losses
    per_device.py                        used instead of gather.py if ``gather=False``

The backward pass goes through these steps in reverse. ``Concatenate.backward`` in gather.py sends
each device its part of the gradient of the output. If a parameter is on another device than a
replica, the replica uses a copy of it, made by copies.py. ``Broadcast.backward`` in copies.py sends
the gradients of the copies to the device of the originals, where autograd adds them up.
Inside ``shared_weights()``, all calls use the same copies of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from .replicate import ModuleT, Replicas, Replicator
from .scatter import Inputs

DeviceIds = Sequence[int | torch.device]
"""A list of devices. An accelerator is given by its index, as in ``nn.DataParallel``.

Any other device is given as a ``torch.device``.
"""


class BalancedDataParallel(nn.DataParallel[ModuleT]):
    """``torch.nn.DataParallel`` that gives ``device_ids[0]`` at most ``gpu0_bsz`` samples.

    The first device also holds the gathered outputs and the loss. Without ``spread``, it holds the
    reduced gradients and the optimizer state, too. A smaller chunk of the batch leaves room for
    them. Each call splits the batch with ``split_batch`` or, if ``device_weights`` is given, with
    ``split_by_weights``. With any split, the outputs and gradients are those of the whole batch on
    one device, unless samples interact in the module, as they do in batch norm during training.

    The attributes ``module``, ``device_ids``, ``output_device`` and ``dim``, and the keys of the
    state dict, are as in ``nn.DataParallel``. This class differs from ``nn.DataParallel`` on
    purpose in these points:

    - Only devices that get samples run the module, so a batch may have fewer samples than there are
      devices. A batch without samples runs on the first device.
    - ``device_ids`` may name devices of any type. It may name the same device twice, as in
      ``["cpu", "cpu"]``.
    - If the size of an input tensor along ``dim`` is not the batch size, an error is raised;
      ``nn.DataParallel`` splits such a tensor.
    - Outputs may contain dataclasses. They may also contain strings, numbers and other constants,
      if these are equal on all replicas.
    - The threads that run the replicas have the caller's autocast dtype, inference mode and context
      variables.
    - If a replica raises an exception, the call raises the same exception object, with a note that
      names the replica.
    - If each replica returns a list with one entry for each sample, the lists are joined into one.

    Args:
        gpu0_bsz: an int of at least 0: the maximum number of samples of a batch that the first
            device gets. With 0, the first device runs only the batches without samples and the
            calls that split no input. None means no limit: the split is even, or in proportion to
            ``device_weights``. ``"auto"`` searches for the split that leaves the largest share of
            memory free on the fullest device. The search starts with the even split, and reads the
            peak memory of the devices after each optimizer step. It tries at most six splits. If
            memory runs out, it may try more. Each time memory runs out, ``torch.OutOfMemoryError``
            is raised. Catch the error and repeat the step: the search then uses another split, if
            there is one. State dicts contain the split that ``"auto"`` has found.
        module: the module to parallelize. With a single device, the constructor moves the module to
            this device. With several devices and without ``spread``, the parameters and buffers
            must be on ``device_ids[0]``. With several devices and ``spread``, the constructor
            spreads the parameters over the devices, and moves the buffers to ``device_ids[0]``.
        device_ids: the devices, as ints (indices of accelerators), strings or ``torch.device``.
            None means all accelerators. If there are no accelerators, ``module`` is called with the
            whole batch. Inside ``emulate_devices``, ints and None refer to the emulated devices.
        output_device: the device on which the outputs of the replicas are joined, by default
            ``device_ids[0]``. It may be ``"cpu"``.
        dim: the batch dimension of inputs and outputs.
        gather: whether the outputs of the replicas are joined on ``output_device``. If False, a
            call returns them as a ``PerDevice``, which holds one output for each device that had
            samples. ``BalancedCriterion`` then computes the loss on each device.
        broadcast: the inputs that are passed whole to each device, by their dotted paths:
            ``"mask"`` is the argument ``mask``, and ``"batch.mask"`` the entry ``mask`` of the
            argument ``batch``. The path of a container stands for all its entries: with
            ``"batch"``, each tensor in ``batch`` is passed whole. A positional argument has the
            name of its parameter in ``module.forward``.
        split: inputs to split, by dotted paths as for ``broadcast``. Tensors with one row for each
            sample are split anyway, and need not be named. Name each list, tuple or array with one
            or more entries for each sample (``"texts"``), and each tensor with several rows for
            each sample (``"passages"``). Each device gets the entries of its samples. All samples
            must have the same number of entries, and the entries of one sample must be adjacent.
        scalar_outputs: how the 0-dim outputs of the replicas, such as losses, are joined.

            - ``"auto"`` computes the value of the whole batch if the output is a cross entropy, a
              mean over samples, a sum over samples, or several of these added up. A mean over
              samples plus a sum over samples is averaged as with ``"mean"``, with a warning, and so
              are most other outputs.
            - ``"mean"`` computes the mean over the replicas, weighted by their numbers of samples.
            - ``"sum"`` computes the sum over the replicas.
            - ``"stack"`` returns a vector with one entry for each replica, as ``nn.DataParallel``
              does.

            With ``"auto"`` and ``"mean"``, 0-dim integers and bools that differ between replicas
            are added up, with a warning.
        loss_weight: a function that is called for each replica, and returns the weight of the
            replica's 0-dim floating-point outputs. The outputs are averaged over the replicas with
            these weights. Give ``loss_weight`` if outputs are means over anything other than
            samples, such as selected tokens. Each parameter of the function receives the replica's
            argument of ``forward`` that has the same name, as in ``lambda mask: mask.sum()``. A
            weight is a number or a tensor of one element, and at least 0. To give outputs different
            weights, the function returns a dictionary that maps names of outputs to weights.
        device_weights: one number for each device. The batch is split in proportion to these
            numbers.
        spread: whether the parameters, with their gradients and optimizer state, are spread over
            all devices, in proportion to the memory of each device. If False, all parameters are
            on ``device_ids[0]``.

    Attributes:
        chunk_sizes: how many samples each device got in the last call. It is None before the first
            call. With fewer than two devices, it is always None.
        gathers_outputs: the argument ``gather``.
        spread: the argument ``spread``.

    Shape:
        - Input: tensors of ``(N, *)``, with the batch size N at ``dim``, on any device.
        - Output: the output of the module for the whole batch, on ``output_device``. With
          ``gather=False``, a ``PerDevice``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument cannot be used.
        ScatterError: on a call, an input cannot be split.
        GatherError: on a call, the outputs cannot be joined.
        RuntimeError: on a call, in each of these cases:

            - A parameter or buffer is not on ``device_ids[0]``. With ``spread``, a parameter may be
              on any of ``device_ids``.
            - The module is scripted, compiled in place or lazy.
            - Inside a block of ``shared_weights()``, parameters have changed since the first call
              in the block.

    Warns:
        BalanceWarning: in the cases below. An input causes at most one warning. An output may cause
            two: the first in a call without gradients, and the second in a call with gradients.

            - ``gpu0_bsz`` is at or above the even share (batch size / number of devices) of the
              first batch, so that this batch is split evenly.
            - A 0-dim output may differ from its value for the whole batch. The method ``check``
              shows how large the difference is.
            - The output for a sample is found to depend on other samples of the same chunk. In this
              case, too, ``check`` shows the difference from the output for the whole batch.
            - A list whose length is the batch size, or an object that holds tensors, is passed
              whole to each device.
            - The inputs contain lists or arrays, but no input is split.
            - All tensors that are split are in one list of items of the same type, as in
              ``model([a, b])``. Each of the tensors is split along ``dim``. If each item of the
              list is a sample, name the list in ``split``.
            - An output does not have one row for each sample. Its rows are joined in the order of
              the devices.
            - An output is a list whose length is the chunk size, and is joined item by item: item 0
              of the result is joined from item 0 of each replica. If each item is for one sample,
              return a tensor with one row for each sample. Otherwise, return a tuple.
            - An output is a key-value cache of Hugging Face's transformers, and None is returned in
              its place.

    Source:
        The class ``BalancedDataParallel`` of Transformer-XL (Dai et al. 2019,
        https://arxiv.org/abs/1901.02860) and ``torch.nn.parallel.data_parallel`` of torch 2.13.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> parallel = BalancedDataParallel(2, model, device_ids=["cpu", "cpu"])
        >>> parallel(torch.ones(8, 4)).shape
        torch.Size([8, 2])
        >>> parallel.split(8)
        (2, 6)
    """

    # nn.DataParallel annotates ints. Here, a device that is not an accelerator, such as the CPU, is
    # a torch.device instead of an int.
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
            fact = f"module must be an nn.Module, got {type(module).__name__}"
            raise ArgumentTypeError(f"{fact}; gpu0_bsz comes first")
        # nn.DataParallel.__init__ is skipped: it refuses the CPU, and may advise users to leave
        # out the smaller GPU.
        nn.Module.__init__(self)
        check_options(scalar_outputs, loss_weight)
        devices = resolve_devices(device_ids)
        self._device_type = default_device_type() or ""
        self.device_ids = [self._id_of(device) for device in devices]
        self.src_device_obj = devices[0] if devices else None
        where = "cpu" if output_device == -1 else output_device  # torch's index of the CPU
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

    # Threads cannot be compiled, so torch.compile must skip this method. The public decorator,
    # torch.compiler.disable, would make the import of this file a second slower, because it imports
    # Dynamo.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the output of the module for the whole batch, computed on all devices.

        With ``gather=False``, return the outputs of the replicas as a ``PerDevice``.

        Args:
            *inputs: the positional arguments of the module, for the whole batch.
            **kwargs: the keyword arguments of the module, for the whole batch.
        """
        with torch.autograd.profiler.record_function("BalancedDataParallel.forward"):
            if len(self.device_ids) < 2:
                return self._call_module(inputs, kwargs)
            batch_size = self._inputs(inputs, kwargs).batch_size()
            sizes = self.chunk_sizes = self._policy.begin_call(self.module, batch_size or 0)
            # A batch without samples, or a call that splits no input, runs on the first device.
            active = [i for i, size in enumerate(sizes) if size] or [0]
            ids = [self.device_ids[i] for i in active]
            call = self._new_call(ids, () if batch_size is None else [sizes[i] for i in active])
            # The methods below read the running call as ``self._current_call``.
            with advising(self.devices, sizes, self._policy.remedy), running(call):
                args, keywords = self.scatter(inputs, kwargs, ids)
                call.arguments = list(zip(args, keywords, strict=True))
                replicas = self.replicate(self.module, ids)
                with replicas.running() if isinstance(replicas, Replicas) else nullcontext():
                    outputs = self.parallel_apply(replicas, args, keywords)
                joined = self._joined(outputs, call)
                call.look_for_mixing(outputs)
                return joined

    def _inputs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        options = self.dim, self.broadcast, self.split_inputs, self._history.seen
        return Inputs(self.module.forward, inputs, kwargs, *options)

    def _call_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module itself, not a replica of it, with the whole batch.

        The batch is sent to the only device of ``device_ids`` or, if ``device_ids`` is empty, to
        the device that the module is on.
        """
        devices = self.devices
        [args], [keywords] = self.scatter(inputs, kwargs, devices)
        output = self.module(*args, **keywords)
        if self.gathers_outputs and self.output_device in (None, *self.device_ids):
            return output
        # A PerDevice needs the batch size for its ``chunk_sizes``. Joining one output works
        # without the batch size.
        batch_size = None if self.gathers_outputs else self._inputs(inputs, kwargs).batch_size()
        call = self._new_call(devices, () if batch_size is None else [batch_size])
        return self._joined([output], call)

    # The methods scatter, replicate, parallel_apply and gather override those of nn.DataParallel.
    # They have the same signatures, but work on devices of any type.

    @property
    def _current_call(self) -> Call | None:
        """The running call of this model, or None if no call is running.

        The methods below read the chunk sizes and other data from this ``Call``. They cannot get
        the data as arguments, because their signatures are those of ``nn.DataParallel``.
        """
        call: Call | None = current_call.get()
        return call if call and call.history is self._history else None

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: DeviceIds
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Split the arguments of the module over devices, in the same way as ``forward`` does.

        Args:
            inputs: the positional arguments for the whole batch.
            kwargs: the keyword arguments for the whole batch.
            device_ids: the devices to which the arguments are sent. ``forward`` passes the devices
                that run the module. If you call this method yourself, pass all devices of the
                model, or a single device, which gets the whole batch.

        Returns:
            A list with the positional arguments for each device, and a list with the keyword
            arguments for each device.
        """
        found = self._inputs(inputs, kwargs or {})
        sizes = call.chunk_sizes if (call := self._current_call) else ()
        if call is None and len(device_ids) > 1 and (batch_size := found.batch_size()):
            sizes = self.split(batch_size)
        arguments = found.scatter(self._devices_of(device_ids), sizes)
        return [args for args, _ in arguments], [keywords for _, keywords in arguments]

    def replicate(self, module: ModuleT, device_ids: DeviceIds) -> list[ModuleT]:
        """Return a replica of ``module`` for each device.

        A subclass that overrides this method must return the list that ``super().replicate()``
        returns. The first replica may have copies of buffers and parameters, for example if the
        first device gets no samples. After the call, ``forward`` uses the list to apply changes of
        these copies, such as new running statistics, to ``module``. With a plain list, these
        changes are lost.
        """
        homes = self.devices if self.spread else self.devices[:1]
        return self._replicator.replicate(module, self._devices_of(device_ids), homes)

    def parallel_apply(
        self, replicas: Sequence[ModuleT], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """Run each replica on its arguments, and return the output of each replica.

        If this method is used outside ``forward``, the replicas run on the first
        ``len(replicas)`` devices of ``device_ids``.
        """
        call = self._current_call or self._new_call(self.device_ids[: len(replicas)])
        pairs = list(zip(inputs, kwargs, strict=True))
        return parallel_apply(replicas, pairs, call.devices, call.chunk_sizes)

    def gather(self, outputs: Sequence[Any], output_device: int | torch.device) -> Any:
        """Join the outputs of the replicas on ``output_device``, and return the joined output."""
        [device] = self._devices_of([output_device])
        return Gather(device, self._current_call or self._new_call(self.device_ids)).join(outputs)

    def _new_call(self, device_ids: DeviceIds, sizes: Iterable[int] = ()) -> Call:
        """Return a ``Call``, which holds the data of one call of the model.

        Args:
            device_ids: the device of each replica.
            sizes: how many samples each replica gets; empty if the batch is not split.
        """
        options = self.dim, self.scalar_outputs, self.loss_weight
        devices, function = self._devices_of(device_ids), self.module.forward
        return Call(self._history, function, devices, tuple(sizes), *options)

    def _joined(self, outputs: Sequence[Any], call: Call) -> Any:
        """Return the outputs joined into one or, with ``gather=False``, as a ``PerDevice``."""
        output_device = call.devices[0] if self.output_device is None else self.output_device
        if self.gathers_outputs:
            return self.gather(outputs, output_device)
        [device] = self._devices_of([output_device])
        return PerDevice(outputs, call, device)

    @property
    def devices(self) -> list[torch.device]:
        """The devices in ``device_ids``, or the module's device if ``device_ids`` is empty."""
        here = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        return self._devices_of(self.device_ids) or [here]

    def _id_of(self, device: torch.device) -> int | torch.device:
        """Return the index of ``device`` if it is an accelerator, otherwise ``device`` itself."""
        return device.index if device.type == self._device_type else device

    def _devices_of(self, ids: Iterable[int | torch.device]) -> list[torch.device]:
        return [torch.device(self._device_type, i) if isinstance(i, int) else i for i in ids]

    @property
    def gpu0_bsz(self) -> int | None:
        """The maximum number of samples that the first device gets, or None for no limit.

        With ``"auto"``, the number of samples that the first device gets depends on the batch size.
        The attribute is the number for the largest training batch so far. If a checkpoint was
        loaded, the training batches of the run that saved it count, too. Before the first training
        batch, and without a checkpoint, the attribute is None. Reading the attribute also checks
        whether memory has run out in the current training iteration. If so, the value may change.

        The attribute may be set to any value that the constructor accepts.
        """
        return self._policy.gpu0_bsz

    @gpu0_bsz.setter
    def gpu0_bsz(self, value: int | Literal["auto"] | None) -> None:
        self._policy = split_policy(value, self.devices, self.device_weights)

    @property
    def device_weights(self) -> tuple[float, ...] | None:
        """The argument ``device_weights``; None if omitted, or with fewer than two devices."""
        return self._policy.device_weights

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return each device's number of samples for a batch of ``batch_size`` samples."""
        return self._policy.split(batch_size)

    @property
    def memory(self) -> MemoryProbe:
        """A new ``MemoryProbe``, which measures the memory of the devices of this model.

        Raises:
            ProbeError: a device has no memory statistics. ``"cpu"`` is such a device.
        """
        return MemoryProbe(self.devices)

    def check(self, *inputs: Any, **kwargs: Any) -> CheckResult:
        """Compare the results of a split batch with those of the whole batch on one device.

        Call this method once after wrapping a model. The split batch and the whole batch run in
        evaluation mode, with gradients enabled, on a copy of the module. So the parameters,
        gradients and buffers of the module stay as they are. The states of the random number
        generators are restored at the end. The whole batch runs on ``device_ids[0]``, which also
        holds the copy of the parameters, so give a small batch.

        Args:
            *inputs: the positional arguments of a call.
            **kwargs: the keyword arguments of a call.

        Returns:
            A ``CheckResult``, which ``print`` shows as a table. The table lists each output, and
            each parameter's gradient, that differs by more than rounding errors. For each
            difference, the table names the likely cause. The gradients are those of a weighted sum
            of the outputs.

        Examples:
            >>> parallel = BalancedDataParallel(1, torch.nn.Linear(4, 2), ["cpu", "cpu"])
            >>> print(parallel.check(torch.ones(8, 4)))
            3 outputs and gradients, chunks of (1, 7): all equal the whole batch's
        """
        return compare(self, inputs, kwargs)

    def shared_weights(self) -> AbstractContextManager[None]:
        """Context manager inside which all calls use the same copies of the weights.

        The weights are copied to a device only once, in the first call that uses the device. Use
        this for loops that do not change the weights, such as evaluation and gradient accumulation.
        Step the optimizer after the block. Inside the block, two kinds of writes raise no error,
        but do not reach all copies: writes through ``.data``, and writes to frozen weights, such as
        a moving average that ``module.forward`` updates.

        Raises:
            RuntimeError: after the first call in the block, a parameter that requires grad was
                changed, or any parameter was replaced, frozen or unfrozen. The next call in the
                block raises the error.

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
    """Other names of ``shared_weights``; ``no_sync`` is the name in ``DistributedDataParallel``."""

    @contextmanager
    def on_one_device(self) -> Iterator[ModuleT]:
        """Context manager that yields the module with all its parameters on ``device_ids[0]``.

        Use it to run the module itself, for example for ``generate`` or an export. With ``spread``,
        the module cannot run by itself outside this context, because its parameters are on several
        devices. After the block, each parameter is on its previous device again.
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
            # The state is stored in the metadata, beside the version of the module, because
            # nn.DataParallel would refuse another key in the state dict itself.
            destination._metadata[prefix[:-1]][STATE_KEY] = state

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if STATE_KEY in local_metadata:
            self._policy.load_state_dict(local_metadata[STATE_KEY])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> BalancedDataParallel[ModuleT]:
        # torch does not annotate this method.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # If a script calls cuda() on the wrapper, super()._apply has moved all parameters to the
        # first device. So they are spread again.
        if self.spread and {p.device for p in self.module.parameters()} == {self.src_device_obj}:
            spread_parameters(self.module, self.devices)
        return self
