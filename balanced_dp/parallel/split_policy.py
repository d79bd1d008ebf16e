"""Choose how many samples of a batch each device gets: by a number, by weights or by "auto"."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from ..devices import is_out_of_memory
from ..errors import ArgumentError, ArgumentTypeError, add_note, warn
from ..split import even_share, split_batch, split_by_weights
from .auto_split import AutoSplit


class SplitPolicy:
    """The rule by which batches are split.

    Args:
        gpu0_bsz: the most samples for the first device, ``"auto"``, or None for no limit.
        devices: the devices that share a batch.
        device_weights: if given, batches are split in proportion to them.
        spread: whether parameters are spread over the devices. Then the first one holds little more
            than the others, so no value gives a warning.

    Raises:
        ArgumentError, ArgumentTypeError: the arguments cannot be used, or not together.
    """

    def __init__(
        self,
        gpu0_bsz: int | Literal["auto"] | None,
        devices: Sequence[torch.device],
        device_weights: Sequence[float] | None = None,
        spread: bool = False,
    ) -> None:
        self._devices = devices
        self._number = None if isinstance(gpu0_bsz, str) else gpu0_bsz
        self.device_weights = None if device_weights is None else tuple(device_weights)
        self.auto: AutoSplit | None = None
        self._may_warn = not spread and device_weights is None
        num_devices = max(1, len(devices))
        if isinstance(gpu0_bsz, str):
            if device_weights is not None:
                raise ArgumentError(
                    f"device_weights need a gpu0_bsz that is a number or None, got {gpu0_bsz!r}"
                )
            if gpu0_bsz != "auto":
                raise ArgumentTypeError(
                    f"gpu0_bsz must be an integer, 'auto' or None, got {gpu0_bsz!r}"
                )
            self.auto = AutoSplit(devices)
        elif device_weights is not None and len(device_weights) != num_devices:
            raise ArgumentError(
                f"device_weights must be one number for each of {num_devices} devices, got "
                f"{len(device_weights)}"
            )
        self.split(0)  # raises where a number is out of its range

    @property
    def gpu0_bsz(self) -> int | None:
        """The most samples that the first device gets now; None if "auto" has seen no batch."""
        return self._number if self.auto is None else self.auto.gpu0_bsz

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk size of each device for a batch of the next call."""
        if self.device_weights is not None:
            return split_by_weights(batch_size, self.device_weights, self._number)
        if self.auto is not None:
            return self.auto.split(batch_size)
        limit = batch_size if self._number is None else self._number
        return split_batch(batch_size, max(1, len(self._devices)), limit)

    def begin_call(self, module: nn.Module, batch_size: int) -> tuple[int, ...]:
        """Update "auto", and return the chunk size of each device for this call.

        Warns:
            BalanceWarning: the number has no effect on the first batch, or "auto" sees no
                optimizer step.
        """
        if batch_size and self.auto is not None:
            return self.auto.begin_call(module, batch_size)
        chunk_sizes = self.split(batch_size)
        if batch_size and self._may_warn:
            self._may_warn = False
            even = even_share(batch_size, len(self._devices))
            if self._number is not None and self._number >= even:
                warn(
                    f"gpu0_bsz={self._number} balances nothing: the even share of this first batch "
                    f"of {batch_size} on {len(self._devices)} devices is {even}, so the split is "
                    f"that of nn.DataParallel, {chunk_sizes}; choose gpu0_bsz below {even}"
                )
        return chunk_sizes

    @contextlib.contextmanager
    def advising(self, chunk_sizes: Sequence[int]) -> Iterator[None]:
        """Add the remedy to an error that says that a device ran out of memory."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                add_note(error, self._memory_advice(chunk_sizes))
            raise

    def _memory_advice(self, chunk_sizes: Sequence[int]) -> str:
        first, batch_size = self._devices[0], sum(chunk_sizes)
        sizes = zip(self._devices, chunk_sizes, strict=True)
        split = ", ".join(f"{device}: {size}" for device, size in sizes)
        fact = f"the batch of {batch_size} was split {split}"
        if self.auto is not None:
            if self.auto.look_for_out_of_memory(has_failed=True):
                value = self.split(batch_size)[0]
                return f"{fact}. gpu0_bsz='auto' is now {value}: the step may be repeated"
            return f"{fact}, and gpu0_bsz='auto' knows no better; lower the batch size"
        if self.device_weights is not None:
            weights = list(self.device_weights)
            return f"{fact}. Lower the weight of the device that ran out (device_weights={weights})"
        if self._number == 0:
            return f"{fact}; raise gpu0_bsz (now 0) or lower the batch size"
        lower, higher = f"lower gpu0_bsz (now {self._number})", "raise gpu0_bsz or "
        if self._number is None:
            lower, higher = f"set gpu0_bsz below {chunk_sizes[0]}", ""
        return (
            f"{fact}. If {first} ran out, {lower}; if another device did, {higher}lower the batch "
            "size"
        )
