"""A model as ``Trainer`` calls it: the batch as keywords, the loss weighed by its labels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from transformers import Cache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import ModelOutput

from ..data_parallel import BalancedDataParallel
from ..scatter_gather import Weights

_NUM_ITEMS = "num_items_in_batch"


class TrainerParallel(BalancedDataParallel[nn.Module]):
    """A model as ``Trainer`` calls it: with the batch as keywords, ``labels`` among them.

    A model's loss is the mean over the labels of its chunk that count, or, where it is told
    ``num_items_in_batch``, their sum divided by that. Both become the batch's if each replica is
    told its own part of that number, and the losses are averaged by how many labels they are of.
    """

    label_name = "labels"
    """What the targets are called."""

    shifts_labels = False
    """Whether the first label of each sample is no target, as in causal language models."""

    gathers_loss_only = False
    """Whether outputs but the loss stay where they are."""

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[int | torch.device],
        chunk_sizes: Sequence[int] | None = None,
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Returns each device's arguments, with its own ``num_items_in_batch``."""
        all_inputs, chunks = super().scatter(inputs, kwargs, device_ids, chunk_sizes)
        counts = [self.num_labels(chunk) for chunk in chunks]
        if chunks[0].get(_NUM_ITEMS) is None or any(count is None for count in counts):
            return all_inputs, chunks
        if self.scalar_outputs != "mean":  # each divides by the whole, and they add up
            return all_inputs, chunks
        first, *others = (count.double() for count in counts if count is not None)
        whole = sum((count.to(first.device) for count in others), first)
        for chunk, count in zip(chunks, (first, *others), strict=True):
            total = whole.to(count.device)
            # Of a batch without labels that count each replica's loss is 0, whatever divides it.
            share = torch.where(total > 0, count / total, 1.0)
            chunk[_NUM_ITEMS] = chunk[_NUM_ITEMS] * share
        return all_inputs, chunks

    def num_labels(self, chunk: Mapping[str, Any]) -> torch.Tensor | None:
        """Returns how many labels count, as ``Trainer`` does, None where there are none."""
        if self.loss_weight is not None:
            return torch.as_tensor(self.loss_weight(**chunk))
        labels = chunk.get(self.label_name)
        if isinstance(chunk.get("shift_labels"), torch.Tensor):
            labels = chunk["shift_labels"]
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return None
        if "shift_labels" not in chunk and self.shifts_labels and labels.dim() > 1:
            labels = labels[..., 1:]
        return labels.ne(-100).sum()

    def gather(
        self,
        outputs: Sequence[Any],
        output_device: int | torch.device | None,
        weights: Weights | None = None,
    ) -> Any:
        """Returns the joined outputs, in float32 as without a wrapper."""
        wanted = _loss_alone if self.gathers_loss_only else _without_caches
        outputs = [wanted(output) for output in outputs]
        joined = super().gather(outputs, output_device, weights)
        is_autocast = torch.is_autocast_enabled(self.devices[0].type)
        return convert_to_fp32(joined) if is_autocast else joined

    def _weights(
        self,
        inputs: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        chunk_sizes: Sequence[int] | None,
    ) -> Sequence[float] | None:
        counts = [self.num_labels(chunk) for chunk in kwargs]
        known = [count.to(self.devices[0]) for count in counts if count is not None]
        return torch.stack(known).tolist() if len(known) == len(counts) else chunk_sizes


def shifts_labels_of(model: Any) -> bool:
    """Returns whether the first label of each sample is no target of the model's own loss."""
    if hasattr(model, "get_base_model"):  # of peft
        model = model.get_base_model()
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    # Every model of transformers has a loss_function, which many do not use.
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    uses_it = code is not None and "loss_function" in code.co_names
    return uses_it and getattr(model, "loss_function", None) is ForCausalLMLoss


def _loss_alone(output: Any) -> Any:
    if isinstance(output, ModelOutput):
        return type(output)(loss=output["loss"]) if "loss" in output else output
    if isinstance(output, Mapping):
        return {"loss": output["loss"]} if "loss" in output else output
    return output[:1] if isinstance(output, tuple) else output


def _without_caches(output: Any) -> Any:
    """Returns the output without the keys and values of a replica, which the Trainer ignores."""
    if not isinstance(output, ModelOutput):
        return output
    return type(output)(
        **{name: value for name, value in output.items() if not isinstance(value, Cache)}
    )
