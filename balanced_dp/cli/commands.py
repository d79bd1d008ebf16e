"""The command ``balanced-dp``.

Commands import what they need when they run: torch takes seconds, and ``--help`` needs none of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import site
import sys
import sysconfig
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .. import __version__
from ..errors import ArgumentError, BalancedDataParallelError, ProbeError, SymbolicValueError

if TYPE_CHECKING:
    from ..tuning.report import Report

_EXTRA = ("typer", "rich", "pydantic", "jinja2", "matplotlib")
_PACKAGE = Path(__file__).parents[1]


def _lacking(error: ImportError) -> SystemExit:
    return SystemExit(
        f"balanced-dp: the command line needs {error.name}, which is part of the extra 'cli': "
        "pip install '.[cli]' in a clone"
    )


try:
    import typer

    from . import arguments, terminal
except ImportError as error:  # the library itself needs none of these
    raise _lacking(error) from None

app = typer.Typer(
    name="balanced-dp",
    help="A torch.nn.DataParallel that gives the first GPU a smaller share of the batch.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
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


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    context: typer.Context,
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
            help=f"{arguments.CAPACITY} Emulated ones may hold more: the table says what does "
            "not fit."
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
    goal: arguments.For = None,
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
    from .run import run_and_measure

    arguments.check_outputs(
        {"the script's output": arguments.STDOUT, "--json": json_file, "--html": html}
    )
    own = {name for option in context.command.params for name in option.opts}
    result = run_and_measure(
        script,
        script_arguments or (),
        is_module=is_module,
        gpu0_bsz=arguments.parse_gpu0_bsz(gpu0_bsz),
        num_devices=num_devices,
        memory=memory,
        reserve=reserve,
        steps=steps,
        symbolic=symbolic,
        emulate=emulate or symbolic,
        goal=goal,  # type: ignore[arg-type]  # its callback has checked it
        options=sorted(own),
    )
    console.print_run(result, Path(script).name)
    misplaced = [name for name in script_arguments or () if name.partition("=")[0] in own]
    if result.exit_code == 2 and misplaced:  # what argparse ends a script with
        terminal.say(
            f"{misplaced[0]} went to the script; options of balanced-dp run come before its name"
        )
    if result.report is not None:
        console.write(json_file, report_json, result.report)
        console.write(html, report_html, [result.report])
    else:
        for file in filter(None, (json_file, html)):
            terminal.say(f"{file} was not written: there is no report")
    raise typer.Exit(result.exit_code)


@app.command()
def plan(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A built-in workload, or package.module:function, or file.py:function."
        ),
    ] = None,
    memory: Annotated[str | None, typer.Option(help=arguments.CAPACITY)] = None,
    num_devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Number of devices; default: 4.")
    ] = None,
    batch_size: arguments.BatchSize = None,
    reserve: arguments.Reserve = None,
    loss_on_device: arguments.LossOnDevice = False,
    spread: arguments.Spread = False,
    goal: arguments.For = None,
    numeric: arguments.Numeric = False,
    json_file: arguments.JsonFile = None,
    is_list: Annotated[
        bool, typer.Option("--list", help="List the built-in workloads instead.")
    ] = False,
) -> None:
    """Find gpu0_bsz for a workload on GPUs that this machine need not have.

    Measures training steps on emulated devices that keep shapes only: tune --emulate.
    """
    arguments.check_outputs({"--json": json_file})
    if is_list:
        _list_workloads(json_file)
        return
    if target is None:
        raise ArgumentError("plan takes a workload; plan --list names the built-in ones")
    if memory is None:
        raise ArgumentError("plan needs --memory, the capacity of each device: --memory 11GiB")
    report = _tuned(
        target,
        batch_size,
        reserve,
        capacities=arguments.parse_capacities(memory, num_devices, default=4),
        emulate=True,
        gather=not loss_on_device,
        spread=spread,
        goal=goal,
        symbolic=not numeric,
    )
    _show(report, json_file)


@app.command()
def tune(
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
    goal: arguments.For = None,
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
    if arguments.STDOUT not in (json_file, html) and capacities is None and report.mode != "real":
        capacity = format_bytes(report.capacity_bytes[0])
        terminal.say(f"Without --memory, each device has what the even split needs, {capacity}.")
    _show(report, json_file, html, candidates=True)


@app.command("report")
def report_command(
    file: Annotated[
        Path, typer.Argument(help="A file of run, plan, tune, demo or pytest --benchmark-json.")
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
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare the best options with those of an older file."),
    ] = None,
    limits: Annotated[
        str,
        typer.Option(
            "--fail",
            metavar="METRIC:LIMIT,...",
            help="End with exit code 1 if a metric is worse by more than in --against, such as "
            "peak:5%,imbalance:0.1; also max_batch and speed.",
        ),
    ] = "",
) -> None:
    """Show a report, write it as an HTML page, as Markdown or as JSON, or compare it."""
    from ..report import load_reports, report_html, report_json, report_markdown
    from . import console

    if limits and against is None:
        raise ArgumentError("--fail needs --against, the report to compare with")
    reports = load_reports(file)
    older = [] if against is None else load_reports(against)
    for read in filter(None, (file, against)):
        written = {"--html": html, "--markdown": markdown, "--json": json_file}
        arguments.check_outputs({"the report": read, **written})
    if against is not None:
        compared = _compared(reports, {report.workload: report for report in older}, limits)
        console.write(json_file, console.as_json, compared)
        if json_file != arguments.STDOUT:
            console.print_comparison(compared)
        if any(found["failed"] for found in compared):
            raise typer.Exit(1)
        return
    console.write(html, report_html, reports)
    console.write(markdown, lambda: "\n".join(map(report_markdown, reports)))
    as_lines = (console.as_json(json.loads(report_json(report)), None) for report in reports)
    console.write(json_file, "".join, as_lines)
    if html is markdown is json_file is None:
        for report in reports:
            console.print_report(report, candidates=True)


def _compared(
    reports: tuple[Report, ...], older: dict[str, Report], limits: str
) -> list[dict[str, Any]]:
    from ..report import compare_reports

    compared = []
    for report in reports:
        if report.workload not in older:
            raise ArgumentError(
                f"--against has no report of {report.workload}; it has {', '.join(older)}"
            )
        before = older[report.workload]
        lines = {"before_line": before.line, "after_line": report.line}
        compared += [
            {"workload": report.workload, **lines, **asdict(found), "failed": found.failed}
            for found in compare_reports(before, report, limits)
        ]
    return compared


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
    output = terminal.open_console()
    is_drawn_over = output.is_terminal and json_file is None
    screen = Live(console=output, auto_refresh=False) if is_drawn_over else nullcontext()
    with suppress(KeyboardInterrupt), screen as live:
        while True:
            memories = memory_probe.snapshot()
            devices = [{"label": memory.label, **asdict(memory)} for memory in memories]
            record, indent = _provenance() | {"devices": devices}, None if watch_s else 2
            console.write(json_file, console.as_json, record, indent)
            if live is not None:
                live.update(console.memory_table(memories), refresh=True)
            elif json_file != arguments.STDOUT:
                output.print(console.memory_table(memories))
            if watch_s is None:
                break
            time.sleep(watch_s)
    if memory_probe.nvml_error is not None:
        raise ProbeError(memory_probe.nvml_error)


@app.command()
def validate(
    num_devices: arguments.NumDevices = None,
    emulate: arguments.Emulate = False,
    json_file: arguments.JsonFile = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write Markdown for an issue to FILE; - is stdout."),
    ] = None,
) -> None:
    """Check gradients, emulated memory and speed on the GPUs of this machine.

    Runs on all GPUs, with replicas that share it on a single one, and without any on emulated
    devices. Ends with exit code 1 if a gradient is wrong.
    """
    from ..validation import Validation
    from ..validation import validate as run_checks
    from . import console

    arguments.check_outputs({"--json": json_file, "--markdown": markdown})
    output = terminal.open_console(stderr=arguments.STDOUT in (json_file, markdown))

    def show(what: object) -> None:
        terminal.print_text(output, str(what))

    result = run_checks(num_devices, emulate=emulate, on_check=show)
    show(f"\n{result.verdict} ({result.devices})")
    console.write(json_file, Validation.json, result)
    console.write(markdown, Validation.markdown, result)
    if not result.gradients_are_right:
        raise typer.Exit(1)


@app.command()
def demo(
    num_devices: arguments.NumDevices = None,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch.")] = 32,
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 24,
    gpu0_bsz: Annotated[
        int | None,
        typer.Option(help="Samples of device 0; default: what tune finds on emulated devices."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Capacity of each emulated device, such as 28MiB. MB means MiB."),
    ] = None,
    json_file: arguments.JsonFile = None,
    emulate: arguments.Emulate = False,
) -> None:
    """Train a small transformer on real text: on one device, split evenly, and balanced.

    Runs on all GPUs of this machine if it has two or more, otherwise on emulated devices.
    """
    from ..report import report_json
    from ..tuning.open_devices import default_num_devices
    from . import console
    from . import demo as demos

    if num_devices is None:
        num_devices = default_num_devices(emulate)
    settings = demos.DemoSettings(num_devices, batch_size, steps, gpu0_bsz, memory, emulate)
    arguments.check_outputs({"--json": json_file})
    with console.progress_bar("training steps", 3 * steps) as update:
        report, runs = demos.run_demo(settings, on_step=lambda: update(advance=1))
    record = json.loads(report_json(report)) | demos.demo_record(settings, runs)
    console.write(json_file, console.as_json, record)
    if json_file != arguments.STDOUT:
        demos.print_demo(settings, runs)
    difference = demos.loss_difference(runs)
    if difference is None or difference > demos.LOSS_TOLERANCE:
        raise typer.Exit(1)


def _list_workloads(json_file: Path | None) -> None:
    """List the built-in workloads, their number of parameters and a usual batch size."""
    import torch

    from ..tuning.workload import BUILT_IN
    from . import console

    listed: list[dict[str, Any]] = []
    for name, make in BUILT_IN.items():
        workload = make()
        with torch.device("meta"):
            size = sum(p.numel() for p in workload.new_model().parameters())
        about = (make.__doc__ or "").strip().rstrip(".")
        numbers = {"num_parameters": size, "batch_size": workload.batch_size}
        listed.append({"name": name, "about": about, **numbers})
    console.write(json_file, console.as_json, listed)
    if json_file != arguments.STDOUT:
        for w in listed:
            text = f"{w['name']}: {w['about']}; batches of {w['batch_size']}."
            terminal.print_text(terminal.open_console(), text)


def _tuned(target: str, batch_size: int | None, reserve: str | None, **options: Any) -> Report:
    """Return the report of a workload; ``options`` are those of ``tune``."""
    from ..tuning.tuner import tune
    from ..tuning.workload import find_workload
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
        console.print_report(report, candidates=candidates)


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


def _provenance() -> dict[str, Any]:
    return {"schema": 1, "versions": _versions(), "machine": platform.platform()}


def _versions() -> dict[str, str]:
    return {"torch": importlib.metadata.version("torch"), "Python": platform.python_version()}


def main() -> None:
    """Run the command line, and print errors as one line.

    The exit code is 2 for invalid input, and 1 if there is nothing to measure.
    """
    if sys.stderr is None:  # it is closed
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # as long as the process
    try:
        if sys.stdout is None:
            raise ArgumentError(
                "stdout is closed; to write a file only, use --json FILE >/dev/null"
            )
        app()
    except BalancedDataParallelError as error:
        terminal.say(str(error))
        raise SystemExit(1 if isinstance(error, ProbeError) else 2) from None
    except OSError as error:  # stdout or stderr is full, or its reader has gone
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2) if isinstance(error, BrokenPipeError) else (1,):
            os.dup2(null, stream)  # else Python fails again when it flushes them at its end
        with suppress(OSError):
            terminal.say(f"the output cannot be written: {error.strerror}")
        raise SystemExit(2) from None
    except ImportError as error:
        if (error.name or "").split(".")[0] not in _EXTRA:
            raise
        raise _lacking(error) from None
