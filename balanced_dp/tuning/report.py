"""Define ``Report``: measurements of several ways to train, and which of them is the best."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
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
"""The version of the report format (the fields of ``Report``), which each report file contains."""

RESERVE = 2**30
"""Bytes of each device to keep free by default, for the CUDA context and libraries' workspaces.

Measured on an H200: 821 MiB for CUDA's context and its libraries, and another 65 MiB for cuBLAS's
workspaces.
"""

Mode = Literal["symbolic", "emulated", "real"]


def _with_gpu0_bsz(source: str, gpu0_bsz: int | None) -> str:
    """Return the statement ``source`` after putting ``gpu0_bsz`` into each call that wraps a model.

    The result is empty if ``source`` contains no call that wraps a model, or if ``source``, such as
    ``else: ...``, is not a complete statement.
    """
    value, is_given = ast.Constant(gpu0_bsz), False
    try:
        statements = ast.parse(source)
    except SyntaxError:
        return ""
    for call in ast.walk(statements):
        if isinstance(call, ast.Call):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            named = [keyword for keyword in call.keywords if keyword.arg == "gpu0_bsz"]
            has_first = bool(call.args) and not isinstance(call.args[0], ast.Starred)
            if named:
                named[0].value = value
            elif name == "BalancedDataParallel" and has_first:
                call.args[0] = value
            elif name == "DataParallel" and gpu0_bsz is not None:
                call.func, call.args = ast.Name("BalancedDataParallel"), [value, *call.args]
            elif name != "DataParallel":
                continue
            is_given = True
    return ast.unparse(statements) * is_given


@dataclass(frozen=True, slots=True)
class Provenance:
    """Record when, where and how the measurements of a report were made.

    Attributes:
        created: the time in ISO 8601, UTC.
        command: the command line of the process, or ``"a notebook"``.
        versions: the versions of Python and of the relevant packages, by name.
        machine: the operating system, the number of CPUs, and the names of the devices.
    """

    created: str
    command: str
    versions: dict[str, str]
    machine: dict[str, str]

    @classmethod
    def of(cls, devices: Sequence[torch.device] = ()) -> Provenance:
        """Return a record of the current time, the command line, the versions and the machine.

        The record of the machine contains the names of ``devices``.
        """
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
    """All measurements of a workload or a script, and the choice of the best option.

    A workload is a model with its batches, its loss and its optimizer. An option is a way to
    train a batch, with its measurements. Options may differ in the size of the batch, in its
    split over the devices, and in ``gather`` and ``spread``, as in ``BalancedDataParallel``.

    Attributes:
        schema: the version of the fields of this class.
        provenance: when, where and how the options were measured.
        workload: the name of the workload or the script.
        mode: how the devices were measured. ``"symbolic"`` means emulated with the shapes of
            tensors but no values, ``"emulated"`` means emulated with values, and ``"real"`` means
            accelerators.
        num_parameters: the number of elements of all trained parameters. In the report of a script,
            these are the parameters of its first optimizer.
        precision: the dtype of autocast as text; None without autocast.
        batch_size: the number of samples in the requested batch. In the report of a script, the
            number of samples in the script's largest batch.
        capacity_bytes: the capacity of each device.
        has_capacity: whether the capacities are known, because the user gave them or accelerators
            reported them. If not, each capacity is the highest peak of the even split. If the even
            split was not measured, the first option is used instead of the even split.
        reserve_bytes: the bytes of each device to keep free for CUDA's context and for workspaces
            of libraries, which the measured peaks do not include.
        goal: how the options are ranked: ``"speed"``, ``"headroom"`` or ``"batch"``, as in
            ``tune``.
        options: all measured options, in the order of measurement.
        failures: a dict from ``"gather=False"`` or ``"spread=True"`` to the reason why options with
            this argument could not be measured. Empty if there was no failure.
        wrapped_at: the lines of a script that wrap a model, each as ``file:line: source``.
        is_trainer: whether a ``Trainer`` of transformers wraps the model of a script.
        notes: sentences about anything unusual in the run of a script, such as an early end.
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
        """Return a report of the ``options`` that this process has measured on ``devices``.

        Args:
            devices: the devices on which the options were measured.
            options: the measured options, at least one. The report's ``batch_size`` is the batch
                size of the first option.
            capacities: the capacity of each device in bytes. If this is None, each capacity is the
                highest peak of the even split. If the even split was not measured, the first option
                is used instead of the even split.
            reserve: the bytes of each device to keep free.
            goal: how the options are ranked; None means ``"speed"``, or ``"headroom"`` if
                ``capacities`` is None.
            **others: further attributes of the report, such as ``workload``.
        """
        mode: Mode = "real"
        if is_emulated(devices[0]):
            mode = "symbolic" if is_symbolic(devices[0]) else "emulated"
        has_capacity = capacities is not None
        if capacities is None:
            even = next((option for option in options if option.is_even), options[0])
            capacities = [max(1, *even.peak_bytes)] * len(devices)
        return cls(
            provenance=Provenance.of(devices),
            mode=mode,
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
        """The best of the options that fit in memory, in descending order of merit.

        Options for ``batch_size`` samples form a group if they differ only in ``gpu0_bsz``, or only
        in ``device_weights``. At most two options of a group are ranked: the option with the most
        samples on device 0, and the option whose fullest device is the least full. If ``goal`` is
        ``"batch"``, a group contains options of all batch sizes, and the even split has a group of
        its own. Only the option with the largest batch of each group is then ranked.

        An option is left out if a better-ranked option is at least as good in all respects, and
        has the same ``features`` or only some of them. For details, see ``ranked``.
        """
        return ranked(self.options, self.batch_size, self.budgets, self.goal)

    @property
    def best(self) -> Option:
        """The best option by ``goal``; if none is ranked, the option that is closest to fitting.

        Options are ranked if at least one option for ``batch_size`` samples fits in memory. For the
        goal ``"batch"``, it is enough that an option of any batch size fits.

        The option that is closest to fitting is the option for ``batch_size`` samples whose fullest
        device is the least full. Options that ran out of memory are considered only if there are no
        others.
        """
        of_batch = (option for option in self.options if option.batch_size == self.batch_size)

        def lacks(option: Option) -> tuple[bool, float, float]:
            is_out = option.out_of_memory is not None
            return is_out, option.utilization(self.budgets), -option.speed

        return next(iter(self.ranked_options), min(of_batch, key=lacks))

    @property
    def even(self) -> Option | None:
        """The option that has the even split and is otherwise like the first measured option.

        It has the batch size, ``gather`` and ``spread`` of the first measured option. If the first
        measured option has the even split, the result is this option. None if the even split was
        not measured with this batch size, ``gather`` and ``spread``.
        """
        return self.even_like(self.options[0])

    def even_like(self, option: Option) -> Option | None:
        """Return the option that has the even split and is otherwise like ``option``.

        The result has the batch size, ``gather`` and ``spread`` of ``option``. It is None if the
        even split was not measured with this batch size, ``gather`` and ``spread``.
        """
        same = (o for o in self.options if o.is_even and o.batch_size == option.batch_size)
        return next((o for o in same if o.kind == option.kind), None)

    @property
    def is_script(self) -> bool:
        """Whether a script was measured, not a workload."""
        return self.is_trainer or bool(self.wrapped_at)

    @property
    def not_tried(self) -> list[str]:
        """Changes of a script that may save memory of device 0, but that ``run`` does not measure.

        One of them is ``gather=False``, which saves nothing if forward returns the loss. So
        ``gather=False`` is listed only if gathered outputs, or activations of a loss computed
        outside forward, make up more than 1 % of the peak of device 0. The bytes of these
        activations are the bytes of all activations of device 0 with the even split, minus the most
        of any other device.
        """
        best, even = self.best, self.even or self.best
        peak, outputs = best.peak_bytes[0] or 1, best.uses[0].get("gathered output", 0)
        held = [use.get("activation", 0) for use in even.uses]
        loss = held[0] - max(held[1:], default=0)
        why = "if the script, and not forward, computes the loss"
        why = f"outputs fill {outputs / peak:.0%} of device 0" if outputs > 0.01 * peak else why
        saves_memory = best.gather and not self.is_trainer and max(outputs, loss) > 0.01 * peak
        found = [f"gather=False with BalancedCriterion ({why})"] * saves_memory
        return found + ["spread=True (parameters on all devices)"] * (not best.spread)

    @property
    def line(self) -> str:
        """The code that wraps ``model`` for the best option, such as ``nn.DataParallel(model)``."""
        return self.best.line

    def assignments(self, option: Option) -> list[str]:
        """Return the lines of code with which a script wraps its models as in ``option``.

        Each line is a statement of the script, without comments, in which only the name of the
        wrapping class and its ``gpu0_bsz`` are replaced. So arguments such as ``dim`` and
        ``device_ids``, and calls such as ``.to(device)``, stay as they are. If the statements that
        wrap models are unknown, the result is ``trainer = Trainer(...)  # unchanged`` for a script
        with a ``Trainer``. For any other script, it is then ``option.line``, assigned to ``model``.
        """
        sources = dict.fromkeys(place.partition(": ")[2] for place in self.wrapped_at)
        lines = [line for s in sources if (line := _with_gpu0_bsz(s, option.gpu0_bsz))]
        trainer = ["trainer = Trainer(...)  # unchanged"] * self.is_trainer
        return lines or trainer or [f"model = {option.line}"]

    def largest_batch(self, option: Option) -> Option:
        """Return the option with the largest batch among those that fit and have no other features.

        The features are an uneven split, the loss on each device, and parameters spread over all
        devices. The result has the same features as ``option``, or only some of them. If the result
        and ``option`` both have uneven splits, these splits may differ. If no such option fits, the
        result is ``option``.
        """
        return largest_batch(option, self.options, self.budgets)

    def what_lacks(self) -> str:
        """Return text that says how much memory each device lacks, and which batch would fit.

        Call this only if ``ranked_options`` is empty. The text describes the option ``best``.
        """
        best = self.best
        pairs = enumerate(zip(best.peak_bytes, self.budgets, strict=True))
        lacks = [
            f"device {i} needs {format_bytes(held)} and lacks {format_bytes(held - budget)}"
            for i, (held, budget) in pairs
            if held > budget
        ]
        lacks += [best.out_of_memory] if best.out_of_memory else []
        kept = f", as {format_bytes(self.reserve_bytes)} of each device is kept free (--reserve)"
        lacks[-1] += kept * bool(self.reserve_bytes)
        fitting = [option for option in self.options if option.fits(self.budgets)]
        least = min(option.batch_size for option in self.options)
        remedy = f"not even a batch of {least} fits"
        if least == self.batch_size > 1:  # the report of a script, whose batches are given
            remedy = "no other batch was measured: try a smaller one"
            remedy += ", or the changes below" * (self.is_script and bool(self.not_tried))
        states = (best.uses[0].get(use, 0) for use in ("parameter", "gradient", "optimizer state"))
        if self.is_script and not best.spread and sum(states) > self.budgets[0]:
            remedy = "device 0 cannot hold weights and optimizer state; spread=True divides them"
        if fitting:
            largest = max(fitting, key=lambda option: option.batch_size)
            remedy = f"the largest batch that fits is {largest.batch_size}, with {largest.line}"
        return (
            f"a batch of {self.batch_size} does not fit: with {best.line}, "
            f"{', '.join(lacks)}; {remedy}"
        )


def checked_reserve(reserve: int | None, capacities: Sequence[int] | None) -> int:
    """Return the number of bytes to keep free on each device; check that each capacity is larger.

    Args:
        reserve: the bytes to keep free; None means ``RESERVE``, or 0 if ``capacities`` is None.
        capacities: the capacity of each device in bytes; None if no capacities are given.

    Raises:
        ArgumentError: a capacity is not larger than ``reserve``, or ``reserve`` is above 0 without
            capacities, or ``reserve`` is negative.
    """
    if reserve and capacities is None:
        raise ArgumentError("--reserve needs --memory, the capacity of the emulated devices")
    default = 0 if capacities is None else RESERVE
    reserve = as_integer("reserve", default if reserve is None else reserve, minimum=0)
    if any(capacity <= reserve for capacity in capacities or ()):
        raise ArgumentError(
            f"{format_bytes(reserve)} of each device is kept free (--reserve), so each needs more "
            f"memory than that, got {', '.join(map(format_bytes, sorted(set(capacities or ()))))}"
        )
    return reserve


def bottleneck(option: Option, budgets: Sequence[int]) -> tuple[int, int]:
    """Return the index and the peak bytes of the device that is the fullest relative to its budget.

    Args:
        option: the option whose peaks are compared.
        budgets: the bytes that each device may hold.
    """
    full = utilizations(option.peak_bytes, budgets)
    index = full.index(max(full))
    return index, option.peak_bytes[index]
