"""Compute the loss of the whole batch from the losses that each device computes on its chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentTypeError
from .losses.join import Call, OutputHistory
from .losses.weights import check_options
from .nested import check_paths
from .per_device import PerDevice
from .replicate import Replicator
from .scatter import Inputs


class BalancedCriterion(nn.Module):
    """A criterion that computes the loss of the whole batch without gathering the outputs.

    Call it with the ``PerDevice`` that a ``BalancedDataParallel`` with ``gather=False`` returns,
    and with the targets of the whole batch. Each device computes the loss of its own chunk of the
    batch, so that large outputs, such as the logits of a language model, are never gathered on one
    device. The losses of the devices are joined into one, as a ``BalancedDataParallel`` joins the
    losses that a model returns. Losses with a row for each sample are concatenated. The value and
    the gradients are those of the whole batch. If a loss may differ from the loss of the whole
    batch, a warning names this loss.

    If the outputs are not a ``PerDevice``, they are passed to ``criterion`` unchanged. So the same
    line of code works for a module that is not wrapped.

    Outputs, targets and losses may be nested in tuples, dictionaries and dataclasses; a target may
    be another ``PerDevice``.

    Args:
        criterion: a module or function that computes a loss from an output and targets. If it is a
            module, its parameters are trained and its buffers are updated, like those of the model.
        loss_weight: a function that returns the weight of a chunk's loss, as in
            ``BalancedDataParallel``.
        broadcast: dotted paths (such as ``"target.mask"``) of targets that are passed whole to each
            device. A path begins with the name of an argument of ``criterion``.
        split: dotted paths of targets to split. Tensors with one row for each sample are split
            anyway, and need not be named. Name each list, tuple or array with one or more entries
            for each sample, and each tensor with several rows for each sample. Each device gets the
            entries of its samples.

    Shape:
        - Outputs: a ``PerDevice`` with one output for each chunk. ``criterion`` is called with each
          of these outputs.
        - Targets: tensors of ``(N, *)``, with the batch size N at the model's ``dim``, on any
          device.
        - Loss: the loss that ``criterion`` computes for the whole batch, on the model's output
          device. It is 0-dim or, as with ``reduction="none"``, has a row for each sample.

    Raises:
        ArgumentError, ArgumentTypeError: an argument cannot be used.
        ScatterError: on a call, a target cannot be split.
        GatherError: on a call, the losses cannot be joined.

    Warns:
        BalanceWarning: once for each loss that may differ from the loss of the whole batch.

    Examples:
        >>> from balanced_dp import BalancedDataParallel
        >>> model = BalancedDataParallel(1, torch.nn.Linear(4, 3), ["cpu", "cpu"], gather=False)
        >>> criterion = BalancedCriterion(torch.nn.CrossEntropyLoss(ignore_index=0))
        >>> criterion(model(torch.ones(8, 4)), torch.arange(8) % 3).shape
        torch.Size([])
    """

    def __init__(
        self,
        criterion: Callable[..., Any],
        *,
        loss_weight: Callable[..., Any] | None = None,
        broadcast: Iterable[str] = (),
        split: Iterable[str] = (),
    ) -> None:
        super().__init__()
        if not callable(criterion) or isinstance(criterion, type):
            fact = f"criterion must be a module or a function, got {criterion!r}"
            remedy = f"; pass {criterion.__name__}()" if isinstance(criterion, type) else ""
            raise ArgumentTypeError(fact + remedy)
        module = criterion if isinstance(criterion, nn.Module) else _Function(criterion)
        self.criterion = module
        check_options("auto", loss_weight)
        self.loss_weight = loss_weight
        self._function = module.function if isinstance(module, _Function) else module.forward
        self.broadcast = check_paths("broadcast", broadcast, self._function)
        self.split = check_paths("split", split, self._function)
        self._history = OutputHistory()
        self._replicator = Replicator()

    def forward(self, outputs: Any, *targets: Any, **kwargs: Any) -> Any:
        """Return the loss of the whole batch, joined from the losses of the devices.

        Args:
            outputs: the ``PerDevice`` that the model returned. Anything else is passed to the
                criterion unchanged.
            *targets: further positional arguments of the criterion, for the whole batch.
            **kwargs: keyword arguments of the criterion, for the whole batch.
        """
        if not isinstance(outputs, PerDevice):
            return self.criterion(outputs, *targets, **kwargs)
        dim, sizes, devices = outputs.dim, outputs.chunk_sizes or (), outputs.devices
        replicas = self._replicator.replicate(self.criterion, devices)
        options = dim, self.broadcast, self.split, self._history.seen
        inputs = Inputs(self._function, (outputs, *targets), kwargs, *options)
        call = Call(self._history, self._function, devices, sizes, dim, "auto", self.loss_weight)
        with replicas.running():
            return outputs._run(replicas, inputs, call)


class _Function(nn.Module):
    """A module that calls a function.

    If the function is a ``functools.partial`` with only keyword arguments, the tensors among these
    arguments become buffers of this module, so that they are copied to each device.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        options: Mapping[str, Any] = {}
        if isinstance(function, functools.partial) and not function.args:
            options, function = function.keywords, function.func
        self.function = function
        self._options = {n: v for n, v in options.items() if not isinstance(v, torch.Tensor)}
        for name in options.keys() - self._options.keys():
            self.register_buffer(name, options[name], persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the given arguments and the stored keyword arguments."""
        return self.function(*args, **{**self._options, **self._buffers, **kwargs})
