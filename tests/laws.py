"""Made-up laws of how much memory devices need, to test searches without measuring.

By such a law, the peak of a device is the highest of a few linear functions of the numbers of
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from balanced_dp.search import utilizations
from balanced_dp.split import even_share, split_batch

GIB = 2**30


@dataclass(frozen=True)
class Law:
    """The peaks of devices as functions of the chunk sizes.

    Attributes:
        first: the terms of device 0, each with fixed bytes, bytes per sample on device 0, and bytes
            per sample of the whole batch. The peak is the highest term.
        others: the terms of any other device, each with fixed bytes and bytes per sample on the
            device.
    """

    first: tuple[tuple[int, int, int], ...]
    others: tuple[tuple[int, int], ...]

    def peaks(self, sizes: Sequence[int]) -> list[int]:
        batch_size = sum(sizes)
        first = max(fixed + own * sizes[0] + whole * batch_size for fixed, own, whole in self.first)
        others = [max(fixed + own * n for fixed, own in self.others) if n else 0 for n in sizes[1:]]
        return [first, *others]

    def utilization(self, batch_size: int, budgets: Sequence[int], value: int) -> float:
        sizes = split_batch(batch_size, len(budgets), value)
        return max(utilizations(self.peaks(sizes), budgets))


def ask(search: Any, peaks: Any, most: int = 60) -> list[tuple[int, ...]]:
    """Run a search until it is over, and return the splits that it asked for.

    ``peaks`` is a function that returns the peaks of a split.
    """
    asked: list[tuple[int, ...]] = []
    while (split := search.next()) is not None:
        assert split not in asked and len(asked) < most
        asked.append(split)
        search.tell(split, peaks(split))
    return asked


def all_values(law: Law, batch_size: int, budgets: Sequence[int]) -> dict[int, float]:
    even = even_share(batch_size, len(budgets))
    return {value: law.utilization(batch_size, budgets, value) for value in range(even + 1)}


def laws(max_terms: int = 3) -> st.SearchStrategy[Law]:
    fixed, own = st.integers(0, GIB), st.integers(2**14, 2**24)
    whole = st.just(0) | st.integers(0, 2**24)
    first = st.lists(st.tuples(fixed, own, whole), min_size=1, max_size=max_terms)
    others = st.lists(st.tuples(fixed, own), min_size=1, max_size=min(2, max_terms))
    return st.builds(Law, first.map(tuple), others.map(tuple))


alike = st.builds(
    lambda budget, num: [budget] * num, st.integers(GIB // 8, 16 * GIB), st.integers(2, 8)
)
unlike = st.lists(st.integers(GIB // 8, 16 * GIB), min_size=2, max_size=8)
