"""Compare predicted peaks of memory with measured ones, and measure what communicators take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..emulation import emulate_devices
from ..memory.probe import MemoryProbe
from ..memory.records import DeviceMemory
from ..planning.split_planner import RESERVE
from ..split import even_share, split_batch
from ..tuning.measurement import Measurement
from ..tuning.step_benchmark import measure_step
from ..tuning.tuner import tune
from ..tuning.workloads import Workload
from ..units import format_bytes
from .check import Check, judged

ALLOWED = 0.1
"""By how much of the measured peak of torch's allocator a prediction may differ."""

_NO_NVML = "no NVML for these devices"


def predict_peaks(
    workload: Workload, batch_size: int, num_devices: int, *, is_shared: bool
) -> dict[int, tuple[int, ...]]:
    """Return the predicted peaks of each device, by ``gpu0_bsz``.

    For distinct devices that is what the memory model of a plan says of the planned split and of
    the even one. The model does not know replicas that share a device: for these, emulated ones
    that share one are measured, with the even split.
    """
    even = even_share(batch_size, num_devices)
    if is_shared:
        return {even: (emulated_peak(workload, batch_size, num_devices),)}
    report = tune(workload, batch_size, num_devices, emulate=True, with_alternatives=False)
    return {
        gpu0_bsz: report.model.predict(split_batch(batch_size, num_devices, gpu0_bsz))
        for gpu0_bsz in dict.fromkeys((even, report.plan.gpu0_bsz))
    }


def emulated_peak(
    workload: Workload, batch_size: int, num_replicas: int, *, gather: bool = True
) -> int:
    """Return the peak of an emulated device that replicas share, with the even split."""
    even = even_share(batch_size, num_replicas)
    with emulate_devices(1, symbolic=True) as emulated:
        devices = list(emulated) * num_replicas
        return measure_step(workload, batch_size, even, devices, gather=gather).peak_bytes[0]


def measure_peaks(
    workload: Workload,
    batch_size: int,
    gpu0_bsz: int,
    devices: Sequence[torch.device],
    *,
    gather: bool = True,
) -> tuple[Measurement, list[int], list[int]]:
    """Train for two steps; return the measurement, and peaks and workspaces of each device.

    Workspaces are what stays allocated: cuBLAS keeps one for each thread and stream that computed.
    The peaks are without them.
    """
    measured = measure_step(workload, batch_size, gpu0_bsz, devices, gather=gather)
    peaks = dict(zip(devices, measured.peak_bytes, strict=True))
    kept = [torch.get_device_module(device).memory_allocated(device) for device in peaks]
    return measured, [p - k for p, k in zip(peaks.values(), kept, strict=True)], kept


def peak_checks(
    workload: Workload,
    batch_size: int,
    predicted: Mapping[int, tuple[int, ...]],
    devices: Sequence[torch.device],
    others_bytes: Mapping[str, int],
) -> Iterator[Check]:
    """Yield for each split a check by torch's counters and one by NVML's.

    Args:
        workload: the workload to train.
        batch_size: samples in the whole batch.
        predicted: the predicted peaks of each distinct device, by ``gpu0_bsz``.
        devices: the device of each replica.
        others_bytes: what NVML reported as used before this process used the devices, by device.
    """
    for gpu0_bsz, predicted_bytes in predicted.items():
        split = f"gpu0_bsz={gpu0_bsz}"
        with MemoryProbe(devices).measure() as usage:
            measured, held, kept = measure_peaks(workload, batch_size, gpu0_bsz, devices)
        if measured.status == "oom":
            for what in ("torch's counters", "NVML"):
                yield Check("peaks", f"{split}, {what}", "-", note="out of memory on the devices")
            continue
        yield torch_check(f"{split}, torch's counters", predicted_bytes, held, max(kept))
        used = [
            None
            if at.peak_used_bytes is None
            else at.peak_used_bytes - others_bytes[str(at.device)]
            for at in usage.devices
        ]
        yield nvml_check(f"{split}, NVML", predicted_bytes, used, usage.sampling_error)


def torch_check(
    what: str, predicted: Sequence[int], held: Sequence[int], workspaces: int = 0
) -> Check:
    """Return the check of the peaks that torch's allocator counted, without workspaces."""
    differences = [p / h - 1 for p, h in zip(predicted, held, strict=True)]
    worst = max(differences, key=abs)
    note = _by_device(differences)
    if workspaces:
        note += f"; workspaces of {format_bytes(workspaces)} left out"
    return judged("peaks", what, 100 * worst, note, abs(worst) <= ALLOWED, f"{ALLOWED:.0%}")


def nvml_check(
    what: str, predicted: Sequence[int], used: Sequence[int | None], error: str | None = None
) -> Check:
    """Return the check of the peaks that NVML reported; the reserve of a plan must cover the rest.

    NVML counts contexts, communicators and the allocator's cache, which a prediction leaves to the
    reserve.
    """
    known = [u for u in used if u is not None]
    if len(known) < len(used) or min(known) <= 0:
        return Check("peaks", what, "-", note=error or _NO_NVML)
    differences = [p / u - 1 for p, u in zip(predicted, known, strict=True)]
    beyond = max(u - p for p, u in zip(predicted, known, strict=True))
    note = f"{_by_device(differences)}; {format_bytes(max(0, beyond))} not predicted"
    worst = max(differences, key=abs)
    return judged("peaks", what, 100 * worst, note, beyond <= RESERVE, format_bytes(RESERVE))


def _by_device(differences: Sequence[float]) -> str:
    if len(differences) == 1:
        return "one device"
    return f"by device: {', '.join(f'{100 * d:+.1f}' for d in differences)}"


def communicator_checks(
    devices: Sequence[torch.device], workload: Workload, batch_size: int
) -> Iterator[Check]:
    """Yield what the first step takes of the free memory of the devices, outside of torch.

    It must be the first step of the process on several devices, as communicators are kept. Two
    devices need none: a bucket goes from one to the other.
    """
    what = "taken by the first step"
    probe = MemoryProbe(devices)
    if len(probe.devices) == 1:
        yield Check("communicators", what, "-", note="replicas that share a device need none")
        return
    if any(memory.nvml_index is None for memory in probe.snapshot()):
        yield Check("communicators", what, "-", note=probe.nvml_error or _NO_NVML)
        return
    lost = first_step_bytes(devices, workload, batch_size)
    note = f"by device: {', '.join(map(format_bytes, lost))}"
    is_within = max(lost) <= RESERVE
    yield judged("communicators", what, max(lost), note, is_within, format_bytes(RESERVE))


def first_step_bytes(
    devices: Sequence[torch.device], workload: Workload, batch_size: int
) -> list[int]:
    """Return for each device by how much more its used memory grows than torch's allocator holds.

    Before, each device trains alone, so that contexts, kernels and workspaces are there.
    """
    even = even_share(batch_size, len(devices))
    for device in devices:
        measure_step(workload, even, even, [device])
    probe = MemoryProbe(devices)
    before = probe.snapshot()
    measure_step(workload, batch_size, even, devices)
    return [
        _outside_torch(later) - _outside_torch(earlier)
        for later, earlier in zip(probe.snapshot(), before, strict=True)
    ]


def _outside_torch(memory: DeviceMemory) -> int:
    return (memory.used_bytes or 0) - (memory.reserved_bytes or 0)
