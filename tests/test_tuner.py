"""Plans against what trying everything finds, on emulated devices."""

from __future__ import annotations

import pytest
import torch

from balanced_dp import (
    ArgumentError,
    InfeasiblePlanError,
    Workload,
    measure_step,
    plan_workload,
    split_batch,
)
from balanced_dp.measurement import open_devices, step_meter

from .small_workloads import SMALL

GIB = 2**30
PLENTY = 1000 * GIB
CASES = [
    (name, num_devices, batch_size)
    for name in SMALL
    for num_devices, batch_size in ((2, 9), (4, 24))
] + [(name, 8, 40) for name in ("wide_output", "convolutions", "char_transformer")]


def try_all(workload, batch_size, num_devices):
    """The peaks of every gpu0_bsz, by the value."""
    even = -(-batch_size // num_devices)
    with open_devices(num_devices, emulate=True) as devices, step_meter(workload, devices) as meter:
        return {g: meter.measure(batch_size, g).peak_bytes for g in range(even + 1)}


@pytest.mark.parametrize(("name", "num_devices", "batch_size"), CASES)
def test_the_plan_is_what_trying_everything_finds(name, num_devices, batch_size):
    workload = SMALL[name]()
    peaks = try_all(workload, batch_size, num_devices)
    best = min(max(values) for values in peaks.values())
    tuning = plan_workload(workload, batch_size, [PLENTY] * num_devices)
    plan = tuning.plan
    assert max(peaks[plan.gpu0_bsz]) <= best * 1.01
    assert plan.chunk_sizes == split_batch(batch_size, num_devices, plan.gpu0_bsz)
    assert tuning.chosen.peak_bytes == peaks[plan.gpu0_bsz]
    assert tuning.prediction_error <= 0.01
    assert len(tuning.measurements) < 25


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("num_devices", [3])
def test_predictions_hold_where_nothing_was_measured(name, num_devices):
    """Around what was planned, at batch sizes and splits that were not fitted."""
    workload, batch_size = SMALL[name](), 60
    tuning = plan_workload(workload, batch_size, [PLENTY] * num_devices)
    fitted = {(m.batch_size, m.gpu0_bsz) for m in tuning.measurements}
    with open_devices(num_devices, emulate=True) as devices, step_meter(workload, devices) as meter:
        for size in (batch_size, 90):
            even = -(-size // num_devices)
            near = round(tuning.plan.gpu0_bsz * size / batch_size)
            for gpu0_bsz in {max(0, near - 2), min(even, near + 2), even - 1}:
                if (size, gpu0_bsz) in fitted:
                    continue
                measured = meter.measure(size, gpu0_bsz).peak_bytes
                predicted = tuning.model.predict(split_batch(size, num_devices, gpu0_bsz))
                assert predicted == pytest.approx(measured, rel=0.01), (size, gpu0_bsz)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("num_devices", [3])
def test_the_largest_batch_is_the_largest_that_runs(name, num_devices):
    workload = SMALL[name]()
    batch_size = 4 * num_devices
    with open_devices(num_devices, emulate=True) as devices:
        capacity = 3 * max(measure_step(workload, batch_size, 4, devices).peak_bytes)
    plan = plan_workload(workload, batch_size, [capacity] * num_devices).plan

    def runs(size: int, gpu0_bsz: int) -> bool:
        with open_devices(num_devices, memory=capacity, emulate=True) as devices:
            return measure_step(workload, size, gpu0_bsz, devices).status == "ok"

    assert plan.max_batch_size > batch_size
    within = plan.max_batch_size - num_devices
    assert runs(within, plan.max_batch_gpu0_bsz)
    beyond = plan.max_batch_size + num_devices
    even = -(-beyond // num_devices)
    near = range(max(0, plan.max_batch_gpu0_bsz - 2), min(even, plan.max_batch_gpu0_bsz + 3) + 1)
    assert not any(runs(beyond, gpu0_bsz) for gpu0_bsz in near)
    assert plan.even_max_batch_size <= plan.max_batch_size


def test_devices_of_unlike_capacity_are_filled_alike():
    workload = SMALL["char_transformer"]()
    small = plan_workload(workload, 64, [2 * GIB, 8 * GIB, 8 * GIB]).plan
    alike = plan_workload(workload, 64, [8 * GIB] * 3).plan
    assert small.gpu0_bsz < alike.gpu0_bsz
    assert small.capacity_bytes == (2 * GIB, 8 * GIB, 8 * GIB)


def test_what_does_not_fit_says_what_is_lacking():
    workload = SMALL["wide_output"]()
    with pytest.raises(InfeasiblePlanError, match=r"device 0 needs .* and lacks .*; the largest"):
        plan_workload(workload, 200, [GIB // 2] * 2)


def test_what_no_value_balances_is_told():
    plan = plan_workload(SMALL["wide_output"](), 2000, [PLENTY] * 4).plan
    [sentence] = plan.advice
    assert sentence.startswith("no value of gpu0_bsz balances this: without any samples device 0")
    assert "Gathering the outputs of 2000 samples and their loss costs device 0" in sentence
    assert plan.predicted_bytes[0] == pytest.approx(plan.floor_bytes, rel=0.01)
    assert plan_workload(SMALL["loss_inside"](), 64, [PLENTY] * 4).plan.advice == ()


class Lawless(torch.nn.Module):
    """What it needs jumps with the chunk."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + x.new_zeros((len(x) % 3) * 100_000 + 1).sum()


def lawless():
    return Workload(
        Lawless,
        lambda n: ((torch.zeros(n, 4),), {}, None),
        lambda output, _: output.sum(),
    )


def test_a_workload_without_a_law_is_measured_at_every_candidate():
    workload = lawless()
    tuning = plan_workload(workload, 24, [GIB] * 3)
    assert not tuning.model.is_lawful
    assert {m.gpu0_bsz for m in tuning.measurements if m.batch_size == 24} == set(range(9))
    peaks = try_all(workload, 24, 3)
    assert max(peaks[tuning.plan.gpu0_bsz]) == min(map(max, peaks.values()))


@pytest.mark.parametrize(
    ("batch_size", "capacities", "reserve", "message"),
    [
        (0, [GIB, GIB], 0, "batch_size must be at least 1, got 0"),
        (8, [GIB], 0, "two or more devices"),
        (8, [GIB, GIB // 2], GIB // 2, r"reserve of 512.00 MiB, got 1.00 GiB, 512.00 MiB"),
    ],
)
def test_what_cannot_be_planned(batch_size, capacities, reserve, message):
    with pytest.raises(ArgumentError, match=message):
        plan_workload(SMALL["mlp"](), batch_size, capacities, reserve)


def test_measurements_are_told_as_they_come():
    seen = []
    tuning = plan_workload(SMALL["mlp"](), 16, [GIB] * 2, on_measurement=seen.append)
    assert tuple(seen) == tuning.measurements
