"""The commands that measure workloads, and those that read their reports."""

from __future__ import annotations

import json
import site
import sys
import sysconfig
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError, BalancedDataParallelError, SymbolicValueError
from . import arguments, terminal

if TYPE_CHECKING:
    from ..tuning.report_types import Report

_PACKAGE = Path(__file__).parents[1]


def workloads_command(json_file: arguments.JsonFile = None) -> None:
    """List the built-in workloads, their number of parameters and a usual batch size."""
    import torch

    from ..tuning.workloads import BUILT_IN
    from . import console

    arguments.check_outputs({"--json": json_file})
    listed: list[dict[str, Any]] = []
    for name, make in BUILT_IN.items():
        workload = make()
        about = (make.__doc__ or "").strip().rstrip(".")
        with torch.device("meta"):
            size = sum(p.numel() for p in workload.new_model().parameters())
        numbers = {"num_parameters": size, "batch_size": workload.batch_size}
        listed.append({"name": name, "about": about, **numbers})
    console.write(json_file, console.as_json, listed)
    if json_file != arguments.STDOUT:
        console.print_workloads(listed)


def plan_command(
    target: arguments.Target,
    memory: Annotated[str, typer.Option(help=arguments.CAPACITY)],
    num_devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Number of devices; default: 4.")
    ] = None,
    batch_size: arguments.BatchSize = None,
    reserve: arguments.Reserve = None,
    loss_on_device: arguments.LossOnDevice = False,
    spread: arguments.Spread = False,
    goal: arguments.For = "speed",
    numeric: arguments.Numeric = False,
    json_file: arguments.JsonFile = None,
) -> None:
    """Find gpu0_bsz for a workload on GPUs that this machine need not have.

    Measures a few training steps on emulated devices that keep shapes only.
    """
    capacities = arguments.parse_capacities(memory, num_devices, default=4)
    arguments.check_outputs({"--json": json_file})
    report = _tuned(
        target,
        batch_size,
        reserve,
        capacities=capacities,
        emulate=True,
        gather=not loss_on_device,
        spread=spread,
        goal=goal,
        symbolic=not numeric,
    )
    _show(report, json_file)


def tune_command(
    target: arguments.Target,
    batch_size: arguments.BatchSize = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST", help="Measure each gpu0_bsz in this range, such as 0:8."
        ),
    ] = None,
    num_devices: arguments.NumDevices = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help=f"{arguments.CAPACITY} Default: that of the GPUs; for emulated devices, what the "
            "even split needs."
        ),
    ] = None,
    reserve: arguments.Reserve = None,
    json_file: arguments.JsonFile = None,
    html: arguments.Html = None,
    emulate: arguments.Emulate = False,
    loss_on_device: arguments.LossOnDevice = False,
    spread: arguments.Spread = False,
    goal: arguments.For = "speed",
    numeric: arguments.Numeric = False,
) -> None:
    """Measure a workload at several values, choose gpu0_bsz, and write a report.

    Runs on all GPUs of this machine if it has two or more, otherwise on emulated devices.
    """
    from ..tuning.open_devices import default_num_devices
    from ..units import format_bytes

    capacities = None
    if memory is not None:
        capacities = arguments.parse_capacities(memory, num_devices, default_num_devices(emulate))
    arguments.check_outputs({"--json": json_file, "--html": html})
    report = _tuned(
        target,
        batch_size,
        reserve,
        devices=num_devices,
        capacities=capacities,
        sweep=arguments.parse_sweep(sweep),
        emulate=emulate,
        gather=not loss_on_device,
        spread=spread,
        goal=goal,
        symbolic=not numeric,
    )
    is_shown = arguments.STDOUT not in (json_file, html)
    if is_shown and capacities is None and report.even.mode != "real":
        capacity = format_bytes(report.plan.capacity_bytes[0])
        terminal.say(f"Without --memory, each device has what the even split needs, {capacity}.")
    _show(report, json_file, html, candidates=True)


def report_command(
    file: Annotated[
        Path, typer.Argument(help="A file of balanced-dp tune or pytest --benchmark-json.")
    ],
    html: arguments.Html = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write Markdown to FILE; - is stdout.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write JSON to FILE, one line for each workload; - is stdout.",
        ),
    ] = None,
) -> None:
    """Show a report, or write it as an HTML page, as Markdown or as JSON."""
    from ..report import load_reports, report_html, report_json, report_markdown
    from . import console

    reports = load_reports(file)
    arguments.check_outputs(
        {"the report": file, "--html": html, "--markdown": markdown, "--json": json_file}
    )
    console.write(html, report_html, reports)
    console.write(markdown, lambda: "\n".join(map(report_markdown, reports)))
    lines = (console.as_json(json.loads(report_json(report)), None) for report in reports)
    console.write(json_file, "".join, lines)
    if html is markdown is json_file is None:
        for report in reports:
            console.print_report(report, candidates=True)


def compare_command(
    before: Annotated[Path, typer.Argument(help="The first report.")],
    after: Annotated[Path, typer.Argument(help="The second report.")],
    limits: Annotated[
        str,
        typer.Option(
            "--fail",
            metavar="METRIC:LIMIT,...",
            help="End with exit code 1 if a metric is worse by more, such as "
            "peak:5%,imbalance:0.1; also max_batch and speed.",
        ),
    ] = "",
    json_file: arguments.JsonFile = None,
) -> None:
    """Compare the best options of two reports for each workload."""
    from ..report import compare_reports, load_reports
    from . import console

    earlier = {report.workload: report for report in load_reports(before)}
    arguments.check_outputs({"BEFORE": before, "--json": json_file})
    arguments.check_outputs({"AFTER": after, "--json": json_file})
    compared = []
    for report in load_reports(after):
        if report.workload not in earlier:
            raise ArgumentError(
                f"{before} has no report of {report.workload}; it has {', '.join(earlier)}"
            )
        comparisons = compare_reports(earlier[report.workload], report, limits)
        if json_file != arguments.STDOUT:
            console.print_comparison(earlier[report.workload], report, comparisons)
        compared += [
            {"workload": report.workload, **asdict(found), "failed": found.failed}
            for found in comparisons
        ]
    console.write(json_file, console.as_json, compared)
    if any(found["failed"] for found in compared):
        raise typer.Exit(1)


def _tuned(target: str, batch_size: int | None, reserve: str | None, **options: Any) -> Report:
    """Return the report of a workload; ``options`` are those of ``tune``."""
    from ..tuning.tuner import tune
    from ..tuning.workloads import find_workload
    from ..units import parse_bytes
    from . import console

    sys.path.insert(0, "")  # the workload may be in the current folder
    workload = find_workload(target)
    batch_size = workload.batch_size if batch_size is None else batch_size
    reserve_bytes = None if reserve is None else parse_bytes(reserve, "--reserve")
    try:
        with console.measuring_progress() as on_measurement:
            return tune(
                workload,
                batch_size,
                reserve=reserve_bytes,
                on_measurement=on_measurement,
                **options,
            )
    except SymbolicValueError as error:
        raise ArgumentError(
            f"{target} reads values{_where(error)}, which takes --numeric: {error}"
        ) from None
    except BalancedDataParallelError:
        raise
    except Exception as error:  # the workload is the user's code
        raise ArgumentError(
            f"{target} failed{_where(error)} with {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from None


def _show(
    report: Report, json_file: Path | None, html: Path | None = None, candidates: bool = False
) -> None:
    """Write the files that were asked for, and print the report unless stdout is one of them."""
    from ..report import report_html, report_json
    from . import console

    console.write(json_file, report_json, report)
    console.write(html, report_html, [report])
    if arguments.STDOUT not in (json_file, html):
        console.print_report(report, candidates)


def _where(error: BaseException) -> str:
    """Return the line of the user's code in which an error was raised, or else the module."""
    from torch import nn

    libraries = ("<", *site.getsitepackages(), sysconfig.get_path("stdlib"), str(_PACKAGE))
    frames = [*traceback.walk_tb(error.__traceback__)][::-1]
    for frame, line_number in frames:
        if not frame.f_code.co_filename.startswith(libraries):
            return f" at {frame.f_code.co_filename}:{line_number}"
    owners = (frame.f_locals.get("self") for frame, _ in frames)
    module = next((owner for owner in owners if isinstance(owner, nn.Module)), None)
    return "" if module is None else f" in {' '.join(repr(module).split())[:100]}"
