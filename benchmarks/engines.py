"""Draws the guide's picture: where parameters, gradients and optimizer state are, by engine.

`python -m benchmarks.engines` writes docs/engines.svg. It measures GPT-2 large on emulated devices
that keep shapes only.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from balanced_dp import Measurement, measure_step
from balanced_dp.tuning.step_benchmark import open_devices
from balanced_dp.tuning.workloads import find_workload

from .before_and_after import draw_panels

PATH = Path(__file__).parent.parent / "docs" / "engines.svg"


def measured(batch_size: int = 12) -> dict[str, Measurement]:
    """Returns a step of each engine on four devices; a rank of DDP is one device with its share."""
    workload, share = find_workload("gpt2-large"), batch_size // 4
    with open_devices(4, emulate=True) as devices:
        found = {
            "nn.DataParallel's split": measure_step(workload, batch_size, share, devices),
            "gpu0_bsz=0,\nloss on each device": measure_step(
                workload, batch_size, 0, devices, gather=False
            ),
            "spread=True,\nloss on each device": measure_step(
                workload, batch_size, share, devices, gather=False, spread=True
            ),
        }
    with open_devices(1, emulate=True) as devices:
        rank = measure_step(workload, share, share, devices)
    found["DistributedDataParallel,\ngradient_as_bucket_view=True"] = replace(
        rank,
        chunk_sizes=rank.chunk_sizes * 4,
        backward_peak_bytes=rank.backward_peak_bytes * 4,
        optimizer_peak_bytes=rank.optimizer_peak_bytes * 4,
        breakdown=rank.breakdown * 4,
    )
    return found


def picture(found: dict[str, Measurement]) -> str:
    """Returns the picture, with a panel for each engine."""
    return draw_panels(found, size=(12.5, 4.4))


if __name__ == "__main__":
    PATH.write_text(picture(measured()))
