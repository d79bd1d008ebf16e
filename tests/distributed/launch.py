"""A script of this folder in several processes, as torchrun starts them."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

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
