"""A model as ``Trainer`` calls it: of its outputs, those that the Trainer needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from transformers import Cache
from transformers.utils.generic import ModelOutput

from ..parallel.data_parallel import BalancedDataParallel
from ..parallel.losses.join import ChunkLosses


class TrainerParallel(BalancedDataParallel[nn.Module]):
    """A model as ``Trainer`` calls it."""

    gathers_loss_only = False
    """Return whether outputs but the loss stay where they are."""

    def gather(
        self,
        outputs: Sequence[Any],
        output_device: int | torch.device | None,
        losses: ChunkLosses | None = None,
    ) -> Any:
        """Return the joined outputs, in float32 as without a wrapper."""
        wanted = _loss_alone if self.gathers_loss_only else _without_caches
        joined = super().gather([wanted(output) for output in outputs], output_device, losses)
        is_autocast = torch.is_autocast_enabled(self.devices[0].type)
        return convert_to_fp32(joined) if is_autocast else joined


def _loss_alone(output: Any) -> Any:
    if isinstance(output, ModelOutput):
        return type(output)(loss=output["loss"]) if "loss" in output else output
    if isinstance(output, Mapping):
        return {"loss": output["loss"]} if "loss" in output else output
    return output[:1] if isinstance(output, tuple) else output


def _without_caches(output: Any) -> Any:
    """Return the output without the keys and values of a replica, which the Trainer ignores."""
    if not isinstance(output, ModelOutput):
        return output
    return type(output)(
        **{name: value for name, value in output.items() if not isinstance(value, Cache)}
    )
