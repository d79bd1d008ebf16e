"""Search for the best split, the largest batches and the device weights of a workload.

A workload is a model with its batches, its loss and its optimizer. A split is the chunk size (the
number of samples) of each device. This file does not need torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..search import Search, Split
from ..split import split_batch, split_by_weights

_CLOSE = 400
"""The result of a search may be too small, by at most ``1 / _CLOSE`` of the result.

The result is the size of the largest chunk, or of the largest batch, that fits. The last step of
``WorkloadSearch`` fills the largest chunks that the step before it has found. So the errors of both
steps add up, to at most 0.5 %.
"""


@dataclass
class WorkloadSearch(Search):
    """A search for the best ``gpu0_bsz`` of a batch, and then for the largest batches that fit.

    Attributes:
        for_speed: whether to find a second ``gpu0_bsz`` besides the one with which the fullest
            device is the least full. The second is the largest ``gpu0_bsz`` with which device 0
            holds at most its budget (the bytes that the device may hold).
        largest: the upper limit of the batch size in the search for the largest batch.
    """

    for_speed: bool = True
    largest: int = 2**16

    def _wanted(self) -> Iterator[Split]:
        """Yield the split to measure next, or nothing if the search is over.

        There are three searches. The first finds the best ``gpu0_bsz`` for ``batch_size`` samples.
        The second finds the largest batch that fits with the even split. The third finds the
        largest batch that fits with any ``gpu0_bsz``, in two steps. The first step gives device 0
        no samples, and finds the largest chunk that fits on each of the other devices. In the
        second step, the samples of a batch first fill these chunks, and only the remaining samples
        go to device 0. The second step finds the largest batch with which device 0 holds at most
        its budget.
        """
        yield from super()._wanted()
        num, told = len(self.budgets), self.told.items()
        even = {sum(s): max(f) - 1 for s, f in told if s == split_batch(sum(s), num, sum(s))}
        sizes = range(1, self.largest + 1)
        yield from self.find(even, sizes, lambda n: split_batch(n, num, n), close=_CLOSE)
        chunk = yield from self.find(
            dict(sorted((s[1], max(full[1:]) - 1) for s, full in told if s[1])),
            range(1, self.largest // (num - 1) + 1),
            lambda n: (0, *[n] * (num - 1)),
            close=_CLOSE,
            bends_up=True,
        )
        rest = chunk * (num - 1)
        sizes = range(1, min(rest + chunk, self.largest) + 1)

        def fill(batch_size: int) -> Split:
            return split_batch(batch_size, num, max(0, batch_size - rest))

        over = {sum(s): f[0] - 1 for s, f in told if sum(s) in sizes and s == fill(sum(s))}
        yield from self.find(over, sizes, fill, close=_CLOSE, bends_up=True, start=rest)


def fill_alike(told: Mapping[Split, Sequence[float]], batch_size: int | None) -> Split | None:
    """Return the chunk sizes with which all devices are estimated to be equally full.

    The estimate assumes that the utilization of a device (its peak divided by its budget) is a
    linear function of its chunk size. Chunk sizes are taken in the order in which they were first
    measured: if the device had chunks of 8, 4, 8 and 6 samples, the order is 8, 4, 6. The line goes
    through the measurements of the last two, here 4 and 6. A chunk size of 0 is not used. If there
    is only one chunk size above 0, the line goes through the origin and the measurement of this
    chunk size. Measurements in which any device ran out of memory are not used.

    Args:
        told: a dict from the chunk sizes of each measurement to the utilization of each device. The
            items are in the order of measurement.
        batch_size: the number of samples in the whole batch; None means as many as fit.

    Returns:
        The chunk sizes; None if there is a device for which the measurements do not show how much
        memory a sample needs.
    """
    lines = []
    ran = [(split, full) for split, full in told.items() if max(full) < math.inf]
    for index in range(len(next(iter(told)))):
        points = {split[index]: full[index] for split, full in ran if split[index]}
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
