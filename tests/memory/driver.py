"""The build of the stand-in for NVIDIA's driver library, and Python processes that load it."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
from pathlib import Path
from typing import Any

from ..processes import python

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("nvml_stand_in.c")
NUM_BOARDS, NUM_UNITS = 3, 5
GIB, MIB = 2**30, 2**20

GTX, A100, H100 = 0, 1, 2  # by NVML's index
SLICE = 3  # the first MIG slice of the A100
UUIDS = (
    "GPU-5a1f0c55-11d2-4e7a-9a31-3c0b6f0d2a01",
    "GPU-5a2e9b10-72c4-4b5f-8d11-90e2c4a1b702",
    "GPU-c3b7d6e4-0f5a-4c88-b2f0-6a7d1e9c5403",
    "MIG-0d4b8f21-5e6c-5a9b-8c7d-1f2e3d4c5b06",
    "MIG-e7a6b5c4-3d2e-5f1a-9b8c-7d6e5f4a3b07",
)
BUSES = (0x04, 0x07, 0x0B, 0x07, 0x07)
RESERVED = 512 * MIB
USED = (1 * GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB)


class State(ctypes.Structure):
    """struct state of the C source."""

    _fields_ = (
        ("used", ctypes.c_uint64 * NUM_UNITS),
        ("reserved", ctypes.c_uint64),
        ("memory_error", ctypes.c_uint32 * NUM_UNITS),
        ("handle_error", ctypes.c_uint32 * NUM_BOARDS),
        ("init_error", ctypes.c_uint32),
        ("name_error", ctypes.c_uint32),
        ("has_mig", ctypes.c_uint32),
        ("num_memory_queries", ctypes.c_uint32),
    )


def open_state(path: Path) -> State:
    """Map the state in a file, which is shared with every process that has loaded the library."""
    with path.open("r+b") as file:
        return State.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(State)))


class Driver:
    """One build of the library, and the state of its devices."""

    def __init__(self, folder: Path, state_file: Path) -> None:
        self.folder = folder
        self.state_file = state_file
        state_file.write_bytes(bytes(ctypes.sizeof(State)))
        self.state = open_state(state_file)
        self.state.used[:] = USED
        self.state.reserved = RESERVED

    def environ(self, **variables: str) -> dict[str, str]:
        return {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",  # torch sees no real ones
            "LD_LIBRARY_PATH": str(self.folder),
            "NVML_STAND_IN_STATE": str(self.state_file),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **variables,
        }

    def run(self, script: str, *arguments: str, **variables: str) -> Any:
        """Run ``tests.memory.in_process`` and return the JSON that it prints."""
        program = "tests.memory.in_process"
        done = python("-m", program, script, *arguments, environ=self.environ(**variables))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def command(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command line."""
        return python("-m", "balanced_dp", *arguments, environ=self.environ(**variables))


def build(folder: Path, *flags: str) -> Path:
    folder.mkdir()
    library = folder / "libnvidia-ml.so.1"
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-function", "-Werror"]
    options += [f"-Wl,-soname,{library.name}"]  # a library loaded before is found by this name
    subprocess.run(["gcc", *options, *flags, "-o", str(library), str(SOURCE)], check=True)
    return folder
