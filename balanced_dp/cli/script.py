"""Run a training script in this process, as ``python`` would."""

from __future__ import annotations

import gc
import runpy
import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in a shell."""


def is_library(filename: str) -> bool:
    """Return whether a file belongs to Python or to an installed package, not to the user."""
    ours, stdlib = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")
    packages = *site.getsitepackages(), site.getusersitepackages()
    return filename.startswith(("<", ours, stdlib, *packages))


def run_script(name: str, arguments: Sequence[str], is_module: bool) -> int:
    """Run a script as ``__main__``, and return its exit code.

    If ``is_module`` is True, ``name`` is the name of a module. Otherwise, ``name`` is the file of
    a script.

    If the script does not catch an exception, the traceback is printed. The traceback begins with
    the first frame of the script.
    """
    before = sys.argv, sys.path[:]
    sys.argv = [name, *arguments]
    sys.path[0:0] = ["" if is_module else str(Path(name).absolute().parent)]
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(name).absolute()), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        _print_error(error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    finally:
        _join_threads()
        sys.argv, sys.path[:] = before
        sys.stdout.flush()
        gc.collect()  # reference cycles keep the script's modules and models alive
    return 0


def _print_error(error: BaseException) -> None:
    frames = error.__traceback__
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _join_threads() -> None:
    """Wait for the script's threads, as the interpreter does before it exits."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
