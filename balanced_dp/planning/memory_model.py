"""Fit linear terms of memory to a handful of measured peaks. Pure arithmetic.

What a device holds at one moment of a step grows linearly with the samples of its own chunk and, on
the first device, with those of the whole batch. A peak is the highest of several moments, so it is
the maximum of a few such terms.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

from ..errors import ArgumentError

LARGEST_RESIDUAL = 0.05
"""The residual above which a model does not describe the workload."""

_GOOD_RESIDUAL = 0.001
_MAX_TERMS = 3
_MAX_ROUNDS = 10
_MAX_STARTS = 16
_IMPROVEMENT = 0.99
"""The factor by which one more coefficient must lower the squared error to be worth it."""

Point = tuple[int, int, int]
"""Samples of the device's chunk, samples of the whole batch, and the peak in bytes."""


MeasuredSplit = tuple[Sequence[int], Sequence[Sequence[int]]]
"""The chunk size of each device, and for each phase of a step that was measured, their peaks."""


@dataclass(frozen=True, slots=True)
class LinearTerm:
    """Compute the bytes that a device holds at one moment of a step.

    Attributes:
        fixed_bytes: bytes that do not depend on the batch.
        own_bytes_per_sample: bytes for each sample of the device's own chunk.
        whole_bytes_per_sample: bytes for each sample of the whole batch.
    """

    fixed_bytes: float
    own_bytes_per_sample: float
    whole_bytes_per_sample: float = 0.0

    def __call__(self, chunk_size: int, batch_size: int) -> float:
        """Return the bytes for a chunk of a batch."""
        return (
            self.fixed_bytes
            + self.own_bytes_per_sample * chunk_size
            + self.whole_bytes_per_sample * batch_size
        )


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Predict the peak of each device, for any split of any batch.

    A device's peak is the maximum of its linear terms.

    Attributes:
        first_terms: the terms of device 0 with samples.
        idle_terms: the terms of device 0 without samples, where no gradients are computed.
        other_terms: the terms of each other device that has samples.
        num_points: number of measurements that the terms were fitted to.
        residual: largest relative error among these measurements.
        offsets: bytes to add to the terms of each other device, at most 0, as parameters may be
            spread over them unevenly. Empty if there are none.
    """

    # Aliases are the keys in reports' files.
    first_terms: tuple[LinearTerm, ...] = field(metadata={"alias": "first_laws"})
    idle_terms: tuple[LinearTerm, ...] = field(metadata={"alias": "idle_laws"})
    other_terms: tuple[LinearTerm, ...] = field(metadata={"alias": "other_laws"})
    num_points: int
    residual: float
    offsets: tuple[int, ...] = ()

    @property
    def is_accurate(self) -> bool:
        """Return whether the model describes the workload; if not, only measuring helps."""
        return self.residual <= LARGEST_RESIDUAL

    def predict(self, chunk_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the peak bytes of each device for a split."""
        batch_size = sum(chunk_sizes)
        return tuple(
            self.peak_bytes(index, chunk_size, batch_size)
            for index, chunk_size in enumerate(chunk_sizes)
        )

    def peak_bytes(self, index: int, chunk_size: int, batch_size: int) -> int:
        """Return the peak bytes of a device with a chunk of a batch.

        It is 0 for a device without samples other than the first, even if it has parameters.
        """
        if index == 0:
            terms = (self.first_terms if chunk_size else self.idle_terms) or self.first_terms
            return round(_maximum(terms or self.idle_terms, chunk_size, batch_size))
        if not chunk_size:
            return 0
        offset = self.offsets[index - 1] if self.offsets else 0
        return round(_maximum(self.other_terms, chunk_size, batch_size)) + offset

    @property
    def whole_bytes_per_sample(self) -> float:
        """Return what device 0 holds of each sample of the batch: gathered outputs and loss."""
        return max(term.whole_bytes_per_sample for term in (*self.idle_terms, *self.first_terms))


def fit(
    splits: Iterable[MeasuredSplit],
    empty_bytes: Sequence[Sequence[int]] | None = None,
) -> MemoryModel:
    """Return the model that fits the measured splits best, by least squares.

    Args:
        splits: measurements of one workload on devices of one kind, with the same phases. The
            chunk of device 0 and the batch size should vary.
        empty_bytes: for each split and phase, what device 0 would hold with an empty batch, if it
            is known. Where all batches have one size, it separates fixed bytes from those that grow
            with the batch.

    Raises:
        ArgumentError: If there is no split, or only splits of a single device.
    """
    measured_splits = list(splits)
    if not measured_splits or len(measured_splits[0][0]) < 2:
        raise ArgumentError("a memory model is fitted to measurements of two or more devices")
    offsets = _offsets(measured_splits)
    first_terms: list[LinearTerm] = []
    idle_terms: list[LinearTerm] = []
    other_terms: list[LinearTerm] = []
    for phase in range(len(measured_splits[0][1])):
        working: list[Point] = []
        idle: list[Point] = []
        others: list[Point] = []
        for index, (chunk_sizes, phase_peak_bytes) in enumerate(measured_splits):
            first, *other_peaks = phase_peak_bytes[phase]
            own, *other_sizes = chunk_sizes
            points = working if own else idle
            points.append((own, sum(chunk_sizes), first))
            if empty_bytes is not None:
                points.append((0, 0, empty_bytes[index][phase]))
            sized_peaks = zip(other_sizes, other_peaks, offsets, strict=True)
            others += [(size, 0, held - offset) for size, held, offset in sized_peaks if size]
        first_terms += _fit_terms(list(dict.fromkeys(working)))
        idle_terms += _fit_terms(list(dict.fromkeys(idle)))
        other_terms += _fit_terms(others)
    model = MemoryModel(
        tuple(first_terms),
        tuple(idle_terms),
        tuple(other_terms),
        len(measured_splits),
        0.0,
        offsets if any(offsets) else (),
    )
    residual = max(
        abs(predicted - measured) / measured
        for chunk_sizes, phase_peak_bytes in measured_splits
        for predicted, *phases in zip(model.predict(chunk_sizes), *phase_peak_bytes, strict=True)
        if predicted
        if (measured := max(phases))
    )
    return replace(model, residual=residual)


def _offsets(splits: Sequence[MeasuredSplit]) -> tuple[int, ...]:
    """Return for each other device how much less it holds than the fullest with equal chunks."""
    differences = [
        [peak - max(peaks[1:]) for peak in peaks[1:]]
        for chunk_sizes, phase_peak_bytes in splits
        for peaks in phase_peak_bytes
        if len(set(chunk_sizes[1:])) == 1 and chunk_sizes[1]
    ]
    # The least difference of all measurements, so that none of them makes a prediction too low.
    least = tuple(map(max, zip(*differences, strict=True)))
    return least or (0,) * (len(splits[0][0]) - 1)


def _maximum(terms: Iterable[LinearTerm], chunk_size: int, batch_size: int) -> float:
    return max(term(chunk_size, batch_size) for term in terms)


def _fit_terms(points: Sequence[Point]) -> list[LinearTerm]:
    """Return as few terms as describe the points, and none for no points.

    Of those that describe them equally well, terms that grow with the batch are preferred: a
    constant may fit points of a single batch size, but not predict others.

    Source: alternating least squares for max-affine functions, Magnani and Boyd 2009,
    "Convex piecewise-linear fitting", Optimization and Engineering 10.
    """
    best: list[LinearTerm] = []
    lowest: tuple[float, ...] = (math.inf,)
    for num_terms in range(1, _MAX_TERMS + 1) if points else ():
        for groups in _initial_groups(points, num_terms):
            terms = _alternate(points, groups)
            residual = max(
                abs(_maximum(terms, own, whole) - held) / max(1, held)
                for own, whole, held in points
            )
            num_constant = sum(term(0, 0) == term(1, 1) for term in terms)
            rank = (max(residual, _GOOD_RESIDUAL), num_constant, residual)
            if rank < lowest:
                best, lowest = terms, rank
        if lowest[0] <= _GOOD_RESIDUAL:
            break
    return best


def _initial_groups(points: Sequence[Point], num_terms: int) -> Iterator[list[list[Point]]]:
    """Yield partitions to start from: points sorted by chunk, batch or peak, cut into runs."""
    for axis in range(3) if num_terms > 1 else (0,):
        ordered = sorted(points, key=lambda point: point[axis])
        ways = list(combinations(range(1, len(ordered)), num_terms - 1))
        for cuts in ways[:: -(-len(ways) // _MAX_STARTS) or 1]:
            yield [ordered[i:j] for i, j in pairwise([0, *cuts, len(ordered)])]


def _alternate(points: Sequence[Point], groups: list[list[Point]]) -> list[LinearTerm]:
    """Return a term for each group, after assigning each point to its highest term repeatedly."""
    terms: list[LinearTerm] = []
    for _ in range(_MAX_ROUNDS):
        fitted = [_fit_term(group) for group in groups if group]
        if fitted == terms:
            break
        terms = fitted
        groups = [[] for _ in terms]
        for point in points:
            heights = [term(point[0], point[1]) for term in terms]
            groups[heights.index(max(heights))].append(point)
    return terms


_COLUMNS: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))


def _fit_term(points: Sequence[Point]) -> LinearTerm:
    """Return the term with the least squared error among those without negative coefficients.

    Each subset of the three coefficients is tried, the smallest first. A single point is fitted by
    a proportional term: a constant one would exceed all smaller points.
    """
    vectors = [[1] * len(points), *zip(*points, strict=True)]
    products = [[sum(map(operator.mul, a, b)) for b in vectors] for a in vectors]
    best, best_error = LinearTerm(0.0, 0.0), math.inf
    for columns in _COLUMNS if len(points) > 1 else ((2,), (1,), (0,)):
        coefficients, error = _solve(products, columns)
        if min(coefficients) >= 0 and error < best_error * _IMPROVEMENT:
            values = dict(zip(columns, coefficients, strict=True))
            best = LinearTerm(*(values.get(column, 0.0) for column in range(3)))
            best_error = error
    return best


def _solve(products: Sequence[Sequence[int]], columns: Sequence[int]) -> tuple[list[float], float]:
    """Return the least-squares coefficients of the columns, and their squared error.

    Args:
        products: inner products of the columns; the last column is fitted by the others. They are
            integers, so that eliminating without division is exact.
        columns: the columns to fit with. If they are linearly dependent, the error is infinite:
            some of them fit as well as all.
    """
    chosen = (*columns, 3)
    rows = [[products[i][j] for j in chosen] for i in chosen]
    scale = 1
    for k in range(len(columns)):
        pivot = rows[k][k]
        if not pivot:
            return [0.0], math.inf
        for i, row in enumerate(rows):
            if i != k:
                rows[i] = [pivot * a - row[k] * b for a, b in zip(row, rows[k], strict=True)]
        scale *= pivot
    return [row[-1] / row[k] for k, row in enumerate(rows[:-1])], rows[-1][-1] / scale
