"""The wrapper changes where the work is done and nothing else: outputs and gradients are equal."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from balanced_dp import BalancedDataParallel
from balanced_dp.parallel import copies, nested

from ..devices import DISTINCT, KINDS, kinds_of_splits, open_devices
from ..modules import CASES, Case, Lambda

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


# Loops, also in streams of the user's.


class Tied(nn.Module):
    """A small language model with tied weights, a frozen layer and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.norms = nn.ModuleList([nn.LayerNorm(6), nn.BatchNorm1d(6).eval()])
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("small", torch.arange(6, dtype=torch.int16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        hidden = self.tokens(y.clamp(0)) + x[:, :6] * self.small
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = hidden + layer(norm(hidden)).tanh()
        return nn.functional.cross_entropy(self.head(hidden), y)


def copied(self: Lambda, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """While they arrive, it had two dictionaries of parameters: one was set, the other was read."""
    layer = self.layer
    if not torch.is_grad_enabled():
        layer = copy.deepcopy(layer)
        layer.weight = nn.Parameter(2 * layer.weight / 2)
    return layer(x).square().mean()


def skips(self: Lambda, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Gradients of a bucket are handed on when the one before it is sent, or if it never is."""
    for index, layer in enumerate(self.layers):
        x = x if index % 3 == 1 else layer(x).tanh()
    return x.square().mean()


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "copied": lambda: Lambda(copied, layer=nn.Linear(8, 3)),
    "skips": lambda: Lambda(skips, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(9))),
}


def steps(model: nn.Module, parameters: list[Any], batches: list[Any]) -> Iterator[torch.Tensor]:
    """Nothing makes the host wait, as reading a loss would."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            yield from (loss.detach(), model(*batch))


def accumulated(
    model: nn.Module, parameters: list[Any], batches: list[Any]
) -> Iterator[torch.Tensor]:
    """The last batch's graph brings gradients back at once, since the block has ended."""
    with getattr(model, "accumulate", nullcontext)():
        for batch in batches:
            with side_streams(len(parameters) % 2 * 4):
                loss = model(*batch)
                if batch is not batches[-1]:
                    loss.backward()
    loss.backward()
    yield loss.detach()


def some_only(
    model: nn.Module, parameters: list[Any], batches: list[Any]
) -> Iterator[torch.Tensor]:
    some = parameters[::6]
    for batch in batches:
        model(*batch).backward(inputs=some)
        model(*batch).backward()
        yield from torch.autograd.grad(model(*batch), some)


def side_streams(num_devices: int) -> AbstractContextManager[None]:
    """Makes new streams of the stand-in's devices current, as a user who prefetches does.

    They come after the current ones, which come after them at the end.
    """
    stack = ExitStack()
    for index in range(num_devices if "stand-in" in KINDS else 0):
        device = torch.device("stand_in", index)
        main, side = torch.accelerator.current_stream(device), torch.Stream(device)
        side.wait_stream(main)
        stack.callback(main.wait_stream, side)
        stack.enter_context(torch.get_device_module(device).stream(side))
    return stack


SETTINGS: list[tuple[str, int | None, int, Any, dict[str, Any]]] = [
    *((kind, gpu0_bsz, 0, "cpu", {}) for kind in KINDS for gpu0_bsz in (0, 2)),
    *((kind, None, 0, 0, {"spread": True}) for kind in DISTINCT),
    *(("stand-in", 1, 4, "cpu", {}), ("stand-in", 4, 1, 1, {})),
    *(("stand-in", 0, 4, 0, {"spread": True}), ("stand-in", 1, 0, "cpu", {"first": "cpu"})),
]


@pytest.mark.filterwarnings("ignore:gpu0_bsz=4 has no effect")
@pytest.mark.parametrize(
    ("kind", "gpu0_bsz", "streams", "where", "options"), [s for s in SETTINGS if s[0] in KINDS]
)
@pytest.mark.parametrize("train", [steps, accumulated, some_only])
@pytest.mark.parametrize("name", LOSSES)
def test_training_is_that_of_the_module(
    name, train, gpu0_bsz, streams, where, options, devices, monkeypatch
):
    monkeypatch.setattr(copies, "LEAST_BYTES", 0)  # several buckets, though models are small
    devices = [torch.device(options.get("first", devices[0])), *devices[1:4]]
    plain = LOSSES[name]().double()
    module = copy.deepcopy(plain).to(devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, devices, spread=options.get("spread", False))
    batches = [(torch.randn(n, 8).double(), torch.arange(n) % 12 - 1) for n in (13, 3, 1, 8)]
    for _, labels in batches:
        labels[labels < 0] = -100 if len(labels) > 1 else 0
    own = [[p for p in each.parameters() if p.requires_grad] for each in (plain, module)]
    expected = [*train(plain, own[0], batches)]
    with side_streams(streams):
        inputs = [[t.to(devices[where] if where != "cpu" else where) for t in b] for b in batches]
        found = [*train(model, own[1], inputs)]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    torch.testing.assert_close(module.state_dict(), dict(plain.state_dict()), **TOLERANCE)
    torch.testing.assert_close(*([p.grad for p in each] for each in own), **TOLERANCE)
    del found, inputs
