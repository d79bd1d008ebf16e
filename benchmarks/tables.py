"""A benchmark's figures as Markdown and JSON, with what they were measured on."""

from __future__ import annotations

import json
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
    """Returns the number of CPU cores and what they are."""
    try:
        models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        models = []
    return f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}"


def write_table(
    question: str,
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    on: str,
    note: str,
    versions: Mapping[str, str] | None = None,
) -> list[Path]:
    """Writes ``<question>_<hardware>_<date>.md`` and ``.json`` and returns their paths.

    Args:
        question: what the benchmark asks, in a word.
        rows: records of the same keys, which are the columns.
        folder: where to.
        on: the hardware.
        note: how the figures were had.
        versions: of other software than Python and torch.
    """
    now = datetime.now(timezone.utc)
    command = shlex.join(["python", "-m", "pytest", *sys.argv[1:]])
    if not Path(sys.argv[0]).name.startswith(("pytest", "__main__")):
        command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    record = {
        "schema": 1,
        "question": question,
        "hardware": on,
        "date": now.isoformat(timespec="seconds"),
        "command": command,
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | dict(versions or {}),
        "note": note,
        "rows": list(rows),
    }
    slug = re.sub(r"[^a-z0-9]+", "-", on.lower()).strip("-")
    stem = folder / f"{question}_{slug}_{now:%Y-%m-%d}"
    columns = list(rows[0])
    lines = [
        f"# {question} on {on}, {now:%Y-%m-%d}",
        "",
        f"`{command}`",
        "",
        ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "",
        note,
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(_cell(row[column]) for column in columns)} |" for row in rows),
    ]
    paths = [Path(f"{stem}.md"), Path(f"{stem}.json")]
    folder.mkdir(parents=True, exist_ok=True)
    paths[0].write_text("\n".join(lines) + "\n")
    paths[1].write_text(json.dumps(record, indent=2) + "\n")
    return paths


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
    return str(value)
