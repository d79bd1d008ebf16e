"""Functions that start scripts of this folder in several processes, with or without torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

import balanced_dp

from ..processes import pythons

HERE = Path(__file__).parent
TIMEOUT_S = 300


def run_ranks(script: str | Path, *arguments: str | Path, num_processes: int) -> tuple[int, str]:
    """Run a script on several ranks; return the first exit code but 0, and the ranks' outputs.

    The processes have the environment of torchrun and begin with torch already imported.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    environs = [{**shared, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(num_processes)]
    command = (str(HERE / script), *map(str, arguments))
    done = pythons(environs, *command, timeout_s=TIMEOUT_S)
    output = "".join(rank.stdout + rank.stderr for rank in done)
    return next((rank.returncode for rank in done if rank.returncode), 0), output


def torchrun(
    script: str | Path,
    arguments: Sequence[str | Path],
    options: Sequence[str] = ("--standalone",),
    *,
    num_processes: int,
    **environment: str,
) -> subprocess.Popen[str]:
    """Start a script with torchrun; the output of its processes is in ``stdout``."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", *options),
        *("--nproc-per-node", str(num_processes), str(HERE / script), *map(str, arguments)),
    ]
    package = Path(balanced_dp.__file__).parents[1]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the output of a process; kill it if it does not end."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        raise AssertionError(f"did not end within {TIMEOUT_S} s:\n{output}") from None
    return process.returncode, output
