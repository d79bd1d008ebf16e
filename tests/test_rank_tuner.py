"""What a rank of torch's own DistributedDataParallel takes, and the plan that rests on it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from balanced_dp import InfeasiblePlanError, Workload, emulate_devices, measure_step
from balanced_dp.measurement import open_devices, step_meter
from balanced_dp.rank_tuner import _alone, _Rank, tune_ranks

from .small_workloads import char_transformer, wide_output

MiB = 2**20


@pytest.fixture
def measured_share():
    def measure(workload, *sizes):
        with (
            open_devices(1, emulate=True) as devices,
            _alone() as group,
            step_meter(workload, devices, wrap=lambda net: _Rank(net, group)) as meter,
        ):
            return [meter.measure(size) for size in sizes], meter.gradient_bytes

    return measure


def layers() -> Workload:
    return Workload(
        model=lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))),
        make_batch=lambda size: ((torch.zeros(size, 512),), {}, torch.zeros(size, 512)),
        loss=mse_loss,
    )


def test_buckets_are_held_from_the_beginning(measured_share):
    """Where activations are the peak, the gradients of one device alone are not there yet."""
    [ranked], gradient_bytes = measured_share(layers(), 4000)
    with emulate_devices(1, symbolic=True) as devices:
        alone = measure_step(layers(), 4000, 4000, devices)
    more = ranked.peak_bytes[0] - alone.peak_bytes[0]
    assert 0.9 * gradient_bytes <= more <= 1.3 * gradient_bytes  # a gradient, and its bucket
    assert gradient_bytes == 8 * (512 * 512 + 512) * 4


@pytest.mark.parametrize("workload", [layers, wide_output, char_transformer])
def test_predictions_are_what_is_measured(measured_share, workload):
    capacity = 4096 * MiB
    report = tune_ranks(workload(), 96, [2 * capacity, capacity, capacity])
    others = (5, 17, 61, 200)
    found, _ = measured_share(workload(), *others)
    for measurement in found:
        predicted = report.model.predict(measurement.batch_size)
        assert abs(predicted / measurement.peak_bytes[0] - 1) < 0.02
    for predicted, held in zip(report.plan.predicted_bytes, report.measured_bytes, strict=True):
        assert abs(predicted / held - 1) < 0.01


def test_unused_and_frozen_parameters_and_unlike_ranks():
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)
            self.frozen = nn.Linear(64, 64).requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.used(x))

    workload = Workload(Partly, lambda n: ((torch.zeros(n, 64),), {}, torch.zeros(n, 64)), mse_loss)
    report = tune_ranks(workload, 2000, [4 * MiB, 2 * MiB])
    assert report.bucket_bytes == 2 * (64 * 64 + 64) * 4
    assert report.plan.chunk_sizes[0] > report.plan.chunk_sizes[1] > 0
    assert report.plan.max_batch_size > report.plan.even_max_batch_size


def test_both_engines_are_held_together():
    report = tune_ranks(wide_output(), 64, [3000 * MiB] * 4)
    gathered, on_device = report.balanced
    assert (gathered.gather, on_device.gather) == (True, False)
    assert gathered.plan.max_batch_size < report.plan.max_batch_size
    assert report.no_balanced == ()


def test_what_one_process_cannot_do_is_said():
    """The gathered outputs do not fit."""
    report = tune_ranks(wide_output(), 1300, [2600 * MiB] * 8)
    assert any("InfeasiblePlanError" in reason for reason in report.no_balanced)


def test_what_does_not_fit_is_an_error():
    with pytest.raises(InfeasiblePlanError, match="whatever its share"):
        tune_ranks(layers(), 8, [8 * MiB] * 2)
    with pytest.raises(InfeasiblePlanError, match="does not fit"):
        tune_ranks(layers(), 10**5, [64 * MiB] * 2)
    assert not dist.is_initialized()


def test_inside_a_process_group_that_is_there():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        report = tune_ranks(layers(), 8, [64 * MiB] * 2)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    assert sum(report.plan.chunk_sizes) == 8
