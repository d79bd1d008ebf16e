"""How many samples of a batch each device gets. Pure integers, no torch."""

from __future__ import annotations

import operator
import reprlib
from typing import SupportsIndex

from .errors import ArgumentError, ArgumentTypeError


def split_batch(
    batch_size: SupportsIndex, num_devices: SupportsIndex, gpu0_bsz: SupportsIndex
) -> tuple[int, ...]:
    """Returns the chunk size of each device; they add up to ``batch_size``.

    A zero means that the device does no work in this step. Device 0 never gets more than
    ``gpu0_bsz`` nor more than the even split would give it (with one device there is nobody else:
    it gets the whole batch).

    1. Where ``gpu0_bsz`` is not below the even share ``ceil(batch_size / num_devices)``, the
       split is that of ``torch.chunk``, and so of ``nn.DataParallel``.
    2. Otherwise device 0 gets ``gpu0_bsz`` and the others share the rest as evenly as integers
       can, the larger chunks first.

    >>> split_batch(32, 4, 2)
    (2, 10, 10, 10)
    >>> split_batch(10, 8, 99)
    (2, 2, 2, 2, 2, 0, 0, 0)

    Args:
        batch_size: samples in the whole batch, at least 0.
        num_devices: devices to share them, at least 1.
        gpu0_bsz: the most samples that device 0 may get, at least 0.

    Raises:
        ArgumentTypeError: an argument is not an integer (a bool is none).
        ArgumentError: an argument is out of its range.

    Source:
        The idea of a smaller first chunk is Transformer-XL's ``BalancedDataParallel``
        (Dai et al. 2019, https://arxiv.org/abs/1901.02860). Its fallback to the even split could
        give device 0 more than was asked for, and it divided by zero on one device.
    """
    batch_size = _integer("batch_size", batch_size, minimum=0)
    num_devices = _integer("num_devices", num_devices, minimum=1)
    gpu0_bsz = _integer("gpu0_bsz", gpu0_bsz, minimum=0)
    if num_devices == 1:
        return (batch_size,)
    even = -(-batch_size // num_devices)
    if gpu0_bsz >= even:
        return tuple(max(0, min(even, batch_size - i * even)) for i in range(num_devices))
    share, extra = divmod(batch_size - gpu0_bsz, num_devices - 1)
    return (gpu0_bsz, *(share + (i < extra) for i in range(num_devices - 1)))


def _integer(name: str, value: object, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ArgumentTypeError(f"{name} must be an integer, got {reprlib.repr(value)}")
    number = operator.index(value)
    if number < minimum:
        raise ArgumentError(f"{name} must be at least {minimum}, got {number}")
    return number
