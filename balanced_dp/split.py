"""How many samples of a batch each device gets. Pure integers, no torch."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import SupportsIndex

from .errors import ArgumentError, ArgumentTypeError

EQUAL = 0.001
"""Utilizations that differ by less are equal; of those the larger gpu0_bsz is the faster."""


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

    Examples:
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
    batch_size = as_integer("batch_size", batch_size, minimum=0)
    num_devices = as_integer("num_devices", num_devices, minimum=1)
    gpu0_bsz = as_integer("gpu0_bsz", gpu0_bsz, minimum=0)
    if num_devices == 1:
        return (batch_size,)
    even = even_share(batch_size, num_devices)
    if gpu0_bsz >= even:
        return tuple(max(0, min(even, batch_size - i * even)) for i in range(num_devices))
    share, extra = divmod(batch_size - gpu0_bsz, num_devices - 1)
    return (gpu0_bsz, *(share + (i < extra) for i in range(num_devices - 1)))


def even_share(batch_size: int, num_devices: int) -> int:
    """Returns what each device but the last ones gets of an even split, as of ``torch.chunk``."""
    return -(-batch_size // num_devices)


def is_better(utilization: float, other: float) -> bool:
    """Return whether a utilization is lower than another by more than is counted as equal."""
    return utilization < other * (1 - EQUAL)


def best_gpu0_bsz(utilizations: Mapping[int, float], preferred: int | None = None) -> int:
    """Return the value of ``gpu0_bsz`` with which the bottleneck device is the least full.

    Args:
        utilizations: the utilization of the bottleneck device for each value.
        preferred: the value to return if it is among several that are equally good. Otherwise the
            largest of them is returned, which is the fastest.
    """
    lowest = min(utilizations.values())
    best = [value for value, full in utilizations.items() if not is_better(lowest, full)]
    return preferred if preferred in best else max(best)


def split_by_weights(
    batch_size: SupportsIndex,
    device_weights: Sequence[float],
    gpu0_bsz: SupportsIndex | None = None,
) -> tuple[int, ...]:
    """Returns the chunk size of each device, in proportion to its weight; they add up.

    Rounded by largest remainders: each device gets its exact share, rounded down, and the samples
    that are left go one each to the devices that lost most; of equal ones to the earlier, but to
    device 0 last. Where device 0 would get more than ``gpu0_bsz``, the others share what is left
    in the same way.

    Examples:
        >>> split_by_weights(32, [11, 24, 24])
        (6, 13, 13)
        >>> split_by_weights(32, [11, 24, 24], gpu0_bsz=2)
        (2, 15, 15)

    Args:
        batch_size: samples in the whole batch, at least 0.
        device_weights: a number of at least 0 for each device, not all of them 0.
        gpu0_bsz: the most samples that device 0 may get, at least 0; None means no limit.

    Raises:
        ArgumentTypeError: an argument is not a number of its kind.
        ArgumentError: an argument is out of its range, or nobody may have what device 0 may not.

    Source:
        Largest remainders: Hamilton's method, https://en.wikipedia.org/wiki/Quota_method.
    """
    batch_size = as_integer("batch_size", batch_size, minimum=0)
    weights = [_weight(index, weight) for index, weight in enumerate(device_weights)]
    if not any(weights):
        raise ArgumentError(f"device_weights must not all be 0, got {list(device_weights)}")
    *others, first = _largest_remainders(batch_size, [*weights[1:], weights[0]])
    chunk_sizes = (first, *others)
    if gpu0_bsz is None:
        return chunk_sizes
    gpu0_bsz = as_integer("gpu0_bsz", gpu0_bsz, minimum=0)
    if chunk_sizes[0] <= gpu0_bsz or len(weights) == 1:
        return chunk_sizes
    if not any(weights[1:]):
        raise ArgumentError(
            f"gpu0_bsz={gpu0_bsz} leaves {batch_size - gpu0_bsz} samples to devices whose "
            f"device_weights are 0; give one of them a weight"
        )
    return (gpu0_bsz, *_largest_remainders(batch_size - gpu0_bsz, weights[1:]))


def _largest_remainders(batch_size: int, weights: Sequence[Fraction]) -> tuple[int, ...]:
    total = sum(weights)
    shares = [batch_size * weight / total for weight in weights]
    sizes = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: sizes[i] - shares[i])  # most lost first
    for index in order[: batch_size - sum(sizes)]:
        sizes[index] += 1
    return tuple(sizes)


def _weight(index: int, value: object) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(
            f"device_weights must be numbers, got {reprlib.repr(value)} for device {index}"
        )
    number = value if isinstance(value, int) else float(value)
    if not 0 <= number < math.inf:
        raise ArgumentError(
            f"device_weights must be finite and at least 0, got {value} for device {index}"
        )
    return Fraction(number)


def as_integer(name: str, value: object, minimum: int | None = None) -> int:
    """Returns the integer that an argument is.

    Raises:
        ArgumentTypeError: it is not an integer (a bool is none).
        ArgumentError: it is below the minimum.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ArgumentTypeError(f"{name} must be an integer, got {reprlib.repr(value)}")
    number = operator.index(value)
    if minimum is not None and number < minimum:
        raise ArgumentError(f"{name} must be at least {minimum}, got {number}")
    return number
