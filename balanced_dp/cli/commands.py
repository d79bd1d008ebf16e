"""The command ``balanced-dp``.

Commands import what they need when they run: torch takes seconds, and ``--help`` needs none of it.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
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

    from . import arguments, terminal, tune
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
    from ..tuning.open_devices import default_num_devices
    from . import console
    from . import demo as demos

    if num_devices is None:
        num_devices = default_num_devices(emulate)
    settings = demos.DemoSettings(num_devices, batch_size, steps, gpu0_bsz, memory, emulate)
    arguments.check_outputs({"--json": json_file})
    with console.progress_bar("training steps", 3 * steps) as update:
        runs = demos.run_demo(settings, on_step=lambda: update(advance=1))
    console.write(json_file, console.as_json, _provenance() | demos.demo_record(settings, runs))
    if json_file != arguments.STDOUT:
        demos.print_demo(settings, runs)
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


workloads_command = app.command("workloads")(tune.workloads_command)
plan_command = app.command("plan")(tune.plan_command)
tune_command = app.command("tune")(tune.tune_command)


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
    )
    console.print_run(result)
    own = {name for option in context.command.params for name in option.opts}
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
            terminal.say(f"{file} was not written: there is no plan")
    raise typer.Exit(result.exit_code)


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
    """Check gradients, predicted memory and speed on the GPUs of this machine.

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


report_command = app.command("report")(tune.report_command)
compare_command = app.command("compare")(tune.compare_command)


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
        terminal.say(str(error))
        raise SystemExit(1 if isinstance(error, ProbeError) else 2) from None
    except ImportError as error:
        if (error.name or "").split(".")[0] not in _EXTRA:
            raise
        raise _lacking(error) from None
