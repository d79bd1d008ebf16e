"""Search for the split that minimizes the utilization of the fullest device. Does not need torch.

The result is always a measured split, never a prediction. The memory of a device grows with its
samples, so each search looks for the largest integer that stays within a limit. ``Search.find``
narrows down the range of this integer. A line through two measurements only determines what to
measure next.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from typing import Any

from .split import EQUAL, even_share, split_batch

MAX_SPLITS = 6
"""The most splits that are tried in a training loop, and in a search for weights."""

_BISECTED = range(10, 2**16, 2)
"""The numbers of measurements after which a search bisects, as lines may converge slowly."""

_NUM_COMPARED = 3
"""How many iterations of each split to compare if the peaks of a split vary."""

VARIES = 0.01
"""Peaks vary if they differ by more than this fraction. Gradient buckets change them by less."""

_ROUNDING = 1e-6
"""Added to a guess, since rounding errors may lower it."""

Split = tuple[int, ...]
"""The chunk sizes of a batch."""

_Iteration = tuple[Sequence[float], Any]
"""The peaks of an iteration, and the caller's record of it."""


def utilizations(peaks: Sequence[float], budgets: Sequence[int]) -> list[float]:
    """Return the fraction of its budget that each device holds."""
    return [peak / budget for peak, budget in zip(peaks, budgets, strict=True)]


@dataclass
class Search:
    """A search for the best ``gpu0_bsz`` of a batch.

    Each sample moved to device 0 raises its utilization and lowers that of the others. So the
    highest utilization is lowest where device 0 is as full as the fullest other device. The search
    ends at two adjacent values: device 0 is the fullest device with the larger value, but not with
    the smaller one. Of equally good values the largest is best, because it is the fastest.

    Attributes:
        batch_size: samples in the whole batch.
        budgets: the bytes that each device may hold.
        smallest: the smallest chunk that a replica can train on.
        is_careful: whether to skip a split if a device could run out of memory. This
            assumes that a device's memory grows at most in proportion to its samples.
        for_speed: whether to also find the largest value that fits.
        told: the utilization of each device by split; infinity where memory ran out.
    """

    batch_size: int
    budgets: Sequence[int]
    smallest: int = 1
    is_careful: bool = False
    for_speed: bool = False
    told: dict[Split, list[float]] = field(default_factory=dict)

    @property
    def even(self) -> int:
        """The value of the even split."""
        return even_share(self.batch_size, len(self.budgets))

    def split(self, value: int) -> Split:
        """Return the chunk sizes for a value."""
        return split_batch(self.batch_size, len(self.budgets), value)

    def tell(self, split: Split, peaks: Sequence[float]) -> None:
        """Record the peaks of a split, ``math.inf`` for a device that ran out of memory."""
        self.told[split] = utilizations(peaks, self.budgets)

    def next(self) -> Split | None:
        """Return the split to measure next, or None if the search is over."""
        return next(self.wanted(), None)

    @property
    def best(self) -> int | None:
        """The value with the lowest utilization; of equals, the largest. None if no split ran."""
        ran = {value: max(full) for value, full in self._ran().items()}
        limit = min(ran.values(), default=0.0) * (1 + EQUAL)
        return max((value for value, full in ran.items() if full <= limit), default=None)

    def allows(self, split: Split) -> bool:
        """Return whether all replicas can train on their chunks and no device should run out."""
        ran = self._ran() if self.is_careful else {}
        # Between values that ran, no device holds more than it has held. Beyond them, the memory of
        # a device grows at most in proportion to its samples. The memory of a device that had no
        # samples tells nothing about samples.
        end = min(max(split[0], min(ran, default=0)), max(ran, default=0))
        chunks = zip(ran.get(end, ()), self.split(end), split, strict=False)
        is_safe = all(full * new <= old > 0 for full, old, new in chunks if new > old)
        return is_safe and not any(0 < chunk < self.smallest for chunk in split)

    def _values(self) -> dict[int, list[float]]:
        """Return the known utilizations of the devices by value of ``gpu0_bsz``."""
        return {s[0]: full for s, full in self.told.items() if s == self.split(s[0])}

    def _ran(self) -> dict[int, list[float]]:
        return {value: full for value, full in self._values().items() if max(full) < math.inf}

    def _over(self) -> dict[int, float]:
        """Return, by value, how much fuller device 0 is than the fullest other device."""
        over = {value: full[0] - max(full[1:]) for value, full in self._values().items()}
        # In the even split, the last device gets the remainder. So if budgets differ, the other
        # devices may be less full when device 0 has one sample less.
        if self.even in over and len(set(self.budgets)) > 1:
            over[self.even] = max(over[self.even], EQUAL)
        return over

    def wanted(self) -> Iterator[Split]:
        """Yield the split to measure next. Only the first split that is yielded is valid."""
        if not self.told:
            yield self.split(self.even)
        values = range(self.even + 1)
        value, full = max(self._ran().items(), default=(0, [0.0, 0.0]))
        # An upper bound of the memory of a sample, as if the device held nothing but samples.
        a_sample = max(full[1:]) / max(1, *self.split(value)[1:])
        slope = a_sample * (1 + 1 / (len(self.budgets) - 1))
        yield from self.find(self._over(), values, self.split, slope)
        known = self._values()
        if (best := self.best) is not None:
            for limit in (max(known[best]) * (1 + EQUAL), *[1.0] * self.for_speed):
                over = {value: full[0] - limit for value, full in known.items()}
                yield from self.find(over, values, self.split, bends_up=True)

    def find(
        self,
        over: Mapping[int, float],
        numbers: range,
        split_of: Callable[[int], Split],
        slope: float | None = None,
        close: float = math.inf,
        bends_up: bool = False,
        start: int = 1,
    ) -> Generator[Split, None, int]:
        """Search for the largest number within a limit.

        Args:
            over: by number, the excess over the limit, which grows with the number. An excess of at
                most 0 is within the limit; infinity means that the excess is unknown.
            numbers: the numbers in ascending order.
            split_of: returns the split of a number.
            slope: the assumed increase of the excess per number, until there are two measurements.
                None means that of the line from (0, -1) to the measurement, an upper bound.
            close: the result may be too small by at most one part in ``close``.
            bends_up: whether the excess is convex. If it is, beyond two measurements it lies above
                the line through them, so no number beyond the zero of the line is measured.
            start: the number to begin with.

        Yields:
            The split to measure next, unless the search is over.

        Returns:
            The largest number within the limit so far, or 0.
        """
        low = max((number for number, y in over.items() if y <= 0), default=-1)
        high = min((number for number in over if number > low), default=math.inf)
        step = max(0, low // close)
        left = numbers[bisect_right(numbers, low + step) : bisect_left(numbers, high)]
        known = sorted(number for number, y in over.items() if abs(y) < math.inf)
        inside, beyond = [n for n in known if n <= low][-2:], [n for n in known if n > low][:2]

        def rise(x: int, before: int | None = None) -> float:
            """Return the slope of the line through one or two measurements."""
            if before is not None:
                return (over[x] - over[before]) / (x - before)
            return (over[x] + 1) / max(x, 1) if slope is None else slope

        def zero(*points: int) -> float:
            """Return where the line through one or two measurements reaches the limit."""
            x, by = points[0], rise(*points)
            return x - over[x] / by + _ROUNDING if by > 0 else 2.0 * max(low, 1)

        is_over = bends_up and left and len(inside) > 1 and zero(*inside) < left[0]
        points = [inside[-1], beyond[0]] if inside and beyond else inside or beyond
        guess = zero(*points) if points else math.inf if over else start
        # Across a bend, the line through two points reaches zero next to the lower one.
        if inside[1:] and beyond and 2 * rise(*inside) < rise(inside[1], beyond[0]):
            guess = zero(*beyond) if beyond[1:] else high
        if high < math.inf and (guess >= high or len(over) in _BISECTED):
            guess = left[len(left) // 2] if left else 0
        end = bisect_right(left, guess)
        for number in chain(reversed(left[:end]), left[end:]):
            if not is_over and self.allows(split_of(number)):
                yield split_of(number)
        return max(low, 0)


def _peak(iteration: _Iteration) -> float:
    return max(iteration[0])


class LoopSearch:
    """A search that follows the iterations of a training loop, whatever their batches.

    The iteration with the largest batch decides, because it fills the devices most. In batches of
    other sizes, device 0 gets the same share.

    Args:
        budgets: the bytes that each device may hold.
        is_careful: as for ``Search``.
        compares: whether all splits are reported at the end, not only the best one. If so, the
            search also looks for the largest value that fits. It then compares splits over equal
            numbers of iterations, since the highest peak of many iterations exceeds that of a few.

    Attributes:
        search: the search for the largest batch so far, empty before the first iteration.
        highest: by split, the peaks and the record of the compared iteration with the highest peak.
        accumulates: whether the compared iterations have added to existing gradients.
        is_over: whether the value is final, unless memory runs out.
    """

    def __init__(self, budgets: Sequence[int], *, is_careful: bool, compares: bool = False) -> None:
        self.search = Search(0, budgets, is_careful=is_careful, for_speed=compares)
        self.highest: dict[Split, _Iteration] = {}
        self.is_over = False
        self._share = Fraction(1)
        self.accumulates = False
        self._iterations: dict[Split, list[_Iteration]] = {}

    def split(self, batch_size: int) -> Split:
        """Return the chunk sizes of a batch."""
        value = math.ceil(self._share * batch_size)
        value = max(value, self.search.smallest) if value else 0
        return split_batch(batch_size, len(self.search.budgets), value)

    def tell(
        self, split: Split, peaks: Sequence[float], accumulates: bool = False, record: Any = None
    ) -> None:
        """Record an iteration. It counts unless an earlier one was larger.

        Args:
            split: the chunk sizes of the iteration's largest batch.
            peaks: the peak of each device.
            accumulates: whether that batch has added to existing gradients.
            record: the caller's record of the iteration.
        """
        iteration, largest = (sum(split), accumulates), (self.search.batch_size, self.accumulates)
        if iteration < largest:
            return
        if iteration > largest:
            self._begin(*iteration)
        found = [*self._iterations.get(split, ()), (peaks, record)]
        # Without comparisons, only the iteration with the highest peak is needed.
        keep = found[-_NUM_COMPARED:] if self.search.for_speed else [max(found, key=_peak)]
        self._iterations[split] = keep
        num = min(map(len, self._iterations.values()))
        for tried, found in self._iterations.items():
            self.highest[tried] = max(found[-num:], key=_peak)
            self.search.tell(tried, self.highest[tried][0])
        following = self.search.next() if len(self.search.told) < MAX_SPLITS else None
        if following is None and num < _NUM_COMPARED and self._varies():
            following = min(self._iterations, key=lambda tried: len(self._iterations[tried]))
        self.is_over = following is None
        self._use(self.search.best if following is None else following[0])

    def _varies(self) -> bool:
        """Return whether the peaks of a split vary."""
        peaks = [[*map(_peak, found)] for found in self._iterations.values()]
        return any(max(of_split) > min(of_split) * (1 + VARIES) for of_split in peaks)

    def ran_out(self, batch_size: int, index: int) -> bool:
        """Record that a device ran out of memory; return whether the batch's split changed."""
        split = self.split(batch_size)
        if self.search.batch_size != batch_size:
            self._begin(batch_size, False)
        told = self.search.told
        for tried in [s for s in told if (s <= split if index else s >= split)]:
            del told[tried]  # this split may reach higher peaks than it was recorded with
            self._iterations.pop(tried, None)
        told[split] = [math.inf if i == index else 0.0 for i in range(len(split))]
        self.is_over = False
        best, following = self.search.best, self.search.next()
        self._use(best if best is not None or following is None else following[0])
        return self.split(batch_size) != split

    def _begin(self, batch_size: int, accumulates: bool) -> None:
        """Begin the search for a batch size. Keep its values that ran out of memory."""
        before, self.accumulates = self.search, accumulates
        self._iterations, self.highest = {}, {}
        same = ((s, full) for s, full in before.told.items() if sum(s) == batch_size)
        out = {split: full for split, full in same if max(full) == math.inf}
        self.search = replace(before, batch_size=batch_size, told=out)

    def _use(self, value: int | None) -> None:
        """Use a value from the next batch on."""
        batch_size = self.search.batch_size
        if value is not None and value != self.split(batch_size)[0]:
            self._share = Fraction(value, batch_size)

    def state_dict(self, batch_size: int) -> dict[str, Any]:
        """Return the value for a batch, and whether the value is final, as numbers and lists."""
        return {
            "batch_size": batch_size,
            "gpu0_bsz": self.split(batch_size)[0],
            "capacities": list(self.search.budgets),
            "is_over": self.is_over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start with the value of another search, if that had the same number of devices.

        The value is final if that search was over and its capacities were the same.
        """
        capacities = list(self.search.budgets)
        if len(state["capacities"]) == len(capacities):
            self._share = Fraction(state["gpu0_bsz"], state["batch_size"])
            self.is_over = state["capacities"] == capacities and bool(state.get("is_over"))
