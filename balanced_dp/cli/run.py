"""Run a training script on GPUs that need not be there, and report what it needs."""

from __future__ import annotations

import linecache
import math
import os
import site
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..emulation.machine import current_machine
from ..errors import ArgumentError
from ..integrations.replacements import WrappedAt, replaced_data_parallel
from ..parallel.data_parallel import BalancedDataParallel
from ..tuning.loop import Loop
from ..tuning.open_devices import default_num_devices, open_devices, uses_emulation
from ..tuning.options import Goal, Option
from ..tuning.report import SCHEMA, Provenance, Report, mode_of
from ..tuning.tuner import RESERVE, check_reserve
from ..units import parse_bytes
from . import terminal
from .arguments import parse_capacities
from .script import check_script, run_script

_REPORTED = "80GiB"
"""The capacity that emulated devices report to the script if none is given."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Record what the run of a script told.

    Attributes:
        exit_code: that of the script.
        report: the report; None if the script's batches were not split here.
        measured: the last measurement; None without any.
        budgets: the bytes of each device that may be used, if they matter.
        notes: sentences about what was measured.
    """

    exit_code: int
    report: Report | None
    measured: Option | None
    budgets: Sequence[int] | None
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
    goal: Goal | None = None,
    options: Sequence[str] = (),
) -> RunResult:
    """Run a script on GPUs or on emulated devices, and measure its training steps.

    Args:
        script: its file, or with ``is_module`` the name of a module.
        script_arguments: its command line.
        is_module: whether it is run as by ``python -m``.
        gpu0_bsz: how batches are split, as for ``Loop``.
        num_devices: number of devices; None means all GPUs, or four emulated ones.
        memory: capacities as text, for all devices or for each.
        reserve: what is kept free of each, as text; None means ``RESERVE``.
        steps: the number of training steps after which the script is ended.
        symbolic: whether emulated devices keep shapes only.
        emulate: whether to emulate devices even if there are GPUs.
        goal: what the best option is the best in, as for ``tune``.
        options: the names of the command's options, one of which may have been meant.

    Raises:
        ArgumentError: there is no such script, or the devices cannot be opened or are too small.
    """
    check_script(script, is_module, options)
    emulates = uses_emulation(emulate)
    if emulates and reserve is not None and memory is None:
        raise ArgumentError("--reserve needs --memory, the capacity of the emulated devices")
    reserve_bytes = RESERVE if reserve is None else parse_bytes(reserve, "--reserve")
    num = default_num_devices(emulate) if num_devices is None else num_devices
    capacities = None
    if memory is not None:
        capacities = parse_capacities(memory, num_devices, num)
        check_reserve(capacities, reserve_bytes)
        num = len(capacities)
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
        shapes = " with shapes only: the values that it reads are NaN" if symbolic else ""
        kind = "emulated GPUs" if emulates else "GPUs"
        terminal.say(f"running {script} on {len(devices)} {kind}{shapes}")
        budgets = None if capacities is None else [c - reserve_bytes for c in capacities]
        loop = Loop(gpu0_bsz, devices, budgets, steps)
        with loop.recording(), replaced_data_parallel(loop) as calls:
            exit_code = run_script(script, script_arguments, is_module)
        report, notes = None, tuple(_how_it_ended(loop, exit_code))
        if loop.is_splitting and loop.options:
            report = _report(loop, calls, Path(script).name, reserve_bytes, goal, notes)
        elif exit_code == 0:
            notes += (_why_no_answer(loop),)
        return RunResult(exit_code, report, loop.last, loop.budgets, notes)


def _report(
    loop: Loop,
    calls: Sequence[WrappedAt],
    name: str,
    reserve_bytes: int,
    goal: Goal | None,
    notes: tuple[str, ...],
) -> Report:
    options = tuple(loop.options.values())
    budgets = loop.budgets
    if budgets is None:  # the capacity is what the even split takes, as for tune
        even = next((option for option in options if option.is_even), options[0])
        budgets = [math.ceil(max(even.peak_bytes) / 2**20) * 2**20] * len(loop.devices)
        reserve_bytes = 0
    modules = [(torch.get_device_module(device), device) for device in loop.devices]
    return Report(
        schema=SCHEMA,
        provenance=Provenance.of_this_process(m.get_device_name(d) for m, d in modules),
        workload=name,
        mode=mode_of(loop.devices[0]),
        num_parameters=loop.num_parameters,
        precision=loop.precision,
        batch_size=options[0].batch_size,
        capacity_bytes=tuple(budget + reserve_bytes for budget in budgets),
        reserve_bytes=reserve_bytes,
        goal=goal or ("headroom" if loop.budgets is None else "speed"),
        options=options,
        failures={},
        has_capacity=loop.budgets is not None,
        wrapped_at=tuple(map(_place, calls)),
        is_trainer=not calls,
        notes=notes,
    )


def _place(call: WrappedAt) -> str:
    """Return where a script wraps a model, and the line."""
    filename, line_number = call
    source = linecache.getline(filename, line_number).strip()
    if filename.startswith((*site.getsitepackages(), site.getusersitepackages())):
        return f"{filename}:{line_number}, a line of a library: {source}"
    return f"{os.path.relpath(filename)}:{line_number}: {source}"


def _how_it_ended(loop: Loop, exit_code: int) -> Iterator[str]:
    """Yield what the measurements are of, if that is not obvious."""
    num_taken = loop.num_iterations
    if loop.num_steps is not None and num_taken >= loop.num_steps:
        yield f"The script was ended after {num_taken} training steps (--steps)."
    elif loop.last is not None and not num_taken:
        yield "No optimizer took a step: these are the peaks of the whole run."
    if loop.is_splitting and loop.options and not loop.is_over:
        yield (
            f"The search for gpu0_bsz was not over after {num_taken} training steps; with more of "
            "them it may find a better value."
        )


def _why_no_answer(loop: Loop) -> str:
    """Return why there is no option to choose from."""
    if loop.last is None:
        return "Nothing was measured: the script ran no forward pass with gradients."
    if loop.is_splitting:
        return (
            "To compare splits takes two training steps or more with the same batches; the script "
            f"took {loop.num_iterations}."
        )
    if isinstance(loop.model, BalancedDataParallel):
        return (
            "The script's BalancedDataParallel is left as it is: it has device_weights, repeats a "
            "device, or the script sets its gpu0_bsz later."
        )
    if sum(map(bool, loop.last.peak_bytes)) < 2:
        return (
            "The script splits no batch over the devices; model = torch.nn.DataParallel(model) "
            "does, and this command shows what it saves."
        )
    return (
        "The script has a class of its own that splits batches, which runs as it is; with "
        "torch.nn.DataParallel instead, this command searches for the best split."
    )
