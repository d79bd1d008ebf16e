"""Test training on the stand-in for CUDA devices.

Gradients must be those of training on one CPU, and there must be no races.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from balanced_dp import BalancedCriterion, BalancedDataParallel
from balanced_dp.free_threading import is_free_threaded_build
from balanced_dp.parallel import copies
from balanced_dp.parallel.copies import Arrivals

from ..modules import Lambda
from ..notes import notes_of
from ..step_on_clock import SPLITS, Layers, step_ratio

BATCH, WIDTH, CLASSES = 13, 8, 5


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch):
    """Let the weights of small models be copied in several buckets, as those of large models are.

    Also let torch repeat the warnings that it usually gives once in a process, so that they are
    errors in each test.
    """
    monkeypatch.setattr(copies, "LEAST_BYTES", 0)
    monkeypatch.setattr(Arrivals, "are_traced", False)
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def mlp(num_layers=4):
    layers = [m for _ in range(num_layers) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).double()


def cross_entropy(self, x, labels):
    return functional.cross_entropy(self.inner(x), labels)


def masked_mean(self, x, labels):
    mask = (labels != -100).double()
    return (self.inner(x).square().mean(1) * mask).sum() / mask.sum()


def make_batch():
    labels = torch.randint(0, CLASSES, (BATCH,))
    labels[::3] = -100
    return torch.randn(BATCH, WIDTH, dtype=torch.double), labels


@pytest.mark.skipif(
    is_free_threaded_build(),
    reason="what a thread of autograd has made is freed when it next runs Python code",
)
@pytest.mark.parametrize(("gpu0_bsz", "num_devices"), [(0, 4), (1, 4), (1, 2), (0, 2)])
def test_gradients_hold_their_bytes_alone(gpu0_bsz, num_devices, stand_in):
    """Parts of what was sent in one piece kept all of it: up to twice their bytes."""
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
    devices = stand_in.devices[:num_devices]
    model = BalancedDataParallel(gpu0_bsz, module.to(devices[0]), devices)
    x = torch.randn(BATCH, 256)
    before = torch.accelerator.memory_allocated(devices[0])
    model(x).square().mean().backward()
    held = torch.accelerator.memory_allocated(devices[0]) - before
    own = sum(p.grad.nbytes for p in module.parameters())
    assert own <= held <= 1.02 * own
    for layer in module:
        layer.weight.grad = None
    assert torch.accelerator.memory_allocated(devices[0]) - before <= 0.02 * own


def test_a_checkpoint_keeps_the_weights_of_a_module(stand_in):
    """A replica was recycled before the checkpoint computed again from its dictionary."""

    def forward(self, x):
        own = self.inner._parameters
        return checkpoint(
            lambda x: functional.linear(x, own["weight"], own["bias"]), x, use_reentrant=False
        )

    module = Lambda(forward, inner=nn.Linear(WIDTH, CLASSES)).to(stand_in.devices[0])
    model = BalancedDataParallel(1, module, stand_in.devices)
    x = torch.randn(BATCH, WIDTH)
    model(x.clone().requires_grad_()).sum().backward()
    torch.testing.assert_close(module.inner.weight.grad.cpu(), x.sum(0).expand(CLASSES, -1))


def test_older_autograd_waits_for_the_default_stream_alone(stand_in, monkeypatch):
    """Before torch 2.8 the home may have used gradients while they were copied."""
    monkeypatch.setattr(copies, "AWAITS_PRODUCERS", False)
    home, source = stand_in.devices[:2]
    gradients = copies.bring_to(home, [torch.ones(WIDTH, device=source) for _ in range(2)])
    for gradient in gradients:
        gradient.add(1)
    assert not stand_in.races()


@pytest.mark.parametrize(("num_devices", "opened"), [(4, [(0, 1, 2, 3)]), (2, [])])
def test_one_communicator_serves_all(num_devices, opened, stand_in):
    """Weights, buffers and criteria. Each one takes hundreds of MiB of a GPU for good, and all of
    them were on device 0.
    """
    devices = stand_in.devices[:num_devices]
    module = nn.Sequential(mlp(), nn.BatchNorm1d(CLASSES).double()).to(devices[0])
    model = BalancedDataParallel(1, module, devices, gather=False)
    weight = torch.rand(CLASSES, dtype=torch.double, device=devices[0])
    criterion = BalancedCriterion(nn.CrossEntropyLoss(weight))
    x, labels = make_batch()
    for gpu0_bsz in (2, 0):
        model.gpu0_bsz = gpu0_bsz
        criterion(model(x), labels).backward()
        for block in (nullcontext(), model.shared_weights()):
            with block, torch.no_grad():
                model(x)
    assert stand_in.nccl.opened == opened


@pytest.mark.filterwarnings("ignore:gpu0_bsz=1 has no effect")
def test_inputs_arrive_in_streams_of_their_own(stand_in):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval()  # two dtypes
    module.to(stand_in.devices[0])
    for device_ids, batch, broadcast in (
        *((None, BATCH, ()), (None, BATCH, ("input",))),
        *((None, 1, ()), ([0], BATCH, ())),
    ):
        model = BalancedDataParallel(1, module, device_ids, broadcast=broadcast)
        model(torch.randn(batch, WIDTH))
        with stand_in.recorded() as work:
            model(torch.randn(batch, WIDTH))
        arrived, computed = (
            {streams[0][0] for name, streams, *_ in work if name == kind}
            for kind in ("upload", "addmm")
        )
        assert len(arrived) == len(computed) > 0
        assert not arrived & computed


@pytest.mark.parametrize("where", ["cpu", "stand_in:0"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize("loss", [cross_entropy, masked_mean])
@pytest.mark.parametrize("weight", [None, lambda labels: (labels != -100).sum()])
@pytest.mark.filterwarnings("ignore:.*(no call with gradients|it uses Div)")
def test_the_host_does_not_wait_for_a_step(weight, loss, gpu0_bsz, trains, where, stand_in):
    module = Lambda(loss, inner=mlp()).to(stand_in.devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, loss_weight=weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, labels = (tensor.to(where) for tensor in make_batch())
    batch = {"x": x, "labels": labels}
    for _ in range(3):  # the first calls look at the loss and the parameters
        before = stand_in.num_waits
        with torch.set_grad_enabled(trains):
            found = model(**batch)
        if trains:
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
    assert stand_in.num_waits == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gpu0_bsz=16 has no effect")
@pytest.mark.parametrize(
    ("split", "spread", "has_forward", "share", "limit"),
    [
        *((split, False, False, share, 1.25) for split in SPLITS for share in (0.1, 0.3)),
        *((split, False, True, 0.1, 1.1) for split in SPLITS),
        *((split, False, True, 0.3, 1.25) for split in SPLITS),
        *((SPLITS[0], True, True, 0.1, 1.05), (SPLITS[0], True, True, 0.3, 1.12)),
    ],
)
def test_transfers_run_beside_computing(split, spread, has_forward, share, limit, stand_in):
    """Devices marched in step: backward took 1.4 and 2.1 times the largest chunk's computing.

    Weights that travel before computing begins took the step to 1.11 and 1.30 times of it, and
    homes that computed no further before gradients had arrived to 1.24 and 1.30.
    """
    gpu0_bsz = None if spread else split[0]
    model = BalancedDataParallel(gpu0_bsz, Layers().to(stand_in.devices[0]), spread=spread)
    # In which order autograd's threads launch is chance.
    ratios = (step_ratio(stand_in, model, split, share, has_forward) for _ in range(10))
    assert any(ratio <= limit for ratio, _ in ratios)


def test_replicas_made_by_hand(no_collector, stand_in):
    """They wait for their weights and leave no memory."""
    module, x = mlp(), make_batch()[0]
    expected = copy.deepcopy(module)(x)
    model = BalancedDataParallel(1, module.to(stand_in.devices[0]))
    allocated = torch.accelerator.memory_allocated(2)
    for _ in range(3):
        replicas = model.replicate(module, stand_in.devices)
        with torch.device(stand_in.devices[2]):
            output = replicas[2](x.to(stand_in.devices[2]))
        torch.testing.assert_close(output.cpu(), expected)
        del replicas, output
        assert torch.accelerator.memory_allocated(2) == allocated
        torch.ones(WIDTH * WIDTH, dtype=torch.double, device=stand_in.devices[2])


ALLOC_FAILED = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize("failure", ["", ALLOC_FAILED, "CUDA error: out of memory"])
@pytest.mark.parametrize(
    ("gpu0_bsz", "advice"), [(15, "or fewer samples on the"), ("auto", "repeat the step")]
)
def test_running_out_is_seen_whoever_says_so(gpu0_bsz, advice, failure, stand_in):
    def forward(self, x):  # a chunk holds much of its own, next to weights and gradients
        return self.inner(x).repeat(1, 1000).tanh().sum(1)

    x, module = torch.randn(64, WIDTH), Lambda(forward, inner=nn.Linear(WIDTH, WIDTH))
    model = BalancedDataParallel(gpu0_bsz, module.to(stand_in.devices[0]))
    with torch.no_grad():
        model(x)
    allocated = torch.accelerator.memory_allocated(0)
    with stand_in.limited(0, allocated + 12 * 4000 * WIDTH, failure):
        with pytest.raises(RuntimeError) as caught:
            model(x)
        assert advice in "".join(notes_of(caught.value))
        if gpu0_bsz == "auto":
            for _ in range(4):
                with suppress(RuntimeError):
                    model(x).sum().backward()
            model(x).sum().backward()
            assert model.gpu0_bsz < 8


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("where", ["forward", "forward, with gradients", "the fourth transfer"])
def test_weights_on_their_way_when_a_call_raised(where, is_shared, monkeypatch, stand_in):
    """What writes to them, or uses the memory of copies again, comes after the transfer."""
    num_sent = itertools.count(1)

    def broadcast(piece, out):
        if next(num_sent) == 4 and where == "the fourth transfer":
            raise torch.OutOfMemoryError("as planned")
        torch._C._broadcast_out(piece, out)

    def forward(self, x):
        raise torch.OutOfMemoryError("as planned")

    monkeypatch.setattr(copies.comm, "broadcast", broadcast)
    model = BalancedDataParallel(2, Lambda(forward, layers=mlp(8)).to(stand_in.devices[0]))
    with (
        model.shared_weights() if is_shared else nullcontext(),
        torch.set_grad_enabled("gradients" in where),
        pytest.raises(torch.OutOfMemoryError, match="as planned") as caught,
    ):
        model(make_batch()[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    del caught  # which has kept the replicas
    for device in stand_in.devices:
        for parameter in mlp(8).parameters():
            torch.ones_like(parameter, device=device)


def test_shared_weights_on_another_stream(stand_in):
    """The second call waits for the copies that the first has made."""
    devices = stand_in.devices[:2]
    model = BalancedDataParallel(1, mlp().to(devices[0]), devices)
    with torch.no_grad(), model.shared_weights():
        model(make_batch()[0])
        with torch.get_device_module(devices[1]).stream(torch.Stream(devices[1])):
            model(make_batch()[0])


# Dynamo reads it of whatever it compiles for.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_functions_are_compiled_once(stand_in):
    """Their guards know a module by its dictionary of parameters."""

    @torch.compile(backend="eager", fullgraph=True)
    def twice(inner, x):
        return x @ inner.weight + (x @ inner.weight)

    module = Lambda(lambda self, x: twice(self.inner, x), inner=nn.Linear(WIDTH, WIDTH)).double()
    model = BalancedDataParallel(6, module.to(stand_in.devices[0]), [0, 1])
    for _ in range(12):  # torch gives up after 8
        model(make_batch()[0])
    assert Arrivals.are_traced
    model.module = torch.compile(module, backend="eager")
    model(make_batch()[0])  # the weights of another device would be refused
