"""Which gpu0_bsz for each built-in workload: a training step at every value.

    pytest benchmarks/test_sweep.py --benchmark-json=bench.json
    balanced-dp report bench.json --html bench.html

Runs on all GPUs where there are two or more, else on four emulated devices that keep shapes only;
there the memory is that of real ones and the time is of no meaning. Each benchmark has its peaks in
``extra_info``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import pytest
import torch

from balanced_dp import Provenance
from balanced_dp.report.json_file import SweptStep
from balanced_dp.tuning.open_devices import default_num_devices, open_devices
from balanced_dp.tuning.step_benchmark import StepMeter, step_meter
from balanced_dp.tuning.tuner import default_capacities
from balanced_dp.tuning.workloads import BUILT_IN, find_workload

NUM_DEVICES = default_num_devices(emulate=False)


def cases() -> Iterator[tuple[str, int, int]]:
    for name, make in BUILT_IN.items():
        batch_size = make().batch_size
        even = -(-batch_size // NUM_DEVICES)
        for gpu0_bsz in range(even + 1):
            yield name, batch_size, gpu0_bsz
        for gpu0_bsz in (0, even):  # another batch size, to tell the terms apart
            yield name, 2 * batch_size, gpu0_bsz


@pytest.fixture(scope="module")
def devices() -> Iterator[Sequence[torch.device]]:
    with open_devices(NUM_DEVICES) as devices:
        yield devices


@pytest.fixture(scope="module")
def metered(
    devices: Sequence[torch.device], request: pytest.FixtureRequest
) -> Iterator[tuple[StepMeter, list[int]]]:
    """One model at a time: parameters come sorted by workload."""
    workload = find_workload(request.param)
    with step_meter(workload, devices) as meter:
        yield meter, default_capacities(meter, workload.batch_size)


@pytest.mark.parametrize(("metered", "batch_size", "gpu0_bsz"), list(cases()), indirect=["metered"])
def test_training_step(benchmark, metered, batch_size, gpu0_bsz):
    meter, capacities = metered
    measured = benchmark.pedantic(meter.measure, args=(batch_size, gpu0_bsz))
    step = SweptStep(
        measurement=measured,
        provenance=Provenance.of_this_process(
            torch.get_device_module(d).get_device_name(d) for d in meter.devices
        ),
        capacities=tuple(capacities),
        num_parameters=meter.num_parameters,
        precision=meter.precision,
    )
    benchmark.extra_info.update(
        peak_bytes=measured.peak_bytes,
        chunk_sizes=measured.chunk_sizes,
        mode=measured.mode,
        status=measured.status,
        balanced_dp=asdict(step),
    )
