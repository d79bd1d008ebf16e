"""How many samples each rank gets, and the largest batch of all. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import InfeasiblePlanError
from .memory_model import Law
from .plan import check_batch, largest_chunk, utilizations
from .split import even_share, split_by_weights
from .units import format_bytes

_LARGEST_SHARE = 2**24
_BISECTIONS = 50


@dataclass(frozen=True, slots=True)
class RankModel:
    """What a rank needs at its peak, for any share of a batch; all ranks need the same.

    Attributes:
        laws: linear in the rank's own samples; the peak is the highest of them.
        num_points: how many measurements they were fitted to.
    """

    laws: tuple[Law, ...]
    num_points: int

    def predict(self, chunk_size: int) -> int:
        """Returns the peak bytes for a share."""
        return round(max(law(chunk_size, 0) for law in self.laws))

    def largest_share(self, limit_bytes: float) -> int:
        """Returns the most samples, to 2**24, with which a rank stays within a limit, or -1."""
        return largest_chunk(self.laws, limit_bytes, _LARGEST_SHARE)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Shares of a batch, and what is predicted of them; lists are in the order of ranks.

    Attributes:
        batch_size: samples of the whole batch.
        chunk_sizes: what each rank gets.
        predicted_bytes: what each rank needs at its peak.
        capacity_bytes: what each rank's device can hold.
        reserve_bytes: what of it is kept free for what is not counted: contexts, workspaces, and
            NCCL's buffers.
        limiting_rank: the index of the fullest rank.
        fixed_bytes: what each rank needs whatever its share.
        max_batch_size: the largest batch that fits.
        max_batch_chunk_sizes: its shares.
        even_bytes: what each rank needs with equal shares, as of ``DistributedSampler``.
        even_max_batch_size: the largest batch that fits with equal shares.
    """

    batch_size: int
    chunk_sizes: tuple[int, ...]
    predicted_bytes: tuple[int, ...]
    capacity_bytes: tuple[int, ...]
    reserve_bytes: int
    limiting_rank: int
    fixed_bytes: int
    max_batch_size: int
    max_batch_chunk_sizes: tuple[int, ...]
    even_bytes: tuple[int, ...]
    even_max_batch_size: int

    @property
    def budgets(self) -> list[int]:
        """The bytes of each rank's device that may be filled."""
        return [capacity - self.reserve_bytes for capacity in self.capacity_bytes]


def plan_ranks(
    model: RankModel, batch_size: int, capacities: Sequence[int], reserve: int = 0
) -> RankPlan:
    """Returns the shares with the lowest utilization of the fullest rank.

    Args:
        model: what a rank needs.
        batch_size: samples of the whole batch, at least 1.
        capacities: what each rank's device can hold, in bytes; they may differ.
        reserve: bytes of each that are not to be planned with.

    Raises:
        ArgumentError: a device has no capacity left beside the reserve, or there is no batch.
        InfeasiblePlanError: the batch does not fit.
    """
    check_batch(batch_size, capacities, reserve)
    budgets = [capacity - reserve for capacity in capacities]
    largest = [model.largest_share(budget) for budget in budgets]
    _check_fits(model, batch_size, budgets, largest)
    chunk_sizes = _least_full(model, batch_size, budgets)
    needs = tuple(map(model.predict, chunk_sizes))
    utilization = utilizations(needs, budgets)
    even = even_share(batch_size, len(budgets))
    return RankPlan(
        batch_size=batch_size,
        chunk_sizes=chunk_sizes,
        predicted_bytes=needs,
        capacity_bytes=tuple(capacities),
        reserve_bytes=reserve,
        limiting_rank=utilization.index(max(utilization)),
        fixed_bytes=model.predict(0),
        max_batch_size=sum(largest),
        max_batch_chunk_sizes=tuple(largest),
        even_bytes=(model.predict(even),) * len(budgets),
        even_max_batch_size=min(largest) * len(budgets),
    )


def _least_full(model: RankModel, batch_size: int, budgets: Sequence[int]) -> tuple[int, ...]:
    def largest(utilization: float) -> list[int]:
        return [max(0, model.largest_share(budget * utilization)) for budget in budgets]

    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(largest(middle)) >= batch_size else (middle, high)
    # In proportion to what each could hold, none gets more than that.
    return split_by_weights(batch_size, largest(high))


def _check_fits(
    model: RankModel, batch_size: int, budgets: Sequence[int], largest: Sequence[int]
) -> None:
    lacking = [rank for rank, size in enumerate(largest) if size < 0]
    if lacking:
        raise InfeasiblePlanError(
            f"rank {lacking[0]} needs {format_bytes(model.predict(0))} whatever its share, and "
            f"its device can hold {format_bytes(budgets[lacking[0]])}: parameters, gradients and "
            "optimizer state are on every rank; fully_shard divides them"
        )
    if sum(largest) < batch_size:
        raise InfeasiblePlanError(
            f"a batch of {batch_size} does not fit: the ranks can hold {tuple(largest)} samples, "
            f"in all {sum(largest)}"
        )
