"""Run the code that the README and the guide show, and check what they claim."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from balanced_dp import emulate_devices
from balanced_dp.cli.commands import app
from balanced_dp.cli.demo import answer, run_demo
from balanced_dp.tuning.report import RESERVE
from benchmarks import before_and_after

from .processes import run_ranks

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in PAGES}
READMES = [text for name, text in TEXTS.items() if name.startswith("README")]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)
"""Matches a block of Python code, and the output that is shown below it, if there is any."""
SHOWN = [(name, *found) for name, text in TEXTS.items() for found in BLOCK.findall(text)]
OF_RANKS = [shown for shown in SHOWN if "torchrun" in shown[1].splitlines()[0]]
SCRIPTS = [shown for shown in SHOWN if "train.py:" in shown[1].splitlines()[0]]
OPTIONAL = {"transformers", "accelerate", "lightning"}


def lacking(code: str) -> list[str]:
    """Return the optional packages that a block imports and that are not installed."""
    imported = " ".join(re.findall(r"^ *(?:from|import) .*", code, re.MULTILINE))
    words = OPTIONAL & set(re.findall(r"\w+", imported))
    return [name for name in words if importlib.util.find_spec(name) is None]


BLOCKS = [
    pytest.param(
        code,
        output,
        id=f"{name}-{number}",
        marks=pytest.mark.skipif(bool(lacking(code)), reason=f"lacks {lacking(code)}"),
    )
    for number, (name, code, output) in enumerate(SHOWN)
    if (name, code, output) not in [*OF_RANKS, *SCRIPTS]
]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "output"), BLOCKS)
@pytest.mark.filterwarnings("ignore:tensors outlive:ResourceWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is:FutureWarning")  # Lightning
@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many:UserWarning")
def test_blocks_print_what_is_shown(code, output, capsys):
    exec(code, {"__name__": "shown"})
    assert not output or capsys.readouterr().out == output


@pytest.mark.slow
@pytest.mark.skipif(0 < torch.cuda.device_count() < 4, reason="each of 4 ranks takes a GPU")
def test_the_script_of_ranks_runs(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(OF_RANKS[0][1])
    exit_code, output = run_ranks(path, num_processes=4)
    epochs = [f"epoch {epoch}: shares (1, 5, 5, 5), 4 batches" for epoch in range(2)]
    assert exit_code == 0 and output.splitlines() == epochs, output


def changed(script, diff, back=False):
    """Return ``script`` with the changes of ``diff`` applied; with ``back``, undone."""
    for hunk in re.findall(r"(?:^-.*\n)*(?:^[+].*\n)+", diff, re.MULTILINE):
        old, new = (
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] == sign)
            for sign in "-+"
        )
        if not old:  # lines are only added, before the line that follows the hunk
            (old,) = re.findall(re.escape(hunk) + r"(?: (.*\n)|(?=-|\Z))", diff)
            new += old
        before, after = (new, old) if back else (old, new)
        assert not before or script.count(before) == 1, before
        script = script.replace(before, after) if before else script
    return script


def losses_of(script, capsys, num_devices=4):
    with emulate_devices(num_devices, as_cuda=True):
        exec(script, {"__name__": "__main__"})
    return [float(loss) for loss in re.findall("loss (.+)", capsys.readouterr().out)]


@pytest.mark.slow
def test_the_training_script_before_and_after(tmp_path, monkeypatch, capsys):
    [(page, script, _)] = SCRIPTS
    monkeypatch.chdir(tmp_path)
    to_stock, to_loss_on_each = re.findall(r"```diff\n(.*?)```", TEXTS[page], re.DOTALL)
    exact = script.replace("DTYPE):", "enabled=False):")
    assert exact != script
    expected = losses_of(changed(exact, to_stock, back=True), capsys)
    assert len(expected) == 3 and expected[-1] < expected[0] / 2
    for ours in (exact, changed(exact, to_loss_on_each)):
        (tmp_path / "checkpoint.pt").unlink()
        assert losses_of(ours, capsys) == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
def test_the_training_script_resumes(tmp_path, monkeypatch, capsys):
    """Train in half precision, end after each epoch; the checkpoint has the result of "auto"."""
    [(_, script, _)] = SCRIPTS
    monkeypatch.chdir(tmp_path)
    expected = losses_of(script.replace("DTYPE):", "enabled=False):"), capsys)
    (tmp_path / "checkpoint.pt").unlink()
    half = script.replace("DTYPE = torch.bfloat16", "DTYPE = torch.float16")
    killed = half.replace("first_epoch, EPOCHS", "first_epoch, first_epoch + 1")
    losses = [loss for _ in range(3) for loss in losses_of(killed, capsys)]
    assert losses == pytest.approx(expected, rel=0.2)  # batches are drawn again
    saved = torch.load(tmp_path / "checkpoint.pt", map_location="cpu", weights_only=True)
    assert saved["epoch"] == 2 and saved["model"]._metadata[""]["auto_split"]["gpu0_bsz"] < 4


def test_commands_that_are_shown_exist():
    shown = re.findall(r"^balanced-dp (\w+)(.*)", "\n".join(TEXTS.values()), re.MULTILINE)
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert commands == set(dict(shown))
    for command, line in shown:
        done = CliRunner().invoke(app, [command, "--help"])
        assert done.exit_code == 0
        for option in re.findall(r"--\w[\w-]*", line.partition("#")[0].partition(".py")[0]):
            assert option in done.output


@pytest.mark.parametrize(
    "path",
    [*PAGES, *ROOT.glob("[!.]*/README.md"), *ROOT.glob("C*.md"), *ROOT.glob("docs/*/*.md")],
    ids=str,
)
def test_files_that_are_linked_exist(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target


def numbers_in(text):
    return [*map(float, re.findall(r"(?<![-\w])[\d.]*\d", text))]


@pytest.mark.slow
def test_the_picture_and_the_largest_batches():
    report, apart = before_and_after.measured(), before_and_after.measured(gather=False)
    figures = re.compile(r">([^<>]*(?:[MG]iB|samples|model)[^<>]*)<")
    drawn = figures.findall(before_and_after.picture(report, apart))
    assert figures.findall(before_and_after.PATH.read_text("utf-8")) == drawn != []
    options = [report.largest_batch(option) for option in (report.even, report.best)]
    options.append(apart.largest_batch(apart.best))
    assert (options[1].chunk_sizes[0], options[2].speed) == (0, 1)
    gib, speed = [report.capacity_bytes[0] >> 30, RESERVE >> 30], round(options[1].speed, 2)
    numbers = {32, 256, *gib, 0, speed, *(option.batch_size for option in options)}
    for text in READMES:
        [told] = re.findall(r"GPT-2 small.*?gather=False", text, re.DOTALL)
        assert {*numbers_in(told)} == numbers


@pytest.mark.slow
def test_the_table_of_the_demo():
    """The demo trains on a text of Python's library, so its figures vary with Python's version."""
    table, *_ = answer(run_demo(emulate=True)[1])
    [percent] = re.findall(r"memory varies by up to ([\d.]+) %", TEXTS["README.md"])
    for text in READMES:
        shown = dict(re.findall(r"^ (\w[\w, ]*?) {2,}(.*)$", text, re.MULTILINE))
        for name, *cells in table.rows:
            own, ours = (numbers_in(line) for line in (shown[name], " ".join(cells)))
            assert own == pytest.approx(ours, rel=float(percent) / 100, abs=0.1)
