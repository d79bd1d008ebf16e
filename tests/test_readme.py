"""What the README shows is run, and what it claims is checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from balanced_dp.cli import app
from balanced_dp.demo import DemoSettings, run_demo

from .distributed.launch import finished, torchrun

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
SHOWN = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OF_RANKS = [block for block in SHOWN if "torchrun" in block.splitlines()[0]]
BLOCKS = [block for block in SHOWN if block not in OF_RANKS]


def test_there_are_blocks_to_run():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:60])
@pytest.mark.filterwarnings("ignore:tensors outlive:ResourceWarning")
def test_python_blocks_run(block):
    exec(block, {})


def test_the_script_of_ranks_runs(tmp_path):
    [script] = OF_RANKS
    path = tmp_path / "train.py"
    path.write_text(script)
    exit_code, output = finished(torchrun(path, [], num_processes=4))
    assert exit_code == 0, output
    assert output == "".join(
        f"epoch {epoch}: shares (1, 5, 5, 5), 4 batches\n" for epoch in range(2)
    )


@pytest.mark.filterwarnings("ignore:tensors outlive:ResourceWarning")
def test_the_output_that_is_shown_is_what_is_printed(capsys):
    shown = re.findall(r"```python\n((?:(?!```).)*)```\n\n```\n(.*?)```", README, re.DOTALL)
    assert shown
    for block, output in shown:
        exec(block, {})
        assert capsys.readouterr().out == output


def test_commands_that_are_shown_exist():
    shown = re.findall(r"^balanced-dp (\w+)((?: --\w+)*)", README, re.MULTILINE)
    assert shown
    for command, options in shown:
        done = CliRunner().invoke(app, [command, "--help"])
        assert done.exit_code == 0
        for option in options.split():
            assert option in done.output


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = set(re.findall(r"`?make ([a-z]+)`?", README))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_that_are_linked_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_demo_s_memory_figures_are_those_of_the_readme():
    runs = run_demo(DemoSettings(steps=2, emulate=True))
    for run in runs:
        chunks = " ".join(map(str, run.chunk_sizes))
        [shown] = re.findall(rf"{run.name} +│ {chunks} +│ ([\d. ]+) │", README)
        peaks = [peak / 2**20 for peak in run.peak_bytes]
        # The text, and with it the number of different characters, is that of the Python.
        assert peaks == pytest.approx([float(peak) for peak in shown.split()], rel=0.005)
