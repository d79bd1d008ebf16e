"""Compare what tune finds with what trying everything finds, on emulated devices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from balanced_dp import (
    ArgumentError,
    InfeasiblePlanError,
    SymbolicValueError,
    Workload,
    emulate_devices,
    tune,
)
from balanced_dp.report.tables import summary
from balanced_dp.split import even_share, split_batch
from balanced_dp.tuning.step import StepMeter

from ..modules import Lambda
from .small_workloads import SMALL

GIB = 2**30


def tuned(workload, batch_size, capacities, **options):
    options = {"reserve": 0, "emulate": True, "with_alternatives": False, **options}
    return tune(workload, batch_size, capacities=capacities, **options)


def try_all(workload, batch_size, num_devices):
    """Measure every ``gpu0_bsz``, and return a dict from each value to the peaks of the devices."""
    splits = {split_batch(batch_size, num_devices, value) for value in range(batch_size + 1)}
    with emulate_devices(num_devices, symbolic=True) as gpus, StepMeter(workload, gpus) as meter:
        return {split[0]: meter.measure(split).peak_bytes for split in splits}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_devices", "batch_size"),
    [
        *((name, 2, 9) for name in ("mlp", "wide_output", "convolutions", "char_transformer")),
        *((name, 8, 40) for name in ("wide_output", "convolutions")),
        ("mlp", 3, 50),
        ("mixture_of_experts", 3, 24),
        pytest.param("mixture_of_experts", 8, 48, marks=pytest.mark.slow),
        pytest.param("tied_transformer", 6, 14, marks=pytest.mark.slow),
        pytest.param("loss_inside", 5, 18, marks=pytest.mark.slow),
    ],
)
def test_what_trying_everything_finds(name, num_devices, batch_size):
    """With three times the capacity that the batch needs, so that the largest can be tried."""
    workload = SMALL[name]()
    peaks = try_all(workload, batch_size, num_devices)
    least = min(map(max, peaks.values()))
    capacity = 3 * max(map(max, peaks.values()))
    report = tuned(workload, batch_size, [capacity] * num_devices, goal="headroom")
    best = report.best
    assert max(best.peak_bytes) <= least * 1.01
    assert best.peak_bytes == peaks[best.chunk_sizes[0]]
    assert len(report.options) < 22

    largest = replace(report, goal="batch").best
    assert batch_size < largest.batch_size and largest.fits(report.budgets)
    more = math.ceil(largest.batch_size * 1.005) + 1
    near = round(largest.chunk_sizes[0] * more / largest.batch_size)
    even = even_share(more, num_devices)
    with (
        emulate_devices(num_devices, memory=capacity, symbolic=True) as devices,
        StepMeter(workload, devices) as meter,
    ):
        values = {0, even // 2, even, *range(max(0, near - 2), min(even, near + 3) + 1)}
        assert all(meter.measure(split_batch(more, num_devices, v)).out_of_memory for v in values)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["char_transformer", "mixture_of_experts"])
def test_weights_use_what_gpu0_bsz_cannot(name):
    needed = max(map(max, try_all(SMALL[name](), 64, 3).values()))
    capacities = [2 * needed, needed, needed // 2]
    report = tuned(SMALL[name](), 64, capacities, goal="headroom")
    best = report.best
    first, second, third = best.device_weights
    assert best.chunk_sizes == best.device_weights and min(first, second) > third > 0
    assert best.line.endswith(f"device_weights=[{first}, {second}, {third}])")
    by_value = [o for o in report.options if o.batch_size == 64 and o.device_weights is None]
    others = min(option.utilization(capacities) for option in by_value)
    assert best.utilization(capacities) < 0.9 * others
    largest = replace(report, goal="batch").best
    assert largest.device_weights and largest.fits(capacities)
    others = (o.batch_size for o in report.options if o.fits(capacities) and not o.device_weights)
    assert largest.batch_size > 1.1 * max(others)


def test_weights_leave_no_chunk_of_one():
    norm = Workload(
        lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)),
        lambda n: (torch.ones(n, 64), torch.ones(n, 64)),
        torch.nn.functional.mse_loss,
    )
    report = tuned(norm, 64, [400 * 2**10] * 3 + [72 * 2**10])
    assert all(1 not in option.chunk_sizes for option in report.options)


def test_a_loss_that_needs_the_whole_batch():
    workload = SMALL["wide_output"]()

    def loss(output, target):
        if output.device.index:
            raise RuntimeError("for device 0 only")
        return workload.loss(output, target)

    report = tuned(replace(workload, loss=loss), 200, [64 * GIB] * 2, with_alternatives=True)
    assert report.failures["gather=False"].startswith("RuntimeError: for device 0 only")
    assert {(o.gather, o.spread) for o in report.options} == {(True, False), (True, True)}
    assert "gather=False cannot be measured: RuntimeError: for device 0" in "".join(summary(report))


def test_capacities_that_are_not_given():
    report = tuned(SMALL["tied_transformer"](), 24, None, reserve=None)
    assert (report.goal, report.reserve_bytes) == ("headroom", 0)
    capacity, *others = report.capacity_bytes
    assert others == [capacity] * 3 and 0 <= capacity - max(report.even.peak_bytes) < 2**20
    assert report.largest_batch(report.even).batch_size == 24
    assert report.largest_batch(report.best).batch_size > 24


@pytest.mark.slow
def test_devices_that_are_given_are_measured_on():
    """Report the splits that ran, where memory ran out with others, as on accelerators."""
    workload = SMALL["tied_transformer"]()
    free = tuned(workload, 36, [GIB] * 3, goal="headroom")
    capacity = (max(free.best.peak_bytes) + max(free.even.peak_bytes)) // 2
    with emulate_devices(3, symbolic=True, memory=capacity) as devices:
        report = tuned(workload, 36, [capacity] * 3, devices=list(devices), goal="headroom")
    assert report.best.peak_bytes == free.best.peak_bytes
    assert report.even.ran_out == 0 and "out of memory" in report.even.out_of_memory
    for batch_size, memory, message in (
        (360, capacity, "a batch of 360 does not fit: .* the largest batch that fits is "),
        (4, "24MiB", "with .*, CUDA out of memory.* not even a batch of 1 fits"),
    ):
        with (
            emulate_devices(3, symbolic=True, memory=memory) as devices,
            pytest.raises(InfeasiblePlanError, match=message),
        ):
            tuned(workload, batch_size, [capacity] * 3, devices=list(devices))


@pytest.mark.slow
def test_alternatives_may_fit_where_no_batch_runs():
    """Tune ended as soon as no batch ran with the parameters on device 0."""
    with emulate_devices(4, symbolic=True, memory="240MiB") as devices:
        report = tuned(SMALL["mlp"](), 64, [240 << 20] * 4, devices=devices, with_alternatives=True)
    assert report.even.out_of_memory and report.best.spread


@pytest.mark.slow
def test_half_precision_is_measured():
    workload = SMALL["char_transformer"]()
    single = tuned(workload, 64, [8 * GIB] * 3)
    half = tuned(replace(workload, precision=torch.bfloat16), 64, [8 * GIB] * 3)
    assert (single.precision, half.precision) == (None, "torch.bfloat16")
    assert max(half.even.peak_bytes) < 0.8 * max(single.even.peak_bytes)


def test_a_model_that_reads_values():
    def forward(self, x):
        return self.layer(x) * (2 if x.sum().item() > 0 else 1)

    model = Lambda(forward, layer=torch.nn.Linear(4, 4))
    workload = Workload(model, lambda n: (torch.ones(n, 4), torch.ones(n, 4)), torch.nn.MSELoss())
    with pytest.raises(SymbolicValueError):
        tuned(workload, 12, [GIB] * 3)
    report = tuned(workload, 12, [GIB] * 3, symbolic=False)
    assert report.mode == "emulated"
    assert model.layer.weight.grad is None  # a copy was trained
    # Larger batches might not fit this machine.
    assert max(option.batch_size for option in report.options) == 4 * 12
    assert "Batches above 48 were not measured" in "".join(summary(report))


@pytest.mark.parametrize(
    ("batch_size", "capacities", "options", "error", "message"),
    [
        (0, [GIB] * 2, {}, ArgumentError, "batch_size must be at least 1, got 0"),
        (8, [GIB], {"devices": 2}, ArgumentError, "2 numbers, one for each device, got 1"),
        (8, [GIB], {}, ArgumentError, "two or more devices, got 1$"),
        (8, [GIB] * 2, {"reserve": GIB}, ArgumentError, "1.00 GiB of each device is kept free"),
        (8, [GIB] * 2, {"goal": "fast"}, ArgumentError, "goal must be speed, headroom or batch"),
        (64, [9 * 2**20] * 4, {}, InfeasiblePlanError, "not even a batch of 1"),
    ],
)
def test_what_cannot_be_tuned(batch_size, capacities, options, error, message):
    with pytest.raises(error, match=message):
        tuned(SMALL["mlp"](), batch_size, capacities, **options)
    with pytest.raises(TypeError, match=r"a Workload, .* got 'gpt2-small'"):
        tuned("gpt2-small", batch_size, capacities)


@pytest.mark.slow
def test_alternatives_add_to_what_is_asked_for():
    """The loss on each device, then with parameters on all devices as well."""
    report = tuned(SMALL["wide_output"](), 32, [8 * GIB] * 4, gather=False, with_alternatives=True)
    assert {(o.gather, o.spread) for o in report.options} == {(False, False), (False, True)}
    assert report.line == "BalancedDataParallel(None, model, gather=False)"
    both = tuned(SMALL["mlp"](), 32, [GIB] * 2, gather=False, spread=True, with_alternatives=True)
    assert {(o.gather, o.spread) for o in both.options} == {(False, True)}


@pytest.mark.slow
def test_a_loss_that_is_a_module():
    weight = torch.ones(10)
    workload = replace(SMALL["convolutions"](), loss=torch.nn.CrossEntropyLoss(weight=weight))
    reports = [tuned(workload, 8, [GIB] * 2, with_alternatives=True) for _ in range(2)]
    assert workload.loss.weight is weight
    assert reports[0].best.peak_bytes == reports[1].best.peak_bytes
    assert reports[0].failures == {}
