"""Weights go out once and gradients come back once, and only where they have to."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from balanced_dp import (
    BalancedDataParallel,
)
from balanced_dp.emulation.machine import current_machine
from balanced_dp.parallel import copies as buckets_of
from balanced_dp.parallel.shared_weights import ParameterCopies

from ..devices import DISTINCT
from ..modules import Lambda, assert_same_gradients

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


class Copied:
    """The bytes copied between devices since the last question."""

    def __init__(self) -> None:
        self._before: Counter[tuple[torch.device, torch.device]] = Counter()

    def __call__(self) -> dict[tuple[int, int], int]:
        now = Counter(current_machine().copied_bytes())
        since, self._before = now - self._before, now
        # Inputs come from the CPU here: what goes from device to device is weights and gradients,
        # but for the outputs, of which there are four bytes a device.
        return {(a.index, b.index): n for (a, b), n in since.items() if a.type == b.type == "lazy"}


def mlp() -> nn.Module:
    """Its output is a number, so that next to nothing is gathered."""
    layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3, bias=False))
    return Lambda(lambda self, x: self.layers(x).square().mean(), layers=layers)


NUM_BYTES = 4 * (5 * 16 + 16 + 16 * 3)
SCALAR = 4


def wrapped(devices, module=None, num_devices=4, **options):
    module = (mlp() if module is None else module).to(devices[0])
    return BalancedDataParallel(1, module, devices[:num_devices], **options)


def beside(devices, module=None):
    """Returns a wrapped module, the same module bare on the CPU, and a batch; all in float64."""
    bare = (mlp() if module is None else module).double()
    return wrapped(devices, copy.deepcopy(bare)), bare, torch.randn(9, 5, dtype=torch.double)


def out(num_bytes, devices=(1, 2, 3)):
    return {(0, i): num_bytes for i in devices}


def back(num_bytes, devices=(1, 2, 3)):
    return {(i, 0): num_bytes for i in devices}


@pytest.mark.filterwarnings("ignore:.*no call with gradients:balanced_dp.BalanceWarning")
def test_weights_go_out_once_and_gradients_come_back(emulated):
    """In a block, weights once for all of its calls, and gradients at its end."""
    model, copied, x = wrapped(emulated), Copied(), torch.randn(9, 5)
    for _ in range(3):
        loss = model(x)
        assert copied() == out(NUM_BYTES) | back(SCALAR)
        loss.backward()
        assert copied() == out(SCALAR) | back(NUM_BYTES)  # the loss's gradient goes out
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            first = model(x)
            assert copied() == out(NUM_BYTES) | back(SCALAR)
            with model.shared_weights():
                for num_bytes in (NUM_BYTES, 0, 0):
                    assert model(x) == first
                    assert copied() == (out(num_bytes) if num_bytes else {}) | back(SCALAR)
                    assert torch.lazy.memory_allocated(emulated[1]) >= NUM_BYTES
            assert torch.lazy.memory_allocated(emulated[1]) == 0
    with model.accumulate():
        for _ in range(4):
            loss = model(x)
            loss.backward()
        assert copied() == out(NUM_BYTES + 4 * SCALAR) | back(4 * SCALAR)
    assert copied() == back(NUM_BYTES)
    with pytest.raises(ValueError, match="enough"), model.accumulate():
        with model.no_sync():  # they may be nested, and left by an exception
            model(x).backward()
        copied()
        raise ValueError("enough")
    assert copied() == back(NUM_BYTES)


def test_a_device_that_had_no_samples_before(emulated):
    """It gets its copies when it has some."""
    model, copied = wrapped(emulated), Copied()
    model.gpu0_bsz = 0
    with model.shared_weights():
        model(torch.randn(2, 5))
        assert model.chunk_sizes == (0, 1, 1, 0)
        assert copied() == out(NUM_BYTES, (1, 2)) | back(SCALAR, (1, 2))
        model(torch.randn(9, 5))
        assert copied() == out(NUM_BYTES, (3,)) | back(SCALAR)


CHANGES_IN_A_BLOCK = {
    "write": lambda module: module.weight.detach().mul_(2),
    "freeze": lambda module: module.requires_grad_(False),
    "unfreeze": lambda module: module.requires_grad_(True),
    "replace": lambda module: setattr(
        module, "weight", nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    ),
}


MODES = [torch.no_grad, torch.enable_grad]


@pytest.mark.parametrize("change", CHANGES_IN_A_BLOCK)
@pytest.mark.parametrize("modes", [MODES[:1] * 2, MODES, MODES[1:] * 2])
def test_weights_that_change_in_a_block(emulated, modes, change):
    """Parameters that were unfrozen got the gradients of the first chunk alone."""
    model = wrapped(emulated, nn.Linear(4, 3).requires_grad_(change != "unfreeze"))
    x = torch.ones(9, 4)
    message = r"replaced, frozen, unfrozen or changed inside shared_weights\(\).*after the block"
    with model.shared_weights():
        with modes[0]():
            model(x)
        CHANGES_IN_A_BLOCK[change](model.module)
        with modes[1](), pytest.raises(RuntimeError, match=message):
            model(x)


# Buckets.


@given(st.lists(st.integers(0, 2**20), max_size=60))
def test_every_tensor_is_in_one_bucket(sizes):
    filled = buckets_of.fill_buckets([torch.empty(size, device="meta") for size in sizes])
    assert [i for bucket in filled for i in bucket] == list(range(len(sizes)))
    limit = min(buckets_of.BUCKET_BYTES, 4 * sum(sizes) // 8)
    for bucket in filled:
        num_bytes = sum(4 * sizes[i] for i in bucket)
        assert len(bucket) == 1 or num_bytes <= limit


def test_memory_formats_survive(emulated):
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).to(emulated[0])
    model = BalancedDataParallel(1, module, emulated[:3])
    seen = []
    module.register_forward_hook(lambda m, *_: seen.append(m.weight.stride()))
    model(torch.randn(7, 3, 8, 8)).sum().backward()
    assert seen == [module.weight.stride()] * 3
    assert module.weight.grad.stride() == module.weight.stride()


# Accumulation.


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_in_a_block_is_an_error_at_its_end(emulated, foreach, make):
    """The step was one of the first device's gradients; the others' came into the next."""
    model, reference, x = beside(emulated)
    optimizer = make(model.parameters(), lr=0.1, foreach=foreach)
    with pytest.raises(RuntimeError, match="changed inside shared_weights"), model.accumulate():
        model(x).backward()
        optimizer.step()
    reference(x).backward()  # what was computed is there
    assert_same_gradients(model.module, reference)


# Hooks, attributes and parts of the parameters.


def partly() -> nn.Module:
    """Uses some of its small parameters, which share a bucket."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    layer = nn.Linear(40, 2)
    return Lambda(lambda self, x: self.layer(x) * self.used, layer=layer, used=used, unused=unused)


@pytest.mark.parametrize("kind", DISTINCT)
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("gpu0_bsz", [0, 2])
def test_hooks_see_whole_gradients_and_only_of_what_was_used(devices, gpu0_bsz, accumulates):
    module = partly().double()
    reference = copy.deepcopy(module)
    model = BalancedDataParallel(gpu0_bsz, module.to(devices[0]), devices[:4])
    seen = []
    for net in (module, reference):
        net.layer.register_forward_hook(lambda module, args, output: output * 2)
        net.layer.register_full_backward_hook(lambda module, grad_input, grad_output: None)
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    x = torch.randn(10, 40, dtype=torch.double, requires_grad=True)
    for _ in range(2):
        reference(x).mean().backward()
    expected = list(seen)
    seen.clear()
    with model.accumulate() if accumulates else contextlib.nullcontext():
        for _ in range(2):
            model(x).mean().backward()
    assert sorted(seen) == sorted(expected)
    assert_same_gradients(module, reference)


def test_frozen_weights_do_not_count_for_the_buckets():
    """Beside large ones the adapters would all be in one."""
    frozen = nn.Parameter(torch.randn(256, 256), requires_grad=False)
    parameters = [frozen, *(nn.Parameter(torch.randn(8, 8)) for _ in range(16))]
    other = torch.device("cpu", 1)
    copies, _ = ParameterCopies().on([other], parameters)
    assert len({c.grad_fn for c in copies[other] if c.requires_grad}) == 8


@pytest.mark.parametrize("kind", ["emulated", "cpu"])
@pytest.mark.parametrize("gpu0_bsz", [0, 1])
def test_attributes_of_parameters_and_buffers_travel_with_their_copies(devices, gpu0_bsz):
    module = Lambda(lambda self, x: x * self.weight * self.weight.scale * self.factor.scale)
    module.weight = nn.Parameter(torch.ones(2))
    module.register_buffer("factor", torch.ones(()))
    module = module.to(devices[0])
    module.weight.scale, module.factor.scale = 3.0, 5.0
    model = BalancedDataParallel(gpu0_bsz, module, devices[:3])
    for has_gradients in (True, False):
        with torch.set_grad_enabled(has_gradients):
            assert model(torch.ones(6, 2)).unique().tolist() == [15]


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
def test_gradients_of_inputs_only_in_a_block_that_puts_them_off(devices, gpu0_bsz):
    """``autograd.grad`` got device 0's alone, and ``backward(inputs=...)`` gave more than asked."""
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double().to(devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, devices[:3])
    x = torch.randn(8, 3, dtype=torch.double)
    weight = module[0].weight
    [expected] = torch.autograd.grad(model(x).sum(), weight)
    with model.shared_weights():
        [found] = torch.autograd.grad(model(x).sum(), weight)
        torch.testing.assert_close(found, expected)
        model(x).sum().backward(inputs=[weight])
        model(x).sum().backward(inputs=[weight])
    torch.testing.assert_close(weight.grad, 2 * expected)
    assert [p.grad is None for p in module.parameters()] == [False, True, True, True]
