"""The observer measures training loops that know nothing of it."""

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
from balanced_dp.tuning.loop import Loop, StepsDone


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
    """Yield a loop and a model that it splits, while it records."""
    loop = Loop(options.pop("gpu0_bsz", "auto"), devices, **options)
    module = make_model("cpu") if module is None else module
    model = BalancedDataParallel(0, module.to(devices[0]))
    loop.adopt(model)
    with loop.recording():
        yield loop, model
    model.close()


def recorded(devices: Any, steps: Iterable[Sequence[int]], **options: Any) -> Loop:
    skipped = options.pop("skipped", None)
    with split_loop(devices, **options) as (loop, model):
        train(model, steps, skipped=skipped)
    return loop


def test_iterations_are_what_lies_between_steps(devices):
    loop = recorded(devices, [(32,)] * 3, gpu0_bsz=None)
    assert loop.num_iterations == 3
    [measured] = loop.options.values()
    assert measured.chunk_sizes == (8, 8, 8, 8) and measured.is_even
    assert sum(measured.uses[0].values()) == measured.peak_bytes[0]
    assert measured.uses[0]["optimizer state"] > 0


def test_a_value_is_compared_with_the_even_split(devices):
    loop = recorded(devices, [(32,)] * 4, gpu0_bsz=3)
    assert [*loop.options] == [(8, 8, 8, 8), (3, 10, 10, 9)]
    assert loop.last.gpu0_bsz == 3
    assert loop.num_parameters == sum(p.numel() for p in make_model("cpu").parameters())


@pytest.mark.parametrize("num_steps", [6, 12])
def test_the_search_ends_where_trying_every_value_does(num_steps, devices):
    loop = recorded(devices, [(32,)] * 12)
    assert loop.is_over
    found = min(loop.options.values(), key=lambda option: max(option.peak_bytes))
    for value in range(8):
        gc.collect()
        measured = recorded(devices, [(32,)] * 4, gpu0_bsz=value).last
        assert max(found.peak_bytes) <= max(measured.peak_bytes) * 1.01


def test_a_model_that_is_called_by_forward_is_observed_as_well(devices):
    """The iterations began one call late, so that each split had another one's peaks."""

    def peaks(call: Callable[[nn.Module], Callable[..., Any]]) -> dict[Any, Any]:
        with split_loop(devices) as (loop, model):
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(10):
                call(model)(torch.ones(32, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return {split: option.peak_bytes for split, option in loop.options.items()}

    expected = peaks(lambda model: model)
    gc.collect()
    assert peaks(lambda model: model.forward) == expected
    assert len(expected) > 2


def test_the_model_has_the_value_of_its_largest_batch(devices):
    """Scripts store it in their checkpoints."""
    with split_loop(devices) as (_, model):
        assert model.gpu0_bsz is None
        train(model, [(32,)] * 8)
        assert model.gpu0_bsz == model.chunk_sizes[0] < 8
        model(torch.ones(3, 64))
        assert model.gpu0_bsz == model.split(32)[0]


def test_two_optimizers_make_one_iteration(devices):
    loop = Loop(2, devices)
    first, second = (BalancedDataParallel(0, make_model(devices[0])) for _ in range(2))
    loop.adopt(first)
    loop.adopt(second)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (first, second)]
    with loop.recording():
        for _ in range(5):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                model(torch.ones(16, 64)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert loop.num_iterations == 5
    assert first.chunk_sizes == second.chunk_sizes == (2, 5, 5, 4)
    for model in (first, second):
        model.close()


def test_evaluation_is_not_counted(devices):
    with split_loop(devices, gpu0_bsz=None) as (loop, model):

        def evaluate() -> None:
            with torch.no_grad():
                model(torch.ones(4096, 64))

        train(model, [(32,)] * 3, after_step=evaluate)
    [measured] = loop.options.values()
    assert measured.batch_size == 32
    assert max(measured.peak_bytes) < 2**22


def test_gradient_accumulation_is_one_iteration(devices):
    loop = recorded(devices, [(8, 16, 12)] * 3, gpu0_bsz=None)
    assert loop.num_iterations == 3
    assert list(loop.options) == [(4, 4, 4, 4)]


@pytest.mark.parametrize("gpu0_bsz", ["auto", None])
def test_iterations_whose_data_ended_are_not_compared_with_others(gpu0_bsz, devices):
    """97 samples in batches of 32, two for each step: every second step has 32 and one."""

    def peaks(*steps: tuple[int, int]) -> dict[Any, Any]:
        options = recorded(devices, steps, gpu0_bsz=gpu0_bsz).options
        return {split: option.peak_bytes for split, option in options.items()}

    mixed = peaks(*[(32, 32), (32, 1)] * 8)
    gc.collect()
    accumulated = peaks(*[(32, 32)] * 16)
    gc.collect()
    if gpu0_bsz is None:  # else buckets of gradients depend on the splits before
        assert mixed == accumulated
    assert mixed.keys() == accumulated.keys()
    assert (len(mixed) > 2) == (gpu0_bsz == "auto")


def test_a_skipped_step_is_not_taken_for_accumulation(devices):
    """Else all later iterations would be left out, since none of them accumulates."""
    loop = recorded(devices, [(32,)] * 10, skipped=2)
    assert len(loop.options) > 2
    assert loop.is_over


def test_gradients_that_are_cleared_after_forward_do_not_begin_the_search_again(devices):
    with split_loop(devices, gpu0_bsz=3) as (loop, model):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            loss = model(torch.ones(32, 64)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        del loss
    assert [split[0] for split in loop.options] == [8, 3]


def test_the_loop_ends_where_it_would_begin_one_step_too_many(devices):
    loop = Loop("auto", devices, num_steps=2)
    steps = []
    with pytest.raises(StepsDone) as ended, loop.recording():
        train(make_model(devices[0]), [(32,)] * 5, after_step=lambda: steps.append(1))
    assert len(steps) == 2 and ended.value.code is None


def test_an_iteration_that_fails_is_kept_if_it_is_the_only_one(devices):
    loop = Loop("auto", devices)
    model = make_model(devices[0])
    with pytest.raises(KeyError), loop.recording():
        model(torch.ones(32, 64, device=devices[0]))
        raise KeyError
    assert loop.last.peak_bytes[0] > 0 == loop.last.peak_bytes[1]


def test_a_model_without_a_wrapper_is_measured_where_it_is(devices):
    loop = Loop("auto", devices)
    with loop.recording():
        train(make_model(devices[1]), [(32,)] * 3)
    assert loop.last.peak_bytes[1] > 0 == loop.last.peak_bytes[0]
    assert not loop.is_splitting


def test_capacities_follow_the_devices_of_the_model(devices):
    loop = Loop(None, devices, [1, 2, 3, 4])
    loop.adopt(BalancedDataParallel(0, make_model(devices[3]), [3, 1]))
    assert loop.devices == [devices[3], devices[1]]
    assert loop.budgets == [4, 2]
    assert loop.split(7) == split_batch(7, 2, even_share(7, 2))


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
