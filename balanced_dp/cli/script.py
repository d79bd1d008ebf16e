"""Run somebody's training script in this process, as ``python`` would."""

from __future__ import annotations

import ast
import difflib
import gc
import linecache
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from ..errors import ArgumentError
from ..integrations.replacements import WrappedAt

INTERRUPTED = 130
"""The exit code after Ctrl-C, that of a shell."""


def check_script(name: str, is_module: bool) -> None:
    """Raise ArgumentError if there is no such script."""
    if name.startswith("-"):
        raise ArgumentError(f"there is no option {name}; see balanced-dp run --help")
    if not is_module and not Path(name).is_file():
        kind = "a folder" if Path(name).is_dir() else "no file"
        raise ArgumentError(f"{name} is {kind}; name a Python script, or a module after -m")


def run_script(name: str, arguments: Sequence[str], is_module: bool) -> int:
    """Run a script, or with ``is_module`` a module, as ``__main__``; return its exit code.

    An exception that the script does not catch is printed with the frames of the script.
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
        gc.collect()  # the script's modules and models refer to each other
    return 0


def _print_error(error: BaseException) -> None:
    frames = error.__traceback__
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _join_threads() -> None:
    """Wait for the script's threads, as the interpreter does at its end."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def replaced_calls(wrapped_at: Sequence[WrappedAt], gpu0_bsz: int) -> str | None:
    """Return the change of a script that gives device 0 ``gpu0_bsz`` samples, as a diff.

    None if its file has no call to change.
    """
    diffs: list[str] = []
    for filename in dict.fromkeys(place.filename for place in wrapped_at):
        line_numbers = [place.line_number for place in wrapped_at if place.filename == filename]
        before = linecache.getlines(filename)
        after = _with_calls_replaced("".join(before), line_numbers, gpu0_bsz).splitlines(True)
        path = os.path.relpath(filename)
        diffs += difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in diffs).rstrip() or None


def _with_calls_replaced(source: str, line_numbers: Sequence[int], gpu0_bsz: int) -> str:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    names = {name: name for name in (*_REPLACED, *_REPLACED.values())}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {n.asname: n.name for n in node.names if n.asname and n.name in names}
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(node.lineno <= number <= (node.end_lineno or 0) for number in line_numbers)
        and _last_name(node.func) in names
    ]
    lines = source.encode().splitlines(True)  # offsets of ast are those of bytes
    is_imported = True
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        name = _REPLACED.get(names[_last_name(call.func)])
        changed, new = call.func, f"balanced_dp.{name}({gpu0_bsz}"
        if name is None:  # it is ours already
            given = [word.value for word in call.keywords if word.arg == "gpu0_bsz"]
            changed, new = [*given, *call.args, call][0], str(gpu0_bsz)
            if changed is call or isinstance(changed, ast.Starred):  # it is given elsewhere
                continue
        head = lines[changed.lineno - 1][: changed.col_offset].decode()
        tail = lines[(changed.end_lineno or 0) - 1][changed.end_col_offset :].decode()
        if name is not None:
            is_imported = False
            tail = tail.lstrip().removeprefix("(").lstrip(" ")
            new += {")": "", "\n": ","}.get(tail[:1], ", ")
        lines[changed.lineno - 1 : changed.end_lineno] = [f"{head}{new}{tail}".encode()]
    if not is_imported:
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        own = [node for node in imports if getattr(node, "module", None) != "__future__"]
        after_imports = max((node.end_lineno or 0 for node in imports), default=0)
        lines.insert(own[0].lineno - 1 if own else after_imports, b"import balanced_dp\n")
    return b"".join(lines).decode()


_REPLACED = {"DataParallel": "BalancedDataParallel", "data_parallel": "balanced_data_parallel"}


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
