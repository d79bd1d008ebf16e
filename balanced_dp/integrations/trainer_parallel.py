"""The ``BalancedDataParallel`` of ``BalancedTrainer``."""

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
    """A ``BalancedDataParallel`` that gathers only the outputs that ``Trainer`` needs."""

    gathers_loss_only = False
    """Whether only the loss is gathered."""

    def gather(
        self,
        outputs: Sequence[Any],
        output_device: int | torch.device,
        losses: ChunkLosses | None = None,
    ) -> Any:
        """Gather the outputs; with autocast, convert them to float32 as accelerate does."""
        select = _loss_only if self.gathers_loss_only else _without_caches
        gathered = super().gather([select(output) for output in outputs], output_device, losses)
        is_autocast = torch.is_autocast_enabled(self.devices[0].type)
        return convert_to_fp32(gathered) if is_autocast else gathered


def _loss_only(output: Any) -> Any:
    if isinstance(output, ModelOutput):
        return type(output)(loss=output["loss"]) if "loss" in output else output
    if isinstance(output, Mapping):
        return {"loss": output["loss"]} if "loss" in output else output
    return output[:1] if isinstance(output, tuple) else output


def _without_caches(output: Any) -> Any:
    """Return the output without its key-value caches, which the Trainer ignores."""
    if not isinstance(output, ModelOutput):
        return output
    return type(output)(
        **{name: value for name, value in output.items() if not isinstance(value, Cache)}
    )
