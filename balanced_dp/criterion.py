"""The loss, computed on each device from its own chunk, as if it were of the whole batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from .arguments import check_broadcast, named_arguments
from .errors import ArgumentError, ArgumentTypeError
from .parallel_apply import describe_replicas, parallel_apply
from .per_device import PerDevice
from .replicate import WrittenState, replicate
from .scatter_gather import ScalarOutputs, gather, scatter

_MODULES: dict[Any, type[nn.Module]] = {
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.ctc_loss: nn.CTCLoss,
    functional.huber_loss: nn.HuberLoss,
    functional.kl_div: nn.KLDivLoss,
    functional.l1_loss: nn.L1Loss,
    functional.mse_loss: nn.MSELoss,
    functional.nll_loss: nn.NLLLoss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
}
"""Torch's losses as functions, and the modules that take the same keyword arguments."""


class BalancedCriterion(nn.Module):
    """A criterion whose value and gradients are those of the whole batch, computed in chunks.

    It is called with the :class:`PerDevice` that a model with ``gather=False`` returns, and the
    targets of the whole batch. Each device computes the loss of its own chunk, so that what the
    model returns, such as the logits of a vocabulary, never gathers on one device. A reduction
    ``"mean"`` divides by what the mean over the whole batch would: by samples, or, for cross
    entropy and ``NLLLoss``, by the targets that are not ignored, with their class weights.
    ``"sum"`` adds up, ``"none"`` joins. Anything but a :class:`PerDevice` goes to ``criterion`` as
    it is, so that the same line serves a bare model.

    Exact without a word are the losses of ``torch.nn``, their subclasses, and the functions of
    ``torch.nn.functional`` that have such a twin, alone or in a ``functools.partial``. **Any other
    callable is taken for a mean over samples** if it returns a 0-dim tensor and has no attribute
    ``reduction`` that says ``"sum"``; if it is a mean over anything else, give ``loss_weight``.
    Outputs, targets and losses may be nested: tuples, dictionaries, dataclasses.

    Args:
        criterion: the loss of output and targets, a module or a function. A module's parameters
            are trained and its buffers kept, as those of a replicated model.
        loss_weight: called for each chunk with the criterion's arguments; the number it returns
            replaces the chunk's number of samples as the weight of its loss. It is read before the
            loss is computed, which waits for the device. A chunk of weight 0 has no part in the
            loss, even if its own is NaN.
        broadcast: dotted paths of targets that go whole to each device, by the names of the
            criterion's parameters.

    Shape:
        - Outputs: a :class:`PerDevice` of what ``criterion`` takes for a chunk.
        - Targets: tensors of :math:`(N, *)`, with N at the model's ``dim``, on any device; for
          ``CTCLoss`` with N first, or one after the other, as it takes them.
        - Loss: 0-dim, or what ``criterion`` gives of the batch, on the model's output device.

    Raises:
        ArgumentError, ArgumentTypeError: an argument cannot be used.
        ScatterError, GatherError: on a call, a target cannot be cut or the losses not joined.

    Example:
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
    ) -> None:
        super().__init__()
        self.criterion = _as_module(criterion)
        self.loss_weight = loss_weight
        self.broadcast = frozenset([broadcast] if isinstance(broadcast, str) else broadcast)
        check_broadcast(self.broadcast, self.criterion.forward)
        if loss_weight is not None and how_losses_join(self.criterion) != "mean":
            raise ArgumentError("loss_weight weighs a mean, but the criterion's reduction is 'sum'")

    def forward(self, outputs: Any, *targets: Any, **kwargs: Any) -> Any:
        """Returns the loss of the whole batch."""
        if not isinstance(outputs, PerDevice):
            return self.criterion(outputs, *targets, **kwargs)
        dim = outputs.dim
        if isinstance(self.criterion, nn.CTCLoss):
            targets, kwargs, dim = _ctc_targets(*targets, **kwargs), {}, 0
        arguments = self._scatter(outputs, targets, kwargs, dim)
        weights: Sequence[float] | None = outputs.chunk_sizes
        joined_by = how_losses_join(self.criterion, _axis(outputs))
        replicas = replicate(self.criterion, outputs.devices)
        first_state = WrittenState(self.criterion, replicas[0])
        _cut_weights_of_samples(replicas, outputs)
        functions: Sequence[Callable[..., Any]] = replicas
        if self.loss_weight is not None:
            weights = loss_weights(self.loss_weight, arguments)
        elif (count := count_of_mean(self.criterion, *targets, **kwargs)) is not None:
            functions, joined_by = _shares_of_mean(replicas, outputs.devices, count), "sum"
        calls = [
            functools.partial(function, *args, **named)
            for function, (args, named) in zip(functions, arguments, strict=True)
        ]
        losses = parallel_apply(
            calls, outputs.devices, describe_replicas(outputs.devices, outputs.chunk_sizes)
        )
        first_state.write_back()
        return gather(losses, outputs.output_device, dim, joined_by, weights)

    def _scatter(
        self, outputs: PerDevice, targets: Sequence[Any], kwargs: Mapping[str, Any], dim: int
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Returns the criterion's arguments for each device."""
        _, *named = named_arguments(self.criterion.forward, (None, *targets), kwargs)
        chunks = scatter(named, outputs.devices, outputs.chunk_sizes, dim, self.broadcast)
        count = len(targets)
        return [
            ((output, *chunk[:count]), dict(zip(kwargs, chunk[count:], strict=True)))
            for output, chunk in zip(outputs, chunks, strict=True)
        ]


class ModuleWithLoss(nn.Module):
    """A module and its criterion in one, so that the loss is computed inside the forward pass.

    Wrapped in a ``BalancedDataParallel`` it gives what :class:`BalancedCriterion` gives of outputs
    that are not gathered: the loss of the whole batch, and its gradients.

    The state dict is the bare module's: the same keys, and nothing of the criterion. Save the state
    of a criterion that has parameters by itself.

    Args:
        module: gives the output of the inputs.
        criterion: gives the loss of output and targets, as of :class:`BalancedCriterion`. For a
            mean over anything but samples that is no loss of torch, give the
            ``BalancedDataParallel`` a ``loss_weight``.

    Raises:
        ArgumentTypeError: ``criterion`` is neither a module nor a function.

    Example:
        >>> from balanced_dp import BalancedDataParallel
        >>> with_loss = ModuleWithLoss(torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss())
        >>> model = BalancedDataParallel(1, with_loss, ["cpu", "cpu"])
        >>> model(torch.ones(8, 4), torch.arange(8) % 3).shape
        torch.Size([])
        >>> list(model.state_dict())
        ['module.weight', 'module.bias']
    """

    def __init__(self, module: nn.Module, criterion: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.criterion = _as_module(criterion)
        self.register_state_dict_post_hook(_to_bare_keys)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_from_bare_keys)  # type: ignore[no-untyped-call]

    def forward(self, inputs: Any, *targets: Any, **kwargs: Any) -> Any:
        """Returns the loss.

        Args:
            inputs: those of the module: a tuple of positional arguments, a dictionary of keyword
                arguments, or the only one.
            targets: positional arguments of the criterion after the output.
            kwargs: its keyword arguments.
        """
        if isinstance(inputs, tuple):
            output = self.module(*inputs)
        elif isinstance(inputs, dict):
            output = self.module(**inputs)
        else:
            output = self.module(inputs)
        return self.criterion(output, *targets, **kwargs)

    @property
    def loss_weight(self) -> Callable[..., torch.Tensor | int] | None:
        """What a chunk weighs, as a function of :meth:`forward`'s arguments; None for samples."""
        if not _counts_targets(self.criterion):
            return None

        def weight(inputs: Any, *targets: Any, **kwargs: Any) -> torch.Tensor | int:
            count = count_of_mean(self.criterion, *targets, **kwargs)
            # Probabilities of classes are as many for each sample.
            return [*targets, *kwargs.values()][0].numel() if count is None else count

        return weight


def how_losses_join(criterion: nn.Module, dim: int = 0) -> ScalarOutputs:
    """Returns what makes one loss of those of the chunks, which were cut along ``dim``."""
    reduction = getattr(criterion, "reduction", "mean")
    # Where the batch is not the first dimension, "batchmean" divides all chunks by the same.
    return "sum" if reduction == "sum" or (reduction == "batchmean" and dim != 0) else "mean"


def loss_weights(
    loss_weight: Callable[..., Any], arguments: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]
) -> list[float]:
    """Returns what ``loss_weight`` says of each chunk's arguments.

    Raises:
        ArgumentError: it is no number of at least 0.
    """
    return [_number(loss_weight(*args, **kwargs)) for args, kwargs in arguments]


def _number(value: Any) -> float:
    number = value.item() if isinstance(value, torch.Tensor) else value
    if not isinstance(number, Real) or not 0 <= float(number) < math.inf:
        raise ArgumentError(f"loss_weight must return a number of at least 0, got {value!r}")
    return float(number)


_COUNTING = (
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    *filter(None, [getattr(nn, "LinearCrossEntropyLoss", None)]),  # from torch 2.13
)


def _counts_targets(criterion: nn.Module) -> bool:
    return isinstance(criterion, _COUNTING) and criterion.reduction == "mean"


def count_of_mean(criterion: nn.Module, *targets: Any, **kwargs: Any) -> torch.Tensor | None:
    """Returns what the mean of a loss is divided by, None where that is the number of samples.

    Targets that are class indices may be ignored, and weigh as their class does; so it is the sum
    of the weights of those that are not ignored.

    Source:
        The formulas of ``torch.nn.CrossEntropyLoss`` and ``torch.nn.NLLLoss``, torch 2.13.

    Raises:
        ArgumentError: the target is no tensor.
    """
    if not _counts_targets(criterion):
        return None
    target = targets[0] if targets else kwargs.get("target")
    if not isinstance(target, torch.Tensor):
        raise ArgumentError(
            f"the mean of {type(criterion).__name__} is over targets that are not ignored, but "
            f"its target is a {type(target).__name__}; give loss_weight"
        )
    if target.is_floating_point():  # probabilities of classes
        return None
    ignore_index = -100 if criterion.ignore_index is None else criterion.ignore_index
    is_counted = torch.ne(target, cast(int, ignore_index))
    weight = criterion.weight
    if not isinstance(weight, torch.Tensor):
        return is_counted.sum()
    classes = target.where(is_counted, 0).to(weight.device)
    weights: torch.Tensor = weight[classes] * is_counted.to(weight.device)
    return weights.sum()


def _shares_of_mean(
    replicas: Sequence[nn.Module], devices: Sequence[torch.device], count: torch.Tensor
) -> list[Callable[..., torch.Tensor]]:
    """Returns for each device what computes its share of the mean; the shares add up to it.

    A chunk of which nothing counts gives 0, where its own mean would be 0 / 0.
    """

    def share(replica: nn.Module, count: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        losses = replica(*args, **kwargs)
        # Half precision could neither hold the sum nor the count.
        dtype = torch.promote_types(losses.dtype, torch.float32)
        mean: torch.Tensor = losses.sum(dtype=dtype) / count.to(dtype)
        return mean.to(losses.dtype)

    for replica in replicas:
        # Fused with its linear layer, cross entropy has its savings in a sum only.
        cast(Any, replica).reduction = "none" if isinstance(replica, _COUNTING[:2]) else "sum"
    return [
        functools.partial(share, replica, on_device)
        for replica, [on_device] in zip(
            replicas, scatter([("count", count)], devices, None), strict=True
        )
    ]


def _cut_weights_of_samples(replicas: Sequence[nn.Module], outputs: PerDevice) -> None:
    """Gives each replica its part of a weight that binary cross entropy has for each sample."""
    criterion, sizes = replicas[0], outputs.chunk_sizes
    if not isinstance(criterion, nn.BCELoss | nn.BCEWithLogitsLoss) or sizes is None:
        return
    weight = criterion.weight
    if weight is None or weight.dim() != outputs[0].dim():
        return
    if weight.size(outputs.dim) == sum(sizes):
        parts = scatter([("weight", weight)], outputs.devices, sizes, outputs.dim)
        for replica, [part] in zip(replicas, parts, strict=True):
            replica.weight = part


def _ctc_targets(
    targets: torch.Tensor, input_lengths: Any, target_lengths: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the arguments of ``CTCLoss`` after its first, as tensors of one row a sample."""
    lengths = torch.as_tensor(target_lengths)
    if targets.dim() == 1:
        targets = pad_sequence(targets.split(lengths.tolist()), batch_first=True)
    return targets, torch.as_tensor(input_lengths), lengths


def _axis(outputs: PerDevice) -> int:
    num_dims = outputs[0].dim() if isinstance(outputs[0], torch.Tensor) else 0
    return outputs.dim % num_dims if num_dims else outputs.dim


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        options = getattr(function, "keywords", {})  # of a functools.partial
        self.reduction = getattr(function, "reduction", options.get("reduction", "mean"))


def _as_module(criterion: Any) -> nn.Module:
    if isinstance(criterion, nn.Module):
        return criterion
    function, options = criterion, {}
    if isinstance(criterion, functools.partial) and not criterion.args:
        function, options = criterion.func, criterion.keywords
    if function in _MODULES:
        return _MODULES[function](**options)
    if not callable(criterion):
        raise ArgumentTypeError(f"criterion must be a module or a function, got {criterion!r}")
    return _Function(criterion)


def _to_bare_keys(
    module: ModuleWithLoss, state_dict: Any, prefix: str, local_metadata: Any
) -> None:
    """Gives a state dict that was just made the keys of the bare module, and nothing else."""
    own, others = f"{prefix}module.", f"{prefix}criterion."
    for keys in (state_dict, getattr(state_dict, "_metadata", {})):
        for key in [key for key in keys if f"{key}.".startswith(others)]:
            del keys[key]
        for key in [key for key in keys if f"{key}.".startswith(own)]:
            keys[(prefix + key[len(own) :]).removesuffix(".")] = keys.pop(key)


def _from_bare_keys(module: ModuleWithLoss, state_dict: Any, prefix: str, *_: Any) -> None:
    """Gives a state dict that is about to be loaded the keys of the modules that take it."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
    for key, value in module.criterion.state_dict().items():  # stays as it is
        state_dict[f"{prefix}criterion.{key}"] = value
