"""Run all checks on the devices of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch

from ..devices import is_emulated, resolve_devices
from ..errors import ArgumentError
from ..memory.nvml import Nvml, NvmlError
from ..memory.probe import MemoryProbe
from ..torch_versions import accelerator_count, accelerator_type
from ..tuning.open_devices import check_devices, open_devices
from ..tuning.report_types import Provenance
from ..tuning.workloads import find_workload
from ..units import format_bytes
from .check import PARTS, SCHEMA, Check, Kind, ValidationReport, failed, guarded
from .gradients import GradientChecks
from .peaks import communicator_checks, peak_checks, predict_peaks
from .seconds import time_checks

NUM_CHECKS = 14
"""Approximate number of checks."""

_PER_DEVICE = 4
"""Samples of the workload for each device."""


@dataclass(frozen=True, slots=True)
class ValidationSettings:
    """Describe on what to run the checks.

    Attributes:
        num_devices: number of devices, or of the replicas that share a single one.
        emulate: whether to emulate devices even if there are GPUs.
        workload: the built-in workload that is trained for memory and time. None means
            ``"gpt2-small"``, and on emulated devices ``"char-lm"``.

    Raises:
        ArgumentError: There are not so many devices, or fewer than two are asked for.
    """

    num_devices: int
    emulate: bool = False
    workload: str | None = None

    def __post_init__(self) -> None:
        if self.num_devices < 2:
            raise ArgumentError(
                f"num_devices must be at least 2, got {self.num_devices}; replicas may share a GPU "
                "(CUDA_VISIBLE_DEVICES=0)"
            )
        if self.kind == "devices":
            check_devices(self.num_devices, None, self.emulate)

    @property
    def kind(self) -> Kind:
        """Return what the checks run on."""
        if self.emulate or accelerator_type() is None:
            return "emulated"
        return "devices" if accelerator_count() > 1 else "one device"

    @property
    def description(self) -> str:
        """Return in words what the checks run on."""
        if self.kind == "emulated":
            why = "" if accelerator_type() else ": torch sees no GPU here"
            return f"{self.num_devices} emulated devices, on the CPU{why}"
        devices = self._devices
        names = dict.fromkeys(torch.get_device_module(d).get_device_name(d) for d in devices)
        if self.kind == "one device":
            return f"{self.num_devices} replicas that share {devices[0]}, {' and '.join(names)}"
        return f"{devices[0]} to {devices[-1]}, {' and '.join(names)}"

    @property
    def _devices(self) -> list[torch.device]:
        return resolve_devices(None, accelerator_type())[: self.num_devices]

    @contextmanager
    def open(self) -> Iterator[Sequence[torch.device]]:
        """Yield the device of each replica."""
        if self.kind == "one device":
            yield self._devices * self.num_devices
            return
        with open_devices(self.num_devices, symbolic=False, emulate=self.emulate) as devices:
            yield devices


def validate(
    settings: ValidationSettings, on_check: Callable[[Check], object] = lambda check: None
) -> ValidationReport:
    """Run all checks and return their report.

    The check of communicators runs first, as they are opened once. It is the last in the report.

    Args:
        settings: on what to run them.
        on_check: called with each check.
    """
    name = settings.workload or ("char-lm" if settings.kind == "emulated" else "gpt2-small")
    workload = find_workload(name)
    batch_size = _PER_DEVICE * settings.num_devices
    checks: list[Check] = []
    try:
        predicted = predict_peaks(
            workload, batch_size, settings.num_devices, is_shared=settings.kind == "one device"
        )
    except Exception as error:  # gradients can be checked without it
        predicted, checks = {}, [failed("peaks", "prediction", error)]
    with settings.open() as devices:
        machine = [_described(device) for device in dict.fromkeys(devices)]
        before = MemoryProbe(devices).snapshot()  # in use by others, before any context of ours
        others_bytes = {str(memory.device): memory.used_bytes or 0 for memory in before}
        communicators = communicator_checks(devices, workload, batch_size)
        peaks = peak_checks(workload, batch_size, predicted, devices, others_bytes)
        seconds = time_checks(name, batch_size, devices)
        for check in chain(
            guarded("communicators", "measurement", communicators),
            GradientChecks(devices).run(),
            guarded("peaks", "measurement", peaks),
            guarded("seconds", "measurement", seconds),
        ):
            checks.append(check)
            on_check(check)
    return ValidationReport(
        schema=SCHEMA,
        provenance=_provenance(machine),
        kind=settings.kind,
        description=settings.description,
        workload=name,
        batch_size=batch_size,
        checks=tuple(sorted(checks, key=lambda check: PARTS.index(check.part))),
    )


def _described(device: torch.device) -> str:
    """Return the name of a device, and the memory of one that is not emulated."""
    properties = torch.get_device_module(device).get_device_properties(device)
    if is_emulated(device):
        return str(properties.name)
    return f"{device} {properties.name}, {format_bytes(properties.total_memory)}"


def _provenance(devices: Sequence[str]) -> Provenance:
    """Return the provenance with the versions of CUDA and of NVIDIA's driver."""
    provenance = Provenance.of_this_process(devices)
    try:
        driver = Nvml().driver_version() or "unknown"
    except NvmlError:
        driver = "none"
    versions = {**provenance.versions, "CUDA": torch.version.cuda or "none", "driver": driver}
    return replace(provenance, versions=versions)
