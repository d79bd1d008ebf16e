"""Searches for the split with which the fullest device is the least full. Pure, without torch.

A search is asked for a split with ``next``, and told with ``tell`` which peaks were measured. It
predicts nothing: a line through two measurements only says what to measure next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from .split import EQUAL, even_share, split_batch, split_by_weights

MAX_SPLITS = 6
"""The most splits that are tried in a training loop, and by weights."""

_MAX_SKIPPED = 100
"""A search in a loop ends after so many iterations that tell nothing."""

_CLOSE = 250
"""The largest batch is found to one part in so many, and small ones exactly."""

_MAX_LINES = 8
"""After so many batches, the search for the largest one halves what is left."""


def utilizations(peaks: Sequence[float], budgets: Sequence[int]) -> list[float]:
    """Return the fraction of its budget that each device holds."""
    return [peak / budget for peak, budget in zip(peaks, budgets, strict=True)]


def _line(points: Mapping[float, float], near: float, axis: int = 0) -> tuple[float, float]:
    """Return the height at zero and the slope of the line through the two points next to ``near``.

    ``near`` is an x, or with ``axis=1`` a y. With one point, the line begins at zero.
    """
    nearest = sorted(points.items(), key=lambda point: abs(point[axis] - near))[:2]
    (x0, y0), (x1, y1) = nearest if len(nearest) > 1 else ((0.0, 0.0), *nearest)
    slope = (y1 - y0) / (x1 - x0)
    return y0 - slope * x0, slope


class Search:
    """A search for the best ``gpu0_bsz`` of a batch.

    With each sample device 0 gets fuller and the others emptier, so the fullest device is the least
    full where they cross. The search ends when it knows neighbours of which only the larger one
    makes device 0 the fullest. Of equally good values the largest is the best, as it is the
    fastest.

    Args:
        batch_size: samples in the whole batch.
        budgets: the bytes that each device may hold.
        smallest: the smallest chunk that a replica trains on.
        is_careful: whether no split is tried with which a device would hold more than its budget,
            by the line through two measurements, or through one and zero.
        for_speed: whether to find the largest value that fits, too.

    Attributes:
        told: by ``gpu0_bsz``, the utilization of device 0 and the highest of the others.
        first: the value to begin with, by default that of the even split.
        slope: by how much a sample more changes the difference of the two; None if not known.
    """

    def __init__(
        self,
        batch_size: int,
        budgets: Sequence[int],
        *,
        smallest: int = 1,
        is_careful: bool = False,
        for_speed: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self.budgets = budgets
        self.smallest = smallest
        self.is_careful = is_careful
        self.for_speed = for_speed
        self.even = even_share(batch_size, len(budgets))
        self.values = (0, *range(max(1, min(smallest, self.even)), self.even + 1))
        self.told: dict[int, tuple[float, float]] = {}
        self.first: float = self.even
        self.slope: float | None = None

    def split(self, value: int) -> tuple[int, ...]:
        """Return the chunk sizes with a value."""
        return split_batch(self.batch_size, len(self.budgets), value)

    def tell(self, split: Sequence[int], peaks: Sequence[float]) -> None:
        """Record the peaks of a split; that of a device that ran out of memory is ``math.inf``."""
        first, *others = utilizations(peaks, self.budgets)
        before = self.told.get(split[0], (0.0, 0.0))
        self.told[split[0]] = max(before[0], first), max([before[1], *others])

    def next(self) -> tuple[int, ...] | None:
        """Return the split to measure next, None if the search is over."""
        return self.toward_crossing() or self._larger()

    def toward_crossing(self) -> tuple[int, ...] | None:
        """Return the split to measure next, None if the neighbours of the crossing are known."""
        return self._between(*self._ends(self.told), self.crossing()[0])

    @property
    def best(self) -> int | None:
        """The best of the values that ran, None if none did.

        It is next to where device 0 and the others cross, which each measurement shows by itself:
        those of a loop may differ in more than the split.
        """
        ran = self._ran()
        if not ran:
            return None
        level = min(max(ran[v]) for v in self._ends(ran) if v in ran)
        return max(v for v, full in ran.items() if abs(max(full) - level) <= EQUAL * level)

    def _ends(self, full: Mapping[int, tuple[float, float]]) -> tuple[int, int]:
        """Return neighbours among the known values, of which only the larger fills device 0 most.

        -1 and the even value plus 1 stand for the ones that are not known.
        """
        # In the even split the last device gets what is left, so of devices with unlike budgets
        # the others may be less full with a sample less on device 0.
        is_end = len(set(self.budgets)) == 1
        enough = (v for v, (a, b) in full.items() if a <= b and (v < self.even or is_end))
        low = max(enough, default=-1)
        return low, min((value for value in full if value > low), default=self.even + 1)

    def crossing(self) -> tuple[float | None, float | None]:
        """Return where all devices would be equally full, and ``slope``, as far as known."""
        if not self.told:
            return self.first, self.slope
        ran = self._ran()
        over = {float(v): full[0] - full[1] for v, full in ran.items() if v}  # 0 has no gradients
        if len(over) > 1:
            height, slope = _line(over, 0.0, axis=1)
            return (-height / slope, slope) if slope > 0 else (None, None)
        if not ran:
            return None, None
        value, (first, others) = max(ran.items())
        slope = self.slope or 0.0
        if not slope:  # no device takes more for a sample than if it held nothing but samples
            per_sample = others / max(1, *self.split(value)[1:])
            own = min(per_sample, first / value) if value else per_sample
            slope = own + per_sample / (len(self.budgets) - 1)
        return (value - (first - others) / slope if slope else None), self.slope

    def level(self) -> float:
        """Return the lowest utilization of the fullest device, as far as known, else infinity."""
        ran = self._ran()
        level = min(map(max, ran.values()), default=math.inf)
        root, slope = self.crossing()
        if ran and root is not None and slope is not None:
            value, (first, others) = max(ran.items())
            added = min(self.even, max(0.0, root)) - value
            own = slope * (1 - 1 / len(self.budgets))  # a sample takes as much on each device
            level = min(level, max(first + own * added, others - (slope - own) * added))
        return level

    def _larger(self) -> tuple[int, ...] | None:
        """Return the split with a larger value that may be as good as the best, or may fit."""
        best = self.best
        if best is None:
            return None
        level = max(self.told[best]) * (1 + EQUAL)
        below = max((value for value in self.told if value < best), default=best)
        found = None
        if self.told[best][0] <= self.told[below][0] * (1 + EQUAL):  # else each sample adds to it
            found = self._below(level, best)
        fitting = [value for value, full in self.told.items() if max(full) <= 1]
        if found is None and self.for_speed and fitting:
            found = self._below(1.0, max(fitting))
        return found

    def _below(self, level: float, low: int) -> tuple[int, ...] | None:
        """Return the split with a value above ``low`` with which device 0 may be below a level."""
        high = min((value for value in self.told if value > low), default=self.even + 1)
        over = {float(v): full[0] - level for v, full in self.told.items() if v >= max(1, low)}
        height, slope = _line(over, 0.0, axis=1) if len(over) > 1 else (0.0, 0.0)
        return self._between(low, high, -height / slope if 0 < slope < math.inf else low + 1)

    def _between(self, low: int, high: int, guess: float | None) -> tuple[int, ...] | None:
        """Return the split with a value between two others, near the guess or in the middle."""
        allowed = [value for value in self.values if low < value < high]
        if not allowed:
            return None
        guess = (max(0, low) + high) / 2 if guess is None else guess
        value: int = max((v for v in allowed if v <= guess), default=allowed[0])
        allowed.sort(key=lambda v: (abs(v - value), -v))
        may_try = (v for v in allowed if not self.is_careful or self._is_safe(v))
        return next(map(self.split, may_try), None)

    def _is_safe(self, value: int) -> bool:
        """Return whether no device would be more than full, by lines through measurements."""
        ran, chunk = self._ran(), max(self.split(value)[1:])
        firsts = {float(v): first for v, (first, _) in ran.items() if v}
        others = {float(max(self.split(v)[1:])): full for v, (_, full) in ran.items()}
        others.pop(0.0, None)
        if not others:
            return not ran
        height, slope = _line(others, chunk)
        if height + slope * chunk > 1:
            return False
        if len(firsts) > 1:
            height, slope = _line(firsts, value)
        else:  # a sample takes no more than on another device
            known = max(ran)
            slope = max(full / size for size, full in others.items())
            height = ran[known][0] - slope * known
        return height + slope * value <= 1

    def _ran(self) -> dict[int, tuple[float, float]]:
        return {value: full for value, full in self.told.items() if max(full) < math.inf}


class LargestBatch:
    """A search for the largest batch that fits, with the even split or the best ``gpu0_bsz``.

    Args:
        start: the search for a batch, which is over.
        limit: the largest batch that can be measured.
        after: a search with the even split that is over; None to search with the even split.
    """

    def __init__(self, start: Search, limit: int, after: LargestBatch | None = None) -> None:
        self.start = start
        self.limit = limit
        self.is_even = after is None
        self.searches = {start.batch_size: start}
        self._known = [] if after is None else [*after.searches.values()]
        if after is not None:
            self.searches |= {n: s for n, s in after.searches.items() if after._fits(s)}
        for search in self.searches.values():
            search.slope = start.crossing()[1]

    def tell(self, split: Sequence[int], peaks: Sequence[float]) -> None:
        """Record the peaks of a split."""
        self.searches[sum(split)].tell(split, peaks)

    @property
    def best(self) -> int:
        """The samples of the largest batch that fits, 0 if none does."""
        return max((n for n, search in self.searches.items() if self._fits(search)), default=0)

    def next(self) -> tuple[int, ...] | None:
        """Return the split to measure next, None if the search is over."""
        for search in self.searches.values():
            if self._fits(search) is None:
                return search.toward_crossing()
        low = self.best
        high = min((size for size in self.searches if size > low), default=None)
        if low >= self.limit or (high is not None and high - low <= max(1, low // _CLOSE)):
            return None
        size = min(self._guess(low, high), self.limit)
        self.searches[size] = self._search(size)
        return self.searches[size].toward_crossing()

    def _full(self, search: Search) -> list[tuple[float, float]]:
        told = search.told.items()
        return [full for value, full in told if not self.is_even or value == search.even]

    def _fits(self, search: Search) -> bool | None:
        """Return whether a batch fits with some value, None if that is not known yet."""
        full = self._full(search)
        if any(max(pair) <= 1 for pair in full):
            return True
        if (full and self.is_even) or not self._may_fit(search):
            return False
        return False if search.toward_crossing() is None else None

    def _may_fit(self, search: Search) -> bool:
        """Return whether a value is left with which no device is known to hold too much.

        With as many samples, device 0 holds no less in a larger batch, and another device as much.
        """
        if len(set(search.budgets)) > 1:
            return True
        size, most, chunk = search.batch_size, math.inf, math.inf
        for other in (*self.searches.values(), *self._known):
            for value, (first, others) in other.told.items():
                most = min(most, value) if first > 1 and other.batch_size <= size else most
                chunk = min(chunk, max(other.split(value)[1:])) if others > 1 else chunk
        left = [value for value in search.values if value < most]
        return bool(left) and max(search.split(left[-1])[1:]) < chunk

    def _level(self, search: Search) -> float:
        if self.is_even:
            return min(map(max, self._full(search)), default=math.inf)
        return search.level()

    def _guess(self, low: int, high: int | None) -> int:
        """Return a batch larger than ``low``, and smaller than ``high``."""
        found = {float(size): self._level(search) for size, search in self.searches.items()}
        levels = {size: level for size, level in found.items() if level < math.inf}
        if not levels:
            return (low + (high or self.limit)) // 2 or 1
        ends = {n: levels[n] for n in (high or min(levels), low) if n in levels}
        height, slope = _line(ends or levels, 1.0, axis=1)
        guess = math.floor((1 - height) / slope) if slope > 0 else 2 * low
        if high is not None and (guess >= high or len(self.searches) > _MAX_LINES):
            guess = (low + high) // 2
        # Better a batch of which all devices, or all but the first, get as many samples.
        num, first = len(self.start.budgets), 0
        if not self.is_even:
            num, first = num - 1, max(0, math.floor(self._crossing(guess) or 0))
        whole = guess - max(0, guess - first) % num
        if whole > low:
            guess = whole
        elif high is not None and high - low <= num:
            guess = low + 1  # some chunks are those of the larger batch
        return max(guess, low + max(1, low // _CLOSE))

    def _search(self, batch_size: int) -> Search:
        search = Search(batch_size, self.start.budgets, smallest=self.start.smallest)
        crossing = None if self.is_even else self._crossing(batch_size)
        if crossing is not None:
            search.first, search.slope = crossing, self.start.crossing()[1]
        return search

    def _crossing(self, batch_size: int) -> float | None:
        """Return where the devices of a batch will be equally full, by a line through others."""
        crossings = {float(n): s.crossing()[0] for n, s in self.searches.items()}
        known = {size: value for size, value in crossings.items() if value is not None}
        if not known:
            return None
        height, slope = _line(known, batch_size)
        return height + slope * batch_size


class WeightSearch:
    """A search for the chunk sizes with which all devices are equally full.

    Args:
        budgets: the bytes that each device may hold.
        batch_size: samples in the whole batch; None means as many as fit.
        smallest: the smallest chunk that a replica trains on.
        limit: the largest batch that can be measured.
    """

    def __init__(
        self, budgets: Sequence[int], batch_size: int | None, smallest: int, limit: int
    ) -> None:
        self.budgets = budgets
        self.batch_size = batch_size
        self.smallest = smallest
        self.limit = limit
        self._told: dict[tuple[int, ...], list[float]] = {}
        self._num_asked = 0

    def tell(self, split: Sequence[int], peaks: Sequence[float]) -> None:
        """Record the peaks of any split."""
        self._told[tuple(split)] = utilizations(peaks, self.budgets)

    def next(self) -> tuple[int, ...] | None:
        """Return the split to measure next, None if the search is over."""
        lines = [self._line(index) for index in range(len(self.budgets))]
        if self._num_asked == MAX_SPLITS or not all(lines):
            return None

        def chunks(level: float) -> list[float]:
            return [max(0.0, (level - height) / slope) for height, slope in filter(None, lines)]

        if self.batch_size is None:
            split = tuple(map(math.floor, chunks(1.0)))
        else:
            low, high = (
                0.0,
                max(full for at in self._told.values() for full in at if full < math.inf),
            )
            for _ in range(50):
                middle = (low + high) / 2
                is_enough = sum(chunks(middle)) >= self.batch_size
                low, high = (low, middle) if is_enough else (middle, high)
            split = split_by_weights(self.batch_size, chunks(high))
        too_small = any(0 < size < self.smallest for size in split)
        if split in self._told or too_small or not 0 < sum(split) <= self.limit:
            return None
        self._num_asked += 1
        return split

    def _line(self, index: int) -> tuple[float, float] | None:
        """Return the line through the last two measurements of a device, None if there is none."""
        ran = {split: full for split, full in self._told.items() if max(full) < math.inf}
        full = {float(split[index]): at[index] for split, at in ran.items() if split[index]}
        points = dict([*full.items()][-2:])
        height, slope = _line(points, 0.0) if points else (0.0, 0.0)
        return (height, slope) if slope > 0 else None


class LoopSearch:
    """A search that follows the iterations of a training loop, whatever their batches.

    The largest iteration decides, as it fills the devices the most. Batches of another size get the
    same share on device 0.

    Args:
        budgets: the bytes that each device may hold.
        is_careful: as for ``Search``. Then the first iteration after each change does not count,
            since kernels are tuned in it.
        for_speed: as for ``Search``.

    Attributes:
        smallest: the smallest chunk that a replica trains on.
        is_over: whether the value is final, unless memory runs out.
        search: the search for the largest batch; None before the first iteration.
        share: what device 0 gets of a batch, as a fraction.
    """

    def __init__(
        self, budgets: Sequence[int], *, is_careful: bool, for_speed: bool = False
    ) -> None:
        self.budgets = budgets
        self.is_careful = is_careful
        self.for_speed = for_speed
        self.smallest = 1
        self.is_over = False
        self.search: Search | None = None
        self.share = Fraction(1)
        self._largest = (0, False)
        self._is_settling = is_careful
        self._num_skipped = 0
        # Batch size and value, and whether device 0 ran out of memory with them.
        self._ran_out: dict[tuple[int, int], bool] = {}

    def value(self, batch_size: int) -> int:
        """Return the value for a batch."""
        even = even_share(batch_size, len(self.budgets))
        value = math.ceil(self.share * batch_size)
        value = min(even, max(value, self.smallest)) if value else 0
        for (size, tried), is_first in self._ran_out.items():
            if size <= batch_size:
                value = min(value, tried - 1) if is_first else max(value, tried + 1)
        return min(even, value) if value >= min(even, self.smallest) else 0

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk sizes of a batch."""
        return split_batch(batch_size, len(self.budgets), self.value(batch_size))

    def tell(self, split: Sequence[int], peaks: Sequence[float], accumulates: bool = False) -> None:
        """Record an iteration.

        Args:
            split: the chunk sizes of its largest batch.
            peaks: the peak of each device; empty if they were not read.
            accumulates: whether this batch has added to gradients that were there.
        """
        was_settling, self._is_settling = self._is_settling, False
        size = (sum(split), accumulates)
        if self.is_over and accumulates and size > self._largest and not self._largest[1]:
            self.is_over = False  # iterations were compared that take less
        if self.is_over or was_settling or not peaks:
            return
        if size < self._largest:
            self._num_skipped += 1
            self.is_over = self._num_skipped >= _MAX_SKIPPED
            return
        if size > self._largest or self.search is None:
            self._largest, self.search = size, self._new_search(sum(split))
        self.search.tell(split, peaks)
        following = self.search.next() if len(self.search.told) < MAX_SPLITS else None
        self.is_over = following is None
        self._use(self.search.best if following is None else following[0])

    def ran_out(self, batch_size: int, index: int) -> bool:
        """Record that a device ran out of memory with a batch; return whether the split differs."""
        value = self.value(batch_size)
        self._ran_out[batch_size, value] = index == 0
        self._is_settling = self.is_careful
        search = self.search
        if search is None or search.batch_size != batch_size:
            search = self._new_search(batch_size)
        for tried in (value, *search.told):
            if tried >= value if index == 0 else tried <= value:
                search.tell(*self._failed(search, tried, index == 0))
        best = search.best
        following = search.next() if best is None else None
        self.search = search
        self._use(best if following is None else following[0])
        return self.value(batch_size) != value

    def _use(self, value: int | None) -> None:
        """Use another value from the next batch on."""
        assert self.search is not None
        size = self.search.batch_size
        if value is not None and value != self.value(size):
            self.share = Fraction(value, size)
            self._is_settling = self.is_careful

    def _new_search(self, batch_size: int) -> Search:
        search = Search(
            batch_size,
            self.budgets,
            smallest=self.smallest,
            is_careful=self.is_careful,
            for_speed=self.for_speed,
        )
        for (size, value), is_first in self._ran_out.items():
            if size <= batch_size and value <= search.even:
                search.tell(*self._failed(search, value, is_first))
        return search

    def _failed(
        self, search: Search, value: int, is_first: bool
    ) -> tuple[tuple[int, ...], list[float]]:
        peaks = [0.0] * len(self.budgets)
        peaks[0 if is_first else 1] = math.inf
        return search.split(value), peaks

    def state_dict(self, batch_size: int) -> dict[str, Any]:
        """Return the value for a batch, and what ran out of memory, as numbers and lists."""
        return {
            "batch_size": batch_size,
            "gpu0_bsz": self.value(batch_size),
            "capacities": list(self.budgets),
            "too_large": [list(tried) for tried, is_first in self._ran_out.items() if is_first],
            "too_small": [list(tried) for tried, is_first in self._ran_out.items() if not is_first],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start with the value of another search.

        With another number of devices, device 0 starts with the same fraction of the even share, or
        with all of it if it was idle. What ran out of memory is only taken over from devices of the
        same capacities.
        """
        num_before = len(state["capacities"])
        share = Fraction(state["gpu0_bsz"] * num_before, state["batch_size"] * len(self.budgets))
        self.share = share if share or num_before == len(self.budgets) else Fraction(1)
        if state["capacities"] == list(self.budgets):
            for key, is_first in (("too_large", True), ("too_small", False)):
                self._ran_out.update(dict.fromkeys(map(tuple, state[key]), is_first))
