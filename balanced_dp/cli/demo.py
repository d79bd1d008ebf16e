"""Train a transformer on text: on one device, with the even split, and with a balanced split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..emulation.fallback import accelerators, training_devices
from ..errors import ArgumentError
from ..report.tables import Part, TextTable, largest_uses, short_split
from ..tuning.options import Option
from ..tuning.report import Report
from ..tuning.step import measure_step
from ..tuning.tuner import tune
from ..tuning.workload import Batch, Workload, character_batch, encoded_text, find_workload

BATCH_SIZE = 32
"""The number of samples in a batch."""

LOSS_TOLERANCE = 1e-4
"""The largest allowed difference between the losses of the demo's training runs at the same step.

The losses differ slightly because the runs add up float32 numbers in different orders.
"""


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Hold the results of one of the training runs of the demo.

    Attributes:
        name: the name of the run, such as ``"even split"``.
        measured: the measurement of the last training step.
        losses: the loss of each training step.
    """

    name: str
    measured: Option
    losses: list[float]


def run_demo(
    num_devices: int | None = None,
    steps: int = 24,
    gpu0_bsz: int | None = None,
    *,
    emulate: bool = False,
) -> tuple[Report, list[DemoRun]]:
    """Use ``tune`` to search for the best split, train three times, and return the results.

    A split is the number of samples of each device. The first training run uses one device. The
    second run uses the even split of the batch, and the third run uses ``gpu0_bsz``. The search
    always runs on emulated devices, even if the training runs use GPUs.

    Args:
        num_devices: number of devices, at least 2; None means all GPUs if there are two or more,
            otherwise four emulated devices.
        steps: number of training steps of each run, at least 1.
        gpu0_bsz: the most samples that device 0 gets in the third run; None means the value that
            ``tune`` finds.
        emulate: whether to emulate devices even if there are two or more accelerators.

    Returns:
        The report of ``tune``, and the three runs.

    Raises:
        ArgumentError: If memory runs out in a run.
    """
    num = num_devices or len(accelerators(emulate=emulate)) or 4
    # The search does not use GPUs, because the largest batches that it tries would fill them.
    report = tune(_workload(), BATCH_SIZE, num, emulate=True, with_alternatives=False)
    value, runs = report.best.chunk_sizes[0] if gpu0_bsz is None else gpu0_bsz, []
    for name, gpu0_bsz in ("one device", None), ("even split", None), ("balanced", value):
        losses: list[float] = []

        def on_loss(loss: torch.Tensor, losses: list[float] = losses) -> None:
            losses.append(loss.item())

        with training_devices(num, emulate=emulate) as devices:
            used = devices[: 1 if name == "one device" else num]
            options = {"num_steps": steps, "on_loss": on_loss}
            measured = measure_step(_workload(), BATCH_SIZE, gpu0_bsz, used, **options)
        if measured.out_of_memory:
            raise ArgumentError(f"memory ran out in the run {name!r}: {measured.out_of_memory}")
        runs.append(DemoRun(name, measured, losses))
    return report, runs


def loss_difference(runs: Sequence[DemoRun]) -> float:
    """Return the largest difference between the losses of any two runs at the same step."""
    steps = list(zip(*(run.losses for run in runs), strict=True))
    return float(max(max(losses) - min(losses) for losses in steps))


def _workload() -> Workload:
    """Return the workload ``char-lm`` with fixed seeds.

    So all runs have the same initial weights and the same batches.
    """
    workload, (encoded, _) = find_workload("char-lm"), encoded_text()
    generator = torch.Generator().manual_seed(0)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return workload.new_model()

    def make_batch(batch_size: int) -> Batch:
        return character_batch(torch.randint(len(encoded) - 65, (batch_size,), generator=generator))

    return replace(workload, model=model, make_batch=make_batch)


def answer(runs: Sequence[DemoRun]) -> Iterator[Part]:
    """Yield a table with a column for each run, and sentences that compare the runs."""
    _, even, balanced = measured = [run.measured for run in runs]
    is_emulated = "rest" not in even.uses[0]
    uses = largest_uses((o.uses[0] for o in measured), 2**20 // 10) if is_emulated else []
    gaps = (1 - min(option.peak_bytes) / max(option.peak_bytes) for option in (even, balanced))
    rows = {
        "split": [short_split(option.chunk_sizes) for option in measured],
        **{use: [_mib(option.uses[0].get(use, 0)) for option in measured] for use in uses},
        "peak, device 0": [_mib(option.peak_bytes[0]) for option in measured],
        "peak, highest other": ["", *(_mib(max(o.peak_bytes[1:])) for o in (even, balanced))],
        "imbalance": ["", *(f"{gap:.0%}" for gap in gaps)],
        "last loss": [f"{run.losses[-1]:.4f}" for run in runs],
    }
    yield TextTable(
        f"A character transformer, batches of {BATCH_SIZE}",
        ("memory in MiB", *(run.name for run in runs)),
        [(name, *cells) for name, cells in rows.items()],
        caption=f"On {len(even.chunk_sizes)} {'emulated ' * is_emulated}devices.",
    )
    difference, allowed = loss_difference(runs), f"(allowed: {LOSS_TOLERANCE:.0e})."
    if difference > LOSS_TOLERANCE:
        yield f"FAILED: the loss curves differ by {difference:.1e} {allowed}"
    else:
        yield f"The loss curves agree: they differ by {difference:.1e} at most {allowed}"
    if even.chunk_sizes == balanced.chunk_sizes:
        yield f"The last run was even, too: gpu0_bsz must be below {even.chunk_sizes[0]}."
    else:
        yield (
            f"The fullest device needs {_mib(max(even.peak_bytes))} MiB with the even split and "
            f"{_mib(max(balanced.peak_bytes))} MiB with "
            f"BalancedDataParallel({balanced.chunk_sizes[0]}, model)."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
