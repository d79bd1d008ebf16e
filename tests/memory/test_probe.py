from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from balanced_dp import ArgumentError, BalancedDataParallel, MemoryLogger, MemoryProbe, ProbeError


def small_model(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 256))


def train_step(model, optimizer, batch_size=12):
    output = model(torch.randn(batch_size, 16))
    output.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_snapshot_of_emulated_devices(emulate):
    devices = emulate(3, memory=["1GiB", "2GiB", "3GiB"])
    _held = torch.ones(1000, device=devices[1])
    for i, memory in enumerate(MemoryProbe().snapshot()):
        assert memory.device == memory.label == f"lazy:{i}"
        assert memory.name == f"Emulated device {i}"
        assert memory.total_bytes == (i + 1) * 2**30
        assert memory.allocated_bytes == memory.reserved_bytes == (4096 if i == 1 else 0)
        assert memory.peak_allocated_bytes == memory.peak_reserved_bytes
        assert memory.used_bytes == memory.allocated_bytes
        assert memory.used_bytes + memory.free_bytes == memory.total_bytes
        assert memory.num_alloc_retries == 0
        assert memory.uuid is memory.nvml_index is memory.mig_index is memory.error is None


def test_devices_may_be_named_and_repeated(emulate):
    devices = emulate(3)
    probe = MemoryProbe([2, "lazy:0", devices[2]])
    assert probe.devices == [devices[2], devices[0]]
    assert [memory.device for memory in probe.snapshot()] == ["lazy:2", "lazy:0"]
    with pytest.raises(ArgumentError, match="device lazy:3 does not exist: there are 3"):
        MemoryProbe([3])


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
    for probe in (
        lambda: MemoryProbe(["cpu"]),
        lambda: BalancedDataParallel(1, nn.Linear(2, 2), ["cpu", "cpu"]).memory,
        lambda: BalancedDataParallel(1, nn.Linear(2, 2)).memory,
    ):
        with pytest.raises(ProbeError, match="cpu does not count its memory; to measure on a mach"):
            probe()


def test_out_of_memory_in_the_block(emulate):
    devices = emulate(1, memory="1MiB")
    with pytest.raises(torch.OutOfMemoryError), MemoryProbe().measure() as usage:
        torch.ones(10**6, device=devices[0])
    assert not usage.valid


def test_a_model_with_a_probe_is_pickled_and_copied(emulate):
    devices = emulate(2)
    model = BalancedDataParallel(2, small_model().to(devices[0]))
    probe = model.memory
    model(torch.randn(6, 16))
    assert copy.deepcopy(model).chunk_sizes == (2, 4)
    pickle.dumps(model)
    assert probe.devices == list(devices)


def test_advice_leads_to_balance(emulate):
    """Measure, follow the direction, and measure again."""
    devices = emulate(4, memory="1GiB")
    module = small_model(2048).to(devices[0])
    low, high = 0, 250
    while low + 1 < high:
        model = BalancedDataParallel((low + high) // 2, module)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with model.memory.measure() as usage:
            train_step(model, optimizer, batch_size=1000)
        advice = usage.check_split(tolerance=0.05)
        if advice is None:
            break
        low, high = (low, model.gpu0_bsz) if "lower" in advice else (model.gpu0_bsz, high)
    assert advice is None and usage.imbalance <= 0.05
    assert 0 < model.gpu0_bsz < 250
