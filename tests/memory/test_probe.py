from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from balanced_dp import ArgumentError, BalancedDataParallel, MemoryLogger, MemoryProbe, ProbeError
from balanced_dp.memory.records import DeviceMemory, StepMemory


def test_a_snapshot_of_emulated_devices(emulate):
    devices = emulate(3, memory=["1GiB", "2GiB", "3GiB"])
    _held = torch.ones(1000, device=devices[1])
    for i, memory in enumerate(MemoryProbe().snapshot()):
        held, total = 4096 * (i == 1), (i + 1) * 2**30
        known = {
            "device": f"lazy:{i}",
            "name": f"Emulated device {i}",
            **dict.fromkeys(("allocated_bytes", "reserved_bytes", "used_bytes"), held),
            **dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes"), held),
            "total_bytes": total,
            "free_bytes": total - held,
            "num_alloc_retries": 0,
        }
        assert {k: v for k, v in asdict(memory).items() if v is not None} == known
        assert memory.label == memory.device


def test_devices_may_be_named_and_repeated(emulate):
    devices = emulate(3)
    assert MemoryProbe([2, "lazy:0", devices[2]]).devices == [devices[2], devices[0]]


def allocate(num_bytes, device):
    torch.empty(num_bytes, dtype=torch.uint8, device=device)


def test_nested_blocks_and_loggers(emulate):
    """Each resets the peaks, but keeps those of the others."""
    devices = emulate(1)
    model = BalancedDataParallel(1, nn.Linear(2, 2).to(devices[0]), list(devices))
    written = []
    logger = MemoryLogger(model, lambda tag, value, step: written.append(value), every=1)
    start = torch.lazy.memory_allocated()
    with model.memory.measure() as outer:
        allocate(4096, devices[0])
        with model.memory.measure() as inner:
            allocate(1024, devices[0])
        logger.step()
        allocate(2048, devices[0])
        with model.memory.measure() as last:
            pass
    logger.step()
    peaks = [usage.devices[0].peak_allocated_bytes - start for usage in (outer, inner, last)]
    assert peaks == [4096, 1024, 0]
    assert [value * 2**20 - start for value in written[::2]] == [4096, 2048]


def test_devices_that_do_not_count(no_accelerator):
    for devices in (["cpu", "cpu"], None):
        with pytest.raises(ProbeError, match="cpu does not count its memory; to measure on a mach"):
            _ = BalancedDataParallel(1, nn.Linear(2, 2), devices).memory


# The logger.


@pytest.mark.parametrize("wraps", [lambda write: write, lambda w: SimpleNamespace(add_scalar=w)])
def test_a_record_every_third_step(wraps, emulate):
    model, written = BalancedDataParallel(1, nn.Linear(100, 50).to(emulate(2)[0])), []
    logger = MemoryLogger(model, wraps(lambda *record: written.append(record)), every=3)
    for step in range(7):
        model(torch.randn(100 * (step + 1), 100)).sum().backward()
        logger.step()
    tags = ["memory/lazy:0/peak_MiB", "memory/lazy:1/peak_MiB", "memory/imbalance"]
    assert [(step, tag) for tag, _, step in written] == [*product((3, 6), tags)]
    for i in (0, 3):
        low, high = sorted(value for _, value, _ in written[i : i + 2])
        assert written[i + 2][1] == pytest.approx((high - low) / high)


# What a measurement says.

GIB = 2**30


def of_peaks(*peaks: int, capacities: Sequence[int] = ()) -> StepMemory:
    """Return a ``StepMemory`` with the given peaks and capacities of devices, in GiB."""
    pairs = zip(peaks, capacities or [80] * len(peaks), strict=True)
    devices = (
        DeviceMemory(f"cuda:{i}", total_bytes=capacity * GIB, peak_allocated_bytes=peak * GIB)
        for i, (peak, capacity) in enumerate(pairs)
    )
    return StepMemory(tuple(devices), reason=None)


def test_imbalance_and_utilization():
    usage = of_peaks(10, 4, 8, capacities=(20, 5, 80))
    assert (usage.imbalance, usage.utilization) == (0.6, (0.5, 0.8, 0.1))
    assert usage.fullest.device == "cuda:1" and of_peaks(0, 0).imbalance == 0


@pytest.mark.parametrize("figure", ["imbalance", "utilization", "fullest", "check_split"])
def test_no_figures_before_the_end(figure):
    with pytest.raises(ProbeError, match="there are no peaks: the block has not ended"):
        getattr(StepMemory(), figure)()


@pytest.mark.parametrize("tolerance", [5, -0.1, float("nan")])
def test_tolerance_out_of_range(tolerance):
    with pytest.raises(ArgumentError, match="tolerance must be at least 0 and below 1"):
        of_peaks(1, 1).check_split(tolerance)


FULLER_FIRST = "cuda:0 peaks at 4.00 GiB of 80.00 GiB and cuda:1 peaks at 2.00 GiB of 80.00 GiB, "
FULLER_SECOND = "cuda:1 peaks at 2.00 GiB of 20.00 GiB and cuda:0 peaks at 2.00 GiB of 80.00 GiB, "
LOWER = "50% apart: lower gpu0_bsz, or if it is 0, see memory_breakdown"
OTHER_REASON = "50% apart: gpu0_bsz cannot balance these; check what else is on the devices"


@pytest.mark.parametrize(
    ("peaks", "capacities", "advice"),
    [
        ((4, 2), (), FULLER_FIRST + LOWER),
        ((2, 2), (80, 20), f"{FULLER_SECOND}75% apart: raise gpu0_bsz"),
        ((4, 2, 4), (), FULLER_FIRST + OTHER_REASON),
        ((20, 9), (24, 11), None),
        ((1,), (), None),
    ],
)
def test_advice(peaks, capacities, advice):
    assert of_peaks(*peaks, capacities=capacities).check_split() == advice


def test_invalid_blocks_get_no_advice():
    usage = of_peaks(4, 2)
    usage.reason = "x"
    assert usage.check_split() == "the measurement is not valid: x"
