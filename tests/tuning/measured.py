"""Make ``Option`` and ``Report`` objects with made-up values, without measuring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from balanced_dp import Option, Report
from balanced_dp.split import even_share, split_batch
from balanced_dp.tuning.options import arguments_of
from balanced_dp.tuning.report import SCHEMA, Provenance


def option(chunk_sizes: Sequence[int], peak_bytes: Sequence[int], **others: Any) -> Option:
    """Return an ``Option`` with the given chunk sizes and peaks; ``others`` are further fields."""
    values = {
        "gather": True,
        "spread": False,
        **arguments_of(tuple(chunk_sizes)),
        "chunk_sizes": tuple(chunk_sizes),
        "peak_bytes": tuple(peak_bytes),
        "uses": ({},) * len(chunk_sizes),
        "seconds": 0.0,
    }
    return Option(**{**values, **others})


def options(peaks: Any, batch_size: int, num_devices: int, **others: Any) -> list[Option]:
    """Return an ``Option`` for each ``gpu0_bsz``, from 0 to the even share of the batch.

    ``peaks`` is a function that returns the peaks of a split; ``others`` are further fields.
    """
    even = even_share(batch_size, num_devices)
    splits = [split_batch(batch_size, num_devices, value) for value in range(even + 1)]
    return [option(split, peaks(split), **others) for split in splits]


def report(measured: Sequence[Option], capacities: Sequence[int], **others: Any) -> Report:
    """Return a ``Report`` with the given options; ``others`` are further fields of the report."""
    values = {
        "schema": SCHEMA,
        "provenance": Provenance.of(),
        "workload": "a model",
        "mode": "symbolic",
        "num_parameters": 1,
        "precision": None,
        "batch_size": measured[0].batch_size,
        "capacity_bytes": tuple(capacities),
        "reserve_bytes": 0,
        "goal": "speed",
        "options": tuple(measured),
        "failures": {},
    }
    return Report(**{**values, **others})
