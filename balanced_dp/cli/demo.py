"""Train a transformer on real text: on one device, split evenly, and balanced; show the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.table import Table
from torch import nn

from ..report import tables
from ..split import as_integer, even_share
from ..tuning.open_devices import open_devices, uses_emulation
from ..tuning.options import Option
from ..tuning.report import Report
from ..tuning.step import step_meter
from ..tuning.tuner import tune
from ..tuning.workload import Batch, Workload, character_batch, encoded_text, find_workload
from ..units import format_bytes, format_mib, parse_bytes
from . import console, terminal

LOSS_TOLERANCE = 1e-4
"""Largest difference of the runs' losses at any step: float32 sums are in another order."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Describe the training runs of the demo.

    Attributes:
        num_devices: number of devices, at least 2.
        batch_size: samples in a batch, at least 1.
        steps: training steps of each run, at least 1.
        gpu0_bsz: samples of device 0. None means those that ``tune`` finds on emulated devices.
        memory: capacity of each emulated device, as in ``emulate_devices``.
        emulate: whether to emulate devices even if there are two or more accelerators.
    """

    num_devices: int = 4
    batch_size: int = 32
    steps: int = 24
    gpu0_bsz: int | None = None
    memory: str | None = None
    emulate: bool = False

    def __post_init__(self) -> None:
        """Raise ArgumentError if a value is out of its range."""
        for name, minimum in (("num_devices", 2), ("batch_size", 1), ("steps", 1)):
            as_integer(name, getattr(self, name), minimum)
        if self.gpu0_bsz is not None:
            as_integer("gpu0_bsz", self.gpu0_bsz, minimum=0)

    @property
    def even_share(self) -> int:
        """Return the chunk size of device 0 in the even split."""
        return even_share(self.batch_size, self.num_devices)

    @property
    def emulated(self) -> bool:
        """Return whether the runs are on emulated devices."""
        return uses_emulation(self.emulate)


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Record a training run.

    Attributes:
        name: the name of its split.
        measured: what the last step took.
        losses: the loss of each step, up to where memory ran out.
    """

    name: str
    measured: Option
    losses: tuple[float, ...]


def run_demo(
    settings: DemoSettings, on_step: Callable[[], object] = lambda: None
) -> tuple[Report, list[DemoRun]]:
    """Return what tune reports on emulated devices, and the runs by it.

    The runs are on one device, with the even split, and balanced, in this order.

    ``on_step`` is called after each training step, unless memory runs out.
    """

    def run(name: str, num_devices: int, gpu0_bsz: int) -> DemoRun:
        losses: list[float] = []

        def on_loss(loss: torch.Tensor) -> None:
            losses.append(loss.item())
            on_step()

        with (
            open_devices(
                settings.num_devices,
                memory=settings.memory,
                symbolic=False,
                emulate=settings.emulate,
            ) as devices,
            step_meter(_workload(), devices[:num_devices]) as meter,
        ):
            measured = meter.measure(
                settings.batch_size, gpu0_bsz, num_steps=settings.steps, on_loss=on_loss
            )
        return DemoRun(name, measured, tuple(losses))

    runs = [
        run("one device", 1, settings.batch_size),
        run("even split", settings.num_devices, settings.even_share),
    ]
    # Emulated in any case: the largest batch that fits would fill GPUs.
    size, num = settings.batch_size, settings.num_devices
    report = tune(_workload(), size, num, emulate=True, with_alternatives=False)
    gpu0_bsz = report.best.chunk_sizes[0] if settings.gpu0_bsz is None else settings.gpu0_bsz
    return report, [*runs, run("balanced", settings.num_devices, gpu0_bsz)]


def loss_difference(runs: Sequence[DemoRun]) -> float | None:
    """Return the largest difference of complete loss curves, or None for fewer than two."""
    curves = [run.losses for run in runs if not run.measured.out_of_memory]
    if len(curves) < 2:
        return None
    difference: float = max(max(step) - min(step) for step in zip(*curves, strict=True))
    return difference


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


def demo_record(settings: DemoSettings, runs: Sequence[DemoRun]) -> dict[str, Any]:
    """Return the settings and the runs as JSON has them."""
    return {
        "settings": asdict(settings),
        "emulated": settings.emulated,
        "loss_difference": loss_difference(runs),
        "runs": [
            {
                "name": run.name,
                "losses": run.losses,
                **asdict(run.measured),
                "imbalance": tables.imbalance(run.measured),
                "samples_per_s": run.measured.samples_per_s,
            }
            for run in runs
        ],
    }


def print_demo(settings: DemoSettings, runs: Sequence[DemoRun]) -> None:
    """Print the demo's runs and compare them."""
    output = terminal.open_console()
    output.print(_demo_table(settings, runs))
    for sentence in _sentences(settings, runs):
        terminal.print_text(output, sentence)


def _sentences(settings: DemoSettings, runs: Sequence[DemoRun]) -> Iterator[str]:
    """Yield where memory ran out, and what the runs show."""
    for run in runs:
        if run.measured.out_of_memory:
            yield f"{run.name}: {run.measured.out_of_memory}"
    difference = loss_difference(runs)
    allowed = f"(allowed: {LOSS_TOLERANCE:.0e})."
    if difference is None:
        yield (
            "Fewer than two runs fit, so there are no loss curves to compare. Try more --memory or "
            "--devices, or a smaller --batch-size."
        )
    elif difference <= LOSS_TOLERANCE:
        yield f"The loss curves agree: they differ by {difference:.1e} at most {allowed}"
    else:
        yield f"FAILED: the loss curves differ by {difference:.1e} {allowed}"
    _, even, balanced = (run.measured for run in runs)
    if even.chunk_sizes == balanced.chunk_sizes:
        part = f"{even.chunk_sizes[0]} of {settings.batch_size} samples"
        if settings.gpu0_bsz is None:
            yield f"The even split is the best one: device 0 gets {part}."
        else:
            value = settings.gpu0_bsz
            yield f"gpu0_bsz={value} is the even split: device 0 gets at most {part}."
    elif not (even.out_of_memory or balanced.out_of_memory):
        peaks = [format_mib(max(measured.peak_bytes)) for measured in (even, balanced)]
        yield (
            f"The bottleneck device needs {peaks[0]} MiB with the even split and "
            f"{peaks[1]} MiB with BalancedDataParallel({balanced.chunk_sizes[0]}, model)."
        )


def _demo_table(settings: DemoSettings, runs: Sequence[DemoRun]) -> Table:
    """Return a table with a column for each run, and on emulated devices what fills device 0."""
    kind = "emulated devices" if settings.emulated else "devices"
    if settings.memory is not None:
        kind += f" of {format_bytes(parse_bytes(settings.memory))}"
    ran = [run.measured for run in runs if not run.measured.out_of_memory]
    least_bytes = 2**20 // 10 if settings.emulated else math.inf
    uses = tables.largest_uses((measured.uses[0] for measured in ran), least_bytes)
    names = (*uses, "peak, device 0", "peak, highest other", "imbalance", "samples/s", "last loss")
    columns = []
    for run in runs:
        first, *others = run.measured.peak_bytes
        cells = [""] * len(names)
        cells[len(uses)] = "out of memory"
        if not run.measured.out_of_memory:
            cells = [
                *(format_mib(run.measured.uses[0].get(use, 0)) for use in uses),
                format_mib(first),
                format_mib(max(others)) if others else "",
                f"{tables.imbalance(run.measured):.0%}" if others else "",
                f"{run.measured.samples_per_s:.1f}",
                f"{run.losses[-1]:.4f}",
            ]
        columns.append([tables.short_split(run.measured.chunk_sizes), *cells])
    headers = ("memory in MiB", *(run.name for run in runs))
    return console.rich_table(
        tables.TextTable(headers, tuple(zip(("split", *names), *columns, strict=True))),
        title=f"A character transformer, batches of {settings.batch_size}",
        caption=f"On {settings.num_devices} {kind}."
        + " Speeds vary between runs." * settings.emulated,
    )
