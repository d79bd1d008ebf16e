"""Makes long tables on a machine with an NVIDIA GPU; `balanced-dp validate` is the short check.

    python benchmarks/gpu_validation.py [PART ...] [--results FOLDER]

Each part writes ``<part>_<gpu>_<date>.md`` and ``.json``: what was compared with what, by how much
they differ, and what difference is allowed. The exit code is 1 if one check failed or there is no
GPU. The parts so far:

- ``probe``: the memory probe against torch.cuda, nvidia-smi and allocations of a known size.
- ``emulation``: peaks of the built-in workloads on emulated devices against torch.cuda's, each at
  three batch sizes, in float32 and under bfloat16 autocast, with one replica and with two that
  share the GPU. A negative difference means that the emulated device was too low.
- ``speed``: steps of BERT-base and GPT-2 small against ``nn.DataParallel`` and against the bare
  module on one GPU, in turns; on four replicas that share the first GPU and, where there are more,
  on all GPUs. Figures are thousandths of the time of ``nn.DataParallel``.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tables import write_table
from torch import nn

from balanced_dp import (
    BalancedDataParallel,
    DeviceMemory,
    MemoryProbe,
    Workload,
    memory_breakdown,
)
from balanced_dp.split import even_share
from balanced_dp.tuning.workloads import BUILT_IN, find_workload
from balanced_dp.validation.peaks import emulated_peak, measure_peaks
from balanced_dp.validation.seconds import step_seconds

MIB, GIB = 2**20, 2**30
RESULTS = Path(__file__).parent / "results"


Check = dict[str, Any]
"""A row of a part's table."""


def check(
    name: str,
    measured: int | None,
    reference: int | None,
    allowed_difference: int = 0,
    note: str = "",
    outcome: str | None = None,
) -> Check:
    """Compares two figures that should agree; ``reference`` is None where it could not be had."""
    if outcome is None and reference is None:
        outcome = "not run"
    elif outcome is None:
        agree = measured is not None and abs(measured - reference) <= allowed_difference
        outcome = "ok" if agree else "FAILED"
    return {
        "check": name,
        "measured": measured,
        "reference": reference,
        "allowed difference": allowed_difference,
        "outcome": outcome,
        "note": note,
    }


def probe() -> Iterator[Check]:
    """Part 1: what the memory probe says."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory_probe = MemoryProbe([device])
    before = memory_probe.snapshot()[0]
    yield from _allocator_checks(memory_probe, device)
    yield from _nvidia_smi_checks(memory_probe)
    yield from _process_checks(memory_probe, before)
    yield from _sampling_checks(memory_probe, device)
    yield from _step_checks(device)


def _allocator_checks(memory_probe: MemoryProbe, device: torch.device) -> Iterator[Check]:
    held = torch.empty(GIB, dtype=torch.uint8, device=device)
    memory = memory_probe.snapshot()[0]
    for name, function in (
        ("allocated_bytes", torch.cuda.memory_allocated),
        ("reserved_bytes", torch.cuda.memory_reserved),
        ("peak_allocated_bytes", torch.cuda.max_memory_allocated),
        ("peak_reserved_bytes", torch.cuda.max_memory_reserved),
    ):
        yield check(f"{name} and torch.cuda", getattr(memory, name), function(device))
    free, total = torch.cuda.mem_get_info(device)
    # What the driver keeps is not CUDA's to give: it is left out of its total and of its free.
    driver = memory.reserved_by_driver_bytes or 0
    yield check("free_bytes and mem_get_info", memory.free_bytes, free, 2 * MIB)
    yield check("total_bytes - driver's and mem_get_info", memory.total_bytes - driver, total, GIB)
    del held


def _nvidia_smi_checks(memory_probe: MemoryProbe) -> Iterator[Check]:
    fields = {
        "memory.total": "total_bytes",
        "memory.used": "used_bytes",
        "memory.free": "free_bytes",
        "memory.reserved": "reserved_by_driver_bytes",
    }
    rows = _nvidia_smi(f"--query-gpu=uuid,{','.join(fields)}")
    memory = memory_probe.snapshot()[0]
    row = next((row for row in rows if row[0] == memory.uuid), None)
    for index, attribute in enumerate(fields.values(), start=1):
        listed = None if row is None else _mib(row[index])
        # nvidia-smi rounds to MiB, and asks a moment earlier.
        yield check(f"{attribute} and nvidia-smi", getattr(memory, attribute), listed, 4 * MIB)
    note = f"memory info version {memory.memory_info_version}, {memory.label}"
    yield check("nvidia-smi lists the UUID", int(row is not None), 1, 0, note)


def _process_checks(memory_probe: MemoryProbe, before: DeviceMemory) -> Iterator[Check]:
    held = torch.empty(2 * GIB, dtype=torch.uint8, device=memory_probe.devices[0])
    memory = memory_probe.snapshot()[0]
    note = f"obtained by {memory.process_bytes_source!r}, before by {before.process_bytes_source!r}"
    rows = _nvidia_smi("--query-compute-apps=pid,used_memory")
    listed = next((_mib(row[1]) for row in rows if row[0] == str(os.getpid())), None)
    yield check("process_bytes and nvidia-smi", memory.process_bytes, listed, 4 * MIB, note)
    # Besides what torch reserved there is the context, some hundreds of MiB.
    beside = None if memory.process_bytes is None else memory.process_bytes - memory.reserved_bytes
    yield check("process_bytes beside the reserved", beside, GIB // 2, GIB // 2, note)
    del held


def _sampling_checks(memory_probe: MemoryProbe, device: torch.device) -> Iterator[Check]:
    torch.cuda.empty_cache()
    factor = torch.ones(8192, 8192, device=device)
    factor @ factor  # cuBLAS takes its workspace at the first product
    torch.cuda.synchronize()
    before = memory_probe.snapshot()[0]
    with memory_probe.measure() as usage:
        held = torch.empty(4 * GIB, dtype=torch.uint8, device=device)
        for _ in range(50):  # busy for long enough to be seen
            factor @ factor
        torch.cuda.synchronize()
        del held
        torch.cuda.empty_cache()
    peak = usage.devices[0]
    sampled = None
    if peak.peak_used_bytes is not None and before.used_bytes is not None:
        sampled = peak.peak_used_bytes - before.used_bytes
    grown = peak.peak_reserved_bytes - before.reserved_bytes  # 4 GiB, and a product
    note = f"{usage.num_samples} samples in {usage.elapsed_s:.3f} s; {usage.sampling_error or ''}"
    yield check("the allocator reserved 4 GiB more", grown, 4 * GIB, GIB)
    yield check("the sampled peak is the reserved", sampled, grown, 64 * MIB, note)
    yield check("the measured block is valid", int(usage.valid), 1, 0, usage.reason or "")


def _step_checks(device: torch.device, length: int = 128) -> Iterator[Check]:
    """A training step of four replicas that share the GPU."""
    layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)
    module = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    model = BalancedDataParallel(4, module, [device] * 4)
    optimizer = torch.optim.AdamW(module.parameters())
    inputs = torch.randn(32, length, 512, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()

    step()
    with model.memory.measure() as usage:
        step()
    [uses] = memory_breakdown(model, optimizer).values()
    peak = torch.get_device_module(device).max_memory_allocated(device)
    yield check("step's peak and torch.cuda", usage.devices[0].peak_allocated_bytes, peak, 0)
    yield check(
        "breakdown's sum and torch.cuda", sum(uses.values()), peak, 0, str(uses)
    )
    parameters = sum(-(-p.nbytes // 512) * 512 for p in module.parameters())
    yield check("parameters of the breakdown", uses["parameter"], parameters, 0)
    yield check("gradients of the breakdown", uses["gradient"], parameters, 0)
    state = uses["optimizer state"]
    yield check("two moments of AdamW", state, 2 * parameters, parameters // 100, "and step counts")


def emulation() -> Iterator[Check]:
    """Part 2: what emulated devices predict."""
    device = torch.device("cuda", torch.cuda.current_device())
    checks = []
    for workload in map(find_workload, BUILT_IN):
        for batch_size in (workload.batch_size // 4, workload.batch_size // 2, workload.batch_size):
            for precision in (None, torch.bfloat16):
                varied = replace(workload, precision=precision)
                for num_replicas, gather in ((1, True), (2, True), (2, False)):
                    checks.append(
                        compare_peaks(varied, batch_size, num_replicas, device, gather=gather)
                    )
                    yield checks[-1]
    yield from summaries(checks)


def compare_peaks(
    workload: Workload,
    batch_size: int,
    num_replicas: int,
    device: torch.device,
    *,
    gather: bool = True,
) -> Check:
    """Returns the steady peak of a training step, emulated and on ``device``."""
    even = even_share(batch_size, num_replicas)
    predicted = emulated_peak(workload, batch_size, num_replicas, gather=gather)
    measured, held, kept = measure_peaks(
        workload, batch_size, even, [device] * num_replicas, gather=gather
    )
    precision = "float32" if workload.precision is None else str(workload.precision)
    name = f"{workload.name}, batch {batch_size}, {precision}, {[0] * num_replicas}"
    name += ", gathered" if gather else ", loss on each device"
    if measured.status == "oom":
        return check(name, predicted, None, 0, "out of memory on the GPU")
    note = f"{predicted / held[0] - 1:+.2%}; cuBLAS's {kept[0] / MIB:.0f} MiB left out"
    return check(name, predicted, held[0], round(0.10 * held[0]), note)


def summaries(checks: list[Check]) -> Iterator[Check]:
    """Yields the checks of all errors together, in parts per million."""
    pairs = [(c["measured"], c["reference"]) for c in checks if c["measured"] and c["reference"]]
    errors = [measured / reference - 1 for measured, reference in pairs]
    if not errors:
        yield check("errors", None, 0, 0, "nothing could be compared")
        return
    sizes = sorted(map(abs, errors))
    median, worst = (round(1e6 * size) for size in (statistics.median(sizes), sizes[-1]))
    too_low = sum(error < 0 for error in errors)
    yield check("median error, ppm", median, 0, 30_000)
    yield check("worst error, ppm", worst, 0, 100_000)
    note = f"of {len(errors)}, by {-min(*errors, 0):.2%} at most"
    yield check("how many were too low", too_low, None, 0, note)


SMALL_BATCH, LARGE_BATCH = 8, 64


def speed() -> Iterator[Check]:
    """Part 3: how long steps take."""
    count = torch.cuda.device_count()
    for name in ("bert-base", "gpt2-small"):
        workload = BUILT_IN[name]()
        module = workload.model().to("cuda:0")
        for device_ids in ([0] * 4, *([list(range(count))] if count > 1 else [])):
            for batch_size in (SMALL_BATCH, LARGE_BATCH):
                gpu0_bsz = batch_size // len(device_ids)
                models = {
                    "ours": BalancedDataParallel(gpu0_bsz, module, device_ids),
                    "nn.DataParallel": nn.DataParallel(module, device_ids),
                    "one GPU": module,
                }
                for training in (True, False):
                    goal = 1000
                    if batch_size == SMALL_BATCH:
                        goal = 700 if training else 500
                    times = step_seconds(workload, batch_size, models, training=training)
                    what = "training" if training else "evaluation"
                    yield speed_check(
                        f"{name}, batch {batch_size}, {device_ids}, {what}", times, goal
                    )
                models["ours"].close()


def speed_check(name: str, times: dict[str, float], goal: int) -> Check:
    """Returns whether our time is at most ``goal`` thousandths of nn.DataParallel's."""
    note = ", ".join(f"{model} {1e3 * seconds:.2f} ms" for model, seconds in times.items())
    ratio = round(1000 * times["ours"] / times["nn.DataParallel"])
    return check(name, ratio, goal, note=note, outcome="ok" if ratio <= goal else "FAILED")


def _nvidia_smi(query: str) -> list[list[str]]:
    """Returns the rows that nvidia-smi answers, none where it is not there."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [[cell.strip() for cell in row] for row in csv.reader(output.splitlines())]


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.isdigit() else None


PARTS: dict[str, Callable[[], Iterator[Check]]] = {
    "probe": probe,
    "emulation": emulation,
    "speed": speed,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks that need an NVIDIA GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    if not torch.cuda.is_available() or torch.version.cuda is None:
        print("gpu_validation: torch sees no NVIDIA GPU here", file=sys.stderr)
        return 1
    parts = arguments.parts or list(PARTS)
    if len(parts) > 1:  # a process for each: what libraries keep of one would count in the next
        command = [sys.executable, __file__, "--results", str(arguments.results)]
        return max(subprocess.run([*command, part], check=False).returncode for part in parts)
    [part] = parts
    checks = list(PARTS[part]())
    versions = {
        "cuda": torch.version.cuda,
        "nvidia-ml-py": importlib.metadata.version("nvidia-ml-py"),
        "driver": next(iter(_nvidia_smi("--query-gpu=driver_version")), ["unknown"])[0],
    }
    note = "Figures are bytes, or 1 for true; of speed, thousandths."
    hardware = torch.cuda.get_device_name()
    for path in write_table(
        part, checks, arguments.results, on=hardware, note=note, versions=versions
    ):
        print(path)
    for row in checks:
        print(f"{row['outcome']:8} {row['check']}")
    return int(any(row["outcome"] == "FAILED" for row in checks))


if __name__ == "__main__":
    sys.exit(main())
