"""How many samples of a batch each rank gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ..errors import ArgumentError
from ..split import as_integer, split_batch, split_by_weights
from ..units import format_bytes


def split_ranks(
    batch_size: int,
    world_size: int | None = None,
    *,
    rank0_bsz: int | None = None,
    weights: Sequence[float] | None = None,
    capacities: Sequence[int] | None = None,
    fixed_bytes: int = 0,
) -> tuple[int, ...]:
    """Return the chunk size of each rank; they add up to ``batch_size``.

    One of three things says how. ``rank0_bsz`` alone: rank 0 gets that many and the others share
    the rest evenly. ``weights``: in proportion to them. ``capacities``: in proportion to what each
    rank can hold beside ``fixed_bytes``, which ``measure_step`` tells on one emulated device.

    Examples:
        >>> split_ranks(32, 4, rank0_bsz=2)
        (2, 10, 10, 10)
        >>> split_ranks(32, capacities=[24 * 2**30, 11 * 2**30, 11 * 2**30], fixed_bytes=3 * 2**30)
        (18, 7, 7)

    Args:
        batch_size: samples in the whole batch, at least 0.
        world_size: how many ranks; by default as many as there are weights or capacities, or
            those of the default process group.
        rank0_bsz: the most samples that rank 0 gets, at least 0; together with weights or
            capacities a limit.
        weights: a number of at least 0 for each rank, not all of them 0.
        capacities: bytes that each rank's device can hold.
        fixed_bytes: bytes of each device that are taken whatever its share: parameters, gradients,
            DistributedDataParallel's buckets, optimizer state, the device's context.

    Raises:
        ArgumentError: nothing or too much is said of the shares, their number is not that of the
            ranks, or a device cannot hold ``fixed_bytes``.
        ArgumentTypeError: an argument is not a number of its kind.
    """
    if weights is not None and capacities is not None:
        raise ArgumentError("weights and capacities both say what each rank gets; give one of them")
    if capacities is not None:
        weights = _room(capacities, fixed_bytes)
    if weights is None:
        if rank0_bsz is None:
            raise ArgumentError("give rank0_bsz, weights or capacities")
        rank0_bsz = as_integer("rank0_bsz", rank0_bsz, minimum=0)
        return split_batch(batch_size, num_ranks(world_size), rank0_bsz)
    if world_size is not None and world_size != len(weights):
        raise ArgumentError(
            f"world_size={world_size}, but there are shares of {len(weights)} ranks"
        )
    return split_by_weights(batch_size, weights, rank0_bsz)


def num_ranks(world_size: int | None) -> int:
    """Return the number of ranks that was given, or that of the default process group.

    Raises:
        ArgumentError: it was not given, and there is no process group.
    """
    if world_size is not None:
        return world_size
    if not dist.is_initialized():
        raise ArgumentError(
            "world_size is not given, and there is no process group; call "
            "torch.distributed.init_process_group first (torchrun starts the processes)"
        )
    return dist.get_world_size()


def _room(capacities: Sequence[int], fixed_bytes: int) -> list[int]:
    fixed_bytes = as_integer("fixed_bytes", fixed_bytes, minimum=0)
    for rank, capacity in enumerate(capacities):
        if as_integer("capacities", capacity) < fixed_bytes:
            raise ArgumentError(
                f"rank {rank} can hold {format_bytes(capacity)}, but {format_bytes(fixed_bytes)} "
                "are taken whatever its share; leave the rank out, or shard the model"
            )
    if max(capacities) == fixed_bytes:
        raise ArgumentError(
            f"no rank can hold more than the {format_bytes(fixed_bytes)} that are taken whatever "
            "its share; shard the model"
        )
    return [capacity - fixed_bytes for capacity in capacities]
