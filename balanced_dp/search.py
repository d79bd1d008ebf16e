"""Search for the split of a batch with which the fullest device is least full.

A split is the chunk size (number of samples) of each device. The utilization of a device is its
peak memory divided by its budget, the memory that it may hold. The fullest device is the one with
the highest utilization. This file does not need torch.

The result is always a measured split, never a prediction. The memory of a device grows with the
number of its samples. So each search looks for the largest integer with which a measured quantity
stays within a limit: for example, the largest batch size with which no device exceeds its budget.
``Search.find`` narrows down the range of this integer. A line through two measurements only
determines which integer to measure next.
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
"""The maximum number of splits that a search in a training loop tries.

If memory ran out with all of these splits, the search tries further ones. In ``tune``, each
search for ``device_weights`` tries at most this number of splits.
"""

_BISECTED = range(10, 2**16, 2)
"""After 10, 12, 14, ... measurements, a search measures the middle of the range that is left.

At other times, it measures where a line through earlier measurements meets the limit. A search
that only followed such lines could converge slowly.
"""

_NUM_COMPARED = 3
"""If peaks vary, ``LoopSearch(compares=True)`` measures each split in this many iterations."""

VARIES = 0.01
"""The peaks of a split count as varying if two iterations differ by more than this fraction.

Smaller differences are ignored: the buffers in which gradients are copied may cause them.
"""

_ROUNDING = 1e-6
"""Added to a computed guess, since rounding errors may put it just below the right integer."""

Split = tuple[int, ...]
"""The chunk size of each device, in the order of the devices."""

_Iteration = tuple[Sequence[float], Any]
"""The peak bytes of each device in a training iteration, and the ``record`` passed to ``tell``."""


def utilizations(peaks: Sequence[float], budgets: Sequence[int]) -> list[float]:
    """Return the utilization of each device: its peak divided by its budget, both in bytes."""
    return [peak / budget for peak, budget in zip(peaks, budgets, strict=True)]


@dataclass
class Search:
    """A search for the ``gpu0_bsz`` with which the fullest device is least full.

    The caller measures the split (the chunk size of each device) that ``next`` returns, passes the
    peak memory of each device to ``tell``, and repeats this until ``next`` returns None. In this
    class, a value is a ``gpu0_bsz``, the number of samples of device 0.

    Each sample that is moved to device 0 raises the utilization (peak memory divided by budget) of
    device 0 and lowers that of the other devices. So the highest utilization is lowest where
    device 0 is as full as the fullest of the other devices. The search looks for two adjacent
    values: with the larger value, device 0 is the fullest device; with the smaller value, another
    device is at least as full. Of equally good values, the largest is best, because training is
    fastest with it.

    Attributes:
        batch_size: the number of samples in the whole batch.
        budgets: the bytes that each device may hold.
        smallest: the smallest number of samples that a replica can train on.
        is_careful: whether to skip a split with which a device could run out of memory. The search
            assumes that a device's memory grows at most in proportion to the number of its samples.
        for_speed: whether to find a second value besides the best one: the largest value with which
            the peak memory of device 0 is at most ``budgets[0]``.
        told: a dict from each measured split to the utilization of each device, which is infinity
            if the device ran out of memory.
    """

    batch_size: int
    budgets: Sequence[int]
    smallest: int = 1
    is_careful: bool = False
    for_speed: bool = False
    told: dict[Split, list[float]] = field(default_factory=dict)

    @property
    def even(self) -> int:
        """The ``gpu0_bsz`` of the even split."""
        return even_share(self.batch_size, len(self.budgets))

    def split(self, value: int) -> Split:
        """Return the chunk size of each device if ``gpu0_bsz`` is ``value``."""
        return split_batch(self.batch_size, len(self.budgets), value)

    def tell(self, split: Split, peaks: Sequence[float]) -> None:
        """Record the measured peaks of a split.

        Args:
            split: the chunk size of each device.
            peaks: the peak bytes of each device; ``math.inf`` for a device that ran out of memory.
        """
        self.told[split] = utilizations(peaks, self.budgets)

    def next(self) -> Split | None:
        """Return the split to measure next, or None if the search is over."""
        return next(self._wanted(), None)

    @property
    def best(self) -> int | None:
        """The measured ``gpu0_bsz`` with which the fullest device is least full.

        Of equally good values, it is the largest. It is None if memory ran out with each measured
        ``gpu0_bsz``. The result may be a ``gpu0_bsz`` with which a device exceeded its budget, if
        memory did not run out.
        """
        ran = {value: max(full) for value, full in self._ran().items()}
        limit = min(ran.values(), default=0.0) * (1 + EQUAL)
        return max((value for value, full in ran.items() if full <= limit), default=None)

    def allows(self, split: Split) -> bool:
        """Return whether the search may measure ``split``, the chunk size of each device.

        Each chunk must be empty or have at least ``smallest`` samples. If ``is_careful`` is True,
        the measured splits must also show that no device can run out of memory.
        """
        ran = self._ran() if self.is_careful else {}
        # A value ran if no device ran out of memory. Between two values that ran, no device holds
        # more than the most that it held with these two. Beyond all values that ran, the memory of
        # a device grows at most in proportion to its samples. The memory of a device without
        # samples does not tell how much memory a sample takes. So giving samples to this device is
        # not safe.
        end = min(max(split[0], min(ran, default=0)), max(ran, default=0))
        chunks = zip(ran.get(end, ()), self.split(end), split, strict=False)
        is_safe = all(full * new <= old > 0 for full, old, new in chunks if new > old)
        return is_safe and not any(0 < chunk < self.smallest for chunk in split)

    def _values(self) -> dict[int, list[float]]:
        """Return a dict from each measured ``gpu0_bsz`` to the utilization of each device.

        Measured splits that do not result from a ``gpu0_bsz`` are left out.
        """
        return {s[0]: full for s, full in self.told.items() if s == self.split(s[0])}

    def _ran(self) -> dict[int, list[float]]:
        return {value: full for value, full in self._values().items() if max(full) < math.inf}

    def _over(self) -> dict[int, float]:
        """Return how much fuller device 0 is than the others with each measured ``gpu0_bsz``.

        The result is a dict from each measured ``gpu0_bsz`` to a difference: the utilization (peak
        memory divided by budget) of device 0 minus the highest utilization of the other devices.
        """
        over = {value: full[0] - max(full[1:]) for value, full in self._values().items()}
        # The even split may leave few samples to the last device, such as (3, 3, 3, 0). With one
        # sample fewer on device 0, the split is (2, 3, 2, 2), and device 2 is less full, too. If
        # budgets differ, device 2 may be the fullest. Then a smaller value may be better although
        # device 0 is not the fullest. So the even split gets a positive difference, which makes the
        # search try smaller values.
        if self.even in over and len(set(self.budgets)) > 1:
            over[self.even] = max(over[self.even], EQUAL)
        return over

    def _wanted(self) -> Iterator[Split]:
        """Yield the split to measure next, or nothing if the search is over.

        Each call of ``Search.next`` takes only the first split of a new generator, because an old
        generator does not know the measurement of its first split.
        """
        if not self.told:
            yield self.split(self.even)
        values = range(self.even + 1)
        value, full = max(self._ran().items(), default=(0, [0.0, 0.0]))
        # An upper bound of what a sample adds to the utilization: assume that devices hold only
        # samples.
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
        """Search for the largest number with which a measured quantity stays within a limit.

        Args:
            over: a dict from each measured number to the excess of the quantity over the limit. The
                excess grows with the number. A number is within the limit if its excess is at most
                0. If the excess is infinite, only its sign is known.
            numbers: the numbers to search, in ascending order.
            split_of: a function that returns the split to measure for a number.
            slope: until two numbers have been measured, the excess is assumed to increase by
                ``slope`` from one number to the next. If ``slope`` is None, the first measurement
                determines the slope: the excess is assumed to be -1 at number 0 (utilization 0
                minus limit 1), as if a device without samples held nothing. This slope is usually
                too large, because a device holds memory even without samples.
            close: the result may be too small by at most ``result // close``. For example,
                ``close=100`` allows an error of 1 %. By default, the result is exact.
            bends_up: whether the excess is a convex function of the number. If it is, the line
                through two measurements is a lower bound of the excess of each larger number. So
                the search ends if this line is above 0 at all numbers that are left.
            start: the number to measure first.

        Yields:
            The split to measure next. Use only the first split that is yielded, because the others
            do not take its measurement into account. If nothing is yielded, the search is
            over.

        Returns:
            The largest measured number within the limit, or 0 if there is none.
        """
        low = max((number for number, y in over.items() if y <= 0), default=-1)
        high = min((number for number in over if number > low), default=math.inf)
        step = max(0, low // close)
        left = numbers[bisect_right(numbers, low + step) : bisect_left(numbers, high)]
        known = sorted(number for number, y in over.items() if abs(y) < math.inf)
        inside, beyond = [n for n in known if n <= low][-2:], [n for n in known if n > low][:2]

        def rise(x: int, before: int | None = None) -> float:
            """Return the slope of the excess (a measured quantity minus its limit) at number ``x``.

            It is the slope of the line through the measurements of ``before`` and ``x``. If
            ``before`` is None, the slope is assumed (see the argument ``slope`` of ``find``).
            """
            if before is not None:
                return (over[x] - over[before]) / (x - before)
            return (over[x] + 1) / max(x, 1) if slope is None else slope

        def zero(*points: int) -> float:
            """Return the number at which a line reaches 0.

            The line shows the excess (a measured quantity minus its limit) of each number. It goes
            through two measurements, or it goes through one and has the assumed slope. If the line
            does not rise, the result is twice the largest number known to be within the limit, at
            least 2.
            """
            x, by = points[0], rise(*points)
            return x - over[x] / by + _ROUNDING if by > 0 else 2.0 * max(low, 1)

        is_over = bends_up and left and len(inside) > 1 and zero(*inside) < left[0]
        points = [inside[-1], beyond[0]] if inside and beyond else inside or beyond
        guess = zero(*points) if points else math.inf if over else start
        # If the excess is convex between ``points``, the line through them reaches 0 at too small a
        # number. So follow the line through two numbers beyond the limit. If only one number beyond
        # the limit was measured, take the middle of the range that is left.
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
    """A search for the best ``gpu0_bsz`` during a training loop, whose batches may differ in size.

    Only iterations with the largest batch so far are compared, because these fill the devices most.
    In batches of other sizes, device 0 gets the same share as in the largest batch.

    Args:
        budgets: the bytes that each device may hold.
        is_careful: whether to skip a split with which a device could run out of memory, as for
            ``Search``.
        compares: whether the caller reports all measured splits at the end, not only the best one.
            If so, the search looks not only for the best ``gpu0_bsz``, but also for the largest
            ``gpu0_bsz`` with which the peak of device 0 is at most ``budgets[0]``. The search then
            compares splits over equal numbers of iterations, since the highest peak of many
            iterations tends to exceed the highest peak of a few.

    Attributes:
        search: the ``Search`` for the largest batch so far. Before the first iteration, its
            ``batch_size`` is 0.
        highest: a dict from each split (the chunk size of each device) to the iteration with the
            highest peak among the compared iterations with this split. An iteration is a pair: the
            ``peaks`` and the ``record`` that were passed to ``tell``.
        accumulates: whether, in the compared iterations, the backward pass of the largest batch has
            added to existing gradients (gradient accumulation).
        is_over: whether the search is over, so that ``gpu0_bsz`` is final. Further calls of
            ``tell`` or ``ran_out`` may reopen the search.
    """

    def __init__(self, budgets: Sequence[int], *, is_careful: bool, compares: bool = False) -> None:
        self.search = Search(0, budgets, is_careful=is_careful, for_speed=compares)
        self.highest: dict[Split, _Iteration] = {}
        self.is_over = False
        self._share = Fraction(1)
        self.accumulates = False
        self._iterations: dict[Split, list[_Iteration]] = {}

    def split(self, batch_size: int) -> Split:
        """Return the chunk size of each device for a batch of ``batch_size`` samples."""
        value = math.ceil(self._share * batch_size)
        value = max(value, self.search.smallest) if value else 0
        return split_batch(batch_size, len(self.search.budgets), value)

    def tell(
        self,
        split: Split,
        peaks: Sequence[float],
        accumulates: bool = False,
        is_settled: bool = True,
        record: Any = None,
    ) -> None:
        """Record the peaks of an iteration, unless a larger iteration has come before.

        The larger of two iterations is the one whose largest batch has more samples. If both have
        equally many, an iteration with ``accumulates=True`` is larger than one without.

        Args:
            split: the chunk size of each device for the iteration's largest batch.
            peaks: the peak bytes of each device during the iteration.
            accumulates: whether the largest batch has added to existing gradients.
            is_settled: whether the peaks may be compared with others. If not, they are not
                recorded. But if peaks of earlier iterations were recorded, iterations smaller than
                this one are ignored from now on.
            record: the caller's record of the iteration, which is kept in ``highest``.
        """
        iteration, largest = (sum(split), accumulates), (self.search.batch_size, self.accumulates)
        if iteration < largest:
            return
        if iteration > largest and (is_settled or self.search.batch_size):
            self._begin(*iteration)
        if not is_settled:
            return
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
        """Return whether the highest peak varies between iterations with the same split."""
        peaks = [[*map(_peak, found)] for found in self._iterations.values()]
        return any(max(of_split) > min(of_split) * (1 + VARIES) for of_split in peaks)

    def ran_out(self, batch_size: int, index: int) -> bool:
        """Record that a device ran out of memory; return whether this changes later splits.

        The result is whether later batches of ``batch_size`` samples are split in another way than
        before this call.

        Args:
            batch_size: the number of samples in the batch with which memory ran out.
            index: the index of the device that ran out of memory.
        """
        split = self.split(batch_size)
        if self.search.batch_size != batch_size:
            self._begin(batch_size, False)
        told = self.search.told
        # Forget the splits with which the device may run out again. If device 0 ran out, these are
        # the splits with at least as many samples on device 0 as in ``split``. If another device
        # ran out, these are the splits with at most as many samples on device 0 as in ``split``.
        for tried in [s for s in told if (s <= split if index else s >= split)]:
            del told[tried]
            self._iterations.pop(tried, None)
            self.highest.pop(tried, None)
        told[split] = [math.inf if i == index else 0.0 for i in range(len(split))]
        self.is_over = False
        best, following = self.search.best, self.search.next()
        self._use(best if best is not None or following is None else following[0])
        return self.split(batch_size) != split

    def _begin(self, batch_size: int, accumulates: bool) -> None:
        """Begin a new search for batches of ``batch_size`` samples.

        All measured splits are forgotten, except those of ``batch_size`` samples with which memory
        ran out.
        """
        before, self.accumulates = self.search, accumulates
        self._iterations, self.highest, self.is_over = {}, {}, False
        same = ((s, full) for s, full in before.told.items() if sum(s) == batch_size)
        out = {split: full for split, full in same if max(full) == math.inf}
        self.search = replace(before, batch_size=batch_size, told=out)

    def _use(self, value: int | None) -> None:
        """Set the ``gpu0_bsz`` of the batches that follow to ``value``, unless it is None.

        ``value`` is for batches of ``self.search.batch_size`` samples, the batch size of the
        search. In batches of other sizes, device 0 gets the same share of the batch.
        """
        batch_size = self.search.batch_size
        if value is not None and value != self.split(batch_size)[0]:
            self._share = Fraction(value, batch_size)

    def state_dict(self, batch_size: int) -> dict[str, Any]:
        """Return the state of the search for a checkpoint, as a dict of numbers and lists.

        It contains the ``gpu0_bsz`` for a batch of ``batch_size`` samples, whether this value is
        final, and the budgets of the devices.
        """
        return {
            "batch_size": batch_size,
            "gpu0_bsz": self.split(batch_size)[0],
            "capacities": list(self.search.budgets),
            "is_over": self.is_over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start with the ``gpu0_bsz`` of another search, whose ``state_dict`` is ``state``.

        If the other search had another number of devices, nothing changes. The ``gpu0_bsz`` is
        final if the other search was over and had the same budgets.
        """
        capacities = list(self.search.budgets)
        if len(state["capacities"]) == len(capacities):
            self._share = Fraction(state["gpu0_bsz"], state["batch_size"])
            self.is_over = state["capacities"] == capacities and bool(state.get("is_over"))
