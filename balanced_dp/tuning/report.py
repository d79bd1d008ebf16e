"""The report of all measurements, and the choices that outputs show, such as the best option."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch

from ..emulation.machine import is_emulated, is_symbolic
from ..errors import ArgumentError
from ..memory.units import format_bytes
from ..search import utilizations
from ..split import as_integer
from .options import Goal, Option, largest_batch, ranked

SCHEMA = 5
"""The version of a report's fields."""

_WRAPPER = re.compile(r"\b(?:\w+\.)*(Balanced)?DataParallel\((?(1)(?:gpu0_bsz=)?[\w.\"']+, )")
"""In a line that wraps a model, the part that depends on the split."""

RESERVE = 2**30
"""Bytes of each device to keep free by default, for CUDA's context and workspaces of libraries.

Measured on an H200: 821 MiB for the context and the libraries, 65 MiB for cuBLAS's workspaces.
"""

Mode = Literal["symbolic", "emulated", "real"]


def mode_of(device: torch.device) -> Mode:
    """Return how a device is measured: with shapes only, emulated with values, or real."""
    if is_symbolic(device):
        return "symbolic"
    return "emulated" if is_emulated(device) else "real"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Record when, where and how figures were obtained.

    Attributes:
        created: the time in ISO 8601, UTC.
        command: the command line.
        versions: versions of Python and the relevant packages.
        machine: the operating system, the number of CPUs, and the names of the devices.
    """

    created: str
    command: str
    versions: dict[str, str]
    machine: dict[str, str]

    @classmethod
    def of(cls, devices: Sequence[torch.device] = ()) -> Provenance:
        """Return the provenance of figures that this process obtains on devices."""
        names = (torch.get_device_module(device).get_device_name(device) for device in devices)
        versions = {name: _version(name) for name in ("balanced-dp", "torch", "nvidia-ml-py")}
        return cls(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=_command(),
            versions={"python": platform.python_version(), **versions},
            machine={
                "platform": platform.platform(),
                "CPUs": str(os.cpu_count()),
                "devices": ", ".join(names),
            },
        )


def _command() -> str:
    path = Path(sys.argv[0])
    if path.name == "ipykernel_launcher.py":
        return "a notebook"
    program = f"python -m {path.parent.name}" if path.name == "__main__.py" else path.name
    return " ".join([program, shlex.join(sys.argv[1:])]).strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # imported from a folder
        return "not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Combine all measured options with the workload and the goal of the measurements.

    Attributes:
        schema: the version of these fields.
        provenance: where and how the options were measured.
        workload: the name of the workload or the script.
        mode: how devices were measured: emulated with shapes only (symbolic), emulated with values,
            or real.
        num_parameters: number of trained parameters.
        precision: the dtype of autocast, or None.
        batch_size: samples in the requested batch.
        capacity_bytes: capacity of each device.
        has_capacity: whether ``capacity_bytes`` are capacities of devices; otherwise each is the
            highest peak of the even split, in whole MiB.
        reserve_bytes: bytes of each capacity to keep free for contexts and workspaces, which the
            peaks do not count.
        goal: how options are ranked, as in ``tune``.
        options: all measured options, in order.
        failures: why an option could not be measured, by its arguments.
        wrapped_at: where a script wraps its model, as file:line and the line itself.
        is_trainer: whether a Trainer wraps the model.
        notes: sentences about a script's run.
    """

    schema: int = SCHEMA
    provenance: Provenance
    workload: str
    mode: Mode
    num_parameters: int
    precision: str | None = None
    batch_size: int
    capacity_bytes: tuple[int, ...]
    reserve_bytes: int = 0
    goal: Goal
    options: tuple[Option, ...]
    failures: dict[str, str] = field(default_factory=dict)
    has_capacity: bool = True
    wrapped_at: tuple[str, ...] = ()
    is_trainer: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        devices: Sequence[torch.device],
        options: Sequence[Option],
        capacities: Sequence[int] | None,
        reserve: int,
        goal: Goal | None,
        **others: Any,
    ) -> Report:
        """Return the report of options that were measured on devices.

        Args:
            devices: the devices.
            options: at least one option.
            capacities: capacity of each device; None means the highest peak of the even split, in
                whole MiB.
            reserve: bytes of each device to keep free.
            goal: the goal; None means speed, or headroom if ``capacities`` is None.
            **others: further fields of the report.
        """
        has_capacity = capacities is not None
        if capacities is None:
            even = next((option for option in options if option.is_even), options[0])
            capacities = [math.ceil(max(1, *even.peak_bytes) / 2**20) * 2**20] * len(devices)
        return cls(
            provenance=Provenance.of(devices),
            mode=mode_of(devices[0]),
            batch_size=options[0].batch_size,
            capacity_bytes=tuple(capacities),
            reserve_bytes=reserve,
            goal=goal or ("speed" if has_capacity else "headroom"),
            options=tuple(options),
            has_capacity=has_capacity,
            **others,
        )

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.capacity_bytes)

    @property
    def budgets(self) -> list[int]:
        """The bytes of each device that may be used: its capacity less the reserve."""
        return [capacity - self.reserve_bytes for capacity in self.capacity_bytes]

    @property
    def ranked_options(self) -> list[Option]:
        """The options that fit and are not inferior to another one in everything, best first."""
        return ranked(self.options, self.batch_size, self.budgets, self.goal)

    @property
    def best(self) -> Option:
        """The best option; if none fits, the option that lacks the least memory."""
        of_batch = (option for option in self.options if option.batch_size == self.batch_size)

        def lacks(option: Option) -> tuple[bool, float, float]:
            is_out = option.out_of_memory is not None
            return is_out, option.utilization(self.budgets), -option.speed

        return next(iter(self.ranked_options), min(of_batch, key=lacks))

    @property
    def even(self) -> Option | None:
        """The even split with the first option's ``gather`` and ``spread``, None if unmeasured."""
        return self.even_like(self.options[0])

    def even_like(self, option: Option) -> Option | None:
        """Return the even split with the batch size, ``gather`` and ``spread`` of an option.

        Return None if this split was not measured.
        """
        same = (o for o in self.options if o.is_even and o.batch_size == option.batch_size)
        return next((o for o in same if o.kind == option.kind), None)

    @property
    def is_script(self) -> bool:
        """Whether the report is of a script, whose options differ only in the split."""
        return self.is_trainer or bool(self.wrapped_at)

    @property
    def line(self) -> str:
        """The expression that wraps the model of a training script as in the best option."""
        return self.best.line

    def assignments(self, option: Option) -> list[str]:
        """Return the lines that wrap the models of the script as in an option.

        They are the script's own lines with another ``gpu0_bsz``, so they keep ``dim``,
        ``device_ids`` and ``.to(device)``.
        """
        call = option.line.partition("model")[0]

        def wrapper(match: re.Match[str]) -> str:
            return match[0] if call == "nn.DataParallel(" and not match[1] else call

        sources = (place.partition(": ")[2] for place in self.wrapped_at)
        lines = [_WRAPPER.sub(wrapper, s).rstrip() for s in sources if _WRAPPER.search(s)]
        trainer = ["trainer = Trainer(...)  # unchanged"] * self.is_trainer
        return lines or trainer or [f"model = {option.line}"]

    def largest_batch(self, option: Option) -> Option:
        """Return the option of the same kind with the largest batch that fits, else ``option``."""
        return largest_batch(option, self.options, self.budgets)

    def what_lacks(self) -> str:
        """Return how much each device lacks with the least full option, and which batch fits."""
        best = self.best
        pairs = enumerate(zip(best.peak_bytes, self.budgets, strict=True))
        lacks = [
            f"device {i} needs {format_bytes(held)} and lacks {format_bytes(held - budget)}"
            for i, (held, budget) in pairs
            if held > budget
        ]
        lacks += [best.out_of_memory] if best.out_of_memory else []
        kept = f", as {format_bytes(self.reserve_bytes)} of each is kept free (--reserve)"
        lacks[-1] += kept * bool(self.reserve_bytes)
        fitting = [option for option in self.options if option.fits(self.budgets)]
        least = min(option.batch_size for option in self.options)
        remedy = f"not even a batch of {least} fits"
        if least == self.batch_size > 1:  # the report of a script, whose batches are given
            remedy = "no other batch was measured, so try a smaller one"
        states = (best.uses[0].get(use, 0) for use in ("parameter", "gradient", "optimizer state"))
        if self.is_script and not best.spread and sum(states) > self.budgets[0]:
            remedy = "weights and optimizer state alone do not fit, but spread=True divides them"
        if fitting:
            largest = max(fitting, key=lambda option: option.batch_size)
            remedy = f"the largest batch that fits is {largest.batch_size}, with {largest.line}"
        return (
            f"a batch of {self.batch_size} does not fit: with {best.line}, "
            f"{', '.join(lacks)}; {remedy}"
        )


def checked_reserve(reserve: int | None, capacities: Sequence[int] | None) -> int:
    """Return the bytes of each device to keep free.

    By default this is ``RESERVE``, or 0 without capacities.

    Raises:
        ArgumentError: a capacity is not larger than ``reserve``, or ``reserve`` is given without
            capacities.
    """
    if reserve and capacities is None:
        raise ArgumentError("--reserve needs --memory, the capacity of the emulated devices")
    default = 0 if capacities is None else RESERVE
    reserve = as_integer("reserve", default if reserve is None else reserve, minimum=0)
    if any(capacity <= reserve for capacity in capacities or ()):
        raise ArgumentError(
            f"{format_bytes(reserve)} of each device is kept free, but there are devices of "
            f"{', '.join(map(format_bytes, sorted(set(capacities or ()))))}; lower --reserve"
        )
    return reserve


def bottleneck(option: Option, budgets: Sequence[int]) -> tuple[int, int]:
    """Return the index of the device that is the fullest, and its peak."""
    full = utilizations(option.peak_bytes, budgets)
    index = full.index(max(full))
    return index, option.peak_bytes[index]
