"""Test what the commands show on a terminal of 80 columns."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from balanced_dp import ArgumentError
from balanced_dp.cli import commands
from balanced_dp.cli import console as consoles
from balanced_dp.memory.units import byte_scale
from balanced_dp.split import split_batch

from ..tuning.measured import option
from ..tuning.measured import report as report_of

GIB = 2**30
USES = ("parameter", "gradient", "optimizer state", "activation", "gathered output", "input")


@contextlib.contextmanager
def shown(width=80):
    """Let the console print to a terminal of ``width`` columns, and record what it shows.

    Yields:
        A list, which has the printed lines when the ``with`` block has ended.
    """
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False
    )
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consoles, "open_console", lambda stderr=False: console)
        yield lines
    lines += console.file.getvalue().splitlines()


@given(st.integers(2**20, 192 * GIB), st.integers(2**20, 192 * GIB), st.integers(2, 16))
def test_the_answer_fits_80_columns(first, others, num_devices):
    peaks = [first, *[others] * (num_devices - 1)]
    measured = [
        option(
            split_batch(8 * num_devices, num_devices, value),
            peaks[:: 1 if value else -1],
            uses=tuple({use: peak // len(USES) for use in USES} for peak in peaks),
        )
        for value in (0, 8)
    ]
    name = f"a script with a long name, {'x' * 300}.py"
    report = report_of(measured, [192 * GIB] * num_devices, workload=name)
    with shown() as lines:
        consoles.show(report, None, None)
    rows = [line.rstrip() for line in lines if re.match(r" ", line)]
    assert len(rows) > 12 and max(map(len, rows)) <= 80
    assert sum(name in line for line in lines) == 1
    scale, _ = byte_scale(max(peaks))
    found = dict.fromkeys(f"{peak / scale:.2f}" for peak in report.best.peak_bytes)
    [cells] = [row.split()[1:] for row in rows if row.startswith(" peak ")]
    assert dict.fromkeys(cells).keys() == found.keys()


@pytest.mark.parametrize("width", [60, 80])
def test_errors_are_wrapped_between_words(width, monkeypatch):
    path = f"{'long-folder/' * 4}train.py"
    text = f"{path} has no {'word ' * 20}at the end"

    def fail():
        raise ArgumentError(text)

    monkeypatch.setattr(commands, "app", fail)
    with shown(width) as lines, pytest.raises(SystemExit):
        commands.main()
    assert " ".join(line.rstrip() for line in lines) == f"balanced-dp: {text}"
    assert max(len(line.rstrip()) for line in lines) <= width
