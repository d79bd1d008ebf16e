"""Train a transformer on real text: on one device, split evenly, and balanced; show the runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError
from ..report import report_json
from ..report.tables import TextTable, largest_uses, short_split
from ..split import even_share
from ..tuning.open_devices import open_devices, uses_emulation
from ..tuning.options import Option
from ..tuning.report import Report
from ..tuning.step import step_meter
from ..tuning.tuner import tune
from ..tuning.workload import Batch, Workload, character_batch, encoded_text, find_workload
from ..units import format_mib
from . import console, terminal

BATCH_SIZE = 32
"""Samples in a batch."""

LOSS_TOLERANCE = 1e-4
"""Largest difference of the runs' losses at any step: float32 sums are in another order."""


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Record a training run.

    Attributes:
        name: the name of its split.
        measured: what the last step took.
        losses: the loss of each step.
    """

    name: str
    measured: Option
    losses: tuple[float, ...]


def run_demo(
    num_devices: int = 4,
    steps: int = 24,
    gpu0_bsz: int | None = None,
    *,
    emulate: bool = False,
    on_step: Callable[[], object] = lambda: None,
) -> tuple[Report, list[DemoRun]]:
    """Return what tune reports on emulated devices, and the runs by it.

    The runs are on one device, with the even split, and balanced, in this order.

    Args:
        num_devices: number of devices, at least 2.
        steps: training steps of each run, at least 1.
        gpu0_bsz: samples of device 0 in the last run; None means those that ``tune`` finds.
        emulate: whether to emulate devices even if there are two or more accelerators.
        on_step: called after each training step.
    """

    def run(name: str, num: int, value: int) -> DemoRun:
        losses: list[float] = []

        def on_loss(loss: torch.Tensor) -> None:
            losses.append(loss.item())
            on_step()

        with (
            open_devices(num_devices, symbolic=False, emulate=emulate) as devices,
            step_meter(_workload(), devices[:num]) as meter,
        ):
            measured = meter.measure(BATCH_SIZE, value, num_steps=steps, on_loss=on_loss)
        if measured.out_of_memory:
            raise ArgumentError(f"the run with {name} does not fit: {measured.out_of_memory}")
        return DemoRun(name, measured, tuple(losses))

    # Emulated in any case: the largest batch that fits would fill GPUs.
    report = tune(_workload(), BATCH_SIZE, num_devices, emulate=True, with_alternatives=False)
    value = report.best.chunk_sizes[0] if gpu0_bsz is None else gpu0_bsz
    return report, [
        run("one device", 1, BATCH_SIZE),
        run("even split", num_devices, even_share(BATCH_SIZE, num_devices)),
        run("balanced", num_devices, value),
    ]


def loss_difference(runs: Sequence[DemoRun]) -> float:
    """Return the largest difference of the loss curves at any step."""
    steps = list(zip(*(run.losses for run in runs), strict=True))
    return float(max(max(losses) - min(losses) for losses in steps))


def _workload() -> Workload:
    """Return ``char-lm`` with weights and batches that are drawn the same in each run."""
    workload, (encoded, _) = find_workload("char-lm"), encoded_text()
    generator = torch.Generator().manual_seed(0)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return workload.new_model()

    def make_batch(batch_size: int) -> Batch:
        return character_batch(torch.randint(len(encoded) - 65, (batch_size,), generator=generator))

    return replace(workload, model=model, make_batch=make_batch)


def demo_record(report: Report, runs: Sequence[DemoRun]) -> dict[str, Any]:
    """Return the report as JSON has it, with the runs."""
    record: dict[str, Any] = json.loads(report_json(report))
    record["loss_difference"] = loss_difference(runs)
    record["runs"] = [
        {"name": run.name, "losses": run.losses, **asdict(run.measured)} for run in runs
    ]
    return record


def print_demo(runs: Sequence[DemoRun], emulate: bool) -> None:
    """Print the demo's runs and compare them."""
    output = terminal.open_console()
    console.print_table(output, _demo_table(runs, uses_emulation(emulate)))
    difference, allowed = loss_difference(runs), f"(allowed: {LOSS_TOLERANCE:.0e})."
    told = f"The loss curves agree: they differ by {difference:.1e} at most {allowed}"
    if difference > LOSS_TOLERANCE:
        told = f"FAILED: the loss curves differ by {difference:.1e} {allowed}"
    terminal.print_text(output, told)
    _, even, balanced = (run.measured for run in runs)
    peaks = [format_mib(max(measured.peak_bytes)) for measured in (even, balanced)]
    told = (
        f"The bottleneck device needs {peaks[0]} MiB with the even split and {peaks[1]} MiB with "
        f"BalancedDataParallel({balanced.chunk_sizes[0]}, model)."
    )
    if even.chunk_sizes == balanced.chunk_sizes:
        told = "The last run had the even split, too."
    terminal.print_text(output, told)


def _demo_table(runs: Sequence[DemoRun], is_emulated: bool) -> TextTable:
    """Return a table with a column for each run, and on emulated devices what fills device 0."""
    uses = largest_uses((run.measured.uses[0] for run in runs), 2**20 // 10) if is_emulated else []
    peaks = ("peak, device 0", "peak, highest other", "imbalance")
    names = ("split", *uses, *peaks, "samples/s", "last loss")
    columns = []
    for run in runs:
        first, *others = run.measured.peak_bytes
        columns.append(
            (
                short_split(run.measured.chunk_sizes),
                *(format_mib(run.measured.uses[0].get(use, 0)) for use in uses),
                format_mib(first),
                format_mib(max(others)) if others else "",
                f"{1 - min(first, *others) / max(first, *others):.0%}" if others else "",
                f"{run.measured.samples_per_s:.1f}",
                f"{run.losses[-1]:.4f}",
            )
        )
    return TextTable(
        f"A character transformer, batches of {BATCH_SIZE}",
        ("memory in MiB", *(run.name for run in runs)),
        tuple(zip(names, *columns, strict=True)),
        caption=f"On {len(runs[1].measured.chunk_sizes)} "
        + ("emulated devices. Speeds vary between runs." if is_emulated else "devices."),
    )
