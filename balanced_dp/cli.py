"""The command ``balanced-dp``: the only place of the package that prints."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

from .errors import BalancedDataParallelError, ProbeError

try:
    import typer
    from rich.console import Console
    from rich.live import Live
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
from .measurement import Measurement
from .memory import DeviceMemory, MemoryProbe
from .tuner import Tuning, plan_workload
from .units import format_bytes, format_mib, parse_bytes
from .workloads import BUILT_IN, find_workload

app = typer.Typer(
    name="balanced-dp",
    help="A torch.nn.DataParallel that gives the first GPU a smaller share of the batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    if json_file is not None and json_file.is_dir():
        _fail(f"--json {json_file} is a folder; name a file")
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


@app.command()
def probe(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, bytes as integers; one line each watched.")
    ] = False,
    watch_s: Annotated[
        float | None, typer.Option("--watch", metavar="SECONDS", help="Again, until Ctrl-C.")
    ] = None,
) -> None:
    """Show what each GPU holds, under torch's number and under NVML's and nvidia-smi's.

    Ends with one line and exit code 1 where there is no NVML to ask, and says why.
    """
    if watch_s is not None and not 0 < watch_s < math.inf:
        _fail(f"--watch must be a number of seconds above 0, got {watch_s:g}")
    memory_probe = MemoryProbe()
    with suppress(KeyboardInterrupt):
        _show_memory(memory_probe, as_json, watch_s)
    if memory_probe.nvml_error is not None:
        _fail(memory_probe.nvml_error, exit_code=1)


def _show_memory(memory_probe: MemoryProbe, as_json: bool, watch_s: float | None) -> None:
    if as_json:
        for memories in _snapshots(memory_probe, watch_s):
            record = _probe_record(memories)
            print(json.dumps(record, indent=2 if watch_s is None else None), flush=True)
        return
    console = _console()
    if not console.is_terminal:  # nothing there could be drawn over
        for memories in _snapshots(memory_probe, watch_s):
            console.print(_memory_table(memories))
        return
    with Live(console=console, auto_refresh=False) as live:
        for memories in _snapshots(memory_probe, watch_s):
            live.update(_memory_table(memories), refresh=True)


@app.command()
def workloads(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the built-in workloads, with their parameters and a usual batch size."""
    listed = []
    for name, make in BUILT_IN.items():
        workload = make()
        with torch.device("meta"):
            parameters = sum(p.numel() for p in workload.model().parameters())
        about = (make.__doc__ or "").strip().rstrip(".")
        listed.append((name, about, parameters, workload.batch_size))
    if as_json:
        names = ("name", "about", "num_parameters", "batch_size")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in listed], indent=2))
        return
    table = Table("workload", "what it is")
    for header in ("parameters", "batch size"):
        table.add_column(header, justify="right")
    for name, about, parameters, batch_size in listed:
        table.add_row(name, about, f"{parameters / 1e6:.1f} M", str(batch_size))
    _console().print(table)


@app.command("plan")
def plan_command(
    target: Annotated[str, typer.Argument(help="A built-in workload, or package.module:function.")],
    memory: Annotated[
        str,
        typer.Option(help="Capacity of each device, such as 11GiB, or one for each: 24GiB,11GiB."),
    ],
    num_devices: Annotated[int | None, typer.Option("--devices", help="Default: 4.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples in a batch; default: the workload's.")
    ] = None,
    reserve: Annotated[
        str, typer.Option(help="Of each device, for CUDA's context and libraries' workspaces.")
    ] = "512MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find gpu0_bsz for a workload on GPUs that need not be here.

    A few training steps are measured on emulated devices that keep shapes only.
    """
    sizes = memory.split(",")
    if len(sizes) > 1 and num_devices not in (None, len(sizes)):
        _fail(f"--memory gives {len(sizes)} devices, but --devices is {num_devices}")
    if len(sizes) == 1:
        sizes *= num_devices or 4
    capacities = [parse_bytes(size, "--memory") for size in sizes]
    sys.path.insert(0, "")  # one's own workload may be in the current folder
    workload = find_workload(target)
    with Progress(
        TextColumn("{task.description}"), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task("measuring on emulated devices", total=None)

        def show(measurement: Measurement) -> None:
            progress.update(
                task,
                description=f"measured a batch of {measurement.batch_size} with "
                f"gpu0_bsz={measurement.gpu0_bsz}",
            )

        tuning = plan_workload(
            workload,
            workload.batch_size if batch_size is None else batch_size,
            capacities,
            parse_bytes(reserve, "--reserve"),
            show,
        )
    if as_json:
        print(json.dumps({**_origin(), **asdict(tuning)}, indent=2))
    else:
        _print_plan(tuning)


def _print_plan(tuning: Tuning) -> None:
    plan = tuning.plan
    console = _console()
    table = Table(
        title=f"{tuning.workload}, batches of {plan.batch_size}, {len(plan.chunk_sizes)} devices",
        caption=f"From {len(tuning.measurements)} steps on emulated devices, shapes only; float32. "
        f"{format_bytes(plan.reserve_bytes)} of each device are left for contexts and workspaces.",
    )
    for header in ("device", "samples", "capacity", "predicted", "measured", "headroom"):
        table.add_column(header, justify="right")
    table.add_column("even split", justify="right")
    columns = (
        plan.chunk_sizes,
        plan.capacity_bytes,
        plan.predicted_bytes,
        tuning.chosen.peak_bytes,
        plan.headroom_bytes,
        plan.even_bytes,
    )
    for index, (size, *amounts) in enumerate(zip(*columns, strict=True)):
        table.add_row(str(index), str(size), *map(format_bytes, amounts))
    console.print(table)
    console.print(
        f"model = BalancedDataParallel({plan.gpu0_bsz}, model)  # device {plan.limiting_device} "
        "is the fullest"
    )
    console.print(
        f"The largest batch that fits is {plan.max_batch_size}, with "
        f"gpu0_bsz={plan.max_batch_gpu0_bsz}; with the even split it is "
        f"{plan.even_max_batch_size}. The largest chunk is {plan.time_cost:.2f} times the even one."
    )
    if not tuning.model.is_lawful:
        console.print(
            f"The predictions are off by up to {tuning.model.residual:.0%}: what this workload "
            "needs does not grow evenly with the batch. So every gpu0_bsz was measured, and the "
            "largest batch is a guess.",
            soft_wrap=True,
        )
    for sentence in plan.advice:
        console.print(f"{sentence[0].upper()}{sentence[1:]}.", soft_wrap=True)


def _snapshots(
    memory_probe: MemoryProbe, watch_s: float | None
) -> Iterator[tuple[DeviceMemory, ...]]:
    yield memory_probe.snapshot()
    while watch_s is not None:
        time.sleep(watch_s)
        yield memory_probe.snapshot()


def _memory_table(memories: Sequence[DeviceMemory]) -> Table:
    versions = {memory.memory_info_version for memory in memories}
    caption = "Used is by anybody: tensors, torch's cache, contexts, other processes."
    if 1 in versions:
        caption += " This driver counts its own reserve as used."
    if any(memory.device is None for memory in memories):
        caption += " Torch does not see the devices that have no torch number."
    table = Table(caption=caption)
    for header in ("device", "name", "UUID"):
        table.add_column(header, overflow="fold")
    for header in ("total", "used", "free", "ours", "other processes"):
        table.add_column(header, justify="right")
    for memory in memories:
        sizes = (
            memory.total_bytes,
            memory.used_bytes,
            memory.free_bytes,
            memory.process_bytes,
            memory.other_process_bytes,
        )
        name = memory.name or "?"
        table.add_row(
            memory.label,
            name if memory.error is None else f"{name}: {memory.error}",
            memory.uuid or "?",
            *("?" if size is None else format_bytes(size) for size in sizes),
        )
    return table


def _probe_record(memories: Sequence[DeviceMemory]) -> dict[str, Any]:
    return {
        **_origin(),
        "devices": [{"label": memory.label, **asdict(memory)} for memory in memories],
    }


def _console() -> Console:
    # A table that is not for a terminal is not cut to the width of one.
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def _origin() -> dict[str, Any]:
    return {
        "schema": 1,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": platform.platform(),
    }


def _print_demo(settings: demos.DemoSettings, runs: Sequence[demos.DemoRun]) -> None:
    console = _console()
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
        **_origin(),
        "settings": asdict(settings),
        "emulated": settings.emulated,
        "loss_difference": demos.loss_difference(runs),
        "runs": [
            {**asdict(run), "imbalance": run.imbalance, "samples_per_s": run.samples_per_s}
            for run in runs
        ],
    }


def _fail(message: str, exit_code: int = 2) -> NoReturn:
    print(f"balanced-dp: {message}", file=sys.stderr)
    raise SystemExit(exit_code)


def main() -> None:
    """Runs the command line; what cannot be used ends it with one line and exit code 2.

    Where there is nothing to measure it is exit code 1.
    """
    try:
        app()
    except ProbeError as error:
        _fail(str(error), exit_code=1)
    except BalancedDataParallelError as error:
        _fail(str(error))
