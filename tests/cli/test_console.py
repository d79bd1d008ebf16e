"""Test that tables fit a terminal of 80 columns, with what they usually hold."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from balanced_dp import ArgumentError
from balanced_dp.cli import commands
from balanced_dp.cli import console as consoles
from balanced_dp.cli import terminal as terminals
from balanced_dp.cli.demo import DemoRun, DemoSettings, print_demo
from balanced_dp.cli.run import RunResult
from balanced_dp.memory import DeviceMemory
from balanced_dp.report.compare import METRICS, Comparison
from balanced_dp.report.tables import imbalance, short_split
from balanced_dp.split import split_batch
from balanced_dp.units import byte_scale, format_bytes, format_mib

from ..tuning.measured import option
from ..tuning.measured import report as report_of

GIB = 2**30
USES = ("parameter", "gradient", "optimizer state", "activation", "gathered output", "input")
PEAKS = st.lists(st.integers(2**20, 192 * GIB), min_size=2, max_size=16)


@contextlib.contextmanager
def terminal(width=80, is_checked=True):
    """Yield a list that gets the lines that are printed."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False
    )
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminals, "open_console", lambda stderr=False: console)
        yield lines
    lines += console.file.getvalue().splitlines()
    if is_checked:
        assert max(map(len, lines)) <= width


def cells(lines, name):
    """Return the cells of the rows with a name, where the parts of a table are joined."""
    rows = [re.split(r" *│ *| {2,}", line.strip(" │")) for line in lines]
    return [cell.strip() for first, *row in rows if first.strip() == name for cell in row]


def measured(peaks, gpu0_bsz=0, batch_size=64):
    return option(
        split_batch(batch_size, len(peaks), gpu0_bsz),
        peaks,
        uses=tuple({use: peak // len(USES) for use in USES} for peak in peaks),
        seconds=0.5,
    )


@given(PEAKS)
def test_what_fills_each_device(peaks):
    shown = measured(peaks)
    even = measured(peaks[::-1], gpu0_bsz=64)
    budgets = [192 * GIB] * len(peaks)
    name = "a_script_with_a_long_name.py"
    found = report_of([even, shown], budgets, workload=name, goal="headroom")
    shown = found.best
    with terminal() as lines:
        consoles.print_run(RunResult(0, shown, budgets, found, ()), name)
    scale, _ = byte_scale(max(peaks))
    assert cells(lines, "peak") == [f"{peak / scale:.2f}" for peak in shown.peak_bytes]
    assert cells(lines, "samples") == list(map(str, shown.chunk_sizes))
    assert " ".join(" ".join(lines).split()).count(name) == 1


def test_sentences_are_wrapped_between_words_and_code_is_not():
    code = f"    model = balanced_dp.BalancedDataParallel(0, model)  {'x' * 60}"
    sentence = f"{'a word ' * 20}:"
    with terminal(is_checked=False) as lines:
        consoles.print_run(RunResult(0, None, None, None, (f"{sentence}\n{code}",)), "")
    *wrapped, last = lines
    assert last == code
    assert len(wrapped) == 2
    assert all(line.split()[-1] in ("a", "word", ":") for line in wrapped)


@given(
    st.integers(2, 16),
    st.sampled_from([32, 256, 4096]),
    st.lists(st.integers(2**20, 9 * GIB), min_size=16, max_size=16),
)
def test_the_demo_s_runs(num_devices, batch_size, sizes):
    settings = DemoSettings(num_devices, batch_size, emulate=True)
    runs = [
        DemoRun("one device", measured(sizes[:1], batch_size, batch_size), (2.9645, 2.5)),
        DemoRun("even split", measured(sizes[:num_devices], batch_size, batch_size), (2.9645, 2.5)),
        DemoRun("balanced", measured(sizes[-num_devices:], 2, batch_size), (2.9645, 2.5)),
    ]
    with terminal() as lines:
        print_demo(settings, runs)
    shown = [run.measured for run in runs]
    assert cells(lines, "split") == [short_split(found.chunk_sizes) for found in shown]
    firsts = [format_mib(found.peak_bytes[0]) for found in shown]
    assert cells(lines, "peak, device 0") == firsts
    others = [format_mib(max(found.peak_bytes[1:])) for found in shown[1:]]
    assert cells(lines, "peak, highest other") == others
    assert cells(lines, "imbalance") == [f"{imbalance(found):.0%}" for found in shown[1:]]
    assert cells(lines, "samples/s") == [f"{found.samples_per_s:.1f}" for found in shown]
    assert cells(lines, "last loss") == ["2.5000"] * 3
    for use in USES:
        expected = [format_mib(run.measured.uses[0][use]) for run in runs]
        assert cells(lines, use) in (expected, [])


def test_the_demo_s_rows_where_memory_ran_out():
    run = DemoRun("one device", replace(measured([GIB]), out_of_memory="out"), ())
    even = DemoRun("even split", measured([GIB] * 8), (1.0,))
    with terminal() as lines:
        print_demo(DemoSettings(8, 64, emulate=True), [run, even, even])
    assert sum("out of memory" in line for line in lines) == 1


@pytest.mark.parametrize("index", [None, 1])
def test_what_each_gpu_holds(index):
    memories = [
        DeviceMemory(
            device=f"cuda:{i}",
            nvml_index=i,
            mig_index=index,
            uuid=f"GPU-8c1a4a3e-27c6-4a7a-8f3e-2f1d8ab9c3{i:02}",
            name="NVIDIA RTX 6000 Ada Generation",
            total_bytes=48 * GIB,
            used_bytes=700 * 2**20,
            free_bytes=47 * GIB,
            error="a lost GPU" if i == 7 else None,
        )
        for i in range(8)
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(consoles.memory_table(memories))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for memory in memories:
        held = ["48.00 GiB", "700.00 MiB", "47.00 GiB"]
        assert cells(lines, memory.label) == held
        assert sum(memory.uuid in line for line in lines) == 1
    assert sum(memories[0].name in line for line in lines) == len(memories)
    assert lines[-1].strip() == f"{memories[-1].label}: a lost GPU"


@given(st.sampled_from([2**20, 700 * 2**20, 192 * GIB]), st.booleans(), st.booleans())
def test_two_reports_compared(peak, is_relative, has_limit):
    values = {"peak": float(peak), "imbalance": 0.123, "max_batch": 16777216.0, "speed": 12345.6}
    limit = 0.25 if has_limit else None
    comparisons = [
        Comparison(metric, values[metric], 0.99 * values[metric], 0.5, limit, is_relative)
        for metric in METRICS
    ]
    shared = {"workload": "gpt2-small", "before_line": "a line", "after_line": "another"}
    with terminal() as lines:
        consoles.print_comparison(
            [shared | asdict(found) | {"failed": found.failed} for found in comparisons]
        )
    assert cells(lines, "peak")[:2] == [format_bytes(peak), format_bytes(0.99 * peak)]
    assert cells(lines, "imbalance")[0] == "12.3%"
    assert cells(lines, "imbalance")[2] == ("50.0%" if is_relative else "50.0 points")
    assert cells(lines, "max_batch")[0] == "16777216"
    assert cells(lines, "speed")[0] == "12345.60"
    assert sum("FAILED" in line for line in lines) == 4 * has_limit


def test_an_error_is_one_line_that_a_terminal_wraps_between_words(monkeypatch, capsys):
    path, call = f"{'long-folder/' * 9}train.py", "BalancedDataParallel(None, m, weights=[32, 0])"
    text = f"{path} has no {'word ' * 20}in 24.00 GiB and fits with {call}, which is a choice"
    error = ArgumentError(text)
    monkeypatch.setattr(commands, "app", lambda: (_ for _ in ()).throw(error))

    def told(width):
        with terminal(width, is_checked=False) as lines, pytest.raises(SystemExit):
            commands.main()
        return lines

    for width in (60, 80):
        lines = told(width)
        assert " ".join(lines) == f"balanced-dp: {text}"
        assert path in lines and all(
            any(part in line for line in lines) for part in (call, "24.00 GiB")
        )
        assert max(len(line) for line in lines if line != path) <= width
    with pytest.raises(SystemExit):
        commands.main()
    assert capsys.readouterr().err == f"balanced-dp: {text}\n"
