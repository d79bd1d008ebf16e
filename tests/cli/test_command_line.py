"""What holds for all commands."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import torch

import balanced_dp

from ..processes import python


def test_versions():
    done = python("-m", "balanced_dp", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    torch_version = importlib.metadata.version("torch")
    assert torch.__version__.startswith(torch_version.partition("+")[0])
    versions = f"torch {torch_version}, Python {platform.python_version()}"
    assert done.stdout == f"balanced-dp {balanced_dp.__version__}, {versions}\n"


def test_the_version_is_in_the_changelog():
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{balanced_dp.__version__}] - " in text


def test_help_lists_the_commands():
    done = python("-m", "balanced_dp", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f" {name} " in done.stdout for name in ("run", "demo", "plan", "tune", "probe"))
    assert "gives the first GPU a smaller share" in done.stdout
