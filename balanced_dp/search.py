"""Searches for the split with which the fullest device is the least full. Pure, without torch.

They predict nothing. With each sample that a device gets it holds more, so all of them ask for the
largest whole number with which something is still below a limit: ``next_number`` brackets it, and a
line through two measurements only says what to measure next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from .split import EQUAL, even_share, split_batch, split_by_weights

MAX_SPLITS = 6
"""The most splits that are tried in a training loop, and by weights."""

_CLOSE = 500
"""The largest batch is found to one part in so many, and small ones exactly."""

_MAX_LINES = 8
"""After so many measurements by lines, a search halves what is left."""

Full = tuple[float, float]
"""How full device 0 is, and the fullest of the others; 1 is all of its budget."""


def utilizations(peaks: Sequence[float], budgets: Sequence[int]) -> list[float]:
    """Return the fraction of its budget that each device holds."""
    return [peak / budget for peak, budget in zip(peaks, budgets, strict=True)]


def fullness(peaks: Sequence[float], budgets: Sequence[int]) -> Full:
    """Return how full device 0 is, and the fullest of the others."""
    first, *others = utilizations(peaks, budgets)
    return first, max(others)


def next_number(
    over: Mapping[int, float],
    numbers: Sequence[int],
    slope: float,
    close: float = math.inf,
    *,
    num_lines: int = _MAX_LINES,
    bends_up: bool = False,
) -> int | None:
    """Return which number to measure next to find the largest one that is not over a limit.

    Args:
        over: by number, by how much the limit was exceeded, which grows with the number. Not above
            0 is within the limit; infinity if it is not known by how much.
        numbers: all numbers that can be measured, in ascending order.
        slope: by how much a number adds, as long as two measurements do not show it.
        close: the number may be too small by one part in so many.
        num_lines: after so many measurements, what is left is halved.
        bends_up: whether what is over grows faster and faster. Then it is above the line through
            two measurements, and a number above where the line ends is not measured.

    Returns:
        A number; None if the search is over.
    """
    low = max((number for number, y in over.items() if y <= 0), default=-1)
    high = min((number for number in over if number > low), default=math.inf)
    left = [number for number in numbers if low + max(0.0, low // close) < number < high]
    if not left:
        return None
    known = {number: y for number, y in over.items() if abs(y) < math.inf}
    nearest = dict(sorted(known.items(), key=lambda point: abs(point[1]))[:2])
    guess = _root(nearest, slope)
    if bends_up and len(nearest) > 1 and max(nearest) == low and guess < left[0]:
        return None
    if guess >= high:
        guess = _root({number: y for number, y in known.items() if number in (low, high)}, 0.0)
    if high < math.inf and (guess >= high or len(over) > num_lines):
        return left[len(left) // 2]
    if guess == math.inf:
        guess = 2.0 * max(low, 1) if known else numbers[len(numbers) // 2]
    return max((number for number in left if number <= guess), default=left[0])


def _root(points: Mapping[int, float], slope: float) -> float:
    """Return where the line through two points is 0, or through one with a slope; else infinity."""
    if len(points) > 1:
        (x0, y0), (x1, y1) = points.items()
        slope = (y1 - y0) / (x1 - x0)
    x, y = next(iter(points.items()), (0, 0.0))
    return x - y / slope if slope > 0 else math.inf


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
        is_careful: whether no split is tried with which a device would hold more than its budget if
            what it has held grew in proportion to its samples, which is more than it can grow.
        for_speed: whether to find the largest value that fits, too.

    Attributes:
        told: by ``gpu0_bsz``, how full the devices were.
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
        self.told: dict[int, Full] = {}
        # In the even split the last device gets what is left, so of devices with unlike budgets the
        # others may be less full with a sample less on device 0.
        self._last = self.even - (len(set(budgets)) > 1)

    def split(self, value: int) -> tuple[int, ...]:
        """Return the chunk sizes with a value."""
        return split_batch(self.batch_size, len(self.budgets), value)

    def tell(self, split: Sequence[int], peaks: Sequence[float]) -> None:
        """Record the peaks of a split; that of a device that ran out of memory is ``math.inf``."""
        first, others = fullness(peaks, self.budgets)
        known = self.told.get(split[0], (0.0, 0.0))
        self.told[split[0]] = max(known[0], first), max(known[1], others)

    def next(self) -> tuple[int, ...] | None:
        """Return the split to measure next, None if the search is over."""
        value = self.even
        if self.told:
            values = [v for v in self.values if not self.is_careful or self._is_safe(v)]
            found = self._toward_crossing(values)
            found = self._larger(values) if found is None else found
            if found is None:
                return None
            value = found
        return self.split(value)

    @property
    def best(self) -> int | None:
        """The best of the values that ran, None if none did.

        It is next to where device 0 and the others cross, which each measurement shows by itself:
        those of a loop may differ in more than the split.
        """
        ran = self._ran()
        if not ran:
            return None
        low = max((v for v, (a, b) in ran.items() if a <= b and v <= self._last), default=-1)
        ends = {low, min((value for value in ran if value > low), default=low)}
        level = min(max(ran[value]) for value in ends if value in ran)
        return max(v for v, full in ran.items() if abs(max(full) - level) <= EQUAL * level)

    def _toward_crossing(self, values: Sequence[int]) -> int | None:
        over = {v: a - b for v, (a, b) in self.told.items()}
        if self._last < self.even:
            over[self.even] = max(over.get(self.even, 0.0), EQUAL)
        value, (_, others) = max(self._ran().items(), default=(0, (0.0, 0.0)))
        # No device takes more for a sample than if it held nothing but samples.
        a_sample = others / max(1, *self.split(value)[1:])
        slope = a_sample * (1 + 1 / (len(self.budgets) - 1))
        return next_number(over, values, slope)

    def _larger(self, values: Sequence[int]) -> int | None:
        """Return a larger value that may be as good as the best, or may fit."""
        best = self.best
        if best is None:
            return None
        first, level = self.told[best][0], max(self.told[best])
        below = max((value for value in self.told if value < best), default=best)
        limits = {}
        if first <= self.told[below][0] * (1 + EQUAL):  # else each sample adds to it
            limits[best] = level * (1 + EQUAL)
        fitting = [value for value, full in self.told.items() if max(full) <= 1]
        if self.for_speed and fitting:
            limits[max(fitting)] = 1.0
        for low, limit in limits.items():
            over = {v: full[0] - limit for v, full in self.told.items() if v >= low}
            if (found := next_number(over, values, 0.0)) is not None:
                return found
        return None

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

    With the even split, that is the largest chunk that fits on all devices, and a few samples more
    that leave something of it to the last device. With any value, it is the largest chunk that fits
    on the others, and what then fits on device 0, which may gather no more than it has room for.

    Args:
        measure: returns how full the devices are with a split.
        search: the search for a batch, which is over.
        limit: the largest batch that can be measured.
    """
    num, smallest = len(search.budgets), search.smallest
    told = {search.split(value): full for value, full in search.told.items()}

    def full(split: tuple[int, ...]) -> Full:
        if split not in told:
            told[split] = measure(split)
        first, others = told[split]
        return first, max(others, first if first == math.inf else 0.0)  # they had not held all yet

    def over(split: tuple[int, ...]) -> float:
        return max(full(split)) - 1

    def over_on_first(split: tuple[int, ...]) -> float:
        return full(split)[0] - 1

    def over_on_others(chunk: int) -> float:
        return full((0, *[chunk] * (num - 1)))[1] - 1

    def along(
        split_of: Callable[[int], tuple[int, ...]],
        over: Callable[[tuple[int, ...]], float],
        first: int,
        last: int,
        bends_up: bool,
    ) -> None:
        sizes: Sequence[int] = range(max(1, first), min(last, limit) + 1)
        if smallest > 1:
            sizes = [size for size in sizes if smallest <= min(filter(None, split_of(size)))]
        known = [size for size in map(sum, told) if size in sizes and split_of(size) in told]
        points = {size: over(split_of(size)) for size in known}
        _largest(lambda size: over(split_of(size)), sizes, points, bends_up)

    def even(size: int) -> tuple[int, ...]:
        return split_batch(size, num, size)

    def others_first(size: int) -> tuple[int, ...]:
        return split_batch(size, num, max(0, size - chunk * (num - 1)))

    points = {search.even: over(search.split(search.even))}
    chunks = range(smallest, limit // num + 1)
    share = _largest(lambda chunk: over((chunk,) * num), chunks, points, bends_up=True)
    if share * num < limit and smallest == 1:
        over(even(share * num + 1))  # most devices have a larger chunk already
    along(even, over, (share - 1) * num + 1, (share + 1) * num - 1, bends_up=False)

    is_alike = len(set(search.budgets)) == 1
    equal = (split for split in told if split[1] and (is_alike or len(set(split[1:])) == 1))
    points = {split[1]: full(split)[1] - 1 for split in equal}
    points = points or {search.even: over_on_others(search.even)}
    chunks = range(smallest, limit // (num - 1) + 1)
    chunk = _largest(over_on_others, chunks, points, bends_up=True)
    along(others_first, over_on_first, 1, chunk * num, bends_up=True)


def _largest(
    measure: Callable[[int], float],
    numbers: Sequence[int],
    over: dict[int, float],
    bends_up: bool,
) -> int:
    """Measure what a search asks for, and return the largest number within the limit, or 0."""
    num_lines = len(over) + _MAX_LINES
    while True:
        slope = max(((y + 1) / number for number, y in over.items() if y < math.inf), default=0.0)
        number = next_number(over, numbers, slope, _CLOSE, num_lines=num_lines, bends_up=bends_up)
        if number is None:
            return max((number for number, y in over.items() if y <= 0), default=0)
        over[number] = measure(number)


def fill_alike(
    told: Mapping[tuple[int, ...], Sequence[float]], batch_size: int | None
) -> tuple[int, ...] | None:
    """Return chunk sizes with which all devices are equally full, by what was measured.

    Args:
        told: by chunk sizes that ran, how full each device was; the latest ones come last.
        batch_size: the samples in the whole batch; None means as many as fit.

    Returns:
        The chunk sizes; None if it is not known how much more a device holds with a sample more.
    """
    lines = []
    for index in range(len(next(iter(told)))):
        points = {split[index]: full[index] for split, full in told.items() if split[index]}
        (x0, y0), (x1, y1) = [(0, 0.0), *points.items()][-2:] if points else [(0, 0.0)] * 2
        if x0 == x1 or (y1 - y0) / (x1 - x0) <= 0:
            return None
        slope = (y1 - y0) / (x1 - x0)
        lines.append((y0 - slope * x0, slope))

    def chunks(level: float) -> list[float]:
        return [max(0.0, (level - height) / slope) for height, slope in lines]

    if batch_size is None:
        return tuple(map(math.floor, chunks(1.0)))
    low, high = 0.0, max(map(max, told.values()))
    for _ in range(50):
        middle = (low + high) / 2
        is_enough = sum(chunks(middle)) >= batch_size
        low, high = (low, middle) if is_enough else (middle, high)
    return split_by_weights(batch_size, chunks(high))


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
        self._share = Fraction(1)
        self._largest = (0, False)
        self._is_settling = is_careful

    def value(self, batch_size: int) -> int:
        """Return the value for a batch."""
        even, value = even_share(batch_size, len(self.budgets)), math.ceil(self._share * batch_size)
        return min(even, max(value, self.smallest)) if value else 0

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk sizes of a batch."""
        return split_batch(batch_size, len(self.budgets), self.value(batch_size))

    def tell(self, split: Sequence[int], peaks: Sequence[float], accumulates: bool = False) -> None:
        """Record an iteration.

        Args:
            split: the chunk sizes of its largest batch.
            peaks: the peak of each device.
            accumulates: whether this batch has added to gradients that were there.
        """
        was_settling, self._is_settling = self._is_settling, False
        iteration = (sum(split), accumulates)
        if self.is_over or was_settling or iteration < self._largest:
            return
        if iteration > self._largest or self.search is None:
            self._largest, self.search = iteration, self._new_search(sum(split))
        self.search.tell(split, peaks)
        following = self.search.next() if len(self.search.told) < MAX_SPLITS else None
        self.is_over = following is None
        self._use(self.search, following)

    def ran_out(self, batch_size: int, index: int) -> bool:
        """Record that a device ran out of memory with a batch; return whether the split differs."""
        value, search = self.value(batch_size), self.search
        if search is None or search.batch_size != batch_size:
            self._largest = (batch_size, False)
            search = self.search = self._new_search(batch_size)
        is_first = index == 0
        for tried in [v for v in search.told if (v >= value if is_first else v <= value)]:
            del search.told[tried]  # the devices held less than they can
        search.told[value] = (math.inf, 0.0) if is_first else (0.0, math.inf)
        self.is_over = False
        self._use(search, search.next() if search.best is None else None)
        return self.value(batch_size) != value

    def _use(self, search: Search, split: Sequence[int] | None) -> None:
        """Use a split, or the best one, from the next batch on."""
        value = search.best if split is None else split[0]
        if value is not None and value != self.value(search.batch_size):
            self._share = Fraction(value, search.batch_size)
            self._is_settling = self.is_careful

    def _new_search(self, batch_size: int) -> Search:
        search = Search(
            batch_size,
            self.budgets,
            smallest=self.smallest,
            is_careful=self.is_careful,
            for_speed=self.for_speed,
        )
        if self.search is not None and self.search.batch_size == batch_size:
            ran_out = {v: full for v, full in self.search.told.items() if max(full) == math.inf}
            search.told.update(ran_out)
        return search

    def state_dict(self, batch_size: int) -> dict[str, Any]:
        """Return the value for a batch, and whether it is final, as numbers and lists."""
        return {
            "batch_size": batch_size,
            "gpu0_bsz": self.value(batch_size),
            "capacities": list(self.budgets),
            "is_over": self.is_over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start with the value of another search of as many devices.

        It is final if the search was over, and the devices have the same capacities.
        """
        if len(state["capacities"]) == len(self.budgets):
            self._share = Fraction(state["gpu0_bsz"], state["batch_size"])
            is_same = state["capacities"] == list(self.budgets)
            self.is_over = is_same and bool(state.get("is_over"))
