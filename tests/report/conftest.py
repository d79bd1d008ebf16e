"""Reports that are used by the tests of several files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from balanced_dp import tune

from ..tuning.small_workloads import SMALL

MIB = 2**20


@pytest.fixture(scope="session")
def report():
    torch.manual_seed(0)
    workload = replace(SMALL["char_transformer"](), name="<script>alert(1)</script>")
    return tune(workload, 24, sweep=iter((0, 2, 4, 6)), emulate=True, goal="headroom")


@pytest.fixture(scope="session")
def unlike():
    """A report of ``tune`` for three devices of different capacities."""
    capacities = [6000 * MIB, 3000 * MIB, 2000 * MIB]
    asked = {"emulate": True, "with_alternatives": False, "goal": "headroom"}
    return tune(SMALL["wide_output"](), 32, None, capacities, reserve=MIB, **asked)
