"""Training scripts as people write them: same losses on emulated GPUs, and plans that hold."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from balanced_dp import Report
from balanced_dp.cli.commands import app
from balanced_dp.report import load_report
from balanced_dp.split import even_share

from ..laws import best_gpu0_bsz
from ..processes import python

SCRIPTS = Path(__file__).with_name("scripts")


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d{6,})", output)]


@functools.cache
def losses_on_cpu(script: str) -> list[float]:
    done = python(script, cwd=SCRIPTS)
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


SLOW = pytest.mark.slow
OFTEN, RARELY = ("xl.py",), ("gpt.py", "xl.py --own", "ema.py", "hf.py")


@pytest.mark.parametrize(
    "gpu0_bsz", ["auto", pytest.param("1", marks=SLOW), pytest.param("even", marks=SLOW)]
)
@pytest.mark.parametrize(
    "script", [*OFTEN, *(pytest.param(script, marks=SLOW) for script in RARELY)]
)
def test_losses_are_those_of_one_device(script, gpu0_bsz, tmp_path):
    script, *arguments = script.split()
    command = ["-m", "balanced_dp", "run", "--devices", "4", "--gpu0-bsz", gpu0_bsz]
    done = python(*command, str(SCRIPTS / script), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on 4 emulated GPUs" in done.stderr
    expected = losses_on_cpu(script)
    assert len(expected) >= 10
    assert losses(done.stdout) == pytest.approx(expected, abs=1e-4, rel=0)


@pytest.fixture
def report_of(tmp_path, monkeypatch):
    """Run a script in this process, with shapes only, and return its report."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(arguments: str, memory: str | None, gpu0_bsz: str = "auto", steps: int = 8) -> Report:
        script, *rest = arguments.split()
        options = f"--symbolic --devices 4 --gpu0-bsz {gpu0_bsz} --steps {steps} --for headroom"
        options += "" if memory is None else f" --memory {memory}"
        file = tmp_path / "report.json"
        file.unlink(missing_ok=True)
        given = ["run", *options.split(), "--json", str(file), str(SCRIPTS / script), *rest]
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 0, done.stderr
        return load_report(file)

    return run


GPT = "gpt.py --n-embd 256 --n-head 4 --block-size 256 --vocab 2000 --iters 8 --accumulate 1"


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp:FutureWarning")
@pytest.mark.parametrize(
    ("arguments", "batch_size", "memory"),
    [
        pytest.param(GPT, 16, "8GiB", id="gpt-16", marks=SLOW),
        pytest.param(GPT, 37, "8GiB", id="gpt-37", marks=SLOW),
        pytest.param("ema.py", 22, None, id="ema-22"),
    ],
)
def test_the_best_option_is_the_best_of_all(arguments, batch_size, memory, report_of):
    command = f"{arguments} --batch {batch_size}"
    report = report_of(command, memory)
    even = even_share(batch_size, 4)
    peaks = {even: max(report.even.peak_bytes)}
    for value in range(even):
        options = report_of(command, memory, str(value), 4).options
        [peaks[value]] = [max(o.peak_bytes) for o in options if o.chunk_sizes[0] == value]
    assert peaks[report.best.chunk_sizes[0]] == max(report.best.peak_bytes)
    assert report.best.chunk_sizes[0] == best_gpu0_bsz(peaks)


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp:FutureWarning")
def test_one_device_has_no_choice(monkeypatch):
    """A search for its split ended the script with a ValueError."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = "run --symbolic --devices 1 --steps 3"
    done = CliRunner().invoke(app, [*options.split(), str(SCRIPTS / "ema.py")])
    assert done.exit_code == 0, done.stderr
