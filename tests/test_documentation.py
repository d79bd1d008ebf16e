"""What the README and the guide show is run, and what they claim is checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from balanced_dp import tune
from balanced_dp.cli import app
from balanced_dp.demo import DemoSettings, run_demo
from balanced_dp.report.tables import candidate_table
from balanced_dp.workloads import find_workload
from benchmarks import before_and_after

from .distributed.launch import finished, torchrun

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in PAGES}
README = TEXTS["README.md"]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)
"""A block of code, and what it prints if that is shown below it."""
SHOWN = [(name, *found) for name, text in TEXTS.items() for found in BLOCK.findall(text)]
OF_RANKS = [shown for shown in SHOWN if "torchrun" in shown[1].splitlines()[0]]
BLOCKS = [
    pytest.param(code, output, id=f"{name}-{number}")
    for number, (name, code, output) in enumerate(SHOWN)
    if "torchrun" not in code.splitlines()[0]
]


def test_each_page_has_blocks_to_run():
    assert len(BLOCKS) >= 30
    without = set(TEXTS) - {name for name, _, _ in SHOWN}
    assert without == {"docs/api.md"}


@pytest.mark.parametrize(("code", "output"), BLOCKS)
@pytest.mark.filterwarnings("ignore:tensors outlive:ResourceWarning")
def test_blocks_run_and_print_what_is_shown(code, output, capsys):
    exec(code, {"__name__": "shown"})
    printed = capsys.readouterr().out
    if output:
        assert printed == output


def test_the_script_of_ranks_runs(tmp_path):
    [(_, script, _)] = OF_RANKS
    path = tmp_path / "train.py"
    path.write_text(script)
    exit_code, output = finished(torchrun(path, [], num_processes=4))
    assert exit_code == 0, output
    assert output == "".join(
        f"epoch {epoch}: shares (1, 5, 5, 5), 4 batches\n" for epoch in range(2)
    )


def test_commands_that_are_shown_exist():
    shown = [
        found
        for text in TEXTS.values()
        for found in re.findall(r"^balanced-dp (\w+)(.*)", text, re.MULTILINE)
    ]
    assert {"demo", "plan", "tune", "report", "compare", "probe", "workloads"} == set(dict(shown))
    for command, line in shown:
        done = CliRunner().invoke(app, [command, "--help"])
        assert done.exit_code == 0
        for option in re.findall(r"--\w[\w-]*", line.partition("#")[0]):
            assert option in done.output


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = {name for text in TEXTS.values() for name in re.findall(r"`?make ([a-z]+)`?", text)}
    assert {"demo", "test", "docs"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("path", [*PAGES, *ROOT.glob("*/README.md"), *ROOT.glob("C*.md")], ids=str)
def test_files_that_are_linked_exist(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target


def test_the_demo_s_memory_figures_are_those_of_the_readme():
    runs = run_demo(DemoSettings(steps=2, emulate=True))
    for run in runs:
        chunks = " ".join(map(str, run.chunk_sizes))
        num_peaks = len(run.peak_bytes)
        [shown] = re.findall(rf"{run.name} +{chunks} +((?:[\d.]+ +){{{num_peaks}}})", README)
        peaks = [peak / 2**20 for peak in run.peak_bytes]
        # The text, and with it the number of different characters, is that of the Python.
        assert peaks == pytest.approx([float(peak) for peak in shown.split()], rel=0.005)


def test_the_picture_s_figures_are_measured():
    report = before_and_after.measured()
    picture = before_and_after.PATH.read_text("utf-8")
    drawn = before_and_after.picture(report)
    figures = re.compile(r">([^<>]*(?:[MG]iB|samples|model)[^<>]*)<")
    assert figures.findall(picture) == figures.findall(drawn) != []
    assert report.alternative is not None
    even, best, on_devices = (
        report.plan.even_max_batch_size,
        report.plan.max_batch_size,
        report.alternative.plan.max_batch_size,
    )
    assert f"the largest batch is {even},\n{best} and {on_devices} " in README


def test_the_table_of_values_is_measured():
    report = tune(find_workload("char-lm"), 32, devices=4, sweep=range(9), emulate=True)
    rows = candidate_table(report).rows
    shown = [row.replace("**", "").split(" | ") for row in re.findall(r"\n\| (.*) \|", README)]
    for row in rows:
        [found] = [cells for cells in shown if cells[:2] == list(row[:2])]
        # The text, and with it the number of different characters, is that of the Python.
        assert numbers(found) == pytest.approx(numbers(row), rel=0.01, abs=0.02)


def numbers(cells: Sequence[str]) -> list[float]:
    return [float(number) for cell in cells for number in re.findall(r"[\d.]+", cell)]
