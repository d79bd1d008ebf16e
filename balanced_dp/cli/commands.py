"""Define the command ``balanced-dp`` with its subcommands, such as ``run`` and ``plan``.

Each subcommand imports its modules only when it runs, so ``--help`` does not wait for torch.
"""

from __future__ import annotations

import gc
import importlib.metadata
import math
import os
import platform
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from .. import __version__
from ..errors import ArgumentError, BalancedDataParallelError, ProbeError, SymbolicValueError

try:
    import typer
    from typer import Argument, Option

    from . import arguments
except ModuleNotFoundError as error:  # only the command line needs typer
    raise SystemExit(
        f"balanced-dp: the command line needs {error.name}, which is part of the extra 'cli': "
        "pip install '.[cli]' in a clone"
    ) from None

app = typer.Typer(
    name="balanced-dp",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _versions() -> dict[str, str]:
    return {"torch": importlib.metadata.version("torch"), "Python": platform.python_version()}


def _print_version(is_set: bool) -> None:
    if is_set:
        versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
        print(f"balanced-dp {__version__}, {versions}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print versions.")
    ] = False,
) -> None:
    """Give the first GPU of torch.nn.DataParallel a smaller share of the batch."""


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    script: Annotated[str, Argument(metavar="SCRIPT", help="A Python script.")],
    script_arguments: Annotated[list[str] | None, Argument(metavar="[ARGS]...")] = None,
    is_module: Annotated[bool, Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    num_devices: Annotated[
        int | None, Option("--devices", min=1, help="Default: all GPUs, or 4 emulated ones.")
    ] = None,
    memory: arguments.Memory = None,
    reserve: arguments.Reserve = None,
    gpu0_bsz: Annotated[
        str, Option(metavar="N|auto|even", help="Samples on device 0; auto finds the best number.")
    ] = "auto",
    steps: Annotated[int | None, Option(min=1, help="End after this many training steps.")] = None,
    symbolic: Annotated[bool, Option("--symbolic", help="Emulate only shapes: faster.")] = False,
    emulate: arguments.Emulate = False,
    goal: Annotated[Literal["speed", "headroom"] | None, arguments.GOAL] = None,
    json_file: arguments.JsonFile = None,
    html: arguments.Html = None,
) -> None:
    """Run a training script, and show which gpu0_bsz is best for it.

    Runs on all GPUs of this machine if it has two or more. Otherwise, or with --memory, it runs on
    emulated GPUs, which the script sees as CUDA devices. Emulated GPUs do not run out of memory,
    even if the script needs more than --memory.

    In the script, nn.DataParallel becomes BalancedDataParallel. If the script uses
    BalancedDataParallel itself, --gpu0-bsz replaces its gpu0_bsz. The report goes to stderr.
    The script reads and writes its files, such as checkpoints, as usual.
    """
    from . import console
    from .run import prepare_process, run_and_measure

    arguments.check_outputs(json_file, html)
    if arguments.STDOUT in (json_file, html):
        raise ArgumentError("the script prints to stdout; name a file for the report")
    if not is_module and not Path(script).is_file():
        kind = "a folder" if Path(script).is_dir() else "not a file"
        raise ArgumentError(f"{script} is {kind}; name a Python script, or a module after -m")
    prepare_process()
    exit_code, report, parts = run_and_measure(
        script,
        script_arguments or (),
        is_module=is_module,
        gpu0_bsz=arguments.parse_gpu0_bsz(gpu0_bsz),
        num_devices=num_devices,
        capacities=arguments.parse_capacities(memory, num_devices, emulate),
        reserve=arguments.parse_reserve(reserve),
        steps=steps,
        symbolic=symbolic,
        emulate=emulate or symbolic,
        goal=goal,
    )
    own = {name for option in context.command.params for name in option.opts}
    misplaced = [name for name in script_arguments or () if name.partition("=")[0] in own]
    if exit_code == 2 and misplaced:  # argparse exits with 2 if it does not know an option
        console.say(f"{misplaced[0]} was passed to the script; for run, place it before {script}")
    if report is not None:
        console.show(report, json_file, html, stderr=True)
    else:
        console.print_parts(console.open_console(stderr=True), parts)
        for file in filter(None, (json_file, html)):
            console.say(f"{file} was not written: there is no report")
            exit_code = exit_code or 1
    raise typer.Exit(exit_code)


@app.command()
@app.command("plan", help="Find gpu0_bsz without GPUs. Needs --memory. Same as tune --emulate.")
def tune(
    context: typer.Context,
    target: Annotated[str | None, arguments.TARGET] = None,
    batch_size: Annotated[int | None, Option(help="Default: the workload's.")] = None,
    sweep: Annotated[
        str | None, Option(metavar="FIRST:LAST", help="Further values of gpu0_bsz to measure.")
    ] = None,
    num_devices: arguments.NumDevices = None,
    memory: arguments.Memory = None,
    reserve: arguments.Reserve = None,
    json_file: arguments.JsonFile = None,
    html: arguments.Html = None,
    emulate: arguments.Emulate = False,
    goal: Annotated[Literal["speed", "headroom", "batch"] | None, arguments.GOAL] = None,
    numeric: Annotated[
        bool, Option("--numeric", help="Emulate values, too, for models that read them: slower.")
    ] = False,
    is_list: Annotated[bool, Option("--list", help="List the built-in workloads.")] = False,
) -> None:
    """Measure a workload, and show which gpu0_bsz is best for it.

    Runs on all GPUs of this machine if it has two or more, otherwise on emulated devices.
    """
    gc.disable()  # the imports create many objects, but no garbage
    from ..tuning.tuner import tune as measure
    from ..tuning.workload import BUILT_IN, find_workload
    from . import console

    gc.enable()
    if is_list:
        for name, make in BUILT_IN.items():
            about = (make.__doc__ or "").strip().rstrip(".")
            print(f"{name}: {about}; batches of {make().batch_size}.")
        return
    emulate |= context.info_name == "plan"
    if target is None:
        raise ArgumentError("no workload given; balanced-dp plan --list names the built-in ones")
    capacities = arguments.parse_capacities(memory, num_devices, emulate)
    arguments.check_outputs(json_file, html)
    values, reserve_bytes = arguments.parse_sweep(sweep), arguments.parse_reserve(reserve)
    sys.path.insert(0, "")  # the workload may be in the current folder
    workload = find_workload(target)
    if context.info_name == "plan" and memory is None:
        raise ArgumentError("plan needs the capacity of each device, such as --memory 11GiB")
    try:
        with console.open_console(stderr=True).status("measuring training steps"):
            report = measure(
                workload,
                workload.batch_size if batch_size is None else batch_size,
                num_devices,
                capacities,
                reserve=reserve_bytes,
                sweep=values,
                emulate=emulate,
                symbolic=not numeric,
                goal=goal,
            )
    except SymbolicValueError as error:
        why = f"reads values{_where(error)}, which needs --numeric: {str(error).partition(';')[0]}"
        raise ArgumentError(f"{target} {why}") from None
    except BalancedDataParallelError:
        raise
    except Exception as error:  # the workload is the user's code
        why = f"failed{_where(error)} with {type(error).__name__}"
        text = " ".join(str(error).split())[:300]
        raise ArgumentError(f"{target} {why}: {text}") from None
    console.show(report, json_file, html)
    gc.freeze()  # so that the interpreter does not look for garbage when it ends


@app.command("report")
def report_command(
    file: Annotated[Path, Argument(help="A JSON file that run, plan, tune or demo wrote.")],
    html: arguments.Html = None,
    markdown: arguments.Markdown = None,
    json_file: arguments.JsonFile = None,
    against: Annotated[
        Path | None, Option(metavar="FILE", help="Compare with the best option of an older report.")
    ] = None,
    limits: Annotated[
        str,
        Option("--fail", metavar="METRIC:LIMIT,...", help="Allowed worsening: peak:5%,speed:10%."),
    ] = "",
) -> None:
    """Show a report, convert it, or compare it with an older one.

    --against compares peak, max_batch and speed of the best options. The exit code is 1 if any of
    these is worse than before by more than its limit in --fail.
    """
    from ..report import load_report, report_html, report_json, report_markdown
    from ..report.compare import compare_reports, comparison_table
    from . import console

    if limits and against is None:
        raise ArgumentError("--fail needs --against, the report to compare with")
    report, older = load_report(file), None if against is None else load_report(against)
    for read in (file, against):
        arguments.check_outputs(read, html, markdown, json_file)
    compared = () if older is None else compare_reports(older, report, limits)
    console.write(html, report_html, report)
    console.write(markdown, report_markdown, report)
    if older is None:
        console.write(json_file, report_json, report)
        if html is markdown is json_file is None:
            console.show(report, None, None)
        return
    output = console.open_console(stderr=arguments.STDOUT in (html, markdown, json_file))
    console.print_parts(output, [comparison_table(older, report, compared)])
    console.write(json_file, console.as_json, [asdict(found) for found in compared])
    if any(found.failed for found in compared):
        raise typer.Exit(1)


@app.command()
def probe(
    json_file: arguments.JsonFile = None,
    watch_s: Annotated[float | None, Option("--watch", metavar="SECONDS", help="Repeat.")] = None,
) -> None:
    """Show what each GPU holds, and its index in torch and in NVML.

    With --watch, the output is repeated until Ctrl-C.
    If NVML cannot be used, the command prints the reason and ends with exit code 1.
    """
    from ..memory.probe import MemoryProbe
    from . import console

    if watch_s is not None and not 0 < watch_s < math.inf:
        raise ArgumentError(f"--watch must be a number of seconds above 0, got {watch_s:g}")
    arguments.check_outputs(json_file)
    memory_probe, output = MemoryProbe(), console.open_console()
    with suppress(KeyboardInterrupt):
        while True:
            memories = memory_probe.snapshot()
            record = {"schema": 1, "versions": _versions(), "machine": platform.platform()}
            record["devices"] = [{"label": memory.label, **asdict(memory)} for memory in memories]
            console.write(json_file, console.as_json, record, None if watch_s else 2)
            if json_file != arguments.STDOUT:
                if watch_s is not None:
                    output.clear()
                console.print_parts(output, console.memory_of_gpus(memories))
            if watch_s is None:
                break
            time.sleep(watch_s)
    if memory_probe.nvml_error is not None:
        raise ProbeError(memory_probe.nvml_error)


@app.command()
def validate(
    target: Annotated[str, arguments.TARGET] = "gpt2-small",
    num_devices: arguments.NumDevices = None,
    emulate: arguments.Emulate = False,
    json_file: arguments.JsonFile = None,
    markdown: arguments.Markdown = None,
) -> None:
    """Check gradients, memory and speed on the GPUs of this machine.

    Runs on all GPUs. A single GPU runs several replicas. Without GPUs, devices are emulated.
    Ends with exit code 1 if a gradient is wrong.
    """
    from ..validation import validate as run_checks
    from . import console

    arguments.check_outputs(json_file, markdown)
    output = console.open_console(stderr=arguments.STDOUT in (json_file, markdown))

    def show(what: object) -> None:
        console.print_text(output, str(what))

    sys.path.insert(0, "")  # the workload may be in the current folder
    result = run_checks(num_devices, emulate=emulate, workload=target, on_check=show)
    show(f"\n{result.verdict} ({result.devices})")
    console.write(json_file, console.as_json, asdict(result))
    console.write(markdown, result.markdown)
    if not result.gradients_are_right:
        raise typer.Exit(1)


@app.command()
def demo(
    num_devices: arguments.NumDevices = None,
    steps: Annotated[int, Option(min=1, help="Training steps of each run.")] = 24,
    gpu0_bsz: Annotated[
        int | None, Option(min=0, help="Samples on device 0; default: the best value.")
    ] = None,
    json_file: arguments.JsonFile = None,
    emulate: arguments.Emulate = False,
) -> None:
    """Train a transformer three times: on one device, with the even split, with a balanced split.

    Runs on all GPUs of this machine if it has two or more, otherwise on emulated devices.
    """
    import torch

    from ..report import report_json
    from . import console
    from . import demo as demos

    arguments.check_outputs(json_file)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads of small operators wait for each other
    with console.open_console(stderr=True).status("training three times"):
        report, runs = demos.run_demo(num_devices, steps, gpu0_bsz, emulate=emulate)
    torch.set_num_threads(num_threads)
    console.write(json_file, report_json, report)
    if json_file != arguments.STDOUT:
        console.print_parts(console.open_console(), demos.answer(runs))
    if demos.loss_difference(runs) > demos.LOSS_TOLERANCE:
        raise typer.Exit(1)


def _where(error: BaseException) -> str:
    """Return text that says where an error was raised, such as `` at train.py:12``.

    The text names the last line of the error's traceback that is not in a library. If all lines are
    in libraries, the text is empty.
    """
    from .script import is_library

    lines = traceback.extract_tb(error.__traceback__)
    own = [line for line in lines if not is_library(line.filename)]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


def main() -> None:
    """Run the command ``balanced-dp``, and print an error as one line without a traceback.

    The exit code is 1 if memory cannot be measured. It is 2 after any other error of this library,
    and if the output cannot be written.
    """
    if sys.stderr is None:
        # stderr was closed. Its replacement must stay open until the process ends, so it is not
        # opened in a with block.
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        if sys.stdout is None:
            raise ArgumentError("stdout is closed; to discard what is printed, use >/dev/null")
        app()
        return
    except BalancedDataParallelError as error:
        exit_code, text = 1 if isinstance(error, ProbeError) else 2, str(error)
    except OSError as error:  # such as a full disk; typer itself handles a closed pipe
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # else Python fails again when it flushes stdout at exit
        exit_code, text = 2, f"the output cannot be written: {error.strerror}"
    from . import console

    with suppress(OSError):
        console.say(text)
    raise SystemExit(exit_code)
