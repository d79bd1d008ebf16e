"""Run a training script on GPUs or emulated devices, and report the memory that it needs."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import linecache
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from unittest import mock

from .. import errors
from ..emulation.fallback import accelerators, training_devices
from ..emulation.machine import current_machine
from ..integrations.replacements import WrappedAt, replaced_data_parallel
from ..memory.out_of_memory import num_ooms
from ..memory.peaks import capacities_of
from ..report.tables import Part, use_table
from ..split import even_share
from ..tuning.loop import Loop
from ..tuning.options import Goal
from ..tuning.report import Report, checked_reserve
from . import console
from .script import is_library, run_script

_REPORTED = "80GiB"
"""The capacity that emulated devices report to the script if the user gives no capacity."""

_MALLOC_OPTIONS = {-1: 2**31 - 1, -2: 2**26, -3: 2**25}
"""Values for M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD.

With these values, glibc keeps as much freed memory as it can.
"""


def prepare_process() -> None:
    """Change settings of the whole process so that emulated devices are faster."""
    gc.freeze()  # so that the collector does not visit what the imports created
    # By default, glibc returns freed memory to the system, and the replicas' threads have to get it
    # again in the next training step. With this default, a step of BERT took 5 % longer. Other C
    # libraries have no mallopt.
    if mallopt := sys.platform == "linux" and getattr(ctypes.CDLL(None), "mallopt", None):
        for option, value in _MALLOC_OPTIONS.items():
            mallopt(option, value)


def run_and_measure(
    script: str,
    script_arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    gpu0_bsz: int | Literal["auto"] | None = "auto",
    num_devices: int | None = None,
    capacities: Sequence[int] | None = None,
    reserve: int | None = None,
    steps: int | None = None,
    symbolic: bool = False,
    emulate: bool = False,
    goal: Goal | None = None,
) -> tuple[int, Report | None, list[Part]]:
    """Run a script on GPUs or on emulated devices, and measure its training steps.

    Args:
        script: the file of the script, or the name of a module if ``is_module``.
        script_arguments: the command line of the script.
        is_module: whether to run a module, as ``python -m`` does.
        gpu0_bsz: as in ``Loop``: ``"auto"`` searches for the best value, None means the even split,
            and an integer is the most samples that device 0 gets.
        num_devices: number of devices. None means all GPUs if there are two or more, otherwise four
            emulated devices. It is ignored if ``capacities`` is given.
        capacities: capacity of each emulated device in bytes. A script that needs more still runs.
            If ``capacities`` is given, the devices are emulated even if there are GPUs.
        reserve: bytes of each device to keep free, as in ``tune``.
        steps: the number of training steps after which the script is ended; None means no limit.
        symbolic: whether emulated devices keep the shapes of tensors but no values.
        emulate: whether to emulate devices even if there are GPUs.
        goal: how the splits (the number of samples of each device) are ranked, as in ``tune``.

    Returns:
        ``(exit_code, report, parts)``: the exit code of the script, the report, and an empty list.
        If no split was measured, the report is None, and the list contains the sentences and tables
        to print.

    Raises:
        ArgumentError: the capacity of a device is not larger than ``reserve``, or an argument is
            out of its range.
    """
    num = num_devices if capacities is None else len(capacities)
    found = accelerators(num, emulate or capacities is not None)
    if found:
        capacities = capacities_of(found)
    reserve = checked_reserve(reserve, capacities)
    with (
        warnings.catch_warnings(),
        training_devices(
            num,
            memory=capacities or _REPORTED,
            symbolic=symbolic,
            as_cuda=True,
            emulate=not found,
        ) as devices,
    ):
        if not found:
            # At the end of the block, emulated devices warn if tensors of the script still exist.
            warnings.simplefilter("ignore", ResourceWarning)
            current_machine().ignore_capacities()
            current_machine().reads_unknown_as_nan = True
        shapes = " with shapes only: floats that the script reads are NaN" if symbolic else ""
        kind = f"{'' if found else 'emulated '}GPU{'s' * (len(devices) > 1)}"
        console.say(f"running {script} on {len(devices)} {kind}{shapes}")
        loop = Loop(
            gpu0_bsz, devices, capacities and [size - reserve for size in capacities], steps
        )
        warned: list[str] = []
        with (
            loop.recording(),
            replaced_data_parallel(loop) as calls,
            mock.patch.object(errors, "listeners", [warned.append]),
        ):
            exit_code = run_script(script, script_arguments, is_module)
        notes, name = tuple(loop.notes(has_failed=exit_code != 0)), Path(script).name
        notes += tuple(f"Warning: {message}." for message in dict.fromkeys(warned))
        tried = loop.last_split
        # If a script fails although the split is even, the split is not the cause. If symbolic is
        # True, the usual cause is that the script reads a value of a tensor.
        is_uneven = tried and tried[0] < even_share(sum(tried), len(tried))
        if exit_code == 1 and is_uneven and not symbolic:
            fact = f"The script failed after a batch was split into {tried}"
            notes += (f"{fact}. To rule out the split as the cause, try --gpu0-bsz even.",)
        if exit_code == 1 and found and any(num_ooms(found)):
            sizes = ",".join(f"{size >> 20}MiB" for size in capacities_of(found))
            advice = f"to search without them, add --memory {sizes} --symbolic --steps 14"
            notes += (f"GPUs ran out of memory; {advice}.",)
        if loop.options:
            budgets = loop.budgets  # in the order of the model's devices
            report = Report.of(
                loop.devices,
                loop.options,
                None if budgets is None else [budget + reserve for budget in budgets],
                reserve,
                goal,
                workload=name,
                num_parameters=loop.num_parameters,
                precision=loop.precision,
                wrapped_at=tuple(map(_place, calls)),
                is_trainer=not calls,
                notes=notes,
            )
            return exit_code, report, []
        parts = [] if loop.highest is None else [use_table(loop.highest, loop.budgets)]
        why = [] if exit_code else [_why_no_answer(loop, calls)]
        return exit_code, None, [*parts, *notes, *why]


def _place(call: WrappedAt) -> str:
    """Return where a script wraps a model, as ``file:line: source``."""
    filename, line_number = call
    source = linecache.getline(filename, line_number).strip()
    with contextlib.suppress(SyntaxError):  # the file may have changed while it ran
        found = [
            ast.unparse(node)
            for node in ast.walk(ast.parse("".join(linecache.getlines(filename))))
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return)
            and node.lineno <= line_number <= (node.end_lineno or 0)
        ]
        source = "; ".join(found) or source
    if is_library(filename):
        return f"{filename}:{line_number}, a line of a library: {source}"
    return f"{os.path.relpath(filename)}:{line_number}: {source}"


def _why_no_answer(loop: Loop, calls: Sequence[WrappedAt]) -> str:
    """Return a sentence that says why the run of a script gave no measurements to compare."""
    if loop.highest is None:
        why = "the script ran no forward pass with gradients"
        return f"Nothing was measured: {why}. Did it resume from a checkpoint of the last epoch?"
    if len(loop.devices) < 2:
        return "On one device there are no splits to compare; try --devices 4."
    if loop.batch_size:
        ran = f"{loop.num_iterations}{', without optimizer state' * (loop.num_iterations == 1)}"
        return f"To compare splits, run more steps with the largest batch; the script ran {ran}."
    if sum(map(bool, loop.highest.peak_bytes)) < 2 and calls:
        return f"No input was split, or device_ids has one device; leave it out: {_place(calls[0])}"
    if sum(map(bool, loop.highest.peak_bytes)) < 2:
        return "The script splits no batches; add model = torch.nn.DataParallel(model.cuda())."
    return (
        "The splits were not changed: the script uses its own DataParallel, device_weights, or "
        "a device twice. To find the best split, use BalancedDataParallel without these."
    )
