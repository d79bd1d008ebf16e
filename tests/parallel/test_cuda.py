"""What only CUDA has: streams, waiting for a device, libraries with memory of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from balanced_dp import BalancedDataParallel
from balanced_dp.parallel.scatter import scatter

from ..modules import Lambda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

BATCH, WIDTH, CLASSES = 13, 8, 5


@pytest.fixture
def devices() -> list[torch.device]:
    return [torch.device("cuda", i % torch.cuda.device_count()) for i in range(4)]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Makes synchronizing CUDA operations raise an error."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def cross_entropy(self: Lambda, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(self.inner(x), labels)


def masked_mean(self: Lambda, x: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).float()
    return (self.inner(x).square().mean(1) * mask).sum() / mask.sum()


def make_model(devices: list[torch.device], loss, gpu0_bsz: int = 1) -> BalancedDataParallel:
    module = Lambda(loss, inner=nn.Linear(WIDTH, CLASSES)).to(devices[0])
    return BalancedDataParallel(gpu0_bsz, module, devices)


def make_batch(device: torch.device | str) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, CLASSES, (BATCH,), device=device)
    labels[::3] = -100
    return torch.randn(BATCH, WIDTH, device=device), labels


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize("loss", [cross_entropy, masked_mean])
def test_a_step_does_not_wait_for_the_device(loss, gpu0_bsz, training, devices, request):
    model, batch = make_model(devices, loss, gpu0_bsz), make_batch(devices[0])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        with torch.set_grad_enabled(training):
            found = model(*batch)
            if training:
                optimizer.zero_grad()
                found.backward()
                optimizer.step()

    for _ in range(2):  # the first calls look at the loss
        step()
    request.getfixturevalue("no_waiting")
    step()


@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
def test_inputs_do_not_wait_for_what_is_queued(whole, devices):
    x = torch.randn(BATCH, 1 << 16)
    sizes = None if whole else [1, 4, 4, 4]
    scatter(torch.sin, (x,), {}, devices, sizes)  # makes the streams
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    queued = torch.cuda.Event()
    queued.record()
    chunks = scatter(torch.sin, (x,), {}, devices, sizes)
    assert not queued.query()
    found = [chunk.cpu() for [chunk], _ in chunks]
    expected = [x] * 4 if whole else x.split(sizes)
    torch.testing.assert_close(found, list(expected))
