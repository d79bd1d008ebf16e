"""Which ``gpu0_bsz`` to use, what it needs and what it costs. Pure arithmetic."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import ArgumentError, InfeasiblePlanError
from ..split import EQUAL, as_integer, even_share, split_batch, split_by_weights
from ..units import format_bytes
from .memory_model import MemoryModel


@dataclass(frozen=True, slots=True)
class WeightedSplit:
    """A share for each device, for capacities so unlike that no ``gpu0_bsz`` uses them all.

    Attributes:
        chunk_sizes: what each device gets of the batch, and the ``device_weights`` to give.
        predicted_bytes: what each device needs at its peak.
        max_batch_size: the largest batch that fits.
        max_batch_chunk_sizes: its split.
    """

    chunk_sizes: tuple[int, ...]
    predicted_bytes: tuple[int, ...]
    max_batch_size: int
    max_batch_chunk_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A split of a batch, and what is predicted of it; lists are in the order of the devices.

    Attributes:
        batch_size: samples of the whole batch.
        gpu0_bsz: the value whose fullest device is the least full.
        chunk_sizes: what each device gets.
        predicted_bytes: what each device needs at its peak.
        capacity_bytes: what each device can hold.
        reserve_bytes: what of it is kept free for what is not counted: contexts, workspaces.
        headroom_bytes: what is left of each device's capacity beside need and reserve.
        limiting_device: the index of the fullest device.
        floor_bytes: what device 0 needs with ``gpu0_bsz=0``; no choice of it can lower that.
        max_batch_size: the largest batch that fits.
        max_batch_gpu0_bsz: the value with which that batch fits.
        even_bytes: what the even split of ``nn.DataParallel`` needs for the same batch.
        even_max_batch_size: the largest batch that fits with the even split.
        time_cost: the largest chunk over the even one: how much longer the replicas compute.
        weighted: a share for each device, where the capacities differ and that is better.
        advice: what else would help, in sentences.
    """

    batch_size: int
    gpu0_bsz: int
    chunk_sizes: tuple[int, ...]
    predicted_bytes: tuple[int, ...]
    capacity_bytes: tuple[int, ...]
    reserve_bytes: int
    headroom_bytes: tuple[int, ...]
    limiting_device: int
    floor_bytes: int
    max_batch_size: int
    max_batch_gpu0_bsz: int
    even_bytes: tuple[int, ...]
    even_max_batch_size: int
    time_cost: float
    weighted: WeightedSplit | None
    advice: tuple[str, ...]

    @property
    def budgets(self) -> list[int]:
        """The bytes of each device that may be filled."""
        return [capacity - self.reserve_bytes for capacity in self.capacity_bytes]


def plan(model: MemoryModel, batch_size: int, capacities: Sequence[int], reserve: int = 0) -> Plan:
    """Returns the ``gpu0_bsz`` with the lowest utilization of the fullest device.

    Args:
        model: what each device needs.
        batch_size: samples of the whole batch, at least 1.
        capacities: what each device can hold, in bytes; they may differ.
        reserve: bytes of each that are not to be planned with.

    Raises:
        ArgumentError: a device has no capacity left beside the reserve, or there is no batch.
        InfeasiblePlanError: no value makes the batch fit.
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
) -> Plan:
    """Returns the plan with a given value, whether it fits or not; arguments as of ``plan``.

    Where outputs are not gathered, there is no advice to leave them where they are.
    """
    budgets = [capacity - reserve for capacity in capacities]
    planner = Planner(model, budgets)
    chunk_sizes = split_batch(batch_size, len(budgets), gpu0_bsz)
    needs = model.predict(chunk_sizes)
    max_batch_size = planner.max_batch_size(planner.tightest_gpu0_bsz)
    max_batch_gpu0_bsz = planner.tightest_gpu0_bsz(max_batch_size)
    utilization = utilizations(needs, budgets)
    if max_batch_size < batch_size and max(utilization) <= 1:
        # With unlike capacities a batch may fit though a smaller one does not: the last device of
        # a split gets what is left over.
        max_batch_size, max_batch_gpu0_bsz = batch_size, gpu0_bsz
    weighted = planner.weighted_split(batch_size) if len(set(budgets)) > 1 else None
    if (
        weighted is not None
        and weighted.max_batch_size <= max_batch_size
        and max(utilizations(weighted.predicted_bytes, budgets)) >= max(utilization) * (1 - EQUAL)
    ):
        weighted = None
    even = even_share(batch_size, len(budgets))
    floor_bytes = model.predict(split_batch(batch_size, len(budgets), 0))[0]
    return Plan(
        batch_size=batch_size,
        gpu0_bsz=gpu0_bsz,
        chunk_sizes=chunk_sizes,
        predicted_bytes=needs,
        capacity_bytes=tuple(capacities),
        reserve_bytes=reserve,
        headroom_bytes=tuple(b - need for b, need in zip(budgets, needs, strict=True)),
        limiting_device=utilization.index(max(utilization)),
        floor_bytes=floor_bytes,
        max_batch_size=max_batch_size,
        max_batch_gpu0_bsz=max_batch_gpu0_bsz,
        even_bytes=model.predict(split_batch(batch_size, len(budgets), even)),
        even_max_batch_size=planner.max_batch_size(planner.even_share),
        time_cost=max(chunk_sizes) / even,
        weighted=weighted,
        advice=_advice(model, batch_size, needs, utilization, floor_bytes, gather),
    )


def check_fits(found: Plan, held_bytes: Sequence[int]) -> None:
    """Raises InfeasiblePlanError where a device would hold more than it can beside the reserve."""
    lacks = [
        f"device {i} needs {format_bytes(held)} and lacks {format_bytes(held - budget)}"
        for i, (held, budget) in enumerate(zip(held_bytes, found.budgets, strict=True))
        if held > budget
    ]
    if not lacks:
        return
    remedy = f"the largest batch that fits is {found.max_batch_size}"
    weighted = found.weighted
    if weighted is not None and weighted.max_batch_size > found.max_batch_size:
        weights = list(weighted.max_batch_chunk_sizes)
        remedy += f", or {weighted.max_batch_size} with device_weights={weights}"
    raise InfeasiblePlanError(
        f"a batch of {found.batch_size} does not fit with any gpu0_bsz: with the best, "
        f"{found.gpu0_bsz}, {', '.join(lacks)}; {remedy}"
    )


def utilizations(held_bytes: Sequence[int], budgets: Sequence[int]) -> list[float]:
    """Returns what each device holds as a part of what it may hold."""
    return [held / budget for held, budget in zip(held_bytes, budgets, strict=True)]


def check_batch(batch_size: int, capacities: Sequence[int], reserve: int) -> None:
    """Raises ArgumentError where there is no batch, or not two devices that hold more than that."""
    as_integer("batch_size", batch_size, minimum=1)
    as_integer("reserve", reserve, minimum=0)
    if len(capacities) < 2 or min(capacities) <= reserve:
        raise ArgumentError(
            "a plan is for two or more devices that can hold more than the reserve of "
            f"{format_bytes(reserve)}, got {', '.join(map(format_bytes, capacities)) or 'none'}"
            + " (--reserve lowers it)"
            * (len(capacities) > 1)
        )


class Planner:
    """Finds values for a model of memory and the bytes that each device may hold."""

    def __init__(self, model: MemoryModel, budgets: Sequence[int]) -> None:
        self.model = model
        self.budgets = budgets

    def utilizations(self, batch_size: int, gpu0_bsz: int) -> tuple[float, float]:
        """Returns that of device 0 and that of the fullest of the others."""
        needs = self.model.predict(split_batch(batch_size, len(self.budgets), gpu0_bsz))
        first, *others = utilizations(needs, self.budgets)
        return first, max(others)

    def utilization(self, batch_size: int, gpu0_bsz: int) -> float:
        """Returns that of the fullest device."""
        return max(self.utilizations(batch_size, gpu0_bsz))

    def even_share(self, batch_size: int) -> int:
        """Returns the value that splits evenly."""
        return even_share(batch_size, len(self.budgets))

    def tightest_gpu0_bsz(self, batch_size: int) -> int:
        """Returns the value whose fullest device is the least full.

        With each sample device 0 grows and the others do not: the best is where they cross.
        """

        def first_is_fuller(gpu0_bsz: int) -> bool:
            first, others = self.utilizations(batch_size, gpu0_bsz)
            return first >= others

        even = self.even_share(batch_size)
        crossing = bisect.bisect_left(range(even + 1), True, key=first_is_fuller)
        # One more below: the even split gives the others' remainder to other devices.
        candidates = range(max(0, crossing - 2), min(even, crossing) + 1)
        return min(candidates, key=lambda value: self.utilization(batch_size, value))

    def best_gpu0_bsz(self, batch_size: int) -> int:
        """Returns the largest value that is as good as the tightest."""
        best = self.tightest_gpu0_bsz(batch_size)
        limit = self.utilization(batch_size, best) * (1 + EQUAL)
        most = self.even_share(batch_size) - best
        return best + _largest(lambda n: self.utilization(batch_size, best + n) <= limit, most)

    def max_batch_size(self, choose: Callable[[int], int]) -> int:
        """Returns the largest batch, to 2**24, that fits with the value ``choose`` gives, or 0."""
        return _largest_batch(lambda size: self.utilization(size, choose(size)) <= 1)

    def largest_chunks(self, batch_size: int, utilization: float = 1.0) -> tuple[int, ...] | None:
        """Returns the most samples that each device holds up to a utilization.

        None where device 0 is fuller without any, by what it gathers of the batch.
        """

        def fits_first(size: int) -> bool:
            held, _ = self.model.predict((size, batch_size - size))
            return held / self.budgets[0] <= utilization

        def largest_other(budget: int) -> int:
            def fits(size: int) -> bool:
                _, held = self.model.predict((batch_size - size, size))
                return held / budget <= utilization

            return _largest(fits, batch_size)

        size = _largest(fits_first, batch_size)
        if not size and not fits_first(0):
            return None
        return size, *map(largest_other, self.budgets[1:])

    def weighted_split(self, batch_size: int) -> WeightedSplit:
        """Returns the split whose fullest device is the least full of all splits."""

        def holds(size: int, utilization: float = 1.0) -> bool:
            return sum(self.largest_chunks(size, utilization) or ()) >= size

        def chunk_sizes(size: int) -> tuple[int, ...]:
            low, high = 0.0, self.utilization(size, self.even_share(size))
            for _ in range(_BISECTIONS):
                middle = (low + high) / 2
                low, high = (low, middle) if holds(size, middle) else (middle, high)
            # In proportion to what each could hold, none gets more than that.
            return split_by_weights(size, self.largest_chunks(size, high) or self.budgets)

        sizes, largest = chunk_sizes(batch_size), _largest_batch(holds)
        return WeightedSplit(
            chunk_sizes=sizes,
            predicted_bytes=self.model.predict(sizes),
            max_batch_size=largest,
            max_batch_chunk_sizes=chunk_sizes(largest) if largest else (0,) * len(self.budgets),
        )


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Returns the largest number from 1 to the limit that fits, as smaller ones do, or 0."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))


def _largest_batch(fits: Callable[[int], bool]) -> int:
    """Returns the largest batch size, to 2**24, that fits, or 0."""
    limit = 1
    while limit < _LARGEST_BATCH and fits(limit):
        limit *= 2
    return _largest(fits, limit)


_LARGEST_BATCH = 2**24
_BISECTIONS = 50


def _advice(
    model: MemoryModel,
    batch_size: int,
    needs: Sequence[int],
    utilization: Sequence[float],
    floor_bytes: int,
    gather: bool,
) -> tuple[str, ...]:
    whole_bytes = model.whole_bytes_per_sample * batch_size
    is_balanced = utilization[0] <= max(utilization[1:]) * (1 + _BALANCED)
    if is_balanced or floor_bytes < needs[0] * (1 - _BALANCED):
        return ()
    fact = (
        f"no value of gpu0_bsz balances this: without any samples device 0 needs "
        f"{format_bytes(floor_bytes)}, the fullest of the others {format_bytes(max(needs[1:]))}"
    )
    if not gather or whole_bytes == 0:
        return (f"{fact}: parameters, gradients and optimizer state, which a larger batch dwarfs",)
    return (
        f"{fact}. Gathering the outputs of {batch_size} samples and their loss costs device 0 "
        f"{format_bytes(whole_bytes)} ({format_bytes(model.whole_bytes_per_sample)} a sample). "
        "A loss computed on each device spares it that",
    )


_BALANCED = 0.10
"""By how much the fullest device may be fuller than the others without a word."""
