"""What the README and the guide show is run, and what they claim is checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from balanced_dp.cli.commands import app

from .distributed.launch import run_ranks

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in PAGES}
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)
"""A block of code, and what it prints if that is shown below it."""
SHOWN = [(name, *found) for name, text in TEXTS.items() for found in BLOCK.findall(text)]
OF_RANKS = [shown for shown in SHOWN if "torchrun" in shown[1].splitlines()[0]]
BLOCKS = [
    pytest.param(
        code, output, id=f"{name}-{number}", marks=pytest.mark.slow if "= tune(" in code else ()
    )
    for number, (name, code, output) in enumerate(SHOWN)
    if "torchrun" not in code.splitlines()[0]
]


def test_each_page_has_blocks_to_run():
    assert len(BLOCKS) >= 25
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
    exit_code, output = run_ranks(path, num_processes=4)
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
    assert {
        app_command.name or app_command.callback.__name__ for app_command in app.registered_commands
    } == set(dict(shown))
    for command, line in shown:
        done = CliRunner().invoke(app, [command, "--help"])
        assert done.exit_code == 0
        for option in re.findall(r"--\w[\w-]*", line.partition("#")[0].partition(".py")[0]):
            assert option in done.output


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = {name for text in TEXTS.values() for name in re.findall(r"`?make ([a-z-]+)`?", text)}
    assert {"demo", "test", "test-all", "docs"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "path",
    [*PAGES, *ROOT.glob("*/README.md"), *ROOT.glob("C*.md"), *ROOT.glob("docs/*/*.md")],
    ids=str,
)
def test_files_that_are_linked_exist(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target
