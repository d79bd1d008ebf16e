"""Test what all commands have in common."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import balanced_dp
from balanced_dp.cli.commands import main

from ..processes import python


@pytest.mark.slow
def test_versions():
    done = python("-m", "balanced_dp", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    torch_version = importlib.metadata.version("torch")
    assert torch.__version__.startswith(torch_version.partition("+")[0])
    versions = f"torch {torch_version}, Python {platform.python_version()}"
    assert done.stdout == f"balanced-dp {balanced_dp.__version__}, {versions}\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan nope --memory 1GiB", "there is no workload 'nope'; the built-in workloads are"),
        ("plan os:getcwd --memory 1GiB", "os:getcwd must return a balanced_dp.Workload, but"),
        ("plan char-lm --memory much", "--memory must be a number of bytes, or a"),
        ("plan char-lm --memory 1GiB,1GiB --devices 3", "--memory has 2 sizes, but"),
        ("plan char-lm --memory 400MiB", "1.00 GiB of each device is kept free (--reserve), so"),
        ("tune char-lm --sweep 8", "--sweep must be FIRST:LAST, the lower first: 0:8"),
        ("tune char-lm --sweep 8:0", "the lower first: 0:8, not '8:0'"),
        ("tune char-lm --json none/a.json", "there is no folder"),
        ("tune char-lm --html .", "cannot be written: it is a folder"),
        ("tune char-lm --json x --html ./x", "x is named twice; name two different files"),
        ("tune mine:fails", "mine:fails failed with TypeError: Linear.__init__() missing 2"),
        ("tune mine:unreduced", "the loss of mine:unreduced must be 0-dim, such as the"),
        ("tune mine:narrow", "mine:narrow failed with RuntimeError: a and b must have same"),
        ("tune mine:text", "model of mine:text must return an nn.Module, but returned str"),
        ("tune mine:wants", "cannot be made: TypeError: wants() missing 1 required"),
        ("tune mine:inside", "mine.py:17 with RuntimeError: a and b must have same reduction"),
        ("tune mine:reads", "mine.py:21, which needs --numeric: aten._local"),
        ("report a.json --html a.json", "a.json is named twice"),
        ("report none.json", "none.json cannot be read: No such file"),
        ("report a.json --against a.json --json a.json", "a.json is named twice"),
        ("report a.json --against a.json --html b --fail a:5", "--fail takes limits on peak, "),
        ("report a.json --fail peak:5%", "--fail needs --against, the report to compare with"),
        ("plan --memory 1GiB", "no workload given; balanced-dp plan --list names the"),
        ("plan char-lm", "plan needs the capacity of each device, such as --memory 11GiB"),
        ("plan mine", "there is no workload 'mine'; the built-in"),
        ("plan mine.py --memory 1GiB", "no workload 'mine.py' (a script? balanced-dp run mine.py)"),
        ("demo --emulate --devices 130", "num_devices must be at most 128, the limit"),
        ("plan mine:make --memory 2GiB --json /dev/full", "/dev/full cannot be written"),
        ("run none.py", "none.py is not a file; name a Python script"),
        ("run .", ". is a folder; name a Python script"),
        ("run --gpu0-bsz many mine.py", "--gpu0-bsz must be 0 or more, auto or even"),
        ("run --memory 512MiB mine.py", "1.00 GiB of each device is kept free"),
        ("run --reserve 1GiB mine.py", "--reserve needs --memory, the capacity of the"),
        ("tune --reserve 1GiB char-lm", "--reserve needs --memory, the capacity of the"),
        ("run --json - mine.py", "the script prints to stdout; name a file"),
        ("run --json a --html a mine.py", "a is named twice; name two different files"),
        ("validate --json - --markdown -", "- is named twice"),
    ],
)
def test_errors_are_one_line(command, message, tuned, invoke, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["balanced-dp", *shlex.split(command)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr()
    [line] = told.err.strip().splitlines()
    assert line.startswith("balanced-dp: ") and message in line and told.out == ""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan --devices 1 x", "value for '--devices': .*2"),
        ("run --devices 0 mine.py", "value for '--devices': .*1"),
        ("plan --for sped x", "value for '--for': .*'sped' is not one of 'speed', 'headroom', 'b"),
        ("run --for batch mine.py", "value for '--for': .*'batch' is not one of 'speed', 'headr"),
        ("run --step 3 mine.py", "No such option: --step .*--steps"),
    ],
)
def test_options_and_values_that_do_not_exist(command, message, invoke):
    ended = invoke(*command.split())
    assert ended.exit_code == 2 and re.search(message, ended.output)  # click's words, or pydantic's


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("redirected", "says"),
    [
        (">/dev/full", "the output cannot be written: No space left on device"),
        (">&-", "stdout is closed; to discard what is printed, use >/dev/null"),
        ("2>&-", ""),
        ("2>/dev/full", ""),
    ],
)
def test_an_output_that_is_full_or_closed(redirected, says):
    command = f"{shlex.quote(sys.executable)} -m balanced_dp plan --list {redirected}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == (2 if says else 0), done.stderr
    assert done.stderr == (f"balanced-dp: {says}\n" if says else "")
    assert ("gpt2-small" in done.stdout) != bool(says)
