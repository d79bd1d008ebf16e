"""Run a training script on GPUs that need not be there, and say what it needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..emulation.machine import current_machine
from ..errors import InfeasiblePlanError
from ..integrations.replacements import replaced_data_parallel
from ..planning.split_planner import check_fits
from ..split import even_share
from ..tuning.loop_recorder import LoopRecorder
from ..tuning.report_types import Report
from ..tuning.step_benchmark import (
    Measurement,
    check_devices,
    default_num_devices,
    open_devices,
    uses_emulation,
)
from ..units import format_bytes
from .arguments import parse_capacities
from .script import check_script, replaced_call, run_script

_RESERVE = 2**29
"""Bytes of each device to keep free for CUDA's context and workspaces, as for a plan."""


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
    steps: int | None = None
    symbolic: bool = False
    emulate: bool = False


@dataclass(frozen=True, slots=True)
class RunResult:
    """Record what the run of a script told.

    Attributes:
        exit_code: that of the script.
        measured: the last measurement of the largest batch, or None.
        report: the report, or None if one split alone was measured.
        capacities: what the devices were compared with, or None.
        notes: sentences and lines of code.
    """

    exit_code: int
    measured: Measurement | None
    report: Report | None
    capacities: Sequence[int] | None
    notes: tuple[str, ...]


def run(settings: RunSettings, say: Callable[[str], object]) -> RunResult:
    """Run a script on GPUs or on emulated devices, and measure its training steps.

    ``say`` is called with a line on the devices before the script begins.

    Raises:
        ArgumentError: there is no such script, or the devices cannot be opened.
    """
    check_script(settings.script, settings.is_module)
    emulates = uses_emulation(settings.emulate)
    num_devices = settings.num_devices
    capacities = None
    if settings.memory is not None:
        if not emulates:
            check_devices(2, settings.memory, settings.emulate)
        default = default_num_devices(settings.emulate)
        capacities = parse_capacities(settings.memory, num_devices, default)
        num_devices = len(capacities)
    if num_devices is None:
        num_devices = default_num_devices(settings.emulate)
    with (
        warnings.catch_warnings(),
        open_devices(
            num_devices,
            memory=capacities,
            symbolic=settings.symbolic,
            emulate=settings.emulate,
            as_cuda=True,
        ) as devices,
    ):
        if emulates:
            warnings.simplefilter("ignore", ResourceWarning)  # the script's tensors outlive it
            current_machine().allow_more()
            current_machine().reads_unknown = True
        say(_opening(settings, devices, capacities, emulates))
        known = capacities
        if not emulates:
            known = [
                torch.get_device_module(d).get_device_properties(d).total_memory for d in devices
            ]
        recorder = LoopRecorder(
            devices,
            known,
            settings.gpu0_bsz,
            name=Path(settings.script).name,
            reserve=0 if known is None else _RESERVE,
            num_steps=settings.steps,
        )
        with recorder.recording(), replaced_data_parallel(recorder):
            exit_code = run_script(settings.script, settings.arguments, settings.is_module)
        recorder.end()
        report = recorder.report()
        notes = tuple(_notes(settings, recorder, report))
    return RunResult(exit_code, recorder.last, report, recorder.capacities, notes)


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
    sizes = (
        ""
        if capacities is None
        else " of " + ", ".join(map(format_bytes, sorted(set(capacities), reverse=True)))
    )
    values = "shapes only, so the values it reads are NaN" if settings.symbolic else "on the CPU"
    return f"running {settings.script} on {len(devices)} emulated GPUs{sizes}, {names} ({values})"


def _notes(settings: RunSettings, recorder: LoopRecorder, report: Report | None) -> Iterator[str]:
    """Yield what there is to say beside the tables."""
    if settings.steps is not None and recorder.num_iterations >= settings.steps:
        yield f"The script was ended after {settings.steps} training steps (--steps)."
    if recorder.last is None:
        yield (
            "Nothing was measured: the script took no step of a torch.optim.Optimizer, and ran no "
            "forward pass with gradients."
        )
        return
    if not recorder.num_iterations:
        yield "The peaks are those of the first training step, which was not finished."
    if report is None:
        yield from _without_report(settings, recorder)
        return
    plan = report.plan
    try:
        check_fits(plan, report.chosen.peak_bytes)
    except InfeasiblePlanError as error:
        yield f"It does not fit: {error}."
    if plan.gpu0_bsz >= even_share(plan.batch_size, len(plan.chunk_sizes)):
        yield "The even split of nn.DataParallel is the best one here."
        return
    diff = recorder.wrapped_at and replaced_call(recorder.wrapped_at, plan.gpu0_bsz)
    if diff:
        yield diff
    elif recorder.wrapped_at is not None:
        where = f"{recorder.wrapped_at.filename}:{recorder.wrapped_at.line_number}"
        yield f"{where}: write balanced_dp.BalancedDataParallel({plan.gpu0_bsz}, model, ...)"
    else:
        yield (
            "from balanced_dp.integrations.transformers import BalancedTrainer\n"
            f"trainer = BalancedTrainer(gpu0_bsz={plan.gpu0_bsz}, ...)  # instead of Trainer"
        )


def _without_report(settings: RunSettings, recorder: LoopRecorder) -> Iterator[str]:
    """Yield why there is no plan."""
    if recorder.is_splitting and settings.gpu0_bsz is None:
        yield "Without --gpu0-bsz even, the run searches for the best value of gpu0_bsz."
    elif recorder.is_splitting:
        yield (
            "A plan takes three training steps or more of one batch size; the script took "
            f"{recorder.num_iterations}."
        )
    elif recorder.last is not None and sum(map(bool, recorder.last.chunk_sizes)) < 2:
        yield (
            "The script splits no batch over the devices; model = torch.nn.DataParallel(model) "
            "does, and this command shows what it saves."
        )
