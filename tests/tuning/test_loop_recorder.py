"""The recorder measures training loops that know nothing of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module
from torch.optim import optimizer

from balanced_dp import BalancedDataParallel, emulate_devices
from balanced_dp.split import even_share, split_batch
from balanced_dp.tuning.loop_recorder import LoopRecorder, StepsDone
from balanced_dp.tuning.split_search import SplitSearch

from ..modules import Lambda


@pytest.fixture
def devices() -> Iterator[Any]:
    with emulate_devices(4) as devices:
        yield devices


def make_model(device: torch.device, features: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, 4 * features), nn.ReLU(), nn.Linear(4 * features, 8 * features)
    ).to(device)


def train(
    model: nn.Module,
    steps: Iterable[Sequence[int]],
    after_step: Callable[[], object] = lambda: None,
    skipped: int | None = None,
) -> None:
    """Train with the batches of each step, whose gradients accumulate."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters())
    for number, batch_sizes in enumerate(steps):
        for size in batch_sizes:
            model(torch.ones(size, 64, device=device)).square().mean().backward()
        if number != skipped:
            optimizer.step()
        optimizer.zero_grad()
        after_step()


@contextmanager
def split_loop(devices: Any, module: nn.Module | None = None, **options: Any) -> Iterator[Any]:
    """Yield a recorder and a model that it splits, while it records."""
    search = SplitSearch(options.pop("gpu0_bsz", "auto"), devices, **options)
    recorder = LoopRecorder(search)
    module = make_model("cpu") if module is None else module
    model = BalancedDataParallel(0, module.to(devices[0]))
    recorder.adopt(model)
    with recorder.recording():
        yield recorder, model
    model.close()


def recorded(devices: Any, steps: Iterable[Sequence[int]], **options: Any) -> LoopRecorder:
    skipped = options.pop("skipped", None)
    with split_loop(devices, **options) as (recorder, model):
        train(model, steps, skipped=skipped)
    return recorder


def test_iterations_are_what_lies_between_steps(devices):
    recorder = recorded(devices, [(32,)] * 3, gpu0_bsz=None)
    assert recorder.num_iterations == 3
    [measured] = recorder.search.measurements.values()
    assert measured.chunk_sizes == (8, 8, 8, 8) and measured.batch_size == 32
    assert measured.mode == "emulated"
    uses = measured.breakdown[0]
    assert sum(uses.values()) == measured.peak_bytes[0]
    assert uses["optimizer state"] > 0
    assert recorder.search.report() is None


def test_a_value_is_compared_with_the_even_split(devices):
    recorder = recorded(devices, [(32,)] * 4, gpu0_bsz=3)
    splits = [m.chunk_sizes for m in recorder.search.measurements.values()]
    assert splits == [(8, 8, 8, 8), (4, 10, 9, 9), (3, 10, 10, 9)]
    assert recorder.search.last.chunk_sizes == (3, 10, 10, 9)
    report = recorder.search.report()
    assert report.even.chunk_sizes == (8, 8, 8, 8)
    assert report.num_parameters == sum(p.numel() for p in make_model("cpu").parameters())


def test_the_model_has_the_value_of_its_largest_batch(devices):
    """Scripts store it in their checkpoints."""
    with split_loop(devices) as (_, model):
        assert model.gpu0_bsz is None
        train(model, [(32,)] * 8)
        assert model.gpu0_bsz == model.chunk_sizes[0] < 8
        model(torch.ones(3, 64))
        assert model.gpu0_bsz == model.split(32)[0]


@pytest.mark.parametrize("capacity", [12 * 2**20, 48 * 2**20])
def test_the_largest_batch_is_the_largest_that_runs(capacity, devices):
    report = recorded(devices, [(1024,)] * 9, capacities=[capacity] * 4).search.report()
    largest, value = report.plan.max_batch_size, report.plan.max_batch_gpu0_bsz

    def peak(batch_size: int) -> int:
        gc.collect()
        return max(recorded(devices, [(batch_size,)] * 4, gpu0_bsz=value).search.last.peak_bytes)

    assert peak(largest - 4) <= capacity < peak(largest + 4)


def test_a_second_split_is_tried_where_the_even_one_is_best(devices):
    module = nn.Sequential(make_model("cpu"), nn.Linear(512, 1))
    with split_loop(devices, module) as (recorder, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            model(torch.ones(4096, 64)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(recorder.search.measurements) >= 2
    assert recorder.search.report().plan.gpu0_bsz > 900


def test_two_optimizers_make_one_iteration(devices):
    recorder = LoopRecorder(SplitSearch(2, devices))
    first, second = (BalancedDataParallel(0, make_model(devices[0])) for _ in range(2))
    recorder.adopt(first)
    recorder.adopt(second)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (first, second)]
    with recorder.recording():
        for _ in range(5):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                model(torch.ones(16, 64)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert recorder.num_iterations == 5
    assert first.chunk_sizes == second.chunk_sizes == (2, 5, 5, 4)
    for model in (first, second):
        model.close()


def test_evaluation_is_not_counted(devices):
    with split_loop(devices, gpu0_bsz=None) as (recorder, model):

        def evaluate() -> None:
            with torch.no_grad():
                model(torch.ones(4096, 64))

        train(model, [(32,)] * 3, after_step=evaluate)
    [measured] = recorder.search.measurements.values()
    assert measured.batch_size == 32
    assert max(measured.peak_bytes) < 2**22


def test_gradient_accumulation_is_one_iteration(devices):
    recorder = recorded(devices, [(8, 16, 12)] * 3, gpu0_bsz=None)
    assert recorder.num_iterations == 3
    assert list(recorder.search.measurements) == [(16, 4)]


@pytest.mark.parametrize("gpu0_bsz", ["auto", None])
def test_iterations_whose_data_ended_are_not_compared_with_others(gpu0_bsz, devices):
    """97 samples in batches of 32, two for each step: every second step has 32 and one."""

    def peaks(*steps: tuple[int, int]) -> dict[Any, Any]:
        measured = recorded(devices, steps, gpu0_bsz=gpu0_bsz).search.measurements.values()
        return {m.gpu0_bsz: m.peak_bytes for m in measured if m.batch_size == 32}

    mixed = peaks(*[(32, 32), (32, 1)] * 5)
    gc.collect()
    assert mixed == peaks(*[(32, 32)] * 10)
    assert (len(mixed) > 2) == (gpu0_bsz == "auto")
    gc.collect()


def test_a_skipped_step_is_not_taken_for_accumulation(devices):
    """Else all later iterations would be left out, since none of them accumulates."""
    recorder = recorded(devices, [(32,)] * 10, skipped=2)
    assert len(recorder.search.measurements) > 2
    assert recorder.search.is_over


def test_gradients_that_are_cleared_after_forward_do_not_begin_the_search_again(devices):
    with split_loop(devices, gpu0_bsz=3) as (recorder, model):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            loss = model(torch.ones(32, 64)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        del loss
    assert [first for _, first in recorder.search.measurements] == [8, 4, 3]


def test_the_loop_ends_where_it_would_begin_one_step_too_many(devices):
    recorder = LoopRecorder(SplitSearch("auto", devices), num_steps=2)
    steps = []
    with pytest.raises(StepsDone) as ended, recorder.recording():
        train(make_model(devices[0]), [(32,)] * 5, after_step=lambda: steps.append(1))
    assert len(steps) == 2 and ended.value.code is None


def test_an_iteration_that_fails_is_kept_if_it_is_the_only_one(devices):
    recorder = LoopRecorder(SplitSearch("auto", devices))
    model = make_model(devices[0])
    with pytest.raises(KeyError), recorder.recording():
        model(torch.ones(32, 64, device=devices[0]))
        raise KeyError
    assert recorder.search.last.peak_bytes[0] > 0 == recorder.search.last.peak_bytes[1]


def test_a_model_without_a_wrapper_is_measured_where_it_is(devices):
    recorder = LoopRecorder(SplitSearch("auto", devices))
    with recorder.recording():
        train(make_model(devices[1]), [(32,)] * 3)
    assert recorder.search.last.peak_bytes[1] > 0 == recorder.search.last.peak_bytes[0]
    assert not recorder.is_splitting and recorder.search.report() is None


def test_chunks_of_a_class_that_knows_none_of_torchs_are_counted():
    """CenterNet has one, which is a plain module and gets its batch as a dict."""

    def split(self: Any, batch: torch.Tensor) -> torch.Tensor:
        chunks = nn.parallel._functions.Scatter.apply([0, 1, 2], [2, 5, 5], 0, batch)
        replicas = nn.parallel.replicate(self.module, [0, 1, 2])
        inputs = [({"number": 3, "batch": chunk},) for chunk in chunks]
        outputs = nn.parallel.parallel_apply(replicas, inputs, None, [0, 1, 2])
        return nn.parallel.gather(outputs, 0)

    with emulate_devices(4, as_cuda=True) as devices:
        recorder = LoopRecorder(SplitSearch("auto", devices))
        layers = make_model(devices[0])
        inner = Lambda(lambda self, batch: self.layers(batch["batch"][:1]), layers=layers)
        model = Lambda(split, module=inner)
        with recorder.recording():
            train(model, [(12,)] * 3)
        assert (
            recorder.search.last.chunk_sizes == (2, 5, 5, 0)
            and recorder.search.last.batch_size == 12
        )
        del layers, inner, model, recorder


def test_capacities_follow_the_devices_of_the_model(devices):
    recorder = LoopRecorder(SplitSearch(None, devices, [1, 2, 3, 4]))
    recorder.adopt(BalancedDataParallel(0, make_model(devices[3]), [3, 1]))
    assert recorder.devices == [devices[3], devices[1]]
    assert recorder.search.capacities == [4, 2]
    assert recorder.search.split(7) == split_batch(7, 2, even_share(7, 2))


def test_recording_leaves_no_hooks(devices):
    def hooks() -> list[int]:
        return [
            len(found)
            for found in (
                module._global_forward_pre_hooks,
                optimizer._global_optimizer_pre_hooks,
                optimizer._global_optimizer_post_hooks,
            )
        ]

    before = hooks()
    recorded(devices, [(32,)])
    assert hooks() == before
