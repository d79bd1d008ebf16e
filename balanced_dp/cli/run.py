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
from ..tuning.open_devices import check_devices, default_num_devices, open_devices, uses_emulation
from ..tuning.options import Goal, Option
from ..tuning.report import SCHEMA, Provenance, Report, mode_of
from ..tuning.tuner import RESERVE
from ..units import format_bytes, parse_bytes
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
        measured: the last measurement; None without any.
        budgets: the bytes of each device that may be used, if they matter.
        report: the report; None if the script's batches were not split here.
        notes: sentences about what was measured.
    """

    exit_code: int
    measured: Option | None
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
        budgets = None if capacities is None else [c - reserve_bytes for c in capacities]
        loop = Loop(gpu0_bsz, devices, budgets, steps)
        with loop.recording(), replaced_data_parallel(loop) as calls:
            exit_code = run_script(script, script_arguments, is_module)
        report, notes = None, tuple(_how_it_ended(loop, exit_code))
        if loop.is_splitting and loop.options:
            name = Path(script).name
            report = _report(loop, calls, name, reserve_bytes, goal, notes)
        elif exit_code == 0:
            notes += tuple(_why_no_answer(loop))
        return RunResult(exit_code, loop.last, loop.budgets, report, notes)


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
        wrapped_at=tuple(map(_place, calls)),
        is_trainer=not calls,
        notes=notes,
    )


def _place(call: WrappedAt) -> str:
    """Return where a script wraps a model, and the line."""
    source = linecache.getline(call.filename, call.line_number).strip()
    libraries = (*site.getsitepackages(), site.getusersitepackages())
    if call.filename.startswith(libraries):
        return f"{call.filename}:{call.line_number}, a line of a library: {source}"
    return f"{os.path.relpath(call.filename)}:{call.line_number}: {source}"


def _how_it_ended(loop: Loop, exit_code: int) -> Iterator[str]:
    """Yield what the measurements are of, if that is not obvious."""
    num_taken, num_asked = loop.num_iterations, loop.num_steps
    if num_asked is not None and num_taken >= num_asked:
        steps = "one training step" if num_asked == 1 else f"{num_asked} training steps"
        yield f"The script was ended after {steps} (--steps)."
    elif loop.last is not None and not num_taken and exit_code == 0:
        yield "The script took no training step: these are the peaks of the whole run."
    elif loop.last is not None and not num_taken:
        yield "These are the peaks of the first training step, which was not finished."
    if loop.is_splitting and loop.options and not loop.is_over:
        yield (
            f"The search for gpu0_bsz was not over after {num_taken} training steps; with more of "
            "them it may find a better value."
        )
    elif loop.is_splitting and loop.wanted is None:
        yield "Without --gpu0-bsz even, the run searches for the best value of gpu0_bsz."


def _why_no_answer(loop: Loop) -> Iterator[str]:
    """Yield why there is no option to choose from."""
    measured = loop.last
    if measured is None:
        yield "Nothing was measured: the script ran no forward pass with gradients."
    elif not any(measured.peak_bytes):
        yield "The script put no tensors on the devices."
    elif loop.is_splitting:
        yield (
            "To compare splits takes two training steps or more with the same batches; the script "
            f"took {loop.num_iterations}."
        )
    elif len(loop.devices) == 1:
        yield "There is one device, and nothing to split."
    elif isinstance(loop.model, BalancedDataParallel):
        yield (
            "The script's BalancedDataParallel is left as it is: it has device_weights, repeats a "
            "device, or the script sets its gpu0_bsz later."
        )
    elif sum(map(bool, measured.peak_bytes)) < 2:
        yield (
            "The script splits no batch over the devices; model = torch.nn.DataParallel(model) "
            "does, and this command shows what it saves."
        )
    else:
        yield (
            "The script has a class of its own that splits batches, which runs as it is; with "
            "torch.nn.DataParallel instead, this command searches for the best split."
        )
