"""Test that a ``Loop`` measures training loops that do not know that they are measured."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module

from balanced_dp import BalancedDataParallel, emulate_devices
from balanced_dp.split import even_share, split_batch
from balanced_dp.tuning.loop import Loop


@pytest.fixture
def devices() -> Iterator[Any]:
    with emulate_devices(4) as devices:
        yield devices


def make_model(device: torch.device | str) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 512)).to(device)


def train(model: nn.Module, steps: Any, after_step: Any = lambda: None) -> None:
    """Train with steps that each accumulate the gradients of several batches.

    ``steps`` has, for each step, the sizes of its batches.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters())
    for batch_sizes in steps:
        for size in batch_sizes:
            model(torch.ones(size, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


@contextmanager
def split_loop(devices: Any, module: nn.Module | None = None, **options: Any) -> Iterator[Any]:
    """Yield a ``Loop`` that is recording, and a model whose batches it splits."""
    loop = Loop(options.pop("gpu0_bsz", "auto"), devices, **options)
    module = make_model("cpu") if module is None else module
    model = BalancedDataParallel(0, module.to(devices[0]))
    loop.adopt(model)
    with loop.recording():
        yield loop, model


def recorded(devices: Any, steps: Iterable[Sequence[int]], **options: Any) -> Loop:
    with split_loop(devices, **options) as (loop, model):
        train(model, steps)
    return loop


def test_iterations_are_what_lies_between_steps(devices):
    before = len(module._global_forward_pre_hooks)
    loop = recorded(devices, [(32,)] * 3, gpu0_bsz=None)
    assert len(module._global_forward_pre_hooks) == before
    assert loop.num_iterations == 3
    [measured] = loop.options
    assert measured.chunk_sizes == (8, 8, 8, 8) and measured.is_even
    assert sum(measured.uses[0].values()) == measured.peak_bytes[0]
    assert measured.uses[0]["optimizer state"] > 0


def test_a_value_and_the_even_split_take_turns(devices):
    """The even split was measured once, before an evaluation whose output stayed bound."""
    kept: list[torch.Tensor] = []

    def peaks(size: int) -> dict[int | None, int]:
        with split_loop(devices, gpu0_bsz=5) as (loop, model):

            def keep() -> None:
                if loop.num_iterations == 3:
                    kept[:] = [torch.ones(size, device=devices[0])]

            train(model, [(32,)] * 7, after_step=keep)
        return {option.gpu0_bsz: option.peak_bytes[0] for option in loop.options}

    without = peaks(0)
    gc.collect()
    found = peaks(2**18)
    assert found == {value: without[value] + 2**20 for value in (None, 5)}
    kept.clear()


@pytest.mark.parametrize("period", [2, 3, 4])
def test_heavy_steps_count_for_a_value_and_the_even_split(devices, period):
    """Turns of two steps each, of which one counted, never met every second step."""
    kept: list[torch.Tensor] = []
    with split_loop(devices, gpu0_bsz=5) as (loop, model):

        def keep() -> None:
            size = 2**18 * (loop.num_iterations % period == 0)
            kept[:] = [torch.ones(size, device=devices[0])]

        train(model, [(32,)] * 15, after_step=keep)
    kept.clear()
    assert len(loop.options) == 2
    assert [option.uses[0]["other"] for option in loop.options] == [2**20] * 2
    [note] = loop.notes()
    assert note.startswith("Steps with the same split peaked between 3.21 MiB and 4.21 MiB, so")


def test_a_value_without_a_step_of_the_largest_batch(devices):
    """It was said to have no effect."""
    loop = recorded(devices, [(size,) for size in (32, 32, 64, 64, 64)], gpu0_bsz=5)
    assert [*loop.notes()] == ["gpu0_bsz=5 was not measured with the largest batch."]


def test_the_model_has_the_value_of_its_largest_batch(devices):
    """Scripts store it in their checkpoints."""
    with split_loop(devices) as (_, model):
        assert model.gpu0_bsz is None
        train(model, [(32,)] * 8)
        assert model.gpu0_bsz == model.chunk_sizes[0] < 8
        model(torch.ones(3, 64))
        assert model.gpu0_bsz == model.split(32)[0]


def test_batches_of_two_sizes_in_turn(devices):
    """The smaller batches changed the split, so that no step of the larger ones ever counted."""
    loop = recorded(devices, [(128,), (77,)] * 4)
    assert {option.batch_size for option in loop.options} == {128}


def test_evaluation_is_not_counted(devices):
    with split_loop(devices, gpu0_bsz=None) as (loop, model):
        evaluate = torch.no_grad()(lambda: model(torch.ones(4096, 64)))
        train(model, [(32,)] * 3, after_step=evaluate)
    [measured] = loop.options
    assert measured.batch_size == 32
    assert max(measured.peak_bytes) < 2**22


@pytest.mark.slow
@pytest.mark.parametrize("gpu0_bsz", ["auto", None])
def test_iterations_whose_data_ended(gpu0_bsz, devices):
    """97 samples in batches of 32, two for each step: every second step has 32 and one."""

    def peaks(*steps: tuple[int, int]) -> dict[Any, Any]:
        options = recorded(devices, steps, gpu0_bsz=gpu0_bsz).options
        return {option.chunk_sizes: option.peak_bytes for option in options}

    mixed = peaks(*[(32, 32), (32, 1)] * 8)
    gc.collect()
    accumulated = peaks(*[(32, 32)] * 16)
    gc.collect()
    if gpu0_bsz is None:  # else buckets of gradients depend on the splits before
        assert mixed == accumulated
    assert mixed.keys() == accumulated.keys()
    assert (len(mixed) > 2) == (gpu0_bsz == "auto")


@pytest.mark.slow
@pytest.mark.parametrize("gpu0_bsz", ["auto", 5])
def test_two_models_and_optimizers_share_a_split(gpu0_bsz, devices):
    """As in a GAN whose first optimizer steps twice: splits were measured in different steps."""
    with split_loop(devices, gpu0_bsz=gpu0_bsz) as (loop, model):
        loop.adopt(other := BalancedDataParallel(3, nn.Linear(64, 4096).to(devices[0])))
        one, two = [torch.optim.AdamW(each.parameters()) for each in (model, other)]
        for each, optimizer in [(model, one), (model, one), (other, two)] * 20:
            each(torch.ones(32, 64, device=devices[0])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert loop.num_iterations == 21 and len(loop.options) > (gpu0_bsz == "auto") + 1
    assert model.split(32) == other.split(32) == loop.split(32)
    assert all(min(option.peak_bytes) > other.module.weight.nbytes for option in loop.options)


def keep_outputs(model: nn.Module, num_steps: int) -> tuple[int, ...]:
    """Train, and keep an unused output of each step until the next step replaces it.

    Return the peak of each device in the last step.
    """
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        for device in model.devices:
            torch.get_device_module(device).reset_peak_memory_stats(device)
        output, unused = model(torch.ones(512, 64)), model(torch.ones(512, 64))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del output, unused
    return tuple(torch.get_device_module(d).max_memory_allocated(d) for d in model.devices)


@pytest.mark.slow
@pytest.mark.parametrize("gpu0_bsz", [0, 50, "auto"])
def test_outputs_that_outlive_a_step(gpu0_bsz, devices):
    """Splits were measured together with what was left of a step with another split."""
    with split_loop(devices, gpu0_bsz=gpu0_bsz) as (loop, model):
        keep_outputs(model, 14)
    del model
    assert len(loop.options) > 1
    for option in loop.options:
        gc.collect()
        model = BalancedDataParallel(option.gpu0_bsz, make_model(devices[0]))
        assert keep_outputs(model, 4) == pytest.approx(option.peak_bytes, rel=0.01)
        del model


def test_one_model_after_another(devices):
    """As in cross-validation: the first stayed in memory, and steps of the second did not count."""
    loop = Loop(None, devices)
    with loop.recording():
        for fold in (1, 2):
            model = BalancedDataParallel(0, make_model(devices[0]))
            loop.adopt(model)
            train(model, [(32,)] * 3)
            assert loop.num_iterations == 3 * fold
            del model
            assert torch.get_device_module(devices[0]).memory_allocated(devices[0]) == 0
    assert len(loop.options) == 1


def test_modules_in_workers_of_a_loader_begin_no_iteration(devices):
    with Loop(None, devices, num_steps=0).recording():
        assert len([*torch.utils.data.DataLoader("abc", num_workers=1, collate_fn=nn.Identity())])


def test_capacities_follow_the_devices_of_the_model(devices):
    loop = Loop(None, devices, [1, 2, 3, 4])
    loop.adopt(BalancedDataParallel(0, make_model(devices[3]), [3, 1]))
    assert loop.devices == [devices[3], devices[1]]
    assert loop.budgets == [4, 2]
    assert loop.split(7) == split_batch(7, 2, even_share(7, 2))
