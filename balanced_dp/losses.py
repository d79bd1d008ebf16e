"""What the mean of a loss is over, and how the losses of chunks make that of the batch."""

from __future__ import annotations

import functools
import math
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from .errors import ArgumentError, ArgumentTypeError, BalanceWarning
from .scatter_gather import ScalarOutputs, scatter

_MODULES: dict[Callable[..., Any], type[nn.Module]] = {
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.ctc_loss: nn.CTCLoss,
    functional.nll_loss: nn.NLLLoss,
}
"""Functions with more to them than a mean over samples, and modules that do the same."""

_COUNTING: tuple[type[Any], ...] = (
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    *filter(None, [getattr(nn, "LinearCrossEntropyLoss", None)]),  # from torch 2.13
)
"""Losses whose mean is over the targets that are not ignored, with their class weights."""


def as_module(criterion: Any) -> nn.Module:
    """Returns a criterion as a module, functions of torch as the modules that do the same.

    Raises:
        ArgumentTypeError: it is neither a module nor a function.
    """
    if isinstance(criterion, types.MethodType) and criterion.__name__ == "forward":
        criterion = criterion.__self__
    if isinstance(criterion, nn.Module):
        return criterion
    if not callable(criterion):
        raise ArgumentTypeError(f"criterion must be a module or a function, got {criterion!r}")
    function, options = criterion, {}
    if isinstance(criterion, functools.partial) and not criterion.args:
        function, options = criterion.func, criterion.keywords
    if isinstance(function, types.FunctionType) and function in _MODULES:
        return _MODULES[function](**options)
    return _Function(criterion)


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        options = getattr(function, "keywords", {})  # of a functools.partial
        self.reduction = getattr(function, "reduction", options.get("reduction", "mean"))


def reduction_of(criterion: nn.Module) -> str:
    """Returns what the criterion says that it makes of several losses, by default their mean."""
    return str(getattr(criterion, "reduction", "mean"))


def how_losses_join(criterion: nn.Module, dim: int = 0) -> ScalarOutputs:
    """Returns what makes one loss of those of the chunks, which were cut along ``dim``.

    Raises:
        ArgumentError: that depends on which dimension a negative ``dim`` is.
    """
    reduction = reduction_of(criterion)
    if reduction == "batchmean" and dim < 0:
        raise ArgumentError(f"reduction='batchmean' needs a dim of at least 0, got {dim}")
    # Where the batch is not the first dimension, "batchmean" divides all chunks by the same.
    return "sum" if reduction == "sum" or (reduction == "batchmean" and dim > 0) else "mean"


def loss_weights(
    loss_weight: Callable[..., Any], arguments: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]
) -> list[float]:
    """Returns what ``loss_weight`` says of each chunk's arguments.

    Raises:
        ArgumentError: it is no number of at least 0.
    """
    return [_number(loss_weight(*args, **kwargs)) for args, kwargs in arguments]


def _number(value: Any) -> float:
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if not isinstance(number, Real) or not 0 <= float(number) < math.inf:
        raise ArgumentError(f"loss_weight must return a number of at least 0, got {value!r}")
    return float(number)


# Targets that count.


def counts_targets(criterion: nn.Module) -> bool:
    """Returns whether the criterion's mean is over the targets that are not ignored."""
    return isinstance(criterion, _COUNTING) and reduction_of(criterion) == "mean"


def warn_of_hidden_counts(criterion: nn.Module) -> None:
    """Warns where a criterion that counts is part of one that is taken for a mean over samples."""
    hidden = [child for child in criterion.modules() if counts_targets(child)]
    if hidden and criterion not in hidden:
        inner, outer = type(hidden[0]).__name__, type(criterion).__name__
        warnings.warn(
            f"{outer} is taken for a mean over samples, but it holds a {inner}, whose mean is over "
            f"targets that are not ignored: give loss_weight, or derive {outer} from {inner}",
            BalanceWarning,
            stacklevel=3,
        )


def count_targets(replica: nn.Module) -> None:
    """Has a replica of a criterion that counts targets keep their number, for ``shares_of``."""
    cast(Any, replica).counts = []
    replica.__class__ = _counting_class(cast(Any, type(replica)))


def shares_of(replicas: Sequence[nn.Module], device: torch.device) -> list[torch.Tensor] | None:
    """Returns the part that each replica's mean has in that of the batch, None for samples.

    Raises:
        ArgumentError: it is not known, because a subclass does not call torch's ``forward`` once.
    """
    counts = [_only_count(replica) for replica in replicas]
    # In float64, where a count of tokens is exact.
    known = [count.to(device).double() for count in counts if count is not None]
    total = sum(known)
    return [_divisor(count) / total for count in known] or None


def _only_count(replica: nn.Module) -> torch.Tensor | None:
    counts = cast(Any, replica).counts
    if len(counts) != 1:
        raise ArgumentError(
            f"what the mean of {type(replica).__name__} is over is not known, since it calls "
            f"torch's forward {len(counts)} times; give loss_weight"
        )
    return cast("torch.Tensor | None", counts[0])


def _divisor(count: torch.Tensor) -> torch.Tensor:
    """Returns the count, 1 for nothing: its loss is 0, or of label smoothing alone."""
    return torch.where(count == 0, 1, count)


# Weakly, since a class made of the user's keeps that alive, and all that its functions refer to.
_counting_classes: weakref.WeakValueDictionary[Any, type[nn.Module]] = weakref.WeakValueDictionary()


def _counting_class(kind: Any) -> type[nn.Module]:
    """Returns the class with ``_Counting`` right above that of torch, below all others."""
    counting = _counting_classes.get(kind)
    if counting is None:
        base = next(base for base in _COUNTING if issubclass(kind, base))
        above_torch = types.new_class(base.__name__, (_Counting, base))
        bases = (above_torch,) if kind is base else (kind, above_torch)
        counting = _counting_classes[kind] = types.new_class(kind.__name__, bases)
    return counting


class _Counting(nn.Module):
    """A loss of torch that keeps what its mean was over, and whose mean over nothing is 0.

    It is where a subclass's ``super().forward`` leads, with the targets that count in the end.

    Source:
        The formulas of ``torch.nn.CrossEntropyLoss`` and ``torch.nn.NLLLoss``, torch 2.13.
    """

    counts: list[torch.Tensor | None]
    reduction: str

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.is_floating_point():  # probabilities of classes: all count
            self.counts.append(None)
            return cast(torch.Tensor, super().forward(input, target))
        count = _count(self, target)
        self.counts.append(count)
        # Fused with its linear layer, cross entropy saves memory only if it reduces itself.
        self.reduction = "none" if isinstance(self, _COUNTING[:2]) else "sum"
        try:
            losses = super().forward(input, target)
        finally:
            self.reduction = "mean"
        # Half precision could neither hold the sum nor the count.
        dtype = torch.promote_types(losses.dtype, torch.float32)
        mean: torch.Tensor = losses.sum(dtype=dtype) / _divisor(count).to(dtype)
        return mean.to(losses.dtype)


def _count(criterion: Any, target: torch.Tensor) -> torch.Tensor:
    ignore_index = -100 if criterion.ignore_index is None else criterion.ignore_index
    is_counted = torch.ne(target, ignore_index)
    if criterion.weight is None:
        return is_counted.sum()
    weights: torch.Tensor = criterion.weight[target.where(is_counted, 0).long()] * is_counted
    return weights.sum()


# Arguments that are not cut as others are.


def cut_weights_of_samples(
    replicas: Sequence[nn.Module],
    outputs: Sequence[Any],
    devices: Sequence[torch.device],
    chunk_sizes: Sequence[int] | None,
    dim: int,
) -> None:
    """Gives each replica its part of a weight that binary cross entropy has for each sample."""
    criterion, output = replicas[0], outputs[0]
    if not isinstance(criterion, nn.BCELoss | nn.BCEWithLogitsLoss) or chunk_sizes is None:
        return
    weight = criterion.weight
    if weight is None or not isinstance(output, torch.Tensor) or weight.dim() != output.dim():
        return
    if weight.dim() and weight.size(dim) == sum(chunk_sizes):
        parts = scatter([("weight", weight)], devices, chunk_sizes, dim)
        for replica, [part] in zip(replicas, parts, strict=True):
            replica.weight = part


def ctc_targets(
    targets: torch.Tensor, input_lengths: Any, target_lengths: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the arguments of ``CTCLoss`` after its first, as tensors of one row a sample."""
    lengths = torch.as_tensor(target_lengths)
    if targets.dim() == 1:
        targets = pad_sequence(targets.split(lengths.tolist()), batch_first=True)
    return targets, torch.as_tensor(input_lengths), lengths
