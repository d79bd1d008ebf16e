"""The loss, computed on each device from its own chunk, as if it were of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .arguments import check_broadcast, named_arguments
from .errors import ArgumentError, ArgumentTypeError, ScatterError
from .losses import (
    as_module,
    count_targets,
    counts_targets,
    ctc_targets,
    cut_weights_of_samples,
    how_losses_join,
    loss_weights,
    reduction_of,
    shares_of,
    warn_of_hidden_counts,
)
from .parallel_apply import describe_replicas, parallel_apply
from .per_device import PerDevice
from .replicate import WrittenState, replicate
from .scatter_gather import Weights, gather, scatter

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


class BalancedCriterion(nn.Module):
    """A criterion whose value and gradients are those of the whole batch, computed in chunks.

    It is called with the ``PerDevice`` that a model with ``gather=False`` returns, and the
    targets of the whole batch. Each device computes the loss of its own chunk, so that what the
    model returns, such as the logits of a vocabulary, never gathers on one device. A reduction
    ``"mean"`` divides by what the mean over the whole batch would: by samples, or, for cross
    entropy and ``NLLLoss``, by the targets that are not ignored, with their class weights.
    ``"sum"`` adds up, ``"none"`` joins. Anything but a ``PerDevice`` goes to ``criterion`` as
    it is, so that the same line serves a bare model.

    Exact without a word are the losses of ``torch.nn``, subclasses that change what they hand to
    ``super().forward``, and ``torch.nn.functional``'s in a ``functools.partial`` or alone. **Any
    other callable is taken for a mean over samples** if it returns a 0-dim tensor and has no
    attribute ``reduction`` that says ``"sum"``, also one that uses a loss of torch; if it is a mean
    over anything else, give ``loss_weight``. Outputs, targets and losses may be nested: tuples,
    dictionaries, dataclasses; a target may be another ``PerDevice``.

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
        - Outputs: a ``PerDevice`` of what ``criterion`` takes for a chunk.
        - Targets: tensors of ``(N, *)``, with N at the model's ``dim``, on any device; for
          ``CTCLoss`` with N first, or one after the other, as it takes them.
        - Loss: 0-dim, or what ``criterion`` gives of the batch, on the model's output device.

    Raises:
        ArgumentError, ArgumentTypeError: an argument cannot be used.
        ScatterError, GatherError: on a call, a target cannot be cut or the losses not joined.

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
    ) -> None:
        super().__init__()
        self.criterion = as_module(criterion)
        self.loss_weight = loss_weight
        self.broadcast = frozenset([broadcast] if isinstance(broadcast, str) else broadcast)
        check_broadcast(self.broadcast, self.criterion.forward)
        if loss_weight is None:
            warn_of_hidden_counts(self.criterion)
            return
        if not callable(loss_weight):
            raise ArgumentTypeError(f"loss_weight must be a function, got {loss_weight!r}")
        if reduction_of(self.criterion) == "sum":
            raise ArgumentError("loss_weight weighs a mean, but the criterion's reduction is 'sum'")

    def forward(self, outputs: Any, *targets: Any, **kwargs: Any) -> Any:
        """Returns the loss of the whole batch."""
        if not isinstance(outputs, PerDevice):
            return self.criterion(outputs, *targets, **kwargs)
        if "reduction" in kwargs:
            raise ArgumentError(
                "reduction is given with the call, but has to be known before: give it to the "
                "criterion, or in a functools.partial"
            )
        dim = outputs.dim
        if type(self.criterion).forward is nn.CTCLoss.forward:
            targets, kwargs, dim = ctc_targets(*targets, **kwargs), {}, 0
        arguments = self._scatter(outputs, targets, kwargs, dim)
        replicas = replicate(self.criterion, outputs.devices)
        first_state = WrittenState(self.criterion, replicas[0])
        cut_weights_of_samples(replicas, outputs, outputs.devices, outputs.chunk_sizes, outputs.dim)
        weights: Weights | None = outputs.chunk_sizes
        is_counting = self.loss_weight is None and counts_targets(self.criterion)
        if self.loss_weight is not None:
            weights = loss_weights(self.loss_weight, arguments)
        elif is_counting:
            for replica in replicas:
                count_targets(replica)
        calls = [
            functools.partial(replica, *args, **named)
            for replica, (args, named) in zip(replicas, arguments, strict=True)
        ]
        description = describe_replicas(outputs.devices, outputs.chunk_sizes)
        losses = parallel_apply(calls, outputs.devices, description, outputs.workers)
        first_state.write_back()
        if is_counting:
            weights = shares_of(replicas, outputs.output_device) or weights
        elif self.loss_weight is None and reduction_of(self.criterion) == "none":
            _check_not_reduced(self.criterion, losses[0])
        joined_by = how_losses_join(self.criterion, _axis(outputs))
        return gather(losses, outputs.output_device, dim, joined_by, weights)

    def _scatter(
        self, outputs: PerDevice, targets: Sequence[Any], kwargs: Mapping[str, Any], dim: int
    ) -> list[Arguments]:
        """Returns the criterion's arguments for each device."""
        _, *named = named_arguments(self.criterion.forward, (None, *targets), kwargs)
        # Other outputs that stay where they are need no cutting.
        stays = {name: value for name, value in named if isinstance(value, PerDevice)}
        for name, value in stays.items():
            if (value.devices, value.chunk_sizes) != (outputs.devices, outputs.chunk_sizes):
                raise ScatterError(f"{name} is {value!r}, but the output is {outputs!r}")
        cut = [(name, None if name in stays else value) for name, value in named]
        chunks = scatter(cut, outputs.devices, outputs.chunk_sizes, dim, self.broadcast)
        for index, (name, _) in enumerate(named):
            for chunk, own in zip(chunks, stays.get(name, ()), strict=False):
                chunk[index] = own
        count = len(targets)
        return [
            ((output, *chunk[:count]), dict(zip(kwargs, chunk[count:], strict=True)))
            for output, chunk in zip(outputs, chunks, strict=True)
        ]


def _check_not_reduced(criterion: nn.Module, loss: Any) -> None:
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        name = type(criterion).__name__
        raise ArgumentError(
            f"{name} has reduction='none', but returns a single loss, and what that is a mean or "
            "sum of is not known; give loss_weight, or reduction='sum'"
        )


def _axis(outputs: PerDevice) -> int:
    num_dims = outputs[0].dim() if isinstance(outputs[0], torch.Tensor) else 0
    return outputs.dim % num_dims if num_dims else outputs.dim


class ModuleWithLoss(nn.Module):
    """A module and its criterion in one, so that the loss is computed inside the forward pass.

    Wrapped in a ``BalancedDataParallel`` it gives the loss of the whole batch, as
    ``BalancedCriterion`` does of outputs that are not gathered. What a criterion holds for
    each sample, as a weight of ``BCELoss``, is not cut here, nor are ``CTCLoss``'s targets if they
    are one after the other.

    The state dict is the bare module's: the same keys, and **nothing of the criterion**. One that
    has parameters is trained, and its state is to be saved by itself.

    Args:
        module: gives the output of the inputs.
        criterion: gives the loss of output and targets, as of ``BalancedCriterion``. For a
            mean over anything but samples that is no loss of torch, give the
            ``BalancedDataParallel`` a ``loss_weight``.

    Raises:
        ArgumentTypeError: ``criterion`` is neither a module nor a function.

    Examples:
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
        self.criterion = as_module(criterion)
        # Torch gives these three methods no types.
        self.register_state_dict_post_hook(_to_bare_keys)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_from_bare_keys)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_name_bare_keys)  # type: ignore[no-untyped-call]
        self._loaded_prefix = ""

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


def _to_bare_keys(
    module: ModuleWithLoss, state_dict: Any, prefix: str, local_metadata: Any
) -> None:
    """Gives a state dict that was just made the keys of the bare module, and nothing else."""
    own, others = f"{prefix}module.", f"{prefix}criterion."
    for key in [key for key in state_dict if key.startswith(others)]:
        del state_dict[key]
    for key in [key for key in state_dict if key.startswith(own)]:
        state_dict[prefix + key.removeprefix(own)] = state_dict.pop(key)
    # Versions of modules are looked up by the bare names, and by ours when we load it.
    versions = getattr(state_dict, "_metadata", {})
    for key in [key for key in versions if f"{key}.".startswith(own)]:
        versions[(prefix + f"{key}.".removeprefix(own)).removesuffix(".")] = versions[key]


def _from_bare_keys(module: ModuleWithLoss, state_dict: Any, prefix: str, *_: Any) -> None:
    """Gives a state dict that is about to be loaded the keys of the modules that take it."""
    module._loaded_prefix = prefix
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
    for key, value in module.criterion.state_dict().items():  # stays as it is
        state_dict[f"{prefix}criterion.{key}"] = value


def _name_bare_keys(module: ModuleWithLoss, incompatible_keys: Any) -> None:
    """Has errors of loading name the keys that the state dict has."""
    own = f"{module._loaded_prefix}module."
    for keys in incompatible_keys:
        keys[:] = [
            module._loaded_prefix + key.removeprefix(own) if key.startswith(own) else key
            for key in keys
        ]
