"""Make a report of the measurements of a workload or of a training loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..errors import ArgumentError, InfeasiblePlanError
from ..planning.memory_model import MemoryModel, fit
from ..planning.split_planner import describe, utilizations
from ..split import best_gpu0_bsz, even_share
from .measurement import Measurement, by_gpu0_bsz, fittable
from .options import find_options
from .report_types import SCHEMA, Provenance, Report


def report_of_measurements(
    measurements: Sequence[Measurement],
    provenance: Provenance,
    capacities: Sequence[int],
    reserve: int = 0,
    *,
    batch_size: int | None = None,
    model: MemoryModel | None = None,
    num_parameters: int = 0,
    precision: str | None = None,
    gather: bool = True,
    spread: bool = False,
) -> Report:
    """Return the report of the best of the measured splits, whether it fits or not.

    Args:
        measurements: measurements of one workload: the even split of a batch, other splits of it,
            and at least one of another batch size, to tell the linear terms apart.
        provenance: where and how the measurements were made.
        capacities: capacity of each device in bytes.
        reserve: bytes of each capacity to keep free.
        batch_size: the batch size to plan for. By default the most frequent one.
        model: the memory model. By default it is fitted to all measurements.
        num_parameters: number of trained parameters.
        precision: the dtype of autocast.
        gather: whether outputs were gathered and their loss computed on device 0.
        spread: whether parameters were spread over all devices.

    Raises:
        ArgumentError: If the even split is missing.
        InfeasiblePlanError: If memory ran out with every split.
    """
    if batch_size is None:
        batch_size = Counter(m.batch_size for m in measurements).most_common(1)[0][0]
    if model is None:
        model = fit(fittable(measurements))
    even = even_share(batch_size, len(capacities))
    swept = by_gpu0_bsz(measurements, batch_size)
    if even not in swept:
        raise ArgumentError(
            f"the sweep of {measurements[0].workload} lacks gpu0_bsz={even}, the even split "
            f"of its batch of {batch_size}"
        )
    budgets = [c - reserve for c in capacities]
    ran = {value: measured for value, measured in swept.items() if measured.status == "ok"}
    if not ran:
        raise InfeasiblePlanError(
            f"a batch of {batch_size} does not fit: memory ran out with each of the {len(swept)} "
            "measured splits; choose a smaller batch"
        )
    full = {value: max(utilizations(m.peak_bytes, budgets)) for value, m in ran.items()}
    best = best_gpu0_bsz(full)
    return Report(
        schema=SCHEMA,
        provenance=provenance,
        workload=measurements[0].workload,
        num_parameters=num_parameters,
        precision=precision,
        gather=gather,
        spread=spread,
        plan=describe(model, batch_size, capacities, reserve, best, gather=gather, spread=spread),
        chosen=ran[best],
        even=swept[even],
        options=find_options(model, measurements, batch_size, budgets, gather, spread),
        alternatives=(),
        model=model,
        measurements=tuple(measurements),
    )
