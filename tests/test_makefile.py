"""What the Makefile installs, and when."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTRAS = re.compile(r"--editable '([^']*)'")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def clone(tmp_path):
    """Returns a folder with what installing reads, and an empty environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ".venv").mkdir()
    return tmp_path


def installed_by(clone, target):
    """Returns the lines that install something for a target, in their order."""
    command = ["make", "--no-print-directory", "--dry-run", target]
    done = subprocess.run(command, cwd=clone, check=True, capture_output=True, text=True)
    lines = done.stdout.replace("\\\n", " ").splitlines()
    return [line for line in lines if re.search("--editable|--group", line)]


def mark(clone, name, seconds):
    """Makes a file as old as if it had been made so many seconds after 1970."""
    (clone / name).touch()
    os.utime(clone / name, (seconds, seconds))


def test_the_demo_takes_what_it_needs_and_nothing_else(clone):
    [line] = installed_by(clone, "demo")
    assert EXTRAS.search(line)[1] == ".[cli]"
    assert "--group" not in line


@pytest.mark.parametrize("target", ["test", "check", "docs", "notebooks", "bench"])
def test_other_targets_add_the_rest(clone, target):
    demo, rest = installed_by(clone, target)
    assert [demo] == installed_by(clone, "demo")
    assert EXTRAS.search(rest)[1] == ".[cli,hf]"
    assert "--group dev" in rest


def test_lab_adds_jupyterlab(clone):
    *others, lab = installed_by(clone, "lab")
    assert others == installed_by(clone, "test")
    assert "--group lab" in lab
    for name, seconds in ((".demo", 10), (".installed", 20), (".lab", 30)):
        mark(clone, f".venv/{name}", seconds)
    assert installed_by(clone, "lab") == []


def test_what_is_there_is_not_installed_again(clone):
    mark(clone, ".venv/.demo", 10)
    assert installed_by(clone, "demo") == []
    assert len(installed_by(clone, "test")) == 1
    mark(clone, ".venv/.installed", 20)
    assert installed_by(clone, "test") == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_what_has_changed_is_installed_again(clone, name):
    mark(clone, ".venv/.demo", 10)
    mark(clone, ".venv/.installed", 20)
    mark(clone, name, 30)
    assert len(installed_by(clone, "demo")) == 1
    assert len(installed_by(clone, "test")) == 2


@pytest.mark.slow
def test_a_failure_says_why_and_is_not_taken_for_done(clone):
    """There is no index to install from."""
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = subprocess.run(["make", "demo"], cwd=clone, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    said = (clone / ".venv" / "pip.log").read_text()
    assert "ERROR: " in said and said in done.stderr
    assert not (clone / ".venv" / ".demo").exists()
    assert len(installed_by(clone, "demo")) == 1
