"""Test whether the largest batches that fit on emulated devices also train on a real GPU.

The real GPU may be larger than the emulated ones: another process then holds the memory that
exceeds their capacity. Each batch trains in a process of its own.
"""

from __future__ import annotations

import bisect
import multiprocessing
import os
from multiprocessing.pool import Pool

import pytest
import torch

from balanced_dp import MemoryProbe, emulate_devices
from balanced_dp.memory.units import format_bytes, parse_bytes
from balanced_dp.tuning.report import RESERVE
from balanced_dp.tuning.step import measure_step
from balanced_dp.tuning.workload import find_workload

NOTES = {
    "planned-batches": "Two steps with AdamW on one GPU. The batch is the largest that leaves "
    f"{format_bytes(RESERVE)} of the capacity free on emulated devices. Reserved: the peak of "
    "torch's allocator. Used: by how much the GPU's used memory grew at its peak, by NVML."
}
HELD: list[torch.Tensor] = []


def hold_all_but(num_bytes: int) -> None:
    """Allocate memory of the GPU until only ``num_bytes`` are free, or up to 2 MiB more."""
    HELD.append(torch.zeros(1, device="cuda"))
    probe = MemoryProbe(["cuda:0"])
    while (left := probe.snapshot()[0].free_bytes - num_bytes) > 2**21:
        HELD.append(torch.empty(min(left, 2**33) >> 21 << 21, dtype=torch.uint8, device="cuda"))


def peak(name: str, batch_size: int) -> int:
    with emulate_devices(1, symbolic=True) as devices:
        return measure_step(find_workload(name), batch_size, None, devices).peak_bytes[0]


def planned(name: str, num_bytes: int) -> int:
    """Return the size of the largest batch with a peak of at most ``num_bytes`` when emulated."""
    few, more = peak(name, 8), peak(name, 16)  # peaks grow almost linearly
    sizes = range(round(8 + 8 * (num_bytes - few) / (more - few)) - 8, 2**20)
    return sizes[bisect.bisect_right(sizes[:16], num_bytes, key=lambda size: peak(name, size)) - 1]


def train(name: str, batch_size: int) -> tuple[str, str, str]:
    """Train on a batch, and return whether it fits, and two peaks of memory as text.

    The first peak is the memory that torch's allocator has reserved. The second is by how much the
    GPU's used memory has grown, as NVML reports it.
    """
    device, probe = torch.device("cuda:0"), MemoryProbe(["cuda:0"])
    before = probe.snapshot()[0].used_bytes
    torch.zeros(1, device=device)
    with probe.measure() as usage:
        step = measure_step(find_workload(name), batch_size, None, [device])
    of_nvml = usage.devices[0].peak_used_bytes - before
    outcome = "out of memory" if step.out_of_memory else "trains"
    return outcome, format_bytes(torch.cuda.max_memory_reserved()), format_bytes(of_nvml)


def one_process() -> Pool:
    return multiprocessing.get_context("spawn").Pool(1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a real GPU's allocator")
@pytest.mark.parametrize("capacity", ["11GiB", "80GiB"])
@pytest.mark.parametrize("allocator", ["expandable_segments:True", "expandable_segments:False"])
def test_planned_batches(allocator, capacity, benchmark, tables, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    num_bytes = parse_bytes(capacity)

    def run() -> None:
        with one_process() as holder:
            holder.apply(hold_all_but, [num_bytes])
            for name in ("gpt2-small", "bert-base"):
                batch_size = planned(name, num_bytes - RESERVE)
                with one_process() as trainer:
                    outcome, reserved, used = trainer.apply(train, [name, batch_size])
                row = {"workload": name, "capacity": capacity, "batch": batch_size}
                row |= {"allocator": os.environ["PYTORCH_CUDA_ALLOC_CONF"], "outcome": outcome}
                tables["planned-batches"].append(row | {"reserved": reserved, "used": used})

    benchmark.pedantic(run, rounds=1)
