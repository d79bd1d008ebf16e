"""Starts scripts of this folder with torchrun, as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import balanced_dp

HERE = Path(__file__).parent
TIMEOUT_S = 300


def torchrun(
    script: str | Path,
    arguments: Sequence[str | Path],
    options: Sequence[str] = ("--standalone",),
    *,
    num_processes: int,
    **environment: str,
) -> subprocess.Popen[str]:
    """Starts as many processes of a script; what they print is in ``stdout``."""
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


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Returns the exit code and what was printed; kills what does not end."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        raise AssertionError(f"did not end within {TIMEOUT_S} s:\n{output}") from None
    return process.returncode, output
