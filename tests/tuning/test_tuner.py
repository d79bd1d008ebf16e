"""Compare plans with what trying everything finds, on emulated devices."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from balanced_dp import (
    ArgumentError,
    InfeasiblePlanError,
    SymbolicValueError,
    Workload,
    emulate_devices,
    split_batch,
    tune,
)
from balanced_dp.planning.split_planner import utilizations
from balanced_dp.report.tables import summary
from balanced_dp.search import MAX_SPLITS
from balanced_dp.tuning.open_devices import open_devices
from balanced_dp.tuning.step_benchmark import step_meter

from ..modules import Lambda
from ..parallel.test_auto import Loop
from .small_workloads import SMALL

GIB = 2**30
PLENTY = 64 * GIB


def tuned(workload, batch_size, capacities, *, reserve=0, with_alternatives=False, **options):
    return tune(
        workload,
        batch_size,
        capacities=capacities,
        reserve=reserve,
        emulate=True,
        with_alternatives=with_alternatives,
        **options,
    )


def try_all(workload, batch_size, num_devices):
    """Return the peaks of every gpu0_bsz, by the value."""
    even = -(-batch_size // num_devices)
    with open_devices(num_devices, emulate=True) as devices, step_meter(workload, devices) as meter:
        return {g: meter.measure(batch_size, g).peak_bytes for g in range(even + 1)}


def value_of_auto(workload, batch_size, num_devices):
    """Return the value that training with gpu0_bsz="auto" ends with."""
    with emulate_devices(num_devices, symbolic=True) as devices:
        loop = Loop(workload, devices)
        values = loop.follow(batch_size, 2 * (MAX_SPLITS + 1) + 1)
        assert loop.search.is_over
        assert sum(a != b for a, b in itertools.pairwise(values)) <= MAX_SPLITS
        del loop
    return values[-1]


@pytest.mark.parametrize(
    ("name", "num_devices", "batch_size"),
    [
        *((name, 2, 9) for name in ("mlp", "wide_output", "convolutions", "char_transformer")),
        *((name, 8, 40) for name in ("wide_output", "convolutions")),
        ("mlp", 3, 50),
        pytest.param("recurrent", 4, 24, marks=pytest.mark.slow),
        pytest.param("tied_transformer", 6, 14, marks=pytest.mark.slow),
        ("loss_inside", 5, 18),
    ],
)
def test_the_plan_and_auto_are_what_trying_everything_finds(name, num_devices, batch_size):
    """With three times the capacity that the batch needs, so that the largest can be tried."""
    workload = SMALL[name]()
    peaks = try_all(workload, batch_size, num_devices)
    capacity = 3 * max(map(max, peaks.values()))
    report = tuned(workload, batch_size, [capacity] * num_devices)
    best, plan = min(map(max, peaks.values())), report.plan
    assert max(peaks[plan.gpu0_bsz]) <= best * 1.01
    assert plan.chunk_sizes == split_batch(batch_size, num_devices, plan.gpu0_bsz)
    assert report.chosen.peak_bytes == peaks[plan.gpu0_bsz]
    assert report.prediction_error <= 0.01
    assert len(report.measurements) < 25
    assert max(peaks[value_of_auto(workload, batch_size, num_devices)]) <= best * 1.01

    assert batch_size < plan.max_batch_size >= plan.even_max_batch_size
    within, beyond = plan.max_batch_size - num_devices, plan.max_batch_size + num_devices
    even = -(-beyond // num_devices)
    near = range(max(0, plan.max_batch_gpu0_bsz - 2), min(even, plan.max_batch_gpu0_bsz + 3) + 1)
    with (
        open_devices(num_devices, memory=capacity, emulate=True) as devices,
        step_meter(workload, devices) as meter,
    ):
        assert meter.measure(within, plan.max_batch_gpu0_bsz).status == "ok"
        assert {meter.measure(beyond, gpu0_bsz).status for gpu0_bsz in near} == {"oom"}


@pytest.mark.parametrize("name", SMALL)
def test_predictions_hold_where_nothing_was_measured(name):
    """Check predictions around the plan, at batch sizes and splits that were not fitted.

    The largest batch, which was fitted, is much larger.
    """
    workload, batch_size, num_devices = SMALL[name](), 60, 3
    report = tuned(workload, batch_size, [PLENTY] * num_devices)
    assert report.prediction_error <= 0.01
    assert len(report.measurements) < 25
    fitted = {(m.batch_size, m.gpu0_bsz) for m in report.measurements}
    with open_devices(num_devices, emulate=True) as devices, step_meter(workload, devices) as meter:
        for size in (batch_size, 90):
            even = -(-size // num_devices)
            near = round(report.plan.gpu0_bsz * size / batch_size)
            for gpu0_bsz in {max(0, near - 2), min(even, near + 2), even - 1}:
                if (size, gpu0_bsz) in fitted:
                    continue
                measured = meter.measure(size, gpu0_bsz).peak_bytes
                predicted = report.model.predict(split_batch(size, num_devices, gpu0_bsz))
                assert predicted == pytest.approx(measured, rel=0.01), (size, gpu0_bsz)


@pytest.fixture(scope="module")
def alike():
    return tuned(SMALL["char_transformer"](), 64, [8 * GIB] * 3)


def test_devices_of_unlike_capacity_are_filled_alike(alike):
    small = tuned(SMALL["char_transformer"](), 64, [2 * GIB, 8 * GIB, 8 * GIB])
    assert small.plan.gpu0_bsz < alike.plan.gpu0_bsz
    assert small.plan.capacity_bytes == (2 * GIB, 8 * GIB, 8 * GIB)
    assert alike.plan.weighted is None
    assert not any(option.device_weights for option in alike.options)


def test_a_share_for_each_device_uses_what_gpu0_bsz_cannot():
    capacities = [8 * GIB, 4 * GIB, 2 * GIB]
    report = tuned(SMALL["char_transformer"](), 256, capacities)
    weighted = report.plan.weighted
    first, second, third = weighted.chunk_sizes
    assert first > second > third > 0
    best = replace(report, goal="headroom").best
    assert best.chunk_sizes == weighted.chunk_sizes
    assert best.measured.peak_bytes == pytest.approx(weighted.predicted_bytes, rel=0.01)
    assert best.line.endswith(f"device_weights=[{first}, {second}, {third}])")
    full = max(utilizations(report.chosen.peak_bytes, capacities))
    assert best.utilization(capacities) < 0.8 * full
    largest = replace(report, goal="batch").best
    assert largest.measured.peak_bytes == pytest.approx(largest.predicted_bytes, rel=0.01)
    assert largest.max_batch_size > 1.3 * report.plan.max_batch_size


def test_weights_leave_no_chunk_that_batch_norm_refuses():
    """A weight of one sample would."""
    norm = Workload(
        lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)),
        lambda n: (torch.ones(n, 64), torch.ones(n, 64)),
        torch.nn.functional.mse_loss,
    )
    seen = []
    report = tuned(
        norm,
        64,
        [400 * 2**10] * 3 + [72 * 2**10],
        on_measurement=seen.append,
    )
    assert tuple(seen) == report.measurements
    assert all(1 not in m.chunk_sizes for m in report.measurements)


def test_what_no_value_balances_is_told():
    report = tuned(SMALL["wide_output"](), 2000, [PLENTY] * 4, with_alternatives=True)
    plan = report.plan
    [sentence] = plan.advice
    assert sentence.startswith(
        "with gathered outputs no value of gpu0_bsz balances this: without any samples device 0"
    )
    assert "Gathering the outputs of 2000 samples and their loss costs device 0" in sentence
    floor_bytes, *_ = report.model.predict(split_batch(2000, 4, 0))
    assert plan.predicted_bytes[0] == pytest.approx(floor_bytes, rel=0.01)
    assert report.advice[0] == sentence
    inside, spread = (
        min(options, key=lambda option: max(option.peak_bytes))
        for other in report.alternatives
        if (options := [option for option in other.options if option.batch_size == 2000])
    )
    assert max(spread.peak_bytes) > max(inside.peak_bytes)  # most of it is a single weight
    assert max(inside.peak_bytes) < 0.5 * max(report.chosen.peak_bytes)
    assert max(inside.peak_bytes) < 1.2 * min(inside.peak_bytes)
    balanced = tuned(SMALL["loss_inside"](), 64, [PLENTY] * 4)
    assert balanced.advice == ()  # nor that anything is a guess
    assert balanced.alternatives == ()


def test_a_loss_that_is_one_for_the_whole_batch_is_not_advised_on_each_device():
    workload = SMALL["wide_output"]()

    def loss(output, target):
        if output.device.index:
            raise RuntimeError("for device 0 only")
        return workload.loss(output, target)

    report = tuned(replace(workload, loss=loss), 200, [PLENTY] * 2, with_alternatives=True)
    inside, spread = report.alternatives
    assert inside.options == ()
    assert inside.reason.startswith("RuntimeError: for device 0 only")  # Python 3.10 has no notes
    assert (spread.gather, spread.spread, spread.reason) == (True, True, None)
    assert len(report.advice) == 1


def test_capacities_that_are_not_given_are_what_the_even_split_needs():
    report = tuned(SMALL["tied_transformer"](), 24, None, reserve=None)
    assert len(report.plan.chunk_sizes) == 4
    [capacity] = set(report.plan.capacity_bytes)
    assert 0 <= capacity - max(report.even.peak_bytes) < 2**20
    assert report.plan.even_max_batch_size == 24 < report.plan.max_batch_size
    assert report.plan.reserve_bytes == 0


def test_half_a_gib_is_kept_free_of_capacities_that_are_given():
    report = tuned(SMALL["mlp"](), 24, [GIB] * 3, reserve=None)
    assert report.plan.reserve_bytes == GIB // 2


def test_devices_that_are_given_are_measured_on():
    """Plan from the splits that ran, where memory ran out with others, as on accelerators."""
    workload = SMALL["tied_transformer"]()
    free = tuned(workload, 36, [GIB] * 3)
    capacity = (max(free.chosen.peak_bytes) + max(free.even.peak_bytes)) // 2
    with emulate_devices(3, symbolic=True, memory=capacity) as devices:
        report = tuned(workload, 36, [capacity] * 3, devices=list(devices))
    assert {m.status for m in report.measurements} == {"ok", "oom"}
    assert report.chosen.peak_bytes == free.chosen.peak_bytes
    assert report.even.status == "oom"
    for batch_size, memory, message in (
        (360, capacity, "a batch of 360 does not fit: memory ran out"),
        (4, "24MiB", "not even a batch of 1 ran: CUDA out of memory"),
    ):
        with (
            emulate_devices(3, symbolic=True, memory=memory) as devices,
            pytest.raises(InfeasiblePlanError, match=message),
        ):
            tuned(workload, batch_size, [capacity] * 3, devices=list(devices))


def test_half_precision_is_planned_with(alike):
    workload = replace(SMALL["char_transformer"](), precision=torch.bfloat16)
    half = tuned(workload, 64, [8 * GIB] * 3)
    assert half.precision == "torch.bfloat16"
    assert alike.precision is None
    assert max(half.even.peak_bytes) < 0.8 * max(alike.even.peak_bytes)
    assert half.prediction_error <= 0.01


class Branching(torch.nn.Linear):
    """Read a value."""

    def forward(self, x):
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


def test_a_model_that_reads_values_is_measured_where_they_are_computed():
    workload = Workload(
        Branching(4, 4), lambda n: (torch.ones(n, 4), torch.ones(n, 4)), torch.nn.MSELoss()
    )
    with pytest.raises(SymbolicValueError):
        tuned(workload, 12, [GIB] * 3)
    report = tuned(workload, 12, [GIB] * 3, symbolic=False)
    assert report.chosen.mode == "emulated"
    assert workload.model.weight.grad is None  # a copy was trained
    # Larger batches might not fit this machine.
    assert max(m.batch_size for m in report.measurements) == 4 * 12
    assert report.plan.max_batch_size > 1000 < report.best.max_batch_size
    assert "Batches above 48 were not measured: what fits is predicted." in summary(report)


def nonlinear():
    """Need memory that jumps with the chunk."""

    def forward(self, x):
        return self.layer(x) + x.new_zeros((len(x) % 3) * 100_000 + 1).sum()

    return Workload(
        lambda: Lambda(forward, layer=torch.nn.Linear(4, 4)),
        lambda n: ((torch.zeros(n, 4),), {}, None),
        lambda output, _: output.sum(),
    )


def test_a_workload_without_linear_terms_is_measured_at_every_candidate():
    workload = nonlinear()
    report = tuned(workload, 12, [2**24] * 3)
    assert not report.model.is_accurate
    assert {m.gpu0_bsz for m in report.measurements if m.batch_size == 12} == set(range(5))
    peaks = try_all(workload, 12, 3)
    assert max(peaks[report.plan.gpu0_bsz]) == min(map(max, peaks.values()))
    assert "So the choice is among the measured values" in report.advice[-1]


def test_of_many_candidates_some_are_measured():
    report = tuned(nonlinear(), 300, [2**24] * 3)
    values = {m.gpu0_bsz for m in report.measurements if m.batch_size == 300}
    assert values >= set(range(0, 101, 4))
    assert len(values) < 40


@pytest.mark.parametrize(
    ("batch_size", "capacities", "reserve", "message"),
    [
        (0, [GIB, GIB], 0, "batch_size must be at least 1, got 0"),
        (8, [GIB], 0, "two or more devices"),
        (8, [GIB, GIB // 2], GIB // 2, r"reserve of 512.00 MiB, got 1.00 GiB, 512.00 MiB"),
        (8, [GIB] * 3, 0, "one for each of 2 devices, got 3"),
    ],
)
def test_what_cannot_be_planned(batch_size, capacities, reserve, message):
    with pytest.raises(ArgumentError, match=message):
        tuned(SMALL["mlp"](), batch_size, capacities, reserve=reserve, devices=2)


@pytest.mark.parametrize("with_alternatives", [False, True])
def test_measurements_are_told_as_they_come(with_alternatives):
    seen = []
    report = tuned(
        SMALL["convolutions"](),
        16,
        [GIB] * 2,
        with_alternatives=with_alternatives,
        on_measurement=seen.append,
    )
    assert tuple(seen[: len(report.measurements)]) == report.measurements
    assert (len(seen) > len(report.measurements)) == with_alternatives


def test_what_is_asked_for_is_part_of_each_option():
    """The loss on each device, then with parameters on all devices as well."""
    report = tuned(SMALL["wide_output"](), 32, [8 * GIB] * 4, gather=False, with_alternatives=True)
    [spread] = report.alternatives
    assert (spread.gather, spread.spread) == (False, True)
    assert report.line == "BalancedDataParallel(None, model, gather=False)"
    both = tuned(SMALL["mlp"](), 32, [GIB] * 2, gather=False, spread=True, with_alternatives=True)
    assert both.alternatives == ()


@pytest.mark.parametrize("capacities", [[GIB] * 4, [2 * GIB, GIB, GIB]])
def test_spread_parameters_are_planned_with(capacities):
    """On devices of unlike memory, each holds parameters in proportion to it."""
    workload = SMALL["tied_transformer"]()
    report = tuned(workload, 48, capacities, gather=False, spread=True)
    home = tuned(workload, 48, capacities, gather=False)
    assert report.model.is_accurate
    assert report.prediction_error <= 0.02
    assert report.chosen.peak_bytes[0] < home.chosen.peak_bytes[0]
    assert report.plan.max_batch_size >= home.plan.max_batch_size
    assert report.line == ("BalancedDataParallel(None, model, gather=False, spread=True)")


def test_what_fits_only_with_spread_parameters_is_the_best_option():
    workload = SMALL["tied_transformer"]()
    spread = tuned(workload, 8, [GIB] * 4, gather=False, spread=True)
    capacity = round(1.1 * max(spread.chosen.peak_bytes))
    report = tuned(workload, 8, [capacity] * 4, with_alternatives=True)
    assert report.line.endswith("gather=False, spread=True)")
    assert report.best.fits([capacity] * 4)
    assert max(report.plan.predicted_bytes) > capacity  # that of what was asked


def test_a_workload_whose_loss_is_a_module_keeps_it():
    weight = torch.ones(10)
    workload = replace(SMALL["convolutions"](), loss=torch.nn.CrossEntropyLoss(weight=weight))
    reports = [tuned(workload, 8, [GIB] * 2, with_alternatives=True) for _ in range(2)]
    assert workload.loss.weight is weight
    assert reports[0].chosen.peak_bytes == reports[1].chosen.peak_bytes
    assert [other.reason for other in reports[0].alternatives] == [None, None]


@pytest.mark.parametrize("gather", [True, False])
def test_only_what_fits_is_recommended(gather):
    message = r"device 0 needs .* lacks .*; not even a batch of 1 fits$"
    with pytest.raises(InfeasiblePlanError, match=message):
        tuned(SMALL["wide_output"](), 64, [150 * 2**20] * 4, gather=gather, with_alternatives=True)


def test_what_does_not_fit_says_which_batch_would():
    workload = SMALL["tied_transformer"]()
    with pytest.raises(InfeasiblePlanError, match=r"; \d+ fit with BalancedDataParallel\("):
        tuned(workload, 4096, [GIB // 16] * 4, with_alternatives=True)
