"""A sequence of the outputs of the replicas, each on the device that computed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .gather import Gather
from .losses.cross_entropy import running
from .losses.join import Call
from .losses.weights import ScalarOutputs, check_options
from .parallel_apply import parallel_apply
from .scatter import Inputs, Scattered

_REMEDY = (
    "it holds one output for each device; use each in the function given to BalancedCriterion or "
    "map, or join them with gather(); a loss that the model returns is in outputs[0]"
)


class PerDevice(Scattered):
    """The outputs of a ``BalancedDataParallel`` with ``gather=False``, one for each device.

    A ``PerDevice`` is a sequence of the outputs of those devices that had samples. If the
    ``BalancedDataParallel`` has ``scalar_outputs="auto"``, the losses in the outputs are already
    joined: each output contains the loss of the whole batch. So call ``backward`` on the loss in
    only one of the outputs.

    Args:
        outputs: the output of each replica, on the device of the replica.
        call: the ``Call`` that computed the outputs. It holds the chunk sizes, and says how 0-dim
            outputs are joined.
        output_device: the device on which ``gather`` joins the outputs, and on which ``map`` joins
            the results of the function that it calls.

    Attributes:
        devices: the device of each output.
        chunk_sizes: how many samples each output has; None if the inputs were not split.
        output_device: the argument ``output_device``.
        dim: the batch dimension of the outputs.

    Raises:
        ScatterError: in ``map``, an argument cannot be split.
        GatherError: in ``gather``, the outputs cannot be joined; in ``map``, the results of the
            function cannot be joined.

    Examples:
        >>> from balanced_dp import BalancedDataParallel
        >>> model = torch.nn.Linear(4, 2)
        >>> outputs = BalancedDataParallel(2, model, ["cpu", "cpu"], gather=False)(torch.ones(8, 4))
        >>> outputs.chunk_sizes, outputs[1].shape
        ((2, 6), torch.Size([6, 2]))
        >>> outputs.map(lambda logits: logits.argmax(-1)).shape
        torch.Size([8])
    """

    def __init__(self, outputs: Sequence[Any], call: Call, output_device: torch.device) -> None:
        self._outputs = tuple(call.with_joined_losses(outputs, output_device))
        self.output_device = output_device
        self.dim = call.dim
        self.devices = tuple(call.devices)
        self.chunk_sizes = call.chunk_sizes or None
        # This is a new Call, because ``call`` would keep the model and the arguments alive.
        split = self.devices, call.chunk_sizes, self.dim
        self._call = Call(call.history, type(self).gather, *split, call.scalar_outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            raise TypeError(f"PerDevice has no item {index!r}: {_REMEDY}")
        return self._outputs[index]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"PerDevice has no attribute {name!r}: {_REMEDY}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        """Raise TypeError, because torch's functions do not take a ``PerDevice``."""
        raise TypeError(f"{function.__name__} takes tensors, but got a PerDevice: {_REMEDY}")

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.devices))
        return f"PerDevice(devices=({devices}), chunk_sizes={self.chunk_sizes})"

    def gather(self) -> Any:
        """Return the joined outputs on ``output_device``, as the model with ``gather=True`` does.

        Raises:
            GatherError: the outputs cannot be joined, for example because their structures differ.
        """
        return Gather(self.output_device, self._call).join(self._outputs)

    def map(
        self,
        function: Callable[..., Any],
        *args: Any,
        scalar_outputs: ScalarOutputs = "auto",
        **kwargs: Any,
    ) -> Any:
        """Call ``function(output, *args, **kwargs)`` on each device; return the joined results.

        Use it to compute small metrics of large outputs, as in ``outputs.map(num_right, labels,
        scalar_outputs="sum")`` with a function ``num_right(logits, labels)``. If the results need
        no gradients, call ``map`` under ``torch.no_grad()``, so that they hold no autograd graph.

        Args:
            function: the function, which is called once for each output, in parallel. For an output
                of ``n`` samples, it must return 0-dim tensors, or tensors whose batch dimension has
                size ``n``.
            *args: further positional arguments of the function, for the whole batch. Tensors are
                split over the devices as the batch was.
            **kwargs: keyword arguments of the function, for the whole batch. They are split in the
                same way as the positional arguments.
            scalar_outputs: how 0-dim results are joined, as in ``BalancedDataParallel``:
                ``"auto"``, ``"mean"``, ``"sum"`` or ``"stack"``.

        Raises:
            ScatterError: an argument cannot be split as the batch was.
            GatherError: the results differ in structure, or in a value that is not a tensor.
            ArgumentError: ``scalar_outputs`` is none of the four strings above.
        """
        check_options(scalar_outputs)
        call = replace(self._call, function=function, scalar_outputs=scalar_outputs)
        inputs = Inputs(function, (self, *args), kwargs, self.dim, warned=call.history.seen)
        return self._run([function] * len(self), inputs, call)

    def _run(self, functions: Sequence[Callable[..., Any]], inputs: Inputs, call: Call) -> Any:
        """Call a function on each device; return the results, joined on ``output_device``.

        Args:
            functions: the function for each device.
            inputs: the arguments for the whole batch, which are split over the devices.
            call: the ``Call`` that says how the results are joined.
        """
        devices, sizes = self.devices, call.chunk_sizes
        arguments = call.arguments = inputs.scatter(devices, sizes)
        with running(call):
            results = parallel_apply(functions, arguments, devices, sizes)
        joined = Gather(self.output_device, call).join(results)
        call.look_for_mixing(results)
        return joined
