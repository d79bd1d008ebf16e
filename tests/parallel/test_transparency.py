"""The wrapper changes where the work is done and nothing else: outputs and gradients are equal."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from balanced_dp import BalancedDataParallel
from balanced_dp.parallel import nested

from ..devices import KINDS, kinds_of_splits, open_devices
from ..modules import CASES, Case

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10, "check_device": False}


def fetch(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (value.to_dense() if value.is_sparse else value).detach().cpu()


def run(
    call: Any, module: nn.Module, inputs: Any, device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the output's leaves and the gradients of inputs and parameters, on the CPU."""
    args, kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda t: t.to(device, copy=True).requires_grad_(t.is_floating_point()),
        inputs,
    )
    outputs = dict(nested.leaves(call(*args, **kwargs)))
    # Weights that differ for each element, so that no two of them can be confused.
    sum(
        (t * torch.arange(1, 1 + t.numel()).double().cos().view(t.shape).to(t.device)).sum()
        for t in outputs.values()
        if isinstance(t, torch.Tensor) and t.requires_grad
    ).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    gradients |= {n: t.grad for n, t in nested.leaves((args, kwargs)) if hasattr(t, "grad")}
    return pytree.tree_map(fetch, (outputs, gradients))


def assert_same(actual: Any, expected: Any) -> None:
    """Tensors are close, the rest is equal, and so is the structure."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(ours[name], value, **TOLERANCE)
            else:
                assert ours[name] == value


def check_transparent(
    case: Case,
    devices: list[torch.device],
    batch_size: int,
    values: Sequence[int],
    spread: bool = False,
) -> None:
    """Compares each value of gpu0_bsz with the bare module, which is run once."""
    torch.manual_seed(batch_size)
    reference = case.make_module().double()
    inputs = pytree.tree_map_only(
        torch.Tensor,
        lambda t: t.double() if t.is_floating_point() else t,
        case.make_inputs(batch_size),
    )
    modules = [copy.deepcopy(reference).to(devices[0]) for _ in values]
    # Some of CUDA's kernels, as that of weight_norm, are less exact than the CPU's.
    where = devices[0] if devices[0].type == "cuda" else torch.device("cpu")
    expected = run(reference.to(where), reference, inputs, where)
    for gpu0_bsz, module in zip(values, modules, strict=True):
        parallel = BalancedDataParallel(
            gpu0_bsz, module, device_ids=devices, spread=spread, **case.options
        )
        assert_same(run(parallel, module, inputs, devices[0]), expected)


@pytest.mark.filterwarnings("ignore:gpu0_bsz", "ignore:.*it uses Pow")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_outputs_and_gradients_are_those_of_the_module(case, kind):
    """What failed before, in balanced forks or in nn.DataParallel: batches smaller than the number
    of devices or of fewer chunks, a first device without samples, a single device, calls with
    keywords only, a list as first argument, a keyword that is no tensor (9 samples on 4 devices),
    and 0-dim outputs with ``dim=1``.
    """
    if kind == "stand-in" and case is CASES["sparse embedding"]:
        pytest.skip("the stand-in has no sparse tensors")
    for num_devices in (1, 2, 4):
        with open_devices(kind, num_devices) as devices:
            for batch_size in (1, 4, 9):
                even = math.ceil(batch_size / num_devices)
                # A single device has the whole batch, whatever the value.
                values = range(even + 1) if num_devices > 1 else (0, even)
                check_transparent(case, devices, batch_size, values)
            if len(set(devices)) == 4:
                check_transparent(case, devices, 9, [2], spread=True)


@pytest.mark.filterwarnings("ignore:gpu0_bsz", "ignore:.*it uses Pow")
@given(
    kind=st.sampled_from(KINDS),
    num_devices=st.integers(1, 6),
    batch_size=st.integers(1, 20),
    gpu0_bsz=st.integers(0, 20),
    spread=st.booleans(),
    data=st.data(),
)
def test_any_split_of_any_batch(kind, num_devices, batch_size, gpu0_bsz, spread, data):
    case = CASES[data.draw(st.sampled_from(["mlp", "nested inputs", "scalar loss", "dim=1"]))]
    with open_devices(kind, num_devices) as devices:
        check_transparent(case, devices, batch_size, [gpu0_bsz], spread)


# Beyond one backward pass.


def wrapped_mlp(devices, gpu0_bsz=1):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    reference = copy.deepcopy(module)
    return BalancedDataParallel(gpu0_bsz, module.to(devices[0]), device_ids=devices), reference


@pytest.mark.parametrize(("kind", "gpu0_bsz"), kinds_of_splits([0, 1, 2]), indirect=["kind"])
def test_first_and_second_derivatives_pass_gradcheck(devices, gpu0_bsz):
    parallel, _ = wrapped_mlp(devices[:3], gpu0_bsz)
    x = torch.randn(7, 3, dtype=torch.double).to(devices[0]).requires_grad_()
    assert torch.autograd.gradcheck(parallel, (x,))
    assert torch.autograd.gradgradcheck(parallel, (x,))


def gradient_penalty(model, x):
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def autograd_grad(model, x):
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    return list(found)


@pytest.mark.parametrize("gradients", [gradient_penalty, autograd_grad])
def test_gradients_however_they_are_computed(devices, gradients):
    parallel, reference = wrapped_mlp(devices[:3])
    x = torch.randn(7, 3, dtype=torch.double)
    found = gradients(parallel, x.to(devices[0], copy=True).requires_grad_())
    expected = gradients(reference, x.requires_grad_())
    torch.testing.assert_close(found, expected, **TOLERANCE)
