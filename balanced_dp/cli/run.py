"""Run a training script on GPUs that need not be there, and say what it needs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
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
from ..tuning.split_search import SplitSearch
from ..units import format_bytes, parse_bytes
from . import answer, terminal
from .arguments import parse_capacities
from .script import check_script, run_script

_REPORTED = "80GiB"
"""The capacity that emulated devices report to the script if none is given."""


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


def run_and_measure(
    script: str,
    script_arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    gpu0_bsz: int | Literal["auto"] | None = "auto",
    num_devices: int | None = None,
    memory: str | None = None,
    reserve: str | None = None,
    steps: int | None = None,
    symbolic: bool = False,
    emulate: bool = False,
) -> RunResult:
    """Run a script on GPUs or on emulated devices, and measure its training steps.

    Args:
        script: its file, or with ``is_module`` the name of a module.
        script_arguments: its command line.
        is_module: whether it is run as by ``python -m``.
        gpu0_bsz: how batches are split, as for ``SplitSearch``.
        num_devices: number of devices; None means all GPUs, or four emulated ones.
        memory: capacities as text, for all devices or for each.
        reserve: what is kept free of each, as text; None means ``RESERVE``.
        steps: the number of training steps after which the script is ended.
        symbolic: whether emulated devices keep shapes only.
        emulate: whether to emulate devices even if there are GPUs.

    Raises:
        ArgumentError: there is no such script, or the devices cannot be opened or are too small.
    """
    check_script(script, is_module)
    emulates = uses_emulation(emulate)
    if emulates and reserve is not None and memory is None:
        raise ArgumentError("--reserve needs --memory, the capacity of the emulated devices")
    reserve_bytes = RESERVE if reserve is None else parse_bytes(reserve, "--reserve")
    capacities, num = None, default_num_devices(emulate) if num_devices is None else num_devices
    if memory is not None:
        check_devices(num, memory, emulate)
        capacities = parse_capacities(memory, num_devices, num)
        num = len(capacities)
        if min(capacities) <= reserve_bytes:
            raise ArgumentError(
                f"--memory {memory} leaves nothing to use: {format_bytes(reserve_bytes)} of each "
                "device are kept free for contexts and workspaces; --reserve 0 keeps nothing"
            )
    with (
        warnings.catch_warnings(),
        open_devices(
            num,
            memory=_REPORTED if capacities is None and emulates else capacities,
            symbolic=symbolic,
            emulate=emulate,
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
        kind = "shapes only: the values that it reads are NaN" if symbolic else "on the CPU"
        terminal.say(
            f"running {script} on {_named(devices, capacities, kind if emulates else None)}"
        )
        reserve_bytes = 0 if capacities is None else reserve_bytes
        search = SplitSearch(gpu0_bsz, devices, capacities, reserve_bytes)
        recorder = LoopRecorder(search, Path(script).name, steps)
        with recorder.recording(), replaced_data_parallel(recorder) as calls:
            exit_code = run_script(script, script_arguments, is_module)
        return _result(recorder, calls, exit_code)


def _named(
    devices: Sequence[torch.device], capacities: Sequence[int] | None, emulation: str | None
) -> str:
    """Return the devices in words; ``emulation`` is how they are emulated, or None."""
    names = f"{devices[0]} to {devices[-1]}" if len(devices) > 1 else str(devices[0])
    if emulation is None:
        return f"{len(devices)} GPUs, {names}"
    sizes = [] if capacities is None else [format_bytes(capacity) for capacity in capacities]
    of = f" of {', '.join(sizes[:1] if len(set(sizes)) == 1 else sizes)}" if sizes else ""
    gpus = "GPU" if len(devices) == 1 else "GPUs"
    return f"{len(devices)} emulated {gpus}{of}, {names} ({emulation})"


def _result(recorder: LoopRecorder, calls: Sequence[WrappedAt], exit_code: int) -> RunResult:
    search = recorder.search
    report, measured, budgets = search.report(), search.asked, search.budgets
    if report is not None and search.wanted == "auto":
        measured = report.chosen
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
        notes.append(answer.what_to_change(search, calls, report.plan, even_fits))
    elif exit_code == 0:
        notes += answer.why_no_plan(recorder)
    return RunResult(exit_code, title, measured, budgets, report, tuple(notes))
