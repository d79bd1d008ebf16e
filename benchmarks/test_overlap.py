"""Measure how much longer a step takes because of transfers that do not overlap with computing.

The times are computed by the clock of the stand-in for CUDA devices (``tests/cuda_stand_in``). This
is a model of the hardware, not hardware.
"""

from __future__ import annotations

import statistics

import pytest
from torch import nn

from balanced_dp import BalancedDataParallel
from tests import cuda_stand_in
from tests.step_on_clock import NUM_LAYERS, SPLITS, Layers, step_ratio

NOTES = {
    "overlap": "Ratio: the time of a step, or of its backward pass, over the computing time of the "
    f"largest chunk; median of 5. {NUM_LAYERS} linear layers on four devices, inputs on the CPU. "
    "Transfers: the time to copy one device's gradients, over that of the largest chunk's backward "
    "pass. Weights take as long, inputs almost no time. In this model of the hardware, a device "
    "receives one transfer at a time, a collective takes as long as one transfer, and launching "
    "takes no time."
}


@pytest.mark.skipif(cuda_stand_in.WHY_NOT is not None, reason=str(cuda_stand_in.WHY_NOT))
@pytest.mark.filterwarnings("ignore:gpu0_bsz=16 has no effect", "ignore:Was asked to gather along")
@pytest.mark.parametrize("has_forward", [False, True], ids=["backward", "step"])
@pytest.mark.parametrize("transfer_share", [0.1, 0.3])
@pytest.mark.parametrize(
    ("split", "spread"), [(None, False), *((s, False) for s in SPLITS), (SPLITS[0], True)], ids=str
)
def test_transfers_beside_computing(benchmark, tables, split, spread, transfer_share, has_forward):
    sizes = split or SPLITS[0]
    ratios = []
    with cuda_stand_in.opened() as stand_in:
        module = Layers().to(stand_in.devices[0])
        model: nn.Module = nn.DataParallel(module)
        if split is not None:
            model = BalancedDataParallel(split[0], module, spread=spread)

        def measure() -> None:
            ratio, _ = step_ratio(stand_in, model, sizes, transfer_share, has_forward)
            ratios.append(ratio)

        benchmark.pedantic(measure, rounds=5)
    tables["overlap"].append(
        {
            "split": f"nn.DataParallel, {sizes}"
            if split is None
            else f"{split}{', spread' if spread else ''}",
            "transfers": transfer_share,
            "of": "step" if has_forward else "backward",
            "ratio": round(statistics.median(ratios), 3),
        }
    )
