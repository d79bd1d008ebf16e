"""Run a training script on GPUs that need not be there, and say what it needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..emulation.machine import current_machine
from ..errors import ArgumentError, InfeasiblePlanError
from ..integrations.replacements import WrappedAt, replaced_data_parallel
from ..planning.estimates import with_loss_on_each_device, with_spread
from ..planning.split_planner import Plan, Planner, check_fits, utilizations
from ..report import tables
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
from .script import check_script, replaced_calls, run_script

_RESERVE = 2**29
"""Bytes of each device to keep free for CUDA's context and workspaces, as for a plan."""

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
        title: what was measured.
        measured: the measurement of the best split, or of the only one; None without any.
        even: the measurement of the even split.
        budgets: the bytes of each device that may be used, if they matter.
        report: the report, if there are enough measurements for one.
        notes: sentences and lines of code.
    """

    exit_code: int
    title: str
    measured: Measurement | None
    even: Measurement | None
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
    num_devices, capacities = _devices(settings)
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
            modules = map(torch.get_device_module, devices)
            capacities = [
                module.get_device_properties(device).total_memory
                for module, device in zip(modules, devices, strict=True)
            ]
        say(_opening(settings, devices, capacities, emulates))
        recorder = LoopRecorder(
            devices,
            capacities,
            settings.gpu0_bsz,
            name=Path(settings.script).name,
            reserve=0 if capacities is None else _RESERVE,
            num_steps=settings.steps,
        )
        with recorder.recording(), replaced_data_parallel(recorder) as calls:
            exit_code = run_script(settings.script, settings.arguments, settings.is_module)
        return _result(settings, recorder, calls, exit_code)


def _devices(settings: RunSettings) -> tuple[int, list[int] | None]:
    """Return the number of devices and their capacities, None if they do not matter."""
    num_devices = settings.num_devices
    if num_devices is None:
        num_devices = default_num_devices(settings.emulate)
    if settings.memory is None:
        return num_devices, None
    check_devices(num_devices, settings.memory, settings.emulate)
    capacities = parse_capacities(settings.memory, settings.num_devices, num_devices)
    if min(capacities) <= _RESERVE:
        raise ArgumentError(
            f"--memory {settings.memory} leaves nothing to use: {format_bytes(_RESERVE)} of each "
            "device are kept free for contexts and workspaces"
        )
    return len(capacities), capacities


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
    sizes = ""
    if capacities is not None:
        sizes = f" of {', '.join(map(format_bytes, dict.fromkeys(capacities)))}"
    kind = "shapes only: the values that it reads are NaN" if settings.symbolic else "on the CPU"
    return f"running {settings.script} on {len(devices)} emulated GPUs{sizes}, {names} ({kind})"


def _result(
    settings: RunSettings, recorder: LoopRecorder, calls: Sequence[WrappedAt], exit_code: int
) -> RunResult:
    report = recorder.report()
    is_best = report is not None and settings.gpu0_bsz == "auto"
    measured = report.chosen if report is not None and is_best else recorder.last
    budgets = None
    if recorder.capacities is not None:
        budgets = [capacity - recorder.reserve for capacity in recorder.capacities]
    title = ""
    if measured is not None:
        title = measured.workload
        if measured.batch_size:
            title += f", batches of {measured.batch_size}"
        if recorder.is_splitting:
            title += f", gpu0_bsz={measured.chunk_sizes[0]}"
    notes = [*_how_it_ended(settings, recorder, exit_code)]
    if report is not None:
        assert measured is not None
        notes += [*_plan(measured, report, budgets), *_what_else_helps(recorder, report, calls)]
        notes += _change(calls, report.plan)
    elif exit_code == 0:
        notes += _without_report(settings, recorder)
    even = None if report is None else report.even
    return RunResult(exit_code, title, measured, even, budgets, report, tuple(notes))


def _how_it_ended(settings: RunSettings, recorder: LoopRecorder, exit_code: int) -> Iterator[str]:
    """Yield what the measurements are of, if that is not obvious."""
    if settings.steps is not None and recorder.num_iterations >= settings.steps:
        yield f"The script was ended after {settings.steps} training steps (--steps)."
    elif recorder.last is not None and not recorder.num_iterations and exit_code == 0:
        yield "The script took no training step: these are the peaks of the whole run."
    elif recorder.last is not None and not recorder.num_iterations:
        yield "These are the peaks of the first training step, which was not finished."


def _plan(measured: Measurement, report: Report, budgets: Sequence[int] | None) -> Iterator[str]:
    """Yield what the measured split is like, and what fits with the best one."""
    plan = report.plan
    bottleneck, even = (tables.bottleneck(m, budgets) for m in (measured, report.even))
    yield f"The bottleneck is {bottleneck}; with the even split it is {even}."
    if budgets is None:
        yield (
            "With as much memory on each device as the even split takes, the largest batch is "
            f"{plan.max_batch_size}, with gpu0_bsz={plan.max_batch_gpu0_bsz}."
        )
    else:
        yield (
            f"The largest batch that fits is {plan.max_batch_size}, with "
            f"gpu0_bsz={plan.max_batch_gpu0_bsz}; with the even split it is "
            f"{plan.even_max_batch_size}."
        )
    if plan.max_batch_size > _FAR * plan.batch_size:
        yield (
            f"That is computed from batches of {plan.batch_size}, which is far from it: run the "
            "script with a larger batch to be sure."
        )
    try:
        check_fits(plan, report.chosen.peak_bytes)
    except InfeasiblePlanError as error:
        text = str(error)
        yield f"{text[0].upper()}{text[1:]}."
    first, *others = utilizations(report.chosen.peak_bytes, plan.budgets)
    if plan.gpu0_bsz == 0 and first * _WORTH_IT > max(others):
        yield "Device 0 stays the fullest without samples of its own; the table shows of what."


def _what_else_helps(
    recorder: LoopRecorder, report: Report, calls: Sequence[WrappedAt]
) -> Iterator[str]:
    """Yield which options would help more, with the lines to write."""
    plan = report.plan
    input_bytes = _input_bytes_per_sample(report.chosen)
    num_input_bytes = round(input_bytes * sum(plan.chunk_sizes[1:]))
    if num_input_bytes > _MUCH * max(report.chosen.peak_bytes):
        yield (
            f"Device 0 holds {format_bytes(num_input_bytes)} of inputs for the other devices: the "
            "script moves the whole batch there. Inputs that stay on the CPU go to each device."
        )
    gathered_bytes = report.chosen.breakdown[0].get("gathered output", 0) / plan.batch_size
    on_each_device = with_loss_on_each_device(report.model, gathered_bytes, input_bytes)
    best = max(utilizations(report.chosen.peak_bytes, plan.budgets))
    for spread, model in (
        (False, on_each_device),
        (True, with_spread(on_each_device, len(plan.chunk_sizes))),
    ):
        planner = Planner(model, plan.budgets)
        gpu0_bsz = planner.best_gpu0_bsz(plan.batch_size)
        full = planner.utilization(plan.batch_size, gpu0_bsz)
        largest = planner.max_batch_size(planner.balanced_gpu0_bsz)
        if full >= best * _WORTH_IT or largest < plan.batch_size:
            continue
        best = full
        held = format_bytes(round(full * max(plan.budgets)))
        value = planner.balanced_gpu0_bsz(largest)
        estimate = (
            f"An estimate: {held} on the fullest device, and batches up to {largest} (with "
            f"gpu0_bsz={value})"
        )
        yield f"{estimate}, {_option(recorder, gpu0_bsz, spread, is_called=bool(calls))}"


def _option(recorder: LoopRecorder, gpu0_bsz: int, spread: bool, is_called: bool) -> str:
    """Return an option in words, with the lines to write."""
    how, options, lines = [], [], []
    if recorder.returns_loss and recorder.returns_rows:
        how.append("if forward returns the loss without other outputs")
    elif not recorder.returns_loss:
        how.append("with the loss on each device")
        options.append("gather=False")
        lines.append("    criterion = balanced_dp.BalancedCriterion(criterion)  # see docs/loss.md")
    if spread:
        how.append("with parameters on all devices")
        options.append("spread=True")
    if is_called:
        given = ", ".join([str(gpu0_bsz), "model", *options])
        lines.insert(0, f"    model = balanced_dp.BalancedDataParallel({given})")
    else:
        lines = [f"    gpu0_bsz={gpu0_bsz}" + ", spread=True" * spread]
    return "\n".join([f"{' and '.join(how)}:", *lines])


def _input_bytes_per_sample(measured: Measurement) -> float:
    """Return what device 0 holds of the inputs of each sample that is on another device."""
    first, *others = measured.chunk_sizes
    inputs = [uses.get("input", 0) for uses in measured.breakdown]
    own = max(
        (used / size for used, size in zip(inputs[1:], others, strict=True) if size), default=0
    )
    return max(0.0, inputs[0] - own * first) / max(1, sum(others))


_FAR = 4
"""Predictions for batches that are larger by this factor are said to be uncertain."""

_MUCH = 0.1
"""The inputs for other devices are mentioned if they are more than this part of the peak."""

_WORTH_IT = 0.9
"""An option is mentioned if the bottleneck device is less full by this factor or more."""


def _change(calls: Sequence[WrappedAt], plan: Plan) -> Iterator[str]:
    """Yield the lines that change the script."""
    if plan.gpu0_bsz >= even_share(plan.batch_size, len(plan.chunk_sizes)):
        yield "The even split of nn.DataParallel is the best one here."
        return
    lines = (
        "from balanced_dp.integrations.transformers import BalancedTrainer\n"
        f"trainer = BalancedTrainer(gpu0_bsz={plan.gpu0_bsz}, ...)  # instead of Trainer(...)"
    )
    if calls:  # else a Trainer wraps the model
        places = ", ".join(f"{at.filename}:{at.line_number}" for at in calls)
        lines = replaced_calls(calls, plan.gpu0_bsz) or (
            f"model = balanced_dp.BalancedDataParallel({plan.gpu0_bsz}, ...)  # in {places}"
        )
    yield f"To split with gpu0_bsz={plan.gpu0_bsz}, and change nothing else:\n{lines}"


def _without_report(settings: RunSettings, recorder: LoopRecorder) -> Iterator[str]:
    """Yield why there is no plan."""
    measured = recorder.last
    if measured is None:
        yield "Nothing was measured: the script ran no forward pass with gradients."
    elif not any(measured.peak_bytes):
        yield "The script put no tensors on the devices."
    elif recorder.is_splitting and settings.gpu0_bsz is None:
        yield "Without --gpu0-bsz even, the run searches for the best value of gpu0_bsz."
    elif recorder.is_splitting and len(recorder.measurements) == 1 < recorder.num_iterations - 2:
        yield "That is the even split, so there is nothing to compare it with; lower --gpu0-bsz."
    elif recorder.is_splitting:
        yield (
            "A plan takes four training steps or more of one batch size; the script took "
            f"{recorder.num_iterations}."
        )
    elif recorder.is_balanced:
        yield "The script has its own BalancedDataParallel, which is left as it is."
    elif settings.num_devices == 1:
        yield "There is one device, and nothing to split."
    elif sum(map(bool, measured.chunk_sizes)) < 2:
        yield (
            "The script splits no batch over the devices; model = torch.nn.DataParallel(model) "
            "does, and this command shows what it saves."
        )
    else:
        yield (
            "The script has a class of its own that splits batches, which runs as it is; with "
            "torch.nn.DataParallel instead, this command searches for the best split."
        )
