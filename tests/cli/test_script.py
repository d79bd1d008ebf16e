"""Test that scripts run in this process as with python, with the same exit code and traceback."""

from __future__ import annotations

import sys

import pytest

from balanced_dp.cli.script import INTERRUPTED, run_script

SEES = """
import os, sys, beside
if __name__ == '__main__' and sys.modules['__main__'].__dict__ is globals():
    print(sys.argv[1:], __file__, os.getcwd(), beside.VALUE)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("VALUE = 7")
    yield tmp_path
    sys.modules.pop("beside", None)


@pytest.mark.parametrize(
    ("text", "code", "printed", "error"),
    [
        (SEES, 0, "['--lr', '-1', 'x y'] {0}/script.py {0} 7\n", ""),
        ("import threading\nthreading.Timer(0.05, print, ['in a thread']).start()", 0, "in a", ""),
        ("raise SystemExit", 0, "", ""),
        ("raise SystemExit(3)", 3, "", ""),
        ("raise SystemExit('no data')", 1, "", "no data\n"),
        ("raise KeyboardInterrupt", INTERRUPTED, "", "KeyboardInterrupt\n"),
        ("x =", 1, "", "SyntaxError: invalid syntax\n"),
        ("def f():\n    return {}['key']\nf()\n", 1, "", "KeyError: 'key'\n"),
    ],
)
def test_a_script_runs_as_under_python(text, code, printed, error, folder, capsys):
    (folder / "script.py").write_text(text)
    before = sys.argv, sys.path[:]
    assert run_script(str(folder / "script.py"), ["--lr", "-1", "x y"], is_module=False) == code
    assert (sys.argv, sys.path) == before
    told = capsys.readouterr()
    assert told.out.startswith(printed.format(folder)) and bool(told.out) == bool(printed)
    assert told.err.endswith(error) and bool(told.err) == bool(error)
    assert "runpy" not in told.err and "balanced_dp/" not in told.err
    if "key" in text:
        assert told.err.splitlines()[1].strip() == f'File "{folder}/script.py", line 3, in <module>'


def test_a_module(folder, capsys):
    (folder / "someones_package").mkdir()
    text = "import sys\nprint(__name__, __package__, sys.argv[1:])"
    (folder / "someones_package" / "train.py").write_text(text)
    assert run_script("someones_package.train", ["a"], is_module=True) == 0
    assert capsys.readouterr().out == "__main__ someones_package ['a']\n"
    assert run_script("no_such_package.train", [], is_module=True) == 1
    assert "No module named 'no_such_package'" in capsys.readouterr().err
