"""Choose how the batches of a training loop are split while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..planning.auto_balance import AutoBalance
from ..split import even_share
from .measurement import Measurement


class SplitSearch:
    """Chooses the chunk size of the first device for each iteration of a training loop.

    Args:
        gpu0_bsz: ``"auto"`` to search for the best value; None for the even split; or a value.
        budgets: the bytes of each device that may be used.
        is_free: whether any split may be tried, as on emulated devices. Then the even split and
            half of it come before a given value, since a plan takes three splits.

    Attributes:
        smallest: the smallest chunk of the first device that is not empty.
    """

    def __init__(
        self, gpu0_bsz: int | Literal["auto"] | None, budgets: Sequence[int], is_free: bool
    ) -> None:
        self.smallest = 1
        self._budgets = budgets
        self._value = None if gpu0_bsz == "auto" else gpu0_bsz
        self._auto = AutoBalance(budgets, may_exceed=is_free) if gpu0_bsz == "auto" else None
        self._is_free = is_free
        self._is_settling = False
        self._num_iterations = 0
        self._tried: dict[int, set[int]] = {}

    @property
    def is_over(self) -> bool:
        """Whether the value stays as it is."""
        return self._auto is None or self._auto.is_frozen

    def gpu0_bsz(self, batch_size: int) -> int:
        """Return the chunk size of the first device for a batch."""
        even = even_share(batch_size, len(self._budgets))
        if self._auto is not None:
            value = self._auto.gpu0_bsz(batch_size)
            is_only_one = value == even and self._tried.get(batch_size) == {even}
            return self._half(even) if is_only_one and self._is_free else value
        if self._value is None or (self._is_free and self._num_iterations < 2):
            return even
        is_second = self._is_free and self._num_iterations == 2
        return self._half(even) if is_second else min(even, self._value)

    def _half(self, even: int) -> int:
        """Return half the even chunk: it tells the samples of a chunk from those of the batch."""
        return even // 2 if even // 2 >= self.smallest else 0

    def observe(
        self, measured: Measurement, empty_bytes: Sequence[int], replica_bytes: int
    ) -> None:
        """Record an iteration; the first one, without optimizer state, is not learned from.

        Args:
            measured: what was measured.
            empty_bytes: what device 0 would hold with an empty batch, in each phase.
            replica_bytes: the least that another device holds of the model.
        """
        self._num_iterations += 1
        if self._num_iterations < 2 or not measured.batch_size:
            return
        value = measured.chunk_sizes[0]
        self._tried.setdefault(measured.batch_size, set()).add(value)
        was_settling, self._is_settling = self._is_settling, False
        if self._auto is None or was_settling:  # kernels are tuned in the first after a change
            return
        if value != self._auto.gpu0_bsz(measured.batch_size):  # not of its choice
            return
        before = self._auto.num_changes
        first_peaks = [peaks[0] for peaks in measured.phase_peak_bytes]
        empty = empty_bytes[first_peaks.index(max(first_peaks))]
        self._auto.smallest = self.smallest
        self._auto.observe(measured.batch_size, measured.peak_bytes, empty, replica_bytes)
        self._is_settling = self._auto.num_changes > before and not self._is_free
