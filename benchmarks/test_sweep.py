"""Which gpu0_bsz for each built-in workload: a training step at every value.

    pytest benchmarks/test_sweep.py --benchmark-json=bench.json
    balanced-dp report bench.json --html bench.html

Runs on all GPUs where there are two or more, else on four emulated devices that keep shapes only;
there the memory is that of real ones and the time is of no meaning. Each benchmark has its peaks in
``extra_info``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
import torch

from balanced_dp.devices import capacities_of
from balanced_dp.report import report_json
from balanced_dp.tuning.open_devices import accelerators, open_devices
from balanced_dp.tuning.report import Provenance, Report, mode_of
from balanced_dp.tuning.step import StepMeter
from balanced_dp.tuning.workload import BUILT_IN, find_workload

NUM_DEVICES = len(accelerators()) or 4
CAPACITY = 80 * 2**30
"""That of emulated devices."""


def cases() -> Iterator[tuple[str, int]]:
    for name, make in BUILT_IN.items():
        for gpu0_bsz in range(-(-make().batch_size // NUM_DEVICES) + 1):
            yield name, gpu0_bsz


@pytest.fixture(scope="module")
def devices() -> Iterator[Sequence[torch.device]]:
    with open_devices(NUM_DEVICES) as devices:
        yield devices


@pytest.fixture(scope="module")
def meter(devices: Sequence[torch.device], request: pytest.FixtureRequest) -> Iterator[StepMeter]:
    """One model at a time: parameters come sorted by workload."""
    with StepMeter(find_workload(request.param), devices) as meter:
        yield meter


@pytest.mark.parametrize(("meter", "gpu0_bsz"), list(cases()), indirect=["meter"])
def test_training_step(benchmark, meter, gpu0_bsz):
    batch_size = meter.workload.batch_size
    option = benchmark.pedantic(meter.measure, args=(batch_size, gpu0_bsz))
    mode = mode_of(meter.devices[0])
    report = Report(
        provenance=Provenance.of(meter.devices),
        workload=meter.workload.name,
        mode=mode,
        num_parameters=meter.num_parameters,
        batch_size=batch_size,
        capacity_bytes=tuple(
            capacities_of(meter.devices) if mode == "real" else [CAPACITY] * NUM_DEVICES
        ),
        goal="headroom",
        options=(option,),
    )
    benchmark.extra_info.update(
        peak_bytes=option.peak_bytes,
        chunk_sizes=option.chunk_sizes,
        balanced_dp=json.loads(report_json(report)),
    )
