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

from balanced_dp.report import report_json
from balanced_dp.tuning.open_devices import default_num_devices, open_devices
from balanced_dp.tuning.report import SCHEMA, Provenance, Report, mode_of
from balanced_dp.tuning.step import StepMeter, step_meter
from balanced_dp.tuning.workload import BUILT_IN, find_workload

NUM_DEVICES = default_num_devices(emulate=False)
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
    with step_meter(find_workload(request.param), devices) as meter:
        yield meter


@pytest.mark.parametrize(("meter", "gpu0_bsz"), list(cases()), indirect=["meter"])
def test_training_step(benchmark, meter, gpu0_bsz):
    batch_size = meter.workload.batch_size
    option = benchmark.pedantic(meter.measure, args=(batch_size, gpu0_bsz))
    modules = [(torch.get_device_module(device), device) for device in meter.devices]
    is_real = mode_of(meter.devices[0]) == "real"
    report = Report(
        schema=SCHEMA,
        provenance=Provenance.of_this_process(m.get_device_name(d) for m, d in modules),
        workload=meter.workload.name,
        mode=mode_of(meter.devices[0]),
        num_parameters=meter.num_parameters,
        precision=None,
        batch_size=batch_size,
        capacity_bytes=tuple(
            m.get_device_properties(d).total_memory if is_real else CAPACITY for m, d in modules
        ),
        reserve_bytes=0,
        goal="headroom",
        options=(option,),
        failures={},
    )
    benchmark.extra_info.update(
        peak_bytes=option.peak_bytes,
        chunk_sizes=option.chunk_sizes,
        balanced_dp=json.loads(report_json(report)),
    )
