"""Test that the wrapper returns the outputs and gradients of the bare module."""

from __future__ import annotations

import copy
import math
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from balanced_dp import BalancedDataParallel
from balanced_dp.devices import has_streams
from balanced_dp.parallel import copies, nested

from ..devices import DISTINCT, KINDS, open_devices
from ..modules import CASES, Lambda


def slow(parameter):
    return pytest.param(parameter, marks=pytest.mark.slow)


TOLERANCE = {"rtol": 1e-10, "atol": 1e-10, "check_device": False}


def run(call, module, inputs, device):
    """Call ``call``, and return two dicts by name.

    The first has the tensors of the output and the gradients of inputs and of the parameters of
    ``module``, on the CPU. The second has the values in the output that are not tensors.
    """
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: t.to(device, copy=True).requires_grad_(t.is_floating_point()), inputs
    )
    others = dict(nested.leaves(call(*args, **kwargs)))
    found = {n: others.pop(n) for n, t in [*others.items()] if isinstance(t, Tensor)}
    # Weights that differ for each element, so that no two of them can be confused.
    sum(
        (t * torch.arange(1, 1 + t.numel()).double().cos().view(t.shape).to(t.device)).sum()
        for t in found.values()
        if t.requires_grad
    ).backward()
    leaves = [*module.named_parameters("grad"), *nested.leaves((args, kwargs), "inputs")]
    found |= {n: t.grad for n, t in leaves if getattr(t, "grad", None) is not None}
    dense = {n: t.to_dense() if t.is_sparse else t for n, t in found.items()}
    return {n: t.detach().cpu() for n, t in dense.items()}, others


def check_transparent(case, devices, batch_size, values, spread=False):
    """Compare a model with the bare module, for each ``gpu0_bsz`` in ``values``."""
    torch.manual_seed(batch_size)
    reference = case.make_module().double()
    inputs = pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, case.make_inputs(batch_size)
    )
    modules = [copy.deepcopy(reference).to(devices[0]) for _ in values]
    # Some of CUDA's kernels, as that of weight_norm, are less exact than the CPU's.
    where = devices[0] if devices[0].type == "cuda" else torch.device("cpu")
    expected, others = run(reference.to(where), reference, inputs, where)
    for gpu0_bsz, module in zip(values, modules, strict=True):
        parallel = BalancedDataParallel(gpu0_bsz, module, devices, spread=spread, **case.options)
        found = run(parallel, module, inputs, devices[0])
        torch.testing.assert_close(found[0], expected, **TOLERANCE)
        assert found[1] == others


@pytest.mark.filterwarnings("ignore:gpu0_bsz", "ignore:.*it uses Pow")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("num_devices", [4, *map(slow, (1, 2))])
def test_outputs_and_gradients_are_those_of_the_module(case, num_devices, kind):
    """What failed before, in balanced forks or in nn.DataParallel: batches smaller than the number
    of devices or of fewer chunks, a first device without samples, a single device, calls with
    keywords only, a list as first argument, a keyword that is no tensor (9 samples on 4 devices),
    and 0-dim outputs with ``dim=1``.
    """
    if kind == "stand-in" and case is CASES["sparse embedding"]:
        pytest.skip("the stand-in has no sparse tensors")
    with open_devices(kind, num_devices) as devices:
        for batch_size in (1, 4, 9):
            even = math.ceil(batch_size / num_devices)
            # A single device has the whole batch, whatever the value.
            values = range(even + 1) if num_devices > 1 else (0, even)
            check_transparent(case, devices, batch_size, values)
        if len(set(devices)) == 4:
            check_transparent(case, devices, 9, [2], spread=True)


# Loops, also in streams of the user's.


class Tied(nn.Module):
    """A small language model with tied weights, a frozen layer and buffers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.norms = nn.ModuleList([nn.LayerNorm(6), nn.BatchNorm1d(6).eval()])
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("small", torch.arange(6, dtype=torch.int16))

    def forward(self, x, y):
        self.num_calls += 1
        hidden = self.tokens(y.clamp(0)) + x[:, :6] * self.small
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = hidden + layer(norm(hidden)).tanh()
        return nn.functional.cross_entropy(self.head(hidden), y)


def copied(self, x, _):
    """Copy a layer while its parameters arrive, and set a parameter of the copy.

    Such a copy once had two dictionaries of parameters: one was set, the other was read.
    """
    layer = self.layer
    if not torch.is_grad_enabled():
        layer = copy.deepcopy(layer)
        layer.weight = nn.Parameter(2 * layer.weight / 2)
    return layer(x).square().mean()


def skips(self, x, _):
    """Skip some layers, so that there are buckets without gradients.

    The gradients of a bucket are passed on when those of the bucket before it have been sent, or if
    that bucket is never sent.
    """
    for index, layer in enumerate(self.layers):
        x = x if index % 3 == 1 else layer(x).tanh()
    return x.square().mean()


def reads_elsewhere(self, x, _):
    """Read weights before and after the modules that own them run, in several streams."""
    with side_streams([x.device], comes_back=False) as record:
        self.shift.sum()
        record(self.shift)
    x = (x + self.shift) @ self.last.weight  # arrives last
    with side_streams([x.device]) as record:
        beside = self.last(x) + self.first.bias
        record(x, *self.last.parameters(), self.first.bias)  # for backward
    record(beside)
    return self.between(self.first(beside)).square().mean()


LOSSES = {
    "tied": Tied,
    "copied": lambda: Lambda(copied, layer=nn.Linear(8, 3)),
    "skips": lambda: Lambda(skips, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(9))),
    "reads elsewhere": lambda: Lambda(
        reads_elsewhere,
        shift=nn.Parameter(torch.ones(8), requires_grad=False),  # read where nobody waits
        first=nn.Linear(8, 8),
        between=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        last=nn.Linear(8, 8),
    ),
}


def steps(model, parameters, batches):
    """Train without reading a value, so that the host never waits for a device."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            yield from (loss.detach(), model(*batch))


def accumulated(model, parameters, batches):
    """Accumulate gradients in a block of ``model.accumulate``; run one backward pass after it.

    In this last backward pass, gradients are brought back immediately, since the block has ended.
    """
    devices = getattr(model, "devices", ()) if len(parameters) % 2 else ()
    with getattr(model, "accumulate", nullcontext)():
        for batch in batches:
            with side_streams(devices):
                loss = model(*batch)
                if batch is not batches[-1]:
                    loss.backward()
    loss.backward()
    yield loss.detach()


def some_only(model, parameters, batches):
    """Compute the gradients of some parameters only, inside and outside of ``model.accumulate``.

    A penalty on the gradient of the inputs needs gradients of gradients, too. Inside the block,
    ``autograd.grad`` once returned only the gradients of device 0, and ``backward(inputs=...)``
    once computed more gradients than were asked for.
    """
    some = parameters[::6]
    for number, (x, labels) in enumerate(batches):
        with getattr(model, "accumulate", nullcontext)() if number % 2 else nullcontext():
            x = x.detach().requires_grad_()
            model(x, labels).backward(inputs=some)
            slope, *found = torch.autograd.grad(model(x, labels), [x, *some], create_graph=True)
            slope.square().sum().backward()
            yield from (gradient.detach() for gradient in found)


@contextmanager
def side_streams(devices, comes_back=True):
    """Make new streams current on devices that have streams, as a user who prefetches does.

    The new streams wait for the streams that were current before. At the end of the block, these
    wait for the new streams, unless ``comes_back`` is False.

    Yields:
        A function that keeps the memory of tensors until the current stream has used it.
    """

    def record(*tensors):
        for tensor in tensors:
            if has_streams(tensor.device):
                tensor.record_stream(torch.accelerator.current_stream(tensor.device))

    with ExitStack() as stack:
        for device in filter(has_streams, devices):
            main, side = torch.accelerator.current_stream(device), torch.Stream(device)
            side.wait_stream(main)
            if comes_back:
                stack.callback(main.wait_stream, side)
            stack.enter_context(torch.get_device_module(device).stream(side))
        yield record


SETTINGS = [
    *((kind, gpu0_bsz, 0, "cpu", {}) for kind in KINDS for gpu0_bsz in (0, 2)),
    *((kind, None, 0, 0, {"spread": True}) for kind in DISTINCT),
    *(("stand-in", 1, 4, "cpu", {}), ("stand-in", 4, 1, 1, {})),
    *(("stand-in", 0, 4, 0, {"spread": True}), ("stand-in", 1, 0, "cpu", {"first": "cpu"})),
]


@pytest.mark.filterwarnings("ignore:gpu0_bsz=4 has no effect")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of the side streams here
@pytest.mark.parametrize(
    ("kind", "gpu0_bsz", "streams", "where", "options"), [s for s in SETTINGS if s[0] in KINDS]
)
@pytest.mark.parametrize("train", [steps, accumulated, some_only])
@pytest.mark.parametrize("name", ["tied", *map(slow, [*LOSSES][1:])])
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
    with side_streams(devices[:streams]):
        inputs = [[t.to(devices[where] if where != "cpu" else where) for t in b] for b in batches]
        found = [*train(model, own[1], inputs)]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    torch.testing.assert_close(module.state_dict(), dict(plain.state_dict()), **TOLERANCE)
    torch.testing.assert_close(*([p.grad for p in each] for each in own), **TOLERANCE)
    del found, inputs
