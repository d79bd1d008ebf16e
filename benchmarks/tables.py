"""Write a benchmark's figures as a Markdown table, with the name of the hardware."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def hardware() -> str:
    """Return the name of the GPU or, without a GPU, the number and the model of the CPU cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        models = []
    return f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}"


def write_table(question: str, rows: Sequence[Mapping[str, Any]], folder: Path, note: str) -> None:
    """Write a table to the file ``<question>_<hardware>_<date>.md``.

    Args:
        question: a short name of what the benchmark measures.
        rows: dicts with the same keys, which become the columns of the table.
        folder: the folder in which the file is written.
        note: how the figures were measured.
    """
    day = datetime.now(timezone.utc).date()
    slug = re.sub(r"[^a-z0-9]+", "-", hardware().lower()).strip("-")
    columns = list(rows[0])
    lines = [
        f"# {question} on {hardware()}, {day}",
        "",
        f"`{shlex.join(['python', '-m', 'pytest', *sys.argv[1:]])}`",
        "",
        f"python {platform.python_version()}, torch {torch.__version__}",
        "",
        note,
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(text(row[column]) for column in columns)} |" for row in rows),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{question}_{slug}_{day}.md").write_text("\n".join(lines) + "\n")


def text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
