from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from balanced_dp import (
    ArgumentError,
    ArgumentTypeError,
    BalancedDataParallel,
    MemoryLogger,
    MemoryProbe,
    ProbeError,
)

LAZY = "lazy"


def small_model(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 256))


def train_step(model, optimizer, batch_size=12):
    output = model(torch.randn(batch_size, 16))
    output.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_snapshot_is_what_the_device_module_says(emulate):
    devices = emulate(3, memory=["1GiB", "2GiB", "3GiB"])
    _held = torch.ones(1000, device=devices[1])
    module = torch.get_device_module(LAZY)
    for i, memory in enumerate(MemoryProbe().snapshot()):
        assert memory.device == memory.label == f"lazy:{i}"
        assert memory.name == f"Emulated device {i}"
        assert memory.uuid == str(module.get_device_properties(i).uuid)
        assert memory.total_bytes == (i + 1) * 2**30
        assert memory.allocated_bytes == memory.reserved_bytes == (4096 if i == 1 else 0)
        assert memory.peak_allocated_bytes == memory.peak_reserved_bytes
        assert memory.used_bytes == memory.allocated_bytes
        assert memory.used_bytes + memory.free_bytes == memory.total_bytes
        assert memory.num_alloc_retries == 0
        assert memory.nvml_index is memory.mig_index is memory.process_bytes is None
        assert memory.memory_info_version is memory.error is None
        assert memory.process_bytes_source == "unknown"


def test_devices_may_be_named_and_repeated(emulate):
    devices = emulate(3)
    probe = MemoryProbe([2, "lazy:0", devices[2]])
    assert probe.devices == [devices[2], devices[0]]
    assert [memory.device for memory in probe.snapshot()] == ["lazy:2", "lazy:0"]
    with pytest.raises(ArgumentError, match="device lazy:3 does not exist: there are 3"):
        MemoryProbe([3])


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("gpu0_bsz", [0, 1, 2])
def test_a_measured_step_is_the_ledgers(symbolic, gpu0_bsz, emulate):
    devices = emulate(4, memory="1GiB", symbolic=symbolic)
    model = BalancedDataParallel(gpu0_bsz, small_model().to(devices[0]))
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    kept = [devices.memory_breakdown(device).now for device in devices]
    with model.memory.measure() as usage:
        train_step(model, optimizer)
    for i, (device, peak) in enumerate(zip(devices, usage.devices, strict=True)):
        ledger = devices.memory_breakdown(device).peak
        assert peak.peak_allocated_bytes == sum(ledger.values())
        assert peak.peak_reserved_bytes == sum(ledger.values())
        assert peak.start_allocated_bytes == sum(kept[i].values())
        assert peak.total_bytes == 2**30
        assert peak.peak_used_bytes is None
        assert peak.chunk_size == model.split(12)[i]
    assert usage.valid
    assert usage.reason is None
    assert usage.elapsed_s > 0
    assert usage.sampling_error is None


def allocate(num_bytes, device):
    torch.empty(num_bytes, dtype=torch.uint8, device=device)


def test_blocks_may_be_nested_and_loggers_may_write_in_them(emulate):
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


def test_a_block_has_chunk_sizes_if_all_its_batches_are_split_alike(emulate):
    devices = emulate(2, memory="1GiB")
    model = BalancedDataParallel(2, small_model().to(devices[0]))
    with model.memory.measure() as usage:
        model(torch.randn(100, 16))
        model(torch.randn(6, 16))
    assert [peak.chunk_size for peak in usage.devices] == [None, None]
    assert usage.check_split().endswith(
        "apart: raise gpu0_bsz (balanced-dp tune finds the best value)"
    )
    with model.memory.measure() as usage:
        for _ in range(2):
            output = model(torch.randn(6, 16))
    assert [peak.chunk_size for peak in usage.devices] == [2, 4]
    assert not model._forward_hooks
    with model.memory.measure() as usage:  # without a call there are no chunks
        output.sum().backward()
    assert [peak.chunk_size for peak in usage.devices] == [None, None]


LINEAR = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("devices", "model", "error", "message"),
    [
        (["cpu"], None, ProbeError, "cpu does not count its memory; to measure on a machine wit"),
        (None, BalancedDataParallel(1, LINEAR, ["cpu"]), ProbeError, "cpu does not count its mem"),
        (["cpu"], BalancedDataParallel(1, LINEAR, ["cpu"]), ArgumentError, "devices or model, not"),
        (LINEAR, None, ArgumentTypeError, r"pass it as model=\.\.\."),
        (None, LINEAR, ArgumentTypeError, "must be a BalancedDataParallel, got Linear"),
    ],
)
def test_what_cannot_be_measured(devices, model, error, message):
    with pytest.raises(error, match=message):
        MemoryProbe(devices, model=model)


def test_a_model_that_does_not_split_has_no_devices(no_accelerator):
    with pytest.raises(ProbeError, match="the model has no devices to measure"):
        _ = BalancedDataParallel(1, LINEAR).memory


def test_out_of_memory_in_the_block(emulate):
    devices = emulate(1, memory="1MiB")
    with pytest.raises(torch.OutOfMemoryError), MemoryProbe().measure() as usage:
        _held = torch.ones(1000, device=devices[0])
        torch.ones(10**6, device=devices[0])
    assert usage.devices[0].peak_allocated_bytes == 4096
    assert not usage.valid
    assert usage.reason.startswith("the block ended with OutOfMemoryError: ")


@pytest.mark.parametrize("device_ids", [["lazy:1", "lazy:1", "lazy:0"], ["lazy:0"] * 3])
def test_repeated_devices_are_one(device_ids, emulate):
    emulate(2)
    model = BalancedDataParallel(1, small_model().to(device_ids[0]), device_ids)
    with model.memory.measure() as usage:
        model(torch.randn(9, 16))
    chunks = dict.fromkeys(device_ids, 0)
    for name, size in zip(device_ids, model.split(9), strict=True):
        chunks[name] += size
    assert {peak.device: peak.chunk_size for peak in usage.devices} == chunks


def test_a_model_with_a_probe_is_pickled_and_copied_as_without(emulate):
    devices = emulate(2)
    model = BalancedDataParallel(2, small_model().to(devices[0]))
    probe = model.memory
    model(torch.randn(6, 16))
    assert copy.deepcopy(model).chunk_sizes == (2, 4)
    pickle.dumps(model)
    assert probe.devices == list(devices)


def test_chunk_sizes_are_those_of_the_last_batch(devices):
    model = BalancedDataParallel(1, small_model().to(devices[0]), devices[:3])
    assert model.chunk_sizes is None
    for batch_size, expected in ((9, (1, 4, 4)), (2, (1, 1, 0)), (0, (0, 0, 0))):
        model(torch.randn(batch_size, 16))
        assert model.chunk_sizes == expected
        assert sum(expected) == batch_size


def test_the_advice_leads_to_balance(emulate):
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
