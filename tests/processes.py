"""Python in processes of their own, without the seconds that a new one takes to import torch.

Each is a fork of one that has imported it and done nothing else; without fork it is a new process.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

HAS_FORKS = "forkserver" in multiprocessing.get_all_start_methods()
CONTEXT = multiprocessing.get_context("forkserver" if HAS_FORKS else "spawn")
CONTEXT.set_forkserver_preload(["torch._dynamo", "balanced_dp", "typer", "rich"])


def python(
    *arguments: str, cwd: str | Path = ".", environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Does what ``python -m MODULE ...`` or ``python -c CODE`` would."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = CONTEXT.Process(target=_run, args=(arguments, outputs, cwd, dict(environ)))
        process.start()
        process.join()
        told = [output.read_text() for output in outputs]
    return subprocess.CompletedProcess(arguments, process.exitcode, *told)


def _run(
    arguments: tuple[str, ...], outputs: list[Path], cwd: str | Path, environ: dict[str, str]
) -> None:
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    with suppress(AttributeError):  # on Windows
        os.setsid()  # some send signals to their process group
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = ["", *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    if "LD_LIBRARY_PATH" in environ:  # which is read when a process starts, too early for a fork
        for library in Path(environ["LD_LIBRARY_PATH"]).glob("*.so.*"):
            ctypes.CDLL(str(library))
    option, program, *sys.argv[1:] = arguments
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(program, {"__name__": "__main__"})
