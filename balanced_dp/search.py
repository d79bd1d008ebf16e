"""Search for the split that minimizes the utilization of the fullest device. Pure, without torch.

Nothing is predicted. The memory of a device grows with its samples, so each search looks for the
largest integer that stays within a limit. ``next_number`` brackets it; a line through two
measurements only chooses what to measure next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from .split import EQUAL, even_share, split_batch, split_by_weights

MAX_SPLITS = 6
"""The most splits that are tried in a training loop, and by weights."""

_CLOSE = 500
"""The largest batch is found to one part in this number, and small ones exactly."""

_MAX_LINES = 8
"""After this many measurements by lines, a search bisects."""

Full = tuple[float, float]
"""The utilization of device 0, and the highest of the others; 1 is the whole budget."""


def utilizations(peaks: Sequence[float], budgets: Sequence[int]) -> list[float]:
    """Return the fraction of its budget that each device holds."""
    return [peak / budget for peak, budget in zip(peaks, budgets, strict=True)]


def fullness(peaks: Sequence[float], budgets: Sequence[int]) -> Full:
    """Return the utilization of device 0, and the highest of the others."""
    first, *others = utilizations(peaks, budgets)
    return first, max(others)


def next_number(
    over: Mapping[int, float],
    numbers: Sequence[int],
    slope: float,
    close: float = math.inf,
    most: int = _MAX_LINES,
    bends_up: bool = False,
) -> int | None:
    """Return the number to measure next in a search for the largest one within a limit.

    Args:
        over: by number, the excess over the limit, which grows with the number. At most 0 is within
            the limit; infinity is an unknown excess.
        numbers: all numbers that can be measured, in ascending order.
        slope: the increase of the excess per number, until there are two measurements.
        close: the result may be too small by one part in this number.
        most: after this many measurements, the search bisects.
        bends_up: whether the excess is convex. Then it lies above the line through two
            measurements, and no number beyond the zero of the line is measured.

    Returns:
        A number; None if the search is over.
    """
    low = max((number for number, y in over.items() if y <= 0), default=-1)
    high = min((number for number in over if number > low), default=math.inf)
    left = [number for number in numbers if low + max(0.0, low // close) < number < high]
    if not left:
        return None
    nearest = sorted((abs(y), number) for number, y in over.items() if abs(y) < math.inf)[:2]
    guess = math.inf
    if nearest:
        x, *before = (number for _, number in nearest)
        if before:
            slope = (over[x] - over[before[0]]) / (x - before[0])
        guess = x - over[x] / slope if slope > 0 else 2.0 * max(low, 1)
        if bends_up and before and max(x, *before) == low and guess < left[0]:
            return None
    if high < math.inf and (guess >= high or len(over) > most):
        guess = left[len(left) // 2]
    return max((number for number in left if number <= guess), default=left[0])


@dataclass
class Search:
    """A search for the best ``gpu0_bsz`` of a batch.

    Each sample on device 0 fills it and empties the others, so the highest utilization is lowest
    where the two cross. The search ends at two neighbors of which only the larger one makes device
    0 the fullest. Of equally good values the largest is best, because it is the fastest.

    Attributes:
        batch_size: samples in the whole batch.
        budgets: the bytes that each device may hold.
        smallest: the smallest chunk that a replica trains on.
        is_careful: whether to skip splits that would exceed a budget if the memory of a device grew
            in proportion to its samples, which is an upper bound.
        for_speed: whether to also find the largest value that fits.
        told: the utilizations by ``gpu0_bsz``.
    """

    batch_size: int
    budgets: Sequence[int]
    smallest: int = 1
    is_careful: bool = False
    for_speed: bool = False
    told: dict[int, Full] = field(default_factory=dict)

    @property
    def even(self) -> int:
        """The value of the even split."""
        return even_share(self.batch_size, len(self.budgets))

    def split(self, value: int) -> tuple[int, ...]:
        """Return the chunk sizes for a value."""
        return split_batch(self.batch_size, len(self.budgets), value)

    def tell(self, split: Sequence[int], peaks: Sequence[float]) -> None:
        """Record the peaks of a split, ``math.inf`` for a device that ran out of memory."""
        known, found = self.told.get(split[0], (0.0, 0.0)), fullness(peaks, self.budgets)
        self.told[split[0]] = max(known[0], found[0]), max(known[1], found[1])

    def next(self) -> tuple[int, ...] | None:
        """Return the split to measure next, None if the search is over."""
        if not self.told:
            return self.split(self.even)
        values = [0, *range(max(1, min(self.smallest, self.even)), self.even + 1)]
        if self.is_careful:
            values = [value for value in values if self._is_safe(value)]
        for over, slope in self._targets():
            if (value := next_number(over, values, slope)) is not None:
                return self.split(value)
        return None

    @property
    def best(self) -> int | None:
        """The best of the values that ran, None if none did.

        It is next to the crossing. Each measurement shows its side of the crossing by itself,
        because iterations of a loop may differ in more than the split.
        """
        ran = self._ran()
        low = max((value for value in ran if self._over()[value] <= 0), default=-1)
        ends = [
            value for value in (low, min((v for v in ran if v > low), default=-1)) if value >= 0
        ]
        level = min((max(ran[value]) for value in ends), default=0.0)
        equal = (value for value in ran if abs(max(ran[value]) - level) <= EQUAL * level)
        return max(equal, default=None)

    def _over(self) -> dict[int, float]:
        """Return by how much device 0 is fuller than the others."""
        over = {value: first - others for value, (first, others) in self.told.items()}
        # In the even split the last device gets what is left, so of devices with unlike budgets the
        # others may be less full with a sample less on device 0.
        if self.even in over and len(set(self.budgets)) > 1:
            over[self.even] = max(over[self.even], EQUAL)
        return over

    def _targets(self) -> Iterator[tuple[dict[int, float], float]]:
        """Yield the searches in turn: the crossing, equally good values, and values that fit."""
        value, (_, others) = max(self._ran().items(), default=(0, (0.0, 0.0)))
        # An upper bound for a sample: the device holds nothing but samples.
        a_sample = others / max(1, *self.split(value)[1:])
        yield self._over(), a_sample * (1 + 1 / (len(self.budgets) - 1))
        best = self.best
        if best is None:
            return
        limits, below = {}, max((value for value in self.told if value < best), default=best)
        if self.told[best][0] <= self.told[below][0] * (1 + EQUAL):  # else each sample adds to it
            limits[best] = max(self.told[best]) * (1 + EQUAL)
        fitting = [value for value, full in self.told.items() if max(full) <= 1]
        if self.for_speed and fitting:
            limits[max(fitting)] = 1.0
        for low, limit in limits.items():
            yield {v: full[0] - limit for v, full in self.told.items() if v >= low}, 0.0

    def _is_safe(self, value: int) -> bool:
        """Return whether no device would be more than full if all that it holds were samples."""
        ran = self._ran() or {value: (0.0, 0.0)}
        low, high = min(ran), max(ran)
        if value > high:
            return ran[high][0] * value <= high
        if value < low:
            known = max(self.split(low)[1:])
            return known > 0 and ran[low][1] * max(self.split(value)[1:]) <= known
        return True

    def _ran(self) -> dict[int, Full]:
        return {value: full for value, full in self.told.items() if max(full) < math.inf}


def measure_largest(measure: Callable[[tuple[int, ...]], Full], search: Search, limit: int) -> None:
    """Measure the largest batches that fit: with the even split, and with any ``gpu0_bsz``.

    For the second, find the largest chunk that fits on the other devices, then the samples that fit
    on device 0. Device 0 must also have room for the gathered outputs.

    Args:
        measure: returns how full the devices are with a split.
        search: the search for a batch, which is over.
        limit: the largest batch that can be measured.
    """
    num, smallest = len(search.budgets), search.smallest
    told = {search.split(value): full for value, full in search.told.items()}

    def largest(
        numbers: Sequence[int],
        split_of: Callable[[int], tuple[int, ...]],
        full_of: Callable[[Full], float],
        known: Mapping[int, Full] | None = None,
        bends_up: bool = True,
    ) -> int:
        """Return the largest number whose split keeps the checked devices within budget, or 0."""
        if smallest > 1:
            numbers = [n for n in numbers if smallest <= min(filter(None, split_of(n)))]
        if known is None:
            known = {sum(s): f for s, f in told.items() if s == split_of(sum(s))}
        over = {number: full_of(full) - 1 for number, full in known.items()}
        most = len(over) + _MAX_LINES
        while True:
            slope = max(((y + 1) / n for n, y in over.items() if y < math.inf), default=0.0)
            number = next_number(over, numbers, slope, _CLOSE, most, bends_up)
            if number is None:
                return max((n for n, y in over.items() if y <= 0), default=0)
            split = split_of(number)
            told[split] = told.get(split) or measure(split)
            over[number] = full_of(told[split]) - 1

    even = told[search.split(search.even)]
    share = largest(
        range(smallest, limit // num + 1), lambda n: (n,) * num, max, {search.even: even}
    )
    for more in (1, num - 1):  # with one more, most devices have a larger chunk already
        sizes = range(max(1, (share - 1) * num + 1), min(share * num + more, limit) + 1)
        largest(sizes, lambda n: split_batch(n, num, n), max, bends_up=False)
    equal = {split[1]: full for split, full in told.items() if split[1] and len({*split[1:]}) == 1}
    chunk = largest(
        range(smallest, limit // (num - 1) + 1),
        lambda n: (0, *[n] * (num - 1)),
        lambda full: full[1],
        equal or {search.even: even},
    )
    rest = chunk * (num - 1)
    sizes = range(1, min(rest + chunk, limit) + 1)
    largest(sizes, lambda n: split_batch(n, num, max(0, n - rest)), lambda full: full[0])


def fill_alike(
    told: Mapping[tuple[int, ...], Sequence[float]], batch_size: int | None
) -> tuple[int, ...] | None:
    """Return chunk sizes that fill all devices equally, according to the measurements.

    Args:
        told: the utilization of each device by chunk sizes that ran, the latest last.
        batch_size: the samples in the whole batch; None means as many as fit.

    Returns:
        The chunk sizes; None if the memory of a sample is unknown on a device.
    """
    lines = []
    for index in range(len(next(iter(told)))):
        points = {split[index]: full[index] for split, full in told.items() if split[index]}
        (x0, y0), (x1, y1) = [(0, 0.0), (0, 0.0), *points.items()][-2:]
        slope = (y1 - y0) / (x1 - x0) if x1 != x0 else 0.0
        if slope <= 0:
            return None
        lines.append((y0 - slope * x0, slope))
    level = 1.0
    if batch_size is not None:
        inside = sum(fixed / slope for fixed, slope in lines)
        level = (batch_size + inside) / sum(1 / slope for _, slope in lines)
    chunks = [max(0.0, (level - fixed) / slope) for fixed, slope in lines]
    if batch_size is None:
        return tuple(map(math.floor, chunks))
    return split_by_weights(batch_size, chunks)


class LoopSearch:
    """A search that follows the iterations of a training loop, whatever their batches.

    The largest iteration decides, because it fills the devices most. Batches of other sizes get the
    same share on device 0.

    Args:
        budgets: the bytes that each device may hold.
        is_careful: as for ``Search``. If set, the first iteration after each change does not count,
            because kernels are tuned in it.
        for_speed: as for ``Search``.

    Attributes:
        smallest: the smallest chunk that a replica trains on.
        search: the search for the largest batch so far, empty before the first iteration.
        is_over: whether the value is final, unless memory runs out.
    """

    def __init__(
        self, budgets: Sequence[int], *, is_careful: bool, for_speed: bool = False
    ) -> None:
        self.search = Search(0, budgets, is_careful=is_careful, for_speed=for_speed)
        self.smallest = 1
        self.is_over = False
        self._share = Fraction(1)
        self._accumulates = False
        self._is_settling = is_careful

    def value(self, batch_size: int) -> int:
        """Return the value for a batch."""
        value = math.ceil(self._share * batch_size)
        even = even_share(batch_size, len(self.search.budgets))
        return min(even, max(value, self.smallest)) if value else 0

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk sizes of a batch."""
        return split_batch(batch_size, len(self.search.budgets), self.value(batch_size))

    def tell(self, split: Sequence[int], peaks: Sequence[float], accumulates: bool = False) -> None:
        """Record an iteration.

        Args:
            split: the chunk sizes of its largest batch.
            peaks: the peak of each device.
            accumulates: whether this batch has added to gradients that were there.
        """
        was_settling, self._is_settling = self._is_settling, False
        iteration, largest = (sum(split), accumulates), (self.search.batch_size, self._accumulates)
        if was_settling or iteration < largest:
            return
        if iteration > largest:
            self._begin(*iteration)
        self.search.tell(split, peaks)
        following = self.search.next() if len(self.search.told) < MAX_SPLITS else None
        self.is_over = following is None
        self._use(self.search.best if following is None else following[0])

    def ran_out(self, batch_size: int, index: int) -> bool:
        """Record that a device ran out of memory with a batch; return whether the split differs."""
        value = self.value(batch_size)
        if self.search.batch_size != batch_size:
            self._begin(batch_size, False)
        told, is_first = self.search.told, index == 0
        for tried in [v for v in told if (v >= value if is_first else v <= value)]:
            del told[tried]  # the devices held less than they can
        told[value] = (math.inf, 0.0) if is_first else (0.0, math.inf)
        self.is_over = False
        best, following = self.search.best, self.search.next()
        self._use(best if best is not None or following is None else following[0])
        return self.value(batch_size) != value

    def _begin(self, batch_size: int, accumulates: bool) -> None:
        """Begin the search for a batch. Values that ran out of memory with it stay known."""
        before, self._accumulates = self.search, accumulates
        self.search = replace(before, batch_size=batch_size, smallest=self.smallest, told={})
        if before.batch_size == batch_size:
            out = {value: full for value, full in before.told.items() if max(full) == math.inf}
            self.search.told.update(out)

    def _use(self, value: int | None) -> None:
        """Use a value from the next batch on."""
        batch_size = self.search.batch_size
        if value is not None and value != self.value(batch_size):
            self._share = Fraction(value, batch_size)
            self._is_settling = self.search.is_careful

    def state_dict(self, batch_size: int) -> dict[str, Any]:
        """Return the value for a batch, and whether it is final, as numbers and lists."""
        return {
            "batch_size": batch_size,
            "gpu0_bsz": self.value(batch_size),
            "capacities": list(self.search.budgets),
            "is_over": self.is_over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start with the value of another search with the same number of devices.

        It is final if that search was over and the capacities are the same.
        """
        capacities = list(self.search.budgets)
        if len(state["capacities"]) == len(capacities):
            self._share = Fraction(state["gpu0_bsz"], state["batch_size"])
            self.is_over = state["capacities"] == capacities and bool(state.get("is_over"))
