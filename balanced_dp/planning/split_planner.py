"""Plan the split of a batch from a memory model and capacities. Pure arithmetic."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ArgumentError, InfeasiblePlanError, did_you_mean
from ..split import (
    as_integer,
    best_gpu0_bsz,
    even_share,
    is_better,
    split_batch,
    split_by_weights,
)
from ..units import format_bytes
from .memory_model import MemoryModel

Goal = Literal["speed", "headroom", "batch"]
"""What the best option has: the smallest of all largest chunks, the lowest utilization, or the
largest batch."""


def check_goal(goal: str, argument: str = "goal") -> str:
    """Return the goal, or raise ArgumentError, whose message calls it ``argument``."""
    if goal not in get_args(Goal):
        hint = did_you_mean(goal, get_args(Goal))
        raise ArgumentError(f"{argument} must be speed, headroom or batch, got {goal!r}{hint}")
    return goal


@dataclass(frozen=True, slots=True)
class WeightedSplit:
    """Describe a split by ``device_weights``, for capacities that no ``gpu0_bsz`` makes use of.

    Attributes:
        chunk_sizes: the chunk size of each device, which may be passed as ``device_weights``.
        predicted_bytes: the predicted peak of each device.
        max_batch_size: the largest batch that fits.
        max_batch_chunk_sizes: the chunk sizes of that batch.
    """

    chunk_sizes: tuple[int, ...]
    predicted_bytes: tuple[int, ...]
    max_batch_size: int
    max_batch_chunk_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Describe a split of a batch and its predictions, in the order of the devices.

    Attributes:
        batch_size: samples in the whole batch.
        gpu0_bsz: the value with the lowest utilization of the bottleneck device.
        chunk_sizes: the chunk size of each device.
        predicted_bytes: the predicted peak of each device.
        capacity_bytes: the capacity of each device.
        reserve_bytes: what is kept free of each capacity for contexts and workspaces, which are
            not counted.
        max_batch_size: the largest batch that fits.
        max_batch_gpu0_bsz: the value with which that batch fits.
        even_max_batch_size: the largest batch that fits with the even split of
            ``nn.DataParallel``.
        weighted: the split by ``device_weights``, if capacities differ and it is better.
        advice: sentences about what else would help.
    """

    batch_size: int
    gpu0_bsz: int
    chunk_sizes: tuple[int, ...]
    predicted_bytes: tuple[int, ...]
    capacity_bytes: tuple[int, ...]
    reserve_bytes: int
    max_batch_size: int
    max_batch_gpu0_bsz: int
    even_max_batch_size: int
    weighted: WeightedSplit | None
    advice: tuple[str, ...]

    @property
    def budgets(self) -> list[int]:
        """Return the bytes of each device that may be used: its capacity less the reserve."""
        return [capacity - self.reserve_bytes for capacity in self.capacity_bytes]


RESERVE = 512 * 2**20
"""Bytes of each device to keep free by default, for CUDA's context and workspaces of libraries."""


def plan(
    model: MemoryModel, batch_size: int, capacities: Sequence[int], reserve: int = RESERVE
) -> Plan:
    """Return the plan with the lowest utilization of the bottleneck device.

    Args:
        model: predicts the peak of each device.
        batch_size: samples in the whole batch, at least 1.
        capacities: capacity of each device in bytes; they may differ.
        reserve: bytes of each capacity to keep free, by default 512 MiB.

    Raises:
        ArgumentError: If the batch is empty, or a capacity does not exceed the reserve.
        InfeasiblePlanError: If the batch fits with no value.
    """
    check_batch(batch_size, capacities, reserve)
    best = Planner(model, [c - reserve for c in capacities]).best_gpu0_bsz(batch_size)
    found = describe(model, batch_size, capacities, reserve, best)
    check_fits(found, found.predicted_bytes)
    return found


def describe(
    model: MemoryModel,
    batch_size: int,
    capacities: Sequence[int],
    reserve: int,
    gpu0_bsz: int,
    *,
    gather: bool = True,
    spread: bool = False,
) -> Plan:
    """Return the plan with a given value, whether it fits or not.

    Arguments are those of ``plan``. With ``gather=False`` there is no advice about gathering, and
    with ``spread`` none about spreading parameters.
    """
    budgets = [capacity - reserve for capacity in capacities]
    planner = Planner(model, budgets)
    chunk_sizes = split_batch(batch_size, len(budgets), gpu0_bsz)
    needs = model.predict(chunk_sizes)
    max_batch_size = planner.max_batch_size(planner.balanced_gpu0_bsz)
    max_batch_gpu0_bsz = planner.balanced_gpu0_bsz(max_batch_size)
    utilization = utilizations(needs, budgets)
    if max_batch_size < batch_size and max(utilization) <= 1:
        # If capacities differ, a batch may fit though a smaller one does not: the last device of
        # an even split gets the remainder.
        max_batch_size, max_batch_gpu0_bsz = batch_size, gpu0_bsz
    weighted = planner.weighted_split(batch_size) if len(set(budgets)) > 1 else None
    if (
        weighted is not None
        and weighted.max_batch_size <= max_batch_size
        and not is_better(max(utilizations(weighted.predicted_bytes, budgets)), max(utilization))
    ):
        weighted = None
    return Plan(
        batch_size=batch_size,
        gpu0_bsz=gpu0_bsz,
        chunk_sizes=chunk_sizes,
        predicted_bytes=needs,
        capacity_bytes=tuple(capacities),
        reserve_bytes=reserve,
        max_batch_size=max_batch_size,
        max_batch_gpu0_bsz=max_batch_gpu0_bsz,
        even_max_batch_size=planner.max_batch_size(planner.even_share),
        weighted=weighted,
        advice=_advice(model, batch_size, needs, utilization, gather, spread),
    )


def check_fits(found: Plan, held_bytes: Sequence[int]) -> None:
    """Raise InfeasiblePlanError if a device holds more than its capacity less the reserve."""
    lacks = [
        f"device {i} needs {format_bytes(held)} and lacks {format_bytes(held - budget)}"
        for i, (held, budget) in enumerate(zip(held_bytes, found.budgets, strict=True))
        if held > budget
    ]
    if not lacks:
        return
    remedy = f"the largest batch that fits is {found.max_batch_size}"
    if not found.max_batch_size:
        remedy = "not even a batch of 1 fits"
    weighted = found.weighted
    if weighted is not None and weighted.max_batch_size > found.max_batch_size:
        weights = list(weighted.max_batch_chunk_sizes)
        remedy += f", or {weighted.max_batch_size} with device_weights={weights}"
    raise InfeasiblePlanError(
        f"a batch of {found.batch_size} does not fit with any gpu0_bsz: with the best, "
        f"{found.gpu0_bsz}, {', '.join(lacks)}; {remedy}"
    )


def utilizations(held_bytes: Sequence[int], budgets: Sequence[int]) -> list[float]:
    """Return the fraction of its budget that each device holds."""
    return [held / budget for held, budget in zip(held_bytes, budgets, strict=True)]


def check_batch(batch_size: int, capacities: Sequence[int], reserve: int) -> None:
    """Raise ArgumentError if the batch is empty or fewer than two devices exceed the reserve."""
    as_integer("batch_size", batch_size, minimum=1)
    as_integer("reserve", reserve, minimum=0)
    if len(capacities) < 2 or min(capacities) <= reserve:
        hint = " (--reserve lowers it)" if len(capacities) > 1 else ""
        raise ArgumentError(
            "a plan is for two or more devices with capacities above the reserve of "
            f"{format_bytes(reserve)}, got {', '.join(map(format_bytes, capacities)) or 'none'}"
            f"{hint}"
        )


class Planner:
    """Find values of ``gpu0_bsz`` for a memory model and the bytes that each device may hold."""

    def __init__(self, model: MemoryModel, budgets: Sequence[int]) -> None:
        self.model = model
        self.budgets = budgets

    def utilizations(self, batch_size: int, gpu0_bsz: int) -> tuple[float, float]:
        """Return the utilization of device 0, and the highest one of the other devices."""
        needs = self.model.predict(split_batch(batch_size, len(self.budgets), gpu0_bsz))
        first, *others = utilizations(needs, self.budgets)
        return first, max(others)

    def utilization(self, batch_size: int, gpu0_bsz: int) -> float:
        """Return the utilization of the bottleneck device."""
        return max(self.utilizations(batch_size, gpu0_bsz))

    def even_share(self, batch_size: int) -> int:
        """Return the value that splits evenly."""
        return even_share(batch_size, len(self.budgets))

    def best_gpu0_bsz(self, batch_size: int) -> int:
        """Return the value with the lowest utilization, the largest of equally good ones."""
        values = range(self.even_share(batch_size) + 1)
        return best_gpu0_bsz({value: self.utilization(batch_size, value) for value in values})

    def fastest_gpu0_bsz(self, batch_size: int) -> int:
        """Return the largest value that fits, or the best one if none does."""
        for value in range(self.even_share(batch_size), -1, -1):
            if self.utilization(batch_size, value) <= 1:
                return value
        return self.best_gpu0_bsz(batch_size)

    def balanced_gpu0_bsz(self, batch_size: int) -> int:
        """Return the value with the lowest utilization, by bisection, for batches of any size.

        With each sample device 0 gets fuller and the others do not, so the lowest utilization is
        where they cross.
        """

        def others_are_fuller(gpu0_bsz: int) -> bool:
            first, others = self.utilizations(batch_size, gpu0_bsz)
            return first < others

        even = self.even_share(batch_size)
        crossing = _num_fitting(others_are_fuller, range(even + 1))
        # One more below: the even split assigns what is left over to other devices.
        candidates = range(max(0, crossing - 2), min(even, crossing) + 1)
        return min(candidates, key=lambda value: self.utilization(batch_size, value))

    def max_batch_size(self, choose: Callable[[int], int]) -> int:
        """Return the largest batch that fits with the chosen ``gpu0_bsz``, or 0."""
        return self.largest_batch(lambda size: split_batch(size, len(self.budgets), choose(size)))

    def largest_batch(self, split: Callable[[int], Sequence[int]]) -> int:
        """Return the largest batch that fits when it is split so, or 0."""

        def fits(size: int) -> bool:
            return max(utilizations(self.model.predict(split(size)), self.budgets)) <= 1

        return _num_fitting(fits, _BATCH_SIZES)

    def fastest_split(self, batch_size: int) -> tuple[int, ...] | None:
        """Return the split that fits whose largest chunk is the smallest, or None if none fits."""
        limits = self.largest_chunks(batch_size)
        if limits is None or sum(limits) < batch_size:
            return None

        def cut(largest: int) -> list[int]:
            return [min(limit, largest) for limit in limits]

        sizes = cut(_num_fitting(lambda n: sum(cut(n - 1)) < batch_size, range(1, batch_size + 1)))
        left = sum(sizes) - batch_size
        for index in range(len(sizes)):  # device 0 first
            taken = min(left, sizes[index])
            sizes[index], left = sizes[index] - taken, left - taken
        return tuple(sizes)

    def largest_chunks(self, batch_size: int, utilization: float = 1.0) -> tuple[int, ...] | None:
        """Return the largest chunk that each device holds up to a utilization.

        None if what device 0 gathers of the batch exceeds it even without samples of its own.
        """

        def fits(index: int, size: int) -> bool:
            held = self.model.peak_bytes(index, size, batch_size)
            return held / self.budgets[index] <= utilization

        sizes = tuple(
            _num_fitting(functools.partial(fits, index), range(1, batch_size + 1))
            for index in range(len(self.budgets))
        )
        return sizes if sizes[0] or fits(0, 0) else None

    def weighted_split(self, batch_size: int) -> WeightedSplit:
        """Return the split with the lowest utilization of all splits."""

        def fits(size: int, utilization: float = 1.0) -> bool:
            return sum(self.largest_chunks(size, utilization) or ()) >= size

        def chunk_sizes(size: int) -> tuple[int, ...]:
            low, high = 0.0, self.utilization(size, self.even_share(size))
            for _ in range(_BISECTIONS):
                middle = (low + high) / 2
                low, high = (low, middle) if fits(size, middle) else (middle, high)
            # Weighted by what each could hold, no device gets more than that.
            return split_by_weights(size, self.largest_chunks(size, high) or self.budgets)

        sizes, largest = chunk_sizes(batch_size), _num_fitting(fits, _BATCH_SIZES)
        return WeightedSplit(
            chunk_sizes=sizes,
            predicted_bytes=self.model.predict(sizes),
            max_batch_size=largest,
            max_batch_chunk_sizes=chunk_sizes(largest) if largest else (0,) * len(self.budgets),
        )


def _num_fitting(fits: Callable[[int], bool], numbers: range) -> int:
    """Return how many of the numbers fit, where each one below a fitting one fits as well."""
    return bisect.bisect_left(numbers, True, key=lambda number: not fits(number))


LARGEST_BATCH = 2**24
"""What is returned as the largest batch that fits if larger ones may fit, too."""

_BATCH_SIZES = range(1, LARGEST_BATCH + 1)
_BISECTIONS = 50


def _advice(
    model: MemoryModel,
    batch_size: int,
    needs: Sequence[int],
    utilization: Sequence[float],
    gather: bool,
    spread: bool,
) -> tuple[str, ...]:
    whole_bytes = model.whole_bytes_per_sample * batch_size
    floor_bytes, *_ = model.predict(split_batch(batch_size, len(needs), 0))
    is_balanced = utilization[0] <= max(utilization[1:]) * (1 + _BALANCED)
    if is_balanced or floor_bytes < needs[0] * (1 - _BALANCED):
        return ()
    where = "with gathered outputs " if gather else ""
    fact = (
        f"{where}no value of gpu0_bsz balances this: without any samples device 0 needs "
        f"{format_bytes(floor_bytes)}, and no other device more than {format_bytes(max(needs[1:]))}"
    )
    if not gather or whole_bytes < _BALANCED * floor_bytes:
        remedy = "a larger batch helps" if spread else "a larger batch or spread=True helps"
        return (f"{fact}: parameters, gradients and optimizer state; {remedy}",)
    return (
        f"{fact}. Gathering the outputs of {batch_size} samples and their loss costs device 0 "
        f"{format_bytes(whole_bytes)} ({format_bytes(model.whole_bytes_per_sample)} a sample). "
        "A loss that is computed on each device avoids this",
    )


_BALANCED = 0.10
"""How much fuller than the others the bottleneck device may be without advice, as a fraction."""
