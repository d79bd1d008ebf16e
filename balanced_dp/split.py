"""Compute each device's chunk size (number of samples), in exact arithmetic, without torch."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Sequence
from fractions import Fraction
from typing import SupportsIndex

from .errors import ArgumentError, ArgumentTypeError

EQUAL = 0.001
"""Utilizations that differ by less than this fraction count as equal.

The utilization of a device is its peak memory divided by the memory that it may use.
"""


def split_batch(
    batch_size: SupportsIndex, num_devices: SupportsIndex, gpu0_bsz: SupportsIndex
) -> tuple[int, ...]:
    """Return the chunk size (number of samples) of each device; the sum is ``batch_size``.

    A device whose chunk size is 0 is idle during this batch. Device 0 gets at most ``gpu0_bsz``
    samples and at most its chunk of the even split. If there is only one device, it gets the
    whole batch, even if ``gpu0_bsz`` is smaller.

    1. If ``gpu0_bsz`` is at least ``ceil(batch_size / num_devices)``, the split is even, as in
       ``torch.chunk`` and ``nn.DataParallel``.
    2. Otherwise device 0 gets ``gpu0_bsz`` samples, and the rest is divided over the other devices.
       The chunk sizes of the other devices differ by at most 1, with the larger ones first.

    Examples:
        >>> split_batch(32, 4, 2)
        (2, 10, 10, 10)
        >>> split_batch(10, 8, 99)
        (2, 2, 2, 2, 2, 0, 0, 0)

    Args:
        batch_size: number of samples in the whole batch, at least 0.
        num_devices: number of devices, at least 1.
        gpu0_bsz: maximum chunk size of device 0, at least 0.

    Raises:
        ArgumentTypeError: an argument is not an integer (a bool does not count as an integer).
        ArgumentError: an argument is out of range.

    Source:
        The idea of a smaller first chunk is Transformer-XL's ``BalancedDataParallel``
        (Dai et al. 2019, https://arxiv.org/abs/1901.02860). That class sometimes splits evenly
        although ``gpu0_bsz`` is below the even share. For example, of 30 samples on 4 devices,
        device 0 gets 8 with ``gpu0_bsz=7``. With a single device, that class divides by zero.
    """
    batch_size = as_integer("batch_size", batch_size, minimum=0)
    num_devices = as_integer("num_devices", num_devices, minimum=1)
    gpu0_bsz = as_integer("gpu0_bsz", gpu0_bsz, minimum=0)
    even = even_share(batch_size, num_devices)
    if gpu0_bsz >= even or num_devices == 1:
        return tuple(max(0, min(even, batch_size - i * even)) for i in range(num_devices))
    share, extra = divmod(batch_size - gpu0_bsz, num_devices - 1)
    return (gpu0_bsz, *(share + (i < extra) for i in range(num_devices - 1)))


def even_share(batch_size: int, num_devices: int) -> int:
    """Return the largest chunk size of an even split, such as 8 for 30 samples on 4 devices."""
    return -(-batch_size // num_devices)


def split_by_weights(
    batch_size: SupportsIndex,
    device_weights: Sequence[float],
    gpu0_bsz: SupportsIndex | None = None,
) -> tuple[int, ...]:
    """Return the chunk size (number of samples) of each device, in proportion to its weight.

    The sum is ``batch_size``. The sizes are rounded by the largest-remainder method: each size is
    rounded down, and the samples that are left over go to the devices with the largest remainders,
    one to each. If remainders are equal, device 1 comes first, then device 2, and so on. Device 0
    comes last.

    If device 0 would get more than ``gpu0_bsz``, it gets ``gpu0_bsz`` samples, and the rest is
    divided over the other devices by the same method. If there is only one device, it gets the
    whole batch, even if ``gpu0_bsz`` is smaller.

    Examples:
        >>> split_by_weights(32, [11, 24, 24])
        (6, 13, 13)
        >>> split_by_weights(32, [11, 24, 24], gpu0_bsz=2)
        (2, 15, 15)

    Args:
        batch_size: number of samples in the whole batch, at least 0.
        device_weights: one number for each device, at least 0 and not all 0.
        gpu0_bsz: maximum chunk size of device 0, at least 0; None means no limit.

    Raises:
        ArgumentTypeError: ``batch_size`` or ``gpu0_bsz`` is not an integer.
        ArgumentError: in each of these cases:

            - An argument is out of range.
            - ``device_weights`` are not numbers.
            - Device 0 would get more than ``gpu0_bsz``, but all other devices have the weight 0.

    Source:
        Largest-remainder (Hamilton's) method, https://en.wikipedia.org/wiki/Quota_method.
    """
    batch_size = as_integer("batch_size", batch_size, minimum=0)
    try:
        weights = [Fraction(weight) for weight in map(float, device_weights)]
    except (TypeError, ValueError, OverflowError):
        weights = []
    if not any(weights) or min(weights) < 0:
        fact = "device_weights must be finite numbers of at least 0, not all 0"
        raise ArgumentError(f"{fact}, got {device_weights!r}")
    *others, first = _largest_remainders(batch_size, [*weights[1:], weights[0]])
    limit = first if gpu0_bsz is None else as_integer("gpu0_bsz", gpu0_bsz, minimum=0)
    if first <= limit or len(weights) == 1:
        return (first, *others)
    if not any(weights[1:]):
        raise ArgumentError(
            f"gpu0_bsz={limit} leaves {batch_size - limit} samples to devices whose "
            f"device_weights are 0; give one of them a weight above 0"
        )
    return (limit, *_largest_remainders(batch_size - limit, weights[1:]))


def _largest_remainders(batch_size: int, weights: Sequence[Fraction]) -> tuple[int, ...]:
    total = sum(weights)
    quotas = [batch_size * weight / total for weight in weights]
    sizes = [math.floor(quota) for quota in quotas]
    largest_first = sorted(range(len(quotas)), key=lambda i: sizes[i] - quotas[i])
    for index in largest_first[: batch_size - sum(sizes)]:
        sizes[index] += 1
    return tuple(sizes)


def as_integer(name: str, value: object, minimum: int | None = None) -> int:
    """Check that ``value`` is an integer of at least ``minimum``, and return it as an int.

    ``name`` is the name of the argument in error messages.

    Raises:
        ArgumentTypeError: ``value`` is not an integer (a bool does not count as an integer).
        ArgumentError: ``value`` is below ``minimum``.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ArgumentTypeError(f"{name} must be an integer, got {reprlib.repr(value)}")
    number = operator.index(value)
    if minimum is not None and number < minimum:
        raise ArgumentError(f"{name} must be at least {minimum}, got {number}")
    return number
