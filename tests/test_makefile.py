"""What the Makefile installs, and when."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def clone(tmp_path):
    """Returns a folder with what installing reads, and an empty environment."""
    (tmp_path / ".venv").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
        mark(tmp_path, name, 0)
    return tmp_path


def mark(clone, name, seconds):
    """Makes a file as old as if it had been made so many seconds after 1970."""
    (clone / name).touch()
    os.utime(clone / name, (seconds, seconds))


def installed_by(clone, target):
    """Returns the options of each line that installs something for a target."""
    command = ["make", "--no-print-directory", "--dry-run", target]
    done = subprocess.run(command, cwd=clone, check=True, capture_output=True, text=True)
    lines = done.stdout.replace("\\\n", " ").splitlines()
    options = [" ".join(re.findall(r"--group \w+|--editable '.*?'", line)) for line in lines]
    return [found for found in options if found]


DEMO, REST, LAB = "--editable '.[cli]'", "--group dev --editable '.[cli,hf]'", "--group lab"


def test_the_demo_takes_what_it_needs_and_nothing_else(clone):
    assert installed_by(clone, "demo") == [DEMO]


@pytest.mark.parametrize("target", ["test", "check", "docs", "notebooks", "bench"])
def test_other_targets_add_the_rest(clone, target):
    assert installed_by(clone, target) == [DEMO, REST]


def test_what_is_there_is_not_installed_again(clone):
    assert installed_by(clone, "lab") == [DEMO, REST, LAB]
    mark(clone, ".venv/.demo", 10)
    assert installed_by(clone, "demo") == []
    assert installed_by(clone, "test") == [REST]
    mark(clone, ".venv/.installed", 20)
    assert installed_by(clone, "test") == []
    mark(clone, ".venv/.lab", 30)
    assert installed_by(clone, "lab") == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_what_has_changed_is_installed_again(clone, name):
    mark(clone, ".venv/.demo", 10)
    mark(clone, ".venv/.installed", 20)
    mark(clone, name, 30)
    assert installed_by(clone, "test") == [DEMO, REST]


@pytest.mark.slow
def test_a_failure_says_why_and_is_not_taken_for_done(clone):
    """There is no index to install from."""
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = subprocess.run(["make", "demo"], cwd=clone, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    said = (clone / ".venv" / "pip.log").read_text()
    assert "ERROR: " in said and said in done.stderr
    assert not (clone / ".venv" / ".demo").exists()
    assert installed_by(clone, "demo") == [DEMO]
