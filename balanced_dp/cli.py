"""The command ``balanced-dp``: the only place of the package that prints."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

from .errors import BalancedDataParallelError

try:
    import typer
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table
except ImportError as error:  # the library itself needs neither
    raise SystemExit(
        f"balanced-dp: the command line needs {error.name}, which is part of the extra 'cli': "
        "pip install 'balanced-dp[cli]'"
    ) from None

import torch

from . import demo as demos
from .units import format_bytes, format_mib

app = typer.Typer(
    name="balanced-dp",
    help="A torch.nn.DataParallel that gives the first GPU a smaller share of the batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _commands() -> None:
    """Keeps ``demo`` a command of its own while there is no other."""


@app.command()
def demo(
    num_devices: Annotated[
        int | None, typer.Option("--devices", help="Default: all GPUs, or 4 emulated devices.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch.")] = 32,
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 24,
    gpu0_bsz: Annotated[
        int | None, typer.Option(help="Samples of device 0; by default all values are tried.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Capacity of each emulated device, such as 28MiB.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results there.")
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Emulated devices even where there are GPUs.")
    ] = False,
) -> None:
    """Train a small transformer on real text: on one device, split evenly, and balanced.

    Runs on all devices of this machine if it has two or more GPUs, else on emulated ones.
    """
    if num_devices is None:
        num_devices = demos.default_num_devices(emulate)
    settings = demos.DemoSettings(num_devices, batch_size, steps, gpu0_bsz, memory, emulate)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        _fail(f"--json {json_file}: there is no folder {json_file.absolute().parent}")
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with progress:
        task = progress.add_task("training steps", total=settings.num_steps)
        runs = demos.run_demo(settings, on_step=lambda: progress.advance(task))
    if json_file is not None:
        json_file.write_text(json.dumps(_demo_record(settings, runs), indent=2) + "\n")
    _print_demo(settings, runs)
    if (demos.loss_difference(runs) or 0) > demos.LOSS_TOLERANCE:
        raise typer.Exit(1)


def _print_demo(settings: demos.DemoSettings, runs: Sequence[demos.DemoRun]) -> None:
    # A table that is not for a terminal is not cut to the width of one.
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    kind = "emulated devices, on the CPU" if settings.emulated else "devices"
    table = Table(
        title=f"A character transformer, batches of {settings.batch_size}, "
        f"{settings.num_devices} {kind}",
        caption="Memory in MiB. Device 0 is the first one."
        + " The speed is that of this CPU." * settings.emulated,
    )
    for header in ("run", "split", "peak of each device", "imbalance", "device 0 at its peak"):
        table.add_column(header, overflow="fold")
    for header in ("samples/s", "first loss", "last loss"):
        table.add_column(header, justify="right")
    for run in runs:
        table.add_row(
            run.name,
            " ".join(map(str, run.chunk_sizes)),
            *_describe_result(run),
        )
    console.print(table)
    difference = demos.loss_difference(runs)
    if difference is None:
        console.print("Fewer than two runs fit, so there are no loss curves to compare.")
    elif difference <= demos.LOSS_TOLERANCE:
        console.print(
            f"The loss curves agree: they differ by {difference:.1e} at most "
            f"(allowed: {demos.LOSS_TOLERANCE:.0e})."
        )
    else:
        console.print(
            f"FAILED: the loss curves differ by {difference:.1e} "
            f"(allowed: {demos.LOSS_TOLERANCE:.0e})."
        )
    _, even, balanced = runs
    if even.out_of_memory is None and balanced.out_of_memory is None:
        console.print(
            f"The fullest device needs {format_bytes(max(even.peak_bytes))} with the even split "
            f"and {format_bytes(max(balanced.peak_bytes))} with "
            f"BalancedDataParallel({balanced.chunk_sizes[0]}, model)."
        )


def _describe_result(run: demos.DemoRun) -> list[str]:
    if run.out_of_memory is not None:
        return ["out of memory", "", _describe_breakdown(run.breakdown)]
    return [
        "  ".join(map(format_mib, run.peak_bytes)),
        f"{run.imbalance:.0%}" if len(run.devices) > 1 else "",
        _describe_breakdown(run.breakdown),
        f"{run.samples_per_s:.1f}",
        f"{run.losses[0]:.4f}",
        f"{run.losses[-1]:.4f}",
    ]


def _describe_breakdown(breakdown: dict[str, int] | None) -> str:
    if breakdown is None:
        return ""
    largest = sorted(breakdown.items(), key=lambda item: -item[1])
    return ", ".join(f"{use} {format_mib(size)}" for use, size in largest if size >= 2**20 // 10)


def _demo_record(settings: demos.DemoSettings, runs: Sequence[demos.DemoRun]) -> dict[str, Any]:
    return {
        "schema": 1,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": platform.platform(),
        "settings": asdict(settings),
        "emulated": settings.emulated,
        "loss_difference": demos.loss_difference(runs),
        "runs": [
            {**asdict(run), "imbalance": run.imbalance, "samples_per_s": run.samples_per_s}
            for run in runs
        ],
    }


def _fail(message: str) -> NoReturn:
    print(f"balanced-dp: {message}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Runs the command line; what cannot be used ends it with one line and exit code 2."""
    try:
        app()
    except BalancedDataParallelError as error:
        _fail(str(error))
