"""Test ``balanced-dp run``, which runs a script unchanged and reports what memory it needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from balanced_dp.cli.commands import app
from balanced_dp.cli.run import _place, run_and_measure
from balanced_dp.report import load_report

from .. import cuda_stand_in, processes

SCRIPT = """
import sys
import torch
from torch import nn

num_steps, batch_size, wraps = int(sys.argv[1]), int(sys.argv[2]), "wrap" in sys.argv
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() and "cpu" not in sys.argv else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 512)).to(device)
if wraps:
    model = nn.DataParallel(model)
elif "one" in sys.argv:
    model = nn.DataParallel(model, device_ids=[0])
if "equal" in sys.argv:
    is_even = lambda _, inputs: 1 // (4 * len(inputs[0]) == batch_size) and None
    model.module[0].register_forward_pre_hook(is_even)
shape = [] if "scalar" in sys.argv else [batch_size, 64]
if not shape:
    model.module.register_forward_pre_hook(lambda _, inputs: inputs[0].expand(8, 64))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(num_steps):
    inputs = torch.randn(shape, device="cpu").to(device)
    loss = model(inputs).square().mean()
    loss.backward()
    if "plain" not in sys.argv:
        optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.7f}")
if "fail" in sys.argv:
    raise KeyError("the key")
if "memory" in sys.argv:
    print(torch.cuda.get_device_properties(1).total_memory)
if "branch" in sys.argv and (loss < 1 or loss.item() < 1):
    print("small")
if "exit" in sys.argv or "parse" in sys.argv:
    sys.exit(5 if "exit" in sys.argv else 2)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a training script to a temporary folder, change to the folder, and return the path."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, "utf-8")
    return path


def run(*arguments: str) -> Result:
    """Run ``balanced-dp run`` in this process, where torch is imported already."""
    ended = CliRunner().invoke(app, ["run", *arguments])
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return ended


def measured(script: Path, *words: str, **options: Any) -> tuple[int, Any, list[Any]]:
    """Call ``run_and_measure`` for a script in this process, without the command line."""
    return run_and_measure(str(script), words or ("9", "256", "wrap"), **options)


def test_the_answer_for_a_script(script):
    done = run("--memory", "2GiB", "train.py", "9", "256", "wrap")
    assert done.exit_code == 0, done.stderr
    steps = re.findall(r"step (\d) loss \d\.\d{7}\n", done.stdout)
    assert steps == [*"012345678"] and len(done.stdout.splitlines()) == 9
    for part in (
        "balanced-dp: running train.py on 4 emulated GPUs\ntrain.py, batches of 256, 4 devices\n",
        "\nWith the even split of nn.DataParallel, the batch fits: device 0 is the fullest, with ",
        "# train.py:11: model = nn.DataParallel(model)\n# option 1\nmodel = nn.DataParallel(model)",
        "# option 2\nfrom balanced_dp import BalancedDataParallel\nmodel = BalancedDataParallel(",
        "on all devices). To try, change the script and run it again.\n\nBalancedCriterion",
        "What each device holds with nn.DataParallel(model)",
        "training only; no autocast. 1.00 GiB of each is kept free for CUDA's context. Against",
    ):
        assert part in done.stderr
    assert "--for batch" not in done.stderr  # which run does not have


def test_the_report_is_written(script):
    files = ("--json", "run.json", "--html", "run.html")
    done = run(*files, "--symbolic", "--devices", "3", "train.py", "8", "64", "wrap")
    assert done.exit_code == 0, done.stderr
    report = load_report("run.json")
    assert report.workload == "train.py"
    assert report.batch_size == 64 and len(report.capacity_bytes) == 3
    assert report.goal == "headroom" and report.best is not report.even
    assert not report.has_capacity and "add --memory before the script, such" in done.stderr
    assert "fits:" not in done.stderr and "%" not in done.stderr
    assert CliRunner().invoke(app, ["report", "run.json"]).stdout in done.stderr
    assert "<svg" in Path("run.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("train.py 6 64 wrap exit", 5, "With option 1, device "),
        ("train.py 0 64 wrap", 0, "Nothing was measured: the script ran no forward pass"),
        ("train.py 4 64", 0, "The script splits no batches; add model = torch.nn.DataParallel(m"),
        ("train.py 4 64 wrap scalar", 0, "No input was split, or device_ids has one device; leave"),
        ("train.py 4 64 one", 0, "has one device; leave it out: train.py:13"),
        ("train.py 4 64 cpu", 0, "splits no batches; add model = torch.nn.DataParallel(model.cuda"),
        ("--devices 1 train.py 4 64 wrap", 0, "On one device there are no splits to compare;"),
        ("train.py 1 64 wrap", 0, "with the largest batch; the script ran 1, without optimizer"),
        ("--html no.html train.py 1 64 wrap", 1, "no.html was not written: there is no report"),
        ("train.py 4 1 wrap", 0, "batches of 1, 4 devices"),
        ("--json no.json train.py 3 64 fail", 1, "no.json was not written: there is no report"),
        ("train.py 9 64 wrap equal", 1, "was split into (0, 22, 21, 21). To rule out the"),
        ("--symbolic train.py 9 64 wrap equal", 1, "ZeroDivisionError"),
        ("train.py 2 64 wrap fail", 1, "did not end in 2 steps; options may change.\n"),
        ("train.py 4 64 plain", 0, "No torch.optim.Optimizer took a step: these are the peaks"),
        ("--steps 3 train.py 99999 256 wrap", 0, "options may change: raise --steps to 14.\n"),
        ("--for headroom --memory 1GiB --reserve 0 train.py 9 256 wrap", 0, "). With option 1, "),
        ("--memory 4400KiB --reserve 0 train.py 9 256 wrap", 0, "the batch does not fit: device 0"),
        ("--memory 1MiB --reserve 0 train.py 5 64 wrap", 0, "spread=True divides them."),
        ("--gpu0-bsz 9 --memory 4MiB --reserve 0 train.py 5 256 wrap", 0, "try --gpu0-bsz auto."),
        ("--steps 4 -m train 9 64 wrap --memory its", 0, "train, batches of 64, 4 devices"),
        ("--symbolic train.py 4 64 wrap branch", 0, "only: floats that the script reads are NaN"),
        ("--memory 1027MiB train.py 8 2048 wrap memory", 0, "A batch of 2048 does not fit: with "),
        ("train.py 1 4 parse --steps=3", 2, "--steps=3 was passed to the script; for run, place"),
    ],
)
def test_scripts_that_end_otherwise(command, code, says, script):
    done = run(*command.split())
    assert done.exit_code == code, done.stderr
    assert says in done.stderr
    assert "balanced_dp/" not in done.stderr or "equal" in command  # no frames of ours
    assert ("memory in " in done.stderr) == (" 0 64" not in command)
    assert ("The script failed after a" in done.stderr) == (command == "train.py 9 64 wrap equal")
    if "fail" in command:
        assert f'File "{script}", line' in done.stderr and "KeyError: 'the key'" in done.stderr
    if "--steps" in command and "99999" in command:
        assert len(done.stdout.splitlines()) == 3
    if "wrap memory" in command:  # the capacity is reported to the script, but not enforced
        assert done.stdout.splitlines()[-1] == str(1027 * 2**20)
        assert "device 0 needs" in done.stderr and "and lacks" in done.stderr
    if "branch" in command:
        assert "loss nan" in done.stdout and "small" not in done.stdout


@pytest.mark.skipif(cuda_stand_in.WHY_NOT is not None, reason=str(cuda_stand_in.WHY_NOT))
def test_accelerators_are_used(script, capsys):
    with cuda_stand_in.opened() as stand_in:
        device = str(stand_in.devices[0])
        script.write_text(SCRIPT.replace('device = "cuda" if', f'device = "{device}" if 1 or'))
        exit_code, report, _ = measured(script)
        assert not stand_in.races()
        with stand_in.limited(0, 2**20):
            [*_, advice] = measured(script, reserve=0)[2]
    assert capsys.readouterr().err.startswith(f"balanced-dp: running {script} on 4 GPUs\n")
    assert (exit_code, report.mode) == (0, "real")
    assert re.search(r"GPUs ran out .* add --memory (\d+MiB,?){4} --symbolic --steps 14", advice)
    assert report.capacity_bytes == (report.capacity_bytes[0],) * 4
    assert min(option.chunk_sizes[0] for option in report.options) < report.even.chunk_sizes[0]


SCATTER = "lambda self, *given: nn.parallel.scatter_gather.scatter_kwargs(*given)"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("balanced_dp.BalancedDataParallel('auto', model)", ""),
        ("balanced_dp.BalancedDataParallel(3, model, spread=True)", ", spread=True"),
        ("Balanced(module=model, gpu0_bsz=len('abc'))", ""),
        ("Balanced(None, model, device_weights=[1, 2, 2, 2])", None),
        ("Balanced(None, model, device_ids=[0, 1, 0])", None),
        (f"type('Own', (nn.DataParallel,), {{'scatter': {SCATTER}}})(model)", None),
    ],
)
def test_a_script_that_is_balanced_already(call, arguments, script):
    imports = "import sys, balanced_dp\nfrom balanced_dp import BalancedDataParallel as Balanced"
    text = call.replace("model, ", "\n        model,  # in several lines\n        ")
    script.write_text(SCRIPT.replace("import sys", imports).replace("nn.DataParallel(model)", text))
    exit_code, report, parts = measured(script)
    assert exit_code == 0
    if arguments is None:
        assert "The splits were not changed: the script uses its own DataParallel," in parts[-1]
        return
    assert len({option.chunk_sizes for option in report.options}) >= 3
    assert any("spread=True" in text for text in report.not_tried) != report.best.spread
    assert report.wrapped_at == (f"train.py:12: model = {call}",)
    assert report.best.arguments == arguments


@pytest.mark.parametrize(("num_steps", "value", "found"), [("4", 7, [7, 64]), ("3", 90, [64])])
def test_the_value_that_is_asked_for(num_steps, value, found, script):
    _, report, _ = measured(script, num_steps, "256", "wrap", gpu0_bsz=value)
    assert [option.chunk_sizes[0] for option in report.options] == found
    assert ("90 has no effect: it must be below 64," in "".join(report.notes)) == (value == 90)


def test_a_model_that_is_called_by_forward(script):
    """GPT2-Chinese does; then the table had the numbers of another split."""
    _, expected, _ = measured(script, "9", "2048", "wrap")
    script.write_text(SCRIPT.replace("loss = model(inputs)", "loss = model.forward(inputs)"))
    _, report, _ = measured(script, "9", "2048", "wrap")
    by_split = {option.chunk_sizes: option.peak_bytes for option in expected.options}
    assert {o.chunk_sizes for o in report.options} == {*by_split}
    assert report.best.chunk_sizes == expected.best.chunk_sizes
    for option in report.options:
        assert option.peak_bytes == pytest.approx(by_split[option.chunk_sizes], rel=0.1)


def test_where_a_model_is_wrapped(script):
    assert _place((str(script), 11)) == "train.py:11: model = nn.DataParallel(model)"
    assert f"{pytest.__file__}:1, a line of a library: " in _place((pytest.__file__, 1))


def test_warnings_that_a_script_hides_are_repeated(script):
    """The loss of overhaul-distillation is averaged, and the script ignores all warnings."""
    hook = "model.register_forward_hook(lambda m, x, y: (y * y.sigmoid()).sum())\nif wraps:"
    hides = f"import warnings\nwarnings.simplefilter('ignore')\n{hook}"
    script.write_text(SCRIPT.replace("if wraps:", hides))
    *_, note = measured(script, "4", "64", "wrap")[1].notes
    assert "Warning: output (the whole) of Sequential" in note and "sum of products" in note


@pytest.mark.parametrize("evaluates", [False, True])
def test_chunks_of_one_with_batch_norm(evaluates, script):
    """CenterNet's best value is 1 if the statistics are frozen; 2 was recommended.

    Otherwise batch norm refuses it, and the search ends without it.
    """
    norm = f"256, 512), nn.BatchNorm1d(512){'.eval()' * evaluates})"
    script.write_text(SCRIPT.replace("256, 512))", norm))
    _, report, _ = measured(script, "20", "64", "wrap")
    assert any(1 in option.chunk_sizes for option in report.options) == evaluates
    assert ["gpu0_bsz=1 was not tried" in note for note in report.notes] == [True] * (not evaluates)
    assert measured(script, "4", "8", "wrap", gpu0_bsz=None)[1].notes == ()  # nothing was searched


@pytest.mark.slow
def test_what_the_guide_shows_is_printed():
    root = Path(__file__).parents[2]
    guide = (root / "docs/run.md").read_text("utf-8")
    [options] = re.findall(r"GPT-2 small \(`(--n-layer [^`]*)`\)", guide)
    [shown] = re.findall(r"```\n(With the even split .*?)\n```", guide, re.DOTALL)
    command = ["--memory", "11GiB", "--symbolic", "--steps", "8", "tests/cli/scripts/gpt.py"]
    done = processes.python("-m", "balanced_dp", "run", *command, *options.split(), cwd=root)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stderr.split())
    for part in re.split(r"\n\n|(?<=\.)\n", shown):
        assert " ".join(part.split()) in printed
