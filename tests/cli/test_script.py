"""A script runs in this process as under python, and the change of it is shown as a diff."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from balanced_dp import ArgumentError
from balanced_dp.cli.script import INTERRUPTED, check_script, replaced_calls, run_script
from balanced_dp.integrations.replacements import WrappedAt
from balanced_dp.tuning.loop_recorder import StepsDone


def write(path: Path, text: str) -> str:
    path.write_text(text, "utf-8")
    return str(path)


def test_the_script_sees_what_it_would_see_under_python(tmp_path, capsys, monkeypatch):
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


def test_a_traceback_has_the_frames_of_the_script_only(tmp_path, capsys):
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
    with pytest.raises(ArgumentError, match="is a folder"):
        check_script(str(tmp_path), is_module=False)
    assert run_script("no_such_package.train", [], is_module=True) == 1
    assert "No module named 'no_such_package'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "changed"),
    [
        ("model = nn.DataParallel(model)", ["model = balanced_dp.BalancedDataParallel(3, model)"]),
        (
            "model = torch.nn.DataParallel(model, device_ids=[0, 1]).cuda()",
            ["model = balanced_dp.BalancedDataParallel(3, model, device_ids=[0, 1]).cuda()"],
        ),
        ("m = DataParallel ( m)", ["m = balanced_dp.BalancedDataParallel(3, m)"]),
        (
            "y = nn.parallel.data_parallel(model, x)",
            ["y = balanced_dp.balanced_data_parallel(3, model, x)"],
        ),
        (
            "model = nn.DataParallel(\n    model,\n    dim=1,\n)",
            ["model = balanced_dp.BalancedDataParallel(3,", "    model,", "    dim=1,", ")"],
        ),
    ],
)
@pytest.mark.parametrize("line_in_call", [0, -1])
def test_the_change_as_a_diff(call, changed, line_in_call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = '"""A script."""\nimport torch\nfrom torch import nn\n\n'
    script = write(tmp_path / "train.py", f"{head}{call}\nprint(model)\n")
    lines = range(5, 6 + call.count("\n"))
    diff = replaced_calls([WrappedAt(script, lines[line_in_call])], 3)
    assert diff.startswith("--- a/train.py\n+++ b/train.py\n")
    added = [line[1:] for line in diff.splitlines()[2:] if line.startswith("+")]
    removed = [line[1:] for line in diff.splitlines()[2:] if line.startswith("-")]
    before = call.splitlines()
    assert added == ["import balanced_dp", *(line for line in changed if line not in before)]
    assert removed == [line for line in before if line not in changed]


def test_all_calls_are_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'é = "é"; a, b = DataParallel(a), DataParallel(b)\nimport sys\nc = nn.DataParallel(c)'
    script = write(tmp_path / "train.py", text)
    diff = replaced_calls([WrappedAt(script, 1), WrappedAt(script, 3)], 3)
    assert diff == (
        "--- a/train.py\n+++ b/train.py\n"
        "@@ -1,3 +1,4 @@\n"
        '-é = "é"; a, b = DataParallel(a), DataParallel(b)\n'
        '+é = "é"; a, b = balanced_dp.BalancedDataParallel(3, a), '
        "balanced_dp.BalancedDataParallel(3, b)\n"
        "+import balanced_dp\n"
        " import sys\n"
        "-c = nn.DataParallel(c)\n"
        "+c = balanced_dp.BalancedDataParallel(3, c)"
    )


def test_the_import_comes_after_those_of_the_future_and_other_names_are_found(tmp_path):
    head = "from __future__ import annotations\n"
    text = head + "is_wrapped = isinstance(m, DP); m = m if is_wrapped else DP(module=m)\n"
    script = write(
        tmp_path / "train.py", text.replace("\nis", "\nfrom torch.nn import DataParallel as DP\nis")
    )
    diff = replaced_calls([WrappedAt(script, 3)], 3)
    added = [line for line in diff.splitlines()[2:] if line.startswith("+")]
    assert added == [
        "+import balanced_dp",
        "+is_wrapped = isinstance(m, DP); m = m if is_wrapped else "
        "balanced_dp.BalancedDataParallel(3, module=m)",
    ]
    script = write(tmp_path / "other.py", head + "m = DataParallel(m)\n")
    first, *changed = replaced_calls([WrappedAt(script, 2)], 3).splitlines()[3:]
    assert first == " from __future__ import annotations"
    assert "+import balanced_dp" in changed


@pytest.mark.parametrize("text", ["x =", "", "model = wrap(model)"])
def test_no_diff_without_the_call(text, tmp_path):
    script = write(tmp_path / "train.py", text)
    assert replaced_calls([WrappedAt(script, 1)], 3) is None
