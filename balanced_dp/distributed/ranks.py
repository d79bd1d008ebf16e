"""The chunk size of each rank."""

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
    """Return the chunk size of each rank; the sum is ``batch_size``.

    With ``rank0_bsz`` alone, rank 0 gets that many samples and the rest is divided evenly over the
    others. With ``weights``, chunk sizes are in proportion to the weights. With ``capacities``,
    they are in proportion to the memory that each rank has beside ``fixed_bytes``, which
    ``measure_step`` measures on one emulated device.

    Examples:
        >>> split_ranks(32, 4, rank0_bsz=2)
        (2, 10, 10, 10)
        >>> split_ranks(32, capacities=[24 * 2**30, 11 * 2**30, 11 * 2**30], fixed_bytes=3 * 2**30)
        (18, 7, 7)

    Args:
        batch_size: number of samples in the whole batch, at least 0.
        world_size: number of ranks; by default that of the weights or capacities, or of the
            default process group.
        rank0_bsz: maximum chunk size of rank 0, at least 0.
        weights: one number for each rank, at least 0 and not all 0.
        capacities: memory of each rank's device in bytes.
        fixed_bytes: memory that each device needs whatever its chunk size: parameters, gradients,
            DistributedDataParallel's buckets, optimizer state, the CUDA context.

    Raises:
        ArgumentError: none of the three is given, both weights and capacities are, their number is
            not ``world_size``, or a device has no memory beside ``fixed_bytes``.
        ArgumentTypeError: an argument has the wrong type.
        ValueError: ``world_size`` is needed, and there is no process group.
    """
    if weights is not None and capacities is not None:
        raise ArgumentError("weights and capacities both determine the split; give one of them")
    if capacities is not None:
        fixed_bytes = as_integer("fixed_bytes", fixed_bytes, minimum=0)
        weights = [as_integer("capacities", capacity) - fixed_bytes for capacity in capacities]
        for rank, free_bytes in enumerate(weights):
            if free_bytes <= 0:
                raise ArgumentError(
                    f"rank {rank} can hold {format_bytes(capacities[rank])}, but needs "
                    f"{format_bytes(fixed_bytes)} without any samples; leave the rank out, or "
                    "shard the model"
                )
    if weights is None:
        if rank0_bsz is None:
            raise ArgumentError("give rank0_bsz, weights or capacities")
        rank0_bsz = as_integer("rank0_bsz", rank0_bsz, minimum=0)
        world_size = dist.get_world_size() if world_size is None else world_size
        return split_batch(batch_size, world_size, rank0_bsz)
    if world_size is not None and world_size != len(weights):
        raise ArgumentError(
            f"world_size={world_size}, but weights or capacities are given for {len(weights)} ranks"
        )
    return split_by_weights(batch_size, weights, rank0_bsz)
