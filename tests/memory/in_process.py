"""Functions that tests run in a process that has loaded the stand-in driver; each prints JSON."""

from __future__ import annotations

import json
import os
import signal
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
from balanced_dp.memory import StepMemory
from balanced_dp.memory.nvml import Nvml

from .driver import BUSES, GIB, H100, MIB, UUIDS, State, open_state

STATE: State
GPU_IS_LOST = 15


class CudaStandIn:
    """A replacement for functions of a ``torch.cuda`` without CUDA; its statistics can be set.

    Args:
        units: the units of the stand-in driver, in CUDA's order.
    """

    def __init__(self, units: Sequence[int]) -> None:
        self.units = units
        self.initialized = False
        self.has_context = True
        self.synchronized: list[int] = []
        self.reserved_bytes = [0] * len(units)
        self.num_alloc_retries = 0
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # which hides the real ones
            del os.environ["CUDA_VISIBLE_DEVICES"]
        cuda: Any = torch.cuda
        cuda.init = lambda: None
        cuda.device_count = lambda: len(units)
        cuda.is_initialized = lambda: self.initialized
        torch._C._cuda_hasPrimaryContext = lambda index: self.has_context
        cuda.get_device_properties = lambda device: self.properties(device.index)
        cuda.memory_stats = lambda device: {"num_alloc_retries": self.num_alloc_retries}
        for name in ("memory_allocated", "memory_reserved"):
            for prefix in ("", "max_"):
                setattr(cuda, prefix + name, lambda device: self.reserved_bytes[device.index])
        cuda.synchronize = self.synchronize
        cuda.reset_peak_memory_stats = lambda device: self.before_peaks_are_reset()
        self.before_peaks_are_reset: Callable[[], object] = lambda: None
        self.broken = False
        self.devices = [f"cuda:{index}" for index in range(len(units))]

    def synchronize(self, device: torch.device) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self.synchronized.append(device.index)
        self.has_context = True  # synchronizing a device creates its context

    def properties(self, cuda_index: int) -> SimpleNamespace:
        self.initialized = True  # reading the properties initializes CUDA
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


def driver_version() -> Any:
    return Nvml().driver_version()


def cuda(units: str) -> Any:
    """Take a snapshot with these units of the driver as CUDA devices."""
    return snapshot(MemoryProbe(CudaStandIn(json.loads(units)).devices))


def process_bytes() -> Any:
    """Allocate memory between the creation of a probe and its snapshot, and before both."""
    stand_in = CudaStandIn([H100])
    found = {}
    for name, has_context, reserved in (
        ("untouched", False, 0),
        ("context only", True, 0),
        ("holding", True, GIB),
        ("held before", True, GIB),
    ):
        if name in ("untouched", "held before"):
            probe = MemoryProbe(["cuda:0"])
        stand_in.has_context, stand_in.reserved_bytes = has_context, [reserved]
        STATE.used[H100] = 3 * GIB + reserved + 300 * MIB
        [memory] = probe.snapshot()
        source = memory.process_bytes_source
        found[name] = [memory.process_bytes, source, memory.other_process_bytes]
    return found


def wait_for_queries(number: int) -> None:
    """Wait until the sampler has made that many more queries."""
    wanted = STATE.num_memory_queries + number
    deadline = time.monotonic() + 60
    while STATE.num_memory_queries < wanted:
        assert time.monotonic() < deadline, "the sampler does not sample"
        time.sleep(0.001)


def left_behind() -> list[str]:
    """List the threads and child processes of this process."""
    threads = [thread.name for thread in threading.enumerate() if thread.name != "MainThread"]
    children: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread of torch's that has just ended
            children += (task / "children").read_text().split()
    return threads + children


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

    def begin_low() -> None:
        assert STATE.used[H100] == 3 * GIB

    def fail() -> None:
        raise_and_lower()
        raise ValueError("in the block")

    def press_ctrl_c() -> None:
        raise_and_lower()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    def lose_a_board() -> None:
        raise_and_lower()
        STATE.memory_error[H100] = GPU_IS_LOST
        wait_for_queries(4)

    found = {}
    for name, block in {
        "raise_and_lower": raise_and_lower,
        "end_high": lambda: use(60),
        "begin_low": begin_low,
        "fail": fail,
        "press_ctrl_c": press_ctrl_c,
        "lose_a_board": lose_a_board,
        "retry": lambda: setattr(stand_in, "num_alloc_retries", 2),
        "break_the_device": lambda: setattr(stand_in, "broken", True),
    }.items():
        usage = StepMemory()
        caught = None
        if name == "begin_low":  # a peak before the block does not count
            stand_in.before_peaks_are_reset = lambda: use(3)
        try:
            with probe.measure() as usage:
                block()
        except (ValueError, RuntimeError, KeyboardInterrupt) as error:
            caught = repr(error)
        found[name] = asdict(usage) | {"caught": caught, "left": left_behind()}
        STATE.memory_error[H100] = 0
        stand_in.before_peaks_are_reset = lambda: None
    return found


def forked() -> Any:
    """Fork in a block; the child leaves the block, too, and the parent's sampler continues."""
    CudaStandIn([H100])
    with MemoryProbe(["cuda:0"]).measure() as usage:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            STATE.used[H100] = 50 * GIB
            wait_for_queries(2)
    if not pid:
        os._exit(0)
    return asdict(usage) | {"left": left_behind()}


def untouched_devices_are_not_waited_for() -> Any:
    stand_in = CudaStandIn([H100, 0])
    stand_in.has_context = False
    with MemoryProbe(stand_in.devices).measure():
        pass
    return stand_in.synchronized


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
