"""Training on devices of CUDA's kind: gradients are those of one CPU, and nothing is a race."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from balanced_dp import BalancedCriterion, BalancedDataParallel
from balanced_dp.free_threading import is_free_threaded_build
from balanced_dp.parallel import copies
from balanced_dp.parallel.copies import Arrivals

from ..cuda_stand_in import StandIn
from ..modules import Lambda
from ..notes import notes_of
from ..step_on_clock import SPLITS, Layers, step_ratio

BATCH, WIDTH, CLASSES = 13, 8, 5
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch):
    """Weights of the small models here are sent in several pieces, and used when they are there."""
    monkeypatch.setattr(copies, "LEAST_BYTES", 0)
    monkeypatch.setattr(Arrivals, "are_traced", False)


def mlp(num_layers: int = 4) -> nn.Sequential:
    layers = [m for _ in range(num_layers) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).double()


def cross_entropy(self: Lambda, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(self.inner(x), labels)


def masked_mean(self: Lambda, x: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).double()
    return (self.inner(x).square().mean(1) * mask).sum() / mask.sum()


def make_batch() -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, CLASSES, (BATCH,))
    labels[::3] = -100
    return torch.randn(BATCH, WIDTH, dtype=torch.double), labels


def fetch(module: nn.Module) -> list[Tensor | None]:
    """Returns the gradients on the CPU, where the current streams have them."""
    return [None if p.grad is None else p.grad.to("cpu", copy=True) for p in module.parameters()]


def is_reached(limit: float, *args: Any, **kwargs: Any) -> bool:
    """Returns whether a step is as short; in which order autograd's threads launch is chance."""
    return any(step_ratio(*args, **kwargs)[0] <= limit for _ in range(10))


def side_streams(devices: list[torch.device]) -> AbstractContextManager[None]:
    """Makes new streams current that come after the current ones, which come after them at the end.

    As a user who prefetches does, or one who trains several models at a time.
    """
    stack = ExitStack()
    for device in devices:
        main, side = torch.accelerator.current_stream(device), torch.Stream(device)
        side.wait_stream(main)
        stack.callback(main.wait_stream, side)
        stack.enter_context(torch.get_device_module(device).stream(side))
    return stack


class UsesOthersWeights(nn.Module):
    """Reads weights before and after the modules that hold them, in several streams, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between, self.unused = mlp(), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        if not x.is_cpu:
            main, side = torch.accelerator.current_stream(x.device), torch.Stream(x.device)
            with torch.get_device_module(x.device).stream(side):
                beside = self.first.bias.sum()
            x = x + self.first.bias.sum()  # waits for the weights, not for what is beside
            main.wait_stream(side)
            beside.record_stream(main)
            x = x - beside
        x = x @ self.last.weight  # on its way as the last
        if x.is_cpu:
            x = self.last(x)
        else:
            with side_streams([x.device]):
                beside = self.last(x) + self.tied.bias
                for tensor in (x, *self.last.parameters(), self.tied.bias):  # for backward
                    tensor.record_stream(torch.accelerator.current_stream(x.device))
            beside.record_stream(main)
            x = beside - self.tied.bias
        x = self.between(self.tied(self.first(x)))
        last = self.last if torch.is_grad_enabled() else copy.deepcopy(self.last)
        return x @ self.between[0].weight[:CLASSES] + last.weight.sum()


@pytest.mark.parametrize("gpu0_bsz", [0, 2])
def test_weights_are_waited_for_wherever_they_are_read(gpu0_bsz, stand_in: StandIn):
    plain = UsesOthersWeights().double()
    model = BalancedDataParallel(gpu0_bsz, copy.deepcopy(plain).to(stand_in.devices[0]))
    batch = make_batch()
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            found, expected = model(*batch), plain(*batch)
        torch.testing.assert_close(found.cpu(), expected, **CLOSE)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(fetch(model), fetch(plain), **CLOSE)


@pytest.mark.skipif(
    is_free_threaded_build(),
    reason="what a thread of autograd has made is freed when it next runs Python code",
)
@pytest.mark.parametrize(("gpu0_bsz", "num_devices"), [(0, 4), (1, 4), (1, 2), (0, 2)])
def test_gradients_hold_no_more_than_their_bytes(gpu0_bsz, num_devices, stand_in: StandIn):
    """Parts of what was sent in one piece kept all of it: up to twice their bytes."""
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
    devices = stand_in.devices[:num_devices]
    model = BalancedDataParallel(gpu0_bsz, module.to(devices[0]), devices)
    x = torch.randn(BATCH, 256)
    before = torch.accelerator.memory_allocated(devices[0])
    model(x).square().mean().backward()
    held = torch.accelerator.memory_allocated(devices[0]) - before
    own = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    assert own <= held <= 1.02 * own
    for layer in module:
        layer.weight.grad = None
    assert torch.accelerator.memory_allocated(devices[0]) - before <= 0.02 * own


@pytest.mark.parametrize(("num_devices", "opened"), [(4, [(0, 1, 2, 3)]), (2, [])])
def test_one_communicator_serves_weights_buffers_and_criteria(
    num_devices, opened, stand_in: StandIn
):
    """Each takes hundreds of MiB of a GPU for good, and all of them were on device 0."""
    devices = stand_in.devices[:num_devices]
    module = nn.Sequential(mlp(), nn.BatchNorm1d(CLASSES).double()).to(stand_in.devices[0])
    model = BalancedDataParallel(1, module, devices, gather=False)
    weight = torch.rand(CLASSES, dtype=torch.double, device=stand_in.devices[0])
    criterion = BalancedCriterion(nn.CrossEntropyLoss(weight))
    x, labels = make_batch()
    for gpu0_bsz in (2, 0):
        model.gpu0_bsz = gpu0_bsz
        criterion(model(x), labels).backward()
        with torch.no_grad():
            model(x)
        with model.shared_weights(), torch.no_grad():
            model(x)
    assert stand_in.nccl.opened == opened


@pytest.mark.filterwarnings("ignore:gpu0_bsz=1 has no effect")
def test_inputs_from_the_cpu_arrive_in_streams_of_their_own(stand_in: StandIn):
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
@pytest.mark.filterwarnings("ignore:.*no call with gradients:balanced_dp.BalanceWarning")
def test_the_host_does_not_wait_for_a_step(loss, gpu0_bsz, trains, where, stand_in: StandIn):
    model = BalancedDataParallel(gpu0_bsz, Lambda(loss, inner=mlp()).to(stand_in.devices[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = [tensor.to(where) for tensor in make_batch()]
    for _ in range(3):  # the first calls look at the loss and the parameters
        before = stand_in.num_waits
        with torch.set_grad_enabled(trains):
            found = model(*batch)
        if trains:
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
    assert stand_in.num_waits == before


def test_streams_that_share_weights(stand_in: StandIn):
    """Those of later calls wait for the copies, whichever stream they were made in."""
    model = BalancedDataParallel(1, Lambda(cross_entropy, inner=mlp()).to(stand_in.devices[0]))
    used: list[torch.Stream] = []
    with model.shared_weights(), torch.no_grad():
        for _ in range(2):
            with ExitStack() as stack:
                for device in stand_in.devices:
                    stream = torch.Stream(device)
                    stream.wait_stream(torch.accelerator.current_stream(device))
                    stack.enter_context(torch.get_device_module(device).stream(stream))
                    used.append(stream)
                model(*make_batch())
    assert not stand_in.races()
    for stream in used:
        stream.synchronize()


def test_no_warning_in_side_streams(stand_in: StandIn):
    model = BalancedDataParallel(1, Lambda(cross_entropy, inner=mlp()).to(stand_in.devices[0]))
    torch.set_warn_always(True)
    try:
        with side_streams(stand_in.devices[:1]), warnings.catch_warnings():
            warnings.simplefilter("error")
            model(*make_batch()).backward()
    finally:
        torch.set_warn_always(False)


@pytest.mark.filterwarnings("ignore:gpu0_bsz=16 has no effect")
@pytest.mark.parametrize(
    ("has_forward", "transfer_share", "limit"),
    [(False, 0.1, 1.25), (False, 0.3, 1.25), (True, 0.1, 1.1), (True, 0.3, 1.25)],
)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_weights_and_gradients_travel_beside_computing(
    split, has_forward, transfer_share, limit, stand_in: StandIn
):
    """Devices marched in step: backward took 1.4 and 2.1 times the largest chunk's computing.

    Weights that travel before computing begins took the step to 1.11 and 1.30 times of it.
    """
    model = BalancedDataParallel(split[0], Layers().to(stand_in.devices[0]))
    assert is_reached(limit, stand_in, model, split, transfer_share, has_forward=has_forward)


@pytest.mark.parametrize(("transfer_share", "limit"), [(0.1, 1.05), (0.3, 1.12)])
def test_gradients_travel_beside_computing_to_all_homes(transfer_share, limit, stand_in: StandIn):
    """Each home computed no further before they had arrived: 1.24 and 1.30."""
    model = BalancedDataParallel(None, Layers().to(stand_in.devices[0]), spread=True)
    assert is_reached(limit, stand_in, model, SPLITS[0], transfer_share, has_forward=True)


def test_replicas_made_by_hand_wait_and_leave_no_memory(no_collector, stand_in: StandIn):
    module, x = mlp(), make_batch()[0]
    expected = copy.deepcopy(module)(x)
    model = BalancedDataParallel(1, module.to(stand_in.devices[0]))
    allocated = torch.accelerator.memory_allocated(2)
    for _ in range(3):
        replicas = model.replicate(module, stand_in.devices)
        with torch.device(stand_in.devices[2]):
            output = replicas[2](x.to(stand_in.devices[2]))
        torch.testing.assert_close(output.cpu(), expected, **CLOSE)
        del replicas, output
        assert torch.accelerator.memory_allocated(2) == allocated
        torch.ones(WIDTH * WIDTH, dtype=torch.double, device=stand_in.devices[2])


def num_failures(step: Callable[[], None]) -> int:
    """Returns how many times memory runs out before a step that is repeated runs."""
    for count in range(10):
        with suppress(RuntimeError):
            step()
            return count
    return 10


FAILURES = {
    "torch": "",
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "driver": "CUDA error: out of memory",
}


class Widens(nn.Module):
    """A chunk holds much of its own, next to weights and gradients, while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).repeat(1, 1000).tanh().sum(1)


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize(
    ("gpu0_bsz", "advice"), [(15, "fewer samples (gpu0_bsz,"), ("auto", "the step may be repeat")]
)
def test_memory_that_runs_out_is_seen_whoever_says_so(gpu0_bsz, advice, failure, stand_in: StandIn):
    x = torch.randn(64, WIDTH)
    model = BalancedDataParallel(gpu0_bsz, Widens().to(stand_in.devices[0]))
    with torch.no_grad():
        model(x)
    allocated = torch.accelerator.memory_allocated(0)
    with stand_in.limited(0, allocated + 12 * 4000 * WIDTH, failure):
        with pytest.raises(RuntimeError) as caught:
            model(x)
        assert advice in "".join(notes_of(caught.value))
        if gpu0_bsz == "auto":
            assert num_failures(lambda: model(x).sum().backward()) < 5
            assert model.gpu0_bsz < 8


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("where", ["forward", "forward, with gradients", "the fourth transfer"])
def test_memory_of_weights_on_their_way_when_a_call_raised(
    where, is_shared, monkeypatch, stand_in: StandIn
):
    """It is used again by what is computed next, which comes after the transfer."""
    num_sent = itertools.count(1)

    def broadcast(piece: Tensor, out: list[Tensor]) -> None:
        if next(num_sent) == 4 and where == "the fourth transfer":
            raise torch.OutOfMemoryError("as planned")
        torch._C._broadcast_out(piece, out)

    def forward(self: Lambda, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("as planned")

    monkeypatch.setattr(copies.comm, "broadcast", broadcast)
    model = BalancedDataParallel(2, Lambda(forward, layers=mlp(8)).to(stand_in.devices[0]))
    with (
        torch.set_grad_enabled("gradients" in where),
        model.shared_weights() if is_shared else nullcontext(),
    ):
        with pytest.raises(torch.OutOfMemoryError, match="as planned"):
            model(make_batch()[0])
        for device in stand_in.devices:
            for parameter in mlp(8).parameters():
                torch.ones_like(parameter, device=device)


# Dynamo reads it of whatever it compiles for.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_functions_that_are_compiled_are_not_compiled_at_each_call(stand_in: StandIn):
    """Their guards know a module by its dictionary of parameters."""

    @torch.compile(backend="eager", fullgraph=True)
    def twice(inner: nn.Linear, x: Tensor) -> Tensor:
        return x @ inner.weight + (x @ inner.weight)

    module = Lambda(lambda self, x: twice(self.inner, x), inner=nn.Linear(WIDTH, WIDTH)).double()
    model = BalancedDataParallel(6, module.to(stand_in.devices[0]), [0, 1])
    for _ in range(12):  # torch gives up after 8
        model(make_batch()[0])
    assert Arrivals.are_traced
