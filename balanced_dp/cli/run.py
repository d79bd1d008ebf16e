"""Run a training script on GPUs that need not be there, and say what it needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..emulation.machine import current_machine
from ..errors import ArgumentError
from ..integrations.replacements import WrappedAt, replaced_data_parallel
from ..planning.split_planner import RESERVE
from ..tuning.loop_recorder import LoopRecorder
from ..tuning.measurement import Measurement
from ..tuning.open_devices import check_devices, default_num_devices, open_devices, uses_emulation
from ..tuning.options import fits
from ..tuning.report_types import Report
from ..units import format_bytes, parse_bytes
from . import answer
from .arguments import parse_capacities
from .script import check_script, run_script

_REPORTED = "80GiB"
"""The capacity that emulated devices report to the script if none is given."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Describe the run of a script.

    Attributes:
        script: its file, or with ``is_module`` the name of a module.
        arguments: its command line.
        is_module: whether it is run as by ``python -m``.
        gpu0_bsz: how batches are split, as for ``LoopRecorder``.
        num_devices: number of devices; None means all GPUs, or four emulated ones.
        memory: capacities as text, for all devices or for each.
        reserve: what is kept free of each, as text; None means ``RESERVE``.
        steps: the number of training steps after which the script is ended.
        symbolic: whether emulated devices keep shapes only.
        emulate: whether to emulate devices even if there are GPUs.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    gpu0_bsz: int | Literal["auto"] | None = "auto"
    num_devices: int | None = None
    memory: str | None = None
    reserve: str | None = None
    steps: int | None = None
    symbolic: bool = False
    emulate: bool = False


@dataclass(frozen=True, slots=True)
class RunResult:
    """Record what the run of a script told.

    Attributes:
        exit_code: that of the script.
        title: what was measured.
        measured: the measurement of the best split, or of the only one; None without any.
        budgets: the bytes of each device that may be used, if they matter.
        report: the report, if there are enough measurements for one.
        notes: sentences and lines of code.
    """

    exit_code: int
    title: str
    measured: Measurement | None
    budgets: Sequence[int] | None
    report: Report | None
    notes: tuple[str, ...]


def run_and_measure(settings: RunSettings, say: Callable[[str], object]) -> RunResult:
    """Run a script on GPUs or on emulated devices, and measure its training steps.

    ``say`` is called with a line on the devices before the script begins.

    Raises:
        ArgumentError: there is no such script, or the devices cannot be opened or are too small.
    """
    check_script(settings.script, settings.is_module)
    emulates = uses_emulation(settings.emulate)
    num_devices, capacities, reserve = _devices(settings)
    with (
        warnings.catch_warnings(),
        open_devices(
            num_devices,
            memory=_REPORTED if capacities is None and emulates else capacities,
            symbolic=settings.symbolic,
            emulate=settings.emulate,
            as_cuda=True,
        ) as devices,
    ):
        if emulates:
            warnings.simplefilter("ignore", ResourceWarning)  # the script's tensors outlive it
            current_machine().ignore_capacities()
            current_machine().reads_unknown_as_nan = True
        else:
            capacities = [
                torch.get_device_module(device).get_device_properties(device).total_memory
                for device in devices
            ]
        say(_opening(settings, devices, capacities, emulates))
        recorder = LoopRecorder(
            devices,
            capacities,
            settings.gpu0_bsz,
            name=Path(settings.script).name,
            reserve=reserve,
            num_steps=settings.steps,
        )
        with recorder.recording(), replaced_data_parallel(recorder) as calls:
            exit_code = run_script(settings.script, settings.arguments, settings.is_module)
        return _result(settings, recorder, calls, exit_code)


def _devices(settings: RunSettings) -> tuple[int, list[int] | None, int]:
    """Return the number of devices, their capacities, None if unknown, and what is kept free."""
    reserve = RESERVE if settings.reserve is None else parse_bytes(settings.reserve, "--reserve")
    num_devices = settings.num_devices
    if num_devices is None:
        num_devices = default_num_devices(settings.emulate)
    if settings.memory is None:
        if not uses_emulation(settings.emulate):
            return num_devices, None, reserve
        if settings.reserve is not None:
            raise ArgumentError("--reserve needs --memory, the capacity of the emulated devices")
        return num_devices, None, 0
    check_devices(num_devices, settings.memory, settings.emulate)
    capacities = parse_capacities(settings.memory, settings.num_devices, num_devices)
    if min(capacities) <= reserve:
        raise ArgumentError(
            f"--memory {settings.memory} leaves nothing to use: {format_bytes(reserve)} of each "
            "device are kept free for contexts and workspaces; --reserve 0 keeps nothing"
        )
    return len(capacities), capacities, reserve


def _opening(
    settings: RunSettings,
    devices: Sequence[torch.device],
    capacities: Sequence[int] | None,
    emulates: bool,
) -> str:
    """Return the line on the devices that the script runs on."""
    names = f"{devices[0]} to {devices[-1]}" if len(devices) > 1 else str(devices[0])
    if not emulates:
        return f"running {settings.script} on {len(devices)} GPUs, {names}"
    sizes = [] if capacities is None else [format_bytes(capacity) for capacity in capacities]
    of = f" of {', '.join(sizes[:1] if len(set(sizes)) == 1 else sizes)}" if sizes else ""
    kind = "shapes only: the values that it reads are NaN" if settings.symbolic else "on the CPU"
    gpus = "GPU" if len(devices) == 1 else "GPUs"
    return f"running {settings.script} on {len(devices)} emulated {gpus}{of}, {names} ({kind})"


def _result(
    settings: RunSettings, recorder: LoopRecorder, calls: Sequence[WrappedAt], exit_code: int
) -> RunResult:
    report, measured = recorder.report(), recorder.asked
    if report is not None and settings.gpu0_bsz == "auto":
        measured = report.chosen
    budgets = None
    if recorder.capacities is not None:
        budgets = [capacity - recorder.reserve for capacity in recorder.capacities]
    title = ""
    if measured is not None:
        batches = f", batches of {measured.batch_size}" if measured.batch_size else ""
        split = f", gpu0_bsz={measured.chunk_sizes[0]}" if recorder.is_splitting else ""
        title = f"{measured.workload}{batches}{split}"
    notes = [*answer.how_it_ended(recorder, exit_code)]
    if report is not None and measured is not None:
        notes += answer.what_fits(measured, report, budgets)
        notes += answer.what_else_helps(recorder, report, wraps=bool(calls))
        even_fits = budgets is not None and fits(report.even, budgets)
        asked = settings.gpu0_bsz if isinstance(settings.gpu0_bsz, int) else None
        notes.append(answer.what_to_change(calls, report.plan, even_fits, asked))
    elif exit_code == 0:
        notes += answer.why_no_plan(recorder)
    return RunResult(exit_code, title, measured, budgets, report, tuple(notes))
