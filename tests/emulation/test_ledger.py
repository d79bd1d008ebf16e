from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

from balanced_dp import BalancedDataParallel
from balanced_dp.emulation.device_module import max_memory_allocated as peak
from balanced_dp.emulation.device_module import memory_allocated as allocated
from balanced_dp.emulation.ledger import ROUND_BYTES, Allocation, Block, DeviceLedger, Label

from ..at_once import at_once
from ..modules import short_of_memory_in_backward

CAPACITY_BYTES = 16 * ROUND_BYTES
sizes = st.integers(0, 4 * ROUND_BYTES)
labels = st.sampled_from(Label)
picks = st.integers(0, 1000)


class LedgerAgainstLists(RuleBasedStateMachine):
    """Compare a ``DeviceLedger`` with a simple model of it, under random operations.

    The model is a list of live blocks, and a copy of this list from the time of the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = DeviceLedger(CAPACITY_BYTES, MemoryError)
        self.live: list[tuple[Allocation, Block]] = []
        self.at_peak: list[Block] = []
        self.total_bytes = self.num_ooms = 0

    @rule(num_bytes=sizes, label=labels)
    def allocate(self, num_bytes: int, label: Label) -> None:
        block = Block(0, -(-num_bytes // ROUND_BYTES) * ROUND_BYTES, label)
        if total(self.blocks()) + block.num_bytes > CAPACITY_BYTES:
            self.num_ooms += 1
            with pytest.raises(MemoryError):
                self.ledger.allocate(num_bytes, label)
            return
        self.live.append((self.ledger.allocate(num_bytes, label), block))
        self.total_bytes += block.num_bytes
        if total(self.blocks()) > total(self.at_peak):
            self.at_peak = self.blocks()

    @precondition(lambda self: self.live)
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        del self.live[pick % len(self.live)]

    @precondition(lambda self: self.live)
    @rule(pick=picks, label=labels)
    def relabel(self, pick: int, label: Label) -> None:
        allocation, block = self.live[pick % len(self.live)]
        allocation.block.label = block.label = label

    @rule()
    def reset_peak(self) -> None:
        self.ledger.reset_peak()
        self.at_peak = self.blocks()

    def blocks(self) -> list[Block]:
        return [block for _, block in self.live]

    @invariant()
    def books_agree(self) -> None:
        ledger, breakdown = self.ledger, self.ledger.breakdown()
        assert (breakdown.now, breakdown.peak) == (by_label(self.blocks()), by_label(self.at_peak))
        assert ledger.allocated_bytes == total(self.blocks())
        assert ledger.peak_bytes == total(self.at_peak)
        assert (ledger.total_bytes, ledger.num_ooms) == (self.total_bytes, self.num_ooms)


def total(blocks: list[Block]) -> int:
    return sum(block.num_bytes for block in blocks)


def by_label(blocks: list[Block]) -> dict[str, int]:
    return {label.value: total([b for b in blocks if b.label is label]) for label in Label}


LedgerAgainstLists.TestCase.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=30
)
TestLedgerAgainstLists = LedgerAgainstLists.TestCase


def test_threads_leave_exact_books():
    num_threads, num_rounds = 8, 300
    ledger = DeviceLedger(sys.maxsize, MemoryError)

    def hammer(seed):
        held = []
        for i in range(num_rounds):
            held.append(ledger.allocate(ROUND_BYTES, Label.OTHER))
            held[-1].block.label = Label.GRADIENT
            if len(held) > 5:
                del held[(i * seed) % len(held)]
            if i % 10 == 0:
                assert sum(ledger.breakdown().peak.values()) <= ledger.peak_bytes

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        at_once(hammer, num_threads)
    finally:
        sys.setswitchinterval(before)
    assert not any(ledger.breakdown().now.values())
    assert sum(ledger.breakdown().peak.values()) == ledger.peak_bytes
    # Each thread had five blocks at once, and at most six.
    assert 5 * ROUND_BYTES <= ledger.peak_bytes <= num_threads * 6 * ROUND_BYTES


# The ledger of a device, seen through tensors.


@pytest.mark.usefixtures("no_collector")
def test_storages_count_once(devices):
    x = torch.zeros(4, 256, device=devices[0])
    views = [x[1], x.t().expand(5, 256, 4), x.detach(), x.data, *x.split(2), x.view(torch.int32)]
    views.append(nn.Parameter(x))
    assert allocated(devices[0]) == peak(devices[0]) == 4096
    del x
    last = views.pop()
    views.clear()
    assert allocated(devices[0]) == 4096
    del last
    assert allocated(devices[0]) == 0


@pytest.mark.usefixtures("no_collector")
def test_backward_frees_what_forward_saved(devices):
    x = torch.zeros(256, device=devices[0], requires_grad=True)
    loss = x.exp().sin().sum()  # saves the results of exp; sin saves its input, the same tensor
    assert allocated(devices[0]) == 1024 + 1024 + 512
    loss.backward()
    assert allocated(devices[0]) == 1024 + 512 + 1024  # x, the loss and x.grad


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_are_added_in_place(devices, keeps):
    """As on CUDA, unless somebody keeps them; the engine adds subclasses out of place."""
    kept = []
    x = torch.zeros(256, device=devices[0], requires_grad=True)
    y = x * 1.0
    if keeps:
        y.register_hook(kept.append)
    loss = (y * 2).sum() + (y * 3).sum() + (y * 5).sum()
    torch.lazy.reset_peak_memory_stats(devices[0])
    before = allocated(devices[0])
    loss.backward()
    assert x.grad.tolist() == [10.0] * 256
    # The sum, the next gradient and that of the loss; out of place there would be one more.
    assert peak(devices[0]) - before == 2 * 1024 + 512


def test_sums_of_other_gradients_count(devices):
    x = torch.zeros(256, device=devices[0], requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: gradient * 1 + gradient * 3)
    loss = y.sum()
    before = allocated(devices[0])
    loss.backward()
    assert peak(devices[0]) - before == 3 * 1024 + 512  # both terms, their sum and the loss's


def test_a_failed_backward_gives_all_back(emulate):
    """The other devices' nodes waited for the next backward pass, with their memory."""
    devices = emulate(3, memory=["24MiB", "64MiB", "64MiB"])
    net, _ = short_of_memory_in_backward(devices)
    model = BalancedDataParallel(999, net)
    held = [*map(allocated, devices)]
    for _ in range(3):
        loss = model(torch.ones(3000, 64)).mean()
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        net.zero_grad()
        assert [*map(allocated, devices)] == held
