"""Run Python in separate processes that need not import torch, which takes seconds.

Each process is a fork of a server process that has imported torch and done nothing else. Where
Python cannot fork, it is a new process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

TIMEOUT_S = 600
HAS_FORKS = "forkserver" in multiprocessing.get_all_start_methods()
CONTEXT = multiprocessing.get_context("forkserver" if HAS_FORKS else "spawn")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "balanced_dp", "typer", "rich.live", "rich.table", "pydantic", "jinja2"]
)


def python(
    *arguments: str, cwd: str | Path = ".", environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE ...``, ``python -c CODE`` or ``python FILE ...`` in a process."""
    [done] = pythons([environ], *arguments, cwd=cwd)
    return done


def pythons(
    environs: Sequence[Mapping[str, str]], *arguments: str, cwd: str | Path = "."
) -> list[subprocess.CompletedProcess[str]]:
    """Run Python with the same arguments in several processes at the same time.

    There is one process for each dict of environment variables in ``environs``. If a process fails,
    the others are killed. Processes that run longer than ``TIMEOUT_S`` are killed, too.
    """
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [
            [Path(folder, f"{name} {index}") for name in ("stdout", "stderr")]
            for index in range(len(environs))
        ]
        for files, environ in zip(outputs, environs, strict=True):
            told = (arguments, files, cwd, dict(environ))
            processes.append(CONTEXT.Process(target=_run, args=told))
            processes[-1].start()
        deadline = time.monotonic() + TIMEOUT_S
        while running := [process for process in processes if process.exitcode is None]:
            left = max(0, deadline - time.monotonic())
            wait([process.sentinel for process in running], left)
            if left == 0 or any(process.exitcode for process in processes):
                for process in running:
                    process.kill()
        for process in processes:
            process.join()
        texts = [[file.read_text() for file in files] for files in outputs]
    return [
        subprocess.CompletedProcess(arguments, process.exitcode, *told)
        for process, told in zip(processes, texts, strict=True)
    ]


def run_ranks(*command: str | Path, num_processes: int) -> tuple[int, str]:
    """Run a script on several ranks; return the first nonzero exit code, or 0, and all output.

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
    done = pythons(environs, *map(str, command))
    output = "".join(rank.stdout + rank.stderr for rank in done)
    return next((rank.returncode for rank in done if rank.returncode), 0), output


def _run(
    arguments: tuple[str, ...], outputs: list[Path], cwd: str | Path, environ: dict[str, str]
) -> None:
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    with suppress(AttributeError):  # on Windows
        os.setsid()  # some programs send signals to their process group
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    multiprocessing.set_start_method(None, force=True)  # the default of new processes
    sys.path[:0] = ["", *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    if arguments[0] in ("-m", "-c"):
        option, program, *sys.argv[1:] = arguments
    else:
        option, *sys.argv[1:] = arguments
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif option == "-c":
        exec(program, {"__name__": "__main__"})
    else:
        runpy.run_path(option, run_name="__main__")
