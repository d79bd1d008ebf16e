"""The command ``balanced-dp``: the only place that prints.

Commands import what they need when they run: torch takes seconds, and ``--help`` needs none of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from .. import __version__
from ..errors import ArgumentError, BalancedDataParallelError, ProbeError

_EXTRA = ("typer", "rich", "pydantic", "jinja2", "matplotlib")


def _lacking(error: ImportError) -> SystemExit:
    return SystemExit(
        f"balanced-dp: the command line needs {error.name}, which is part of the extra 'cli': "
        "pip install '.[cli]' in a clone"
    )


try:
    import typer

    from . import arguments
    from .tune import plan_command, tune_command
    from .validate import validate
except ImportError as error:  # the library itself needs none of these
    raise _lacking(error) from None

app = typer.Typer(
    name="balanced-dp",
    help="A torch.nn.DataParallel that gives the first GPU a smaller share of the batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_set: bool) -> None:
    if is_set:
        versions = " ".join(f"{name} {version}," for name, version in _versions().items())
        print(f"balanced-dp {__version__}, {versions.rstrip(',')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of balanced-dp, torch and Python.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command()
def demo(
    num_devices: arguments.NumDevices = None,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch.")] = 32,
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 24,
    gpu0_bsz: Annotated[
        int | None, typer.Option(help="Samples of device 0; default: try all values.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Capacity of each emulated device, such as 28MiB.")
    ] = None,
    json_file: arguments.JsonFile = None,
    emulate: arguments.Emulate = False,
) -> None:
    """Train a small transformer on real text: on one device, split evenly, and balanced.

    Runs on all GPUs of this machine if it has two or more, otherwise on emulated devices.
    """
    from ..tuning.open_devices import default_num_devices
    from . import console, demo_tables
    from . import demo as demos

    if num_devices is None:
        num_devices = default_num_devices(emulate)
    settings = demos.DemoSettings(num_devices, batch_size, steps, gpu0_bsz, memory, emulate)
    arguments.check_outputs({"--json": json_file})
    with console.progress_bar("training steps", settings.num_steps) as update:
        runs = demos.run_demo(settings, on_step=lambda: update(advance=1))
    if json_file is not None:
        record = {
            **_provenance(),
            "settings": asdict(settings),
            "emulated": settings.emulated,
            "loss_difference": demos.loss_difference(runs),
            "runs": [
                {
                    "name": run.name,
                    "losses": run.losses,
                    **asdict(run.measured),
                    "peak_bytes": run.measured.peak_bytes,
                    "imbalance": run.measured.imbalance,
                    "samples_per_s": run.measured.samples_per_s,
                }
                for run in runs
            ],
        }
        console.write(json_file, _as_json(record))
    if json_file != arguments.STDOUT:
        demo_tables.print_demo(settings, runs)
    difference = demos.loss_difference(runs)
    if difference is None or difference > demos.LOSS_TOLERANCE:
        raise typer.Exit(1)


@app.command()
def probe(
    json_file: arguments.JsonFile = None,
    watch_s: Annotated[
        float | None, typer.Option("--watch", metavar="SECONDS", help="Repeat until Ctrl-C.")
    ] = None,
) -> None:
    """Show what each GPU holds, with its number in torch and in NVML and nvidia-smi.

    Without NVML, prints the reason and ends with exit code 1.
    """
    from rich.live import Live

    from ..memory.probe import MemoryProbe
    from . import console

    if watch_s is not None and not 0 < watch_s < math.inf:
        raise ArgumentError(f"--watch must be a number of seconds above 0, got {watch_s:g}")
    if watch_s is not None and json_file not in (None, arguments.STDOUT):
        raise ArgumentError(f"--watch writes to stdout: --json - instead of {json_file}")
    arguments.check_outputs({"--json": json_file})
    memory_probe = MemoryProbe()
    output = console.stdout_console()
    is_drawn_over = output.is_terminal and json_file is None
    screen = Live(console=output, auto_refresh=False) if is_drawn_over else nullcontext()
    with suppress(KeyboardInterrupt), screen as live:
        while True:
            memories = memory_probe.snapshot()
            if json_file is not None:
                devices = [{"label": memory.label, **asdict(memory)} for memory in memories]
                record = {**_provenance(), "devices": devices}
                console.write(json_file, _as_json(record, indent=2 if watch_s is None else None))
            if live is not None:
                live.update(console.memory_table(memories, output), refresh=True)
            elif json_file != arguments.STDOUT:
                output.print(console.memory_table(memories, output))
            if watch_s is None:
                break
            time.sleep(watch_s)
    if memory_probe.nvml_error is not None:
        raise ProbeError(memory_probe.nvml_error)


@app.command()
def workloads(json_file: arguments.JsonFile = None) -> None:
    """List the built-in workloads, their number of parameters and a usual batch size."""
    import torch

    from ..tuning.workloads import BUILT_IN
    from . import console

    arguments.check_outputs({"--json": json_file})
    listed: list[dict[str, Any]] = []
    for name, make in BUILT_IN.items():
        workload = make()
        with torch.device("meta"):
            size = sum(p.numel() for p in workload.new_model().parameters())
        about = (make.__doc__ or "").strip().rstrip(".")
        batch_size = workload.batch_size
        listed.append(
            {"name": name, "about": about, "num_parameters": size, "batch_size": batch_size}
        )
    if json_file is not None:
        console.write(json_file, _as_json(listed))
    if json_file != arguments.STDOUT:
        console.print_workloads(listed)


plan = app.command("plan")(plan_command)
tune = app.command("tune")(tune_command)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script.")],
    script_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")
    ] = None,
    is_module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")
    ] = False,
    num_devices: arguments.NumDevices = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Capacity of all devices, such as 11GiB, or of each: 24GiB,11GiB. Emulated ones "
            "may hold more: the table says what does not fit."
        ),
    ] = None,
    reserve: arguments.Reserve = None,
    gpu0_bsz: Annotated[
        str,
        typer.Option(
            metavar="N|auto|even",
            help="Samples of device 0: a number, auto for the best, or even as nn.DataParallel.",
        ),
    ] = "auto",
    steps: Annotated[
        int | None, typer.Option(min=1, help="End the script after so many training steps.")
    ] = None,
    symbolic: Annotated[
        bool, typer.Option("--symbolic", help="Emulate shapes only: fast, and for any size.")
    ] = False,
    emulate: arguments.Emulate = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write a report to FILE.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the report as a self-contained HTML page."),
    ] = None,
) -> None:
    """Run a training script, unchanged, and show what fills each GPU and which gpu0_bsz is best.

    Runs on all GPUs of this machine if it has two or more, otherwise on emulated ones that the
    script sees as CUDA devices. nn.DataParallel becomes BalancedDataParallel; the script's own
    BalancedDataParallel is split as --gpu0-bsz says, too. stdout is the script's.
    """
    from ..report import report_html, report_json
    from . import console
    from . import run as runs

    arguments.check_outputs(
        {"the script's output": arguments.STDOUT, "--json": json_file, "--html": html}
    )
    settings = runs.RunSettings(
        script,
        tuple(script_arguments or ()),
        is_module,
        arguments.parse_gpu0_bsz(gpu0_bsz),
        num_devices,
        memory,
        reserve,
        steps,
        symbolic,
        emulate or symbolic,
    )
    result = runs.run_and_measure(settings, console.say)
    console.print_run(result)
    for file, as_text in ((json_file, report_json), (html, lambda report: report_html([report]))):
        if file is not None and result.report is None:
            console.say(f"{file} was not written: there is no plan")
        elif file is not None and result.report is not None:
            console.write(file, as_text(result.report))
    raise typer.Exit(result.exit_code)


validate_command = app.command()(validate)


@app.command("report")
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
    if html is not None:
        console.write(html, report_html(reports))
    if markdown is not None:
        console.write(markdown, "\n".join(map(report_markdown, reports)))
    if json_file is not None:
        lines = (json.dumps(json.loads(report_json(report))) + "\n" for report in reports)
        console.write(json_file, "".join(lines))
    if html is markdown is json_file is None:
        for report in reports:
            console.print_report(report, candidates=True)


@app.command("compare")
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
    if json_file is not None:
        console.write(json_file, _as_json(compared))
    if any(found["failed"] for found in compared):
        raise typer.Exit(1)


def _as_json(record: Any, indent: int | None = 2) -> str:
    return json.dumps(record, indent=indent) + "\n"


def _provenance() -> dict[str, Any]:
    return {"schema": 1, "versions": _versions(), "machine": platform.platform()}


def _versions() -> dict[str, str]:
    return {"torch": importlib.metadata.version("torch"), "Python": platform.python_version()}


def main() -> None:
    """Run the command line, and print errors as one line.

    The exit code is 2 for invalid input, and 1 if there is nothing to measure.
    """
    try:
        app()
    except BalancedDataParallelError as error:
        print(f"balanced-dp: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, ProbeError) else 2) from None
    except ImportError as error:
        if (error.name or "").split(".")[0] not in _EXTRA:
            raise
        raise _lacking(error) from None
