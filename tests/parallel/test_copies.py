"""Test that weights are copied once to each device, and that gradients are copied back once.

The parameters are on one device, or spread over all devices.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from balanced_dp import BalancedDataParallel, emulate_devices
from balanced_dp.emulation.machine import current_machine
from balanced_dp.parallel import copies as buckets_of
from balanced_dp.parallel.shared_weights import ParameterCopies

from ..devices import DISTINCT
from ..modules import Lambda, assert_same_gradients


class Copied:
    """A call returns the bytes copied between emulated devices since the last call."""

    def __init__(self):
        self._before = Counter()

    def __call__(self):
        now = Counter(current_machine().copied_bytes())
        since, self._before = now - self._before, now
        # Inputs come from the CPU here: what goes from device to device is weights and gradients,
        # but for the outputs, of which there are four bytes a device.
        return {(a.index, b.index): n for (a, b), n in since.items() if a.type == b.type == "lazy"}


def mlp():
    """Return a perceptron whose output is a number, so that almost nothing is gathered."""
    layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3, bias=False))
    return Lambda(lambda self, x: self.layers(x).square().mean(), layers=layers)


NUM_BYTES = 4 * (5 * 16 + 16 + 16 * 3)
SCALAR = 4


def out(num_bytes, devices=(1, 2, 3)):
    return {(0, i): num_bytes for i in devices if num_bytes}


def back(num_bytes, devices=(1, 2, 3)):
    return {(i, 0): num_bytes for i in devices}


@pytest.mark.filterwarnings("ignore:.*no call with gradients:balanced_dp.BalanceWarning")
def test_weights_go_out_once_and_gradients_back(emulated):
    """In a block, weights once for all of its calls."""
    model, copied = BalancedDataParallel(1, mlp().to(emulated[0]), emulated[:4]), Copied()
    x = torch.randn(9, 5)
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
                    assert copied() == out(num_bytes) | back(SCALAR)
                    assert torch.lazy.memory_allocated(emulated[1]) >= NUM_BYTES
            assert torch.lazy.memory_allocated(emulated[1]) == 0
    with model.accumulate():
        for _ in range(4):
            loss = model(x)
            loss.backward()
        assert copied() == out(NUM_BYTES + 4 * SCALAR) | back(4 * SCALAR + 4 * NUM_BYTES)
        del loss
    with pytest.raises(ValueError, match="enough"), model.accumulate():
        with model.no_sync():  # they may be nested, and left by an exception
            model(x).backward()
        copied()
        model(x).backward()
        assert copied() == out(SCALAR) | back(SCALAR + NUM_BYTES)
        raise ValueError("enough")
    model(x)
    assert copied() == out(NUM_BYTES) | back(SCALAR)
    model.gpu0_bsz = 0  # a device gets its copies when it has samples
    with model.shared_weights(), torch.no_grad():
        for batch_size, devices in ((2, (1, 2)), (9, (3,))):
            model(x[:batch_size])
            own = [i for i, size in enumerate(model.chunk_sizes) if size]
            assert copied() == out(NUM_BYTES, devices) | back(SCALAR, own)


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
    module = nn.Linear(4, 3).requires_grad_(change != "unfreeze").to(emulated[0])
    model, x = BalancedDataParallel(1, module, emulated[:4]), torch.ones(9, 4)
    message = r"replaced, frozen, unfrozen or changed inside shared_weights\(\).*after the block"
    with model.shared_weights():
        with modes[0]():
            model(x)
        CHANGES_IN_A_BLOCK[change](module)
        with modes[1](), pytest.raises(RuntimeError, match=message):
            model(x)


# Buckets.


@given(st.lists(st.integers(0, 2**20), max_size=60))
def test_every_tensor_is_in_one_bucket(sizes):
    found = buckets_of.fill_buckets({i: torch.empty(n, device="meta") for i, n in enumerate(sizes)})
    assert [i for bucket in found for i in bucket] == list(range(len(sizes)))
    limit = min(buckets_of.BUCKET_BYTES, 4 * sum(sizes) // 8)
    for bucket in found:
        assert len(bucket) == 1 or sum(4 * sizes[i] for i in bucket) <= limit


def test_frozen_weights_do_not_count_for_buckets():
    """Beside large ones the adapters would all be in one."""
    frozen = nn.Parameter(torch.randn(256, 256), requires_grad=False)
    parameters = [frozen, *(nn.Parameter(torch.randn(8, 8)) for _ in range(16))]
    other = torch.device("cpu", 1)
    copies, _ = ParameterCopies().on([other], parameters)
    assert len({c.grad_fn for c in copies[other] if c.requires_grad}) == 8


# Hooks, attributes and layouts of parameters.


def partly():
    """Return a module with two small parameters in one bucket, of which forward uses only one."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    layer = nn.Linear(40, 2)
    return Lambda(lambda self, x: self.layer(x) * self.used, layer=layer, used=used, unused=unused)


@pytest.mark.parametrize("kind", DISTINCT)
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("gpu0_bsz", [0, 2])
def test_hooks_see_whole_gradients_of_what_is_used(devices, gpu0_bsz, accumulates):
    module = partly().double()
    reference = copy.deepcopy(module)
    model = BalancedDataParallel(gpu0_bsz, module.to(devices[0]), devices[:4])
    x = torch.randn(10, 40, dtype=torch.double, requires_grad=True)
    seen = {model: [], reference: []}
    for call, net in ((model, module), (reference, reference)):
        net.layer.register_forward_hook(lambda module, args, output: output * 2)
        net.layer.register_full_backward_hook(lambda module, grad_input, grad_output: None)
        for p in net.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
            own = seen[call]
            p.register_post_accumulate_grad_hook(lambda p, own=own: own.append(p.grad.shape))
        with call.accumulate() if accumulates and call is model else contextlib.nullcontext():
            for _ in range(2):
                call(x).mean().backward()
    assert sorted(seen[model]) == sorted(seen[reference])
    assert_same_gradients(module, reference)


@pytest.mark.parametrize("kind", ["emulated", "cpu"])
@pytest.mark.parametrize("gpu0_bsz", [0, 1])
def test_attributes_and_layouts_travel(devices, gpu0_bsz):
    def forward(self, x):
        seen.append(self.conv.weight.stride())
        return self.conv(x) * self.conv.weight.scale * self.factor.scale

    seen, conv = [], nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    module = Lambda(forward, conv=conv)
    module.register_buffer("factor", torch.ones(()))
    module = module.to(devices[0])
    conv.weight.scale, module.factor.scale = 3.0, 5.0
    model, x = BalancedDataParallel(gpu0_bsz, module, devices[:3]), torch.randn(7, 3, 8, 8)
    for has_gradients in (False, True):
        with torch.set_grad_enabled(has_gradients):
            output = model(x)
        torch.testing.assert_close(output, 15 * conv(x.to(devices[0])))
    output.sum().backward()
    assert {*seen} == {conv.weight.stride()} == {conv.weight.grad.stride()}


# Homes on all devices: a model trains as with all parameters on one.


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
    st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=4),
)
@example([8] * 200, [1, 4, 4, 4])
def test_homes_hold_what_their_memory_allows(widths, memory):
    """Parameters keep their identity, and those of a module stay together. Scripts ask the first
    one for the device of targets: it stays on the first device, though another is larger.
    """
    with emulate_devices(len(memory), memory=[f"{n}GiB" for n in memory], symbolic=True) as devices:
        module = nn.ModuleList(nn.Linear(width, 10) for width in widths).to(devices[0])
        parameters = [*module.parameters()]
        model = BalancedDataParallel(None, module, spread=True)
        assert all(map(operator.is_, module.parameters(), parameters))
        homes = [p.device for p in model.parameters()]
        assert homes[::2] == homes[1::2]
        assert parameters[0].device == devices[0]
        total = sum(p.nbytes for p in parameters)
        largest = max(sum(p.nbytes for p in child.parameters()) for child in module)
        for device, own in zip(devices, memory, strict=True):
            held = sum(p.nbytes for p in parameters if p.device == device)
            share = own / sum(memory) * (total + len(memory) * largest)
            assert held <= share + total / (2 * len(memory)) + largest
        del model, module, parameters


def test_a_spread_module_runs_on_one_device(emulated):
    """By itself it does not run. Moving the wrapper to its first device spreads it again."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to(emulated[0])
    plain = copy.deepcopy(module)
    BalancedDataParallel(1, module, emulated[:2], spread=True)
    model = BalancedDataParallel(1, module, emulated[:2], spread=True)  # and again
    homes, x = [p.device for p in model.parameters()], torch.ones(3, 4, device=emulated[0])
    assert len(set(homes)) == 2
    assert model.to(emulated[0]) is model
    assert homes == [p.device for p in model.parameters()]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        module(x)
    with model.on_one_device() as alone:
        assert alone is module
        assert torch.equal(alone(x), plain(x))
    assert homes == [p.device for p in model.float().parameters()]
    assert torch.allclose(model(x), plain(x))


@pytest.mark.parametrize("where", ["cpu", "lazy:0"])
def test_models_and_optimizers_may_be_older(where):
    """No device holds the model. Parameters, tied ones too, keep their identity and gradient, and
    the state that an optimizer has is moved by loading it.
    """
    with emulate_devices(4, memory="9MiB" if where == "cpu" else None) as devices:
        layers = [nn.Linear(512, 512) for _ in range(4)]  # 3 MiB, 12 with AdamW
        layers[3].weight = layers[0].weight
        module = nn.Sequential(*layers, nn.BatchNorm1d(512)).to(where)
        parameters, optimizer = [*module.parameters()], torch.optim.AdamW(module.parameters())
        layers[1].weight.grad = torch.ones(512, 512, device=where)
        optimizer.step()
        model = BalancedDataParallel(None, module, spread=True)
        assert all(map(operator.is_, module.parameters(), parameters))
        assert len({p.device for p in parameters}) == 4
        assert layers[1].weight.grad.device == layers[1].weight.device
        assert module[4].running_mean.device == devices[0]
        optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(2):
            model(torch.ones(8, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for parameter, state in optimizer.state.items():
            assert state["exp_avg"].device == parameter.device
        del model, module, layers, parameters, parameter, optimizer, state


def test_a_parameter_that_left_the_devices_is_an_error(emulated):
    model = BalancedDataParallel(None, nn.Linear(4, 2).to(emulated[0]), emulated[:2], spread=True)
    model.module.weight = nn.Parameter(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=r"lazy:0, lazy:1 \(device_ids\), but .* device: cpu"):
        model(torch.ones(3, 4))
