"""A script runs in this process as under python, with its own exit code and traceback."""

from __future__ import annotations

import sys

import pytest

from balanced_dp.cli.script import INTERRUPTED, run_script
from balanced_dp.tuning.loop import StepsDone

SCRIPT = """
import os, sys, beside
if __name__ == '__main__':
    print(sys.argv[1:], __file__, os.getcwd(), beside.VALUE)
    print(sys.modules['__main__'].__dict__ is globals())
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "script.py"


def test_a_script_runs_as_under_python(script, tmp_path, capsys):
    (tmp_path / "beside.py").write_text("VALUE = 7")
    script.write_text(SCRIPT)
    before = sys.argv, sys.path[:]
    assert run_script(str(script), ["--lr", "-1", "x y"], is_module=False) == 0
    assert capsys.readouterr().out == f"['--lr', '-1', 'x y'] {script} {tmp_path} 7\nTrue\n"
    assert (sys.argv, sys.path) == before
    del sys.modules["beside"]


def test_a_module(script, capsys):
    folder = script.with_name("someones_package")
    folder.mkdir()
    (folder / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])")
    assert run_script("someones_package.train", ["a"], is_module=True) == 0
    assert capsys.readouterr().out == "__main__ someones_package ['a']\n"
    assert run_script("no_such_package.train", [], is_module=True) == 1
    assert "No module named 'no_such_package'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        (f"from {StepsDone.__module__} import StepsDone\nraise StepsDone", 0, ""),
        ("raise KeyboardInterrupt", INTERRUPTED, "KeyboardInterrupt\n"),
        ("x =", 1, "SyntaxError: invalid syntax\n"),
        ("def f():\n    return {}['key']\nf()\n", 1, "KeyError: 'key'\n"),
    ],
)
def test_exit_codes_and_tracebacks(text, code, error, script, capsys):
    script.write_text(text)
    assert run_script(str(script), [], is_module=False) == code
    told = capsys.readouterr().err
    assert told.endswith(error) and bool(told) == bool(error)
    assert "runpy" not in told and "balanced_dp/" not in told
    if "key" in text:
        assert told.splitlines()[1].strip() == f'File "{script}", line 3, in <module>'


def test_it_waits_for_threads_of_the_script(script, capsys):
    script.write_text("import threading\nthreading.Timer(0.05, print, ['from a thread']).start()")
    assert run_script(str(script), [], is_module=False) == 0
    assert capsys.readouterr().out == "from a thread\n"
