"""The law of what each device needs, fitted to a handful of measured points. Pure arithmetic.

What a device holds at one moment of a step grows linearly with the samples of its own chunk and, on
the first device, with those of the whole batch. A peak is the highest of several moments, so it is
the highest of a few such laws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .errors import ArgumentError
from .measurement import Measurement

LARGEST_RESIDUAL = 0.05
"""Above it the laws do not describe the workload."""

_GOOD_RESIDUAL = 0.002

Point = tuple[int, int, int]
"""Samples of the own chunk, samples of the whole batch, and the peak in bytes."""


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
        first_laws: those of device 0; its peak is the highest.
        other_laws: those of every other device that has samples.
        num_points: how many measurements they were fitted to.
        residual: how far the farthest of these is off, as a part of what was measured.
    """

    first_laws: tuple[Law, ...]
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
        return (
            round(_highest(self.first_laws, first, batch_size)),
            *(round(_highest(self.other_laws, size, batch_size)) if size else 0 for size in others),
        )

    @property
    def whole_bytes_per_sample(self) -> float:
        """What device 0 holds for each sample of the whole batch: gathered outputs and the loss."""
        return max(law.whole_bytes_per_sample for law in self.first_laws)

    def first_without_gathering(self, chunk_size: int) -> int:
        """Returns about what device 0 would need if it held its own chunk's outputs only."""
        return round(_highest(self.first_laws, chunk_size, chunk_size))


def fit(measurements: Iterable[Measurement]) -> MemoryModel:
    """Returns the laws that fit the measurements best, by least squares.

    Args:
        measurements: of one workload on like devices; those where memory ran out are left out.
            Splits should differ in the chunk of device 0, and batches in size.

    Raises:
        ArgumentError: no measurement, or none of several devices, is left.
    """
    points = [m for m in measurements if m.status == "ok"]
    if not points or len(points[0].chunk_sizes) < 2:
        raise ArgumentError("a memory model is fitted to measurements of two or more devices")
    first_laws: list[Law] = []
    other_laws: list[Law] = []
    for peaks in (
        [(m, m.backward_peak_bytes) for m in points],
        [(m, m.optimizer_peak_bytes) for m in points],
    ):
        first_laws += _fit_laws([(m.chunk_sizes[0], m.batch_size, peak[0]) for m, peak in peaks])
        other_laws += _fit_laws(
            [
                (size, 0, held)
                for m, peak in peaks
                for size, held in zip(m.chunk_sizes[1:], peak[1:], strict=True)
                if size
            ]
        )
    model = MemoryModel(tuple(first_laws), tuple(other_laws), len(points), 0.0)
    residual = max(
        abs(predicted - measured) / measured
        for m in points
        for predicted, measured in zip(model.predict(m.chunk_sizes), m.peak_bytes, strict=True)
        if measured
    )
    return MemoryModel(model.first_laws, model.other_laws, model.num_points, residual)


def _highest(laws: Iterable[Law], chunk_size: int, batch_size: int) -> float:
    return max(law(chunk_size, batch_size) for law in laws)


def _fit_laws(points: Sequence[Point]) -> list[Law]:
    """Returns one law, or two where two moments of the step take turns in being the highest."""
    if not points:
        return []
    ordered = sorted(points)
    best = [_fit_law(ordered)]
    for cut in range(2, len(ordered) - 2):
        if _residual(best, ordered) <= _GOOD_RESIDUAL:
            break
        pair = [_fit_law(ordered[:cut]), _fit_law(ordered[cut:])]
        best = min(best, pair, key=lambda laws: _residual(laws, ordered))
    return best


def _residual(laws: Sequence[Law], points: Sequence[Point]) -> float:
    return max(abs(_highest(laws, own, whole) - held) / max(1, held) for own, whole, held in points)


def _fit_law(points: Sequence[Point]) -> Law:
    rows = torch.tensor([[1.0, own, whole] for own, whole, _ in points], dtype=torch.float64)
    held = torch.tensor([[float(held)] for _, _, held in points], dtype=torch.float64)
    # Of many laws that fit equally well, as through a single point, the one with small slopes.
    solution = torch.linalg.lstsq(rows, held, driver="gelsd").solution[:, 0].tolist()
    return Law(*solution)
