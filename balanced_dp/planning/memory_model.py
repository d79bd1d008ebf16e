"""The law of what each device needs, fitted to a handful of measured points. Pure arithmetic.

What a device holds at one moment of a step grows linearly with the samples of its own chunk and, on
the first device, with those of the whole batch. A peak is the highest of several moments, so it is
the highest of a few such laws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Protocol

import torch

from ..errors import ArgumentError

LARGEST_RESIDUAL = 0.05
"""Above it the laws do not describe the workload."""

_GOOD_RESIDUAL = 0.001
_MAX_LAWS = 3
_MAX_ROUNDS = 10
_MAX_STARTS = 16
_WORTH_IT = 0.99
"""A law with one more number has to be better, or the simpler one stays."""

Point = tuple[int, int, int]
"""Samples of the own chunk, samples of the whole batch, and the peak in bytes."""


class MeasuredSplit(Protocol):
    """What laws are fitted to: a split, and what each device held at most in each phase."""

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """What each device got."""

    @property
    def phase_peak_bytes(self) -> tuple[tuple[int, ...], ...]:
        """The peaks of each device, one tuple for each phase that was told apart."""


@dataclass(frozen=True, slots=True)
class Law:
    """Bytes at one moment of a step.

    Attributes:
        fixed_bytes: whatever the batch.
        own_bytes_per_sample: for each sample of the device's own chunk.
        whole_bytes_per_sample: for each sample of the whole batch.
    """

    fixed_bytes: float
    own_bytes_per_sample: float
    whole_bytes_per_sample: float = 0.0

    def __call__(self, chunk_size: int, batch_size: int) -> float:
        """Returns the bytes for a chunk of a batch."""
        return (
            self.fixed_bytes
            + self.own_bytes_per_sample * chunk_size
            + self.whole_bytes_per_sample * batch_size
        )


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What each device needs at its peak, for any split of any batch.

    Attributes:
        first_laws: those of device 0 with samples; its peak is the highest.
        idle_laws: those of device 0 without samples, where no gradients are computed.
        other_laws: those of every other device that has samples.
        num_points: how many measurements they were fitted to.
        residual: how far the farthest of these is off, as a part of what was measured.
    """

    first_laws: tuple[Law, ...]
    idle_laws: tuple[Law, ...]
    other_laws: tuple[Law, ...]
    num_points: int
    residual: float

    @property
    def is_lawful(self) -> bool:
        """Whether the laws describe the workload; where not, only measuring says what it needs."""
        return self.residual <= LARGEST_RESIDUAL

    def predict(self, chunk_sizes: Sequence[int]) -> tuple[int, ...]:
        """Returns the peak bytes of each device for a split."""
        batch_size = sum(chunk_sizes)
        first, *others = chunk_sizes
        first_laws = (self.first_laws if first else self.idle_laws) or self.first_laws
        return (
            round(_highest(first_laws or self.idle_laws, first, batch_size)),
            *(round(_highest(self.other_laws, size, batch_size)) if size else 0 for size in others),
        )

    @property
    def whole_bytes_per_sample(self) -> float:
        """What device 0 holds for each sample of the whole batch: gathered outputs and the loss."""
        return max(law.whole_bytes_per_sample for law in (*self.idle_laws, *self.first_laws))


def fit(splits: Iterable[MeasuredSplit], empty_bytes: int | None = None) -> MemoryModel:
    """Returns the laws that fit the measured splits best, by least squares.

    Args:
        splits: of one workload on like devices, with the same phases. They should differ in the
            chunk of device 0, and batches in size.
        empty_bytes: what device 0 holds with an empty batch, if that is known; where all batches
            have one size, it tells what is fixed from what grows with them.

    Raises:
        ArgumentError: no split, or none of several devices, is given.
    """
    points = list(splits)
    if not points or len(points[0].chunk_sizes) < 2:
        raise ArgumentError("a memory model is fitted to measurements of two or more devices")
    empty = [] if empty_bytes is None else [(0, 0, empty_bytes)]
    first_laws: list[Law] = []
    idle_laws: list[Law] = []
    other_laws: list[Law] = []
    for phase in range(len(points[0].phase_peak_bytes)):
        working: list[Point] = []
        idle: list[Point] = []
        others: list[Point] = []
        for split in points:
            first, *other_peaks = split.phase_peak_bytes[phase]
            own, *other_sizes = split.chunk_sizes
            (working if own else idle).append((own, sum(split.chunk_sizes), first))
            sized_peaks = zip(other_sizes, other_peaks, strict=True)
            others += [(size, 0, held) for size, held in sized_peaks if size]
        first_laws += _fit_laws(working and working + empty)
        idle_laws += _fit_laws(idle and idle + empty)
        other_laws += _fit_laws(others)
    model = MemoryModel(
        tuple(first_laws), tuple(idle_laws), tuple(other_laws), len(points), residual=0.0
    )
    residual = max(
        abs(predicted - measured) / measured
        for split in points
        for predicted, *phases in zip(
            model.predict(split.chunk_sizes), *split.phase_peak_bytes, strict=True
        )
        if (measured := max(phases))
    )
    return replace(model, residual=residual)


def _highest(laws: Iterable[Law], chunk_size: int, batch_size: int) -> float:
    return max(law(chunk_size, batch_size) for law in laws)


def _fit_laws(points: Sequence[Point]) -> list[Law]:
    """Returns as few laws as describe the points, none for none: a peak has several moments.

    Source: alternating least squares for max-affine functions, Magnani and Boyd 2009,
    "Convex piecewise-linear fitting", Optimization and Engineering 10.
    """
    best: list[Law] = []
    if not points:
        return best
    for num_laws in range(1, _MAX_LAWS + 1):
        for groups in _first_groups(points, num_laws):
            laws = _alternate(points, groups)
            if not best or _residual(laws, points) < _residual(best, points):
                best = laws
        if _residual(best, points) <= _GOOD_RESIDUAL:
            break
    return best


def _first_groups(points: Sequence[Point], num_laws: int) -> Iterator[list[list[Point]]]:
    """Yields ways to begin: the points in order of own chunk, batch or peak, cut in runs."""
    for axis in range(3) if num_laws > 1 else (0,):
        ordered = sorted(points, key=lambda point: point[axis])
        ways = list(combinations(range(1, len(ordered)), num_laws - 1))
        for cuts in ways[:: -(-len(ways) // _MAX_STARTS) or 1]:
            yield [ordered[i:j] for i, j in pairwise([0, *cuts, len(ordered)])]


def _alternate(points: Sequence[Point], groups: list[list[Point]]) -> list[Law]:
    laws: list[Law] = []
    for _ in range(_MAX_ROUNDS):
        found = [_fit_law(group) for group in groups if group]
        if found == laws:
            break
        laws = found
        groups = [[] for _ in laws]
        for point in points:
            heights = [law(point[0], point[1]) for law in laws]
            groups[heights.index(max(heights))].append(point)
    return laws


def _residual(laws: Sequence[Law], points: Sequence[Point]) -> float:
    return max(abs(_highest(laws, own, whole) - held) / max(1, held) for own, whole, held in points)


_TERMS: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))


def _fit_law(points: Sequence[Point]) -> Law:
    """Returns the law with the least squared error and nothing negative in it.

    Of the three numbers, each set that may be other than zero is tried, the smallest first. One
    point is taken for proportional: as a constant, it would be above all smaller ones.
    """
    best, best_error = Law(0.0, 0.0), math.inf
    held = torch.tensor([[float(held)] for _, _, held in points], dtype=torch.float64)
    columns = torch.tensor([[1.0, own, whole] for own, whole, _ in points], dtype=torch.float64)
    sets = _TERMS if len(points) > 1 else ((2,), (1,), (0,))
    for names in sets:
        rows = columns[:, list(names)]
        found = torch.linalg.lstsq(rows, held, driver="gelsd").solution
        error = float(((rows @ found - held) ** 2).sum())
        if float(found.min()) >= 0 and error < best_error * _WORTH_IT:
            values = [0.0, 0.0, 0.0]
            for name, value in zip(names, found[:, 0].tolist(), strict=True):
                values[name] = value
            best, best_error = Law(*values), error
    return best
