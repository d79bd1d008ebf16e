"""A script runs in this process as under python, with its own exit code and traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from balanced_dp import ArgumentError
from balanced_dp.cli.script import INTERRUPTED, check_script, run_script
from balanced_dp.tuning.loop import StepsDone


def write(path: Path, text: str) -> str:
    path.write_text(text, "utf-8")
    return str(path)


def test_a_script_runs_as_under_python(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "beside.py", "VALUE = 7")
    script = write(
        tmp_path / "script.py",
        "import os, sys, beside\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv, __file__, os.getcwd(), beside.VALUE)\n"
        "    print(sys.modules['__main__'].__dict__ is globals())\n",
    )
    before = sys.argv, sys.path[:]
    assert run_script(script, ["--lr", "-1", "x y"], is_module=False) == 0
    argv = [script, "--lr", "-1", "x y"]
    assert capsys.readouterr().out == f"{argv} {script} {tmp_path} 7\nTrue\n"
    assert (sys.argv, sys.path) == before
    del sys.modules["beside"]


def test_a_module(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "someones_package"
    folder.mkdir()
    write(folder / "__init__.py", "")
    write(folder / "train.py", "import sys\nprint(__name__, __package__, sys.argv[1:])")
    assert run_script("someones_package.train", ["a"], is_module=True) == 0
    assert capsys.readouterr().out == "__main__ someones_package ['a']\n"


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("import sys; sys.exit(0)", 0, ""),
        (f"from {StepsDone.__module__} import StepsDone\nraise StepsDone", 0, ""),
        ("raise KeyboardInterrupt", INTERRUPTED, "KeyboardInterrupt\n"),
        ("x =", 1, "SyntaxError: invalid syntax\n"),
    ],
)
def test_exit_codes(text, code, error, tmp_path, capsys):
    assert run_script(write(tmp_path / "script.py", text), [], is_module=False) == code
    told = capsys.readouterr().err
    assert told.endswith(error) and bool(told) == bool(error)


def test_a_traceback_has_the_script_s_frames(tmp_path, capsys):
    script = write(tmp_path / "script.py", "def f():\n    return {}['key']\nf()\n")
    assert run_script(script, [], is_module=False) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[0] == "Traceback (most recent call last):"
    assert error.splitlines()[1].strip() == f'File "{script}", line 3, in <module>'
    assert error.splitlines()[-1] == "KeyError: 'key'"
    assert "runpy" not in error and "balanced_dp" not in error


def test_it_waits_for_threads_of_the_script(tmp_path, capsys):
    text = "import threading\nthreading.Timer(0.05, print, ['from a thread']).start()"
    assert run_script(write(tmp_path / "script.py", text), [], is_module=False) == 0
    assert capsys.readouterr().out == "from a thread\n"


def test_no_such_script_or_module(tmp_path, capsys):
    with pytest.raises(ArgumentError, match=r"none\.py is no file; name a Python script"):
        check_script("none.py", is_module=False)
    with pytest.raises(ArgumentError, match=r"no option --step \(did you mean --steps\?\)"):
        check_script("--step", is_module=False, options=["--steps", "--memory"])
    with pytest.raises(ArgumentError, match="is a folder"):
        check_script(str(tmp_path), is_module=False)
    assert run_script("no_such_package.train", [], is_module=True) == 1
    assert "No module named 'no_such_package'" in capsys.readouterr().err
