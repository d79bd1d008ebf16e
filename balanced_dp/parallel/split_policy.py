"""How many samples of a batch each device gets: by a number or by weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..devices import is_out_of_memory
from ..errors import ArgumentError, add_note, warn
from ..split import even_share, split_batch, split_by_weights


class SplitPolicy:
    """The rule by which batches are split: by a number or by weights.

    Args:
        gpu0_bsz: the most samples for the first device, or None for no limit.
        devices: the devices that share a batch.
        device_weights: if given, batches are split in proportion to them.
        spread: whether parameters are spread over the devices. Then the first one holds little more
            than the others, so no value gives a warning.

    Raises:
        ArgumentError, ArgumentTypeError: the arguments cannot be used, or not together.
    """

    def __init__(
        self,
        gpu0_bsz: int | None,
        devices: Sequence[torch.device],
        device_weights: Sequence[float] | None = None,
        spread: bool = False,
    ) -> None:
        self.devices = devices
        self._number = gpu0_bsz
        self.device_weights = None if device_weights is None else tuple(device_weights)
        self._may_warn = not spread and device_weights is None
        if device_weights is not None and len(device_weights) != max(1, len(devices)):
            raise ArgumentError(
                f"device_weights must be one number for each of {max(1, len(devices))} devices, "
                f"got {len(device_weights)}"
            )
        SplitPolicy.split(self, 0)  # raises where a number is out of its range

    @property
    def gpu0_bsz(self) -> int | None:
        """The most samples that the first device gets now; None if "auto" has seen no batch."""
        return self._number

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk size of each device for a batch of the next call."""
        if self.device_weights is not None:
            return split_by_weights(batch_size, self.device_weights, self._number)
        limit = batch_size if self._number is None else self._number
        return split_batch(batch_size, max(1, len(self.devices)), limit)

    def begin_call(self, module: nn.Module, batch_size: int) -> tuple[int, ...]:
        """Return the chunk size of each device for this call.

        Warns:
            BalanceWarning: the number has no effect on the first batch.
        """
        chunk_sizes = self.split(batch_size)
        if batch_size and self._may_warn:
            self._may_warn = False
            even = even_share(batch_size, len(self.devices))
            if self._number is not None and self._number >= even:
                warn(
                    f"gpu0_bsz={self._number} has no effect: the even share of this first batch of "
                    f"{batch_size} on {len(self.devices)} devices is {even}, so the split is "
                    f"that of nn.DataParallel, {chunk_sizes}; choose gpu0_bsz below {even}"
                )
        return chunk_sizes

    @contextlib.contextmanager
    def advising(self, chunk_sizes: Sequence[int]) -> Iterator[None]:
        """Add the remedy to an out-of-memory error."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                sizes = zip(self.devices, chunk_sizes, strict=True)
                split = ", ".join(f"{device}: {size}" for device, size in sizes)
                size = sum(chunk_sizes)
                add_note(error, f"the batch of {size} was split {split}{self._remedy(size)}")
            raise

    def _remedy(self, batch_size: int) -> str:
        """Return the remedy for an out-of-memory error."""
        return (
            "; give the device that ran out fewer samples (gpu0_bsz, or device_weights), or lower "
            "the batch size"
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Return a state for a later run to start with, as numbers and lists, or None."""
        return None

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Start with the state of an earlier run, unless training has begun."""
