"""Functions that tests run in a process that has loaded the stand-in driver; each prints JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, MemoryLogger, MemoryProbe, ProbeError

from .driver import BUSES, GIB, H100, UUIDS, State, open_state

STATE: State
GPU_IS_LOST = 15


class CudaStandIn:
    """A replacement for functions of a ``torch.cuda`` without CUDA; its statistics can be set.

    Args:
        units: the units of the stand-in driver, in CUDA's order.
    """

    def __init__(self, units: Sequence[int]) -> None:
        self.units = units
        self.reserved_bytes = [0] * len(units)
        self.num_alloc_retries = 0
        self.before_peaks_are_reset: Callable[[], object] = lambda: None
        self.devices = [f"cuda:{index}" for index in range(len(units))]
        cuda: Any = torch.cuda
        cuda.init = lambda: None
        cuda.device_count = lambda: len(units)
        cuda.get_device_properties = lambda device: self.properties(device.index)
        cuda.memory_stats = lambda device: {"num_alloc_retries": self.num_alloc_retries}
        for name in ("memory_allocated", "memory_reserved"):
            for prefix in ("", "max_"):
                setattr(cuda, prefix + name, lambda device: self.reserved_bytes[device.index])
        cuda.reset_peak_memory_stats = lambda device: self.before_peaks_are_reset()

    def properties(self, cuda_index: int) -> SimpleNamespace:
        unit = self.units[cuda_index]
        return SimpleNamespace(
            name=f"a GPU, says CUDA ({unit})",
            total_memory=7 * GIB,
            uuid=UUIDS[unit].split("-", 1)[1],  # as torch returns it
            pci_domain_id=0,
            pci_bus_id=BUSES[unit],
            pci_device_id=0,
        )


def snapshot(probe: MemoryProbe) -> list[dict[str, Any]]:
    return [{**asdict(memory), "label": memory.label} for memory in probe.snapshot()]


def boards() -> Any:
    """List the boards by NVML alone, without CUDA in torch."""
    try:
        return snapshot(MemoryProbe())
    except ProbeError as error:
        return f"ProbeError: {error}"


def cuda(units: str) -> Any:
    """Take a snapshot with these units of the driver as CUDA devices."""
    return snapshot(MemoryProbe(CudaStandIn(json.loads(units)).devices))


def cuda_of_unknown_boards() -> Any:
    """Take a snapshot where NVML has no board with the UUID and the bus of ``cuda:0``."""
    stand_in = CudaStandIn([H100])
    properties = stand_in.properties(0)
    properties.uuid, properties.pci_bus_id = "of nothing", 0xFF
    stand_in.properties = lambda index: properties  # type: ignore[method-assign]
    return snapshot(MemoryProbe(stand_in.devices))


def wait_for_queries(number: int) -> None:
    """Wait until the sampler has made that many more queries."""
    wanted = STATE.num_memory_queries + number
    deadline = time.monotonic() + 60
    while STATE.num_memory_queries < wanted:
        assert time.monotonic() < deadline, "the sampler does not sample"
        time.sleep(0.001)


def measured() -> Any:
    """Measure blocks of all kinds; the driver's values change while the sampler runs."""
    stand_in = CudaStandIn([H100, 0])
    probe = MemoryProbe(stand_in.devices)

    def use(gib: int) -> None:
        STATE.used[H100] = gib * GIB

    def raise_and_lower() -> None:
        use(70)
        wait_for_queries(4)
        use(3)
        wait_for_queries(4)

    def fail() -> None:
        raise ValueError("in the block")

    def lose_a_board() -> None:
        raise_and_lower()
        STATE.memory_error[H100] = GPU_IS_LOST
        wait_for_queries(4)

    found = {}
    for name, block in {
        "raise_and_lower": raise_and_lower,
        "end_high": lambda: use(60),
        "begin_low": lambda: None,
        "fail": fail,
        "lose_a_board": lose_a_board,
        "retry": lambda: setattr(stand_in, "num_alloc_retries", 2),
    }.items():
        if name == "begin_low":  # a peak before the block does not count
            stand_in.before_peaks_are_reset = lambda: use(3)
        with suppress(ValueError), probe.measure() as usage:
            block()
        threads = [thread.name for thread in threading.enumerate()]
        found[name] = asdict(usage) | {"threads": threads, "valid": usage.valid}
        STATE.memory_error[H100] = 0
        stand_in.before_peaks_are_reset = lambda: None
    return found


def log(units: str) -> Any:
    """List the tags that a logger writes."""
    stand_in = CudaStandIn(json.loads(units))
    tags: list[str] = []
    model = BalancedDataParallel(1, nn.Linear(2, 2), stand_in.devices)
    MemoryLogger(model, lambda tag, value, step: tags.append(tag), every=1).step()
    return tags


def command_with_cuda(*arguments: str) -> Any:
    """Run the command line with one CUDA device, the fastest of three boards."""
    from balanced_dp.cli.commands import main

    CudaStandIn([H100]).reserved_bytes = [GIB]
    torch._C._get_accelerator = lambda: torch.device("cuda")
    torch.cuda.is_available = lambda: True
    sys.argv = ["balanced-dp", *arguments]
    with redirect_stdout(StringIO()) as output, pytest.raises(SystemExit) as ended:
        main()
    return {"exit_code": ended.value.code or 0, "stdout": output.getvalue()}


if __name__ == "__main__":
    STATE = open_state(Path(os.environ["NVML_STAND_IN_STATE"]))
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
